"""What an output must be before it is written: free, or holding what was asked to be resumed or replaced; with room; and one's own."""

from __future__ import annotations

import contextlib
import shutil
import zlib
from collections.abc import Iterator

from weightbeam.formats.lease import HeldError
from weightbeam.formats.links import COPY
from weightbeam.formats.orbax import plan_of
from weightbeam.formats.staging import BucketStaging, FolderStaging, Staging
from weightbeam.formats.storage import Store, reason
from weightbeam.model_mappings.plan import Problem
from weightbeam.pipelines.errors import BusyError, RefusedError
from weightbeam.pipelines.tables import human
from weightbeam.transforms.conversion import Conversion
from weightbeam.transforms.staged import load


@contextlib.contextmanager
def alone(staging: Staging) -> Iterator[None]:
    """Context manager: keeps other conversions out of an output, which is made if it isn't there.

    Raises:
      BusyError: another conversion is at work there.
      RefusedError: nothing can be written there.
    """
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


def check_output(staging: Staging, conversion: Conversion, resume: bool, overwrite: bool, link: str) -> list[Problem]:
    """What stands against writing a conversion there, the place's own refusals among it.

    Args:
      staging: where.
      conversion: what.
      resume: go on with what is staged there.
      overwrite: replace a checkpoint that has the same place.
      link: how the source's files get into a virtual checkpoint.
    """
    try:
        return _find_problems(staging, conversion, resume, overwrite, link)
    except OSError as e:
        return [Problem("output", str(staging.output), reason(e))]


def _find_problems(staging: Staging, conversion: Conversion, resume: bool, overwrite: bool, link: str) -> list[Problem]:
    """What lies there already, and whether there is room."""

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
    return _check_room(staging, conversion, resume, link) if isinstance(staging, FolderStaging) else []


def _check_room(staging: FolderStaging, conversion: Conversion, resume: bool, link: str) -> list[Problem]:
    """Whether the disk has room for what is left to write."""
    needed = int(conversion.made_bytes * (share_left(staging, conversion) if resume else 1))
    if conversion.virtual_bytes and link == COPY:
        needed += sum(shard.size for shard in conversion.checkpoint.shards)
    output = staging.output.folder
    free = shutil.disk_usage(next(folder for folder in (output, *output.parents) if folder.exists())).free
    if free < needed:
        return [Problem("output", str(output), f"needs {human(needed)}, the disk has {human(free)} left")]
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
