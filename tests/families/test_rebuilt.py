"""A model whose config.json was lost: config.json → maxtext.yml → config.json, and transformers computes the same from
it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from lazily import lazily

from weightbeam.model_mappings.config_json import config_json
from weightbeam.pipelines.commands.plan import maxtext_config

torch = lazily("torch")
transformers = lazily("transformers")

SIZES: dict[str, Any] = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    pad_token_id=0,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
LATENT = dict(
    q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1,
    num_experts_per_tok=2, moe_intermediate_size=24, first_k_dense_replace=1, head_dim=8,
)  # fmt: skip
# model_type -> what is special about it, and a name where the sizes don't settle it
MODELS: dict[str, tuple[dict[str, Any], str | None]] = {
    "llama": (dict(rms_norm_eps=3e-5, rope_parameters=dict(rope_type="default", rope_theta=7e4)), "llama2-7b"),
    "mistral": (dict(sliding_window=None, rope_parameters=dict(rope_type="default", rope_theta=7e4)), None),
    "qwen2": (dict(head_dim=8, rms_norm_eps=3e-5, tie_word_embeddings=True), None),
    "qwen3": (dict(rms_norm_eps=3e-5, rope_parameters=dict(rope_type="default", rope_theta=7e4)), None),
    "qwen3_moe": (EXPERTS | dict(norm_topk_prob=True), None),
    "mixtral": (dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None), None),
    # the release's: of other numbers of rows MaxText doesn't say which are padding
    "gemma": (dict(vocab_size=256_000), None),
    "gemma2": (
        dict(
            vocab_size=256_000,
            query_pre_attn_scalar=16,
            sliding_window=5,
            attn_logit_softcapping=40.0,
            final_logit_softcapping=20.0,
        ),
        None,
    ),
    "gpt_oss": (dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=5), None),
    "olmo3": (dict(sliding_window=5, head_dim=8), "olmo3-7b-pt"),
    "deepseek_v3": (LATENT | dict(n_group=2, topk_group=1, routed_scaling_factor=1.7, norm_topk_prob=True), None),
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_rebuilt_config_builds_the_same_model(kind: str, tmp_path: Path) -> None:
    """Every weight has its place, and the logits are the same to the bit."""
    special, named = MODELS[kind]
    torch.manual_seed(0)
    built = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **(SIZES | special)), dtype=torch.float32
    ).eval()
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    built.save_pretrained(tmp_path)
    tokens = torch.arange(24).reshape(1, 24) * 3
    with torch.no_grad():
        wanted = built(tokens).logits
    made = maxtext_config(str(tmp_path), maxtext_model=named)
    (tmp_path / "config.json").write_text(json.dumps(config_json(yaml.safe_load(made.to_yaml())).config))
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[field] for field in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        found = again.eval()(tokens).logits
    assert wanted.std() > 0
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
