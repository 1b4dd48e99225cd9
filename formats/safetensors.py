"""Checkpoints as safetensors files: strict headers, single or sharded with an index, and reads of boxes.

The file format: huggingface/safetensors, safetensors/src/tensor.rs. A header that breaks one of its rules is refused, and so
are things that it lets pass: duplicate keys, names that are empty, have control characters or lead elsewhere as paths, fields
that the format doesn't have, more than `MAX_RANK` dimensions, more than `MAX_VALUES` values, and elements of less than a byte.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import functools
import itertools
import json
import math
import operator
import re
import reprlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from weightbeam.formats.storage import File, Range, StorageError, Store, open_store, reason, store_and_name
from weightbeam.model_mappings.cells import Box, extent
from weightbeam.model_mappings.plan import Problem

MAX_HEADER = 100_000_000  # bytes; of an index or a config too
MAX_VALUES = 5_000_000  # of JSON, so that its objects in memory are bounded too: a tensor of rank 2 is 11 of them
MAX_DEPTH = 64  # of JSON
MAX_RANK = 32  # more than numpy's dimensions need
INDEX = "model.safetensors.index.json"
HF_QUANT_CONFIG = "hf_quant_config.json"  # where NVIDIA's ModelOpt describes the quantisation
GPTQ_CONFIG, AWQ_CONFIG = "quantize_config.json", "quant_config.json"  # where AutoGPTQ and AutoAWQ do
QUANT_CONFIGS = (HF_QUANT_CONFIG, GPTQ_CONFIG, AWQ_CONFIG)
CONFIGS = ("config.json", INDEX, *QUANT_CONFIGS)  # what is read beside the weights

DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2), "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz), "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz), "C64": np.dtype(np.complex64),
    "I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "I16": np.dtype(np.int16), "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64), "U32": np.dtype(np.uint32), "U16": np.dtype(np.uint16), "U8": np.dtype(np.uint8), "BOOL": np.dtype(np.bool_),
}  # fmt: skip


_UNPRINTABLE = r"\x00-\x1f\x7f-\x9f\ud800-\udfff"  # control characters, half characters
_BAD_NAME = re.compile(rf"[{_UNPRINTABLE}]|^[/\\]|(^|[/\\])\.\.([/\\]|$)")  # or ways out
_FILE_NAME = re.compile(rf"[^/\\{_UNPRINTABLE}]+\.safetensors")


class HeaderError(ValueError):
    """A file is not a well-formed safetensors file; the message says which rule it breaks."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as it is stored.

    Attributes:
      name, dtype, shape: as the header says.
      path: its file.
      offset: of its first byte in the file.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    path: str
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Shard:
    """A safetensors file and what identifies it (`formats.storage.File`); `path` names it on every worker."""

    name: str
    path: str
    size: int
    version: str
    tensors: tuple[Tensor, ...]
    inode: int = 0
    sha256: str | None = None
    crc32c: str | None = None


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A folder with `config.json` and safetensors files, known by its headers.

    Attributes:
      root: the folder's URL.
      config: `config.json`; with each of `QUANT_CONFIGS` that there is, under the file's name.
      shards: the files that hold the model, in order of their names.
      ignored: safetensors files in the folder that the index doesn't name.
      lost: tensors that the index places in files which can't be read.
      problems: what is wrong with the files.
    """

    root: str
    config: dict[str, Any]
    shards: tuple[Shard, ...]
    ignored: tuple[str, ...] = ()
    lost: frozenset[str] = frozenset()
    problems: tuple[Problem, ...] = ()

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name; in the order of the files and of their offsets."""
        return {tensor.name: tensor for shard in self.shards for tensor in shard.tensors}

    def unreadable(self) -> list[Problem]:
        """The files whose last byte can't be read; the first ones were, for their headers."""
        store = open_store(self.root)

        def attempt(shard: Shard) -> Problem | None:
            try:
                store.read(shard.name, max(0, shard.size - 1), shard.size)
            except OSError as e:
                return Problem("source", shard.path, f"its end can't be read: {reason(e)}")
            return None

        with concurrent.futures.ThreadPoolExecutor(store.at_a_time) as pool:
            return [problem for problem in pool.map(attempt, self.shards) if problem]

    def check(self) -> None:
        """Checks that the files are those that were opened.

        Raises:
          StorageError: one isn't, or is gone.
        """
        files = {file.name: file for file in open_store(self.root).list(recursive=False)}
        for shard in self.shards:
            if (file := files.get(shard.name)) is None:
                raise StorageError(f"{shard.path}: is gone; it was there when it was planned")
            if changed := [field for field in ("size", "version", "inode") if getattr(file, field) != getattr(shard, field)]:
                raise StorageError(f"{shard.path} changed while it was converted ({', '.join(changed)}); start anew with --overwrite")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise HeaderError(f"the key {twice!r} stands twice")
    return result


