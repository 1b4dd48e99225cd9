"""A feed: where versions come from, and what is made of each. The hub's models are one, a training run is another."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import datetime
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from weightbeam.formats.storage import Store
from weightbeam.formats.storage.strict_json import JsonError, parse_json
from weightbeam.formats.storage.uninterrupted import uninterrupted
from weightbeam.pipelines.watching.config import RunTarget, TargetConfig
from weightbeam.pipelines.watching.isolation import Task, Workers
from weightbeam.pipelines.watching.notices import warn
from weightbeam.pipelines.watching.records import ROOT, History, Record, histories, key_of
from weightbeam.pipelines.watching.releases import ReleaseCommit
from weightbeam.pipelines.watching.runs import RunStep

# What a feed has, and what it is made into. A watcher goes by what both have of either: `name`, `commit`, `weights`,
# `updated`, `url` and `facts` of a version; `name`, `arguments` and `facts` of a target.
Version = ReleaseCommit | RunStep
VersionTarget = TargetConfig | RunTarget
VersionT = TypeVar("VersionT", bound=Version)
TargetT = TypeVar("TargetT", bound=VersionTarget)


@dataclasses.dataclass(frozen=True)
class Waiting:
    """A version isn't ready.

    Attributes:
      reason: what it waits for.
      again: when to look again, if that is known.
    """

    reason: str
    again: datetime.datetime | None = None


def point(output: Store, pointer: str, newest: Callable[[], tuple[str, bytes] | None]) -> bool:
    """Has a file of the output be the report of the newest result, also if another watcher publishes at this moment;
    returns whether it was another one. `newest` says where that lies by now, and its report. Somebody's file stays.
    """
    path, is_told = output.path(pointer), False
    while not is_told:
        before = output.stat(pointer)
        if (found := newest()) is None or (there := read_if_there(output, pointer)) == found[1]:
            return False
        url, report = found
        if there is not None and not _is_pointer(there):
            warn(
                f"{path} isn't Weightbeam's, and isn't replaced: it doesn't name {url}, which is the newest; move it away"
            )
            return False
        write = functools.partial(output.write_over, pointer, report, before)
        is_told = uninterrupted(write, lambda _: "", f"{path} was being written")
    return True


def _is_pointer(data: bytes) -> bool:
    """Whether a file that has the name of a target's newest result is one of ours."""
    try:
        return isinstance(parse_json(data)["checkpoint"], str)
    except (JsonError, LookupError, TypeError):
        return False


def read_if_there(output: Store, name: str) -> bytes | None:
    """The bytes of a file; None where there is none."""
    try:
        return output.read(name)
    except FileNotFoundError:
        return None


