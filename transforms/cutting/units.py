"""Units: what a worker does in one go. Whole shards of one or several arrays, and the boxes to read for them.

A unit's working set (boxes read, their decoded values, and the shards made of them) is bounded. Units never cut across
a row of a tensor, so that every source byte is read once. The largest come first.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from weightbeam.formats.encodings import StoredArray
from weightbeam.formats.encodings.encoding import stored_form
from weightbeam.formats.orbax.zarr import ArraySpec
from weightbeam.model_mappings.boxes import Box, around, extent, intersection, volume
from weightbeam.model_mappings.cells import Part, Piece
from weightbeam.model_mappings.plan import Array
from weightbeam.transforms.cutting.blocks import Block, element_box
from weightbeam.transforms.cutting.grid import Grid

ALIGNMENT = 64  # bytes; a cache line


def aligned(nbytes: int) -> int:
    """The bytes that an array of `nbytes` takes in memory."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclasses.dataclass(frozen=True, slots=True)
class Fetch:
    """A box of a source's array, and the dtype to compute its values in if they are computed."""

    encoding: StoredArray
    box: Box
    dtype: np.dtype


class Recipe(Protocol):
    """A box of an array to make of the pieces of what was read, as one, or as shards of one shape side by side."""

    @property
    def box(self) -> Box: ...

    @property
    def counts(self) -> tuple[int, ...]:
        """How many shards there are on each axis."""
        ...

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def fill(self) -> float | None:
        """The value of elements that no piece supplies; None where the pieces tile the box."""
        ...