def _check_pointer(start: bytes) -> None:
    if start.startswith(b"version ") and b"git-lfs" in start[:108]:
        raise HeaderError("a git-lfs pointer, not the file itself; run `git lfs pull`")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _parse_json(raw: bytes, lenient: bool = True) -> Any:
    """JSON from a stranger; `lenient` with NaN, infinity and −0, which Python reads and writes.

    Raises:
      HeaderError: it isn't UTF-8 or JSON, has a key twice, or is larger than anything that is meant.
    """
    if sum(raw.count(mark) for mark in b"{[:,") > MAX_VALUES:
        raise HeaderError(f"more than {MAX_VALUES:,} values")
    try:
        strict = {} if lenient else {"parse_constant": _refuse_constant, "parse_int": _parse_int}
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates, **strict)
    except UnicodeDecodeError as e:
        raise HeaderError(f"isn't UTF-8: {e}") from e
    except HeaderError:
        raise
    except (ValueError, RecursionError) as e:
        raise HeaderError(f"isn't JSON: {e}") from e
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level if isinstance(parent, dict | list) for child in (parent.values() if isinstance(parent, dict) else parent)]
    if level:
        raise HeaderError(f"objects and lists within each other, more than {MAX_DEPTH} deep")
    return value


def read_header(path: str) -> tuple[Tensor, ...]:
    """The tensors of a file in the order of their offsets.

    Raises:
      HeaderError: the file breaks a rule of the format.
      OSError: it can't be read.
    """
    store, name = store_and_name(path)
    return _read_shard(store, _found(store, name)).tensors


def _found(store: Store, name: str) -> File:
    """A file that has to be there."""
    if (file := store.stat(name)) is None:
        store.read(name, 0, 8)  # says why not
        raise FileNotFoundError(errno.ENOENT, "no such file", store.path(name))
    return file


def _read_shard(store: Store, file: File) -> Shard:
    path, size = store.path(file.name), file.size
    start = store.read(file.name, 0, 8)
    if start == b"version ":
        _check_pointer(start + store.read(file.name, 8, 108))
    if len(start) < 8:
        raise HeaderError(f"{size} bytes are too few for a safetensors file")
    length = int.from_bytes(start, "little")
    if length > MAX_HEADER:
        raise HeaderError(f"a header of {length:,} bytes; at most {MAX_HEADER:,} are allowed")
    if 8 + length > size:
        raise HeaderError(f"a header of {length:,} bytes in a file of {size:,}; truncated?")
    raw = store.read(file.name, 8, 8 + length)
    return Shard(file.name, path, size, file.version, parse_header(raw, size, path), file.inode, file.sha256, file.crc32c)


def parse_header(raw: bytes, size: int, path: str) -> tuple[Tensor, ...]:
    """The tensors that the header `raw` of a file of `size` bytes describes; see `read_header`."""
    if not raw.startswith(b"{"):
        raise HeaderError("the header doesn't start with '{'")
    try:
        header = _parse_json(raw, lenient=False)
    except HeaderError as e:
        raise HeaderError(f"the header: {e}") from e
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())):
        raise HeaderError("__metadata__ must map strings to strings")
    data_start = 8 + len(raw)
    tensors = sorted((_parse_entry(name, entry, path, data_start) for name, entry in header.items()), key=lambda tensor: (tensor.offset, tensor.nbytes))
    end = data_start
    for tensor in tensors:
        if tensor.offset != end:
            raise HeaderError(f"{tensor.name} starts at byte {tensor.offset - data_start} of the data, expected {end - data_start}: a hole or an overlap")
        end += tensor.nbytes
    if end != size:
        raise HeaderError(f"the tensors end at byte {end:,}, the file at {size:,}" + ("; truncated?" if end > size else ""))
    return tuple(tensors)


