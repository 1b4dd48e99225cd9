"""The source's bytes, checked on their way: what units read of a file has the crc32c by which its bucket knows it.

Each unit notes the crc32c of the stretches that it reads. Together with the little that no unit needs (the header,
tensors that are left out), which is read for it, they make up the checksum of each file. So nothing is read twice for
it.

That is what the store says of files; what our own record says of a checkpoint's arrays is `array_sums.py`'s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import google_crc32c
import numpy as np

from weightbeam.formats.safetensors import BoxRead, HfCheckpoint, Shard
from weightbeam.formats.safetensors.header import HeaderError, parse_header
from weightbeam.formats.storage import StorageError, Store, open_store
from weightbeam.formats.storage.checksums import Stretch, chain, crc32c_of, sum_ranges
from weightbeam.formats.storage.stoppable import StoppablePool
from weightbeam.formats.storage.store import PIECE, as_base64
from weightbeam.transforms.cutting.units import Fetch

NOTE = "crc32c"  # in a unit's ledger entry
MAX_RUNS = 256  # stretches that a unit notes of one box; one with more isn't noted
# bytes of a file that are read for its sum alone, beside the header: so many, or 1/64 of it
MIN_REST, REST_SHIFT = 1 << 16, 6

Notes = dict[str, list[Stretch]]  # by file


class DamagedError(StorageError):
    """What was read isn't what its store holds.

    Attributes:
      units: those that read it.
    """

    def __init__(self, message: str, units: Iterable[int] = ()):
        super().__init__(message)
        self.units = sorted(units)


def note_reads(
    fetches: Sequence[Fetch], raw: Sequence[Sequence[np.ndarray]], files: Mapping[str, str]
) -> dict[str, Any]:
    """For a unit's ledger entry: the checksums of what it read.

    Args:
      fetches: what was asked for.
      raw: what was read, for each its stored boxes.
      files: the names of the files whose checksums are wanted, by path.
    """
    notes: Notes = defaultdict(list)
    for fetch, arrays in zip(fetches, raw, strict=True):
        for read, values in zip(fetch.encoding.reads(fetch.box), arrays, strict=True):
            if (
                isinstance(read, BoxRead)
                and (name := files.get(read.tensor.path))
                and values.size
                and read.runs <= MAX_RUNS
            ):
                notes[name] += sum_ranges(read.ranges(values.reshape(-1).view(np.uint8).data))
    return {NOTE: notes} if notes else {}


def check_reads(source: HfCheckpoint, ledger: Mapping[int, Mapping[str, Any]]) -> frozenset[str]:
    """Compares what all units read with what is known of the files.

    Args:
      source: the release; `Shard.crc32c` and `HfCheckpoint.sums` say what is known.
      ledger: the entries of all units.

    Returns:
      The names of the files that were checked: those whose checksum is known, and of which little was left to read.

    Raises:
      DamagedError: files aren't what they should be, or their headers weren't when the plan was made; names all of
        them.
      StorageError: a file can't be read.
    """
    noted: defaultdict[str, list[Stretch]] = defaultdict(list)
    units: defaultdict[str, set[int]] = defaultdict(set)
    for unit, entry in ledger.items():
        for name, stretches in entry.get(NOTE, {}).items():
            noted[name] += [Stretch(*stretch) for stretch in stretches]
            units[name].add(unit)
    store = open_store(source.root)

    def check(shard: Shard) -> bool | DamagedError:
        known = shard.crc32c or source.sums.get(shard.name)
        try:
            return known is not None and _check(store, shard, known, noted[shard.name], units[shard.name])
        except DamagedError as e:
            return e

    wanted = [shard for shard in source.shards if noted[shard.name]]
    with StoppablePool(store.at_a_time) as pool:
        found = dict(zip((shard.name for shard in wanted), pool.map(check, wanted), strict=True))
    damaged = [checked for checked in found.values() if isinstance(checked, DamagedError)]
    if damaged:
        raise DamagedError("; ".join(map(str, damaged)), {unit for e in damaged for unit in e.units})
    return frozenset(name for name, checked in found.items() if checked)


def _check(store: Store, shard: Shard, known: str, noted: Sequence[Stretch], units: Iterable[int]) -> bool:
    """Whether a file could be checked, which is right then; see `check_reads`."""
    start = min((tensor.offset for tensor in shard.tensors), default=shard.size)
    stretches, gaps = chain([Stretch(0, start, 0), *noted], shard.size)
    if sum(stop - at for at, stop in gaps) > max(MIN_REST, shard.size >> REST_SHIFT):
        return False
    header = _read(store, shard, 0, start)
    pieces = [(at, min(stop, at + PIECE)) for first, stop in gaps for at in range(first, stop, PIECE)]
    rest = [Stretch(at, stop, google_crc32c.value(_read(store, shard, at, stop))) for at, stop in pieces]
    found = as_base64(crc32c_of(sorted([Stretch(0, start, google_crc32c.value(header)), *stretches[1:], *rest])))
    if found != known:
        again = "the units that read it are made anew by the same command with --resume"
        raise DamagedError(
            f"{shard.path}: what was read of it has the crc32c {found}, the file has {known}: damaged on its way; {again}",
            units,
        )
    try:
        is_same = parse_header(header[8:], shard.size, shard.path) == shard.tensors
    except HeaderError:
        is_same = False
    if not is_same:
        raise DamagedError(
            f"{shard.path}: its header isn't what it was planned with, which was damaged on its way; start anew with --overwrite"
        )
    return True


def _read(store: Store, shard: Shard, start: int, stop: int) -> bytes:
    data = store.read(shard.name, start, stop)
    if len(data) != stop - start:
        raise StorageError(f"{shard.path}: ends before byte {stop:,}; was it changed after it was planned?")
    return data
