"""A head start: a local run reads its first units while Beam is imported and the pipeline is built.

That takes seconds, in which a link would be idle, and nothing can be written before the first unit is there. Imports no
Beam.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import numpy as np

from weightbeam.formats.staging import Staging
from weightbeam.transforms.cutting.units import Unit
from weightbeam.transforms.execution import boxes as execution
from weightbeam.transforms.execution.arena import Arena, hand_over, take, uncount
from weightbeam.transforms.execution.overlap import SPARE, begin_at_once
from weightbeam.transforms.planning.transfer import Transfer

Stored = tuple[list[list[np.ndarray]], int]  # what `execution.read` returns


@dataclasses.dataclass(frozen=True, slots=True)
class Begun:
    """A unit that is being read.

    Attributes:
      unit: spelled out.
      arena: for the unit's arrays, as for any other.
      stored: what is read of it.
    """

    unit: Unit
    arena: Arena
    stored: Future[Stored]


_BEGUN: dict[tuple[str, int], Begun] = {}  # units that nobody has claimed yet, by the plan's hash and their numbers


@contextlib.contextmanager
def head_start(planned: Transfer, staging: Staging) -> Iterator[None]:
    """Context manager: the first units of a plan are read in the background, one after the other, for those who `claim`
    them. As many as fit into the memory that is there for reading ahead.
    """
    begun: dict[tuple[str, int], Begun] = {}
    room = SPARE * planned.unit_bytes
    for number in range(0 if planned.chunks else len(planned.units)):
        # unpacked chunks would lie where the plan is at work, and there are none
        unit = planned.expand(number, staging.output)
        if unit.working_bytes > room:
            break
        room -= unit.working_bytes
        arena = take(unit.working_bytes)
        hand_over(arena)
        begun[planned.hash, number] = Begun(unit, arena, Future())
    _BEGUN.update(begun)
    begin_at_once(_read, list(begun.values()))
    try:
        yield
    finally:
        for key in begun.keys() & _BEGUN.keys():
            _forget(_BEGUN.pop(key))


def claim(plan_hash: str, number: int) -> Begun | None:
    """A unit that is being read already, for the one who asks first; None for any other."""
    return _BEGUN.pop((plan_hash, number), None)


def _read(units: Sequence[Begun]) -> None:
    for one in units:
        if one.stored.set_running_or_notify_cancel():
            try:
                one.stored.set_result(execution.read(one.unit.fetches, one.arena.empty))
            except BaseException as e:  # for the stage that asks for it
                one.stored.set_exception(e)


def _forget(one: Begun) -> None:
    """Reads no further, and counts the arena no more once nothing is read into it."""
    one.stored.cancel()
    one.stored.add_done_callback(lambda _: uncount(one.arena))
