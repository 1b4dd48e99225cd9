"""The groups in which routers of DeepSeek's kind choose experts, by `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# how many groups there are, and how many are chosen, where `config.json` doesn't say (transformers v5.23.0, the
# configuration classes); other kinds of models have none then
DEFAULTS: dict[str, tuple[int, int]] = dict.fromkeys(("deepseek_v3", "deepseek_v32", "kimi_k2"), (8, 4))


def expert_groups(part: Mapping[str, Any]) -> tuple[int, int]:
    """How many groups of experts a text model has, and how many of them are chosen; one of each where there are none."""
    said = (part.get("n_group"), part.get("topk_group"))
    found = (
        default if each is None else each
        for each, default in zip(said, DEFAULTS.get(str(part.get("model_type")), (1, 1)), strict=True)
    )
    number, chosen = (each if type(each) is int and each > 0 else 1 for each in found)
    return number, chosen


def why_not_in_groups(part: Mapping[str, Any], experts: int) -> str:
    """Why a text model's router can't do with so many experts; empty where it can."""
    groups, _ = expert_groups(part)
    # all but DeepSeek V2 tell groups apart by their two best experts (transformers v5.23.0, modeling_deepseek_v3.py)
    least = 1 if part.get("topk_method") == "group_limited_greedy" else 2
    if groups < 2 or (experts % groups == 0 and experts // groups >= least):
        return ""
    return f"the router has {groups} groups of experts alike, of at least {least} each"
