"""`weightbeam watch` on a hub: each release once, whoever watches and whatever ends them; what isn't converted says
why.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import shutil
import signal
import socket
import socketserver
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tenacity
import warm
import yaml
from lazily import lazily
from pairs import each, some
from processes import wait_until
from servers.clients import at_hub
from servers.gcs import FakeGcs
from servers.hub import FakeHub
from servers.late import LateGcs
from servers.server import Call, Fault, Reply, Server, json_reply
from support import (
    BF16,
    INDEX,
    LLAMA,
    assert_same_bits,
    call,
    digests,
    make_release,
    peft_adapter,
    random_tensors,
    read_tensors,
    reference,
    restore,
    save,
)

from weightbeam.formats.staging import staging_at
from weightbeam.formats.storage import open_store
from weightbeam.pipelines.terminal.errors import Failed
from weightbeam.pipelines.watching import actions, notices
from weightbeam.pipelines.watching import releases as watch_releases
from weightbeam.pipelines.watching.config import TargetConfig, read_config
from weightbeam.pipelines.watching.notices import Notices
from weightbeam.pipelines.watching.records import ROOT, History, LostError, histories, key_of
from weightbeam.pipelines.watching.release_feed import ReleaseFeed
from weightbeam.pipelines.watching.releases import find_release
from weightbeam.pipelines.watching.watch import Findings
from weightbeam.pipelines.watching.watcher import Finding
from weightbeam.transforms.planning.options import ConvertOptions

grpc = lazily("grpc")
pubsub = lazily("google.pubsub_v1")

REPO = "acme/tiny"
pytestmark = pytest.mark.usefixtures("warm_workers")
PATIENCE = 120  # seconds that anything may take


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with at_hub() as server:
        yield server


class Watch:
    """A configuration and its output."""

    def __init__(self, folder: Path, hub: FakeHub, output: str | None = None):
        self.folder, self.hub = folder, hub
        self.output = folder / "out"
        self.file = folder / "watch.yaml"
        self.settings: dict[str, Any] = dict(
            output=output or str(self.output),
            models=["acme/*"],
            quiet_minutes=0,
            verify=0,
            targets=[dict(name="fsdp2", mesh=["fsdp=2"])],
        )
        self.set()

    def set(self, **settings: Any) -> None:
        self.settings |= settings
        self.file.write_text(yaml.safe_dump(self.settings))

    def once(self, *options: str) -> int:
        return call("watch", "--config", self.file, *(options or ["--once"]))

    def start(self, *options: str, spawns: bool = False, **environment: str) -> warm.Process:
        """A watcher in a process of its own."""
        return warm.start("watch", "--config", self.file, *options, env=os.environ | environment, spawns=spawns)

    def records(self, repo: str = REPO) -> list[list[dict[str, Any]]]:
        """Each history of a repository, in the order of their beginnings."""
        store = open_store(str(self.output)) / ROOT / repo
        found: dict[str, list[dict[str, Any]]] = {}
        for file in store.list():
            if (
                file.name.endswith(("/lease", "/lease.lock", "-tmp"))
                or "/same-" in file.name
                or file.name.endswith("/again.json")
            ):
                continue
            found.setdefault(file.name.partition("/")[0], []).append(json.loads(store.read(file.name)))
        return sorted(found.values(), key=lambda records: records[0]["time"])

    def states(self, repo: str = REPO) -> list[list[str]]:
        return [[record["state"] for record in records] for records in self.records(repo)]

    def last(self, repo: str = REPO) -> dict[str, Any]:
        (records,) = self.records(repo)
        return records[-1]

    def published(self, target: str = "fsdp2", repo: str = REPO) -> dict[str, Any]:
        """The report that the pointer holds."""
        return json.loads((self.output / repo / f"{target}.json").read_bytes())


@pytest.fixture
def watch(tmp_path: Path, hub: FakeHub) -> Watch:
    return Watch(tmp_path, hub)


def wanted(seed: int = 0) -> dict[str, np.ndarray]:
    return reference(LLAMA, random_tensors(LLAMA, seed=seed), BF16)


def step_of(report: dict[str, Any]) -> Path:
    return Path(report["checkpoint"]) / "0"


WHOLE = ["discovered", "planned", "converting", "verified", "published"]


# --- once, and only once ----------------------------------------------------------------------------------------------


def test_a_release_is_converted_verified_and_published(
    watch: Watch, hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint has the right bits, the report says where it comes from, each state is a line of JSON; a second
    look does nothing.
    """
    watch.set(verify=1.0, licenses=["MIT"], max_bytes="1MB")
    hub.add(REPO, make_release(tmp_path / "hf", files=2), card={"license": "mit"})
    commit = hub.repositories[REPO].head.sha
    assert watch.once("--dry_run") == 0
    assert "would be converted: 39.2 KB, llama" in capsys.readouterr().out
    assert not watch.output.exists()
    assert watch.once() == 0
    assert watch.states() == [WHOLE]
    told = capsys.readouterr()
    lines = [json.loads(line) for line in told.err.splitlines() if line.startswith("{")]
    assert [line["state"] for line in lines] == WHOLE
    report = watch.published()
    assert lines[-1]["message"].endswith(f": published in {report['checkpoint']}")
    assert told.out.rstrip().endswith(f"published  {report['checkpoint']}")  # the table says it, too
    assert report["commit"] == commit
    assert report["licenses"] == ["mit"]
    assert report["verified"] == {
        "elements": sum(values.size for values in wanted().values()),
        "arrays": 12,
        "rounded": 1,
        "sample": 1.0,
    }
    assert report["checkpoint"].startswith(f"{watch.output}/{REPO}/{commit[:12]}/fsdp2-")
    assert_same_bits(restore(step_of(report)), wanted())
    assert json.loads((step_of(report) / "conversion.json").read_bytes())["source"] == f"hf://{REPO}@{commit}"
    hub.cdn.log.clear()
    hub.log.clear()
    assert watch.once() == 0
    assert watch.states() == [WHOLE]
    assert [entry.kind for entry in hub.traffic] == ["list", "info"]


@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_two_watchers_started_together_convert_once(tmp_path: Path, hub: FakeHub, place: str) -> None:
    hub.add(REPO, make_release(tmp_path / "hf", files=2))
    with FakeGcs("bucket") as gcs, contextlib.ExitStack() as stack:
        watch = Watch(tmp_path, hub, "gs://bucket/models" if place == "bucket" else None)
        environment = gcs.env() if place == "bucket" else {}
        both = [stack.enter_context(watch.start("--once", **environment)) for _ in range(2)]
        said = [process.communicate(timeout=PATIENCE) for process in both]
        assert [process.returncode for process in both] == [0, 0], said
        lines = [json.loads(line) for _, stderr in said for line in stderr.splitlines() if line.startswith("{")]
        assert sorted(line["state"] for line in lines if "state" in line) == sorted(WHOLE)
        if place == "folder":
            assert watch.states() == [WHOLE]
            assert_same_bits(restore(step_of(watch.published())), wanted())
        else:
            names = list(gcs.objects["bucket"])
            assert len(
                [name for name in names if name.startswith(f"models/{ROOT}/") and name.endswith(".json")]
            ) == len(WHOLE)
            assert f"models/{REPO}/fsdp2.json" in names
            assert not [name for name in names if name.endswith("lease")]
    tensors = list((tmp_path / "hf").glob("*.safetensors"))
    once = sum(file.stat().st_size for file in tensors)
    assert hub.cdn.log.sent < 2 * once, "the files were read twice"


