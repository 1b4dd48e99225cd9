"""Reading, computing and writing at the same time, for a thread that takes one unit after the other.

A link carries bytes both ways, but a thread that reads a unit, computes and writes it uses one direction at a time.
Where the source or the output is elsewhere, the next unit is read and the last ones are written in the background
meanwhile:

    read       1   2   3   4
    compute        1   2   3   4
    write            1   2   3   4

On a local disk that gains nothing and needs memory for more units, so there the thread does everything itself.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, ParamSpec, TypeVar

REMOTE = "://"  # of a URL of a bucket or of the hub; local folders have none
# Units of a thread that are read before it gets to them, and written after it is done with them. Two would be read at the
# same time, each at half the rate, and be there at once: nothing could be written meanwhile.
AHEAD, BEHIND = 1, 6
# Units that a process reads at a time, whatever its threads: each of many would get a small share of the link, and all
# would be there at once, late; until then nothing could be written. Of two, one fills the link while the other one ends
# or begins.
READERS = 2
# units that a process has memory for beside one for each of its threads, where it overlaps; its threads share them
SPARE = 2
P = ParamSpec("P")
T = TypeVar("T")


def overlaps(*places: object) -> bool:
    """Whether one of the places, as people name them, is in a bucket or on the hub, so that reading, computing and
    writing go on at the same time.
    """
    return any(REMOTE in str(place) for place in places)


def units_at_a_time(threads: int, overlapping: bool) -> int:
    """How many units of the largest size a process has memory for."""
    return threads + SPARE * overlapping


class Background(Generic[T]):
    """Calls in the background of one thread, whose results come in the order of the calls.

    Attributes:
      most: how many may be under way; 0 for none: each call is made at once, by the thread itself.
      turns: how many of the process's threads may be at such calls at a time; the others wait, first come, first
        served. 0 for any number.
    """

    def __init__(self, most: int, turns: int = 0):
        self.most, self.turns = most, turns
        self._calls: deque[Future[T]] = deque()

    def begin(self, call: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> list[T]:
        """Begins a call; returns the results of earlier ones that are over. Waits for the earliest where there are too
        many.

        Raises what an earlier call has raised.
        """
        if not self.most:
            return [call(*arguments, **keywords)]
        over = []
        while self._calls and (len(self._calls) >= self.most or self._calls[0].done()):
            over.append(self._calls.popleft().result())
        self._calls.append(_pool(self.turns).submit(call, *arguments, **keywords))
        return over

    def end(self) -> list[T]:
        """Waits for all calls; returns the results that weren't returned yet. Raises what a call has raised."""
        over = [call.result() for call in self._calls]
        self._calls.clear()
        return over

    def forget(self, what: Callable[[T], object]) -> None:
        """Asks for no more results; has something done with each as soon as it is there, of the calls that don't fail."""
        for call in self._calls:
            call.add_done_callback(lambda over: None if over.exception() else what(over.result()))
        self._calls.clear()


def begin_at_once(call: Callable[P, object], *arguments: P.args, **keywords: P.kwargs) -> None:
    """Has something done in the background that takes nobody's turn: those whose turn it is may wait for it. It raises
    nothing.
    """
    _pool(0).submit(call, *arguments, **keywords)


@functools.cache
def _pool(turns: int) -> ThreadPoolExecutor:
    """This process's threads for calls in the background that take turns; as many start as there are calls under way,
    which `Background.most` bounds.
    """
    return ThreadPoolExecutor(max_workers=turns or 1024, thread_name_prefix="background")


def wait_for_all() -> None:
    """Waits until nothing goes on in the background of any thread: after a failure, when nobody asks for the results
    any more.
    """
    for turns in (0, READERS):
        _pool(turns).shutdown()
    _pool.cache_clear()
