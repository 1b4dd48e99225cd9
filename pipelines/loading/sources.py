"""Where arrays come from: a release through its family's table, a release as it is, or an Orbax checkpoint.

All three are a `Source`: arrays by name, of which any box can be made.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorstore as ts

from weightbeam.formats.encodings import ContentError, Encoding, stored_bytes
from weightbeam.formats.orbax import find_items, open_arrays, record_of
from weightbeam.formats.safetensors import Checkpoint, Empty, open_checkpoint, read_boxes
from weightbeam.formats.sources import open_source
from weightbeam.formats.storage import StorageError, Store, open_store, reason
from weightbeam.model_mappings.boxes import Box, extent, volume, whole
from weightbeam.model_mappings.plan import Array, is_float
from weightbeam.pipelines.errors import RefusedError
from weightbeam.pipelines.keywords import sharding_rules
from weightbeam.pipelines.prepare import describe, refuse
from weightbeam.pipelines.report import count
from weightbeam.transforms.conversion import SAVE_DTYPES, Conversion, Options, prepare
from weightbeam.transforms.execution import make_boxes
from weightbeam.transforms.stack import copy
from weightbeam.transforms.units import fetches_for, find_twins


class Wanted(NamedTuple):
    """A box of an array, to be made in a dtype."""

    key: str
    box: Box
    dtype: np.dtype


class Cost(NamedTuple):
    """What reading takes: bytes, and contiguous runs or chunks that hold them."""

    nbytes: int
    runs: int


@dataclasses.dataclass(frozen=True)
class Described:
    """An array of a source, known but not read.

    Attributes:
      shape, dtype: of the array; of a release those that a conversion would store.
      axes: MaxText's logical name of each axis, None where it has none or none is known.
      lossy: why its values aren't the stored ones to the bit; None where they are.
      order: the axes that can be cut without reading more, in the order in which to cut: the slowest in the source first.
      grain: extents that are read whole.
      element_bytes: working memory for each element: as stored, as decoded, and as made.
      position: of its first byte, for the order of reading.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str | None, ...]
    lossy: str | None
    order: tuple[int, ...]
    grain: tuple[int, ...]
    element_bytes: int
    position: tuple[str, int] = ("", 0)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Source(Protocol):
    """Arrays by name; `url` says where they are."""

    url: str
    arrays: Mapping[str, Described]

    def make(self, wanted: Sequence[Wanted], empty: Empty = np.empty, results: Sequence[Empty] | None = None) -> tuple[list[np.ndarray], int]:
        """Boxes of arrays, and the bytes that were read. `empty` makes what is read on the way, `results` what is returned, one for each.

        Raises:
          StorageError: a file can't be read, or ends too early.
          ContentError: what it holds can't be right, or isn't a value of the dtype.
        """
        ...

    def cost(self, key: str, boxes: Sequence[Box]) -> Cost:
        """What reading these boxes of an array in one go takes."""
        ...

    def stacked(self, key: str) -> tuple[int, ...]:
        """The axes of an array whose index selects a tensor (layers, experts), where all of its tensors are stored alike.

        What a box costs doesn't depend on where along these axes it lies.
        """
        ...

    def twins(self) -> list[list[str]]:
        """The arrays in groups: those of a group are to be cut alike and made together, so that no byte is read twice."""
        ...


def cast(values: np.ndarray, dtype: np.dtype, key: str, empty: Empty = np.empty) -> np.ndarray:
    """The values in another dtype: floats by one cast from float32, integers if each of them fits.

    Raises:
      ContentError: an integer doesn't fit.
    """
    made = empty(values.shape, dtype)
    if values.dtype == dtype or (is_float(values.dtype) and is_float(dtype)):
        copy(values, made)
        return made
    np.copyto(made, values, casting="unsafe")
    if not np.array_equal(made, values):
        raise ContentError(f"{key} holds integers that aren't {dtype.name}'s: {values.min()} to {values.max()}")
    return made


def _form(encoding: Encoding) -> tuple[object, ...]:
    """What a box costs depends on this, and not on which tensor it is."""
    return type(encoding), encoding.shape, *((read.tensor.shape, read.tensor.dtype) for read in encoding.reads(whole(encoding.shape)))


