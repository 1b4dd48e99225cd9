"""Units: what a worker does in one go. Whole shards of one or several arrays, and the boxes to read for them.

A unit's working set (boxes read, their decoded values, and the shards made of them) is bounded. Units never cut across
a row of a tensor, so that every source byte is read once. The largest come first.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from weightbeam.formats.encodings import Encoding, StoredArray
from weightbeam.formats.identity import Watched
from weightbeam.formats.zarr import ArraySpec
from weightbeam.model_mappings.boxes import Box, extent, volume
from weightbeam.model_mappings.cells import Part, Piece
from weightbeam.model_mappings.plan import Array
from weightbeam.transforms.arena import aligned
from weightbeam.transforms.grid import MIN_RUN, Grid

UNITS_PER_SLOT, LEAST_UNITS, LEAST_UNIT_BYTES = 8, 64, 8 << 20  # where the size of units follows from the workers


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Neighbouring shards of one array that one unit makes: a range of shards on each axis.

    Attributes:
      array: its number in the plan.
      shards: range of shard numbers on each axis.
      working_bytes: memory to make it.
      position: file and offset of its first tensor, for the order of units.
    """

    array: int
    shards: Box
    working_bytes: int
    position: tuple[str, int]


def working_bytes(unit: Iterable[Block]) -> int:
    """Memory to make a unit."""
    return sum(block.working_bytes for block in unit)


class UnitOptions(Protocol):
    """The option that every plan in units has."""

    @property
    def unit_bytes(self) -> int: ...


class InUnits:
    """What is alike in plans whose work is cut into units: dataclasses with these fields.

    Attributes:
      options: the user's.
      units: the blocks of each unit.
      slots: units at a time of all workers that the units were cut for; None where they are as large as they may be.
    """

    options: UnitOptions
    units: tuple[tuple[Block, ...], ...]
    slots: int | None

    @property
    def sources(self) -> Sequence[Watched]:
        """All whose values are read."""
        raise NotImplementedError

    @property
    def small_hashes(self) -> Mapping[str, str]:
        """What tells the content of each small file of the result that isn't part of another input, by name."""
        return {}

    def was_touched(self, since: Any) -> bool:
        """Whether a file that is read was replaced since a plan with the same hash was made; that isn't in the hash, as
        files may have moved, times and all.
        """
        pairs = zip(self.sources, since.sources, strict=True)
        return any(now.was_touched(then, self.links_source) for now, then in pairs)

    @property
    def links_source(self) -> bool:
        """Whether what is written has hard links to the source's files."""
        return False

    def check(self) -> None:
        """Checks that the files that are read are those that were planned with.

        Raises:
          StorageError: one isn't, or is gone.
        """
        for source in self.sources:
            source.check()

    @property
    def unit_bytes(self) -> int:
        """Bound on the memory of a unit."""
        return self.options.unit_bytes

    @property
    def unit_working_bytes(self) -> int:
        """Memory of the largest unit."""
        return max(map(working_bytes, self.units), default=0)

    def note_reads(self, unit: Any, raw: Sequence[Sequence[np.ndarray]]) -> dict[str, Any]:
        """What a unit's ledger entry should say of what it read: mostly nothing."""
        return {}


def find_twins(arrays: Sequence[Array], least_run: float = MIN_RUN) -> list[list[int]]:
    """The indices of the arrays in groups; the arrays of a group differ only in their window into the same tensors.

    Such arrays (gate and up that alternate in one tensor) are cut alike and made in one unit, so that no byte is read
    twice. Where their elements lie side by side for `least_run` bytes that isn't worth while.
    """
    groups: dict[object, list[int]] = {}
    for number, array in enumerate(arrays):
        part = array.parts[0]
        alone = len(array.parts) > 1 or not part.rule.window or _run(part) * array.dtype.itemsize >= least_run
        key = (
            number
            if alone
            else (
                part.template,
                part.layers.tobytes(),
                part.target_axes,
                part.window_shape,
                part.steps,
                array.logical_axes,
            )
        )
        groups.setdefault(key, []).append(number)
    return list(groups.values())


def _run(part: Part) -> int:
    """Elements of a part's tensor that lie side by side."""
    if any(step > 1 for step in part.steps):
        return 1
    cut = next((axis for axis, window in enumerate(part.window) if window != slice(None)), 0)
    return math.prod(part.window_shape[cut:])


