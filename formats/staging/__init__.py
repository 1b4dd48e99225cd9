"""Where what is written lies until it is published: beside its place in a folder, or in a bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weightbeam.formats.staging.bucket import BucketStaging
from weightbeam.formats.staging.folder import REPLACED, FolderStaging, holds_plan
from weightbeam.formats.staging.ledger import BYTES, IncompleteError
from weightbeam.formats.staging.staging import (
    ASIDE,
    ATTEMPT,
    GROWING,
    ITEMS,
    JOB,
    LOCK,
    MARKER,
    PLAN,
    UNPACKED,
    Staging,
    TakenOverError,
)
from weightbeam.formats.storage import LocalFolder, StorageError, Store, is_hub, store_to_write

__all__ = [
    "ASIDE", "ATTEMPT", "BYTES", "GROWING", "ITEMS", "JOB", "LOCK", "MARKER", "PLAN", "REPLACED", "UNPACKED",
    "BucketStaging", "FolderStaging", "IncompleteError", "Staging", "TakenOverError", "holds_plan", "staging_at",
]  # fmt: skip


def staging_at(output: str | Path | Store, step: int, plan_hash: str = "plan") -> Staging:
    """The place of a conversion into `output`, by the plan with that hash.

    Raises:
      StorageError: nothing can be written there.
    """
    if is_hub(output):
        raise StorageError(
            f"{output}: a checkpoint can't be written to the hub, only to a folder or to gs://bucket/folder"
        )
    store: Any = store_to_write(output)
    if isinstance(store, LocalFolder):
        place = FolderStaging(store, str(step), plan_hash)
        place.check_name()
        return place
    return BucketStaging(store, str(step), plan_hash)
