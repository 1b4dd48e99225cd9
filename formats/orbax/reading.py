"""An Orbax checkpoint, ours or anyone's, found and opened; and what is missing of one of ours."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from weightbeam.formats.orbax import ocdbt, zarr
from weightbeam.formats.orbax.database_size import check_database_size
from weightbeam.formats.orbax.metadata import (
    CHECKPOINT_METADATA,
    METADATA,
    STEP_FILES,
    check_length,
    leaves,
    read_tree,
    record_of,
    stores_all,
)
from weightbeam.formats.orbax.references import read_references
from weightbeam.formats.orbax.zarr import ArraySpec, Format
from weightbeam.formats.staging import GROWING, ITEMS, MARKER, REPLACED
from weightbeam.formats.staging.links import SOURCE, SYMBOLIC, identities
from weightbeam.formats.storage import LocalFolder, StorageError, Store, open_store
from weightbeam.formats.storage.meant import MEANT
from weightbeam.formats.storage.stoppable import StoppablePool
from weightbeam.formats.storage.strict_json import Budget, JsonError, parse_json
from weightbeam.model_mappings.plan import MAX_ELEMENTS

MODEL_ITEM = "model_params"  # where Tunix and MaxText's training engine keep the weights, beside the optimizer's item
# the one file of a checkpoint before Orbax had arrays of their own
MSGPACK = ("checkpoint", f"{ITEMS}/checkpoint", "default/checkpoint")
MAX_DESCRIPTION = 1 << 20  # bytes of what zarr says of an array
DESCRIPTIONS = 256  # that are read at a time
# bytes of a chunk or a shard, decoded: of the largest model's experts, in float32 on 16 devices, they are 54 GB
MAX_CHUNK_BYTES = 64 << 30
SMALL_CHUNK = 1 << 20  # elements; a chunk may have as many, however small its array is
MAX_FEW = 100_000  # chunks of an array that have fewer than 256 elements each: what is read at once has as many
CHUNK_BYTES = 64  # in a shard's file for each chunk: its entry in the index, and the frame of a codec
MAX_INNER_CHUNKS = 1 << 20  # of a shard, whose index is read whole
FOREIGN = (
    "a symbolic link that leads out of the checkpoint, which isn't followed; a copy of the file can take its place"
)
CHECKPOINTS = "checkpoints"  # in the folder of a training run of MaxText's: where its steps lie
STEP_NAME = re.compile(r"(\w*_)?\d+")  # of a step's folder: 100, or with a prefix, checkpoint_100


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointArray:
    """An array of a checkpoint that exists, and whether its chunks are compressed."""

    spec: ArraySpec
    compressed: bool


def find_items(where: str | Path | Store) -> Store:
    """The item of a checkpoint given by a training run's folder, its root (with one step), a step, or the item itself.

    Raises:
      StorageError: none of them.
    """
    store = open_store(where)
    store.kvstore()  # refused where no checkpoint can be
    if unpublished := [part for part in (store.name, store.parent.name) if is_unpublished(part)]:
        raise StorageError(
            f"{store}: {unpublished[0]} is of a conversion that wasn't published, or was replaced; it is no checkpoint"
        )
    if item := _item_of(store):
        return _inside(store, item)
    folders = sorted(store.folders(), key=lambda name: (len(name), name))  # step 2 before step 10
    steps = {name: item for name in folders if STEP_NAME.fullmatch(name) and (item := _item_of(store / name))}
    if len(steps) == 1:
        return _inside(store, next(iter(steps.values())))
    if steps:
        example = store / next(reversed(steps))
        raise StorageError(f"{store}: {len(steps)} steps: name one of {', '.join(steps)}, as in {example}")
    if CHECKPOINTS in folders:
        return find_items(store / CHECKPOINTS)
    raise StorageError(f"{store}: {_what_it_is(store)}{_what_it_may_be(store, folders)}")


def step_of(where: str | Path | Store, step: int) -> Store:
    """A step of a checkpoint given by its root or by a training run's folder, or where that would be."""
    store, name = open_store(where), str(step)
    folders = store.folders()
    return store / CHECKPOINTS / name if CHECKPOINTS in folders and name not in folders else store / name


def _inside(store: Store, item: Store) -> Store:
    """The item, which is no link to elsewhere, and which both clients of a bucket get to. Raises StorageError where it
    is, or one doesn't.
    """
    try:
        store.check_file(item.url.removeprefix(store.url).lstrip("/"))
    except StorageError as e:
        raise StorageError(f"{item}: lies elsewhere than {store}, by a symbolic link; name where it leads to") from e
    item.check_reached(METADATA)
    return item


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
    others = [name for name in store.folders() if not STEP_NAME.fullmatch(name) and not is_unpublished(name)]
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
    if isinstance(store, LocalFolder) and not store.folder.is_dir():
        return store.missing().partition(MEANT)[0]  # which has no checkpoints
    is_release = any(name.endswith(".safetensors") for name in store.entries())
    return "no Orbax checkpoint" + (
        ", but a release; weightbeam convert makes a checkpoint of it" if is_release else ""
    )


