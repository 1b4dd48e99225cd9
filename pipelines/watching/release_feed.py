"""The hub's models as a feed: each release is converted into an Orbax checkpoint."""

from __future__ import annotations

import datetime
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from weightbeam import __version__
from weightbeam.formats.orbax import plan_hash_of
from weightbeam.formats.storage import open_store, reason
from weightbeam.formats.storage.hub import NO_REVISION
from weightbeam.formats.storage.strict_json import object_in
from weightbeam.formats.storage.uninterrupted import uninterrupted
from weightbeam.formats.text.printable import listed
from weightbeam.pipelines.terminal.errors import Failed
from weightbeam.pipelines.watching import actions, releases
from weightbeam.pipelines.watching.config import TargetConfig, WatchConfig
from weightbeam.pipelines.watching.feed import Feed, Waiting, point, read_if_there
from weightbeam.pipelines.watching.isolation import Task
from weightbeam.pipelines.watching.notices import inform, warn
from weightbeam.pipelines.watching.records import History, Record, State, now
from weightbeam.pipelines.watching.releases import ReleaseCommit
from weightbeam.transforms.planning.options import Linking, VerifyOptions

MISSING = 3  # files that aren't there yet, by name
STEP = "0"  # of each checkpoint
RELEASE_REPORT = "release.json"  # beside the checkpoint: where it comes from


