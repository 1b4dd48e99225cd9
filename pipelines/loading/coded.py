"""Plain FP8 on its way to a device as codes and scales: half the bytes of bfloat16, and no arithmetic on the host.

    value = float32(code) · scale, rounded once to the array's dtype

The host copies codes in the order of their tensors: the axes that select a tensor first, then the tensor's own. The
device scales them, and puts the axes into the array's order (`decoding.py`). A scale belongs to a block of a tensor. In
the array that is a run of each axis, so that one scale is sent for each of these:

    tensor (heads · dim, embed)           heads = 4, dim = 192; a scale for each 128 × 128
    array  (embed, layers, heads, dim)    runs of 128, 1, 1 and 64 elements: a block's edge may be in the middle of a head
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from weightbeam.formats.encodings import Encoding, Scaled
from weightbeam.formats.encodings.nibbles import finite
from weightbeam.formats.safetensors import Allocate
from weightbeam.model_mappings.boxes import Box, extent, slices
from weightbeam.model_mappings.cells import Part
from weightbeam.model_mappings.plan import Array
from weightbeam.pipelines.loading.release import MappedRelease
from weightbeam.pipelines.loading.source import Wanted
from weightbeam.transforms.cutting.units import Fetch
from weightbeam.transforms.execution.boxes import BoxRecipe, arrange, plan_boxes, read
from weightbeam.transforms.execution.stack import stack
from weightbeam.transforms.planning.conversion import Conversion

CODE = "float8_e4m3fn"  # it has no infinities, of which a scale of 0 makes another NaN on each kind of processor
# of it and the smallest code, 2 ** -9, comes the smallest normal float32; CPUs and TPUs take a smaller one for 0
SMALLEST = 2.0**-117
MIN_ELEMENTS = 32  # that have one scale: with fewer of them scales add more than an eighth to the codes' bytes


class Form(NamedTuple):
    """What a program that decodes is compiled for.

    Attributes:
      codes: the shape of the codes, with the array's axes in the order in which the tensors have them.
      scales: as many along each of these axes as it has runs.
      order: which axis of `codes` each axis of the array is.
    """

    codes: tuple[int, ...]
    scales: tuple[int, ...]
    order: tuple[int, ...]


class Coded(NamedTuple):
    """A box of an array, not decoded yet: codes in uint8, and scales in float32."""

    codes: np.ndarray
    scales: np.ndarray
    form: Form

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values, as the array has them."""
        return tuple(self.codes.shape[axis] for axis in self.form.order)


class Field(NamedTuple):
    """How the blocks of a tensor lie in a box of an array.

    Attributes:
      runs: elements along each axis of the array that have one scale.
      blocks: for each axis of the tensor the numbers of its blocks, one for each run, to be broadcast against each
        other.
    """

    runs: tuple[int, ...]
    blocks: tuple[np.ndarray, ...]