def _what_it_may_be(store: Store, folders: Sequence[str]) -> str:
    """What in a place could have been meant: an old checkpoint, or one that wasn't published; empty where nothing."""
    hint = ""
    for place in (store, *(store / name for name in folders)):
        if old := next((name for name in MSGPACK if place.exists(name)), None):
            hint = f", but {place}/{old}, as old MaxText wrote it (msgpack); save it anew with a MaxText that reads it"
            break
    if stopped := sorted(filter(is_unpublished, folders)):
        hint += (
            f"; {stopped[0]} is of a conversion that wasn't published: the command that made it goes on with --resume"
        )
    return hint


def is_unpublished(name: str) -> bool:
    """Whether a folder of that name holds what will be a checkpoint, or what was one."""
    return GROWING in name or bool(re.fullmatch(rf"\w+{REPLACED}", name))


def open_arrays(items: Store, complete: bool = False) -> dict[str, ts.TensorStore]:
    """The arrays of a checkpoint, ours or anyone's, by their keys; opened, not read.

    With `complete` a chunk that isn't there is an error where the metadata say that all are stored, and not zeros.

    Raises:
      StorageError: see `check_files` and `open_stores`; or a chunk is larger than this machine's memory.
    """
    check_files(items)
    tree = read_tree(items)
    opened = open_stores(items, tree, complete and stores_all(tree))
    for key, store in opened.items():
        check_memory(items, key, _nbytes(store, grains(store)[0]))
    return opened


def open_stores(items: Store, tree: Mapping[str, Any], complete: bool = True) -> dict[str, ts.TensorStore]:
    """The arrays of a tree, by their keys; opened, not read. A stranger's, whose files were checked (`check_files`): nothing
    larger than can be meant is opened.

    Args:
      items: the item.
      tree: see `read_tree`.
      complete: whether a chunk that isn't there is an error, and not zeros.

    Raises:
      StorageError: one isn't there, or can't be meant; or one has no name, as where there is no tree, but an array.
    """
    format = Format(use_ocdbt=tree.get("use_ocdbt", True), use_zarr3=tree.get("use_zarr3", False))
    if format.use_ocdbt:
        check_database_size(items)
    shared, keys = ocdbt.context(), [".".join(path) for path in leaves(tree)]
    if "" in keys:
        raise StorageError(f"{items}: holds an array without a name, as a checkpoint of one array does")
    kvstore = ocdbt.stored_in(items, format.use_ocdbt)
    read_descriptions(items, {key: f"{key}/{format.metadata_name}" for key in keys}, format.use_ocdbt)
    fill = {"fill_missing_data_reads": not complete}
    opened = [
        ts.open(
            {"driver": format.driver, "kvstore": zarr.below(kvstore, key), **fill}, open=True, read=True, context=shared
        )
        for key in keys
    ]
    stores = {key: future.result() for key, future in zip(keys, opened, strict=True)}
    for key, store in stores.items():
        _check_sizes(items, key, store)
        if not format.use_ocdbt:
            _check_lengths(items, f"{key}/", _most_bytes(store))
    return stores


def read_descriptions(items: Store, names: Mapping[str, str], use_ocdbt: bool) -> dict[str, bytes]:
    """What zarr says of each array, verbatim: JSON as `parse_json` takes it.

    Args:
      items: the item.
      names: of the descriptions in its key-value store, by the arrays' keys.
      use_ocdbt: whether that is a database.

    Raises:
      StorageError: one isn't there, or is none.
    """
    found, budget, keys = dict[str, bytes](), Budget(), list(names)
    for start in range(0, len(keys), DESCRIPTIONS):
        some = {key: names[key] for key in keys[start : start + DESCRIPTIONS]}
        for (key, name), text in zip(some.items(), _read_some(items, list(some.values()), use_ocdbt), strict=True):
            try:
                if len(text) > MAX_DESCRIPTION:
                    raise JsonError(f"has more than {MAX_DESCRIPTION:,} bytes")
                parse_json(text, budget=budget, file=key)
            except JsonError as e:
                raise StorageError(f"{items.path(name)}: {e}") from e
            found[key] = text
    return found


def _read_some(items: Store, names: Sequence[str], use_ocdbt: bool) -> Sequence[bytes]:
    """What lies under some names of an item's key-value store."""
    if use_ocdbt:
        return ocdbt.read_small(items, names, MAX_DESCRIPTION)
    with StoppablePool(items.at_a_time) as pool:
        try:
            return list(pool.map(lambda name: items.read(name, 0, MAX_DESCRIPTION + 1), names))
        except OSError as e:
            raise StorageError(f"{items}: an array's description can't be read: {e}") from e


