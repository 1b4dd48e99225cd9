"""Writes tiny models and adapters of each kind with transformers and PEFT, and what PEFT merges of them: `python
make_adapters.py FOLDER`.

`FOLDER/<case>/base` is the model, `adapter` the adapter as PEFT saves it, and `merged.safetensors` the parameters after
`merge_and_unload`, by their names in memory. All are float32; adapters have random factors on both sides.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
import transformers as t
from safetensors.torch import load_file, save_file

SIZES = dict(
    vocab_size=48, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=56, num_hidden_layers=2,
    max_position_embeddings=64, tie_word_embeddings=False,
)  # fmt: skip
EXPERTS = SIZES | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

LLAMA = (t.LlamaForCausalLM, t.LlamaConfig(**SIZES))
QWEN2 = (t.Qwen2ForCausalLM, t.Qwen2Config(**SIZES))
TIED = (t.Qwen3ForCausalLM, t.Qwen3Config(**SIZES | dict(tie_word_embeddings=True)))
GEMMA = (t.GemmaForCausalLM, t.GemmaConfig(**SIZES | dict(tie_word_embeddings=True)))
STARCODER2 = (t.Starcoder2ForCausalLM, t.Starcoder2Config(**SIZES | dict(tie_word_embeddings=True)))  # without a table
QWEN3_MOE = (t.Qwen3MoeForCausalLM, t.Qwen3MoeConfig(**EXPERTS))
# hidden = 2 · intermediate
SQUARE = (t.Qwen3MoeForCausalLM, t.Qwen3MoeConfig(**EXPERTS | dict(moe_intermediate_size=16)))
MIXTRAL = (t.MixtralForCausalLM, t.MixtralConfig(**SIZES | dict(num_local_experts=4, num_experts_per_tok=2)))
GPT_OSS = (
    t.GptOssForCausalLM,
    t.GptOssConfig(**SIZES | dict(num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"] * 2)),
)
LLAVA = (
    t.LlavaForConditionalGeneration,
    t.LlavaConfig(
        text_config=t.LlamaConfig(**SIZES),
        vision_config=t.CLIPVisionConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
        ),
    ),
)
VISION = dict(hidden_size=32, depth=1, num_heads=2)
ROPE = dict(rope_type="default", rope_theta=1e4)
MROPE = ROPE | dict(mrope_section=[1, 1, 2])
QWEN2_VL = (
    t.Qwen2VLForConditionalGeneration,
    t.Qwen2VLConfig(
        text_config=SIZES | dict(rope_parameters=MROPE), vision_config=VISION | dict(embed_dim=32, mlp_ratio=2)
    ),
)
QWEN2_5_VL = (
    t.Qwen2_5_VLForConditionalGeneration,
    t.Qwen2_5_VLConfig(
        text_config=SIZES | dict(rope_parameters=MROPE),
        vision_config=VISION | dict(out_hidden_size=32, intermediate_size=48, fullatt_block_indexes=[0]),
    ),
)
MLLAMA = (
    t.MllamaForConditionalGeneration,
    t.MllamaConfig(
        text_config=SIZES | dict(cross_attention_layers=[1], rope_parameters=ROPE, pad_token_id=0),
        vision_config=dict(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_global_layers=1, attention_heads=2, image_size=28, patch_size=14,
            vision_output_dim=64, intermediate_layers_indices=[0],
        ),
    ),
)  # fmt: skip
PHIMOE = (t.PhimoeForCausalLM, t.PhimoeConfig(**SIZES | dict(num_local_experts=4)))
GRANITE = (t.GraniteMoeForCausalLM, t.GraniteMoeConfig(**SIZES | dict(num_local_experts=4, num_experts_per_tok=2)))
GPT_NEOX = (t.GPTNeoXForCausalLM, t.GPTNeoXConfig(**SIZES))
GPT2 = (t.GPT2LMHeadModel, t.GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=4, n_positions=64))

# the model, and the adapter's LoraConfig
CASES: dict[str, tuple[tuple[type, Any], dict[str, Any]]] = {
    "plain": (LLAMA, dict(r=4, lora_alpha=6, target_modules=LINEAR)),
    "second": (LLAMA, dict(r=3, lora_alpha=7, target_modules=["q_proj", "down_proj"])),
    # as many ranks as layers
    "one-layer": (LLAMA, dict(r=2, lora_alpha=3, target_modules=LINEAR, layers_to_transform=[1])),
    "rslora": (LLAMA, dict(r=4, lora_alpha=6, target_modules=LINEAR, use_rslora=True)),
    "patterns": (
        LLAMA,
        dict(r=4, lora_alpha=6, target_modules=LINEAR, rank_pattern={"layers.1.self_attn.q_proj": 2, "v_proj": 5}, alpha_pattern={r".*\.1\..*down_proj": 11}),
    ),
    "dora": (LLAMA, dict(r=4, lora_alpha=6, target_modules=LINEAR, use_dora=True)),
    "lora_bias": (QWEN2, dict(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj"], lora_bias=True)),
    "bias-all": (QWEN2, dict(r=4, lora_alpha=6, target_modules=["q_proj", "o_proj"], bias="all")),
    "bias-lora_only": (QWEN2, dict(r=4, lora_alpha=6, target_modules=["q_proj", "o_proj"], bias="lora_only")),
    "modules_to_save": (LLAMA, dict(r=4, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens", "norm"])),
    "embedding": (LLAMA, dict(r=4, lora_alpha=6, target_modules=["embed_tokens", "lm_head", "v_proj"])),
    "embedding-dora": (LLAMA, dict(r=4, lora_alpha=6, target_modules=["embed_tokens", "v_proj"], use_dora=True)),
    "embedding-tied": (TIED, dict(r=4, lora_alpha=6, target_modules=["embed_tokens", "v_proj"])),
    "head-tied": (TIED, dict(r=4, lora_alpha=6, target_modules=["lm_head", "v_proj"])),
    "both-tied": (TIED, dict(r=4, lora_alpha=6, target_modules=["embed_tokens", "lm_head", "v_proj"])),
    "embedding-dora-tied": (TIED, dict(r=4, lora_alpha=6, target_modules=["embed_tokens", "v_proj"], use_dora=True)),
    "head-dora-tied": (TIED, dict(r=4, lora_alpha=6, target_modules=["lm_head"], use_dora=True)),
    "both-dora-tied": (TIED, dict(r=4, lora_alpha=6, target_modules=["embed_tokens", "lm_head"], use_dora=True)),
    "saved-embedding-tied": (TIED, dict(r=4, target_modules=["v_proj"], modules_to_save=["embed_tokens"])),
    "saved-head-tied": (TIED, dict(r=4, target_modules=["v_proj"], modules_to_save=["lm_head"])),
    "saved-embedding-tying": (TIED, dict(r=4, target_modules=["v_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True)),
    "saved-head-tying": (TIED, dict(r=4, target_modules=["v_proj"], modules_to_save=["lm_head"], ensure_weight_tying=True)),
    "embedding-tying": (TIED, dict(r=4, lora_alpha=6, target_modules=["embed_tokens", "v_proj"], ensure_weight_tying=True)),
    "untied-tying": (LLAMA, dict(r=4, lora_alpha=6, target_modules=["embed_tokens", "v_proj"], ensure_weight_tying=True)),
    "both-tied-gemma": (GEMMA, dict(r=4, lora_alpha=6, target_modules=["embed_tokens", "lm_head", "v_proj"])),
    "both-tied-starcoder2": (STARCODER2, dict(r=4, lora_alpha=6, target_modules=["embed_tokens", "lm_head", "v_proj"])),
    "llava": (LLAVA, dict(r=4, lora_alpha=6, target_modules=[*LINEAR, "lm_head", "linear_1", "fc1"], use_dora=True)),
    "fan_in_fan_out": (GPT2, dict(r=4, lora_alpha=6, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)),
    "fan_in_fan_out-dora": (GPT2, dict(r=4, lora_alpha=6, target_modules=["c_attn"], fan_in_fan_out=True, use_dora=True)),
    "experts": (QWEN3_MOE, dict(r=3, lora_alpha=6, target_modules=["q_proj"], target_parameters=FUSED)),
    "experts-router": (QWEN3_MOE, dict(r=3, lora_alpha=6, target_modules=[], target_parameters=["mlp.gate.weight", FUSED[1]])),
    "experts-up": (QWEN3_MOE, dict(r=3, lora_alpha=6, target_modules=[], target_parameters=FUSED[:1], rank_pattern={"gate_up_proj": 2})),
    "experts-square": (SQUARE, dict(r=3, lora_alpha=6, target_modules=[], target_parameters=FUSED)),
    "experts-mixtral": (MIXTRAL, dict(r=3, lora_alpha=6, target_modules=["q_proj"], target_parameters=FUSED)),
    "router-mixtral": (MIXTRAL, dict(r=4, lora_alpha=6, target_modules=["q_proj", "gate"])),
    "experts-gpt_oss": (GPT_OSS, dict(r=3, lora_alpha=6, target_modules=["q_proj", "o_proj"], target_parameters=FUSED)),
    # patterns are of a parameter's name, not of its module's
    "weight-patterns": (
        LLAMA,
        dict(r=4, lora_alpha=7, target_modules=["v_proj"], target_parameters=["q_proj.weight"], rank_pattern={"q_proj.weight": 2},
             alpha_pattern={"q_proj.weight": 3}),
    ),
    "weight-of-module": (
        LLAMA, dict(r=4, lora_alpha=7, target_modules=["v_proj"], target_parameters=["q_proj.weight"], alpha_pattern={"self_attn.q_proj": 3})
    ),
    "qwen2_vl": (QWEN2_VL, dict(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj", "qkv", "lm_head"])),
    "qwen2_5_vl": (QWEN2_5_VL, dict(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj", "qkv", "lm_head"])),
    "mllama": (MLLAMA, dict(r=4, lora_alpha=6, target_modules=["q_proj", "fc1", "multi_modal_projector", "lm_head"])),
    "phimoe": (PHIMOE, dict(r=4, lora_alpha=6, target_modules=["q_proj", "router"])),
    "granitemoe": (
        GRANITE,
        dict(r=3, lora_alpha=6, target_modules=["q_proj"],
             target_parameters=[f"block_sparse_moe.{name}" for name in ("experts.gate_up_proj", "experts.down_proj", "router.weight")]),
    ),
    "gpt_neox": (GPT_NEOX, dict(r=4, lora_alpha=6, target_modules=["query_key_value", "lm_head"])),
    # PEFT makes parameters' names of them, without a module's
    "experts-all-linear": (MIXTRAL, dict(r=3, lora_alpha=6, target_modules="all-linear")),
    "experts-as-modules": (QWEN3_MOE, dict(r=3, lora_alpha=6, target_modules=LINEAR)),
    # PEFT knows embeddings by two names, and this isn't one
    "saved-wte-tying": (GPT2, dict(r=4, target_modules=["c_attn"], modules_to_save=["wte"], ensure_weight_tying=True)),
}  # fmt: skip
PER_EXPERT = {"v4": (QWEN3_MOE, ("gate_proj", "up_proj", "down_proj")), "v4-mixtral": (MIXTRAL, ("w1", "w3", "w2"))}


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Random parameters, factors of adapters and trained copies among them; magnitudes are around the norms that they
    began with.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(tensor * (1 + 0.1 * noise) if "magnitude" in name else 0.2 * noise)


def write_case(folder: Path, model: tuple[type, Any], config: dict[str, Any], seed: int, **saving: Any) -> None:
    """One case; `saving` is for PEFT's `save_pretrained`."""
    made = model[0](copy.deepcopy(model[1]))  # PEFT notes in it that it has untied the head
    randomize(made, seed)
    made.save_pretrained(folder / "base")
    wrapped = peft.get_peft_model(made, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **config))
    trainable = torch.nn.ParameterDict(
        {name.replace(".", "/"): value for name, value in wrapped.named_parameters() if value.requires_grad}
    )
    randomize(trainable, seed + 1)
    wrapped.save_pretrained(folder / "adapter", **saving)
    save_merged(wrapped, folder)


