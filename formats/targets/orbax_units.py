"""The units of an Orbax checkpoint: their shards are written, entered in the ledger, and looked at before a stopped
command goes on.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from weightbeam.formats.orbax import ocdbt, zarr
from weightbeam.formats.orbax.zarr import ArraySpec, EncodedChunk, Format
from weightbeam.formats.record.extremes import SEEN
from weightbeam.formats.record.provenance import See, take_shares
from weightbeam.formats.staging import Staging
from weightbeam.formats.storage import File
from weightbeam.model_mappings.boxes import Box

STATE = "state"  # in a unit's ledger entry: sizes and times of the files that it wrote, in short
FILES = "files"  # in a unit's ledger entry: their names, where they don't lie in a folder of their own
Shard = tuple[ArraySpec, Box, np.ndarray]  # an array, a box of it, and its values


def write_unit(
    staging: Staging,
    unit: int,
    shards: Sequence[Shard],
    format: Format,
    copies: Sequence[EncodedChunk] = (),
    notes: Mapping[str, Any] | None = None,
    see: See | None = None,
) -> str:
    """Writes the shards of a unit durably, and chunks that are encoded already, into a database all or none of them;
    enters the unit in the ledger.

    Args:
      staging: where.
      unit: its number.
      shards: arrays, boxes and values.
      format: how they are stored.
      copies: chunks that are encoded already.
      notes: what else its ledger entry says.
      see: is shown each shard, and what was seen of its values on the way to its digest; what it has to say of them is
        noted too.

    Returns:
      The attempt that counts: this one, or an earlier one that was first.

    Raises:
      TakenOverError: the place isn't this plan's any more; what was written of the unit is removed, or, where the plan
        is still there (a stop in a bucket) or the unit may count already, left to whoever goes on.
    """
    staging.check()
    attempt = staging.attempt()
    try:
        _write(staging, attempt, shards, format, copies)
        staging.check()
    except Exception as e:
        if staging.is_staged():
            raise
        staging.sweep(f"{ocdbt.ATTEMPT}{attempt}")
        raise staging.taken_over() from e
    written = [*shards, *((copy.spec, copy.box, copy.values) for copy in copies)]
    digests, seen = take_shares(((spec.key, spec.dtype, box, values) for spec, box, values in written), see)
    # Once it is entered it may count, and be published by whoever has taken over: from here on nothing of it is
    # removed.
    entry = {
        "attempt": attempt,
        **_written_files(staging, attempt, [(spec, box) for spec, box, _ in written], format),
        "digests": digests,
        **(notes or {}),
        **({SEEN: seen} if seen else {}),
    }
    entry = staging.enter(unit, entry)
    if format.use_ocdbt:
        # the page cache would grow by the whole checkpoint, and push out what others read
        staging.items.forget(f"{ocdbt.ATTEMPT}{attempt}/d")
    return entry["attempt"]


def _write(
    staging: Staging, attempt: str, shards: Sequence[Shard], format: Format, copies: Sequence[EncodedChunk]
) -> None:
    shared = ocdbt.context()
    transaction = ts.Transaction(atomic=True) if format.use_ocdbt else None
    kvstore = (
        ocdbt.written_database(staging.items / f"{ocdbt.ATTEMPT}{attempt}")
        if format.use_ocdbt
        else staging.shards.kvstore()
    )
    futures = []
    for spec, same in itertools.groupby(shards, key=lambda shard: shard[0]):
        futures += zarr.write_shards(
            kvstore, spec, format, [(box, values) for _, box, values in same], shared, transaction
        )
    if copies:
        store = ts.KvStore.open(kvstore, context=shared).result()
        store = store if transaction is None else store.with_transaction(transaction)
        futures += [store.write(copy.key, copy.encoded) for copy in copies]
    for future in futures:
        future.result()
    if transaction is not None:
        transaction.commit_sync()


def find_changed(staging: Staging, format: Format) -> list[int]:
    """The units that count, whose files aren't as they were written: gone, or of another size, time or generation.

    Of a checkpoint without a database in a bucket nobody knows.
    """
    noted = {unit: entry for unit, entry in staging.ledger.entries().items() if STATE in entry}
    if not noted:
        return []
    if format.use_ocdbt:
        files = _by_attempt(staging.items.list(ocdbt.ATTEMPT))
        return [unit for unit, entry in noted.items() if entry[STATE] != _state(files[entry["attempt"]])]
    held = {file.name: file for file in staging.shards.list()}
    return [
        unit
        for unit, entry in noted.items()
        if entry[STATE] != _state(held[name] for name in entry[FILES] if name in held)
    ]


def _by_attempt(files: Iterable[File]) -> Mapping[str, list[File]]:
    """The files of the attempts' databases."""
    attempts: dict[str, list[File]] = defaultdict(list)
    for file in files:
        attempts[file.name.removeprefix(ocdbt.ATTEMPT).partition("/")[0]].append(file)
    return attempts


def _written_files(
    staging: Staging, attempt: str, boxes: Iterable[tuple[ArraySpec, Box]], format: Format
) -> dict[str, Any]:
    """What the ledger says of the files that were written. In a bucket a look at each shard's would cost a request."""
    if format.use_ocdbt:
        return {STATE: _state(staging.items.list(f"{ocdbt.ATTEMPT}{attempt}/"))}
    if not staging.on_disk:
        return {}
    names = sorted({zarr.key_of(spec, box, format) for spec, box in boxes})
    return {FILES: names, STATE: _state(filter(None, map(staging.shards.stat, names)))}


def _state(files: Iterable[File]) -> str:
    """Names, sizes and versions of files, in short."""
    known = sorted((file.name, file.size, file.version) for file in files)
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]
