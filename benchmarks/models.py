"""Checkpoints to measure with: real safetensors files of random finite weights, in the hub's form.

python -m benchmarks.models llama out/llama --layers 8
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from benchmarks.stock import BLOCK

BF16, FP8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
SHARD_BYTES = 500_000_000

# name -> shape; `{layer}` and `{expert}` are spelled out
LAYER = "model.layers.{layer}."
NORMS = {f"{LAYER}{norm}.weight": ("embed",) for norm in ("input_layernorm", "post_attention_layernorm")}
TOP = {
    "model.embed_tokens.weight": ("vocab", "embed"),
    "model.norm.weight": ("embed",),
    "lm_head.weight": ("vocab", "embed"),
}
ATTENTION = {
    f"{LAYER}self_attn.q_proj.weight": ("heads", "embed"),
    f"{LAYER}self_attn.k_proj.weight": ("kv", "embed"),
    f"{LAYER}self_attn.v_proj.weight": ("kv", "embed"),
    f"{LAYER}self_attn.o_proj.weight": ("embed", "heads"),
}


def _mlp(prefix: str, width: str) -> dict[str, tuple[str, ...]]:
    shapes = {"gate_proj": (width, "embed"), "up_proj": (width, "embed"), "down_proj": ("embed", width)}
    return {f"{LAYER}{prefix}.{name}.weight": shape for name, shape in shapes.items()}


MODELS = {
    "llama": (
        dict(model_type="llama", hidden_size=3072, num_attention_heads=24, num_key_value_heads=8, head_dim=128, intermediate_size=8192, vocab_size=36000),
        dict(embed=3072, heads=3072, kv=1024, mlp=8192, vocab=36000),
        TOP | NORMS | ATTENTION | _mlp("mlp", "mlp"),
    ),
    "small": (
        dict(model_type="llama", hidden_size=1024, num_attention_heads=8, num_key_value_heads=8, head_dim=128, intermediate_size=4096, vocab_size=32000),
        dict(embed=1024, heads=1024, kv=1024, mlp=4096, vocab=32000),
        TOP | NORMS | ATTENTION | _mlp("mlp", "mlp"),
    ),
    "moe": (
        dict(
            model_type="qwen3_moe", hidden_size=2048, num_attention_heads=16, num_key_value_heads=4, head_dim=128, intermediate_size=6144,
            vocab_size=64000, num_experts=64, moe_intermediate_size=256,
        ),
        dict(embed=2048, heads=2048, kv=512, dim=128, mlp=256, vocab=64000, expert=64),
        TOP | NORMS | ATTENTION | _mlp("mlp.experts.{expert}", "mlp")
        | {f"{LAYER}mlp.gate.weight": ("expert", "embed")} | {f"{LAYER}self_attn.{n}_norm.weight": ("dim",) for n in "qk"},
    ),
    "fp8": (
        dict(
            model_type="qwen3", hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128, intermediate_size=12288, vocab_size=36000,
            quantization_config=dict(quant_method="fp8", weight_block_size=[BLOCK, BLOCK]),
        ),
        dict(embed=4096, heads=4096, kv=1024, dim=128, mlp=12288, vocab=36000),
        TOP | NORMS | ATTENTION | _mlp("mlp", "mlp") | {f"{LAYER}self_attn.{n}_norm.weight": ("dim",) for n in "qk"},
    ),
    "fp8-start": (  # next to nothing, on the same mesh: what a command takes whose model has no size
        dict(
            model_type="qwen3", hidden_size=2048, num_attention_heads=2, num_key_value_heads=2, head_dim=128, intermediate_size=256, vocab_size=256,
            quantization_config=dict(quant_method="fp8", weight_block_size=[BLOCK, BLOCK]),
        ),
        dict(embed=2048, heads=256, kv=256, dim=128, mlp=256, vocab=256),
        TOP | NORMS | ATTENTION | _mlp("mlp", "mlp") | {f"{LAYER}self_attn.{n}_norm.weight": ("dim",) for n in "qk"},
    ),
}  # fmt: skip


def _names(
    shapes: dict[str, tuple[str, ...]], sizes: dict[str, int], layers: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor, layer by layer."""
    for layer in range(layers):
        for name, axes in shapes.items():
            if "{layer}" in name or layer == 0:
                for expert in range(sizes["expert"] if "{expert}" in name else 1):
                    yield name.format(layer=layer, expert=expert), tuple(sizes[axis] for axis in axes)


def write(kind: str, folder: Path, layers: int) -> int:
    """Writes a checkpoint; returns the bytes of its tensors."""
    config, sizes, shapes = MODELS[kind]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 2**16, 1 << 25, dtype=np.uint16) & 0xBFFF  # exponents below 2: finite
    codes = rng.integers(0, 127, 1 << 25, dtype=np.uint8)  # positive and finite
    shard: dict[str, np.ndarray] = {}
    shards: list[dict[str, np.ndarray]] = [shard]
    weight_map, total = {}, 0

    def add(name: str, values: np.ndarray) -> None:
        nonlocal shard, total
        if sum(v.nbytes for v in shard.values()) + values.nbytes > SHARD_BYTES:
            _save(folder, len(shards), shard)
            shard.clear()
            shards.append(shard)
        shard[name] = values
        weight_map[name] = f"model-{len(shards):05}.safetensors"
        total += values.nbytes

    def part(source: np.ndarray, number: int, shape: tuple[int, ...]) -> np.ndarray:
        count = int(np.prod(shape))
        if count > source.size:
            return np.resize(source, shape)
        start = number * 977 % (source.size - count + 1)
        return source[start : start + count].reshape(shape)

    for number, (name, shape) in enumerate(_names(shapes, sizes, layers)):
        if "quantization_config" in config and name.endswith("_proj.weight"):
            add(name, part(codes, number, shape).view(FP8))
            blocks = tuple(-(-n // BLOCK) for n in shape)
            add(f"{name}_scale_inv", rng.uniform(1e-4, 1e-3, blocks).astype(np.float32))
        else:
            add(name, part(noise, number, shape).view(BF16))
    _save(folder, len(shards), shard)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    )
    return total


def _save(folder: Path, number: int, shard: dict[str, np.ndarray]) -> None:
    save_file(shard, folder / f"model-{number:05}.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=MODELS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    print(f"{write(args.kind, args.folder, args.layers):,} bytes")
