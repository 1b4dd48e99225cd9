"""What a comparison takes: a tensor of which any box can be read, whatever it is stored in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import cast

import numpy as np

from weightbeam.formats.encodings import Encoding, values_dtype
from weightbeam.formats.orbax.scaled import ScaledArray
from weightbeam.formats.orbax.source import OrbaxArray
from weightbeam.model_mappings.boxes import Box
from weightbeam.transforms.cutting.units import Fetch
from weightbeam.transforms.execution.boxes import decode, read


@dataclasses.dataclass(frozen=True)
class Operand:
    """A tensor of one side, of which any box can be read.

    Attributes:
      shape, dtype: of its values.
      order, grain: how it is cut best, see `differences.cut`.
      read: the values of a box.
      lossy: why its values aren't the source's to the bit; None where they are.
      stored: the dtype in which they are stored, where that isn't the one that they are compared in.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    order: tuple[int, ...]
    grain: tuple[int, ...]
    read: Callable[[Box], np.ndarray]
    lossy: str | None = None
    stored: np.dtype | None = None

    @property
    def precision(self) -> np.dtype:
        """The dtype to whose numbers its values were rounded, if they were."""
        return self.stored or self.dtype


def stored_operand(encoding: Encoding | OrbaxArray | ScaledArray) -> Operand:
    """A tensor in a release's file, or an array of an Orbax checkpoint, codes and scales as one."""
    held = encoding.codes if isinstance(encoding, ScaledArray) else encoding
    dtype = encoding.dtype if isinstance(encoding, OrbaxArray | ScaledArray) else values_dtype(encoding)

    def fetch(box: Box) -> np.ndarray:
        fetches = [Fetch(cast(Encoding, encoding), box, dtype)]
        return decode(fetches, read(fetches)[0])[0]

    order = tuple(axis for axis in encoding.order if axis not in encoding.indivisible)
    grain = held.chunk if isinstance(held, OrbaxArray) else (1,) * len(encoding.shape)
    return Operand(encoding.shape, dtype, order, grain, fetch)
