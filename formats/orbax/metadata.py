"""What an Orbax checkpoint says of itself: its tree, its custom metadata, where it comes from; written and read."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weightbeam.formats.provenance import RECORD
from weightbeam.formats.staging import MARKER
from weightbeam.formats.storage import Store
from weightbeam.formats.strict_json import parse_json
from weightbeam.formats.zarr import ArraySpec, Format

# the scalar that MaxText's TrainState keeps beside the parameters
STEP = ArraySpec("step", (), np.dtype(np.int64), (), ())
METADATA, CHECKPOINT_METADATA = "_METADATA", "_CHECKPOINT_METADATA"
# of an item: what its arrays were, and the leaves that are texts
ARRAY_METADATAS, STRINGS = "array_metadatas", "_strings.json"
HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"


def tree_metadata(
    specs: Sequence[ArraySpec], format: Format, bare: bool = False, tree: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """`_METADATA`: every array as a numpy array, so that no device mesh is baked in."""

    def entry(path: tuple[str, ...], kind: str, skip: bool = False) -> tuple[str, Any]:
        keys = [{"key": key, "key_type": 2} for key in path]  # 2: a dict's key
        return str(path), {"key_metadata": keys, "value_metadata": {"value_type": kind, "skip_deserialize": skip}}

    state = [] if bare else [entry(("opt_state",), "Dict", skip=True), entry((STEP.key,), "scalar")]
    return {
        "tree_metadata": tree or dict([*state, *(entry(tuple(spec.key.split(".")), "np.ndarray") for spec in specs)]),
        "use_ocdbt": format.use_ocdbt,
        "use_zarr3": format.use_zarr3,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def checkpoint_metadata(custom: Mapping[str, Any], handlers: Mapping[str, Any]) -> dict[str, Any]:
    now = time.time_ns()
    return {
        "item_handlers": {"items": HANDLER, **handlers},
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": now,
        "commit_timestamp_nsecs": now,
        "custom_metadata": dict(custom),
    }


def custom_metadata(step: Store) -> dict[str, Any]:
    """A step's custom metadata; empty where there is none, or none that can be read."""
    try:
        custom = parse_json(step.read(CHECKPOINT_METADATA))["custom_metadata"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return custom if isinstance(custom, dict) else {}


def item_metadata(items: Store) -> dict[str, Any]:
    """The custom metadata of an item's step; the item's own where it was copied without its step."""
    return custom_metadata(items.parent) or custom_metadata(items)


def record_of(items: Store) -> dict[str, Any]:
    """Where a checkpoint comes from, in full; empty where nothing says it, as where the item was copied without its
    step.
    """
    try:
        record = parse_json(items.parent.read(RECORD))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def plan_hash_of(step: Store) -> str | None:
    """The hash of the plan that a complete checkpoint was made by; None where it isn't complete, or isn't ours."""
    if not step.exists(MARKER):
        return None
    about = custom_metadata(step).get("weightbeam")
    return about.get("plan") if isinstance(about, dict) else None


def is_checkpoint(step: Store) -> bool:
    """Whether a step is an Orbax checkpoint, ours or anyone's, whole or damaged: something that only a checkpoint has
    is there.
    """
    if any(step.exists(name) for name in (MARKER, CHECKPOINT_METADATA, METADATA)):
        return True
    return any((step / name).exists(METADATA) for name in step.folders())
