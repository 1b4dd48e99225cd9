"""A lease: one conversion at a time.

A file whose content is its owner, made in one step or not at all, and renewed by the owner as long as it lives. Whoever finds
it refuses to start, unless it is stale: not renewed for `STALE` seconds, or its owner was a process that could be seen from here and is gone.
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
from typing import TYPE_CHECKING, Any, Protocol

from weightbeam.formats.storage import LocalFolder, StorageError, Store

if TYPE_CHECKING:
    from weightbeam.formats.storage.bucket import Bucket

HEARTBEAT, STALE = 10.0, 60.0  # seconds

Owner = dict[str, Any]


class HeldError(StorageError):
    """Another conversion has the lease."""


@contextlib.contextmanager
def hold(store: Store, name: str) -> Iterator[None]:
    """Holds the lease `name` in a store while it is entered.

    Raises:
      HeldError: another owner holds it.
    """
    me = {"owner": uuid.uuid4().hex, "host": socket.gethostname(), "processes": _processes(), "pid": os.getpid(), "process": _started(os.getpid())}
    lease = _lease(store, name)
    while not lease.create(me):
        _take_away_if_stale(lease)
    lease.clean()
    stop = threading.Event()
    thread = threading.Thread(target=_renew, args=(lease, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        with contextlib.suppress(OSError):  # what was done under it is done; it goes stale by itself
            lease.release()


def _lease(store: Any, name: str) -> _Lease:
    return _Link(Path(store.path(name))) if isinstance(store, LocalFolder) else _Object(store, name)


def _renew(lease: _Lease, stop: threading.Event) -> None:
    while not stop.wait(HEARTBEAT):
        with contextlib.suppress(OSError):
            lease.renew()


def _take_away_if_stale(lease: _Lease) -> None:
    try:
        found, age = lease.find()
    except FileNotFoundError:
        return
    if age < STALE and not _is_gone(found):
        where = f"process {found.get('pid')} on {found.get('host')}"
        raise HeldError(f"another conversion ({where}) is at work there, renewed {age:.0f} s ago; if it is gone, wait {STALE - age:.0f} s")
    lease.take_away(found)


class _Lease(Protocol):
    def create(self, owner: Owner) -> bool:
        """Makes it, if there is none."""
        ...

    def find(self) -> tuple[Owner, float]:
        """Its owner, and the seconds since it was renewed. Raises FileNotFoundError if there is none."""
        ...

    def renew(self) -> None:
        """Says that its maker lives, if it is still this maker's."""
        ...

    def take_away(self, found: Owner) -> None:
        """Removes exactly the one that was found last, whoever else does the same at the same time."""
        ...

    def release(self) -> None:
        """Removes it if it is still its maker's."""
        ...

    def clean(self) -> None:
        """Removes what a process left that was killed while it took a lease away."""
        ...


class _Link:
    """A symbolic link whose target is the owner: the one kind of file that is made with its content in one step."""

    def __init__(self, path: Path):
        self.path = path
        self.owner: Owner = {}

    def create(self, owner: Owner) -> bool:
        self.owner = owner
        try:
            os.symlink(json.dumps(owner), self.path)
        except FileExistsError:
            return False
        return True

    def find(self) -> tuple[Owner, float]:
        return _read(self.path), time.time() - self.path.lstat().st_mtime

    def renew(self) -> None:
        if _read(self.path) == self.owner:
            os.utime(self.path, follow_symlinks=False)

    def take_away(self, found: Owner) -> None:
        taken = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex[:8]}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, taken)
            if (other := _read(taken)) != found:  # someone was faster, and this is his
                self.create(other)
            taken.unlink()

    def release(self) -> None:
        if _read(self.path) == self.owner:
            self.path.unlink()

    def clean(self) -> None:
        for left in self.path.parent.glob(f"{self.path.name}.*"):
            left.unlink(missing_ok=True)


def _read(path: Path) -> Owner:
    try:
        found = json.loads(os.readlink(path))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class _Object:
    """An object of a bucket; its generation says whether it is still the one that was found."""

    def __init__(self, store: Bucket, name: str):
        self.store, self.name = store, name
        self.owner: Owner = {}
        self.version = ""

    def create(self, owner: Owner) -> bool:
        self.owner, self.version = owner, self.store.replace(self.name, json.dumps(owner).encode(), None) or ""
        return bool(self.version)

    def find(self) -> tuple[Owner, float]:
        found = self.store.stat(self.name)
        if found is None:
            raise FileNotFoundError(self.name)
        self.version = found.version
        try:
            owner = json.loads(self.store.read(self.name))
        except ValueError:
            owner = {}
        return owner, self.store.now() - found.updated  # both by the bucket's clock: this machine's may be wrong

    def renew(self) -> None:
        if self.version:  # else someone took it away
            self.version = self.store.replace(self.name, json.dumps(self.owner).encode(), self.version) or ""

    def take_away(self, found: Owner) -> None:
        self.store.delete(self.name, self.version)

    def release(self) -> None:
        if self.version:
            self.store.delete(self.name, self.version)

    def clean(self) -> None:
        pass


def _is_gone(owner: Owner) -> bool:
    """Whether the owner was a process that could be seen from here, and isn't any more."""
    if (owner.get("host"), owner.get("processes")) != (socket.gethostname(), _processes()):
        return False
    return _started(owner.get("pid", 0)) != owner.get("process")


def _processes() -> str:
    """Identifies the processes that can be seen from here: this run of the machine, and this container; empty where the system doesn't say.

    Containers may have the same host name, and see only their own processes.
    """
    with contextlib.suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _started(pid: int) -> str:
    """When a process was started, so that another one with its number isn't taken for it; empty if there is none, or it is dead."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in ("Z", "X") else fields[19]  # dead, and nobody has taken notice yet
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "unknown"
