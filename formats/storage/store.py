"""The interface: what the rest of the project asks of a place where files lie."""

from __future__ import annotations

import abc
import base64
import dataclasses
import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import google_crc32c

from weightbeam.formats.storage.stoppable import StoppablePool

PROBE = ".weightbeam-probe"  # a file that is made and deleted
SILENCE = 15.0  # seconds of failing requests before it is said what is waited for
LONGEST_PAUSE = 90.0  # seconds after which a failing request isn't the same trouble any more
ByteRange = tuple[int, memoryview]  # an offset in a file, and the buffer for what lies there, as long as the buffer

_LOG = logging.getLogger("weightbeam.storage")


HUB = "hf://"


def is_hub(place: object) -> bool:
    """Whether a place is the hub's, by its URL; nothing at all isn't."""
    return str(place).startswith(HUB)


def repo_of(url: str) -> tuple[str, str]:
    """`owner/name` and the revision of `hf://owner/name@revision`, which may be empty; anything else as it is."""
    if not is_hub(url):
        return url, ""
    repo, _, revision = url.removeprefix(HUB).partition("@")
    return repo, revision


def branch_of(revision: str) -> str:
    """The branch that a revision names, if it names one: `main` where nothing is named."""
    return revision.removeprefix("refs/heads/") or "main"


class StorageError(OSError):
    """Something can't be read or written, or isn't what it was; the message is for the user."""


class ChangedError(StorageError):
    """A file isn't the one that was looked at, or planned with.

    Args:
      message: for one who writes; Beam makes the error again of this alone.

    Attributes:
      what: which, and how it differs, for one who only reads.
    """

    def __init__(self, message: str, what: str = ""):
        super().__init__(message)
        self.what = what or message


class UnreachedError(StorageError):
    """A store that can't be asked, or answers with an error or none at all: another time it may do."""


class LeadsOutError(StorageError):
    """A file of a folder is a link to elsewhere."""


def reason(error: OSError) -> str:
    """Why, without the name of the file."""
    return error.strerror or str(error) or type(error).__name__


class Trouble:
    """Requests to a service that fail one after the other, and are made again: after a while that is said."""

    def __init__(self) -> None:
        self._since = self._last = self._told = -math.inf

    def note(self, who: str, why: str, pause: float | None = None) -> None:
        """Takes note of a request that failed, and is made again after a pause in seconds, where that is known."""
        now = time.monotonic()
        if now - self._last > LONGEST_PAUSE:
            self._since = now
        self._last = now + (pause or 0.0)
        if now - self._since + (pause or 0.0) >= SILENCE and now - self._told >= 1.0:
            self._since = self._told = now  # the next line is as far off
            when = "" if pause is None else f" in {pause:.0f} s"
            _LOG.warning("waiting for %s, which is asked again%s: %s", who, when, why)


@dataclasses.dataclass(frozen=True, slots=True)
class File:
    """What a store knows of a file without reading it.

    Attributes:
      name: relative to the store.
      size: in bytes.
      version: tells its content from a later one's: its time of change in nanoseconds, its generation, the hub's name
        of its blob.
      updated: seconds since 1970; 0 where the store doesn't say.
      inode: of a local file, else 0.
      sha256, crc32c: of its bytes, where the store says it: in hexadecimal, in base 64.
      changed, links: of a local file: when anything of it was last changed, in nanoseconds, which no tool sets back;
        and how many names it has, since a further one is such a change. Else 0.
      original: the version of the file that was uploaded as this one by `Store.copy`; empty for all others.
    """

    name: str
    size: int
    version: str
    updated: float = 0.0
    inode: int = 0
    sha256: str | None = None
    crc32c: str | None = None
    original: str = ""
    changed: int = 0
    links: int = 0

    def is_copy_of(self, other: File | None) -> bool:
        """Whether a copy may be one of another file, as far as the stores say what they hold."""
        if other is None or self.size != other.size:
            return False
        return self.crc32c == other.crc32c or self.original == other.version


