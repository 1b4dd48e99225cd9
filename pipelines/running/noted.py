"""A job that was left to its own: the note of it beside the plan, and whether it is still at work."""

from __future__ import annotations

import json
from collections.abc import Sequence

from weightbeam.formats.staging import JOB, Staging
from weightbeam.model_mappings.plan import Problem
from weightbeam.pipelines.running.beam_options import pipeline_options
from weightbeam.pipelines.running.runners import dataflow, jobs
from weightbeam.pipelines.terminal.errors import Refused

SITES = {dataflow.RUNNER: dataflow.Site, **dict.fromkeys(jobs.RUNNERS, jobs.Site)}


def check_job(staging: Staging, rest: Sequence[str]) -> None:
    """Makes sure that no job which was left to its own is at work there.

    Raises:
      Busy: one is.
      Refused: the engine doesn't let us see, or the note is damaged.
    """
    try:
        noted = json.loads(staging.plan_folder.read(JOB))
        site = SITES[noted["runner"]](**noted)
        if not all(isinstance(value, str) for value in noted.values()):
            raise TypeError("what names a job is text")
    except FileNotFoundError:
        return
    except (ValueError, LookupError, TypeError) as e:
        why = "should name the job that is at work there, and is damaged; delete it if there is none"
        raise Refused(Problem("output", staging.plan_folder.path(JOB), why)) from e
    site.check(staging, pipeline_options(rest))
