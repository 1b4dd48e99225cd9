"""Other engines: their endpoints are tried first, and what they tell of a failure is put in a line."""

from __future__ import annotations

import dataclasses
import json
import pickle
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability.api import beam_job_api_pb2, beam_runner_api_pb2
from apache_beam.runners.portability import abstract_job_service, local_job_service
from servers.clients import asking
from servers.gcs import FakeGcs
from support import call, make_release

from weightbeam import __version__
from weightbeam.formats.safetensors import open_hf
from weightbeam.formats.staging import JOB, Staging, staging_at
from weightbeam.pipelines.running.beam_options import make_pipeline, pipeline_options
from weightbeam.pipelines.running.runners.failure import last_words
from weightbeam.pipelines.running.runners.jobs import Site, may_get_one_slot, outlives, patience_of, pool_of
from weightbeam.transforms.planning.conversion import Conversion
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import ConvertOptions, Delivery
from weightbeam.transforms.stages.assembly import stage
from weightbeam.transforms.stages.handshake import UnfitError, check_place, greet
from weightbeam.transforms.stages.staged import AtWork


@pytest.mark.parametrize(
    "options",
    [
        ("--runner=PortableRunner", "--job_endpoint=localhost:{port}", "--environment_type=LOOPBACK"),
        ("--runner=FlinkRunner", "--flink_master=localhost:{port}", "--environment_type=LOOPBACK"),
        ("--runner=FlinkRunner", "--flink_master=http://localhost:{port}/", "--environment_type=LOOPBACK"),
        ("--runner=SparkRunner", "--spark_master_url=spark://localhost:{port}", "--environment_type=LOOPBACK"),
    ],
    ids=" ".join,
)
def test_an_endpoint_that_is_not_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    """Refused by name, before anything is written; Beam would wait for ever."""
    source = make_release(tmp_path / "hf")
    with socket.socket() as bound:  # its port is ours, and nobody listens on it
        bound.bind(("localhost", 0))
        words = [option.format(port=bound.getsockname()[1]) for option in options]
        assert call("convert", "--source", source, "--output", tmp_path / "out", *words) == 2
    told = capfd.readouterr().err
    assert f"{words[1]}: nobody answers there" in told
    assert not (tmp_path / "out").exists()


