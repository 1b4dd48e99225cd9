"""GPTQ, and AWQ's `gemm`: integers in 32-bit words along the inputs or the outputs, with a scale and a zero for each
group of inputs.

Both store weights as (I, O). They have the same names; the shape of `qweight` tells them apart.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterator

import numpy as np

from weightbeam.formats.encodings.encoding import Encoding, InOrder, Transposed, cover
from weightbeam.formats.encodings.format import Companion, MismatchError, QuantizedFormat, QuantizedTensor
from weightbeam.formats.encodings.nibbles import STRIP_ELEMENTS, byte_table, finite, scale_rows
from weightbeam.formats.encodings.packed import (
    BYTEWISE,
    INT32,
    SCALES,
    WORD,
    PackedError,
    in_range,
    label,
    unpack,
    width,
    words,
)
from weightbeam.formats.encodings.quantization import is_size
from weightbeam.formats.safetensors import Allocate, BoxRead, Tensor
from weightbeam.model_mappings.boxes import Box, Range, extent, whole

GPTQ_BITS = (1, 2, 3, 4, 8)


@dataclasses.dataclass(frozen=True, slots=True)
class Gptq(InOrder):
    """GPTQ: (I, O), words along the inputs, which may have been quantised in another order (`desc_act`).

        value[i, o] = (code[i, o] - zero[g, o]) · scale[g, o],  g = i // group, or index[i]

    The format's first version stores zero - 1. A stored zero of all ones is then refused: AutoGPTQ wraps it to 0,
    llama.cpp takes it for 2 ** bits. Where the quantisation is symmetric the zero is the middle of the range, in
    whichever version it is written: GPTQModel 5 labels files of the second version as ones of the first
    (vllm-project/vllm#38966).

    Attributes:
      weight: `qweight`, (words of I, O) int32.
      scale: `scales`, (groups of I, O).
      zero: `qzeros`, (groups of I, words of O) int32.
      bits: of a code, see `GPTQ_BITS`.
      group: how many inputs have one scale; I where all have one.
      index: `g_idx`, the group of each input, (I,).
      ordered: whether groups lie side by side (no `desc_act`); `index` must then say so too.
      first_version: whether zeros are stored minus 1.
      symmetric: whether all zeros are the middle of the range; None where a rule for some modules says otherwise, and
        all zeros of a tensor tell.
    """

    weight: Tensor
    scale: Tensor
    zero: Tensor
    bits: int
    group: int
    index: Tensor | None = None
    ordered: bool = True
    first_version: bool = True
    symmetric: bool | None = False
    decode_rate = 444e6

    @property
    def indivisible(self) -> frozenset[int]:
        return frozenset(() if self.ordered else {0})  # else any inputs need all groups

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape[0] * WORD // self.bits, self.weight.shape[1]

    @property
    def label(self) -> str:
        return label("GPTQ ", self.bits, self.group, self.shape[0], not self.symmetric)

    def reads(self, box: Box) -> tuple[BoxRead, ...]:
        inputs, outputs = box
        these = cover(inputs, self.group) if self.ordered else whole(self.scale.shape)[0]
        reads = [
            BoxRead(self.weight, (words(inputs, self.bits), outputs)),
            BoxRead(self.scale, (these, outputs)),
            BoxRead(self.zero, (these, words(outputs, self.bits))),
        ]
        reads += [BoxRead(self.index, (inputs,))] if self.index else []
        # all of them, too, to see whether they are the middle
        return (*reads, *([BoxRead(self.zero, whole(self.zero.shape))] if self.symmetric is None else []))

    def decode(self, stored: list[np.ndarray], box: Box, dtype: np.dtype, empty: Allocate = np.empty) -> np.ndarray:
        packed, scales, zeros, *others = stored
        inputs, outputs = box
        is_symmetric = self.symmetric
        if is_symmetric is None:
            is_symmetric = self._are_middle(unpack(others.pop(), (0, self.shape[1]), self.bits))
        scales, zeros = finite(scales, self.scale), self._zeros(unpack(zeros, outputs, self.bits), is_symmetric)
        which = self._which(others[0] if others else None, inputs)
        values = empty(extent(box), dtype)
        for first, rows in self._strips(packed, inputs):
            here = slice(first - inputs[0], first - inputs[0] + len(rows))
            scale_rows(rows, scales, which[here], zeros)
            values[here] = rows
        return values

    def _strips(self, packed: np.ndarray, inputs: Range) -> Iterator[tuple[int, np.ndarray]]:
        """The codes of some inputs at a time, (inputs, outputs) in float32, with the number of the first."""
        outputs, base = packed.shape[1], words(inputs, self.bits)[0]
        if self.bits not in BYTEWISE:  # codes straddle words
            strip = max(1, STRIP_ELEMENTS // max(1, outputs))
            for first in range(*inputs, strip):
                span = (first, min(first + strip, inputs[1]))
                low, high = words(span, self.bits)
                yield first, unpack(packed[low - base : high - base].T, span, self.bits).T.astype(np.float32)
            return
        per_word = WORD // self.bits
        strip = max(1, STRIP_ELEMENTS // max(1, outputs * per_word))  # of words
        buffer = np.empty((min(strip, len(packed)), per_word, outputs), np.float32)
        for word in range(0, len(packed), strip):
            part = buffer[: len(packed) - word]
            for at in range(per_word):  # one input of each word at a time: its outputs lie side by side
                part[:, at] = packed[word : word + strip] >> self.bits * at & (1 << self.bits) - 1
            first = (base + word) * per_word
            begin, end = max(first, inputs[0]), min(first + len(part) * per_word, inputs[1])
            yield begin, part.reshape(-1, outputs)[begin - first : end - first]

    def _are_middle(self, zeros: np.ndarray) -> bool:
        """Whether stored zeros are all the middle of the range, as either version has it."""
        middle = 1 << self.bits - 1
        return any((zeros == each).all() for each in (middle - 1, middle))

    def _zeros(self, stored: np.ndarray, is_symmetric: bool) -> np.ndarray:
        """Zeros as they are meant, float32."""
        middle, ones = 1 << self.bits - 1, (1 << self.bits) - 1
        if is_symmetric:
            if not self._are_middle(stored):
                raise PackedError(
                    f"{self.zero.name} has other zeros than {middle - 1} or {middle} alone, but quantization_config says that they are symmetric"
                )
            return np.full(stored.shape, middle, np.float32)
        if self.first_version and (stored == ones).any():
            raise PackedError(
                f"{self.zero.name} has a stored zero of {ones}, which means 0 to some readers of GPTQ's first version and {ones + 1} to others"
            )
        return stored.astype(np.float32) + self.first_version

    def _which(self, index: np.ndarray | None, inputs: Range) -> np.ndarray:
        """For each input its group, counted from the first that was read."""
        if not self.ordered:
            assert index is not None, "only ordered groups have no index"
            assert self.index is not None, "likewise"
            return in_range(index, self.index, self.scale.shape[0])
        which = np.arange(*inputs) // self.group
        if index is not None and self.index is not None and not np.array_equal(index, which):
            raise PackedError(
                f"{self.index.name} doesn't put the inputs into groups of {self.group} in their order, but quantization_config has no "
                "desc_act; where it was left out, set it to true there"
            )
        return which - cover(inputs, self.group)[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Awq(InOrder):
    """AWQ's `gemm`: (I, O), words along the outputs, each with 8 of them in an order of its own (`in_order`).

        value[i, o] = (code[i, o] - zero[g, o]) · scale[g, o],  g = i // group

    Attributes:
      weight: `qweight`, (I, words of O) int32.
      scale: `scales`, (groups of I, O).
      zero: `qzeros`, (groups of I, words of O) int32.
      group: how many inputs have one scale; I where all have one.
    """

    weight: Tensor
    scale: Tensor
    zero: Tensor
    group: int
    decode_rate = 404e6

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape[0], self.scale.shape[1]

    @property
    def label(self) -> str:
        return label("AWQ ", 4, self.group, self.shape[0], True)

    def reads(self, box: Box) -> tuple[BoxRead, ...]:
        inputs, outputs = box
        these, packed = cover(inputs, self.group), words(outputs, 4)
        return (
            BoxRead(self.weight, (inputs, packed)),
            BoxRead(self.scale, (these, outputs)),
            BoxRead(self.zero, (these, packed)),
        )

    def decode(self, stored: list[np.ndarray], box: Box, dtype: np.dtype, empty: Allocate = np.empty) -> np.ndarray:
        packed, scales, zeros = stored
        inputs, outputs = box
        scales, zeros = finite(scales, self.scale), unpack(in_order(zeros), outputs, 4).astype(np.float32)
        which = np.arange(*inputs) // self.group - cover(inputs, self.group)[0]
        values = empty(extent(box), dtype)
        table, skip = byte_table(np.arange(16)), outputs[0] % 8
        strip = max(1, STRIP_ELEMENTS // max(1, packed.shape[1] * 8))
        buffer = np.empty((min(strip, len(packed)), packed.shape[1] * 4, 2), np.float32)
        for row in range(0, len(packed), strip):
            here = slice(row, min(row + strip, len(packed)))
            codes = buffer[: here.stop - row]
            np.take(table, in_order(packed[here]).view(np.uint8), axis=0, mode="clip", out=codes)
            rows = codes.reshape(len(codes), -1)[:, skip : skip + values.shape[1]]
            scale_rows(rows, scales, which[here], zeros)
            values[here] = rows
        return values


def in_order(packed: np.ndarray) -> np.ndarray:
    """AWQ's words with their 8 codes in order, the first in the lowest bits: a perfect shuffle of the halves' nibbles."""
    packed = packed.view(np.uint32).copy()
    for distance, mask in ((8, 0x0000FF00), (4, 0x00F000F0)):  # exchanges two bytes, then two nibbles in each half
        different = (packed ^ packed >> distance) & mask
        packed ^= different | different << distance
    return packed


def make_qweight(parts: QuantizedTensor) -> Encoding:
    """GPTQ or AWQ: both have the same names; the shape of `qweight` says which, and `quant_method` must agree."""
    weight, scale, zero, quantization = parts.codes, parts[".scales"], parts[".qzeros"], parts.quantization
    if not len(weight.shape) == len(scale.shape) == len(zero.shape) == 2 or scale.shape[0] != zero.shape[0]:
        raise MismatchError(
            f"{weight.shape}, scales {scale.shape} and qzeros {zero.shape} should be matrices, with as many rows of scales as of zeros"
        )
    methods = {scale.shape[1]: "gptq", scale.shape[1] // 8: "awq"}
    method = methods.get(weight.shape[1])
    if method is None or method != quantization.method:
        shaped = f"has the shape of {method}" if method else "has neither the shape of gptq nor that of awq (gemm)"
        raise MismatchError(
            f"{weight.shape} with the scales {scale.name} {scale.shape} {shaped}; {quantization.place} says {quantization.method}"
        )
    made = _make_gptq(parts) if method == "gptq" else _make_awq(parts)
    return Transposed(made, (1, 0))


def _make_gptq(parts: QuantizedTensor) -> Gptq:
    weight = parts.codes
    scale = parts[".scales"]
    zero = parts[".qzeros"]
    index = parts.get(".g_idx")
    fields = parts.quantization.fields
    version = next(iter(parts.quantization.said("checkpoint_format").values()), "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise MismatchError(f"stored in GPTQ's format {version!r}; supported: gptq, gptq_v2")
    # GPTQModel's `dynamic` gives modules bits, groups and an order of their own, AutoRound's `extra_config` bits
    bits, per_module = fields.get("bits"), bool({"dynamic", "extra_config"} & fields.keys())
    if per_module:
        bits = zero.shape[1] * WORD / max(1, scale.shape[1])
        bits = int(bits) if bits.is_integer() else bits
    if not is_size(bits) or bits not in GPTQ_BITS:
        raise MismatchError(f"codes of {reprlib.repr(bits)} bits; supported: {', '.join(map(str, GPTQ_BITS))}")
    if zero.shape[1] != width(scale.shape[1], bits):
        raise MismatchError(
            f"{zero.name} should hold {width(scale.shape[1], bits)} words of {bits}-bit zeros in a row, is {zero.shape}"
        )
    inputs = weight.shape[0] * WORD // bits
    ordered = not (
        fields.get("desc_act", False) or (index and ("desc_act", True) in parts.quantization.said_of_modules)
    )
    if index and index.shape != (inputs,):
        raise MismatchError(f"{index.name} should be {(inputs,)}, is {index.shape}")
    if not ordered and not index:
        raise MismatchError(
            f"{parts.quantization.place} says desc_act, but {weight.name.removesuffix('qweight')}g_idx is missing"
        )
    exact = (
        inputs // scale.shape[0] if per_module and index and scale.shape[0] and inputs % scale.shape[0] == 0 else None
    )
    group = _group(parts, fields.get("group_size"), inputs, exact)
    symmetric = bool(fields.get("sym", False))
    ruled = None if ("sym", not symmetric) in parts.quantization.said_of_modules else symmetric
    return Gptq(weight, scale, zero, bits, group, index, ordered, version == "gptq", ruled)


def _make_awq(parts: QuantizedTensor) -> Awq:
    weight, scale, zero, fields = parts.codes, parts[".scales"], parts[".qzeros"], parts.quantization.fields
    version, bits = str(fields.get("version", "gemm")).lower(), fields.get("bits", fields.get("w_bit"))
    if version != "gemm":
        raise MismatchError(f"stored in AWQ's format {version!r}, which lays words out differently; supported: gemm")
    if bits != 4:
        raise MismatchError(f"codes of {reprlib.repr(bits)} bits; AWQ's gemm has 4")
    if zero.shape[1] != weight.shape[1]:
        raise MismatchError(f"{weight.shape} should have as many words in a row as {zero.name} {zero.shape}")
    if index := parts.get(".g_idx"):
        raise MismatchError(f"AWQ has no {index.name}")
    return Awq(
        weight, scale, zero, _group(parts, fields.get("group_size", fields.get("q_group_size")), weight.shape[0])
    )


def _group(parts: QuantizedTensor, size: object, inputs: int, exact: int | None = None) -> int:
    """Inputs that have one scale: what the config says (-1: all), or `exact` where it may say otherwise for some
    modules. A last one of several groups that has fewer inputs takes a `g_idx`: several sizes make as many groups.
    """
    scale = parts[".scales"]
    if is_size(size) or size == -1:
        group = size if is_size(size) else max(1, inputs)
        if -(-inputs // group) == scale.shape[0]:
            if scale.shape[0] > 1 and inputs % group and not parts.get(".g_idx"):
                raise MismatchError(
                    f"{scale.name} {scale.shape}: group_size {group} doesn't divide {inputs} inputs, and no g_idx says which group is smaller"
                )
            return group
    if exact is None:
        raise MismatchError(
            f"{scale.name} {scale.shape} doesn't fit {inputs} inputs with group_size {reprlib.repr(size)}"
        )
    return exact


FORMATS = (
    QuantizedFormat(
        "GPTQ of 1, 2, 3, 4 and 8 bits; AWQ (gemm)",
        ".qweight",
        INT32,
        (
            Companion(".scales", SCALES),
            Companion(".qzeros", INT32, telling=True),
            Companion(".g_idx", INT32, required=False, telling=True),
        ),
        make_qweight,
        logical=".weight",
        releases="Qwen, ModelCloud, TheBloke; casperhansen; Intel (AutoRound, packed as either)",
        methods=("gptq", "awq"),
    ),
)
