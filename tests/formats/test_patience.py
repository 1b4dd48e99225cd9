"""How long requests are repeated for a call that was stopped, by a clock of the test's own."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace

import pytest

from weightbeam.formats.storage import patience
from weightbeam.formats.storage.patience import AFTERWARDS, STOP_SECONDS, hurried_at_most, hurry, left


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=made.monotonic))
    monkeypatch.setattr(patience, "_PATIENCE", patience._Patience())
    return made


def test_a_service_that_answers(clock: Clock) -> None:
    """All is as ever once the stopped call ends."""
    with hurried_at_most(), hurried_at_most():
        assert left() == math.inf
        hurry()
        clock.now += 4
        assert left() == STOP_SECONDS - 4
    clock.now += 0.1
    assert left() == math.inf


def test_a_service_that_doesnt(clock: Clock) -> None:
    """The threads that the call leaves behind see it for a while; a stop in that while counts from its own moment."""
    with hurried_at_most():
        with hurried_at_most():
            hurry()
            clock.now += STOP_SECONDS + 1
        assert left() == 0
    clock.now += AFTERWARDS - 1
    assert left() == 0
    with hurried_at_most():
        hurry()
        assert left() == STOP_SECONDS
        clock.now += STOP_SECONDS + AFTERWARDS
        assert left() == 0
    clock.now += AFTERWARDS + 1
    assert left() == math.inf


def test_calls_beside_it(clock: Clock) -> None:
    """Another thread's end isn't the stopped call's; what is stopped outside of any call changes nothing."""

    def other() -> None:
        with hurried_at_most():
            assert left() == STOP_SECONDS

    hurry()
    assert left() == math.inf
    with hurried_at_most():
        hurry()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert left() == STOP_SECONDS
