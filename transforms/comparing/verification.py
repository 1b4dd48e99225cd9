"""Verification: every element of the checkpoint against the tensors, by the inverse of the tables and in plain numpy.

Nothing of the way in takes part: no unit, no piece, no view, no chunk grid. What one tensor gives to an array is read
back, its axes are split, turned around and merged as the rule's axes say, and what results is compared in the tensor's
layout. Only the headers, the tables themselves and the decoding of quantised tensors are shared with the conversion;
that the tables are right is shown by verifying checkpoints that MaxText's own converter wrote.

An export is judged by the same layouts the other way: the array's elements with the operations undone, cast once, are
what the tensor should hold.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import tensorstore as ts

from weightbeam.formats.encodings import Encoding, Scaled
from weightbeam.formats.encodings.quantizing import BLOCK
from weightbeam.formats.orbax.reading import grains
from weightbeam.formats.safetensors import read_boxes
from weightbeam.model_mappings.boxes import Box, Range
from weightbeam.model_mappings.cells import Cell, Part
from weightbeam.model_mappings.plan import Array, bits_of, holds, is_float
from weightbeam.model_mappings.rules import ABSENT

if TYPE_CHECKING:  # whose plan is handed in
    from weightbeam.transforms.planning.conversion import Conversion

SLAB_ELEMENTS = 1 << 22  # compared at a time
CHUNK_BYTES = 32 << 20  # of the chunks that are decoded for them, where chunks aren't larger
TILE = 256  # rows and columns of a matrix that are turned around at a time
TASK_BYTES = 256 << 20  # of an array, compared in one go


@dataclasses.dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first element that isn't what it should be.

    Attributes:
      tensor: the tensor it comes from; None for padding and constants.
      index: in the tensor, or in the array where there is no tensor.
      expected, found: the values.
    """

    tensor: str | None
    index: tuple[int, ...]
    expected: float
    found: float

    def __str__(self) -> str:
        where = f"{self.tensor}{list(self.index)}" if self.tensor else f"the padding at {list(self.index)}"
        return f"{where} should be {self.expected:.9g}, but is {self.found:.9g}"


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayResult:
    """What the comparison of one array, or a part of it, found.

    Attributes:
      key: of the array.
      compared, different: numbers of elements.
      rounded: whether the values that should be there are rounded (`docs/explanation/numerics.md`), and not the tensor's own.
      first: the first difference.
      not_finite: numbers of elements of the tensors that are NaN or infinite, and the first such tensor.
      zero: tensors of two and more axes that are zero throughout, which a release hardly means.
      largest: the largest difference of two elements, both of which are finite.
      error: of tensors that an export quantised, the largest norm of what that changed, as a share of the values' own norm.
    """

    key: str
    compared: int = 0
    different: int = 0
    rounded: bool = False
    first: FirstDifference | None = None
    not_finite: tuple[int, str] = (0, "")
    zero: tuple[str, ...] = ()
    largest: float = 0.0
    error: float = 0.0

    def __add__(self, other: ArrayResult) -> ArrayResult:
        return ArrayResult(
            self.key,
            self.compared + other.compared,
            self.different + other.different,
            self.rounded or other.rounded,
            self.first or other.first,
            (self.not_finite[0] + other.not_finite[0], self.not_finite[1] or other.not_finite[1]),
            self.zero + other.zero,
            max(self.largest, other.largest),
            max(self.error, other.error),
        )


def cells(array: Array) -> Iterator[Cell]:
    """Every cell of an array that has a tensor, in the order of the table."""
    return (cell for part in array.parts if part.rule.source is not None for cell in part.cells())


