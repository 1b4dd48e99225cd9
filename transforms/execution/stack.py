"""The one copy and the one cast: pieces of tensors into shards that are contiguous in memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import numpy as np

from weightbeam.formats.encodings import ContentError
from weightbeam.formats.safetensors import Allocate
from weightbeam.model_mappings.boxes import extent
from weightbeam.model_mappings.cells import Piece
from weightbeam.model_mappings.ops import Op
from weightbeam.model_mappings.plan import bits_of
from weightbeam.model_mappings.relation import View, selection
from weightbeam.transforms.cutting.units import Recipe

STRIP_ELEMENTS = 1 << 18  # elements that are cast at a time, so that a temporary form of them stays in the cache
BLOCK = (512, 2048)  # rows, and bytes of each, that are transposed at a time
PITCH = 64  # bytes between the rows of a block: rows a power of two apart would share a few lines of the cache
WORDS = {1: np.dtype(np.uint16), 2: np.dtype(np.uint32)}  # by bytes of an element, what two neighbours are turned as
RUN = 512  # bytes; shorter runs are copied as one element each


def stack(recipe: Recipe, views: Sequence[tuple[Piece, np.ndarray]], empty: Allocate = np.empty) -> np.ndarray:
    """Makes shards of their pieces' views, each already in the array's layout, in an array that `empty` makes.

    Returns:
      (number of the shard on each axis, index within a shard on each axis); each shard lies in C order.

    Raises:
      ContentError: what should be integers is none.
    """
    shard = tuple(n // count for n, count in zip(extent(recipe.box), recipe.counts, strict=True))
    made = empty((*recipe.counts, *shard), recipe.dtype)
    if recipe.fill is not None:
        made[...] = recipe.fill
    origin = tuple(start for start, _ in recipe.box)
    for piece, view in views:
        if recipe.dtype.kind == "i" != view.dtype.kind:
            view = _integers(view, recipe.dtype, piece.tensor)
        copy(*_align(view, piece.target, made, origin), piece.ops)
    return made


def _integers(values: np.ndarray, dtype: np.dtype, name: str | None) -> np.ndarray:
    """Integers that are stored as floats, as MaxText's training stores DeepSeek V4's routing tables."""
    with np.errstate(invalid="ignore"):
        made = values.astype(dtype)
    if not np.array_equal(made, values):
        raise ContentError(
            f"{name}: {values[made != values].flat[0]} isn't one of {dtype.name}, which its tensor holds"
        )
    return made


def _align(
    source: np.ndarray, target: View, made: np.ndarray, origin: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """`source`, and the view of the shards `made` that it becomes, with the same axes.

    An axis that runs through several shards is two: the shard's number, and the index within it. Two shards of (3, 4),
    one below the other, and a piece that is all six rows of them:

        made     (2, 1, 3, 4)      number of the shard on each axis, index within it on each
        source   (6, 4)        ─▸  (2, 3, 4)      rows 0–2 for shard 0, rows 3–5 for shard 1
        region   made[0:2, 0]  ─▸  (2, 3, 4)      axis 1 lies within one shard, and stays one axis
    """
    rank = len(origin)
    if all(count == 1 for count in made.shape[:rank]):  # one shard, so that no axis is two
        return source, target.of(made.reshape(made.shape[rank:], copy=False), origin)
    numbers: list[int | slice] = []  # of shards, on each axis
    within: list[int | slice] = []  # a shard, on each axis
    order: list[int] = []  # of the axes of `made` that are left
    split: list[int] = []  # their lengths, in factors
    picks: list[int | slice] = []
    lengths: list[int] = []  # of the source's axes
    for axis, ((start, stop), step, factors, chosen) in enumerate(
        zip(target.box, target.steps, target.factors, target.picks, strict=True)
    ):
        start, stop, size = start - origin[axis], stop - origin[axis], made.shape[rank + axis]
        if made.shape[axis] == 1:
            numbers.append(0)
            within.append(slice(start, stop, step))
            order.append(rank + axis)
            split += factors
            picks += map(selection, chosen)
            lengths += [pick[1] - pick[0] for pick in chosen if not isinstance(pick, int)]
        elif isinstance(chosen[0], int):
            number, index = divmod(start + chosen[0], size)
            numbers.append(number)
            within.append(index)
        else:
            numbers.append(slice(start // size, stop // size))
            within.append(slice(None))
            order += [axis, rank + axis]
            split += [(stop - start) // size, size]
            picks += [slice(None), slice(None)]
            lengths += [(stop - start) // size, size]
    left = [axis for axis, index in enumerate([*numbers, *within]) if isinstance(index, slice)]
    region = made[(*numbers, *within, ...)].transpose([left.index(axis) for axis in order])
    return source.reshape(lengths, copy=False), region.reshape(split, copy=False)[(*picks, ...)]


def copy(source: np.ndarray, target: np.ndarray, ops: Sequence[Op] = ()) -> None:
    """`target = ops(source)` in float32 with one cast; a plain copy where both have one dtype and there are no ops."""
    bits = bits_of(target.dtype)
    if not ops and source.dtype == target.dtype:
        _copy_bits(*_coalesce(source.view(bits), target.view(bits)))
        return
    if source.ndim == 0:
        source, target = source[np.newaxis], target[np.newaxis]
    slowest = max(range(source.ndim), key=lambda axis: source.strides[axis])
    source, target = np.moveaxis(source, slowest, 0), np.moveaxis(target, slowest, 0)
    rows = max(1, STRIP_ELEMENTS * len(source) // max(1, source.size))
    for start in range(0, len(source), rows):  # strips along the source's rows, cast before they are transposed
        values = source[start : start + rows].astype(np.float32, copy=False)
        for op in ops:
            values = op.apply(values)
        strip = values.astype(target.dtype, copy=False)
        _copy_bits(*_coalesce(strip.view(bits), target[start : start + rows].view(bits)))


def _coalesce(source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both arrays with as few axes as possible: those of length 1 left out, neighbours joined where both sides
    allow it.
    """
    shape: list[int] = []
    last = (0, 0)
    for n, *strides in zip(source.shape, source.strides, target.strides, strict=True):
        if n == 1:
            continue
        if shape and last == (strides[0] * n, strides[1] * n):
            shape[-1] *= n
        else:
            shape.append(n)
        last = (strides[0], strides[1])
    return source.reshape(shape, copy=False), target.reshape(shape, copy=False)


