"""What a stored array is, and an encoding, which is one in a release; and the two that hold no numbers of their own: as
it is, and transposed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from weightbeam.formats.safetensors import Allocate, BoxRead, Tensor
from weightbeam.model_mappings.boxes import Box, Range, whole

COMPUTED = np.dtype(np.float32)  # what values are computed in


class Read(Protocol):
    """A part of something that is stored, to be read."""

    @property
    def nbytes(self) -> int:
        """Of what is read, in memory."""
        ...

    @staticmethod
    def fetch(reads: Sequence[Any], empty: Allocate = np.empty) -> tuple[list[np.ndarray], int]:
        """Reads many of one kind, in as few requests as that takes.

        Args:
          reads: what to read, all of this class.
          empty: makes the array of a shape and a dtype that is filled, as `numpy.empty` does.

        Returns:
          An array for each, in their order; and the bytes that were read of files.

        Raises:
          OSError: a file can't be read, or ends too early.
        """
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
        """What is to be read for some of the values.

        Args:
          box: of the values, `[start, stop)` of each axis.

        Returns:
          The stored boxes that they need; `decode` gets them in this order.
        """
        ...

    def decode(self, stored: list[np.ndarray], box: Box, dtype: np.dtype, empty: Allocate = np.empty) -> np.ndarray:
        """The values of a box, from what `reads` asked for.

        Args:
          stored: the arrays that were read, in the order of `reads(box)`.
          box: of the values, `[start, stop)` of each axis.
          dtype: of computed values: float32, or what is rounded to once; values that are stored as they are keep theirs.
          empty: makes the array that computed values lie in.

        Returns:
          The values, in the shape of the box.

        Raises:
          ContentError: a scale is NaN or infinite, or the tensors contradict each other.
        """
        ...


class Encoding(StoredArray, Protocol):
    """How the values of a release's tensor are stored in its files.

    Implementations are small, immutable, hashable and picklable: a plan holds one for each tensor. `InOrder` has what is
    alike in those whose values lie in C order and may be cut anywhere.

    Example:
      >>> from weightbeam.model_mappings.boxes import extent
      >>> @dataclasses.dataclass(frozen=True)
      ... class Eighths(InOrder):
      ...     weight: Tensor  # int8, each an eighth
      ...     label, decode_rate = "eighths", 1e9
      ...
      ...     @property
      ...     def shape(self):
      ...         return self.weight.shape
      ...
      ...     def reads(self, box):
      ...         return (BoxRead(self.weight, box),)
      ...
      ...     def decode(self, stored, box, dtype, empty=np.empty):
      ...         values = empty(extent(box), dtype)
      ...         values[...] = stored[0].astype(np.float32) / 8
      ...         return values
      >>> encoding = Eighths(Tensor("x.weight", np.dtype(np.int8), (2, 3), "model.safetensors", 0))
      >>> box = ((0, 1), (0, 3))
      >>> stored_bytes(encoding, box)
      3
      >>> encoding.decode([np.array([[1, 2, 4]], np.int8)], box, np.dtype(np.float32))
      array([[0.125, 0.25 , 0.5  ]], dtype=float32)
    """

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

    @property
    def overhead(self) -> Overhead:
        """Memory for a box, beside what grows with its elements. Mostly none."""
        ...

    def reads(self, box: Box) -> Sequence[BoxRead]:
        """The boxes of stored tensors, its scales among them, that some of the values need.

        Args:
          box: of the values, `[start, stop)` of each axis.

        Returns:
          What is to be read; `decode` gets it in this order.
        """
        ...


class Overhead(NamedTuple):
    """Bytes of memory, at most, for a box of values, beside what grows with its elements.

    `convert` adds to a unit `tensor` for each layer of a stack, `matrix` for each expert, and `decoding` once (`Grid`);
    `merge` knows what a box reads, and adds `decoding` (`row_blocks.py`); `export` reads factors once a unit is made, and
    adds `whole` and `decoding` of the largest to a thread (`Export.thread_bytes`).

    Attributes:
      tensor: of what is read, whatever the box.
      matrix: of what is read for each index on the first of three axes.
      decoding: more while the box is decoded.
      whole: of all that is read, for the whole tensor.
    """

    tensor: int = 0
    matrix: int = 0
    decoding: int = 0
    whole: int = 0


class ContentError(ValueError):
    """What the files hold can't be right, which only shows when it is read; the message names the tensor."""


def stored_bytes(encoding: StoredArray, box: Box | None = None) -> int:
    """Bytes that values are stored in, their scales included.

    Args:
      encoding: or another stored array.
      box: of the values; all of them unless told.

    Returns:
      Bytes of files.
    """
    return sum(read.nbytes for read in encoding.reads(whole(encoding.shape) if box is None else box))


def stored_form(stored: object) -> Hashable:
    """What stored arrays have in common that differ only in which tensors of the same shapes and dtypes they are made
    of: what a box takes is the same in all of one form.
    """
    if isinstance(stored, Tensor):
        return stored.dtype, stored.shape, stored.whole
    if isinstance(stored, tuple):
        return tuple(map(stored_form, stored))
    names = _fields(type(stored))
    return (type(stored), *(stored_form(getattr(stored, name)) for name in names)) if names else stored


@functools.cache
def _fields(kind: type) -> tuple[str, ...]:
    """The fields that tell the instances of a dataclass apart; none of another class."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return tuple(field.name for field in fields if field.compare)


def values_dtype(encoding: Encoding, computed: np.dtype = COMPUTED) -> np.dtype:
    """The dtype of values: their own where they are stored as they are, else the one that they are `computed` in."""
    return encoding.weight.dtype if encoding.label is None else computed


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

    @property
    def overhead(self) -> Overhead:
        return Overhead()


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

    @property
    def overhead(self) -> Overhead:
        return self.inner.overhead

    def reads(self, box: Box) -> Sequence[BoxRead]:
        return self.inner.reads(self._as_stored(box))

    def decode(self, stored: list[np.ndarray], box: Box, dtype: np.dtype, empty: Allocate = np.empty) -> np.ndarray:
        values = self.inner.decode(stored, self._as_stored(box), dtype, empty)
        return values.transpose([self.order.index(axis) for axis in range(len(self.order))])

    def _as_stored(self, box: Box) -> Box:
        return tuple(box[axis] for axis in self.order)
