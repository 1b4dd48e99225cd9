"""A training run as a feed: each committed step is exported or resharded, described, and published."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import itertools
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from weightbeam.formats.storage import LocalFolder, StorageError, Store, is_hub, open_store, reason
from weightbeam.formats.storage.strict_json import object_in
from weightbeam.pipelines.terminal.errors import Failed
from weightbeam.pipelines.terminal.tables import human
from weightbeam.pipelines.watching.config import EXPORT, HOLD, NEWEST, QUANTIZE, RESHARD, Run, RunTarget, WatchConfig
from weightbeam.pipelines.watching.feed import Feed, point
from weightbeam.pipelines.watching.isolation import Task, Workers
from weightbeam.pipelines.watching.marks import ASIDE, Mark
from weightbeam.pipelines.watching.notices import warn
from weightbeam.pipelines.watching.places import RELEASE, STEP_REPORT, drop
from weightbeam.pipelines.watching.records import RUNS, History, LostError, Record, State
from weightbeam.pipelines.watching.runs import (
    RunStep,
    SeenStep,
    growing_steps,
    list_steps,
    mark_of,
    read_step,
    see_step,
)
from weightbeam.pipelines.watching.step_places import StepPlaces
from weightbeam.pipelines.watching.step_tasks import StepTasks
from weightbeam.pipelines.watching.tables import tables

MADE = {EXPORT: "exported", QUANTIZE: "quantised", RESHARD: "resharded"}
GRACE = 2.0  # seconds in which a folder that is being deleted becomes one that is gone
EVER_PUBLISHED = (State.PUBLISHED, ASIDE, State.REMOVED)
_DELETED = "the run has deleted it"


class RunFeed(Feed[RunStep, RunTarget]):
    """The steps of one run.

    Attributes:
      run: what the configuration says of it.
      store: the run's folder.
      places: where the steps are published, by the target's name.
    """

    root = RUNS

    def __init__(self, config: WatchConfig, run: Run, workers: Workers, flat: bool = False):
        """`workers` are those of all runs. `flat`: the output is the run's alone, and its steps lie directly below it."""
        self.run, self.output = run, config.output
        self.store: Store = open_store(run.checkpoints)
        self.places = StepPlaces(config, run, flat)
        self._marks = self.places.marks
        self._step_tasks = StepTasks(config, run, self.places)
        self._verifies = bool(config.verify)
        self._there: list[SeenStep] = []
        self._is_fresh = False  # whether nobody has gone by that listing yet
        self._seen: dict[str, str] = {}  # the mark of the step that is there, by history's key
        self._workers = workers
        self._untidy: Sequence[RunTarget] = run.targets

    @property
    def targets(self) -> Sequence[RunTarget]:
        return self.places.targets

    # --- what there is

    def names(self) -> tuple[list[str], list[str]]:
        return [self.run.name], []

    def is_wanted(self, name: str) -> bool:
        return name == self.run.name

    def is_known(self) -> bool:
        """Whether something of this run was settled before."""
        self._marks.read()
        return bool(self._marks)

    def look(self) -> list[SeenStep]:
        """The committed steps, by one listing; none where the run hasn't made its folder yet.

        Raises:
          StorageError: the run can't be listed, or was there before; or another run of this name has the records.
        """
        self.places.check_records()
        try:
            self._there = list_steps(self.store)
        except StorageError:
            raise
        except FileNotFoundError as e:
            if self._there or self.is_known():
                raise StorageError(f"{self.run.checkpoints}: is gone") from e
        except OSError as e:
            raise StorageError(f"{self.run.checkpoints}: {reason(e)}") from e
        self._is_fresh = True
        return self._there

    def waits_for(self, name: str) -> str | None:
        if self._there or self.is_known():
            return None
        if growing_steps(self.store):
            mark = mark_of(self.store)
            return (
                f"{self.run.checkpoints} has a step that isn't committed yet; its {mark}, which Orbax's CheckpointManager writes last, "
                "is waited for; steps that are written without it aren't followed"
            )
        if isinstance(self.store, LocalFolder) and not self.store.folder.exists():
            return f"{self.run.checkpoints} isn't there yet; it is waited for, and its first step"
        return f"{self.run.checkpoints} has no steps yet; they are waited for directly in it, as in RUN/checkpoints"

    def versions(self, name: str) -> Iterable[RunStep]:
        """The newest step that isn't settled, again and again: meanwhile the run goes on, and deletes what is old."""
        tried: set[tuple[int, str]] = set()
        while True:
            there, self._is_fresh = self._there if self._is_fresh else self.look(), False
            asked, settled, oldest = {*map(_asked, self.targets)}, self._marks.settled(), self._oldest_kept()
            begun = {_listed_as(history) for history in self.histories(self.run.name)} if oldest else set()
            fresh = [
                seen
                for seen in self.run.steps.wanted(there)
                if seen.listed not in tried
                and (seen.listed in begun or self._is_kept(seen, oldest))
                and not settled[seen.listed].issuperset(asked)
            ]
            if not fresh:
                return
            tried.add(fresh[0].listed)
            try:
                step = read_step(self.store, self.run.name, fresh[0])
            except OSError as e:
                raise StorageError(f"{self.store.path(fresh[0].folder)}: {reason(e)}") from e
            if step is not None:
                yield step

    def _oldest_kept(self) -> int:
        """The lowest number of a step that `keep` keeps for being among the last: one below it would be removed as soon as
        it is published. 0 where as many aren't published yet.
        """
        keep, targets = self.run.keep, self.targets
        if keep is None or any(target.create_pr for target in targets):
            return 0
        there = self._listed()
        steps = [{mark.step for mark in self._marks.of(target.name) if mark.listed in there} for target in targets]
        return min(sorted(found)[-keep.last] if len(found) >= keep.last else 0 for found in steps)

    def _is_kept(self, seen: SeenStep, oldest: int) -> bool:
        """Whether `keep` keeps a step once it is published; see `_oldest_kept`."""
        every = self.run.keep.every if self.run.keep else 0
        return seen.number >= oldest or bool(every and seen.number % every == 0)

    # --- what was done

    def history(self, version: RunStep, target: RunTarget) -> History:
        history = super().history(version, target)
        self._seen[history.key] = version.mark
        return history

    def histories(self, name: str, every: bool = False) -> list[History]:
        if every:
            self.places.check_records()
            return super().histories(name)
        self._marks.read()
        return [history for key in sorted(self._marks.open) if (history := self.places.find(key))]

    def goes_on(self, history: History) -> bool:
        """What is there is a version of its own; what isn't is gone, or was verified before it went."""
        return history.state == State.VERIFIED or _listed_as(history) not in self._listed()

    def why_begun(self, version: RunStep) -> str | None:
        """That a step was written anew, or that the run went back."""
        published = [mark for mark in self._marks if mark.state in EVER_PUBLISHED]
        if any(mark.step == version.number and mark.seen != version.mark for mark in published):
            return f"step {version.number} was written anew: another checkpoint of this number was published before"
        last = max(published, default=None)
        if last and version.number < last.step and _milliseconds(version.updated) > last.updated:
            return f"the run went back: step {last.step} was published before"
        return None

    def begun(self, history: History) -> None:
        self.places.own(history)
        self._marks.begin(history.key)

    def settled(self, history: History) -> None:
        self._mark(history)
        self._marks.end(history.key)

    def _mark(self, history: History) -> None:
        first, target = history.first, self.target(history)
        is_aside = history.state == State.PUBLISHED and self._is_passed_over(history)
        mark = Mark(
            _milliseconds(datetime.datetime.fromisoformat(first["updated"])),
            first["step"],
            self._seen.get(history.key) or first["seen"],
            ASIDE if is_aside else str(history.state),
            _asked(target) if target else "",
            history.key,
        )
        self._marks.add(mark)

    def reopened(self, history: History) -> None:
        self._marks.read()
        self.begun(history)
        self._marks.forget(history.key)

    # --- what is done

    def apart(self) -> contextlib.AbstractContextManager[Workers]:
        """The run's own processes, for all steps of a look: imports take longer than a small export."""
        return contextlib.nullcontext(self._workers)

    def rest(self) -> None:
        self._workers.rest()

    def source(self, history: History) -> str:
        return (self.store / _folder_of(history)).url

    def plan(self, source: str, target: RunTarget) -> Task:
        return self._step_tasks.plan(source, target)

    def foresee(self, target: RunTarget, facts: Mapping[str, Any]) -> str:
        return f"{MADE[target.kind]}: {human(facts['target_bytes'])}, {facts['family']}"

    def place(self, history: History, plan: str) -> str:
        """`step-1000`; where that is another checkpoint's, or nobody knows what, with the plan's hash, and if need be with
        the step's. On the hub a branch has a history of its own.

        Raises:
          StorageError: the place is another run's.
        """
        place = self.places.of(history)
        self.places.check_owner(place)
        url = place.of(history.first["commit"])
        if is_hub(place.url):
            return url
        first = history.first
        there = self._marks.of(first["target"], State.PUBLISHED, ASIDE)
        others = {mark.key for mark in there if mark.step == first["step"]} - {history.key}
        found = (self.places.find(key) for key in sorted(others))
        taken = any(other is None or not self.places.is_elsewhere(other) for other in found)
        if not taken and not place.is_taken(url, history.key):
            return url
        named = f"{history.first['commit']}-{plan[:8]}"
        if place.is_taken(place.of(named), history.key):  # the same files were put there at other times
            named += f"-{history.key.rpartition('-')[2]}"
        return place.of(named)

    def _work(self, history: History) -> Store:
        """Where a step's result grows."""
        return self.places.of(history).workplace(history.key)

    def tasks(self, history: History, target: RunTarget) -> Iterator[tuple[Task, ...]]:
        return self._step_tasks.tasks(history, target, self.source(history), self._work(history))

    def is_given_up(self, history: History) -> bool:
        """Where the target of its name has other options now, or its table is another one."""
        return any(each.name == history.first["target"] for each in self.targets)

    def clear(self, history: History) -> None:
        """Removes what a step was made in. Where that can't be done, the step is settled all the same."""
        for here in (False, True):
            work = self.places.of(history).workplace(history.key, here)
            try:
                drop(work, history.check_alone)
            except OSError as e:
                warn(f"{work.url} can't be removed: {reason(e)}")

    def published_before(self, history: History) -> str | None:
        first, plan = history.first, history.facts["plan"]
        self._marks.read()
        for mark in (mark for state in EVER_PUBLISHED for mark in sorted(self._marks.of(first["target"], state))):
            if mark.listed == _listed_as(history) and mark.key != history.key:
                other = self.places.find(mark.key)
                is_same = other is not None and other.facts.get("plan") == plan
                if other and is_same and (other.state == State.REMOVED or self.places.is_published(other)):
                    return self.places.checkpoint(other)
        return None

    def is_made(self, history: History) -> bool:
        if history.state != State.VERIFIED:
            return False
        if (self._work(history) / RELEASE).exists(STEP_REPORT):
            return True
        place, url = self.places.of(history), self.places.checkpoint(history)
        # what is needed to go on with may lie on another machine; without its checkpoint nothing is made anew
        is_whole = place.is_whole(url, history.key, lambda: self._is_newest_by_now(history))
        return is_whole or (self.places.is_published(history) and self.is_gone(history) is not None)

    def _listed(self) -> set[tuple[int, str]]:
        """The numbers and marks of the steps that the run had when it was last listed."""
        return {seen.listed for seen in self._there}

    def judgement(self, facts: Mapping[str, Any]) -> str | None:
        why = "an adapter" if self._verifies else "verify is 0"
        return None if facts.get("verified") else f"not compared: {why}"

    def withheld(self, history: History, target: RunTarget) -> str | None:
        if not _not_finite(history) or target.on_nan != HOLD or self.places.is_published(history):
            return None
        return f"isn't published, by on_nan: {HOLD}: {_warnings(history)}"

    def notice(self, history: History) -> str | None:
        if self._is_passed_over(history):
            return f"isn't made the newest: {_warnings(history)}"
        return _warnings(history) or None

    def _is_passed_over(self, history: History) -> bool:
        """Whether a step is never the newest: it has elements that are NaN or infinite."""
        target = self.target(history)
        return _not_finite(history) and target is not None and target.on_nan != NEWEST

    def publish(self, history: History) -> dict[str, Any]:
        place, work = self.places.of(history), self._work(history)
        url, title = self.places.checkpoint(history), self._title(history)
        said: dict[str, Any] = {}
        try:
            self.places.check_owner(place)
            if (work / RELEASE).exists(STEP_REPORT):
                said = place.publish(work / RELEASE, url, title, lambda: self._is_newest_by_now(history))
            elif not place.is_whole(url, history.key, lambda: self._is_newest_by_now(history)):
                raise Failed(f"{work.url}: what was made there is gone; someone has removed it")
            url = said.get("checkpoint", url)
            self._point(history, url)
            self.clear(history)
        except StorageError as e:  # says where
            raise Failed(str(e)) from e
        except OSError as e:
            raise Failed(f"{e.filename2 or e.filename or url}: {reason(e)}") from e
        return {"checkpoint": url, **said}

    def _title(self, history: History) -> str:
        """Of the commit that publishes a step on the hub."""
        return f"Step {history.facts['step']} of {self.run.name} ({history.key})"

    def _is_newest(self, history: History) -> bool:
        """Whether no step that was published is newer. One that is there goes by its number among those that are; one that
        isn't, or that the run wrote anew as it went back, by when it was committed. Those that are passed over don't count.
        """
        if self._is_passed_over(history):
            return False
        first, there = history.first, self._listed()
        others = [mark for mark in self._marks.of(first["target"]) if mark.key != history.key]
        updated = _milliseconds(datetime.datetime.fromisoformat(first["updated"]))
        by_time = all(mark.updated <= updated for mark in others)
        if _listed_as(history) not in there:
            return by_time
        is_anew = any(mark.step == first["step"] and mark.seen != first["seen"] for mark in others)
        return (is_anew and by_time) or all(mark.step <= first["step"] for mark in others if mark.listed in there)

    def _is_newest_by_now(self, history: History) -> bool:
        """`_is_newest`, by marks and steps that are read anew: the run and other watchers may have gone on while this
        step was made.
        """
        self._marks.read()
        with contextlib.suppress(OSError):
            self._there = list_steps(self.store)
        return self._is_newest(history)

    def _point(self, history: History, url: str) -> None:
        """Has `<run>/<target>.json` in the output, or `<target>.json` where it is the run's alone, be the report of the
        newest step, which was published at `url`.
        """
        report = {**self.places.of(history).report(url), "checkpoint": url}
        content = json.dumps(history.naming().apply(report), indent=1).encode()
        pointer = self.places.pointer(history.first["target"])
        point(self.output, pointer, lambda: (url, content) if self._is_newest_by_now(history) else None)

    def _is_pointed_at(self, history: History) -> bool:
        """Whether a step is what readers are told is the newest, which it may not be any more: the run may have gone back to
        one that was published before, by which the pointer isn't moved.
        """
        return object_in(self.output, self.places.pointer(history.first["target"])).get("key") == history.key

    def announce(self, history: History, target: RunTarget) -> Sequence[Record]:
        """Marks it, and removes what `keep` doesn't keep; pull requests are up to those whom they ask."""
        self.settled(history)
        return self._remove_old(target, history)

    def tidy(self) -> Sequence[Record]:
        """Once in a watcher's life: what can't be removed is named again with each step, and not with each look."""
        targets, self._untidy = self._untidy, ()
        return [record for target in targets for record in self._remove_old(target)]

    def _remove_old(self, target: RunTarget, history: History | None = None) -> list[Record]:
        """Removes what `keep` doesn't keep; `history` is the one of them that is being worked on."""
        removed: list[Record] = []
        if (keep := self.run.keep) is None or target.create_pr:
            return removed
        # those that are passed over have no claim to the places of the others
        there = self._listed()
        published = [
            self._marks.all_but_last(keep.last, target.name, there, state) for state in (State.PUBLISHED, ASIDE)
        ]
        for mark in itertools.chain(*published):
            if keep.every and mark.step % keep.every == 0:
                continue
            is_this = history is not None and mark.key == history.key
            other = history if is_this else self.places.find(mark.key)
            if other is None:
                continue
            if other.state == State.PUBLISHED and not self._is_newest(other):
                try:
                    if self._is_pointed_at(other) or self.places.is_elsewhere(other):
                        continue
                    removed.append(other.add(State.REMOVED, self._remove(other)))
                except (OSError, LostError) as e:
                    warn(f"{self.places.checkpoint(other)} can't be removed: {e}")
                    continue
            self._mark(other)
        return removed

    def _remove(self, history: History) -> str:
        """Removes a published step; returns why it isn't there any more. Raises OSError where it can't be removed, or
        would take with it what others have put there.
        """
        place, url, keep = self.places.of(history), self.places.checkpoint(history), self.run.keep
        assert keep is not None
        if not place.remove(url, history.key, self._title(history)):
            return f"it isn't at {url} any more"
        return f"keep: the last {keep.last}" + (f", and multiples of {keep.every}" if keep.every else "")

    def is_gone(self, history: History, patient: bool = False) -> str | None:
        first = history.first
        deadline = time.monotonic() + (GRACE if patient else 0.0)
        while True:
            try:
                seen = see_step(self.store, _folder_of(history))
                step = read_step(self.store, self.run.name, seen) if seen else None
            except OSError:
                return None  # it can't be told
            if step is None:
                return _DELETED
            if step.weights != first["weights"]:
                return "the run has written another checkpoint of this number"
            if time.monotonic() >= deadline:
                return None
            time.sleep(GRACE / 8)


def _listed_as(history: History) -> tuple[int, str]:
    """A history's step, as a listing of the run has it."""
    return history.first["step"], history.first["seen"]


def _not_finite(history: History) -> bool:
    """Whether what was made of a step has elements that are NaN or infinite."""
    return bool(history.facts.get("changes", {}).get("not_finite"))


def _warnings(history: History) -> str:
    """What is worth knowing of a step."""
    return "; ".join(history.facts.get("changes", {}).get("warnings", []))


def _milliseconds(when: datetime.datetime) -> int:
    return int(when.timestamp() * 1000)


def _asked(target: RunTarget) -> str:
    """Identifies what is asked for of each step."""
    facts = json.dumps([target.name, target.facts, tables()], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()[:12]


def _folder_of(history: History) -> str:
    """The name of a step's folder in its run."""
    return history.first["source"].rpartition("/")[2]
