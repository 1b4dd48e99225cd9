"""What installed packages bring: families, encodings and stores, each by an entry point of a group.

[project.entry-points."weightbeam.families"]      a name = "module:FAMILY"      a `Family`
[project.entry-points."weightbeam.encodings"]     a name = "module:FORMATS"     a `QuantizedFormat`, or several
[project.entry-points."weightbeam.stores"]        scheme = "module:open"        URL -> `Store`
"""

from __future__ import annotations

import functools
import importlib.metadata
from importlib.metadata import EntryPoint

FAMILIES, ENCODINGS, STORES = (f"weightbeam.{kind}" for kind in ("families", "encodings", "stores"))


class EntryPointError(ValueError):
    """What an entry point names can't be loaded, or isn't what its group is for."""


@functools.cache
def entries(group: str) -> tuple[EntryPoint, ...]:
    """What installed packages name in a group, in the order of their names."""
    return tuple(sorted(importlib.metadata.entry_points(group=group), key=lambda entry: (entry.name, entry.value)))


def load(entry: EntryPoint, kind: str) -> object:
    """What an entry point names; `kind` says in a message what it should be.

    Raises:
      EntryPointError: it can't be loaded.
    """
    try:
        return entry.load()
    except (Exception, SystemExit) as e:
        raise EntryPointError(
            f"the {kind} {entry.name!r} of {entry.value} can't be loaded: {type(e).__name__} {e}"
        ) from e


def versions(group: str) -> list[tuple[str, str, str]]:
    """Each entry of a group with its package and the version of that, for what a result depends on."""
    return [version(entry) for entry in entries(group)]


def version(entry: EntryPoint) -> tuple[str, str, str]:
    """The name of an entry, its package and the version of that."""
    return entry.name, entry.dist.name if entry.dist else "", entry.dist.version if entry.dist else ""
