"""What the files of a release besides its weights are called, and what they are for."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from typing import Any

from weightbeam.formats.safetensors import INDEX, QUANT_CONFIGS
from weightbeam.formats.storage import open_store
from weightbeam.formats.storage.strict_json import JsonError, parse_json

CONFIG, CARD = "config.json", "README.md"
# the one folder of a release that is taken (transformers 5.23, processing_utils.py)
TEMPLATES = "additional_chat_templates"
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token")

ROLES: Mapping[str, re.Pattern[str]] = {
    "config": re.compile(r"config\.json"),
    "generation": re.compile(r"generation_config\.json"),
    "tokenizer": re.compile(
        r"tokenizer(_config)?\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt|tekken\.json"
        r"|tokenizer\.model(\.v\w+)?|\w[\w.-]*\.tiktoken|tiktoken\.model|spiece\.model|sentencepiece\.bpe\.model"
    ),
    "chat template": re.compile(rf"chat_template\.json|\w[\w.-]*\.jinja|{TEMPLATES}/[^/\x00-\x1f]+\.jinja"),
    "processor": re.compile(r"(\w+_)?(pre)?processor_config\.json"),
    "quantisation": re.compile("|".join(map(re.escape, QUANT_CONFIGS))),
    "licence": re.compile(
        r"([\w.-]+[._-])?(licen[cs]e|notice|copying|use_policy)[\w-]*(\.(md|txt|pdf|rst))?", re.IGNORECASE
    ),
    "card": re.compile(r"README\.md"),
    "code": re.compile(r"\w[\w.-]*\.py"),
}


def role_of(name: str) -> str | None:
    """What a file of a release is for, by its name; None for weights and for all that isn't known."""
    return next((role for role, pattern in ROLES.items() if pattern.fullmatch(name)), None)


def is_of_release(name: str, beside: Collection[str]) -> bool:
    """Whether a file is one of a release, or of an adapter, by its name and those of the files beside it."""
    weights = ".safetensors", INDEX
    is_known = role_of(name) is not None or name.endswith((*weights, "adapter_config.json"))
    return is_known and any(other.endswith((*weights, CONFIG)) for other in beside)


def hash_each(files: Mapping[str, bytes]) -> dict[str, str]:
    """The sha256 of each file, by name: what a plan's hash knows of small files."""
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def has_weights(url: str) -> bool:
    """Whether a release has weights; one that gives its form only has none."""
    try:
        return any(name.endswith(".safetensors") for name in open_store(url).entries())
    except OSError:
        return False


def token_ids(files: Mapping[str, bytes]) -> dict[str, int]:
    """The ids of the tokens that begin, end and pad a text, as a tokenizer's files say: `{"eos_token_id": 2, …}`; those
    that they don't say left out.
    """
    said = [
        parsed if isinstance(parsed := _read_json(files.get(name, b"")), dict) else {}
        for name in ("tokenizer_config.json", "tokenizer.json")
    ]
    config, tokenizer = said
    added = tokenizer.get("added_tokens")
    tokens = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    ids = {token["content"]: token["id"] for token in tokens if {"content", "id"} <= token.keys()}
    found = {}
    for name in SPECIAL_TOKENS:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and type(ids.get(text)) is int:
            found[f"{name}_id"] = ids[text]
    return found


def _read_json(text: bytes) -> Any:
    try:
        return parse_json(text) if text else None
    except JsonError:
        return None
