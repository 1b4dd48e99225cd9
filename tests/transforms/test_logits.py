"""How far logits are apart, by numpy's and the definition's own sums."""

from __future__ import annotations

import math

import numpy as np
import pytest

from weightbeam.pipelines.forward.report import Beside
from weightbeam.transforms.comparing.logits import LayerDifference, LogitsDifference, compare_traces


def test_probabilities_of_two_tokens() -> None:
    """Of two logits with odds of 3 to 1 and 1 to 1: KL is 3/4 log(3/2) + 1/4 log(1/2)."""
    a, b = np.log(np.array([[3.0, 1.0], [1.0, 1.0]])), np.zeros((2, 2))
    found = LogitsDifference.of(a.astype(np.float32), b.astype(np.float32))
    assert math.isclose(found.largest_kl, 0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel_tol=1e-6)
    assert math.isclose(found.kl, found.largest_kl / 2, rel_tol=1e-6)
    assert (found.top1, found.tokens) == (2, 2)
    assert math.isclose(found.largest, math.log(3), rel_tol=1e-6)


def test_what_is_not_finite_parts() -> None:
    one, nan = np.ones((2, 3), np.float32), np.full((2, 3), np.nan, np.float32)
    assert LayerDifference.of("0", one, nan).beyond(1e9)
    assert not LayerDifference.of("0", nan, nan).beyond(0)
    assert LayerDifference.of("0", 0 * one, one).beyond(1e9)


@pytest.mark.parametrize(("a", "b", "odd"), [(0.0, 0.0, 0), (math.nan, 0.0, 1), (math.nan, math.nan, 1)])
def test_logits_that_are_no_numbers_are_the_same_as_none(a: float, b: float, odd: int) -> None:
    """Of two models that make nothing of a token it can't be told that they are the same."""
    first, second = (np.array([[1.0, 2.0], [1.0, value]], np.float32) for value in (a, b))
    found = LogitsDifference.of(first, second)
    assert found.odd == odd
    assert Beside("other", found, (), 0.0).ok == (odd == 0)
    assert (
        any("the logits of 1 token aren't numbers" in str(line) for line in Beside("b", found, (), 9.0).blocks()) == odd
    )


def test_layers_are_compared_as_far_as_both_have_them() -> None:
    """In the order in which the first made them; what has another shape isn't."""
    one = np.ones((2, 3), np.float32)
    found = compare_traces({"0/mlp": one, "0": 2 * one, "1": one}, {"0": one, "0/mlp": one, "1": one[:1]})
    assert [(each.name, each.relative) for each in found] == [("0/mlp", 0.0), ("0", 0.5)]
