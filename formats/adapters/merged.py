"""Weights with an adapter in them, as encodings: the tables, the units and the stages know nothing of it.

A box of a merged weight needs what its base needs, and for each delta the box's rows of B and columns of A. All is
summed in float32 and cast once. PEFT rounds a delta to the adapter's dtype first; a float32 one has the same bits here,
but for the order in which a product is summed (peft, tuners/lora/layer.py, `get_delta_weight`, 0.21.2).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from weightbeam.formats.adapters.delta import Delta, DeltaShare
from weightbeam.formats.encodings import ContentError, Encoding, Plain
from weightbeam.formats.encodings.encoding import InOrder, Overhead
from weightbeam.formats.safetensors import Allocate, BoxRead, Tensor
from weightbeam.model_mappings.boxes import Box, extent, inside, slices

MERGE_RATE = 1e9  # stored bytes a second of one core that get an adapter of rank 16, measured
STRIP_ELEMENTS = 1 << 16  # merged at a time: in float32 a part of a core's cache
FLOAT32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True, slots=True)
class MergedWeight:
    """`W + Σ scaling · B · A`; with a magnitude DoRA's `m / ‖W + ΔW‖ · (W + ΔW)`, the norm over the inputs of each
    output.

    Attributes:
      base: W, of two axes, or of three where the first counts experts.
      deltas: at least one; with a magnitude exactly one, which covers all of W.
      magnitude: DoRA's m, one for each output.
    """

    base: Encoding
    deltas: tuple[Delta, ...]
    magnitude: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def label(self) -> str:
        ranks = ", ".join(str(rank) for rank in sorted({delta.rank for delta in self.deltas}))
        kind = f"{'DoRA' if self.magnitude else 'LoRA'} of rank {ranks} merged"
        return f"{self.base.label}, {kind}" if self.base.label else kind

    @property
    def decode_rate(self) -> float:
        return _with_merging(self.base)

    @property
    def order(self) -> tuple[int, ...]:
        return self.base.order

    @property
    def indivisible(self) -> frozenset[int]:
        return self.base.indivisible | ({self._inputs} if self.magnitude else frozenset())

    @property
    def overhead(self) -> Overhead:
        base, shared, factors = self.base.overhead, 0, 0
        matrix, decoding = Counter[int](), Counter[int]()  # by the index on the first of three axes
        for delta in self.deltas:
            one = delta.overhead
            shared += one.tensor
            for index in range(delta.place, delta.place + delta.experts) if len(self.shape) == 3 else (0,):
                matrix[index] += one.matrix
                decoding[index] += one.decoding
            factors += one.whole
        own = max(matrix.values())
        shared, own = (shared, own) if len(self.shape) == 3 else (shared + own, 0)
        most = max(decoding.values())
        return Overhead(base.tensor + shared, base.matrix + own, base.decoding + most, base.whole + factors)

    @property
    def _inputs(self) -> int:
        """The axis over which DoRA's norm goes."""
        return 0 if self.deltas[0].transposed else 1

    def _widened(self, box: Box) -> Box:
        """The box, with all inputs of its outputs where a norm needs them."""
        if not self.magnitude:
            return box
        return tuple(
            (0, size) if axis == self._inputs else span
            for axis, (span, size) in enumerate(zip(box, self.shape, strict=True))
        )

    def _shares(self, box: Box) -> list[tuple[Delta, DeltaShare]]:
        return [(delta, share) for delta in self.deltas if (share := delta.share(box))]

    def reads(self, box: Box) -> tuple[BoxRead, ...]:
        wide = self._widened(box)
        reads = [*self.base.reads(wide), *(read for delta, share in self._shares(wide) for read in delta.reads(share))]
        if self.magnitude:
            reads.append(BoxRead(self.magnitude, (box[1 - self._inputs],)))
        return tuple(reads)

    @np.errstate(over="ignore", invalid="ignore")  # what isn't finite is refused
    def decode(self, stored: list[np.ndarray], box: Box, dtype: np.dtype, empty: Allocate = np.empty) -> np.ndarray:
        wide = self._widened(box)
        number = len(self.base.reads(wide))
        base, rest = stored[:number], stored[number:]
        added = [(delta, share, rest[2 * at : 2 * at + 2]) for at, (delta, share) in enumerate(self._shares(wide))]
        values = empty(extent(box), dtype)
        factors = None
        if self.magnitude:
            norms = _norms(self._strips(base, wide, added), extent(wide), self._inputs)
            factors = np.expand_dims(rest[-1].astype(FLOAT32) / norms, self._inputs)
        kept = slices(inside(box, wide))
        target = values if extent(box) == extent(wide) else None
        for expert, row, strip in self._strips(base, wide, added):
            if factors is not None:
                strip *= factors[row : row + len(strip)] if self._inputs else factors
            if not is_finite(strip):
                raise ContentError(
                    f"{self.weight.name}: isn't finite once the adapter is merged; its factors ({self.deltas[0].a.name}) or its alpha can't be right"
                )
            if target is not None:
                (target[expert] if target.ndim == 3 else target)[row : row + len(strip)] = strip
            else:
                first, last = max(kept[0].start, row), min(kept[0].stop, row + len(strip))
                if first < last:
                    values[first - kept[0].start : last - kept[0].start] = strip[first - row : last - row, kept[1]]
        return values

    def _strips(
        self, stored: Sequence[np.ndarray], box: Box, added: Sequence[tuple[Delta, DeltaShare, list[np.ndarray]]]
    ) -> Iterator[tuple[int, int, np.ndarray]]:
        """`(expert, row, W + ΔW)` of neighbouring rows of a box in float32; each array holds until the next is asked
        for.
        """
        part = _Parts(self.base, stored, box)
        *lead, rows, columns = extent(box)
        height = max(1, STRIP_ELEMENTS // max(1, columns))
        buffer = np.empty((min(rows, height), columns), FLOAT32)
        for expert in range(lead[0] if lead else 1):
            products = [product for delta, share, read in added if (product := delta.product(share, read, expert))]
            for row in range(0, rows, height):
                strip = buffer[: min(height, rows - row)]
                strip[...] = part.rows(expert, row, row + len(strip))
                for product in products:
                    product.add_to(strip, row)
                yield expert, row, strip
            products.clear()
            product = None  # gone before those of the next expert are made


class _Parts:
    """The values of a base, some rows at a time, so that a quantised one is never in memory as a whole in float32."""

    def __init__(self, base: Encoding, stored: Sequence[np.ndarray], box: Box):
        self.base, self.stored, self.box = base, list(stored), box
        self.values = base.decode(self.stored, box, FLOAT32) if base.label is None or not self._cut(0, 0, 1) else None

    def rows(self, expert: int, start: int, stop: int) -> np.ndarray:
        """Rows of the box, of any dtype."""
        if self.values is not None:
            return (self.values[expert] if self.values.ndim == 3 else self.values)[start:stop]
        inner, cut = self._box(expert, start, stop), self._cut(expert, start, stop)
        values = self.base.decode(cut, inner, FLOAT32)
        return values[0] if values.ndim == 3 else values

    def _box(self, expert: int, start: int, stop: int) -> Box:
        *lead, (first, _), columns = self.box
        return (*((at + expert, at + expert + 1) for at, _ in lead), (first + start, first + stop), columns)

    def _cut(self, expert: int, start: int, stop: int) -> list[np.ndarray]:
        """What these rows need of what was read for the box; nothing where their boxes aren't parts of the box's."""
        outer, inner = self.base.reads(self.box), self.base.reads(self._box(expert, start, stop))
        if [read.tensor for read in outer] != [read.tensor for read in inner]:
            return []
        cut = []
        for array, whole_, part in zip(self.stored, outer, inner, strict=True):
            spans = tuple(
                slice(start - first, stop - first)
                for (start, stop), (first, _) in zip(part.box, whole_.box, strict=True)
            )
            if any(span.start < 0 or span.stop > size for span, size in zip(spans, array.shape, strict=True)):
                return []
            cut.append(array[spans])
        return cut


def is_finite(values: np.ndarray) -> bool:
    """Whether all values of an array in C order are finite. Their squares are summed first, which is fast, and looked
    at one by one if that isn't.
    """
    flat = values.reshape(-1)
    return bool(np.isfinite(np.dot(flat, flat)) or np.isfinite(flat).all())


def _norms(strips: Iterator[tuple[int, int, np.ndarray]], shape: tuple[int, ...], axis: int) -> np.ndarray:
    """The norm of each row (`axis` 1) or column (0) of what comes in strips of rows."""
    squares = np.zeros(shape[1 - axis], FLOAT32)
    for _, row, strip in strips:
        if axis:
            squares[row : row + len(strip)] = np.square(strip).sum(1)
        else:
            for line in strip:
                squares += np.square(line)
    return np.sqrt(squares)


def _with_merging(base: Encoding) -> float:
    """Stored bytes a second of one core that decodes, then merges."""
    return 1 / (1 / MERGE_RATE + 1 / base.decode_rate)


@dataclasses.dataclass(frozen=True, slots=True)
class Shifted(InOrder):
    """A bias with what adapters with `lora_bias` add to it: `bias + Σ scaling · lora_B.bias`."""

    base: Encoding
    added: tuple[tuple[Tensor, float], ...]

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def label(self) -> str:
        return "a LoRA's bias added"

    @property
    def decode_rate(self) -> float:
        return _with_merging(self.base)

    def reads(self, box: Box) -> tuple[BoxRead, ...]:
        return (*self.base.reads(box), *(BoxRead(tensor, box) for tensor, _ in self.added))

    def decode(self, stored: list[np.ndarray], box: Box, dtype: np.dtype, empty: Allocate = np.empty) -> np.ndarray:
        number = len(self.base.reads(box))
        total = self.base.decode(stored[:number], box, FLOAT32).astype(FLOAT32)
        for (_, scaling), array in zip(self.added, stored[number:], strict=True):
            total += np.float32(scaling) * array.astype(FLOAT32)
        values = empty(extent(box), dtype)
        values[...] = total
        return values


@dataclasses.dataclass(frozen=True, slots=True)
class Replaced(Plain):
    """A tensor that was trained as a whole (`modules_to_save`, a bias, an embedding), in place of the base's."""

    label = "trained as a whole, from the adapter"
    decode_rate = MERGE_RATE

    def decode(self, stored: list[np.ndarray], box: Box, dtype: np.dtype, empty: Allocate = np.empty) -> np.ndarray:
        values = empty(extent(box), dtype)
        values[...] = stored[0]
        return values


class OwnBase(Replaced):
    """The copy of a targeted embedding that PEFT saved with the adapter, and loads in place of the base's before it adds
    the delta (peft, utils/save_and_load.py, `save_embedding_layers`, 0.21.2).
    """

    label = "the adapter's own copy"
