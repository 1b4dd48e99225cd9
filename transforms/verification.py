"""Verification: every element of the checkpoint against the tensors, by the inverse of the tables and in plain numpy.

Nothing of the way in takes part: no unit, no piece, no view, no chunk grid. An array's share of one tensor is read back,
its axes are split, turned around and merged as the rule's axes say, and what results is compared in the tensor's layout.
Only the headers, the tables themselves and the decoding of quantised tensors are shared with the conversion; that the
tables are right is shown by verifying checkpoints that MaxText's own converter wrote.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import apache_beam as beam
import numpy as np
import tensorstore as ts

from formats.encodings import Encoding
from formats.orbax import open_arrays
from formats.safetensors import read_boxes
from formats.storage import write_file
from model_mappings.cells import Part
from model_mappings.plan import Array, holds, is_float
from transforms.conversion import Conversion, load_bytes
from transforms.stages import ByteCounter

SLAB_ELEMENTS = 1 << 23  # compared at a time
TASK_BYTES = 256 << 20  # of an array, compared in one go

COMPARED = ByteCounter()  # elements


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
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
        return f"{where} should be {self.expected!r}, but is {self.found!r}"


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """What the comparison of one array, or a part of it, found.

    Attributes:
      key: of the array.
      compared, different: numbers of elements.
      rounded: whether the values that should be there are rounded (`docs/numerics.md`), and not the tensor's own.
      first: the first difference.
    """

    key: str
    compared: int
    different: int
    rounded: bool
    first: Difference | None

    def __add__(self, other: Finding) -> Finding:
        return Finding(self.key, self.compared + other.compared, self.different + other.different, self.rounded or other.rounded, self.first or other.first)


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """What one tensor gives to one array: the rule of `part`, at one place of its stacked and name axes."""

    part: Part
    layer: tuple[int, ...]
    name: tuple[int, ...]

    @property
    def tensor(self) -> str:
        name = self.part.tensor(self.layer, self.name)
        assert name is not None
        return name


def shares(array: Array) -> Iterator[Share]:
    """Every tensor's share of an array."""
    for part in array.parts:
        if part.rule.source is not None:
            for layer in np.ndindex(part.layers.shape):
                yield from (Share(part, layer, name) for name in np.ndindex(part.name_shape))


