"""Runs tiny models beside MaxText, `weightbeam logits --maxtext`, and keeps what the command says in `logits.json`, of which
`python -m deploy.tables` writes the tables of `docs/explanation/is_it_right.md` and `numerics.md`.

    PYTHONPATH=tests python tests/facts/make_logits.py MAXTEXT_PYTHON [NAME …]

`MAXTEXT_PYTHON` is the interpreter of an environment with MaxText. Without names it runs all that `logits.json` lacks. The
models are those of `tests/cases/models.py`, random weights that transformers wrote in bfloat16.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cases.models import CASES, MODELS, fill_tables, make

import weightbeam as wb

KEPT = Path(__file__).with_name("logits.json")


@dataclasses.dataclass(frozen=True)
class Model:
    """A model that is run.

    Attributes:
      case: whose sizes it has.
      name: MaxText's, where a tiny model doesn't tell it: Llama's layout of RoPE, what Qwen 2 is called.
      changes: to its sizes.
    """

    case: str
    name: str | None = None
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


FAMILIES = {
    "Llama 3.1": Model("llama3.1", "llama3.1-8b"),
    "Mistral": Model("mistral", "mistral-7b"),
    "Qwen 2.5": Model("qwen2.5"),
    "Qwen 3": Model("qwen3"),
    "Qwen 3 MoE": Model("qwen3-moe", changes={"norm_topk_prob": True}),
    "Mixtral": Model("mixtral"),
    "DeepSeek V2 Lite": Model("deepseek2"),
    "DeepSeek V3": Model("deepseek3"),
    "DeepSeek V3.2": Model("deepseek3.2"),
    "DeepSeek V4": Model("deepseek4"),
    "gpt-oss": Model("gpt-oss"),
    "OLMo 3": Model("olmo3"),
    "Gemma 2": Model("gemma2"),
    "Gemma 3": Model("gemma3"),
    "Gemma 4, dense": Model("gemma4-dense"),
    "Gemma 4, experts": Model("gemma4-moe"),
    "Gemma 4 E2B": Model("gemma4-small"),
    "Llama 4": Model("llama4"),
    "Qwen 3 Next": Model("qwen3-next"),
    "Qwen 3.5": Model("qwen3.5"),
    "Qwen 3 VL": Model("qwen3_vl"),
    "Qwen 3 Omni": Model("qwen3_omni"),
}
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
DEVIATIONS = {  # a model each that says what MaxText can't express
    "Qwen 3 MoE, sums not 1": Model("qwen3-moe", changes={"norm_topk_prob": False}),
    "Llama 3.3 by its own name": Model(
        "llama3.1", "llama3.3-70b", {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192}}
    ),
    "Llama 3.2, Llama 4 Scout": Model("llama3.1", "llama3.1-8b", {"rope_scaling": LLAMA3}),
    "OLMo 3": Model(
        "olmo3",
        changes={"rope_scaling": dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=16, beta_fast=32)},
    ),
    "Mistral, Mixtral with a window": Model("mistral", "mistral-7b", {"sliding_window": 4}),
    "Qwen 2.5 with a window": Model(
        "qwen2.5", changes={"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    ),
    "DeepSeek V2 236B": Model(
        "deepseek2",
        changes={"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    ),
    "Gemma 1 to 4, another eps": Model("gemma3", changes={"rms_norm_eps": 1e-3}),
    "GLM-5, another eps": Model("glm5", changes={"rms_norm_eps": 1e-5}),
    "gpt-oss, another alpha": Model("gpt-oss", changes={"swiglu_alpha": 1.0}),
    "any, another kind of RoPE": Model("qwen3", changes={"rope_scaling": dict(rope_type="dynamic", factor=4.0)}),
}
TOKENS = [1, 5, 9, 60, 3, 5, 44, 17, 23, 8, 31, 2]


def compare(model: Model, python: str) -> dict[str, Any]:
    """What the command says of a model, as `--json` has it, but for the layers; or why it refused or failed."""
    with tempfile.TemporaryDirectory() as folder:
        kind, sizes, shard = (CASES | MODELS)[model.case]
        if "kv_lora_rank" in sizes:  # else transformers' RoPE has the width of BASE's heads
            sizes = sizes | {"head_dim": sizes["qk_rope_head_dim"]}
        inner = next((name for name in ("text_config", "thinker_config") if name in sizes), None)
        changed = {inner: sizes[inner] | model.changes} if inner else model.changes
        made = make(kind, sizes | changed, shard, Path(folder) / "model", seed=0)
        if "num_hash_layers" in sizes:
            fill_tables(made)
            made.save_pretrained(Path(folder) / "model")
        try:
            found = wb.logits(
                f"{folder}/model", token_ids=TOKENS, maxtext=python, maxtext_model=model.name, progress=False
            )
        except (wb.Refused, wb.Failed) as e:
            return {"said": str(e).replace(folder, "").strip().splitlines()[-1]}
    print(found)
    said = found.to_dict()["beside"]
    return {name: value for name, value in said.items() if name not in ("layers", "where")}


def main(python: str, *names: str) -> None:
    found = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for kind, models in (("families", FAMILIES), ("deviations", DEVIATIONS)):
        held = found.setdefault(kind, {})
        for name in [name for name in models if name in names or (not names and "logits" not in held.get(name, {}))]:
            print(f"== {name}", flush=True)
            held[name] = compare(models[name], python)
            found[kind] = {each: held[each] for each in models if each in held}
            KEPT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
