"""Packed 4-bit releases, end to end: a conversion equals, bit for bit, that of the same model dequantised to float32
before.

Kimi-K2.5 and K2.6 (compressed-tensors, experts only, behind `language_model.`), GPTQ, AWQ, and bitsandbytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pairs import each
from quantised import GROUP, Quantised, Tensors, awq, compressed, gptq, nf4
from stored import COMPRESSED
from support import (
    BF16,
    DEEPSEEK,
    F32,
    LLAMA,
    assert_same_bits,
    call,
    converted,
    random_tensors,
    read_tensors,
    save,
    split,
)

from weightbeam.formats.orbax import find_items, read_arrays

KIMI = DEEPSEEK | dict(hidden_size=96, moe_intermediate_size=64, n_routed_experts=4)
LLAMA_64 = LLAMA | dict(hidden_size=64, intermediate_size=96, head_dim=16)
QWEN3 = LLAMA_64 | dict(model_type="qwen3")


def quantise(
    tensors: Mapping[str, np.ndarray], quantiser: Callable[[str, tuple[int, ...], int], Quantised], chosen: str
) -> tuple[Tensors, Tensors]:
    """A model with the weights whose names hold `chosen` quantised, and the same dequantised."""
    stored, decoded = {}, {}
    for seed, (name, values) in enumerate(tensors.items()):
        made = (
            quantiser(name, values.shape, seed)
            if chosen in name and name.endswith("_proj.weight")
            else ({name: values}, values)
        )
        stored |= made[0]
        decoded[name] = made[1]
    assert sum(values.dtype == np.float32 for values in decoded.values()) >= 10
    return stored, decoded


def kimi() -> tuple[dict[str, Any], Tensors, Tensors]:
    """A K2.6: config, tensors, and the tensors dequantised; the tower is there, and left out."""
    weights = dict(num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=True, actorder=None)
    said = COMPRESSED | {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*"],
    }
    config = {
        "model_type": "kimi_k25",
        "text_config": KIMI | {"quantization_config": said},
        "vision_config": {},
        "tie_word_embeddings": False,
    }
    both = quantise(random_tensors(KIMI), compressed, ".mlp.experts.")
    tower = {
        "vision_tower.patch_embed.proj.weight": np.ones((4, 4), BF16),
        "mm_projector.proj.0.weight": np.ones((4, 4), BF16),
    }
    stored, decoded = (
        {f"language_model.{name}": values for name, values in tensors.items()} | tower for tensors in both
    )
    return config, stored, decoded


CASES: dict[str, Callable[[], tuple[dict[str, Any], Tensors, Tensors]]] = {
    "Kimi-K2.6": kimi,
    "GPTQ": lambda: (
        LLAMA_64
        | {"quantization_config": dict(quant_method="gptq", bits=4, group_size=GROUP, desc_act=True, sym=False)},
        *quantise(random_tensors(LLAMA_64), gptq, ""),
    ),
    "AWQ": lambda: (
        QWEN3
        | {"quantization_config": dict(quant_method="awq", bits=4, group_size=GROUP, zero_point=True, version="gemm")},
        *quantise(random_tensors(QWEN3), awq, ""),
    ),
    "nf4": lambda: (
        LLAMA_64 | {"quantization_config": dict(quant_method="bitsandbytes", load_in_4bit=True)},
        *quantise(random_tensors(LLAMA_64), nf4, ""),
    ),
}


def unquantised(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without a word about the quantisation."""
    return {
        key: unquantised(value) if key == "text_config" else value
        for key, value in config.items()
        if key != "quantization_config"
    }


def test_shards_whose_rows_a_unit_has_no_room_for(tmp_path: Path) -> None:
    """AWQ's tensors are written in shards as wide as their columns; an export takes parts of the small chunks in them."""
    wide = QWEN3 | dict(
        hidden_size=256, intermediate_size=896, num_attention_heads=4, num_key_value_heads=2, head_dim=64
    )
    stored, decoded = quantise(random_tensors(wide), awq, "")
    said = dict(quant_method="awq", bits=4, group_size=GROUP, zero_point=True, version="gemm")
    source, units = save(tmp_path / "hf", wide | {"quantization_config": said}, stored), ("--unit_bytes", "65536")
    assert call("convert", source, tmp_path / "out", *units) == 0
    arrays = read_arrays(find_items(tmp_path / "out"))
    kernel = next(array.spec for array in arrays if array.spec.key.endswith("mlp.wi_0.kernel"))
    assert kernel.chunk != kernel.shard
    assert call("export", tmp_path / "out", tmp_path / "back", *units) == 0
    assert_same_bits(read_tensors(tmp_path / "back"), {name: values.astype(BF16) for name, values in decoded.items()})


