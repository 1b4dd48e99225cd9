"""`weightbeam convert`: the conversion as a Beam pipeline."""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import time
from collections.abc import Sequence

import apache_beam as beam
from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions
from apache_beam.runners.runner import PipelineResult

from formats.orbax import Staging
from formats.storage import StorageError, local_path
from model_mappings.plan import Problem
from pipelines import report
from pipelines.cli import FailedError, RefusedError
from pipelines.options import pipeline_options, unknown_options
from pipelines.prepare import describe, prepare_conversion
from pipelines.progress import ShowProgress
from transforms.conversion import Conversion, load
from transforms.stages import WRITTEN, AssembleCheckpoint, Dequantize, ExpandUnits, ReadBoxes, Reshape, Stack, WriteChunks, unit_ranges


def build(pipeline: beam.Pipeline, conversion: Conversion, staging: Staging, overwrite: bool = False) -> beam.PCollection:
    """The graph."""
    return (
        pipeline
        | "Units" >> beam.Create(unit_ranges(len(conversion.units)))
        | ExpandUnits(staging, conversion.hash)
        | ReadBoxes()
        | Dequantize()
        | Reshape()
        | Stack()
        | WriteChunks(staging, conversion.options.format)
        | AssembleCheckpoint(staging, conversion.hash, overwrite)
    )


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Plans, stages and runs a conversion."""
    if unknown := unknown_options(rest):
        raise RefusedError(f"unknown options: {' '.join(unknown)}; see weightbeam convert --help")
    if not args.output:
        raise RefusedError("--output is missing: the folder that the checkpoint should lie in")
    conversion = prepare_conversion(args)
    try:
        staging = Staging(local_path(args.output), args.step)
    except StorageError as e:
        raise RefusedError(str(e)) from e
    problems = [*conversion.plan.problems, *_check_output(staging, conversion, args.resume, args.overwrite)]
    if problems:
        raise RefusedError(f"{len(problems)} problems:\n{describe(problems)}")
    if args.resume and staging.final.exists() and not staging.folder.exists():
        print(f"{staging.final} is finished already; nothing to do")
        return 0
    for warning in conversion.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    start = time.monotonic()
    execute(conversion, staging, pipeline_options(rest), args.overwrite)
    seconds = time.monotonic() - start
    print(
        f"{staging.final / 'items'}: {len(conversion.plan.arrays):,} arrays, {report.human(conversion.target_bytes)} "
        f"in {seconds:.1f} s ({report.human(conversion.target_bytes / max(seconds, 1e-9))}/s)"
    )
    if conversion.plan.dropped:
        print(f"{len(conversion.plan.dropped)} tensors left out on purpose; weightbeam plan says which and why")
    return 0


def execute(conversion: Conversion, staging: Staging, options: PipelineOptions, overwrite: bool = False) -> PipelineResult:
    """Stages the plan if it isn't yet, and runs the pipeline to its end.

    Raises:
      FailedError: the pipeline failed; what is done is kept.
    """
    logging.getLogger("apache_beam").setLevel(logging.ERROR)
    if overwrite and staging.folder.exists():
        shutil.rmtree(staging.folder)
    if not staging.plan.exists():
        shutil.rmtree(staging.folder, ignore_errors=True)  # stopped before anything was staged
        staging.create(conversion.stage())
    before = WRITTEN.total
    try:
        pipeline = beam.Pipeline(options=options)
        build(pipeline, conversion, staging, overwrite)
        with ShowProgress(conversion.target_bytes, lambda: WRITTEN.total - before):
            result = pipeline.run()
            result.wait_until_finish()
    except Exception as e:
        logging.getLogger("weightbeam").debug("the pipeline failed", exc_info=True)
        reason = str(e).strip().splitlines() or [type(e).__name__]
        raise FailedError(f"  {reason[-1]}\nWhat is done is kept in {staging.folder}; the same command with --resume goes on from there.") from e
    return result


def _check_output(staging: Staging, conversion: Conversion, resume: bool, overwrite: bool) -> list[Problem]:
    """What stands against writing there."""
    if staging.output.exists() and not staging.output.is_dir():
        return [Problem("output", str(staging.output), "is a file")]
    if staging.folder.exists() and not overwrite:
        if not resume:
            return [Problem("output", str(staging.folder), "holds a stopped conversion; go on with --resume, or start anew with --overwrite")]
        if staging.plan.exists() and (difference := _difference(load(staging.plan.read_bytes()), conversion)):
            return [Problem("output", str(staging.folder), f"holds a stopped conversion with another plan ({difference}); --overwrite starts anew")]
    elif staging.final.exists() and not overwrite and not resume:
        return [Problem("output", str(staging.final), "exists; --overwrite replaces it, --step writes another one beside it")]
    parent = next(folder for folder in (staging.output, *staging.output.parents) if folder.exists())
    free = shutil.disk_usage(parent).free
    if free < conversion.target_bytes:
        return [Problem("room", str(staging.output), f"needs {report.human(conversion.target_bytes)}, the disk has {report.human(free)} left")]
    return []


def _difference(staged: Conversion, wanted: Conversion) -> str:
    """What differs between two plans; empty if nothing does."""
    if staged.hash == wanted.hash:
        return ""
    options = [f"--{name} was {old}, is {new}" for name, old in vars(staged.options).items() if (new := vars(wanted.options)[name]) != old]
    return "; ".join(options) or "the source's files have changed"


def threads(options: PipelineOptions) -> int:
    """Threads of a local run."""
    return options.view_as(DirectOptions).direct_num_workers


if __name__ == "__main__":
    from pipelines.cli import main

    sys.exit(main(["convert", *sys.argv[1:]]))
