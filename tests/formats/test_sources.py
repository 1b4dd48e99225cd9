"""Which tensors belong together, and everything that is refused: by headers and names, with `quantization_config` as a
check.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from encoded import only
from stored import decode, source_of
from support import LLAMA, call, random_tensors, save

from weightbeam.formats.encodings.format import QuantizedFormat
from weightbeam.formats.encodings.table import DROPPED, FORMATS, REFUSED_NAMES, known
from weightbeam.formats.release.source import ReleaseTensors, open_source
from weightbeam.formats.safetensors import open_hf

BF16, F16, F32, I64 = ml_dtypes.bfloat16, np.float16, np.float32, np.int64
U8, I8, I32 = np.uint8, np.int8, np.int32
E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
Tensors = Mapping[str, np.ndarray]


def ones(*shape: int, dtype: Any = F32) -> np.ndarray:
    return np.ones(shape, dtype)


FP8 = {"x.weight": ones(64, 32, dtype=E4M3), "x.weight_scale_inv": ones(2, 1)}
SAID = {"quant_method": "fp8", "weight_block_size": [32, 32]}


def told(source: ReleaseTensors) -> dict[str, str]:
    """The problems: message by `kind: subject`."""
    return {f"{problem.kind}: {problem.subject}": problem.message for problem in source.problems}


# --- what is found ----------------------------------------------------------------------------------------------------


def test_plain_tensors_are_themselves(tmp_path: Path) -> None:
    """Also those that have a scale's name: models have weights called so (DeepSeek-V4's hc_attn_scale, Gemma 4's
    router.scale).
    """
    tensors = {
        "x.weight": ones(4, 4, dtype=BF16),
        "layers.0.hc_attn_scale": ones(3),
        "router.scale": ones(4),
        "router.per_expert_scale": ones(8),
        "x.tid2eid": ones(4, 2, dtype=I64),
    }
    source = source_of(tmp_path, tensors)
    assert told(source) == {}
    assert set(source.encodings) == set(tensors)
    assert all(encoding.label is None for encoding in source.encodings.values())


def test_tables_of_integers_in_a_quantised_model(tmp_path: Path) -> None:
    """DeepSeek-V4's routing, GPT-2's masks and positions stay what they are."""
    tables = {
        "layers.0.ffn.gate.tid2eid": ones(16, 2, dtype=I64),
        "layers.1.ffn.gate.tid2eid": ones(16, 2, dtype=I32),
        "h.0.attn.bias": ones(1, 1, 4, 4, dtype=U8),
        "embeddings.position_ids": ones(1, 4, dtype=I64),
        "n.weight": ones(4, dtype=I32),
    }
    source = source_of(tmp_path, FP8 | tables, SAID)
    assert told(source) == {}
    assert set(source.encodings) == {"x.weight", *tables}


def test_weights_that_have_a_scales_name_in_a_quantised_model(tmp_path: Path) -> None:
    """They are weights there too."""
    source = source_of(tmp_path, FP8 | {"layers.0.hc_attn_scale": ones(3), "router.scale": ones(4)}, SAID)
    assert told(source) == {}
    assert set(source.encodings) == {"x.weight", "layers.0.hc_attn_scale", "router.scale"}


MIXED: dict[str, Tensors] = {
    "FP8": FP8,
    "NVFP4": {
        "n.weight_packed": ones(8, 16, dtype=np.uint8),
        "n.weight_scale": ones(8, 2, dtype=E4M3),
        "n.weight_global_scale": ones(1),
    },
    "MXFP4": {"m.weight_packed": ones(8, 16, dtype=np.uint8), "m.weight_scale": np.full((8, 1), 127, np.uint8)},
    "int8": {"i.weight": ones(8, 16, dtype=np.int8), "i.weight_scale": ones(8, 1, dtype=BF16)},
    "V4": {"e.weight": ones(8, 16, dtype=np.int8), "e.scale": ones(8, 1, dtype=E8M0)},
    "None": {"p.weight": ones(8, 16, dtype=BF16), "p.bias": ones(8)},
}


def test_each_weight_is_of_its_own_format(tmp_path: Path) -> None:
    """One checkpoint may mix formats; headers alone tell them apart."""
    source = source_of(tmp_path, {name: values for tensors in MIXED.values() for name, values in tensors.items()})
    assert told(source) == {}
    labels = {name: str(encoding.label).split()[0] for name, encoding in source.encodings.items()}
    assert labels == {
        "x.weight": "FP8",
        "n.weight": "NVFP4",
        "m.weight": "MXFP4",
        "i.weight": "int8",
        "e.weight": "MXFP4",
        "p.weight": "None",
        "p.bias": "None",
    }
    specs = source.specs()
    assert specs["m.weight"].shape == (8, 32)
    assert specs["m.weight"].dtype == F32
    assert specs["m.weight"].file == "model.safetensors (as m.weight_packed)"
    assert specs["p.weight"].dtype == BF16


def test_scales_may_lie_in_another_file(tmp_path: Path) -> None:
    folder = save(
        tmp_path / "hf",
        {"quantization_config": SAID},
        {"x.weight_scale_inv": FP8["x.weight_scale_inv"]},
        {"x.weight": FP8["x.weight"]},
    )
    encoding = only(open_source(open_hf(folder)))
    assert len({read.tensor.path for read in encoding.reads(((0, 1), (0, 1)))}) == 2
    assert (decode(encoding) == 1).all()


# 24 × 22 to 31: no powers of two
BLOCK = {"x.weight": ones(48, 64, dtype=E4M3), "x.weight_scale_inv": np.arange(6, dtype=F32).reshape(2, 3)}
PLACES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "at the top": lambda said: {"quantization_config": said},
    "in text_config": lambda said: {"text_config": {"quantization_config": said}},
    "as compression_config": lambda said: {"compression_config": said},
}


@pytest.mark.parametrize("place", PLACES)
def test_where_the_quantisation_is_described(tmp_path: Path, place: str) -> None:
    """Wherever it stands, what only it can tell is read."""
    folder = save(tmp_path / "hf", PLACES[place]({"quant_method": "fp8", "weight_block_size": [24, 28]}), BLOCK)
    values = decode(only(open_source(open_hf(folder))))
    np.testing.assert_array_equal(
        values, np.arange(6, dtype=F32).reshape(2, 3)[np.arange(48) // 24][:, np.arange(64) // 28]
    )


def test_modelopts_own_file(tmp_path: Path) -> None:
    """`hf_quant_config.json` beside a config that says nothing: the algorithm tells that bytes are exponents. Without
    it they are refused.
    """
    folder = save(
        tmp_path / "hf",
        {"model_type": "x"},
        {"x.weight": ones(4, 64, dtype=E4M3), "x.weight_scale": np.full((4, 2), 128, np.uint8)},
    )
    assert "uint8" in told(open_source(open_hf(folder)))["scale: x.weight"]
    said = {
        "producer": {"name": "modelopt", "version": "0.39"},
        "quantization": {"quant_algo": "MXFP8", "kv_cache_quant_algo": None},
    }
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    assert (decode(only(open_source(open_hf(folder)))) == 2).all()
    (folder / "hf_quant_config.json").write_text("{nonsense")
    assert [problem.subject for problem in open_hf(folder).problems] == ["hf_quant_config.json"]


GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "desc_act": False,
    "sym": False,
    "checkpoint_format": "gptq",
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
TWO: dict[str, tuple[dict[str, Any], str, dict[str, Any], str]] = {  # at the top, another place, its content, what is told
    "the same": (GPTQ, "quantize_config.json", GPTQ, ""),
    "without the method": (GPTQ, "quantize_config.json", {k: v for k, v in GPTQ.items() if k != "quant_method"}, ""),
    "more in one": (GPTQ, "quantize_config.json", {"bits": 4, "damp_percent": 0.1}, ""),
    "the other version": (
        GPTQ, "quantize_config.json", GPTQ | {"checkpoint_format": "gptq_v2"}, "checkpoint_format 'gptq', not 'gptq_v2'"
    ),
    "other bits and groups": (
        GPTQ, "quantize_config.json", GPTQ | {"bits": 8, "group_size": 64}, "bits 4, not 8 and group_size 32, not 64"
    ),
    "an order, which `g_idx` tells": (GPTQ, "quantize_config.json", GPTQ | {"desc_act": True}, ""),
    "a size as a text": (GPTQ, "quantize_config.json", GPTQ | {"group_size": "32"}, ""),
    "symmetric": (GPTQ, "quantize_config.json", GPTQ | {"sym": True}, "sym False, not True"),
    "AutoAWQ's names": (AWQ, "quant_config.json", {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}, ""),
    "AutoAWQ's groups": (AWQ, "quant_config.json", {"w_bit": 4, "q_group_size": 64}, "group_size 32, not 64"),
    "ModelOpt": (MODELOPT, "hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}, ""),
    "ModelOpt, another algorithm": (
        MODELOPT, "hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "quant_algo 'NVFP4', not 'FP8'"
    ),
    "another writer": (GPTQ, "text_config", {"quantization_config": AWQ}, "quant_method 'gptq', not 'awq'"),
    "of text_config, the same": (GPTQ, "text_config", {"quantization_config": GPTQ}, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", TWO)
def test_two_quantisations(tmp_path: Path, case: str) -> None:
    """Two that differ in what settles values are a problem that names both: it isn't known which is meant. Where nothing
    is quantised, they are of no account.
    """
    said, other, content, wanted = TWO[case]
    config = {"model_type": "x", "quantization_config": said}
    if not other.endswith(".json"):
        config[other] = content
    for tensors in FP8, {"x.weight": ones(4, 4)}:
        folder = save(tmp_path / tensors["x.weight"].dtype.name, config, tensors)
        if other.endswith(".json"):
            (folder / other).write_text(json.dumps(content))
        problems = told(open_source(open_hf(folder)))
        assert ("quantised: config.json" in problems) == bool(wanted and tensors is FP8)
        if "quantised: config.json" not in problems:
            continue
        message = problems["quantised: config.json"]
        assert f"quantization_config of config.json says {wanted}" in message
        assert other in message


def test_the_scales_dtype_settles_who_wrote_packed_bytes(tmp_path: Path) -> None:
    """`weight_packed` in uint8 is NVFP4 with E4M3 scales, MXFP4 with bytes: the same file otherwise."""
    packed = {"x.weight_packed": ones(4, 32, dtype=np.uint8)}
    mx = only(source_of(tmp_path / "mx", packed | {"x.weight_scale": np.full((4, 2), 127, np.uint8)}))
    nv = only(
        source_of(
            tmp_path / "nv", packed | {"x.weight_scale": ones(4, 4, dtype=E4M3), "x.weight_global_scale": ones(1)}
        )
    )
    assert (mx.label, nv.label) == ("MXFP4", "NVFP4")


# --- what is left out -------------------------------------------------------------------------------------------------

ACTIVATIONS = [
    "x.input_scale", "x.input_global_scale", "x.activation_scale", "x.experts.gate_up_proj_activation_scale", "x.qscale_act", "self_attn.k_scale",
    "self_attn.v_scale", "self_attn.q_scale", "self_attn.prob_scale", "x.input_scale_ub", "self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale",
    "self_attn.k_proj.k_scale", "x.input_zero_point", "x.experts.down_proj_input_scale",
]  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_scales_of_activations_are_dropped(tmp_path: Path, name: str) -> None:
    """By name and with a reason, but in a quantised model only."""
    source = source_of(tmp_path / "fp8", FP8 | {name: ones(1)}, SAID)
    assert told(source) == {}
    assert set(source.encodings) == {"x.weight"}
    assert source.dropped[name] in DROPPED
    plain = source_of(tmp_path / "plain", {"x.weight": ones(4, 4), name: ones(1)})
    assert set(plain.encodings) == {"x.weight", name}
    assert plain.dropped == {}


def test_the_plan_lists_what_is_dropped(tmp_path: Path) -> None:
    """A model with activation scales converts; `plan --json` says what was left out and why."""
    tensors = random_tensors(LLAMA)
    name = "model.layers.1.mlp.up_proj.weight"
    stored = tensors | {
        name: tensors[name].astype(E4M3),
        name.replace("weight", "weight_scale"): ones(),
        name.replace("weight", "input_scale"): ones(),
    }
    source = save(
        tmp_path / "hf", LLAMA | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}, stored
    )
    assert call("plan", "--source", source, "--json", tmp_path / "plan.json") == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["dropped"] == {name.replace("weight", "input_scale"): "a scale of the activations"}
    assert "FP8 with one scale" in plan["arrays"]["params.params.decoder.layers.mlp.wi_1.kernel"]["lossy"]


# --- what is refused --------------------------------------------------------------------------------------------------

INTS = {"quant_method": "compressed-tensors", "format": "int-quantized"}
INT8 = {"i.weight": ones(64, 128, dtype=I8)}
REFUSED: dict[str, tuple[Tensors, dict[str, Any], str, list[str]]] = {
    "FP8 without a scale": ({"x.weight": ones(4, 4, dtype=E4M3)}, {}, "unscaled: x.weight", ["x.weight_scale_inv"]),
    "FP8 without a scale, one axis": ({"x.weight": ones(4, dtype=E4M3)}, SAID, "unscaled: x.weight", ["x.weight_scale_inv"]),
    "FNUZ without a scale": ({"x.weight": ones(4, 4, dtype=ml_dtypes.float8_e4m3fnuz)}, {}, "unscaled: x.weight", ["fnuz"]),
    "a bias in FP8": (FP8 | {"x.bias": ones(4, dtype=E4M3)}, SAID, "unscaled: x.bias", ["float8_e4m3fn"]),
    "FP8 with one axis": ({"x.weight": ones(4, dtype=E4M3), "x.weight_scale": ones(1)}, {}, "scale: x.weight", ["no rows and columns"]),
    "a scale of integers": ({"x.weight": ones(4, 4, dtype=E4M3), "x.weight_scale": ones(1, dtype=I32)}, {}, "unscaled: x.weight", ["x.weight_scale is int32"]),
    "two kinds of scales": (FP8 | {"x.weight_scale": ones(1)}, SAID, "scale: x.weight", ["two kinds", "x.weight_scale_inv", "x.weight_scale"]),
    "two kinds of scales, int8": (MIXED["V4"] | {"e.weight_scale": ones(8, 1)}, {}, "scale: e.weight", ["two kinds", "e.scale", "e.weight_scale"]),
    "both spellings": (FP8 | {"x.weight_scales_inv": ones(2, 1)}, SAID, "scale: x.weight", ["two kinds", "x.weight_scales_inv"]),
    "a scale of nothing": ({"x.weight_scale_inv": ones(2, 1)}, {}, "orphan scale: x.weight_scale_inv", ["no weight"]),
    "an exponent of nothing": ({"x.scale": ones(2, 1, dtype=E8M0)}, {}, "orphan scale: x.scale", ["no weight"]),
    "a scale beside plain values": (
        {"x.weight": ones(4, 4, dtype=BF16), "x.weight_scale": ones(4, 1)}, {}, "orphan scale: x.weight_scale", ["x.weight", "bfloat16"]
    ),
    "a scale too many": (FP8 | {"x.weight_scale_2": ones()}, SAID, "orphan scale: x.weight_scale_2", ["no format"]),
    "a scale of wrong shape": (FP8 | {"x.weight_scale_inv": ones(2, 2)}, SAID, "scale: x.weight", ["(2, 1)", "(2, 2)", "32 × 32"]),
    "a scale for each row, transposed": ({"x.weight": ones(8, 4, dtype=E4M3), "x.weight_scale": ones(4)}, {}, "scale: x.weight", ["(4,)", "(8, 4)"]),
    "groups that the config denies": (
        {"x.weight": ones(4, 64, dtype=E4M3), "x.weight_scale": ones(4, 2)},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"group_size": 64}}}},
        "scale: x.weight", ["groups of 32", "64"],
    ),
    "bytes that nobody calls exponents": (FP8 | {"x.weight_scale_inv": ones(2, 1, dtype=U8)}, SAID, "scale: x.weight", ["uint8", "ue8m0"]),
    "exponents packed for a kernel": (FP8 | {"x.weight_scale_inv": ones(64, 1, dtype=I32)}, SAID, "unscaled: x.weight", ["int32"]),
    "packed bytes without scales": ({"x.weight_packed": ones(8, 16, dtype=U8)}, {}, "unscaled: x.weight_packed", ["x.weight_scale is missing"]),
    "NVFP4 without its second scale": (
        {"x.weight_packed": ones(8, 16, dtype=U8), "x.weight_scale": ones(8, 2, dtype=E4M3)},
        {}, "unscaled: x.weight_packed", ["x.weight_global_scale is missing"],
    ),
    "NVFP4 laid out for a kernel": (
        {"x.weight": ones(8, 16, dtype=U8), "x.weight_scale": ones(512, dtype=E4M3), "x.weight_scale_2": ones()}, {}, "scale: x.weight", ["(8, 2)", "swizzled"]
    ),
    "NVFP4 with two second scales": (
        {"x.weight": ones(8, 16, dtype=U8), "x.weight_scale": ones(8, 2, dtype=E4M3), "x.weight_scale_2": ones(2)},
        {}, "scale: x.weight", ["one number", "(2,)"],
    ),
    "NVFP4 in groups of 32": (
        {"x.weight": ones(8, 16, dtype=U8), "x.weight_scale": ones(8, 1, dtype=E4M3), "x.weight_scale_2": ones()}, {}, "scale: x.weight", ["(8, 2)", "(8, 1)"]
    ),
    "MXFP6": ({"x.weight_packed": ones(8, 24, dtype=U8), "x.weight_scale": ones(8, 1, dtype=U8)}, {}, "scale: x.weight_packed", ["groups of 32"]),
    "MXFP6, wide": ({"x.weight_packed": ones(8, 48, dtype=U8), "x.weight_scale": ones(8, 2, dtype=U8)}, {}, "scale: x.weight_packed", ["(8, 3)", "(8, 2)"]),
    "gpt-oss with three axes": ({"x_blocks": ones(8, 2, 16, dtype=U8), "x_scales": ones(8, 2, dtype=U8)}, {}, "scale: x_blocks", ["(8, 2, 16)"]),
    "blocks without scales": ({"x_blocks": ones(1, 8, 2, 16, dtype=U8)}, {}, "unscaled: x_blocks", ["x_scales is missing"]),
    "BitNet": ({"x.weight": ones(8, 16, dtype=U8), "x.weight_scale": ones(1, dtype=BF16)}, {}, "unscaled: x.weight", ["uint8", "x.weight_scale"]),
    "Humming": ({"x.weight": ones(8, 16, dtype=I32), "x.weight_scale": ones(8, 1)}, {}, "unscaled: x.weight", ["int32", "x.weight_scale"]),
    "a name twice": (MIXED["MXFP4"] | {"m.weight": ones(8, 32)}, {}, "overlap: m.weight_packed", ["m.weight"]),
    "scaled inputs": (MIXED["NVFP4"] | {"n.pre_quant_scale": ones(32)}, {}, "quantised: n.pre_quant_scale", ["pre_quant_scale", "isn't supported"]),
    "int8 whose scale is transposed": (INT8 | {"i.weight_scale": ones(1, 64)}, {}, "scale: i.weight", ["(64, 128)", "(1, 64)", "rows", "block_structure"]),
    "int8 in blocks of no size": (INT8 | {"i.weight_scale": ones(2, 3)}, INTS, "scale: i.weight", ["(2, 3)", "block_structure"]),
    "int8 with too many axes of scales": (INT8 | {"i.weight_scale": ones(64, 1, 1)}, INTS, "scale: i.weight", ["(64, 1, 1)"]),
    "int8 in blocks beside FP8 of unknown ones": (
        BLOCK | INT8 | {"i.weight_scale": ones(2, 3)}, {"quant_method": "fp8"}, "scale: i.weight", ["(2, 3)"]
    ),
    "int8 without a scale, as the config says": ({"i.weight": ones(8, 16, dtype=I8)}, INTS, "unscaled: i.weight", ["i.weight_scale is missing"]),
    "int8 without a scale, as other tensors say": (
        FP8 | {"i.weight": ones(8, 16, dtype=I8)}, {}, "unscaled: i.weight", ["i.weight_scale is missing"],
    ),
    "bitsandbytes' int8 without SCB": (
        {"i.weight": ones(8, 16, dtype=I8)}, {"quant_method": "bitsandbytes"}, "unscaled: i.weight", ["bitsandbytes int8", "i.SCB is missing"],
    ),
    "bitsandbytes' 4 bits without anything": (
        {"i.weight": ones(64, 1, dtype=U8)}, {"quant_method": "bitsandbytes"}, "unscaled: i.weight", ["i.weight.absmax is missing"],
    ),
    "NVFP4 without both scales": (
        {"i.weight": ones(8, 16, dtype=U8)}, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "unscaled: i.weight", ["NVFP4", "i.weight_scale is missing"],
    ),
    "fused NVFP4 without scales": (
        {"x.experts.down_proj": ones(2, 8, 16, dtype=U8)}, {"quant_method": "modelopt"}, "unscaled: x.experts.down_proj", ["NVFP4"],
    ),
    "integers of 64 bits": (FP8 | {"i.weight": ones(8, 16, dtype=I64)}, SAID, "unscaled: i.weight", ["int64", "no scale"]),
    "a block of no size": (FP8, SAID | {"weight_block_size": [128, 0]}, "quantised: config.json", ["weight_block_size", "[128, 0]"]),
    "blocks of no size that fits": (BLOCK, {"quant_method": "fp8"}, "quantised: config.json", ["weight_block_size"]),
    "FP8 that is called GPTQ": (FP8, {"quant_method": "gptq"}, "quantised: x.weight", ["FP8", "'gptq'"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path: Path, name: str) -> None:
    """Each by its kind and its tensor, with what was found. No encoding is made of it, and the tables aren't told that
    it is missing.
    """
    tensors, said, key, words = REFUSED[name]
    source = source_of(tmp_path, tensors, said)
    problems = told(source)
    assert key in problems
    for word in words:
        assert word in f"{key} {problems[key]}"
    if key.startswith(("unscaled", "scale")):
        logical = key.split()[1].removesuffix("_packed").removesuffix("_blocks")
        assert logical not in source.encodings or key.endswith("bias")
        assert source.lost


GRIDS = [
    (),
    (1,),
    (64,),
    (128,),
    (3,),
    (0,),
    (1, 64),
    (128, 64),
    (64, 3),
    (2, 3),
    (2, 64),
    (1, 1, 1),
    (64, 1, 128, 1),
    (5, 1, 7, 1),
]


@pytest.mark.parametrize("said", [{}, INTS, SAID, {"quant_method": "fp8", "weight_block_size": "?"}], ids=str)
@pytest.mark.parametrize(
    "entry", [entry for entry in FORMATS if len(entry.companions) < 4], ids=lambda entry: entry.name
)
def test_no_weight_vanishes(tmp_path: Path, entry: QuantizedFormat, said: dict[str, Any]) -> None:
    """Whatever shape a scale has, a weight can be read, or a problem stands against it."""
    name, stem = f"x{entry.suffix or '.weight'}", f"x{'' if entry.suffix else '.weight'}"
    needed = [companion for companion in entry.companions if companion.required]
    codes = np.zeros((64, 128), min(entry.dtypes, key=str))
    for number, grid in enumerate(GRIDS):
        scales = {stem + each.suffix: np.ones(grid, min(each.dtypes, key=str)) for each in needed}
        source = source_of(tmp_path / str(number), {name: codes, **scales}, said)
        assert source.problems or name in {encoding.weight.name for encoding in source.encodings.values()}
        assert source.problems or not source.lost


METHODS_REFUSED = [
    "torchao", "hqq", "eetq", "quanto", "aqlm", "vptq", "spqr", "higgs", "fp_quant", "bitnet", "humming", "auto-round", "quark", "something-new",
]  # fmt: skip


@pytest.mark.parametrize("method", METHODS_REFUSED)
def test_methods_that_are_refused(tmp_path: Path, method: str) -> None:
    """By the config's word, whatever the tensors look like; the message says what is supported."""
    assert method not in known().methods
    message = told(source_of(tmp_path, {"x.weight": ones(4, 4, dtype=BF16)}, {"quant_method": method}))[
        "quantised: config.json"
    ]
    assert "isn't supported" in message
    assert "compressed-tensors" in message
    assert method.replace("_", "-").split("-")[0].lower() in message.lower()


