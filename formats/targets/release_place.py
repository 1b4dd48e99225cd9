"""The place of a release in a folder: its files at their full size, to which units write their rows.

    <output>                                    the release, once it is whole
    <output>.<id>.weightbeam-tmp/               the same as it grows
        model-00001-of-00002.safetensors, …     at their full size
        config.json, tokenizer.json, …          the small files
        plan.json.gz, units/…                   removed before publishing
        weightbeam.json                         where it comes from, and digests; written last

How it is done in a bucket, `release_bucket.py` says.
"""

from __future__ import annotations

import abc
import contextlib
import json
import logging
import os
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from weightbeam.formats.release.files import hash_each
from weightbeam.formats.release.small_files import remove_others
from weightbeam.formats.staging import JOB, PLAN, UNPACKED, FolderStaging, IncompleteError, Staging
from weightbeam.formats.staging.folder import check_unmounted
from weightbeam.formats.staging.staging import FAILURE, UNITS
from weightbeam.formats.storage import TEMPORARY, LocalFolder, drop_pages, sync_folder
from weightbeam.formats.storage.local import make_folder, names_file
from weightbeam.formats.targets.published import RECORD

LOG = logging.getLogger("weightbeam")
STAGED = (UNITS, UNPACKED, FAILURE, JOB, PLAN)
SMALL = "small.json"  # in the ledger: what the record says of the small files
INTO = "into"  # in a unit's ledger entry: the names of the files that it wrote to


class ReleasePlace(Staging):
    """The place of a release: nothing lies below it but its own files."""

    marker, growing = RECORD, ".weightbeam-tmp"

    @abc.abstractmethod
    def lay_out(self, files: Sequence[tuple[str, bytes, int]], small: Mapping[str, bytes]) -> None:
        """Makes ready for the units: safetensors files `(name, header, size)`, what units wrote kept; and the small
        files. Other files of a release go.
        """

    def note_small(self, small: Mapping[str, bytes]) -> None:
        """Notes for the record what the small files are: a hash of each, and all that `config.json` says. They are the
        plan's, and so is the place of the note: what is there is right.
        """
        name = f"{self.units}/{SMALL}"
        if self.plan_folder.exists(name):
            return
        noted: dict[str, Any] = {"files": hash_each(small)}
        if "config.json" in small:
            noted["config"] = json.loads(small["config.json"])
        self.plan_folder.write(name, json.dumps(noted).encode())

    def small_noted(self) -> dict[str, Any]:
        """What `note_small` noted; nothing where it wasn't."""
        name = f"{self.units}/{SMALL}"
        return json.loads(self.plan_folder.read(name)) if self.plan_folder.exists(name) else {}

    @abc.abstractmethod
    def is_empty(self) -> bool:
        """Whether what lies in the place is nothing of anyone's."""

    def find_changed(self, files: Iterable[tuple[str, bytes, int]]) -> list[int]:
        """The units that wrote to a file which is gone since, or has another size."""
        return []

    def drop_others(self, own: Container[str]) -> None:
        """Removes what others have put where the whole release lies, and only this command works: all but its own."""

    @abc.abstractmethod
    def write_stretches(self, stretches: Iterable[tuple[str, int, memoryview]]) -> Mapping[str, Any]:
        """Writes stretches `(file, offset, bytes)` durably; returns what the ledger's entry says of them."""

    @abc.abstractmethod
    def seal(self, files: Iterable[tuple[str, bytes, int]], ledger: Mapping[int, Mapping[str, Any]]) -> None:
        """Makes the files whole, all units being done.

        Raises:
          IncompleteError: they aren't.
        """


