"""An arena: the memory of one unit after the other, taken from the system once.

The arrays of a unit can lie where those of an earlier one lay. That bounds a process's memory by the units it works on
at a time, and saves the system from handing out and clearing the same pages for every unit, which took more time than
the copies.

    take ─▸ a unit's arrays ─▸ give_back                            its memory is the next unit's
    take ─▸ hand_over ─▸ written in the background ─▸ give_back     no thread has to go on for it
    take ─▸ an error, at any time ─▸ uncount                        its memory goes with the last of its arrays
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
import weakref
from collections import Counter

import numpy as np

from weightbeam.formats.heaps import trim_heaps
from weightbeam.transforms.cutting.units import aligned


class Arena:
    """Arrays side by side in one buffer; all of them end when it is reset."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)
        self._used = 0
        self.release: weakref.finalize | None = None  # gives its bytes back to the budget

    def reset(self, capacity: int) -> None:
        """Begins anew with room for `capacity` bytes."""
        if self._buffer.size < capacity:
            self._buffer = np.empty(0, np.uint8)  # gives the old one back first
            # pages that aren't touched cost nothing, so round up and rarely grow
            size = 1 << (capacity - 1).bit_length()
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
            raise MemoryError(
                f"an array of {nbytes:,} bytes doesn't fit into the rest of an arena of {self._buffer.size:,}"
            )
        array = self._buffer[self._used : self._used + nbytes].view(dtype).reshape(shape)
        self._used += aligned(nbytes)
        return array


TRIM_BYTES = 1 << 28  # of units, after which the heaps are trimmed, which takes some 16 ms

_FREE: list[Arena] = []
_untrimmed = 0  # bytes of units that were begun since the heaps were trimmed
_CHANGED = threading.Condition()  # guards what follows and _FREE
_HELD: Counter[int] = Counter()  # bytes of the arenas that each thread has taken, and that still exist
BACKGROUND = 0  # stands in _HELD for what no thread has to go on with: no thread's number


def take(capacity: int, budget: int | None = None) -> Arena:
    """An arena with room for `capacity` bytes, for one unit.

    Waits while that would make the arenas of this process more than `budget` bytes and other threads hold some. A
    thread that holds one already doesn't wait: an engine that runs a stage for all elements before the next would wait
    for itself.
    """
    me = threading.get_ident()
    with _CHANGED:
        while me not in _HELD and not _has_room(capacity, budget):
            _CHANGED.wait()
        arena = _hold(me, capacity)
    arena.reset(capacity)
    return arena


def take_now(capacity: int, budget: int | None) -> Arena | None:
    """An arena with room for `capacity` bytes if there is room in the budget now; else None."""
    with _CHANGED:
        if not _has_room(capacity, budget):
            return None
        arena = _hold(threading.get_ident(), capacity)
    arena.reset(capacity)
    return arena


def _has_room(capacity: int, budget: int | None) -> bool:
    return budget is None or not _HELD or _HELD.total() + capacity <= budget


def _hold(owner: int, capacity: int) -> Arena:
    global _untrimmed
    _HELD[owner] += capacity
    _untrimmed += capacity
    arena = _FREE.pop() if _FREE else Arena()
    arena.release = weakref.finalize(arena, _release, owner, capacity)
    return arena


def hand_over(arena: Arena) -> None:
    """Leaves an arena to the background: the thread that took it needn't go on for it to be given back, and may wait
    for that.
    """
    with _CHANGED:
        if arena.release and (held := arena.release.detach()):
            owner, nbytes = held[2]
            _HELD[BACKGROUND] += nbytes
            _forget_bytes(owner, nbytes)
            arena.release = weakref.finalize(arena, _release, BACKGROUND, nbytes)


def uncount(arena: Arena) -> None:
    """Counts an arena's bytes no more, after an error, so that nobody waits for them; writes that were started may
    still read from it.
    """
    if arena.release:
        arena.release()


def give_back(arena: Arena) -> None:
    """Takes an arena back whose arrays nobody uses any more."""
    global _untrimmed
    with _CHANGED:
        uncount(arena)  # before anybody else can take it, and count it as theirs
        _FREE.append(arena)
        if is_due := _untrimmed > TRIM_BYTES:
            _untrimmed = 0
    if is_due:
        trim_heaps()


def release_free() -> None:
    """Gives the arenas that nobody uses back to the system: the units are done, and the assembly needs memory of its
    own.
    """
    with _CHANGED:
        _FREE.clear()


def _release(owner: int, nbytes: int) -> None:
    with _CHANGED:
        _forget_bytes(owner, nbytes)


def _forget_bytes(owner: int, nbytes: int) -> None:
    _HELD[owner] -= nbytes
    if not _HELD[owner]:
        del _HELD[owner]
    _CHANGED.notify_all()
