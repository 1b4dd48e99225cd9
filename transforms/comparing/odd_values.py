"""Values that are converted as they are, and that a release hardly means: NaN, infinities, and matrices of zeros.
Counted by tensor.

Each shard is looked at as it is written (`formats/record/extremes.py`), which costs a look at what is in the cache anyway.
Only where one is odd, the share of each tensor in it is counted. A unit's counts stand in its ledger entry; the sums in
the checkpoint's record.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from weightbeam.formats.record.extremes import NOT_FINITE, SEEN, Extremes, count_odd
from weightbeam.formats.text.printable import listed
from weightbeam.model_mappings.boxes import Box
from weightbeam.model_mappings.plan import Array

ZERO = "zero"  # field of the record, beside NOT_FINITE
Counts = tuple[int, int, int]  # elements that are NaN, that are infinite, and that are zeros of nothing but zeros
SHOWN = 3  # tensors that a message names


def find_odd(array: Array, box: Box, values: np.ndarray, extremes: Extremes) -> dict[str, Counts]:
    """The odd values of a shard by tensor; what pads an array isn't any tensor's.

    Args:
      array, box: what the shard is of.
      values: its own.
      extremes: what was seen of them.
    """
    if extremes.is_finite and not extremes.is_zero and _none_is_zero(array, values):
        return {}
    found: Counter[tuple[str, int]] = Counter()
    origin = tuple(start for start, _ in box)
    for cell in array.cells(box):
        is_matrix = len(cell.part.window_shape) > 1
        if cell.tensor is None or (extremes.is_finite and not is_matrix):
            continue
        for piece in cell.pieces(box):
            share = piece.target.of(values, origin)
            for kind, times in enumerate(count_odd(share, extremes)):
                found[cell.tensor, kind] += times
            if is_matrix and (extremes.is_zero or _is_zero(share)):
                found[cell.tensor, 2] += share.size
    odd = sorted({tensor for (tensor, _), times in found.items() if times})
    return {tensor: (found[tensor, 0], found[tensor, 1], found[tensor, 2]) for tensor in odd}


def _none_is_zero(array: Array, values: np.ndarray) -> bool:
    """Whether it is plain that none of a shard's matrices is zero throughout; the shard isn't.

    It has one, or each of those that are stacked begins with another value: one look for all, where a look at each
    would take longer than the rest of a conversion.
    """
    if len(array.parts) > 1:
        return False
    stacked = frozenset[int]().union(*(part.stack_axes for part in array.parts))
    first = values[tuple(slice(None) if axis in stacked else 0 for axis in range(values.ndim))]
    return first.size == 1 or bool((first.astype(np.float32) != 0).all())


def _is_zero(values: np.ndarray) -> bool:
    """Whether all are zeros; mostly the first row tells that they aren't."""
    with np.errstate(invalid="ignore"):  # NaN is no zero
        return not values[(0,) * max(0, values.ndim - 1)].any() and not values.any()


def add(counts: Iterable[Mapping[str, Sequence[int]]]) -> dict[str, Counts]:
    """The sums of what shards, or units, found."""
    total: dict[str, Counts] = {}
    for found in counts:
        for tensor, (nan, infinite, zeros) in found.items():
            before = total.get(tensor, (0, 0, 0))
            total[tensor] = (before[0] + nan, before[1] + infinite, before[2] + zeros)
    return total


def conclude(counts: Iterable[Mapping[str, Sequence[int]]], arrays: Iterable[Array]) -> dict[str, Any]:
    """What all units found, for the record: the tensors with NaN or infinite elements, and the matrices that are zero
    throughout.
    """
    total = add(counts)
    maybe = {tensor for tensor, (_, _, zeros) in total.items() if zeros}
    elements: Counter[str] = Counter()
    for part in (part for array in arrays if maybe for part in array.parts):
        for tensor in maybe.intersection(part.tensors):
            elements[tensor] += math.prod(part.window_shape)
    zero = sorted(tensor for tensor in maybe if total[tensor][2] >= elements[tensor])
    return {**not_finite(total), **({ZERO: zero} if zero else {})}


def not_finite(total: Mapping[str, Counts]) -> dict[str, Any]:
    """The tensors with NaN or infinite elements, for the record."""
    odd = {
        tensor: {"nan": nan, "infinite": infinite} for tensor, (nan, infinite, _) in total.items() if nan or infinite
    }
    return {NOT_FINITE: dict(sorted(odd.items()))} if odd else {}


def not_finite_of(ledger: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """What all units found that look for nothing else."""
    return not_finite(add(found for entry in ledger.values() for found in entry.get(SEEN, ())))


def describe(record: Mapping[str, Any]) -> list[str]:
    """What a record says of odd values, a line for each kind."""
    lines = []
    if not_finite := record.get(NOT_FINITE):
        named = [f"{tensor} ({_numbers(**counts)})" for tensor, counts in not_finite.items()]
        hold = "tensor holds" if len(named) == 1 else "tensors hold"
        lines.append(f"{len(named):,} {hold} values that aren't finite: {listed(named, SHOWN)}")
    if zero := record.get(ZERO):
        are = "matrix is" if len(zero) == 1 else "matrices are"
        lines.append(f"{len(zero):,} {are} zero throughout: {listed(zero, SHOWN)}")
    return lines


def _numbers(nan: int, infinite: int) -> str:
    return ", ".join([f"{nan:,} NaN"] * bool(nan) + [f"{infinite:,} infinite"] * bool(infinite))
