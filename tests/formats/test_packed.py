"""Packed integers, against formulas in plain Python, for boxes that cut words, bytes, groups and rows anywhere; and
against compressed-tensors.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lazily import lazily
from stored import COMPRESSED, assert_decodes, boxes, decode, encoding_of, message_of, pack

from weightbeam.formats.encodings.nibbles import ScaleError, byte_table, runs
from weightbeam.formats.encodings.packed import PackedError
from weightbeam.formats.release.source import open_source
from weightbeam.formats.safetensors import open_hf
from weightbeam.model_mappings.boxes import Box

compressors = lazily("compressed_tensors.compressors")
quantization = lazily("compressed_tensors.quantization")
torch = lazily("torch")

BF16 = np.dtype(ml_dtypes.bfloat16)


# --- the formulas -----------------------------------------------------------------------------------------------------


def dequantise(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group: np.ndarray) -> np.ndarray:
    """(code - zero) · scale with the group of each column, rounded to float32 once."""
    return (codes.astype(np.int64) - zeros[..., group]).astype(np.float32) * scales.astype(np.float32)[..., group]


def scheme(bits: int, group: int | None, symmetric: bool = True) -> dict[str, Any]:
    """`quantization_config` as llm-compressor writes it."""
    weights = dict(
        num_bits=bits,
        type="int",
        strategy="group" if group else "channel",
        group_size=group,
        symmetric=symmetric,
        actorder=None,
    )
    return COMPRESSED | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


# --- any box ----------------------------------------------------------------------------------------------------------


@st.composite
def packed_rows(draw: st.DrawFn) -> dict[str, Any]:
    bits, dense = draw(
        st.sampled_from(
            [
                (1, True),
                (2, True),
                (4, True),
                (4, True),
                (8, True),
                *((b, d) for b in (3, 5, 6, 7) for d in (True, False)),
            ]
        )
    )
    grouped, size = draw(st.booleans()), draw(st.integers(1, 40))
    rows, columns = draw(st.integers(1, 20)), size * draw(st.integers(1, 5)) if grouped else draw(st.integers(1, 90))
    shape = (*draw(st.sampled_from([(), (), (3,)])), rows, columns)
    return dict(
        bits=bits, dense=dense, group=size if grouped else None, shape=shape, zeros=draw(st.booleans()), index=grouped and draw(st.booleans()),
        scale=draw(st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16])), said=draw(st.sampled_from([np.int32, np.int64])),
        box=draw(boxes(shape)), seed=draw(st.integers(0, 2**32 - 1)),
    )  # fmt: skip


def told_apart(bits: int, lengths: list[int]) -> bool:
    """Whether dense and padded words are the same for codes that are so many, or take another width for some of them."""
    dense, padded = ([math.ceil(n * bits / 32) for n in lengths], [math.ceil(n / (32 // bits)) for n in lengths])
    return 32 % bits == 0 or max(lengths) <= 32 // bits or dense != padded


@settings(max_examples=250, deadline=None)
@given(case=packed_rows())
def test_pack_quantized(tmp_path_factory: pytest.TempPathFactory, case: dict[str, Any]) -> None:
    """Any number of bits, dense and padded, groups and channels, with zeros, groups out of order and stacks of
    matrices: any box is the formula's slice.
    """
    bits, shape, (*lead, rows, columns) = case["bits"], case["shape"], case["shape"]
    rng = np.random.default_rng(case["seed"])
    size = case["group"] or columns
    scales = rng.uniform(-2, 2, (*lead, rows, columns // size)).astype(case["scale"])
    codes = rng.integers(0, 1 << bits, shape)
    zeros = rng.integers(0, 1 << bits, scales.shape) if case["zeros"] else np.full(scales.shape, 1 << bits - 1)
    group = np.arange(columns) // size
    if case["index"]:
        group = rng.permutation(group)

    def stacked(codes: np.ndarray) -> np.ndarray:
        matrices = [pack(matrix, bits, case["dense"]) for matrix in codes.reshape(-1, *codes.shape[-2:])]
        return np.stack(matrices).reshape(*lead, *matrices[0].shape)

    tensors = {
        "x.weight_packed": stacked(codes),
        "x.weight_scale": scales,
        "x.weight_shape": np.array(shape, case["said"]),
    }
    if case["zeros"]:
        tensors["x.weight_zero_point"] = np.swapaxes(stacked(np.swapaxes(zeros, -1, -2)), -1, -2)
    if case["index"]:
        tensors["x.weight_g_idx"] = group.astype(np.int32)
    folder = tmp_path_factory.mktemp("packed")
    if told_apart(bits, [columns, rows] if case["zeros"] else [columns]):
        encoding = encoding_of(folder, tensors, scheme(bits, case["group"], symmetric=not case["zeros"]))
        assert_decodes(encoding, dequantise(codes, zeros, scales, group), case["box"])
    else:
        assert "several ways" in message_of(folder, tensors, scheme(bits, case["group"], symmetric=not case["zeros"]))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("zero", [None, 3])
def test_every_byte(tmp_path: Path, bits: int, zero: int | None) -> None:
    """All 256 bytes, so all codes and all neighbours in a byte, with scales from subnormal to huge, negative and 0."""
    scales = np.array([[1], [-1], [1e-45], [1e-38], [3e38], [0], [-0.0], [0.1], [2.0**-127]], np.float32)
    packed = np.broadcast_to(np.arange(256, dtype=np.uint8), (len(scales), 256)).copy().view(np.int32)
    columns = 256 * 8 // bits
    codes = np.array(
        [[byte >> bits * k & (1 << bits) - 1 for byte in range(256) for k in range(8 // bits)]] * len(scales)
    )
    zeros = np.full(scales.shape, 1 << bits - 1 if zero is None else min(zero, (1 << bits) - 1))
    tensors = {"x.weight_packed": packed, "x.weight_scale": scales, "x.weight_shape": np.array([len(scales), columns])}
    if zero is not None:
        tensors["x.weight_zero_point"] = pack(zeros.T, bits).T
    with np.errstate(over="ignore"):
        wanted = dequantise(codes, zeros, scales, np.zeros(columns, int))
    assert_decodes(encoding_of(tmp_path, tensors, scheme(bits, None, zero is None)), wanted, ((1, 5), (7, columns - 9)))


def test_a_box_reads_its_own_words_and_groups_alone(tmp_path: Path) -> None:
    """Whole words and the groups that the box touches; zeros in words of rows."""
    tensors = {
        "x.weight_packed": np.zeros((64, 64), np.int32),
        "x.weight_scale": np.ones((64, 16), BF16),
        "x.weight_shape": np.array([64, 512]),
        "x.weight_zero_point": np.zeros((8, 16), np.int32),
    }
    encoding = encoding_of(tmp_path, tensors, scheme(4, 32, symmetric=False))
    reads = {read.tensor.name.removeprefix("x.weight_"): read.box for read in encoding.reads(((3, 17), (60, 70)))}
    assert reads == {
        "packed": ((3, 17), (7, 9)),
        "scale": ((3, 17), (1, 3)),
        "zero_point": ((0, 3), (1, 3)),
        "shape": ((0, 2),),
    }
    assert encoding.label == "int4 in groups of 32 and zeros"


# --- what compressed-tensors writes -----------------------------------------------------------------------------------


def compressed(
    shape: tuple[int, ...], args: quantization.QuantizationArgs, dtype: torch.dtype, seed: int = 0
) -> tuple[dict[str, np.ndarray], torch.Tensor]:
    """The tensors that its compressor writes, and what it decompresses them to."""
    torch.manual_seed(seed)
    groups = shape[-1] // args.group_size if args.strategy == "group" else 1
    scale = (torch.rand(*shape[:-1], groups) * 0.02 + 0.001).to(dtype)
    low, high = -(1 << args.num_bits - 1), (1 << args.num_bits - 1) - 1
    state = {"weight": torch.randn(shape).to(dtype) * 0.05, "weight_scale": scale}
    if not args.symmetric:
        state["weight_zero_point"] = torch.randint(low, high + 1, scale.shape, dtype=torch.int8)
    modules = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    written = compressors.PackedQuantizationCompressor.compress(state, modules)
    values = compressors.PackedQuantizationCompressor.decompress(dict(written), modules)["weight"]
    as_numpy = lambda t: t.view(torch.int16).numpy().view(BF16) if t.dtype == torch.bfloat16 else t.numpy()  # noqa: E731
    return {f"x.{name}": as_numpy(tensor) for name, tensor in written.items()}, values


CT_CASES = [
    pytest.param((48, 160), dict(num_bits=4, strategy="group", group_size=32), id="int4, groups of 32, as Kimi-K2"),
    pytest.param(
        (48, 256), dict(num_bits=4, strategy="group", group_size=128, symmetric=False), id="int4, groups, zeros"
    ),
    pytest.param((37, 133), dict(num_bits=4, strategy="channel"), id="int4, channels, odd sizes"),
    pytest.param(
        (37, 133), dict(num_bits=4, strategy="channel", symmetric=False), id="int4, channels, zeros, odd sizes"
    ),
    pytest.param((31, 96), dict(num_bits=8, strategy="group", group_size=32), id="int8, groups"),
    pytest.param((31, 97), dict(num_bits=8, strategy="channel", symmetric=False), id="int8, channels, zeros"),
    pytest.param(
        (31, 96), dict(num_bits=2, strategy="group", group_size=16, symmetric=False), id="int2, groups, zeros"
    ),
    pytest.param(
        (31, 96),
        dict(num_bits=3, strategy="group", group_size=32, symmetric=False),
        id="int3, groups, zeros: straddling words",
    ),
    pytest.param((31, 96), dict(num_bits=6, strategy="group", group_size=32), id="int6, groups: straddling words"),
    pytest.param((4, 16, 64), dict(num_bits=4, strategy="group", group_size=32), id="int4, fused experts"),
]


@pytest.mark.parametrize(("shape", "args"), CT_CASES)
def test_equals_compressed_tensors(tmp_path: Path, shape: tuple[int, ...], args: dict[str, Any]) -> None:
    """With float32 scales the library computes in float32 too, and the bits are the same."""
    args = quantization.QuantizationArgs(type="int", **args)
    tensors, values = compressed(shape, args, torch.float32)
    config = COMPRESSED | {"config_groups": {"group_0": {"weights": args.model_dump(mode="json")}}}
    box = tuple((size // 5, size - size // 7) for size in shape)
    assert_decodes(encoding_of(tmp_path, tensors, config), values.numpy(), box)


def test_bfloat16_scales_differ_from_compressed_tensors_by_one_rounding_at_most(tmp_path: Path) -> None:
    """The library multiplies in the scale's dtype. A code of 4 bits by a bfloat16 is rounded once there and once here:
    the same bits.
    """
    args = quantization.QuantizationArgs(type="int", num_bits=4, strategy="group", group_size=32)
    tensors, values = compressed((64, 256), args, torch.bfloat16)
    config = COMPRESSED | {"config_groups": {"group_0": {"weights": args.model_dump(mode="json")}}}
    got = decode(encoding_of(tmp_path, tensors, config), None, BF16)
    np.testing.assert_array_equal(got.view(np.uint16), values.view(torch.int16).numpy().view(np.uint16))


# --- what settles the layout ------------------------------------------------------------------------------------------


def int4(rows: int = 8, columns: int = 64, group: int = 32) -> dict[str, np.ndarray]:
    """Tensors that are well."""
    return {
        "x.weight_packed": np.zeros((rows, columns // 8), np.int32),
        "x.weight_scale": np.ones((rows, columns // group), BF16),
        "x.weight_shape": np.array([rows, columns], np.int32),
    }


def test_the_scheme_that_fits_is_taken(tmp_path: Path) -> None:
    """Several groups of modules: their shapes tell which it is; where they don't, `weight_shape` does."""
    two = scheme(4, 32)["config_groups"] | {"group_1": scheme(8, 32)["config_groups"]["group_0"]}
    encoding = encoding_of(tmp_path / "shapes", int4(), COMPRESSED | {"config_groups": two})
    assert (encoding.shape, encoding.label) == ((8, 64), "int4 in groups of 32")
    # 8 words, 2 scales: 64 or 32 columns
    alike = scheme(4, 32)["config_groups"] | {"group_1": scheme(8, 16)["config_groups"]["group_0"]}
    for columns, label in ((64, "int4 in groups of 32"), (32, "int8 in groups of 16")):
        tensors = int4() | {"x.weight_shape": np.array([8, columns])}
        encoding = encoding_of(tmp_path / label, tensors, COMPRESSED | {"config_groups": alike})
        assert (encoding.shape, encoding.label) == ((8, columns), label)
    del tensors["x.weight_shape"]
    assert "several ways" in message_of(tmp_path / "neither", tensors, COMPRESSED | {"config_groups": alike})


