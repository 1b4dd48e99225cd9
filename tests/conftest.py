"""What holds for all tests: the tiers, what a run says while it goes, and the processes that are forked."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import elsewhere
import pairs
import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from measured import Measure
    from servers.gcs import FakeGcs
    from servers.hub import FakeHub

HERE = Path(__file__).parent
DURATIONS = HERE / "durations.json"

# What runs whole commands in many ways, processes, engines, containers' files: `make test-landing`. `make test` doesn't
# even import it, and has one path of each command and the pairwise table (tests/commands) in its place.
LANDING = (
    *(
        "benchmarks",
        "deploy",
        "engines",
        "pipelines",
        "loading/test_example.py",
        "loading/test_load.py",
        "loading/test_meeting.py",
    ),
    *("test_docs.py", "test_docstrings.py", "test_mutants.py", "test_package.py", "test_readme.py"),
)
EVERY = 5.0  # seconds between two lines of progress

# A machine that is busy for two seconds is no fault of a test.
settings.register_profile("busy", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("busy")

# A shell has what it starts in the background ignore Ctrl-C, and so would all that the tests start and then interrupt.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

if os.environ.get("WEIGHTBEAM_SYSTEM") == "macos":  # `make test-pure SYSTEM=macos`
    elsewhere.as_macos()


def lands(path: Path) -> bool:
    """Whether a file is of the landing tier."""
    relative = path.relative_to(HERE).as_posix() if path.is_relative_to(HERE) else ""
    return any(relative == place or relative.startswith(f"{place}/") for place in LANDING)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test` doesn't import the tests that it doesn't run."""
    quick = "not landing" in config.option.markexpr
    return True if quick and lands(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if lands(item.path):
            item.add_marker("landing")
    silent = {item.nodeid.partition("[")[0] for item in items for mark in item.iter_markers("slow") if not mark.args}
    if silent:
        raise pytest.UsageError("slow, without a reason: " + ", ".join(sorted(silent)))


# --- what a run says --------------------------------------------------------------------------------------------------


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed {pairs.SEED}, {'all products' if pairs.FULL else 'pairs'}; the same again with WEIGHTBEAM_SEED={pairs.SEED}"


class Progress:
    """A line every few seconds in place of a dot a test: how many have run, how long the rest will take."""

    def __init__(self, config: pytest.Config):
        self._known: dict[str, float] = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
        self._workers = max(1, int(getattr(config.option, "numprocesses", 0) or 1))
        self._total, self._done, self._failed = 0, 0, 0
        self._left: Counter[str] = Counter()
        self._begun = self._collected = time.monotonic()
        # what pytest's capture has put aside: a line that comes while a test runs is none of that test's output
        captured = getattr(config.pluginmanager.getplugin("capturemanager"), "_global_capturing", None)
        saved = getattr(getattr(captured, "out", None), "targetfd_save", None)
        self._out = sys.__stdout__ if saved is None else os.fdopen(os.dup(saved), "w")
        self.taken: Counter[str] = Counter()
        self._tests: Counter[str] = Counter()
        self._last = ""
        self._over = threading.Event()
        threading.Thread(target=self._go_on, daemon=True).start()

    def _go_on(self) -> None:
        """A line every few seconds, whether a test ends or not."""
        while not self._over.wait(EVERY):
            failed = f", {self._failed} failed" if self._failed else ""
            if self._total:
                self._say(
                    f"{self._done:,} of {self._total:,}{failed}, about {self._clock(self._rest())} left; {self._last}"
                )
            else:
                self._say("collecting the tests")

    def expect(self, ids: list[str]) -> None:
        """The tests that will run, which is known as soon as a process has collected them."""
        if self._total:
            return
        self._tests = Counter(test.partition("::")[0] for test in ids)
        self._left = Counter(self._tests)
        self._total, self._collected = len(ids), time.monotonic()
        self._say(f"{len(ids):,} tests in {self._workers} processes, about {self._clock(self._rest())}")

    def _rest(self) -> float:
        """Seconds that the tests will take that haven't run, at the pace of those that have; those of an unknown file as
        long as the average.
        """
        known = {file: self._known[file] for file in self._known if file in self._tests}
        average = sum(known.values()) / max(1, sum(self._tests[file] for file in known)) if known else 0.1

        def forecast(counts: Mapping[str, int]) -> float:
            return sum(
                count * (self._known[file] / self._tests[file] if file in self._known else average)
                for file, count in counts.items()
            )

        left, done = forecast(self._left), forecast(self._tests - self._left)
        pace = (time.monotonic() - self._collected) / done if done > left / 10 else 1 / self._workers
        return left * pace

    @staticmethod
    def _clock(seconds: float) -> str:
        return f"{int(seconds) // 60}:{int(seconds) % 60:02}"

    def _say(self, text: str) -> None:
        print(f"  {self._clock(time.monotonic() - self._begun)}  {text}", file=self._out, flush=True)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self.expect([item.nodeid for item in session.items])

    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        self.expect(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self.taken[file] += report.duration
        self._failed += report.failed
        if report.failed:
            self._say(f"FAILED {report.nodeid}")
        if report.when == "teardown":
            self._done += 1
            self._left[file] -= 1
        self._last = file

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """`make durations`: what each file took, for the next run's forecast."""
        self._over.set()
        if os.environ.get("WEIGHTBEAM_DURATIONS") == "write":
            taken = self._known | {file: round(seconds, 1) for file, seconds in self.taken.items()}
            DURATIONS.write_text(json.dumps(dict(sorted(taken.items())), indent=0) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport, config: pytest.Config) -> tuple[str, str, str] | None:
    """No dot for a test that passed: there is a line every few seconds."""
    if config.option.verbose <= 0 and report.when == "call" and report.passed:
        return "passed", "", ""
    return None


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Progress(config))


# --- what is dear to make, once in a run -----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `cases/models.py` writes."""
    import support

    return support.generate(tmp_path_factory)


# --- servers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """A hub that `servers.clients.TOKEN` may write to, which this process asks, with a cache of its own."""
    from servers.clients import TOKEN, at_hub

    with at_hub(TOKEN, XDG_CACHE_HOME=str(tmp_path / "cache")) as server:
        yield server


@pytest.fixture
def gcs() -> Iterator[FakeGcs]:
    """The buckets `bucket`, `run` and `out`, which this process asks."""
    from servers.clients import asking
    from servers.gcs import FakeGcs

    with FakeGcs("bucket", "run", "out") as server, asking(server):
        yield server


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measure() -> Iterator[Measure]:
    """Runs a command within bounds of time and memory, and says what it took."""
    from measured import measuring

    with measuring() as measure:
        yield measure


@pytest.fixture
def warm_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher's processes are forked from a warm one: fresh interpreters import Beam for seconds each."""
    import warm

    from weightbeam.pipelines.watching import isolation

    monkeypatch.setattr(isolation, "CONTEXT", warm.Context)
