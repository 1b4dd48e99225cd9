"""Other engines: their endpoints are tried first, and what they tell of a failure is put in a line."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from support import LLAMA, call, random_tensors, save

from weightbeam.pipelines.runners.failure import last_words


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
def test_an_endpoint_that_is_not_there(tmp_path: Path, capfd: pytest.CaptureFixture[str], options: tuple[str, ...]) -> None:
    """Refused by name, before anything is written; Beam would wait for ever."""
    source = save(tmp_path / "hf", LLAMA, random_tensors(LLAMA))
    with socket.socket() as bound:  # its port is ours, and nobody listens on it
        bound.bind(("localhost", 0))
        words = [option.format(port=bound.getsockname()[1]) for option in options]
        assert call("convert", "--source", source, "--output", tmp_path / "out", *words) == 2
    told = capfd.readouterr().err
    assert f"{words[1]}: nobody answers there" in told
    assert not (tmp_path / "out").exists()


def test_an_endpoint_without_a_port(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = save(tmp_path / "hf", LLAMA, random_tensors(LLAMA))
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
