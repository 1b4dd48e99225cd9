"""Rotary embeddings as configuration lines. MaxText takes them from flat keys, `config.json` says them in several ways.

transformers v4 wrote `rope_theta` and `rope_scaling` (and Gemma 3 `rope_local_base_freq`), v5 writes `rope_parameters`,
for models with several kinds of layers one object for each kind. What MaxText's embeddings make of the keys:
AI-Hypercomputer/maxtext, src/maxtext/layers/attentions.py (`init_rotary_embedding`) and embeddings.py, e591f30.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from weightbeam.model_mappings.config import Config, ConfigError
from weightbeam.model_mappings.configuration import Holds, Line, copied, derived, number, positive, unless
from weightbeam.model_mappings.left_out import ROPES

THETA = 10_000  # transformers' default
ROPE = "rope_parameters"
FULL = "full_attention"
# of Llama 3.1's scaling; LLaMARotaryEmbedding knows no others
LLAMA3 = dict(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=8192)


def rope_of(c: Config, kind: str = "") -> Config:
    """The rotary embedding's parameters, as v5 spells them: `rope_type`, `rope_theta`, `factor`, …; of one kind of
    layers, if `kind` says which.

    Raises:
      ConfigError: they aren't an object.
    """
    said = _full_rope(c) if kind == FULL else c.get("rope_scaling") or c.get(ROPE)
    if said is None:
        said = ROPES.get(str(c.get("model_type")), {})
    if isinstance(said, dict) and isinstance(said.get(kind), dict):
        said = said[kind]
    if not isinstance(said, dict):
        field = "rope_scaling" if c.get("rope_scaling") else ROPE
        raise ConfigError(f"config.json: {field!r} should be an object, but is {said!r}")
    flat = {key: value for key, value in said.items() if value is not None}
    theta = flat.get("rope_theta", c.get("rope_theta"))
    return Config({"rope_type": flat.get("type", "default")} | flat | ({} if theta is None else {"rope_theta": theta}))


def _full_rope(c: Config) -> dict[str, Any]:
    """The parameters of Gemma 3's and OLMo 3's layers with full attention (transformers v5.23.0, configuration_gemma3.py and
    configuration_olmo3.py, `convert_rope_params_to_dict`): `rope_scaling` on top of their own, of which nothing but a
    type, `default`, is there without `rope_parameters`. Gemma 4's are in one of the two alone (`sole_rope`).

    Raises:
      ConfigError: one of these isn't an object.
    """
    nested = None if c.get(ROPE) is None else c.part(ROPE)
    own = {"rope_type": "default"} if nested is None else nested.get(FULL) or {}
    scaling = c.part("rope_scaling") if c.get("rope_scaling") else {}
    if not isinstance(own, dict):
        raise ConfigError(f"config.json: '{ROPE}.{FULL}' should be an object, but is {own!r}")
    return {**own, **scaling}


def passed_over(c: Config, model: str | None) -> str | None:
    """A kind of embedding that `_full_rope` hasn't got: v4's key says it, or `rope_parameters` of no kind of layers."""
    scaling, flat = (c.part(field) if c.get(field) else Config() for field in ("rope_scaling", ROPE))
    theirs = "which transformers passes over in this model, and so do MaxText's keys; if the model was trained so"
    taken = (None, "default", rope_of(c, FULL)["rope_type"])
    if (old := scaling.get("type")) not in taken:
        return f"rope_scaling says {old!r} by the old key 'type', {theirs}, call it 'rope_type'"
    if (kind := flat.get("rope_type", flat.get("type"))) not in taken:
        return f"{ROPE} says {kind!r} of no kind of layers, {theirs}, say it in {ROPE}.{FULL}"
    return None


def nested_rope(c: Config, kind: str) -> Config | None:
    """The parameters that `config.json` has for one kind of layers alone; None where it has none, and others' aren't
    meant: `rope_scaling` of Gemma 3 and OLMo 3 is of the layers with full attention.
    """
    nested = c.get(ROPE)
    own = isinstance(nested, dict) and isinstance(nested.get(kind), dict)
    return rope_of(Config({ROPE: nested}), kind) if own else None


def sole_rope(c: Config, kind: str) -> Config | None:
    """The same, for models in which `rope_scaling` takes the place of `rope_parameters`."""
    return nested_rope(Config({ROPE: c.get("rope_scaling") or c.get(ROPE)}), kind)


def is_yarn(c: Config, kind: str = "") -> bool:
    """Whether the rotary embedding is YaRN's."""
    return rope_of(c, kind)["rope_type"] == "yarn"


