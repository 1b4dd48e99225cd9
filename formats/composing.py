"""A large object of a bucket, put together of component objects that many have written: none of its bytes pass through here again.

Google Cloud Storage composes at most 32 objects at a time, and takes a composed object as a component again. So a file of 40
components takes three requests:

    parts 0 … 31 ─▸ first ┐
    parts 32 … 39 ─▸ rest ┴─▸ file

What a component holds is known by its crc32c, which its writer computed and the store checked. The checksum of the whole follows
from them by arithmetic, and the composed object has to have it.
"""

from __future__ import annotations

import base64
import concurrent.futures
import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from weightbeam.formats.storage import StorageError

if TYPE_CHECKING:
    from weightbeam.formats.storage.bucket import Bucket

MAX_COMPONENTS = 32  # of one request (cloud.google.com/storage/quotas#objects)
CASTAGNOLI = 0x82F63B78  # crc32c's polynomial, bits reversed: the coefficient of x^0 is the highest bit (RFC 3720, appendix B.4)
ONE = 1 << 31  # the polynomial 1


class Component(NamedTuple):
    """A stretch of a file that lies in an object of its own.

    Attributes:
      start, stop: bytes of the file.
      name: of the object.
      crc32c: of its bytes.
    """

    start: int
    stop: int
    name: str
    crc32c: int


def check_tiling(file: str, components: Sequence[Component], size: int) -> None:
    """Makes sure that components, in order, are the whole file.

    Raises:
      ValueError: something is missing, or there twice.
    """
    at = 0
    for part in components:
        if part.start != at:
            raise ValueError(f"{file}: bytes {min(at, part.start):,} to {max(at, part.start):,} {'are missing' if part.start > at else 'were written twice'}")
        at = part.stop
    if at != size:
        raise ValueError(f"{file}: has {at:,} bytes, expected {size:,}")


def crc32c_of(components: Iterable[Component]) -> int:
    """The crc32c of components one behind the other."""
    return functools.reduce(lambda crc, part: combine(crc, part.crc32c, part.stop - part.start), components, 0)


def combine(first: int, second: int, length: int) -> int:
    """The crc32c of two byte strings one behind the other, from that of each and the length of the second.

    A crc is a remainder modulo a polynomial over GF(2), so `length` bytes behind the first multiply it by x^(8·length); the
    inversions before and after cancel out (Mark Adler, zlib's `crc32_combine`).
    """
    return _times(first, _shift(length)) ^ second


@functools.lru_cache(4096)  # most components have the same length
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


def compose(bucket: Bucket, name: str, components: Sequence[Component], scratch: str) -> None:
    """Makes an object of components, unless it is there; intermediate ones lie below `scratch`, which is the caller's to delete.

    Raises:
      StorageError: a component is gone, or what came out isn't what was written.
    """
    size, crc = components[-1].stop, base64.b64encode(crc32c_of(components).to_bytes(4, "big")).decode()

    def is_whole() -> bool:
        found = bucket.stat(name)
        return found is not None and (found.size, found.crc32c) == (size, crc)

    if is_whole():
        return
    level, names = 0, [part.name for part in components]
    try:
        with concurrent.futures.ThreadPoolExecutor(bucket.at_a_time) as pool:
            while len(names) > MAX_COMPONENTS:
                groups = [names[at : at + MAX_COMPONENTS] for at in range(0, len(names), MAX_COMPONENTS)]
                made = [f"{scratch}/{level}.{number}" for number in range(len(groups))]
                list(pool.map(bucket.compose, made, groups))
                level, names = level + 1, made
        bucket.compose(name, names)
    except FileNotFoundError as e:
        if is_whole():  # by one who went on with this meanwhile
            return
        raise StorageError(f"{bucket.path(name)}: a component is gone: {e}; begin anew with --overwrite") from e
    if not is_whole():
        bucket.delete(name)
        raise StorageError(f"{bucket.path(name)}: what was composed isn't what was written: another size or crc32c")
