"""Each engine in one process, with workers in processes of their own: the same bits as a local run, and a stop that is
one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import ROOT, free_port, listening, running, wait_until
from servers.gcs import FakeGcs
from support import assert_same_bits, convert, read_tensors, restore

from engines.clusters import (
    FLINK_DRIVER,
    OPENED,
    Engine,
    flink_in_one_process,
    prism_with_pool,
    spark_in_one_process,
    worker_pool,
)
from engines.commands import LONG, begin, ended, weightbeam
from engines.programs import jars

STARTS = [
    pytest.param(flink_in_one_process, id="flink"),
    pytest.param(spark_in_one_process, id="spark"),
    pytest.param(prism_with_pool, id="prism", marks=LONG),
]
ABSENT = "raise ModuleNotFoundError(\"No module named 'weightbeam'\", name='weightbeam')"
OTHER = f"__version__, __path__ = '0.0.1', [{str(ROOT / 'weightbeam')!r}]"
SMALL = ("--unit_bytes", "40KB")


@pytest.fixture(scope="module", params=STARTS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with request.param(tmp_path_factory.mktemp("engine")) as started:
        yield started


def test_there_and_back(engine: Engine, source: Path, tmp_path: Path) -> None:
    """Converted, exported and resharded there, bits equal to those of local runs."""
    ended(weightbeam("convert", "--source", source, "--output", tmp_path / "ckpt", *SMALL, *engine.options))
    assert_same_bits(restore(tmp_path / "ckpt/0"), restore(convert(source, tmp_path / "local", *SMALL)))
    ended(weightbeam("export", "--source", tmp_path / "ckpt", "--output", tmp_path / "hf", *engine.options))
    ended(weightbeam("export", "--source", tmp_path / "ckpt", "--output", tmp_path / "hf-local"))
    assert_same_bits(read_tensors(tmp_path / "hf"), read_tensors(tmp_path / "hf-local"))
    ended(
        weightbeam(
            "reshard",
            "--source",
            tmp_path / "ckpt",
            "--output",
            tmp_path / "again",
            "--mesh",
            "fsdp=4",
            *engine.options,
        )
    )
    assert_same_bits(restore(tmp_path / "again/0"), restore(tmp_path / "local/0"))
    # no note, no lease
    assert {path.name for path in tmp_path.iterdir()} == {"ckpt", "local", "hf", "hf-local", "again"}


@pytest.mark.parametrize(
    "engine",
    [STARTS[0], pytest.param(*STARTS[1].values, id="spark", marks=LONG), STARTS[2]],
    indirect=True,
    scope="module",
)
def test_a_stop_ends_the_job(engine: Engine, large: Path, tmp_path: Path) -> None:
    """The engine's job is over before the command is; what is done is kept, and nothing stands in the way of
    `--resume`.
    """
    process, words = begin(large, tmp_path / "out", *engine.options)
    process.send_signal(signal.SIGINT)
    assert "--resume goes on from there" in ended(process, 130)
    assert "CANCELLED" in engine.states()
    assert "RUNNING" not in engine.states()
    assert not (tmp_path / "out/0").exists()
    ended(weightbeam(*words, "--resume"))
    assert_same_bits(restore(tmp_path / "out/0"), restore(convert(large, tmp_path / "local")))


@LONG
def test_a_job_that_outlives_its_command(engine: Engine, large: Path, tmp_path: Path) -> None:
    """Killed, the command can't end the job: `--resume` and `--overwrite` say so while it is at work; then it has
    published by itself.
    """
    process, words = begin(large, tmp_path / "out", *engine.options)
    os.killpg(engine.group, signal.SIGSTOP)  # the workers: so the job lasts
    try:
        process.kill()
        for option in ("--resume", "--overwrite"):
            told = ended(weightbeam(*words, option), 2)
            assert "a job is at work there" in told
            assert engine.endpoint in told
    finally:
        os.killpg(engine.group, signal.SIGCONT)
    wait_until(lambda: "RUNNING" not in engine.states(), lambda: "the job never ended")
    assert [path.name for path in (tmp_path / "out").iterdir() if not path.name.endswith("-lease")] == ["0"]
    assert_same_bits(restore(tmp_path / "out/0"), restore(convert(large, tmp_path / "local")))


@LONG
@pytest.mark.parametrize(
    ("module", "says"),
    [(ABSENT, "lacks Weightbeam"), (OTHER, "has Weightbeam 0.0.1, and the command")],
    ids=["none", "another"],
)
def test_workers_without_the_package(engine: Engine, source: Path, tmp_path: Path, module: str, says: str) -> None:
    """Told by host, where Flink alone would wait for minutes without a word."""
    port = free_port()
    (tmp_path / "site").mkdir()
    (tmp_path / "site/weightbeam.py").write_text(module)
    with worker_pool(tmp_path / "pool.log", port, environment={"PYTHONPATH": str(tmp_path / "site")}):
        unfit = dataclasses.replace(engine, pool=f"localhost:{port}")
        told = ended(weightbeam("convert", "--source", source, "--output", tmp_path / "out", *unfit.options), 1, 60)
    assert f"the worker on {socket.gethostname()} {says}" in told


@LONG
@pytest.mark.parametrize("engine", STARTS[:2], indirect=True, scope="module")
def test_a_pool_that_isnt_there(engine: Engine, source: Path, tmp_path: Path) -> None:
    """Told within a minute, with where it should be; the job is over, and what is staged is kept."""
    port = free_port()
    told = ended(
        weightbeam(
            "convert",
            "--source",
            source,
            "--output",
            tmp_path / "out",
            *dataclasses.replace(engine, pool=f"localhost:{port}").options,
        ),
        1,
        90,
    )
    assert "no worker has come" in told
    assert f"is a worker pool there at localhost:{port} of each host of the engine" in told
    assert "--resume goes on from there" in told
    assert "RUNNING" not in engine.states()
    assert not (tmp_path / "out/0").exists()


@LONG
@pytest.mark.parametrize("engine", STARTS[:2], indirect=True, scope="module")
def test_a_worker_that_cant_write(engine: Engine, source: Path, tmp_path: Path) -> None:
    """Its pool sees the output, but as a file system that is read only: told by host, with the place."""
    (tmp_path / "out").mkdir()
    port, place = free_port(), tmp_path / "out"
    pool = f"{sys.executable} -m apache_beam.runners.worker.worker_pool_main --service_port {port}"
    mounted = f"mount --bind {place} {place} && mount -o remount,ro,bind {place} && exec {pool}"
    with running(tmp_path / "pool.log", "unshare", "--mount", "sh", "-c", mounted):
        listening(port)
        told = ended(
            weightbeam(
                "convert",
                "--source",
                source,
                "--output",
                place,
                *dataclasses.replace(engine, pool=f"localhost:{port}").options,
            ),
            1,
            90,
        )
    assert f"the worker on {socket.gethostname()} can't write to {place}" in told


@LONG
@pytest.mark.parametrize("engine", STARTS[:2], indirect=True, scope="module")
def test_a_worker_that_cant_write_a_bucket(
    engine: Engine, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool's account may only read it, where the command's may write: told by host, with the place."""
    port = free_port()
    with FakeGcs("bucket") as ours, FakeGcs() as theirs:
        theirs.objects, theirs.read_only = ours.objects, ["bucket"]
        with worker_pool(tmp_path / "pool.log", port, environment=theirs.env()):
            for name, value in ours.env().items():
                monkeypatch.setenv(name, value)
            words = dataclasses.replace(engine, pool=f"localhost:{port}").options
            told = ended(weightbeam("convert", "--source", source, "--output", "gs://bucket/out", *words), 1, 90)
    assert f"the worker on {socket.gethostname()} can't write to gs://bucket/out" in told
    assert not [name for name in ours.objects["bucket"] if name.startswith("out/0/")]


