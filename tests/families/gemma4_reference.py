"""MaxText's Gemma 4 in plain numpy, on arrays in MaxText's layout: what its layers compute, not what its converter
does.

After src/maxtext/models/gemma4.py, gemma4_small.py and gemma4_vision.py, layers/attentions.py, layers/embeddings.py
(`Gemma4PartialRotaryEmbedding`) and layers/moe.py of MaxText e591f30, and `Gemma4UnifiedVisionEmbedder` of its branch
agagik-gemma4-12b (85b12b8). One sequence or one image, without padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from families.numpy_decoder import gelu, softmax, turned
from lazily import lazily
from support import read_config

torch = lazily("torch")
transformers = lazily("transformers")

Arrays = Mapping[str, np.ndarray]
TOWER, PROJECTOR = (
    "vision_encoder.Gemma4VisionEncoderLayer_0",
    "vision_encoder.Gemma4VisionProjector_0.projection.kernel",
)
EMBEDDER = "vision_encoder.Gemma4UnifiedVisionEmbedder_0"
BLOCK = 6  # layers


def below(arrays: Arrays, prefix: str) -> dict[str, np.ndarray]:
    """The arrays below a prefix, in float64."""
    return {
        key.removeprefix(f"{prefix}."): values.astype(np.float64)
        for key, values in arrays.items()
        if key.startswith(f"{prefix}.")
    }


def layer_of(arrays: Arrays, layer: int) -> dict[str, np.ndarray]:
    """A layer's arrays: its own, or its share of MaxText's two scans, each on axis 1."""
    if own := below(arrays, f"decoder.layers_{layer}"):
        return own
    block, place = divmod(layer, BLOCK)
    if place == BLOCK - 1:
        return {key: values[:, block] for key, values in below(arrays, "decoder.scanned_blocks.global_layer").items()}
    return {
        key: values[:, block, place] for key, values in below(arrays, "decoder.scanned_blocks.local_layers").items()
    }


def norm(x: np.ndarray, scale: np.ndarray | float = 1.0) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def rotate(x: np.ndarray, positions: np.ndarray, theta: float, fraction: float = 1.0) -> np.ndarray:
    """(token, head, dim): the halves turn together; the timescales behind the rotated fraction are infinite."""
    half, rotated = x.shape[-1] // 2, int(x.shape[-1] * fraction) // 2
    timescale = np.full(half, np.inf)
    timescale[:rotated] = theta ** (2 * np.arange(rotated) / x.shape[-1])
    return turned(x[..., :half], x[..., half:], (positions[:, None] / timescale)[:, None])


def attend(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, out: np.ndarray, mask: np.ndarray | bool = True
) -> np.ndarray:
    """Grouped attention without a scale; `mask` is (to, from)."""
    groups = query.shape[1] // key.shape[1]
    key, value = (np.repeat(x, groups, 1) for x in (key, value))
    weights = softmax(np.where(mask, np.einsum("thd,shd->hts", query, key), -np.inf))
    return np.einsum("hts,shd,hde->te", weights, value, out)


def mlp(a: Arrays, x: np.ndarray, prefix: str) -> np.ndarray:
    return (gelu(x @ a[f"{prefix}.wi_0.kernel"]) * (x @ a[f"{prefix}.wi_1.kernel"])) @ a[f"{prefix}.wo.kernel"]


def routed(a: Arrays, x: np.ndarray, normed: np.ndarray, k: int) -> np.ndarray:
    """`Gemma4MoE`: the dense MLP on the normed input, and the `k` experts that the router chooses."""
    block = "mlp.moe_block.MoeBlock_0"
    gates = softmax((norm(x) * x.shape[-1] ** -0.5 * a["mlp.pre_forward_scale_2"]) @ a[f"{block}.gate.kernel"])
    inputs, out = norm(x, a["mlp.pre_feedforward_layernorm_2.scale"]), np.zeros_like(x)
    for token, row in enumerate(gates):
        chosen = np.argsort(-row)[:k]
        for expert, weight in zip(
            chosen, row[chosen] / row[chosen].sum() * a[f"{block}.per_expert_scale"][chosen], strict=True
        ):
            inner = gelu(inputs[token] @ a[f"{block}.wi_0"][expert]) * (inputs[token] @ a[f"{block}.wi_1"][expert])
            out[token] += weight * (inner @ a[f"{block}.wo"][expert])
    shared = norm(mlp(a, normed, "mlp.moe_block.shared_experts"), a["mlp.post_feedforward_layernorm_1.scale"])
    return shared + norm(out, a["mlp.post_feedforward_layernorm_2.scale"])


def text_logits(arrays: Arrays, config: Mapping[str, Any], tokens: np.ndarray) -> np.ndarray:
    """(token, vocab): the whole text model."""
    embedding, inputs = (
        arrays["token_embedder.embedding"].astype(np.float64),
        below(arrays, "decoder.per_layer_embedder"),
    )
    x, n = embedding[tokens], config["num_hidden_layers"]
    per_layer = np.zeros((len(tokens), n, 0))
    if inputs:
        size = config["hidden_size_per_layer_input"]
        identity = inputs["embed_tokens_per_layer"][tokens] * size**0.5
        context = (x @ inputs["per_layer_model_projection.kernel"] * x.shape[-1] ** -0.5).reshape(len(tokens), n, size)
        per_layer = (
            identity.reshape(context.shape) + norm(context, inputs["per_layer_projection_norm.scale"])
        ) * 2**-0.5
    position = np.arange(len(tokens))
    distance, donors = position[:, None] - position, {}
    for layer, kind in enumerate(config["layer_types"]):
        a, rope = layer_of(arrays, layer), config["rope_parameters"][kind]
        turn = rope["rope_theta"], rope.get("partial_rotary_factor", 1.0)
        h = norm(x, a["pre_self_attention_norm.scale"])
        query = rotate(
            norm(np.einsum("te,ehd->thd", h, a["self_attention.query.kernel"]), a["self_attention.query_norm.scale"]),
            position,
            *turn,
        )
        if "self_attention.key.kernel" in a:
            key = np.einsum("te,ehd->thd", h, a["self_attention.key.kernel"])
            value = (
                np.einsum("te,ehd->thd", h, a["self_attention.value.kernel"])
                if "self_attention.value.kernel" in a
                else key
            )
            donors[kind] = rotate(norm(key, a["self_attention.key_norm.scale"]), position, *turn), norm(value)
        mask = (distance >= 0) & ((distance < config["sliding_window"]) | (kind == "full_attention"))
        x = x + norm(
            attend(query, *donors[kind], a["self_attention.out.kernel"], mask), a["post_self_attention_norm.scale"]
        )
        h = norm(x, a["pre_ffw_norm.scale"])
        h = routed(a, x, h, config["top_k_experts"]) if "mlp.pre_forward_scale_2" in a else mlp(a, h, "mlp")
        x = x + norm(h, a["post_ffw_norm.scale"])
        if inputs:
            gated = gelu(x @ a["per_layer_input_gate.kernel"]) * per_layer[:, layer]
            x = x + norm(gated @ a["per_layer_projection.kernel"], a["post_per_layer_input_norm.scale"])
        x = x * a["layer_scalar"]
    return norm(x, arrays["decoder.decoder_norm.scale"].astype(np.float64)) @ embedding.T / x.shape[-1] ** 0.5


def assert_close(made: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(made, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


def assert_text_logits(arrays: Arrays, folder: Path, vocab: int) -> None:
    """Of 30 tokens, of so many: those of transformers' model of the release that the arrays were made of."""
    config = read_config(folder)
    config = config.get("text_config", config)
    tokens = np.random.default_rng(0).integers(0, vocab, 30)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        wanted = model(torch.tensor(tokens[None])).logits[0].numpy()
    assert_close(text_logits(arrays, config, tokens), wanted)


