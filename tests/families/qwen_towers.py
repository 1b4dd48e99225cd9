"""MaxText's vision and audio towers of Qwen in numpy, on arrays in MaxText's layout, held against transformers' towers
layer by layer.

After `Qwen3OmniMoeVision…` and `Qwen3OmniAudio…` of src/maxtext/models/qwen3.py and layers/embeddings.py, e591f30; one
image, or one clip, without padding. Where MaxText takes the tanh form of GELU (mergers, audio) transformers takes the
exact one, and so does this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from families.numpy_decoder import below, gelu, softmax, turned
from lazily import lazily

torch = lazily("torch")

Arrays = Mapping[str, np.ndarray]
Layer = Callable[[np.ndarray], np.ndarray]
THETA = 10_000.0


def exact_gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))


def norm(w: Arrays, epsilon: float) -> Layer:
    def apply(x: np.ndarray) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon) * w["scale"] + w["bias"]

    return apply


def linear(w: Arrays) -> Layer:
    return lambda x: x @ w["kernel"] + w.get("bias", 0)


def attention(w: Arrays, turn: Layer = lambda states: states) -> Layer:
    """Every position attends to every other; `turn` is the rotary embedding of (length, heads, dim)."""

    def apply(x: np.ndarray) -> np.ndarray:
        query, key, value = (
            np.einsum("le,ehd->lhd", x, w[f"{name}.kernel"]) + w[f"{name}.bias"] for name in ("query", "key", "value")
        )
        scores = np.einsum("lhd,mhd->hlm", turn(query), turn(key)) * query.shape[-1] ** -0.5
        return np.einsum("hlm,mhd,hde->le", softmax(scores), value, w["out.kernel"]) + w["out.bias"]

    return apply


# --- vision -----------------------------------------------------------------------------------------------------------


def coordinates(height: int, width: int, merge: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each patch: those that are merged follow one another."""
    squares = [(row, column) for row in range(0, height, merge) for column in range(0, width, merge)]
    patches = [(row + i, column + j) for row, column in squares for i in range(merge) for j in range(merge)]
    rows, columns = zip(*patches, strict=True)
    return np.array(rows), np.array(columns)


def patch_embedding(w: Arrays) -> Layer:
    """Patches (n, rgb, frames, rows, columns), each as large as the convolution's kernel."""
    return lambda patches: np.einsum("nctij,tijcv->nv", patches, w["kernel"]) + w["bias"]


def positions(table: np.ndarray, height: int, width: int, merge: int) -> np.ndarray:
    """A square grid of positions, interpolated for each patch between its four neighbours."""
    side = math.isqrt(len(table))
    grid, (rows, columns) = table.reshape(side, side, -1), coordinates(height, width, merge)
    y, x = rows / (height - 1) * (side - 1), columns / (width - 1) * (side - 1)
    y0, x0 = y.astype(int), x.astype(int)
    y1, x1 = np.minimum(y0 + 1, side - 1), np.minimum(x0 + 1, side - 1)
    dy, dx = (y - y0)[:, None], (x - x0)[:, None]
    return (1 - dy) * ((1 - dx) * grid[y0, x0] + dx * grid[y0, x1]) + dy * ((1 - dx) * grid[y1, x0] + dx * grid[y1, x1])


def rotary(height: int, width: int, merge: int) -> Layer:
    """A quarter of a head's dimensions turns by the row, another by the column; dimension i turns with i + dim/2."""
    rows, columns = coordinates(height, width, merge)

    def turn(states: np.ndarray) -> np.ndarray:
        quarter = states.shape[-1] // 4
        frequencies = THETA ** (-np.arange(quarter) / quarter)
        angles = np.concatenate([rows[:, None] * frequencies, columns[:, None] * frequencies], -1)[:, None]
        return turned(*np.split(states, 2, axis=-1), angles)

    return turn


def merger(w: Arrays, patches: int, behind: bool) -> Layer:
    """Neighbours become one; the norm is in front of that, or `behind` it."""
    ln_q = norm(below(w, "ln_q."), 1e-6)

    def apply(x: np.ndarray) -> np.ndarray:
        merged = ln_q(x.reshape(-1, patches * x.shape[-1])) if behind else ln_q(x).reshape(-1, patches * x.shape[-1])
        return linear(below(w, "mlp_2."))(exact_gelu(linear(below(w, "mlp_0."))(merged)))

    return apply