class ReleaseFolder(ReleasePlace, FolderStaging):
    """The place of a release in a folder."""

    @property
    def items(self) -> LocalFolder:
        """The release itself: it has no items."""
        return self.checkpoint

    def is_empty(self) -> bool:
        return not any(Path(self.final).iterdir())

    def lay_out(self, files: Sequence[tuple[str, bytes, int]], small: Mapping[str, bytes]) -> None:
        """Makes the safetensors files at their full size, and the small ones."""
        for name, header, size in files:
            with self._opened(name, os.O_RDWR | os.O_CREAT) as fd:
                _write_all(fd, memoryview(header), 0)
                os.ftruncate(fd, size)
                # so that a full disk is known now; not every file system can
                with contextlib.suppress(OSError, AttributeError):
                    os.posix_fallocate(fd, 0, size)
                os.fsync(fd)
        remove_others(self.checkpoint, {*small, *(name for name, _, _ in files)})
        for name, data in small.items():
            path = Path(self.checkpoint.path(name))
            make_folder(path.parent)
            with names_file(path), open(path, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            sync_folder(path.parent)

    def write_stretches(self, stretches: Iterable[tuple[str, int, memoryview]]) -> dict[str, Any]:
        """Writes to the places in the files."""
        by_file: dict[str, list[tuple[int, memoryview]]] = defaultdict(list)
        for name, offset, data in stretches:
            by_file[name].append((offset, data))
        for name, there in by_file.items():
            with self._opened(name, os.O_WRONLY) as fd:
                for offset, data in sorted(there, key=lambda one: one[0]):
                    _write_all(fd, data, offset)
                os.fdatasync(fd)
                drop_pages(fd)
        return {INTO: sorted(by_file)}

    @contextlib.contextmanager
    def _opened(self, name: str, flags: int) -> Iterator[int]:
        """Context manager: a file of the release, as a descriptor."""
        path = self.checkpoint.path(name)
        fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
        with names_file(path):
            try:
                yield fd
            finally:
                os.close(fd)

    def find_changed(self, files: Iterable[tuple[str, bytes, int]]) -> list[int]:
        held = {name: self.checkpoint.stat(name) for name, *_ in files}
        sizes = {name: size for name, _, size in files}
        changed = {name for name, file in held.items() if file is None or file.size != sizes[name]}
        return [unit for unit, entry in self.ledger.entries().items() if changed.intersection(entry.get(INTO, ()))]

    def seal(self, files: Iterable[tuple[str, bytes, int]], ledger: Mapping[int, Mapping[str, Any]]) -> None:
        """Makes sure that the files are as long as they should be, and durable."""
        for name, _, size in files:
            held = self.checkpoint.stat(name)
            if held is None or held.size != size:
                raise IncompleteError(
                    f"{self.checkpoint.path(name)} has {held.size if held else 0:,} bytes, expected {size:,}"
                )
        sync_folder(Path(self.checkpoint.url))

    def drop_others(self, own: Container[str]) -> None:
        """Loaders would take some of it for a part of the model, such as an adapter's config."""
        check_unmounted(self.checkpoint)
        for name in self.checkpoint.names():
            if name in own or name.partition("/")[0] in STAGED or name.endswith(TEMPORARY):
                continue
            with contextlib.suppress(OSError):  # it may not be removed, and `verify` names it
                self.checkpoint.delete(name)
                LOG.warning("%s isn't of the release, and is removed", self.checkpoint.path(name))
        for folder, *_ in os.walk(self.checkpoint.url, topdown=False):
            with contextlib.suppress(OSError):  # it isn't empty
                os.rmdir(folder)

    def made(self, files: Iterable[tuple[str, bytes, int]]) -> dict[str, bytes | Path]:
        """What the units have made of the release, once it is published: the paths of its safetensors files, and its
        record.

        Raises:
          IncompleteError: a file isn't there as it was planned.
        """
        found: dict[str, bytes | Path] = {}
        for name, header, size in files:
            held = self.final.stat(name)
            if held is None or held.size != size or self.final.read(name, 0, len(header)) != header:
                raise IncompleteError(f"{self.final.path(name)} isn't the file that was planned")
            found[name] = Path(self.final.path(name))
        return found | {RECORD: self.final.read(RECORD)}


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
