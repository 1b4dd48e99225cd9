"""Whatever changes a rotary embedding for transformers changes what MaxText is told, or a person is."""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from facts import config_of, load_trees

from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.maxtext_config import maxtext_config
from weightbeam.model_mappings.naming import ModelNaming
from weightbeam.model_mappings.registry import family_by_config

# of a model of each `model_type` that transformers has a class of
MODELS = {config["model_type"]: (config, tree.model) for tree in load_trees().values() if (config := config_of(tree))}
TOP = ("rope_theta", "partial_rotary_factor", "rope_local_base_freq", "compress_rope_theta")
ORIGINAL = {"factor": 4.0, "original_max_position_embeddings": 4096}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": ORIGINAL,
    "llama3": ORIGINAL | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": ORIGINAL | {"short_factor": [1.0], "long_factor": [2.0]},
    "proportional": {"partial_rotary_factor": 0.25},
}
# what says nothing new: a default, a second name, sections in the only order that there is
SILENT = {
    "without beta_fast", "without beta_slow", "without type", "without mrope_section", "without mrope_interleaved", "other mrope_interleaved",
}  # fmt: skip
# the release's YaRN is told as such, whatever its numbers; transformers fails without a base for sliding layers
MORE = {
    "deepseek_v4": {"other beta_fast", "other beta_slow", "other factor", "without original_max_position_embeddings"},
    "gemma4": {"without rope_theta"},
    "gemma4_unified": {"without rope_theta"},
}


def text(config: dict[str, Any]) -> dict[str, Any]:
    """The part about the text model."""
    for section in ("thinker_config", "text_config"):
        if isinstance(config.get(section), dict):
            config = config[section]
    return config


