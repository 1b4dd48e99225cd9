"""Weights of a release that is written in FP8: which are quantised, and the rows of a weight as rows of codes and of
scales.

A scale belongs to a block of 128 × 128 values, so a unit that makes rows of such a weight has to make whole blocks of
rows: from a multiple of 128 to another, or to the weight's end.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from weightbeam.formats.encodings import Encoding, quantizing
from weightbeam.formats.encodings.quantization import Quantization
from weightbeam.formats.encodings.quantizing import (
    BLOCK,
    CODES,
    SUFFIX,
    experts_of,
    is_linear,
    quantize,
    scale_shape,
    stays_fused,
)
from weightbeam.formats.encodings.scaled import Scaled
from weightbeam.formats.release.source import open_source
from weightbeam.formats.safetensors import BoxRead, HfCheckpoint, Tensor, read_boxes
from weightbeam.model_mappings.boxes import Box
from weightbeam.model_mappings.cells import Part
from weightbeam.model_mappings.plan import Problem
from weightbeam.transforms.cutting.files import Entry
from weightbeam.transforms.cutting.grid import Grid
from weightbeam.transforms.cutting.rows import VALUES, RowsRecipe

ROWS = BLOCK[0]
FUSED_CODES = (
    "{:,} tensors of fused experts are codes: where transformers dequantises, on a CPU or a GPU below compute capability "
    "8.9, it takes such codes for weights; load there what weightbeam dequantize makes of this"
)
CUT_BLOCKS = (
    "{:,} of the tensors that are codes ({}) have a last block that is cut off: where transformers dequantises, on a CPU or "
    "a GPU below compute capability 8.9, it takes all blocks for smaller ones, or fails; load there what weightbeam "
    "dequantize makes of this"
)


@dataclasses.dataclass(frozen=True, slots=True)
class QuantizeRecipe(RowsRecipe):
    """Rows of a weight to make, and to write as codes and scales; `tensor` has the codes.

    Attributes:
      scales: where their scales go.
      given: the scales that the weight had in a release, which its untouched blocks keep; None for no such release.
    """

    scales: Tensor = dataclasses.field(kw_only=True)
    given: Tensor | None = dataclasses.field(default=None, kw_only=True)

    @property
    def written(self) -> np.dtype:
        """Of the values that are quantised."""
        return VALUES

    def parts(self, values: np.ndarray) -> Iterator[tuple[Tensor, Box, np.ndarray]]:
        """The rows of both tensors.

        Raises:
          ContentError: a value is NaN or infinite.
          StorageError: the given scales can't be read.
        """
        *leading, (start, stop), _ = self.box
        if not in_blocks(self.box, self.tensor.shape):
            raise ValueError(f"{self.tensor.name}: a box that doesn't begin and end at blocks: {self.box}")
        rows = (*leading, (start // ROWS, -(-stop // ROWS)), (0, self.scales.shape[-1]))
        given = read_boxes([BoxRead(self.given, rows)])[0][0] if self.given else None
        codes, scales = quantize(values.reshape([high - low for low, high in self.box]), self.tensor.name, scales=given)
        yield self.tensor, self.box, codes
        yield self.scales, rows, scales


def in_blocks(box: Box, shape: Sequence[int]) -> bool:
    """Whether a box of a weight has whole rows, and begins and ends at blocks of them, or at the weight's end."""
    *_, (start, stop), columns = box
    return start % ROWS == 0 and (stop % ROWS == 0 or stop == shape[-2]) and columns == (0, shape[-1])


@dataclasses.dataclass(frozen=True)
class Given:
    """What a release in FP8 gives to one that should be like it: which weights are quantised, their scales, and
    `quantization_config`.

    Attributes:
      files: the release.
      scales: by the weight's name, its scales as they are stored.
      problems: why it can't be followed.
    """

    files: HfCheckpoint
    scales: Mapping[str, Tensor]
    problems: tuple[Problem, ...] = ()

    @classmethod
    def of(cls, files: HfCheckpoint) -> Given | None:
        """What a release gives; None for one that isn't quantised."""
        source = open_source(files)
        if source.lost:  # it can't be told which of its weights are quantised
            return cls(files, {}, tuple(_of_like(problem) for problem in source.problems))
        labelled = {name: encoding for name, encoding in source.encodings.items() if encoding.label}
        if not labelled:
            return None
        scales = {
            name: encoding.scale
            for name, encoding in labelled.items()
            if isinstance(encoding, Scaled) and _is_ours(name, encoding)
        }
        other = next((name for name in labelled if name not in scales), None)
        wrong = (
            f"--like has it as {labelled[other].label}; only FP8 in blocks of 128 × 128 with {SUFFIX} in float32 can be followed"
            if other
            else ""
        )
        return cls(files, scales, (Problem("quantised", other, wrong),) if other else ())

    @property
    def quantization_config(self) -> dict[str, Any]:
        """As the release says it."""
        return dict(Quantization.of(self.files.config).fields)

    def missing(self, tensors: Iterable[Entry], left_out: Container[str] = ()) -> Iterator[Problem]:
        """The weights that it has as codes, and that what is quantised hasn't, or has with another shape; but for those
        that are left out on purpose.
        """
        shapes = {entry.name: entry.shape for entry in tensors}
        for name, scale in self.scales.items():
            if name in left_out and name not in shapes:
                continue
            if name not in shapes:
                yield Problem("missing", name, f"is in {self.files.root}, and there is no such weight to quantise")
            elif scale_shape(shapes[name]) != scale.shape:
                message = f"{shapes[name]}, of which {self.files.root} has scales {scale.shape}; expected {scale_shape(shapes[name])}"
                yield Problem("shape", name, message)


