"""FP8 blocks: the conversion equals, bit for bit, float32(code) · float32(scale) in plain numpy, rounded once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import each
from quantised import is_linear, quantise
from safetensors.numpy import save_file
from support import (
    BF16,
    DEEPSEEK,
    F32,
    FP8,
    LLAMA,
    assert_same_bits,
    call,
    converted,
    random_tensors,
    read_config,
    read_file,
    read_tensors,
    reference,
    save,
    split,
    unfuse,
)  # fmt: skip

from weightbeam.formats.encodings import Scaled, ScaleError
from weightbeam.formats.safetensors import Tensor, read_boxes, read_header

CODES = np.arange(256, dtype=np.uint8).view(FP8)


def dequantise(tensors: Mapping[str, np.ndarray], block: tuple[int, int]) -> dict[str, np.ndarray]:
    """The values in float32, each code multiplied by the scale of its block, written out the slow way."""
    made = {}
    for name, values in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        if f"{name}_scale_inv" in tensors:
            scale = tensors[f"{name}_scale_inv"].astype(np.float32)
            rows, columns = np.indices(values.shape)
            values = values.astype(np.float32) * scale[rows // block[0], columns // block[1]]
            assert values.dtype == np.float32
        made[name] = values
    return made


def quantization(block: tuple[int, int] | None) -> dict[str, Any]:
    """`quantization_config` as DeepSeek writes it."""
    said = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
    return {"quantization_config": said | ({"weight_block_size": list(block)} if block else {})}


def deepseek(generated: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A DeepSeek-V3 that transformers wrote: config and tensors."""
    folder = generated / "models" / "deepseek_v3"
    return read_config(folder), read_tensors(folder)


Place = Callable[[Mapping[str, np.ndarray]], list[dict[str, np.ndarray]]]


