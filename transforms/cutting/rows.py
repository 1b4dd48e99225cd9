"""Rows of a tensor: what a unit of a release makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from weightbeam.formats.encodings import Encoding, Plain
from weightbeam.formats.safetensors import Tensor, read_boxes
from weightbeam.formats.targets.release import Rows
from weightbeam.model_mappings.boxes import Box, extent
from weightbeam.model_mappings.cells import Piece

VALUES = np.dtype(np.float32)
MADE = "made here"  # in place of a file's path


def made_here(name: str, shape: tuple[int, ...]) -> Encoding:
    """A tensor that is made of something else before an adapter is added to it, as the base of an encoding."""
    return Plain(Tensor(name, VALUES, shape, MADE, 0))


@dataclasses.dataclass(frozen=True, slots=True)
class RowsRecipe:
    """Rows of a tensor to make and to write.

    Attributes:
      tensor: where they go: `path` is the file's name in the release.
      box: of the tensor.
      pieces: what they are made of, each with the number of the fetch that holds its source; none of zeros.
      merged: what adapters make of the tensor, as an encoding whose base is `made_here` of it; None where none reaches
        it.
    """

    tensor: Tensor
    box: Box
    pieces: tuple[tuple[int, Piece], ...]
    merged: Encoding | None = None

    @property
    def fill(self) -> float | None:
        """The value of rows that are made of nothing."""
        return None if self.pieces else 0.0

    @property
    def written(self) -> np.dtype:
        """What the finished values have."""
        return self.tensor.dtype

    @property
    def dtype(self) -> np.dtype:
        """What is made of the pieces: float32 where an adapter is added to it, so that only the sum is rounded."""
        return self.written if self.merged is None else VALUES

    @property
    def counts(self) -> tuple[int, ...]:
        """It isn't cut further."""
        return (1,) * len(self.box)

    def parts(self, values: np.ndarray) -> Iterator[Rows]:
        """The rows that are written, once the values are finished.

        Raises: see what overrides it.
        """
        yield self.tensor, self.box, values

    def finish(self, values: np.ndarray) -> np.ndarray:
        """The values with the adapters in them, of the dtype `written`.

        Raises:
          StorageError: an adapter can't be read.
          ContentError: it holds what can't be right.
        """
        if self.merged is None:
            return values
        reads = self.merged.reads(self.box)
        missing = [read for read in reads if read.tensor.path != MADE]
        fetched, _ = read_boxes(missing)
        rest, shaped = iter(fetched), values.reshape(extent(self.box))
        return self.merged.decode(
            [next(rest) if read.tensor.path != MADE else shaped for read in reads], self.box, self.written
        )
