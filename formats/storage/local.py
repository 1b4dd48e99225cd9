"""Local files: reads of ranges without copies, writes that last."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from weightbeam.formats.storage.meant import hint
from weightbeam.formats.storage.renaming import UnsupportedError, exchange, link_new
from weightbeam.formats.storage.store import PROBE, ByteRange, ChangedError, File, LeadsOutError, StorageError, Store

PAGE = 4096  # bytes; what a disk reads at least
MAX_BUFFERS = 1024  # IOV_MAX on Linux
IRREGULAR = "isn't a regular file"
GETFLAGS, ATTRIBUTES = 0x80086601, {0x10: "i", 0x20: "a"}  # FS_IOC_GETFLAGS, include/uapi/linux/fs.h; chattr's letters
RWF_DONTCACHE = 0x80  # Linux 6.14, include/uapi/linux/fs.h; Python 3.11 has no name for it


def check_locale(path: str) -> None:
    """Makes sure that a path is the same one for TensorStore, which takes each name for UTF-8.

    Raises:
      StorageError: the locale has another encoding of names.
    """
    encoding = sys.getfilesystemencoding()
    if not path.isascii() and encoding != "utf-8":
        shown = ascii(path)[1:-1]
        raise StorageError(
            f"{shown}: names of files are {encoding} in this locale; set PYTHONUTF8=1, or a locale of UTF-8 such as LC_ALL=C.UTF-8"
        )


def open_file(path: str) -> int:
    """Opens a regular file for reading, without waiting as a pipe would have us do; returns its descriptor.

    Raises:
      OSError: it can't be opened, or is a pipe, a device or a folder.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as e:
        if e.errno not in (errno.ENXIO, errno.EOPNOTSUPP):  # a socket, on Linux and on macOS
            raise
        raise OSError(errno.EINVAL, IRREGULAR, path) from e
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, IRREGULAR, path)
    return fd


def cache_folder(*names: str) -> Path:
    """A folder of this project's in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "weightbeam", *names)


def read_named(path: str | os.PathLike[str]) -> bytes:
    """All of a file that the user named, without waiting for whoever would write into a pipe.

    Raises:
      OSError: it can't be read, or isn't a regular file.
    """
    with open(open_file(os.fspath(path)), "rb") as file:
        return file.read()


def read_ranges(path: str, ranges: Iterable[ByteRange], check: Callable[[File], None] | None = None) -> int:
    """Reads ranges of a file into buffers: `(offset, buffer)` each, as long as its buffer.

    Ranges less than a page apart go into one system call (the gap into a scratch buffer), so that no page is read
    twice. The GIL is released.

    Args:
      path: of the file.
      ranges: in any order.
      check: is called with the file that was opened, and raises if it isn't the right one: the path may lead to another
        one by now, and back to the right one before anybody looks again.

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
        if check:
            check(file_of(path, os.fstat(fd)))
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
            n = _preadv(fd, rest, offset + done)
        except OSError as e:
            raise StorageError(f"{path}: at byte {offset + done}: {e.strerror}") from e
        if n == 0:
            raise StorageError(
                f"{path}: ends at byte {offset + done}, expected {wanted - done} more; was it changed after it was planned?"
            )
        done += n
        while rest and n >= len(rest[0]):
            n -= len(rest.pop(0))
        if n:
            rest[0] = rest[0][n:]
    return done


def _preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """`os.preadv` that leaves the page cache as it was, where the system can do that: a shard is read once, and may be
    larger than memory.
    """
    with contextlib.suppress(NotImplementedError):  # macOS
        try:
            return os.preadv(fd, buffers, offset, RWF_DONTCACHE)
        except OSError as e:
            if e.errno != errno.EOPNOTSUPP:  # an older system, or one of its file systems
                raise
    return os.preadv(fd, buffers, offset)