def check_files(items: Store) -> None:
    """Makes sure that a checkpoint's files are its own, and a virtual one's those that it was made of, to which its links
    may lead.

    Raises:
      StorageError: one isn't, or is a link that leads elsewhere, a pipe, a socket or a device.
    """
    for name in STEP_FILES:
        try:
            items.parent.check_file(name)
        except StorageError as e:
            raise StorageError(f"{items.parent.path(name)}: {FOREIGN}") from e
    links, source = items.links_out(), items / SOURCE
    there = {file.name: file for file in source.list(recursive=False)}
    if not (links or there):
        return
    meant = {file.name: file for file in identities(record_of(items))}
    symbolic = {f"{SOURCE}/{file.name}" for file in meant.values() if file.link == SYMBOLIC}
    for name in sorted(set(links) - symbolic):
        raise StorageError(f"{items.path(name)}: {FOREIGN}")
    for name, file in meant.items():
        for fault in file.faults(source, there.get(name), hash_copies=False):
            raise StorageError(f"{source.path(name)}: {fault}")


def _check_sizes(items: Store, key: str, store: ts.TensorStore) -> None:
    """Makes sure that neither an array nor a part of it that is read at once is larger than can be meant. Raises
    StorageError where one is.
    """
    shape, (chunk, shard) = tuple(store.shape), grains(store)
    what = ""
    if max(math.prod(shape), *shape, 0) > MAX_ELEMENTS:
        what = f"its shape {shape} has more than {MAX_ELEMENTS:,} elements"
    elif (nbytes := _nbytes(store, shard)) > MAX_CHUNK_BYTES:
        what = f"its chunks {shard} have {nbytes:,} bytes each, more than {MAX_CHUNK_BYTES:,}"
    elif math.prod(shard) > max(2 * math.prod(shape), SMALL_CHUNK):
        what = f"its chunks {shard} are larger than itself, {shape}"
    elif math.prod(-(-n // step) for n, step in zip(shape, chunk, strict=True)) > max(MAX_FEW, math.prod(shape) >> 8):
        what = f"its chunks {chunk} are of so few elements that it has too many of them"
    elif math.prod(shard) > MAX_INNER_CHUNKS * math.prod(chunk):
        what = f"its shards {shard} have more than {MAX_INNER_CHUNKS:,} chunks each, {chunk}"
    if what:
        raise StorageError(f"{items}: {key}: {what}; that can't be meant")


def _most_bytes(store: ts.TensorStore) -> int:
    """More than a file of an array has, whatever the codec."""
    chunk, shard = grains(store)
    return 2 * _nbytes(store, shard) + CHUNK_BYTES * (math.prod(shard) // max(1, math.prod(chunk))) + MAX_DESCRIPTION


def _check_lengths(items: Store, prefix: str, most: int) -> None:
    """Makes sure that no file, which TensorStore reads whole, is larger than can be meant. In a folder alone: in a
    bucket nothing is sparse. Raises StorageError where one is.
    """
    if isinstance(items, LocalFolder):
        for file in items.list(prefix, recursive="/" in prefix):
            check_length(items, file, most)


def check_memory(items: Store | str, key: str, nbytes: int) -> None:
    """Makes sure that a chunk that has to be decoded whole can be.

    Raises:
      StorageError: it is larger than this machine's memory.
    """
    if nbytes > (held := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")):
        raise StorageError(
            f"{items}: {key}: its chunks have {nbytes:,} bytes each, which are decoded whole, and this machine has {held:,}"
        )


def _nbytes(store: ts.TensorStore, extents: Sequence[int]) -> int:
    return math.prod(extents) * store.dtype.numpy_dtype.itemsize


def read_arrays(items: Store) -> list[CheckpointArray]:
    """What the metadata of a checkpoint, ours or anyone's, say of its arrays."""
    check_files(items)
    arrays = []
    for key, store in open_stores(items, read_tree(items), complete=False).items():
        chunk, shard = grains(store)
        spec = ArraySpec(key, tuple(store.shape), np.dtype(store.dtype.numpy_dtype), chunk, shard)
        arrays.append(CheckpointArray(spec, is_compressed(store)))
    return arrays


def is_compressed(store: ts.TensorStore) -> bool:
    """Whether an array's chunks are, so that each is decoded whole."""
    codec = json.dumps(store.codec.to_json() if store.codec else None)
    return any(f'"{name}"' in codec for name in ("zstd", "gzip", "blosc", "zlib", "bz2"))


def grains(store: ts.TensorStore) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of an array's chunks and of its shards, every extent of which TensorStore knows once it is open."""
    layout = store.chunk_layout
    read, write = (shape or store.shape for shape in (layout.read_chunk.shape, layout.write_chunk.shape))
    return tuple(n or 0 for n in read), tuple(n or 0 for n in write)


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
        check_database_size(items)
        ocdbt.check(items, len(wanted), ((spec.key, zarr.keys(spec, format)) for spec in everything))
        for reference in read_references(items):
            if reference.offset + reference.length > sizes.get(reference.path, -1):
                what = "ends too early" if reference.path in sizes else "is gone"
                return f"{items.path(reference.path)} {what}"
    except (ValueError, StorageError) as e:  # TensorStore's errors too
        return f"its index can't be read: {str(e).splitlines()[0]}"
    try:
        check_files(items)
    except StorageError as e:
        return str(e)
    return ""
