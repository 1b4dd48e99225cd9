"""What is made of a step of a training run: the tasks from its plan to a result that was compared and described."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

from weightbeam import __version__
from weightbeam.formats.adapters.adapter import WEIGHTS
from weightbeam.formats.record.naming import is_name
from weightbeam.formats.storage import StorageError, Store, is_hub
from weightbeam.pipelines.terminal.errors import Failed
from weightbeam.pipelines.watching import actions, describing
from weightbeam.pipelines.watching.config import (
    ADAPTER,
    MERGED,
    QUANTIZE,
    RESHARD,
    Run,
    RunTarget,
    WatchConfig,
    is_maxtext_config,
)
from weightbeam.pipelines.watching.isolation import Task
from weightbeam.pipelines.watching.places import RELEASE
from weightbeam.pipelines.watching.records import History, State
from weightbeam.pipelines.watching.step_places import StepPlaces
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


class StepTasks:
    """The tasks that a step goes through, each in a process of its own."""

    def __init__(self, config: WatchConfig, run: Run, places: StepPlaces):
        self._config, self._run, self._places = config, run, places

    def plan(self, source: str, target: RunTarget) -> Task:
        """Plans what is made of a step that is read from `source`."""
        return Task(partial(actions.plan_step, target.kind, source, self._asked(target), target.lora))

    def _asked(
        self, target: RunTarget, history: History | None = None
    ) -> ExportOptions | QuantizeOptions | ReshardOptions:
        """The options of the command that makes a step, with what the run says: like what it is, once it is planned as the
        plan found that, and how sources are named where it goes, since a step is made in a folder first.
        """
        said: dict[str, Any] = {"full_paths": self._full_paths(target)}
        if target.kind == RESHARD:
            said["state"] = PARAMS
        if self._run.like is not None:
            if is_maxtext_config(self._run.like):
                said["maxtext_config"] = self._run.like
            else:
                said["like"] = self._like_of(history) if history else self._run.like
        return dataclasses.replace(target.options, **said)

    def _full_paths(self, target: RunTarget) -> bool | None:
        on_hub = is_hub(self._places.by_target[target.name].url)
        return False if on_hub and target.options.full_paths is None else target.options.full_paths

    def tasks(self, history: History, target: RunTarget, source: str, work: Store) -> Iterator[tuple[Task, ...]]:
        """What is done of a step that is read from `source`, in the folder `work`; see `Feed.tasks`."""
        facts, release = history.facts, work / RELEASE
        work.make()
        read = facts.get("read", "")  # none of an earlier version
        write = partial(actions.write, source=source, output=release.url, asked=self._asked(target, history), read=read)
        compared, judges = None, []
        if target.kind == RESHARD:
            how = FromHub(resume=True, hf_token_secret=self._config.hf_token_secret)
            yield (Task(partial(write, "reshard", how=how, beam=self._config.runner_arguments())),)
            if self._config.verify:
                judges = [Task(partial(actions.verify_reshard, source, release.url), "verified")]
                compared = "every element"
        elif facts.get("lora"):
            here = self._places.of(history).workplace(history.key, here=True)
            adapter = here / ADAPTER if target.lora == MERGED else release
            if target.lora == ADAPTER or not adapter.exists(WEIGHTS):  # it appears there whole
                adapter.parent.make()
                how = ToHub(resume=True, hf_token_secret=self._config.hf_token_secret)
                as_adapter = self._adapter(target, history)
                yield (Task(partial(write, "export", output=adapter.url, asked=as_adapter, how=how)),)
            if target.lora == MERGED:
                yield (self._merging(release.url, adapter.url, history, target),)
        else:
            yield (self._writing(partial(write, "quantize" if target.kind == QUANTIZE else "export"), history),)
            if self._config.verify:
                asked = VerifyOptions(
                    sample=self._config.verify, hf_token_secret=self._config.hf_token_secret,
                    maxtext_model=target.options.maxtext_model, param_scan_axis=target.options.param_scan_axis,
                    family=getattr(target.options, "family", None),
                )  # fmt: skip
                here = self._config.runner_arguments(here=True)
                judges = [Task(partial(actions.verify, release.url, source, asked, here), "verified")]
                compared = f"{self._config.verify:.0%} of the elements"
        about = self._about(history, target, compared)
        yield (*judges, Task(partial(describing.compare, release.url, about, work.url)))
        yield (Task(partial(describing.describe, release.url, about, work.url), "changes"),)

    def _adapter(self, target: RunTarget, history: History) -> ExportOptions:
        """How a LoRA run's step becomes an adapter for PEFT."""
        asked = self._asked(target, history)
        names = ("like", "maxtext_config", "maxtext_model", "param_scan_axis", "lora_alpha")
        known = {name: getattr(asked, name) for name in names if hasattr(asked, name)}
        is_far = "://" in self._places.by_target[target.name].url and asked.full_paths is None
        return ExportOptions(**known, full_paths=False if is_far else asked.full_paths)

    def _merging(self, output: str, adapter: str, history: History, target: RunTarget) -> Task:
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
        return self._writing(partial(actions.write, into, source=form, output=output, asked=asked), history)

    def _writing(self, write: partial[dict[str, Any]], history: History) -> Task:
        """Writes a release, which is compared on the way with the step before and with what the run began with: what
        `compare` has to say of it is found then, and not by reading all of them afterwards.
        """
        before, like = self._before(history), self._like_of(history)
        others = ([before["url"]] if before else []) + ([like] if like else [])
        how = ToHub(resume=True, hf_token_secret=self._config.hf_token_secret, compared_with=tuple(others))
        form_digest = history.facts.get("form_told", "")
        return Task(partial(write, how=how, beam=self._config.runner_arguments(), form_digest=form_digest))

    def _like_of(self, history: History) -> str | None:
        """The release that a step is made like, as the plan found it."""
        form = history.facts.get("form")
        return self._run.like if not form or is_name(form) else form

    def _about(self, history: History, target: RunTarget, compared: str | None) -> dict[str, Any]:
        """What the report says."""
        facts = history.facts
        names = (
            "step", "commit", "updated", "weights", "target", "options", "tables", "plan", "family", "rounded",
        )  # fmt: skip
        about = {name: facts.get(name) for name in names}
        before, like = self._before(history), self._like_of(history)
        return about | {
            "run": self._run.checkpoints,  # a record in a bucket has a name of it
            "name": self._run.name,
            "like": like,
            "lora": target.lora if facts.get("lora") else None,
            "before": before,
            "compared": compared,
            "key": history.key,
            "weightbeam": __version__,
            "history": history.outline,
            "place": self._places.of(history).url,
            "revision": None if target.create_pr else history.first["commit"],
            "named": {**self._places.naming(self._places.of(history)).known, str(like): facts.get("form_told", "")},
            "full_paths": target.options.full_paths,
        }

    def _before(self, history: History) -> dict[str, Any] | None:
        """The step before, of those that are published: its number and URL. Raises Failed where it can't be told."""
        found = [mark for mark in self._places.marks.of(history.first["target"]) if mark.step < history.first["step"]]
        for mark in sorted(found, key=lambda mark: (mark.step, mark.updated), reverse=True):
            other = self._places.find(mark.key)
            try:
                if other and other.state == State.PUBLISHED and self._places.is_published(other):
                    return {"step": mark.step, "url": self._places.checkpoint(other)}
            except StorageError as e:
                raise Failed(str(e)) from e
        return None
