"""Virtual arrays: those whose chunks are in the source's files already, byte for byte.

A plain tensor lies in its file as an uncompressed chunk does: little-endian, in C order. An array that only relabels
the elements of its tensors can be a list of references (file, offset, length), with zarr's `transpose` codec to name
its axes. Everything here follows from the plan; no tensor is read.

How an array's elements lie in a tensor is told by a *stride* for each of its axes, as in numpy. A chunk is one range of
the file where the strides of its axes, from the fastest on, leave no hole. So a chunk is a range of the tensor's rows.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from weightbeam.formats.encodings import Encoding
from weightbeam.formats.orbax.references import Reference
from weightbeam.formats.orbax.zarr import ArraySpec, Format
from weightbeam.model_mappings.cells import Factor, Part
from weightbeam.model_mappings.plan import Array, Problem
from weightbeam.transforms.cutting.grid import EXPERTS, MAX_CHUNK, MIN_CHUNK, Grid, finest_device_shard
from weightbeam.transforms.cutting.mesh import Mesh
from weightbeam.transforms.cutting.read_cost import Load, load_of
from weightbeam.transforms.cutting.read_cost import total as total_load

WARN_SHARE = 0.8  # of the bytes; where fewer are virtual, most of the promise is gone
REST_IS_WRITTEN = "of the bytes are virtual, the rest is written"  # how that warning ends
WARN_AMPLIFICATION = 4.0  # bytes read for each byte needed, where a checkpoint is loaded on a mesh
LEAST_CHUNK = 64 << 10  # bytes; a tensor isn't cut into smaller ones, but for a mesh


class NotVirtualError(ValueError):
    """An array that can't be virtual; the message says why, for the plan."""


class QuantizedError(NotVirtualError):
    """Its values are computed from codes and scales."""