def test_one_group_of_a_whole_row_is_a_channel(tmp_path: Path) -> None:
    both = scheme(4, 64)["config_groups"] | {"group_1": scheme(4, None)["config_groups"]["group_0"]}
    encoding = encoding_of(tmp_path, int4(group=64), COMPRESSED | {"config_groups": both})
    assert (encoding.shape, encoding.label) == ((8, 64), "int4 with a scale for each output")


@pytest.mark.parametrize("zeros", [False, True])
def test_of_two_schemes_that_differ_by_their_zeros_the_tensors_tell(tmp_path: Path, zeros: bool) -> None:
    both = scheme(4, 32)["config_groups"] | {"group_1": scheme(4, 32, symmetric=False)["config_groups"]["group_0"]}
    tensors = int4() | ({"x.weight_zero_point": np.full((1, 2), 0x11111111, np.int32)} if zeros else {})
    encoding = encoding_of(tmp_path, tensors, COMPRESSED | {"config_groups": both})
    assert set(decode(encoding).ravel()) == {-1.0 if zeros else -8.0}


def test_the_config_may_stand_in_text_config(tmp_path: Path) -> None:
    """As in Kimi-K2.5 and K2.6; and without `weight_shape`, groups settle it."""
    tensors = int4()
    del tensors["x.weight_shape"]
    assert encoding_of(tmp_path, tensors, scheme(4, 32)).shape == (8, 64)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"quantization_config": scheme(4, 32)}}))
    assert open_source(open_hf(tmp_path)).encodings["x.weight"].shape == (8, 64)