class Store(abc.ABC):
    """A folder of files. Cheap to make and to pickle: clients are made when they are first needed, one in a process.

    Attributes:
      url: absolute, without a slash at its end.
      at_a_time: small files that are worth reading at a time, since each answer takes a while.
      held_bytes: that `read_into` takes beside the buffers which it fills, in this process, however many threads call
        it.
      stages: whether results can be staged and published there, for which there is code beside the store's.

    Example:
      >>> class Shelf(Store):  # one that is only read needs these four
      ...     FILES = {"config.json": b"{}", "more/x": b"12345"}
      ...
      ...     def list(self, prefix="", recursive=True):
      ...         names = sorted(name for name in self.FILES if name.startswith(prefix))
      ...         return [self.stat(name) for name in names if recursive or "/" not in name.removeprefix(prefix)]
      ...
      ...     def stat(self, name):
      ...         return File(name, len(self.FILES[name]), "1") if name in self.FILES else None
      ...
      ...     def read(self, name, start=0, stop=None):
      ...         return self.FILES[name][start:stop]
      ...
      ...     def read_into(self, name, ranges):
      ...         for start, buffer in ranges:
      ...             buffer[:] = self.read(name, start, start + len(buffer))
      ...         return sum(len(buffer) for _, buffer in ranges)
      >>> shelf = Shelf("shelf://mine")
      >>> [file.name for file in shelf.list("more/")], shelf.read("more/x", 1, 3), shelf.exists("y")
      (['more/x'], b'23', False)
    """

    at_a_time = 8
    held_bytes = 0
    stages = False

    def __init__(self, url: str):
        self.url = url

    def __truediv__(self, name: str) -> Self:
        """A folder below."""
        return type(self)(f"{self.url}/{name}")

    @property
    def parent(self) -> Self:
        """The folder that this one lies in."""
        return type(self)(self.url.rpartition("/")[0])

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.url == getattr(other, "url", None)

    def __hash__(self) -> int:
        return hash(self.url)

    def path(self, name: str) -> str:
        """What names a file everywhere; see `store_and_name`.

        Args:
          name: of the file, relative to the store.

        Returns:
          Its URL, or its path where the store is local.
        """
        return f"{self.url}/{name}"

    def check_readable(self) -> None:  # noqa: B027
        """Makes sure that the folder is there.

        Raises:
          StorageError: it isn't, or may not be read.
        """

    def check_reached(self, name: str) -> None:  # noqa: B027
        """Makes sure that every client of the store gets to where one has just found this file.

        Args:
          name: of a file that is there.

        Raises:
          StorageError: one doesn't; with what may help.
        """

    def check_file(self, name: str) -> None:  # noqa: B027
        """Makes sure that a stranger's file lies where it seems to lie.

        Args:
          name: of the file.

        Raises:
          StorageError: it is a link that leads elsewhere.
        """

    def check_regular(self, name: str) -> None:  # noqa: B027
        """Makes sure that what has this name, if anything has, is a file, before anybody reads it.

        Args:
          name: of what may be there.

        Raises:
          StorageError: it is a folder, a pipe, a socket or a device.
        """

    def links_out(self) -> Sequence[str]:
        """The names of links that lead elsewhere, of all that lies in the folder and below.

        Raises:
          StorageError: a pipe, a socket or a device lies there.
        """
        return ()

    @abc.abstractmethod
    def list(self, prefix: str = "", recursive: bool = True) -> list[File]:
        """The files whose names begin with some characters.

        Args:
          prefix: those characters, of the name relative to the store; a slash among them or not.
          recursive: list those of folders below, too; else what has no further slash behind `prefix`.

        Returns:
          The files, sorted by name; none where nothing is there, be it the folder itself.

        Raises:
          StorageError: the folder can't be listed.
        """

    def entries(self) -> Sequence[str]:
        """The names of what lies directly in the folder, be it files that can be read or not."""
        return [file.name for file in self.list(recursive=False)]

    def names(self) -> Sequence[str]:
        """The names of all that lies in the folder and below, be it files that can be read or not."""
        return [file.name for file in self.list()]

    def folders(self) -> Sequence[str]:
        """The names of the folders directly below."""
        raise NotImplementedError(f"{type(self).__name__} has no folders")

    def below(self, names: Sequence[str]) -> list[File]:
        """The files of these names in the folders directly below, by one listing.

        Args:
          names: without a folder.

        Returns:
          The files, as `folder/name`, sorted by name.
        """
        return [file for file in self.list() if file.name.count("/") == 1 and file.name.rpartition("/")[2] in names]

    @abc.abstractmethod
    def stat(self, name: str) -> File | None:
        """What is known of a file, without reading it.

        Args:
          name: of the file, relative to the store.

        Returns:
          What `list` says of it, too; None if there is no such file, or it is a folder.
        """

    def exists(self, name: str) -> bool:
        """Whether there is such a file.

        Args:
          name: of the file.

        Returns:
          Whether `stat` knows it.
        """
        return self.stat(name) is not None

    @abc.abstractmethod
    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """A stretch of a file.

        Args:
          name: of the file.
          start: the first byte.
          stop: the byte behind the last one; the file's end unless told.

        Returns:
          The bytes; fewer where the file ends before `stop`, none where it ends before `start`.

        Raises:
          FileNotFoundError: there is no such file.
          OSError: it can't be read.
        """

    def read_many(self, names: Sequence[str]) -> Iterator[bytes]:
        """The bytes of several small files, `at_a_time` requests at once.

        Args:
          names: of the files.

        Yields:
          The bytes of each file, in the order of `names`.

        Raises:
          FileNotFoundError: one isn't there.
        """
        if self.at_a_time == 1:
            yield from map(self.read, names)
            return
        with StoppablePool(self.at_a_time) as pool:
            yield from pool.map(self.read, names)

    def make(self) -> bool:
        """Makes the folder, if the store has folders; returns whether it wasn't there."""
        return False

    def unmake(self) -> None:  # noqa: B027
        """Removes the folder if it is empty."""

    def check_writable(self) -> None:
        """Makes sure that files can be made and deleted.

        Raises:
          StorageError: they can't.
        """
        self.write(PROBE, b"")
        self.delete(PROBE)

    @abc.abstractmethod
    def read_into(self, name: str, ranges: Iterable[ByteRange]) -> int:
        """Fills the buffers of `ranges`. What lies close together is fetched in one request; requests are repeated
        where that helps.

        Args:
          name: of the file.
          ranges: for each the offset in the file, in bytes, and the buffer to fill, whole; in any order.

        Returns:
          Bytes fetched, gaps between ranges among them.

        Raises:
          StorageError: the file can't be read, or ends before a range does.
        """

    def read_checked(self, name: str, ranges: Iterable[ByteRange], check: Callable[[File], None]) -> int:
        """Does what `read_into` does, of the file that one means: a path of this machine may lead to another one by now,
        and back to the right one before anybody looks again. Elsewhere the version is in what is asked for, or there
        is one only.

        Args:
          name: of the file.
          ranges: as `read_into` takes them.
          check: is called with the file that was opened, and raises StorageError if it isn't the right one.

        Returns:
          Bytes fetched.

        Raises:
          StorageError: see `read_into`, and what `check` raises.
        """
        return self.read_into(name, ranges)

    def read_known(self, file: File, start: int = 0, stop: int | None = None) -> bytes:
        """A stretch of a file that `stat` or `list` knows: of this one, whatever came to its name since.

        Args:
          file: what is known of it.
          start: the first byte.
          stop: the byte behind the last one; the file's end unless told.

        Returns:
          The bytes, as `read` has them.

        Raises:
          FileNotFoundError: it is gone.
          OSError: it can't be read, or another one lies there.
        """
        return self.read(file.name, start, stop)

    def write(self, name: str, data: bytes) -> None:
        """Writes a file whole and durably: readers see all of it or what was there before. Folders below are made, but
        not this one.

        Args:
          name: of the file.
          data: all of it.

        Raises:
          StorageError: it can't be written.
        """
        raise StorageError(f"{self.url} can't be written to")

    def write_over(self, name: str, data: bytes, before: File | None) -> bool:
        """The same as `write`, unless another one has written that file since. A store that can't tell writes it.

        Args:
          name: of the file.
          data: all of it.
          before: what was there; None for nothing.

        Returns:
          Whether it was written.

        Raises:
          StorageError: it can't be written.
        """
        self.write(name, data)
        return True

    def create(self, name: str, data: bytes) -> bool:
        """Writes a file whole unless there is one. No folder is made for it, so that whoever comes too late notices that
        the folder is gone.

        Args:
          name: of the file.
          data: all of it.

        Returns:
          Whether it was this call that made it; of many at a time one does.

        Raises:
          StorageError: it can't be written.
        """
        raise StorageError(f"{self.url} can't be written to")

    def delete(self, name: str) -> None:
        """Deletes a file; nothing happens if there is none.

        Args:
          name: of the file.

        Raises:
          StorageError: it can't be deleted.
        """
        raise StorageError(f"{self.url} can't be written to")

    def delete_folder(self, name: str = "") -> None:
        """Deletes a folder with everything in it; nothing happens if there is none.

        Args:
          name: of a folder below; this one where it is empty.

        Raises:
          StorageError: it can't be deleted.
        """
        raise StorageError(f"{self.url} can't be written to")

    def copy(self, source: Store, file: File) -> None:
        """Copies a file of another store, whole or not at all; within buckets no byte passes through here.

        Args:
          source: where it lies.
          file: what `source` knows of it; its name is the copy's.

        Raises:
          StorageError: it can't be, or isn't what its hash says.
        """
        raise StorageError(f"{self.url} can't be written to")

    def copy_new(self, source: Store, file: File) -> None:
        """The same as `copy`, unless something else has the copy's name. A store that can't tell copies it.

        Args:
          source: where it lies.
          file: what `source` knows of it; its name is the copy's.

        Raises:
          StorageError: something else has.
        """
        self.copy(source, file)

    def forget(self, name: str) -> None:  # noqa: B027
        """Asks this machine to keep nothing of some files in memory for later readers, if it does.

        Args:
          name: of the folder below that has them; they must be durable already.
        """

    def kvstore(self) -> dict[str, Any]:
        """The folder as TensorStore's key-value store."""
        raise StorageError(f"{self.url} can't hold an Orbax checkpoint")


