"""Cells and pieces: which box of which tensor makes which box of which array. Integers only.

A *part* is what one rule of one stack makes of an array: a regular field of *cells*, one for each layer (and expert, where
its number is in the tensor's name). A *piece* is the share of one cell in one box of the array, as two views that hold the
same elements in the same order up to a transposition.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from weightbeam.model_mappings.axes import Range, factor_boxes, hull
from weightbeam.model_mappings.ops import Op
from weightbeam.model_mappings.rules import Rule, Stack

Box = tuple[Range, ...]  # a range for each axis


def extent(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Elements in a box."""
    return math.prod(extent(box))


def whole(shape: tuple[int, ...]) -> Box:
    """The box that is the whole array."""
    return tuple((0, size) for size in shape)


class View(NamedTuple):  # a tuple, as Piece is: a unit may have thousands, and tuples are made and pickled fastest
    """A part of an array: every `steps`-th index of a box, its axes split into factors, indexed.

    Attributes:
      box: range of each axis of the array.
      steps: 1, or the distance between the indices that count.
      factors: the sizes of the factors of each axis.
      picks: for each axis, a range of each of its factors, or the one index of a factor that drops out.
    """

    box: Box
    steps: tuple[int, ...]
    factors: tuple[tuple[int, ...], ...]
    picks: tuple[tuple[Range | int, ...], ...]

    def of(self, array: np.ndarray, origin: tuple[int, ...]) -> np.ndarray:
        """The view into `array`, whose first element is the one at `origin`. Never a copy."""
        ranges = zip(self.box, self.steps, origin, strict=True)
        cut = array[(*(slice(start - at, stop - at, step) for (start, stop), step, at in ranges), ...)]  # `...`: a view even without axes
        split = np.reshape(cut, tuple(itertools.chain(*self.factors)), copy=False)
        return split[(*map(selection, itertools.chain(*self.picks)), ...)]


def selection(pick: Range | int) -> slice | int:
    """A pick as a numpy index."""
    return pick if isinstance(pick, int) else slice(*pick)