def write_own_rows(folder: Path) -> None:
    """Rows of the embedding were made after the base was saved: PEFT saves its copy with the adapter, and loads it."""
    made = LLAMA[0](LLAMA[1])
    randomize(made, 7)
    made.save_pretrained(folder / "base")
    with torch.no_grad():
        made.model.embed_tokens.weight[40:] = 1.0
    config = dict(r=4, lora_alpha=6, target_modules=["embed_tokens", "q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(made, peft.LoraConfig(init_lora_weights=False, **config)).save_pretrained(folder / "adapter")
    save_loaded(folder)


def write_saved_layers(folder: Path) -> None:
    """Of a tied model, both layers of its vocabulary saved with the adapter: PEFT loads them into the one weight."""
    made = TIED[0](copy.deepcopy(TIED[1]))
    randomize(made, 7)
    made.save_pretrained(folder / "base")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(made, config)
    with torch.no_grad():
        made.model.embed_tokens.weight += 0.25
    wrapped.save_pretrained(folder / "adapter", save_embedding_layers=True)
    save_merged(wrapped, folder)


def write_flagged(folder: Path) -> None:
    """Linear layers said to be stored as (in, out): PEFT sets the flag back where it loads them."""
    write_case(folder, LLAMA, dict(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"]), 7)
    path = folder / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fan_in_fan_out": True}))
    save_loaded(folder)


def save_loaded(folder: Path) -> None:
    """What PEFT merges of the files."""
    save_merged(peft.PeftModel.from_pretrained(LLAMA[0].from_pretrained(folder / "base"), folder / "adapter"), folder)


def save_merged(wrapped: Any, folder: Path) -> None:
    """What PEFT merges; it must not be the base."""
    merged = wrapped.merge_and_unload()
    save_file(
        {name: value.clone().contiguous() for name, value in merged.state_dict().items()}, folder / "merged.safetensors"
    )


def write_per_expert(folder: Path, model: tuple[type, Any], names: tuple[str, ...], seed: int) -> None:
    """An adapter as transformers v4 had PEFT save it: one for each expert. PEFT fuses it when it is loaded."""
    made = model[0](model[1])
    randomize(made, seed)
    made.save_pretrained(folder / "base")
    generator, tensors = torch.Generator().manual_seed(seed + 1), {}
    block = "block_sparse_moe" if "w1" in names else "mlp"
    hidden = model[1].hidden_size
    inner = getattr(model[1], "moe_intermediate_size", None) or model[1].intermediate_size
    for layer in range(model[1].num_hidden_layers):
        for expert in range(4):
            for name in names:
                rows, columns = (hidden, inner) if name in ("down_proj", "w2") else (inner, hidden)
                key = f"base_model.model.model.layers.{layer}.{block}.experts.{expert}.{name}"
                tensors[f"{key}.lora_A.weight"] = torch.randn((3, columns), generator=generator)
                tensors[f"{key}.lora_B.weight"] = torch.randn((rows, 3), generator=generator)
    (folder / "adapter").mkdir(parents=True)
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors", metadata={"format": "pt"})
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=6, target_modules=list(names))
    config.save_pretrained(folder / "adapter")
    save_merged(peft.PeftModel.from_pretrained(made, folder / "adapter"), folder)


def write_old_layout(new: Path, folder: Path, version: str | None = "0.18.1") -> None:
    """The same adapter of fused experts as PEFT before 0.19 stores it: A and B have changed places."""
    tensors = load_file(new / "adapter" / "adapter_model.safetensors")
    turned = {}
    for name, values in tensors.items():
        if ".experts." not in name:
            turned[name] = values
        elif ".lora_A." in name:  # (experts · rank, in) -> (in, rank · experts)
            turned[name.replace("lora_A", "lora_B")] = (
                values.reshape(4, -1, values.shape[1]).permute(2, 1, 0).reshape(values.shape[1], -1).contiguous()
            )
        else:
            turned[name.replace("lora_B", "lora_A")] = (
                values.reshape(values.shape[0], -1, 4).permute(2, 1, 0).reshape(-1, values.shape[0]).contiguous()
            )
    (folder / "adapter").mkdir(parents=True)
    save_file(turned, folder / "adapter" / "adapter_model.safetensors")
    config = json.loads((new / "adapter" / "adapter_config.json").read_text())
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config | {"peft_version": version}))
    for name in ("base", "merged.safetensors"):
        (folder / name).symlink_to(Path("..") / new.name / name)


def main(out: Path) -> None:
    warnings.filterwarnings("ignore")
    for seed, (case, (model, config)) in enumerate(CASES.items()):
        write_case(out / case, model, config, 7 * (1 if model is LLAMA else seed))
    for case, (model, names) in PER_EXPERT.items():
        write_per_expert(out / case, model, names, 5)
    write_own_rows(out / "embedding-own-rows")
    write_saved_layers(out / "saved-layers-tied")
    write_case(out / "modules_to_save-layers", *CASES["modules_to_save"], 7, save_embedding_layers=True)
    write_flagged(out / "fan_in_fan_out-linear")
    for case in ("experts", "experts-square"):
        write_old_layout(out / case, out / f"{case}-0.18")
    pair = t.LlamaForCausalLM.from_pretrained(out / "plain" / "base")
    wrapped = peft.PeftModel.from_pretrained(pair, out / "plain" / "adapter", "one")
    wrapped.load_adapter(out / "second" / "adapter", "two")
    wrapped.add_weighted_adapter(["one", "two"], [1.0, 0.5], "both", combination_type="cat")
    wrapped.set_adapter("both")
    (out / "both").mkdir()
    save_merged(wrapped, out / "both")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
