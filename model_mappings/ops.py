"""Value operations: what MaxText folds into a weight. Two are enough for every family.

They run in float32 and are followed by exactly one cast to the stored dtype (`docs/explanation/numerics.md`).
"""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np


def dtype_named(name: str) -> np.dtype:
    """A dtype by its name, ml_dtypes' included."""
    return np.dtype(getattr(ml_dtypes, name, name))


@dataclasses.dataclass(frozen=True)
class Scale:
    """Multiplies by a constant that is itself rounded to `constant_dtype` first, as MaxText does; or divides by it.

    Its inverse divides: x / c isn't x · (1 / c).

    Attributes:
      by: the constant, before it is rounded.
      constant_dtype: that it is rounded to.
      divides: whether it is divided by.

    Example:
      >>> query = Scale(128**-0.5)
      >>> print(query, "·", query.inverse)
      scaled by 0.0883883 · divided by 0.0883883
      >>> Scale(0.5).is_exact, query.is_exact
      (True, False)
    """

    by: float
    constant_dtype: str = "float32"
    divides: bool = False

    @property
    def constant(self) -> np.float32:
        """The constant as it is used, rounded."""
        return np.float32(np.asarray(self.by).astype(dtype_named(self.constant_dtype)))

    @property
    def is_exact(self) -> bool:
        """A power of two moves the exponent only, exact in every float dtype but for under- and overflow."""
        return math.frexp(float(self.constant))[0] == 0.5

    @property
    def inverse(self) -> Scale:
        """What undoes it."""
        return dataclasses.replace(self, divides=not self.divides)

    def apply(self, values: np.ndarray) -> np.ndarray:
        """The values that MaxText holds.

        Args:
          values: of a release, float32, of any shape.

        Returns:
          float32, of the same shape.
        """
        return values / self.constant if self.divides else values * self.constant

    def __str__(self) -> str:
        return f"divided by {self.constant:.6g}" if self.divides else f"scaled by {self.constant:.6g}"


@dataclasses.dataclass(frozen=True)
class Shift:
    """Adds a constant (Gemma's norms: Hugging Face stores w, MaxText 1 + w).

    Attributes:
      by: the constant, a float32.

    Example:
      >>> print(Shift(1.0), "·", Shift(1.0).inverse)
      shifted by +1 · shifted by -1
    """

    by: float

    is_exact = False

    @property
    def inverse(self) -> Shift:
        """What undoes it."""
        return Shift(-self.by)

    def apply(self, values: np.ndarray) -> np.ndarray:
        """The values that MaxText holds.

        Args:
          values: of a release, float32, of any shape.

        Returns:
          float32, of the same shape.
        """
        return values + np.float32(self.by)

    def __str__(self) -> str:
        return f"shifted by {self.by:+g}"


Op = Scale | Shift


def inverses(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """What undoes `ops`, in the order in which it is applied."""
    return tuple(op.inverse for op in reversed(ops))
