"""A job on Flink, Spark, Prism or another engine with a job service: from its submission to its end, and a stop that
ends it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import apache_beam as beam
import grpc
from apache_beam.options.pipeline_options import (
    FlinkRunnerOptions,
    GoogleCloudOptions,
    PipelineOptions,
    PortableOptions,
    SparkRunnerOptions,
    StandardOptions,
)
from apache_beam.portability.api import beam_job_api_pb2, beam_job_api_pb2_grpc
from apache_beam.runners.runner import PipelineState

from weightbeam.formats.staging import JOB, Staging
from weightbeam.model_mappings.plan import Problem
from weightbeam.pipelines.running.runners.failure import IN_A_STAGE, RunnerError, last_words
from weightbeam.pipelines.running.runners.runner import Job, note
from weightbeam.pipelines.terminal.errors import Busy, Refused
from weightbeam.pipelines.terminal.progress import quiet, watch_progress
from weightbeam.pipelines.terminal.tables import count

RUNNERS = ("PortableRunner", "FlinkRunner", "SparkRunner")  # that have a job service
ANSWER = 10.0  # seconds in which a service answers
PATIENCE = 60.0  # seconds in which a cancelled job ends
POLL = 2.0  # seconds between looks at a job's state
QUIET = 60.0  # seconds without a byte, after which one may want to look at the engine
NO_WORKER = 50.0  # seconds in which the first worker of a pool has to come, unless --job_server_timeout says otherwise
ONE_SLOT = (
    "--parallelism isn't given: Flink has a job run in one slot then, unless its parallelism.default says otherwise"
)
LOG = logging.getLogger("weightbeam")


class JobLostError(RunnerError):
    """A job can't be asked for any more, and may go on."""


@dataclasses.dataclass(frozen=True)
class Site:
    """Where a job is found again.

    Attributes:
      runner: that it was submitted with.
      job_name: what the engine calls it.
      output: what it writes.
      endpoint: of the job service; empty where the command started one of its own.
      master: of the cluster, where the command named it.
    """

    runner: str
    job_name: str
    output: str
    endpoint: str = ""
    master: str = ""

    @classmethod
    def of(cls, options: PipelineOptions) -> Site:
        """By the options of a command."""
        name, endpoint = options.view_as(StandardOptions).runner, options.view_as(PortableOptions).job_endpoint or ""
        flink = options.view_as(FlinkRunnerOptions).flink_master
        spark = options.view_as(SparkRunnerOptions).spark_master_url
        master = {"FlinkRunner": flink, "SparkRunner": spark}.get(name) or ""
        output = options.get_all_options().get("output") or ""
        return cls(
            name,
            options.view_as(GoogleCloudOptions).job_name,
            output,
            endpoint,
            "" if master.startswith(("[", "local")) else master,
        )

    @property
    def can_be_asked(self) -> bool:
        """Whether someone there answers also when the command is gone."""
        return bool(self.endpoint or (self.runner == "FlinkRunner" and self.master))

    @property
    def how_to_end(self) -> str:
        """What a person can do."""
        if self.endpoint:
            return f"it is {self.job_name} at the job service {self.endpoint}; cancel it on the engine's page, or restart the service"
        return f"it is {self.job_name} of {self.master or 'the cluster'}; cancel it on the engine's page"

    def active(self) -> Sequence[str]:
        """The ids of the jobs of this name, and this output where the engine knows it, that haven't ended.

        Raises:
          OSError: the engine can't be asked.
        """
        if self.endpoint:
            return [
                job.job_id
                for job in _ask(self.endpoint, "GetJobs", beam_job_api_pb2.GetJobsRequest()).job_info
                if self._is_alive(job)
            ]
        if self.can_be_asked:
            return [
                job["jid"]
                for job in _flink_jobs(self.master)
                if job["name"] == self.job_name and job["state"] not in FLINK_ENDED
            ]
        raise OSError(f"{self.master} can't be asked for its jobs from here")

    def check(self, staging: Staging, _: PipelineOptions) -> None:
        """Makes sure that a job of a command before this one isn't at work any more.

        Raises:
          Busy: it is.
          Refused: the engine doesn't let us see.
        """
        try:
            active = self.active()
        except OSError as e:
            file = staging.plan_folder.path(JOB)
            why = f"a job may be at work there, and {e}: {self.how_to_end}; delete {file} if it is gone"
            raise Refused(Problem("output", str(staging.plan_folder), why)) from e
        if active:
            why = f"a job is at work there: {self.how_to_end}, or wait for it"
            raise Busy(Problem("output", str(staging.plan_folder), why))

    def _is_alive(self, job: beam_job_api_pb2.JobInfo) -> bool:
        # Prism calls every job `job`
        told = [
            job.pipeline_options.fields[f"beam:option:{option}:v1"].string_value for option in ("job_name", "output")
        ]
        return told == [self.job_name, self.output] and not PipelineState.is_terminal(
            beam_job_api_pb2.JobState.Enum.Name(job.state)
        )

    def cancel(self, job: str) -> None:
        """Asks for a job's end. Raises OSError where nobody can be asked."""
        if self.endpoint:
            _ask(self.endpoint, "Cancel", beam_job_api_pb2.CancelJobRequest(job_id=job))
        else:
            request = urllib.request.Request(f"{_url(self.master)}/jobs/{job}?mode=cancel", method="PATCH")
            urllib.request.urlopen(request, timeout=ANSWER).close()


