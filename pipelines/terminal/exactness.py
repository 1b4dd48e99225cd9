"""Refuses to count where results wouldn't have the right bits."""

from __future__ import annotations

import sys

from weightbeam.pipelines.terminal.errors import RefusedError


def check_arithmetic() -> None:
    """Makes sure that this thread's arithmetic, if there is any, has subnormal numbers.

    Raises:
      RefusedError: it takes them for zero.
    """
    if "numpy" not in sys.modules:  # nothing is counted
        return
    from weightbeam.transforms.execution.arithmetic import FLUSHES, flushes

    if flushes():
        raise RefusedError(FLUSHES)
