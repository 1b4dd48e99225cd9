"""How long requests to a service are repeated: whoever was stopped waits for nobody for long.

    stop                 STOP_SECONDS            the call ends        AFTERWARDS
    ├── requests are repeated ──┼── no request of this process is ──────┤── as ever

Where the service answers in time, the call ends before that, and all is as ever at once.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator

STOP_SECONDS = 10.0  # for all that a stop asks of a service, such as to give a lease back
AFTERWARDS = 15.0  # in which threads that the call leaves behind see it, too: they pause for less between two tries


class _Patience:
    """Of this process: the threads that are at work for a call wait for the same service as the one that is stopped.

    Attributes:
      until: when requests aren't repeated any more.
      ends: when they are again.
      stopped: the thread that was stopped, until its call ends; no other one's end is the call's.
      calls: under way in that thread, one in another.
    """

    def __init__(self) -> None:
        self.until = self.ends = math.inf
        self.stopped: int | None = None
        self.calls = threading.local()


_PATIENCE = _Patience()


def hurry() -> None:
    """From now on requests are repeated for `STOP_SECONDS` alone, in a call that `hurried_at_most` is around."""
    if _PATIENCE.stopped is None and getattr(_PATIENCE.calls, "depth", 0):
        _PATIENCE.until, _PATIENCE.ends = time.monotonic() + STOP_SECONDS, math.inf
        _PATIENCE.stopped = threading.get_ident()


def left() -> float:
    """Seconds for which requests may still be repeated; endless where nobody was stopped."""
    now = time.monotonic()
    return math.inf if now > _PATIENCE.ends else max(0.0, _PATIENCE.until - now)


@contextlib.contextmanager
def hurried_at_most() -> Iterator[None]:
    """Context manager: `hurry` holds until the end of this call, or of the one that it is a part of."""
    calls = _PATIENCE.calls
    calls.depth = getattr(calls, "depth", 0) + 1
    try:
        yield
    finally:
        calls.depth -= 1
        if not calls.depth and _PATIENCE.stopped == threading.get_ident():
            _PATIENCE.ends = time.monotonic() + (0.0 if left() else AFTERWARDS)
            _PATIENCE.stopped = None
