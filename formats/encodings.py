"""How the values of a tensor are stored: as they are, or quantised.

An encoding says which boxes of which stored tensors a box of values needs, and decodes them. The tables never see it.
Values are computed in float32 and cast once.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import ml_dtypes
import numpy as np

from formats.safetensors import DTYPES, BoxRead, Empty, Tensor
from model_mappings.cells import Box, whole

STRIP_ELEMENTS = 1 << 17  # values decoded at a time: their float32 form (512 KiB) stays in the cache


class Encoding(Protocol):
    """See the module's text. Implementations are small, immutable and picklable."""

    @property
    def weight(self) -> Tensor:
        """The stored tensor that gives the values' name and file."""
        ...

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
        """The axes of the values as they are stored, the slowest first; `(0, 2, 1)` for matrices that are stored transposed."""
        ...

    def reads(self, box: Box) -> tuple[BoxRead, ...]:
        """The stored boxes that the values of `box` need."""
        ...

    def decode(self, stored: list[np.ndarray], box: Box, dtype: np.dtype, empty: Empty = np.empty) -> np.ndarray:
        """The values of `box`, from what `reads` fetched; computed ones have `dtype` and lie in an array that `empty` makes."""
        ...


def stored_bytes(encoding: Encoding) -> int:
    """Bytes of a tensor as it is stored, its scales included."""
    return sum(read.nbytes for read in encoding.reads(whole(encoding.shape)))


@dataclasses.dataclass(frozen=True, slots=True)
class Plain:
    """Values stored as they are."""

    weight: Tensor
    label = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(range(len(self.shape)))

    def reads(self, box: Box) -> tuple[BoxRead, ...]:
        return (BoxRead(self.weight, box),)

    def decode(self, stored: list[np.ndarray], box: Box, dtype: np.dtype, empty: Empty = np.empty) -> np.ndarray:
        return stored[0]


@dataclasses.dataclass(frozen=True, slots=True)
class ScaledBlocks:
    """8-bit floats with a scale for each block: value = float32(code) · scale[i // block].

    DeepSeek calls the scale `weight_scale_inv`, but multiplies by it (deepseek-ai/DeepSeek-V3, README_WEIGHTS.md). The last
    block of an axis may be partial.

    Attributes:
      weight: the codes.
      scale: one for each block; `scale.shape[i] == ceil(weight.shape[i] / block[i])`.
      block: the size of a block on each axis; 1 on the leading axes.
    """

    weight: Tensor
    scale: Tensor
    block: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(range(len(self.shape)))

    @property
    def label(self) -> str:
        rows, columns = self.block[-2:]
        return f"FP8 in blocks of {rows} × {columns}"

    def reads(self, box: Box) -> tuple[BoxRead, ...]:
        scales = tuple((start // size, -(-stop // size)) for (start, stop), size in zip(box, self.block, strict=True))
        return BoxRead(self.weight, box), BoxRead(self.scale, scales)

    def decode(self, stored: list[np.ndarray], box: Box, dtype: np.dtype, empty: Empty = np.empty) -> np.ndarray:
        codes, scales = stored[0], stored[1].astype(np.float32)
        which = [np.arange(start, stop) // size - start // size for (start, stop), size in zip(box, self.block, strict=True)]
        values = empty(codes.shape, dtype)
        for lead in np.ndindex(codes.shape[:-2]):
            at = tuple(index[i] for index, i in zip(which, lead, strict=False))
            self._decode_matrix(codes[lead], np.take(scales[at], which[-1], axis=1), which[-2], values[lead])
        return values

    @staticmethod
    def _decode_matrix(codes: np.ndarray, scales: np.ndarray, row_block: np.ndarray, values: np.ndarray) -> None:
        """`values = codes · scales`, rows of one block at a time, in strips that stay in the cache.

        codes, values: (row, column); scales: (block of rows, column); row_block: the block of each row.
        """
        edges = np.flatnonzero(np.diff(row_block)) + 1
        strip = max(1, STRIP_ELEMENTS // max(1, codes.shape[1]))
        buffer = np.empty((min(strip, codes.shape[0]), codes.shape[1]), np.float32)
        for first, last in zip([0, *edges], [*edges, codes.shape[0]], strict=True):
            row = scales[row_block[first]]
            for start in range(first, last, strip):
                stop = min(start + strip, last)
                part = buffer[: stop - start]
                _fp8_to_float32(codes[start:stop], part)
                np.multiply(part, row, out=part)
                values[start:stop] = part


E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)  # the value of each code


def _fp8_to_float32(codes: np.ndarray, out: np.ndarray) -> None:
    """E4M3 codes to float32, exactly. A table is 8 times faster than ml_dtypes' cast, and releases the GIL."""
    np.take(E4M3, codes.view(np.uint8), out=out, mode="clip")


EIGHT_BIT_FLOATS = frozenset(dtype for name, dtype in DTYPES.items() if name.startswith("F8_"))  # never weights by themselves
SCALED_DTYPES = frozenset({np.dtype(ml_dtypes.float8_e4m3fn)})
SCALE_DTYPES = frozenset({np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)})
