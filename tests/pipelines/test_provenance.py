"""What a checkpoint says of itself: where it comes from, and digests that are right and that notice a change."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lazily import lazily
from support import DEEPSEEK, LLAMA, call, convert, make_release, random_tensors, save, split

from weightbeam.formats.orbax import find_items, open_arrays, read_arrays
from weightbeam.formats.record.provenance import digest, tensors_of, total
from weightbeam.formats.release.archive import packed_files
from weightbeam.formats.safetensors import read_header
from weightbeam.formats.storage import StorageError, open_store

ocp = lazily("orbax.checkpoint")


def record(step: Path) -> dict:
    return json.loads((step / "conversion.json").read_bytes())


def test_the_record_tells_the_source_the_options_and_the_losses(tmp_path: Path) -> None:
    """In a file, and in the checkpoint's custom metadata without the long lists."""
    tensors = random_tensors(DEEPSEEK) | {"model.layers.3.enorm.weight": np.zeros(32, np.float32)}
    source = save(tmp_path / "source", DEEPSEEK, *split(tensors, 3))
    step = convert(source, tmp_path / "out", "--mesh", "fsdp=4")
    found = record(step)
    assert found["source"] == str(source)
    assert [(shard["name"], shard["size"]) for shard in found["shards"]] == [
        (file.name, file.stat().st_size) for file in sorted(source.glob("*.safetensors"))
    ]
    assert found["options"]["mesh"] == ["fsdp=4"]
    assert found["dropped"] == {"model.layers.3.enorm.weight": "multi-token prediction, convert it with --mtp"}
    assert set(found["digests"]) == {array.spec.key for array in read_arrays(find_items(step))} - {"step"}
    assert set(found["versions"]) >= {"python", "weightbeam", "apache-beam", "tensorstore"}
    custom = json.loads((step / "_CHECKPOINT_METADATA").read_bytes())["custom_metadata"]["weightbeam"]
    assert custom == {
        key: value for key, value in found.items() if key not in ("shards", "axes", "config", "tensors")
    } | {"dropped": {found["dropped"].popitem()[1]: 1}}


def test_digests_are_those_of_what_lies_on_the_disk(tmp_path: Path) -> None:
    """Read back shard by shard; the same whatever the units; another value, another digest."""
    source = make_release(tmp_path / "source")
    steps = [
        convert(source, tmp_path / name, "--mesh", "fsdp=4", *options)
        for name, options in {"a": (), "b": ("--unit_bytes", "24000")}.items()
    ]
    assert record(steps[0])["digests"] == record(steps[1])["digests"]

    stores, shares = open_arrays(find_items(steps[0])), []
    for array in read_arrays(find_items(steps[0])):
        if array.spec.key != "step":
            for index in np.ndindex(*array.spec.grid):
                box = array.spec.shard_box(index)
                values = np.asarray(stores[array.spec.key][tuple(slice(*span) for span in box)].read().result())
                shares.append({array.spec.key: f"{digest(array.spec.key, array.spec.dtype, box, values):x}"})
    assert total(shares) == record(steps[0])["digests"]

    other = random_tensors(LLAMA)
    other["model.norm.weight"].view(np.uint16)[3] ^= 1
    changed = record(convert(save(tmp_path / "other", LLAMA, other), tmp_path / "c", "--mesh", "fsdp=4"))["digests"]
    assert {key for key, value in record(steps[0])["digests"].items() if changed[key] != value} == {
        "params.params.decoder.decoder_norm.scale"
    }


def test_a_hub_cache_tells_the_hash_of_its_files(tmp_path: Path) -> None:
    """A blob's name is its sha256."""
    made = make_release(tmp_path / "made")
    data = (made / "model.safetensors").read_bytes()
    sha = hashlib.sha256(data).hexdigest()
    blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "main"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / sha).write_bytes(data)
    (snapshot / "model.safetensors").symlink_to(blobs / sha)
    (snapshot / "config.json").write_bytes((made / "config.json").read_bytes())
    assert [shard["sha256"] for shard in record(convert(snapshot, tmp_path / "out"))["shards"]] == [sha]
    assert all("sha256" not in shard for shard in record(convert(made, tmp_path / "plain"))["shards"])


