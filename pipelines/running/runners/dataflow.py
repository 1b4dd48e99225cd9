"""Conversions on Google Cloud Dataflow: what the options must say, what follows from the plan, and a job from its
submission to its end.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import (
    DebugOptions,
    GoogleCloudOptions,
    PipelineOptions,
    SetupOptions,
    StandardOptions,
    WorkerOptions,
)
from apache_beam.options.pipeline_options_validator import PipelineOptionsValidator
from apache_beam.runners.runner import PipelineRunner, PipelineState, create_runner

from weightbeam.formats.staging import JOB, Staging
from weightbeam.formats.text.installing import install
from weightbeam.model_mappings.plan import Problem
from weightbeam.pipelines.running.runners.failure import RunnerError
from weightbeam.pipelines.running.runners.runner import Job, Runner, job_name, note
from weightbeam.pipelines.running.without_beam import MAX_THREADS, THREADS_PER_CORE, bring_back_services
from weightbeam.pipelines.terminal.errors import Busy, Refused
from weightbeam.pipelines.terminal.progress import at_most_every, quiet, watch_progress
from weightbeam.pipelines.terminal.tables import human
from weightbeam.transforms.planning.memory import base_bytes, memory_bound, spare_bytes
from weightbeam.transforms.planning.transfer import Transfer

RUNNER = "DataflowRunner"
MACHINE = "n2-standard-2"  # bytes are moved: a network of 10 Gbit/s for two cores
DISK_GB = 30  # for the system, the image and logs; no byte of a model is kept on a worker
MAX_WORKERS = 1000  # unless more are asked for
SYSTEM_BYTES = 1 << 30  # of a machine, for Dataflow's own processes (its guide to out-of-memory errors)
CORE_BYTES = {"standard": 3.75, "highmem": 6.5, "highcpu": 0.9}  # GiB: the least of any series of machines
# the experiment that starts a process for each core; on unless it is forbidden
PROCESSES = "use_multiple_sdk_containers"
LOG = logging.getLogger("weightbeam")
POLL = 30.0  # seconds between looks at a job's counters


class JobError(RunnerError):
    """A job ended otherwise than done."""


# --- before the plan --------------------------------------------------------------------------------------------------


def find_problems(options: PipelineOptions, runner: PipelineRunner) -> Iterator[str]:
    """What the options lack for a job, or get wrong. The region may come from gcloud's configuration, as in Beam."""
    cloud, validator = options.view_as(GoogleCloudOptions), PipelineOptionsValidator(options, runner)
    try:
        from apache_beam.runners.dataflow.internal import apiclient  # noqa: F401
    except ImportError:
        yield f"--runner={RUNNER}: Google's clients aren't installed; {install('gcp')}"
        return
    if not cloud.project:
        yield "--project=PROJECT is missing: the Google Cloud project that the job runs in"
    cloud.region = cloud.region or _default_region(runner)
    if not cloud.region:
        yield "--region=REGION is missing: where the workers run; best where the bucket is"
    if not cloud.temp_location and not cloud.staging_location:
        yield "--temp_location=gs://BUCKET/FOLDER is missing: where the job's own files go"
    for option in ("temp_location", "staging_location"):
        if getattr(cloud, option):
            yield from validator.validate_gcs_path(cloud, option)
    if cloud.project and cloud.region and validator.is_service_runner():
        yield from validator.validate_cloud_options(cloud)
    if not cloud.no_auth and not _has_credentials():
        yield "no Google credentials are found: gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS"


def _has_credentials() -> bool:
    import google.auth
    from google.auth.exceptions import DefaultCredentialsError

    try:
        google.auth.default()
    except DefaultCredentialsError:
        return False
    return True


