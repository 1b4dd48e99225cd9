"""FP8 that stays FP8: a conversion that decodes nothing, and the way back, against a parallel copy of the same bytes.

    python -m benchmarks.kept --folder out/bench --layers 8 --rounds 5 --json benchmarks/results.json

The FP8 checkpoint of `benchmarks/bench.py`, 2.13 GB: `weightbeam convert --mesh fsdp=16 --save_dtype float8_e4m3fn`, and `weightbeam
export` of what that wrote, each as a subprocess, in turn with four threads' copy of the release's files. *written ÷ read* is the bytes of
the result's arrays by the bytes of the tensors.
"""

from __future__ import annotations

import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.bench import MAX_PEAK_BYTES, MESH, make_source, parallel_copy, tell, warm
from benchmarks.figures import Figure, make_parser, report
from benchmarks.measure import WEIGHTBEAM, run
from weightbeam.formats.safetensors import open_hf
from weightbeam.transforms.planning.conversion_planner import prepare
from weightbeam.transforms.planning.options import CODED, Options

START, TIMES = 1.0, 1.15  # of a conversion: seconds, and times the parallel copy
BACK_START, BACK_TIMES = 2.0, 1.25  # of an export
MAX_WRITTEN = 1.01  # bytes written by bytes read
NAME = "fp8, kept"


def measure(folder: Path, layers: int, rounds: int) -> tuple[list[Figure], dict[str, Any]]:
    """The figures, and every single round."""
    source, output, copy = make_source("fp8", folder, layers), folder / "kept", folder / "copied"
    back = folder / "kept-back"
    conversion = prepare(Options(mesh=(MESH,), save_dtype=CODED), open_hf(source))
    files = [Path(shard.path) for shard in conversion.source.shards]
    file_bytes = sum(path.stat().st_size for path in files)
    convert = (WEIGHTBEAM, "convert", "--source", source, "--mesh", MESH, "--save_dtype", CODED, "--output", output)
    export = (WEIGHTBEAM, "export", output, back)
    for old in (output, copy, back):  # of a run that was stopped
        shutil.rmtree(old, ignore_errors=True)
    copied, converted, exported = [], [], []
    peaks = {}
    for number in range(1, rounds + 2):  # the last is watched, and doesn't count
        watch = number > rounds
        if not watch:
            warm(files)
            copied.append(parallel_copy(files, copy, file_bytes))
            shutil.rmtree(copy)
        warm(files)
        there = run(*convert, watch=watch)
        warm([path for path in output.rglob("*") if path.is_file()])
        again = run(*export, watch=watch)
        shutil.rmtree(output)
        shutil.rmtree(back)
        if watch:
            peaks = {"convert": there.peak_bytes, "export": again.peak_bytes}
            continue
        converted.append(there.seconds)
        exported.append(again.seconds)
        seconds = f"parallel copy {copied[-1]:.2f} s, convert {converted[-1]:.2f} s, export {exported[-1]:.2f} s"
        tell(NAME, f"round {number} of {rounds}: {seconds}")
    parallel = statistics.median(copied)
    limit, back_limit = START + TIMES * parallel, BACK_START + BACK_TIMES * parallel
    written = conversion.target_bytes / conversion.source_bytes
    figures = [
        Figure("parallel copy", NAME, parallel, "s"),
        Figure("convert", NAME, statistics.median(converted), "s", limit, f"{START:g} s + {TIMES:g} × parallel copy"),
        Figure("convert, peak memory", NAME, peaks["convert"], "bytes", MAX_PEAK_BYTES),
        Figure("written ÷ read", NAME, written, "×", MAX_WRITTEN),
        Figure(
            "export",
            NAME,
            statistics.median(exported),
            "s",
            back_limit,
            f"{BACK_START:g} s + {BACK_TIMES:g} × parallel copy",
        ),
        Figure("export, peak memory", NAME, peaks["export"], "bytes", MAX_PEAK_BYTES),
    ]
    details = {
        "source_bytes": conversion.source_bytes,
        "target_bytes": conversion.target_bytes,
        "parallel_copy_seconds": copied,
        "convert_seconds": converted,
        "export_seconds": exported,
    }
    return figures, details


def main() -> int:
    """Measures and prints the table."""
    args = make_parser(__doc__).parse_args()
    figures, details = measure(args.folder, args.layers, args.rounds)
    report("kept", figures, {"layers": args.layers, "rounds": args.rounds, NAME: details}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
