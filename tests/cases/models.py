"""Writes the tiny checkpoints that the tests convert, as transformers writes them: `PYTHONPATH=tests python
tests/cases/models.py FOLDER`.

`FOLDER/cases/<case>` are the inputs that MaxText's own converter was given (`digests-e591f30.json.gz`), random weights from
fixed seeds: cut down from the generator that made them, and checked against them tensor for tensor.
`FOLDER/models/<model>` are others, each beside `<model>.state.safetensors`, the model's `state_dict()`. Needs torch and
transformers (5.23.0 and 2.13.0 made the cases).
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from pathlib import Path

from lazily import lazily

safetensors = lazily("safetensors.torch")
t = lazily("transformers")
torch = lazily("torch")

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
SIGLIP = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=28,
    patch_size=14,
    num_channels=3,
)
# scaled as the 27B: 80 / 4 heads
GEMMA3 = dict(hidden_size=80, head_dim=24, query_pre_attn_scalar=20, num_hidden_layers=13, sliding_window=5)
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
UNEVEN_GEMMA4 = GEMMA4 | dict(
    vocab_size=200,
    hidden_size=40,
    head_dim=8,
    intermediate_size=56,
    num_hidden_layers=6,
    global_head_dim=24,
    vocab_size_per_layer_input=200,
)
GEMMA4_E4B = dict(
    num_hidden_layers=12,
    attention_k_eq_v=False,
    hidden_size_per_layer_input=12,
    vocab_size_per_layer_input=180,
    num_kv_shared_layers=6,
)
GEMMA4_AUDIO = dict(
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    subsampling_conv_channels=[8, 4],
    output_proj_dims=28,
    use_clipped_linears=False,
)
UNEVEN_GEMMA4_VISION = dict(
    hidden_size=36, intermediate_size=52, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3, head_dim=12, patch_size=4,
    position_embedding_size=30, pooling_kernel_size=2,
)  # fmt: skip
GEMMA4_UNIFIED = BASE | TIED | dict(
    vocab_size=200, hidden_size=40, head_dim=8, intermediate_size=56, num_hidden_layers=12, global_head_dim=24, num_global_key_value_heads=1,
    attention_k_eq_v=True, sliding_window=5,
)  # fmt: skip
GEMMA4_EMBEDDER = dict(patch_size=2, pooling_kernel_size=3, mm_embed_dim=36, mm_posemb_size=30, output_proj_dims=36)
DELTA_NET = MOE | dict(
    num_hidden_layers=8, shared_expert_intermediate_size=48, linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_value_head_dim=16,
    linear_num_key_heads=2, linear_num_value_heads=4,
)  # fmt: skip
UNEVEN_DELTA_NET = DELTA_NET | dict(
    num_hidden_layers=4, num_experts=3, linear_key_head_dim=12, linear_value_head_dim=20, linear_num_value_heads=6
)
QWEN_VISION = dict(
    depth=2, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=64, num_position_embeddings=16, patch_size=16, temporal_patch_size=2,
    spatial_merge_size=2,
)  # fmt: skip
UNEVEN_QWEN_VISION = QWEN_VISION | dict(
    depth=3, hidden_size=48, num_heads=3, intermediate_size=40, patch_size=4, deepstack_visual_indexes=[0, 2]
)
UNEVEN_QWEN3 = BASE | dict(head_dim=24, num_hidden_layers=2)
UNEVEN_QWEN3_MOE = UNEVEN_QWEN3 | MOE | dict(num_experts=5)
QWEN_AUDIO = dict(
    num_mel_bins=20, d_model=24, encoder_layers=2, encoder_attention_heads=3, encoder_ffn_dim=40, downsample_hidden_size=10, output_dim=64,
    n_window_infer=100,
)  # fmt: skip
QWEN_TALKER = dict(
    text_config=BASE | MOE | dict(num_hidden_layers=1, shared_expert_intermediate_size=48),
    code_predictor_config=BASE | dict(num_hidden_layers=1, num_code_groups=2), num_code_groups=2,
    thinker_hidden_size=64, accept_hidden_layer=1, spatial_merge_size=2,
)  # fmt: skip
QWEN_CODE2WAV = dict(
    codebook_size=16, hidden_size=16, num_attention_heads=2, num_key_value_heads=2, intermediate_size=24, num_hidden_layers=1, num_quantizers=2,
    decoder_dim=16, upsample_rates=[2], upsampling_ratios=[2],
)  # fmt: skip
V4 = dict(
    num_hidden_layers=7, num_key_value_heads=1, head_dim=32, qk_rope_head_dim=16, q_lora_rank=24, o_lora_rank=16, o_groups=2, moe_intermediate_size=48,
    n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, num_hash_layers=3, index_n_heads=2, index_head_dim=16, index_topk=4, hc_mult=4,
    compress_ratios=[0, 0, 4, 128, 4, 128, 4],
)  # fmt: skip
V4_PRO = V4 | dict(
    vocab_size=72, hidden_size=40, num_attention_heads=6, head_dim=26, qk_rope_head_dim=8, q_lora_rank=28, o_lora_rank=12, o_groups=2, intermediate_size=44,
    n_routed_experts=5, num_hidden_layers=6, num_hash_layers=2, index_n_heads=7, index_head_dim=10, hc_mult=3, compress_ratios=[128, 4, 128, 4, 128, 4],
)  # fmt: skip
LLAMA4 = dict(
    num_hidden_layers=8, head_dim=24, num_local_experts=4, intermediate_size=48, intermediate_size_mlp=80, floor_scale=3,
    attention_chunk_size=4,
)  # fmt: skip
LLAMA4_VISION = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14, vision_output_dim=40,
    projector_input_dim=40, projector_output_dim=40,
)  # fmt: skip
KIMI_VISION = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, pos_emb_height=4, pos_emb_width=4
)

# 7 layers, the indexers of 4 shared: one of the dense ones, one behind the boundary, and the last
GLM5 = V3 | INDEXER | dict(
    vocab_size=88, num_hidden_layers=7, first_k_dense_replace=2, n_group=1, topk_group=1, n_routed_experts=6, index_n_heads=5, index_head_dim=12,
    indexer_types=["full", "shared", "shared", "full", "shared", "full", "shared"],
)  # fmt: skip
HY3 = MOE | dict(
    head_dim=20, num_hidden_layers=3, num_experts=6, num_shared_experts=2, vocab_size=92, num_key_value_heads=1
)

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
        dict(
            text_config=BASE | TIED | dict(num_hidden_layers=8, query_pre_attn_scalar=16, vocab_size=240),
            vision_config=SIGLIP,
            mm_tokens_per_image=4,
        ),
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
    "gemma4-dense": (
        "Gemma4",
        dict(text_config=GEMMA4 | dict(enable_moe_block=False), vision_config=GEMMA4_VISION, audio_config=None),
        None,
    ),
    "gemma4-small": ("Gemma4", dict(text_config=GEMMA4_SMALL, vision_config=GEMMA4_VISION, audio_config=None), None),
}
# model -> the same, with other sizes
MODELS = {
    "llama": ("Llama", dict(num_key_value_heads=4, num_hidden_layers=2), "100KB"),
    "mistral": ("Mistral", dict(head_dim=32, intermediate_size=96, num_hidden_layers=3), "80KB"),
    "qwen3": ("Qwen3", dict(vocab_size=300, num_hidden_layers=2), "60KB"),
    "mixtral": (
        "Mixtral",
        dict(num_local_experts=3, num_experts_per_tok=2, intermediate_size=80, num_hidden_layers=2),
        "100KB",
    ),
    "deepseek_v3": ("DeepseekV3", V3 | dict(first_k_dense_replace=1, num_hidden_layers=3), "100KB"),
    "deepseek_v4": ("DeepseekV4", V4_PRO, None),
    "olmo3-grouped": ("Olmo3", dict(vocab_size=250, head_dim=16, num_hidden_layers=4, sliding_window=5), "100KB"),
    "gemma2-27b": (
        "Gemma2",
        TIED | dict(vocab_size=250, head_dim=24, query_pre_attn_scalar=20, sliding_window=5),
        "100KB",
    ),
    "gemma3-text": ("Gemma3", TIED | GEMMA3, "100KB"),
    "gemma3-vision": (
        "Gemma3",
        dict(
            text_config=BASE | TIED | GEMMA3,
            vision_config=SIGLIP
            | dict(
                hidden_size=48,
                num_attention_heads=3,
                intermediate_size=56,
                image_size=24,
                patch_size=6,
                vision_use_head=False,
            ),
            mm_tokens_per_image=4,
        ),
        "100KB",
    ),
    "llama4": ("Llama4", dict(text_config=BASE | LLAMA4, vision_config=LLAMA4_VISION), None),
    "llama4-dense": (
        "Llama4",
        dict(
            text_config=BASE | LLAMA4 | dict(interleave_moe_layer_step=2, use_qk_norm=False),
            vision_config=LLAMA4_VISION,
        ),
        "200KB",
    ),
    "kimi_k25": (
        "Kimi_K25",
        dict(
            text_config=BASE | V3 | dict(model_type="deepseek_v3", first_k_dense_replace=1, num_hidden_layers=3),
            vision_config=KIMI_VISION,
            projection_hidden_size=32,
            tie_word_embeddings=False,
        ),
        "100KB",
    ),
    "qwen3_5": (
        "Qwen3_5Moe",
        dict(
            text_config=BASE | UNEVEN_DELTA_NET,
            vision_config=QWEN_VISION
            | dict(depth=1, hidden_size=48, num_heads=3, intermediate_size=40, patch_size=4, spatial_merge_size=3),
        ),
        "100KB",
    ),
    "qwen3_vl": ("Qwen3VL", TIED | dict(text_config=UNEVEN_QWEN3, vision_config=UNEVEN_QWEN_VISION), "100KB"),
    "qwen3_vl_moe": ("Qwen3VLMoe", dict(text_config=UNEVEN_QWEN3_MOE | TIED, vision_config=UNEVEN_QWEN_VISION), None),
    "qwen3_omni": (
        "Qwen3OmniMoe",
        dict(
            thinker_config=dict(
                text_config=UNEVEN_QWEN3_MOE, vision_config=UNEVEN_QWEN_VISION, audio_config=QWEN_AUDIO
            ),
            talker_config=QWEN_TALKER,
            code2wav_config=QWEN_CODE2WAV,
        ),
        "200KB",
    ),
    "qwen3_5-text": ("Qwen3_5Moe", TIED | UNEVEN_DELTA_NET, "100KB"),
    "gemma4-vision": (
        "Gemma4",
        dict(
            text_config=BASE
            | UNEVEN_GEMMA4
            | dict(enable_moe_block=True, num_experts=3, top_k_experts=2, moe_intermediate_size=20),
            vision_config=UNEVEN_GEMMA4_VISION | dict(standardize=True),
            audio_config=None,
        ),
        "100KB",
    ),
    "gemma4-text": ("Gemma4", UNEVEN_GEMMA4 | dict(attention_k_eq_v=False), "60KB"),
    "gemma4-e4b": (
        "Gemma4",
        dict(
            text_config=BASE | UNEVEN_GEMMA4 | GEMMA4_E4B, vision_config=UNEVEN_GEMMA4_VISION, audio_config=GEMMA4_AUDIO
        ),
        "100KB",
    ),
    "glm5": ("GlmMoeDsa", GLM5, "100KB"),
    "glm5-full": ("GlmMoeDsa", GLM5 | dict(indexer_types=None, num_hidden_layers=3), None),
    "hy3": ("HYV3", HY3, "100KB"),
    "gemma4-12b": (
        "Gemma4Unified",
        dict(text_config=GEMMA4_UNIFIED, vision_config=GEMMA4_EMBEDDER, audio_config=dict(audio_embed_dim=28)),
        "100KB",
    ),
    "cosmos3": ("Cosmos3Omni", dict(text_config=UNEVEN_QWEN3, vision_config=UNEVEN_QWEN_VISION), "100KB"),
    "gemma4-12b-text": ("Gemma4Unified", GEMMA4_UNIFIED | dict(num_hidden_layers=6, attention_k_eq_v=False), None),
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


def make(
    kind: str, sizes: dict, shard: str | None, folder: Path, seed: int, dtype: str = "bfloat16"
) -> torch.nn.Module:
    """One model, saved by transformers."""
    torch.manual_seed(0)
    task, sizes = (
        ("ConditionalGeneration", sizes)
        if {"text_config", "thinker_config"} & sizes.keys()
        else ("CausalLM", BASE | sizes)
    )
    config = f"{kind}TextConfig" if task == "CausalLM" and hasattr(t, f"{kind}TextConfig") else f"{kind}Config"
    model = getattr(t, f"{kind}For{task}")(getattr(t, config)(**sizes)).to(getattr(torch, dtype))
    randomize(model, seed)
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    return model


def write_fused(model: torch.nn.Module, folder: Path) -> None:
    """Puts the model's own tensors, in one file, where transformers wrote them with fused experts taken apart."""
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    safetensors.save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors"
    )