# --- what follows from the plan ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Machine:
    """A machine type: its cores, and its memory in bytes (for a series that differ, the least)."""

    cores: int
    memory: int

    @staticmethod
    def parse(name: str) -> Machine | None:
        """`n2-standard-2`, `n2-custom-4-8192`; None for one that says nothing of its size, or something else."""
        if match := re.fullmatch(r"(?:\w+-)?custom-(\d+)-(\d+)(?:-ext)?", name):
            return Machine(int(match[1]), int(match[2]) << 20)
        if match := re.fullmatch(r"\w+-(standard|highmem|highcpu)-(\d+)(?:-\w+)?", name):
            return Machine(int(match[2]), int(CORE_BYTES[match[1]] * int(match[2]) * (1 << 30)))
        return None


def _default_region(runner: Any) -> str | None:
    """gcloud's; only Dataflow's runner has one."""
    return runner.get_default_gcp_region()


def fill_in(options: PipelineOptions, planned: Transfer, target: str, baselines: int = 0) -> None:
    """Sets what the user left open: gcloud's region; machines, threads and memory by the plan's bound; a job's name
    that is the target's own.

    Raises:
      Refused: the machine that was asked for is too small.
    """
    cloud = options.view_as(GoogleCloudOptions)
    cloud.region = cloud.region or _default_region(create_runner(RUNNER))
    machine = _choose_machine(options)
    threads = _choose_threads(options, planned, machine, target)
    needed = memory_bound(planned, threads, target, baselines) + SYSTEM_BYTES
    _check_memory(options, planned, machine, needed)
    _hint_memory(options, needed)
    _choose_workers(options, len(planned.units), threads)
    _choose_setup(options)
    cloud.job_name = cloud.job_name or job_name(planned, target)


def _choose_machine(options: PipelineOptions) -> Machine | None:
    """Sets the type of machine, unless Prime chooses it; returns the machine, where its type says how large it is."""
    cloud, worker, debug = (options.view_as(kind) for kind in (GoogleCloudOptions, WorkerOptions, DebugOptions))
    prime = "enable_prime" in (cloud.dataflow_service_options or []) or debug.lookup_experiment("enable_prime")
    if worker.machine_type is None and not prime:  # Prime chooses machines itself, and takes no wishes
        worker.machine_type = MACHINE
    return Machine.parse(worker.machine_type or MACHINE)


def _choose_threads(options: PipelineOptions, planned: Transfer, machine: Machine | None, target: str) -> int:
    """Sets how many threads a worker has, in how many processes; returns the threads."""
    debug = options.view_as(DebugOptions)
    if not debug.lookup_experiment(PROCESSES) and not debug.lookup_experiment(f"no_{PROCESSES}"):
        debug.add_experiment(f"no_{PROCESSES}")  # the memory bound is that of one process
    if debug.number_of_worker_harness_threads is None:
        debug.number_of_worker_harness_threads = _threads(planned, machine, target)
    return debug.number_of_worker_harness_threads


def _check_memory(options: PipelineOptions, planned: Transfer, machine: Machine | None, needed: int) -> None:
    """Refuses a machine that has less memory than a worker needs."""
    if machine and machine.memory < needed:
        asked = options.view_as(WorkerOptions).machine_type
        threads = options.view_as(DebugOptions).number_of_worker_harness_threads
        what = f"{threads} threads × {human(planned.thread_bytes)}, and what is always needed"
        todo = f"a larger one, a smaller --unit_bytes, or fewer with --number_of_worker_harness_threads (now {threads})"
        raise Refused(
            f"--machine_type={asked} has {human(machine.memory)} of memory, but {human(needed)} are needed: {what}; take {todo}"
        )


def _hint_memory(options: PipelineOptions, needed: int) -> None:
    """Tells Dataflow how many bytes of memory a worker needs, unless the user did."""
    hints, cloud = options.view_as(StandardOptions), options.view_as(GoogleCloudOptions)
    if not cloud.flexrs_goal and not any(re.match("min_?ram=", hint, re.IGNORECASE) for hint in hints.resource_hints):
        hints.resource_hints = [*hints.resource_hints, f"min_ram={needed}B"]  # FlexRS knows no hints


