"""What an Orbax checkpoint says of itself: its tree, its custom metadata, where it comes from; written and read."""

from __future__ import annotations

import functools
import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from weightbeam.formats.orbax.zarr import ArraySpec, Format
from weightbeam.formats.record.provenance import RECORD, checked
from weightbeam.formats.staging import MARKER
from weightbeam.formats.storage import ChangedError, File, StorageError, Store, reason
from weightbeam.formats.storage.strict_json import Budget, JsonError, read_json
from weightbeam.formats.storage.strict_yaml import MAX_YAML
from weightbeam.model_mappings.maxtext_config import FILE as MAXTEXT
from weightbeam.model_mappings.trust import distrusted

# the scalar that MaxText's TrainState keeps beside the parameters
STEP = ArraySpec("step", (), np.dtype(np.int64), (), ())
METADATA, CHECKPOINT_METADATA = "_METADATA", "_CHECKPOINT_METADATA"
# of an item: what its arrays were, and the leaves that are texts
ARRAY_METADATAS, STRINGS = "array_metadatas", "_strings.json"
# of a step, beside its items: what its release and MaxText's configuration were, and all that says what it is
# with the most bytes of each, which is read whole: a release's small files have 256 MiB
MAX_BESIDE = {"release.zip": 288 << 20, MAXTEXT: MAX_YAML}
BESIDE = tuple(MAX_BESIDE)
STEP_FILES = (CHECKPOINT_METADATA, RECORD, *BESIDE)
TEXT = "string"  # the value_type of leaves that lie in a file of their own
MAX_LEAVES = 30_000  # of a tree; the largest models have some ten thousand, with an optimizer's
HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"


def read_of_step(step: Store, name: str) -> Any:
    """A JSON file of a step, or of an item of it; all of them together are bounded.

    Raises:
      OSError: it isn't there, or can't be read.
      JsonError: it isn't JSON that is meant.
    """
    return read_json(step, name, _budget(step.url))


@functools.lru_cache(maxsize=64)
def _budget(step: str) -> Budget:
    """What the JSON files of a step may have together."""
    return Budget()


