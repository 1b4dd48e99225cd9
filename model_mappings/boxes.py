"""Boxes: a range of indices for each axis of an array; and the boxes of the factors that an axis is merged from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Range = tuple[int, int]  # [start, stop)
Box = tuple[Range, ...]  # a range for each axis


def extent(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Elements in a box."""
    return math.prod(extent(box))


def whole(shape: tuple[int, ...]) -> Box:
    """The box that is the whole array."""
    return tuple((0, size) for size in shape)


def slices(box: Box) -> tuple[slice, ...]:
    """A box as numpy and TensorStore take it."""
    return tuple(slice(*span) for span in box)


def inside(box: Box, outer: Box) -> Box:
    """A box of an array, counted from the corner of another one around it."""
    return tuple((start - low, stop - low) for (start, stop), (low, _) in zip(box, outer, strict=True))


def intersection(one: Box, other: Box) -> Box:
    """What two boxes have in common; a range that is empty may end before it starts."""
    return tuple((max(a, b), min(end, stop)) for (a, end), (b, stop) in zip(one, other, strict=True))


def around(one: Box, other: Box) -> Box:
    """The smallest box that holds two."""
    return tuple((min(a, b), max(end, stop)) for (a, end), (b, stop) in zip(one, other, strict=True))


def tile(index: Sequence[int], step: Sequence[int], shape: Sequence[int]) -> Box:
    """The box of one of the tiles of `step` that an array is cut into; cropped at the array's end."""
    return tuple((at * n, min((at + 1) * n, size)) for at, n, size in zip(index, step, shape, strict=True))


def meet(one: Box, other: Box) -> bool:
    """Whether two boxes of one array have an element in common."""
    return all(max(a, b) < min(end, stop) for (a, end), (b, stop) in zip(one, other, strict=True))


def factor_boxes(span: Range, sizes: Sequence[int]) -> Iterator[tuple[Range, ...]]:
    """Splits the range `span` of an axis merged from factors of `sizes` into disjoint boxes of these factors, in order.

    The axis (heads dim) = (4, 8), cut to [4, 20), is the second half of head 0, the whole of head 1 and the first half
    of head 2: three boxes. A range that keeps whole heads, or stays inside one, is one box.
    """
    start, stop = span
    if start >= stop:
        return
    if len(sizes) <= 1:
        yield (span,) if sizes else ()
        return
    inner = 1
    for size in sizes[1:]:
        inner *= size
    first, last = start // inner, (stop - 1) // inner
    if first == last:
        for rest in factor_boxes((start - first * inner, stop - first * inner), sizes[1:]):
            yield ((first, first + 1), *rest)
        return
    if start % inner:
        yield from factor_boxes((start, (first + 1) * inner), sizes)
        first += 1
    whole = stop // inner
    if first < whole:
        yield ((first, whole), *((0, size) for size in sizes[1:]))
    if stop % inner:
        yield from factor_boxes((whole * inner, stop), sizes)


def hull(box: Sequence[Range], sizes: Sequence[int]) -> tuple[tuple[Range, ...], Range]:
    """The smallest box around `box` whose elements are one range of the merged axis, and that range.

    Behind the first factor that is more than one index wide every factor is widened to its whole size.
    """
    widened: list[Range] = []
    start, stop, wide = 0, 1, False
    for (low, high), size in zip(box, sizes, strict=True):
        if wide:
            low, high = 0, size
        wide = wide or high - low > 1
        start, stop = start * size + low, (stop - 1) * size + high
        widened.append((low, high))
    return tuple(widened), (start, stop)