class UnitRecipe(Recipe, Protocol):
    """A recipe of a unit, whose result is written."""

    @property
    def pieces(self) -> tuple[tuple[int, Piece], ...]:
        """What it is made of, each with the number of the fetch that holds its source."""
        ...

    def finish(self, values: np.ndarray) -> np.ndarray:
        """What is written, of what was made of the pieces."""
        ...

    def parts(self, values: np.ndarray) -> Iterator[tuple[Any, Box, np.ndarray]]:
        """What the target writes: of what, the box of it, and the values."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class ShardsRecipe:
    """Neighbouring shards to make in one go.

    Attributes:
      spec: their array.
      shards: range of shard numbers on each axis; along an axis with more than one all shards have the same length.
      fill: the value of elements that no piece supplies; None where the pieces tile the shards.
      pieces: what they are made of, each with the number of the fetch that holds its source. Along an axis with more
        than one shard a piece is a whole number of shards long, or lies within one.
    """

    spec: ArraySpec
    shards: Box
    fill: float | None
    pieces: tuple[tuple[int, Piece], ...]

    @property
    def box(self) -> Box:
        """The elements of all the shards."""
        return element_box(self.spec, self.shards)

    @property
    def dtype(self) -> np.dtype:
        return self.spec.dtype

    @property
    def counts(self) -> tuple[int, ...]:
        """How many shards there are on each axis."""
        return extent(self.shards)

    def boxes(self) -> Iterator[Box]:
        """The elements of each shard, in C order."""
        return (
            self.spec.shard_box(index)
            for index in itertools.product(*(range(start, stop) for start, stop in self.shards))
        )

    def finish(self, values: np.ndarray) -> np.ndarray:
        """The values as they are: shards need nothing more."""
        return values

    def parts(self, values: np.ndarray) -> Iterator[tuple[ArraySpec, Box, np.ndarray]]:
        """What is written: each shard."""
        for index, box in zip(np.ndindex(self.counts), self.boxes(), strict=True):
            yield self.spec, box, values[index]


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """A unit of work, spelled out and complete in itself: which boxes to read, and what to make of them.

    Attributes:
      id: its number.
      fetches: what is read.
      recipes: what is made.
      copies: chunks that are copied as they are encoded: the array's key, its spec there, and the index.
      copied_bytes: memory for these.
      is_done: whether it was done earlier. A unit that makes nothing isn't done by that: of an export's padding alone
        something is read, and compared.
    """

    id: int
    fetches: tuple[Fetch, ...]
    recipes: tuple[UnitRecipe, ...]
    copies: tuple[tuple[str, ArraySpec, tuple[int, ...]], ...] = ()
    copied_bytes: int = 0
    is_done: bool = False

    @classmethod
    def done(cls, id: int) -> Unit:
        """A unit that was done earlier: nothing to do."""
        return cls(id, (), (), is_done=True)

    @property
    def working_bytes(self) -> int:
        """Memory for all of its arrays: stored, decoded and made."""
        total = self.copied_bytes + sum(aligned(volume(one.box) * one.dtype.itemsize) for one in self.recipes)
        for fetch in self.fetches:
            total += sum(aligned(read.nbytes) for read in fetch.encoding.reads(fetch.box))
            if fetch.encoding.label is not None:
                total += aligned(volume(fetch.box) * fetch.dtype.itemsize)
        return total


def fetches_of(
    blocks: Sequence[Block], arrays: Sequence[Array], grids: Sequence[Grid]
) -> dict[str, list[tuple[Box, bool]]]:
    """The boxes of each tensor that a unit reads: `(box, whether value operations follow)`.

    Boxes of one tensor are joined where that reads nothing twice and nothing in between.
    """
    boxes = ((arrays[block.array], element_box(grids[block.array].spec, block.shards)) for block in blocks)
    return fetches_for(piece for array, box in boxes for piece in array.pieces(box))


def fetches_for(pieces: Iterable[Piece]) -> dict[str, list[tuple[Box, bool]]]:
    """The boxes of each tensor that pieces need, joined as by `fetches_of`."""
    boxes: dict[str, list[tuple[Box, bool]]] = {}
    for piece in pieces:
        _join(boxes.setdefault(piece.tensor, []), piece.source.box, bool(piece.ops))
    return boxes


def _join(boxes: list[tuple[Box, bool]], new: Box, computed: bool) -> None:
    for i, (box, already) in enumerate(boxes):
        union = around(box, new)
        if volume(union) <= volume(box) + volume(new):
            del boxes[i]
            _join(boxes, union, computed or already)
            return
    boxes.append((new, computed))


class Fetches(list[Fetch]):
    """What is read for boxes that pieces need."""

    def __init__(
        self, boxes: Mapping[str, Sequence[tuple[Box, bool]]], encodings: Mapping[str, StoredArray], dtype: np.dtype
    ):
        """`boxes` are those of `fetches_for`. What is computed with further stays in float32: there is one cast only."""
        super().__init__()
        self._numbers: dict[str, range] = {}
        for tensor, found in boxes.items():
            self._numbers[tensor] = range(len(self), len(self) + len(found))
            self += (
                Fetch(encodings[tensor], box, np.dtype(np.float32) if computed else dtype) for box, computed in found
            )

    def placed(self, pieces: Iterable[Piece]) -> tuple[tuple[int, Piece], ...]:
        """The pieces, each with the number of the fetch that holds its source."""
        return tuple((self._find(piece.tensor, piece.source.box), piece) for piece in pieces)

    def _find(self, tensor: str, wanted: Box) -> int:
        numbers = self._numbers[tensor]
        if len(numbers) == 1:  # as most tensors have
            return numbers[0]
        return next(number for number in numbers if intersection(self[number].box, wanted) == wanted)


def stacked_axes(array: Array, encodings: Mapping[str, StoredArray]) -> tuple[int, ...]:
    """The axes of an array whose index selects a tensor (layers, experts), where all of its tensors are stored alike.

    What a box costs doesn't depend on where along these axes it lies.
    """
    part, names = array.parts[0], set(array.parts[0].tensors)
    every_cell_has_its_own = len(names) == math.prod((*part.layers.shape, *part.name_shape))
    if len(array.parts) > 1 or not every_cell_has_its_own or len({stored_form(encodings[name]) for name in names}) > 1:
        return ()
    return tuple(axis for axis in sorted(part.stack_axes) if len(part.target_axes[axis]) == 1)


def find_alike(
    units: Sequence[Sequence[Block]],
    arrays: Sequence[Array],
    grids: Sequence[Grid],
    encodings: Mapping[str, StoredArray],
) -> list[int]:
    """For each unit the number of the first that reads and makes as much: of one block which lies elsewhere along its
    array's `stacked_axes`. There are thousands, of a few kinds.
    """
    stacked = functools.cache(lambda number: stacked_axes(arrays[number], encodings))
    firsts: dict[Hashable, int] = {}

    def kind(unit: Sequence[Block]) -> Hashable:
        if len(unit) != 1:
            return tuple(unit)
        number = unit[0].array
        box = enumerate(element_box(grids[number].spec, unit[0].shards))
        return number, *((0, stop - start) if axis in stacked(number) else (start, stop) for axis, (start, stop) in box)

    return [firsts.setdefault(kind(unit), number) for number, unit in enumerate(units)]


def expand_unit(
    id: int,
    blocks: Sequence[Block],
    arrays: Sequence[Array],
    grids: Sequence[Grid],
    encodings: Mapping[str, StoredArray],
    save_dtype: np.dtype,
) -> Unit:
    """Spells a unit out: what to fetch, and which piece of it goes where."""
    fetches = Fetches(fetches_of(blocks, arrays, grids), encodings, save_dtype)
    recipes = []
    for block in blocks:
        array, spec = arrays[block.array], grids[block.array].spec
        joined = _joined_axes(array, spec, block.shards)
        steps = [stop - start if axis in joined else 1 for axis, (start, stop) in enumerate(block.shards)]
        for first in itertools.product(
            *(range(start, stop, step) for (start, stop), step in zip(block.shards, steps, strict=True))
        ):
            shards = tuple((at, at + step) for at, step in zip(first, steps, strict=True))
            pieces = array.pieces(element_box(spec, shards))
            recipes.append(ShardsRecipe(spec, shards, array.fill, fetches.placed(pieces)))
    return Unit(id, tuple(fetches), tuple(recipes))


def _joined_axes(array: Array, spec: ArraySpec, shards: Box) -> set[int]:
    """The axes along which a range of shards is made in one go: where no shard is cut short, and every piece fits in
    with them.

    A piece is as long as the range along an axis that is one whole axis of its tensor, and one index long along layers.
    """

    def fits(part: Part, axis: int) -> bool:
        factors = part.target_axes[axis]
        return len(factors) == 1 and (factors[0].kind != "free" or factors[0].size == part.flat_sizes[factors[0].which])

    return {
        axis
        for axis, (start, stop) in enumerate(shards)
        if stop - start > 1
        and stop * spec.shard[axis] <= spec.shape[axis]
        and all(fits(part, axis) for part in array.parts)
    }
