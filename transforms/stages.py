"""The stages of a conversion as PTransforms, one linear chain:

    ExpandUnits ▸ (Reshuffle) ▸ ReadBoxes ▸ Dequantize ▸ Reshape ▸ Stack ▸ WriteChunks ▸ AssembleCheckpoint

Only unit descriptors cross a shuffle before the work and only unit ids after it. From ReadBoxes to WriteChunks one `Work`
goes by reference. Every stage counts its bytes and its milliseconds, under its own name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import apache_beam as beam
from apache_beam.metrics import Metrics

from formats.orbax import Staging, assemble, write_unit
from formats.safetensors import read_boxes
from formats.zarr import Format
from transforms.conversion import Conversion, load_staged
from transforms.stack import stack
from transforms.units import Unit
from transforms.work import Work, total_bytes


class ByteCounter:
    """Bytes written by this process, for a progress bar: Beam's own counters show only at the end of a local run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.total = 0

    def add(self, n: int) -> None:
        with self._lock:
            self.total += n


WRITTEN = ByteCounter()


class StageFn(beam.DoFn):
    """A stage of the fused chain: does its part of the work and counts it."""

    def __init__(self) -> None:
        self.bytes = Metrics.counter(type(self).stage(), "bytes")
        self.milliseconds = Metrics.counter(type(self).stage(), "milliseconds")

    @classmethod
    def stage(cls) -> str:
        """The stage's name, as its PTransform has it."""
        return cls.__name__.removesuffix("Fn").lstrip("_")

    def run(self, work: Work) -> int:
        """Does the stage's part; returns the bytes it handled."""
        raise NotImplementedError

    def process(self, work: Work) -> Iterator[Work]:
        start = time.perf_counter_ns()
        self.bytes.inc(self.run(work))
        self.milliseconds.inc(-(-(time.perf_counter_ns() - start) // 1_000_000))
        yield work


class _ReadBoxesFn(StageFn):
    def run(self, work: Work) -> int:
        reads = [fetch.encoding.reads(fetch.box) for fetch in work.unit.fetches]
        arrays, nbytes = read_boxes([read for group in reads for read in group], work.arena.empty)
        rest = iter(arrays)
        work.stored = [[next(rest) for _ in group] for group in reads]
        return nbytes

    def process(self, descriptor: bytes) -> Iterator[Work]:
        return super().process(Work(Unit.unpack(descriptor)))


class _DequantizeFn(StageFn):
    def run(self, work: Work) -> int:
        pairs = zip(work.unit.fetches, work.stored, strict=True)
        work.values = [fetch.encoding.decode(stored, fetch.box, fetch.dtype, work.arena.empty) for fetch, stored in pairs]
        work.stored = []
        return total_bytes(work.values)


class _ReshapeFn(StageFn):
    def run(self, work: Work) -> int:
        origins = [tuple(start for start, _ in fetch.box) for fetch in work.unit.fetches]
        for job in work.unit.shards:
            views = [(piece, piece.source.of(work.values[i], origins[i]).transpose(piece.order)) for i, piece in job.pieces]
            work.views.append(views)
        return sum(view.nbytes for views in work.views for _, view in views)


class _StackFn(StageFn):
    def run(self, work: Work) -> int:
        work.shards = [stack(job, views, work.arena.empty) for job, views in zip(work.unit.shards, work.views, strict=True)]
        work.values, work.views = [], []
        return total_bytes(work.shards)


class _WriteChunksFn(StageFn):
    def __init__(self, staging: Staging, format: Format):
        super().__init__()
        self.staging, self.format = staging, format

    def run(self, work: Work) -> int:
        if not work.shards:
            return 0
        shards = [(job.spec, job.box, values) for job, values in zip(work.unit.shards, work.shards, strict=True)]
        write_unit(self.staging, work.unit.id, shards, self.format)
        nbytes = total_bytes(work.shards)
        work.shards = []
        WRITTEN.add(nbytes)
        return nbytes

    def process(self, work: Work) -> Iterator[int]:
        for done in super().process(work):
            yield done.unit.id


class ExpandUnits(beam.PTransform):
    """Ranges of unit ids -> descriptors of the units, from the staged plan, spread over the workers."""

    def __init__(self, staging: Staging, plan: str):
        super().__init__()
        self.staging, self.plan = staging, plan

    def expand(self, pcoll: beam.PCollection) -> beam.PCollection:
        return pcoll | "Expand" >> beam.ParDo(_ExpandFn(self.staging, self.plan)).with_output_types(bytes) | beam.Reshuffle()


class _ExpandFn(beam.DoFn):
    def __init__(self, staging: Staging, plan: str):
        self.staging, self.plan = staging, plan

    def process(self, ids: tuple[int, int]) -> Iterator[bytes]:
        if not self.staging.plan.exists():
            return  # the checkpoint is complete; this bundle is a repeated one
        conversion, done = load_staged(self.staging, self.plan), self.staging.done()
        for unit in range(*ids):
            # A unit that is done goes through empty, so that the assembly happens even if nothing else is left to do.
            yield (Unit(unit, (), ()) if unit in done else conversion.expand(unit)).pack()


class ReadBoxes(beam.PTransform):
    """Descriptor of a unit -> Work with the stored boxes."""

    def expand(self, pcoll: beam.PCollection) -> beam.PCollection:
        return pcoll | beam.ParDo(_ReadBoxesFn()).with_output_types(Work)


class Dequantize(beam.PTransform):
    """Stored boxes -> values; plain ones pass as they are."""

    def expand(self, pcoll: beam.PCollection) -> beam.PCollection:
        return pcoll | beam.ParDo(_DequantizeFn()).with_output_types(Work)


class Reshape(beam.PTransform):
    """Values -> views in the arrays' layout. No copy."""

    def expand(self, pcoll: beam.PCollection) -> beam.PCollection:
        return pcoll | beam.ParDo(_ReshapeFn()).with_output_types(Work)


class Stack(beam.PTransform):
    """Views -> shards: layers and experts side by side, in the stored dtype."""

    def expand(self, pcoll: beam.PCollection) -> beam.PCollection:
        return pcoll | beam.ParDo(_StackFn()).with_output_types(Work)


class WriteChunks(beam.PTransform):
    """Shards -> a database of the unit's own, and its ledger entry; the id of the unit goes on."""

    def __init__(self, staging: Staging, format: Format):
        super().__init__()
        self.staging, self.format = staging, format

    def expand(self, pcoll: beam.PCollection) -> beam.PCollection:
        return pcoll | beam.ParDo(_WriteChunksFn(self.staging, self.format)).with_output_types(int)


class AssembleCheckpoint(beam.PTransform):
    """All unit ids -> the published checkpoint."""

    def __init__(self, staging: Staging, plan: str, overwrite: bool):
        super().__init__()
        self.staging, self.plan, self.overwrite = staging, plan, overwrite

    def expand(self, pcoll: beam.PCollection) -> beam.PCollection:
        return (
            pcoll | "AllUnits" >> beam.CombineGlobally(_Count()).without_defaults() | "Assemble" >> beam.Map(_assemble, self.staging, self.plan, self.overwrite)
        )


class _Count(beam.CombineFn):
    """How many units were done here. The ledger says which; this only makes the assembly wait for all of them."""

    def create_accumulator(self) -> int:
        return 0

    def add_input(self, accumulator: int, element: int) -> int:
        return accumulator + 1

    def merge_accumulators(self, accumulators: Iterable[int]) -> int:
        return sum(accumulators)

    def extract_output(self, accumulator: int) -> int:
        return accumulator


def _assemble(written: int, staging: Staging, plan: str, overwrite: bool) -> int:
    if staging.plan.exists():
        conversion = load_staged(staging, plan)
        specs = [grid.spec for grid in conversion.grids]
        assemble(staging, specs, conversion.options.format, len(conversion.units), custom_metadata(conversion), overwrite)
    return written


def custom_metadata(conversion: Conversion) -> dict[str, Any]:
    """What MaxText reads back (`scan_layers`), and where the checkpoint comes from."""
    options = conversion.options
    about = {"source": conversion.checkpoint.root, "plan": conversion.hash, "family": conversion.plan.family, "mesh": list(options.mesh)}
    return {"scan_layers": options.scan_layers, "weightbeam": about}


def unit_ranges(units: int, size: int = 16) -> Sequence[tuple[int, int]]:
    """Ranges of unit ids for `Create`: a few elements, however many units there are."""
    return [(start, min(start + size, units)) for start in range(0, units, size)]
