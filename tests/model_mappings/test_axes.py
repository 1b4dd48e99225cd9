"""The integers behind the notation: splitting a range into boxes of factors, and boxes back into ranges."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored import boxes

from weightbeam.model_mappings.axes import Axes
from weightbeam.model_mappings.boxes import factor_boxes, hull

QUICK = settings(max_examples=300, deadline=None)


def elements(box, sizes):
    """Places in the merged axis of the elements of a box of its factors, in the box's order."""
    return np.arange(math.prod(sizes)).reshape(sizes)[tuple(slice(*span) for span in box)].ravel().tolist()


def factors(most):
    return st.lists(st.integers(1, most), max_size=4)


@QUICK
@given(st.data())
def test_factor_boxes_cover_a_range_once_and_in_order(data):
    """Disjoint, in order, covering exactly the range; each box is one range of the merged axis; never more than two for
    each factor, less one.
    """
    sizes = data.draw(factors(5))
    ((start, stop),) = data.draw(boxes([math.prod(sizes)]))
    found = list(factor_boxes((start, stop), sizes))
    assert [place for box in found for place in elements(box, sizes)] == list(range(start, stop))
    assert all(hull(box, sizes)[0] == box for box in found)
    assert len(found) <= max(1, 2 * len(sizes) - 1)


@pytest.mark.parametrize("sizes", [(), (4,), (4, 8), (2, 3, 4)])
def test_factor_boxes_of_an_empty_range(sizes):
    """Nothing is no box."""
    assert list(factor_boxes((1, 1), sizes)) == []


def test_factor_boxes_of_heads():
    """The docstring's example: half a head, a whole head, half a head; whole heads are one box."""
    assert list(factor_boxes((4, 20), (4, 8))) == [((0, 1), (4, 8)), ((1, 2), (0, 8)), ((2, 3), (0, 4))]
    assert list(factor_boxes((8, 32), (4, 8))) == [((1, 4), (0, 8))]
    assert list(factor_boxes((9, 12), (4, 8))) == [((1, 2), (1, 4))]


@QUICK
@given(st.data())
def test_hull_is_the_smallest_range_around_a_box(data):
    """A superset that is one range of the merged axis, the range that is said; and of all such boxes, found by trying
    them, none is smaller.
    """
    sizes = data.draw(factors(3))
    box = data.draw(boxes(sizes))
    widened, (start, stop) = hull(box, sizes)
    assert set(elements(widened, sizes)) >= set(elements(box, sizes))
    assert elements(widened, sizes) == list(range(start, stop))
    around = [
        [(a, b) for a in range(low + 1) for b in range(high, size + 1)]
        for (low, high), size in zip(box, sizes, strict=True)
    ]
    candidates = (elements(candidate, sizes) for candidate in itertools.product(*around))
    assert stop - start == min(len(places) for places in candidates if places[-1] - places[0] == len(places) - 1)


def test_axes_parse():
    """Both sides as tuples of factors; without an arrow they are alike; `1` is an axis without factors."""
    assert Axes.parse("(heads dim) embed -> embed heads dim") == Axes(
        (("heads", "dim"), ("embed",)), (("embed",), ("heads",), ("dim",))
    )
    assert Axes.parse("vocab embed").right == (("vocab",), ("embed",))
    assert Axes.parse("conv 1 taps -> taps 1 conv").left == (("conv",), (), ("taps",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("heads embed -> embed", "the two sides must name the same axes"),
        ("embed -> embed heads", "the two sides must name the same axes"),
        ("(heads dim) embed -> embed head dim", "the two sides must name the same axes"),
        ("embed embed", "an axis is named twice"),
        ("(heads heads) embed -> embed (heads heads)", "an axis is named twice"),
        ("heads, embed", "only names, 1 and flat parentheses"),
        ("q-heads embed", "only names, 1 and flat parentheses"),
        ("((heads two) half) embed", "only names, 1 and flat parentheses"),
        ("(heads embed", "only names, 1 and flat parentheses"),
        ("{expert} embed", "only names, 1 and flat parentheses"),
        ("... embed", "only names, 1 and flat parentheses"),
        ("a b -> b a -> a b", "only names, 1 and flat parentheses"),
    ],
)
def test_axes_that_contradict_themselves(text, message):
    """A typo in a table is an error that quotes the line."""
    with pytest.raises(ValueError, match=message) as error:
        Axes.parse(text)
    assert text.split("->")[0].strip() in str(error.value) or text.split("->")[-1].strip() in str(error.value)
