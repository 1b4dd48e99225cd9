"""The ledger: which units of a plan are done, a file for each.

A unit counts when its ledger entry exists; the entry names the attempt that made it, and is created at most once. One
that can't be read, as a machine that crashed or a full disk may leave it, is none.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Any

from weightbeam.formats.storage import StorageError, Store

BYTES = "bytes"  # what an entry calls those that its unit wrote, of values
WITHDRAWN = "withdrawn.json"  # which units were taken out of it, and why


def _entry(data: bytes) -> dict[str, Any] | None:
    """What an entry of the ledger says; None where it can't be read."""
    try:
        entry = json.loads(data)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


class IncompleteError(ValueError):
    """What is staged doesn't make up the result."""


class Ledger:
    """Which units of a plan are done. `units` is the name of the folder of its entries, where the plan is at work."""

    def __init__(self, folder: Store, units: str):
        self._folder, self._units = folder, units

    def done(self) -> dict[int, tuple[str, int]]:
        """Committed units -> version and inode of their ledger entry."""
        files = self._folder.list(f"{self._units}/")
        names = {
            file.name.removeprefix(f"{self._units}/").removesuffix(".json"): (file.version, file.inode)
            for file in files
        }
        return {int(name): mark for name, mark in names.items() if name.isdecimal()}

    def entries(self) -> dict[int, dict[str, Any]]:
        """For each unit that counts, the `attempt` that made it, the `bytes` it wrote, and its shares in the arrays'
        `digests`.
        """
        units = sorted(self.done())
        read = map(_entry, self._folder.read_many([f"{self._units}/{unit}.json" for unit in units]))
        return {unit: entry for unit, entry in zip(units, read, strict=True) if entry is not None}

    def bytes_done(self) -> int:
        """Bytes that the units that count have written, of values."""
        return sum(entry.get(BYTES, 0) for entry in self.entries().values())

    def drop_unreadable(self) -> None:
        """Removes what can't be read of the ledger and the notes that lie there, before somebody goes on with the plan:
        it is made anew.
        """
        names = [file.name for file in self._folder.list(f"{self._units}/") if file.name.endswith(".json")]
        for name, data in zip(names, self._folder.read_many(names), strict=True):
            if _entry(data) is None:
                self._folder.delete(name)

    def withdraw(self, units: Iterable[int], why: str = "") -> None:
        """Takes units out of the ledger: they are to be made anew. `why` is what an assembly says that misses them."""
        withdrawn = sorted(units)
        if why:
            note = {"units": withdrawn, "why": why}
            self._folder.write(f"{self._units}/{WITHDRAWN}", json.dumps(note).encode())
        for unit in withdrawn:
            self._folder.delete(f"{self._units}/{unit}.json")

    def whole(self, units: int) -> dict[int, dict[str, Any]]:
        """The ledger, which has every unit of so many.

        Raises:
          IncompleteError: some are missing.
          StorageError: those that are missing were withdrawn; says why.
        """
        entries = self.entries()
        if missing := set(range(units)) - set(entries):
            if why := self._why_missing(missing):  # an engine tries again what failed for it
                raise StorageError(why)
            raise IncompleteError(f"{len(missing)} of {units} units are missing, e.g. {sorted(missing)[:3]}")
        return entries

    def _why_missing(self, units: Collection[int]) -> str:
        """Why units aren't in the ledger any more, where all of them were withdrawn; else empty."""
        name = f"{self._units}/{WITHDRAWN}"
        noted = (_entry(self._folder.read(name)) if self._folder.exists(name) else None) or {}
        return noted.get("why", "") if set(units) <= set(noted.get("units", ())) else ""
