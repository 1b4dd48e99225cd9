"""The header of a safetensors file, strictly read.

The file format: huggingface/safetensors, safetensors/src/tensor.rs. A header that breaks one of its rules is refused,
and so are things that it lets pass: duplicate keys, names that are empty, have control characters or lead elsewhere as
paths, fields that the format doesn't have, more than `MAX_RANK` dimensions, more than `MAX_VALUES` values, and elements
of less than a byte.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import math
import operator
import re
import reprlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from weightbeam.formats.storage import File, StorageError, Store, store_and_name
from weightbeam.formats.storage.identity import Seen
from weightbeam.formats.storage.strict_json import MAX_BYTES as MAX_HEADER
from weightbeam.formats.storage.strict_json import Budget, JsonError, parse_json
from weightbeam.model_mappings.boxes import Box, extent

MAX_RANK = 32  # more than numpy's dimensions need
# of a file: the largest releases have 210,000 in all (Kimi K2-Thinking), and a plan takes 50 µs for each
MAX_TENSORS = 250_000

DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2), "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz), "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz), "C64": np.dtype(np.complex64),
    "I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "I16": np.dtype(np.int16), "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64), "U32": np.dtype(np.uint32), "U16": np.dtype(np.uint16), "U8": np.dtype(np.uint8), "BOOL": np.dtype(np.bool_),
}  # fmt: skip
DTYPE_NAMES: Mapping[np.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

UNPRINTABLE = r"\x00-\x1f\x7f-\x9f\ud800-\udfff"  # control characters, half characters
BAD_NAME = re.compile(rf"[{UNPRINTABLE}]|^[/\\]|(^|[/\\])\.\.([/\\]|$)")  # or ways out


class HeaderError(ValueError):
    """A file is not a well-formed safetensors file; the message says which rule it breaks."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as it is stored.

    Attributes:
      name, dtype, shape: as the header says.
      path: its file.
      offset: of its first byte in the file.
      file: the file as it was when the header was read; None where that isn't known.
      whole: the shape of the stored tensor that this is a box of; empty for a tensor of its own.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    path: str
    offset: int
    file: Seen | None = dataclasses.field(default=None, compare=False, repr=False)
    whole: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """How many bytes of the file are from one index of each axis to the next."""
        shape = self.whole or self.shape
        return tuple(math.prod(shape[axis + 1 :]) * self.dtype.itemsize for axis in range(len(shape)))

    def window(self, box: Box) -> Tensor:
        """A box of it, as a tensor."""
        at = self.offset + sum(start * stride for (start, _), stride in zip(box, self.strides, strict=True))
        whole = self.whole or self.shape
        rows = box[1:] == tuple((0, size) for size in whole[1:])  # which lie side by side as they are
        return dataclasses.replace(self, shape=extent(box), offset=at, whole=() if rows else whole)


def check_pointer(start: bytes) -> None:
    if start.startswith(b"version ") and b"git-lfs" in start[:108]:
        raise HeaderError("a git-lfs pointer, not the file itself; run `git lfs pull`")


def read_header(path: str) -> tuple[Tensor, ...]:
    """The tensors of a file in the order of their offsets.

    Raises:
      HeaderError: the file breaks a rule of the format.
      OSError: it can't be read.
    """
    store, name = store_and_name(path)
    return header_of(store, require(store, name))


def require(store: Store, name: str) -> File:
    """A file that has to be there.

    Raises:
      FileNotFoundError: it isn't.
      OSError: it can't be read.
    """
    if (file := store.stat(name)) is None:
        store.read(name, 0, 8)  # says why not
        raise FileNotFoundError(errno.ENOENT, "no such file", store.path(name))
    return file


