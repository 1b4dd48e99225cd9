"""The kernel of all formats that pack small codes into bytes, with a scale for each run of codes along a row.

    value[row, i] = (meaning of code[row, i] - zero[row, group of i]) · scale[row, group of i]

It is a table of what each byte means, one multiplication in float32 and one cast, strip by strip. int4, int8, 2 and 1
bits (`packed.py`), nf4 and fp4 (`bitsandbytes.py`) and E2M1 (MXFP4, NVFP4) differ in the table alone:

    byte_table(np.arange(16) - 8)               # int4 with an offset, the low nibble first
    byte_table(E2M1)                            # the 16 values of FP4, the low nibble first
    byte_table(quant_map, high_first=True)      # bitsandbytes
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from weightbeam.formats.encodings.encoding import ContentError

# values decoded at a time: their float32 form and the indices of their bytes stay in the cache
STRIP_ELEMENTS = 1 << 16


def byte_table(meanings: np.ndarray, high_first: bool = False) -> np.ndarray:
    """What each byte means: (256, codes in a byte) float32.

    Args:
      meanings: the value of each code; as many as a code of 1, 2, 4 or 8 bits has.
      high_first: whether the first code of a byte is in its high bits.
    """
    bits = {2: 1, 4: 2, 16: 4, 256: 8}[len(meanings)]
    shifts = np.arange(0, 8, bits)
    codes = np.arange(256)[:, np.newaxis] >> (shifts[::-1] if high_first else shifts) & len(meanings) - 1
    return np.ascontiguousarray(meanings, np.float32)[codes]


class ScaleError(ContentError):
    """A scale is NaN or infinite."""


class Located(Protocol):
    """Something with a name in something with a path."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> str: ...


def finite(scales: np.ndarray, tensor: Located) -> np.ndarray:
    """Scales in float32.

    Raises:
      ScaleError: one of them is NaN or infinite.
    """
    scales = scales.astype(np.float32)
    if not np.isfinite(scales).all():
        raise ScaleError(
            f"{tensor.name} in {tensor.path} holds a scale that is NaN or infinite; the weights it belongs to are lost"
        )
    return scales


@np.errstate(over="ignore", invalid="ignore")  # a value beyond the largest float is infinite
def decode_rows(
    packed: np.ndarray,
    table: np.ndarray,
    scales: np.ndarray,
    group: int | np.ndarray,
    values: np.ndarray,
    start: int = 0,
    zeros: np.ndarray | None = None,
    which: np.ndarray | None = None,
) -> None:
    """Fills `values` with the codes from number `start` of each row on; one rounding to float32, and one to the dtype
    of `values`.

    Args:
      packed: (row, byte) uint8; its first byte holds the code `start`. More bytes than needed do no harm.
      table: what `byte_table` made.
      scales: (row of scales, group) float32; its first group is the one of the code `start`.
      group: how many codes have one scale, or for each of the values the index of its scale.
      values: (row, column), to be filled.
      start: the number of the first value in its row.
      zeros: of the shape of `scales`; subtracted before scaling. Exact for integers.
      which: for each row its row of scales, which never decreases; None where each has its own.
    """
    rows, columns = values.shape
    per_byte = table.shape[1]
    skip = start % per_byte
    width = -(-(skip + columns) // per_byte)
    strip = max(1, STRIP_ELEMENTS // max(1, width * per_byte))
    buffer = np.empty((min(strip, rows), width, per_byte), np.float32)
    for row in range(0, rows, strip):
        these = slice(row, min(row + strip, rows))
        codes = buffer[: these.stop - row]
        np.take(table, packed[these, :width], axis=0, mode="clip", out=codes)
        part = codes.reshape(len(codes), -1)[:, skip : skip + columns]
        mine = these if which is None else _rows_of_scales(which[these])
        scale_groups(part, scales[mine], group, start, None if zeros is None else zeros[mine])
        values[these] = part


def _rows_of_scales(which: np.ndarray) -> np.ndarray | slice:
    """An index of the rows of scales of a strip: one row for all of it, or one for each."""
    return slice(which[0], which[0] + 1) if which[0] == which[-1] else which


@np.errstate(over="ignore", invalid="ignore")  # a value beyond the largest float is infinite
def scale_rows(part: np.ndarray, scales: np.ndarray, which: np.ndarray, zeros: np.ndarray | None = None) -> None:
    """`part = (part - zeros) · scales` in place, with scales that belong to columns, and the row of them that each row
    has.
    """
    edges = np.flatnonzero(np.diff(which)) + 1
    if 4 * len(edges) > len(part):
        if zeros is not None:
            part -= np.take(zeros, which, axis=0)
        part *= np.take(scales, which, axis=0)
        return
    # neighbours with one row of scales at a time
    for first, last in zip([0, *edges], [*edges, len(part)], strict=True):
        if zeros is not None:
            part[first:last] -= zeros[which[first]]
        part[first:last] *= scales[which[first]]


def scale_groups(
    part: np.ndarray, scales: np.ndarray, group: int | np.ndarray, start: int, zeros: np.ndarray | None
) -> None:
    """`part = (part - zeros) · scales` in place; see `decode_rows`."""
    if isinstance(group, np.ndarray):
        if zeros is not None:
            part -= np.take(zeros, group, axis=1, mode="clip")
        part *= np.take(scales, group, axis=1, mode="clip")
        return
    for columns, groups in runs(start, start + part.shape[1], group):
        grouped = part[:, columns].reshape(len(part), groups.stop - groups.start, -1)
        if zeros is not None:
            grouped -= zeros[:, groups, np.newaxis]
        grouped *= scales[:, groups, np.newaxis]


def runs(start: int, stop: int, group: int) -> Iterator[tuple[slice, slice]]:
    """Cuts [start, stop) into parts of equally long shares of groups: the end of a group, whole groups, the beginning
    of one.

    Yields:
      The columns of a part, counted from `start`, and its groups, counted from the one of `start`.
    """
    head = min(stop, -(-start // group) * group)
    tail = max(head, stop // group * group)
    for first, last in ((start, head), (head, tail), (tail, stop)):
        if first < last:
            yield (
                slice(first - start, last - start),
                slice(first // group - start // group, -(-last // group) - start // group),
            )
