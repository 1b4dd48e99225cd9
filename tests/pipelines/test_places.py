"""Where steps are published, when something is damaged, fails for a moment, or belongs to somebody else: nothing of
theirs is replaced, nothing that isn't whole is seen, and no other run is harmed.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.numpy import load_file
from servers import repository
from servers.clients import at_quick_hub
from servers.hub import FakeHub
from support import make_release

from weightbeam.formats.storage import LocalFolder, StorageError
from weightbeam.formats.storage.hub_cache import has_hash
from weightbeam.formats.targets.hub import find_published, publish
from weightbeam.formats.targets.published import whole_files
from weightbeam.pipelines.watching.config import config_of_run
from weightbeam.pipelines.watching.feed import Feed
from weightbeam.pipelines.watching.isolation import Workers
from weightbeam.pipelines.watching.marks import MARKS, OPEN, Mark, Marks
from weightbeam.pipelines.watching.notices import Notices
from weightbeam.pipelines.watching.places import PLACE_OWNER, FolderPlace, HubPlace
from weightbeam.pipelines.watching.records import ROOT, RUNS, History, State, key_of
from weightbeam.pipelines.watching.run_feed import RunFeed
from weightbeam.pipelines.watching.watcher import WAITING, Watcher

TOKEN, REPO, URL = "hf_of_a_test", "me/tuned", "hf://me/tuned"
TITLE = "Step 1 of run (hf-0123456789ab)"
FIRST = {
    "state": "discovered", "time": "2026-11-23T12:00:00+00:00", "attempt": 0, "commit": "step-3", "target": "hf",
    "weights": "w", "updated": "2026-11-23T11:00:00+00:00", "step": 3, "seen": "s", "source": "/run/3",
}  # fmt: skip


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    """A hub that knows the token, and clients that don't wait."""
    with at_quick_hub(TOKEN) as server:
        yield server


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """What a watcher made of a step: two files of weights, the small ones, and what is written beside them."""
    made = make_release(tmp_path / "release", files=2)
    (made / "README.md").write_text("Written by [Weightbeam]")
    (made / "tokenizer.json").write_text("{}")
    small = {path.name: path.read_bytes() for path in made.iterdir() if path.suffix != ".safetensors"}
    record = {
        "digests": {name: "0" for shard in made.glob("*.safetensors") for name in load_file(shard)},
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in small.items()},
    }
    (made / "weightbeam.json").write_text(json.dumps(record))
    (made / "README.md").write_text("Written by [Weightbeam], and what changed")
    for name in ("run.json", "changes.json"):
        (made / name).write_text('{"run": "/run", "key": "hf-0123456789ab"}')
    (made / ".stray.weightbeam-tmp").write_text("x")
    return made


def publish_to(place: HubPlace, release: Path) -> dict[str, Any]:
    return place.publish(LocalFolder(str(release)), place.of("step-1"), TITLE, lambda: True)


def commit(hub: FakeHub, folder: Path, title: str = "theirs", **files: str) -> None:
    """Somebody else's commit to `main`; `__` in a name is a dot."""
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    hub.commit(REPO, folder, [name.replace("__", ".") for name in files], title=title)


# --- what is published ------------------------------------------------------------------------------------------------


def test_what_is_published(hub: FakeHub, made: Path, tmp_path: Path) -> None:
    """What the record names, the weights, and what is written beside them; the card may be another one by then."""
    publish_to(HubPlace(URL, tmp_path), made)
    for branch in ("main", "step-1"):
        held = hub.repositories[REPO].branches[branch].files.keys() - {".gitattributes"}
        assert held == {path.name for path in made.iterdir()} - {".stray.weightbeam-tmp"}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config.json", None), ("tokenizer.json", None), ("README.md", None), ("run.json", None),
        ("model.safetensors.index.json", None), ("tokenizer.json", b"[]"), ("model-00001-of-00002.safetensors", b"x"),
    ],
)  # fmt: skip
def test_a_release_that_is_being_removed(
    name: str, change: bytes | None, hub: FakeHub, made: Path, tmp_path: Path
) -> None:
    """A file is gone, or another one: nothing is committed, and what was there stays."""
    place = HubPlace(URL, tmp_path)
    publish_to(place, made)
    before = dict(hub.repositories[REPO].branches)
    if change is None:
        (made / name).unlink()
    else:
        (made / name).write_bytes(change)
    with pytest.raises(StorageError, match=r"isn't published|few") as told:
        place.publish(LocalFolder(str(made)), place.of("step-2"), "Step 2 of run (hf-2)", lambda: True)
    assert name in str(told.value) or change == b"x"
    assert hub.repositories[REPO].branches == before


