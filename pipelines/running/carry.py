"""Carrying a transfer out: into a folder, into a bucket, or as one commit of the hub.

find_place ─▸ check_output ─▸ get_ready ─▸ alone ─▸ check_output, again ─▸ write
              what stands                  nobody    now nobody else
              against it                   else      changes it
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from weightbeam.formats.staging import Staging
from weightbeam.formats.storage import is_hub
from weightbeam.pipelines.running.output import alone, check_output, is_finished, look_for_job
from weightbeam.pipelines.running.problems import refuse
from weightbeam.pipelines.running.writing import FINISHED, Written, find_place, get_ready, read_written, write
from weightbeam.pipelines.terminal.errors import Failed, Refused
from weightbeam.pipelines.terminal.progress import Report
from weightbeam.pipelines.terminal.wording import worded
from weightbeam.transforms.planning.options import Delivery
from weightbeam.transforms.planning.to_release import ToRelease
from weightbeam.transforms.planning.transfer import Transfer

LOG = logging.getLogger("weightbeam")


def carry(
    planned: Transfer,
    output: str,
    how: Delivery,
    beam: Sequence[str] = (),
    progress: bool | str | Report = True,
    warnings: Iterable[str] | None = None,
) -> Written:
    """Carries a plan out, or refuses to.

    Args:
      planned: what to do.
      output: where: a folder, `gs://bucket/folder`, or, of a release, `hf://owner/name`.
      how: what changes no byte.
      beam: Beam's options.
      progress: whether to show it, or what is told of it.
      warnings: what the user should know before; the plan's own by default.

    Raises:
      Refused: it can't be done; nothing was written.
      Failed: it failed on the way; what is done is kept.
    """
    if is_hub(output) and isinstance(planned, ToRelease):
        from weightbeam.pipelines.running.hub import carry_to_hub  # only now: the client takes a while to import

        return carry_to_hub(planned, output, how, beam, progress)
    if how.create_pr:
        raise Refused(f"--create_pr: only the hub has pull requests, and --output is {output}")
    staging = find_place(planned, output)
    refuse([*planned.plan.problems, *check_output(staging, planned, how)], planned.source)
    refuse(planned.unreadable(), planned.source)
    if how.resume and is_finished(staging, planned):
        return _say_finished(planned, staging)
    for warning in planned.warnings if warnings is None else warnings:
        LOG.warning(worded(warning))
    with get_ready(planned, staging, how.resume, beam), alone(staging, look_for_job(staging, beam)):
        return write(planned, staging, output, how, beam, progress)


def _say_finished(planned: Transfer, staging: Staging) -> Written:
    """What is to be said of a result that was there already; what a killed command left beside it is taken away."""
    with alone(staging):
        try:
            if is_finished(staging, planned):  # still, now that nobody else changes it
                staging.clean()
            return read_written(planned, staging, state=FINISHED)
        except OSError as e:
            raise Failed(f"  {e}") from e
