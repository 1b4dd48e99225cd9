"""The stages of a conversion as PTransforms, one linear chain:

    ExpandUnits ▸ (Reshuffle) ▸ ReadBoxes ▸ Dequantize ▸ Reshape ▸ Stack ▸ WriteChunks ▸ AssembleCheckpoint

Only the numbers of units cross a shuffle, before the work and after it; a worker looks up in its own copy of the plan
what a number means. From ReadBoxes to WriteChunks one `Work` goes by reference. Every stage counts its bytes and its
milliseconds, under its own name. On an engine whose workers are elsewhere a handshake comes before all of it
(`handshake.py`). A release that is compared with others on the way has CompareRows before WriteChunks.
"""

# pyright: reportReturnType=false
# Beam says of `pcoll | transform` only that it is a PValue.

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import apache_beam as beam
from apache_beam.metrics import Metrics
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.windowed_value import WindowedValue

from weightbeam.formats.storage.token import name_secret
from weightbeam.transforms.comparing import baselines
from weightbeam.transforms.cutting.rows import RowsRecipe
from weightbeam.transforms.cutting.units import Unit
from weightbeam.transforms.execution import boxes as execution
from weightbeam.transforms.execution.arena import give_back, hand_over, release_free, take, take_now, uncount
from weightbeam.transforms.execution.overlap import AHEAD, BEHIND, READERS, Background
from weightbeam.transforms.execution.stack import stack
from weightbeam.transforms.stages.head_start import claim
from weightbeam.transforms.stages.staged import AtWork
from weightbeam.transforms.stages.work import Tally, Work, total_bytes

