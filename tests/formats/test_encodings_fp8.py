"""One-byte codes with scales: every format of FP8, MXFP8 and int8, against formulas written out here and against its
writers' libraries.
"""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from encoded import assert_bits, assert_boxes_are_slices, codes, only
from hypothesis import given, settings
from hypothesis import strategies as st
from stored import boxes, decode, source_of

from weightbeam.formats.encodings import ScaleError
from weightbeam.formats.release.source import open_source
from weightbeam.formats.safetensors import open_hf, read_boxes
from weightbeam.model_mappings.boxes import whole

BF16, F16, F32 = ml_dtypes.bfloat16, np.float16, np.float32
E4M3, E5M2, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu
E4M3_FNUZ, E5M2_FNUZ = ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
MXFP8 = {"quant_method": "compressed-tensors", "format": "mxfp8-quantized"}
CT = {"quant_method": "compressed-tensors", "format": "float-quantized"}
FBGEMM = {"quant_method": "fbgemm_fp8"}
BLOCKS_128 = FP8 | {"weight_block_size": [128, 128]}
# deepseek-ai/DeepSeek-V4.1-Flash, config.json at dba1be0
DEEPSEEK_V41 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}


def modelopt(algorithm: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm}


# --- what a code means ------------------------------------------------------------------------------------------------


def meaning(code: int, exponent_bits: int, bias: int, special: str) -> float:
    """The value of an 8-bit float by the definition: (-1)^s · 2^(e - bias) · 1.m, subnormal where e is 0."""
    mantissa_bits = 7 - exponent_bits
    exponent, mantissa = code >> mantissa_bits & (1 << exponent_bits) - 1, code & (1 << mantissa_bits) - 1
    sign = -1.0 if code >> 7 else 1.0
    if special == "fn" and code & 0x7F == 0x7F:
        return np.nan
    if special == "fnuz" and code == 0x80:
        return np.nan
    if special == "ieee" and exponent == (1 << exponent_bits) - 1:
        return np.nan if mantissa else sign * np.inf
    fraction = mantissa / (1 << mantissa_bits)
    return sign * (2.0 ** (exponent - bias) * (1 + fraction) if exponent else 2.0 ** (1 - bias) * fraction)


@pytest.mark.parametrize(
    ("dtype", "exponent_bits", "bias", "special"),
    [(E4M3, 4, 7, "fn"), (E5M2, 5, 15, "ieee"), (E4M3_FNUZ, 4, 8, "fnuz"), (E5M2_FNUZ, 5, 16, "fnuz")],
)
def test_every_code(tmp_path: Path, dtype: Any, exponent_bits: int, bias: int, special: str) -> None:
    """All 256 of each 8-bit float. The same bits are half as much in AMD's FNUZ as in FN, and are read so."""
    tensors = {"x.weight": codes((2, 128), dtype=dtype), "x.weight_scale": np.array([1, -2], F32)[:, None]}
    wanted = (
        np.array([meaning(code, exponent_bits, bias, special) for code in range(256)], F32).reshape(2, 128)
        * tensors["x.weight_scale"]
    )
    assert_bits(decode(only(source_of(tmp_path, tensors))), wanted)


def exponent(byte: np.ndarray) -> np.ndarray:
    """An E8M0 byte: 2^(byte - 127); 0 isn't zero."""
    return np.ldexp(np.float64(1), byte.astype(np.int32) - 127)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("stored", [np.uint8, E8M0], ids=["U8", "F8_E8M0"])
