"""Where a conversion keeps what it makes until it is published.

**The place is the right.** Each plan has a place of its own with a random name, and whoever takes a conversion over
first makes that place his: in a folder by renaming it, in a bucket by removing what its owner would publish from. So a
process that slept meanwhile needn't know that it lost the lease. It has nowhere to write to, and the very operation by
which it would publish fails. A stop is the same: whoever staged a plan takes its place from the workers, and whatever
their engine does with a cancelled job, they notice before the next unit, and publish nothing.

In a folder a rename publishes (`folder.py`); in a bucket, which has no renames, a marker that is copied last
(`bucket.py`).
"""

from __future__ import annotations

import abc
import contextlib
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from weightbeam.formats.staging import lease
from weightbeam.formats.staging.ledger import Ledger
from weightbeam.formats.storage import StorageError, Store

MARKER = "commit_success.txt"  # a checkpoint, or an item of one, is complete
MARK = b"Checkpoint commit was successful"
ITEMS = "items"
JOB = "job.json"  # beside the staged plan: the job that is at work on it, where it can outlive its command
PLAN, UNITS, FAILURE, ASIDE = "plan.json.gz", "units", "failure.txt", "aside"
UNPACKED = "unpacked"  # where large chunks of the source lie meanwhile; an assembly may be repeated as long as they do
WORKERS = f"{UNITS}/workers"  # a file of each worker elsewhere that has said it can do the job
ATTEMPT = "ocdbt.process_"  # Orbax's name for a writer's database, below the item
GROWING = ".orbax-checkpoint-tmp"  # how the name of a folder ends that isn't a checkpoint yet; Orbax's own word
LOCK = ".__lock"  # how the names of TensorStore's lock files end


class TakenOverError(StorageError):
    """This one was stopped, another conversion has taken its place, or someone removed it."""