def make_blocks(
    number: int, array: Array, grid: Grid, encodings: Mapping[str, Encoding], unit_bytes: int
) -> Iterator[Block]:
    """Cuts an array into blocks of at most `unit_bytes`, as long as possible along the source's bytes.

    A block begins with all shards along the whole axes, and grows along the others one after the other, until it is
    full. Shards of `wi_0` (embed, layers, mlp) as 16 × 32 × 2, where embed is a whole axis and growth is mlp, then
    layers:

        16 × 1 × 1       117 MB; a unit has 134 MB, so two along mlp don't fit, and nothing grows further
        16 × 1 × 2       with twice the memory: all of mlp, so that it goes on along layers
        16 × 16 × 2      with 36 times: 20 layers fit, and two blocks of 16 are made, rather than one of 20 and one of 12

    Along the axis where it ends, blocks are of about equal length.
    """
    spec = grid.spec
    counts = [count if axis in grid.whole_axes else 1 for axis, count in enumerate(spec.grid)]
    for axis in grid.growth:
        extents = [n * shard for n, shard in zip(counts, spec.shard, strict=True)]
        most = min(spec.grid[axis], unit_bytes // grid.working_bytes(extents))
        counts[axis] = -(-spec.grid[axis] // -(-spec.grid[axis] // max(1, most)))  # blocks of about equal length
        if counts[axis] < spec.grid[axis]:
            break
    starts = [range(0, total, count) for total, count in zip(spec.grid, counts, strict=True)]
    for first in itertools.product(*starts):
        shards = tuple((at, min(at + n, total)) for at, n, total in zip(first, counts, spec.grid, strict=True))
        box = element_box(spec, shards)
        cell = next((cell for cell in array.cells(box) if cell.tensor), None)
        stored = encodings[cell.tensor].weight if cell and cell.tensor else None
        yield Block(
            number, shards, grid.working_bytes(extent(box)), (stored.path, stored.offset) if stored else ("", 0)
        )


def element_box(spec: ArraySpec, shards: Box) -> Box:
    """The elements of a range of shards."""
    ranges = zip(shards, spec.shard, spec.shape, strict=True)
    return tuple((start * step, min(stop * step, size)) for (start, stop), step, size in ranges)


def pack(blocks: Sequence[tuple[Block, ...]], unit_bytes: int) -> list[tuple[Block, ...]]:
    """Gathers blocks, or groups of them that belong together, in the order of the source's bytes into units of at most
    `unit_bytes`.
    """
    units: list[tuple[Block, ...]] = []
    unit: list[Block] = []
    size = 0
    for group in sorted(blocks, key=lambda group: (group[0].position, group[0].array, group[0].shards)):
        needed = working_bytes(group)
        if unit and size + needed > unit_bytes:
            units.append(tuple(unit))
            unit, size = [], 0
        unit += group
        size += needed
    if unit:
        units.append(tuple(unit))
    return units


def target_bytes(total: int, most: int, slots: int | None) -> int:
    """Bytes that units should have.

    With few units some slots have one more to do than others, and while the first are read and the last are written a
    link is used in one direction only. With many there are many databases to merge. So each slot gets some eight, and
    all together 64 at least.

    Args:
      total: working bytes of all units.
      most: bound on those of one.
      slots: units that all workers work on at a time; None where nobody knows, or it doesn't matter.
    """
    if slots is None:
        return most
    return min(most, max(LEAST_UNIT_BYTES, total // max(UNITS_PER_SLOT * slots, LEAST_UNITS)))


def largest_first(units: Sequence[tuple[Block, ...]]) -> list[tuple[Block, ...]]:
    """The same units in the order of their sizes; those of one size stay in the order of the source's bytes.

    However many the workers are, none has more than one unit more to do than another. So it is where each takes the
    next unit when it is ready for one, as in a local run, and where they are dealt out in turn, once: what a worker
    gets in one round is at most what any other got in the round before.

    Nor does a link wait then for what has to be written to it but while the first unit is read: what is read later is
    smaller than what is being written meanwhile.
    """
    return sorted(units, key=working_bytes, reverse=True)


def make_units(
    cut: Callable[[int], Iterable[tuple[Block, ...]]], total: int, most: int, slots: int | None
) -> list[tuple[Block, ...]]:
    """Units in the order in which they are done, of the blocks, or groups of them that belong together, that `cut`
    makes for a number of bytes.

    Args:
      cut: cuts all arrays into blocks of about so many bytes.
      total, most, slots: see `target_bytes`.
    """
    unit_bytes = target_bytes(total, most, slots)
    return largest_first(pack(list(cut(unit_bytes)), unit_bytes))


@dataclasses.dataclass(frozen=True, slots=True)
class Fetch:
    """A box of a source's array, and the dtype to compute its values in if they are computed."""

    encoding: StoredArray
    box: Box
    dtype: np.dtype


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


def shards_of(recipes: Sequence[ShardsRecipe], made: Sequence[np.ndarray]) -> list[tuple[ArraySpec, Box, np.ndarray]]:
    """The shards that recipes have made, each with its array and its box there."""
    return [
        (recipe.spec, box, of_recipe[index])
        for recipe, of_recipe in zip(recipes, made, strict=True)
        for index, box in zip(np.ndindex(recipe.counts), recipe.boxes(), strict=True)
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """A unit of work, spelled out: which boxes to read, and what to make of them."""

    id: int
    fetches: tuple[Fetch, ...]
    recipes: tuple[ShardsRecipe, ...]

    @classmethod
    def done(cls, id: int) -> Unit:
        """A unit that was done earlier: nothing to do."""
        return cls(id, (), ())

    @property
    def is_done(self) -> bool:
        return not self.recipes

    @property
    def working_bytes(self) -> int:
        """Memory for all of its arrays: stored, decoded and made."""
        total = sum(aligned(volume(recipe.box) * recipe.spec.dtype.itemsize) for recipe in self.recipes)
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
    return fetches_for((arrays[block.array], element_box(grids[block.array].spec, block.shards)) for block in blocks)


def fetches_for(wanted: Iterable[tuple[Array, Box]]) -> dict[str, list[tuple[Box, bool]]]:
    """The boxes of each tensor that boxes of arrays need, joined as by `fetches_of`."""
    boxes: dict[str, list[tuple[Box, bool]]] = {}
    for array, box in wanted:
        for cell in array.cells(box):
            for piece in cell.pieces(box):
                _join(boxes.setdefault(piece.tensor, []), piece.source.box, bool(piece.ops))
    return boxes


def _join(boxes: list[tuple[Box, bool]], new: Box, computed: bool) -> None:
    for i, (box, already) in enumerate(boxes):
        union = tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(box, new, strict=True))
        if volume(union) <= volume(box) + volume(new):
            del boxes[i]
            _join(boxes, union, computed or already)
            return
    boxes.append((new, computed))


def expand_unit(
    id: int,
    blocks: Sequence[Block],
    arrays: Sequence[Array],
    grids: Sequence[Grid],
    encodings: Mapping[str, StoredArray],
    save_dtype: np.dtype,
) -> Unit:
    """Spells a unit out: what to fetch, and which piece of it goes where."""
    fetches: list[Fetch] = []
    numbers: dict[str, list[tuple[Box, int]]] = {}
    for tensor, boxes in fetches_of(blocks, arrays, grids).items():
        for box, computed in boxes:
            # One cast only: values that are computed with further stay in float32.
            dtype = np.dtype(np.float32) if computed else save_dtype
            numbers.setdefault(tensor, []).append((box, len(fetches)))
            fetches.append(Fetch(encodings[tensor], box, dtype))
    recipes = []
    for block in blocks:
        array, spec = arrays[block.array], grids[block.array].spec
        joined = _joined_axes(array, spec, block.shards)
        steps = [stop - start if axis in joined else 1 for axis, (start, stop) in enumerate(block.shards)]
        for first in itertools.product(
            *(range(start, stop, step) for (start, stop), step in zip(block.shards, steps, strict=True))
        ):
            shards = tuple((at, at + step) for at, step in zip(first, steps, strict=True))
            box = element_box(spec, shards)
            pieces = [piece for cell in array.cells(box) for piece in cell.pieces(box)]
            placed = tuple((find_fetch(numbers[piece.tensor], piece.source.box), piece) for piece in pieces)
            recipes.append(ShardsRecipe(spec, shards, array.fill, placed))
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


def find_fetch(fetches: Sequence[tuple[Box, int]], wanted: Box) -> int:
    """The number of the fetch that holds the box."""
    return next(
        number for box, number in fetches if all(a <= c and d <= b for (a, b), (c, d) in zip(box, wanted, strict=True))
    )
