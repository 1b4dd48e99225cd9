"""GPTQ and AWQ, against formulas in plain Python, for boxes that cut words and groups anywhere; how they are told
apart; what is refused.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored import AWQ_COLUMNS, assert_decodes, boxes, decode, encoding_of, message_of, pack, pack_awq, source_of

from weightbeam.formats.encodings import gptq as kernels
from weightbeam.formats.encodings.nibbles import STRIP_ELEMENTS, ScaleError
from weightbeam.formats.encodings.packed import PackedError
from weightbeam.formats.release.source import open_source
from weightbeam.formats.safetensors import open_hf

STRIPS = (STRIP_ELEMENTS, 64)  # elements that are decoded at a time; small models have one strip


def pack_down(codes: np.ndarray, bits: int) -> np.ndarray:
    """Words along the first axis."""
    return np.ascontiguousarray(pack(codes.T, bits).T)


def dequantise(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group: np.ndarray) -> np.ndarray:
    """(code - zero) · scale with the group of each input, rounded to float32 once; (O, I), from what is stored as (I,
    O).
    """
    return np.ascontiguousarray(
        ((codes.astype(np.int64) - zeros[group]).astype(np.float32) * scales.astype(np.float32)[group]).T
    )


def gptq(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False} | fields


def awq(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"} | fields


# --- any box ----------------------------------------------------------------------------------------------------------


@st.composite
def gptq_cases(draw: st.DrawFn) -> dict[str, Any]:
    bits = draw(st.sampled_from([1, 2, 3, 4, 4, 8]))
    inputs, outputs = 32 // math.gcd(32, bits) * draw(st.integers(1, 12 * math.gcd(32, bits))), draw(st.integers(1, 40))
    return dict(
        bits=bits, inputs=inputs, outputs=outputs, group=draw(st.sampled_from([-1, 1, 5, 8, 32, 64])), version=draw(st.sampled_from(["gptq", "gptq_v2", None])),
        index=draw(st.sampled_from(["none", "plain", "shuffled"])), symmetric=draw(st.booleans()), dtype=draw(st.sampled_from([np.float16, np.float32])),
        box=draw(boxes((outputs, inputs))), seed=draw(st.integers(0, 2**32 - 1)),
    )  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(case=gptq_cases(), strip=st.sampled_from(STRIPS))
def test_gptq(tmp_path_factory: pytest.TempPathFactory, case: dict[str, Any], strip: int) -> None:
    """Both versions, 1 to 8 bits, groups and one group, with and without `desc_act`, symmetric and not: any box is the
    formula's slice, in however many strips it is decoded.
    """
    rng = np.random.default_rng(case["seed"])
    bits, inputs, outputs = case["bits"], case["inputs"], case["outputs"]
    size = case["group"] if case["group"] > 0 else inputs
    groups = -(-inputs // size)
    first = case["version"] != "gptq_v2"
    codes = rng.integers(0, 1 << bits, (inputs, outputs))
    zeros = rng.integers(1 if first else 0, 1 << bits, (groups, outputs))
    if case["symmetric"]:
        zeros[...] = 1 << bits - 1
    scales = rng.uniform(-2, 2, zeros.shape).astype(case["dtype"])
    group = np.arange(inputs) // size
    if case["index"] == "shuffled":
        group = rng.permutation(group)
    tensors = {"x.qweight": pack_down(codes, bits), "x.qzeros": pack(zeros - first, bits), "x.scales": scales}
    if case["index"] != "none":
        tensors["x.g_idx"] = group.astype(np.int32)
    config = gptq(bits=bits, group_size=case["group"], desc_act=case["index"] == "shuffled", sym=case["symmetric"])
    if case["version"]:
        config["checkpoint_format"] = case["version"]
    folder = tmp_path_factory.mktemp("gptq")
    if groups > 1 and inputs % size and case["index"] == "none":  # another size would make as many groups
        assert f"group_size {size}" in message_of(folder, tensors, config)
        return
    encoding = encoding_of(folder, tensors, config)
    assert encoding.order == (1, 0)
    with mock.patch.object(kernels, "STRIP_ELEMENTS", strip):
        assert_decodes(encoding, dequantise(codes, zeros, scales, group), case["box"])


@st.composite
def awq_cases(draw: st.DrawFn) -> dict[str, Any]:
    inputs, outputs = draw(st.integers(1, 70)), 8 * draw(st.integers(1, 8))
    return dict(
        inputs=inputs,
        outputs=outputs,
        group=draw(st.sampled_from([-1, 1, 5, 16, 64])),
        box=draw(boxes((outputs, inputs))),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@settings(max_examples=150, deadline=None)
@given(case=awq_cases(), dtype=st.sampled_from([np.float16, ml_dtypes.bfloat16]), strip=st.sampled_from(STRIPS))
def test_awq(tmp_path_factory: pytest.TempPathFactory, case: dict[str, Any], dtype: Any, strip: int) -> None:
    """Any box is the formula's slice, in however many strips."""
    rng = np.random.default_rng(case["seed"])
    inputs, outputs = case["inputs"], case["outputs"]
    size = case["group"] if case["group"] > 0 else inputs
    codes, zeros = rng.integers(0, 16, (inputs, outputs)), rng.integers(0, 16, (-(-inputs // size), outputs))
    scales = rng.uniform(-2, 2, zeros.shape).astype(dtype)
    tensors = {"x.qweight": pack_awq(codes), "x.qzeros": pack_awq(zeros), "x.scales": scales}
    folder, config = tmp_path_factory.mktemp("awq"), awq(group_size=case["group"])
    if len(scales) > 1 and inputs % size:  # another size would make as many groups
        assert f"group_size {size}" in message_of(folder, tensors, config)
        return
    encoding = encoding_of(folder, tensors, config)
    assert encoding.order == (1, 0)
    with mock.patch.object(kernels, "STRIP_ELEMENTS", strip):
        assert_decodes(encoding, dequantise(codes, zeros, scales, np.arange(inputs) // size), case["box"])


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_every_byte(tmp_path: Path, method: str) -> None:
    """All 256 bytes in each of a word's four places, with scales of all sizes."""
    scales = np.array([1, -1, 6e-8, 65504, 0, -0.0, 0.1, 3e-5], np.float16)
    words = (np.arange(256, dtype=np.uint32)[:, None] << np.uint32([0, 8, 16, 24])).reshape(-1)
    nibbles = words[:, None] >> np.uint32(4 * np.arange(8)) & 15
    if method == "gptq":  # 1024 words below each other, in 8 outputs
        codes = np.repeat(nibbles.reshape(-1, 1), 8, 1)
        tensors = {"x.qweight": np.repeat(words[:, None], 8, 1).view(np.int32), "x.qzeros": pack(np.full((1, 8), 6), 4)}
        config = gptq(group_size=-1)
    else:
        codes = nibbles[:, np.argsort(AWQ_COLUMNS)]
        tensors = {"x.qweight": words[:, None].view(np.int32), "x.qzeros": pack_awq(np.full((1, 8), 7))}
        config = awq(group_size=-1)
    wanted = dequantise(codes, np.full((1, 8), 7), scales[None], np.zeros(len(codes), int))
    assert_decodes(
        encoding_of(tmp_path, tensors | {"x.scales": scales[None]}, config), wanted, ((3, 6), (5, len(codes) - 3))
    )


def test_boxes_read_their_own_words_and_groups_alone(tmp_path: Path) -> None:
    box = ((9, 17), (60, 70))  # outputs, inputs
    encoding = encoding_of(tmp_path / "gptq", gptq_tensors(128, 64, index=True), gptq())
    reads = {read.tensor.name: read.box for read in encoding.reads(box)}
    assert reads == {
        "x.qweight": ((7, 9), (9, 17)),
        "x.scales": ((1, 3), (9, 17)),
        "x.qzeros": ((1, 3), (1, 3)),
        "x.g_idx": ((60, 70),),
    }
    encoding = encoding_of(tmp_path / "awq", awq_tensors(128, 64), awq())
    reads = {read.tensor.name: read.box for read in encoding.reads(box)}
    assert reads == {"x.qweight": ((60, 70), (1, 3)), "x.scales": ((1, 3), (9, 17)), "x.qzeros": ((1, 3), (1, 3))}


# --- zeros ------------------------------------------------------------------------------------------------------------


def gptq_tensors(inputs: int = 64, outputs: int = 16, zero: int = 7, index: bool = False) -> dict[str, np.ndarray]:
    """Tensors of 4 bits in groups of 32 that are well."""
    made = {
        "x.qweight": np.zeros((inputs // 8, outputs), np.int32),
        "x.qzeros": pack(np.full((inputs // 32, outputs), zero), 4),
        "x.scales": np.ones((inputs // 32, outputs), np.float16),
    }
    return made | ({"x.g_idx": np.arange(inputs, dtype=np.int32) // 32} if index else {})


def awq_tensors(inputs: int = 64, outputs: int = 16) -> dict[str, np.ndarray]:
    return {
        "x.qweight": np.zeros((inputs, outputs // 8), np.int32),
        "x.qzeros": np.zeros((inputs // 32, outputs // 8), np.int32),
        "x.scales": np.ones((inputs // 32, outputs), np.float16),
    }


def test_symmetric_zeros_of_the_second_version_under_the_name_of_the_first(tmp_path: Path) -> None:
    """As in releases made by GPTQModel 5 (vllm-project/vllm#38966): stored as 8, and `checkpoint_format` says gptq.
    They mean 8, not 9.
    """
    for stored in (7, 8):
        encoding = encoding_of(
            tmp_path / str(stored), gptq_tensors(zero=stored), gptq(sym=True, checkpoint_format="gptq")
        )
        assert (decode(encoding) == -8).all()
    mixed = gptq_tensors() | {"x.qzeros": pack(np.full((2, 16), 8) - (np.arange(16) % 2), 4)}
    for name, tensors in {"6": gptq_tensors(zero=6), "mixed": mixed}.items():
        with pytest.raises(PackedError, match=r"x\.qzeros has other zeros than 7 or 8 alone"):
            decode(encoding_of(tmp_path / name, tensors, gptq(sym=True)))


@pytest.mark.parametrize(
    ("packing", "tensors", "said"),
    [
        ("auto_round:auto_gptq", gptq_tensors(zero=4), gptq()),
        ("auto_round:gptqmodel", gptq_tensors(zero=4), gptq(checkpoint_format="gptq_v2")),
        ("auto_round:auto_awq", awq_tensors(), awq()),
    ],
)
def test_autoround_packs_as_others_do(
    packing: str, tensors: dict[str, np.ndarray], said: dict[str, Any], tmp_path: Path
) -> None:
    """It says so in `packing_format`; of its own packing nothing is known."""
    fields = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "data_type": "int"}
    made = encoding_of(tmp_path / "made", tensors, fields | {"packing_format": packing})
    np.testing.assert_array_equal(decode(made), decode(encoding_of(tmp_path / "wanted", tensors, said)))
    for other in ({"packing_format": "auto_round"}, {"packing_format": packing, "data_type": "fp"}):
        (problem, *_) = source_of(tmp_path / str(len(other)), tensors, fields | other).problems
        assert "AutoRound's own packing" in problem.message


def test_a_zero_that_readers_disagree_about_is_refused_when_met(tmp_path: Path) -> None:
    """15 + 1 is 16 to some, and wraps to 0 for others. In the second version it is 15."""
    with pytest.raises(PackedError, match=r"stored zero of 15"):
        decode(encoding_of(tmp_path / "1", gptq_tensors(zero=15), gptq()))
    assert (decode(encoding_of(tmp_path / "2", gptq_tensors(zero=15), gptq(checkpoint_format="gptq_v2"))) == -15).all()


# --- biases of zeros --------------------------------------------------------------------------------------------------


def test_biases_of_zeros_are_dropped_where_nobody_uses_them(tmp_path: Path) -> None:
    """AutoGPTQ stores them for every layer (AutoGPTQ/AutoGPTQ#555). The tables may use them; else zeros are dropped,
    and others are a problem.
    """
    biases = {"x.bias": np.zeros(16, np.float16), "y.bias": np.r_[np.zeros(15), -6e-8].astype(np.float16)}
    y = {name.replace("x.", "y."): values for name, values in gptq_tensors().items()}
    source = source_of(tmp_path / "gptq", gptq_tensors() | y | biases | {"z.bias": np.zeros(4, np.float16)}, gptq())
    assert source.problems == ()
    assert biases.keys() < source.encodings.keys()
    assert source.drop_zero_biases([]) == ({}, [])
    dropped, problems = source.drop_zero_biases(["x.bias", "y.bias", "z.bias", "x.weight"])
    assert dropped == {"x.bias": "zeros that AutoGPTQ stores for layers without a bias"}
    assert [(problem.kind, problem.subject) for problem in problems] == [("unused", "y.bias")]
    assert "isn't zeros that AutoGPTQ stores" in problems[0].message
    plain = {
        name.replace("bias", "weight"): np.zeros((16, 4), np.float16) for name in biases
    } | biases  # as dequantised
    plain_source = source_of(tmp_path / "plain", plain, {})
    assert plain_source.drop_zero_biases([*biases]) == (dropped, [])
    assert dataclasses.replace(plain_source, biases=("attention_bias",)).drop_zero_biases([*biases]) == (
        {},
        [],
    )  # they are meant


# --- where it is described --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "tensors", "fields"),
    [
        (
            "quantize_config.json",
            gptq_tensors(),
            dict(bits=4, group_size=32, damp_percent=0.1, desc_act=False, sym=True, model_name_or_path=None),
        ),
        ("quant_config.json", awq_tensors(), dict(zero_point=True, q_group_size=32, w_bit=4, version="GEMM")),
        ("quantize_config.json", awq_tensors(), dict(zero_point=True, q_group_size=32, w_bit=4, version="GEMM")),
    ],
    ids=["AutoGPTQ", "AutoAWQ", "AutoAWQ, in AutoGPTQ's file"],
)
def test_files_of_their_own(tmp_path: Path, file: str, tensors: dict[str, np.ndarray], fields: dict[str, Any]) -> None:
    """Older releases say nothing in config.json. What is wrong is said of that file."""
    assert "says None" in message_of(tmp_path, tensors, {})
    (tmp_path / file).write_text(json.dumps(fields))
    source = open_source(open_hf(tmp_path))
    assert source.problems == ()
    assert str(source.encodings["x.weight"].label).startswith("AWQ" if "w_bit" in fields else "GPTQ")
    (tmp_path / file).write_text("{nonsense")
    assert [problem.subject for problem in open_hf(tmp_path).problems] == [file]


@pytest.mark.parametrize(
    ("tensors", "fields", "words"),
    [
        (gptq_tensors(), dict(checkpoint_format="gptq", format="gptq_v2"), "checkpoint_format 'gptq' and format 'gptq_v2'"),
        (
            gptq_tensors(),
            dict(checkpoint_format="gptq", quant_method="auto-round", packing_format="auto_round:gptqmodel"),
            "checkpoint_format 'gptq' and packing_format 'auto_round:gptqmodel'",
        ),
        (awq_tensors(), awq(q_group_size=64), "group_size 32 and q_group_size 64"),
        (gptq_tensors(), dict(checkpoint_format="gptq_v2", format="GPTQ_V2", w_bit=4), ""),
    ],
)  # fmt: skip
def test_one_place_that_says_two_things(
    tmp_path: Path, tensors: dict[str, np.ndarray], fields: dict[str, Any], words: str
) -> None:
    """Either may be meant, and the values would be others."""
    problems = source_of(tmp_path, tensors, gptq() | fields).problems
    wanted = [f"quantization_config of config.json says {words}; remove the wrong one"] if words else []
    assert [problem.message for problem in problems] == wanted


def test_groups_in_any_order_are_not_cut(tmp_path: Path) -> None:
    """With `desc_act` any inputs need the scales of all groups; the axis of the values that holds them isn't cut."""
    assert encoding_of(tmp_path / "any", gptq_tensors(index=True), gptq(desc_act=True)).indivisible == {1}
    assert encoding_of(tmp_path / "order", gptq_tensors(index=True), gptq()).indivisible == frozenset()


# --- what is refused --------------------------------------------------------------------------------------------------


def test_an_index_must_agree(tmp_path: Path) -> None:
    """Without `desc_act` it must put groups in order; with it, it must name groups that there are."""
    tensors = gptq_tensors(index=True)
    tensors["x.g_idx"] = tensors["x.g_idx"][::-1].copy()
    with pytest.raises(PackedError, match=r"x\.g_idx doesn't put the inputs into groups of 32"):
        decode(encoding_of(tmp_path / "order", tensors, gptq()))
    for wrong in (-1, 2):
        tensors["x.g_idx"] = np.full(64, wrong, np.int32)
        with pytest.raises(PackedError, match="there are 2"):
            decode(encoding_of(tmp_path / str(wrong), tensors, gptq(desc_act=True)))


@pytest.mark.parametrize(("tensors", "config"), [(gptq_tensors(), gptq()), (awq_tensors(), awq())], ids=["gptq", "awq"])
def test_scales_that_are_no_numbers_are_refused_when_met(
    tmp_path: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]
) -> None:
    tensors["x.scales"][1, 3] = np.inf
    encoding = encoding_of(tmp_path, tensors, config)
    assert decode(encoding, ((0, 16), (0, 32))).shape == (16, 32)
    with pytest.raises(ScaleError, match=r"x\.scales"):
        decode(encoding, ((3, 4), (31, 33)))


REFUSED: dict[str, tuple[dict[str, np.ndarray], dict[str, Any], str]] = {
    "AWQ that says it is GPTQ": (awq_tensors(), gptq(), "has the shape of awq"),
    "GPTQ that says it is AWQ": (gptq_tensors(), awq(), "has the shape of gptq"),
    "nothing said": (gptq_tensors(), {}, "says None"),
    "neither's shape": (gptq_tensors() | {"x.qweight": np.zeros((8, 4), np.int32)}, gptq(), "neither the shape"),
    "GPTQ for Marlin": (gptq_tensors(), gptq(checkpoint_format="marlin"), "'marlin'"),
    "GPTQ in planes": (gptq_tensors(), gptq(checkpoint_format="gptq_p"), "'gptq_p'"),
    "GPTQ in groups of no axis": (
        gptq_tensors() | {"x.scales": np.ones((1, 16), np.float16), "x.qzeros": np.zeros((1, 2), np.int32)},
        gptq(group_size=2**63),
        "group_size 9223372036854775808",
    ),
    "AWQ in groups of no axis": (
        awq_tensors() | {"x.scales": np.ones((1, 16), np.float16), "x.qzeros": np.zeros((1, 2), np.int32)},
        awq(group_size=2**31),
        "group_size 2147483648",
    ),
    "GPTQ with 5 bits": (gptq_tensors(), gptq(bits=5), "codes of 5 bits"),
    "GPTQ with other bits than said": (gptq_tensors(), gptq(bits=8), "8-bit zeros"),
    "GPTQ with other groups than said": (gptq_tensors(), gptq(group_size=128), "group_size 128"),
    "GPTQ in an order that isn't told": (gptq_tensors(), gptq(desc_act=True), "x.g_idx is missing"),
    "GPTQ with a short index": (gptq_tensors() | {"x.g_idx": np.zeros(63, np.int32)}, gptq(), "should be (64,)"),
    "AWQ for gemv": (awq_tensors(), awq(version="gemv"), "'gemv'"),
    "AWQ for gemv_fast": (awq_tensors(), awq(version="gemv_fast"), "'gemv_fast'"),
    "AWQ for Marlin": (awq_tensors(), awq(version="marlin"), "'marlin'"),
    "AWQ with 8 bits": (awq_tensors(), awq(bits=8), "codes of 8 bits"),
    "AWQ with an index": (awq_tensors() | {"x.g_idx": np.zeros(64, np.int32)}, awq(), "AWQ has no x.g_idx"),
    "no scales": (
        {name: values for name, values in gptq_tensors().items() if name != "x.scales"},
        gptq(),
        "x.scales is missing",
    ),
    "words of 16 bits": (gptq_tensors() | {"x.qweight": np.zeros((16, 16), np.int16)}, gptq(), "x.qzeros"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    tensors, config, message = REFUSED[case]
    assert message in message_of(tmp_path, tensors, config)


def test_modules_may_have_bits_and_groups_of_their_own(tmp_path: Path) -> None:
    """GPTQModel's `dynamic`: bits by the zeros' width; groups by the scales, which `g_idx` must confirm."""
    rng = np.random.default_rng(0)
    codes, zeros, group = rng.integers(0, 256, (64, 8)), rng.integers(0, 256, (4, 8)), np.arange(64) // 16
    scales = rng.uniform(-2, 2, zeros.shape).astype(np.float16)
    tensors = {
        "x.qweight": pack_down(codes, 8),
        "x.qzeros": pack(zeros, 8),
        "x.scales": scales,
        "x.g_idx": group.astype(np.int32),
    }
    config = gptq(group_size=128, checkpoint_format="gptq_v2", dynamic={".*x": {"bits": 8, "group_size": 16}})
    assert_decodes(
        encoding_of(tmp_path / "index", tensors, config), dequantise(codes, zeros, scales, group), ((1, 7), (15, 50))
    )
    # an order of its own
    group = rng.permutation(group)
    rule = {"bits": 8, "group_size": 16, "desc_act": True}
    own = gptq(group_size=128, checkpoint_format="gptq_v2", dynamic={"+:.*x": rule})
    assert_decodes(
        encoding_of(tmp_path / "order", tensors | {"x.g_idx": group.astype(np.int32)}, own),
        dequantise(codes, zeros, scales, group),
        ((1, 7), (15, 50)),
    )
    del tensors["x.g_idx"]
    assert "group_size 128" in message_of(tmp_path / "without", tensors, config)


def test_zeros_that_a_rule_gives_other_modules_change_none(tmp_path: Path) -> None:
    """A symmetric module's zeros are the middle, whatever `dynamic` says of others."""
    tensors = gptq_tensors() | {"x.qzeros": pack(np.full((2, 16), 8), 4)}
    alone = encoding_of(tmp_path / "alone", tensors, gptq(sym=True))
    beside = encoding_of(tmp_path / "beside", tensors, gptq(sym=True, dynamic={"other": {"bits": 4, "sym": False}}))
    np.testing.assert_array_equal(decode(beside), decode(alone))


@pytest.mark.parametrize("rules", ["dynamic", "extra_config"])
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_a_rule_may_make_some_modules_asymmetric(tmp_path: Path, rules: str, is_symmetric: bool, version: str) -> None:
    """Whichever the others are: any box is what the zeros say, those that are the middle or one less, too."""
    rng = np.random.default_rng(0)
    codes, zeros = rng.integers(0, 4, (64, 16)), rng.integers(1, 3, (2, 16))
    scales = rng.uniform(-2, 2, zeros.shape).astype(np.float16)
    stored = zeros - (version == "gptq")
    tensors = {"x.qweight": pack_down(codes, 2), "x.qzeros": pack(stored, 2), "x.scales": scales}
    rule = {rules: {"+:.*x": {"sym": not is_symmetric}}}
    config = gptq(bits=2, sym=is_symmetric, checkpoint_format=version) | rule
    wanted = dequantise(codes, zeros, scales, np.arange(64) // 32)
    assert_decodes(encoding_of(tmp_path, tensors, config), wanted, ((3, 4), (5, 40)))


def test_a_box_has_the_same_reads_beside_a_rule(tmp_path: Path) -> None:
    """All zeros of the tensor come behind them: `cut` keeps what holds a box by the others."""
    config = gptq(sym=True)
    plain = encoding_of(tmp_path / "plain", gptq_tensors(), config)
    ruled = encoding_of(tmp_path / "ruled", gptq_tensors(), config | {"dynamic": {"x": {"sym": False}}})
    said = [
        [(read.tensor.name, read.box) for read in encoding.reads(((0, 8), (32, 64)))] for encoding in (plain, ruled)
    ]
    assert said[1] == [*said[0], ("x.qzeros", ((0, 2), (0, 2)))]
