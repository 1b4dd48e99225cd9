"""The source's files within a virtual checkpoint, and what identifies them later.

`items/source/` holds the whole release: its safetensors files as links or copies, and copies of the small files that describe
them. So the folder of a hard-linked or copied checkpoint can be read as a source itself.
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

from formats.safetensors import HF_QUANT_CONFIG, INDEX, Checkpoint
from formats.storage import TEMPORARY, StorageError, Store, sync_folder, write_file

SOURCE = "source"  # below the item
SUMS = "SHA256SUMS"  # beside the files, if their hashes were asked for; `sha256sum -c` reads it
HARD, SYMBOLIC, COPY = "hard", "symlink", "copy"


class LinkError(StorageError):
    """A file can't be put into the checkpoint in the way that was asked for."""


def put_source(folder: Path, checkpoint: Checkpoint, how: str, hashed: bool = False) -> None:
    """Puts a checkpoint's files into `folder`, durably. What an earlier attempt left there is replaced; a finished copy is kept.

    Args:
      folder: where.
      checkpoint: whose files.
      how: hard or symbolic links, or copies.
      hashed: read each file, and write the hashes beside them.

    Raises:
      LinkError: says why not, and what to do.
    """
    folder.mkdir(exist_ok=True)
    for shard in checkpoint.shards:
        _put(Path(os.path.realpath(shard.path)), folder / shard.name, how)  # the real file: a hub's cache holds links
    for name in ("config.json", INDEX, HF_QUANT_CONFIG):
        with contextlib.suppress(FileNotFoundError):
            write_file(folder / name, (Path(checkpoint.root) / name).read_bytes())
    if hashed:
        lines = [f"{shard.sha256 or sha256(folder / shard.name)}  {shard.name}\n" for shard in checkpoint.shards]
        write_file(folder / SUMS, "".join(lines).encode())
    sync_folder(folder)


def _put(file: Path, target: Path, how: str) -> None:
    try:
        if how == COPY and not target.is_symlink() and target.exists() and _is_copy(target, file):
            return
        target.unlink(missing_ok=True)
        if how == HARD:
            os.link(file, target)
        elif how == SYMBOLIC:
            os.symlink(file, target)
        else:
            _copy(file, target)
    except OSError as e:
        raise LinkError(f"{file} can't be put into {target.parent} (--link {how}): {_reason(e)}") from e


def _reason(error: OSError) -> str:
    others = "--link symlink refers to it where it is, --link copy copies it"
    if error.errno == errno.EXDEV:
        return f"that is another file system; {others}, or choose an --output beside the source"
    if error.errno in (errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP):
        return f"{error.strerror}: this system doesn't allow it; {others}"
    return str(error.strerror)


def _copy(file: Path, target: Path) -> None:
    temporary = target.with_name(f".{target.name}{TEMPORARY}")
    shutil.copyfile(file, temporary)
    shutil.copystat(file, temporary)
    with open(temporary, "rb") as written:
        os.fsync(written.fileno())
    os.replace(temporary, target)


def _is_copy(target: Path, file: Path) -> bool:
    here, there = target.stat(), file.stat()
    return here.st_ino != there.st_ino and (here.st_size, here.st_mtime_ns) == (there.st_size, there.st_mtime_ns)


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """What tells a file from another, without reading it.

    Attributes:
      name: in `items/source/`.
      size: in bytes.
      mtime_ns, inode: of the file itself, where it is linked.
      link: how it got there.
      sha256: where it is known: named by a hub's cache, or asked for.
    """

    name: str
    size: int
    mtime_ns: int
    inode: int
    link: str
    sha256: str | None

    def faults(self, folder: Path) -> Iterator[str]:
        """Why the file isn't the one that it was, as far as that can be told; its bytes are read only where their hash settles it."""
        path = folder / self.name
        try:
            stat = path.stat()
        except FileNotFoundError:
            yield f"is gone; it was a link to {os.readlink(path)}" if path.is_symlink() else "is gone"
            return
        if stat.st_size != self.size:
            yield f"has {stat.st_size:,} bytes, and had {self.size:,}"
        elif (stat.st_mtime_ns, stat.st_ino) != (self.mtime_ns, self.inode):
            if self.sha256 is not None:
                if sha256(path) != self.sha256:
                    yield f"holds other bytes: its sha256 isn't {self.sha256}"
            elif stat.st_ino == self.inode:
                yield "was changed in place, or touched; its hash isn't known, so nothing can tell which"
            elif path.is_symlink():
                yield f"is another file: {os.readlink(path)} was replaced"

    def is_moved(self, folder: Path) -> bool:
        """Whether the file is another one than was written, as it is when the checkpoint was copied."""
        return (folder / self.name).stat().st_ino != self.inode


def identify(folder: Path, checkpoint: Checkpoint) -> list[Identity]:
    """What identifies the files that `put_source` put into a folder.

    Raises:
      StorageError: a file isn't what the source was when it was planned.
    """
    found = []
    sums = (folder / SUMS).read_text().splitlines() if (folder / SUMS).exists() else ()
    hashes = {name: known for known, name in (line.split("  ", 1) for line in sums)}
    for shard in checkpoint.shards:
        path = folder / shard.name
        stat = path.stat()
        link = SYMBOLIC if path.is_symlink() else HARD if stat.st_ino == shard.inode else COPY
        if (stat.st_size, str(stat.st_mtime_ns)) != (shard.size, shard.version):
            raise StorageError(f"{shard.path} changed while it was converted; start anew with --overwrite")
        found.append(Identity(shard.name, stat.st_size, stat.st_mtime_ns, stat.st_ino, link, shard.sha256 or hashes.get(shard.name)))
    return found


def sha256(path: Path) -> str:
    """The hash of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def identities(record: Mapping[str, Any]) -> list[Identity]:
    """The files that a checkpoint refers to, by its record (`formats/provenance.py`); none if it isn't virtual."""
    return [Identity(**file) for file in record.get("references", {}).get("files", ())]


def find_changes(items: Store, files: Iterable[Identity]) -> list[str]:
    """Every file of a virtual checkpoint that isn't what it was, with what is wrong."""
    folder = Path(str(items / SOURCE))
    return [f"{SOURCE}/{file.name} {fault}" for file in files for fault in file.faults(folder)]
