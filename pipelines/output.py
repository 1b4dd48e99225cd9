"""What an output must be before it is written: free, or holding what was asked to be resumed or replaced; fit, with
room; and one's own.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from weightbeam.formats.identity import Watched
from weightbeam.formats.lease import HeldError
from weightbeam.formats.links import COPY
from weightbeam.formats.orbax import find_damage, is_checkpoint, others_in, plan_hash_of
from weightbeam.formats.staging import JOB, BucketStaging, FolderStaging, Staging, staging_at
from weightbeam.formats.storage import LocalFolder, Store, open_store, reason
from weightbeam.formats.zarr import ArraySpec, Format
from weightbeam.model_mappings.plan import Plan, Problem
from weightbeam.pipelines.errors import BusyError, RefusedError
from weightbeam.pipelines.tables import human
from weightbeam.transforms.movement import Movement
from weightbeam.transforms.options import Delivery, hashed
from weightbeam.transforms.staged import load, made_by


class Resumable(Protocol):
    """What of a plan tells whether a later command may go on with it."""

    @property
    def kind(self) -> str: ...

    @property
    def hash(self) -> str: ...

    @property
    def options(self) -> Any:
        """The user's; a dataclass."""
        ...

    @property
    def small_hashes(self) -> Mapping[str, str]:
        """What tells the content of each small file of the result, by name."""
        ...

    @property
    def sources(self) -> Sequence[Watched]:
        """All whose values are read."""
        ...

    def was_touched(self, since: Any) -> bool:
        """Whether the source changed since a plan with the same hash was made."""
        ...


class CheckpointPlan(Movement, Resumable, Protocol):
    """A plan whose result is an Orbax checkpoint: of a conversion, or of a reshard."""

    @property
    def plan(self) -> Plan:
        """The arrays, and what stands against it."""
        ...

    def unreadable(self) -> list[Problem]:
        """What of the source can't be read to its end."""
        ...

    @property
    def specs(self) -> Sequence[ArraySpec]:
        """Every array as it is stored."""
        ...

    @property
    def format(self) -> Format: ...

    @property
    def inputs(self) -> Sequence[str]:
        """URLs of all that the checkpoint is made of."""
        ...

    @property
    def linked_bytes(self) -> int:
        """Bytes of the source's files that become part of the checkpoint."""
        ...


KEPT = "what is done is kept, the same command with --resume goes on from there"
ANOTHER = "choose another --output or --step"


