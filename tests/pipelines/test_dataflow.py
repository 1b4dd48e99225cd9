"""Dataflow, offline: a job is submitted whole to test servers and carried out as a worker would, from nothing but what
was staged for it.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import (
    DebugOptions,
    GoogleCloudOptions,
    PipelineOptions,
    SetupOptions,
    StandardOptions,
    WorkerOptions,
)
from apache_beam.runners.dataflow.internal.apiclient import DataflowApplicationClient
from processes import run, wait_until
from submission import OUTPUT, PROJECT, REGION, STAGED, TIMEOUT, Cloud, Submission, cloud
from support import LLAMA, LLAMA_8B, call, convert, digests, given, given_arrays, headers_only, make_release, restore

from weightbeam.formats.safetensors import open_hf
from weightbeam.formats.staging import JOB, staging_at
from weightbeam.formats.storage.bucket import Bucket
from weightbeam.formats.storage.token import SECRET
from weightbeam.pipelines.commands import export
from weightbeam.pipelines.running.beam_options import SETUP_FILE, pipeline_options
from weightbeam.pipelines.running.graph import build
from weightbeam.pipelines.running.noted import check_job
from weightbeam.pipelines.running.runners import dataflow
from weightbeam.pipelines.terminal.errors import Refused
from weightbeam.transforms.planning.conversion import Conversion
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.memory import memory_bound
from weightbeam.transforms.planning.options import ConvertOptions

CASE = "qwen3-moe"
UNIT_BYTES = 100_000
TOKEN, NAME = "hf_MarkerThatMustNotLeave", "projects/1234/secrets/hub/versions/latest"
WORKING = (
    "ReadBoxes/ParDo(_ReadBoxesFn)",
    "Dequantize/ParDo(_DequantizeFn)",
    "Reshape/ParDo(_ReshapeFn)",
    "Stack/ParDo(_StackFn)",
    "WriteChunks/ParDo(_WriteChunksFn)",
)
MIN_RAM = "beam:resources:min_ram_bytes:v1"
MIB = 1 << 20

# What Dataflow's workers do, in a process that has only the staged package: the pipeline is read, and carried out in
# its own environment.
WORKER = """
import sys
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.runner import PipelineState
from weightbeam import transforms

package, graph = sys.argv[1:]
assert transforms.__file__.startswith(package), transforms.__file__
pipeline = beam_runner_api_pb2.Pipeline.FromString(open(graph, "rb").read())
for environment in pipeline.components.environments.values():
    environment.urn, environment.payload = "beam:env:embedded_python:v1", b""
    del environment.dependencies[:]
result = FnApiRunner().run_via_runner_api(pipeline, PipelineOptions(["--direct_running_mode=multi_threading", "--direct_num_workers=2"]))
assert result.wait_until_finish() == PipelineState.DONE
assert not {"jax", "torch", "orbax", "tensorflow"} & {name.partition(".")[0] for name in sys.modules}
"""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    with cloud(tmp_path_factory.mktemp("account")) as made:
        yield made


@pytest.fixture(scope="module")
def source(servers: Cloud, generated: Path) -> str:
    return servers.upload(generated / "cases" / CASE)


def work(servers: Cloud, job: Submission, folder: Path) -> None:
    """Carries a job out."""
    package, graph, archive = folder / "package", folder / "pipeline.pb", folder / "workflow.tar.gz"
    graph.write_bytes(job.files["pipeline.pb"])
    archive.write_bytes(job.files["workflow.tar.gz"])
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        package,
        archive,
    ]
    run(*install, status=0)
    path = {"PYTHONPATH": str(package)}
    run(sys.executable, "-c", WORKER, package, graph, status=0, cwd=folder, env=servers.environment | path)


@dataclasses.dataclass
class Run:
    """A conversion on Dataflow from its submission to its end."""

    job: Submission
    command: subprocess.CompletedProcess[str]
    restored: Path


@pytest.fixture(scope="module")
def converted(servers: Cloud, source: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The command waits while the job is carried out; then the checkpoint is fetched from the bucket."""
    folder = tmp_path_factory.mktemp("run")
    servers.dataflow.states, before = ["JOB_STATE_RUNNING"], len(servers.dataflow.jobs)
    options = ["--unit_bytes", UNIT_BYTES, "--maxtext_model", given()[CASE]["maxtext_model"], "--hf_token_secret", NAME]
    with servers.start(source, f"gs://{OUTPUT}/run", *options, HF_TOKEN=TOKEN) as process:
        wait_until(lambda: len(servers.dataflow.jobs) > before, process=process)
        job = servers.submission()
        work(servers, job, folder)
        servers.dataflow.jobs[-1].states[:] = ["JOB_STATE_DONE"]
        out, err = process.communicate(timeout=TIMEOUT)
    for name, found in servers.gcs.objects[OUTPUT].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(found.data)
    return Run(job, subprocess.CompletedProcess(process.args, process.returncode, out, err), folder / "run")


