"""A lease: one conversion at a time.

A file whose content is its owner, renewed by the owner as long as it lives. Whoever finds it refuses to start, unless
it is stale: not renewed for `STALE` seconds, or its owner was a process that could be seen from here and is gone. Age
is told by the store's clock: a machine whose own is wrong throws nobody out. A lease that was renewed as long in the
future is stale, too: that clock was set back since, and an owner that lives would have renewed it by the new time.

A lease keeps work from being done twice. What is published is safe without it: a process that slept, and lost its
lease, finds that the place which it would publish from isn't its own any more (`formats/staging/`).
"""

from __future__ import annotations

import abc
import contextlib
import errno
import fcntl
import json
import math
import os
import re
import socket
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightbeam.formats.storage import LocalFolder, StorageError, Store, patience
from weightbeam.formats.storage.local import open_file
from weightbeam.formats.storage.uninterrupted import uninterrupted

if TYPE_CHECKING:
    from weightbeam.formats.storage.bucket import Bucket

HEARTBEAT, STALE = 10.0, 60.0  # seconds
BEGIN, MOST_BYTES = b'{"owner": ', 1 << 12  # of a lease
KEYS = {"owner", "host", "pid"}  # that each has, whatever the version that wrote it
LOCK_MARK = b"weightbeam\n"  # what a file that is locked holds
HOW = os.O_CLOEXEC | os.O_NOFOLLOW
PATIENCE = 5.0  # seconds that someone else may take to take, or to release, a lease
HOLDER = re.compile(r" \(process \S+ on [^)]*\)")  # in what says who holds a lease; see `_refuse_if_alive`
# of a file system without locks
UNSUPPORTED = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF}

UNSEEN = "unknown"  # when a process was started that is there

Owner = dict[str, Any]


class HeldError(StorageError):
    """Another conversion has the lease."""


class ForeignError(StorageError):
    """What has the name of a lease isn't one."""

    def __init__(self, path: object):
        super().__init__(f"{path} isn't what its name says, a lease of Weightbeam's; move it away")


@contextlib.contextmanager
def hold(store: Store, name: str) -> Iterator[Lease]:
    """Context manager: holds the lease `name` in a store.

    Raises:
      HeldError: another owner holds it.
      ForeignError: something else has its name, and stays as it is.
    """
    lease, stop, taken = _lease(store, name), threading.Event(), threading.Event()
    thread = threading.Thread(target=_renew, args=(lease, stop), daemon=True)

    def begin() -> None:
        lease.take()
        taken.set()
        thread.start()

    try:
        if isinstance(lease, _FileLease):  # which would stay if a signal came in between
            uninterrupted(begin, lambda _: "", "")
        else:  # a bucket may not answer for minutes
            begin()
        yield lease
    finally:
        if taken.is_set():
            uninterrupted(lambda: _let_go(lease, thread, stop), lambda _: "", "")


def _let_go(lease: Lease, thread: threading.Thread, stop: threading.Event) -> None:
    """Has nobody renew a lease any more, and removes it."""
    stop.set()
    if thread.ident is not None:
        most = patience.left()
        thread.join(None if math.isinf(most) else most)
    with contextlib.suppress(OSError):  # what was done under it is done; it goes stale by itself
        lease.release()


def check_free(store: Store, name: str) -> None:
    """Looks whether a lease could be had, and leaves it as it is.

    Raises:
      HeldError: an owner holds it.
      ForeignError: something else has its name.
    """
    _lease(store, name).look()


def _lease(store: Any, name: str) -> Lease:
    return _FileLease(Path(store.path(name))) if isinstance(store, LocalFolder) else _ObjectLease(store, name)


def _renew(lease: Lease, stop: threading.Event) -> None:
    while not stop.wait(HEARTBEAT):
        with contextlib.suppress(OSError):
            lease.renew()


class Lease(abc.ABC):
    """A lease as one that would have it sees it.

    Attributes:
      owner: who that is.
    """

    def __init__(self) -> None:
        process = _started(os.getpid())
        self.owner: Owner = dict(
            owner=uuid.uuid4().hex, host=socket.gethostname(), processes=_processes(), pid=os.getpid(), process=process
        )

    @abc.abstractmethod
    def take(self) -> None:
        """Makes it this owner's, if it is nobody's or stale; of many that try only one does.

        Raises:
          HeldError: another owner holds it.
        """

    @abc.abstractmethod
    def look(self) -> None:
        """Raises HeldError if an owner holds it."""

    @abc.abstractmethod
    def is_mine(self) -> bool:
        """Whether nobody has taken it away."""

    @abc.abstractmethod
    def renew(self) -> None:
        """Says that its owner lives, if it is still this one's."""

    @abc.abstractmethod
    def release(self) -> None:
        """Removes it if it is still this owner's."""

    def check(self) -> None:
        """Raises HeldError if someone has taken it away."""
        if not self.is_mine():
            raise HeldError("the lease was taken over by another conversion while this one slept")


