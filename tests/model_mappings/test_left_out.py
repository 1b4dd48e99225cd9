"""A `config.json` that leaves sizes out is read as transformers' configuration class reads it."""

from __future__ import annotations

import copy

import pytest
from transformers import CONFIG_MAPPING

from weightbeam.model_mappings import configuration
from weightbeam.model_mappings.config import TEXT_SECTIONS, Config, ConfigError, Layout
from weightbeam.model_mappings.left_out import SIZES, left_out
from weightbeam.model_mappings.registry import families, family_of

FIELDS = sorted({field for sizes in SIZES.values() for field in sizes})
KINDS = sorted({kind for family in families() for kind in family.model_types if kind in CONFIG_MAPPING})


def part_at(config, section):
    for name in section:
        config = config.get(name) or {}
    return config


def sections(config):
    return [section for section in TEXT_SECTIONS if part_at(config, section)]


def read(config):
    """What a table and its lines take of a configuration, and not the size of a head where there are two."""
    family = family_of(Config(config))
    dims = dict(family.dims(Config(config), Layout(scan="scanned" in family.layouts)))
    if "q_lora" in dims:
        dims.pop("dim", None)
    return dims, configuration.read(family.configuration[config["model_type"]], Config(config)).keys


@pytest.mark.parametrize("kind", KINDS)
def test_a_size_that_is_left_out(kind):
    """For each size alone, of a model with twice the heads of the class's: so that what follows from others shows."""
    whole = CONFIG_MAPPING[kind]().to_dict()
    for section in sections(whole):
        part = part_at(whole, section)
        if "num_attention_heads" in part and kind not in ("glm5_next", "glm5_next_text"):  # which want as many of both
            part["num_attention_heads"] *= 2
    if kind == "deepseek_v2":
        whole["num_experts_per_tok"] = 6  # the class has none
    checked = 0
    for section in sections(whole):
        for field in FIELDS:
            config = copy.deepcopy(whole)
            if part_at(config, section).pop(field, None) is None:
                continue
            made = CONFIG_MAPPING[kind].from_dict(copy.deepcopy(config)).to_dict()
            try:
                found = read(config)
            except ConfigError as e:  # of one that we have no default of
                found = str(e)
            if found not in (f"config.json has no {field!r}", f"config.json has no {'.'.join([*section, field])!r}"):
                assert found == read(made), field
                checked += 1
    assert checked


def test_null_is_no_size_that_is_left_out():
    """transformers takes null for what it means: a head a key, or a query without a latent."""
    assert left_out({"model_type": "qwen2", "num_key_value_heads": None}, "num_key_value_heads") is None
    config = Config(model_type="deepseek_v3", q_lora_rank=None)
    assert (config.count("q_lora_rank"), Config(model_type="deepseek_v3").count("q_lora_rank")) == (0, 1536)


@pytest.mark.parametrize("said", [{}, {"rope_theta": 1000}, {"rope_scaling": None}, {"rope_parameters": {}}], ids=repr)
def test_a_rotary_embedding_that_is_left_out(said):
    """gpt-oss's class has YaRN then."""
    config = {
        name: value for name, value in CONFIG_MAPPING["gpt_oss"]().to_dict().items() if not name.startswith("rope_")
    } | said
    made = CONFIG_MAPPING["gpt_oss"].from_dict(copy.deepcopy(config)).to_dict()
    assert read(config) == read(made)


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_vl_moe", "qwen3_omni_moe"])
def test_a_width_that_no_layer_has(kind):
    """All layers have experts, and the dense MLP's width may be left out."""
    config = CONFIG_MAPPING[kind]().to_dict()
    wanted = read(config)
    for section in sections(config):
        part_at(config, section).pop("intermediate_size", None)
    assert read(config) == wanted
