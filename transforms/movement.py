"""Source, target and movement: what all commands that move weights have in common, as three small protocols.

    Source ── arrays, read in boxes ──▸ Movement ── what its units make ──▸ Target

| source | is |
|---|---|
| a release | `HfCheckpoint`; `formats/sources.py` shows its tensors dequantised, under the table's names |
| an Orbax checkpoint | `OrbaxCheckpoint`, its arrays in whole chunks |

| target | is written by |
|---|---|
| an Orbax checkpoint | `Conversion`, `Reshard`, with `formats/orbax/writing.py` |
| a release | `Export`, `Merge`, as `rows.ReleasePlan`, with `formats/release_target.py` |

A source's arrays are `formats.encodings.StoredArray`s: a box of values needs some reads, and these are decoded into it.
A movement is a plan that both follow from: each worker makes it anew of the staged inputs, spells units out, and hands
to the target what they make.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from weightbeam.formats.staging import Staging
from weightbeam.formats.storage import Store
from weightbeam.transforms.units import Block, Fetch


class Source(Protocol):
    """What is read: known by its headers or its metadata, before any value is."""

    @property
    def root(self) -> str:
        """URL."""
        ...

    @property
    def array_count(self) -> int:
        """How many arrays it holds, as they are stored."""
        ...

    def check(self) -> None:
        """Checks that it is what was planned with, before anything is published.

        Raises:
          StorageError: it isn't, or is gone.
        """
        ...

    def to_json(self) -> dict[str, Any]:
        """All that a worker needs to read it without looking at it again."""
        ...


class Target(Protocol):
    """What is written. A unit counts when the ledger has an entry of it; readers see nothing before all units do."""

    @property
    def made_bytes(self) -> int:
        """Bytes that the units write."""
        ...

    def prepare_place(self, staging: Staging, link: str, hashed: bool) -> None:
        """Puts there what has to be there before the first unit."""
        ...

    def write(
        self, staging: Staging, unit: Any, made: Sequence[np.ndarray], notes: Mapping[str, Any] | None = None
    ) -> int:
        """Writes what a unit has made durably, and enters the unit in the ledger; returns the bytes, of values. Any
        number of attempts may.

        `notes` is what its entry says beside: what `note_reads` had to say, and what `CompareRows` found.
        """
        ...

    def assemble(self, staging: Staging, overwrite: bool) -> None:
        """Makes the published result of the units that are done, by reference where the medium can."""
        ...


class UnitOfWork(Protocol):
    """A unit, spelled out: complete in itself."""

    @property
    def id(self) -> int: ...

    @property
    def fetches(self) -> Sequence[Fetch]: ...

    @property
    def recipes(self) -> Sequence[Any]:
        """What is made; see `stack.Recipe`."""
        ...

    @property
    def is_done(self) -> bool: ...

    @property
    def working_bytes(self) -> int: ...


class Movement(Target, Protocol):
    """What a pipeline carries out: the plan of a conversion, an export, a merge or a reshard."""

    @property
    def kind(self) -> str:
        """The command's name."""
        ...

    @property
    def hash(self) -> str:
        """Identifies the result."""
        ...

    @property
    def source(self) -> Source: ...

    @property
    def inputs(self) -> Sequence[str]:
        """URLs of all that the result is made of."""
        ...

    @property
    def units(self) -> Sequence[Sequence[Block]]: ...

    @property
    def unit_bytes(self) -> int:
        """Bound on the memory of a unit."""
        ...

    @property
    def unit_working_bytes(self) -> int:
        """Memory of the largest unit."""
        ...

    def stage(self) -> bytes:
        """The inputs, compressed."""
        ...

    @property
    def chunks(self) -> Sequence[object]:
        """What has to be unpacked before the first unit; mostly nothing."""
        ...

    def unpack(self, number: int, place: Store) -> int:
        """Unpacks one of the chunks; returns the bytes that were decoded."""
        ...

    def expand(self, unit: int, place: Store) -> UnitOfWork:
        """A unit, spelled out; `place` is where the plan is at work."""
        ...

    def note_reads(self, unit: Any, raw: Sequence[Sequence[np.ndarray]]) -> dict[str, Any]:
        """What a unit's ledger entry should say of what it read, as JSON; `raw` are the stored boxes of each fetch."""
        ...
