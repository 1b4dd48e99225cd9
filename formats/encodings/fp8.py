"""Formats with one byte a code: FP8 with scales of every kind, MXFP8, and int8.

Who writes which: DeepSeek, Qwen, GLM, MiniMax and transformers `weight_scale_inv` (deepseek-ai/DeepSeek-V3,
README_WEIGHTS.md; transformers 5.23, integrations/finegrained_fp8.py), which multiplies for all its name;
compressed-tensors, ModelOpt and fbgemm `weight_scale`; DeepSeek-V4 `scale` in place of `weight`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence

import ml_dtypes
import numpy as np

from weightbeam.formats.encodings.encoding import Encoding
from weightbeam.formats.encodings.format import (
    Companion,
    MismatchError,
    QuantizedFormat,
    QuantizedTensor,
    UnknownBlockError,
    dtypes,
)
from weightbeam.formats.encodings.quantization import Quantization, is_size
from weightbeam.formats.encodings.scaled import E8M0, Scaled
from weightbeam.formats.safetensors import Tensor
from weightbeam.model_mappings.plan import Problem

FLOAT8 = dtypes(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz)
FLOATS = dtypes(np.float32, ml_dtypes.bfloat16, np.float16)
EXPONENTS = dtypes(E8M0, np.uint8)
INT8 = dtypes(np.int8)
WEIGHT_SCALE = ("compressed-tensors", "modelopt", "fbgemm_fp8", "fp8", "mxfp8")  # who writes that


def reshaped(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The same bytes with other axes."""
    return dataclasses.replace(tensor, shape=tuple(shape))


def exponents(scale: Tensor, quantization: Quantization) -> Tensor:
    """Scales of bytes as the exponents that they are.

    Raises:
      MismatchError: nothing says that they are exponents.
    """
    mx = any("mxfp8" in name for name in (*quantization.formats(), quantization.method or ""))
    if not mx and quantization.fields.get("scale_fmt") != "ue8m0":
        raise MismatchError(
            f"the scale {scale.name} is uint8, but {quantization.place} doesn't say that its bytes are exponents (scale_fmt ue8m0)"
        )
    return dataclasses.replace(scale, dtype=E8M0)


@dataclasses.dataclass(frozen=True)
class ScaleGrid:
    """How scales lie over a weight.

    Attributes:
      shape: of the scales, with the weight's axes.
      block: elements on each axis that share one.
      text: for the plan.
    """

    shape: tuple[int, ...]
    block: tuple[int, ...]
    text: str


