"""Makes `trees-<version>.json.gz` and `logical_axis_rules.json` from the parameter trees of the real MaxText.

    python tests/facts/make_trees.py FOLDER VERSION

`FOLDER` holds `<model>--{scan,unscan}.json.gz`, each an abstract tree at full size, and `_base_rules.json`
(`maxtext_trees.py` writes them); the rules are kept of the newest version. Only facts
are kept: paths, shapes, logical axes, and `config.json` where MaxText has it. Numbered layers that are alike are one
entry with the ranges of their numbers. Models that no release needs (test models, GPT-3) are left out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from pathlib import Path

from weightbeam.model_mappings.versions import NEWEST, VERSIONS

HERE = Path(__file__).parent
LEFT_OUT = re.compile(r"gpt3-|qwen3-custom-|deepseek3-tiny")
LAYER = re.compile("|".join(rf"(?<={word}_)\d+" for word in ("layers", "layer", "blocks", "encoderblock")))


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
        # norms without logical axes, of which MaxText names only the stacked one: it stands behind theirs
        if axes and len(axes) < len(shape):
            axes = [None] * (len(shape) - len(axes)) + axes
        found = LAYER.search(path)
        entry = json.dumps([LAYER.sub("{}", path, count=1), shape, axes])
        numbers.setdefault(entry, []).extend([int(found[0])] if found else [])
    return [
        [path, ranges(numbers[entry]), shape, axes]
        for entry in sorted(numbers)
        for path, shape, axes in [json.loads(entry)]
    ]


def read_tree(file: Path) -> dict:
    """The facts of one tree."""
    model, scan = file.name.removesuffix(".json.gz").split("--")
    tree = json.loads(gzip.decompress(file.read_bytes()))
    return {
        "model": model.split("+")[0],
        "scan": scan == "scan",
        "mtp": model.endswith("+mtp"),
        "multimodal": any("_encoder/" in param["path"] for param in tree["params"].values()),
        "vocab": tree["cfg"]["vocab_size"],
        "config": tree.get("hf_config") or {},
        "arrays": compact(tree["params"]),
        "others": compact({k: v for held in tree["other_collections"].values() for k, v in held.items()})
        if maxtext_wrote(tree)
        else [],
    }


def maxtext_wrote(tree: dict) -> bool:
    """Whether the tree says what it has beside parameters, as those of `maxtext_trees.py` do."""
    return "hf_config" not in tree


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the facts from a folder of MaxText's trees.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("version", choices=VERSIONS)
    args = parser.parse_args()
    folder = args.folder
    trees = {
        file.name.removesuffix(".json.gz"): read_tree(file)
        for file in sorted(folder.glob("*.json.gz"))
        if not LEFT_OUT.match(file.name)
    }
    text = json.dumps(trees, separators=(",", ":"))
    # no name, no time: the same bytes each time
    with (
        (HERE / f"trees-{args.version}.json.gz").open("wb") as raw,
        gzip.GzipFile("", "wb", mtime=0, fileobj=raw) as file,
    ):
        file.write(text.encode())
    print(f"{len(trees)} trees")
    if args.version != NEWEST:
        return
    rules = json.loads((folder / "_base_rules.json").read_text())["logical_axis_rules"]
    (HERE / "logical_axis_rules.json").write_text(
        "[\n" + ",\n".join(f"  {json.dumps(rule)}" for rule in rules) + "\n]\n"
    )


if __name__ == "__main__":
    main()