def _choose_workers(options: PipelineOptions, units: int, threads: int) -> None:
    """Sets what disk a worker has, and how many workers there may be: no more than have a unit for each thread."""
    worker = options.view_as(WorkerOptions)
    if worker.disk_size_gb is None:
        worker.disk_size_gb = DISK_GB
    if worker.autoscaling_algorithm is None:
        worker.autoscaling_algorithm = "THROUGHPUT_BASED"
    if worker.max_num_workers is None:
        worker.max_num_workers = max(worker.num_workers or 1, min(-(-units // threads), MAX_WORKERS))


def _choose_setup(options: PipelineOptions) -> None:
    """Sets what a worker starts with."""
    setup, worker = options.view_as(SetupOptions), options.view_as(WorkerOptions)
    if setup.save_main_session is None:
        setup.save_main_session = False  # every DoFn lies in a module of ours
    if worker.sdk_container_image and setup.sdk_location == "default":
        setup.sdk_location = "container"


def _threads(planned: Transfer, machine: Machine | None, target: str) -> int:
    """As a local run has them for each core, or fewer where memory is short."""
    machine = machine or Machine.parse(MACHINE)
    assert machine is not None
    room = (machine.memory - SYSTEM_BYTES - base_bytes(planned) - spare_bytes(planned, target)) // planned.thread_bytes
    return max(1, min(THREADS_PER_CORE * machine.cores, MAX_THREADS, room))


# --- the job ----------------------------------------------------------------------------------------------------------


def check_alone(options: PipelineOptions) -> None:
    """Makes sure that no job of this name is at work: it would lose what is staged, and Dataflow says so only when that
    is done.

    Raises:
      Busy: there is one.
      Refused: Dataflow doesn't let us see.
    """
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError

    cloud = options.view_as(GoogleCloudOptions)
    if cloud.template_location:  # the job that a template is launched for has the name already
        return
    try:
        job = find_active(options, cloud.job_name)
    except ImportError as e:
        raise Refused(
            f"Google's clients aren't installed, and Dataflow can't be asked for its jobs; {install('gcp')}"
        ) from e
    except (GoogleAPIError, GoogleAuthError, OSError) as e:
        raise Refused(f"Dataflow in {cloud.project}, {cloud.region} can't be asked for its jobs: {e}") from e
    if job:
        todo = f"wait for it, or gcloud dataflow jobs cancel {job} --project {cloud.project} --region {cloud.region}"
        raise Busy(f"Dataflow job {job} ({cloud.job_name}) is at work on this output; {todo}")


@dataclasses.dataclass(frozen=True)
class Site:
    """Where a job is found again."""

    runner: str
    job_name: str
    project: str
    region: str

    def check(self, staging: Staging, options: PipelineOptions) -> None:
        """Makes sure that the job, which a command before this one left to its own, isn't at work any more.

        Raises:
          Busy: it is.
          Refused: Dataflow doesn't let us see.
        """
        cloud, file = options.view_as(GoogleCloudOptions), staging.plan_folder.path(JOB)
        cloud.job_name, cloud.project, cloud.region = self.job_name, self.project, self.region
        cloud.template_location = None
        try:
            check_alone(options)
        except Refused as e:
            why = f"{e}; {file} names the job: delete it if that is gone"
            raise type(e)(Problem("output", str(staging.plan_folder), why)) from e


def find_active(options: PipelineOptions, name: str) -> str | None:
    """The id of the job of that name that is at work in the options' project and region; None if there is none."""
    bring_back_services()
    from apache_beam.runners.dataflow.internal.apiclient import DataflowApplicationClient
    from google.cloud import dataflow

    cloud = options.view_as(GoogleCloudOptions)
    request = dataflow.ListJobsRequest(
        project_id=cloud.project, location=cloud.region, name=name, filter=dataflow.ListJobsRequest.Filter.ACTIVE
    )
    # its own `job_id_for_name` never ends where there is no such job
    jobs = DataflowApplicationClient(options)._jobs_client.list_jobs(request)
    return next((job.id for job in jobs if job.name == name), None)


def _run(pipeline: beam.Pipeline, job: Job, waits: bool) -> None:
    """Submits the pipeline as a job, says where it is, and waits for its end unless the options say otherwise.

    Args:
      pipeline: with the options that `fill_in` has seen.
      job: what it is for.
      waits: whether to wait.

    Raises:
      JobError: it failed, was cancelled, or was lost sight of.
      KeyboardInterrupt: while waiting; the job goes on, and the message says so.
    """
    options, say = pipeline.options.view_as(GoogleCloudOptions), LOG.info
    with quiet(job.noise):
        result: Any = pipeline.run()
        if not result.has_job:
            say(f"the job's description is in {options.template_location}")
            return
        place = f"--project {options.project} --region {options.region}"
        say(f"Dataflow job {result.job_id()} ({options.job_name})")
        say(
            f"https://console.cloud.google.com/dataflow/jobs/{options.region}/{result.job_id()}?project={options.project}"
        )
        cancel = f"it ends with gcloud dataflow jobs cancel {result.job_id()} {place}"
        if not waits:
            say(f"gcloud dataflow jobs describe {result.job_id()} {place}")
            return
        try:
            with watch_progress(job.left, bytes_written(result), job.planned.doing, job.report):
                _wait(result, lambda state: say(f"job {state.removeprefix('JOB_STATE_').lower()}"))
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"the job goes on; {cancel}") from None
        except JobError:
            raise
        except Exception as e:  # of the connection; the job doesn't know of it
            raise JobError(f"{e}\nDataflow can't be asked any more; the job goes on; {cancel}") from e


def _wait(result: Any, say: Callable[[str], None]) -> None:
    from apache_beam.runners.dataflow.dataflow_runner import DataflowRunner

    runner = result._runner
    # in this thread, and with the states: `wait_until_finish` has neither
    DataflowRunner.poll_for_job_completion(runner, result, None, say)
    if result.state != PipelineState.DONE:
        told = getattr(runner, "last_error_msg", None) or ""
        raise JobError(f"{told}\n{cause(told) or f'the job is {result.state.lower()}'}")


def cause(message: str) -> str:
    """The line of a worker's traceback that names the error; empty if there is none."""
    lines = re.findall(r"^[\w.]*(?:Error|Exception)\b.*", message, re.MULTILINE)
    return lines[-1].strip() if lines else ""


def bytes_written(result: Any) -> Callable[[], int]:
    """Asks for the counter of WriteChunks, now and then."""
    known = 0

    def ask() -> int:
        nonlocal known
        for metric in result._runner.dataflow_client.get_job_metrics(result.job_id()).metrics:
            context = metric.name.context
            if (metric.name.name, context.get("namespace")) == ("bytes", "WriteChunks") and "tentative" not in context:
                known = int(metric.scalar)
        return known

    return at_most_every(ask, POLL)


class Dataflow(Runner):
    """Google Cloud Dataflow: a service, whose jobs outlive the command."""

    names = (RUNNER,)

    def find_problems(self, options: PipelineOptions, runner: PipelineRunner) -> Iterator[str]:
        return find_problems(options, runner)

    def in_containers(self, options: PipelineOptions) -> bool:
        return True

    def waits(self, options: PipelineOptions) -> bool:
        """Whether a command ends with its job: not where the job is left to its own, or only described."""
        told = options.view_as(StandardOptions).no_wait_until_finish
        return not (told or options.view_as(GoogleCloudOptions).template_location)

    def settle(self, options: PipelineOptions, planned: Transfer, target: str, baselines: int = 0) -> None:
        fill_in(options, planned, target, baselines)
        check_alone(options)

    def run(self, pipeline: beam.Pipeline, job: Job) -> None:
        cloud = pipeline.options.view_as(GoogleCloudOptions)
        note(job.staging, Site(RUNNER, cloud.job_name, cloud.project, cloud.region))
        _run(pipeline, job, self.waits(pipeline.options))