def transpose_experts(model: torch.nn.Module, folder: Path) -> None:
    """Qwen 3 VL's fused experts as the hub's files have them, where transformers wrote them as they are in memory."""
    tensors = {
        name: tensor.mT.contiguous() if ".experts." in name else tensor
        for name, tensor in safetensors.load_file(folder / "model.safetensors").items()
    }
    safetensors.save_file(tensors, folder / "model.safetensors")


def fill_tables(model: torch.nn.Module) -> None:
    """DeepSeek V4's routing tables, which transformers fills with zeros: for each token experts of which none is twice."""
    generator = torch.Generator().manual_seed(4)
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):
            table.copy_(
                torch.rand(len(table), model.config.n_routed_experts, generator=generator).argsort(1)[
                    :, : table.shape[1]
                ]
            )


def respell_for_maxtext(model: torch.nn.Module, folder: Path) -> None:
    """DeepSeek V4 by the names that MaxText's mapping expects: those in memory, but for the head and the experts, which
    are one tensor each.
    """
    made = {}
    for name, values in model.state_dict().items():
        prefix, _, leaf = name.rpartition(".")
        parts = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}.get(leaf, ())
        for part, stacked in zip(parts, values.chunk(len(parts), 1) if parts else (), strict=True):
            made |= {f"{prefix}.{expert}.{part}.weight": one.clone() for expert, one in enumerate(stacked)}
        if not parts:
            made[name.replace("lm_head.", "head.")] = values
    safetensors.save_file(made, folder / "model.safetensors")


