"""A transfer: weights from a source to a target, as a plan that every worker makes alike.

    sources ── arrays, read in boxes ──▸ Transfer ── what its units make ──▸ Target

| transfer | reads | its target |
|---|---|---|
| `Conversion` | a release, adapters | `OrbaxTarget`, or another one of arrays |
| `Reshard` | an Orbax checkpoint, adapters of MaxText's | `OrbaxTarget` |
| `Export` | an Orbax checkpoint, adapters, parts of a release | `ReleaseTarget` |
| `Merge` | a release, adapters | `ReleaseTarget` |

A direction says what it reads, what a unit is (`expand`), and which facts go into the hash, the record and the staged
inputs. All else is here, once: what identifies the plan, how it is staged, whether its sources are as they were, how a
unit's results get to the target, and how they are published.

What is staged beside the output are the inputs; each worker makes the plan of them again (seconds for a trillion
parameters) and refuses to work if it comes out differently (`staged.py`).
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from weightbeam.formats.record.naming import Naming
from weightbeam.formats.record.provenance import versions
from weightbeam.formats.staging import BYTES, Staging
from weightbeam.formats.storage import Store
from weightbeam.formats.storage.identity import Watched
from weightbeam.formats.targets import Target
from weightbeam.model_mappings import entry_points
from weightbeam.model_mappings.plan import ArrayPlan, Problem
from weightbeam.model_mappings.trust import code_of
from weightbeam.transforms.cutting.blocks import Block, working_bytes
from weightbeam.transforms.cutting.units import Unit
from weightbeam.transforms.planning.inputs import Identity, pack_inputs, this_code
from weightbeam.transforms.planning.options import Delivery, hashed

DECODING_VERSION = 1  # raise it when an encoding or an operation gives other values


class Source(Watched, Protocol):
    """What is read: known by its headers or its metadata, before any value is."""

    @property
    def root(self) -> str:
        """URL."""
        ...

    @property
    def paths(self) -> Sequence[str]:
        """Its files that may be links to elsewhere."""
        ...

    @property
    def array_count(self) -> int:
        """How many arrays it holds, as they are stored."""
        ...

    def unreadable(self) -> list[Problem]:
        """The files whose end can't be read."""
        ...

    def to_json(self) -> dict[str, Any]:
        """All that a worker needs to read it without looking at it again."""
        ...


class PlanOptions(Protocol):
    """What the options of every plan say; each is a dataclass of `options.py`."""

    @property
    def unit_bytes(self) -> int: ...

    @property
    def full_paths(self) -> bool | None: ...


