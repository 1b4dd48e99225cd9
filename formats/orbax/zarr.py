"""Arrays as chunks: the zarr metadata that stock Orbax restores, the keys of the chunks, and writing them.

Two grids: a *chunk* is what one read fetches; a *shard* is what one write makes. They are the same unless zarr3's
sharding codec packs many chunks into one shard.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorstore as ts

from weightbeam.model_mappings.boxes import Box, tile

# of the index that every reader of a shard reads: offset and length of each chunk; one crc32c
INDEX_ENTRY_BYTES, INDEX_CHECKSUM_BYTES = 16, 4
NO_ENTRY = b"\xff" * INDEX_ENTRY_BYTES  # of a chunk that isn't stored


@dataclasses.dataclass(frozen=True, slots=True)
class ArraySpec:
    """An array of the checkpoint as it is stored.

    Attributes:
      key: Orbax's dotted key.
      shape, dtype: of the array.
      chunk: shape of what one read fetches.
      shard: shape of what one write makes: whole chunks.
      order: the axes as the bytes of a chunk hold them, the slowest first; empty for the array's own order (C order).
    """

    key: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]
    shard: tuple[int, ...]
    order: tuple[int, ...] = ()

    @property
    def grid(self) -> tuple[int, ...]:
        """Shards along each axis."""
        return tuple(-(-size // step) for size, step in zip(self.shape, self.shard, strict=True))

    def shard_box(self, index: tuple[int, ...]) -> Box:
        """The box of a shard; cropped at the array's end."""
        return tile(index, self.shard, self.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A shard as another checkpoint stores it, to be written as it is.

    Attributes:
      spec: the array that it goes to.
      key: of the shard there.
      box: of the array.
      encoded: the bytes as they are stored.
      values: what they mean, for the array's digest.
    """

    spec: ArraySpec
    key: str
    box: Box
    encoded: bytes
    values: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """How a checkpoint is stored, in MaxText's words.

    Attributes:
      use_ocdbt: all arrays in one key-value database, or a folder for each.
      use_zarr3: zarr version 3 or 2.
      compression: "none" or "zstd".
    """

    use_ocdbt: bool = True
    use_zarr3: bool = True
    compression: str = "none"

    @property
    def driver(self) -> str:
        return "zarr3" if self.use_zarr3 else "zarr"

    @property
    def metadata_name(self) -> str:
        """The object in an array's folder that describes it."""
        return DESCRIPTIONS[self.driver]


DESCRIPTIONS = {"zarr": ".zarray", "zarr3": "zarr.json"}  # what an array's folder is described in, by the driver
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}  # the codec of zarr 3 that packs elements
# where the index of a shard stands, and how it is encoded
INDEX = ("end", [LITTLE, {"name": "crc32c"}])
FILLED = {"b": False, "c": [0, 0]}  # zeros, as zarr 3 writes them of kinds of dtypes that aren't real numbers


def metadata(spec: ArraySpec, format: Format) -> dict[str, Any]:
    """What TensorStore needs to know about an array."""
    zstd = format.compression == "zstd"
    if not format.use_zarr3:
        return {
            "shape": list(spec.shape),
            "chunks": list(spec.shard),
            # those of ml_dtypes have no spelling of numpy's
            "dtype": spec.dtype.str if spec.dtype.isbuiltin == 1 else spec.dtype.name,
            "compressor": {"id": "zstd", "level": 1} if zstd else None,
            "filters": None,
            "order": "C",
            "fill_value": None,
            "dimension_separator": ".",
        }
    codecs: list[dict[str, Any]] = [LITTLE]
    if spec.order:
        codecs.insert(0, {"name": "transpose", "configuration": {"order": list(spec.order)}})
    if zstd:
        codecs.append({"name": "zstd", "configuration": {"level": 3}})
    if spec.chunk != spec.shard:
        inner = {
            "chunk_shape": list(spec.chunk),
            "codecs": codecs,
            "index_codecs": INDEX[1],
            "index_location": INDEX[0],
        }
        codecs = [{"name": "sharding_indexed", "configuration": inner}]
    return {
        "shape": list(spec.shape),
        "data_type": spec.dtype.name,
        "fill_value": FILLED.get(spec.dtype.kind, 0),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(spec.shard)}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": codecs,
    }


