"""What tells the files of a source from any others: the one identity that the plan of every command has of what it
reads.

In the plan's hash are name, size, version (time of change, generation, the hub's blob), and a known sha256 or, of local
files, a hash of some bytes. That is the same wherever the files lie: they may be moved, and workers may see them
elsewhere. What is made may name the place, though: a release whose model card does is of another plan then.

Staged beside it are inode and time of any change, which no tool sets back, of the files and, in an Orbax checkpoint, of
the folders that they lie in. They are compared when a plan is resumed, and before anything is published, the hash with
them: what is written through a memory map needn't change a time. A source that is moved keeps them; a copy doesn't, and
isn't gone on with: it may differ where no block is hashed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

from weightbeam.formats.storage import ChangedError, File, LocalFolder, Store, open_store
from weightbeam.formats.storage.stoppable import StoppablePool

SAMPLES, SAMPLE_BYTES = 64, 256  # blocks of a file that are hashed at most, and bytes of each
MOST_SAMPLES = 1 << 14  # of all files of a source together, but for one of each
WRITTEN, READ, ANEW = " while it was converted", " while it was read", "; start anew with --overwrite"  # of messages
MOUNTS = "/proc/self/ns/mnt"  # Linux: names the process's own view of what is mounted
READERS = 8  # files whose blocks are read at a time: on a mounted bucket each takes a while


def changed_error(what: str, detail: str = "") -> ChangedError:
    """The error that says so in both ways."""
    written, read = f"{what}{WRITTEN}{detail}", f"{what}{READ}{detail}"
    return ChangedError(f"{written}{ANEW}", read)


def as_read(message: str) -> str:
    """What to tell one who only reads, of a text that has the message of a `ChangedError`, as a worker tells it."""
    return message.replace(WRITTEN, READ).replace(ANEW, "; compare it again")


class Seen(Protocol):
    """A file as it was seen; see `File`."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def version(self) -> str: ...
    @property
    def inode(self) -> int: ...
    @property
    def changed(self) -> int: ...
    @property
    def links(self) -> int: ...


class Watched(Protocol):
    """What is read: a release, an adapter, a checkpoint."""

    @property
    def seen(self) -> Mapping[str, Seen]:
        """Its files, by their paths."""
        ...

    @property
    def identity(self) -> list[Any]:
        """What tells its content from another one's, as JSON."""
        ...

    def check(self) -> None:
        """Raises StorageError if it isn't what was planned with, or is gone."""
        ...

    def was_touched(self, since: Any, linked: bool = False) -> bool:
        """Whether a file of it was replaced since the same was opened; sizes and times needn't show it. `linked`: we may have
        made links to its files since.
        """
        ...


def was_touched(then: Seen, now: Seen) -> bool:
    """Whether the same file was changed since in a way that its size and time needn't show. A further name for it isn't
    one, but may hide one; see `check_files`.
    """
    return (then.inode, then.links) == (now.inode, now.links) and then.changed != now.changed


def is_other(then: Seen, now: Seen) -> bool:
    """Whether two files, where both were seen on this machine, are two. One of the hub's is seen here once it lies in the
    hub's cache.
    """
    return bool(then.inode and now.inode) and then.inode != now.inode


def check_opened(path: str, planned: Seen, opened: Seen) -> None:
    """Checks that what was opened at a path is the file that was planned with: its inode and the time of any change
    too, where they were seen on this machine.

    Raises:
      ChangedError: it isn't.
    """
    is_same = (opened.size, opened.version) == (planned.size, planned.version)
    if not is_same or (planned.inode and (opened.inode != planned.inode or was_touched(planned, opened))):
        raise changed_error(f"{path} changed", ", and isn't the file that was planned with")


