"""Checkpoints to measure with: real safetensors files of random finite weights, in the hub's form."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from benchmarks.measure import tell
from benchmarks.stock import BLOCK

BF16, FP8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
SHARD_BYTES = 500_000_000
MESH = "fsdp=16"  # that they are converted for

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


QK_NORMS = {f"{LAYER}self_attn.{name}_norm.weight": ("dim",) for name in "qk"}


def _mlp(prefix: str) -> dict[str, tuple[str, ...]]:
    shapes = {"gate_proj": ("mlp", "embed"), "up_proj": ("mlp", "embed"), "down_proj": ("embed", "mlp")}
    return {f"{LAYER}{prefix}.{name}.weight": shape for name, shape in shapes.items()}


DENSE = TOP | NORMS | ATTENTION | _mlp("mlp")
ROUTER = {f"{LAYER}mlp.gate.weight": ("expert", "embed")}
MOE = TOP | NORMS | ATTENTION | _mlp("mlp.experts.{expert}") | ROUTER | QK_NORMS
FP8_BLOCKS = dict(quant_method="fp8", weight_block_size=[BLOCK, BLOCK])
# config.json but for the layers, and the axes of the tensors
MODELS = {
    "llama": (
        dict(model_type="llama", hidden_size=3072, num_attention_heads=24, num_key_value_heads=8, head_dim=128, intermediate_size=8192, vocab_size=36000),
        DENSE,
    ),
    "small": (
        dict(model_type="llama", hidden_size=1024, num_attention_heads=8, num_key_value_heads=8, head_dim=128, intermediate_size=4096, vocab_size=32000),
        DENSE,
    ),
    "moe": (
        dict(
            model_type="qwen3_moe", hidden_size=2048, num_attention_heads=16, num_key_value_heads=4, head_dim=128, intermediate_size=6144,
            vocab_size=64000, num_experts=64, moe_intermediate_size=256,
        ),
        MOE,
    ),
    "fp8": (
        dict(
            model_type="qwen3", hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128, intermediate_size=12288, vocab_size=36000,
            quantization_config=FP8_BLOCKS,
        ),
        DENSE | QK_NORMS,
    ),
    "fp8-start": (  # next to nothing, on the same mesh: what a command takes whose model has no size
        dict(
            model_type="qwen3", hidden_size=2048, num_attention_heads=2, num_key_value_heads=2, head_dim=128, intermediate_size=256, vocab_size=256,
            quantization_config=FP8_BLOCKS,
        ),
        DENSE | QK_NORMS,
    ),
}  # fmt: skip


def sizes_of(config: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of the axes."""
    dim = config["head_dim"]
    return dict(
        vocab=config["vocab_size"], embed=config["hidden_size"], dim=dim, heads=config["num_attention_heads"] * dim, kv=config["num_key_value_heads"] * dim,
        mlp=config.get("moe_intermediate_size", config["intermediate_size"]), expert=config.get("num_experts", 1),
    )  # fmt: skip


def make_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """A folder, which is made, as a whole, if it isn't there yet."""
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        tell(folder.name, "writing the checkpoint")
        make(unfinished)
        unfinished.rename(folder)
    return folder


def make_source(kind: str, folder: Path, layers: int) -> Path:
    """The checkpoint's folder."""
    return make_once(folder / f"{kind}-{layers}", lambda unfinished: write(kind, unfinished, layers))


def write(kind: str, folder: Path, layers: int) -> None:
    """Writes a checkpoint."""
    config, shapes = MODELS[kind]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    shard: dict[str, np.ndarray] = {}
    weight_map: dict[str, str] = {}
    number, total = 1, 0
    for name, values in _tensors(config, shapes, layers):
        if sum(held.nbytes for held in shard.values()) + values.nbytes > SHARD_BYTES:
            save_file(shard, folder / f"model-{number:05}.safetensors", {"format": "pt"})
            shard, number = {}, number + 1
        shard[name] = values
        weight_map[name] = f"model-{number:05}.safetensors"
        total += values.nbytes
    save_file(shard, folder / f"model-{number:05}.safetensors", {"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _tensors(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[str, ...]], layers: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor, layer by layer, and its values."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 2**16, 1 << 25, dtype=np.uint16) & 0xBFFF  # exponents below 2: finite
    codes = rng.integers(0, 127, 1 << 25, dtype=np.uint8)  # positive and finite

    def part(source: np.ndarray, number: int, shape: tuple[int, ...]) -> np.ndarray:
        count = math.prod(shape)
        if count > source.size:
            return np.resize(source, shape)
        start = number * 977 % (source.size - count + 1)
        return source[start : start + count].reshape(shape)

    for number, (name, shape) in enumerate(_names(shapes, sizes_of(config), layers)):
        if "quantization_config" in config and name.endswith("_proj.weight"):
            yield name, part(codes, number, shape).view(FP8)
            blocks = tuple(-(-size // BLOCK) for size in shape)
            yield f"{name}_scale_inv", rng.uniform(1e-4, 1e-3, blocks).astype(np.float32)
        else:
            yield name, part(noise, number, shape).view(BF16)


def _names(
    shapes: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int], layers: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor, layer by layer, and its shape."""
    for layer in range(layers):
        for name, axes in shapes.items():
            if "{layer}" in name or layer == 0:
                for expert in range(sizes["expert"] if "{expert}" in name else 1):
                    yield name.format(layer=layer, expert=expert), tuple(sizes[axis] for axis in axes)