def _refuse_if_alive(found: Owner, age: float) -> None:
    if abs(age) < STALE and not _is_gone(found):
        pid, host, age = found.get("pid"), found.get("host"), max(0.0, age)
        where = f"process {pid} on {host}" if pid and host else "its lease doesn't say whose"
        hint = "" if _is_seen(found) else f"; if it is gone, wait {STALE - age:.0f} s"
        raise HeldError(f"another conversion ({where}) is at work there, renewed {age:.0f} s ago{hint}")


class _FileLease(Lease):
    """A symbolic link whose target is the owner: a file that is made with its content in one step. Without links a
    file.

    Nothing but a lock can tell a lease that was judged from the one that has taken its place since. So whoever takes or
    releases one locks a file beside it, which is removed again. The system gives the lock up when its process dies, not
    while it sleeps.
    """

    def __init__(self, path: Path):
        super().__init__()
        self.path = path

    def take(self) -> None:
        with self._locked():
            self._refuse()
            for left in self.path.parent.glob(f"{self.path.name}.*.new"):  # of one that was killed in the next lines
                with contextlib.suppress(ForeignError, PermissionError):  # in a sticky folder another user's stays
                    _read(left)
                    left.unlink(missing_ok=True)
            made = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex[:8]}.new")
            try:
                os.symlink(json.dumps(self.owner), made)
            except OSError as e:
                if e.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                made.write_text(json.dumps(self.owner))
            try:
                os.rename(made, self.path)
            finally:  # the rename fails where another user's lies in a sticky folder
                made.unlink(missing_ok=True)
            os.utime(self.path, follow_symlinks=False)

    def look(self) -> None:
        self._refuse()

    def _refuse(self) -> None:
        found = _read(self.path)
        if found is not None:
            with contextlib.suppress(FileNotFoundError):
                _refuse_if_alive(found, _now(self.path) - self.path.lstat().st_mtime)

    def is_mine(self) -> bool:
        with contextlib.suppress(ForeignError):
            return _read(self.path) == self.owner
        return False

    def renew(self) -> None:
        if self.is_mine():
            os.utime(self.path, follow_symlinks=False)

    def release(self) -> None:
        with self._locked():
            if self.is_mine():
                self.path.unlink()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Context manager: nobody else takes or releases the lease. Where the file system has no locks it does nothing."""
        path, deadline = self.path.with_name(f"{self.path.name}.lock"), time.monotonic() + PATIENCE
        while True:
            if opened := _open_lock(path):
                fd, is_ours = opened
                try:
                    if _lock(fd) and _is_at(path, fd):  # else its last owner has removed it
                        try:
                            yield
                        finally:
                            if is_ours:
                                with contextlib.suppress(PermissionError):  # another user's, in a folder of all
                                    path.unlink(missing_ok=True)
                        return
                finally:
                    os.close(fd)
            if time.monotonic() > deadline:
                raise HeldError(
                    f"another process has locked {path}, to take or to release the lease, and doesn't go on"
                )
            time.sleep(0.002)


def _open_lock(path: Path) -> tuple[int, bool] | None:
    """The file that is locked, and whether it is ours to remove: made here, or told by its content; None if it went
    away meanwhile. An empty one may be of who was killed while he made it, or anybody's: it is locked, and stays.
    Raises ForeignError where it is no such file.
    """
    try:
        fd = os.open(path, os.O_RDWR | HOW | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        try:
            fd = _open_found(path)
        except FileNotFoundError:
            return None
        except OSError as e:
            if e.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):  # a link, a folder, a socket
                raise ForeignError(path) from e
            raise
        found = os.pread(fd, len(LOCK_MARK) + 1, 0) if stat.S_ISREG(os.fstat(fd).st_mode) else None
        if found not in (b"", LOCK_MARK):
            os.close(fd)
            raise ForeignError(path) from None
        return fd, bool(found)
    with contextlib.suppress(OSError):  # on a full disk it stays empty
        os.write(fd, LOCK_MARK)
    return fd, True


def _open_found(path: Path) -> int:
    """A file that is there; another user's to read alone, which is enough for a lock but on NFS."""
    try:
        return os.open(path, os.O_RDWR | HOW)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | HOW)  # a pipe doesn't wait for a writer


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        is_to_read = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        return e.errno in UNSUPPORTED and not (is_to_read and e.errno == errno.EBADF)  # NFS has locks, and not for it
    return True


