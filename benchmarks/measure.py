"""What the benchmarks share: a command's seconds, memory, reads and flushes, over its whole process tree; and the
machine.

Linux only: the counts come from /proc.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

POLL_SECONDS = 0.02
BLOCK = 16 << 20  # bytes that are read or written at once
WEIGHTBEAM = Path(sys.executable).with_name("weightbeam")  # the command as a user starts it


@dataclasses.dataclass(frozen=True)
class Run:
    """What a command took; 0 for what wasn't measured.

    Attributes:
      seconds: wall, from before its process is made until that has ended: start-up is inside.
      cpu_seconds: user and system, of all its threads and of the processes it waited for.
      read_bytes: what it and those processes got from read(2) and its kin, from the disk or from the page cache
        (`rchar` of /proc/<pid>/io). The interpreter's own files count too; files mapped into memory don't.
      peak_bytes: the greatest memory of the process tree, if it was watched.
    """

    seconds: float
    cpu_seconds: float = 0.0
    read_bytes: int = 0
    peak_bytes: int = 0


Taken = Run | dict[str, Any]  # of a command, or what a process tells of itself (`ask`)
T = TypeVar("T", bound=Taken)


def take_turns(kind: str, rounds: int, ways: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """What each way takes in each round, one after the other: what else the machine does changes them alike."""
    taken = {way: list[T]() for way in ways}
    for number in range(1, rounds + 1):
        for way, once in ways.items():
            taken[way].append(once())
        last = ", ".join(f"{way} {each[-1]:.2f} s" for way, each in seconds_of(taken).items())
        tell(kind, f"round {number} of {rounds}: {last}")
    return taken


def seconds_of(taken: Mapping[str, Sequence[Taken]]) -> dict[str, list[float]]:
    """The seconds of every round, by way."""
    return {
        way: [one.seconds if isinstance(one, Run) else one["seconds"] for one in each] for way, each in taken.items()
    }


def medians_of(taken: Mapping[str, Sequence[Taken]]) -> dict[str, float]:
    """The median of the seconds, by way."""
    return {way: statistics.median(each) for way, each in seconds_of(taken).items()}


def run(*command: str | Path, watch: bool = False, every: float = POLL_SECONDS) -> Run:
    """Runs a command to its end.

    Args:
      command: the program and its arguments.
      watch: poll the memory of its process tree. That disturbs it a little, so seconds are taken from runs without.
      every: seconds between two looks.

    Raises:
      RuntimeError: its exit status isn't 0; the message has the end of what it printed.
    """
    with tempfile.TemporaryFile() as output:
        start = time.monotonic()
        process = subprocess.Popen([str(part) for part in command], stdout=output, stderr=subprocess.STDOUT)
        peak = _watch(process.pid, every) if watch else 0
        # it has ended, but /proc keeps its counts until wait4
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        seconds = time.monotonic() - start
        read_bytes = io_counts(process.pid)["rchar"]
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise RuntimeError(
                f"{process.args} ended with {process.returncode}:\n{output.read().decode(errors='replace')[-4000:]}"
            )
    return Run(seconds, usage.ru_utime + usage.ru_stime, read_bytes, peak)


def run_fresh(
    output: Path, *command: str | Path, files: Sequence[Path] = (), watch: bool = False, keep: bool = False
) -> Run:
    """`run` of a command that writes `output`.

    Args:
      output: what is there is deleted before, and afterwards unless `keep`.
      command: the program and its arguments.
      files: what it reads, brought into the page cache before.
      watch: as of `run`.
      keep: leave what it wrote.
    """
    shutil.rmtree(output, ignore_errors=True)
    if files:
        warm(files)
    taken = run(*command, watch=watch)
    if not keep:
        shutil.rmtree(output)
    return taken


def ask(module: str, *arguments: object, said: object = None) -> Any:
    """What a process of a benchmark's module tells: the JSON in the last line that it prints.

    Args:
      module, arguments: of the process.
      said: what it gets on stdin, as JSON.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, input=json.dumps(said), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def warm(files: Sequence[Path]) -> None:
    """Brings files into the page cache, and everything that is to be written to the disk."""
    buffer = bytearray(BLOCK)
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    os.sync()


def tell(kind: str, text: str) -> None:
    """What happens now, on stderr."""
    print(f"{kind}: {text}", file=sys.stderr, flush=True)


def _watch(pid: int, every: float) -> int:
    """The greatest memory of a process tree until its root ends."""
    root, peak = psutil.Process(pid), 0
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        peak = max(peak, tree_bytes(root))
        time.sleep(every)
    return peak


def tree_bytes(root: psutil.Process) -> int:
    """The memory of a process and all its descendants.

    Of a lone process its RSS. Of several the sum of their PSS, where a page that n processes share counts 1/n in each:
    the sum of RSS counts it n times. Not so for a lone process, whose PSS would leave out what it shares with processes
    of others.
    """
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile; what was counted stays
        processes = [root, *root.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss if len(processes) == 1 else _pss(process)
    return total


def _pss(process: psutil.Process) -> int:
    try:
        return process.memory_full_info().pss
    except psutil.AccessDenied:
        return process.memory_info().rss


def io_counts(pid: int | str = "self") -> dict[str, int]:
    """/proc/<pid>/io: the process with all its threads, and its descendants that were waited for."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def memory_bytes(field: str) -> int:
    """The memory of this process: now (`VmRSS`), or the greatest so far (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def count_flushes(output: Path, *command: str | Path) -> int | None:
    """How often a command that writes `output` and its descendants flush a file or a folder to the disk (fsync,
    fdatasync and their kin); None where there is no strace.
    """
    if not shutil.which("strace"):
        return None
    with tempfile.NamedTemporaryFile("r") as calls:
        tracing = ("--follow-forks", "--quiet=all", "--trace=fsync,fdatasync,sync,syncfs,msync", "--output", calls.name)
        run_fresh(output, "strace", *tracing, *command)
        return sum("sync(" in line or "syncfs(" in line for line in calls if "resumed" not in line)


def machine() -> dict[str, Any]:
    """Where, when and with what the figures were taken."""
    installed = {distribution.name.lower(): distribution.version for distribution in importlib.metadata.distributions()}
    versions = {
        name: installed[name]
        for name in ("weightbeam", "tensorstore", "apache-beam", "numpy", "jax")
        if name in installed
    }
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version(), **versions},
    }
