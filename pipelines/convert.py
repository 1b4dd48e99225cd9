"""`weightbeam convert`: from the command line to a published checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import time
import zlib
from collections.abc import Iterator, Sequence

from weightbeam.formats.lease import HeldError
from weightbeam.formats.links import COPY, LinkError
from weightbeam.formats.orbax import plan_of, publish
from weightbeam.formats.staging import ITEMS, BucketStaging, FolderStaging, Staging, staging_at
from weightbeam.formats.storage import StorageError, Store, reason
from weightbeam.model_mappings.plan import Problem
from weightbeam.pipelines import report
from weightbeam.pipelines.errors import BusyError, FailedError, RefusedError
from weightbeam.pipelines.prepare import prepare_conversion, refuse
from weightbeam.transforms.assembly import assemble_checkpoint, stage
from weightbeam.transforms.conversion import Conversion, load


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
    refuse(conversion, [*conversion.plan.problems, *_check_output(staging, conversion, args)])
    refuse(conversion, conversion.checkpoint.unreadable())
    if args.resume and not staging.exists() and plan_of(staging.final) == conversion.hash:
        with _alone(staging):  # and takes away what a killed process left
            print(f"{staging.final} is finished already; nothing to do")
        return 0
    for warning in report.collapse(conversion.warnings):
        print(f"warning: {warning}", file=sys.stderr)
    start, written = time.monotonic(), 0
    with _alone(staging):
        if isinstance(staging, BucketStaging) and staging.exists():
            from weightbeam.pipelines.execution import check_job

            check_job(staging, rest)
        refuse(conversion, _check_output(staging, conversion, args))  # again: now nobody else changes it
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


@contextlib.contextmanager
def _alone(staging: Staging) -> Iterator[None]:
    """Keeps other conversions out of this output."""
    with contextlib.ExitStack() as stack:
        try:
            staging.output.make()
            stack.callback(staging.output.unmake)
            staging.output.check_writable()
            stack.enter_context(staging.hold())
        except HeldError as e:
            raise BusyError(f"  output: {staging.work}: {e}") from e
        except OSError as e:
            raise RefusedError(f"  output: {staging.output}: {reason(e)}") from e
        yield


def share_left(staging: Staging, conversion: Conversion) -> float:
    """The share of the units that are still to do."""
    return 1 - len(staging.done()) / max(1, len(conversion.units))


def _check_output(staging: Staging, conversion: Conversion, args: argparse.Namespace) -> list[Problem]:
    """What stands against writing there, the place's own refusals among it."""
    try:
        return _find_problems(staging, conversion, args)
    except OSError as e:
        return [Problem("output", str(staging.output), reason(e))]


def _find_problems(staging: Staging, conversion: Conversion, args: argparse.Namespace) -> list[Problem]:
    """What lies there already, and whether there is room."""
    resume, overwrite = args.resume, args.overwrite

    def problem(place: Store, message: str) -> list[Problem]:
        return [Problem("output", str(place), message)]

    if isinstance(staging, FolderStaging) and staging.output.folder.exists() and not staging.output.folder.is_dir():
        return problem(staging.output, "is a file")
    if isinstance(staging, BucketStaging) and f"{conversion.checkpoint.root}/".startswith(f"{staging.final}/"):
        return problem(staging.final, "holds the source, and would be deleted first, since a bucket has no renames; choose another --output or --step")
    if (stopped := staging.exists()) and not resume and not overwrite:
        return problem(staging.work, "holds a stopped conversion; go on with --resume, or start anew with --overwrite")
    if stopped and resume and (differs := _difference(staging, conversion)):
        return problem(staging.work, f"holds a stopped conversion with another plan ({differs}); --overwrite without --resume starts anew")
    published = plan_of(staging.final)
    if staging.is_taken() and not overwrite:
        if not resume:
            return problem(staging.final, "exists; --overwrite replaces it, --step writes another one beside it")
        if stopped:
            return problem(staging.final, "exists beside a stopped conversion; --resume --overwrite goes on with that and replaces it at the end")
        if published != conversion.hash:
            return problem(staging.final, "exists, and was made with other options or of another source; --overwrite replaces it")
    if resume and conversion.hash in (plan_of(staging.checkpoint), published):
        return []
    return _check_room(staging, conversion, args) if isinstance(staging, FolderStaging) else []


def _check_room(staging: FolderStaging, conversion: Conversion, args: argparse.Namespace) -> list[Problem]:
    """Whether the disk has room for what is left to write."""
    needed = int(conversion.made_bytes * (share_left(staging, conversion) if args.resume else 1))
    if conversion.virtual_bytes and args.link == COPY:
        needed += sum(shard.size for shard in conversion.checkpoint.shards)
    output = staging.output.folder
    free = shutil.disk_usage(next(folder for folder in (output, *output.parents) if folder.exists())).free
    if free < needed:
        return [Problem("output", str(output), f"needs {report.human(needed)}, the disk has {report.human(free)} left")]
    return []


def _difference(staging: Staging, wanted: Conversion) -> str:
    """What differs between the plan that is staged and the one that is wanted; empty if nothing does."""
    if not staging.is_staged():
        return "it is complete but for its name" if plan_of(staging.checkpoint) not in (None, wanted.hash) else ""
    try:
        staged = load(staging.read_plan())
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
    from weightbeam.pipelines.cli import main

    sys.exit(main(["convert", *sys.argv[1:]]))
