"""How far two arrays are apart, told from their boxes: equal, rounded, or changed, and by how much."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Iterator, Sequence

import ml_dtypes
import numpy as np

from weightbeam.model_mappings.boxes import Box
from weightbeam.model_mappings.plan import is_float

BOX_BYTES = 16 << 20  # of one side, read at a time
MOST_BYTES = 256 << 20  # the same where a chunk has to be read whole
# elements that are compared at a time: what is made of them stays in a cache, and threads seldom wait for the GIL, which
# took half as long again with a quarter of them
CACHED = 1 << 18
GLANCE = 64  # elements that tell of most arrays which differ that they do
FEWEST = 2.0**-100  # a sum of squares in float32 that is less has lost some of them
EXPONENT = np.uint32(0x7F800000)  # the bits of a float32 that are 2^e of its magnitude
EQUAL, ROUNDED, CHANGED = "equal", "rounded", "changed"


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """How far two arrays, or the same boxes of both, are apart. NaN equals NaN.

    What is counted is exact. The largest difference is that of float32. Sums are of float32 in
    chunks, whose roundings add up to a part in ten thousand where all elements are alike, and of float64.

    Attributes:
      elements, different: how many were compared, and how many of them aren't equal.
      beyond: whether one is further apart than one step between neighbouring numbers of the coarser dtype.
      largest, total: of the absolute differences.
      squares, product, left, right: sums of (a - b)², a · b, a², b²; the latter two are NaN where an element isn't
        finite, infinite where only the sum is.
    """

    elements: int = 0
    different: int = 0
    beyond: bool = False
    largest: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    product: float = 0.0
    left: float = 0.0
    right: float = 0.0

    def __add__(self, other: Difference) -> Difference:
        return Difference(
            self.elements + other.elements,
            self.different + other.different,
            self.beyond or other.beyond,
            _larger(self.largest, other.largest),
            self.total + other.total,
            self.squares + other.squares,
            self.product + other.product,
            self.left + other.left,
            self.right + other.right,
        )

    @property
    def status(self) -> str:
        """`equal`; `rounded` where no element is further off than rounding once explains; else `changed`."""
        return CHANGED if self.beyond else ROUNDED if self.different else EQUAL

    @property
    def mean(self) -> float:
        """Of the absolute differences, over all elements."""
        return self.total / self.elements if self.elements else 0.0

    @property
    def share(self) -> float:
        """Of the elements that differ."""
        return self.different / self.elements if self.elements else 0.0

    @property
    def cosine(self) -> float:
        """Of the angle between the two; 1 where both are zeros or nothing differs, NaN where one of the sums isn't finite."""
        if not self.different:
            return 1.0
        norm = math.sqrt(self.left) * math.sqrt(self.right)
        if not math.isfinite(self.product) or not math.isfinite(norm):
            return math.nan
        return min(1.0, max(-1.0, self.product / norm)) if norm else 0.0

    @property
    def relative(self) -> float:
        """The norm of the difference over that of the first; NaN where one of the sums isn't finite, infinite where the
        first is zeros.
        """
        if not self.different:
            return math.nan if self.not_finite else 0.0
        if not all(map(math.isfinite, (self.squares, self.left, self.right))):
            return math.nan
        return math.sqrt(self.squares / self.left) if self.left else math.inf

    @property
    def not_finite(self) -> str:
        """Which of the two has elements that are NaN or infinite: `a`, `b`, `a and b`, or neither."""
        return " and ".join(name for name, held in (("a", self.left), ("b", self.right)) if math.isnan(held))


def _larger(a: float, b: float) -> float:
    """The larger of two; NaN if one is."""
    return a if a >= b or math.isnan(a) else b


def compare(a: np.ndarray, b: np.ndarray) -> Difference:
    """How far two arrays of one shape are apart, of any dtypes."""
    return compare_each([a], b)[0]