class ReleaseFeed(Feed[ReleaseCommit, TargetConfig]):
    """The releases of the models that a configuration names."""

    plans_anew = True

    def __init__(self, config: WatchConfig):
        self._config, self.output = config, config.output
        self._unmatched: set[str] = set()  # patterns, as said before

    @property
    def targets(self) -> Collection[TargetConfig]:
        return self._config.targets

    def names(self) -> tuple[list[str], list[str]]:
        found, problems = releases.find_models(self._config.models, self._config.since)
        unmatched = {name for name in found if releases.is_pattern(name)}
        for pattern in sorted(unmatched - self._unmatched):
            warn(f"models: {pattern}: {self.waits_for(pattern)}")
        self._unmatched = unmatched
        return found, problems

    def is_wanted(self, name: str) -> bool:
        return releases.is_wanted(name, self._config.models)

    def versions(self, name: str) -> Iterable[ReleaseCommit]:
        if releases.is_pattern(name):
            return []
        return [releases.find_release(name, self._config.revision)]

    def waits_for(self, name: str) -> str | None:
        if not releases.is_pattern(name):
            return None
        since = f" that has changed since {self._config.since}" if self._config.since else ""
        return f"no model of the hub matches it{since}"

    def judge(self, version: ReleaseCommit) -> list[str] | Waiting:
        if (quiet := releases.quiet_at(version, self._config.quiet_minutes)) > now():
            return Waiting(f"committed to at {version.updated:%H:%M:%S} UTC, quiet at {quiet:%H:%M:%S}", quiet)
        if denied := releases.objections(version, self._config.max_bytes, self._config.licenses):
            return denied
        if denied := releases.access_denied(version):
            return [denied]
        if missing := releases.missing_files(version):
            return Waiting(f"incomplete: {listed(missing, MISSING)} not there yet")
        return []

    def mend(self, name: str, known: Collection[History], version: ReleaseCommit | None = None) -> None:
        """Has `<target>.json` name the newest release: a watcher may have been ended after it had published, and before
        it had said so there. Where the hub's release is known, it names that, once it is published: the hub may have
        gone back to what was published before, or the configuration to a target's former options. Other files' targets
        are up to those.
        """
        names = {target.name for target in self.targets}
        published_for = {history.first["target"] for history in known if history.state == State.PUBLISHED}
        for target in sorted(published_for & names):
            published = self._published(known, target)
            newest, last = next(iter(published)), max(max(moments) for moments in published.values())
            there = next((each for each in published if version and self._is_of(each, version)), newest)
            named = object_in(self.output, f"{name}/{target}.json").get("checkpoint")  # empty by someone's own edit
            if named == (checkpoint := self._checkpoint(there)):
                continue
            is_back = there is not newest and self._report(checkpoint) is not None
            if is_back:
                there.mark_again(last)
            if self._point(name, target) and is_back:
                pointer = self.output.path(f"{name}/{target}.json")
                inform(f"{pointer} names {checkpoint} again: that is what the hub has now, by the options of now")

    def _is_of(self, history: History, version: ReleaseCommit) -> bool:
        """Whether it is of this version, by the options that are asked for now."""
        return history.first["weights"] == version.weights and self.target(history) is not None

    def source(self, history: History) -> str:
        return f"hf://{history.name}@{history.facts['commit']}"

    def is_replaced(self, history: History) -> bool:
        is_ended = history.state in (State.FAILED, State.REFUSED)
        if is_ended and NO_REVISION not in (history.last.get("reason") or ""):  # the hub isn't asked each time
            return False
        return not releases.is_there(history.name, history.facts["commit"])

    def plan(self, source: str, target: TargetConfig) -> Task:
        return Task(partial(actions.plan, source, target.options))

    def foresee(self, target: TargetConfig, facts: Mapping[str, Any]) -> str:
        return f"converted: {releases.human(facts['target_bytes'])}, {facts['family']}"

    def place(self, history: History, plan: str) -> str:
        first = history.first
        return (self.output / history.name / first["commit"][:12] / f"{first['target']}-{plan[:8]}").url

    def is_made(self, history: History) -> bool:
        """Whether the checkpoint is there and was verified; also where this very plan was published before, as with tables
        that have changed for other models only.
        """
        made = plan_hash_of(open_store(self._checkpoint(history)) / STEP) if history.state == State.VERIFIED else None
        if made == history.facts.get("plan", ""):
            return True
        others = self.histories(history.name)
        return any(
            other.state == State.PUBLISHED and self._checkpoint(other) == self._checkpoint(history) for other in others
        )

    def _checkpoint(self, history: History) -> str:
        """Where it is or will be; what is recorded is where that was when the output had another place."""
        return self.place(history, history.facts["plan"])

    def tasks(self, history: History, target: TargetConfig) -> Iterator[tuple[Task, ...]]:
        source, checkpoint = self.source(history), self._checkpoint(history)
        config, asked = self._config, target.options
        how = Linking(resume=True, hf_token_secret=config.hf_token_secret)
        made_of = history.facts.get("made_of", "")  # none of an earlier version
        yield (Task(partial(actions.convert, source, checkpoint, asked, how, config.runner_arguments(), made_of)),)
        if config.verify:
            verify = VerifyOptions(
                sample=config.verify, scan_layers=asked.scan_layers, param_scan_axis=asked.param_scan_axis,
                maxtext_model=asked.maxtext_model, family=asked.family, lora=asked.lora, hf_token_secret=config.hf_token_secret,
            )  # fmt: skip
            here = config.runner_arguments(here=True)  # it leaves its findings in a local file
            yield (Task(partial(actions.verify, source, checkpoint, verify, here), "verified"),)

    def publish(self, history: History) -> dict[str, Any]:
        """Puts the report beside the checkpoint."""
        facts, checkpoint = history.facts, self._checkpoint(history)
        names = (
            "repo", "commit", "updated", "weights", "licenses", "target", "options", "tables", "plan", "family",
        )  # fmt: skip
        report = {name: facts[name] for name in names if name in facts}
        report |= {
            "weightbeam": __version__,
            "checkpoint": checkpoint,
            "items": f"{checkpoint}/{STEP}/items",
            "verified": facts.get("verified"),
            "history": history.outline,
        }
        content = json.dumps(history.naming().apply(report), indent=1).encode()
        name = self._report_of(checkpoint)
        unknown = f"{checkpoint} was being published; it is if {RELEASE_REPORT} is there"
        try:
            is_there = uninterrupted(
                lambda: self.output.create(name, content) or self._report(checkpoint) is not None,
                lambda is_there: f"but {checkpoint} is published" if is_there else "",
                unknown,
            )
        except OSError as e:
            raise Failed(f"{checkpoint}/{RELEASE_REPORT}: {reason(e)}") from e
        if not is_there:
            raise Failed(f"{checkpoint}/{RELEASE_REPORT} exists, and isn't of this release; move it away")
        return {"checkpoint": checkpoint, "items": report["items"]}

    def announce(self, history: History, target: TargetConfig) -> Sequence[Record]:
        """What the hub has gone back to meanwhile is found at the next look; see `mend`."""
        self._point(history.name, history.first["target"])
        return ()

    def _point(self, repo: str, target: str) -> bool:
        """Has `<repo>/<target>.json` be the report of the newest release, also if another watcher publishes at this
        moment; returns whether it was another one.
        """

        def newest() -> tuple[str, bytes] | None:
            published = map(self._checkpoint, self._published(self.histories(repo), target))
            return next(((place, report) for place in published if (report := self._report_now(place))), None)

        return point(self.output, f"{repo}/{target}.json", newest)

    def _published(
        self, found: Iterable[History], target: str
    ) -> dict[History, tuple[datetime.datetime, datetime.datetime]]:
        """What was published for a target, the newest first: by when the hub was seen to have the release, or to have it
        again; of one release by when it was published, or asked for again.
        """
        those = [history for history in found if history.state == State.PUBLISHED and history.first["target"] == target]
        moments: dict[History, datetime.datetime] = {}
        since: dict[str, datetime.datetime] = {}
        for history in those:
            begun, time = (datetime.datetime.fromisoformat(record["time"]) for record in (history.first, history.last))
            again, weights = history.again(), history.first["weights"]
            moments[history] = again or time
            since[weights] = max(since.get(weights, begun), begun, again or begun)
        ordered = {history: (since[history.first["weights"]], moment) for history, moment in moments.items()}
        return dict(sorted(ordered.items(), key=lambda item: item[1], reverse=True))

    def _report_of(self, checkpoint: str) -> str:
        """The name of its report in the output."""
        return f"{checkpoint.removeprefix(f'{self.output.url}/')}/{RELEASE_REPORT}"

    def _report(self, checkpoint: str) -> bytes | None:
        """The report of a checkpoint; None where there is none, as where its owner has deleted the checkpoint, or where
        somebody's file has its name.
        """
        report = read_if_there(self.output, self._report_of(checkpoint))
        try:
            plan = json.loads(report or b"{}")["plan"]
        except (ValueError, LookupError, TypeError, RecursionError):
            return None
        return report if isinstance(plan, str) and checkpoint.endswith(f"-{plan[:8]}") else None

    def _report_now(self, checkpoint: str) -> bytes | None:
        """The report of a checkpoint, with the place that the checkpoint has now: it was written where the output was then."""
        if (report := self._report(checkpoint)) is None or (said := json.loads(report)).get("checkpoint") == checkpoint:
            return report
        return json.dumps(said | {"checkpoint": checkpoint, "items": f"{checkpoint}/{STEP}/items"}, indent=1).encode()
