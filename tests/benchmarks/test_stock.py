"""The stock way makes the conversion's arrays: the same shapes and bits, under other names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import models, stock
from weightbeam.formats.orbax import find_items, open_arrays
from weightbeam.pipelines.cli import main

CONFIG = dict(
    hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=384, vocab_size=512
)


@pytest.mark.parametrize("kind", models.MODELS)
def test_same_arrays(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, shapes = models.MODELS[kind]
    small = config | CONFIG | (dict(num_experts=4, moe_intermediate_size=384) if kind == "moe" else {})
    monkeypatch.setitem(models.MODELS, kind, (small, shapes))
    models.write(kind, tmp_path / "source", 3)
    assert main(["convert", "--source", str(tmp_path / "source"), "--output", str(tmp_path / "output")]) == 0
    ours = {
        key: np.asarray(array.read().result())
        for key, array in open_arrays(find_items(tmp_path / "output")).items()
        if key != "step"
    }
    theirs = stock.stack(stock.load(tmp_path / "source"))
    scaled = {"query", "key"}  # the query's scale; Llama's rotary halves
    made = {bits(array) for array in theirs.values()}
    assert len(ours) == len(theirs)
    assert sum(array.nbytes for array in ours.values()) == sum(array.nbytes for array in theirs.values())
    assert [key for key, array in ours.items() if bits(array) not in made and not scaled & set(key.split("."))] == []


def bits(array: np.ndarray) -> bytes:
    """The values, layers first: MaxText's attention has them between heads and the rest of an axis."""
    return (np.moveaxis(array, 1, 0) if array.ndim > 1 else array).tobytes()
