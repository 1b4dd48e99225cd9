"""The one copy and the one cast: pieces of tensors into shards that are contiguous in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from model_mappings.cells import Piece
from model_mappings.ops import Op
from transforms.units import ShardJob

TILE = (16, 256)  # elements along the target's and the source's fastest axes: 16 source rows in the cache while their columns are written
STRIP_ELEMENTS = 1 << 17  # elements computed at a time, so that their float32 form stays in the cache


def stack(job: ShardJob, views: Sequence[tuple[Piece, np.ndarray]]) -> np.ndarray:
    """Makes a shard of its pieces' views, each already in the array's layout."""
    shape = tuple(stop - start for start, stop in job.box)
    shard = np.empty(shape, job.spec.dtype) if job.fill is None else np.full(shape, job.fill, job.spec.dtype)
    origin = tuple(start for start, _ in job.box)
    for piece, view in views:
        copy(view, piece.target.of(shard, origin), piece.ops)
    return shard


def copy(source: np.ndarray, target: np.ndarray, ops: Sequence[Op] = ()) -> None:
    """`target = ops(source)` in float32 with one cast; a plain copy where both have one dtype and there are no ops."""
    if not ops and source.dtype == target.dtype:
        bits = np.dtype(f"u{source.dtype.itemsize}")  # numpy copies integers several times faster than ml_dtypes' floats
        _copy_tiled(source.view(bits), target.view(bits))
        return
    rows = max(1, STRIP_ELEMENTS * len(source) // max(1, source.size)) if source.ndim else 1
    for start in range(0, len(source), rows) if source.ndim else [...]:
        part = slice(start, start + rows) if source.ndim else ...
        values = source[part].astype(np.float32)
        for op in ops:
            values = op.forward(values)
        target[part] = values


def _copy_tiled(source: np.ndarray, target: np.ndarray) -> None:
    """Copies in tiles where the two sides run along different axes: a transposition that reads whole cache lines."""
    if source.ndim < 2 or source.size < 1 << 12:
        target[...] = source
        return
    near = min((axis for axis in range(source.ndim) if source.shape[axis] > 1), key=lambda axis: abs(source.strides[axis]), default=0)
    far = min((axis for axis in range(target.ndim) if target.shape[axis] > 1), key=lambda axis: abs(target.strides[axis]), default=0)
    if near == far:
        target[...] = source
        return
    index: list[slice] = [slice(None)] * source.ndim
    for start in range(0, source.shape[far], TILE[0]):
        index[far] = slice(start, start + TILE[0])
        for column in range(0, source.shape[near], TILE[1]):
            index[near] = slice(column, column + TILE[1])
            target[tuple(index)] = source[tuple(index)]
