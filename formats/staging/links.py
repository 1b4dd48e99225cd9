"""The source's files within a virtual checkpoint, and what identifies them later.

`items/source/` holds the whole release: its safetensors files as links or copies, and copies of the small files that
describe them. So the folder of a hard-linked or copied checkpoint can be read as a source itself. Of a cut it holds the
files that have something of it, whole, and the index names no others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from weightbeam.formats.safetensors import CONFIGS, INDEX, HfCheckpoint, Shard, open_shard
from weightbeam.formats.storage import (
    TEMPORARY,
    ChangedError,
    File,
    LocalFolder,
    StorageError,
    Store,
    open_store,
    stretches,
    sync_folder,
)
from weightbeam.formats.storage.identity import check_opened
from weightbeam.formats.storage.local import file_of, names_file, open_file
from weightbeam.formats.storage.renaming import NO_LINKS
from weightbeam.formats.storage.strict_json import parse_json
from weightbeam.formats.text import json_text

SOURCE = "source"  # below the item
SUMS = "SHA256SUMS"  # beside the files, if their hashes were asked for; `sha256sum -c` reads it
HARD, SYMBOLIC, COPY = "hard", "symlink", "copy"
COPIED_BYTES = 16 << 20  # at a time
# what file systems keep of a time, in nanoseconds: Linux's own, NTFS, those of micro- and of milliseconds, exFAT, ext4 with
# small inodes and HFS+, FAT
TIMES = (1, 100, 1_000, 1_000_000, 10_000_000, 1_000_000_000, 2_000_000_000)
OBJECT = "object"  # in a bucket: rewritten by the store where the source lies in a bucket too, else uploaded


class LinkError(StorageError):
    """A file can't be put into the checkpoint in the way that was asked for."""


def put_source(folder: Store, checkpoint: HfCheckpoint, how: str, hashed: bool = False) -> None:
    """Puts a checkpoint's files into `folder`, durably. What an earlier attempt left there is replaced; a finished copy
    is kept.

    Args:
      folder: where.
      checkpoint: whose files.
      how: hard or symbolic links, or copies; a bucket has only copies.
      hashed: read each file, and write the hashes beside them.

    Raises:
      LinkError: says why not, and what to do.
    """
    source = open_store(checkpoint.root)
    folder.make()
    for shard in checkpoint.shards:
        if not isinstance(folder, LocalFolder):
            _put_object(folder, source, shard, how)
        elif isinstance(source, LocalFolder):
            # the real file: a hub's cache holds links
            _put(Path(os.path.realpath(shard.path)), folder, shard, how)
        elif how == COPY:
            _download(folder, source, shard)
        else:
            raise LinkError(f"{shard.path} isn't a local file, and can't be linked; --link copy downloads it")
    for name in CONFIGS:
        with contextlib.suppress(FileNotFoundError):
            data = source.read(name)
            folder.write(name, _index_of(data, checkpoint) if name == INDEX and checkpoint.cut else data)
    if hashed:
        lines = []
        for shard in checkpoint.shards:
            found = sha256(folder, shard.name)
            if shard.sha256 not in (None, found):
                raise LinkError(
                    f"{shard.path}: its sha256 isn't {shard.sha256}, by which it is known, but {found}; get it anew"
                )
            lines.append(f"{found}  {shard.name}\n")
        folder.write(SUMS, "".join(lines).encode())
    if isinstance(folder, LocalFolder):
        sync_folder(folder.folder)


def _index_of(index: bytes, checkpoint: HfCheckpoint) -> bytes:
    """A release's index as it is where only the files are that a cut of it has something of."""
    files = {shard.name for shard in checkpoint.shards}
    kept = {name: file for name, file in parse_json(index)["weight_map"].items() if file in files}
    return json_text.set_value(index.decode(), ("weight_map",), kept).encode()


def _put_object(folder: Store, source: Store, shard: Shard, how: str) -> None:
    """A file as an object of the checkpoint's bucket, where it may lie already."""
    if how == SYMBOLIC:
        raise LinkError(f"{folder}: a bucket has no links; without --link the files are copied there")
    there = folder.stat(shard.name)
    planned = File(shard.name, shard.size, shard.version, sha256=shard.sha256, crc32c=shard.crc32c)
    if there is None or not there.is_copy_of(planned):
        folder.copy(source, planned)


def _download(folder: LocalFolder, source: Store, shard: Shard) -> None:
    """A copy of a file that lies elsewhere, unless it is there already."""
    if _holds(folder, shard):
        return
    target = folder.folder / shard.name
    temporary = target.with_name(f".{target.name}{TEMPORARY}")
    with names_file(target), open(temporary, "wb") as file:
        for piece in stretches(source, shard.name, shard.size, shard.sha256, shard.crc32c):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, target)


def _holds(folder: Store, shard: Shard) -> bool:
    """Whether a folder holds a file, by a hash that is known."""
    found = folder.stat(shard.name)
    if found is None or found.size != shard.size or not (shard.sha256 or shard.crc32c):
        return False
    try:
        for _ in stretches(folder, shard.name, shard.size, shard.sha256, shard.crc32c):
            pass
    except OSError:
        return False
    return True


