"""Who reads what, in which step: boxes and integers, without JAX and without values.

An array lies on devices in shards of one shape. What is moved in one go is a *block*: the same box of every shard, so
that one program, the same on all devices, puts it in its place. A block is read in one of two ways:

* *direct*: each process reads the shares of its own devices, where these are contiguous in the source, and nobody else's.
* *exchanged*: the block is cut along the source's rows into one slice for each device; each process reads its devices' slices,
  and the devices exchange them. Each byte is read once, in long runs, however the mesh cuts the columns.

Steps are blocks of several arrays, as many as a process has memory for at a time. Every process makes the same
schedule.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from weightbeam.model_mappings.boxes import Box, tile, whole
from weightbeam.pipelines.loading.source import ArraySource, Described
from weightbeam.transforms.cutting.grid import cut_axis

# of memory that a process needs for a step; the same in all processes, whatever their hosts, since it makes the
# schedule
UNIT_BYTES = 64 << 20
MAX_READERS = 6  # steps that are read at a time, where there are so many cores
ON_THE_WAY = 2  # steps that are on their way to the devices at a time
SMALL = 32 << 10  # bytes; a smaller array is read by every process that needs it
MIN_RUN = 128 << 10  # bytes; where what a process needs lies in shorter runs, it is exchanged
MIN_REMOTE_RUN = 1 << 20  # the same of a bucket or the hub, where each range is a request
MAX_AMPLIFICATION = 1.02  # bytes that all processes read directly, by the bytes of the block
MAX_PADDING = 1 / 8  # of a block, so that all devices take part in reading it


@dataclasses.dataclass(frozen=True)
class ShardLayout:
    """How an array lies on devices: a regular grid of shards.

    Attributes:
      shape: of the array.
      counts: shards along each axis; they divide the shape.
      processes: of each device. Devices are in the order of their shards (C order), those with the same shard side by
        side.
    """

    shape: tuple[int, ...]
    counts: tuple[int, ...]
    processes: tuple[int, ...]

    @property
    def shard(self) -> tuple[int, ...]:
        """The shape of a shard."""
        return tuple(size // count for size, count in zip(self.shape, self.counts, strict=True))

    @property
    def replicas(self) -> int:
        """Devices with the same shard."""
        return len(self.processes) // math.prod(self.counts)

    @functools.cached_property
    def readers(self) -> tuple[int, ...]:
        """The processes, each once, in order."""
        return tuple(sorted(set(self.processes)))

    @functools.cached_property
    def most_shards(self) -> int:
        """Different shards of the process that has most."""
        shards = {(owner, device // self.replicas) for device, owner in enumerate(self.processes)}
        return max(Counter(owner for owner, _ in shards).values())


@dataclasses.dataclass(frozen=True)
class HostShare:
    """What a process makes for some of its devices: an array of `shape`, of boxes of the source's array side by side.

    Attributes:
      devices: numbers of the devices that get it.
      shape: of what they get; what no part covers is padding.
      parts: `(box within the share, box of the array)`.
      others: how many processes with higher numbers read the same; -1 where one with a lower number does.
    """

    devices: tuple[int, ...]
    shape: tuple[int, ...]
    parts: tuple[tuple[Box, Box], ...]
    others: int = 0

    @property
    def is_one_box(self) -> bool:
        """Whether it is one box of the array, and nothing else."""
        return [part for part, _ in self.parts] == [whole(self.shape)]


@dataclasses.dataclass(frozen=True)
class ReadBlock:
    """The same box of every shard of an array.

    Attributes:
      key: of the array.
      layout: how it lies on the devices.
      start, extent: of the box, within a shard.
      ways: into how many slices each axis is cut for the exchange; None for a direct block.
      grain: lengths that a slice takes whole.
    """

    key: str
    layout: ShardLayout
    start: tuple[int, ...]
    extent: tuple[int, ...]
    ways: tuple[int, ...] | None = None
    grain: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all shares side by side."""
        return tuple(count * n for count, n in zip(self.layout.counts, self.extent, strict=True))

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole array."""
        return self.extent == self.layout.shard

    @property
    def is_whole_direct(self) -> bool:
        """Whether it is an array that needs no exchange, in one go."""
        return self.is_whole and self.ways is None

    @property
    def is_whole_exchange(self) -> bool:
        """Whether it is an array that is exchanged in one go."""
        return self.is_whole and self.ways is not None

    @property
    def slice_shape(self) -> tuple[int, ...]:
        """Of the slice that one device reads for the exchange; padded where it doesn't come out even."""
        assert self.ways is not None
        sizes = zip(self.shape, self.ways, self.grain, strict=True)
        return tuple(math.ceil(math.ceil(size / grain) / ways) * grain for size, ways, grain in sizes)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Of all slices side by side."""
        assert self.ways is not None
        return tuple(n * ways for n, ways in zip(self.slice_shape, self.ways, strict=True))

    def shares(self, process: int) -> Iterator[HostShare]:
        """What a process reads of it."""
        numbers: dict[int, list[int]] = {}
        together = self.layout.replicas if self.ways is None else len(self.layout.processes) // math.prod(self.ways)
        for device, owner in enumerate(self.layout.processes):
            if owner == process:
                numbers.setdefault(device // together, []).append(device)
        for number, devices in numbers.items():
            readers = set(self.layout.processes[number * together : (number + 1) * together])
            others = len(readers) - 1 if process == min(readers) else -1
            if self.ways is None:
                index = np.unravel_index(number, self.layout.counts) if self.layout.counts else ()
                corner = [
                    int(i) * size + start for i, size, start in zip(index, self.layout.shard, self.start, strict=True)
                ]
                box = tuple((at, at + n) for at, n in zip(corner, self.extent, strict=True))
                yield HostShare(tuple(devices), self.extent, ((whole(self.extent), box),), others)
            else:
                index = map(int, np.unravel_index(number, self.ways)) if self.ways else ()
                spans = tile(tuple(index), self.slice_shape, self.shape)
                yield HostShare(tuple(devices), self.slice_shape, tuple(self._parts(spans)), others)

    def _parts(self, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[Box, Box]]:
        """A box of the block, whose shares lie side by side there, as boxes of the array, where they lie apart."""
        axes = []
        for (low, high), shard, start, n in zip(spans, self.layout.shard, self.start, self.extent, strict=True):
            if n == shard:
                axes.append([((0, high - low), (low, high))] if low < high else [])
                continue
            ranges = []
            for number in range(low // n, -(-high // n)):
                a, b = max(low, number * n), min(high, (number + 1) * n)
                at = number * shard + start - number * n
                ranges.append(((a - low, b - low), (a + at, b + at)))
            axes.append(ranges)
        for pairs in itertools.product(*axes):
            yield tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)


@dataclasses.dataclass(frozen=True)
class ReadStep:
    """Blocks that are read together. `nbytes` is the memory that a process needs for it."""

    blocks: tuple[ReadBlock, ...]
    nbytes: int


def boxes_of(block: ReadBlock, process: int) -> list[Box]:
    """All boxes of the array that a process reads for a block."""
    return [box for share in block.shares(process) for _, box in share.parts]


def find_ways(shape: Sequence[int], described: Described, layout: ShardLayout) -> tuple[int, ...]:
    """Into how many slices to cut each axis of a block of an array, so that each device reads one: along the source's
    slowest axes first.

    Where the sizes have too few factors, an axis is padded that the layout doesn't cut; where that would be too much,
    some devices share a slice.
    """
    ways, left = [1] * len(shape), len(layout.processes)
    order = described.order or tuple(range(len(shape)))
    pieces = [-(-size // step) for size, step in zip(shape, described.grain, strict=True)]
    for axis in order:
        ways[axis] = math.gcd(pieces[axis], left)
        left //= ways[axis]
    for axis in order:
        finer = ways[axis] * left
        if (
            left > 1
            and layout.counts[axis] == 1
            and -(-pieces[axis] // finer) * finer <= (1 + MAX_PADDING) * pieces[axis]
        ):
            ways[axis], left = finer, 1
    return tuple(ways)


def cut(described: Described, layout: ShardLayout, nbytes: int, exchanged: bool) -> tuple[int, ...]:
    """The extent of a block that takes at most `nbytes` of each process's memory, cut along the source's slowest axes
    first.

    All blocks of an array have one shape where that can be, since each shape is a program to compile: 58 layers of
    which 20 have room are cut into 29 and 29, and the heads, which come next, in two.
    """
    shares = math.prod(layout.counts) / len(layout.readers) if exchanged else layout.most_shards
    most = nbytes / (shares * described.element_bytes)  # elements of a shard
    extent = list(layout.shard)
    for at, axis in enumerate(described.order):
        if math.prod(extent) <= most:
            break
        grain = described.grain[axis] if extent[axis] % described.grain[axis] == 0 else 1
        total = extent[axis] // grain
        room = max(1, int(total * most / math.prod(extent)))
        part = cut_axis(total, room, ragged=True)
        if total % part and (even := _cut_evenly(extent, described, at, part, most)):
            return even
        extent[axis] = grain * part
    return tuple(extent)


def _cut_evenly(extent: Sequence[int], described: Described, at: int, part: int, most: float) -> tuple[int, ...] | None:
    """Cuts an axis into fewer, equal parts than `part`, and the axis that comes next, too; None where that leaves short
    runs or small blocks.
    """
    if at + 1 == len(described.order):
        return None
    axis, following = described.order[at : at + 2]
    grain, next_grain = (described.grain[i] if extent[i] % described.grain[i] == 0 else 1 for i in (axis, following))
    total, cut = extent[axis] // grain, list(extent)
    cut[axis] = grain * next(n for n in range(part, total + 1) if total % n == 0)
    room = int(extent[following] // next_grain * most / math.prod(cut))
    cut[following] = next_grain * cut_axis(extent[following] // next_grain, max(1, room), ragged=False)
    run = math.prod(cut) // cut[axis] * described.dtype.itemsize
    return tuple(cut) if run >= MIN_RUN and most / 4 <= math.prod(cut) <= most else None


def _blocks(
    key: str, described: Described, layout: ShardLayout, extent: tuple[int, ...], ways: tuple[int, ...] | None
) -> Iterator[ReadBlock]:
    starts = [range(0, size, n) if n else (0,) for size, n in zip(layout.shard, extent, strict=True)]
    for start in itertools.product(*starts):
        part = tuple(min(n, size - at) for at, n, size in zip(start, extent, layout.shard, strict=True))
        block = ReadBlock(key, layout, start, part, ways, described.grain)
        if ways is not None and part != extent:  # the last one, cut short
            block = dataclasses.replace(block, ways=find_ways(block.shape, described, layout))
        yield block


def make_blocks(key: str, source: ArraySource, layout: ShardLayout, nbytes: int, min_run: int) -> list[ReadBlock]:
    """Cuts an array into blocks of at most `nbytes` of a process's memory, and settles how they are read."""
    described = source.arrays[key]
    direct = cut(described, layout, nbytes, exchanged=False)
    if len(layout.readers) > 1 and described.nbytes > SMALL and 0 not in described.shape:
        first = ReadBlock(key, layout, (0,) * len(direct), direct)
        owned = [boxes_of(first, process) for process in dict.fromkeys((layout.readers[0], layout.readers[-1]))]
        costs = [source.cost(key, boxes) for boxes in owned]
        alone = dataclasses.replace(first, layout=dataclasses.replace(layout, processes=(0,) * len(layout.processes)))
        entire = source.cost(key, boxes_of(alone, 0))
        read = sum(cost.nbytes for cost in costs) / len(costs) * len(layout.readers)
        contiguous = all(cost.nbytes >= min_run * cost.runs or cost.runs <= entire.runs for cost in costs)
        if read > MAX_AMPLIFICATION * entire.nbytes or not contiguous:
            extent = cut(described, layout, nbytes, exchanged=True)
            shape = tuple(count * n for count, n in zip(layout.counts, extent, strict=True))
            ways = find_ways(shape, described, layout)
            if math.prod(ways) > 1:
                return list(_blocks(key, described, layout, extent, ways))
    return list(_blocks(key, described, layout, direct, None))


