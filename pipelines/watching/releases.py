"""What the hub has: which models match, the release that a branch points to, and whether it is whole and allowed."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fnmatch
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from huggingface_hub import ModelInfo
from huggingface_hub.errors import GatedRepoError, HFValidationError, RevisionNotFoundError
from huggingface_hub.utils import validate_repo_id

from weightbeam.formats.safetensors import CONFIGS, INDEX, MAX_HEADER
from weightbeam.formats.storage import StorageError, Store, open_store
from weightbeam.formats.storage.hub import api, check_form, describe, hub_errors, retried, told_endpoint
from weightbeam.formats.storage.meant import PICKLES
from weightbeam.formats.storage.strict_json import JsonError, parse_json
from weightbeam.pipelines.terminal.report import human

WEIGHTS = ".safetensors"
WILDCARDS = "*?["


@dataclasses.dataclass(frozen=True)
class ReleaseCommit:
    """A repository at a commit.

    Attributes:
      name, commit: of the repository, and which of its commits.
      updated: when the repository was last committed to.
      sizes: bytes of each file, by name.
      hashes: of each file's content, by name.
      licenses: its names in the model card, in lower case.
      is_gated: whether only those who accepted its terms may read its files.
    """

    name: str
    commit: str
    updated: datetime.datetime
    sizes: Mapping[str, int]
    hashes: Mapping[str, str]
    licenses: tuple[str, ...]
    is_gated: bool

    @property
    def url(self) -> str:
        return f"hf://{self.name}@{self.commit}"

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"licenses": self.licenses, "bytes": sum(self.sizes[name] for name in self.shards)}

    @functools.cached_property
    def shards(self) -> list[str]:
        """The safetensors files beside `config.json`."""
        return sorted(name for name in self.sizes if name.endswith(WEIGHTS) and "/" not in name)

    @property
    def weights(self) -> str:
        """Identifies what a conversion reads: the same for two commits that differ elsewhere, such as in the README."""
        # while there is nothing else
        pickles = [name for name in self.sizes if name.endswith(PICKLES) and "/" not in name]
        files = sorted({*CONFIGS, *(self.shards or pickles)} & self.sizes.keys())
        return hashlib.sha256(json.dumps([[name, self.hashes[name]] for name in files]).encode()).hexdigest()


def is_wanted(repo: str, patterns: Iterable[str]) -> bool:
    """Whether a model's name matches one of the patterns."""
    return any(fnmatch.fnmatchcase(repo, pattern) for pattern in patterns)


def is_pattern(name: str) -> bool:
    """Whether what a configuration calls a model has wildcards."""
    return any(mark in name for mark in WILDCARDS)


def find_models(patterns: Iterable[str], since: datetime.date | None = None) -> tuple[list[str], list[str]]:
    """Which models match.

    Returns:
      Their names; those that a wildcard found only if they have changed since; and each pattern that nothing matches.
      Why the models of some authors can't be listed.
    """
    problems: list[str] = []
    found: dict[str, None] = {}
    wild: dict[str, list[str]] = {}
    for pattern in patterns:
        if is_pattern(pattern):
            wild.setdefault(pattern.partition("/")[0], []).append(pattern)
        else:
            found[pattern] = None
    for author, theirs in wild.items():
        try:
            there = [name for name in _names_of(author, since) if is_wanted(name, theirs)]
            unmatched = [pattern for pattern in theirs if not any(is_wanted(name, [pattern]) for name in there)]
            found |= dict.fromkeys([*there, *unmatched])
        except StorageError as e:
            problems.append(str(e))
    return list(found), problems


def _names_of(author: str, since: datetime.date | None) -> list[str]:
    """An author's models, the last changed first. Raises StorageError where the hub doesn't say."""

    @retried
    def names() -> list[str]:
        listed = []
        for info in api().list_models(author=author, sort="last_modified", expand=["lastModified"]):
            if since and info.last_modified and info.last_modified.date() < since:
                break
            with contextlib.suppress(HFValidationError):  # it becomes part of a path
                validate_repo_id(info.id)
                listed.append(info.id)
        return listed

    with hub_errors(f"the models of {author}", author):
        return names()


