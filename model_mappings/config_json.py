"""The way back: `config.json` of a MaxText configuration, for a model that has no release.

What is made is read again (`configuration.read`): a key that it doesn't say as it was given is refused, whatever of the
lines lost it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Iterator, Mapping
from typing import Any

from weightbeam.model_mappings.config import Config, ConfigError
from weightbeam.model_mappings.configuration import MaxTextConfigError, contradictions, number, read, write
from weightbeam.model_mappings.family import Family
from weightbeam.model_mappings.maxtext_config import is_idle
from weightbeam.model_mappings.maxtext_models import SIZES, base, differences, keys_of, models, nearest, run_as, said_by
from weightbeam.model_mappings.meant import did_you_mean
from weightbeam.model_mappings.registry import FAMILIES

DTYPE = "bfloat16"
LLAMA_ROPE = "llama3.1"  # a rope_type, and how the names begin under which MaxText takes it whatever is said
# Fields whose default in transformers' class is another (v5.23.0): that a model has none has to be said.
LATENT = {"q_lora_rank": None, "first_k_dense_replace": 0}
NONES: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_k2"), LATENT),
    "gemma2": {"final_logit_softcapping": None, "attn_logit_softcapping": None},
    "mistral": {"sliding_window": None},
}
PRECEDENCE = ("deepseek_v3", "kimi_k2")  # of kinds that MaxText has one configuration for, the one that is written
# keys that no model's file of MaxText's sets and that change what a model computes, with `base.yml`'s values (e591f30)
FURTHER = {
    "rope_min_timescale": 1, "rope_pairwise": False, "use_untrainable_positional_embedding": False, "trainable_position_size": -1,
}  # fmt: skip
# how MaxText trains, and nothing of the model; and what the arrays say, of which Gemma has more rows than tokens
ELSEWHERE = {"indexer_sparse_training", "vocab_size"}
# what only YaRN's embedding is given (src/maxtext/layers/attentions.py, `init_rotary_embedding`, e591f30)
OF_YARN = {
    "rope_factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "rope_truncate", "rope_interleave",
    "rope_attention_scaling", "rope_pairwise",
}  # fmt: skip
TOWERS = ("*_for_vit", "*_for_audio", "vision_*", "*mrope*", "position_id_per_seconds")  # keys of what `--like` brings


@dataclasses.dataclass(frozen=True)
class HfConfig:
    """What a MaxText configuration says to Hugging Face.

    Attributes:
      family: the family whose table reads and writes the model.
      model: the name under which MaxText computes as the configuration says; None for none in particular.
      config: `config.json`.
      generation: `generation_config.json`, at the least that transformers wants.
      unknown: keys of towers that the file sets and that no field says.
      limits: what MaxText computes otherwise than transformers will.
    """

    family: Family
    model: str | None
    config: dict[str, Any]
    generation: dict[str, Any]
    unknown: tuple[str, ...]
    limits: tuple[str, ...]


def full_keys(given: Mapping[str, Any]) -> dict[str, Any]:
    """All keys of the architecture: MaxText's base, the model that `model_name` names, and what the file says, merged
    as MaxText does. It has Llama 3.1's rotary embedding under the names that begin so, whatever `rope_type` says
    (AI-Hypercomputer/maxtext, src/maxtext/layers/attentions.py, `init_rotary_embedding`, e591f30).

    Raises:
      MaxTextConfigError: MaxText has no such model, or its sizes can't be scaled as the file says.
    """
    name = given.get("model_name") or "default"
    said = base() if name == "default" else keys_of(str(name))
    if said is None:
        meant = did_you_mean(str(name), models())
        raise MaxTextConfigError(f"model_name is {name!r}, which no MaxText that is known here has{meant}")
    # a run's own config.yml has null where base.yml says 0
    set_by_file = {key: base().get(key) if is_none(value) else clean(value) for key, value in given.items()}
    keys = _scaled({**said, **set_by_file, "model_name": name})
    longest, trained = "max_position_embeddings", given.get("max_target_length")
    if type(trained) is int and trained > 0 and keys[longest] == base()[longest] and is_idle(longest, keys):
        keys[longest] = trained  # base.yml's own number is of no model
    rope = LLAMA_ROPE if str(run_as(str(name))).startswith(LLAMA_ROPE) else str(keys["rope_type"]).lower()
    return keys | {"rope_type": rope}


def is_dump(given: Mapping[str, Any]) -> bool:
    """Whether a configuration is what MaxText itself wrote of a run (`save_config_to_gcs`): it has what MaxText derives."""
    return "emb_dim" in given


def is_none(value: Any) -> bool:
    """Whether MaxText takes a value for none: its text says so, too (src/maxtext/configs/pyconfig.py, e591f30)."""
    return value is None or (isinstance(value, str) and value.lower() == "none")


def _scaled(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys with the sizes that `global_parameter_scale` makes of them: 2 doubles heads and `mlp`, 4 `embed`, too, 8
    layers, too, and so on (src/maxtext/configs/types.py, `get_individual_scales`, e591f30). Raises MaxTextConfigError
    where it isn't a power of two.
    """
    scale = keys.pop("global_parameter_scale", None)
    if scale is None:
        return keys
    if type(scale) is not int or scale < 1 or scale.bit_count() != 1:
        raise MaxTextConfigError(f"global_parameter_scale is {scale!r}, which isn't a power of two")
    each, rest = divmod(scale.bit_length() - 1, 3)
    doubled = {
        "base_num_query_heads": each + (rest > 0), "base_num_kv_heads": each + (rest > 0), "base_mlp_dim": each + (rest > 0),
        "base_moe_mlp_dim": each + (rest > 0), "base_emb_dim": each + (rest > 1), "base_num_decoder_layers": each,
    }  # fmt: skip
    return keys | {
        key: keys[key] << times for key, times in doubled.items() if type(keys[key]) is int and keys[key] > 0
    }


