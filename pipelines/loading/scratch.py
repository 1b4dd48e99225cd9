"""Memory for reading: buffers that are used again and again, and arrays that the devices may keep."""

from __future__ import annotations

import math

import numpy as np

from weightbeam.transforms.cutting.units import ALIGNMENT, aligned

BUFFER = 16 << 20  # bytes; what a scratch grows by, or by one larger array


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array in memory of its own that begins at a cache line: a CPU device keeps it without a copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + nbytes].view(dtype).reshape(shape)


class Scratch:
    """Arrays in buffers that grow as they are needed and stay; all arrays end when it is reset."""

    def __init__(self) -> None:
        self._buffers: list[np.ndarray] = []
        self._at, self._used = 0, 0  # the buffer that is being filled, and its bytes that are taken

    def reset(self) -> None:
        """Begins anew; the arrays made so far are overwritten."""
        self._at, self._used = 0, 0

    @property
    def nbytes(self) -> int:
        """Memory that it holds."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array in C order, its values arbitrary."""
        nbytes = math.prod(shape) * dtype.itemsize
        while self._at < len(self._buffers) and self._used + nbytes > self._buffers[self._at].nbytes:
            self._at, self._used = self._at + 1, 0
        if self._at == len(self._buffers):
            self._buffers.append(aligned_empty((max(BUFFER, aligned(nbytes)),), np.dtype(np.uint8)))
        array = self._buffers[self._at][self._used : self._used + nbytes].view(dtype).reshape(shape)
        self._used += aligned(nbytes)
        return array
