"""Codes in FP8, and their scales, made of the values that a tensor holds: `quantizing.py` as two encodings.

    values  (…, rows, columns)                     stored
    codes   (…, rows, columns)                     MadeCodes
    scales  (…, ⌈rows / 128⌉, ⌈columns / 128⌉)     MadeScales

A part of either is made of whole blocks, so what is read begins and ends at blocks of 128 rows and columns, or at the
weight's end. To a plan codes and scales are two tensors: the values are read for each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from weightbeam.formats.encodings.encoding import InOrder, cover
from weightbeam.formats.encodings.quantizing import BLOCK, CODES, REASON, find_scales, quantize, scale_shape
from weightbeam.formats.safetensors import Allocate, BoxRead, Tensor
from weightbeam.model_mappings.boxes import Box, extent

SCALES = np.dtype(np.float32)
CODES_RATE, SCALES_RATE = 385e6, 3600e6  # stored bytes a second that one core makes them of, measured with bfloat16


def _blocks(box: Box) -> Box:
    """The blocks that a box of a weight touches."""
    *lead, rows, columns = box
    return *lead, cover(rows, BLOCK[0]), cover(columns, BLOCK[1])


def _values(blocks: Box, shape: Sequence[int]) -> Box:
    """The box of a weight that blocks of it are."""
    *lead, rows, columns = blocks
    spans = zip((rows, columns), BLOCK, shape[-2:], strict=True)
    return *lead, *((start * size, min(stop * size, most)) for (start, stop), size, most in spans)


@dataclasses.dataclass(frozen=True, slots=True)
class MadeCodes(InOrder):
    """The codes of a weight.

    Attributes:
      values: bfloat16, float16 or float32, of two axes or more.
    """

    values: Tensor
    label = REASON
    decode_rate = CODES_RATE

    @property
    def weight(self) -> Tensor:
        return dataclasses.replace(self.values, dtype=CODES)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def reads(self, box: Box) -> tuple[BoxRead, ...]:
        return (BoxRead(self.values, _values(_blocks(box), self.shape)),)

    def decode(self, stored: list[np.ndarray], box: Box, dtype: np.dtype, empty: Allocate = np.empty) -> np.ndarray:
        """Codes, in whichever dtype; memory beside them: a few rows of blocks.

        Raises:
          ContentError: a value is NaN or infinite.
        """
        *_, (first, last), (left, right) = box
        top, start = first // BLOCK[0] * BLOCK[0], left // BLOCK[1] * BLOCK[1]
        made = empty(extent(box), dtype)
        for lead in np.ndindex(made.shape[:-2]):
            for row in range(top, last, BLOCK[0]):
                band, _ = quantize(stored[0][lead][row - top : row - top + BLOCK[0]], self.values.name)
                rows = band[max(first - row, 0) : last - row, left - start : right - start]
                made[lead][max(row - first, 0) :][: len(rows)] = rows
        return made


@dataclasses.dataclass(frozen=True, slots=True)
class MadeScales(InOrder):
    """The scales of a weight, in float32.

    Attributes:
      values: as those of `MadeCodes`.
    """

    values: Tensor
    label = "the scale of 128 × 128 values"
    decode_rate = SCALES_RATE

    @property
    def weight(self) -> Tensor:
        return dataclasses.replace(self.values, dtype=SCALES)

    @property
    def shape(self) -> tuple[int, ...]:
        return scale_shape(self.values.shape)

    def reads(self, box: Box) -> tuple[BoxRead, ...]:
        return (BoxRead(self.values, _values(box, self.values.shape)),)

    def decode(self, stored: list[np.ndarray], box: Box, dtype: np.dtype, empty: Allocate = np.empty) -> np.ndarray:
        """Scales, in float32 whatever is asked for: nothing is rounded.

        Raises:
          ContentError: a value is NaN or infinite.
        """
        return find_scales(stored[0], self.values.name)
