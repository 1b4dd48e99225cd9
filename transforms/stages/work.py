"""`Work`: a unit on its way through the fused stages, one mutable object, never encoded; and a tally of what was done."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import apache_beam as beam
import numpy as np

from weightbeam.model_mappings.cells import Piece
from weightbeam.transforms.cutting.units import Unit
from weightbeam.transforms.execution.arena import Arena


class Work:
    """A unit and the arrays it has become so far, all of them in one arena.

    Attributes:
      unit: what to do.
      arena: makes the arrays.
      begun: what was begun to be read of it before the pipeline (`head_start.py`); mostly nothing.
      raw: by fetch, the arrays that were read (set by ReadBoxes).
      values: by fetch, the decoded values (Dequantize).
      views: by recipe, the pieces and views of `values` in the array's layout (Reshape).
      notes: what the unit's ledger entry should say of what was read (ReadBoxes), and of how far that is from what other
        releases hold (CompareRows).
      shards: by recipe, one array whose first axes count shards; each shard is in C order (Stack).
    """

    __slots__ = ("arena", "begun", "notes", "raw", "shards", "unit", "values", "views")

    def __init__(self, unit: Unit, arena: Arena, begun: Future[tuple[list[list[np.ndarray]], int]] | None = None):
        self.unit = unit
        self.arena = arena
        self.begun = begun
        self.raw: list[list[np.ndarray]] = []
        self.notes: dict[str, Any] = {}
        self.values: list[np.ndarray] = []
        self.views: list[list[tuple[Piece, np.ndarray]]] = []
        self.shards: list[np.ndarray] = []

    @property
    def nbytes(self) -> int:
        """Bytes that this work holds."""
        return (
            total_bytes(array for arrays in self.raw for array in arrays)
            + total_bytes(self.values)
            + total_bytes(self.shards)
        )


def total_bytes(arrays: Iterable[np.ndarray]) -> int:
    """The bytes of arrays, views counted in full."""
    return sum(array.nbytes for array in arrays)


class Tally:
    """What this process has done, for a progress bar: Beam's own counters show only at the end of a local run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.total = 0

    def add(self, n: int) -> None:
        with self._lock:
            self.total += n


class WorkCoder(beam.coders.Coder):
    """Guards the stages' fusion: work is passed by reference, and an attempt to encode it is an error.

    Beam samples the sizes of elements at every edge by encoding them, unless the coder can estimate them.
    """

    def encode(self, value: Work) -> bytes:
        raise RuntimeError("Work must not be encoded: the stages from ReadBoxes to WriteChunks must stay fused")

    def decode(self, encoded: bytes) -> Work:
        raise RuntimeError("Work is never decoded")

    def estimate_size(self, value: Work) -> int:
        return value.nbytes

    def is_deterministic(self) -> bool:
        return True

    def to_type_hint(self) -> type[Work]:
        return Work


beam.coders.registry.register_coder(Work, WorkCoder)
