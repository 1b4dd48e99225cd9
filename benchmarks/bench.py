"""Conversions against a raw copy and against stock Orbax: speed, memory, bytes read and shuffled, flushes.

    python -m benchmarks.bench --folder out/bench --layers 8 --rounds 5 --json benchmarks/results.json

For a llama-like, a MoE-like (bf16) and an FP8 checkpoint of about 2 GB each (`benchmarks/models.py`; written once):

- *convert*: `weightbeam convert --mesh fsdp=16`, scanned, as a subprocess: the interpreter's start-up and the imports are inside.
- *raw copy*: one thread reads the same files and writes the same bytes, in blocks of 16 MB, with an fsync for each file. For
  FP8, whose target is bigger than its source, it reads the source and writes as many bytes as the target has.
- *parallel copy*: four threads do, in pieces of 64 MiB, each written to a file of its own with an fsync. The limit goes by it.
- *stock Orbax*: `benchmarks/stock.py`, a subprocess too.
- Both copies, stock saves and conversions alternate; the medians count. Before each the source is read once, so that it lies in the page
  cache, and `os.sync` leaves nothing to write back. What they wrote is deleted afterwards, not on the clock.
- Peak memory comes from one more conversion and one more stock save, which are watched (`measure.tree_bytes`).
- *read amplification*: what the conversion got from read(2), less what `weightbeam plan` on the same model got (the interpreter,
  the libraries and the headers), by the bytes of the tensors.
- *shuffled*: the numbers of all units, by the bytes of the tensors.
- *flushes*: calls of fsync, fdatasync and their kin in one more conversion, under strace if the machine has it.

Then the peak memory of a Llama-like model of 1 GB and of one of 8 GB (`--memory`: their layers).

Run it on a machine that has nothing else to do. It needs 25 GB of disk.
"""

from __future__ import annotations

import shutil
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import apache_beam as beam

from benchmarks.copies import parallel_copy, raw_copy
from benchmarks.figures import MAX_PEAK_BYTES, Figure, make_parser, measure_each, of_runs, report
from benchmarks.measure import WEIGHTBEAM, count_flushes, medians_of, run, run_fresh, seconds_of, take_turns, tell
from benchmarks.models import MESH, make_source
from weightbeam.formats.safetensors import open_hf
from weightbeam.transforms.planning.conversion import Conversion
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import ConvertOptions

# of a conversion: seconds, and times the parallel copy
LIMITS = {"llama": (1.0, 1.15), "moe": (1.0, 1.15), "fp8": (2.0, 2.0)}
MAX_READ_AMPLIFICATION = 1.02
MAX_SHUFFLED = 0.001  # of the model's bytes
MIN_TIMES_STOCK = 5.0  # stock Orbax's seconds and memory in terms of ours
MAX_MEMORY_GROWTH = 1.1  # from 1 GB to 8 GB
# of a Llama-like model: 1.05 GB and 8.3 GB. The largest units of both have 108 MiB: only the bytes differ
MEMORY_LAYERS = (3, 39)


