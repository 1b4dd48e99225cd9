"""Kimi K3: a tiny release by the names of its own, there and back, and the arrays as MaxText's branch has them.

What the layers compute isn't compared: transformers (5.23.0) has no class of the model, and the branch wasn't run. Names and
shapes of the arrays are written down here from AI-Hypercomputer/maxtext, src/maxtext/models/kimi_k3.py and layers/latent_moe.py,
4b27699, and its tests' list of what the mapping has (tests/utils/kimi_k3_parity_utils.py, 6a39975).
"""

from __future__ import annotations

import copy
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from facts.kimi_k3 import LINEAR, MXFP4, PREFIX, TEXT, config_of, shapes_of
from support import assert_same_bits, call, converted, read_tensors, save

import weightbeam as wb
from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.families import kimi_k3
from weightbeam.model_mappings.maxtext_config import maxtext_config
from weightbeam.model_mappings.maxtext_models import base
from weightbeam.model_mappings.naming import ModelNaming
from weightbeam.model_mappings.plan import expand

HEADS, DIM, VALUE, EMBED, LATENT, HIDDEN, EXPERTS = 3, 5, 6, 24, 64, 32, 4
TINY = TEXT | dict(
    vocab_size=40, hidden_size=EMBED, intermediate_size=20, num_hidden_layers=5, num_attention_heads=HEADS, num_key_value_heads=HEADS, num_experts=EXPERTS,
    num_experts_per_token=2, moe_intermediate_size=HIDDEN, routed_expert_hidden_size=LATENT, q_lora_rank=14, kv_lora_rank=10, qk_nope_head_dim=7,
    qk_rope_head_dim=4, v_head_dim=VALUE, attn_res_block_size=2,
    linear_attn_config=LINEAR | dict(full_attn_layers=[4, 5], kda_layers=[1, 2, 3], head_dim=DIM, num_heads=HEADS),
)  # fmt: skip
WIDE = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")  # float32 in the release
OPTIONS = ("--scan_layers", "false", "--save_dtype", "float32")


def random_tensors(text: dict, shapes: dict | None = None) -> dict[str, np.ndarray]:
    """Every tensor with values of its own; what lies behind the heads of a decay is zeros."""
    rng = np.random.default_rng(5)
    made = {}
    for name, shape in (shapes or shapes_of(text)).items():
        values = rng.standard_normal(shape).astype(np.float32)
        if name.endswith("A_log"):
            values[text["num_attention_heads"] :] = 0
        made[name] = values if name.endswith(WIDE) else values.astype(ml_dtypes.bfloat16)
    return made


def write(folder: Path, tensors: dict[str, np.ndarray], text: dict = TINY) -> Path:
    """In two files, with a tensor of a tower."""
    names = sorted(tensors)
    tower = {"vision_tower.patch_embed.weight": np.ones((2, 3), ml_dtypes.bfloat16)}
    return save(
        folder,
        config_of(text),
        {name: tensors[name] for name in names[::2]},
        tower | {name: tensors[name] for name in names[1::2]},
    )


def attention(tensors: dict[str, np.ndarray], layer: int) -> dict[str, np.ndarray]:
    """A layer's attention as MaxText's has it."""
    of = {name.removeprefix(f"{PREFIX}layers.{layer}.self_attn."): values for name, values in tensors.items()}
    if layer < 3:
        made = {
            f"{name}.kernel": of[f"{name}.weight"].T
            for name in ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "f_b_proj", "b_proj")
        }
        made |= {f"{name}_conv1d.kernel": of[f"{name}_conv1d.weight"].transpose(2, 1, 0) for name in "qkv"}
        made |= {
            "A_log": of["A_log"][:HEADS],
            "dt_bias": of["dt_bias"],
            "o_norm.scale": of["o_norm.weight"],
            "out.kernel": of["o_proj.weight"].T,
        }
        return made
    return {
        "wq_a.kernel": of["q_a_proj.weight"].T, "q_norm.scale": of["q_a_layernorm.weight"], "wq_b.kernel": of["q_b_proj.weight"].T.reshape(14, HEADS, 11),
        "wkv_a.kernel": of["kv_a_proj_with_mqa.weight"].T, "kv_norm.scale": of["kv_a_layernorm.weight"],
        "wkv_b.kernel": of["kv_b_proj.weight"].T.reshape(10, HEADS, 7 + VALUE), "g_proj.kernel": of["g_proj.weight"].T.reshape(EMBED, HEADS, VALUE),
        "out.kernel": of["o_proj.weight"].T.reshape(HEADS, VALUE, EMBED),
    }  # fmt: skip


