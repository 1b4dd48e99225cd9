"""What the benchmarks share: a command's seconds, memory and reads, over its whole process tree; the machine; the table.

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
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

POLL_SECONDS = 0.02
WEIGHTBEAM = Path(sys.executable).with_name("weightbeam")  # the command as a user starts it


@dataclasses.dataclass(frozen=True)
class Run:
    """What a command took.

    Attributes:
      seconds: wall, from before its process is made until that has ended: start-up is inside.
      cpu_seconds: user and system, of all its threads and of the processes it waited for.
      read_bytes: what it and those processes got from read(2) and its kin, from the disk or from the page cache (`rchar` of
        /proc/<pid>/io). The interpreter's own files count too; files mapped into memory don't.
      peak_bytes: the greatest memory of the process tree; 0 if it wasn't watched.
    """

    seconds: float
    cpu_seconds: float
    read_bytes: int
    peak_bytes: int


def run(*command: str | Path, watch: bool = False) -> Run:
    """Runs a command to its end.

    Args:
      command: the program and its arguments.
      watch: poll the memory of its process tree. That disturbs it a little, so seconds are taken from runs without.

    Raises:
      RuntimeError: its exit status isn't 0; the message has the end of what it printed.
    """
    with tempfile.TemporaryFile() as output:
        start = time.monotonic()
        process = subprocess.Popen([str(part) for part in command], stdout=output, stderr=subprocess.STDOUT)
        peak = _watch(process.pid) if watch else 0
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, but /proc keeps its counts until wait4
        seconds = time.monotonic() - start
        read_bytes = _counts(process.pid)["rchar"]
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise RuntimeError(f"{process.args} ended with {process.returncode}:\n{output.read().decode(errors='replace')[-4000:]}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, read_bytes, peak)


def _watch(pid: int) -> int:
    """The greatest memory of a process tree until its root ends, polled every `POLL_SECONDS`."""
    root, peak = psutil.Process(pid), 0
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        peak = max(peak, tree_bytes(root))
        time.sleep(POLL_SECONDS)
    return peak


def tree_bytes(root: psutil.Process) -> int:
    """The memory of a process and all its descendants.

    Of a lone process its RSS. Of several the sum of their PSS, where a page that n processes share counts 1/n in each: the sum
    of RSS counts it n times. Not so for a lone process, whose PSS would leave out what it shares with processes of others.
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


def _counts(pid: int) -> dict[str, int]:
    """/proc/<pid>/io: the process with all its threads, and its descendants that were waited for."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def machine() -> dict[str, Any]:
    """Where, when and with what the figures were taken."""
    versions = {name: importlib.metadata.version(name) for name in ("weightbeam", "tensorstore", "apache-beam", "numpy")}
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version(), **versions},
    }


@dataclasses.dataclass(frozen=True)
class Figure:
    """A line of the table.

    Attributes:
      what, model: what was measured, and on what.
      ours: the value.
      unit: of the value and the limit: `s`, `bytes`, or empty for ratios and counts.
      limit: what `ours` may be at most; None for what is only told.
      because: how the limit comes about, where it isn't fixed.
    """

    what: str
    model: str
    ours: float
    unit: str = ""
    limit: float | None = None
    because: str = ""

    @property
    def ratio(self) -> float | None:
        """`ours` in terms of the limit; at most 1 if it is met."""
        return None if self.limit is None else self.ours / self.limit

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "ratio": self.ratio, "met": None if self.ratio is None else self.ratio <= 1}


def _text(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value:.2f} s"
    if unit == "bytes":
        return f"{value / 2**30:.2f} GiB"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if value < 0.1 else f"{value:.3f}"


def report(figures: Sequence[Figure], details: Mapping[str, Any], json_file: Path | None) -> None:
    """Prints the table and the machine's line; writes them and the `details` as JSON if asked."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("what", "model", "ours", "limit", "ratio", ""):
        table.add_column(column, justify="right" if column in ("ours", "ratio") else "left", no_wrap=True)
    for figure in figures:
        ratio = figure.ratio
        limit = "" if figure.limit is None else " = ".join(filter(None, (_text(figure.limit, figure.unit), figure.because)))
        verdict = ("", "") if ratio is None else (f"{ratio:.2f}", "met" if ratio <= 1 else "[bold red]NOT MET[/]")
        table.add_row(figure.what, figure.model, _text(figure.ours, figure.unit), limit, *verdict)
    console = Console(highlight=False, width=None if os.isatty(1) else 160)
    console.print(table)
    here = machine()
    versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items())
    console.print(f"\n{here['cores']} cores, {here['memory_bytes'] / 2**30:.0f} GiB, {here['date']}, {versions}")
    if json_file:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        held = json.loads(json_file.read_text()) if json_file.exists() else {}  # other benchmarks' figures stay
        made = {"machine": here, "figures": [figure.as_json() for figure in figures], "details": details}
        json_file.write_text(json.dumps(held | made, indent=1))
