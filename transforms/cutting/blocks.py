"""Blocks: how an array is cut into what one unit makes of it, and how units are made of blocks. Integers only.

A block is a range of shards. It begins with the smallest range there can be, and grows along one axis after the other
until a unit is full (`cut_blocks`). Arrays that are read together are cut alike, and their blocks go into one unit
(`make_units`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from weightbeam.formats.orbax.zarr import ArraySpec
from weightbeam.model_mappings.boxes import Box, extent
from weightbeam.model_mappings.cells import Part
from weightbeam.model_mappings.plan import Array
from weightbeam.transforms.cutting.grid import MIN_RUN, Grid

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


def find_twins(arrays: Sequence[Array], least_run: float = MIN_RUN) -> list[list[int]]:
    """The indices of the arrays in groups; the arrays of a group differ only in their window into the same tensors.

    Such arrays (gate and up that alternate in one tensor) are cut alike and made in one unit, so that no byte is read
    twice. Where their elements lie side by side for `least_run` bytes that isn't worth while.
    """
    groups: dict[object, list[int]] = {}
    for number, array in enumerate(arrays):
        part = array.parts[0]
        alone = len(array.parts) > 1 or not part.rule.window or _run(part) * array.dtype.itemsize >= least_run
        but_for_window = part.template, part.layers.tobytes(), part.target_axes, part.window_shape, part.steps
        groups.setdefault(number if alone else (*but_for_window, array.logical_axes), []).append(number)
    return list(groups.values())


def _run(part: Part) -> int:
    """Elements of a part's tensor that lie side by side."""
    if any(step > 1 for step in part.steps):
        return 1
    cut = next((axis for axis, window in enumerate(part.window) if window != slice(None)), 0)
    return math.prod(part.window_shape[cut:])


def cut_blocks(
    number: int,
    grid: Grid,
    unit_bytes: int,
    steps: Sequence[int] | None = None,
    place: Callable[[Box, int], tuple[str, int]] | None = None,
) -> Iterator[Block]:
    """Cuts an array into blocks of at most `unit_bytes`, as long as possible along `grid.growth`.

    A block begins with all shards along the whole axes, and grows along the others one after the other, until it is
    full. Shards of `wi_0` (embed, layers, mlp) as 16 × 32 × 2, where embed is a whole axis and growth is mlp, then
    layers:

        16 × 1 × 1       117 MB; a unit has 134 MB, so two along mlp don't fit, and nothing grows further
        16 × 1 × 2       with twice the memory: all of mlp, so that it goes on along layers
        16 × 16 × 2      with 36 times: 20 layers fit, and two blocks of 16 are made, rather than one of 20 and one of 12

    Along the axis where it ends, blocks are of about equal length.

    Args:
      number: the array's.
      grid: its shards, and the order in which a block grows.
      unit_bytes: memory of a block; the smallest may need more.
      steps: shards of the smallest block on each axis, of which all are multiples; by default all along the whole axes,
        and one along the others.
      place: file and offset of a block, by its shards and its number; by default in the order of the array's own.
    """
    spec = grid.spec
    if steps is None:
        steps = [count if axis in grid.whole_axes else 1 for axis, count in enumerate(spec.grid)]
    counts = list(steps)
    for axis in grid.growth:
        extents = [min(n * shard, size) for n, shard, size in zip(counts, spec.shard, spec.shape, strict=True)]
        smallest = -(-spec.grid[axis] // steps[axis])  # how many of the smallest blocks there are
        most = max(1, min(smallest, unit_bytes // max(1, grid.working_bytes(extents))))
        counts[axis] = steps[axis] * -(-smallest // -(-smallest // most))  # blocks of about equal length
        if counts[axis] < spec.grid[axis]:
            break
    starts = [range(0, total, count) for total, count in zip(spec.grid, counts, strict=True)]
    for at, first in enumerate(itertools.product(*starts)):
        shards: Box = tuple((low, min(low + n, total)) for low, n, total in zip(first, counts, spec.grid, strict=True))
        needed = grid.working_bytes(extent(element_box(spec, shards)))
        yield Block(number, shards, needed, place(shards, at) if place else (spec.key, at))


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
    groups: Iterable[Sequence[int]],
    cut: Callable[[int, int], Iterable[Block]],
    total: int,
    most: int,
    slots: int | None,
) -> list[tuple[Block, ...]]:
    """Units in the order in which they are done.

    Args:
      groups: the numbers of arrays, or tensors, that are read together; they are cut alike, and those of their blocks
        that lie side by side go into one unit.
      cut: cuts the one with a number into blocks of about so many bytes.
      total, most, slots: see `target_bytes`.
    """
    unit_bytes = target_bytes(total, most, slots)
    together: list[tuple[Block, ...]] = []
    for group in groups:
        together += zip(*(cut(number, unit_bytes // len(group)) for number in group), strict=True)
    return largest_first(pack(together, unit_bytes))
