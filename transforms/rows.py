"""What every plan has in common that writes a release: its files at their full size, and units that write rows to their
places.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from weightbeam.formats import release_target
from weightbeam.formats.encodings import Encoding, Plain
from weightbeam.formats.naming import Naming, Source
from weightbeam.formats.release import hash_each
from weightbeam.formats.release_target import Rows
from weightbeam.formats.safetensors import INDEX, Tensor, read_boxes
from weightbeam.formats.staging import Staging
from weightbeam.model_mappings.boxes import Box, extent, volume
from weightbeam.model_mappings.cells import Piece
from weightbeam.model_mappings.plan import Plan, Problem
from weightbeam.transforms import baselines
from weightbeam.transforms.arena import aligned
from weightbeam.transforms.files import FileLayout
from weightbeam.transforms.units import Block, Fetch, InUnits, UnitOptions

VALUES = np.dtype(np.float32)
MADE = "made here"  # in place of a file's path


def made_here(name: str, shape: tuple[int, ...]) -> Encoding:
    """A tensor that is made of something else before an adapter is added to it, as the base of an encoding."""
    return Plain(Tensor(name, VALUES, shape, MADE, 0))


@dataclasses.dataclass(frozen=True, slots=True)
class RowsRecipe:
    """Rows of a tensor to make and to write.

    Attributes:
      tensor: where they go: `path` is the file's name in the release.
      box: of the tensor.
      pieces: what they are made of, each with the number of the fetch that holds its source.
      merged: what adapters make of the tensor, as an encoding whose base is `made_here` of it; None where none reaches
        it.
    """

    tensor: Tensor
    box: Box
    pieces: tuple[tuple[int, Piece], ...]
    merged: Encoding | None = None
    fill = None

    @property
    def written(self) -> np.dtype:
        """What the finished values have."""
        return self.tensor.dtype

    @property
    def dtype(self) -> np.dtype:
        """What is made of the pieces: float32 where an adapter is added to it, so that only the sum is rounded."""
        return self.written if self.merged is None else VALUES

    @property
    def counts(self) -> tuple[int, ...]:
        """It isn't cut further."""
        return (1,) * len(self.box)

    def write_as(self, values: np.ndarray) -> Iterator[Rows]:
        """The rows that are written, once the values are finished.

        Raises: see what overrides it.
        """
        yield self.tensor, self.box, values

    def finish(self, values: np.ndarray) -> np.ndarray:
        """The values with the adapters in them, of the dtype `written`.

        Raises:
          StorageError: an adapter can't be read.
          ContentError: it holds what can't be right.
        """
        if self.merged is None:
            return values
        reads = self.merged.reads(self.box)
        missing = [read for read in reads if read.tensor.path != MADE]
        fetched, _ = read_boxes(missing)
        rest, shaped = iter(fetched), values.reshape(extent(self.box))
        return self.merged.decode(
            [next(rest) if read.tensor.path != MADE else shaped for read in reads], self.box, self.written
        )


def finish(recipe: Any, made: np.ndarray) -> np.ndarray:
    """What a recipe asks for beyond the copy of its pieces: of rows the adapters."""
    return recipe.finish(made) if isinstance(recipe, RowsRecipe) else made


@dataclasses.dataclass(frozen=True, slots=True)
class RowsUnit:
    """A unit of work: what to read, and the rows that it becomes."""

    id: int
    fetches: tuple[Fetch, ...]
    recipes: tuple[RowsRecipe, ...]

    @property
    def is_done(self) -> bool:
        return not self.recipes

    @property
    def working_bytes(self) -> int:
        """Memory for all of its arrays: as they are stored, as they are decoded, and as they are written."""
        read = sum(aligned(part.nbytes) for fetch in self.fetches for part in fetch.encoding.reads(fetch.box))
        read += sum(
            aligned(volume(fetch.box) * fetch.dtype.itemsize)
            for fetch in self.fetches
            if fetch.encoding.label is not None
        )
        return read + sum(aligned(volume(recipe.box) * recipe.dtype.itemsize) for recipe in self.recipes)


class WritingOptions(UnitOptions, Protocol):
    """The options that every plan of a release has."""

    @property
    def max_shard_size(self) -> int | None: ...
    @property
    def full_paths(self) -> bool | None: ...


