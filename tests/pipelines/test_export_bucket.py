"""A release in a bucket: composed of what units wrote, the same bytes as in a folder, published once, resumed wherever
it stops.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from quantised import fp8_llama
from servers.clients import asking
from servers.gcs import FakeGcs
from support import call, convert, make_release, peft_adapter

from weightbeam.formats.release.files import CONFIG
from weightbeam.formats.staging.staging import FAILURE, PLAN, UNITS, TakenOverError
from weightbeam.formats.storage import bucket as buckets
from weightbeam.formats.storage import composing, open_store
from weightbeam.formats.storage.bucket import Bucket
from weightbeam.formats.targets import release_bucket
from weightbeam.formats.targets.release_bucket import ReleaseBucket

RECORD = "weightbeam.json"


@pytest.fixture(scope="module")
def server() -> Iterator[FakeGcs]:
    with FakeGcs("bucket") as server, asking(server) as patch:
        patch.setattr(buckets, "RETRY", buckets.RETRY.with_delay(0.01, 0.02).with_timeout(2.0))
        yield server


@pytest.fixture
def gcs(server: FakeGcs) -> FakeGcs:
    server.faults, server.clock = [], time.time
    server.log.clear()
    return server


@pytest.fixture
def place(gcs: FakeGcs) -> str:
    """A folder of the bucket that nobody else has."""
    return f"gs://bucket/{uuid.uuid4().hex}/tuned"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release, its checkpoint in float32, and what an export of that into a folder is."""
    folder = tmp_path_factory.mktemp("bucket")
    make_release(folder / "hf")
    convert(folder / "hf", folder / "ckpt", "--save_dtype", "float32", "--maxtext_model", "llama2-7b")
    assert call("export", folder / "ckpt", folder / "back") == 0
    return folder


def objects_in(gcs: FakeGcs, place: str) -> dict[str, bytes]:
    """All objects of a folder of the bucket and beside it."""
    prefix = place.removeprefix("gs://bucket/").removesuffix("tuned")
    return {
        name.removeprefix(prefix): bytes(made.data)
        for name, made in gcs.objects["bucket"].items()
        if name.startswith(prefix)
    }


def assert_holds(gcs: FakeGcs, place: str, folder: Path) -> None:
    """The bucket holds the files of a folder, byte for byte, and nothing else, but for the record and the card: they name
    the sources as it does, and the record's digests have other parts.
    """
    found = objects_in(gcs, place)
    wanted = {f"tuned/{path.name}": path.read_bytes() for path in folder.iterdir()}
    assert found.keys() == wanted.keys()
    assert {name for name in wanted if found[name] != wanted[name]} <= {f"tuned/{RECORD}", "tuned/README.md"}