def make_steps(
    source: ArraySource, layouts: Mapping[str, ShardLayout], unit_bytes: int, min_run: int = MIN_RUN
) -> list[ReadStep]:
    """The schedule: all arrays that have a layout, in the order in which they lie in the source.

    Those that are exchanged in one block come first, so that few steps have them: a step exchanges all of its own in
    one program.
    """
    groups: list[tuple[ReadBlock, ...]] = []
    for twins in source.twins():
        alike: dict[ShardLayout, list[str]] = {}
        for key in twins:
            if key in layouts:
                alike.setdefault(layouts[key], []).append(key)
        for together in alike.values():
            made = [make_blocks(key, source, layouts[key], unit_bytes // len(together), min_run) for key in together]
            groups += zip(*made, strict=True)
    groups.sort(
        key=lambda group: (
            not group[0].is_whole_exchange,
            source.arrays[group[0].key].position,
            group[0].key,
            group[0].start,
        )
    )
    steps: list[ReadStep] = []
    held: list[ReadBlock] = []
    size = 0
    for group in groups:
        needed = sum(working_bytes(block, source.arrays[block.key]) for block in group)
        if held and size + needed > unit_bytes:
            steps.append(ReadStep(tuple(held), size))
            held, size = [], 0
        held += group
        size += needed
    return [*steps, ReadStep(tuple(held), size)] if held else steps


def working_bytes(block: ReadBlock, described: Described) -> int:
    """Memory that the process which reads most of a block needs for it."""
    if block.ways is None:
        return math.prod(block.extent) * block.layout.most_shards * described.element_bytes
    slices = math.prod(block.ways)
    most = -(-slices // len(block.layout.readers))
    return math.prod(block.slice_shape) * most * described.element_bytes


def read_bytes(steps: Sequence[ReadStep], source: ArraySource, process: int) -> int:
    """Bytes that a process reads from the source."""
    alike: dict[tuple[object, ...], list[ReadBlock]] = {}  # blocks that only lie in other layers or experts
    for block in (block for step in steps for block in step.blocks):
        stacked = source.stacked(block.key)
        start = tuple(0 if axis in stacked else at for axis, at in enumerate(block.start))
        alike.setdefault((block.key, start, block.extent, block.ways), []).append(block)
    return sum(
        len(blocks) * source.cost(blocks[0].key, boxes_of(blocks[0], process)).nbytes for blocks in alike.values()
    )
