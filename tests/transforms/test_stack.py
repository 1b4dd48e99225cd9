"""The copies: whatever the strides, what is copied is what plain numpy assigns; and shards made together are those made
alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import DEEPSEEK, QWEN3_MOE, headers_only

from weightbeam.model_mappings.ops import Scale, Shift
from weightbeam.transforms.cutting.units import ShardsRecipe
from weightbeam.transforms.execution.stack import copy, stack
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import ConvertOptions

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


def filled(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Values that tell every element from its neighbours, in any dtype."""
    count = math.prod(shape)
    return (np.arange(count) % 251 - 100).astype(np.float32).reshape(shape).astype(dtype)


@st.composite
def copies(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """A view with axes in any order, and a target whose axes lie in memory in any other order, some of them cut out of
    longer ones.
    """
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 8, 12, 40, 64, 130]), min_size=1, max_size=5)))
    while math.prod(shape) > 300_000:
        shape = shape[:-1]
    rank = len(shape)
    dtype, into = draw(
        st.sampled_from(
            [
                (BF16, BF16),
                (FP8, FP8),
                (np.dtype(np.float32),) * 2,
                (BF16, np.dtype(np.float32)),
                (np.dtype(np.float32), BF16),
            ]
        )
    )
    inner, outer = draw(st.permutations(range(rank))), draw(st.permutations(range(rank)))
    source = filled(tuple(shape[axis] for axis in inner), dtype).transpose(np.argsort(inner))
    padded = [shape[axis] + draw(st.sampled_from([0, 0, 4])) for axis in outer]
    target = np.zeros(padded, into)[tuple(slice(0, shape[axis]) for axis in outer)].transpose(np.argsort(outer))
    return source, target


@settings(max_examples=400, deadline=None)
@given(copies(), st.sampled_from([(), (Scale(0.3),), (Shift(1.0), Scale(2.0))]))
def test_copy_is_an_assignment(pair: tuple[np.ndarray, np.ndarray], ops: tuple) -> None:
    """Bit for bit, with one cast."""
    source, target = pair
    wanted = source.astype(np.float32)
    for op in ops:
        wanted = op.apply(wanted)
    copy(source, target, ops)
    np.testing.assert_array_equal(target.astype(np.float32), wanted.astype(target.dtype).astype(np.float32))


@pytest.mark.parametrize("config", [QWEN3_MOE, DEEPSEEK], ids=["qwen3_moe", "deepseek"])
@pytest.mark.parametrize("mesh", [("fsdp=4",), ("fsdp=2,tensor=2",), ("expert=4,fsdp=2",)], ids=str)
@pytest.mark.parametrize("scan", [True, False])
def test_shards_made_together_are_those_made_alone(config: dict, mesh: tuple[str, ...], scan: bool) -> None:
    """A recipe of many shards, cut up into recipes of one shard each."""
    conversion = plan_conversion(ConvertOptions(mesh=mesh, scan_layers=scan), headers_only(config))
    together = 0
    for number in range(len(conversion.units)):
        unit = conversion.expand(number)
        values = [filled(tuple(b - a for a, b in fetch.box), BF16) for fetch in unit.fetches]
        origins = [tuple(start for start, _ in fetch.box) for fetch in unit.fetches]
        arrays = {grid.spec.key: array for array, grid in zip(conversion.plan.arrays, conversion.grids, strict=True)}
        for recipe in unit.recipes:
            views = [
                (piece, piece.source.of(values[i], origins[i]).transpose(piece.order)) for i, piece in recipe.pieces
            ]
            made = stack(recipe, views)
            together += made.size > 0 and math.prod(recipe.counts) > 1
            fetched = {fetch.encoding.weight.name: i for i, fetch in enumerate(unit.fetches)}
            for index, box in zip(np.ndindex(recipe.counts), recipe.boxes(), strict=True):
                shards = tuple(
                    (start + at, start + at + 1) for (start, _), at in zip(recipe.shards, index, strict=True)
                )
                pieces = [piece for cell in arrays[recipe.spec.key].cells(box) for piece in cell.pieces(box)]
                alone = dataclasses.replace(
                    recipe, shards=shards, pieces=tuple((fetched[piece.tensor], piece) for piece in pieces)
                )
                assert isinstance(alone, ShardsRecipe)
                views = [
                    (piece, piece.source.of(values[i], origins[i]).transpose(piece.order)) for i, piece in alone.pieces
                ]
                np.testing.assert_array_equal(
                    made[index].view(np.uint16), stack(alone, views).reshape(made[index].shape).view(np.uint16)
                )
    assert together > 5


def test_jobs_hold_every_shard_once() -> None:
    """However they are put together."""
    conversion = plan_conversion(ConvertOptions(mesh=("fsdp=4,expert=2",), unit_bytes=60_000), headers_only(DEEPSEEK))
    made = [
        (recipe.spec.key, box)
        for number in range(len(conversion.units))
        for recipe in conversion.expand(number).recipes
        for box in recipe.boxes()
    ]
    wanted = [
        (grid.spec.key, grid.spec.shard_box(index))
        for grid in conversion.grids
        for index in itertools.product(*map(range, grid.spec.grid))
    ]
    assert sorted(made) == sorted(wanted)


@pytest.mark.parametrize("dtype", [FP8, BF16, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((700, 4100), (1, 0)),
        ((4099, 301), (1, 0)),
        ((1030, 4097), (1, 0)),
        ((6, 2, 40, 4100), (3, 0, 2, 1)),  # rotary halves paired
        ((5, 300, 3, 1500), (0, 2, 3, 1)),
        ((300, 7, 5, 600), (2, 3, 1, 0)),
        ((33, 9, 64), (1, 0, 2)),
    ],
    ids=str,
)
def test_blocks_of_a_transposition(shape: tuple[int, ...], order: tuple[int, ...], dtype: np.dtype) -> None:
    """More rows and columns than one block has, and a rest on either side, odd ones too; with gaps in the target and
    without.
    """
    source = filled(shape, dtype).transpose(order)
    for gap in (0, 3):
        target = np.zeros((*source.shape[:-1], source.shape[-1] + gap), dtype)
        copy(source, target[..., : source.shape[-1]])
        np.testing.assert_array_equal(target[..., : source.shape[-1]].astype(np.float32), source.astype(np.float32))
        assert not target[..., source.shape[-1] :].any()
