"""One tree of arrays as another one: layers stacked or taken apart, the stacked axis elsewhere, everything else as it
is. Integers only.

A family's table has the same lines scanned and unscanned; only its stacks differ. So what a layer's arrays are called
in either layout follows from the two lists of stacks alone, and holds for the weights, for the optimizer's moments and
for the state of modules, which repeat the weights' paths below roots of their own:

    scanned     opt_state.0.mu.params. decoder.layers   .mlp.wi_0.kernel     (embed, layers, mlp)
    unscanned   opt_state.0.mu.params. decoder.layers_7 .mlp.wi_0.kernel     (embed, mlp)
                root                   the stack        the rest
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from weightbeam.model_mappings.axes import Axes, Side
from weightbeam.model_mappings.cells import Part
from weightbeam.model_mappings.rules import ABSENT, PARAMS, Rule, Stack, Window

Path = tuple[str, ...]
Shape = tuple[int, ...]
Place = tuple[int, ...]  # an index on the axes of a stack
Layer = tuple[Path, Place]  # where a layer lay: the target of its stack, and its place in it


class Held(NamedTuple):
    """An array of the old tree."""

    key: str
    shape: Shape


NO_LAYER = (
    "its layers have none of these arrays, and stacked there are zeros of which nothing here tells the type; "
    "convert the release, or keep the layers apart (--scan_layers false)"
)
MODULES = "nnx_aux"  # the root of the state of NNX modules, whose layers are stacked on axis 0


class StackingError(ValueError):
    """An array that can't be stacked, or taken apart; the message says why. `path` is the array's."""

    def __init__(self, path: Path, message: str):
        super().__init__(message)
        self.path = path


class RestackError(ValueError):
    """All the arrays of a tree that can't be stacked, or taken apart.

    Attributes:
      faults: one for each.
    """

    def __init__(self, faults: Sequence[StackingError]):
        super().__init__("; ".join(map(str, faults)))
        self.faults = tuple(faults)


class Copy(Part):
    """What arrays of one checkpoint make of an array of another one, element for element.

    Attributes:
      keys: the sources' keys, None where there is none; the shape of this array is the axes that they are stacked on.
    """

    def __init__(
        self, keys: np.ndarray, sizes: Mapping[str, int], left: Side, right: Side, window: Window = (), at: int = 0
    ):
        rule = Rule("", "", window, Axes(left, right), (), None, (), {}, None)
        places = [ABSENT if key is None else number for number, key in enumerate(keys.flat)]
        numbers = np.array(places).reshape(keys.shape)
        super().__init__(Stack("", "", numbers, (None,) * keys.ndim, (rule,)), rule, dict(sizes), at)
        self.keys = keys

    def tensor(self, layer: tuple[int, ...], name: tuple[int, ...]) -> str:
        """The key of a cell's source."""
        return str(self.keys[layer])

    @functools.cached_property
    def tensors(self) -> tuple[str, ...]:
        """The keys of all sources."""
        return tuple(str(self.keys[place]) for place in self.places)

    @property
    def sides(self) -> list[tuple[str, ...] | None]:
        """By the array's axes what each is of the sources' ones; None of those on which sources are stacked."""
        keyed = range(self.scan_axis, self.scan_axis + self.keys.ndim)
        words = iter(self.rule.axes.right)
        return [None if axis in keyed else next(words) for axis in range(len(self.shape))]


def _words(shape: Shape) -> tuple[dict[str, int], Side]:
    return {f"d{axis}": n for axis, n in enumerate(shape)}, tuple((f"d{axis}",) for axis in range(len(shape)))


def same(key: str, shape: Shape, order: Sequence[int] | None = None) -> Copy:
    """An array as it is, or with its axes in another order: `(embed, layers, mlp)` by (1, 0, 2) is `(layers, embed,
    mlp)`.
    """
    sizes, axes = _words(shape)
    return Copy(
        np.array(key, dtype=object), sizes, axes, axes if order is None else tuple(axes[axis] for axis in order)
    )


