"""Where a conversion keeps what it makes until it is published.

In a folder, everything lies in one place that a rename publishes:

    <output>/<step>.weightbeam-lease            who is at work
    <output>/<step>.orbax-checkpoint-tmp/       the checkpoint as it grows; then <output>/<step>/
        plan.json.gz, units/<plan>/<id>.json    the staged plan and the ledger; removed before publishing
        failure.txt                             what Beam said of a failure; removed before publishing

A bucket has no renames. There the checkpoint grows where it will be read, and its marker publishes it:

    <output>/<step>.weightbeam-lease
    <output>/<step>.weightbeam/                 plan, ledger and failure; removed after publishing
    <output>/<step>/                            the checkpoint; no reader takes it for one before its marker is there

A unit counts when its ledger entry exists; the entry names the attempt that made it, and is created at most once. Entries lie in a folder
that has the plan's name: a worker that wakes after another plan was staged here enters nothing that counts.
"""

from __future__ import annotations

import abc
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from weightbeam.formats import lease
from weightbeam.formats.links import SOURCE
from weightbeam.formats.storage import TEMPORARY, LocalFolder, StorageError, Store, open_store, sync_folder

MARKER = "commit_success.txt"  # a checkpoint, or an item of one, is complete
ITEMS = "items"
PLAN, UNITS, FAILURE = "plan.json.gz", "units", "failure.txt"


