"""Makes `trees.json.gz` and `logical_axis_rules.json` from the parameter trees of the real MaxText (e591f30).

    python tests/facts/make_trees.py FOLDER

`FOLDER` holds `<model>--{scan,unscan}.json.gz`, each an abstract tree at full size, and `_base_rules.json`. Only facts are
kept: paths, shapes, logical axes, and the fields of `config.json` that the tables read. Numbered layers that are alike are
one entry with the ranges of their numbers.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from pathlib import Path

HERE = Path(__file__).parent
MODELS = re.compile(r"(llama2|llama3(\.[13])?|mistral|mixtral|qwen2\.5|qwen3(?!-next|-vl|-omni|-custom)|deepseek(2|3(?!-tiny)|3\.2)|kimi-k2)[-+]")
FIELDS = [  # of config.json
    *("model_type", "vocab_size", "tie_word_embeddings", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "rope_scaling", "rope_parameters"),
    *("num_local_experts", "num_experts", "moe_intermediate_size", "mlp_only_layers", "decoder_sparse_step"),
    *("n_routed_experts", "n_shared_experts", "first_k_dense_replace", "q_lora_rank", "kv_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_n_heads", "index_head_dim"),
]
LAYER = re.compile(r"(?<=layers_)\d+")


def ranges(numbers: list[int]) -> list[list[int]]:
    """Sorted numbers as [first, last] of each run."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return runs


def compact(params: dict) -> list[list]:
    """[[path with `{}` for the layer's number, ranges of numbers, shape, axes], …]."""
    numbers: dict[str, list[int]] = {}
    for param in params.values():
        path, shape, axes = param["path"], param["shape"], param["axes"] or []
        found = LAYER.search(path)
        entry = json.dumps([LAYER.sub("{}", path, count=1), shape, axes])
        numbers.setdefault(entry, []).extend([int(found[0])] if found else [])
    return [[path, ranges(numbers[entry]), shape, axes] for entry in sorted(numbers) for path, shape, axes in [json.loads(entry)]]


def read_tree(file: Path) -> dict:
    """The facts of one tree."""
    model, scan = file.name.removesuffix(".json.gz").split("--")
    tree = json.loads(gzip.decompress(file.read_bytes()))
    return {
        "model": model.removesuffix("+mtp"),
        "scan": scan == "scan",
        "mtp": model.endswith("+mtp"),
        "vocab": tree["cfg"]["vocab_size"],
        "config": {field: tree["hf_config"][field] for field in FIELDS if field in tree["hf_config"]},
        "arrays": compact(tree["params"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the facts from a folder of MaxText's trees.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    trees = {file.name.removesuffix(".json.gz"): read_tree(file) for file in sorted(folder.glob("*.json.gz")) if MODELS.match(file.name)}
    text = json.dumps(trees, separators=(",", ":"))
    with (HERE / "trees.json.gz").open("wb") as raw, gzip.GzipFile("", "wb", mtime=0, fileobj=raw) as file:  # no name, no time: the same bytes each time
        file.write(text.encode())
    rules = json.loads((folder / "_base_rules.json").read_text())["logical_axis_rules"]
    (HERE / "logical_axis_rules.json").write_text("[\n" + ",\n".join(f"  {json.dumps(rule)}" for rule in rules) + "\n]\n")
    print(f"{len(trees)} trees")


if __name__ == "__main__":
    main()