def stacked(keys: np.ndarray, shape: Shape, at: int) -> Copy:
    """Arrays of one shape, `(embed, mlp)`, side by side on new axes at `at`: `(embed, layers, mlp)`."""
    sizes, axes = _words(shape)
    return Copy(keys, sizes, axes, axes, at=at)


def taken(key: str, shape: Shape, at: int, index: Sequence[int]) -> Copy:
    """One layer of a stacked array: `[:, 7]` of `(embed, layers, mlp)` is `(embed, mlp)`; `index` counts on the axes
    from `at` on.
    """
    sizes, axes = _words(shape)
    left = tuple(() if at <= axis < at + len(index) else word for axis, word in enumerate(axes))
    window = (*[slice(None)] * at, *(slice(i, i + 1) for i in index))
    return Copy(np.array(key, dtype=object), sizes, left, tuple(word for word in left if word), window)


@dataclasses.dataclass(frozen=True)
class Moved:
    """An array of the new tree.

    Attributes:
      path: in the new tree.
      like: path of an array of the old tree that it is made of; they begin alike.
      part: what it is made of.
      axes: the stacked axes that it has.
    """

    path: Path
    like: Path
    part: Copy
    axes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Stacks:
    """The stacks of a layout.

    Attributes:
      by_target: by where the arrays of a stack lie, such as `("decoder", "layers")`.
      axis: where layers are stacked in a weight.
      collections: of variables that aren't parameters, such as DeepSeek V4's router biases; their layers are stacked on
        axis 0.
    """

    by_target: Mapping[Path, Stack]
    axis: int
    collections: frozenset[str] = frozenset()

    @classmethod
    def of(cls, stacks: Iterable[Stack], axis: int) -> Stacks:
        """The stacks of a family's table."""
        stacks = list(stacks)
        by_target = {
            tuple(stack.target.split("/")): stack for stack in stacks if stack.target and stack.collection == PARAMS
        }
        return cls(by_target, axis, frozenset(stack.collection for stack in stacks) - {PARAMS})

    def find(self, path: Path) -> tuple[int, Path] | None:
        """Where a stack's target stands in a path, the longest that fits; None where there is none."""
        longest = max(map(len, self.by_target), default=0)
        for start in range(len(path)):
            for length in range(min(longest, len(path) - start - 1), 0, -1):
                if (target := path[start : start + length]) in self.by_target:
                    return start, target
        return None

    def has(self, target: Path, stack: Stack) -> bool:
        """Whether the same layers lie at the same place in this layout, too."""
        return target in self.by_target and np.array_equal(self.by_target[target].layers, stack.layers)

    def at(self, root: Path, rank: int) -> int:
        """Where the layers of an array are stacked that has `rank` axes without them."""
        return 0 if MODULES in root or self.collections.intersection(root) else min(self.axis, rank)


def restack(arrays: Mapping[Path, Held], before: Stacks, after: Stacks) -> list[Moved]:
    """The arrays of a tree in another layout, in an order of their own; each array of the old tree is used once and
    whole.

    Raises:
      RestackError: arrays aren't stacked as the layout says, or layers of them are missing; all of them.
    """
    where: dict[tuple[str, int], Layer] = {}  # by the source's prefix of a stack, and the layer
    for target, stack in before.by_target.items():
        if not after.has(target, stack):
            where |= {(stack.source, layer): (target, index) for index, layer in stack.places}
    restacking = _Restacking(arrays, before, after)
    moving: dict[Path, list[tuple[Path, Path]]] = {}  # a stack's target -> (root, rest) of each of its arrays
    for path in arrays:
        found = before.find(path)
        if found is None or after.has(found[1], before.by_target[found[1]]):
            restacking.keep(path, found)
            continue
        start, target = found
        moving.setdefault(target, []).append((path[:start], path[start + len(target) :]))
    for target, stack in after.by_target.items():
        numbers = [layer for _, layer in stack.places]
        layers = [where[one] for layer in numbers if (one := (stack.source, layer)) in where]
        if _is_empty(target, stack, before):
            restacking.faults.append(StackingError(target, NO_LAYER))
        if before.has(target, stack) or not layers or len(layers) < len(numbers):
            continue
        for root, rest in moving.get(layers[0][0], ()):
            restacking.move(root, rest, target, layers, stack)
    if restacking.faults:
        # a stacked array is taken apart many times
        raise RestackError(list({fault.path: fault for fault in restacking.faults}.values()))
    return restacking.made


