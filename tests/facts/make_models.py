"""Makes `model_mappings/maxtext_models.json`: what MaxText (e591f30) says of its models, as far as a forward pass
depends on it. Whole floats are integers, but in the base, whose values have MaxText's types.

    python tests/facts/make_models.py MODELS.json

`MODELS.json` holds `base`, the defaults of MaxText's `base.yml` for the keys that a model's file sets, and `models`,
what each file says (`src/maxtext/configs/models`). Kept are the keys of the architecture, of a model's those that its
file says, also as the base does. What no file of `MODELS.json` says is `OTHERS`: MaxText's remaining models, as changes of one that is
like them, and names that Weightbeam takes for models that MaxText runs under another one's.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).parents[2] / "model_mappings" / "maxtext_models.json"
# training, data, sharding, how a layer is computed; modes of a run; what only models without a release have
LEFT_OUT = re.compile(
    r"adam_|opt_type|attention$|checkpoint_period|data_sharding|dataset|enable_dropout|.*eval|engram_|gradient_|image_placeholder"
    r"|load_balance|log(?:ical_axis|its_dot|_moe)|max_target|megablox|mesh_axes|override|remove_size|routed_bias_update|scan_layers|shard_mode"
    r"|sparse_matmul|tokenizer|use_(?:audio|batch|iota|multimodal)|gdn_chunk|trainable_position"
)
UNSUPPORTED = re.compile(r"deepseek-custom|qwen3-custom")  # no release has their layers
VISION = "vision_encoder_block"  # MaxText's default is in its types, not in base.yml

SIZES = ("base_emb_dim", "base_num_query_heads", "base_num_kv_heads", "base_mlp_dim", "base_num_decoder_layers")
LLAMA32 = dict(
    vocab_size=128256,
    rope_max_timescale=500000,
    rope_type="llama3.1",
    logits_via_embedding=True,
    normalize_embedding_logits=False,
)
NO_TOWER = dict(
    intermediate_size_for_vit=5632, num_hidden_layers_for_vit=34, rope_theta_for_vit=10000
)  # base.yml's: the file says none
WEAVER = dict(
    logits_via_embedding=False, normalize_embedding_logits=True, hidden_size_for_vit=1152, intermediate_size_for_vit=4304, num_hidden_layers_for_vit=27,
    deepstack_visual_indexes_for_vit=[8, 16, 24],
)  # fmt: skip
RUN_AS = {  # names that MaxText hasn't got, or under which its router is wrong (Kimi K2), and the one that serves
    "kimi-k2-1t": "deepseek3-671b", "llama3-405b": "llama3-70b", "llama3.2-1b": "llama3.1-8b", "llama3.2-3b": "llama3.1-8b",
    "qwen3-coder-480b-a35b": "qwen3-480b-a35b", "cosmos3-nano-reasoner": "weaver-mini", "cosmos3-super-reasoner": "weaver-max",
}  # fmt: skip


def sizes(*numbers: int, **others: Any) -> dict[str, Any]:
    """Embedding, query heads, key heads, MLP, layers."""
    return dict(zip(SIZES, numbers, strict=True)) | others


# what Weightbeam tells MaxText, and no file of a model's sets: base.yml's
TRAINING = dict(indexer_sparse_training=False)
# models of MaxText's branches: src/maxtext/configs/models of pull requests 4832 (83a6fce, 09ca06a) and 4704 (75d2826), and the
# keys that base.yml has only there
BRANCHES = dict(use_index_share=False, index_share_pattern="FSSS", indexer_rope_interleave=False)
GLM5 = sizes(
    6144, 64, 64, 12288, 78, decoder_block="glm5", vocab_size=154880, normalization_layer_epsilon=1e-5, q_lora_rank=2048, qk_nope_head_dim=192,
    v_head_dim=256, norm_topk_prob=True, indexer_n_heads=32, indexer_rope_interleave=True, rope_factor=1,
)  # fmt: skip
GLM = {
    "glm5.1-744b": dict(rope_max_timescale=1000000, max_position_embeddings=202752),
    "glm5.2-744b": dict(rope_max_timescale=8000000, max_position_embeddings=1048576, use_index_share=True, index_share_pattern="FF" + "FSSS" * 19),
}  # fmt: skip
HY3 = sizes(
    4096, 64, 8, 13312, 80, decoder_block="hy3", vocab_size=120832, head_dim=128, normalization_layer_epsilon=1e-5, first_num_dense_layers=1,
    num_experts=192, num_experts_per_tok=8, base_moe_mlp_dim=1536, shared_experts=1, routed_score_func="sigmoid", routed_bias=True,
    routed_scaling_factor=2.826, norm_topk_prob=True, use_qk_norm=True, rope_max_timescale=11158840,
)  # fmt: skip
# src/maxtext/configs/models of the name; Llama 3.2: its releases' config.json; gemma4-12b: branch agagik-gemma4-12b, 85b12b8;
# weaver: 0.2.5; cosmos3: branch cosmos3_nano_bringup, d6b3a0a, and c4caeb9; the first word is the model that it is like
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek2-236b": ("deepseek2-16b", sizes(5120, 128, 128, 12288, 60, base_moe_mlp_dim=1536, num_experts=160, q_lora_rank=1536, routed_scaling_factor=16.0)),
    **{name: (name, dict(use_indexer=True)) for name in ("deepseek4-284b", "deepseek4-tiny")},  # their files in 0.2.5
    "gemma3-27b": ("gemma3-12b", sizes(5376, 32, 16, 21504, 62, head_dim=128)),
    "gemma4-31b": ("gemma4-26b", sizes(5376, 32, 16, 21504, 60, global_num_kv_heads=4, num_experts=1, num_experts_per_tok=1, shared_experts=0,
                                       base_moe_mlp_dim=-1, norm_topk_prob=False)),
    "gemma4-12b": ("gemma4-31b", sizes(3840, 16, 8, 15360, 48, global_num_kv_heads=1) | NO_TOWER | dict(
        vision_encoder_block="gemma4_unified", patch_size_for_vit=48, conv_stride_for_vit=48, hidden_size_for_vit=3840, num_position_embeddings_for_vit=1120)),
    "weaver-mini": ("qwen3-vl-4b", sizes(4096, 32, 8, 12288, 36, out_hidden_size_for_vit=4096) | WEAVER),
    "weaver-max": ("qwen3-vl-4b", sizes(5120, 64, 8, 25600, 64, out_hidden_size_for_vit=5120) | WEAVER),
    "cosmos3-nano-reasoner": ("weaver-mini", {}),
    "cosmos3-super-reasoner": ("weaver-max", {}),
    "gpt-oss-120b": ("gpt-oss-20b", sizes(2880, 64, 8, 2880, 36, num_experts=128)),
    "llama3.1-70b": ("llama3.3-70b", {}),
    "llama3.2-1b": ("llama3.1-8b", sizes(2048, 32, 8, 8192, 16, head_dim=64) | LLAMA32),
    "llama3.2-3b": ("llama3.1-8b", sizes(3072, 24, 8, 8192, 28, head_dim=128) | LLAMA32),
    "mixtral-8x22b": ("mixtral-8x7b", sizes(6144, 48, 8, 16384, 56, base_moe_mlp_dim=16384, vocab_size=32768)),
    **{name: ("deepseek3.2-671b", GLM5 | changes) for name, changes in GLM.items()},
    "hy3-295b": ("", HY3),
    "olmo3-32b": ("olmo3-7b", sizes(5120, 40, 8, 27648, 64)),
    "qwen2.5-14b": ("qwen2.5-7b", sizes(5120, 40, 8, 13824, 48)),
    "qwen3-coder-480b-a35b": ("qwen3-480b-a35b", {}),
    "qwen3-30b-a3b": ("qwen3-30b-a3b-base", dict(rope_max_timescale=10000000)),
    "qwen3-32b": ("qwen3-14b", sizes(5120, 64, 8, 25600, 64)),
    "qwen3.5-397b-a17b": ("qwen3.5-35b-a3b", sizes(4096, 32, 2, 1024, 60, base_moe_mlp_dim=1024, num_experts=512, num_experts_per_tok=10,
                                                   gdn_num_value_heads=64, out_hidden_size_for_vit=4096)),
}  # fmt: skip


def parsed(value: Any) -> Any:
    """YAML 1.1 reads `1e-06` as text."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"\d+(\.\d*)?e-?\d+", value) else value


