"""`weightbeam convert`: the conversion as a Beam pipeline."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.runner import PipelineResult

from formats.orbax import Staging, assemble, plan_of
from formats.storage import StorageError, local_path, write_file
from model_mappings.plan import Problem
from pipelines import report
from pipelines.errors import FailedError, RefusedError
from pipelines.options import check_options, pipeline_options
from pipelines.prepare import prepare_conversion, refuse
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
    check_options(rest)
    if not args.output:
        raise RefusedError("--output is missing: the folder that the checkpoint should lie in")
    conversion = prepare_conversion(args)
    try:
        staging = Staging(local_path(args.output), args.step)
    except StorageError as e:
        raise RefusedError(f"--output={e}") from e
    refuse(conversion, [*conversion.plan.problems, *_check_output(staging, conversion, args.resume, args.overwrite)])
    if args.resume and not staging.folder.exists() and plan_of(staging.final) == conversion.hash:
        print(f"{staging.final} is finished already; nothing to do")
        return 0
    for warning in report.collapse(conversion.warnings):
        print(f"warning: {warning}", file=sys.stderr)
    start = time.monotonic()
    execute(conversion, staging, pipeline_options(rest), args.resume, args.overwrite)
    seconds = time.monotonic() - start
    print(
        f"{staging.final / 'items'}: {len(conversion.plan.arrays):,} arrays, {report.human(conversion.target_bytes)} "
        f"in {seconds:.1f} s ({report.human(conversion.target_bytes / max(seconds, 1e-9))}/s)"
    )
    if conversion.plan.dropped:
        print(f"{report.count(len(conversion.plan.dropped), 'tensor')} left out on purpose; weightbeam plan says which and why")
    return 0


def execute(conversion: Conversion, staging: Staging, options: PipelineOptions, resume: bool = False, overwrite: bool = False) -> PipelineResult | None:
    """Stages the plan and runs the pipeline to its end.

    Args:
      conversion: what to do; its plan has no problems.
      staging: where.
      options: Beam's options.
      resume: go on with what is staged there.
      overwrite: replace a checkpoint that has the same place.

    Returns:
      The pipeline's result; None where only publishing was left to do.

    Raises:
      RefusedError: no such runner.
      FailedError: the pipeline failed; what is done is kept.
    """
    try:
        pipeline = beam.Pipeline(options=options)
    except ValueError as e:
        raise RefusedError(str(e)) from e
    if resume and plan_of(staging.folder) == conversion.hash:
        assemble(staging, [], conversion.options.format, 0, {}, overwrite)
        return None
    if resume and staging.plan.exists():
        write_file(staging.plan, conversion.stage())  # the same plan, but the source may have moved
    else:
        shutil.rmtree(staging.folder, ignore_errors=True)
        staging.create(conversion.stage())
    before = WRITTEN.total
    logging.getLogger().setLevel(logging.CRITICAL)
    noise = io.StringIO()  # on a failure Beam logs and prints hundreds of lines
    try:
        build(pipeline, conversion, staging, overwrite)
        with ShowProgress(conversion.target_bytes, lambda: WRITTEN.total - before), contextlib.redirect_stderr(noise):
            result = pipeline.run()
            result.wait_until_finish()
    except Exception as e:
        reason = str(e).strip().splitlines() or [type(e).__name__]
        with contextlib.suppress(OSError):
            staging.failure.write_text(f"{noise.getvalue()}\n{e}")
        raise FailedError(
            f"  {reason[-1]}\nThe whole story is in {staging.failure}.\n"
            f"What is done is kept in {staging.folder}; the same command with --resume goes on from there."
        ) from e
    return result


def _check_output(staging: Staging, conversion: Conversion, resume: bool, overwrite: bool) -> list[Problem]:
    """What stands against writing there."""

    def problem(path: Path, message: str) -> list[Problem]:
        return [Problem("output", str(path), message)]

    if staging.output.exists() and not staging.output.is_dir():
        return problem(staging.output, "is a file")
    if staging.folder.exists() and not resume and not overwrite:
        return problem(staging.folder, "holds a stopped conversion; go on with --resume, or start anew with --overwrite")
    if staging.folder.exists() and resume and staging.plan.exists() and (differs := _difference(load(staging.plan.read_bytes()), conversion)):
        return problem(staging.folder, f"holds a stopped conversion with another plan ({differs}); --overwrite without --resume starts anew")
    if staging.final.exists() and not overwrite:
        if not resume:
            return problem(staging.final, "exists; --overwrite replaces it, --step writes another one beside it")
        if staging.folder.exists():
            return problem(staging.final, "exists beside a stopped conversion; --resume --overwrite goes on with that and replaces it at the end")
        if plan_of(staging.final) != conversion.hash:
            return problem(staging.final, "exists, and was made with other options or of another source; --overwrite replaces it")
    parent = next(folder for folder in (staging.output, *staging.output.parents) if folder.exists())
    missing = 1 - len(staging.done()) / max(1, len(conversion.units)) if resume else 1
    needed, free = int(conversion.target_bytes * missing), shutil.disk_usage(parent).free
    if free < needed:
        return problem(staging.output, f"needs {report.human(needed)}, the disk has {report.human(free)} left")
    return []


def _difference(staged: Conversion, wanted: Conversion) -> str:
    """What differs between two plans; empty if nothing does."""
    if staged.hash == wanted.hash:
        return ""
    options = vars(wanted.options)
    changed = [f"--{name} was {_shown(old)}, is {_shown(options[name])}" for name, old in vars(staged.options).items() if options[name] != old]
    return "; ".join(changed) or "the source's files have changed"


def _shown(option: object) -> str:
    """An option's value as the user would write it."""
    values = option if isinstance(option, tuple) else (option,)
    return " and ".join("not given" if value is None else str(value) for value in values) or "not given"


if __name__ == "__main__":
    from pipelines.cli import main

    sys.exit(main(["convert", *sys.argv[1:]]))
