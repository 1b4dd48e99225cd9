"""The way back: `config.json` of a MaxText configuration, for a model that has no release."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from weightbeam.model_mappings.configuration import MaxTextConfigError, contradictions, number, write
from weightbeam.model_mappings.family import Family
from weightbeam.model_mappings.maxtext_models import base, keys_of, run_as
from weightbeam.model_mappings.registry import FAMILIES

DTYPE = "bfloat16"
# Fields whose default in transformers' class is another (v5.23.0): that a model has none has to be said.
LATENT = {"q_lora_rank": None, "first_k_dense_replace": 0}
NONES: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_k2"), LATENT),
    "gemma2": {"final_logit_softcapping": None, "attn_logit_softcapping": None},
    "mistral": {"sliding_window": None},
}
PRECEDENCE = ("deepseek_v3", "kimi_k2")  # of kinds that MaxText has one configuration for, the one that is written


@dataclasses.dataclass(frozen=True)
class HfConfig:
    """What a MaxText configuration says to Hugging Face.

    Attributes:
      family: the family whose table reads and writes the model.
      config: `config.json`.
      generation: `generation_config.json`, at the least that transformers wants.
      unknown: keys of the architecture that the file sets and that no field says.
    """

    family: Family
    config: dict[str, Any]
    generation: dict[str, Any]
    unknown: tuple[str, ...]


def full_keys(given: Mapping[str, Any]) -> dict[str, Any]:
    """All keys of the architecture: MaxText's base, the model that `model_name` names, and what the file says, merged
    as MaxText does.

    Raises:
      MaxTextConfigError: MaxText has no such model.
    """
    name = given.get("model_name") or "default"
    said = base() if name == "default" else keys_of(str(name))
    if said is None:
        raise MaxTextConfigError(f"model_name is {name!r}, which MaxText (e591f30) hasn't got")
    return {**said, **{key: _clean(value) for key, value in given.items()}, "model_name": name}


def _clean(value: Any) -> Any:
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
    found = []
    for family in FAMILIES:
        for kind, lines in family.configuration.items():
            found.append((contradictions(lines, keys), family, kind, lines))
    fitting = [entry for entry in found if not entry[0]]
    if not fitting:
        wrong, family, kind, _ = min(found, key=lambda entry: ("decoder_block" in entry[0], len(entry[0])))
        said = ", ".join(f"{key} is {here!r}, not {there!r}" for key, (here, there) in wrong.items())
        raise MaxTextConfigError(
            f"no model of Hugging Face's is like that; nearest is {kind} ({family.name}), but {said}"
        )
    multimodal = bool(keys.get("use_multimodal"))
    name = str(keys["model_name"])

    def rank(entry: tuple[Any, Family, str, Any]) -> tuple[bool, bool, bool]:
        _, family, kind, lines = entry
        named = any(run_as(name) == name and kind in kinds for kinds in [family.types_of(name)])
        composite = any(line.part for line in lines)
        return composite != multimodal, not named and name != "default", kind not in PRECEDENCE

    _, family, _, lines = min(fitting, key=rank)
    config = write(lines, keys)
    config["dtype"] = DTYPE
    read_keys = {line.key for line in lines if line.key}
    unknown = sorted(
        key for key in given if key in base() and key not in read_keys and _clean(given[key]) != base()[key]
    )
    config = _without_none(config)
    for part in (config, config.get("text_config", {})):
        part |= {field: none for field, none in NONES.get(str(part.get("model_type")), {}).items() if field not in part}
    return HfConfig(family, config, {"_from_model_config": True}, tuple(unknown))


def _without_none(config: Any) -> Any:
    """Without fields that say nothing."""
    if isinstance(config, dict):
        return {key: _without_none(value) for key, value in config.items() if value is not None}
    return config