def _copy_bits(source: np.ndarray, target: np.ndarray) -> None:
    """A plain copy where both sides run along the same axis, else transpositions, one for each index of the axes
    without a share in it.

    The axes are in the target's order; what counts is how each side strides through memory along them. The tensor (mlp,
    embed) into the array (embed, mlp), 2 bytes an element:

        axis      target's stride     source's stride
        embed        2 · mlp               2            near: neighbours in the source are columns
        mlp             2               2 · embed       far: neighbours in the target are rows

    So each block of 256 rows and 8192 bytes is copied as it is, and turned where both its sides are in the cache. Where
    a run is short, such as 64 elements of a rotary half, the axis that follows it in memory joins it, until a block is
    full.
    """
    if source.ndim < 2 or source.size < 1 << 10:
        target[...] = source
        return
    by_source, by_target = (
        sorted(range(source.ndim), key=lambda axis, side=side: side.strides[axis]) for side in (source, target)
    )
    near, far = by_source[0], by_target[0]
    if near == far:
        _copy_runs(np.moveaxis(source, near, -1), np.moveaxis(target, near, -1))
        return
    rows, columns = _find_block(source, target, by_source, by_target)
    if math.prod(source.shape[axis] for axis in rows) < 8:
        target[...] = source
        return
    others = [axis for axis in range(source.ndim) if axis not in columns and axis not in rows]
    source, target = source.transpose(*others, *rows, *columns), target.transpose(*others, *columns, *rows)
    for index in np.ndindex(*source.shape[: len(others)]):
        _transpose(source[index], target[index], len(rows))


