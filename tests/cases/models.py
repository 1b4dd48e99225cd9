"""Writes the tiny checkpoints that the tests convert, as transformers writes them: `python models.py FOLDER`.

`FOLDER/cases/<case>` are the inputs that MaxText's own converter was given (`digests.json.gz`), random weights from fixed seeds: cut down from
the generator that made them, and checked against them tensor for tensor. `FOLDER/models/<model>` are others, each beside
`<model>.state.safetensors`, the model's `state_dict()`. Needs torch and transformers (5.23.0 and 2.13.0 made the cases).
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
import transformers as t
from safetensors.torch import load_file, save_file

BASE = dict(
    vocab_size=256, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=128, max_position_embeddings=128,
    num_hidden_layers=4, tie_word_embeddings=False,
)  # fmt: skip
MOE = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48)
MLA = dict(
    kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, num_key_value_heads=4, moe_intermediate_size=48, n_routed_experts=8,
    num_experts_per_tok=2, num_hidden_layers=5,
)  # fmt: skip
V3 = MLA | dict(first_k_dense_replace=2, q_lora_rank=24, n_shared_experts=1, n_group=2, topk_group=1)
V2 = MLA | dict(first_k_dense_replace=1, q_lora_rank=None, n_shared_experts=2, n_group=1, topk_group=1)
INDEXER = dict(index_n_heads=4, index_head_dim=16, index_topk=8)

TIED = dict(tie_word_embeddings=True)
SIGLIP = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14, num_channels=3)
GEMMA4_VISION = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16, patch_size=16,
    position_embedding_size=64,
)  # fmt: skip
GEMMA4 = BASE | TIED | dict(
    num_hidden_layers=12, num_global_key_value_heads=1, global_head_dim=32, attention_k_eq_v=True, hidden_size_per_layer_input=0,
    vocab_size_per_layer_input=256, num_kv_shared_layers=0,
)  # fmt: skip
GEMMA4_SMALL = BASE | TIED | dict(
    num_hidden_layers=10, num_key_value_heads=1, global_head_dim=32, hidden_size_per_layer_input=8, vocab_size_per_layer_input=256, num_kv_shared_layers=5,
    use_double_wide_mlp=True, enable_moe_block=False, layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 2,
)  # fmt: skip
DELTA_NET = MOE | dict(
    num_hidden_layers=8, shared_expert_intermediate_size=48, linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_value_head_dim=16,
    linear_num_key_heads=2, linear_num_value_heads=4,
)  # fmt: skip
QWEN_VISION = dict(
    depth=2, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=64, num_position_embeddings=16, patch_size=16, temporal_patch_size=2,
    spatial_merge_size=2,
)  # fmt: skip
V4 = dict(
    num_hidden_layers=7, num_key_value_heads=1, head_dim=32, qk_rope_head_dim=16, q_lora_rank=24, o_lora_rank=16, o_groups=2, moe_intermediate_size=48,
    n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, num_hash_layers=3, index_n_heads=2, index_head_dim=16, index_topk=4, hc_mult=4,
    compress_ratios=[0, 0, 4, 128, 4, 128, 4],
)  # fmt: skip

# case -> (class, what its config has besides BASE, or a multimodal model's parts, max_shard_size)
CASES = {
    "llama3.1": ("Llama", {}, "300KB"),
    "llama3.1-fp32": ("Llama", {}, None),
    "qwen2.5": ("Qwen2", {}, None),
    "qwen2.5-tied": ("Qwen2", dict(tie_word_embeddings=True), None),
    "qwen3": ("Qwen3", {}, None),
    "qwen3-tied": ("Qwen3", dict(tie_word_embeddings=True), None),
    "qwen3-moe": ("Qwen3Moe", MOE, "300KB"),
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2), None),
    "deepseek2": ("DeepseekV2", V2, None),
    "deepseek3": ("DeepseekV3", V3, "300KB"),
    "deepseek3.2": ("DeepseekV32", V3 | INDEXER, None),
    "deepseek4": ("DeepseekV4", V4, None),
    "gpt-oss": ("GptOss", dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=48), None),
    "olmo3": ("Olmo3", dict(num_hidden_layers=8, num_key_value_heads=4), None),
    "qwen3-next": ("Qwen3Next", DELTA_NET, None),
    "qwen3.5": ("Qwen3_5Moe", dict(text_config=BASE | DELTA_NET, vision_config=QWEN_VISION), None),
    "gemma2": ("Gemma2", TIED | dict(vocab_size=240, query_pre_attn_scalar=16), None),
    "gemma2-fp32": ("Gemma2", TIED | dict(vocab_size=240, query_pre_attn_scalar=16), None),
    "gemma3": (
        "Gemma3",
        dict(text_config=BASE | TIED | dict(num_hidden_layers=8, query_pre_attn_scalar=16, vocab_size=240), vision_config=SIGLIP, mm_tokens_per_image=4),
        None,
    ),
    "gemma4-moe": (
        "Gemma4",
        dict(
            text_config=GEMMA4 | dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=48),
            vision_config=GEMMA4_VISION,
            audio_config=None,
        ),
        None,
    ),
    "gemma4-dense": ("Gemma4", dict(text_config=GEMMA4 | dict(enable_moe_block=False), vision_config=GEMMA4_VISION, audio_config=None), None),
    "gemma4-small": ("Gemma4", dict(text_config=GEMMA4_SMALL, vision_config=GEMMA4_VISION, audio_config=None), None),
}
# model -> the same, with other sizes
MODELS = {
    "llama": ("Llama", dict(num_key_value_heads=4, num_hidden_layers=2), "100KB"),
    "mistral": ("Mistral", dict(head_dim=32, intermediate_size=96, num_hidden_layers=3), "80KB"),
    "qwen3": ("Qwen3", dict(vocab_size=300, num_hidden_layers=2), "60KB"),
    "mixtral": ("Mixtral", dict(num_local_experts=3, num_experts_per_tok=2, intermediate_size=80, num_hidden_layers=2), "100KB"),
    "deepseek_v3": ("DeepseekV3", V3 | dict(first_k_dense_replace=1, num_hidden_layers=3), "100KB"),
}


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Random weights; norms around 1, but for Gemma's, which add 1 themselves."""
    around = 0 if "gemma" in type(model).__name__.lower() else 1
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_floating_point() or "inv_freq" in name:
                continue
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
            tensor.copy_(around + 0.2 * noise if "norm" in name and name.endswith("weight") else noise * 0.1)


