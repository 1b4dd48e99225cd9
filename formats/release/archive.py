"""The small files of a release in the archive that is kept with a checkpoint of it."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import zipfile
import zlib
from collections.abc import Iterable, Mapping

from weightbeam.formats.orbax.metadata import files_beside
from weightbeam.formats.record.naming import ORIGIN, Naming
from weightbeam.formats.release.files import CONFIG, role_of
from weightbeam.formats.release.small_files import SmallFiles, files_of, say_left, small_files
from weightbeam.formats.safetensors import HfCheckpoint
from weightbeam.formats.staging import ITEMS
from weightbeam.formats.staging.links import SOURCE
from weightbeam.formats.storage import StorageError, Store
from weightbeam.formats.storage.identity import Seen
from weightbeam.formats.storage.stoppable import StoppablePool
from weightbeam.formats.text import json_text

LOG = logging.getLogger("weightbeam")
ENTRY, MAX_ENTRIES = b"PK\1\2", 10_000  # what each entry of an archive's directory begins with
ARCHIVE = "release.zip"  # in a step's folder: a single file, since Orbax takes every folder of a step for an item


def pack(files: Mapping[str, bytes]) -> bytes:
    """A ZIP archive of small files, uncompressed; of the same files always the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)  # of 1980, the earliest that the format knows
    return buffer.getvalue()


def packed_files(step: Store) -> SmallFiles | None:
    """The small files that lie with a checkpoint; None where there are none.

    Raises:
      StorageError: the archive can't be read, or isn't one.
    """
    if ARCHIVE not in files_beside(step):
        return None
    try:
        stored = step.read(ARCHIVE)
        if stored.count(ENTRY) > MAX_ENTRIES:  # each takes a kilobyte of memory once it is open
            raise StorageError(f"{step.path(ARCHIVE)}: has more than {MAX_ENTRIES:,} entries; that can't be meant")
        entries = zipfile.ZipFile(io.BytesIO(stored)).infolist()
    except (zipfile.BadZipFile, ValueError) as e:
        raise StorageError(f"{step.path(ARCHIVE)}: isn't a ZIP archive: {e}") from e
    read = functools.partial(_read_packed, stored, step.path(ARCHIVE))
    return SmallFiles({entry.filename: entry.file_size for entry in entries if role_of(entry.filename)}, read)


def _read_packed(archive: bytes, where: str, name: str) -> bytes:
    try:
        return zipfile.ZipFile(io.BytesIO(archive)).read(name)
    except (
        zipfile.BadZipFile,
        zlib.error,
        RuntimeError,
        ValueError,
        EOFError,
    ) as e:  # RuntimeError: encrypted, or compressed by something else
        raise StorageError(f"{where}: {name} can't be read: {e}") from e


def kept_files(source: Store, allow_links: bool, known: Iterable[Seen]) -> SmallFiles:
    """The small files that are kept with a checkpoint of a release, see `small_files`; those of a virtual checkpoint lie
    with that one.

    Raises:
      StorageError: they can't be listed or read, were changed meanwhile, or the archive can't be read.
    """
    virtual = (source.parent.name, source.name) == (ITEMS, SOURCE)
    packed = packed_files(source.parent.parent) if virtual else None
    return small_files(source, allow_links, known) if packed is None else packed


def name_sources(name: str, data: bytes, naming: Naming) -> bytes:
    """A small file of a release as it is published elsewhere: its card, and the folder that `config.json` was loaded
    from, name sources as that place does.
    """
    text = data.decode(errors="replace")
    if naming.full:
        return data
    if role_of(name) == "card":
        return naming.text(text).encode()
    if name == CONFIG and ORIGIN in text:
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(origin := json_text.get(text, (ORIGIN,)), str):
                return json_text.set_value(text, (ORIGIN,), naming.text(origin)).encode()
    return data


def name_in_archive(archive: bytes, naming: Naming) -> bytes:
    """The same of all files that are packed as `keep_files` packs them."""
    if naming.full:
        return archive
    with zipfile.ZipFile(io.BytesIO(archive)) as packed:
        return pack({name: name_sources(name, packed.read(name), naming) for name in packed.namelist()})


def edit_archive(archive: bytes, checkpoint: HfCheckpoint) -> bytes:
    """The small files that are packed as `keep_files` packs them, as a view of their release sees them."""
    with zipfile.ZipFile(io.BytesIO(archive)) as packed:
        sizes = {info.filename: info.file_size for info in packed.infolist()}
        files = files_of(checkpoint, SmallFiles(sizes, packed.read))
        return pack({name: files[name] for name in packed.namelist()})


def keep_files(step: Store, source: Store, files: SmallFiles, naming: Naming) -> None:
    """Packs the small files of the release `source` into the archive that lies with a checkpoint.

    Raises:
      StorageError: one can't be read.
    """
    say_left(files, source, "kept with the checkpoint")
    for name in files.linked:
        path = source.path(name)
        LOG.warning(
            "%s is a link out of the folder: what it leads to, %s, is kept with the checkpoint",
            path,
            os.path.realpath(path),
        )
    with StoppablePool(source.at_a_time) as pool:
        held = zip(files, pool.map(files.__getitem__, files), strict=True)
        step.write(ARCHIVE, pack({name: name_sources(name, data, naming) for name, data in held}))
