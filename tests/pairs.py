"""Rows of a table in which every two values meet: most faults need two things at once, few need three.

Three axes of 4 × 3 × 3 values have 36 products, and 12 rows in which each value of one meets each of another. With
`WEIGHTBEAM_PRODUCTS=full` (`make test-nightly`) the rows are all products.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

FULL = os.environ.get("WEIGHTBEAM_PRODUCTS") == "full"
SEED = int(os.environ.get("WEIGHTBEAM_SEED", "0"))  # of everything that is random here; a run says it at its start

Row = dict[str, Any]


def pairwise(possible: Callable[[Row], bool] = lambda row: True, **axes: Sequence[Any]) -> list[Row]:
    """Rows of a value of each axis, so that every pair of values that may stand together does.

    Args:
      possible: whether a row can be.
      axes: the values of each, by its name.

    Returns:
      The rows, the most useful ones first: each is the one that has most pairs which no row before it had.
    """
    products = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    rows = [row for row in products if possible(row)]
    if FULL:
        return rows
    random.Random(SEED).shuffle(rows)  # of equally useful ones another is taken for another seed
    numbers: dict[tuple, int] = {}

    def pairs(row: Row) -> int:
        """The pairs of a row, as the bits of a number."""
        found = 0
        for pair in itertools.combinations([(name, axes[name].index(value)) for name, value in row.items()], 2):
            found |= 1 << numbers.setdefault(pair, len(numbers))
        return found

    has = [pairs(row) for row in rows]
    left, taken = (1 << len(numbers)) - 1, []
    while left:
        best = max(range(len(rows)), key=lambda number: (has[number] & left).bit_count())
        taken.append(rows[best])
        left &= ~has[best]
    return taken


def name(row: Row) -> str:
    """A row as the name of a test."""
    return "-".join(str(value).replace(" ", "_") or "default" for value in row.values())


def each(*axes: Sequence[Any]) -> list[tuple]:
    """Rows in which each value of each axis stands: as many as the longest axis has; all products with `FULL`.

    For a law that is proved elsewhere, where what is left to see is that each value is taken at all.
    """
    if FULL:
        return list(itertools.product(*axes))
    turns = range(max(map(len, axes)))
    return [tuple(axis[(turn + SEED * place) % len(axis)] for place, axis in enumerate(axes)) for turn in turns]


def some(values: Sequence[Any], share: int) -> list[Any]:
    """One in `share` of the values, others for another seed; all of them with `FULL`."""
    return list(values) if FULL else list(values)[SEED % share :: share]