def make(kind: str, sizes: dict, shard: str | None, folder: Path, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """One model, saved by transformers."""
    torch.manual_seed(0)
    task, sizes = ("ConditionalGeneration", sizes) if "text_config" in sizes else ("CausalLM", BASE | sizes)
    model = getattr(t, f"{kind}For{task}")(getattr(t, f"{kind}Config")(**sizes)).to(dtype)
    randomize(model, seed)
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    return model


def add_mtp(source: Path, folder: Path) -> None:
    """`deepseek3-mtp-standalone`: the case deepseek3 with a multi-token-prediction layer behind its last, in one file."""
    tensors = {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
    generator = torch.Generator().manual_seed(77)

    def noise(like: torch.Tensor, norm: bool) -> torch.Tensor:
        values = torch.randn(like.shape, generator=generator)
        return (1 + 0.2 * values if norm else values * 0.1).to(torch.bfloat16)

    old, new, norm = "model.layers.4.", "model.layers.5.", tensors["model.norm.weight"]
    for name in sorted(name for name in tensors if name.startswith(old)):
        tensors[name.replace(old, new)] = noise(tensors[name], "norm" in name)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{new}{name}.weight"] = noise(norm, True)
    tensors[f"{new}eh_proj.weight"] = noise(torch.empty(len(norm), 2 * len(norm)), False)
    tensors[f"{new}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{new}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    folder.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    save_file(tensors, folder / "model.safetensors")


def main(out: Path) -> None:
    warnings.filterwarnings("ignore")
    for name, (kind, sizes, shard) in CASES.items():
        dtype = torch.float32 if name.endswith("-fp32") else torch.bfloat16
        make(kind, sizes, shard, out / "cases" / name, sum(map(ord, name.removesuffix("-fp32"))), dtype)
    add_mtp(out / "cases" / "deepseek3", out / "cases" / "deepseek3-mtp-standalone")
    for seed, (name, (kind, sizes, shard)) in enumerate(MODELS.items()):
        model = make(kind, sizes, shard, out / "models" / name, seed)
        save_file({key: value.contiguous() for key, value in model.state_dict().items()}, out / "models" / f"{name}.state.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
