"""Folders that take no notice of case: told by a file that is made in there, and refused where two files would be one. No
such file system can be mounted everywhere, so one is stood in for where a test needs it; on macOS the first test meets a
real one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import weightbeam as wb
from weightbeam.formats.storage import case


def test_this_machine(tmp_path: Path) -> None:
    """What is told, is so; also of a folder that isn't there yet."""
    (tmp_path / "Probe").touch()
    real = (tmp_path / "probe").exists()
    assert case.folds_case(tmp_path / "Probe") == case.folds_case(tmp_path / "not" / "yet") == real
    assert [path.name for path in tmp_path.iterdir()] == ["Probe"]
    assert not case.folds_case(Path("/proc"))  # in which nothing can be made
    assert real or not sys.platform.startswith("darwin") or "CASE" in os.environ


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("a", "b", "a/b"), None),
        (("A.weight", "b", "a.weight"), ("A.weight", "a.weight")),
        (("M/x", "m/y"), ("M", "m")),
        (("caf\u00e9", "cafe\u0301"), ("caf\u00e9", "cafe\u0301")),
        (("stra\u00dfe", "STRASSE"), ("stra\u00dfe", "STRASSE")),
    ],
)
def test_twins(names: tuple[str, ...], found: tuple[str, str] | None) -> None:
    assert case.twins(names) == found


@pytest.fixture
def release(tmp_path: Path) -> str:
    """A model of which two tensors differ in case alone."""
    folder = tmp_path / "release"
    folder.mkdir()
    save_file(
        {name: np.arange(6, dtype=np.float32).reshape(2, 3) + add for add, name in enumerate(("Up", "up"))},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text('{"model_type": "any"}')
    return str(folder)


def test_arrays_that_would_be_one_are_refused(release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder for each array; a database has both in any place."""
    apart = str(tmp_path / "apart")
    wb.convert(release, apart, family="identity", use_ocdbt=False, progress=False)
    assert wb.verify(release, apart, progress=False).ok
    monkeypatch.setattr(case, "folds_case", lambda folder: True)
    with pytest.raises(wb.Refused, match=r"params\.params\.Up and params\.params\.up would be one there"):
        wb.convert(release, str(tmp_path / "one"), family="identity", use_ocdbt=False, progress=False)
    assert not (tmp_path / "one").exists()
    wb.convert(release, str(tmp_path / "database"), family="identity", progress=False)
