"""Where bytes lie: local folders, buckets (`gs://`) and the hub's repositories (`hf://`), behind one interface."""

from __future__ import annotations

import os
from pathlib import Path

from weightbeam.formats.storage.local import (
    TEMPORARY,
    LocalFolder,
    create_file,
    drop_pages,
    read_named,
    sync_folder,
    write_file,
)
from weightbeam.formats.storage.meant import hint
from weightbeam.formats.storage.store import (
    ByteRange,
    File,
    LeadsOutError,
    StorageError,
    Store,
    read_whole,
    reason,
    stretches,
)

__all__ = [
    "TEMPORARY",
    "ByteRange",
    "File",
    "LeadsOutError",
    "LocalFolder",
    "StorageError",
    "Store",
    "create_file",
    "drop_pages",
    "open_store",
    "read_named",
    "read_whole",
    "reason",
    "store_and_name",
    "stretches",
    "sync_folder",
    "write_file",
]  # fmt: skip


def open_store(where: str | Path | Store) -> Store:
    """The store that a URL names; a path without a scheme is a local folder, and is made absolute: workers may run
    elsewhere.

    `..` is resolved as the system does it, links and all: TensorStore takes none.

    Nothing is read, but for a hub's revision, which is resolved to a commit here, once.

    Raises:
      StorageError: there is no such store, or the hub has no such revision.
    """
    if isinstance(where, Store):
        return where
    url = str(where)
    scheme, separator, _ = url.partition("://")
    if not separator:
        path = Path(url).expanduser().absolute()
        folder = LocalFolder(os.path.realpath(path) if ".." in path.parts else str(path))
        folder.given = url
        return folder
    if scheme == "gs":
        from weightbeam.formats.storage.bucket import Bucket  # only now: the clients take a while to import

        return Bucket(url.rstrip("/"))
    if scheme == "hf":
        from weightbeam.formats.storage.hub import open_repository

        return open_repository(url.rstrip("/"))
    raise StorageError(
        f"{url}: {scheme}:// isn't supported; local folders, gs://bucket/folder and hf://organisation/model are{hint(url)}"
    )


def store_and_name(path: str) -> tuple[Store, str]:
    """The store of a file that `Store.path` named, and the file's name in it."""
    folder, _, name = path.rpartition("/")
    return open_store(folder or "/"), name
