"""Watchers and what doesn't belong in an output or a run: a stray folder, record or number harms itself only, and an
output that is moved is the same output.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pairs
import pytest
from servers.clients import asking
from servers.gcs import FakeGcs
from support import begin_run, call
from training_run import write

from weightbeam.formats.staging import MARKER
from weightbeam.formats.storage import StorageError, open_store
from weightbeam.pipelines.watching.config import RunTarget, config_of_run
from weightbeam.pipelines.watching.isolation import Workers
from weightbeam.pipelines.watching.places import PLACE_OWNER
from weightbeam.pipelines.watching.records import RUNS, DamagedRecordError, History, Record, histories
from weightbeam.pipelines.watching.run_feed import RunFeed
from weightbeam.pipelines.watching.runs import list_steps, read_step

pytestmark = pytest.mark.usefixtures("warm_workers")
WHOLE = ["discovered", "planned", "converting", "verified", "published"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A release, and the state with which a run of it begins."""
    return begin_run(tmp_path_factory.mktemp("model"))


def once(run: Path, like: Path, output: Path) -> int:
    return call("watch", "--run", run, "--like", like, "--output", output, "--once")


def states(output: Path) -> dict[str, list[str]]:
    """The states of each history, by its key."""
    found: dict[str, list[str]] = {}
    for file in sorted((output / RUNS).glob("*/*/0*.json")):
        found.setdefault(file.parent.name, []).append(json.loads(file.read_bytes())["state"])
    return found


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_a_folder_whose_number_is_no_steps(place: str, tmp_path: Path) -> None:
    """Of 200 digits, or one more than numbers of steps have: as any other folder."""
    names = ["7", "9" * 18, "1" * 19, "1" * 200, f"checkpoint_{'1' * 200}", "lost+found", "1_000", "\uff11\uff12"]
    with FakeGcs("bucket") as server, asking(server):
        store = open_store(tmp_path if place == "folder" else "gs://bucket/run")
        for name in names:
            (tmp_path / name).mkdir()
            for mark in ("_CHECKPOINT_METADATA", MARKER):
                store.write(f"{name}/{mark}", b"{}")
        assert [seen.folder for seen in list_steps(store)] == ["7", "9" * 18]


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (["7", "best_100", "backup_20261128"], ["7"]),
        (["checkpoint_7", "checkpoint_12"], ["checkpoint_7", "checkpoint_12"]),
        (["best_7", "checkpoint_12"], None),
        (["2b_7", "2b_12"], ["2b_7", "2b_12"]),
        (["checkpoint_7", "7", "8"], ["7", "8"]),
        (["7", "0007", "8"], None),
        (["0007", "0010"], ["0007", "0010"]),
    ],
)
def test_the_steps_of_a_run_have_one_prefix(names: list[str], steps: list[str] | None, tmp_path: Path) -> None:
    """What is none of them is never published for the newest, and never makes `keep` remove one."""
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "_CHECKPOINT_METADATA").write_text("{}")
    store = open_store(tmp_path)
    if steps is None:
        with pytest.raises(StorageError, match="can't both be the run's steps; move what is none of them elsewhere"):
            list_steps(store)
    else:
        assert [seen.folder for seen in list_steps(store)] == steps


def test_a_step_whose_metadata_are_no_file(tmp_path: Path) -> None:
    """A pipe, or a link to a device: a folder as any other, and the steps beside it are found."""
    for name in "789":
        (tmp_path / name).mkdir()
    (tmp_path / "7/_CHECKPOINT_METADATA").write_text("{}")
    os.mkfifo(tmp_path / "8/_CHECKPOINT_METADATA")
    (tmp_path / "9/_CHECKPOINT_METADATA").symlink_to("/dev/zero")
    assert [seen.folder for seen in list_steps(open_store(tmp_path))] == ["7"]


@pytest.mark.parametrize("said", [b"[" * 100_000, b"\xff", b'{"commit_timestamp_nsecs": %s}' % (b"9" * 400)])
def test_metadata_of_a_step_that_say_nonsense(said: bytes, tmp_path: Path) -> None:
    """They are as if they said nothing: its files tell when it was committed."""
    (tmp_path / "7/items").mkdir(parents=True)
    (tmp_path / "7/_CHECKPOINT_METADATA").write_bytes(said)
    (tmp_path / "7/items/_METADATA").write_text("{}")
    run = open_store(tmp_path)
    (seen,) = list_steps(run)
    step = read_step(run, "run", seen)
    assert step
    assert step.updated.timestamp() == pytest.approx((tmp_path / "7/_CHECKPOINT_METADATA").stat().st_mtime)