def clean(value: Any) -> Any:
    """The same, whole floats as integers."""
    value = parsed(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def compact(found: dict[str, Any]) -> dict[str, Any]:
    """`base` and `models`, as the package holds them."""
    base = (
        {key: parsed(value) for key, value in found["base"].items() if not LEFT_OUT.match(key)}
        | TRAINING
        | BRANCHES
        | {VISION: ""}
    )
    models = {
        name: {key: clean(value) for key, value in said.items() if key in base}
        for name, said in found["models"].items()
        if not UNSUPPORTED.match(name)
    }
    for name, (like, changes) in OTHERS.items():
        models[name] = models.get(like, {}) | changes
    for name in models:  # to MaxText the name says it
        if name.startswith("llama3.1-"):
            models[name]["rope_type"] = "llama3.1"
    models = {name: dict(sorted(said.items())) for name, said in sorted(models.items())}
    return {"base": dict(sorted(base.items())), "run_as": RUN_AS, "models": models}


def text(table: dict[str, Any]) -> str:
    """As JSON, a model a line."""
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(said)}" for name, said in table["models"].items())
    return f'{{\n  "base": {json.dumps(table["base"])},\n  "run_as": {json.dumps(table["run_as"])},\n  "models": {{\n{lines}\n  }}\n}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the table of MaxText's models.")
    parser.add_argument("models", type=Path)
    table = compact(json.loads(parser.parse_args().models.read_text()))
    OUTPUT.write_text(text(table))
    print(f"{len(table['models'])} models, {len(table['base'])} keys")


if __name__ == "__main__":
    main()
