"""What an export and a reshard have in common: their source is a checkpoint.

What its record has digests of is compared with them while it is read (`comparing/array_sums.py`), and chunks that no unit
can hold are unpacked before the first one.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from weightbeam.formats.orbax import STEP, unknown_beside
from weightbeam.formats.orbax.source import ChunkRead, OrbaxArray, OrbaxCheckpoint
from weightbeam.formats.orbax.unpacking import chunks, share_name, unpack
from weightbeam.formats.staging import UNPACKED, Staging
from weightbeam.formats.storage import Store, open_store
from weightbeam.transforms.comparing.array_sums import CHECKED, Shares, add_shares, damage, find_damage, known_digests
from weightbeam.transforms.comparing.source_sums import DamagedError
from weightbeam.transforms.cutting.units import Unit
from weightbeam.transforms.planning.transfer import Transfer

NOTE = "read"  # in a unit's ledger entry
ONLY_ON_ITS_WAY = "If it was damaged on its way only, the same command with --resume reads these arrays again"


class FromCheckpoint(Transfer):
    """A transfer whose `source` is an Orbax checkpoint."""

    source: OrbaxCheckpoint

    @abc.abstractmethod
    def keys_of(self, array: int) -> Collection[str]:
        """The source's keys of what an array of the plan is made of, by its number."""

    @property
    @abc.abstractmethod
    def unpacked(self) -> Mapping[OrbaxArray, str]:
        """The stored arrays whose chunks are unpacked before the first unit, each with the prefix of its files' names."""

    @functools.cached_property
    def chunks(self) -> list[tuple[OrbaxArray, tuple[int, ...]]]:
        """The chunks to unpack before the first unit: each array and the chunk's index."""
        return [(array, index) for array in self.unpacked for index in chunks(array)]

    def unpack(self, number: int, folder: Store) -> int:
        """Unpacks one of the chunks, in the folder where the plan is at work; returns the bytes that were decoded."""
        array, index = self.chunks[number]
        return unpack(array, index, folder, self.unpacked[array], array in self.summed)

    @functools.cached_property
    def arrays_read(self) -> list[OrbaxArray]:
        """The arrays of the source that are read, but for the step, which nobody computes with."""
        keys = dict.fromkeys(key for array in range(len(self.plan.arrays)) for key in self.keys_of(array))
        return [self.source.arrays[key] for key in keys if key != STEP.key]

    @functools.cached_property
    def summed(self) -> frozenset[OrbaxArray]:
        """Those whose digests are known."""
        known = known_digests(self.source.record)
        return frozenset(array for array in self.arrays_read if array.key in known)

    def note_reads(self, unit: Unit, raw: Sequence[Sequence[np.ndarray]]) -> dict[str, Any]:
        """For a unit's ledger entry: the shares of the shards that it read whole."""
        shares = Shares()
        for fetch, arrays in zip(unit.fetches, raw, strict=True) if self.summed else ():
            for read, values in zip(fetch.encoding.reads(fetch.box), arrays, strict=True):
                if isinstance(read, ChunkRead) and read.array in self.summed:
                    add_shares(shares, read.array, read.box, values)
        return {NOTE: shares} if shares else {}

    def compare_reads(
        self, staging: Staging, ledger: Mapping[int, Mapping[str, Any]], written: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Compares all that was read with the digests, and says for the record how many arrays that were; nothing where
        there are none. `written` as of `find_damage`.

        Raises:
          DamagedError: some aren't right; the units that read them aren't in the ledger any more.
        """
        folder = staging.plan_folder
        noted = [entry.get(NOTE, {}) for entry in ledger.values()]
        own = [(array, index) for array, index in self.chunks if array.items == self.source.root]
        summed = [(array, index) for array, index in own if array in self.summed]
        shares = folder.read_many([share_name(array, index) for array, index in summed])
        noted += [{array.key: (1, share.decode())} for (array, _), share in zip(summed, shares, strict=True)]
        compared, keys = find_damage(self.source.record, self.arrays_read, noted, written)
        if not keys:
            unknown = unknown_beside(open_store(self.source.root).parent, self.source.record)
            return {CHECKED: dataclasses.replace(compared, files=unknown).to_dict()}
        of_these = {number for number in range(len(self.plan.arrays)) if {*self.keys_of(number)} & {*keys}}
        units = [n for n, unit in enumerate(self.units) if any(block.array in of_these for block in unit)]
        why = f"{damage(self.source.root, keys, compared.arrays)}, and start anew with --overwrite. {ONLY_ON_ITS_WAY}"
        staging.ledger.withdraw(units, why)  # first: units that read damage don't count with chunks that are right
        for array in {array for array, _ in own if array.key in keys}:
            folder.delete_folder(f"{UNPACKED}/{array.key}")
        raise DamagedError(why, units)