def _refuse_constant(text: str) -> None:
    raise HeaderError(f"{text} isn't JSON")


def _parse_int(text: str) -> int:
    if text == "-0":  # a floating-point number, to other readers
        raise HeaderError("-0 isn't a size")
    return int(text)


def _parse_entry(name: str, entry: Any, path: str, data_start: int) -> Tensor:
    if not name or _BAD_NAME.search(name):
        raise HeaderError(f"the tensor name {name[:80]!a} is empty, has control characters, or is a path that leads elsewhere")
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
    tensor = Tensor(name, dtype, tuple(shape), path, data_start + offsets[0])
    if offsets[1] - offsets[0] != tensor.nbytes or tensor.nbytes >= 2**63:
        raise HeaderError(f"{name}: {entry['dtype']} {shape} takes {tensor.nbytes:,} bytes, data_offsets {offsets} say {offsets[1] - offsets[0]:,}")
    return tensor


def open_checkpoint(where: str | Path | Store) -> Checkpoint:
    """Reads `config.json`, the index and every header; what is wrong with the files is in `Checkpoint.problems`.

    Raises:
      StorageError: there is no such folder, or the store doesn't answer.
    """
    store = open_store(where)
    store.check_readable()
    problems: list[Problem] = []
    entries = store.entries()
    config = _read_json(store, "config.json", problems)
    if config:
        config |= {name: _read_json(store, name, problems) for name in QUANT_CONFIGS if name in entries}
    on_disk = [name for name in entries if _FILE_NAME.fullmatch(name)]
    weight_map: dict[str, str] | None = None
    if INDEX in entries:
        weight_map = _read_index(store, problems)
        names = sorted(set(weight_map.values()))
    elif len(on_disk) > 1:
        problems.append(Problem("index", INDEX, f"missing, but there are {len(on_disk)} safetensors files; it says which belong to the model"))
        names = []
    else:
        names = on_disk
        if not names:
            pickles = sorted(name for name in entries if name.endswith((".bin", ".pt", ".pth")))
            hint = f"; {pickles[0]} is a pickle file, which can run code when it is loaded: convert it to safetensors first" if pickles else ""
            problems.append(Problem("missing", "*.safetensors", f"no safetensors file in {store}{hint}"))
    with concurrent.futures.ThreadPoolExecutor(store.at_a_time) as pool:
        opened = list(pool.map(lambda name: _open_shard(store, name), names))
    problems += [problem for problem in opened if isinstance(problem, Problem)]
    shards = tuple(shard for shard in opened if isinstance(shard, Shard))
    if weight_map is not None:
        problems += _check_index(weight_map, shards)
    else:
        problems += _check_twice(shards)
    readable = {shard.name for shard in shards}
    lost = frozenset(name for name, file in (weight_map or {}).items() if file not in readable)
    return Checkpoint(store.url, config, shards, tuple(name for name in on_disk if name not in names), lost, tuple(problems))


def _read_json(store: Store, name: str, problems: list[Problem]) -> dict[str, Any]:
    """A JSON object, or an empty one and a problem."""
    try:
        store.check_file(name)
        raw = store.read(name, 0, MAX_HEADER + 1)
        if len(raw) > MAX_HEADER:
            raise HeaderError(f"more than {MAX_HEADER:,} bytes")
        _check_pointer(raw)
        value = _parse_json(raw)
        if isinstance(value, dict) and value:
            return value
        message = "is empty" if value == {} else f"should be a JSON object, is a {type(value).__name__}"
    except FileNotFoundError:
        message = "no such file"
    except OSError as e:
        message = reason(e)
    except HeaderError as e:
        message = str(e)
    problems.append(Problem("missing" if message == "no such file" else "corrupt", name, message))
    return {}


