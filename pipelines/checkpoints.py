"""What the commands have in common that write an Orbax checkpoint: its place, and carrying the plan out."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from weightbeam.formats.links import LinkError
from weightbeam.formats.orbax import plan_hash_of, publish
from weightbeam.formats.staging import ITEMS, FolderStaging, Staging, staging_at
from weightbeam.formats.storage import StorageError, Store
from weightbeam.model_mappings.plan import Problem
from weightbeam.pipelines.errors import Failed, Refused
from weightbeam.pipelines.output import CheckpointPlan, alone, check_output, is_finished, look_for_job
from weightbeam.pipelines.progress import Report, reporter
from weightbeam.pipelines.starting import get_ready
from weightbeam.pipelines.stopping import stopping
from weightbeam.transforms.assembly import stage
from weightbeam.transforms.options import Delivery

LOG = logging.getLogger("weightbeam")


@dataclasses.dataclass(frozen=True)
class Made:
    """Where a checkpoint is.

    Attributes:
      items: its item.
      in_folder: whether that is in a folder, not in a bucket.
      seconds: that it took.
      written: bytes that this process wrote.
      state: `done`, `nothing to do`, or `running`, where a job goes on without this process.
    """

    items: Store
    in_folder: bool
    seconds: float = 0.0
    written: int = 0
    state: str = "done"


def find_place(output: str, planned: CheckpointPlan) -> Staging:
    """The place of a checkpoint.

    Raises:
      Refused: nothing can be written there.
    """
    try:
        plan_hash = planned.hash
    except StorageError as e:  # of a small file of the source
        raise Refused(str(e)) from e
    try:
        return staging_at(output, planned.options.step, plan_hash)
    except StorageError as e:
        raise Refused(f"--output={e}") from e


def carry_checkpoint(
    planned: CheckpointPlan,
    output: str,
    ours: Mapping[str, Any],
    how: Delivery,
    refuse: Callable[[Sequence[Problem]], None],
    warnings: Iterable[str],
    beam: Sequence[str],
    progress: bool | str | Report,
) -> Made:
    """Carries a plan out, or refuses to.

    Args:
      planned: what to do.
      output: where.
      ours: the command's own options, for who looks at the job.
      how: what changes no byte.
      refuse: raises `Refused` with problems, if there are any.
      warnings: what the user should know before.
      beam: Beam's options.
      progress: whether to show it, or what is told of it.
    """
    staging = find_place(output, planned)
    refuse([*planned.plan.problems, *check_output(staging, planned, how)])
    refuse(planned.unreadable())
    items, in_folder = staging.final / ITEMS, isinstance(staging, FolderStaging)
    if how.resume and is_finished(staging, planned):
        with alone(staging):  # and takes away what a killed process left
            return Made(items, in_folder, state="nothing to do")
    for warning in warnings:
        LOG.warning(warning)
    start, written = time.monotonic(), 0
    with get_ready(planned, staging, how.resume, beam), alone(staging, look_for_job(staging, beam)):
        refuse(check_output(staging, planned, how))  # again: now nobody else changes it
        if planned.units:
            from weightbeam.pipelines.execution import run_units

            counted = run_units(planned, staging, beam, ours, how, reporter(progress))
            if counted is None:
                return Made(items, in_folder, state="running")  # the job that was started publishes it
            written = counted
        else:
            _publish_index(planned, staging, how)
    if plan_hash_of(staging.final) != planned.hash:
        raise Failed(f"  the pipeline ended, but {staging.final} isn't its result")
    return Made(items, in_folder, time.monotonic() - start, written)


def _publish_index(planned: CheckpointPlan, staging: Staging, how: Delivery) -> None:
    """A plan without units: every array is virtual, and a pipeline would have nothing to do."""
    try:
        with stopping(staging, planned.hash):
            if stage(planned, staging, how.resume, how.link, how.sha256):
                planned.assemble(staging, how.overwrite)
            else:
                publish(staging, how.overwrite)
    except LinkError as e:
        raise Refused(f"  link: {e}") from e
    except (OSError, ValueError) as e:
        raise Failed(f"  {e}") from e