def compare(array: Array, share: Share, store: ts.TensorStore, encoding: Encoding, scan_axis: int) -> Finding:
    """Compares one tensor's share of an array, slab by slab along the tensor's rows."""
    rule, part = share.part.rule, share.part
    left = rule.axes.left[len(rule.name_axes) :]
    sizes = {factor: size for axis, sizes in zip(left, part.source_factors, strict=True) for factor, size in zip(axis, sizes, strict=True)}
    right = list(rule.axes.right)
    fixed = dict(zip(rule.name_axes, share.name, strict=True))
    at = min(scan_axis, len(right))
    stacked = [f"#{i}" for i in range(part.layers.ndim)]  # words that no table uses
    right[at:at] = [(word,) for word in stacked]
    fixed |= dict(zip(stacked, share.layer, strict=True))

    first = left[0][0] if left and left[0] else None
    if first is not None and not any(axis[:1] == (first,) and first not in rule.segments for axis in right):
        first = None  # its indices aren't one range of the array
    total = sizes[first] if first is not None else 1
    step = max(1, SLAB_ELEMENTS * total // max(1, math.prod(sizes.values()))) if first is not None else 1
    finding = Finding(array.key, 0, 0, False, None)
    for start in range(0, total, step):
        slab = (first, start, min(start + step, total)) if first is not None else None
        finding += _compare_slab(array.key, share, store, encoding, (left, right), sizes, fixed, slab)
    return finding


def _compare_slab(
    key: str,
    share: Share,
    store: ts.TensorStore,
    encoding: Encoding,
    axes: tuple[tuple, list],
    sizes: Mapping[str, int],
    fixed: Mapping[str, int],
    slab: tuple[str, int, int] | None,
) -> Finding:
    """Compares the rows of a slab: a range of the tensor's first factor, or None for all of it."""
    rule, (left, right) = share.part.rule, axes
    ranges = {factor: (0, size) for factor, size in sizes.items()}
    if slab is not None:
        ranges[slab[0]] = slab[1:]

    # the tensor's side: a box, of which the window takes every step-th index
    box = []
    for axis, start, step in zip(left, share.part.starts, share.part.steps, strict=True):
        low, high = 0, math.prod(sizes[factor] for factor in axis)
        if axis and slab is not None and axis[0] == slab[0]:
            inner = math.prod(sizes[factor] for factor in axis[1:])
            low, high = slab[1] * inner, slab[2] * inner
        box.append((start + low * step, start + (high - 1) * step + 1))
    stored, _ = read_boxes(encoding.reads(tuple(box)))
    values = encoding.decode(stored, tuple(box), np.dtype(np.float32))[tuple(slice(None, None, step) for step in share.part.steps)]

    # the array's side: read, split into factors, turned around
    region, factors, picks, order = [], [], [], []
    for axis in right:
        if len(axis) == 1 and axis[0] in fixed:
            region.append(slice(fixed[axis[0]], fixed[axis[0]] + 1))
            factors.append(1)
            picks.append(0)
            continue
        totals = [rule.segments[factor].total if factor in rule.segments else sizes[factor] for factor in axis]
        lows = [rule.segments[factor].start if factor in rule.segments else 0 for factor in axis]
        inner, low, high = math.prod(totals[1:]), 0, totals[0] if totals else 1
        if axis and slab is not None and axis[0] == slab[0]:
            low, high = slab[1:]
        region.append(slice(low * inner, high * inner))
        for i, factor in enumerate(axis):
            extent = high - low if i == 0 else totals[i]
            factors.append(extent)
            count = ranges[factor][1] - ranges[factor][0]
            picks.append(slice(lows[i], lows[i] + count) if factor in rule.segments else slice(None))
            order.append(factor)
    read = np.asarray(store[tuple(region)].read().result())
    split = read.reshape(factors)[tuple(picks)]
    wanted_order = [factor for axis in left for factor in axis]
    found = split.transpose([order.index(factor) for factor in wanted_order]).reshape(values.shape)

    expected, rounded = _expected(values, share.part, encoding, found.dtype)
    wrong = _differs(expected, found)
    count = int(np.count_nonzero(wrong))
    first = None
    if count:
        index = tuple(int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape))
        place = tuple(low + i * step for (low, _), i, step in zip(box, index, share.part.steps, strict=True))
        first = Difference(share.tensor, place, expected[index].item(), found[index].item())
    return Finding(key, found.size, count, rounded, first)


def _expected(values: np.ndarray, part: Part, encoding: Encoding, stored: np.dtype) -> tuple[np.ndarray, bool]:
    """What should be stored, and whether that is rounded: float32, the operations, one cast to a dtype that is meant for weights."""
    if part.rule.integer:
        return values, False
    rounded = encoding.label is not None or any(not op.is_exact for op in part.rule.ops) or not holds(stored, values.dtype)
    values = values.astype(np.float32)
    for op in part.rule.ops:
        values = op.forward(values)
    if stored.name not in ("bfloat16", "float32"):  # nothing says that such a rounding is meant
        return values, False
    return values.astype(stored), rounded


