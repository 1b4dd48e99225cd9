"""Large chunks as streams: the bytes that stock Orbax wrote, a piece at a time, however small they were made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from lazily import lazily

from weightbeam.formats import unpacking
from weightbeam.formats.orbax_source import open_orbax

ocp = lazily("orbax.checkpoint")


def test_no_more_than_a_piece_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros are a thousand times as many as the bytes that they are stored in."""
    values = np.zeros((256, 257), np.float32)
    values[17, 3] = 1.5
    ocp.PyTreeCheckpointer().save(tmp_path / "items", {"params": {"params": {"w": values}}})
    monkeypatch.setattr(unpacking, "PIECE", 1000)
    (array,) = open_orbax(tmp_path / "items").arrays.values()
    assert array.chunk == values.shape
    stream = unpacking.decoded(array, (0, 0))
    pieces = list(iter(lambda: stream.read(unpacking.PIECE), b""))
    assert max(map(len, pieces)) <= 1000
    assert b"".join(pieces) == values.tobytes()