def test_an_endpoint_without_a_port(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = make_release(tmp_path / "hf")
    options = ("--runner=PortableRunner", "--job_endpoint=localhost", "--environment_type=LOOPBACK")
    assert call("convert", "--source", source, "--output", tmp_path / "out", *options) == 2
    assert "--job_endpoint=localhost: expected HOST:PORT" in capfd.readouterr().err


FAILED = "Pipeline weightbeam-llama_7c1 failed in state FAILED: "
FLINK = """org.apache.flink.runtime.JobException: Recovery is suppressed by NoRestartBackoffTimeStrategy
\tat org.apache.flink.runtime.executiongraph.failover.ExecutionFailureHandler.handleFailure(ExecutionFailureHandler.java:176)
Caused by: java.lang.Exception: something in between
\tat java.base/java.lang.Thread.run(Thread.java:840)
Caused by: org.apache.flink.runtime.jobmaster.JobMasterException: TaskManager with id 10.0.0.3:41234 is no longer reachable.
\tat org.apache.flink.runtime.jobmaster.JobMaster.disconnect(JobMaster.java:1)
\t... 32 more
]"""
WORKER = """java.lang.RuntimeException: Error received from SDK harness for instruction 4: Traceback (most recent call last):
  File "stages.py", line 70, in process
weightbeam.formats.storage.store.StorageError: /models/a.safetensors: No such file or directory [while running 'ReadBoxes/ParDo(_ReadBoxesFn)']

\tat org.apache.beam.runners.fnexecution.control.FnApiControlClient.onNext(FnApiControlClient.java:180)
]"""


def test_the_words_of_a_java_failure() -> None:
    """The first line and the deepest cause; of a worker's error in a Java stack the worker's own line."""
    last = "Caused by: org.apache.flink.runtime.jobmaster.JobMasterException: TaskManager with id 10.0.0.3:41234 is no longer reachable."
    assert last_words(RuntimeError(FAILED + FLINK)) == f"{FAILED}{FLINK.splitlines()[0]}; {last}"
    assert last_words(RuntimeError(FAILED + WORKER)) == WORKER.splitlines()[2]
    assert last_words(RuntimeError("another plan is staged there")) == "another plan is staged there"
    assert last_words(MemoryError()) == "MemoryError"


# --- jobs that outlive their command ----------------------------------------------------------------------------------


@pytest.fixture
def stopped(tmp_path: Path) -> tuple[Path, Staging, Conversion]:
    """A conversion that is staged, and nothing of it done: its source, its place and its plan."""
    source = make_release(tmp_path / "hf")
    conversion = plan_conversion(ConvertOptions(), open_hf(source))
    staging = staging_at(tmp_path / "out", 0, conversion.hash)
    stage(conversion, staging, Delivery())
    return source, staging, conversion


@pytest.fixture
def service() -> Iterator[tuple[local_job_service.LocalJobServicer, str]]:
    """Beam's own job service, and its endpoint."""
    servicer = local_job_service.LocalJobServicer()
    port = servicer.start_grpc_server(0)
    yield servicer, f"localhost:{port}"
    servicer.stop()


def submit(
    servicer: local_job_service.LocalJobServicer, name: str, output: Path
) -> abstract_job_service.AbstractBeamJob:
    """A job that is only prepared: it has a state, and doesn't end."""
    request = beam_job_api_pb2.PrepareJobRequest(job_name="job", pipeline=beam_runner_api_pb2.Pipeline())
    request.pipeline_options.update({"beam:option:job_name:v1": name, "beam:option:output:v1": str(output)})
    return servicer._jobs[servicer.Prepare(request).preparation_id]


def noted(site: Site) -> bytes:
    return json.dumps(dataclasses.asdict(site)).encode()


def test_a_job_at_work_stands_in_the_way(
    stopped: tuple[Path, Staging, Conversion], service: tuple, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`--resume` and `--overwrite` are refused while the job that is noted there hasn't ended; another output's doesn't
    count.
    """
    source, staging, _ = stopped
    servicer, endpoint = service
    name, output = "weightbeam-hf-1234", tmp_path / "out"
    staging.plan_folder.write(JOB, noted(Site("PortableRunner", name, str(output), endpoint)))
    job = submit(servicer, name, output)
    submit(servicer, name, tmp_path / "another")
    for option in ("--resume", "--overwrite"):
        assert call("convert", "--source", source, "--output", output, option) == 2
        told = capfd.readouterr().err
        assert f"a job is at work there: it is {name} at the job service {endpoint}" in told
    job.set_state(beam_job_api_pb2.JobState.FAILED)
    assert call("convert", "--source", source, "--output", output, "--resume") == 0
    assert [path.name for path in output.iterdir()] == ["0"]
    assert not (output / "0" / JOB).exists()


def test_an_engine_that_cant_be_asked(
    stopped: tuple[Path, Staging, Conversion], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Refused, too, with the file that says so; without it the conversion goes on."""
    source, staging, _ = stopped
    site = Site("SparkRunner", "weightbeam-hf-1234", str(tmp_path / "out"), master="spark://nowhere:7077")
    staging.plan_folder.write(JOB, noted(site))
    asked = ("convert", "--source", source, "--output", tmp_path / "out", "--resume")
    assert call(*asked) == 2
    told = capfd.readouterr().err
    assert "spark://nowhere:7077 can't be asked for its jobs from here" in told
    assert f"delete {staging.plan_folder.path(JOB)} if it is gone" in told
    staging.plan_folder.delete(JOB)
    assert call(*asked) == 0


@pytest.mark.parametrize(
    ("options", "outlive"),
    [
        ("--runner=PortableRunner --job_endpoint=a:1 --environment_type=EXTERNAL --environment_config=b:2", True),
        ("--runner=PortableRunner --job_endpoint=a:1 --environment_type=LOOPBACK", False),
        ("--runner=PortableRunner --job_endpoint=embed", False),
        ("--runner=FlinkRunner --flink_master=a:8081 --environment_type=DOCKER", True),
        ("--runner=FlinkRunner", False),
        ("--runner=SparkRunner --spark_master_url=spark://a:7077", True),
        ("--runner=SparkRunner", False),
        ("--runner=FnApiRunner", False),
    ],
)
def test_which_jobs_outlive_their_command(options: str, outlive: bool) -> None:
    """Not those whose workers, or whose whole cluster, are in the command's own processes."""
    assert outlives(PipelineOptions(options.split())) == outlive


@pytest.mark.parametrize(
    ("said", "seconds"), [([], 50), (["--job_server_timeout=300"], 300), (["--job-server-timeout", "7"], 7)]
)
def test_how_long_a_worker_is_waited_for(said: list[str], seconds: float) -> None:
    """What is said counts also where it is Beam's default: ours is another."""
    options = pipeline_options(["--runner=PortableRunner", "--job_endpoint=a:1", *said], {"output": "out"})
    assert patience_of(make_pipeline(options).options) == seconds


# --- the handshake ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--runner=PortableRunner --job_endpoint=a:1 --environment_type=EXTERNAL --environment_config=b:2", True),
        (
            "--runner=PortableRunner --job_endpoint=a:1 --environment_type=EXTERNAL --environment_config=b:2 --parallelism=4",
            False,
        ),
        ("--runner=PortableRunner --job_endpoint=embed", False),
        (
            "--runner=SparkRunner --spark_master_url=spark://a:1 --environment_type=EXTERNAL --environment_config=b:2",
            False,
        ),
    ],
)
def test_a_job_that_may_get_one_slot(options: str, told: bool) -> None:
    assert may_get_one_slot(PipelineOptions(options.split())) is told