def apart(tensors: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Every scale in another file than its weight."""
    scales = {name: values for name, values in tensors.items() if name.endswith("_scale_inv")}
    return [*split({name: values for name, values in tensors.items() if name not in scales}, 2), scales]


def together(tensors: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    return [dict(tensors)]


CASES: dict[str, tuple[tuple[int, int], np.dtype, Place, str]] = {
    "128 x 128, as released": ((128, 128), F32, together, ""),
    "128 x 128, scales in another file": ((128, 128), F32, apart, "--mesh fsdp=4,expert=2"),
    "32 x 48, partial blocks on both axes": ((32, 48), F32, apart, "--unit_bytes 30000"),
    "32 x 48, over a mesh": ((32, 48), BF16, together, "--mesh fsdp=8 --unit_bytes 30000"),
    "1 x 16": ((1, 16), F32, together, "--mesh fsdp=2,tensor=2"),
    "1 x 16, scales in bfloat16": ((1, 16), BF16, apart, ""),
    "blocks that end at no chunk": ((7, 5), F32, together, "--mesh fsdp=16 --unit_bytes 20000"),
}


@pytest.mark.parametrize(("name", "dtype"), each(list(CASES), [BF16, F32]), ids=str)
def test_equals_numpy(generated: Path, tmp_path: Path, name: str, dtype: np.dtype) -> None:
    """Every array of a DeepSeek-V3, whatever the blocks, the scales' dtype and file, and the units."""
    block, scale_dtype, place, options = CASES[name]
    config, tensors = deepseek(generated)
    stored = quantise(tensors, block, scale_dtype)
    assert sum(values.dtype == FP8 for values in stored.values()) > 50
    source = save(tmp_path / "hf", config | quantization(block), *place(stored))
    arrays = converted(source, tmp_path / "out", "--save_dtype", dtype.name, *options.split())
    assert_same_bits(arrays, reference(config, dequantise(stored, block), dtype))


@pytest.mark.parametrize("block", [(128, 128), (32, 16), (24, 40)], ids=str)
def test_the_block_size_is_found_where_the_config_is_silent(
    generated: Path, tmp_path: Path, block: tuple[int, int]
) -> None:
    """It is the power of two that all shapes allow: any where a weight is one block, and none is found for 24 × 40,
    which is refused.
    """
    config, tensors = deepseek(generated)
    stored = quantise(tensors, block, F32)
    source = save(tmp_path / "hf", config | quantization(None), stored)
    if block == (24, 40):
        assert call("convert", "--source", source, "--output", tmp_path / "out") == 2
        assert not (tmp_path / "out").exists()
    else:
        assert_same_bits(converted(source, tmp_path / "out"), reference(config, dequantise(stored, block), BF16))


UP = "model.layers.0.mlp.up_proj"
CONTRADICTIONS: dict[str, tuple[bool, Any, int, str]] = {
    "codes of which it says nothing": (True, None, 2, "transformers takes the codes for values"),
    "a text": (True, "fp8", 2, "quantization_config should be an object, is 'fp8'"),
    "a list, and no codes": (False, [1], 2, "quantization_config should be an object, is [1]"),
    "no codes": (False, {}, 0, "warning: config.json has quantization_config, but none of the weights is quantised"),
    "a module that isn't to have any": (True, {"modules_to_not_convert": [UP]}, 0, f"warning: {UP}.weight is FP8"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_config_that_contradicts_the_tensors(tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Refused where other loaders get other values, as a plain model has of codes; else told."""
    is_quantised, said, status, told = CONTRADICTIONS[name]
    tensors = random_tensors(LLAMA)
    if isinstance(said, dict):
        said = quantization((32, 16))["quantization_config"] | said
    stored = quantise(tensors, (32, 16), F32) if is_quantised else tensors
    source = save(tmp_path / "hf", LLAMA | ({} if said is None else {"quantization_config": said}), stored)
    assert call("convert", source, tmp_path / "out") == status
    assert told in capfd.readouterr().err


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_value_operations_follow_in_float32(tmp_path: Path, dtype: np.dtype, paired: bool) -> None:
    """Llama in FP8: the query is code · scale · 1/√dim in float32 and cast once. The product isn't rounded to bfloat16
    on the way.
    """
    tensors = random_tensors(LLAMA)
    stored = quantise(tensors, (16, 8), F32)
    model = "llama3.1-8b" if paired else "llama3.3-70b"
    source = save(tmp_path / "hf", LLAMA | quantization((16, 8)), stored)
    arrays = converted(
        source, tmp_path / "out", "--save_dtype", dtype.name, "--maxtext_model", model, "--unit_bytes", "20000"
    )
    decoded = dequantise(stored, (16, 8))
    assert_same_bits(arrays, reference(LLAMA, decoded, dtype, paired_rope=paired))
    twice = reference(LLAMA, {name: values.astype(BF16) for name, values in decoded.items()}, dtype, paired_rope=paired)
    query = "decoder.layers.self_attention.query.kernel"
    assert not np.array_equal(arrays[query], twice[query])  # or the test couldn't tell


def test_fused_experts_in_fp8(generated: Path, tmp_path: Path) -> None:
    """transformers v5's fused experts with a block grid for each expert, `…_scale_inv` on one tensor and `…_scales_inv`
    on the other.
    """
    config, _ = deepseek(generated)
    state = read_file(generated / "models" / "deepseek_v3.state.safetensors")
    rng = np.random.default_rng(1)
    stored, decoded = dict(state), dict(state)
    for name in [name for name in state if ".experts." in name]:
        codes = state[name].astype(FP8)
        experts, rows, columns = codes.shape
        scale = rng.uniform(0.1, 2, (experts, -(-rows // 32), -(-columns // 40))).astype(np.float32)
        suffix = "_scale_inv" if "gate_up" in name else "_scales_inv"
        stored |= {name: codes, name + suffix: scale}
        e, i, j = np.indices(codes.shape)
        decoded[name] = codes.astype(np.float32) * scale[e, i // 32, j // 40]
    source = save(tmp_path / "hf", config | quantization((32, 40)), stored)
    arrays = converted(source, tmp_path / "out", "--unit_bytes", "30000")
    assert_same_bits(arrays, reference(config, unfuse(config, decoded), BF16))


KINDS: dict[str, Callable[[tuple[int, int], np.random.Generator], tuple[str, np.ndarray]]] = {
    "one scale": lambda shape, rng: ("weight_scale", rng.uniform(0.01, 1, ()).astype(np.float32)),
    "one scale, inv": lambda shape, rng: ("weight_scale_inv", rng.uniform(0.01, 1, ()).astype(BF16)),
    "rows": lambda shape, rng: ("weight_scale", rng.uniform(0.01, 1, (shape[0], 1)).astype(BF16)),
    "rows, one axis": lambda shape, rng: ("weight_scale", rng.uniform(0.01, 1, shape[:1]).astype(np.float32)),
    "exponents": lambda shape, rng: (
        "scale",
        np.exp2(rng.integers(-9, 3, (-(-shape[0] // 16), -(-shape[1] // 8)))).astype(ml_dtypes.float8_e8m0fnu),
    ),
}


@pytest.mark.parametrize(
    ("kind", "options"), each(list(KINDS), ["", "--save_dtype float32 --unit_bytes 20000 --mesh fsdp=2"])
)
def test_scales_of_every_kind(tmp_path: Path, kind: str, options: str) -> None:
    """A DeepSeek-V3 converts to what its twin converts to whose weights were dequantised to float32 before; activation
    scales are left out.
    """
    rng = np.random.default_rng(0)
    stored, twin = random_tensors(DEEPSEEK), random_tensors(DEEPSEEK)
    for name in [name for name in stored if is_linear(name)]:
        suffix, scale = KINDS[kind](stored[name].shape, rng)
        stored[name] = stored[name].astype(FP8)
        stored |= {
            name.replace("weight", suffix): scale,
            name.replace("weight", "input_scale"): np.ones((), np.float32),
        }
        wide = scale.astype(np.float32)
        if kind == "exponents":
            wide = np.repeat(np.repeat(wide, 16, 0), 8, 1)[: twin[name].shape[0], : twin[name].shape[1]]
        elif wide.ndim == 1:
            wide = wide[:, None]
        twin[name] = stored[name].astype(np.float32) * wide
    said = quantization((16, 8) if kind == "exponents" else None)
    arrays = converted(save(tmp_path / "fp8", DEEPSEEK | said, *split(stored, 2)), tmp_path / "a", *options.split())
    assert_same_bits(arrays, converted(save(tmp_path / "plain", DEEPSEEK, twin), tmp_path / "b", *options.split()))


def test_every_code_and_every_nan(tmp_path: Path) -> None:
    """All 256 codes with scales from subnormal to huge: NaN stays NaN, -0 stays -0, overflow is infinite, as numpy and
    ml_dtypes have it.
    """
    codes = np.broadcast_to(CODES, (8, 256)).copy()
    scales = np.array([1, -1, 1e-38, 1e-45, 3e38, 0, 0.1, 2.0**-127], np.float32)[:, None]
    values = decode_whole(tmp_path, codes, np.repeat(scales, 2, 1), (1, 128), np.float32)
    with np.errstate(all="ignore"):
        wanted = codes.astype(np.float32) * scales
    np.testing.assert_array_equal(np.isnan(values), np.isnan(wanted))
    known = ~np.isnan(wanted)
    np.testing.assert_array_equal(values[known].view(np.uint32), wanted[known].view(np.uint32))
    assert np.isnan(values[0, [0x7F, 0xFF]]).all()
    assert np.isnan(values[0]).sum() == 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_scale_that_is_no_number_is_refused(tmp_path: Path, bad: float) -> None:
    """When it is met, by its name; a box that doesn't touch its block is decoded."""
    scales = np.array([[1, bad]], np.float32)
    tensors = stored_tensors(tmp_path, np.zeros((4, 256), FP8), scales)
    with pytest.raises(ScaleError, match="w_scale_inv"):
        decode(scaled_blocks(tensors, (128, 128)), ((0, 4), (0, 256)), F32)
    assert decode(scaled_blocks(tensors, (128, 128)), ((0, 4), (0, 128)), F32).shape == (4, 128)


def test_a_conversion_that_meets_one_stops(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The message names the tensor, and no checkpoint appears."""
    stored = quantise(random_tensors(LLAMA), (16, 8), F32)
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    stored[name][-1, -1] = np.nan
    source = save(tmp_path / "hf", LLAMA | quantization((16, 8)), stored)
    assert call("convert", "--source", source, "--output", tmp_path / "out", "--maxtext_model", "llama3.1-8b") == 1
    assert name in capfd.readouterr().err
    assert not (tmp_path / "out" / "0").exists()


def stored_tensors(folder: Path, codes: np.ndarray, scales: np.ndarray) -> dict[str, Tensor]:
    file = folder / "x.safetensors"
    save_file({"w": codes, "w_scale_inv": scales}, file)
    return {tensor.name: tensor for tensor in read_header(str(file))}


def decode_whole(folder: Path, codes: np.ndarray, scales: np.ndarray, block: tuple[int, ...], dtype: Any) -> np.ndarray:
    tensors = stored_tensors(folder, codes, scales)
    return decode(scaled_blocks(tensors, block), tuple((0, n) for n in codes.shape), dtype)


def scaled_blocks(tensors: Mapping[str, Tensor], block: tuple[int, ...]) -> Scaled:
    return Scaled(tensors["w"], "float8_e4m3fn", tensors["w_scale_inv"], block, "FP8")


def decode(encoding: Scaled, box: tuple[tuple[int, int], ...], dtype: Any) -> np.ndarray:
    with np.errstate(all="ignore"):
        return encoding.decode(read_boxes(encoding.reads(box))[0], box, np.dtype(dtype))


@st.composite
def boxes_of_blocks(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int], ...], int]:
    """A shape, a block size, a box, a seed."""
    shape = tuple(draw(st.lists(st.integers(1, 40), min_size=2, max_size=3)))
    block = (1,) * (len(shape) - 2) + tuple(draw(st.integers(1, 17)) for _ in range(2))
    box = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        box.append((start, draw(st.integers(start + 1, size))))
    return shape, block, tuple(box), draw(st.integers(0, 2**32 - 1))


@settings(max_examples=150, deadline=None)
@given(
    case=boxes_of_blocks(),
    dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16]),
    scale_dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16]),
)
def test_a_box_decodes_like_the_slice_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, case: Any, dtype: Any, scale_dtype: Any
) -> None:
    """Any box, across blocks or inside one, in two and three dimensions, all codes included; and the whole equals
    numpy.
    """
    shape, block, box, seed = case
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, shape, np.uint8).view(FP8)
    scales = rng.uniform(-2, 2, tuple(-(-n // size) for n, size in zip(shape, block, strict=True))).astype(scale_dtype)
    tensors = stored_tensors(tmp_path_factory.mktemp("box"), codes, scales)
    encoding = scaled_blocks(tensors, block)
    whole = decode(encoding, tuple((0, n) for n in shape), dtype)
    index = np.indices(shape)
    wanted = (
        codes.astype(np.float32)
        * scales.astype(np.float32)[tuple(at // size for at, size in zip(index, block, strict=True))]
    )
    bits = np.dtype(f"u{np.dtype(dtype).itemsize}")
    known = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(whole.astype(np.float32)), ~known)
    np.testing.assert_array_equal(whole.view(bits)[known], wanted.astype(dtype).view(bits)[known])
    part = decode(encoding, box, dtype)
    np.testing.assert_array_equal(part.view(bits), whole[tuple(slice(*span) for span in box)].view(bits))


def test_a_box_reads_its_own_codes_and_blocks_alone(tmp_path: Path) -> None:
    """The codes of the box, and the scales of the blocks that it touches: no more bytes."""
    tensors = stored_tensors(tmp_path, np.zeros((300, 500), FP8), np.ones((3, 4), np.float32))
    encoding = scaled_blocks(tensors, (128, 128))
    codes, scales = encoding.reads(((100, 129), (128, 384)))
    assert (codes.nbytes, scales.nbytes) == (29 * 256, 2 * 2 * 4)


def test_what_is_left_out_anyway_needs_no_scale(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A multi-token-prediction layer whose scale is missing doesn't stand against the model without it; with `--mtp` it
    does.
    """
    tensors = random_tensors(DEEPSEEK)
    weight = tensors["model.layers.2.self_attn.o_proj.weight"].astype(FP8)
    names = ["model.layers.3.enorm.weight", "model.layers.3.self_attn.o_proj.weight"]
    mtp = dict(zip(names, (tensors["model.norm.weight"], weight), strict=True))
    source = save(tmp_path / "source", DEEPSEEK, tensors | mtp)
    arrays = converted(source, tmp_path / "out")
    assert_same_bits(arrays, reference(DEEPSEEK, tensors, BF16))
    left_out = json.loads((tmp_path / "out" / "0" / "conversion.json").read_text())["dropped"]
    assert left_out == dict.fromkeys(names, "multi-token prediction, convert it with --mtp")
    assert call("convert", "--source", source, "--output", tmp_path / "mtp", "--mtp", "true") == 2
    assert "unscaled: model.layers.3.self_attn.o_proj.weight" in capfd.readouterr().err