class Staging(abc.ABC):
    """The places of one conversion.

    Attributes:
      output: what the user named.
      step: the step below it.
      units: the ledger's folder in `work`; the plan's own.
      work: where the plan and the ledger are.
      checkpoint: where the checkpoint is before it is published.
    """

    work: Store
    checkpoint: Store

    def __init__(self, output: Store, step: int, plan: str):
        self.output, self.step = output, step
        self.units = f"{UNITS}/{plan[:16]}"

    @property
    def final(self) -> Store:
        """Where the checkpoint is read from."""
        return self.output / str(self.step)

    @property
    def items(self) -> Store:
        return self.checkpoint / ITEMS

    def hold(self) -> AbstractContextManager[None]:
        """Keeps other conversions out while it is entered."""
        return lease.hold(self.output, f"{self.step}.weightbeam-lease")

    @abc.abstractmethod
    def exists(self) -> bool:
        """Whether there is a conversion that wasn't published."""

    @abc.abstractmethod
    def is_taken(self) -> bool:
        """Whether something else is where the checkpoint should be read from."""

    def is_staged(self) -> bool:
        """Whether the plan is there, so that units can be made."""
        return self.work.exists(PLAN)

    def is_complete(self) -> bool:
        """Whether only publishing is left."""
        return self.checkpoint.exists(MARKER)

    def create(self, plan: bytes) -> None:
        """Begins anew: throws away what was staged, and makes the plan the last thing to be there."""
        self.discard()
        self.work.write(PLAN, plan)

    @abc.abstractmethod
    def discard(self) -> None:
        """Throws away what was staged."""

    @property
    def plan(self) -> str:
        """The URL of the staged plan."""
        return self.work.path(PLAN)

    def read_plan(self) -> bytes:
        """The staged plan."""
        return self.work.read(PLAN)

    def write_plan(self, plan: bytes) -> None:
        """Stages the same plan again: the source may have moved."""
        self.work.write(PLAN, plan)

    def enter(self, unit: int, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Enters a unit in the ledger; returns the entry that counts, this one or an earlier one."""
        name = f"{self.units}/{unit}.json"
        if self.work.create(name, json.dumps(entry).encode()):
            return dict(entry)
        return json.loads(self.work.read(name))

    def done(self) -> dict[int, tuple[str, int]]:
        """The units that count, each with what tells its ledger entry from another one."""
        files = self.work.list(f"{self.units}/")
        names = {file.name.removeprefix(f"{self.units}/").removesuffix(".json"): (file.version, file.inode) for file in files}
        return {int(name): mark for name, mark in names.items() if name.isdecimal()}

    def ledger(self) -> dict[int, dict[str, Any]]:
        """For each unit that counts, the `attempt` that made it, and its shares in the arrays' `digests`."""
        units = sorted(self.done())
        return dict(zip(units, map(json.loads, self.work.read_many([f"{self.units}/{unit}.json" for unit in units])), strict=True))

    def note_failure(self, text: str) -> str:
        """Keeps the story of a failure; returns where."""
        self.work.write(FAILURE, text.encode())
        return self.work.path(FAILURE)

    @abc.abstractmethod
    def publish(self, overwrite: bool = False) -> None:
        """Lets readers see a complete checkpoint.

        Raises:
          StorageError: what is staged isn't a whole checkpoint any more.
        """

    def _check_complete(self) -> None:
        if not self.is_complete():
            raise StorageError(f"{self.checkpoint} was taken over by another conversion, or removed")


class FolderStaging(Staging):
    """Staged beside its place in a folder; a rename is all that a reader ever sees."""

    output: LocalFolder

    @property
    def checkpoint(self) -> LocalFolder:
        return self.output / f"{self.step}.orbax-checkpoint-tmp"

    @property
    def work(self) -> LocalFolder:
        return self.checkpoint

    def exists(self) -> bool:
        return self.checkpoint.folder.exists()

    def is_taken(self) -> bool:
        return self.final.folder.exists()

    def create(self, plan: bytes) -> None:
        self.discard()
        Path(self.items).mkdir(parents=True)
        Path(self.work / self.units).mkdir(parents=True)
        self.work.write(PLAN, plan)

    def discard(self) -> None:
        self.work.delete(PLAN)  # first: what is left if this is stopped is no conversion that could go on
        shutil.rmtree(self.checkpoint, ignore_errors=True)

    def note_failure(self, text: str) -> str:
        Path(self.work.path(FAILURE)).write_text(text, encoding="utf-8", errors="backslashreplace")  # not durably, and only if the folder is there
        return self.work.path(FAILURE)

    def publish(self, overwrite: bool = False) -> None:
        self._check_complete()
        output, final, folder = Path(self.output), Path(self.final), Path(self.checkpoint)
        shutil.rmtree(folder / UNITS, ignore_errors=True)
        unfinished = [path for place in (folder, Path(self.items), Path(self.items / SOURCE)) for path in place.glob(f".*{TEMPORARY}")]
        for path in (folder / PLAN, folder / FAILURE, *unfinished):
            path.unlink(missing_ok=True)
        sync_folder(Path(self.items))
        sync_folder(folder)
        replaced = output / f"{self.step}.replaced-{uuid.uuid4().hex[:8]}"
        if overwrite and final.exists():
            os.rename(final, replaced)
        try:
            os.rename(folder, final)
        except OSError:  # such as that someone was faster: what was there stays there
            if replaced.exists() and not final.exists():
                os.rename(replaced, final)
            raise
        sync_folder(output)
        if overwrite:
            for old in output.glob(f"{self.step}.replaced-*"):
                shutil.rmtree(old)


class BucketStaging(Staging):
    """Staged where it will be read; the marker, which is written last, is what a reader looks for."""

    @property
    def checkpoint(self) -> Store:
        return self.final

    @property
    def work(self) -> Store:
        return self.output / f"{self.step}.weightbeam"

    def exists(self) -> bool:
        return self.is_staged()

    def is_taken(self) -> bool:
        return not self.exists() and bool(self.final.entries() or self.final.folders())

    def discard(self) -> None:
        """Throws away what was staged, and what is in its place: a bucket can't have both."""
        self.work.delete(PLAN)  # first: what is left if this is stopped is no conversion that could go on
        for store in (self.final, self.final / ITEMS):
            store.delete(MARKER)
        self.final.delete_folder()
        self.work.delete_folder()

    def publish(self, overwrite: bool = False) -> None:
        self._check_complete()
        self.work.delete_folder(UNITS)  # first: while the plan is there, another attempt finds it, and ends this
        self.work.delete_folder()


def staging_at(output: str | Path | Store, step: int, plan: str = "plan") -> Staging:
    """The places of a conversion into `output`, by the plan with that hash.

    Raises:
      StorageError: nothing can be written there.
    """
    if str(output).startswith("hf://"):
        raise StorageError(f"{output}: a checkpoint can't be written to the hub, only to a folder or to gs://bucket/folder")
    store = open_store(output)
    return FolderStaging(store, step, plan) if isinstance(store, LocalFolder) else BucketStaging(store, step, plan)
