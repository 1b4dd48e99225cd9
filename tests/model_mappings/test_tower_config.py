"""What MaxText is told of the towers, and what it can't express of them: field by field of transformers' classes."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
from facts import config_of, load_trees

from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.maxtext_config import MaxTextConfig, maxtext_config
from weightbeam.model_mappings.naming import ModelNaming
from weightbeam.model_mappings.plan import expand
from weightbeam.model_mappings.registry import family_by_config
from weightbeam.model_mappings.towers import TANH

TREES = {tree.model: config_of(tree) for tree in load_trees().values() if tree.multimodal}
INITIALISER, TRAINING = "of new weights alone", "of training alone"
UNREAD = "transformers' tower doesn't look at it"
QWEN = {"initializer_range": INITIALISER, "rope_parameters.rope_type": "transformers refuses another one than axial"}
NOTHING = {  # fields that change nothing of what a tower makes of its inputs, with the reason
    "siglip_vision_model": {"attention_dropout": TRAINING, "vision_use_head": "a head that Gemma 3 doesn't use"},
    "gemma4_vision": QWEN
    | {"attention_dropout": TRAINING, "attention_bias": UNREAD, "max_position_embeddings": UNREAD},
    "gemma4_unified_vision": {"initializer_range": INITIALISER},
    "qwen3_vl_vision": QWEN,
    "qwen3_vl_moe_vision": QWEN,
    "qwen3_5_moe_vision": QWEN,
    "qwen3_omni_moe_vision_encoder": QWEN,
    "qwen3_omni_moe_audio_encoder": {
        **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), TRAINING),
        "initializer_range": INITIALISER,
        "scale_embedding": "transformers keeps the factor and multiplies nothing by it",
    },
}
TOWERS = [
    ("gemma3-4b", "vision_config", "siglip_vision_model"),
    ("gemma4-31b", "vision_config", "gemma4_vision"),
    ("gemma4-12b", "vision_config", "gemma4_unified_vision"),
    ("qwen3-vl-2b", "vision_config", "qwen3_vl_vision"),
    ("cosmos3-nano-reasoner", "vision_config", "qwen3_vl_vision"),
    ("qwen3-vl-30b-a3b", "vision_config", "qwen3_vl_moe_vision"),
    ("qwen3.5-35b-a3b", "vision_config", "qwen3_5_moe_vision"),
    ("qwen3-omni-30b-a3b", "thinker_config.vision_config", "qwen3_omni_moe_vision_encoder"),
    ("qwen3-omni-30b-a3b", "thinker_config.audio_config", "qwen3_omni_moe_audio_encoder"),
]


def changed(model: str, path: str, value: Any) -> dict[str, Any]:
    """A model's `config.json` with another value at a path."""
    config = copy.deepcopy(TREES[model])
    *parts, last = path.split(".")
    about = config
    for part in parts:
        about = about.setdefault(part, {})
    about[last] = value
    return config


def at(config: Any, path: str, default: Any = None) -> Any:
    """The value at a path, or the default."""
    for part in path.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return default if config is None else config


def told(config: dict[str, Any], model: str, multimodal: bool = True) -> MaxTextConfig:
    """What MaxText must be told of the model."""
    about = Config(config)
    return maxtext_config(family_by_config(about), about, Layout(scan=False, multimodal=multimodal), ModelNaming(model))


def conversion(config: dict[str, Any], model: str) -> object:
    """All that a conversion with the towers makes of a `config.json`, or why it refuses it."""
    layout = Layout(scan=False, multimodal=True, model=model)
    try:
        made = told(config, model)
        plan = expand(family_by_config(Config(config)), Config(config), layout)
    except ConfigError as e:
        return str(e)
    arrays = {path: [(part.template, part.shape, part.rule) for part in parts] for path, parts in plan.items()}
    return made.settings, made.limits, arrays


