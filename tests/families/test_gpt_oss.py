"""gpt-oss: what MaxText's converter made, in whatever way it is asked to work; what the experts compute; and that their
bytes are read once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import converted, digests, given, given_arrays, headers_only, read_config

from weightbeam.model_mappings.audit import Problem
from weightbeam.transforms.planning.conversion import Conversion
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import ConvertOptions

MIB = 1024**2
SIZES = dict(
    model_type="gpt_oss", vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_attention_heads=64, num_key_value_heads=8, head_dim=64,
    tie_word_embeddings=False,
)  # fmt: skip


def shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a release in bfloat16."""
    embed, mlp, experts, heads = (
        c["hidden_size"],
        c["intermediate_size"],
        c["num_local_experts"],
        c["num_attention_heads"],
    )
    rows = dict(
        q=heads * c["head_dim"], k=c["num_key_value_heads"] * c["head_dim"], v=c["num_key_value_heads"] * c["head_dim"]
    )
    layer: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj.weight": (n, embed) for name, n in rows.items()}
    layer |= {f"self_attn.{name}_proj.bias": (n,) for name, n in rows.items()}
    layer |= {
        "self_attn.o_proj.weight": (embed, rows["q"]),
        "self_attn.o_proj.bias": (embed,),
        "self_attn.sinks": (heads,),
    }
    layer |= {"input_layernorm.weight": (embed,), "post_attention_layernorm.weight": (embed,)}
    layer |= {"mlp.router.weight": (experts, embed), "mlp.router.bias": (experts,)}
    layer |= {
        "mlp.experts.gate_up_proj": (experts, embed, 2 * mlp),
        "mlp.experts.gate_up_proj_bias": (experts, 2 * mlp),
    }
    layer |= {"mlp.experts.down_proj": (experts, mlp, embed), "mlp.experts.down_proj_bias": (experts, embed)}
    top = {
        "model.embed_tokens.weight": (c["vocab_size"], embed),
        "model.norm.weight": (embed,),
        "lm_head.weight": (c["vocab_size"], embed),
    }
    return top | {
        f"model.layers.{i}.{name}": shape for i in range(c["num_hidden_layers"]) for name, shape in layer.items()
    }


def plan(config: dict[str, Any], **options: Any) -> Conversion:
    return plan_conversion(ConvertOptions(**options), headers_only(config, known=shapes(config)))


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unscanned"])
@pytest.mark.parametrize(
    "mesh", [(), ("fsdp=16",), ("tensor=8",), ("fsdp=4,expert=4",), ("fsdp=4,tensor=4", "expert=8")], ids=str
)
@pytest.mark.parametrize("unit_mib", [32, 128])
def test_each_byte_of_the_experts_is_read_once(mesh: tuple[str, ...], unit_mib: int, scan: bool) -> None:
    """At real sizes gate and up, which alternate element by element, are made in one unit, however small it is."""
    conversion = plan(
        SIZES | dict(num_hidden_layers=4, num_local_experts=32), mesh=mesh, unit_bytes=unit_mib * MIB, scan_layers=scan
    )
    assert conversion.plan.problems == ()
    assert 1 <= conversion.read_bytes / conversion.source_bytes <= 1.02
    assert conversion.unit_working_bytes <= unit_mib * MIB


def test_120b() -> None:
    """The larger model: 36 layers, 128 experts (MaxText, src/maxtext/configs/models/gpt-oss-120b.yml, e591f30)."""
    conversion = plan(SIZES | dict(num_hidden_layers=36, num_local_experts=128), maxtext_model="gpt-oss-120b")
    assert conversion.plan.problems == ()
    arrays = {array.key.removeprefix("params.params.decoder.layers."): array.shape for array in conversion.plan.arrays}
    assert arrays["layers_0.GptOssMlp.wi_0"] == arrays["layers_1.GptOssMlp.wi_1"] == (128, 18, 2880, 2880)
    assert conversion.target_bytes == conversion.source_bytes == 2 * 116_829_156_672


@pytest.mark.slow("plans the 120b release, piece by piece: 15 s")
def test_120b_is_read_once() -> None:
    conversion = plan(SIZES | dict(num_hidden_layers=36, num_local_experts=128), maxtext_model="gpt-oss-120b")
    assert conversion.read_bytes / conversion.source_bytes <= 1.02


