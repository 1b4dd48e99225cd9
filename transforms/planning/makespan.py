"""How long a conversion takes on N workers of Dataflow or of a cluster, and what it costs: a simulation, from what each
unit reads, decodes, copies and writes.

Rates of the processor are measured, on one core each (`benchmarks/results.json`, 2026-11-21); what a service takes or
allows is its documentation's, or an estimate, and says so. Nothing was measured on Dataflow itself.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterator, Sequence

from weightbeam.model_mappings.boxes import volume
from weightbeam.model_mappings.plan import Array
from weightbeam.transforms.cutting.blocks import element_box
from weightbeam.transforms.execution.overlap import units_at_a_time
from weightbeam.transforms.planning.conversion import Conversion

# Bytes a second that one core handles; what decoding takes each encoding says (`decode_rate`).
TRANSPOSE, COPY = 4.2e9, 8.5e9  # bytes made: each row becomes a column, or runs stay whole
# Bytes read or written: the CPU time of the three conversions of `benchmarks.bench`, less the start-up and the above,
# is 0.58 to 0.80 seconds for each GB that they read or write locally. TLS adds 0.19 (AES-128-GCM by OpenSSL 3 on that
# machine: 5.3 GB/s).
TRANSFER = 1.1e9

# Of the services.
START = 240.0  # seconds until a worker of Dataflow works: its machine, the image, the plan. An estimate
# seconds until a job works on a cluster that is there: measured on Flink, its submission and the workers' start
CLUSTER_START = 12.0
CLUSTER_SLOTS = 2  # of a worker there, as deploy/flink and deploy/spark have them
LATENCY = 0.05  # seconds until a bucket answers. An estimate
# requests of a unit that wait for each other, counted likewise: read, manifest, data, manifest, ledger
SEQUENTIAL_REQUESTS = 5
OBJECTS_OF_A_UNIT = 3  # that a unit writes: data, manifest, ledger
# Answers that the assembly, on one worker, waits for in turn for each unit, counted at a test server (2026-11-21): its
# ledger entry's reading and removal, of 16 units at a time, and four reads of its database by TensorStore, of 32.
ASSEMBLY_ANSWERS = 2 / 16 + 4 / 32
MERGE = 1.5 / 5000  # seconds for each database of 100 keys (measured with 5,000 of them, locally)
# Requests a second that a bucket takes at first, and the seconds in which they may double
# (cloud.google.com/storage/docs/request-rate)
BUCKET_WRITES, BUCKET_READS, DOUBLING = 1000.0, 5000.0, 1200.0
# files in so many seconds, for a free account (huggingface.co/docs/hub/rate-limits, 2026-09)
HUB_RESOLVES, HUB_WINDOW = 5000, 300.0


@dataclasses.dataclass(frozen=True)
class Effort:
    """What a unit takes.

    Attributes:
      seconds: of one core.
      reads: requests.
      read, written: bytes.
    """

    seconds: float
    reads: int
    read: int
    written: int


@dataclasses.dataclass(frozen=True)
class Worker:
    """A worker of an engine.

    Attributes:
      gbps: of its network, in Gbit/s (10^9 bits), in each direction.
      hour_price: in any currency.
      threads: units that it works on at a time: threads, or slots.
      cores: vCPUs; each is taken for a core of the machine that the rates were measured on.
      engine: what it works for.
      start: seconds from the job's submission until it works.
    """

    gbps: float
    hour_price: float
    threads: int
    cores: int = 2
    engine: str = "Dataflow"
    start: float = START


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A simulated conversion.

    Attributes:
      workers: how many.
      wall_seconds: from the job's submission to the published checkpoint.
      unit_seconds: of it, for the units; the rest is start-up and assembly.
      vcpu_hours: paid for.
      cost: in the currency of the price.
      limit: what takes longest.
      worker: each of them.
    """

    workers: int
    wall_seconds: float
    unit_seconds: float
    vcpu_hours: float
    cost: float
    limit: str
    worker: Worker


def efforts_of(conversion: Conversion) -> Iterator[Effort]:
    """What each unit of a plan takes."""
    copy = [_copy_rate(array) for array in conversion.plan.arrays]
    efforts = {unit: _effort(conversion, unit, copy) for unit in dict.fromkeys(conversion.alike)}
    return (efforts[unit] for unit in conversion.alike)