def test_a_group_index_of_minus_ones_means_none(tmp_path: Path) -> None:
    """Older writers fill `weight_g_idx` with -1 where groups lie side by side."""
    tensors = int4() | {
        "x.weight_g_idx": np.full(64, -1, np.int32),
        "x.weight_scale": np.array([[1, 2]] * 8, np.float32),
    }
    tensors["x.weight_packed"][...] = 0x11111111
    box = ((2, 5), (30, 34))
    np.testing.assert_array_equal(decode(encoding_of(tmp_path, tensors, scheme(4, 32)), box), [[-7, -7, -14, -14]] * 3)


def with_field(field: str, value: Any) -> dict[str, Any]:
    """int4 in groups of 32, with one field otherwise."""
    config = scheme(4, 32)
    config["config_groups"]["group_0"]["weights"][field] = value
    return config


FIELDS = [
    (field, value)
    for field in ("num_bits", "group_size", "symmetric")
    for value in ([], {}, "4", 4.0, 2**31, 2**64, float("nan"))
]


@pytest.mark.parametrize(("field", "value"), [*FIELDS, ("num_bits", True), ("group_size", True), ("symmetric", 1)])
def test_fields_that_make_no_sense(tmp_path: Path, field: str, value: Any) -> None:
    """Each is a problem of the plan that names the field, not a traceback, and nothing that decoding meets."""
    assert f"says {field} " in message_of(tmp_path, int4(), with_field(field, value))


