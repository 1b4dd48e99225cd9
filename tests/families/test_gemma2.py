"""Gemma 2: what MaxText computes with the converted arrays is what transformers computes with the checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from families.numpy_decoder import assert_logits, attend, below, both, gated, gelu, in_order, rms_norm
from lazily import lazily

from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.families import gemma2
from weightbeam.model_mappings.plan import expand

transformers = lazily("transformers")

IDS = np.random.default_rng(2).integers(0, 240, 16)


def forward(arrays: dict, is_scanned: bool, c: transformers.Gemma2Config) -> np.ndarray:
    """`Gemma2DecoderLayer`, a local and a global half, neither of which scales the query; the head is the embedding."""
    embedding = arrays["token_embedder.embedding"]
    x = embedding[IDS]
    for layer in in_order(arrays, is_scanned):
        for kind, window in (("local", c.sliding_window), ("global", None)):

            def norm(x: np.ndarray, name: str) -> np.ndarray:
                return rms_norm(x, layer[f"{name}_{kind}.scale"], c.rms_norm_eps)  # noqa: B023, called here

            attention = below(layer, f"self_attention_{kind}.")
            attended = attend(
                norm(x, "pre_self_attention_norm"),
                attention,
                theta=10_000.0,
                window=window,
                epsilon=c.rms_norm_eps,
                cap=50.0,
            )
            x = x + norm(attended, "post_self_attention_norm")
            x = x + norm(gated(norm(x, "pre_ffw_norm"), below(layer, f"mlp_{kind}."), gelu), "post_ffw_norm")
    # normalize_embedding_logits
    logits = rms_norm(x, arrays["decoder.decoder_norm.scale"], c.rms_norm_eps) @ embedding.T / np.sqrt(x.shape[-1])
    return np.tanh(logits / 30.0) * 30.0


@pytest.mark.parametrize("layout", ["scanned", "unscanned"])
@pytest.mark.parametrize("model", ["cases/gemma2", "models/gemma2-27b"])
def test_logits_are_those_of_transformers(generated: Path, tmp_path: Path, model: str, layout: str) -> None:
    """The second has, like the 27B, heads of another size than `query_pre_attn_scalar`, for which MaxText's converter
    would be wrong.
    """
    scan = layout == "scanned"
    arrays, hf = both(generated / model, tmp_path / "out", "Gemma2ForCausalLM", scan)
    got, vocab = forward(arrays, scan, hf.config), hf.config.vocab_size
    assert got.shape[1] == 256
    assert_logits(got[:, :vocab], hf, IDS)
    assert not got[:, vocab:].any()  # the padding of the vocabulary


# what the hub's config.json has, with small sizes: it doesn't say that the head is tied
HUB = dict(
    model_type="gemma2", vocab_size=256_000, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=48,
    num_hidden_layers=4, query_pre_attn_scalar=16, sliding_window=4096,
)  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "wanted"), [(256_000, 256_128), (256_001, 256_128), (256_127, 256_128), (256_128, 256_256)]
)
def test_the_vocabulary_is_padded_to_the_next_multiple_of_128(rows: int, wanted: int) -> None:
    arrays = expand(gemma2.FAMILY, Config(HUB | dict(vocab_size=rows)), Layout())
    assert arrays["params/token_embedder/embedding"][0].shape == (wanted, 32)
    assert "params/decoder/logits_dense/kernel" not in arrays


@pytest.mark.parametrize("rows", [255_000, 256_000, 257_000])
def test_vocab_size_says_otherwise(rows: int) -> None:
    layout = Layout(vocab=rows)
    assert expand(gemma2.FAMILY, Config(HUB), layout)["params/token_embedder/embedding"][0].shape == (rows, 32)
    assert ("model.embed_tokens.weight[255000:]" in gemma2.FAMILY.drops(Config(HUB), layout)) == (rows == 255_000)


@pytest.mark.parametrize("scan", [True, False])
def test_layers_that_dont_pair_are_refused(scan: bool) -> None:
    with pytest.raises(ConfigError, match="'num_hidden_layers' is 5; MaxText's Gemma 2 has layers in pairs"):
        gemma2.FAMILY.stacks(Config(HUB | dict(num_hidden_layers=5)), Layout(scan=scan))
    with pytest.raises(ConfigError, match="'layer_types' isn't the pattern"):
        gemma2.FAMILY.stacks(
            Config(HUB | dict(layer_types=["full_attention", "sliding_attention"] * 2)), Layout(scan=scan)
        )
