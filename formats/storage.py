"""Where bytes lie. Local files only so far; `gs://` and `hf://` are refused by name."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

PAGE = 4096  # bytes; what a disk reads at least
MAX_BUFFERS = 1024  # IOV_MAX on Linux


class StorageError(OSError):
    """A file can't be read or written, or isn't what it was."""


def local_path(url: str) -> Path:
    """The local path of `url`, absolute: workers may run elsewhere.

    Raises:
      StorageError: the URL names a store that isn't supported.
    """
    scheme, separator, _ = url.partition("://")
    if separator:
        raise StorageError(f"{url}: {scheme}:// isn't supported yet, only local folders are")
    return Path(url).expanduser().absolute()


def open_file(path: str) -> int:
    """Opens a regular file for reading, without waiting as a pipe would have us do; returns its descriptor.

    Raises:
      OSError: it can't be opened, or is a pipe, a device or a folder.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "isn't a regular file", path)
    return fd


def read_ranges(path: str, ranges: Iterable[tuple[int, memoryview]]) -> int:
    """Reads ranges of a file into buffers: `(offset, buffer)` each, as long as its buffer.

    Ranges less than a page apart go into one system call (the gap into a scratch buffer), so that no page is read twice.
    The GIL is released.

    Returns:
      Bytes read from the file.

    Raises:
      StorageError: the file can't be read, or ends before a range does.
    """
    scratch = memoryview(bytearray(PAGE))
    total = 0
    try:
        fd = open_file(path)
    except OSError as e:
        raise StorageError(f"{path}: {e.strerror}") from e
    try:
        batch: list[memoryview] = []
        start = end = 0
        for offset, buffer in sorted(ranges, key=lambda item: item[0]):
            gap = offset - end
            if batch and (not 0 <= gap < PAGE or len(batch) >= MAX_BUFFERS - 2):
                total += _read_all(fd, batch, start, path)
                batch = []
            if not batch:
                start = offset
            elif gap:
                batch.append(scratch[:gap])
            batch.append(buffer)
            end = offset + len(buffer)
        if batch:
            total += _read_all(fd, batch, start, path)
    finally:
        os.close(fd)
    return total


def _read_all(fd: int, buffers: Sequence[memoryview], offset: int, path: str) -> int:
    """Fills `buffers` from `offset` on; `preadv` may return less than was asked for."""
    rest = list(buffers)
    wanted = sum(len(buffer) for buffer in buffers)
    done = 0
    while done < wanted:
        try:
            n = os.preadv(fd, rest, offset + done)
        except OSError as e:
            raise StorageError(f"{path}: at byte {offset + done}: {e.strerror}") from e
        if n == 0:
            raise StorageError(f"{path}: ends at byte {offset + done}, expected {wanted - done} more; was it changed after it was planned?")
        done += n
        while rest and n >= len(rest[0]):
            n -= len(rest.pop(0))
        if n:
            rest[0] = rest[0][n:]
    return done


def sync_folder(path: Path) -> None:
    """Makes the entries of a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


TEMPORARY = ".weightbeam-tmp"  # how the name of a file ends that is still being written


def _write_temporary(path: Path, data: bytes) -> Path:
    """Writes the data durably to a file beside `path`, whose name begins with a dot."""
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}{TEMPORARY}")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return temporary


def write_file(path: Path, data: bytes) -> None:
    """Writes a file whole and durably: readers see all of it or nothing."""
    os.replace(_write_temporary(path, data), path)
    sync_folder(path.parent)


def create_file(path: Path, data: bytes) -> bool:
    """Writes a file whole unless it exists; returns whether it was this call that made it.

    A power cut may take the file away again, but never leave a part of it.
    """
    temporary = _write_temporary(path, data)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(temporary)
    return True
