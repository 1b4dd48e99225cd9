"""A head start: what is read before the pipeline is what the pipeline would have read, and nothing of it stays."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from support import make_release

from weightbeam.formats.safetensors import open_hf
from weightbeam.formats.staging import Staging, staging_at
from weightbeam.formats.storage import StorageError
from weightbeam.transforms.execution import arena
from weightbeam.transforms.execution import boxes as execution
from weightbeam.transforms.execution.overlap import READERS, SPARE, Background, wait_for_all
from weightbeam.transforms.planning.conversion import Conversion
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import ConvertOptions
from weightbeam.transforms.stages.head_start import claim, head_start


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_release(tmp_path / "hf")


@pytest.fixture
def planned(source: Path) -> Conversion:
    return plan_conversion(ConvertOptions(unit_bytes=8 << 10), open_hf(str(source)))


@pytest.fixture
def staging(tmp_path: Path, planned: Conversion) -> Staging:
    return staging_at(str(tmp_path / "out"), 0, planned.hash)


def bytes_held() -> int:
    """Bytes of the arenas that are in use."""
    return arena._HELD.total()


def test_the_first_units(planned: Conversion, staging: Staging) -> None:
    """They hold what is in the files; as many as there is memory for; each is claimed once, and others never."""
    before = bytes_held()
    with head_start(planned, staging):
        number, taken = 0, 0
        while begun := claim(planned.hash, number):
            stored, nbytes = begun.stored.result(timeout=30)
            expected, expected_bytes = execution.read(planned.expand(number).fetches)
            assert nbytes == expected_bytes
            for mine, theirs in zip(stored, expected, strict=True):
                for one, other in zip(mine, theirs, strict=True):
                    np.testing.assert_array_equal(one, other)
            taken += begun.unit.working_bytes
            assert claim(planned.hash, number) is None
            arena.give_back(begun.arena)
            number += 1
        assert 2 <= number < len(planned.units)
        assert taken <= SPARE * planned.unit_bytes
        assert claim("another plan", 0) is None
    assert bytes_held() == before


def test_nothing_stays(planned: Conversion, staging: Staging) -> None:
    """Where the pipeline never comes to them, their memory is counted no more, and nobody can claim them."""
    before = bytes_held()
    with head_start(planned, staging):
        assert bytes_held() > before
    wait_for_all()
    assert bytes_held() == before
    assert claim(planned.hash, 0) is None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("background")]


def test_readers_that_wait(planned: Conversion, staging: Staging) -> None:
    """It goes on while all readers wait: for what it reads, it may be."""
    over = threading.Event()
    for _ in range(READERS):
        Background(1, READERS).begin(over.wait, 60)
    try:
        with head_start(planned, staging):
            begun = claim(planned.hash, 0)
            assert begun
            begun.stored.result(timeout=30)
            arena.give_back(begun.arena)
    finally:
        over.set()
        wait_for_all()


def test_what_cant_be_read(planned: Conversion, staging: Staging, source: Path) -> None:
    """It is for the stage that claims the unit to say so."""
    for file in source.glob("*.safetensors"):
        file.unlink()
    with head_start(planned, staging):
        begun = claim(planned.hash, 0)
        assert begun
        with pytest.raises(StorageError, match="No such file"):
            begun.stored.result(timeout=30)
        arena.uncount(begun.arena)
