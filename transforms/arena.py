"""An arena: the memory of one unit after the other, taken from the system once.

The arrays of a unit can lie where those of an earlier one lay. That bounds a process's memory by the units it works on at a
time, and saves the system from handing out and clearing the same pages for every unit, which took more time than the copies.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import numpy as np

ALIGNMENT = 64  # bytes; a cache line


def aligned(nbytes: int) -> int:
    """The bytes that an array of `nbytes` takes in an arena."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Arena:
    """Arrays side by side in one buffer; all of them end when it is reset."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)
        self._used = 0

    def reset(self, capacity: int) -> None:
        """Begins anew with room for `capacity` bytes."""
        if self._buffer.size < capacity:
            self._buffer = np.empty(0, np.uint8)  # gives the old one back first
            size = 1 << (capacity - 1).bit_length()  # pages that aren't touched cost nothing, so round up and rarely grow
            pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError, AttributeError):  # a hint, which not every system takes
                pages.madvise(mmap.MADV_HUGEPAGE)
            self._buffer = np.frombuffer(pages, np.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array of the arena, in C order, its values arbitrary.

        Raises:
          MemoryError: the unit needs more than it said.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if self._used + nbytes > self._buffer.size:
            raise MemoryError(f"an array of {nbytes:,} bytes doesn't fit into the rest of an arena of {self._buffer.size:,}")
        array = self._buffer[self._used : self._used + nbytes].view(dtype).reshape(shape)
        self._used += aligned(nbytes)
        return array


_FREE: list[Arena] = []  # pop and append are atomic


def take(capacity: int) -> Arena:
    """An arena with room for `capacity` bytes, for one unit."""
    try:
        arena = _FREE.pop()
    except IndexError:
        arena = Arena()
    arena.reset(capacity)
    return arena


def give_back(arena: Arena) -> None:
    """Takes an arena back whose arrays nobody uses any more.

    After an error it isn't given back: writes that were started may still read from it.
    """
    _FREE.append(arena)
