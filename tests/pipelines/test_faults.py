"""Disks that fill up, shards that change or can't be read, workers that die, kills at random moments, zombies: nothing
is lost, nothing is wrong, and nothing outside the output is touched. `make soak` does more of it.
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pairs
import pytest
from faults import EXPORTING, STAGES, arguments, is_published, kill, run_jobs
from hostile import snapshot
from lazily import lazily
from soak import OVERLAPPING, bundles_twice, kill_and_resume
from support import BF16, LLAMA, assert_same_bits, call, convert, make_release, random_tensors, reference, restore

ocp = lazily("orbax.checkpoint")

SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_release(tmp_path / "hf", files=2)


def go(source: Path, output: Path, *options: str, **more: Any) -> dict[str, Any]:
    """A job for `faults.run_jobs`."""
    return dict(arguments=arguments(source, output, *options), printed=str(source.parent / "printed"), **more)


def assert_whole(output: Path) -> None:
    """The checkpoint is what it should be, and alone."""
    assert_same_bits(restore(output / "0"), reference(LLAMA, random_tensors(LLAMA), BF16))
    assert [path.name for path in output.iterdir()] == ["0"]


def assert_failed(told: dict[str, Any], output: Path, *words: str) -> None:
    """Exit status 1 with a message that says what and how to go on; nothing is published."""
    assert_says(told, *words)
    assert not (output / "0").exists()


def assert_says(told: dict[str, Any], *words: str) -> None:
    """Exit status 1 with a message; what became of the output is another matter."""
    assert told["status"] == 1, told
    assert "Traceback" not in told["message"]
    assert [word for word in words if word not in told["message"]] == [], told["message"]


@pytest.mark.parametrize(
    "times", [1, pytest.param(3, marks=pytest.mark.slow("kills at random for a minute; once is always tried"))]
)
def test_kills_at_random_moments(tmp_path: Path, times: int) -> None:
    """In each of reading, writing, merging and publishing, each then resumed, killed once more and resumed to the end."""
    counts = kill_and_resume(
        tmp_path / "kills", [stage for stage in STAGES for _ in range(times)], seed=pairs.SEED + times
    )
    print(dict(counts))
    assert min(counts[f"SIGKILL in {stage}"] for stage in STAGES) >= times
    assert counts["resumed to the end"] == times * len(STAGES)


@pytest.mark.parametrize(
    "stages",
    [
        ["writing rows"],
        pytest.param(
            list(EXPORTING), marks=pytest.mark.slow("every stage of an export, 40 s; one stage is always tried")
        ),
    ],
    ids=["rows", "every stage"],
)
def test_exports_killed_and_resumed(tmp_path: Path, stages: list[str]) -> None:
    """`kill -9` in a stage; `--resume` goes on to the end: the bytes of a quiet export, and nothing beside them.

    At every stage: killed once more on the way, from a checkpoint as stock Orbax writes it, in compressed chunks larger
    than a unit.
    """
    like = make_release(tmp_path / "hf")
    source = convert(like, tmp_path / "ckpt", "--save_dtype", "float32", "--maxtext_model", "llama2-7b") / "items"
    if len(stages) > 1:
        ocp.PyTreeCheckpointer().save(tmp_path / "stock", ocp.PyTreeCheckpointer().restore(source))
        source = tmp_path / "stock"
    command = [
        "export",
        str(source),
        "--like",
        str(like),
        "--maxtext_model",
        "llama2-7b",
        "--unit_bytes",
        "30000",
        "--output",
    ]

    def job(output: Path, *options: str, **more: Any) -> dict[str, Any]:
        return dict(arguments=[*command, str(output), *options], printed=str(tmp_path / "printed"), **more)

    assert call(*command, tmp_path / "quiet" / "out") == 0
    jobs = []
    for number, stage in enumerate(stages):
        output = tmp_path / str(number) / "out"
        jobs.append(job(output, fault=kill(stage, "SIGKILL", 0, 1 if stage == "making whole" else 2)))
        jobs += [job(output, "--resume", fault=kill(stage, "SIGKILL", 0, 1))] * (len(stages) > 1) + [
            job(output, "--resume")
        ]
    assert [told["status"] for told in run_jobs(jobs)] == ([-9, -9, 0] * len(stages) if len(stages) > 1 else [-9, 0])
    wanted = {path.name: path.read_bytes() for path in (tmp_path / "quiet" / "out").iterdir()}
    for number in range(len(stages)):
        assert {path.name: path.read_bytes() for path in (tmp_path / str(number) / "out").iterdir()} == wanted
    assert not list(tmp_path.rglob("*weightbeam-tmp*"))


def test_every_bundle_twice(tmp_path: Path) -> None:
    """The commit too, in threads."""
    assert bundles_twice(tmp_path / "twice", 2) == Counter({"conversions with every bundle twice": 2})


@pytest.mark.parametrize(
    "mode",
    [
        "--resume",
        pytest.param("--overwrite", marks=pytest.mark.slow("sleepers of every stage, 40 s; --resume is always tried")),
    ],
)
def test_zombies_that_go_on_after_the_commit(source: Path, tmp_path: Path, mode: str) -> None:
    """In each stage a process falls asleep, its lease grows stale, another one finishes the work; then it wakes. It
    fails, and of the published checkpoint not a byte or a time changes.
    """
    jobs, outputs = [], []
    for stage in STAGES:
        outputs.append(tmp_path / stage)
        fault = dict(kind="sleep", stage=stage, call=1 if stage in ("merging", "publishing") else 3)
        zombie = dict(printed=str(tmp_path / f"zombie {len(outputs)}"), watched=str(outputs[-1] / "0"))
        jobs += [
            go(source, outputs[-1], mode, fault=fault) | zombie,
            go(source, outputs[-1], mode, set={"weightbeam.formats.staging.lease.STALE": 0}),
        ]
    before = [go(source, output) for output in outputs] if mode == "--overwrite" else []
    told = run_jobs([*before, *jobs])[len(before) :]
    first, woken = told[: len(jobs)], told[len(jobs) :]
    assert [row["status"] for row in first] == ["asleep", 0] * len(outputs), first
    assert [row["changed"] for row in woken[::2]] == [[]] * len(outputs)
    assert [row["status"] for row in woken[1::2]] == [1] * len(outputs), woken
    assert [
        row["message"] for row in woken[1::2] if "Traceback" in row["message"] or "--resume goes on" in row["message"]
    ] == []
    for output in outputs:
        assert_same_bits(restore(output / "0"), reference(LLAMA, random_tensors(LLAMA), BF16))


CHANGES = ["touch", "truncate", "append", "replace", "replace, same size and time", "remove", "pipe"]


@pytest.mark.parametrize(
    "changes",
    [
        CHANGES[-3:-1],
        pytest.param(CHANGES, marks=pytest.mark.slow("every change of a file, 30 s; two of them are always tried")),
    ],
    ids=["some", "all"],
)
def test_shards_that_change_while_they_are_read(tmp_path: Path, changes: list[str]) -> None:
    """In the middle of the run. It fails and names the file, nothing is published, and to resume is refused: what was
    done is of another source.
    """
    jobs = []
    for change in changes:
        source = make_release(tmp_path / change / "hf", files=2)
        fault = dict(kind="change", change=change, stage="reading", call=2, file=str(source / SHARD))
        jobs += [go(source, tmp_path / change / "out", fault=fault), go(source, tmp_path / change / "out", "--resume")]
    told = run_jobs(jobs)
    for change, failed, resumed in zip(changes, told[::2], told[1::2], strict=True):
        assert_failed(failed, tmp_path / change / "out", SHARD)
        assert resumed["status"] == 2, (change, resumed)
        assert not is_published(tmp_path / change / "out")


def test_a_read_error(source: Path, tmp_path: Path) -> None:
    """The message has the file and what the system says of it; with the disk mended, `--resume` finishes."""
    before = snapshot(source)
    fault = dict(kind="broken disk", stage="reading", call=4)
    for name, how in {"in turn": {}, "ahead": OVERLAPPING}.items():
        told = run_jobs([go(source, tmp_path / name, fault=fault, set=how), go(source, tmp_path / name, "--resume")])
        assert_says(told[0], ".safetensors", os.strerror(5), "--resume", "while running 'ReadBoxes/")
        assert told[1]["status"] == 0
        assert_whole(tmp_path / name)
    assert snapshot(source) == before


def test_no_more_writes(source: Path, tmp_path: Path) -> None:
    """From some moment on writes fail, as by a quota. Nothing is published, unless nothing was left to write;
    `--resume` finishes.
    """
    calls = {"writing": 3, "writing behind": 3, "merging": 1, "publishing": 1}
    jobs = []
    for name, nth in calls.items():
        fault = dict(kind="no more writes", stage=name.partition(" ")[0], call=nth)
        jobs += [
            go(source, tmp_path / name, fault=fault, set=OVERLAPPING if "behind" in name else {}),
            go(source, tmp_path / name, "--resume"),
        ]
    told = dict(zip(calls, zip(*[iter(run_jobs(jobs))] * 2, strict=True), strict=True))
    for name in ("writing", "writing behind", "merging"):
        assert_says(told[name][0])
    assert "while running 'WriteChunks/" in told["writing behind"][0]["message"]
    assert told["publishing"][0]["status"] == 0
    for name in calls:
        assert told[name][1]["status"] == 0, told[name]
        assert_whole(tmp_path / name)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("only root may mount a disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow("mounts a small disk and fills it again and again, 40 s")
def test_a_disk_that_fills_up(source: Path, small_disk: Path) -> None:
    """By someone else's file, in the middle of the run; when that is gone, `--resume` finishes."""
    filler = small_disk / "filler"
    for stage, nth in dict(writing=3, merging=1).items():
        output = small_disk / stage
        failed, refused = run_jobs(
            [
                go(source, output, fault=dict(kind="fill", stage=stage, call=nth, file=str(filler))),
                go(source, output, "--resume"),
            ]
        )
        assert_failed(failed, output)
        assert refused["status"] in (1, 2)
        assert not is_published(output)
        filler.unlink()
        (resumed,) = run_jobs([go(source, output, "--resume")])
        assert resumed["status"] == 0, resumed
        assert_whole(output)