def mlp(tensors: dict[str, np.ndarray], layer: int) -> dict[str, np.ndarray]:
    """A layer's MLP, or its experts in their latent."""
    names = {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}
    below = f"{PREFIX}layers.{layer}."
    if not layer:
        return {f"{ours}.kernel": tensors[f"{below}mlp.{theirs}.weight"].T for ours, theirs in names.items()}
    moe = {name.removeprefix(f"{below}block_sparse_moe."): values for name, values in tensors.items()}
    made = {f"routed_expert_{part}_proj.kernel": moe[f"routed_expert_{part}_proj.weight"].T for part in ("down", "up")}
    made |= {
        "routed_expert_norm.scale": moe["routed_expert_norm.weight"],
        "routed_experts.gate.kernel": moe["gate.weight"].T,
    }
    made |= {"routed_experts.gate.e_score_correction_bias": moe["gate.e_score_correction_bias"]}
    made |= {f"shared_expert.{ours}.kernel": moe[f"shared_experts.{theirs}.weight"].T for ours, theirs in names.items()}
    for ours, theirs in {"wi_0": "w1", "wi_1": "w3", "wo": "w2"}.items():
        made[f"routed_experts.{ours}"] = np.stack(
            [moe[f"experts.{expert}.{theirs}.weight"].T for expert in range(EXPERTS)]
        )
    return made


