"""Clusters of two hosts, one of which is lost in the middle."""

from __future__ import annotations

import json
import signal
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from processes import wait_until
from support import assert_same_bits, convert, restore

from engines.clusters import Engine, FlinkHost, flink, spark
from engines.commands import LONG, begin, ended, weightbeam

pytestmark = LONG


@pytest.fixture(scope="module")
def local(large: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The arrays of a local conversion."""
    return restore(convert(large, tmp_path_factory.mktemp("local") / "out"))


def lose_a_host(engine: Engine, output: Path) -> None:
    """Kills all that runs on the host of the cluster, once some units are done."""
    wait_until(
        lambda: len(list(output.glob("*/units/*/*.json"))) >= 3,
        lambda: "no three units were done",
        seconds=300,
        every=0.01,
    )
    engine.hosts[-1].kill()


def test_flink_without_retries(large: Path, local: dict, tmp_path: Path) -> None:
    """The command fails and says which host was lost; with `--resume` the other one does what is left."""
    with flink(tmp_path) as engine:
        process, words = begin(large, tmp_path / "out", *engine.options)
        lose_a_host(engine, tmp_path / "out")
        told = ended(process, 1)
        assert engine.hosts[-1].address in told
        assert "--resume goes on from there" in told
        half = [option for option in engine.options if not option.startswith("--parallelism")] + ["--parallelism=2"]
        ended(weightbeam(*[word for word in words if word not in engine.options], *half, "--resume"))
        assert_same_bits(restore(tmp_path / "out/0"), local)


def test_flink_with_retries(large: Path, local: dict, tmp_path: Path) -> None:
    """With a restart strategy the job ends well by itself, once the host is back."""
    with flink(tmp_path, retried=True) as engine, ExitStack() as stack:
        process, _ = begin(large, tmp_path / "out", *engine.options)
        lose_a_host(engine, tmp_path / "out")
        stack.enter_context(FlinkHost(engine.hosts[-1], tmp_path).started(1))
        ended(process)
        assert_same_bits(restore(tmp_path / "out/0"), local)


def test_spark(large: Path, local: dict, tmp_path: Path) -> None:
    """Spark does a lost host's tasks again, on the other one."""
    with spark(tmp_path) as engine:
        process, _ = begin(large, tmp_path / "out", *engine.options)
        lose_a_host(engine, tmp_path / "out")
        ended(process)
        assert_same_bits(restore(tmp_path / "out/0"), local)


def cluster_states(folder: Path) -> list[str]:
    """Of the jobs of a Flink cluster, as it says itself: a job service in front of it may have another opinion."""
    manager = yaml.safe_load((folder / "flink-conf.yaml").read_text())["rest.address"]
    with urllib.request.urlopen(f"http://{manager}:8081/jobs/overview", timeout=30) as answer:
        return [job["state"] for job in json.load(answer)["jobs"]]


@pytest.mark.parametrize("retried", [False, True], ids=["no retries", "retries"])
def test_flink_goes_on_with_a_stopped_job(large: Path, local: dict, tmp_path: Path, retried: bool) -> None:
    """The job service says that it is cancelled, and the cluster has it still: it ends by itself, publishes nothing, and
    `--resume` needn't wait for that.
    """
    with flink(tmp_path, retried=retried) as engine:
        process, words = begin(large, tmp_path / "out", *engine.options, "--job_server_timeout=300")
        process.send_signal(signal.SIGINT)
        assert "--resume goes on from there" in ended(process, 130)
        assert not (tmp_path / "out/0").exists()
        states = cluster_states(tmp_path)
        wait_until(
            lambda: set(cluster_states(tmp_path)) <= {"FAILED", "RESTARTING"}, lambda: f"{states}, and goes on", 30
        )
        assert not (tmp_path / "out/0").exists()
        ended(weightbeam(*words, "--resume"))
        assert_same_bits(restore(tmp_path / "out/0"), local)


def test_flink_without_a_slot(source: Path, tmp_path: Path) -> None:
    """A cluster that has no task manager: told within a minute; the job is over, and what is staged is kept."""
    with flink(tmp_path, hosts=0) as engine:
        options = [option for option in engine.options if not option.startswith("--parallelism")]
        process = weightbeam("convert", "--source", source, "--output", tmp_path / "out", *options, "--parallelism=1")
        told = ended(process, 1, 90)
        assert "no worker has come" in told
        assert "has the engine a free slot?" in told
        assert "--resume goes on from there" in told
        assert "RUNNING" not in engine.states()
        assert not (tmp_path / "out/0").exists()
