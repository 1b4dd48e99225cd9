"""OCDBT databases: one for each attempt at a unit, and the merge that makes one checkpoint of those that count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorstore as ts

from formats.storage import Store

ATTEMPT = "ocdbt.process_"  # Orbax's name for a writer's database, below the item
CONFIG = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"}
CONTEXT = {"cache_pool#ocdbt": {"total_bytes_limit": 100_000_000}, "file_io_concurrency": {"limit": 16}}


def context() -> ts.Context:
    """What the databases of one reader, writer or merge share."""
    return ts.Context(CONTEXT)


def database(folder: Store) -> dict[str, Any]:
    """The OCDBT database in a folder, opened as Orbax opens it.

    Data files need no rename, since no one reads them before the manifest names them; the manifest is replaced atomically
    (google/orbax, checkpoint/orbax/checkpoint/_src/serialization/tensorstore_utils.py, 0.12.8).
    """
    base = folder.kvstore()
    data = {**base, "file_io_locking": {"mode": "non_atomic"}} if base["driver"] == "file" else base
    return {
        "driver": "ocdbt",
        "base": data,
        "manifest": base,
        "assume_config": True,
        "cache_pool": "cache_pool#ocdbt",
        "target_data_file_size": 2**31,
        "config": CONFIG,
    }


class IncompleteError(ValueError):
    """A merged database doesn't hold exactly the keys that it should."""


def merge(items: Store, folders: Iterable[Store], more: Iterable[tuple[str, bytes]], expected: Sequence[str]) -> None:
    """Merges the databases in `folders` below `items`, and the objects `more`, into the one of `items`, atomically.

    No array bytes are moved: the merged database refers to the others' files.

    Raises:
      IncompleteError: a key of `expected` is missing, one is there that shouldn't be, or two databases hold the same.
    """
    shared = context()
    transaction = ts.Transaction(atomic=True)
    merged = ts.KvStore.open(database(items), context=shared).result().with_transaction(transaction)
    children = [ts.KvStore.open(database(folder), context=shared).result() for folder in folders]
    counts = [child.list() for child in children]
    copies = [child.experimental_copy_range_to(merged) for child in children]
    for copy in copies:
        copy.result()
    writes = [merged.write(key, value) for key, value in more]
    for write in writes:
        write.result()
    held = [key.decode() for key in merged.list().result()]
    wanted = set(expected)
    missing, extra = wanted.difference(held), set(held) - wanted
    twice = sum(len(count.result()) for count in counts) + len(writes) - len(held)
    if missing or extra or twice:
        examples = sorted(missing or extra)[:3]
        raise IncompleteError(f"the units left {len(missing)} keys missing, {len(extra)} extra and {twice} written twice, e.g. {examples}")
    transaction.commit_sync()
