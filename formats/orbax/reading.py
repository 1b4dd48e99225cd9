"""An Orbax checkpoint, ours or anyone's, found and opened; and what is missing of one of ours."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tensorstore as ts

from weightbeam.formats import ocdbt, zarr
from weightbeam.formats.orbax.metadata import CHECKPOINT_METADATA, METADATA
from weightbeam.formats.references import read_references
from weightbeam.formats.staging import GROWING, ITEMS, MARKER
from weightbeam.formats.storage import LocalFolder, StorageError, Store, open_store
from weightbeam.formats.strict_json import parse_json
from weightbeam.formats.zarr import ArraySpec, Format

MODEL_ITEM = "model_params"  # where Tunix and MaxText's training engine keep the weights, beside the optimizer's item
# the one file of a checkpoint before Orbax had arrays of their own
MSGPACK = ("checkpoint", f"{ITEMS}/checkpoint", "default/checkpoint")
STEP_NAME = re.compile(r"(\w*_)?\d+")  # of a step's folder: 100, or with a prefix, checkpoint_100


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointArray:
    """An array of a checkpoint that exists, and whether its chunks are compressed."""

    spec: ArraySpec
    compressed: bool


def find_items(where: str | Path | Store) -> Store:
    """The item of a checkpoint given by its root (with one step), a step, or the item itself.

    Raises:
      StorageError: none of them.
    """
    store = open_store(where)
    store.kvstore()  # refused where no checkpoint can be
    if unpublished := [part for part in (store.name, store.parent.name) if _is_unpublished(part)]:
        raise StorageError(
            f"{store}: {unpublished[0]} is of a conversion that wasn't published, or was replaced; it is no checkpoint"
        )
    if item := _item_of(store):
        return item
    folders = store.folders()
    steps = {name: item for name in folders if STEP_NAME.fullmatch(name) and (item := _item_of(store / name))}
    if len(steps) == 1:
        return next(iter(steps.values()))
    found = (
        f"{len(steps)} steps: name one of {', '.join(steps)}, as in {store / next(reversed(steps))}"
        if steps
        else _what_it_is(store)
    )
    if not steps and (
        old := next(
            (
                f"{place}/{name}"
                for place in (store, *(store / name for name in folders))
                for name in MSGPACK
                if place.exists(name)
            ),
            None,
        )
    ):
        found += f", but {old}, as old MaxText wrote it (msgpack); save it anew with a MaxText that reads it"
    if not steps and (stopped := sorted(filter(_is_unpublished, folders))):
        found += (
            f"; {stopped[0]} is of a conversion that wasn't published: the command that made it goes on with --resume"
        )
    raise StorageError(f"{store}: {found}")


def check_committed(store: Store) -> None:
    """Checks that a step, or an item, is whole. In a folder Orbax names it when it is; in a bucket a marker says so.

    Raises:
      StorageError: it is still being written, or its writing was broken off.
    """
    if (
        store.url.startswith("gs://")
        and (items := find_items(store))
        and not items.exists(MARKER)
        and not items.parent.exists(MARKER)
    ):
        raise StorageError(
            f"{items}: has no {MARKER}: it is still being written, or was broken off; wait, or take another step"
        )


def _item_of(store: Store) -> Store | None:
    """The item that a folder is, or the one below a step that holds arrays: ours, or anyone's, whatever its name; None
    where there is none.

    Of several it is `model_params`: the others are what training keeps beside the weights.

    Raises:
      StorageError: a step has several.
    """
    if store.exists(METADATA):
        return store
    if (store / ITEMS).exists(METADATA):
        return store / ITEMS
    others = [name for name in store.folders() if not STEP_NAME.fullmatch(name) and not _is_unpublished(name)]
    items = [name for name in others if (store / name).exists(METADATA)]
    if MODEL_ITEM in items:
        items = [MODEL_ITEM]
    if len(items) > 1:
        raise StorageError(
            f"{store}: {len(items)} items with arrays: name one of {', '.join(items)}, as in {store / items[0]}"
        )
    return store / items[0] if items else None


def _what_it_is(store: Store) -> str:
    """What a place is that holds no checkpoint."""
    if isinstance(store, LocalFolder) and not store.folder.exists():
        return store.missing()
    is_release = any(name.endswith(".safetensors") for name in store.entries())
    return "no Orbax checkpoint" + (
        ", but a release; weightbeam convert makes a checkpoint of it" if is_release else ""
    )


def _is_unpublished(name: str) -> bool:
    """Whether a folder of that name holds what will be a checkpoint, or what was one."""
    return GROWING in name or bool(re.fullmatch(r"\w+\.replaced-[0-9a-f]+", name))


def open_arrays(items: Store, complete: bool = False) -> dict[str, ts.TensorStore]:
    """The arrays of a checkpoint, ours or anyone's, by their keys; opened, not read.

    With `complete` a chunk that isn't there is an error where the metadata say that all are stored, and not zeros.
    """
    metadata = parse_json(items.read(METADATA))
    format = Format(use_ocdbt=metadata.get("use_ocdbt", True), use_zarr3=metadata.get("use_zarr3", False))
    shared = ocdbt.context()
    keys = [
        ".".join(key["key"] for key in entry["key_metadata"])
        for entry in metadata["tree_metadata"].values()
        if not entry["value_metadata"].get("skip_deserialize")
    ]
    kvstore = ocdbt.database(items) if format.use_ocdbt else items.kvstore()
    fill = {"fill_missing_data_reads": not (complete and metadata.get("store_array_data_equal_to_fill_value", False))}
    opened = [
        ts.open(
            {"driver": format.driver, "kvstore": zarr.below(kvstore, key), **fill}, open=True, read=True, context=shared
        )
        for key in keys
    ]
    return {key: future.result() for key, future in zip(keys, opened, strict=True)}


def read_arrays(items: Store) -> list[CheckpointArray]:
    """What the metadata of a checkpoint, ours or anyone's, say of its arrays."""
    arrays = []
    for key, store in open_arrays(items).items():
        layout, codec = store.chunk_layout, json.dumps(store.codec.to_json() if store.codec else None)
        chunk, shard = (
            _extents(layout.read_chunk.shape or store.shape),
            _extents(layout.write_chunk.shape or store.shape),
        )
        spec = ArraySpec(key, tuple(store.shape), np.dtype(store.dtype.numpy_dtype), chunk, shard)
        arrays.append(CheckpointArray(spec, any(name in codec for name in ('"zstd"', '"gzip"', '"blosc"'))))
    return arrays