def metadata_json(spec: ArraySpec, format: Format) -> bytes:
    """The metadata as TensorStore itself writes it."""
    opened = {"driver": format.driver, "kvstore": "memory://", "metadata": metadata(spec, format)}
    store = ts.open(opened, create=True).result()
    kvstore: Any = store.kvstore
    return kvstore.read(format.metadata_name).result().value


def keys(spec: ArraySpec, format: Format) -> Iterator[str]:
    """Every key of an array: its metadata and its shards."""
    yield f"{spec.key}/{format.metadata_name}"
    for index in itertools.product(*(range(n) for n in spec.grid)):
        yield _key(spec, index, format)


def key_of(spec: ArraySpec, box: Box, format: Format) -> str:
    """The key of the shard that fills a box of an array."""
    return _key(spec, _index(spec, box), format)


def _index(spec: ArraySpec, box: Box) -> tuple[int, ...]:
    """Where in the grid the shard is that fills a box."""
    return tuple(start // step for (start, _), step in zip(box, spec.shard, strict=True))


def _key(spec: ArraySpec, index: tuple[int, ...], format: Format) -> str:
    if format.use_zarr3:
        return "/".join((spec.key, "c", *map(str, index)))
    return f"{spec.key}/" + (".".join(map(str, index)) or "0")


def below(kvstore: dict[str, Any], key: str) -> dict[str, Any]:
    """The part of a key-value store that holds the array `key`."""
    return {**kvstore, "path": f"{kvstore.get('path', '')}{key}/"}


def write_shards(
    kvstore: dict[str, Any],
    spec: ArraySpec,
    format: Format,
    shards: Iterable[tuple[Box, np.ndarray]],
    context: ts.Context,
    transaction: ts.Transaction | None,
) -> list[ts.Future]:
    """Starts writing shards of one array, without its metadata.

    The arrays must stay as they are until the futures are done and, if there is a transaction, until it is committed.
    """
    plain = format.compression == "none" and spec.chunk == spec.shard
    written = _without_singletons(spec) if plain else spec
    stores: dict[ArraySpec, ts.TensorStore] = {}
    futures = []
    for box, values in shards:
        # a shard that is cropped at the array's end isn't only its bytes
        target = written if values.shape == spec.shard else spec
        if target not in stores:
            opened = {
                "driver": format.driver,
                "kvstore": below(kvstore, spec.key),
                "metadata": metadata(target, format),
                "store_data_equal_to_fill_value": True,
            }
            stores[target] = ts.open(
                opened, open=True, assume_metadata=True, context=context, transaction=transaction
            ).result()
        if target is not spec:
            box = target.shard_box(_index(spec, box))
            values = values.reshape(target.shard)
        region = tuple(slice(start, stop) for start, stop in box)
        write = stores[target][region].write(values, can_reference_source_data_indefinitely=True)
        futures.append(write.commit if transaction is None else write.copy)
    return futures


def _without_singletons(spec: ArraySpec) -> ArraySpec:
    """An array whose uncompressed shards have the same keys and bytes as `spec`'s, but no axis of length 1 where that
    can be had.

    TensorStore 0.1.86 copies a chunk that has an axis of length 1, and writes others from the caller's memory.
    """
    shard = list(spec.shard)
    for axis, size in enumerate(spec.shard):
        longest = max(range(len(shard)), key=lambda i: shard[i])
        if size == 1 and shard[longest] % 2 == 0 and shard[longest] > 2:
            shard[longest] //= 2
            shard[axis] = 2
    shape = tuple(count * size for count, size in zip(spec.grid, shard, strict=True))
    return dataclasses.replace(spec, shape=shape, chunk=tuple(shard), shard=tuple(shard))