@dataclasses.dataclass(frozen=True, slots=True)
class CellLayout:
    """How a tensor (left) and an array (right) lie, for one cell.

    Attributes:
      left, right: the factors of each axis; a stacked axis of the array has a word of its own.
      sizes: of the tensor's factors.
      places: where each factor's part begins in the array, and how long the factor is there.
      fixed: the array's factors of which the cell has one index.
    """

    left: tuple[tuple[str, ...], ...]
    right: tuple[tuple[str, ...], ...]
    sizes: Mapping[str, int]
    places: Mapping[str, tuple[int, int]]
    fixed: Mapping[str, int]

    @classmethod
    def of(cls, cell: Cell, scan_axis: int) -> CellLayout:
        rule, part = cell.part.rule, cell.part
        left = rule.axes.left[len(rule.name_axes) :]
        sizes = dict(zip(itertools.chain(*left), itertools.chain(*part.source_factors), strict=True))
        places = {
            factor: (rule.segments[factor].start, rule.segments[factor].total) if factor in rule.segments else (0, n)
            for factor, n in sizes.items()
        }
        stacked = [f"#{i}" for i in range(part.layers.ndim)]  # words that no table uses
        right = list(rule.axes.right)
        at = _stacked_at(part.path, scan_axis, len(right))
        right[at:at] = [(word,) for word in stacked]
        fixed = dict(zip((*rule.name_axes, *stacked), (*cell.name, *cell.layer), strict=True))
        return cls(left, tuple(right), sizes, places, fixed)

    def slabs(
        self, chunk: Sequence[int], itemsize: int, indivisible: Collection[int], blocks: Sequence[int]
    ) -> Iterator[dict[str, Range]]:
        """Ranges of the tensor's factors that together are all of it, each of about `SLAB_ELEMENTS`. They are cut along the
        tensor's rows first, but between the array's chunks, which are decoded whole, be it for one layer of many.

            array (embed 8, layers 4, mlp 6) in chunks (2, 4, 6)       the tensor (mlp 6, embed 8) of one layer

             embed 0 1 │ 2 3 │ 4 5 │ 6 7                               two columns lie in one chunk,
                   ────┴─────┴─────┴────                               two rows in all four

        Args:
          chunk: the extents of the array's chunks.
          itemsize: of its elements, in bytes.
          indivisible: axes of the tensor that are cut last.
          blocks: extents of the tensor's blocks, which aren't cut where that can be.
        """
        steps, cuts = dict(self.sizes), self._cuts(chunk, indivisible, blocks)
        larger = max(4 * SLAB_ELEMENTS, math.prod(chunk) // 8)  # so that no chunk is decoded often, how large it may be
        for most, nbytes, is_whole in ((SLAB_ELEMENTS, CHUNK_BYTES, True), (larger, math.inf, False)):
            for factor, (filling, blockwise) in cuts.items():
                grain = filling if is_whole else blockwise
                over = max(math.prod(steps.values()) / most, self._decoded(steps, chunk) * itemsize / nbytes)
                if over > 1:
                    fits = int(steps[factor] / over) // grain * grain
                    steps[factor] = min(steps[factor], max(fits, grain))
        ranges = [
            [(start, min(start + steps[factor], size)) for start in range(0, size, max(1, steps[factor]))]
            for factor, size in self.sizes.items()
        ]
        for each in itertools.product(*ranges):
            yield dict(zip(self.sizes, each, strict=True))

    def _cuts(
        self, chunk: Sequence[int], indivisible: Collection[int], blocks: Sequence[int]
    ) -> dict[str, tuple[int, int]]:
        """The factors that may be cut, since their indices are one range of the tensor and of the array, in the order in
        which they are; each with how many of its indices fill chunks, and blocks, and with how many fill blocks.
        """
        places = {axis[0]: (axis[1:], size) for axis, size in zip(self.right, chunk, strict=True) if axis}
        found = {}
        for number in sorted(range(len(self.left)), key=lambda number: number in indivisible):
            factor = next(iter(self.left[number]), None)
            if factor is not None and factor in places:
                others, size = places[factor]
                inner = math.prod(self.places[other][1] for other in others)
                most, filling = self.sizes[factor], size // math.gcd(size, inner)
                within = math.prod(self.sizes[other] for other in self.left[number][1:])
                blockwise = blocks[number] // math.gcd(blocks[number], within) if blocks else 1
                both = math.lcm(filling, blockwise)
                found[factor] = (max(1, min(both if both <= most else filling, most)), max(1, min(blockwise, most)))
        return found

    def _decoded(self, steps: Mapping[str, int], chunk: Sequence[int]) -> int:
        """Elements of the chunks in which a slab of so many indices lies."""
        covered = 1
        for axis, size in zip(self.right, chunk, strict=True):
            held = 1
            if axis and axis[0] not in self.fixed:
                held = steps[axis[0]] * math.prod(self.places[factor][1] for factor in axis[1:])
            covered *= -(-held // max(1, size)) * size
        return covered

    def box(self, part: Part, slab: Mapping[str, Range]) -> Box:
        """The tensor's box that holds a slab; of it the part's window takes every step-th index."""
        box = []
        for axis, start, step in zip(self.left, part.starts, part.steps, strict=True):
            inner = math.prod(self.sizes[factor] for factor in axis[1:])
            low, high = slab[axis[0]] if axis else (0, 1)
            box.append((start + low * inner * step, start + (high * inner - 1) * step + 1))
        return tuple(box)

    def read(self, store: ts.TensorStore, slab: Mapping[str, Range]) -> np.ndarray:
        """The array's elements of a slab, turned into the tensor's layout; axes are still split into factors."""
        region: list[slice] = []
        split: list[int] = []
        picks: list[int | slice] = []
        order: list[str] = []
        for axis in self.right:
            if axis[:1] and axis[0] in self.fixed:
                region.append(slice(self.fixed[axis[0]], self.fixed[axis[0]] + 1))
                split.append(1)
                picks.append(0)
                continue
            inner = math.prod(self.places[factor][1] for factor in axis[1:])
            low, high = slab[axis[0]] if axis else (0, 1)
            start = self.places[axis[0]][0] if axis else 0
            region.append(slice((start + low) * inner, (start + high) * inner))
            for i, factor in enumerate(axis):
                start, total = self.places[factor]
                low, high = slab[factor]
                split.append(total if i else high - low)
                picks.append(slice(start + low, start + high) if i else slice(None))
                order.append(factor)
        found = np.asarray(store[tuple(region)].read().result()).reshape(split)[tuple(picks)]
        return found.transpose([order.index(factor) for axis in self.left for factor in axis])


def compare(
    array: Array, cell: Cell, store: ts.TensorStore, encoding: Encoding, scan_axis: int, exported: bool = False
) -> ArrayResult:
    """Compares a cell of an array with its tensor, slab by slab; the tensor is what should be right where it was
    `exported`.
    """
    layouts, steps = CellLayout.of(cell, scan_axis), tuple(slice(None, None, step) for step in cell.part.steps)
    finding = ArrayResult(array.key)
    tensor, odd, is_zero = str(cell.tensor), 0, len(encoding.shape) > 1
    changed, norm = 0.0, 0.0  # squares
    chunk, itemsize = grains(store)[0], np.dtype(store.dtype.numpy_dtype).itemsize
    blocks = encoding.block if exported and isinstance(encoding, Scaled) else ()
    if blocks[-2:] != BLOCK:  # not an export's, and may be as large as the tensor
        blocks = ()
    for slab in layouts.slabs(chunk, itemsize, encoding.indivisible, blocks):
        box = layouts.box(cell.part, slab)
        stored, _ = read_boxes(encoding.reads(box))
        values = encoding.decode(stored, box, np.dtype(np.float32))[steps]
        found = layouts.read(store, slab).reshape(values.shape)
        if exported:
            expected, rounded = _exported(found, cell.part, encoding)
            if isinstance(encoding, Scaled):
                indices = [range(*span, step) for span, step in zip(box, cell.part.steps, strict=True)]
                wrong = _is_no_code(expected, values, encoding, indices, stored[1])
            else:
                wrong = differs(expected, values, expected is found)
            if encoding.label is not None:
                wide = expected.astype(np.float64)
                changed, norm = changed + float(np.sum((wide - values) ** 2)), norm + float(np.sum(wide**2))
            found = values
        else:
            expected, rounded = _expected(values, cell.part, encoding, found.dtype)
            wrong = differs(expected, found)
        count, index = count_wrong(wrong)
        first = None
        if index is not None:
            place = tuple(low + i * step for (low, _), i, step in zip(box, index, cell.part.steps, strict=True))
            first = FirstDifference(cell.tensor, place, expected[index].item(), found[index].item())
        largest = _largest(expected, found) if count else 0.0
        finding += ArrayResult(array.key, found.size, count, rounded, first, largest=largest)
        if is_float(values.dtype):
            wide = values.astype(np.float32, copy=False)
            odd += wide.size - int(np.count_nonzero(np.isfinite(wide)))
        is_zero = is_zero and not values.any()
    return finding + ArrayResult(
        array.key,
        not_finite=(odd, tensor if odd else ""),
        zero=(tensor,) if is_zero else (),
        error=math.sqrt(changed / norm) if norm else 0.0,
    )


def _exported(stored: np.ndarray, part: Part, encoding: Encoding) -> tuple[np.ndarray, bool]:
    """What the tensor of an export should hold, and whether that is rounded: the operations undone in float32, one
    cast; of codes what was quantised.
    """
    dtype = encoding.weight.dtype
    if part.rule.integer or (not part.rule.ops and encoding.label is None and stored.dtype == dtype):
        return stored, False
    values = stored.astype(np.float32)
    for op in reversed(part.rule.ops):
        values = op.inverse.apply(values)
    rounded = (
        encoding.label is not None or any(not op.is_exact for op in part.rule.ops) or not holds(dtype, stored.dtype)
    )
    return values if encoding.label is not None else values.astype(dtype), rounded


def _is_no_code(
    expected: np.ndarray, found: np.ndarray, encoding: Scaled, box: Sequence[range], scales: np.ndarray
) -> np.ndarray:
    """Where values of float8_e4m3fn codes aren't those nearest to what was quantised: off by more than half a step of
    three bits, and by more than half the smallest step, which is 2⁻⁹ of a block's scale. What is NaN or infinite has no
    code.

    A scale can't be believed where a whole block is here: it is at most four times what its largest magnitude needs (a
    release's own scale, which an export keeps, may be a power of two, or that of values since changed a little).

    Args:
      expected, found: of a box of the tensor.
      encoding: of the tensor.
      box: its indices on each axis.
      scales: those of the blocks that the box touches.
    """
    wide = expected.astype(np.float64)
    apart, wide = np.abs(wide - found), np.abs(wide)
    wrong = ~((apart <= wide * (2**-4 * 1.001)) & np.isfinite(wide))
    if not (at := np.nonzero(wrong))[0].size:
        return wrong
    which = [np.asarray(indices) // size for indices, size in zip(box, encoding.block, strict=True)]
    largest, counts = np.where(np.isfinite(wide), wide, 0), []
    for axis, (numbers, size, length) in enumerate(zip(which, encoding.block, encoding.shape, strict=True)):
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        largest = np.maximum.reduceat(largest, starts, axis=axis)
        counts.append(np.diff(starts, append=len(numbers)) == np.minimum(size, length - numbers[starts] * size))
    is_whole = functools.reduce(np.logical_and.outer, counts)
    scales = np.where(is_whole, np.minimum(scales, np.maximum(4 * largest, 1e-4) / 448), scales)
    smallest = scales[tuple(numbers[i] - numbers[0] for numbers, i in zip(which, at, strict=True))]
    wrong[at] = ~((apart[at] <= smallest * (2**-10 * 1.001)) & np.isfinite(wide[at]))
    return wrong


def _largest(expected: np.ndarray, found: np.ndarray) -> float:
    """The largest difference of two elements that are both finite."""
    apart = np.abs(expected.astype(np.float64) - found.astype(np.float64))
    return float(np.max(apart, where=np.isfinite(apart), initial=0.0))


def count_wrong(wrong: np.ndarray) -> tuple[int, tuple[int, ...] | None]:
    """How many elements differ, and the index of the first."""
    count = int(np.count_nonzero(wrong))
    return count, tuple(int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape)) if count else None


def _expected(values: np.ndarray, part: Part, encoding: Encoding, stored: np.dtype) -> tuple[np.ndarray, bool]:
    """What should be stored, and whether that is rounded: float32, the operations, one cast to a dtype that is meant
    for weights.
    """
    if part.rule.integer:
        return values, False
    rounded = (
        encoding.label is not None or any(not op.is_exact for op in part.rule.ops) or not holds(stored, values.dtype)
    )
    values = values.astype(np.float32)
    for op in part.rule.ops:
        values = op.apply(values)
    if stored.name not in ("bfloat16", "float32"):  # nothing says that such a rounding is meant
        return values, False
    return values.astype(stored), rounded


def differs(expected: np.ndarray, found: np.ndarray, payloads: bool = False) -> np.ndarray:
    """Where two arrays differ: bit by bit where their dtypes are the same, but for NaN unless `payloads`; else by value."""
    if expected.dtype != found.dtype:
        expected, found = expected.astype(np.float64), found.astype(np.float64)
        return ~((expected == found) | (np.isnan(expected) & np.isnan(found)))
    bits = bits_of(expected.dtype)
    wrong = _in_order(expected.view(bits)) != _in_order(found.view(bits))
    if is_float(expected.dtype) and not payloads and wrong.any():
        wrong &= ~(np.isnan(expected) & np.isnan(found))
    return wrong


def _in_order(values: np.ndarray) -> np.ndarray:
    """The same values in C order. A matrix that lies the other way around is copied tile by tile, which stay in a core's
    cache: three times as fast.
    """
    if values.ndim != 2 or values.flags.c_contiguous:
        return np.ascontiguousarray(values)
    made = np.empty(values.shape, values.dtype)
    for row, column in itertools.product(*(range(0, size, TILE) for size in values.shape)):
        tile = slice(row, row + TILE), slice(column, column + TILE)
        made[tile] = values[tile]
    return made


def _stacked_at(path: str, scan_axis: int, rank: int) -> int:
    """Where the layers of an array are stacked that has `rank` axes without them: parameters where the user says, the
    variables of other collections on the first.
    """
    return min(scan_axis, rank) if path.startswith("params/") else 0


def compare_fill(array: Array, store: ts.TensorStore, scan_axis: int) -> ArrayResult:
    """Compares what no tensor supplies: the padding of an axis, or a constant."""
    finding = ArrayResult(array.key)
    for region in _filled(array, scan_axis):
        step = max(1, SLAB_ELEMENTS * len(region[0]) // max(1, math.prod(map(len, region)))) if region else 1
        for start in range(region[0].start, region[0].stop, step) if region else (0,):
            slab = (range(start, min(start + step, region[0].stop)), *region[1:]) if region else ()
            found = np.asarray(store[tuple(slice(r.start, r.stop) for r in slab)].read().result())
            count, index = count_wrong(differs(np.full(found.shape, array.fill, np.float32).astype(found.dtype), found))
            first = None
            if index is not None:
                place = tuple(r.start + i for r, i in zip(slab, index, strict=True))
                first = FirstDifference(None, place, float(array.fill or 0), found[index].item())
            finding += ArrayResult(array.key, found.size, count, first=first)
    return finding


def _filled(array: Array, scan_axis: int) -> Iterator[tuple[range, ...]]:
    """The boxes of an array that no tensor supplies: all of it, places without a layer, or what its segments leave over
    on an axis.
    """
    whole = tuple(range(n) for n in array.shape)
    made = [part for part in array.parts if part.rule.source is not None]
    if not made:
        yield whole
        return
    right = list(made[0].rule.axes.right)
    at = _stacked_at(made[0].path, scan_axis, len(right))
    right[at:at] = [()] * made[0].layers.ndim
    for index in np.argwhere(made[0].layers == ABSENT):
        yield (*whole[:at], *(range(i, i + 1) for i in index), *whole[at + len(index) :])
    for axis, factors in enumerate(right):
        if len(factors) == 1 and factors[0] in made[0].rule.segments:
            taken = sorted((part.rule.segments[factors[0]].start, part.rule.segments[factors[0]].size) for part in made)
            edges = [0, *itertools.chain(*((start, start + size) for start, size in taken)), array.shape[axis]]
            for low, high in zip(edges[::2], edges[1::2], strict=True):
                if low < high:
                    yield (*whole[:axis], range(low, high), *whole[axis + 1 :])


@dataclasses.dataclass(frozen=True, slots=True)
class CompareTask:
    """What is compared in one go: some cells of one array, by their numbers; with `first` 0 also its padding.

    Attributes:
      array: its number in the plan.
      first, last: of the cells, `last` excluded.
    """

    array: int
    first: int
    last: int


def tasks(conversion: Conversion) -> list[CompareTask]:
    """All comparisons, each of about `TASK_BYTES`."""
    made = []
    for number, array in enumerate(conversion.plan.arrays):
        total = sum(len(part.tensors) for part in array.parts)
        step = max(1, TASK_BYTES * total // max(1, array.nbytes))
        # of one without tensors its padding
        made += [CompareTask(number, first, min(first + step, total)) for first in range(0, max(1, total), step)]
    return made


def is_compared(number: int, sample: float) -> bool:
    """Whether this cell of an array is in the sample: the first always is, then every so many."""
    return number == 0 or int(number * sample) != int((number - 1) * sample)


def compared_bytes(array: Array, sample: float) -> int:
    """Bytes of an array that are compared, about."""
    numbers = sum(1 for _ in cells(array))
    compared = sum(is_compared(number, sample) for number in range(numbers))
    return math.prod(array.shape) * compared // max(1, numbers) * array.dtype.itemsize


def run_task(
    task: CompareTask, conversion: Conversion, store: ts.TensorStore, sample: float, exported: bool
) -> ArrayResult:
    """Compares; of the cells only every so many, if `sample` is less than 1. What pads an array isn't compared with an
    export, which hasn't got it.
    """
    array = conversion.plan.arrays[task.array]
    axis = conversion.options.param_scan_axis
    finding = ArrayResult(array.key)
    for number, cell in enumerate(itertools.islice(cells(array), task.first, task.last), task.first):
        if is_compared(number, sample):
            finding += compare(array, cell, store, conversion.encodings[str(cell.tensor)], axis, exported)
    if task.first == 0 and array.fill is not None and not exported:
        finding += compare_fill(array, store, axis)
    return finding
