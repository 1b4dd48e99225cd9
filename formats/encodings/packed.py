"""Integers packed into 32-bit words, the first in a word's lowest bits; and compressed-tensors' `pack-quantized`, made
of them.

Words are read whole, and cut in memory. GPTQ and AWQ pack along other axes: `gptq.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np

from weightbeam.formats.encodings.encoding import ContentError, Encoding, InOrder, cover
from weightbeam.formats.encodings.format import Companion, MismatchError, QuantizedFormat, QuantizedTensor, dtypes
from weightbeam.formats.encodings.nibbles import STRIP_ELEMENTS, byte_table, decode_rows, finite
from weightbeam.formats.encodings.quantization import Quantization, is_size
from weightbeam.formats.safetensors import Allocate, BoxRead, Tensor
from weightbeam.model_mappings.boxes import Box, Range, extent, whole
from weightbeam.model_mappings.config import MAX_SIZE

WORD = 32  # bits
BYTEWISE = (1, 2, 4, 8)  # bits of codes that never straddle a byte


class PackedError(ContentError):
    """What the packed tensors hold contradicts the plan or itself."""


def positions(span: Range, bits: int, dense: bool) -> np.ndarray:
    """The first bit of each code of a row, from the row's first. Where not `dense`, no code straddles a word."""
    number = np.arange(*span)
    per_word = WORD // bits
    return number * bits if dense else number // per_word * WORD + number % per_word * bits


def words(span: Range, bits: int, dense: bool = True) -> Range:
    """The words that hold a range of codes."""
    start, stop = span
    if start == stop:
        return 0, 0
    first, last = positions((start, start + 1), bits, dense), positions((stop - 1, stop), bits, dense)
    return int(first[0]) // WORD, (int(last[0]) + bits - 1) // WORD + 1


def width(codes: int, bits: int, dense: bool = True) -> int:
    """How many words a row of `codes` takes."""
    return words((0, codes), bits, dense)[1]