def only_kinds(*known: str, kind: str = "", of: Callable[[Config, str], Config | None] = rope_of) -> Line:
    """The kinds of rotary embedding that MaxText's layers have, the first of them in place of any other.

    Args:
      known: their names in `config.json`.
      kind: the kind of layers that this is about; all unless said.
      of: finds their parameters: `nested_rope` or `sole_rope` where nothing but an object of their own is about them.
    """

    def limit(c: Config, model: str | None) -> str | None:
        rope = of(c, kind)
        if rope is None or rope["rope_type"] in known:
            return None
        found = f"rope_type is {rope['rope_type']!r}" + (f" in {kind} layers" if kind else "")
        return f"{found}: MaxText's layer has the {known[0]} embedding without it; logits differ, most at positions beyond the original context"

    return unless(limit)


def field_of(kind: str, name: str) -> str:
    """The path of a parameter in `config.json`: of one kind of layers, if `kind` says which."""
    return ".".join(filter(None, (ROPE, kind, name)))


def theta(kind: str = "", default: float = THETA) -> Line:
    """The base of the frequencies."""
    return derived(
        "rope_max_timescale",
        lambda c, _: positive(rope_of(c, kind).get("rope_theta", default)),
        field_of(kind, "rope_theta"),
    )


def yarn_lines(kind: str = "") -> tuple[Line, ...]:
    """YaRN's keys, for models whose rotary embedding it is."""

    def parameter(key: str, name: str, default: Any) -> Line:
        def find(c: Config, model: str | None) -> Any:
            value = rope_of(c, kind).get(name, default(c) if callable(default) else default)
            return value if isinstance(value, bool) else number(value)

        return derived(key, find, field_of(kind, name), when=lambda c: is_yarn(c, kind))

    return (
        parameter("rope_factor", "factor", 1),
        parameter("beta_fast", "beta_fast", 32),
        parameter("beta_slow", "beta_slow", 1),
        parameter(
            "original_max_position_embeddings",
            "original_max_position_embeddings",
            lambda c: c.size("max_position_embeddings"),
        ),
        parameter("rope_truncate", "truncate", True),
        derived("rope_interleave", lambda c, model: False, when=lambda c: is_yarn(c, kind)),
        *attention_scaling(kind, lambda c: is_yarn(c, kind)),
        unless(lambda c, model: yarn_limit(rope_of(c, kind)) if is_yarn(c, kind) else None),
    )


def attention_scaling(kind: str = "", when: Holds | None = None) -> tuple[Line, ...]:
    """Whether MaxText multiplies the turned query and key each by YaRN's usual scale, or by nothing."""

    def find(c: Config, model: str | None) -> bool:
        rope = rope_of(c, kind)
        return math.isclose(attention_scale(rope), yarn_scale(rope))

    def written_factor(keys: Mapping[str, Any]) -> float | None:
        return 1.0 if keys.get("rope_type") == "yarn" and keys.get("rope_attention_scaling") is False else None

    scale = copied(field_of(kind, "attention_factor"), written_factor)
    return derived("rope_attention_scaling", find, when=when), scale


