"""Tensors that become themselves: units of their rows, and what is read for each; integers only."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Hashable, Iterator, Mapping

from weightbeam.formats.encodings import Encoding, stored_bytes
from weightbeam.formats.encodings.encoding import stored_form
from weightbeam.model_mappings.boxes import Box, extent, volume
from weightbeam.model_mappings.cells import Piece
from weightbeam.model_mappings.relation import View
from weightbeam.transforms.cutting.blocks import Block, make_units
from weightbeam.transforms.cutting.files import FileLayout
from weightbeam.transforms.cutting.quantizing import ROWS
from weightbeam.transforms.cutting.rows import VALUES


def itself(name: str, box: Box) -> Piece:
    """A box of a tensor as the same box of the same tensor."""
    sizes = extent(box)
    view = View(box, (1,) * len(box), tuple((n,) for n in sizes), tuple(((0, n),) for n in sizes))
    return Piece(name, view, view, tuple(range(len(box))), ())


def row_units(
    encodings: Mapping[str, Encoding], files: FileLayout, most: int, quantized: Collection[str], slots: int | None
) -> list[tuple[Block, ...]]:
    """The units: rows of tensors. How those of one form are cut is found once, for the first of them."""
    first: dict[Hashable, Encoding] = {}
    alike = [first.setdefault(stored_form(encoding), encoding) for encoding in encodings.values()]
    names, boxes = list(encodings), functools.cache(_boxes)
    # bytes that an element takes when it is written, with its value where it becomes a code
    itemsizes = [VALUES.itemsize + 1 if name in quantized else files.tensors[name].dtype.itemsize for name in names]

    def cut(number: int, unit_bytes: int) -> Iterator[Block]:
        weight, grain = encodings[names[number]].weight, ROWS if names[number] in quantized else 1
        for box, needed in boxes(alike[number], itemsizes[number], grain, unit_bytes):
            yield Block(number, box, needed, (weight.path, weight.offset))

    total = sum(map(functools.cache(_working_bytes), alike, itemsizes))
    return make_units(([number] for number in range(len(names))), cut, total, most, slots)


def _boxes(encoding: Encoding, itemsize: int, grain: int, unit_bytes: int) -> list[tuple[Box, int]]:
    """Boxes of a tensor, each as many rows as fit into a unit; where its rows are those of a matrix, whole grains. Each
    with the memory that it takes.

    Where already the first take most of a unit, an adapter's factors for example, what further ones add may have the
    size of a unit: else each row would read the factors anew.
    """
    shape = encoding.shape
    axis = next((axis for axis in range(len(shape)) if axis not in encoding.indivisible), None)
    size = 1 if axis is None else shape[axis]
    grain = grain if axis == len(shape) - 2 else 1
    one = _working_bytes(encoding, itemsize, _cut(shape, axis, 0, grain))
    many = max(1, _working_bytes(encoding, itemsize) - one) / max(1, size - grain)  # for each further row
    room = unit_bytes - one if 4 * one < 3 * unit_bytes else unit_bytes
    rows = max(1, int(room / many) // grain) * grain
    parts, grains = -(-size // rows) if size else 1, -(-size // grain)
    edges = [grains * part // parts * grain for part in range(parts + 1)]
    boxes = [_cut(shape, axis, start, stop) for start, stop in itertools.pairwise(edges)]
    return [(box, _working_bytes(encoding, itemsize, box)) for box in boxes]


def _cut(shape: tuple[int, ...], axis: int | None, start: int, stop: int) -> Box:
    return tuple((min(start, size), min(stop, size)) if at == axis else (0, size) for at, size in enumerate(shape))


def _working_bytes(encoding: Encoding, itemsize: int, box: Box | None = None) -> int:
    """Memory for a box, or for all: as it is stored, as it is decoded, and as it is written, `itemsize` bytes an
    element; and what decoding takes beside.
    """
    made = (math.prod(encoding.shape) if box is None else volume(box)) * itemsize
    return stored_bytes(encoding, box) + made * (2 if encoding.label else 1) + encoding.overhead.decoding
