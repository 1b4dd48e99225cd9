"""Cells and pieces: which box of which tensor makes which box of which array. Integers only.

A *part* is what one rule of one stack makes of an array: a regular field of *cells*, one for each layer (and expert,
where its number is in the tensor's name). A *piece* is the share of one cell in one box of the array, as two views that
hold the same elements in the same order up to a transposition.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from weightbeam.model_mappings.boxes import Box
from weightbeam.model_mappings.ops import Op, inverses
from weightbeam.model_mappings.relation import Axis, Relation, SideFactor, View
from weightbeam.model_mappings.rules import Rule, Stack


class Piece(NamedTuple):
    """A box of one array that becomes a box of another one: `target = ops(source.transpose(order))`.

    Read forward the source is a tensor of Hugging Face's and the target an array of MaxText's; read back it is the
    other way round.

    Attributes:
      tensor: the source's name.
      source, target: the same elements in both.
      order: the axes of the source's view as the target's view has them.
      ops: in the order in which they are applied.
    """

    tensor: str
    source: View
    target: View
    order: tuple[int, ...]
    ops: tuple[Op, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Factor:
    """A factor of an array's axis: a range of a tensor's factor (`free`), or fixed by the cell's `layer` or `name`
    index.
    """

    kind: str
    which: int  # index among the tensor's factors, the stacked axes, or the name axes
    size: int  # in the array
    start: int = 0  # where the tensor's part begins


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One tensor (or a window of it) in one place of an array."""

    part: Part
    layer: tuple[int, ...]
    name: tuple[int, ...]

    @property
    def tensor(self) -> str | None:
        return self.part.tensor(self.layer, self.name)

    @property
    def indices(self) -> tuple[int, ...]:
        """Those of the layer in its stack, then those in the tensor's name."""
        return self.layer + self.name

    def pieces(self, box: Box) -> Iterator[Piece]:
        """What this cell supplies of `box`, a box of the array; nothing where they don't meet."""
        return self.part.pieces(self, box)

    def pieces_back(self, box: Box, key: str) -> Iterator[Piece]:
        """What the array `key` supplies of `box`, a box of this cell's tensor: the same elements, read the other way."""
        return self.part.pieces_back(self, box, key)


