"""What was done: for each release and target a history of states, in the output.

A history is a folder of records `0001.json`, `0002.json`, …; the last one is the state. A record is made by a conditional create, so
of two watchers that take a step from one state only one succeeds. Nothing is ever rewritten.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weightbeam import model_mappings
from weightbeam.formats import lease
from weightbeam.formats.storage import Store
from weightbeam.pipelines.watching.config import Target
from weightbeam.pipelines.watching.releases import Release
from weightbeam.transforms.conversion import DECODING_VERSION

DISCOVERED, PLANNED, CONVERTING, VERIFIED, PUBLISHED = "discovered", "planned", "converting", "verified", "published"
REFUSED, FAILED, SAME = "refused", "failed", "same"
ROOT = ".weightbeam/releases"  # below the output
NUMBER = re.compile(r"(\d{4,})\.json")

Record = Mapping[str, Any]


class LostError(Exception):
    """Another watcher was faster."""


@functools.cache
def tables() -> str:
    """Identifies the tables and the decoding of this version: what made a release's values."""
    root = Path(str(model_mappings.__file__)).parent
    sources = [(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")) for path in sorted(root.rglob("*.py"))]
    return hashlib.sha256(json.dumps([DECODING_VERSION, sources]).encode()).hexdigest()


def key_of(repo: str, weights: str, target: Target) -> str:
    """Identifies what there is to do: the same whenever the same would come out."""
    facts = [repo, weights, target.options.__dict__, tables()]
    return f"{target.name}-{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]}"


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class History:
    """The states of one release, converted into one target.

    Attributes:
      store: its folder.
      records: as far as they are known here.
    """

    def __init__(self, output: Store, repo: str, key: str):
        self.store = output / ROOT / repo / key
        self.repo, self.key = repo, key
        self.records: list[Record] = []
        self.refresh()

    def refresh(self) -> None:
        """Reads what is new."""
        found = sorted(int(match[1]) for file in self.store.list() if (match := NUMBER.fullmatch(file.name)))
        for number in found[len(self.records) :]:
            self.records.append(json.loads(self.store.read(_name(number))))

    @property
    def first(self) -> Record:
        return self.records[0]

    @property
    def last(self) -> Record:
        return self.records[-1]

    @property
    def state(self) -> str | None:
        return self.last["state"] if self.records else None

    @property
    def attempt(self) -> int:
        """How often a conversion was begun, since it was last asked for."""
        return self.last.get("attempt", 0) if self.records else 0

    @property
    def facts(self) -> dict[str, Any]:
        """Everything that the records say, the later over the earlier."""
        return {name: value for record in self.records for name, value in record.items()}

    def begin(self, release: Release, target: Target) -> Record:
        """Makes the first record; see `add`."""
        return self.add(
            DISCOVERED,
            commit=release.commit,
            updated=release.updated.isoformat(),
            weights=release.weights,
            licenses=release.licenses,
            bytes=sum(release.sizes[name] for name in release.shards),
            target=target.name,
            options=target.arguments,
            tables=tables(),
        )

    def add(self, state: str, reason: str | None = None, **facts: Any) -> Record:
        """Makes the next record.

        Raises:
          LostError: there is one already.
        """
        known = {name: self.first[name] for name in ("commit", "target")} if self.records else {}
        said = {"attempt": self.attempt} | known | facts | ({"reason": reason} if reason else {})
        record = {"state": state, "time": now().isoformat(), "repo": self.repo, "key": self.key} | said
        record = json.loads(json.dumps(record))  # as others will read it
        self.store.make()
        if not self.store.create(_name(len(self.records) + 1), json.dumps(record, indent=1).encode()):
            raise LostError(f"{self.store}: another watcher has gone on with it")
        self.records.append(record)
        return record

    def mark_same(self, commit: str) -> Record | None:
        """Notes that another commit has the same weights; returns the record, or None if there is one already."""
        first = self.first["commit"]
        said = {"commit": commit, "target": self.first["target"], "same_weights_as": first, "reason": f"same weights as {first[:12]}"}
        record = {"state": SAME, "time": now().isoformat(), "repo": self.repo, "key": self.key} | said
        return record if self.store.create(f"same-{commit}.json", json.dumps(record, indent=1).encode()) else None

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keeps other watchers out, and reads what they have done.

        Raises:
          weightbeam.formats.lease.HeldError: one is at work.
        """
        with lease.hold(self.store, "lease"):
            self.refresh()
            yield


def _name(number: int) -> str:
    return f"{number:04}.json"


def histories(output: Store, repo: str) -> list[History]:
    """Every history of a repository."""
    folder = output / ROOT / repo
    keys = sorted({file.name.partition("/")[0] for file in folder.list() if NUMBER.fullmatch(file.name.rpartition("/")[2])})
    return [history for key in keys if (history := History(output, repo, key)).records]
