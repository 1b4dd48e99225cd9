"""The whole pipeline at full size: DeepSeek-V3 (671 B, FP8, 163 files) to an Orbax checkpoint in bfloat16.

    nice python -m benchmarks.full_run --folder out/full_size --json benchmarks/results.json

It takes about half an hour on 2 cores, and 20 GB of disk; fewer layers, four at least, are for a trial. The shards are
sparse (`benchmarks/full_size.py`): the head of each tensor is noise, the rest a hole that the system reads as zeros.
The output is compressed (`--compression zstd`), which is all that makes 1.3 TB fit. Everything else is the command as
it is: every byte is read, decoded, transposed, stacked and digested, every unit is written and flushed, and the
assembly merges as many keys as a real one's. Four chunks in five keep some KB and lie in the units' files as real ones
would; the others are nearly or all zero, and short enough to stand in the index itself.

What isn't the command as it is: it isn't asked whether the disk has room for all of the arrays, and notes are taken of
the time that each stage of each unit takes, and of the merge. Afterwards arrays are read with TensorStore at known
places and compared with what plain numpy makes of their tensors, and `weightbeam verify` compares a sample.

CPU seconds count; wall seconds do only where the machine has nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import MAX_PEAK_BYTES, Figure, make_parser, report
from benchmarks.full_size import DEEPSEEK_V3, MESH, MODELS, write
from benchmarks.measure import WEIGHTBEAM, memory_bytes, run, tell
from benchmarks.stock import dequantize, tensors_in
from weightbeam.formats.orbax import find_items, open_arrays, zarr
from weightbeam.formats.safetensors import open_hf
from weightbeam.formats.storage import Store
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import ConvertOptions

MODEL = "DeepSeek-V3"
ROWS = 2048  # of the vocabulary that are compared
LOOK_SECONDS = 0.5  # between two looks at the memory
SAMPLE = "0.001"  # of the tensors, for `weightbeam verify`

Where = tuple[int | slice, ...]


class Notes:
    """What the stages and the merge of this process take.

    Attributes:
      units: seconds of each unit, all stages together.
      stages: wall seconds of each stage, all threads together, and CPU seconds of these threads (TensorStore's own
        aren't in it).
      merges: of each merge its seconds, CPU seconds of the process, and peak memory; and the peak before it.
    """

    def __init__(self) -> None:
        self.units: dict[int, float] = defaultdict(float)
        self.stages: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self.merges: list[dict[str, float]] = []
        self._lock = threading.Lock()

    def stage(self, measured: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """`StageFn.measured`, with notes."""

        def noted(stage: Any, work: Any) -> Any:
            start, cpu = time.perf_counter(), time.thread_time()
            result = measured(stage, work)
            seconds, cpu_seconds = time.perf_counter() - start, time.thread_time() - cpu
            with self._lock:
                self.units[work.unit.id] += seconds
                total = self.stages[stage.stage()]
                total[0] += seconds
                total[1] += cpu_seconds
            return result

        return noted

    def merge(self, merge: Callable[..., None]) -> Callable[..., None]:
        """`ocdbt.merge`, with notes."""

        def noted(*arguments: Any) -> None:
            before = memory_bytes("VmHWM")
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
            start, cpu = time.perf_counter(), time.process_time()
            merge(*arguments)
            took = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
            self.merges.append({**took, "peak_bytes": memory_bytes("VmHWM"), "peak_bytes_before": before})

        return noted


def convert(command: list[str], notes_file: Path) -> int:
    """`weightbeam convert`, with notes; the process of the conversion."""
    from weightbeam.formats.orbax import ocdbt
    from weightbeam.pipelines.cli import main
    from weightbeam.transforms.stages.chain import StageFn

    usage = shutil.disk_usage
    shutil.disk_usage = lambda path: usage(path)._replace(free=1 << 60)
    notes = Notes()
    StageFn.measured = notes.stage(StageFn.measured)  # type: ignore[method-assign]
    ocdbt.merge = notes.merge(ocdbt.merge)
    status = main(["convert", *command])
    notes_file.write_text(json.dumps({"units": notes.units, "stages": notes.stages, "merges": notes.merges}))
    return status


def places(config: dict[str, Any]) -> Iterator[tuple[str, Where, str]]:
    """Parts of arrays, and the tensors that they are, transposed: the ends of every stack, and something between."""
    last = config["num_hidden_layers"] - 1
    dense, experts = config["first_k_dense_replace"], config["n_routed_experts"]
    every, some = slice(None), slice(min(ROWS, config["vocab_size"]))
    yield "token_embedder.embedding", (some,), "model.embed_tokens"
    yield "decoder.logits_dense.kernel", (every, some), "lm_head"
    yield "decoder.decoder_norm.scale", (every,), "model.norm"
    yield "decoder.dense_layers.mlp.wo.kernel", (every, dense - 1), f"model.layers.{dense - 1}.mlp.down_proj"
    for layer in sorted({dense, (dense + last) // 2, last}):
        moe, of_layer, at = "decoder.moe_layers.", f"model.layers.{layer}.", layer - dense
        block, mlp = f"{moe}DeepSeekMoeBlock_0.", f"{of_layer}mlp."
        yield f"{moe}pre_self_attention_layer_norm.scale", (every, at), f"{of_layer}input_layernorm"
        yield f"{moe}self_attention.out.kernel", (every, at), f"{of_layer}self_attn.o_proj"
        yield f"{block}shared_experts.wi_1.kernel", (every, at), f"{mlp}shared_experts.up_proj"
        for expert in (0, experts // 2 - 1, experts - 1):
            for name, projection in (("wi_0", "gate_proj"), ("wi_1", "up_proj"), ("wo", "down_proj")):
                yield f"{block}MoeBlock_0.{name}", (expert, at), f"{mlp}experts.{expert}.{projection}"


def check(items: Store, source: Path, config: dict[str, Any]) -> int:
    """Compares arrays at known places with what numpy makes of their tensors; returns how many elements.

    Raises:
      RuntimeError: one differs, or everything at a place is zero.
    """
    shards = json.loads((source / "model.safetensors.index.json").read_bytes())["weight_map"]

    def load(name: str) -> np.ndarray:
        return dict(tensors_in(source / shards[name]))[name]

    arrays, compared = open_arrays(items), 0
    for key, where, tensor in places(config):
        found = np.asarray(arrays[f"params.params.{key}"][where].read().result())
        values = load(f"{tensor}.weight")
        if f"{tensor}.weight_scale_inv" in shards:
            values = dequantize(values, load(f"{tensor}.weight_scale_inv"))
        elif tensor in ("model.embed_tokens", "lm_head"):
            values = values[:ROWS]
        values = np.ascontiguousarray(values if tensor == "model.embed_tokens" else values.T)
        found = found.reshape(values.shape)
        if not found.any() or not np.array_equal(found.view(np.uint16), values.view(np.uint16)):
            raise RuntimeError(f"{key} at {where} isn't {tensor}")
        compared += found.size
    return compared


def measure(folder: Path, layers: int, keep: bool) -> tuple[list[Figure], dict[str, Any]]:
    """The figures of one conversion."""
    config, files = DEEPSEEK_V3 | {"num_hidden_layers": layers}, MODELS[MODEL][1]
    full = layers == DEEPSEEK_V3["num_hidden_layers"]
    model = MODEL if full else f"{MODEL}, {layers} layers"
    source, output = folder / f"{MODEL}-noisy-{layers}", folder / f"{MODEL}-converted"
    notes_file = folder / "notes.json"
    for old in (source, output):
        shutil.rmtree(old, ignore_errors=True)
    tell(model, "writing the checkpoint")
    write(config, files, source, noisy=True)
    os.sync()
    conversion = plan_conversion(ConvertOptions(mesh=(MESH,), compression="zstd"), open_hf(source))

    tell(model, "converting")
    here = (sys.executable, "-m", "benchmarks.full_run", "--notes", notes_file)
    options = ("--source", source, "--output", output, "--mesh", MESH, "--compression", "zstd")
    took = run(*here, *options, watch=True, every=LOOK_SECONDS)
    notes = json.loads(notes_file.read_bytes())
    units, (merge,) = list(notes["units"].values()), notes["merges"]
    cpu = {stage: cpu for stage, (_, cpu) in notes["stages"].items()}

    tell(model, "comparing")
    items = find_items(output)
    compared = check(items, source, config)
    run(WEIGHTBEAM, "verify", "--source", source, "--checkpoint", output, "--sample", SAMPLE)
    keys = sum(1 for grid in conversion.grids for _ in zarr.keys(grid.spec, conversion.format))
    others = "CPU of everything else (TensorStore's threads: zstd; Beam; merge)"
    figures = [
        Figure("convert, wall", model, took.seconds, "s"),
        Figure("convert, CPU", model, took.cpu_seconds, "s"),
        Figure("convert, peak memory", model, took.peak_bytes, "bytes", MAX_PEAK_BYTES),
        Figure("source bytes a CPU second", model, conversion.source_bytes / took.cpu_seconds / 1e9, "GB/s"),
        Figure("units", model, len(units)),
        Figure("one unit, median", model, statistics.median(units), "s"),
        Figure("one unit, 90 % take at most", model, statistics.quantiles(units, n=10)[-1], "s"),
        Figure("one unit, longest", model, max(units), "s"),
        Figure("merge, keys", model, keys),
        Figure("merge, wall", model, merge["seconds"], "s"),
        Figure("merge, peak memory", model, merge["peak_bytes"], "bytes"),
        Figure("elements compared", model, compared),
    ]
    figures += [Figure(f"CPU of {stage}", model, seconds, "s") for stage, seconds in cpu.items()]
    figures.append(Figure(others, model, took.cpu_seconds - sum(cpu.values()), "s"))
    details = {
        "source_bytes": conversion.source_bytes,
        "target_bytes": conversion.target_bytes,
        "source_disk_bytes": disk_bytes(source),
        "output_disk_bytes": disk_bytes(output),
        "merge": merge,
        "stages": notes["stages"],
        "unit_seconds_deciles": statistics.quantiles(units, n=10),
        "load_average": os.getloadavg(),
        "nice": os.nice(0),
    }
    if not keep:
        for made in (source, output):
            shutil.rmtree(made)
    return figures, details


def disk_bytes(folder: Path) -> int:
    """What a folder's files take on the disk."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def main() -> None:
    """Measures the conversion and prints the table."""
    parser = make_parser(__doc__, "out/full_size", DEEPSEEK_V3["num_hidden_layers"], rounds=None)
    parser.add_argument("--keep", action="store_true", help="leave source and output there")
    parser.add_argument("--notes", type=Path, help=argparse.SUPPRESS)  # the process of the conversion
    args, rest = parser.parse_known_args()
    if args.notes:
        sys.exit(convert(rest, args.notes))
    if rest:
        parser.error(f"unknown: {' '.join(rest)}")
    figures, details = measure(args.folder, args.layers, args.keep)
    report("full run", figures, details, args)


if __name__ == "__main__":
    main()
