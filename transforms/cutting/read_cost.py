"""What loading a checkpoint costs: the bytes and the reads of each host of a mesh. Pure arithmetic, from shapes and
partition specs.

A *host* here has one device, which is the worst case: a host with several asks for their shards together, and never for
more.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from weightbeam.formats.orbax.zarr import INDEX_CHECKSUM_BYTES, INDEX_ENTRY_BYTES, ArraySpec
from weightbeam.model_mappings.boxes import Box
from weightbeam.transforms.cutting.mesh import Assignment, Mesh, axes_of


@dataclasses.dataclass(frozen=True)
class Load:
    """What the hosts of a mesh read; each field has an entry for each host.

    Attributes:
      needed: bytes of their shards.
      fetched: bytes that they read for them: whole chunks, and the indexes of packed ones.
      reads: how many reads that takes: one for each chunk, and one for each index.
    """

    needed: np.ndarray
    fetched: np.ndarray
    reads: np.ndarray

    def __add__(self, other: Load) -> Load:
        return Load(self.needed + other.needed, self.fetched + other.fetched, self.reads + other.reads)

    def __mul__(self, times: int) -> Load:
        """The load of so many arrays that are alike."""
        return Load(self.needed * times, self.fetched * times, self.reads * times)

    @property
    def worst(self) -> float:
        """Bytes read for each byte needed, by the host for which it is most."""
        return float((self.fetched / self.needed).max())

    @property
    def mean(self) -> float:
        """Bytes read for each byte needed, all hosts together."""
        return float(self.fetched.sum() / self.needed.sum())


def effective_ways(shape: Sequence[int], assignments: Sequence[Assignment], mesh: Mesh) -> tuple[int, ...]:
    """Into how many shards a mesh cuts each axis; 1 where it doesn't divide evenly, which JAX refuses."""
    return tuple(
        ways if size % (ways := mesh.ways(axes)) == 0 else 1 for size, axes in zip(shape, assignments, strict=True)
    )


def touched(size: int, step: int, ways: int) -> np.ndarray:
    """How many of the parts of length `step`, the last one cropped, each of the `ways` equal shards of an axis touches."""
    shard = size // ways
    starts = np.arange(ways) * shard
    return -(-(starts + shard) // step) - starts // step


def load_of(spec: ArraySpec, assignments: Sequence[Assignment], mesh: Mesh) -> Load:
    """What the hosts of a mesh read of one array.

    Chunks are stored whole also at the array's end, and fetched whole.
    """
    ways = effective_ways(spec.shape, assignments, mesh)
    places = [shard_of_host(axes, mesh) if n > 1 else 0 for axes, n in zip(assignments, ways, strict=True)]

    def count(steps: Sequence[int]) -> np.ndarray:
        made = np.ones(mesh.devices, np.int64)
        for size, step, n, place in zip(spec.shape, steps, ways, places, strict=True):
            made *= touched(size, step, n)[place]
        return made

    chunks = count(spec.chunk)
    needed = math.prod(spec.shape) // math.prod(ways) * spec.dtype.itemsize
    fetched, reads = chunks * (math.prod(spec.chunk) * spec.dtype.itemsize), chunks
    if spec.shard != spec.chunk:
        shards = count(spec.shard)
        packed = math.prod(whole // part for whole, part in zip(spec.shard, spec.chunk, strict=True))
        fetched = fetched + shards * (packed * INDEX_ENTRY_BYTES + INDEX_CHECKSUM_BYTES)
        reads = reads + shards
    return Load(np.full(mesh.devices, needed), fetched, reads)


def shard_of_host(assignment: Assignment, mesh: Mesh) -> np.ndarray:
    """Which shard of an axis each host owns: the mesh axes of a tuple count from the slowest to the fastest, as in JAX."""
    places = np.unravel_index(np.arange(mesh.devices), tuple(mesh.sizes.values()))
    of_axis = dict(zip(mesh.sizes, places, strict=True))
    index = np.zeros(mesh.devices, np.int64)
    for name in axes_of(assignment):
        if name in of_axis:
            index = index * mesh.sizes[name] + of_axis[name]
    return index


def total(loads: Iterable[Load]) -> Load:
    """The load of several arrays on one mesh."""
    return functools.reduce(Load.__add__, loads)


def shard_box(shape: Sequence[int], assignments: Sequence[Assignment], mesh: Mesh, host: int) -> Box:
    """The part of an array that a host owns."""
    box = []
    for size, axes, ways in zip(shape, assignments, effective_ways(shape, assignments, mesh), strict=True):
        at = int(shard_of_host(axes, mesh)[host]) if ways > 1 else 0
        box.append((at * (size // ways), (at + 1) * (size // ways)))
    return tuple(box)
