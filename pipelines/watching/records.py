"""What was done: for each version and target a history of states, in the output.

A history is a folder of records `0001.json`, `0002.json`, …; the last one is the state. A record is made by a
conditional create, so of two watchers that take a step from one state only one succeeds. None is ever rewritten; beside
them `again.json` is, which says when a release was seen to have come back.
"""

from __future__ import annotations

import contextlib
import datetime
import enum
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import pydantic
from pydantic import AfterValidator, Field

from weightbeam.formats.record.naming import Naming
from weightbeam.formats.staging import lease
from weightbeam.formats.storage import StorageError, Store
from weightbeam.formats.storage.strict_json import JsonError, parse_json
from weightbeam.pipelines.watching.runs import MAX_STEP
from weightbeam.pipelines.watching.tables import tables

if TYPE_CHECKING:
    from weightbeam.pipelines.watching.feed import Version, VersionTarget

AGAIN = "again.json"
NOTE = "note"  # of what a publication says: the reason of its record
ROOT, RUNS = ".weightbeam/releases", ".weightbeam/runs"  # below the output
FULL_PATHS = "--full_paths=true"  # among a target's options
SKEW = datetime.timedelta(minutes=5)  # by which clocks may differ
LOG = logging.getLogger("weightbeam.watch")

Record = Mapping[str, Any]


class State(enum.StrEnum):
    """What a record says of a version, made into a target."""

    DISCOVERED = "discovered"
    PLANNED = "planned"
    CONVERTING = "converting"
    VERIFIED = "verified"
    PUBLISHED = "published"
    REFUSED = "refused"
    FAILED = "failed"
    SAME = "same"
    GONE = "gone"
    REMOVED = "removed"
    HELD = "held"


# nothing is left to be done
SETTLED = (State.PUBLISHED, State.REFUSED, State.GONE, State.REMOVED, State.HELD, State.SAME)


class LostError(Exception):
    """Another watcher was faster."""


class DamagedRecordError(StorageError):
    """A record, or what a place says of itself, isn't one; the message names its file."""


# --- what a record says -----------------------------------------------------------------------------------------------


def _moment(text: str) -> str:
    if datetime.datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("should have a time zone")
    return text


Moment = Annotated[str, AfterValidator(_moment)]


class _Said(pydantic.BaseModel, strict=True):
    """What every record says."""

    state: Annotated[State, Field(strict=False)]
    time: Moment
    commit: str
    target: str
    attempt: Annotated[int, Field(ge=0)] = 0
    reason: str | None = None


class _Changes(pydantic.BaseModel):
    warnings: list[str] = []
    not_finite: int = 0


class _Known(pydantic.BaseModel, strict=True):
    """What the records up to any of them say together."""

    weights: str
    updated: Moment
    options: list[str] = []
    changes: _Changes = _Changes()


class _KnownOfRun(_Known):
    step: Annotated[int, Field(ge=0, lt=MAX_STEP)]
    seen: str
    source: str


class _Planned(pydantic.BaseModel, strict=True):
    """What they say from the plan on."""

    checkpoint: Annotated[str, Field(pattern=r"(^|[/@])[A-Za-z0-9_-][A-Za-z0-9._-]*$")]
    plan: str


def read_record(store: Store, name: str, root: str, before: Mapping[str, Any]) -> Record:
    """A record of a history; `before` is what those before it say.

    Raises:
      DamagedRecordError: it isn't one.
    """
    try:
        record = parse_json(store.read(name))
        _Said.model_validate(record)
        known = {**before, **record}
        (_KnownOfRun if root == RUNS else _Known).model_validate(known)
        if record["state"] in (State.PLANNED, State.CONVERTING, State.VERIFIED, State.PUBLISHED):
            _Planned.model_validate(known)
    except JsonError as e:
        why = str(e)
    except pydantic.ValidationError as e:
        why = "; ".join(": ".join([*map(str, error["loc"]), error["msg"]]) for error in e.errors())
    else:
        return record
    raise DamagedRecordError(
        f"{store.path(name)}: is no record ({why}), and is skipped; delete it, and what it said is found out anew"
    )


# --- what there is to do ----------------------------------------------------------------------------------------------


