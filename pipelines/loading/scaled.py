"""An Orbax checkpoint of FP8 codes and scales, by the values that they stand for."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from weightbeam.formats.encodings.encoding import cover
from weightbeam.formats.encodings.nibbles import finite
from weightbeam.formats.encodings.scaled import decode_blocks
from weightbeam.formats.orbax.source import why_not_scales
from weightbeam.formats.safetensors import Allocate
from weightbeam.formats.storage import StorageError, Store
from weightbeam.model_mappings.boxes import extent, whole
from weightbeam.model_mappings.keeping import is_scale
from weightbeam.model_mappings.scales import ARRAY_SUFFIX, CODES
from weightbeam.pipelines.loading.checkpoint import Orbax
from weightbeam.pipelines.loading.source import Described, Wanted
from weightbeam.transforms.comparing.array_sums import Compared


class _Named(NamedTuple):
    """An array of scales, for messages."""

    name: str
    path: str


class DecodedOrbax(Orbax):
    """An Orbax checkpoint, its codes decoded as they are read: no array of scales is shown.

    Scales are read whole, the first time that one is needed, and kept: four bytes for each block.

    Raises:
      StorageError: it can't be opened, or is of a kind whose weights aren't plain arrays.
    """

    def __init__(self, items: Store, dtype: np.dtype):
        super().__init__(items)
        self._scales: dict[str, np.ndarray] = {}
        self._reading = threading.Lock()
        self._coded = {key.removesuffix(ARRAY_SUFFIX) for key in self.stored if is_scale(key, self.stored)}
        self._check_scales()
        self.arrays: Mapping[str, Described] = {
            key: self._decoded(key, dtype) for key in self.stored if not is_scale(key, self.stored)
        }

    def _check_scales(self) -> None:
        """Raises `StorageError` where codes have no scales, or what isn't theirs: they are no values then."""
        for key, array in self.stored.items():
            why = f"there is no {key}{ARRAY_SUFFIX}" if array.dtype.name == CODES else ""
            if key in self._coded:
                why = why_not_scales(array, self.stored[key + ARRAY_SUFFIX])
            if why:
                raise StorageError(f"{self.url}: {key}: FP8 codes are no values without their scales: {why}")

    def _decoded(self, key: str, dtype: np.dtype) -> Described:
        """An array by its values."""
        codes = self.stored[key]
        if key not in self._coded:
            return codes
        size = max(self._block(key))
        lossy = None if dtype == np.float32 else f"FP8 in blocks of {size} × {size}, rounded once to {dtype.name}"
        return dataclasses.replace(codes, dtype=dtype, lossy=lossy, element_bytes=codes.element_bytes + dtype.itemsize)

    def _block(self, key: str) -> tuple[int, ...]:
        """Elements on each axis of an array of codes that share a scale."""
        codes, scales = self.stored[key].shape, self.stored[key + ARRAY_SUFFIX].shape
        return tuple(n // count for n, count in zip(codes, scales, strict=True))

    def make(
        self, wanted: Sequence[Wanted], empty: Allocate = np.empty, results: Sequence[Allocate] | None = None
    ) -> tuple[list[np.ndarray], int]:
        """See `ArraySource`: codes times scales in float32, cast once."""
        makers = list(results or [empty] * len(wanted))
        coded = [want.key in self._coded for want in wanted]
        reads = [
            want._replace(dtype=np.dtype(CODES)) if is_coded else want
            for want, is_coded in zip(wanted, coded, strict=True)
        ]
        into = [empty if is_coded else maker for maker, is_coded in zip(makers, coded, strict=True)]
        made, nbytes = super().make(reads, empty, into)
        for number, want in enumerate(wanted):
            if coded[number]:
                made[number] = self._decode(want, made[number], makers[number])
        return made, nbytes

    def compare(self, names: Sequence[str], sums: np.ndarray, more: Sequence[str] = ()) -> Compared:
        """See `Orbax.compare`; scales were read with their codes, by each process all that it needs."""
        return super().compare(names, sums, [*more, *(key + ARRAY_SUFFIX for key in names if key in self._coded)])

    def _decode(self, want: Wanted, codes: np.ndarray, maker: Allocate) -> np.ndarray:
        """The values of a box of codes."""
        block, values = self._block(want.key), maker(extent(want.box), want.dtype)
        blocks = tuple(slice(*cover(span, size)) for span, size in zip(want.box, block, strict=True))
        return decode_blocks(codes, CODES, self._scales_of(want.key)[blocks], None, block, want.box, values)

    def _scales_of(self, key: str) -> np.ndarray:
        """The scales of an array of codes, in float32. Raises ScaleError where one is NaN or infinite."""
        name = key + ARRAY_SUFFIX
        with self._reading:
            if key not in self._scales:
                stored = self.stored[name]
                (read,), _ = super().make([Wanted(name, whole(stored.shape), stored.dtype, others=-1)])
                self._scales[key] = finite(read, _Named(name, self.url))
            return self._scales[key]