def _put(file: Path, folder: LocalFolder, shard: Shard, how: str) -> None:
    """Puts a file there, unless an earlier attempt did: making a link anew would be a change of the source's file.
    Raises ChangedError where another file lies at its path by now.
    """
    target = folder.folder / shard.name
    try:
        if how == HARD and not target.is_symlink() and target.exists() and target.samefile(file):
            return
        if how == COPY and not target.is_symlink() and target.exists() and _is_copy(target, file):
            return
        target.unlink(missing_ok=True)
        if how == HARD:
            os.link(file, target)
            if linked := folder.stat(shard.name):
                check_opened(shard.path, shard, linked)
        elif how == SYMBOLIC:
            os.symlink(file, target)
        else:
            _copy(file, target, shard)
    except ChangedError:
        target.unlink(missing_ok=True)
        raise
    except OSError as e:
        raise LinkError(
            f"{file} can't be put into {target.parent} (--link {how}): {_reason(e, target.parent, how)}"
        ) from e


def _reason(error: OSError, folder: Path, how: str) -> str:
    if how == COPY:
        return str(error.strerror)
    others = "--link copy copies it"
    if how == HARD and _takes_symlinks(folder):
        others = f"--link symlink refers to it where it is, {others}"
    if error.errno == errno.EXDEV:
        return f"that is another file system; {others}, or choose an --output beside the source"
    if error.errno in NO_LINKS:
        return f"{error.strerror}: this system doesn't allow it; {others}"
    return str(error.strerror)


def _takes_symlinks(folder: Path) -> bool:
    """Whether symbolic links can be made in a folder."""
    probe = folder / f".{os.urandom(8).hex()}{TEMPORARY}"
    try:
        os.symlink(probe.name, probe)
    except OSError:
        return False
    probe.unlink()
    return True


def _copy(file: Path, target: Path, planned: Shard) -> None:
    """Copies the file that was planned with: the one that is open, whatever comes to lie at its path meanwhile."""
    temporary = target.with_name(f".{target.name}{TEMPORARY}")
    with open(open_file(str(file)), "rb", buffering=0) as source, open(temporary, "wb") as written:
        check_opened(planned.path, planned, file_of(planned.name, found := os.fstat(source.fileno())))
        shutil.copyfileobj(source, written, COPIED_BYTES)
        written.flush()  # a file that isn't buffered may take less than it is given, and say nothing
        os.fchmod(written.fileno(), found.st_mode & 0o777)
        os.utime(written.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns))
        os.fsync(written.fileno())
    os.replace(temporary, target)


def _is_copy(target: Path, file: Path) -> bool:
    here, there = target.stat(), file.stat()
    is_other = (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino)
    return is_other and here.st_size == there.st_size and _is_kept(there.st_mtime_ns, here.st_mtime_ns)


