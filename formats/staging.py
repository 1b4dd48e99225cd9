"""Where a conversion keeps what it makes until it is published.

**The place is the right.** Each plan has a place of its own with a random name, and whoever takes a conversion over first makes that
place his: in a folder by renaming it, in a bucket by removing what its owner would publish from. So a process that slept meanwhile
needn't know that it lost the lease. It has nowhere to write to, and the very operation by which it would publish fails.

In a folder everything lies in one place, and a rename publishes it:

    <output>/<name>.weightbeam-lease                who is at work
    <output>/<name>.<id>.orbax-checkpoint-tmp/      what will be <output>/<name>/, as it grows
        plan.json.gz, units/<plan>/<unit>.json      the staged plan and the ledger
        failure.txt                                 what Beam said of a failure
        job.json                                    the job that is at work there, on another engine
    <output>/<name>.replaced-<id>/                  with a plan in it: whole, and about to be published; without: what it has replaced

A bucket has no renames. There large objects, whose names are random, lie where they will be read; every other object is put
together aside and copied to its name by the store, which refuses if the original is gone. The marker is copied last and publishes:

    <output>/<name>.weightbeam-lease
    <output>/<name>.weightbeam/<id>/                plan, ledger, failure; `aside/`: what will be copied
    <output>/<name>.weightbeam/claim.<id>/          the right to publish: the originals of the marker and of what goes with it
    <output>/<name>/                                what will be read; no reader takes it for a checkpoint before its marker is there

A unit counts when its ledger entry exists; the entry names the attempt that made it, and is created at most once.
"""

from __future__ import annotations

import abc
import contextlib
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightbeam.formats import lease
from weightbeam.formats.links import SOURCE
from weightbeam.formats.storage import TEMPORARY, LocalFolder, StorageError, Store, open_store, sync_folder
from weightbeam.formats.storage.renaming import UnsupportedError, exchange, rename_new

if TYPE_CHECKING:
    from weightbeam.formats.storage.bucket import Bucket

MARKER = "commit_success.txt"  # a checkpoint, or an item of one, is complete
MARK = b"Checkpoint commit was successful"
ITEMS = "items"
JOB = "job.json"  # beside the staged plan: the job that is at work on it, where it can outlive its command
PLAN, UNITS, FAILURE, ASIDE = "plan.json.gz", "units", "failure.txt", "aside"
ATTEMPT = "ocdbt.process_"  # Orbax's name for a writer's database, below the item
GROWING = ".orbax-checkpoint-tmp"  # how the name of a folder ends that isn't a checkpoint yet; Orbax's own word
LOCK = ".__lock"  # how the names of TensorStore's lock files end

log = logging.getLogger("weightbeam")


class TakenOverError(StorageError):
    """Another conversion has taken this one's place, or someone removed it."""


