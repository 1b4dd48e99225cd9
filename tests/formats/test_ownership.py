"""Who may publish: conversions that sleep, wake, are taken over and killed at any operation, in a folder and in a
bucket; and commands that write releases, there and to the hub.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from release_schedules import ReleaseWorld, Stepping, release_schedules
from schedules import World, schedules

from weightbeam.formats.orbax import find_items
from weightbeam.formats.staging import GROWING, MARKER, PLAN, FolderStaging, TakenOverError, lease, staging_at
from weightbeam.formats.staging import folder as folder_staging
from weightbeam.formats.staging.folder import new_id
from weightbeam.formats.storage import StorageError, open_store, renaming
from weightbeam.formats.storage.renaming import UnsupportedError, exchange, link_new, rename_new


def swaps() -> bool:
    """Whether the file system swaps two files in one step; macOS doesn't (`tests/elsewhere.py`)."""
    with tempfile.TemporaryDirectory() as folder:
        one, other = Path(folder, "one"), Path(folder, "other")
        one.touch(), other.touch()
        with contextlib.suppress(UnsupportedError):
            exchange(one, other)
            return True
        return False


swapping = pytest.mark.skipif(not swaps(), reason="replacing takes two steps here: 'folder in two'")
FOLDER = pytest.param("folder", marks=swapping)
KINDS = [FOLDER, "folder in two", "bucket"]
FLAGS = st.sampled_from([(False, False), (True, False), (False, True), (True, True)])  # --resume, --overwrite


class Conversions(RuleBasedStateMachine):
    """What is published is whole, of one plan, and only replaced by one that was asked to; `World.check` sees to it
    after every operation.
    """

    kind = "folder"

    @initialize(database=st.booleans())
    def begin(self, database: bool) -> None:
        self.world = self.make_world(database)

    def make_world(self, database: bool) -> Any:
        """An output of this kind, and what is at work on it."""
        return World(self.kind, database)

    @property
    def alive(self) -> list[Any]:
        return [process for process in self.world.processes if not process.over]

    @precondition(lambda self: len(self.alive) < 3)
    @rule(plan=st.sampled_from("AB"), flags=FLAGS, stale=st.booleans(), steps=st.integers(1, 100))
    def start(self, plan: str, flags: tuple[bool, bool], stale: bool, steps: int) -> None:
        if stale:
            self.world.age()
        self.world.run(self.world.start(plan, *flags), steps)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), steps=st.sampled_from([1, 2, 5, 20, 60, 1000]))
    def wake(self, data: st.DataObject, steps: int) -> None:
        self.world.run(data.draw(st.sampled_from(self.alive)), steps)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        self.world.kill(data.draw(st.sampled_from(self.alive)))

    @property
    def submitted(self) -> list[Any]:
        return [process for process in self.alive if "staging" in process.about]

    @precondition(lambda self: self.submitted)
    @rule(data=st.data(), steps=st.sampled_from([1, 2, 5, 1000]))
    def stop(self, data: st.DataObject, steps: int) -> None:
        self.world.run(self.world.stop(data.draw(st.sampled_from(self.submitted))), steps)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                self.world.end()
            finally:
                self.world.close()


