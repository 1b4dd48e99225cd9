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
    source, target = _holders(ways, bounds, devices), _holders(counts, bounds, devices)
    axes = range(len(counts))
    state = [[digit for digit, axis in enumerate(source) if axis == at] for at in axes]
    wanted = [[digit for digit, axis in enumerate(target) if axis == at] for at in axes]
    shared = [digit for digit, axis in enumerate(source) if axis is None and target[digit] is not None]
    steps = [_freeze(state)]

    def place(digit: int, in_turn: bool) -> bool:
        """Puts a digit behind those of its axis, where it may join them: next to its neighbour if it has to be in turn,
        else behind any of them.
        """
        axis = target[digit]
        if axis is None:  # replicas: the devices gather
            return True
        before = wanted[axis][: wanted[axis].index(digit)]
        if state[axis] != before if in_turn else not set(state[axis]) <= set(wanted[axis]):
            return False
        state[axis].append(digit)
        return True

    def move(in_turn: bool) -> bool:
        for axis in axes:
            if state[axis] and target[state[axis][-1]] != axis and place(state[axis][-1], in_turn):
                state[axis].pop()
                return True
        for digit in shared:
            if place(digit, in_turn):
                shared.remove(digit)
                return True
        return False

    def renumber() -> bool:
        """Puts an axis's own digits first, in order: they stay, and those before them have to leave."""
        for axis in axes:
            own = [digit for digit in wanted[axis] if digit in state[axis]]
            if state[axis][: len(own)] != own:
                state[axis] = own + [digit for digit in state[axis] if digit not in own]
                return True
        return False

    while state != wanted and (move(in_turn=True) or move(in_turn=False) or renumber()):
        steps.append(_freeze(state))
    if state != wanted:
        steps.append(_freeze(wanted))
    return Route(sizes, tuple(steps))


def _bounds(parts: Sequence[int], devices: int) -> list[int]:
    """How many devices lie in one part, of all, of the first axis, of the first two …, and 1."""
    return [devices // math.prod(parts[:at]) for at in range(len(parts) + 1)] + [1]


def _holders(parts: Sequence[int], bounds: Sequence[int], devices: int) -> list[int | None]:
    """For each digit the axis that it cuts; None for one that cuts none."""
    held = _bounds(parts, devices)
    return [
        next((axis for axis in range(len(parts)) if held[axis] >= before and after >= held[axis + 1]), None)
        for before, after in itertools.pairwise(bounds)
    ]


def _freeze(state: Sequence[Sequence[int]]) -> Assignment:
    return tuple(map(tuple, state))