FLINK_ENDED = ("FAILED", "CANCELED", "FINISHED")  # docs/ops/rest_api of Flink 1.19, JobStatus


def _url(master: str) -> str:
    return master.rstrip("/") if "://" in master else f"http://{master}"


def _flink_jobs(master: str) -> Sequence[Mapping[str, str]]:
    with urllib.request.urlopen(f"{_url(master)}/jobs/overview", timeout=ANSWER) as answer:
        return json.load(answer)["jobs"]


def _ask(endpoint: str, question: str, request: Any) -> Any:
    """Asks a job service. Raises OSError where it doesn't answer."""
    with grpc.insecure_channel(endpoint) as channel:
        try:
            return getattr(beam_job_api_pb2_grpc.JobServiceStub(channel), question)(
                request, timeout=ANSWER, wait_for_ready=True
            )
        except grpc.RpcError as e:
            raise OSError(f"the job service at {endpoint} doesn't answer ({e.code().name.lower()})") from e  # type: ignore[attr-defined]


# --- what the options say of a job ------------------------------------------------------------------------------------


def outlives(options: PipelineOptions) -> bool:
    """Whether the workers are elsewhere, so that a job can go on without its command."""
    if options.view_as(StandardOptions).runner not in RUNNERS:
        return False
    portable, site = options.view_as(PortableOptions), Site.of(options)
    return portable.environment_type != "LOOPBACK" and site.endpoint != "embed" and bool(site.endpoint or site.master)


def may_get_one_slot(options: PipelineOptions) -> bool:
    """Whether a cluster of Flink's, if it is one, isn't told how many slots a job should have."""
    return (
        outlives(options)
        and options.view_as(StandardOptions).runner != "SparkRunner"
        and options.view_as(FlinkRunnerOptions).parallelism < 1
    )


def pool_of(options: PipelineOptions) -> str:
    """Where the engine's hosts should find a worker, as a question to a person; empty where workers come from images,
    which may have to be fetched first.
    """
    portable = options.view_as(PortableOptions)
    where = {
        "EXTERNAL": f"is a worker pool there at {portable.environment_config} of each host of the engine (--environment_config)",
        "PROCESS": f"can each host of the engine run {portable.lookup_environment_option('process_command')} (--environment_options)",
    }.get(re.sub(r"beam:env:(\w+):v1", r"\1", portable.environment_type or "").upper())
    return f"{where}, and has the engine a free slot?" if where else ""


