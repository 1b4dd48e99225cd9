"""bitsandbytes: 4-bit codes of a table with the largest magnitude of each block, and 8-bit rows (bitsandbytes 0.50.2)."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from weightbeam.formats.encodings.encoding import Encoding, InOrder, cover
from weightbeam.formats.encodings.format import Companion, MismatchError, QuantizedFormat, QuantizedTensor, dtypes
from weightbeam.formats.encodings.nibbles import STRIP_ELEMENTS, byte_table, decode_rows, finite, runs
from weightbeam.formats.encodings.quantization import is_size
from weightbeam.formats.safetensors import Allocate, BoxRead, Tensor
from weightbeam.formats.storage.strict_json import JsonError, parse_json
from weightbeam.model_mappings.boxes import Box, Range, extent, whole

# 1 / 127, as bitsandbytes writes it (_ops.py, int8_vectorwise_dequant)
INVERSE_OF_127 = np.float32(7.874015718698502e-3)


@dataclasses.dataclass(frozen=True, slots=True)
class Nested:
    """Magnitudes that are quantised themselves: `absmax[b] = quant_map[code[b]] · nested_absmax[b // block] + offset`.

    Attributes:
      quant_map: `nested_quant_map`, the value of each of 256 codes.
      absmax: `nested_absmax`, one for each block of magnitudes, float32.
      block: magnitudes with one of them.
      offset: added at last.
    """

    quant_map: Tensor
    absmax: Tensor
    block: int
    offset: float


@dataclasses.dataclass(frozen=True, slots=True)
class BlockCodes(InOrder):
    """nf4 and fp4: two codes a byte, the first in the high nibble, in blocks that follow each other through the whole
    tensor.

        value[k] = quant_map[code[k]] · absmax[k // block],  k the number of the element in C order

    (backends/default/ops.py, `dequantize_4bit`; functional.py, `QuantState`.)

    Attributes:
      weight: the bytes, as a tensor of any dtype (`bnb_4bit_quant_storage`).
      shape: of the values.
      kind: `nf4` or `fp4`.
      quant_map: the value of each of 16 codes.
      absmax: the largest magnitude of each block: float32, or the codes of a `nested` quantisation.
      block: elements with one magnitude; even.
    """

    weight: Tensor
    shape: tuple[int, ...]
    kind: str
    quant_map: Tensor
    absmax: Tensor
    block: int
    nested: Nested | None = None
    decode_rate = 547e6

    @property
    def label(self) -> str:
        return f"{self.kind} in blocks of {self.block}" + (", magnitudes in 8 bits" if self.nested else "")

    @property
    def bytes(self) -> Tensor:
        """The weight as what it is."""
        return dataclasses.replace(self.weight, dtype=np.dtype(np.uint8), shape=(self.weight.nbytes,))

    def reads(self, box: Box) -> tuple[BoxRead, ...]:
        reads = [BoxRead(self.quant_map, whole(self.quant_map.shape))]
        if self.nested:
            reads.append(BoxRead(self.nested.quant_map, whole(self.nested.quant_map.shape)))
        for start, stop in self._runs(box):
            blocks = cover((start, stop), self.block)
            reads += [BoxRead(self.bytes, (cover((start, stop), 2),)), BoxRead(self.absmax, (blocks,))]
            if self.nested:
                reads.append(BoxRead(self.nested.absmax, (cover(blocks, self.nested.block),)))
        return tuple(reads)

    def _runs(self, box: Box) -> Iterator[Range]:
        """The ranges of elements that make a box, in C order."""
        cut = max((axis for axis, span in enumerate(box) if span != (0, self.shape[axis])), default=0)
        strides = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        length = math.prod(extent(box[cut:]))
        first = sum(start * stride for (start, _), stride in zip(box[cut:], strides[cut:], strict=True))
        for index in itertools.product(*(range(*span) for span in box[:cut])):
            at = first + sum(i * stride for i, stride in zip(index, strides, strict=False))
            yield at, at + length

    @np.errstate(over="ignore", invalid="ignore")  # magnitudes that aren't finite are refused
    def decode(self, stored: list[np.ndarray], box: Box, dtype: np.dtype, empty: Allocate = np.empty) -> np.ndarray:
        rest = iter(stored)
        table = byte_table(finite(next(rest), self.quant_map), high_first=True)
        nested_map = finite(next(rest), self.nested.quant_map) if self.nested else None
        values = empty(extent(box), dtype)
        flat, at = values.reshape(-1), 0
        for start, stop in self._runs(box):
            octets, magnitudes = next(rest), next(rest)
            if self.nested and nested_map is not None:
                first = start // self.block
                which = np.arange(first, first + len(magnitudes)) // self.nested.block - first // self.nested.block
                scales = finite(next(rest), self.nested.absmax)[which]
                magnitudes = nested_map[magnitudes] * scales + np.float32(self.nested.offset)
            self._decode_run(
                octets, table, finite(magnitudes, self.absmax), (start, stop), flat[at : at + stop - start]
            )
            at += stop - start
        return values

    def _decode_run(
        self, octets: np.ndarray, table: np.ndarray, magnitudes: np.ndarray, run: Range, values: np.ndarray
    ) -> None:
        """Neighbouring elements: whole blocks as rows, what is cut off from a block at either end by itself."""
        start, stop = run
        for part, blocks in runs(start, stop, self.block):
            first, last, rows = start + part.start, start + part.stop, blocks.stop - blocks.start
            packed = octets[first // 2 - start // 2 : -(-last // 2) - start // 2].reshape(rows, -1)
            scales = magnitudes[blocks, np.newaxis]
            decode_rows(packed, table, scales, self.block, values[part].reshape(rows, -1), first)


@dataclasses.dataclass(frozen=True, slots=True)
class ScaledRows8(InOrder):
    """LLM.int8(): `value[o, i] = code[o, i] · absmax[o] / 127`, multiplied in this order with 1/127 in float32.

    Attributes:
      weight: int8.
      absmax: `SCB`, float32, one for each row.
    """

    weight: Tensor
    absmax: Tensor
    decode_rate = 1664e6

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def label(self) -> str:
        return "int8 with a scale for each output"

    def reads(self, box: Box) -> tuple[BoxRead, ...]:
        return BoxRead(self.weight, box), BoxRead(self.absmax, box[:1])

    @np.errstate(over="ignore")  # a value beyond the largest float is infinite
    def decode(self, stored: list[np.ndarray], box: Box, dtype: np.dtype, empty: Allocate = np.empty) -> np.ndarray:
        codes, magnitudes = stored[0], finite(stored[1], self.absmax)[:, np.newaxis]
        values = empty(codes.shape, dtype)
        strip = max(1, STRIP_ELEMENTS // max(1, codes.shape[1]))
        for row in range(0, len(codes), strip):
            here = slice(row, row + strip)
            part = codes[here].astype(np.float32)
            part *= magnitudes[here]
            part *= INVERSE_OF_127
            values[here] = part
        return values


STATE = "quant_state.bitsandbytes__"  # followed by the kind


def make_blocks(parts: QuantizedTensor) -> Encoding:
    """nf4 or fp4. Its shape and its blocks stand as JSON in a tensor, which is read."""
    weight, absmax, quant_map = parts.codes, parts[".absmax"], parts[".quant_map"]
    tensor = next(tensor for suffix, tensor in parts.companions.items() if suffix.startswith("." + STATE))
    kind = tensor.name.rpartition("__")[2]
    raw = parts.read(tensor).tobytes()
    try:
        state = parse_json(raw)
        shape, block = tuple(state["shape"]), state["blocksize"]
        offset, nested_block = state.get("nested_offset"), state.get("nested_blocksize")
    except (JsonError, KeyError, TypeError, AttributeError) as e:
        raise MismatchError(f"{tensor.name} isn't JSON with a shape and a blocksize: {e!r}") from e
    if (
        not all(is_size(n, least=0) for n in shape)
        or not is_size(block)
        or block % 2
        or state.get("quant_type") != kind
    ):
        raise MismatchError(f"{tensor.name} says {state}; expected quant_type {kind}, a shape, and an even blocksize")
    elements = math.prod(shape)
    octets, size = -(-elements // 2), weight.dtype.itemsize
    if weight.nbytes != -(-octets // size) * size or (
        len(weight.shape) == 2 and weight.shape[0] == 1 and weight.shape[1] > 1
    ):
        raise MismatchError(
            f"should be a column of {octets:,} bytes for {shape}, is {weight.shape} of {weight.dtype.name}"
        )
    blocks = -(-elements // block)
    if absmax.shape != (blocks,) or quant_map.shape != (16,):
        raise MismatchError(
            f"{shape} in blocks of {block} needs {blocks} magnitudes and 16 meanings; found {absmax.shape} and {quant_map.shape}"
        )
    return BlockCodes(weight, shape, kind, quant_map, absmax, block, _nested(parts, blocks, nested_block, offset))


def _nested(parts: QuantizedTensor, blocks: int, block: object, offset: object) -> Nested | None:
    """How the magnitudes are quantised themselves, if they are."""
    codes, absmax, quant_map = parts[".absmax"], parts.get(".nested_absmax"), parts.get(".nested_quant_map")
    if codes.dtype == np.float32 and absmax is None and quant_map is None:
        return None
    if (
        codes.dtype != np.uint8
        or absmax is None
        or quant_map is None
        or not is_size(block)
        or not isinstance(offset, float)
    ):
        raise MismatchError(
            f"{codes.name} is {codes.dtype.name}; in 8 bits it needs nested_absmax, nested_quant_map, nested_blocksize and nested_offset"
        )
    if absmax.shape != (-(-blocks // block),) or quant_map.shape != (256,):
        raise MismatchError(
            f"{blocks} magnitudes in blocks of {block} need {-(-blocks // block)} of their own and 256 meanings; found {absmax.shape} and {quant_map.shape}"
        )
    if not abs(offset) <= float(np.finfo(np.float32).max):  # nor NaN
        raise MismatchError(f"nested_offset {offset} isn't a number of float32")
    return Nested(quant_map, absmax, block, offset)


def make_rows8(parts: QuantizedTensor) -> Encoding:
    """LLM.int8(), row by row; layouts for old GPUs are refused."""
    weight, absmax, layout = parts.codes, parts[".SCB"], parts.get(".weight_format")
    if len(weight.shape) != 2 or absmax.shape != weight.shape[:1]:
        raise MismatchError(
            f"{weight.shape} should be a matrix with a magnitude for each row, {absmax.name} is {absmax.shape}"
        )
    if layout is not None and (number := int(parts.read(layout).reshape(-1)[0])) != 0:
        names = {1: "col32", 2: "col_turing", 3: "col_ampere"}
        raise MismatchError(f"laid out as {names.get(number, number)}; supported: row")
    return ScaledRows8(weight, absmax)


def _four_bits(kind: str, releases: str) -> QuantizedFormat:
    f32, u8 = dtypes(np.float32), dtypes(np.uint8)
    return QuantizedFormat(
        name=f"bitsandbytes {kind}",
        suffix="",
        dtypes=dtypes(np.uint8, np.int8, np.float16, ml_dtypes.bfloat16, np.float32, np.float64),
        companions=(
            Companion(".absmax", f32 | u8, telling=True),
            Companion(".quant_map", f32, telling=True),
            Companion(f".{STATE}{kind}", u8, telling=True),
            Companion(".nested_absmax", f32, required=False, telling=True),
            Companion(".nested_quant_map", f32, required=False, telling=True),
        ),
        make=make_blocks,
        releases=releases,
        methods=("bitsandbytes",),
    )


FORMATS = (
    _four_bits("nf4", "unsloth's `…-bnb-4bit`"),
    _four_bits("fp4", "transformers, its default of `load_in_4bit`"),
    QuantizedFormat(
        name="bitsandbytes int8",
        suffix=".weight",
        dtypes=dtypes(np.int8),
        companions=(
            Companion(".SCB", dtypes(np.float32), telling=True),
            Companion(".weight_format", dtypes(np.uint8), required=False, telling=True),
        ),
        make=make_rows8,
        logical=".weight",
        releases="transformers' `load_in_8bit`",
        methods=("bitsandbytes",),
    ),
)