class Piece(NamedTuple):
    """A box of a tensor that becomes a box of an array: `target = ops(source.transpose(order))`."""

    tensor: str
    source: View
    target: View
    order: tuple[int, ...]
    ops: tuple[Op, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Factor:
    """A factor of an array's axis: a range of a tensor's factor (`free`), or fixed by the cell's `layer` or `name` index."""

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

    def pieces(self, box: Box) -> Iterator[Piece]:
        """What this cell supplies of `box`, a box of the array; nothing where they don't meet."""
        return self.part.pieces(self, box)


class Part:
    """What one rule of one stack makes of its array.

    Raises:
      KeyError: the table uses an axis word that `dims` doesn't define.
    """

    def __init__(self, stack: Stack, rule: Rule, dims: dict[str, int], scan_axis: int):
        self.rule = rule
        self.path = "/".join(prefix for prefix in (stack.collection, stack.target, rule.target) if prefix)
        self.layers = stack.layers
        self.template = None if rule.source is None else stack.source + rule.source

        def size(factor: str) -> int:  # in the tensor
            return rule.segments[factor].size if factor in rule.segments else dims[factor]

        tensor_axes = rule.axes.left[len(rule.name_axes) :]
        self.source_factors = tuple(tuple(size(factor) for factor in axis) for axis in tensor_axes)
        self.window_shape = tuple(math.prod(sizes) for sizes in self.source_factors)
        self.window = rule.window + (slice(None),) * (len(tensor_axes) - len(rule.window))
        self.starts = tuple(cut.start or 0 for cut in self.window)
        self.steps = tuple(cut.step or 1 for cut in self.window)
        self.name_shape = tuple(dims[axis] for axis in rule.name_axes)

        flat = [factor for axis in tensor_axes for factor in axis]

        def place(factor: str) -> Factor:
            if factor in rule.name_axes:
                return Factor("name", rule.name_axes.index(factor), dims[factor])
            segment = rule.segments.get(factor)
            total, start = (segment.total, segment.start) if segment else (dims[factor], 0)
            return Factor("free", flat.index(factor), total, start)

        axes = [tuple(place(factor) for factor in axis) for axis in rule.axes.right]
        at = min(scan_axis, len(axes))
        axes[at:at] = [(Factor("layer", i, n),) for i, n in enumerate(stack.layers.shape)]
        self.target_axes = tuple(axes)
        self.shape = tuple(math.prod(factor.size for factor in axis) for axis in axes)
        names = rule.names
        if names is not None:
            names = (*names[:at], *stack.names, *names[at:])
        self.names: tuple[str | None, ...] = names or (None,) * len(axes)

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
        layers = [int(layer) for layer in self.layers.flat]
        named = [dict(zip(self.rule.name_axes, name, strict=True)) for name in np.ndindex(self.name_shape)]
        return tuple(self.template.format(layer=layer, **name) for layer in layers for name in named)

    @property
    def elements(self) -> int:
        """Elements of the array that the part makes; none for a constant."""
        if self.rule.source is None:
            return 0
        return math.prod(self.window_shape) * self.layers.size * math.prod(self.name_shape)

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
        return frozenset(i for i, axis in enumerate(self.target_axes) if any(f.kind == "free" and f.which in flat for f in axis))

    def cells(self, box: Box | None = None) -> Iterator[Cell]:
        """The part's cells; with `box` only those that may have a share in this box of the array."""
        layer = [range(n) for n in self.layers.shape]
        name = [range(n) for n in self.name_shape]
        if box is not None:
            for axis, (start, stop) in zip(self.target_axes, box, strict=True):
                if len(axis) == 1 and axis[0].kind != "free":
                    (layer if axis[0].kind == "layer" else name)[axis[0].which] = range(start, stop)
        for at in itertools.product(*layer):
            for named in itertools.product(*name):
                yield Cell(self, at, named)

    def pieces(self, cell: Cell, box: Box) -> Iterator[Piece]:
        """See `Cell.pieces`."""
        tensor = cell.tensor
        if tensor is None:
            return
        splits = [factor_boxes(span, [f.size for f in axis]) for span, axis in zip(box, self.target_axes, strict=True)]
        for factor_box in itertools.product(*splits):
            piece = self._piece(cell, tensor, factor_box)
            if piece is not None:
                yield piece

    def _piece(self, cell: Cell, tensor: str, factor_box: tuple[tuple[Range, ...], ...]) -> Piece | None:
        """The piece for a product of factor ranges of the array's axes; None where the cell has no share in it."""
        wanted: dict[int, Range] = {}  # range of each of the tensor's factors
        target_box, target_factors, target_picks, kept = [], [], [], []
        for axis, ranges in zip(self.target_axes, factor_box, strict=True):
            target_box.append(hull(ranges, [f.size for f in axis])[1])
            target_factors.append(tuple(stop - start for start, stop in ranges))
            picks: list[Range | int] = []
            for factor, (start, stop) in zip(axis, ranges, strict=True):
                if factor.kind != "free":
                    at = (cell.layer if factor.kind == "layer" else cell.name)[factor.which]
                    if not start <= at < stop:
                        return None
                    picks.append(at - start)
                    continue
                size = self.flat_sizes[factor.which]
                low, high = max(start, factor.start), min(stop, factor.start + size)
                if low >= high:
                    return None
                wanted[factor.which] = (low - factor.start, high - factor.start)
                picks.append((low - start, high - start))
                kept.append(factor.which)
            target_picks.append(tuple(picks))

        source_box, source_factors, source_picks, flat = [], [], [], 0
        for sizes, start, step in zip(self.source_factors, self.starts, self.steps, strict=True):
            ranges = [wanted[flat + i] for i in range(len(sizes))]
            widened, (low, high) = hull(ranges, sizes)
            source_box.append((start + low * step, start + (high - 1) * step + 1))
            source_factors.append(tuple(stop - start for start, stop in widened))
            source_picks.append(tuple((a - start, b - start) for (a, b), (start, _) in zip(ranges, widened, strict=True)))
            flat += len(sizes)

        ones = (1,) * len(target_box)
        return Piece(
            tensor,
            View(tuple(source_box), self.steps, tuple(source_factors), tuple(source_picks)),
            View(tuple(target_box), ones, tuple(target_factors), tuple(target_picks)),
            tuple(kept),
            self.rule.ops,
        )

    @functools.cached_property
    def flat_sizes(self) -> tuple[int, ...]:
        """The sizes of the tensor's factors, those of all its axes in one."""
        return tuple(itertools.chain(*self.source_factors))


_NUMBER = re.compile(r"\d+")


def pattern(name: str) -> str:
    """A tensor's name with its numbers taken out, for inventories: `model.layers.*.mlp.gate.weight`."""
    return _NUMBER.sub("*", name)