def respell_as_on_the_hub(model: torch.nn.Module, folder: Path) -> None:
    """DeepSeek V4 as its makers released it, tables and float32 tensors and an MTP layer included; what transformers
    wrote goes beside it.
    """
    generator = torch.Generator().manual_seed(4)
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):
            table.copy_(torch.randint(model.config.n_routed_experts, table.shape, generator=generator))
    model.save_pretrained(folder)
    shutil.move(folder / "model.safetensors", saved := folder.with_name(f"{folder.name}.saved.safetensors"))
    names = {"embed_tokens.": "embed.", "hc_head.hc_": "hc_head_", ".attn.norm.": ".attn.kv_norm."}
    wide = ("attn_sink", "_fn", "_base", "_scale", "gate.bias", ".ape")
    made = {}
    for name, values in safetensors.load_file(saved).items():
        name = name.removeprefix("model.")
        for theirs, hub in names.items():
            name = name.replace(theirs, hub)
        made[name] = values.float() if name.endswith(wide) else values
    last = f"layers.{model.config.num_hidden_layers - 1}."
    made |= {
        f"mtp.0.{name.removeprefix(last)}": values.clone()
        for name, values in made.items()
        if name.startswith((last, "hc_head_", "norm."))
    }
    safetensors.save_file(made, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    lists = {key: config.pop(key) for key in ("layer_types", "mlp_layer_types", "compress_rates")}
    rates = lists["compress_rates"] | {"sliding_attention": 0}
    config |= {
        "compress_ratios": [*(rates[kind] for kind in lists["layer_types"]), 0],
        "num_hash_layers": lists["mlp_layer_types"].count("hash_moe"),
    }
    (folder / "config.json").write_text(json.dumps(config))


def add_mtp(source: Path, folder: Path) -> None:
    """`deepseek3-mtp-standalone`: the case deepseek3 with a multi-token-prediction layer behind its last, in one file."""
    tensors = {
        name: tensor for file in source.glob("*.safetensors") for name, tensor in safetensors.load_file(file).items()
    }
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
    safetensors.save_file(tensors, folder / "model.safetensors")


# the cases and models that aren't as save_pretrained writes them
REWRITTEN = {
    "qwen3.5": write_fused,
    "deepseek4": respell_for_maxtext,
    "deepseek_v4": respell_as_on_the_hub,
    "qwen3_vl_moe": transpose_experts,
}


def main(out: Path) -> None:
    warnings.filterwarnings("ignore")
    for name, (kind, sizes, shard) in CASES.items():
        dtype = "float32" if name.endswith("-fp32") else "bfloat16"
        model = make(kind, sizes, shard, out / "cases" / name, sum(map(ord, name.removesuffix("-fp32"))), dtype)
        if name in REWRITTEN:
            REWRITTEN[name](model, out / "cases" / name)
    add_mtp(out / "cases" / "deepseek3", out / "cases" / "deepseek3-mtp-standalone")
    for seed, (name, (kind, sizes, shard)) in enumerate(MODELS.items()):
        model = make(kind, sizes, shard, out / "models" / name, seed)
        if name in REWRITTEN:
            REWRITTEN[name](model, out / "models" / name)
        # tied tensors apart
        state = {key: value.clone(memory_format=torch.contiguous_format) for key, value in model.state_dict().items()}
        safetensors.save_file(state, out / "models" / f"{name}.state.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