def _differs(expected: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Where two arrays differ: bit by bit where their dtypes are the same, but for NaN; else by value."""
    if expected.dtype != found.dtype:
        expected, found = expected.astype(np.float64), found.astype(np.float64)
        return ~((expected == found) | (np.isnan(expected) & np.isnan(found)))
    bits = np.dtype(f"u{expected.itemsize}")
    wrong = np.ascontiguousarray(expected).view(bits) != np.ascontiguousarray(found).view(bits)
    if is_float(expected.dtype) and wrong.any():
        wrong &= ~(np.isnan(expected) & np.isnan(found))
    return wrong


def compare_fill(array: Array, store: ts.TensorStore, scan_axis: int) -> Finding:
    """Compares what no tensor supplies: the padding of an axis, or a constant."""
    finding = Finding(array.key, 0, 0, False, None)
    for region in _filled(array, scan_axis):
        step = max(1, SLAB_ELEMENTS * len(region[0]) // max(1, math.prod(map(len, region)))) if region else 1
        for start in range(region[0].start, region[0].stop, step) if region else (0,):
            slab = (range(start, min(start + step, region[0].stop)), *region[1:]) if region else ()
            found = np.asarray(store[tuple(slice(r.start, r.stop) for r in slab)].read().result())
            wrong = _differs(np.full(found.shape, array.fill, np.float32).astype(found.dtype), found)
            count, first = int(np.count_nonzero(wrong)), None
            if count:
                index = tuple(int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape))
                place = tuple(r.start + i for r, i in zip(slab, index, strict=True))
                first = Difference(None, place, float(array.fill or 0), found[index].item())
            finding += Finding(array.key, found.size, count, False, first)
    return finding


def _filled(array: Array, scan_axis: int) -> Iterator[tuple[range, ...]]:
    """The boxes of an array that no tensor supplies: all of it, or what its segments leave over on an axis."""
    whole = tuple(range(n) for n in array.shape)
    made = [part for part in array.parts if part.rule.source is not None]
    if not made:
        yield whole
        return
    right = list(made[0].rule.axes.right)
    at = min(scan_axis, len(right))
    right[at:at] = [()] * made[0].layers.ndim
    for axis, factors in enumerate(right):
        if len(factors) == 1 and factors[0] in made[0].rule.segments:
            taken = sorted((part.rule.segments[factors[0]].start, part.rule.segments[factors[0]].size) for part in made)
            edges = [0, *itertools.chain(*((start, start + size) for start, size in taken)), array.shape[axis]]
            for low, high in zip(edges[::2], edges[1::2], strict=True):
                if low < high:
                    yield (*whole[:axis], range(low, high), *whole[axis + 1 :])


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """What is compared in one go: some shares of one array, by their numbers; with `first` 0 also its padding.

    Attributes:
      array: its number in the plan.
      first, last: of the shares, `last` excluded.
    """

    array: int
    first: int
    last: int


def tasks(conversion: Conversion) -> list[Task]:
    """All comparisons, each of about `TASK_BYTES`."""
    made = []
    for number, array in enumerate(conversion.plan.arrays):
        total = sum(part.layers.size * math.prod(part.name_shape) for part in array.parts if part.rule.source is not None)
        step = max(1, TASK_BYTES * total // max(1, array.nbytes))
        made += [Task(number, first, min(first + step, total)) for first in range(0, total, step)] or [Task(number, 0, 0)]
    return made


def run_task(task: Task, conversion: Conversion, store: ts.TensorStore, sample: float) -> Finding:
    """Compares; of the shares only every so many, if `sample` is less than 1."""
    array = conversion.plan.arrays[task.array]
    axis = conversion.options.param_scan_axis
    finding = Finding(array.key, 0, 0, False, None)
    for number, share in enumerate(itertools.islice(shares(array), task.first, task.last), task.first):
        if number == 0 or int(number * sample) != int((number - 1) * sample):
            finding += compare(array, share, store, conversion.encodings[share.tensor], axis)
    if task.first == 0 and array.fill is not None:
        finding += compare_fill(array, store, axis)
    return finding


class CompareArrays(beam.PTransform):
    """Numbers of tasks -> a file with all findings, which `read_findings` reads."""

    def __init__(self, staged: bytes, plan_hash: str, items: Path, sample: float, report: Path):
        super().__init__()
        self.fn = _CompareFn(staged, plan_hash, items, sample)
        self.report = report

    def expand(self, pcoll: beam.PCollection) -> beam.PCollection:
        return (
            pcoll
            | beam.Reshuffle()
            | "Compare" >> beam.ParDo(self.fn).with_output_types(bytes)
            | beam.CombineGlobally(beam.combiners.ToListCombineFn())
            | "Report" >> beam.Map(_write, self.report)
        )


class _CompareFn(beam.DoFn):
    def __init__(self, staged: bytes, plan_hash: str, items: Path, sample: float):
        self.staged, self.plan_hash, self.items, self.sample = staged, plan_hash, items, sample

    def setup(self) -> None:
        self.stores = open_arrays(self.items)

        self.conversion = load_bytes(self.staged, self.plan_hash)
        self.tasks = tasks(self.conversion)

    def process(self, number: int) -> Iterator[bytes]:
        task = self.tasks[number]
        finding = run_task(task, self.conversion, self.stores[self.conversion.plan.arrays[task.array].key], self.sample)
        COMPARED.add(finding.compared)
        yield pickle.dumps(finding)


def _write(findings: Sequence[bytes], report: Path) -> None:
    write_file(report, pickle.dumps(list(findings)))


def read_findings(report: Path) -> dict[str, Finding]:
    """What was found of each array."""
    found: dict[str, Finding] = {}
    for packed in pickle.loads(report.read_bytes()):
        finding = pickle.loads(packed)
        found[finding.key] = found[finding.key] + finding if finding.key in found else finding
    return found
