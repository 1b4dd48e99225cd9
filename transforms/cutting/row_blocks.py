"""Tensors that become themselves: units of their rows, and what is read for each; integers only."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from weightbeam.formats.encodings import Encoding, stored_bytes
from weightbeam.model_mappings.boxes import Box, extent, volume, whole
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
    """The units: rows of tensors."""
    total = sum(
        _working_bytes(encoding, _itemsize(name, files, quantized), whole(encoding.shape))
        for name, encoding in encodings.items()
    )
    names = list(encodings)

    def cut(number: int, unit_bytes: int) -> Iterator[Block]:
        name = names[number]
        grain = ROWS if name in quantized else 1
        return _blocks(number, encodings[name], _itemsize(name, files, quantized), grain, unit_bytes)

    return make_units(([number] for number in range(len(names))), cut, total, most, slots)


def _itemsize(name: str, files: FileLayout, quantized: Collection[str]) -> int:
    """Bytes that an element of a tensor takes when it is written, with its value where it becomes a code."""
    return VALUES.itemsize + 1 if name in quantized else files.tensors[name].dtype.itemsize


def _blocks(number: int, encoding: Encoding, itemsize: int, grain: int, unit_bytes: int) -> Iterator[Block]:
    """Boxes of a tensor, each as many rows as fit into a unit; where its rows are those of a matrix, whole grains.

    Where already the first take most of a unit, an adapter's factors for example, what further ones add may have the
    size of a unit: else each row would read the factors anew.
    """
    shape = encoding.shape
    axis = next((axis for axis in range(len(shape)) if axis not in encoding.indivisible), None)
    size = 1 if axis is None else shape[axis]
    grain = grain if axis == len(shape) - 2 else 1
    one = _working_bytes(encoding, itemsize, _cut(shape, axis, 0, grain))
    # for each further row
    many = max(1, _working_bytes(encoding, itemsize, whole(shape)) - one) / max(1, size - grain)
    room = unit_bytes - one if 4 * one < 3 * unit_bytes else unit_bytes
    rows = max(1, int(room / many) // grain) * grain
    parts, grains = -(-size // rows) if size else 1, -(-size // grain)
    for part in range(parts):
        box = _cut(shape, axis, grains * part // parts * grain, grains * (part + 1) // parts * grain)
        needed = _working_bytes(encoding, itemsize, box)
        yield Block(number, box, needed, (encoding.weight.path, encoding.weight.offset))


def _cut(shape: tuple[int, ...], axis: int | None, start: int, stop: int) -> Box:
    return tuple((min(start, size), min(stop, size)) if at == axis else (0, size) for at, size in enumerate(shape))


def _working_bytes(encoding: Encoding, itemsize: int, box: Box) -> int:
    """Memory for a box: as it is stored, as it is decoded, and as it is written, `itemsize` bytes an element; and what
    decoding takes beside.
    """
    made = volume(box) * itemsize
    return stored_bytes(encoding, box) + made * (2 if encoding.label else 1) + encoding.overhead.decoding
