"""E2M1 codes, two in a byte: MXFP4 and NVFP4 as each writer has them, against the formula and against the writers'
libraries.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from encoded import assert_bits, assert_boxes_are_slices, codes, only
from hypothesis import given, settings
from hypothesis import strategies as st
from stored import boxes, decode, source_of

from weightbeam.formats.encodings import Encoding, ScaleError
from weightbeam.formats.release.source import ReleaseTensors

BF16, F32 = ml_dtypes.bfloat16, np.float32
E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu

CT_MXFP4 = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
CT_NVFP4 = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
GPT_OSS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
DEEPSEEK_V4 = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}


def e2m1(code: np.ndarray) -> np.ndarray:
    """The value of a 4-bit float by the definition: (-1)^s · 2^(e - 1) · 1.m, and 0.m where e is 0. Code 8 is -0."""
    sign = np.where(code & 8, -1.0, 1.0)
    exponent, mantissa = code >> 1 & 3, (code & 1) / 2
    return (sign * np.where(exponent, 2.0 ** (exponent.astype(np.float64) - 1) * (1 + mantissa), mantissa)).astype(F32)


def values_in(packed: np.ndarray) -> np.ndarray:
    """The values of bytes: the low half of byte k is element 2k, the high half element 2k + 1."""
    packed = packed.view(np.uint8)
    values = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), F32)
    values[..., 0::2], values[..., 1::2] = e2m1(packed & 15), e2m1(packed >> 4)
    return values


def exponents(stored: np.ndarray) -> np.ndarray:
    """What E8M0 bytes mean, in float32."""
    return np.ldexp(np.float64(1), stored.view(np.uint8).astype(np.int32) - 127).astype(F32)


def mxfp4(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return values_in(packed) * np.repeat(exponents(scale), 32, -1)


def test_the_values_of_all_codes() -> None:
    """As the specification lists them, so that the formula of this file is right (OCP Microscaling Formats 1.0, table
    5).
    """
    wanted = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], F32)
    assert_bits(e2m1(np.arange(16)), wanted)


# --- every byte with every scale --------------------------------------------------------------------------------------


def all_bytes(scales: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """A row of all 256 bytes for each scale: (scale, 256) bytes, (scale, 512 / group) scales."""
    return np.tile(np.arange(256, dtype=np.uint8), (len(scales), 1)), np.repeat(scales[:, None], 512 // group, 1)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_mxfp4_every_byte_with_every_exponent(tmp_path: Path, dtype: Any) -> None:
    """65,280 pairs, to the bit: signed zeros, subnormals. Nothing is rounded in bfloat16 either, but what is too large
    is infinite.
    """
    packed, scale = all_bytes(np.arange(255, dtype=np.uint8), 32)
    encoding = only(source_of(tmp_path, {"x.weight_packed": packed, "x.weight_scale": scale}, CT_MXFP4))
    with np.errstate(over="ignore"):
        wanted = mxfp4(packed, scale)
    values = decode(encoding, dtype=dtype)
    assert_bits(values, wanted.astype(dtype))
    np.testing.assert_array_equal(values.astype(F32), wanted)  # exact


@pytest.mark.parametrize("divides", [True, False], ids=["compressed-tensors", "ModelOpt"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_nvfp4_every_byte_with_every_scale(tmp_path: Path, dtype: Any, divides: bool) -> None:
    """All bytes with all 254 E4M3 scales that are numbers: E2M1 · (scale / global), and E2M1 · (scale · scale_2), in
    float32.
    """
    scales = np.setdiff1d(np.arange(256), [0x7F, 0xFF]).astype(np.uint8)
    packed, scale = all_bytes(scales, 16)
    scale, second = scale.view(E4M3), np.array([2688 / 3.7], F32)
    wide = np.repeat(scale.astype(F32), 16, 1)
    if divides:
        tensors = {"x.weight_packed": packed, "x.weight_scale": scale, "x.weight_global_scale": second}
        wanted = values_in(packed) * (wide / second[0])
    else:
        second = (1 / second).reshape(())
        tensors = {"x.weight": packed, "x.weight_scale": scale, "x.weight_scale_2": second}
        wanted = values_in(packed) * (wide * second)
    encoding = only(source_of(tmp_path, tensors, CT_NVFP4 if divides else MODELOPT))
    assert wanted.dtype == F32
    assert_bits(decode(encoding, dtype=dtype), wanted.astype(dtype))


def test_nvfp4_experts_beside_fp8_blocks(tmp_path: Path) -> None:
    """NVIDIA's DeepSeek V4: config.json says `fp8`, which is what its attention is stored in."""
    nvidia = {"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16}
    packed, scale = codes((64, 48)), np.random.default_rng(0).uniform(1, 448, (64, 6)).astype(E4M3)
    codes8, blocks = np.arange(-8, 8).repeat(16).astype(E4M3).reshape(128, 2), np.array([[2]], E8M0)
    tensors = {
        "e.weight": packed,
        "e.weight_scale": scale,
        "e.weight_scale_2": np.array(0.25, F32),
        "e.input_scale": np.ones((), F32),
    }
    source = source_of(tmp_path, tensors | {"a.weight": codes8, "a.scale": blocks}, DEEPSEEK_V4 | nvidia)
    assert not source.problems
    assert_bits(decode(source.encodings["e.weight"]), nvfp4(packed, scale, np.array(0.25, F32), divide=False))
    assert_bits(decode(source.encodings["a.weight"]), codes8.astype(F32) * 2)


def test_the_two_nvfp4_agree(tmp_path: Path) -> None:
    """One weight as both write it, the second scale a power of two: the same bits. Mixed up they would differ by its
    square.
    """
    packed, scale = codes((64, 48)), np.random.default_rng(0).uniform(1, 448, (64, 6)).astype(E4M3)
    theirs = {"x.weight_packed": packed, "x.weight_scale": scale, "x.weight_global_scale": np.array([512], F32)}
    nvidia = {"x.weight": packed, "x.weight_scale": scale, "x.weight_scale_2": np.array(1 / 512, F32)}
    divided, multiplied = (decode(only(source_of(tmp_path / name, t))) for name, t in (("a", theirs), ("b", nvidia)))
    assert_bits(divided, multiplied)
    assert np.abs(divided).max() <= 6 * 448 / 512


# --- layouts ----------------------------------------------------------------------------------------------------------


def nvfp4(packed: np.ndarray, scale: np.ndarray, second: np.ndarray | float, divide: bool) -> np.ndarray:
    wide = scale.astype(F32)
    return values_in(packed) * np.repeat(wide / F32(second) if divide else wide * F32(second), 16, -1)


def random_scale(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    rng = np.random.default_rng(1)
    return (
        rng.integers(100, 140, shape, np.uint8).view(dtype)
        if np.dtype(dtype).name != "float8_e4m3fn"
        else rng.uniform(-9, 448, shape).astype(dtype)
    )


def build(folder: Path, name: str) -> tuple[ReleaseTensors, np.ndarray]:
    """A layout and its values by the formula."""
    if name == "gpt-oss":  # (experts, outputs, blocks, 16); the values are (experts, inputs, outputs)
        blocks, scale = codes((3, 127, 5, 16)), random_scale((3, 127, 5), np.uint8)
        source = source_of(folder, {"x.experts.up_proj_blocks": blocks, "x.experts.up_proj_scales": scale}, GPT_OSS)
        return source, mxfp4(blocks.reshape(3, 127, 80), scale).transpose(0, 2, 1)
    if name == "DeepSeek-V4":
        packed, scale = codes((129, 288), dtype=np.int8), random_scale((129, 18), E8M0)
        return source_of(folder, {"x.w1.weight": packed, "x.w1.scale": scale}, DEEPSEEK_V4), mxfp4(packed, scale)
    if name == "NVFP4, ModelOpt, fused":  # (experts, pairs of inputs, outputs)
        packed, scale, second = codes((3, 72, 129)), random_scale((3, 9, 129), E4M3), np.array(77.7, F32)
        tensors = {
            "x.experts.down_proj": packed,
            "x.experts.down_proj_weight_scale": scale,
            "x.experts.down_proj_weight_scale_2": second,
        }
        wanted = nvfp4(np.ascontiguousarray(packed.transpose(0, 2, 1)), scale.transpose(0, 2, 1), second, divide=False)
        return source_of(folder, tensors, MODELOPT), wanted.transpose(0, 2, 1)
    if name.startswith("MXFP4"):
        shape, dtype = {
            "MXFP4": ((129, 288), np.uint8),
            "MXFP4, E8M0": ((1, 16), E8M0),
            "MXFP4, experts": ((3, 127, 64), np.uint8),
        }[name]
        packed, scale = codes(shape), random_scale((*shape[:-1], shape[-1] // 16), dtype)
        return source_of(folder, {"x.weight_packed": packed, "x.weight_scale": scale}, CT_MXFP4), mxfp4(packed, scale)
    divide = "ModelOpt" not in name
    shape = (3, 127, 64) if "experts" in name else (129, 288)
    packed, scale = codes(shape), random_scale((*shape[:-1], shape[-1] // 8), E4M3)
    second = np.array([700, 300, 5], F32) if "experts" in name else np.array(77.7, F32)
    stem = "x.weight_packed" if divide else "x.weight"
    tensors = {stem: packed, "x.weight_scale": scale, "x.weight_global_scale" if divide else "x.weight_scale_2": second}
    return source_of(folder, tensors, CT_NVFP4 if divide else MODELOPT), nvfp4(
        packed, scale, second.reshape((-1, 1, 1)[-packed.ndim :]), divide
    )


LAYOUTS = [
    "gpt-oss",
    "DeepSeek-V4",
    "MXFP4",
    "MXFP4, E8M0",
    "MXFP4, experts",
    "NVFP4",
    "NVFP4, experts",
    "NVFP4, ModelOpt",
    "NVFP4, ModelOpt, experts",
    "NVFP4, ModelOpt, fused",
]


def encoding_of(folder: Path, name: str) -> Encoding:
    return only(build(folder, name)[0])


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(tmp_path: Path, name: str) -> None:
    """The values, their shape, and the name under which the tables see them."""
    source, wanted = build(tmp_path, name)
    encoding = only(source)
    assert_bits(decode(encoding), wanted)
    assert_bits(decode(encoding, dtype=BF16), wanted.astype(BF16))
    assert pickle.loads(pickle.dumps(encoding)) == encoding
    assert [*source.encodings] == [
        {
            "gpt-oss": "x.experts.up_proj",
            "DeepSeek-V4": "x.w1.weight",
            "NVFP4, ModelOpt, fused": "x.experts.down_proj",
        }.get(name, "x.weight")
    ]
    assert encoding.order == ((0, 2, 1) if name == "gpt-oss" else tuple(range(wanted.ndim)))


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=15, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([F32, BF16]))
def test_a_box_is_the_slice_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject, dtype: Any
) -> None:
    """Wherever a box cuts through groups and bytes."""
    encoding = encoding_of(tmp_path_factory.mktemp("box"), name)
    assert_boxes_are_slices(encoding, data.draw(st.lists(boxes(encoding.shape), min_size=1, max_size=4)), dtype)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_box_reads_what_it_needs_alone(tmp_path: Path, name: str) -> None:
    """One value is one byte and one scale, and the scale of scales where there is one."""
    encoding = encoding_of(tmp_path, name)
    reads = encoding.reads(tuple((n - 1, n) for n in encoding.shape))
    assert [read.nbytes for read in reads] == ([1, 1, 4] if name.startswith("NVFP4") else [1, 1])


def test_values_are_laid_out_as_stored(tmp_path: Path) -> None:
    """gpt-oss' values are a view of rows that lie as in the file: what follows needn't copy against the grain."""
    values = decode(encoding_of(tmp_path, "gpt-oss"))
    assert values.transpose(0, 2, 1).flags.c_contiguous


@pytest.mark.parametrize(
    ("name", "place"),
    [("MXFP4", "x.weight_scale"), ("gpt-oss", "x.experts.up_proj_scales"), ("DeepSeek-V4", "x.w1.scale")],
)
def test_exponent_255_is_refused(tmp_path: Path, name: str, place: str) -> None:
    """It is E8M0's NaN."""
    packed = codes(
        (2, 2, 2, 16) if name == "gpt-oss" else (2, 32), dtype=np.int8 if name == "DeepSeek-V4" else np.uint8
    )
    scale = np.full((2, 2, 2) if name == "gpt-oss" else (2, 2), 255, np.uint8)
    stem = {"MXFP4": "x.weight_packed", "gpt-oss": "x.experts.up_proj_blocks", "DeepSeek-V4": "x.w1.weight"}[name]
    encoding = only(source_of(tmp_path, {stem: packed, place: scale.view(E8M0) if name == "DeepSeek-V4" else scale}))
    with pytest.raises(ScaleError, match=place):
        decode(encoding)


@pytest.mark.parametrize(
    ("codes_shape", "scale", "second", "message"),
    [
        ((3, 8, 5), (3, 5, 1), (), "needs scales (3, 1, 5)"),
        ((3, 4, 5), (3, 1, 5), (), "whole groups"),
        ((8, 5), (1, 5), (), "experts"),
        ((3, 8, 5), (3, 1, 5), (3,), "one number"),
    ],
)
def test_fused_experts_that_do_not_fit(
    tmp_path: Path, codes_shape: tuple[int, ...], scale: tuple[int, ...], second: tuple[int, ...], message: str
) -> None:
    """Other axes than ModelOpt's, or groups that aren't whole."""
    tensors = {
        "x.up": codes(codes_shape),
        "x.up_weight_scale": np.ones(scale, E4M3),
        "x.up_weight_scale_2": np.ones(second, F32),
    }
    source = source_of(tmp_path, tensors, MODELOPT)
    assert [problem.subject for problem in source.problems] == ["x.up"]
    assert message in source.problems[0].message


@pytest.mark.parametrize("second", [0.0, np.nan, np.inf])
def test_a_second_scale_that_is_no_number(tmp_path: Path, second: float) -> None:
    """Also one of 0, by which nothing can be divided."""
    tensors = {
        "x.weight_packed": codes((2, 16)),
        "x.weight_scale": np.ones((2, 2), E4M3),
        "x.weight_global_scale": np.array([second], F32),
    }
    with pytest.raises(ScaleError, match="weight_global_scale"):
        decode(only(source_of(tmp_path, tensors)))


# --- other people's libraries -----------------------------------------------------------------------------------------


def to_torch(array: np.ndarray) -> Any:
    return pytest.importorskip("torch").from_numpy(np.ascontiguousarray(array).copy())


def from_torch(tensor: Any) -> np.ndarray:
    """A torch bfloat16 or float32 tensor with the same bits."""
    torch = pytest.importorskip("torch")
    return (
        tensor.contiguous().view(torch.uint16).numpy().view(BF16)
        if tensor.dtype == torch.bfloat16
        else tensor.contiguous().numpy()
    )


@pytest.mark.parametrize("kind", ["mxfp4-pack-quantized", "nvfp4-pack-quantized"])
def test_what_compressed_tensors_writes(tmp_path: Path, kind: str) -> None:
    """A file of its compressor, and what its decompressor makes of it.

    MXFP4 is exact in its bfloat16: the same bits. For NVFP4 it divides and multiplies in float32 (the global scale's
    dtype) and rounds to bfloat16 once, as we do: the same bits.
    """
    torch = pytest.importorskip("torch")
    base = pytest.importorskip("compressed_tensors.compressors.base")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    mx, random = kind.startswith("mx"), torch.Generator().manual_seed(0)
    arguments = (
        dict(strategy="group", group_size=32, scale_dtype=torch.uint8)
        if mx
        else dict(strategy="tensor_group", group_size=16)
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=4, type="float", **arguments))
    state = {"weight": torch.randn(96, 160, generator=random)}
    if mx:
        state["weight_scale"] = 2.0 ** torch.randint(-4, 1, (96, 5), generator=random)
    else:
        state["weight_scale"] = (torch.rand(96, 10, generator=random) * 300 + 20).to(torch.float8_e4m3fn).float()
        state["weight_global_scale"] = torch.tensor([777.0])
    compressor = base.BaseCompressor.get_value_from_registry(kind)
    stored = compressor.compress(state, scheme)
    wanted = compressor.decompress(stored, scheme)["weight"]
    assert wanted.dtype == torch.bfloat16

    tensors = {
        f"x.{key}": v.view(torch.uint8).numpy().view(E4M3) if v.dtype == torch.float8_e4m3fn else v.numpy()
        for key, v in stored.items()
    }
    said = QuantizationConfig(
        config_groups={"group_0": scheme}, format=kind, quantization_status="compressed"
    ).to_dict()
    assert_bits(decode(only(source_of(tmp_path, tensors, said)), dtype=BF16), from_torch(wanted))


def test_gpt_oss_equals_transformers(tmp_path: Path) -> None:
    """The same bits as `convert_moe_packed_tensors`, which multiplies by powers of two in bfloat16 and transposes, -0
    and all.
    """
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scale = codes((4, 96, 6, 16)), random_scale((4, 96, 6), np.uint8)
    wanted = mxfp4.convert_moe_packed_tensors(to_torch(blocks), to_torch(scale))
    source = source_of(tmp_path, {"x.experts.up_proj_blocks": blocks, "x.experts.up_proj_scales": scale}, GPT_OSS)
    assert_bits(decode(only(source), dtype=BF16), from_torch(wanted))


def test_deepseek_v4_equals_transformers(tmp_path: Path) -> None:
    """The same bits as transformers makes of int8 with exponents (integrations/finegrained_fp8.py)."""
    torch = pytest.importorskip("torch")
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    packed, scale = codes((64, 96), dtype=np.int8), random_scale((64, 6), E8M0)
    wanted = fp8.Fp8Dequantize(None)._dequantize_one(
        to_torch(packed), to_torch(scale.view(np.uint8)).view(torch.float8_e8m0fnu), torch.float32
    )
    encoding = only(source_of(tmp_path, {"x.w1.weight": packed, "x.w1.scale": scale}, DEEPSEEK_V4))
    assert_bits(decode(encoding), from_torch(wanted))
    assert_bits(decode(encoding, dtype=BF16), from_torch(wanted.to(torch.bfloat16)))
