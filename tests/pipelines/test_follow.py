"""`weightbeam watch --run` beside a run that stock Orbax writes: each committed step once, whole, with the bits of an
export of a quiet copy.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import io
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pairs
import pytest
import training_run
import warm
import yaml
from huggingface_hub import snapshot_download
from lazily import lazily
from processes import wait_until
from safetensors.numpy import save_file
from servers.clients import TOKEN
from servers.gcs import FakeGcs
from servers.hub import FakeHub
from servers.repository import Commit
from servers.server import Fault
from support import (
    BF16,
    F32,
    LLAMA,
    assert_same_bits,
    begin_run,
    call,
    convert,
    flatten,
    make_release,
    peft_adapter,
    random_tensors,
    read_config,
    read_file,
    read_tensors,
    save,
)
from trained import SHARED, needs_shared
from training_run import write

import weightbeam as wb
from weightbeam.formats.safetensors import open_hf
from weightbeam.formats.staging.lease import HeldError
from weightbeam.formats.storage import File, LocalFolder, StorageError, open_store
from weightbeam.formats.storage.bucket import Bucket
from weightbeam.pipelines.checking import pairwise
from weightbeam.pipelines.terminal.errors import Failed, Refused
from weightbeam.pipelines.terminal.tables import human
from weightbeam.pipelines.watching import changes, describing, places, preflight, run_feed, watcher
from weightbeam.pipelines.watching import records as watching_records
from weightbeam.pipelines.watching.config import config_of_run
from weightbeam.pipelines.watching.isolation import Workers
from weightbeam.pipelines.watching.places import WORK, HubPlace, Place
from weightbeam.pipelines.watching.records import RUNS, History, histories
from weightbeam.pipelines.watching.run_feed import RunFeed
from weightbeam.pipelines.watching.runs import list_steps
from weightbeam.transforms.comparing.baselines import FILE, baseline_id, read_found
from weightbeam.transforms.comparing.differences import Difference

PIL = lazily("PIL")
peft = lazily("peft")
torch = lazily("torch")
transformers = lazily("transformers")

pytestmark = pytest.mark.usefixtures("warm_workers")
PATIENCE = 120  # seconds that anything may take
REPO = "me/tuned"
NODE = bytes.fromhex("0cdb20de")  # how a node of an OCDBT index begins (google/tensorstore, ocdbt/format/btree.cc)
WHOLE = ["discovered", "planned", "converting", "verified", "published"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A release, and the state with which a run of it begins: the weights, and something of an optimizer."""
    like, state = begin_run(tmp_path_factory.mktemp("model"))
    state["opt_state"] = [{"count": np.int32(0), "mu": state["params"]}, None]
    return like, state


@contextlib.contextmanager
def damaged(step: Path) -> Iterator[None]:
    """Context manager: the largest file of data of a step holds zeros, and nothing else tells: chunks, not the nodes of the
    index, which are read while it is planned. A database may write nodes behind chunks in one file, as its flushes fall.
    """
    largest = max((path for path in step.rglob("d/*") if path.is_file()), key=lambda path: path.stat().st_size)
    data, found = largest.read_bytes(), largest.stat()
    chunks = len(data.split(NODE)[0])
    assert chunks

    def write(zeros: bool) -> None:
        largest.write_bytes(bytes(chunks) + data[chunks:] if zeros else data)
        os.utime(largest, ns=(found.st_atime_ns, found.st_mtime_ns))

    write(zeros=True)
    yield
    write(zeros=False)


def exported(step: Path, like: Path, folder: Path, **options: Any) -> dict[str, np.ndarray]:
    """The tensors of an export of a step."""
    wb.export(str(step), str(folder), like=str(like), progress=False, **options)
    return read_tensors(folder)


def watch(run: Any, like: Any, output: Any, *options: str) -> int:
    return call("watch", "--run", run, "--like", like, "--output", output, *(options or ["--once"]))


def records(output: str | Path, name: str = "run") -> list[list[dict[str, Any]]]:
    """Each history of a run, in the order of their beginnings."""
    store = open_store(str(output)) / RUNS / name
    found: dict[str, list[dict[str, Any]]] = {}
    for file in store.list():
        if file.name.endswith(".json") and "/0" in file.name:
            found.setdefault(file.name.partition("/")[0], []).append(json.loads(store.read(file.name)))
    return sorted(found.values(), key=lambda history: history[0]["time"])


def states(output: str | Path, name: str = "run") -> dict[str, list[str]]:
    """The states of each history, by its step; a further one of the same step with a `+`."""
    found: dict[str, list[str]] = {}
    for history in records(output, name):
        step = history[0]["commit"]
        found[f"{step}+" if step in found else step] = [record["state"] for record in history]
    return found


