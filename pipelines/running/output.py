"""What an output must be before it is written: free, or holding what was asked to be resumed or replaced; fit, with
room; and one's own.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from weightbeam.formats.release.files import CARD
from weightbeam.formats.staging import JOB, REPLACED, Staging, staging_at
from weightbeam.formats.staging.lease import HeldError
from weightbeam.formats.staging.links import COPY
from weightbeam.formats.storage import LocalFolder, Store, open_store, patience, reason
from weightbeam.formats.storage.identity import describe_changes
from weightbeam.formats.storage.renaming import is_anothers
from weightbeam.formats.targets.release import HoldsOthers
from weightbeam.formats.text.printable import listed
from weightbeam.model_mappings.plan import Problem
from weightbeam.pipelines.terminal.errors import Busy, Refused
from weightbeam.pipelines.terminal.tables import human
from weightbeam.transforms.planning.options import Delivery, hashed
from weightbeam.transforms.planning.transfer import Transfer
from weightbeam.transforms.stages.staged import load

# a kind of plan -> the commands that have it, where there are several
OF_COMMANDS = {"merge": "merge, cut, quantize or dequantize", "convert": "convert or materialize"}
AGAIN = "the same command with --resume goes on from there"
KEPT = f"what is done is kept, {AGAIN}"


@contextlib.contextmanager
def alone(staging: Staging, look: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Context manager: keeps other commands out of an output, which is made if it isn't there.

    Args:
      staging: what one wants to write.
      look: raises if something is at work there that has no lease (`Staging.hold`).

    Raises:
      Busy: another command is at work there.
      Refused: nothing can be written there.
      KeyboardInterrupt: as it came, and says what is kept, if anything is.
    """
    with patience.hurried_at_most(), contextlib.ExitStack() as stack:
        try:
            if staging.output.make():
                stack.callback(staging.output.unmake)
            staging.output.check_writable()
            stack.enter_context(staging.hold(look))
        except HeldError as e:
            raise Busy(*problem_at(staging.final, str(e))) from e
        except OSError as e:
            why = reason(e).removeprefix(f"{staging.output}: ")  # a store's own errors name it
            raise Refused(*problem_at(staging.output, why)) from e
        try:
            yield
        except KeyboardInterrupt as e:
            patience.hurry()
            if e.args:  # what it says is known better where it comes from
                raise
            try:
                kept = KEPT if staging.exists() else ""
            except OSError:
                kept = f"{staging.output} doesn't answer; {KEPT}"
            if kept:
                raise KeyboardInterrupt(kept) from e
            raise


def look_for_job(staging: Staging, beam: Sequence[str]) -> Callable[[], None]:
    """What `alone` should look at: whether a job of a command before this one, which is noted beside the plan, is still
    at work.
    """

    def look() -> None:
        if staging.exists() and staging.plan_folder.exists(JOB):
            from weightbeam.pipelines.running.noted import check_job  # only now: it imports Beam

            check_job(staging, beam)

    return look


def bring_back(output: str) -> None:
    """Puts a checkpoint back that was on its way out when its successor died: where the file system can't swap, there
    is none meanwhile.

    Raises:
      Busy: its successor lives.
      Refused: nothing can be written there.
    """
    store = open_store(output)
    if isinstance(store, LocalFolder) and store.folder.is_dir():
        for step in {found[1] for name in store.entries() if (found := re.fullmatch(rf"(\d+){REPLACED}", name))}:
            if not os.path.lexists(store / step):
                with alone(staging_at(store, int(step))):
                    pass


def is_finished(staging: Staging, planned: Transfer) -> bool:
    """Whether the very result that is wanted is published, and nothing is staged beside it."""
    return not staging.exists() and planned.target.made_by(staging.final) == planned.hash


