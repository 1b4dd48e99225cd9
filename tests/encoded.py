"""More of what the tests of quantised formats share (`stored.py`): one encoding of a checkpoint, all bytes, and
comparisons that know NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from stored import decode, slices

from weightbeam.formats.encodings import Encoding
from weightbeam.formats.release.source import ReleaseTensors
from weightbeam.model_mappings.boxes import Box, whole


def only(source: ReleaseTensors) -> Encoding:
    """The encoding of a source's one weight, against which nothing stands."""
    assert not source.problems, "\n".join(map(str, source.problems))
    (encoding,) = source.encodings.values()
    return encoding


def bits(values: np.ndarray) -> np.ndarray:
    """The bit patterns, so that -0 differs from 0."""
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def assert_bits(got: np.ndarray, wanted: np.ndarray) -> None:
    """The same bit patterns; NaNs count as alike."""
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    lost = np.isnan(wanted.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), lost)
    np.testing.assert_array_equal(bits(got)[~lost], bits(wanted)[~lost])


def assert_boxes_are_slices(encoding: Encoding, boxes: Sequence[Box], dtype: Any = np.float32) -> None:
    """A box decodes to what the slice of the whole is, and reads no more bytes than the whole."""
    everything = decode(encoding, dtype=dtype)
    total = sum(read.nbytes for read in encoding.reads(whole(encoding.shape)))
    for box in boxes:
        assert_bits(decode(encoding, box, dtype), everything[slices(box)])
        assert sum(read.nbytes for read in encoding.reads(box)) <= total


def codes(shape: Sequence[int], seed: int = 0, dtype: Any = np.uint8) -> np.ndarray:
    """Random bytes; all 256 where there is room."""
    random = np.random.default_rng(seed).integers(0, 256, math.prod(shape), np.uint8)
    random[:256] = np.arange(256)[: len(random)]
    return random.reshape(shape).view(dtype)
