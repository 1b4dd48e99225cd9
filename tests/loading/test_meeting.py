"""Several processes agree on what they load before anything is exchanged: a job of two, begun once, has all the loads
that go wrong; and a file that is replaced while it is loaded is noticed, by one process and by several.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from loading.jobs import Told, abstract, assert_holds, run_job
from servers.hub import FakeHub
from support import BF16, LLAMA, convert, make_release, random_tensors, reference, save

import weightbeam as wb
from weightbeam.formats.storage import local
from weightbeam.pipelines.loading import load as loading
from weightbeam.pipelines.loading.meeting import Meeting, differences
from weightbeam.pipelines.loading.opening import choose, find_source

MODEL = LLAMA | dict(vocab_size=512, hidden_size=128, num_attention_heads=8, head_dim=16)
STEPS: dict[str, Any] = dict(unit_bytes=100_000)
MESH = "fsdp=8"
SOON: dict[str, Any] = dict(timeout=4)  # seconds


def tensors(seed: int) -> dict[str, np.ndarray]:
    """Those of one model for each seed, all of one shape."""
    return random_tensors(MODEL, seed=seed)


def wanted(seed: int) -> dict[str, np.ndarray]:
    return reference(MODEL, tensors(seed), BF16)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What two processes tell of each load."""
    folder = tmp_path_factory.mktemp("meeting")
    first, second = (save(folder / f"{seed}", MODEL, tensors(seed)) for seed in (1, 2))
    copied, cut, replaced = (Path(shutil.copytree(first, folder / name)) for name in ("copied", "cut", "replaced"))
    os.utime(copied / "model.safetensors", ns=(1, 1))
    os.truncate(cut / "model.safetensors", (cut / "model.safetensors").stat().st_size // 2)
    shutil.copy(second / "model.safetensors", replaced / "other")
    checkpoints = [convert(release, folder / f"{release.name}-converted") for release in (first, second)]
    gone = Path(shutil.copytree(checkpoints[0], folder / "gone" / "0"))
    moved = folder / "moved"
    loads = {
        "one refuses": dict(source=[first, cut], mesh=MESH),  # before JAX's devices are there
        "after it": dict(source=second, mesh=MESH, options=STEPS),
        "copies": dict(source=[first, copied], mesh=MESH),
        "folders differ": dict(source=[first, second], mesh=MESH),
        "checkpoints differ": dict(source=checkpoints, mesh=MESH),
        "arguments differ": dict(source=first, mesh=MESH, options=[{}, STEPS]),
        "meshes differ": dict(source=first, mesh={"each": [[["fsdp"], [8]], [["tensor"], [8]]]}),
        "a branch moves": dict(source="hf://org/model", mesh=MESH, waits=[1, moved, "to open"]),
        "replaced": dict(source=[first, replaced], mesh=MESH, options=STEPS, fault=[1, "replaces"]),
        "late": dict(source=first, mesh=MESH, options=SOON, waits=[1, folder / "done-9-0", "to call"]),
        "after both": dict(source=first, mesh=MESH),
        "one has no device of the mesh": dict(source=second, mesh=[["fsdp"], [4]]),
        "no time": dict(source=first, mesh=MESH, options=[{}, dict(timeout=0)]),
        "after no time": dict(source=first, mesh=MESH),
        "twice at once": dict(source=first, mesh=MESH, twice=True),
        "versions differ": dict(source=checkpoints[0], mesh=MESH, fault=[1, "is another version"]),
        "a copy goes": dict(source=[checkpoints[0], gone], mesh=MESH, fault=[1, "loses it"]),
        "slow": dict(source=first, mesh=MESH, options=STEPS | SOON, fault=[1, "is slow"]),
        "dies": dict(source=first, mesh=MESH, options=SOON, fault=[1, "dies opening"]),
    }
    with FakeHub() as hub:
        hub.add("org/model", first)

        def move() -> None:
            while not hub.log.counts()["info"]:
                time.sleep(0.05)
            time.sleep(1)  # it has its answer
            hub.commit("org/model", second)
            moved.touch()

        threading.Thread(target=move, daemon=True).start()
        told, ended = run_job(2, loads, folder, hub.env())
    assert all(told[name] for name in loads), [each.stderr[-3000:] for each in ended]
    return told


def test_one_that_refuses_is_heard_by_all(job: Told) -> None:
    """In words, before JAX's devices are there; and what each loads next isn't completed by the other's last load, nor
    given up where one of them reads for longer than the time-out.
    """
    first, second = job["one refuses"]
    assert "model.safetensors" in second["refused"]
    assert not first["devices"]
    assert not second["devices"]
    assert first["refused"] == f"process 1 of 2 refused, so nothing was loaded: {second['refused']}"
    for name, seed in {"after it": 2, "copies": 1, "after both": 1, "slow": 1}.items():
        for told in job[name]:
            assert_holds(told, wanted(seed))


def test_two_at_once_are_refused(job: Told) -> None:
    """Two threads of each process load: the second one's call doesn't clear away what the first one's is saying, nor do
    their exchanges meet, and what is loaded later is.
    """
    for told in job["twice at once"]:
        assert "of load isn't over in this process; begin one after the other" in told["refused"]
    for told in job["slow"]:
        assert_holds(told, wanted(1))


def test_one_without_a_device_of_the_mesh(job: Told) -> None:
    """It has the arrays as well, without a shard."""
    first, second = job["one has no device of the mesh"]
    assert_holds(first, wanted(2))
    assert all(first["shards"].values())
    assert second["shards"] == {key: [] for key in first["shards"]}


def test_a_timeout_that_is_none(job: Told) -> None:
    """Who refuses it has come to the call all the same: the next one is the next of both."""
    first, second = job["no time"]
    assert second["refused"] == "timeout=0 should be seconds, more than 0"
    assert first["refused"] == f"process 1 of 2 refused, so nothing was loaded: {second['refused']}"
    for told in job["after no time"]:
        assert_holds(told, wanted(1))


def test_tables_are_compared_by_what_they_make(tmp_path: Path) -> None:
    """Two hosts may have other files of one name: what tells it is the file, and each rule."""
    release = save(tmp_path / "release", MODEL, tensors(1))
    table = tmp_path / "table.py"
    made = []
    for text in ("", "# another host's", "FAMILY = dataclasses.replace(FAMILY, releases='others')"):
        table.write_text(f"import dataclasses\nfrom weightbeam.model_mappings.families.llama import FAMILY\n{text}\n")
        made.append(find_source(str(release), choose({"family": str(table)})).identity())
    told = [differences(each, made[0]).partition(" is ")[0] for each in made]
    assert told == ["", *["what the family's table makes of it"] * 2]


@pytest.mark.parametrize(
    ("name", "what"),
    {
        "folders differ": "model.safetensors is ",
        "checkpoints differ": "is not there here, and ",
        "arguments differ": "unit_bytes is 100000 here, and 67108864 in process 0",
        "versions differ": "weightbeam is 0.0.1 (",
        "a copy goes": "No such file or directory",
        "meshes differ": "embedding is bfloat16 (512, 128), cut into (8, 1), on ",
    }.items(),
)
def test_different_loads_are_refused(job: Told, name: str, what: str) -> None:
    """With what differs: by the process that isn't as process 0, and by all others with its words."""
    first, second = job[name]
    assert what in second["refused"]
    assert first["refused"].startswith("process 1 of 2 refused, so nothing was loaded: ")
    assert what in first["refused"]


def test_a_branch_of_the_hub_is_one_commit_for_all(job: Told) -> None:
    """It moved after process 0 had asked for it, and before process 1 opened it."""
    for told in job["a branch moves"]:
        assert_holds(told, wanted(1))


def test_a_file_that_one_process_sees_replaced(job: Told) -> None:
    """All raise: nothing says which arrays have been read of the one or of the other."""
    first, second = job["replaced"]
    assert "model.safetensors changed" in second["failed"]
    assert first["failed"] == f"process 1 of 2 failed, so nothing was loaded: {second['failed']}"


def test_who_is_not_there_is_named(job: Told) -> None:
    """Within the time-out, be it that a process hasn't come or that it has died; who comes late is told so, too."""
    for told in job["late"]:
        assert told["failed"].startswith("process 1 of 2 didn't come to call 10 of load for 4 s")
    (died,) = job["dies"]
    assert died["failed"].startswith("process 1 of 2 has stopped: it wasn't heard of for 4 s")


def test_one_is_killed_at_its_first_load(tmp_path: Path) -> None:
    """Gloo's connections aren't made by then, and making them waits for 30 s: the others name it within the time-out all
    the same. Then they end at once, process 0 last, with whom JAX would end the others before they say it.
    """
    release = save(tmp_path / "1", MODEL, tensors(1))
    loads = {"dies": dict(source=release, mesh="fsdp=6", options=STEPS | SOON, fault=[1, "dies"])}
    told, ended = run_job(3, loads, tmp_path, heartbeat=25, abruptly=True)
    assert [each.returncode for each in ended] == [0, -9, 0], [each.stderr[-3000:] for each in ended]
    for each in told["dies"]:
        assert each["failed"].startswith("process 1 of 3 has stopped: it wasn't heard of for 4 s")


@pytest.mark.parametrize("processes", [2, 3])
def test_one_is_killed_while_it_loads(processes: int, tmp_path: Path) -> None:
    """Its devices are waited for by then: all others name it within the time-out, and refuse the next load; none ends by
    JAX's hand, or in JAX's words.
    """
    first, second = (save(tmp_path / f"{seed}", MODEL, tensors(seed)) for seed in (1, 2))
    mesh = f"fsdp={8 // processes * processes}"
    loads = {
        "whole": dict(source=second, mesh=mesh, options=STEPS),
        "dies": dict(source=first, mesh=mesh, options=STEPS | SOON, fault=[1, "dies"]),
        "next": dict(source=second, mesh=mesh, options=STEPS | SOON),
    }
    told, ended = run_job(processes, loads, tmp_path, heartbeat=25)
    assert ended[1].returncode == -9
    assert len(told["dies"]) == len(told["next"]) == processes - 1, [each.stderr[-3000:] for each in ended]
    for each in told["whole"]:
        assert_holds(each, wanted(2))
    for each in told["dies"]:
        assert each["failed"].startswith(f"process 1 of {processes} has stopped: it wasn't heard of for 4 s")
    for each in told["next"]:
        assert each["refused"].startswith("call 2 of load broke off amid an exchange (process 1 of ")


@pytest.mark.parametrize(
    ("fault", "first", "second"),
    [
        ([1, "sleeps"], "process 1 of 2 has stopped: it wasn't heard of for 4 s", "process 1 of 2 has stopped: "),
        ([0, "is interrupted"], None, "process 0 of 2 failed, so nothing was loaded: KeyboardInterrupt"),
        ([1, "is interrupted"], "process 1 of 2 failed, so nothing was loaded: KeyboardInterrupt", None),
        ([1, "breaks off"], "process 1 of 2 failed, so nothing was loaded: ", "no room"),
        ([1, "misses"], *["the exchanges of call 2 of load stood still for 4 s"] * 2),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, list) else "",
)
def test_one_leaves_amid_an_exchange(fault: list[Any], first: str | None, second: str | None, tmp_path: Path) -> None:
    """Its exchanges, or the other's, stay on the devices, where the next load would wait behind them: all say so."""
    releases = [save(tmp_path / f"{seed}", MODEL, tensors(seed)) for seed in (1, 2)]
    loads = {
        "whole": dict(source=releases[1], mesh=MESH, options=STEPS),
        "left": dict(source=releases[0], mesh=MESH, options=STEPS | SOON, fault=fault),
        "next": dict(source=releases[1], mesh=MESH, options=STEPS | SOON),
        "last": dict(source=releases[1], mesh=MESH, options=STEPS | SOON),
    }
    told, ended = run_job(2, loads, tmp_path, heartbeat=25, abruptly=True)
    assert all(len(each) == 2 for each in told.values()), [each.stderr[-3000:] for each in ended]
    for each in told["whole"]:
        assert_holds(each, wanted(2))
    for each, words in zip(told["left"], (first, second), strict=True):
        assert each == {"interrupted": True} if words is None else words in each["failed"]
    for each in [*told["next"], *told["last"]]:
        assert "call 2 of load broke off amid an exchange" in each["refused"]
        assert each["refused"].endswith("start all processes anew")


@pytest.mark.parametrize("opening", [4, 5, 6, 8, 10])
def test_a_release_that_is_replaced_while_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opening: int
) -> None:
    """At its k-th opening; whatever was read of which file, nothing is returned."""
    source, other = (save(tmp_path / f"{seed}", MODEL, tensors(seed)) for seed in (1, 2))
    path, opened, plain = str(source / "model.safetensors"), [], local.open_file

    def replacing(name: str) -> int:
        opened.append(name)
        if opened.count(path) == opening:
            os.replace(other / "model.safetensors", path)
        return plain(name)

    monkeypatch.setattr(local, "open_file", replacing)
    with pytest.raises(wb.Failed, match=r"model\.safetensors changed while it was read.*; load it again"):
        wb.load(str(source), abstract(wanted(1)), **STEPS)
    assert opened.count(path) >= opening