def _read_index(store: Store, problems: list[Problem]) -> dict[str, str]:
    """The index's `weight_map`, without the entries that can't be right."""
    index = _read_json(store, INDEX, problems)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        if index:
            problems.append(Problem("index", INDEX, "has no weight_map that maps tensors to files"))
        return {}
    good = {}
    for name, file in weight_map.items():
        if not name or _BAD_NAME.search(name):
            problems.append(Problem("index", ascii(name), "the name of a tensor that is empty, has control characters, or is a path that leads elsewhere"))
        elif isinstance(file, str) and _FILE_NAME.fullmatch(file):
            good[name] = file
        else:
            problems.append(Problem("index", name, f"the index names {reprlib.repr(file)}, which isn't a plain name of a safetensors file"))
    return good


def _open_shard(store: Store, name: str) -> Shard | Problem:
    try:
        store.check_file(name)
        return _read_shard(store, _found(store, name))
    except FileNotFoundError:
        return Problem("missing", name, f"the index names this file, but it isn't in {store}")
    except OSError as e:
        return Problem("corrupt", name, reason(e))
    except HeaderError as e:
        return Problem("corrupt", name, str(e))


def _check_index(weight_map: Mapping[str, str], shards: Sequence[Shard]) -> Iterator[Problem]:
    """The index and the headers must tell the same."""
    held = {(tensor.name, shard.name) for shard in shards for tensor in shard.tensors}
    readable = {shard.name for shard in shards}
    for name, file in weight_map.items():
        if file in readable and (name, file) not in held:
            yield Problem("index", name, f"the index says it is in {file}, but that file doesn't hold it")
    for name, file in sorted(held - set(weight_map.items())):
        yield Problem("index", name, f"is in {file}, but the index " + (f"says {weight_map[name]}" if name in weight_map else "doesn't name it"))


def _check_twice(shards: Sequence[Shard]) -> Iterator[Problem]:
    files = defaultdict(list)
    for shard in shards:
        for tensor in shard.tensors:
            files[tensor.name].append(shard.name)
    return (Problem("index", name, f"is in {', '.join(names)}") for name, names in files.items() if len(names) > 1)


Empty = Callable[[tuple[int, ...], np.dtype], np.ndarray]  # makes an array of a shape and dtype


@dataclasses.dataclass(frozen=True, slots=True)
class BoxRead:
    """A box of a stored tensor, to be read."""

    tensor: Tensor
    box: Box

    @property
    def nbytes(self) -> int:
        return math.prod(extent(self.box)) * self.tensor.dtype.itemsize

    def ranges(self, buffer: memoryview) -> Iterator[tuple[int, memoryview]]:
        """The ranges of the file that hold the box, each with its part of `buffer`, which holds the box in C order."""
        shape, itemsize = self.tensor.shape, self.tensor.dtype.itemsize
        cut = max((axis for axis, span in enumerate(self.box) if span != (0, shape[axis])), default=0)
        run = math.prod(extent(self.box[cut:])) * itemsize
        strides = [math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape))]
        first = sum(start * stride for (start, _), stride in zip(self.box, strides, strict=True))
        for i, index in enumerate(itertools.product(*(range(n) for n in extent(self.box[:cut])))):
            offset = sum(at * stride for at, stride in zip(index, strides, strict=False))
            yield self.tensor.offset + first + offset, buffer[i * run : (i + 1) * run]


def read_boxes(reads: Sequence[BoxRead], empty: Empty = np.empty) -> tuple[list[np.ndarray], int]:
    """Reads boxes, file by file in the order of their offsets, into arrays that `empty` makes.

    Returns:
      An array for each, and the bytes read from the files.
    """
    arrays = [empty(extent(read.box), read.tensor.dtype) for read in reads]
    by_path: dict[str, list[Range]] = defaultdict(list)
    for read, array in zip(reads, arrays, strict=True):
        if array.size:
            by_path[read.tensor.path] += read.ranges(memoryview(array.reshape(-1).view(np.uint8)))
    return arrays, sum(store.read_into(name, ranges) for path, ranges in by_path.items() for store, name in [store_and_name(path)])
