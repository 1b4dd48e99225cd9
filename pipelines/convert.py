"""`weightbeam convert`: the conversion as a Beam pipeline."""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import apache_beam as beam
from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions, StandardOptions
from apache_beam.runners.runner import PipelineResult

from formats import lease
from formats.encodings import ContentError
from formats.orbax import Staging, plan_of, publish
from formats.storage import StorageError, local_path, write_file
from model_mappings.plan import Problem
from pipelines import report
from pipelines.errors import FailedError, RefusedError
from pipelines.options import LOCAL_RUNNER, check_options, pipeline_options, threads_of
from pipelines.prepare import prepare_conversion, refuse
from pipelines.progress import ShowProgress, quiet
from transforms.conversion import Conversion, load, remember
from transforms.stages import WRITTEN, AssembleCheckpoint, Dequantize, ExpandUnits, ReadBoxes, Reshape, Stack, WriteChunks, unit_ranges


def build(pipeline: beam.Pipeline, conversion: Conversion, staging: Staging, overwrite: bool = False, budget: int | None = None) -> beam.PCollection:
    """The graph; `budget` bounds the bytes of the units that one process works on at a time."""
    return (
        pipeline
        | "Units" >> beam.Create(unit_ranges(len(conversion.units)))
        | ExpandUnits(staging, conversion.hash)
        | ReadBoxes(budget)
        | Dequantize()
        | Reshape()
        | Stack()
        | WriteChunks(staging, conversion.format)
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
        with _alone(staging):  # and takes away what a killed process left
            print(f"{staging.final} is finished already; nothing to do")
        return 0
    for warning in report.collapse(conversion.warnings):
        print(f"warning: {warning}", file=sys.stderr)
    start, before = time.monotonic(), WRITTEN.total
    with _alone(staging):
        refuse(conversion, _check_output(staging, conversion, args.resume, args.overwrite))  # again: now nobody else changes it
        execute(conversion, staging, pipeline_options(rest), args.resume, args.overwrite)
    if plan_of(staging.final) != conversion.hash:
        raise FailedError(f"  the pipeline ended, but {staging.final} isn't its result")
    seconds, written = time.monotonic() - start, WRITTEN.total - before
    size = report.human(conversion.target_bytes)
    rate = f" ({report.human(written / seconds)}/s)" if written else ""
    print(f"{staging.final / 'items'}: {len(conversion.plan.arrays):,} arrays, {size} in {seconds:.1f} s{rate}")
    if conversion.plan.dropped:
        print(f"{report.count(len(conversion.plan.dropped), 'tensor')} left out on purpose; weightbeam plan says which and why")
    return 0


@contextlib.contextmanager
def _alone(staging: Staging) -> Iterator[None]:
    """Keeps other conversions out of this output."""
    with contextlib.ExitStack() as stack:
        try:
            staging.output.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lease.hold(staging.lease))
        except lease.HeldError as e:
            raise RefusedError(f"  output: {staging.folder}: {e}") from e
        except OSError as e:
            raise RefusedError(f"  output: {staging.output}: {e.strerror or e}") from e
        try:
            yield
        finally:
            stack.close()
            with contextlib.suppress(OSError):  # it isn't empty, unless nothing came of it
                staging.output.rmdir()


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
      FailedError: it failed on the way; what is done is kept.
    """
    try:
        pipeline = beam.Pipeline(options=options)
    except ValueError as e:
        raise RefusedError(str(e)) from e
    noise = io.StringIO()
    try:
        if resume and plan_of(staging.folder) == conversion.hash:
            publish(staging, overwrite)
            return None
        if resume and staging.plan.exists():
            write_file(staging.plan, conversion.stage())  # the same plan, but the source may have moved
        else:
            shutil.rmtree(staging.folder, ignore_errors=True)
            staging.create(conversion.stage())
        remember(conversion)
        left = int(conversion.target_bytes * _share_left(staging, conversion))
        build(pipeline, conversion, staging, overwrite, threads_of(options) * conversion.options.unit_bytes)
        with ShowProgress(left, _written(conversion, staging, left, options)), quiet(noise):
            result = pipeline.run()
            result.wait_until_finish()
        return result
    except Exception as e:
        raise FailedError(_failure(e, staging, noise.getvalue())) from e


def _share_left(staging: Staging, conversion: Conversion) -> float:
    """The share of the units that are still to do."""
    return 1 - len(staging.done()) / max(1, len(conversion.units))


def _written(conversion: Conversion, staging: Staging, left: int, options: PipelineOptions) -> Callable[[], int]:
    """How to know the bytes written of those that were left: by a counter where the workers are threads, else by the ledger."""
    threads = options.view_as(DirectOptions).direct_running_mode != "multi_processing"
    if options.view_as(StandardOptions).runner == LOCAL_RUNNER and threads:
        before = WRITTEN.total
        return lambda: WRITTEN.total - before
    return lambda: left - int(conversion.target_bytes * _share_left(staging, conversion)) if staging.units.exists() else left


def _failure(error: Exception, staging: Staging, noise: str) -> str:
    """What to tell of a failure; the rest goes into a file beside the units."""
    last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    content = isinstance(error, ContentError) or any(f"{kind.__name__}: " in last for kind in ContentError.__subclasses__())
    lines = [f"  {last}"]
    with contextlib.suppress(OSError):
        staging.failure.write_text(f"{noise}\n{error}")
        lines.append(f"The whole story is in {staging.failure}.")
    if content:
        lines.append("The source's files are at fault: another attempt would fail alike. Get them anew, or from who made them.")
    elif staging.folder.exists():
        lines.append(f"What is done is kept in {staging.folder}; the same command with --resume goes on from there.")
    return "\n".join(lines)


def _check_output(staging: Staging, conversion: Conversion, resume: bool, overwrite: bool) -> list[Problem]:
    """What stands against writing there."""

    def problem(path: Path, message: str) -> list[Problem]:
        return [Problem("output", str(path), message)]

    if staging.output.exists() and not staging.output.is_dir():
        return problem(staging.output, "is a file")
    if staging.folder.exists() and not resume and not overwrite:
        return problem(staging.folder, "holds a stopped conversion; go on with --resume, or start anew with --overwrite")
    if staging.folder.exists() and resume and (differs := _difference(staging, conversion)):
        return problem(staging.folder, f"holds a stopped conversion with another plan ({differs}); --overwrite without --resume starts anew")
    if staging.final.exists() and not overwrite:
        if not resume:
            return problem(staging.final, "exists; --overwrite replaces it, --step writes another one beside it")
        if staging.folder.exists():
            return problem(staging.final, "exists beside a stopped conversion; --resume --overwrite goes on with that and replaces it at the end")
        if plan_of(staging.final) != conversion.hash:
            return problem(staging.final, "exists, and was made with other options or of another source; --overwrite replaces it")
    parent = next(folder for folder in (staging.output, *staging.output.parents) if folder.exists())
    if resume and conversion.hash in (plan_of(staging.folder), plan_of(staging.final)):
        return []
    needed = int(conversion.target_bytes * (_share_left(staging, conversion) if resume else 1))
    free = shutil.disk_usage(parent).free
    if free < needed:
        return problem(staging.output, f"needs {report.human(needed)}, the disk has {report.human(free)} left")
    return []


def _difference(staging: Staging, wanted: Conversion) -> str:
    """What differs between the plan that is staged and the one that is wanted; empty if nothing does."""
    if not staging.plan.exists():
        return "it is complete but for its name" if plan_of(staging.folder) not in (None, wanted.hash) else ""
    try:
        staged = load(staging.plan.read_bytes())
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, TypeError, zlib.error):
        return "it was staged by another version of Weightbeam, or is damaged"
    if staged.hash == wanted.hash:
        inodes = {shard.path: shard.inode for shard in staged.checkpoint.shards}  # not in the hash: the source may have moved, times and all
        replaced = any(inodes.get(shard.path, shard.inode) != shard.inode for shard in wanted.checkpoint.shards)
        return "the source's files have changed" if replaced else ""
    options = vars(wanted.options)
    changed = [f"--{name} was {_shown(old)}, is {_shown(options[name])}" for name, old in vars(staged.options).items() if options[name] != old]
    return "; ".join(changed) or "the source's files have changed"


def _shown(option: object) -> str:
    """An option's value as the user would write it."""
    values = option if isinstance(option, tuple) else (option,)
    if values and isinstance(values[0], tuple):
        return f"a file of {len(values)} rules"
    return " and ".join("not given" if value is None else str(value) for value in values) or "not given"


if __name__ == "__main__":
    from pipelines.cli import main

    sys.exit(main(["convert", *sys.argv[1:]]))
