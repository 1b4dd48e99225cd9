"""What stands against following runs, said before any of it begins: all of it at once."""

from __future__ import annotations

import contextlib
import os
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from weightbeam.formats.orbax import CHECKPOINT_METADATA, METADATA
from weightbeam.formats.orbax.reading import CHECKPOINTS
from weightbeam.formats.release.files import has_weights
from weightbeam.formats.storage import HUB, StorageError, Store, branch_of, is_hub, open_store, reason, repo_of
from weightbeam.formats.storage.hub import FIRST_ATTEMPTS, Repository, name_now
from weightbeam.pipelines.terminal.errors import Refused
from weightbeam.pipelines.terminal.tables import human
from weightbeam.pipelines.watching.config import MERGED, is_maxtext_config
from weightbeam.pipelines.watching.isolation import PLAN_SECONDS, Status
from weightbeam.pipelines.watching.notices import warn
from weightbeam.pipelines.watching.places import Place, check_writable, told_other_run
from weightbeam.pipelines.watching.records import SKEW, DamagedRecordError, now
from weightbeam.pipelines.watching.run_feed import RunFeed
from weightbeam.pipelines.watching.runs import RunStep, read_step

NO_NAMES: Mapping[str, str] = {}


def check_runs(feeds: Sequence[RunFeed], dry_run: bool) -> None:
    """Looks at every run and at every place before the first byte.

    Raises:
      Refused: with everything that stands against it.
    """
    if not feeds:
        return
    output = feeds[0].output  # one for all
    held = [
        (f"run {feed.run.name}, target {name}", feed, place)
        for feed in feeds
        for name, place in feed.places.by_target.items()
    ]
    problems = _find_shared_places([(who, place.url) for who, _, place in held], feeds)
    problems += _find_removed_forms(held, feeds)
    for feed in feeds:
        problems += _find_problems(feed)
    places = [(who, feed, place) for who, feed, place in held if not _runs_around(place.url, feeds)]
    missing = [] if dry_run else _missing([*(place.url for _, _, place in places), output.url])
    for who, feed, place in places:
        problems += _find_place_problems(who, feed, place, dry_run)
    if not _runs_around(output.url, feeds) and output.url not in [place.url for _, _, place in places]:
        try:
            check_writable(output, dry_run)
        except StorageError as e:
            problems.append(f"output: {e}")
    if problems:
        for folder in missing:  # was made to see whether it can be
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        raise Refused(*(textwrap.indent(problem, "  ") for problem in dict.fromkeys(problems)))


def _find_shared_places(held: Sequence[tuple[str, str]], feeds: Sequence[RunFeed]) -> list[str]:
    """Places that several runs or targets would publish into, or that lie in what is read. `held`: whose, and the URL."""
    problems, output, names = [], feeds[0].output, _names_now([url for _, url in held])
    for number, (who, url) in enumerate(held):
        for other, theirs in held[:number]:
            if _real(url, names) == _real(theirs, names):
                problems.append(f"{who}: is published into {url}, as is {other}; give each an output of its own")
    for who, url in [*held, ("output", output.url)]:
        for run in _runs_around(url, feeds):
            problems.append(f"{who}: {url} lies in {run}: nothing is ever written there; choose another output")
    return problems


def _find_removed_forms(held: Sequence[tuple[str, RunFeed, Place]], feeds: Sequence[RunFeed]) -> list[str]:
    """Releases that runs name, and that lie where `keep` removes old steps. `held`: whose each place is."""
    named = [(like, f"which run {feed.run.name} is like") for feed in feeds if (like := feed.run.like)]
    named += [
        (tokenizer, f"of which {who} takes the tokenizer")
        for feed in feeds
        for target in feed.run.targets
        if (tokenizer := getattr(target.options, "tokenizer", None))
        for who in [f"run {feed.run.name}, target {target.name},"]
    ]
    return [
        f"{who}: keep removes old steps in {place.url}, where {url} lies, {what}; name a copy of it elsewhere"
        for who, feed, place in held
        if (keep := feed.run.keep)
        for url, what in named
        if (step := re.match(rf"{re.escape(_real(place.url))}[/@]step-(\d+)", _real(url)))
        if not (keep.every and int(step[1]) % keep.every == 0)
    ]


def _names_now(urls: Iterable[str]) -> dict[str, str]:
    """What the repositories among some places are called now, where they are several; as far as the hub says it."""
    repos, names = {repo_of(url.rstrip("/"))[0] for url in urls if is_hub(url)}, dict[str, str]()
    with contextlib.suppress(StorageError):
        for repo in repos if len(repos) > 1 else ():
            names[repo] = name_now(repo, FIRST_ATTEMPTS)
    return names


def _runs_around(url: str, feeds: Sequence[RunFeed]) -> list[str]:
    """The runs into whose folders something would be written, and the releases that they are like."""
    read = {feed.run.checkpoints: "a run" for feed in feeds}
    read |= {feed.run.like: "a release that a run is like" for feed in feeds if feed.run.like}
    return [f"{place}, {what}" for place, what in read.items() if _is_below(url, place)]


