"""Threads whom nobody waits for who is stopped."""

from __future__ import annotations

import concurrent.futures
from types import TracebackType


class StoppablePool(concurrent.futures.ThreadPoolExecutor):
    """A pool for what reads, or sends what counts for nothing before it is committed. A stop leaves it at once: one of
    its threads may wait minutes for a store's answer. A command ends without them; a Python program waits at its own end.
    """

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stopped = kind is not None and not issubclass(kind, Exception)
        self.shutdown(wait=not stopped, cancel_futures=kind is not None)