class CodedRelease(MappedRelease):
    """A release whose plain FP8 isn't decoded: boxes of arrays among `coded` are `Coded` where they are wanted alone."""

    def __init__(self, conversion: Conversion):
        super().__init__(conversion)
        self.coded = {array.key: array for array in conversion.plan.arrays if _is_coded(array, conversion.encodings)}
        self._fields: dict[tuple[str, Box], Field] = {}

    def make(
        self, wanted: Sequence[Wanted], empty: Allocate = np.empty, results: Sequence[Allocate] | None = None
    ) -> tuple[list[np.ndarray | Coded], int]:
        numbers = [number for number, want in enumerate(wanted) if self.form_of(want)]
        made, nbytes = self._make_coded([wanted[number] for number in numbers], empty)
        coded = {number: each for number, each in zip(numbers, made, strict=True) if each}
        left = [number for number in range(len(wanted)) if number not in coded]
        values, more = super().make(
            [wanted[number] for number in left], empty, results and [results[number] for number in left]
        )
        together = coded | dict(zip(left, values, strict=True))
        return [together[number] for number in range(len(wanted))], nbytes + more

    def form_of(self, want: Wanted) -> Form | None:
        if want.key not in self.coded or not want.alone:
            return None
        part, runs, sizes = self.coded[want.key].parts[0], self._field(want.key, want.box).runs, extent(want.box)
        if math.prod(runs) < MIN_ELEMENTS:
            return None
        axes = sorted(
            range(len(sizes)), key=lambda axis: min((factor.which for factor in _free(part, axis)), default=-1)
        )
        order = tuple(axes.index(axis) for axis in range(len(sizes)))
        return Form(tuple(sizes[axis] for axis in axes), tuple(sizes[axis] // runs[axis] for axis in axes), order)

    def _make_coded(self, wanted: Sequence[Wanted], empty: Allocate) -> tuple[list[Coded | None], int]:
        """Boxes in arrays that `empty` makes; None where a scale is so small that a device may make 0 of what it
        scales.
        """
        fetches, recipes = plan_boxes([(self.coded[want.key], want.box) for want in wanted], self.conversion.encodings)
        stored, nbytes = read(fetches, empty)
        codes = [arrays[0].view(np.uint8) for arrays in stored]
        made: list[Coded | None] = []
        for want, recipe in zip(wanted, recipes, strict=True):
            form = self.form_of(want)
            assert form is not None
            coded = Coded(empty(form.codes, np.dtype(np.uint8)), np.empty(form.scales, np.float32), form)
            into, scales = coded.codes.transpose(form.order), coded.scales.transpose(form.order)
            _arrange_scales(
                recipe, self.coded[want.key].parts[0], self._field(want.key, want.box), fetches, stored, scales
            )
            if ((np.abs(scales) < SMALLEST) & (scales != 0)).any():
                made.append(None)
                continue
            stack(
                dataclasses.replace(recipe, dtype=into.dtype),
                arrange(fetches, codes, recipe.pieces),
                lambda shape, _, into=into: into.reshape(shape, copy=False),
            )
            made.append(coded)
        return made, nbytes

    def _field(self, key: str, box: Box) -> Field:
        """How blocks lie in a box: alike for all layers and experts, so it is found once."""
        part = self.coded[key].parts[0]
        box = tuple((0, 1) if axis in part.stack_axes else span for axis, span in enumerate(box))
        if (key, box) not in self._fields:
            self._fields[key, box] = _find_field(part, self.conversion.encodings[part.tensors[0]], box)
        return self._fields[key, box]


def _free(part: Part, axis: int) -> list:
    """The factors of an array's axis that are the tensor's."""
    return [factor for factor in part.target_axes[axis] if factor.kind == "free"]


def _is_coded(array: Array, encodings: Mapping[str, Encoding]) -> bool:
    """Whether it is plain FP8 in tensors that are alike, and each of its axes belongs to one axis of theirs, or selects
    one of them.
    """
    part = array.parts[0]
    if len(array.parts) > 1 or array.fill is not None or part.rule.ops or not part.tensors:
        return False
    sizes = {_sizes(encodings[name]) for name in part.tensors}
    owners = [part.stack_axes, *(part.axes_of(axis) for axis in range(len(part.window_shape)))]
    apart = all(len(_free(part, axis)) in (0, len(factors)) for axis, factors in enumerate(part.target_axes))
    return None not in sizes and len(sizes) == 1 and apart and sum(map(len, owners)) == len(frozenset().union(*owners))


def _sizes(encoding: Encoding) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The sizes of a tensor and of its blocks; None for other formats."""
    if isinstance(encoding, Scaled) and encoding.code == CODE and encoding.zero is None and encoding.second is None:
        return encoding.shape, encoding.block
    return None


def _find_field(part: Part, encoding: Encoding, box: Box) -> Field:
    """How blocks lie in a box of one tensor: the relation, applied to the numbers of the tensor's rows, and of its
    columns.
    """
    assert isinstance(encoding, Scaled)
    runs, blocks = [1] * len(box), []
    for tensor_axis, size in enumerate(encoding.block):
        mine = part.axes_of(tensor_axis)
        narrow = tuple(span if axis in mine else (span[0], span[0] + 1) for axis, span in enumerate(box))
        line = np.arange(encoding.shape[tensor_axis], dtype=np.int32) // size
        numbers = np.broadcast_to(
            line.reshape([-1 if axis == tensor_axis else 1 for axis in range(len(encoding.shape))]), encoding.shape
        )
        pieces = [piece for cell in part.cells(narrow) for piece in cell.pieces(narrow)]
        views = [(piece, piece.source.of(numbers, (0,) * numbers.ndim).transpose(piece.order)) for piece in pieces]
        found = stack(BoxRecipe(narrow, line.dtype, None, ()), views).reshape(extent(narrow))
        for axis in mine:
            runs[axis] = _run(np.moveaxis(found, axis, 0))
            found = found[(slice(None),) * axis + (slice(None, None, runs[axis]),)]
        blocks.append(found)
    return Field(tuple(runs), tuple(blocks))


def _run(numbers: np.ndarray) -> int:
    """The length of the runs of equal rows, all of one length, that `numbers` is cut into."""
    changes = np.flatnonzero((numbers[1:] != numbers[:-1]).any(axis=tuple(range(1, numbers.ndim)))) + 1
    return int(np.gcd.reduce(np.array([len(numbers), *changes])))


def _arrange_scales(
    recipe: BoxRecipe,
    part: Part,
    field: Field,
    fetches: Sequence[Fetch],
    stored: Sequence[list[np.ndarray]],
    scales: np.ndarray,
) -> None:
    """Fills `scales`, one for each run of a box. Raises ContentError where one is NaN or infinite."""
    matrices: dict[Box, np.ndarray] = {}  # a tensor's scales, by its place along the axes that select it
    for number, piece in recipe.pieces:
        encoding, box = fetches[number].encoding, fetches[number].box
        assert isinstance(encoding, Scaled)
        place = tuple(
            span if axis in part.stack_axes else whole
            for axis, (span, whole) in enumerate(zip(piece.target.box, recipe.box, strict=True))
        )
        matrix = matrices.setdefault(place, np.zeros(encoding.scale.shape, np.float32))
        matrix[slices(encoding.reads(box)[1].box)] = finite(stored[number][1], encoding.scale)
    for place, matrix in matrices.items():
        at = (
            slice(start - first, stop - first) if axis in part.stack_axes else slice(None)
            for axis, ((start, stop), (first, _)) in enumerate(zip(place, recipe.box, strict=True))
        )
        scales[tuple(at)] = matrix[field.blocks]
