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
import sys
from pathlib import Path
from typing import Any

from benchmarks.copies import against_copy
from benchmarks.figures import Figure, make_parser, measure_each, report
from benchmarks.measure import WEIGHTBEAM, run_fresh
from benchmarks.models import MESH, make_source

SHAPE = (4096, 32, 4096)  # embed, layers, mlp of the trained array: 2 GiB in float32


def make_own(folder: Path, layers: int) -> Path:
    """A checkpoint of ours, for 16 hosts."""
    source, own = make_source("llama", folder, layers), folder / "own"
    options = ("--source", source, "--mesh", MESH, "--output", own, "--maxtext_model", "llama2-7b")
    run_fresh(own, WEIGHTBEAM, "convert", *options, keep=True)
    return own


def make_trained(folder: Path) -> Path:
    """A checkpoint of stock Orbax's with one chunk, written by another process: this one stays small."""
    trained = folder / "trained"
    script = f"""
import jax, jax.numpy as jnp, orbax.checkpoint as ocp
values = jax.random.normal(jax.random.key(0), {SHAPE}, dtype=jnp.float32)
tree = {{"params": {{"params": {{"decoder": {{"layers": {{"mlp": {{"wi_0": {{"kernel": values}}}}}}}}}}}}}}
ocp.PyTreeCheckpointer().save({str(trained.resolve() / "0" / "items")!r}, tree)
"""
    run_fresh(trained, sys.executable, "-c", script, keep=True)
    return trained


def main() -> None:
    """Measures the three and prints the table."""
    args = make_parser(__doc__).parse_args()
    own, trained, output = make_own(args.folder, args.layers), make_trained(args.folder), args.folder / "resharded"
    cases = {
        "own": (own, ("--mesh", "fsdp=64"), True),
        "params": (own, ("--state", "params"), True),
        "trained": (trained, ("--mesh", MESH), False),
    }  # a checkpoint, how it is resharded, and whether the seconds have a limit

    def measure(kind: str) -> tuple[list[Figure], dict[str, Any]]:
        checkpoint, options, limit = cases[kind]
        return against_copy(kind, checkpoint, ("reshard", checkpoint, output, *options), output, args.rounds, limit)

    figures, details = measure_each(cases, measure)
    for old in (own, trained, output):
        shutil.rmtree(old)
    report("reshard", figures, details, args)


if __name__ == "__main__":
    main()
