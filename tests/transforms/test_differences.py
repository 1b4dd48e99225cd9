"""Differences of arrays against numpy on the whole, rounding against real casts, and boxes that tile an array."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support import BF16, F32, FP8

from weightbeam.model_mappings.boxes import volume
from weightbeam.transforms.comparing import differences
from weightbeam.transforms.comparing.differences import Difference, compare, compare_each, cut, spacing

RNG = np.random.default_rng(3)
F16, F64 = np.dtype(np.float16), np.dtype(np.float64)


def test_measures_are_numpys() -> None:
    """Also over many chunks, and in any order of boxes; each of several is compared as if it were alone."""
    shape = (13, 31_011)
    a = RNG.standard_normal(shape).astype(np.float32)
    b = np.where(RNG.random(shape) < 0.3, a + RNG.standard_normal(shape).astype(np.float32), a).astype(np.float32)
    assert compare_each([b, a, a.astype(BF16)], a) == [compare(b, a), compare(a, a), compare(a.astype(BF16), a)]
    for found in (compare(a, b), compare(a[5:], b[5:]) + compare(a[:5], b[:5])):
        assert (found.status, found.elements, found.different) == ("changed", a.size, int((a != b).sum()))
        x, y = a.astype(np.float64), b.astype(np.float64)
        np.testing.assert_allclose(
            [found.largest, found.mean, found.share],
            [np.abs(x - y).max(), np.abs(x - y).mean(), (a != b).mean()],
            rtol=1e-6,
        )
        np.testing.assert_allclose(found.cosine, (x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()), rtol=1e-6)


@pytest.mark.parametrize("dtype", [BF16, F16, FP8, np.dtype(ml_dtypes.float8_e5m2)])
def test_one_cast_is_rounded(dtype: np.dtype) -> None:
    """Of numbers of all magnitudes that the dtype has, subnormal ones too."""
    info = ml_dtypes.finfo(dtype)
    exponents = RNG.uniform(info.minexp - info.nmant, info.maxexp - 1, 10_000)
    values = (RNG.choice([-1, 1], 10_000) * 2.0**exponents).astype(np.float32)
    values[77] = 1.0
    cast = values.astype(dtype)
    assert compare(values, cast).status == compare(cast, values).status == "rounded"
    assert compare(cast, cast).status == "equal"
    off = cast.astype(np.float32)
    off[77] += 2 * spacing(np.ones(1), dtype)[0]
    found = compare(off, cast)
    assert (found.status, found.beyond) == ("changed", 1)


def test_a_step_of_the_same_dtype_is_rounded() -> None:
    """As where a factor was folded in and out again: neighbours in bfloat16; two steps aren't."""
    a = np.array([1.0, -3.0, 1e-3, 0.0], BF16)
    for steps, status in ((1, "rounded"), (2, "changed")):
        b = (a.view(np.uint16) + np.array([steps, 0, 0, 0], np.uint16)).view(BF16)
        assert compare(a, b).status == status


