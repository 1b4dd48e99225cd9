"""Which stored tensors belong together, by their names and dtypes, and what they are; what can't be paired is refused."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from weightbeam.formats.encodings.encoding import Encoding, Plain
from weightbeam.formats.encodings.format import (
    Companion,
    MismatchError,
    QuantizedFormat,
    QuantizedTensor,
    UnknownBlockError,
)
from weightbeam.formats.encodings.fp8 import FLOAT8
from weightbeam.formats.encodings.quantization import Quantization
from weightbeam.formats.encodings.quantizing import FUSED
from weightbeam.formats.encodings.scaled import E8M0
from weightbeam.formats.encodings.table import COMPRESSED_TENSORS, DROPPED, REFUSED_METHODS, REFUSED_NAMES, known
from weightbeam.formats.safetensors import Tensor
from weightbeam.model_mappings.plan import Problem

Match = tuple[QuantizedFormat, QuantizedTensor]

INTEGERS = frozenset(map(np.dtype, (np.uint8, np.int8, np.int32)))  # what codes are packed into
NEVER_WEIGHTS = FLOAT8 | {E8M0}  # by themselves
ALL_DROPPED, ALL_REFUSED = (
    tuple(ending for endings in table.values() for ending in endings) for table in (DROPPED, REFUSED_NAMES)
)


class SourceError(ValueError):
    """A tensor can't be used; the kind is a `Problem`'s."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


def find_matches(tensor: Tensor, tensors: Mapping[str, Tensor], quantization: Quantization) -> list[Match]:
    """The formats that a tensor and its companions have by their names and dtypes; those with most companions."""
    found: list[Match] = []
    for entry in known().by_dtype.get(tensor.dtype, ()):
        if not tensor.name.endswith(entry.suffix):
            continue
        stem = tensor.name.removesuffix(entry.suffix)
        companions: dict[str, Tensor] = {}
        for companion in entry.companions:
            part = tensors.get(stem + companion.suffix)
            if part is not None and part.dtype in companion.dtypes:
                companions[companion.suffix] = part
            elif companion.required:
                break
        else:
            found.append((entry, QuantizedTensor(stem + entry.logical, tensor, companions, quantization)))
    if len(found) < 2:
        return found
    names = [{part.name for part in parts.companions.values()} for _, parts in found]
    return [match for match, mine in zip(found, names, strict=True) if not any(mine < others for others in names)]


def make_encoding(matches: Sequence[Match], quantization: Quantization) -> Encoding:
    """The encoding of a quantised weight.

    Raises:
      SourceError, UnknownBlockError: its parts don't fit together.
    """
    if len(matches) > 1:
        scales = dict.fromkeys(part.name for _, parts in matches for part in parts.companions.values())
        raise SourceError("scale", f"has two kinds of scales: {', '.join(scales)}")
    entry, parts = matches[0]
    try:
        return entry.make(dataclasses.replace(parts, quantization=quantization))
    except UnknownBlockError:
        raise
    except MismatchError as e:
        raise SourceError("scale", str(e)) from e


def make_plain(tensor: Tensor, tensors: Mapping[str, Tensor], quantization: Quantization | None) -> Plain:
    """A tensor that belongs to no format, as it is.

    Args:
      tensor: the tensor.
      tensors: all of the checkpoint.
      quantization: what a quantised checkpoint says; None for one that isn't quantised.

    Raises:
      SourceError: it isn't values, but codes without scales or a scale without codes.
    """
    if tensor.name.endswith(known().orphans) or tensor.dtype == E8M0:
        beside = [other for other in _codes_of(tensor.name) if other in tensors]
        found = (
            f"{beside[0]}, which is {tensors[beside[0]].dtype.name}: no format that is supported has that"
            if beside
            else "no weight that it belongs to"
        )
        raise SourceError("orphan scale", f"a scale ({tensor.dtype.name} {tensor.shape}) beside {found}")
    near = [entry for entry in known().by_dtype.get(tensor.dtype, ()) if tensor.name.endswith(entry.suffix)]
    packed = any(entry.suffix and entry.suffix != entry.logical for entry in near)
    scaled = tensor.dtype in INTEGERS and len(tensor.shape) > 1 and _siblings(tensor.name, tensors)
    if tensor.dtype in NEVER_WEIGHTS or packed or scaled or (quantization and _is_integer_weight(tensor)):
        raise SourceError("unscaled", _missing(tensor, tensors, near, quantization and quantization.method))
    return Plain(tensor)


def _is_integer_weight(tensor: Tensor) -> bool:
    """Whether a tensor has the name of a linear layer's weight, and holds integers: no model has such but as codes.
    Tables of integers, such as DeepSeek-V4's `tid2eid`, have other names.
    """
    if tensor.dtype.kind not in "iu" or len(tensor.shape) < 2:
        return False
    return tensor.name.endswith(".weight") or FUSED.fullmatch(tensor.name) is not None


