"""Exports against a raw copy: a checkpoint that was converted for a mesh, back into a release.

    python -m benchmarks.export --folder out/bench --layers 8 --rounds 5 --json benchmarks/results.json

For a Llama-like and a MoE-like checkpoint of about 2 GB in bfloat16: *convert* with `--mesh fsdp=16` once, then *raw
copy* (one thread reads the checkpoint's files and writes their bytes, with an fsync for each) and *export* (a
subprocess: start-up and imports are inside) in turn; see `benchmarks/copies.py`. The last export is compared with the
release, file by file of its tensors, by `weightbeam diff`.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.copies import against_copy
from benchmarks.figures import Figure, make_parser, measure_each, report
from benchmarks.measure import WEIGHTBEAM, run_fresh
from benchmarks.models import MESH, make_source

MODELS = {"llama": "llama2-7b", "moe": "qwen3-30b-a3b"}  # and the MaxText model that the checkpoint is for


def measure(kind: str, folder: Path, layers: int, rounds: int) -> tuple[list[Figure], dict[str, Any]]:
    """The figures of one model, and every single round."""
    source, checkpoint, output = make_source(kind, folder, layers), folder / "checkpoint", folder / "exported"
    model = ("--maxtext_model", MODELS[kind])
    options = ("--source", source, "--mesh", MESH, "--output", checkpoint, *model)
    run_fresh(checkpoint, WEIGHTBEAM, "convert", *options, keep=True)
    command = ("export", "--source", checkpoint, "--output", output, *model)
    figures, details = against_copy(kind, checkpoint / "0" / "items", command, output, rounds)
    compared = subprocess.run([WEIGHTBEAM, "diff", source, output], capture_output=True, text=True, check=False)
    for old in (checkpoint, output):
        shutil.rmtree(old)
    return figures, details | {"diff": [line.strip() for line in compared.stdout.splitlines()[-4:]]}


def main() -> None:
    """Measures both models and prints the table."""
    args = make_parser(__doc__).parse_args()
    figures, details = measure_each(MODELS, lambda kind: measure(kind, args.folder, args.layers, args.rounds))
    report("export", figures, details, args)


if __name__ == "__main__":
    main()
