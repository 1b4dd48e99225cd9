"""What MaxText (e591f30) says of its own models, and which of them has the sizes of a `config.json`.

`maxtext_models.json` is made by `tests/facts/make_models.py` of MaxText's `base.yml` and `src/maxtext/configs/models`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SIZES = (  # the keys that say how large a model is; a fine-tune may have a larger vocabulary
    "base_emb_dim", "base_num_query_heads", "base_num_kv_heads", "head_dim", "base_mlp_dim", "base_moe_mlp_dim", "base_num_decoder_layers",
    "num_experts", "q_lora_rank", "kv_lora_rank", "first_num_dense_layers", "global_head_dim", "global_num_kv_heads", "gdn_num_value_heads",
)  # fmt: skip
SCHEDULES = ("-2dfsdp", "-batchsplit")  # of one model on a mesh of a certain kind
VARIANTS = (*SCHEDULES, "-test", "-tiny")  # files of MaxText's for one and the same release, or for none


@functools.cache
def _table() -> Mapping[str, Any]:
    return json.loads((Path(__file__).parent / "maxtext_models.json").read_bytes())


def base() -> Mapping[str, Any]:
    """The keys of the architecture, with the defaults of MaxText's `base.yml`."""
    return _table()["base"]


def models() -> tuple[str, ...]:
    """The names of all models, those included that MaxText runs under another one's name (`run_as`)."""
    return tuple(_table()["models"])


def own_name(model: str) -> str:
    """The name of a model's file: MaxText's `llama3.1-8b-Instruct` is `llama3.1-8b` (src/maxtext/configs/pyconfig.py)."""
    return model.replace("-Instruct", "")


def run_as(model: str) -> str:
    """The name that MaxText takes for a model: `llama3.1-8b` for `llama3.2-1b`, which it has no file for."""
    return _table()["run_as"].get(own_name(model), model)


def said_by(model: str) -> Mapping[str, Any] | None:
    """What a model's file itself says; None where MaxText has no such model."""
    return _table()["models"].get(own_name(model))


def keys_of(model: str) -> Mapping[str, Any] | None:
    """What a model's file says, on top of the base; None where MaxText has no such model."""
    return None if (said := said_by(model)) is None else {**base(), **said}


def differences(keys: Mapping[str, Any], model: str, among: Iterable[str] | None = None) -> dict[str, tuple[Any, Any]]:
    """The keys that a configuration and a model say otherwise: `{key: (the configuration's value, the model's)}`; empty
    for an unknown model.
    """
    said = keys_of(model)
    if said is None:
        return {}
    chosen = keys.keys() if among is None else [key for key in among if key in keys]
    return {key: (keys[key], said[key]) for key in chosen if key in said and keys[key] != said[key]}


def of_these_sizes(keys: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """The models among `names` whose sizes are those of the keys: first those with its vocabulary, that differ least in
    other keys, with the shortest name.
    """
    if not {"base_emb_dim", "base_num_decoder_layers"}.issubset(keys):
        return []
    fitting = [name for name in names if not differences(keys, name, SIZES)]
    return sorted(fitting, key=lambda name: (*_distance(keys, name), len(name)))


def nearest(keys: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """The model among `names` that differs from the keys in the fewest of them."""
    return min(names, key=lambda name: (len(differences(keys, name)), len(name)), default=None)


def _distance(keys: Mapping[str, Any], name: str) -> tuple[bool, bool, int]:
    """Whether it is a variant for a schedule or a test, has another vocabulary, and in how many keys it differs."""
    found = differences(keys, name)
    return name.endswith(VARIANTS), "vocab_size" in found, len(found)
