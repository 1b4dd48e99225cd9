"""A PEFT adapter as MaxText keeps one: two factors for each weight, all of one rank, and one scaling, alpha / rank.

What PEFT has beside that (rslora, patterns of ranks and alphas, a weight) is folded into B; lower ranks are padded with
zeros, and so are layers without an adapter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weightbeam.formats.adapters.adapter import Adapter
from weightbeam.formats.adapters.delta import Delta
from weightbeam.formats.adapters.merged import MERGE_RATE
from weightbeam.formats.adapters.merging import Change, collect
from weightbeam.formats.adapters.ties import Ties
from weightbeam.formats.encodings import Encoding
from weightbeam.formats.encodings.encoding import InOrder
from weightbeam.formats.safetensors import Allocate, BoxRead, Tensor
from weightbeam.model_mappings.adapters import INSTEAD, adapter_table
from weightbeam.model_mappings.boxes import Box, extent
from weightbeam.model_mappings.plan import Problem
from weightbeam.model_mappings.rules import Stack


@dataclasses.dataclass(frozen=True, slots=True)
class FoldedFactor(InOrder):
    """A or B of a weight, of the rank that all have: `(rank, in)`, or some rows of `(out, rank)`.

    Attributes:
      weight: the stored factor; of a layer that has none that of another one, and `is_zero`.
      shape: of the values; what the stored one doesn't reach is 0.
      rows: the stored one's first row, and the step from one to the next.
      scaling: what it is multiplied by.
      is_zero: whether there is nothing of it.
    """

    weight: Tensor
    shape: tuple[int, ...]
    rows: tuple[int, int] = (0, 1)
    scaling: float = 1.0
    is_zero: bool = False

    @property
    def label(self) -> str | None:
        """None for values as they are stored."""
        if (
            self.is_zero
            or self.shape[1] > self.weight.shape[1]
            or self.rows != (0, 1)
            or self.shape[0] > self.weight.shape[0]
        ):
            return (
                f"LoRA factors, padded to rank {min(self.shape)}"
                if self.scaling == 1
                else f"LoRA factors, scaled by {self.scaling:.6g} and padded"
            )
        return None if self.scaling == 1 else f"LoRA factors, scaled by {self.scaling:.6g}"

    @property
    def decode_rate(self) -> float:
        return math.inf if self.label is None else MERGE_RATE

    def _held(self, box: Box) -> Box | None:
        """The part of the stored factor that lies in a box."""
        first, step = self.rows
        rows = first + box[0][0] * step, min(first + (box[0][1] - 1) * step + 1, self.weight.shape[0])
        columns = box[1][0], min(box[1][1], self.weight.shape[1])
        return None if self.is_zero or rows[0] >= rows[1] or columns[0] >= columns[1] else (rows, columns)

    def reads(self, box: Box) -> tuple[BoxRead, ...]:
        held = self._held(box)
        return (BoxRead(self.weight, held),) if held else ()

    def decode(self, stored: list[np.ndarray], box: Box, dtype: np.dtype, empty: Allocate = np.empty) -> np.ndarray:
        if self.label is None:
            return stored[0]
        values = empty(extent(box), dtype)
        values[...] = 0
        if stored:
            part = stored[0][:: self.rows[1]].astype(np.float32) * np.float32(self.scaling)
            values[: part.shape[0], : part.shape[1]] = part
        return values


@dataclasses.dataclass(frozen=True)
class Folding:
    """An adapter by MaxText's table.

    Attributes:
      stacks: the table.
      encodings: how each factor that it names is stored.
      rank, alpha: what MaxText must be told.
      problems: what stands against it.
      uses: for each PEFT adapter what each of its tensors is used for.
    """

    stacks: list[Stack]
    encodings: Mapping[str, Encoding]
    rank: int
    alpha: float
    problems: tuple[Problem, ...]
    uses: tuple[Mapping[str, str], ...] = ()

    @property
    def metadata(self) -> dict[str, Any]:
        """What MaxText reads from a checkpoint's custom metadata (utils/lora_utils.py, `sync_lora_metadata`, e591f30)."""
        return {"lora_rank": self.rank, "lora_alpha": int(self.alpha) if self.alpha == int(self.alpha) else self.alpha}


def fold(
    encodings: Mapping[str, Encoding],
    adapters: Sequence[Adapter],
    aliases: Mapping[str, str],
    model_type: str,
    stacks: Sequence[Stack],
    ties: Ties,
    cut: str,
) -> Folding:
    """An adapter of these tensors, by the table of their model; the arguments are those of `merge`, and the model's
    table.
    """
    problems = []
    if len(adapters) != 1:
        many = f"takes one adapter, --lora names {len(adapters)}; {INSTEAD}"
        message = many if adapters else "--lora is missing: which one"
        problems.append(Problem("option", "--adapter_only", message))
    found = collect(encodings, adapters[:1], aliases, model_type, ties, cut=cut)
    problems += found.problems
    deltas: dict[str, Delta] = {}
    for name, change in found.changes.items():
        if why := _why_not(change):
            problems.append(Problem("adapter", name, f"{why}; {INSTEAD}"))
        else:
            deltas[name] = change.deltas[0]
    table = adapter_table(stacks, deltas.keys())
    problems += [Problem("adapter", name, why) for name, why in table.refused.items()]
    rank = max((delta.rank for delta in deltas.values()), default=1)
    plain = (
        len({(delta.rank, delta.scaling) for delta in deltas.values()}) == 1
        and adapters[0].weight == 1
        and not adapters[0].config.use_rslora
    )
    alpha = adapters[0].config.alpha_of(next(iter(deltas.values())).scaling, rank) if plain else float(rank)
    made: dict[str, Encoding] = {}
    for factor, of in table.factors.items():
        is_zero, delta = of.tensor not in deltas, deltas.get(of.tensor) or next(iter(deltas.values()))
        outputs, inputs = encodings[of.tensor].shape
        if factor.endswith("lora_a"):
            made[factor] = FoldedFactor(delta.a, (rank, inputs), is_zero=is_zero)
        else:
            rows, scaling = range(outputs)[of.rows], 1.0 if plain or is_zero else delta.scaling
            made[factor] = FoldedFactor(delta.b, (len(rows), rank), (rows.start, rows.step), scaling, is_zero=is_zero)
    return Folding(table.stacks, made, rank, alpha, tuple(problems), found.uses)


def _why_not(change: Change) -> str:
    """Why MaxText's adapters can't hold it; empty if they can."""
    if whole := (*change.whole, *change.copies):
        return f"{whole[0].name} is a whole tensor, and MaxText's adapters have factors only"
    if change.added:
        return f"{change.added[0][0].name} is a bias, and MaxText's adapters have none"
    if change.magnitudes:
        return f"{change.magnitudes[0].name} is a DoRA's, and MaxText has none"
    (delta,) = change.deltas if len(change.deltas) == 1 else (None,)
    if delta is None or delta.experts > 1 or delta.place or delta.offset != (0, 0):
        return "is of experts, and MaxText has no LoRA on them"
    if delta.transposed:
        return "is of an embedding, or of a matrix that is stored turned around, and MaxText has no LoRA on that"
    return ""
