"""What adapters of large ranks take, against what the units of a plan say."""

from __future__ import annotations

import dataclasses
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support import LLAMA, convert, make_release, peft_adapter

from weightbeam.formats.adapters import merged as merging
from weightbeam.formats.adapters import open_adapter
from weightbeam.formats.adapters.delta import Delta
from weightbeam.formats.adapters.merged import MergedWeight
from weightbeam.formats.encodings import Plain, stored_bytes
from weightbeam.formats.safetensors import Tensor, open_hf
from weightbeam.model_mappings.boxes import extent
from weightbeam.pipelines.commands import export
from weightbeam.transforms.cutting.units import Unit
from weightbeam.transforms.execution.boxes import decode, read
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.memory import memory_bound
from weightbeam.transforms.planning.merge_planner import plan_merge
from weightbeam.transforms.planning.options import ConvertOptions, MergeOptions

MODEL = LLAMA | dict(hidden_size=128, intermediate_size=192, num_hidden_layers=6, num_attention_heads=4, head_dim=32)
RANK = 700
UNIT_BYTES = 3_000_000
STRIP_ELEMENTS = 1 << 12  # fewer than they are, so that they don't hide what the factors take
STRIPS = 5 * STRIP_ELEMENTS * 4  # bytes beside: a strip, its product, what OpenBLAS gets, and whether all is finite


@pytest.fixture(autouse=True)
def narrow_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "STRIP_ELEMENTS", STRIP_ELEMENTS)


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_release(tmp_path_factory.mktemp("large") / "base", MODEL)


@pytest.fixture(scope="module")
def adapters(release: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two, of every linear layer, each factor several times as large as its weight."""
    modules = {
        name.removesuffix(".weight"): tensor.shape
        for name, tensor in open_hf(release).tensors.items()
        if name.endswith("_proj.weight")
    }
    root = tmp_path_factory.mktemp("adapters")
    return [peft_adapter(root / name, modules, RANK)[0] for name in ("one", "other")]


def peak_bytes(unit: Unit) -> int:
    """Memory in which a unit is read and decoded."""
    tracemalloc.start()
    try:
        decode(unit.fetches, read(unit.fetches)[0])
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


EXPERTS, OUTPUTS, INPUTS, FUSED_RANK = 6, 96, 512, 64
FLOAT32 = np.dtype(np.float32)


def fused(kind: str) -> MergedWeight:
    """A weight of fused experts with two adapters: each with factors of its own for every expert and half, or with a pair
    of factors for all of them, as PEFT's `target_parameters` has it.
    """
    weight = Plain(Tensor("w", np.dtype(ml_dtypes.bfloat16), (EXPERTS, OUTPUTS, INPUTS), "w", 0))
    a, b = (Tensor(name, FLOAT32, (FUSED_RANK, INPUTS), name, 0) for name in ("a", "b"))
    if kind == "of all":
        a = dataclasses.replace(a, shape=(EXPERTS * FUSED_RANK, INPUTS))
        b = dataclasses.replace(b, shape=(OUTPUTS, EXPERTS * FUSED_RANK))
        return MergedWeight(weight, (Delta(a, b, 1.0, experts=EXPERTS),) * 2)
    half = OUTPUTS // 2
    b = dataclasses.replace(b, shape=(half, FUSED_RANK))
    places = [(expert, half * part) for expert in range(EXPERTS) for part in range(2)]
    deltas = [Delta(a, b, 1.0, place=expert, offset=(-row, 0)) for expert, row in places]
    return MergedWeight(weight, (*deltas, *deltas))


@pytest.mark.parametrize("kind", ["of each expert", "of all"])
@pytest.mark.parametrize("experts", [1, EXPERTS])
def test_fused_experts_take_what_is_said(kind: str, experts: int) -> None:
    """Of what is read nothing is counted twice; the products of one expert are gone before the next one's are made."""
    weight, box = fused(kind), ((0, experts), (0, OUTPUTS), (0, INPUTS))
    said, plain = weight.overhead, Plain(weight.weight)
    assert said.whole == stored_bytes(weight) - stored_bytes(plain)
    assert said.tensor + said.matrix * experts == stored_bytes(weight, box) - stored_bytes(plain, box)
    stored = [np.zeros(extent(read.box), read.tensor.dtype) for read in weight.reads(box)]
    tracemalloc.start()
    try:
        made = weight.decode(stored, box, weight.weight.dtype)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert said.decoding // 2 < peak - made.nbytes < said.decoding + STRIPS


@pytest.mark.parametrize("kind", ["scanned", "unscanned", "on a mesh", "merged"])
def test_units_keep_what_the_plan_says(release: Path, adapters: list[Path], kind: str) -> None:
    """A unit that takes some rows of many layers reads all of their A; the products are made one after the other."""
    opened = [open_adapter(folder) for folder in adapters]
    options = {"unscanned": {"scan_layers": False}, "on a mesh": {"mesh": ("fsdp=4,tensor=2",)}}.get(kind, {})
    if kind == "merged":
        lora = tuple((str(folder), 1.0) for folder in adapters)
        planned = plan_merge(MergeOptions(lora, unit_bytes=UNIT_BYTES), open_hf(release), opened)
    else:
        planned = plan_conversion(ConvertOptions(unit_bytes=UNIT_BYTES, **options), open_hf(release), opened)
    assert not planned.plan.problems
    assert planned.unit_bytes == UNIT_BYTES
    units = [planned.expand(number) for number in range(len(planned.units))]
    assert len(units) > 3
    assert max(unit.working_bytes for unit in units) <= UNIT_BYTES
    assert max(map(peak_bytes, units)) <= UNIT_BYTES + STRIPS


def test_a_row_that_takes_more_is_told(release: Path, adapters: list[Path]) -> None:
    """A merge's unit is as large as its factors, and no smaller for being of a row alone; the bound says so."""
    lora = tuple((str(folder), 1.0) for folder in adapters)
    planned = plan_merge(MergeOptions(lora, unit_bytes=500_000), open_hf(release), [open_adapter(*one) for one in lora])
    assert planned.unit_bytes == planned.unit_working_bytes > 500_000
    assert len(planned.units) < 3 * len(planned.encodings)


def test_an_export_says_what_factors_take(release: Path, adapters: list[Path], tmp_path: Path) -> None:
    """They are read once the rows are made to which they are added: beside a unit, of one tensor at a time."""
    step = str(convert(release, tmp_path / "ckpt", "--maxtext_model", "llama2-7b"))
    options = dict(like=str(release), maxtext_model="llama2-7b")
    alone, merged = export.plan(step, **options), export.plan(step, lora=[*map(str, adapters)], **options)
    factors = (128 + 192) * RANK * 4  # A and B of the largest weight
    assert memory_bound(merged, 2, None) - memory_bound(alone, 2, None) >= 2 * 2 * factors
    assert merged.thread_bytes == alone.thread_bytes + 2 * (factors + 192 * RANK * 4)  # and what is scaled