def touches(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Everything in a folder, with what any touch would change."""
    return {
        str(path): (path.stat().st_mtime_ns, path.stat().st_ctime_ns, path.stat().st_nlink)
        for path in sorted(folder.rglob("*"))
    }


def tensors_on(hub: FakeHub, branch: str, folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a branch."""
    return tensors_of(hub.repositories[REPO].branches[branch], folder)


def tensors_of(commit: Commit, folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a commit."""
    folder.mkdir(parents=True)
    for name, blob in commit.files.items():
        if name.endswith(".safetensors"):
            (folder / name).write_bytes(bytes(blob.data))
    return read_tensors(folder)


# --- one look ---------------------------------------------------------------------------------------------------------


def assert_said_as_it_is(report: Path, now: dict[str, np.ndarray], then: dict[str, np.ndarray]) -> None:
    """What `changes.json` says of each tensor is the definition's, in float64."""
    found = json.loads(report.read_text())["before"]["tensors"]
    assert found.keys() == now.keys()
    for name, said in found.items():
        old = then[name].astype(np.float64)
        change = now[name].astype(np.float64) - old
        relative = np.linalg.norm(change.ravel()) / np.linalg.norm(old.ravel())
        assert said["relative"] == pytest.approx(relative, rel=1e-6, abs=1e-12), name
        assert said["largest"] == pytest.approx(float(np.abs(change).max()))


def assert_described(step: Path, run: Path, like: Path) -> None:
    """Step 30's report, changes, card and picture name the run, the step, its commit, and what it was compared with."""
    before = step.with_name("step-20")
    report, found = (json.loads((step / name).read_text()) for name in ("run.json", "changes.json"))
    assert (report["run"], report["step"], report["before"]) == (str(run), 30, {"step": 20, "url": str(before)})
    assert report["compared"] == "100% of the elements"
    assert found["unchanged"] == ["model.norm.weight"]
    assert found["like"]["than"] == str(like)
    card = (step / "README.md").read_text()
    facts = [
        f"run | {run}",
        "step | 30",
        f"commit | {report['weights']}",
        "rounded | 2 tensors: divided",
        "what changed | unchanged since step 20",
    ]
    assert [said for said in facts if f"| {said}" not in card] == []
    assert (step / "changes.png").read_bytes().startswith(b"\x89PNG")
    assert not (step / FILE).exists()


def test_each_step_is_published_with_what_changed(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest first; exact bits; a report, a card, JSON and a picture beside them; transformers loads it; the run
    isn't touched; once.
    """
    like, output, run = model[0], tmp_path / "out", tmp_path / "run" / "checkpoints"
    write(run, 10, 20, model=model)
    before = touches(run)
    assert watch(run, like, output, "--dry_run") == 0
    assert "would be exported: " in capsys.readouterr().out
    assert not output.exists()

    assert watch(run, like, output) == 0
    assert states(output) == {"step-20": WHOLE, "step-10": WHOLE}
    assert touches(run) == before
    for step in (10, 20):
        wanted = exported(run / str(step), like, tmp_path / f"quiet-{step}")
        assert_same_bits(read_tensors(output / f"step-{step}"), wanted)
    assert json.loads((output / "hf.json").read_text())["checkpoint"] == str(output / "step-20")

    write(run, 30, model=model)
    assert watch(run, like, output) == 0
    made = output / "step-30"
    assert_said_as_it_is(made / "changes.json", read_tensors(made), read_tensors(output / "step-20"))
    assert_described(made, run, like)
    assert "unchanged since step 20: model.norm.weight" in records(output)[-1][-1]["reason"]
    with torch.no_grad():
        transformers.LlamaForCausalLM.from_pretrained(made)(torch.arange(8)[None])

    listed = [".weightbeam", "hf.json", "step-10", "step-20", "step-30"]
    assert sorted(path.name for path in output.iterdir()) == listed
    assert watch(run, tmp_path / "nosuch", output) == 2  # though nothing is left to be made
    assert "nosuch: no such folder" in capsys.readouterr().err
    assert watch(run, like, output) == 0
    assert sorted(path.name for path in output.iterdir()) == listed
    assert not list((output / ".weightbeam" / "work").iterdir())
    assert states(output) == {"step-20": WHOLE, "step-10": WHOLE, "step-30": WHOLE}


def test_what_changed_is_found_on_the_way(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What makes a step is told the step before and `like`, and compares it with them; by the time that they are compared
    there is nothing left to be read.
    """
    like, output, run = shutil.copytree(model[0], tmp_path / "like"), tmp_path / "out", tmp_path / "run"
    write(run, 1, model=model)
    assert watch(run, like, output) == 0
    write(run, 2, model=model)
    config = config_of_run(str(run), str(like), str(output), None, {})
    feed = RunFeed(config, config.runs[0], Workers(), flat=True)
    feed.histories("run")
    (target,) = feed.targets
    step = next(iter(feed.versions("run")))
    history = feed.history(step, target)
    history.begin(step, target)
    task = feed.plan(feed.source(history), target)
    planned = task.do()
    history.add("planned", checkpoint=feed.place(history, planned["plan"]), **planned)
    (making,), (*_, comparing), _ = feed.tasks(history, target)
    making.do()
    url, about, aside_url = comparing.do.args
    release, aside = open_store(url), open_store(aside_url)
    before = str(output / "step-1")
    assert (about["before"]["url"], about["like"]) == (before, str(like))
    assert read_found(release).keys() == {baseline_id(open_hf(url)) for url in (before, str(like))}
    with monkeypatch.context() as patched:
        patched.setattr(pairwise, "compare_each", None)  # nothing is read again
        comparing.do()
    found = json.loads(aside.read(changes.JSON))
    release.delete(FILE)
    comparing.do()
    assert json.loads(aside.read(changes.JSON))["said"] == found["said"] != []
    assert found["before"]["tensors"].keys() == read_tensors(like).keys()


@pytest.mark.slow("exports many steps of a run, one after the other")
def test_a_run_that_goes_back(model: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """It begins again at step 1, and writes step 2 anew: another checkpoint, told as such; what was published stays."""
    like, output, run = model[0], tmp_path / "out", tmp_path / "run" / "checkpoints"
    write(run, 1, 2, 3, model=model)
    assert watch(run, like, output) == 0
    first = read_tensors(output / "step-2")
    shutil.rmtree(run / "2")
    shutil.rmtree(run / "3")
    write(run, 2, model=model, seed=1)
    assert watch(run, like, output) == 0
    (anew,) = list(output.glob("step-2-*"))
    assert_same_bits(read_tensors(output / "step-2"), first)
    assert_same_bits(read_tensors(anew), exported(run / "2", like, tmp_path / "quiet"))
    assert "step 2 was written anew" in records(output)[-1][0]["reason"]
    assert json.loads((output / "hf.json").read_text())["checkpoint"] == str(anew)
    assert json.loads((anew / "run.json").read_text())["before"]["step"] == 1


def spoiled(value: float) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A kernel with one such element."""

    def spoil(held: dict[str, Any]) -> dict[str, Any]:
        kernel = held["kernel"].copy()
        kernel[0, 0] = value
        return {"kernel": kernel}

    return spoil


@pytest.mark.parametrize("value", pairs.some([math.nan, -math.inf], 2))
def test_nan_isnt_the_newest(model: tuple[Path, dict[str, Any]], tmp_path: Path, value: float) -> None:
    """It is published, told, and passed over, by another watcher too; the next good step is the newest, and what it is
    compared with is the last good one.
    """
    like, output, run = model[0], tmp_path / "out", tmp_path / "run" / "checkpoints"

    def newest() -> str:
        return Path(json.loads((output / "hf.json").read_text())["checkpoint"]).name

    write(run, 1, model=model, logits_dense=spoiled(value))
    assert watch(run, like, output) == 0
    assert not (output / "hf.json").exists()
    assert records(output)[0][-1]["reason"] == "isn't made the newest: NaN or infinite elements in lm_head.weight"
    write(run, 2, model=model)
    assert watch(run, like, output) == 0
    write(run, 3, model=model, logits_dense=spoiled(value))
    assert watch(run, like, output) == 0
    assert (newest(), (output / "step-3").exists()) == ("step-2", True)
    shutil.rmtree(run / "3")
    write(run, 4, model=model)
    assert watch(run, like, output, "--once", "--on_nan", "newest") == 0  # which says nothing of good ones
    assert newest() == "step-4"
    assert json.loads((output / "step-4" / "run.json").read_text())["before"]["step"] == 2
    write(run, 5, model=model, logits_dense=spoiled(value))
    assert watch(run, like, output, "--once", "--on_nan", "newest") == 0
    assert newest() == "step-5"
    found = json.loads((output / "step-1" / "changes.json").read_text())
    assert found["not_finite"] == ["lm_head.weight"]
    assert found["like"]["tensors"]["lm_head.weight"]["relative"] == "nan"


@pytest.mark.slow("exports many steps of a run, one after the other")
def test_what_is_kept(model: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last two and every third, of what was published; nothing of it comes back, and the run keeps its own."""
    like, run, file = model[0], tmp_path / "run" / "checkpoints", tmp_path / "watch.yaml"
    about = dict(
        checkpoints=str(run),
        like=str(like),
        keep=dict(last=2, every=3),
        steps=dict(every=1),
        targets=[dict(name="f32")],
    )
    file.write_text(yaml.safe_dump(dict(output=str(tmp_path / "out"), runs=[about], verify=0)))
    for step in (3, 4, 5, 6, 7):
        write(run, step, model=model)
        assert call("watch", "--config", file, "--once") == 0
    assert "run@step-5 for f32: removed: keep: the last 2, and multiples of 3" in capsys.readouterr().err
    assert call("watch", "--config", file, "--once") == 0
    assert sorted(path.name for path in (tmp_path / "out" / "run" / "f32").iterdir()) == [
        ".weightbeam",
        "step-3",
        "step-6",
        "step-7",
    ]
    assert {step: found[-1] for step, found in states(tmp_path / "out").items()} == {
        "step-3": "published", "step-4": "removed", "step-5": "removed", "step-6": "published", "step-7": "published",
    }  # fmt: skip
    assert len(list(run.iterdir())) == 5
    assert all(
        record["reason"].startswith("not compared")
        for history in records(tmp_path / "out")
        for record in history
        if record["state"] == "verified"
    )


def test_steps_that_are_asked_for(model: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Multiples, a list, the newest; what grows is none."""
    run = tmp_path / "run"
    write(run, 1, 2, 3, 4, model=model)
    (run / "6.orbax-checkpoint-tmp").mkdir()
    (run / "7").mkdir()  # as Orbax leaves what is being deleted
    there = list_steps(open_store(str(run)))
    assert [seen.number for seen in there] == [1, 2, 3, 4]
    from weightbeam.pipelines.watching.config import read_steps

    for given, wanted in (("every", [4, 3, 2, 1]), ("newest", [4]), ({"every": 2}, [4, 2]), ([3, 9], [3])):
        assert [seen.number for seen in read_steps(given).wanted(there)] == wanted
    for wrong in ("some", [], [-1], {"every": 0}, 5):
        with pytest.raises(ValueError, match="should be every, newest"):
            read_steps(wrong)


@pytest.mark.slow("makes ten thousand folders")
def test_a_look_at_ten_thousand_steps_is_one_listing(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, audit: list[tuple[str, str]]
) -> None:
    """And one of what was published before: nothing is opened."""
    run, output, file = tmp_path / "run", tmp_path / "out", tmp_path / "watch.yaml"
    write(run, 10_000, model=model)
    for step in range(1, 10_000):
        (run / str(step)).mkdir()
        os.link(run / "10000" / "_CHECKPOINT_METADATA", run / str(step) / "_CHECKPOINT_METADATA")
    target = dict(name="f32", output=str(tmp_path / "models"))
    about = dict(checkpoints=str(run), like=str(model[0]), steps="newest", targets=[target])
    file.write_text(yaml.safe_dump(dict(output=str(output), runs=[about], verify=0)))
    assert call("watch", "--config", file, "--once") == 0
    audit.clear()
    assert call("watch", "--config", file, "--once") == 0
    assert [said for said in audit if said[1].startswith(str(run))] == [("os.listdir", str(run))]
    assert [said for said in audit if said[1].startswith(str(output))].count(
        ("os.scandir", str(output / RUNS / "run" / "marks"))
    ) == 2  # when it starts, and when it looks
    assert states(output) == {"step-10000": WHOLE}


@pytest.fixture
def audit() -> Iterator[list[tuple[str, str]]]:
    """What this process opens and lists: `(event, path)`."""
    told: list[tuple[str, str]] = []
    wanted = {"open", "os.listdir", "os.scandir"}

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in wanted:
            told.append((event, str(arguments[0])))

    sys.addaudithook(hook)
    yield told
    wanted.clear()  # a hook stays


@pytest.fixture(scope="session")
def lora_run(
    model: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, np.ndarray]]:
    """A run whose step 5 holds an adapter of the release only, and the factors as PEFT has them."""
    like, folder = model[0], tmp_path_factory.mktemp("lora")
    modules = {f"model.layers.{layer}.self_attn.v_proj": (16, 32) for layer in range(2)}
    adapter, factors = peft_adapter(folder / "adapter", modules, base_model_name_or_path=str(like))
    step = convert(
        like,
        folder / "ours",
        "--save_dtype",
        "float32",
        "--maxtext_model",
        "llama2-7b",
        "--lora",
        str(adapter),
        "--adapter_only",
        "true",
    )
    checkpoints = training_run.manager(str(folder / "run" / "checkpoints"), None)
    training_run.save(checkpoints, 5, training_run.load_state(step), {"lora_rank": 4, "lora_alpha": 8})
    checkpoints.close()
    return folder / "run" / "checkpoints", factors


def test_a_lora_run(
    model: tuple[Path, dict[str, Any]], lora_run: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    """Its steps hold the factors only: each becomes PEFT's adapter, or the release with it merged in, or that in FP8."""
    like, file, (run, factors) = model[0], tmp_path / "watch.yaml", lora_run
    targets = [
        dict(name="adapter"),
        dict(name="merged", lora="merged", max_shard_size="30KB"),
        dict(name="fp8", kind="quantize"),
    ]
    about = dict(
        checkpoints=str(run), like=str(like), targets=[target | dict(maxtext_model="llama2-7b") for target in targets]
    )
    file.write_text(yaml.safe_dump(dict(output=str(tmp_path / "out"), runs=[about])))
    assert call("watch", "--config", file, "--once") == 0
    out = tmp_path / "out" / "run"
    assert_same_bits(read_file(out / "adapter" / "step-5" / "adapter_model.safetensors"), factors)
    wb.merge(str(like), str(tmp_path / "merged"), lora=str(out / "adapter" / "step-5"), progress=False)
    assert_same_bits(read_tensors(out / "merged" / "step-5"), read_tensors(tmp_path / "merged"))
    assert len(list((out / "merged" / "step-5").glob("*.safetensors"))) > 1
    wb.quantize(str(tmp_path / "merged"), str(tmp_path / "fp8"), progress=False)
    assert (out / "fp8" / "step-5" / "model.safetensors").read_bytes() == (
        tmp_path / "fp8" / "model.safetensors"
    ).read_bytes()
    assert not list(tmp_path.rglob(".weightbeam/work/*"))
    base = transformers.LlamaForCausalLM.from_pretrained(like)
    assert peft.PeftModel.from_pretrained(base, out / "adapter" / "step-5").peft_config["default"].r == 4
    about["targets"] = [dict(name="adapter", lora="merged", maxtext_model="llama2-7b")]  # under the same name
    file.write_text(yaml.safe_dump(dict(output=str(tmp_path / "out"), runs=[about])))
    assert call("watch", "--config", file, "--once") == 0
    (merged,) = (out / "adapter").glob("step-5-*")
    assert_same_bits(read_tensors(merged), read_tensors(tmp_path / "merged"))


@pytest.mark.parametrize(
    ("place", "lora"),
    [
        ("bucket", "merged"),
        ("hub", "adapter"),
        *(
            pytest.param(
                *pair, marks=pytest.mark.slow("another place and kind of the same run; one of each always runs")
            )
            for pair in (("bucket", "adapter"), ("hub", "merged"))
        ),
    ],
)
def test_a_lora_run_elsewhere(
    place: str,
    lora: str,
    model: tuple[Path, dict[str, Any]],
    lora_run: tuple[Path, dict[str, np.ndarray]],
    tmp_path: Path,
    gcs: FakeGcs,
    hub: FakeHub,
) -> None:
    """Into a bucket and onto the hub, by options: the adapter alone, and the release with it merged in; nothing stays
    behind.
    """
    like, (run, factors) = model[0], lora_run
    output = {"bucket": "gs://out/tuned", "hub": f"hf://{REPO}"}[place]
    options = ["--once", "--lora", lora, "--maxtext_model", "llama2-7b"]
    assert watch(run, like, output, *options) == 0
    if place == "bucket":
        held = {
            name.partition("/step-5/")[2]: bytes(one.data)
            for name, one in gcs.objects["out"].items()
            if "/step-5/" in name
        }
    else:
        repository = hub.repositories[REPO]
        held = {name: bytes(blob.data) for name, blob in repository.branches["step-5"].files.items()}
        assert repository.head.files.keys() == repository.branches["step-5"].files.keys()
    assert {"run.json", "README.md", "changes.json"} < held.keys()
    found = tmp_path / "found"
    found.mkdir()
    for name, data in held.items():
        (found / name).write_bytes(data)
    if lora == "adapter":
        assert_same_bits(read_file(found / "adapter_model.safetensors"), factors)
    else:
        transformers.LlamaForCausalLM.from_pretrained(found)
        values = read_tensors(found)["model.layers.1.self_attn.v_proj.weight"]
        a, b = (factors[f"base_model.model.model.layers.1.self_attn.v_proj.lora_{which}.weight"] for which in "AB")
        np.testing.assert_allclose(
            values, read_tensors(like)["model.layers.1.self_attn.v_proj.weight"] + 2 * b @ a, rtol=1e-5, atol=1e-5
        )
    assert not [name for name in gcs.objects["out"] if "/work/" in name]
    assert not list((tmp_path / "cache").glob("weightbeam/watch/*/*/adapter*"))
    assert watch(run, like, output, *options) == 0


def test_in_fp8(model: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By options, as in a file: what `quantize` makes of the step."""
    like, run = model[0], tmp_path / "run" / "checkpoints"
    write(run, 3, model=model)
    assert watch(run, like, tmp_path / "out", "--once", "--kind", "quantize", "--maxtext_model", "llama2-7b") == 0
    wb.quantize(str(run / "3"), str(tmp_path / "quiet"), like=str(like), maxtext_model="llama2-7b", progress=False)
    assert (tmp_path / "out" / "step-3" / "model.safetensors").read_bytes() == (
        tmp_path / "quiet" / "model.safetensors"
    ).read_bytes()
    assert json.loads((tmp_path / "out" / "step-3" / "run.json").read_text())["compared"] == "100% of the elements"
    for wrong in (
        ["--kind", "quantize", "--lora", "adapter"],
        ["--kind", "reshard", "--lora", "merged"],
        ["--kind", "quantize", "--save_dtype", "float32"],
    ):
        assert watch(run, like, tmp_path / "other", "--once", *wrong) == 2
        assert "--run=" in capsys.readouterr().err
        assert not (tmp_path / "other").exists()


@needs_shared
def test_a_model_without_a_release(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What MaxText trained from scratch, by its configuration in place of a release; and what needs one says so."""
    run = tmp_path / "run"
    shutil.copytree(SHARED / "trained" / "llama-fsdp8", run)
    about = dict(
        model_name="llama3.1-8b",
        override_model_config=True,
        base_emb_dim=64,
        base_num_query_heads=4,
        base_num_kv_heads=2,
        head_dim=16,
    )
    about |= dict(base_mlp_dim=96, vocab_size=256, base_num_decoder_layers=4, weight_dtype="float32")
    (tmp_path / "maxtext.yml").write_text(yaml.safe_dump(about))
    assert watch(run, tmp_path / "maxtext.yml", tmp_path / "out") == 0, capsys.readouterr().err
    wb.export(str(run), str(tmp_path / "quiet"), maxtext_config=str(tmp_path / "maxtext.yml"), progress=False)
    assert_same_bits(read_tensors(tmp_path / "out" / "step-1"), read_tensors(tmp_path / "quiet"))
    assert watch(run, tmp_path / "maxtext.yml", tmp_path / "out", "--once", "--kind", "quantize") == 2
    assert "is a MaxText configuration" in capsys.readouterr().err


def test_what_adapters_have_no_use_for(
    model: tuple[Path, dict[str, Any]],
    lora_run: tuple[Path, dict[str, np.ndarray]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Is refused by name: by `export`, and at the start of `watch`."""
    for command in (
        ["export", lora_run[0] / "5", tmp_path / "out", "--like", model[0]],
        ["watch", "--run", lora_run[0], "--like", model[0], "--output", tmp_path / "out"],
    ):
        assert call(*command, "--save_dtype", "bfloat16", *(["--once"] if command[0] == "watch" else [])) == 2
        assert "--save_dtype: " in capsys.readouterr().err
        assert not list(tmp_path.rglob("*.safetensors"))


def test_an_adapter_needs_weights_to_be_merged_into(
    model: tuple[Path, dict[str, Any]],
    lora_run: tuple[Path, dict[str, np.ndarray]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A release that gives its form only is refused at the start, not after the first export."""
    form = shutil.copytree(model[0], tmp_path / "form", ignore=shutil.ignore_patterns("*.safetensors*"))
    for options in (["--lora", "merged"], ["--kind", "quantize"]):
        told = ["--once", "--maxtext_model", "llama2-7b", *options]
        assert call("watch", "--run", lora_run[0], "--like", form, "--output", tmp_path / "out", *told) == 2
        assert "has no weights" in capsys.readouterr().err
    assert not list(tmp_path.glob("out/step-*"))


def test_a_clock_that_is_wrong(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step that was committed tomorrow: told at the start, published all the same, and once."""
    run = tmp_path / "run" / "checkpoints"
    write(run, 1, model=model)
    about = run / "1" / "_CHECKPOINT_METADATA"
    said = json.loads(about.read_text())
    tomorrow = said["commit_timestamp_nsecs"] + 86_400 * 10**9
    about.write_text(json.dumps(said | {"commit_timestamp_nsecs": tomorrow}))
    assert watch(run, model[0], tmp_path / "out") == 0
    assert "by the run's clock" in capsys.readouterr().err
    assert (tmp_path / "out" / "step-1").exists()
    assert watch(run, model[0], tmp_path / "out") == 0
    assert sorted(path.name for path in (tmp_path / "out").glob("step-*")) == ["step-1"]


@pytest.mark.parametrize(
    "at_once", [True, pytest.param(False, marks=pytest.mark.slow("a look for each step; one look at all always runs"))]
)
def test_a_clock_that_was_ahead(model: tuple[Path, dict[str, Any]], tmp_path: Path, at_once: bool) -> None:
    """The first steps bear times of next year: the newest is the last all the same, and `keep` keeps the last. What it
    wouldn't keep of the steps that are there isn't made at all.
    """
    publish, run = publishing(model, tmp_path, tmp_path / "pub"), tmp_path / "run"
    for step in (1, 2, 3):
        write(run, step, model=model)
        about = run / str(step) / "_CHECKPOINT_METADATA"
        said = json.loads(about.read_text())
        ahead = 0 if step == 3 else 365 * 86_400 * 10**9
        about.write_text(json.dumps(said | {"commit_timestamp_nsecs": said["commit_timestamp_nsecs"] + ahead}))
        if not at_once:
            assert call("watch", "--config", tmp_path / "watch.yaml", "--once") == 0
    assert publish(4) == 0
    assert [path.name for path in (tmp_path / "pub").glob("step-*")] == ["step-4"]
    assert json.loads((tmp_path / "out" / "run" / "t.json").read_text())["step"] == 4
    made = [step for step, found in states(tmp_path / "out", "run").items() if "published" in found]
    assert len(made) == (1 if at_once else 4)


@pytest.mark.slow("several attempts of a step, each an export")
def test_a_retry_throws_away_what_a_refused_attempt_staged(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was staged with the release that has been replaced since: gone on with, it would be refused for ever."""
    run, out = tmp_path / "run" / "checkpoints", tmp_path / "out"
    write(run, 1, model=model)
    with damaged(run / "1"):
        assert watch(run, model[0], out) == 1
    assert "--retry run has it begin anew" in capsys.readouterr().out
    (staged,) = (out / ".weightbeam" / "work").iterdir()
    (history,) = histories(open_store(str(out)), "run", RUNS)
    history.add("refused", "such as --like of other sizes, by a mistake that was mended since")
    half = save(
        tmp_path / "half",
        json.loads((model[0] / "config.json").read_text()) | dict(dtype="bfloat16"),
        random_tensors(LLAMA, BF16),
    )
    assert watch(run, half, out, "--retry", "run") == 0
    assert not staged.exists()
    assert watch(run, half, out) == 0
    assert states(out) == {
        "step-1": ["discovered", "planned", "converting", "failed", "refused", "discovered", *WHOLE[1:]]
    }
    assert_same_bits(read_tensors(out / "step-1"), exported(run / "1", half, tmp_path / "quiet"))
    capsys.readouterr()
    assert watch(run, half, out, "--retry", "run") == 0
    assert "Nothing of run is refused, held or failed." in capsys.readouterr().out
    assert watch(run, half, out, "--retry", "tuned") == 2
    assert "no such model or run is watched; there are run" in capsys.readouterr().err


@pytest.mark.slow("watchers that wait for a lease to become stale")
@pytest.mark.parametrize("hours", [-5, 5])
def test_a_clock_that_jumps(
    hours: int, model: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two looks: what was published is let alone, what failed is tried again, what comes is published."""
    like, run, out, file = model[0], tmp_path / "run" / "checkpoints", tmp_path / "out", tmp_path / "watch.yaml"
    about = dict(checkpoints=str(run), like=str(like), targets=[dict(name="f32", output=str(out / "run"))])
    file.write_text(yaml.safe_dump(dict(output=str(out), runs=[about], verify=0, retry_minutes=60)))
    write(run, 1, model=model)
    assert call("watch", "--config", file, "--once") == 0
    write(run, 2, model=model)
    with damaged(run / "2"):
        assert call("watch", "--config", file, "--once") == 1
    assert call("watch", "--config", file, "--once") == 1  # it isn't due yet
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=hours)
    for module in (watcher, watching_records):
        monkeypatch.setattr(module, "now", lambda: later)
    write(run, 3, model=model)
    assert call("watch", "--config", file, "--once") == 0
    assert sorted(path.name for path in (out / "run").glob("step-*")) == ["step-1", "step-2", "step-3"]
    assert {step: found.count("published") for step, found in states(out).items()} == {
        "step-1": 1,
        "step-2": 1,
        "step-3": 1,
    }
    assert json.loads((out / "run" / "f32.json").read_text())["step"] == 3


@pytest.mark.slow("watchers that wait for a lease to become stale")
def test_a_clock_that_jumps_while_a_step_is_made(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, gcs: FakeGcs
) -> None:
    """Forward by hours: the lease looks stale, though its watcher lives, and another one takes the step. It is
    published once, whole, at the next look at the latest, and nothing of either stays behind.
    """
    run, out = tmp_path / "run", tmp_path / "out"
    write(run, 1, model=model)
    upload(gcs, run / "1", "tuned/checkpoints/1")
    gcs.faults = [Fault("slow", seconds=5.0, matching="%2Fd%2F|/d/")]
    follow = ["--run", "gs://run/tuned/checkpoints", "--like", str(model[0]), "--output", str(out), "--once"]
    with start(tmp_path / "printed", *follow) as first:
        deadline = time.monotonic() + PATIENCE
        while "converting" not in states(out, "tuned").get("step-1", []):
            assert time.monotonic() < deadline, (tmp_path / "printed").read_text()
            time.sleep(0.05)
        (history,) = (out / RUNS / "tuned").glob("hf-*")
        lease, taken = history / "lease", threading.Event()
        owner = os.readlink(lease)

        def jump() -> None:
            """Also after the watcher that lives has renewed it, as long as nobody has taken it."""
            while first.poll() is None and not taken.wait(0.01):
                with contextlib.suppress(FileNotFoundError):
                    if os.readlink(lease) != owner:
                        taken.set()
                    else:
                        os.utime(lease, (time.time() - 5 * 3600,) * 2, follow_symlinks=False)

        clock = threading.Thread(target=jump)
        clock.start()
        assert call("watch", *follow) == 0
        gcs.faults = []
        assert first.wait(PATIENCE) == 0
        clock.join()
    assert taken.is_set()
    assert call("watch", *follow) == 0  # the other one may have found the first one's export at work, and let it be
    assert [found.count("published") for found in states(out, "tuned").values()] == [1]
    assert "Traceback" not in (tmp_path / "printed").read_text()
    assert_same_bits(read_tensors(out / "step-1"), exported(run / "1", model[0], tmp_path / "quiet"))
    assert not list((out / ".weightbeam" / "work").iterdir())


def test_a_copy_for_another_mesh(model: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """The parameters alone, in bfloat16, as stock Orbax restores them."""
    like, run, file = model[0], tmp_path / "run" / "checkpoints", tmp_path / "watch.yaml"
    write(run, 7, model=model)
    target = dict(name="serve", kind="reshard", save_dtype="bfloat16", mesh="fsdp=2", maxtext_model="llama2-7b")
    file.write_text(
        yaml.safe_dump(
            dict(output=str(tmp_path / "out"), runs=[dict(checkpoints=str(run), like=str(like), targets=[target])])
        )
    )
    assert call("watch", "--config", file, "--once") == 0
    assert states(tmp_path / "out") == {"step-7": WHOLE}
    found = flatten(training_run.load_state(tmp_path / "out" / "run" / "serve" / "step-7" / "7")["params"])
    wanted = flatten(training_run.weights_of(model[1], 7)["params"])
    assert_same_bits(found, {key: values.astype(BF16) for key, values in wanted.items()})


def test_rules_that_were_edited(model: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """A step is cut anew where the file says something else, and not where only its comments do."""
    run, rules, file = tmp_path / "run" / "checkpoints", tmp_path / "rules.yaml", tmp_path / "watch.yaml"
    write(run, 7, model=model)
    target = dict(
        name="cut", kind="reshard", mesh="fsdp=2,tensor=2", sharding_rules=str(rules), maxtext_model="llama2-7b"
    )
    about = dict(checkpoints=str(run), like=str(model[0]), targets=[target])
    file.write_text(yaml.safe_dump(dict(output=str(tmp_path / "out"), runs=[about])))
    plans = []
    for said in (
        "[[embed, fsdp], [mlp, tensor]]",
        "[[embed, fsdp], [mlp, tensor]] # again",
        "[[embed, tensor], [mlp, fsdp]]",
    ):
        rules.write_text(f"logical_axis_rules: {said}\n")
        assert call("watch", "--config", file, "--once") == 0
        planned = (record for history in records(tmp_path / "out") for record in history if "plan" in record)
        plans.append(len({record["plan"] for record in planned}))
    assert plans == [1, 1, 2]


# --- buckets, and the hub ---------------------------------------------------------------------------------------------


def upload(gcs: FakeGcs, folder: Path, name: str) -> None:
    """As Orbax leaves a step in a bucket: the marker last."""
    files = sorted(
        (path for path in folder.rglob("*") if path.is_file()),
        key=lambda path: (path.name == "commit_success.txt", -len(path.parts)),
    )
    for path in files:
        gcs.put("run", f"{name}/{path.relative_to(folder).as_posix()}", path.read_bytes())


def test_nan_in_a_bucket(model: tuple[Path, dict[str, Any]], tmp_path: Path, gcs: FakeGcs) -> None:
    """The mark stays the last good step's."""
    local, output = tmp_path / "local", "gs://out/models"
    write(local, 1, model=model)
    write(local, 2, model=model, logits_dense=spoiled(math.inf))
    for step in ("1", "2"):
        upload(gcs, local / step, f"tuned/checkpoints/{step}")
        assert watch("gs://run/tuned/checkpoints", model[0], output) == 0
    held = open_store(output)
    assert json.loads(held.read("hf.json"))["checkpoint"] == f"{output}/step-1"
    assert held.exists("step-2/run.json")


def test_a_step_that_is_held_back(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Made once, not again at each look; asked for again it is published."""
    like, output, run = model[0], tmp_path / "out", tmp_path / "run" / "checkpoints"
    write(run, 1, model=model)
    write(run, 2, model=model, logits_dense=spoiled(math.nan))
    for _ in range(2):
        assert watch(run, like, output, "--once", "--on_nan", "hold") == 0
    held = [*WHOLE[:-1], "held"]
    assert states(output) == {"step-2": held, "step-1": WHOLE}
    said = capsys.readouterr().err
    assert "held: isn't published, by on_nan: hold: NaN or infinite elements in lm_head.weight" in said
    assert not (output / "step-2").exists()
    assert not list((output / ".weightbeam" / "work").iterdir())
    write(run, 3, model=model)
    assert watch(run, like, output, "--once", "--on_nan", "hold") == 0
    assert json.loads((output / "hf.json").read_text())["checkpoint"] == str(output / "step-3")
    assert watch(run, like, output, "--retry", "run") == 0
    assert watch(run, like, output) == 0
    assert states(output)["step-2"] == [*held, *WHOLE]
    assert json.loads((output / "hf.json").read_text())["checkpoint"] == str(output / "step-3")


def test_a_run_in_a_bucket_into_a_bucket(model: tuple[Path, dict[str, Any]], tmp_path: Path, gcs: FakeGcs) -> None:
    """Ten thousand steps: a look is one listing of the run. Nothing is written there. `run.json` comes last."""
    like, run = model[0], tmp_path / "run"
    write(run, 10_000, model=model)
    for step in range(1, 10_000):
        gcs.put("run", f"tuned/checkpoints/{step}/commit_success.txt", b"")
    upload(gcs, run / "10000", "tuned/checkpoints/10000")
    held = {name: one.generation for name, one in gcs.objects["run"].items()}
    file = tmp_path / "watch.yaml"
    about = dict(
        checkpoints="gs://run/tuned/checkpoints",
        like=str(like),
        steps="newest",
        targets=[dict(name="f32", output="gs://out/tuned")],
    )
    file.write_text(yaml.safe_dump(dict(output="gs://out/records", runs=[about])))
    assert call("watch", "--config", file, "--once") == 0
    assert [name for name, one in gcs.objects["run"].items() if held.pop(name, None) != one.generation] == [*held] == []
    published = {
        name.removeprefix("tuned/step-10000/"): one
        for name, one in gcs.objects["out"].items()
        if name.startswith("tuned/step-10000/")
    }
    assert max(published, key=lambda name: published[name].generation) == "run.json"
    assert not [name for name in gcs.objects["out"] if "/work/" in name]
    (tmp_path / "down").mkdir()
    for name, one in published.items():
        (tmp_path / "down" / name).write_bytes(bytes(one.data))
    assert_same_bits(read_tensors(tmp_path / "down"), exported(run / "10000", like, tmp_path / "quiet"))
    gcs.log.clear()
    assert call("watch", "--config", file, "--once") == 0
    of_run = [entry for entry in gcs.log if entry.name.startswith("run/")]
    assert {entry.kind for entry in of_run} == {"list"}
    assert len(of_run) == 10  # pages of 1,000 marks each
    assert states("gs://out/records", "tuned") == {"step-10000": WHOLE}


def test_a_step_that_comes_back(
    model: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As after a mount that was lost for a moment: it was gone, and is published all the same."""
    like, run, output = model[0], tmp_path / "tuned" / "checkpoints", tmp_path / "out"
    write(run, 1, model=model)
    run_together = Workers.run_together

    def without(*given: Any) -> Any:
        monkeypatch.setattr(Workers, "run_together", run_together)
        (run / "1").rename(tmp_path / "aside")
        return run_together(*given)

    monkeypatch.setattr(Workers, "run_together", without)
    assert watch(run, like, output) == 0
    gone = states(output, "tuned")["step-1"]
    assert gone[-1] == "gone"
    assert watch(run, like, output) == 0
    (tmp_path / "aside").rename(run / "1")
    capsys.readouterr()
    assert watch(run, like, output) == 0
    assert states(output, "tuned")["step-1"] == [*gone, *WHOLE]
    assert (output / "step-1").is_dir()
    assert "it is there again" in capsys.readouterr().err


def test_a_step_that_is_deleted_while_it_is_read(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, gcs: FakeGcs
) -> None:
    """It is gone: nothing of it is published, nothing staged is left, and the newest step is taken."""
    like, run, output = model[0], tmp_path / "run", tmp_path / "out"
    write(run, 1, 2, model=model)
    upload(gcs, run / "1", "tuned/checkpoints/1")
    gcs.faults = [Fault("slow", seconds=0.3, matching="%2Fd%2F|/d/")]

    def delete() -> None:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and not any(states(output, "tuned").get("step-1", [])[2:]):
            time.sleep(0.05)
        with gcs.lock:
            for name in [name for name in gcs.objects["run"] if name.startswith("tuned/checkpoints/1/")]:
                del gcs.objects["run"][name]
        upload(gcs, run / "2", "tuned/checkpoints/2")
        gcs.faults = []

    thread = threading.Thread(target=delete)
    thread.start()
    assert watch("gs://run/tuned/checkpoints", like, output) == 0
    thread.join()
    assert states(output, "tuned") == {"step-1": ["discovered", "planned", "converting", "gone"], "step-2": WHOLE}
    assert sorted(path.name for path in output.iterdir()) == [".weightbeam", "hf.json", "step-2"]
    assert not list((output / ".weightbeam" / "work").iterdir())


@pytest.mark.slow("steps on a hub, each exported and downloaded again")
def test_a_step_on_the_hub_is_a_branch(model: tuple[Path, dict[str, Any]], tmp_path: Path, hub: FakeHub) -> None:
    """And the newest is `main`: one commit each, once. A card that somebody has edited is kept."""
    like, run = model[0], tmp_path / "run" / "checkpoints"
    write(run, 1, 2, model=model)
    assert watch(run, like, f"hf://{REPO}") == 0
    repository = hub.repositories[REPO]
    assert set(repository.branches) == {"main", "step-1", "step-2"}
    assert [commit.title.partition(" (")[0] for commit in repository.head.history()] == [
        "Step 2 of run",
        "initial commit",
    ]
    for step in (1, 2):
        assert repository.branches[f"step-{step}"].title.startswith(f"Step {step} of run (")
        assert_same_bits(
            tensors_on(hub, f"step-{step}", tmp_path / f"hub-{step}"),
            exported(run / str(step), like, tmp_path / f"quiet-{step}"),
        )
    assert re.search(r"\| run \| run@[0-9a-f]{16} \|", bytes(repository.head.files["README.md"].data).decode())
    assert watch(run, like, f"hf://{REPO}") == 0
    assert len(repository.head.history()) == 2
    (tmp_path / "card").mkdir()
    (tmp_path / "card" / "README.md").write_text("# Mine\n")
    hub.commit(REPO, tmp_path / "card")
    write(run, 3, model=model)
    assert watch(run, like, f"hf://{REPO}") == 0
    assert repository.head.title.startswith("Step 3 of run (")
    assert bytes(repository.head.files["README.md"].data) == b"# Mine\n"
    assert "changes.json" in repository.head.files
    assert not list((tmp_path / "cache" / "weightbeam" / "watch").glob("*/.weightbeam/work/*"))


def test_nan_on_the_hub(model: tuple[Path, dict[str, Any]], tmp_path: Path, hub: FakeHub) -> None:
    """A branch of its own; `main` stays what it was."""
    run, output = tmp_path / "run" / "checkpoints", f"hf://{REPO}"
    write(run, 1, model=model)
    assert watch(run, model[0], output) == 0
    good = tensors_on(hub, "main", tmp_path / "good")
    write(run, 2, model=model, logits_dense=spoiled(math.nan))
    assert watch(run, model[0], output) == 0
    assert_same_bits(tensors_on(hub, "main", tmp_path / "still"), good)
    assert np.isnan(tensors_on(hub, "step-2", tmp_path / "spoiled")["lm_head.weight"]).sum() == 1
    write(run, 3, model=model)
    assert watch(run, model[0], output) == 0
    wanted = tensors_on(hub, "step-3", tmp_path / "next")
    assert_same_bits(tensors_on(hub, "main", tmp_path / "newest"), wanted)


def test_a_pull_request(model: tuple[Path, dict[str, Any]], tmp_path: Path, hub: FakeHub) -> None:
    like, run, file = model[0], tmp_path / "run" / "checkpoints", tmp_path / "watch.yaml"
    write(run, 1, model=model)
    about = dict(
        checkpoints=str(run), like=str(like), targets=[dict(name="f32", output=f"hf://{REPO}", create_pr=True)]
    )
    file.write_text(yaml.safe_dump(dict(output=str(tmp_path / "out"), runs=[about])))
    assert call("watch", "--config", file, "--once") == 0
    assert call("watch", "--config", file, "--once") == 0
    assert [made.title.partition(" (")[0] for made in hub.repositories[REPO].pulls] == ["Step 1 of run"]
    assert set(hub.repositories[REPO].branches) == {"main"}
    assert records(tmp_path / "out")[0][-1]["pages"] == [f"{hub.url}/{REPO}/discussions/1"]


def test_a_repository_that_holds_another_model(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused at the start, all of it named; a card alone is no model, and a pull request replaces nothing."""
    like, run = model[0], tmp_path / "run" / "checkpoints"
    write(run, 1, model=model)
    hub.add(REPO, like).writers.add(TOKEN)
    before = hub.repositories[REPO].head
    assert watch(run, like, f"hf://{REPO}") == 2
    said = capsys.readouterr().err
    assert [name for name in ("config.json", "model.safetensors") if name not in said] == []
    assert hub.repositories[REPO].branches == {"main": before}
    HubPlace(f"hf://{REPO}", tmp_path, create_pr=True).check_writable()
    hub.commit(REPO, tmp_path, [], remove=[name for name in before.files if name != "README.md"])
    HubPlace(f"hf://{REPO}", tmp_path).check_writable()


@pytest.mark.slow("two watchers, one of which waits for the other")
@pytest.mark.parametrize("place", ["folder", "hub"])
def test_an_older_step_that_is_published_later(
    place: str, model: tuple[Path, dict[str, Any]], tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another watcher has published a newer one meanwhile, and that stays the newest."""
    run = tmp_path / "run" / "checkpoints"
    output = {"folder": str(tmp_path / "out"), "hub": f"hf://{REPO}"}[place]
    write(run, 1, model=model)
    follow = ["--run", str(run), "--like", str(model[0]), "--output", output]
    publish = RunFeed.publish

    def be_slow(*arguments: Any) -> dict[str, Any]:
        monkeypatch.setattr(RunFeed, "publish", publish)
        write(run, 2, model=model)
        assert start(tmp_path / "printed", *follow, "--once", "--every", "2").wait() == 0
        return publish(*arguments)

    monkeypatch.setattr(RunFeed, "publish", be_slow)
    assert watch(run, model[0], output) == 0
    if place == "hub":
        assert set(hub.repositories[REPO].branches) == {"main", "step-1", "step-2"}
        assert hub.repositories[REPO].head.title.startswith("Step 2 ")
    else:
        assert sorted(path.name for path in Path(output).glob("step-*")) == ["step-1", "step-2"]
        assert json.loads((tmp_path / "out" / "hf.json").read_text())["step"] == 2


@pytest.mark.slow("two watchers that export and publish the same steps")
@pytest.mark.parametrize("machines", [1, 2])
def test_two_watchers_of_one_repository(
    machines: int, model: tuple[Path, dict[str, Any]], tmp_path: Path, hub: FakeHub
) -> None:
    """Both alive all the time, on one machine or on one each: each step is published once, whole and as it is, and
    `main` goes from a step to a newer one only.
    """
    like, run, last = model[0], tmp_path / "run" / "checkpoints", 6
    write(run, 1, model=model)
    follow = ["--run", str(run), "--like", str(like), "--output", f"hf://{REPO}", "--interval", "1s"]
    printed = [tmp_path / f"printed-{number}" for number in range(2)]

    def told() -> str:
        return "\n".join(file.read_text()[-2000:] for file in printed)

    with contextlib.ExitStack() as stack:
        watchers = []
        for number, file in enumerate(printed):
            cache = str(tmp_path / f"cache-{number % machines}")
            watchers.append(start(file, *follow, XDG_CACHE_HOME=cache))
            stack.callback(watchers[-1].wait)
            stack.callback(watchers[-1].kill)
        for step in range(2, last + 1):
            time.sleep(2)
            write(run, step, model=model)
        wanted, deadline = {"main", *(f"step-{step}" for step in range(1, last + 1))}, time.monotonic() + PATIENCE
        while (
            not (repository := hub.repositories.get(REPO))
            or set(repository.branches) != wanted
            or not repository.head.title.startswith(f"Step {last} ")
        ):
            assert all(watcher.poll() is None for watcher in watchers), told()
            assert time.monotonic() < deadline, told()
            time.sleep(0.2)
        time.sleep(5)  # in which the other one looks, too
        assert all(watcher.poll() is None for watcher in watchers), told()
    assert set(repository.branches) == wanted
    quiet = {step: exported(run / str(step), like, tmp_path / f"quiet-{step}") for step in range(1, last + 1)}
    made: dict[str, list[int]] = {}
    for branch, head in repository.branches.items():
        for number, commit in enumerate(head.history()):
            if match := re.match(r"Step (\d+) of run \(", commit.title):
                made.setdefault(branch, []).insert(0, int(match[1]))
                found = tensors_of(commit, tmp_path / f"got-{branch}-{number}")
                assert_same_bits(found, quiet[int(match[1])])
                assert json.loads(bytes(commit.files["run.json"].data))["step"] == int(match[1])
    for step in range(1, last + 1):
        assert made[f"step-{step}"].count(step) == 1
    assert made["main"] == sorted(set(made["main"]))
    assert made["main"][-1] == last
    assert "Traceback" not in told()
    assert "failed" not in told()


# --- beside a run -----------------------------------------------------------------------------------------------------


def start(printed: Path, *options: object, **environment: str) -> warm.Process:
    """A watcher of its own, whose words are added to a file."""
    with printed.open("ab") as out:
        return warm.start("watch", *options, stdout=out, stderr=out, env=os.environ | environment)


class Followed:
    """A run of asynchronous saves with `max_to_keep=2`, and a watcher that publishes its steps at a place."""

    def __init__(
        self, place: str, folder: Path, model: tuple[Path, dict[str, Any]], hub: FakeHub, gcs: FakeGcs
    ) -> None:
        self.place, self.folder, self.like, self.hub, self.gcs = place, folder, model[0], hub, gcs
        self.rng, self.run = random.Random(pairs.SEED), folder / "run" / "checkpoints"
        self.output = {"folder": str(folder / "out"), "bucket": "gs://out/tuned", "hub": f"hf://{REPO}"}[place]
        write(folder / "state", 0, model=model)
        self.state = training_run.load_state(folder / "state" / "0")
        write(self.run, 0, model=(self.like, self.state))

    def steps(self) -> list[int]:
        """Those that the run holds."""
        return sorted(int(path.name) for path in self.run.iterdir() if path.name.isdigit())

    def told(self) -> list[list[dict[str, Any]]]:
        """Each history that there is so far."""
        cached = list((self.folder / "cache").glob("weightbeam/watch/*"))
        return records(self.output if self.place != "hub" else cached[0]) if self.place != "hub" or cached else []

    def said(self) -> str:
        """What the watchers printed."""
        return (self.folder / "printed-watch").read_text()

    def go_on_until_killed(self) -> None:
        """Both begin; when the watcher has told of four states more, both are killed, in any order."""
        steps = f"{self.steps()[-1] + 1}:1000"
        train = [
            sys.executable,
            training_run.__file__,
            "--state",
            f"{self.folder}/state/0",
            "--root",
            str(self.run),
            "--steps",
            steps,
        ]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        follow = ["--run", self.run, "--like", self.like, "--output", self.output, "--interval", "1s"]
        with (
            (self.folder / "printed-run").open("ab") as out,
            subprocess.Popen([*train, "--seconds", "0.7"], stdout=out, stderr=out, env=environment) as run,
            start(self.folder / "printed-watch", *follow) as watcher,
        ):
            try:
                before = sum(map(len, self.told()))
                wait_until(lambda: sum(map(len, self.told())) >= before + 4, self.said, PATIENCE, every=0.2)
                time.sleep(self.rng.uniform(0, 2))
            finally:
                for process in self.rng.sample([run, watcher], 2):
                    process.send_signal(signal.SIGKILL)
                    process.wait()
                    time.sleep(self.rng.uniform(0, 0.3))

    def look_once(self) -> None:
        """A watcher that nobody kills; it doesn't touch the run."""
        before = touches(self.run)
        assert watch(self.run, self.like, self.output) in (0, 1)
        assert touches(self.run) == before

    def published(self) -> list[int]:
        """The steps that the histories say are published: each once, the newest too; what isn't is gone."""
        told = self.told()
        assert all(record["state"] != "failed" for history in told for record in history), told
        assert {history[-1]["state"] for history in told} <= {"published", "gone"}
        assert all([record["state"] for record in history].count("published") <= 1 for history in told)
        steps = [history[0]["step"] for history in told if history[-1]["state"] == "published"]
        assert len(steps) == len(set(steps))
        assert self.steps()[-1] in steps
        return sorted(steps)

    def listed(self) -> set[str]:
        """The steps that are whole at the place."""
        if self.place == "folder":
            return {path.name for path in Path(self.output).glob("step-*")}
        if self.place == "bucket":
            files = [name for name in self.gcs.objects["out"] if name.startswith("tuned/step-")]
            return {name.split("/")[1] for name in files if name.endswith("/run.json")}
        repository = self.hub.repositories[REPO]
        titles = [commit.title for commit in repository.head.history()[:-1]]
        assert len(titles) == len(set(titles))
        assert "main" in repository.branches
        return set(repository.branches) - {"main"}

    def tensors(self, step: int) -> dict[str, np.ndarray]:
        """What is published of a step."""
        if self.place == "folder":
            return read_tensors(Path(self.output) / f"step-{step}")
        folder = self.folder / f"got-{step}"
        if self.place == "hub":
            return tensors_on(self.hub, f"step-{step}", folder)
        folder.mkdir()
        for name, found in self.gcs.objects["out"].items():
            if name.startswith(f"tuned/step-{step}/") and name.endswith(".safetensors"):
                (folder / name.rpartition("/")[2]).write_bytes(bytes(found.data))
        return read_tensors(folder)

    def wanted(self, step: int) -> dict[str, np.ndarray]:
        """An export of the step of a run of which nothing is killed."""
        quiet = self.folder / f"quiet-{step}"
        write(quiet, step, model=(self.like, self.state))
        return exported(quiet / str(step), self.like, self.folder / f"quiet-export-{step}")


@pytest.mark.parametrize(
    "place",
    [
        "folder",
        pytest.param(
            "bucket", marks=pytest.mark.slow("a run and a watcher, both killed again and again, a minute a place")
        ),
        pytest.param(
            "hub", marks=pytest.mark.slow("a run and a watcher, both killed again and again, a minute a place")
        ),
    ],
)
def test_beside_a_run_that_goes_on(
    place: str, tmp_path: Path, model: tuple[Path, dict[str, Any]], hub: FakeHub, gcs: FakeGcs
) -> None:
    """Both are killed again and again."""
    followed = Followed(place, tmp_path, model, hub, gcs)
    for _ in range(int(os.environ.get("FOLLOW_KILLS", "1"))):
        followed.go_on_until_killed()
    assert f"following run, looking every 1 s until Ctrl-C: {followed.run}" in followed.said()
    followed.look_once()
    published = followed.published()
    assert followed.listed() == {f"step-{step}" for step in published}
    for step in published:
        assert_same_bits(followed.tensors(step), followed.wanted(step))
    last = followed.steps()[-1]
    restored = flatten(training_run.load_state(followed.run / str(last))["params"])
    assert_same_bits(restored, flatten(training_run.weights_of(followed.state, last)["params"]))


# --- what is refused --------------------------------------------------------------------------------------------------


def test_everything_wrong_is_said_at_the_start(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str], gcs: FakeGcs
) -> None:
    """Nothing is written, and no run is begun: the folder around the steps, a release, another model's release, two runs into one place, a
    bucket that can't be written.
    """
    like, run, file = model[0], tmp_path / "run" / "checkpoints", tmp_path / "watch.yaml"
    write(run, 1, model=model)
    (tmp_path / "empty").mkdir()
    other = make_release(tmp_path / "other", LLAMA | dict(hidden_size=64), dtype=F32)
    diloco = training_run.manager(str(tmp_path / "diloco"), None)
    training_run.save(diloco, 1, {"inner_state": {"x": np.zeros((2, 3), np.float32)}, "step": np.int32(1)})
    diloco.close()
    gcs.read_only = ["out/"]
    runs = [
        dict(checkpoints=str(run), name="a", like=str(like), targets=[dict(name="one", output=str(tmp_path / "same"))]),
        dict(
            checkpoints=str(run), name="b", like=str(other), targets=[dict(name="one", output=str(tmp_path / "same"))]
        ),
        dict(checkpoints=str(tmp_path / "run"), name="c", like=str(like)),
        dict(checkpoints=str(like), name="d", like=str(like)),
        dict(checkpoints=str(tmp_path / "diloco"), name="e", like=str(like)),
        dict(
            checkpoints=str(run),
            name="f",
            like=str(like),
            targets=[dict(name="one", output="gs://out/x"), dict(name="two", output=str(run / "in"))],
        ),
    ]
    file.write_text(yaml.safe_dump(dict(output=str(tmp_path / "out"), runs=runs)))
    assert call("watch", "--config", file, "--once") == 2
    said = capsys.readouterr().err
    wanted = ["run b, target one: is published into", f"{tmp_path}/run: has no steps", f"{like}: is a release", "a DiLoCo state", "gs://out/x",
              "roles/storage.objectUser", "a run: nothing is ever written there", "run b, target one: step 1: "]  # fmt: skip
    assert [text for text in wanted if text not in said] == []
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "same").exists()
    assert "has other sizes: hidden_size is 64" in said  # below the run that it is of
    assert {path.name for path in run.iterdir()} == {"1"}
    assert watch(run, like, tmp_path / "mine") == 0
    write(tmp_path / "second" / "checkpoints", 1, model=model)
    assert watch(tmp_path / "second" / "checkpoints", like, tmp_path / "mine") == 2
    assert "two runs can't be published into one place" in capsys.readouterr().err
    file.write_text(
        yaml.safe_dump(dict(output=str(like / "in"), runs=[dict(checkpoints=str(run), name="g", like=str(like))]))
    )
    before = sorted(like.rglob("*"))
    assert call("watch", "--config", file, "--once") == 2
    assert f"output: {like}/in lies in {like}, a release that a run is like: nothing is ever" in capsys.readouterr().err
    assert sorted(like.rglob("*")) == before


@pytest.mark.parametrize(
    ("one", "other"),
    [("hf://me/w", "hf://Me/W@main"), ("hf://me/w@refs/heads/step-1", "hf://me/w@step-1"), ("hf://me/w/", "hf://me/w")],
)
def test_a_branch_is_one_by_whichever_name(one: str, other: str) -> None:
    """So that a run isn't like what it publishes, nor like what is removed."""
    assert preflight._is_below(one, other)
    assert not preflight._is_below(one, "hf://me/w@step-2")


def test_two_targets_of_one_repository(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the name that it has, and by one that it had."""
    run, file = tmp_path / "run" / "checkpoints", tmp_path / "watch.yaml"
    write(run, 1, model=model)
    hub.add(REPO).writers.add(TOKEN)
    hub.renamed["me/former"] = REPO
    targets = [dict(name="one", output=f"hf://{REPO}"), dict(name="two", output="hf://me/former")]
    about = dict(checkpoints=str(run), like=str(model[0]), targets=targets)
    file.write_text(yaml.safe_dump(dict(output=str(tmp_path / "out"), runs=[about])))
    assert call("watch", "--config", file, "--once") == 2
    assert "target two: is published into hf://me/former, as is run run, target one" in capsys.readouterr().err
    assert list(hub.repositories[REPO].branches) == ["main"]


def test_a_form_that_keep_would_remove(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step that was published is the form of the next ones: it would be gone once another is published."""
    run, out, file = tmp_path / "run", tmp_path / "pub", tmp_path / "watch.yaml"

    def once(**asked: Any) -> int:
        file.write_text(yaml.safe_dump(dict(output=str(out), runs=[dict(checkpoints=str(run)) | asked])))
        return call("watch", "--config", file, "--once")

    write(run, 1, model=model)
    assert once(like=str(model[0])) == 0
    (form,) = out.glob("**/step-1")
    capsys.readouterr()
    assert once(like=str(form), keep=dict(last=1)) == 2
    said = capsys.readouterr().err
    assert f"keep removes old steps in {form.parent}, where {form} lies, which run run is like; name a copy" in said
    assert once(like=str(form), keep=dict(last=1, every=1)) == 0
    targets = [dict(name="hf", tokenizer=str(form))]
    assert once(like=str(model[0]), keep=dict(last=1), targets=targets) == 2
    assert (
        f"where {form} lies, of which run run, target hf, takes the tokenizer; name a copy" in capsys.readouterr().err
    )


def test_a_watcher_starts_before_the_run(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One script may start both: it is said what is waited for, and the first step is taken when it is there."""
    like, output, run = model[0], tmp_path / "out", tmp_path / "run" / "checkpoints"
    for look in ("--dry_run", "--once"):
        assert watch(run, like, output, look) == 0
        assert f"waiting  {run} isn't there yet; it is waited for, and its first step" in capsys.readouterr().out
    run.mkdir(parents=True)
    assert watch(run, like, output) == 0
    assert f"{run} has no steps yet; they are waited for directly in it" in capsys.readouterr().out
    (run / "1.orbax-checkpoint-tmp").mkdir()
    assert watch(run, like, output) == 0
    waits = f"{run} has a step that isn't committed yet; its _CHECKPOINT_METADATA, which Orbax's CheckpointManager writes last"
    assert waits in capsys.readouterr().out
    shutil.rmtree(run)
    follow = ["--run", run, "--like", like, "--output", output, "--interval", "1s"]
    with start(tmp_path / "printed", *follow):
        wait_until(lambda: "isn't there yet" in (tmp_path / "printed").read_text())
        assert f"following run, looking every 1 s until Ctrl-C: {run}" in (tmp_path / "printed").read_text()
        write(run, 1, model=model)
        wait_until(lambda: states(output) == {"step-1": WHOLE})
    assert states(output) == {"step-1": WHOLE}
    assert (tmp_path / "printed").read_text().count("isn't there yet") == 1
    shutil.rmtree(run)  # now it isn't the beginning any more
    assert watch(run, like, output) == 2
    assert f"{run}: is gone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("file", "file: Not a directory"),
        ("file/checkpoints", "checkpoints: Not a directory"),
        ("around", "around: has no steps; did you mean .*/around/checkpoints?"),
        ("around/checkpoints/1", "1: is a checkpoint; a run is the folder of its steps, .*/around/checkpoints"),
        ("like", "like: is a release; a run is a folder of checkpoints"),
        ("gs://none/run", "gs://none: no such bucket"),
    ],
)
def test_what_will_never_be_a_run(
    model: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    gcs: FakeGcs,
    where: str,
    said: str,
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "like").symlink_to(model[0])
    step = tmp_path / "around" / "checkpoints" / "1"
    step.mkdir(parents=True)
    (step / "_CHECKPOINT_METADATA").write_text("{}")
    run = where if "://" in where else tmp_path / where
    assert watch(run, model[0], tmp_path / "out") == 2
    assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_places_are_looked_at_first(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str], gcs: FakeGcs, hub: FakeHub
) -> None:
    """By a dry run, too, which writes nothing: a token that may only read, a file in a folder's place, a bucket that
    isn't there, the run's own folder by another name; and the records, where all else lies elsewhere.
    """
    run, file, link = tmp_path / "run" / "checkpoints", tmp_path / "watch.yaml", tmp_path / "link"
    write(run, 1, model=model)
    link.symlink_to(run)
    (tmp_path / "file").write_text("")
    hub.writers.clear()
    outputs = dict(hub=f"hf://{REPO}", file=str(tmp_path / "file" / "x"), bucket="gs://none/x", inside=str(link / "x"))
    targets = [dict(name=name, output=output) for name, output in outputs.items()]
    about = dict(checkpoints=str(run), like=str(model[0]), targets=targets)
    file.write_text(yaml.safe_dump(dict(output=str(tmp_path / "file" / "records"), runs=[about])))
    before = touches(tmp_path)
    wanted = [
        f"target hub: hf://{REPO}: the token that is set may only read",
        f"target file: {tmp_path}/file/x: ",
        "target bucket: gs://none/x: ",
        f"target inside: {link}/x lies in {run}",
        f"output: {tmp_path}/file/records: ",
    ]
    for look in ("--once", "--dry_run"):
        assert call("watch", "--config", file, look) == 2
        said = capsys.readouterr().err
        assert [text for text in wanted if text not in said] == []
        assert "Traceback" not in said
        assert touches(tmp_path) == before


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_file_where_our_own_folder_belongs(tmp_path: Path, dry_run: bool) -> None:
    (tmp_path / ".weightbeam").write_text("")
    with pytest.raises(StorageError, match=re.escape(f"{tmp_path}: ")):
        places.check_writable(open_store(tmp_path), dry_run)


def test_a_look_after_a_publication_lists_the_run(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is listed to tell which step is the newest isn't the next look: a step may come in between."""
    run = tmp_path / "run" / "checkpoints"
    write(run, 1, model=model)
    config = config_of_run(str(run), str(model[0]), str(tmp_path / "out"), None, {})
    with Workers() as workers:
        feed, target = RunFeed(config, config.runs[0], workers), config.runs[0].targets[0]
        (step,) = feed.versions("run")
        history = feed.history(step, target)
        history.begin(step, target)
        assert feed._is_newest_by_now(history)
        write(run, 2, model=model)
        assert next(iter(feed.versions("run"))).commit == "step-2"


def test_a_release_that_cant_be_compared_says_why(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Refused, match=r"model\.safetensors"):
        describing.compare(str(tmp_path), {"run": "r", "name": "r", "step": 1}, str(tmp_path))


def test_a_release_of_the_hub_is_fetched_once(
    hub: FakeHub,
    model: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the hub's cache holds it: the watcher says at its start how that is done, until it is."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    run, like, output = tmp_path / "run" / "checkpoints", f"hf://{REPO}", tmp_path / "out"
    hub.add(REPO, model[0])
    write(run, 1, model=model)
    size = sum(file.stat().st_size for file in model[0].glob("*.safetensors"))
    assert watch(run, like, output, "--dry_run") == 0
    said = " ".join(capsys.readouterr().err.split())
    assert (
        f"{human(size)} are fetched for each step, to tell what changed; `hf download {REPO} --include '*.safetensors'`, once,"
        " where it is exported, spares that" in said
    )
    snapshot_download(REPO, cache_dir=tmp_path / "home" / "hub", endpoint=hub.url, token=TOKEN)
    assert watch(run, like, output, "--dry_run") == 0
    assert "are fetched" not in capsys.readouterr().err


def test_a_hint_needs_no_hub(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """What is fetched for each step can't be told of a repository that isn't there at this moment."""
    preflight._warn_of_downloads(["hf://acme/none", "/a/folder"])
    assert "fetched" not in capsys.readouterr().err


def test_everything_wrong_with_a_run_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "watch.yaml"
    target = dict(name="A B", save_dtype="int8", wheels=4, create_pr=True)
    run = dict(checkpoints="hf://a/b", steps="some", keep=dict(last=0), targets=[target], colour="red")
    file.write_text(yaml.safe_dump(dict(output="/x", runs=[run])))
    assert call("watch", "--config", file, "--once") == 2
    said = capsys.readouterr().err
    places = [
        "runs.0.checkpoints:",
        "runs.0.steps:",
        "keep.last",
        "name: should be",
        "save_dtype:",
        "wheels: no such option",
        "create_pr:",
        "runs.0.colour",
    ]
    assert [place for place in places if place not in said] == []
    for options in (
        ["--run", "/r"],
        ["--every", "3"],
        ["--config", file, "--run", "/r"],
        ["--run", "/r", "--output", "hf://nobody"],
    ):
        assert call("watch", *options, "--once") == 2
    assert "Traceback" not in capsys.readouterr().err


def changed(relative: float, bad: bool = False) -> Difference:
    """One element that has changed so much; `bad`: it isn't finite now."""
    different = 1 if relative or bad else 0
    return Difference(1, different, squares=relative**2, left=1.0, right=math.nan if bad else 1.0)


def test_kinds_and_layers() -> None:
    """Experts are one kind, what lies in no layer is apart, a NaN stays one."""

    tensors = {
        "model.layers.0.mlp.experts.0.up_proj.weight": changed(0.1), "model.layers.0.mlp.experts.1.up_proj.weight": changed(0.3),
        "model.layers.1.mlp.experts.0.up_proj.weight": changed(0.2, bad=True), "lm_head.weight": changed(0.4),
    }  # fmt: skip
    kinds, layers, cells = changes.grid_of(tensors)
    assert kinds == ["mlp.experts.*.up_proj.weight", "lm_head.weight"]
    assert layers == [-1, 0, 1]
    assert cells["mlp.experts.*.up_proj.weight", 0] == 0.3
    assert np.isnan(cells["mlp.experts.*.up_proj.weight", 1])
    assert cells["lm_head.weight", -1] == 0.4


def test_a_sentence() -> None:
    """Of what changed, by the median and the most; no words where nothing did, or nothing can be told."""
    told = dict(a=changed(0.0), b=changed(0.5), c=changed(0.25), d=changed(math.nan))
    assert (
        changes.sentence(told, "step 1") == "changed since step 1 by 2.50e-01 (median over tensors), most b: 5.00e-01"
    )
    assert changes.sentence({name: told[name] for name in "ad"}, "step 1") == ""


def test_the_colours_of_a_picture() -> None:
    """Grey where nothing changed, red only where an element isn't finite; a long name doesn't run out of the picture."""

    def areas(*cells: tuple[float, bool]) -> set[str]:
        tensors = {f"model.layers.{layer}.x": changed(value, bad) for layer, (value, bad) in enumerate(cells)}
        drawn = changes.picture({"a-release-whose-name-is-long/" * 9: changes.grid_of(tensors)}, "run, step 1")
        assert drawn
        pixels = np.asarray(PIL.Image.open(io.BytesIO(drawn)).convert("RGB"), np.int32)
        assert (pixels[:, -3:] == 255).all()
        named = {"red": (255, 0, 0), "grey": (217, 217, 217)}
        return {
            name for name, colour in named.items() if (abs(pixels - colour) <= 1).all(axis=2).sum() > 1000
        }  # letters are grey too

    assert areas((0.1, False), (0.0, False), (0.2, False)) == {"grey"}
    assert areas((0.1, False), (0.2, True)) == {"red"}
    assert areas((0.0, False)) == {"grey"}


def test_the_picture_that_cant_be_drawn_is_said_once(
    model: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At the start, with what installs it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "matplotlib" else find(name, *more)
    )
    write(tmp_path / "run", 1, 2, model=model)
    assert watch(tmp_path / "run", model[0], tmp_path / "out", "--dry_run") == 0
    said = capsys.readouterr().err
    assert said.count("without changes.png") == 1
    assert "pip install '.[follow]'" in said


def publishing(model: tuple[Path, dict[str, Any]], tmp_path: Path, output: str | Path) -> Callable[[int], int]:
    """A run, and what writes a step of it and has a watcher publish it at `output`, where it keeps the last one."""
    run, file = tmp_path / "run", tmp_path / "watch.yaml"
    about = dict(
        checkpoints=str(run), like=str(model[0]), keep=dict(last=1), targets=[dict(name="t", output=str(output))]
    )
    file.write_text(yaml.safe_dump(dict(output=str(tmp_path / "out"), runs=[about], verify=0)))

    def publish(step: int) -> int:
        write(run, step, model=model)
        return call("watch", "--config", file, "--once")

    return publish


def test_a_watcher_killed_between_a_branch_and_main(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, hub: FakeHub
) -> None:
    """Another machine, which has nothing of what was made, goes on with its records: the step becomes the newest."""
    run, printed = tmp_path / "run", tmp_path / "printed"
    write(run, 1, model=model)
    follow = ["--run", str(run), "--like", str(model[0]), "--output", f"hf://{REPO}", "--once"]
    fault = hub.fail("slow", seconds=30, times=1, matching="POST .*/preupload/main")
    with start(printed, *follow, XDG_CACHE_HOME=str(tmp_path / "one")) as watcher:
        wait_until(lambda: fault.hits > 0, printed.read_text, PATIENCE)
        watcher.kill()
    branches = hub.repositories[REPO].branches
    assert branches["step-1"].title.startswith("Step 1 of ")
    assert branches["main"].title == "initial commit"
    with start(printed, *follow, XDG_CACHE_HOME=str(tmp_path / "two")) as watcher:
        assert watcher.wait(PATIENCE) == 0
    assert branches["main"].title == branches["step-1"].title
    assert len(branches["step-1"].history()) == 2


@pytest.mark.parametrize(
    ("number", "name"),
    pairs.some([(signal.SIGINT, "config.json"), (signal.SIGTERM, "run.json"), (signal.SIGINT, "run.json")], 2),
)
def test_a_stop_while_a_bucket_publishes_a_step(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, gcs: FakeGcs, number: signal.Signals, name: str
) -> None:
    """The answer is waited for, and it is said that the step is published; nothing is after that was said. Others' readers
    look for config.json, which comes before the report.
    """
    run, printed = tmp_path / "run", tmp_path / "printed"
    write(run, 1, model=model)
    file = tmp_path / "watch.yaml"
    about = dict(checkpoints=str(run), like=str(model[0]), targets=[dict(name="t", output="gs://out/pub")])
    file.write_text(yaml.safe_dump(dict(output=str(tmp_path / "out"), runs=[about], verify=0)))
    fault = gcs.fail("slow", seconds=2, times=1, matching=rf"POST .*(rewriteTo|copyTo)/b/out/o/pub\W.*step-1\W.*{name}")
    with start(printed, "--config", file, "--once") as watcher:
        wait_until(lambda: fault.hits > 0, printed.read_text, PATIENCE)
        watcher.send_signal(number)
        assert watcher.wait(PATIENCE) == (130 if number == signal.SIGINT else 1)
    assert "stopped; but gs://out/pub/step-1 is published" in printed.read_text()
    assert "pub/step-1/run.json" in gcs.objects["out"]


@pytest.mark.parametrize("what", pairs.some(["an empty folder", "notes", "a link"], 2))
def test_what_lies_where_a_step_is_to_be_published(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, what: str
) -> None:
    """It stays, and the step is published beside it: nothing was, and it was called published."""
    run, output = tmp_path / "run", tmp_path / "out"
    write(run, 2, model=model)
    output.mkdir()
    if what == "a link":
        (tmp_path / "elsewhere").mkdir()
        (output / "step-2").symlink_to(tmp_path / "elsewhere")
    else:
        (output / "step-2").mkdir()
    if what == "notes":
        (output / "step-2" / "notes.txt").write_text("mine")
    assert watch(run, model[0], output) == 0
    (published,) = output.glob("step-2-*")
    assert json.loads((output / "hf.json").read_bytes())["checkpoint"] == str(published)
    assert (published / "model.safetensors").exists()
    assert [path.name for path in (output / "step-2").iterdir()] == (["notes.txt"] if what == "notes" else [])


def test_what_lies_there_by_the_time_that_a_step_is_published(
    model: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is named, and the step isn't called published."""
    run, output = tmp_path / "run", tmp_path / "out"
    write(run, 2, model=model)
    publish = places.FolderPlace.publish

    def late(self: places.FolderPlace, release: Any, url: str, *how: Any) -> dict[str, Any]:
        Path(url).mkdir(exist_ok=True)
        return publish(self, release, url, *how)

    with monkeypatch.context() as patched:
        patched.setattr(places.FolderPlace, "publish", late)
        assert watch(run, model[0], output) == 1
    assert "step-2 came there meanwhile, and isn't this step as it is made here; try again" in capsys.readouterr().err
    (output / "step-2").rmdir()
    assert watch(run, model[0], output, "--once", "--retry", "run") == 0
    assert watch(run, model[0], output) == 0
    assert (output / "step-2" / "model.safetensors").exists()


def test_objects_that_lie_where_a_step_is_to_be_published(
    model: tuple[Path, dict[str, Any]], gcs: FakeGcs, tmp_path: Path
) -> None:
    """Another model's tokenizer would be read with it."""
    write(tmp_path / "run", 1, model=model)
    gcs.put("out", "steps/step-1/tokenizer.json", b"{}")
    assert watch(tmp_path / "run", model[0], "gs://out/steps") == 0
    names = list(gcs.objects["out"])
    assert [name for name in names if name.startswith("steps/step-1/")] == ["steps/step-1/tokenizer.json"]
    assert [name for name in names if name.startswith("steps/step-1-") and name.endswith("/run.json")]


@pytest.mark.parametrize("where", pairs.some(["hub", "folder", "bucket"], 2))
def test_keep_removes_nothing_of_others(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, gcs: FakeGcs, hub: FakeHub,
    capsys: pytest.CaptureFixture[str], where: str,
) -> None:  # fmt: skip
    """A file that somebody put into a published step, and what somebody put in the place of one: both stay, and are
    named.
    """
    output = {"folder": tmp_path / "pub", "bucket": "gs://out/pub", "hub": f"hf://{REPO}"}[where]
    publish = publishing(model, tmp_path, output)

    def put(name: str) -> None:
        if where == "folder":
            (tmp_path / "pub" / name).write_text("mine")
        elif where == "bucket":
            gcs.put("out", f"pub/{name}", b"mine")
        else:
            (tmp_path / "mine.txt").write_text("mine")
            branch, _, file = name.partition("/")
            hub.commit(REPO, tmp_path, [file], branch=branch)

    assert publish(1) == 0
    put("step-1/mine.txt")
    capsys.readouterr()
    assert publish(2) == 0
    assert "holds what isn't of the step: mine.txt; move that away" in capsys.readouterr().err
    if where == "folder":
        shutil.rmtree(tmp_path / "pub" / "step-2")
        (tmp_path / "pub" / "step-2").mkdir()
        put("step-2/mine.txt")
        assert publish(3) == 0
        assert [path.name for path in (tmp_path / "pub" / "step-2").iterdir()] == ["mine.txt"]
        (tmp_path / "pub" / "step-1" / "mine.txt").unlink()
        assert publish(4) == 0
        assert sorted(path.name for path in (tmp_path / "pub").iterdir()) == [".weightbeam", "step-2", "step-4"]


@pytest.mark.parametrize("where", pairs.some(["hub", "folder"], 2))
def test_two_runs_that_begin_at_one_place_before_their_first_steps(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, hub: FakeHub, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    """Neither was refused when it began; the second to publish is, and takes nothing of the first away."""
    place = str(tmp_path / "pub") if where == "folder" else f"hf://{REPO}"
    for name in "ab":
        (tmp_path / name).mkdir()
        about = dict(
            checkpoints=str(tmp_path / name / "run"), like=str(model[0]), targets=[dict(name="t", output=place)]
        )
        settings = dict(output=str(tmp_path / f"out_{name}"), runs=[about], verify=0)
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(settings))
        assert call("watch", "--config", tmp_path / f"{name}.yaml", "--once") == 0
    with pytest.MonkeyPatch.context() as patched:  # both are at work since
        patched.setattr(preflight, "_find_place_problems", lambda *_: [])
        for name, step, status in (("a", 1, 0), ("b", 1, 1), ("b", 2, 1), ("a", 3, 0)):
            write(tmp_path / name / "run", step, model=model)
            assert call("watch", "--config", tmp_path / f"{name}.yaml", "--once") == status
    assert "two runs can't be published into one place" in capsys.readouterr().err
    if where == "folder":
        names = sorted(path.name for path in Path(place).iterdir())
        assert names == [".weightbeam", "step-1", "step-3"]
    else:
        repository = hub.repositories[REPO]
        assert sorted(repository.branches) == ["main", "step-1", "step-3"]
        said = [json.loads(bytes(branch.files["run.json"].data))["run"] for branch in repository.branches.values()]
        assert len(set(said)) == 1


def test_two_runs_of_one_name_in_two_files(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their records would be one run's, by which `keep` removes: the second to begin is refused, also if both are at
    work by then.
    """
    capsys.readouterr()
    for name in "ab":
        (tmp_path / name).mkdir()
        about = dict(
            checkpoints=str(tmp_path / name / "tuned" / "checkpoints"), like=str(model[0]), keep=dict(last=1),
            targets=[dict(name="t", output=str(tmp_path / f"pub_{name}"))],
        )  # fmt: skip
        settings = dict(output=str(tmp_path / "out"), runs=[about], verify=0)
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(settings))
        assert call("watch", "--config", tmp_path / f"{name}.yaml", "--once") == 0  # waits for its first step

    def look(name: str, step: int) -> int:
        write(tmp_path / name / "tuned" / "checkpoints", step, model=model)
        return call("watch", "--config", tmp_path / f"{name}.yaml", "--once")

    assert look("a", 1) == 0
    before = (tmp_path / "out" / "tuned" / "t.json").read_bytes()
    assert look("b", 2) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"run tuned: {tmp_path}/out/.weightbeam/runs/tuned holds the records of another run of this name" in told
    assert f"{tmp_path}/a/tuned/checkpoints; give one of them another name, or an output of its own" in told
    owner = tmp_path / "out" / ".weightbeam" / "runs" / "tuned" / "run.json"
    owner.unlink()  # as of a version that didn't say whose they are: where the steps were does
    assert call("watch", "--config", tmp_path / "b.yaml", "--once") == 2
    with pytest.MonkeyPatch.context() as patched:  # both are at work since
        patched.setattr(preflight, "_find_problems", lambda *_: [])
        assert call("watch", "--config", tmp_path / "b.yaml", "--once") == 1
    assert call("watch", "--config", tmp_path / "b.yaml", "--retry", "tuned") == 1
    assert capsys.readouterr().err.count("records of another run of this name") == 3
    assert (tmp_path / "out" / "tuned" / "t.json").read_bytes() == before
    assert [step.name for step in (tmp_path / "pub_a").glob("step-*")] == ["step-1"]
    assert not [*(tmp_path / "pub_b").glob("step-*")]
    assert look("a", 3) == 0  # whose watcher goes on
    assert json.loads(owner.read_text())["run"] == str(tmp_path / "a" / "tuned" / "checkpoints")
    owner.write_text("mine")
    assert look("a", 4) == 1
    assert f"{owner}: " in capsys.readouterr().err
    owner.unlink()
    assert call("watch", "--config", tmp_path / "a.yaml", "--once") == 0


def test_a_retry_asks_only_the_run_that_it_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the records of another one are."""
    runs = [dict(checkpoints=str(tmp_path / name), name=name, targets=[dict(name="t")]) for name in ("good", "bad")]
    (tmp_path / "w.yaml").write_text(yaml.safe_dump(dict(output=str(tmp_path / "out"), runs=runs)))
    owner = tmp_path / "out" / ".weightbeam" / "runs" / "bad" / "run.json"
    owner.parent.mkdir(parents=True)
    owner.write_text('{"run": "/another/run"}')
    assert call("watch", "--config", tmp_path / "w.yaml", "--retry", "good") == 0
    assert call("watch", "--config", tmp_path / "w.yaml", "--retry", "bad") == 1
    assert "holds the records of another run of this name, /another/run" in " ".join(capsys.readouterr().err.split())


def test_a_retry_of_the_second_of_two_runs(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is this run's feed that begins its step anew, once, and the other's that has nothing to do with it; a target that
    isn't there any more has nothing to begin.
    """
    out, file = tmp_path / "out", tmp_path / "w.yaml"

    def of(target: str) -> None:
        runs = [
            dict(checkpoints=str(tmp_path / name), name=name, like=str(model[0]), targets=[dict(name=kind)])
            for name, kind in (("other", "hf"), ("run", target))
        ]
        file.write_text(yaml.safe_dump(dict(output=str(out), runs=runs, attempts=1)))

    of("bf16")
    write(tmp_path / "run", 1, model=model)
    with damaged(tmp_path / "run" / "1"):
        assert call("watch", "--config", file, "--once") == 1
    of("other")
    assert call("watch", "--config", file, "--retry", "run") == 0
    assert "Nothing of run is refused, held or failed." in capsys.readouterr().out
    of("bf16")
    assert call("watch", "--config", file, "--retry", "run") == 0
    assert capsys.readouterr().out.count("asked for again") == 1
    assert not (out / RUNS / "other" / "marks").exists()
    assert call("watch", "--config", file, "--once") == 0
    assert states(out) == {"step-1": ["discovered", "planned", "converting", "failed", "discovered", *WHOLE[1:]]}


def test_a_pull_request_isnt_a_branch_of_somebodys(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `create_pr` the record says where it is, and `keep` deletes no branch that is called as a step."""
    run, file, theirs = tmp_path / "run", tmp_path / "watch.yaml", tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "precious.txt").write_text("mine")
    hub.add(REPO, theirs).writers.add(TOKEN)
    hub.commit(REPO, theirs, branch="step-1")
    target = dict(name="t", output=f"hf://{REPO}", create_pr=True)
    about = dict(checkpoints=str(run), like=str(model[0]), keep=dict(last=1), targets=[target])
    file.write_text(yaml.safe_dump(dict(output=str(tmp_path / "out"), runs=[about], verify=0)))
    for step in (1, 2):
        write(run, step, model=model)
        assert call("watch", "--config", file, "--once") == 0
    assert set(hub.repositories[REPO].branches) == {"main", "step-1"}
    assert len(hub.repositories[REPO].pulls) == 2
    ends = [history[-1] for history in records(tmp_path / "out")]
    assert [end["state"] for end in ends] == ["published", "published"]
    assert all("step-" not in end["checkpoint"] for end in ends)
    for end in ends:
        assert json.loads(open_store(end["checkpoint"]).read("run.json"))["step"] in (1, 2)


def test_what_others_commit_to_main_stays(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    """A licence, a tokenizer's config, an edited config: the step has its branch, `main` stays, and what is in the way
    is named.
    """
    publish = publishing(model, tmp_path, f"hf://{REPO}")
    assert publish(1) == 0
    main = hub.repositories[REPO].head
    mine = tmp_path / "mine"
    mine.mkdir()
    config = json.loads(bytes(main.files["config.json"].data)) | {"rope_theta": 5.0}
    (mine / "config.json").write_text(json.dumps(config))
    (mine / "LICENSE").write_text("mine")
    (mine / "notes.txt").write_text("mine")
    hub.commit(REPO, mine)
    before = hub.repositories[REPO].head.sha
    capsys.readouterr()
    assert publish(2) == 0
    printed = capsys.readouterr()
    assert "isn't made the newest" in printed.out + printed.err
    assert "LICENSE, config.json" in printed.out + printed.err
    assert hub.repositories[REPO].head.sha == before
    assert json.loads(bytes(hub.repositories[REPO].branches["step-2"].files["run.json"].data))["step"] == 2
    hub.commit(REPO, tmp_path, [], remove=["LICENSE"])
    (mine / "config.json").write_bytes(bytes(main.files["config.json"].data))
    hub.commit(REPO, mine, ["config.json"])
    assert publish(3) == 0
    head = hub.repositories[REPO].head
    assert json.loads(bytes(head.files["run.json"].data))["step"] == 3
    assert "notes.txt" in head.files


def test_keep_after_the_output_was_changed(model: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """What has the name of an earlier step in the new output isn't that step, which stays where it is: it is removed once
    the output is that one again.
    """
    assert publishing(model, tmp_path, tmp_path / "pub")(1) == 0
    (tmp_path / "pub2" / "step-1").mkdir(parents=True)
    (tmp_path / "pub2" / "step-1" / "precious.txt").write_text("mine")
    publish = publishing(model, tmp_path, tmp_path / "pub2")
    assert publish(2) == 0
    assert (tmp_path / "pub2" / "step-1" / "precious.txt").exists()
    assert (tmp_path / "pub" / "step-1" / "model.safetensors").exists()
    shutil.rmtree(tmp_path / "pub2" / "step-1")
    assert publish(3) == 0
    (first,) = (
        history for history in records(tmp_path / "out") if history[-1].get("checkpoint") == f"{tmp_path}/pub/step-1"
    )
    assert first[-1]["state"] == "published"
    assert (tmp_path / "pub" / "step-1" / "model.safetensors").exists()
    assert publishing(model, tmp_path, tmp_path / "pub")(4) == 0
    assert not (tmp_path / "pub" / "step-1").exists()
    assert (tmp_path / "pub2" / "step-3").exists()


def test_other_tables_publish_no_step_again(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer Weightbeam with the same plan leaves what is published; with other options a step is there twice, and one of
    those that `keep` keeps.
    """
    publish, file, pub = publishing(model, tmp_path, tmp_path / "pub"), tmp_path / "watch.yaml", tmp_path / "pub"
    said = yaml.safe_load(file.read_text())
    said["runs"][0]["keep"] = {"last": 2}
    file.write_text(yaml.safe_dump(said))

    def steps() -> list[str]:
        return sorted(path.name for path in pub.iterdir() if path.name.startswith("step-"))

    assert (publish(1), publish(2)) == (0, 0)
    shutil.rmtree(tmp_path / "run" / "1")
    for module in (watching_records, run_feed):
        monkeypatch.setattr(module, "tables", lambda: "of a newer version")
    for _ in range(2):
        assert call("watch", "--config", file, "--once") == 0
        assert steps() == ["step-1", "step-2"]
    ended = sorted(history[-1]["state"] for history in records(tmp_path / "out"))
    assert ended == ["published", "published", "same"]
    assert (publish(3), publish(4)) == (0, 0)
    assert steps() == ["step-3", "step-4"]
    for module in (watching_records, run_feed):
        monkeypatch.setattr(module, "tables", lambda: "of the newest version")
    assert call("watch", "--config", file, "--once") == 0
    assert steps() == ["step-3", "step-4"]  # step 2, which `keep` removed, is still in the run
    shutil.rmtree(tmp_path / "run" / "2")
    said["runs"][0]["targets"][0]["max_shard_size"] = "1M"
    file.write_text(yaml.safe_dump(said))
    assert call("watch", "--config", file, "--once") == 0
    assert [name[:6] for name in steps()] == ["step-3", "step-3", "step-4", "step-4"]
    assert publish(5) == 0
    assert [name[:6] for name in steps()] == ["step-4", "step-4", "step-5"]


def test_a_step_that_is_put_back_again_and_again(model: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """The same files with another commit time, as a copy from a backup has them: each is published beside the others."""
    like, output, run = model[0], tmp_path / "out", tmp_path / "run"
    write(run, 5, model=model)
    metadata = run / "5" / "_CHECKPOINT_METADATA"
    for number in range(3):
        said = json.loads(metadata.read_bytes())
        metadata.write_text(json.dumps(said | {"commit_timestamp_nsecs": said["commit_timestamp_nsecs"] + 10**9}))
        assert watch(run, like, output) == 0
        assert len(list(output.glob("step-5*"))) == number + 1


def test_keep_removes_nothing_that_is_pointed_at(model: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """A run goes back to a step 2 that is older, and then to the one that was published first, for which the pointer isn't
    moved: it named what `keep` had removed.
    """
    publishing(model, tmp_path, tmp_path / "out")
    run, aside = tmp_path / "run", tmp_path / "aside"
    for name, seed in {"1": 0, "older": 0, "later": 1}.items():
        step = 1 if name == "1" else 2
        write(run, step, model=model, seed=seed)
        aside.mkdir(exist_ok=True)
        (run / str(step)).rename(aside / name)

    def watch_with(*steps: str) -> Path:
        for name in steps:
            (aside / name).rename(run / ("1" if name == "1" else "2"))
        assert call("watch", "--config", tmp_path / "watch.yaml", "--once") == 0
        return Path(json.loads((tmp_path / "out" / "run" / "t.json").read_text())["checkpoint"])

    first = watch_with("later")
    (run / "2").rename(aside / "later")
    second = watch_with("older")
    assert second.name.startswith("step-2-")
    (run / "2").rename(aside / "older")
    pointed = watch_with("later", "1")
    assert pointed == second
    assert [(place / "model.safetensors").exists() for place in (first, second)] == [True, True]
    write(run, 3, model=model)
    assert watch_with() == tmp_path / "out" / "step-3"
    assert not first.exists()
    assert not second.exists()


def test_keep_removes_checkpoints(model: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """A step that is resharded lies in a folder of its number: what is ours there was taken for somebody's."""
    run, file, output = tmp_path / "run", tmp_path / "watch.yaml", tmp_path / "out" / "run" / "t"
    about = dict(checkpoints=str(run), keep=dict(last=1), targets=[dict(name="t", kind="reshard")])
    file.write_text(yaml.safe_dump(dict(output=str(tmp_path / "out"), runs=[about], verify=0)))
    for step in (1, 2):
        write(run, step, model=model)
        assert call("watch", "--config", file, "--once") == 0
    assert [path.name for path in output.glob("step-*")] == ["step-2"]
    (output / "step-2" / "2" / "notes.txt").write_text("mine")
    write(run, 3, model=model)
    assert call("watch", "--config", file, "--once") == 0
    assert (output / "step-2" / "2" / "notes.txt").exists()


class Interrupt:
    """Has something be `done` after so many tasks of the first attempt at a step, which then fails if it `fails`."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, tasks: int, done: Callable[[], Any] = lambda: None, fails: bool = True
    ):
        self.left, self.done, self.fails, self.tasks = tasks, done, fails, RunFeed.tasks
        monkeypatch.setattr(RunFeed, "tasks", lambda *given: self._interrupted(*given))

    def _interrupted(self, *given: Any) -> Iterator[Any]:
        for task in self.tasks(*given):
            if self.left == 0:
                self.done()
                if self.fails:
                    self.left = -1
                    raise Failed("interrupted")
            self.left -= 1
            yield task


@pytest.mark.parametrize("change", pairs.some(["like", "nothing", "a file that is being written"], 2))
def test_a_whole_release_of_another_attempt(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """It is gone on with, or made anew where its source isn't the same any more; nothing of a killed one is published."""
    shutil.copytree(model[0], like := tmp_path / "like")
    work = tmp_path / "out" / ".weightbeam" / "work"

    def happens() -> None:
        (release,) = work.glob("*/release")
        if change == "like":
            (like / "tokenizer.json").write_text('{"another": 1}')
            (release / "changes.json").write_text("{}")
        elif change != "nothing":
            (release / f".changes.json.{'7' * 16}.weightbeam-tmp").write_text("{")

    Interrupt(monkeypatch, 1, happens)
    write(tmp_path / "run", 1, model=model)
    assert watch(tmp_path / "run", like, tmp_path / "out") == 1
    assert watch(tmp_path / "run", like, tmp_path / "out", "--once", "--retry", "run") == 0
    assert watch(tmp_path / "run", like, tmp_path / "out") == 0
    step = tmp_path / "out" / "step-1"
    assert not [path for path in step.iterdir() if path.name.startswith(".")]
    assert (step / "changes.json").stat().st_size > 100
    if change == "like":
        assert json.loads((step / "tokenizer.json").read_text()) == {"another": 1}


def test_a_form_on_the_hub_that_moves_once_a_step_is_planned(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: FakeHub
) -> None:
    """The step is made like what was planned, and says so."""
    shutil.copytree(model[0], other := tmp_path / "other")
    (other / "tokenizer.json").write_text('{"another": 1}')
    hub.add("me/base", model[0])
    planned = hub.repositories["me/base"].head.sha
    Interrupt(monkeypatch, 0, lambda: hub.commit("me/base", other), fails=False)
    write(tmp_path / "run", 1, model=model)
    assert watch(tmp_path / "run", "hf://me/base", tmp_path / "out") == 0
    step = tmp_path / "out" / "step-1"
    likes = [json.loads((step / name).read_text())["like"] for name in ("run.json", "weightbeam.json")]
    assert likes == [f"hf://me/base@{planned}"] * 2
    assert (step / "tokenizer.json").exists() == (model[0] / "tokenizer.json").exists()


def test_a_run_whose_records_lie_in_a_bucket(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gcs: FakeGcs, hub: FakeHub
) -> None:
    """An attempt that goes on by the records says whose the steps are as the first one would have."""
    publish = publishing(model, tmp_path, f"hf://{REPO}")
    file = tmp_path / "watch.yaml"
    file.write_text(file.read_text().replace(str(tmp_path / "out"), "gs://out/records"))
    Interrupt(monkeypatch, 0)
    assert publish(1) == 1
    assert call("watch", "--config", file, "--once", "--retry", "run") == 0
    assert call("watch", "--config", file, "--once") == 0
    assert publish(2) == 0
    branches = hub.repositories[REPO].branches
    said = {json.loads(bytes(branches[name].files["run.json"].data))["run"] for name in ("main", "step-2")}
    assert len(said) == 1
    assert said.pop().startswith("run@")


def test_an_error_while_the_work_of_a_published_step_is_removed(
    model: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gcs: FakeGcs,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The step is published, and what stays is said; it has no report any more, and isn't taken for a whole release."""
    write(tmp_path / "run", 1, model=model)
    delete_all = Bucket.delete_all

    def failing(self: Bucket, files: Any) -> None:
        listed = list(files)
        is_report = [file.name for file in listed] == ["release/run.json"]
        if "pub/step-1/run.json" in gcs.objects["out"] and "/work/" in self.url and not is_report:
            delete_all(self, [file for file in listed if file.name.endswith("/config.json")])
            raise StorageError("away")
        delete_all(self, listed)

    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "delete_all", failing)
        assert watch(tmp_path / "run", model[0], "gs://out/pub") == 0
    assert "can't be removed: away" in capsys.readouterr().err
    assert states("gs://out/pub") == {"step-1": WHOLE}
    assert not [name for name in gcs.objects["out"] if "/work/" in name and name.endswith("/run.json")]
    assert watch(tmp_path / "run", model[0], "gs://out/pub") == 0


@pytest.mark.parametrize("tasks", [0, 1])
def test_a_form_that_is_replaced_once_a_step_is_planned(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: int
) -> None:
    """Before the export: nothing of it is published, and the next attempt plans anew. Afterwards: what was exported is
    compared with nothing else than what it is like.
    """
    shutil.copytree(model[0], like := tmp_path / "like")
    doubled = {name: values * 2 for name, values in read_tensors(model[0]).items()}
    other = save(tmp_path / "other", read_config(model[0]), doubled)

    def replace() -> None:
        like.rename(tmp_path / "aside")
        other.rename(like)

    Interrupt(monkeypatch, tasks, replace, fails=False)
    write(tmp_path / "run", 1, model=model)
    step = tmp_path / "out" / "step-1"
    assert watch(tmp_path / "run", like, tmp_path / "out") == 1 - tasks
    assert step.exists() == bool(tasks)
    if not tasks:
        assert watch(tmp_path / "run", like, tmp_path / "out", "--once", "--retry", "run") == 0
        assert watch(tmp_path / "run", like, tmp_path / "out") == 0
    found = json.loads((step / "changes.json").read_text())
    assert bool(found["notes"]) == bool(tasks)
    assert ("like" in found) == (not tasks)


def test_a_stop_while_a_step_is_removed(
    model: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gcs: FakeGcs,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The next watcher goes on with it, though no step is new: what is left of a step in a bucket, which has no report any
    more, is the step's.
    """
    publish = publishing(model, tmp_path, "gs://out/pub")
    assert publish(1) == 0
    delete_all = Bucket.delete_all

    deleted: list[str] = []

    def failing(self: Bucket, files: Any) -> None:
        listed = list(files)
        if self.url.endswith("pub/step-1"):
            deleted.extend(file.name for file in listed)
            delete_all(self, listed[:2])
            if len(listed) > 2:
                raise StorageError("away")
        else:
            delete_all(self, listed)

    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "delete_all", failing)
        assert publish(2) == 0
    assert "pub/step-1 can't be removed: away" in capsys.readouterr().err
    assert deleted[:2] == ["run.json", "config.json"]  # what readers look for, before the weights
    assert not {"pub/step-1/run.json", "pub/step-1/config.json"} & gcs.objects["out"].keys()
    assert call("watch", "--config", tmp_path / "watch.yaml", "--once") == 0
    left = {name.split("/")[1] for name in gcs.objects["out"] if name.startswith("pub/")}
    assert left == {"step-2", ".weightbeam"}
    assert not [name for name in gcs.objects["out"] if "removed-" in name]


def test_what_was_begun_for_a_target_that_makes_something_else_now(
    model: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is given up, and what it had staged is removed: nobody would ever go on with it."""
    publish, file, made = publishing(model, tmp_path, tmp_path / "pub"), tmp_path / "watch.yaml", tmp_path / "pub"

    def fail(*_: object) -> Any:
        raise Failed("away")

    with monkeypatch.context() as patched:
        patched.setattr(RunFeed, "publish", fail)
        assert publish(1) == 1
    staged = list((made / WORK).rglob("model*.safetensors"))
    assert staged
    watching = yaml.safe_load(file.read_text())
    watching["runs"][0]["targets"][0]["save_dtype"] = "float32"
    file.write_text(yaml.safe_dump(watching))
    capsys.readouterr()
    assert call("watch", "--config", file, "--once") == 0
    assert "its target makes something else now" in capsys.readouterr().out
    assert not list((made / WORK).rglob("*.safetensors"))
    assert {value.dtype for value in read_tensors(made / "step-1").values()} == {F32}
    assert sorted(history[-1]["state"] for history in records(tmp_path / "out")) == ["gone", "published"]
    assert not list((tmp_path / "out" / RUNS / "run" / "marks").glob("open~*"))


def test_what_readers_look_for_is_written_last() -> None:
    """And deleted first: what tells of a checkpoint, a release or an adapter is there with all of it, or not at all."""
    names = [
        "adapter_config.json",
        "adapter_model.safetensors",
        "run.json",
        "0/items/commit_success.txt",
        "config.json",
    ]
    files = [File(name, 1, "1") for name in names]
    first, late = places._apart(files)
    assert [file.name for file in first] == ["adapter_model.safetensors"]
    assert [file.name for file in late] == [
        "0/items/commit_success.txt",
        "config.json",
        "adapter_config.json",
        "run.json",
    ]


def test_keep_removes_a_copy(model: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """A step is the step wherever it was copied, whatever times its files have then; others' weights are not, though they
    were written before.
    """
    publish = publishing(model, tmp_path, tmp_path / "pub")
    assert publish(1) == 0
    shutil.copytree(tmp_path / "pub", tmp_path / "copy", copy_function=shutil.copyfile)
    shutil.rmtree(tmp_path / "pub")
    os.rename(tmp_path / "copy", tmp_path / "pub")
    assert publish(2) == 0
    assert not (tmp_path / "pub" / "step-1").exists()
    weights = tmp_path / "pub" / "step-2" / "model.safetensors"
    tensors = {name: values + values.dtype.type(1) for name, values in read_file(weights).items()}
    save_file(tensors, mine := tmp_path / "mine.safetensors", metadata={"format": "pt"})
    os.utime(mine, (1.7e9, 1.7e9))
    os.rename(mine, weights)
    assert publish(3) == 0
    assert weights.exists()


@pytest.mark.parametrize("where", pairs.some(["bucket", "folder"], 2))
def test_keep_removes_nothing_that_others_changed(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, gcs: FakeGcs, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    """A small file that isn't as the step's record says, a card, weights beside those of the step, and in their place."""
    output = tmp_path / "pub" if where == "folder" else "gs://out/pub"
    publish = publishing(model, tmp_path, output)
    assert publish(1) == 0
    step = open_store(output) / "step-1"
    before = {name: step.read(name) for name in ("README.md", "config.json")}
    step.write("README.md", b"mine")
    step.write("config.json", before["config.json"] + b"\n")
    step.write("ema.safetensors", step.read("model.safetensors"))
    capsys.readouterr()
    assert publish(2) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert all(name in said.partition("isn't of the step:")[2] for name in ("README.md", "config.json", "ema"))
    step.delete("ema.safetensors")
    for name, data in before.items():
        step.write(name, data)
    assert publish(3) == 0
    assert not step.names()
    step = open_store(output) / "step-3"
    step.write("model.safetensors", step.read("model.safetensors")[:-8] + bytes(8))
    step.write("changes.json", b"{}")
    assert publish(4) == 0
    said = " ".join(capsys.readouterr().err.split()).partition("isn't of the step:")[2]
    assert all(name in said for name in ("model.safetensors", "changes.json"))
    assert step.exists("model.safetensors")


@pytest.mark.parametrize("where", pairs.some(["bucket", "folder"], 2))
def test_a_step_that_comes_while_an_older_one_of_its_name_is_removed(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gcs: FakeGcs, where: str
) -> None:
    """By a watcher that slept between its look and the removal."""
    output = tmp_path / "pub" if where == "folder" else "gs://out/pub"
    publish = publishing(model, tmp_path, output)
    assert publish(1) == 0
    step, holds, slept = open_store(output) / "step-1", Place._holds, []
    new = {name: step.read(name) for name in step.names()} | {"run.json": b'{"key": "another"}'}

    def sleep(self: Place, url: str, key: str, title: str) -> bool:
        found = holds(self, url, key, title)
        if url.endswith("pub/step-1") and found and not slept:
            slept.append(url)
            step.delete_folder()
            step.make()
            for name, data in new.items():
                step.write(name, data)
        return found

    monkeypatch.setattr(Place, "_holds", sleep)
    assert publish(2) == 0
    assert slept
    assert {name: step.read(name) for name in step.names()} == new
    assert not [name for name in (open_store(output) / WORK).names() if name.startswith(("removed-", "gone-"))]


@pytest.mark.parametrize("where", pairs.some(["folder", "bucket"], 2))
def test_a_pointer_that_another_watcher_moves_meanwhile(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gcs: FakeGcs, where: str
) -> None:
    """To a newer step, while this one sleeps between its look and the write: it stays there."""
    output = str(tmp_path / "out") if where == "folder" else "gs://out/steps"
    write(tmp_path / "run", 1, model=model)
    assert watch(tmp_path / "run", model[0], output) == 0
    (pointer,) = [file.name for file in open_store(output).list(recursive=False) if file.name.endswith(".json")]
    is_newest = RunFeed._is_newest_by_now

    def sleep(self: RunFeed, history: History) -> bool:
        found = is_newest(self, history) and open_store(output).read(pointer) != b"newer"
        if found:
            open_store(output).write(pointer, b"newer")
        return found

    monkeypatch.setattr(RunFeed, "_is_newest_by_now", sleep)
    write(tmp_path / "run", 2, model=model)
    assert watch(tmp_path / "run", model[0], output) == 0
    assert open_store(output).read(pointer) == b"newer"


@pytest.mark.parametrize(("kind", "back"), pairs.each(["export", "reshard"], [False, True]))
def test_a_step_that_is_another_one_while_it_is_made(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, back: bool
) -> None:
    """Than when it was planned: nothing of it is published under the old one's name."""
    run, other, file = tmp_path / "run", tmp_path / "other", tmp_path / "watch.yaml"
    write(run, 1, model=model)
    write(other, 1, model=model, seed=1)
    like = dict(like=str(model[0])) if kind == "export" else {}
    about = dict(checkpoints=str(run), targets=[dict(name="t", kind=kind)], **like)
    file.write_text(yaml.safe_dump(dict(output=str(tmp_path / "out"), runs=[about], verify=0)))
    run_together = Workers.run_together

    def exchange() -> None:
        for old, new in ((run / "1", tmp_path / "aside"), (other / "1", run / "1"), (tmp_path / "aside", other / "1")):
            old.rename(new)

    def exchanging(*given: Any) -> Any:
        monkeypatch.setattr(Workers, "run_together", run_together)
        exchange()
        outcomes = run_together(*given)
        if back:
            exchange()
        return outcomes

    monkeypatch.setattr(Workers, "run_together", exchanging)
    status = call("watch", "--config", file, "--once")
    ends = sorted(history[-1]["state"] for history in records(tmp_path / "out"))
    if back:
        assert (status, ends) == (1, ["failed"])
        (history,) = records(tmp_path / "out")
        assert "isn't what the step was planned with any more" in history[-1]["reason"]
        assert call("watch", "--config", file, "--once", "--retry", "run") == 0
    assert call("watch", "--config", file, "--once") == 0
    ends = sorted(history[-1]["state"] for history in records(tmp_path / "out"))
    assert ends == (["published"] if back else ["gone", "published"])
    for history in records(tmp_path / "out"):
        if history[-1]["state"] == "published":
            assert json.loads((Path(history[-1]["checkpoint"]) / "run.json").read_text())["key"] == history[0]["key"]


def test_what_another_puts_in_the_place_of_a_step_in_a_bucket(
    model: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gcs: FakeGcs,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """While that is made: files of the very names of a release stay, and are named."""
    names = ["README.md", "config.json", "model.safetensors"]

    def put() -> None:
        for name in names:
            gcs.put("out", f"pub/step-1/{name}", b"mine")

    Interrupt(monkeypatch, 1, put, fails=False)
    write(tmp_path / "run", 1, model=model)
    assert watch(tmp_path / "run", model[0], "gs://out/pub") == 1
    assert f"isn't of this step: {', '.join(names)}; move it away" in " ".join(capsys.readouterr().out.split())
    there = {name: bytes(each.data) for name, each in gcs.objects["out"].items() if name.startswith("pub/step-1/")}
    assert there == dict.fromkeys((f"pub/step-1/{name}" for name in names), b"mine")


def test_a_card_on_the_hub_that_was_edited_above_its_last_line(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, hub: FakeHub
) -> None:
    """It stays, and holds up no step; one that nobody has edited is written anew, also of a step that was written anew."""
    publish = publishing(model, tmp_path, f"hf://{REPO}")
    cards = set()
    for step, seed in ((1, 0), (2, 0), (2, 1)):
        shutil.rmtree(tmp_path / "run" / "2", ignore_errors=True)
        write(tmp_path / "run", step, model=model, seed=seed)
        assert call("watch", "--config", tmp_path / "watch.yaml", "--once") == 0
        cards.add(bytes(hub.repositories[REPO].head.files["README.md"].data))
    assert len(cards) == 3
    edited = bytes(hub.repositories[REPO].head.files["README.md"].data).replace(b"\n# ", b"\nMine.\n\n# ")
    (tmp_path / "card").mkdir()
    (tmp_path / "card" / "README.md").write_bytes(edited)
    hub.commit(REPO, tmp_path / "card")
    for step in (3, 4):
        assert publish(step) == 0
        assert hub.repositories[REPO].head.title.startswith(f"Step {step} of run (")
        assert bytes(hub.repositories[REPO].head.files["README.md"].data) == edited


def test_a_retry_beside_a_watcher(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one at work is making isn't taken away from it; and without what was made nothing is called published."""
    shutil.copytree(model[0], like := tmp_path / "like")
    config = (like / "config.json").read_text()
    write(tmp_path / "run", 1, model=model)
    assert watch(tmp_path / "run", like, tmp_path / "out") == 0
    (like / "config.json").write_text(json.dumps(json.loads(config) | {"num_hidden_layers": 3}))
    write(tmp_path / "run", 2, model=model)
    assert watch(tmp_path / "run", like, tmp_path / "out") == 0  # refused
    (like / "config.json").write_text(config)
    assert watch(tmp_path / "run", like, tmp_path / "out", "--once", "--retry", "run") == 0
    found = histories(open_store(str(tmp_path / "out")), "run", RUNS)
    (history,) = (history for history in found if history.first["step"] == 2)
    said: list[str] = []
    work = tmp_path / "out" / ".weightbeam" / "work" / history.key

    withheld = RunFeed.withheld

    def ask(*given: Any) -> str | None:  # right before it is published
        if not said:
            with pytest.raises(HeldError) as held, history.alone():
                pass
            said.append(str(held.value))
            places.drop(LocalFolder(str(work)))
        return withheld(*given)

    monkeypatch.setattr(RunFeed, "withheld", ask)
    assert watch(tmp_path / "run", like, tmp_path / "out") == 1
    assert said
    assert not (tmp_path / "out" / "step-2").exists()
    assert watch(tmp_path / "run", like, tmp_path / "out", "--once", "--retry", "run") == 0
    assert watch(tmp_path / "run", like, tmp_path / "out") == 0
    assert {name: each[-1] for name, each in states(tmp_path / "out").items()} == dict.fromkeys(
        ("step-1", "step-2"), "published"
    )


def test_somebodys_file_that_has_the_name_of_the_pointer(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It stays, and is named; the step is published."""
    assert publishing(model, tmp_path, tmp_path / "pub")(1) == 0
    (pointer,) = (path for path in (tmp_path / "out").rglob("t.json"))
    pointer.write_text('{"mine": 1}')
    capsys.readouterr()
    assert publishing(model, tmp_path, tmp_path / "pub")(2) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"{pointer} isn't Weightbeam's, and isn't replaced" in said
    assert pointer.read_text() == '{"mine": 1}'
    assert (tmp_path / "pub" / "step-2" / "model.safetensors").exists()


@pytest.mark.parametrize("where", ["folder", "bucket"])
def test_one_that_slept_while_it_cleared_what_a_step_is_made_in(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gcs: FakeGcs, where: str
) -> None:
    """Until its lease was taken over: it deletes nothing. And what isn't whole isn't published."""
    output = str(tmp_path / "out") if where == "folder" else "gs://out/pub"
    write(tmp_path / "run", 1, model=model)
    withheld, seen = RunFeed.withheld, []

    def overtaken() -> None:
        raise HeldError("taken over")

    def sleep(feed: RunFeed, history: History, target: Any) -> str | None:
        work = feed._work(history)
        with pytest.raises(HeldError):
            places.drop(work, overtaken)
        assert places.missing_in(work / "release") == []
        (work / "release").delete("model.safetensors")
        seen.append(work)
        return withheld(feed, history, target)

    with monkeypatch.context() as patched:
        patched.setattr(RunFeed, "withheld", sleep)
        assert watch(tmp_path / "run", model[0], output) == 1
    assert seen
    (history,) = records(tmp_path / "out") if where == "folder" else ((),)
    assert not history or "isn't whole (missing: model.safetensors)" in history[-1]["reason"]
    assert not open_store(output).folders() or not (open_store(output) / "step-1").names()