def compare_each(
    firsts: Sequence[np.ndarray], second: np.ndarray, steps: Sequence[np.dtype | None] | None = None
) -> list[Difference]:
    """How far each of several arrays is from a second one, of one shape, of any dtypes: a few elements of all of
    them after the other, so that the second is read and widened once.

    Args:
      firsts, second: the arrays.
      steps: for each of the firsts the dtype whose rounding may explain a difference; the coarser one of both unless said.
    """
    steps = steps or [coarser(first.dtype, second.dtype) for first in firsts]
    flat, *others = (np.ascontiguousarray(array).reshape(-1) for array in (second, *firsts))
    found = [Difference()] * len(others)
    with np.errstate(all="ignore"):
        for start in range(0, flat.size, CACHED):
            part = slice(start, start + CACHED)
            chunk = _Chunk(flat[part])
            found = [
                held + chunk.compare(other[part], None if held.beyond else step)
                for held, other, step in zip(found, others, steps, strict=True)
            ]
    return found


def coarser(*dtypes: np.dtype) -> np.dtype | None:
    """The floating-point dtype with the fewest bits of mantissa, whose rounding may explain a difference; None where all
    hold integers.
    """
    floats = filter(is_float, dtypes)
    return min(floats, key=lambda dtype: ml_dtypes.finfo(dtype).nmant, default=None)


class _Chunk:
    """Some elements of the second array, and the same in float32, where that holds them."""

    def __init__(self, values: np.ndarray):
        self._values = values
        self._wide: np.ndarray | None = None
        if _is_narrow(values.dtype):
            self._wide = _ROOM.second[: values.size]
            np.copyto(self._wide, values)
            self._square = float(np.dot(self._wide, self._wide))

    def compare(self, first: np.ndarray, step: np.dtype | None) -> Difference:
        """How far the same elements of a first array are from them.

        Args:
          first: of the first array.
          step: see `compare_each`; None of integers, and where one was beyond it already, so that nobody asks.
        """
        second = self._values
        if "c" in (first.dtype.kind, second.dtype.kind):
            return _compare_complex(first, second)
        if _is_same(first[:GLANCE], second[:GLANCE]) and _is_same(first, second):  # most of what is compared
            if self._wide is None or not FEWEST < (square := self._square) < math.inf:
                square = _square(second.astype(np.float64))
            return Difference(second.size, product=square, left=square, right=square)
        found = None
        if self._wide is not None and _is_narrow(first.dtype):
            found = _compare_float32(first, self._wide, self._square, step)
        return found or _compare_float64(first, second, step)


def _is_narrow(dtype: np.dtype) -> bool:
    """Whether float32 holds all numbers of a dtype."""
    return is_float(dtype) and dtype.itemsize <= 4


