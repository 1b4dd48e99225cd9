"""An Orbax checkpoint as a source, ours or anyone's."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import tensorstore as ts

from weightbeam.formats.orbax import grains, leaves, ocdbt, open_arrays, read_tree, record_of
from weightbeam.formats.record.provenance import RECORD
from weightbeam.formats.safetensors import Allocate
from weightbeam.formats.storage import StorageError, Store
from weightbeam.formats.storage.identity import Files, folders_of, hash_files, same_folders
from weightbeam.formats.text.printable import listed
from weightbeam.model_mappings.boxes import Box, extent, slices, tile, volume
from weightbeam.model_mappings.trees import TreeError, recognize
from weightbeam.pipelines.loading.source import ArraySource, Cost, Described, Wanted, cast
from weightbeam.transforms.comparing.array_sums import (
    Compared,
    Shares,
    add_shares,
    damage,
    find_damage,
    find_lost,
    known_digests,
    shard_count,
    total,
)

DIGEST_WORDS = 4  # of 32 bits


@dataclasses.dataclass(frozen=True, slots=True)
class _Array:
    """What of an array its digest depends on."""

    key: str
    dtype: np.dtype
    shape: tuple[int, ...]
    shard: tuple[int, ...]

    @classmethod
    def of(cls, key: str, store: ts.TensorStore) -> _Array:
        shape, (_, shard) = tuple(store.shape), grains(store)
        least = tuple(min(n or 1, size) or 1 for n, size in zip(shard, shape, strict=True))
        return cls(key, np.dtype(store.dtype.numpy_dtype), shape, least)


class Orbax(ArraySource):
    """An Orbax checkpoint.

    Whatever wrote it, its weights have MaxText's names (`model_mappings/trees.py`); all else, such as an optimizer's
    state, has its own. `stored` are its arrays as they are; what is shown of them, `arrays`, may be something else.

    Raises:
      StorageError: it can't be opened, or is of a kind whose weights aren't plain arrays.
    """

    checks_itself = True

    def __init__(self, items: Store, as_is: bool = False):
        self.url = items.url
        self._folders = folders_of(items)
        self._items, self._files = items, Files.of(items, hashed=False)
        opened = open_arrays(items, complete=True)
        names = {} if as_is else _names(items)
        self._stores = {names.get(key, key): store for key, store in opened.items()}
        self._record = record_of(items)
        self.lost = find_lost(self._record, opened.keys())
        self._digested = {
            names.get(key, key): _Array.of(key, opened[key]) for key in known_digests(self._record) if key in opened
        }
        self.has_digests = bool(self._digested)
        self._noted: list[tuple[int, Shares]] | None = None
        axes = self._record.get("axes", {})
        self.stored: Mapping[str, Described] = {
            key: self._described(store, axes.get(key)) for key, store in self._stores.items()
        }
        self.arrays: Mapping[str, Described] = self.stored

    def name_axes(self, axes: Mapping[str, tuple[str | None, ...]]) -> None:
        """Says what the axes of weights are called, where the checkpoint itself doesn't."""
        named = {key: dataclasses.replace(self.arrays[key], axes=names, has_axes=True) for key, names in axes.items()}
        self.arrays = {**self.arrays, **named}

    @staticmethod
    def _described(store: ts.TensorStore, axes: Sequence[str | None] | None) -> Described:
        shape, dtype = tuple(store.shape), np.dtype(store.dtype.numpy_dtype)
        chunk, _ = grains(store)
        known = axes is not None and len(axes) == len(shape)
        names = tuple(axes) if axes is not None and known else (None,) * len(shape)
        order = tuple(axis for axis, (size, step) in enumerate(zip(shape, chunk, strict=True)) if step < size)
        element = 3 * dtype.itemsize  # a chunk as it is stored, decoded, and what is made
        return Described(shape, dtype, names, None, order, chunk, element, has_axes=known)

    def make(
        self, wanted: Sequence[Wanted], empty: Allocate = np.empty, results: Sequence[Allocate] | None = None
    ) -> tuple[list[np.ndarray], int]:
        makers = list(results or [empty] * len(wanted))
        plain = [self.stored[want.key].dtype == want.dtype for want in wanted]
        made = [
            (maker if same else empty)(extent(want.box), self.stored[want.key].dtype)
            for want, maker, same in zip(wanted, makers, plain, strict=True)
        ]
        with same_folders(self._folders):
            reads = [self._read(key, box, into) for (key, box, *_), into in zip(wanted, made, strict=True)]
            try:
                for read in reads:
                    read.result()
            except ValueError as e:  # TensorStore's, of whatever went wrong
                raise StorageError(f"{self.url}: {ocdbt.brief(e)}") from e
        self._note(wanted, made)
        nbytes = sum(self.cost(key, [box]).nbytes for key, box, *_ in wanted)
        for number, (want, maker) in enumerate(zip(wanted, makers, strict=True)):
            if not plain[number]:
                made[number] = cast(made[number], want.dtype, want.key, maker)
        return made, nbytes

    def sum_up(self) -> None:
        self._noted = []

    def _note(self, wanted: Sequence[Wanted], values: Sequence[np.ndarray]) -> None:
        """Notes the shares of the shards that were read whole."""
        if self._noted is None:
            return
        for want, read in zip(wanted, values, strict=True):
            if array := self._digested.get(want.key):
                add_shares(shares := Shares(), array, want.box, read)
                self._noted.append((want.others, shares))

    def summed(self, names: Sequence[str]) -> np.ndarray:
        """What this process has read since `sum_up`: of each array how many shards it was the first to read, the sum of
        their shares, and what tells its copy from those of others. The latter is the share of each shard, subtracted by
        all who read it, but added by the first of them as often: where all have read the same values, the sum of all
        processes is 0.

            processes 0, 1 and 2 read a shard of share s      0 adds 2 s      1 and 2 add -s each

        Returns:
          A row for each name, `(array, word)` of uint32, the lowest word of a sum first, which processes can exchange.
        """
        first = total(shares for others, shares in self._noted or () if others >= 0)
        copies = Counter[str]()
        for others, shares in self._noted or ():
            for key, (_, share) in shares.items():
                copies[key] += others * int(share, 16)
        rows = np.zeros((len(names), 1 + 2 * DIGEST_WORDS), np.uint32)
        for row, name in zip(rows, names, strict=True):
            if array := self._digested.get(name):
                count, share = first.get(array.key, (0, "0"))
                row[:] = [count, *_words(int(share, 16)), *_words(copies[array.key])]
        return rows

    def compare_read(self, names: Sequence[str], gather: Callable[[np.ndarray], np.ndarray]) -> Compared:
        return self.compare(names, gather(self.summed(names)))

    def compare(self, names: Sequence[str], sums: np.ndarray, more: Sequence[str] = ()) -> Compared:
        """Compares the arrays that were read since `sum_up` with the digests of the checkpoint's record, as far as it was
        by whole shards: what this process read of an array by itself, else what all processes did together.

        Args:
          names: of the arrays.
          sums: what `summed` returned in each process, `(process, array, word)`.
          more: names of arrays that each process has read for itself alone.

        Raises:
          StorageError: some aren't what was written, or not in each process what they are in the others.
        """
        together, unlike = Shares(), []
        for name, rows in zip(names, sums.swapaxes(0, 1).tolist(), strict=True):
            if array := self._digested.get(name):
                share = _sum_of(row[1 : 1 + DIGEST_WORDS] for row in rows)
                together[array.key] = sum(count for count, *_ in rows), f"{share:032x}"
                if _sum_of(row[1 + DIGEST_WORDS :] for row in rows):
                    unlike.append(name)
        arrays = [self._digested[name] for name in (*names, *more) if name in self._digested]
        own = total(shares for _, shares in self._noted or ())
        whole = {array.key: own[array.key] for array in arrays if own.get(array.key, (0,))[0] == shard_count(array)}
        found, damaged = find_damage(self._record, arrays, [{**together, **whole}])
        asked = len(names) + len(more)
        compared = Compared.of(self._record, found.arrays, asked - found.arrays, asked - len(arrays))
        if damaged:
            raise StorageError(damage(self.url, damaged, compared.arrays))
        if unlike:
            raise StorageError(
                f"{self.url}: some processes read other values than others of {listed(unlike, 3, 'arrays')}; so what one of "
                f"them reads is damaged, or another copy: take the source anew there"
            )
        return compared

    def _read(self, key: str, box: Box, into: np.ndarray) -> ts.WriteFutures:
        """Begins to read a box into an array."""
        part = self._stores[key][slices(box)]
        return ts.array(into, copy=False, write=True).write(part[ts.d[:].translate_to[0]] if box else part)

    def cost(self, key: str, boxes: Sequence[Box]) -> Cost:
        array = self.stored[key]
        chunks = set()
        for box in boxes:
            if volume(box):
                touched = [
                    range(start // step, -(-stop // step)) for (start, stop), step in zip(box, array.grain, strict=True)
                ]
                chunks |= set(itertools.product(*touched))
        elements = sum(volume(tile(chunk, array.grain, array.shape)) for chunk in chunks)
        return Cost(elements * array.dtype.itemsize, len(chunks))

    def identity(self) -> dict[str, str]:
        remote = "://" in self.url
        told = {file.name: f"{file.size:,} bytes{f', {file.version}' if remote else ''}" for file in self._files.files}
        said = json.dumps([self._record.get(field) for field in ("digests", "axes")], sort_keys=True).encode()
        told[f"what {RECORD} says of its arrays"] = hashlib.sha256(said).hexdigest()[:16]
        return told | ({"the source": self.url} if remote else {"bytes of its files": self._blocks})

    @functools.cached_property
    def _blocks(self) -> str:
        """A hash of some bytes of each file, for other processes to compare."""
        return hash_files(self._items, self._files.files)

    def check(self) -> None:
        self._files.check()


def _words(number: int) -> list[int]:
    """A number, mod 2^128, in words of 32 bits, the lowest first."""
    return [number >> 32 * word & 0xFFFFFFFF for word in range(DIGEST_WORDS)]


def _sum_of(rows: Iterable[Sequence[int]]) -> int:
    """The sum of numbers in such words, mod 2^128."""
    return sum(word << 32 * place for words in rows for place, word in enumerate(words)) % (1 << 32 * DIGEST_WORDS)


def _names(items: Store) -> dict[str, str]:
    """MaxText's name of each weight, by its key in the checkpoint."""
    try:
        tree = recognize(leaves(read_tree(items)))
    except TreeError as e:
        raise StorageError(
            f"{items}: {e}; weightbeam.open(…, as_is=True) opens its arrays under their own names"
        ) from e
    return {key: name for name, key in tree.weights.items()}