def _find_block(
    source: np.ndarray, target: np.ndarray, by_source: Sequence[int], by_target: Sequence[int]
) -> tuple[list[int], list[int]]:
    """The axes of a block's rows and those of its columns, the slowest first; `by_source` and `by_target` are the axes
    from the fastest on.
    """
    near, far = by_source[0], by_target[0]
    rows, count = [far], source.shape[far]
    for axis in by_target[1:]:  # what goes on where a run of the target ends
        if axis != near and count < BLOCK[0] and target.strides[axis] == count * target.itemsize:
            rows.insert(0, axis)
            count *= source.shape[axis]
    columns, run = [near], source.strides[near] * source.shape[near]
    for axis in by_source[1:]:  # what goes on where a run of the source ends
        if axis not in rows and run < BLOCK[1] and source.strides[axis] == run:
            columns.insert(0, axis)
            run *= source.shape[axis]
    for axis in by_target[1:]:  # what else lies near in the target, until it is worth while
        if axis not in (*rows, *columns) and count < BLOCK[0]:
            rows.insert(0, axis)
            count *= source.shape[axis]
    return rows, columns


def _copy_runs(source: np.ndarray, target: np.ndarray) -> None:
    """A copy along the last axis of both. Short runs are one element each of a type of their size, which saves a call
    for each.
    """
    nbytes = source.shape[-1] * source.itemsize
    if nbytes <= RUN and source.strides[-1] == target.strides[-1] == source.itemsize:
        run = np.dtype((np.void, nbytes))
        source, target = source.view(run), target.view(run)
    target[...] = source


def _transpose(source: np.ndarray, target: np.ndarray, rank: int) -> None:
    """`target[*column, *row] = source[*row, *column]`, where a row has `rank` axes.

    numpy moves an element a nanosecond where it strides through memory on either side, and a fraction of that where both
    sides are in the cache. So a block of rows is copied as it is, and turned from there. Blocks below each other follow
    one another, so that what is written last in the target is still in the cache.
    """
    (slow, *fast), (wide, *narrow) = source.shape[:rank], source.shape[rank:]
    inner_rows, inner_columns = math.prod(fast), math.prod(narrow)
    step = min(slow, max(1, BLOCK[0] // inner_rows))
    width = min(wide, max(1, BLOCK[1] // (inner_columns * source.itemsize)))
    pitch = -(-width * inner_columns * source.itemsize // PITCH) * PITCH + PITCH
    block = np.empty((step * inner_rows, pitch // source.itemsize), source.dtype)
    word = WORDS.get(source.itemsize) if len(narrow) == 0 or narrow[-1] % 2 == 0 else None
    words = np.empty(block.size // 2, word) if word else None
    for column in range(0, wide, width):
        for first in range(0, slow, step):
            part = source[(slice(first, first + step), *[slice(None)] * (rank - 1), slice(column, column + width))]
            copied = block[: len(part) * inner_rows, : math.prod(part.shape[rank:])]
            copied.reshape(part.shape, copy=False)[...] = part
            turned = target[(slice(column, column + width), *[slice(None)] * len(narrow), slice(first, first + step))]
            if words is None:
                turned[...] = copied.T.reshape(turned.shape, copy=False)
            else:
                _turn_pairs(block[: len(copied)], turned, part.shape[:rank], words)


def _turn_pairs(block: np.ndarray, target: np.ndarray, rows: tuple[int, ...], scratch: np.ndarray) -> None:
    """`target = block.T` for as many elements as the target has; it has `rows`, and columns before them.

    Two neighbours are turned as one word of twice the size, in `scratch`, and taken apart by a cast, which is a vector
    instruction.
    """
    *slower, columns = target.shape[: target.ndim - len(rows)]
    pairs = -(-columns // 2)  # the last may have one column only
    wide = math.prod(slower) * pairs
    turned = scratch[: wide * len(block)].reshape(wide, len(block))
    turned[...] = block.view(scratch.dtype)[:, :wide].T
    words = turned.reshape(*slower, pairs, *rows)
    at = (slice(None),) * len(slower)
    low, high = (0, 1) if sys.byteorder == "little" else (1, 0)
    for half in (low, high):
        into = target[(*at, slice(half, None, 2))]
        np.copyto(into, words[(*at, slice(into.shape[len(slower)]))], casting="unsafe")
        if half == low:
            words >>= 8 * target.itemsize