@pytest.mark.parametrize("kind", REFUSED_NAMES)
def test_names_that_are_refused(tmp_path: Path, kind: str) -> None:
    """Where the config is silent, names give a format away; a thousand such tensors are one problem."""
    tensors = {
        f"model.layers.{i}.x{ending}": ones(2, 2, dtype=BF16) for i in range(3) for ending in REFUSED_NAMES[kind]
    }
    problems = [problem for problem in source_of(tmp_path, tensors).problems if problem.kind == "quantised"]
    assert len(problems) == 1
    assert kind in problems[0].message
    assert f"{len(tensors) - 1} more" in problems[0].message


@pytest.mark.parametrize("kind", ["marlin-24", "mxfp6-pack-quantized", "sparse-24-bitmask"])
def test_formats_of_compressed_tensors_that_are_refused(tmp_path: Path, kind: str) -> None:
    """By the config's `format`, of one group too."""
    groups = {"g": {"format": kind, "weights": {"num_bits": 4}}}
    for said in (
        {"format": kind},
        {"format": "mixed-precision", "config_groups": groups},
        {"format": "dense", "sparsity_config": {"format": kind}},
    ):
        message = told(source_of(tmp_path, {"x.weight": ones(4, 4)}, said | {"quant_method": "compressed-tensors"}))[
            "quantised: config.json"
        ]
        assert kind in message


