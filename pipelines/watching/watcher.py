"""The watcher: takes each version of its feeds through its states, one after the other, and does nothing twice."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from weightbeam.formats.staging.lease import HeldError
from weightbeam.formats.storage import StorageError, reason
from weightbeam.formats.storage.local import IRREGULAR
from weightbeam.formats.storage.uninterrupted import PUBLISHED
from weightbeam.pipelines.terminal.errors import Failed
from weightbeam.pipelines.watching.config import WatchConfig
from weightbeam.pipelines.watching.feed import Feed, Version, VersionTarget, Waiting
from weightbeam.pipelines.watching.isolation import PLAN_SECONDS, Outcome, Status, Task, Workers
from weightbeam.pipelines.watching.notices import Notices, note, warn
from weightbeam.pipelines.watching.records import (
    NOTE,
    SETTLED,
    SKEW,
    DamagedRecordError,
    History,
    LostError,
    State,
    now,
)

# states in which a version may still be read by its commit: another one with the same weights may take its place
UNREAD = (State.DISCOVERED, State.PLANNED, State.CONVERTING, State.FAILED, State.REFUSED)
WAITING, BUSY = "waiting", "busy"  # what isn't recorded: it will be looked at again
REASON = 5000  # characters of a record
LONGEST_DELAY = datetime.timedelta(days=1)
# what the system says where a file lies in the place of a folder, or a folder or a link to itself in that of a file
IN_THE_WAY = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)


@dataclasses.dataclass(frozen=True)
class Finding:
    """How things stand with a version and a target.

    Attributes:
      repo: what it is a version of: the repository, the run; empty where none can be told.
      commit, target: of which version, and what it is made into; empty where all of them are meant.
      state: what its last record says; or `waiting` or `busy`, which isn't recorded.
      reason: why.
      again: when to look again, if that is known.
      place: where the result lies, once it is published.
    """

    repo: str
    commit: str
    target: str
    state: str
    reason: str = ""
    again: datetime.datetime | None = None
    place: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return dataclasses.asdict(self) | {"again": self.again and self.again.isoformat()}


class Watcher:
    """Makes of each feed's versions what a configuration asks for."""

    def __init__(self, config: WatchConfig, feeds: Sequence[Feed], notices: Notices, dry_run: bool = False):
        self.config, self.feeds, self._notices, self._dry_run = config, feeds, notices, dry_run

    def once(self, names: Iterable[str] | None = None) -> list[Finding]:
        """Looks at all that the feeds name, or at these, and does what there is to do; returns how things stand then.

        Raises:
          StorageError: the output can't be read or written.
        """
        problems: list[str] = []
        found: list[tuple[Feed, str]] = []
        for feed in self.feeds:
            there, wrong = feed.names() if names is None else ([name for name in names if feed.is_wanted(name)], [])
            found += [(feed, name) for name in there]
            problems += wrong
        for problem in problems:
            warn(problem)
        return [Finding("", "", "", State.FAILED, problem) for problem in problems] + [
            finding for feed, name in found for finding in self._look(feed, name)
        ]

    def retry(self, name: str) -> list[Finding]:
        """Has everything of a model or a run that was refused, held back or failed begin anew, at the next look; but for
        targets that aren't there any more.

        Raises:
          LostError: another watcher has just gone on with one of them.
          StorageError: the output can't be read or written.
        """
        wanted = [feed for feed in self.feeds if feed.is_wanted(name)]
        found = [(feed, history) for feed in wanted for history in feed.histories(name, every=True)]
        again = []
        for feed, history in found:
            if history.state not in (State.REFUSED, State.HELD, State.FAILED):
                continue
            if history.first["target"] not in {target.name for target in feed.targets}:
                continue
            try:
                with history.alone():
                    if history.state in (State.REFUSED, State.HELD, State.FAILED):  # else someone has just asked for it
                        if history.state == State.REFUSED:  # what was staged may be what stood against it
                            feed.clear(history)
                        self._notices.tell(history.add(State.DISCOVERED, "asked for again", attempt=0))
                        feed.reopened(history)
            except HeldError as e:
                raise LostError(str(e)) from e
            again.append(_finding(history))
        return again

    def _look(self, feed: Feed, name: str) -> Iterator[Finding]:
        try:
            yield from self._look_through(feed, name)
        except StorageError:  # of the output as a whole
            raise
        except OSError as e:  # of a file of this one
            why = ": ".join(filter(None, (e.filename2 or e.filename, reason(e))))
            if e.errno in IN_THE_WAY or e.strerror == IRREGULAR:
                why += "; what is in the way isn't Weightbeam's, move it away"
            warn(f"{name}: {why}")
            yield Finding(name, "", "", State.FAILED, why)
        finally:
            feed.rest()

    def _look_through(self, feed: Feed, name: str) -> Iterator[Finding]:
        known = {history.key: history for history in feed.histories(name)}
        there = False
        try:
            if not self._dry_run:
                feed.mend(name, known.values())
            for version in feed.versions(name):
                there = True
                yield from self._look_at(feed, version, known)
            if not there:
                yield from self._go_on(feed, known.values(), ())
                if why := feed.waits_for(name):
                    yield Finding(name, "", "", WAITING, why)
            if not self._dry_run:
                for record in feed.tidy():
                    self._notices.tell(record)
        except StorageError as e:
            warn(str(e))
            yield Finding(name, "", "", State.FAILED, str(e))

    def _look_at(self, feed: Feed, version: Version, known: dict[str, History]) -> Iterator[Finding]:
        """Takes a version as far as it can be brought, and those that were begun before."""
        current: dict[str, tuple[History, VersionTarget]] = {}
        for target in feed.targets:
            try:
                history = feed.history(version, target)
            except DamagedRecordError as e:
                warn(str(e))
                yield Finding(version.name, version.commit, "", State.FAILED, str(e))
                continue
            current[history.key] = (known.setdefault(history.key, history), target)
        is_settled = all(history.state == State.PUBLISHED for history, _ in current.values())
        verdict = [] if is_settled else feed.judge(version)
        waits = isinstance(verdict, Waiting)
        yield from self._go_on(
            feed, [history for history in known.values() if history.records], () if waits else current
        )
        if not self._dry_run:
            feed.mend(version.name, known.values(), version)
        if isinstance(verdict, Waiting):
            finding = Finding(version.name, version.commit, "", WAITING, verdict.reason, verdict.again)
            note(finding.to_dict())
            yield finding
            return
        for history, target in current.values():
            denied = "; ".join(verdict)
            yield _unless_damaged(history, version.commit, self._take, feed, history, version, target, denied)

    def _go_on(self, feed: Feed, known: Collection[History], current: Collection[str]) -> Iterator[Finding]:
        """Goes on with what was begun at another version; what was asked for then is still asked for."""
        for history in known:
            if history.key in current or history.state in SETTLED:
                continue
            if (target := feed.target(history)) is None:
                if history.records and feed.is_given_up(history):
                    yield _unless_damaged(history, history.last["commit"], self._give_up, feed, history)
            elif feed.goes_on(history) and not self._is_over(history, known):
                yield _unless_damaged(history, history.last["commit"], self._advance, feed, history, target)

    def _give_up(self, feed: Feed, history: History) -> Finding:
        """Leaves nothing of what was begun, unless somebody is at work on it."""
        if not self._dry_run:
            with contextlib.suppress(HeldError, LostError), history.alone():
                if history.state not in SETTLED:
                    self._say_gone(feed, history, "its target makes something else now")
                feed.settled(history)
        return _finding(history)

    def _is_over(self, history: History, known: Iterable[History]) -> bool:
        """Whether nothing is to be done about one that failed: it isn't tried again, and a later version is published."""
        return (history.state == State.FAILED and self._due(history) is None) and any(
            other.state == State.PUBLISHED
            and other.first["target"] == history.first["target"]
            and other.first["time"] > history.first["time"]
            for other in known
        )

    def _take(self, feed: Feed, history: History, version: Version, target: VersionTarget, denied: str) -> Finding:
        """One version for one target, as far as it can be brought; see `_advance`."""
        if self._dry_run:
            return self._foresee(feed, history, version, target, denied)
        try:
            if not history.records:
                self._notices.tell(history.begin(version, target, feed.why_begun(version)))
                feed.begun(history)
            elif _is_back(feed, history):
                self._notices.tell(history.add(State.DISCOVERED, "it is there again", attempt=0))
                feed.reopened(history)
            elif history.facts["commit"] != version.commit:
                if history.state in UNREAD and feed.is_replaced(history):
                    self._replace(history, version)
                elif record := history.mark_same(version.commit):
                    self._notices.tell(record)
            if (
                denied
                and history.state in (State.DISCOVERED, State.PLANNED, State.FAILED, State.REFUSED)
                and history.last.get("reason") != denied
            ):
                self._notices.tell(history.add(State.REFUSED, denied, by_hub=True))
            elif not denied and history.state == State.REFUSED and history.last.get("by_hub"):
                self._notices.tell(history.add(State.DISCOVERED, "what it was refused for is no more"))
        except LostError:
            history.refresh()
        return self._advance(feed, history, target)

    def _replace(self, history: History, version: Version) -> None:
        """Has a version whose commit is gone go on with another one of the same weights, unless somebody is at work."""
        with contextlib.suppress(HeldError), history.alone():
            was = history.facts["commit"]
            if history.state in UNREAD and was != version.commit:
                why = f"commit {was[:12]} is gone, and {version.commit[:12]} has the same weights"
                self._notices.tell(history.add(State.DISCOVERED, why, commit=version.commit, attempt=0))

    def _advance(self, feed: Feed, history: History, target: VersionTarget) -> Finding:
        """Does what the state asks for. Raises DamagedRecordError where a record of another watcher isn't one."""
        if self._dry_run:
            return _finding(history)
        if history.state in SETTLED:
            feed.settled(history)
            return _finding(history)
        if (
            history.state == State.FAILED
            and ((due := self._due(history)) is None or due > now())
            and not feed.is_gone(history)
        ):
            return dataclasses.replace(_finding(history), again=due)
        try:
            with history.alone(), feed.apart() as apart:
                if history.state not in SETTLED:  # else someone has just done it
                    try:
                        self._work(feed, history, target, apart)
                    except KeyboardInterrupt:  # a stop that was asked for isn't the version's fault
                        if history.state == State.CONVERTING:
                            # another watcher has said so, or gone on; this one stops all the same
                            with contextlib.suppress(LostError):
                                history.add(State.PLANNED, "stopped on the way", attempt=history.attempt - 1)
                        raise
                if history.state in SETTLED:
                    feed.settled(history)
        except HeldError as e:
            return dataclasses.replace(_finding(history), state=BUSY, reason=str(e))
        except LostError as e:
            warn(str(e))
            history.refresh()
        return dataclasses.replace(
            _finding(history), again=self._due(history) if history.state == State.FAILED else None
        )

    def _due(self, history: History) -> datetime.datetime | None:
        """When a failed one is tried again; None if it isn't.

        A record of the future is of a clock that was set back since: how long ago it was made can't be told, and it is
        tried again at once. One of the next moment is another machine's, and counts as just made.
        """
        if history.attempt >= self.config.attempts:
            return None
        made = datetime.datetime.fromisoformat(history.last["time"])
        if made > now() + SKEW:
            return now()
        delay = datetime.timedelta(minutes=self.config.retry_minutes) * 2 ** min(history.attempt - 1, 20)
        return min(made, now()) + min(delay, LONGEST_DELAY)

    # --- the steps, with the lease held

    def _work(self, feed: Feed, history: History, target: VersionTarget, apart: Workers) -> None:
        """Plans, makes and publishes a version, as far as it comes; each step is recorded."""
        attempt = history.attempt + 1
        if (why := feed.is_gone(history)) and not feed.is_made(history):
            self._say_gone(feed, history, why)
            return
        if history.state == State.CONVERTING and attempt > self.config.attempts:
            self._fail(
                history, f"begun {history.attempt} times, and never ended: was the machine too small?", history.attempt
            )
            return
        try:
            if not self._plan(feed, history, target, apart, attempt):
                return
            if not feed.is_made(history) and not self._make(feed, history, target, apart, attempt):
                return
            if why := feed.withheld(history, target):
                feed.clear(history)
                self._notices.tell(history.add(State.HELD, why))
                return
            said = feed.publish(history)
        except Failed as e:
            self._fail(history, str(e), attempt)
            return
        note = said.pop(NOTE, None) or feed.notice(history)
        self._notices.tell(history.add(State.PUBLISHED, note, **said))
        PUBLISHED.clear()  # it is told
        for record in feed.announce(history, target):
            self._notices.tell(record)

    def _plan(self, feed: Feed, history: History, target: VersionTarget, apart: Workers, attempt: int) -> bool:
        """Plans a version that isn't planned, or whose plan may be another one by now; returns whether it is to be made. If
        not, why is recorded.
        """
        goes_on = history.state in (State.PLANNED, State.CONVERTING) and not history.last.get(BUSY)
        before = history.facts.get("plan") if goes_on else None
        if history.state not in (State.DISCOVERED, State.FAILED) and not (before and feed.plans_anew):
            return True
        task = feed.plan(feed.source(history), target)
        outcome = apart.run(task, PLAN_SECONDS)
        if outcome.status != Status.DONE:
            if why := feed.is_gone(history, patient=True):
                self._say_gone(feed, history, why)
            elif outcome.status == Status.REFUSED:
                self._notices.tell(history.add(State.REFUSED, outcome.message[:REASON]))
            else:
                self._fail(history, outcome.message, attempt)
            return False
        if (plan := outcome.facts["plan"]) != before:
            why = f"another plan than {before[:8]}, as since the table was written anew" if before else None
            self._notices.tell(history.add(State.PLANNED, why, checkpoint=feed.place(history, plan), **outcome.facts))
        if there := feed.published_before(history):
            self._notices.tell(history.add(State.SAME, f"{there} is what this plan makes"))
            return False
        return True

    def _make(self, feed: Feed, history: History, target: VersionTarget, apart: Workers, attempt: int) -> bool:
        """Makes and verifies a version; returns whether that is done. If not, why is recorded. Raises Failed where it
        can't be told how.
        """
        if not history.last.get(BUSY):
            self._notices.tell(history.add(State.CONVERTING, attempt=attempt, checkpoint=history.facts["checkpoint"]))
        facts: dict[str, Any] = {}
        for tasks in feed.tasks(history, target):
            outcomes = self._do(feed, history, apart, tasks, attempt)
            if outcomes is None:
                return False
            facts |= {task.fact: found.facts for task, found in zip(tasks, outcomes, strict=True) if task.fact}
        self._notices.tell(history.add(State.VERIFIED, feed.judgement(facts), **facts))
        return True

    def _do(
        self, feed: Feed, history: History, apart: Workers, tasks: Sequence[Task], attempt: int
    ) -> list[Outcome] | None:
        """Does tasks at the same time; None if one of them isn't done, which is recorded."""
        outcomes = apart.run_together(tasks)
        outcome = outcomes[-1]
        if outcome.status == Status.DONE:
            return outcomes
        # such as a conversion that was started by hand, or a job that outlived its watcher
        if outcome.status == Status.BUSY:
            if not history.last.get(BUSY):  # else it is said already
                self._notices.tell(history.add(State.PLANNED, outcome.message, attempt=attempt - 1, **{BUSY: True}))
            raise HeldError(outcome.message)
        if why := feed.is_gone(history, patient=True):
            self._say_gone(feed, history, why)
        else:
            self._fail(history, outcome.message, attempt)
        return None

    def _fail(self, history: History, reason: str, attempt: int) -> None:
        self._notices.tell(history.add(State.FAILED, reason[:REASON], attempt=attempt))

    def _say_gone(self, feed: Feed, history: History, why: str) -> None:
        """Records that a version is gone, once nothing is left of it."""
        feed.clear(history)
        self._notices.tell(history.add(State.GONE, why))

    def _foresee(self, feed: Feed, history: History, version: Version, target: VersionTarget, denied: str) -> Finding:
        """What would be done."""
        is_begun = history.state not in (None, State.DISCOVERED) and not _is_back(feed, history)
        if is_begun and not (denied and history.state == State.REFUSED):
            return _finding(history)
        found = Finding(version.name, version.commit, target.name, State.REFUSED, denied)
        if denied:
            return found
        task = feed.plan(version.url, target)
        with feed.apart() as apart:
            outcome = apart.run(task, PLAN_SECONDS)
        if outcome.status in (Status.FAILED, Status.UNREACHED):
            # nothing of it is recorded
            return dataclasses.replace(found, state=State.FAILED, reason=outcome.message, again=now())
        if outcome.status != Status.DONE:
            return dataclasses.replace(found, state=outcome.status, reason=outcome.message)
        return dataclasses.replace(found, state=State.PLANNED, reason=f"would be {feed.foresee(target, outcome.facts)}")


def _is_back(feed: Feed, history: History) -> bool:
    """Whether a version that was gone is there again."""
    return history.state == State.GONE and not feed.is_gone(history)


def _unless_damaged(history: History, commit: str, do: Callable[..., Finding], *arguments: Any) -> Finding:
    """What `do` finds; that a file of this history is damaged, where it raises that, so that others go on."""
    try:
        return do(*arguments)
    except DamagedRecordError as e:
        warn(str(e))
        return Finding(history.name, commit, "", State.FAILED, str(e))


def _finding(history: History) -> Finding:
    last = history.last
    place = last.get("checkpoint", "") if last["state"] == State.PUBLISHED else ""
    return Finding(history.name, last["commit"], last["target"], last["state"], last.get("reason") or "", place=place)