LOG = logging.getLogger("weightbeam")
WRITTEN = Tally()  # bytes
Done = tuple[Work, int, int]  # what a stage has done its part of, the bytes it handled, and the milliseconds that took


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

    def measured(self, work: Work) -> Done:
        """Runs the stage's part; counts nothing yet: Beam's counters are the thread's whose bundle it is."""
        start = time.perf_counter_ns()
        try:
            nbytes = self.run(work)
        except BaseException:
            uncount(work.arena)
            raise
        return work, nbytes, -(-(time.perf_counter_ns() - start) // 1_000_000)

    def counted(self, done: Done) -> Work:
        """Counts bytes and milliseconds of a part that was run."""
        work, nbytes, milliseconds = done
        self.bytes.inc(nbytes)
        self.milliseconds.inc(milliseconds)
        return work

    def process(self, work: Work) -> Iterator:
        yield self.counted(self.measured(work))


class _ReadBoxesFn(StageFn):
    def __init__(self, at_work: AtWork, budget: int | None, overlapping: bool):
        super().__init__()
        self.at_work, self.budget, self.ahead = at_work, budget, AHEAD * overlapping

    def setup(self) -> None:
        self.at_work.set_up()
        self.reading = Background[Done](self.ahead, READERS)

    def teardown(self) -> None:
        # after an error there may be some, which other threads mustn't wait for
        self.reading.forget(lambda done: uncount(done[0].arena))

    def run(self, work: Work) -> int:
        if work.begun:
            work.raw, nbytes = work.begun.result()
        else:
            work.raw, nbytes = execution.read(work.unit.fetches, work.arena.empty)
        if not work.unit.is_done:
            work.notes = self.at_work.planned.note_reads(work.unit, work.raw)
        return nbytes

    def process(self, todo: tuple[int, bool]) -> Iterator[Work]:
        number, is_done = todo
        staging = self.at_work.staging
        if not is_done:
            staging.check()
        if begun := claim(self.at_work.plan_hash, number):
            work = Work(begun.unit, begun.arena, begun.stored)
            yield from map(self.counted, self.reading.begin(self.measured, work))
            return
        unit = Unit.done(number) if is_done else self.at_work.planned.expand(number, staging.plan_folder)
        arena = take_now(unit.working_bytes, self.budget)
        if arena is None:  # what was read ahead goes on first: its memory may be what is waited for
            yield from map(self.counted, self.reading.end())
            arena = take(unit.working_bytes, self.budget)  # WriteChunks gives it back
        yield from map(self.counted, self.reading.begin(self.measured, Work(unit, arena)))

    def finish_bundle(self) -> Iterator[WindowedValue]:
        yield from map(in_global_window, map(self.counted, self.reading.end()))


class _DequantizeFn(StageFn):
    def run(self, work: Work) -> int:
        work.values = execution.decode(work.unit.fetches, work.raw, work.arena.empty)
        work.raw = []
        return total_bytes(work.values)


class _ReshapeFn(StageFn):
    def run(self, work: Work) -> int:
        work.views = [execution.arrange(work.unit.fetches, work.values, recipe.pieces) for recipe in work.unit.recipes]
        return sum(view.nbytes for views in work.views for _, view in views)


class _StackFn(StageFn):
    def run(self, work: Work) -> int:
        work.shards = [
            recipe.finish(stack(recipe, views, work.arena.empty))
            for recipe, views in zip(work.unit.recipes, work.views, strict=True)
        ]
        work.values, work.views = [], []
        return total_bytes(work.shards)


class _CompareRowsFn(StageFn):
    def __init__(self, urls: Sequence[str], secret: str | None):
        super().__init__()
        self.urls, self.secret, self.of_run = tuple(urls), secret, uuid.uuid4().hex

    def setup(self) -> None:
        name_secret(self.secret)
        self.opened = baselines.open_baselines(self.of_run, self.urls)

    def run(self, work: Work) -> int:
        if work.unit.is_done:
            return 0
        rows = [
            (recipe.tensor, recipe.box, values)
            for recipe, values in zip(work.unit.recipes, work.shards, strict=True)
            if isinstance(recipe, RowsRecipe)  # as all are of a release
        ]
        found = baselines.compare_rows(self.opened, rows)
        work.notes = {**work.notes, **baselines.note(found)}
        return sum(values.nbytes for *_, values in rows) if any(found.values()) else 0


class _WriteChunksFn(StageFn):
    def __init__(self, at_work: AtWork, overlapping: bool):
        super().__init__()
        self.at_work, self.behind = at_work, BEHIND * overlapping

    def setup(self) -> None:
        self.writing = Background[Done](self.behind)

    def run(self, work: Work) -> int:
        nbytes = 0
        if not work.unit.is_done:
            nbytes = self.at_work.planned.write(self.at_work.staging, work.unit, work.shards, work.notes)
            LOG.debug("unit %s is done: %s bytes written", work.unit.id, f"{nbytes:,}")
        work.shards = []
        give_back(work.arena)
        WRITTEN.add(nbytes)
        return nbytes

    def process(self, work: Work) -> Iterator[int]:
        hand_over(work.arena)
        try:
            over = self.writing.begin(self.measured, work)
        except BaseException:
            uncount(work.arena)
            raise
        for done in over:
            yield self.counted(done).unit.id

    def finish_bundle(self) -> Iterator[WindowedValue]:
        for done in self.writing.end():
            yield in_global_window(self.counted(done).unit.id)


class ExpandUnits(beam.PTransform):
    """How many units there are -> the number of each and whether it is done, spread over the workers in their order."""

    def __init__(self, at_work: AtWork):
        super().__init__()
        self.at_work = at_work

    def expand(self, pcoll: beam.PCollection) -> beam.PCollection:
        return (
            pcoll
            | "Expand" >> beam.ParDo(_ExpandFn(self.at_work)).with_output_types(tuple[int, bool])
            | beam.Reshuffle()
        )


class _ExpandFn(beam.DoFn):
    def __init__(self, at_work: AtWork):
        self.at_work = at_work

    def setup(self) -> None:
        # once: asking for each unit would take a bucket longer than all of the rest
        self.done = self.at_work.staging.ledger.done()

    def process(self, units: int) -> Iterator[tuple[int, bool]]:
        if not self.at_work.is_published():  # else this bundle is a repeated one
            LOG.debug("%s of %s units are done already", f"{len(self.done):,}", f"{units:,}")
            for number in range(units):
                # those too: so the assembly happens even if nothing else is left to do
                yield number, number in self.done


class ReplaceWith(beam.PTransform):
    """A count -> a number that is known already. What follows waits for the count, and doesn't need it."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number

    def expand(self, pcoll: beam.PCollection) -> beam.PCollection:
        return pcoll | beam.Map(lambda _, number: number, self.number).with_output_types(int)


class UnpackChunks(beam.PTransform):
    """How many large chunks there are -> how many units, once all chunks lie unpacked beside the plan; see
    `formats/orbax/unpacking.py`.
    """

    def __init__(self, at_work: AtWork, units: int):
        super().__init__()
        self.at_work, self.units = at_work, units

    def expand(self, pcoll: beam.PCollection) -> beam.PCollection:
        return (
            pcoll
            | "Chunks" >> beam.FlatMap(lambda count: range(count)).with_output_types(int)
            | beam.Reshuffle()
            | "Unpack" >> beam.ParDo(_UnpackFn(self.at_work)).with_output_types(int)
            | "AllChunks" >> beam.CombineGlobally(beam.combiners.CountCombineFn()).without_defaults()
            | "Units" >> ReplaceWith(self.units)
        )


class _UnpackFn(beam.DoFn):
    def __init__(self, at_work: AtWork):
        self.at_work = at_work
        self.bytes = Metrics.counter("UnpackChunks", "bytes")

    def process(self, number: int) -> Iterator[int]:
        if not self.at_work.is_published():  # else this bundle is a repeated one
            self.bytes.inc(self.at_work.planned.unpack(number, self.at_work.staging.plan_folder))
        yield number


class _Stage(beam.PTransform):
    """A DoFn, in the graph under the name of what it does."""

    def __init__(self, fn: beam.DoFn, gives: type = Work):
        super().__init__()
        self.fn, self.gives = fn, gives

    def expand(self, pcoll: beam.PCollection) -> beam.PCollection:
        return pcoll | beam.ParDo(self.fn).with_output_types(self.gives)


class ReadBoxes(_Stage):
    """Number of a unit, and whether it is done -> Work with the stored boxes, as the staged plan says.

    Waits while the units of this process would take more than `budget` bytes. Where the plan is `overlapping`, the next
    unit is read while the thread does the rest of the one before.
    """

    def __init__(self, at_work: AtWork, budget: int | None, overlapping: bool):
        super().__init__(_ReadBoxesFn(at_work, budget, overlapping))


class Dequantize(_Stage):
    """Stored boxes -> values; plain ones pass as they are."""

    def __init__(self) -> None:
        super().__init__(_DequantizeFn())


class Reshape(_Stage):
    """Values -> views in the arrays' layout. No copy."""

    def __init__(self) -> None:
        super().__init__(_ReshapeFn())


class Stack(_Stage):
    """Views -> shards: layers and experts side by side, in the stored dtype; of a release rows, adapters merged."""

    def __init__(self) -> None:
        super().__init__(_StackFn())


class CompareRows(_Stage):
    """Rows of a release -> the same, with a note of how far they are from those of other releases (`baselines.py`).

    `secret` names where the workers find the hub's token: one of those may be there.
    """

    def __init__(self, urls: Sequence[str], secret: str | None):
        super().__init__(_CompareRowsFn(urls, secret))


class WriteChunks(_Stage):
    """Shards -> a database of the unit's own, and its ledger entry; the id of the unit goes on, once both are durable.

    Where the plan is `overlapping`, units are written while the thread goes on; the end of a bundle waits for them.
    """

    def __init__(self, at_work: AtWork, overlapping: bool):
        super().__init__(_WriteChunksFn(at_work, overlapping), int)


class AssembleCheckpoint(beam.PTransform):
    """All unit ids -> the published checkpoint."""

    def __init__(self, at_work: AtWork, overwrite: bool):
        super().__init__()
        self.at_work, self.overwrite = at_work, overwrite

    def expand(self, pcoll: beam.PCollection) -> beam.PCollection:
        return (
            pcoll
            | "AllUnits" >> beam.CombineGlobally(beam.combiners.CountCombineFn()).without_defaults()
            | "Assemble" >> beam.Map(_assemble, self.at_work, self.overwrite)
        )


def in_global_window(value: Any) -> WindowedValue:
    """What the end of a bundle gives."""
    window = GlobalWindow()
    windows: Any = [window]
    return WindowedValue(value, window.max_timestamp(), windows)


def _assemble(written: int, at_work: AtWork, overwrite: bool) -> int:
    at_work.set_up()  # the source is looked at once more
    if not at_work.is_published():
        release_free()
        LOG.debug("all units are done; what they made is put together")
        at_work.planned.assemble(at_work.staging, overwrite)
        LOG.debug("published as %s", at_work.staging.final)
    return written
