"""Folders in which `A` and `a` are one file, as macOS makes them by default."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from weightbeam.formats.storage.store import PROBE


def folds_case(folder: Path) -> bool:
    """Whether a folder, there or not yet, takes no notice of case: told by a file that is made in the nearest one that is
    there; where none can be, by the names of those above, which another file system may hold.
    """
    here = next(each for each in (folder, *folder.parents) if each.is_dir())
    probe = here / f"{PROBE}.{os.urandom(8).hex()}"
    try:
        probe.mkdir()
    except OSError:
        return any(_is_one(above) for above in (here, *here.parents))
    try:
        return _is_one(probe)
    finally:
        probe.rmdir()


def _is_one(path: Path) -> bool:
    """Whether a path in the other case leads to the same."""
    other = path.parent / path.name.swapcase()
    return other.name != path.name and other.exists() and os.path.samefile(path, other)


def twins(names: Iterable[str]) -> tuple[str, str] | None:
    """Two names that are one where no notice is taken of case, nor of how letters are composed; also where one's folder is
    the other's.
    """
    seen: dict[str, str] = {}
    for name in names:
        parts = name.split("/")
        for prefix in ("/".join(parts[: n + 1]) for n in range(len(parts))):
            key = unicodedata.normalize("NFC", prefix).casefold()
            if seen.setdefault(key, prefix) != prefix:
                return seen[key], prefix
    return None


def clash(folder: Path, names: Iterable[str]) -> str:
    """Why files of these names can't lie in a folder side by side; empty where they can."""
    found = twins(names)
    if found is None or not folds_case(folder):
        return ""
    return f"takes no notice of case, and {found[0]} and {found[1]} would be one there; choose a place that does"
