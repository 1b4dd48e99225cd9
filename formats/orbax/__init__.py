"""Orbax checkpoints: what they say of themselves, how they are written and read."""

from weightbeam.formats.orbax.metadata import (
    ARRAY_METADATAS,
    CHECKPOINT_METADATA,
    METADATA,
    STEP,
    STRINGS,
    custom_metadata,
    is_checkpoint,
    item_metadata,
    plan_hash_of,
    record_of,
)
from weightbeam.formats.orbax.reading import (
    MODEL_ITEM,
    CheckpointArray,
    check_committed,
    find_damage,
    find_items,
    open_arrays,
    read_arrays,
)
from weightbeam.formats.orbax.writing import SEEN, Contents, assemble, publish, write_unit

__all__ = [
    "ARRAY_METADATAS",
    "CHECKPOINT_METADATA",
    "METADATA",
    "MODEL_ITEM",
    "SEEN",
    "STEP",
    "STRINGS",
    "CheckpointArray",
    "Contents",
    "assemble",
    "check_committed",
    "custom_metadata",
    "find_damage",
    "find_items",
    "is_checkpoint",
    "item_metadata",
    "open_arrays",
    "plan_hash_of",
    "publish",
    "read_arrays",
    "record_of",
    "write_unit",
]  # fmt: skip