def test_special_values() -> None:
    a = np.array([np.nan, np.inf, -np.inf, 0.0], np.float32)
    assert compare(a, np.array([-np.nan, np.inf, -np.inf, -0.0], np.float32)).status == "equal"
    found = compare(a, np.array([1.0, np.inf, -np.inf, 0.0], np.float32))
    assert (found.status, found.different, math.isnan(found.largest)) == ("changed", 1, True)
    found = compare(a[1:], np.array([np.inf, np.inf, 0.0], np.float32))
    assert (found.status, found.largest) == ("changed", math.inf)
    assert math.isnan((Difference() + compare(a, np.ones(4, np.float32)) + compare(a[3:], a[3:])).largest)


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (F32, F32), (BF16, F32), (F16, BF16), (F32, FP8)])
def test_float32_counts_what_float64_counts(dtypes: tuple[np.dtype, np.dtype]) -> None:
    """Of neighbours, of numbers a step and a half apart, of some that aren't close at all; and the sums are its sums."""
    values = RNG.standard_normal(50_000) * 2.0 ** RNG.integers(-12, 4, 50_000)
    steps = spacing(values, min(dtypes, key=lambda dtype: ml_dtypes.finfo(dtype).nmant))
    other = values + steps * RNG.choice([0, 0.4, 1, 1.00001, 1.5, 2, 1000], 50_000)
    a, b = values.astype(dtypes[0]), other.clip(-400, 400).astype(dtypes[1])  # FP8 has no more
    found, wanted = compare(a, b), compare(a.astype(np.float64), b.astype(np.float64))
    x, y = a.astype(np.float64), b.astype(np.float64)
    beyond = np.abs(x - y) > spacing(np.maximum(np.abs(x), np.abs(y)), differences.coarser(*dtypes) or F32)
    assert (found.different, found.beyond, found.largest) == (wanted.different, True, wanted.largest)
    for number in range(0, 50_000, 100):
        few = slice(number, number + 2)
        assert compare(a[few], b[few]).beyond == beyond[few].any(), (a[few], b[few])
    for name in ("squares", "product", "left", "right", "total", "cosine"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=1e-5), name


def test_a_small_change_is_measured() -> None:
    """Of a part in ten million, which sums of squares of float32 wouldn't show; of numbers whose squares vanish there."""
    a = RNG.standard_normal(100_000).astype(np.float32)
    for scale in (1.0, 1e-25):
        before = (a * np.float32(scale)).astype(np.float32)
        after = (before * np.float32(1 + 2**-23)).astype(np.float32)
        found, exact = compare(before, after), after.astype(np.float64) - before.astype(np.float64)
        assert found.squares == pytest.approx(float(np.dot(exact, exact)), rel=1e-5)
        assert found.cosine == pytest.approx(1.0, abs=1e-12)


def test_sums_of_what_is_all_alike() -> None:
    """Roundings go one way there."""
    for a, b in ((1, 4 / 3), (1, 1.1), (3e-3, -2e-3)):
        x, y = np.full(1 << 20, a, np.float32), np.full(1 << 20, b, np.float32)
        found, wanted = compare(x, y), compare(x.astype(np.float64), y.astype(np.float64))
        assert found.mean == pytest.approx(wanted.mean, rel=1e-6)
        assert found.cosine == pytest.approx(wanted.cosine, abs=1e-4)
        assert -1 <= found.cosine <= 1


def test_squares_that_vanish() -> None:
    """Also of what is the same on both sides."""
    a = np.full(3, 1e-26, BF16)
    assert (compare(a, a) + compare(a, -a)).cosine == 0.0


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_complex_numbers(dtype: type) -> None:
    """An element with another imaginary part is another one; measures are of the parts."""
    a = np.array([1 + 2j, -3j, complex(math.nan, 1)], dtype)
    b = np.array([1 + 2j, 1 + 1j, complex(math.nan, 1)], dtype)
    assert compare(a, a.copy()).status == "equal"
    found = compare(a, b)
    assert (found.status, found.elements, found.different, found.largest) == ("changed", 3, 1, 4.0)


def test_integers_are_equal_or_changed() -> None:
    a = np.array([1, 2, 2**40], np.int64)
    assert compare(a, a).status == "equal"
    assert compare(a, a + np.array([0, 1, 0])).status == "changed"
    assert compare(np.array([True]), np.array([False])).status == "changed"


WIDE = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.builds(lambda power, sign, off: sign * (2**power + off), st.integers(52, 63), st.just(1), st.integers(-3, 3)),
    st.builds(lambda power, off: -(2**power) + off, st.integers(52, 62), st.integers(-3, 3)),
)


