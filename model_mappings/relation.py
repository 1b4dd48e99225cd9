"""A relation: which elements of one array are which elements of another one, read from either side. Integers only.

Each side is a list of axes. An axis is a regular window (`start`, `step`) into an axis of its array, split into
factors; a factor (`SideFactor`) is shared with the other side, or fixed by the cell that is looked at, such as the layer's
number. Take

    "(heads dim) embed -> embed heads dim"    with 32 layers stacked on the array's axis 1

    tensor                     array
    axis 0 = heads · dim  ──┐   axis 0 = embed
    axis 1 = embed        ─┐└─▸ axis 2 = heads, axis 3 = dim
                           └──▸ axis 1 = layers, fixed: 7 for the cell of layer 7

A box of either side is cut into boxes of its factors; each of these is a box of the other side, too. With heads = 4 and
dim = 8, the rows [4, 20) of the tensor are the second half of head 0, the whole of head 1 and the first half of head 2,
which are three boxes of the array: `[:, 7, 0, 4:8]`, `[:, 7, 1, 0:8]` and `[:, 7, 2, 0:4]`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from weightbeam.model_mappings.boxes import Box, Range, factor_boxes, hull


class View(NamedTuple):  # a tuple, as Piece is: a unit may have thousands, and tuples are made and pickled fastest
    """A part of an array: every `steps`-th index of a box, its axes split into factors, indexed.

    Attributes:
      box: range of each axis of the array.
      steps: the stride along each axis, in indices.
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
        # `...`: a view even without axes
        cut = array[(*(slice(start - at, stop - at, step) for (start, stop), step, at in ranges), ...)]
        split = cut.reshape(tuple(itertools.chain(*self.factors)), copy=False)
        return split[(*map(selection, itertools.chain(*self.picks)), ...)]


def selection(pick: Range | int) -> slice | int:
    """A pick as a numpy index."""
    return pick if isinstance(pick, int) else slice(*pick)


class SideFactor(NamedTuple):
    """A factor of an axis, as one side has it.

    Attributes:
      size: on this side.
      start: where the shared range begins on this side.
      free: the number of the shared factor; None for one that the cell fixes.
      fixed: which of the cell's indices fixes it; None for a shared one.
    """

    size: int
    start: int = 0
    free: int | None = None
    fixed: int | None = None


class Axis(NamedTuple):
    """An axis of one side: its factors and their sizes, and the window that they are of the array's axis."""

    places: tuple[SideFactor, ...]
    sizes: tuple[int, ...]
    start: int = 0
    step: int = 1

    @classmethod
    def of(cls, places: Iterable[SideFactor], start: int = 0, step: int = 1) -> Axis:
        """The axis that is merged from these factors."""
        places = tuple(places)
        return cls(places, tuple(place.size for place in places), start, step)


Spans = tuple[Range, ...]  # a range of each factor of an axis


class Relation(NamedTuple):
    """Two sides that share elements.

    Attributes:
      left, right: their axes.
      sizes: of the shared factors.
    """

    left: tuple[Axis, ...]
    right: tuple[Axis, ...]
    sizes: tuple[int, ...]

    def read(self, cell: Sequence[int], box: Box, back: bool) -> Iterator[tuple[View, View, tuple[int, ...]]]:
        """What lies in `box`: of the right side, or with `back` of the left one.

        Args:
          cell: the indices that fix places.
          box: of the side's whole array.

        Yields:
          `(view of the left, view of the right, order)`. The order is that of the axes of the other side's view as the
          side of the box has them: `right = left.transpose(order)`, with `back` `left = right.transpose(order)`.
        """
        here, there = (self.left, self.right) if back else (self.right, self.left)
        splits: list[list[Spans]] = []
        for axis, (start, stop) in zip(here, box, strict=True):
            low = max(0, -(-(start - axis.start) // axis.step))
            high = min(math.prod(axis.sizes), -(-(stop - axis.start) // axis.step))
            if low >= high:
                return
            splits.append(
                [((low, high),)] if len(axis.sizes) == 1 else list(factor_boxes((low, high), axis.sizes)) or [()]
            )
        for spans in itertools.product(*splits):
            shared: dict[int, Range] = {}  # the range of each shared factor
            if (met := self._align(here, spans, cell, shared)) is None:
                continue
            mine, order_here = _view(here, met, cell)
            other = [tuple(_span(place, cell, shared) for place in axis.places) for axis in there]
            theirs, order_there = _view(there, other, cell)
            order = tuple(map(order_there.index, order_here))
            yield (mine, theirs, order) if back else (theirs, mine, order)

    def _align(
        self, side: Sequence[Axis], spans: Sequence[Spans], cell: Sequence[int], shared: dict[int, Range]
    ) -> list[Spans] | None:
        """The part of `spans` that belongs to the cell, None where there is none; notes the ranges of the shared
        factors.

        An axis of the array of 20 rows, of which the tensor supplies 4 from row 16 on; and the box [14, 18) of it:

            array    … 13  14  15  16  17  18  19
            box            [14          18)
            tensor                 [16          20)     its rows 0 to 3
            met                    [16  18)             shared: rows [0, 2) of the tensor

        On an axis of layers the box [2, 5) meets the cell of layer 3 in [3, 4), and the cell of layer 7 not at all.
        """
        met = []
        for axis, ranges in zip(side, spans, strict=True):
            parts = []
            for place, (start, stop) in zip(axis.places, ranges, strict=True):
                if place.free is None:
                    low = cell[place.fixed or 0]
                    high = low + 1
                    if not start <= low < stop:
                        return None
                else:
                    low, high = max(start, place.start), min(stop, place.start + self.sizes[place.free])
                    if low >= high:
                        return None
                    shared[place.free] = (low - place.start, high - place.start)
                parts.append((low, high))
            met.append(tuple(parts))
        return met


def _span(place: SideFactor, cell: Sequence[int], shared: dict[int, Range]) -> Range:
    """The range of a place, by what the other side has found."""
    if place.free is None:
        at = cell[place.fixed or 0]
        return at, at + 1
    low, high = shared[place.free]
    return low + place.start, high + place.start


def _view(side: Sequence[Axis], spans: Sequence[Spans], cell: Sequence[int]) -> tuple[View, list[int]]:
    """The view of one side that shows these ranges of its factors, and the shared factors in the order of its axes."""
    box, factors, picks, kept = [], [], [], []
    for axis, ranges in zip(side, spans, strict=True):
        widened, (low, high) = (ranges, ranges[0]) if len(ranges) == 1 else hull(ranges, axis.sizes)
        box.append((axis.start + low * axis.step, axis.start + (high - 1) * axis.step + 1))
        factors.append(tuple(stop - start for start, stop in widened))
        chosen: list[Range | int] = []
        for place, (start, stop), (base, _) in zip(axis.places, ranges, widened, strict=True):
            if place.free is None:
                chosen.append(cell[place.fixed or 0] - base)
            else:
                chosen.append((start - base, stop - base))
                kept.append(place.free)
        picks.append(tuple(chosen))
    return View(tuple(box), tuple(axis.step for axis in side), tuple(factors), tuple(picks)), kept
