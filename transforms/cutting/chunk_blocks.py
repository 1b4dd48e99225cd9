"""How an export cuts the arrays of a checkpoint: into blocks of whole chunks, long along its tensors' rows; and these
into units.

Along the axes that hold a tensor's columns a block takes all there is, so that a row is written in one go, and along
the others as many chunks as its bytes allow:

    array wi_0 (embed, layers, mlp), chunks of (512, 1, 512)      tensor gate_proj (mlp, embed) of layer 7
    block: all of embed, layer 7, mlp [1024, 2048)          ─▸    rows [1024, 2048), whole

A chunk that is larger than a unit is decoded once, as a stream, into files of its rows; of such an array a unit takes
any rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterator, Mapping, Sequence

from weightbeam.formats.orbax.source import OrbaxArray
from weightbeam.formats.orbax.unpacking import why_whole
from weightbeam.formats.orbax.zarr import ArraySpec
from weightbeam.model_mappings.plan import Array, Problem
from weightbeam.transforms.cutting.blocks import Block, cut_blocks, find_twins, make_units
from weightbeam.transforms.cutting.grid import Grid, SourceCost, cut_rows
from weightbeam.transforms.cutting.quantizing import keep_blocks

MOST_READS = 8  # of a chunk that is small, and can't be decoded as a stream


@dataclasses.dataclass(frozen=True)
class ChunkUnits:
    """How arrays are cut.

    Attributes:
      grids: one for each array.
      units: the blocks of each unit; none if there are problems.
      unpacked: keys of the arrays whose chunks are unpacked first.
      problems: arrays whose smallest block doesn't fit into a unit.
    """

    grids: tuple[Grid, ...] = ()
    units: tuple[tuple[Block, ...], ...] = ()
    unpacked: frozenset[str] = frozenset()
    problems: tuple[Problem, ...] = ()


def cut(
    arrays: Sequence[Array],
    weights: Mapping[str, OrbaxArray],
    sizes: Mapping[str, int],
    quantized: Container[str],
    unit_bytes: int,
    slots: int | None = None,
) -> ChunkUnits:
    """Cuts arrays.

    Args:
      arrays: of the table.
      weights: the same arrays, by key, as the checkpoint stores them.
      sizes: bytes that an element of each tensor takes, by the table's names.
      quantized: the tensors that are written as codes and scales, by the table's names.
      unit_bytes: memory of a unit.
      slots: units at a time that they are cut for, if that is known.
    """
    by_chunks = [grid_of(array, weights[array.key], sizes, quantized, unit_bytes) for array in arrays]
    large = {grid.spec.key for grid in by_chunks if not _fits(grid, unit_bytes)}
    whole = {key: why for key in large if (why := why_whole(weights[key]))}
    unpacked = frozenset(large - whole.keys())

    def regrained(array: Array, grid: Grid) -> Grid:
        stored = weights[array.key]
        if array.key in unpacked:
            return chunk_grid(array, stored, (1,) * len(array.shape), sizes, quantized)
        finer = _within_chunks(array, stored, sizes, quantized, unit_bytes) if array.key in whole else None
        return finer or grid

    grids = tuple(map(regrained, arrays, by_chunks))
    problems = tuple(_too_large(grids, unit_bytes, whole))
    return ChunkUnits(grids, () if problems else tuple(_units(arrays, grids, unit_bytes, slots)), unpacked, problems)


def grid_of(
    array: Array, stored: OrbaxArray, sizes: Mapping[str, int], quantized: Container[str], unit_bytes: int
) -> Grid:
    """How an array is cut: by what is read whole, or, where a unit has no room for that, by the chunks in it that can be
    read by themselves; by the former where neither fits. See `chunk_grid`.
    """
    grids = [chunk_grid(array, stored, grain, sizes, quantized) for grain in stored.grains]
    return next((grid for grid in grids if _fits(grid, unit_bytes)), grids[0])


def _within_chunks(
    array: Array, stored: OrbaxArray, sizes: Mapping[str, int], quantized: Container[str], unit_bytes: int
) -> Grid | None:
    """How an array is cut by parts of small chunks, each of which is then read several times, at most `MOST_READS`:

        chunks of (128, 2, 3584), blocks of all 8,192 rows     ─▸ grains of (128, 2, 1792), each chunk read twice

    None where that doesn't help, or a chunk is too large to be decoded for a part of it.
    """
    *_, chunk = stored.grains
    if math.prod(chunk) * stored.dtype.itemsize * MOST_READS > unit_bytes:
        return None
    grain, reads = [*chunk], 1
    while not _fits(grid := chunk_grid(array, stored, tuple(grain), sizes, quantized), unit_bytes):
        axis = max(
            (axis for axis in range(len(grain)) if axis not in grid.whole_axes),
            key=lambda axis: grain[axis],
            default=None,
        )
        if axis is None or grain[axis] == 1 or (reads := 2 * reads) > MOST_READS:
            return None
        grain[axis] = -(-grain[axis] // 2)
    return grid


def chunk_grid(
    array: Array, stored: OrbaxArray, grain: tuple[int, ...], sizes: Mapping[str, int], quantized: Container[str]
) -> Grid:
    """How an array is cut into blocks: of whole grains, such as chunks as they are stored, and whole along the columns
    of its tensors.

    Where a tensor is quantised, also of whole blocks of its rows. `sizes` are the bytes that an element of each tensor
    takes.
    """
    part = next(part for part in array.parts if part.rule.source)
    whole_axes, rows = cut_rows(part, array.dtype.itemsize, SourceCost())
    names = sorted(axis for axis in part.stack_axes if any(f.kind == "name" for f in part.target_axes[axis]))
    growth = tuple(
        dict.fromkeys([*rows, *names, *(axis for axis in range(len(array.shape)) if axis not in whole_axes)])
    )
    coded = any(name in quantized for part in array.parts for name in part.tensors)
    target = max(sizes[name] for part in array.parts for name in part.tensors)
    element_bytes = array.dtype.itemsize * (2 if stored.compressed else 1) + target
    spec = ArraySpec(array.key, array.shape, array.dtype, grain, grain)
    grid = Grid(whole_axes, growth, element_bytes, spec=spec)
    return keep_blocks(grid, part) if coded else grid


def _smallest(grid: Grid) -> list[int]:
    """The extents of the smallest block."""
    return [
        n if axis in grid.whole_axes else min(chunk, n)
        for axis, (n, chunk) in enumerate(zip(grid.spec.shape, grid.spec.shard, strict=True))
    ]


def _smallest_bytes(grid: Grid) -> int:
    """Memory for the smallest block."""
    return grid.working_bytes(_smallest(grid))


def _fits(grid: Grid, unit_bytes: int) -> bool:
    """Whether a unit has room for the smallest block, and for what is read at a time."""
    return max(_smallest_bytes(grid), math.prod(grid.spec.shard) * grid.spec.dtype.itemsize) <= unit_bytes


def _too_large(grids: Sequence[Grid], unit_bytes: int, whole: Mapping[str, str]) -> Iterator[Problem]:
    """Arrays whose smallest block doesn't fit into a unit; `whole` says why chunks aren't decoded in parts."""
    for grid in grids:
        if (needed := _smallest_bytes(grid)) > unit_bytes:
            why = whole.get(grid.spec.key)
            message = (
                f"rows of its tensors need {needed:,} bytes together, a unit has {unit_bytes:,}; raise --unit_bytes"
                + (f" (its chunks can't be decoded in parts, {why})" if why else "")
            )
            yield Problem("memory", grid.spec.key, message, is_array=True)


def _units(arrays: Sequence[Array], grids: Sequence[Grid], most: int, slots: int | None) -> list[tuple[Block, ...]]:
    """The units: blocks of chunks, those of arrays together whose tensors' rows they share."""
    total = sum(grid.working_bytes(grid.spec.shape) for grid in grids)
    return make_units(
        find_twins(arrays, math.inf),
        lambda number, unit_bytes: cut_blocks(number, grids[number], unit_bytes),
        total,
        most,
        slots,
    )
