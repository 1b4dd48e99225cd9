"""`weightbeam convert`: from the command line to a published checkpoint."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from weightbeam.formats.links import LinkError
from weightbeam.formats.orbax import plan_of, publish
from weightbeam.formats.printable import printable
from weightbeam.formats.staging import ITEMS, BucketStaging, FolderStaging, Staging, staging_at
from weightbeam.formats.storage import StorageError
from weightbeam.pipelines import report
from weightbeam.pipelines.errors import FailedError, RefusedError
from weightbeam.pipelines.output import alone, check_output
from weightbeam.pipelines.prepare import prepare_conversion, refuse
from weightbeam.transforms.assembly import assemble_checkpoint, stage
from weightbeam.transforms.conversion import Conversion


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Plans, stages and runs a conversion."""
    if rest:
        from weightbeam.pipelines.options import check_options  # imports Beam

        check_options(rest, args)
    if not args.output:
        raise RefusedError("--output is missing: the folder that the checkpoint should lie in")
    return convert(prepare_conversion(args), args, rest)


def convert(conversion: Conversion, args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Carries a planned conversion out, or refuses to, and says what came of it."""
    try:
        staging = staging_at(args.output, args.step, conversion.hash)
    except StorageError as e:
        raise RefusedError(f"--output={e}") from e
    refuse(conversion, [*conversion.plan.problems, *check_output(staging, conversion, args.resume, args.overwrite, args.link)])
    refuse(conversion, conversion.unreadable())
    if args.resume and not staging.exists() and plan_of(staging.final) == conversion.hash:
        with alone(staging):  # and takes away what a killed process left
            print(f"{staging.final} is finished already; nothing to do")
        return 0
    for warning in report.collapse(conversion.warnings):
        print(printable(f"warning: {warning}"), file=sys.stderr)
    start, written = time.monotonic(), 0
    with alone(staging):
        if isinstance(staging, BucketStaging) and staging.exists():
            from weightbeam.pipelines.execution import check_job

            check_job(staging, rest)
        refuse(conversion, check_output(staging, conversion, args.resume, args.overwrite, args.link))  # again: now nobody else changes it
        if conversion.units:
            from weightbeam.pipelines.execution import run_units  # only now: it imports Beam

            if (written := run_units(conversion, staging, rest, args)) is None:
                return 0  # the job that was started publishes it
        else:
            _publish_index(conversion, staging, args)
    if plan_of(staging.final) != conversion.hash:
        raise FailedError(f"  the pipeline ended, but {staging.final} isn't its result")
    seconds = time.monotonic() - start
    size = report.human(conversion.target_bytes)
    rate = f" ({report.human(written / seconds)}/s)" if written else ""
    print(f"{staging.final / ITEMS}: {len(conversion.plan.arrays):,} arrays, {size} in {seconds:.1f} s{rate}")
    if conversion.virtual_bytes:
        how = f"--link {args.link}" if isinstance(staging, FolderStaging) else "copied into the bucket"
        print(f"{report.human(conversion.virtual_bytes)} of it are the source's own files ({how}); docs/virtual.md says what that means")
    if conversion.plan.dropped:
        print(f"{report.count(len(conversion.plan.dropped), 'tensor')} left out on purpose; weightbeam plan says which and why")
    return 0


def _publish_index(conversion: Conversion, staging: Staging, args: argparse.Namespace) -> None:
    """A conversion without units: every array is virtual, and a pipeline would have nothing to do."""
    try:
        if stage(conversion, staging, args.resume, args.link, args.sha256):
            assemble_checkpoint(conversion, staging, args.overwrite)
        else:
            publish(staging, args.overwrite)
    except LinkError as e:
        raise RefusedError(f"  link: {e}") from e
    except (OSError, ValueError) as e:
        raise FailedError(f"  {e}") from e


if __name__ == "__main__":
    from weightbeam.pipelines.cli import main

    sys.exit(main(["convert", *sys.argv[1:]]))
