"""The way of the bytes, without Beam: what is fetched is read, decoded, viewed in the array's layout, and copied once.

    fetches ─ read ▸ stored ─ decode ▸ values ─ arrange ▸ views ─ stack ▸ arrays

A pipeline's unit takes the four steps in four stages (`transforms/stages/chain.py`). `make_boxes` takes them at once,
for any boxes of any arrays.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from weightbeam.formats.encodings import Encoding
from weightbeam.formats.safetensors import Allocate
from weightbeam.model_mappings.boxes import Box, extent
from weightbeam.model_mappings.cells import Piece
from weightbeam.model_mappings.plan import Array
from weightbeam.transforms.cutting.units import Fetch, Fetches, fetches_for
from weightbeam.transforms.execution.stack import stack

Views = list[tuple[Piece, np.ndarray]]  # the pieces of what is to be made, each with its source, in the array's layout
# what an encoding's values can be computed in; other dtypes are cast from float32
DECODED = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32))


def read(fetches: Sequence[Fetch], empty: Allocate = np.empty) -> tuple[list[list[np.ndarray]], int]:
    """Reads what the fetches need: for each its stored arrays, and the bytes read from the files."""
    groups = [fetch.encoding.reads(fetch.box) for fetch in fetches]
    reads = [read for group in groups for read in group]
    arrays: list[Any] = [None] * len(reads)
    total = 0
    for kind in dict.fromkeys(map(type, reads)):  # boxes of files, chunks of a checkpoint: each fetches many at once
        numbers = [number for number, read in enumerate(reads) if type(read) is kind]
        fetched, nbytes = kind.fetch([reads[number] for number in numbers], empty)
        total += nbytes
        for number, values in zip(numbers, fetched, strict=True):
            arrays[number] = values
    rest = iter(arrays)
    return [[next(rest) for _ in group] for group in groups], total


def decode(
    fetches: Sequence[Fetch], stored: Sequence[list[np.ndarray]], empty: Allocate = np.empty
) -> list[np.ndarray]:
    """The values of each fetch; those that are stored plainly pass as they are."""
    return [
        fetch.encoding.decode(arrays, fetch.box, fetch.dtype, empty)
        for fetch, arrays in zip(fetches, stored, strict=True)
    ]


def arrange(fetches: Sequence[Fetch], values: Sequence[np.ndarray], pieces: Sequence[tuple[int, Piece]]) -> Views:
    """Views of the values in the array's layout, one for each piece, which comes with the number of its fetch. No copy."""
    views = []
    for number, piece in pieces:
        origin = tuple(start for start, _ in fetches[number].box)
        views.append((piece, piece.source.of(values[number], origin).transpose(piece.order)))
    return views


@dataclasses.dataclass(frozen=True, slots=True)
class BoxRecipe:
    """A box of an array to make, as one.

    Attributes:
      box: of the array.
      dtype: of what is made.
      fill: the value of elements that no piece supplies; None where the pieces tile the box.
      pieces: what it is made of, each with the number of the fetch that holds its source.
    """

    box: Box
    dtype: np.dtype
    fill: float | None
    pieces: tuple[tuple[int, Piece], ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """It isn't cut further."""
        return (1,) * len(self.box)


def plan_boxes(
    wanted: Sequence[tuple[Array, Box]], encodings: Mapping[str, Encoding]
) -> tuple[list[Fetch], list[BoxRecipe]]:
    """What to fetch for boxes of arrays, nothing twice, and how they are made of it."""
    dtypes = {array.dtype for array, _ in wanted}
    dtype = dtypes.pop() if len(dtypes) == 1 and dtypes <= set(DECODED) else np.dtype(np.float32)
    pieces = [tuple(array.pieces(box)) for array, box in wanted]
    fetches = Fetches(fetches_for(itertools.chain(*pieces)), encodings, dtype)
    return fetches, [
        BoxRecipe(box, array.dtype, array.fill, fetches.placed(made_of))
        for (array, box), made_of in zip(wanted, pieces, strict=True)
    ]


def make_boxes(
    wanted: Sequence[tuple[Array, Box]],
    encodings: Mapping[str, Encoding],
    empty: Allocate = np.empty,
    results: Sequence[Allocate] | None = None,
) -> tuple[list[np.ndarray], int]:
    """Boxes of arrays, read and made here and now; what they share of a tensor is read once.

    Args:
      wanted: arrays, each with a box of it.
      encodings: how the tensors are stored, by name.
      empty: makes what is read and decoded.
      results: make what is returned, one for each box; `empty` where nothing is given.

    Returns:
      An array for each in C order, and the bytes read from the files.

    Raises:
      StorageError: a file can't be read, or ends too early.
      ContentError: what it holds can't be right.
    """
    fetches, recipes = plan_boxes(wanted, encodings)
    stored, nbytes = read(fetches, empty)
    values = decode(fetches, stored, empty)
    made = []
    for recipe, result in zip(recipes, results or [empty] * len(recipes), strict=True):
        made.append(stack(recipe, arrange(fetches, values, recipe.pieces), result).reshape(extent(recipe.box)))
    return made, nbytes