class Release:
    """A Hugging Face release as MaxText's arrays, by a plan without problems."""

    def __init__(self, conversion: Conversion):
        self.conversion, self.url = conversion, conversion.checkpoint.root
        self._arrays = {array.key: array for array in conversion.plan.arrays}
        self._costs: dict[tuple[str, tuple[Box, ...]], Cost] = {}
        self._stacked_axes: dict[str, tuple[int, ...]] = {}
        self.arrays: Mapping[str, Described] = {
            array.key: Described(
                array.shape,
                array.dtype,
                array.names,
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

    def make(self, wanted: Sequence[Wanted], empty: Empty = np.empty, results: Sequence[Empty] | None = None) -> tuple[list[np.ndarray], int]:
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
        """The cost of boxes, spelled out; once for all boxes of other layers and experts that are the same but for these."""
        if (key, boxes) not in self._costs:
            found = fetches_for((self._arrays[key], box) for box in boxes)
            reads = [read for name, fetched in found.items() for box, _ in fetched for read in self.conversion.encodings[name].reads(box)]
            self._costs[key, boxes] = Cost(sum(read.nbytes for read in reads), sum(read.runs for read in reads))
        return self._costs[key, boxes]

    def stacked(self, key: str) -> tuple[int, ...]:
        if key not in self._stacked_axes:
            array = self._arrays[key]
            part, alike = array.parts[0], len(array.parts) == 1
            forms = {_form(self.conversion.encodings[name]) for name in part.tensors} if alike else set()
            alike = alike and len(forms) == 1 and len(set(part.tensors)) == len(part.tensors)
            self._stacked_axes[key] = tuple(axis for axis in sorted(part.stack_axes) if len(part.target_axes[axis]) == 1) if alike else ()
        return self._stacked_axes[key]

    def twins(self) -> list[list[str]]:
        keys = list(self._arrays)
        return [[keys[number] for number in group] for group in find_twins(list(self._arrays.values()))]


class Tensors:
    """A release as it is: its tensors under their own names; quantised ones dequantised, in float32."""

    def __init__(self, checkpoint: Checkpoint, encodings: Mapping[str, Encoding]):
        self.url, self._encodings = checkpoint.root, encodings
        self.arrays: Mapping[str, Described] = {name: self._described(encoding) for name, encoding in encodings.items()}

    @staticmethod
    def _described(encoding: Encoding) -> Described:
        dtype = encoding.weight.dtype if encoding.label is None else np.dtype(np.float32)
        order = tuple(axis for axis in encoding.order[:-1] if axis not in encoding.indivisible)
        stored = -(-stored_bytes(encoding) // max(1, math.prod(encoding.shape)))
        position = encoding.weight.path, encoding.weight.offset
        axes, grain = (None,) * len(encoding.shape), (1,) * len(encoding.shape)
        return Described(encoding.shape, dtype, axes, None, order, grain, stored + 2 * dtype.itemsize, position)

    def make(self, wanted: Sequence[Wanted], empty: Empty = np.empty, results: Sequence[Empty] | None = None) -> tuple[list[np.ndarray], int]:
        reads = [self._encodings[key].reads(box) for key, box, _ in wanted]
        stored, nbytes = read_boxes([read for group in reads for read in group], empty)
        rest = iter(stored)
        made = []
        for (key, box, dtype), group, result in zip(wanted, reads, results or [empty] * len(wanted), strict=True):
            encoding = self._encodings[key]
            values = encoding.decode([next(rest) for _ in group], box, self.arrays[key].dtype, empty)
            made.append(cast(values, dtype, key, result))
        return made, nbytes

    def cost(self, key: str, boxes: Sequence[Box]) -> Cost:
        reads = [read for box in boxes for read in self._encodings[key].reads(box)]
        return Cost(sum(read.nbytes for read in reads), sum(read.runs for read in reads))

    def stacked(self, key: str) -> tuple[int, ...]:
        return ()

    def twins(self) -> list[list[str]]:
        return [[key] for key in self.arrays]


class Orbax:
    """An Orbax checkpoint, ours or anyone's."""

    def __init__(self, items: Store):
        self.url, self._stores = items.url, open_arrays(items)
        axes = record_of(items).get("axes", {})
        self.arrays: Mapping[str, Described] = {key: self._described(store, axes.get(key)) for key, store in self._stores.items()}

    @staticmethod
    def _described(store: ts.TensorStore, axes: Sequence[str | None] | None) -> Described:
        shape, dtype = tuple(store.shape), np.dtype(store.dtype.numpy_dtype)
        chunk = tuple(store.chunk_layout.read_chunk.shape or shape)
        names = tuple(axes) if axes is not None and len(axes) == len(shape) else (None,) * len(shape)
        order = tuple(axis for axis, (size, step) in enumerate(zip(shape, chunk, strict=True)) if step < size)
        return Described(shape, dtype, names, None, order, chunk, 3 * dtype.itemsize)  # a chunk as it is stored, decoded, and what is made

    def make(self, wanted: Sequence[Wanted], empty: Empty = np.empty, results: Sequence[Empty] | None = None) -> tuple[list[np.ndarray], int]:
        makers = list(results or [empty] * len(wanted))
        plain = [self.arrays[want.key].dtype == want.dtype for want in wanted]
        made = [(maker if same else empty)(extent(want.box), self.arrays[want.key].dtype) for want, maker, same in zip(wanted, makers, plain, strict=True)]
        reads = [self._read(key, box, into) for (key, box, _), into in zip(wanted, made, strict=True)]
        try:
            for read in reads:
                read.result()
        except ValueError as e:  # TensorStore's, of whatever went wrong
            raise StorageError(f"{self.url}: {e}") from e
        nbytes = sum(self.cost(key, [box]).nbytes for key, box, _ in wanted)
        for number, (want, maker) in enumerate(zip(wanted, makers, strict=True)):
            if not plain[number]:
                made[number] = cast(made[number], want.dtype, want.key, maker)
        return made, nbytes

    def _read(self, key: str, box: Box, into: np.ndarray) -> ts.WriteFutures:
        """Begins to read a box into an array."""
        part = self._stores[key][tuple(slice(*span) for span in box)]
        return ts.array(into, copy=False, write=True).write(part[ts.d[:].translate_to[0]] if box else part)

    def cost(self, key: str, boxes: Sequence[Box]) -> Cost:
        array = self.arrays[key]
        chunks = set()
        for box in boxes:
            if volume(box):
                touched = [range(start // step, -(-stop // step)) for (start, stop), step in zip(box, array.grain, strict=True)]
                chunks |= set(itertools.product(*touched))
        sizes = (tuple((at * step, min((at + 1) * step, size)) for at, step, size in zip(chunk, array.grain, array.shape, strict=True)) for chunk in chunks)
        return Cost(sum(map(volume, sizes)) * array.dtype.itemsize, len(chunks))

    def stacked(self, key: str) -> tuple[int, ...]:
        return ()

    def twins(self) -> list[list[str]]:
        return [[key] for key in self.arrays]


CHOICES = frozenset({"scan_layers", "param_scan_axis", "save_dtype", "sharding_rules", "maxtext_model", "vocab_size", "mtp", "multimodal"})


def choose(given: Mapping[str, Any]) -> Options:
    """The options of a plan that keywords ask for; `sharding_rules` may be a file, as on the command line.

    Raises:
      TypeError: there is no such option.
      RefusedError: the file of sharding rules can't be read, or a dtype isn't one of those that can be stored.
    """
    if unknown := sorted(given.keys() - CHOICES):
        raise TypeError(f"unknown options: {', '.join(unknown)}; those that say what the tree is are {', '.join(sorted(CHOICES))}")
    values = dict(given)
    if isinstance(rules := given.get("sharding_rules"), (str, Path)):
        values["sharding_rules"] = sharding_rules(str(rules), given.get("maxtext_model"))
    if (dtype := values.get("save_dtype")) is not None:
        values["save_dtype"] = np.dtype(dtype).name if not isinstance(dtype, str) else dtype
        if values["save_dtype"] not in SAVE_DTYPES:
            raise RefusedError(f"save_dtype={values['save_dtype']}: should be one of {', '.join(SAVE_DTYPES)}")
    return Options(**values)


def find_source(where: str, options: Options, as_is: bool = False) -> Source:
    """The arrays of a release or of an Orbax checkpoint.

    Args:
      where: a folder, `gs://…`, or `hf://…`; of an Orbax checkpoint its root, a step, or the item.
      options: for a release's plan.
      as_is: a release's own tensors, not MaxText's arrays.

    Raises:
      RefusedError: there is none, or problems stand against it: all of them.
    """
    try:
        store = open_store(where)
        store.check_readable()
        if not any(name == "config.json" or name.endswith(".safetensors") for name in store.entries()):
            return Orbax(find_items(store))
        checkpoint = open_checkpoint(store)
    except StorageError as e:
        raise RefusedError(str(e)) from e
    except (OSError, ValueError, KeyError, TypeError) as e:  # a folder that can't be looked at, or metadata that are damaged
        raise RefusedError(f"{where}: can't be read: {reason(e) if isinstance(e, OSError) else e}") from e
    if as_is:
        source = open_source(checkpoint)
        if problems := [*checkpoint.problems, *source.problems]:
            raise RefusedError(f"{count(len(problems), 'problem')}:\n{describe(problems)}", problems)
        return Tensors(checkpoint, source.encodings)
    conversion = prepare(options, checkpoint)
    refuse(conversion, conversion.plan.problems)
    return Release(conversion)
