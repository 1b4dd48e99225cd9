"""Ctrl-C and a polite kill while the hub answers the one request that publishes: it isn't left before that is known."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import warm
from processes import wait_until
from servers.clients import TOKEN
from servers.hub import FakeHub
from support import convert, files_of, make_release

from weightbeam.formats.storage.uninterrupted import IMPATIENCE
from weightbeam.formats.targets.hub import publish
from weightbeam.pipelines.cli import Interrupts

REPO, URL, TITLE = "org/tuned", "hf://org/tuned", "export 1234"


@pytest.fixture
def hub(hub: FakeHub) -> FakeHub:
    hub.add(REPO).writers.add(TOKEN)
    return hub


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


@pytest.mark.parametrize("options", [(), ("--create_pr",)], ids=["commit", "pull request"])
def test_a_stopped_export_says_that_it_is_published(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    """And leaves nothing in the cache; where it was stopped before, it says that the same command publishes it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = make_release(tmp_path / "hf")
    checkpoint = convert(source, tmp_path / "ckpt", "--maxtext_model", "llama2-7b")
    words = ("export", checkpoint, URL, "--like", source, *options)
    for matching, said in (
        ("POST .*/preupload/", "; the same command publishes it"),
        ("POST .*/commit/", f"stopped; but {URL}@"),
    ):
        fault = hub.fail("slow", seconds=2, times=1, matching=matching)
        with warm.start(*words) as process:
            wait_until(lambda fault=fault: fault.hits > 0, process=process)
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(60)
        assert process.returncode == 130
        assert said in told
        assert "Traceback" not in told
    assert [*tmp_path.glob("cache/weightbeam/*")] == []
