"""What is settled of a run's steps, by the names of empty files: one listing tells it of thousands of steps.

<records>/marks/published~1767225600000~1000~3f2a~9c01d2e4b7aa~hf-4711    step 1000 is published
<records>/marks/open~hf-4712                                               this history isn't settled yet
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Iterator

from weightbeam.formats.storage import Store
from weightbeam.pipelines.watching.records import State

MARKS, OPEN = "marks", "open"
ASIDE = "aside"  # in a mark: published, but never the newest

Listed = Collection[tuple[int, str]]  # the steps that a run has: the number of each, and what a listing shows of it


@dataclasses.dataclass(frozen=True, order=True)
class Mark:
    """The name of a file that says what is settled.

    Attributes:
      updated: when the step was committed, in milliseconds since 1970.
      step, seen: which, as a listing of the run shows it.
      state: of the history; or that it is published aside.
      asked: identifies the target's options.
      key: of the history.
    """

    updated: int
    step: int
    seen: str
    state: str
    asked: str
    key: str

    @classmethod
    def parse(cls, name: str) -> Mark | None:
        """Reads a name; None where it is another file's."""
        try:
            state, updated, step, seen, asked, key = name.split("~")
            mark = cls(int(updated), int(step), seen, state, asked, key)
        except ValueError:
            return None
        return mark if state in (*State, ASIDE) else None  # not a file that was being made when its watcher was killed

    def __str__(self) -> str:
        return "~".join([self.state, str(self.updated), str(self.step), self.seen, self.asked, self.key])

    @property
    def listed(self) -> tuple[int, str]:
        """The step, as a listing has it."""
        return self.step, self.seen


class Marks:
    """The marks of a run, as they were read last.

    Attributes:
      open: the keys of the histories that aren't settled.
    """

    def __init__(self, records: Store):
        self._folder = records / MARKS
        self._marks: set[Mark] = set()
        self.open: set[str] = set()

    def read(self) -> None:
        """Reads them, by one listing."""
        names = [file.name for file in self._folder.list(recursive=False)]
        self._marks = {mark for name in names if (mark := Mark.parse(name))}
        self.open = {key for name in names if (key := name.removeprefix(f"{OPEN}~")) != name}

    def __iter__(self) -> Iterator[Mark]:
        return iter(self._marks)

    def __bool__(self) -> bool:
        return bool(self._marks)

    def begin(self, key: str) -> None:
        """Notes that a history isn't settled."""
        self._folder.make()
        self._folder.create(f"{OPEN}~{key}", b"")

    def end(self, key: str) -> None:
        """Notes that a history is settled, once its mark says how."""
        with contextlib.suppress(OSError):
            self._folder.delete(f"{OPEN}~{key}")

    def add(self, mark: Mark) -> None:
        """Makes a mark, and takes earlier ones of its history away."""
        self._folder.make()
        self._folder.create(str(mark), b"")
        for other in [other for other in self._marks if other.key == mark.key and other != mark]:
            self._folder.delete(str(other))
            self._marks.discard(other)
        self._marks.add(mark)

    def forget(self, key: str) -> None:
        """Takes the marks of a history away: it isn't settled any more."""
        for mark in [mark for mark in self._marks if mark.key == key]:
            self._folder.delete(str(mark))

    def settled(self) -> defaultdict[tuple[int, str], set[str]]:
        """What was asked of each step and is settled; one that was gone may be there again."""
        asked = defaultdict[tuple[int, str], set[str]](set)
        for mark in self._marks:
            if mark.state != State.GONE:
                asked[mark.listed].add(mark.asked)
        return asked

    def of(self, target: str, *states: str) -> list[Mark]:
        """The marks of a target's histories in some states, one state after the other; unless said, of the published."""
        ours = [mark for mark in self._marks if mark.key.rpartition("-")[0] == target]
        return [mark for state in states or (State.PUBLISHED,) for mark in ours if mark.state == state]

    def all_but_last(self, last: int, target: str, there: Listed, state: str) -> list[Mark]:
        """Those of all but the last steps, the oldest first: by when they were committed, but none that is there behind one
        of a higher number that is, too, since a clock may have been wrong. A step that was published twice, as with other
        options, is one.
        """
        found = self.of(target, state)
        latest, when = math.inf, dict[Mark, float]()
        for mark in sorted(found, key=lambda mark: mark.step, reverse=True):
            if mark.listed in there:
                latest = min(latest, mark.updated)
            when[mark] = latest if mark.listed in there else mark.updated
        found.sort(key=lambda mark: (when[mark], mark.step, mark))
        steps = {*list(dict.fromkeys((mark.updated, mark.listed) for mark in found))[:-last]}
        return [mark for mark in found if (mark.updated, mark.listed) in steps]
