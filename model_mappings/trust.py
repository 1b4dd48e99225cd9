"""What the record of a checkpoint or a release may name: no file of Python, which is run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
