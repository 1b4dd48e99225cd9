"""The conversion as a Beam pipeline: the graph, and running it to its end."""

from __future__ import annotations

import contextlib
import io
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import GoogleCloudOptions, PipelineOptions, StandardOptions
from apache_beam.runners.runner import PipelineResult

from weightbeam.formats.encodings import ContentError
from weightbeam.formats.links import HARD, LinkError
from weightbeam.formats.staging import JOB, Staging
from weightbeam.formats.storage.token import secret
from weightbeam.pipelines import dataflow
from weightbeam.pipelines.errors import FailedError, RefusedError
from weightbeam.pipelines.notebook import as_in_a_script
from weightbeam.pipelines.options import make_pipeline, pipeline_options
from weightbeam.pipelines.progress import LINE_EVERY, Report, at_most_every, quiet, roots, watch_progress
from weightbeam.pipelines.report import threads_of
from weightbeam.pipelines.runners import jobs, local, portable
from weightbeam.pipelines.runners.failure import last_words
from weightbeam.pipelines.stopping import stopping
from weightbeam.transforms.assembly import stage
from weightbeam.transforms.handshake import GREETINGS, GreetWorkers
from weightbeam.transforms.movement import Movement
from weightbeam.transforms.options import Delivery
from weightbeam.transforms.overlap import overlaps, units_at_a_time
from weightbeam.transforms.staged import remember
from weightbeam.transforms.stages import (
    WRITTEN,
    AssembleCheckpoint,
    CompareRows,
    Dequantize,
    ExpandUnits,
    ReadBoxes,
    Reshape,
    SayInstead,
    Stack,
    UnpackChunks,
    WriteChunks,
)

# by the kind of plan, for who watches; all else is converted
DOING = {"export": "exporting", "merge": "writing", "reshard": "resharding"}


def build(
    pipeline: beam.Pipeline,
    conversion: Movement,
    staging: Staging,
    overwrite: bool = False,
    budget: int | None = None,
    greeted: bool = False,
    compared_with: Sequence[str] = (),
) -> beam.PCollection:
    """The graph.

    Args:
      pipeline: gets the stages.
      conversion: what to do.
      staging: where.
      overwrite: replace what has the same place.
      budget: bounds the bytes of the units that one process works on at a time.
      greeted: begin with a handshake: the workers aren't this process.
      compared_with: releases that the rows of a new one are compared with before they are written.
    """
    units, chunks, overlapping = (
        len(conversion.units),
        len(conversion.chunks),
        overlaps(*conversion.inputs, staging.output.url),
    )
    if greeted:
        counted = (
            pipeline | "Greetings" >> beam.Create(range(GREETINGS)) | GreetWorkers(staging, conversion.hash, secret())
        )
        counted = counted | "Count" >> SayInstead(chunks or units)
    else:
        counted = pipeline | ("Chunks" if chunks else "Units") >> beam.Create([chunks or units])
    if chunks:
        counted = counted | UnpackChunks(staging, conversion.hash, units)
    made = (
        counted
        | ExpandUnits(staging, conversion.hash)
        | ReadBoxes(staging, conversion.hash, budget, secret(), overlapping)
        | Dequantize()
        | Reshape()
        | Stack()
    )
    if compared_with:
        made = made | CompareRows(tuple(compared_with), secret())
    return (
        made
        | WriteChunks(staging, conversion.hash, overlapping)
        | AssembleCheckpoint(staging, conversion.hash, overwrite, secret())
    )


def check_job(staging: Staging, rest: Sequence[str]) -> None:
    """Makes sure that no job which was left to its own is at work there.

    Raises:
      RefusedError: one is, or the engine doesn't let us see.
    """
    try:
        noted = json.loads(staging.plan_folder.read(JOB))
    except (OSError, ValueError):
        noted = None
    if isinstance(noted, dict) and "runner" in noted:
        jobs.check_noted(staging, noted)
    else:
        dataflow.check_noted(staging, pipeline_options(rest))


def run_units(
    conversion: Movement,
    staging: Staging,
    rest: Sequence[str],
    ours: Mapping[str, Any],
    how: Delivery,
    report: Report | None = None,
) -> int | None:
    """Runs the pipeline with Beam's options `rest`; returns the bytes that this process wrote, None where a job goes on
    without it.

    `ours` are the conversion's own options, for who looks at the job.
    """
    before, options = WRITTEN.total, pipeline_options(rest, ours)
    execute(conversion, staging, options, how.resume, how.overwrite, how.link, how.sha256, report, how.compared_with)
    return WRITTEN.total - before if dataflow.waits(options) else None