def patience_of(options: PipelineOptions) -> float:
    """Seconds in which a worker has to come: --job_server_timeout, or `NO_WORKER` where that isn't said."""
    # Beam's own default may be what is said
    flags = (flag.replace("-", "_").partition("=")[0] for flag in options._flags or ())
    said = "__job_server_timeout" in flags and options.get_all_options()["job_server_timeout"]
    return float(said or NO_WORKER)


# --- a job ------------------------------------------------------------------------------------------------------------


class Submission:
    """A job, from before it is submitted to its end. Where its workers are elsewhere it may outlive the command: a note
    of it lies beside the plan until it has ended.

    Attributes:
      site: where it is found again.
      outlives: whether it can go on without the command.
      result: what Beam knows of it; None until it is submitted.
      was_given_up: whether it was cancelled since no worker had come.
    """

    def __init__(self, options: PipelineOptions, staging: Staging):
        self.site, self.outlives, self._staging = Site.of(options), outlives(options), staging
        self.result: Any = None
        self.was_given_up = False
        self._before: Sequence[str] = ()  # jobs of its name that are others'
        if self.outlives:
            with contextlib.suppress(OSError):
                self._before = self.site.active()
            note(staging, self.site)

    def has_ended(self) -> bool:
        """Whether it has come to an end, as far as its service answers."""
        try:
            return self.result is not None and PipelineState.is_terminal(self.result.state)
        except grpc.RpcError:
            return False

    def is_over(self) -> bool:
        """Whether, after it failed, it is surely not at work any more."""
        if not self.outlives or self.has_ended():
            return True
        try:
            return not set(self.site.active()) - set(self._before)
        except OSError:
            # a job server of the command's own, which didn't come as far
            return self.result is None and not self.site.endpoint

    def _active(self) -> Sequence[str]:
        """The jobs to end: those of its name that weren't there before, or what Beam's own job service has."""
        if self.site.can_be_asked:
            return [job for job in self.site.active() if job not in self._before]
        if self.result is None:
            return []
        self.result.cancel()
        return [] if self.has_ended() else [self.site.job_name]

    @contextlib.contextmanager
    def giving_up(self, seconds: float) -> Iterator[None]:
        """Context manager: after so many seconds the job is cancelled if no worker has come to it; never where they are 0."""

        def look() -> None:
            with contextlib.suppress(OSError, grpc.RpcError):
                if not self._staging.ready_workers():
                    self.was_given_up = True
                    for job in self._active():
                        self.site.cancel(job)

        timer = threading.Timer(seconds, look)
        timer.daemon = True
        if seconds:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def stop(self) -> None:
        """Ends it and waits for that. First it is made sure that its workers publish nothing: a job service may say that a
        job is cancelled which the cluster behind it goes on with.

        Raises:
          KeyboardInterrupt: it can't be ended, or one doesn't want to wait; the note stays, and the message says how.
        """
        if not self.outlives:
            with contextlib.suppress(OSError):  # its workers end with this process
                self._staging.stop()
            return
        rest = f"{self.site.how_to_end}; until then --resume and --overwrite are refused"
        how = f"the job goes on; {rest}"
        try:
            self._staging.stop()
            how = f"the job publishes nothing any more, but hasn't ended; {rest}"
            LOG.info("stopping: the job is cancelled")
            deadline = time.monotonic() + PATIENCE
            while jobs := self._active():
                for job in jobs:
                    self.site.cancel(job)
                if time.monotonic() > deadline:
                    raise KeyboardInterrupt(how)
                time.sleep(0.5)
        except (OSError, grpc.RpcError) as e:
            raise KeyboardInterrupt(f"{e}; {how}") from None
        except KeyboardInterrupt:
            raise KeyboardInterrupt(how) from None
        self.forget()

    def abandon(self) -> None:
        """Has workers publish nothing of a job that failed: a service may have it still. Else the note stays."""
        if self.outlives:
            with contextlib.suppress(OSError):
                self._staging.stop()
                self.forget()

    def forget(self) -> None:
        """Removes the note: the job has ended, or can do nothing any more."""
        with contextlib.suppress(OSError):
            if self.outlives and self._staging.exists():
                self._staging.plan_folder.delete(JOB)


