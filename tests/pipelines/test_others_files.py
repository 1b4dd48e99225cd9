"""Files and folders of others, in the place of an output or beside it, stay as they are."""

from __future__ import annotations

import contextlib
import errno
import gzip
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pairs
import pytest
from servers.clients import asking
from servers.gcs import FakeGcs
from support import call, convert

import weightbeam as wb
from weightbeam.formats.orbax import others_in
from weightbeam.formats.release.files import CONFIG
from weightbeam.formats.staging import ASIDE, PLAN, BucketStaging, FolderStaging, lease
from weightbeam.formats.staging.folder import new_id
from weightbeam.formats.storage import File, LocalFolder, StorageError, open_store
from weightbeam.formats.storage.bucket import Bucket
from weightbeam.formats.targets.release_bucket import ReleaseBucket
from weightbeam.formats.targets.release_place import ReleaseFolder
from weightbeam.transforms.planning.inputs import MOST_BYTES, MOST_VALUES, unpack_inputs
from weightbeam.transforms.planning.transfer import Transfer

PLACES = ["folder", "bucket"]
MODEL = ("--maxtext_model", "llama2-7b")


@pytest.fixture(scope="module")
def checkpoint(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("others")
    convert(source, folder / "ckpt", *MODEL)
    return folder / "ckpt"


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "out")
        return
    with FakeGcs("bucket") as server, asking(server):
        yield "gs://bucket/run/out"


