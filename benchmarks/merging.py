"""What merging an adapter costs a conversion: `convert --lora` against `convert`.

    python -m benchmarks.merging --folder out/bench --layers 8 --rounds 5 --json benchmarks/results.json

For a Llama-like checkpoint of about 2 GB in bfloat16, and adapters of rank 16 in float32, as PEFT saves them: on query
and value, which is PEFT's default for Llama (`TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING`, peft 0.21.2), and on
every linear layer. The commands take turns, as subprocesses, each after a look at the source that brings it into the
page cache; the medians count.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchmarks.figures import Figure, make_parser, report
from benchmarks.measure import WEIGHTBEAM, medians_of, run_fresh, seconds_of, take_turns
from benchmarks.models import MESH, make_source
from weightbeam.formats.safetensors import open_hf

RANK, ALPHA = 16, 32
MOST = 1.10  # times a conversion without
ADAPTERS = {"q_proj, v_proj": ("q", "v"), "all linear layers": ("",)}  # by name: how the names of their modules begin


def make_adapter(source: Path, folder: Path, modules: Sequence[str]) -> Path:
    """An adapter on the linear layers of a checkpoint whose names begin so, as PEFT saves it."""
    generator, tensors = np.random.default_rng(0), {}
    linear = {
        name: tensor.shape
        for name, tensor in open_hf(source).tensors.items()
        if name.endswith("_proj.weight") and name.split(".")[-2].startswith(tuple(modules))
    }
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


def main() -> None:
    """Measures both and prints the table."""
    args = make_parser(__doc__).parse_args()
    source, output = make_source("llama", args.folder, args.layers), args.folder / "converted"
    adapters = {
        name: make_adapter(source, args.folder / f"adapter-{number}", modules)
        for number, (name, modules) in enumerate(ADAPTERS.items())
    }
    files = sorted(source.glob("*.safetensors"))
    command = (WEIGHTBEAM, "convert", "--source", source, "--mesh", MESH, "--output", output)
    commands = {"convert": command} | {
        f"convert --lora, {name}": (*command, "--lora", adapter) for name, adapter in adapters.items()
    }
    ways = {name: partial(run_fresh, output, *arguments, files=files) for name, arguments in commands.items()}
    taken = take_turns("llama", args.rounds, ways)
    for adapter in adapters.values():
        shutil.rmtree(adapter)
    medians = medians_of(taken)
    figures = [Figure(name, "llama", seconds, "s") for name, seconds in medians.items()]
    for name in ADAPTERS:
        ratio = medians[f"convert --lora, {name}"] / medians["convert"]
        figures.append(Figure(f"{name} merged ÷ convert", "llama", ratio, "×", MOST))
    report("merging", figures, seconds_of(taken), args)


if __name__ == "__main__":
    main()