def blocks_over(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """How many blocks there are on each axis; the last may be partial."""
    return tuple(-(-n // size) for n, size in zip(shape, block, strict=True))


def simple_grid(shape: tuple[int, ...], scale: tuple[int, ...]) -> ScaleGrid | None:
    """The grid of scales that the shapes alone settle: on each axis either one scale, or one for each index.

    A scale may have fewer axes than the weight: none or one for the whole; (O,) for each row; (E,) for each expert,
    (E, O) for each expert's rows.
    """
    if math.prod(scale) == 1:
        return ScaleGrid((1,) * len(shape), tuple(max(1, size) for size in shape), "with one scale")
    if len(scale) < len(shape) and scale == shape[: len(scale)]:
        scale += (1,) * (len(shape) - len(scale))
    if len(scale) != len(shape) or not all(n in (1, size) for n, size in zip(scale, shape, strict=True)):
        return None
    block = tuple(1 if n == size else max(1, size) for n, size in zip(scale, shape, strict=True))
    *experts, rows, columns = (n > 1 for n in scale)
    which = [name for name, varies in (("expert", any(experts)), ("row", rows), ("column", columns)) if varies]
    return ScaleGrid(scale, block, f"with a scale for each {' and '.join(which)}")


def group_grid(shape: tuple[int, ...], scale: tuple[int, ...]) -> ScaleGrid | None:
    """The grid of scales for groups of equal length in each row."""
    if len(scale) != len(shape) or scale[:-1] != shape[:-1] or not scale[-1] or not shape[-1] or shape[-1] % scale[-1]:
        return None
    group = shape[-1] // scale[-1]
    return ScaleGrid(scale, (1,) * (len(shape) - 1) + (group,), f"in groups of {group}")


def in_blocks(shape: tuple[int, ...], scale: tuple[int, ...], groups: bool) -> bool:
    """Whether only the size of a block can tell how scales lie over a weight; for `groups` see `grid_of`."""
    return len(scale) == len(shape) >= 2 and not simple_grid(shape, scale) and not (groups and group_grid(shape, scale))


def grid_of(shape: tuple[int, ...], scale: Tensor, quantization: Quantization, groups: bool) -> ScaleGrid:
    """How `scale` lies over a weight.

    Args:
      shape: the weight's.
      scale: as it is stored.
      quantization: says the size of a block where shapes allow several.
      groups: whether scales for each row are groups of equal length, as compressed-tensors writes them.

    Raises:
      MismatchError: it doesn't lie over the weight.
      UnknownBlockError: it lies in blocks of unknown size.
    """
    if len(shape) < 2:
        raise MismatchError(f"{shape} has a scale, but no rows and columns")
    squeezed = squeeze(shape, scale.shape)
    size = quantization.block
    lead = (1,) * (len(shape) - 2)
    if size is not None and squeezed == blocks_over(shape, lead + size):
        return ScaleGrid(squeezed, lead + size, f"in blocks of {size[0]} × {size[1]}")
    if not quantization.fields.get("weight_block_size") and (grid := simple_grid(shape, squeezed)):
        return grid
    if groups and (grid := group_grid(shape, squeezed)):
        group, expected = grid.block[-1], quantization.weights("group_size")
        if expected in (None, group):
            return grid
        raise MismatchError(
            f"{shape} with the scales {scale.name} {scale.shape} has groups of {group}, {quantization.place} says {expected}"
        )
    if size is not None:
        raise MismatchError(
            f"{shape} in blocks of {size[0]} × {size[1]} needs scales {blocks_over(shape, lead + size)}, {scale.name} is {scale.shape}"
        )
    if in_blocks(shape, squeezed, groups):
        raise UnknownBlockError(
            f"{shape} with the scales {scale.name} {scale.shape}: {_fits(groups)}, and if they lie in blocks, no field of "
            f"{quantization.place} says how large these are (weight_block_size, block_structure)"
        )
    raise MismatchError(
        f"{shape}: the scale {scale.name} is {scale.shape}; it fits neither the weight, its experts, rows, groups nor blocks"
    )


def _fits(groups: bool) -> str:
    """What scales with the axes of a weight that lie in no simple way don't fit, in words."""
    return (
        "they fit neither its rows, its columns nor groups of a row"
        if groups
        else "they fit neither its rows nor its columns"
    )


_OLD_BLOCK = re.compile(r"([0-9]{1,9})x([0-9]{1,9})")  # compressed-tensors reads "128x128" still


def find_block(quantization: Quantization, weights: Iterable[QuantizedTensor]) -> tuple[Quantization, list[Problem]]:
    """The quantisation with rows and columns of a block: what the config says, else the power of two that every shape
    allows.

    Several powers fit an axis only where each weight has one block there; then they mean the same.

    Args:
      quantization: what the checkpoint says.
      weights: those whose scales may lie in blocks.
    """
    for field, size in (
        ("weight_block_size", quantization.fields.get("weight_block_size")),
        ("block_structure", quantization.weights("block_structure")),
    ):
        if size:
            if block := _block_of(size):
                return dataclasses.replace(quantization, block=block), []
            message = f"{field} should be two sizes of an axis, is {reprlib.repr(size)}"
            return quantization, [Problem("quantised", quantization.file, message)]
    if not (found := _scales_in_blocks(weights)):
        return quantization, []
    rows, columns = (_powers(found, axis) for axis in (-2, -1))
    if not rows or not columns:
        message = "no weight_block_size, and the scales' shapes allow no power of two for all weights"
        return quantization, [Problem("quantised", quantization.file, message)]
    return dataclasses.replace(quantization, block=(min(rows), min(columns))), []


def _block_of(size: object) -> tuple[int, int] | None:
    """Rows and columns of a block as a config has them, a list or a text; None where it's neither."""
    pair = _OLD_BLOCK.fullmatch(size) if isinstance(size, str) else None
    block = [int(n) for n in pair.groups()] if pair else size
    if isinstance(block, list) and len(block) == 2 and all(map(is_size, block)):
        return block[0], block[1]
    return None


def _scales_in_blocks(weights: Iterable[QuantizedTensor]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The shapes of weights, and of their scales, of which only the size of a block can tell how they lie."""
    return {
        (parts.codes.shape, scale)
        for parts in weights
        for suffix, companion in parts.companions.items()
        if in_blocks(parts.codes.shape, scale := squeeze(parts.codes.shape, companion.shape), _in_groups(suffix))
    }


def _powers(found: Iterable[tuple[tuple[int, ...], tuple[int, ...]]], axis: int) -> list[int]:
    """The powers of two that a block may have on an axis, where each weight has as many blocks there as scales."""
    return [
        size
        for size in (2**power for power in range(1, 31))
        if all(-(-shape[axis] // size) == scale[axis] for shape, scale in found)
    ]


def _in_groups(suffix: str) -> bool:
    """Whether one scale for some columns of each row is a group of equal length: so `weight_scale` has them."""
    return not suffix.endswith("_inv")


def squeeze(shape: tuple[int, ...], scale: tuple[int, ...]) -> tuple[int, ...]:
    """ModelOpt's FP8_PB_WO has (rows, 1, columns, 1) for blocks of rows and columns (NVIDIA/TensorRT-LLM#17433)."""
    return (scale[0], scale[2]) if len(shape) == 2 and len(scale) == 4 and scale[1] == scale[3] == 1 else scale


def _fp8(parts: QuantizedTensor, suffix: str) -> Encoding:
    scale = parts[suffix]
    if scale.dtype == np.uint8:
        scale = exponents(scale, parts.quantization)
    grid = grid_of(parts.codes.shape, scale, parts.quantization, groups=_in_groups(suffix))
    kind = "MXFP8" if scale.dtype == E8M0 and grid.block[-2:] == (1, 32) else "FP8"
    return Scaled(parts.codes, parts.codes.dtype.name, reshaped(scale, grid.shape), grid.block, f"{kind} {grid.text}")


def _int8(parts: QuantizedTensor) -> Encoding:
    scale = parts["_scale"]
    grid = grid_of(parts.codes.shape, scale, parts.quantization, groups=True)
    zero = parts.get("_zero_point")
    if zero and zero.shape != scale.shape:
        raise MismatchError(
            f"the zeros {zero.name} are {zero.shape}, the scales {scale.name} {scale.shape}; they should be alike"
        )
    if not zero and _has_zeros(parts.quantization):
        raise MismatchError(
            f"{parts.quantization.place} says that it isn't symmetric, but {parts.name}_zero_point is missing"
        )
    zero = reshaped(zero, grid.shape) if zero else None
    return Scaled(
        parts.codes,
        "int8",
        reshaped(scale, grid.shape),
        grid.block,
        f"int8 {grid.text}" + (" and zeros" if zero else ""),
        zero,
    )


def _has_zeros(quantization: Quantization) -> bool:
    """Whether a config says of every group of int8 weights that it isn't symmetric; one that doesn't say is."""
    weights = [group["weights"] for group in quantization.groups if isinstance(group.get("weights"), Mapping)]
    ours = [said for said in weights if said.get("type", "int") == "int" and said.get("num_bits", 8) == 8]
    return bool(ours) and all(said.get("symmetric", True) is False for said in ours)


def _entry(
    name: str, suffix: str, releases: str, methods: tuple[str, ...], codes: str = "", telling: bool = True
) -> QuantizedFormat:
    """FP8 whose scale has this suffix in place of the codes'."""
    scale = Companion(suffix, FLOATS | EXPONENTS, telling=telling)
    return QuantizedFormat(
        name, codes, FLOAT8, (scale,), functools.partial(_fp8, suffix=suffix), codes, releases, methods, in_blocks=True
    )


FORMATS = (
    _entry(
        "FP8, `weight_scale_inv`",
        "_scale_inv",
        "DeepSeek V3 to V3.2, Kimi-K2-Instruct, Qwen3, GLM, MiniMax, Mistral",
        ("fp8", "mxfp8"),
    ),
    _entry("FP8, `scales_inv`", "_scales_inv", "fused experts as transformers writes them", ("fp8",)),
    _entry(
        "FP8 or MXFP8, `weight_scale`", "_scale", "compressed-tensors, ModelOpt, fbgemm", WEIGHT_SCALE, telling=False
    ),
    _entry("FP8, fused `weight_scale`", "_weight_scale", "ModelOpt's Llama 4", WEIGHT_SCALE),
    _entry("FP8, `scale`", ".scale", "DeepSeek-V4, V4.1", ("fp8",), ".weight", telling=False),
    QuantizedFormat(
        "int8, `weight_scale`",
        "",
        INT8,
        (Companion("_scale", FLOATS), Companion("_zero_point", INT8, required=False)),
        _int8,
        releases="compressed-tensors",
        methods=("compressed-tensors",),
    ),
)
