"""What arrays come from: an `ArraySource` has arrays by name, of which any box can be made."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from weightbeam.formats.encodings import ContentError
from weightbeam.formats.safetensors import Allocate
from weightbeam.model_mappings.boxes import Box
from weightbeam.model_mappings.plan import Array, Problem, is_float
from weightbeam.transforms.comparing.array_sums import Compared
from weightbeam.transforms.execution.stack import copy

if TYPE_CHECKING:
    from weightbeam.pipelines.loading.coded import Form


class Wanted(NamedTuple):
    """A box of an array, to be made in a dtype; `alone` if nothing is joined to it, so that it may be what a device
    decodes; `others` as in `HostShare`: how many processes read the same.
    """

    key: str
    box: Box
    dtype: np.dtype
    alone: bool = False
    others: int = 0


class Cost(NamedTuple):
    """What reading takes: bytes, and contiguous runs or chunks that hold them."""

    nbytes: int
    runs: int


@dataclasses.dataclass(frozen=True)
class Described:
    """An array of a source, known but not read.

    Attributes:
      shape, dtype: of the array; of a release those that a conversion would store.
      axes: MaxText's logical name of each axis, None where it has none or none is known.
      lossy: why its values aren't the stored ones to the bit; None where they are.
      order: the axes that can be cut without reading more, in the order in which to cut: the slowest in the source
        first.
      grain: extents that are read whole.
      element_bytes: working memory for each element: as stored, as decoded, and as made.
      position: of its first byte, for the order of reading.
      has_axes: whether `axes` are known.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str | None, ...]
    lossy: str | None
    order: tuple[int, ...]
    grain: tuple[int, ...]
    element_bytes: int
    position: tuple[str, int] = ("", 0)
    has_axes: bool = True

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ArraySource(abc.ABC):
    """Arrays by name.

    Attributes:
      url: where they are.
      arrays: what each of them is.
      lost: the arrays that it should have and hasn't.
      coded: those that may be made as codes, see `form_of`.
      checks_itself: whether `make` looks at the files itself.
      has_digests: whether what is read can be compared with anything.
    """

    url: str
    arrays: Mapping[str, Described]
    lost: Sequence[Problem] = ()
    coded: Mapping[str, Array] = MappingProxyType({})
    checks_itself = has_digests = False

    @abc.abstractmethod
    def make(
        self, wanted: Sequence[Wanted], empty: Allocate = np.empty, results: Sequence[Allocate] | None = None
    ) -> tuple[list[np.ndarray], int]:
        """Boxes of arrays, and the bytes that were read. `empty` makes what is read on the way, `results` what is
        returned, one for each.

        Raises:
          StorageError: a file can't be read, or ends too early.
          ContentError: what it holds can't be right, or isn't a value of the dtype.
        """

    @abc.abstractmethod
    def cost(self, key: str, boxes: Sequence[Box]) -> Cost:
        """What reading these boxes of an array in one go takes."""

    def form_of(self, want: Wanted) -> Form | None:
        """The form in which a box is made of codes; None where it is made of values."""
        return None

    def stacked(self, key: str) -> tuple[int, ...]:
        """The axes of an array whose index selects a tensor (layers, experts), where all of its tensors are stored
        alike.

        What a box costs doesn't depend on where along these axes it lies.
        """
        return ()

    @abc.abstractmethod
    def identity(self) -> dict[str, str]:
        """What it holds, wherever it lies: of each file its name, and its size and some of its bytes, or what a store
        calls its version. Processes whose sources have one identity may share the reading.
        """

    @abc.abstractmethod
    def check(self) -> None:
        """Checks that its files are those that were opened.

        Raises:
          ChangedError: one isn't, or is gone.
        """

    def twins(self) -> list[list[str]]:
        """The arrays in groups: those of a group are to be cut alike and made together, so that no byte is read twice."""
        return [[key] for key in self.arrays]

    def sum_up(self) -> None:  # noqa: B027
        """From now on notes what is read, each box once, for `compare_read`."""

    def compare_read(self, names: Sequence[str], gather: Callable[[np.ndarray], np.ndarray]) -> Compared:
        """Compares what all processes have read since `sum_up` with what was written.

        Args:
          names: of the arrays, in every process the same.
          gather: brings a row of words for each array, `(array, word)`, from all processes: `(process, array, word)`.

        Raises:
          StorageError: some aren't what was written, or not what others have read.
        """
        return Compared()


def cast(values: np.ndarray, dtype: np.dtype, key: str, empty: Allocate = np.empty) -> np.ndarray:
    """The values in another dtype: floats by one cast from float32, integers if each of them fits.

    Raises:
      ContentError: an integer doesn't fit.
    """
    made = empty(values.shape, dtype)
    if values.dtype == dtype or (is_float(values.dtype) and is_float(dtype)):
        copy(values, made)
        return made
    np.copyto(made, values, casting="unsafe")
    if not np.array_equal(made, values):
        raise ContentError(f"{key} holds integers that aren't {dtype.name}'s: {values.min()} to {values.max()}")
    return made
