"""The watcher: takes each release through its states, one after the other, and does nothing twice."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from weightbeam import __version__
from weightbeam.formats.lease import HeldError
from weightbeam.formats.storage import StorageError
from weightbeam.pipelines.watching import isolation, releases
from weightbeam.pipelines.watching.config import Config, Target
from weightbeam.pipelines.watching.isolation import Apart
from weightbeam.pipelines.watching.notices import Notices, note, warn
from weightbeam.pipelines.watching.records import (
    CONVERTING,
    DISCOVERED,
    FAILED,
    PLANNED,
    PUBLISHED,
    REFUSED,
    VERIFIED,
    History,
    LostError,
    histories,
    key_of,
    now,
)  # fmt: skip
from weightbeam.pipelines.watching.releases import Release

WAITING, BUSY = "waiting", "busy"  # what isn't recorded: it will be looked at again
REPORT = "release.json"  # beside the checkpoint: where it comes from
REASON = 5000  # characters of a record
LONGEST_DELAY = datetime.timedelta(days=1)
PLAN_SECONDS = 900.0  # a plan takes seconds; files that are made to take hours must not hold up all other releases


@dataclasses.dataclass(frozen=True)
class Finding:
    """How things stand with a release and a target.

    Attributes:
      again: when to look again, if that is known.
    """

    repo: str
    commit: str
    target: str
    state: str
    reason: str = ""
    again: datetime.datetime | None = None


class Watcher:
    """Converts what a configuration asks for."""

    def __init__(self, config: Config, notices: Notices, dry_run: bool = False):
        self.config, self._notices, self._dry_run = config, notices, dry_run

    def once(self, repos: Iterable[str] | None = None) -> list[Finding]:
        """Looks at the models that match, or at these, and does what there is to do; returns how things stand then.

        Raises:
          StorageError: the output can't be read or written.
        """
        problems: list[str] = []
        if repos is None:
            repos, problems = releases.find_models(self.config.models, self.config.since)
        for problem in problems:
            warn(problem)
        return [Finding("", "", "", FAILED, problem) for problem in problems] + [finding for repo in repos for finding in self._look(repo)]

    def retry(self, repo: str) -> list[Finding]:
        """Has everything of a repository that was refused or failed begin anew.

        Raises:
          LostError: another watcher has just gone on with one of them.
          StorageError: the output can't be read or written.
        """
        found = [history for history in histories(self.config.output, repo) if history.state in (REFUSED, FAILED)]
        for history in found:
            self._notices.tell(history.add(DISCOVERED, "asked for again", attempt=0))
        return [_finding(history) for history in found]

    def _look(self, repo: str) -> Iterator[Finding]:
        known = {history.key: history for history in histories(self.config.output, repo)}
        self._mend_pointers(repo, known.values())
        try:
            release = releases.find_release(repo, self.config.revision)
            current = {key_of(repo, release.weights, target): target for target in self.config.targets}
            is_settled = all(key in known and known[key].state == PUBLISHED for key in current)
            verdict = [] if is_settled else self._judge(release)
        except StorageError as e:
            warn(str(e))
            yield Finding(repo, "", "", FAILED, str(e))
            return
        waits = isinstance(verdict, Finding)
        for history in known.values():  # begun at an earlier commit; what was asked for then is still asked for
            target = next((target for target in self.config.targets if key_of(repo, history.first["weights"], target) == history.key), None)
            if target and history.state not in (PUBLISHED, REFUSED) and (waits or history.key not in current):
                yield self._advance(history, target)
        if isinstance(verdict, Finding):
            note(dataclasses.asdict(verdict) | {"again": verdict.again and verdict.again.isoformat()})
            yield verdict
            return
        for key, target in current.items():
            yield self._take(known.get(key) or History(self.config.output, repo, key), release, target, "; ".join(verdict))

    def _judge(self, release: Release) -> list[str] | Finding:
        """What stands against a release, or what it waits for.

        Raises:
          StorageError: the hub doesn't say.
        """
        waiting = Finding(release.repo, release.commit, "", WAITING)
        quiet = release.updated + datetime.timedelta(minutes=self.config.quiet_minutes)
        if quiet > now():
            reason = f"committed to at {release.updated:%H:%M:%S} UTC, quiet at {quiet:%H:%M:%S}"
            return dataclasses.replace(waiting, reason=reason, again=quiet)
        if denied := releases.objections(release, self.config.max_bytes, self.config.licenses):
            return denied
        if denied := releases.access_denied(release):
            return [denied]
        if missing := releases.missing_files(release):
            return dataclasses.replace(waiting, reason=f"incomplete: {releases.shown(missing)} not there yet")
        return []

    def _take(self, history: History, release: Release, target: Target, denied: str) -> Finding:
        """One release for one target, as far as it can be brought."""
        if self._dry_run:
            return self._foresee(history, release, target, denied)
        try:
            if not history.records:
                self._notices.tell(history.begin(release, target))
            elif history.first["commit"] != release.commit and (record := history.mark_same(release.commit)):
                self._notices.tell(record)
            if denied and history.state in (DISCOVERED, PLANNED, FAILED, REFUSED) and history.last.get("reason") != denied:
                self._notices.tell(history.add(REFUSED, denied, by_hub=True))
            elif not denied and history.state == REFUSED and history.last.get("by_hub"):
                self._notices.tell(history.add(DISCOVERED, "what it was refused for is no more"))
        except LostError:
            history.refresh()
        return self._advance(history, target)

    def _advance(self, history: History, target: Target) -> Finding:
        """Does what the state asks for."""
        if self._dry_run or history.state in (PUBLISHED, REFUSED):
            return _finding(history)
        if history.state == FAILED and ((due := self._due(history)) is None or due > now()):
            return dataclasses.replace(_finding(history), again=due)
        try:
            with history.alone(), Apart() as apart:
                if history.state in (PUBLISHED, REFUSED):  # someone has just done it
                    return _finding(history)
                try:
                    self._work(history, target, apart)
                except KeyboardInterrupt:  # a stop that was asked for isn't the release's fault
                    if history.state == CONVERTING:
                        with contextlib.suppress(LostError):  # another watcher has said so, or gone on; this one stops all the same
                            history.add(PLANNED, "stopped on the way", attempt=history.attempt - 1)
                    raise
        except HeldError as e:
            return dataclasses.replace(_finding(history), state=BUSY, reason=str(e))
        except LostError as e:
            warn(str(e))
            history.refresh()
        return dataclasses.replace(_finding(history), again=self._due(history) if history.state == FAILED else None)

    def _due(self, history: History) -> datetime.datetime | None:
        """When a failed one is tried again; None if it isn't."""
        if history.attempt >= self.config.attempts:
            return None
        delay = datetime.timedelta(minutes=self.config.retry_minutes) * 2 ** min(history.attempt - 1, 20)
        return datetime.datetime.fromisoformat(history.last["time"]) + min(delay, LONGEST_DELAY)

    # --- the steps, with the lease held

    def _work(self, history: History, target: Target, apart: Apart) -> None:
        source = f"--source=hf://{history.repo}@{history.first['commit']}"
        attempt = history.attempt + 1
        if history.state == CONVERTING and attempt > self.config.attempts:
            self._fail(history, f"begun {history.attempt} times, and never ended: was the machine too small?", history.attempt)
            return
        if history.state in (DISCOVERED, FAILED):
            outcome = apart.run(isolation.plan, [source, *target.arguments], PLAN_SECONDS)
            if outcome.status == isolation.REFUSED:
                self._notices.tell(history.add(REFUSED, outcome.message[:REASON]))
                return
            if outcome.status != isolation.DONE:
                self._fail(history, outcome.message, attempt)
                return
            self._notices.tell(history.add(PLANNED, checkpoint=self._place(history, outcome.facts["plan"]).url, **outcome.facts))
        checkpoint = history.facts["checkpoint"]
        if history.state != VERIFIED and not self._is_published_as(history, checkpoint):
            if not history.last.get(BUSY):
                self._notices.tell(history.add(CONVERTING, attempt=attempt, checkpoint=checkpoint))
            arguments = [source, f"--output={checkpoint}", "--resume", *target.arguments, *self.config.runner_arguments()]
            if not self._do(history, apart, isolation.convert, arguments, attempt):
                return
            facts: dict[str, Any] = {}
            if self.config.verify:
                arguments = [source, f"--checkpoint={checkpoint}", f"--sample={self.config.verify}", *_verification(target)]
                arguments += self.config.runner_arguments(here=True)  # it leaves its findings in a local file
                if not (outcome := self._do(history, apart, isolation.verify, arguments, attempt)):
                    return
                facts = {"verified": outcome.facts | {"sample": self.config.verify}}
            self._notices.tell(history.add(VERIFIED, None if facts else "not compared: verify is 0", **facts))
        self._publish(history, checkpoint)

    def _do(self, history: History, apart: Apart, work: isolation.Work, arguments: list[str], attempt: int) -> isolation.Outcome | None:
        """Does it; None if it isn't done, which is recorded."""
        outcome = apart.run(work, arguments)
        if outcome.status == isolation.DONE:
            return outcome
        if outcome.status == isolation.BUSY:  # such as a conversion that was started by hand, or a job that outlived its watcher
            if not history.last.get(BUSY):  # else it is said already
                self._notices.tell(history.add(PLANNED, outcome.message, attempt=attempt - 1, **{BUSY: True}))
            raise HeldError(outcome.message)
        self._fail(history, outcome.message, attempt)
        return None

    def _fail(self, history: History, reason: str, attempt: int) -> None:
        self._notices.tell(history.add(FAILED, reason[:REASON], attempt=attempt))

    def _place(self, history: History, plan: str) -> Any:
        """Where the checkpoint goes. Another plan has another place: what others may be reading is never replaced."""
        first = history.first
        return self.config.output / history.repo / first["commit"][:12] / f"{first['target']}-{plan[:8]}"

    def _is_published_as(self, history: History, checkpoint: str) -> bool:
        """Whether this very plan was published before, as with tables that have changed for other models only."""
        others = histories(self.config.output, history.repo)
        return any(other.state == PUBLISHED and other.facts["checkpoint"] == checkpoint for other in others)

    def _publish(self, history: History, checkpoint: str) -> None:
        """Puts the report beside the checkpoint, says that it is there, and lets `<target>.json` name the newest."""
        facts, output = history.facts, self.config.output
        report = {name: facts[name] for name in ("repo", "commit", "updated", "weights", "licenses", "target", "options", "tables", "plan", "family")}
        report |= {"weightbeam": __version__, "checkpoint": checkpoint, "items": f"{checkpoint}/0/items", "verified": facts.get("verified")}
        report["history"] = [{name: record.get(name) for name in ("state", "time", "attempt", "reason")} for record in history.records]
        output.create(self._report_of(checkpoint), json.dumps(report, indent=1).encode())
        self._notices.tell(history.add(PUBLISHED, checkpoint=checkpoint, items=report["items"]))
        self._point(history.repo, facts["target"])

    def _point(self, repo: str, target: str) -> None:
        """Has `<repo>/<target>.json` be the report of the newest release, also if another watcher publishes at this moment."""
        output, pointer = self.config.output, f"{repo}/{target}.json"
        while True:
            reports = (self._read(self._report_of(checkpoint)) for checkpoint in _published(histories(output, repo), target))
            newest = next((report for report in reports if report), None)  # a checkpoint that its owner has deleted has none
            if newest is None or self._read(pointer) == newest:
                return
            output.write(pointer, newest)

    def _mend_pointers(self, repo: str, known: Collection[History]) -> None:
        """Writes `<target>.json` where a watcher was ended after it had published, and before it had said so there. Costs one read for each."""
        for target in [] if self._dry_run else sorted({history.first["target"] for history in known if history.state == PUBLISHED}):
            try:
                named = json.loads(self._read(f"{repo}/{target}.json") or b"{}").get("checkpoint")
            except (ValueError, AttributeError):  # someone's own edit
                named = None
            if named != _published(known, target)[0]:
                self._point(repo, target)

    def _report_of(self, checkpoint: str) -> str:
        """The name of its report in the output."""
        return f"{checkpoint.removeprefix(f'{self.config.output.url}/')}/{REPORT}"

    def _read(self, name: str) -> bytes | None:
        try:
            return self.config.output.read(name)
        except FileNotFoundError:
            return None

    def _foresee(self, history: History, release: Release, target: Target, denied: str) -> Finding:
        """What would be done."""
        if history.state not in (None, DISCOVERED) and not (denied and history.state == REFUSED):
            return _finding(history)
        found = Finding(release.repo, release.commit, target.name, REFUSED, denied)
        if denied:
            return found
        with Apart() as apart:
            outcome = apart.run(isolation.plan, [f"--source={release.url}", *target.arguments], PLAN_SECONDS)
        if outcome.status != isolation.DONE:
            return dataclasses.replace(found, state=outcome.status, reason=outcome.message)
        size = releases.human(outcome.facts["target_bytes"])
        return dataclasses.replace(found, state=PLANNED, reason=f"would be converted: {size}, {outcome.facts['family']}")


def _finding(history: History) -> Finding:
    last = history.last
    return Finding(history.repo, last["commit"], last["target"], last["state"], last.get("reason", ""))


def _published(found: Iterable[History], target: str) -> list[str]:
    """The checkpoints that were published for a target, the newest release first."""
    facts = [history.facts for history in found if history.state == PUBLISHED and history.first["target"] == target]
    return [each["checkpoint"] for each in sorted(facts, key=lambda each: (each["updated"], each["time"]), reverse=True)]


def _verification(target: Target) -> list[str]:
    """The options that a verification takes too."""
    known = ("scan_layers", "param_scan_axis", "maxtext_model")
    return [argument for argument in target.arguments if argument.removeprefix("--").partition("=")[0] in known]
