"""A lease on an output: one conversion at a time.

A symbolic link beside the staging folder, whose target is the owner: the one kind of file that is made with its content in
one step, or not at all. The owner renews its time of change. Whoever finds it refuses to start, unless it is stale: not
renewed for `STALE` seconds, or its owner was a process of this machine that is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from formats.storage import StorageError

HEARTBEAT, STALE = 10.0, 60.0  # seconds


class HeldError(StorageError):
    """Another conversion has the lease."""


@contextlib.contextmanager
def hold(path: Path) -> Iterator[None]:
    """Holds the lease at `path` while it is entered.

    Raises:
      HeldError: another owner holds it.
    """
    me = {"owner": uuid.uuid4().hex, "host": socket.gethostname(), "boot": _boot(), "pid": os.getpid(), "process": _started(os.getpid())}
    while not _create(path, me):
        _take_away_if_stale(path)
    for left in path.parent.glob(f"{path.name}.*"):  # of a process that was killed while it took a lease away
        left.unlink(missing_ok=True)
    stop = threading.Event()
    thread = threading.Thread(target=_renew, args=(path, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        if _read(path) == me:
            path.unlink()


def _create(path: Path, owner: dict[str, Any]) -> bool:
    try:
        os.symlink(json.dumps(owner), path)
    except FileExistsError:
        return False
    return True


def _renew(path: Path, stop: threading.Event) -> None:
    while not stop.wait(HEARTBEAT):
        with contextlib.suppress(OSError):
            os.utime(path, follow_symlinks=False)


def _take_away_if_stale(path: Path) -> None:
    """Removes a stale lease; exactly the one that was found stale, whoever else does the same at the same time."""
    try:
        found, age = _read(path), time.time() - path.lstat().st_mtime
    except FileNotFoundError:
        return
    if age < STALE and not _is_gone(found):
        where = f"process {found.get('pid')} on {found.get('host')}"
        raise HeldError(f"another conversion ({where}) is at work there, renewed {age:.0f} s ago; if it is gone, wait {STALE - age:.0f} s")
    taken = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, taken)
        if _read(taken) != found:  # someone was faster, and this is his
            _create(path, _read(taken))
        taken.unlink()


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(os.readlink(path))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_gone(owner: dict[str, Any]) -> bool:
    """Whether the owner was a process of this machine, and isn't any more."""
    if owner.get("host") != socket.gethostname():
        return False
    return owner.get("boot") != _boot() or _started(owner.get("pid", 0)) != owner.get("process")


def _boot() -> str:
    """Identifies this run of the machine; empty where the system doesn't say."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _started(pid: int) -> str:
    """When a process was started, so that another one with its number isn't taken for it; empty if there is none."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "unknown"