def execute(
    conversion: Movement,
    staging: Staging,
    options: PipelineOptions,
    resume: bool = False,
    overwrite: bool = False,
    link: str = HARD,
    hashed: bool = False,
    report: Report | None = None,
    compared_with: Sequence[str] = (),
) -> PipelineResult | None:
    """Stages the plan and runs the pipeline, to its end unless told otherwise.

    Args:
      conversion: what to do; its plan has no problems.
      staging: where.
      options: Beam's options.
      resume: go on with what is staged there.
      overwrite: replace a checkpoint that has the same place.
      link: how the source's files get into a virtual checkpoint.
      hashed: read them once, so that their hashes are known.
      report: is told how far it has come.
      compared_with: releases that a new one is compared with on the way.

    Returns:
      The pipeline's result; None where only publishing was left to do.

    Raises:
      RefusedError: no such runner, a job is at work there, or the source's files can't be linked.
      FailedError: it failed on the way; what is done is kept.
    """
    runner = options.view_as(StandardOptions).runner
    on_dataflow, on_engine = runner == dataflow.RUNNER, runner in portable.RUNNERS
    if on_dataflow:
        dataflow.fill_in(options, conversion, str(staging.final), len(compared_with))
        dataflow.check_alone(options)
    cloud = options.view_as(GoogleCloudOptions)  # where every engine looks for the job's name
    cloud.job_name = cloud.job_name or dataflow.job_name(conversion, str(staging.final))
    threads = threads_of(options.get_all_options(drop_default=True))
    at_a_time = units_at_a_time(threads, overlaps(*conversion.inputs, staging.output.url))
    try:
        pipeline = make_pipeline(options, at_a_time * conversion.unit_working_bytes)
    except ValueError as e:
        raise RefusedError(str(e)) from e
    noise = io.StringIO()
    try:
        if not stage(conversion, staging, resume, link, hashed):
            with stopping(staging, conversion.hash):
                staging.publish(overwrite)
            return None
        remember(conversion)
        left = int(conversion.made_bytes * staging.share_left(len(conversion.units)))
        with as_in_a_script():
            budget = at_a_time * conversion.unit_bytes
            build(pipeline, conversion, staging, overwrite, budget, on_engine, compared_with)
        if on_dataflow:
            dataflow.note_job(staging, options)
            return dataflow.run(pipeline, left, noise, report)
        written = _written(conversion, staging, left, options)
        doing, places = DOING.get(conversion.kind, "converting"), [*roots(conversion.inputs), str(staging.output)]
        if on_engine:
            with stopping(staging, conversion.hash):
                return jobs.run(pipeline, staging, left, written, noise, report)
        with (
            stopping(staging, conversion.hash),
            watch_progress(left, written, doing, report, places=places),
            quiet(noise),
            as_in_a_script(),
        ):
            result = pipeline.run()
            result.wait_until_finish()
        return result
    except LinkError as e:
        raise RefusedError(f"  link: {e}") from e
    except Exception as e:
        raise FailedError(_failure(e, staging, noise.getvalue())) from e


def _written(conversion: Movement, staging: Staging, left: int, options: PipelineOptions) -> Callable[[], int]:
    """How to know the bytes written of those that were left: by a counter where the workers are threads, else by the
    ledger.
    """
    if options.view_as(StandardOptions).runner == local.RUNNER:
        before = WRITTEN.total
        return lambda: WRITTEN.total - before
    return at_most_every(
        lambda: (
            left - int(conversion.made_bytes * staging.share_left(len(conversion.units)))
            if staging.is_staged()
            else left
        ),
        LINE_EVERY,
    )


def _failure(error: Exception, staging: Staging, noise: str) -> str:
    """What to tell of a failure; the rest goes into a file beside the units."""
    last = last_words(error)
    content = isinstance(error, ContentError) or any(
        f"{kind.__name__}: " in last for kind in ContentError.__subclasses__()
    )
    lines = [f"  {last}"]
    with contextlib.suppress(OSError):
        story = staging.note_failure("\n".join([noise, *traceback.format_exception(error)]))
        lines.append(f"The whole story is in {story}.")
    if content:
        lines.append(
            "The source's files are at fault: another attempt would fail alike. Get them anew, or from who made them."
        )
    elif staging.exists():
        lines.append(
            f"What is done is kept in {staging.plan_folder}; the same command with --resume goes on from there."
        )
    return "\n".join(lines)
