"""A numpy index as a box to read, and what is left to do with the box once it is there."""

from __future__ import annotations

import operator
from types import EllipsisType
from typing import Any

from weightbeam.model_mappings.boxes import Box


def find_box(index: Any, shape: tuple[int, ...]) -> tuple[Box, tuple[slice | int | None, ...]]:
    """The smallest box that holds what `array[index]` selects of an array of this shape, and the index into the box
    that selects it.

    `array[3, ..., ::-2]` of shape (5, 4, 6) is `box[0, :, ::-2]` of the box ((3, 4), (0, 4), (1, 6)). Basic indexing
    only: integers, slices, `...` and `None`.

    Raises:
      IndexError: an integer is out of range, there are too many indices, or one is of another kind.
    """
    items = index if isinstance(index, tuple) else (index,)
    counted = sum(item is not None and not isinstance(item, EllipsisType) for item in items)
    if counted > len(shape):
        raise IndexError(f"too many indices: the array has {len(shape)} axes, {counted} were given")
    dots = [at for at, item in enumerate(items) if isinstance(item, EllipsisType)]
    if len(dots) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    at = dots[0] if dots else len(items)
    items = (*items[:at], *[slice(None)] * (len(shape) - counted), *items[at + 1 :])
    box: list[tuple[int, int]] = []
    rest: list[slice | int | None] = []
    for item in items:
        if item is None:
            rest.append(None)
            continue
        size = shape[len(box)]
        if isinstance(item, slice):
            span, left = _span(item, size)
        else:
            span, left = _one(item, len(box), size), 0
        box.append(span)
        rest.append(left)
    return tuple(box), tuple(rest)


def _span(cut: slice, size: int) -> tuple[tuple[int, int], slice]:
    chosen = range(size)[cut]
    if not chosen:
        return (0, 0), slice(None)
    low, high = min(chosen[0], chosen[-1]), max(chosen[0], chosen[-1]) + 1
    return (low, high), slice(None, None, chosen.step)


def _one(item: Any, axis: int, size: int) -> tuple[int, int]:
    if isinstance(item, bool):
        raise IndexError("only integers, slices, '...' and None are indices of an array that isn't read yet")
    try:
        at = operator.index(item)
    except TypeError:
        raise IndexError("only integers, slices, '...' and None are indices of an array that isn't read yet") from None
    if not -size <= at < size:
        raise IndexError(f"index {at} is out of bounds for axis {axis} with size {size}")
    return (at % size, at % size + 1)
