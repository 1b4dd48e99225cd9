"""The language model of a release with towers, as a release of its own: `config.json` and the tensors' names.

transformers, vLLM and SGLang have a class for the language model alone: `Gemma3ForCausalLM` beside
`Gemma3ForConditionalGeneration`. Its configuration is the release's `text_config`, and its tensors aren't below
`language_model`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from weightbeam.model_mappings.audit import drop_reason
from weightbeam.model_mappings.config import TIE, Config, ConfigError, Layout, said_of_tie
from weightbeam.model_mappings.family import Family, Tower, rename
from weightbeam.transforms.planning.exporting import Like

ALONE = {
    "model.language_model": "model",
    "language_model.model": "model",
    "language_model.model.blocks": "model.layers",  # transformers 5.23 saves Kimi K2.5 so
    "language_model.lm_head": "lm_head",
}
OUTER = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "quantization_config")


def has_towers(family: Family, config: Config) -> bool:
    """Whether a model of the family has parts besides its text model."""
    return any(key in config for key in ("text_config", "thinker_config")) and any(
        isinstance(reason, Tower) for reason in family.drops(config, Layout()).values()
    )


def text_model(like: Like, family: Family) -> Like:
    """The form of the language model alone.

    Raises:
      ConfigError: there is no class for it.
    """
    config = Config(like.config)
    if not has_towers(family, config):
        return like
    text = _text_section(config)
    architecture = text_class(config, family)
    if not architecture:
        raise ConfigError(
            f"config.json: the language model of {config.get('model_type')!r} alone is no model of its own in transformers; "
            "leave --multimodal out, or take the towers of the release: --multimodal true --like RELEASE"
        )
    outer = {field: config[field] for field in OUTER if config.get(field) is not None}
    if (tied := said_of_tie(config, text)) is not None:
        outer[TIE] = tied
    drops = family.drops(config, Layout())
    tensors = {
        rename(name, ALONE): about
        for name, about in like.tensors.items()
        if not isinstance(drop_reason(rename(name, family.aliases), drops), Tower)
    }
    return dataclasses.replace(like, config={"architectures": architecture, **text, **outer}, tensors=tensors)


def text_class(config: Config, family: Family) -> list[str] | None:
    """The class of a release's language model alone: as its section says, else by the family's lines; None where there
    is none.
    """
    text = _text_section(config)
    lines = family.configuration.get(str(text.get("model_type")), ())
    return text.get("architectures") or next((line.default for line in lines if line.field == "architectures"), None)


def _text_section(config: Config) -> Mapping[str, Any]:
    said = config.get("text_config")
    return said if isinstance(said, Mapping) else {}
