"""The one copy and the one cast: pieces of tensors into shards that are contiguous in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from formats.safetensors import Empty
from model_mappings.cells import Piece, View, extent, selection
from model_mappings.ops import Op
from transforms.units import Job

TILE = (32, 256)  # elements along the target's and the source's fastest axes: a cache line of each
STRIP_ELEMENTS = 1 << 17  # elements handled at a time, so that a temporary form of them stays in the cache


def stack(job: Job, views: Sequence[tuple[Piece, np.ndarray]], empty: Empty = np.empty) -> np.ndarray:
    """Makes shards of their pieces' views, each already in the array's layout, in an array that `empty` makes.

    Returns:
      (number of the shard on each axis, index within a shard on each axis); each shard lies in C order.
    """
    shard = tuple(n // count for n, count in zip(extent(job.box), job.counts, strict=True))
    made = empty((*job.counts, *shard), job.spec.dtype)
    if job.fill is not None:
        made[...] = job.fill
    origin = tuple(start for start, _ in job.box)
    for piece, view in views:
        copy(*_meet(view, piece.target, made, origin), piece.ops)
    return made


def _meet(source: np.ndarray, target: View, made: np.ndarray, origin: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """`source`, and the view of the shards `made` that it becomes, with the same axes.

    An axis that runs through several shards is two: the shard's number, and the index within it.
    """
    rank = len(origin)
    numbers: list[int | slice] = []  # of shards, on each axis
    within: list[int | slice] = []  # a shard, on each axis
    order: list[int] = []  # of the axes of `made` that are left
    split: list[int] = []  # their lengths, in factors
    picks: list[int | slice] = []
    lengths: list[int] = []  # of the source's axes
    for axis, ((start, stop), factors, chosen) in enumerate(zip(target.box, target.factors, target.picks, strict=True)):
        start, stop, size = start - origin[axis], stop - origin[axis], made.shape[rank + axis]
        if made.shape[axis] == 1:
            numbers.append(0)
            within.append(slice(start, stop))
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
    region = made[(*numbers, *within)].transpose([left.index(axis) for axis in order])
    return np.reshape(source, lengths, copy=False), np.reshape(region, split, copy=False)[(*picks, ...)]


def copy(source: np.ndarray, target: np.ndarray, ops: Sequence[Op] = ()) -> None:
    """`target = ops(source)` in float32 with one cast; a plain copy where both have one dtype and there are no ops."""
    bits = np.dtype(f"u{target.dtype.itemsize}")  # numpy copies integers several times faster than ml_dtypes' floats
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
            values = op.forward(values)
        strip = values.astype(target.dtype, copy=False)
        _copy_bits(*_coalesce(strip.view(bits), target[start : start + rows].view(bits)))


def _coalesce(source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same arrays with as few axes as possible: those of length 1 left out, neighbours joined where both sides allow it."""
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
    return np.reshape(source, shape, copy=False), np.reshape(target, shape, copy=False)


def _copy_bits(source: np.ndarray, target: np.ndarray) -> None:
    """A plain copy where both sides run along the same axis, else transpositions, one for each index of the axes without a share in it."""
    if source.ndim < 2 or source.size < 1 << 10:
        target[...] = source
        return
    near = min(range(source.ndim), key=lambda axis: source.strides[axis])
    far = min(range(target.ndim), key=lambda axis: target.strides[axis])
    if near == far or source.shape[near] * source.shape[far] < 1 << 10:
        target[...] = source
        return
    groups = [[*_before(source, axis, {near, far}), axis] for axis in (far, near)]  # what lies in rows, and in columns
    if groups[0][0] == groups[1][0]:
        groups[1] = [near]
    moved = [*groups[0], *groups[1]]
    others = [axis for axis in range(source.ndim) if axis not in moved]
    rows, columns = ([source.shape[axis] for axis in group] for group in groups)
    flat = source.transpose(*others, *moved)
    flat = np.reshape(flat, (*flat.shape[: len(others)], math.prod(rows), math.prod(columns)), copy=False)
    # (other axes, group of rows, group of columns, column, row)
    turned = target.transpose(*others, *groups[0][:-1], *groups[1][:-1], near, far)
    turned = np.reshape(
        turned,
        (*turned.shape[: len(others)], *([1] * (2 - len(rows))), *rows[:-1], *([1] * (2 - len(columns))), *columns[:-1], columns[-1], rows[-1]),
        copy=False,
    )
    for index in np.ndindex(*flat.shape[: len(others)]):
        _transpose(flat[index], turned[index])


def _before(source: np.ndarray, axis: int, taken: set[int]) -> list[int]:
    """The axis, if there is one, that goes on where a run along `axis` ends."""
    end = source.strides[axis] * source.shape[axis]
    return [other for other in range(source.ndim) if other not in taken and source.strides[other] == end][:1]


def _transpose(source: np.ndarray, target: np.ndarray) -> None:
    """`target[i, j, column, row] = source[i row, j column]`, for a source and parts of a target in C order.

    16-bit elements are moved four at a time: first 64-bit words between rows, then elements within words. That takes a few
    large calls, where tiles take many small ones; numpy's own transposition is 3 to 8 times slower.
    """
    row_groups, column_groups, columns, rows = target.shape
    if source.itemsize == 2 and columns % 4 == 0 and source.strides[0] % 8 == 0 and source.strides[1] == 2 and source.ctypes.data % 8 == 0:
        words = source.view(np.uint64)
        step = min(256, max(32, STRIP_ELEMENTS // source.shape[1]))
        several, step = (max(1, step // rows), rows) if step >= rows else (1, step)  # groups of rows at a time, or a part of one
        for group in range(0, row_groups, several):
            into = target[group : group + several].reshape(-1, column_groups, columns // 4, 4, rows, copy=False)
            for row in range(0, rows, step):
                first = group * rows + row
                count = len(into) * rows if step == rows else min(step, rows - row)
                strip = np.ascontiguousarray(words[first : first + count].T).view(np.uint16)
                parts = strip.reshape(column_groups, columns // 4, len(into), -1, 4)
                into[..., row : row + step] = parts.transpose(2, 0, 1, 4, 3)
        return
    for i, j in np.ndindex(row_groups, column_groups):
        part = source[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        for row in range(0, rows, TILE[0]):
            for column in range(0, columns, TILE[1]):
                target[i, j, column : column + TILE[1], row : row + TILE[0]] = part[row : row + TILE[0], column : column + TILE[1]].T
