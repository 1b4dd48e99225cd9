"""Where bytes lie: local folders, buckets (`gs://`) and the hub's repositories (`hf://`), behind one interface."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import cast

from weightbeam.formats.storage.local import (
    TEMPORARY,
    LocalFolder,
    check_locale,
    create_file,
    drop_pages,
    read_named,
    sync_folder,
    write_file,
)
from weightbeam.formats.storage.meant import hint
from weightbeam.formats.storage.store import (
    HUB,
    ByteRange,
    ChangedError,
    File,
    LeadsOutError,
    StorageError,
    Store,
    UnreachedError,
    branch_of,
    is_hub,
    read_whole,
    reason,
    repo_of,
    stretches,
)
from weightbeam.formats.text.endpoint import EndpointError, check_endpoint
from weightbeam.model_mappings import entry_points

__all__ = [
    "HUB", "TEMPORARY", "ByteRange", "ChangedError", "File", "LeadsOutError", "LocalFolder", "StorageError", "Store",
    "UnreachedError",
    "branch_of", "create_file", "drop_pages", "is_hub", "open_store", "read_named", "read_whole", "reason", "repo_of", "store_and_name", "store_to_write",
    "stretches", "sync_folder", "write_file",
]  # fmt: skip

_SLASHES = re.compile("(gs:|hf:)/?([^/].*)")  # a URL that lacks one, or both


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
        path = Path(os.path.expanduser(url))
        if url.startswith("~") and str(path).startswith("~"):  # as it stood; a folder of that name is ./~name
            raise StorageError(f"{url}: there is no user {path.parts[0][1:]}, in whose home folder that would be")
        if meant := _SLASHES.fullmatch(url):
            raise StorageError(f"{url}: did you mean {meant[1]}//{meant[2]}? A folder of that name is ./{url}")
        try:
            path = path.absolute()
        except FileNotFoundError as e:
            raise StorageError(f"{url}: the folder that this was begun in isn't there any more") from e
        check_locale(str(path))
        folder = LocalFolder(os.path.realpath(path) if ".." in path.parts else str(path))
        check_locale(folder.url)
        folder.given = url
        return folder
    if scheme == "gs":
        from weightbeam.formats.storage.bucket import Bucket  # only now: the clients take a while to import

        return Bucket(url.rstrip("/"))
    if scheme == "hf":
        try:
            check_endpoint(asked=True)
        except EndpointError as e:
            raise StorageError(str(e)) from e
        from weightbeam.formats.storage.hub import open_repository

        return open_repository(url.rstrip("/"))
    if store := _store_of_a_package(scheme, url.rstrip("/")):
        return store
    raise StorageError(
        f"{url}: {scheme}:// isn't supported; local folders, gs://bucket/folder and hf://organisation/model are{hint(url)}"
    )


def _store_of_a_package(scheme: str, url: str) -> Store | None:
    """The store of an installed package that has a scheme; None where none has it. Raises StorageError where it can't
    be loaded, or is no store.
    """
    entry = next((entry for entry in entry_points.entries(entry_points.STORES) if entry.name == scheme), None)
    if entry is None:
        return None
    try:
        made = cast(Callable[[str], object], entry_points.load(entry, "store"))(url)
    except entry_points.EntryPointError as e:
        raise StorageError(f"{url}: {e}") from e
    if not isinstance(made, Store):
        raise StorageError(
            f"{url}: {entry.value} should give a {Store.__module__}.Store, but gives {type(made).__name__}"
        )
    return made


def store_to_write(where: str | Path | Store) -> Store:
    """The store of a result.

    Raises:
      StorageError: see `open_store`; or results can't be staged there: a package's store is for sources.
    """
    store = open_store(where)
    if not store.stages:
        raise StorageError(f"{where}: can be read, but not written to; name a folder, or gs://bucket/folder")
    try:
        store.url.encode()
    except UnicodeEncodeError as e:
        raise StorageError(f"{os.fsencode(store.url)!r}: isn't UTF-8; choose another name") from e
    return store


def store_and_name(path: str) -> tuple[Store, str]:
    """The store of a file that `Store.path` named, and the file's name in it."""
    folder, _, name = path.rpartition("/")
    return open_store(folder or "/"), name
