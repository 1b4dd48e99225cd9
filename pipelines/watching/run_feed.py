"""A training run as a feed: each committed step is exported or resharded, described, and published."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import itertools
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from weightbeam import __version__
from weightbeam.formats.adapters.adapter import WEIGHTS
from weightbeam.formats.record.naming import Naming, is_name
from weightbeam.formats.storage import LocalFolder, StorageError, Store, open_store, reason
from weightbeam.formats.storage.local import cache_folder
from weightbeam.pipelines.terminal.errors import Failed
from weightbeam.pipelines.terminal.tables import human
from weightbeam.pipelines.watching import works
from weightbeam.pipelines.watching.config import (
    ADAPTER,
    EXPORT,
    HOLD,
    MERGED,
    NEWEST,
    QUANTIZE,
    RESHARD,
    Run,
    RunTarget,
    WatchConfig,
    is_maxtext_config,
)
from weightbeam.pipelines.watching.feed import Feed, FeedTask, Waiting, is_pointer, told_foreign
from weightbeam.pipelines.watching.isolation import Action, Workers
from weightbeam.pipelines.watching.marks import ASIDE, Mark, Marks
from weightbeam.pipelines.watching.notices import warn
from weightbeam.pipelines.watching.places import RELEASE, REPORT, Place, drop, open_place, owner_of, told_other_run
from weightbeam.pipelines.watching.records import (
    PUBLISHED,
    REMOVED,
    RUNS,
    VERIFIED,
    DamagedRecordError,
    History,
    LostError,
    Record,
    Version,
    VersionTarget,
    find_history,
    histories,
    history_of,
)  # fmt: skip
from weightbeam.pipelines.watching.runs import (
    RunStep,
    SeenStep,
    growing_steps,
    list_steps,
    mark_of,
    read_step,
    see_step,
)
from weightbeam.pipelines.watching.tables import former, tables
from weightbeam.transforms.planning.options import (
    PARAMS,
    ExportOptions,
    FromHub,
    MergeOptions,
    QuantizeOptions,
    ReshardOptions,
    ToHub,
    VerifyOptions,
    options_of,
)

MADE = {EXPORT: "exported", QUANTIZE: "quantised", RESHARD: "resharded"}
RECORDS_OWNER = "run.json"  # beside the records: whose they are
GRACE = 2.0  # seconds in which a folder that is being deleted becomes one that is gone
_DELETED = "the run has deleted it"


class RunFeed(Feed):
    """The steps of one run.

    Attributes:
      run: what the configuration says of it.
      store: the run's folder.
      places: where the steps are published, by the target's name.
    """

    def __init__(self, config: WatchConfig, run: Run, workers: Workers, flat: bool = False):
        """`workers` are those of all runs. `flat`: the output is the run's alone, and its steps lie directly below it."""
        self._config, self.run, self.output, self._flat = config, run, config.output, flat
        self.store: Store = open_store(run.checkpoints)
        self._records = config.output / RUNS / run.name
        scratch = scratch_of(config.output)
        self.places: dict[str, Place] = {}
        for target in run.targets:
            below = config.output.url if flat else (config.output / run.name / target.name).url
            self.places[target.name] = open_place(target.output or below, scratch, target.create_pr)
        self._targets: Sequence[RunTarget] | None = None
        self._there: list[SeenStep] = []
        self._is_fresh = False  # whether nobody has gone by that listing yet
        self._marks = Marks(self._records)
        self._seen: dict[str, SeenStep] = {}  # by history's key
        self._workers = workers
        self._untidy: Sequence[RunTarget] = run.targets

    @property
    def targets(self) -> Sequence[RunTarget]:
        """What a step is made into; each known by the output that its place had first, whatever way leads there now."""
        if self._targets is None:
            self._targets = [dataclasses.replace(each, output=self._known_output(each)) for each in self.run.targets]
        return self._targets

    def _known_output(self, target: RunTarget) -> str | None:
        """The output by which a target's place is known.

        Raises:
          DamagedRecordError: what the place says of itself is damaged: nothing of this run is published then.
        """
        place = self.places[target.name]
        known = place.known_as()
        if target.output is None or target.output.startswith("hf://"):
            return target.output
        if known:
            return known
        self._marks.read()  # of a version that didn't say it there: the newest step does, if it is there
        newest = max(self._marks.of(target.name), default=None)
        history = find_history(self.output, self.run.name, newest.key, RUNS) if newest else None
        if history is None or place.report(url := self._checkpoint(history)).get("key") != history.key:
            return target.output
        return history.facts["checkpoint"].removesuffix(url.removeprefix(place.url))

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
        self._check_records()
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
            return f"{self.run.checkpoints} has a step that isn't committed yet; its {mark}, which Orbax's CheckpointManager writes last, is waited for"
        if isinstance(self.store, LocalFolder) and not self.store.folder.exists():
            return f"{self.run.checkpoints} isn't there yet; it is waited for, and its first step"
        return f"{self.run.checkpoints} has no steps yet; they are waited for directly in it, as in RUN/checkpoints"

    def versions(self, name: str) -> Iterable[RunStep]:
        """The newest step that isn't settled, again and again: meanwhile the run goes on, and deletes what is old."""
        tried: set[tuple[int, str]] = set()
        while True:
            there, self._is_fresh = self._there if self._is_fresh else self.look(), False
            asked, settled, oldest = [*map(_asked, self.targets)], self._marks.settled(), self._oldest_kept()
            begun = {_listed_as(history) for history in self.histories(self.run.name)} if oldest else set()
            fresh = [
                seen
                for seen in self.run.steps.wanted(there)
                if seen.listed not in tried
                and (seen.listed in begun or self._is_kept(seen, oldest))
                and not all(settled[seen.listed].intersection(each) for each in asked)
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

    def judge(self, version: Version) -> list[str] | Waiting:
        return []

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

    def history(self, version: Version, target: VersionTarget) -> History:
        assert isinstance(version, RunStep)
        history = history_of(self.output, version, target, RUNS)
        self._seen[history.key] = SeenStep(version.number, version.url.rpartition("/")[2], version.mark)
        return history

    def histories(self, name: str, every: bool = False) -> list[History]:
        if every:
            self._check_records()
            return histories(self.output, name, RUNS)
        self._marks.read()
        return [history for key in sorted(self._marks.open) if (history := find_history(self.output, name, key, RUNS))]

    def goes_on(self, history: History) -> bool:
        """What is there is a version of its own; what isn't is gone, or was verified before it went."""
        return history.state == VERIFIED or _listed_as(history) not in self._listed()

    def why_begun(self, version: Version) -> str | None:
        """That a step was written anew, or that the run went back."""
        assert isinstance(version, RunStep)
        published = [mark for mark in self._marks if mark.state in (PUBLISHED, ASIDE, REMOVED)]
        if any(mark.step == version.number and mark.seen != version.mark for mark in published):
            return f"step {version.number} was written anew: another checkpoint of this number was published before"
        last = max(published, default=None)
        if last and version.number < last.step and _milliseconds(version.updated) > last.updated:
            return f"the run went back: step {last.step} was published before"
        return None

    def begun(self, history: History) -> None:
        known = {target.name: target.output for target in self.targets}
        place = self._place(history)
        self._claim_records()
        place.own(self.naming(place).name(self.run.checkpoints), known.get(history.first["target"]))
        self._marks.begin(history.key)

    def settled(self, history: History) -> None:
        self._mark(history)
        self._marks.end(history.key)

    def _mark(self, history: History) -> None:
        first, target = history.first, self.target(history)
        seen = self._seen.get(history.key)
        is_aside = history.state == PUBLISHED and self._is_passed_over(history)
        mark = Mark(
            _milliseconds(datetime.datetime.fromisoformat(first["updated"])),
            first["step"],
            seen.mark if seen else first["seen"],
            ASIDE if is_aside else str(history.state),
            _asked(target)[0] if target else "",
            history.key,
        )
        self._marks.add(mark)

    def reopened(self, history: History) -> None:
        self._marks.read()
        self.begun(history)
        self._marks.forget(history.key)

    # --- what is done

    def apart(self) -> contextlib.AbstractContextManager[Workers]:
        """The same for all steps of a look: imports take longer than a small export."""
        return contextlib.nullcontext(self._workers)

    def rest(self) -> None:
        self._workers.rest()

    def source(self, history: History) -> str:
        return (self.store / _folder_of(history)).url

    def naming(self, place: Place) -> Naming:
        """How the run is named in one of its places: by a hash of where it lies, since what it holds changes."""
        asked = next((each.options.full_paths for each in self.run.targets if self.places[each.name] is place), None)
        return self._naming(place.url, asked)

    def _naming(self, url: str, full_paths: bool | None = None) -> Naming:
        run = self.run.checkpoints
        known = {run: hashlib.sha256(run.encode()).hexdigest()[:16]}
        return dataclasses.replace(Naming.of(url, full_paths), known=known)

    def _place(self, history: History) -> Place:
        return self.places[history.first["target"]]

    def taken_by(self, place: Place) -> str | None:
        """The other run whose steps are published in a place.

        Raises:
          OSError: it can't be told.
        """
        return self._other_run(place.owner(), self.naming(place))

    def _other_run(self, owner: str | None, naming: Naming) -> str | None:
        run = self.run.checkpoints
        return None if owner in (None, run, self.store.url, naming.name(run)) else owner

    def _claim_records(self) -> None:
        """Makes the records this run's, unless they are another's.

        Raises:
          StorageError: they are.
        """
        self._check_records()
        self._records.make()
        name = self._naming(self.output.url).name(self.run.checkpoints)
        if not self._records.create(RECORDS_OWNER, json.dumps({"run": name}).encode()):
            self._check_records()

    def _check_records(self) -> None:
        """Makes sure that the records aren't another run's, which a file of its own may give the same name. Where the output
        is the run's alone, its place says whose it is.

        Raises:
          StorageError: they are.
        """
        if self._flat:
            return
        owner = None
        try:
            owner = owner_of(self._records, RECORDS_OWNER)
        except DamagedRecordError:
            raise
        except StorageError:  # what stands in the way of the records is told where they are read
            pass
        owner = owner or self._owner_by_records()
        if other := self._other_run(owner, self._naming(self.output.url)):
            raise StorageError(
                f"run {self.run.name}: {self._records} holds the records of another run of this name, {other}; give one of "
                "them another name, or an output of its own"
            )

    def _owner_by_records(self) -> str | None:
        """The run that records of a version are of which didn't say it beside them, by where its newest step was; None
        where they don't tell.
        """
        self._marks.read()
        newest = max(self._marks, default=None)
        history = find_history(self.output, self.run.name, newest.key, RUNS) if newest else None
        run = history.first["source"].rpartition("/")[0] if history else ""
        return None if not run or is_name(run) else run

    def _check_owner(self, place: Place) -> None:
        """Makes sure that neither a place nor the records are another run's, which may have begun since this watcher did; the
        records are this one's then.

        Raises:
          StorageError: one of them is.
        """
        self._claim_records()
        if owner := self.taken_by(place):
            raise StorageError(told_other_run(place.url, owner))

    def plan(self, source: str, target: VersionTarget) -> FeedTask:
        assert isinstance(target, RunTarget)
        plans: dict[str, Action] = {RESHARD: works.plan_reshard, QUANTIZE: works.plan_quantize}
        return FeedTask(plans.get(target.kind, works.plan_export), {"source": source, "asked": self._asked(target)})

    def _asked(
        self, target: RunTarget, history: History | None = None
    ) -> ExportOptions | QuantizeOptions | ReshardOptions:
        """The options of the command that makes a step, with what the run says: like what it is, once it is planned as the
        plan found that, and how sources are named where it goes, since a step is made in a folder first.
        """
        said: dict[str, Any] = {"full_paths": self._full_paths(target)}
        if target.kind == RESHARD:
            said["state"] = PARAMS
        if self.run.like is not None:
            if is_maxtext_config(self.run.like):
                said["maxtext_config"] = self.run.like
            else:
                said["like"] = self._like_of(history) if history else self.run.like
        return dataclasses.replace(target.options, **said)

    def _full_paths(self, target: RunTarget) -> bool | None:
        is_hub = self.places[target.name].url.startswith("hf://")
        return False if is_hub and target.options.full_paths is None else target.options.full_paths

    def foresee(self, target: VersionTarget, facts: Mapping[str, Any]) -> str:
        assert isinstance(target, RunTarget)
        return f"{MADE[target.kind]}: {human(facts['target_bytes'])}, {facts['family']}"

    def place(self, history: History, plan: str) -> str:
        """`step-1000`; where that is another checkpoint's, or nobody knows what, with the plan's hash. On the hub a branch
        has a history of its own.

        Raises:
          StorageError: the place is another run's.
        """
        place = self._place(history)
        self._check_owner(place)
        url = place.of(history.first["commit"])
        if place.url.startswith("hf://"):
            return url
        others = {
            mark.key
            for state in (PUBLISHED, ASIDE)
            for mark in self._marks.of(history.first["target"], state)
            if mark.step == history.first["step"]
        } - {history.key}
        found = (find_history(self.output, self.run.name, key, RUNS) for key in sorted(others))
        taken = any(other is None or not self._is_elsewhere(other) for other in found)
        is_free = not taken and not place.is_taken(url, history.key)
        return url if is_free else place.of(f"{history.first['commit']}-{plan[:8]}")

    def _work(self, history: History) -> Store:
        """Where a step's result grows: an adapter on this machine, since it is written by no Beam pipeline."""
        target = self.target(history)
        is_adapter = history.facts.get("lora") and not (isinstance(target, RunTarget) and target.lora == MERGED)
        return self._place(history).workplace(history.key, here=bool(is_adapter))

    def is_given_up(self, history: History) -> bool:
        """Where the target of its name has other options now, or its table is another one."""
        return any(each.name == history.first["target"] for each in self.targets)

    def clear(self, history: History) -> None:
        """Removes what a step was made in. Where that can't be done, the step is settled all the same."""
        for here in (False, True):
            work = self._place(history).workplace(history.key, here)
            try:
                drop(work, history.check_alone)
            except OSError as e:
                warn(f"{work.url} can't be removed: {reason(e)}")

    def published_before(self, history: History) -> str | None:
        first, plan = history.first, history.facts["plan"]
        self._marks.read()
        states = (PUBLISHED, ASIDE, REMOVED)
        for mark in (mark for state in states for mark in sorted(self._marks.of(first["target"], state))):
            if mark.listed == _listed_as(history) and mark.key != history.key:
                other = find_history(self.output, self.run.name, mark.key, RUNS)
                is_same = other is not None and other.facts.get("plan") == plan
                if other and is_same and (other.state == REMOVED or self._is_published(other)):
                    return self._checkpoint(other)
        return None

    def is_made(self, history: History) -> bool:
        if history.state != VERIFIED:
            return False
        if (self._work(history) / RELEASE).exists(REPORT):
            return True
        place, url = self._place(history), self._checkpoint(history)
        # what is needed to go on with may lie on another machine; without its checkpoint nothing is made anew
        is_whole = place.is_whole(url, history.key, lambda: self._is_newest_by_now(history))
        return is_whole or (self._is_published(history) and self.is_gone(history) is not None)

    def _is_published(self, history: History) -> bool:
        return self._place(history).report(self._checkpoint(history)).get("key") == history.key

    def _checkpoint(self, history: History) -> str:
        """Where a step is published; what is recorded is where that was when its place had another name."""
        return self._place(history).at(history.facts["checkpoint"])

    def tasks(self, history: History, target: VersionTarget) -> Iterator[tuple[FeedTask, ...]]:
        assert isinstance(target, RunTarget)
        facts, work = history.facts, self._work(history)
        source, release = self.source(history), work / RELEASE
        work.make()
        made = {"source": source, "output": release.url, "asked": self._asked(target, history)}
        made["read"] = facts.get("read", "")  # none of an earlier version
        compared, judges = None, []
        if target.kind == RESHARD:
            how = FromHub(resume=True, hf_token_secret=self._config.hf_token_secret)
            yield (_write("reshard", made, how=how, beam=self._config.runner_arguments()),)
            if self._config.verify:
                judges = [FeedTask(works.verify_reshard, {"a": source, "b": release.url}, "verified")]
                compared = "every element"
        elif facts.get("lora"):
            here = self._place(history).workplace(history.key, here=True)
            adapter = here / ADAPTER if target.lora == MERGED else release
            # it appears there whole, and is what the stopped merge was planned with
            if target.lora == ADAPTER or not adapter.exists(WEIGHTS):
                here.delete_folder(adapter.url.rpartition("/")[2])
                here.make()
                asked = self._adapter(target, history)
                yield (_write("export", made, output=adapter.url, asked=asked, how=ToHub()),)
            if target.lora == MERGED:
                yield (self._merging(release.url, adapter.url, history, target),)
        else:
            yield (self._writing("quantize" if target.kind == QUANTIZE else "export", made, history),)
            if self._config.verify:
                asked = VerifyOptions(
                    sample=self._config.verify, hf_token_secret=self._config.hf_token_secret,
                    maxtext_model=target.options.maxtext_model, param_scan_axis=target.options.param_scan_axis,
                    family=getattr(target.options, "family", None),
                )  # fmt: skip
                verify = {"source": release.url, "checkpoint": source, "asked": asked}
                verify["beam"] = self._config.runner_arguments(here=True)
                judges = [FeedTask(works.verify, verify, "verified")]
                compared = f"{self._config.verify:.0%} of the elements"
        about = {"url": release.url, "about": self._about(history, target, compared), "aside": work.url}
        yield (*judges, FeedTask(works.compare, about))
        yield (FeedTask(works.describe, about, "changes"),)

    def _adapter(self, target: RunTarget, history: History) -> ExportOptions:
        """How a LoRA run's step becomes an adapter for PEFT: on this machine, also for a bucket."""
        asked = self._asked(target, history)
        names = ("like", "maxtext_config", "maxtext_model", "lora_alpha")
        known = {name: getattr(asked, name) for name in names if hasattr(asked, name)}
        is_far = "://" in self.places[target.name].url and asked.full_paths is None
        return ExportOptions(**known, full_paths=False if is_far else asked.full_paths)

    def _merging(self, output: str, adapter: str, history: History, target: RunTarget) -> FeedTask:
        """Merges a step's adapter into the release that it is for."""
        if (form := self._like_of(history)) is None:
            raise Failed(
                f"the record in {history.store} names the release that the adapter is for as {history.facts['form']}, and this "
                "watcher isn't told where that is; name it as like"
            )
        kind = QuantizeOptions if target.kind == QUANTIZE else MergeOptions
        names = {"max_shard_size", "unit_bytes", "family", "format"} & {each.name for each in options_of(kind)}
        known = {name: value for name, value in vars(target.options).items() if name in names}
        asked = kind(lora=((adapter, 1.0),), full_paths=self._full_paths(target), **known)
        into = "quantize" if target.kind == QUANTIZE else "merge"
        return self._writing(into, {"source": form, "output": output, "asked": asked}, history)

    def _writing(self, command: str, made: Mapping[str, Any], history: History) -> FeedTask:
        """Writes a release, which is compared on the way with the step before and with what the run began with: what
        `compare` has to say of it is found then, and not by reading all of them afterwards.
        """
        before, like = self._before(history), self._like_of(history)
        others = ([before["url"]] if before else []) + ([like] if like else [])
        how = ToHub(resume=True, hf_token_secret=self._config.hf_token_secret, compared_with=tuple(others))
        told = history.facts.get("form_told", "")
        return _write(command, made, how=how, beam=self._config.runner_arguments(), told=told)

    def _like_of(self, history: History) -> str | None:
        """The release that a step is made like, as the plan found it."""
        form = history.facts.get("form")
        return self.run.like if not form or is_name(form) else form

    def _about(self, history: History, target: RunTarget, compared: str | None) -> dict[str, Any]:
        """What the report says."""
        facts = history.facts
        about = {
            name: facts.get(name)
            for name in (
                "step",
                "commit",
                "updated",
                "weights",
                "target",
                "options",
                "tables",
                "plan",
                "family",
                "rounded",
            )
        }
        before, like = self._before(history), self._like_of(history)
        return about | {
            "run": self.run.checkpoints,  # a record in a bucket has a name of it
            "name": self.run.name,
            "like": like,
            "lora": target.lora if facts.get("lora") else None,
            "before": before,
            "compared": compared,
            "key": history.key,
            "weightbeam": __version__,
            "history": history.outline,
            "place": self._place(history).url,
            "revision": None if target.create_pr else history.first["commit"],
            "named": {**self.naming(self._place(history)).known, str(like): facts.get("form_told", "")},
            "full_paths": target.options.full_paths,
        }

    def _before(self, history: History) -> dict[str, Any] | None:
        """The step before, of those that are published: its number and URL.

        Raises:
          Failed: it can't be told.
        """
        found = [mark for mark in self._marks.of(history.first["target"]) if mark.step < history.first["step"]]
        for mark in sorted(found, key=lambda mark: (mark.step, mark.updated), reverse=True):
            other = find_history(self.output, self.run.name, mark.key, RUNS)
            try:
                if other and other.state == PUBLISHED and self._is_published(other):
                    return {"step": mark.step, "url": self._checkpoint(other)}
            except StorageError as e:
                raise Failed(str(e)) from e
        return None

    def _listed(self) -> set[tuple[int, str]]:
        """The numbers and marks of the steps that the run had when it was last listed."""
        return {seen.listed for seen in self._there}

    def judgement(self, facts: Mapping[str, Any]) -> str | None:
        return (
            None
            if facts.get("verified")
            else "not compared: " + ("verify is 0" if not self._config.verify else "an adapter")
        )

    def withheld(self, history: History, target: VersionTarget) -> str | None:
        assert isinstance(target, RunTarget)
        if not _not_finite(history) or target.on_nan != HOLD or self._is_published(history):
            return None
        return f"isn't published, by on_nan: {HOLD}: {_warnings(history)}"

    def notice(self, history: History, target: VersionTarget) -> str | None:
        if self._is_passed_over(history):
            return f"isn't made the newest: {_warnings(history)}"
        return _warnings(history) or None

    def _is_passed_over(self, history: History) -> bool:
        """Whether a step is never the newest: it has elements that are NaN or infinite."""
        target = self.target(history)
        return _not_finite(history) and isinstance(target, RunTarget) and target.on_nan != NEWEST

    def publish(self, history: History, target: VersionTarget) -> dict[str, Any]:
        assert isinstance(target, RunTarget)
        place, work = self._place(history), self._work(history)
        url, title = self._checkpoint(history), self._title(history)
        said: dict[str, Any] = {}
        try:
            self._check_owner(place)
            if (work / RELEASE).exists(REPORT):
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
        """The same, whatever the run and other watchers did while this step was made."""
        self._marks.read()
        with contextlib.suppress(OSError):
            self._there = list_steps(self.store)
        return self._is_newest(history)

    def _point(self, history: History, url: str) -> None:
        """Has `<run>/<target>.json` in the output, or `<target>.json` where it is the run's alone, be the report of the
        newest step, which was published at `url`.
        """
        report = {**self._place(history).report(url), "checkpoint": url}
        said = json.dumps(history.naming().told(report), indent=1).encode()
        pointer, is_told = self._pointer(history.first["target"]), False
        while not is_told:
            before = self.output.stat(pointer)
            if before and not is_pointer(self.output.read(pointer)):
                warn(told_foreign(self.output.path(pointer), url))
                return
            is_told = not self._is_newest_by_now(history) or self.output.write_over(pointer, said, before)

    def _pointer(self, target: str) -> str:
        return f"{target}.json" if self._flat else f"{self.run.name}/{target}.json"

    def _is_pointed_at(self, history: History) -> bool:
        """Whether a step is what readers are told is the newest, which it may not be any more: the run may have gone back to
        one that was published before, by which the pointer isn't moved.
        """
        try:
            report = json.loads(self.output.read(self._pointer(history.first["target"])))
        except (FileNotFoundError, ValueError):  # there is none, or it is somebody else's
            return False
        return isinstance(report, Mapping) and report.get("key") == history.key

    def announce(self, history: History, target: VersionTarget) -> Sequence[Record]:
        """Marks it, and removes what `keep` doesn't keep; pull requests are up to those whom they ask."""
        assert isinstance(target, RunTarget)
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
        published = [self._marks.all_but_last(keep.last, target.name, there, state) for state in (PUBLISHED, ASIDE)]
        for mark in itertools.chain(*published):
            if keep.every and mark.step % keep.every == 0:
                continue
            is_this = history is not None and mark.key == history.key
            other = history if is_this else find_history(self.output, self.run.name, mark.key, RUNS)
            if other is None:
                continue
            if other.state == PUBLISHED and not self._is_newest(other):
                try:
                    if self._is_pointed_at(other) or self._is_elsewhere(other):
                        continue
                    removed.append(other.add(REMOVED, self._remove(other)))
                except (OSError, LostError) as e:
                    warn(f"{self._checkpoint(other)} can't be removed: {e}")
                    continue
            self._mark(other)
        return removed

    def _is_elsewhere(self, history: History) -> bool:
        """Whether a step lies where it was published, and that is another output than its target has now: nothing is
        removed there.

        Raises:
          OSError: it can't be told.
        """
        recorded, url = history.facts["checkpoint"], self._checkpoint(history)
        if recorded == url or is_name(recorded) or self._place(history).report(url).get("key") == history.key:
            return False
        there = open_place(recorded.rpartition("/")[0], scratch_of(self.output))
        return there.report(recorded).get("key") == history.key

    def _remove(self, history: History) -> str:
        """Removes a published step; returns why it isn't there any more.

        Raises:
          OSError: it can't be removed, or would take with it what others have put there.
        """
        place, url, keep = self._place(history), self._checkpoint(history), self.run.keep
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


def _write(command: str, made: Mapping[str, Any], **more: Any) -> FeedTask:
    """What a command makes of a step."""
    return FeedTask(works.write, {"command": command, **made, **more})


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


def _asked(target: VersionTarget) -> list[str]:
    """Identifies what is asked for of each step; and as versions did whose tables say the same."""
    facts = [json.dumps([target.name, target.facts, said], sort_keys=True) for said in (tables(), *former())]
    return [hashlib.sha256(each.encode()).hexdigest()[:12] for each in facts]


def _folder_of(history: History) -> str:
    """The name of a step's folder in its run."""
    return history.first["source"].rpartition("/")[2]


def scratch_of(output: Store) -> Path:
    """A folder of this machine for what can't be made where it is published."""
    if isinstance(output, LocalFolder):
        return output.folder / ".weightbeam" / "work"
    return cache_folder("watch", hashlib.sha256(output.url.encode()).hexdigest()[:12])
