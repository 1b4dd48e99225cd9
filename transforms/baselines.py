"""Baselines: releases that a new one is compared with while it is written, so that nobody reads it again for that.

The rows of a unit are compared with the same rows of each baseline before they are written. What was found stands in
the unit's ledger entry, and the assembly puts the sums into `differences.json`. The result depends on no baseline: what
can't be told on the way isn't told (of units that an earlier command made, of tensors that are written as codes, of a
baseline that this worker can't read), and who wants it compares that afterwards (`pipelines/diff.py`, `compare_pairs`).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from weightbeam.formats.release_target import Rows
from weightbeam.formats.safetensors import Tensor, open_hf
from weightbeam.formats.sources import open_source
from weightbeam.formats.storage import StorageError, Store, open_store
from weightbeam.model_mappings.boxes import extent
from weightbeam.model_mappings.config import Config, ConfigError
from weightbeam.model_mappings.family import rename
from weightbeam.model_mappings.registry import UnknownFamilyError, family_of
from weightbeam.transforms.differences import Difference, compare_each, cut
from weightbeam.transforms.operands import Operand, stored_operand

NOTE = "differences"  # of a ledger entry: by the baseline's URL and the tensor's name the fields of a `Difference`
FILE = "differences.json"  # the same of all units, in a release that nobody reads yet

Found = dict[str, dict[str, Difference]]  # by the baseline's URL and the tensor's name

_ASKED: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("baselines", default=())


@contextlib.contextmanager
def compared_with(urls: Sequence[str]) -> Iterator[None]:
    """Context manager: releases that are written meanwhile are compared with those on the way."""
    token = _ASKED.set(tuple(urls))
    try:
        yield
    finally:
        _ASKED.reset(token)


def asked() -> tuple[str, ...]:
    """The URLs of the baselines that were asked for."""
    return _ASKED.get()


class Baseline:
    """The tensors of a release, under the names of its family's table; quantised ones by their values."""

    def __init__(self, url: str):
        """Reads the headers.

        Raises:
          StorageError: they can't be read.
        """
        release = open_hf(open_store(url))
        try:
            self._aliases = family_of(Config(release.config)).aliases
        except (ConfigError, UnknownFamilyError):  # then each has one name only
            self._aliases = {}
        encodings = open_source(release).renamed(self._aliases).encodings
        self._operands = {name: stored_operand(encoding) for name, encoding in encodings.items()}

    def find(self, tensor: Tensor) -> tuple[str, Operand] | None:
        """The tensor of the same name and shape, and its name in the table; None where there is none."""
        name = rename(tensor.name, self._aliases)
        operand = self._operands.get(name)
        return (name, operand) if operand is not None and operand.shape == tensor.shape else None


_OPENING = threading.Lock()


def open_baselines(run: str, urls: tuple[str, ...]) -> Mapping[str, Baseline]:
    """Those that can be read, by their URLs; opened once in a process for a `run` of a pipeline, by the first thread that
    asks.
    """
    with _OPENING:
        return _open(run, urls)


@functools.lru_cache(maxsize=1)
def _open(run: str, urls: tuple[str, ...]) -> dict[str, Baseline]:
    opened = {}
    for url in urls:
        with contextlib.suppress(StorageError):
            opened[url] = Baseline(url)
    return opened


def compare_rows(baselines: Mapping[str, Baseline], rows: Iterable[Rows]) -> Found:
    """How far the rows of a release are from the same rows of each baseline, a few megabytes at a time.

    Raises:
      StorageError: a baseline can't be read.
      ContentError: what it holds can't be right.
    """
    found: Found = {url: {} for url in baselines}
    for tensor, box, values in rows:
        sides = {url: side for url, baseline in baselines.items() if (side := baseline.find(tensor))}
        shaped, axes = values.reshape(extent(box)), range(len(box))
        for inner in cut(shaped.shape, shaped.itemsize, axes, (1,) * len(box)) if sides else ():
            outer = tuple((start + at, stop + at) for (start, stop), (at, _) in zip(inner, box, strict=True))
            firsts = [operand.read(outer) for _, operand in sides.values()]
            differences = compare_each(firsts, shaped[tuple(slice(*span) for span in inner)])
            for (url, (name, _)), difference in zip(sides.items(), differences, strict=True):
                found[url][name] = found[url].get(name, Difference()) + difference
    return found


def note(found: Found) -> dict[str, Any]:
    """What a unit's ledger entry says of it."""
    return {NOTE: {url: {name: dataclasses.astuple(each) for name, each in of.items()} for url, of in found.items()}}


def gather(entries: Iterable[Mapping[str, Any]]) -> dict[str, bytes]:
    """What the ledger's entries say together, as a file of the release: its name and content; empty where they say
    nothing.
    """
    found: Found = {}
    for entry in entries:
        for url, noted in entry.get(NOTE, {}).items():
            held = found.setdefault(url, {})
            for name, fields in noted.items():
                held[name] = held.get(name, Difference()) + Difference(*fields)
    return {FILE: json.dumps(note(found)[NOTE]).encode()} if found else {}


def read_found(release: Store) -> Found:
    """What was found while a release was written; empty where nothing was."""
    try:
        noted = json.loads(release.read(FILE))
    except FileNotFoundError:
        return {}
    return {url: {name: Difference(*fields) for name, fields in of.items()} for url, of in noted.items()}
