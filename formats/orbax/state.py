"""What a checkpoint holds beside the values of its arrays, as a copy of it needs it.

    items/_METADATA            the tree: the kind of each key (dict or sequence), leaves without an array (None, empty dicts)
    items/_sharding            by array the mesh that it lay on, and its partition spec
    items/array_metadatas/     by array what it was before it became numbers: of a random key its implementation
    items/<array>/zarr.json    how its chunks are stored
    iter/, metrics/, …         other items of the step, none of them arrays

(google/orbax, checkpoint/orbax/checkpoint/_src/metadata/{tree,sharding,array_metadata_store}.py, 0.12.8)
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from weightbeam.formats.orbax import (
    ARRAY_METADATAS,
    CHECKPOINT_METADATA,
    FOREIGN,
    METADATA,
    STRINGS,
    TEXT,
    read_descriptions,
)
from weightbeam.formats.orbax.metadata import item_handlers, path_of, read_of_step
from weightbeam.formats.orbax.source import OrbaxCheckpoint
from weightbeam.formats.orbax.zarr import DESCRIPTIONS
from weightbeam.formats.staging import MARKER
from weightbeam.formats.storage import StorageError, Store, open_store
from weightbeam.formats.storage.strict_json import Budget, parse_json

SHARDING = "_sharding"
TEXT_IS = "the text"  # how what a text says begins
LARGEST, MOST = 64 << 20, 256 << 20  # bytes of a file of another item that is copied, and of all of them
MOST_FILES = 50_000  # of other items: a data iterator has one of each host

Partition = tuple[tuple[str, ...], ...]  # the mesh axes of each axis of an array


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """All of it, as JSON can say it.

    Attributes:
      partitions: by key, the mesh axes of each axis of the array.
      extras: by key, what `array_metadatas` says of the array besides its chunks.
      zarr: by key, the metadata of the array's chunks, verbatim.
      strings: `_strings.json`, the leaves that are texts; empty where there are none.
      files: files of other items, `iter/process_0.json`, and their bytes.
      handlers: what Orbax calls the handlers of the items.
    """

    partitions: Mapping[str, Partition] = dataclasses.field(default_factory=dict)
    extras: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    zarr: Mapping[str, str] = dataclasses.field(default_factory=dict)
    strings: str = ""
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    handlers: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return vars(self) | {"files": {name: base64.b64encode(data).decode() for name, data in self.files.items()}}

    @classmethod
    def from_json(cls, staged: Mapping[str, Any]) -> Surroundings:
        """What `to_json` made."""
        partitions = {key: tuple(map(tuple, axes)) for key, axes in staged["partitions"].items()}
        files = {name: base64.b64decode(data) for name, data in staged["files"].items()}
        return cls(**{**staged, "partitions": partitions, "files": files})


def surroundings(checkpoint: OrbaxCheckpoint) -> Surroundings:
    """What a checkpoint holds beside its arrays.

    Raises:
      StorageError: it can't be read, or is too large to be looked after.
    """
    items = open_store(checkpoint.root)
    return Surroundings(
        _partitions(items),
        _extras(items),
        _zarr(checkpoint, items),
        _read(items, STRINGS).decode() if items.exists(STRINGS) else "",
        dict(_other_items(items)),
        {name: handler for name, handler in item_handlers(items.parent).items() if name != items.name},
    )


def _partitions(items: Store) -> dict[str, Partition]:
    """By key, the partition spec that Orbax noted; of arrays whose sharding has none nothing."""
    if not items.exists(SHARDING):
        return {}
    found, budget = {}, Budget()
    for name, text in _json(items, SHARDING).items():
        about = parse_json(str(text).encode(), budget=budget, file=name)
        if about.get("sharding_type") == "NamedSharding":
            axes = [[axis] if isinstance(axis, str) else axis or [] for axis in about.get("partition_spec", ())]
            found[base64.b64decode(name).decode()] = tuple(tuple(map(str, names)) for names in axes)
    return found


def _extras(items: Store) -> dict[str, Mapping[str, Any]]:
    """By key, `ext_metadata`; each process wrote the same of the arrays that it knew."""
    found = {}
    for file in items.list(f"{ARRAY_METADATAS}/"):
        for entry in _json(items, file.name)["array_metadatas"]:
            about = entry["array_metadata"]
            if about.get("ext_metadata"):
                found[str(about["param_name"])] = dict(about["ext_metadata"])
    return found


def described(checkpoint: OrbaxCheckpoint) -> dict[str, str]:
    """By key, in words, what isn't in an array's elements: leaves that hold no array (texts; None and empty dicts), and
    of what random generator's the elements are; "numbers" of all others.

    Raises:
      StorageError: a file that says it can't be read.
    """
    items = open_store(checkpoint.root)
    texts = _json(items, STRINGS) if items.exists(STRINGS) else {}
    found = dict.fromkeys(checkpoint.arrays, "numbers")
    for entry in checkpoint.metadata["tree_metadata"].values():
        key = ".".join(path_of(entry))
        kind = entry["value_metadata"].get("value_type")
        if kind == TEXT:
            found[key] = f"{TEXT_IS} {json.dumps(texts.get(key))}"
        elif entry["value_metadata"].get("skip_deserialize"):
            found[key] = "None" if kind == "None" else f"an empty {kind}"
    return found | {key: json.dumps(about, sort_keys=True) for key, about in _extras(items).items() if key in found}


def array_metadatas(
    extras: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
) -> bytes:
    """`array_metadatas/process_0` for the arrays that have extras; `shapes` are those of an array's shards and chunks."""
    entries = [
        {
            "array_metadata": {
                "param_name": key,
                "write_shape": list(shard),
                "chunk_shape": list(chunk),
                "ext_metadata": dict(extras[key]),
            }
        }
        for key, (shard, chunk) in shapes.items()
        if key in extras
    ]
    return json.dumps({"array_metadatas": entries}).encode()