def check_output(staging: Staging, planned: Transfer, how: Delivery) -> list[Problem]:
    """What stands against writing a result there, the place's own refusals among it.

    Args:
      staging: where.
      planned: what.
      how: what may be gone on with or replaced there.

    Raises:
      Busy: another command is at work there.
    """
    try:
        if unfit := planned.target.find_unfit(staging):
            return [Problem("output", *unfit)]
        staging.check_free()
        return _find_problems(staging, planned, how)
    except HeldError as e:
        raise Busy(*problem_at(staging.final, str(e))) from e
    except OSError as e:
        return [Problem("output", str(staging.output), reason(e).removeprefix(f"{staging.final}: "))]


def problem_at(where: Store, message: str, cause: str = "") -> list[Problem]:
    """What stands against writing there; nothing where the message is empty."""
    return [Problem("output", str(where), message, cause=cause)] if message else []


def _find_problems(staging: Staging, planned: Transfer, how: Delivery) -> list[Problem]:
    """What lies there already, and whether there is room: the first that is found, in the order of the steps."""
    if how.resume and is_finished(staging, planned):
        return _check_finished(staging, planned)
    swaps = how.in_place and not staging.grows_in_place
    if problems := problem_at(staging.final, planned.target.find_overlap(staging, planned.places, swaps)):
        return problems
    stopped = staging.exists()
    return (
        (_check_stopped(staging, planned, how) if stopped else [])
        or (_check_there(staging, planned, how, stopped) if staging.is_taken() else [])
        or _check_room(staging, planned, how)
    )


def _check_finished(staging: Staging, planned: Transfer) -> list[Problem]:
    """Whether the result that is wanted, and is there, is whole."""
    if damage := planned.target.find_damage(staging):
        why = f"is finished, but damaged ({damage}); --overwrite without --resume makes it anew"
        return problem_at(staging.final, why)
    return []


def _check_stopped(staging: Staging, planned: Transfer, how: Delivery) -> list[Problem]:
    """Whether it was said what to do with what a stopped command staged, and that can be done."""
    if how.resume:
        return why_not_go_on(staging, planned)
    if how.overwrite:
        return problem_at(staging.final, planned.target.why_not_discard(staging))
    todo = "go on with --resume, or start anew with --overwrite"
    return problem_at(staging.plan_folder, f"holds a stopped {planned.title.lower()}; {todo}")


def _check_there(staging: Staging, planned: Transfer, how: Delivery, stopped: bool) -> list[Problem]:
    """Whether what lies in the place can be replaced, and should be."""
    if stopped and how.resume and staging.grows_in_place:
        if planned.target.made_by(staging.final) == planned.hash:
            return []
        what = f"what isn't of the stopped {planned.title.lower()} that grows there: {listed(staging.unknown())}"
        return problem_at(staging.final, f"holds {what}; move it away, and --resume goes on")
    if why := planned.target.why_not_replace(staging):
        return problem_at(staging.final, why, HOLDS_OTHERS if isinstance(why, HoldsOthers) else "")
    if how.overwrite:
        if staging.on_disk and is_anothers(Path(staging.final.url)):
            why = f"is another user's, and its folder is sticky: only its owner replaces it; {planned.target.another}"
            return problem_at(staging.final, why)
        return []
    if not how.resume:
        why = f"exists; --overwrite replaces it{planned.target.beside}"
    elif stopped:
        what = f"a stopped {planned.title.lower()}"
        why = f"exists beside {what}; --resume --overwrite goes on with that and replaces it at the end"
    else:
        why = "exists, and was made with other options or of another source; --overwrite replaces it"
        return problem_at(staging.final, why, ANOTHER_RESULT)
    return problem_at(staging.final, why)


def _check_room(staging: Staging, planned: Transfer, how: Delivery) -> list[Problem]:
    """Whether the disk has room for what is left to write."""
    if not staging.on_disk or (how.resume and planned.target.made_by(staging.checkpoint) == planned.hash):
        return []
    needed = planned.target.bytes_left(staging, planned.made_bytes, how.resume)
    needed += planned.linked_bytes if how.link == COPY else 0
    output = Path(staging.output.url)
    free = shutil.disk_usage(next(folder for folder in (output, *output.parents) if folder.exists())).free
    if free < needed:
        return problem_at(staging.output, f"needs {human(needed)}, the disk has {human(free)} left")
    return []


