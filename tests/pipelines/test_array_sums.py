"""Damage that a checkpoint's own digests know: noticed by what reads its arrays, before anything is published."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers.clients import asking
from servers.gcs import FakeGcs
from support import QWEN3_MOE, call, convert, make_release

import weightbeam as wb
from weightbeam.formats.orbax.unpacking import share_name
from weightbeam.formats.staging import UNPACKED, FolderStaging
from weightbeam.formats.staging.ledger import Ledger
from weightbeam.formats.targets.published import RECORD
from weightbeam.model_mappings.boxes import whole
from weightbeam.pipelines.commands.export import plan as plan_export
from weightbeam.pipelines.commands.reshard import plan as plan_reshard
from weightbeam.transforms.comparing.array_sums import Shares, add_shares, find_damage, shard_count
from weightbeam.transforms.planning import from_checkpoint
from weightbeam.transforms.planning.exporting import Export
from weightbeam.transforms.planning.resharding import Reshard

MODEL = QWEN3_MOE | dict(vocab_size=512)
# how a checkpoint is stored
FORMS = {
    "packed": (),
    "for a mesh": ("--mesh", "fsdp=2"),
    "compressed": ("--compression", "zstd"),
    "in files": ("--use_ocdbt", "false", "--use_zarr3", "false"),
}
# what reads it
WAYS = {
    "export": ("export",),
    "export, unpacked": ("export", "--unit_bytes", "6K"),
    "copied": ("reshard",),
    "parts, re-cut": ("reshard", "--state", "params", "--mesh", "fsdp=4"),
    "layers apart": ("reshard", "--scan_layers", "false"),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sums")
    source = make_release(folder / "hf", MODEL)
    return {
        form: convert(source, folder / f"ckpt{number}", *options)
        for number, (form, options) in enumerate(FORMS.items())
    }


def largest(step: Path) -> Path:
    """The data file with most bytes."""
    files = [path for path in (step / "items").rglob("*") if path.is_file() and not path.name.endswith("json")]
    return max(files, key=lambda path: path.stat().st_size)


def damaged(step: Path, output: Path, damage: str) -> Path:
    """A copy of a checkpoint whose largest file lost its content, or a bit of it; a file of a database keeps its index."""
    step = Path(shutil.copytree(step.parent, output)) / "0"
    file = largest(step)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "zeros":
        content[len(content) // 4 : len(content) // 2] = bytes(len(content) // 2 - len(content) // 4)
    file.write_bytes(content)
    return step


@pytest.mark.parametrize(
    ("form", "way", "damage"),
    [("packed", way, "a bit") for way in WAYS]
    + [("for a mesh", "export", "zeros"), ("for a mesh", "parts, re-cut", "zeros"), ("in files", "export", "a bit")],
)
def test_damage_is_noticed_before_anything_is_published(
    form: str, way: str, damage: str, checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One flipped bit, or a stretch of zeros, in chunks that nothing protects: the array and the file are named."""
    step = damaged(checkpoints[form], tmp_path / "ckpt", damage)
    command, *options = WAYS[way]
    assert call(command, step, tmp_path / "out", *options) == 1
    said = capsys.readouterr().err
    assert "arrays that were compared aren't what conversion.json says was written" in said
    assert "params.params." in said
    assert str(largest(step).parent if form == "in files" else largest(step)) in said
    assert "the source is damaged" in said
    assert "--overwrite" in said
    assert not (tmp_path / "out" / ("" if command == "export" else "0")).exists()