def test_racing_watchers_make_each_record_once(tmp_path: Path, hub: FakeHub) -> None:
    """Of eight threads that take a step from one state one succeeds, and the others are told."""
    hub.add(REPO, make_release(tmp_path / "hf", files=2))
    found, target = find_release(REPO, "main"), TargetConfig("any", (), ConvertOptions())
    output = open_store(str(tmp_path / "out"))
    racers = [History(output, REPO, key_of(REPO, found.weights, target)) for _ in range(8)]
    start = threading.Barrier(8)

    def race(history: History) -> bool:
        start.wait()
        try:
            history.begin(found, target)
        except LostError:
            return False
        return True

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(race, racers)) == 1


def test_a_commit_of_the_readme_isnt_converted_again(
    watch: Watch, hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(REPO, make_release(tmp_path / "hf", files=2))
    first = hub.repositories[REPO].head.sha
    assert watch.once() == 0
    (tmp_path / "hf" / "README.md").write_text("better words")
    second = hub.commit(REPO, tmp_path / "hf", ["README.md"])
    hub.cdn.log.clear()
    capsys.readouterr()
    assert watch.once() == 0
    (line,) = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert (line["state"], line["commit"], line["same_weights_as"]) == ("same", second, first)
    assert watch.once() == 0
    assert capsys.readouterr().err == ""
    assert watch.states() == [WHOLE]
    assert not hub.cdn.log


@pytest.mark.parametrize("state", some(["discovered", "converting", "failed", "refused"], 2))
def test_a_release_whose_history_is_squashed(
    watch: Watch, hub: FakeHub, tmp_path: Path, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commit that a history was begun with is gone: another one with the same weights stands for it."""
    hub.add(REPO, make_release(tmp_path / "hf", files=2))
    first = find_release(REPO, "main")
    target = read_config(str(watch.file)).targets[0]
    begun = History(open_store(str(watch.output)), REPO, key_of(REPO, first.weights, target))
    begun.begin(first, target)
    if state != "discovered":
        begun.add(state, "hf://acme/tiny: no such revision", checkpoint=str(watch.output / "x-1"), plan="1", attempt=1)
    repository = hub.repositories[REPO]
    del repository.commits[first.commit]
    second = dataclasses.replace(repository.head, sha="5" * 40, parent=None)
    repository.commits[second.sha] = repository.branches["main"] = second
    assert watch.once() == 0
    assert f"commit {first.commit[:12]} is gone" in capsys.readouterr().err
    (published,) = histories(open_store(str(watch.output)), REPO)
    assert (published.state, published.facts["commit"]) == ("published", second.sha)
    assert watch.once() == 0
    assert capsys.readouterr().err == ""


def test_an_adapter_that_is_written_anew_while_the_watcher_is_away(watch: Watch, hub: FakeHub, tmp_path: Path) -> None:
    """What was begun by another plan isn't published under its name: it is planned anew."""
    hub.add(REPO, make_release(tmp_path / "hf", files=2))
    shape = read_tensors(tmp_path / "hf")["model.layers.0.self_attn.v_proj.weight"].shape
    adapter, _ = peft_adapter(tmp_path / "adapter", {"model.layers.0.self_attn.v_proj": shape})
    watch.set(targets=[dict(name="t", lora=str(adapter))])
    release, target = find_release(REPO, "main"), read_config(str(watch.file)).targets[0]
    begun = History(open_store(str(watch.output)), REPO, key_of(REPO, release.weights, target))
    begun.begin(release, target)
    planned = actions.plan(release.url, target.options)
    feed = ReleaseFeed(read_config(str(watch.file)))
    begun.add("planned", checkpoint=feed.place(begun, planned["plan"]), **planned)
    begun.add("converting", attempt=1)
    shutil.rmtree(adapter)
    peft_adapter(adapter, {"model.layers.0.self_attn.v_proj": shape}, rank=8)
    assert watch.once() == 0
    (states,) = watch.states()
    assert states == ["discovered", "planned", "converting", "planned", "converting", "verified", "published"]
    report = watch.published("t")
    record = json.loads((Path(report["checkpoint"]) / "0" / "conversion.json").read_text())
    assert record["plan"] == report["plan"] != planned["plan"]
    assert Path(report["checkpoint"]).name == f"t-{report['plan'][:8]}"


def test_an_adapter_that_is_written_anew_once_it_is_planned(
    watch: Watch, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it would be made into isn't what the plan's name says: nothing is written there, and it is planned anew."""
    hub.add(REPO, make_release(tmp_path / "hf", files=2))
    shape = read_tensors(tmp_path / "hf")["model.layers.0.self_attn.v_proj.weight"].shape
    adapter, _ = peft_adapter(tmp_path / "adapter", {"model.layers.0.self_attn.v_proj": shape})
    watch.set(targets=[dict(name="t", lora=str(adapter))], retry_minutes=0)
    plans, tasks = list[str](), ReleaseFeed.tasks

    def written_anew(self: ReleaseFeed, history: History, *more: Any) -> Iterator[Any]:
        if not plans:
            shutil.rmtree(adapter)
            peft_adapter(adapter, {"model.layers.0.self_attn.v_proj": shape}, rank=8)
        plans.append(history.facts["plan"])
        return tasks(self, history, *more)

    monkeypatch.setattr(ReleaseFeed, "tasks", written_anew)
    assert watch.once() == 1
    assert "isn't what the conversion was planned with any more" in watch.last()["reason"]
    assert not list(watch.output.rglob("conversion.json"))
    assert watch.once() == 0
    report = watch.published("t")
    record = json.loads((Path(report["checkpoint"]) / "0" / "conversion.json").read_text())
    assert plans[0] != plans[1] == record["plan"] == report["plan"]


def test_a_table_that_was_mended(watch: Watch, hub: FakeHub, tmp_path: Path) -> None:
    """A release is converted again where the file of Python that is its table says something else."""
    hub.add(REPO, make_release(tmp_path / "hf", files=2))
    table, plans = tmp_path / "table.py", []
    watch.set(targets=[dict(name="t", family=str(table))])
    for words in ("as it was", "mended"):
        table.write_text(f"from weightbeam.model_mappings.families.llama import FAMILY\n# {words}\n")
        for _ in range(2):
            assert watch.once() == 0
        plans.append(watch.published("t")["plan"])
    assert len({*plans}) == len(watch.states()) == 2


def test_every_target_of_a_release(watch: Watch, hub: FakeHub, tmp_path: Path) -> None:
    """One more target converts the release for that one only."""
    hub.add(REPO, make_release(tmp_path / "hf", files=2))
    assert watch.once() == 0
    watch.set(targets=[*watch.settings["targets"], dict(name="flat", scan_layers=False, save_dtype="float32")])
    assert watch.once() == 0
    assert watch.states() == [WHOLE, WHOLE]
    arrays = restore(step_of(watch.published("flat")))
    assert arrays["decoder.layers_1.mlp.wo.kernel"].dtype == np.float32


@pytest.mark.parametrize(
    "how", some(["a commit", "the branch", "a repository made anew", "the branch, before it is published"], 2)
)
def test_a_hub_that_goes_back(
    watch: Watch, hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    """The pointer names what the hub has, and keeps to that while the next release is made, or isn't."""
    first = make_release(tmp_path / "first", files=2)
    hub.add(REPO, first)
    start, seeds = hub.repositories[REPO].head, []

    def look() -> None:
        assert watch.once() == 0
        seeds.append(next(s for s in range(3) if digests(restore(step_of(watch.published()))) == digests(wanted(s))))

    look()
    hub.commit(REPO, make_release(tmp_path / "second", files=2, seed=1))
    if is_begun := how == "the branch, before it is published":  # by a watcher that was killed
        release, target = find_release(REPO, "main"), read_config(str(watch.file)).targets[0]
        History(open_store(str(watch.output)), REPO, key_of(REPO, release.weights, target)).begin(release, target)
    else:
        look()
    if how == "a commit":
        hub.commit(REPO, first)
    elif how.startswith("the branch"):
        hub.repositories[REPO].branches["main"] = start
    else:
        del hub.repositories[REPO]
        hub.add(REPO, first)
    capsys.readouterr()
    look()
    assert "fsdp2.json names" in (said := " ".join(capsys.readouterr().err.split()))
    assert "again: that is what the hub has now" in said
    look()
    hub.commit(REPO, make_release(tmp_path / "third", files=2, seed=2))
    watch.set(max_bytes="1B")
    look()  # is refused
    watch.set(max_bytes="1GB")
    look()
    assert seeds == ([0] if is_begun else [0, 1]) + [0, 0, 0, 2]
    assert watch.states()[:2] == [WHOLE, WHOLE]


def test_a_hub_that_goes_back_to_what_was_never_published(watch: Watch, hub: FakeHub, tmp_path: Path) -> None:
    """Also by its dates: the later commit is gone."""
    day, start = 86400, time.time() - 10 * 86400
    hub.clock = lambda: start
    hub.add(REPO, make_release(tmp_path / "first", files=2))
    first = hub.repositories[REPO].head
    hub.clock = lambda: start + day
    second, wanted = hub.commit(REPO, make_release(tmp_path / "second", files=2, seed=1)), []
    assert watch.once() == 0
    wanted.append((watch.published()["commit"], second))
    hub.repositories[REPO].branches["main"] = first
    hub.repositories[REPO].commits.pop(second)
    assert watch.once() == 0
    wanted.append((watch.published()["commit"], first.sha))
    hub.clock = lambda: start + 2 * day
    third = hub.commit(REPO, make_release(tmp_path / "third", files=2, seed=2))
    for size, commit in (("1B", first.sha), ("1GB", third)):  # refused, and published
        watch.set(max_bytes=size)
        assert watch.once() == 0
        wanted.append((watch.published()["commit"], commit))
    assert all(found == commit for found, commit in wanted)


@pytest.mark.parametrize("text", some(["", "[" * 100_000, '{"time": 5}', '{"time": "2026-01-01T00:00:00"}'], 2))
def test_a_note_of_what_came_back_that_is_none(
    watch: Watch, hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """It doesn't count, is named, and is written anew."""
    hub.add(REPO, make_release(tmp_path / "first", files=2))
    assert watch.once() == 0
    again = next((watch.output / ".weightbeam" / "releases" / REPO).iterdir()) / "again.json"
    again.write_text(text)
    for folder, seed in ((make_release(tmp_path / "second", files=2, seed=1), 1), (tmp_path / "first", 0)):
        hub.commit(REPO, folder)
        assert watch.once() == 0
        assert f"{again} can't be read, and doesn't count" in capsys.readouterr().err
        assert_same_bits(restore(step_of(watch.published())), wanted(seed))
    assert json.loads(again.read_bytes())["time"]


def test_a_pointer_is_mended_though_the_repository_is_gone(watch: Watch, hub: FakeHub, tmp_path: Path) -> None:
    """A watcher was ended before it had said what it had published."""
    hub.add(REPO, make_release(tmp_path / "hf", files=2))
    watch.set(models=[REPO])
    assert watch.once() == 0
    said = (pointer := watch.output / REPO / "fsdp2.json").read_bytes()
    pointer.unlink()
    del hub.repositories[REPO]
    assert watch.once() == 1
    assert pointer.read_bytes() == said


def test_an_output_that_is_moved(watch: Watch, hub: FakeHub, tmp_path: Path) -> None:
    """The pointer names where the checkpoint is now, from the next look on."""
    hub.add(REPO, make_release(tmp_path / "hf", files=2))
    assert watch.once() == 0
    before = watch.published()
    watch.output = watch.output.rename(tmp_path / "moved")
    watch.set(output=str(watch.output))
    assert watch.once() == 0
    now = watch.published()
    assert Path(now["items"]).is_dir()
    assert now["checkpoint"] == before["checkpoint"].replace(str(tmp_path / "out"), str(tmp_path / "moved"))
    assert now["items"].startswith(now["checkpoint"])
    moved = {"checkpoint", "items"}
    assert {key: now[key] for key in now.keys() - moved} == {key: before[key] for key in before.keys() - moved}


def test_options_that_are_edited_and_edited_back(watch: Watch, hub: FakeHub, tmp_path: Path) -> None:
    """The pointer names the checkpoint of the options that are asked for now, once it is published."""
    hub.add(REPO, make_release(tmp_path / "hf", files=2))
    scanned = dict(name="v")
    for target in (scanned, dict(name="v", scan_layers=False), scanned, scanned):
        watch.set(targets=[target])
        assert watch.once() == 0
        layers = [name for name in restore(step_of(watch.published("v"))) if "decoder.layers" in name]
        assert all("layers_" in name for name in layers) == (target is not scanned)
    assert watch.states() == [WHOLE, WHOLE]


# --- what waits, and what is refused ----------------------------------------------------------------------------------


def test_an_incomplete_release_waits(
    watch: Watch, hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The index names a file that isn't there; then it is."""
    folder = make_release(tmp_path / "hf", files=2)
    hub.add(REPO, folder, ["config.json", INDEX, "model-00001-of-00002.safetensors"])
    assert watch.once() == 0
    assert "waiting  incomplete: model-00002-of-00002.safetensors not there yet" in capsys.readouterr().out
    assert not watch.output.exists()
    hub.commit(REPO, folder, ["model-00002-of-00002.safetensors"])
    assert watch.once() == 0
    assert watch.states() == [WHOLE]
    assert_same_bits(restore(step_of(watch.published())), wanted())


def test_a_release_that_isnt_quiet_waits(
    watch: Watch, hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(REPO, make_release(tmp_path / "hf", files=2))
    watch.set(quiet_minutes=10)
    assert watch.once() == 0
    assert "waiting  committed to at" in capsys.readouterr().out
    assert not watch.output.exists()
    watch.set(quiet_minutes=1e-6)
    assert watch.once("--dry_run") == 0
    assert "would be converted" in capsys.readouterr().out


def test_what_is_refused_says_why(watch: Watch, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gated, without a licence that is allowed, too large, pickles, no table. Nothing of their weights is read. What
    the hub settles is settled when it says otherwise.
    """
    folder, mit = make_release(tmp_path / "hf", files=2), {"license": "mit"}
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "pickle" / "pytorch_model.bin").write_bytes(b"pickle")
    hub.add("acme/gated", folder, gated="manual", card=mit)
    hub.add("acme/unlicensed", folder)
    hub.add("acme/llama-licence", folder, card={"license": "other", "license_name": "acme-community"})
    hub.add("acme/large", save(tmp_path / "large", LLAMA, random_tensors(LLAMA | dict(vocab_size=6400))), card=mit)
    hub.add("acme/pickle", tmp_path / "pickle", card=mit)
    hub.add(
        "acme/unknown", save(tmp_path / "unknown", LLAMA | dict(model_type="falcon"), random_tensors(LLAMA)), card=mit
    )
    watch.set(licenses=["mit"], max_bytes="100KB")
    assert watch.once() == 0
    reasons = {}
    for name in ("gated", "unlicensed", "llama-licence", "large", "pickle", "unknown"):
        assert watch.states(f"acme/{name}") == [["discovered", "refused"]]
        reasons[name] = watch.last(f"acme/{name}")["reason"]
    assert f"{hub.url}/acme/gated" in reasons["gated"]
    assert reasons["unlicensed"] == "its licence is not named, which isn't among licenses"
    assert "other, acme-community" in reasons["llama-licence"]
    assert "max_bytes is 100 KB" in reasons["large"]
    assert "pickle files, which can run code" in reasons["pickle"]
    assert "no table for model_type 'falcon'" in reasons["unknown"]
    assert watch.once() == 0  # the same again is no news
    assert watch.states("acme/gated") == watch.states("acme/unknown") == [["discovered", "refused"]]
    monkeypatch.setenv("HF_TOKEN", hub.allow("hf_of_a_test", "acme/gated"))
    assert watch.once() == 0
    assert watch.states("acme/gated") == [["discovered", "refused", *WHOLE]]
    assert watch.states("acme/unknown") == [["discovered", "refused"]]
    assert not hub.cdn.leaks
    assert "hf_of_a_test" not in "".join(path.read_text(errors="replace") for path in watch.output.rglob("*.json"))


def test_wildcards_and_dates(watch: Watch, hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a wildcard finds is looked at if it has changed since; what is named always is."""
    folder = make_release(tmp_path / "hf", files=2)
    now = time.time()
    for name, days in (
        ("acme/old-llama", 40),
        ("acme/old-named", 40),
        ("acme/new-llama", 1),
        ("acme/new-other", 1),
        ("other/new-llama", 1),
    ):
        hub.clock = lambda days=days: now - days * 86400
        hub.add(name, folder)
    hub.clock = time.time
    since = time.strftime("%Y-%m-%d", time.gmtime(now - 20 * 86400))
    watch.file.write_text(
        yaml.safe_dump(watch.settings | dict(models=["acme/*-llama", "acme/old-named"])) + f"since: {since}\n"
    )
    assert watch.once("--dry_run") == 0
    shown = capsys.readouterr().out
    assert [name for name in hub.repositories if name in shown] == ["acme/old-named", "acme/new-llama"]


@pytest.mark.parametrize(("status", "code"), [(404, "RepoNotFound"), (403, "GatedRepo"), (403, ""), (410, "")])
def test_a_hub_that_fails_while_a_release_is_planned(
    watch: Watch, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, code: str
) -> None:
    """One such answer, once the release is recorded, isn't a problem of its plan's: it is tried again."""
    hub.add(REPO, make_release(tmp_path / "hf", files=2))
    watch.set(retry_minutes=0.0001)
    answer, late = hub.answer, itertools.count()

    def denied(call: Call) -> Reply:
        is_first = REPO in call.path and bool(watch.states()) and next(late) == 0
        headers = {"X-Error-Code": code} if code else {}
        return json_reply(status, {"error": "for a moment"}, headers) if is_first else answer(call)

    monkeypatch.setattr(hub, "answer", denied)
    assert watch.once() == 1
    assert watch.last()["state"] == "failed"
    assert watch.once() == 0
    assert watch.last()["state"] == "published"


def test_patterns_that_match_nothing(
    watch: Watch, hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are said, each by its name, and are no failure: a model may come."""
    hub.add(REPO, make_release(tmp_path / "hf", files=2))
    watch.set(models=["acme/*", "acme/tinny*", "nobody/*"], licenses=[])
    assert watch.once() == 0
    said = capsys.readouterr()
    waiting = [line.split(maxsplit=2) for line in said.out.splitlines() if " waiting " in line]
    assert waiting == [[each, "waiting", "no model of the hub matches it"] for each in ("acme/tinny*", "nobody/*")]
    for pattern in ("acme/tinny*", "nobody/*"):
        assert f"{pattern}: no model of the hub matches it" in said.err
    assert said.err.count("matches it") == said.out.count("matches it") == 2


def test_an_author_who_cant_be_listed_holds_up_nobody_else(
    watch: Watch, hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither models that are named nor those of others; each such author is a failure."""
    folder = make_release(tmp_path / "hf", files=2)
    hub.add(REPO, folder)
    hub.add("last/tiny", folder)
    gone = hub.fail("status", status=404, matching=r"/api/models\?.*author=(ghost|spectre)")
    watch.set(models=["ghost/*", REPO, "spectre/*", "last/*"], licenses=[])
    assert watch.once() == 1
    assert gone.hits == 2
    said = capsys.readouterr()
    for author in ("ghost", "spectre"):
        assert f"the models of {author}: " in said.out
        assert f"the models of {author}: " in said.err
    assert watch.states() == watch.states("last/tiny") == [["discovered", "refused"]]
    hub.faults = []
    assert watch.once() == 0


IN_THE_WAY: dict[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a link to itself": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("kind", IN_THE_WAY)
def test_what_lies_at_a_pointer_holds_up_no_other_model(
    kind: str, watch: Watch, hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It stays, is named, and once it is moved away the pointer is written."""
    pointer = watch.output / REPO / "fsdp2.json"
    pointer.parent.mkdir(parents=True)
    IN_THE_WAY[kind](pointer)
    folder = make_release(tmp_path / "hf", files=2)
    for repo in (REPO, "last/tiny"):
        hub.add(repo, folder)
    watch.set(models=[REPO, "last/tiny"])
    for _ in range(2):  # after its publication, and where it was published before
        assert watch.once() == 1
        said = capsys.readouterr()
        assert f"{pointer}: " in said.err
        assert "what is in the way isn't Weightbeam's, move it away" in said.err
        assert "Traceback" not in said.err
        assert watch.published(repo="last/tiny")["repo"] == "last/tiny"
        assert not pointer.is_file()
    os.rename(pointer, tmp_path / "mine")
    assert watch.once() == 0
    assert watch.published()["repo"] == REPO


@pytest.mark.parametrize("stray", ["an object", "no JSON", "a folder"])
def test_a_stray_report(
    watch: Watch, hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str], stray: str
) -> None:
    """What lies under its name isn't replaced, and never becomes the pointer; moved away, the release is published."""
    hub.add(REPO, make_release(tmp_path / "hf", files=2))
    assert watch.once() == 0
    report, pointer = Path(watch.published()["checkpoint"]) / "release.json", watch.output / REPO / "fsdp2.json"
    for gone in (report, pointer, *watch.output.glob(f".weightbeam/*/{REPO}/*")):
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    if stray == "a folder":
        report.mkdir()
    else:
        report.write_text('{"plan": "of another"}' if stray == "an object" else "mine")
    assert watch.once() == 1
    why = ": isn't a regular file" if stray == "a folder" else " exists, and isn't of this release; move it away"
    assert watch.last()["state"] == "failed"
    assert f"{report}{why}" in watch.last()["reason"]
    assert "Traceback" not in capsys.readouterr().err
    assert not pointer.exists()
    os.rename(report, tmp_path / "mine")
    assert watch.once("--retry", REPO) == 0
    assert watch.once() == 0
    assert watch.published()["repo"] == REPO


def test_somebodys_file_that_has_the_name_of_the_pointer(
    watch: Watch, hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(REPO, make_release(tmp_path / "hf", files=2))
    pointer = watch.output / REPO / "fsdp2.json"
    pointer.parent.mkdir(parents=True)
    pointer.write_text('{"mine": 1}')
    assert watch.once() == 0
    assert f"{pointer} isn't Weightbeam's, and isn't replaced" in " ".join(capsys.readouterr().err.split())
    assert pointer.read_text() == '{"mine": 1}'
    assert watch.states() == [WHOLE]


@pytest.mark.parametrize("change", ["removed", "another"])
def test_a_checkpoint_that_is_no_more_what_was_verified(
    watch: Watch, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Since a watcher was stopped before it said that it is published: it is made anew, or the stranger is refused."""
    hub.add(REPO, make_release(tmp_path / "hf", files=2))
    publish = ReleaseFeed.publish

    def stop(*_: Any) -> None:
        raise Failed("stopped")

    monkeypatch.setattr(ReleaseFeed, "publish", stop)
    assert watch.once() == 1
    monkeypatch.setattr(ReleaseFeed, "publish", publish)
    (step,) = watch.output.glob(f"{REPO}/*/fsdp2-*/0")
    made, record = step.parent, watch.records()[0][-1]
    shutil.rmtree(step)
    if change == "another":
        assert call("convert", make_release(tmp_path / "other", files=2, seed=1), made) == 0
    History(open_store(str(watch.output)), REPO, record["key"]).add("verified")
    assert watch.once() == (change == "another")
    if change == "another":
        assert "was made with other options or of another source" in watch.last()["reason"]
        assert not (made / "release.json").exists()
    else:
        assert_same_bits(restore(step_of(watch.published())), wanted())


# --- what is stopped, moved or broken on the way ----------------------------------------------------------------------


def test_killed_in_the_middle_while_the_branch_moves(watch: Watch, hub: FakeHub, tmp_path: Path) -> None:
    """After a `kill -9` nothing of the watcher is left; the next run goes on with the commit that was begun, not mixing
    in what the branch moved to, and converts that too. The pointer names the newer one.
    """
    watch.set(targets=[dict(name="fsdp2", mesh=["fsdp=2"], unit_bytes=8000)], runner=dict(direct_num_workers=1))
    hub.add(REPO, make_release(tmp_path / "first", files=2))
    first = hub.repositories[REPO].head.sha
    hub.cdn.faults = [Fault("slow", seconds=0.3)]
    with watch.start("--once", spawns=True) as process:
        wait_until(
            lambda: len(list(watch.output.glob(f"{REPO}/*/*/0.*.orbax-checkpoint-tmp/units/*/[0-9]*.json"))) > 1,
            process=process,
        )
        second = hub.commit(REPO, make_release(tmp_path / "second", files=2, seed=1))
        workers = children_of(process.pid)
        process.kill()
        process.communicate()
    assert workers
    wait_until(lambda: not any(is_alive(worker) for worker in workers))
    assert watch.states() == [["discovered", "planned", "converting"]]
    (staging,) = watch.output.glob(f"{REPO}/*/*/0.*.orbax-checkpoint-tmp")
    made = {path.name: json.loads(path.read_bytes())["attempt"] for path in staging.glob("units/*/[0-9]*.json")}
    hub.cdn.faults = []
    assert watch.once() == 0
    assert watch.states() == [["discovered", "planned", "converting", "converting", "verified", "published"], WHOLE]
    reports = [json.loads(path.read_bytes()) for path in watch.output.glob(f"{REPO}/*/*/release.json")]
    checkpoints = {report["commit"]: step_of(report) for report in reports}
    assert set(checkpoints) == {first, second}
    assert set(made.values()) <= {
        path.name.removeprefix("ocdbt.process_") for path in (checkpoints[first] / "items").iterdir()
    }, "made again"
    assert_same_bits(restore(checkpoints[first]), wanted())
    assert_same_bits(restore(checkpoints[second]), wanted(seed=1))
    assert watch.published()["commit"] == second


@pytest.mark.slow("a watcher killed at each of its last writes, 40 s")
def test_killed_before_the_pointer_is_written(watch: Watch, hub: FakeHub, tmp_path: Path) -> None:
    """`published` is recorded, and told of; then `kill -9`. The next round has the pointer name the newest release:
    first there is none, then it names an older one. What is deleted stays deleted.
    """
    pointer = watch.output / REPO / "fsdp2.json"
    hub.add(REPO, make_release(tmp_path / "hf", files=2))
    for seed in (0, 1):
        if seed:
            hub.commit(REPO, make_release(tmp_path / "newer", files=2, seed=seed))
        before = pointer.read_bytes() if seed else None
        with Inbox() as inbox:
            watch.set(notify=[inbox.url])
            with watch.start("--once") as process:
                inbox.taken = lambda message, process=process: (
                    process.kill() if message["state"] == "published" else None
                )
                process.communicate(timeout=PATIENCE)
        assert process.returncode == -signal.SIGKILL
        watch.set(notify=[])
        assert watch.states() == [WHOLE] * (seed + 1)
        assert watch.once("--dry_run") == 0
        assert (pointer.read_bytes() if pointer.exists() else None) == before
        assert watch.once() == 0
        assert watch.published()["commit"] == hub.repositories[REPO].head.sha
        assert_same_bits(restore(step_of(watch.published())), wanted(seed))
    written = pointer.stat()
    assert watch.once() == 0
    assert pointer.stat() == written
    assert watch.states() == [WHOLE, WHOLE]
    for gone in [watch.published()["checkpoint"], *map(str, watch.output.glob(f"{REPO}/*/fsdp2-*"))]:
        shutil.rmtree(gone, ignore_errors=True)
        pointer.unlink(missing_ok=True)
        assert watch.once() == 0
        assert pointer.exists() == any(watch.output.glob(f"{REPO}/*/fsdp2-*"))


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_another_watcher_stays_away_and_a_polite_stop_isnt_held_against_the_release(
    watch: Watch, hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While one converts, a second one does nothing. SIGTERM: exit status 1, no lease, no attempt less."""
    watch.set(attempts=1)
    hub.add(REPO, make_release(tmp_path / "hf", files=2))
    hub.cdn.faults = [Fault("slow", seconds=2)]
    with watch.start("--once") as process:
        wait_until(lambda: watch.states() == [["discovered", "planned", "converting"]], process=process)
        assert watch.once() == 0
        assert "busy  " in capsys.readouterr().out
        assert watch.states() == [["discovered", "planned", "converting"]]
        process.send_signal(signal.SIGTERM)
        _, message = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "Traceback" not in message
    assert watch.last()["attempt"] == 0
    hub.cdn.faults = []
    assert watch.once() == 0
    assert watch.states() == [["discovered", "planned", "converting", "planned", "converting", "verified", "published"]]


@pytest.mark.parametrize(
    ("what", "acts_late"),
    each([("release.json", "release.json"), ("rewriteTo.*/0/commit_success", "0/commit_success.txt")], [True, False]),
)
def test_nothing_is_published_once_a_stop_is_told(
    hub: FakeHub, tmp_path: Path, what: tuple[str, str], acts_late: bool
) -> None:
    """While a bucket is asked to publish: the report, which says that a release is there, or the checkpoint."""
    hub.add(REPO, make_release(tmp_path / "hf", files=2))
    matching, name = what
    with LateGcs(matching, acts_late) as gcs:
        watch = Watch(tmp_path, hub, "gs://bucket/models")
        with watch.start("--once", **gcs.env()) as process:
            wait_until(gcs.asked.is_set, process=process)
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=PATIENCE)
        there = [each for each in gcs.objects["bucket"] if each.endswith(f"/{name}")]
        assert (process.returncode, "Traceback" in said) == (130, False)
        assert ("is published" in said) == (name == "release.json")
        time.sleep(4)
        assert [each for each in gcs.objects["bucket"] if each.endswith(f"/{name}")] == there
        with watch.start("--once", **gcs.env()) as process:
            process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        assert f"models/{REPO}/fsdp2.json" in gcs.objects["bucket"]


def test_a_release_of_the_end_of_time_and_a_folder_as_a_record(
    watch: Watch, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each harms itself alone."""
    for name in ("acme/late", "acme/odd", REPO):
        hub.add(name, make_release(tmp_path / name, files=1))
    find = watch_releases.find_release

    def dated(repo: str, revision: str) -> Any:
        moment = datetime.datetime(9999 if repo == "acme/late" else 2020, 12, 31, 23, 59, tzinfo=datetime.UTC)
        return dataclasses.replace(find(repo, revision), updated=moment)

    monkeypatch.setattr(watch_releases, "find_release", dated)
    found, target = dated("acme/odd", "main"), read_config(str(watch.file)).targets[0]
    record = watch.output / ROOT / "acme/odd" / key_of("acme/odd", found.weights, target) / "0001.json"
    record.mkdir(parents=True)
    watch.set(quiet_minutes=30)
    assert watch.once() == 1
    assert watch.states() == [WHOLE]
    said = capsys.readouterr()
    assert "0001.json: is a folder, and no record; move it away" in said.err + said.out
    assert not watch.records("acme/late")


def test_what_failed_is_tried_again_so_often(watch: Watch, hub: FakeHub, tmp_path: Path) -> None:
    """With a delay in between, then no more, until it is asked for. The cause is a file in the output's way."""
    hub.add(REPO, make_release(tmp_path / "hf", files=2))
    watch.set(attempts=2, retry_minutes=60)
    in_the_way = watch.output / REPO / hub.repositories[REPO].head.sha[:12]
    in_the_way.parent.mkdir(parents=True)
    in_the_way.write_text("")
    once = ["discovered", "planned", "converting", "failed"]
    assert watch.once() == 1
    assert watch.states() == [once]
    assert watch.once() == 1  # too early
    assert watch.states() == [once]
    watch.set(retry_minutes=0)
    assert watch.once() == 1
    assert watch.once() == 1
    assert watch.states() == [[*once, "planned", "converting", "failed"]]
    assert watch.last()["attempt"] == 2
    assert "is a file" in watch.last()["reason"] or "Not a directory" in watch.last()["reason"]
    in_the_way.unlink()
    assert watch.once() == 1
    assert watch.once("--retry", REPO) == 0
    assert watch.once() == 0
    assert watch.states()[0][-5:] == WHOLE


def test_a_file_that_isnt_whole_is_looked_at_again(watch: Watch, hub: FakeHub, tmp_path: Path) -> None:
    """Whether it is the file or the way to it can't be told, so that it isn't refused for good."""
    folder = make_release(tmp_path / "hf", files=2)
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    hub.add(REPO, folder)
    assert watch.once() == 1
    assert watch.states() == [["discovered", "failed"]]
    assert "truncated?" in watch.last()["reason"]


def test_a_release_that_failed_and_was_mended(watch: Watch, hub: FakeHub, tmp_path: Path) -> None:
    """By the next commit: nothing is left to be done about the first, and looks don't fail for ever."""
    folder = make_release(tmp_path / "hf", files=2)
    shard = folder / "model-00001-of-00002.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    hub.add(REPO, folder)
    watch.set(attempts=1)
    assert (watch.once(), watch.once()) == (1, 1)
    shard.write_bytes(whole)
    hub.commit(REPO, folder)
    assert (watch.once(), watch.once()) == (1, 0)  # it is told once more, since it isn't published before
    assert watch.states() == [["discovered", "failed"], WHOLE]


def test_a_conversion_that_others_are_at_is_waited_for(
    watch: Watch, hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as one that was started by hand; said once, and not counted as an attempt."""
    watch.set(attempts=1)
    hub.add(REPO, make_release(tmp_path / "hf", files=2))
    commit = hub.repositories[REPO].head.sha
    made = actions.plan(f"hf://{REPO}@{commit}", ConvertOptions(mesh=("fsdp=2",)))["plan"]
    staging = staging_at(str(watch.output / REPO / commit[:12] / f"fsdp2-{made[:8]}"), 0)
    staging.output.make()
    with staging.hold():
        for _ in range(2):
            assert watch.once() == 0
            assert "busy  " in capsys.readouterr().out
            assert watch.states() == [["discovered", "planned", "converting", "planned"]]
    assert watch.once() == 0
    assert watch.states() == [["discovered", "planned", "converting", "planned", "verified", "published"]]


def test_a_conversion_that_dies_doesnt_end_the_watcher(watch: Watch, hub: FakeHub, tmp_path: Path) -> None:
    """Its process is killed, as by a system without memory: it failed, and the next model is converted."""
    watch.set(models=["acme/a", "acme/b"])
    folder = make_release(tmp_path / "hf", files=2)
    hub.add("acme/a", folder)
    hub.add("acme/b", folder)
    hub.cdn.faults = [Fault("slow", seconds=1, matching="acme%2Fa|acme/a")]
    with watch.start("--once", spawns=True) as process:
        wait_until(lambda: watch.states("acme/a") == [["discovered", "planned", "converting"]], process=process)
        wait_until(lambda: workers_of(process.pid), process=process)
        for worker in workers_of(process.pid):
            os.kill(worker, signal.SIGKILL)
        out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, out
    assert watch.last("acme/a")["state"] == "failed"
    assert "SIGKILL" in watch.last("acme/a")["reason"]
    assert watch.states("acme/b") == [WHOLE]


def workers_of(pid: int) -> list[int]:
    """The processes that work for a watcher; multiprocessing has one more, which keeps count of its resources."""
    return [child for child in children_of(pid) if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()]


# --- telling, and being told ------------------------------------------------------------------------------------------


class Inbox(Server):
    """Takes webhooks."""

    SETTINGS = ("faults",)

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[dict[str, Any]] = []
        self.taken: Callable[[dict[str, Any]], object] = lambda message: None  # called before the sender has its answer

    def answer(self, call: Call) -> Reply:
        self.messages.append(json.loads(call.body))
        self.taken(self.messages[-1])
        return json_reply(200, {})

    def refusal(self, fault: Fault) -> Reply:
        return json_reply(fault.status, {})


def test_states_are_sent_to_webhooks(
    watch: Watch, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """In order, once each although the receiver is out of order at times."""
    hub.add(REPO, make_release(tmp_path / "hf", files=2))
    with Inbox() as inbox:
        inbox.faults = [Fault("status", every=2)]
        monkeypatch.setenv("INBOX", inbox.url)
        watch.set(notify=["$INBOX"])
        assert watch.once() == 0
        assert [message["state"] for message in inbox.messages] == WHOLE
        assert inbox.messages[-1]["text"].startswith(f"{REPO}@")
        assert inbox.messages[-1]["items"].endswith("/0/items")
    assert "wasn't told" not in capsys.readouterr().err


def test_a_retry_that_another_watcher_is_faster_with(
    watch: Watch, hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It goes on with one target while the message of the other is delivered."""
    targets = [dict(name=name) for name in ("first", "second")]
    watch.set(licenses=[], targets=targets)
    hub.add(REPO, make_release(tmp_path / "hf", files=2))
    assert watch.once() == 0

    def go_on(_: object) -> None:
        for history in histories(open_store(str(watch.output)), REPO):
            if history.state == "refused":
                history.add("discovered")

    with Inbox() as inbox:
        inbox.taken = go_on
        watch.set(notify=[inbox.url])
        assert watch.once("--retry", REPO) == 0
        assert watch.states() == [["discovered", "refused", "discovered"]] * 2
    watch.set(notify=[])
    assert watch.once() == 0
    capsys.readouterr()
    with next(iter(histories(open_store(str(watch.output)), REPO))).alone():  # another one is at work
        assert watch.once("--retry", REPO) == 1
    said = capsys.readouterr().err
    assert "run it again" in said
    assert "Traceback" not in said
    assert watch.once("--retry", REPO) == 0


def test_a_webhook_that_is_gone_stops_nothing(
    watch: Watch, hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its URL, which is a secret, isn't shown."""
    hub.add(REPO, make_release(tmp_path / "hf", files=2))
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        watch.set(licenses=[], notify=[f"http://127.0.0.1:{taken.getsockname()[1]}/secret"])
        assert watch.once() == 0
    assert watch.states() == [["discovered", "refused"]]
    said = capsys.readouterr().err
    assert said.count("webhook 1 of notify wasn't told") == 2
    assert "secret" not in said


ANSWERS: dict[str, tuple[bytes, bytes, str]] = {  # what is sent at once, what is sent on and on, and what is said
    "a body without an end": (b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 65536, ""),
    "a body that trickles": (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b"x", ""),
    "a head that trickles": (b"HTTP/1.1 200 OK\r\nX-Slow: ", b"x", "TimeoutError"),
    "a redirect to no address": (b"HTTP/1.1 307 No\r\nLocation: http://[::1\r\nContent-Length: 0\r\n\r\n", b"", "answered 307"),
    "a redirect without an end": (b"HTTP/1.1 307 No\r\nLocation: /there\r\n\r\n", b"x" * 65536, "answered 307"),
    "a redirect elsewhere": (b"HTTP/1.1 308 No\r\nLocation: /there\r\nContent-Length: 0\r\n\r\n", b"", "answered 308"),
    "no HTTP": (b"hello\r\n\r\n", b"", "ConnectionError"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_webhook_that_answers_badly_stops_nothing(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No answer takes longer than an attempt may, or more memory than its head; none is a traceback."""
    at_once, on_and_on, why = ANSWERS[kind]
    asked: list[str] = []

    class Receiver(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            asked.append(self.rfile.readline().split()[1].decode())
            while (line := self.rfile.readline()) != b"\r\n":
                length = int(line.split()[1]) if line.lower().startswith(b"content-length") else 0
            self.rfile.read(length)
            with contextlib.suppress(OSError):
                self.wfile.write(at_once)
                while on_and_on:
                    self.wfile.write(on_and_on)
                    ended.wait(0.05)

    ended = threading.Event()
    monkeypatch.setattr(notices, "LONGEST", 1.0)
    monkeypatch.setattr(notices._post.retry, "wait", tenacity.wait_none())  # type: ignore[attr-defined]
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Receiver) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        start = time.monotonic()
        Notices([f"http://127.0.0.1:{server.server_address[1]}/secret"]).tell(
            {"state": "planned", "repo": REPO, "commit": "0" * 40, "target": "t"}
        )
        took = time.monotonic() - start
        if why == "TimeoutError":  # each attempt waits on; there won't be ever more of them
            for number in range(notices.MOST):
                with contextlib.suppress(TimeoutError):
                    notices._post(f"http://127.0.0.1:{server.server_address[1]}/secret", {"number": number})
            assert sum(thread.name == "webhook" for thread in threading.enumerate()) <= notices.MOST
            del asked[notices.ATTEMPTS :]
        server.shutdown()
        ended.set()
    assert took < 10
    assert [line for line in caplog.messages if "wasn't told" in line] == [
        f"webhook 1 of notify wasn't told of {REPO}@{'0' * 12} for t: planned: {why}" for _ in range(bool(why))
    ]
    assert asked == ["/secret"] * (notices.ATTEMPTS if why.endswith("Error") else 1)


def test_states_are_sent_to_pubsub(watch: Watch, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the stock client, to a server of Pub/Sub's gRPC."""
    received: list[pubsub.PublishRequest] = []

    def publish(request: pubsub.PublishRequest, context: grpc.ServicerContext) -> pubsub.PublishResponse:
        received.append(request)
        return pubsub.PublishResponse(message_ids=[str(len(received))])

    server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
    method = grpc.unary_unary_rpc_method_handler(
        publish, pubsub.PublishRequest.deserialize, pubsub.PublishResponse.serialize
    )
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("google.pubsub.v1.Publisher", {"Publish": method})]
    )
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    hub.add(REPO, save(tmp_path / "hf", LLAMA | dict(model_type="falcon"), random_tensors(LLAMA)))
    watch.set(notify=["projects/acme/topics/releases"])
    try:
        assert watch.once() == 0
    finally:
        server.stop(0)
    messages = [message for request in received for message in request.messages]
    assert {request.topic for request in received} == {"projects/acme/topics/releases"}
    assert [message.attributes["state"] for message in messages] == ["discovered", "refused"]
    assert "no table for model_type 'falcon'" in json.loads(messages[1].data)["reason"]


def test_the_hubs_webhooks_start_a_conversion(watch: Watch, hub: FakeHub, tmp_path: Path) -> None:
    """With the secret, of a model that matches; another sender is turned away. Between rounds that are an hour apart."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/"

    def is_serving() -> bool:
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(url, timeout=5).status == 200
        return False

    def post(content: bytes, secret: str) -> int:
        try:
            return urllib.request.urlopen(
                urllib.request.Request(url, content, {"X-Webhook-Secret": secret}), timeout=5
            ).status
        except urllib.error.HTTPError as e:
            return e.code

    def payload(name: str, scope: str = "repo.content") -> bytes:
        return json.dumps(dict(event=dict(action="update", scope=scope), repo=dict(type="model", name=name))).encode()

    assert watch.once("--serve", str(port)) == 2  # no secret
    with watch.start("--serve", str(port), "--interval", "1h", WEIGHTBEAM_WEBHOOK_SECRET="right") as process:
        try:
            wait_until(is_serving, process=process)
            wait_until(lambda: "list" in hub.log.counts(), process=process)
            hub.add(REPO, make_release(tmp_path / "hf", files=2))
            hub.add("other/tiny", tmp_path / "hf")
            assert post(payload(REPO), "wrong") == 401
            assert post(b"[1]", "right") == 400
            assert post(b"{" * 100_000, "right") == 400
            assert post(payload(REPO, "discussion"), "right") == 202
            time.sleep(0.5)
            assert "info" not in hub.log.counts()
            assert post(payload("other/tiny"), "right") == 202
            assert post(payload(REPO), "right") == 202
            wait_until(lambda: (watch.output / REPO / "fsdp2.json").exists(), process=process)
        finally:
            process.terminate()
            process.communicate(timeout=PATIENCE)
    assert {entry.name for entry in hub.log if entry.kind == "info"} == {REPO}
    assert watch.states() == [WHOLE]


# --- the configuration ------------------------------------------------------------------------------------------------

WRONG = """
output: hf://acme/out
models: [acme/*, "*/tiny", 3, tiny]
targets:
  - {name: A Name, save_dtype: int8, scan_layers: maybe, virtual: true}
  - {name: mesh, mesh: [fsdp=16, wheels=4]}
  - {name: list, vocab_size: [1, 2]}
max_bytes: much
quiet_minutes: -1
retry_minutes: .inf
runner: {no_such_option: 1, runner: DataflowRunner}
notify: [ftp://somewhere/secret, $NOT_SET]
colour: red
"""


def test_everything_wrong_with_a_configuration_is_said_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "watch.yaml"
    file.write_text(WRONG)
    assert call("watch", "--config", file, "--once") == 2
    said = capsys.readouterr().err
    places = ["output:", "models.1: */tiny: should be", "models.2:", "models.3: tiny: should be",
              "targets.0: name:", "save_dtype:", "scan_layers:", "virtual:", "targets.1: --mesh=wheels=4", "targets.2: vocab_size:",
              "max_bytes:", "quiet_minutes:", "retry_minutes:", "runner: unknown options", "--project=PROJECT is missing", "notify.0:", "notify.1:",
              "colour:"]  # fmt: skip
    assert [place for place in places if place not in said] == []
    assert "somewhere" not in said
    assert "Traceback" not in said


TYPED = """
output: out
model: [acme/*]
quiet_minuts: 3
targets:
  - {name: a, scan_layer: true, mesh: fdsp=8, save_dtype: int7}
  - {name: a, colour: red, 8: 1}
runs:
  - checkpoints: /r
    name: a b
    step: every
    targets:
      - {name: x, knd: export, on_na: hold, on_nan: off, save_dtype: int7, kind: what}
      - {name: x, kind: reshard, mesh: fdsp=8}
  - {checkpoints: /r/x, keep: {lst: 3}}
  - {checkpoints: /s/x}
"""
WRONGLY_TYPED = """
targets.0: scan_layer: no such option; did you mean scan_layers?
targets.0: save_dtype: invalid choice: 'int7'
targets.0: --mesh=fdsp=8: MaxText's meshes have no axis 'fdsp'
targets.1: colour: no such option; there are layers, experts, vocab_rows, scan_layers,
targets.1: 8: no such option; there are layers,
runs.0.name: 'a b' should be letters
runs.0.targets.0: kind: should be export, quantize or reshard
runs.0.targets.0: on_nan: should be hold, publish or newest
runs.0.targets.0: knd: no such option of export; did you mean kind?
runs.0.targets.0: on_na: no such option of export; did you mean on_nan?
runs.0.targets.0: save_dtype: invalid choice: 'int7'
runs.0.targets.1: --mesh=fdsp=8: MaxText's meshes have no axis 'fdsp'
runs.0.step: no such field; did you mean steps?
runs.1.keep.last: Field required
runs.1.keep.lst: no such field; did you mean last?
model: no such field; did you mean models?
quiet_minuts: no such field; did you mean quiet_minutes?
targets: a: the name of several targets
runs.0.targets: x: the name of several targets
runs: x: the name of several runs
"""


def test_what_is_mistyped_hides_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All in one go, each once, with what was meant."""
    file = tmp_path / "watch.yaml"
    file.write_text(TYPED)
    assert call("watch", "--config", file, "--once") == 2
    said, wanted = capsys.readouterr().err.splitlines()[2:], WRONGLY_TYPED.split("\n")[1:-1]
    assert len(said) == len(wanted), said
    assert [line for line, start in zip(said, wanted, strict=True) if not line.startswith(f"  {start}")] == []


def test_a_reason_of_several_lines_is_one_cell(capsys: pytest.CaptureFixture[str]) -> None:
    Findings([Finding(REPO, "0" * 40, "a", "refused", "  shape: a\n  shape: b")]).show()
    assert capsys.readouterr().out.splitlines()[-1].endswith("refused  shape: a; shape: b")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        "models: [a",
        "output: /x\noutput: /y\n",
        "\xff",
        'models: ["\\ud800"]',
        "output: 2026-11-30",
        "2026-11-30: 1",
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "watch.yaml"
    file.write_bytes(text.encode("latin-1"))
    assert call("watch", "--config", file, "--once") == 2
    assert call("watch", "--config", tmp_path / "none.yaml", "--once") == 2
    assert "Traceback" not in capsys.readouterr().err


def test_the_example_is_a_configuration() -> None:
    config = read_config(str(Path(__file__).parents[2] / "deploy" / "watch.yaml"))
    assert {target.name for target in config.targets} >= {"scanned"}
