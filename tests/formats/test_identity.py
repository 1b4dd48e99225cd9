"""The identity of a source's files: the same wherever they lie, another one when what they hold is."""

from __future__ import annotations

import json
import mmap
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from weightbeam.formats.release.small_files import small_files
from weightbeam.formats.safetensors import open_hf
from weightbeam.formats.storage import ChangedError, StorageError, open_store
from weightbeam.formats.storage.identity import SAMPLE_BYTES, Files, describe_changes, spread
from weightbeam.formats.targets.release import release_staging


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of two files, one of them below."""
    (tmp_path / "in" / "c").mkdir(parents=True)
    (tmp_path / "in" / "zarr.json").write_text("{}")
    (tmp_path / "in" / "c" / "0").write_bytes(bytes(1 << 20))
    return tmp_path / "in"


def set_back(path: Path, data: bytes, at: int) -> None:
    """Other bytes in place, and the time of before."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_it_moves_with_the_files_and_to_workers(folder: Path, tmp_path: Path) -> None:
    seen = Files.of(open_store(folder))
    staged = Files.from_json(json.loads(json.dumps(seen.to_json())))
    assert staged.hash == seen.hash
    staged.check()
    folder.rename(tmp_path / "moved")
    moved = Files.of(open_store(tmp_path / "moved"))
    assert moved.hash == seen.hash
    assert not moved.was_touched(seen)


@pytest.mark.parametrize("which", ["c", ""], ids=["a folder in it", "itself"])
def test_a_folder_that_is_renamed_away_and_back(folder: Path, tmp_path: Path, which: str) -> None:
    """Its files look as before, whatever lay there meanwhile."""
    seen, renamed = Files.of(open_store(folder)), folder / which
    renamed.rename(tmp_path / "away")
    (tmp_path / "away").rename(renamed)
    now = Files.of(open_store(folder))
    assert now.seen == seen.seen
    with pytest.raises(ChangedError, match="was changed or renamed"):
        seen.check()
    assert now.was_touched(seen) == bool(which)  # the whole may be moved between a stop and --resume


def test_a_copy_isnt_the_same(folder: Path, tmp_path: Path) -> None:
    """It may differ where no block is hashed, and have the same sizes and times, as of a reproducible archive."""
    seen = Files.of(open_store(folder))
    shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copy2)
    copied = Files.of(open_store(tmp_path / "copy"))
    assert copied.hash == seen.hash
    assert copied.was_touched(seen)
    assert all(
        f"; it was {folder}/" in each and "is another file" in each for each in describe_changes(seen.seen, copied.seen)
    )


def test_what_is_another_source_has_another_hash(folder: Path) -> None:
    """Sizes and times are equal, as of reproducible archives; every block of it differs."""
    seen = Files.of(open_store(folder))
    set_back(folder / "c" / "0", bytes([1]) * (1 << 20), 0)
    assert Files.of(open_store(folder)).hash != seen.hash


def test_a_byte_between_the_blocks(folder: Path) -> None:
    """The hash doesn't know it; the time of any change does."""
    seen = Files.of(open_store(folder))
    set_back(folder / "c" / "0", b"\1", 0)
    now = Files.of(open_store(folder))
    assert now.hash == seen.hash
    assert now.was_touched(seen)
    with pytest.raises(ChangedError, match=r"c/0 changed while .*though its size and time are as before"):
        seen.check()


def test_a_further_name_hides_no_change_from_who_resumes(folder: Path) -> None:
    """A link that is made after the change excuses its time, unless it is our own."""
    seen = Files.of(open_store(folder))
    set_back(folder / "c" / "0", b"\1", 0)
    os.link(folder / "c" / "0", folder.parent / "another name")
    now = Files.of(open_store(folder))
    assert now.hash == seen.hash
    assert now.was_touched(seen)
    assert not now.was_touched(seen, linked=True)


def test_it_says_which_file_changed_and_how(folder: Path) -> None:
    seen, file = Files.of(open_store(folder)), folder / "c" / "0"

    def said(linked: bool = False) -> list[str]:
        return describe_changes(seen.seen, Files.of(open_store(folder)).seen, linked)

    assert said() == []
    os.link(file, folder.parent / "another name")
    assert said() == [
        f"{file} has 2 names, which are hard links, instead of 1: that may hide a change of what it holds"
    ]
    assert said(linked=True) == []
    file.write_bytes(b"\1")
    (folder / "new").touch()
    (folder / "zarr.json").unlink()
    assert said() == [
        f"{file} has another size, 1 instead of 1,048,576 bytes",
        f"{folder / 'new'} is new",
        f"{folder / 'zarr.json'} is gone",
    ]


