"""Reshards against a raw copy: our own chunks for another mesh, and one compressed chunk that holds all layers, as
training writes it.

    python -m benchmarks.reshard --folder out/bench --layers 8 --rounds 5 --json benchmarks/results.json

*own*: a Llama-like checkpoint of about 2 GB in bfloat16, converted with `--mesh fsdp=16`, is cut anew for `fsdp=64`.
*trained*: stock Orbax writes one float32 array (embed, layers, mlp) of 2 GiB as one device holds it, which is one chunk
with zstd; it is cut for `fsdp=16`. *params*: the first one's weights alone, whose chunks are copied as they are. *Raw
copy* (one thread reads its files and writes their bytes, with an fsync for each) and *reshard* (a subprocess: start-up
and imports are inside) take turns; see `benchmarks/copies.py`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.bench import MESH, make_source
from benchmarks.copies import take_turns
from benchmarks.figures import make_parser, report
from benchmarks.measure import WEIGHTBEAM

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


def main() -> int:
    """Measures the three and prints the table."""
    parser = make_parser(__doc__)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for old in ("own", "trained", "resharded", "copied"):
        shutil.rmtree(args.folder / old, ignore_errors=True)
    figures, details = [], {}
    own = make_own(args.folder, args.layers)
    cases = [("own", own, ("--mesh", "fsdp=64"), True), ("params", own, ("--state", "params"), True)]
    cases.append(("trained", make_trained(args.folder), ("--mesh", MESH), False))
    for kind, checkpoint, options, limit in cases:
        output = args.folder / "resharded"
        more, details[kind] = take_turns(
            kind, checkpoint, "reshard", (checkpoint, output, *options), output, args.rounds, limit
        )
        figures += more
    for old in (own, args.folder / "trained", args.folder / "resharded"):
        shutil.rmtree(old)
    report("reshard", figures, details, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
