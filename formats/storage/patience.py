"""How long requests to a service are repeated: whoever was stopped waits for nobody for long."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

STOP_SECONDS = 10.0  # for all that a stop asks of a service, such as to give a lease back
_until = math.inf  # of this process: threads beside the one that is stopped wait for the same service


def hurry() -> None:
    """From now on requests are repeated for `STOP_SECONDS` alone."""
    global _until
    _until = min(_until, time.monotonic() + STOP_SECONDS)


def left() -> float:
    """Seconds for which requests may still be repeated; endless where nobody was stopped."""
    return max(0.0, _until - time.monotonic())


@contextlib.contextmanager
def hurried_at_most() -> Iterator[None]:
    """Context manager: `hurry` holds until its end."""
    global _until
    try:
        yield
    finally:
        _until = math.inf