def _effort(conversion: Conversion, unit: int, copy: Sequence[float]) -> Effort:
    seconds, reads, read, written = 0.0, 0, 0, 0
    for encoding, sizes in conversion.read_sizes(unit):
        reads, read = reads + len(sizes), read + sum(sizes)
        seconds += sum(sizes) / encoding.decode_rate
    for block in conversion.units[unit]:
        spec = conversion.grids[block.array].spec
        made = volume(element_box(spec, block.shards)) * spec.dtype.itemsize
        written += made
        seconds += made / copy[block.array]
    return Effort(seconds + (read + written) / TRANSFER, reads, read, written)


def _copy_rate(array: Array) -> float:
    """Bytes a second that one core makes of an array: by whether its fastest axis is that of its tensors."""
    corner = tuple((0, 1) for _ in array.shape)
    piece = next(array.pieces(corner), None)
    return TRANSPOSE if piece and piece.order and piece.order[-1] != len(piece.order) - 1 else COPY


def schedule(durations: Sequence[float], machines: int) -> float:
    """When the last of some jobs ends that are started in order, each on the machine that is free first."""
    free = [0.0] * min(machines, len(durations))
    for duration in durations:
        heapq.heapreplace(free, free[0] + duration)
    return max(free, default=0.0)


def passage(effort: Effort, worker: Worker) -> float:
    """Seconds that a unit takes from its first byte to its ledger entry, where nothing else is under way."""
    moved = effort.read + effort.written
    return effort.seconds + moved / (worker.gbps * 1e9 / 8) + SEQUENTIAL_REQUESTS * LATENCY


def occupation(effort: Effort, worker: Worker) -> tuple[float, str]:
    """Seconds that a unit keeps a thread, all of the worker's threads being busy, and what decides it.

    A thread computes one unit while the next is read and others are written (`overlap.py`), so that a worker has more
    units under way than threads.
    """
    under_way = units_at_a_time(worker.threads, overlapping=True)
    return max(
        (passage(effort, worker) * worker.threads / under_way, "latency of the bucket"),
        (effort.seconds * max(1.0, worker.threads / worker.cores), "vCPUs"),
        (max(effort.read, effort.written) * worker.threads / (worker.gbps * 1e9 / 8), "network of the workers"),
    )


def ramp(requests: float, rate: float) -> float:
    """Seconds in which a bucket takes so many requests that begins at a rate and doubles it every `DOUBLING` seconds."""
    return DOUBLING * math.log2(1 + requests * math.log(2) / (rate * DOUBLING))


def estimate(efforts: Sequence[Effort], workers: int, worker: Worker, files: int, from_hub: bool) -> Estimate:
    """Simulates a conversion into a bucket.

    Args:
      efforts: of the units, in their order.
      workers: how many, from the first to the last.
      worker: each of them.
      files: of the source. A worker asks the hub for each that it needs once.
      from_hub: they come from the hub, else from a bucket.
    """
    occupied = [occupation(effort, worker) for effort in efforts]
    durations = [seconds for seconds, _ in occupied]
    worked = schedule(durations, workers * worker.threads)
    if efforts:  # nothing overlaps with the reading of the first unit, nor with the writing of the last
        worked += max(0.0, passage(efforts[0], worker) - durations[0])
    longest = max(durations, default=0.0)
    totals: dict[str, float] = {}
    for seconds, why in occupied:
        totals[why] = totals.get(why, 0.0) + seconds
    reads = 0 if from_hub else sum(effort.reads for effort in efforts)
    resolves = workers * min(files, -(-len(efforts) // workers)) if from_hub else 0
    seconds, limit = max(
        (
            worked,
            "the longest unit" if worked < 2 * longest else max(totals, key=totals.__getitem__, default="start-up"),
        ),
        (ramp(OBJECTS_OF_A_UNIT * len(efforts), BUCKET_WRITES), "writes that a bucket takes"),
        (ramp(reads, BUCKET_READS), "reads that a bucket takes"),
        ((-(-resolves // HUB_RESOLVES) - 1) * HUB_WINDOW, "files that the hub gives"),
    )
    assembly = len(efforts) * (MERGE + ASSEMBLY_ANSWERS * LATENCY)
    _, limit = max((seconds, limit), (worker.start, "start-up"), (assembly, "assembly"))
    wall = worker.start + seconds + assembly
    hours = workers * wall / 3600
    return Estimate(workers, wall, seconds, hours * worker.cores, hours * worker.hour_price, limit, worker)
