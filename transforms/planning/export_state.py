"""What the steps of an export's planner hand on (`export_planner.py`); each value is one step's."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from weightbeam.formats.orbax.scaled import ScaledArray
from weightbeam.formats.orbax.source import OrbaxArray
from weightbeam.formats.release.source import ReleaseTensors
from weightbeam.model_mappings.cells import Part
from weightbeam.model_mappings.config import Config, Layout
from weightbeam.model_mappings.family import Family, rename
from weightbeam.model_mappings.keeping import keep_arrays
from weightbeam.model_mappings.naming import ModelNaming
from weightbeam.model_mappings.plan import Array, Problem, TensorSpec
from weightbeam.model_mappings.scales import TENSOR_SUFFIX
from weightbeam.transforms.cutting.files import Entry
from weightbeam.transforms.planning.exporting import Like
from weightbeam.transforms.planning.text_model import ALONE


class ReleasedTensor(NamedTuple):
    """A tensor of the release whose form the export takes; `name` is the release's own for it."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    name: str


@dataclasses.dataclass(frozen=True)
class ExportTable:
    """A family's table, and the releases that it is read back for.

    Attributes:
      naming: which of MaxText's models it is.
      form: the release whose form is taken, or that of its language model alone.
      config: of `form`.
      released: the tensors of `form`, by the table's names.
      stored: what the release stores, where tensors can be taken from it; else None.
    """

    family: Family
    naming: ModelNaming
    form: Like
    config: Config
    released: Mapping[str, ReleasedTensor]
    stored: ReleaseTensors | None

    def spelled(self, name: str) -> str:
        """The release's own name for a tensor; without a release that of transformers, which has a class for a text model
        alone. Scales that the table sees stand beside their weight.
        """
        if name not in self.released and name.endswith(TENSOR_SUFFIX):
            return self.spelled(name.removesuffix(TENSOR_SUFFIX)) + TENSOR_SUFFIX
        if name in self.released or self.form.tensors or "text_config" in self.config:
            return self.released[name].name if name in self.released else name
        return rename(name, ALONE)

    def can_take(self, name: str) -> bool:
        """Whether a tensor can be taken from a release."""
        return self.stored is not None and name in self.released and self.released[name].name in self.stored.encodings


@dataclasses.dataclass(frozen=True)
class ExportView:
    """The checkpoint's weights, by MaxText's keys.

    Attributes:
      weights: codes and scales as they are, or what they are the codes of.
      scaled: the weights whose codes and scales are taken as they are.
    """

    weights: Mapping[str, OrbaxArray | ScaledArray]
    scaled: Mapping[str, ScaledArray]

    @property
    def kept(self) -> bool:
        """Whether there are such."""
        return bool(self.scaled)

    def parts(self, parts: Mapping[str, list[Part]]) -> tuple[Mapping[str, list[Part]], list[Problem]]:
        """The parts of a table's arrays, those of scales among them, and what can't be read so."""
        return keep_arrays(parts, {key: max(scaled.block) for key, scaled in self.scaled.items()})


@dataclasses.dataclass(frozen=True)
class ExportFit:
    """How the table's arrays, in one layout, fit the checkpoint's.

    Attributes:
      arrays: those that the checkpoint has.
      problems: where they differ.
      lacking: tensors that would be made of arrays that aren't there, each with its array.
      misfit: tensors that would be made of arrays which have other shapes; or, where the checkpoint's model has other
        sizes than the release, those that the release's has.
    """

    arrays: tuple[Array, ...]
    layout: Layout
    problems: tuple[Problem, ...]
    lacking: Mapping[str, str]
    misfit: Collection[str] = ()

    @property
    def axes(self) -> tuple[object, ...]:
        """What each axis of each array is: the same in two layouts that make the same tensors."""
        return tuple((array.key, tuple(f for part in array.parts for f in part.target_axes)) for array in self.arrays)


@dataclasses.dataclass(frozen=True)
class ExportDrops:
    """The tensors of the release that no array makes.

    Attributes:
      reasons: why tensors are left out: `{pattern or window: reason}`.
      variables: those of them that are no parameters in MaxText.
      copies: the others, each with the tensor that it is a copy of.
    """

    reasons: Mapping[str, str]
    variables: Collection[str]
    copies: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class ExportTensors:
    """The tensors of the export, by the table's names.

    Attributes:
      made: those that arrays become, in the release's dtypes.
      names: what each of these is called in the release, the copies of it included.
      dropped: what is left out of the release, with the reason.
      taken: what is taken from the release, with the reason why no array makes it.
    """

    made: Mapping[str, TensorSpec]
    names: Mapping[str, tuple[str, ...]]
    dropped: Mapping[str, str]
    taken: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class ExportWritten:
    """What the tensors are written as.

    Attributes:
      dtypes: of the values that are made, by the table's names; float32 of what is quantised, which isn't rounded
        before.
      entries: every tensor that is made, before it is quantised, by the release's names.
      taken: every tensor that is taken from the release.
      quantized: those that become codes and scales, by the release's names.
      coded: the same by the table's names.
    """

    dtypes: Mapping[str, np.dtype]
    entries: Sequence[Entry]
    taken: Sequence[Entry]
    quantized: frozenset[str]
    coded: frozenset[str]


def made_of(arrays: Iterable[Array]) -> Iterator[str]:
    """The tensors that arrays become."""
    return (name for array in arrays for part in array.parts for name in part.tensors)
