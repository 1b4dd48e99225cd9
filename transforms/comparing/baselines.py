"""Baselines: releases that a new one is compared with while it is written, so that nobody reads it again for that.

The rows of a unit are compared with the same rows of each baseline before they are written. What was found stands in
the unit's ledger entry, and the assembly puts the sums into `differences.json`. The result depends on no baseline: what
can't be told on the way isn't told (of units that an earlier command made, of tensors that aren't written as values in
floating point, of a baseline that this worker can't read), and who wants it compares that afterwards
(`pipelines/checking/pairwise.py`, `compare_pairs`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from weightbeam.formats.encodings import ContentError
from weightbeam.formats.release.source import open_source
from weightbeam.formats.safetensors import HfCheckpoint, Tensor, open_hf
from weightbeam.formats.storage import Store, open_store
from weightbeam.formats.storage.strict_json import read_json
from weightbeam.formats.targets.release import Rows
from weightbeam.model_mappings.boxes import Box, extent, slices
from weightbeam.model_mappings.config import Config, ConfigError
from weightbeam.model_mappings.family import rename
from weightbeam.model_mappings.registry import UnknownFamilyError, family_of
from weightbeam.transforms.comparing.differences import Difference, compare_each, cut
from weightbeam.transforms.execution.operands import Operand, stored_operand

NOTE = "differences"  # of a ledger entry: by the baseline and the tensor's name the fields of a `Difference`
FILE = "differences.json"  # the same of all units, in a release that nobody reads yet

VALUES = frozenset(map(np.dtype, (ml_dtypes.bfloat16, np.float16, np.float32, np.float64)))  # no codes are stored so

Found = dict[str, dict[str, Difference]]  # by the `baseline_id` and the tensor's name


def baseline_id(release: HfCheckpoint) -> str:
    """What tells a baseline from others, and from what lies at its place after it was replaced, or for a while."""
    is_here = "://" not in release.root  # else the version tells, and a file may be seen here once it is cached
    seen = [(file.name, file.inode, file.changed) for file in release.shards if is_here]
    return hashlib.sha256(json.dumps([release.root, release.identity, seen]).encode()).hexdigest()[:32]


class Baseline:
    """The tensors of a release, under the names of its family's table; quantised ones by their values.

    Attributes:
      id: what tells it from others.
      is_lost: whether it couldn't be read once, so that nobody tries again.
    """

    def __init__(self, url: str):
        """Reads the headers.

        Raises:
          StorageError: they can't be read.
        """
        release = open_hf(open_store(url))
        self.id = baseline_id(release)
        try:
            self._aliases = family_of(Config(release.config)).aliases
        except (ConfigError, UnknownFamilyError):  # then each has one name only
            self._aliases = {}
        self.is_lost = False
        encodings = open_source(release).renamed(self._aliases).encodings
        self._operands = {name: stored_operand(encoding) for name, encoding in encodings.items()}

    def find(self, tensor: Tensor) -> tuple[str, Operand] | None:
        """The tensor of the same name and shape, and its name in the table; None where there is none, or where what is
        written there aren't values.
        """
        name = rename(tensor.name, self._aliases)
        operand = self._operands.get(name)
        if operand is None or operand.shape != tensor.shape or tensor.dtype not in VALUES or self.is_lost:
            return None
        return name, operand


_OPENING = threading.Lock()


def open_baselines(run: str, urls: tuple[str, ...]) -> Mapping[str, Baseline]:
    """Those that can be opened, by what tells them; once in a process for a `run` of a pipeline, by the first thread that asks."""
    with _OPENING:
        return _open(run, urls)


@functools.lru_cache(maxsize=1)
def _open(run: str, urls: tuple[str, ...]) -> dict[str, Baseline]:
    opened = {}
    for url in urls:
        with contextlib.suppress(OSError):
            baseline = Baseline(url)
            opened[baseline.id] = baseline
    return opened


def compare_rows(baselines: Mapping[str, Baseline], rows: Iterable[Rows]) -> Found:
    """How far the rows of a release are from the same rows of each baseline, `BOX_BYTES` of each at a time."""
    found: Found = {key: {} for key in baselines}
    for tensor, box, values in rows:
        sides = {key: side for key, baseline in baselines.items() if (side := baseline.find(tensor))}
        itemsize = max((operand.dtype.itemsize for _, operand in sides.values()), default=0)
        shaped, axes = values.reshape(extent(box)), range(len(box))
        for inner in cut(shaped.shape, itemsize, axes, (1,) * len(box)) if sides else ():
            outer = tuple((start + at, stop + at) for (start, stop), (at, _) in zip(inner, box, strict=True))
            part = shaped[slices(inner)]
            for key, name, difference in _compare(baselines, sides, outer, part):
                found[key][name] = found[key].get(name, Difference()) + difference
    return found


def _compare(
    baselines: Mapping[str, Baseline], sides: Mapping[str, tuple[str, Operand]], box: Box, values: np.ndarray
) -> Iterator[tuple[str, str, Difference]]:
    """The keys of the baselines, the names of a tensor, and how far its values in a box are from theirs; nothing of those that
    can't be read.
    """
    firsts: dict[str, np.ndarray] = {}
    for key, (_, operand) in sides.items():
        try:
            if not baselines[key].is_lost:
                firsts[key] = operand.read(box)
        except (OSError, ContentError):  # who compares afterwards says what is wrong
            baselines[key].is_lost = True
    for key, difference in zip(firsts, compare_each(list(firsts.values()), values), strict=True):
        yield key, sides[key][0], difference


def note(found: Found) -> dict[str, Any]:
    """What a unit's ledger entry says of it."""
    return {NOTE: {key: {name: dataclasses.astuple(each) for name, each in of.items()} for key, of in found.items()}}


def gather(entries: Iterable[Mapping[str, Any]]) -> dict[str, bytes]:
    """What the ledger's entries say together, as a file of the release: its name and content; empty where they say
    nothing.
    """
    found: Found = {}
    for entry in entries:
        for key, noted in entry.get(NOTE, {}).items():
            held = found.setdefault(key, {})
            for name, fields in noted.items():
                held[name] = held.get(name, Difference()) + Difference(*fields)
    return {FILE: json.dumps(note(found)[NOTE]).encode()} if found else {}


def read_found(release: Store) -> Found:
    """What was found while a release was written; empty where nothing was."""
    try:
        noted = read_json(release, FILE)
    except FileNotFoundError:
        return {}
    return {key: {name: Difference(*fields) for name, fields in of.items()} for key, of in noted.items()}
