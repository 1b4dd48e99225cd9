"""How far a pipeline has come: told to a callback while it runs, and shown as a bar, as lines, or as JSON. None of
Beam's noise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
import io
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, TextIO

from weightbeam.pipelines.terminal.errors import Refused
from weightbeam.pipelines.terminal.tables import human

INTERVAL = 0.25  # seconds between looks at the counter
ECHO = "^C"  # which a terminal shows behind the bar; where it begins another line, the bar stays on the one before
LINE_EVERY = 10.0  # seconds between lines where there is no terminal
FIGURES = 60  # columns of a terminal that has room for them
SILENCE = 15.0  # seconds in which nothing moves before it is said what is waited for


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """How far a pipeline has come.

    Attributes:
      doing: what it does, such as `converting`.
      done, total: bytes.
      seconds: since it began.
      finished: whether this is the last word of it.
      state: what to say while nothing moves: of a job on another engine, or what is waited for; mostly empty.
    """

    doing: str
    done: int
    total: int
    seconds: float
    finished: bool = False
    state: str = ""


Report = Callable[[Progress], None]  # is called in a thread of its own, one call at a time


@contextlib.contextmanager
def watch_progress(
    total: int,
    done: Callable[[], int],
    doing: str,
    report: Report | None,
    state: Callable[[], str] = str,
    places: Sequence[str] = (),
) -> Iterator[None]:
    """Context manager: a thread tells `report` four times a second how far `done()` has come towards `total` bytes, and
    once at the end.

    `state` says what else there is to say. `places` are what is waited for where nothing moves.
    """
    if report is None:
        yield
        return
    stop, start = threading.Event(), time.monotonic()
    moved = (0, start)  # how far it had come last, and when

    def tell(finished: bool = False) -> None:
        nonlocal moved
        now, far = time.monotonic(), done()
        if far != moved[0]:
            moved = (far, now)
        still = now - moved[1] if far < total else 0.0
        waits = f"nothing for {still:.0f} s, waiting for {' and '.join(places)}" if places and still >= SILENCE else ""
        report(Progress(doing, far, total, now - start, finished, state() or waits))

    def watch() -> None:
        tell()
        while not stop.wait(INTERVAL):
            tell()
        tell(finished=True)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def roots(urls: Iterable[str]) -> list[str]:
    """Folders, and files that lie in none of them: what is worth naming of all that is read."""
    known = dict.fromkeys(urls)
    return [url for url in known if url.rpartition("/")[0] not in known]


def shown(stream: TextIO | None = None) -> Report:
    """What shows progress to a person: a bar on a terminal and in a notebook, a line every ten seconds elsewhere."""
    if stream is None and in_a_notebook():
        return NotebookBar()
    here: TextIO = stream or sys.stderr  # as it is now: it is redirected while the pipeline runs
    return Bar(here) if here.isatty() else Lines(here)


def in_a_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None


def in_words(now: Progress) -> str:
    """How far it is, how fast, and how long it will take."""
    left = f", {now.seconds * max(0, now.total - now.done) / now.done:.0f} s left" if now.done else ""
    rate = now.state or f"{human(now.done / max(now.seconds, INTERVAL))}/s"
    return f"{now.doing}: {human(now.done)} of {human(now.total)}, {rate}{left}"


class NotebookBar:
    """A bar below a notebook's cell, with rate and time left: one output, which is drawn again.

    Args:
      text: what is shown before anything is told: reading headers, and importing Beam, take seconds.
    """

    def __init__(self, text: str = "") -> None:
        self._display: Any = None
        self._told = False
        if text:
            self._draw(text, "<progress></progress>")

    def __call__(self, now: Progress) -> None:
        self._told = True
        self._draw(in_words(now), f'<progress value="{now.done}" max="{max(1, now.total)}"></progress>')

    def close(self) -> None:
        """Takes away what was shown before anything was told, if nothing was."""
        if not self._told:
            self._draw("", "")

    def _draw(self, text: str, bar: str) -> None:
        from IPython.display import display

        data = {"text/plain": text, "text/html": f"{bar} {html.escape(text)}"}
        if self._display is None:
            self._display = display(data, raw=True, display_id=True)
        else:
            self._display.update(data, raw=True)


class Bar:
    """A bar on a terminal, with rate and time left."""

    drawn: Bar | None = None  # the one that a terminal shows

    def __init__(self, stream: TextIO):
        self._stream, self._bar, self._task = stream, None, None

    def say(self, text: str) -> bool:
        """Prints a message in the bar's place, and the bar below it; returns whether there is a bar."""
        if (bar := self._bar) is None:
            return False
        bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        return True

    def __call__(self, now: Progress) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.constrain import Constrain
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TaskProgressColumn,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )
            from rich.table import Column

            console = Console(file=self._stream)

            class Narrow(Progress):
                def get_renderables(self) -> Iterator[Constrain]:
                    yield Constrain(self.make_tasks_table(self.tasks), console.width - len(ECHO))

            figures = (
                DownloadColumn(table_column=Column(no_wrap=True)),
                TransferSpeedColumn(table_column=Column(no_wrap=True)),
                TextColumn("elapsed"),
                TimeElapsedColumn(table_column=Column(no_wrap=True)),
                TextColumn("left"),
            )
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),  # what the others leave of the line
                *(figures if console.width >= FIGURES else (TaskProgressColumn(),)),
                TimeRemainingColumn(table_column=Column(no_wrap=True)),
            )
            # No redirection: `quiet` redirects too, and whoever ends second would restore the other's stream for good.
            quietly: Any = {"redirect_stdout": False, "redirect_stderr": False}
            self._bar = Narrow(*columns, console=console, expand=True, transient=True, **quietly)
            self._task = self._bar.add_task(now.doing, total=now.total)
            self._bar.start()
            Bar.drawn = self
        assert self._task is not None
        self._bar.update(
            self._task, completed=now.done, description=f"{now.doing} ({now.state})" if now.state else now.doing
        )
        if now.finished:
            Bar.drawn = None
            self._bar.stop()
            self._bar = None


