"""The source's arrays, checked on their way: what units read of a checkpoint of ours has the digests of its record.

A digest is a sum over shards (`formats/record/provenance.py`), so nothing has to be read for it: each unit notes the shares of
the shards that it has read whole, and at the end those of all units make up the digest of each array. An array of which
units read parts of shards, or which the record knows no digest of, isn't compared, and that is said.

That is what we wrote into a checkpoint; what a bucket says of its files, any source's, is `source_sums.py`'s.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from weightbeam.formats.orbax.references import files_of
from weightbeam.formats.orbax.source import ChunkRead, OrbaxArray
from weightbeam.formats.record.provenance import RECORD, digest
from weightbeam.formats.storage import open_store
from weightbeam.formats.text.printable import listed
from weightbeam.model_mappings.boxes import Box, tile, whole
from weightbeam.model_mappings.plan import Problem

NOT_COMPARED = "not compared:"
CHECKED = "checked"  # in the record of what is made
TASK_BYTES = 256 << 20  # of an array, read in one go
SHOWN = 3  # arrays, and files of each, that a message names

# of an array by its key: how many shards, and the sum of their shares, as a hexadecimal number
Shares = dict[str, tuple[int, str]]


@dataclasses.dataclass(frozen=True)
class Compared:
    """How many arrays were compared with the digests of their record, and how many couldn't be, and why.

    Attributes:
      arrays: that were compared.
      not_compared: the others.
      why: in words; empty where all were compared.
      files: of the small files beside the checkpoint those whose hash isn't known.
    """

    arrays: int = 0
    not_compared: int = 0
    why: str = ""
    files: tuple[str, ...] = ()

    @classmethod
    def of(cls, record: Mapping[str, Any], arrays: int, not_compared: int, unknown: int) -> Compared:
        """What was compared with a checkpoint's record, which is empty where there is none.

        Args:
          arrays, not_compared: as they are kept.
          unknown: how many of the latter the record has no digest of.
        """
        in_parts = f"read in other parts than those that {RECORD} has digests of"
        if not record:
            why = f"no {RECORD} with their digests lies beside them, which Weightbeam alone writes"
        elif not known_digests(record):
            why = f"{RECORD} has no digests"
        elif unknown == not_compared:
            why = f"{RECORD} has no digest of them"
        else:
            why = (
                f"{RECORD} has no digest of {unknown}, and the others were {in_parts}"
                if unknown
                else f"they were {in_parts}"
            )
        return cls(arrays, not_compared, why if not_compared else "")

    def gaps(self) -> Iterator[str]:
        """What wasn't compared, and why."""
        if self.files:
            yield f"{' and '.join(self.files)}: {RECORD} has no hash of them"
        if self.not_compared:
            yield f"{self.not_compared} of {self.arrays + self.not_compared} arrays: {self.why}"

    def lines(self) -> list[str]:
        """The lines that say so."""
        return [f"{NOT_COMPARED} {gap}" for gap in self.gaps()]

    def to_dict(self) -> dict[str, Any]:
        """As JSON, without what is empty."""
        counts = {"arrays": self.arrays, "not_compared": self.not_compared}
        return {**counts, **({"why": self.why} if self.why else {}), **({"files": self.files} if self.files else {})}


def compared_of(record: Mapping[str, Any] | None) -> Compared | None:
    """What the record of what was made says of it; None where it says nothing."""
    said = (record or {}).get(CHECKED)
    try:
        return Compared(**{**said, "files": tuple(said.get("files", ()))}) if isinstance(said, dict) else None
    except TypeError:  # it isn't ours
        return None


class Sharded(Protocol):
    """An array, and the shape of what was written whole and has a share in its digest."""

    @property
    def key(self) -> str: ...

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def shard(self) -> tuple[int, ...]: ...


def known_digests(record: Mapping[str, Any]) -> dict[str, str]:
    """The digests that a checkpoint's record has, by the arrays' keys; what is none is left out."""
    said = record.get("digests")
    return {key: known for key, known in said.items() if isinstance(known, str)} if isinstance(said, dict) else {}


def find_lost(record: Mapping[str, Any], keys: Collection[str]) -> list[Problem]:
    """The arrays that a checkpoint's record has digests of and that aren't there, as a tree that was cut short lacks them;
    `keys` are those that are.
    """
    message = f"{RECORD} says that it was written, and it isn't there: the checkpoint is damaged"
    return [Problem("lost", key, message, is_array=True) for key in known_digests(record) if key not in keys]


def add_shares(shares: Shares, array: Sharded, box: Box, values: np.ndarray) -> None:
    """Adds the shares of the shards that lie whole in a box whose values are these."""
    for shard in _shards_in(array, box):
        inside = tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(shard, box, strict=True))
        share = f"{digest(array.key, array.dtype, shard, values[inside]):x}"
        shares[array.key] = _sum(shares.get(array.key), (1, share))


