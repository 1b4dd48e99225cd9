"""Slots: how many units all workers of a command work on at a time, which the size of its units follows from. Imports
no Beam.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weightbeam.formats.orbax import record_of
from weightbeam.formats.release_place import release_staging
from weightbeam.formats.release_target import record_of as record_of_release
from weightbeam.formats.staging import ITEMS, Staging, staging_at
from weightbeam.pipelines.report import thread_options, threads_of, worker_of
from weightbeam.pipelines.without_beam import is_local
from weightbeam.transforms.inputs import unpack_inputs
from weightbeam.transforms.options import Unsaid
from weightbeam.transforms.overlap import overlaps


def slots_of(arguments: Sequence[str], unit_bytes: object, simulated: int | None, *places: object) -> int | None:
    """Units that all workers work on at a time: `simulated`, or by Beam's options.

    None where nobody says it, where `--unit_bytes` is given, and from disk to disk, which does best with the largest.
    """
    if not isinstance(unit_bytes, Unsaid):
        return None
    if simulated:
        return simulated
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--parallelism", "--max_num_workers", "--num_workers"):
        parser.add_argument(option, type=int)
    said = parser.parse_known_args(list(arguments))[0]
    if is_local(arguments):
        return threads_of(thread_options(arguments)) if overlaps(*places) else None
    workers = said.max_num_workers or said.num_workers
    return said.parallelism or (workers * worker_of(arguments, 1, 0).threads if workers else None)


def slots_of_checkpoint(output: str, step: int, slots: int | None) -> int | None:
    """What a command that is to be resumed there has cut its units for, since only these can go on; `slots` where there
    is none.
    """
    return _before(lambda: staging_at(output, step), lambda place: record_of(place.final / ITEMS), slots)


def slots_of_release(output: str, slots: int | None) -> int | None:
    """The same of a command that writes a release."""
    return _before(lambda: release_staging(output), lambda place: record_of_release(place.final), slots)


def _before(
    find: Callable[[], Staging], record: Callable[[Staging], Mapping[str, Any] | None], slots: int | None
) -> int | None:
    try:
        place = find()
        found = unpack_inputs(place.read_plan()) if place.is_staged() else record(place)
    except (OSError, ValueError, EOFError, zlib.error):  # it will be refused with its reason
        return slots
    return found.get("slots") if found else slots
