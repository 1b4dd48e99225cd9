"""How slices travel between devices: one axis of the mesh at a time, so that no device ever holds more than its share.
Integers only.

A device that has read rows of an array wants columns of it. XLA finds a good way between two shardings in simple cases;
in others it gathers the whole array on each device first ("involuntary full rematerialization"). So it is told the way,
in steps that it knows:

    rows cut by x, then y      the slices as they were read
    rows by x, columns by y    an all-to-all among the devices of one x

The devices are numbered as the target's shards are. A *digit* is a factor of that number, `fsdp=4,tensor=2` are two; a
sharding says which digits cut which axis of the array, the slowest first. A step takes the fastest digit of an axis and
puts it behind those of another one (an all-to-all), takes it away (replicas gather), cuts by one that cut nothing yet
(nothing moves), or renumbers the slices along an axis (each device sends its slice to another one).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

Assignment = tuple[tuple[int, ...], ...]  # for each axis of an array the digits that cut it, the slowest first


@dataclasses.dataclass(frozen=True)
class Route:
    """The way from slices to shards.

    Attributes:
      sizes: of the digits, the slowest first; their product is the number of devices.
      steps: shardings, from that of the slices to that of the target.
    """

    sizes: tuple[int, ...]
    steps: tuple[Assignment, ...]


@functools.cache
def find_route(ways: tuple[int, ...], counts: tuple[int, ...], devices: int) -> Route | None:
    """The way from an array cut into `ways` slices to one cut into `counts` shards, over so many devices numbered in C
    order of either.

    Devices that are left over share a slice, or hold replicas of a shard. Where two axes wait for each other XLA has to
    find the last step. None where the two cut the devices into groups that don't lie within each other, such as 2 × 3
    and 3 × 2.
    """
    bounds = sorted({*_bounds(ways, devices), *_bounds(counts, devices)}, reverse=True)
    if any(before % after for before, after in itertools.pairwise(bounds)):
        return None
    sizes = tuple(before // after for before, after in itertools.pairwise(bounds))
    first, last = (_assignment(parts, bounds, devices) for parts in (ways, counts))
    steps = [first]
    while steps[-1] != last and (
        step := _move(steps[-1], last, in_turn=True)
        or _move(steps[-1], last, in_turn=False)
        or _renumber(steps[-1], last)
    ):
        steps.append(step)
    if steps[-1] != last:
        steps.append(last)
    return Route(sizes, tuple(steps))


def _move(step: Assignment, last: Assignment, in_turn: bool) -> Assignment | None:
    """The step in which the first digit that can goes where `last` has it, from the end of an axis or from nowhere."""
    for axis, digits in enumerate(step):
        if digits and digits[-1] not in last[axis]:
            left = _recut(step, axis, digits[:-1])
            if placed := _place(left, last, digits[-1], in_turn):
                return placed
    for digit in sorted({*itertools.chain(*last)} - {*itertools.chain(*step)}):
        if placed := _place(step, last, digit, in_turn):
            return placed
    return None


def _place(step: Assignment, last: Assignment, digit: int, in_turn: bool) -> Assignment | None:
    """Puts a digit behind those of its axis, where it may join them: next to its neighbour if it has to be in turn,
    else behind any of them.
    """
    axis = next((axis for axis, digits in enumerate(last) if digit in digits), None)
    if axis is None:  # replicas: the devices gather
        return step
    before = last[axis][: last[axis].index(digit)]
    if step[axis] != before if in_turn else not {*step[axis]} <= {*last[axis]}:
        return None
    return _recut(step, axis, (*step[axis], digit))


def _renumber(step: Assignment, last: Assignment) -> Assignment | None:
    """Puts an axis's own digits first, in order: they stay, and those before them have to leave."""
    for axis, digits in enumerate(step):
        own = tuple(digit for digit in last[axis] if digit in digits)
        if digits[: len(own)] != own:
            return _recut(step, axis, (*own, *(digit for digit in digits if digit not in own)))
    return None


def _recut(step: Assignment, axis: int, digits: tuple[int, ...]) -> Assignment:
    """A step with other digits on an axis."""
    return (*step[:axis], digits, *step[axis + 1 :])


def _bounds(parts: Sequence[int], devices: int) -> list[int]:
    """How many devices lie in one part, of all, of the first axis, of the first two …, and 1."""
    return [devices // math.prod(parts[:at]) for at in range(len(parts) + 1)] + [1]


def _assignment(parts: Sequence[int], bounds: Sequence[int], devices: int) -> Assignment:
    """The digits that cut each axis into so many parts; a digit is what lies between two bounds."""
    held = _bounds(parts, devices)
    digits = list(enumerate(itertools.pairwise(bounds)))
    return tuple(
        tuple(digit for digit, (before, after) in digits if held[axis] >= before and after >= held[axis + 1])
        for axis in range(len(parts))
    )
