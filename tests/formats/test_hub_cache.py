"""A hub's cache as a source: filled by huggingface_hub itself, read instead of the hub, also without one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download
from servers.clients import at_hub
from servers.hub import FakeHub
from support import call, make_release, stop_midway

from weightbeam.formats.release.small_files import small_files
from weightbeam.formats.safetensors import BoxRead, open_hf, read_boxes
from weightbeam.formats.storage import ChangedError, StorageError, open_store
from weightbeam.formats.storage import hub as hubs
from weightbeam.model_mappings.boxes import whole

REPO = "acme/tiny"
OPTIONS = ("--maxtext_model", "llama2-7b")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """A hub with one model, and an empty cache."""
    make_release(tmp_path / "model", files=2)
    with at_hub(HF_HOME=str(tmp_path / "home")) as server:
        server.add(REPO, tmp_path / "model")
        yield server


def download(hub: FakeHub, tmp_path: Path, **options: object) -> Path:
    """A snapshot as huggingface_hub downloads it; returns its folder. What was asked for it is forgotten."""
    folder = snapshot_download(REPO, cache_dir=tmp_path / "home" / "hub", endpoint=hub.url, **options)
    hub.log.clear()
    hub.cdn.log.clear()
    return Path(folder)


def convert_from_hub(output: Path) -> dict:
    """Converts `hf://…`; gives what the record says of the source and of the arrays."""
    assert call("convert", f"hf://{REPO}", output, *OPTIONS) == 0
    record = json.loads((output / "0" / "conversion.json").read_bytes())
    return {key: record[key] for key in ("source", "plan", "shards", "digests")}


def test_what_the_cache_holds_is_read_from_there(hub: FakeHub, tmp_path: Path) -> None:
    """The hub says what the commit is; not a byte of a file is asked for. All else is as from the hub."""
    wanted = convert_from_hub(tmp_path / "from the hub")
    download(hub, tmp_path)
    assert convert_from_hub(tmp_path / "from the cache") == wanted
    assert (hub.log.counts().get("resolve", 0), len(hub.cdn.log)) == (0, 0)


@pytest.mark.parametrize("said", [b"", b"\xff\xfe", b"main"])
def test_a_cache_that_names_no_commit(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    """As after a full disk: the cache doesn't know the branch."""
    (download(hub, tmp_path).parent.parent / "refs" / "main").write_bytes(said)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(StorageError, match="doesn't know main of this repository"):
        open_store(f"hf://{REPO}")


