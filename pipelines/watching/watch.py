"""`weightbeam watch`: converts the releases of the hub that a configuration asks for, and exports the steps of training
runs, as they come.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import os
import queue
import re
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

from weightbeam.formats.text.installing import install
from weightbeam.pipelines.running.token_secret import use_secret
from weightbeam.pipelines.running.without_beam import is_local
from weightbeam.pipelines.terminal.arguments.commands import RunOptions
from weightbeam.pipelines.terminal.arguments.parser import refuse_unknown
from weightbeam.pipelines.terminal.errors import Failed, Refused
from weightbeam.pipelines.terminal.shell import say
from weightbeam.pipelines.terminal.shown import Shown
from weightbeam.pipelines.terminal.tables import Block, Table
from weightbeam.pipelines.watching.actions import prepare_to_compare, prepare_to_make
from weightbeam.pipelines.watching.config import WatchConfig, config_of_run, read_config
from weightbeam.pipelines.watching.feed import Feed
from weightbeam.pipelines.watching.isolation import Workers
from weightbeam.pipelines.watching.notices import Notices, inform, warn
from weightbeam.pipelines.watching.preflight import check_runs
from weightbeam.pipelines.watching.receiver import SECRET, receive_webhooks
from weightbeam.pipelines.watching.records import LostError, State
from weightbeam.pipelines.watching.release_feed import ReleaseFeed
from weightbeam.pipelines.watching.run_feed import RunFeed
from weightbeam.pipelines.watching.watcher import Finding, Watcher
from weightbeam.transforms.planning.options import options_of

HASH = re.compile("[0-9a-f]{40}|")  # of the hub's commits
# the options of --run that say what a step is made into, as a target of a file does
TARGET = tuple(each.name for each in options_of(RunOptions))


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Watches once, or until it is stopped."""
    if args.json and not (args.once or args.dry_run or args.retry):
        raise Refused(
            "--json tells how things stand in the end: it goes with --once, --dry_run and --retry; --progress json logs JSON as things happen"
        )
    refuse_unknown(
        args,
        rest,
        "a configuration (--config) has what is passed on to Beam, under runner, and fields of runs, such as keep",
    )
    config = _config(args)
    if args.serve is not None and not os.environ.get(SECRET):
        raise Refused(f"--serve needs {SECRET} in the environment: the secret that the hub's webhook was given")
    use_secret(config.hf_token_secret)
    try:
        found = _watch(args, config)
    except LostError as e:
        raise Failed(f"  {e} at this moment; run it again for what is still refused or failed") from e
    except OSError as e:
        raise Failed(f"  {e}") from e
    say(args, found)  # that nobody reads it is no failure of what was looked at
    return int(any(finding.state == State.FAILED for finding in found.findings))


def _watch(args: argparse.Namespace, config: WatchConfig) -> Findings:
    """Returns how things stand after one look, or after a retry; otherwise it goes on until it is stopped.

    Raises:
      Refused: a run that can't be followed, or nothing of the name that is retried.
      OSError: such as the output.
    """
    once, prepare = args.once or args.dry_run, partial(prepare_to_make, is_local(config.runner_arguments()))
    with Workers(prepare, prepare_to_compare, stays=not once) as workers:
        runs = [RunFeed(config, run, workers, flat=bool(args.run)) for run in config.runs]
        feeds = [*([ReleaseFeed(config)] if config.models else []), *runs]
        watcher = Watcher(config, feeds, Notices(config.notify), args.dry_run)
        if args.retry:
            _check_watched(args.retry, config, feeds)
            return Findings(watcher.retry(args.retry), f"Nothing of {args.retry} is refused, held or failed.")
        check_runs(runs, args.dry_run)
        if runs and importlib.util.find_spec("matplotlib") is None:
            inform(
                f"without changes.png, the picture of what a step changed: matplotlib isn't installed; {install('follow')}"
            )
        if once:
            return Findings(watcher.once())
        for feed in runs:
            waits = feed.waits_for(feed.run.name) or feed.run.checkpoints
            seconds = args.interval
            every = f"{seconds / 60:g} min" if seconds % 60 == 0 else f"{seconds:g} s"
            inform(f"following {feed.run.name}, looking every {every} until Ctrl-C: {waits}")
        with _webhooks(args.serve) as changed:
            _loop(watcher, args.interval, changed)