@pytest.mark.parametrize("part", [1500, release_bucket.PART_BYTES])
def test_the_same_bytes_as_in_a_folder(
    gcs: FakeGcs, place: str, source: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    """Of components in three levels, or of one for each unit; nothing stays beside it, and it isn't made twice."""
    monkeypatch.setattr(release_bucket, "PART_BYTES", part)
    if part == 1500:
        monkeypatch.setattr(composing, "MAX_COMPONENTS", 2)
    assert call("export", source / "ckpt", place, "--unit_bytes", "12000") == 0
    assert_holds(gcs, place, source / "back")


def test_replaced(gcs: FakeGcs, place: str, source: Path) -> None:
    """Only if that is asked for; all of what was there goes. What is there can be converted again."""
    assert call("export", source / "ckpt", place) == 0
    assert call("export", source / "ckpt", place) == 2
    assert call("export", source / "ckpt", place, "--overwrite", "--max_shard_size", "20KB") == 0
    assert len([name for name in objects_in(gcs, place) if name.endswith(".safetensors")]) > 1
    record = json.loads(objects_in(gcs, place)[f"tuned/{RECORD}"])
    assert record["digests"] == json.loads((source / "back" / RECORD).read_text())["digests"]
    assert call("convert", place, place + "-again", "--save_dtype", "float32", "--maxtext_model", "llama2-7b") == 0


def test_a_replaced_release_goes_in_order(
    gcs: FakeGcs, place: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record, then the config, by which readers take a folder for a model, then all else: nobody loads a part."""
    assert call("export", source / "ckpt", place, "--max_shard_size", "20KB") == 0
    prefix, deleted = place.removeprefix("gs://bucket/") + "/", []
    drop = Bucket.delete

    def late(self: Bucket, name: str, *more: object) -> None:
        if name in (RECORD, "config.json"):
            time.sleep(0.3)
        drop(self, name, *more)  # type: ignore[arg-type]
        there = {path.removeprefix(prefix) for path in gcs.objects["bucket"] if path.startswith(prefix)}
        deleted.append((self.url, name, "config.json" in there))

    monkeypatch.setattr(Bucket, "delete", late)
    assert call("export", source / "ckpt", place, "--overwrite") == 0
    ours = [(name, is_seen) for url, name, is_seen in deleted if url == place]
    assert ours[:2] == [(RECORD, True), ("config.json", False)]
    assert [name for name, is_seen in ours[2:] if is_seen] == []
    assert len(ours) > 4


def test_dequantize_merge_and_quantize_write_there_too(
    gcs: FakeGcs, place: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They share the target; what isn't theirs is refused, and a source that lies in it."""
    fp8, *_ = fp8_llama(source / f"fp8-{uuid.uuid4().hex}")
    lora, _ = peft_adapter(tmp_path / "adapter", {"model.layers.0.self_attn.o_proj": (32, 32)})
    assert call("dequantize", "--source", fp8, "--output", source / f"{fp8.name}-out") == 0
    assert call("dequantize", "--source", fp8, "--output", place) == 0
    assert_holds(gcs, place, source / f"{fp8.name}-out")
    for name, command in (("merged", ("merge", source / "hf", "--lora", lora)), ("fp8", ("quantize", source / "hf"))):
        assert call(command[0], *command[1:], "--output", source / f"{fp8.name}-{name}") == 0
        assert call(command[0], *command[1:], "--output", place, "--overwrite") == 0
        assert_holds(gcs, place, source / f"{fp8.name}-{name}")
    capsys.readouterr()
    assert call("dequantize", "--source", fp8, "--output", place.removesuffix("/tuned"), "--overwrite") == 2
    assert "isn't a release that Weightbeam wrote" in capsys.readouterr().err
    assert call("export", source / "ckpt", "gs://bucket") == 2
    assert "name a folder in it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "stage",
    [
        "units",
        "compose",
        pytest.param("gather", marks=pytest.mark.slow("another stage of the same way, 10 s")),
        pytest.param("record", marks=pytest.mark.slow("another stage of the same way, 10 s")),
    ],
)
def test_stopped_anywhere_and_resumed(
    gcs: FakeGcs, place: str, source: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """What is done isn't done again; no loader sees a model before all is there."""
    command = ["export", source / "ckpt", place, "--unit_bytes", "12000", "--direct_num_workers=1"]
    where, original = {
        "units": (release_bucket.ReleaseBucket, "write_stretches"),
        "compose": (Bucket, "compose"),
        "gather": (Bucket, "copy_new"),
        "record": (release_bucket.ReleaseBucket, "put"),
    }[stage]
    function, calls = getattr(where, original), []

    def fails(self, *arguments):
        calls.append(arguments)
        if len(calls) > (2 if stage == "units" else 0):
            raise OSError(5, "the power is gone")
        return function(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(where, original, fails)
        assert call(*command) == 1
    assert "tuned/config.json" not in objects_in(gcs, place) or stage == "record"
    assert f"tuned/{RECORD}" not in objects_in(gcs, place)
    assert call(*command) == 2
    gcs.log.clear()
    assert call(*command, "--resume") == 0
    assert_holds(gcs, place, source / "back")
    if stage != "units":
        assert not [entry for entry in gcs.log.of("write") if "/units/" in entry.name]
    assert call(*command, "--resume") == 0


COMMANDS = {
    "export": ["export", "ckpt", "--unit_bytes", "12000"],
    "convert": ["convert", "hf", "--maxtext_model", "llama2-7b"],
}


def command_of(kind: str, source: Path, place: str) -> list[str]:
    command, name, *options = COMMANDS[kind]
    return [command, str(source / name), place, *options]


def beside(gcs: FakeGcs, place: str) -> list[str]:
    """What lies on the desk of commands."""
    return [name for name in objects_in(gcs, place) if ".weightbeam/" in name]


@pytest.mark.parametrize("kind", COMMANDS)
def test_ended_while_it_cleans_up(
    gcs: FakeGcs, place: str, source: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It is published, and its plan, by which a command knows what is its own, is gone already."""
    command = command_of(kind, source, place)
    delete, gone = Bucket.delete, []

    def fails(self: Bucket, name: str, *more: object) -> None:
        if self.url.endswith(".weightbeam"):
            if gone:
                raise OSError(5, "nothing goes any more")
            gone.extend([name] * name.endswith(f"/{PLAN}") * (not name.startswith("claim.")))
        delete(self, name, *more)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "delete", fails)
        assert call(*command) == 0
    assert beside(gcs, place)
    assert call(*command, "--resume") == 0
    assert not beside(gcs, place)


def test_what_others_have_on_the_desk_stays(gcs: FakeGcs, place: str, source: Path) -> None:
    """A finished command removes what commands leave there."""
    command = command_of("export", source, place)
    assert call(*command) == 0
    for name in (
        f"{'0' * 16}/aside/left",
        f"deleting.claim.{'0' * 16}/files.json",
        "claim.mine/left",
        "mine/left",
        "notes.txt",
    ):
        gcs.put("bucket", f"{place.removeprefix('gs://bucket/')}.weightbeam/{name}", b"{}")
    assert call(*command, "--resume") == 0
    assert sorted(beside(gcs, place)) == [
        f"tuned.weightbeam/{name}" for name in ("claim.mine/left", "mine/left", "notes.txt")
    ]


@pytest.mark.parametrize(
    ("fails", "is_told"), {"replace": False, "create": True}.items(), ids=["staging", "the first unit"]
)
@pytest.mark.parametrize("kind", COMMANDS)
def test_the_story_of_a_failure_goes_with_its_plan(
    gcs: FakeGcs, place: str, source: Path, monkeypatch: pytest.MonkeyPatch, kind: str, fails: str, is_told: bool
) -> None:
    """It names paths of this machine; where nothing could be staged, nobody would remove it."""
    command = command_of(kind, source, place)
    function = getattr(Bucket, fails)

    def fail(self: Bucket, name: str, *more: object) -> object:
        if name == PLAN or name.startswith(UNITS):
            raise OSError(5, "the power is gone")
        return function(self, name, *more)

    with monkeypatch.context() as patched:
        patched.setattr(Bucket, fails, fail)
        assert call(*command) == 1
    assert [name.rpartition("/")[2] for name in beside(gcs, place) if FAILURE in name] == [FAILURE] * is_told
    assert call(*command, "--resume") == 0
    assert not beside(gcs, place)


@pytest.mark.parametrize(("sleeps_in", "looks_in"), [("write", "check"), ("copy_all", "gather")])
def test_who_slept_until_another_was_done_leaves_nothing(
    gcs: FakeGcs, place: str, monkeypatch: pytest.MonkeyPatch, sleeps_in: str, looks_in: str
) -> None:
    """What it put on the desk after the other had cleaned up goes, too, and it says that it was taken over."""
    folder, name = place.rsplit("/", 1)
    sleeper, other = (ReleaseBucket(cast(Bucket, open_store(folder)), name, plan) for plan in ("a", "b"))
    function = getattr(Bucket, sleeps_in)

    def sleep(self: Bucket, *what: object) -> object:
        monkeypatch.setattr(Bucket, sleeps_in, function)
        other.claim()
        other.discard()
        other.leave()
        return function(self, *what)

    with sleeper.hold():
        sleeper.create(b"plan")
        monkeypatch.setattr(Bucket, sleeps_in, sleep)
        sleeper.lay_out([], {CONFIG: b"{}"})
        with pytest.raises(TakenOverError):
            getattr(sleeper, looks_in)()
    assert not beside(gcs, place)


def test_a_component_that_changed_is_noticed(
    gcs: FakeGcs, place: str, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other bytes of the same length under a component's name: the checksum of what is composed tells, and nothing is
    published.
    """
    seal = release_bucket.ReleaseBucket.seal

    def damaging(self, files, ledger):
        name = next(iter(ledger.values()))["parts"][0][3]
        self.parts.write(name, b"\xff" + self.parts.read(name)[1:])
        seal(self, files, ledger)

    monkeypatch.setattr(release_bucket.ReleaseBucket, "seal", damaging)
    assert call("export", source / "ckpt", place) == 1
    assert "isn't what was written" in capsys.readouterr().err
    assert not [name for name in objects_in(gcs, place) if name.startswith("tuned/")]