def test_offline(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request at all, and the same checkpoint."""
    wanted = convert_from_hub(tmp_path / "online")
    download(hub, tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(hubs, "_KNOWN", {})
    assert convert_from_hub(tmp_path / "offline") == wanted
    assert (len(hub.log), len(hub.cdn.log)) == (0, 0)
    assert call("verify", tmp_path / "offline") == 0


def test_what_the_cache_lacks_is_read_from_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    """As after a download of some files."""
    snapshot = download(hub, tmp_path, allow_patterns=["*.json", "model-00001*"])
    assert not (snapshot / "model-00002-of-00002.safetensors").exists()
    convert_from_hub(tmp_path / "out")
    assert hub.log.counts()["resolve"] == 1


def test_a_file_of_another_size_is_not_taken(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Online it is read from the hub; offline the release is refused for it."""
    wanted = convert_from_hub(tmp_path / "wanted")
    shard = download(hub, tmp_path) / "model-00001-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 100)
    assert convert_from_hub(tmp_path / "out") == wanted
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert call("convert", f"hf://{REPO}", tmp_path / "other", *OPTIONS) == 2


def test_a_rotten_blob_is_found(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A small file always; a large one with --check_source true."""
    snapshot = download(hub, tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shard = snapshot / "model-00001-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.resolve().write_bytes(data)
    assert call("convert", f"hf://{REPO}", tmp_path / "out", *OPTIONS, "--check_source", "true") == 2
    assert "model-00001-of-00002.safetensors: isn't what the hub's cache holds it for" in capsys.readouterr().err
    config = snapshot / "config.json"
    config.resolve().write_text(config.read_text().replace("llama", "lamma"))
    assert call("plan", f"hf://{REPO}") == 2
    assert "config.json: isn't what the hub's cache holds it for" in capsys.readouterr().err


def replace_blob(shard: Path) -> None:
    """Other weights under the same hash, in a file of the same size."""
    data = bytearray(shard.read_bytes())
    data[-100:] = bytes(100)
    new = shard.resolve().with_name("new")
    new.write_bytes(data)
    os.replace(new, shard.resolve())


@pytest.mark.parametrize("offline", [False, True])
def test_a_blob_that_is_replaced_isnt_what_was_planned_with(
    offline: bool, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is neither read, nor gone on with."""
    shard = download(hub, tmp_path) / "model-00002-of-00002.safetensors"
    if offline:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    opened = open_hf(f"hf://{REPO}")
    last = [BoxRead(tensor, whole(tensor.shape)) for tensor in opened.shards[1].tensors][-1:]
    read_boxes(last)
    opened.check()
    replace_blob(shard)
    with pytest.raises(ChangedError, match="isn't the file that was planned with"):
        read_boxes(last)
    with pytest.raises(ChangedError, match="inode"):
        opened.check()
    assert open_hf(f"hf://{REPO}").was_touched(opened)


def test_a_blob_that_is_replaced_between_a_stop_and_resume(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = download(hub, tmp_path)
    command = ["convert", f"hf://{REPO}", str(tmp_path / "out"), *OPTIONS, "--unit_bytes", "20000"]
    stop_midway(command, monkeypatch)
    replace_blob(snapshot / "model-00002-of-00002.safetensors")
    capsys.readouterr()
    assert call(*command, "--resume") == 2
    said = capsys.readouterr().err
    assert "model-00002-of-00002.safetensors is another file of that name, with the inode" in " ".join(said.split())


@pytest.mark.parametrize("comes", [True, False])
def test_a_cache_that_is_filled_or_emptied_meanwhile(comes: bool, hub: FakeHub, tmp_path: Path) -> None:
    """Files are the same by their hash, and aren't taken for others."""
    if not comes:
        download(hub, tmp_path)
    opened = open_hf(f"hf://{REPO}")
    files = small_files(open_store(opened.root))
    if comes:
        download(hub, tmp_path)
    else:
        shutil.rmtree(tmp_path / "home" / "hub")
    now = open_hf(opened.root)
    assert (now.shards[0].inode != 0) == comes
    assert now.identity == opened.identity
    assert not now.was_touched(opened)
    opened.check()
    small_files(open_store(opened.root), known=opened.opened)
    reads = [BoxRead(tensor, whole(tensor.shape)) for tensor in opened.tensors.values()]
    assert len(read_boxes(reads)[0]) == len(reads)
    assert files["config.json"] == (tmp_path / "model" / "config.json").read_bytes()


@pytest.mark.parametrize("form", ["hf://", "the snapshot"])
def test_a_small_file_in_lfs_is_compared(
    form: str, hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tokenizer of more than 10 MB is one; its blob is named by its sha256."""
    (tmp_path / "model" / "tokenizer.model").write_bytes(b"pieces")
    hub.commit(REPO, tmp_path / "model", ["tokenizer.model"])
    snapshot = download(hub, tmp_path)
    (snapshot / "tokenizer.model").resolve().write_bytes(b"PIECES")
    source, status = (f"hf://{REPO}", 1) if form == "hf://" else (snapshot, 2)
    assert call("convert", source, tmp_path / "out", *OPTIONS) == status
    assert not (tmp_path / "out" / "0").exists()
    assert "tokenizer.model: " in (said := " ".join(capsys.readouterr().err.split()))
    assert "isn't what the hub's cache holds it for" in said or "its sha256 isn't" in said


def test_offline_and_not_in_the_cache(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused with where it was looked for."""
    commit = download(hub, tmp_path).name
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for revision, words in (("@v1", "doesn't know v1"), (f"@{'0' * 40}", "has no snapshot of this commit")):
        assert call("plan", f"hf://{REPO}{revision}") == 2
        message = capsys.readouterr().err
        assert words in message
        assert str(tmp_path / "home" / "hub") in message
    assert call("plan", f"hf://{REPO}@{commit}", *OPTIONS) == 0
    shutil.rmtree(tmp_path / "home")
    with pytest.raises(StorageError, match="HF_HUB_OFFLINE is set"):
        open_store(f"hf://{REPO}")


def test_a_hub_that_is_out_of_reach(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says that the cache has it: a branch may have moved on, so that isn't taken without being asked for."""
    download(hub, tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(hubs, "BACKOFF", 0.002)
    with pytest.raises(StorageError, match=r"can't be reached.*HF_HUB_OFFLINE=1 reads that"):
        open_store(f"hf://{REPO}")


@pytest.mark.parametrize("whole", [True, False])
def test_offline_what_was_not_downloaded_is_said(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], whole: bool
) -> None:
    """The cache of a server's weights has no tokenizer, and nothing tells that the release has."""
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "tokenizer.json").write_text("{}")
    hub.commit(REPO, tmp_path / "more", ["tokenizer.json"])
    download(hub, tmp_path, allow_patterns=None if whole else ["*.safetensors*", "config.json"])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert call("cut", f"hf://{REPO}", tmp_path / "out", "--layers", "0:1") == 0
    assert ("its cache has no tokenizer" in capsys.readouterr().err) != whole


def test_a_revision_that_clients_take_for_another_address(hub: FakeHub) -> None:
    """`..` behind `revision/` is the repository without one, whose `main` it was taken for."""
    for revision in ("..", ".", "a/../b"):
        with pytest.raises(StorageError, match="with @revision"):
            open_store(f"hf://{REPO}@{revision}")
    assert not hub.log
