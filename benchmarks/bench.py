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

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.figures import Figure, report
from benchmarks.measure import WEIGHTBEAM, Run, count_flushes, run
from weightbeam.formats.safetensors import open_hf
from weightbeam.transforms.planning.conversion import Conversion
from weightbeam.transforms.planning.conversion_planner import prepare
from weightbeam.transforms.planning.options import Options

MESH = "fsdp=16"
BLOCK = 16 << 20  # bytes of one read of the raw copy
PIECE, COPIERS = 64 << 20, 4  # bytes that the parallel copy writes to a file, and its threads
# of a conversion: seconds, and times the parallel copy
LIMITS = {"llama": (1.0, 1.15), "moe": (1.0, 1.15), "fp8": (2.0, 2.0)}
MAX_PEAK_BYTES = 3 << 29  # 1.5 GiB
MAX_READ_AMPLIFICATION = 1.02
MAX_SHUFFLED = 0.001  # of the model's bytes
MIN_TIMES_STOCK = 5.0  # stock Orbax's seconds and memory in terms of ours
MAX_MEMORY_GROWTH = 1.1  # from 1 GB to 8 GB
# of a Llama-like model: 1.05 GB and 8.3 GB. The largest units of both have 108 MiB: only the bytes differ
MEMORY_LAYERS = (3, 39)


def make_source(kind: str, folder: Path, layers: int) -> Path:
    """The checkpoint's folder; it is written if it isn't there yet."""
    source = folder / f"{kind}-{layers}"
    if not source.exists():
        unfinished = folder / f"{source.name}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        tell(kind, "writing the checkpoint")
        models.write(kind, unfinished, layers)
        unfinished.rename(source)
    return source


def warm(files: Sequence[Path]) -> None:
    """Brings files into the page cache, and everything that is to be written to the disk."""
    buffer = bytearray(BLOCK)
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    os.sync()


