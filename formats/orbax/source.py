"""An Orbax checkpoint as a source: anyone's, its arrays as encodings that read boxes of themselves.

What it holds is told by its own metadata, once; a worker is given that and opens the arrays again without looking. An
array is read in whole chunks where it is compressed, since a compressed chunk is decoded whole; `chunk` is that grain.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tensorstore as ts

from weightbeam.formats.encodings.encoding import InOrder
from weightbeam.formats.orbax import (
    check_files,
    check_memory,
    find_items,
    grains,
    item_handler,
    item_metadata,
    leaves,
    ocdbt,
    open_stores,
    read_tree,
    record_of,
    zarr,
)
from weightbeam.formats.orbax.metadata import stores_all
from weightbeam.formats.orbax.reading import is_compressed
from weightbeam.formats.safetensors import Allocate
from weightbeam.formats.storage import StorageError, Store, open_store
from weightbeam.formats.storage.identity import Files, Folder, Seen, folders_of, same_folders, this_machine
from weightbeam.model_mappings.boxes import Box, extent, volume
from weightbeam.model_mappings.plan import Problem
from weightbeam.model_mappings.scales import CODES
from weightbeam.model_mappings.trees import Tree, TreeError, recognize

MAX_WHOLE_SHARD_BYTES = 64 << 20  # bytes; a stored shard of chunks up to this is read whole


@dataclasses.dataclass(frozen=True, slots=True)
class OrbaxArray(InOrder):
    """An array of an Orbax checkpoint; its values are those that are stored.

    Attributes:
      items: URL of the item.
      key: in its key-value store.
      driver: TensorStore's, `zarr3` or `zarr`.
      use_ocdbt: whether the item is one database.
      shape, dtype: of the array.
      chunk: what is read whole, if there is room for it.
      compressed: whether a chunk has to be decoded.
      shard: what was written whole, and has a share in the array's digest.
      folders: in which TensorStore opens its files, as they were planned with; none where that isn't known.
      inner: what can be read by itself: `chunk`, or a chunk of it where that is a shard of several.
      sparse: whether a chunk that isn't there is one of zeros, not a damage.
    """

    items: str
    key: str
    driver: str
    use_ocdbt: bool
    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]
    compressed: bool
    shard: tuple[int, ...]
    folders: tuple[Folder, ...] = ()
    inner: tuple[int, ...] = ()
    sparse: bool = False
    label = None

    @property
    def grains(self) -> tuple[tuple[int, ...], ...]:
        """What may be read at a time, the largest first: a unit takes whole ones of the first for which it has room."""
        return (self.chunk, self.inner) if self.inner and self.inner != self.chunk else (self.chunk,)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def name(self) -> str:
        """Of the array, for messages."""
        return self.key

    @property
    def path(self) -> str:
        """Of the item, for messages."""
        return self.items

    @property
    def chunk_bytes(self) -> int:
        """Of a chunk, decoded."""
        return math.prod(self.chunk) * self.dtype.itemsize

    def reads(self, box: Box) -> tuple[ChunkRead, ...]:
        """One read: TensorStore finds the chunks."""
        return (ChunkRead(self, box),)

    def decode(self, stored: list[np.ndarray], box: Box, dtype: np.dtype, empty: Allocate = np.empty) -> np.ndarray:
        """Passes the values as they are."""
        return stored[0]


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkRead:
    """A box of an array of an Orbax checkpoint, to be read."""

    array: OrbaxArray
    box: Box

    @property
    def nbytes(self) -> int:
        return volume(self.box) * self.array.dtype.itemsize

    @staticmethod
    def fetch(reads: Sequence[ChunkRead], empty: Allocate = np.empty) -> tuple[list[np.ndarray], int]:
        """Reads boxes into arrays that `empty` makes.

        Returns:
          An array for each, and their bytes.

        Raises:
          StorageError: a chunk is missing or damaged, or another checkpoint lies there than was planned with.
        """
        made, writes = [], []
        with same_folders({folder for read in reads for folder in read.array.folders}):
            for read in reads:
                check_memory(read.array.items, read.array.key, read.array.chunk_bytes)
                values = empty(extent(read.box), read.array.dtype)
                region = tuple(slice(start, stop) for start, stop in read.box)
                stored = _opened(read.array)[region]
                writes.append((read, ts.array(values).write(stored, can_reference_source_data_indefinitely=True)))
                made.append(values)
            for read, write in writes:
                result_of(read.array, write)
        return made, sum(values.nbytes for values in made)


_OPENING = threading.Lock()


@functools.lru_cache(maxsize=4)
def _context(items: str) -> tuple[ts.Context, dict[str, ts.TensorStore]]:
    return ocdbt.context(), {}


def _opened(array: OrbaxArray) -> ts.TensorStore:
    """The open array; opened once in a process. Raises StorageError where it isn't there any more, or another one is."""
    with _OPENING:
        context, opened = _context(array.items)
        if array.key not in opened:
            opened[array.key] = result_of(array, _open(array, context))
        return opened[array.key]


