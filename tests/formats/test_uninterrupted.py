"""Ctrl-C and a polite kill while the hub answers the one request that publishes: it isn't left before that is known."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from servers.clients import at_hub
from servers.hub import FakeHub
from support import files_of, make_release

from weightbeam.formats.storage.uninterrupted import IMPATIENCE
from weightbeam.formats.targets.hub import publish
from weightbeam.pipelines.cli import Interrupts

TOKEN = "hf_a-token-that-nobody-may-see"
REPO, URL, TITLE = "org/tuned", "hf://org/tuned", "export 1234"


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with at_hub(TOKEN) as server:
        server.add(REPO).writers.add(TOKEN)
        yield server


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes | Path]:
    return files_of(make_release(tmp_path_factory.mktemp("made") / "release"))


def published(hub: FakeHub) -> int:
    """How often it is: as a commit, or as a pull request."""
    repository = hub.repositories[REPO]
    return [commit.title for commit in [*repository.head.history(), *repository.pulls]].count(TITLE)


def kill_when(true: Callable[[], bool], *after: tuple[float, int]) -> threading.Thread:
    """Signals to this process, each so many seconds after the one before, from when something is true."""

    def kill() -> None:
        while not true():
            time.sleep(0.01)
        for seconds, number in after:
            time.sleep(seconds)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


@pytest.mark.parametrize("create_pr", [False, True], ids=["commit", "pull request"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_answer(
    hub: FakeHub, files: dict[str, bytes | Path], number: int, create_pr: bool
) -> None:
    """When the stop is told, the model is there, and the words say so; the same again does nothing."""
    fault = hub.fail("slow", seconds=1, times=1, matching="POST .*/commit/")
    interrupts = Interrupts()
    with interrupts.caught():
        killer = kill_when(lambda: fault.hits > 0, (0.2, number))
        with pytest.raises(KeyboardInterrupt, match=rf"^but {URL}@\w+ is published: {hub.url}/{REPO}/"):
            publish(URL, TITLE, files, create_pr=create_pr)
        assert published(hub) == 1
        killer.join()
        assert signal.getsignal(number) is interrupts
    assert interrupts.came == number
    assert publish(URL, TITLE, files, create_pr=create_pr)
    assert published(hub) == 1


def test_a_second_one_gives_up(hub: FakeHub, files: dict[str, bytes | Path]) -> None:
    """One that comes at once adds nothing; a later one ends the wait, and it is said that the end isn't known."""
    fault = hub.fail("slow", seconds=3 * IMPATIENCE, times=1, matching="POST .*/commit/")
    signals = (0.1, signal.SIGINT), (0.1, signal.SIGINT), (IMPATIENCE, signal.SIGINT)
    with Interrupts().caught():
        killer = kill_when(lambda: fault.hits > 0, *signals)
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt, match=f"was being published; look at {hub.url}/{REPO} "):
            publish(URL, TITLE, files)
        assert IMPATIENCE < time.monotonic() - began < 2.5 * IMPATIENCE
        assert published(hub) == 0
        killer.join()


def test_a_request_that_fails_isnt_repeated_after_a_signal(hub: FakeHub, files: dict[str, bytes | Path]) -> None:
    fault = hub.fail("slow", seconds=0.5, matching="POST .*/commit/")
    broken = hub.fail("status", status=503, matching="POST .*/commit/")
    with Interrupts().caught():
        killer = kill_when(lambda: fault.hits > 0, (0.1, signal.SIGTERM))
        with pytest.raises(KeyboardInterrupt, match="was being published; look at"):
            publish(URL, TITLE, files)
        killer.join()
    assert broken.hits == 1


def test_another_thread_only_makes_the_request(hub: FakeHub, files: dict[str, bytes | Path]) -> None:
    """There no handler can be set."""
    thread = threading.Thread(target=publish, args=(URL, TITLE, files))
    thread.start()
    thread.join()
    assert published(hub) == 1