class ReleasePlan(InUnits):
    """The part of a plan that its release follows from; a dataclass with these fields adds where the values come from.

    Attributes:
      kind: of the plan, as it is staged.
      options: the user's.
      plan: what is left out, and the problems.
      files: where each tensor goes; None if there are problems.
      units: the blocks of each unit.
      small: the release's small files as they will be; not staged.
      staged_small: the hash of each, where the plan was made of what is staged.
      warnings: what the user should know.
      lossy: by tensor, why its values aren't the source's to the bit.
      config_edits: what of `config.json` has to change: `{field: value}`.
    """

    kind: str
    options: WritingOptions
    plan: Plan
    files: FileLayout | None
    units: tuple[tuple[Block, ...], ...]
    small: Mapping[str, bytes]
    staged_small: Mapping[str, str]
    warnings: tuple[str, ...]
    lossy: Mapping[str, str]
    config_edits: Mapping[str, Any]

    @property
    def layout(self) -> FileLayout:
        """The files of a plan without problems."""
        assert self.files is not None, "the plan has problems"
        return self.files

    @property
    def small_hashes(self) -> dict[str, str]:
        """The hash of each small file, by name."""
        return hash_each(self.small) or dict(self.staged_small)

    @property
    def title(self) -> str:
        """What the release is of its source, in one word: `Export`."""
        raise NotImplementedError

    @property
    def hash(self) -> str:
        """Identifies the result."""
        raise NotImplementedError

    @property
    def inputs(self) -> Sequence[str]:
        """URLs of all that the release is made of; it can't take the place of any."""
        raise NotImplementedError

    @property
    def sources(self) -> Sequence[Source]:
        """All whose values are read."""
        raise NotImplementedError

    @property
    def source_bytes(self) -> int:
        """Bytes of what is read."""
        raise NotImplementedError

    @property
    def target_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.files.tensors.values()) if self.files else 0

    @property
    def made_bytes(self) -> int:
        return self.target_bytes

    def record(self) -> dict[str, Any]:
        """Where the release comes from."""
        raise NotImplementedError

    def unreadable(self) -> list[Problem]:
        """The files of what it is made of whose end can't be read."""
        return []

    @property
    def texts(self) -> dict[str, bytes]:
        """The files that are known before any tensor is: the small ones and the index."""
        return {**self.small, **({} if self.layout.index is None else {INDEX: self.layout.index})}

    @property
    def shards(self) -> list[tuple[str, bytes, int]]:
        """The safetensors files: name, header, and size in bytes."""
        return [(file.name, file.header, file.size) for file in self.layout.files]

    def prepare_place(self, staging: Staging, link: str, hashed: bool) -> None:
        """Makes ready for the rows of units: the small files, and in a folder the others at their full size."""
        assert isinstance(staging, release_target.ReleasePlace)
        staging.lay_out(self.shards, self.texts)
        staging.note_small(self.texts)

    def write(
        self, staging: Staging, unit: RowsUnit, made: Sequence[np.ndarray], notes: Mapping[str, Any] | None = None
    ) -> int:
        """Writes the rows of a unit to their places, and enters the unit in the ledger; returns their bytes."""
        assert isinstance(staging, release_target.ReleasePlace)
        rows = [rows for recipe, values in zip(unit.recipes, made, strict=True) for rows in recipe.write_as(values)]
        release_target.write_unit(staging, unit.id, rows, notes)
        return sum(written.nbytes for *_, written in rows)

    def assemble(self, staging: Staging, overwrite: bool) -> None:
        """Publishes the release.

        Raises:
          StorageError: what it is made of changed meanwhile.
          release_target.IncompleteError: units are missing.
        """
        assert isinstance(staging, release_target.ReleasePlace)
        self.check()
        release_target.assemble(
            staging,
            len(self.units),
            self.shards,
            Naming.of(staging.final.url, self.options.full_paths, self.sources, self.inputs).told(self.record()),
            overwrite,
            baselines.gather,
            functools.partial(self.conclude, staging),
        )

    def conclude(self, staging: Staging, ledger: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        """What the units' ledger entries add to the record; it raises where they speak against publishing."""
        return {}
