"""What `docs/howto/virtual.md` claims, measured:

    python -m benchmarks.virtual --folder out/bench --rounds 5

On the MoE-like checkpoint of `benchmarks/bench.py` (2.3 GB, bf16): virtual conversions with and without a mesh, an
ordinary one, `materialize`, and a whole restore of each by stock Orbax, whose arrays must be the same to the bit.
Commands are subprocesses: start-up and imports are inside. *Written* is every byte below the checkpoint but the
source's own files.

And an index for Qwen3-235B-A22B at its full size: its headers are true, its files sparse.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.figures import Figure, make_parser, of_runs, report
from benchmarks.full_size import write
from benchmarks.measure import WEIGHTBEAM, run, run_fresh, tell, warm
from benchmarks.models import MESH, make_source

MAX_SECONDS, MAX_WRITTEN, MAX_FULL_SIZE_SECONDS = 2.0, 1_000_000, 10.0
RESTORE = """
import hashlib, json, sys, time
import jax, numpy, orbax.checkpoint
start, cpu = time.monotonic(), time.process_time()
tree = orbax.checkpoint.PyTreeCheckpointer().restore(sys.argv[1])
seconds = time.monotonic() - start, time.process_time() - cpu
leaves = {str(path): hashlib.sha256(numpy.ascontiguousarray(leaf).view(numpy.uint8)).hexdigest() for path, leaf in jax.tree.leaves_with_path(tree["params"])}
open(sys.argv[2], "w").write(json.dumps([seconds, leaves]))
"""

QWEN3_235B = dict(
    model_type="qwen3_moe", vocab_size=151936, hidden_size=4096, num_hidden_layers=94, num_attention_heads=64, num_key_value_heads=4, head_dim=128,
    intermediate_size=12288, moe_intermediate_size=1536, num_experts=128, num_experts_per_tok=8, tie_word_embeddings=False,
)  # fmt: skip  # config.json of Qwen/Qwen3-235B-A22B, as far as it says something about shapes
FILES = 118


def written_bytes(checkpoint: Path) -> int:
    """Bytes of a checkpoint that aren't the source's own files."""
    files = (path for path in checkpoint.rglob("*") if path.is_file() and path.suffix != ".safetensors")
    return sum(path.stat().st_size for path in files)


def timed(
    what: str, model: str, command: Sequence[str | Path], output: Path, rounds: int, seconds: float | None
) -> list[Figure]:
    """The figures of a command that writes a checkpoint, at most so many seconds; the last result stays."""
    run_once = partial(run_fresh, output, WEIGHTBEAM, *command, "--output", output, keep=True)
    runs = [run_once() for _ in range(rounds)]
    figures = of_runs(what, model, runs, run_once(watch=True), seconds, most_bytes=None)
    limit = MAX_WRITTEN if what.startswith("virtual") and model == "moe" else None
    figures.append(Figure(f"{what}, bytes written", model, written_bytes(output), limit=limit))
    if what.startswith("virtual"):
        chunks = json.loads((output / "0" / "conversion.json").read_bytes())["references"]["chunks"]
        figures.append(Figure(f"{what}, chunks", model, chunks))
    return figures


def measure(folder: Path, rounds: int) -> list[Figure]:
    """The MoE-like checkpoint: index, ordinary conversion, and whole restores."""
    source = make_source("moe", folder, 8)
    warm(sorted(source.glob("*.safetensors")))
    commands = {
        "virtual": ("convert", "--source", source, "--virtual"),
        f"virtual, {MESH}": ("convert", "--source", source, "--virtual", "--mesh", MESH),
        f"convert, {MESH}": ("convert", "--source", source, "--mesh", MESH),
        f"materialize, {MESH}": ("materialize", folder / "virtual", "--mesh", MESH),
    }
    figures: list[Figure] = []
    restored: dict[str, dict[str, str]] = {}
    for what, command in commands.items():
        tell("moe", what)
        output = folder / what.replace(", ", "-")
        figures += timed(what, "moe", command, output, rounds, MAX_SECONDS if "virtual" in what else None)
        seconds: list[tuple[float, float]] = []
        told = folder / "restored.json"
        for _ in range(rounds):
            run(sys.executable, "-c", RESTORE, output / "0" / "items", told)
            took, restored[what] = json.loads(told.read_bytes())
            seconds.append(took)
        wall, cpu = (statistics.median(one) for one in zip(*seconds, strict=True))
        figures.append(Figure(f"{what}, whole restore", "moe", wall, "s"))
        figures.append(Figure(f"{what}, whole restore, CPU", "moe", cpu, "s"))
    for what, leaves in restored.items():
        if leaves != restored["virtual"]:
            raise RuntimeError(f"{what}: other arrays are restored than of the virtual checkpoint")
    return figures


def measure_full_size(folder: Path, rounds: int) -> list[Figure]:
    """An index for a model of 470 GB."""
    source, output = folder / "Qwen3-235B", folder / "Qwen3-235B-virtual"
    shutil.rmtree(source, ignore_errors=True)
    write(QWEN3_235B, FILES, source)
    tell("Qwen3-235B", "virtual")
    command = ("convert", "--source", source, "--virtual", "--mesh", MESH)
    return timed("virtual", "Qwen3-235B", command, output, rounds, MAX_FULL_SIZE_SECONDS)


def main() -> None:
    """Measures both and prints the table."""
    args = make_parser(__doc__, layers=None).parse_args()
    report("virtual", measure(args.folder, args.rounds) + measure_full_size(args.folder, args.rounds), {}, args)


if __name__ == "__main__":
    main()