def yarn_scale(rope: Config, mscale: float = 1) -> float:
    """The usual scale of YaRN, with `mscale` as DeepSeek has it."""
    factor = rope.get("factor", 1)
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def attention_scale(rope: Config) -> float:
    """By what transformers multiplies query and key each (v5.23.0, modeling_rope_utils.py,
    `_compute_yarn_parameters`).
    """
    if rope["rope_type"] != "yarn":
        return 1.0
    if (said := rope.get("attention_factor")) is not None:
        return float(number(said))
    mscale, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    return yarn_scale(rope, mscale) / yarn_scale(rope, of_all) if mscale and of_all else yarn_scale(rope)


def yarn_limit(rope: Config) -> str | None:
    """What of a YaRN embedding MaxText can't express."""
    scale, usual = attention_scale(rope), yarn_scale(rope)
    if not math.isclose(scale, usual) and not math.isclose(scale, 1):
        theirs = f"MaxText multiplies query and key by {usual:.4f} each, or by nothing"
        return f"the rotary embedding's attention factor is {scale:g}: {theirs}; attention is sharper or flatter than the model's"
    return None


PLAIN = {"default": "default", "linear": "default", "yarn": "yarn"}


def plain_rope(default: float = THETA, kind: str = "") -> tuple[Line, ...]:
    """The default embedding, scaled linearly or by YaRN; other kinds MaxText hasn't got. `kind`: the kind of layers
    that has it.
    """

    def find(c: Config, model: str | None) -> str:
        return PLAIN.get(rope_of(c, kind)["rope_type"], "default")

    rope = derived("rope_type", find, field_of(kind, "rope_type"))
    return (*scaled_rope(default, kind), rope, *linear_lines(kind), only_kinds(*PLAIN, kind=kind))


def scaled_rope(default: float = THETA, kind: str = "") -> tuple[Line, ...]:
    """The base of the frequencies, and what scales them linearly or by YaRN."""
    return (
        theta(kind, default),
        derived(
            "rope_linear_scaling_factor",
            lambda c, _: linear_factor(rope_of(c, kind)),
            when=lambda c: rope_of(c, kind)["rope_type"] == "linear",
        ),
        *yarn_lines(kind),
    )


def linear_factor(rope: Config) -> Any:
    """By how much positions are divided; 1 where they aren't."""
    return number(rope.get("factor", 1)) if rope["rope_type"] == "linear" else 1


def linear_lines(kind: str = "") -> tuple[Line, ...]:
    """What `config.json` says of the default embedding, whose positions a key of MaxText's alone scales: behind the line of
    `rope_type`, in whose place another is written.
    """

    def scaled(value: Callable[[Any], Any]) -> Callable[[Mapping[str, Any]], Any]:
        def of(keys: Mapping[str, Any]) -> Any:
            factor = keys.get("rope_linear_scaling_factor", 1)
            return value(factor) if keys.get("rope_type") == "default" and factor != 1 else None

        return of

    kind_line = copied(field_of(kind, "rope_type"), scaled(lambda _: "linear"))
    return kind_line, copied(field_of(kind, "factor"), scaled(float))


def llama3_lines() -> tuple[Line, ...]:
    """The parameters of Llama 3.1's scaling, which MaxText has no keys for, or that there is none: behind the line of
    `rope_type`.
    """

    def line(name: str, value: Any, scaled: bool) -> Line:
        def of(keys: Mapping[str, Any]) -> Any:
            is_its = keys.get("rope_type") == "llama3.1" and keys.get("rope_use_scale", True) is scaled
            return value if is_its else None

        return copied(f"{ROPE}.{name}", of)

    return line("rope_type", "default", scaled=False), *(
        line(name, value, scaled=True) for name, value in LLAMA3.items()
    )


def llama3_limit(rope: Config) -> str | None:
    """What of Llama 3.1's scaling MaxText can't express."""
    if rope["rope_type"] != "llama3" or not (
        other := {key: rope.get(key) for key, value in LLAMA3.items() if rope.get(key) != value}
    ):
        return None
    return f"{ROPE} say {other}, MaxText's layer has {LLAMA3} built in; logits differ, most in long contexts. There is no way round"