def _config(args: argparse.Namespace) -> WatchConfig:
    """What is watched: a file says it, or the options do for one run. Raises Refused: neither, both, or everything that
    is wrong with it.
    """
    target = {name: value for name in TARGET if (value := getattr(args, name)) is not None}
    given = [f"--{name}" for name in ("run", "like", "output", "every", *TARGET) if getattr(args, name) is not None]
    if args.config:
        if given:
            raise Refused(f"{', '.join(given)}: what the file of --config says; give the one or the other")
        return read_config(args.config)
    if not args.run:
        raise Refused(
            "--config is missing: a file that says what to watch (`weightbeam help watching` has an example); or --run: the checkpoints of a training run"
        )
    if not args.output:
        raise Refused("--output is missing: a folder, gs://bucket/folder or hf://owner/name for the run's steps")
    return config_of_run(args.run, args.like, args.output, args.every, target)


def _check_watched(name: str, config: WatchConfig, feeds: Sequence[Feed]) -> None:
    """Raises `Refused` where `--retry` names nothing that is watched."""
    if not any(feed.is_wanted(name) for feed in feeds):
        there = ", ".join([*config.models, *(run.name for run in config.runs)])
        raise Refused(f"--retry={name}: no such model or run is watched; there are {there}")


@contextlib.contextmanager
def _webhooks(port: int | None) -> Iterator[queue.SimpleQueue[str]]:
    """The models that webhooks name; none without a port."""
    changed: queue.SimpleQueue[str] = queue.SimpleQueue()
    if port is None:
        yield changed
        return
    try:
        with receive_webhooks(port, os.environ[SECRET], changed.put):
            yield changed
    except OSError as e:
        raise Refused(f"--serve={port}: {e.strerror or e}") from e


def _loop(watcher: Watcher, interval: float, changed: queue.SimpleQueue[str]) -> NoReturn:
    """Looks at everything each `interval` seconds, and in between at the models that webhooks name, or that are due."""
    next_round, due = time.monotonic(), dict[str, float]()  # model -> when to look at it
    while True:
        with contextlib.suppress(queue.Empty):
            repo = changed.get(timeout=max(0.0, min([next_round, *due.values()]) - time.monotonic()))
            while True:  # many that name one model are one look
                if any(feed.is_wanted(repo) for feed in watcher.feeds):
                    due[repo] = time.monotonic()
                repo = changed.get_nowait()
        if time.monotonic() >= next_round:
            due |= _look(watcher, None)
            next_round = time.monotonic() + interval
        for repo in [repo for repo, at in due.items() if at <= time.monotonic()]:
            del due[repo]
            due |= _look(watcher, [repo])


def _look(watcher: Watcher, repos: list[str] | None) -> dict[str, float]:
    """Has the watcher look once; returns which models to look at again, and when."""
    try:
        findings = watcher.once(repos)
    except OSError as e:  # the output, which may be there again next time
        warn(str(e))
        return {}
    offset = time.monotonic() - time.time()
    return {finding.repo: finding.again.timestamp() + offset for finding in findings if finding.again}


@dataclasses.dataclass(frozen=True, repr=False)
class Findings(Shown):
    """How things stand with each version and target that needed something.

    Attributes:
      none: what is said where there is none.
    """

    findings: Sequence[Finding]
    none: str = "Nothing to do."

    def blocks(self) -> list[Block]:
        if not self.findings:
            return [self.none]
        # the hub's commits may be left out; steps tell what is meant
        spare = ("commit",) if all(HASH.fullmatch(finding.commit) for finding in self.findings) else ()
        rows = Table("model or run", "commit", "target", "state", "where, or why", spare=spare)
        for finding in self.findings:
            rows.add_row(finding.repo, finding.commit[:12], finding.target, finding.state, _told(finding))
        return [rows]

    def to_dict(self) -> dict[str, Any]:
        return {"findings": [finding.to_dict() for finding in self.findings]}


def _told(finding: Finding) -> str:
    """Where a result lies, and what is worth knowing of it; or why there is none, and when it is tried again."""
    told = ": ".join(
        filter(None, (finding.place, "; ".join(map(str.strip, finding.reason.splitlines())).replace(":; ", ": ")))
    )
    if finding.state != State.FAILED or not finding.target:
        return told
    when = f"is tried again at {finding.again:%Y-%m-%d %H:%M} UTC" if finding.again else "isn't tried again"
    return f"{when}; --retry {finding.repo} has it begin anew: {told}"  # what went wrong may be long