def test_groups_in_any_order_are_not_cut(tmp_path: Path) -> None:
    """With an index every box needs the scales of all groups: cutting a row would read them again for each part."""
    tensors = int4() | {"x.weight_g_idx": np.arange(64, dtype=np.int32) % 2}
    assert encoding_of(tmp_path / "index", tensors, scheme(4, 32)).indivisible == {1}
    assert encoding_of(tmp_path / "none", int4(), scheme(4, 32)).indivisible == frozenset()


REFUSED: dict[str, tuple[dict[str, np.ndarray], dict[str, Any], str]] = {
    "no config": ({}, {}, "no integers in groups or channels"),
    "floats only": (
        {},
        COMPRESSED | {"config_groups": {"g": {"weights": {"type": "float", "num_bits": 4}}}},
        "no integers in groups or channels",
    ),
    "another size of groups": ({}, scheme(4, 64), "can't be read by"),
    "3 bits of a width that both layouts have": (
        {
            "x.weight_packed": np.zeros((8, 2), np.int32),
            "x.weight_scale": np.ones((8, 1), BF16),
            "x.weight_shape": np.array([8, 20]),
        },
        scheme(3, 20),
        "several ways",
    ),
    "one scale": ({"x.weight_scale": np.ones(1, BF16)}, scheme(4, 32), "one or several scales for each row"),
    "no zeros": ({}, scheme(4, 32, symmetric=False), "weight_zero_point is missing"),
    "zeros that aren't packed": (
        {"x.weight_zero_point": np.zeros((8, 2), np.int32)},
        scheme(4, 32, symmetric=False),
        "(8, 2) can't be read",
    ),
    "zeros of other groups": (
        {"x.weight_zero_point": np.zeros((1, 3), np.int32)},
        scheme(4, 32, symmetric=False),
        "as many zeros in a row",
    ),
    "an index of another length": ({"x.weight_g_idx": np.zeros(63, np.int32)}, scheme(4, 32), "63"),
    "a shape of three sizes": ({"x.weight_shape": np.array([1, 8, 64])}, scheme(4, 32), "should hold 2 sizes"),
    "float64 scales": ({"x.weight_scale": np.ones((8, 2))}, scheme(4, 32), "float64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    other, config, message = REFUSED[case]
    assert message in message_of(tmp_path, int4() | other, config)


def test_channels_need_the_shape(tmp_path: Path) -> None:
    """A row of 2 words may hold 9 to 16 codes."""
    tensors = {"x.weight_packed": np.zeros((8, 2), np.int32), "x.weight_scale": np.ones((8, 1), BF16)}
    assert "x.weight_shape, which would tell, is missing" in message_of(tmp_path / "without", tensors, scheme(4, None))
    assert encoding_of(tmp_path / "with", tensors | {"x.weight_shape": np.array([8, 13])}, scheme(4, None)).shape == (
        8,
        13,
    )


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
def test_scales_that_are_no_numbers_are_refused_when_met(tmp_path: Path, scale: float) -> None:
    tensors = int4()
    tensors["x.weight_scale"][3, 1] = scale
    encoding = encoding_of(tmp_path, tensors, scheme(4, 32))
    assert decode(encoding, ((0, 8), (0, 32))).shape == (8, 32)
    with pytest.raises(ScaleError, match=r"x\.weight_scale"):
        decode(encoding, ((3, 4), (31, 33)))


def test_contradictions_of_the_contents_are_refused_when_met(tmp_path: Path) -> None:
    said = encoding_of(tmp_path / "shape", int4() | {"x.weight_shape": np.array([8, 63])}, scheme(4, 32))
    with pytest.raises(PackedError, match=r"x\.weight_shape says \(8, 63\)"):
        decode(said)
    for index in (np.r_[np.zeros(63), 2], np.r_[np.zeros(63), -1]):
        encoding = encoding_of(
            tmp_path / f"index {index[-1]}", int4() | {"x.weight_g_idx": index.astype(np.int32)}, scheme(4, 32)
        )
        with pytest.raises(PackedError, match="names groups from"):
            decode(encoding, ((0, 1), (0, 1)))


# --- the kernel -------------------------------------------------------------------------------------------------------


def test_byte_tables() -> None:
    """Every byte by both orders of its codes."""
    meanings = np.arange(16) * 10.0
    low, high = byte_table(meanings), byte_table(meanings, high_first=True)
    assert low.dtype == np.float32
    assert all(tuple(low[byte]) == (10 * (byte & 15), 10 * (byte >> 4)) for byte in range(256))
    np.testing.assert_array_equal(high, low[:, ::-1])
    assert byte_table(np.arange(256)).shape == (256, 1)
    np.testing.assert_array_equal(byte_table(np.arange(2))[0b10010110], [0, 1, 1, 0, 1, 0, 0, 1])


@given(start=st.integers(0, 99), length=st.integers(0, 99), group=st.integers(1, 40))
def test_runs_cut_at_the_groups(start: int, length: int, group: int) -> None:
    """Every column once, with its group, in at most three runs."""
    cut = list(runs(start, start + length, group))
    assert len(cut) <= 3
    columns: list[Box] = []
    for these, groups in cut:
        count = groups.stop - groups.start
        assert (these.stop - these.start) % count == 0
        share = (these.stop - these.start) // count
        columns += [
            (column, groups.start + (column - these.start) // share) for column in range(these.start, these.stop)
        ]
    assert columns == [(column, (start + column) // group - start // group) for column in range(length)]