def _is_at(path: Path, fd: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(fd))
    return False


def _read(path: Path) -> Owner | None:
    """The owner that a lease names; see `_owner`. None if there is no lease. Raises ForeignError where what is there
    isn't a lease.
    """
    try:
        text = os.fsencode(os.readlink(path))
    except FileNotFoundError:
        return None
    except OSError as e:
        if e.errno != errno.EINVAL:  # which says that it is no link
            raise
        try:
            with open(open_file(str(path)), "rb") as file:
                text = file.read(MOST_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as e:
            raise ForeignError(path) from e
    return _owner(path, text)


def _owner(path: object, text: bytes) -> Owner:
    """The owner that the content of a lease names; an empty one where a power cut, or a kill, took some of its bytes.
    Raises ForeignError where it isn't a lease's.
    """
    if len(text) > MOST_BYTES:
        raise ForeignError(path)
    if not text.strip(b"\0"):
        return {}
    try:
        found = json.loads(text)
    except ValueError:
        if text.startswith(BEGIN):
            return {"owner": ""}
        found = None
    if not isinstance(found, dict) or not found.keys() >= KEYS:
        raise ForeignError(path)
    return found


def _now(path: Path) -> float:
    """The time by the clock of the file system that holds a file, in seconds since 1970."""
    try:
        with tempfile.TemporaryFile(dir=path.parent) as file:
            os.utime(file.fileno())
            return os.fstat(file.fileno()).st_mtime
    except OSError:  # nothing can be written there: its lease is as new as can be
        return path.lstat().st_mtime


class _ObjectLease(Lease):
    """An object of a bucket; its generation says whether it is still the one that was found."""

    def __init__(self, store: Bucket, name: str):
        super().__init__()
        self.store, self.name = store, name
        self.version = ""

    def take(self) -> None:
        while not self.version:
            found = self._refuse()
            self.version = self._replace(found)

    def look(self) -> None:
        self._refuse()

    def _refuse(self) -> str | None:
        """The version of a stale lease; None if there is no lease. Raises HeldError."""
        found = self.store.stat(self.name)
        if found is None:
            return None
        _refuse_if_alive(self._read(), self.store.now() - found.updated)
        return found.version

    def _read(self) -> Owner:
        try:
            return _owner(self.store.path(self.name), self.store.read(self.name, 0, MOST_BYTES + 1))
        except FileNotFoundError:
            return {}

    def _replace(self, version: str | None) -> str:
        return self.store.replace(self.name, json.dumps(self.owner).encode(), version) or ""

    def is_mine(self) -> bool:
        with contextlib.suppress(ForeignError):
            return bool(self.version) and self._read() == self.owner
        return False

    def renew(self) -> None:
        if self.version:  # else someone took it away
            self.version = self._replace(self.version)

    def release(self) -> None:
        if self.version:
            self.store.delete(self.name, self.version)


def _is_seen(owner: Owner) -> bool:
    """Whether the owner's process can be seen from here, if it lives."""
    here = _processes()
    return bool(here) and (owner.get("host"), owner.get("processes")) == (socket.gethostname(), here)


def _is_gone(owner: Owner) -> bool:
    """Whether the owner was a process that could be seen from here, and isn't any more."""
    if not _is_seen(owner):
        return False
    now, then = _started(owner.get("pid", 0)), owner.get("process")
    return now != then and UNSEEN not in (now, then)


def _processes() -> str:
    """Identifies the processes that can be seen from here: this run of the machine, and this container; empty where the
    system doesn't say.

    Containers may have the same host name, and see only their own processes.
    """
    with contextlib.suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _started(pid: int) -> str:
    """When a process was started, so that another one with its number isn't taken for it; empty if there is none, or it
    is dead; `UNSEEN` where it is hidden (`/proc` of another user's, mounted with hidepid).
    """
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in ("Z", "X") else fields[19]  # dead, and nobody has taken notice yet
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return UNSEEN
