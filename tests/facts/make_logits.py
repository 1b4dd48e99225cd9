"""Writes the table of families beside MaxText into `docs/explanation/is_it_right.md`: `weightbeam logits --maxtext` of a tiny model each.

    PYTHONPATH=tests python tests/facts/make_logits.py MAXTEXT_PYTHON FOUND.json [FAMILY … | -]

`MAXTEXT_PYTHON` is the interpreter of an environment with MaxText. FOUND.json keeps what was found, so that a family can
be run again by itself; without families it is all that FOUND.json lacks. The models are those of `tests/cases/models.py`, random weights
that transformers wrote in bfloat16.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from cases.models import CASES, MODELS, make

import weightbeam as wb

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "is_it_right.md"
BEGIN, END = "<!-- made by tests/facts/make_logits.py -->", "<!-- until here -->"
# what runs on MaxText's own name is not known of a tiny model: Llama's layout of RoPE, what Qwen 2 is called
FAMILIES: dict[str, tuple[str, str | None]] = {
    "Llama 3.1": ("llama3.1", "llama3.1-8b"),
    "Mistral": ("mistral", "mistral-7b"),
    "Qwen 2.5": ("qwen2.5", None),
    "Qwen 3": ("qwen3", None),
    "Qwen 3 MoE": ("qwen3-moe", None),
    "Mixtral": ("mixtral", None),
    "DeepSeek V2 Lite": ("deepseek2", None),
    "DeepSeek V3": ("deepseek3", None),
    "gpt-oss": ("gpt-oss", None),
    "OLMo 3": ("olmo3", None),
    "Gemma 2": ("gemma2", None),
    "Gemma 3": ("gemma3", None),
    "Llama 4": ("llama4", None),
    "Gemma 4, dense": ("gemma4-dense", None),
    "Gemma 4, experts": ("gemma4-moe", None),
    "Gemma 4 E2B": ("gemma4-small", None),
    "Qwen 3 Next": ("qwen3-next", None),
    "Qwen 3.5": ("qwen3.5", None),
    "DeepSeek V3.2": ("deepseek3.2", None),
    "DeepSeek V4": ("deepseek4", None),
    "Qwen 3 VL": ("qwen3_vl", None),
    "Qwen 3 Omni": ("qwen3_omni", None),
}
TOKENS = [1, 5, 9, 60, 3, 5, 44, 17, 23, 8, 31, 2]


def compare(family: str, python: str) -> dict[str, Any]:
    """What the command says of a family, as `--json` has it; or why it refused or failed."""
    case, model = FAMILIES[family]
    with tempfile.TemporaryDirectory() as folder:
        kind, sizes, shard = (CASES | MODELS)[case]
        if "qk_rope_head_dim" in sizes:
            sizes = sizes | {
                "head_dim": sizes["qk_rope_head_dim"]
            }  # else transformers' RoPE has the width of BASE's heads
        make(kind, sizes, shard, Path(folder) / case, seed=0)
        try:
            found = wb.logits(f"{folder}/{case}", token_ids=TOKENS, maxtext=python, maxtext_model=model, progress=False)
        except (wb.Refused, wb.Failed) as e:
            return {"said": str(e)}
    print(found)
    return found.to_dict()["beside"]


def row(family: str, found: dict[str, Any]) -> str:
    """A family's line of the table."""
    if "said" in found:
        return f"| {family} | – | – | not run: {found['said'].strip().splitlines()[-1].rpartition('/')[2]} |"
    logits, parts = found["logits"], found["parts_at"]
    where = "–"
    if parts:
        kinds = ", ".join(f"`{kind}`" for kind in parts["tensors"])
        where = f"layer {parts['layer']}" + (f", `{parts['module']}`: {kinds}" if parts["module"] else "")
    elif not found["ok"]:
        where = "last norm or head"
    known = "; ".join(found["limits"]) if parts else ""
    where += f". {known}" if known else ""
    return f"| {family} | {logits['relative']:.1g} | {logits['top1']} of {logits['tokens']} | {where} |"


def main(python: str, kept: str, *families: str) -> None:
    file = Path(kept)
    found = json.loads(file.read_text()) if file.exists() else {}
    wanted = families or [family for family in FAMILIES if family not in found]
    for family in [] if families == ("-",) else wanted:  # `-`: only the table anew
        print(f"== {family}", flush=True)
        found[family] = compare(family, python)
        file.write_text(json.dumps(found, indent=1))
    rows = [row(family, found[family]) for family in FAMILIES if family in found]
    head = ["| family | logits, relative | same first choice | where they part |", "|---|---|---|---|"]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table = "\n".join([BEGIN, *head, *rows, END])
    PAGE.write_text(before + table + rest.partition(END)[2])


if __name__ == "__main__":
    main(*sys.argv[1:])