def test_a_release_whose_record_names_no_files(made: Path) -> None:
    """One of an earlier version: all that is there."""
    record = json.loads((made / "weightbeam.json").read_bytes())
    (made / "weightbeam.json").write_text(json.dumps({"digests": record["digests"]}))
    assert whole_files(LocalFolder(str(made))).keys() == {path.name for path in made.iterdir()}


# --- whose a place is -------------------------------------------------------------------------------------------------


def test_an_owner_stays(tmp_path: Path) -> None:
    """Whoever owns a place first does, and what is noted there isn't written again."""

    class Late(LocalFolder):
        def make(self) -> None:
            super().make()
            FolderPlace(LocalFolder(str(tmp_path)), tmp_path).own("/first", "/out")

    FolderPlace(Late(str(tmp_path)), tmp_path).own("/second", "/out")
    assert json.loads((tmp_path / PLACE_OWNER).read_bytes()) == {"run": "/first", "output": "/out"}
    place = FolderPlace(LocalFolder(str(tmp_path)), tmp_path)
    assert (place.owner(), place.known_as()) == ("/first", "/out")
    (tmp_path / PLACE_OWNER).write_text('{"run": "/first"}')
    place.own("/first", "/out")
    assert (place.owner(), place.known_as()) == ("/first", None)