@pytest.mark.parametrize(("location", "refused"), [("input", True), ("q_attn", True), ("weight_input", False)])
def test_activations_that_are_turned(tmp_path: Path, location: str, refused: bool) -> None:
    """compressed-tensors' online rotations are refused; those that are in the weights already change nothing."""
    scheme = {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": location}]}
    said = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "transform_config": {"config_groups": {"R": scheme}},
    }
    found = told(source_of(tmp_path, {"x.weight": ones(4, 4)}, said))
    assert ("transform_config" in found.get("quantised: config.json", "")) == refused


def test_all_problems_at_once(tmp_path: Path) -> None:
    """Five faults in one checkpoint are five problems, and what is sound is decoded."""
    tensors = (
        FP8
        | MIXED["V4"]
        | {"a.weight": ones(4, 4, dtype=E4M3), "b.weight_scale": ones(4, 1), "c.weight_packed": ones(4, 4, dtype=U8)}
    )
    tensors |= {"d.weight": ones(4, 4, dtype=E4M3), "d.weight_scale": ones(3), "e.weight_scale": ones(8, 1)}
    source = source_of(tmp_path, tensors, SAID)
    assert set(told(source)) == {
        "unscaled: a.weight",
        "orphan scale: b.weight_scale",
        "unscaled: c.weight_packed",
        "scale: d.weight",
        "scale: e.weight",
    }
    assert set(source.encodings) == {"x.weight"}
    assert source.lost >= {"a.weight", "c.weight", "d.weight", "e.weight"}
    assert "x.weight" not in source.lost


