"""Reads of boxes: the ranges of a file that hold a box of a tensor."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from weightbeam.formats.safetensors.header import Tensor
from weightbeam.formats.storage import ByteRange, store_and_name
from weightbeam.formats.storage.identity import Seen, check_opened
from weightbeam.model_mappings.boxes import Box, extent

Allocate = Callable[[tuple[int, ...], np.dtype], np.ndarray]  # makes an array of a shape and dtype


@dataclasses.dataclass(frozen=True, slots=True)
class BoxRead:
    """A box of a stored tensor, to be read."""

    tensor: Tensor
    box: Box

    @property
    def nbytes(self) -> int:
        return math.prod(extent(self.box)) * self.tensor.dtype.itemsize

    @property
    def cut(self) -> int:
        """The last axis that isn't whole; 0 where all are. The box's bytes are contiguous from there on."""
        shape = self.tensor.whole or self.tensor.shape
        return max((axis for axis, span in enumerate(self.box) if span != (0, shape[axis])), default=0)

    @property
    def runs(self) -> int:
        """How many contiguous ranges of the file hold the box."""
        return math.prod(extent(self.box[: self.cut]))

    def ranges(self, buffer: memoryview) -> Iterator[tuple[int, memoryview]]:
        """The ranges of the file that hold the box, each with its part of `buffer`, which holds the box in C order."""
        cut, strides = self.cut, self.tensor.strides
        run = math.prod(extent(self.box[cut:])) * self.tensor.dtype.itemsize
        first = sum(start * stride for (start, _), stride in zip(self.box, strides, strict=True))
        for i, index in enumerate(itertools.product(*(range(n) for n in extent(self.box[:cut])))):
            offset = sum(at * stride for at, stride in zip(index, strides, strict=False))
            yield self.tensor.offset + first + offset, buffer[i * run : (i + 1) * run]

    @staticmethod
    def fetch(reads: Sequence[BoxRead], empty: Allocate = np.empty) -> tuple[list[np.ndarray], int]:
        """Reads many boxes; see `read_boxes`."""
        return read_boxes(reads, empty)


def read_boxes(reads: Sequence[BoxRead], empty: Allocate = np.empty) -> tuple[list[np.ndarray], int]:
    """Reads boxes, file by file in the order of their offsets, into arrays that `empty` makes.

    Returns:
      An array for each, and the bytes read from the files.

    Raises:
      StorageError: a file can't be read, or isn't the one that was planned with.
    """
    arrays = [empty(extent(read.box), read.tensor.dtype) for read in reads]
    by_path: dict[str, list[ByteRange]] = defaultdict(list)
    planned = {read.tensor.path: read.tensor.file for read in reads}
    for read, array in zip(reads, arrays, strict=True):
        if array.size:
            by_path[read.tensor.path] += read.ranges(array.reshape(-1).view(np.uint8).data)
    return arrays, sum(_read(path, planned[path], ranges) for path, ranges in by_path.items())


def _read(path: str, planned: Seen | None, ranges: Sequence[ByteRange]) -> int:
    """Reads ranges of a file: of the one that was planned with."""
    store, name = store_and_name(path)
    if planned:
        return store.read_checked(name, ranges, functools.partial(check_opened, path, planned))
    return store.read_into(name, ranges)
