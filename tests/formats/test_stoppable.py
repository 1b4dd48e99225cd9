"""Threads that a stop leaves behind."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest
from processes import run

from weightbeam.formats.storage.stoppable import StoppablePool

STOPPED = """
import threading
from weightbeam.formats.storage.stoppable import StoppablePool
begun = threading.Event()

def wait():
    begun.set()
    threading.Event().wait()

with StoppablePool(1) as pool:
    pool.submit(wait)
    begun.wait()
    raise KeyboardInterrupt("stopped")
"""


def test_a_program_that_is_stopped_ends_without_its_threads() -> None:
    """One of them waits for a store that never answers."""
    ran = run(sys.executable, "-c", STOPPED, cwd=Path(__file__).parents[2], timeout=30)
    assert ran.returncode != 0
    assert ran.stderr.endswith("KeyboardInterrupt: stopped\n")


def test_no_more_threads_than_are_asked_for() -> None:
    at_work, most = [0], 0
    lock = threading.Lock()

    def work(number: int) -> int:
        nonlocal most
        with lock:
            at_work[0] += 1
            most = max(most, at_work[0])
        time.sleep(0.01)
        with lock:
            at_work[0] -= 1
        return number

    with StoppablePool(3) as pool:
        assert list(pool.map(work, range(12))) == list(range(12))
    assert most == 3


def test_an_error_ends_what_has_not_begun() -> None:
    """What is at work is waited for."""
    done = []

    def work(number: int) -> None:
        time.sleep(0.1)
        done.append(number)

    def fail() -> None:
        with StoppablePool(1) as pool:
            first = pool.submit(work, 0)
            rest = [pool.submit(work, number) for number in range(1, 5)]
            while not first.running():
                time.sleep(0.001)
            assert not any(each.done() for each in rest)
            raise ValueError("it failed")

    with pytest.raises(ValueError, match="it failed"):
        fail()
    assert done == [0]