@pytest.mark.parametrize(
    "said",
    [
        3,
        "fp8",
        [],
        {"quant_method": 5},
        {"quant_method": "fp8", "config_groups": 3},
        {"config_groups": {"a": None, "b": {"weights": 3}}},
        {"format": {}},
    ],
)
def test_a_config_that_makes_no_sense(tmp_path: Path, said: Any) -> None:
    """It raises nothing; at most it is a problem."""
    source = source_of(tmp_path, FP8 | MIXED["NVFP4"], said)
    assert source.encodings or source.problems
    assert all(problem.message for problem in source.problems)


def test_a_thousand_weights_of_unknown_blocks_are_one_problem(tmp_path: Path) -> None:
    tensors = {f"{i}.{key}": values for i in range(50) for key, values in BLOCK.items()}
    source = source_of(tmp_path, tensors, {"quant_method": "fp8"})
    assert len(source.problems) == 1
    assert len(source.lost) == 50


def test_a_problem_of_a_weight_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan doesn't also call the weight missing; nor, where a format as a whole is refused, all of its arrays."""
    tensors = random_tensors(LLAMA)
    name = "model.layers.1.mlp.up_proj.weight"
    packed = {key: values for key, values in tensors.items() if key != name} | {f"{name}_packed": ones(4, 4, dtype=U8)}
    assert call("plan", "--source", save(tmp_path / "one", LLAMA, packed)) == 2
    assert "1 problem" in "".join(capsys.readouterr())
    stored = {key.replace(".weight", ".W_q"): values for key, values in tensors.items()}
    assert (
        call(
            "plan", "--source", save(tmp_path / "hqq", LLAMA | {"quantization_config": {"quant_method": "hqq"}}, stored)
        )
        == 2
    )
    assert "2 problems" in "".join(capsys.readouterr())


# --- the table of formats ---------------------------------------------------------------------------------------------


def test_entries_are_named_and_told_apart() -> None:
    """Every entry has its own name, requires something, and no two have the same codes with the same required
    companions.
    """
    assert len({entry.name for entry in FORMATS}) == len(FORMATS)
    seen: dict[tuple, str] = {}
    for entry in FORMATS:
        required = [companion for companion in entry.companions if companion.required]
        assert required
        for dtype in entry.dtypes:
            assert entry in known().by_dtype[dtype]
            for dtypes in required[0].dtypes:
                key = (dtype, entry.suffix, dtypes, *(companion.suffix for companion in required))
                assert key not in seen, (entry.name, seen.get(key))
                seen[key] = entry.name