PIECE = 16 << 20  # bytes that a copy holds


def stretches(
    store: Store, name: str, size: int, sha256: str | None = None, crc32c: str | None = None
) -> Iterator[bytes]:
    """The bytes of a file, one piece after the other.

    Raises:
      StorageError: it is gone, ends too early, or has another hash than is named.
    """
    hashed, summed = hashlib.sha256(), google_crc32c.Checksum()
    for start in range(0, size, PIECE):
        try:
            piece = store.read(name, start, min(size, start + PIECE))
        except FileNotFoundError as e:
            raise StorageError(f"{store.path(name)}: is gone") from e
        if sha256 is not None:
            hashed.update(piece)
        if crc32c is not None:
            summed.update(piece)
        if len(piece) != min(PIECE, size - start):
            raise StorageError(f"{store.path(name)}: ends before byte {size:,}; was it changed after it was planned?")
        yield piece
    if sha256 is not None and hashed.hexdigest() != sha256:
        raise StorageError(f"{store.path(name)}: its sha256 isn't {sha256}, what came is damaged")
    if crc32c is not None and as_base64(summed) != crc32c:
        raise StorageError(f"{store.path(name)}: its crc32c isn't {crc32c}, what came is damaged")


def read_whole(store: Store, file: File) -> bytes:
    """All of a small file, compared with the crc32c or the sha256 that its store knows.

    Raises:
      FileNotFoundError: it is gone.
      StorageError: it ends too early, has another hash, or is another file by now.
    """
    if file.crc32c is not None:
        return b"".join(stretches(store, file.name, file.size, crc32c=file.crc32c))
    data = store.read_known(file)
    if file.sha256 is not None and hashlib.sha256(data).hexdigest() != file.sha256:
        raise StorageError(f"{store.path(file.name)}: its sha256 isn't {file.sha256}; it is damaged")
    return data


