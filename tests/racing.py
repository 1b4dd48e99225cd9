"""Threads that start together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def race(function: Callable[[int], Any], racers: int = 8, caught: type[Exception] | tuple[()] = ()) -> list[Any]:
    """What the function returns in threads that start together, each of a number, or what it raises of those caught."""
    barrier = threading.Barrier(racers)

    def run(number: int) -> Any:
        barrier.wait()
        try:
            return function(number)
        except caught as e:
            return e

    with ThreadPoolExecutor(racers) as pool:
        return list(pool.map(run, range(racers)))