def say_above_bar(text: str) -> bool:
    """Prints a message above the bar that a terminal shows; returns whether there is one."""
    return (bar := Bar.drawn) is not None and bar.say(text)


class Lines:
    """A line every ten seconds, for logs."""

    def __init__(self, stream: TextIO):
        self._stream, self._last = stream, 0.0

    def __call__(self, now: Progress) -> None:
        if now.seconds < self._last + LINE_EVERY or now.finished:
            return
        self._last = now.seconds
        print(in_words(now), file=self._stream, flush=True)


class JsonLines:
    """A line of JSON each second, and one at the end, for programs."""

    def __init__(self, stream: TextIO):
        self._stream, self._last = stream, float("-inf")

    def __call__(self, now: Progress) -> None:
        if now.seconds < self._last + 1.0 and not now.finished:
            return
        self._last = now.seconds
        fields = dataclasses.asdict(now) | {"seconds": round(now.seconds, 3)}
        print(json.dumps({"progress": fields}), file=self._stream, flush=True)


def reporter(progress: bool | str | Report) -> Report | None:
    """What a call's `progress` stands for: True or `auto` for `shown`, False or `none` for nothing, `bar`, `lines` or
    `json`, or a callback.

    Raises:
      Refused: it's none of these.
    """
    kinds = {"bar": Bar, "lines": Lines, "json": JsonLines}
    if progress in (False, "none"):
        return None
    if progress in (True, "auto"):
        return shown()
    if isinstance(progress, str) and progress in kinds:
        return kinds[progress](sys.stderr)
    if not callable(progress):
        raise Refused(f"progress={progress!r} should be True, False, {', '.join(kinds)}, auto, none, or a function")
    return _Careful(progress)


class _Careful:
    """A callback, until it fails: that is said once, and the work goes on."""

    def __init__(self, report: Report):
        self._report: Report | None = report

    def __call__(self, now: Any) -> None:
        if self._report is not None:
            try:
                self._report(now)
            except Exception as e:
                self._report = None
                logging.getLogger("weightbeam").warning(
                    "progress isn't told any more: the callback failed with %s: %s", type(e).__name__, e
                )


def at_most_every(ask: Callable[[], int], seconds: float) -> Callable[[], int]:
    """Asks what takes a while only now and then, and keeps to the last answer meanwhile, and where there is none: it's
    for show.
    """
    known, asked = 0, float("-inf")

    def answer() -> int:
        nonlocal known, asked
        if time.monotonic() - asked > seconds:
            asked = time.monotonic()
            with contextlib.suppress(Exception):
                known = ask()
        return known

    return answer


class _Noise(io.TextIOBase):
    """What stands in the place of standard error: all that is caught at this moment gets what is printed."""

    caught: ClassVar[list[io.StringIO]] = []  # of several calls at a time, each in a thread of its own
    lock: ClassVar[threading.Lock] = threading.Lock()
    before: ClassVar[tuple[int, TextIO | None]] = logging.NOTSET, None

    def write(self, text: str) -> int:
        for noise in tuple(self.caught):
            noise.write(text)
        return len(text)


@contextlib.contextmanager
def quiet(noise: io.StringIO) -> Iterator[None]:
    """Context manager: catches what Beam prints and logs; on a failure that is hundreds of lines."""
    root = logging.getLogger()
    with _Noise.lock:
        if not _Noise.caught:
            _Noise.before = root.level, sys.stderr
            root.setLevel(logging.CRITICAL)
            sys.stderr = _Noise()
        _Noise.caught.append(noise)
    try:
        yield
    finally:
        with _Noise.lock:
            _Noise.caught[:] = [each for each in _Noise.caught if each is not noise]
            if not _Noise.caught:
                level, stderr = _Noise.before
                root.setLevel(level)
                if isinstance(sys.stderr, _Noise):  # else somebody has put another one there since
                    sys.stderr = stderr