def measure(kind: str, folder: Path, layers: int, rounds: int) -> tuple[list[Figure], dict[str, Any]]:
    """The figures of one model, and every single round."""
    source, output, copy = make_source(kind, folder, layers), folder / "converted", folder / "copied"
    conversion = plan_conversion(ConvertOptions(mesh=(MESH,)), open_hf(source))
    files = [Path(shard.path) for shard in conversion.source.shards]
    file_bytes = sum(path.stat().st_size for path in files)
    raw_bytes = conversion.target_bytes if kind == "fp8" else file_bytes
    command = (WEIGHTBEAM, "convert", "--source", source, "--mesh", MESH, "--output", output)
    convert = partial(run_fresh, output, *command, files=files)
    stock = (sys.executable, "-m", "benchmarks.stock", "--source", source, "--output", output)
    save = partial(run_fresh, output, *stock, files=files)
    copies = {
        "raw copy": partial(raw_copy, files, copy, raw_bytes),
        "parallel copy": partial(parallel_copy, files, copy, raw_bytes),
    }
    taken = take_turns(kind, rounds, copies | {"stock": save, "convert": convert})
    medians = medians_of(taken)
    watched, watched_stock = convert(watch=True), save(watch=True)
    flushes = count_flushes(output, *command)
    # With an option of Beam's, `plan` imports Beam too.
    start_up = run(WEIGHTBEAM, "plan", "--source", source, "--mesh", MESH, "--direct_num_workers=4")

    read_bytes = statistics.median(one.read_bytes for one in taken["convert"]) - start_up.read_bytes
    start, times = LIMITS[kind]
    limit = start + times * medians["parallel copy"], f"{start:g} s + {times:g} × parallel copy"
    times_memory = watched_stock.peak_bytes / watched.peak_bytes
    figures = [
        *(Figure(copy, kind, medians[copy], "s") for copy in copies),
        *of_runs("convert", kind, taken["convert"], watched, *limit),
        Figure("stock Orbax", kind, medians["stock"], "s"),
        Figure("stock Orbax, peak memory", kind, watched_stock.peak_bytes, "bytes"),
        Figure(
            "stock Orbax ÷ convert", kind, medians["stock"] / medians["convert"], "×", MIN_TIMES_STOCK, at_least=True
        ),
        Figure("the same, peak memory", kind, times_memory, "×", MIN_TIMES_STOCK, at_least=True),
        Figure("read amplification", kind, read_bytes / conversion.source_bytes, "×", MAX_READ_AMPLIFICATION),
        Figure("shuffled ÷ model", kind, shuffled_bytes(conversion) / conversion.source_bytes, "", MAX_SHUFFLED),
        Figure("units", kind, len(conversion.units)),
    ]
    figures += [Figure("flushes", kind, flushes)] if flushes is not None else []
    details = {
        "source_bytes": conversion.source_bytes,
        "target_bytes": conversion.target_bytes,
        "raw_copy_bytes": {"read": file_bytes, "written": raw_bytes},
        "seconds": seconds_of(taken),
        "stock_cpu_seconds": [one.cpu_seconds for one in taken["stock"]],
        "convert_read_bytes": [one.read_bytes for one in taken["convert"]],
        "start_up_read_bytes": start_up.read_bytes,
        "watched_seconds": watched.seconds,
    }
    return figures, details


def measure_memory(folder: Path, layers: Sequence[int]) -> list[Figure]:
    """Peak memory of conversions that differ in nothing but the model's bytes; the largest model isn't kept."""
    figures: list[Figure] = []
    source = output = folder / "converted"
    for number in layers:
        source = make_source("llama", folder, number)
        size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
        name = f"llama, {size / 1e9:.1f} GB"
        tell(name, "converting")
        command = (WEIGHTBEAM, "convert", "--source", source, "--mesh", MESH, "--output", output)
        watched = run_fresh(output, *command, watch=True)
        figures.append(Figure("convert, peak memory", name, watched.peak_bytes, "bytes", MAX_PEAK_BYTES))
    shutil.rmtree(source)
    growth = figures[-1].ours / figures[0].ours
    return [*figures, Figure("the last ÷ the first", "llama", growth, "×", MAX_MEMORY_GROWTH)]


def shuffled_bytes(conversion: Conversion) -> int:
    """Bytes that cross the shuffle before the work, as Beam encodes them."""
    coder = beam.coders.registry.get_coder(beam.typehints.Tuple[int, bool])
    return sum(len(coder.encode((number, False))) for number in range(len(conversion.units)))


def main() -> None:
    """Measures all models and prints the table."""
    parser = make_parser(__doc__)
    memory = "layers of the models whose memory is compared"
    parser.add_argument("--memory", type=int, nargs="*", default=MEMORY_LAYERS, metavar="LAYERS", help=memory)
    args = parser.parse_args()
    figures, details = measure_each(LIMITS, lambda kind: measure(kind, args.folder, args.layers, args.rounds))
    if args.memory:
        figures += measure_memory(args.folder, args.memory)
    report("convert", figures, details, args)


if __name__ == "__main__":
    main()
