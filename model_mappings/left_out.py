"""What transformers takes for what a text model's part of `config.json` leaves out.

By the part's `model_type`: what its configuration class has (huggingface/transformers v5.23.0,
`models/*/configuration_*.py`), where that doesn't follow from the other fields. The widths and the number of layers aren't
here: a `config.json` without them is a damaged one; but for a width that no layer has.
"""

from __future__ import annotations

from collections.abc import Mapping

LATENT = dict(
    n_shared_experts=1, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)
SPARSE = dict(num_experts_per_tok=8, moe_intermediate_size=2048)
INDEX = dict(index_n_heads=64, index_head_dim=128)
LINEAR = dict(
    linear_conv_kernel_dim=4,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
)
QWEN3_NEXT = dict(
    num_key_value_heads=2, head_dim=256, moe_intermediate_size=512, shared_expert_intermediate_size=512, **LINEAR
)
DEEPSEEK_V3 = dict(num_key_value_heads=128, first_k_dense_replace=3, **LATENT, **SPARSE)
SIZES: dict[str, dict[str, int]] = {
    "llama": dict(max_position_embeddings=2048),
    "mistral": dict(num_key_value_heads=8, max_position_embeddings=131_072),
    "qwen2": dict(num_key_value_heads=32, max_position_embeddings=32_768),
    "qwen3": dict(num_key_value_heads=32, head_dim=128, max_position_embeddings=32_768),
    "qwen3_moe": dict(num_key_value_heads=4, max_position_embeddings=32_768, num_experts_per_tok=8, moe_intermediate_size=768, intermediate_size=6144),
    "mixtral": dict(num_key_value_heads=8, max_position_embeddings=131_072, num_experts_per_tok=2),
    "deepseek_v2": LATENT | dict(max_position_embeddings=2048, n_shared_experts=2, moe_intermediate_size=1407),
    "deepseek_v3": DEEPSEEK_V3 | dict(max_position_embeddings=4096),
    "deepseek_v32": DEEPSEEK_V3 | INDEX | dict(max_position_embeddings=163_840),
    "deepseek_v4": SPARSE | INDEX | dict(
        head_dim=512, max_position_embeddings=1_048_576, num_experts_per_tok=6, n_shared_experts=1, q_lora_rank=1024,
        o_groups=8, o_lora_rank=1024, hc_mult=4,
    ),
    "glm_moe_dsa": LATENT | SPARSE | INDEX | dict(
        num_key_value_heads=64, first_k_dense_replace=3, max_position_embeddings=202_752, q_lora_rank=2048, qk_nope_head_dim=192, v_head_dim=256,
        index_n_heads=32,
    ),
    "hy_v3": dict(
        num_key_value_heads=8, first_k_dense_replace=1, head_dim=128, max_position_embeddings=131_072, num_experts_per_tok=8, moe_intermediate_size=1536,
    ),
    "glm5_next_text": dict(max_position_embeddings=1_048_576),
    "gpt_oss": dict(num_key_value_heads=8, head_dim=64, max_position_embeddings=131_072),
    "olmo3": dict(max_position_embeddings=2048),
    "llama4_text": dict(num_key_value_heads=8, head_dim=128, max_position_embeddings=131_072),
    "gemma": dict(num_key_value_heads=16, max_position_embeddings=8192),
    "gemma2": dict(num_key_value_heads=4, max_position_embeddings=8192),
    "gemma3_text": dict(max_position_embeddings=131_072),
    "gemma4_unified_text": dict(max_position_embeddings=262_144),
    "gemma4_text": dict(max_position_embeddings=131_072),
    "qwen3_next": QWEN3_NEXT | dict(max_position_embeddings=32_768, num_experts_per_tok=10),
    "qwen3_5_moe_text": QWEN3_NEXT | dict(max_position_embeddings=32_768, num_experts_per_tok=8),
    "qwen3_vl_text": dict(num_key_value_heads=32, head_dim=128, max_position_embeddings=128_000),
    "qwen3_vl_moe_text": dict(
        num_key_value_heads=16, max_position_embeddings=128_000, num_experts_per_tok=4, moe_intermediate_size=1408, intermediate_size=5632,
    ),
    "qwen3_omni_moe_text": dict(
        num_key_value_heads=4, max_position_embeddings=32_768, num_experts_per_tok=8, moe_intermediate_size=768, intermediate_size=18_944,
    ),
}  # fmt: skip

# the rotary embedding of a class whose default isn't the plain one
ROPES: dict[str, dict[str, object]] = {
    "gpt_oss": dict(
        rope_type="yarn", factor=32, beta_fast=32, beta_slow=1, truncate=False, original_max_position_embeddings=4096
    )
}


def left_out(part: Mapping[str, object], field: str) -> int | None:
    """What transformers takes for a size that isn't said.

    Args:
      part: of `config.json`.
      field: the name of a field in it.

    Returns:
      The size; None where the field is there, and be it null, or where it follows from others.

    Example:
      >>> left_out({"model_type": "mixtral"}, "num_key_value_heads")
      8
    """
    return None if field in part else SIZES.get(str(part.get("model_type")), {}).get(field)
