"""Exports against a raw copy: a checkpoint that was converted for a mesh, back into a release.

    python -m benchmarks.export --folder out/bench --layers 8 --rounds 5 --json benchmarks/results.json

For a Llama-like and a MoE-like checkpoint of about 2 GB in bfloat16: *convert* with `--mesh fsdp=16` once, then *raw copy* (one thread
reads the checkpoint's files and writes their bytes, with an fsync for each) and *export* (a subprocess: start-up and imports are inside)
in turn; the medians count. Before each the checkpoint is read once, so that it lies in the page cache. The peak memory comes from one
more export, which is watched. The last export is compared with the release, file by file of its tensors, by `weightbeam diff`.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.bench import MAX_PEAK_BYTES, MESH, make_source, raw_copy, tell, warm
from benchmarks.figures import Figure, report
from benchmarks.measure import WEIGHTBEAM, Run, run

START_SECONDS, TIMES_RAW = 2.0, 1.25  # the limit of an export: START_SECONDS + this × the raw copy
MODELS = {"llama": "llama2-7b", "moe": "qwen3-30b-a3b"}  # and the MaxText model that the checkpoint is for


def measure(kind: str, folder: Path, layers: int, rounds: int) -> tuple[list[Figure], dict[str, Any]]:
    """The figures of one model, and every single round."""
    source, checkpoint, output, copy = make_source(kind, folder, layers), folder / "checkpoint", folder / "exported", folder / "copied"
    for old in (checkpoint, output, copy):
        shutil.rmtree(old, ignore_errors=True)
    model = ("--maxtext_model", MODELS[kind])
    subprocess.run([WEIGHTBEAM, "convert", "--source", source, "--mesh", MESH, "--output", checkpoint, *model], check=True, stdout=subprocess.DEVNULL)
    files = [path for path in sorted((checkpoint / "0" / "items").rglob("*")) if path.is_file() and path.stat().st_size]
    nbytes = sum(path.stat().st_size for path in files)

    def once(watch: bool = False) -> Run:
        warm(files)
        shutil.rmtree(output, ignore_errors=True)
        return run(WEIGHTBEAM, "export", "--source", checkpoint, "--output", output, *model, watch=watch)

    raw, exported = [], []
    for number in range(1, rounds + 1):
        warm(files)
        raw.append(raw_copy(files, copy, nbytes))
        shutil.rmtree(copy)
        exported.append(once())
        tell(kind, f"round {number} of {rounds}: raw copy {raw[-1]:.2f} s, export {exported[-1].seconds:.2f} s")
    watched = once(watch=True)
    compared = subprocess.run([WEIGHTBEAM, "diff", source, output], capture_output=True, text=True, check=False)
    for old in (checkpoint, output):
        shutil.rmtree(old)
    copied = statistics.median(raw)
    seconds = statistics.median(one.seconds for one in exported)
    figures = [
        Figure("export, raw copy", kind, copied, "s"),
        Figure("export", kind, seconds, "s", START_SECONDS + TIMES_RAW * copied, f"{START_SECONDS:.0f} s + {TIMES_RAW} × raw copy"),
        Figure("export, CPU", kind, statistics.median(one.cpu_seconds for one in exported), "s"),
        Figure("export, peak memory", kind, watched.peak_bytes, "bytes", MAX_PEAK_BYTES),
    ]
    details = {
        "bytes": nbytes,
        "raw_copy_seconds": raw,
        "export_seconds": [one.seconds for one in exported],
        "diff": [line.strip() for line in compared.stdout.splitlines()[-4:]],
    }
    return figures, details


def main() -> int:
    """Measures both models and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("out/bench"))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="put the figures into this file")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    figures, details = [], {}
    for kind in MODELS:
        more, details[kind] = measure(kind, args.folder, args.layers, args.rounds)
        figures += more
    report("export", figures, details, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
