"""A kernel of MaxText's with an adapter of MaxText's in it: `W + alpha / rank · A · B`, layer by layer, in float32.

    kernel            (heads, layers, dim, embed)
    kernel_lora_a     (heads·dim, layers, rank)       the axes of its inputs merged into one
    kernel_lora_b     (rank, layers, embed)           those of its outputs likewise

Which axes of a kernel are inputs follows from the model's table, not from shapes. A box of the kernel needs the box's
rows of A and columns of B. The table's operations (rotary order, the query's factor) are in B as they are in the
kernel.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np

from weightbeam.formats.adapters.delta import Product, doubled
from weightbeam.formats.adapters.merged import FLOAT32, STRIP_ELEMENTS, is_finite
from weightbeam.formats.encodings import ContentError, StoredArray
from weightbeam.formats.encodings.encoding import InOrder, Read
from weightbeam.formats.orbax.source import OrbaxArray
from weightbeam.formats.safetensors import Allocate
from weightbeam.model_mappings.boxes import Box, Range, extent, hull, inside, intersection, slices, whole


@dataclasses.dataclass(frozen=True, slots=True)
class LoraFactor:
    """A, (in, rank), or B, (rank, out), as a checkpoint holds them: with axes of layers among these two.

    Attributes:
      array: how it is stored.
      at: its first axis of layers.
      rank_axis: which of the other two is the rank: 1 of A, 0 of B.
    """

    array: StoredArray
    at: int
    rank_axis: int

    @property
    def rank(self) -> int:
        return self._others[self.rank_axis]

    @property
    def size(self) -> int:
        """Of its inputs, or its outputs."""
        return self._others[1 - self.rank_axis]

    @property
    def _others(self) -> tuple[int, ...]:
        shape = self.array.shape
        return *shape[: self.at], *shape[self.at + len(shape) - 2 :]

    def box(self, layers: Box, span: Range) -> Box:
        """The box of some layers, and some inputs or outputs of each."""
        box = [span, (0, self.rank)] if self.rank_axis else [(0, self.rank), span]
        box[self.at : self.at] = layers
        return tuple(box)

    def values(self, stored: list[np.ndarray], box: Box) -> np.ndarray:
        """The values of a box, the axes of layers in front."""
        stacked = len(box) - 2
        values = self.array.decode(stored, box, FLOAT32)
        return np.moveaxis(values, range(self.at, self.at + stacked), range(stacked))


@dataclasses.dataclass(frozen=True, slots=True)
class LoraPair:
    """Both factors of some layers of a kernel; of one layer, where one side has axes of layers and the other hasn't.

    Attributes:
      layers: of the kernel, a range for each of its axes of layers.
      first: where they begin on the factors' axes of layers.
      scaling: what the product is multiplied by.
    """

    layers: Box
    first: tuple[int, ...]
    a: LoraFactor
    b: LoraFactor
    scaling: float

    def held(self, met: Box) -> Box:
        """Where some of the kernel's layers lie in the factors."""
        if len(self.first) != len(self.layers):
            return tuple((at, at + 1) for at in self.first)
        return tuple(
            (low - start + at, high - start + at)
            for (low, high), (start, _), at in zip(met, self.layers, self.first, strict=True)
        )

    def index(self, layer: tuple[int, ...]) -> tuple[int, ...]:
        """Of a layer of a box of the kernel, in the factors of that box."""
        return layer if len(self.first) == len(self.layers) else (0,) * len(self.first)