def test_a_step_of_no_calendars_time(tmp_path: Path) -> None:
    """Files of a year that no calendar has, and metadata that don't say when it was committed: the step is one still."""
    (tmp_path / "7/items").mkdir(parents=True)
    for file in ("7/_CHECKPOINT_METADATA", "7/items/_METADATA"):
        (tmp_path / file).write_text("{}")
        os.utime(tmp_path / file, (10**12, 10**12))
    run = open_store(tmp_path)
    (seen,) = list_steps(run)
    step = read_step(run, "run", seen)
    assert step
    assert step.updated.year in (1970, 2446)  # ext4 keeps no year behind 2446


# --- records ----------------------------------------------------------------------------------------------------------

FIRST = {
    "state": "discovered", "time": "2026-11-23T12:00:00+00:00", "attempt": 0, "commit": "step-3", "target": "hf",
    "weights": "w", "updated": "2026-11-23T11:00:00+00:00", "step": 3, "seen": "s", "source": "/run/3",
}  # fmt: skip
PLANNED: Record = {**FIRST, "state": "planned", "checkpoint": "/out/step-3", "plan": "p"}
WRONG = [
    ("step", 10**30), ("step", True), ("step", -1), ("time", "yesterday"), ("time", "2026-11-23T12:00:00"), ("state", "done"),
    ("attempt", "x"), ("checkpoint", "/out/.."), ("checkpoint", 7), ("weights", None), ("changes", [1]), ("options", 5),
]  # fmt: skip


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """The folder of a history with nothing in it."""
    folder = tmp_path / RUNS / "run" / "hf-1"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("damaged", "why"),
    [
        (b"", "isn't JSON"),
        (b"[1, 2]", "should be a valid dictionary"),
        (b"null", "should be a valid dictionary"),
        (json.dumps(FIRST)[:-9].encode(), "isn't JSON"),
        (b'{"state": "planned", "state": "failed"}', "state"),
        (b"[" * 100_000, "isn't JSON"),
        *(({name: value for name, value in PLANNED.items() if name != lacks}, f"{lacks}: ") for lacks in ("state", "time", "commit", "target")),
        *(({**PLANNED, name: value}, f"{name}: ") for name, value in WRONG),
    ],
)  # fmt: skip
def test_a_record_that_is_none(damaged: bytes | dict[str, Any], why: str, history: Path, tmp_path: Path) -> None:
    """Said with the file's name and what to do, wherever it is read."""
    (history / "0001.json").write_text(json.dumps(FIRST))
    assert len(History(open_store(tmp_path), "run", "hf-1", RUNS).records) == 1
    (history / "0002.json").write_bytes(damaged if isinstance(damaged, bytes) else json.dumps(damaged).encode())
    with pytest.raises(DamagedRecordError, match=r"0002\.json: is no record") as told:
        History(open_store(tmp_path), "run", "hf-1", RUNS)
    assert why in str(told.value)
    assert str(history / "0002.json") in str(told.value)
    assert "delete it" in str(told.value)
    assert "\n" not in str(told.value)
    assert histories(open_store(tmp_path), "run", RUNS) == []


@pytest.mark.parametrize("lacks", ["weights", "updated", "step", "seen", "source"])
def test_a_first_record_that_lacks_a_field(lacks: str, history: Path, tmp_path: Path) -> None:
    (history / "0001.json").write_text(json.dumps({name: value for name, value in FIRST.items() if name != lacks}))
    with pytest.raises(DamagedRecordError, match=f"{lacks}: Field required"):
        History(open_store(tmp_path), "run", "hf-1", RUNS)


@pytest.mark.parametrize("stray", ["9999.json", "00002.json", f"{'1' * 200}.json", "٠٠٠٢.json", "0000.json", "2.json"])
def test_a_stray_number(stray: str, history: Path, tmp_path: Path) -> None:
    """No record: the history is gone on with by its own numbers."""
    (history / "0001.json").write_text(json.dumps(FIRST))
    (history / stray).write_text(json.dumps({**FIRST, "state": "gone"}))
    (known,) = histories(open_store(tmp_path), "run", RUNS)
    known.add("planned", checkpoint="/out/step-3", plan="p")
    assert History(open_store(tmp_path), "run", "hf-1", RUNS).state == "planned"
    assert (history / "0002.json").exists()