def as_base64(crc32c: int | google_crc32c.Checksum) -> str:
    """A checksum as buckets write it."""
    found = crc32c.to_bytes(4, "big") if isinstance(crc32c, int) else crc32c.digest()
    return base64.b64encode(found).decode()


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One stretch of a file that is fetched in one go, gaps included.

    Attributes:
      start, stop: bytes of the file.
      parts: the buffers to fill, in order, and where in the file each begins.
    """

    start: int
    stop: int
    parts: tuple[ByteRange, ...]

    def scatter(self, at: int, data: memoryview) -> None:
        """Puts bytes that lie at `at` in the file where they belong."""
        for offset, buffer in self.parts:
            first, last = max(offset, at), min(offset + len(buffer), at + len(data))
            if first < last:
                buffer[first - offset : last - offset] = data[first - at : last - at]


def make_requests(ranges: Iterable[ByteRange], most: int) -> Iterator[Request]:
    """Cuts ranges into requests of at most `most` bytes; those that (nearly) adjoin go together: gaps add at most 1/64
    to what is asked for.
    """
    parts: list[ByteRange] = []
    start = stop = asked = 0
    for offset, buffer in sorted(ranges, key=lambda item: item[0]):
        while buffer:
            if parts and not (stop <= offset < start + most and offset - start - asked <= asked >> 6):
                yield Request(start, stop, tuple(parts))
                parts = []
            if not parts:
                start, asked = offset, 0
            taken = min(len(buffer), start + most - offset)
            parts.append((offset, buffer[:taken]))
            offset, buffer, asked = offset + taken, buffer[taken:], asked + taken
            stop = offset
    if parts:
        yield Request(start, stop, tuple(parts))
