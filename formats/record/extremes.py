"""What the bits of floating-point values tell at once: whether any of them is NaN or infinite, and whether all are
zeros.

As integers, values with a clear sign bit are in the order of their magnitudes, and NaN and the infinities come last. So
the largest of the bits read as a signed integer judges the positive values, and the largest read as an unsigned one the
negative values:

    bfloat16        0.0    1.0    inf    NaN  |  -0.0   -1.0   -inf   -NaN
    bits            0000   3f80   7f80   7fc0 |  8000   bf80   ff80   ffc0
    signed max      ──────────────▸              (negative)
    unsigned max                                 ──────────────▸
"""

from __future__ import annotations

import numpy as np

from weightbeam.model_mappings.boxes import Box

# the bits of infinity, by dtype; of the codes of FP8, which haven't got it, of NaN
INFINITE = {
    "bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000, "float64": 0x7FF0 << 48, "float8_e5m2": 0x7C, "float8_e4m3fn": 0x7F,
}  # fmt: skip


class Extremes:
    """What is known of the values that were shown.

    Attributes:
      is_finite: whether none of them is NaN or infinite; of dtypes that have neither always.
      is_zero: whether all of them are zeros, of whichever sign; of integers never, since those aren't weights.
    """

    def __init__(self, dtype: np.dtype):
        self._infinite, size = INFINITE.get(dtype.name), min(dtype.itemsize, 8)
        self._signed, self._unsigned, self._sign = np.dtype(f"i{size}"), np.dtype(f"u{size}"), 1 << (8 * size - 1)
        self.is_finite, self.is_zero = True, self._infinite is not None

    def look(self, values: np.ndarray) -> None:
        """Takes values into account, (n,) side by side. Best in pieces that stay in the cache."""
        if self._infinite is None or not values.size:
            return
        positive = int(np.maximum.reduce(values.view(self._signed)))
        negative = int(np.maximum.reduce(values.view(self._unsigned)))
        self.is_finite = self.is_finite and positive < self._infinite and negative < self._sign + self._infinite
        self.is_zero = self.is_zero and positive <= 0 and negative <= self._sign


SEEN = "seen"  # in a unit's ledger entry: what is to be said of its values, by tensor
NOT_FINITE = "not_finite"  # field of a record: the tensors with values that are NaN or infinite, and how many of each


def count_odd(values: np.ndarray, extremes: Extremes) -> tuple[int, int]:
    """How many values are NaN, and how many infinite; `extremes` are of what they are a share of."""
    if extremes.is_finite:
        return 0, 0
    wide = values.astype(np.float32)
    return int(np.count_nonzero(np.isnan(wide))), int(np.count_nonzero(np.isinf(wide)))


def see_infinite(key: str, box: Box, values: np.ndarray, extremes: Extremes) -> dict[str, tuple[int, int, int]]:
    """What of values isn't finite: counts of NaN and of infinities, and of no zeros, by the key of what they are a share
    of; empty where all are finite.
    """
    odd = count_odd(values, extremes)
    return {key: (*odd, 0)} if any(odd) else {}
