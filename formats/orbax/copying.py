"""Chunks that are copied as they are encoded: nothing is decoded but for the digest, and nothing encoded again."""

from __future__ import annotations

import functools
import json
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from weightbeam.formats.orbax import ocdbt, zarr
from weightbeam.formats.orbax.source import OrbaxArray, opened_store, result_of
from weightbeam.formats.orbax.zarr import ArraySpec, EncodedChunk
from weightbeam.formats.storage import StorageError
from weightbeam.formats.storage.identity import same_folders


def copy_spec(metadata: str, key: str, dtype: np.dtype) -> ArraySpec | None:
    """An array `key` whose chunks are those that the zarr metadata describe; None where their keys aren't the usual
    ones.
    """
    about: dict[str, Any] = json.loads(metadata)
    shape = tuple(about["shape"])
    if about.get("zarr_format") == 2:
        shard = chunk = tuple(about["chunks"])
        usual = about.get("dimension_separator", ".") == "."
    else:
        shard = chunk = tuple(about["chunk_grid"]["configuration"]["chunk_shape"])
        if about["codecs"] and about["codecs"][0]["name"] == "sharding_indexed":
            chunk = tuple(about["codecs"][0]["configuration"]["chunk_shape"])
        encoding = about["chunk_key_encoding"]
        usual = encoding["name"] == "default" and encoding.get("configuration", {}).get("separator", "/") == "/"
    return ArraySpec(key, shape, dtype, chunk, shard) if usual and all(shard) else None


# an array, its zarr metadata, the array that it becomes, and the index of a chunk
Wanted = tuple[OrbaxArray, str, ArraySpec, tuple[int, ...]]


def read_chunks(wanted: Sequence[Wanted]) -> list[EncodedChunk]:
    """Reads chunks as they are encoded, all at once, and decodes each to see that it is whole.

    Raises:
      StorageError: one is missing or damaged, or another checkpoint lies there than was planned with.
    """
    with same_folders({folder for array, *_ in wanted for folder in array.folders}):
        reads = deque(opened_store(array).read(f"{array.key}/{_name(array, index)}") for array, _, _, index in wanted)
        return [_decoded(*of, reads.popleft()) for of in wanted]


def _name(array: OrbaxArray, index: tuple[int, ...]) -> str:
    """The key of a chunk below its array."""
    return "/".join(("c", *map(str, index))) if array.driver == "zarr3" else ".".join(map(str, index)) or "0"


def _decoded(
    array: OrbaxArray, metadata: str, spec: ArraySpec, index: tuple[int, ...], read: ts.Future
) -> EncodedChunk:
    name = _name(array, index)
    got = result_of(array, read)
    encoded = got.value if got.state == "value" else None  # a copy, each time
    if encoded is None and not array.sparse:
        raise StorageError(f"{array.items}: {array.key}/{name} is missing")
    del got, read
    box = spec.shard_box(index)
    memory = ts.Context()  # of its own: a store in memory belongs to its context
    store = ts.KvStore.open("memory://", context=memory).result()
    store.write(zarr.DESCRIPTIONS[array.driver], metadata.encode()).result()
    about = {
        "driver": array.driver,
        "kvstore": "memory://",
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": array.sparse,  # a shard's index may say that it has no chunk
    }
    try:
        opened = ts.open(about, open=True, context=memory).result()
        chunk = opened[tuple(slice(start, stop) for start, stop in box)]
        if encoded is not None:
            store.write(name, encoded).result()
        values = chunk.read().result()
        if encoded is None or (array.sparse and zarr.NO_ENTRY in encoded):  # the copy stores what is left out as zeros
            chunk.write(values).result()
            encoded = store.read(name).result().value
    except ValueError as e:
        raise StorageError(f"{array.items}: {array.key}/{name}: damaged: {ocdbt.brief(e)}") from e
    return EncodedChunk(spec, f"{spec.key}/{name}", box, encoded, np.asarray(values))


@functools.lru_cache(maxsize=64)
def is_plain(metadata: str) -> bool:
    """Whether an encoded chunk is its values in C order, by the zarr metadata."""
    about = json.loads(metadata)
    if about.get("zarr_format") == 2:
        return (
            about["compressor"] is None
            and not about.get("filters")
            and about["order"] == "C"
            and not str(about["dtype"]).startswith(">")
        )
    return about["codecs"] == [zarr.LITTLE]
