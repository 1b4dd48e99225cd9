"""Reshards against a raw copy: our own chunks for another mesh, and one compressed chunk that holds all layers, as training writes it.

    python -m benchmarks.reshard --folder out/bench --layers 8 --rounds 5 --json benchmarks/results.json

*own*: a Llama-like checkpoint of about 2 GB in bfloat16, converted with `--mesh fsdp=16`, is cut anew for `fsdp=64`. *trained*: stock
Orbax writes one float32 array (embed, layers, mlp) of 2 GiB as one device holds it, which is one chunk with zstd; it is cut for
`fsdp=16`. *params*: the first one's weights alone, whose chunks are copied as they are. Before each measurement the checkpoint is read
once, so that it lies in the page cache; *raw copy* (one thread reads its files and writes their bytes, with an fsync for each) and
*reshard* (a subprocess: start-up and imports are inside) take turns, and the medians count. The peak memory comes from one more
reshard, which is watched.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench import MAX_PEAK_BYTES, MESH, make_source, raw_copy, tell, warm
from benchmarks.figures import Figure, report
from benchmarks.measure import WEIGHTBEAM, Run, run

START_SECONDS, TIMES_RAW = 2.0, 1.25  # the limit of a reshard of our own chunks: START_SECONDS + this × the raw copy
SHAPE = (4096, 32, 4096)  # embed, layers, mlp of the trained array: 2 GiB in float32


def make_own(folder: Path, layers: int) -> Path:
    """A checkpoint of ours, for 16 hosts."""
    source = make_source("llama", folder, layers)
    options = ("--mesh", MESH, "--output", folder / "own", "--maxtext_model", "llama2-7b")
    subprocess.run([WEIGHTBEAM, "convert", "--source", source, *options], check=True, stdout=subprocess.DEVNULL)
    return folder / "own"


def make_trained(folder: Path) -> Path:
    """A checkpoint of stock Orbax's with one chunk, written by another process: this one stays small."""
    script = f"""
import jax, jax.numpy as jnp, orbax.checkpoint as ocp
values = jax.random.normal(jax.random.key(0), {SHAPE}, dtype=jnp.float32)
tree = {{"params": {{"params": {{"decoder": {{"layers": {{"mlp": {{"wi_0": {{"kernel": values}}}}}}}}}}}}}}
ocp.PyTreeCheckpointer().save({str(folder.resolve() / "trained" / "0" / "items")!r}, tree)
"""
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return folder / "trained"


def measure(kind: str, checkpoint: Path, options: Sequence[str], folder: Path, rounds: int, limit: bool) -> tuple[list[Figure], dict[str, Any]]:
    """The figures of one checkpoint, and every single round."""
    output, copy = folder / "resharded", folder / "copied"
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.stat().st_size]
    nbytes = sum(path.stat().st_size for path in files)

    def once(watch: bool = False) -> Run:
        warm(files)
        shutil.rmtree(output, ignore_errors=True)
        return run(WEIGHTBEAM, "reshard", checkpoint, output, *options, watch=watch)

    raw, resharded = [], []
    for number in range(1, rounds + 1):
        warm(files)
        shutil.rmtree(copy, ignore_errors=True)
        raw.append(raw_copy(files, copy, nbytes))
        shutil.rmtree(copy)
        resharded.append(once())
        tell(kind, f"round {number} of {rounds}: raw copy {raw[-1]:.2f} s, reshard {resharded[-1].seconds:.2f} s")
    watched = once(watch=True)
    shutil.rmtree(output)
    copied = statistics.median(raw)
    seconds = statistics.median(one.seconds for one in resharded)
    most = (START_SECONDS + TIMES_RAW * copied, f"{START_SECONDS:.0f} s + {TIMES_RAW} × raw copy") if limit else ()
    figures = [
        Figure("reshard, raw copy", kind, copied, "s"),
        Figure("reshard", kind, seconds, "s", *most),
        Figure("reshard, CPU", kind, statistics.median(one.cpu_seconds for one in resharded), "s"),
        Figure("reshard, peak memory", kind, watched.peak_bytes, "bytes", MAX_PEAK_BYTES),
    ]
    return figures, {"bytes": nbytes, "raw_copy_seconds": raw, "reshard_seconds": [one.seconds for one in resharded]}


def main() -> int:
    """Measures the three and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("out/bench"))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="put the figures into this file")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for old in ("own", "trained", "resharded", "copied"):
        shutil.rmtree(args.folder / old, ignore_errors=True)
    figures, details = [], {}
    own = make_own(args.folder, args.layers)
    cases = [("own", own, ("--mesh", "fsdp=64"), True), ("params", own, ("--state", "params"), True)]
    cases.append(("trained", make_trained(args.folder), ("--mesh", MESH), False))
    for kind, checkpoint, options, limit in cases:
        more, details[kind] = measure(kind, checkpoint, options, args.folder, args.rounds, limit)
        figures += more
    shutil.rmtree(own)
    shutil.rmtree(args.folder / "trained")
    report("reshard", figures, details, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
