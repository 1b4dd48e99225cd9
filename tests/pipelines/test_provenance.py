"""What a checkpoint says of itself: where it comes from, and digests that are right and that notice a change."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
from support import DEEPSEEK, LLAMA, call, convert, random_tensors, save, split

from weightbeam.formats.orbax import find_items, open_arrays, read_arrays
from weightbeam.formats.provenance import digest, total


def record(step: Path) -> dict:
    return json.loads((step / "conversion.json").read_bytes())


def test_the_record_tells_the_source_the_options_and_the_losses(tmp_path: Path) -> None:
    """In a file, and in the checkpoint's custom metadata without the long lists."""
    tensors = random_tensors(DEEPSEEK) | {"model.layers.3.enorm.weight": np.zeros(32, np.float32)}
    source = save(tmp_path / "source", DEEPSEEK, *split(tensors, 3))
    step = convert(source, tmp_path / "out", "--mesh", "fsdp=4")
    found = record(step)
    assert found["source"] == str(source)
    assert [(shard["name"], shard["size"]) for shard in found["shards"]] == [(file.name, file.stat().st_size) for file in sorted(source.glob("*.safetensors"))]
    assert found["options"]["mesh"] == ["fsdp=4"]
    assert found["dropped"] == {"model.layers.3.enorm.weight": "multi-token prediction, convert it with --mtp"}
    assert set(found["digests"]) == {array.spec.key for array in read_arrays(find_items(step))} - {"step"}
    assert set(found["versions"]) >= {"python", "weightbeam", "apache-beam", "tensorstore"}
    custom = json.loads((step / "_CHECKPOINT_METADATA").read_bytes())["custom_metadata"]["weightbeam"]
    assert custom == {key: value for key, value in found.items() if key not in ("shards", "axes")} | {"dropped": {found["dropped"].popitem()[1]: 1}}


def test_digests_are_those_of_what_lies_on_the_disk(tmp_path: Path) -> None:
    """Read back shard by shard; the same whatever the units; another value, another digest."""
    source = save(tmp_path / "source", LLAMA, random_tensors(LLAMA))
    steps = [convert(source, tmp_path / name, "--mesh", "fsdp=4", *options) for name, options in {"a": (), "b": ("--unit_bytes", "24000")}.items()]
    assert record(steps[0])["digests"] == record(steps[1])["digests"]

    stores, shares = open_arrays(find_items(steps[0])), []
    for array in read_arrays(find_items(steps[0])):
        if array.spec.key != "step":
            for index in np.ndindex(*array.spec.grid):
                box = array.spec.shard_box(index)
                values = np.asarray(stores[array.spec.key][tuple(slice(*span) for span in box)].read().result())
                shares.append({array.spec.key: f"{digest(array.spec, box, values):x}"})
    assert total(shares) == record(steps[0])["digests"]

    other = random_tensors(LLAMA)
    other["model.norm.weight"].view(np.uint16)[3] ^= 1
    changed = record(convert(save(tmp_path / "other", LLAMA, other), tmp_path / "c", "--mesh", "fsdp=4"))["digests"]
    assert {key for key, value in record(steps[0])["digests"].items() if changed[key] != value} == {"params.params.decoder.decoder_norm.scale"}


def test_a_hub_cache_tells_the_hash_of_its_files(tmp_path: Path) -> None:
    """A blob's name is its sha256."""
    made = save(tmp_path / "made", LLAMA, random_tensors(LLAMA))
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


def test_inspect_shows_where_a_checkpoint_comes_from(tmp_path: Path, capsys) -> None:
    """Source, family, plan and versions; not as one line of JSON."""
    source = save(tmp_path / "source", LLAMA, random_tensors(LLAMA))
    step = convert(source, tmp_path / "out")
    capsys.readouterr()
    assert call("inspect", step) == 0
    shown = capsys.readouterr().out
    for text in (rf"source +{source}", "family +llama", f"plan +{record(step)['plan']}", "versions +python .*weightbeam "):
        assert re.search(text, shown)