def _of_like(problem: Problem) -> Problem:
    """A problem of the release that is to be followed."""
    return dataclasses.replace(problem, message=f"of --like: {problem.message}")


def _is_ours(name: str, encoding: Scaled) -> bool:
    """Whether a weight is stored as `quantize` writes it."""
    in_blocks = encoding.block[-2:] == BLOCK and all(size == 1 for size in encoding.block[:-2])
    plain = encoding.code == CODES.name and encoding.second is None and encoding.zero is None
    return in_blocks and plain and encoding.scale.dtype == VALUES and encoding.scale.name == name + SUFFIX


def find_quantized(tensors: Iterable[Entry], given: Given | None) -> frozenset[str]:
    """The tensors that are written as codes: those that a given release has so, else the weights of linear layers, and
    of experts that engines load so; of a dtype that isn't quantised already.
    """
    if given is not None:
        return frozenset(entry.name for entry in tensors if entry.name in given.scales)
    entries = list(tensors)
    shapes = {entry.name: entry.shape for entry in entries}
    return frozenset(entry.name for entry in entries if is_linear(*entry) and not stays_fused(entry.name, shapes))


def in_halves(tensors: Iterable[Entry], quantized: frozenset[str]) -> set[str]:
    """Fused experts that would be written as codes, but not the others of their module: engines load all or none."""
    module = {entry.name: of for entry in tensors if (of := experts_of(entry.name))}
    plain = {module[name] for name in module.keys() - quantized}
    return {name for name, of in module.items() if name in quantized and of in plain}


def warn_of_codes(tensors: Mapping[str, Tensor], quantized: Iterable[str]) -> list[str]:
    """What whoever loads a release with these tensors should know of its codes; `quantized` are those that are made."""
    fused, cut = sum(bool(experts_of(name)) for name in quantized), cut_off(tensors)
    kinds = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in cut})
    return [
        *([FUSED_CODES.format(fused)] if fused else []),
        *([CUT_BLOCKS.format(len(cut), ", ".join(kinds))] if cut else []),
    ]


def cut_off(tensors: Mapping[str, Tensor]) -> list[str]:
    """The codes whose blocks transformers takes for smaller ones: it divides rows by rows of scales, and columns alike
    (v5.23.0, integrations/finegrained_fp8.py, `Fp8Dequantize`), which gives 128 unless the last of several is cut off.
    """
    return [
        name
        for name, codes in tensors.items()
        if codes.dtype == CODES
        and (scales := tensors.get(name + SUFFIX))
        and scales.shape == scale_shape(codes.shape)
        and any(size > block and size % block for size, block in zip(codes.shape[-2:], BLOCK, strict=True))
    ]


def with_scales(tensors: Iterable[Entry], quantized: frozenset[str]) -> Iterator[Entry]:
    """The tensors as they are written: codes and scales in place of each that is quantised."""
    for entry in tensors:
        if entry.name in quantized:
            yield entry._replace(dtype=CODES)
            yield Entry(entry.name + SUFFIX, VALUES, scale_shape(entry.shape))
        else:
            yield entry


def recipe_for(
    written: Mapping[str, Tensor],
    name: str,
    quantized: frozenset[str],
    box: Box,
    pieces: tuple,
    given: Given | None,
    merged: Encoding | None = None,
) -> RowsRecipe:
    """Rows of a tensor to make, of whichever kind it is."""
    if name in quantized:
        return QuantizeRecipe(
            written[name], box, pieces, merged, scales=written[name + SUFFIX], given=given and given.scales[name]
        )
    return RowsRecipe(written[name], box, pieces, merged)


def quantization_config(tensors: Iterable[Entry], quantized: frozenset[str]) -> dict[str, Any]:
    """`quantization_config` of such a release, with the linear layers that aren't quantised by their names."""
    return quantizing.quantization_config(
        quantizing.not_converted((entry.name, entry.shape) for entry in tensors if entry.name not in quantized)
    )


def keep_blocks(grid: Grid, part: Part) -> Grid:
    """A grid of which no unit cuts a block of 128 rows of its tensors: along the slowest axis that holds rows in whole
    blocks, along the others not at all.
    """
    # the fastest first
    rows = sorted(part.axes_of(len(part.window_shape) - 2) - grid.whole_axes, key=grid.growth.index)
    if not rows:
        return grid
    *inner, outer = rows
    count = grid.spec.shape[outer]
    span, rest = divmod(part.window_shape[-2] * part.steps[-2], count)  # rows of the tensor for each index of that axis
    grain = count if rest else math.lcm(grid.spec.shard[outer], ROWS // math.gcd(ROWS, span))
    kept = grid.whole_axes | set(inner) | ({outer} if grain >= count else set())
    shard = tuple(
        min(grain, n) if axis == outer else size
        for axis, (size, n) in enumerate(zip(grid.spec.shard, grid.spec.shape, strict=True))
    )
    spec = dataclasses.replace(grid.spec, chunk=shard, shard=shard)
    return dataclasses.replace(
        grid, spec=spec, whole_axes=kept, growth=tuple(axis for axis in grid.growth if axis not in kept)
    )
