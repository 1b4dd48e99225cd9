"""A bit that flips on its way from a bucket or the hub: the conversion ends, says so, and publishes nothing."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from servers.clients import asking
from servers.gcs import FakeGcs
from servers.hub import FakeHub
from support import (
    BF16,
    DEEPSEEK,
    QWEN3_MOE,
    call,
    digests,
    make_release,
    random_tensors,
    reference,
    restore,
    save,
    split,
)

from weightbeam.formats.safetensors import open_hf, read_header
from weightbeam.formats.staging import IncompleteError, staging_at
from weightbeam.formats.storage import StorageError
from weightbeam.pipelines.commands.convert import carry_out
from weightbeam.pipelines.terminal.errors import Failed
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import ConvertOptions

OPTIONS = ("--mesh", "fsdp=2", "--unit_bytes", "60000")
MODEL = QWEN3_MOE | dict(vocab_size=512)
WANTED = digests(reference(MODEL, random_tensors(MODEL), BF16))
RANGES = r"GET /storage/v1/.*safetensors.*alt=media"  # as TensorStore asks for what units read


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_release(tmp_path_factory.mktemp("sums") / "source", MODEL, files=3)


@pytest.fixture(scope="module")
def server() -> Iterator[FakeGcs]:
    """One for all tests: the clients of this process know one."""
    with FakeGcs("bucket") as server, asking(server):
        yield server


@pytest.fixture
def gcs(server: FakeGcs, source: Path) -> FakeGcs:
    server.faults = []
    server.objects["bucket"].clear()
    for path in source.iterdir():
        server.put("bucket", f"models/it/{path.name}", path.read_bytes())
    server.log.clear()
    return server


def hashes(output: Path) -> set[str]:
    return {shard["hash"] for shard in json.loads((output / "0/conversion.json").read_bytes())["shards"]}


@pytest.mark.parametrize("check", ["auto", "false"])
def test_files_of_a_bucket_are_checked_on_their_way(check: str, gcs: FakeGcs, source: Path, tmp_path: Path) -> None:
    """By what units read anyway: only the headers are read once more."""
    assert call("convert", "gs://bucket/models/it", tmp_path / "out", *OPTIONS, "--check_source", check) == 0
    assert digests(restore(tmp_path / "out/0")) == WANTED
    assert hashes(tmp_path / "out") == {"checked" if check == "auto" else "stated"}
    files = list(source.glob("*.safetensors"))
    headers = sum(min(tensor.offset for tensor in read_header(str(file))) for file in files)
    read = sum(entry.sent for entry in gcs.log.of("read") if entry.name.endswith(".safetensors"))
    # and the last byte, before any work
    assert read == sum(file.stat().st_size for file in files) + (headers if check == "auto" else 0) + len(files)


def test_a_bit_that_flips_in_an_answer_of_a_bucket(
    gcs: FakeGcs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever the answer: nothing is published; --resume reads again what may be damaged, and only that."""
    options = ("convert", "gs://bucket/models/it", tmp_path / "out", *OPTIONS)
    fault = gcs.fail("flip", matching=RANGES, every=5, times=1)
    assert call(*options) == 1
    assert fault.hits == 1
    said = capsys.readouterr().err
    assert "what was read of it has the crc32c" in said
    assert "damaged on its way" in said
    assert "the same command with --resume goes on from there" in said
    assert not (tmp_path / "out/0").exists()
    gcs.faults = []
    gcs.log.clear()
    assert call(*options, "--resume") == 0
    assert digests(restore(tmp_path / "out/0")) == WANTED
    assert hashes(tmp_path / "out") == {"checked"}
    read = {entry.name for entry in gcs.log.of("read") if entry.stop - entry.start > 20_000}
    assert len(read) < 3