def expected(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """MaxText's arrays of a release whose experts are decoded."""
    made = {
        "token_embedder.embedding": tensors[f"{PREFIX}embed_tokens.weight"],
        "decoder.decoder_norm.scale": tensors[f"{PREFIX}norm.weight"],
        "decoder.logits_dense.kernel": tensors["language_model.lm_head.weight"].T,
        "decoder.output_attn_res_norm.scale": tensors[f"{PREFIX}output_attn_res_norm.weight"],
        "decoder.output_attn_res_proj.kernel": tensors[f"{PREFIX}output_attn_res_proj.weight"].T,
    }
    norms = {
        "pre_self_attention_layer_norm": "input_layernorm",
        "post_self_attention_layer_norm": "post_attention_layernorm",
    }
    norms |= {name: name for name in ("self_attention_res_norm", "mlp_res_norm")}
    for layer in range(5):
        to, below = f"decoder.layers_{layer}.", f"{PREFIX}layers.{layer}."
        made |= {f"{to}{ours}.scale": tensors[f"{below}{theirs}.weight"] for ours, theirs in norms.items()}
        made |= {
            f"{to}{name}.kernel": tensors[f"{below}{name}.weight"].T
            for name in ("self_attention_res_proj", "mlp_res_proj")
        }
        made |= {f"{to}self_attention.{name}": values for name, values in attention(tensors, layer).items()}
        made |= {f"{to}mlp.{name}": values for name, values in mlp(tensors, layer).items()}
    return {name: np.ascontiguousarray(values, np.float32) for name, values in made.items()}


def test_arrays_are_those_of_maxtexts_layers(tmp_path: Path) -> None:
    """And the zeros behind the heads' decays aren't rows of a vocabulary that is cut."""
    tensors = random_tensors(TINY)
    assert "cut off" not in " ".join(wb.plan(str(write(tmp_path / "asked", tensors)), scan_layers=False).warnings)
    assert_same_bits(converted(write(tmp_path / "hf", tensors), tmp_path / "out", *OPTIONS), expected(tensors))


@pytest.mark.parametrize("rows", [DIM, HEADS])
def test_there_and_back(tmp_path: Path, rows: int) -> None:
    """Bit for bit, the zeros behind the heads' decays as well; or none where the release has none."""
    shapes = shapes_of(TINY)
    tensors = random_tensors(
        TINY, {name: (rows,) if name.endswith("A_log") else shape for name, shape in shapes.items()}
    )
    release = write(tmp_path / "hf", tensors)
    converted(release, tmp_path / "out", *OPTIONS)
    assert call("export", "--source", tmp_path / "out", "--like", release, "--output", tmp_path / "back") == 0
    assert_same_bits(read_tensors(tmp_path / "back"), read_tensors(release))
    assert call("verify", "--source", tmp_path / "out", "--checkpoint", tmp_path / "back") == 0


def test_experts_in_mxfp4_are_decoded(tmp_path: Path) -> None:
    """Two codes a byte, low nibble first, and an exponent for 32 of them."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.concatenate([values, -values])
    decoded, rng = random_tensors(TINY), np.random.default_rng(6)
    stored = {}
    for name, tensor in decoded.items():
        if ".experts." not in name:
            stored[name] = tensor
            continue
        codes = rng.integers(0, 16, tensor.shape)
        exponents = rng.integers(120, 130, (len(tensor), tensor.shape[1] // 32))
        stored[f"{name}_packed"] = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
        stored[f"{name}_scale"] = exponents.astype(np.uint8)
        decoded[name] = values[codes] * np.repeat(2.0 ** (exponents - 127), 32, 1).astype(np.float32)
    release = write(tmp_path / "hf", stored, TINY | dict(quantization_config=MXFP4))
    assert_same_bits(converted(release, tmp_path / "out", *OPTIONS), expected(decoded))


def test_scanned_is_refused(tmp_path: Path) -> None:
    release = write(tmp_path / "hf", random_tensors(TINY))
    assert call("convert", "--source", release, "--output", tmp_path / "out") == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(linear_attn_config=dict(full_attn_layers=[4])), "should have each of the layers 1 to 5 once"),
        (dict(linear_attn_config=dict(num_heads=2)), "'num_heads' of linear_attn_config is 2"),
        (dict(linear_attn_config=dict(use_full_rank_gate=False)), "no gate of low rank"),
        (dict(latent_moe_use_norm=False), "'latent_moe_use_norm' should be True"),
        (dict(mla_use_output_gate=False), "'mla_use_output_gate' should be True"),
        (dict(moe_layer_freq=2), "'moe_layer_freq' should be 1"),
        (dict(routed_expert_hidden_size=None), "'routed_expert_hidden_size'"),
        (dict(q_lora_rank=None), "'q_lora_rank'"),
    ],
)
def test_what_maxtext_does_not_have_is_refused(change: dict, message: str) -> None:
    text, layout = copy.deepcopy(TINY), Layout(scan=False, shapes=shapes_of(TINY))
    expand(kimi_k3.FAMILY, Config(config_of(text)), layout)
    text["linear_attn_config"] |= change.get("linear_attn_config", {})
    text |= {key: value for key, value in change.items() if key != "linear_attn_config"}
    with pytest.raises(ConfigError, match=message):
        expand(kimi_k3.FAMILY, Config(config_of(text)), layout)


def test_the_softmax_of_latent_attention_is_not_scaled() -> None:
    """MaxText's layer scales it by YaRN's square, of base.yml's factor if it is told none (src/maxtext/layers/attention_mla.py, e591f30);
    the release's code multiplies by 1/√(nope + rope) alone.
    """
    made = maxtext_config(
        kimi_k3.FAMILY, Config(config_of(TEXT)), Layout(scan=False, model="kimi-k3"), ModelNaming("kimi-k3")
    )
    keys = {**base(), **made.settings}
    assert keys["max_position_embeddings"] > keys["original_max_position_embeddings"]
    assert 0.1 * keys["mscale"] * math.log(keys["rope_factor"]) + 1 == 1
    assert "rope_factor=1" in made.command_line().split()


def test_every_field_of_the_release_is_one_that_a_line_is_about() -> None:
    """All that MaxText's branch can't do is said: its two norms of latents."""
    made = [
        maxtext_config(kimi_k3.FAMILY, Config(config_of(TEXT | said)), Layout(scan=False), ModelNaming("kimi-k3"))
        for said in ({}, dict(num_expert_group=8, topk_group=1))
    ]
    assert made[0].unknown == ()
    assert ["latents" in limit for limit in made[0].limits] == [True]
    (groups,) = set(made[1].limits) - set(made[0].limits)
    assert groups.startswith("num_expert_group is 8")