def test_the_job_makes_the_checkpoint(converted: Run) -> None:
    """From the staged package and graph alone, without jax or torch: MaxText's own bits. The command says where the job
    is, and what came of it.
    """
    assert converted.command.returncode == 0, converted.command.stderr
    assert digests(restore(converted.restored / "0")) == given_arrays(CASE, "scanned")
    assert converted.job.job.id in converted.command.stderr
    assert (
        f"https://console.cloud.google.com/dataflow/jobs/{REGION}/{converted.job.job.id}?project={PROJECT}"
        in converted.command.stderr
    )
    assert "job running" in converted.command.stderr
    assert "job done" in converted.command.stderr
    assert f"gs://{OUTPUT}/run/0/items: " in converted.command.stdout


def test_what_the_job_asks_for(converted: Run, generated: Path) -> None:
    """Machines, threads and memory follow from the plan's bound; one process on a machine; the package is staged, and
    nothing of __main__.
    """
    conversion = plan_conversion(
        ConvertOptions(unit_bytes=UNIT_BYTES, maxtext_model=given()[CASE]["maxtext_model"]),
        open_hf(generated / "cases" / CASE),
    )
    pool, environment = converted.job.pool, converted.job.environment
    assert (pool["machineType"], pool["numThreadsPerWorker"], pool["diskSizeGb"]) == ("n2-standard-2", 4, 30)
    # 2: by throughput
    assert pool["autoscalingSettings"] == {"algorithm": 2, "maxNumWorkers": -(-len(conversion.units) // 4)}
    assert {"no_use_multiple_sdk_containers", "use_runner_v2"} <= set(environment["experiments"])
    assert "use_multiple_sdk_containers" not in environment["experiments"]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"cloud-dataflow/v1beta3/beam_python{python}_sdk:" in pool["workerHarnessContainerImage"]
    assert set(converted.job.files) == {"pipeline.pb", "workflow.tar.gz", "submission_environment_dependencies.txt"}
    assert {package["name"] for package in pool["packages"]} == set(converted.job.files) - {"pipeline.pb"}
    for step in WORKING:
        # it reads from a bucket
        assert int(converted.job.hints(step)[MIN_RAM]) == memory_bound(
            conversion, 4, "gs://bucket/out"
        ) + Bucket.held_bytes + (1 << 30)
    # else Dataflow fuses less
    assert len({step.environment_id for step in converted.job.steps().values() if step.environment_id}) == 1
    assert converted.job.options["source"] == f"gs://models/{CASE}"  # for who looks at the job
    assert converted.job.options["save_main_session"] is False
    assert converted.job.name.startswith("weightbeam-qwen3-moe-")


def test_no_step_holds_code_of_main(converted: Run) -> None:
    """DoFns are pickled by the names of their modules; the first line makes sure that we look at what is pickled."""
    pickled = converted.job.pickled()
    assert all(
        b"weightbeam.transforms.stages.chain" in pickled[step]
        for step in (*WORKING, "ExpandUnits/Expand", "AssembleCheckpoint/Assemble")
    )
    assert not [name for name, code in pickled.items() if b"__main__" in code]


def test_no_secret_leaves_this_machine(servers: Cloud, converted: Run) -> None:
    """Neither the hub's token nor the account's key is in anything that was sent, staged, written or said; the secret's
    name is, for the workers.
    """
    key = Path(servers.environment["GOOGLE_APPLICATION_CREDENTIALS"]).read_text().split("\\n")[1].encode()
    objects = [found.data for bucket in (STAGED, OUTPUT) for found in servers.gcs.objects[bucket].values()]
    said = (converted.command.stdout + converted.command.stderr).encode()
    steps = [step.spec.payload for step in converted.job.steps().values()]
    everything = b"\n".join(
        [converted.job.job.sent, converted.job.packed(), *steps, *converted.job.pickled().values(), *objects, said]
    )
    for secret in (TOKEN.encode(), key, b"for-a-test"):
        assert len(secret) >= 10
        assert secret not in everything
        assert base64.b64encode(secret)[:-4] not in everything
    for step in ("ReadBoxes/ParDo(_ReadBoxesFn)", "AssembleCheckpoint/Assemble"):
        assert NAME.encode() in converted.job.pickled()[step]


def test_an_image_and_no_waiting(servers: Cloud, source: str) -> None:
    """With an image nothing is packed; the command ends when the job is taken. A second one isn't let in."""
    servers.dataflow.states = ["JOB_STATE_RUNNING"]
    options = [
        "--sdk_container_image",
        "europe-docker.pkg.dev/p/r/weightbeam:1",
        "--no_wait_until_finish",
        "--maxtext_model",
        given()[CASE]["maxtext_model"],
    ]
    done = servers.convert(source, f"gs://{OUTPUT}/left", *options)
    assert done.returncode == 0, done.stderr
    job = servers.submission()
    assert f"gcloud dataflow jobs describe {job.job.id} --project {PROJECT} --region {REGION}" in done.stderr
    assert job.pool["workerHarnessContainerImage"] == "europe-docker.pkg.dev/p/r/weightbeam:1"
    assert set(job.files) == {"pipeline.pb", "submission_environment_dependencies.txt"}
    assert job.options["sdk_location"] == "container"
    assert f"gs://{OUTPUT}/left/0/items" not in done.stdout
    place = [
        "--runner=DataflowRunner",
        f"--project={PROJECT}",
        f"--region={REGION}",
        "--no_auth",
        f"--dataflow_endpoint={servers.dataflow.url}",
    ]
    assert dataflow.find_active(PipelineOptions(place), job.name) == job.job.id
    again = servers.convert(source, f"gs://{OUTPUT}/left", *options, "--overwrite")
    assert again.returncode == 2
    assert f"Dataflow job {job.job.id} ({job.name}) is at work on this output" in again.stderr
    # what it needs is still there
    assert any(name.startswith("left/0.weightbeam/") for name in servers.gcs.objects[OUTPUT])
    # by another runner, which knows of the job by what it left there
    here = [*options[-2:], "--overwrite", "--runner", "FnApiRunner"]
    other = servers.convert(source, f"gs://{OUTPUT}/left", *here)
    assert other.returncode == 2
    assert f"Dataflow job {job.job.id} ({job.name}) is at work on this output" in other.stderr
    servers.dataflow.jobs[-1].states[:] = ["JOB_STATE_CANCELLED"]
    assert dataflow.find_active(PipelineOptions(place), job.name) is None
    assert servers.convert(source, f"gs://{OUTPUT}/left", *here).returncode == 0
    assert not [name for name in servers.gcs.objects[OUTPUT] if name.startswith("left/0.weightbeam")]


def test_no_waiting_where_only_the_rest_is_cleared_away(servers: Cloud, source: str) -> None:
    """What is complete is published here and now, and no job is started: the command says where the checkpoint is."""
    options = ["--maxtext_model", given()[CASE]["maxtext_model"], "--unit_bytes", UNIT_BYTES]
    fault = servers.gcs.fail("status", status=403, matching=r"DELETE .*plan\.json")
    done = servers.convert(source, f"gs://{OUTPUT}/complete", *options, "--runner", "FnApiRunner")
    servers.gcs.faults.remove(fault)
    assert "is published; what it was made in can't be removed" in done.stderr
    before = len(servers.dataflow.jobs)
    there = [*options, "--no_wait_until_finish", "--sdk_container_image", "an/image:1", "--resume"]
    done = servers.convert(source, f"gs://{OUTPUT}/complete", *there)
    assert done.returncode == 0, done.stderr
    assert f"gs://{OUTPUT}/complete/0/items: " in done.stdout
    assert len(servers.dataflow.jobs) == before
    assert not [name for name in servers.gcs.objects[OUTPUT] if name.startswith("complete/0.weightbeam")]


def test_a_job_that_is_lost_sight_of(servers: Cloud, source: str) -> None:
    """Where Dataflow can't be asked any more the command fails, and says that the job may not have."""
    servers.dataflow.states = ["JOB_STATE_RUNNING"]
    servers.dataflow.fail("status", status=403, matching="GET .*/jobs/")
    done = servers.convert(
        source,
        f"gs://{OUTPUT}/lost",
        "--maxtext_model",
        given()[CASE]["maxtext_model"],
        "--sdk_container_image",
        "an/image:1",
    )
    servers.dataflow.faults = []
    assert done.returncode == 1
    assert f"the job goes on; it ends with gcloud dataflow jobs cancel {servers.dataflow.jobs[-1].id}" in done.stderr
    assert "Traceback" not in done.stderr


def test_progress(servers: Cloud, converted: Run) -> None:
    """The counter of WriteChunks, what is committed of it; and no more than it if the service can't be asked."""
    place = [
        "--runner=DataflowRunner",
        f"--project={PROJECT}",
        f"--region={REGION}",
        "--no_auth",
        f"--dataflow_endpoint={servers.dataflow.url}",
    ]
    runner = SimpleNamespace(dataflow_client=DataflowApplicationClient(PipelineOptions(place)))
    result = SimpleNamespace(_runner=runner, job_id=lambda: converted.job.job.id)
    servers.dataflow.written = 1234
    assert dataflow.bytes_written(result)() == 1234
    assert dataflow.bytes_written(SimpleNamespace(_runner=None, job_id=result.job_id))() == 0


def test_a_template(servers: Cloud, source: str) -> None:
    """As a Flex Template's launcher calls it: the job is described and not started, and nobody waits."""
    before = len(servers.dataflow.jobs)
    options = [
        "--template_location",
        f"gs://{STAGED}/launch/job",
        "--job_name",
        "launched",
        "--sdk_container_image",
        "an/image:1",
    ]
    done = servers.convert(
        source, f"gs://{OUTPUT}/template", *options, "--maxtext_model", given()[CASE]["maxtext_model"]
    )
    assert done.returncode == 0, done.stderr
    assert len(servers.dataflow.jobs) == before
    described = json.loads(servers.gcs.objects[STAGED]["launch/job"].data)
    assert described["name"] == "launched"
    assert described["environment"]["workerPools"][0]["numThreadsPerWorker"] == 4
    assert any(re.fullmatch(r"template/0\.weightbeam/\w+/plan\.json\.gz", name) for name in servers.gcs.objects[OUTPUT])


FAILURE = """Error message from worker: Traceback (most recent call last):
  File "apache_beam/runners/common.py", line 1498, in process
weightbeam.formats.storage.store.StorageError: gs://models/x/model.safetensors: ends at byte 7 [while running 'ReadBoxes/ParDo(_ReadBoxesFn)-ptransform-23']
passed through:
==>
    dist_proc/dax/workflow/worker/fnapi_service_impl1.cc:1328
"""


def test_a_job_that_fails(servers: Cloud, source: str) -> None:
    """The worker's error is what is said last, the rest of it is kept; and how to go on."""
    servers.dataflow.states, servers.dataflow.message = ["JOB_STATE_FAILED"], FAILURE
    done = servers.convert(source, f"gs://{OUTPUT}/failing", "--maxtext_model", given()[CASE]["maxtext_model"])
    assert done.returncode == 1
    assert "  gs://models/x/model.safetensors: ends at byte 7" in done.stderr
    assert "--resume" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    (story,) = (
        found.data
        for name, found in servers.gcs.objects[OUTPUT].items()
        if name.startswith("failing/") and name.endswith("failure.txt")
    )
    assert FAILURE.encode() in story


def test_a_command_that_is_interrupted(servers: Cloud, source: str) -> None:
    """The job goes on, and the user is told how to end it."""
    servers.dataflow.states, before = ["JOB_STATE_RUNNING"], len(servers.dataflow.jobs)
    with servers.start(
        source, f"gs://{OUTPUT}/interrupted", "--maxtext_model", given()[CASE]["maxtext_model"]
    ) as process:
        wait_until(
            lambda: (
                len(servers.dataflow.jobs) > before and servers.dataflow.log.of("get", servers.dataflow.jobs[-1].id)
            ),
            process=process,
        )
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130
    job = servers.dataflow.jobs[-1]
    assert (
        f"the job goes on; it ends with gcloud dataflow jobs cancel {job.id} --project {PROJECT} --region {REGION}"
        in err
    )
    assert "Traceback" not in err
    assert job.active


# --- the size of a job ------------------------------------------------------------------------------------------------


def graph_of(conversion: Conversion, folder: Path) -> bytes:
    """The pipeline as Dataflow's runner would stage it."""
    arguments = [
        f"--project={PROJECT}",
        f"--region={REGION}",
        "--temp_location=gs://bucket/t",
        "--dry_run=true",
        "--no_auth",
        "--sdk_container_image=an/image:1",
    ]
    options = pipeline_options(["--runner=DataflowRunner", "--dataflow_endpoint=http://localhost:1", *arguments])
    dataflow.fill_in(options, conversion, str(folder))
    pipeline = beam.Pipeline(options=options)
    build(pipeline, conversion, staging_at(folder, 0))
    return pipeline.run().job.proto_pipeline.SerializeToString()


@pytest.mark.parametrize(("unit_bytes", "units"), [(4 * MIB, 10_000), (5 * MIB // 4, 41_600)])
def test_the_job_is_small_for_any_model(tmp_path: Path, unit_bytes: int, units: int) -> None:
    """Within 60 kB, for as many units as a model of 16 GB has if they are tiny: as many as DeepSeek-V3's."""
    conversion = plan_conversion(ConvertOptions(unit_bytes=unit_bytes), headers_only(LLAMA_8B))
    assert len(conversion.units) >= units
    assert len(graph_of(conversion, tmp_path)) < 60_000


def test_a_job_of_an_export_fits_its_machines(tmp_path: Path) -> None:
    """The bound on a worker's memory is that of any plan: what is always needed, and a unit for each thread."""
    source = make_release(tmp_path / "hf")
    planned = export.plan(convert(source, tmp_path / "checkpoint"), like=str(source))
    options = pipeline_options(["--runner=DataflowRunner"])
    dataflow.fill_in(options, planned, "gs://b/out")
    threads = options.view_as(DebugOptions).number_of_worker_harness_threads
    assert options.view_as(StandardOptions).resource_hints == [
        f"min_ram={memory_bound(planned, threads, 'gs://b/out') + (1 << 30)}B"
    ]


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def conversion() -> Conversion:
    return plan_conversion(ConvertOptions(), headers_only(LLAMA))


def settled(conversion: Conversion, *arguments: str) -> PipelineOptions:
    options = pipeline_options(["--runner=DataflowRunner", *arguments])
    dataflow.fill_in(options, conversion, "gs://bucket/out/0")
    return options


def test_what_the_user_says_stays(conversion: Conversion) -> None:
    said = [
        "--machine_type=e2-standard-8",
        "--number_of_worker_harness_threads=3",
        "--disk_size_gb=50",
        "--max_num_workers=7",
        "--job_name=mine",
    ]
    more = [
        "--autoscaling_algorithm=NONE",
        "--experiments=use_multiple_sdk_containers",
        "--resource_hints=min_ram=20GB",
        "--save_main_session",
    ]
    options = settled(conversion, *said, *more)
    worker = options.view_as(WorkerOptions)
    assert (worker.machine_type, worker.disk_size_gb, worker.max_num_workers, worker.autoscaling_algorithm) == (
        "e2-standard-8",
        50,
        7,
        "NONE",
    )
    assert options.view_as(DebugOptions).number_of_worker_harness_threads == 3
    assert options.view_as(DebugOptions).experiments == ["use_multiple_sdk_containers"]
    assert options.view_as(StandardOptions).resource_hints == ["min_ram=20GB"]
    assert options.view_as(GoogleCloudOptions).job_name == "mine"
    assert options.view_as(SetupOptions).save_main_session is True


@pytest.mark.parametrize(
    ("machine", "unit_bytes", "threads"),
    [
        ("n2-standard-2", 128 * MIB, 4),  # two for each core
        ("n2-standard-2", 2048 * MIB, 1),  # as many as 7.5 GiB hold, beside what is read ahead and written behind
        ("n1-standard-1", 128 * MIB, 2),
        ("c3-highcpu-4", 128 * MIB, 8),
        ("n1-highcpu-2", 128 * MIB, 1),
        ("custom-4-4096", 512 * MIB, 3),
        ("n2-custom-16-65536-ext", 128 * MIB, 32),
        ("e2-standard-32", 128 * MIB, 32),  # more would wait for each other
        ("e2-medium", 128 * MIB, 4),  # its name says nothing: as of the default
    ],
)
def test_threads_by_machine(machine: str, unit_bytes: int, threads: int) -> None:
    conversion = plan_conversion(ConvertOptions(unit_bytes=unit_bytes), headers_only(LLAMA))
    options = settled(conversion, f"--machine_type={machine}")
    assert options.view_as(DebugOptions).number_of_worker_harness_threads == threads
    assert options.view_as(StandardOptions).resource_hints == [
        f"min_ram={memory_bound(conversion, threads, 'gs://bucket/out') + (1 << 30)}B"
    ]


def test_a_machine_that_is_too_small() -> None:
    conversion = plan_conversion(ConvertOptions(unit_bytes=1 << 30), headers_only(LLAMA))
    with pytest.raises(
        Refused, match=r"--machine_type=n1-highcpu-2 has 1.93 GB of memory, but .* are needed: 1 threads"
    ):
        settled(conversion, "--machine_type=n1-highcpu-2")
    with pytest.raises(Refused, match=r"--number_of_worker_harness_threads \(now 9\)"):
        settled(conversion, "--number_of_worker_harness_threads=9")


def test_what_some_modes_forbid(conversion: Conversion) -> None:
    """Prime takes no machine type, FlexRS no hints."""
    assert settled(conversion, "--dataflow_service_options=enable_prime").view_as(WorkerOptions).machine_type is None
    assert settled(conversion, "--flexrs_goal=COST_OPTIMIZED").view_as(StandardOptions).resource_hints == []


def test_jobs_are_named_by_model_and_target() -> None:
    """The same for the same target, so that Dataflow itself lets no second one run; another for another."""
    checkpoint = dataclasses.replace(headers_only(LLAMA), root="hf://org/Llama-3.1_8B.Instruct@0123456789abcdef")
    conversion = plan_conversion(ConvertOptions(), checkpoint)
    name = dataflow.job_name(conversion, "gs://bucket/out/0")
    assert name.startswith("weightbeam-llama-3-1-8b-instruct-")
    assert (
        name == dataflow.job_name(conversion, "gs://bucket/out/0") != dataflow.job_name(conversion, "gs://bucket/out/1")
    )
    long = plan_conversion(ConvertOptions(), dataclasses.replace(checkpoint, root=f"/models/{'x' * 100}"))
    assert len(dataflow.job_name(long, "gs://bucket/out/0")) <= 63


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (
            FAILURE,
            "weightbeam.formats.storage.store.StorageError: gs://models/x/model.safetensors: ends at byte 7 [while running",
        ),
        ("Workflow failed.", ""),
        ("", ""),
    ],
)
def test_the_cause_of_a_failure(message: str, cause: str) -> None:
    assert dataflow.cause(message).startswith(cause)
    assert bool(dataflow.cause(message)) == bool(cause)


# --- refused before any work ------------------------------------------------------------------------------------------

COMPLETE = (
    "--runner=DataflowRunner",
    "--project=a-project",
    "--region=us-central1",
    "--temp_location=gs://bucket/temp",
)
OF_DATAFLOW = (
    "--project=PROJECT is missing",
    "--region=REGION is missing",
    "--temp_location=gs://BUCKET/FOLDER is missing",
    "no Google credentials",
)
LOCAL = ("--source={source}: the workers run in containers", "--output={output}: the workers run in containers")


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (("--runner=DataflowRunner",), (*OF_DATAFLOW, *LOCAL)),
        (("--runner=dataflow", "--not_an_option=1"), ("unknown options: --not_an_option=1", *OF_DATAFLOW, *LOCAL)),
        (COMPLETE, ("no Google credentials", *LOCAL)),
        ((*COMPLETE, "--no_auth"), LOCAL),
        (
            (
                *COMPLETE,
                "--no_auth",
                "--temp_location=/tmp",
                "--project=My Project",
                "--job_name=No_Name",
                "--num_workers=9",
                "--max_num_workers=3",
            ),
            (
                "Invalid GCS path (/tmp)",
                "Invalid Project ID (My Project)",
                "Invalid job_name (No_Name)",
                "num_workers (9) cannot exceed",
                *LOCAL,
            ),
        ),
        (("--runner=PortableRunner",), ("--job_endpoint=HOST:PORT is missing", *LOCAL)),
        (
            ("--runner=PortableRunner", "--job_endpoint=localhost:1", "--environment_type=EXTERNAL"),
            ("external_service_address is required",),
        ),
        (("--runner=FlinkRunner", "--flink_master=cluster:8081"), LOCAL),
        (("--runner=SparkRunner", "--spark_master_url=spark://cluster:7077"), LOCAL),
        (("--no_wait_until_finish",), ("--no_wait_until_finish: only a job on Dataflow",)),
        (("--hf_token_secret=hf_abc",), ("argument --hf_token_secret: … should be the name of a secret",)),
    ],
)
def test_refused(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    messages: tuple[str, ...],
) -> None:
    """All that is missing at once, and nothing else; nothing is planned or written."""
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "nothing.json"))
    monkeypatch.delenv("CLOUDSDK_COMPUTE_REGION", raising=False)
    source, output = tmp_path / "no such source", tmp_path / "out"
    assert call("convert", "--source", source, "--output", output, *arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    for message in messages:
        assert message.format(source=source, output=output) in err
    if err.startswith("weightbeam convert: refused"):
        assert len(err.strip().splitlines()) == 1 + len(messages)
    assert "hf_abc" not in err
    assert not output.exists()


def test_flink_and_spark_run_here_unless_told_otherwise() -> None:
    """As Beam does it: then folders of this machine are fine, and nothing is packed."""
    for runner in ("FlinkRunner", "SparkRunner"):
        assert pipeline_options([f"--runner={runner}"]).view_as(SetupOptions).setup_file is None
    for there in (
        "--runner=FlinkRunner --flink_master=a:1",
        "--runner=SparkRunner --spark_master_url=spark://a:1",
        "--runner=PortableRunner --job_endpoint=a:1",
    ):
        assert pipeline_options(there.split()).view_as(SetupOptions).setup_file == str(SETUP_FILE)
        with_image = pipeline_options([*there.split(), "--environment_config=an/image:1"])
        assert with_image.view_as(SetupOptions).setup_file is None


@pytest.mark.parametrize(
    "options", [COMPLETE, ["--runner=DataflowRunner"], ["--runner=FlinkRunner", "--environment_type=LOOPBACK"]]
)
def test_verify_runs_here(options: Sequence[str], capfd: pytest.CaptureFixture[str]) -> None:
    """In threads of its own, and says no more of a runner."""
    runner = next(option for option in options if option.startswith("--runner"))
    assert call("verify", "--source", "gs://bucket/x", "--checkpoint", "gs://bucket/y", *options) == 2
    assert capfd.readouterr().err.splitlines()[1:] == [
        f"{runner}: verify brings what it finds to this machine, and runs on it"
    ]


def test_plan_needs_no_complete_runner(tmp_path: Path) -> None:
    """`plan` takes the options of the conversion that it is the plan of."""
    source = make_release(tmp_path / "hf")
    assert call("plan", "--source", source, "--runner=DataflowRunner", "--number_of_worker_harness_threads=4") == 0


def test_the_secret_s_name_reaches_this_process_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--hf_token_secret` is the environment variable by another name: planning needs the token as well."""
    monkeypatch.setenv(SECRET, "projects/1/secrets/other/versions/1")  # so that it is as it was, afterwards
    source = make_release(tmp_path / "hf")
    assert call("plan", "--source", source, "--hf_token_secret", NAME) == 0
    assert os.environ[SECRET] == NAME


@pytest.mark.parametrize("noted", [b"not JSON", b"[]", b'{"job_name": "x"}', b'{"runner": "FlinkRunner"}'])
def test_a_note_of_a_job_that_is_damaged(tmp_path: Path, noted: bytes) -> None:
    """Nobody knows whether that job is at work: what is staged isn't touched, and the message says which file to look
    at.
    """
    staging = staging_at(tmp_path, 0)
    staging.create(b"the plan")
    staging.plan_folder.write(JOB, noted)
    with pytest.raises(Refused, match=JOB):
        check_job(staging, [])
    assert staging.is_staged()
