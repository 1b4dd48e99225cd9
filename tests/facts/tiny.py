"""Tiny checkpoints as the hub holds them: a `config.json` and the shape of each tensor.

The names and shapes are those of transformers' modules (a linear layer's weight is (out, in)), written down here a
second time on purpose: the tables are checked against them. Sizes differ, so that no axis can be taken for another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]

DENSE = dict(
    vocab_size=16,
    hidden_size=10,
    intermediate_size=14,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    tie_word_embeddings=False,
)
LATENT = DENSE | dict(
    num_hidden_layers=3, first_k_dense_replace=1, q_lora_rank=15, kv_lora_rank=12, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=5,
    intermediate_size=22, n_routed_experts=3, n_shared_experts=2, moe_intermediate_size=13, num_nextn_predict_layers=0,
)  # fmt: skip
CONFIGS: dict[str, dict] = {
    "llama": DENSE | dict(model_type="llama"),
    "mistral": DENSE | dict(model_type="mistral"),
    "qwen2": DENSE | dict(model_type="qwen2"),
    "qwen3": DENSE | dict(model_type="qwen3"),
    "qwen3_moe": DENSE
    | dict(model_type="qwen3_moe", num_experts=3, moe_intermediate_size=7, decoder_sparse_step=1, mlp_only_layers=[]),
    "mixtral": DENSE | dict(model_type="mixtral", num_local_experts=3),
    "deepseek_v2": LATENT | dict(model_type="deepseek_v2"),
    "deepseek_v2-lite": LATENT | dict(model_type="deepseek_v2", q_lora_rank=None),
    "deepseek_v3": LATENT | dict(model_type="deepseek_v3", num_nextn_predict_layers=1),
    "deepseek_v32": LATENT
    | dict(model_type="deepseek_v32", num_nextn_predict_layers=1, index_n_heads=11, index_head_dim=8),
    "kimi_k2": LATENT | dict(model_type="kimi_k2"),
}
# MaxText has more rows of the vocabulary unless told otherwise
PADDED = {"gemma": DENSE | dict(model_type="gemma", tie_word_embeddings=True)}
# transformers v5 may hold their experts in one tensor
FUSED = ("qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2")

Shapes = dict[str, tuple[int, ...]]


def shapes(config: Config, fused: bool = False) -> Shapes:
    """`{name: shape}` of every tensor of a checkpoint with this `config.json`."""
    embed, vocab, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    out: Shapes = {"model.embed_tokens.weight": (vocab, embed)}
    for layer in range(layers + config.get("num_nextn_predict_layers", 0)):
        tensors = {"input_layernorm.weight": (embed,), "post_attention_layernorm.weight": (embed,)}
        tensors |= latent_attention(config) if "kv_lora_rank" in config else attention(config)
        tensors |= feed_forward(config, layer, fused)
        if layer >= layers:
            tensors |= {
                "enorm.weight": (embed,),
                "hnorm.weight": (embed,),
                "eh_proj.weight": (embed, 2 * embed),
                "shared_head.norm.weight": (embed,),
            }
            tensors |= {"embed_tokens.weight": (vocab, embed), "shared_head.head.weight": (vocab, embed)}
        out |= {f"model.layers.{layer}.{name}": shape for name, shape in tensors.items()}
    out["model.norm.weight"] = (embed,)
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (vocab, embed)
    return out


def attention(c: Config) -> Shapes:
    embed, dim = c["hidden_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    out = {
        "q_proj.weight": (q, embed),
        "k_proj.weight": (kv, embed),
        "v_proj.weight": (kv, embed),
        "o_proj.weight": (embed, q),
    }
    if c["model_type"] == "qwen2":
        out |= {"q_proj.bias": (q,), "k_proj.bias": (kv,), "v_proj.bias": (kv,)}
    if c["model_type"].startswith("qwen3"):
        out |= {"q_norm.weight": (dim,), "k_norm.weight": (dim,)}
    return {f"self_attn.{name}": shape for name, shape in out.items()}


def latent_attention(c: Config) -> Shapes:
    embed, heads, q_lora, kv_lora = c["hidden_size"], c["num_attention_heads"], c["q_lora_rank"], c["kv_lora_rank"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    out = {"q_proj.weight": (heads * (nope + rope), embed)}
    if q_lora:
        out = {
            "q_a_proj.weight": (q_lora, embed),
            "q_a_layernorm.weight": (q_lora,),
            "q_b_proj.weight": (heads * (nope + rope), q_lora),
        }
    out |= {
        "kv_a_proj_with_mqa.weight": (kv_lora + rope, embed),
        "kv_a_layernorm.weight": (kv_lora,),
        "kv_b_proj.weight": (heads * (nope + value), kv_lora),
        "o_proj.weight": (embed, heads * value),
    }
    if "index_n_heads" in c:
        n, dim = c["index_n_heads"], c["index_head_dim"]
        out |= {
            "indexer.wq_b.weight": (n * dim, q_lora),
            "indexer.wk.weight": (dim, embed),
            "indexer.weights_proj.weight": (n, embed),
        }
        out |= {"indexer.k_norm.weight": (dim,), "indexer.k_norm.bias": (dim,)}
    return {f"self_attn.{name}": shape for name, shape in out.items()}


def feed_forward(c: Config, layer: int, fused: bool) -> Shapes:
    embed, mlp = c["hidden_size"], c["intermediate_size"]
    count = c.get("num_experts") or c.get("num_local_experts") or c.get("n_routed_experts")
    if not count or layer < c.get("first_k_dense_replace", 0):
        return gated("mlp", embed, mlp)
    is_mixtral = c["model_type"] == "mixtral"
    block = "block_sparse_moe" if is_mixtral and not fused else "mlp"
    width = mlp if is_mixtral else c["moe_intermediate_size"]
    out: Shapes = {f"{block}.gate.weight": (count, embed)}
    if "n_shared_experts" in c and c["model_type"] != "deepseek_v2":
        out["mlp.gate.e_score_correction_bias"] = (count,)
    if fused:
        out |= {
            f"{block}.experts.gate_up_proj": (count, 2 * width, embed),
            f"{block}.experts.down_proj": (count, embed, width),
        }
    else:
        names = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
        for expert in range(count):
            out |= gated(f"{block}.experts.{expert}", embed, width, names)
    if "n_shared_experts" in c:
        out |= gated("mlp.shared_experts", embed, width * c["n_shared_experts"])
    return out


def gated(
    prefix: str, embed: int, width: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Shapes:
    gate, up, down = (f"{prefix}.{name}.weight" for name in names)
    return {gate: (width, embed), up: (width, embed), down: (embed, width)}
