"""Routes of slices: from any cut to any other one, in steps of which each moves one thing."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightbeam.pipelines.loading.exchange import Assignment, Route, find_route

WAYS = [(1, 1, 8), (1, 8, 1), (1, 2, 4), (2, 4, 1), (1, 1, 4), (8, 1, 1), (2, 2, 2)]
COUNTS = [(8, 1, 1), (4, 1, 2), (2, 2, 2), (4, 2, 1), (1, 1, 1), (2, 1, 1), (1, 4, 1), (2, 4, 1)]


def cuts(route: Route, step: Assignment) -> tuple[int, ...]:
    return tuple(math.prod(route.sizes[digit] for digit in digits) for digits in step)


def kind(before: Assignment, after: Assignment) -> str:
    """What a step does; `other` where it does several things at once."""
    changed = [axis for axis in range(len(before)) if before[axis] != after[axis]]
    if len(changed) == 1:
        (axis,) = changed
        old, new = before[axis], after[axis]
        return (
            "gather"
            if new == old[:-1]
            else "cut"
            if new[:-1] == old
            else "renumber"
            if sorted(new) == sorted(old)
            else "other"
        )
    if len(changed) == 2:
        for a, b in (changed, changed[::-1]):
            if before[a][:-1] == after[a] and after[b] == (*before[b], *before[a][-1:]):
                return "exchange"
    return "other"


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("counts", COUNTS)
def test_a_route_ends_where_it_should_in_steps_that_xla_knows(ways: tuple[int, ...], counts: tuple[int, ...]) -> None:
    route = find_route(ways, counts, 8)
    assert route is not None
    assert cuts(route, route.steps[0]) == ways
    assert cuts(route, route.steps[-1]) == counts
    assert [digit for digits in route.steps[-1] for digit in digits] == sorted(
        digit for digits in route.steps[-1] for digit in digits
    )
    kinds = [kind(before, after) for before, after in itertools.pairwise(route.steps)]
    assert set(kinds) <= {"exchange", "gather", "cut", "renumber"}
    assert kinds.count("gather") == 0 or math.prod(counts) < 8  # only replicas gather


@given(
    st.lists(st.sampled_from([1, 2, 4, 3]), min_size=3, max_size=3),
    st.lists(st.sampled_from([1, 2, 4, 3]), min_size=3, max_size=3),
)
def test_any_two_cuts(ways: list[int], counts: list[int]) -> None:
    """Whatever they are, the ends are right; where the groups of devices don't lie within each other there is no route."""
    devices = math.lcm(math.prod(ways), math.prod(counts))
    route = find_route(tuple(ways), tuple(counts), devices)
    if route is None:
        assert 3 in ways or 3 in counts
        return
    assert math.prod(route.sizes) == devices
    assert (cuts(route, route.steps[0]), cuts(route, route.steps[-1])) == (tuple(ways), tuple(counts))
