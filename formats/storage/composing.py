"""A large object of a bucket, put together of component objects that many have written: none of its bytes pass through
here again.

Google Cloud Storage composes at most 32 objects at a time, and takes a composed object as a component again. So a file
of 40 components takes three requests:

    parts 0 … 31 ─▸ first ┐
    parts 32 … 39 ─▸ rest ┴─▸ file

What a component holds is known by its crc32c, which its writer computed and the store checked. The checksum of the
whole follows from them by arithmetic (`checksums.py`), and the composed object has to have it.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from weightbeam.formats.storage import StorageError
from weightbeam.formats.storage.checksums import Stretch, crc32c_of
from weightbeam.formats.storage.store import as_base64

if TYPE_CHECKING:
    from weightbeam.formats.storage.bucket import Bucket

MAX_COMPONENTS = 32  # of one request (cloud.google.com/storage/quotas#objects)


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
            raise ValueError(
                f"{file}: bytes {min(at, part.start):,} to {max(at, part.start):,} {'are missing' if part.start > at else 'were written twice'}"
            )
        at = part.stop
    if at != size:
        raise ValueError(f"{file}: has {at:,} bytes, expected {size:,}")


def compose(bucket: Bucket, name: str, components: Sequence[Component], scratch: str) -> None:
    """Makes an object of components, unless it is there; intermediate ones lie below `scratch`, which is the caller's
    to delete.

    Raises:
      StorageError: a component is gone, or what came out isn't what was written.
    """
    stretches = (Stretch(part.start, part.stop, part.crc32c) for part in components)
    size, crc = components[-1].stop, as_base64(crc32c_of(stretches))

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