class CastError(NotVirtualError):
    """Its values are stored in another dtype."""


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Where the bytes of an array come from.

    Attributes:
      spec: how it lies in the source's files, where it is virtual; None where it has to be made.
      error: why it has to be made.
    """

    spec: ArraySpec | None
    error: NotVirtualError | None = None

    @property
    def reason(self) -> str:
        return str(self.error or "")


def place(array: Array, encodings: Mapping[str, Encoding], finest: Sequence[int]) -> Placement:
    """Decides whether an array is virtual, and cuts it if it is.

    Args:
      array: of a plan without problems.
      encodings: how each tensor is stored.
      finest: along each axis, the largest extent that divides the shards of the target meshes. Chunks follow it along
        rows.
    """
    try:
        chunk, order = _lay_out(array, encodings, finest)
    except NotVirtualError as error:
        return Placement(None, error)
    return Placement(ArraySpec(array.key, array.shape, array.dtype, chunk, chunk, order))


def place_arrays(
    arrays: Sequence[Array], encodings: Mapping[str, Encoding], meshes: Sequence[Mesh], grids: Sequence[Grid]
) -> tuple[Placement, ...]:
    """Where the bytes of each array come from. The grids are those that the arrays would have if they were made."""
    placements = []
    for array, grid in zip(arrays, grids, strict=True):
        finest = finest_device_shard(array, grid.partition[meshes[0].text], meshes)[0] if meshes else array.shape
        placements.append(place(array, encodings, finest))
    return tuple(placements)


def problems_of(arrays: Sequence[Array], placements: Sequence[Placement], format: Format) -> Iterator[Problem]:
    """Why a checkpoint can't be virtual at all: how it is to be stored, quantised tensors, or that most of it would be
    cast.
    """
    if not (format.use_ocdbt and format.use_zarr3):
        message = "needs --use_ocdbt true and --use_zarr3 true: only these can refer to ranges of other files"
        yield Problem("option", "--virtual", message)
    if format.compression != "none":
        message = (
            f"leaves the bytes as they are; --compression {format.compression} is for checkpoints that are written"
        )
        yield Problem("option", "--virtual", message)
    quantized = Counter(placement.reason for placement in placements if isinstance(placement.error, QuantizedError))
    for reason, count in quantized.items():
        message = f"{count} arrays are {reason}; their values stand in no file. Convert without --virtual"
        yield Problem("virtual", "--virtual", message)
    cast, total = Counter[str](), sum(array.nbytes for array in arrays)
    for array, placement in zip(arrays, placements, strict=True):
        if isinstance(placement.error, CastError):
            cast[placement.reason] += array.nbytes
    for reason, nbytes in cast.items():
        if 2 * nbytes > total:
            dtype = reason.partition(",")[0]
            way = (
                f"--save_dtype {dtype} keeps them as they are"
                if dtype in ("float32", "bfloat16")
                else "convert without --virtual"
            )
            yield Problem(
                "virtual", "--virtual", f"{percent(nbytes, total)} of the bytes are {reason}, a changed dtype; {way}"
            )


def loads_of(grids: Sequence[Grid], meshes: Sequence[Mesh]) -> dict[str, Load]:
    """What the hosts of each mesh read of a whole checkpoint, by the mesh as it was written."""
    return {
        mesh.text: total_load(load_of(grid.spec, grid.partition[mesh.text], mesh) for grid in grids) for mesh in meshes
    }


def warnings_of(arrays: Sequence[Array], placements: Sequence[Placement], loads: Mapping[str, Load]) -> Iterator[str]:
    """What the user should know: that much has to be written, or that much is read for nothing."""
    total = sum(array.nbytes for array in arrays)
    virtual = sum(array.nbytes for array, placement in zip(arrays, placements, strict=True) if placement.spec)
    if virtual < WARN_SHARE * total:
        yield f"only {percent(virtual, total)} {REST_IS_WRITTEN}"
    for mesh, load in loads.items():
        if load.mean > WARN_AMPLIFICATION:
            yield f"on {mesh} a host reads {load.mean:.1f} bytes for each byte it needs; weightbeam materialize makes an ordinary checkpoint for it"


def percent(part: float, whole: float) -> str:
    """A share as people say it: 57 %, 99.98 %, and 100 % only for all of it."""
    exact = 100 * part / whole if whole else 100.0
    digits = next((digits for digits in range(4) if part == whole or round(exact, digits) < 100), 4)
    return f"{exact:.{digits}f} %"


def references(
    array: Array, spec: ArraySpec, encodings: Mapping[str, Encoding], names: Mapping[str, str]
) -> Iterator[Reference]:
    """Every chunk of a virtual array, cut as `place` said; `names` are those of the source's files, by their paths."""
    itemsize = spec.dtype.itemsize
    length = math.prod(spec.chunk) * itemsize
    for part in array.parts:
        stored = None
        for cell in part.cells():
            encoding = encodings[str(cell.tensor)]
            if stored is None:
                stored = list(_chunks(part, spec, _tensor_strides(encoding)))
            at: list[int | None] = [_position(axis, cell.layer, cell.name) for axis in part.target_axes]
            for index, offset in stored:
                where = "".join(f"/{i if fixed is None else fixed}" for i, fixed in zip(index, at, strict=True))
                yield Reference(
                    f"{spec.key}/c{where}",
                    names[encoding.weight.path],
                    encoding.weight.offset + offset * itemsize,
                    length,
                )


