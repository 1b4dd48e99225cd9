"""Orbax checkpoints: what they say of themselves, and how they are read."""

from weightbeam.formats.orbax.metadata import (
    ARRAY_METADATAS,
    BESIDE,
    CHECKPOINT_METADATA,
    METADATA,
    STEP,
    STRINGS,
    TEXT,
    beside_faults,
    check_beside,
    custom_metadata,
    files_beside,
    is_checkpoint,
    item_handler,
    item_metadata,
    leaves,
    plan_hash_of,
    read_tree,
    record_of,
    unknown_beside,
)
from weightbeam.formats.orbax.others import others_in
from weightbeam.formats.orbax.reading import (
    FOREIGN,
    MODEL_ITEM,
    CheckpointArray,
    check_committed,
    check_files,
    check_memory,
    find_damage,
    find_items,
    grains,
    open_arrays,
    open_stores,
    read_arrays,
    read_descriptions,
    step_of,
)

__all__ = [
    "ARRAY_METADATAS", "BESIDE", "CHECKPOINT_METADATA", "FOREIGN", "METADATA", "MODEL_ITEM", "STEP", "STRINGS", "TEXT",
    "CheckpointArray", "beside_faults", "check_beside", "check_committed", "check_files", "check_memory",
    "custom_metadata", "files_beside", "find_damage", "find_items", "grains", "is_checkpoint", "item_handler",
    "item_metadata", "leaves", "open_arrays", "open_stores", "others_in", "plan_hash_of", "read_arrays",
    "read_descriptions", "read_tree", "record_of", "step_of", "unknown_beside",
]  # fmt: skip