def unpack(packed: np.ndarray, span: Range, bits: int, dense: bool = True) -> np.ndarray:
    """The codes of a range, from the words that `words` names: (row, word) to (row, code), uint8. Any number of bits to
    8.
    """
    at = positions(span, bits, dense) - words(span, bits, dense)[0] * WORD
    octets = np.ascontiguousarray(packed).view(np.uint8)
    low = np.take(octets, at // 8, axis=1).astype(np.uint16)
    # beyond the end only where nothing straddles
    high = np.take(octets, at // 8 + 1, axis=1, mode="clip").astype(np.uint16)
    return ((low | high << 8) >> (at % 8).astype(np.uint16) & (1 << bits) - 1).astype(np.uint8)


@dataclasses.dataclass(frozen=True, slots=True)
class PackedRows(InOrder):
    """compressed-tensors' `pack-quantized`: rows of codes of 1 to 8 bits, with an offset of half their range.

        value[o, i] = (code[o, i] - zero[o, g]) · scale[o, g],  g = i // group, or index[i]

    Zeros carry the same offset, so it cancels; without zeros it is subtracted. Leading axes are stacks of such matrices
    (vllm-project/compressed-tensors 0.20.0, compressors/pack_quantized). `weight_g_idx` comes with `actorder: group`,
    which that release no longer has; it was left out where groups lie side by side
    (vllm-project/compressed-tensors#143).

    Attributes:
      weight: `weight_packed`, (…, O, words) int32.
      scale: (…, O, groups).
      shape: of the values, (…, O, I).
      bits: of a code.
      group: how many codes of a row have one scale; I where a row has one.
      dense: whether codes straddle words; where their size divides 32 it makes no difference.
      zero: `weight_zero_point`, packed along O: (…, words, groups) int32.
      index: `weight_g_idx`, the group of each column, (I,); all -1 stands for i // group.
      shape_tensor: `weight_shape`, the shape once more.
    """

    weight: Tensor
    scale: Tensor
    shape: tuple[int, ...]
    bits: int
    group: int
    dense: bool = True
    zero: Tensor | None = None
    index: Tensor | None = None
    shape_tensor: Tensor | None = None
    decode_rate = 510e6

    @property
    def indivisible(self) -> frozenset[int]:
        return frozenset({len(self.shape) - 1} if self.index else ())

    @property
    def label(self) -> str:
        return label("", self.bits, self.group, self.shape[-1], self.zero is not None)

    def reads(self, box: Box) -> tuple[BoxRead, ...]:
        *lead, rows, columns = box
        spans = whole(self.scale.shape)[-1] if self.index else cover(columns, self.group)
        reads = [
            BoxRead(self.weight, (*lead, rows, words(columns, self.bits, self.dense))),
            BoxRead(self.scale, (*lead, rows, spans)),
        ]
        if self.zero:
            reads.append(BoxRead(self.zero, (*lead, words(rows, self.bits, self.dense), spans)))
        reads += [BoxRead(tensor, whole(tensor.shape)) for tensor in (self.index, self.shape_tensor) if tensor]
        return tuple(reads)

    def decode(self, stored: list[np.ndarray], box: Box, dtype: np.dtype, empty: Allocate = np.empty) -> np.ndarray:
        packed, scales, *rest = stored
        scales = finite(scales, self.scale)
        zeros = rest.pop(0) if self.zero else None
        index = self._index(rest.pop(0), box[-1]) if self.index else None
        if self.shape_tensor and tuple(rest[0].tolist()) != self.shape:
            held = tuple(rest[0].tolist())
            raise PackedError(
                f"{self.shape_tensor.name} says {held}, but the shapes of {self.weight.name} and its scale say {self.shape}"
            )
        if self.index and index is None:  # all groups were read, those of the box are needed
            needed = slice(*cover(box[-1], self.group))
            scales, zeros = scales[..., needed], None if zeros is None else zeros[..., needed]
        values = empty(extent(box), dtype)
        for lead in np.ndindex(values.shape[:-2]):
            zero = None if zeros is None else unpack(zeros[lead].T, box[-2], self.bits, self.dense).T.astype(np.float32)
            self._decode_matrix(
                packed[lead], scales[lead], zero, self.group if index is None else index, values[lead], box[-1]
            )
        return values

    def _index(self, index: np.ndarray, columns: Range) -> np.ndarray | None:
        """The group of each column of the box; None where groups lie side by side."""
        if (index == -1).all():
            return None
        assert self.index is not None, "it was read"
        return in_range(index, self.index, self.scale.shape[-1])[slice(*columns)]

    def _decode_matrix(
        self,
        packed: np.ndarray,
        scales: np.ndarray,
        zeros: np.ndarray | None,
        group: int | np.ndarray,
        values: np.ndarray,
        columns: Range,
    ) -> None:
        start, size = columns[0], 1 << self.bits
        meanings = np.arange(size) - (size >> 1 if zeros is None else 0)
        if self.bits in BYTEWISE:
            skip = start * self.bits // 8 - words(columns, self.bits)[0] * WORD // 8
            decode_rows(packed.view(np.uint8)[:, skip:], byte_table(meanings), scales, group, values, start, zeros)
            return
        table = byte_table(np.resize(meanings, 256))  # of codes in a byte each
        strip = max(1, STRIP_ELEMENTS // max(1, values.shape[1]))
        for row in range(0, len(values), strip):
            these = slice(row, row + strip)
            codes = unpack(packed[these], columns, self.bits, self.dense)
            decode_rows(
                codes, table, scales[these], group, values[these], start, None if zeros is None else zeros[these]
            )


def in_range(index: np.ndarray, tensor: Tensor, count: int) -> np.ndarray:
    """The index, if all groups that it names are there.

    Raises:
      PackedError: some aren't.
    """
    if index.size and not 0 <= index.min() <= index.max() < count:
        raise PackedError(f"{tensor.name} names groups from {index.min()} to {index.max()}, there are {count}")
    return index


def label(maker: str, bits: int, group: int, width: int, zeros: bool) -> str:
    """For the plan: `int4 in groups of 32`."""
    return (
        f"{maker}int{bits} "
        + (f"in groups of {group}" if group < width else "with a scale for each output")
        + (" and zeros" if zeros else "")
    )


class Scheme(NamedTuple):
    """What a config says about the weights of a group of modules.

    Attributes:
      bits: of a code.
      group: codes of a row with one scale; None where a row has one.
      symmetric: whether there are no zeros.
    """

    bits: int
    group: int | None
    symmetric: bool

    def __str__(self) -> str:
        return f"{self.bits} bits in " + (f"groups of {self.group}" if self.group else "channels")


class WordLayout(NamedTuple):
    """How packed rows can be meant: by a scheme, with so many codes in a row, and `dense` or not."""

    scheme: Scheme
    inputs: int
    dense: bool


def schemes_of(quantization: Quantization) -> list[Scheme]:
    """The schemes of integer weights in groups or channels that a config names.

    Raises:
      MismatchError: a field isn't what it should be.
    """
    schemes: list[Scheme] = []
    for modules in quantization.groups:
        weights = modules.get("weights")
        if isinstance(weights, Mapping) and weights.get("type", "int") == "int":
            bits, size, symmetric = weights.get("num_bits"), weights.get("group_size"), weights.get("symmetric", True)
            for field, value, is_right in (
                ("num_bits", bits, is_size(bits)),
                ("group_size", size, size in (None, -1) or is_size(size, least=0)),
                ("symmetric", symmetric, isinstance(symmetric, bool)),
            ):
                if not is_right:
                    raise MismatchError(f"{quantization.place} says {field} {reprlib.repr(value)}")
            strategy = weights.get("strategy") or ("channel" if size == -1 else "group" if size else None)
            if is_size(bits) and bits <= 8 and (strategy == "channel" or (strategy == "group" and is_size(size))):
                schemes.append(Scheme(bits, size if strategy == "group" else None, symmetric))
    return list(dict.fromkeys(schemes))


def layouts(
    schemes: Iterable[Scheme], packed: tuple[int, ...], scales: int, inputs: int | None, zeros: int | None
) -> Iterator[WordLayout]:
    """The layouts that fit a tensor's shapes; one group of a whole row is a channel.

    Args:
      schemes: those to choose from.
      packed: the shape of its words, (…, rows, words).
      scales: how many a row has.
      inputs: how many codes a row has, if that is known.
      zeros: how many words the zeros of a column of scales take; None if there are no zeros.
    """
    rows, words = packed[-2:]
    for scheme in schemes:
        columns = scheme.group * scales if scheme.group else inputs if scales == 1 else None
        if columns is None or columns > MAX_SIZE or inputs not in (None, columns):
            continue
        longest = max(columns, rows if zeros is not None else 0)
        alike = scheme.bits in BYTEWISE or longest <= WORD // scheme.bits  # nothing could straddle a word
        for dense in (True,) if alike else (True, False):
            if width(columns, scheme.bits, dense) == words and zeros in (None, width(rows, scheme.bits, dense)):
                yield WordLayout(scheme._replace(group=None) if scheme.group == columns else scheme, columns, dense)


def make_rows(parts: QuantizedTensor) -> Encoding:
    """`pack-quantized`."""
    packed = parts.codes
    scale = parts["_scale"]
    zero = parts.get("_zero_point")
    index = parts.get("_g_idx")
    shape_tensor = parts.get("_shape")
    shape, count = packed.shape, scale.shape[-1] if scale.shape else 0
    if len(shape) < 2 or scale.shape[:-1] != shape[:-1]:
        raise MismatchError(f"{shape} needs one or several scales for each row, {scale.name} is {scale.shape}")
    if shape_tensor and shape_tensor.shape != (len(shape),):
        raise MismatchError(f"{shape_tensor.name} should hold {len(shape)} sizes, is {shape_tensor.shape}")
    if zero and (len(zero.shape) != len(shape) or zero.shape[:-2] != shape[:-2] or zero.shape[-1] != count):
        raise MismatchError(
            f"{shape} with {count} scales in a row needs as many zeros in a row, {zero.name} is {zero.shape}"
        )
    scheme, inputs, dense = _layout_of(parts)
    if not zero and not scheme.symmetric:
        raise MismatchError(
            f"{parts.quantization.place} says that it isn't symmetric, but {parts.name}_zero_point is missing"
        )
    if index and index.shape != (inputs,):
        raise MismatchError(
            f"{inputs} inputs in an order of their own need as many groups, {index.name} is {index.shape}"
        )
    return PackedRows(
        packed, scale, (*shape[:-1], inputs), scheme.bits, scheme.group or inputs, dense, zero, index, shape_tensor
    )


def _layout_of(parts: QuantizedTensor) -> WordLayout:
    """The one layout that fits the shapes by a scheme of the config; `weight_shape` is read where that isn't one alone."""
    packed, scale, zero, shape_tensor = parts.codes, parts["_scale"], parts.get("_zero_point"), parts.get("_shape")
    schemes, count = schemes_of(parts.quantization), scale.shape[-1]
    find = functools.partial(layouts, schemes, packed.shape, count, zeros=zero.shape[-2] if zero else None)
    fits = list(dict.fromkeys(find(inputs=None)))
    if shape_tensor and (len(fits) != 1 or (count == 1 and any(scheme.group is None for scheme in schemes))):
        fits = list(dict.fromkeys(find(inputs=int(parts.read(shape_tensor).reshape(-1)[-1]))))
    if len(fits) > 1:  # a symmetric scheme has no zeros
        fits = [fit for fit in fits if fit.scheme.symmetric == (zero is None)] or fits
    if len(fits) != 1:
        ways = "can be read in several ways" if fits else "can't be read"
        told = ", ".join(map(str, schemes)) or "no integers in groups or channels"
        hint = "" if shape_tensor else f"; {parts.name}_shape, which would tell, is missing"
        zeros = f" and the zeros {zero.name} {zero.shape}" if zero else ""
        where = f"{packed.shape} with the scales {scale.name} {scale.shape}{zeros}"
        raise MismatchError(f"{where} {ways} by {parts.quantization.place}, which names {told}{hint}")
    return fits[0]


INT32, SCALES = dtypes(np.int32), dtypes(np.float32, ml_dtypes.bfloat16, np.float16)
INDEX = dtypes(np.int32, np.int64)

FORMATS = (
    QuantizedFormat(
        "int1 to int8, `weight_packed`",
        "_packed",
        INT32,
        (
            Companion("_scale", SCALES),
            Companion("_shape", INDEX, required=False),
            Companion("_zero_point", INT32, required=False),
            Companion("_g_idx", INDEX, required=False),
        ),
        make_rows,
        releases="compressed-tensors `pack-quantized`: Kimi-K2-Thinking, K2.5, K2.6; RedHatAI w4a16, w8a16",
        methods=("compressed-tensors",),
    ),
)