class _Restacking:
    """The arrays of a new tree, made one after the other.

    Attributes:
      arrays: of the old tree.
      before, after: the stacks of both.
      made: what is made by now.
      faults: of the arrays that can't be.
    """

    def __init__(self, arrays: Mapping[Path, Held], before: Stacks, after: Stacks):
        self.arrays, self.before, self.after = arrays, before, after
        self.made: list[Moved] = []
        self.faults: list[StackingError] = []

    def keep(self, path: Path, found: tuple[int, Path] | None) -> None:
        """Makes an array that keeps its place; `found` as of `Stacks.find`."""
        with self._collecting():
            self.made.append(self._kept(path, found))

    def move(self, root: Path, rest: Path, target: Path, layers: Sequence[Layer], stack: Stack) -> None:
        """Makes an array of a stack of the new tree.

        Args:
          root, target, rest: its path.
          layers: those of the stack, in its order, where they lay.
          stack: the new one.
        """
        with self._collecting():
            if not stack.layers.ndim:
                moved = self._taken(root, rest, target, layers[0])
            elif self.before.by_target[layers[0][0]].layers.ndim:
                moved = self._regrouped(root, rest, target, layers, stack)
            else:
                moved = self._gathered(root, rest, target, layers, stack)
            self.made.append(moved)

    @contextlib.contextmanager
    def _collecting(self) -> Iterator[None]:
        """Context manager: goes on after a fault."""
        try:
            yield
        except StackingError as e:
            self.faults.append(e)

    def _kept(self, path: Path, found: tuple[int, Path] | None) -> Moved:
        """An array that keeps its place; its stacked axes may move."""
        key, shape = self.arrays[path]
        count = self.before.by_target[found[1]].layers.ndim if found else 0
        if not found or not count:
            return Moved(path, path, same(key, shape))
        rank = len(shape) - count
        here, there = self.before.at(path[: found[0]], rank), self.after.at(path[: found[0]], rank)
        _check(path, shape, here, self.before.by_target[found[1]])
        others = [axis for axis in range(len(shape)) if not here <= axis < here + count]
        order = [*others[:there], *range(here, here + count), *others[there:]]
        return Moved(path, path, same(key, shape, None if here == there else order), tuple(range(there, there + count)))

    def _gathered(self, root: Path, rest: Path, target: Path, layers: Sequence[Layer], stack: Stack) -> Moved:
        """The layers of an array that lay each by itself, stacked."""
        paths = [(*root, *one, *rest) for one, _ in layers]
        shape = self._shape_of(paths)
        keys = np.full(stack.layers.shape, None, dtype=object)
        for (place, _), path in zip(stack.places, paths, strict=True):
            keys[place] = self.arrays[path].key
        at = self.after.at(root, len(shape))
        return Moved(
            (*root, *target, *rest), paths[0], stacked(keys, shape, at), tuple(range(at, at + stack.layers.ndim))
        )

    def _taken(self, root: Path, rest: Path, target: Path, layer: Layer) -> Moved:
        """One layer of a stacked array, by itself."""
        held, index = layer
        path = (*root, *held, *rest)
        stack, (key, shape) = self.before.by_target[held], self.arrays[path]
        at = self.before.at(root, len(shape) - stack.layers.ndim)
        _check(path, shape, at, stack)
        return Moved((*root, *target, *rest), path, taken(key, shape, at, index))

    def _regrouped(self, root: Path, rest: Path, target: Path, layers: Sequence[Layer], stack: Stack) -> Moved:
        """Some layers of stacked arrays, stacked as they were or otherwise: those from one on that follow each other in
        each of them. A place without a layer stays one.

        layers          (embed, 4, mlp)          of  layers [:, 8:12]
        local_layers    (embed, cycles, 3, mlp)  of  layer_0, layer_1, layer_2  (embed, cycles, mlp)
        layer_0         (embed, cycles, mlp)     of  local_layers [:, :, 0]
        """
        held, path = layers[0][0], (*root, *layers[0][0], *rest)
        shape, count = self.arrays[path].shape, self.before.by_target[layers[0][0]].layers.ndim
        here, there = self.before.at(root, len(shape) - count), self.after.at(root, len(shape) - count)
        _check(path, shape, here, self.before.by_target[held])
        places = {place: layer for (place, _), layer in zip(stack.places, layers, strict=True)}
        taken_from, starts = _follow(path, places, stack.layers.shape, self.before.by_target[held].layers.shape)
        apart = [axis for axis, old in enumerate(taken_from) if old is None]
        keys = self._keys_apart(root, rest, layers, stack.layers.shape, apart)
        sizes, axes = _words(shape)
        window: list[slice] = [slice(None)] * (here + count)
        for old, first in enumerate(starts):
            size = stack.layers.shape[taken_from.index(old)] if old in taken_from else 1
            sizes[f"d{here + old}"] = size
            window[here + old] = slice(first, first + size)
        fixed = {here + old for old in range(count) if old not in taken_from}
        left = tuple(() if axis in fixed else word for axis, word in enumerate(axes))
        others = [axis for axis in range(len(shape)) if not here <= axis < here + count]
        free = [here + old for old in taken_from if old is not None]
        order = [*others[:there], *free, *others[there:]]
        at = there + (min(apart) if apart else 0)
        part = Copy(keys, sizes, left, tuple(axes[axis] for axis in order), tuple(window), at)
        return Moved((*root, *target, *rest), path, part, tuple(range(there, there + stack.layers.ndim)))

    def _shape_of(self, paths: Sequence[Path]) -> Shape:
        """The one shape of arrays that become one. Raises StackingError where one is missing, or has another shape."""
        if missing := [path for path in paths if path not in self.arrays]:
            raise StackingError(
                paths[0], f"{len(missing)} of its {len(paths)} layers are missing, such as {'.'.join(missing[0])}"
            )
        shape = self.arrays[paths[0]].shape
        if other := [path for path in paths if self.arrays[path].shape != shape]:
            raise StackingError(
                paths[0],
                f"its layers can't be stacked: {shape} here, {self.arrays[other[0]].shape} in {'.'.join(other[0])}",
            )
        return shape

    def _keys_apart(
        self, root: Path, rest: Path, layers: Sequence[Layer], shape: Shape, apart: Sequence[int]
    ) -> np.ndarray:
        """The old arrays' keys, on the axes of `shape` on which each index has one of its own. Raises StackingError
        where one is missing, or has another shape.
        """
        chosen = [layers[0][0]]
        if apart:  # then every place has a layer
            first = tuple(slice(None) if axis in apart else 0 for axis in range(len(shape)))
            targets = np.empty(len(layers), dtype=object)
            targets[:] = [held for held, _ in layers]
            chosen = np.array(targets.reshape(shape)[first], dtype=object).flat
        paths = [(*root, *held, *rest) for held in chosen]
        self._shape_of(paths)
        keys = np.array([self.arrays[path].key for path in paths], dtype=object)
        return keys.reshape([shape[axis] for axis in apart])


