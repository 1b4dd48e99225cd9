"""Programs that a test starts, waits for, and ends with all their children."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TIMEOUT = 120  # seconds


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return listening.getsockname()[1]


def run(
    *command: object, status: int | None = None, timeout: float = 300, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a command as a process of its own to its end, and keeps what it prints.

    Args:
      status: the exit status that it must have, or any.
      timeout: in seconds.
      settings: of `subprocess.run`; `env` is all of its environment.
    """
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    ran = subprocess.run(list(map(str, command)), text=True, timeout=timeout, check=False, **pipes | settings)
    assert status in (None, ran.returncode), f"{ran.returncode}: {ran.stdout}{ran.stderr}"
    return ran


def read_so_far() -> int:
    """What this process has asked the system to read, in bytes."""
    return int(Path("/proc/self/io").read_text().split()[1])


@contextmanager
def running(log: Path, *command: object, environment: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen]:
    """A process and its children, until the end of the block; what they say is in `log`, beside which they run."""
    ours = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
    }
    with log.open("w") as out:
        settings = os.environ | ours | (environment or {})
        process = subprocess.Popen(
            [str(part) for part in command],
            stdout=out,
            stderr=out,
            cwd=log.parent,
            env=settings,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):  # it ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(log: Path, text: str) -> str:
    """Waits until a process has said `text`, a pattern; returns what it matched."""
    wait_until(
        lambda: re.search(text, log.read_text()) is not None,
        lambda: f"{log.name} never said {text}:\n{log.read_text()}",
    )
    found = re.search(text, log.read_text())
    assert found
    return found[0]


def listening(port: int, host: str = "localhost") -> None:
    """Waits until someone listens on a port."""

    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((host, port)) == 0

    wait_until(answers, lambda: f"nobody listens on {host}:{port}")


def wait_until(
    true: Callable[[], object],
    otherwise: Callable[[], str] = lambda: "",
    seconds: float = TIMEOUT,
    every: float = 0.1,
    process: Any = None,
) -> None:
    """Waits until something is true; fails with the words of `otherwise` where it doesn't come true, and with what a
    process has printed where that ends before.
    """
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, otherwise()
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(every)
