"""An arena: the memory of one unit after the other, taken from the system once.

The arrays of a unit can lie where those of an earlier one lay. That bounds a process's memory by the units it works on at a
time, and saves the system from handing out and clearing the same pages for every unit, which took more time than the copies.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
import weakref
from collections import Counter
from collections.abc import Callable

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
        self.release: Callable[[], object] = lambda: None  # gives its bytes back to the budget

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


_FREE: list[Arena] = []
_CHANGED = threading.Condition()  # guards what follows and _FREE
_HELD: Counter[int] = Counter()  # bytes of the arenas that each thread has taken, and that still exist


def take(capacity: int, budget: int | None = None) -> Arena:
    """An arena with room for `capacity` bytes, for one unit.

    Waits while that would make the arenas of this process more than `budget` bytes and other threads hold some. A thread that
    holds one already doesn't wait: an engine that runs a stage for all elements before the next would wait for itself.
    """
    me = threading.get_ident()
    with _CHANGED:
        while budget is not None and me not in _HELD and _HELD and _HELD.total() + capacity > budget:
            _CHANGED.wait()
        _HELD[me] += capacity
        arena = _FREE.pop() if _FREE else Arena()
    arena.reset(capacity)
    arena.release = weakref.finalize(arena, _release, me, capacity)
    return arena


def give_back(arena: Arena) -> None:
    """Takes an arena back whose arrays nobody uses any more.

    After an error it isn't given back: writes that were started may still read from it. Its bytes count until it is gone.
    """
    with _CHANGED:
        _FREE.append(arena)
    arena.release()


def release_free() -> None:
    """Gives the arenas that nobody uses back to the system: the units are done, and the assembly needs memory of its own."""
    with _CHANGED:
        _FREE.clear()


def _release(thread: int, nbytes: int) -> None:
    with _CHANGED:
        _HELD[thread] -= nbytes
        if not _HELD[thread]:
            del _HELD[thread]
        _CHANGED.notify_all()
