"""Small codes with a scale for each block: every FP8, MXFP8, FP4 and int8 format is this one encoding.

    value[…, o, i] = (meaning of code[…, o, i] - zero[block]) · scale[block]

The formats differ in what a code means, in the size of a block, and in whether a second scale multiplies or divides the
first.
"""

from __future__ import annotations

import dataclasses
import functools

import ml_dtypes
import numpy as np

from weightbeam.formats.encodings.encoding import InOrder, Plain, cover
from weightbeam.formats.encodings.nibbles import byte_table, decode_rows, finite
from weightbeam.formats.safetensors import Allocate, BoxRead, Tensor
from weightbeam.model_mappings.boxes import Box, extent
from weightbeam.model_mappings.scales import CODES

# FP4: a sign, two bits of exponent, one of mantissa (OCP Microscaling Formats 1.0, 5.3.3). Code 8 is -0.0, and stays
# it.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
FP8_RATE, FP4_RATE = 789e6, 485e6  # stored bytes a second that one core decodes; of the FP4 formats the slowest
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)  # a power of two, 2 ** (code - 127); 255 is NaN


@functools.cache
def table_of(code: str) -> np.ndarray:
    """What each byte means, by the name of its code: `e2m1`, or a numpy dtype of one byte."""
    with np.errstate(invalid="ignore"):
        meanings = E2M1 if code == "e2m1" else np.arange(256, dtype=np.uint8).view(np.dtype(code)).astype(np.float32)
    return byte_table(meanings)


@dataclasses.dataclass(frozen=True, slots=True)
class Scaled(InOrder):
    """See the module's text. All tensors have the values' axes: what a format stores with other axes is viewed so.

    Attributes:
      weight: the codes; the last axis counts bytes.
      code: what they are: `e2m1` (two in a byte, the even one in the low bits), or a dtype of one byte.
      scale: one for each block; `scale.shape[i] == ceil(shape[i] / block[i])`.
      block: the size of a block on each axis; 1 on the leading axes, unless all of one has one scale. The last may be
        partial.
      label: for the plan.
      zero: of the shape of `scale`; None for none.
      second: a scale of scales in float32, whose axes have length 1 or that of `scale`'s leading ones; None for none.
      divides: whether scales are divided by `second`, not multiplied.
    """

    weight: Tensor
    code: str
    scale: Tensor
    block: tuple[int, ...]
    label: str
    zero: Tensor | None = None
    second: Tensor | None = None
    divides: bool = False

    @property
    def square(self) -> int | None:
        """Rows, and columns, of a block, where these codes and scales are what MaxText's FP8 models compute on: E4M3 in
        square blocks; else None.
        """
        *lead, rows, columns = self.block
        return rows if self.has_codes and rows == columns > 1 and all(size == 1 for size in lead) else None

    @property
    def has_codes(self) -> bool:
        """Whether a value is a code of E4M3 times one scale."""
        return self.code == CODES and self.zero is None and self.second is None

    @property
    def per_byte(self) -> int:
        return 2 if self.code == "e2m1" else 1

    @property
    def decode_rate(self) -> float:
        return FP4_RATE if self.per_byte > 1 else FP8_RATE

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.weight.shape[:-1], self.weight.shape[-1] * self.per_byte

    def reads(self, box: Box) -> tuple[BoxRead, ...]:
        blocks = tuple(cover(span, size) for span, size in zip(box, self.block, strict=True))
        reads = [BoxRead(self.weight, (*box[:-1], cover(box[-1], self.per_byte))), BoxRead(self.scale, blocks)]
        if self.zero:
            reads.append(BoxRead(self.zero, blocks))
        if self.second:
            reads.append(
                BoxRead(
                    self.second,
                    tuple((0, 1) if size == 1 else span for span, size in zip(blocks, self.second.shape, strict=True)),
                )
            )
        return tuple(reads)

    def decode(self, stored: list[np.ndarray], box: Box, dtype: np.dtype, empty: Allocate = np.empty) -> np.ndarray:
        codes, scales, *rest = stored
        scales = finite(scales, self.scale)
        zeros = rest.pop(0).astype(np.float32) if self.zero else None
        if self.second:
            second = finite(rest.pop(0), self.second)
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                scales = finite(scales / second if self.divides else scales * second, self.second)
        return decode_blocks(codes, self.code, scales, zeros, self.block, box, empty(extent(box), dtype))


def decode_blocks(
    codes: np.ndarray,
    code: str,
    scales: np.ndarray,
    zeros: np.ndarray | None,
    block: tuple[int, ...],
    box: Box,
    values: np.ndarray,
) -> np.ndarray:
    """The values of a box of codes, into `values`.

    Args:
      codes: of the box.
      code: what they are, see `table_of`.
      scales, zeros: of the blocks that the box touches, in float32.
      block: elements on each axis that share a scale.
      box: where the codes are.
    """
    codes, table = codes.view(np.uint8), table_of(code)
    *lead, rows = (np.arange(*span) // size - span[0] // size for span, size in zip(box[:-1], block, strict=False))
    with np.errstate(over="ignore", invalid="ignore"):  # a value beyond the largest float is infinite
        for at in np.ndindex(values.shape[:-2]):
            blocks = tuple(which[i] for which, i in zip(lead, at, strict=True))
            zero = None if zeros is None else zeros[blocks]
            decode_rows(codes[at], table, scales[blocks], block[-1], values[at], box[-1][0], zero, rows)
    return values


class KeptScales(Plain):
    """The scales of codes that stay codes: as they are stored, and numbers as all scales must be."""

    __slots__ = ()

    def decode(self, stored: list[np.ndarray], box: Box, dtype: np.dtype, empty: Allocate = np.empty) -> np.ndarray:
        finite(stored[0], self.weight)
        return stored[0]
