"""Commands in processes of their own, forked from one that has imported Beam and our commands already, which takes a
fresh one two to five seconds.

    ran = warm.run("convert", source, output, env={"HF_ENDPOINT": url})     # as subprocess.run
    process = warm.start("watch", "--config", file)                         # as subprocess.Popen

The process that forks is Python's own fork server, one for each process of the tests. It has imported nothing that takes
from the environment what tests set (huggingface_hub), nor run any of our code, so that a command meets its folder and
environment as in a fresh interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing import forkserver, reduction
from pathlib import Path
from typing import IO, Any, NamedTuple

COMMANDS = Path(__file__).resolve().parent.parent / "pipelines" / "commands"
PRELOADED = [
    *("apache_beam", "apache_beam.runners.portability.fn_api_runner.fn_runner", "apache_beam.utils.profiler"),
    *("google.cloud.storage", "google_crc32c", "numpy", "sortedcontainers", "tensorstore", "xxhash", "warm"),
    *("anyio.to_thread", "filelock", "httpx2", "matplotlib.backends.backend_agg", "matplotlib.figure"),
    *(f"weightbeam.pipelines.commands.{file.stem}" for file in COMMANDS.glob("[a-z]*.py")),
    *(f"weightbeam.pipelines.watching.{name}" for name in ("isolation", "records")),
]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(PRELOADED)


class _Descriptor:
    """An open file that goes along to the forked process."""

    def __init__(self, file: IO | int):
        self._number = file if isinstance(file, int) else file.fileno()

    def __reduce__(self) -> tuple:
        return _received, (reduction.DupFd(self._number),)


def _received(sent: Any) -> int:
    return sent.detach()


class Process:
    """A process that was forked: what tests use of `subprocess.Popen`."""

    def __init__(self, process: Any, out: IO[bytes], err: IO[bytes]):
        self._process, self._out, self._err = process, out, err
        self.pid: int = process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, negative for a signal's; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end; returns its exit status."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for its end; returns what it printed, which may be asked again."""
        self.wait(timeout)
        for file in (self._out, self._err):
            file.seek(0)
        return self._out.read().decode(), self._err.read().decode()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()


def _begin(files: tuple[int, int, int], folder: str, environment: Mapping[str, str], limits: Mapping[int, int]) -> None:
    """What comes first in a forked process: its files, folder, environment and session are its own."""
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1 if os.isatty(1) else -1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # where a watcher's process began the server
    for kind, most in limits.items():
        resource.setrlimit(kind, (most, most))


class Signal(NamedTuple):
    """What a process sends itself before it makes the next file whose path matches, once it has made `files` of them."""

    number: int
    files: int
    path: str  # a regular expression of the whole path

    def arm(self) -> None:
        """Counts the files that are made whole, by a rename or a link."""
        made: set[str] = set()

        def hook(event: str, arguments: tuple) -> None:
            if event in ("os.rename", "os.link") and re.fullmatch(self.path, path := os.fsdecode(arguments[1])):
                if len(made) == self.files:
                    os.kill(os.getpid(), self.number)
                made.add(path)

        sys.addaudithook(hook)


def _command(
    files: tuple[int, int, int],
    folder: str,
    environment: Mapping[str, str],
    words: list[str],
    limits: Mapping[int, int],
    stop: Signal | None,
    spawns: bool,
) -> None:
    """`weightbeam WORDS`, to its end."""
    _begin(files, folder, environment, limits)
    if stop:
        stop.arm()
    sys.argv = ["weightbeam", *words]
    from weightbeam.pipelines.entry import run

    if words[:1] == ["watch"] and not spawns:
        from weightbeam.pipelines.watching import isolation

        # Its processes are forked of the same server: one of its own would import everything again.
        vars(forkserver._forkserver)["ensure_running"] = lambda: None
        vars(isolation)["CONTEXT"] = Context

    try:
        run()
    finally:
        atexit._run_exitfuncs()  # the first of them ends the process, as at the end of an interpreter


def _go_on(folder: str, environment: Mapping[str, str], target: Callable[..., None], arguments: tuple) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    target(*arguments)


class Context:
    """What a watcher uses of `multiprocessing`'s context to begin its processes, with forked ones."""

    Pipe = staticmethod(_CONTEXT.Pipe)

    @staticmethod
    def Process(target: Callable[..., None], args: tuple) -> Any:  # noqa: N802, as multiprocessing has it
        return _CONTEXT.Process(target=_go_on, args=(str(Path.cwd()), dict(os.environ), target, args))


def start(
    *words: object,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    stdin: IO | int | None = None,
    stdout: IO | int | None = None,
    stderr: IO | int | None = None,
    limits: Mapping[int, int] | None = None,
    stop: Signal | None = None,
    spawns: bool = False,
) -> Process:
    """Starts `weightbeam WORDS` in a session of its own.

    Args:
      words: the command's name, its options.
      env: all of its environment, by default this process's.
      cwd: its folder, by default this process's.
      stdin: a file; nothing by default.
      stdout: a file, by default one that `communicate` reads; `stderr` likewise.
      limits: the most that it may have, by the numbers of the module `resource`.
      stop: a signal that it sends itself on the way.
      spawns: whether a watcher's processes are its children, as they are in use; they then import everything anew.
    """
    out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
    with open(os.devnull) as nothing:
        files = tuple(
            _Descriptor(given if given is not None else file)
            for given, file in ((stdin, nothing), (stdout, out), (stderr, err))
        )
        environment = dict(os.environ if env is None else env)
        where = str(cwd or Path.cwd())
        process = _CONTEXT.Process(
            target=_command, args=(files, where, environment, list(map(str, words)), limits or {}, stop, spawns)
        )
        process.start()
    return Process(process, out, err)


def run(
    *words: object, status: int | None = None, timeout: float = 120, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """Runs `weightbeam WORDS` to its end; what it printed, and its exit status, which must be `status` where one is
    given. See `start`.
    """
    with start(*words, **settings) as process:
        out, err = process.communicate(timeout)
    assert process.returncode is not None
    assert status in (None, process.returncode), f"{process.returncode}: {out}{err}"
    return subprocess.CompletedProcess(["weightbeam", *map(str, words)], process.returncode, out, err)