def run_machine(machine: type[Conversions], kind: str, examples: int) -> None:
    """As many schedules, the same each time."""
    few = settings(
        max_examples=examples,
        stateful_step_count=10,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    run_state_machine_as_test(type("Machine", (machine,), {"kind": kind}), settings=few)


@pytest.mark.parametrize("kind", KINDS)
def test_conversions_that_sleep_and_wake(kind: str) -> None:
    run_machine(Conversions, kind, 30)


@pytest.mark.parametrize("kind", KINDS)
def test_the_invariant_would_notice(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a claim, a late process publishes what isn't its own, or destroys what another one has published: some
    schedule shows it.
    """
    monkeypatch.setattr("weightbeam.formats.staging.FolderStaging._new_name", lambda self: f"{self.name}.0{GROWING}")
    monkeypatch.setattr("weightbeam.formats.staging.BucketStaging.check", lambda self: None)
    monkeypatch.setattr("uuid.uuid4", lambda: type("Same", (), {"hex": "0" * 32}))
    with pytest.raises(AssertionError):
        list(schedules(kind, range(200)))


# --- releases ---------------------------------------------------------------------------------------------------------


class Releases(Conversions):
    """The same machine, of commands that write releases."""

    def make_world(self, database: bool) -> Any:
        return ReleaseWorld(self.kind)


@pytest.mark.parametrize("kind", [FOLDER, "bucket", "hub"])
def test_releases_that_sleep_and_wake(kind: str) -> None:
    run_machine(Releases, kind, 15)


LOST = {
    64766: "whoever was deleting what a stopped export had there was overtaken by one that gave up: it was nobody's then",
    17727: "whoever was overtaken staged his plan beside what had been published, and was killed: that was nobody's then",
    200097: "whoever was overtaken when he had staged his plan removed it, though the other one went on with it",
    302408: "whoever went on with a plan that was gone by then staged it where nobody looks",
}


@pytest.mark.parametrize("seed", LOST, ids=LOST.get)
def test_what_lies_in_a_bucket_is_known_again(seed: int) -> None:
    """Schedules after which `--overwrite` was once refused, as if others had put there what an export had."""
    assert sum(1 for _ in release_schedules("bucket", [seed])) == 1


@pytest.mark.landing  # as many schedules as it takes until one shows it
@pytest.mark.parametrize(("without", "first"), [("a parent", 1509), ("a refusal", 0)])  # the 1511th does, and the 3rd
def test_the_invariant_of_releases_would_notice(without: str, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some schedule shows what is missing: a commit that doesn't name its parent replaces what it never saw, or makes
    one twice; and what others published is replaced without being asked to.
    """
    if without == "a refusal":
        monkeypatch.setattr("weightbeam.formats.targets.hub._refuse_others", lambda *_: None)
    else:
        found = Stepping.__getattr__

        def forget_parents(self: Stepping, name: str) -> Any:
            called = found(self, name)
            if name != "create_commit":
                return called
            return lambda *arguments, **how: called(*arguments, **how | {"parent_commit": None})

        monkeypatch.setattr(Stepping, "__getattr__", forget_parents)
    with pytest.raises(AssertionError):
        list(release_schedules("hub", range(first, 2000)))


# --- the lease --------------------------------------------------------------------------------------------------------


def test_a_lease_is_judged_by_the_file_systems_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is two minutes ahead throws nobody out."""
    os.symlink(json.dumps(dict(owner=1, host="elsewhere", processes="b", pid=1, process="1")), tmp_path / "lease")
    now = time.time()
    monkeypatch.setattr(lease.time, "time", lambda: now + 2 * lease.STALE)
    with pytest.raises(lease.HeldError, match="elsewhere"), lease.hold(open_store(tmp_path), "lease"):
        pass


def test_a_lease_without_symbolic_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on exFAT: a file."""
    monkeypatch.setattr(os, "symlink", _refuse)
    with lease.hold(open_store(tmp_path), "lease"):
        assert (tmp_path / "lease").is_file()
        with (
            pytest.raises(lease.HeldError, match=f"process {os.getpid()} on "),
            lease.hold(open_store(tmp_path), "lease"),
        ):
            pass
    assert list(tmp_path.iterdir()) == []


def _refuse(*_: Any, **__: Any) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


# --- renames ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("native", [pytest.param(True, marks=swapping), False])
def test_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    if not native:
        monkeypatch.setattr(renaming, "UNSUPPORTED", set(range(200)))
    one, other = tmp_path / "one", tmp_path / "other"
    for path in (one, other):
        path.mkdir()
        (path / path.name).touch()
    if native:
        exchange(one, other)
        assert (one / "other").exists()
        with pytest.raises(FileNotFoundError):
            exchange(one, tmp_path / "none")
    else:
        with pytest.raises(UnsupportedError):
            exchange(one, tmp_path / "none")
    if native:
        with pytest.raises(FileExistsError):
            rename_new(one, other)
    rename_new(one, tmp_path / "new")
    assert (tmp_path / "new").is_dir()


def test_a_file_that_is_created_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", _refuse)
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    link_new(tmp_path / "a", tmp_path / "there")
    with pytest.raises(FileExistsError):
        link_new(tmp_path / "b", tmp_path / "there")
    assert (tmp_path / "there").read_text() == "a"
    assert open_store(tmp_path).create("x", b"first")
    assert not open_store(tmp_path).create("x", b"second")
    assert (tmp_path / "x").read_bytes() == b"first"


# --- places -----------------------------------------------------------------------------------------------------------


def complete(staging: FolderStaging) -> Path:
    """Stages a plan and makes it look complete."""
    staging.create(b"plan")
    (Path(staging.items) / "_METADATA").write_text("{}")
    staging.mark()
    return Path(staging.checkpoint)


def test_a_place_that_was_taken_over_cant_be_published(tmp_path: Path) -> None:
    """Not though all is there, and not though a late writer makes the folder anew; the good old one stays."""
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "old").touch()
    old, new = (staging_at(tmp_path, 0, "plan") for _ in range(2))
    assert isinstance(old, FolderStaging)
    place = complete(old)
    with new.hold():
        assert new.exists()
        assert not place.exists()
        for again in (False, True):
            if again:
                (place / "items" / "ocdbt.process_x").mkdir(parents=True)
            with pytest.raises(TakenOverError):
                old.publish(overwrite=True)
            with pytest.raises(TakenOverError):
                old.enter(0, {})
        assert [path.name for path in (tmp_path / "0").iterdir()] == ["old"]
        new.publish(overwrite=True)
    assert (tmp_path / "0" / MARKER).exists()
    assert not (tmp_path / "0" / PLAN).exists()


@swapping
def test_a_stop_before_who_took_over_has_claimed() -> None:
    """The lease is another's, and the place isn't yet: the workers of who says "stopped" published all the same."""
    assert list(schedules("folder", [3270])) == [3270]


@swapping
def test_a_stop_between_two_looks() -> None:
    """What is published has another name by the second look, and had none of the two that are looked for at the first."""
    assert list(schedules("folder", [6683])) == [6683]


@pytest.mark.parametrize("publishing", [False, True])
def test_who_has_lost_the_lease_gives_up_his_own_place_alone(
    publishing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever lies beside it is another's; also while his worker is about to publish."""
    old, new = staging_at(tmp_path, 0, "a"), staging_at(tmp_path, 0, "b")
    with old.hold():
        old.create(b"a")
        old.mark()
        os.utime(tmp_path / "0.weightbeam-lease", (0, 0), follow_symlinks=False)
        with lease.hold(old.output, "0.weightbeam-lease"):
            assert isinstance(new, FolderStaging)
            new._folder = new._new_name()  # it has begun, and hasn't claimed what was there
            new.create(b"b")
            assert old.is_staged()
            if publishing:
                exchanged = folder_staging.rename_new

                def stopped_before(source: Path, target: Path) -> None:
                    old.stop()
                    exchanged(source, target)

                monkeypatch.setattr(folder_staging, "rename_new", stopped_before)
                with pytest.raises(TakenOverError):
                    old.publish()
            else:
                old.stop()
                with pytest.raises(TakenOverError):
                    old.check()
    assert not (tmp_path / "0").exists()
    assert new.is_staged()


def test_what_came_to_the_place_meanwhile_stays(tmp_path: Path) -> None:
    """Without `--overwrite`, too, it is named in words, and what was made can be gone on with."""
    staging = staging_at(tmp_path, 0, "plan")
    (complete(staging) / PLAN).write_bytes(gzip.compress(json.dumps({"hash": "0" * 64}).encode()))
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "theirs").touch()
    with pytest.raises(StorageError, match="isn't what it was as this began, and stays"):
        staging.publish()
    assert os.listdir(tmp_path / "0") == ["theirs"]
    assert staging.is_staged()


@pytest.mark.parametrize("failing", ["the output", "the plan", "the result"])
def test_what_fails_once_it_is_published_is_a_warning(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody is told that the command failed; what was replaced may be needed, and the next command removes it."""
    final = tmp_path / "0"
    final.mkdir()
    staging = staging_at(tmp_path, 0, "plan")
    assert isinstance(staging, FolderStaging)
    (complete(staging) / PLAN).write_bytes(gzip.compress(json.dumps({"hash": "0" * 64}).encode()))
    sync, unlink = folder_staging.sync_folder, Path.unlink
    places = {"the output": tmp_path, "the plan": final / PLAN, "the result": final}

    def fails(path: Path) -> None:
        if path == places[failing]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def failing_sync(path: Path) -> None:
        fails(path)
        sync(path)

    def failing_unlink(path: Path, missing_ok: bool = False) -> None:
        fails(path)
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(folder_staging, "sync_folder", failing_sync)
        patch.setattr(Path, "unlink", failing_unlink)
        staging.publish(overwrite=True)
    assert (final / MARKER).exists()
    assert [*tmp_path.glob("0.replaced-*")]
    assert f"{final} is published; " in caplog.text
    with staging_at(tmp_path, 0).hold():
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    assert not (final / PLAN).exists()


def test_left_overs_are_cleaned(tmp_path: Path) -> None:
    """What was replaced goes when its successor is there, and comes back when it isn't; files of similar names stay."""
    theirs = ["0.replaced-0123abcd", "0.replaced-mine", f"10.replaced-{new_id()}"]
    for name in (f"0.replaced-{new_id()}", *theirs):
        (tmp_path / name).mkdir()
        (tmp_path / name / "old").touch()
    with staging_at(tmp_path, 0).hold():
        assert (tmp_path / "0" / "old").exists()
    (tmp_path / f"0.replaced-{new_id()}").mkdir()
    with staging_at(tmp_path, 0).hold():
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", *theirs]


@pytest.mark.parametrize("name", [f"0.0123456789abcdef{GROWING}", "0.replaced-0123abcd", f"0{GROWING}"])
def test_nothing_unpublished_is_taken_for_a_checkpoint(tmp_path: Path, name: str) -> None:
    """By its own name, by its item's, or beside a step."""
    (tmp_path / name / "items").mkdir(parents=True)
    (tmp_path / name / "items" / "_METADATA").write_text("{}")
    for place in (tmp_path, tmp_path / name, tmp_path / name / "items"):
        with pytest.raises(StorageError, match="wasn't published"):
            find_items(place)
    (tmp_path / "0" / "items").mkdir(parents=True)
    (tmp_path / "0" / "items" / "_METADATA").write_text("{}")
    assert find_items(tmp_path).parent.name == "0"


@pytest.mark.parametrize("name", ["a\\b", "x.__lock", "x.__lock/y", "\udcff"])
def test_places_that_tensorstore_cant_write(tmp_path: Path, name: str) -> None:
    with pytest.raises(StorageError, match="no checkpoint can lie there"):
        open_store(tmp_path / name).kvstore()


def test_paths_are_resolved_as_the_system_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a/b")
    monkeypatch.chdir(tmp_path / "a")
    assert open_store("../c").url == f"{tmp_path}/c"
    assert open_store(f"{tmp_path}/link/../c").url == f"{tmp_path}/a/c"
    assert open_store(f"{tmp_path}/link").url == f"{tmp_path}/link"