def _is_empty(target: Path, stack: Stack, before: Stacks) -> bool:
    """Whether a stack has places, none of them with a layer, where the old layout has layers with such arrays."""
    sources = {other.source for other in before.by_target.values()}
    return not before.has(target, stack) and stack.source in sources and not [*stack.places]


def _follow(
    path: Path, places: Mapping[Place, Layer], shape: Shape, old_shape: Shape
) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
    """For each axis of `shape`, on which layers are stacked, the old arrays' of which it is a range; None where each index
    has an old array of its own. And where on each of the old axes the range begins.

    Args:
      path: an array's, for the message.
      places: all that have a layer.
      old_shape: on which the layers were stacked.

    Raises:
      StackingError: the layers don't follow each other so.
    """
    came = _came(places, len(shape), len(old_shape))
    origin, (_, first) = next(iter(places.items()))
    axis_of = {old: axis for axis, old in enumerate(came) if old is not None}
    starts = tuple(at - origin[axis_of[old]] if old in axis_of else at for old, at in enumerate(first))

    def place(index: Place) -> Layer | None:
        """Where the layer at `index` must have been."""
        apart = tuple(at if old is None else begin for at, old, begin in zip(index, came, origin, strict=True))
        along = tuple(start + index[axis_of[old]] if old in axis_of else start for old, start in enumerate(starts))
        return (places[apart][0], along) if apart in places else None

    apart = [axis for axis, old in enumerate(came) if old is None]
    is_together = not apart or apart == list(range(apart[0], apart[-1] + 1))
    is_whole = len(places) == math.prod(shape)
    is_inside = all(0 <= starts[old] <= old_shape[old] - shape[axis] for old, axis in axis_of.items())
    followed = all(place(index) == found for index, found in places.items())
    if not (is_together and is_inside and followed and (is_whole or not apart)):
        raise StackingError(
            path,
            "its layers that are kept don't follow each other in it; keep one range of them, or have each apart (--scan_layers false)",
        )
    return came, starts