def changed(config: dict[str, Any], path: tuple[str, ...], change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """A copy with another object at a path of its text's part."""
    made = copy.deepcopy(config)
    part = text(made)
    for key in path:
        part = part.setdefault(key, {})
    change(part)
    return made


def changes(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is done, and the configuration after it: each field left out, or another; each kind of embedding."""
    part = text(config)
    places: list[tuple[str, ...]] = [()]
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(said := part.get(name), dict):
            places += [(name, key) for key in said if isinstance(said[key], dict)] or [(name,)]
    for place in places:
        held: Any = part
        for key in place:
            held = held[key]
        for name in TOP if not place else [*held]:
            if (value := held.get(name)) is None:
                continue
            yield f"without {name}", changed(config, place, lambda at, name=name: at.pop(name))
            if isinstance(value, int | float):
                other = not value if isinstance(value, bool) else 2 * value
                yield (
                    f"other {name}",
                    changed(config, place, lambda at, name=name, other=other: at.update({name: other})),
                )
        for kind, more in KINDS.items():
            to = place or ("rope_scaling",)

            def be(at: dict[str, Any], kind: str = kind, more: dict[str, Any] = more) -> None:
                at.pop("type", None)
                at.update({"rope_type": kind} | more)

            yield f"{kind} in {'.'.join(to)}", changed(config, to, be)


def theirs(config: dict[str, Any]) -> Any:
    """What transformers' class makes of it."""
    from transformers import AutoConfig

    found = AutoConfig.for_model(**copy.deepcopy(config))
    return json.loads(json.dumps(getattr(found, "thinker_config", found).get_text_config().rope_parameters))


def ours(config: dict[str, Any], model: str) -> Any:
    """What MaxText is told, and a person."""
    family = family_by_config(Config(config))
    assert family is not None
    made = maxtext_config(family, Config(config), Layout(), ModelNaming(model))
    return made.settings, made.limits


@pytest.mark.parametrize("kind", sorted(MODELS.keys() - {"kimi_k2"}))
def test_no_change_is_silent(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is wrong where transformers refuses it, or we do."""
    (config, model), tried, silent = MODELS[kind], 0, set()
    with warnings.catch_warnings(), caplog.at_level(logging.CRITICAL):
        warnings.simplefilter("ignore")
        before, told = theirs(config), ours(config, model)
        for what, other in changes(config):
            try:
                is_same = theirs(other) == before
            except Exception:
                continue
            tried += 1
            try:
                if not is_same and ours(other, model) == told:
                    silent.add(what)
            except ConfigError:
                continue
    assert tried > 5
    assert silent <= SILENT | MORE.get(kind, set())


LINEAR, OLD_LINEAR = {"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}
LAYERED: list[dict[str, Any]] = [
    {"rope_parameters": None, "rope_scaling": OLD_LINEAR},
    {"rope_parameters": None, "rope_scaling": LINEAR},
    {"rope_parameters": LINEAR},
    {"rope_parameters": {"sliding_attention": {}, "full_attention": {}}, "rope_scaling": OLD_LINEAR},
    {"rope_parameters": {"sliding_attention": {}, "full_attention": {"factor": 8.0}}, "rope_scaling": OLD_LINEAR},
]
HALF, OLD_YARN = {"partial_rotary_factor": 0.5}, ORIGINAL | {"type": "yarn"}
V4 = {"rope_parameters": None, "rope_scaling": None, "rope_theta": 1e5, "compress_rope_theta": 1e6}
OWN = {  # Gemma 4's
    "sliding_attention": {"rope_type": "default", "rope_theta": 5.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 6.0, "partial_rotary_factor": 0.5},
}
SPELLINGS: dict[str, list[dict[str, Any]]] = {
    "deepseek_v4": [
        V4,
        V4 | {"partial_rotary_factor": 0.5},
        V4 | {"qk_rope_head_dim": None},
        V4 | {"qk_rope_head_dim": None, "partial_rotary_factor": 0.25},
        V4 | {"rope_parameters": HALF | {"rope_type": "default", "rope_theta": 5.0}},
        V4 | {"rope_parameters": {"main": HALF | {"rope_theta": 5.0}}},
        V4 | {"rope_parameters": {"main": {}, "compress": {"rope_theta": 5.0}}, "partial_rotary_factor": 0.5},
        V4 | {"rope_scaling": {"main": HALF | {"rope_theta": 5.0}, "compress": HALF | {"rope_theta": 6.0}}},
        V4 | {"rope_parameters": {"main": HALF, "compress": HALF}, "rope_scaling": OLD_YARN},
    ],
    "gemma3": LAYERED,
    "gemma4": [
        {"rope_parameters": OWN},
        {"rope_parameters": None, "rope_scaling": OWN},
        {"rope_parameters": {}, "rope_scaling": OWN},
        {"rope_scaling": OWN},
    ],
    "olmo3": LAYERED,
}  # fmt: skip


@pytest.mark.parametrize(("kind", "said"), [(kind, said) for kind in SPELLINGS for said in SPELLINGS[kind]], ids=repr)
def test_a_spelling_is_what_transformers_makes_of_it(kind: str, said: dict[str, Any]) -> None:
    """MaxText is told the same of it as of the parameters that transformers' class has then."""
    config, model = MODELS[kind]
    spelled = changed(config, (), lambda part: part.update(said))
    if "qk_rope_head_dim" in said:
        text(spelled).pop("qk_rope_head_dim")
    plain = dict.fromkeys((*said, *TOP, "rope_scaling")) | {"rope_parameters": theirs(spelled)}
    assert ours(spelled, model)[0] == ours(changed(spelled, (), lambda part: part.update(plain)), model)[0]


@pytest.mark.parametrize(
    "said",
    [
        {"rope_scaling": LINEAR},
        {"rope_parameters": LINEAR},
        {"rope_parameters": {}},
        {"rope_scaling": {}},
        {"rope_scaling": {"sliding_attention": {}}},
    ],
    ids=repr,
)
def test_what_transformers_cannot_run(said: dict[str, Any]) -> None:
    """Gemma 4's class has nothing for kinds of layers that aren't said, and its model fails."""
    config, model = MODELS["gemma4"]
    spelled = changed(config, (), lambda part: part.update(said))
    assert "full_attention" not in theirs(spelled)
    with pytest.raises(ConfigError, match="transformers can't run the model"):
        ours(spelled, model)


@pytest.mark.parametrize("share", ["x", -1, 0.001])
def test_a_share_that_turns_nothing_is_refused(share: Any) -> None:
    """By the name of the field that was read."""
    config, model = MODELS["deepseek_v4"]
    spelled = changed(config, (), lambda part: part.update(V4 | {"partial_rotary_factor": share}))
    with pytest.raises(ConfigError, match=f"'partial_rotary_factor' should be .*, but is {share!r}"):
        ours(spelled, model)


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"rope_parameters": {"full_attention": 5}}, "rope_parameters.full_attention"),
        ({"rope_parameters": 5}, "rope_parameters"),
        ({"rope_scaling": 5}, "rope_scaling"),
    ],
)
@pytest.mark.parametrize("kind", ["gemma3", "olmo3"])
def test_what_is_no_object_is_named(kind: str, said: dict[str, Any], field: str) -> None:
    """By the field that was read."""
    config, model = MODELS[kind]
    spelled = changed(config, (), lambda part: part.update(V4 | said))
    with pytest.raises(ConfigError, match=f"'{field}' should be an object, but is 5"):
        ours(spelled, model)