def test_the_first_source_is_known_when_what_lay_between_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Virtual, materialised, resharded, and resharded once more: `inspect` and `verify` name the release."""
    source = save(tmp_path / "source", LLAMA, *split(random_tensors(LLAMA), 2))
    convert(source, tmp_path / "virtual", "--virtual", "--scan_layers", "false")
    ways = [("materialize", "--mesh", "fsdp=4"), ("reshard", "--mesh", "fsdp=2"), ("reshard", "--scan_layers", "true")]
    before = "virtual"
    for number, (command, *options) in enumerate(ways):
        made = f"made{number}"
        assert call(command, tmp_path / before, tmp_path / made, *options) == 0
        shutil.rmtree(tmp_path / before)
        assert record(tmp_path / made / "0")["source"] == str(source)
        capsys.readouterr()
        assert call("inspect", tmp_path / made) == 0
        assert re.search(rf"source +{source}\n", capsys.readouterr().out)
        assert call("verify", tmp_path / made) == 0
        assert f"compared with {source}," in capsys.readouterr().err
        before = made


def test_inspect_shows_where_a_checkpoint_comes_from(tmp_path: Path, capsys) -> None:
    """Source, family, plan and versions; not as one line of JSON."""
    source = make_release(tmp_path / "source")
    step = convert(source, tmp_path / "out", "--mesh", "fsdp=2", "--mesh", "fsdp=4", "--scan_layers", "false")
    capsys.readouterr()
    assert call("inspect", step) == 0
    shown = capsys.readouterr().out
    for text in (
        rf"source +{source}",
        "family +llama",
        f"plan +{record(step)['plan']}",
        "model +none of MaxText's has these sizes",
        "options +scan_layers=false, .*, mesh=fsdp=2, mesh=fsdp=4, ",
        "versions +python .*weightbeam ",
    ):
        assert re.search(text, shown)


def test_inspect_of_a_reshard_says_what_it_was_made_from(tmp_path: Path, capsys) -> None:
    """Of a stranger's checkpoint no release is known, and none is claimed."""
    made = tmp_path / "theirs" / "0" / "default"
    ocp.PyTreeCheckpointer().save(made, {"w": np.ones((4, 4), np.float32)})
    assert call("reshard", made, tmp_path / "out") == 0
    capsys.readouterr()
    assert call("inspect", tmp_path / "out") == 0
    shown = capsys.readouterr().out
    assert re.search(rf"made from +{made}", shown)
    assert not re.search("^(source|family|model) ", shown, re.MULTILINE)


def test_the_record_tells_what_the_release_was(tmp_path: Path) -> None:
    """config.json, and every tensor with its dtype, shape and file, in the order of the files and of their bytes."""
    source = make_release(tmp_path / "source", DEEPSEEK, files=3)
    step = convert(source, tmp_path / "out")
    found = record(step)
    assert found["config"] == json.loads((source / "config.json").read_bytes())
    headers = {file.name: read_header(str(file)) for file in sorted(source.glob("*.safetensors"))}
    wanted = [
        (tensor.name, tensor.dtype, tensor.shape, name) for name, tensors in headers.items() for tensor in tensors
    ]
    assert [(tensor.name, tensor.dtype, tensor.shape, tensor.path) for tensor in tensors_of(found).values()] == wanted
    name, *_, file = wanted[0]
    assert found["tensors"][name] == {"dtype": "BF16", "shape": list(wanted[0][2]), "file": file}
    lines = (step / "conversion.json").read_text().splitlines()
    assert sum(f'"{name}": {{"dtype"' in line for line in lines) == 1  # a line each


