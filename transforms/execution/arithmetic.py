"""Whether this process counts as the bits of results need it."""

from __future__ import annotations

import numpy as np

FLUSHES = (
    "this process takes numbers nearest to zero (subnormal ones) for zero, so results wouldn't have the bits that they "
    "should: a library built with -ffast-math sets that for all, or torch.set_flush_denormal(True) was called; begin without it"
)


def flushes() -> bool:
    """Whether the thread's arithmetic takes subnormal numbers for zero, as operands or as results.

    Threads begin with the setting of the thread that starts them.
    """
    smallest = np.ones(4, np.uint32).view(np.float32)  # by its bits: what makes a number of it may flush it, too
    normal = np.full(4, 2.0**-126, np.float32)
    return not all(bits.view(np.uint32).all() for bits in (smallest * np.float32(2.0**100), normal * np.float32(0.5)))