class Staging(abc.ABC):
    """The place of one plan, and where it will be published.

    Made on any machine without looking at anything, and sent to workers as it is: what it writes needs no lease, only
    its place.

    Attributes:
      output: the folder that what is published lies in.
      name: what it is called there; of a checkpoint its step.
      units: the ledger's folder in `plan_folder`; the plan's own.
      marker: the file that is written last, and says that all is there.
      growing: how the name of a folder ends that isn't published yet.
      on_disk: whether it is in a folder of a file system.
      grows_in_place: whether it grows where it will be read; else what is published replaces at once what is there.
    """

    marker, growing = MARKER, GROWING
    on_disk = grows_in_place = False

    def __init__(self, output: Store, name: str, plan_hash: str):
        self.output, self.name = output, name
        self.units = f"{UNITS}/{plan_hash[:16]}"
        self._lease: lease.Lease | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_lease": None}  # a worker has no lease

    # --- places

    @property
    @abc.abstractmethod
    def plan_folder(self) -> Store:
        """Where the plan, its ledger and its notes are."""

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
        """Context manager: keeps other conversions out, makes what is staged one's own, and tidies up after those that
        were killed.

        Args:
          look: raises if something that has no lease is at work there, such as a job that outlived its command.

        Raises:
          HeldError: another conversion is at work.
        """
        with lease.hold(self.output, f"{self.name}.weightbeam-lease") as held:
            self._lease = held
            try:
                look()
                self.check_staged()
                held.check()
                self.claim()
                held.check()  # who took it away since then has claimed what was claimed here
                self.tidy()
                yield
            finally:
                self._lease = None
                self.leave()

    def stop(self) -> None:
        """Takes the place from whoever is at work there, workers elsewhere among them: no unit of theirs is begun any
        more, and nothing is published. What is done is kept for whoever goes on with it.

        Where someone else has taken the lease, he may not have claimed the place yet: this one's own is given up alone.
        """
        try:
            self._check_lease()
        except lease.HeldError:
            self.give_up()
            return
        self.claim()

    def check_free(self) -> None:
        """Raises HeldError if another conversion is at work; leaves everything as it is."""
        if self._lease is None:
            lease.check_free(self.output, f"{self.name}.weightbeam-lease")

    def _check_lease(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def is_held(self) -> bool:
        """Whether nobody has taken it away since `hold`."""
        return self._lease is not None and self._lease.is_mine()

    def check_staged(self) -> None:  # noqa: B027
        """Makes sure that what is staged here may be removed with all that lies in it.

        Raises:
          StorageError: something is mounted there.
        """

    @abc.abstractmethod
    def claim(self) -> None:
        """Makes what is staged here one's own: whoever had it can write and publish it no more."""

    @abc.abstractmethod
    def give_up(self) -> None:
        """Takes the place from its own workers, and touches nobody else's."""

    def tidy(self) -> None:  # noqa: B027
        """Removes what is left of earlier ones, and brings back what was on its way out when its successor died."""

    def clean(self) -> None:  # noqa: B027
        """Removes what is left beside a published result of a command that was ended while it cleaned up."""

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

    def look_there(self) -> None:  # noqa: B027
        """Notes what lies in the place, which may be replaced: what comes there later isn't. A bucket looks by itself."""

    @property
    def has_looked(self) -> bool:
        """Whether `look_there` noted what lies in the place."""
        return False

    def is_remains(self) -> bool:
        """Whether what lies in the place is what a conversion left that was thrown away, or that woke too late; others
        may have put something there since, see `unknown`.
        """
        return False

    def unknown(self) -> list[str]:
        """The files that others have put where this grows, and beginning anew would delete."""
        return []

    def is_staged(self) -> bool:
        """Whether the plan is there, so that units can be made."""
        return self.plan_folder.exists(PLAN)

    def is_complete(self) -> bool:
        """Whether only publishing is left."""
        return self.checkpoint.exists(self.marker)

    def is_public(self) -> bool:
        """Whether nothing of what was made is left to be published."""
        return not self.exists()

    def is_publishing(self) -> bool:
        """Whether somebody in this process may be waiting for the answer to what publishes it."""
        return False

    def check(self) -> None:
        """Makes sure that the place is still this one's.

        Raises:
          TakenOverError: it isn't.
        """
        if not self.is_staged():
            raise self.taken_over()

    def taken_over(self) -> TakenOverError:
        """The error that says so."""
        return TakenOverError(f"{self.plan_folder} was stopped, taken over by another conversion, or removed")

    @abc.abstractmethod
    def create(self, plan: bytes) -> None:
        """Begins anew: throws away what was staged, and makes the plan the last thing to be there."""

    @abc.abstractmethod
    def discard(self) -> None:
        """Throws away what was staged."""

    @property
    def plan(self) -> str:
        """The URL of the staged plan."""
        return self.plan_folder.path(PLAN)

    def read_plan(self) -> bytes:
        """The staged plan."""
        return self.plan_folder.read(PLAN)

    def write_plan(self, plan: bytes) -> None:
        """Stages the same plan again, to go on with it: the source may have moved."""
        self.plan_folder.write(PLAN, plan)

    # --- the ledger

    @property
    def ledger(self) -> Ledger:
        """Which units are done."""
        return Ledger(self.plan_folder, self.units)

    def enter(self, unit: int, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Enters a unit in the ledger; returns the entry that counts, this one or an earlier one.

        Raises:
          TakenOverError: the plan isn't the staged one any more.
        """
        name = f"{self.units}/{unit}.json"
        try:
            made = self.plan_folder.create(name, json.dumps(entry).encode())
        except FileNotFoundError as e:
            raise self.taken_over() from e
        self.check()
        return dict(entry) if made else json.loads(self.plan_folder.read(name))

    # --- workers elsewhere

    def note_worker(self, name: str) -> None:
        """Says that a worker is ready: it sees the plan, and can write here."""
        self.plan_folder.write(f"{WORKERS}/{name}", b"")

    def ready_workers(self) -> int:
        """How many workers have said so."""
        return len(self.plan_folder.list(f"{WORKERS}/"))

    def forget_workers(self) -> None:
        """Removes what workers of an earlier job have said."""
        self.plan_folder.delete_folder(WORKERS)

    def sweep(self, database: str = "") -> None:
        """Removes what was written in vain, since the place was taken over meanwhile: a unit's database below `items`,
        if one is named.
        """
        if database:
            self.items.delete_folder(database)

    def note_failure(self, text: str) -> str:
        """Keeps the story of a failure, if the place is still this one's; returns where."""
        self.check()
        self.plan_folder.write(FAILURE, text.encode())
        return self.plan_folder.path(FAILURE)

    # --- publishing

    def gather(self) -> None:  # noqa: B027
        """Brings what lies in `aside` to where it will be read."""

    def announce(self, files: Mapping[str, bytes]) -> None:  # noqa: B027
        """Says at once what will be put, of many files, by name: in a bucket each is noted before it is."""

    def check_place(self) -> None:  # noqa: B027
        """Makes sure that nobody else has put anything where a checkpoint grows that will be read there, in a bucket.

        Raises:
          StorageError: somebody has; says what, and all stays as it is.
        """

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
          StorageError: what is staged isn't a whole checkpoint, or isn't this one's any more; what is published stays
            as it is.
        """