def tree_metadata(
    specs: Sequence[ArraySpec], format: Format, bare: bool, tree: Mapping[str, Any] | None
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


def stores_all(tree: Mapping[str, Any]) -> bool:
    """Whether all chunks of a tree's arrays are stored. Orbax leaves chunks of zeros out where it doesn't say so
    (orbax-checkpoint, _src/metadata/tree.py, `store_array_data_equal_to_fill_value`, 0.12.8).
    """
    return bool(tree.get("store_array_data_equal_to_fill_value"))


def read_tree(items: Store) -> dict[str, Any]:
    """`_METADATA`, as far as its form goes: what `leaves` takes.

    Raises:
      StorageError: it can't be read, or isn't that.
    """
    try:
        tree = read_of_step(items.parent, f"{items.name}/{METADATA}")
        if not isinstance(tree, dict) or not isinstance(entries := tree.get("tree_metadata"), dict):
            raise JsonError("has no tree_metadata")
        if len(entries) > MAX_LEAVES:
            raise JsonError(f"names {len(entries):,} leaves; more than {MAX_LEAVES:,} can't be meant")
        keys = [".".join(path) for path in leaves(tree)]
    except ChangedError:
        raise
    except (OSError, JsonError) as e:
        raise StorageError(f"{items.path(METADATA)}: {reason(e) if isinstance(e, OSError) else e}") from e
    except (KeyError, TypeError, AttributeError) as e:
        raise StorageError(f"{items.path(METADATA)}: an entry isn't of Orbax's form: {type(e).__name__}: {e}") from e
    if len(set(keys)) < len(keys):
        twice = Counter(keys).most_common(1)[0][0]
        raise StorageError(f"{items.path(METADATA)}: two leaves have the key {twice[:80]!r}")
    return tree


def path_of(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """The path of a leaf, by its entry of `tree_metadata`."""
    return tuple(str(key["key"]) for key in entry["key_metadata"])


def leaves(metadata: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The paths of the arrays of a tree; leaves that hold none (empty dicts, None, texts) left out."""
    found = []
    for entry in metadata["tree_metadata"].values():
        if not entry["value_metadata"].get("skip_deserialize") and entry["value_metadata"].get("value_type") != TEXT:
            found.append(path_of(entry))
    return found


def _said(step: Store, field: str) -> dict[str, Any]:
    """An object of a step's `_CHECKPOINT_METADATA`; empty where there is none, or none that can be read."""
    try:
        found = read_of_step(step, CHECKPOINT_METADATA)[field]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def custom_metadata(step: Store) -> dict[str, Any]:
    """A step's custom metadata; empty where there is none, or none that can be read."""
    custom = _said(step, "custom_metadata")
    return {**custom, "weightbeam": distrusted(custom["weightbeam"])} if "weightbeam" in custom else custom


def item_metadata(items: Store) -> dict[str, Any]:
    """The custom metadata of an item's step; the item's own where it was copied without its step."""
    return custom_metadata(items.parent) or custom_metadata(items)


def item_handlers(step: Store) -> dict[str, Any]:
    """What Orbax calls the handler of each item of a step; empty where nothing says it."""
    return _said(step, "item_handlers")


def item_handler(items: Store) -> str:
    """What Orbax calls the handler of one item; empty where nothing says it."""
    handler = item_handlers(items.parent).get(items.name)
    return handler if isinstance(handler, str) else ""


def record_of(items: Store) -> dict[str, Any]:
    """Where a checkpoint comes from, in full; empty where nothing says it, as where the item was copied without its
    step.

    Raises:
      StorageError: what should say it can't be read.
    """
    try:
        return checked(read_of_step(items.parent, RECORD))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except ChangedError:
        raise
    except (OSError, JsonError) as e:
        raise StorageError(
            f"{items.parent.path(RECORD)}: {reason(e) if isinstance(e, OSError) else e}. It says what was written, so the "
            "checkpoint may be damaged: take a copy of it; or move this file away, to go on without what it says"
        ) from e


def files_beside(step: Store) -> list[str]:
    """Which of the small files lie beside a checkpoint.

    Raises:
      StorageError: what has the name of one is no file, or is larger than can be meant.
    """
    for name in BESIDE:
        step.check_regular(name)
    found = [file for name in BESIDE if (file := step.stat(name))]
    for file in found:
        check_length(step, file, MAX_BESIDE[file.name])
    return [file.name for file in found]


def check_length(folder: Store, file: File, most: int) -> None:
    """Makes sure that a file, which is read whole, is no larger than can be meant: one that is sparse takes no disk.

    Raises:
      StorageError: it is.
    """
    if file.size > most:
        raise StorageError(
            f"{folder.path(file.name)}: has {file.size:,} bytes, more than {most:,}; that can't be meant"
        )


def hash_beside(step: Store) -> dict[str, str]:
    """The sha256 of each of the small files that lie beside a checkpoint, for its record.

    Raises:
      StorageError: what has the name of one is no file.
    """
    return {name: hashlib.sha256(step.read(name)).hexdigest() for name in files_beside(step)}


def _known_beside(record: Mapping[str, Any]) -> dict[str, str]:
    """The sha256 that a record has of each of the small files beside its checkpoint; none in those of earlier versions."""
    files = record.get("files")
    known = {name: files.get(name) for name in BESIDE} if isinstance(files, dict) else {}
    return {name: digest for name, digest in known.items() if isinstance(digest, str)}


def beside_faults(step: Store, record: Mapping[str, Any], names: Sequence[str] = BESIDE) -> Iterator[tuple[str, str]]:
    """Which of the small files that lie beside a checkpoint aren't what its record says, and what to do."""
    known = _known_beside(record)
    found = hash_beside(step) if known else {}
    for name in names:
        if name in known and found.get(name) != known[name]:
            what = f"isn't what {RECORD} says was written, by its sha256" if name in found else "is gone"
            way_on = f"if that is meant, take its line out of {RECORD}"
            yield name, f"{what}: the checkpoint is damaged, or somebody edited it. Take a copy of it, or, {way_on}"


def unknown_beside(step: Store, record: Mapping[str, Any]) -> tuple[str, ...]:
    """The small files that lie beside a checkpoint and that its record, of an earlier version, can't judge."""
    known = _known_beside(record)
    return tuple(name for name in files_beside(step) if name not in known)


def check_beside(step: Store, record: Mapping[str, Any], *names: str) -> None:
    """Compares small files that lie beside a checkpoint with its record, as far as that knows them.

    Raises:
      StorageError: one isn't what was written.
    """
    if faults := [f"{step.path(name)}: {what}" for name, what in beside_faults(step, record, names or BESIDE)]:
        raise StorageError("\n".join(faults))


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


def checkpoint_around(folder: Store) -> str:
    """The URL of the step, or the item, that a folder is or lies in; empty where it is none and lies in none."""
    for _ in range(3):  # no further down can it be an item, or a part of one
        if any(folder.exists(name) for name in (METADATA, CHECKPOINT_METADATA)):
            return folder.url
        if "/" not in folder.url.rpartition("://")[2].strip("/"):
            break
        folder = folder.parent
    return ""