@given(WIDE, st.one_of(st.integers(-3, 3), WIDE), st.booleans(), st.booleans())
def test_integers_of_64_bits_are_compared_to_the_last_bit(value: int, off: int, adds: bool, is_real: bool) -> None:
    """Signed and unsigned ones, and beside float64, which has every other one at the most above 2⁵³."""
    other = value + off if adds else off
    dtypes = [np.uint64 if each >= 2**63 else np.int64 for each in (value, other)]
    assume(min(value, other) >= -(2**63) and max(value, other) < 2**64)
    a, b = np.array([value], dtypes[0]), np.array([other], dtypes[1])
    if is_real:
        b, other = b.astype(np.float64), int(float(other))
    for found in (compare(a, b), compare(b, a)):
        assert (found.different, found.status == "equal") == (int(value != other), value == other)
        assert found.largest == pytest.approx(abs(value - other), rel=1e-15)


def test_a_sum_that_overflows_is_of_finite_elements() -> None:
    """Squares of 1e200 are infinite in float64; the elements aren't."""
    a, b = np.array([1e200, 5.0]), np.array([1e200, 6.0])
    others = (a, b, np.array([np.inf, 5.0], np.float32))
    assert [compare(a, other).not_finite for other in others] == ["", "", "b"]
    assert (compare(a, a).relative, compare(a, a).cosine, compare(a, b).status) == (0.0, 1.0, "changed")
    assert math.isnan(compare(a, b).relative)


def test_sums_beyond_float32() -> None:
    """Squares of what bfloat16 holds overflow a float32; the angle is known all the same."""
    a = np.full(8, 1e30, BF16)
    found = compare(a, a) + compare(a, -a)
    assert (found.left, found.cosine) == (16 * float(a[0]) ** 2, 0.0)


def test_empty_and_zeros() -> None:
    empty = compare(np.zeros((0, 3), BF16), np.zeros((0, 3), BF16))
    assert (empty.status, empty.mean, empty.share, empty.cosine) == ("equal", 0.0, 0.0, 1.0)
    assert compare(np.zeros(3, BF16), np.ones(3, BF16)).cosine == 0.0


@pytest.mark.parametrize(("odd", "where"), [(np.nan, "b"), (np.inf, "b"), (0.0, "")])
def test_what_is_not_finite_points_nowhere(odd: float, where: str) -> None:
    """No angle and no relative change, where -1 would be a vector of the opposite direction."""
    a, b = np.ones(8, np.float32), np.ones(8, np.float32)
    b[3] = odd
    found = compare(a, b)
    assert found.not_finite == where
    assert [math.isnan(value) for value in (found.cosine, found.relative)] == [bool(where)] * 2
    assert compare(b, a).not_finite == where.replace("b", "a")
    assert compare(b, -b).not_finite == ("a and b" if where else "")
    if not where:
        assert found.relative == pytest.approx(8**-0.5)


SHAPES = st.lists(st.integers(0, 40), max_size=4).map(tuple)


@given(SHAPES, st.data())
@settings(deadline=None)
def test_boxes_tile_the_array(shape: tuple[int, ...], data: st.DataObject) -> None:
    grain = tuple(data.draw(st.integers(1, max(1, size))) for size in shape)
    order = data.draw(st.permutations(range(len(shape)))) if shape else []
    order = order[: data.draw(st.integers(0, len(order)))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(differences, "BOX_BYTES", data.draw(st.integers(2, 300)))
        patch.setattr(differences, "MOST_BYTES", most := data.draw(st.integers(300, 3000)))
        boxes = list(cut(shape, 2, order, grain))
    seen = np.zeros(shape, np.int64)
    for box in boxes:
        seen[tuple(slice(*span) for span in box)] += 1
        assert volume(box) * 2 <= most
    assert (seen == 1).all()


def test_chunks_are_whole_where_they_fit() -> None:
    """Chunks of 4 MiB in bfloat16: four in a box, along the axis that is cut first."""
    boxes = list(cut((4096, 8, 2048), 2, (1, 0), (2048, 1, 1024)))
    assert len(boxes) == 8
    assert boxes[0] == ((0, 4096), (0, 1), (0, 2048))