def _is_kept(time: int, found: int) -> bool:
    """Whether a file system may tell `found` of a file that was given a time, by what it keeps of nanoseconds."""
    return any(time // unit * unit == found for unit in TIMES)


@dataclasses.dataclass(frozen=True, slots=True)
class FileIdentity:
    """What tells a file from another, without reading more than its header and some blocks.

    Attributes:
      name: in `items/source/`.
      size: in bytes.
      version, inode, crc32c: of the file itself, where it is linked (`formats.storage.File`).
      link: how it got there.
      sha256: where it is known: named by a hub or its cache, or asked for.
      content: of a local file, its header and some blocks (`Shard.content`); empty in records of earlier versions.
    """

    name: str
    size: int
    version: str
    inode: int
    link: str
    sha256: str | None
    crc32c: str | None = None
    content: str = ""

    def faults(self, folder: Store, there: File | None = None, hash_copies: bool = True) -> Iterator[str]:
        """Why the file isn't the one that it was, as far as that can be told; all its bytes are read only where their
        hash settles it.

        Args:
          folder: where it lies.
          there: the file, if it was looked for.
          hash_copies: whether a copy that was made since is hashed whole; else its header and blocks are enough.
        """
        found, led = there or folder.stat(self.name), _leads_to(folder, self.name)
        if found is None:
            yield f"is gone; it was a link to {led}" if led else "is gone"
        elif found.size != self.size:
            yield f"has {found.size:,} bytes, and had {self.size:,}"
        elif self.crc32c is not None and found.crc32c is not None:
            if found.crc32c != self.crc32c:
                yield f"holds other bytes: its crc32c isn't {self.crc32c}"
        elif self._may_be_other(found, hash_copies) and self.sha256 is not None:
            if sha256(folder, self.name) != self.sha256:
                yield f"holds other bytes: its sha256 isn't {self.sha256}"
        elif self.content and _content(folder, self.name) != self.content:
            yield "holds other bytes, as its header and some blocks tell"
        elif found.inode == self.inode and found.version != self.version:
            yield "was changed in place, or touched; its hash isn't known, so nothing can tell which; make it again (--sha256 has hashes)"
        elif found.inode != self.inode and led:
            yield f"is another file: {led} was replaced"

    def _may_be_other(self, found: File, hash_copies: bool) -> bool:
        return found.version != self.version if found.inode == self.inode else hash_copies

    def is_moved(self, folder: Store) -> bool:
        """Whether the file is another one than was written, as it is when the checkpoint was copied."""
        if (found := folder.stat(self.name)) is None:
            return False
        return found.version != self.version if self.link == OBJECT else found.inode != self.inode


def _content(folder: Store, name: str) -> str:
    """What tells what a local file holds from anything else, by its header and some blocks; empty where it is no whole
    safetensors file, and in a bucket, which knows the hash of all of it.
    """
    found = open_shard(folder, name, allow_links=True) if isinstance(folder, LocalFolder) else None
    return found.content if isinstance(found, Shard) else ""


def check_source(folder: Store, checkpoint: HfCheckpoint, how: str, hashed: bool) -> None:
    """Checks that a release's files were put into a folder as `put_source` would.

    Raises:
      LinkError: they were put there in another way, or links lead to where the release was.
    """
    if hashed and not folder.exists(SUMS):
        raise LinkError(f"{folder}: was made without --sha256; start anew with --overwrite")
    for shard in checkpoint.shards if isinstance(folder, LocalFolder) else ():
        led = _leads_to(folder, shard.name)
        if _kind(folder, folder.stat(shard.name), shard) != how or (led and led != os.path.realpath(shard.path)):
            path = folder.path(shard.name)
            raise LinkError(f"{path} isn't what --link {how} makes of {shard.path}; start anew with --overwrite")


def _leads_to(folder: Store, name: str) -> str:
    """Where a symbolic link leads; empty if it is none."""
    path = folder.path(name)
    return os.readlink(path) if isinstance(folder, LocalFolder) and os.path.islink(path) else ""


def identify(folder: Store, checkpoint: HfCheckpoint) -> list[FileIdentity]:
    """What identifies the files that `put_source` put into a folder.

    Raises:
      StorageError: a file isn't what the source was when it was planned.
    """
    identities = []
    sums = folder.read(SUMS).decode().splitlines() if folder.exists(SUMS) else ()
    hashes = {name: known for known, name in (line.split("  ", 1) for line in sums)}
    for shard in checkpoint.shards:
        found = folder.stat(shard.name)
        link = _kind(folder, found, shard)
        if found is None or not _is_same(found, shard, link):
            raise StorageError(f"{shard.path} changed while it was converted; start anew with --overwrite")
        known = shard.sha256 or hashes.get(shard.name)
        content = _content(folder, shard.name)
        identities.append(
            FileIdentity(shard.name, found.size, found.version, found.inode, link, known, found.crc32c, content)
        )
    return identities


def _kind(folder: Store, found: File | None, shard: Shard) -> str:
    """How a file got there."""
    if not isinstance(folder, LocalFolder):
        return OBJECT
    if _leads_to(folder, shard.name):
        return SYMBOLIC
    return HARD if found and found.inode == shard.inode else COPY


def _is_same(found: File, shard: Shard, link: str) -> bool:
    """Whether a file can be the shard; where both stores know a hash, by that."""
    if found.size != shard.size:
        return False
    if found.crc32c and shard.crc32c:
        return found.crc32c == shard.crc32c
    if shard.inode == 0 or link == OBJECT:
        return True
    # a link and a local copy have their file's time
    return _is_kept(int(shard.version), int(found.version)) if link == COPY else found.version == shard.version


def sha256(folder: Store, name: str) -> str:
    """The hash of a file's bytes."""
    hashed, file = hashlib.sha256(), folder.stat(name)
    for piece in stretches(folder, name, file.size if file else 0):
        hashed.update(piece)
    return hashed.hexdigest()


def identities(record: Mapping[str, Any]) -> list[FileIdentity]:
    """The files that a checkpoint refers to, by its record (`formats/record/provenance.py`); none if it isn't virtual.

    Raises:
      StorageError: it says something else there.
    """
    said = record.get("references", {})
    files = said.get("files", []) if isinstance(said, Mapping) else None
    if not isinstance(files, list) or not all(map(_is_identity, files)):
        raise StorageError("conversion.json: what it says of the files that are referred to makes no sense")
    return [FileIdentity(**file) for file in files]


def _is_identity(said: object) -> bool:
    """Whether a record's entry has the fields of a `FileIdentity`, and names a file of the folder itself."""
    text, none = str, type(None)
    kinds = dict(
        name=text, size=int, version=text, inode=int, link=text, sha256=(text, none), crc32c=(text, none), content=text
    )
    return (
        isinstance(said, Mapping)
        and {"name", "size", "version", "inode", "link", "sha256"} <= said.keys() <= kinds.keys()
        and all(isinstance(value, kinds[field]) for field, value in said.items())
        and "/" not in said["name"]
    )


def find_changes(items: Store, files: Iterable[FileIdentity]) -> list[str]:
    """Every file of a virtual checkpoint that isn't what it was, with what is wrong."""
    return [f"{SOURCE}/{file.name} {fault}" for file in files for fault in file.faults(items / SOURCE)]
