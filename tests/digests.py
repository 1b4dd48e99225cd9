"""What tells whether two arrays are the same, where they are in two processes or were made at two times."""

from __future__ import annotations

import hashlib

import numpy as np


def digest(array: np.ndarray) -> list:
    """`[shape, dtype, sha256]`, as MaxText's digests are written."""
    return [list(array.shape), array.dtype.name, hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()]
