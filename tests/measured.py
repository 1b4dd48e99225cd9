"""Runs `weightbeam` in processes with bounded time and memory, and says what each took.

    python tests/measured.py < jobs

takes a line of JSON for each job, `[[argument, …], file for what is printed]`, and answers with a line. It imports
nothing but Weightbeam: the memory of a forked process counts what the one that it was forked from had, and a test's has
torch and JAX.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from weightbeam.pipelines.cli import main

# of one command; the processor's time, and memory above that of a process that has imported everything
SECONDS, MEMORY = 60, 2 << 30
Measure = Callable[[Sequence[object], Path], dict[str, Any]]


def call(*arguments: object) -> int:
    """Runs `weightbeam` in this process; returns its exit status, argparse's too."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as e:
        return int(e.code or 0)


def measure(command: Sequence[object], output: Path) -> dict[str, Any]:
    """Runs `weightbeam` in a forked process; what it printed goes to a file."""
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        signal.alarm(3 * SECONDS)
        printed = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        status = 70
        try:
            status = call(*command)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    _, status, usage = os.wait4(child, 0)
    message = output.read_text(errors="backslashreplace")
    cpu = usage.ru_utime + usage.ru_stime
    used = dict(seconds=round(time.monotonic() - start, 2), cpu=round(cpu, 2), megabytes=usage.ru_maxrss >> 10)
    return dict(
        status=os.waitstatus_to_exitcode(status), length=len(message), message=message[:3000] + message[-3000:], **used
    )


@contextlib.contextmanager
def measuring() -> Iterator[Measure]:
    """Context manager: `measure` from a process that has imported Weightbeam and nothing else."""
    here = Path(__file__)
    environment = os.environ | {"PYTHONPATH": f"{here.parent.parent}:{here.parent}"}
    with subprocess.Popen(
        [sys.executable, str(here)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(command: Sequence[object], output: Path) -> dict[str, Any]:
            print(json.dumps([list(map(str, command)), str(output)]), file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()


if __name__ == "__main__":
    for module in ("plan", "inspect", "convert", "verify", "export", "reshard", "diff"):
        importlib.import_module(f"weightbeam.pipelines.commands.{module}")  # now, so that the forked processes needn't
    for line in sys.stdin:
        arguments, file = json.loads(line)
        print(json.dumps(measure(arguments, Path(file))), flush=True)
