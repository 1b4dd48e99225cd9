"""Writes the tiny Qwen 3.5 in FP8 that MaxText 0.2.5's own converter was given: `python tests/cases/fp8_release.py FOLDER`.

`fp8_digests.json` holds what it made of it (`to_maxtext --save_dtype float8_e4m3fn`, `model_name=qwen3.5-35b-a3b-fp8`,
`scan_layers=true`), and `SHA256` the file that it was given. Random weights of a fixed seed, drawn in this order; codes
and scales in blocks of 128 × 128, no scale a block's exact maximum over 448. Needs torch and transformers (2.13.0,
5.23.0).
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import safetensors.torch
import torch
import transformers

SHA256 = "0b3f9b034023e53a7a6c3ac40594041ab2a2b0851d270b2081e734924cb4826b"
EMBED, LAYERS, EXPERTS, MLP, VOCAB = 256, 8, 2, 128, 256
DIM, HEADS, KV = 128, 2, 1
KEY = VALUE = 128  # the one head of a delta net
QKV = 2 * KEY + VALUE
BLOCK = 128
PREFIX = "model.language_model."
TEXT = dict(
    vocab_size=VOCAB, hidden_size=EMBED, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV, head_dim=DIM,
    max_position_embeddings=4096, num_experts=EXPERTS, num_experts_per_tok=1, moe_intermediate_size=MLP, shared_expert_intermediate_size=MLP,
    linear_conv_kernel_dim=4, linear_key_head_dim=KEY, linear_value_head_dim=VALUE, linear_num_key_heads=1, linear_num_value_heads=1,
    tie_word_embeddings=False, rms_norm_eps=1e-6,
    rope_parameters=dict(rope_type="default", rope_theta=10000000.0, mrope_section=[6, 5, 5], mrope_interleaved=True, partial_rotary_factor=0.25),
)  # fmt: skip
VISION = dict(
    depth=2, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=EMBED, num_position_embeddings=16, patch_size=16,
    temporal_patch_size=2, spatial_merge_size=2,
)  # fmt: skip


class Weights(dict):
    """The tensors, as they are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(77)

    def draw(self, *shape: int, size: float) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator) * size

    def plain(self, name: str, *shape: int, size: float = 0.1, around: float = 0.0) -> None:
        """A tensor in bfloat16."""
        self[name] = (self.draw(*shape, size=size) + around).to(torch.bfloat16)

    def coded(self, name: str, rows: int, columns: int) -> None:
        """A linear layer in FP8."""
        values = self.draw(rows, columns, size=0.08).reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        largest = values.abs().amax((1, 3))
        scales = (largest / 448 * (1 + 0.2 * torch.rand(largest.shape, generator=self.generator))).to(torch.bfloat16)
        codes = (values / scales.float()[:, None, :, None]).clamp(-448, 448).reshape(rows, columns)
        self[f"{name}.weight"] = codes.to(torch.float8_e4m3fn)
        self[f"{name}.weight_scale_inv"] = scales


def delta_net(weights: Weights, name: str) -> None:
    """A linear-attention layer."""
    weights.coded(f"{name}in_proj_qkv", QKV, EMBED)
    weights.coded(f"{name}in_proj_z", VALUE, EMBED)
    weights.coded(f"{name}out_proj", EMBED, VALUE)
    weights.plain(f"{name}in_proj_b.weight", 1, EMBED)
    weights.plain(f"{name}in_proj_a.weight", 1, EMBED)
    weights.plain(f"{name}conv1d.weight", QKV, 1, 4)
    weights.plain(f"{name}A_log", 1, around=0.5)
    weights.plain(f"{name}dt_bias", 1)
    weights.plain(f"{name}norm.weight", VALUE, around=1.0)


def attention(weights: Weights, name: str) -> None:
    """A full-attention layer, each query with its gate."""
    weights.coded(f"{name}q_proj", HEADS * DIM * 2, EMBED)
    weights.coded(f"{name}k_proj", KV * DIM, EMBED)
    weights.coded(f"{name}v_proj", KV * DIM, EMBED)
    weights.coded(f"{name}o_proj", EMBED, HEADS * DIM)
    weights.plain(f"{name}q_norm.weight", DIM)
    weights.plain(f"{name}k_norm.weight", DIM)


def is_linear(layer: int) -> bool:
    return bool((layer + 1) % 4)


def draw() -> Weights:
    """All tensors of the release."""
    weights = Weights()
    weights.plain(f"{PREFIX}embed_tokens.weight", VOCAB, EMBED, size=0.3)
    weights.plain(f"{PREFIX}norm.weight", EMBED)
    weights.plain("lm_head.weight", VOCAB, EMBED)
    for layer in range(LAYERS):
        name = f"{PREFIX}layers.{layer}."
        weights.plain(f"{name}input_layernorm.weight", EMBED)
        weights.plain(f"{name}post_attention_layernorm.weight", EMBED)
        if is_linear(layer):
            delta_net(weights, f"{name}linear_attn.")
        else:
            attention(weights, f"{name}self_attn.")
        weights.plain(f"{name}mlp.gate.weight", EXPERTS, EMBED)
        weights.plain(f"{name}mlp.shared_expert_gate.weight", 1, EMBED)
        for projection, rows, columns in (
            ("gate_proj", MLP, EMBED),
            ("up_proj", MLP, EMBED),
            ("down_proj", EMBED, MLP),
        ):
            weights.coded(f"{name}mlp.shared_expert.{projection}", rows, columns)
            for expert in range(EXPERTS):
                weights.coded(f"{name}mlp.experts.{expert}.{projection}", rows, columns)
    return weights


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    safetensors.torch.save_file(dict(draw()), folder / "model.safetensors", metadata={"format": "pt"})
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == SHA256
    config = transformers.Qwen3_5MoeConfig(text_config=TEXT, vision_config=VISION).to_dict()
    kept = ["mlp.gate", "mlp.shared_expert_gate"]
    of_delta_nets = [f"linear_attn.{name}" for name in ("in_proj_a", "in_proj_b", "conv1d")]
    config["architectures"] = ["Qwen3_5MoeForConditionalGeneration"]
    config["dtype"] = "bfloat16"
    config["quantization_config"] = dict(
        quant_method="fp8",
        fmt="e4m3",
        activation_scheme="dynamic",
        weight_block_size=[BLOCK, BLOCK],
        modules_to_not_convert=[
            "lm_head",
            f"{PREFIX}embed_tokens",
            *(
                f"{PREFIX}layers.{layer}.{name}"
                for layer in range(LAYERS)
                for name in (*kept, *(of_delta_nets if is_linear(layer) else ()))
            ),
        ],
    )
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=str))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