def other(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 + (not value)
    return "relu" if isinstance(value, str) else list(value)[:-1]


def fields_of(kind: str) -> dict[str, Any]:
    """The fields of transformers' own class for a tower, with their defaults; those of an object one by one."""
    from transformers import AutoConfig, PretrainedConfig

    default = AutoConfig.for_model(kind)
    common = {field.name for field in dataclasses.fields(PretrainedConfig)}
    found: dict[str, Any] = {}
    for name in {field.name for field in dataclasses.fields(type(default))} - common:
        value = getattr(default, name, None)
        if isinstance(value, dict):
            found |= {f"{name}.{inner}": each for inner, each in value.items()}
        elif value is not None:
            found[name] = list(value) if isinstance(value, tuple) else value
    return found


@pytest.mark.parametrize(("model", "part", "kind"), TOWERS)
def test_no_field_of_a_tower_is_passed_over(model: str, part: str, kind: str) -> None:
    """Another value of any field changes what MaxText is told, or the plan, or is said to be what MaxText can't
    express; but for those that change nothing.
    """
    fields = {name: at(TREES[model], f"{part}.{name}", value) for name, value in fields_of(kind).items()}
    here = {name: changed(model, f"{part}.{name}", value) for name, value in fields.items()}
    there = {name: changed(model, f"{part}.{name}", other(value)) for name, value in fields.items()}
    silent = {name for name in fields if conversion(here[name], model) == conversion(there[name], model)}
    assert silent == NOTHING[kind].keys()


@pytest.mark.parametrize(("model", "part", "kind"), TOWERS)
def test_the_values_that_a_class_has(model: str, part: str, kind: str) -> None:
    """A tower that names none of the fields that have been told is transformers' own."""
    named, unnamed, defaults = copy.deepcopy(TREES[model]), copy.deepcopy(TREES[model]), fields_of(kind)
    checked = (
        "hidden_act", "hidden_activation", "activation_function", "layer_norm_eps", "rms_norm_eps", "pooling_kernel_size", "patch_size", "image_size",
        "spatial_merge_size", "temporal_patch_size", "num_position_embeddings", "num_mel_bins", "n_window", "n_window_infer", "max_source_positions",
        "conv_chunksize", "deepstack_visual_indexes",
    )  # fmt: skip
    at(named, part).update({name: value for name, value in defaults.items() if name in checked})
    for name in (*checked, "rope_parameters"):
        at(unnamed, part).pop(name, None)
    assert conversion(named, model) == conversion(unnamed, model)
    if (theta := defaults.get("rope_parameters.rope_theta")) is not None:
        assert told(unnamed, model).settings["rope_theta_for_vit"] == theta


@pytest.mark.parametrize(
    ("model", "path", "value", "words"),
    [
        ("gemma3-4b", "vision_config.hidden_act", "relu", ["'relu'", "built in"]),
        ("gemma3-4b", "vision_config.hidden_act", "gelu", ["'gelu'", "0.0005"]),
        ("gemma3-4b", "vision_config.layer_norm_eps", 0.1, ["vision_config.layer_norm_eps is 0.1", "1e-06"]),
        ("gemma3-4b", "mm_tokens_per_image", 64, ["mm_tokens_per_image is 64", "256"]),
        ("gemma4-31b", "vision_config.hidden_activation", "relu", ["'relu'", "built in"]),
        ("gemma4-31b", "vision_config.rms_norm_eps", 0.1, ["vision_config.rms_norm_eps is 0.1", "1e-06"]),
        ("gemma4-31b", "vision_config.pooling_kernel_size", 2, ["pooling_kernel_size is 2", "3 by 3"]),
        ("gemma4-12b", "vision_config.rms_norm_eps", 0.1, ["vision_config.rms_norm_eps is 0.1", "1e-06"]),
        ("qwen3-vl-2b", "vision_config.hidden_act", "relu", ["'relu'", "built in"]),
        ("qwen3-vl-2b", "text_config.rms_norm_eps", 1e-5, ["text_config.rms_norm_eps is 1e-05", "the model's 1e-06"]),
        ("qwen3.5-35b-a3b", "vision_config.hidden_act", "silu", ["'silu'", "built in"]),
        ("qwen3-omni-30b-a3b", "thinker_config.vision_config.hidden_act", "relu", ["vision_config.hidden_act is 'relu'"]),
        ("qwen3-omni-30b-a3b", "thinker_config.audio_config.activation_function", "relu", ["audio_config.activation_function is 'relu'"]),
        ("qwen3-omni-30b-a3b", "thinker_config.audio_config.n_window_infer", 400, ["n_window_infer is 400", "100 frames"]),
    ],
)  # fmt: skip
def test_what_maxtexts_towers_have_built_in(model: str, path: str, value: Any, words: list[str]) -> None:
    """It is told where the tower is converted, and nowhere else."""
    config = changed(model, path, value)
    new = set(told(config, model).limits) - set(told(TREES[model], model).limits)
    (limit,) = new
    assert all(word in limit for word in words)
    assert not new.intersection(told(config, model, multimodal=False).limits)


@pytest.mark.parametrize("model", TREES)
def test_of_a_release_only_what_differs_is_told(model: str) -> None:
    """Qwen 3 Omni's audio tower has the exact GELU, and looks at several chunks at a time: MaxText has neither."""
    text = told(TREES[model], model, multimodal=False).limits
    limits = [limit for limit in told(TREES[model], model).limits if limit not in text]
    named = ["activation_function is 'gelu'", "n_window_infer is 800"] if "omni" in model else []
    assert [name in limit for name, limit in zip(named, limits, strict=True)] == [True] * len(named)


def test_a_window_of_one_chunk_is_maxtexts() -> None:
    """Then transformers' audio tower looks at one chunk at a time, too."""
    config = changed("qwen3-omni-30b-a3b", "thinker_config.audio_config.n_window_infer", 199)
    assert not any("n_window" in limit for limit in told(config, "qwen3-omni-30b-a3b").limits)


@pytest.mark.parametrize("model", ["qwen3-vl-2b", "qwen3.5-35b-a3b", "gemma4-31b", "cosmos3-nano-reasoner"])
def test_the_base_of_a_towers_frequencies(model: str) -> None:
    """It is one of MaxText's keys, in either spelling of transformers'."""
    for path, value in (("vision_config.rope_parameters", {"rope_theta": 77.0}), ("vision_config.rope_theta", 77.0)):
        config = changed(model, path, value)
        if path.endswith("theta"):
            config["vision_config"].pop("rope_parameters", None)
        made = told(config, model)
        assert made.settings["rope_theta_for_vit"] == 77
        assert "rope_theta_for_vit=77" in made.with_keys({"use_multimodal": True}).command_line()


def test_the_tanh_form_has_several_names() -> None:
    """transformers' functions that are the one that MaxText has, and none else."""
    import torch
    from transformers.activations import ACT2FN

    x = torch.linspace(-6, 6, 1001, dtype=torch.float64)
    names = [name for name in ACT2FN if "gelu" in name and name not in ("xielu", "clipped_gelu")]
    same = {name for name in names if (ACT2FN[name](x) - ACT2FN[TANH[0]](x)).abs().max() < 1e-9}
    assert same == set(TANH)