@pytest.mark.parametrize(
    ("place", "shards"), pairs.each(PLACES, [(), ("--max_shard_size", "20KB")]), indirect=["place"]
)
def test_what_others_put_into_a_release_is_named(
    checkpoint: Path, place: str, shards: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    """And nothing is deleted; without it the release is replaced."""
    others = ("model.gguf", "precious.txt", "sub/p")
    store = open_store(place)
    assert call("export", checkpoint, place, *shards) == 0
    for name in others:
        store.write(name, b"mine")
    assert call("export", checkpoint, place, "--overwrite") == 2
    assert f"and --overwrite would delete: {', '.join(others)}; move it away" in capfd.readouterr().err
    for name in others:
        assert store.read(name) == b"mine"
        store.delete(name)
    store.write("README.md", b"mine")
    capfd.readouterr()
    assert call("export", checkpoint, place, "--overwrite") == 0
    told = " ".join(capfd.readouterr().err.split())
    assert f"replaces {place}, which was made of " in told
    assert "; changed in it since: README.md" in told


@pytest.mark.parametrize(
    ("place", "shards"), pairs.each(PLACES, [(), ("--max_shard_size", "20KB")]), indirect=["place"]
)
def test_a_copy_of_the_weights_beside_them_is_named(
    checkpoint: Path, place: str, shards: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    """Such as averaged ones, whose tensors have the same names: it was taken for a shard of the release."""
    store = open_store(place)
    assert call("export", checkpoint, place, *shards) == 0
    weights = next(name for name in store.names() if name.endswith(".safetensors"))
    store.write("ema.safetensors", store.read(weights))
    capfd.readouterr()
    assert call("export", checkpoint, place, "--overwrite") == 2
    assert "and --overwrite would delete: ema.safetensors; move it away" in capfd.readouterr().err
    assert store.read("ema.safetensors") == store.read(weights)


@pytest.mark.parametrize(
    ("place", "record"),
    pairs.each(PLACES, [{"plan": "x"}, {"plan": "0" * 64}, {"plan": "0" * 64, "digests": {"a": "mine"}}]),
    indirect=["place"],
)
def test_what_has_no_record_of_ours_is_no_release(
    checkpoint: Path, place: str, record: dict, capfd: pytest.CaptureFixture[str]
) -> None:
    store = open_store(place)
    if isinstance(store, LocalFolder):
        store.folder.mkdir()
    for name, data in {"weightbeam.json": json.dumps(record).encode(), "precious.txt": b"mine"}.items():
        store.write(name, data)
    assert call("export", checkpoint, place, "--overwrite") == 2
    assert "isn't a release that Weightbeam wrote" in capfd.readouterr().err
    assert store.read("precious.txt") == b"mine"


@pytest.mark.parametrize("files", [5, [[1]], None, "config.json"])
def test_a_record_whose_files_are_none(
    checkpoint: Path, tmp_path: Path, files: object, capfd: pytest.CaptureFixture[str]
) -> None:
    """It isn't ours, and that is said."""
    assert call("export", checkpoint, tmp_path / "out") == 0
    record = tmp_path / "out" / "weightbeam.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"files": files}))
    capfd.readouterr()
    for more in ((), ("--dry_run",)):
        assert call("export", checkpoint, tmp_path / "out", "--overwrite", *more) == 2
        assert "isn't a release that Weightbeam wrote" in capfd.readouterr().err


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_a_step_is_replaced_but_for_what_others_put_there(
    source: Path, place: str, capfd: pytest.CaptureFixture[str]
) -> None:
    store, command = open_store(place), ("convert", source, place, *MODEL)
    assert call(*command) == 0
    assert call(*command, "--overwrite") == 0
    for name in ("0/precious.txt", "0/items/precious.txt"):
        store.write(name, b"mine")
        assert call(*command, "--overwrite") == 2
        assert f"would delete: {name.removeprefix('0/')}; move it away" in capfd.readouterr().err
        assert store.read(name) == b"mine"
        store.delete(name)


@pytest.mark.parametrize("command", ["convert", "export"])
@pytest.mark.parametrize("place", ["bucket"], indirect=True)
def test_a_plan_that_a_sleeper_staged_beside_what_is_whole(
    source: Path, checkpoint: Path, place: str, command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """It was taken over before it staged its plan, and died right after: what is published is replaced, and what others
    put there is still named.
    """
    arguments = (source, place, *MODEL) if command == "convert" else (checkpoint, place)
    name = "0" if command == "convert" else "out"
    beside = open_store(place if command == "convert" else place.removesuffix("/out"))
    assert call(command, *arguments) == 0
    beside.write(f"{name}.weightbeam/{'5' * 16}/plan.json.gz", b"staged")
    beside.write(f"{name}/precious.txt", b"mine")
    assert call(command, *arguments, "--overwrite") == 2
    assert "would delete: precious.txt; move it away" in capfd.readouterr().err
    beside.delete(f"{name}/precious.txt")
    assert call(command, *arguments, "--overwrite") == 0
    assert not beside.list(f"{name}.weightbeam/")


@pytest.mark.parametrize(
    "name",
    pairs.some(
        [
            "precious.txt",
            "items/precious.txt",
            "items/d/thesis.txt",
            ".mine",
            "plan.json.gz",
            "items/eval/results.csv",
            "items/array_metadatas/process_7",
            "items/.mine",
            "items/_mine",
            "items/source/model.safetensors",
        ],
        2,
    ),
)
def test_what_others_put_into_a_step_is_named(
    source: Path, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Files, at whatever place, and an item that another one saved beside ours."""
    step = convert(source, tmp_path / "out", *MODEL)
    (step / "metrics").mkdir()
    for mine in (step / "metrics" / "metrics", step / name):
        mine.parent.mkdir(exist_ok=True)
        mine.write_text("mine")
    command = ("convert", "--source", source, "--output", tmp_path / "out", *MODEL, "--overwrite")
    assert call(*command) == 2
    assert f"would delete: {', '.join(sorted(['metrics/', name]))}; move it away" in capfd.readouterr().err
    assert mine.read_text() == "mine"
    mine.unlink()
    shutil.rmtree(step / "metrics")
    assert call(*command) == 0


OWN_FORMS = (
    ["--use_ocdbt", "false"],
    ["--use_ocdbt", "false", "--use_zarr3", "false"],
    ["--virtual", "--link", "copy", "--sha256"],
)


@pytest.mark.parametrize("options", [[], *OWN_FORMS], ids=" ".join)
def test_a_checkpoint_of_ours_holds_nothing_of_others(source: Path, tmp_path: Path, options: list[str]) -> None:
    """In each form, so that `--overwrite` does what is asked for; beside a chunk a note is somebody's."""
    step = convert(source, tmp_path / "out", *MODEL, *options)
    assert others_in(LocalFolder(str(step))) == []
    chunk = next(path for path in sorted((step / "items").rglob("*")) if path.is_file() and path.parent.name != "items")
    chunk.with_name("notes.txt").write_text("mine")
    assert others_in(LocalFolder(str(step))) == [str(chunk.with_name("notes.txt").relative_to(step))]
    chunk.with_name("notes.txt").unlink()
    assert call("convert", source, tmp_path / "out", *MODEL, *options, "--overwrite") == 0


def test_items_of_a_training_state_are_ours_once_they_were_copied(source: Path, tmp_path: Path) -> None:
    """With handlers in the metadata or without, by the record; of somebody's checkpoint they are named when it goes."""
    step = convert(source, tmp_path / "ckpt", *MODEL)
    for name in ("iter", "more"):
        (step / name).mkdir()
        (step / name / "process_0.json").write_text("{}")
    assert call("reshard", tmp_path / "ckpt", tmp_path / "out", "--mesh", "fsdp=2") == 0
    copy = tmp_path / "out" / "0"
    assert json.loads((copy / "conversion.json").read_text())["carried"] == ["iter", "more"]
    assert (copy / "iter" / "process_0.json").read_text() == "{}"
    assert others_in(LocalFolder(str(copy))) == []
    (copy / "third").mkdir()
    (copy / "third" / "x").touch()
    assert others_in(LocalFolder(str(copy))) == ["third/"]


def test_other_items_are_named_when_a_checkpoint_goes(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of one that isn't ours, which `--overwrite` replaces as a whole."""
    step = convert(source, tmp_path / "out", *MODEL)
    for path in step.glob("*"):
        if path.name != "items":
            path.unlink()
    (step / "metrics").mkdir()
    (step / "metrics" / "metrics").touch()
    assert call("convert", source, tmp_path / "out", *MODEL, "--overwrite") == 0
    assert f"replaces {step}, with metrics in it" in " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize("place", ["bucket"], indirect=True)
@pytest.mark.parametrize("command", ["convert", "export"])
def test_what_others_put_where_a_stopped_command_writes(
    source: Path,
    checkpoint: Path,
    place: str,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A bucket has no place beside: `--overwrite` begins anew in the folder itself."""
    words = ("convert", source, place, *MODEL) if command == "convert" else ("export", checkpoint, place)
    store = open_store(place)
    name = "0/precious.txt" if command == "convert" else "precious.txt"
    with monkeypatch.context() as patched:
        patched.setattr("weightbeam.formats.orbax.ocdbt.merge", lambda *_: 1 / 0)
        patched.setattr("weightbeam.formats.targets.release_bucket.compose", lambda *_: 1 / 0)
        assert call(*words) == 1
    store.write(name, b"mine")
    capfd.readouterr()
    assert call(*words, "--overwrite") == 2
    assert "would delete: precious.txt; move it away" in capfd.readouterr().err
    assert store.read(name) == b"mine"
    store.delete(name)
    assert call(*words, "--overwrite") == 0


@pytest.mark.parametrize("place", ["bucket"], indirect=True)
@pytest.mark.parametrize("at", ["units", "publication"])
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("database", ("items/precious.txt", "items/eval/results.csv", "eval/results.csv")),
        ("folders", ("items/precious.txt", "items/eval/results.csv", "eval/results.csv")),
        ("release", ("tokenizer.json", "model-00001-of-00002.safetensors", "sub/config.json")),
    ],
)
def test_what_others_put_among_what_a_stopped_command_wrote(
    source: Path,
    checkpoint: Path,
    place: str,
    kind: str,
    names: tuple[str, ...],
    at: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """However far it came, and under whatever name: it is named, and nothing is deleted; what is its own goes."""
    more = ("--use_ocdbt", "false") if kind == "folders" else ()
    words = ("export", checkpoint, place) if kind == "release" else ("convert", source, place, *MODEL, *more)
    store = open_store(place) if kind == "release" else open_store(place) / "0"
    with monkeypatch.context() as patched:
        if at == "units":
            patched.setattr(Transfer, "assemble", lambda *_: 1 / 0)
        else:
            patched.setattr(BucketStaging, "put", stop)
        assert call(*words) == 1
    assert call(*words, "--dry_run", "--overwrite") == 0
    for name in names:
        store.write(name, b"mine")
    capfd.readouterr()
    assert call(*words, "--overwrite") == 2
    said = capfd.readouterr().err
    assert all(name in said for name in names), said
    for name in names:
        assert store.read(name) == b"mine"
        store.delete(name)
    assert call(*words, "--overwrite") == 0


def stop(self: BucketStaging, name: str, data: bytes, put=BucketStaging.put) -> None:
    if name == self.marker:
        raise StorageError("no more")
    put(self, name, data)


@pytest.mark.parametrize("place", ["bucket"], indirect=True)
@pytest.mark.parametrize(
    ("stopped", "names"), [("before", ("README.md", "config.json", "model.safetensors")), ("behind", ("config.json",))]
)
def test_another_model_where_an_export_was_stopped(
    checkpoint: Path,
    place: str,
    stopped: str,
    names: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Before its files were there, or behind that: they have the names of the export's, and aren't those."""
    words, store = ("export", checkpoint, place), open_store(place)
    with monkeypatch.context() as patched:
        if stopped == "before":
            patched.setattr("weightbeam.formats.targets.release_bucket.compose", lambda *_: 1 / 0)
        else:
            patched.setattr(BucketStaging, "put", stop)
        assert call(*words) == 1
    for name in names:
        store.write(name, b"mine")
    listed = ", ".join(names)
    for options, said in (
        (["--resume"], f"holds what isn't of the stopped export that grows there: {listed}; move it away"),
        (
            ["--resume", "--overwrite"],
            f"holds what isn't of the stopped export that grows there: {listed}; move it away",
        ),
        (["--overwrite"], f"and --overwrite would delete: {listed}; move it away"),
    ):
        capfd.readouterr()
        assert call(*words, *options) == 2
        assert said in capfd.readouterr().err
    for name in names:
        assert store.read(name) == b"mine"
        store.delete(name)
    assert call(*words, "--resume") == 0
    assert call("verify", checkpoint, place) == 0


@pytest.mark.parametrize("late", [False, True])
def test_what_others_put_where_a_release_grows_is_not_published(
    checkpoint: Path, tmp_path: Path, late: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a folder only the command works where it grows; transformers would load an adapter whose config lies there."""
    words, out = ("export", checkpoint, tmp_path / "out"), tmp_path / "out"
    others = ["adapter_config.json", "pytorch_model.bin", "sub/y", "additional_chat_templates/x.jinja", "precious.txt"]
    seal = ReleaseFolder.seal

    def put(folder: Path) -> None:
        for name in others:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(b"mine")

    def meet(self: ReleaseFolder, *arguments: Any) -> None:
        seal(self, *arguments)
        put(Path(self.checkpoint.url))
        if not late:
            raise StorageError("no more")

    with monkeypatch.context() as patched:
        patched.setattr(ReleaseFolder, "seal", meet)
        assert call(*words) == (0 if late else 1)
    if not late:
        assert call(*words, "--resume") == 0
    said = " ".join(capfd.readouterr().err.split())
    assert all(f"{name} isn't of the release, and is removed" in said for name in others if late or "chat" not in name)
    assert not any((out / Path(name).parts[0]).exists() for name in others)
    assert call("verify", checkpoint, out) == 0


@pytest.mark.parametrize("place", ["bucket"], indirect=True)
@pytest.mark.parametrize("late", [False, True])
def test_another_model_that_comes_while_an_export_grows(
    checkpoint: Path, place: str, late: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before the last look at the place, or between that and the copies."""
    words, store = ("export", checkpoint, place), open_store(place)
    where, name = (Bucket, "copy_new") if late else (ReleaseBucket, "seal")
    function = getattr(where, name)

    def meet(self: object, *arguments: object) -> None:
        store.write(CONFIG, b"mine")
        function(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(where, name, meet)
        assert call(*words) == 1
    said = f"{place}/{CONFIG}: somebody has put it there" if late else f"others have put there meanwhile: {CONFIG}"
    assert f"{said}; move it away" in capfd.readouterr().err
    assert store.read(CONFIG) == b"mine"
    assert late or [file.name for file in store.list()] == [CONFIG]
    store.delete(CONFIG)
    assert call(*words, "--resume") == 0


@pytest.mark.parametrize("place", ["bucket"], indirect=True)
def test_another_checkpoint_where_a_conversion_was_stopped(
    source: Path, checkpoint: Path, place: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`--resume` writes nothing into it; `--overwrite` replaces one that is whole, and says so."""
    words = ("convert", source, place, *MODEL, "--save_dtype", "float32")
    store, theirs = open_store(place) / "0", LocalFolder(f"{checkpoint}/0")
    with monkeypatch.context() as patched:
        patched.setattr(Transfer, "assemble", lambda *_: 1 / 0)
        assert call(*words) == 1
    files = [file.name for file in theirs.list() if file.name not in ("conversion.json", "commit_success.txt")]
    for name in files:
        store.write(name, theirs.read(name))
    before = store.list()

    def refused(option: str) -> str:
        capfd.readouterr()
        assert call(*words, option) == 2
        assert store.list() == before
        return capfd.readouterr().err

    assert "holds what isn't of the stopped conversion that grows there: _CHECKPOINT_METADATA" in refused("--resume")
    assert "what others have put there, and --overwrite would delete: _CHECKPOINT_METADATA" in refused("--overwrite")
    store.write("commit_success.txt", b"mine")
    before = store.list()
    assert "holds what isn't of the stopped conversion that grows there: _CHECKPOINT_METADATA" in refused("--resume")
    assert call(*words, "--overwrite") == 0
    assert f"replaces {store}" in " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize("place", ["bucket"], indirect=True)
def test_another_checkpoint_that_comes_while_a_conversion_runs(
    source: Path, checkpoint: Path, place: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """None of the conversion's own files is put into it, and what is done is kept."""
    words = ("convert", source, place, *MODEL, "--save_dtype", "float32")
    store, theirs = open_store(place) / "0", LocalFolder(f"{checkpoint}/0")
    files = [file.name for file in theirs.list() if file.name != "conversion.json"]
    assemble = Transfer.assemble

    def meet(self: Transfer, *arguments: Any) -> None:
        for name in files:
            store.write(name, theirs.read(name))
        assemble(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Transfer, "assemble", meet)
        assert call(*words) == 1
    assert "others have put there meanwhile: _CHECKPOINT_METADATA" in capfd.readouterr().err
    assert not [file.name for file in store.list() if file.name not in files and "ocdbt.process_" not in file.name]
    for name in files:
        assert store.read(name) == theirs.read(name)
        store.delete(name)
    assert call(*words, "--resume") == 0


@pytest.mark.parametrize("place", ["bucket"], indirect=True)
def test_what_a_stopped_conversion_put_is_put_anew(
    source: Path, place: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With other bytes: the index, for one, may have others in each attempt."""
    words = ("convert", source, place, *MODEL)
    with monkeypatch.context() as patched:
        patched.setattr(BucketStaging, "put", lambda self, name, data: stop(self, name, data + b" "))
        assert call(*words) == 1
    assert open_store(place).read("0/items/manifest.ocdbt").endswith(b" ")
    assert call(*words, "--resume") == 0, capfd.readouterr().err
    assert call("verify", source, place) == 0


@pytest.mark.parametrize("place", ["bucket"], indirect=True)
@pytest.mark.parametrize("command", ["convert", "export"])
@pytest.mark.parametrize("before", ["published", "stopped"])
@pytest.mark.parametrize("deletions", [1, 2, 4])
def test_what_others_put_where_something_was_being_deleted(
    source: Path,
    checkpoint: Path,
    place: str,
    command: str,
    before: str,
    deletions: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """By a command that was killed in the middle: the next one deletes what that was about to, and nothing else."""
    words = ("convert", source, place, *MODEL) if command == "convert" else ("export", checkpoint, place)
    store = open_store(place) / "0" if command == "convert" else open_store(place)
    with monkeypatch.context() as patched:
        if before == "stopped":
            patched.setattr(Transfer, "assemble", lambda *_: 1 / 0)
        assert call(*words) == (before == "stopped")
    delete_all, left = Bucket.delete_all, [deletions]

    def killed(self: Bucket, files: Iterable[File]) -> None:
        held = list(files)
        if "claim." not in self.url and held:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
        delete_all(self, held)

    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "delete_all", killed)
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            patched.setattr(os, "_exit", sys.exit)
            call(*words, "--overwrite")
    names = ("precious.txt", "items/precious.txt", "tokenizer.json")
    for name in names:
        store.write(name, b"mine")
    capfd.readouterr()
    assert call(*words, "--overwrite") == 2
    assert all(store.read(name) == b"mine" for name in names)
    for name in names:
        store.delete(name)
    assert call(*words, "--overwrite") == 0, capfd.readouterr().err
    assert not [name for name in open_store(place).parent.entries() if "deleting" in name]


@pytest.mark.parametrize("place", ["bucket"], indirect=True)
def test_a_deletion_that_somebody_else_ended(
    checkpoint: Path, place: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A command that lost its lease, slept, and wakes takes the claim of one that has deleted the plan, and not yet
    what was put where it will be read: the next command knows that it is ours.
    """
    words, copy_new = ("export", checkpoint, place), Bucket.copy_new

    def stop_halfway(self: Bucket, source: Bucket, file: File) -> None:
        if file.name == CONFIG:
            raise StorageError("stopped")
        copy_new(self, source, file)

    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "copy_new", stop_halfway)
        assert call(*words) == 1
    delete_folder = Bucket.delete_folder

    def meet(self: Bucket, name: str = "") -> None:
        delete_folder(self, name)
        if name.endswith(f"/{ASIDE}"):
            self.delete_all(self.list("claim."))

    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "delete_folder", meet)
        assert call(*words, "--overwrite") == 1
    capfd.readouterr()
    assert call(*words, "--overwrite") == 0, capfd.readouterr().err
    assert call("verify", checkpoint, place) == 0


@pytest.mark.parametrize("place", ["bucket"], indirect=True)
def test_a_release_that_another_command_is_deleting(
    checkpoint: Path, place: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nobody else begins there, and once `config.json` is gone, nobody reads what is left as a release."""
    words = ("export", checkpoint, place)
    assert call(*words) == 0
    delete_all, deleted = Bucket.delete_all, []

    def meet(self: Bucket, files: Iterable[File]) -> None:
        delete_all(self, files)
        if self.url != place or len(deleted) == 2:
            return
        deleted.append(self)
        capfd.readouterr()
        for more in ((), ("--overwrite",), ("--resume",), ("--overwrite", "--dry_run")):
            assert call(*words, *more) == 2
            assert "another conversion" in capfd.readouterr().err
        for reader in (("inspect", place), ("plan", place), ("verify", checkpoint, place)) * (len(deleted) == 2):
            assert call(*reader) == 2
            assert "Traceback" not in capfd.readouterr().err

    monkeypatch.setattr(Bucket, "delete_all", meet)
    assert call(*words, "--overwrite") == 0
    assert len(deleted) == 2
    assert call("verify", checkpoint, place) == 0


def foreign(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "precious.txt").write_text("mine")
    return folder


def test_folders_of_others_beside_a_step_stay(source: Path, tmp_path: Path) -> None:
    """Whoever made a backup, and Orbax, which saves a step at this moment; plainly and with `--overwrite`."""
    out = tmp_path / "out"
    convert(source, out, *MODEL)
    theirs = [foreign(out / name) for name in ("0.replaced-1", "0.replaced-20240101", "9.orbax-checkpoint-tmp")]
    shutil.copytree(out / "0", out / "0.replaced-20250101")
    for step in "0", "9":
        assert call("convert", "--source", source, "--output", out, *MODEL, "--step", step, "--overwrite") == 0
    assert all((path / "precious.txt").read_text() == "mine" for path in theirs)
    assert (out / "0.replaced-20250101" / "commit_success.txt").exists()


def test_folders_of_others_beside_a_release_stay(checkpoint: Path, tmp_path: Path) -> None:
    backup = foreign(tmp_path / "rel.replaced-20240101")
    for options in ((), ("--overwrite",)):
        assert call("export", checkpoint, tmp_path / "rel", *options) == 0
        assert (backup / "precious.txt").read_text() == "mine"


CUT = gzip.compress(b'{"hash": "0')[:-9]
FOREIGN = [
    ("0.orbax-checkpoint-tmp", b""),
    ("0.0123abcd.orbax-checkpoint-tmp", b"mine"),
    ("0.replaced-20240101", gzip.compress(b"[]")),
    ("0.orbax-checkpoint-tmp", gzip.compress(b'{"hash": "mine"}')),
    ("0.replaced-20240101", CUT),
]


OTHERS_WORK = """import os, sys
from weightbeam.formats.staging import staging_at
from weightbeam.pipelines.running.output import why_not_go_on
os.umask(0o022)
staging_at(sys.argv[1], 0).create(b"a plan")
staging = staging_at(sys.argv[1], 0)
os.setgroups([]), os.setgid(65534), os.setuid(65534)
print(why_not_go_on(staging, None)[0].message)
staging.discard()
"""


def open_up(folder: Path) -> None:
    """Lets all users look into a test's folder."""
    for each in (folder, *folder.parents[:3]):
        os.chmod(each, each.stat().st_mode | 0o055)


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_what_another_user_has_begun(tmp_path: Path) -> None:
    """He can't go on with it, and is told so before it is taken; what can't be removed is named."""
    open_up(tmp_path)
    os.chmod(tmp_path, 0o777)
    ran = subprocess.run(
        [sys.executable, "-c", OTHERS_WORK, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert ran.stdout.startswith("can't be written by this user; go on as the one who began it"), ran.stderr
    (left,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert f"{left}, where a command was at work before, can't be removed" in ran.stderr


# who may still read all files: Python's own may lie in root's home
AS_NOBODY = [
    *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
]


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="becomes another user")
@pytest.mark.parametrize(("folder", "status"), [("sticky", 2), ("shared", 0), ("its own", 0)])
def test_what_another_user_has_published(source: Path, tmp_path: Path, folder: str, status: int) -> None:
    """In a sticky folder only its owner may replace it: that is said before any work, not after it."""
    open_up(tmp_path)
    place = tmp_path / "place"
    place.mkdir()
    os.chmod(place, 0o1777 if folder == "sticky" else 0o777)
    assert call("cut", source, place / "out", "--layers", "0:1") == 0
    if folder == "its own":
        os.chown(place, 65534, 65534)
    ran = subprocess.run(
        [
            *AS_NOBODY,
            sys.executable,
            "-m",
            "weightbeam",
            "cut",
            source,
            place / "out",
            "--layers",
            "0:2",
            "--overwrite",
        ],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"HOME": str(place), "TMPDIR": str(place)},
    )
    assert ran.returncode == status, ran.stderr
    assert ("another user's, and its folder is sticky" in ran.stderr) == (status == 2)
    made = json.loads((place / "out" / "config.json").read_text())["num_hidden_layers"]
    assert made == (1 if status else 2)


# root, but without the right to look into everything
AS_ANYONE = [
    "setpriv",
    *(f"--{which}=-dac_override,-dac_read_search,-fowner,-chown" for which in ("bounding-set", "inh-caps")),
]


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="gives up rights of root")
@pytest.mark.parametrize("command", ["convert", "cut"])
def test_a_folder_that_cant_be_looked_into(source: Path, tmp_path: Path, command: str) -> None:
    """Another user's, in an output of ours: what is in there isn't ours, so that it isn't replaced."""
    words = [command, source, tmp_path / "out", *(["--layers", "0:1"] if command == "cut" else MODEL)]
    place = tmp_path / "out" / ("0" if command == "convert" else "")
    assert call(*words) == 0
    notes = place / "notes"
    notes.mkdir()
    (notes / "thesis.txt").write_text("mine")
    os.chown(notes, 65534, 65534)
    notes.chmod(0o700)
    ran = subprocess.run(
        [*AS_ANYONE, sys.executable, "-m", "weightbeam", *map(str, words), "--overwrite"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert ran.returncode == 2, ran.stderr
    assert ("notes/" if command == "cut" else f"{notes}, from which nothing can be removed") in ran.stderr
    assert (notes / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(("name", "plan"), FOREIGN, ids=["empty", "text", "list", "foreign", "cut"])
def test_a_plan_of_somebody_else(
    source: Path, tmp_path: Path, name: str, plan: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a folder beside a step whose name is like ours: it is no stopped conversion, and stays as it is."""
    theirs = foreign(tmp_path / "out" / name)
    (theirs / "plan.json.gz").write_bytes(plan)
    for options in ((), ("--resume",), ("--overwrite",)):
        assert call("convert", "--source", source, "--output", tmp_path / "out", *MODEL, *options) == 0
        assert "isn't one of Weightbeam's, or is damaged: nobody goes on with it" in capfd.readouterr().err
    assert (theirs / "precious.txt").read_text() == "mine"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(["0", name])


def test_a_staged_plan_of_a_size_that_none_has() -> None:
    """It isn't taken apart, nor unpacked any further."""
    for text in (b'{"a": [' + b"0," * MOST_VALUES + b"0]}", b" " * (MOST_BYTES + 1)):
        with pytest.raises(ValueError, match="which no plan has"):
            unpack_inputs(gzip.compress(text, compresslevel=1))


@pytest.mark.parametrize(
    "staged",
    [b"[]", b"{}", b'{"kind": "export", "options": 1}', b'{"kind": []}', b"[" * 200_000],
    ids=["list", "empty", "options", "kind", "deep"],
)
def test_a_staged_plan_that_cant_be_read(
    source: Path, tmp_path: Path, staged: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a place of ours: it is said, and `--overwrite` begins anew."""
    place = tmp_path / "out" / f"0.{new_id()}.orbax-checkpoint-tmp"
    place.mkdir(parents=True)
    (place / "plan.json.gz").write_bytes(gzip.compress(staged))
    command = ("convert", "--source", source, "--output", tmp_path / "out", *MODEL)
    assert call(*command, "--resume") == 2
    assert "staged by another version of Weightbeam, or is damaged" in capfd.readouterr().err
    assert call(*command, "--overwrite") == 0


@pytest.mark.parametrize("place", ["bucket"], indirect=True)
def test_a_step_that_orbax_saves_to_a_bucket(source: Path, place: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Its databases lie where they will be read, as ours do."""
    store = open_store(place)
    theirs = ["0/items/ocdbt.process_0/d/0123", "0/items/ocdbt.process_0/manifest.ocdbt", "0/items/d/0123"]
    for count in (2, 3):
        for name in theirs[:count]:
            store.write(name, b"mine")
        assert call("convert", source, place, *MODEL, "--overwrite") == 2
        assert "is no Orbax checkpoint: --overwrite deletes nothing else" in capfd.readouterr().err
    assert all(store.read(name) == b"mine" for name in theirs)


@pytest.mark.parametrize("place", ["bucket"], indirect=True)
def test_a_folder_of_somebody_else_beside_a_step_in_a_bucket(source: Path, place: str) -> None:
    store = open_store(place)
    store.write("0.weightbeam/mine/plan.json.gz", b"mine")
    for options in ((), ("--resume",), ("--overwrite",)):
        assert call("convert", source, place, *MODEL, *options) == 0
    assert store.read("0.weightbeam/mine/plan.json.gz") == b"mine"


@pytest.mark.parametrize("place", PLACES, indirect=True)
@pytest.mark.parametrize("content", ["mine", "[1]", '{"name": "mine"}', "{"])
def test_a_file_under_the_name_of_a_lease(
    source: Path, place: str, content: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """However old it is: the command is refused, and says which it is."""
    store = open_store(place)
    if isinstance(store, LocalFolder):
        store.folder.mkdir()
    store.write("0.weightbeam-lease", content.encode())
    if isinstance(store, LocalFolder):
        os.utime(store.path("0.weightbeam-lease"), (0, 0))
    else:
        monkeypatch.setattr(lease, "STALE", -1.0)
    for options in ((), ("--overwrite",), ("--resume",)):
        assert call("convert", source, place, *MODEL, *options) == 2
        assert f"{store.path('0.weightbeam-lease')} isn't what its name says" in capfd.readouterr().err
    assert store.read("0.weightbeam-lease") == content.encode()
    assert [file.name for file in store.list()] == ["0.weightbeam-lease"]


def test_files_beside_a_lease(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What it is locked by, and what it is made of, are files beside it; a link or a folder in its place is no lease."""
    place = tmp_path / "out"
    place.mkdir()
    beside = place / "0.weightbeam-lease.mine.new"
    beside.write_text("mine")
    assert call("convert", source, place, *MODEL) == 0
    assert beside.read_text() == "mine"
    lock = place / "1.weightbeam-lease.lock"
    lock.write_text("mine")
    (tmp_path / "file").write_text("mine")
    (place / "2.weightbeam-lease").symlink_to(tmp_path / "file")
    (place / "3.weightbeam-lease").mkdir()
    (place / "4.weightbeam-lease.lock").symlink_to(tmp_path / "nothing")
    os.mkfifo(place / "5.weightbeam-lease.lock")
    for step, content in enumerate((b'{"owner": "bob", "notes": "mine"}', bytes(5000) + b"precious"), 6):
        (place / f"{step}.weightbeam-lease").write_bytes(content)
        os.utime(place / f"{step}.weightbeam-lease", (0, 0))
    mine = sorted(path.name for path in place.iterdir() if path.name != "0")
    capfd.readouterr()
    for step, name in enumerate(mine[1:], 1):
        assert call("convert", source, place, *MODEL, "--step", str(step)) == 2
        assert f"{place / name} isn't what its name says" in capfd.readouterr().err
    assert lock.read_text() == (place / "2.weightbeam-lease").read_text() == "mine"
    assert sorted(path.name for path in place.iterdir()) == ["0", *mine]
    assert not (tmp_path / "nothing").exists()
    empty = place / "8.weightbeam-lease.lock"
    empty.touch()
    (place / "0" / PLAN).write_text("mine")
    assert call("convert", source, place, *MODEL, "--step", "8") == 0
    assert call("convert", source, place, *MODEL, "--resume") == 0
    assert empty.exists()
    assert (place / "0" / PLAN).read_text() == "mine"


@pytest.mark.parametrize("option", [(), ("--overwrite",), ("--resume",)])
def test_a_link_that_leads_to_itself(
    option: Sequence[str], source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the place of an output: refused in words."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "0").symlink_to("0")
    assert call("convert", source, tmp_path / "out", *MODEL, *option) == 2
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("problem", ["the disk is full", "a stop"])
def test_an_empty_output_that_was_there(
    problem: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner has made it, and given it its mode; a folder that the command made goes again."""
    (tmp_path / "mine").mkdir(mode=0o2770)

    def check(_: object) -> None:
        raise KeyboardInterrupt if problem == "a stop" else OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(LocalFolder, "check_writable", check)
    for place in ("mine", "made"):
        with pytest.raises((wb.Refused, KeyboardInterrupt)):
            wb.convert(str(source), str(tmp_path / place), maxtext_model="llama2-7b", progress=False)
        assert (tmp_path / place).exists() is (place == "mine")


@pytest.mark.parametrize(
    ("command", "option"),
    [
        *itertools.product(("inspect", "plan", "plan --source", "verify"), ("json", "log_file")),
        ("plan", "maxtext_config"),
    ],
)
def test_no_option_writes_over_a_source(
    source: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, option: str,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Neither what is named nor a link to it; what an earlier run wrote elsewhere is replaced."""
    monkeypatch.chdir(tmp_path)
    Path("linked").symlink_to(source)
    words = {
        "inspect": ("inspect", checkpoint),
        "plan": ("plan", "linked", *MODEL),
        "plan --source": ("plan", "--source=linked", *MODEL),
        "verify": ("verify", source, checkpoint),
    }[command]
    taken = checkpoint / "0/items/_METADATA" if command == "inspect" else source / "config.json"
    before = taken.read_bytes()
    assert call(*words, f"--{option}", taken) == 2
    assert f"--{option}={taken}: is a file of " in capfd.readouterr().err
    assert taken.read_bytes() == before
    for _ in range(2):
        assert call(*words, "-q", f"--{option}", "told") == 0
    assert Path("told").is_file()


def test_no_checkpoint_is_written_into_another(
    source: Path, checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = sorted(checkpoint.rglob("*"))
    for output in (checkpoint / "0", checkpoint / "0" / "items"):
        for words in (("convert", source, output, *MODEL), ("reshard", checkpoint, output)):
            assert call(*words) == 2
            assert f"{output}: is a checkpoint itself" in capfd.readouterr().err
    for words in (("reshard", checkpoint, checkpoint / "0/items/x"), ("convert", source, checkpoint / "0/x", *MODEL)):
        assert call(*words) == 2
        assert f"a part of one, {checkpoint}/0" in capfd.readouterr().err
    assert call("export", checkpoint, checkpoint / "0" / "release") == 2
    assert f"lies in a checkpoint, {checkpoint}/0" in capfd.readouterr().err
    assert sorted(checkpoint.rglob("*")) == before


def test_what_is_called_as_a_probe(source: Path, tmp_path: Path) -> None:
    """Those of processes that were killed go; what others have put there stays."""
    place = tmp_path / "out"
    left = place / f".weightbeam-probe.{16 * '0'}"
    (left / "a").mkdir(parents=True)
    (left / "a" / "file").touch()
    mine = place / ".weightbeam-probe.notes", place / f".weightbeam-probe.{16 * '1'}"
    for folder in mine:
        folder.mkdir()
        (folder / "thesis.txt").write_text("mine")
    alike = place / f".weightbeam-probe.{16 * '2'}" / "a" / "file"
    alike.parent.mkdir(parents=True)
    alike.write_text("mine")
    assert call("convert", source, place, *MODEL) == 0
    assert sorted(path.name for path in place.iterdir()) == sorted(
        ["0", alike.parts[-3], *(folder.name for folder in mine)]
    )
    assert all(file.read_text() == "mine" for file in (alike, *(folder / "thesis.txt" for folder in mine)))


@pytest.mark.parametrize("others", ["a folder", "a checkpoint", "a checkpoint of folders alone"])
@pytest.mark.parametrize("before", [False, True], ids=["", "replaced"])
@pytest.mark.parametrize("command", ["convert", "cut"])
def test_what_comes_while_a_command_runs_is_not_replaced(
    command: str,
    before: bool,
    others: str,
    source: Path,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`--overwrite` is about what lay there as it was said: somebody's work of an hour later stays, and is named."""
    out = tmp_path / "out"
    place = out / "0" if command == "convert" else out
    words = (command, source, out, *(MODEL if command == "convert" else ("--layers", "0:1")))
    if before:
        assert call(*words) == 0
    plain = FolderStaging.look_there

    def look(self: FolderStaging) -> None:
        plain(self)
        if others != "a folder":
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(checkpoint / "0", place)
        place.mkdir(parents=True, exist_ok=True)
        if others == "a checkpoint of folders alone":
            for file in place.glob("*"):
                file.unlink() if file.is_file() else (file / "thesis.txt").write_text("mine")
            (place / "items" / "thesis.txt").rename(place / "items" / "_sharding")  # nothing foreign to an Orbax item
            return
        (place / "thesis.txt").write_text("mine")

    with monkeypatch.context() as patched:
        patched.setattr(FolderStaging, "look_there", look)
        assert call(*words, "--overwrite") == 1
    assert str(place) in capsys.readouterr().err
    if others == "a checkpoint of folders alone":
        assert (place / "items" / "_sharding").read_text() == "mine"
        return
    assert (place / "thesis.txt").read_text() == "mine"
    assert (place / "items").exists() == (others == "a checkpoint" or (before and command == "convert"))
    (place / "thesis.txt").rename(tmp_path / "thesis.txt")
    if others == "a checkpoint" and command == "cut":
        shutil.rmtree(place)
    assert call(*words, "--resume", "--overwrite") == 0
    assert call("verify", source, out) == (0 if command == "convert" else 2)


@contextlib.contextmanager
def mounted(place: Path, *how: str) -> Iterator[Path]:
    """Context manager: something is mounted there; else the test is skipped."""
    place.mkdir()
    if os.geteuid() or subprocess.run(["mount", *how, str(place)], capture_output=True, check=False).returncode:
        pytest.skip("only root may mount")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_source_that_is_mounted_where_the_output_is(source: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Its other name is no other place: it would be replaced by what is made of it."""
    shutil.copytree(checkpoint, tmp_path / "here" / "ckpt")
    assert call("cut", source, tmp_path / "here" / "release", "--layers", "0:1") == 0
    before = sorted((tmp_path / "here").rglob("*"))
    with mounted(tmp_path / "there", "--bind", str(tmp_path / "here")) as there:
        for command in (
            ("cut", tmp_path / "here" / "release", there / "release", "--layers", "0:1"),
            ("reshard", tmp_path / "here" / "ckpt", there / "ckpt"),
        ):
            assert call(*command, "--overwrite") == 2
    assert sorted((tmp_path / "here").rglob("*")) == before


@pytest.mark.skipif(not shutil.which("mkfs.ext4"), reason="makes a file system")
def test_copies_where_times_are_coarse(source: Path, tmp_path: Path) -> None:
    """The file system keeps seconds alone: a copy of the source's file has the time that it can have."""
    (tmp_path / "image").touch()
    os.truncate(tmp_path / "image", 32 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-I", "128", tmp_path / "image"], check=True, capture_output=True)
    with mounted(tmp_path / "there", "-o", "loop", str(tmp_path / "image")) as there:
        command = ("convert", source, there / "ckpt", *MODEL, "--virtual", "--scan_layers", "false", "--link", "copy")
        assert call(*command) == 0
        copy = next((there / "ckpt" / "0" / "items" / "source").glob("*.safetensors"))
        assert copy.stat().st_mtime_ns % 10**9 == 0
        assert call("verify", there / "ckpt") == 0


def test_what_an_image_holds_is_not_replaced(
    source: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder of an overlay's lower layer can't be renamed: that is said, it stays, and once it is gone --resume ends."""
    for name in ("lower/out", "upper", "work"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copytree(checkpoint, tmp_path / "lower" / "out", dirs_exist_ok=True)
    layers = ",".join(
        f"{key}={tmp_path / name}" for key, name in (("lowerdir", "lower"), ("upperdir", "upper"), ("workdir", "work"))
    )
    with mounted(tmp_path / "image", "-t", "overlay", "overlay", "-o", layers) as image:
        words = ("convert", source, image / "out", *MODEL)
        before = sorted((image / "out" / "0").rglob("*"))
        for again in ("--overwrite",), ("--resume", "--overwrite"):
            assert call(*words, *again) == 1
            assert f"{image / 'out' / '0'}: lies in a layer of an overlay" in capsys.readouterr().err
            assert sorted((image / "out" / "0").rglob("*")) == before
        shutil.rmtree(image / "out" / "0")
        assert call(*words, "--resume") == 0
        assert [path.name for path in (image / "out").iterdir()] == ["0"]


def test_a_release_that_is_a_mount_point(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing can be renamed to its name: it is refused before anything is made."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "tmpfs") as disk:
        assert call("cut", source, disk, "--layers", "0:1") == 2
        assert "is a mount point" in capsys.readouterr().err
        assert call("cut", source, disk / "release", "--layers", "0:1") == 0
    (tmp_path / "other").mkdir()  # on the same disk
    with mounted(tmp_path / "bound to", "--bind", str(tmp_path / "other")) as disk:
        assert call("cut", source, disk, "--layers", "0:1") == 2
        assert "is a mount point" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bound to", "disk", "other"]


def test_a_mount_within_what_would_be_replaced(
    source: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is mounted there is another's, and would be emptied with it; no removal of ours goes through a mount."""
    safe = Path(shutil.copytree(checkpoint, tmp_path / "safe"))
    before = sorted((safe / "0" / "items").rglob("*"))
    out = Path(shutil.copytree(checkpoint, tmp_path / "odd \r out"))
    shutil.rmtree(out / "0" / "items")
    with mounted(out / "0" / "items", "--bind", str(safe / "0" / "items")) as items:
        step = items.parent
        assert call("convert", source, step.parent, *MODEL, "--overwrite") == 2
        assert "items, a mount point, and can't be replaced" in capsys.readouterr().err
        open_store(step.parent).delete_folder("0")
        assert sorted((safe / "0" / "items").rglob("*")) == before
    open_store(step.parent).delete_folder("0")
    assert not step.exists()
    release = tmp_path / "release"
    assert call("cut", source, release, "--layers", "0:1") == 0
    with mounted(release / "more", "--bind", str(safe)) as more:
        assert call("cut", source, release, "--layers", "0:2", "--overwrite") == 2
        assert f"holds {more}, a mount point, and can't be replaced" in capsys.readouterr().err
        assert call("cut", source, release, "--layers", "0:1", "--resume") == 0  # is finished; nothing is replaced
    assert sorted((safe / "0" / "items").rglob("*")) == before


@pytest.mark.parametrize("command", ["convert", "cut"])
def test_a_mount_within_what_is_staged(
    command: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is staged and not of the result is removed; what is mounted there is another's."""
    words = (command, source, tmp_path / "out", *(MODEL if command == "convert" else ("--layers", "0:1")))
    safe = Path(shutil.copytree(source, tmp_path / "safe"))
    before = sorted(safe.iterdir())
    with monkeypatch.context() as patched:
        patched.setattr(Transfer, "assemble", lambda *_: 1 / 0)
        assert call(*words) == 1
    (plan,) = tmp_path.glob("out*/**/plan.json.gz") if command == "convert" else tmp_path.glob("out*/plan.json.gz")
    with mounted(plan.parent / "more", "--bind", str(safe)) as more:
        capsys.readouterr()
        assert call(*words, "--resume") == 2
        assert f"holds {more}, a mount point; unmount it" in capsys.readouterr().err
        assert sorted(safe.iterdir()) == before
    assert call(*words, "--resume") == 0


@pytest.mark.parametrize("command", ["convert", "export"])
def test_what_cant_be_removed_behind_a_publication(
    source: Path, checkpoint: Path, command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The result is there, and that is said; a later command clears it away."""
    words = {"convert": (source, "gs://bucket/run/out", *MODEL), "export": (checkpoint, "gs://bucket/run/out")}[command]
    with FakeGcs("bucket") as server, asking(server):
        server.fail("status", status=403, matching="DELETE .*noted")
        assert call(command, *words) == 0
        said = " ".join(capfd.readouterr().err.split())
        assert "is published; what it was made in can't be removed: " in said
        server.faults = []
        assert call(command, *words, "--resume") == 0
        assert "is finished already" in capfd.readouterr().out
