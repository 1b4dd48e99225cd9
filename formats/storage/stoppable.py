"""Threads whom nobody waits for who is stopped."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class StoppablePool(concurrent.futures.Executor):
    """A pool for what reads, or sends what counts for nothing before it is committed. A stop leaves it at once, and nobody
    waits for its threads any more: one of them may wait minutes for a store's answer. The standard library's pool is
    waited for when the program ends.
    """

    def __init__(self, threads: int) -> None:
        """`threads`: the most that there are."""
        self._most, self._threads = threads, list[threading.Thread]()
        self._tasks: queue.SimpleQueue[tuple[concurrent.futures.Future, Callable[[], object]] | None] = (
            queue.SimpleQueue()
        )

    def submit(self, function: Callable[P, T], /, *given: P.args, **named: P.kwargs) -> concurrent.futures.Future[T]:
        future = concurrent.futures.Future[T]()
        self._tasks.put((future, functools.partial(function, *given, **named)))
        if len(self._threads) < self._most:
            thread = threading.Thread(target=self._work, daemon=True)
            with contextlib.suppress(RuntimeError) if self._threads else contextlib.nullcontext():
                thread.start()  # where the system has no more of them, those that there are do it
                self._threads.append(thread)
        return future

    def _work(self) -> None:
        while task := self._tasks.get():
            future, function = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as e:
                    future.set_exception(e)
            del task, future, function  # what came of it is his who asked
        self._tasks.put(None)  # for the next one

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            with contextlib.suppress(queue.Empty):
                while task := self._tasks.get_nowait():
                    task[0].cancel()
        self._tasks.put(None)
        if kind is None or issubclass(kind, Exception):
            for thread in self._threads:
                thread.join()
