"""Kimi K3's release: its `config.json`, and the names, shapes and dtypes of its tensors, as projects that load it have them
(lablup/mlxcel #1741 for config.json; NVIDIA-NeMo/Megatron-Bridge #5130 and ml-explore/mlx-lm #1626 for the tensors, and that
`A_log` is padded with zeros from 96 values to 128). A list of all tensors of the 96 files, 497,220 with the codes' scales and a
tower, has these shapes and dtypes, and 1,503,647,073,024 elements, which they come to. transformers 5.23.0 has no class of it.
"""

from __future__ import annotations

from typing import Any

Shapes = dict[str, tuple[int, ...]]
PREFIX = "language_model.model."
TENSORS = 249_756  # of the language model, experts decoded (AI-Hypercomputer/maxtext, a test of its mapping, 4b27699)
FULL_ATTENTION = [*range(4, 93, 4), 93]
LINEAR = dict(
    full_attn_layers=FULL_ATTENTION, kda_layers=[layer for layer in range(1, 94) if layer not in FULL_ATTENTION], head_dim=128, num_heads=96,
    short_conv_kernel_size=4, use_full_rank_gate=True, gate_lower_bound=-5.0,
)  # fmt: skip
TEXT = dict(
    model_type="kimi_linear", vocab_size=163840, hidden_size=7168, intermediate_size=33792, num_hidden_layers=93, num_attention_heads=96,
    num_key_value_heads=96, hidden_act="situ", activation_situ_beta=4.0, activation_situ_linear_beta=25.0, rms_norm_eps=1e-5,
    max_position_embeddings=1048576, tie_word_embeddings=False, first_k_dense_replace=1, moe_layer_freq=1, num_experts=896, num_experts_per_token=16,
    num_shared_experts=2, moe_intermediate_size=3072, routed_expert_hidden_size=3584, latent_moe_use_norm=True, moe_renormalize=True,
    moe_router_activation_func="sigmoid", routed_scaling_factor=1.0, use_grouped_topk=True, num_expert_group=1, topk_group=1, q_lora_rank=1536,
    kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, mla_use_nope=True, mla_use_output_gate=True, attn_res_block_size=12,
    num_nextn_predict_layers=0,
    linear_attn_config=LINEAR,
)  # fmt: skip
MXFP4 = dict(  # only the routed experts are quantised
    quant_method="compressed-tensors", format="mxfp4-pack-quantized",
    config_groups=dict(group_0=dict(targets=["Linear"], weights=dict(num_bits=4, group_size=32, type="float", symmetric=True, dynamic=False))),
    ignore=["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*", "re:.*vision_tower.*",
            "re:.*mm_projector.*"],
)  # fmt: skip


def config_of(text: dict[str, Any]) -> dict[str, Any]:
    """`config.json` of a text model."""
    return dict(
        architectures=["KimiK3ForConditionalGeneration"],
        model_type="kimi_k3",
        tie_word_embeddings=False,
        text_config=text,
    )


def shapes_of(text: dict[str, Any]) -> Shapes:
    """The language model's tensors, experts decoded."""
    width, vocab = text["hidden_size"], text["vocab_size"]
    shapes: Shapes = {
        f"{PREFIX}embed_tokens.weight": (vocab, width),
        f"{PREFIX}norm.weight": (width,),
        "language_model.lm_head.weight": (vocab, width),
        f"{PREFIX}output_attn_res_norm.weight": (width,),
        f"{PREFIX}output_attn_res_proj.weight": (1, width),
    }
    for layer in range(text["num_hidden_layers"]):
        parts = dict.fromkeys(
            ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"), (width,)
        )
        parts |= dict.fromkeys(("self_attention_res_proj", "mlp_res_proj"), (1, width))
        is_full = layer + 1 in text["linear_attn_config"]["full_attn_layers"]
        made = {f"{name}.weight": shape for name, shape in parts.items()}
        made |= _latent_attention(text) if is_full else _delta_attention(text)
        made |= (
            _experts(text) if layer >= text["first_k_dense_replace"] else _mlp("mlp", width, text["intermediate_size"])
        )
        shapes |= {f"{PREFIX}layers.{layer}.{name}": shape for name, shape in made.items()}
    return shapes


def _delta_attention(text: dict[str, Any]) -> Shapes:
    part, width = text["linear_attn_config"], text["hidden_size"]
    heads, dim, taps = part["num_heads"], part["head_dim"], part["short_conv_kernel_size"]
    shapes = {f"{name}_proj.weight": (heads * dim, width) for name in "qkvg"}
    shapes |= {f"{name}_conv1d.weight": (heads * dim, 1, taps) for name in "qkv"}
    shapes |= {
        "f_a_proj.weight": (dim, width),
        "f_b_proj.weight": (heads * dim, dim),
        "A_log": (dim,),
        "dt_bias": (heads * dim,),
    }
    shapes |= {"b_proj.weight": (heads, width), "o_norm.weight": (dim,), "o_proj.weight": (width, heads * dim)}
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def _latent_attention(text: dict[str, Any]) -> Shapes:
    width, heads, value = text["hidden_size"], text["num_attention_heads"], text["v_head_dim"]
    query, latent, nope, rope = (
        text[key] for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
    )
    shapes = {
        "q_a_proj": (query, width), "q_a_layernorm": (query,), "q_b_proj": (heads * (nope + rope), query), "kv_a_proj_with_mqa": (latent + rope, width),
        "kv_a_layernorm": (latent,), "kv_b_proj": (heads * (nope + value), latent), "g_proj": (heads * value, width), "o_proj": (width, heads * value),
    }  # fmt: skip
    return {f"self_attn.{name}.weight": shape for name, shape in shapes.items()}


def _mlp(prefix: str, width: int, hidden: int) -> Shapes:
    shapes = {"gate_proj": (hidden, width), "up_proj": (hidden, width), "down_proj": (width, hidden)}
    return {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}


def _experts(text: dict[str, Any]) -> Shapes:
    width, latent, hidden, count = (
        text[key] for key in ("hidden_size", "routed_expert_hidden_size", "moe_intermediate_size", "num_experts")
    )
    shapes = {
        "gate.weight": (count, width), "gate.e_score_correction_bias": (count,), "routed_expert_down_proj.weight": (latent, width),
        "routed_expert_norm.weight": (latent,), "routed_expert_up_proj.weight": (width, latent),
    }  # fmt: skip
    shapes |= _mlp("shared_experts", width, hidden * text["num_shared_experts"])
    for expert in range(count):
        each = {"w1": (hidden, latent), "w3": (hidden, latent), "w2": (latent, hidden)}
        shapes |= {f"experts.{expert}.{name}.weight": shape for name, shape in each.items()}
    return {f"block_sparse_moe.{name}": shape for name, shape in shapes.items()}