@contextlib.contextmanager
def alone(staging: Staging, look: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Context manager: keeps other conversions out of an output, which is made if it isn't there.

    Args:
      staging: what one wants to write.
      look: raises if something is at work there that has no lease (`Staging.hold`).

    Raises:
      BusyError: another conversion is at work there.
      RefusedError: nothing can be written there.
      KeyboardInterrupt: as it came, and says what is kept, if anything is.
    """
    with contextlib.ExitStack() as stack:
        try:
            staging.output.make()
            stack.callback(staging.output.unmake)
            staging.output.check_writable()
            stack.enter_context(staging.hold(look))
        except HeldError as e:
            raise BusyError(f"  output: {staging.final}: {e}") from e
        except OSError as e:
            raise RefusedError(f"  output: {staging.output}: {reason(e)}") from e
        try:
            yield
        except KeyboardInterrupt as e:
            if e.args:  # what it says is known better where it comes from
                raise
            with contextlib.suppress(OSError):
                if staging.exists():
                    raise KeyboardInterrupt(KEPT) from e
            raise


def look_for_job(staging: Staging, beam: Sequence[str]) -> Callable[[], None]:
    """What `alone` should look at: whether a job of a command before this one, which is noted beside the plan, is still
    at work.
    """

    def look() -> None:
        if staging.exists() and staging.plan_folder.exists(JOB):
            from weightbeam.pipelines.execution import check_job  # only now: it imports Beam

            check_job(staging, beam)

    return look


def bring_back(output: str) -> None:
    """Puts a checkpoint back that was on its way out when its successor died: where the file system can't swap, there
    is none meanwhile.

    Raises:
      BusyError: its successor lives.
      RefusedError: nothing can be written there.
    """
    store = open_store(output)
    if isinstance(store, LocalFolder) and store.folder.is_dir():
        for step in {
            found[1] for name in store.entries() if (found := re.fullmatch(r"(\d+)\.replaced-[0-9a-f]+", name))
        }:
            if not os.path.lexists(store / step):
                with alone(staging_at(store, int(step))):
                    pass


def check_output(staging: Staging, conversion: CheckpointPlan, how: Delivery) -> list[Problem]:
    """What stands against writing a conversion there, the place's own refusals among it.

    Args:
      staging: where.
      conversion: what.
      how: what may be gone on with or replaced there.

    Raises:
      BusyError: another conversion is at work there.
    """
    try:
        if unfit := _find_unfit(staging):
            return unfit
        staging.check_free()
        return _find_problems(staging, conversion, how)
    except HeldError as e:
        raise BusyError(f"  output: {staging.final}: {e}") from e
    except OSError as e:
        return [Problem("output", str(staging.output), reason(e).removeprefix(f"{staging.final}: "))]


def is_finished(staging: Staging, conversion: CheckpointPlan) -> bool:
    """Whether the very checkpoint that is wanted is published, and nothing is staged beside it."""
    return not staging.exists() and plan_hash_of(staging.final) == conversion.hash


def problem_at(place: Store, message: str) -> list[Problem]:
    """What stands against writing there."""
    return [Problem("output", str(place), message)]


def _find_unfit(staging: Staging) -> list[Problem]:
    """Whether a checkpoint can lie there at all. Raises StorageError where TensorStore can't write."""
    if not isinstance(staging, FolderStaging):
        return []
    if staging.output.folder.exists() and not staging.output.folder.is_dir():
        return problem_at(staging.output, "is a file")
    staging.final.kvstore()
    return []


def _find_problems(staging: Staging, conversion: CheckpointPlan, how: Delivery) -> list[Problem]:
    """What lies there already, and whether there is room: the first that is found, in the order of the steps."""
    if how.resume and is_finished(staging, conversion):
        return _check_finished(staging, conversion)
    if problems := _check_inputs(staging, conversion, how):
        return problems
    stopped = staging.exists()
    return (
        (_check_stopped(staging, conversion, how) if stopped else [])
        or (_check_there(staging, how, stopped) if staging.is_taken() else [])
        or _check_room(staging, conversion, how)
    )


def _check_finished(staging: Staging, conversion: CheckpointPlan) -> list[Problem]:
    """Whether the checkpoint that is wanted, and is there, is whole."""
    if damage := find_damage(staging.final, conversion.specs, conversion.format):
        why = f"is finished, but damaged ({damage}); --overwrite without --resume makes it anew"
        return problem_at(staging.final, why)
    return []


def _check_inputs(staging: Staging, conversion: CheckpointPlan, how: Delivery) -> list[Problem]:
    """Whether what the checkpoint is made of lies elsewhere, or may be part of what is replaced."""
    swaps = how.in_place and isinstance(staging, FolderStaging)  # a bucket can't swap
    if (source := _find_source(staging, conversion)) and not swaps:
        why = f"holds the source, or what it consists of ({source}), and would be deleted; {ANOTHER}"
        return problem_at(staging.final, why)
    if own := next((url for url in conversion.inputs if _is_same(url, staging.output.url)), None):
        return problem_at(staging.final, f"would lie among the files of {own}, which it is made of; {ANOTHER}")
    return []


def _check_stopped(staging: Staging, conversion: CheckpointPlan, how: Delivery) -> list[Problem]:
    """Whether it was said what to do with what a stopped command staged, and that can be done."""
    if how.resume:
        why = why_not_go_on(staging, conversion)
    else:
        todo = "go on with --resume, or start anew with --overwrite"
        why = "" if how.overwrite else f"holds a stopped conversion; {todo}"
    return problem_at(staging.plan_folder, why) if why else []


def _check_there(staging: Staging, how: Delivery, stopped: bool) -> list[Problem]:
    """Whether what lies in the checkpoint's place can be replaced, and should be."""
    if why := _why_not_replace(staging):
        return problem_at(staging.final, why)
    if how.overwrite:
        return []
    if not how.resume:
        why = "exists; --overwrite replaces it, --step writes another one beside it"
    elif stopped:
        why = "exists beside a stopped conversion; --resume --overwrite goes on with that and replaces it at the end"
    else:
        why = "exists, and was made with other options or of another source; --overwrite replaces it"
    return problem_at(staging.final, why)


def _is_same(url: str, other: str) -> bool:
    """Whether two URLs name one folder, links resolved."""
    return url == other or ("://" not in url + other and Path(url).resolve() == Path(other).resolve())


def _find_source(staging: Staging, planned: CheckpointPlan) -> str:
    """A file or folder of the source that lies where the checkpoint goes, or where it is made; empty if there is none."""
    places = [staging.final, *staging.beside()]
    for url in planned.inputs:
        if isinstance(staging, BucketStaging):
            if any(f"{url}/".startswith(f"{place}/") for place in places):
                return url
        elif os.path.isabs(url):
            real = Path(os.path.realpath(url))
            if any(real.is_relative_to(os.path.realpath(place.url)) for place in places):
                return url
    return ""


def _why_not_replace(staging: Staging) -> str:
    """What stands against replacing what lies in the checkpoint's place; empty if nothing does."""
    if isinstance(staging, BucketStaging):
        if is_checkpoint(staging.final):
            return _others(staging)
        if staging.is_remains():
            return ""
        return f"exists, and is no Orbax checkpoint: --overwrite deletes nothing else; {ANOTHER}, or remove it"
    final = Path(staging.final.url)
    if final.is_symlink():
        return f"is a symbolic link to {os.readlink(final)}: --overwrite doesn't replace links; {ANOTHER}, or remove it"
    if not final.is_dir():
        return f"is a file: --overwrite doesn't replace files; {ANOTHER}, or remove it"
    if os.path.ismount(final):
        return f"is a mount point, and can't be replaced; {ANOTHER}"
    if any(final.iterdir()) and not is_checkpoint(staging.final):
        return f"exists, and is no Orbax checkpoint: --overwrite deletes nothing else; {ANOTHER}, or remove it"
    if others := _others(staging):
        return others
    for folder, _, _ in os.walk(final):
        if not os.access(folder, os.W_OK | os.X_OK):
            return f"holds {folder}, from which nothing can be removed: --overwrite can't replace it; {ANOTHER}"
    return ""


def _others(staging: Staging) -> str:
    if others := others_in(staging.final):
        return f"holds what is no checkpoint's, and --overwrite would delete: {', '.join(others)}; move it away, or {ANOTHER}"
    return ""


def _check_room(staging: Staging, conversion: CheckpointPlan, how: Delivery) -> list[Problem]:
    """Whether the disk has room for what is left to write."""
    is_complete = how.resume and plan_hash_of(staging.checkpoint) == conversion.hash
    if is_complete or not isinstance(staging, FolderStaging):
        return []
    needed = int(conversion.made_bytes * (staging.share_left(len(conversion.units)) if how.resume else 1))
    if how.link == COPY:
        needed += conversion.linked_bytes
    return check_room(staging.output, needed)


def check_room(place: LocalFolder, needed: int) -> list[Problem]:
    """Whether the disk has room for so many bytes."""
    free = shutil.disk_usage(next(folder for folder in (place.folder, *place.folder.parents) if folder.exists())).free
    if free < needed:
        return problem_at(place, f"needs {human(needed)}, the disk has {human(free)} left")
    return []


ANOTHER_PLAN = "holds what a stopped command staged with another plan"


def why_not_go_on(staging: Staging, wanted: Resumable) -> str:
    """Why `--resume` can't go on with what is staged: it is of another plan, and how that differs; else empty."""
    if differs := _difference(staging, wanted):
        return f"{ANOTHER_PLAN} ({differs}); --overwrite without --resume starts anew"
    return ""


def _difference(staging: Staging, wanted: Resumable) -> str:
    """What differs between the plan that is staged and the one that is wanted; empty if nothing does."""
    if not staging.is_staged():
        return "it is complete but for its name" if made_by(staging.checkpoint) not in (None, wanted.hash) else ""
    try:
        staged = load(staging.read_plan())
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, TypeError, zlib.error):
        return "it was staged by another version of Weightbeam, or is damaged"
    if staged.kind != wanted.kind:
        return f"it is of weightbeam {staged.kind}"
    if staged.hash == wanted.hash:
        return "the source's files have changed" if wanted.was_touched(staged) else ""
    options, before = hashed(wanted.options), hashed(cast(Resumable, staged).options)
    changed = [
        f"--{name} was {_shown(old)}, is {_shown(options[name])}"
        for name, old in before.items()
        if options[name] != old
    ]
    return "; ".join(changed or _changed_files(cast(Resumable, staged), wanted)) or "the source's files have changed"


def _changed_files(staged: Resumable, wanted: Resumable) -> list[str]:
    """What of two plans with the same options isn't the same: files that are read, small files that are written."""
    of_sources = [[source.identity for source in each.sources] for each in (staged, wanted)]
    then, now = staged.small_hashes, wanted.small_hashes
    return [
        *(["the source's files have changed"] if of_sources[0] != of_sources[1] else []),
        *(f"another {name}" for name in sorted({*now, *then}) if now.get(name) != then.get(name)),
    ]


def _shown(option: object) -> str:
    """An option's value as the user would write it."""
    values = option if isinstance(option, tuple) else (option,)
    if values and isinstance(values[0], tuple):
        return f"a file of {len(values)} rules"
    return " and ".join("not given" if value is None else str(value) for value in values) or "not given"