def test_every_code_with_every_exponent(tmp_path: Path, stored: Any, dtype: Any) -> None:
    """256 codes times 255 exponents, subnormal and huge ones too. In bfloat16 a product is exact, unless it is too
    small or too large for it.
    """
    exponents = np.repeat(np.arange(255, dtype=np.uint8)[:, None], 8, 1)
    tensors = {
        "x.weight": np.tile(np.arange(256, dtype=np.uint8), (255, 1)).view(E4M3),
        "x.weight_scale": exponents.view(stored),
    }
    exact = np.array([meaning(code, 4, 7, "fn") for code in range(256)]) * exponent(exponents[:, :1])
    values = decode(only(source_of(tmp_path, tensors, MXFP8)), dtype=dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        assert_bits(values, exact.astype(F32).astype(dtype))
    normal = (np.abs(exact) >= 2.0**-126) & (np.abs(exact) < 2.0**128)
    np.testing.assert_array_equal(values.astype(np.float64)[normal], exact[normal])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("stored", [np.uint8, E8M0], ids=["U8", "F8_E8M0"])
def test_every_code_in_blocks_with_every_exponent(tmp_path: Path, stored: Any, dtype: Any) -> None:
    """DeepSeek-V4.1's 32 × 32: all 256 codes four times in a block, and a block for each of the 255 exponents."""
    exponents = np.random.default_rng(0).permutation(255).astype(np.uint8).reshape(15, 17)
    block = np.tile(np.arange(256, dtype=np.uint8), 4).reshape(32, 32)
    tensors = {"x.weight": np.tile(block, (15, 17)).view(E4M3), "x.scale": exponents.view(stored)}
    exact = np.kron(exponent(exponents), np.array([meaning(code, 4, 7, "fn") for code in range(256)])[block])
    encoding = only(source_of(tmp_path, tensors, DEEPSEEK_V41))
    assert encoding.label == "FP8 in blocks of 32 × 32"
    with np.errstate(over="ignore", invalid="ignore"):
        assert_bits(decode(encoding, dtype=dtype), exact.astype(F32).astype(dtype))


# --- where scales lie -------------------------------------------------------------------------------------------------


def ceil(n: int, size: int) -> int:
    return -(-n // size)


def in_blocks(rows: int, columns: int) -> Callable[..., tuple[np.ndarray, ...]]:
    """The index of the scale of each element."""
    return lambda *index: (*index[:-2], index[-2] // rows, index[-1] // columns)


def config_of(weights: Mapping[str, Any], kind: str = "float-quantized") -> dict[str, Any]:
    """`quantization_config` as compressed-tensors writes it."""
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": dict(weights)}},
    }


# name: (codes' dtype, shape, scale's suffix, its shape, quantization_config, index of an element's scale, part of the
# label)
Layout = tuple[Any, tuple[int, ...], str, tuple[int, ...], dict[str, Any], Callable[..., Any], str]
LAYOUTS: dict[str, Layout] = {
    "128 x 128": (E4M3, (576, 129), "_scale_inv", (5, 2), BLOCKS_128, in_blocks(128, 128), "FP8 in blocks of 128 × 128"),
    "one block": (E4M3, (127, 1), "_scale_inv", (1, 1), BLOCKS_128, in_blocks(128, 128), "FP8 in blocks"),
    "blocks, one row": (E4M3, (1, 576), "_scale_inv", (1, 5), BLOCKS_128, in_blocks(128, 128), "FP8 in blocks"),
    "blocks of a fused tensor": (E4M3, (3, 129, 127), "_scale_inv", (3, 5, 8), FP8 | {"weight_block_size": [32, 16]}, in_blocks(32, 16), "32 × 16"),
    "blocks of a fused tensor, _scales_inv": (E4M3, (3, 64, 48), "_scales_inv", (3, 2, 3), FP8 | {"weight_block_size": [32, 16]}, in_blocks(32, 16), "32 × 16"),
    "blocks, compressed-tensors": (
        E4M3, (129, 576), "_scale", (2, 5), config_of({"strategy": "block", "block_structure": [128, 128]}), in_blocks(128, 128), "FP8 in blocks of 128 × 128"
    ),
    "blocks, ModelOpt": (
        E4M3, (256, 384), "_scale", (2, 1, 3, 1), modelopt("FP8_PB_WO"), lambda i, j: (i // 128, 0, j // 128, 0), "128 × 128"
    ),
    "blocks, DeepSeek-V4": (E4M3, (129, 576), ".scale", (2, 5), BLOCKS_128 | {"scale_fmt": "ue8m0"}, in_blocks(128, 128), "128 × 128"),
    "blocks, DeepSeek-V4.1": (E4M3, (129, 75), ".scale", (5, 3), DEEPSEEK_V41, in_blocks(32, 32), "FP8 in blocks of 32 × 32"),
    "an Engram table of DeepSeek-V4.1": (E4M3, (129, 256), ".scale", (129, 8), DEEPSEEK_V41, in_blocks(1, 32), "in groups of 32"),
    "one scale, no axes": (E4M3, (129, 127), "_scale", (), CT, lambda i, j: (), "with one scale"),
    "one scale, inv": (E4M3, (129, 127), "_scale_inv", (), FP8 | {"weight_block_size": None}, lambda i, j: (), "with one scale"),
    "one scale, [1]": (E4M3, (129, 127), "_scale", (1,), CT, lambda i, j: (0,), "with one scale"),
    "one scale, ModelOpt": (E4M3, (129, 127), "_scale", (), modelopt("FP8"), lambda i, j: (), "with one scale"),
    "a scale for each expert": (E4M3, (3, 129, 127), "_scale_inv", (3,), FP8, lambda e, i, j: (e,), "each expert"),
    "a scale for each expert, three axes": (E4M3, (3, 129, 127), "_weight_scale", (3, 1, 1), CT, lambda e, i, j: (e, 0, 0), "each expert"),
    "a scale for each row": (E4M3, (576, 129), "_scale", (576, 1), CT, lambda i, j: (i, 0), "each row"),
    "a scale for each row, one axis": (E4M3, (129, 64), "_scale", (129,), modelopt("FP8_PC_PT"), lambda i, j: (i,), "each row"),
    "a scale for each row, fbgemm": (E4M3, (127, 129), "_scale", (127, 1), FBGEMM, lambda i, j: (i, 0), "each row"),
    "a scale for each row of each expert": (E4M3, (3, 129, 64), "_scale", (3, 129), CT, lambda e, i, j: (e, i), "each expert and row"),
    "a scale for each column of each expert": (
        E4M3, (3, 64, 127), "_scale", (3, 1, 127), FBGEMM, lambda e, i, j: (e, 0, j), "each expert and column"
    ),
    "groups": (E4M3, (129, 576), "_scale", (129, 18), config_of({"strategy": "group", "group_size": 32}), in_blocks(1, 32), "in groups of 32"),
    "groups, one row": (E5M2, (1, 64), "_scale", (1, 4), CT, in_blocks(1, 16), "in groups of 16"),
    "int8, rows": (np.int8, (576, 129), "_scale", (576, 1), config_of({}, "int-quantized"), lambda i, j: (i, 0), "int8 with a scale for each row"),
    "int8, one scale": (np.int8, (129, 127), "_scale", (1,), config_of({}, "int-quantized"), lambda i, j: (0,), "int8 with one scale"),
    "int8, groups": (np.int8, (129, 128), "_scale", (129, 4), config_of({"group_size": 32}, "int-quantized"), in_blocks(1, 32), "int8 in groups of 32"),
}  # fmt: skip


def make(folder: Path, name: str, scale_dtype: Any = F32, seed: int = 0) -> tuple[Any, np.ndarray]:
    """An encoding of this layout, and the values in float32 by the formula."""
    dtype, shape, suffix, scale_shape, config, index, label = LAYOUTS[name]
    scale = (
        np.exp2(np.random.default_rng(seed).integers(-9, 3, scale_shape)) if scale_dtype in (E8M0, np.uint8) else None
    )
    scale = np.random.default_rng(seed).uniform(1e-4, 2e-2, scale_shape).astype(F32) if scale is None else scale
    stored = scale.astype(E8M0 if scale_dtype == np.uint8 else scale_dtype)
    weight = codes(shape, seed, dtype)
    fused = len(shape) == 3
    stem = "x.experts.up_proj" if fused else "x" if suffix == ".scale" else "x.weight"
    tensors = {
        stem if fused else "x.weight": weight,
        stem + suffix: np.asarray(stored).view(scale_dtype).reshape(scale_shape),
    }
    if scale_dtype == np.uint8:
        config = config | {"scale_fmt": "ue8m0"}
    encoding = only(source_of(folder, tensors, config))
    assert encoding.shape == shape
    assert label in encoding.label
    of_each = stored.astype(F32)[index(*np.indices(shape))]
    return encoding, weight.astype(F32) * of_each


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(tmp_path: Path, name: str) -> None:
    """Each equals float32(code) · float32(scale) in float32, and that rounded once in bfloat16."""
    encoding, wanted = make(tmp_path, name)
    assert_bits(decode(encoding), wanted)
    assert_bits(decode(encoding, dtype=BF16), wanted.astype(BF16))
    assert pickle.loads(pickle.dumps(encoding)) == encoding


@pytest.mark.parametrize(
    "scale_dtype", [F32, BF16, F16, E8M0, np.uint8], ids=["float32", "bfloat16", "float16", "e8m0", "uint8"]
)
@pytest.mark.parametrize(
    "name", ["128 x 128", "blocks, DeepSeek-V4", "blocks, DeepSeek-V4.1", "a scale for each row", "groups"]
)
def test_dtypes_of_scales(tmp_path: Path, name: str, scale_dtype: Any) -> None:
    """Each is widened to float32 before it is multiplied; bytes are exponents where the config says `ue8m0`."""
    encoding, wanted = make(tmp_path, name, scale_dtype, seed=1)
    assert_bits(decode(encoding), wanted)


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=12, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([F32, BF16]))
def test_a_box_is_the_slice_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject, dtype: Any
) -> None:
    """Wherever a box cuts through blocks."""
    encoding, _ = make(tmp_path_factory.mktemp("box"), name)
    assert_boxes_are_slices(encoding, data.draw(st.lists(boxes(encoding.shape), min_size=1, max_size=4)), dtype)


def test_int8_with_zeros(tmp_path: Path) -> None:
    """(code - zero) · scale, the difference exact."""
    rng = np.random.default_rng(0)
    weight, zero, scale = (
        rng.integers(-128, 128, (65, 96), np.int8),
        rng.integers(-128, 128, (65, 3), np.int8),
        rng.uniform(0.01, 1, (65, 3)).astype(F32),
    )
    tensors = {"x.weight": weight, "x.weight_scale": scale, "x.weight_zero_point": zero}
    encoding = only(source_of(tmp_path, tensors, config_of({"symmetric": False}, "int-quantized")))
    wanted = (weight.astype(F32) - np.repeat(zero, 32, 1).astype(F32)) * np.repeat(scale, 32, 1)
    assert_bits(decode(encoding), wanted)
    assert_boxes_are_slices(encoding, [((3, 60), (5, 90)), ((64, 65), (95, 96))], BF16)


ZEROS: dict[
    str, tuple[list[dict[str, Any]], bool]
] = {  # what each group says of its weights, and whether zeros are needed
    "not symmetric": ([{"symmetric": False}], True),
    "not symmetric, in full": ([{"num_bits": 8, "type": "int", "symmetric": False}], True),
    "symmetric": ([{"symmetric": True}], False),
    "nothing, which is symmetric": ([{}], False),
    "one of two": ([{"symmetric": False}, {}], False),
    "of 4 bits": ([{"num_bits": 8}, {"num_bits": 4, "symmetric": False}], False),
    "beside FP8": ([{"num_bits": 8, "type": "float", "symmetric": True}, {"num_bits": 8, "symmetric": False}], True),
}


@pytest.mark.parametrize("case", ZEROS)
def test_int8_without_the_zeros_that_the_config_says(tmp_path: Path, case: str) -> None:
    """A missing zero point isn't taken for 0 where no group is symmetric."""
    weights, needed = ZEROS[case]
    groups = {f"group_{number}": {"targets": ["Linear"], "weights": said} for number, said in enumerate(weights)}
    said = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}
    tensors = {"x.weight": codes((8, 16), dtype=np.int8), "x.weight_scale": np.ones((8, 1), F32)}
    zeros = {"y.weight_zero_point": np.zeros((8, 1), np.int8)}
    tensors |= {name.replace("x.", "y."): values for name, values in tensors.items()} | zeros
    problems = source_of(tmp_path, tensors, said).problems
    assert [(problem.kind, problem.subject) for problem in problems] == [("scale", "x.weight")] * needed
    assert all("x.weight_zero_point is missing" in problem.message for problem in problems)


