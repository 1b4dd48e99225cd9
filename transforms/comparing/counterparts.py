"""Tensors of an export that no array makes, each with what it should be: a tensor of the release that it was taken from,
or another one of the export that it is a copy of.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from weightbeam.formats.encodings import Encoding, Plain, values_dtype
from weightbeam.formats.release.source import open_source
from weightbeam.formats.safetensors import HfCheckpoint, read_boxes
from weightbeam.model_mappings.boxes import Box, whole
from weightbeam.model_mappings.plan import bits_of, holds, is_float
from weightbeam.transforms.comparing.verification import (
    SLAB_ELEMENTS,
    ArrayResult,
    FirstDifference,
    count_wrong,
    differs,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Counterpart:
    """A tensor of an export, and what it should be.

    Attributes:
      name: the tensor's.
      found: as the export stores it.
      wanted: as it is stored where it comes from. What has another dtype there was cast once; what is quantised there was
        decoded in float32 before.
    """

    name: str
    found: Plain
    wanted: Encoding

    @property
    def nbytes(self) -> int:
        """Bytes that are compared."""
        return math.prod(self.found.shape) * self.found.weight.dtype.itemsize


def find_taken(
    export: HfCheckpoint, release: HfCheckpoint, names: Collection[str]
) -> tuple[list[Counterpart], dict[str, str]]:
    """Counterparts of the tensors that an export says it has from a release.

    Returns:
      Those that can be compared; and by name what is wrong with the others.
    """
    values = open_source(release).encodings
    made, wrong = [], {}
    for name in sorted(names):
        ours, stored = export.tensors.get(name), release.tensors.get(name)
        if ours is None:
            wrong[name] = f"isn't in {export.root}, which says that it has it"
            continue
        # codes and scales may have been taken as they are
        theirs = Plain(stored) if stored is not None and stored.dtype == ours.dtype else values.get(name)
        if theirs is None:
            wrong[name] = f"isn't in {release.root}, where it is said to be from"
        elif theirs.shape != ours.shape:
            wrong[name] = f"has the shape {ours.shape}, in {release.root} it is {theirs.shape}"
        else:
            made.append(Counterpart(name, Plain(ours), theirs))
    return made, wrong


def copied(encodings: Mapping[str, Encoding], copies: Mapping[str, str]) -> dict[str, Counterpart]:
    """Counterparts of the tensors that a release stores a second time, such as a tied head, by the table's names; of those
    that are stored as plain values.

    Args:
      encodings: the release's, by the table's names.
      copies: what each copy is of.
    """
    return {
        copy: Counterpart(found.weight.name, found, encodings[original])
        for copy, original in copies.items()
        if original in encodings and isinstance(found := encodings.get(copy), Plain)
        if found.shape == encodings[original].shape
    }


def compare_counterparts(pair: Counterpart) -> ArrayResult:
    """Compares a tensor with what it should be, slab by slab: byte by byte, or where it was cast by the bits of that."""
    dtype, wanted = pair.found.weight.dtype, pair.wanted
    had = values_dtype(wanted)
    result = ArrayResult(pair.name, rounded=is_float(had) and not holds(dtype, had))
    for box in _slabs(wanted):
        stored, _ = read_boxes(wanted.reads(box))
        expected = wanted.decode(stored, box, np.dtype(np.float32))
        (found,), _ = read_boxes(pair.found.reads(box))
        if expected.dtype == dtype:
            bits = bits_of(dtype)
            wrong = np.ascontiguousarray(expected).view(bits) != np.ascontiguousarray(found).view(bits)
        else:
            expected = expected.astype(np.float32).astype(dtype)
            wrong = differs(expected, found)
        count, index = count_wrong(wrong)
        first = None
        if index is not None:
            place = tuple(low + i for (low, _), i in zip(box, index, strict=True))
            first = FirstDifference(pair.name, place, expected[index].item(), found[index].item())
        result += ArrayResult(pair.name, found.size, count, first=first)
    return result


def _slabs(encoding: Encoding) -> Iterator[Box]:
    """Boxes of an encoding that together are all of it, each of about `SLAB_ELEMENTS`, cut along one axis that may be."""
    shape, every = encoding.shape, whole(encoding.shape)
    axis = next((axis for axis in range(len(shape)) if axis not in encoding.indivisible), None)
    if axis is None:
        yield every
        return
    step = max(1, SLAB_ELEMENTS * shape[axis] // max(1, math.prod(shape)))
    for start in range(0, shape[axis], step):
        yield (*every[:axis], (start, min(start + step, shape[axis])), *every[axis + 1 :])
