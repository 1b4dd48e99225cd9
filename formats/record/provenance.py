"""Where a checkpoint comes from, and digests that tell whether it still is what was written.

The record lies in `<step>/conversion.json`; all of it but its long lists and `config.json` is in the checkpoint's
custom metadata too. Its `config` and `tensors` say what the release was, so that the way back needs nothing else than
the checkpoint.

An array's digest is the sum, modulo 2¹²⁸, of the XXH3 digests of its shards: each over the array's key, dtype and the
shard's box, and the bytes of the shard in C order. It comes out the same in whatever order units are done, costs
nothing beside writing, and depends on the shards' shape (the grid), not on format or compression.
"""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import xxhash

import weightbeam
from weightbeam.formats.record.extremes import Extremes
from weightbeam.formats.safetensors import DTYPE_NAMES, DTYPES, Tensor
from weightbeam.formats.storage import StorageError
from weightbeam.formats.storage.strict_json import JsonError, check_texts
from weightbeam.model_mappings.boxes import Box
from weightbeam.model_mappings.trust import distrusted

RECORD = "conversion.json"
LIBRARIES = ("apache-beam", "tensorstore", "numpy", "ml_dtypes")

# fields that stand in the record only
LONG = ("shards", "axes", "config", "tensors", "dropped", "source_digests", "not_finite", "zero")

Digest = int
MODULUS = 1 << 128  # of a sum of digests
# what is to be said of a part of an array: its key, a box of it, the values, and what was seen of them
See = Callable[[str, Box, np.ndarray, Extremes], Mapping[str, Any]]
CACHED_BYTES = 1 << 18  # of values that are looked at more than once, one look after the other


def checked(record: Any) -> dict[str, Any]:
    """What the record of a checkpoint or a release says, whoever wrote it; see `distrusted`.

    Raises:
      JsonError: it can't be one.
    """
    if not isinstance(record, dict) or not isinstance(record.get("options", {}), dict):
        raise JsonError("should be an object, and so should its options")
    check_texts({name: said for name, said in record.items() if name not in LONG})
    return distrusted(record)


def begin(key: str, dtype: np.dtype, box: Box) -> xxhash.xxh3_128:
    """The hash of a shard, of which only the bytes are still to come."""
    return xxhash.xxh3_128(f"{key} {dtype.name} {[list(span) for span in box]}".encode())


def digest(key: str, dtype: np.dtype, box: Box, values: np.ndarray, extremes: Extremes | None = None) -> Digest:
    """The share of one shard in its array's digest; `extremes` sees its values on the way, while they are in the cache."""
    hashed = begin(key, dtype, box)
    for piece in pieces(values):
        hashed.update(piece.view(np.uint8).data)
        if extremes:
            extremes.look(piece)
    return hashed.intdigest()


def pieces(values: np.ndarray) -> Iterator[np.ndarray]:
    """The values in C order, in flat pieces of at most `CACHED_BYTES`; those that don't lie so are copied, a piece at a
    time.
    """
    if values.flags.c_contiguous:
        flat, step = values.reshape(-1), CACHED_BYTES // values.itemsize
        yield from (flat[start : start + step] for start in range(0, flat.size, step))
    elif values[0].nbytes > CACHED_BYTES:
        for part in values:
            yield from pieces(part)
    else:
        step = CACHED_BYTES // max(1, values[0].nbytes)
        for start in range(0, len(values), step):
            yield np.ascontiguousarray(values[start : start + step]).reshape(-1)


def take_shares(
    parts: Iterable[tuple[str, np.dtype, Box, np.ndarray]], see: See | None
) -> tuple[dict[str, str], list[Mapping[str, Any]]]:
    """The shares that parts of arrays, `(key, dtype, box, values)` each, have in the arrays' digests, `{key: hexadecimal
    number}`; and what `see` has to say of each, where it says anything.
    """
    shares, seen = Counter[str](), list[Mapping[str, Any]]()
    for key, dtype, box, values in parts:
        extremes = Extremes(dtype) if see else None
        shares[key] += digest(key, dtype, box, values, extremes)
        if see and extremes and (found := see(key, box, values, extremes)):
            seen.append(found)
    return {key: f"{share % MODULUS:x}" for key, share in shares.items()}, seen


def total(shares: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Sums the shares of units, `{key: hexadecimal number}` each, to the digests of whole arrays."""
    sums: Counter[str] = Counter()
    for unit in shares:
        for key, share in unit.items():
            sums[key] = (sums[key] + int(share, 16)) % MODULUS
    return {key: f"{found:032x}" for key, found in sorted(sums.items())}


def versions() -> dict[str, str]:
    """The versions of Python and of what takes part in a conversion."""
    found = {"python": platform.python_version(), "weightbeam": weightbeam.__version__}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:  # there without metadata, as in a frozen program
            found[library] = "unknown"
    return found


def summary(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record without its long lists, for the custom metadata, which every reader of the checkpoint parses."""
    short = {key: value for key, value in record.items() if key not in LONG}
    if "references" in record:
        short["references"] = {key: value for key, value in record["references"].items() if key != "files"}
    return short | {"dropped": dict(Counter(record.get("dropped", {}).values()))}


def record_json(record: Mapping[str, Any]) -> bytes:
    """The record as a text in which a file, a tensor or an array is a line: DeepSeek-V3 has 91,000 tensors."""

    def lines(value: Any) -> str:
        if not value or not isinstance(value, dict | list):
            return json.dumps(value)
        entries = (
            [f"{json.dumps(key)}: {json.dumps(each)}" for key, each in value.items()]
            if isinstance(value, dict)
            else map(json.dumps, value)
        )
        start, stop = "{}" if isinstance(value, dict) else "[]"
        return f"{start}\n  " + ",\n  ".join(entries) + f"\n {stop}"

    return (
        "{\n " + ",\n ".join(f"{json.dumps(key)}: {lines(value)}" for key, value in record.items()) + "\n}\n"
    ).encode()


def tensors_said(tensors: Iterable[Tensor]) -> dict[str, dict[str, Any]]:
    """A release's tensors as a record has them: as they are stored, codes and scales among them."""
    return {
        tensor.name: {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "file": tensor.path.rpartition("/")[2],
        }
        for tensor in tensors
    }


def tensors_of(record: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of the release that a checkpoint was made of, in the order of files and bytes; `path` is the file's
    name, `offset` isn't known.

    Raises:
      StorageError: the record has none, or they aren't what this package writes.
    """
    found = {}
    try:
        for name, tensor in record["tensors"].items():
            shape = tuple(map(int, tensor["shape"]))
            found[name] = Tensor(name, DTYPES[tensor["dtype"]], shape, str(tensor["file"]), 0)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
        raise StorageError(f"{RECORD} doesn't say which tensors the release had: {type(e).__name__} {e}") from e
    return found