class Staging(abc.ABC):
    """The place of one plan, and where it will be published.

    Made on any machine without looking at anything, and sent to workers as it is: what it writes needs no lease, only its place.

    Attributes:
      output: the folder that what is published lies in.
      name: what it is called there; of a checkpoint its step.
      units: the ledger's folder in `work`; the plan's own.
      marker: the file that is written last, and says that all is there.
      growing: how the name of a folder ends that isn't published yet.
    """

    marker, growing = MARKER, GROWING

    def __init__(self, output: Store, name: str, plan: str):
        self.output, self.name = output, name
        self.units = f"{UNITS}/{plan[:16]}"
        self._lease: lease.Lease | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_lease": None}  # a worker has no lease

    # --- places

    @property
    @abc.abstractmethod
    def work(self) -> Store:
        """Where the plan and the ledger are."""

    @property
    @abc.abstractmethod
    def checkpoint(self) -> Store:
        """Where the checkpoint is before it is published."""

    @property
    def final(self) -> Store:
        """Where it is read from."""
        return self.output / self.name

    @property
    def step(self) -> int:
        """The step of a checkpoint."""
        return int(self.name)

    @property
    def items(self) -> Store:
        """The item that databases of units go to, and that becomes the checkpoint's."""
        return self.checkpoint / ITEMS

    @property
    def aside(self) -> Store:
        """Where everything else grows, whose names readers know, until `gather` brings it to the checkpoint."""
        return self.checkpoint

    @property
    def shards(self) -> Store:
        """The item there: for shards without a database, and the source's files."""
        return self.aside / ITEMS

    @property
    def manifest(self) -> Store:
        """Where the manifest of the merged database is written."""
        return self.items

    def attempt(self) -> str:
        """A name for an attempt at a unit."""
        return uuid.uuid4().hex

    def is_own(self, attempt: str) -> bool:
        """Whether an attempt that was found was made in this place."""
        return True

    # --- who is at work

    @contextlib.contextmanager
    def hold(self, look: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Context manager: keeps other conversions out, makes what is staged one's own, and tidies up after those that were killed.

        Args:
          look: raises if something that has no lease is at work there, such as a job that outlived its command.

        Raises:
          HeldError: another conversion is at work.
        """
        with lease.hold(self.output, f"{self.name}.weightbeam-lease") as held:
            self._lease = held
            try:
                look()
                held.check()
                self.claim()
                held.check()  # who took it away since then has claimed what was claimed here
                self.tidy()
                yield
            finally:
                self._lease = None
                self.leave()

    def check_free(self) -> None:
        """Raises HeldError if another conversion is at work; leaves everything as it is."""
        if self._lease is None:
            lease.check_free(self.output, f"{self.name}.weightbeam-lease")

    def _check_lease(self) -> None:
        if self._lease is not None:
            self._lease.check()

    @abc.abstractmethod
    def claim(self) -> None:
        """Makes what is staged here one's own: whoever had it can write and publish it no more."""

    def tidy(self) -> None:  # noqa: B027
        """Removes what is left of earlier ones, and brings back what was on its way out when its successor died."""

    def leave(self) -> None:  # noqa: B027
        """Removes the signs of a claim on nothing."""

    # --- the plan

    @abc.abstractmethod
    def exists(self) -> bool:
        """Whether there is a conversion that wasn't published."""

    @abc.abstractmethod
    def beside(self) -> Sequence[Store]:
        """All that lies beside the final place and may be thrown away: what is staged, what was replaced."""

    @abc.abstractmethod
    def is_taken(self) -> bool:
        """Whether something else is where the checkpoint should be read from."""

    def is_staged(self) -> bool:
        """Whether the plan is there, so that units can be made."""
        return self.work.exists(PLAN)

    def is_complete(self) -> bool:
        """Whether only publishing is left."""
        return self.checkpoint.exists(self.marker)

    def check(self) -> None:
        """Makes sure that the place is still this one's.

        Raises:
          TakenOverError: it isn't.
        """
        if not self.is_staged():
            raise self.taken_over()

    def taken_over(self) -> TakenOverError:
        """The error that says so."""
        return TakenOverError(f"{self.work} was taken over by another conversion, or removed")

    @abc.abstractmethod
    def create(self, plan: bytes) -> None:
        """Begins anew: throws away what was staged, and makes the plan the last thing to be there."""

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
        """Stages the same plan again, to go on with it: the source may have moved."""
        self.work.write(PLAN, plan)

    # --- the ledger

    def enter(self, unit: int, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Enters a unit in the ledger; returns the entry that counts, this one or an earlier one.

        Raises:
          TakenOverError: the plan isn't the staged one any more.
        """
        name = f"{self.units}/{unit}.json"
        try:
            made = self.work.create(name, json.dumps(entry).encode())
        except FileNotFoundError as e:
            raise self.taken_over() from e
        self.check()
        return dict(entry) if made else json.loads(self.work.read(name))

    def done(self) -> dict[int, tuple[str, int]]:
        """Committed units -> version and inode of their ledger entry."""
        files = self.work.list(f"{self.units}/")
        names = {file.name.removeprefix(f"{self.units}/").removesuffix(".json"): (file.version, file.inode) for file in files}
        return {int(name): mark for name, mark in names.items() if name.isdecimal()}

    def ledger(self) -> dict[int, dict[str, Any]]:
        """For each unit that counts, the `attempt` that made it, and its shares in the arrays' `digests`."""
        units = sorted(self.done())
        return dict(zip(units, map(json.loads, self.work.read_many([f"{self.units}/{unit}.json" for unit in units])), strict=True))

    def sweep(self, database: str = "") -> None:
        """Removes what was written in vain, since the place was taken over meanwhile: a unit's database below `items`, if one is named."""
        if database:
            self.items.delete_folder(database)

    def note_failure(self, text: str) -> str:
        """Keeps the story of a failure, if the place is still this one's; returns where."""
        self.check()
        self.work.write(FAILURE, text.encode())
        return self.work.path(FAILURE)

    # --- publishing

    def gather(self) -> None:  # noqa: B027
        """Brings what lies in `aside` to where it will be read."""

    def put(self, name: str, data: bytes) -> None:
        """Writes a file of the checkpoint, such as its metadata.

        Raises:
          TakenOverError: the place isn't this one's any more; nothing is written that a reader sees.
        """
        self.checkpoint.write(name, data)

    def mark(self) -> None:
        """Says that the checkpoint is complete; in a bucket readers see it from here on."""
        for folder in (f"{ITEMS}/", ""):
            self.put(f"{folder}{MARKER}", MARK)

    @abc.abstractmethod
    def publish(self, overwrite: bool = False) -> None:
        """Lets readers see a complete checkpoint.

        Args:
          overwrite: in the place of what is there.

        Raises:
          StorageError: what is staged isn't a whole checkpoint, or isn't this one's any more; what is published stays as it is.
        """


class FolderStaging(Staging):
    """Staged beside its place in a folder; a rename is all that a reader ever sees."""

    output: LocalFolder

    def __init__(self, output: LocalFolder, name: str, plan: str):
        super().__init__(output, name, plan)
        self._folder: str | None = None  # what is staged; None until it is claimed or created

    @property
    def checkpoint(self) -> LocalFolder:
        return self.output / (self._folder or next(iter(self._staged()), f"{self.name}{self.growing}"))

    @property
    def work(self) -> LocalFolder:
        return self.checkpoint

    @property
    def final(self) -> LocalFolder:
        return self.output / self.name

    def _entries(self, pattern: str) -> list[str]:
        """The folders beside the final one whose names go on so."""
        try:
            names = os.listdir(self.output)
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = [name for name in names if name.startswith(self.name) and re.fullmatch(pattern, name[len(self.name) :])]
        return sorted(name for name in found if (path := Path(self.output, name)).is_dir() and not path.is_symlink())

    def _staged(self) -> Sequence[str]:
        """What is staged: what this plan would go on with first, then what has any plan, then what has none."""

        def rank(name: str) -> tuple[bool, bool]:
            folder = self.output / name
            return not Path(folder / self.units).exists(), not folder.exists(PLAN)

        whole = [name for name in self._replaced() if (self.output / name).exists(PLAN)]
        return sorted([*whole, *self._entries(rf"(\.[0-9a-f]+)?{re.escape(self.growing)}")], key=rank)

    def _replaced(self) -> list[str]:
        return self._entries(r"\.replaced-[0-9a-f]+")

    def _new_name(self) -> str:
        return f"{self.name}.{uuid.uuid4().hex[:16]}{self.growing}"

    def claim(self) -> None:
        claimed = []
        for name in self._staged():
            mine = self._new_name()
            try:
                os.rename(self.output / name, self.output / mine)
            except FileNotFoundError:  # it was published, or thrown away
                continue
            if ".replaced-" in name and not (self.output / mine).exists(PLAN):  # it was published at this moment: this is what it replaced
                os.rename(self.output / mine, self.output / name)
            else:
                claimed.append(mine)
        self._folder = claimed[0] if claimed else self._new_name()
        for name in claimed[1:]:  # of one that woke and began after it had lost the lease
            _remove(self.output / name)

    def tidy(self) -> None:
        self.output.sweep_probes()
        final = Path(self.final)
        for name in self._replaced():
            if not (self.output / name).exists(PLAN):
                if os.path.lexists(final):
                    _remove(self.output / name)
                else:  # without a rename that swaps, its successor died before it came here
                    rename_new(Path(self.output / name), final)
        if self.final.exists(self.marker):  # who published it was killed before he could
            (final / PLAN).unlink(missing_ok=True)

    def exists(self) -> bool:
        return self.checkpoint.folder.exists()

    def beside(self) -> Sequence[LocalFolder]:
        return [self.output / name for name in {*self._staged(), *self._replaced()}]

    def is_taken(self) -> bool:
        return os.path.lexists(self.final)

    def create(self, plan: bytes) -> None:
        self.discard()
        self._folder = self._new_name()
        Path(self.items).mkdir(parents=True)
        Path(self.work / self.units).mkdir(parents=True)
        try:
            self._check_lease()  # who took it away before hasn't seen this folder, and won't take it over
        except StorageError:
            self.discard()
            raise
        self.work.write(PLAN, plan)

    def discard(self) -> None:
        for name in [self._folder] if self._folder else self._staged():
            _remove(self.output / name)

    def write_plan(self, plan: bytes) -> None:
        """Lock files of writers that were killed go too: TensorStore writes over them, and leaves what reaches beyond."""
        if self._folder is None:
            self.claim()
        for folder, _, names in os.walk(self.items):
            for name in names:
                if name.endswith(LOCK):
                    Path(folder, name).unlink(missing_ok=True)
        super().write_plan(plan)

    def sweep(self, database: str = "") -> None:
        _remove(self.checkpoint)  # TensorStore made it anew; its name is nobody else's

    def note_failure(self, text: str) -> str:
        Path(self.work.path(FAILURE)).write_text(text)  # not durably, and only if the folder is there
        return self.work.path(FAILURE)

    def publish(self, overwrite: bool = False) -> None:
        growing, final = Path(self.checkpoint), Path(self.final)
        sealed = Path(self.output, f"{self.name}.replaced-{uuid.uuid4().hex[:8]}")
        try:
            os.rename(growing, sealed)  # to a name that no late writer knows
        except FileNotFoundError as e:
            raise self.taken_over() from e
        if not (sealed / self.marker).exists() or not (sealed / PLAN).exists():
            os.rename(sealed, growing)
            raise self.taken_over()
        for path in [path for place in (sealed, sealed / ITEMS, sealed / ITEMS / SOURCE) for path in place.glob(f".*{TEMPORARY}")]:
            path.unlink(missing_ok=True)
        for name in (FAILURE, JOB):
            (sealed / name).unlink(missing_ok=True)
        shutil.rmtree(sealed / UNITS, ignore_errors=True)
        for place in (sealed / ITEMS, sealed):
            if place.exists():
                sync_folder(place)
        try:
            self._swap(sealed, final) if overwrite else rename_new(sealed, final)
        except FileNotFoundError as e:
            raise self.taken_over() from e
        except OSError:
            with contextlib.suppress(OSError):
                os.rename(sealed, growing)
            raise
        sync_folder(Path(self.output))
        (final / PLAN).unlink(missing_ok=True)
        for left in (sealed, growing):  # what was replaced; what late writers made anew
            _remove(left)
            if left.exists():
                log.warning("%s was replaced, and can't be removed: delete it", left)

    def _swap(self, sealed: Path, final: Path) -> None:
        """Puts a folder in the place of what is there, if anything is; `sealed` is that then.

        Raises:
          FileNotFoundError: `sealed` isn't there any more; nothing happens.
        """
        while True:
            try:
                exchange(sealed, final)
                return
            except FileNotFoundError:
                if not sealed.exists():
                    raise
                with contextlib.suppress(FileExistsError):
                    rename_new(sealed, final)
                    return
            except UnsupportedError:
                self._swap_in_two(sealed, final)
                return

    def _swap_in_two(self, sealed: Path, final: Path) -> None:
        """The same where the file system has no rename that swaps. Between its two renames there is nothing at `final`; see `tidy`."""
        old = sealed.with_name(f"{self.name}.replaced-{uuid.uuid4().hex[:8]}")
        if not sealed.exists():
            raise FileNotFoundError(sealed)
        if os.path.lexists(final):
            os.rename(final, old)
        try:
            rename_new(sealed, final)
        except OSError:  # such as that someone took it over at this moment: what was there stays there
            if os.path.lexists(old) and not os.path.lexists(final):
                os.rename(old, final)
            raise
        if os.path.lexists(old):
            os.rename(old, sealed)


def _remove(folder: LocalFolder | Path) -> None:
    """Removes a staged folder, its plan first: what is left if this is stopped is no conversion that could go on."""
    with contextlib.suppress(OSError):
        Path(folder, PLAN).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


class BucketStaging(Staging):
    """Staged where it will be read; the marker, which is written last, is what a reader looks for."""

    output: Bucket

    def __init__(self, output: Bucket, name: str, plan: str):
        super().__init__(output, name, plan)
        self._id, self._claim, self._version = "", "", ""  # of the place, of the right to publish from it, and of the plan when that was had

    @property
    def desk(self) -> Bucket:
        """What lies beside the checkpoint, of whatever plan."""
        return self.output / f"{self.name}.weightbeam"

    @property
    def checkpoint(self) -> Bucket:
        return self.final

    @property
    def final(self) -> Bucket:
        return self.output / self.name

    @property
    def work(self) -> Bucket:
        return self.desk / (self._id or next(iter(self._staged()), "new"))

    @property
    def aside(self) -> Bucket:
        return self.work / ASIDE

    @property
    def manifest(self) -> Bucket:
        return self.desk / self._claim / "merged"

    def attempt(self) -> str:
        return f"{self._id}{super().attempt()}"

    def is_own(self, attempt: str) -> bool:
        return bool(self._id) and attempt.startswith(self._id)

    def _staged(self) -> list[str]:
        """The places that have a plan."""
        return [name for name in self.desk.folders() if not name.startswith("claim.") and (self.desk / name).exists(PLAN)]

    def claim(self) -> None:
        for marker in (f"/{MARKER}", ""):  # first that by which an owner sees that he is one; then what he has written until then
            self.desk.delete_all([file for file in self.desk.list("claim.") if file.name.endswith(marker)])
        self._claim = f"claim.{uuid.uuid4().hex[:16]}"
        self.desk.write(f"{self._claim}/{MARKER}", MARK)
        self._id = next(iter(self._staged()), "")
        found = self.work.stat(PLAN) if self._id else None
        self._version = found.version if found else ""

    def leave(self) -> None:
        with contextlib.suppress(OSError):
            if self._claim and not self.exists():
                self.desk.delete_folder(self._claim)

    def check_claim(self) -> None:
        """Raises TakenOverError if someone else has claimed the place."""
        if not self._claim or not self.desk.exists(f"{self._claim}/{MARKER}"):
            raise self.taken_over()

    def exists(self) -> bool:
        return self.is_staged()

    def beside(self) -> Sequence[Bucket]:
        return [self.desk]

    def is_taken(self) -> bool:
        return not self.exists() and bool(self.final.entries() or self.final.folders())

    def is_remains(self) -> bool:
        """Whether what lies in the place is what a conversion left that was thrown away, or that woke too late."""
        if any(not name.startswith("claim.") for name in self.desk.folders()):
            return True
        return all(file.name.startswith((f"{ITEMS}/{ATTEMPT}", f"{ITEMS}/d/")) for file in self.final.list())

    def create(self, plan: bytes) -> None:
        if not self._claim:
            self.claim()
        self.discard()
        self._id = uuid.uuid4().hex[:16]
        self._version = self.work.replace(PLAN, plan, None) or ""
        try:
            self.check_claim()
        except StorageError:
            self.work.delete_folder()
            raise

    def discard(self) -> None:
        """Throws away what was staged, and what is in its place: a bucket can't have both.

        Only what was listed while the place was this one's is deleted: whoever claims it then finds the plan, or else begins anew.
        """
        if not self._claim:
            self.claim()
        old = [name for name in self.desk.folders() if not name.startswith("claim.")]
        plans = [self.desk.list(f"{name}/{PLAN}") for name in old]
        self.check_claim()
        for found in plans:
            self.desk.delete_all(found)
        if any((self.desk / name).exists(PLAN) for name in old):
            raise self.taken_over()
        for name in old:
            self.desk.delete_folder(f"{name}/{ASIDE}")
        files = self.final.list()
        self.check_claim()
        markers = {self.marker, *(f"{folder}{MARKER}" for folder in (f"{ITEMS}/", ""))}
        self.final.delete_all([file for file in files if file.name in markers])
        self.final.delete_all([file for file in files if file.name not in markers])
        for name in old:
            self.desk.delete_folder(name)
        self._id = ""

    def write_plan(self, plan: bytes) -> None:
        if not self._claim:
            self.claim()
        self._version = self.work.replace(PLAN, plan, self._version or None) or ""
        if not self._version:
            raise self.taken_over()

    def enter(self, unit: int, entry: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return super().enter(unit, entry)
        except TakenOverError:
            self.work.delete_folder()  # nobody else's
            raise

    def gather(self) -> None:
        files = self.aside.list()
        self.check_claim()
        self.final.copy_all(self.aside, files)

    def put(self, name: str, data: bytes) -> None:
        claim = self.desk / self._claim
        if not claim.exists(MARKER):
            raise self.taken_over()
        if name != MARKER:  # which lies there
            claim.write(name, data)
        original = claim.stat(name)
        try:
            self.check_claim()
            if original is None:
                raise self.taken_over()
            self.final.copy(claim, original)
        except StorageError as e:
            if claim.exists(MARKER):
                raise
            claim.delete_folder()  # nobody else's
            raise self.taken_over() from e

    def publish(self, overwrite: bool = False) -> None:
        """The marker was the publication; what is left to do is to clean up."""
        if not self.is_complete():
            raise self.taken_over()
        for name in (self._id, self._claim):
            if name:
                self.desk.delete(f"{name}/{PLAN}")
                self.desk.delete_folder(name)


def staging_at(output: str | Path | Store, step: int, plan: str = "plan") -> Staging:
    """The place of a conversion into `output`, by the plan with that hash.

    Raises:
      StorageError: nothing can be written there.
    """
    if str(output).startswith("hf://"):
        raise StorageError(f"{output}: a checkpoint can't be written to the hub, only to a folder or to gs://bucket/folder")
    store: Any = open_store(output)
    return FolderStaging(store, str(step), plan) if isinstance(store, LocalFolder) else BucketStaging(store, str(step), plan)
