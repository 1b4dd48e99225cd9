"""What a runner is asked: what its options lack, what follows from a plan, and a pipeline from its start to its end."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import apache_beam as beam
from apache_beam.options.pipeline_options import GoogleCloudOptions, PipelineOptions
from apache_beam.runners.runner import PipelineRunner

from weightbeam.formats.staging import JOB, Staging
from weightbeam.pipelines.running.stopping import stopping
from weightbeam.pipelines.terminal.progress import LINE_EVERY, Report, at_most_every, quiet, roots, watch_progress
from weightbeam.transforms.planning.transfer import Transfer

NAME_LENGTH = 40  # characters of a job's name that are the model's


@dataclasses.dataclass(frozen=True)
class Job:
    """A transfer that a pipeline carries out.

    Attributes:
      planned: what to do.
      staging: where it is staged.
      left: bytes that are still to be written.
      begun: units that were done before.
      noise: takes what Beam prints.
      report: is told how far it has come.
    """

    planned: Transfer
    staging: Staging
    left: int
    begun: int
    noise: io.StringIO
    report: Report | None

    def written(self) -> int:
        """Bytes written of those that were left, by how many units the ledger has."""
        if not self.staging.is_staged():
            return self.left
        done = len(self.staging.ledger.done()) - self.begun
        return self.left * done // max(1, len(self.planned.units) - self.begun)


class Runner:
    """One of Beam's runners. This one is any that isn't known here: it has no demands of its own.

    Attributes:
      names: Beam's for it.
      greets: whether a pipeline begins with a handshake, since the workers are elsewhere.
    """

    names: ClassVar[tuple[str, ...]] = ()
    greets: ClassVar[bool] = False

    # --- before the plan

    def find_problems(self, options: PipelineOptions, runner: PipelineRunner) -> Iterator[str]:
        """What the options lack, or get wrong, by themselves."""
        yield from ()

    def find_unreachable(self, options: PipelineOptions) -> Iterator[str]:
        """Which services that the options name don't answer."""
        yield from ()

    def in_containers(self, options: PipelineOptions) -> bool:
        """Whether the workers run in containers."""
        return False

    def waits(self, options: PipelineOptions) -> bool:
        """Whether a command ends with what it started."""
        return True

    # --- with the plan

    def settle(self, options: PipelineOptions, planned: Transfer, target: str, baselines: int = 0) -> None:
        """Sets what the user left open and the plan tells: at least a job's name that is the target's own.

        Raises:
          Refused: it can't run with these options, or is at work on the target already.
        """
        cloud = options.view_as(GoogleCloudOptions)  # where every engine looks for the job's name
        cloud.job_name = cloud.job_name or job_name(planned, target)

    def make(self, stage_bytes: int) -> PipelineRunner | None:
        """Beam's runner, where it is one of ours; `stage_bytes` is what the stages need in one process."""
        return None

    def run(self, pipeline: beam.Pipeline, job: Job) -> None:
        """Runs a pipeline to its end, unless told otherwise."""
        places = [*roots(job.planned.places), str(job.staging.output)]
        with (
            stopping(job.staging, job.planned.hash),
            watch_progress(job.left, self.count_written(job), job.planned.doing, job.report, places=places),
            quiet(job.noise),
        ):
            pipeline.run().wait_until_finish()

    def count_written(self, job: Job) -> Callable[[], int]:
        """How to know the bytes written of those that were left."""
        return at_most_every(job.written, LINE_EVERY)


def note(staging: Staging, site: Any) -> None:
    """Says beside the staged plan which job is at work on it: it may outlive the command, and the command's lease."""
    staging.plan_folder.write(JOB, json.dumps(dataclasses.asdict(site)).encode())


def job_name(planned: Transfer, target: str) -> str:
    """A name for the job of a target, always the same: Dataflow lets no second job of a name run in a project's region."""
    model = planned.source.root.rstrip("/").rpartition("/")[2].partition("@")[0]
    words = re.sub("[^a-z0-9]+", "-", model.lower())[:NAME_LENGTH].strip("-")
    return f"weightbeam-{words or 'model'}-{hashlib.sha256(target.encode()).hexdigest()[:8]}"