class Folder(NamedTuple):
    """A local folder as it was seen: its path and inode, and the times when an entry of it, and when anything of it,
    changed last.
    """

    path: str
    inode: int
    written: int
    changed: int

    @classmethod
    def of(cls, path: str) -> Self:
        """The folder that a path leads to; of none all is 0."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = os.stat(path)
            return cls(path, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)
        return cls(path, 0, 0, 0)


def folders_of(items: Store) -> tuple[Folder, ...]:
    """The folders in which others open the files of an item, by paths: its own, and those that links lead to out of it.
    Elsewhere than in a folder there are none.
    """
    return (Folder.of(items.url), *_linked(items)) if isinstance(items, LocalFolder) else ()


def _linked(store: Store) -> tuple[Folder, ...]:
    """The folders that links lead to out of a local one: as the links name them, and as they are really called."""
    links = [store.path(name) for name in store.links_out()] if isinstance(store, LocalFolder) else []
    named = {os.path.join(os.path.dirname(link), os.readlink(link)) for link in links}
    folders = {os.path.dirname(path) for path in (*named, *map(os.path.realpath, links))}
    return tuple(map(Folder.of, sorted(folders)))


@contextlib.contextmanager
def same_folders(planned: Collection[Folder]) -> Iterator[None]:
    """Context manager: folders are those that were planned with, before and after what is done meanwhile: where others
    open their files, by paths that may lead elsewhere for a while. One that was renamed isn't, for it may have been away;
    files may come into it.

    Raises:
      ChangedError: one isn't, which says more than what fails for it.
    """
    _check_folders(planned)
    try:
        yield
    except Exception:
        _check_folders(planned)
        raise
    _check_folders(planned)


def _check_folders(planned: Iterable[Folder]) -> None:
    for then in planned:
        now = Folder.of(then.path)
        if now.inode != then.inode:
            raise changed_error(f"{then.path} changed", ", and isn't the folder that was planned with")
        if now.changed != then.changed and now.changed != now.written:  # the last change wasn't that of an entry
            raise changed_error(f"{then.path} was renamed or touched")


@functools.cache
def this_machine() -> str:
    """What tells this machine, with what is mounted there, from others: inodes and times of change are compared on
    one only.
    """
    mounts = os.readlink(MOUNTS) if os.path.islink(MOUNTS) else ""
    return hashlib.sha256(f"{socket.gethostname()} {mounts}".encode()).hexdigest()[:16]


def were_replaced(then: Mapping[str, Seen], now: Mapping[str, Seen], linked: bool) -> bool:
    """Whether files, by their paths, were replaced or touched since; they may have moved. A further name of a file may
    hide a change, and counts as one unless it is our own (`linked`).
    """
    before = {file.name: file for file in then.values()}
    pairs = [(before[file.name], file) for file in now.values() if file.name in before]
    return any(
        is_other(old, new) or (was_touched(old, new) if linked else old.changed != new.changed)
        for old, new in pairs
        if old.inode and new.inode
    )


def describe_changes(then: Mapping[str, Seen], now: Mapping[str, Seen], linked: bool = False) -> list[str]:
    """Which files of a source, by their paths, aren't what they were, and how, each in words; nothing of what only a
    hash tells.

    Args:
      then, now: its files; they may have moved.
      linked: we may have made links to them since.
    """
    before = {file.name: (path, file) for path, file in then.items()}
    names, found = {file.name for file in now.values()}, []
    for path, file in now.items():
        place, old = before.get(file.name, ("", None))
        if how := "is new" if old is None else _difference(old, file, linked):
            found.append(f"{path} {how}" + (f"; it was {place}" if place and place != path else ""))
    return found + [f"{path} is gone" for name, (path, _) in before.items() if name not in names]


def _difference(then: Seen, now: Seen, linked: bool) -> str:
    """How a file isn't what it was, in words; empty where that can't be seen."""
    if now.size != then.size:
        return f"has another size, {now.size:,} instead of {then.size:,} bytes"
    if is_other(then, now):
        return f"is another file of that name, with the inode {now.inode} instead of {then.inode}"
    if now.version != then.version:
        return "was written since" if now.inode else "is another version"
    if now.changed == then.changed or not (now.inode and then.inode):
        return ""
    if now.links == then.links:
        return "was written, renamed or touched since, though its size and time are as before"
    names = f"has {now.links} names, which are hard links, instead of {then.links}"
    return "" if linked else f"{names}: that may hide a change of what it holds"


def check_files(store: Store, planned: Iterable[Seen], found: Iterable[File]) -> None:
    """Checks that files are those that were planned with, by what their folder says. The caller compares their blocks, too:
    other bytes may have come as the file got or lost a name, as it does by our own links, and what is written through
    a memory map needn't change a time.

    Raises:
      ChangedError: one isn't, or is gone.
    """
    now = {file.name: file for file in found}
    for then in planned:
        path = store.path(then.name)
        if (file := now.get(then.name)) is None:
            raise changed_error(f"{path}: is gone; it was removed")
        changed = [field for field in ("size", "version") if getattr(file, field) != getattr(then, field)]
        if changed := changed + ["inode"] * is_other(then, file):
            raise changed_error(f"{path} changed", f" ({', '.join(changed)})")
        if was_touched(then, file):
            raise touched(path)


def check_together(store: Store, seen: Iterable[Seen], found: Iterable[File]) -> None:
    """Checks that files which were read one after the other still lie there: what was read is of one state of the
    folder, though it may be replaced by another release in between. Links to them may have been made.

    Raises:
      ChangedError: one was changed or replaced, or is gone.
    """
    then = {store.path(file.name): file for file in seen}
    now = {path: file for file in found if (path := store.path(file.name)) in then}
    if changes := describe_changes(then, now, linked=True):
        raise ChangedError(
            f"{changes[0]}, and what was read beside it is of before; begin again once nobody writes there"
        )


def touched(path: str) -> ChangedError:
    """That a file holds other bytes, or was written, though it looks as before."""
    return changed_error(f"{path} changed", ", though its size and time are as before")


def hash_blocks(store: Store, name: str, places: Iterable[tuple[int, int]]) -> str:
    """A hash of some bytes of a local file, `(offset, length)` each; elsewhere the version tells, and it is empty.

    Raises:
      StorageError: they can't be read.
    """
    if not isinstance(store, LocalFolder):
        return ""
    buffers = [(at, memoryview(bytearray(length))) for at, length in sorted(places)]
    store.read_into(name, buffers)
    return hashlib.sha256(b"".join(buffer for _, buffer in buffers)).hexdigest()


def spread(size: int, samples: int) -> list[tuple[int, int]]:
    """Blocks `(offset, length)` of a file of this size, evenly spread; all of it if it is small."""
    if size <= samples * SAMPLE_BYTES:
        return [(0, size)] if size else []
    gap = (size - samples * SAMPLE_BYTES) // (samples + 1)
    return [((number + 1) * gap + number * SAMPLE_BYTES, SAMPLE_BYTES) for number in range(samples)]


@dataclasses.dataclass(frozen=True)
class Files:
    """All files of a folder, as they were when a plan was made.

    Attributes:
      root: URL of the folder.
      files: sorted by name.
      blocks: a hash of some bytes of each local file.
      folders: of a local folder and all below it: the name, the inode and the time of any change, a renaming among them,
        after which its files look as before.
      linked: the folders that links lead to out of it, as this process saw them.
    """

    root: str
    files: tuple[File, ...]
    blocks: str = ""
    folders: tuple[tuple[str, int, int], ...] = ()
    linked: tuple[Folder, ...] = ()

    @classmethod
    def of(cls, store: Store, hashed: bool = True) -> Self:
        """Those that a folder holds now; `hashed` reads their blocks.

        Raises:
          StorageError: it can't be listed, or one can't be read.
        """
        files = store.list()
        return cls(store.url, tuple(files), hash_files(store, files) if hashed else "", _folders(store), _linked(store))

    @functools.cached_property
    def hash(self) -> str:
        """What a plan's hash knows of them: the same wherever they lie."""
        listed = [(file.name, file.size, file.version) for file in self.files]
        return hashlib.sha256(json.dumps([listed, self.blocks]).encode()).hexdigest()

    def was_touched(self, since: Files, linked: bool = False) -> bool:
        """Whether one was replaced since files with the same hash were seen, or the folder that it lies in."""
        below = [[each for each in files.folders if each[0]] for files in (since, self)]  # the folder itself may move
        return below[0] != below[1] or were_replaced(since._by_name, self._by_name, linked)

    @property
    def seen(self) -> dict[str, Seen]:
        """The files, by their paths."""
        return {f"{self.root}/{file.name}": file for file in self.files}

    @functools.cached_property
    def _by_name(self) -> dict[str, File]:
        return {file.name: file for file in self.files}

    def check(self) -> None:
        """Checks that the folder holds these and no others.

        Raises:
          ChangedError: it doesn't.
        """
        store = open_store(self.root)
        found = store.list()
        check_files(store, self.files, found)
        if added := [file.name for file in found if file.name not in self._by_name]:
            raise changed_error(f"{store.path(added[0])} came there")
        if moved := sorted({*self.folders} - {*_folders(store)}) if self.folders else ():
            raise changed_error(f"{store.path(moved[0][0])} was changed or renamed")
        _check_folders(self.linked)
        if self.blocks and hash_files(store, self.files) != self.blocks:
            raise touched(f"a file of {self.root}")

    def to_json(self) -> list[Any]:
        """As JSON."""
        files = [[f.name, f.size, f.version, f.inode, f.changed, f.links] for f in self.files]
        return [self.root, files, self.blocks, self.folders]

    @classmethod
    def from_json(cls, said: Sequence[Any]) -> Self:
        """What `to_json` wrote."""
        root, files, blocks, folders = said
        names = ("name", "size", "version", "inode", "changed", "links")
        held = tuple(File(**dict(zip(names, file, strict=True))) for file in files)
        return cls(root, held, blocks, tuple((name, inode, changed) for name, inode, changed in folders))


def _folders(store: Store) -> tuple[tuple[str, int, int], ...]:
    """A local folder and all below it; see `Files.folders`."""
    if not isinstance(store, LocalFolder):
        return ()
    found = [(path.removeprefix(store.url).strip("/"), os.stat(path)) for path, *_ in os.walk(store.url)]
    return tuple(sorted((name, stat.st_ino, stat.st_ctime_ns) for name, stat in found))


def hash_files(store: Store, files: Sequence[File]) -> str:
    """A hash of some bytes of each local file: fewer of each where there are many."""
    if not isinstance(store, LocalFolder):
        return ""
    samples = max(1, min(SAMPLES, MOST_SAMPLES // max(1, len(files))))

    def hash_part(part: Sequence[File]) -> str:
        return "".join(hash_blocks(store, file.name, spread(file.size, samples)) for file in part)

    with StoppablePool(READERS) as pool:
        parts = pool.map(hash_part, (files[at : at + 256] for at in range(0, len(files), 256)))
        return hashlib.sha256("".join(parts).encode()).hexdigest()
