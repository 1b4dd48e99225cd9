"""The files of a release that is to be written: which tensor lies in which file and at which byte; integers only.

    8 bytes              length of the header, little-endian
    header               JSON, padded with spaces, so that the data start at a multiple of 8
    data                 the tensors without gaps, those with the widest elements first

A header follows from names, dtypes and shapes alone. So every worker knows the byte that each element of each tensor
goes to, and nobody needs to see a whole file. (File format: huggingface/safetensors, safetensors/src/tensor.rs. Names
and index: transformers 5.23, modeling_utils.py, `save_pretrained`.)
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from weightbeam.formats.safetensors import DTYPE_NAMES, INDEX, SINGLE, Tensor

# bytes of tensors in a file, by default: huggingface_hub's; one failed upload costs no more
MAX_SHARD_SIZE = 5_000_000_000
MAX_INDEX = 10 << 20  # bytes of an index that huggingface_hub 2.4 reads (serialization/_torch.py, MAX_INDEX_FILE_SIZE)
ALIGNMENT = 8  # bytes; what the widest dtype, but for complex numbers, needs to be mapped into memory


class Entry(NamedTuple):
    """A tensor that is to be written."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class PlannedFile:
    """A safetensors file before it is written.

    Attributes:
      name: in its folder.
      header: its first bytes, the length included.
      tensors: in the order of their bytes; `path` is the file's name, `offset` counts from the file's first byte.
      size: of the whole file, in bytes.
    """

    name: str
    header: bytes
    tensors: tuple[Tensor, ...]
    size: int


@dataclasses.dataclass(frozen=True)
class FileLayout:
    """All files of a release that is to be written.

    Attributes:
      files: in the order of their names.
      index: the bytes of `model.safetensors.index.json`; None where one file holds everything.
      warnings: what the user should know.
    """

    files: tuple[PlannedFile, ...]
    index: bytes | None
    warnings: tuple[str, ...] = ()

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name: its file, and its place there."""
        return {tensor.name: tensor for file in self.files for tensor in file.tensors}

    @property
    def size(self) -> int:
        """Bytes of all files, without the index."""
        return sum(file.size for file in self.files)


def plan_files(
    tensors: Iterable[Entry],
    like: Mapping[str, str] | None = None,
    max_shard_size: int | None = None,
    single: str = SINGLE,
) -> FileLayout:
    """Places tensors in files.

    Without `like` the tensors are put in natural order (`layers.2` before `layers.10`), and a file is full when the
    next tensor would exceed `max_shard_size`. With `like` each file holds what the file of that name holds there, in
    that order; a tensor that `like` doesn't have lies behind the last before it in natural order that `like` has: a
    scale behind its codes. Within a file tensors with wider elements then come first, so that every element is aligned.

    Args:
      tensors: in any order.
      like: the file of each tensor in a release whose layout is to be kept, by the order of the bytes where that is
        known.
      max_shard_size: bytes of tensors in a file, unless a single tensor has more; files of `like` that have more are
        split. By default files of `like` are as large as they become, and others have at most 5 GB.
      single: the name of the file where there is one.

    Raises:
      ValueError: two tensors have one name.
    """
    entries: dict[str, Entry] = {}
    for entry in tensors:
        if entry.name in entries:
            raise ValueError(f"two tensors would be called {entry.name}")
        entries[entry.name] = entry
    groups = _group_like(entries, like) if like else [sorted(entries.values(), key=lambda entry: natural(entry.name))]
    most = max_shard_size if max_shard_size is not None else None if like else MAX_SHARD_SIZE
    split = [part for group in groups for part in _split(group, most)] or [[]]
    names = [single] if len(split) == 1 else _names(split, like)
    files = tuple(
        _plan_file(name, group) for name, group in sorted(zip(names, split, strict=True), key=lambda pair: pair[0])
    )
    if len(files) == 1:
        return FileLayout(files, None)
    index = make_index(files)
    warning = (
        f"{INDEX} has {len(index):,} bytes; huggingface_hub's loader reads at most {MAX_INDEX:,}, transformers any"
    )
    return FileLayout(files, index, (warning,) if len(index) > MAX_INDEX else ())


def natural(name: str) -> str:
    """A key to sort names by, numbers by their value: `layers.2` before `layers.10`."""
    return re.sub(r"\d+", lambda digits: digits[0].zfill(20), name)


def _group_like(entries: Mapping[str, Entry], like: Mapping[str, str]) -> list[list[Entry]]:
    """The tensors of each file, by the files and the order of `like`; files that would be empty are left out."""
    position = {name: at for at, name in enumerate(like)}
    placed: dict[str, list[tuple[int, int, Entry]]] = {}
    names = sorted(entries, key=natural)
    before = next((name for name in names if name in position), next(iter(like)))
    for number, name in enumerate(names):
        before = name if name in position else before
        follows = 0 if name in position else 1 + number
        placed.setdefault(like[before], []).append((position[before], follows, entries[name]))
    return [
        [entry for *_, entry in sorted(placed[file], key=lambda item: item[:2])] for file in sorted(placed, key=natural)
    ]


def _split(group: Sequence[Entry], most: int | None) -> Iterator[list[Entry]]:
    """Cuts a sequence of tensors where it would exceed `most` bytes."""
    part: list[Entry] = []
    held = 0
    for entry in group:
        if part and most is not None and held + entry.nbytes > most:
            yield part
            part, held = [], 0
        part.append(entry)
        held += entry.nbytes
    if part:
        yield part


def _names(groups: Sequence[Sequence[Entry]], like: Mapping[str, str] | None) -> list[str]:
    """The names of several files: those of `like` where its files are the same, as many as they say, and named as all
    loaders want them, else as transformers numbers them.

    llama.cpp takes only files whose names begin with `model`.
    """
    if like:
        held = [{like[entry.name] for entry in group if entry.name in like} for group in groups]
        names = [name for names in held for name in names]
        whole = len(names) == len(groups) and sorted(names) == sorted(set(like.values()))
        said = {int(found[1]) for name in names if (found := re.search(r"-of-(\d+)\.safetensors$", name))}
        if whole and said <= {len(groups)} and all(re.fullmatch(r"model[\w.-]*\.safetensors", name) for name in names):
            return names
    return [f"model-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]


def _plan_file(name: str, group: Sequence[Entry]) -> PlannedFile:
    ordered = sorted(group, key=lambda entry: -entry.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # loaders of before 2026 refuse a file without it
    begins = []
    end = 0
    for entry in ordered:
        begins.append(end)
        end += entry.nbytes
        header[entry.name] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": (begins[-1], end),
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    start = 8 + len(text)
    tensors = tuple(
        Tensor(entry.name, entry.dtype, entry.shape, name, start + begin)
        for entry, begin in zip(ordered, begins, strict=True)
    )
    return PlannedFile(name, len(text).to_bytes(8, "little") + text, tensors, start + end)


def make_index(files: Sequence[PlannedFile]) -> bytes:
    """`model.safetensors.index.json` as transformers writes it, without blanks where it would be too large with them."""
    tensors = [tensor for file in files for tensor in file.tensors]
    totals = {
        "total_parameters": sum(math.prod(tensor.shape) for tensor in tensors),
        "total_size": sum(tensor.nbytes for tensor in tensors),
    }
    index = {
        "metadata": totals,
        "weight_map": {tensor.name: tensor.path for tensor in sorted(tensors, key=lambda tensor: tensor.name)},
    }
    text = json.dumps(index, indent=2).encode() + b"\n"
    return text if len(text) <= MAX_INDEX else json.dumps(index, separators=(",", ":")).encode()
