"""Configuration lines that families share; `blocks.py` has the fragments of their tables.

Whose default a field has: transformers' configuration classes, v5.23.0. What MaxText's layers make of a key:
AI-Hypercomputer/maxtext, src/maxtext/models and layers, e591f30.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from weightbeam.model_mappings.blocks import text_part
from weightbeam.model_mappings.config import MAX_SIZE, Config
from weightbeam.model_mappings.configuration import (
    Line,
    derived,
    fixed,
    mapped,
    only,
    positive,
    real,
    size,
    truth,
    unless,
    written,
)
from weightbeam.model_mappings.rope import plain_rope

ACTIVATIONS = [  # `gelu` is flax's, in the tanh form
    ("silu", ["silu", "linear"]),
    ("gelu_pytorch_tanh", ["gelu", "linear"]),
    ("gelu", ["gelu", "linear"]),
    ("gelu_new", ["gelu", "linear"]),
    ("relu", ["relu", "linear"]),
]
EXACT_GELU = "MaxText has the tanh form; the activations differ by up to 0.0005, logits a little"


def architecture(decoder_block: str, name: str, kind: str) -> tuple[Line, ...]:
    """MaxText's decoder, transformers' class, and its `model_type`."""
    return fixed("decoder_block", decoder_block), written("architectures", [name]), written("model_type", kind)


def activation(field: str = "hidden_act", default: str = "silu") -> tuple[Line, ...]:
    """The activation of the gate, and no activation of the other half."""
    exact = unless(lambda c, model: f"{field} is 'gelu': {EXACT_GELU}" if (c.get(field) or default) == "gelu" else None)
    return mapped("mlp_activations", field, ACTIVATIONS, default), exact


def eps(default: float = 1e-6) -> Line:
    """What is added to a variance."""
    return dataclasses.replace(real("normalization_layer_epsilon", "rms_norm_eps", default), to_key=positive)


def fixed_eps() -> tuple[Line, ...]:
    """The same, where MaxText's layers have their own whatever the key says (models/gemma2.py, gemma3.py, gemma4.py,
    e591f30 and 0.2.5).
    """
    why = "MaxText's Gemma layers add 1e-6 whatever its configuration says; logits differ a little"
    return eps(), only("rms_norm_eps", 1e-6, why, 1e-6)


def head_dim(default: int | None = None) -> Line:
    """The size of a head."""
    return size("head_dim", "head_dim", default or (lambda c: c["hidden_size"] // c["num_attention_heads"]))


WIDTHS = (
    size("base_emb_dim", "hidden_size"),
    size("base_num_query_heads", "num_attention_heads"),
    size("base_num_kv_heads", "num_key_value_heads", default=lambda c: c["num_attention_heads"]),
)
LAYERS = size("base_num_decoder_layers", "num_hidden_layers")
VOCAB = size("vocab_size", "vocab_size")
SIZES = (*WIDTHS, LAYERS, VOCAB)
MLP = size("base_mlp_dim", "intermediate_size")
CONTEXT = size("max_position_embeddings", "max_position_embeddings", default=2048)


def tied(default: bool = False, text: Callable[[Config], Config] = text_part) -> Line:
    """Whether the head is the embedding, as the table takes it from the `text` part."""
    line = truth("logits_via_embedding", "tie_word_embeddings", default)
    return dataclasses.replace(line, find=lambda c, model: text(c).get("tie_word_embeddings"))


def tied_unscaled(text: Callable[[Config], Config] = text_part) -> tuple[Line, Line]:
    """The same, for models whose logits MaxText would divide by √embed."""

    def is_tied(c: Config) -> bool:
        return bool(text(c).get("tie_word_embeddings"))

    return tied(text=text), derived("normalize_embedding_logits", lambda c, model: False, when=is_tied)


TIED = tied_unscaled()
# Else MaxText's trainer, which warms up indexers by default, leaves the model's own loss out
# (AI-Hypercomputer/maxtext, src/maxtext/trainers/pre_train/train.py, loss_fn, e591f30 and 0.2.5)
WHOLE_LOSS = derived("indexer_sparse_training", lambda c, model: True)
# the residual streams of hyper-connections (src/maxtext/layers/mhc.py)
STREAMS = (
    size("mhc_expansion_rate", "hc_mult"),
    size("sinkhorn_iterations", "hc_sinkhorn_iters", default=20),
    only("hc_eps", 1e-6, "MaxText's layer adds 1e-6 whatever its configuration says; logits differ", default=1e-6),
)
NO_WINDOW = "MaxText's layer looks at all tokens; logits differ beyond the window. There is no way round"


def no_window(default: int | None = None) -> Line:
    """A window that MaxText's layers haven't got."""

    def limit(c: Config, model: str | None) -> str | None:
        window = c.get("sliding_window", default)
        if window is None or window is False:
            return None
        tokens = 0 if window == 0 else c.size("sliding_window", default)
        if tokens < c.size("max_position_embeddings", MAX_SIZE):
            return f"sliding_window is {window}: {NO_WINDOW}"
        return None

    return unless(limit)


NOBODY = "neither MaxText nor transformers runs it"


def experts(
    number: str = "num_experts", other: str = "num_local_experts", width: str = "moe_intermediate_size"
) -> tuple[Line, ...]:
    """How many experts of which width, how many of them a token is sent to."""

    def limit(c: Config, model: str | None) -> str | None:
        there, chosen = c.size(number, c.get(other)), c.size("num_experts_per_tok")
        return f"num_experts_per_tok is {chosen}, of {there} experts: {NOBODY}" if chosen > there else None

    return (
        size("base_moe_mlp_dim", width),
        size("num_experts", number, default=lambda c: c[other]),
        size("num_experts_per_tok", "num_experts_per_tok"),
        unless(limit),
    )


def mlp_layer_types(keys: Mapping[str, Any]) -> list[str]:
    """transformers' list of the layers that have experts, of MaxText's keys."""
    dense = keys["first_num_dense_layers"]
    return ["dense"] * dense + ["sparse"] * (keys["base_num_decoder_layers"] - dense)


NORM_TOPK = "MaxText divides the weights of the chosen experts by their sum all the same; logits differ much. There is no way round"
NORMED = only("norm_topk_prob", True, NORM_TOPK, default=True)


def dense(rope: tuple[Line, ...] = plain_rope()) -> tuple[Line, ...]:
    """A dense decoder whose rotary halves are kept apart."""
    return (*SIZES, head_dim(), MLP, *activation(), eps(), CONTEXT, *rope)