def _extents(shape: Iterable[int | None]) -> tuple[int, ...]:
    """A chunk's shape, of which TensorStore knows every extent once an array is open."""
    return tuple(n or 0 for n in shape)


def find_damage(step: Store, everything: Sequence[ArraySpec], format: Format) -> str:
    """What is missing of a published checkpoint, as far as its index and the sizes of its files tell; empty if nothing
    is.

    No array is read.
    """
    items = step / ITEMS
    sizes = {file.name: file.size for file in items.list()}
    if gone := sorted({METADATA, CHECKPOINT_METADATA, MARKER} - sizes.keys()):
        return f"{items.path(gone[0])} is gone"
    wanted = [key for spec in everything for key in zarr.keys(spec, format)]
    if not format.use_ocdbt:
        gone = [key for key in wanted if key not in sizes]
        return f"{len(gone)} of {len(wanted)} files are gone, e.g. {items.path(gone[0])}" if gone else ""
    try:
        ocdbt.check(items, len(wanted), ((spec.key, zarr.keys(spec, format)) for spec in everything))
        for reference in read_references(items):
            if reference.offset + reference.length > sizes.get(reference.path, -1):
                what = "ends too early" if reference.path in sizes else "is gone"
                return f"{items.path(reference.path)} {what}"
    except ValueError as e:  # TensorStore's errors too
        return f"its index can't be read: {str(e).splitlines()[0]}"
    return ""