def test_of_files_that_moved_no_place_is_compared(folder: Path, tmp_path: Path) -> None:
    seen = Files.of(open_store(folder))
    folder.rename(tmp_path / "moved")
    file = tmp_path / "moved" / "zarr.json"
    os.utime(file)
    moved = Files.of(open_store(tmp_path / "moved"))
    assert describe_changes(seen.seen, moved.seen) == [f"{file} was written since; it was {folder / 'zarr.json'}"]


def test_files_that_come_go_or_get_another_name(folder: Path) -> None:
    seen = Files.of(open_store(folder))
    os.link(folder / "c" / "0", folder.parent / "another name")
    seen.check()
    (folder / "new").touch()
    with pytest.raises(ChangedError, match="new came there"):
        seen.check()
    (folder / "new").unlink()
    (folder / "zarr.json").unlink()
    with pytest.raises(ChangedError, match=r"zarr\.json: is gone"):
        seen.check()


def test_what_is_written_through_a_memory_map(tmp_path: Path) -> None:
    """The kernel notes the time at the first write to a page, not at those that follow before it is on the disk."""
    save_file({"w": np.zeros((4096, 64), np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with open(tmp_path / "model.safetensors", "r+b") as file, mmap.mmap(file.fileno(), 0) as written:
        written[:] = bytes(written)
        release, files = open_hf(tmp_path), Files.of(open_store(tmp_path))
        written[-(1 << 20) :] = bytes([1]) * (1 << 20)
        for seen in (release, files):
            with pytest.raises(ChangedError, match=r"changed while it was converted"):
                seen.check()


def test_another_name_doesnt_hide_a_change(folder: Path) -> None:
    """A file that is written in place, its time set back, and linked, as by a tool that keeps backups."""
    seen = Files.of(open_store(folder))
    set_back(folder / "c" / "0", bytes([1]) * (1 << 20), 0)
    os.link(folder / "c" / "0", folder.parent / "another name")
    with pytest.raises(ChangedError, match=r"a file of .* changed while .*though its size and time are as before"):
        seen.check()


@pytest.mark.parametrize("size", [0, 1, SAMPLE_BYTES, 5 * SAMPLE_BYTES, 1 << 20])
@pytest.mark.parametrize("samples", [1, 4, 64])
def test_blocks_lie_in_the_file_and_apart(size: int, samples: int) -> None:
    places = spread(size, samples)
    assert sum(length for _, length in places) == min(size, samples * SAMPLE_BYTES)
    ends = [0, *(at + length for at, length in places)]
    assert all(at >= end for (at, _), end in zip(places, ends, strict=False))
    assert ends[-1] <= size


def test_a_small_file_that_changes_after_it_was_hashed(tmp_path: Path) -> None:
    """What goes into the result is what the plan's hash knows, or nothing."""
    (tmp_path / "tokenizer.json").write_text("one")
    files = small_files(open_store(tmp_path))
    assert set(files.hashes) == {"tokenizer.json"}
    set_back(tmp_path / "tokenizer.json", b"two", 0)
    with pytest.raises(StorageError, match="was changed or replaced since it was listed"):
        files["tokenizer.json"]


def test_what_isnt_planned_leaves_the_staging(tmp_path: Path) -> None:
    """A chat template of another plan, and a shard; notes of ours stay."""
    place = release_staging(tmp_path / "out")
    with place.hold():
        place.create(b"plan")
        growing = Path(place.checkpoint.url)
        for name in ("chat_template.jinja", "model-9.safetensors", "job.json"):
            (growing / name).touch()
        (growing / "additional_chat_templates").mkdir()
        (growing / "additional_chat_templates" / "x.jinja").touch()
        place.lay_out([("model.safetensors", b"", 8)], {"tokenizer.json": b"{}"})
        files = {str(path.relative_to(growing)) for path in growing.rglob("*") if path.is_file()}
        assert files == {"plan.json.gz", "job.json", "model.safetensors", "tokenizer.json"}
