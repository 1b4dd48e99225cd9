"""The chunk grid: which part of an array one write makes, and which part one read fetches.

A chunk divides the finest shard of the target meshes, so that a host reads what it owns and nothing else. Axes whose
index selects a tensor (layers, experts) count 1 at first; then chunks grow along them, or are cut, to 1 to 4 MB.

With no mesh named, the target is every common mesh at once. Chunks are small then, and zarr3's sharding codec packs
many into one shard. What each mesh reads of them is arithmetic: `transforms/cutting/read_cost.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from weightbeam.formats.orbax.zarr import INDEX_ENTRY_BYTES, ArraySpec, Format
from weightbeam.model_mappings.cells import Part
from weightbeam.model_mappings.keeping import is_scale
from weightbeam.model_mappings.plan import Array, Problem
from weightbeam.transforms.cutting.mesh import Assignment, Mesh, Rules, partition_spec

MIN_CHUNK, MAX_CHUNK = 1 << 20, 4 << 20  # bytes
MIN_RUN = 4096  # bytes; a tensor is cut so that its contiguous runs aren't shorter

# With no mesh named, the chunks serve `fsdp` up to 64 with `tensor` up to 8, and `fsdp` with `expert` up to 64 each and
# 512 devices together, all in powers of two: as far as that leaves chunks of the bytes below.
COMMON_FSDP, COMMON_EXPERT, COMMON_TENSOR, COMMON_DEVICES = 64, 64, 8, 512
MIN_PACKED = 64 << 10  # a smaller array is one chunk
MIN_PACKED_CHUNK = 4 << 10  # many chunks are packed into one shard, and these may be small
# below that, experts share a chunk as far as `COMMON_EXPERT` allows; above, each has its own
GOOD_PACKED_CHUNK = 32 << 10
MIN_LOOSE_CHUNK = 32 << 10  # with zarr2 every chunk is an object
# bytes of a shard's index by the bytes of one chunk: whoever needs one chunk reads little else
MAX_INDEX_SHARE = 1 / 16


EXPERTS = "exp"  # MaxText's logical name of the axis

Beside = tuple[tuple[frozenset[int], int], ...]  # axes of an array, and bytes for each index along them


class Uneven(str):
    """A warning that a mesh doesn't divide an axis of an array.

    Attributes:
      axis: its name and extent: `embed = 4097`.
      mesh: as the user wrote it.
    """

    axis: str
    mesh: str

    @classmethod
    def of(cls, key: str, axis: str, mesh: str) -> Uneven:
        made = cls(f"{key}: {axis} doesn't divide over {mesh}; MaxText will refuse that mesh")
        made.axis, made.mesh = axis, mesh
        return made


class UnitBytesError(ValueError):
    """`--unit_bytes` is too small for the smallest unit that an array can be cut into, which needs `needed` bytes."""

    def __init__(self, key: str, needed: int):
        super().__init__(f"{key} needs at least {needed}: a row of its source and what is made of it")
        self.key, self.needed = key, needed


@dataclasses.dataclass(frozen=True)
class SourceCost:
    """How the tensors of an array are stored.

    Attributes:
      element_bytes: memory for each element before it is stacked: as stored, and as decoded.
      order: the axes of the tensors as they are stored, the slowest first; None for C order.
      indivisible: axes of the array that a unit shouldn't cut, since every part of them reads the same scales.
      beside: as of a `Reading`.
    """

    element_bytes: int = 0
    order: tuple[int, ...] | None = None
    indivisible: frozenset[int] = frozenset()
    beside: Beside = ()


@dataclasses.dataclass(frozen=True)
class Reading:
    """How a unit reads what an array is made of.

    Attributes:
      whole_axes: axes that a unit never cuts: else rows of the source are cut, and their bytes are read twice.
      growth: the other axes, in the order in which a unit grows along them: as the source's bytes lie.
      element_bytes: working memory for each element of the array before it is stacked: source and decoded values.
      beside: working memory beside that of the elements: for each index along these axes so many bytes.
    """

    whole_axes: frozenset[int]
    growth: tuple[int, ...]
    element_bytes: int
    beside: Beside = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid(Reading):
    """How an array is read and cut; `element_bytes` has the target's, too.

    Attributes:
      spec: chunk and shard shapes.
      partition: the mesh axes of each axis, by mesh.
      uneven: the axes that meshes don't divide.
    """

    spec: ArraySpec
    partition: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    uneven: tuple[Uneven, ...] = ()

    def working_bytes(self, extents: Sequence[int]) -> int:
        """Memory to make a box of these extents, where `whole_axes` count with their full size."""
        sizes = [n if axis in self.whole_axes else extents[axis] for axis, n in enumerate(self.spec.shape)]
        return math.prod(sizes) * self.element_bytes + sum(
            math.prod(sizes[axis] for axis in axes) * nbytes for axes, nbytes in self.beside
        )


def largest_divisor(n: int, limit: int) -> int:
    """The largest divisor of `n` that is at most `limit` (at least 1)."""
    best = 1
    for small in range(1, math.isqrt(n) + 1):
        if n % small == 0:
            for divisor in (small, n // small):
                if best < divisor <= limit:
                    best = divisor
    return best


def cut_axis(extent: int, limit: int, ragged: bool) -> int:
    """The largest divisor of `extent` within `limit`; where `ragged` and no good one exists, parts of about equal
    length.
    """
    divisor = largest_divisor(extent, max(1, limit))
    if not ragged or 4 * divisor > limit:
        return divisor
    return -(-extent // -(-extent // limit))


def selecting_axes(array: Array) -> frozenset[int]:
    """The stacked axes, layers and experts, whose extent in a chunk is 1 to begin with."""
    return frozenset().union(*(part.stack_axes for part in array.parts)) | {
        axis for axis, name in enumerate(array.logical_axes) if name == EXPERTS
    }


def count_experts(arrays: Iterable[Array]) -> int:
    """How many experts a model has; 0 if it is dense."""
    axes = (axis for array in arrays for axis in zip(array.logical_axes, array.shape, strict=True))
    return max((size for name, size in axes if name == EXPERTS), default=0)


def cut_rows(part: Part, itemsize: int, stored: SourceCost) -> tuple[frozenset[int], list[int]]:
    """The array's axes that hold a tensor's columns, and those that hold its rows, the fastest first.

    Columns are the trailing axes of the tensor that are needed to make a contiguous run of `MIN_RUN` bytes. An axis
    that merges the tensor's factors in another order (paired rotary halves) counts as one too: any part of it needs all
    of its rows. Where axes of the array are `indivisible`, these are the columns, however short that makes the runs.
    """
    order = tuple(range(len(part.window_shape))) if stored.order is None else stored.order
    sizes = [part.window_shape[axis] for axis in order]
    row = max((at for at in range(len(order)) if math.prod(sizes[at + 1 :]) * itemsize >= MIN_RUN), default=0)
    if stored.indivisible:
        row = len(order) - 1
    columns = stored.indivisible or frozenset().union(*(part.axes_of(axis) for axis in order[row + 1 :]))
    for number, axis in enumerate(part.target_axes):
        merged = [factor.which for factor in axis if factor.kind == "free"]
        if merged != sorted(merged):
            columns |= {number}
    rows: list[int] = []
    for axis in order[row::-1] if order else ():
        held = sorted(
            part.axes_of(axis) - columns - set(rows),
            key=lambda a: -max(f.which for f in part.target_axes[a] if f.kind == "free"),
        )
        rows += held
    return columns, rows


def make_grid(
    array: Array,
    stored: SourceCost,
    meshes: Sequence[Mesh],
    rules: Rules,
    unit_bytes: int,
    format: Format,
    experts: int,
) -> Grid:
    """Cuts an array for `meshes`, in units of at most `unit_bytes`.

    Llama-3.1-8B's `wi_0` for `fsdp=16`, which shards `embed`; of each layer a tensor gate_proj (mlp, embed), in
    bfloat16:

        embed   4096    |256|256| … 16 devices … |256|     a chunk is one device's 256: no host reads what another owns
        layers    32    |1|1|1| …                          each index selects a tensor, so a chunk has one
        mlp    14336    |     7168     |     7168     |    cut to where a chunk, (256, 1, 7168), has 1 to 4 MB

    A row of gate_proj is all of `embed`: that is its whole axis. So the smallest unit is 16 chunks, one beside the
    other, and it grows along `mlp`, where the next rows lie, then along `layers`. With 4 bytes an element, two in the
    file and two in the chunk, 7168 rows take 117 MB, which is what 128 MiB hold.

    Args:
      array: what is cut.
      stored: how its tensors are stored.
      meshes: the targets; none means unknown.
      rules: MaxText's logical axis rules.
      unit_bytes: bound on the memory of a unit.
      format: zarr3 has the sharding codec, zarr2 doesn't.
      experts: how many the model has; a mesh has an `expert` axis only if there are any.

    Raises:
      UnitBytesError: the smallest unit needs more.
    """
    part = next((part for part in array.parts if part.rule.source), array.parts[0])
    whole, rows = cut_rows(part, array.dtype.itemsize, stored)
    names = sorted(axis for axis in selecting_axes(array) if any(f.kind == "name" for f in part.target_axes[axis]))
    growth = tuple(dict.fromkeys([*rows, *names, *(axis for axis in range(len(array.shape)) if axis not in whole)]))
    reading = Reading(whole, growth, stored.element_bytes, stored.beside)
    return cut_array(array, partition_spec(array.logical_axes, rules), reading, meshes, unit_bytes, format, experts)


def uneven_scales(grids: Iterable[Grid]) -> Iterator[Problem]:
    """Meshes that don't divide the blocks of FP8 codes: MaxText 0.2.5 can't make its model there (`IndivisibleError`)."""
    grids = list(grids)
    keys = {grid.spec.key for grid in grids}
    for grid in grids:
        if is_scale(grid.spec.key, keys):
            yield from (Problem("blocks", "--mesh", each) for each in grid.uneven)


def cut_array(
    array: Array,
    assignments: Sequence[Assignment] | None,
    reading: Reading,
    meshes: Sequence[Mesh],
    unit_bytes: int,
    format: Format,
    experts: int,
) -> Grid:
    """Cuts an array for `meshes`, where its axes are assigned to these axes of a mesh; None where nobody knows, and it
    is cut evenly.

    The array of `make_grid`'s drawing with no mesh named, in zarr3. A unit holds `embed` whole, and an element takes 6
    bytes: two in the file, two in the chunk, two of its encoding:

        embed  layers    mlp
         4096      32  14336     the array
           64      32   1792     the finest shard: of the common meshes, `fsdp=64` and `tensor=8`
           64       1   1792     cut: 1 where an index selects a tensor; above 4 MiB the other axes are cut, too
           64       8   1792     grown along `layers`: from 224 KiB until it has 1 MiB, if 4 MiB don't forbid it
           64       2   1792     fitted: the smallest unit, (4096, 8, 1792), would take 336 MiB, and may take 128
         4096       2   1792     the shard: 64 such chunks of 448 KiB, all that a unit holds of `embed`

    The other modes differ in the finest shard. Meshes that are named cut their own shards, evenly if nobody knows which
    axes they shard; then a chunk is a shard. A small array that no mesh cuts is one chunk.

    Raises:
      UnitBytesError: the smallest unit needs more than `unit_bytes`.
    """
    shape, itemsize = array.shape, array.dtype.itemsize
    packed = not meshes and format.use_zarr3 and array.nbytes > MIN_PACKED
    finest, uneven = _finest_shard(array, assignments, meshes, packed, experts)
    selecting = selecting_axes(array)
    # a ragged last chunk does no harm
    uncut = {axis for axis, size in enumerate(shape) if finest[axis] == size} - selecting

    # encoding makes a copy
    element_bytes = reading.element_bytes + itemsize * (2 if packed or format.compression != "none" else 1)
    spec = ArraySpec(array.key, shape, array.dtype, shape, shape)
    partition = {mesh.text: tuple(assignments) for mesh in meshes} if assignments is not None else {}
    grid = Grid(
        reading.whole_axes, reading.growth, element_bytes, reading.beside, spec=spec, partition=partition, uneven=uneven
    )

    if packed or array.nbytes > MIN_CHUNK or _is_sharded(array, assignments, meshes, finest):
        chunk = _good_chunk(array, finest, grid, uncut, packed, bool(meshes))
    else:
        chunk = list(shape)
    _fit(chunk, finest, grid, unit_bytes, selecting, uncut)
    shard = _shard(chunk, grid, unit_bytes, selecting) if packed else list(chunk)
    return dataclasses.replace(grid, spec=dataclasses.replace(spec, chunk=tuple(chunk), shard=tuple(shard)))


def _finest_shard(
    array: Array, assignments: Sequence[Assignment] | None, meshes: Sequence[Mesh], packed: bool, experts: int
) -> tuple[list[int], tuple[Uneven, ...]]:
    """The finest shard of the meshes, or of the common ones if none is named, and warnings."""
    if meshes and assignments is not None:
        return finest_device_shard(array, assignments, meshes)
    if meshes:
        return _even_device_shard(array, meshes), ()
    least, with_experts = (MIN_PACKED_CHUNK, experts > 0) if packed else (MIN_LOOSE_CHUNK, False)
    return _common_device_shard(array, assignments or (None,) * len(array.shape), with_experts, least), ()


def _is_sharded(
    array: Array, assignments: Sequence[Assignment] | None, meshes: Sequence[Mesh], finest: Sequence[int]
) -> bool:
    """Whether a mesh that is named cuts the array."""
    if assignments is None:
        return bool(meshes) and tuple(finest) != array.shape
    return any(mesh.ways(axes) > 1 for mesh in meshes for axes in assignments)


def _good_chunk(
    array: Array, finest: Sequence[int], grid: Grid, uncut: Container[int], packed: bool, is_for_meshes: bool
) -> list[int]:
    """A chunk of 1 to 4 MiB in the finest shard, whatever a unit of it takes.

    For the common meshes it grows along experts last, and an expert of 32 KiB has a packed chunk of its own.
    """
    selecting, itemsize = selecting_axes(array), array.dtype.itemsize
    chunk = [1 if axis in selecting else n for axis, n in enumerate(finest)]
    slowest = [axis for axis in reversed(grid.growth) if axis not in selecting]
    longest = sorted(grid.whole_axes, key=lambda axis: -chunk[axis])
    _shrink(chunk, MAX_CHUNK // itemsize, [*slowest, *longest], uncut)
    is_expert = [name == EXPERTS for name in array.logical_axes]
    growing = [axis for axis in grid.growth if axis in selecting]
    for axis in sorted(growing, key=lambda axis: not is_for_meshes and is_expert[axis]):
        least = GOOD_PACKED_CHUNK if packed and is_expert[axis] else MIN_CHUNK
        _grow(chunk, finest, axis, least // itemsize)
    return chunk


def finest_device_shard(
    array: Array, assignments: Sequence, meshes: Sequence[Mesh]
) -> tuple[list[int], tuple[Uneven, ...]]:
    """The greatest extents that divide the shards of all meshes, and a warning for each axis that a mesh doesn't
    divide.
    """
    finest, uneven = list(array.shape), []
    for mesh in meshes:
        for axis, size in enumerate(array.shape):
            ways = mesh.ways(assignments[axis])
            if size % ways:
                name = array.logical_axes[axis] or f"axis {axis}"
                uneven.append(Uneven.of(array.key, f"{name} = {size}", mesh.text))
            else:
                finest[axis] = math.gcd(finest[axis], size // ways)
    return finest, tuple(uneven)


def _even_device_shard(array: Array, meshes: Sequence[Mesh]) -> list[int]:
    """The greatest extents that divide an array into equal parts, as many as each mesh has devices: along its longest
    axes.
    """
    finest = list(array.shape)
    for mesh in meshes:
        devices = mesh.devices
        for axis in sorted(range(len(finest)), key=lambda axis: -array.shape[axis]):
            ways = math.gcd(array.shape[axis], devices)
            finest[axis] = math.gcd(finest[axis], array.shape[axis] // ways)
            devices //= ways
    return finest


def _common_device_shard(array: Array, assignments: Sequence, experts: bool, least: int) -> list[int]:
    """The finest shard of the common meshes: of those with as many devices as leave chunks of `least` bytes once they
    have grown.
    """
    growing = selecting_axes(array) - {axis for axis, name in enumerate(array.logical_axes) if name == EXPERTS}
    return list(_common_shard(array.shape, tuple(assignments), growing, experts, -(-least // array.dtype.itemsize)))


@functools.cache  # many arrays have the same shape and axes
def _common_shard(
    shape: tuple[int, ...], assignments: tuple[Assignment, ...], growing: frozenset[int], experts: bool, least: int
) -> tuple[int, ...]:
    """The same for a shape; `least` in elements."""
    layers = math.prod(shape[axis] for axis in growing)
    devices = COMMON_DEVICES if experts else COMMON_FSDP
    while True:
        fsdp = min(devices, COMMON_FSDP)
        meshes = (
            {"fsdp": fsdp, "expert": devices // fsdp},
            {"tensor": COMMON_TENSOR},
            {"expert": min(devices, COMMON_EXPERT) if experts else 1},
        )
        finest = list(shape)
        for mesh in (Mesh("", sizes) for sizes in meshes):
            for axis, size in enumerate(shape):
                finest[axis] = math.gcd(finest[axis], size // math.gcd(size, mesh.ways(assignments[axis])))
        elements = math.prod(n for axis, n in enumerate(finest) if axis not in growing) * layers
        if devices == 1 or elements >= least:
            return tuple(finest)
        devices //= 2


def _shard(chunk: Sequence[int], grid: Grid, unit_bytes: int, selecting: frozenset[int]) -> list[int]:
    """Packs chunks into a shard: along the axes that a unit holds whole, then along rows, while the index stays small
    and a unit can hold it.
    """
    shard, shape = list(chunk), grid.spec.shape
    room = int(MAX_INDEX_SHARE * math.prod(chunk) * grid.spec.dtype.itemsize) // INDEX_ENTRY_BYTES  # for further chunks
    for axis in dict.fromkeys([*sorted(grid.whole_axes), *grid.growth]):
        if axis not in selecting:
            chunks = -(-shape[axis] // chunk[axis])
            limit = min(chunks, room)
            if axis not in grid.whole_axes:
                limit = min(limit, unit_bytes // grid.working_bytes(shard))
            count = -(-chunks // -(-chunks // max(1, limit)))  # shards of about equal length
            shard[axis] *= count
            room //= count
    return shard


def _shrink(chunk: list[int], limit: int, axes: Iterable[int], ragged: Container[int]) -> None:
    """Cuts `chunk` to `limit` elements along `axes`, in their order, into equal parts."""
    for axis in axes:
        elements = math.prod(chunk)
        if elements > limit:
            chunk[axis] = cut_axis(chunk[axis], chunk[axis] * limit // elements, axis in ragged)


def _grow(chunk: list[int], finest: Sequence[int], axis: int, least: int) -> None:
    """Lengthens `chunk` along an axis that selects tensors until it has `least` elements, and a few times that at most."""
    elements = math.prod(chunk)
    if elements < least:
        fitting = [
            n
            for n in range(1, finest[axis] + 1)
            if finest[axis] % n == 0 and elements * n <= MAX_CHUNK // MIN_CHUNK * least
        ]
        chunk[axis] = next((n for n in fitting if elements * n >= least), fitting[-1])


def _fit(
    chunk: list[int],
    finest: Sequence[int],
    grid: Grid,
    unit_bytes: int,
    selecting: frozenset[int],
    ragged: Container[int],
) -> None:
    """Cuts `chunk` so that the smallest unit around it fits: first along the axes that select tensors, then along rows."""
    rows = [axis for axis in grid.growth[::-1] if axis not in selecting]
    for axis in [*(axis for axis in grid.growth[::-1] if axis in selecting), *rows]:
        needed = grid.working_bytes(chunk)
        if needed > unit_bytes:
            fixed = grid.working_bytes([0 if other == axis else size for other, size in enumerate(chunk)])
            most = chunk[axis] * (unit_bytes - fixed) // max(1, needed - fixed)
            chunk[axis] = (
                largest_divisor(finest[axis], max(1, most))
                if axis in selecting
                else cut_axis(chunk[axis], most, axis in ragged)
            )
    if (needed := grid.working_bytes(chunk)) > unit_bytes:
        raise UnitBytesError(grid.spec.key, needed)
