"""The heaps of the C library, which keep what was freed.

glibc has one for each thread, up to eight a core. TensorStore's threads held as much in them once more as the units of
a conversion take.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

VARIABLE = "MALLOC_ARENA_MAX"
_M_ARENA_MAX = -8  # of mallopt


def use_one_heap() -> None:
    """Has this process use one heap, and those that it starts; only before it has a second thread."""
    if VARIABLE in os.environ:
        return
    os.environ[VARIABLE] = "1"
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def trim_heaps() -> None:
    """Gives the system what was freed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