def result_of(array: OrbaxArray, future: ts.Future | ts.WriteFutures) -> Any:
    """What TensorStore has done for an array. Raises StorageError where it says what went wrong, whatever that is."""
    try:
        return future.result()
    except ValueError as e:
        raise StorageError(f"{array.items}: {array.key}: {ocdbt.brief(e)}") from e


@functools.lru_cache(maxsize=2)
def _kvstore(items: str, use_ocdbt: bool) -> ts.KvStore:
    return ts.KvStore.open(ocdbt.stored_in(open_store(items), use_ocdbt), context=ocdbt.context()).result()


def opened_store(array: OrbaxArray) -> ts.KvStore:
    """The open key-value store that an array lies in; opened once in a process."""
    with _OPENING:
        return _kvstore(array.items, array.use_ocdbt)


def _open(array: OrbaxArray, context: ts.Context) -> ts.Future:
    kvstore = zarr.below(ocdbt.stored_in(open_store(array.items), array.use_ocdbt), array.key)
    spec = {"driver": array.driver, "kvstore": kvstore, "fill_missing_data_reads": array.sparse}
    return ts.open(spec, open=True, read=True, context=context)


def close_all() -> None:
    """Closes the arrays and databases that are open in this process: another checkpoint may lie at one of their places
    by now.
    """
    with _OPENING:
        _context.cache_clear()
        _kvstore.cache_clear()


@dataclasses.dataclass(frozen=True)
class OrbaxCheckpoint:
    """An item of an Orbax checkpoint, known by its metadata.

    Attributes:
      root: URL of the item.
      files: of the item: what it is told by.
      metadata: `_METADATA`.
      custom: the custom metadata of its step.
      record: `conversion.json`; empty where it isn't ours.
      arrays: by their keys.
      handler: what Orbax calls what wrote the item; empty where nothing says it.
    """

    root: str
    files: Files
    metadata: Mapping[str, Any]
    custom: Mapping[str, Any]
    record: Mapping[str, Any]
    arrays: Mapping[str, OrbaxArray]
    handler: str = ""

    @functools.cached_property
    def tree(self) -> Tree:
        """Which of the arrays are weights.

        Raises:
          TreeError: it isn't known, or scales don't lie over their weights in square blocks.
        """
        tree = recognize([path for path in leaves(self.metadata) if ".".join(path) in self.arrays])
        for key, scale_key in tree.scales.items():
            codes, scale = (self.arrays[tree.weights[name]] for name in (key, scale_key))
            if why := why_not_scales(codes, scale):
                raise TreeError(f"{scale_key} {scale.shape} doesn't lie over {key} {codes.shape} in blocks: {why}")
        return tree

    @property
    def options(self) -> Mapping[str, Any]:
        """Those with which it was made, as its record says; empty where it isn't ours."""
        return self.record.get("options", {})

    @functools.cached_property
    def weights(self) -> dict[str, OrbaxArray]:
        """The weights, by MaxText's keys."""
        return {name: self.arrays[key] for name, key in self.tree.weights.items()}

    @property
    def array_count(self) -> int:
        """How many arrays it holds."""
        return len(self.arrays)

    @property
    def paths(self) -> list[str]:
        """Its files that may be links to elsewhere: none, they lie in its folder."""
        return []

    def unreadable(self) -> list[Problem]:
        """The files whose end can't be read: none, all were looked at when it was opened."""
        return []

    @property
    def identity(self) -> list[Any]:
        """What tells it from another one, wherever it lies, as JSON: its files, and what lies beside them and goes into a
        result.
        """
        return [self.files.hash, self.metadata, self.custom, self.record]

    @property
    def seen(self) -> dict[str, Seen]:
        """The files of the item, by their paths."""
        return self.files.seen

    def was_touched(self, since: OrbaxCheckpoint, linked: bool = False) -> bool:
        """Whether a file was replaced since the same files were opened; sizes and times needn't show it."""
        return self.files.was_touched(since.files, linked)

    def check(self) -> None:
        """Checks that the checkpoint is the one that was opened.

        Raises:
          StorageError: it isn't, or is gone.
        """
        self.files.check()

    def to_json(self) -> dict[str, Any]:
        """What a worker needs to know of it, as JSON."""
        arrays = {
            key: [
                array.driver,
                array.use_ocdbt,
                array.shape,
                array.dtype.name,
                array.chunk,
                array.compressed,
                array.shard,
                array.inner,
            ]
            for key, array in self.arrays.items()
        }
        return {
            "root": self.root,
            "folders": next((array.folders for array in self.arrays.values()), ()),
            "machine": this_machine(),
            "files": self.files.to_json(),
            "metadata": self.metadata,
            "custom": self.custom,
            "record": self.record,
            "arrays": arrays,
            "handler": self.handler,
        }


