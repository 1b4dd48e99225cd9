"""What a stored array is, and an encoding, which is one in a release; and the two that hold no numbers of their own: as
it is, and transposed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from weightbeam.formats.safetensors import Allocate, BoxRead, Tensor
from weightbeam.model_mappings.boxes import Box, Range, whole


class Read(Protocol):
    """A part of something that is stored, to be read."""

    @property
    def nbytes(self) -> int:
        """Of what is read, in memory."""
        ...

    @staticmethod
    def fetch(reads: Sequence[Any], empty: Allocate = np.empty) -> tuple[list[np.ndarray], int]:
        """Reads many of one kind: an array for each that `empty` makes, and the bytes that were read."""
        ...


class StoredArray(Protocol):
    """An array of a source, on any medium: what is to be read for a box of its values, and how that becomes values.

    Implementations are small, immutable and picklable.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values."""
        ...

    @property
    def label(self) -> str | None:
        """For the plan; None for values stored as they are."""
        ...

    @property
    def order(self) -> tuple[int, ...]:
        """The axes of the values as they are stored, the slowest first; `(0, 2, 1)` for matrices that are stored
        transposed.
        """
        ...

    @property
    def indivisible(self) -> frozenset[int]:
        """The axes of the values that a unit shouldn't cut: any part of them needs scales for all. Mostly none."""
        ...

    def reads(self, box: Box) -> Sequence[Read]:
        """The stored boxes that the values of `box` need."""
        ...

    def decode(self, stored: list[np.ndarray], box: Box, dtype: np.dtype, empty: Allocate = np.empty) -> np.ndarray:
        """The values of `box`, from what `reads` fetched; computed ones have `dtype` and lie in an array that `empty`
        makes.

        Raises:
          ContentError: a scale is NaN or infinite, or the tensors contradict each other.
        """
        ...


class Encoding(StoredArray, Protocol):
    """How the values of a release's tensor are stored in its files."""

    @property
    def weight(self) -> Tensor:
        """The stored tensor that gives the values' name and file."""
        ...

    @property
    def decode_rate(self) -> float:
        """Stored bytes a second that one core decodes, measured (`benchmarks/results.json`); infinite for values that
        are stored as they are.
        """
        ...

    def reads(self, box: Box) -> Sequence[BoxRead]:
        """The boxes of stored tensors that the values of `box` need."""
        ...


class ContentError(ValueError):
    """What the files hold can't be right, which only shows when it is read; the message names the tensor."""


def stored_bytes(encoding: StoredArray, box: Box | None = None) -> int:
    """Bytes that a box is stored in, by default the whole tensor, its scales included."""
    return sum(read.nbytes for read in encoding.reads(whole(encoding.shape) if box is None else box))


def cover(span: Range, size: int) -> Range:
    """The blocks of `size` that a range touches."""
    return span[0] // size, -(-span[1] // size)


class _HasShape(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


class InOrder:
    """What is alike in encodings whose values lie in C order and may be cut anywhere."""

    __slots__ = ()

    @property
    def order(self: _HasShape) -> tuple[int, ...]:
        return tuple(range(len(self.shape)))

    @property
    def indivisible(self) -> frozenset[int]:
        return frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class Plain(InOrder):
    """Values stored as they are."""

    weight: Tensor
    label = None
    decode_rate = math.inf

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def reads(self, box: Box) -> tuple[BoxRead, ...]:
        return (BoxRead(self.weight, box),)

    def decode(self, stored: list[np.ndarray], box: Box, dtype: np.dtype, empty: Allocate = np.empty) -> np.ndarray:
        return stored[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Transposed:
    """Values whose axes are stored in another order than the tables know them.

    Attributes:
      inner: the encoding, with the axes as they are stored.
      order: the axes of the values in that order.
    """

    inner: Encoding
    order: tuple[int, ...]

    @property
    def weight(self) -> Tensor:
        return self.inner.weight

    @property
    def label(self) -> str | None:
        return self.inner.label

    @property
    def decode_rate(self) -> float:
        return self.inner.decode_rate

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.inner.shape[self.order.index(axis)] for axis in range(len(self.order)))

    @property
    def indivisible(self) -> frozenset[int]:
        return frozenset(self.order[axis] for axis in self.inner.indivisible)

    def reads(self, box: Box) -> Sequence[BoxRead]:
        return self.inner.reads(self._as_stored(box))

    def decode(self, stored: list[np.ndarray], box: Box, dtype: np.dtype, empty: Allocate = np.empty) -> np.ndarray:
        values = self.inner.decode(stored, self._as_stored(box), dtype, empty)
        return values.transpose([self.order.index(axis) for axis in range(len(self.order))])

    def _as_stored(self, box: Box) -> Box:
        return tuple(box[axis] for axis in self.order)