def _is_below(url: str, folder: str) -> bool:
    """Whether something lies in a folder, or is it."""
    return f"{_real(url)}/".startswith(f"{_real(folder)}/")


def _missing(urls: Sequence[str]) -> list[Path]:
    """The folders that aren't there yet, with those around them, the innermost first."""
    folders = [Path(url, ".weightbeam") for url in urls if "://" not in url]
    around = {folder for inner in folders for folder in (inner, *inner.parents) if not os.path.lexists(folder)}
    return sorted(around, key=lambda folder: len(folder.parts), reverse=True)


def _real(url: str, names: Mapping[str, str] = NO_NAMES) -> str:
    """Where something lies, by whatever link it is named, or by whichever name of a branch; `names` are what repositories
    are called now.
    """
    if is_hub(url):
        repo, revision = repo_of(url.rstrip("/"))
        return f"{HUB}{names.get(repo, repo).lower()}@{branch_of(revision)}".removesuffix("@main")
    return url if "://" in url else os.path.realpath(url)


def _find_problems(feed: RunFeed) -> list[str]:
    """What stands against reading one run."""
    run = feed.run
    try:
        steps = feed.look()
        if not steps:
            return _find_no_run(feed.store)
        if run.like and "://" not in run.like and not is_maxtext_config(run.like):  # which nothing may ask for, now
            open_store(run.like).check_readable()
        newest = None if feed.is_known() else read_step(feed.store, run.name, steps[-1])
    except DamagedRecordError:  # stops this run alone, at each look
        return []
    except OSError as e:
        return [str(e) if isinstance(e, StorageError) else f"{run.checkpoints}: {reason(e)}"]
    if newest is None:  # all is known to be well, or it has gone while it was looked at
        return []
    if newest.updated > now() + SKEW:
        warn(
            f"{newest.url} was committed at {newest.updated:%Y-%m-%d %H:%M} UTC by the run's clock, and it is {now():%Y-%m-%d %H:%M} by this machine's"
        )
    return _find_plan_problems(feed, newest)


def _find_plan_problems(feed: RunFeed, step: RunStep) -> list[str]:
    """What stands against making a step into each target; where nothing does, warns of what is fetched for each step."""
    problems: list[str] = []
    compared: dict[str, None] = {}  # releases that steps are compared with
    with feed.apart() as apart:
        for target in feed.run.targets:
            who = f"run {feed.run.name}, target {target.name}: step {step.number}"
            task = feed.plan(step.url, target)
            outcome = apart.run(task, PLAN_SECONDS)
            is_adapter, is_merged = bool(outcome.facts.get("lora")), target.lora == MERGED
            like = feed.run.like or outcome.facts.get("form")
            if like and (is_merged or not is_adapter):
                compared[like] = None
            if outcome.status in (Status.REFUSED, Status.UNREACHED):
                problems.append(f"{who}: {outcome.message}")
            elif is_adapter and is_merged and not has_weights(form := outcome.facts["form"]):
                problems.append(
                    f"{who} is an adapter, and like, {form}, has no weights that it could be merged into; name the release itself"
                )
    if not problems:
        _warn_of_downloads(compared)
    return problems


def _find_no_run(store: Store) -> list[str]:
    """What a folder without steps is, where it won't ever have some; nothing where there may be a run at its beginning."""
    with contextlib.suppress(FileNotFoundError):  # it isn't there yet
        names = store.entries()
        if CHECKPOINT_METADATA in names or METADATA in names:
            return [f"{store}: is a checkpoint; a run is the folder of its steps, {store.parent}"]
        if any(name.endswith(".safetensors") for name in names):
            return [f"{store}: is a release; a run is a folder of checkpoints, such as RUN/checkpoints"]
        if CHECKPOINTS in store.folders():
            return [f"{store}: has no steps; did you mean {store / CHECKPOINTS}?"]
    return []


def _warn_of_downloads(likes: Iterable[str]) -> None:
    """Says which releases are fetched for each step, and how that is spared; nothing where the hub doesn't answer."""
    for like in likes:
        nbytes, (name, revision) = 0, repo_of(like)
        with contextlib.suppress(OSError):
            if is_hub(like) and isinstance(release := open_store(like), Repository):
                nbytes = sum(file.size for file in release.fetched() if file.name.endswith(".safetensors"))
        command = f"hf download {name} --include '*.safetensors'" + (f" --revision {revision}" if revision else "")
        if nbytes:
            warn(
                f"{like}: {human(nbytes)} are fetched for each step, to tell what changed; `{command}`, once, where it is exported, spares that"
            )


def _find_place_problems(who: str, feed: RunFeed, place: Place, dry_run: bool) -> list[str]:
    """Whether a place can't be written, or is another run's; one whose owner can't be read stops its own run, at each
    look.
    """
    try:
        place.check_writable(dry_run)
        owner = feed.places.taken_by(place)
    except DamagedRecordError:
        return []
    except OSError as e:
        return [f"{who}: {e if isinstance(e, StorageError) else f'{place.url}: {reason(e)}'}"]
    return [f"{who}: {told_other_run(place.url, owner)}"] if owner else []
