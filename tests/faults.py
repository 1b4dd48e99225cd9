"""Conversions to which something happens: each in a forked process, at a chosen call of a chosen stage, and what must
hold afterwards.

    python tests/faults.py < jobs.json

runs jobs one after the other: `[{"arguments": [...], "fault": {...}, "printed": file}, ...]`; prints a line of JSON for
each.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import warm
from hostile import snapshot
from processes import run
from support import HERE, call

STAGES = {  # stage -> the module and the name of the function that does it
    "reading": ("weightbeam.transforms.execution.boxes", "read"),
    "writing": ("weightbeam.formats.targets.orbax", "write_unit"),
    "merging": ("weightbeam.formats.orbax.ocdbt", "merge"),
    "publishing": ("weightbeam.formats.staging:FolderStaging", "publish"),
}
EXPORTING = {  # the same of an export
    "unpacking": ("weightbeam.transforms.planning.from_checkpoint", "unpack"),
    "reading a chunk": ("weightbeam.transforms.execution.boxes", "read"),
    "writing rows": ("weightbeam.formats.targets.release", "write_unit"),
    "making whole": ("weightbeam.formats.targets.release:ReleaseTarget", "assemble"),
}
OPTIONS = ["--unit_bytes", "8000", "--mesh", "fsdp=2", "--direct_num_workers=2"]


# --- in the process to which it happens -------------------------------------------------------------------------------


def stop(fault: Mapping[str, Any]) -> Callable[[], None]:
    """Signals this process and what it started, some time from now, or else when what it returns is called: at the
    stage's end.
    """

    def now() -> None:
        os.killpg(0, signal.Signals[fault["signal"]])

    timer = threading.Timer(fault["seconds"], now)
    timer.start()

    def end() -> None:
        timer.cancel()
        now()
        time.sleep(60)  # the signal is meant for the main thread, which isn't this one

    return end


def sleep(fault: Mapping[str, Any]) -> None:
    """Stops this process until someone wakes it."""
    os.kill(os.getpid(), signal.SIGSTOP)


def fill(fault: Mapping[str, Any]) -> None:
    """Takes what is left of the disk."""
    with contextlib.suppress(OSError), open(fault["file"], "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def no_more_writes(fault: Mapping[str, Any]) -> None:
    """Every write behind a file's first 2000 bytes fails from now on; what is printed has place there."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))


def broken_disk(fault: Mapping[str, Any]) -> None:
    """Every read of a shard fails from now on."""

    def preadv(*arguments: Any) -> int:
        raise OSError(5, os.strerror(5))

    os.preadv = preadv


def change_shard(fault: Mapping[str, Any]) -> None:
    """Does something to a shard."""
    path = Path(fault["file"])
    before = path.stat()
    how = fault["change"]
    if how == "touch":
        os.utime(path)
    elif how == "truncate":
        os.truncate(path, before.st_size - 1)
    elif how == "append":
        with path.open("ab") as file:
            file.write(b"\0")
    elif how == "remove":
        path.unlink()
    elif how == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif how in ("replace", "replace, same size and time"):
        other = path.with_suffix(".new")
        other.write_bytes(path.read_bytes()[:-64] + bytes(64))
        if how != "replace":
            os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
        other.rename(path)
    else:
        raise ValueError(how)


KINDS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "sleep": sleep,
    "fill": fill,
    "no more writes": no_more_writes,
    "broken disk": broken_disk,
    "change": change_shard,
}


def prepare(fault: Mapping[str, Any]) -> None:
    """Puts the fault in front of the n-th call of its stage; a stop may come until the call's end."""
    module, name = (STAGES | EXPORTING)[fault["stage"]]
    original = getattr(pkgutil.resolve_name(module), name)
    lock, calls = threading.Lock(), 0

    def faulty(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        with lock:
            calls += 1
            mine = calls == fault.get("call", 1)
        if not mine:
            return original(*arguments, **keywords)
        if fault["kind"] != "stop":
            KINDS[fault["kind"]](fault)
            return original(*arguments, **keywords)
        end = stop(fault)
        try:
            return original(*arguments, **keywords)
        finally:
            end()

    setattr(pkgutil.resolve_name(module), name, faulty)


def fork(job: Mapping[str, Any]) -> int:
    """Starts a job in a session of its own; returns its process."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    printed = os.open(job["printed"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    if job.get("fault"):
        prepare(job["fault"])
    for name, value in job.get("set", {}).items():  # "module.NAME": value
        setattr(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2], value)
    status = 70
    try:
        status = call(*job["arguments"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main(jobs: Collection[Mapping[str, Any]]) -> None:
    """Runs jobs; one with `"zombie"` is left stopped until all others are done, then it goes on."""
    commands = {f"weightbeam.pipelines.commands.{job['arguments'][0]}" for job in jobs}
    for module in (*warm.PRELOADED, "weightbeam.pipelines.running.runners.local", *commands):  # once for all of them
        importlib.import_module(module)
    sleeping: dict[int, Mapping[str, Any]] = {}

    def tell(job: Mapping[str, Any], status: int) -> None:
        message = Path(job["printed"]).read_text(errors="backslashreplace")
        print(json.dumps(dict(status=os.waitstatus_to_exitcode(status), message=message[-4000:])), flush=True)

    for job in jobs:
        child = fork(job)
        status = os.waitpid(child, os.WUNTRACED)[1]
        if os.WIFSTOPPED(status):
            sleeping[child] = job
            print(json.dumps(dict(status="asleep", message="")), flush=True)
        else:
            tell(job, status)
    for child, job in sleeping.items():
        before = snapshot(Path(job["watched"]))
        os.killpg(child, signal.SIGCONT)
        status = os.waitpid(child, 0)[1]
        after = snapshot(Path(job["watched"]))
        print(json.dumps(dict(changed=sorted(set(before.items()) ^ set(after.items())))), flush=True)
        tell(job, status)


# --- in the test ------------------------------------------------------------------------------------------------------


def crowding() -> float:
    """How many times longer than alone a piece of work takes on this machine now, at this process's priority."""
    wall, alone = time.monotonic(), time.process_time()
    while time.process_time() - alone < 0.05:
        sum(range(1000))
    return max(1.0, (time.monotonic() - wall) / (time.process_time() - alone))


def run_jobs(jobs: Sequence[Mapping[str, Any]], timeout: float | None = None) -> list[dict[str, Any]]:
    """Runs jobs in a process that forks each of them; returns what it says.

    Unless said otherwise a job has 60 s of a machine that has nothing else to do, all of them 600 s at least.
    """
    if timeout is None:
        timeout = max(600, 60 * len(jobs)) * crowding()
    environment = os.environ | {"PYTHONPATH": f"{HERE.parent}:{HERE}"}
    script = [sys.executable, HERE / "faults.py"]
    ran = run(*script, input=json.dumps(jobs), timeout=timeout, env=environment, status=0)
    return [json.loads(line) for line in ran.stdout.splitlines()]


def arguments(source: Path, output: Path, *options: str) -> list[str]:
    return ["convert", "--source", str(source), "--output", str(output), *OPTIONS, *options]


def kill(stage: str, name: str, seconds: float, nth: int) -> dict[str, Any]:
    """A signal, so many seconds into the n-th call of a stage."""
    return dict(kind="stop", stage=stage, signal=name, seconds=seconds, call=nth)


def is_published(output: Path) -> bool:
    return (output / "0" / "commit_success.txt").exists()


if __name__ == "__main__":
    main(json.load(sys.stdin))
