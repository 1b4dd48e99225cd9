"""A Hugging Face release as a source: as MaxText's arrays, by its family's table, or as it is."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence

import numpy as np

from weightbeam.formats.encodings import Encoding, stored_bytes, values_dtype
from weightbeam.formats.safetensors import Allocate, HfCheckpoint, read_boxes
from weightbeam.model_mappings.boxes import Box, volume
from weightbeam.model_mappings.plan import Array, is_float
from weightbeam.pipelines.loading.source import ArraySource, Cost, Described, Wanted, cast
from weightbeam.transforms.cutting.blocks import find_twins
from weightbeam.transforms.cutting.units import fetches_for, stacked_axes
from weightbeam.transforms.execution.boxes import make_boxes
from weightbeam.transforms.planning.conversion import Conversion


def _identity(release: HfCheckpoint, adapters: Sequence[HfCheckpoint]) -> dict[str, str]:
    """What a release and the adapters that are merged into it hold; see `ArraySource.identity`."""
    told = dict[str, str]()
    for number, files in enumerate((release, *adapters)):
        of = f" of adapter {number}" if number else ""
        if "://" in files.root:
            told[f"the source{of}"] = files.root
        config = json.dumps(files.config, sort_keys=True).encode()
        told[f"the configuration{of}"] = hashlib.sha256(config).hexdigest()[:16]
        told |= {shard.name + of: shard.content for shard in files.shards}
    return told


class MappedRelease(ArraySource):
    """A Hugging Face release as MaxText's arrays, by a plan without problems."""

    def __init__(self, conversion: Conversion):
        self.conversion, self.url = conversion, conversion.source.root
        self._arrays = {array.key: array for array in conversion.plan.arrays}
        self._costs: dict[tuple[str, tuple[Box, ...]], Cost] = {}
        self._stacked_axes: dict[str, tuple[int, ...]] = {}
        self.arrays: Mapping[str, Described] = {
            array.key: Described(
                array.shape,
                array.dtype,
                array.logical_axes,
                array.lossy,
                order=tuple(reversed(grid.growth)),
                grain=(1,) * len(array.shape),
                element_bytes=grid.element_bytes,
                position=self._position(array),
            )
            for array, grid in zip(conversion.plan.arrays, conversion.grids, strict=True)
        }

    def _position(self, array: Array) -> tuple[str, int]:
        names = (name for part in array.parts for name in part.tensors)
        stored = (self.conversion.encodings[name].weight for name in names if name in self.conversion.encodings)
        return next(((tensor.path, tensor.offset) for tensor in stored), ("", 0))

    def make(
        self, wanted: Sequence[Wanted], empty: Allocate = np.empty, results: Sequence[Allocate] | None = None
    ) -> tuple[list[np.ndarray], int]:
        boxes, makers, later = [], [], {}
        for number, (want, result) in enumerate(zip(wanted, results or [empty] * len(wanted), strict=True)):
            array = self._arrays[want.key]
            if array.dtype != want.dtype and is_float(array.dtype) and is_float(want.dtype):
                array = dataclasses.replace(array, dtype=want.dtype)
            if array.dtype != want.dtype:  # integers of another size
                later[number], result = result, empty
            boxes.append((array, want.box))
            makers.append(result)
        made, nbytes = make_boxes(boxes, self.conversion.encodings, empty, makers)
        for number, result in later.items():
            made[number] = cast(made[number], wanted[number].dtype, wanted[number].key, result)
        return made, nbytes

    def cost(self, key: str, boxes: Sequence[Box]) -> Cost:
        stacked = self.stacked(key)
        alike: dict[Box, list[Box]] = {}  # by the tensors that they need parts of: the same parts of each of these
        for box in boxes:
            one = tuple((0, 1) if axis in stacked else span for axis, span in enumerate(box))
            alike.setdefault(tuple(box[axis] for axis in stacked), []).append(one)
        nbytes = runs = 0
        for tensors, parts in alike.items():
            cost = self._cost_of_one(key, tuple(parts))
            nbytes, runs = nbytes + volume(tensors) * cost.nbytes, runs + volume(tensors) * cost.runs
        return Cost(nbytes, runs)

    def _cost_of_one(self, key: str, boxes: tuple[Box, ...]) -> Cost:
        """The cost of boxes, spelled out; once for all boxes of other layers and experts that are the same but for
        these.
        """
        if (key, boxes) not in self._costs:
            found = fetches_for(piece for box in boxes for piece in self._arrays[key].pieces(box))
            reads = [
                read
                for name, fetched in found.items()
                for box, _ in fetched
                for read in self.conversion.encodings[name].reads(box)
            ]
            self._costs[key, boxes] = Cost(sum(read.nbytes for read in reads), sum(read.runs for read in reads))
        return self._costs[key, boxes]

    def stacked(self, key: str) -> tuple[int, ...]:
        if key not in self._stacked_axes:
            self._stacked_axes[key] = stacked_axes(self._arrays[key], self.conversion.encodings)
        return self._stacked_axes[key]

    def identity(self) -> dict[str, str]:
        told = _identity(self.conversion.source, [adapter.files for adapter in self.conversion.adapters])
        return told | {"what the family's table makes of it": self.conversion.making[:16]}

    def check(self) -> None:
        self.conversion.check()

    def twins(self) -> list[list[str]]:
        keys = list(self._arrays)
        return [[keys[number] for number in group] for group in find_twins(list(self._arrays.values()))]


class Tensors(ArraySource):
    """A release as it is: its tensors under their own names; quantised ones dequantised, in float32.

    Args:
      files: the release, and the adapters that are merged into it.
      encodings: its tensors.
    """

    def __init__(self, files: Sequence[HfCheckpoint], encodings: Mapping[str, Encoding]):
        self.url, self._files, self._encodings = files[0].root, files, encodings
        self.arrays: Mapping[str, Described] = {name: self._described(encoding) for name, encoding in encodings.items()}

    @staticmethod
    def _described(encoding: Encoding) -> Described:
        dtype = values_dtype(encoding)
        order = tuple(axis for axis in encoding.order[:-1] if axis not in encoding.indivisible)
        stored = -(-stored_bytes(encoding) // max(1, math.prod(encoding.shape)))
        position = encoding.weight.path, encoding.weight.offset
        axes, grain = (None,) * len(encoding.shape), (1,) * len(encoding.shape)
        return Described(
            encoding.shape, dtype, axes, None, order, grain, stored + 2 * dtype.itemsize, position, has_axes=False
        )

    def make(
        self, wanted: Sequence[Wanted], empty: Allocate = np.empty, results: Sequence[Allocate] | None = None
    ) -> tuple[list[np.ndarray], int]:
        reads = [self._encodings[key].reads(box) for key, box, *_ in wanted]
        stored, nbytes = read_boxes([read for group in reads for read in group], empty)
        rest = iter(stored)
        made = []
        for (key, box, dtype, *_), group, result in zip(wanted, reads, results or [empty] * len(wanted), strict=True):
            encoding = self._encodings[key]
            values = encoding.decode([next(rest) for _ in group], box, self.arrays[key].dtype, empty)
            made.append(cast(values, dtype, key, result))
        return made, nbytes

    def cost(self, key: str, boxes: Sequence[Box]) -> Cost:
        reads = [read for box in boxes for read in self._encodings[key].reads(box)]
        return Cost(sum(read.nbytes for read in reads), sum(read.runs for read in reads))

    def identity(self) -> dict[str, str]:
        return _identity(self._files[0], self._files[1:])

    def check(self) -> None:
        for files in self._files:
            files.check()