def drop_pages(fd: int) -> None:
    """Lets a file that is on disk go from the page cache, which would grow by all that is written; a hint, which not
    every system takes.
    """
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def names_file(path: str | Path) -> Iterator[None]:
    """Context manager: an error of an open file, such as of a full disk, gets the file's name, which a descriptor hasn't."""
    try:
        yield
    except OSError as e:
        if e.errno is not None and e.filename is None:
            e.filename = os.fspath(path)
        raise


def sync_folder(path: Path) -> None:
    """Makes the entries of a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(path: Path) -> None:
    """Makes a folder and those above it, unless they are there: durably, where the folders above may be read."""
    missing = list(itertools.takewhile(lambda folder: not folder.is_dir(), (path, *path.parents)))
    for folder in reversed(missing):
        if folder.is_symlink():
            raise FileNotFoundError(errno.ENOENT, f"{folder} is a link to nothing")
        folder.mkdir(exist_ok=True)
        with contextlib.suppress(PermissionError):
            sync_folder(folder.parent)


TEMPORARY = ".weightbeam-tmp"  # how the name of a file ends that is still being written
SHA256 = re.compile(r"[0-9a-f]{64}")  # the name of a large file's blob in a hub's cache
_TEMPORARY = re.compile(rf"\..+\.[0-9a-f]{{16}}{re.escape(TEMPORARY)}")


def _write_temporary(path: Path, data: bytes) -> Path:
    """Writes the data durably to a file beside `path`, whose name begins with a dot."""
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}{TEMPORARY}")
    try:
        with names_file(path), open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:  # a stop, too
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def is_temporary(name: str) -> bool:
    """Whether a file has the name of one that is still being written."""
    return bool(_TEMPORARY.fullmatch(name.rpartition("/")[2]))


def write_file(path: Path, data: bytes) -> None:
    """Writes a file whole and durably: readers see all of it or nothing."""
    temporary = _write_temporary(path, data)
    try:
        os.replace(temporary, path)
    finally:  # where that failed, or was interrupted
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def create_file(path: Path, data: bytes) -> bool:
    """Writes a file whole unless it exists; returns whether it was this call that made it.

    A power cut may take the file away again, but never leave a part of it.
    """
    temporary = _write_temporary(path, data)
    try:
        link_new(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def replace_file(path: Path, data: bytes, before: File | None) -> bool:
    """Writes a file whole and durably, unless another one has written it since; returns whether it did.

    The two are swapped, and what comes out is looked at: a process that slept may come late, and whoever wrote since
    gets his file back, which others may have replaced in turn.

        sleeper writes B over A       path: N   aside: B      N was written while it slept
        swap                          path: B   aside: N      N isn't A
        swap                          path: N   aside: B      B is what it put there: done, nothing was written
    """
    if before is None and (path.is_dir() or path.is_symlink()):  # a folder is in the way, or a link to nothing
        write_file(path, data)
        return True
    if before is None:
        return create_file(path, data)
    aside = _write_temporary(path, data)
    try:
        ours = aside.stat().st_ino
        try:
            exchange(aside, path)
        except UnsupportedError:
            if not path.exists() or _seen(path) != _seen_as(before):
                return False
            os.replace(aside, path)
            return True
        except FileNotFoundError:  # it was removed since
            return False
        if _seen(aside) == _seen_as(before):
            return True
        while True:  # until what comes out is what was put there: else it is of another one who wrote since
            held = aside.stat().st_ino
            exchange(aside, path)
            if aside.stat().st_ino == ours:
                return False
            ours = held
    finally:
        aside.unlink(missing_ok=True)
        sync_folder(path.parent)


def _seen(path: Path) -> tuple[int, str]:
    found = path.stat()
    return found.st_ino, str(found.st_mtime_ns)


def _seen_as(file: File) -> tuple[int, str]:
    return file.inode, file.version


class LocalFolder(Store):
    """A folder of this machine, or of a file system that it has mounted."""

    at_a_time = 1
    stages = True
    given = ""  # how the user wrote it, where that is known

    @property
    def folder(self) -> Path:
        return Path(self.url)

    def __fspath__(self) -> str:
        return self.url

    def check_readable(self) -> None:
        if not self.folder.is_dir():
            raise StorageError(f"{self.url}: {self.missing()}")

    def missing(self) -> str:
        """That there is no such folder, and what was meant."""
        return f"no such folder{hint(self.given)}"

    def check_file(self, name: str) -> None:
        """Links may lead within the folder, and from a hub cache's snapshot to its blobs."""
        root = Path(os.path.realpath(self.folder))  # once: a link above may lead elsewhere the next time
        target = Path(os.path.realpath(root / name))
        if target.is_symlink():  # what is in a circle is followed no further
            raise StorageError("a symbolic link that leads back to itself")
        if not _is_within(root, target):
            raise LeadsOutError(
                "a symbolic link that leads out of the folder; put the file itself there, or convert it with --allow_links true"
            )

    def check_name_length(self, name: str, more: int, below: int) -> None:
        """Makes sure that the file system takes a name here, names with so many characters more beside it, and paths with
        so many bytes below those.

        Raises:
          StorageError: it doesn't, or not the name of this folder, or of one above it.
        """
        there = next(folder for folder in (self.folder, *self.folder.parents) if _is_there(folder))
        try:
            most, longest = os.pathconf(there, "PC_NAME_MAX"), os.pathconf(there, "PC_PATH_MAX") - 1 - more - below
        except OSError:  # it doesn't say
            return
        for part, bound in (*((part, most) for part in self.folder.parts), (name, most - more)):
            if (length := len(os.fsencode(part))) > bound:
                units = "characters" if part.isascii() else "bytes"
                raise StorageError(f"{part[:40]}…: the name is too long: {length} {units}, at most {bound}")
        if (length := len(os.fsencode(path := self.path(name)))) > longest:
            why = "what is staged there has longer ones"
            raise StorageError(f"{path[:40]}…: the path is too long: {length} bytes, at most {longest}, since {why}")

    def check_regular(self, name: str) -> None:
        path = self.folder / name
        if path.exists() and not path.is_file():
            raise StorageError(f"{path}: {IRREGULAR}")

    def links_out(self) -> list[str]:
        root, folders, found = Path(os.path.realpath(self.folder)), [""], []
        while folders:
            below = folders.pop()
            with os.scandir(self.folder / below) as entries:
                for entry in entries:
                    name = f"{below}{entry.name}"
                    if entry.is_symlink() and not _is_within(root, Path(os.path.realpath(entry.path))):
                        found.append(name)
                    elif entry.is_dir(follow_symlinks=False):
                        folders.append(f"{name}/")
                    elif not entry.is_file() and os.path.exists(entry.path) and not entry.is_dir():
                        raise StorageError(f"{self.path(name)}: {IRREGULAR}")
        return found

    def make(self) -> bool:
        is_new = not self.folder.exists()
        there = next(folder for folder in (self.folder, *self.folder.parents) if folder.exists())
        if (letter := _attribute(there)) and not (is_new and letter == "a"):  # whose names stay, and new ones come
            why = f"has the attribute {letter}, with which no name in it can be changed"
            raise StorageError(f"{there}: {why}; chattr -{letter} takes it away, or choose another folder")
        make_folder(self.folder)
        return is_new

    def check_writable(self) -> None:
        """What a checkpoint needs of a file system is tried here: folders that are renamed with what they hold.

        A bucket that is mounted as a folder may copy such a folder file by file, or refuse.
        """
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise StorageError("can't be written to")
        for tries in (2, 1, 0):
            probe = self.folder / f"{PROBE}.{os.urandom(8).hex()}"
            try:
                (probe / "a").mkdir(parents=True)
                (probe / "a" / "file").touch()
                os.rename(probe / "a", probe / "b")
                return
            except OSError as e:
                if not (isinstance(e, FileNotFoundError) and tries):  # else another process swept it away
                    raise StorageError(f"folders can't be made and renamed there: {e.strerror}") from e
            finally:
                shutil.rmtree(probe, ignore_errors=True)
                with contextlib.suppress(OSError):
                    probe.rmdir()  # one that may not be looked into, such as of a umask of 777

    def sweep_probes(self) -> None:
        """Removes what processes left that were killed while they tried the file system."""
        for probe in self.folder.glob(f"{PROBE}.*"):
            if re.fullmatch(r"[0-9a-f]{16}", probe.suffix[1:]):
                for folder in (probe / "a", probe / "b", probe):  # whatever else lies in there is somebody's
                    with contextlib.suppress(OSError):
                        file = folder / "file"
                        if os.path.lexists(file) and not file.lstat().st_size:
                            file.unlink()
                        folder.rmdir()

    def unmake(self) -> None:
        with contextlib.suppress(OSError):  # it isn't empty, or was never there
            self.folder.rmdir()

    def list(self, prefix: str = "", recursive: bool = True) -> list[File]:
        below = self.folder / prefix.rpartition("/")[0]
        found = below.rglob("*") if recursive else below.glob("*")
        names = sorted(str(path.relative_to(self.folder)) for path in found)
        return [file for name in names if name.startswith(prefix) and (file := self.stat(name))]

    def below(self, names: Sequence[str]) -> list[File]:
        folders = sorted(os.listdir(self.folder))
        return [file for folder in folders for name in sorted(names) if (file := self.stat(f"{folder}/{name}"))]

    def entries(self) -> Sequence[str]:
        return sorted(os.listdir(self.folder))

    def names(self) -> Sequence[str]:
        """A folder that can't be looked into is one of them, as `name/`."""
        found: list[str] = []

        def note(e: OSError) -> None:
            if isinstance(e, PermissionError):
                found.append(f"{e.filename}/")
            elif not isinstance(e, FileNotFoundError | NotADirectoryError):
                raise e

        for folder, folders, files in os.walk(self.folder, onerror=note):
            linked = (name for name in folders if os.path.islink(os.path.join(folder, name)))
            found += (os.path.join(folder, name) for name in (*files, *linked))
        return sorted(name.removeprefix(self.url).lstrip("/") for name in found)

    def folders(self) -> Sequence[str]:
        return sorted(path.name for path in self.folder.glob("*") if path.is_dir())

    def stat(self, name: str) -> File | None:
        path = self.folder / name
        try:
            found = path.stat()
        except OSError as e:
            if e.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # nothing, or a link that leads to itself
                return None
            raise
        if stat.S_ISDIR(found.st_mode):
            return None
        blob = blob_of(path)
        return file_of(name, found, blob if SHA256.fullmatch(blob) else None)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        with open(open_file(self.path(name)), "rb") as file:
            file.seek(start)
            return file.read(-1 if stop is None else max(0, stop - start))

    def read_into(self, name: str, ranges: Iterable[ByteRange]) -> int:
        return read_ranges(self.path(name), ranges)

    def read_checked(self, name: str, ranges: Iterable[ByteRange], check: Callable[[File], None]) -> int:
        return read_ranges(self.path(name), ranges, check)

    def read_known(self, file: File, start: int = 0, stop: int | None = None) -> bytes:
        with open(open_file(self.path(file.name)), "rb") as opened:
            now = file_of(file.name, os.fstat(opened.fileno()))
            is_touched = now.links == file.links and now.changed != file.changed
            if (now.inode, now.size, now.version) != (file.inode, file.size, file.version) or is_touched:
                raise ChangedError(f"{self.path(file.name)}: was changed or replaced since it was listed")
            opened.seek(start)
            return opened.read(-1 if stop is None else max(0, stop - start))

    def write(self, name: str, data: bytes) -> None:
        path = self.folder / name
        if self.folder.is_dir():
            make_folder(path.parent)
        write_file(path, data)

    def write_over(self, name: str, data: bytes, before: File | None) -> bool:
        path = self.folder / name
        if self.folder.is_dir():
            make_folder(path.parent)
        return replace_file(path, data, before)

    def create(self, name: str, data: bytes) -> bool:
        return create_file(self.folder / name, data)

    def delete(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def delete_folder(self, name: str = "") -> None:
        remove_tree(self.folder / name)

    def forget(self, name: str) -> None:
        with contextlib.suppress(OSError), os.scandir(self.folder / name) as entries:  # a hint; nothing depends on it
            for entry in entries:
                with open(entry.path, "rb", buffering=0) as file:
                    drop_pages(file.fileno())

    def kvstore(self) -> dict[str, Any]:
        if "\\" in self.url:
            raise StorageError(
                f"{self.url}: has a backslash, which TensorStore takes for a slash; no checkpoint can lie there"
            )
        if any(part.endswith(".__lock") for part in self.folder.parts):
            raise StorageError(
                f"{self.url}: has a part that ends in .__lock, as TensorStore's own files do; no checkpoint can lie there"
            )
        try:
            self.url.encode()
        except UnicodeEncodeError as e:
            raise StorageError(
                f"{os.fsencode(self.url)!r}: isn't UTF-8, which TensorStore wants; no checkpoint can lie there"
            ) from e
        return {"driver": "file", "path": f"{self.url}/"}


def file_of(name: str, found: os.stat_result, sha256: str | None = None) -> File:
    """What the system says of a file."""
    return File(
        name,
        found.st_size,
        str(found.st_mtime_ns),
        found.st_mtime,
        found.st_ino,
        sha256,
        changed=found.st_ctime_ns,
        links=found.st_nlink,
    )


def is_mount_point(folder: Path) -> bool:
    """Whether something is mounted there."""
    return os.path.realpath(folder) in mounts_in(folder)


def said_of_mounts(folder: Path) -> str:
    """That something is mounted at a folder, or below it; empty where nothing is."""
    for place in mounts_in(folder):
        return "is a mount point" if place == os.path.realpath(folder) else f"holds {place}, a mount point"
    return ""


def remove_tree(folder: Path) -> None:
    """Removes a folder with all that lies in it, as far as that can be removed; nothing where something is mounted in it,
    which would be emptied.
    """
    if not mounts_in(folder):
        shutil.rmtree(folder, ignore_errors=True)


def mounts_in(folder: Path) -> list[str]:
    """Where something is mounted at a folder, and below it; Linux's list of mounts also tells what is bound to a folder of
    the same disk.
    """
    root = os.path.realpath(folder)
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().split(b"\n")
    except OSError:
        return [place for place, *_ in os.walk(root) if os.path.ismount(place)]
    escaped = (line.split(b" ", 5)[4] for line in lines if line)  # as `\040` for a space
    places = (os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda each: bytes([int(each[1], 8)]), one)) for one in escaped)
    return sorted(place for place in places if place == root or place.startswith(f"{root}/"))


def _attribute(folder: Path) -> str:
    """The attribute that keeps the names in a folder as they are, as chattr calls it; empty where there is none."""
    with contextlib.suppress(OSError):  # another system, or one of its file systems, has no attributes
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            flags = int.from_bytes(fcntl.ioctl(fd, GETFLAGS, bytes(8))[:4], sys.byteorder)
        finally:
            os.close(fd)
        return next((letter for flag, letter in ATTRIBUTES.items() if flags & flag), "")
    return ""


def _is_there(folder: Path) -> bool:
    """Whether a folder is there; one whose name is too long isn't."""
    try:
        return folder.is_dir()
    except OSError:
        return False


def _is_within(root: Path, target: Path) -> bool:
    """Whether a file lies below a folder, or is a blob of the hub's cache whose snapshot the folder is, or lies in."""
    snapshots = (folder.parent for folder in (root, *root.parents) if folder.parent.name == "snapshots")
    return target.is_relative_to(root) or any(target.parent == cache.parent / "blobs" for cache in snapshots)


def blob_of(path: Path) -> str:
    """The name of the blob of a hub's cache that a link leads to; empty where it leads to none, or is no link."""
    return blob.name if path.is_symlink() and (blob := path.resolve()).parent.name == "blobs" else ""
