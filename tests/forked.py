"""Chosen tests in a forked process: a program that has imported what takes long runs them as often as it likes, each
time with the project as its files then are.

The program must not have imported `weightbeam` itself. `run` tells what happens while it happens.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

# What tests and commands import that takes longest. Not transformers, nor PEFT, which imports it: a pickler that asks
# every module for a name has it import all of its models, and Beam's tests take forty seconds more.
HEAVY = ["numpy", "tensorstore", "apache_beam", "jax", "orbax.checkpoint", "torch"]
START = 180  # seconds until the first test, importing and collecting
TIERS = {"test": "not landing and not slow", "landing": "landing and not slow"}  # a target of make -> its tests
Event = dict[str, Any]


def warm(names: Iterable[str] = HEAVY) -> None:
    """Imports what takes long."""
    for name in names:
        importlib.import_module(name)
    assert "weightbeam" not in sys.modules


def durations() -> dict[str, float]:
    """The seconds that files of tests took, as far as `make durations` has kept them."""
    file = Path(__file__).with_name("durations.json")
    return json.loads(file.read_bytes()) if file.is_file() else {}


def batches(tests: Sequence[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Tests by files: of one file, of the next two, four, and so on: what fails mostly fails in the first, and a
    process for each file would take longer for the others.
    """
    files, size = list(dict.fromkeys(file for file, _ in tests)), 1
    while files:
        yield [test for test in tests if test[0] in files[:size]]
        files, size = files[size:], 2 * size


class Chosen:
    """A plugin: of the tests that pytest finds, those that are chosen, in the order given; tells how they go."""

    def __init__(self, tests: Collection[tuple[str, str]], without: Collection[str] = (), only: str = "") -> None:
        """`tests`: (file, function), in the order in which they are to run; `without` and `only` are ids."""
        self.order = {test: number for number, test in enumerate(tests)}
        self.without, self.only, self.pipe = without, only, -1
        self.settings: Mapping[str, Any] = {}  # of hypothesis, over those of the tests

    def pytest_sessionstart(self) -> None:
        hypothesis.settings.register_profile("forked", hypothesis.settings(), **self.settings)
        hypothesis.settings.load_profile("forked")

    def tell(self, **event: Any) -> None:
        os.write(self.pipe, (json.dumps(event) + "\n").encode())

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        def place(item: pytest.Item) -> int:
            return self.order.get((item.nodeid.partition("::")[0], getattr(item, "originalname", item.name)), -1)

        kept = [item for item in items if place(item) >= 0 and item.nodeid not in self.without]
        items[:] = sorted((item for item in kept if self.only in ("", item.nodeid)), key=place)
        self.tell(event="collected", tests=len(items))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.tell(event="failed", test=report.nodeid, text=report.longreprtext)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.tell(event="started", test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.tell(event="failed", test=report.nodeid, text=report.longreprtext)
        elif report.when == "call" or report.skipped:
            self.tell(event="skipped" if report.skipped else "passed", test=report.nodeid, seconds=report.duration)


def run_tests(
    root: Path, chosen: Chosen, options: Iterable[str], temp: Path, limit: float, until: float = float("inf")
) -> Iterator[Event]:
    """Runs tests and yields what happens: `collected`, `started`, `passed`, `skipped`, `failed`, and at last one of
    `ended`, with pytest's status, `crashed`, `late` (a test that has taken more than its limit) and `stopped`.

    Args:
      options: pytest's.
      temp: the parent of the tests' folders; what is made once in a run by `write_once` stays there.
      limit: of a test, in seconds.
      until: when it's to be stopped, in seconds of `time.monotonic`.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        chosen.pipe = writing
        _work(root, chosen, options, temp)
    os.close(writing)
    yield from _follow(child, reading, limit, until)


def _work(root: Path, chosen: Chosen, options: Iterable[str], temp: Path) -> None:
    """The forked process, to its end."""
    files = dict.fromkeys(file for file, _ in chosen.order)
    status: int = pytest.ExitCode.INTERNAL_ERROR
    try:
        os.setsid()
        temp.mkdir(parents=True, exist_ok=True)
        printed = os.open(temp / "printed", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(printed, stream)
        os.chdir(root)
        # As a worker of pytest-xdist, whose parent's folder has what is made once.
        os.environ |= {"PYTHONPATH": str(root), "PYTEST_XDIST_WORKER": "gw0"}
        sys.path[:0] = [str(root), str(root / "tests")]
        status = pytest.main(
            [*files, *options, "-p", "no:cacheprovider", f"--rootdir={root}", f"--basetemp={temp / 'run'}"], [chosen]
        )
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _follow(child: int, reading: int, seconds: float, until: float) -> Iterator[Event]:
    """What the child tells, until it has ended, or has to be."""
    test, limit = "", time.monotonic() + START
    rest = b""
    ending: Event = {}
    try:
        while not ending:
            left = min(limit, until) - time.monotonic()
            ready = left > 0 and select.select([reading], [], [], left)[0]
            if not ready:
                ending = dict(event="stopped" if until < limit else "late", test=test)
                break
            data = os.read(reading, 1 << 16)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                event = json.loads(line)
                if event["event"] == "started":
                    test = event["test"]
                    limit = time.monotonic() + seconds
                yield event
            if not data:
                break
    finally:  # also where nobody wants to know any more
        os.close(reading)
        end = _end(child, kill=bool(ending) or sys.exc_info()[0] is not None)
    yield ending | end if ending else end | dict(test=test)


def _end(child: int, kill: bool) -> Event:
    """Waits for the child, or ends it with all that it has started; says how it went, and what it took."""
    if kill:
        started = psutil.Process(child).children(recursive=True)
        os.kill(child, signal.SIGKILL)
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    took = dict(status=code, cpu=usage.ru_utime + usage.ru_stime)
    return took if kill else dict(event="crashed" if code < 0 else "ended", **took)
