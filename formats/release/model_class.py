"""Which class of transformers loads a release, by `config.json`.

`AutoModelForCausalLM` refuses Qwen 3 VL, Omni and Kimi K2.5, and makes Llama 4 and Qwen 3.5 without their towers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightbeam.model_mappings.config import text_parts

# the end of an architecture's name -> the Auto class for it, the first that fits (transformers 5.23, models/auto/modeling_auto.py)
AUTO_CLASSES: Mapping[str, str] = {
    "OmniMoeForConditionalGeneration": "AutoModelForMultimodalLM",
    "ForConditionalGeneration": "AutoModelForImageTextToText",
    "ForCausalLM": "AutoModelForCausalLM",
}
# what the hub calls that (huggingface.js, packages/tasks/src/pipelines.ts)
PIPELINE_TAGS: Mapping[str, str] = {
    "AutoModelForMultimodalLM": "any-to-any",
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForCausalLM": "text-generation",
}
# `model_type`s that transformers has no class for: the code beside the weights is the model
OWN_CODE = ("kimi_k2", "kimi_k3")


def model_class(config: Mapping[str, Any]) -> str:
    """The class whose `from_pretrained` loads a release: the Auto class of its architecture, or the architecture itself
    where it is of another kind. A release that names none counts as a language model; one with code of its own says its
    Auto class itself.
    """
    own = config.get("auto_map") if config.get("model_type") in OWN_CODE else None
    if isinstance(own, Mapping) and (named := [auto for auto in AUTO_CLASSES.values() if auto in own]):
        return named[0]
    said = config.get("architectures")
    name = said[0] if isinstance(said, list) and said else None
    if not isinstance(name, str) or not name.isidentifier():  # it becomes code that a person runs
        name = "ForCausalLM"
    if name.endswith("ForConditionalGeneration") and len(text_parts(config)) == 1:  # of an encoder and a decoder, as T5
        return name
    return next((auto for end, auto in AUTO_CLASSES.items() if name.endswith(end)), name)


def loading_code(config: Mapping[str, Any], place: str, revision: str = "") -> str:
    """The Python that loads a release.

    Args:
      config: its `config.json`.
      place: a folder, or `owner/name` on the hub.
      revision: of the latter; empty for its newest.
    """
    keywords: dict[str, Any] = {"revision": revision} if revision else {}
    keywords |= {"trust_remote_code": True} if config.get("model_type") in OWN_CODE else {}
    given = ", ".join([repr(place), *(f"{name}={value!r}" for name, value in keywords.items())])
    return f"transformers.{model_class(config)}.from_pretrained({given})"
