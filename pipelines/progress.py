"""What a person sees while a pipeline runs: a progress bar on a terminal, a line now and then elsewhere, and none of Beam's noise."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from weightbeam.pipelines.report import human

INTERVAL = 0.25  # seconds between looks at the counter
LINE_EVERY = 10.0  # seconds between lines where there is no terminal


class ShowProgress:
    """While it is entered, a thread shows how far `done()` has come towards `total` bytes."""

    def __init__(self, total: int, done: Callable[[], int], doing: str = "converting"):
        self._total, self._done, self._doing = total, done, doing
        self._stop = threading.Event()
        self._stream = sys.stderr  # as it is now: it is redirected while the pipeline runs
        self._thread = threading.Thread(target=self._bar if self._stream.isatty() else self._lines, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _bar(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(file=self._stream)) as progress:
            task = progress.add_task(self._doing, total=self._total)
            while not self._stop.wait(INTERVAL):
                progress.update(task, completed=self._done())
            progress.update(task, completed=self._done())

    def _lines(self) -> None:
        start = time.monotonic()
        while not self._stop.wait(LINE_EVERY):
            done, seconds = self._done(), time.monotonic() - start
            left = f", {seconds * max(0, self._total - done) / done:.0f} s left" if done else ""
            print(f"{self._doing}: {human(done)} of {human(self._total)}, {human(done / seconds)}/s{left}", file=self._stream, flush=True)


def seldom(ask: Callable[[], int], seconds: float) -> Callable[[], int]:
    """Asks what takes a while only now and then, and keeps to the last answer meanwhile, and where there is none: it's for show."""
    known, asked = 0, float("-inf")

    def answer() -> int:
        nonlocal known, asked
        if time.monotonic() - asked > seconds:
            asked = time.monotonic()
            with contextlib.suppress(Exception):
                known = ask()
        return known

    return answer


@contextlib.contextmanager
def quiet(noise: io.StringIO) -> Iterator[None]:
    """Catches what Beam prints and logs: on a failure that is hundreds of lines."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(noise):
            yield
    finally:
        root.setLevel(level)