def _zarr(checkpoint: OrbaxCheckpoint, items: Store) -> dict[str, str]:
    use_ocdbt = next((array.use_ocdbt for array in checkpoint.arrays.values()), True)
    names = {key: f"{key}/{DESCRIPTIONS[array.driver]}" for key, array in checkpoint.arrays.items()}
    return {key: text.decode() for key, text in read_descriptions(items, names, use_ocdbt).items()}


def _other_items(items: Store) -> Mapping[str, bytes]:
    """The files of the step's other items, which hold no arrays."""
    step, found, total = items.parent, {}, 0
    if not step.exists(CHECKPOINT_METADATA):  # the item is all there is
        return {}
    for name in step.folders():
        if (
            name == items.name
            or (step / name).exists(METADATA)
            or name.startswith(".")
            or "orbax-checkpoint-tmp" in name
        ):
            continue
        if links := (step / name).links_out():
            raise StorageError(f"{(step / name).path(links[0])}: {FOREIGN}")
        for file in (step / name).list():
            if file.name != MARKER:
                found[f"{name}/{file.name}"] = data = _read(step / name, file.name)
                total += len(data)
            if total > MOST or len(found) > MOST_FILES:
                raise StorageError(
                    f"{step}: more than {MOST_FILES:,} files or {MOST:,} bytes of items that aren't known, too much to copy"
                )
    return found


def _read(store: Store, name: str) -> bytes:
    """A file that is copied as it is."""
    if len(data := store.read(name, 0, LARGEST + 1)) > LARGEST:
        raise StorageError(
            f"{store.path(name)}: more than {LARGEST:,} bytes of what isn't known, which is too much to copy"
        )
    return data


def _json(items: Store, name: str) -> dict[str, Any]:
    try:
        return read_of_step(items.parent, f"{items.name}/{name}")
    except ValueError as e:
        raise StorageError(f"{items.path(name)}: {e}") from e