def key_of(name: str, weights: str, target: VersionTarget) -> str:
    """Identifies what there is to do: the same whenever the same would come out."""
    facts = [name, weights, target.facts, tables()]
    return f"{target.name}-{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]}"


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class History:
    """The states of one version, made into one target.

    Attributes:
      store: its folder.
      name: what it is a version of.
      records: as far as they are known here.
    """

    def __init__(self, output: Store, name: str, key: str, root: str = ROOT):
        self.store = output / root / name / key
        self.name, self.key, self._root = name, key, root
        self.records: list[Record] = []
        self._files: set[str] = set()
        self._lease: lease.Lease | None = None
        self.refresh()

    def refresh(self) -> None:
        """Reads what is new: what is numbered on from what is known. A number beyond a gap is no record yet.

        Raises:
          DamagedRecordError: a record isn't one.
        """
        self._files = {file.name for file in self.store.list(recursive=False)}
        while (name := _name(len(self.records) + 1)) in self._files:
            self.records.append(read_record(self.store, name, self._root, self.facts))

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
        """How often the work was begun, since it was last asked for."""
        return self.last.get("attempt", 0) if self.records else 0

    @property
    def facts(self) -> dict[str, Any]:
        """Everything that the records say, the later over the earlier."""
        return {name: value for record in self.records for name, value in record.items()}

    @property
    def outline(self) -> list[dict[str, Any]]:
        """The states, as a report tells them."""
        return [{name: record.get(name) for name in ("state", "time", "attempt", "reason")} for record in self.records]

    def naming(self, facts: Mapping[str, Any] | None = None) -> Naming:
        """How what lies on this machine is named beside the records; `facts` are what those say."""
        options = (facts or self.facts).get("options", ())
        return Naming.of(self.store.url, True if FULL_PATHS in options else None)

    def begin(self, version: Version, target: VersionTarget, reason: str | None = None) -> Record:
        """Makes the first record; see `add`."""
        about = {
            "commit": version.commit,
            "updated": version.updated.isoformat(),
            "weights": version.weights,
            **version.facts,
        }
        return self.add(
            State.DISCOVERED, reason, **about, target=target.name, options=target.arguments, tables=tables()
        )

    def _head(self, state: str) -> dict[str, Any]:
        """What every record begins with."""
        return {"state": state, "time": now().isoformat(), "repo": self.name, "key": self.key}

    def add(self, state: str, reason: str | None = None, **facts: Any) -> Record:
        """Makes the next record. In a bucket it names what lies on this machine; here, it says where that is.

        Raises:
          LostError: there is one already.
          DamagedRecordError: something else has its name.
        """
        known = {name: self.facts[name] for name in ("commit", "target")} if self.records else {}
        said = {"attempt": self.attempt} | known | facts | ({"reason": reason} if reason else {})
        record = json.loads(json.dumps(self._head(state) | said))  # as others will read it
        self.store.make()
        written = json.dumps(self.naming({**self.facts, **record}).apply(record), indent=1)
        if not self.store.create(name := _name(len(self.records) + 1), written.encode()):
            if name in self.store.folders():
                raise DamagedRecordError(f"{self.store.path(name)}: is a folder, and no record; move it away")
            raise LostError(f"{self.store}: another watcher has gone on with it")
        self.records.append(record)
        return record

    def mark_same(self, commit: str) -> Record | None:
        """Notes that another commit has the same weights; returns the record, or None if there is one already."""
        known = self.facts["commit"]
        said = {"commit": commit, "target": self.first["target"], "same_weights_as": known}
        record = self._head(State.SAME) | said | {"reason": f"same weights as {known[:12]}"}
        return record if self.store.create(f"same-{commit}.json", json.dumps(record, indent=1).encode()) else None

    def again(self) -> datetime.datetime | None:
        """When the version was seen to have come back; None where it wasn't, or where that can't be told."""
        if AGAIN not in self._files:
            return None
        try:
            moment = _moment(parse_json(self.store.read(AGAIN))["time"])
            return datetime.datetime.fromisoformat(moment).astimezone(datetime.UTC)
        except (JsonError, ValueError, LookupError, TypeError, OverflowError, OSError) as e:
            LOG.warning("%s can't be read, and doesn't count: %s; delete it", self.store.path(AGAIN), e)
            return None

    def mark_again(self, before: datetime.datetime) -> None:
        """Notes that the version has come back, now, which is later than `before`, whatever this machine's clock says."""
        with contextlib.suppress(OverflowError):  # somebody's record of the year 9999
            before += datetime.timedelta(microseconds=1)
        moment = max(now(), before)
        self.store.write(AGAIN, json.dumps({"time": moment.isoformat()}).encode())
        self._files.add(AGAIN)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keeps other watchers out, and reads what they have done.

        Raises:
          weightbeam.formats.staging.lease.HeldError: one is at work.
        """
        with lease.hold(self.store, "lease") as self._lease:
            self.refresh()
            yield

    def check_alone(self) -> None:
        """Raises weightbeam.formats.staging.lease.HeldError if another watcher has gone on while this one slept."""
        assert self._lease is not None
        self._lease.check()


def _name(number: int) -> str:
    return f"{number:04}.json"


def find_history(output: Store, name: str, key: str, root: str) -> History | None:
    """A history that was begun; None where it wasn't, or where a record is damaged, which is said."""
    try:
        history = History(output, name, key, root)
    except DamagedRecordError as e:
        LOG.warning(e)
        return None
    return history if history.records else None


def histories(output: Store, name: str, root: str = ROOT) -> list[History]:
    """Every history of a repository, or of a run."""
    try:
        keys = [file.name.partition("/")[0] for file in (output / root / name).below([_name(1)])]
    except FileNotFoundError:  # nothing was ever begun
        return []
    return [history for key in keys if (history := find_history(output, name, key, root))]
