"""Copies to compare with: what the benchmarks of conversions, exports and reshards share."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, of_runs
from benchmarks.measure import BLOCK, WEIGHTBEAM, Run, medians_of, run_fresh, seconds_of, take_turns, warm

START_SECONDS, TIMES_RAW = 2.0, 1.25  # the limit: START_SECONDS + this × the raw copy


def raw_copy(files: Sequence[Path], folder: Path, target_bytes: int, threads: int = 1, piece: int | None = None) -> Run:
    """Reads files from the page cache and writes `target_bytes` to new ones, block by block, with an fsync for each.
    What it wrote is deleted, not on the clock.

    Each block that was read is followed by its share of `target_bytes`: itself if there are as many bytes to write as
    to read.

    Args:
      files, folder: what is read, and where it is written.
      target_bytes: to write.
      threads: how many do so.
      piece: bytes that are read for one new file; None for a whole file.
    """
    shutil.rmtree(folder, ignore_errors=True)
    warm(files)
    folder.mkdir(parents=True)
    sizes = {path: path.stat().st_size for path in files}
    share = target_bytes / sum(sizes.values())
    piece = piece or max(sizes.values())
    pieces = iter([(path, at, min(piece, n - at)) for path, n in sizes.items() for at in range(0, n, piece)])

    def copy(thread: int) -> None:
        buffer = memoryview(bytearray(BLOCK))
        for number, (path, at, nbytes) in enumerate(pieces):  # all threads take from the same
            copied = folder / f"{thread}-{number}"
            with open(path, "rb", buffering=0) as source, open(copied, "wb", buffering=0) as target:
                source.seek(at)
                read = written = 0
                while read < nbytes and (n := source.readinto(buffer[: nbytes - read])):
                    read += n
                    while (due := round(read * share) - written) > 0:
                        written += target.write(buffer[: min(n, due)])
                os.fsync(target.fileno())

    start = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(copy, range(threads)))
    taken = Run(time.monotonic() - start)
    shutil.rmtree(folder)
    return taken


parallel_copy = partial(raw_copy, threads=4, piece=64 << 20)


def against_copy(
    kind: str, checkpoint: Path, command: Sequence[str | Path], output: Path, rounds: int, limit: bool = True
) -> tuple[list[Figure], dict[str, Any]]:
    """The figures of a command, and every single round; the medians count. What it wrote last stays.

    Before each the checkpoint's files are read once, so that they lie in the page cache. The peak memory comes from one
    more run, which is watched.

    Args:
      kind: of the checkpoint.
      checkpoint: the folder whose files the raw copy reads.
      command: of weightbeam, with its arguments.
      output: what the command writes.
      rounds: how often each is run.
      limit: whether the seconds have a limit.
    """
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.stat().st_size]
    nbytes = sum(path.stat().st_size for path in files)
    name = str(command[0])
    run_once = partial(run_fresh, output, WEIGHTBEAM, *command, files=files, keep=True)
    copy_once = partial(raw_copy, files, output.with_name("copied"), nbytes)
    taken = take_turns(kind, rounds, {"raw copy": copy_once, name: run_once})
    copied = medians_of(taken)["raw copy"]
    most = (START_SECONDS + TIMES_RAW * copied, f"{START_SECONDS:.0f} s + {TIMES_RAW} × raw copy") if limit else ()
    figures = of_runs(name, kind, taken[name], run_once(watch=True), *most)
    return [Figure(f"{name}, raw copy", kind, copied, "s"), *figures], {"bytes": nbytes, "seconds": seconds_of(taken)}
