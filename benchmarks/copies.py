"""What the benchmarks of exports and of reshards share: a command and a raw copy of its checkpoint's files take turns."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench import MAX_PEAK_BYTES, raw_copy, tell, warm
from benchmarks.figures import Figure
from benchmarks.measure import WEIGHTBEAM, Run, run

START_SECONDS, TIMES_RAW = 2.0, 1.25  # the limit: START_SECONDS + this × the raw copy


def take_turns(
    kind: str,
    checkpoint: Path,
    command: str,
    arguments: Sequence[str | Path],
    output: Path,
    rounds: int,
    limit: bool = True,
) -> tuple[list[Figure], dict[str, Any]]:
    """The figures of a command, and every single round; the medians count. What it wrote last stays.

    Before each the checkpoint's files are read once, so that they lie in the page cache. The peak memory comes from one
    more run, which is watched.

    Args:
      kind: of the checkpoint.
      checkpoint: the folder whose files the raw copy reads.
      command, arguments: of weightbeam.
      output: what the command writes.
      rounds: how often each is run.
      limit: whether the seconds have a limit.
    """
    copy = output.with_name("copied")
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.stat().st_size]
    nbytes = sum(path.stat().st_size for path in files)

    def once(watch: bool = False) -> Run:
        warm(files)
        shutil.rmtree(output, ignore_errors=True)
        return run(WEIGHTBEAM, command, *arguments, watch=watch)

    raw, taken = [], []
    for number in range(1, rounds + 1):
        warm(files)
        shutil.rmtree(copy, ignore_errors=True)
        raw.append(raw_copy(files, copy, nbytes))
        shutil.rmtree(copy)
        taken.append(once())
        tell(kind, f"round {number} of {rounds}: raw copy {raw[-1]:.2f} s, {command} {taken[-1].seconds:.2f} s")
    watched = once(watch=True)
    copied = statistics.median(raw)
    most = (START_SECONDS + TIMES_RAW * copied, f"{START_SECONDS:.0f} s + {TIMES_RAW} × raw copy") if limit else ()
    figures = [
        Figure(f"{command}, raw copy", kind, copied, "s"),
        Figure(command, kind, statistics.median(one.seconds for one in taken), "s", *most),
        Figure(f"{command}, CPU", kind, statistics.median(one.cpu_seconds for one in taken), "s"),
        Figure(f"{command}, peak memory", kind, watched.peak_bytes, "bytes", MAX_PEAK_BYTES),
    ]
    return figures, {"bytes": nbytes, "raw_copy_seconds": raw, f"{command}_seconds": [one.seconds for one in taken]}
