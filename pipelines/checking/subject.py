"""What `verify` compares, planned: two sides, what their metadata alone say, and what is made of the findings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorstore as ts

from weightbeam.formats.adapters import Adapter
from weightbeam.formats.orbax import STEP
from weightbeam.formats.orbax.source import OrbaxArray, OrbaxCheckpoint
from weightbeam.formats.record.provenance import RECORD as CHECKPOINT_RECORD
from weightbeam.formats.safetensors import HfCheckpoint
from weightbeam.formats.storage import Store
from weightbeam.formats.storage.identity import Files, Watched
from weightbeam.model_mappings.plan import Array, is_float
from weightbeam.model_mappings.trees import COUNTER
from weightbeam.pipelines.checking.verification import MISSING, Verification
from weightbeam.transforms.comparing.array_sums import (
    NOT_COMPARED,
    ShardsRead,
    ShardsTask,
    find_damage,
    known_digests,
    shards_tasks,
)
from weightbeam.transforms.comparing.counterparts import Counterpart
from weightbeam.transforms.comparing.verification import ArrayResult
from weightbeam.transforms.planning.conversion import Conversion
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.layouts import SCAN_AXES
from weightbeam.transforms.planning.options import ConvertOptions

DAMAGED = f"isn't what {CHECKPOINT_RECORD} says was written, by its digest: the checkpoint is damaged"


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is compared.

    Attributes:
      items: the checkpoint's.
      conversion: of the release into such a checkpoint.
      wrong: arrays that are missing, unexpected or of another shape.
      keys: the checkpoint's key of each array.
      exported: whether the release is what is judged: an export of the checkpoint.
      state: the checkpoint's arrays that are no weights, and aren't compared.
      counterparts: the release's tensors that no array makes, and what they should be, by what that is.
      unjudged: its tensors that are compared with nothing, each with the reason why the table leaves it out.
      notes: as of `Verification`.
      digested: the checkpoint, where its record may have digests.
      sources: what is read.
    """

    items: Store
    conversion: Conversion
    wrong: tuple[tuple[str, str], ...]
    keys: Mapping[str, str]
    exported: bool = False
    state: tuple[str, ...] = ()
    counterparts: Mapping[str, Sequence[Counterpart]] = dataclasses.field(default_factory=dict)
    unjudged: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[tuple[str, str], ...] = ()
    digested: OrbaxCheckpoint | None = None
    sources: tuple[Watched | Files, ...] = ()

    def shards(self, sample: float) -> list[ShardsTask]:
        """What is read for digests: nothing where only a sample of the tensors is."""
        return shards_tasks(self.digested.record, self._summed) if self.digested and sample == 1 else []

    @property
    def _summed(self) -> list[OrbaxArray]:
        """The checkpoint's arrays that are compared with its digests: those that are compared with the release."""
        there = self.digested.arrays if self.digested else {}
        return [there[key] for key in self.keys.values() if key in there]

    def found(self, everything: Mapping[str, Any], sample: float) -> Verification:
        """The verification: what is known by metadata alone, with what was found by reading."""
        read = [found.shares for found in everything.values() if isinstance(found, ShardsRead)]
        findings = {key: found for key, found in everything.items() if isinstance(found, ArrayResult)}
        export = self.conversion.source.root if self.exported else None
        others = {
            origin: {one.name: findings[one.name] for one in counterparts if one.name in findings}
            for origin, counterparts in self.counterparts.items()
        }
        keys = [array.key for array in self.conversion.plan.arrays]
        arrays = {key: findings[key] for key in keys if key in findings}
        wrong, notes, digests = self.wrong, self.notes, None
        if self.digested:
            digests, damaged = find_damage(self.digested.record, self._summed, read)
            wrong += tuple((f"{key} in {self.items}", DAMAGED) for key in damaged)
            known = known_digests(self.digested.record).keys() & self.digested.arrays.keys() - {COUNTER}
            beside = len(known - {one.key for one in self._summed})
            gaps = [*digests.gaps()] if everything else []  # else nothing was read yet
            if beside and everything:
                gaps.append(f"{beside:,} of {len(known):,} arrays: nothing here is made of them")
            notes += tuple((NOT_COMPARED, gap) for gap in gaps)
        return Verification(
            str(self.items),
            self.conversion,
            arrays,
            wrong,
            sample=sample,
            export=export,
            others=others,
            unjudged=self.unjudged,
            notes=notes,
            digests=digests,
            state=self.state,
        )


class Shaped(Protocol):
    """An array that is there."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def plan_as(
    options: ConvertOptions,
    release: HfCheckpoint,
    there: Mapping[str, Shaped],
    adapters: Sequence[Adapter] = (),
    is_settled: bool = False,
) -> Conversion:
    """Plans the conversion into arrays that are there.

    Args:
      options: of the conversion.
      release: what is converted.
      there: the arrays, by MaxText's names for them.
      adapters: what is merged.
      is_settled: whether the options say on which axis the layers are stacked. Else it is MaxText's own, or the first
        other one with which the arrays have these shapes.
    """
    conversion = plan_conversion(options, release, adapters)

    def fits(planned: Conversion) -> bool:
        return all(there[array.key].shape == array.shape for array in planned.plan.arrays if array.key in there)

    if is_settled or not options.scan_layers or fits(conversion):
        return conversion
    others = (
        plan_conversion(dataclasses.replace(options, param_scan_axis=axis), release, adapters)
        for axis in SCAN_AXES
        if axis != options.param_scan_axis
    )
    return next((other for other in others if fits(other)), conversion)


def compare_trees(conversion: Conversion, stores: Mapping[str, ts.TensorStore]) -> Iterator[tuple[str, str]]:
    """The arrays that are missing, unexpected, of another shape, or integers where there should be none: `(key, what is
    wrong)`.
    """
    wanted = {array.key: array for array in conversion.plan.arrays}
    for key, array in wanted.items():
        if key not in stores:
            if not is_spare(array):
                yield key, MISSING
        elif tuple(stores[key].shape) != array.shape:
            yield key, f"has the shape {tuple(stores[key].shape)}, expected {array.shape}"
        elif is_float(array.dtype) and not is_float(np.dtype(stores[key].dtype.numpy_dtype)):
            yield key, f"is stored as {stores[key].dtype.name}, expected {array.dtype.name}"
    for key in sorted(set(stores) - set(wanted) - {STEP.key}):
        yield key, "is in the checkpoint, but nothing of the source belongs there"


def is_spare(array: Array) -> bool:
    """Whether an array only repeats another one, for other versions of MaxText: a checkpoint needn't have it."""
    return all(part.rule.spare for part in array.parts)
