"""Sources that look alike are never mixed: names, sizes and times equal, and other values."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from support import TIME, call, make_dated_release, make_release

from weightbeam.formats.safetensors import open_hf
from weightbeam.formats.storage import StorageError
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import ConvertOptions

OPTIONS = ConvertOptions(maxtext_model="llama2-7b")


def test_two_releases_of_equal_sizes_and_times_have_two_plans(tmp_path: Path) -> None:
    """As from reproducible archives: --resume took one for the other, and published a mixture."""
    plans = [plan_conversion(OPTIONS, open_hf(make_dated_release(tmp_path / str(seed), seed))).hash for seed in (1, 2)]
    assert plans[0] != plans[1]
    shutil.move(tmp_path / "1", tmp_path / "moved")
    assert plan_conversion(OPTIONS, open_hf(tmp_path / "moved")).hash == plans[0]


def test_a_file_that_is_rewritten_in_place_and_its_time_set_back(tmp_path: Path) -> None:
    """As by `rsync --inplace -t`, a byte that no fingerprint has looked at."""
    folder = make_dated_release(tmp_path / "hf", 1)
    opened = open_hf(folder)
    file = folder / "model.safetensors"
    with file.open("r+b") as data:
        data.seek(opened.shards[0].tensors[0].offset)
        data.write(b"\x01")
    os.utime(file, ns=(TIME, TIME))
    with pytest.raises(StorageError, match="though its size and time are as before"):
        opened.check()


def test_another_name_for_a_file_is_no_change(tmp_path: Path) -> None:
    folder = make_dated_release(tmp_path / "hf", 1)
    opened = open_hf(folder)
    os.link(folder / "model.safetensors", tmp_path / "other")
    opened.check()


def test_hashes_are_read_where_they_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A blob of a hub's cache is named by its hash, and may be rotten all the same."""
    root = tmp_path / "models--acme--tiny"
    snapshot = make_release(root / "snapshots" / ("0" * 40))
    (root / "blobs").mkdir()
    blob = root / "blobs" / ("a" * 64)
    (snapshot / "model.safetensors").rename(blob)
    (snapshot / "model.safetensors").symlink_to(blob)
    options = ["--virtual", "--link", "copy", "--sha256", "--scan_layers", "false", "--maxtext_model", "llama2-7b"]
    assert call("convert", "--source", snapshot, "--output", tmp_path / "out", *options) in (1, 2)
    assert "its sha256 isn't aaaa" in capsys.readouterr().err


@pytest.mark.parametrize("rotten", [True, False])
def test_known_hashes_are_compared_on_request(rotten: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By default the record says that a hash is the cache's word; with --check_source true it was read, or nothing is
    made.
    """
    snapshot = make_release(tmp_path / "models--acme--tiny" / "snapshots" / ("0" * 40))
    file = snapshot / "model.safetensors"
    blob = snapshot.parents[1] / "blobs" / ("a" * 64 if rotten else hashlib.sha256(file.read_bytes()).hexdigest())
    blob.parent.mkdir()
    file.rename(blob)
    file.symlink_to(blob)
    options = ["--source", snapshot, "--maxtext_model", "llama2-7b"]
    assert call("convert", *options, "--output", tmp_path / "stated") == 0
    assert json.loads((tmp_path / "stated/0/conversion.json").read_bytes())["shards"][0]["hash"] == "stated"
    assert (
        "the hashes of 1 file of the source are as the hub states them, and weren't compared; --check_source true"
        in capsys.readouterr().out
    )
    assert call("convert", *options, "--output", tmp_path / "checked", "--check_source", "true") == (2 if rotten else 0)
    if rotten:
        said = capsys.readouterr().err
        assert "its sha256 isn't aaaa" in said
        assert said.count("model.safetensors") == 1
        assert not (tmp_path / "checked").exists()
    else:
        assert json.loads((tmp_path / "checked/0/conversion.json").read_bytes())["shards"][0]["hash"] == "checked"
        assert "not checked" not in capsys.readouterr().out
