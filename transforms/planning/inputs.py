"""The inputs of a plan as bytes that are staged, and the hash that identifies what follows from them."""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weightbeam import __version__, formats, model_mappings, transforms
from weightbeam.formats.storage.strict_json import MAX_TOGETHER, MAX_VALUES

# what was read for a plan has half of that at most
MOST_BYTES, MOST_VALUES = 2 * MAX_TOGETHER, 2 * MAX_VALUES


def pack_inputs(inputs: Mapping[str, Any]) -> bytes:
    """The inputs, compressed; of the same inputs always the same bytes."""
    return gzip.compress(json.dumps(inputs).encode(), compresslevel=5, mtime=0)


def unpack_inputs(staged: bytes) -> dict[str, Any]:
    """The inputs that `pack_inputs` packed.

    Raises:
      OSError, EOFError, zlib.error, ValueError: it didn't make these bytes, or they are damaged.
    """
    text = gzip.GzipFile(fileobj=io.BytesIO(staged)).read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES or sum(text.count(mark) for mark in b"{[:,") > MOST_VALUES:
        raise ValueError(f"more than {MOST_BYTES:,} bytes or {MOST_VALUES:,} values, which no plan has")
    try:
        inputs = json.loads(text)
    except RecursionError as e:
        raise ValueError("too deep for the inputs of a plan") from e
    if not isinstance(inputs, dict):
        raise ValueError("the inputs of a plan should be an object")
    return inputs


@functools.cache
def this_code() -> str:
    """Identifies the code of this process that plans, reads, computes and writes, by the bytes of its modules. What
    another one has begun isn't gone on with: it may have read or computed otherwise.
    """
    identity = Identity()
    identity.add(__version__)  # all there is to tell of modules without their source
    for root in sorted(Path(str(package.__file__)).parent for package in (formats, model_mappings, transforms)):
        for path in modules_of(root):
            identity.add(root.name, path.relative_to(root).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest())
    return identity.hash


def modules_of(package: Path) -> list[Path]:
    """The files of a package's modules; not an editor's lock, `.#x.py`, which leads nowhere."""
    return sorted(package.rglob("[!.]*.py"))


class Identity:
    """A hash of facts, in the order in which they are added."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, *facts: object) -> None:
        """Adds facts that JSON can say."""
        self._hash.update(json.dumps(facts, sort_keys=True).encode())

    @property
    def hash(self) -> str:
        """Of all that was added until now, in hexadecimal."""
        return self._hash.hexdigest()
