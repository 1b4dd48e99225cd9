"""The order of units: however many workers they are dealt to, in turn or in runs, the last has little more to do than the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import DEEPSEEK, DEEPSEEK_V3, LLAMA_8B, QWEN3_MOE, headers_only

from transforms.conversion import Options, prepare
from transforms.units import spread

LLAMA_405B = LLAMA_8B | dict(hidden_size=16384, num_attention_heads=128, intermediate_size=53248, num_hidden_layers=126)
MODELS = {"llama 8b": LLAMA_8B, "llama 405b": LLAMA_405B, "deepseek v3": DEEPSEEK_V3 | dict(num_hidden_layers=20)}
LAYOUTS: dict[str, dict[str, Any]] = {
    "any mesh": {},
    "fsdp 16": dict(mesh=("fsdp=16",)),
    "fsdp 64, expert 4": dict(mesh=("fsdp=64,expert=4",)),
    "unscanned": dict(mesh=("fsdp=16",), scan_layers=False),
}


def excess(sizes: Sequence[int] | np.ndarray) -> float:
    """By how many of the largest the last of 1 to 64 workers exceeds the mean, at worst, dealt in turn or in runs of equal length."""
    weights, at = np.asarray(sizes, float), np.arange(len(sizes))
    shares = [np.bincount(whose, weights) - weights.sum() / n for n in range(1, 65) for whose in (at % n, at * n // len(at))]
    return max(share.max() for share in shares) / weights.max()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_no_worker_is_last_by_much(model: str, layout: str) -> None:
    """Real models: one unit may be one more, where their number doesn't divide, and one and a half come from their sizes."""
    conversion = prepare(Options(**LAYOUTS[layout]), headers_only(MODELS[model]))
    assert not conversion.plan.problems
    sizes = [sum(block.working_bytes for block in unit) for unit in conversion.units]
    assert len(sizes) > 200
    assert excess(sizes) < 2.5
    assert list(spread(sizes)) == sizes


@settings(max_examples=50, deadline=None)
@given(kinds=st.lists(st.tuples(st.integers(64, 128), st.integers(1, 400)), min_size=1, max_size=6), unit=st.sampled_from([1, 1000, 1 << 20]))
def test_any_sizes_are_spread(kinds: list[tuple[int, int]], unit: int) -> None:
    """Sizes from half of the largest on, some of each: the same ones come out, and evenly."""
    sizes = [size * unit for size, count in kinds for _ in range(count)]
    made = spread(sizes)
    assert sorted(made) == sorted(sizes)
    assert excess(made) < 4


@pytest.mark.parametrize("sizes", [[], [5], [0, 0], [3, 1, 2]])
def test_few_sizes(sizes: list[int]) -> None:
    assert sorted(spread(sizes)) == sorted(sizes)


@pytest.mark.parametrize("config", [DEEPSEEK, QWEN3_MOE], ids=["deepseek", "qwen3 moe"])
def test_units_of_one_size_follow_the_source(config: dict[str, Any]) -> None:
    """So that a few streams run through the files, each forwards."""
    units = prepare(Options(unit_bytes=8_000), headers_only(config)).units
    assert len(units) > 20
    streams: dict[int, list] = {}
    for unit in units:
        streams.setdefault(sum(block.working_bytes for block in unit), []).append(unit[0].position)
    assert any(len(stream) > 3 for stream in streams.values())
    assert all(stream == sorted(stream) for stream in streams.values())