def _missing(tensor: Tensor, tensors: Mapping[str, Tensor], near: Sequence[QuantizedFormat], method: str | None) -> str:
    """What codes lack to be of the format that they are nearest to; of several, one that goes with the `quant_method`."""
    kind = f"{tensor.dtype.name} {tensor.shape}"
    if not near:
        beside = ", ".join(_siblings(tensor.name, tensors)) or "no scale"
        return f"{kind} has {beside}, but no format that is supported has such codes"

    def nearness(entry: QuantizedFormat) -> tuple[int, bool, int]:
        """How many companions there are, of which those of a right dtype count twice; whether the method is right; and
        how few are missing.
        """
        names = _companions(entry, tensor.name)
        present = sum(
            2 if tensors[name].dtype in companion.dtypes else 1 for name, companion in names.items() if name in tensors
        )
        return present, method in entry.methods, -sum(companion.required for companion in entry.companions)

    entry = max(near, key=nearness)
    faults = []
    for name, companion in _companions(entry, tensor.name).items():
        if name not in tensors and companion.required:
            faults.append(f"{name} is missing")
        elif name in tensors and tensors[name].dtype not in companion.dtypes:
            allowed = ", ".join(sorted(dtype.name for dtype in companion.dtypes))
            faults.append(f"{name} is {tensors[name].dtype.name} (supported: {allowed})")
    return f"{kind} is nearest to {entry.name}, but {'; '.join(faults) or 'has nothing that tells it apart'}; its values can't be known"


def _companions(entry: QuantizedFormat, codes: str) -> dict[str, Companion]:
    """The companions that codes of this name have in a format, by their names."""
    stem = codes.removesuffix(entry.suffix)
    return {stem + companion.suffix: companion for companion in entry.companions}


def logical_names(tensor: Tensor) -> Iterator[str]:
    """The names that the weight may have whose codes a tensor is."""
    for entry in known().by_dtype.get(tensor.dtype, ()):
        if tensor.name.endswith(entry.suffix):
            yield tensor.name.removesuffix(entry.suffix) + entry.logical


def _siblings(name: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """What lies beside a tensor under the name of a scale."""
    stems = dict.fromkeys((name, name.removesuffix(".weight")))
    return [stem + suffix for stem in stems for suffix in known().scales if stem + suffix in tensors]


def _codes_of(scale: str) -> Iterator[str]:
    """The names of the codes that a scale of this name may belong to."""
    for entry in known().formats:
        for companion in entry.companions:
            if scale.endswith(companion.suffix):
                yield scale.removesuffix(companion.suffix) + entry.suffix


def _ending(name: str, endings: Mapping[str, tuple[str, ...]]) -> str | None:
    """The key whose endings a name has one of."""
    return next((key for key, these in endings.items() if name.endswith(these)), None)


def why_dropped(name: str) -> str | None:
    """Why no weight of a quantised model needs this tensor; None for most."""
    return _ending(name, DROPPED) if name.endswith(ALL_DROPPED) else None


def check_names(tensors: Mapping[str, Tensor], read: Collection[str]) -> Iterator[Problem]:
    """Formats that give themselves away by names and aren't supported, each once; `read` are the tensors that some
    format has.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for name in tensors:
        if name not in read and name.endswith(ALL_REFUSED) and (kind := _ending(name, REFUSED_NAMES)):
            found[kind].append(name)
    for kind, names in found.items():
        more = f", and {len(names) - 1:,} more tensors like it" if len(names) > 1 else ""
        yield Problem("quantised", names[0], f"belongs to {kind}, which isn't supported{more}")


def check_method(quantization: Quantization, matches: Mapping[str, Sequence[Match]]) -> Iterator[Problem]:
    """What the checkpoint says, against what it may say and against what it holds."""
    if quantization.method is None:
        return
    if quantization.method not in known().methods:
        supported = ", ".join(sorted(known().methods))
        message = f"quant_method {REFUSED_METHODS.get(quantization.method, quantization.method)!r} isn't supported; supported: {supported}"
        yield Problem("quantised", quantization.file, message)
        return
    if quantization.method == "compressed-tensors" and (unknown := quantization.formats() - COMPRESSED_TENSORS):
        supported = ", ".join(sorted(COMPRESSED_TENSORS))
        message = f"compressed-tensors' {', '.join(sorted(unknown))} isn't supported; supported: {supported}"
        yield Problem("quantised", quantization.file, message)
    if quantization.turned:
        message = "transform_config turns activations while the model computes, which MaxText doesn't; the weights alone are another model"
        yield Problem("quantised", quantization.file, message)
    others: dict[str, list[str]] = defaultdict(list)
    for name, found in matches.items():
        for entry, _ in found:
            if quantization.method not in entry.methods and len(found) == 1:
                others[entry.name].append(name)
    for entry, names in others.items():
        more = f", and {len(names) - 1:,} more" if len(names) > 1 else ""
        message = f"is {entry}{more}, but {quantization.file} says quant_method {quantization.method!r}"
        yield Problem("quantised", names[0], message)
