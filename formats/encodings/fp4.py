"""Formats with E2M1 codes, two in a byte, the even one in the low bits: MXFP4 and NVFP4 as four writers have them.

MXFP4 has a power of two for each 32 values of a row, as the byte of its exponent. NVFP4 has an E4M3 scale for each 16,
and one in float32 for the whole, by which compressed-tensors divides and ModelOpt multiplies
(vllm-project/compressed-tensors 0.20.0, quantization/lifecycle/forward_helpers.py; NVIDIA/Model-Optimizer,
modelopt/torch/quantization/qtensor/nvfp4_tensor.py). Scales that were laid out for a kernel (swizzled) have another
shape, and are refused.

The fused experts of Llama 4 and gpt-oss are transposed for ModelOpt's quantisation and back again (its
modelopt/torch/export/quant_utils.py, `maybe_transpose_expert_weight_dimensions`): two inputs in a byte, below each
other.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import ml_dtypes
import numpy as np

from weightbeam.formats.encodings.encoding import Encoding, InOrder, Transposed, cover
from weightbeam.formats.encodings.format import Companion, MismatchError, QuantizedFormat, QuantizedTensor, dtypes
from weightbeam.formats.encodings.fp8 import EXPONENTS, INT8, reshaped
from weightbeam.formats.encodings.nibbles import STRIP_ELEMENTS, finite, scale_rows
from weightbeam.formats.encodings.scaled import E8M0, FP4_RATE, Scaled, table_of
from weightbeam.formats.safetensors import Allocate, BoxRead, Tensor
from weightbeam.model_mappings.boxes import Box, extent

BYTES, E4M3, FLOAT32 = dtypes(np.uint8), dtypes(ml_dtypes.float8_e4m3fn), dtypes(np.float32)
MX, NV = 32, 16  # values of a row with one scale


def _scaled(
    codes: Tensor, scale: Tensor, group: int, label: str, second: Tensor | None = None, divides: bool = False
) -> Scaled:
    """Codes (…, rows, bytes) with a scale for each `group` values of a row, which must be there exactly. Raises
    MismatchError where the scales have another shape.
    """
    if len(codes.shape) < 2:
        raise MismatchError(f"{codes.shape} has scales, but no rows and columns")
    shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    expected = (*shape[:-1], shape[-1] // group)
    if shape[-1] % group:
        raise MismatchError(f"{codes.shape} are {shape[-1]} values in a row, which aren't whole groups of {group}")
    if scale.shape != expected:
        hint = (
            "; were they laid out for a kernel (swizzled)? That isn't supported"
            if math.prod(scale.shape) >= math.prod(expected)
            else ""
        )
        raise MismatchError(
            f"{codes.shape} needs scales {expected}, one for {group} values, {scale.name} is {scale.shape}{hint}"
        )
    block = (1,) * (len(shape) - 1) + (group,)
    return Scaled(codes, "e2m1", scale, block, label, second=second, divides=divides)


def _mxfp4(parts: QuantizedTensor, suffix: str) -> Encoding:
    return _scaled(parts.codes, dataclasses.replace(parts[suffix], dtype=E8M0), MX, "MXFP4")


def _gpt_oss(parts: QuantizedTensor) -> Encoding:
    """Blocks (E, O, I / 32, 16), which transformers transposes to (E, I, O) (5.23, integrations/mxfp4.py,
    `convert_moe_packed_tensors`).
    """
    codes, scale = parts.codes, parts["_scales"]
    if len(codes.shape) != 4 or codes.shape[-1] != MX // 2:
        raise MismatchError(f"{codes.shape} should be experts, outputs, blocks and {MX // 2} bytes")
    experts, outputs, blocks, size = codes.shape
    scale = dataclasses.replace(scale, dtype=E8M0)
    return Transposed(_scaled(reshaped(codes, (experts, outputs, blocks * size)), scale, MX, "MXFP4"), (0, 2, 1))


def _nvfp4(parts: QuantizedTensor, suffix: str, divides: bool) -> Encoding:
    second, lead = parts[suffix], parts.codes.shape[:-2]
    if math.prod(second.shape) == 1:
        shape = (1,) * len(parts.codes.shape)
    elif second.shape[: len(lead)] == lead and math.prod(second.shape) == math.prod(lead):
        shape = (*lead, 1, 1)
    else:
        raise MismatchError(
            f"{parts.codes.shape}: {second.name} should be one number"
            + (", or one for each expert" if lead else "")
            + f", is {second.shape}"
        )
    return _scaled(parts.codes, parts["_scale"], NV, "NVFP4", reshaped(second, shape), divides)


@dataclasses.dataclass(frozen=True, slots=True)
class FusedNvfp4(InOrder):
    """ModelOpt's fused experts, (E, I, O), two inputs of an output in a byte, the even one in the low bits.

        value[e, i, o] = code[e, i, o] · (scale[e, i // 16, o] · second)

    Attributes:
      weight: the codes, (E, I / 2, O) bytes.
      scale: (E, I / 16, O) E4M3.
      second: float32, one number: (1, 1, 1).
    """

    weight: Tensor
    scale: Tensor
    second: Tensor
    label = "NVFP4"
    decode_rate = FP4_RATE

    @property
    def shape(self) -> tuple[int, ...]:
        experts, octets, outputs = self.weight.shape
        return experts, 2 * octets, outputs

    def reads(self, box: Box) -> tuple[BoxRead, ...]:
        experts, inputs, outputs = box
        return (
            BoxRead(self.weight, (experts, cover(inputs, 2), outputs)),
            BoxRead(self.scale, (experts, cover(inputs, NV), outputs)),
            BoxRead(self.second, ((0, 1),) * 3),
        )

    @np.errstate(over="ignore", invalid="ignore")  # a value beyond the largest float is infinite
    def decode(self, stored: list[np.ndarray], box: Box, dtype: np.dtype, empty: Allocate = np.empty) -> np.ndarray:
        codes, scales, second = stored
        scales = finite(finite(scales, self.scale) * finite(second, self.second), self.second)
        values = empty(extent(box), dtype)
        (start, stop), count = box[1], values.shape[2]
        which = np.arange(start, stop) // NV - start // NV
        low, high = (np.ascontiguousarray(half) for half in table_of("e2m1").T)
        strip = max(1, STRIP_ELEMENTS // max(1, 2 * count))  # of bytes below each other
        buffer = np.empty((min(strip, codes.shape[1]), 2, count), np.float32)
        for expert, octets in enumerate(codes):
            for row in range(0, len(octets), strip):
                part = buffer[: len(octets) - row]
                for half, table in enumerate((low, high)):
                    part[:, half] = np.take(table, octets[row : row + strip], mode="clip")
                first = (start // 2 + row) * 2
                begin, end = max(first, start), min(first + 2 * len(part), stop)
                rows, here = part.reshape(-1, count)[begin - first : end - first], slice(begin - start, end - start)
                scale_rows(rows, scales[expert], which[here])
                values[expert, here] = rows
        return values


def _fused_nvfp4(parts: QuantizedTensor) -> Encoding:
    codes, scale, second = parts.codes, parts["_weight_scale"], parts["_weight_scale_2"]
    if len(codes.shape) != 3 or codes.shape[1] % (NV // 2):
        raise MismatchError(
            f"{codes.shape} should be experts, inputs in pairs, and outputs; inputs in whole groups of {NV}"
        )
    experts, octets, outputs = codes.shape
    if scale.shape != (experts, 2 * octets // NV, outputs):
        raise MismatchError(
            f"{codes.shape} needs scales {(experts, 2 * octets // NV, outputs)}, one for {NV} inputs, {scale.name} is {scale.shape}"
        )
    if math.prod(second.shape) != 1:
        raise MismatchError(f"{codes.shape}: {second.name} should be one number, is {second.shape}")
    return FusedNvfp4(codes, scale, reshaped(second, (1, 1, 1)))


FORMATS = (
    QuantizedFormat(
        "MXFP4, `blocks` and `scales`",
        "_blocks",
        BYTES,
        (Companion("_scales", BYTES),),
        _gpt_oss,
        releases="gpt-oss",
        methods=("mxfp4",),
    ),
    QuantizedFormat(
        "MXFP4, `weight_packed`",
        "_packed",
        BYTES,
        (Companion("_scale", EXPONENTS),),
        functools.partial(_mxfp4, suffix="_scale"),
        releases="compressed-tensors `mxfp4-pack-quantized`: Kimi-K3",
        methods=("compressed-tensors",),
    ),
    QuantizedFormat(
        "FP4, `scale`",
        ".weight",
        INT8,
        (Companion(".scale", dtypes(E8M0)),),
        functools.partial(_mxfp4, suffix=".scale"),
        logical=".weight",
        releases="DeepSeek-V4's and V4.1's experts",
        methods=("fp8",),
    ),
    QuantizedFormat(
        "NVFP4, `weight_packed`",
        "_packed",
        BYTES,
        (Companion("_scale", E4M3), Companion("_global_scale", FLOAT32)),
        functools.partial(_nvfp4, suffix="_global_scale", divides=True),
        releases="compressed-tensors `nvfp4-pack-quantized`",
        methods=("compressed-tensors",),
    ),
    QuantizedFormat(
        "NVFP4, `weight_scale_2`",
        "",
        BYTES,
        (Companion("_scale", E4M3), Companion("_scale_2", FLOAT32, telling=True)),
        functools.partial(_nvfp4, suffix="_scale_2", divides=False),
        releases="ModelOpt",
        methods=("modelopt", "fp8"),
    ),
    QuantizedFormat(
        "NVFP4, fused `weight_scale_2`",
        "",
        BYTES,
        (Companion("_weight_scale", E4M3, telling=True), Companion("_weight_scale_2", FLOAT32, telling=True)),
        _fused_nvfp4,
        releases="ModelOpt's Llama 4 and gpt-oss",
        methods=("modelopt",),
    ),
)