def find_release(repo: str, revision: str) -> ReleaseCommit:
    """The release that a revision points to now. All of it is of one commit.

    Raises:
      StorageError: there is none, or the hub can't be asked.
    """
    with hub_errors(repo, repo):
        validate_repo_id(repo)
        return _as_said(repo, describe(api(), repo, revision))


def is_there(repo: str, commit: str) -> bool:
    """Whether a repository still has a commit, which a squash of its history takes away.

    Raises:
      StorageError: the hub can't be asked.
    """
    with hub_errors(repo, repo):
        try:
            check_form(retried(api().model_info)(repo, revision=commit, timeout=30.0))
        except RevisionNotFoundError:
            return False
        return True


def _as_said(repo: str, info: ModelInfo) -> ReleaseCommit:
    """What the hub says of a repository."""
    siblings = info.siblings or []
    card: Mapping[str, Any] = info.card_data.to_dict() if info.card_data else {}
    named = [
        card.get("license"),
        card.get("license_name"),
        *(tag.removeprefix("license:") for tag in info.tags or [] if tag.startswith("license:")),
    ]
    licenses = dict.fromkeys(
        str(name).lower() for each in named for name in (each if isinstance(each, list) else [each]) if name
    )
    return ReleaseCommit(
        repo,
        str(info.sha),
        info.last_modified or datetime.datetime.now(datetime.UTC),
        {file.rfilename: file.size or 0 for file in siblings},
        {file.rfilename: file.lfs.sha256 if file.lfs else str(file.blob_id) for file in siblings},
        tuple(licenses),
        bool(info.gated),
    )


def quiet_at(release: ReleaseCommit, minutes: float) -> datetime.datetime:
    """When nobody will have committed to it for so many minutes; never, if the hub dates it to the end of all time."""
    try:
        return release.updated + datetime.timedelta(minutes=minutes)
    except OverflowError:
        return datetime.datetime.max.replace(tzinfo=datetime.UTC)


def objections(release: ReleaseCommit, max_bytes: int | None, licenses: Iterable[str] | None) -> list[str]:
    """Why a release isn't converted, as far as the hub's description tells."""
    found = []
    if not release.shards:
        pickles = [name for name in release.sizes if name.endswith(PICKLES)]
        others = "pickle files, which can run code when they are loaded" if pickles else "no weights that are known"
        found.append(f"no safetensors files beside config.json, but {others}")
    nbytes = sum(release.sizes[name] for name in release.shards)
    if max_bytes is not None and nbytes > max_bytes:
        found.append(f"{human(nbytes)} of safetensors files, max_bytes is {human(max_bytes)}")
    if licenses is not None and not {name.lower() for name in licenses} & set(release.licenses):
        found.append(f"its licence is {', '.join(release.licenses) or 'not named'}, which isn't among licenses")
    return found


def access_denied(release: ReleaseCommit) -> str | None:
    """Why its files may not be read; None if they may.

    Raises:
      StorageError: it can't be told.
    """
    if not release.is_gated:
        return None
    with hub_errors(release.name, release.name):
        try:
            retried(api().auth_check)(release.name)
        except GatedRepoError:
            return f"gated: accept its terms on {told_endpoint()}/{release.name}, with the account whose token is used"
    return None


def missing_files(release: ReleaseCommit) -> list[str]:
    """What isn't there yet of a release: `config.json`, and the files that the index names.

    Raises:
      StorageError: the index can't be read.
    """
    wanted = {"config.json"}
    if INDEX in release.sizes:
        wanted |= _named(open_store(release.url), release.sizes[INDEX])
    return sorted(wanted - release.sizes.keys())


def _named(store: Store, nbytes: int) -> set[str]:
    """The files that an index names; none if it is malformed, which the plan will say better."""
    if nbytes > MAX_HEADER:
        return set()
    try:
        weight_map = parse_json(store.read(INDEX))["weight_map"]
        return {name for name in weight_map.values() if isinstance(name, str)}
    except (JsonError, KeyError, TypeError, AttributeError):
        return set()