def total(noted: Iterable[Mapping[str, Sequence[Any]]]) -> Shares:
    """All that was noted as one."""
    sums = Shares()
    for key, more in itertools.chain(*(shares.items() for shares in noted)):
        sums[key] = _sum(sums.get(key), more)
    return sums


def _sum(so_far: Sequence[Any] | None, more: Sequence[Any]) -> tuple[int, str]:
    """Two entries of `Shares` as one."""
    count, share = so_far or (0, "0")
    return count + more[0], f"{(int(share, 16) + int(more[1], 16)) % (1 << 128):032x}"


def _shards_in(array: Sharded, box: Box) -> Iterator[Box]:
    """The shards of an array that lie whole in a box."""
    whole = [
        range(-(-start // step), -(-stop // step) if stop == size else stop // step)
        for (start, stop), step, size in zip(box, array.shard, array.shape, strict=True)
    ]
    for index in itertools.product(*whole):
        yield tile(index, array.shard, array.shape)


def shard_count(array: Sharded) -> int:
    """How many shards an array has."""
    return math.prod(-(-size // step) for size, step in zip(array.shape, array.shard, strict=True))


def find_damage(
    record: Mapping[str, Any],
    arrays: Iterable[Sharded],
    noted: Iterable[Mapping[str, Sequence[Any]]],
    written: Mapping[str, str] | None = None,
) -> tuple[Compared, list[str]]:
    """Compares arrays of a checkpoint with its record.

    Args:
      record: the checkpoint's.
      arrays: what was read of it.
      noted: what was noted of them: `Shares`.
      written: the digests of arrays that were written as they were read, by their keys.

    Returns:
      How many were compared, and the keys of those that aren't what was written.
    """
    known, everything, sums = known_digests(record), {array.key: array for array in arrays}, total(noted)
    found = {key: share for key, (count, share) in sums.items() if count == shard_count(everything[key])}
    found = {key: share for key, share in {**found, **(written or {})}.items() if key in known}
    left = everything.keys() - found.keys()
    compared = Compared.of(record, len(found), len(left), len(left - known.keys()))
    return compared, sorted(key for key, share in found.items() if share != known[key])


@dataclasses.dataclass(frozen=True, slots=True)
class ShardsRead:
    """The shares of some shards of an array that were read for them alone.

    Attributes:
      array: its key.
      shares: of the shards.
    """

    array: str
    shares: Shares

    @property
    def key(self) -> str:
        """Tells it from what else is found of the array."""
        return f"digest of {self.array}"

    def __add__(self, other: ShardsRead) -> ShardsRead:
        key = self.array
        return ShardsRead(key, {key: _sum(self.shares.get(key), other.shares.get(key, (0, "0")))})


@dataclasses.dataclass(frozen=True, slots=True)
class ShardsTask:
    """Neighbouring shards of an array that are read in one go, by their numbers."""

    array: OrbaxArray
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        """Bytes that are read, about; of all tasks of an array its own."""
        upto = [self.array.nbytes * number // shard_count(self.array) for number in (self.first, self.last)]
        return upto[1] - upto[0]

    def run(self) -> ShardsRead:
        """Reads them, one at a time.

        Raises:
          StorageError: one is missing or damaged.
        """
        shares = Shares()
        for box in itertools.islice(_shards_in(self.array, whole(self.array.shape)), self.first, self.last):
            (values,), _ = ChunkRead.fetch([ChunkRead(self.array, box)])
            add_shares(shares, self.array, box, values)
        return ShardsRead(self.array.key, shares)


def shards_tasks(record: Mapping[str, Any], arrays: Iterable[OrbaxArray]) -> list[ShardsTask]:
    """What reads all shards of the arrays whose digests are known, each task about `TASK_BYTES`."""
    known, made = known_digests(record), []
    for array in arrays:
        total = shard_count(array) if array.key in known else 0
        step = max(1, TASK_BYTES * total // max(1, array.nbytes))
        made += [ShardsTask(array, first, min(first + step, total)) for first in range(0, total, step)]
    return made


def damage(items: str, keys: Sequence[str], compared: int) -> str:
    """What is said of arrays that aren't what the record says: which, where they lie, what to do."""
    files = files_of(open_store(items), keys[:SHOWN])
    named = ", ".join(f"{key} (in {listed(files[key], SHOWN, 'files')})" for key in keys[:SHOWN])
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return (
        f"{items}: {len(keys)} of {compared} arrays that were compared aren't what {RECORD} says was written, by their "
        f"digests: {named}{more}. So the source is damaged: take a copy of it, or make it anew"
    )