def test_a_checkpoint_that_is_replaced_while_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunk by chunk, in place, with the old times."""
    first, second = (
        convert(save(tmp_path / f"{seed}", MODEL, tensors(seed)), tmp_path / f"{seed}-out", "--use_ocdbt", "false")
        for seed in (1, 2)
    )
    reads, plain, one = [], loading.Loading._read, threading.Lock()

    def replacing(self: loading.Loading, *arguments: Any) -> Any:
        with one:  # else another thread may read a file that is empty for a moment
            reads.append(1)
            if len(reads) == 3:
                for path in [path for path in second.rglob("*") if path.is_file()]:
                    stored = first / path.relative_to(second)
                    seen = stored.stat()
                    stored.write_bytes(path.read_bytes())
                    os.utime(stored, ns=(seen.st_atime_ns, seen.st_mtime_ns))
            return plain(self, *arguments)

    monkeypatch.setattr(loading.Loading, "_read", replacing)
    with pytest.raises(wb.Failed, match=r"changed while it was read.*; load it again"):
        wb.load(str(first), abstract(wanted(1)), **STEPS)
    assert len(reads) > 3


def test_an_open_tree_whose_file_is_replaced(tmp_path: Path) -> None:
    """Boxes of any size are an error: the file that is opened is compared with the one that was planned with."""
    model = MODEL | dict(vocab_size=8192)
    source, other = (make_release(tmp_path / f"{seed}", model, seed=seed) for seed in (1, 2))
    tree = wb.open(str(source))
    embedding = tree["params.params.token_embedder.embedding"]
    assert embedding[...].nbytes >= 1 << 20
    tree.check()
    os.replace(other / "model.safetensors", source / "model.safetensors")
    with pytest.raises(wb.Failed, match=r"model\.safetensors changed .*; open it again"):
        embedding[...]
    with pytest.raises(wb.Failed, match="open it again"):
        embedding[3]
    with pytest.raises(wb.Failed, match="open it again"):
        tree.check()
    (source / "model.safetensors").unlink()
    for read in (lambda: embedding[3], tree.check):
        with pytest.raises(wb.Failed, match=r"model\.safetensors: (is gone|No such file)"):
            read()


def test_the_identity_of_a_source_is_that_of_its_content(tmp_path: Path) -> None:
    """Copies have the same on any disk, at any time; each file that is read counts."""
    source, other = (save(tmp_path / f"{seed}", MODEL, tensors(seed)) for seed in (1, 2))
    copied = Path(shutil.copytree(source, tmp_path / "copied"))
    os.utime(copied / "model.safetensors", ns=(1, 1))
    step = convert(source, tmp_path / "out")
    again = Path(shutil.copytree(step, tmp_path / "again" / "0"))

    def identity(where: Path) -> dict[str, str]:
        return find_source(str(where), choose({})).identity()

    assert differences(identity(copied), identity(source)) == ""
    assert differences(identity(again), identity(step)) == ""
    assert differences(identity(other), identity(source)).startswith("model.safetensors is ")
    (copied / "config.json").write_text(json.dumps(MODEL | {"rope_theta": 5.0}))
    assert differences(identity(copied), identity(source)).startswith("the configuration is ")


def test_a_coordinator_that_is_slow_to_answer() -> None:
    """A deadline says to one who waits for a key that it isn't set yet; to all others it is a failure, in our words."""

    class Slow:
        def __getattr__(self, name: str) -> Any:
            def answer(*_: Any, **__: Any) -> Any:
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: deadline exceeded")

            return answer

    meeting = Meeting()
    meeting.alone, meeting.processes, meeting._client = False, 2, Slow()
    for ask in (lambda: meeting._say("key", 1), meeting._look, lambda: meeting.decide("what", dict)):
        with pytest.raises(wb.Failed, match="JAX's coordinator"):
            ask()


@pytest.mark.parametrize("agreed", [False, True])
def test_an_exchange_that_breaks_off_with_a_value_error(
    agreed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Gloo's does where a result is fetched: it is looked for who has stopped. An error that all have agreed on is a
    file's, though TensorStore's begin alike.
    """
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    meeting, load = Meeting(), object.__new__(loading.Loading)
    meeting.alone, meeting.agreed, load.steps = False, agreed, []
    load.source = find_source(str(save(tmp_path / "hf", MODEL, tensors(1))), choose({}))

    def broken(*_: Any) -> Any:
        raise ValueError("UNKNOWN: Gloo AllGather failed: Connection reset by peer")

    def lost() -> None:
        raise wb.Failed("process 1 of 2 has stopped")

    monkeypatch.setattr(meeting, "until", broken)
    monkeypatch.setattr(meeting, "find_lost", lost)
    with pytest.raises(wb.Failed, match="UNKNOWN: Gloo" if agreed else "process 1 of 2 has stopped"):
        load.run(meeting)
