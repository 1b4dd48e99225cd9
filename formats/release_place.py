"""Where a release is written: which place an output names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weightbeam.formats.release_target import ReleaseFolder, ReleasePlace
from weightbeam.formats.storage import LocalFolder, StorageError, Store, open_store


def release_staging(output: str | Path | Store, plan: str = "plan") -> ReleasePlace:
    """The place of a release, by the plan with that hash: a folder or one in a bucket.

    Raises:
      StorageError: nothing can be written there.
    """
    if str(output).startswith("hf://"):
        raise StorageError(f"{output}: it can be written to a folder or to gs://bucket/folder, not to the hub")
    store: Any = open_store(output)
    if isinstance(store, LocalFolder):
        if not store.name:
            raise StorageError(f"{output}: is the root of the file system")
        return ReleaseFolder(store.parent, store.name, plan)
    from weightbeam.formats.release_bucket import ReleaseBucket  # only now: the clients take a while to import

    if not store.folder:
        raise StorageError(f"{output}: is a whole bucket; name a folder in it")
    return ReleaseBucket(store.parent, store.name, plan)