class Part:
    """What one rule of one stack makes of its array.

    Raises:
      KeyError: the table uses an axis word that `dims` doesn't define.
    """

    def __init__(self, stack: Stack, rule: Rule, dims: dict[str, int], scan_axis: int):
        self.stack, self.rule, self.dims, self.scan_axis = stack, rule, dims, scan_axis
        self.path = "/".join(filter(None, (stack.collection, stack.target, rule.target)))
        self.layers = stack.layers
        self.places = dict(stack.places)
        self.template = None if rule.source is None else stack.source + rule.source

        tensor_axes = rule.axes.left[len(rule.name_axes) :]
        self.source_factors = tuple(tuple(size_of(factor, rule, dims) for factor in axis) for axis in tensor_axes)
        self.window_shape = tuple(math.prod(sizes) for sizes in self.source_factors)
        self.window = rule.window + (slice(None),) * (len(tensor_axes) - len(rule.window))
        self.starts = tuple(cut.start or 0 for cut in self.window)
        self.steps = tuple(cut.step or 1 for cut in self.window)
        self.name_shape = tuple(dims[axis] for axis in rule.name_axes)

        flat = tuple(itertools.chain(*tensor_axes))
        axes = [tuple(_factor(factor, rule, dims, flat) for factor in axis) for axis in rule.axes.right]
        at = stack.stacked_at(scan_axis, len(axes))
        axes[at:at] = [(Factor("layer", i, n),) for i, n in enumerate(stack.layers.shape)]
        self.target_axes = tuple(axes)
        self.shape = tuple(math.prod(factor.size for factor in axis) for axis in axes)
        names = rule.names
        if names is not None:
            names = (*names[:at], *stack.names, *names[at:])
        self.logical_axes: tuple[str | None, ...] = names or (None,) * len(axes)

    def tensor(self, layer: tuple[int, ...], name: tuple[int, ...]) -> str | None:
        """The name of a cell's tensor; None for a constant."""
        if self.template is None:
            return None
        return self.template.format(layer=int(self.layers[layer]), **dict(zip(self.rule.name_axes, name, strict=True)))

    @property
    def factors(self) -> Iterator[int]:
        """The size of every factor, of the tensor and of the array."""
        return itertools.chain(*self.source_factors, (factor.size for axis in self.target_axes for factor in axis))

    @functools.cached_property
    def tensors(self) -> tuple[str, ...]:
        """The tensors of all cells, in the cells' order."""
        if self.template is None:
            return ()
        named = [dict(zip(self.rule.name_axes, name, strict=True)) for name in np.ndindex(self.name_shape)]
        return tuple(self.template.format(layer=layer, **name) for layer in self.places.values() for name in named)

    @property
    def elements(self) -> int:
        """Elements of the array that the part makes; none for a constant."""
        if self.rule.source is None:
            return 0
        return math.prod(self.window_shape) * len(self.places) * math.prod(self.name_shape)

    @property
    def fill(self) -> float | None:
        """The value of the array's elements that no tensor supplies; None where the rule leaves none over."""
        return 0.0 if self.rule.fill is None and len(self.places) < self.layers.size else self.rule.fill

    def source_box(self) -> tuple[range, ...]:
        """The indices of each axis of the tensor that a cell takes."""
        axes = zip(self.starts, self.steps, self.window_shape, strict=True)
        return tuple(range(start, start + size * step, step) for start, step, size in axes)

    @functools.cached_property
    def stack_axes(self) -> frozenset[int]:
        """Axes of the array whose index selects a tensor: layers, and experts in a tensor each."""
        return frozenset(i for i, axis in enumerate(self.target_axes) if axis and all(f.kind != "free" for f in axis))

    def axes_of(self, source_axis: int) -> frozenset[int]:
        """Axes of the array that hold a factor of the tensor's axis `source_axis`."""
        before = sum(len(sizes) for sizes in self.source_factors[:source_axis])
        flat = range(before, before + len(self.source_factors[source_axis]))
        return frozenset(
            i for i, axis in enumerate(self.target_axes) if any(f.kind == "free" and f.which in flat for f in axis)
        )

    def axis_with(self, word: str) -> tuple[int, int] | None:
        """The axis of the array that has one of the table's words outermost, and how many elements of it are of each index
        of the word; None where none has.
        """
        right = self.rule.axes.right
        number = next((at for at, axis in enumerate(right) if axis[:1] == (word,)), None)
        if number is None:
            return None
        size = math.prod(size_of(factor, self.rule, self.dims) for factor in right[number][1:])
        behind = number >= self.stack.stacked_at(self.scan_axis, len(right))
        return number + self.layers.ndim * behind, size

    def cells(self, box: Box | None = None) -> Iterator[Cell]:
        """The part's cells; with `box` only those that may have a share in this box of the array."""
        layer = [range(n) for n in self.layers.shape]
        name = [range(n) for n in self.name_shape]
        if box is not None:
            for axis, (start, stop) in zip(self.target_axes, box, strict=True):
                if len(axis) == 1 and axis[0].kind != "free":
                    (layer if axis[0].kind == "layer" else name)[axis[0].which] = range(start, stop)
        for at in itertools.product(*layer):
            if at not in self.places:
                continue
            for named in itertools.product(*name):
                yield Cell(self, at, named)

    def pieces(self, cell: Cell, box: Box) -> Iterator[Piece]:
        """See `Cell.pieces`."""
        if (tensor := cell.tensor) is None:
            return
        # as if the cell were the first, in a box around it alone; then put where it is
        indices, corner, at = list(cell.indices), list(box), []
        for axis, which in self._selectors:
            index, (start, stop) = indices[which], box[axis]
            if not start <= index < stop:
                return
            indices[which], corner[axis] = 0, (0, 1)
            at.append((axis, index))
        for stored, array, order in _read(self._relation, tuple(indices), tuple(corner)):
            yield Piece(tensor, stored, _moved(array, at), order, self.rule.ops)

    def pieces_back(self, cell: Cell, box: Box, key: str) -> Iterator[Piece]:
        """See `Cell.pieces_back`."""
        for stored, array, order in self._relation.read(cell.indices, box, back=True):
            yield Piece(key, array, stored, order, inverses(self.rule.ops))

    @functools.cached_property
    def _selectors(self) -> tuple[tuple[int, int], ...]:
        """The axes of the array that are one stacked axis each, with the number of that among a cell's indices."""
        return tuple(
            (number, factor.which + (self.layers.ndim if factor.kind == "name" else 0))
            for number, axis in enumerate(self.target_axes)
            if len(axis) == 1 and (factor := axis[0]).kind != "free"
        )

    @functools.cached_property
    def _relation(self) -> Relation:
        """The same facts as a relation of two sides; a cell's indices are those of its layer, then those in its name."""

        def place(factor: Factor) -> SideFactor:
            if factor.kind == "free":
                return SideFactor(factor.size, factor.start, free=factor.which)
            return SideFactor(factor.size, fixed=factor.which + (self.layers.ndim if factor.kind == "name" else 0))

        places = iter([SideFactor(size, free=free) for free, size in enumerate(self.flat_sizes)])
        windows = zip(self.source_factors, self.starts, self.steps, strict=True)
        left = tuple(Axis.of([next(places) for _ in sizes], start, step) for sizes, start, step in windows)
        return Relation(left, tuple(Axis.of(map(place, axis)) for axis in self.target_axes), self.flat_sizes)

    @functools.cached_property
    def flat_sizes(self) -> tuple[int, ...]:
        """The sizes of the tensor's factors, those of all its axes in one."""
        return tuple(itertools.chain(*self.source_factors))


@functools.lru_cache(maxsize=1 << 10)
def _read(relation: Relation, indices: tuple[int, ...], box: Box) -> tuple[tuple[View, View, tuple[int, ...]], ...]:
    """`Relation.read`, once for all cells that differ by nothing but their place: 256 experts of 58 layers have the same
    pieces, each in a tensor of its own.
    """
    return tuple(relation.read(indices, box, back=False))


def _moved(view: View, at: Sequence[tuple[int, int]]) -> View:
    """A view at other indices, given as `(axis, index)`, of axes that select a tensor."""
    box = list(view.box)
    for axis, index in at:
        box[axis] = (index, index + 1)
    return View(tuple(box), view.steps, view.factors, view.picks)


def size_of(factor: str, rule: Rule, dims: Mapping[str, int]) -> int:
    """The size of a factor in the tensor; where the array's axis is longer, that of the tensor's segment of it."""
    return rule.segments[factor].size if factor in rule.segments else dims[factor]


def _factor(factor: str, rule: Rule, dims: dict[str, int], flat: tuple[str, ...]) -> Factor:
    """A factor of the array's axis; `flat` are the words of the tensor's axes, in one."""
    if factor in rule.name_axes:
        return Factor("name", rule.name_axes.index(factor), dims[factor])
    segment = rule.segments.get(factor)
    total, start = (segment.total, segment.start) if segment else (dims[factor], 0)
    return Factor("free", flat.index(factor), total, start)


_NUMBER = re.compile(r"\d+")


def pattern(name: str) -> str:
    """A tensor's name with its numbers taken out, for inventories: `model.layers.*.mlp.gate.weight`."""
    return _NUMBER.sub("*", name)
