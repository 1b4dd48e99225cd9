"""FP8 that devices decode: the bits of plain numpy. `test_load.py` has it on meshes, and in several processes."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from stored import boxes, slices
from support import (
    BF16,
    DEEPSEEK,
    F32,
    FP8,
    LLAMA,
    QWEN3_MOE,
    assert_same_bits,
    bare,
    flatten,
    random_tensors,
    reference,
    save,
)

import weightbeam as wb
from weightbeam.formats.encodings import Scaled
from weightbeam.pipelines.loading import decoding, load
from weightbeam.pipelines.loading.coded import SMALLEST, Coded, CodedRelease
from weightbeam.pipelines.loading.opening import choose, find_source
from weightbeam.pipelines.loading.source import Wanted

E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
Arrays = Mapping[str, np.ndarray]
Blocks = tuple[str, tuple[int, ...], tuple[int, int]]  # the suffix of the scales, their shape, and the size of a block
LINEAR = r"(_proj|kv_a_proj_with_mqa)\.weight$"


def in_blocks(rows: int, columns: int) -> Blocks:
    return "_scale_inv", (-(-rows // 32), -(-columns // 16)), (32, 16)


def in_squares(rows: int, columns: int) -> Blocks:
    return "_scale_inv", (-(-rows // 32), -(-columns // 32)), (32, 32)


def in_rows(rows: int, columns: int) -> Blocks:
    return "_scale", (rows, 1), (1, columns)


def as_one(rows: int, columns: int) -> Blocks:
    return "_scale", (1, 1), (rows, columns)


# blocks of 32 rows end within heads
WIDE = dict(hidden_size=64, head_dim=24, intermediate_size=80, moe_intermediate_size=40, vocab_size=100)
LATENT = dict(
    num_hidden_layers=2, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24
)
BLOCKS = dict(quantization_config=dict(quant_method="fp8", weight_block_size=[32, 16]))
EXPONENTS = dict(
    quantization_config=dict(quant_method="fp8", weight_block_size=[32, 32], scale_fmt="ue8m0", expert_dtype="fp4")
)
PLAIN = dict(quantization_config=dict(quant_method="compressed-tensors", format="float-quantized"))
# a model, its scales, and what of it is FP8
CASES: dict[str, tuple[dict[str, Any], Callable[[int, int], Blocks], str]] = {
    "DeepSeek": (DEEPSEEK | WIDE | LATENT | BLOCKS, in_blocks, LINEAR),
    "MoE": (QWEN3_MOE | WIDE | BLOCKS, in_blocks, LINEAR),
    "exponents": (DEEPSEEK | WIDE | LATENT | EXPONENTS, in_squares, LINEAR),
    "one scale": (QWEN3_MOE | WIDE | PLAIN, as_one, LINEAR),
    "rows": (LLAMA | WIDE | PLAIN, in_rows, LINEAR),
    "mixed": (QWEN3_MOE | WIDE | BLOCKS, in_blocks, r"experts|layers\.1\.self_attn\.q_proj"),
}
# whose query the host decodes: Llama's is scaled by its table, the other one is FP8 in one layer
BY_HOST = ("rows", "mixed")


def write_encoded(folder: Path, case: str, dtype: np.dtype = BF16, scale: float = 1) -> tuple[Path, Arrays]:
    """A release, and MaxText's arrays of it by plain numpy; every code but NaN."""
    config, blocks_of, chosen = CASES[case]
    rng = np.random.default_rng(3)
    stored: dict[str, np.ndarray] = {}
    values: dict[str, np.ndarray] = {}
    for name, tensor in random_tensors(config).items():
        stored[name], values[name] = tensor, tensor
        if re.search(chosen, name):
            suffix, counts, block = blocks_of(*tensor.shape)
            codes = rng.choice(np.delete(np.arange(256, dtype=np.uint8), [127, 255]), tensor.shape).view(FP8)
            scales = (rng.standard_normal(counts) * scale).astype(F32)
            if case == "exponents":
                scales = np.exp2(np.round(np.log2(np.abs(scales)))).astype(E8M0)
            rows, columns = np.indices(tensor.shape)
            stored |= {name: codes, name + suffix: scales}
            values[name] = codes.astype(F32) * scales.astype(F32)[rows // block[0], columns // block[1]]
    return save(folder / "hf", config, stored), reference(config, values, dtype)


def load_flat(source: Path, **options: Any) -> dict[str, np.ndarray]:
    tree = flatten(wb.load(str(source), mesh="fsdp=1", **options))
    return {bare(key): np.asarray(values) for key, values in tree.items()}


@pytest.fixture
def by_host(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The tensors of which the host decodes FP8."""
    names: set[str] = set()
    plain = Scaled.decode

    def decode(encoding: Scaled, *arguments: Any) -> np.ndarray:
        names.add(encoding.weight.name)
        return plain(encoding, *arguments)

    monkeypatch.setattr(Scaled, "decode", decode)
    return names


@pytest.mark.parametrize(("case", "dtype"), [*((case, BF16) for case in CASES), ("MoE", F32)], ids=str)
def test_bits(tmp_path: Path, by_host: set[str], case: str, dtype: np.dtype) -> None:
    source, wanted = write_encoded(tmp_path, case, dtype)
    assert_same_bits(load_flat(source, save_dtype=dtype.name, dequantize="device"), wanted)
    assert {name.partition("self_attn.")[2] for name in by_host} == ({"q_proj.weight"} if case in BY_HOST else set())


@pytest.mark.parametrize("without_jit", [False, True])
def test_blocks_of_arrays(tmp_path: Path, by_host: set[str], without_jit: bool) -> None:
    """Put into their places one after the other."""
    source, wanted = write_encoded(tmp_path, "MoE")
    with jax.disable_jit(without_jit):
        assert_same_bits(load_flat(source, dequantize="device", unit_bytes=100_000), wanted)
    assert not by_host


@functools.cache
def opened(folder: Path, case: str) -> tuple[CodedRelease, Arrays]:
    source, wanted = write_encoded(folder / case, case)
    return CodedRelease(find_source(str(source), choose({})).conversion), wanted


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("boxes")


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_box(folder: Path, data: st.DataObject) -> None:
    """Codes times scales, by numpy. Where a scale would belong to few elements the box is decoded already. Either way
    it is read once.
    """
    release, wanted = opened(folder, data.draw(st.sampled_from(list(CASES))))
    key = data.draw(st.sampled_from(sorted(release.coded)))
    box = data.draw(boxes(release.arrays[key].shape))
    (made,), nbytes = release.make([Wanted(key, box, BF16, alone=True)])
    if isinstance(made, Coded):
        scales = made.scales
        for axis, (size, count) in enumerate(zip(made.codes.shape, made.scales.shape, strict=True)):
            scales = np.repeat(scales, size // count, axis)
        made = (made.codes.view(FP8).astype(F32) * scales).astype(BF16).transpose(made.form.order)
    assert_same_bits({key: made}, {key: wanted[bare(key)][slices(box)]})
    assert nbytes == release.make([Wanted(key, box, BF16)])[1]


def test_an_adapter_is_merged_on_the_host(tmp_path: Path, by_host: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = write_encoded(tmp_path, "MoE")
    name = "model.layers.1.self_attn.o_proj"
    rng = np.random.default_rng(5)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    factors = {"A": rng.standard_normal((4, 96), F32), "B": rng.standard_normal((64, 4), F32)}
    save_file(
        {f"base_model.model.{name}.lora_{side}.weight": values for side, values in factors.items()},
        adapter / "adapter_model.safetensors",
    )
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    merged = load_flat(source, lora=str(adapter))
    by_host.clear()
    assert_same_bits(load_flat(source, lora=str(adapter), dequantize="device"), merged)
    assert {tensor.partition("self_attn.")[2] for tensor in by_host} == {"o_proj.weight"}
    monkeypatch.setattr(load, "UNIT_BYTES", 4096)
    with pytest.raises(wb.Refused, match=r"unit_bytes=4096: .* needs at least"):
        load_flat(source, lora=str(adapter), unit_bytes=4096)
    assert_same_bits(load_flat(source, lora=str(adapter), unit_bytes="64K"), merged)


def test_what_some_devices_take_for_zero_is_decoded_on_the_host(tmp_path: Path, by_host: set[str]) -> None:
    """Products below the smallest normal float32, of which this CPU device makes 0."""
    source, wanted = write_encoded(tmp_path, "one scale", scale=SMALLEST / 100)
    assert_same_bits(load_flat(source, dequantize="device"), wanted)
    assert by_host


def test_a_device_with_other_bits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This CPU device has, where it is to decode scales of every size."""
    source, _ = write_encoded(tmp_path, "one scale")
    monkeypatch.setattr(decoding, "SMALLEST", SMALLEST / 100)
    monkeypatch.setattr(decoding, "_have_hosts_bits", decoding._have_hosts_bits.__wrapped__)
    with pytest.raises(wb.Refused, match="dequantize=device: cpu makes other bfloat16"):
        load_flat(source, dequantize="device")
    assert load_flat(source, dequantize="host")


def test_words(tmp_path: Path) -> None:
    source, _ = write_encoded(tmp_path, "MoE")
    with pytest.raises(wb.Refused, match="like='fsdp=1': should be a tree of arrays; a mesh is mesh='fsdp=1'"):
        wb.load(str(tmp_path), "fsdp=1")
    with pytest.raises(wb.Refused, match="dequantize=gpu"):
        load_flat(source, dequantize="gpu")
