"""What is written: an Orbax checkpoint, a release, or what else somebody registers (`TARGETS` in `__init__.py`).

A target knows the result as it will be, and nothing of where its values come from. Its place is a folder or a bucket
(`formats/staging/`), where it grows unseen until it is published whole:

    place ─▸ prepare ─▸ write, write, …, by many at a time, in any order, repeated or not ─▸ assemble
"""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from weightbeam.formats.staging import Staging
from weightbeam.formats.storage import StorageError, Store

PlaceT = TypeVar("PlaceT", bound=Staging)
# What the ledger's entries add to the record, by unit; it raises where they speak against publishing.
Conclude = Callable[[Mapping[int, Mapping[str, Any]]], Mapping[str, Any]]


def nothing(ledger: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """What a ledger adds that has nothing to say."""
    return {}


class Target(abc.ABC, Generic[PlaceT]):
    """The result of a transfer, as it will be.

    Attributes:
      name: what it is, in one word.
      beside: how else a result gets there than by replacing what is there.
      another: what else may be chosen where its place can't be taken.

    Example:
      >>> from weightbeam.formats.targets import TARGETS  # the table that a new target gets a row in
      >>> for each in TARGETS.values():
      ...     print(f"{each.name}: {len(each.__abstractmethods__)} methods are left to be written")
      orbax: 0 methods are left to be written
      release: 0 methods are left to be written
    """

    name: ClassVar[str]
    another: ClassVar[str]
    beside: ClassVar[str] = ""

    @property
    @abc.abstractmethod
    def identity(self) -> list[Any]:
        """What of it a plan's hash has, as JSON: names, and how it is cut."""

    # --- it is written

    @abc.abstractmethod
    def place(self, output: str, plan_hash: str) -> PlaceT:
        """Where it is written. Looks at nothing.

        Args:
          output: the folder or URL that the user names.
          plan_hash: of the plan that makes it, in hexadecimal: what a stopped command left is told by it.

        Returns:
          The place, where it grows unseen.

        Raises:
          StorageError: nothing can be written there.
        """

    @abc.abstractmethod
    def prepare(self, place: PlaceT) -> None:
        """Puts there what has to be there before the first unit.

        Args:
          place: where; it may have been prepared before.

        Raises:
          StorageError: it can't be written.
        """

    def find_changed(self, place: PlaceT) -> list[int]:
        """The units whose files aren't as they were written, as far as that costs no read of them; before somebody goes
        on with what was staged.

        Args:
          place: where.

        Returns:
          Their numbers; none where nothing is known of the files.
        """
        return []

    @abc.abstractmethod
    def write(
        self,
        place: PlaceT,
        unit: int,
        parts: Sequence[Any],
        notes: Mapping[str, Any] | None = None,
        copies: Sequence[Any] = (),
    ) -> None:
        """Writes what a unit has made durably, and enters the unit in the ledger. Any number of attempts may.

        Args:
          place: where.
          unit: its number.
          parts: what it has made: of what, the box of it, and the values.
          notes: what the ledger's entry says beside.
          copies: chunks that are encoded already, where the target has any.

        Raises:
          StorageError: something can't be written.
        """

    def assemble(
        self,
        place: PlaceT,
        units: int,
        record: Mapping[str, Any],
        overwrite: bool = False,
        conclude: Conclude = nothing,
    ) -> None:
        """Makes one result of the units that are done, and publishes it. Does nothing where that has happened.

        Args:
          place: where.
          units: how many the plan has; they are numbered from 0.
          record: where it comes from.
          overwrite: replace what has the same place.
          conclude: what the ledger adds to the record.

        Raises:
          IncompleteError: units are missing, or don't hold what they should.
          StorageError: units were withdrawn, or the result can't be published.
        """
        if not place.exists() and place.is_taken():
            return
        place.check_place()
        self.complete(place, units, record, conclude)
        looks = overwrite and place.has_looked and place.is_taken()
        if looks and (why := self.why_not_replace(place)):  # of a bucket `check_place` looks
            raise StorageError(f"{place.final}: {why}")  # others' files would go with it by now
        place.publish(overwrite)

    def complete(self, place: PlaceT, units: int, record: Mapping[str, Any], conclude: Conclude) -> None:
        """Makes what is staged whole, by reference where the medium can; it may be already. A target that says `assemble`
        itself needs none.

        Args:
          place: where.
          units: how many the plan has.
          record: where it comes from.
          conclude: what the ledger adds to the record.

        Raises:
          IncompleteError: units are missing, or don't hold what they should.
          StorageError: units were withdrawn, or something can't be written.
        """
        raise NotImplementedError

    # --- it is there

    @staticmethod
    @abc.abstractmethod
    def record_of(folder: Store) -> Mapping[str, Any]:
        """What a published one says of where it comes from.

        Args:
          folder: that may be one.

        Returns:
          Its record; empty where there is none of ours.
        """

    @staticmethod
    @abc.abstractmethod
    def made_by(folder: Store) -> str | None:
        """The plan that a published one was made by.

        Args:
          folder: that may be one.

        Returns:
          The plan's hash, in hexadecimal; None where it isn't whole, or isn't ours.
        """

    def find_damage(self, place: PlaceT) -> str:
        """What is wrong with a published one.

        Args:
          place: where it was written.

        Returns:
          The first thing that is found, in words; empty where nothing is.
        """
        return ""

    # --- it may be written: each in words of what stands against it, empty where nothing does

    def find_unfit(self, place: PlaceT) -> tuple[str, str] | None:
        """What is in the way of its ever lying there.

        Args:
          place: where it would lie.

        Returns:
          The place, and why not; None where nothing is in the way.

        Raises:
          StorageError: the same, from a store.
        """
        return None

    @abc.abstractmethod
    def find_overlap(self, place: PlaceT, inputs: Iterable[str], swaps: bool = False) -> str:
        """Why it can't lie where its inputs do, or they would be deleted with what is there; or among the files of
        something else, as which its folder would be read.

        Args:
          place: where it would lie.
          inputs: URLs of folders and files.
          swaps: what is there is replaced at once, when nothing of it is needed any more.

        Returns:
          The reason, in words; empty where it can.
        """

    @abc.abstractmethod
    def why_not_replace(self, place: PlaceT) -> str:
        """Why what lies in its place, whatever that is, can't be replaced.

        Args:
          place: where it would lie.

        Returns:
          The reason, in words; empty where it can be, or where nothing lies there.
        """

    def why_not_discard(self, place: PlaceT) -> str:
        """Why what a stopped command left can't be thrown away.

        Args:
          place: where it lies.

        Returns:
          What of others' would go with it, in words; empty where nothing would.
        """
        return ""

    @abc.abstractmethod
    def bytes_left(self, place: PlaceT, made_bytes: int, resume: bool) -> int:
        """What a command still has to write.

        Args:
          place: where.
          made_bytes: of the whole result.
          resume: whether the command goes on with what is staged there.

        Returns:
          Bytes that are still to be written.
        """


def lies_in(url: str, other: str) -> bool:
    """Whether a folder or file is another one or lies in it, links resolved; a folder around both that is mounted twice is
    one, but not a folder in the other that is mounted elsewhere.
    """
    if "://" in url or "://" in other:
        return f"{url}/".startswith(f"{other}/")
    here, there = Path(os.path.realpath(url)), Path(os.path.realpath(other))
    return here.is_relative_to(there) or (
        there.exists() and any(place.exists() and place.samefile(there) for place in (here, *here.parents))
    )
