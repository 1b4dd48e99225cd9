"""Where the steps of a training run are published, and whose these places and the records are."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from weightbeam.formats.record.naming import Naming, is_name
from weightbeam.formats.storage import LocalFolder, StorageError, Store, is_hub, open_store
from weightbeam.pipelines.watching.config import Run, RunTarget, WatchConfig, cached_for
from weightbeam.pipelines.watching.marks import Marks
from weightbeam.pipelines.watching.places import Place, open_place, owner_of, told_other_run
from weightbeam.pipelines.watching.records import RUNS, DamagedRecordError, History, find_history

RECORDS_OWNER = "run.json"  # beside the records: whose they are


class StepPlaces:
    """The places of a run's steps.

    Attributes:
      by_target: the place of each target, by the target's name.
      output: what the configuration names, with the records of all runs.
      marks: what is settled of the run's steps.
    """

    def __init__(self, config: WatchConfig, run: Run, is_flat: bool):
        """`is_flat`: the output is the run's alone, and its steps lie directly below it."""
        self.output, self._run, self._is_flat = config.output, run, is_flat
        self._urls = {run.checkpoints, open_store(run.checkpoints).url}
        self._records = config.output / RUNS / run.name
        self.marks = Marks(self._records)
        scratch = _scratch_of(config.output)
        self.by_target: dict[str, Place] = {}
        for target in run.targets:
            below = config.output.url if is_flat else (config.output / run.name / target.name).url
            self.by_target[target.name] = open_place(target.output or below, scratch, target.create_pr)
        self._targets: Sequence[RunTarget] | None = None

    def pointer(self, target: str) -> str:
        """The file of the output that is the report of a target's newest step."""
        return f"{target}.json" if self._is_flat else f"{self._run.name}/{target}.json"

    # --- where a step is

    def of(self, history: History) -> Place:
        """The place that a step is made for."""
        return self.by_target[history.first["target"]]

    def find(self, key: str) -> History | None:
        """A history of the run."""
        return find_history(self.output, self._run.name, key, RUNS)

    def checkpoint(self, history: History) -> str:
        """Where a step is published; what is recorded is where that was when its place had another name."""
        return self.of(history).at(history.facts["checkpoint"])

    def is_published(self, history: History) -> bool:
        """Whether a step lies there."""
        return self.of(history).report(self.checkpoint(history)).get("key") == history.key

    def is_elsewhere(self, history: History) -> bool:
        """Whether a step lies where it was published, and that is another output than its target has now: nothing is
        removed there.

        Raises:
          OSError: it can't be told.
        """
        recorded, url = history.facts["checkpoint"], self.checkpoint(history)
        if recorded == url or is_name(recorded) or self.of(history).report(url).get("key") == history.key:
            return False
        there = open_place(recorded.rpartition("/")[0], _scratch_of(self.output))
        return there.report(recorded).get("key") == history.key

    # --- how the run and its targets are known

    @property
    def targets(self) -> Sequence[RunTarget]:
        """What a step is made into; each known by the output that its place had first, whatever way leads there now."""
        if self._targets is None:
            self._targets = [dataclasses.replace(each, output=self._known_output(each)) for each in self._run.targets]
        return self._targets

    def _known_output(self, target: RunTarget) -> str | None:
        """The output by which a target's place is known. Raises DamagedRecordError where what the place says of itself
        is damaged: nothing of this run is published then.
        """
        place = self.by_target[target.name]
        known = place.known_as()
        if target.output is None or is_hub(target.output):
            return target.output
        if known:
            return known
        self.marks.read()  # of a version that didn't say it there: the newest step does, if it is there
        newest = max(self.marks.of(target.name), default=None)
        history = self.find(newest.key) if newest else None
        if history is None or place.report(url := self.checkpoint(history)).get("key") != history.key:
            return target.output
        return history.facts["checkpoint"].removesuffix(url.removeprefix(place.url))

    def naming(self, place: Place) -> Naming:
        """How the run is named in one of its places: by a hash of where it lies, since what it holds changes."""
        asked = next(
            (each.options.full_paths for each in self._run.targets if self.by_target[each.name] is place), None
        )
        return self._naming(place.url, asked)

    def _naming(self, url: str, full_paths: bool | None = None) -> Naming:
        run = self._run.checkpoints
        known = {run: hashlib.sha256(run.encode()).hexdigest()[:16]}
        return dataclasses.replace(Naming.of(url, full_paths), known=known)

    # --- whose it is

    def own(self, history: History) -> None:
        """Makes a step's place and the records this run's.

        Raises:
          StorageError: one of them is another run's.
        """
        place, known = self.of(history), {target.name: target.output for target in self.targets}
        self._claim_records()
        place.own(self.naming(place).name(self._run.checkpoints), known.get(history.first["target"]))

    def check_owner(self, place: Place) -> None:
        """Makes sure that neither a place nor the records are another run's, which may have begun since this watcher did; the
        records are this one's then.

        Raises:
          StorageError: one of them is.
        """
        self._claim_records()
        if owner := self.taken_by(place):
            raise StorageError(told_other_run(place.url, owner))

    def taken_by(self, place: Place) -> str | None:
        """The other run whose steps are published in a place.

        Raises:
          OSError: it can't be told.
        """
        return self._other_run(place.owner(), self.naming(place))

    def check_records(self) -> None:
        """Makes sure that the records aren't another run's, which a file of its own may give the same name. Where the output
        is the run's alone, its place says whose it is.

        Raises:
          StorageError: they are.
        """
        if self._is_flat:
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
                f"run {self._run.name}: {self._records} holds the records of another run of this name, {other}; give one of "
                "them another name, or an output of its own"
            )

    def _claim_records(self) -> None:
        """Makes the records this run's, unless they are another's. Raises StorageError where they are."""
        self.check_records()
        self._records.make()
        name = self._naming(self.output.url).name(self._run.checkpoints)
        if not self._records.create(RECORDS_OWNER, json.dumps({"run": name}).encode()):
            self.check_records()

    def _owner_by_records(self) -> str | None:
        """The run that records of a version are of which didn't say it beside them, by where its newest step was; None
        where they don't tell.
        """
        self.marks.read()
        newest = max(self.marks, default=None)
        history = self.find(newest.key) if newest else None
        run = history.first["source"].rpartition("/")[0] if history else ""
        return None if not run or is_name(run) else run

    def _other_run(self, owner: str | None, naming: Naming) -> str | None:
        return None if owner in (None, *self._urls, naming.name(self._run.checkpoints)) else owner


def _scratch_of(output: Store) -> Path:
    """A folder of this machine for what can't be made where it is published."""
    if isinstance(output, LocalFolder):
        return output.folder / ".weightbeam" / "work"
    return cached_for(output.url)
