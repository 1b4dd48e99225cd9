"""Rotary embeddings: converted weights give MaxText the attention scores that Hugging Face computes, and a wrong
permutation doesn't.

The formulas are those of transformers 5.23.0 (models/llama/modeling_llama.py: `rotate_half`, `apply_rotary_pos_emb`,
`repeat_kv`) and of MaxText e591f30 (src/maxtext/layers/embeddings.py: `LLaMARotaryEmbedding`, `RotaryEmbedding`),
written down in float64.
"""

from __future__ import annotations

import numpy as np
import pytest
from facts.tiny import CONFIGS, shapes

from weightbeam.model_mappings.boxes import whole
from weightbeam.model_mappings.config import Layout

# 1/sqrt(16) is exact: what is left of a difference is rounding in float64
EMBED, HEADS, KV, DIM, TOKENS = 10, 4, 2, 16, 7
RANDOM = np.random.default_rng(0)
INPUTS = RANDOM.standard_normal((TOKENS, EMBED))
Q_PROJ = RANDOM.standard_normal((HEADS * DIM, EMBED))
K_PROJ = RANDOM.standard_normal((KV * DIM, EMBED))
ANGLES = np.arange(TOKENS)[:, None, None] / 10_000.0 ** (2 * np.arange(DIM // 2) / DIM)  # token, head, pair
TIGHT = dict(rtol=1e-11, atol=1e-11)


def rotate_halves(x):
    """transformers' rotary embedding, and MaxText's `RotaryEmbedding`: index i turns with index i + dim/2, at frequency
    i.
    """
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(np.concatenate([ANGLES, ANGLES], -1)), np.sin(np.concatenate([ANGLES, ANGLES], -1))
    return x * cos + np.concatenate([-second, first], -1) * sin


def rotate_pairs(x):
    """MaxText's `LLaMARotaryEmbedding`: indices 2i and 2i + 1 are a complex number, turned at frequency i."""
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * ANGLES)
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


def scores(query, key):
    """(token, heads, dim), (token, kv, dim) -> (heads, token, token): each key head serves heads / kv query heads next
    to each other.
    """
    return np.einsum("thd,shd->hts", query, np.repeat(key, HEADS // KV, axis=1))


def hugging_face_scores():
    query, key = (INPUTS @ weight.T for weight in (Q_PROJ, K_PROJ))
    return scores(
        rotate_halves(query.reshape(TOKENS, HEADS, DIM)), rotate_halves(key.reshape(TOKENS, KV, DIM))
    ) / np.sqrt(DIM)


@pytest.fixture
def maxtext_scores(check, make_specs, assemble):
    """`maxtext_scores(kind, model, rotate)`: the scores of weights that our table converts; MaxText doesn't scale them
    again.
    """

    def maxtext_scores(kind, model, rotate):
        config = CONFIGS[kind] | {
            "hidden_size": EMBED,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV,
            "head_dim": DIM,
        }
        checked = check(config, make_specs(shapes(config)), Layout(scan=False, model=model))
        assert checked.problems == []
        tensors = {"model.layers.0.self_attn.q_proj.weight": Q_PROJ, "model.layers.0.self_attn.k_proj.weight": K_PROJ}
        kernels = {}
        for array in checked.arrays:
            if array.key.endswith(("layers_0.self_attention.query.kernel", "layers_0.self_attention.key.kernel")):
                kernels[array.key.split(".")[-2]] = kernel = np.full(array.shape, np.nan)
                assemble(array, tensors, kernel, whole(array.shape))
        query, key = (np.einsum("te,ehd->thd", INPUTS, kernels[name]) for name in ("query", "key"))
        return scores(rotate(query), rotate(key))

    return maxtext_scores


PAIRED = [("llama", "llama3.1-8b"), ("llama", "llama3.1-405b"), ("llama", "llama3.2-1b")]
HALVES = [
    ("llama", "llama2-7b"),
    ("llama", "llama3-8b"),
    ("llama", "llama3.3-70b"),
    ("mistral", "mistral-7b"),
    ("llama", None),
    ("mistral", None),
    ("mixtral", None),
]


@pytest.mark.parametrize(("kind", "model"), PAIRED)
def test_paired_rotary_halves(maxtext_scores, kind, model):
    """Llama 3.1: permuted weights under the paired rotary embedding."""
    np.testing.assert_allclose(maxtext_scores(kind, model, rotate_pairs), hugging_face_scores(), **TIGHT)


@pytest.mark.parametrize(("kind", "model"), HALVES)
def test_half_split_rotary(maxtext_scores, kind, model):
    """Llama 2, 3, 3.3, Mistral, Mixtral: weights in Hugging Face's order under the half-split rotary embedding."""
    np.testing.assert_allclose(maxtext_scores(kind, model, rotate_halves), hugging_face_scores(), **TIGHT)


@pytest.mark.parametrize(
    ("kind", "model", "rotate"),
    [*((*case, rotate_halves) for case in PAIRED), *((*case, rotate_pairs) for case in HALVES)],
)
def test_wrong_permutation_gives_other_scores(maxtext_scores, kind, model, rotate):
    """Weights that aren't permuted for the paired embedding, or are for the half-split one: far from right, so the
    tests above would fail.
    """
    expected = hugging_face_scores()
    first = np.s_[:, 0, 0]  # nothing turns at position 0: the same permutation of query and key keeps these
    made = maxtext_scores(kind, model, rotate)
    np.testing.assert_allclose(made[first], expected[first], **TIGHT)
    assert np.abs(made - expected).max() > 0.5 * np.abs(expected).max()
