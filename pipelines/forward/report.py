"""What a person, and a program, is told of logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from weightbeam.pipelines.terminal.shown import Shown
from weightbeam.pipelines.terminal.tables import Block, Table, count
from weightbeam.transforms.comparing.logits import EMBEDDING, LayerDifference, LogitsDifference

SHOWN = 20  # tokens and layers that a report lists


@dataclasses.dataclass(frozen=True)
class Beside:
    """How far another model, or MaxText, is from the first.

    Attributes:
      where: the other one.
      logits: how far the logits are apart.
      layers: how far what each layer, and each module in it, makes is apart, in the order in which they do.
      tolerance: the relative difference that counts as none.
      tensors: what the first one that parts has for weights, by their names.
      limits: what MaxText is known not to express of this model, and the way round it.
    """

    where: str
    logits: LogitsDifference
    layers: tuple[LayerDifference, ...]
    tolerance: float
    tensors: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()

    @property
    def whole(self) -> list[LayerDifference]:
        """Of `layers` those that are whole ones."""
        return [each for each in self.layers if "/" not in each.name and each.name != EMBEDDING]

    @property
    def parts_at(self) -> LayerDifference | None:
        """The embedding, or the first layer that parts, or the first module in it that does; None where none does. In a
        layer that doesn't part, two modules that part are two sides' ways to divide the same work.
        """
        parted = [each for each in self.layers if each.beyond(self.tolerance)]
        if (layer := next((each for each in parted if "/" not in each.name), None)) is None or layer.name == EMBEDDING:
            return layer
        return next((each for each in parted if each.name.startswith(f"{layer.name}/")), layer)

    @property
    def ok(self) -> bool:
        """Whether no layer parts, nor the logits, which are numbers."""
        return self.parts_at is None and self.logits.relative <= self.tolerance and not self.logits.odd

    def to_dict(self) -> dict[str, Any]:
        first = self.parts_at
        return {
            "where": self.where,
            "ok": self.ok,
            "tolerance": self.tolerance,
            "logits": _finite(dataclasses.asdict(self.logits)),
            "parts_at": {**_place(first), "tensors": self.tensors} if first else None,
            "limits": self.limits,
            "layers": [_finite(dataclasses.asdict(each)) for each in self.layers],
        }

    def blocks(self) -> Iterator[Block]:
        """What a person sees: the layers that part, what both make of it, and where to look."""
        parted = [each for each in self.whole if each.beyond(self.tolerance)]
        if parted:
            table = Table("layer", ">relative", ">max")
            for each in parted[:SHOWN]:
                table.add_row(each.name, f"{each.relative:.3g}", f"{each.largest:.3g}")
            yield from (
                table,
                *([f"… and {len(parted) - SHOWN:,} more; --json FILE has all"] if len(parted) > SHOWN else []),
            )
        apart = self.logits
        yield f"logits of {self.where}: largest difference {apart.largest:.3g}, relative {apart.relative:.3g}"
        yield f"next tokens: KL {apart.kl:.3g} nats (largest {apart.largest_kl:.3g}), the same most likely one for {apart.top1:,} of {apart.tokens:,}"
        yield self._where()
        yield from (f"MaxText can't express this: {limit}" for limit in self.limits if not self.ok)

    def _where(self) -> str:
        """Where they part, in a sentence."""
        if (first := self.parts_at) is None:
            whole = self.whole
            if self.logits.odd:
                return f"the logits of {count(self.logits.odd, 'token')} aren't numbers, of which nothing is told"
            if not self.ok:
                behind = "they part behind the last layer: in the last norm or the head"
                return behind if whole else "no layer was compared: none makes one vector for each token"
            most = max(whole, key=lambda each: each.relative, default=None)
            furthest = f"; the largest is {most.relative:.3g}, in layer {most.name}" if most and most.relative else ""
            return f"no layer parts{f' by more than {self.tolerance:g}' if self.tolerance else ''}{furthest}"
        place = _place(first)
        layer, part = place["layer"], place["module"]
        named = f", in {part} ({', '.join(self.tensors)})" if part and self.tensors else f", in {part}" if part else ""
        where = "before the first layer" if layer is None else f"in layer {layer}"
        return f"they part {where}{named}: by {first.relative:.3g} of what it makes"


def _place(part: LayerDifference) -> dict[str, Any]:
    """The number of a layer, and a module in it; no layer for the embedding, which is before the first one."""
    if part.name == EMBEDDING:
        return {"layer": None, "module": EMBEDDING}
    layer, _, module = part.name.partition("/")
    return {"layer": int(layer), "module": module or None}


def _finite(found: Mapping[str, Any]) -> dict[str, Any]:
    """Figures for programs; JSON has no NaN."""
    return {
        name: str(value) if isinstance(value, float) and not np.isfinite(value) else value
        for name, value in found.items()
    }


@dataclasses.dataclass(frozen=True, repr=False)
class Logits(Shown):
    """What a model makes of some tokens.

    Attributes:
      source: the model.
      tokens: their ids.
      logits: (token, vocab), in float32.
      dtype: of the arithmetic.
      beside: how far another one is from it; None where there is none.
      texts: of the tokens that are shown, by their ids; empty where ids were given.
    """

    source: str
    tokens: tuple[int, ...]
    logits: np.ndarray
    dtype: str
    beside: Beside | None = None
    texts: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether another one, if there is one, makes the same within the tolerance."""
        return self.beside is None or self.beside.ok

    @property
    def next(self) -> list[int]:
        """The most likely token behind each."""
        return [int(token) for token in self.logits.argmax(-1)]

    def to_dict(self) -> dict[str, Any]:
        largest = [float(value) for value in self.logits.max(-1)]
        return {
            "source": self.source,
            "tokens": list(self.tokens),
            "dtype": self.dtype,
            "next": [
                {"token": token, **_finite({"logit": logit})} for token, logit in zip(self.next, largest, strict=True)
            ],
            "beside": self.beside.to_dict() if self.beside else None,
        }

    def blocks(self) -> Iterator[Block]:
        table = Table(">position", ">token", ">most likely next", ">its logit")
        rows = list(zip(range(len(self.tokens)), self.tokens, self.next, self.logits.max(-1), strict=True))
        for position, token, likely, logit in rows[-SHOWN:]:
            table.add_row(str(position), self._named(token), self._named(likely), f"{logit:.4g}")
        yield table
        if odd := int(np.isnan(self.logits).any(-1).sum()):
            yield f"the logits of {count(odd, 'token')} aren't numbers: look for odd weights with `weightbeam verify`"
        if self.beside:
            yield ""
            yield from self.beside.blocks()

    def _named(self, token: int) -> str:
        """A token with its text, where that is known: `'Paris' 12095`."""
        return f"{self.texts[token]!r} {token}" if token in self.texts else str(token)

    def brief(self) -> str:
        return f"{self.source}: logits of {count(len(self.tokens), 'token')}"