@pytest.mark.parametrize(
    "name", ["128 x 128", "blocks of a fused tensor", "groups", "a scale for each row", "blocks, ModelOpt"]
)
def test_a_box_reads_what_it_needs_alone(tmp_path: Path, name: str) -> None:
    """One element is one code and one scale."""
    encoding, _ = make(tmp_path, name)
    weight, scale = encoding.reads(tuple((n // 2, n // 2 + 1) for n in encoding.shape))
    assert (weight.nbytes, scale.nbytes) == (1, 4)


@pytest.mark.parametrize(
    ("stored", "bad"), [(F32, np.nan), (F32, np.inf), (BF16, -np.inf), (np.uint8, 255), (E8M0, np.nan)]
)
def test_a_scale_that_is_no_number(tmp_path: Path, stored: Any, bad: float) -> None:
    """It is refused by its name when it is met: exponent 255 is E8M0's NaN. Elsewhere the tensor can be read."""
    scale = np.ones((2, 2), stored)
    scale[1, 1] = bad
    encoding = only(source_of(tmp_path, {"x.weight": codes((2, 64), dtype=E4M3), "x.weight_scale": scale}, MXFP8))
    with pytest.raises(ScaleError, match=r"x\.weight_scale"):
        decode(encoding)
    assert decode(encoding, box=((0, 2), (0, 32))).shape == (2, 32)


@pytest.mark.parametrize("shape", [(2048, 512), (2, 2048, 512)])
def test_scales_of_columns_are_not_spread_over_rows(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """What decoding takes beside its result is a strip, not a scale in float32 for each element."""
    tensors = {"x.weight": np.zeros(shape, E4M3), "x.weight_scale": np.ones((*shape[:-2], 1, shape[-1]), F32)}
    encoding = only(source_of(tmp_path, tensors, CT))
    box = whole(shape)
    stored, values = read_boxes(encoding.reads(box))[0], np.empty(shape, BF16)
    encoding.decode(stored, box, np.dtype(BF16), lambda shape, dtype: values)  # makes the tables
    tracemalloc.start()
    try:
        encoding.decode(stored, box, np.dtype(BF16), lambda shape, dtype: values)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < values.size


@pytest.mark.parametrize("shape", [(0, 32), (8, 0), (0, 0), (2, 0, 32)])
@pytest.mark.parametrize("scale", [(), (1,), (1, 1)])
def test_one_scale_for_no_values(tmp_path: Path, shape: tuple[int, ...], scale: tuple[int, ...]) -> None:
    """An empty weight decodes to nothing."""
    encoding = only(source_of(tmp_path, {"x.weight": np.zeros(shape, E4M3), "x.weight_scale": np.ones(scale, F32)}, CT))
    assert encoding.decode(read_boxes(encoding.reads(whole(shape)))[0], whole(shape), np.dtype(F32)).shape == shape


BLOCKS: dict[str, tuple[Any, str | None]] = {
    "as a list": ([24, 28], None),
    "as text, as compressed-tensors reads it too": ("24x28", None),
    "text that says nothing": ("large", "block_structure should be two sizes of an axis, is 'large'"),
    "a number of 100,000 digits": ("9" * 100_000 + "x1", "block_structure"),
    "floats": ([24.0, 28.0], "block_structure"),
    "more than an axis has": ([2**31, 28], "block_structure"),
    "more than a machine has": ([2**70, 2**70], "block_structure"),
}


@pytest.mark.parametrize("case", BLOCKS)
def test_the_size_of_blocks(tmp_path: Path, case: str) -> None:
    """By the field's own name; what makes no sense is a problem of the plan."""
    size, message = BLOCKS[case]
    tensors = {"x.weight": codes((48, 64), dtype=E4M3), "x.weight_scale": np.ones((2, 3), F32)}
    source = source_of(tmp_path, tensors, config_of({"strategy": "block", "block_structure": size}))
    if message is None:
        assert only(source).label == "FP8 in blocks of 24 × 28"
    else:
        assert message in source.problems[0].message
        assert "weight_block_size" not in source.problems[0].message


def test_a_scale_of_zero(tmp_path: Path) -> None:
    """A block of zeros, with the sign of its codes; NaN codes stay NaN."""
    tensors = {"x.weight": codes((1, 256), dtype=E4M3), "x.weight_scale": np.zeros((1, 1), F32)}
    with np.errstate(invalid="ignore"):
        assert_bits(decode(only(source_of(tmp_path, tensors, CT))), tensors["x.weight"].astype(F32) * F32(0))


# --- other people's libraries -----------------------------------------------------------------------------------------

# name: (format, arguments of the weights, shape of the scales, their dtype)
WRITTEN = {
    "tensor": ("float-quantized", {"type": "float", "strategy": "tensor"}, (1,), "bfloat16"),
    "channel": ("naive-quantized", {"type": "float", "strategy": "channel"}, (160, 1), "bfloat16"),
    "group": ("float-quantized", {"type": "float", "strategy": "group", "group_size": 32}, (160, 6), "float32"),
    "block": (
        "float-quantized",
        {"type": "float", "strategy": "block", "block_structure": [128, 128]},
        (2, 2),
        "float32",
    ),
    "int8 channel": ("int-quantized", {"type": "int", "strategy": "channel"}, (160, 1), "float32"),
    "int8 channel, bfloat16": ("int-quantized", {"type": "int", "strategy": "channel"}, (160, 1), "bfloat16"),
    "int8 asymmetric": (
        "int-quantized",
        {"type": "int", "strategy": "channel", "symmetric": False},
        (160, 1),
        "float32",
    ),
    "mxfp8": (
        "mxfp8-quantized",
        {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        (160, 6),
        "float32",
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_compressed_tensors_writes(tmp_path: Path, name: str) -> None:
    """A file of its compressor, and `quantization_config` as its own class writes it.

    The library computes in the scale's dtype. Where that is float32 (and for exponents, where nothing rounds) bits
    agree; in bfloat16 its product is rounded to bfloat16, as ours is in the end: bits agree in bfloat16.
    """
    torch = pytest.importorskip("torch")
    base = pytest.importorskip("compressed_tensors.compressors.base")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from safetensors.torch import save_file as save_torch

    kind, arguments, shape, dtype = WRITTEN[name]
    generator = torch.Generator().manual_seed(0)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=8, **arguments))
    state = {
        "weight": torch.randn(160, 192, generator=generator),
        "weight_scale": (torch.rand(shape, generator=generator) * 0.01 + 0.01).to(getattr(torch, dtype)),
    }
    if kind == "mxfp8-quantized":
        state["weight_scale"] = 2.0 ** torch.randint(-9, -3, shape, generator=generator)
    if not arguments.get("symmetric", True):
        state["weight_zero_point"] = torch.randint(-20, 20, shape, generator=generator, dtype=torch.int8)
    compressor = base.BaseCompressor.get_value_from_registry(kind)
    stored = compressor.compress(state, scheme)
    wanted = compressor.decompress(stored, scheme)["weight"]

    source_of(
        tmp_path,
        {},
        QuantizationConfig(config_groups={"group_0": scheme}, format=kind, quantization_status="compressed").to_dict(),
    )
    save_torch({f"x.{key}": value.contiguous() for key, value in stored.items()}, tmp_path / "model.safetensors")
    encoding = only(open_source(open_hf(tmp_path)))
    if wanted.dtype == torch.float32:
        assert_bits(decode(encoding), wanted.numpy())
    else:
        assert wanted.dtype == torch.bfloat16
        assert_bits(decode(encoding, dtype=BF16), wanted.view(torch.uint16).numpy().view(BF16))


@pytest.mark.parametrize("scale_dtype", [F32, BF16, np.uint8], ids=["float32", "bfloat16", "uint8"])
@pytest.mark.parametrize("shape", [(256, 384), (3, 128, 256)], ids=str)
def test_equals_transformers(tmp_path: Path, shape: tuple[int, ...], scale_dtype: Any) -> None:
    """The same bits as transformers' own FP8 dequantisation, which also multiplies in float32
    (integrations/finegrained_fp8.py).
    """
    torch = pytest.importorskip("torch")
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")

    weight = codes(shape, dtype=E4M3)
    grid = (*shape[:-2], shape[-2] // 128, shape[-1] // 128)
    rng = np.random.default_rng(0)
    scale = (
        rng.integers(100, 140, grid, np.uint8)
        if scale_dtype == np.uint8
        else rng.uniform(1e-4, 1e-2, grid).astype(scale_dtype)
    )
    said = BLOCKS_128 | {"scale_fmt": "ue8m0"}
    ours = decode(only(source_of(tmp_path, {"x.weight": weight, "x.weight_scale_inv": scale}, said)))

    def to_torch(array: np.ndarray, dtype: Any) -> Any:
        return torch.from_numpy(np.ascontiguousarray(array).view(np.uint8)).view(dtype).reshape(array.shape)

    kinds = {F32: torch.float32, BF16: torch.bfloat16, np.uint8: torch.uint8}
    theirs = fp8.Fp8Dequantize(None)._dequantize_one(
        to_torch(weight, torch.float8_e4m3fn), to_torch(scale, kinds[scale_dtype]), torch.float32
    )
    assert_bits(ours, theirs.numpy())
