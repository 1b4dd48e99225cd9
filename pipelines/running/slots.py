"""Slots: how many units all workers of a command work on at a time, which the size of its units follows from: as the
workers are known, or as the command that is to be resumed had it. Imports no Beam.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weightbeam.formats.staging import Staging, staging_at
from weightbeam.formats.storage import Store
from weightbeam.formats.targets.orbax import OrbaxTarget
from weightbeam.formats.targets.release import ReleaseTarget, release_staging
from weightbeam.pipelines.running.without_beam import THREADS_PER_CORE, is_local, runner_of, said, threads_in
from weightbeam.transforms.execution.overlap import overlaps
from weightbeam.transforms.planning.inputs import unpack_inputs
from weightbeam.transforms.planning.makespan import CLUSTER_SLOTS, CLUSTER_START, Worker
from weightbeam.transforms.planning.options import Unsaid


def slots_of(arguments: Sequence[str], unit_bytes: object, *places: object) -> int | None:
    """Units that all workers work on at a time, by Beam's options.

    None where nobody says it, where `--unit_bytes` is given, and from disk to disk, which does best with the largest.
    """
    if not isinstance(unit_bytes, Unsaid):
        return None
    if is_local(arguments):
        return threads_in(arguments) if overlaps(*places) else None
    numbers = said(arguments, int, "parallelism", "max_num_workers", "num_workers")
    workers = numbers["max_num_workers"] or numbers["num_workers"]
    return numbers["parallelism"] or (workers * worker_of(arguments, 1, 0).threads if workers else None)


def slots_of_checkpoint(output: str, step: int, slots: int | None) -> int | None:
    """What a command that is to be resumed there has cut its units for, since only these can go on; `slots` where there
    is none.
    """
    return _before(lambda: staging_at(output, step), OrbaxTarget.record_of, slots)


def slots_of_release(output: str, slots: int | None) -> int | None:
    """What a command that writes a release and is to be resumed has cut its units for; `slots` where there is none."""
    return _before(lambda: release_staging(output), ReleaseTarget.record_of, slots)


def _before(
    find: Callable[[], Staging], record_of: Callable[[Store], Mapping[str, Any]], slots: int | None
) -> int | None:
    """The slots that the staged plan in a place was cut for, or the published result's record; `slots` where there is
    neither, or it can't be read.
    """
    try:
        place = find()
        found = unpack_inputs(place.read_plan()) if place.is_staged() else record_of(place.final)
    except (OSError, ValueError, EOFError, zlib.error):  # it will be refused with its reason
        return slots
    return found.get("slots") if found else slots


def worker_of(arguments: Sequence[str], gbps: float, hour_price: float) -> Worker:
    """A worker of the engine that `--runner` names, for a simulation; without Beam. It is Dataflow's where no cluster
    is named.
    """
    engine = {"flink": "Flink", "spark": "Spark", "portable": "a cluster"}.get(runner_of(arguments))
    if engine is None:
        return Worker(gbps, hour_price, threads_in(arguments, THREADS_PER_CORE * Worker.cores))
    return Worker(gbps, hour_price, threads_in(arguments, CLUSTER_SLOTS), engine=engine, start=CLUSTER_START)
