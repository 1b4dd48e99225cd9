"""How far two models' logits, and what their layers make of the same tokens, are apart. Shapes in axis words:
logits are (token, vocab), what a layer makes is (token, embed), or whatever else both of them make.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

# what layers make of tokens, in the order in which they do: by the layer's number (`3`), and what the modules in it make
# before by number and name (`3/self_attn`); (token, embed) each, or (token, stream, embed)
Trace = Mapping[str, np.ndarray]


EMBEDDING = "embedding"  # a Trace's name for what enters the first layer


@dataclasses.dataclass(frozen=True)
class LayerDifference:
    """How far what two layers make of their tokens is apart.

    Attributes:
      name: of the layer, or of a module in it, as a `Trace` has it; or `EMBEDDING`.
      relative: |a - b| / |a|, of their norms; not a number where one isn't finite.
      largest: the largest absolute difference of an element.
    """

    name: str
    relative: float
    largest: float

    @classmethod
    def of(cls, name: str, a: np.ndarray, b: np.ndarray) -> LayerDifference:
        """Of two arrays of one shape, computed in float64; equal bits are no difference, whatever they are."""
        if np.array_equal(a, b, equal_nan=True):
            return cls(name, 0.0, 0.0)
        first = a.astype(np.float64)
        apart = np.abs(first - b)
        norm = float(np.linalg.norm(first))
        return cls(name, float(np.linalg.norm(apart)) / norm if norm else math.inf, float(apart.max()))

    def beyond(self, tolerance: float) -> bool:
        """Whether they part: by more than the tolerance, or so that it can't be told."""
        return not self.relative <= tolerance


def compare_traces(a: Trace, b: Trace) -> list[LayerDifference]:
    """How far what two models' layers make is apart, in order, as far as both have it."""
    return [
        LayerDifference.of(name, values, b[name])
        for name, values in a.items()
        if name in b and b[name].shape == values.shape
    ]


@dataclasses.dataclass(frozen=True)
class LogitsDifference:
    """How far two models' logits are apart.

    Attributes:
      largest: the largest absolute difference of a logit.
      relative: |a - b| / |a|, of their norms.
      kl: KL(a || b) of the next token's probabilities in nats, the mean over the tokens; and the largest.
      top1: at how many of the tokens both have the same most likely next one.
      tokens: how many there are.
      odd: of how many of them a logit of one of both isn't a number, so that nothing is told of them.
    """

    largest: float
    relative: float
    kl: float
    largest_kl: float
    top1: int
    tokens: int
    odd: int = 0

    @classmethod
    def of(cls, a: np.ndarray, b: np.ndarray) -> LogitsDifference:
        """Of two models' (token, vocab), computed in float64."""
        whole = LayerDifference.of("", a, b)
        first, second = (_log_softmax(side) for side in (a, b))
        kl = np.maximum((np.exp(first) * (first - second)).sum(-1), 0.0)
        same = int((a.argmax(-1) == b.argmax(-1)).sum())
        odd = int((np.isnan(a) | np.isnan(b)).any(-1).sum())
        return cls(whole.largest, whole.relative, float(kl.mean()), float(kl.max()), same, len(a), odd)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
