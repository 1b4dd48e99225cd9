"""What MaxText's dense decoders compute, in numpy over arrays in MaxText's layout, to be compared with transformers'
own forward.

Written after MaxText's layers (src/maxtext/models/gemma2.py, gemma3.py, olmo3.py and layers/attentions.py, e591f30): a
norm multiplies by its scale and adds nothing, and attention scales only where the layer asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from lazily import lazily
from support import converted

torch = lazily("torch")
transformers = lazily("transformers")

Arrays = Mapping[str, np.ndarray]


def below(arrays: Arrays, prefix: str) -> dict[str, np.ndarray]:
    """The arrays below a prefix, without it."""
    return {key.removeprefix(prefix): values for key, values in arrays.items() if key.startswith(prefix)}


def numbered(arrays: Arrays, prefix: str) -> list[dict[str, np.ndarray]]:
    """The arrays below `prefix0.`, `prefix1.`, … in order."""
    found: list[dict[str, np.ndarray]] = []
    while layer := below(arrays, f"{prefix}{len(found)}."):
        found.append(layer)
    return found


def in_order(arrays: Arrays, is_scanned: bool) -> list[dict[str, np.ndarray]]:
    """Each layer's arrays as MaxText runs them: the cycles in turn, each place by place, then what didn't fill a cycle."""
    if not is_scanned:
        return numbered(arrays, "decoder.layers_")
    places = numbered(arrays, "decoder.layers.layers_") or [below(arrays, "decoder.layers.")]
    turns = range(next(iter(places[0].values())).shape[1])
    cycles = [{key: values[:, turn] for key, values in place.items()} for turn in turns for place in places]
    return cycles + numbered(arrays, "decoder.layers_remainder.layers_")


def rms_norm(x: np.ndarray, scale: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * scale


def turned(first: np.ndarray, second: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Each dimension of `first` turned with the one of `second`; the halves of the result."""
    return np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], -1
    )


def rope(x: np.ndarray, theta: float) -> np.ndarray:
    """(length, heads, dim), whose dimension i turns with i + dim/2."""
    half = x.shape[-1] // 2
    return turned(*np.split(x, 2, axis=-1), np.arange(len(x))[:, None, None] * theta ** (-np.arange(half) / half))


def softmax(x: np.ndarray) -> np.ndarray:
    raised = np.exp(x - x.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def both(folder: Path, out: Path, kind: str, is_scanned: bool, *options: str) -> tuple[dict[str, np.ndarray], Any]:
    """MaxText's arrays of a release in float32, and the model of this class of transformers that it is."""
    scan = str(is_scanned).lower()
    arrays = converted(folder, out, "--save_dtype", "float32", "--scan_layers", scan, *options)
    model = getattr(transformers, kind)
    return arrays, model.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def assert_logits(got: np.ndarray, hf: Any, ids: np.ndarray, tolerance: float = 1e-5) -> None:
    """They are those of a model of transformers for one sequence."""
    wanted = hf(torch.tensor(ids)[None]).logits[0].detach().numpy()
    np.testing.assert_allclose(got, wanted, atol=tolerance * np.abs(wanted).max())


def attend(
    x: np.ndarray,
    layer: Arrays,
    *,
    theta: float,
    window: int | None,
    epsilon: float,
    scale: float = 1.0,
    cap: float | None = None,
) -> np.ndarray:
    """Causal attention of (length, embed) over the last `window` positions; `scale` is the layer's
    `query_pre_attn_scalar`.
    """
    query, key, value = (np.einsum("le,ehd->lhd", x, layer[f"{name}.kernel"]) for name in ("query", "key", "value"))

    def prepared(states: np.ndarray, name: str) -> np.ndarray:
        if f"{name}_norm.scale" in layer:  # over a head, or over all of them
            norm = layer[f"{name}_norm.scale"]
            states = rms_norm(states.reshape(len(x), -1, norm.size), norm, epsilon).reshape(states.shape)
        return rope(states, theta)

    query, key = prepared(query, "query") * scale, prepared(key, "key")
    key, value = (np.repeat(states, query.shape[1] // states.shape[1], axis=1) for states in (key, value))
    scores = np.einsum("lhd,mhd->hlm", query, key)
    if cap:
        scores = np.tanh(scores / cap) * cap
    behind = np.arange(len(x))[:, None] - np.arange(len(x))
    scores = np.where((behind >= 0) & (behind < (window or len(x))), scores, -np.inf)
    return np.einsum("hlm,mhd,hde->le", softmax(scores), value, layer["out.kernel"])


def gated(x: np.ndarray, layer: Arrays, act: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    return (act(x @ layer["wi_0.kernel"]) * (x @ layer["wi_1.kernel"])) @ layer["wo.kernel"]


def dense_then_routed(arrays: Arrays, is_scanned: bool) -> list[dict[str, np.ndarray]]:
    """Each layer's arrays, the dense ones first (src/maxtext/layers/nnx_decoders.py, `is_deepseek`)."""
    if not is_scanned:
        return numbered(arrays, "decoder.dense_layers_") + numbered(arrays, "decoder.moe_layers_")
    stacks = [below(arrays, f"decoder.{kind}.") for kind in ("dense_layers", "moe_layers")]
    # on axis 1, or behind the only one
    depths = [next(iter(stack.values())).shape[1] for stack in stacks]
    return [
        {key: values[:, i] for key, values in stack.items()}
        for stack, depth in zip(stacks, depths, strict=True)
        for i in range(depth)
    ]


def routed(x: np.ndarray, moe: Arrays, chosen: int, factor: float) -> np.ndarray:
    """DeepSeek V3's experts without groups: the bias chooses, the sigmoids without it weigh, and a shared expert is
    added (src/maxtext/layers/moe.py, `deepseek_routing`, `deepseek_scale_weights`).
    """
    scores = 1 / (1 + np.exp(-(x @ moe["MoeBlock_0.gate.kernel"])))
    best = np.argsort(-(scores + moe["MoeBlock_0.gate.bias"]), -1)[:, :chosen]
    weights = np.take_along_axis(scores, best, -1)
    weights = weights / weights.sum(-1, keepdims=True) * factor
    out = gated(x, below(moe, "shared_experts."), silu)
    for token, (experts, shares) in enumerate(zip(best, weights, strict=True)):
        for expert, share in zip(experts, shares, strict=True):
            one = {f"{name}.kernel": moe[f"MoeBlock_0.{name}"][expert] for name in ("wi_0", "wi_1", "wo")}
            out[token] += share * gated(x[token], one, silu)
    return out
