"""What installed packages bring: families, encodings and stores, each by an entry point of a group.

[project.entry-points."weightbeam.families"]      a name = "module:FAMILY"      a `Family`
[project.entry-points."weightbeam.encodings"]     a name = "module:FORMATS"     a `QuantizedFormat`, or several
[project.entry-points."weightbeam.stores"]        scheme = "module:open"        URL -> `Store`
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

FAMILIES, ENCODINGS, STORES = (f"weightbeam.{kind}" for kind in ("families", "encodings", "stores"))


NAMED_BY_A_RECORD = "named by a record: "  # before the name of a file of Python, which a record has no say in


def distrusted(record: Any) -> Any:
    """What the record of a checkpoint or a release says, whoever wrote it: a table of ours or of an installed package may
    be named in its options; a file isn't run unless the command names it, too (`registry.load_family`).
    """
    options = record.get("options") if isinstance(record, dict) else None
    if not isinstance(options, dict):
        return record
    family = options.get("family")
    if not isinstance(family, str) or not family.endswith(".py"):
        return record
    return {**record, "options": {**options, "family": f"{NAMED_BY_A_RECORD}{family}"}}


def code_of(family: str | None) -> str:
    """The sha256 of the file of Python that is the table, for what it does stands in no rule's words; empty where none
    is. What isn't a regular file, and might never end, is left to `registry.load_family`, which refuses it.
    """
    if not family or not family.endswith(".py") or not os.path.isfile(family):
        return ""
    return hashlib.sha256(Path(family).read_bytes()).hexdigest()


def as_said(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a record that was `distrusted` as they stand there, to be shown or to go into another one."""
    family = options.get("family")
    return {**options, "family": family.removeprefix(NAMED_BY_A_RECORD)} if isinstance(family, str) else {**options}


class DoorError(ValueError):
    """What an entry point names can't be loaded, or isn't what its group is for."""


@functools.cache
def entries(group: str) -> tuple[EntryPoint, ...]:
    """What installed packages name in a group, in the order of their names."""
    return tuple(sorted(importlib.metadata.entry_points(group=group), key=lambda entry: (entry.name, entry.value)))


def load(entry: EntryPoint, kind: str) -> object:
    """What an entry point names; `kind` says in a message what it should be.

    Raises:
      DoorError: it can't be loaded.
    """
    try:
        return entry.load()
    except (Exception, SystemExit) as e:
        raise DoorError(f"the {kind} {entry.name!r} of {entry.value} can't be loaded: {type(e).__name__} {e}") from e


def versions(group: str) -> list[tuple[str, str, str]]:
    """Each entry of a group with its package and the version of that, for what a result depends on."""
    return [version(entry) for entry in entries(group)]


def version(entry: EntryPoint) -> tuple[str, str, str]:
    """The name of an entry, its package and the version of that."""
    return entry.name, entry.dist.name if entry.dist else "", entry.dist.version if entry.dist else ""