@pytest.mark.parametrize(
    ("case", "options"),
    each(list(CASES), ["--mesh fsdp=8,tensor=2 --unit_bytes 60000", "--save_dtype float32 --scan_layers false"]),
)
def test_equals_the_dequantised_model(tmp_path: Path, case: str, options: str) -> None:
    """Each format once; that units, meshes and layouts don't matter stands in `tests/commands/test_pairwise.py`. For
    Llama the query is scaled and its halves are paired, in float32 until the one cast.
    """
    config, stored, decoded = CASES[case]()
    if config["model_type"] == "llama":
        options += " --maxtext_model llama3.1-8b"
    got = converted(save(tmp_path / "hf", config, *split(stored, 3)), tmp_path / "out", *options.split())
    wanted = converted(save(tmp_path / "float", unquantised(config), decoded), tmp_path / "wanted", *options.split())
    assert_same_bits(got, wanted)
    dtype = F32 if "float32" in options else BF16
    assert {values.dtype for values in got.values()} == {dtype}


def test_the_plan_tells_the_formats(tmp_path: Path) -> None:
    """`lossy` names the encoding where it is quantised."""
    config, stored, _ = kimi()
    source = save(tmp_path / "hf", config, stored)
    assert call("plan", "--source", source, "--json", tmp_path / "plan.json") == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    lossy = {key.rpartition("decoder.")[2]: array["lossy"] for key, array in plan["arrays"].items() if array["lossy"]}
    experts = [f"moe_layers.DeepSeekMoeBlock_0.MoeBlock_0.{name}" for name in ("wi_0", "wi_1", "wo")]
    assert lossy == dict.fromkeys(experts, "int4 in groups of 32, rounded once to bfloat16")


def test_biases_of_zeros_of_layers_without_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """AutoGPTQ's, beside every weight: left out and listed; one that isn't zeros is refused by its name. qwen2's own
    are converted.
    """
    config, stored, _ = CASES["GPTQ"]()
    biases = {
        name.replace("qweight", "bias"): np.zeros(values.shape[1], np.float16)
        for name, values in stored.items()
        if name.endswith(".qweight")
    }
    source = save(tmp_path / "zeros", config, stored | biases)
    assert call("plan", "--source", source, "--maxtext_model", "llama2-7b", "--json", tmp_path / "plan.json") == 0
    assert json.loads((tmp_path / "plan.json").read_text())["dropped"] == dict.fromkeys(
        biases, "zeros that AutoGPTQ stores for layers without a bias"
    )
    assert call("convert", source, tmp_path / "made", "--maxtext_model", "llama2-7b") == 0
    for like in ([], ["--like", source]):
        assert call("export", tmp_path / "made", tmp_path / "back", "--overwrite", *like) == 0
        assert not any(name.endswith(".bias") for name in read_tensors(tmp_path / "back"))
    assert call("dequantize", source, tmp_path / "plain") == 0  # keeps them, as the release's own bytes
    assert call("convert", tmp_path / "plain", tmp_path / "of_plain", "--maxtext_model", "llama2-7b") == 0
    assert call("diff", tmp_path / "made", tmp_path / "of_plain") == 0
    name = next(iter(biases))
    biases[name] = biases[name] + np.float16(0.5)
    capsys.readouterr()
    assert (
        call("plan", "--source", save(tmp_path / "other", config, stored | biases), "--maxtext_model", "llama2-7b") == 2
    )
    told = "".join(capsys.readouterr())
    assert f"unused: {name}: a bias that the table has no place for" in told
    assert "1 problem" in told

    qwen2 = LLAMA_64 | {"model_type": "qwen2", "quantization_config": config["quantization_config"]}
    biases = {name: np.full_like(values, 0.5) if "q_proj" in name else values for name, values in biases.items()}
    assert (
        call("plan", "--source", save(tmp_path / "qwen2", qwen2, stored | biases), "--json", tmp_path / "plan.json")
        == 0
    )
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert "params.params.decoder.layers.self_attention.query.bias" in plan["arrays"]
    assert plan["dropped"].keys() == {
        name for name in biases if not any(part in name for part in ("q_proj", "k_proj", "v_proj"))
    }


def test_a_fault_of_the_files_is_not_to_be_resumed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Another attempt would meet the same zero; the message doesn't send the user there."""
    config, stored, _ = CASES["GPTQ"]()
    name = next(name for name in stored if name.endswith(".qzeros"))
    stored[name] = np.full_like(stored[name], -1)
    assert (
        call(
            "convert",
            "--source",
            save(tmp_path / "hf", config, stored),
            "--output",
            tmp_path / "out",
            "--maxtext_model",
            "llama2-7b",
        )
        == 1
    )
    told = "".join(capfd.readouterr())
    assert f"{name} has a stored zero of 15" in told
    assert "The source's files are at fault" in told
    assert "--resume" not in told


def test_a_scale_that_is_no_number_stops_the_conversion(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The plan can't see it; the conversion names the tensor."""
    config, stored, _ = kimi()
    name = next(name for name in stored if name.endswith("_scale"))
    stored[name][0, 0] = np.nan
    assert call("convert", "--source", save(tmp_path / "hf", config, stored), "--output", tmp_path / "out") != 0
    assert name in "".join(capfd.readouterr())
    assert not (tmp_path / "out" / "0").exists()
