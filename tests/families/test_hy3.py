"""Hy3: what MaxText computes with the converted arrays is what transformers computes with the checkpoint.

MaxText's layers: AI-Hypercomputer/maxtext, pull request 4704 (75d2826), src/maxtext/models/hy3.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from families.numpy_decoder import assert_logits, attend, below, both, dense_then_routed, gated, rms_norm, routed, silu
from support import assert_same_bits, call, converted, read_config, read_file, read_tensors, save

from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.families import hy3

IDS = np.random.default_rng(5).integers(0, 92, 16)


@pytest.mark.parametrize("layout", ["scanned", "unscanned"])
def test_logits_are_those_of_transformers(generated: Path, tmp_path: Path, layout: str) -> None:
    """Three layers, the first dense; norms of query and key, a sigmoid router, a shared expert of twice the width."""
    scan, folder = layout == "scanned", generated / "models" / "hy3"
    arrays, hf = both(folder, tmp_path / "out", "HYV3ForCausalLM", scan)
    c = hf.config
    x = arrays["token_embedder.embedding"][IDS]
    for layer in dense_then_routed(arrays, scan):
        normed = rms_norm(x, layer["pre_self_attention_layer_norm.scale"], c.rms_norm_eps)
        x = x + attend(
            normed,
            below(layer, "self_attention."),
            theta=c.rope_parameters["rope_theta"],
            window=None,
            epsilon=c.rms_norm_eps,
            scale=c.head_dim**-0.5,
        )
        normed = rms_norm(x, layer["post_self_attention_layer_norm.scale"], c.rms_norm_eps)
        moe = below(layer, "Hy3MoeBlock_0.")
        mlp = below(layer, "mlp.")
        x = x + (
            routed(normed, moe, c.num_experts_per_tok, c.router_scaling_factor) if moe else gated(normed, mlp, silu)
        )
    got = rms_norm(x, arrays["decoder.decoder_norm.scale"], c.rms_norm_eps) @ arrays["decoder.logits_dense.kernel"]
    assert_logits(got, hf, IDS)


def test_the_names_in_memory_give_the_same_arrays(generated: Path, tmp_path: Path) -> None:
    """`gate`, `e_score_correction_bias`, `shared_experts` and fused experts, as transformers has them."""
    folder = generated / "models" / "hy3"
    memory = read_file(generated / "models" / "hy3.state.safetensors")
    assert "model.layers.1.mlp.shared_experts.up_proj.weight" in memory
    source = save(tmp_path / "memory", read_config(folder), memory)
    assert_same_bits(converted(source, tmp_path / "a"), converted(folder, tmp_path / "b"))


def test_multi_token_prediction(generated: Path, tmp_path: Path) -> None:
    """The layer behind the last, with a last norm of its own; without --mtp all of it is left out, by name."""
    folder = generated / "models" / "hy3"
    config, tensors = read_config(folder), read_tensors(folder)
    n, embed = config["num_hidden_layers"], config["hidden_size"]
    last = {name: values for name, values in tensors.items() if name.startswith(f"model.layers.{n - 1}.")}
    tensors |= {name.replace(f".{n - 1}.", f".{n}.", 1): values for name, values in last.items()}
    norm = tensors["model.norm.weight"]
    tensors |= {f"model.layers.{n}.{name}.weight": norm for name in ("enorm", "hnorm", "final_layernorm")}
    tensors[f"model.layers.{n}.eh_proj.weight"] = np.concatenate([tensors["lm_head.weight"][:embed]] * 2, 1)
    source = save(tmp_path / "hf", config | {"num_nextn_predict_layers": 1}, tensors)
    arrays = converted(source, tmp_path / "a", "--mtp", "true")
    block = below(arrays, "mtp_block.mtp_layer_1.")
    assert block["mtp_1_projection.kernel"].shape == (2 * embed, embed)
    inner = below(block, "mtp_1_transformer_layer.")
    moe = below(arrays, "decoder.moe_layers.")
    assert_same_bits(inner, {name: np.ascontiguousarray(values[:, -1]) for name, values in moe.items()})
    assert_same_bits(converted(source, tmp_path / "b"), converted(folder, tmp_path / "c"))
    assert call("plan", "--source", source, "--mtp", "true") == 0


def test_experts_behind_which_a_layer_is_dense_are_refused() -> None:
    config = Config(model_type="hy_v3", num_hidden_layers=3, mlp_layer_types=["sparse", "dense", "sparse"])
    with pytest.raises(ConfigError, match="'mlp_layer_types' should be 'dense' and then 'sparse', 3 in all"):
        hy3.stacks(config, Layout())