class Feed(abc.ABC, Generic[VersionT, TargetT]):
    """Versions, and what is made of each. The watcher calls its methods in this order:

        a look          names ▸ histories ▸ mend ▸ versions ▸ each version ▸ tidy ▸ rest
        a version       history ▸ judge ▸ what was begun ▸ mend ▸ begun, or reopened, or is_replaced ▸ its work
        what was begun  at another version: target ▸ goes_on ▸ its work; or is_given_up ▸ clear ▸ settled
        its work        apart ▸ is_gone ▸ source ▸ plan ▸ place ▸ published_before ▸ is_made ▸ tasks ▸ judgement
                        ▸ withheld ▸ publish ▸ notice ▸ announce ▸ settled
        a dry run       history ▸ judge ▸ plan ▸ foresee, for each version of a look
        --retry         histories ▸ clear ▸ reopened

    `is_…`, `judge`, `goes_on` and `withheld` only answer; `begun`, `reopened`, `settled` and `rest` take note. Whatever is
    asked for raises StorageError where it can't be told.

    Attributes:
      output: where the records lie, below `root`.
      plans_anew: whether what was planned is planned again before it is gone on with, since a task makes a plan of its own.
    """

    output: Store
    root = ROOT
    plans_anew = False

    # --- what there is

    @property
    @abc.abstractmethod
    def targets(self) -> Collection[TargetT]:
        """What each version is made into."""

    @abc.abstractmethod
    def names(self) -> tuple[list[str], list[str]]:
        """What there are versions of, or may come to be; and why some of it can't be listed."""

    @abc.abstractmethod
    def is_wanted(self, name: str) -> bool:
        """Whether that name is one of this feed's."""

    @abc.abstractmethod
    def versions(self, name: str) -> Iterable[VersionT]:
        """What is there now and may need something, the most urgent first."""

    def waits_for(self, name: str) -> str | None:
        """What it waits for where there has been no version at all; None where there was one."""
        return None

    def judge(self, version: VersionT) -> list[str] | Waiting:
        """What stands against a version, or what it waits for."""
        return []

    # --- what was done

    def history(self, version: VersionT, target: TargetT) -> History:
        """The history of a version and a target, begun or not."""
        return History(self.output, version.name, key_of(version.name, version.weights, target), self.root)

    def histories(self, name: str, every: bool = False) -> list[History]:
        """Those that were begun and may need something, or every one."""
        return histories(self.output, name, self.root)

    def target(self, history: History) -> TargetT | None:
        """The target that a history was begun for; None where it isn't asked for any more."""
        if not history.records:
            return None
        weights = history.first["weights"]
        return next((each for each in self.targets if history.key == key_of(history.name, weights, each)), None)

    def goes_on(self, history: History) -> bool:
        """Whether a history is gone on with though its version isn't the one that is there now."""
        return True

    def is_given_up(self, history: History) -> bool:
        """Whether nobody will go on with a history that has no target any more, so that what it has staged is of no use."""
        return False

    def why_begun(self, version: VersionT) -> str | None:
        """What is worth saying of a version that is seen for the first time."""
        return None

    def begun(self, history: History) -> None:
        """Takes note of a history that was just begun."""

    def settled(self, history: History) -> None:
        """Takes note of a history for which nothing is left to be done."""

    def reopened(self, history: History) -> None:
        """Takes note of a history that begins anew."""

    def mend(self, name: str, known: Collection[History], version: VersionT | None = None) -> None:
        """Puts right what a watcher has left undone that was ended between two steps; and what isn't so any more, once the
        version that is there now is known.
        """

    # --- what is done

    def apart(self) -> contextlib.AbstractContextManager[Workers]:
        """The processes in which a version's tasks are done: its own."""
        return Workers()

    def rest(self) -> None:
        """Takes note that a look is over."""

    @abc.abstractmethod
    def source(self, history: History) -> str:
        """The URL that a version is read from."""

    @abc.abstractmethod
    def plan(self, source: str, target: TargetT) -> Task:
        """Plans; among the facts are the `plan`'s hash and what `foresee` needs."""

    @abc.abstractmethod
    def foresee(self, target: TargetT, facts: Mapping[str, Any]) -> str:
        """What carrying such a plan out would come to: `converted: 39.2 KB, llama`."""

    @abc.abstractmethod
    def place(self, history: History, plan: str) -> str:
        """Where the result goes. Another plan has another place: what others may be reading is never replaced."""

    def published_before(self, history: History) -> str | None:
        """Where a planned version was published before, by the same plan, if nothing is left to be done: the
        tables of Weightbeam may have changed for others, or an option that changes nothing.
        """
        return None

    @abc.abstractmethod
    def is_made(self, history: History) -> bool:
        """Whether the result is there and was compared, so that it can be published."""

    @abc.abstractmethod
    def tasks(self, history: History, target: TargetT) -> Iterator[tuple[Task, ...]]:
        """What is done from the plan to a result that was compared with its source, in this order; some of it at the
        same time. Raises Failed where what is needed for that can't be told.
        """

    def judgement(self, facts: Mapping[str, Any]) -> str | None:
        """What the record of a result says that wasn't compared."""
        return None if facts.get("verified") else "not compared: verify is 0"

    def withheld(self, history: History, target: TargetT) -> str | None:
        """Why a result isn't published though it is what it should be; None where it is."""
        return None

    def notice(self, history: History) -> str | None:
        """What is worth knowing of a result that is published."""
        return None

    @abc.abstractmethod
    def publish(self, history: History) -> dict[str, Any]:
        """Lets readers see the result; returns what the record says of it, `NOTE` what is worth knowing. Done again, it
        changes nothing.
        """

    def announce(self, history: History, target: TargetT) -> Sequence[Record]:
        """Does what is left once the record says that it is published; returns records of others whose state that
        changed. Done again, it changes nothing.
        """
        return ()

    def tidy(self) -> Sequence[Record]:
        """Does at the end of a look what a watcher that was stopped in `announce` has left; returns such records."""
        return ()

    def is_gone(self, history: History, patient: bool = False) -> str | None:
        """Why a version can't be read any more; None where it can be. `patient`: something has just failed, it may be
        going.
        """
        return None

    def is_replaced(self, history: History) -> bool:
        """Whether the commit of a history is none any more, so that another one with the same weights stands for it."""
        return False

    def clear(self, history: History) -> None:
        """Removes what was staged of a version that can't be gone on with."""
