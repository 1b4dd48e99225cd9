"""A merge, planned: a release and adapters into the same release with the adapters in it.

The table is the identity: every tensor becomes itself. What no adapter reaches is carried over byte for byte, codes and
scales of a quantised weight included; a weight that an adapter reaches is written in the dtype that it has, a quantised
one in the model's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from weightbeam.formats.adapters import Adapter, Merging
from weightbeam.formats.encodings import Encoding, stored_bytes
from weightbeam.formats.encodings.quantizing import REASON
from weightbeam.formats.record.naming import digest
from weightbeam.formats.safetensors import HfCheckpoint
from weightbeam.formats.storage import Store
from weightbeam.model_mappings.plan import ArrayPlan
from weightbeam.transforms.cutting.files import FileLayout
from weightbeam.transforms.cutting.quantizing import Given, recipe_for
from weightbeam.transforms.cutting.row_blocks import itself
from weightbeam.transforms.cutting.rows import VALUES
from weightbeam.transforms.cutting.units import Fetch, Unit
from weightbeam.transforms.planning.options import MergeOptions
from weightbeam.transforms.planning.to_release import ToRelease


@dataclasses.dataclass(frozen=True, kw_only=True)
class Merge(ToRelease):
    """The plan of a merge, with these fields beside those of `ToRelease`.

    Attributes:
      options, source, adapters: the inputs; the source is the release.
      plan: what is left out, and the problems.
      encodings: how each tensor that is written is stored, by its name.
      units: the blocks of each unit; a block's array is the number of a tensor, and its shards are a box of it.
      merging: what the adapters' tensors are used for.
      quantized: the tensors that are written as codes and scales.
      quantization: `quantization_config` as it will be; None where it isn't to change, empty where nothing quantised is
        left.
    """

    options: MergeOptions
    source: HfCheckpoint
    adapters: tuple[Adapter, ...]
    plan: ArrayPlan
    encodings: Mapping[str, Encoding] = dataclasses.field(default_factory=dict)
    files: FileLayout | None = None
    merging: Merging
    quantization: Mapping[str, Any] | None = None
    quantized: frozenset[str] = frozenset()
    given: Given | None = None
    small: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

    kind, doing = "merge", "writing"

    @property
    def config(self) -> Mapping[str, Any]:
        return self.source.config

    @property
    def title(self) -> str:
        if self.options.quantize or self.options.dequantize:
            return "Quantisation" if self.options.quantize else "Dequantisation"
        return "Merge" if self.adapters else "Cut"

    @property
    def config_edits(self) -> Mapping[str, Any]:
        """None beside those of the quantisation."""
        return {}

    @property
    def lossy(self) -> dict[str, str]:
        """By tensor, why its values aren't the release's to the bit."""
        reasons = {
            name: f"{encoding.label}, rounded once" for name, encoding in self.encodings.items() if encoding.label
        }
        return reasons | dict.fromkeys(self.quantized, REASON)

    @property
    def changes(self) -> str:
        """What is kept of the release, how many tensors are merged, dequantised or quantised, and what the others are,
        for a person.
        """
        kept = f"{self.source.cut}: " if self.source.cut else ""
        changed = self._changed
        own = "the release's own bytes"
        return f"{kept}{changed}, the others are {own}" if changed else f"{kept}all tensors are {own}"

    @property
    def _changed(self) -> str:
        """How many tensors are changed, and how; empty where a part is taken as it is."""
        if self.options.quantize:
            also = f", {len(self.merging.touched):,} of them merged" if self.merging.touched else ""
            return f"{len(self.quantized):,} tensor{'' if len(self.quantized) == 1 else 's'} quantised{also}"
        merged = len(self.merging.touched)
        values = sum(encoding.label is not None for encoding in self.encodings.values())
        done = "merged" if self.adapters else "changed"
        number, what = (values, "dequantised") if self.options.dequantize else (merged, done)
        return f"{number:,} tensor{'' if number == 1 else 's'} {what}" if number or not self.source.cut else ""

    @property
    def source_bytes(self) -> int:
        """Bytes of what is read: the release's tensors and the adapters'."""
        return sum(map(stored_bytes, self.encodings.values()))

    @functools.cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(self.encodings)

    def expand(self, unit: int, folder: Store | None = None) -> Unit:
        """A unit, spelled out."""
        fetches, recipes = [], []
        for number, block in enumerate(self.units[unit]):
            name, box = self._names[block.array], block.shards
            pieces = ((number, itself(name, box)),)
            recipe = recipe_for(self.layout.tensors, name, self.quantized, box, pieces, self.given)
            fetches.append(Fetch(self.encodings[name], box, self._read_as(name, recipe.dtype)))
            recipes.append(recipe)
        return Unit(unit, tuple(fetches), tuple(recipes))

    def _read_as(self, name: str, written: np.dtype) -> np.dtype:
        """The dtype of a tensor's values in memory: of one that is quantised its own, so that nothing is rounded
        before; with an adapter float32.
        """
        if name not in self.quantized:
            return written
        return VALUES if name in self.merging.touched else self.encodings[name].weight.dtype

    def facts(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "source": self.source.root,
            "adapters": [adapter.record() for adapter in self.adapters],
            **({"like": self.given.files.root} if self.given else {}),
            "merged": dict(self.merging.touched),
            "dropped": dict(self.plan.dropped),
        }

    @property
    def pattern(self) -> tuple[str, str]:
        return self.source.root, digest(self.source)
