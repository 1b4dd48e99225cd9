"""The checkpoint as the tables see it: views over the stored tensors, raw -> dequantised.

A view takes the companions of a quantised tensor (its scales) out of sight and shows the tensor under its own name with its
logical shape. What can't be paired is a problem: no weight is ever used without its scale.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from formats.encodings import EIGHT_BIT_FLOATS, SCALE_DTYPES, SCALED_DTYPES, Encoding, Plain, ScaledBlocks
from formats.safetensors import Checkpoint, Tensor
from model_mappings.family import rename
from model_mappings.plan import Problem, TensorSpec

SCALE_SUFFIXES = ("_scale_inv", "_scales_inv")  # transformers v5 writes either for fused experts (integrations/finegrained_fp8.py)


@dataclasses.dataclass(frozen=True)
class Source:
    """The logical tensors of a checkpoint.

    Attributes:
      encodings: how each is stored.
      problems: quantised tensors that can't be decoded.
    """

    encodings: Mapping[str, Encoding]
    problems: tuple[Problem, ...]

    def specs(self) -> dict[str, TensorSpec]:
        """What the tables see: a quantised tensor's values are float32."""
        return {name: _spec(name, encoding) for name, encoding in self.encodings.items()}

    def renamed(self, aliases: Mapping[str, str]) -> Source:
        """The same tensors under the names of a family's table; two that would get one name are a problem."""
        encodings: dict[str, Encoding] = {}
        problems = list(self.problems)
        for given, encoding in self.encodings.items():
            name = rename(given, aliases)
            if name in encodings:
                problems.append(Problem("overlap", given, f"another spelling of {encodings[name].weight.name}, which is there too"))
            encodings.setdefault(name, encoding)
        return Source(encodings, tuple(problems))


def _spec(name: str, encoding: Encoding) -> TensorSpec:
    dtype = encoding.weight.dtype if encoding.label is None else np.dtype(np.float32)
    file = encoding.weight.path.rpartition("/")[2]
    stored = encoding.weight.name
    return TensorSpec(encoding.shape, dtype, file if stored == name else f"{file} (as {stored})", encoding.label)


def open_source(checkpoint: Checkpoint) -> Source:
    """The views over a checkpoint, chosen by dtypes and names; `quantization_config` must agree."""
    tensors = checkpoint.tensors
    problems: list[Problem] = []
    quantization = checkpoint.config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method not in (None, "fp8"):
        problems.append(Problem("quantised", "config.json", f"quant_method {method!r} isn't supported; supported: fp8 in blocks, and unquantised weights"))
    scaled = {name: found for name in tensors if (found := [name + suffix for suffix in SCALE_SUFFIXES if name + suffix in tensors])}
    block = _block_size(tensors, scaled, quantization if isinstance(quantization, dict) else {}, problems)
    encodings: dict[str, Encoding] = {}
    used: set[str] = set()
    for name, tensor in tensors.items():
        if name in scaled:
            used.update(scaled[name])
            if encoding := _scaled(tensor, [tensors[scale] for scale in scaled[name]], block, problems):
                encodings[name] = encoding
        elif tensor.dtype in EIGHT_BIT_FLOATS:
            problems.append(Problem("unscaled", name, f"{tensor.dtype.name} without its scale {name}{SCALE_SUFFIXES[0]}; its values can't be known"))
        elif name.endswith(SCALE_SUFFIXES):
            continue
        else:
            encodings[name] = Plain(tensor)
    for name in tensors:
        if name.endswith(SCALE_SUFFIXES) and name not in used:
            problems.append(Problem("orphan scale", name, "a scale, but the weight it belongs to is missing"))
    return Source(encodings, tuple(problems))


def _block_size(
    tensors: Mapping[str, Tensor], scaled: Mapping[str, list[str]], quantization: Mapping[str, Any], problems: list[Problem]
) -> tuple[int, int] | None:
    """Rows and columns of a block: what the config says, else the only power of two that every shape allows."""
    said = quantization.get("weight_block_size")
    if said is not None:
        if isinstance(said, list) and len(said) == 2 and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in said):
            return said[0], said[1]
        problems.append(Problem("quantised", "config.json", f"weight_block_size should be two positive integers, is {said!r}"))
        return None
    if not scaled:
        return None
    sizes = []
    for axis in (-2, -1):
        fits = {2**power for power in range(1, 16)}
        for name, (scale, *_) in scaled.items():
            shapes = tensors[name].shape, tensors[scale].shape
            if len(shapes[0]) == len(shapes[1]) >= 2:
                fits = {size for size in fits if -(-shapes[0][axis] // size) == shapes[1][axis]}
        if len(fits) != 1:
            problems.append(Problem("quantised", "config.json", "quantization_config has no weight_block_size, and the scales' shapes allow several or none"))
            return None
        sizes.append(fits.pop())
    return sizes[0], sizes[1]


def _scaled(weight: Tensor, scales: list[Tensor], block: tuple[int, int] | None, problems: list[Problem]) -> ScaledBlocks | None:
    """A tensor with its scale, or a problem."""
    scale = scales[0]
    message = None
    if len(scales) > 1:
        message = f"has two scales: {', '.join(tensor.name for tensor in scales)}"
    elif weight.dtype not in SCALED_DTYPES:
        message = f"has the scale {scale.name}, but is {weight.dtype.name}; supported: float8_e4m3fn"
    elif scale.dtype not in SCALE_DTYPES:
        message = f"the scale {scale.name} is {scale.dtype.name}; supported: float32, bfloat16, float16"
    elif len(weight.shape) < 2:
        message = f"{weight.shape} has a scale, but no rows and columns"
    if message is None and block is not None:
        sizes = (1,) * (len(weight.shape) - 2) + block
        expected = tuple(-(-n // size) for n, size in zip(weight.shape, sizes, strict=True))
        if scale.shape == expected:
            return ScaledBlocks(weight, scale, sizes)
        message = f"{weight.shape} in blocks of {block[0]} × {block[1]} needs scales {expected}, {scale.name} is {scale.shape}"
    if message is not None:
        problems.append(Problem("scale", weight.name, message))
    return None
