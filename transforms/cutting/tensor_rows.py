"""Which rows of which tensors blocks of arrays become, and of what: the table read back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from weightbeam.model_mappings.boxes import Box, around, volume
from weightbeam.model_mappings.cells import Cell, Part, Piece
from weightbeam.model_mappings.ops import inverses
from weightbeam.model_mappings.plan import Array
from weightbeam.transforms.cutting.blocks import Block, element_box
from weightbeam.transforms.cutting.grid import Grid


def rows_of(
    arrays: Sequence[Array], grids: Sequence[Grid], blocks: Sequence[Block]
) -> dict[str, list[tuple[Box, tuple[tuple[int, Piece], ...]]]]:
    """By tensor the boxes that blocks of arrays fill, and with what: pieces, each with the number of the block that
    holds its source; none where the box is the padding behind them.
    """
    pieces: dict[str, list[tuple[int, Piece]]] = {}
    padding: dict[str, Box] = {}  # behind the last row that has a source
    for number, block in enumerate(blocks):
        array, box = arrays[block.array], element_box(grids[block.array].spec, block.shards)
        for cell in array.cells(box):
            for piece in back(cell, box, array.key):
                pieces.setdefault(str(cell.tensor), []).append((number, piece))
                if cell.part.rule.padded:
                    padding[str(cell.tensor)] = _behind(cell.part)
    made = {name: list(_boxes(placed)) for name, placed in pieces.items()}
    for name, box in padding.items():
        if any(piece.target.box[0][1] == box[0][0] for _, piece in pieces[name]):  # the unit that has the last row
            made[name].append((box, ()))
    return made


def _behind(part: Part) -> Box:
    """The padding of a part's tensor."""
    rows, *others = part.source_box()
    return ((rows.stop, part.rule.padded), *((0, axis.stop) for axis in others))


def back(cell: Cell, box: Box, key: str) -> Iterator[Piece]:
    """What a cell takes of a box of its array, as pieces from the array to the tensor."""
    for piece in cell.pieces(box):
        order = tuple(map(piece.order.index, range(len(piece.order))))
        yield Piece(key, piece.target, piece.source, order, inverses(piece.ops))


def _boxes(pieces: Sequence[tuple[int, Piece]]) -> Iterator[tuple[Box, tuple[tuple[int, Piece], ...]]]:
    """The boxes of a tensor that pieces fill, and which; pieces whose boxes join without holes fill one."""
    boxes: list[tuple[Box, int, list[tuple[int, Piece]]]] = []  # with the elements that are filled
    for number, piece in pieces:
        new = (piece.target.box, _elements(piece), [(number, piece)])
        boxes.append(new)
        while len(boxes) > 1:
            (a, filled, mine), (b, more, others) = boxes[-1], boxes[-2]
            union = around(a, b)
            if volume(union) > volume(a) + volume(b):
                break
            boxes[-2:] = [(union, filled + more, others + mine)]
    for box, filled, inside in boxes:
        if filled == volume(box):
            yield box, tuple(inside)
        else:  # rows of several windows alternate: each window on its own
            yield from ((row, ((number, piece),)) for number, piece in inside for row in _rows(piece))


def _elements(piece: Piece) -> int:
    """Elements of a piece."""
    picks = itertools.chain(*piece.target.picks)
    return math.prod(pick[1] - pick[0] for pick in picks if not isinstance(pick, int))


def _rows(piece: Piece) -> Iterator[Box]:
    """The box of a piece that fills all of it."""
    if _elements(piece) != volume(piece.target.box):
        raise ValueError(
            f"rows of a tensor that is made of {piece.tensor} alternate with others that aren't made with them"
        )
    yield piece.target.box
