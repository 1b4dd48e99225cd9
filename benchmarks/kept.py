"""FP8 that stays FP8: a conversion that decodes nothing, and the way back, against a parallel copy of the same bytes.

    python -m benchmarks.kept --folder out/bench --layers 8 --rounds 5 --json benchmarks/results.json

The FP8 checkpoint of `benchmarks/bench.py`, 2.13 GB: `weightbeam convert --mesh fsdp=16 --save_dtype float8_e4m3fn`, and
`weightbeam export` of what that wrote, each as a subprocess, in turn with four threads' copy of the release's files. What a
command takes before it moves a byte (the interpreter, the imports, the plan) is measured in the same rounds, by the same
commands on a model of 3 MB, and is no part of what is compared with the copy. *written ÷ read* is the bytes of the result's
arrays by the bytes of the tensors.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.copies import parallel_copy
from benchmarks.figures import MAX_PEAK_BYTES, Figure, make_parser, report
from benchmarks.measure import WEIGHTBEAM, Run, medians_of, run_fresh, seconds_of, take_turns
from benchmarks.models import MESH, make_source
from weightbeam.formats.safetensors import open_hf
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import CODED, ConvertOptions

# What a command takes beside its start-up, in terms of the parallel copy.
MAX_TIMES_COPY = {"convert": 1.15, "export": 1.25}
MAX_WRITTEN = 1.01  # bytes written by bytes read
NAME = "fp8, kept"


def convert(source: Path, output: Path, watch: bool = False) -> Run:
    """A conversion that decodes nothing; what it wrote stays."""
    options = ("--source", source, "--mesh", MESH, "--save_dtype", CODED, "--output", output)
    return run_fresh(
        output, WEIGHTBEAM, "convert", *options, files=list(source.glob("*.safetensors")), watch=watch, keep=True
    )


def export(converted: Path, watch: bool = False) -> Run:
    """The way back."""
    back = converted.with_name("kept-back")
    files = [path for path in converted.rglob("*") if path.is_file()]
    return run_fresh(back, WEIGHTBEAM, "export", converted, back, files=files, watch=watch)


def measure(folder: Path, layers: int, rounds: int) -> tuple[list[Figure], dict[str, Any]]:
    """The figures, and every single round."""
    source, empty = make_source("fp8", folder, layers), make_source("fp8-start", folder, 1)
    conversion = plan_conversion(ConvertOptions(mesh=(MESH,), save_dtype=CODED), open_hf(source))
    files = [Path(shard.path) for shard in conversion.source.shards]
    file_bytes = sum(path.stat().st_size for path in files)
    output = folder / "kept"
    ways = {"copy": partial(parallel_copy, files, folder / "copied", file_bytes)}
    for release, suffix in ((source, ""), (empty, ", start-up")):
        ways |= {f"convert{suffix}": partial(convert, release, output), f"export{suffix}": partial(export, output)}
    taken = take_turns(NAME, rounds, ways)
    watched = {"convert": convert(source, output, watch=True), "export": export(output, watch=True)}
    shutil.rmtree(output)
    medians = medians_of(taken)
    figures = [Figure("parallel copy", NAME, medians["copy"], "s")]
    for name, times in MAX_TIMES_COPY.items():
        start = medians[f"{name}, start-up"]
        limit = start + times * medians["copy"]
        figures += [
            Figure(f"{name}, start-up", NAME, start, "s"),
            Figure(name, NAME, medians[name], "s", limit, f"start-up + {times:g} × parallel copy"),
            Figure(f"{name}, peak memory", NAME, watched[name].peak_bytes, "bytes", MAX_PEAK_BYTES),
        ]
    written = conversion.target_bytes / conversion.source_bytes
    figures.append(Figure("written ÷ read", NAME, written, "×", MAX_WRITTEN))
    sizes = {"source_bytes": conversion.source_bytes, "target_bytes": conversion.target_bytes}
    return figures, sizes | {"seconds": seconds_of(taken)}


def main() -> None:
    """Measures and prints the table."""
    args = make_parser(__doc__).parse_args()
    figures, details = measure(args.folder, args.layers, args.rounds)
    report("kept", figures, {NAME: details}, args)


if __name__ == "__main__":
    main()
