"""OLMo 3: what MaxText computes with the converted arrays is what transformers computes with the checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from families.numpy_decoder import assert_logits, attend, below, both, gated, in_order, rms_norm, silu

from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.families import olmo3

IDS = np.random.default_rng(3).integers(0, 250, 16)


def forward(arrays: dict, is_scanned: bool, epsilon: float, window: int) -> np.ndarray:
    """`Olmo3DecoderLayer`: a norm behind attention and behind MLP, none before; every fourth layer sees everything."""
    x = arrays["token_embedder.embedding"][IDS]
    for i, layer in enumerate(in_order(arrays, is_scanned)):
        attention = below(layer, "attention.")
        dim = attention["query.kernel"].shape[-1]
        attended = attend(
            x, attention, theta=500_000.0, window=None if i % 4 == 3 else window, epsilon=epsilon, scale=dim**-0.5
        )
        x = x + rms_norm(attended, layer["post_self_attention_layer_norm.scale"], epsilon)
        x = x + rms_norm(gated(x, below(layer, "mlp."), silu), layer["post_mlp_layer_norm.scale"], epsilon)
    return rms_norm(x, arrays["decoder.decoder_norm.scale"], epsilon) @ arrays["decoder.logits_dense.kernel"]


@pytest.mark.parametrize("layout", ["scanned", "unscanned"])
@pytest.mark.parametrize("model", ["cases/olmo3", "models/olmo3-grouped"])
def test_logits_are_those_of_transformers(generated: Path, tmp_path: Path, model: str, layout: str) -> None:
    """Eight layers with as many key as query heads, as in the 7B, and four with half as many, as in the 32B."""
    scan = layout == "scanned"
    arrays, hf = both(generated / model, tmp_path / "out", "Olmo3ForCausalLM", scan)
    assert_logits(forward(arrays, scan, hf.config.rms_norm_eps, hf.config.sliding_window), hf, IDS)


CONFIG = dict(
    model_type="olmo3", vocab_size=64, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, num_hidden_layers=8,
    tie_word_embeddings=False,
)  # fmt: skip


def test_a_number_of_layers_that_isnt_whole_cycles_is_refused_where_maxtext_scans() -> None:
    """MaxText's scan has int(layers / 4) turns: it would leave out the rest."""
    with pytest.raises(ConfigError, match="cycles of 4"):
        olmo3.FAMILY.stacks(Config(CONFIG | dict(num_hidden_layers=6)), Layout())
    assert len(olmo3.FAMILY.stacks(Config(CONFIG | dict(num_hidden_layers=6)), Layout(scan=False))) == 1 + 6


def test_another_pattern_of_layers_is_refused() -> None:
    types = ["full_attention", *["sliding_attention"] * 3] * 2
    with pytest.raises(ConfigError, match="'layer_types' isn't the pattern that MaxText repeats over the 8 layers"):
        olmo3.FAMILY.stacks(Config(CONFIG | dict(layer_types=types)), Layout())
    assert olmo3.FAMILY.stacks(Config(CONFIG | dict(layer_types=types[1:] + types[:1])), Layout())
