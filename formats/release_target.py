"""A release that is written: rows of tensors into safetensors files, by many at a time, published once.

The headers follow from the plan, so every unit knows the bytes of the files that its rows are. In a folder the files
are made at their full size before any tensor is there, and a unit writes to its places; how it is done in a bucket,
`release_bucket.py` says.

    <output>                                    the release, once it is whole
    <output>.<id>.weightbeam-tmp/               the same as it grows
        model-00001-of-00002.safetensors, …     at their full size
        config.json, tokenizer.json, …          the small files
        plan.json.gz, units/…                   removed before publishing
        weightbeam.json                         where it comes from, and digests; written last
"""

from __future__ import annotations

import abc
import contextlib
import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from weightbeam.formats.provenance import total
from weightbeam.formats.release import CARD, hash_each, remove_others, role_of
from weightbeam.formats.safetensors import INDEX, BoxRead, Tensor
from weightbeam.formats.safetensors.header import HeaderError, header_of
from weightbeam.formats.staging import MARKER, PLAN, FolderStaging, Staging
from weightbeam.formats.storage import LocalFolder, StorageError, Store, drop_pages, sync_folder
from weightbeam.formats.strict_json import read_json
from weightbeam.model_mappings.boxes import Box

RECORD = "weightbeam.json"
SMALL = "small.json"  # in the ledger: what the record says of the small files
HASH = re.compile("[0-9a-f]{64}")  # of a plan
DIGEST = re.compile("[0-9a-f]{1,32}")  # of a tensor
# what loaders take for a part of a model, beside its small files: weights, their indexes, an adapter's config
WEIGHTS = re.compile(
    r"[^/]*\.safetensors(\.index\.json)?|(pytorch_|adapter_)?model[^/]*\.bin|pytorch_model\.bin\.index\.json"
    r"|adapter_config\.json"
)

# a tensor whose `path` is its file's name in the release, a box of it, and its values
Rows = tuple[Tensor, Box, np.ndarray]


