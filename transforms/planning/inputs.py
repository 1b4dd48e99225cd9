"""The inputs of a plan as bytes that are staged, and the hash that identifies what follows from them."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Mapping
from typing import Any


def pack_inputs(inputs: Mapping[str, Any]) -> bytes:
    """The inputs, compressed; of the same inputs always the same bytes."""
    return gzip.compress(json.dumps(inputs).encode(), compresslevel=5, mtime=0)


def unpack_inputs(staged: bytes) -> dict[str, Any]:
    """The inputs that `pack_inputs` packed.

    Raises:
      OSError, EOFError, zlib.error, ValueError: it didn't make these bytes, or they are damaged.
    """
    inputs = json.loads(gzip.decompress(staged))
    if not isinstance(inputs, dict):
        raise ValueError("the inputs of a plan should be an object")
    return inputs


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
