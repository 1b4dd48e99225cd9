"""What the README claims, measured: `make bench`, or

    python -m benchmarks.bench --folder out/bench --layers 8 --rounds 5 --json out/bench.json

For a llama-like, a MoE-like (bf16) and an FP8 checkpoint of about 2 GB each (`benchmarks/models.py`; written once):

- *convert*: `weightbeam convert --mesh fsdp=16`, scanned, as a subprocess: the interpreter's start-up and the imports are inside.
- *raw copy*: one thread reads the same files and writes the same bytes, in blocks of 16 MB, with an fsync for each file. For
  FP8, whose target is bigger than its source, it reads the source and writes as many bytes as the target has.
- Raw copies and conversions alternate; the medians count. Before each the source is read once, so that it lies in the page
  cache, and `os.sync` leaves nothing to write back. What they wrote is deleted afterwards, not on the clock.
- Peak memory comes from one more conversion, which is watched (`measure.tree_bytes`).
- *read amplification*: what the conversion got from read(2), less what `weightbeam plan` on the same model got (the interpreter,
  the libraries and the headers), by the bytes of the tensors.
- *shuffled*: the descriptors of all units, by the bytes of the tensors.

Run it on a machine that has nothing else to do. It needs 11 GB of disk.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.measure import WEIGHTBEAM, Figure, report, run
from formats.safetensors import open_checkpoint
from transforms.conversion import Conversion, Options, prepare

MESH = "fsdp=16"
BLOCK = 16 << 20  # bytes of one read of the raw copy
START_SECONDS = 3.0
TIMES_RAW = {"llama": 1.25, "moe": 1.25, "fp8": 2.0}  # the limit of a conversion: START_SECONDS + this × the raw copy
MAX_PEAK_BYTES = 3 << 29  # 1.5 GiB
MAX_READ_AMPLIFICATION = 1.02
MAX_SHUFFLED = 0.001  # of the model's bytes


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
    """Reads files and writes `target_bytes` to as many new ones, one thread, block by block; returns the seconds it took.

    Each block that was read is followed by its share of `target_bytes`: itself if there are as many bytes to write as to read.
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


def measure(kind: str, folder: Path, layers: int, rounds: int) -> tuple[list[Figure], dict[str, Any]]:
    """The figures of one model, and every single round."""
    source, output, copy = make_source(kind, folder, layers), folder / "converted", folder / "copied"
    conversion = prepare(Options(mesh=(MESH,)), open_checkpoint(source))
    files = [Path(shard.path) for shard in conversion.checkpoint.shards]
    file_bytes = sum(path.stat().st_size for path in files)
    raw_bytes = conversion.target_bytes if kind == "fp8" else file_bytes
    command = (WEIGHTBEAM, "convert", "--source", source, "--mesh", MESH, "--output", output)
    for old in (output, copy):  # of a run that was stopped
        shutil.rmtree(old, ignore_errors=True)

    raw, converted = [], []
    for number in range(1, rounds + 1):
        warm(files)
        raw.append(raw_copy(files, copy, raw_bytes))
        shutil.rmtree(copy)
        warm(files)
        converted.append(run(*command))
        shutil.rmtree(output)
        tell(kind, f"round {number} of {rounds}: raw copy {raw[-1]:.2f} s, convert {converted[-1].seconds:.2f} s")
    warm(files)
    watched = run(*command, watch=True)
    shutil.rmtree(output)
    # With an option of Beam's, `plan` imports Beam too.
    start_up = run(WEIGHTBEAM, "plan", "--source", source, "--mesh", MESH, "--direct_running_mode=multi_threading")

    raw_seconds = statistics.median(raw)
    read_bytes = statistics.median(one.read_bytes for one in converted) - start_up.read_bytes
    factor, because = TIMES_RAW[kind], f"{START_SECONDS:g} s + {TIMES_RAW[kind]:g} × raw copy"
    figures = [
        Figure("raw copy", kind, raw_seconds, "s"),
        Figure("convert", kind, statistics.median(one.seconds for one in converted), "s", START_SECONDS + factor * raw_seconds, because),
        Figure("convert, CPU", kind, statistics.median(one.cpu_seconds for one in converted), "s"),
        Figure("convert, peak memory", kind, watched.peak_bytes, "bytes", MAX_PEAK_BYTES),
        Figure("read amplification", kind, read_bytes / conversion.source_bytes, "", MAX_READ_AMPLIFICATION),
        Figure("shuffled ÷ model", kind, shuffled_bytes(conversion) / conversion.source_bytes, "", MAX_SHUFFLED),
    ]
    details = {
        "source_bytes": conversion.source_bytes,
        "target_bytes": conversion.target_bytes,
        "raw_copy_bytes": {"read": file_bytes, "written": raw_bytes},
        "units": len(conversion.units),
        "raw_copy_seconds": raw,
        "convert_seconds": [one.seconds for one in converted],
        "convert_read_bytes": [one.read_bytes for one in converted],
        "start_up_read_bytes": start_up.read_bytes,
        "watched_seconds": watched.seconds,
    }
    return figures, details


def shuffled_bytes(conversion: Conversion) -> int:
    """Bytes of the descriptors that cross the shuffle before the work; after it only the units' numbers do."""
    return sum(len(conversion.expand(unit).pack()) for unit in range(len(conversion.units)))


def tell(kind: str, text: str) -> None:
    """What happens now, on stderr."""
    print(f"{kind}: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Measures all models and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("out/bench"), help="where checkpoints and copies go; all on one disk")
    parser.add_argument("--layers", type=int, default=8, help="of each model; 8 make about 2 GB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and every round as JSON too")
    args = parser.parse_args()
    figures, details = [], {"layers": args.layers, "rounds": args.rounds}
    for kind in models.MODELS:
        more, details[kind] = measure(kind, args.folder, args.layers, args.rounds)
        figures += more
    report(figures, details, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
