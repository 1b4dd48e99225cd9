"""A checkpoint of ours whose bits have changed: `load` notices what it reads whole, and says what it couldn't compare."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
from loading.jobs import run_job
from support import LLAMA, convert, make_release

import weightbeam as wb
from weightbeam.formats.storage import LocalFolder, Store, identity
from weightbeam.formats.storage.identity import Files, hash_blocks
from weightbeam.pipelines.loading.checkpoint import Orbax

MODEL = LLAMA | dict(vocab_size=8192)  # so that a shard is of many chunks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digests")
    return convert(make_release(folder / "hf", MODEL), folder / "ckpt")


def damaged(checkpoint: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of a checkpoint of which a bit is another one, and the file that holds it."""
    step = Path(shutil.copytree(checkpoint, tmp_path / "damaged" / "0"))
    file = max((step / "items").glob("ocdbt.process_*/d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return step, file


def test_a_damaged_checkpoint_is_not_loaded(checkpoint: Path, tmp_path: Path) -> None:
    step, file = damaged(checkpoint, tmp_path)
    with pytest.raises(
        wb.Failed, match=r"1 of 12 arrays that were compared aren't what conversion.json says"
    ) as raised:
        wb.load(str(step), mesh="fsdp=1")
    assert str(file) in str(raised.value)


def test_what_several_processes_read_is_compared(tmp_path: Path) -> None:
    """Each reads some shards of an array, and no process has all; small arrays are read by every process."""
    release = make_release(tmp_path / "hf", MODEL | dict(hidden_size=256, intermediate_size=1024))
    step = convert(release, tmp_path / "cut", "--mesh", "fsdp=8")
    sources = {"whole": step, "damaged": damaged(step, tmp_path)[0]}
    meshes = "fsdp=8", "data=8", "fsdp=4,data=2"
    loads = {f"{name} on {mesh}": dict(source=source, mesh=mesh) for name, source in sources.items() for mesh in meshes}
    told, ended = run_job(2, loads, tmp_path)
    for name, processes in told.items():
        assert len(processes) == 2, (name, [each.stderr[-3000:] for each in ended])
        for said in processes:
            if name.startswith("damaged"):
                assert "aren't what conversion.json says" in said.get("failed", ""), (name, said)
            else:
                assert "shards" in said, (name, said)
    assert not any("not compared" in each.stderr for each in ended)


def test_a_copy_that_is_damaged_on_one_host(tmp_path: Path) -> None:
    """Of those who read a shard one is the first, whose values are compared with the digests; what the others read of
    their own copies is compared with that. Here no process reads a whole array.
    """
    release = make_release(tmp_path / "hf", MODEL | dict(hidden_size=256, intermediate_size=1024))
    step = convert(release, tmp_path / "cut", "--mesh", "fsdp=2")
    other = damaged(step, tmp_path)[0]
    without = Path(shutil.copytree(step, tmp_path / "without" / "0"))
    record = json.loads((step / "conversion.json").read_bytes())
    (without / "conversion.json").write_text(json.dumps(record | {"digests": {}}))
    sources = {"good": step, "damaged": [step, other, step, other], "without": [step, step, without, step]}
    loads = {name: dict(source=source, mesh="fsdp=2,data=4") for name, source in sources.items()}
    told, ended = run_job(4, loads, tmp_path)
    assert all("shards" in said for said in told["good"]), [each.stderr[-3000:] for each in ended]
    assert len(told["damaged"]) == 4
    for said in told["damaged"]:
        assert "some processes read other values than others of" in said.get("failed", ""), said
    for said in told["without"]:  # before anything is read
        assert "what conversion.json says of its arrays is" in said.get("refused", ""), said


def test_what_is_whole_is_compared(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All of it, where steps are large; with small ones what is read in parts of shards isn't, and that is logged."""
    with caplog.at_level(logging.INFO, "weightbeam"):
        wb.load(str(checkpoint), mesh="fsdp=1")
        assert "not compared" not in caplog.text
        wb.load(str(checkpoint), mesh="fsdp=1", unit_bytes=100_000)
    assert "not compared" in caplog.text
    assert "read in other parts than those that conversion.json has digests of" in caplog.text


def test_a_record_that_cannot_be_read_or_is_none(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The former may lie beside damaged arrays, and is refused; without any it is logged that nothing was compared."""
    step = Path(shutil.copytree(checkpoint, tmp_path / "0"))
    (step / "conversion.json").write_bytes(b"\0" * 100)
    with pytest.raises(wb.Refused, match=r"conversion\.json: isn't JSON.* move this file away"):
        wb.load(str(step), mesh="fsdp=1")
    (step / "conversion.json").unlink()
    with caplog.at_level(logging.INFO, "weightbeam"):
        loaded = wb.load(str(step), mesh="fsdp=1")
    assert loaded
    assert "not compared: 12 of 12 arrays: no conversion.json with their digests lies beside them, which" in caplog.text


def test_only_several_processes_hash_the_files(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where many files lie, that takes longer than to open them; nobody else compares them."""
    hashed: list[str] = []

    def note(store: Store, name: str, places: Iterable[tuple[int, int]]) -> str:
        hashed.append(name)
        return hash_blocks(store, name, places)

    monkeypatch.setattr(identity, "hash_blocks", note)
    items = LocalFolder(str(checkpoint / "items"))
    opened = Orbax(items)
    assert not hashed
    assert opened.identity()["bytes of its files"] == Files.of(items).blocks
    assert set(hashed) == {file.name for file in items.list()}