def as_taken(given: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """What MaxText takes of a configuration that says other than the model that it names, and what is to be said of it.

    MaxText takes the model's where it was given the file, as one with a `base_config` is. It takes the file's where that
    is a model's own or the run's dump, or `override_model_config` says so; and where sizes differ: had they been the
    model's, the arrays wouldn't be the file's.
    """
    if is_dump(given) or given.get("override_model_config"):
        return given, ""
    said = {key: clean(value) for key, value in given.items() if not is_none(value)}
    name = str(given.get("model_name") or "default")
    found = differences(said, name, said_by(name))
    if not found or found.keys() & {*SIZES, "vocab_size"}:
        return given, ""
    listed = ", ".join(f"{key}: {here!r}, not {theirs!r}" for key, (here, theirs) in found.items())
    told = f"it says other than its model_name, {name}: {listed}; MaxText takes the model's"
    over = "say override_model_config: true if its command line did"
    if "base_config" in given:
        return {key: value for key, value in given.items() if key not in found}, f"{told}, and so is done here; {over}"
    return given, f"{told} where it is given this file. Take these lines out if it was; {over}"


def clean(value: Any) -> Any:
    """A value as the table has it: YAML 1.1 reads `1e-06` as text."""
    if isinstance(value, str):
        try:
            return number(float(value))
        except ValueError:
            return value
    return number(value) if isinstance(value, float) and math.isfinite(value) else value


def config_json(given: Mapping[str, Any]) -> HfConfig:
    """`config.json` of a MaxText configuration: a `maxtext.yml`, one of MaxText's model files, or what overrides one.

    Raises:
      MaxTextConfigError: no family's model is like that; the message says which is nearest, and where it differs.
    """
    keys = full_keys(given)
    kinds = [
        (contradictions(lines, keys), family, kind)
        for family in FAMILIES
        for kind, lines in family.configuration.items()
    ]
    fitting = [each for each in kinds if not each[0]] or [
        each for each in kinds if all(is_idle(key, keys) for key in each[0])
    ]
    if not fitting:
        wrong, family, kind = min(kinds, key=lambda each: ("decoder_block" in each[0], len(each[0])))
        raise _unlike(family, kind, wrong)
    name, multimodal = str(keys["model_name"]), bool(keys.get("use_multimodal"))

    def rank(entry: tuple[Any, Family, str]) -> tuple[bool, bool, bool]:
        _, family, kind = entry
        named = any(run_as(name) == name and kind in kinds for kinds in [family.types_of(name)])
        composite = any(line.part for line in family.configuration[kind])
        return composite != multimodal, not named and name != "default", kind not in PRECEDENCE

    errors = []
    for _, family, kind in sorted(fitting, key=rank):
        for model in _names(family, kind, name, keys):
            try:
                return _made(family, kind, model, keys, given)
            except MaxTextConfigError as e:
                errors.append(e)
    raise errors[0]


def _names(family: Family, kind: str, name: str, keys: Mapping[str, Any]) -> Iterator[str | None]:
    """The names under which MaxText may run a model: the one that is given, unless it is of another kind, such as a model
    with towers whose language model this is; then of each other variant of its family's the one that is most like it.
    """
    own = name if name != "default" and (not family.models or kind in family.types_of(name)) else None
    yield own
    others: dict[object, list[str]] = {}
    for other in models():
        if kind in family.types_of(other) and family.variant(other) != family.variant(own or ""):
            others.setdefault(family.variant(other), []).append(other)
    yield from (nearest(keys, names) for names in others.values())


def _made(family: Family, kind: str, model: str | None, keys: Mapping[str, Any], given: Mapping[str, Any]) -> HfConfig:
    """The `config.json` of one kind, for a model that MaxText runs under a name. Raises MaxTextConfigError where it
    doesn't say what the configuration does.
    """
    lines = family.configuration[kind]
    config = _without_none(write(lines, keys) | {"dtype": DTYPE})
    for part in (config, config.get("text_config", {})):
        part |= {field: none for field, none in NONES.get(str(part.get("model_type")), {}).items() if field not in part}
    if "model_type" not in config:  # no towers, and all of its lines are about the object beside theirs
        raise _unlike(family, kind, {"use_multimodal": (keys.get("use_multimodal"), False)})
    try:
        # what one version of MaxText's has to be told isn't of the model, and towers come with `--like`
        found = read((line for line in lines if line.version is None and not line.tower), Config(config), model)
    except ConfigError as e:
        raise MaxTextConfigError(str(e)) from e
    of_towers = _check(family, kind, keys, given, found.keys)
    unknown = tuple(sorted(of_towers)) if keys.get("use_multimodal") else ()
    return HfConfig(family, model, config, {"_from_model_config": True}, unknown, found.limits)


def _check(
    family: Family, kind: str, keys: Mapping[str, Any], given: Mapping[str, Any], said: Mapping[str, Any]
) -> set[str]:
    """Compares all keys with those that a `config.json` says; returns the keys of towers that it doesn't. Raises
    MaxTextConfigError where it says another value, or the file gives a key that it doesn't say.
    """
    wrong = {key: (keys[key], said[key]) for key in said if key in keys and keys[key] != said[key]}
    if wrong := {key: both for key, both in wrong.items() if not _is_idle(key, keys)}:
        raise _unlike(family, kind, wrong)
    usual = {**FURTHER, **full_keys({"model_name": keys["model_name"]})}
    of_versions = {line.key for line in family.configuration[kind] if line.version is not None}
    unsaid = {key for key in given.keys() & usual.keys() - said.keys() - of_versions if keys[key] != usual[key]}
    of_towers = {key for key in unsaid if any(fnmatch.fnmatchcase(key, pattern) for pattern in TOWERS)}
    if lost := sorted(key for key in unsaid - of_towers if not _is_idle(key, keys)):
        listed = ", ".join(f"{key}: {keys[key]!r}" for key in lost)
        raise MaxTextConfigError(
            f"nothing in the config.json of {kind} says {listed}; if MaxText's layers of this kind don't look at that, take it out of the file"
        )
    return of_towers


def _is_idle(key: str, keys: Mapping[str, Any]) -> bool:
    """Whether a key says nothing of the model; see `maxtext_config.is_idle`."""
    if key in OF_YARN:
        return keys["rope_type"] != "yarn"
    if key == "head_dim":  # of latent attention other keys are the sizes
        return keys["attention_type"] == "mla"
    if key == "normalization_layer_epsilon":  # Gemma's layers have their own (`lines.fixed_eps`)
        return str(keys["decoder_block"]).startswith("gemma")
    return key in ELSEWHERE or is_idle(key, keys)


def _unlike(family: Family, kind: str, wrong: Mapping[str, tuple[Any, Any]]) -> MaxTextConfigError:
    said = ", ".join(f"{key} is {here!r}, not {there!r}" for key, (here, there) in wrong.items())
    return MaxTextConfigError(f"no model of Hugging Face's is like that; nearest is {kind} ({family.name}), but {said}")


def _without_none(config: Any) -> Any:
    """Without fields that say nothing."""
    if isinstance(config, dict):
        return {key: _without_none(value) for key, value in config.items() if value is not None}
    return config
