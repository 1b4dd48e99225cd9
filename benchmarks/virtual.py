"""What `docs/howto/virtual.md` claims, measured:

    python -m benchmarks.virtual --folder out/bench --rounds 5

On the MoE-like checkpoint of `benchmarks/bench.py` (2.3 GB, bf16): virtual conversions with and without a mesh, an
ordinary one, `materialize`, and a whole restore of each by stock Orbax, whose arrays must be the same to the bit.
Commands are subprocesses: start-up and imports are inside. *Written* is every byte below the checkpoint but the
source's own files.

And an index for Qwen3-235B-A22B at its full size: its headers are true, its files sparse.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.bench import MESH, make_source, tell, warm
from benchmarks.figures import Figure, report
from benchmarks.full_size import TensorEntry, write
from benchmarks.measure import Run, run

COMMAND = (sys.executable, "-m", "weightbeam.pipelines.cli")
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


def tensors(c: dict[str, Any]) -> Iterator[TensorEntry]:
    """Every tensor of a Qwen 3 MoE release, layer by layer, in bfloat16."""
    embed, dim, width = c["hidden_size"], c["head_dim"], c["moe_intermediate_size"]
    heads, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    shapes = {
        "input_layernorm": (embed,), "post_attention_layernorm": (embed,), "self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,),
        "self_attn.q_proj": (heads, embed), "self_attn.k_proj": (kv, embed), "self_attn.v_proj": (kv, embed), "self_attn.o_proj": (embed, heads),
        "mlp.gate": (c["num_experts"], embed),
    }  # fmt: skip
    for expert in range(c["num_experts"]):
        shapes |= {f"mlp.experts.{expert}.{name}": (width, embed) for name in ("gate_proj", "up_proj")} | {
            f"mlp.experts.{expert}.down_proj": (embed, width)
        }
    yield "model.embed_tokens.weight", "BF16", (c["vocab_size"], embed)
    for layer in range(c["num_hidden_layers"]):
        for name, shape in shapes.items():
            yield f"model.layers.{layer}.{name}.weight", "BF16", shape
    yield "model.norm.weight", "BF16", (embed,)
    yield "lm_head.weight", "BF16", (c["vocab_size"], embed)


def written_bytes(checkpoint: Path) -> int:
    """Bytes of a checkpoint that aren't the source's own files."""
    return sum(
        path.stat().st_size for path in checkpoint.rglob("*") if path.is_file() and path.suffix != ".safetensors"
    )


def timed(command: str, *arguments: str | Path, output: Path, rounds: int) -> tuple[list[Run], Run]:
    """A command that writes a checkpoint, so many times, and once more with its memory watched; the last result stays."""
    runs = []
    for number in range(rounds + 1):
        shutil.rmtree(output, ignore_errors=True)
        runs.append(run(*COMMAND, command, *arguments, "--output", output, watch=number == rounds))
    return runs[:-1], runs[-1]


def figures_of(
    what: str, model: str, runs: list[Run], watched: Run, output: Path, limits: tuple[float | None, float | None]
) -> list[Figure]:
    """Seconds, processor, memory and bytes of a command."""
    return [
        Figure(what, model, statistics.median(one.seconds for one in runs), "s", limits[0]),
        Figure(f"{what}, CPU", model, statistics.median(one.cpu_seconds for one in runs), "s"),
        Figure(f"{what}, peak memory", model, watched.peak_bytes, "bytes"),
        Figure(f"{what}, bytes written", model, written_bytes(output), limit=limits[1]),
    ]


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
    for what, (command, *arguments) in commands.items():
        tell("moe", what)
        is_virtual = what.startswith("virtual")
        output = folder / what.replace(", ", "-")
        runs, watched = timed(command, *arguments, output=output, rounds=rounds)
        figures += figures_of(
            what, "moe", runs, watched, output, (MAX_SECONDS, MAX_WRITTEN) if is_virtual else (None, None)
        )
        if is_virtual:
            references = json.loads((output / "0" / "conversion.json").read_bytes())["references"]
            figures.append(Figure(f"{what}, chunks", "moe", references["chunks"]))
        seconds: list[tuple[float, float]] = []
        for _ in range(rounds):
            told = folder / "restored.json"
            run(sys.executable, "-c", RESTORE, output / "0" / "items", told)
            took, restored[what] = json.loads(told.read_bytes())
            seconds.append(took)
        wall, cpu = (statistics.median(one) for one in zip(*seconds, strict=True))
        figures += [
            Figure(f"{what}, whole restore", "moe", wall, "s"),
            Figure(f"{what}, whole restore, CPU", "moe", cpu, "s"),
        ]
    for what, leaves in restored.items():
        if leaves != restored["virtual"]:
            raise RuntimeError(f"{what}: other arrays are restored than of the virtual checkpoint")
    return figures


def measure_full_size(folder: Path, rounds: int) -> list[Figure]:
    """An index for a model of 470 GB."""
    source, output = folder / "Qwen3-235B", folder / "Qwen3-235B-virtual"
    shutil.rmtree(source, ignore_errors=True)
    write(QWEN3_235B, FILES, source, tensors)
    tell("Qwen3-235B", "virtual")
    runs, watched = timed("convert", "--source", source, "--virtual", "--mesh", MESH, output=output, rounds=rounds)
    chunks = json.loads((output / "0" / "conversion.json").read_bytes())["references"]["chunks"]
    figures = figures_of("virtual", "Qwen3-235B", runs, watched, output, (MAX_FULL_SIZE_SECONDS, None))
    return [*figures, Figure("virtual, chunks", "Qwen3-235B", chunks)]


def main() -> int:
    """Measures both and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("out/bench"), help="where checkpoints go; all on one disk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="put the figures into this file")
    args = parser.parse_args()
    figures = measure(args.folder, args.rounds) + measure_full_size(args.folder, args.rounds)
    report("virtual", figures, {"rounds": args.rounds}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