def _came(places: Mapping[Place, Layer], rank: int, old_rank: int) -> tuple[int | None, ...]:
    """The old axis that each new one seems to be, by two layers that differ on it alone; where there aren't two, the next
    one that is none of the others.
    """
    origin, (held, first) = next(iter(places.items()))
    came: list[int | None] = [None] * rank
    unsettled = []
    for axis in range(rank):
        alike = (place for place in places if [i for i in range(rank) if place[i] != origin[i]] == [axis])
        if (other := next(alike, None)) is None:
            unsettled.append(axis)
        elif places[other][0] == held:
            index = places[other][1]
            came[axis] = next((old for old in range(old_rank) if index[old] != first[old]), None)
    for axis in unsettled:
        came[axis] = next((old for old in range(old_rank) if old not in came), None)
    return tuple(came)


def elsewhere(one: Moved, path: Path, at: int) -> Moved:
    """The same array at another path, its stacked axes from `at` on, or behind all others."""
    part, rank, sides = one.part, len(one.part.shape) - len(one.axes), one.part.sides
    others = [axis for axis in range(len(sides)) if axis not in one.axes]
    at = min(at, rank)
    order = [*others[:at], *one.axes, *others[at:]]
    right = tuple(side for axis in order if (side := sides[axis]) is not None)
    place = order.index(sides.index(None)) if None in sides else 0
    made = Copy(part.keys, part.dims, part.rule.axes.left, right, part.rule.window, place)
    return Moved(path, one.like, made, tuple(range(at, at + len(one.axes))))


def narrowed(one: Moved, axis: int, wanted: range) -> Moved:
    """The same array with a range of an axis that it has of its sources."""
    part = one.part
    side = part.sides[axis]
    assert side is not None, "each index of a stacked axis has a source of its own"
    (word,) = side
    left = part.rule.axes.left
    window = [*part.rule.window, *[slice(None)] * (len(left) - len(part.rule.window))]
    window[left.index((word,))] = slice(wanted.start, wanted.stop)
    dims = {**part.dims, word: len(wanted)}
    made = Copy(part.keys, dims, left, part.rule.axes.right, tuple(window), part.scan_axis)
    return dataclasses.replace(one, part=made)


def _check(path: Path, shape: Shape, at: int, stack: Stack) -> None:
    wanted = stack.layers.shape
    if at < 0 or shape[at : at + len(wanted)] != wanted:
        raise StackingError(path, f"its shape {shape} has no axes {wanted} of layers from axis {max(at, 0)} on")


def unused(arrays: Mapping[Path, Held], moved: Iterable[Moved]) -> list[Path]:
    """The arrays of the old tree that nothing is made of."""
    keys = set(itertools.chain.from_iterable(one.part.tensors for one in moved))
    return [path for path, held in arrays.items() if held.key not in keys]
