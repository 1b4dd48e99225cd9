"""What is staged in a bucket, where a marker publishes it.

A bucket has no renames. There large objects, whose names are random, lie where they will be read; every other object is
put together aside and copied to its name by the store, which refuses if the original is gone. The marker is copied last
and publishes:

    <output>/<name>.weightbeam-lease
    <output>/<name>.weightbeam/<id>/                plan, ledger, failure; `aside/`: what will be copied; `noted/`: what was
    <output>/<name>.weightbeam/claim.<id>/          the right to publish: the originals of the marker and of what goes with it
    <output>/<name>.weightbeam/deleting.claim.<id>/ while what is there is deleted: what all that is
    <output>/<name>/                                what will be read; no reader takes it for a checkpoint before its marker is there
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import google_crc32c

from weightbeam.formats.staging.links import SOURCE
from weightbeam.formats.staging.staging import ASIDE, ATTEMPT, ITEMS, MARK, MARKER, PLAN, Staging, TakenOverError
from weightbeam.formats.storage import File, StorageError, reason
from weightbeam.formats.storage.store import as_base64
from weightbeam.formats.text.printable import listed

if TYPE_CHECKING:
    from weightbeam.formats.storage.bucket import Bucket


LOG = logging.getLogger("weightbeam")
PLACE = re.compile("[0-9a-f]{16}")  # the id of a conversion's folder on the desk
CLAIM = re.compile(rf"claim\.{PLACE.pattern}/")
# what a conversion writes where it will be read; Orbax, which saves there at this moment, has databases of other names
OWN_ATTEMPT = re.compile(rf"{ITEMS}/{re.escape(ATTEMPT)}[0-9a-f]{{32,}}/")
REMAINS = re.compile(rf"{OWN_ATTEMPT.pattern}|{ITEMS}/(?:{SOURCE}/)?d/|{ITEMS}/{SOURCE}/manifest\.ocdbt$")
_STOPPED: set[str] = set()  # claims that this process has given up, whose threads may be at work still
_PUBLISHING: set[str] = set()  # claims whose markers this process has asked for
DELETING = "deleting."  # and a claim's name: what notes what is being deleted
FILES = "files.json"  # there: of what lies where it is read, or may be copied there yet
NOTED = "noted"  # in a place: the same of what is copied, a note each time
Content = tuple[str, int, str | None]  # by which a file is known again: its name, its size and its crc32c


class BucketStaging(Staging):
    """Staged where it will be read; the marker, which is written last, is what a reader looks for.

    Attributes:
      looked_for: the files without which others' readers take nothing for a model; they are deleted
        right after the marker, and copied after all others.
      written: the names of what units write where it will be read, which are random; None where they write nothing there.
    """

    output: Bucket
    grows_in_place = True
    looked_for: frozenset[str] = frozenset()
    written: re.Pattern[str] | None = REMAINS

    def __init__(self, output: Bucket, name: str, plan_hash: str):
        super().__init__(output, name, plan_hash)
        # of the place, of the right to publish from it, and of the plan when that was had
        self._id, self._claim, self._version = "", "", ""
        self._noted: set[Content] = set()  # in that place, by this one

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
    def plan_folder(self) -> Bucket:
        return self.desk / (self._id or next(iter(self._staged()), "new"))

    @property
    def aside(self) -> Bucket:
        return self.plan_folder / ASIDE

    @property
    def manifest(self) -> Bucket:
        return self.desk / self._claim / "merged"

    def attempt(self) -> str:
        return f"{self._id}{super().attempt()}"

    def is_own(self, attempt: str) -> bool:
        return bool(self._id) and attempt.startswith(self._id)

    def _staged(self) -> list[str]:
        """The places that have a plan."""
        return [name for name in self.desk.folders() if PLACE.fullmatch(name) and (self.desk / name).exists(PLAN)]

    def claim(self) -> None:
        # first that by which an owner sees that he is one; then what he has written until then
        for marker in (f"/{MARKER}", ""):
            claims = [file for file in self.desk.list("claim.") if CLAIM.match(file.name)]
            self.desk.delete_all([file for file in claims if file.name.endswith(marker)])
        self._claim, self._noted = f"claim.{uuid.uuid4().hex[:16]}", set()
        self.desk.write(f"{self._claim}/{MARKER}", MARK)
        self._id = next(iter(self._staged()), "")
        found = self.plan_folder.stat(PLAN) if self._id else None
        self._version = found.version if found else ""

    def stop(self) -> None:
        """Also takes back what others' readers look for, where the marker isn't there yet: nothing was published."""
        _STOPPED.add(self._claim)  # also where the bucket doesn't answer
        super().stop()
        if self.looked_for and self.is_held() and not self.is_complete():
            known = self._known(self._left())
            there = [file for file in self.final.list() if file.name in self.looked_for]
            self.final.delete_all([file for file in there if content_of(file) in known])

    def give_up(self) -> None:
        if self._claim:
            self.desk.delete(f"{self._claim}/{MARKER}")

    def clean(self) -> None:
        """Only what has no plan: that went first, and nobody takes the rest for his. Raises TakenOverError if the place
        isn't this one's any more.
        """
        left = [name for name in self._left() if not (self.desk / name).exists(PLAN)]
        self.check()
        for name in left:
            self.desk.delete_folder(name)

    def leave(self) -> None:
        with contextlib.suppress(OSError):
            if self._claim and not self.exists():
                for name in filter(None, (self._claim, self._id)):  # without a plan nobody goes on with what lies there
                    self.desk.delete_folder(name)

    def check(self) -> None:
        """One request: whoever takes a plan away has taken the claim before."""
        if not self._claim or self._claim in _STOPPED or not self.desk.exists(f"{self._claim}/{MARKER}"):
            raise self.taken_over()

    def exists(self) -> bool:
        return self.is_staged()

    def is_public(self) -> bool:
        """The marker is the publication; the plan lies there until all that it was made in is removed."""
        return self.is_complete() or not self.exists()

    def is_publishing(self) -> bool:
        return self._claim in _PUBLISHING

    def beside(self) -> Sequence[Bucket]:
        return [self.desk]

    def is_taken(self) -> bool:
        """Whether anything is there; where a plan is staged, anything that isn't of it."""
        return bool(self.unknown() if self.exists() else self.final.entries() or self.final.folders())

    def is_remains(self) -> bool:
        if self._left():
            return True
        names = [file.name for file in self.final.list()]
        return not names or (any(map(OWN_ATTEMPT.match, names)) and all(map(REMAINS.match, names)))

    def unknown(self) -> list[str]:
        """Those that aren't of what conversions have on the desk: neither noted, with this content, nor of units."""
        files = self.final.list()  # before what is known: that is noted first
        known = self._known(self._left())
        return [file.name for file in files if content_of(file) not in known and not self._is_written(file.name)]

    def _is_written(self, name: str) -> bool:
        return self.written is not None and bool(self.written.match(name))

    def _known(self, left: Iterable[str]) -> set[Content]:
        """What conversions that left so much on the desk may have where it will be read: what they had begun to copy
        there, and what they were about to delete.
        """
        known: set[Content] = set()
        for name in left:
            place = self.desk / name
            for note in [*(file.name for file in place.list(f"{NOTED}/")), FILES]:
                with contextlib.suppress(OSError, ValueError, TypeError):
                    known |= {(name, size, crc32c) for name, size, crc32c in json.loads(place.read(note))}
        return known

    def check_place(self) -> None:
        if (others := self.unknown()) and self.exists():  # else it is published, or nobody's any more
            raise StorageError(
                f"{self.final}: others have put there meanwhile: {listed(others)}; move it away, and go on with --resume"
            )

    def _left(self) -> list[str]:
        """What conversions have on the desk, but for claims; others' folders stay there."""
        return [
            name
            for name in self.desk.folders()
            if PLACE.fullmatch(name)
            or (name.startswith(DELETING) and CLAIM.fullmatch(f"{name.removeprefix(DELETING)}/"))
        ]

    def create(self, plan: bytes) -> None:
        if not self._claim:
            self.claim()
        self.discard()
        self._id, self._noted = uuid.uuid4().hex[:16], set()
        self._version = self.plan_folder.replace(PLAN, plan, None) or ""
        try:
            self.check()
        except StorageError:
            self.plan_folder.delete(PLAN, self._version)  # unless whoever took it over goes on with it by now
            raise

    def discard(self) -> None:
        """Throws away what was staged, and what is in its place: a bucket can't have both.

        Only what was listed while the place was this one's is deleted: whoever claims it then finds the plan, or else
        begins anew. What that is, is noted before: after a kill there is no record of it any more, and others may have put
        something beside what is left.
        """
        if not self._claim:
            self.claim()
        old = self._left()
        doomed = {*map(content_of, self.final.list()), *self._known(old)}
        note = f"{DELETING}{self._claim}"
        self.check()
        if doomed:
            (self.desk / note).write(FILES, json.dumps(sorted(doomed, key=str)).encode())
        try:
            self._take_plans(old)
        except TakenOverError:
            self.desk.delete_folder(note)
            raise
        self._delete(old)  # after it was interrupted the note is all that knows what lies there
        for name in (*old, note):
            self.desk.delete_folder(name)
        self._id = ""

    def _take_plans(self, old: Sequence[str]) -> None:
        """Deletes the plans that were staged: nobody goes on with them. Raises TakenOverError where the place isn't
        this one's any more, or somebody goes on with one.
        """
        plans = [self.desk.list(f"{name}/{PLAN}") for name in old]
        self.check()
        for found in plans:
            self.desk.delete_all(found)
        if any((self.desk / name).exists(PLAN) for name in old):
            raise self.taken_over()

    def _delete(self, old: Sequence[str]) -> None:
        """Deletes what is in the place, and what would be copied there. Raises TakenOverError where it isn't this one's
        any more.
        """
        for name in old:
            self.desk.delete_folder(f"{name}/{ASIDE}")
        files = self.final.list()
        self.check()
        markers = {self.marker, *(f"{folder}{MARKER}" for folder in (f"{ITEMS}/", ""))}
        for names in (markers, self.looked_for, {file.name for file in files} - markers - self.looked_for):
            self.final.delete_all([file for file in files if file.name in names])

    def write_plan(self, plan: bytes) -> None:
        if not self._claim:
            self.claim()
        if self._version:  # else there was none when the place was claimed
            self._version = self.plan_folder.replace(PLAN, plan, self._version) or ""
        if not self._version:
            raise self.taken_over()

    def enter(self, unit: int, entry: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return super().enter(unit, entry)
        except TakenOverError:
            if not self.is_staged():  # else whoever goes on with it has it
                self.plan_folder.delete_folder()
            raise

    def note_failure(self, text: str) -> str:
        if not self.is_staged():  # nobody would remove the story, which has paths of this machine
            raise self.taken_over()
        return super().note_failure(text)

    def gather(self) -> None:
        files = self.aside.list()
        self._note(map(content_of, files))
        self.check_place()
        try:
            self._bring(self.aside, [file for file in files if file.name not in self.looked_for])
            for name in sorted(self.looked_for & {file.name for file in files}):
                self.put(name, self.aside.read(name))  # as the marker: a stop takes the right to it away
        except OSError:
            self.check()  # who took the place over deletes what lies there
            raise

    def announce(self, files: Mapping[str, bytes]) -> None:
        self._note((name, len(data), as_base64(google_crc32c.value(data))) for name, data in files.items())

    def _note(self, contents: Iterable[Content]) -> None:
        """Notes what will be copied to where it is read: so it is known to be of this plan, whatever others put there.
        Raises TakenOverError where the place isn't this one's any more.
        """
        if new := {*contents} - self._noted:
            self.plan_folder.write(f"{NOTED}/{uuid.uuid4().hex}", json.dumps(sorted(new, key=str)).encode())
            self._noted |= new
        try:
            self.check()
        except TakenOverError:
            if not self.is_staged():  # nobody would remove it
                self.plan_folder.delete_folder()
            raise

    def _bring(self, source: Bucket, files: Sequence[File]) -> None:
        """Copies files, which are noted, to where they are read: over what an earlier attempt put there, and nothing else."""
        try:
            self.final.copy_all(source, files)
        except StorageError:
            known = self._known(self._left())
            there = {file.name: file for file in self.final.list() if content_of(file) in known}
            for file in files:
                if file.name in there and not there[file.name].is_copy_of(file):
                    self.final.copy_over(source, file, there[file.name])
            self.final.copy_all(source, files)

    def put(self, name: str, data: bytes) -> None:
        claim = self.desk / self._claim
        if not claim.exists(MARKER):
            raise self.taken_over()
        if name != MARKER:  # which lies there
            claim.write(name, data)
        original = claim.stat(name)
        try:
            if original is None:
                raise self.taken_over()
            self._note([content_of(original)])
            if name == self.marker:
                _PUBLISHING.add(self._claim)
            self._bring(claim, [original])
        except StorageError as e:
            if claim.exists(MARKER):
                raise
            claim.delete_folder()  # nobody else's
            raise self.taken_over() from e

    def publish(self, overwrite: bool = False) -> None:
        """The marker was the publication; what is left to do is to clean up."""
        if not self.is_complete():
            raise self.taken_over()
        for name in filter(None, (self._claim, self._id)):  # in the order in which `check` looks at them
            try:
                self.desk.delete(f"{name}/{PLAN}")
                self.desk.delete_folder(name)
            except OSError as e:
                LOG.warning("%s is published; what it was made in can't be removed: %s", self.final, reason(e))


def content_of(file: File) -> Content:
    """What a file is known by."""
    return file.name, file.size, file.crc32c