CHANGED, SHOWN = "the source's files have changed", 3  # and files of them that are named at most
ANOTHER_PLAN, ANOTHER_RESULT, HOLDS_OTHERS = "another plan", "another result", "others' files"  # causes


def why_not_go_on(staging: Staging, wanted: Transfer) -> list[Problem]:
    """Why `--resume` can't go on with what is staged: it is another user's, or of another plan, and how that differs."""
    if staging.on_disk and not os.access(staging.plan_folder.url, os.W_OK):
        why = "can't be written by this user; go on as the one who began it, or start anew with --overwrite"
        return problem_at(staging.plan_folder, why)
    if differs := _difference(staging, wanted):
        why = f"holds what a stopped command staged with another plan ({differs}); --overwrite without --resume starts anew"
        return problem_at(staging.plan_folder, why, ANOTHER_PLAN)
    return []


def _difference(staging: Staging, wanted: Transfer) -> str:
    """What differs between the plan that is staged and the one that is wanted; empty if nothing does."""
    if not staging.is_staged():
        return (
            "it is complete but for its name"
            if wanted.target.made_by(staging.checkpoint) not in (None, wanted.hash)
            else ""
        )
    try:
        staged = load(staging.read_plan())
    except (RuntimeError, OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, zlib.error):
        family = getattr(wanted.options, "family", None) or ""
        table = family if family.endswith(".py") else f"package than {wanted.plan.code}" if wanted.plan.code else ""
        changed = f"with another {table}, " if table else ""
        return f"it was staged {changed}by another version of Weightbeam, or is damaged"
    if staged.kind != wanted.kind:
        return f"it is of weightbeam {OF_COMMANDS.get(staged.kind, staged.kind)}"
    if staged.hash == wanted.hash:
        return _changed_source(staged, wanted) if wanted.was_touched(staged) else ""
    options, before = hashed(wanted.options), hashed(staged.options)
    changed = []
    for name, old in before.items():
        if options[name] != old:
            was, is_now = _shown(name, old), _shown(name, options[name])
            changed.append(f"--{name} was {was}, is {is_now if is_now != was else f'{is_now} that say something else'}")
    return "; ".join(changed or _changed_files(staged, wanted)) or CHANGED


def _changed_source(staged: Transfer, wanted: Transfer) -> str:
    """That the files that are read have changed; which, and how, where that can be seen."""
    pairs = zip(staged.sources, wanted.sources, strict=False)
    found = [each for then, now in pairs for each in describe_changes(then.seen, now.seen, bool(wanted.linked_bytes))]
    more = [f"{len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return f"{CHANGED}: {'; '.join([*found[:SHOWN], *more])}" if found else CHANGED


def _changed_files(staged: Transfer, wanted: Transfer) -> list[str]:
    """What of two plans with the same options isn't the same: files that are read, small files that are written."""
    of_sources = [[source.identity for source in each.sources] for each in (staged, wanted)]
    then, now = staged.small_hashes, wanted.small_hashes
    others = [name for name in sorted({*now, *then}) if now.get(name) != then.get(name)]
    moved = [f"{was} is {place} now" for was, place in zip(staged.inputs, wanted.inputs, strict=False) if was != place]
    return [
        *([_changed_source(staged, wanted)] if of_sources[0] != of_sources[1] else []),
        *(
            f"another {name}" + (f", which names its source: {', '.join(moved)}" if name == CARD and moved else "")
            for name in others
        ),
    ]


def _shown(name: str, option: Any) -> str:
    """An option's value as the user would write it."""
    values = option if isinstance(option, tuple) else (option,)
    if values and name == "lora":
        values = [url if weight == 1 else f"{url},{weight:g}" for url, weight in values]
    elif values and isinstance(values[0], tuple):
        return f"a file of {len(values)} rules"
    return " and ".join("not given" if value is None else str(value) for value in values) or "not given"