@pytest.fixture(scope="module")
def published(model: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two steps, both published into `out`."""
    folder = tmp_path_factory.mktemp("published")
    write(folder / "run", 1, 2, model=model)
    assert once(folder / "run", model[0], folder / "out") == 0
    return folder


@pytest.fixture
def followed(published: Path) -> Iterator[Path]:
    """The same, which the test may change: it is as it was afterwards."""
    aside = shutil.copytree(published / "out", published.with_name(f"{published.name}-aside") / "out", symlinks=True)
    yield published
    # the two steps stay: a copy of them would be other ones
    for path in [*published.glob("*"), *(published / "run").glob("[!12]*")]:
        if path.name != "run":
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    aside.rename(published / "out")
    aside.parent.rmdir()


def begin(run: Path, like: Path, output: Path, step: int, model: tuple[Path, dict[str, Any]]) -> History:
    """A step is written, and begun with; its history."""
    write(run, step, model=model)
    feed = feed_of(run, like, output)
    version = next(iter(feed.versions("run")))
    history = feed.history(version, feed.targets[0])
    history.begin(version, feed.targets[0])
    feed.begun(history)
    return history


def test_other_steps_go_on(
    model: tuple[Path, dict[str, Any]], followed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One with a damaged record is named and left alone, and the next one is published; once the record is gone, so is
    that one.
    """
    run, output = followed / "run", followed / "out"
    begun = begin(run, model[0], output, 3, model)
    record = Path(begun.store.path("0001.json"))
    record.write_bytes(b"")
    write(run, 4, model=model)
    capfd.readouterr()
    assert once(run, model[0], output) == 1
    told = capfd.readouterr()
    assert f"{record}: is no record" in told.err
    assert "Traceback" not in told.err
    assert entries(output) == [".weightbeam", "hf.json", "step-1", "step-2", "step-4"]
    record.unlink()
    assert once(run, model[0], output) == 0
    assert states(output)[begun.key] == WHOLE
    assert (output / "step-3").is_dir()


def test_a_damaged_step_in_a_dry_run(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It would fail, and nothing is recorded by which it isn't tried again."""
    write(tmp_path / "run", 1, model=model)
    shutil.rmtree(tmp_path / "run" / "1" / "items" / "d")
    for path in (tmp_path / "run" / "1" / "items").glob("ocdbt.process_*"):
        shutil.rmtree(path)
    watch = ("watch", "--run", tmp_path / "run", "--like", model[0], "--output", tmp_path / "out", "--once")
    assert call(*watch, "--dry_run") == 1
    said = capfd.readouterr().out
    assert "failed  is tried again at" in said, said


@pytest.mark.parametrize("stray", pairs.some(["records", "marks", "work"], 3))
def test_another_run_goes_on(
    stray: str, model: tuple[Path, dict[str, Any]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where a file lies in the place of a folder of one run."""
    for name in ("a", "b"):
        write(tmp_path / name, 1, model=model)
    path = (
        tmp_path / "out" / {"marks": f"{RUNS}/a/marks", "records": f"{RUNS}/a", "work": "a/hf/.weightbeam/work"}[stray]
    )
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    runs = [{"checkpoints": str(tmp_path / name), "like": str(model[0])} for name in ("a", "b")]
    config = tmp_path / "watch.yaml"
    config.write_text(json.dumps({"output": str(tmp_path / "out"), "runs": runs}))
    for more in (["--once"], ["--once", "--dry_run"], ["--once"]):
        status = call("watch", "--config", config, *more)
        assert (tmp_path / "out" / "b" / "hf" / "step-1" / "run.json").exists()
        assert path.read_text() == "mine"
        told = capfd.readouterr()
        assert "Traceback" not in told.err
        if "--dry_run" not in more:
            assert status == 1
            assert f"a: {path}" in told.err
    path.unlink()
    assert call("watch", "--config", config, "--once") == 0
    assert (tmp_path / "out" / "a" / "hf" / "step-1" / "run.json").exists()


@pytest.mark.parametrize(
    ("own", "said"),
    pairs.some(
        [
            pytest.param(False, b"", id="below the output, cut short"),
            pytest.param(True, b"[]", id="an output of its own, no object"),
        ],
        2,
    ),
)
def test_a_place_that_says_nonsense_of_itself(
    own: bool, said: bytes, model: tuple[Path, dict[str, Any]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its own run says so at each look, and publishes nothing; another run goes on; once it is deleted, so does this."""
    for name in ("a", "b"):
        write(tmp_path / name, 1, model=model)
    output = tmp_path / "out"
    runs: list[dict[str, Any]] = [
        {"checkpoints": str(tmp_path / name), "like": str(model[0]), "targets": [{"name": "hf"}]} for name in ("a", "b")
    ]
    place = tmp_path / "elsewhere" if own else output / "a" / "hf"
    if own:
        runs[0]["targets"][0]["output"] = str(place)
    (place / PLACE_OWNER).parent.mkdir(parents=True)
    (place / PLACE_OWNER).write_bytes(said)
    config = tmp_path / "watch.yaml"
    config.write_text(json.dumps({"output": str(output), "runs": runs}))
    for more in (["--dry_run"], [], []):
        assert call("watch", "--config", config, "--once", *more) == 1
        told = capfd.readouterr()
        assert f"{place / PLACE_OWNER}: " in told.err
        assert "Traceback" not in told.err
        assert (output / "b" / "hf" / "step-1").exists() != bool(more)
        assert (place / PLACE_OWNER).read_bytes() == said
        assert not (place / "step-1").exists()
    (place / PLACE_OWNER).unlink()
    assert call("watch", "--config", config, "--once") == 0
    assert (place / "step-1" / "run.json").exists()


# --- outputs that are moved -------------------------------------------------------------------------------------------


def forget_output(output: Path) -> None:
    """Makes the place one of a version that didn't say there by which output it is known."""
    (output / PLACE_OWNER).write_text(json.dumps({"run": json.loads((output / PLACE_OWNER).read_bytes())["run"]}))


def feed_of(run: Path, like: Path, output: str | Path, **settings: Any) -> RunFeed:
    config = config_of_run(str(run), str(like), str(output), None, {})
    return RunFeed(config, config.runs[0].model_copy(update=settings), Workers(), flat=True)


@pytest.mark.parametrize("old", [False, True], ids=["", "of an earlier version"])
@pytest.mark.parametrize("how", ["moved", "link", "relative"])
def test_an_output_by_another_path(
    how: str, old: bool, model: tuple[Path, dict[str, Any]], followed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was published there is known."""
    output, there = followed / "out", followed / "elsewhere" / "out"
    if old:
        forget_output(output)
    there.parent.mkdir()
    if how == "moved":
        output.rename(there)
    elif how == "link":
        there.symlink_to(output)
    else:
        monkeypatch.chdir(followed / "elsewhere")
        there = Path("../elsewhere/../out")
    feed = feed_of(followed / "run", model[0], there)
    assert feed.is_known()
    assert list(feed.versions("run")) == []
    assert {history.key for history in feed.histories("run", every=True) if feed.target(history)} == set(states(there))


def test_another_output_is_another_target(model: tuple[Path, dict[str, Any]], followed: Path) -> None:
    """One that holds nothing: everything is published there, too, though the records know of the first."""
    target = RunTarget("hf", output=str(followed / "other"))
    feed = feed_of(followed / "run", model[0], followed / "out", targets=[target])
    assert feed.is_known()
    assert feed.targets == [target]
    assert next(iter(feed.versions("run"))).commit == "step-2"


def test_an_output_that_is_moved(model: tuple[Path, dict[str, Any]], followed: Path) -> None:
    """Nothing is published anew beside itself; a step that was planned for where it was is published where it is now;
    what isn't kept is removed there.
    """
    run, output, there = followed / "run", followed / "out", followed / "elsewhere"
    before = states(output)
    begun = begin(run, model[0], output, 3, model)
    facts = next(other.facts for other in histories(open_store(output), "run", RUNS) if other.key in before)
    planned = {name: facts[name] for name in ("plan", "family", "target_bytes")}
    begun.add("planned", checkpoint=str(output / "step-3"), **planned)
    output.rename(there)
    about = {"checkpoints": str(run), "name": "run", "like": str(model[0]), "keep": {"last": 2}}
    about["targets"] = [{"name": "hf", "output": str(there)}]
    (followed / "watch.yaml").write_text(json.dumps({"output": str(there), "runs": [about]}))
    assert call("watch", "--config", followed / "watch.yaml", "--once") == 0
    assert not output.exists()
    assert states(there).keys() == {*before, begun.key}
    assert states(there)[begun.key] == ["discovered", *WHOLE[1:]]
    assert [name for name in entries(there) if name.startswith("step-")] == ["step-2", "step-3"]
    report = json.loads((there / "step-3" / "run.json").read_bytes())
    assert report["before"] == {"step": 2, "url": str(there / "step-2")}
    assert json.loads((there / PLACE_OWNER).read_bytes())["output"] == str(output)
