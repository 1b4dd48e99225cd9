"""Calls in the background: in order, bounded, and none forgotten."""

from __future__ import annotations

import threading
import time

import pytest

from weightbeam.transforms.execution import arena, overlap
from weightbeam.transforms.execution.overlap import READERS, Background, overlaps, units_at_a_time, wait_for_all


def test_where() -> None:
    """Only where bytes go over a network; two units more, whatever the threads."""
    assert overlaps("/models/llama", "gs://bucket/ckpt")
    assert overlaps("hf://org/model@0123", "/ckpt")
    assert not overlaps("/models/llama", "/ckpt")
    assert [units_at_a_time(threads, False) for threads in (1, 4)] == [1, 4]
    assert [units_at_a_time(threads, True) for threads in (1, 4)] == [3, 6]


def test_none_in_the_background() -> None:
    """Each call is made at once, by the thread itself."""
    calls: Background[int] = Background(0)
    assert [calls.begin(threading.get_ident) for _ in range(3)] == [[threading.get_ident()]] * 3
    assert calls.end() == []


@pytest.mark.parametrize("most", [1, 2, 3])
def test_in_order_and_bounded(most: int) -> None:
    """Whatever takes how long: results in the order of the calls, each once, and never more than `most` calls at a
    time.
    """
    lock, under_way, greatest = threading.Lock(), 0, 0

    def call(number: int) -> int:
        nonlocal under_way, greatest
        with lock:
            under_way += 1
            greatest = max(greatest, under_way)
        time.sleep(0.001 * (number * 7 % 5))
        with lock:
            under_way -= 1
        return number

    calls: Background[int] = Background(most)
    over = [number for at in range(30) for number in calls.begin(call, at)]
    assert [*over, *calls.end()] == list(range(30))
    assert greatest == most
    assert calls.end() == []


def test_threads_take_turns() -> None:
    """Of all threads of a process only so many are at it at a time, in the order in which they came."""
    lock, under_way, greatest, order = threading.Lock(), 0, 0, list[int]()

    def call(number: int) -> int:
        nonlocal under_way, greatest
        with lock:
            under_way += 1
            greatest = max(greatest, under_way)
            order.append(number)
        time.sleep(0.005)
        with lock:
            under_way -= 1
        return number

    threads = [Background[int](3, READERS) for _ in range(4)]
    over: list[list[int]] = [[] for _ in threads]
    for number in range(12):
        over[number % 4] += threads[number % 4].begin(call, number)
    assert [early + thread.end() for early, thread in zip(over, threads, strict=True)] == [
        [at, at + 4, at + 8] for at in range(4)
    ]
    assert greatest == READERS
    assert all(abs(at - number) < READERS for at, number in enumerate(order))


def test_a_call_that_fails() -> None:
    """Its error comes where its result would have come; whoever asks no more can wait until all is over."""
    calls: Background[int] = Background(2)
    over = []

    def late() -> int:
        time.sleep(0.05)
        over.append(1)
        return 1

    calls.begin(lambda: 1 // 0)
    time.sleep(0.01)
    with pytest.raises(ZeroDivisionError):
        calls.begin(late)
    calls.begin(late)
    wait_for_all()
    assert over
    assert overlap.Background(1).begin(int) == []  # and begins anew


def test_a_thread_waits_for_what_it_handed_over() -> None:
    """What it holds itself it can't wait for; what is written in the background comes back without it."""
    first = arena.take(60, budget=100)
    assert arena.take_now(60, budget=100) is None
    arena.hand_over(first)
    threading.Timer(0.05, arena.give_back, [first]).start()
    start = time.monotonic()
    arena.give_back(arena.take(60, budget=100))
    assert time.monotonic() - start > 0.04
    assert not arena._HELD
