"""Axes: a bijection between the elements of two arrays, in einops notation, and the integer ranges behind it.

`"(heads dim) embed -> embed heads dim"` says that the two-dimensional tensor on the left (Hugging Face) holds the same
elements as the three-dimensional one on the right (MaxText). Everything else follows from it: both shapes, the inverse,
and which part of one side a part of the other side needs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator, Sequence

Range = tuple[int, int]  # [start, stop)
Side = tuple[tuple[str, ...], ...]  # the axes of one array, each merged from factors


def _side(text: str) -> Side:
    """`"(heads dim) 1 embed"` -> `(("heads", "dim"), (), ("embed",))`: an axis `1` has no factors."""
    if re.sub(r"\([\w ]*\)|\w+|\s", "", text):
        raise ValueError(f"axes {text!r}: only names, 1 and flat parentheses are allowed")
    axes = re.findall(r"\([^)]*\)|\S+", text)
    return tuple(() if axis == "1" else tuple(axis.strip("()").split()) for axis in axes)


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes of a tensor (left, Hugging Face's layout) and of the array with the same elements (right, MaxText's)."""

    left: Side
    right: Side

    @classmethod
    @functools.cache
    def parse(cls, text: str) -> Axes:
        """Reads einops notation; without an arrow both sides are alike.

        Raises:
          ValueError: the sides don't name the same axes, or one names an axis twice.
        """
        left, arrow, right = text.partition("->")
        axes = cls(_side(left), _side(right if arrow else left))
        names = [sorted(itertools.chain(*side)) for side in (axes.left, axes.right)]
        if names[0] != names[1]:
            raise ValueError(f"axes {text!r}: the two sides must name the same axes")
        if len(set(names[0])) < len(names[0]):
            raise ValueError(f"axes {text!r}: an axis is named twice")
        return axes


def factor_boxes(span: Range, sizes: Sequence[int]) -> Iterator[tuple[Range, ...]]:
    """Splits the range `span` of an axis merged from factors of `sizes` into disjoint boxes of these factors, in order.

    The axis (heads dim) = (4, 8), cut to [4, 20), is the second half of head 0, the whole of head 1 and the first half of
    head 2: three boxes. A range that keeps whole heads, or stays inside one, is one box.
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
