"""Publishing on the hub: the release is written to a folder of this user's cache, which a later attempt goes on with, and
goes from there as one commit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from weightbeam.formats.staging import IncompleteError
from weightbeam.formats.staging.lease import HeldError
from weightbeam.formats.storage import StorageError, reason
from weightbeam.formats.storage.local import cache_folder
from weightbeam.formats.storage.uninterrupted import PUBLISHED
from weightbeam.formats.targets.hub import OthersError, Published, check_target, find_published, publish
from weightbeam.formats.targets.published import RECORD
from weightbeam.formats.targets.release import ReleaseTarget
from weightbeam.formats.targets.release_place import ReleaseFolder
from weightbeam.pipelines.running.output import alone, is_finished, look_for_job, why_not_go_on
from weightbeam.pipelines.running.problems import refuse
from weightbeam.pipelines.running.writing import FINISHED, Written, find_place, get_ready, write
from weightbeam.pipelines.terminal.errors import Busy, Failed, refusing
from weightbeam.pipelines.terminal.progress import Report
from weightbeam.pipelines.terminal.wording import worded
from weightbeam.transforms.planning.options import Delivery
from weightbeam.transforms.planning.to_release import ToRelease

LOG = logging.getLogger("weightbeam")


def carry_to_hub(
    planned: ToRelease, output: str, how: Delivery, beam: Sequence[str], progress: bool | str | Report
) -> Written:
    """Carries a plan out, and publishes it as one commit. The folder in the cache is this command's alone
    until that is done; see `carry.carry`.
    """
    refuse(planned.plan.problems, planned.source)
    target = planned.target
    named = planned.naming(output).name(planned.inputs[0])
    title = f"{planned.title} of {' '.join(named.splitlines())} ({planned.hash[:12]})"  # the hub's are one line
    listed = {**target.texts, **dict.fromkeys([RECORD, *(name for name, *_ in target.files)])}
    place = _place_in_cache(planned)
    with refusing(StorageError, about="--output="):
        check_target(output)
        made = find_published(output, title, listed, overwrite=how.overwrite, create_pr=how.create_pr)
    if made:
        _clear(place)
        return Written(made.url, state=FINISHED, page=made.page)
    refuse(planned.unreadable(), planned.source)
    for warning in planned.warnings:
        LOG.warning(worded(warning))
    is_left = not is_finished(place, planned)
    ready = get_ready(planned, place, True, beam) if is_left else contextlib.nullcontext()
    with ready, alone(place, look_for_job(place, beam)):
        try:
            written = _write_to_cache(planned, place, how, beam, progress)
        finally:
            PUBLISHED.clear()  # nothing is, on the hub
        made = _publish_cached(target, place, output, title, how)
    return dataclasses.replace(written, folder=made.url, page=made.page, removed=made.removed, replaced=made.replaced)


def _publish_cached(target: ReleaseTarget, place: ReleaseFolder, output: str, title: str, how: Delivery) -> Published:
    """Publishes the release that lies in the cache, whose place is this command's alone, and removes it there."""
    try:
        files = {**target.texts, **place.made(target.files)}
        made = publish(
            output,
            title,
            files,
            overwrite=how.overwrite,
            create_pr=how.create_pr,
            replace_card=how.overwrite or how.create_pr,
            is_wanted=place.is_held,
        )
    except OthersError as e:  # who came meanwhile
        left = f"The release is in {place.final}; the same command publishes it with --overwrite or --create_pr. If it should go elsewhere, delete that folder."
        raise Failed(f"  {reason(e)}\n{left}") from e
    except (OSError, IncompleteError) as e:
        if not place.is_held():
            raise _taken_over(place) from e
        why = reason(e) if isinstance(e, OSError) else e
        raise Failed(
            f"  {why}\nThe release is in {place.final}; the same command publishes it, if the hub hasn't got it by now."
        ) from e
    except KeyboardInterrupt as e:
        if not PUBLISHED:
            left = f"the release is in {place.final}; the same command publishes it"
            raise KeyboardInterrupt(f"{e}; {left}" if str(e) else left) from e
        with contextlib.suppress(OSError, HeldError):
            _remove(place)
        raise
    if made is None:
        raise _taken_over(place)
    with contextlib.suppress(HeldError):  # somebody else's by now
        _remove(place)
    return made


def _taken_over(place: ReleaseFolder) -> Failed:
    return Failed(f"  {place.final} was taken over by another command while this one slept; that publishes it")


def _place_in_cache(planned: ToRelease) -> ReleaseFolder:
    """Where a release lies on this machine until the hub has it; the plan's own."""
    place = find_place(planned, str(cache_folder(f"{planned.title.lower()}-{planned.hash[:16]}")))
    assert isinstance(place, ReleaseFolder)  # the cache is on a disk
    return place


def _write_to_cache(
    planned: ToRelease, place: ReleaseFolder, how: Delivery, beam: Sequence[str], progress: bool | str | Report
) -> Written:
    """Writes a release to its place in the cache, which is this command's alone, where it isn't there as it was
    planned.
    """
    target = planned.target
    if is_finished(place, planned) and _is_as_noted(place, target):
        with contextlib.suppress(IncompleteError):
            place.made(target.files)
            return Written(str(place.final), record=target.record_of(place.final))
    if place.is_taken():  # the remains of one that was being removed
        place.remove()
    anew = place.exists() and bool(why_not_go_on(place, planned))
    how = dataclasses.replace(how, resume=not anew, overwrite=anew)
    written = write(planned, place, str(place.final), how, beam, progress)
    _note(place).write_text(json.dumps(_marks(place, target)))
    return written


def _note(place: ReleaseFolder) -> Path:
    """What says beside a release in the cache how its files were when they were written, for a command that comes later."""
    return Path(f"{place.final.url}.written")


def _marks(place: ReleaseFolder, target: ReleaseTarget) -> dict[str, list[int]]:
    """The inode of each file of weights, and the time of any change, which no tool sets back."""
    found = {name: os.stat(place.final.path(name)) for name, *_ in target.files}
    return {name: [stat.st_ino, stat.st_ctime_ns] for name, stat in found.items()}


def _is_as_noted(place: ReleaseFolder, target: ReleaseTarget) -> bool:
    """Whether nobody has touched the weights of a release in the cache since they were written."""
    try:
        return json.loads(_note(place).read_bytes()) == _marks(place, target)
    except (OSError, ValueError):
        return False


def _remove(place: ReleaseFolder) -> None:
    """Removes a release in the cache."""
    place.remove()
    _note(place).unlink(missing_ok=True)


def _clear(place: ReleaseFolder) -> None:
    """Removes what lies in the cache of a release that is published, unless somebody is at work there."""
    if place.is_taken() or place.exists():
        with contextlib.suppress(Busy), alone(place):
            place.discard()
            _remove(place)
