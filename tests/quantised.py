"""Weights as quantised releases store them, each with its values in float32."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from stored import pack, pack_awq
from support import BF16, F32, FP8, LLAMA, random_tensors, save

GROUP = 32
Tensors = dict[str, np.ndarray]
Quantised = tuple[Tensors, np.ndarray]  # what is stored for a weight, and its values in float32


def codes_of(
    shape: tuple[int, ...], seed: int, symmetric: bool, scale_dtype: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random codes (O, I), and zeros and scales (O, I / GROUP)."""
    rng = np.random.default_rng(seed)
    groups = (shape[0], shape[1] // GROUP)
    zeros = np.full(groups, 8) if symmetric else rng.integers(1, 16, groups)
    return rng.integers(0, 16, shape), zeros, rng.uniform(0.001, 0.03, groups).astype(scale_dtype)


def values_of(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group: np.ndarray) -> np.ndarray:
    return (codes - zeros[:, group]).astype(np.float32) * scales.astype(np.float32)[:, group]


def compressed(name: str, shape: tuple[int, ...], seed: int) -> Quantised:
    codes, zeros, scales = codes_of(shape, seed, symmetric=True, scale_dtype=BF16)
    stored = {f"{name}_packed": pack(codes, 4), f"{name}_scale": scales, f"{name}_shape": np.array(shape, np.int32)}
    return stored, values_of(codes, zeros, scales, np.arange(shape[1]) // GROUP)


def gptq(name: str, shape: tuple[int, ...], seed: int) -> Quantised:
    """With `desc_act`: the inputs' groups in any order."""
    codes, zeros, scales = codes_of(shape, seed, symmetric=False, scale_dtype=np.float16)
    group = np.random.default_rng(seed).permutation(shape[1]) // GROUP
    stem = name.removesuffix("weight")
    packed = {
        "qweight": pack(codes, 4).T,
        "qzeros": pack(zeros.T - 1, 4),
        "scales": scales.T,
        "g_idx": group.astype(np.int32),
    }
    return {stem + part: np.ascontiguousarray(values) for part, values in packed.items()}, values_of(
        codes, zeros, scales, group
    )


def awq(name: str, shape: tuple[int, ...], seed: int) -> Quantised:
    codes, zeros, scales = codes_of(shape, seed, symmetric=False, scale_dtype=np.float16)
    stem = name.removesuffix("weight")
    packed = {"qweight": pack_awq(codes.T), "qzeros": pack_awq(zeros.T), "scales": scales.T}
    return {stem + part: np.ascontiguousarray(values) for part, values in packed.items()}, values_of(
        codes, zeros, scales, np.arange(shape[1]) // GROUP
    )


def nf4(name: str, shape: tuple[int, ...], seed: int) -> Quantised:
    """Magnitudes in 8 bits, and bytes that look like bfloat16, as for training over several hosts."""
    rng = np.random.default_rng(seed)
    elements = shape[0] * shape[1]
    codes, meanings = rng.integers(0, 16, elements), np.linspace(-1, 1, 16, dtype=np.float32)
    magnitudes, nested = (
        rng.integers(0, 256, elements // 64).astype(np.uint8),
        rng.uniform(-1, 1, 256).astype(np.float32),
    )
    scale = rng.uniform(0.01, 1, -(-len(magnitudes) // 256)).astype(np.float32)
    meant = nested[magnitudes] * scale[np.arange(len(magnitudes)) // 256] + np.float32(0.25)
    state = dict(
        quant_type="nf4",
        blocksize=64,
        dtype="bfloat16",
        shape=shape,
        nested_blocksize=256,
        nested_dtype="float32",
        nested_offset=0.25,
    )
    stored = {
        name: (codes[::2] << 4 | codes[1::2]).astype(np.uint8).view(BF16)[:, None],
        f"{name}.absmax": magnitudes,
        f"{name}.quant_map": meanings,
        f"{name}.nested_absmax": scale,
        f"{name}.nested_quant_map": nested,
        f"{name}.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }
    return stored, (meanings[codes] * np.repeat(meant, 64)).reshape(shape)


FP8_LLAMA = LLAMA | {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}


def is_linear(name: str) -> bool:
    """What DeepSeek stores in FP8: projections, not embeddings, norms or routers."""
    return name.endswith(("_proj.weight", "kv_a_proj_with_mqa.weight"))


def quantise(
    tensors: Mapping[str, np.ndarray], block: tuple[int, int], scale_dtype: Any, seed: int = 0
) -> dict[str, np.ndarray]:
    """Codes of every size and a scale for each block; the last block of an axis may be partial."""
    rng = np.random.default_rng(seed)
    made: dict[str, np.ndarray] = {}
    for name, values in tensors.items():
        if not is_linear(name):
            made[name] = values
            continue
        blocks = tuple(-(-size // step) for size, step in zip(values.shape, block, strict=True))
        made[name] = (values.astype(np.float32) * rng.choice([0.01, 1, 300], values.shape)).astype(FP8)
        made[f"{name}_scale_inv"] = rng.uniform(1e-4, 2e-2, blocks).astype(scale_dtype)
    return made


def fp8_llama(folder: Path) -> tuple[Path, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A release whose projections are FP8 with a scale for all of a block; its tensors, and their values in float32."""
    stored, values = {}, {}
    for number, (name, tensor) in enumerate(random_tensors(LLAMA).items()):
        if "proj" not in name:
            stored[name], values[name] = tensor, tensor.astype(F32)
            continue
        codes, scale = (tensor.astype(F32) * 100).astype(FP8), np.full((1, 1), 0.01 * (number + 1), F32)
        stored[name], stored[f"{name}_scale_inv"], values[name] = codes, scale, codes.astype(F32) * scale
    return save(folder, FP8_LLAMA, stored), stored, values
