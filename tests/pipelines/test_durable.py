"""What is published is on disk, and whole, whatever happens to the power in the next moment."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support import LLAMA, call, convert, random_tensors, save

COMMANDS: dict[str, Callable[[Path, Path], tuple[object, ...]]] = {
    "cut": lambda release, _: ("cut", release, "--layers", "0:1"),
    "quantize": lambda release, _: ("quantize", release),
    "export": lambda release, checkpoint: ("export", checkpoint, "--like", release),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_file_of_a_release_was_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Each file that is there, small ones too, and each folder, the new ones above it included, as it is in the end."""
    release = save(tmp_path / "release", LLAMA, random_tensors(LLAMA))
    (release / "tokenizer.json").write_text("{}")
    (release / "original").mkdir()
    (release / "original" / "params.json").write_text("{}")
    checkpoint = convert(release, tmp_path / "ckpt", "--maxtext_model", "llama2-7b")
    synced: dict[tuple[int, int], int] = {}  # when each was changed last as it was synced

    def noting(sync: Callable[[int], None]) -> Callable[[int], None]:
        def note(fd: int) -> None:
            sync(fd)
            found = os.fstat(fd)
            synced[found.st_dev, found.st_ino] = found.st_mtime_ns

        return note

    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, noting(getattr(os, name)))
    out = tmp_path / "new" / "folders" / "out"
    words = COMMANDS[command](release, checkpoint)
    assert call(words[0], words[1], out, *words[2:]) == 0
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {path.name for path in out.iterdir()}
    left = [
        path.relative_to(tmp_path)
        for path in (out, *out.rglob("*"))
        if path.is_file() and synced.get((path.stat().st_dev, path.stat().st_ino)) != path.stat().st_mtime_ns
    ]
    folders = [out, *(path for path in out.rglob("*") if path.is_dir()), *list(out.parents)[:3]]
    assert not left
    assert not [path for path in folders if (path.stat().st_dev, path.stat().st_ino) not in synced]
