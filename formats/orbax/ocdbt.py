"""OCDBT databases: one for each attempt at a unit, and the merge that makes one checkpoint of those that count."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import tensorstore as ts

from weightbeam.formats.heaps import trim_heaps
from weightbeam.formats.staging import ATTEMPT as ATTEMPT
from weightbeam.formats.staging import IncompleteError
from weightbeam.formats.storage import StorageError, Store

MERGE_BATCH = 4096  # databases that are merged in one transaction; each takes some 30 KiB
LIST_BATCH = 100_000  # keys that are listed at a time
MANIFEST = "manifest.ocdbt"  # of a folder that is a database
CONFIG = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"}
CONTEXT = {"cache_pool#ocdbt": {"total_bytes_limit": 100_000_000}, "file_io_concurrency": {"limit": 16}}


def context() -> ts.Context:
    """What the databases of one reader, writer or merge share."""
    return ts.Context(CONTEXT)


def brief(error: Exception) -> str:
    """TensorStore's message without the notes about its own source."""
    return str(error).partition(" [source locations=")[0]


def database(folder: Store) -> dict[str, Any]:
    """The OCDBT database in a folder, to be read: anyone's, with the settings that its manifest tells.

    Data files need no rename, since no one reads them before the manifest names them (google/orbax,
    checkpoint/orbax/checkpoint/_src/serialization/tensorstore_utils.py, 0.12.8); what is copied from one database to
    another one needs the same in both.
    """
    base = folder.kvstore()
    data = {**base, "file_io_locking": {"mode": "non_atomic"}} if base["driver"] == "file" else base
    return {"driver": "ocdbt", "base": data, "manifest": base, "cache_pool": "cache_pool#ocdbt"}


def stored_in(items: Store, use_ocdbt: bool) -> dict[str, Any]:
    """The key-value store that the arrays of an item lie in, to be read: one database, or its files."""
    return database(items) if use_ocdbt else items.kvstore()


def written_database(folder: Store, manifest: Store | None = None) -> dict[str, Any]:
    """The OCDBT database in a folder, to be written as Orbax writes it; its manifest, which is replaced atomically, may
    lie in another one.
    """
    return {
        **database(folder),
        **({} if manifest is None else {"manifest": manifest.kvstore()}),
        "assume_config": True,
        "target_data_file_size": 2**31,
        "config": CONFIG,
    }


def read_small(folder: Store, keys: Sequence[str], most: int) -> list[bytes]:
    """The values of keys of a database, each of fewer than `most` bytes.

    Raises:
      StorageError: one isn't there, has more, or can't be read.
    """
    try:
        store = ts.KvStore.open(database(folder), context=context()).result()
        # a value is read whole, however long; that one has a byte there is asked first
        beyond = [store.read(key, byte_range=slice(most - 1, most)) for key in keys]
        for key, read in zip(keys, beyond, strict=True):
            try:
                what = "is missing" if read.result().state == "missing" else f"has more than {most - 1:,} bytes"
            except ValueError as e:
                if "OUT_OF_RANGE" not in str(e):
                    raise
            else:
                raise StorageError(f"{folder}: {key} {what}")
        return [read.result().value for read in [store.read(key) for key in keys]]
    except ValueError as e:
        raise StorageError(f"{folder}: its database can't be read: {brief(e)}") from e


def merge(
    items: Store,
    databases: Sequence[Store],
    objects: Iterable[tuple[str, bytes]],
    expected: Iterable[tuple[str, Iterable[str]]],
    manifest: Store | None = None,
) -> None:
    """Merges databases below `items`, and objects, into the one of `items`. No array bytes are moved: it refers to the
    others' files.

    So many databases at a time, atomically; one that was stopped is merged anew, which changes nothing. Then every key
    is checked.

    Args:
      items: what holds the databases, and will be one.
      databases: in any order.
      objects: keys and values that are in none of them.
      expected: for each folder of the result, such as an array's, its keys. All keys are in one of them.
      manifest: where the manifest of the result is written, if not in `items`.

    Raises:
      IncompleteError: a key of `expected` is missing, one is there that shouldn't be, or two databases hold the same.
    """
    count = 0
    for start in range(0, len(databases), MERGE_BATCH):
        count += _copy(written_database(items, manifest), databases[start : start + MERGE_BATCH])
        trim_heaps()
    merged = ts.KvStore.open(written_database(items, manifest), context=context()).result()
    with ts.Transaction(atomic=True) as transaction:
        writes = [merged.with_transaction(transaction).write(key, value) for key, value in objects]
        for write in writes:
            write.result()
    _check(merged, count + len(writes), expected)


def _copy(merged_at: dict[str, Any], databases: Sequence[Store]) -> int:
    """Has a database refer to all that is in others, which lie below it; returns how many keys these have."""
    shared = context()  # of these alone: it remembers every database that was opened in it
    with ts.Transaction(atomic=True) as transaction:
        merged = ts.KvStore.open(merged_at, context=shared).result().with_transaction(transaction)
        children = [ts.KvStore.open(database(folder), context=shared).result() for folder in databases]
        for copy in [child.experimental_copy_range_to(merged) for child in children]:
            copy.result()
        return sum(len(held.result()) for held in [child.list() for child in children])


def check(items: Store, count: int, expected: Iterable[tuple[str, Iterable[str]]]) -> None:
    """Makes sure that a database has exactly these keys, `count` in all; see `merge`.

    Raises:
      IncompleteError: it hasn't.
      ValueError: it can't be read.
    """
    _check(ts.KvStore.open(database(items), context=context()).result(), count, expected)


def _check(merged: ts.KvStore, count: int, expected: Iterable[tuple[str, Iterable[str]]]) -> None:
    """Each folder must hold its keys and no others. If as many were merged as are expected, then none came twice, and
    none lies elsewhere.
    """
    folders, total = set(), 0
    for folder, names in expected:
        keys = sorted(name.encode() for name in names)
        bounds = [f"{folder}/".encode(), *keys[LIST_BATCH::LIST_BATCH], f"{folder}0".encode()]  # "0" comes after "/"
        for start, (low, high) in enumerate(itertools.pairwise(bounds)):
            wanted = keys[start * LIST_BATCH : (start + 1) * LIST_BATCH]
            held = merged.list(ts.KvStore.KeyRange(low, high)).result()
            if sorted(held) != wanted:
                missing, extra = set(wanted).difference(held), set(held).difference(wanted)
                example = sorted(missing or extra)[0].decode()
                raise IncompleteError(
                    f"the units left {len(missing)} keys missing and {len(extra)} extra, e.g. {example}"
                )
        folders.add(folder.encode())
        total += len(keys)
    if total != count:
        extra = [key.decode() for key in merged.list().result() if key.partition(b"/")[0] not in folders]
        raise IncompleteError(
            f"the units left {len(extra)} keys extra and {max(0, count - total - len(extra))} written twice, e.g. {extra[:1]}"
        )