@pytest.mark.parametrize(
    "tensors",
    [None, [], {"a": {"dtype": "BF16", "shape": [1]}}, {"a": {"dtype": "X", "shape": [1], "file": "x"}}, {"a": 1}],
)
def test_a_record_without_tensors(tensors: Any) -> None:
    with pytest.raises(StorageError, match=r"conversion.json doesn't say which tensors the release had"):
        tensors_of({} if tensors is None else {"tensors": tensors})


SMALL = {
    "README.md": b"---\nlicense: mit\n---\n", "tokenizer.json": b"{}", "chat_template.jinja": b"{{ x }}\r\n", "generation_config.json": b"{ }",
    "LICENSE": b"free", "modeling_x.py": b"raise SystemExit\n", "additional_chat_templates/rag.jinja": b"r", "hf_quant_config.json": b'{"quantization": {}}',
}  # fmt: skip


def with_small_files(folder: Path) -> Path:
    """A release with small files, and with others that aren't taken."""
    source = make_release(folder)
    for name, data in SMALL.items() | {("pytorch_model.bin", b"\x80\x04"), ("a.png", b"")}:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(data)
    return source


def test_the_small_files_lie_with_the_checkpoint(tmp_path: Path) -> None:
    """Byte for byte, in one archive that `unzip` reads, and that stock Orbax takes neither for an item nor for a step;
    a resume leaves them.
    """
    source = with_small_files(tmp_path / "source")
    step = convert(source, tmp_path / "out")
    wanted = SMALL | {"config.json": (source / "config.json").read_bytes()}
    assert dict(packed_files(open_store(step)) or {}) == wanted
    with zipfile.ZipFile(step / "release.zip") as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == wanted
    names = ["_CHECKPOINT_METADATA", "commit_success.txt", "conversion.json", "items", "maxtext.yml", "release.zip"]
    assert sorted(path.name for path in step.iterdir()) == names
    with ocp.CheckpointManager(tmp_path / "out") as manager:
        assert manager.all_steps() == [0]
        assert set(manager.item_metadata(0).keys()) == {"items"}
    assert (step / "release.zip").read_bytes() == (convert(source, tmp_path / "again") / "release.zip").read_bytes()


def test_a_small_file_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A link that leads out of the release is left out and said; the weights are converted."""
    source = with_small_files(tmp_path / "source")
    (tmp_path / "secret").write_text("secret")
    (source / "NOTICE").symlink_to(tmp_path / "secret")
    step = convert(source, tmp_path / "out")
    assert "NOTICE" not in (packed_files(open_store(step)) or {})
    assert (
        f"{source}/NOTICE isn't kept with the checkpoint: a symbolic link that leads out of the folder"
        in capsys.readouterr().err
    )


def archive(members: dict[str, bytes], **how: Any) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", **how) as made:
        for name, data in members.items():
            made.writestr(name, data)
    return buffer.getvalue()


def test_an_archive_of_a_stranger(tmp_path: Path) -> None:
    """Names that climb, weights and folders are nobody's; what is too large is left out before it is unpacked; damage
    is said.
    """
    step = open_store(tmp_path)
    assert packed_files(step) is None
    members = {
        "../LICENSE": b"x",
        "/README.md": b"x",
        "model.safetensors": b"x",
        "a/config.json": b"x",
        "tokenizer.json": bytes(70 << 20),
        "config.json": b"{}",
    }
    step.write("release.zip", archive(members, compression=zipfile.ZIP_DEFLATED))
    files = packed_files(step)
    assert files is not None
    assert (dict(files), list(files.left)) == ({"config.json": b"{}"}, ["tokenizer.json"])
    for data in (b"", b"PK\x03\x04", archive({"config.json": b"{}"})[:-5]):
        step.write("release.zip", data)
        with pytest.raises(StorageError, match="isn't a ZIP archive"):
            packed_files(step)
    damaged = archive({"config.json": b'{"a": 1}'}).replace(b'"a": 1', b'"a": 2')
    step.write("release.zip", damaged)
    with pytest.raises(StorageError, match=r"config\.json can't be read: Bad CRC-32"):
        dict(packed_files(step) or {})