def header_of(store: Store, file: File, budget: Budget | None = None) -> tuple[Tensor, ...]:
    """The tensors of a file that is known already; see `read_header`. `budget` bounds the headers that are read
    together.
    """
    size = file.size
    start = _stretch(store, file, 0, min(8, size))  # also of an empty one: it may be no file
    if size < 8:
        raise HeaderError(f"{size} bytes are too few for a safetensors file")
    if start == b"version ":
        check_pointer(start + store.read_known(file, 8, 108))
    length = int.from_bytes(start, "little")
    if length > MAX_HEADER:
        raise HeaderError(f"a header of {length:,} bytes; at most {MAX_HEADER:,} are allowed")
    if 8 + length > size:
        raise HeaderError(f"a header of {length:,} bytes in a file of {size:,}; truncated?")
    return parse_header(_stretch(store, file, 8, 8 + length), size, store.path(file.name), budget, file)


def _stretch(store: Store, file: File, start: int, stop: int) -> bytes:
    """Bytes that a file has, by its size. Raises StorageError where fewer come: then the answer is cut off, not the file."""
    data = store.read_known(file, start, stop)
    if len(data) != stop - start:
        few = f"{len(data):,} bytes came where bytes {start:,} to {stop:,} of {file.size:,} were asked for"
        raise StorageError(f"{store.path(file.name)}: {few}; was it changed, or does a proxy answer for the store?")
    return data


def parse_header(
    raw: bytes, size: int, path: str, budget: Budget | None = None, file: Seen | None = None
) -> tuple[Tensor, ...]:
    """The tensors that the header `raw` of a file of `size` bytes describes; see `read_header`."""
    if not raw.startswith(b"{"):
        raise HeaderError("the header doesn't start with '{'")
    try:
        header = parse_json(raw, lenient=False, budget=budget, file=path)
    except JsonError as e:
        raise HeaderError(f"the header: {e}") from e
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise HeaderError("__metadata__ must map strings to strings")
    if len(header) > MAX_TENSORS:
        raise HeaderError(f"{len(header):,} tensors; more than {MAX_TENSORS:,} can't be meant")
    data_start = 8 + len(raw)
    tensors = sorted(
        (_parse_entry(name, entry, path, data_start, file) for name, entry in header.items()),
        key=lambda tensor: (tensor.offset, tensor.nbytes),
    )
    end = data_start
    for tensor in tensors:
        if tensor.offset != end:
            raise HeaderError(
                f"{tensor.name} starts at byte {tensor.offset - data_start} of the data, expected {end - data_start}: a hole or an overlap"
            )
        end += tensor.nbytes
    if end != size:
        raise HeaderError(
            f"the tensors end at byte {end:,}, the file at {size:,}" + ("; truncated?" if end > size else "")
        )
    return tuple(tensors)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _parse_entry(name: str, entry: Any, path: str, data_start: int, file: Seen | None) -> Tensor:
    if not name or BAD_NAME.search(name):
        raise HeaderError(
            f"the tensor name {name[:80]!a} is empty, has control characters, or is a path that leads elsewhere"
        )
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise HeaderError(f"{name}: an entry has dtype, shape and data_offsets, this is {reprlib.repr(entry)}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_is_count, shape)):
        raise HeaderError(f"{name}: the shape {reprlib.repr(shape)} isn't a list of at most {MAX_RANK} sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise HeaderError(f"{name}: data_offsets {reprlib.repr(offsets)} aren't [begin, end]")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise HeaderError(f"{name}: unknown dtype {reprlib.repr(entry['dtype'])}")
    if any(n >= 2**63 for n in itertools.accumulate(shape, operator.mul)):
        raise HeaderError(f"{name}: the sizes {str(shape)[:80]} overflow any number of bytes")
    tensor = Tensor(name, dtype, tuple(shape), path, data_start + offsets[0], file)
    if offsets[1] - offsets[0] != tensor.nbytes or tensor.nbytes >= 2**63:
        raise HeaderError(
            f"{name}: {entry['dtype']} {shape} takes {tensor.nbytes:,} bytes, data_offsets {offsets} say {offsets[1] - offsets[0]:,}"
        )
    return tensor
