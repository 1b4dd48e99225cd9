"""Axes: a bijection between the elements of two arrays, in einops notation, read as two lists of axes.

`"(heads dim) embed -> embed heads dim"` says that the two-dimensional tensor on the left (Hugging Face) holds the same
elements as the three-dimensional one on the right (MaxText). Everything else follows from it: both shapes, the inverse,
and which part of one side a part of the other side needs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re

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
