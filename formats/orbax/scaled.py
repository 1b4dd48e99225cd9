"""Weights of an Orbax checkpoint that are FP8 codes, by their values: as quantised tensors of a release are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from weightbeam.formats.encodings.encoding import InOrder, Read, StoredArray, cover
from weightbeam.formats.encodings.nibbles import finite
from weightbeam.formats.encodings.scaled import decode_blocks
from weightbeam.formats.orbax.source import OrbaxArray, OrbaxCheckpoint
from weightbeam.formats.safetensors import Allocate
from weightbeam.model_mappings.boxes import Box, extent
from weightbeam.model_mappings.scales import CODES


@dataclasses.dataclass(frozen=True, slots=True)
class ScaledArray(InOrder):
    """An array of codes and that of their scales, which has the same axes, counted in blocks.

    Attributes:
      codes: the array, or what it was unpacked into.
      scale: the array of scales.
    """

    codes: StoredArray
    scale: OrbaxArray
    dtype = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def block(self) -> tuple[int, ...]:
        """Elements on each axis that share a scale."""
        return tuple(n // count for n, count in zip(self.shape, self.scale.shape, strict=True))

    @property
    def label(self) -> str:
        size = max(self.block)
        return f"FP8 in blocks of {size} × {size}"

    def reads(self, box: Box) -> tuple[Read, ...]:
        """The codes, and the scales of the blocks that they are in."""
        blocks = tuple(cover(span, size) for span, size in zip(box, self.block, strict=True))
        return *self.codes.reads(box), *self.scale.reads(blocks)

    def decode(self, stored: list[np.ndarray], box: Box, dtype: np.dtype, empty: Allocate = np.empty) -> np.ndarray:
        """Codes times scales, in float32, cast once."""
        codes, scales = self.codes.decode(stored[:-1], box, np.dtype(CODES), empty), finite(stored[-1], self.scale)
        return decode_blocks(codes, CODES, scales, None, self.block, box, empty(extent(box), dtype))


def scaled_arrays(checkpoint: OrbaxCheckpoint) -> dict[str, ScaledArray]:
    """The weights that are codes, each with its scales, by MaxText's keys."""
    weights = checkpoint.weights
    return {key: ScaledArray(weights[key], weights[scale]) for key, scale in checkpoint.tree.scales.items()}


def values_of(checkpoint: OrbaxCheckpoint) -> Mapping[str, OrbaxArray | ScaledArray]:
    """The weights by their values: scales are out of sight."""
    scaled = scaled_arrays(checkpoint)
    hidden = set(checkpoint.tree.scales.values())
    return {key: scaled.get(key, array) for key, array in checkpoint.weights.items() if key not in hidden}
