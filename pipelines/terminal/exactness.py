"""Refuses to count where results wouldn't have the right bits."""

from __future__ import annotations

import sys

from weightbeam.pipelines.terminal.errors import Refused


def check_arithmetic() -> None:
    """Makes sure that this thread's arithmetic, if there is any, has subnormal numbers.

    Raises:
      Refused: it takes them for zero.
    """
    if "numpy" not in sys.modules:  # nothing is counted
        return
    from weightbeam.transforms.execution.arithmetic import FLUSHES, flushes

    if flushes():
        raise Refused(FLUSHES)