@LONG
@pytest.mark.parametrize("engine", STARTS[:2], indirect=True, scope="module")
@pytest.mark.parametrize("hidden", ["source", "output"])
def test_a_worker_out_of_sight(engine: Engine, source: Path, tmp_path: Path, hidden: str) -> None:
    """The folder that is read, or the one that is written, isn't on the worker's host: told within a minute, with host
    and folder; nothing is published.
    """
    copied = shutil.copytree(source, tmp_path / "in" / source.name)
    place = tmp_path / "out"
    place.mkdir()
    port, unseen = free_port(), copied.parent if hidden == "source" else place
    pool = f"{sys.executable} -m apache_beam.runners.worker.worker_pool_main --service_port {port}"
    mounted = f"mount -t tmpfs none {unseen} && exec {pool}"
    with running(tmp_path / "pool.log", "unshare", "--mount", "sh", "-c", mounted):
        listening(port)
        words = dataclasses.replace(engine, pool=f"localhost:{port}").options
        told = ended(weightbeam("convert", "--source", copied, "--output", place, *words), 1, 90)
    assert f"the worker on {socket.gethostname()} doesn't see what the command sees: {unseen}" in told
    assert "every host needs the same folders" in told
    assert not (place / "0").exists()


@LONG
def test_a_job_server_of_its_own_ends_with_a_killed_command(large: Path, tmp_path: Path) -> None:
    """A polite kill leaves no Java behind, nor the folders that its server had."""
    jar = as_one_jar(tmp_path / "server.jar", jars("flink"), FLINK_DRIVER)
    options = ("--runner=FlinkRunner", f"--flink_job_server_jar={jar}", "--environment_type=LOOPBACK")
    process, _ = begin(large, tmp_path / "out", *options)
    assert commands_with(str(jar))
    process.terminate()
    assert "--resume goes on from there" in ended(process, 1, 60)
    wait_until(lambda: not commands_with(str(jar)), lambda: f"still there: {commands_with(str(jar))}", seconds=20)


def as_one_jar(file: Path, folder: Path, main: str) -> Path:
    """A jar that runs a class of the jars of a folder, as Beam's job servers are one."""
    lines = [
        "Manifest-Version: 1.0",
        f"Main-Class: {main}",
        f"Class-Path: {' '.join(jar.as_uri() for jar in sorted(folder.glob('*.jar')))}",
        f"Add-Opens: {' '.join(f'java.base/{package}' for package in OPENED)}",
    ]
    # a line has 72 bytes at most, and one that goes on begins with a space
    cut = ["\n ".join(line[at : at + 70] for at in range(0, len(line), 70)) for line in lines]
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("META-INF/MANIFEST.MF", "\n".join(cut) + "\n")
    return file


def commands_with(word: str) -> list[str]:
    """The commands of this machine's processes that name it; those of ended ones are empty."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found += [command] if command.startswith("java ") and word in command else []
    return found