def run(pipeline: beam.Pipeline, job: Job, done: Callable[[], int]) -> None:
    """Submits a pipeline, and waits for its end.

    Args:
      pipeline: its options name a runner with a job service.
      job: what it is for; while it may be at work a note lies beside its plan.
      done: how many bytes it has written.

    Raises:
      JobLostError: the engine can't be asked any more, and the job may go on.
      KeyboardInterrupt: stopped: nothing of it is published. The job has ended, as far as its engine says, unless the
        message says how to end it.
      Exception: it failed.
    """
    options, staging = pipeline.options, job.staging
    if may_get_one_slot(options):
        LOG.warning(ONE_SLOT)
    submission = Submission(options, staging)
    staging.forget_workers()
    state = State(submission, done, staging.ready_workers)
    pool = pool_of(options) if submission.outlives else ""
    seconds = patience_of(options) if pool else 0.0
    with ending_servers(pipeline.runner):
        try:
            with watch_progress(job.left, done, job.planned.doing, job.report, state), quiet(job.noise):
                submission.result = pipeline.run()
                with submission.giving_up(seconds):
                    submission.result.wait_until_finish()
        except KeyboardInterrupt:
            submission.stop()
            raise
        except Exception as e:
            if not submission.is_over():
                how = submission.site.how_to_end
                raise JobLostError(f"{e}\nthe engine can't be asked any more, and the job may go on: {how}") from e
            submission.abandon()
            if submission.was_given_up:
                why = f"no worker has come in {seconds:.0f} s, and the job was cancelled"
                raise RunnerError(f"{why}: {pool} --job_server_timeout=SECONDS waits longer") from e
            if pool and IN_A_STAGE not in str(e) and not staging.ready_workers():
                raise RunnerError(f"{last_words(e)}; no worker has come: {pool}") from e
            raise
    submission.forget()


@contextlib.contextmanager
def ending_servers(runner: Any) -> Iterator[None]:
    """Context manager: the job servers that a runner starts end with a command that is stopped. Beam ends them when Python
    ends in an orderly way, and after Ctrl-C, but not after a kill.
    """
    servers: list[Any] = []
    start: Callable[[PipelineOptions], Any] = runner.default_job_server

    def keep(options: PipelineOptions) -> Any:
        servers.append(start(options))
        return servers[-1]

    runner.default_job_server = keep
    try:
        yield
    except KeyboardInterrupt:
        for server in servers:
            server.stop()
        raise


class State:
    """What to say of a job while nothing is written: its state, whether workers are there, and after a while where to
    look.
    """

    def __init__(self, submission: Submission, done: Callable[[], int], workers: Callable[[], int]):
        """`done`: bytes that were written. `workers`: how many have said that they are ready."""
        self._submission, self._done, self._workers = submission, done, workers
        self._start, self._asked, self._known = time.monotonic(), -math.inf, ""

    def __call__(self) -> str:
        if (result := self._submission.result) is None:
            return "submitting the job"
        if self._done():
            return ""
        if time.monotonic() - self._asked > POLL:
            self._asked = time.monotonic()
            with contextlib.suppress(Exception):  # it's for show
                ready = self._workers()
                who = f"{count(ready, 'worker')} ready, no unit is done yet" if ready else "no worker yet"
                self._known = f"the job is {str(result.state).lower()}, {who}"
        late = time.monotonic() - self._start > QUIET
        return self._known + ("; look at the engine's page, and at what the worker pool says" if late else "")
