"""A request that changes what others see, and that isn't left before its answer is known."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import UserList
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar

Answer = TypeVar("Answer")


class _Texts(threading.local, UserList[str]):
    """Texts, of each thread its own."""


PUBLISHED = _Texts()  # what the command has published by now, for what a stop says that comes later
IMPATIENCE = 1.0  # seconds in which a second Ctrl-C adds nothing to the first


def uninterrupted(request: Callable[[], Answer], done: Callable[[Answer], str], unknown: str) -> Answer:
    """Makes a request, whose answer Ctrl-C and a polite kill wait for; a second one gives up. In another thread than the
    main one, where no signal arrives, it only makes the request.

    Args:
      done: what to say where it went through, also of a stop that comes later; empty where that is nothing.
      unknown: what to say where it failed, or isn't waited for: whether it went through isn't known.

    Raises:
      KeyboardInterrupt: a signal came; it says what became of the request.
    """
    if threading.current_thread() is not threading.main_thread():
        return request()
    said = unknown
    came: dict[int, float] = {}
    try:
        with _deferred(came):
            made = request()
            if said := done(made):
                PUBLISHED.append(said)
    finally:
        try:
            for number in came:
                signal.raise_signal(number)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(said) from None
    return made


@contextlib.contextmanager
def _deferred(came: dict[int, float]) -> Iterator[None]:
    """Context manager: signals only note when they came; one that comes late after the first is a KeyboardInterrupt."""

    def defer(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        came.setdefault(number, now)
        if now - min(came.values()) > IMPATIENCE:
            raise KeyboardInterrupt

    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    found = {number: handler for number, handler in found.items() if handler not in (None, signal.SIG_IGN)}
    try:
        for number in found:
            signal.signal(number, defer)
        yield
    finally:
        for number, handler in found.items():
            signal.signal(number, handler)
