"""A transfer as a Beam pipeline: the graph, and running it to its end."""

from __future__ import annotations

import contextlib
import io
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import apache_beam as beam

from weightbeam.formats.encodings import ContentError
from weightbeam.formats.staging import Staging
from weightbeam.formats.staging.links import LinkError
from weightbeam.formats.storage.identity import ANEW
from weightbeam.formats.storage.token import secret
from weightbeam.model_mappings.plan import Problem
from weightbeam.pipelines.running.beam_options import make_pipeline, pipeline_options
from weightbeam.pipelines.running.output import AGAIN
from weightbeam.pipelines.running.runners.failure import OUR_KIND, last_words
from weightbeam.pipelines.running.runners.runner import Job
from weightbeam.pipelines.running.runners.table import runner_of
from weightbeam.pipelines.running.stopping import stopping
from weightbeam.pipelines.running.without_beam import threads_of
from weightbeam.pipelines.terminal.errors import Failed, Refused, refusing
from weightbeam.pipelines.terminal.notebook import as_in_a_script
from weightbeam.pipelines.terminal.progress import Report
from weightbeam.transforms.execution.overlap import overlaps, units_at_a_time
from weightbeam.transforms.planning.options import Delivery
from weightbeam.transforms.planning.transfer import Transfer
from weightbeam.transforms.stages.assembly import stage
from weightbeam.transforms.stages.chain import (
    WRITTEN,
    AssembleCheckpoint,
    CompareRows,
    Dequantize,
    ExpandUnits,
    ReadBoxes,
    ReplaceWith,
    Reshape,
    Stack,
    UnpackChunks,
    WriteChunks,
)
from weightbeam.transforms.stages.handshake import GREETINGS, GreetWorkers
from weightbeam.transforms.stages.staged import AtWork, remember


def build(
    pipeline: beam.Pipeline,
    planned: Transfer,
    staging: Staging,
    overwrite: bool = False,
    budget: int | None = None,
    greeted: bool = False,
    compared_with: Sequence[str] = (),
) -> beam.PCollection:
    """The graph.

    Args:
      pipeline: gets the stages.
      planned: what to do.
      staging: where.
      overwrite: replace what has the same place.
      budget: bounds the bytes of the units that one process works on at a time.
      greeted: begin with a handshake: the workers aren't this process.
      compared_with: releases that the rows of a new one are compared with before they are written.
    """
    at_work = AtWork(staging, planned.hash, secret())
    units, chunks = len(planned.units), len(planned.chunks)
    overlapping = overlaps(*planned.places, staging.output.url)
    if greeted:
        counted = pipeline | "Greetings" >> beam.Create(range(GREETINGS)) | GreetWorkers(at_work)
        counted = counted | "Count" >> ReplaceWith(chunks or units)
    else:
        counted = pipeline | ("Chunks" if chunks else "Units") >> beam.Create([chunks or units])
    if chunks:
        counted = counted | UnpackChunks(at_work, units)
    made = counted | ExpandUnits(at_work) | ReadBoxes(at_work, budget, overlapping) | Dequantize() | Reshape() | Stack()
    if compared_with:
        made = made | CompareRows(tuple(compared_with), at_work.secret)
    return made | WriteChunks(at_work, overlapping) | AssembleCheckpoint(at_work, overwrite)


def run_units(
    planned: Transfer,
    staging: Staging,
    rest: Sequence[str],
    ours: Mapping[str, Any],
    how: Delivery,
    report: Report | None,
) -> int | None:
    """Stages the plan and runs the pipeline, to its end unless told otherwise.

    Args:
      planned: what to do; its plan has no problems.
      staging: where.
      rest: Beam's options.
      ours: the command's own options, for who looks at the job.
      how: what changes no byte.
      report: is told how far it has come.

    Returns:
      The bytes that this process wrote, 0 where only publishing was left to do; None where a job goes on without it.

    Raises:
      Refused: no such runner, a job is at work there, or the source's files can't be linked.
      Failed: it failed on the way; what is done is kept.
    """
    options, before = pipeline_options(rest, ours), WRITTEN.total
    runner = runner_of(options)
    runner.settle(options, planned, str(staging.final), len(how.compared_with))
    threads = threads_of(options.get_all_options(drop_default=True))
    at_a_time = units_at_a_time(threads, overlaps(*planned.places, staging.output.url))
    with refusing(ValueError):
        pipeline = make_pipeline(options, at_a_time * planned.unit_working_bytes)
    noise = io.StringIO()
    try:
        if not stage(planned, staging, how):
            with stopping(staging, planned.hash):
                staging.publish(how.overwrite)
            return 0
        remember(planned)
        left, begun = planned.made_bytes - staging.ledger.bytes_done(), len(staging.ledger.done())
        with as_in_a_script():
            budget = at_a_time * planned.unit_bytes
            build(pipeline, planned, staging, how.overwrite, budget, runner.greets, how.compared_with)
            runner.run(pipeline, Job(planned, staging, left, begun, noise, report))
    except LinkError as e:
        raise Refused(Problem("link", "", str(e))) from e
    except Exception as e:
        raise Failed(_failure(e, staging, noise.getvalue())) from e
    return WRITTEN.total - before if runner.waits(options) else None


def _failure(error: Exception, staging: Staging, noise: str) -> str:
    """What to tell of a failure; the rest goes into a file beside the units."""
    last = last_words(error)
    content = isinstance(error, ContentError) or any(
        f"{kind.__name__}: " in last for kind in ContentError.__subclasses__()
    )
    lines = [f"  {OUR_KIND.sub('', last)}"]
    with contextlib.suppress(OSError):
        story = staging.note_failure("\n".join([noise, *traceback.format_exception(error)]))
        lines.append(f"The whole story is in {story}.")
    if content:
        lines.append(
            "The source's files are at fault: another attempt would fail alike. Get them anew, or from who made them."
        )
    elif staging.exists() and ANEW not in last:  # else --resume would refuse
        lines.append(f"What is done is kept in {staging.plan_folder}; {AGAIN}.")
    return "\n".join(lines)