def test_a_fit_worker_greets(stopped: tuple[Path, Staging, Conversion]) -> None:
    _, staging, conversion = stopped
    packed = pickle.dumps(AtWork(staging, conversion.hash))
    here = "{}.{}".format(*sys.version_info)
    assert list(greet(7, __version__, here, packed)) == [7]
    with pytest.raises(
        RuntimeError, match=rf"the worker on {socket.gethostname()} has Python {here}, and the command runs in 2.7"
    ):
        list(greet(7, __version__, "2.7", packed))
    with pytest.raises(RuntimeError, match=r"has Weightbeam .*, and the command 9.9"):
        list(greet(7, "9.9", here, packed))


def test_a_worker_that_sees_no_plan(tmp_path: Path) -> None:
    """Its host hasn't the folder that the command has."""
    packed = pickle.dumps(AtWork(staging_at(tmp_path / "nowhere", 0, "1234"), "1234"))
    with pytest.raises(
        UnfitError, match=r"the worker on here doesn't see what the command sees: .*every host needs the same folders"
    ):
        check_place("the worker on here", packed)


def test_a_worker_that_sees_no_source(stopped: tuple[Path, Staging, Conversion]) -> None:
    """Its host has the output, but not the folder that is converted: it says so before any unit is read."""
    source, staging, conversion = stopped
    source.rename(source.with_name("elsewhere"))
    with pytest.raises(
        UnfitError,
        match=rf"the worker on here doesn't see what the command sees: {source}: no such folder; every host needs the same folders",
    ):
        check_place("the worker on here", pickle.dumps(AtWork(staging, conversion.hash)))


def test_a_worker_that_cant_write_the_bucket(stopped: tuple[Path, Staging, Conversion]) -> None:
    """Its account may read it only, or not even that; the message has the right that is missing."""
    _, _, conversion = stopped
    with FakeGcs("bucket") as server, asking(server):
        staging = staging_at("gs://bucket/out", 0, conversion.hash)
        stage(conversion, staging, Delivery())
        packed = pickle.dumps(AtWork(staging, conversion.hash))
        server.read_only = ["bucket"]
        with pytest.raises(
            UnfitError, match=r"the worker on here can't write to gs://bucket/out: .*roles/storage.objectUser"
        ):
            check_place("the worker on here", packed)
        server.forbidden = ["bucket"]
        with pytest.raises(
            UnfitError, match=r"the worker on here doesn't see .*gs://bucket/out.*roles/storage"
        ) as told:
            check_place("the worker on here", packed)
    assert "every host needs the same folders" not in str(told.value)


@pytest.mark.parametrize(
    ("options", "asks"),
    [
        ("--environment_type=EXTERNAL --environment_config=localhost:50000", "a worker pool there at localhost:50000"),
        (
            "--environment_type=PROCESS --environment_options=process_command=/opt/boot",
            "each host of the engine run /opt/boot",
        ),
        ("--environment_type=DOCKER", ""),
    ],
)
def test_where_workers_should_come_from(options: str, asks: str) -> None:
    """As a question to who waits for them in vain; nobody gives up on an image that is being fetched."""
    asked = pool_of(PipelineOptions(options.split()))
    assert asks in asked
    assert bool(asks) is ("has the engine a free slot?" in asked)
