"""How `verify` cuts a tensor: into slabs that are together all of it, small, and between the chunks of its array."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from weightbeam.transforms.comparing import verification
from weightbeam.transforms.comparing.verification import CellLayout

SLAB, CHUNKS = 64, 256  # elements, and bytes of chunks, in place of millions
LAYOUTS = {
    "a kernel": ((("mlp",), ("embed",)), (("embed",), ("#0",), ("mlp",))),
    "heads": ((("heads", "dim"), ("embed",)), (("embed",), ("#0",), ("heads",), ("dim",))),
    "an output of heads": ((("embed",), ("heads", "dim")), (("heads",), ("#0",), ("dim",), ("embed",))),
    "an embedding": ((("vocab",), ("embed",)), (("vocab",), ("embed",))),
    "merged on the array's side": ((("heads",), ("dim",), ("embed",)), (("embed",), ("heads", "dim"), ("#0",))),
    "a vector": ((("embed",),), (("embed",), ("#0",))),
    "a number": ((), (("#0",),)),
}
LAYERS = 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slabs(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many sizes and chunks: every element once; no more chunks are decoded than fit, unless one alone is larger."""
    monkeypatch.setattr(verification, "SLAB_ELEMENTS", SLAB)
    monkeypatch.setattr(verification, "CHUNK_BYTES", CHUNKS)
    left, right = LAYOUTS[layout]
    dice, factors = random.Random(0), [factor for axis in left for factor in axis]
    for _ in range(200):
        sizes = {factor: dice.choice([1, 2, 3, 8, 30, 64]) for factor in factors}
        lengths = [LAYERS if axis == ("#0",) else math.prod(sizes[factor] for factor in axis) for axis in right]
        chunk = [dice.randint(1, length) for length in lengths]
        cell = CellLayout(left, right, sizes, {factor: (0, size) for factor, size in sizes.items()}, {"#0": 1})
        seen = np.zeros([*sizes.values()], np.int8)
        for slab in cell.slabs(chunk, 2, (), ()):
            seen[tuple(slice(*slab[factor]) for factor in sizes)] += 1
            elements = math.prod(high - low for low, high in slab.values())
            assert elements <= max(4 * SLAB, math.prod(chunk) // 8) or not cuttable(left, right)
            assert is_small(cell, chunk, slab)
        assert (seen == 1).all()


def cuttable(left: tuple[tuple[str, ...], ...], right: tuple[tuple[str, ...], ...]) -> set[str]:
    """The factors that begin an axis of both, where no other begins one of either alone."""
    outer = {axis[0] for axis in left if axis} & {axis[0] for axis in right if axis}
    return outer if outer == {factor for axis in left for factor in axis} else set()


def is_small(cell: CellLayout, chunk: list[int], slab: dict[str, tuple[int, int]]) -> bool:
    """Whether the chunks that a slab lies in are few, or the slab is as thin as chunks, or thinner, wherever it may be."""
    steps = {factor: high - low for factor, (low, high) in slab.items()}
    if cell._decoded(steps, chunk) * 2 <= CHUNKS:
        return True
    return all(steps[factor] <= grain for factor, (grain, _) in cell._cuts(chunk, (), ()).items())


def test_rows_of_one_chunk_of_all_layers() -> None:
    """As MaxText stores a kernel on 16 devices: a slab lies in a few chunks, where rows would lie in all of them."""
    sizes = {"mlp": 14_336, "embed": 4_096}
    left, right = LAYOUTS["a kernel"]
    cell = CellLayout(left, right, sizes, {factor: (0, size) for factor, size in sizes.items()}, {"#0": 5})
    first, *others = cell.slabs((4_096 // 16, 32, 14_336), 2, (), ())
    assert first == {"mlp": (0, 14_336), "embed": (0, 256)}
    assert len(others) == 15
