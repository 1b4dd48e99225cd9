"""Where a checkpoint comes from, and digests that tell whether it still is what was written.

The record lies in `<step>/conversion.json`; all of it but the lists of files, of logical axes and of dropped tensors is in the
checkpoint's custom metadata too.

An array's digest is the sum, modulo 2¹²⁸, of the XXH3 digests of its shards: each over the array's key, dtype and the
shard's box, and the bytes of the shard in C order. It comes out the same in whatever order units are done, costs nothing
beside writing, and depends on the shards' shape (the grid), not on format or compression.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import xxhash

from weightbeam.formats.zarr import ArraySpec
from weightbeam.model_mappings.boxes import Box

RECORD = "conversion.json"
LIBRARIES = ("weightbeam", "apache-beam", "tensorstore", "numpy", "ml_dtypes")

Digest = int


def digest(spec: ArraySpec, box: Box, values: np.ndarray) -> Digest:
    """The share of one shard in its array's digest."""
    hashed = xxhash.xxh3_128(f"{spec.key} {spec.dtype.name} {[list(span) for span in box]}".encode())
    hashed.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
    return hashed.intdigest()


def total(shares: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Sums the shares of units, `{key: hexadecimal number}` each, to the digests of whole arrays."""
    sums: Counter[str] = Counter()
    for unit in shares:
        for key, share in unit.items():
            sums[key] = (sums[key] + int(share, 16)) % (1 << 128)
    return {key: f"{sum:032x}" for key, sum in sorted(sums.items())}


def versions() -> dict[str, str]:
    """The versions of Python and of what takes part in a conversion."""
    found = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:  # run from a folder that isn't installed
            found[library] = "unknown"
    return found


def summary(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record without its long lists, for the custom metadata."""
    short = {key: value for key, value in record.items() if key not in ("shards", "axes", "dropped")}
    if "references" in record:
        short["references"] = {key: value for key, value in record["references"].items() if key != "files"}
    return short | {"dropped": dict(Counter(record.get("dropped", {}).values()))}
