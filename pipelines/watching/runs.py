"""What a training run has: its steps, as Orbax's CheckpointManager and MaxText write them, and which of them are whole.

A run is only looked at. One listing names every step and says whether it is committed; what tells a step from another
one of the same number is read for the step that is taken next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from weightbeam.formats.orbax import CHECKPOINT_METADATA, METADATA
from weightbeam.formats.orbax.ocdbt import MANIFEST
from weightbeam.formats.orbax.reading import CHECKPOINTS
from weightbeam.formats.staging import MARKER
from weightbeam.formats.storage import File, LocalFolder, StorageError, Store
from weightbeam.formats.storage.strict_json import object_in

MAX_STEP = 10**18  # of the numbers of steps; a longer one is nobody's
# of a step's folder: 1000, or with the manager's prefix, checkpoint_1000
STEP = re.compile(r"(?:((?=[\d_]*[^\W\d_])\w*)_)?([0-9]{1,18})")


@dataclasses.dataclass(frozen=True)
class Steps:
    """Which steps are taken.

    Attributes:
      every: multiples of this number.
      newest: only the newest that is there.
      listed: these; None for any.
    """

    every: int = 1
    newest: bool = False
    listed: frozenset[int] | None = None

    def wanted(self, there: Iterable[SeenStep]) -> list[SeenStep]:
        """Those that are taken of those that are there, the newest first."""
        found = [
            step
            for step in there
            if step.number % self.every == 0 and (self.listed is None or step.number in self.listed)
        ]
        found.sort(key=lambda step: step.number, reverse=True)
        return found[:1] if self.newest else found


@dataclasses.dataclass(frozen=True, slots=True)
class SeenStep:
    """A committed step as a listing shows it.

    Attributes:
      number: of the step.
      folder: its name.
      mark: tells it from a later one of the same number, without reading it.
    """

    number: int
    folder: str
    mark: str

    @property
    def listed(self) -> tuple[int, str]:
        """What tells it from all other steps of its run, in a listing."""
        return self.number, self.mark


@dataclasses.dataclass(frozen=True)
class RunStep:
    """A step of a run.

    Attributes:
      name: of the run.
      number: of the step.
      url: where it lies.
      weights: identifies it: a hash of its metadata and manifests.
      updated: when it was committed.
      mark: see `SeenStep`.
      run: the run's folder.
    """

    name: str
    number: int
    url: str
    weights: str
    updated: datetime.datetime
    mark: str
    run: str

    @property
    def commit(self) -> str:
        return f"step-{self.number}"

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"run": self.run, "step": self.number, "source": self.url, "seen": self.mark}


def list_steps(run: Store) -> list[SeenStep]:
    """The committed steps of a run, by one listing.

    On disk a step gets its name by a rename once it is whole. In a bucket it grows under its name, and
    `commit_success.txt` comes last.

    All steps of a run have one prefix, or none: beside those without one a `best_100` is none of them.

    Raises:
      OSError: the folder can't be listed.
      StorageError: several prefixes are there, or a number twice: which are the run's isn't known.
    """
    found: dict[str, list[SeenStep]] = {}
    for file in run.below([mark_of(run)]):
        if (seen := _seen(file)) and _is_regular(run, file.name):
            found.setdefault(_prefix_of(seen.folder), []).append(seen)
    steps = sorted(found.get("", next(iter(found.values()), [])), key=lambda seen: seen.number)
    if len(found) > 1 and "" not in found:
        unclear = tuple(each[-1] for each in found.values())
    else:
        unclear = next((pair for pair in itertools.pairwise(steps) if pair[0].number == pair[1].number), ())
    if unclear:
        names = " and ".join(seen.folder for seen in unclear)
        raise StorageError(f"{run}: {names} can't both be the run's steps; move what is none of them elsewhere")
    return steps


def _prefix_of(folder: str) -> str:
    """The prefix of a step's folder; empty where it has none."""
    match = STEP.fullmatch(folder)
    return (match and match[1]) or ""


def _is_regular(run: Store, name: str) -> bool:
    """Whether a file is neither a pipe nor a device: what has such a thing is no step."""
    try:
        run.check_regular(name)
    except StorageError:
        return False
    return True


def see_step(run: Store, folder: str) -> SeenStep | None:
    """One committed step, by the name of its folder; None where it isn't there.

    Raises:
      OSError: it can't be told.
    """
    name = f"{folder}/{mark_of(run)}"
    file = run.stat(name)
    return _seen(dataclasses.replace(file, name=name)) if file else None


def mark_of(run: Store) -> str:
    """The file that tells that a step is committed, and from a later one of the same number: it is written last, and
    anew.
    """
    return CHECKPOINT_METADATA if isinstance(run, LocalFolder) else MARKER


def _seen(mark: File) -> SeenStep | None:
    folder = mark.name.rpartition("/")[0]
    version = json.dumps([mark.size, mark.version, mark.inode])
    match = STEP.fullmatch(folder)
    return SeenStep(int(match[2]), folder, hashlib.sha256(version.encode()).hexdigest()[:12]) if match else None


def growing_steps(run: Store) -> bool:
    """Whether a step is being written that isn't committed yet."""
    return any(name[:1].isdigit() or STEP.match(name) for name in run.folders())


def read_step(run: Store, name: str, seen: SeenStep) -> RunStep | None:
    """A step, by its metadata and manifests; None where it has gone, or isn't committed.

    Raises:
      OSError: it can't be read.
    """
    store = run / seen.folder
    hashed = hashlib.sha256(str(seen.number).encode())
    try:
        about = object_in(store, CHECKPOINT_METADATA)
        if about.get("commit_timestamp_nsecs", 0) is None:  # begun, and not committed
            return None
        items = [item for item in store.folders() if (store / item).exists(METADATA)]
        parts = [f"{item}/{part}" for item in items for part in (CHECKPOINT_METADATA, METADATA, MANIFEST)]
        for path in (CHECKPOINT_METADATA, *parts):
            hashed.update(f"{path} {hashlib.sha256(_content(store, path)).hexdigest()}\n".encode())
    except FileNotFoundError:
        return None
    if not items:
        return None
    when = _committed(store, about.get("commit_timestamp_nsecs"))
    return RunStep(name, seen.number, store.url, hashed.hexdigest(), when, seen.mark, run.url)


def _committed(step: Store, stamp: object) -> datetime.datetime:
    """When a step was committed: by Orbax's word, else by its newest file; the epoch where neither is a calendar's."""
    none = (OverflowError, ValueError, OSError)
    if isinstance(stamp, int):
        with contextlib.suppress(*none):
            return datetime.datetime.fromtimestamp(stamp / 1e9, datetime.UTC)
    newest = max((file.updated for file in step.list(recursive=False)), default=0.0)
    with contextlib.suppress(*none):
        return datetime.datetime.fromtimestamp(newest, datetime.UTC)
    return datetime.datetime.fromtimestamp(0, datetime.UTC)


def _content(store: Store, path: str) -> bytes:
    try:
        return store.read(path)
    except FileNotFoundError:
        return b""


def run_name(url: str) -> str:
    """What a run is called that has no name: `tuned` for `gs://bucket/tuned/checkpoints`."""
    parts = [part for part in url.partition("://")[2 if "://" in url else 0].split("/") if part]
    if parts and parts[-1] == CHECKPOINTS and len(parts) > 1:
        parts.pop()
    return re.sub(r"[^\w.-]", "-", parts[-1]).strip(".-") or "run" if parts else "run"