@pytest.mark.parametrize(
    ("form", "way"),
    [("compressed", way) for way in WAYS] + [(form, "parts, re-cut") for form in ("packed", "for a mesh", "in files")],
)
def test_what_is_right_is_compared(
    form: str, way: str, checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it, and nothing is said of arrays that weren't."""
    command, *options = WAYS[way]
    report = tmp_path / "report.json"
    assert call(command, checkpoints[form], tmp_path / "out", *options, "--json", report) == 0
    arrays = len(json.loads((checkpoints[form] / "conversion.json").read_text())["digests"])
    assert json.loads(report.read_text())["checked"] == {"arrays": arrays, "not_compared": 0}
    assert "not compared" not in capsys.readouterr().out


def edit_record(step: Path, **fields: Any) -> None:
    file = step / "conversion.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize("command", ["export", "reshard"])
def test_arrays_without_a_digest_are_counted(
    command: str, checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the last line, and in JSON, with the reason: this record doesn't know them, it has none, or there is none."""
    step = Path(shutil.copytree(checkpoints["packed"].parent, tmp_path / "ckpt")) / "0"
    digests = json.loads((step / "conversion.json").read_text())["digests"]
    edit_record(step, digests=dict(list(digests.items())[:-2]))
    made = getattr(wb, command)(str(step), str(tmp_path / "out"), progress=False)
    said = f"not compared: 2 of {len(digests)} arrays: conversion.json has no digest of them"
    assert str(made).splitlines()[-1] == said
    checked = made.to_dict()["checked"]
    assert (checked["arrays"], checked["not_compared"]) == (len(digests) - 2, 2)
    edit_record(step, digests={})
    made = getattr(wb, command)(str(step), str(tmp_path / "bare"), progress=False)
    none = f"not compared: {len(digests)} of {len(digests)} arrays"
    assert str(made).splitlines()[-1] == f"{none}: conversion.json has no digests"
    (step / "conversion.json").unlink()
    like = {"like": str(checkpoints["packed"].parents[1] / "hf")} if command == "export" else {}
    made = getattr(wb, command)(str(step), str(tmp_path / "unknown"), progress=False, **like)
    why = "no conversion.json with their digests lies beside them, which Weightbeam alone writes"
    assert str(made).splitlines()[-1] == f"{none}: {why}"


def test_a_step_that_is_compared_hides_no_array(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """What `reshard` writes has a digest of its step, too, which is compared where it is written anew."""
    first = wb.reshard(str(checkpoints["packed"]), str(tmp_path / "ckpt"), progress=False)
    arrays = first.to_dict()["checked"]["arrays"]
    again = wb.reshard(str(tmp_path / "ckpt"), str(tmp_path / "again"), progress=False)
    assert again.to_dict()["checked"] == {"arrays": arrays + 1, "not_compared": 0}
    assert "not compared" not in str(
        wb.verify(str(tmp_path / "ckpt"), progress=False)
    )  # though no tensor becomes a step
    step = tmp_path / "ckpt/0"
    digests = json.loads((step / "conversion.json").read_text())["digests"]
    edit_record(step, digests={key: digest for key, digest in digests.items() if not key.endswith("embedding")})
    last = wb.reshard(str(step), str(tmp_path / "last"), progress=False)
    assert str(last).splitlines()[-1].startswith(f"not compared: 1 of {arrays + 1} arrays")


READERS = {
    "export": ("export", "STEP", "OUT"),
    "quantize": ("quantize", "STEP", "OUT"),
    "reshard": ("reshard", "STEP", "OUT"),
    "verify": ("verify", "STEP"),
    "verify of an export": ("verify", "EXPORT", "STEP"),
    "diff": ("diff", "STEP", "STEP"),
}
UNREADABLE = {"zeros": b"\0" * 5000, "empty": b"", "cut": b'{"digests": {', "a list": b"[]"}


@pytest.mark.parametrize(
    ("reader", "content"),
    [*((reader, "zeros") for reader in READERS), *(("export", how) for how in ("empty", "cut", "a list"))],
)
def test_a_record_that_cannot_be_read_stops_everyone(
    reader: str, content: str, checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever reads the checkpoint: what lies beside such a record may be damaged as well; the way on is named."""
    step = Path(shutil.copytree(checkpoints["packed"].parent, tmp_path / "ckpt")) / "0"
    if reader == "verify of an export":
        assert call("export", step, tmp_path / "tuned") == 0
    (step / "conversion.json").write_bytes(UNREADABLE[content])
    places = {"STEP": step, "OUT": tmp_path / "out", "EXPORT": tmp_path / "tuned"}
    capsys.readouterr()
    assert call(*(places.get(word, word) for word in READERS[reader])) in (1, 2)
    said = capsys.readouterr()
    said = " ".join((said.err + said.out).split())
    assert f"{step / 'conversion.json'}: " in said
    assert "move this file away" in said
    assert "Traceback" not in said
    assert not list(tmp_path.glob("out/**/*.safetensors"))


def test_small_files_are_compared(
    checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`release.zip` and `maxtext.yml` by the hashes of the record; a bit of the former, a field of the latter, or none
    of it. What the record of an earlier version doesn't know is said.
    """
    step = Path(shutil.copytree(checkpoints["packed"].parent, tmp_path / "ckpt")) / "0"
    files = json.loads((step / "conversion.json").read_text())["files"]
    assert sorted(files) == ["maxtext.yml", "release.zip"]
    assert call("verify", step) == 0
    assert call("reshard", step, tmp_path / "again") == 0
    again = tmp_path / "again" / "0"
    assert json.loads((again / "conversion.json").read_text())["files"] == files
    for name, commands in (("release.zip", ("export", "reshard", "verify")), ("maxtext.yml", ("reshard", "verify"))):
        content = (step / name).read_bytes()
        for number, other in enumerate((content[:-1] + bytes([content[-1] ^ 1]), b"\0" * len(content), None)):
            (step / name).unlink()
            if other is not None:
                (step / name).write_bytes(other)
            for command in commands:
                capsys.readouterr()
                out = tmp_path / f"{command}{number}"
                assert call(command, step, *([] if command == "verify" else [out])) != 0
                said = " ".join(capsys.readouterr().err.split())
                assert name in said
                assert ("is gone: " in said) == (other is None)
                assert "take its line out of conversion.json" in said
                assert not out.exists()
            (step / name).write_bytes(content)
    edit_record(step, files={})
    capsys.readouterr()
    assert call("export", step, tmp_path / "old") == 0
    last = "not compared: release.zip and maxtext.yml: conversion.json has no hash of them"
    assert capsys.readouterr().out.splitlines()[-1] == last
    found = wb.verify(str(step), progress=False)
    assert found.ok
    assert found.warnings == [
        f"{name} isn't compared: conversion.json has no hash of it" for name in ("release.zip", "maxtext.yml")
    ]


def test_a_shard_that_is_read_in_part_has_no_share(checkpoints: dict[str, Path]) -> None:
    """So its array isn't compared, whatever the values; nor is one whose shards were read twice."""
    planned = plan_export(str(checkpoints["for a mesh"]))
    array = next(array for array in planned.summed if len(array.shape) > 1 and shard_count(array) > 1)
    zeros = np.zeros(array.shape, array.dtype)
    for parts in ([tuple((0, max(1, size - 1)) for size in array.shape)], [whole(array.shape)] * 2):
        shares = Shares()
        for box in parts:
            add_shares(shares, array, box, zeros[tuple(slice(*span) for span in box)])
        compared, damaged = find_damage(planned.source.record, [array], [shares])
        assert (compared.arrays, compared.not_compared, damaged) == (0, 1, [])
    add_shares(shares := Shares(), array, whole(array.shape), zeros)
    assert find_damage(planned.source.record, [array], [shares])[1] == [array.key]


def test_the_ways_are_what_they_are_called(checkpoints: dict[str, Path]) -> None:
    assert plan_export(str(checkpoints["compressed"]), unit_bytes="6K").chunks
    assert plan_export(str(checkpoints["packed"]), unit_bytes="6K").chunks
    ways = plan_reshard(str(checkpoints["packed"])).by_way()
    assert ways.keys() == {"copied"}
    ways = plan_reshard(str(checkpoints["packed"]), state="params", mesh="fsdp=4").by_way()
    assert "re-cut" in ways


def test_damage_on_the_way_is_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bit that flips in an answer of a bucket: --resume makes the units anew that read it, and the bits are right."""
    step = convert(make_release(tmp_path / "hf", MODEL), tmp_path / "ckpt", "--use_ocdbt", "false")
    assert call("export", step, tmp_path / "wanted") == 0
    with FakeGcs("bucket") as gcs, asking(gcs):
        for path in step.rglob("*"):
            if path.is_file():
                gcs.put("bucket", f"ckpt/0/{path.relative_to(step)}", path.read_bytes())
        options = ("export", "gs://bucket/ckpt/0", tmp_path / "out", "--unit_bytes", "300000")
        fault = gcs.fail("flip", matching=r"GET .*embedding(/|%2F)c.*alt=media", times=1)
        assert call(*options) == 1
        assert fault.hits == 1
        assert "token_embedder.embedding" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
        gcs.faults = []
        assert call(*options, "--resume") == 0
    wanted, found = (json.loads((tmp_path / name / RECORD).read_text())["digests"] for name in ("wanted", "out"))
    assert found.keys() == wanted.keys()
    for file in (tmp_path / "wanted").glob("*.safetensors"):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


UNPACKING = {"export": ("--unit_bytes", "6K"), "reshard": ("--scan_layers", "false", "--unit_bytes", "6K")}


@pytest.mark.parametrize("command", UNPACKING)
def test_a_repeated_assembly_finds_what_was_unpacked(
    command: str, checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write fails in passing once all was compared, and the engine repeats its bundle; nothing of what was unpacked is
    published.
    """
    planned, failed = Export if command == "export" else Reshard, []
    put, assemble = FolderStaging.put, planned.assemble

    def fail_once(staging: FolderStaging, name: str, data: bytes) -> None:
        if not failed:
            failed.append(name)
            raise OSError(5, "in passing")
        put(staging, name, data)

    def repeat(self: Any, staging: FolderStaging, overwrite: bool) -> None:
        assert list((Path(staging.plan_folder) / UNPACKED).rglob("*.digest"))
        with contextlib.suppress(OSError):
            return assemble(self, staging, overwrite)
        return assemble(self, staging, overwrite)

    monkeypatch.setattr(FolderStaging, "put", fail_once)
    monkeypatch.setattr(planned, "assemble", repeat)
    assert call(command, checkpoints["compressed"], tmp_path / "out", *UNPACKING[command]) == 0
    assert failed
    assert not list((tmp_path / "out").rglob(UNPACKED))


def test_a_stop_while_damage_is_withdrawn(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The chunk that was damaged on its way isn't read again before the units that read the damage are out of the
    ledger: else they would count with a share that is right.
    """
    plain = from_checkpoint.unpack

    def damage_share(array: Any, index: Any, place: Any, *more: Any) -> int:
        nbytes = plain(array, index, place, *more)
        place.write(share_name(array, index), b"1")
        return nbytes

    def stop(*_: object) -> None:
        raise OSError(5, "stopped")

    arguments = ("export", checkpoints["compressed"], tmp_path / "out", *UNPACKING["export"])
    with monkeypatch.context() as patched:
        patched.setattr(from_checkpoint, "unpack", damage_share)
        patched.setattr(Ledger, "withdraw", stop)
        assert call(*arguments) == 1
    capsys.readouterr()
    assert call(*arguments, "--resume") == 1
    assert "aren't what conversion.json says" in capsys.readouterr().err
    assert call(*arguments, "--resume") == 0