def image_tokens(arrays: Arrays, config: Mapping[str, Any], image: np.ndarray) -> list[np.ndarray]:
    """An image (rows, columns, rgb) in [0, 1] through the vision tower: after the entry, after each layer, and the text
    model's inputs.
    """
    patch, pool = config["patch_size"], config["pooling_kernel_size"]
    rows, columns, _ = (size // patch for size in image.shape)
    patches = image.reshape(rows, patch, columns, patch, 3).swapaxes(1, 2).reshape(rows * columns, -1)
    xy = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), -1).reshape(-1, 2)
    a = below(arrays, TOWER)
    x = 2 * (patches - 0.5) @ a["vision_entry.input_projection.kernel"] + sum(
        a["vision_entry.pos_emb_param"][xy[:, i], i] for i in range(2)
    )
    steps = [x]

    def turned(x: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        return np.concatenate(
            [
                rotate(x[..., i * half :][..., :half], xy[:, i], config["rope_parameters"]["rope_theta"])
                for i in range(2)
            ],
            -1,
        )

    for layer in range(config["num_hidden_layers"]):
        block = below(a, f"layer_{layer}")
        h = norm(x, block["pre_attention_norm.scale"])
        query, key, value = (
            np.einsum("te,ehd->thd", h, block[f"attention.{name}.kernel"]) for name in ("query", "key", "value")
        )
        query, key = (
            turned(norm(query, block["attention.query_norm.scale"])),
            turned(norm(key, block["attention.key_norm.scale"])),
        )
        x = x + norm(attend(query, key, norm(value), block["attention.out.kernel"]), block["post_attention_norm.scale"])
        x = x + norm(mlp(block, norm(x, block["pre_ffw_norm.scale"]), "mlp"), block["post_ffw_norm.scale"])
        steps.append(x)
    pooled = (
        x.reshape(rows // pool, pool, columns // pool, pool, -1).mean((1, 3)).reshape(-1, x.shape[-1])
        * x.shape[-1] ** 0.5
    )
    standardized = (pooled - a["std_bias"]) * a["std_scale"]
    return [*steps, norm(standardized) @ arrays[PROJECTOR].astype(np.float64)]


def layer_norm(a: Arrays, x: np.ndarray, name: str) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return norm(centred, a[f"{name}.scale"]) + a[f"{name}.bias"]


def embedded_squares(arrays: Arrays, config: Mapping[str, Any], image: np.ndarray) -> list[np.ndarray]:
    """An image (rows, columns, rgb) through the embedder of 12B, a square of patches at a time: behind its last norm,
    and the text model's inputs.
    """
    side = config["patch_size"] * config["pooling_kernel_size"]
    rows, columns, _ = (size // side for size in image.shape)
    squares = image.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(rows * columns, -1)
    a, (y, x) = below(arrays, EMBEDDER), np.indices((rows, columns)).reshape(2, -1)
    dense = layer_norm(a, squares, "patch_ln1") @ a["patch_dense.kernel"] + a["patch_dense.bias"]
    placed = layer_norm(a, dense, "patch_ln2") + a["pos_emb_param"][x, 0] + a["pos_emb_param"][y, 1]
    normed = layer_norm(a, placed, "pos_norm")
    return [normed, norm(normed) @ arrays[PROJECTOR].astype(np.float64)]
