"""Tables of what MaxText does with tiny models: `tests/facts/make_logits.py` runs `weightbeam logits --maxtext` and keeps its
JSON, `tests/trainer` trains and keeps a line of JSON for each model and layout.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NO_WAY = ". There is no way round"
FACTS = Path(__file__).parents[1] / "tests" / "facts"
FOUND, TRAINED = FACTS / "logits.json", FACTS / "trained.jsonl"


def families() -> str:
    """How far MaxText is from transformers: those that agree in one line, the others in a line each."""
    found = _found("families")
    alike = {name: each["logits"] for name, each in found.items() if _agrees(each)}
    largest = max(logits["relative"] for logits in alike.values())
    rows = [f"| {name} | {_apart(each)} | {_where(each)} |" for name, each in found.items() if name not in alike]
    return _table(
        "| family | logits, relative | same first choice | where they part |",
        [f"| {'; '.join(alike)} | at most {largest:.1g} | all | – |", *rows],
    )


def deviations() -> str:
    """What MaxText can't express, by models that say so, and what it made of them."""
    rows = [
        f"| {name} | {'; '.join(map(_without_verdict, found.get('limits', ())))} | {_apart(found)} |"
        for name, found in _found("deviations").items()
    ]
    return _table("| model | what it says, and what MaxText makes of it | logits, relative | same first choice |", rows)


def trained() -> str:
    """What MaxText's trainer made of our checkpoints: a line for each model, with what the last run of each layout said."""
    runs: dict[str, dict[bool, dict[str, Any]]] = {}
    for line in TRAINED.read_text().splitlines():
        row = json.loads(line)
        runs.setdefault(row["case"], {})[row["scan"]] = row
    rows = []
    for case, layouts in runs.items():
        each = [layouts.get(scan) for scan in (True, False)]
        losses = next(", ".join(f"{loss:.5f}" for loss in row["losses"]) for row in each if row)
        on = ", ".join(f"{row['on']:.5f}" if row else "–" for row in each)
        logits = ", ".join(_logits(row) if row else "–" for row in each)
        rows.append(f"| {case} | {losses} | {on} | {logits} |")
    return _table("| model | losses | the last, from the state resharded | logits |", rows)


def _logits(row: Mapping[str, Any]) -> str:
    """How far they are apart after training; and why, where that is more than float32's rounding."""
    apart = f"{row['logits']:{'.2g' if row['logits'] > 0.01 else '.1e'}}".replace("e-0", "e-")
    if row.get("limits"):
        return f"{apart} ([another model](../explanation/numerics.md#where-maxtext-and-hugging-face-disagree))"
    if "exact" in row:
        return f"{apart} (float32: transformers is {row['exact'][1]:.1e} off its float64)".replace("e-0", "e-")
    return apart


def _without_verdict(limit: str) -> str:
    """A limit without how much the logits differ, which other columns measure, and without a way round that isn't there."""
    return re.sub(r"; logits differ( much| a little)?( \([^)]*\))?(?=\.|$)", "", limit.removesuffix(NO_WAY))


def _found(kind: str) -> Mapping[str, Mapping[str, Any]]:
    return json.loads(FOUND.read_text())[kind]


def _table(head: str, rows: list[str]) -> str:
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *rows])


def _apart(found: Mapping[str, Any]) -> str:
    """How far the logits are apart, in two columns."""
    logits = found.get("logits")
    if logits is None:
        return "– | –"
    return f"{logits['relative']:.1g} | {logits['top1']} of {logits['tokens']}"


def _agrees(found: Mapping[str, Any]) -> bool:
    """Whether no layer parts and every token has the same first choice."""
    logits = found.get("logits")
    return logits is not None and found["ok"] and logits["top1"] == logits["tokens"]


def _where(found: Mapping[str, Any]) -> str:
    """The first layer that parts, with what is known of it; or why it wasn't run."""
    if "logits" not in found:
        return f"not run: {found['said']}"
    if found["ok"]:
        return "–"
    parts = found["parts_at"]
    if parts is None:
        return "behind the layers that can be compared"
    kinds = ", ".join(f"`{kind}`" for kind in parts["tensors"])
    module = f", `{parts['module']}`: {kinds}" if parts["module"] else ""
    layer = "before the first layer" if parts["layer"] is None else f"layer {parts['layer']}"
    return ". ".join([f"{layer}{module}", *found["limits"]])
