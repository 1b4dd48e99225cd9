"""The tensors that a release stores twice: left out on the way there, and known for the way back."""

from __future__ import annotations

import pytest
from facts import layouts_of, load_headers
from facts.tiny import CONFIGS, shapes

from weightbeam.model_mappings.audit import drop_reason
from weightbeam.model_mappings.config import Config, Layout
from weightbeam.model_mappings.plan import expand
from weightbeam.model_mappings.registry import family_by_config

HEADERS = load_headers()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", HEADERS)
def test_a_copy_is_dropped_and_its_original_is_read(name, tied):
    """Whatever is a copy is left out by the family's drops; what it is a copy of, the table reads."""
    config = Config(HEADERS[name].config | {"tie_word_embeddings": tied})
    # Qwen 3 Omni says it in the one, Llama 4 in the other
    for part in {"thinker_config", "text_config"} & config.keys():
        config[part] = config[part] | {"tie_word_embeddings": tied}
    family = family_by_config(config)
    for layout in layouts_of(HEADERS[name].config).values():
        copies = family.copies(config, layout)
        read = {
            tensor for parts in expand(family, config, layout).values() for part in parts for tensor in part.tensors
        }
        assert bool(copies) >= tied
        for copy, original in copies.items():
            assert drop_reason(copy, family.drops(config, layout))
            assert original in read
            assert copy not in read


def test_the_copies_of_multi_token_prediction():
    """DeepSeek's module has the embedding and the head once more; its last norm is its own."""
    config, layout = Config(CONFIGS["deepseek_v3"]), Layout(mtp=True)
    copies = family_by_config(config).copies(config, layout)
    n = config["num_hidden_layers"]
    assert copies == {
        f"model.layers.{n}.embed_tokens.weight": "model.embed_tokens.weight",
        f"model.layers.{n}.shared_head.head.weight": "lm_head.weight",
    }
    tensors = shapes(config)
    assert all(tensors[copy] == tensors[original] for copy, original in copies.items())