class IncompleteError(ValueError):
    """The units that are done don't make up the release."""


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

    def lay_out(self, files: Sequence[tuple[str, bytes, int]], small: Mapping[str, bytes]) -> None:
        """Makes the safetensors files at their full size, and the small ones."""
        for name, header, size in files:
            fd = os.open(self.checkpoint.path(name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                _write_all(fd, memoryview(header), 0)
                os.ftruncate(fd, size)
                # so that a full disk is known now; not every file system can
                with contextlib.suppress(OSError, AttributeError):
                    os.posix_fallocate(fd, 0, size)
                os.fsync(fd)
            finally:
                os.close(fd)
        remove_others(self.checkpoint, {*small, *(name for name, _, _ in files)})
        for name, data in small.items():
            path = Path(self.checkpoint.path(name))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def write_stretches(self, stretches: Iterable[tuple[str, int, memoryview]]) -> dict[str, Any]:
        """Writes to the places in the files."""
        by_file: dict[str, list[tuple[int, memoryview]]] = defaultdict(list)
        for name, offset, data in stretches:
            by_file[name].append((offset, data))
        for name, there in by_file.items():
            fd = os.open(self.checkpoint.path(name), os.O_WRONLY | os.O_CLOEXEC)
            try:
                for offset, data in sorted(there, key=lambda one: one[0]):
                    _write_all(fd, data, offset)
                os.fdatasync(fd)
                drop_pages(fd)
            finally:
                os.close(fd)
        return {}

    def seal(self, files: Iterable[tuple[str, bytes, int]], ledger: Mapping[int, Mapping[str, Any]]) -> None:
        """Makes sure that the files are as long as they should be, and durable."""
        for name, _, size in files:
            held = self.checkpoint.stat(name)
            if held is None or held.size != size:
                raise IncompleteError(
                    f"{self.checkpoint.path(name)} has {held.size if held else 0:,} bytes, expected {size:,}"
                )
        sync_folder(Path(self.checkpoint.url))

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


def record_of(release: Store) -> dict[str, Any] | None:
    """What a release says of where it comes from; None where it isn't whole, or isn't ours."""
    try:
        record = read_json(release, RECORD)
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def plan_hash_of(release: Store) -> str | None:
    """The hash of the plan that a release was made by; None where it isn't whole, or isn't ours."""
    record = record_of(release) or {}
    plan, digests, files = record.get("plan"), record.get("digests"), record.get("files", {})
    if not isinstance(digests, dict) or not all(_is_hash(DIGEST, digest) for digest in digests.values()):
        return None
    if not isinstance(files, dict):
        return None
    return plan if _is_hash(HASH, plan) else None


def _is_hash(form: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and bool(form.fullmatch(value))


def others_in(release: Store) -> list[str]:
    """The files in a release of ours that aren't its own, by its record and its index: someone put them there."""
    record = record_of(release) or {}
    files, digests = record.get("files"), record.get("digests")
    own = {RECORD, PLAN, *(files if isinstance(files, dict) else ())}
    tensors = digests.keys() if isinstance(digests, dict) else set[str]()
    if "files" not in record:  # of an earlier version
        own |= {file.name for file in release.list() if role_of(file.name) or file.name in (INDEX, "maxtext.yml")}
    if isinstance(release, LocalFolder):  # links and whatever else isn't a file, too
        paths = [path for path in release.folder.rglob("*") if path.is_symlink() or not path.is_dir()]
        names = sorted(str(path.relative_to(release.folder)) for path in paths)
    else:
        names = [file.name for file in release.list()]
    shards = _shards_by_index(release) if INDEX in own else None
    return [
        name
        for name in names
        if name not in own and not (_is_shard(release, name, tensors) if shards is None else name in shards)
    ]


def strays_in(release: Store) -> list[str]:
    """The same, of those only that loaders take for a part of the model: another one's tokenizer, more weights."""
    return [name for name in others_in(release) if WEIGHTS.fullmatch(name) or role_of(name)]


def _shards_by_index(release: Store) -> set[str]:
    try:
        return set(read_json(release, INDEX)["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()


def _is_shard(release: Store, name: str, tensors: Collection[str]) -> bool:
    """Whether a file holds tensors of the release, and nothing else."""
    try:
        file = release.stat(name) if name.endswith(".safetensors") else None
        return file is not None and all(tensor.name in tensors for tensor in header_of(release, file))
    except (OSError, HeaderError):
        return False


def whole_files(release: LocalFolder, beside: Collection[str] = ()) -> dict[str, bytes | Path]:
    """Every file of a release, or of a checkpoint, that is whole, by name: the small ones, and the paths of those that
    hold weights. Of a release whose record names its small files these, and what is there of `beside`.

    Raises:
      OSError: it isn't whole.
    """
    found, tensors = _read_files(release)
    if any(name.endswith(f"/{MARKER}") for name in found):  # of a checkpoint
        return found
    record = record_of(release) or {}
    _check_whole(release, record, found, tensors)
    if not (small := record.get("files")):
        return found
    kept = {*small, RECORD, *beside}
    return {name: data for name, data in found.items() if name in kept or name.endswith(".safetensors")}


def _read_files(release: LocalFolder) -> tuple[dict[str, bytes | Path], set[str]]:
    """Every file by name, small ones read, of others the path; and the names of the tensors that they hold."""
    found: dict[str, bytes | Path] = {}
    tensors: set[str] = set()
    for file in release.list():
        path = Path(release.path(file.name))
        if file.name.endswith(".safetensors"):
            try:
                tensors |= {tensor.name for tensor in header_of(release, file)}
            except HeaderError as e:
                raise StorageError(f"{release}: {e}") from e
            found[file.name] = path
        else:
            is_small = role_of(file.name) or "/" not in file.name
            found[file.name] = release.read(file.name) if is_small else path
    return found, tensors


def _check_whole(
    release: LocalFolder, record: Mapping[str, Any], found: Mapping[str, bytes | Path], tensors: Set[str]
) -> None:
    """Makes sure that the small files are those that the record names, and that every tensor of it is there."""
    digests = record.get("digests", {})
    small = record.get("files", {}).items()
    others = [name for name, digest in small if not _is_as_noted(name, found.get(name), digest)]
    if others or not digests or not digests.keys() <= tensors:
        missing = f" (missing or changed: {', '.join(others)})" if others else ""
        raise StorageError(f"{release}: isn't whole{missing}, and isn't published")


def _is_as_noted(name: str, data: bytes | Path | None, digest: str) -> bool:
    """Whether a small file is the one that the record names; the card may be written anew."""
    return isinstance(data, bytes) and (name == CARD or hashlib.sha256(data).hexdigest() == digest)


def write_unit(staging: ReleasePlace, unit: int, rows: Sequence[Rows], notes: Mapping[str, Any] | None = None) -> None:
    """Writes rows durably to their places, and enters the unit in the ledger; `notes` is what else its entry says."""
    staging.check()
    buffers = [
        (tensor, box, np.ascontiguousarray(values).reshape(-1).view(np.uint8).data) for tensor, box, values in rows
    ]
    stretches = [
        (tensor.path, offset, part)
        for tensor, box, buffer in buffers
        for offset, part in BoxRead(tensor, box).ranges(buffer)
    ]
    about = staging.write_stretches(stretches)
    shares: dict[str, int] = {}
    for tensor, box, buffer in buffers:
        shares[tensor.name] = shares.get(tensor.name, 0) + _digest(tensor, box, buffer)
    digests = {name: f"{share % (1 << 128):x}" for name, share in shares.items()}
    staging.enter(unit, {"digests": digests, **about, **(notes or {})})


def _digest(tensor: Tensor, box: Box, data: memoryview) -> int:
    """The share of some rows in their tensor's digest."""
    hashed = xxhash.xxh3_128(f"{tensor.name} {tensor.dtype.name} {[list(span) for span in box]}".encode())
    hashed.update(data)
    return hashed.intdigest()


def assemble(
    staging: ReleasePlace,
    units: int,
    files: Sequence[tuple[str, bytes, int]],
    record: Mapping[str, Any],
    overwrite: bool,
    gather: Callable[[Iterable[Mapping[str, Any]]], Mapping[str, bytes]] = lambda entries: {},
    conclude: Callable[[Mapping[int, Mapping[str, Any]]], Mapping[str, Any]] = lambda ledger: {},
) -> None:
    """Publishes a release whose units are done, with the files that `gather` makes of the ledger's entries, and what
    `conclude` adds to the record, which raises where they speak against it. Does nothing where that has happened.

    Raises:
      IncompleteError: units are missing, or a file isn't as long as it should be.
    """
    if not staging.exists() and staging.is_taken():
        return
    if not staging.is_complete():
        ledger = staging.ledger()
        if missing := set(range(units)) - set(ledger):
            if why := staging.why_missing(missing):  # an engine tries again what failed for it
                raise StorageError(why)
            raise IncompleteError(f"{len(missing)} of {units} units are missing, e.g. {sorted(missing)[:3]}")
        staging.check()
        concluded = conclude(ledger)
        staging.seal(files, ledger)
        staging.gather()
        for name, data in gather(ledger.values()).items():
            staging.put(name, data)
        about = {
            **record,
            **concluded,
            **staging.small_noted(),
            "digests": total(entry["digests"] for entry in ledger.values()),
        }
        staging.put(RECORD, json.dumps(about, indent=1).encode())
    staging.publish(overwrite)
