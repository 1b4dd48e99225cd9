"""Weights of a release that is written in FP8: which are quantised, and the rows of a weight as rows of codes and of scales.

A scale belongs to a block of 128 × 128 values, so a unit that makes rows of such a weight has to make whole blocks of rows: from a
multiple of 128 to another, or to the weight's end.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from weightbeam.formats.encodings import Encoding, quantizing
from weightbeam.formats.encodings.quantizing import BLOCK, CODES, SUFFIX, quantize, scale_shape, why_kept
from weightbeam.formats.safetensors import Tensor
from weightbeam.model_mappings.boxes import Box
from weightbeam.model_mappings.cells import Part
from weightbeam.model_mappings.plan import is_float
from weightbeam.transforms.grid import Grid
from weightbeam.transforms.rows import VALUES, RowsJob

FORMATS = ("fp8",)
ROWS = BLOCK[0]
REASON = "quantised to FP8, a scale for each 128 × 128 values"

Entry = tuple[str, np.dtype, tuple[int, ...]]  # name, dtype, shape


@dataclasses.dataclass(frozen=True, slots=True)
class QuantizeJob(RowsJob):
    """Rows of a weight to make, and to write as codes and scales; `tensor` has the codes.

    Attributes:
      scales: where their scales go.
    """

    scales: Tensor = dataclasses.field(kw_only=True)

    @property
    def written(self) -> np.dtype:
        """Of the values that are quantised."""
        return VALUES

    def write_as(self, values: np.ndarray) -> Iterator[tuple[Tensor, Box, np.ndarray]]:
        """The rows of both tensors.

        Raises:
          ContentError: a value is NaN or infinite.
        """
        *leading, (start, stop), _ = self.box
        if not in_blocks(self.box, self.tensor.shape):
            raise ValueError(f"{self.tensor.name}: a box that doesn't begin and end at blocks: {self.box}")
        codes, scales = quantize(self.finish(values).reshape([high - low for low, high in self.box]), self.tensor.name)
        yield self.tensor, self.box, codes
        yield self.scales, (*leading, (start // ROWS, -(-stop // ROWS)), (0, self.scales.shape[-1])), scales


def in_blocks(box: Box, shape: Sequence[int]) -> bool:
    """Whether a box of a weight has whole rows, and begins and ends at blocks of them, or at the weight's end."""
    *_, (start, stop), columns = box
    return start % ROWS == 0 and (stop % ROWS == 0 or stop == shape[-2]) and columns == (0, shape[-1])


def find_quantised(tensors: Iterable[Entry]) -> frozenset[str]:
    """The tensors that are written as codes: the weights of linear layers, of a dtype that isn't quantised already."""
    return frozenset(name for name, dtype, shape in tensors if is_float(dtype) and dtype.itemsize > 1 and why_kept(name, shape) is None and math.prod(shape))


def with_scales(tensors: Iterable[Entry], quantised: frozenset[str]) -> Iterator[Entry]:
    """The tensors as they are written: codes and scales in place of each that is quantised."""
    for name, dtype, shape in tensors:
        if name in quantised:
            yield name, CODES, shape
            yield name + SUFFIX, VALUES, scale_shape(shape)
        else:
            yield name, dtype, shape


def job_for(written: Mapping[str, Tensor], name: str, quantised: frozenset[str], box: Box, pieces: tuple, merged: Encoding | None = None) -> RowsJob:
    """Rows of a tensor to make, of whichever kind it is."""
    if name in quantised:
        return QuantizeJob(written[name], box, pieces, merged, scales=written[name + SUFFIX])
    return RowsJob(written[name], box, pieces, merged)


def quantization_config(tensors: Iterable[Entry], quantised: frozenset[str]) -> dict[str, Any]:
    """`quantization_config` of such a release, with the linear layers that aren't quantised by their names."""
    return quantizing.quantization_config(quantizing.not_converted((name, shape) for name, _, shape in tensors if name not in quantised))


def keep_blocks(grid: Grid, part: Part) -> Grid:
    """A grid of which no unit cuts a block of 128 rows of its tensors: along the slowest axis that holds rows in whole blocks, along the others not at all."""
    rows = sorted(part.axes_of(len(part.window_shape) - 2) - grid.whole_axes, key=grid.growth.index)  # the fastest first
    if not rows:
        return grid
    *inner, outer = rows
    count = grid.spec.shape[outer]
    span, rest = divmod(part.window_shape[-2] * part.steps[-2], count)  # rows of the tensor for each index of that axis
    grain = count if rest else math.lcm(grid.spec.shard[outer], ROWS // math.gcd(ROWS, span))
    kept = grid.whole_axes | set(inner) | ({outer} if grain >= count else set())
    shard = tuple(min(grain, n) if axis == outer else size for axis, (size, n) in enumerate(zip(grid.spec.shard, grid.spec.shape, strict=True)))
    spec = dataclasses.replace(grid.spec, chunk=shard, shard=shard)
    return dataclasses.replace(grid, spec=spec, whole_axes=kept, growth=tuple(axis for axis in grid.growth if axis not in kept))
