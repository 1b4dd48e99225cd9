"""Gemma 1: what MaxText folds into the weights, on a tiny model that transformers writes."""

from __future__ import annotations

import json

import numpy as np
from lazily import lazily

from weightbeam.formats.orbax import open_arrays
from weightbeam.formats.storage import open_store
from weightbeam.pipelines.cli import main

torch = lazily("torch")
transformers = lazily("transformers")

SIZES = dict(
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=8,
    vocab_size=256,
)


def test_what_maxtext_folds_into_the_weights(tmp_path):
    """Norms are 1 + w, the embedding is multiplied by √embed, the query by 1/√dim; the vocabulary has MaxText's rows,
    the head no array.
    """
    torch.manual_seed(3)
    model = transformers.GemmaForCausalLM(transformers.GemmaConfig(**SIZES)).float()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "hf")
    state = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    assert (
        main(
            ["convert", "--source", str(tmp_path / "hf"), "--output", str(tmp_path / "out"), "--save_dtype", "float32"]
        )
        == 0
    )
    arrays = {
        key: store.read().result()
        for key, store in open_arrays(open_store(str(tmp_path / "out" / "0" / "items"))).items()
    }
    layers = "params.params.decoder.layers"
    stacked = {
        name: np.stack([state[f"model.layers.{i}.{name}.weight"] for i in range(3)], 1)
        for name in ("input_layernorm", "post_attention_layernorm")
    }
    np.testing.assert_array_equal(arrays[f"{layers}.pre_self_attention_norm.scale"], 1 + stacked["input_layernorm"])
    np.testing.assert_array_equal(arrays[f"{layers}.pre_ffw_norm.scale"], 1 + stacked["post_attention_layernorm"])
    np.testing.assert_array_equal(arrays["params.params.decoder.decoder_norm.scale"], 1 + state["model.norm.weight"])
    query = np.stack(
        [state[f"model.layers.{i}.self_attn.q_proj.weight"].reshape(4, 8, 48).transpose(2, 0, 1) for i in range(3)], 1
    )
    np.testing.assert_array_equal(arrays[f"{layers}.self_attention.query.kernel"], query * np.float32(8**-0.5))
    embedding = arrays["params.params.token_embedder.embedding"]
    assert embedding.shape == (384, 48)
    np.testing.assert_array_equal(embedding[:256], state["model.embed_tokens.weight"] * np.float32(48**0.5))
    assert not embedding[256:].any()
    assert not any("logits_dense" in key for key in arrays)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["model_type"] == "gemma"
    assert "model_name: gemma-" in (tmp_path / "out" / "0" / "maxtext.yml").read_text()