def _chunks(part: Part, spec: ArraySpec, tensor_strides: Sequence[int]) -> Iterator[tuple[tuple[int, ...], int]]:
    """The chunks of one cell: their numbers along the axes that the tensor has (0 elsewhere), and where they begin, in
    elements.
    """
    strides = _strides(part, tensor_strides)
    first = sum(start * stride for start, stride in zip(part.starts, tensor_strides, strict=True))
    ranges = []
    for axis, step in zip(part.target_axes, spec.chunk, strict=True):
        start, size = _segment(part, axis) if _is_free(axis) else (0, 1)
        ranges.append([(at // step, (at - start)) for at in range(start, start + size, step)])
    for index in itertools.product(*ranges):
        yield (
            tuple(i for i, _ in index),
            first + sum(at * stride for (_, at), stride in zip(index, strides, strict=True)),
        )


def _lay_out(
    array: Array, encodings: Mapping[str, Encoding], finest: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The chunk of a virtual array, and the order in which its axes are stored (empty for its own). Raises
    NotVirtualError where it can't be virtual.
    """
    strides = [_strides(part, _check(array, part, encodings)) for part in array.parts]
    if array.fill is not None:
        raise NotVirtualError("padded: no tensor holds the rows that are added")
    chunk = _cut(array, strides[0], finest)
    orders = {_order(chunk, of_part) for of_part in strides}
    if len(orders) > 1:
        raise NotVirtualError("its tensors are stored in different layouts")
    return tuple(chunk), orders.pop()


def _check(array: Array, part: Part, encodings: Mapping[str, Encoding]) -> tuple[int, ...]:
    """Makes sure that a part's tensors hold the array's very values; returns the strides of their axes. Raises
    NotVirtualError where they don't.
    """
    if part.rule.source is None:
        raise NotVirtualError("a constant that no tensor holds")
    if part.rule.ops:
        raise NotVirtualError(", ".join(map(str, part.rule.ops)))
    strides: set[tuple[int, ...]] = set()
    for cell in part.cells():
        encoding = encodings[str(cell.tensor)]
        if encoding.label is not None:
            raise QuantizedError(f"quantised: {encoding.label}")
        if encoding.weight.dtype != array.dtype:
            raise CastError(f"{encoding.weight.dtype.name}, stored as {array.dtype.name}")
        strides.add(_tensor_strides(encoding))
    if len(strides) > 1:
        raise NotVirtualError("its tensors are stored in different layouts")
    return strides.pop()


def _tensor_strides(encoding: Encoding) -> tuple[int, ...]:
    """Elements from one index of each axis of a tensor's values to the next, as they are stored; of a part of a tensor
    those of the whole.
    """
    stored = encoding.weight
    strides = [0] * len(encoding.shape)
    for axis, nbytes in zip(encoding.order, stored.strides, strict=True):
        strides[axis] = nbytes // stored.dtype.itemsize
    return tuple(strides)


def _strides(part: Part, tensor_strides: Sequence[int]) -> tuple[int, ...]:
    """Elements of the tensor from one index of each axis of the array to the next; 0 where the axis selects the tensor.
    Raises NotVirtualError where the indices of an axis don't lie at equal distances.
    """
    of_factor: list[int] = []  # the strides of the tensor's factors
    for sizes, stride, step in zip(part.source_factors, tensor_strides, part.steps, strict=True):
        of_factor += [math.prod(sizes[i + 1 :]) * stride * step for i in range(len(sizes))]
    strides = []
    for axis in part.target_axes:
        if not _is_free(axis):
            strides.append(0)
            continue
        held = [factor for factor in axis if factor.size > 1] or list(axis[-1:])
        if any(factor.kind != "free" for factor in held):
            raise NotVirtualError("an axis merges the number of the tensor with rows of it")
        if len(axis) > 1 and any(part.flat_sizes[factor.which] != factor.size for factor in held):
            raise NotVirtualError("parts of a tensor alternate with others")
        for outer, inner in itertools.pairwise(held):
            if of_factor[outer.which] != of_factor[inner.which] * inner.size:
                raise NotVirtualError("rows change places within an axis, as rotary halves that are interleaved do")
        strides.append(of_factor[held[-1].which] if held else 0)
    return tuple(strides)


def _is_free(axis: Sequence[Factor]) -> bool:
    """Whether an axis of the array holds elements of a tensor, and doesn't select the tensor."""
    return any(factor.kind == "free" for factor in axis) or not axis


def _segment(part: Part, axis: Sequence[Factor]) -> tuple[int, int]:
    """Where a part's share of an axis begins, and how long it is."""
    if len(axis) == 1:
        return axis[0].start, part.flat_sizes[axis[0].which]
    return 0, math.prod(factor.size for factor in axis)


def _position(axis: Sequence[Factor], layer: tuple[int, ...], name: tuple[int, ...]) -> int | None:
    """The index that a tensor has on an axis that selects it; None on others."""
    if _is_free(axis):
        return None
    at = 0
    for factor in axis:
        at = at * factor.size + (layer if factor.kind == "layer" else name)[factor.which]
    return at


def _cut(array: Array, strides: Sequence[int], finest: Sequence[int]) -> list[int]:
    """The extents of a chunk: one range of rows, within a device's shard where rows can serve it, and of at most
    `MAX_CHUNK` if they divide so.

    Llama-3.1-8B's `wi_0`, and the tensor gate_proj of each layer, (mlp 14336, embed 4096), in bfloat16; strides in
    elements:

        axis       embed    layers    mlp
        size        4096        32  14336
        stride         1         –   4096     of layers none: each selects a tensor
        chunk       4096         1    512     512 whole rows, 4 MiB side by side in the file

    Only the slowest axis can be cut so that what is left is one range, and a faster one only where all slower ones are
    cut to 1. For `fsdp=16`, which shards `embed`, that is no use: each host reads whole rows of which it needs a
    sixteenth, and the plan says so.

    Raises:
      NotVirtualError: no range of a tensor is a chunk.
    """
    free = [axis for axis, size in enumerate(array.shape) if size > 1 and strides[axis]]
    free.sort(key=lambda axis: -strides[axis])  # the slowest first
    tail = _find_range(array, strides, free)
    chunk = [size if _is_free(axis) else 1 for size, axis in zip(array.shape, array.parts[0].target_axes, strict=True)]
    for axis in free[:tail]:
        chunk[axis] = 1
    allowed = [_common_divisor(array, axis) for axis in range(len(chunk))]
    row = math.prod(array.shape[axis] for axis in free[tail:]) * array.dtype.itemsize
    for axis in free[tail:]:  # an axis may be cut where all slower ones are cut to 1
        row //= array.shape[axis]
        wanted = 1 if array.logical_axes[axis] == EXPERTS else math.gcd(allowed[axis], finest[axis])
        chunk[axis] = _rows(wanted, row)
        if chunk[axis] > 1:
            break
    if any(step > 1 and allowed[axis] % step for axis, step in enumerate(chunk)):
        raise NotVirtualError("parts of several tensors lie side by side on an axis that isn't a tensor's first")
    return chunk


def _find_range(array: Array, strides: Sequence[int], free: Sequence[int]) -> int:
    """From which of the `free` axes on they are one range of the file without holes; the slowest is the first. Raises
    NotVirtualError where elements, or stretches of them that are worth a reference, don't lie side by side.
    """
    if free and strides[free[-1]] != 1:
        raise NotVirtualError(f"takes one of {strides[free[-1]]} elements that lie side by side")
    tail, run = len(free), 1
    while tail and strides[free[tail - 1]] == run:
        tail -= 1
        run *= array.shape[free[tail]]
    stretch = run * array.dtype.itemsize
    if stretch < LEAST_CHUNK and any(array.logical_axes[axis] != EXPERTS for axis in free[:tail]):
        raise NotVirtualError(f"lies in its tensors in stretches of {stretch:,} bytes, too short to refer to each")
    return tail


def _common_divisor(array: Array, axis: int) -> int:
    """What a chunk must divide along an axis so that none reaches from one tensor into another."""
    edges = [_segment(part, part.target_axes[axis]) for part in array.parts if _is_free(part.target_axes[axis])]
    return math.gcd(array.shape[axis], *itertools.chain(*edges))


def _rows(count: int, row_bytes: int) -> int:
    """How many of `count` rows make a chunk: the most that divide them and stay within `MAX_CHUNK`; more than that if
    few divide them.
    """
    if count * row_bytes <= MAX_CHUNK:
        return count
    divisors = [n for n in range(1, math.isqrt(count) + 1) if count % n == 0]
    divisors = sorted({*divisors, *(count // n for n in divisors)})
    best = max((n for n in divisors if n * row_bytes <= MAX_CHUNK), default=1)
    if best * row_bytes >= LEAST_CHUNK:
        return best
    return next(n for n in divisors if n * row_bytes >= MIN_CHUNK)


def _order(chunk: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The array's axes as a chunk stores them, the slowest first; empty where that is their own order. Raises
    NotVirtualError where a chunk isn't one range of a tensor.
    """
    long = sorted((axis for axis, size in enumerate(chunk) if size > 1), key=lambda axis: -strides[axis])
    run = 1
    for axis in reversed(long):
        if strides[axis] != run:
            raise NotVirtualError("no range of a tensor's rows is a chunk")
        run *= chunk[axis]
    if long == sorted(long):
        return ()
    return (*(axis for axis, size in enumerate(chunk) if size == 1), *long)