def test_all_damaged_files_are_named(gcs: FakeGcs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At once, and one --resume mends them all."""
    options = ("convert", "gs://bucket/models/it", tmp_path / "out", *OPTIONS)
    names = sorted(name.rpartition("/")[2] for name in gcs.objects["bucket"] if name.endswith(".safetensors"))
    for name in (names[0], names[2]):
        gcs.fail("flip", matching=RANGES.replace("safetensors", name), times=1)
    assert call(*options) == 1
    said = "".join(capsys.readouterr().err.split())
    assert [f"{name}:whatwasreadofit" in said for name in names] == [True, False, True]
    gcs.faults = []
    assert call(*options, "--resume") == 0
    assert digests(restore(tmp_path / "out/0")) == WANTED


def test_an_assembly_that_is_tried_again_says_what_was_damaged(gcs: FakeGcs, tmp_path: Path) -> None:
    """As engines do with what fails for them: it named units that are missing, which it had thrown away itself."""
    conversion = plan_conversion(ConvertOptions(), open_hf("gs://bucket/models/it"))
    gcs.fail("flip", matching=RANGES, every=2, times=1)
    with pytest.raises(Failed, match="damaged on its way"):
        carry_out(conversion, str(tmp_path / "out"), progress=False)
    staging = staging_at(tmp_path / "out", 0, conversion.hash)
    with pytest.raises(StorageError, match=r"what was read of it has the crc32c .* damaged on its way"):
        conversion.assemble(staging, overwrite=False)
    staging.ledger.withdraw([], "nothing")  # and where units are missing for another reason, that is said
    with pytest.raises(IncompleteError, match="units are missing"):
        conversion.assemble(staging, overwrite=False)


def test_small_files_are_compared_when_they_are_read(
    gcs: FakeGcs, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the crc32c of a bucket's object, and with git's hash of the hub's file: it costs nothing."""
    folder = Path(shutil.copytree(source, tmp_path / "source"))
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    gcs.put("bucket", "models/it/tokenizer.json", (folder / "tokenizer.json").read_bytes())
    with FakeHub() as hub:
        hub.add("org/small", folder)
        for variable, value in hub.env().items():
            monkeypatch.setenv(variable, value)
        for server, url, media, words in (
            (gcs, "gs://bucket/models/it", ".*alt=media", "its crc32c isn't"),
            (hub, "hf://org/small", "", "its hash in git isn't"),
        ):
            for name in ("config.json", "model.safetensors.index.json", "tokenizer.json"):
                fault = server.fail("flip", matching=rf"GET .*{name}{media}", times=1)
                assert call("convert", url, tmp_path / "out", *OPTIONS) in (1, 2)
                assert fault.hits == 1
                assert words in " ".join(capsys.readouterr().err.split())
                assert not (tmp_path / "out/0").exists()


def test_a_header_that_was_damaged_when_it_was_planned(gcs: FakeGcs, tmp_path: Path) -> None:
    """Two names were exchanged in it, of tensors alike: the plan follows from that."""
    opened = open_hf("gs://bucket/models/it")
    names = {
        f"model.layers.0.self_attn.{a}_norm.weight": f"model.layers.0.self_attn.{b}_norm.weight"
        for a, b in ("qk", "kq")
    }
    shards = [
        dataclasses.replace(
            shard,
            tensors=tuple(
                dataclasses.replace(tensor, name=names.get(tensor.name, tensor.name)) for tensor in shard.tensors
            ),
        )
        for shard in opened.shards
    ]
    conversion = plan_conversion(ConvertOptions(), dataclasses.replace(opened, shards=tuple(shards)))
    with pytest.raises(Failed, match="its header isn't what it was planned with"):
        carry_out(conversion, str(tmp_path / "out"), progress=False)
    assert not (tmp_path / "out/0").exists()


@pytest.mark.parametrize(("size", "hashed"), [(100, {"checked"}), (70_000, {"checked", "stated"})])
def test_what_is_left_out_is_read_for_the_sum_where_it_is_small(
    size: int, hashed: set[str], gcs: FakeGcs, tmp_path: Path
) -> None:
    """A file of which much isn't converted keeps its bucket's word."""
    parts = split(random_tensors(DEEPSEEK) | {"model.layers.3.enorm.weight": np.zeros(size, BF16)}, 2)
    for path in save(tmp_path / "hf", DEEPSEEK, *parts).iterdir():
        gcs.put("bucket", f"models/more/{path.name}", path.read_bytes())
    assert call("convert", "gs://bucket/models/more", tmp_path / "out") == 0
    assert hashes(tmp_path / "out") == hashed


def test_the_hub_is_checked_on_request(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its sha256 in a pass of its own, which learns the crc32c; so the reads of the units are checked too."""
    with FakeHub() as hub:
        hub.add("org/model", source)
        for name, value in hub.env().items():
            monkeypatch.setenv(name, value)
        options = ("convert", "hf://org/model", tmp_path / "out", *OPTIONS, "--check_source", "true")
        # behind the pass: three headers in two parts, three last bytes, three files
        fault = hub.cdn.fail("flip", every=15, times=1)
        assert call(*options) == 1
        assert fault.hits == 1
        assert "damaged on its way" in capsys.readouterr().err
        assert not (tmp_path / "out/0").exists()
        hub.cdn.faults = []
        assert call(*options, "--resume") == 0
        hub.cdn.fail("flip", every=11, times=1)  # in the pass
        assert call(*options, "--overwrite") == 2
        assert "its sha256 isn't" in capsys.readouterr().err
    assert hashes(tmp_path / "out") == {"checked"}
    assert digests(restore(tmp_path / "out/0")) == WANTED