class MergedAdapter(Protocol):
    """An adapter that is merged on the way: one of PEFT's, or of MaxText's."""

    @property
    def files(self) -> Source: ...

    @property
    def identity(self) -> list[Any]: ...

    def to_json(self) -> list[Any]:
        """As JSON, for workers."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer(abc.ABC):
    """The plan of a command that moves weights.

    Attributes:
      kind: the command's name.
      doing: the verb of its progress bar: `converting`.
      title: what messages and commits call the result: `Export`.
      options: the user's; a dataclass.
      source: what is read before all.
      adapters: what is merged on the way.
      plan: the arrays, what is left out, and the problems.
      units: the blocks of each unit; none if there are problems.
      warnings: what the user should know.
      slots: units at a time of all workers that the units were cut for; None where they are as large as they may be.
      staged_small: `small_hashes` as they were staged; None where the plan isn't made of what is staged.
    """

    kind: ClassVar[str]
    doing: ClassVar[str]
    title: ClassVar[str]
    options: PlanOptions
    source: Source
    adapters: tuple[MergedAdapter, ...]
    plan: ArrayPlan
    units: tuple[tuple[Block, ...], ...] = ()
    warnings: tuple[str, ...] = ()
    slots: int | None = None
    staged_small: Mapping[str, str] | None = None

    # --- what a direction says

    @property
    @abc.abstractmethod
    def target(self) -> Target:
        """What is written; nothing where there are problems."""

    @property
    def pattern(self) -> tuple[str, str]:
        """The release whose form the result has: its URL, and the digest of its content (`naming.digest`); both empty
        where there is none.
        """
        return "", ""

    @property
    @abc.abstractmethod
    def source_bytes(self) -> int:
        """Bytes of what is read."""

    @abc.abstractmethod
    def expand(self, unit: int, folder: Store) -> Unit:
        """A unit, spelled out; `folder` is where the plan is at work."""

    @abc.abstractmethod
    def facts(self) -> dict[str, Any]:
        """What the record says beside what every record does."""

    def staged(self) -> dict[str, Any]:
        """The inputs, as JSON, of which a worker makes the same plan."""
        return {"source": self.source.to_json(), "adapters": [adapter.to_json() for adapter in self.adapters]}

    # --- what it may say

    @property
    def sources(self) -> tuple[Source, ...]:
        """All whose values are read, `source` first."""
        return self.source, *(adapter.files for adapter in self.adapters)

    @property
    def target_bytes(self) -> int:
        """Bytes of the arrays, or tensors, of the result."""
        return sum(array.nbytes for array in self.plan.arrays)

    @property
    @abc.abstractmethod
    def config(self) -> Mapping[str, Any]:
        """The `config.json` that the plan goes by."""

    def settled(self) -> list[Any]:
        """What settles the result beside options, sources, arrays and units, as JSON that is the same everywhere."""
        return [self.config, [adapter.identity for adapter in self.adapters]]

    def hash_small(self) -> Mapping[str, str]:
        """A hash of each small file of the result that isn't part of another input, by its name."""
        return {}

    @property
    def inputs(self) -> Sequence[str]:
        """URLs of all that the result is made of, `source` first."""
        return tuple(source.root for source in self.sources)

    @property
    def made_bytes(self) -> int:
        """Bytes that the units write."""
        return self.target_bytes

    @property
    def linked_bytes(self) -> int:
        """Bytes of the source's files that become part of the result."""
        return 0

    @property
    def chunks(self) -> Sequence[object]:
        """What has to be unpacked before the first unit; mostly nothing."""
        return ()

    def unpack(self, number: int, folder: Store) -> int:
        """Unpacks one of the chunks, in the folder where the plan is at work; returns the bytes that were decoded."""
        raise IndexError(number)

    def note_reads(self, unit: Unit, raw: Sequence[Sequence[np.ndarray]]) -> dict[str, Any]:
        """What a unit's ledger entry should say of what it read, as JSON; `raw` are the stored boxes of each fetch."""
        return {}

    def bring(self, place: Staging, how: Delivery) -> None:  # noqa: B027
        """Brings there what no unit makes: files of the source."""

    def check_complete(self, place: Staging, how: Delivery) -> None:  # noqa: B027
        """Raises `LinkError` where what is complete but for its name isn't what `bring` would make."""

    def copy(self, unit: Unit, notes: dict[str, Any]) -> Sequence[Any]:
        """Reads the chunks that a unit copies as they are encoded; adds to the notes of its ledger entry."""
        return ()

    def conclude(self, place: Staging, ledger: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        """What the ledger's entries add to the record; it raises where they speak against publishing."""
        return {}

    # --- what all have in common

    @property
    def small_hashes(self) -> Mapping[str, str]:
        """`hash_small`, which a worker is told."""
        return self.hash_small() if self.staged_small is None else self.staged_small

    @functools.cached_property
    def hash(self) -> str:
        """Identifies the result: the sources' files and headers, the small files, the options, each array and what it
        is made of, how it is written, the units. The same everywhere.
        """
        identity = Identity()
        identity.add(DECODING_VERSION, self.kind, hashed(self.options), dict(self.small_hashes), self.settled())
        for code in self._code():
            identity.add(code)
        for source in self.sources:
            identity.add(source.identity)
        for facts in self._arrays():
            identity.add(*facts)
        identity.add(self.target.identity)
        for unit in self.units:
            identity.add([(block.array, block.shards) for block in unit])
        return identity.hash

    @functools.cached_property
    def making(self) -> str:
        """Identifies how each array is made of the source's tensors, wherever it is written."""
        identity = Identity()
        identity.add(DECODING_VERSION, *self._code())
        for facts in self._arrays():
            identity.add(*facts)
        return identity.hash

    def _code(self) -> Iterator[object]:
        """Whose code decodes and maps, where no table's words tell what it does."""
        if others := entry_points.versions(entry_points.ENCODINGS):
            yield others
        if code := self.plan.code or code_of(getattr(self.options, "family", None)):
            yield code

    def _arrays(self) -> Iterator[tuple[object, ...]]:
        """Each array, and what it is made of by which rules."""
        for array in self.plan.arrays:
            parts = [(part.tensors, repr(part.rule), part.layers.tolist()) for part in array.parts]
            yield array.key, array.shape, array.dtype.name, array.fill, parts

    def stage(self) -> bytes:
        """The inputs, compressed; `staged.load` makes the same plan of them."""
        inputs = {
            "kind": self.kind,
            "options": hashed(self.options),
            "slots": self.slots,
            "small": dict(self.small_hashes),
            "hash": self.hash,
            "code": this_code(),
        }
        return pack_inputs({**inputs, **self.staged()})

    def record(self) -> dict[str, Any]:
        """Where the result comes from; see `formats/record/provenance.py`."""
        slots = {} if self.slots is None else {"slots": self.slots}
        return {"plan": self.hash, "options": hashed(self.options), **slots, "versions": versions(), **self.facts()}

    @property
    def unit_bytes(self) -> int:
        """Bound on the memory of a unit: what it may have, or more where a single row takes more."""
        return max(self.options.unit_bytes, self.unit_working_bytes)

    @property
    def thread_bytes(self) -> int:
        """Bound on the memory of a thread that makes units."""
        return self.unit_bytes

    @property
    def unit_working_bytes(self) -> int:
        """Memory of the largest unit."""
        return max(map(working_bytes, self.units), default=0)

    @property
    def places(self) -> list[str]:
        """URLs of all that nothing may be written over: what it is made of, and files that are links to elsewhere."""
        return [url for url in (*self.inputs, *(path for source in self.sources for path in source.paths)) if url]

    def was_touched(self, since: Transfer) -> bool:
        """Whether a file that is read was replaced since a plan with the same hash was made; that isn't in the hash, as
        files may have moved, times and all.
        """
        pairs = zip(self.sources, since.sources, strict=True)
        return any(now.was_touched(then, bool(self.linked_bytes)) for now, then in pairs)

    def check(self) -> None:
        """Checks that the files that are read are those that were planned with.

        Raises:
          StorageError: one isn't, or is gone.
        """
        for source in self.sources:
            source.check()

    def unreadable(self) -> list[Problem]:
        """The files that are read whose end can't be."""
        return [problem for source in self.sources for problem in source.unreadable()]

    def naming(self, place: str) -> Naming:
        """How the sources are named where the result goes."""
        return Naming.of(place, self.options.full_paths, self.sources, self.inputs)

    def prepare(self, place: Staging, how: Delivery) -> None:
        """Puts there what has to be there before the first unit.

        Raises:
          StorageError: files of the source can't be read, or put there.
        """
        self.target.prepare(place)
        self.bring(place, how)

    def write(
        self, place: Staging, unit: Unit, made: Sequence[np.ndarray], notes: Mapping[str, Any] | None = None
    ) -> int:
        """Hands what a unit has made to the target, which enters it in the ledger; returns the bytes, of values.

        `notes` is what its entry says beside: what `note_reads` had to say, and what `CompareRows` found.
        """
        said = dict(notes or {})
        parts = [part for recipe, values in zip(unit.recipes, made, strict=True) for part in recipe.parts(values)]
        copies = self.copy(unit, said)
        said[BYTES] = sum(values.nbytes for *_, values in parts) + sum(copy.values.nbytes for copy in copies)
        self.target.write(place, unit.id, parts, said, copies)
        return said[BYTES]

    def assemble(self, place: Staging, overwrite: bool) -> None:
        """Publishes the result of the units that are done.

        Raises:
          StorageError: what it is made of changed meanwhile.
          ValueError: units are missing, or don't hold what they should.
        """
        self.check()
        record = self.naming(place.final.url).apply(self.record())
        self.target.assemble(place, len(self.units), record, overwrite, functools.partial(self.conclude, place))
