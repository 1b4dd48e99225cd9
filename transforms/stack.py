"""The one copy and the one cast: pieces of tensors into shards that are contiguous in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from formats.safetensors import Empty
from model_mappings.cells import Piece, extent
from model_mappings.ops import Op
from transforms.units import ShardJob

TILE = (32, 256)  # elements along the target's and the source's fastest axes: a cache line of each
STRIP_ELEMENTS = 1 << 17  # elements handled at a time, so that a temporary form of them stays in the cache


def stack(job: ShardJob, views: Sequence[tuple[Piece, np.ndarray]], empty: Empty = np.empty) -> np.ndarray:
    """Makes a shard of its pieces' views, each already in the array's layout, in an array that `empty` makes."""
    shard = empty(extent(job.box), job.spec.dtype)
    if job.fill is not None:
        shard[...] = job.fill
    origin = tuple(start for start, _ in job.box)
    for piece, view in views:
        copy(view, piece.target.of(shard, origin), piece.ops)
    return shard


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
    """A plain copy where both sides run along the same axis, else transpositions of two axes, one for each index of the others."""
    if source.ndim < 2 or source.size < 1 << 10:
        target[...] = source
        return
    near = min(range(source.ndim), key=lambda axis: source.strides[axis])
    far = min(range(target.ndim), key=lambda axis: target.strides[axis])
    others = [n for axis, n in enumerate(source.shape) if axis not in (near, far)]
    if near == far or source.shape[near] * source.shape[far] < 1 << 10:
        target[...] = source
        return
    rows = np.moveaxis(source, (far, near), (-2, -1))
    columns = np.moveaxis(target, (near, far), (-2, -1))
    for index in np.ndindex(*others):
        _transpose(rows[index], columns[index])


def _transpose(source: np.ndarray, target: np.ndarray) -> None:
    """`target = source.T` for a source and a target in C order.

    16-bit elements are moved four at a time: first 64-bit words between rows, then elements within words. That takes a few
    large calls, where tiles take many small ones; numpy's own transposition is 3 to 8 times slower.
    """
    rows, columns = source.shape
    if source.itemsize == 2 and columns % 4 == 0 and source.strides[0] % 8 == 0 and source.strides[1] == 2 and source.ctypes.data % 8 == 0:
        words, split = source.view(np.uint64), target.reshape(columns // 4, 4, rows)
        step = min(256, max(32, STRIP_ELEMENTS // columns))
        for row in range(0, rows, step):
            strip = np.ascontiguousarray(words[row : row + step].T).view(np.uint16)
            split[:, :, row : row + step] = strip.reshape(columns // 4, -1, 4).transpose(0, 2, 1)
        return
    for row in range(0, rows, TILE[0]):
        for column in range(0, columns, TILE[1]):
            target[column : column + TILE[1], row : row + TILE[0]] = source[row : row + TILE[0], column : column + TILE[1]].T