def damage(file: Path, how: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if how == "folder":
        file.mkdir()
    else:
        file.write_bytes({"deep": b"[" * 100_000, "list": b"[]", "cut": b'{"run": '}[how])


@pytest.mark.parametrize("how", ["folder", "deep", "list", "cut"])
def test_a_damaged_owner_harms_its_run_only(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is named, and the other run of the same look is gone on with."""
    (tmp_path / "like").mkdir()
    feeds = []
    for name in ("bad", "other"):
        config = config_of_run(str(tmp_path / name), str(tmp_path / "like"), str(tmp_path / f"{name}-out"), None, {})
        feeds.append(RunFeed(config, config.runs[0], Workers(), flat=True))
    (tmp_path / "bad").mkdir()
    records = feeds[0].output / RUNS / feeds[0].run.name
    (records / "hf-1").make()
    (records / MARKS).make()
    records.write("hf-1/0001.json", json.dumps(FIRST).encode())
    records.write(f"{MARKS}/{OPEN}~hf-1", b"")
    owner = tmp_path / "bad-out" / PLACE_OWNER
    damage(owner, how)
    found = Watcher(config, feeds, Notices([])).once()
    assert [finding.state for finding in found] == [State.FAILED, WAITING]
    assert str(owner) in found[0].reason
    assert str(tmp_path / "other") in found[1].reason
    assert str(owner) in caplog.text
    with pytest.raises(StorageError, match=r"run\.json"):
        FolderPlace(LocalFolder(str(tmp_path / "bad-out")), tmp_path).owner()


def test_a_report_that_isnt_all_there(tmp_path: Path) -> None:
    """Is none."""
    (tmp_path / "step-1").mkdir()
    place = FolderPlace(LocalFolder(str(tmp_path)), tmp_path)
    for text in (b"", b"[" * 100_000, b"[]"):
        (tmp_path / "step-1" / "run.json").write_bytes(text)
        assert place.report(place.of("step-1")) == {}


# --- the hub ----------------------------------------------------------------------------------------------------------


def test_a_passing_error_is_no_missing_report(hub: FakeHub, made: Path, tmp_path: Path) -> None:
    """Only a repository, a branch or a file that isn't there is none."""
    place = HubPlace(URL, tmp_path)
    assert place.report(URL) == {}
    hub.add(REPO).writers.add(TOKEN)
    assert place.report(URL) == place.report(place.of("step-1")) == {}
    for matching in ("GET /api/models/me/tuned", "resolve/.*/run.json"):
        publish_to(place, made)
        hub.fail("status", status=503, matching=matching)
        with pytest.raises(StorageError, match="503"):
            place.report(URL)
        with pytest.raises(StorageError, match="503"):
            place.owner()
        hub.faults = []
    assert place.owner() == "/run"


def test_a_card_that_cant_be_read_is_kept(hub: FakeHub, made: Path, tmp_path: Path) -> None:
    place = HubPlace(URL, tmp_path)
    hub.add(REPO).writers.add(TOKEN)
    commit(hub, tmp_path / "theirs", README__md="# Mine\n")
    fault = hub.fail("status", status=503, matching="resolve/.*/README.md")
    with pytest.raises(StorageError, match="503"):
        publish_to(place, made)
    assert fault.hits
    hub.faults = []
    publish_to(place, made)
    assert bytes(hub.repositories[REPO].head.files["README.md"].data) == b"# Mine\n"


def test_a_report_of_another_tool_is_no_runs(hub: FakeHub, tmp_path: Path) -> None:
    """A `run.json` that names no run: what lies beside it is others'."""
    hub.add(REPO).writers.add(TOKEN)
    commit(hub, tmp_path / "theirs", run__json='{"lr": 1}', model__safetensors="x")
    with pytest.raises(StorageError, match=r"model\.safetensors"):
        HubPlace(URL, tmp_path).check_writable()


def test_a_step_of_a_repository_that_isnt_seen_isnt_removed(hub: FakeHub, made: Path, tmp_path: Path) -> None:
    """A token that may not see it is told that there is none, as of a branch that has gone."""
    place, repository = HubPlace(URL, tmp_path), hub.add(REPO)
    repository.writers.add(TOKEN)
    url, key = place.of("step-1"), json.loads((made / "run.json").read_text())["key"]
    publish_to(place, made)
    hub.fail("status", status=404, matching="/api/models/me/tuned")
    with pytest.raises(StorageError, match="me/tuned"):
        place.remove(url, key, TITLE)
    hub.faults = []
    repository.branches.pop("step-1")
    assert not place.remove(url, key, TITLE)


def test_a_branch_that_the_hub_keeps_isnt_removed(hub: FakeHub, made: Path, tmp_path: Path) -> None:
    """Whoever may not see a repository is told that there is none: the branch is looked at again then."""
    place, repository = HubPlace(URL, tmp_path), hub.add(REPO)
    repository.writers.add(TOKEN)
    url, key = place.of("step-1"), json.loads((made / "run.json").read_text())["key"]
    publish_to(place, made)
    fault = hub.fail("status", status=404, matching="DELETE .*/branch/")
    with pytest.raises(StorageError, match="doesn't delete it"):
        place.remove(url, key, TITLE)
    assert fault.hits
    assert "step-1" in repository.branches
    hub.faults = []
    assert place.remove(url, key, TITLE)
    assert "step-1" not in repository.branches


def test_what_would_go_with_a_branch(hub: FakeHub, made: Path, tmp_path: Path) -> None:
    """What others have committed to a step's branch, before the step, between two of its commits or after them; not what
    `main` has too, nor what a later commit of the step has replaced.
    """
    place, repository = HubPlace(URL, tmp_path), hub.add(REPO)
    repository.writers.add(TOKEN)
    commit(hub, tmp_path / "main", eval__csv="x")
    url, theirs = place.of("step-1"), tmp_path / "theirs"

    def others() -> list[str]:
        return list(place.others(url, "hf-0123456789ab", TITLE))

    def commit_there(name: str) -> None:
        theirs.mkdir(exist_ok=True)
        (theirs / name).write_text("mine")
        hub.commit(REPO, theirs, [name], branch="step-1", title="theirs")

    commit_there("notes.txt")
    publish_to(place, made)
    assert others() == ["notes.txt"]
    commit_there("eval.md")
    (made / "run.json").write_text('{"run": "/run", "key": "hf-0123456789cd"}')
    place.publish(LocalFolder(str(made)), url, TITLE.replace("ab)", "cd)"), lambda: False)
    assert list(place.others(url, "hf-0123456789cd", TITLE.replace("ab)", "cd)"))) == ["eval.md", "notes.txt"]
    commit_there("run.json")
    assert "run.json" in others()
    del repository.branches["step-1"]
    assert others() == []
    publish_to(place, made)
    assert others() == []


@pytest.mark.parametrize("title", ["Step 1 of the clean-up: our tokenizer (#7)", "Step 2 of run (hf-1)"])
def test_a_commit_that_has_nearly_a_steps_title(hub: FakeHub, made: Path, tmp_path: Path, title: str) -> None:
    """It is somebody's, and what it changed stays on `main`."""
    place = HubPlace(URL, tmp_path)
    publish_to(place, made)
    commit(hub, tmp_path / "theirs", title, tokenizer__json='{"theirs": 1}')
    said = place.publish(LocalFolder(str(made)), place.of("step-2"), "Step 2 of run (hf-0123456789cd)", lambda: True)
    assert "tokenizer.json" in said["note"]
    assert bytes(hub.repositories[REPO].head.files["tokenizer.json"].data) == b'{"theirs": 1}'


def test_a_commit_without_a_title_isnt_ours(hub: FakeHub, tmp_path: Path) -> None:
    hub.add(REPO).writers.add(TOKEN)
    commit(hub, tmp_path / "theirs", title="", config__json="{}")
    with pytest.raises(StorageError, match=r"isn't of this release: config\.json"):
        HubPlace(URL, tmp_path).check_writable()


def test_an_endpoint_without_hashes(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there may be anything, and isn't replaced; nor are two unknown hashes the same."""
    hub.add(REPO).writers.add(TOKEN)
    commit(hub, tmp_path / "theirs", config__json='{"theirs": 1}')
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"x")
    files = {"config.json": b"{}", "model.safetensors": weights}
    monkeypatch.setattr(repository, "_sibling", lambda path, blob, blobs: {"rfilename": path})
    for title in ("ours", "theirs"):
        for attempt in (find_published, publish):
            with pytest.raises(StorageError, match=r"isn't of this release: config\.json"):
                attempt(URL, title, files)
    assert not has_hash(b"", "")


# --- histories --------------------------------------------------------------------------------------------------------


class Denied(Feed):
    """Two versions, both refused; another watcher begins the first meanwhile, and leaves a record that is none."""

    targets: Any = (SimpleNamespace(name="hf", arguments=(), facts={}),)  # pyright: ignore[reportIncompatibleMethodOverride]

    def __init__(self, folder: Path):
        self.output = LocalFolder(str(folder))

    def names(self) -> Any:
        return ["org/model"], []

    def is_wanted(self, name: str) -> bool:
        return True

    def versions(self, name: str) -> Any:
        updated = datetime.datetime(2026, 11, 23, tzinfo=datetime.UTC)
        for commit in ("a", "b"):
            yield SimpleNamespace(name=name, commit=commit, weights=commit, updated=updated, url="", facts={})

    def judge(self, version: Any) -> Any:
        if version.commit == "a":
            begun = self.history(version, self.targets[0])
            begun.store.make()
            begun.store.write("0001.json", b"")
        return ["it is denied"]

    def history(self, version: Any, target: Any) -> History:
        return History(self.output, version.name, key_of(version.name, version.weights, target), ROOT)

    def histories(self, name: str, every: bool = False) -> list[History]:
        return []

    source = plan = foresee = place = is_made = tasks = publish = None  # type: ignore[assignment]


def test_what_another_watcher_left_damaged_harms_itself_only(tmp_path: Path) -> None:
    found = Watcher(SimpleNamespace(attempts=3), [Denied(tmp_path)], Notices([])).once()  # type: ignore[arg-type]
    assert [(finding.commit, finding.state) for finding in found] == [("a", State.FAILED), ("b", State.REFUSED)]
    assert "0001.json: is no record" in found[0].reason


def test_a_mark_that_was_being_made_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its watcher was killed between writing the file and giving it its name: the step isn't settled, nor out of reach of
    `keep` for ever.
    """
    marks = Marks(LocalFolder(str(tmp_path)))
    mark = Mark(1, 2, "3f2a", State.PUBLISHED, "9c01", "hf-1")
    with monkeypatch.context() as killed:
        killed.setattr(os, "link", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        child = os.fork()
        if not child:
            marks.add(mark)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert len(list((tmp_path / MARKS).iterdir())) == 1
    marks.read()
    assert not marks
    assert not marks.settled()
    marks.add(mark)
    marks.read()
    assert list(marks) == [mark]
