"""What merging an adapter costs a conversion: `convert --lora` against `convert`.

    python -m benchmarks.merging --folder out/bench --layers 8 --rounds 5 --json benchmarks/results.json

For a Llama-like checkpoint of about 2 GB in bfloat16, and an adapter of rank 16 on every linear layer, in float32, as
PEFT saves one. Both commands take turns, as subprocesses, each after a look at the source that brings it into the page
cache; the medians count.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchmarks.bench import MESH, make_source, tell, warm
from benchmarks.figures import Figure, make_parser, report
from benchmarks.measure import WEIGHTBEAM, run
from weightbeam.formats.safetensors import open_hf

RANK, ALPHA = 16, 32
MOST = 1.10  # times a conversion without


def make_adapter(source: Path, folder: Path) -> Path:
    """An adapter on every linear layer of a checkpoint, as PEFT saves it."""
    generator, tensors = np.random.default_rng(0), {}
    linear = {name: tensor.shape for name, tensor in open_hf(source).tensors.items() if name.endswith("_proj.weight")}
    for name, (outputs, inputs) in linear.items():
        for side, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
            values = generator.standard_normal(shape, dtype=np.float32) / 100
            tensors[f"base_model.model.{name.removesuffix('.weight')}.lora_{side}.weight"] = values
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    modules = sorted({name.split(".")[-2] for name in linear})
    config = {"peft_type": "LORA", "peft_version": "0.21.2", "r": RANK, "lora_alpha": ALPHA, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def main() -> int:
    """Measures both and prints the table."""
    parser = make_parser(__doc__)
    args = parser.parse_args()
    source, output = make_source("llama", args.folder, args.layers), args.folder / "converted"
    adapter = make_adapter(source, args.folder / "adapter")
    files = sorted(source.glob("*.safetensors"))
    command = (WEIGHTBEAM, "convert", "--source", source, "--mesh", MESH, "--output", output)
    seconds: dict[str, list[float]] = {"convert": [], "convert --lora": []}
    for number in range(1, args.rounds + 1):
        for name, options in (("convert", ()), ("convert --lora", ("--lora", adapter))):
            warm(files)
            shutil.rmtree(output, ignore_errors=True)
            seconds[name].append(run(*command, *options).seconds)
        tell(
            "llama",
            f"round {number} of {args.rounds}: "
            + ", ".join(f"{name} {taken[-1]:.2f} s" for name, taken in seconds.items()),
        )
    shutil.rmtree(output)
    shutil.rmtree(adapter)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    figures = [Figure(name, "llama", taken, "s") for name, taken in medians.items()]
    figures.append(Figure("the second ÷ the first", "llama", medians["convert --lora"] / medians["convert"], "×", MOST))
    report("merging", figures, seconds, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