WAYS = {
    "small units": "--unit_bytes 60000",
    "small units, unscanned": "--unit_bytes 60000 --scan_layers false",
    "experts over a mesh": "--mesh fsdp=2,expert=2 --unit_bytes 60000",
    "meshes that part gate and up": "--mesh tensor=8 --mesh fsdp=16 --unit_bytes 60000",
    "for Pathways": "--mesh fsdp=4 --use_ocdbt false --use_zarr3 false --unit_bytes 60000",
    "zstd": "--mesh fsdp=4,expert=2 --compression zstd",
}


@pytest.mark.parametrize("way", WAYS)
def test_equals_maxtexts_converter_in_every_way(generated: Path, tmp_path: Path, way: str) -> None:
    """Bit for bit, also where a shard holds a part of the alternating axis."""
    options = ["--maxtext_model", "gpt-oss-20b", "--vocab_size", str(given()["gpt-oss"]["vocab"]), *WAYS[way].split()]
    arrays = converted(generated / "cases" / "gpt-oss", tmp_path / "out", *options)
    assert digests(arrays) == given_arrays("gpt-oss", "unscanned" if "unscanned" in way else "scanned")


def maxtext_mlp(a: dict[str, np.ndarray], x: np.ndarray, k: int, limit: float) -> np.ndarray:
    """(token, embed) through the router and its `k` experts, as MaxText computes it: layers/moe.py (`get_topk`,
    `apply_ffn_activation`), e591f30.
    """
    logits = x @ a["gate.kernel"] + a["gate.bias"]
    out = np.zeros_like(x)
    for token, row in enumerate(logits):
        chosen = np.argsort(-row)[:k]
        weights = np.exp(row[chosen]) / np.exp(row[chosen]).sum()
        for expert, weight in zip(chosen, weights, strict=True):
            gate = np.minimum(x[token] @ a["wi_0"][expert] + a["wi_0_bias"][expert], limit)
            up = np.clip(x[token] @ a["wi_1"][expert] + a["wi_1_bias"][expert], -limit, limit)
            inner = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            out[token] += weight * (inner @ a["wo"][expert] + a["wo_bias"][expert])
    return out


@pytest.mark.parametrize("layer", range(4))
def test_experts_compute_what_transformers_computes(generated: Path, tmp_path: Path, layer: int) -> None:
    """Router, gate, up, down and their biases, by the module of transformers and by MaxText's formula on our arrays."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = generated / "cases" / "gpt-oss"
    config = read_config(folder)
    arrays = converted(folder, tmp_path / "out", "--scan_layers", "false", "--save_dtype", "float32")
    prefix = f"decoder.layers_{layer}.GptOssMlp."
    ours = {
        key.removeprefix(prefix): values.astype(np.float64) for key, values in arrays.items() if key.startswith(prefix)
    }
    x = 3 * np.random.default_rng(layer).standard_normal((40, config["hidden_size"]))
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model.layers[layer].mlp
    with torch.no_grad():
        wanted = module(torch.tensor(x[None], dtype=torch.float32))[0][0].numpy()
    made = maxtext_mlp(ours, x, config["num_experts_per_tok"], config["swiglu_limit"])
    np.testing.assert_allclose(made, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
    swapped = ours | {"wi_0": ours["wi_1"], "wi_1": ours["wi_0"]}
    assert (
        np.abs(maxtext_mlp(swapped, x, config["num_experts_per_tok"], config["swiglu_limit"]) - wanted).max()
        > 0.1 * np.abs(wanted).max()
    )


def problems(config: dict[str, Any], **options: Any) -> tuple[Problem, ...]:
    return plan(config, **options).plan.problems


def test_other_patterns_are_refused() -> None:
    """Layers that aren't sliding and full in turn; and a scan in pairs that would lose the last layer."""
    config = SIZES | dict(num_hidden_layers=4, num_local_experts=2)
    assert problems(config | {"layer_types": ["sliding_attention", "full_attention"] * 2}) == ()
    (problem,) = problems(config | {"layer_types": ["full_attention"] * 4})
    assert (problem.kind, "layer_types" in problem.message) == ("config", True)
    odd = config | {"num_hidden_layers": 3}
    (problem,) = problems(odd)
    assert (problem.kind, "cycles of 2" in problem.message) == ("config", True)
    assert problems(odd, scan_layers=False) == ()
