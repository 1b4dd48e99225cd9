"""Value operations: float32 arithmetic with a constant that is rounded as MaxText rounds it, and an honest `is_exact`."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightbeam.model_mappings.ops import Scale, Shift

VALUES = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)


@pytest.mark.parametrize("op", [Scale(128**-0.5), Scale(0.125), Scale(5376**0.5, "bfloat16"), Shift(1.0)], ids=str)
def test_float32_in_and_out(op):
    """No stage widens to float64, and backward undoes forward but for rounding."""
    there = op.apply(VALUES)
    assert there.dtype == op.inverse.apply(there).dtype == np.float32
    np.testing.assert_allclose(op.inverse.apply(there), VALUES, rtol=2e-7, atol=2e-7)
    assert not np.allclose(there, VALUES)


def test_constant_is_rounded_first():
    """Gemma's embedding scale is a bfloat16 constant: sqrt(5376) = 73.32 is 73.5 there."""
    assert Scale(5376**0.5, "bfloat16").constant == 73.5
    assert Scale(5376**0.5).constant == np.float32(5376**0.5)
    np.testing.assert_array_equal(Scale(5376**0.5, "bfloat16").apply(VALUES), VALUES * np.float32(73.5))


@settings(max_examples=100, deadline=None)
@given(st.floats(2**-20, 2**20))
def test_exact_scales_are_exact(by):
    """`is_exact` if and only if the constant is a power of two; then bfloat16 comes back to the bit."""
    op = Scale(by)
    assert op.is_exact == (np.log2(float(op.constant)) % 1 == 0)
    values = VALUES[:256].astype(ml_dtypes.bfloat16)
    back = op.inverse.apply(op.apply(values.astype(np.float32)).astype(ml_dtypes.bfloat16).astype(np.float32)).astype(
        ml_dtypes.bfloat16
    )
    assert (back == values).all() or not op.is_exact


@pytest.mark.parametrize(
    ("by", "expected"), [(64**-0.5, True), (256**-0.5, True), (128**-0.5, False), (1.0, True), (80**-0.5, False)]
)
def test_is_exact_of_head_sizes(by, expected):
    """Heads of 64 and 256 scale exactly, of 80 and 128 they don't."""
    assert Scale(by).is_exact is expected


def test_shift_is_never_exact():
    """1 + w loses the low bits of a small w."""
    assert not Shift(1.0).is_exact
    assert Shift(1.0).inverse.apply(Shift(1.0).apply(np.float32([1e-9])))[0] == 0


@pytest.mark.parametrize(
    ("op", "text"), [(Scale(0.125), "scaled by 0.125"), (Shift(1.0), "shifted by +1"), (Shift(-0.5), "shifted by -0.5")]
)
def test_text(op, text):
    """As the plan prints it."""
    assert str(op) == text
