"""The crc32c of a file that was read in pieces, by many and in any order: it follows from those of the pieces by
arithmetic.

A unit notes the crc32c of each stretch that it reads (`sum_ranges`). Who has all notes knows which stretches of a file
were read (`chain`), reads the little that nobody had a use for, such as the header, and puts the checksum of the whole
together (`crc32c_of`). So bytes that came over a network are checked without being read twice.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import google_crc32c
import numpy as np

from weightbeam.formats.storage import ByteRange

# crc32c's polynomial, bits reversed: the coefficient of x^0 is the highest bit (RFC 3720, appendix B.4)
CASTAGNOLI = 0x82F63B78
ONE = 1 << 31  # the polynomial 1


class Stretch(NamedTuple):
    """Bytes `start` to `stop` of a file, and their crc32c."""

    start: int
    stop: int
    crc32c: int


def sum_ranges(ranges: Iterable[ByteRange]) -> list[Stretch]:
    """The checksums of what was read, in the order of the ranges; those that adjoin are one stretch."""
    found: list[Stretch] = []
    for start, buffer in ranges:
        stretch = Stretch(start, start + len(buffer), google_crc32c.value(np.frombuffer(buffer, np.uint8)))
        if found and found[-1].stop == start:
            stretch = Stretch(found[-1].start, stretch.stop, crc32c_of([found.pop(), stretch]))
        found.append(stretch)
    return found


def chain(stretches: Iterable[Stretch], size: int) -> tuple[list[Stretch], list[tuple[int, int]]]:
    """What is known of a file of `size` bytes: stretches that don't overlap, and the gaps between them, both in order.

    Of stretches that overlap, the one that begins first counts, and of those that begin alike the longest.
    """
    known: list[Stretch] = []
    gaps: list[tuple[int, int]] = []
    at = 0
    for stretch in sorted(stretches, key=lambda stretch: (stretch.start, -stretch.stop)):
        if stretch.start < at or stretch.start == stretch.stop:
            continue
        if at < stretch.start:
            gaps.append((at, stretch.start))
        known.append(stretch)
        at = stretch.stop
    if at < size:
        gaps.append((at, size))
    return known, gaps


def crc32c_of(stretches: Iterable[Stretch]) -> int:
    """The crc32c of stretches one behind the other."""
    return functools.reduce(lambda crc, part: combine(crc, part.crc32c, part.stop - part.start), stretches, 0)


def combine(first: int, second: int, length: int) -> int:
    """The crc32c of two byte strings one behind the other, from that of each and the length of the second.

    A crc is a remainder modulo a polynomial over GF(2), so `length` bytes behind the first multiply it by x^(8·length);
    the inversions before and after cancel out (Mark Adler, zlib's `crc32_combine`).
    """
    return _times(first, _shift(length)) ^ second


@functools.lru_cache(4096)  # most stretches have one of a few lengths
def _shift(length: int) -> int:
    """x^(8·length), modulo the polynomial."""
    power, square = ONE, 1 << 30  # 1, x
    bits = 8 * length
    while bits:
        if bits & 1:
            power = _times(power, square)
        square = _times(square, square)
        bits >>= 1
    return power


def _times(a: int, b: int) -> int:
    """The product of two polynomials, modulo the polynomial."""
    product = 0
    for power in range(32):
        if a & (ONE >> power):
            product ^= b
        b = b >> 1 ^ (CASTAGNOLI if b & 1 else 0)
    return product
