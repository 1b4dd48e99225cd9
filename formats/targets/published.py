"""A release of ours that is published: what it says of where it comes from, and which of its files are its own."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Collection, Mapping, Set
from pathlib import Path
from typing import Any

import google_crc32c

from weightbeam.formats.adapters.adapter import WEIGHTS as ADAPTER
from weightbeam.formats.record.provenance import checked
from weightbeam.formats.release.files import CARD, role_of
from weightbeam.formats.safetensors import INDEX, SINGLE, Shard
from weightbeam.formats.safetensors.folder import open_shard
from weightbeam.formats.safetensors.header import HeaderError, header_of
from weightbeam.formats.staging import MARKER, PLAN, holds_plan
from weightbeam.formats.staging.folder import HASH
from weightbeam.formats.storage import File, LocalFolder, StorageError, Store, open_store
from weightbeam.formats.storage.store import as_base64
from weightbeam.formats.storage.strict_json import read_json

RECORD = "weightbeam.json"
MOST_READ = 64 << 20  # of a file, to tell what it holds
DIGEST = re.compile("[0-9a-f]{1,32}")  # of a tensor
# what loaders take for a part of a model, beside its small files: weights, their indexes, an adapter's config, and how
# transformers generates (5.23, generation/utils.py, `load_custom_generate`)
WEIGHTS = re.compile(
    r"[^/]*\.safetensors(\.index\.json)?|(pytorch_|adapter_)?model[^/]*\.bin|pytorch_model\.bin\.index\.json"
    r"|adapter_config\.json|custom_generate/[^/]*\.py"
)
# of other loaders and frameworks
FORMER = re.compile(r"consolidated[^/]*\.pth|tf_model[^/]*\.h5|flax_model[^/]*\.msgpack|params\.json")


def record_of(release: str | Store) -> dict[str, Any]:
    """What a release says of where it comes from, as `checked` has it; empty where it isn't whole, or isn't ours."""
    try:
        return checked(read_json(open_store(release), RECORD))
    except (OSError, ValueError):
        return {}


def plan_hash_of(release: Store) -> str | None:
    """The hash of the plan that a release was made by; None where it isn't whole, or isn't ours."""
    record = record_of(release)
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
    record = record_of(release)
    files, digests = record.get("files"), record.get("digests")
    own = {RECORD, *([PLAN] if holds_plan(release) else []), *(files if isinstance(files, dict) else ())}
    tensors = digests.keys() if isinstance(digests, dict) else set[str]()
    if "files" not in record:  # of an earlier version
        own |= {file.name for file in release.list() if role_of(file.name) or file.name in (INDEX, "maxtext.yml")}
    shards = _shards_by_index(release) if INDEX in own else None
    return [
        name
        for name in release.names()
        if name not in own and not (_is_single(release, name, tensors) if shards is None else name in shards)
    ]


def changed_in(release: Store) -> list[str]:
    """The small files of a release of ours that aren't as its record says: others have changed them since.

    Raises:
      StorageError: one can't be read.
    """
    files, found = record_of(release).get("files"), []
    for name, digest in files.items() if isinstance(files, dict) else ():
        with contextlib.suppress(FileNotFoundError):
            if hashlib.sha256(release.read(name)).hexdigest() != digest:
                found.append(name)
    return found


def contents_of(release: Store, beside: Collection[str]) -> dict[str, str]:
    """What tells what the files of weights hold that lie in a release, and some files beside them, by name; the same after a
    copy. `82944 crc32c sV2…`: the size, and a checksum of all bytes, where a bucket says it or a file is small; else
    `9663676416 blocks 3f…`, a hash of the header and of bytes of 64 tensors.
    """
    return {
        file.name: _content(release, file)
        for file in release.list(recursive=False)
        if file.name.endswith(".safetensors") or file.name in beside
    }


def _content(release: Store, file: File) -> str:
    if file.crc32c is None and file.size > MOST_READ and file.name.endswith(".safetensors"):
        shard = open_shard(release, file.name)
        return f"{file.size} blocks {shard.content if isinstance(shard, Shard) else shard}"
    return f"{file.size} crc32c {file.crc32c or as_base64(google_crc32c.value(release.read(file.name)))}"


def replaced_in(release: Store, contents: Any) -> list[str]:
    """The files that hold something else than `contents_of` said; of a large one that was copied from a bucket into a
    folder, or back, the size alone tells.
    """
    if not isinstance(contents, dict):
        return []
    found = []
    for name, now in contents_of(release, contents).items():
        (size, kind, what), said = now.split(" ", 2), str(contents.get(name, now)).split(" ", 2)
        if said[0] != size or (said[1:2] == [kind] and said[2:] != [what]):
            found.append(name)
    return found


def missing_in(release: Store) -> list[str]:
    """The files that a release's record and its index name, and that aren't there; none of what isn't ours."""
    record, there = record_of(release), {*release.names()}
    files = record.get("files")
    named = [*files] if isinstance(files, dict) else []
    if named:
        named += sorted(_shards_by_index(release)) if INDEX in named else [ADAPTER if ADAPTER in there else SINGLE]
    return [name for name in named if name not in there]


def strays_in(release: Store) -> list[str]:
    """The files in a release that aren't its own, and that some loader takes for a part of the model: another one's
    tokenizer, more weights.
    """
    return [name for name in others_in(release) if WEIGHTS.fullmatch(name) or FORMER.fullmatch(name) or role_of(name)]


def _shards_by_index(release: Store) -> set[str]:
    try:
        return set(read_json(release, INDEX)["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()


def _is_single(release: Store, name: str, tensors: Collection[str]) -> bool:
    """Whether a file is the one that holds all of a release without an index: by its name, since a copy beside it has
    the same tensors.
    """
    try:
        file = release.stat(name) if name in (SINGLE, ADAPTER) else None
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
    record = record_of(release)
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