def vision_layers(tower: Arrays, name: str, height: int, width: int, merge: int) -> dict[str, Layer]:
    """Every layer of the tower, by transformers' names of its module."""
    w, turn = below(tower, f"{name}VisionEncoder_0."), rotary(height, width, merge)
    made: dict[str, Layer] = {"patch_embed.proj": patch_embedding(below(w, "patch_embed.proj."))}
    for number in range(sum(key.endswith("ln1.bias") for key in w)):
        b = below(w, f"blocks_{number}.")
        ln1, attend, ln2 = (
            norm(below(b, "ln1."), 1e-6),
            attention(below(b, "attn.attn."), turn),
            norm(below(b, "ln2."), 1e-6),
        )
        into, out = linear(below(b, "mlp.")), linear(below(b, "mlp_out."))

        def block(
            x: np.ndarray,
            ln1: Layer = ln1,
            attend: Layer = attend,
            ln2: Layer = ln2,
            into: Layer = into,
            out: Layer = out,
        ) -> np.ndarray:
            x = x + attend(ln1(x))
            return x + out(gelu(into(ln2(x))))

        at = f"blocks.{number}"
        made |= {
            f"{at}.norm1": ln1,
            f"{at}.attn": attend,
            f"{at}.norm2": ln2,
            f"{at}.mlp.linear_fc1": into,
            f"{at}.mlp.linear_fc2": out,
            at: block,
        }
    for number in range(sum(key.startswith("merger_") and key.endswith("ln_q.bias") for key in w)):
        made[f"deepstack_merger_list.{number}"] = merger(below(w, f"merger_{number}."), merge**2, behind=True)
    made["merger"] = merger(below(tower, f"{name}VisionProjector_0.merger."), merge**2, behind=False)
    return made


# --- audio ------------------------------------------------------------------------------------------------------------