def _is_same(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are the same bit by bit."""
    return a.dtype == b.dtype and np.array_equal(a.view(np.uint8), b.view(np.uint8))


def _compare_float32(a: np.ndarray, y: np.ndarray, right: float, step: np.dtype | None) -> Difference | None:
    """In float32: six times as fast. None where squares are too large or too small for that, or something isn't finite.

    Two numbers that are a step apart are within a factor of two of each other, so that their difference is exact
    (Sterbenz): what is counted is what float64 counts.

    Args:
      a: of the first array.
      y, right: of the second one, in float32; and the sum of its squares.
      step: see `_is_beyond`; None where that isn't asked.
    """
    x, off, steps = (array[: a.size] for array in (_ROOM.first, _ROOM.off, _ROOM.steps))
    np.copyto(x, a)
    np.subtract(x, y, out=off)
    left, squares = float(np.dot(x, x)), float(np.dot(off, off))
    # of what is close, what the sums have lost cancels out in the cosine so
    product = (left + right - squares) / 2 if squares < min(left, right) else float(np.dot(x, y))
    np.abs(off, out=off)
    different = int(np.count_nonzero(np.not_equal(off, 0, out=steps.view(bool)[: a.size])))
    if not all(FEWEST < held < math.inf for held in (left, right, squares if different else 1.0)):
        return None
    furthest = int(off.argmax())
    largest = abs(float(x[furthest]) - float(y[furthest]))
    beyond = step is not None and _is_beyond(x, y, off, step, steps)
    return Difference(a.size, different, beyond, largest, float(off.sum()), squares, product, left, right)


def _is_beyond(x: np.ndarray, y: np.ndarray, off: np.ndarray, step: np.dtype, steps: np.ndarray) -> bool:
    """Whether an element is further off than what `spacing` says of the larger magnitude. Takes `x` and `steps` for
    itself.
    """
    info, bits = ml_dtypes.finfo(step), steps.view(np.uint32)
    np.maximum(np.abs(x, out=x), np.abs(y, out=steps), out=steps)
    np.bitwise_and(bits, EXPONENT, out=bits)
    np.multiply(steps, np.float32(2.0 ** -int(info.nmant)), out=steps)
    np.maximum(steps, np.float32(2.0 ** (int(info.minexp) - int(info.nmant))), out=steps)
    return bool(np.greater(off, steps, out=x.view(bool)[: x.size]).any())


class _Room(threading.local):
    """Arrays of this thread's: what is made anew each time is given back to the system, and its pages cost as much as
    the arithmetic.
    """

    def __init__(self) -> None:
        self.first, self.second, self.off, self.steps = (np.empty(CACHED, np.float32) for _ in range(4))


_ROOM = _Room()


def _compare_complex(a: np.ndarray, b: np.ndarray) -> Difference:
    """By real and by imaginary parts, which count as one element."""
    found = sum((_compare_float64(part(a), part(b), None) for part in (np.real, np.imag)), Difference())
    wrong = (a != b) & ~(np.isnan(a) & np.isnan(b))
    return dataclasses.replace(found, elements=a.size, different=int(np.count_nonzero(wrong)))


def _compare_float64(a: np.ndarray, b: np.ndarray, step: np.dtype | None) -> Difference:
    """In float64: any real dtypes, any values."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    off = np.where(x == y, 0.0, x - y) + (_lost(a, x) - _lost(b, y))  # infinity less infinity is NaN
    wrong = (off != 0) & ~(np.isnan(x) & np.isnan(y))
    count = int(np.count_nonzero(wrong))
    left, right = _square(x), _square(y)
    if not count:
        return Difference(x.size, product=left, left=left, right=right)
    off = np.abs(off[wrong])
    beyond = True
    if step is not None:
        steps = spacing(np.maximum(np.abs(x[wrong]), np.abs(y[wrong])), step)
        beyond = not bool(np.all(off <= steps))
    largest, total, squares = float(off.max()), float(off.sum()), float(np.dot(off, off))
    return Difference(x.size, count, beyond, largest, total, squares, float(np.dot(x, y)), left, right)


def _square(wide: np.ndarray) -> float:
    """The sum of squares; NaN where an element isn't finite."""
    held = float(np.dot(wide, wide))
    return held if math.isfinite(held) or np.isfinite(wide).all() else math.nan


def _lost(values: np.ndarray, wide: np.ndarray) -> np.ndarray | float:
    """What values, integers of 64 bits above all, have more than themselves in float64: exact, as their upper and their
    lower 32 bits are, and as the few bits are that remain of them.
    """
    if values.dtype.kind not in "iu" or values.dtype.itemsize < 8:
        return 0.0
    low = np.fmod(values, 1 << 32)
    return (values - low).astype(np.float64) - wide + low.astype(np.float64)


def spacing(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The distance between neighbouring numbers of a dtype at the magnitude of each value."""
    info = ml_dtypes.finfo(dtype)
    exponent = np.maximum(np.frexp(values)[1] - 1, int(info.minexp))
    return np.ldexp(1.0, exponent - int(info.nmant))


def cut(shape: Sequence[int], itemsize: int, order: Sequence[int], grain: Sequence[int]) -> Iterator[Box]:
    """Boxes that together are the whole of an array, each of about `BOX_BYTES`.

    Args:
      shape, itemsize: of the array.
      order: its axes in the order in which cutting costs least.
      grain: extents that are read whole, on each axis; kept unless that takes more than `MOST_BYTES`.
    """
    extents = list(shape)
    others = [axis for axis in range(len(shape)) if axis not in order]
    for limit, grains in ((BOX_BYTES, grain), (MOST_BYTES, (1,) * len(shape))):
        for axis in (*order, *others):
            held = math.prod(extents) * itemsize
            if held > limit:
                fits = limit * extents[axis] // held
                whole = fits // grains[axis] * grains[axis] or grains[axis]
                extents[axis] = max(1, min(extents[axis], whole))
    starts = [range(0, size, step) if size else () for size, step in zip(shape, extents, strict=True)]
    for first in itertools.product(*starts):
        yield tuple((at, min(at + step, size)) for at, step, size in zip(first, extents, shape, strict=True))
