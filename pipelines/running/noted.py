"""A job that was left to its own: the note of it beside the plan, and whether it is still at work."""

from __future__ import annotations

import json
from collections.abc import Sequence

from weightbeam.formats.staging import JOB, Staging
from weightbeam.pipelines.running.beam_options import pipeline_options
from weightbeam.pipelines.running.runners import dataflow, jobs


def check_job(staging: Staging, rest: Sequence[str]) -> None:
    """Makes sure that no job which was left to its own is at work there.

    Raises:
      Refused: one is, or the engine doesn't let us see.
    """
    try:
        noted = json.loads(staging.plan_folder.read(JOB))
    except (OSError, ValueError):
        noted = None
    if isinstance(noted, dict) and "runner" in noted:
        jobs.check_noted(staging, noted)
    else:
        dataflow.check_noted(staging, pipeline_options(rest))