def convolution(w: Arrays) -> Layer:
    """x (chunks, bands, times, channels), in steps of two with a border of one."""

    def apply(x: np.ndarray) -> np.ndarray:
        padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        bands, times = (-(-size // 2) for size in x.shape[1:3])
        taps = [
            (i, j, padded[:, i : i + 2 * bands - 1 : 2, j : j + 2 * times - 1 : 2]) for i in range(3) for j in range(3)
        ]
        return sum(part @ w["kernel"][i, j] for i, j, part in taps) + w["bias"]

    return apply


def audio_layers(tower: Arrays) -> dict[str, Layer]:
    """Every layer of the tower, by transformers' names of its module; a layer sees one chunk."""
    w, projector = below(tower, "Qwen3OmniAudioEncoder_0."), below(tower, "Qwen3OmniAudioProjector_0.")
    made = {name: convolution(below(w, f"{name}.")) for name in ("conv2d1", "conv2d2", "conv2d3")}
    made |= {"conv_out": linear(below(w, "conv_out.")), "ln_post": norm(below(w, "layernorm_post."), 1e-5)}
    made |= {name: linear(below(projector, f"{name}.")) for name in ("proj1", "proj2")}
    for number in range(sum(key.endswith("AudioMLP.wi.bias") for key in w)):
        b, at = below(w, f"layers_{number}."), f"layers.{number}"
        made |= {
            f"{at}.self_attn_layer_norm": norm(below(b, "input_layer_norm."), 1e-5),
            f"{at}.self_attn": attention(below(b, "self_attention_audio.")),
            f"{at}.final_layer_norm": norm(below(b, "post_attention_layer_norm."), 1e-5),
            f"{at}.fc1": linear(below(b, "AudioMLP.wi.")),
            f"{at}.fc2": linear(below(b, "AudioMLP.wo.")),
        }
    return made


# --- against transformers ---------------------------------------------------------------------------------------------


def watch(tower: torch.nn.Module) -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
    """Fills with what went into each module of a tower and what came out, as the tower runs."""
    seen: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for name, module in tower.named_modules():

        def hook(module: torch.nn.Module, given: tuple, named: dict, out: object, name: str = name) -> None:
            into = given[0] if given else named.get("hidden_states")
            out = out[0] if isinstance(out, tuple) else out
            if isinstance(into, torch.Tensor) and isinstance(out, torch.Tensor):
                seen.setdefault(name, []).append((into.detach().double().numpy(), out.detach().double().numpy()))

        module.register_forward_hook(hook, with_kwargs=True)
    return seen


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.shape == theirs.shape
    assert np.abs(theirs).max() > 1e-2
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max())


def check_vision(tower: torch.nn.Module, arrays: Arrays, name: str) -> int:
    """Runs transformers' tower on an image and holds the arrays below `vision_encoder.` against it: how many layers
    were compared.
    """
    config, (height, width) = tower.config, (4, 6)
    size, frames, merge = config.patch_size, config.temporal_patch_size, config.spatial_merge_size
    patches = np.random.default_rng(0).standard_normal((height * width, 3 * frames * size**2))
    seen = watch(tower)
    out = tower(torch.tensor(patches, dtype=torch.float32), torch.tensor([[1, height, width]]))
    w = {key: values.astype(np.float64) for key, values in below(arrays, "vision_encoder.").items()}
    layers = vision_layers(w, name, height, width, merge)
    for at, layer in layers.items():
        module = at.replace("deepstack_merger_list", "merger_list") if hasattr(tower, "merger_list") else at
        ((into, wanted),) = seen[module]
        assert_close(layer(into), wanted.reshape(len(wanted), -1))
    # ... and all of it at once, the embedding of positions too
    table = w[f"{name}VisionEncoder_0.pos_embed_interpolate.pos_embed"]
    x = layers["patch_embed.proj"](patches.reshape(-1, 3, frames, size, size)) + positions(table, height, width, merge)
    assert_close(x, seen["blocks.0"][0][0])
    deep = []
    for number in range(config.depth):
        x = layers[f"blocks.{number}"](x)
        if number in config.deepstack_visual_indexes:
            deep.append(layers[f"deepstack_merger_list.{len(deep)}"](x))
    assert_close(layers["merger"](x), out.pooler_output.double().numpy())
    for ours, theirs in zip(deep, out.deepstack_features, strict=True):
        assert_close(ours, theirs.double().numpy())
    return len(layers)


def check_audio(tower: torch.nn.Module, arrays: Arrays) -> int:
    """The same for a clip of two chunks and the arrays below `audio_encoder.`"""
    config, times = tower.config, 2 * tower.config.n_window
    clip = np.random.default_rng(0).standard_normal((config.num_mel_bins, 2 * times))
    seen = watch(tower)
    out = tower(torch.tensor(clip, dtype=torch.float32), feature_lens=torch.tensor([2 * times]))
    w = {key: values.astype(np.float64) for key, values in below(arrays, "audio_encoder.").items()}
    layers = audio_layers(w)
    x = np.stack(np.split(clip, 2, axis=1))[..., None]  # (chunk, band, time, 1)
    for name in ("conv2d1", "conv2d2", "conv2d3"):
        ((into, wanted),) = seen[name]
        assert_close(layers[name](into.transpose(0, 2, 3, 1)), wanted.transpose(0, 2, 3, 1))
        x = exact_gelu(layers[name](x))
    for name in layers.keys() - {"conv2d1", "conv2d2", "conv2d3"}:
        ((into, wanted),) = seen[name]
        chunks = np.split(into, 2) if name.endswith("self_attn") else [into]
        assert_close(np.concatenate([layers[name](chunk) for chunk in chunks]), wanted)
    x = layers["conv_out"](x.transpose(0, 2, 3, 1).reshape(2, x.shape[2], -1))  # a step's bands lie together by channel
    half = config.d_model // 2
    angles = np.arange(x.shape[1])[:, None] * THETA ** (-np.arange(half) / (half - 1))
    x = x + np.concatenate([np.sin(angles), np.cos(angles)], -1)
    for number in range(config.encoder_layers):
        parts = [
            layers[f"layers.{number}.{name}"]
            for name in ("self_attn_layer_norm", "self_attn", "final_layer_norm", "fc1", "fc2")
        ]
        ln1, attend, ln2, fc1, fc2 = parts
        x = np.stack([chunk + attend(ln1(chunk)) for chunk in x])
        x = x + fc2(exact_gelu(fc1(ln2(x))))
    x = layers["proj2"](exact_gelu(layers["proj1"](layers["ln_post"](x))))
    assert_close(x.reshape(-1, x.shape[-1]), out.pooler_output.double().numpy())
    return len(layers)