class Typed(Protocol):
    """An array's dtype and shape."""

    @property
    def dtype(self) -> np.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def why_not_scales(codes: Typed, scale: Typed) -> str:
    """Why an array doesn't hold the scales of square blocks of codes; empty where it does."""
    if codes.dtype.name != CODES:
        return f"the weight is {codes.dtype.name}, not {CODES}"
    if scale.dtype.kind in "biu":
        return f"they are {scale.dtype.name}, and scales are floating-point numbers"
    if len(codes.shape) != len(scale.shape):
        return f"it has {len(scale.shape)} axes, not {len(codes.shape)}"
    sizes = set()
    for n, blocks in zip(codes.shape, scale.shape, strict=True):
        if not blocks or n % blocks:
            return f"{n:,} isn't {blocks:,} whole blocks"
        sizes.add(n // blocks)
    return f"its blocks have several sizes, {sorted(sizes - {1})}" if len(sizes - {1}) > 1 else ""


def load_checkpoint(staged: Mapping[str, Any]) -> OrbaxCheckpoint:
    """The checkpoint that `OrbaxCheckpoint.to_json` wrote."""
    close_all()
    seen = staged.get("folders", ()) if staged.get("machine") == this_machine() else ()
    folders = tuple(Folder(*folder) for folder in seen)
    arrays = {
        key: OrbaxArray(
            staged["root"],
            key,
            driver,
            use_ocdbt,
            tuple(shape),
            _dtype(dtype),
            tuple(chunk),
            compressed,
            tuple(shard),
            folders,
            tuple(inner),
            not stores_all(staged["metadata"]),
        )
        for key, (driver, use_ocdbt, shape, dtype, chunk, compressed, shard, inner) in staged["arrays"].items()
    }
    return OrbaxCheckpoint(
        staged["root"],
        Files.from_json(staged["files"]),
        staged["metadata"],
        staged["custom"],
        staged["record"],
        arrays,
        staged["handler"],
    )


def _dtype(name: str) -> np.dtype:
    return ts.dtype(name).numpy_dtype


def open_orbax(where: str | Path | Store, any_tree: bool = False) -> OrbaxCheckpoint:
    """Opens a checkpoint given by its root (with one step), a step, or the item itself.

    Raises:
      StorageError: there is none, it is damaged, or (but for `any_tree`) its tree isn't one whose weights can be taken.
    """
    items = find_items(where)
    close_all()
    try:
        folders = folders_of(items)
        check_files(items)  # before their blocks are read
        files = Files.of(items)
        metadata = read_tree(items)
        driver = "zarr3" if metadata.get("use_zarr3", False) else "zarr"
        use_ocdbt = bool(metadata.get("use_ocdbt", True))
        arrays = {}
        for key, store in open_stores(items, metadata).items():
            read, shard = grains(store)
            dtype = np.dtype(store.dtype.numpy_dtype)
            grain = shard if math.prod(shard) * dtype.itemsize <= MAX_WHOLE_SHARD_BYTES else read
            grain, shard, read = (
                tuple(min(n, size) if size else 1 for n, size in zip(step, store.shape, strict=True))
                for step in (grain, shard, read)
            )
            arrays[key] = OrbaxArray(
                str(items),
                key,
                driver,
                use_ocdbt,
                tuple(store.shape),
                dtype,
                grain,
                is_compressed(store),
                shard,
                folders,
                read,
                not stores_all(metadata),
            )
        said = item_metadata(items), record_of(items)
        checkpoint = OrbaxCheckpoint(str(items), files, metadata, *said, arrays, item_handler(items))
        if not any_tree:
            _ = checkpoint.tree
    except TreeError as e:
        raise StorageError(f"{items}: {e}") from e
    except StorageError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise StorageError(f"{items}: can't be read: {ocdbt.brief(e) or type(e).__name__}") from e
    return checkpoint