def raw_copy(files: Sequence[Path], folder: Path, target_bytes: int) -> float:
    """Reads files and writes `target_bytes` to as many new ones, one thread, block by block; returns the seconds it
    took.

    Each block that was read is followed by its share of `target_bytes`: itself if there are as many bytes to write as
    to read.
    """
    folder.mkdir(parents=True)
    source_bytes = sum(path.stat().st_size for path in files)
    buffer = memoryview(bytearray(BLOCK))
    read = written = 0
    start = time.monotonic()
    for path in files:
        with open(path, "rb", buffering=0) as source, open(folder / path.name, "wb", buffering=0) as target:
            while n := source.readinto(buffer):
                read += n
                while (due := target_bytes * read // source_bytes - written) > 0:
                    written += target.write(buffer[: min(n, due)])
            os.fsync(target.fileno())
    return time.monotonic() - start


def parallel_copy(files: Sequence[Path], folder: Path, target_bytes: int) -> float:
    """The same with `COPIERS` threads, in pieces; returns the seconds it took."""
    folder.mkdir(parents=True)
    sizes = [path.stat().st_size for path in files]
    pieces = [
        (path, at, min(PIECE, size - at))
        for path, size in zip(files, sizes, strict=True)
        for at in range(0, size, PIECE)
    ]
    share = target_bytes / sum(sizes)

    def copy(number: int) -> None:
        path, at, nbytes = pieces[number]
        buffer = memoryview(bytearray(BLOCK))
        with open(path, "rb", buffering=0) as source, open(folder / str(number), "wb", buffering=0) as target:
            source.seek(at)
            read = written = 0
            while read < nbytes and (n := source.readinto(buffer[: nbytes - read])):
                read += n
                while (due := round(read * share) - written) > 0:
                    written += target.write(buffer[: min(n, due)])
            os.fsync(target.fileno())

    start = time.monotonic()
    with ThreadPoolExecutor(COPIERS) as pool:
        list(pool.map(copy, range(len(pieces))))
    return time.monotonic() - start


def measure(kind: str, folder: Path, layers: int, rounds: int) -> tuple[list[Figure], dict[str, Any]]:
    """The figures of one model, and every single round."""
    source, output, copy = make_source(kind, folder, layers), folder / "converted", folder / "copied"
    conversion = prepare(Options(mesh=(MESH,)), open_hf(source))
    files = [Path(shard.path) for shard in conversion.source.shards]
    file_bytes = sum(path.stat().st_size for path in files)
    raw_bytes = conversion.target_bytes if kind == "fp8" else file_bytes
    command = (WEIGHTBEAM, "convert", "--source", source, "--mesh", MESH, "--output", output)
    stock = (sys.executable, "-m", "benchmarks.stock", "--source", source, "--output", output)
    for old in (output, copy):  # of a run that was stopped
        shutil.rmtree(old, ignore_errors=True)

    def once(*command: str | Path, watch: bool = False) -> Run:
        warm(files)
        taken = run(*command, watch=watch)
        shutil.rmtree(output)
        return taken

    raw, parallel, saved, converted = [], [], [], []
    for number in range(1, rounds + 1):
        warm(files)
        raw.append(raw_copy(files, copy, raw_bytes))
        shutil.rmtree(copy)
        warm(files)
        parallel.append(parallel_copy(files, copy, raw_bytes))
        shutil.rmtree(copy)
        saved.append(once(*stock))
        converted.append(once(*command))
        seconds = f"raw copy {raw[-1]:.2f} s, parallel {parallel[-1]:.2f} s, stock Orbax {saved[-1].seconds:.2f} s, convert {converted[-1].seconds:.2f} s"
        tell(kind, f"round {number} of {rounds}: {seconds}")
    watched, watched_stock = once(*command, watch=True), once(*stock, watch=True)
    flushes = count_flushes(*command)
    shutil.rmtree(output, ignore_errors=True)
    # With an option of Beam's, `plan` imports Beam too.
    start_up = run(WEIGHTBEAM, "plan", "--source", source, "--mesh", MESH, "--direct_num_workers=4")

    raw_seconds, parallel_seconds = statistics.median(raw), statistics.median(parallel)
    stock_seconds = statistics.median(one.seconds for one in saved)
    seconds = statistics.median(one.seconds for one in converted)
    read_bytes = statistics.median(one.read_bytes for one in converted) - start_up.read_bytes
    start, times = LIMITS[kind]
    times_memory = watched_stock.peak_bytes / watched.peak_bytes
    figures = [
        Figure("raw copy", kind, raw_seconds, "s"),
        Figure("parallel copy", kind, parallel_seconds, "s"),
        Figure(
            "convert", kind, seconds, "s", start + times * parallel_seconds, f"{start:g} s + {times:g} × parallel copy"
        ),
        Figure("convert, CPU", kind, statistics.median(one.cpu_seconds for one in converted), "s"),
        Figure("convert, peak memory", kind, watched.peak_bytes, "bytes", MAX_PEAK_BYTES),
        Figure("stock Orbax", kind, stock_seconds, "s"),
        Figure("stock Orbax, peak memory", kind, watched_stock.peak_bytes, "bytes"),
        Figure("stock Orbax ÷ convert", kind, stock_seconds / seconds, "×", MIN_TIMES_STOCK, at_least=True),
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
        "raw_copy_seconds": raw,
        "parallel_copy_seconds": parallel,
        "stock_seconds": [one.seconds for one in saved],
        "stock_cpu_seconds": [one.cpu_seconds for one in saved],
        "convert_seconds": [one.seconds for one in converted],
        "convert_read_bytes": [one.read_bytes for one in converted],
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
        shutil.rmtree(output, ignore_errors=True)
        watched = run(WEIGHTBEAM, "convert", "--source", source, "--mesh", MESH, "--output", output, watch=True)
        shutil.rmtree(output)
        figures.append(Figure("convert, peak memory", name, watched.peak_bytes, "bytes", MAX_PEAK_BYTES))
    shutil.rmtree(source)
    growth = figures[-1].ours / figures[0].ours
    return [*figures, Figure("the last ÷ the first", "llama", growth, "×", MAX_MEMORY_GROWTH)]


def shuffled_bytes(conversion: Conversion) -> int:
    """Bytes that cross the shuffle before the work, as Beam encodes them."""
    import apache_beam as beam  # here: the benchmarks of loading share this module, and need no Beam

    coder = beam.coders.registry.get_coder(beam.typehints.Tuple[int, bool])
    return sum(len(coder.encode((number, False))) for number in range(len(conversion.units)))


def tell(kind: str, text: str) -> None:
    """What happens now, on stderr."""
    print(f"{kind}: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Measures all models and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path("out/bench"), help="where checkpoints and copies go; all on one disk"
    )
    parser.add_argument("--layers", type=int, default=8, help="of each model; 8 make about 2 GB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--memory",
        type=int,
        nargs="*",
        default=MEMORY_LAYERS,
        metavar="LAYERS",
        help="of the models whose memory is compared",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="put the figures and every round into this file")
    args = parser.parse_args()
    figures, details = [], {"layers": args.layers, "rounds": args.rounds}
    for kind in LIMITS:
        more, details[kind] = measure(kind, args.folder, args.layers, args.rounds)
        figures += more
    if args.memory:
        figures += measure_memory(args.folder, args.memory)
    report("convert", figures, details, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
