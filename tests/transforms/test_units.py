"""The order of units: however many workers there are, none has more than one unit more to do than another."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import DEEPSEEK, DEEPSEEK_V3, LLAMA_8B, QWEN3_MOE, headers_only

from weightbeam.transforms.cutting.blocks import Block, largest_first, target_bytes, working_bytes
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import ConvertOptions

LLAMA_405B = LLAMA_8B | dict(hidden_size=16384, num_attention_heads=128, intermediate_size=53248, num_hidden_layers=126)
MODELS = {"llama 8b": LLAMA_8B, "llama 405b": LLAMA_405B, "deepseek v3": DEEPSEEK_V3 | dict(num_hidden_layers=20)}
LAYOUTS: dict[str, dict[str, Any]] = {
    "any mesh": {},
    "fsdp 16": dict(mesh=("fsdp=16",)),
    "fsdp 64, expert 4": dict(mesh=("fsdp=64,expert=4",)),
    "unscanned": dict(mesh=("fsdp=16",), scan_layers=False),
}


def dealt(sizes: Sequence[int], workers: int) -> np.ndarray:
    """What each of so many workers has to do if the units are dealt to them in turn."""
    return np.bincount(np.arange(len(sizes)) % workers, sizes, minlength=workers)


def taken(sizes: Sequence[int], workers: int) -> np.ndarray:
    """What each does if it takes the next unit whenever it has done one."""
    busy = [0] * workers
    for size in sizes:
        heapq.heapreplace(busy, busy[0] + size)
    return np.array(busy)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_no_worker_is_last_by_more_than_a_unit(model: str, layout: str) -> None:
    """Real models."""
    conversion = plan_conversion(ConvertOptions(**LAYOUTS[layout]), headers_only(MODELS[model]))
    assert not conversion.plan.problems
    sizes = list(map(working_bytes, conversion.units))
    assert len(sizes) > 200
    for workers in (1, 2, 3, 4, 7, 8, 16, 63, 64, 100, 1000):
        for shares in (dealt(sizes, workers), taken(sizes, workers)):
            assert np.ptp(shares) <= max(sizes)


@settings(max_examples=200, deadline=None)
@given(sizes=st.lists(st.integers(0, 1 << 40), max_size=300), workers=st.integers(1, 100))
def test_nor_with_any_sizes(sizes: list[int], workers: int) -> None:
    units = [(Block(number, (), size, ("", 0)),) for number, size in enumerate(sizes)]
    ordered = largest_first(units)
    assert sorted(unit[0].array for unit in ordered) == list(range(len(sizes)))
    made = list(map(working_bytes, ordered))
    assert made == sorted(sizes, reverse=True)  # what is read last is small: a link isn't left to writing alone
    for shares in (dealt(made, workers), taken(made, workers)):
        assert np.ptp(shares) <= max(sizes, default=0)


@pytest.mark.parametrize("config", [DEEPSEEK, QWEN3_MOE], ids=["deepseek", "qwen3 moe"])
def test_units_of_one_size_follow_the_source(config: dict[str, Any]) -> None:
    """So that the files are read forwards."""
    units = plan_conversion(ConvertOptions(unit_bytes=8_000), headers_only(config)).units
    assert len(units) > 20
    streams: dict[int, list] = {}
    for unit in units:
        streams.setdefault(working_bytes(unit), []).append(unit[0].position)
    assert any(len(stream) > 3 for stream in streams.values())
    assert all(stream == sorted(stream) for stream in streams.values())


def test_the_size_follows_from_the_slots() -> None:
    """Some eight units a slot, and 64 at least; none larger than it may be, none of a few MiB; the largest where nobody
    knows the slots.
    """
    gib, most = 1 << 30, 128 << 20
    assert target_bytes(gib, most, None) == most
    assert [target_bytes(gib, most, slots) for slots in (1, 4, 8, 16, 1000)] == [
        gib // 64,
        gib // 64,
        gib // 64,
        gib // 128,
        8 << 20,
    ]
    assert target_bytes(1000 * gib, most, 4) == most
    assert target_bytes(1000 * gib, most, 4000) == 1000 * gib // 32_000
    assert target_bytes(gib, 1 << 20, 4) == 1 << 20
