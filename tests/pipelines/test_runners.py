"""Other engines than the one in this process: the portable job service with a worker of its own, and Dask on two worker
processes.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import warm
from processes import TIMEOUT, free_port, listening, running, wait_for
from support import digests, given_arrays, restore

CASE = "qwen3-moe"


def convert_as_process(source: Path, output: Path, *options: object) -> None:
    """`weightbeam convert`, as a process of its own."""
    warm.run("convert", source, output, "--unit_bytes", 100_000, *options, timeout=TIMEOUT, status=0)


@pytest.fixture
def source(generated: Path) -> Path:
    return generated / "cases" / CASE


def assert_maxtexts(output: Path) -> None:
    """MaxText's bits, and nothing left over."""
    assert digests(restore(output / "0")) == given_arrays(CASE, "scanned")
    assert [path.name for path in output.iterdir()] == ["0"]


def test_a_job_service_and_a_worker_of_its_own(source: Path, tmp_path: Path) -> None:
    """What Flink, Spark and Dataflow do: the job goes to a service by gRPC, and the DoFns run in another process."""
    jobs, workers = free_port(), free_port()
    with ExitStack() as stack:
        stack.enter_context(
            running(
                tmp_path / "jobs.log",
                sys.executable,
                "-m",
                "apache_beam.runners.portability.local_job_service_main",
                "--port",
                jobs,
            )
        )
        pool = (sys.executable, "-m", "apache_beam.runners.worker.worker_pool_main", "--service_port", workers)
        stack.enter_context(running(tmp_path / "workers.log", *pool))
        listening(jobs)
        listening(workers)
        service = (
            f"--job_endpoint=localhost:{jobs}",
            "--environment_type=EXTERNAL",
            f"--environment_config=localhost:{workers}",
        )
        convert_as_process(source, tmp_path / "out", "--runner=PortableRunner", *service)
    assert_maxtexts(tmp_path / "out")


@pytest.mark.slow("a Dask scheduler and two workers, each of which imports Beam")
def test_dask_on_two_worker_processes(source: Path, tmp_path: Path) -> None:
    """A scheduler and two workers of one thread each."""
    port = free_port()
    with ExitStack() as stack:
        stack.enter_context(
            running(
                tmp_path / "scheduler.log",
                sys.executable,
                "-m",
                "distributed.cli.dask_scheduler",
                "--port",
                port,
                "--no-dashboard",
            )
        )
        listening(port)
        for number in range(2):
            worker = (
                sys.executable,
                "-m",
                "distributed.cli.dask_worker",
                f"localhost:{port}",
                "--nthreads",
                1,
                "--no-dashboard",
                "--no-nanny",
            )
            stack.enter_context(
                running(tmp_path / f"worker{number}.log", *worker, "--local-directory", tmp_path / f"dask{number}")
            )
            wait_for(tmp_path / f"worker{number}.log", "Registered to")
        convert_as_process(
            source,
            tmp_path / "out",
            "--runner=apache_beam.runners.dask.dask_runner.DaskRunner",
            f"--dask_client_address=localhost:{port}",
        )
    assert_maxtexts(tmp_path / "out")