@dataclasses.dataclass(frozen=True, slots=True)
class AdaptedKernel(InOrder):
    """See the module's text.

    Attributes:
      base: the kernel.
      pairs: what is added to it; several of one layer are summed.
      at: the first of its axes of layers.
      stacked: how many these are.
      inputs: how many of its other axes are inputs; they come first.
    """

    base: StoredArray
    pairs: tuple[LoraPair, ...]
    at: int
    stacked: int
    inputs: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def label(self) -> str:
        ranks = sorted({pair.a.rank for pair in self.pairs})
        return f"LoRA of rank {', '.join(map(str, ranks))} merged"

    @property
    def arrays(self) -> tuple[OrbaxArray, ...]:
        """The factors' arrays."""
        arrays = (factor.array for pair in self.pairs for factor in (pair.a, pair.b))
        return tuple(dict.fromkeys(array for array in arrays if isinstance(array, OrbaxArray)))

    def stored_as(self, find: Callable[[StoredArray], StoredArray]) -> AdaptedKernel:
        """The same, each array of it where `find` says that it is."""

        def found(factor: LoraFactor) -> LoraFactor:
            return dataclasses.replace(factor, array=find(factor.array))

        pairs = tuple(dataclasses.replace(pair, a=found(pair.a), b=found(pair.b)) for pair in self.pairs)
        return dataclasses.replace(self, base=find(self.base), pairs=pairs)

    def reads(self, box: Box) -> tuple[Read, ...]:
        factors = (read for _, _, a, b in self._met(box) for array, part in (a, b) for read in array.array.reads(part))
        return (*self.base.reads(box), *factors)

    def decode(self, stored: list[np.ndarray], box: Box, dtype: np.dtype, empty: Allocate = np.empty) -> np.ndarray:
        """The values in float32, whatever `dtype` is: who stacks them casts them."""
        rest = iter(stored)

        def take(array: StoredArray, part: Box) -> list[np.ndarray]:
            return list(itertools.islice(rest, len(array.reads(part))))

        values = empty(extent(box), FLOAT32)
        # put there, if it is put together
        found = self.base.decode(take(self.base, box), box, FLOAT32, lambda shape, dtype: values)
        if found is not values:
            values[...] = found
        turned = np.moveaxis(values, range(self.at, self.at + self.stacked), range(self.stacked))
        layers, inputs, outputs = self._split(box)
        rows, columns = (
            hull(part, sizes)[0] for part, sizes in zip((inputs, outputs), self._split_sizes(), strict=True)
        )
        for pair, met, (a, a_box), (b, b_box) in self._met(box):
            left, right = a.values(take(a.array, a_box), a_box), b.values(take(b.array, b_box), b_box)
            for index in np.ndindex(extent(met)):
                place = tuple(start - low + at for (start, _), (low, _), at in zip(met, layers, index, strict=True))
                one = _rows(left[pair.index(index)].astype(np.float32) * np.float32(pair.scaling), rows, inputs)
                other = _rows(right[pair.index(index)].astype(np.float32).T, columns, outputs).T
                self._add(turned[place], one, other, pair)
        return values

    def _split(self, box: Box) -> tuple[Box, Box, Box]:
        """Its ranges of layers, of inputs and of outputs."""
        others = (*box[: self.at], *box[self.at + self.stacked :])
        return box[self.at : self.at + self.stacked], others[: self.inputs], others[self.inputs :]

    def _split_sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        _, inputs, outputs = self._split(whole(self.shape))
        return extent(inputs), extent(outputs)

    def _met(self, box: Box) -> Iterator[tuple[LoraPair, Box, tuple[LoraFactor, Box], tuple[LoraFactor, Box]]]:
        """The pairs that reach a box: which of their layers, and which boxes of A and B."""
        layers, inputs, outputs = self._split(box)
        rows, columns = (
            hull(part, sizes)[1] for part, sizes in zip((inputs, outputs), self._split_sizes(), strict=True)
        )
        for pair in self.pairs:
            met = intersection(layers, pair.layers)
            if all(low < high for low, high in met):
                held = pair.held(met)
                yield pair, met, (pair.a, pair.a.box(held, rows)), (pair.b, pair.b.box(held, columns))

    def _add(self, kernel: np.ndarray, a: np.ndarray, b: np.ndarray, pair: LoraPair) -> None:
        """Adds `a · b` to a layer, (inputs, outputs), some of its first inputs at a time."""
        product = Product(np.ascontiguousarray(a), np.ascontiguousarray(doubled(b, 1)), 0, 0, b.shape[1])
        rows = math.prod(kernel.shape[1 : self.inputs])
        step = max(1, STRIP_ELEMENTS // max(1, rows * b.shape[1]))
        for first in range(0, kernel.shape[0], step):
            part = kernel[first : first + step]
            strip = np.ascontiguousarray(part).reshape(-1, b.shape[1])
            product.add_to(strip, first * rows)
            if not is_finite(strip):
                raise ContentError(
                    f"{_name(self.base)}: isn't finite once the adapter is merged; its factors ({_name(pair.a.array)}) or its alpha can't be right"
                )
            part[...] = strip.reshape(part.shape)


def _rows(values: np.ndarray, held: Box, wanted: Box) -> np.ndarray:
    """The rows of a box of the factors of an axis, of values that have the rows of the box `held` around it."""
    shaped = values.reshape(*extent(held), values.shape[-1])
    return shaped[slices(inside(wanted, held))].reshape(-1, values.shape[-1])


def _name(array: StoredArray) -> str:
    return str(getattr(array, "key", "") or getattr(getattr(array, "array", None), "key", "the kernel"))
