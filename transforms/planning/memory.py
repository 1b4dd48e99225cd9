"""The memory of a worker: what it needs at most, of which a part is shared by its threads."""

from __future__ import annotations

from weightbeam.formats.storage import open_store
from weightbeam.transforms.comparing.differences import BOX_BYTES
from weightbeam.transforms.execution.overlap import SPARE, overlaps
from weightbeam.transforms.planning.transfer import Transfer

BASE_BYTES = 384 << 20  # a worker process with Beam, numpy and TensorStore, before any unit
TENSOR_BYTES = 1536  # of the plan, for each tensor of the source
UNIT_BYTES = 10 << 10  # of the assembly, for each unit: its ledger entry, the keys of its database


def memory_bound(planned: Transfer, threads: int, output: str | None, baselines: int = 0) -> int:
    """Bytes of memory that a worker needs at most.

    Args:
      planned: what is done.
      threads: units that it works on at a time.
      output: where the result goes, if that is known.
      baselines: the number of releases that it is compared with on the way.
    """
    thread = planned.thread_bytes + baselines * BOX_BYTES
    return threads * thread + spare_bytes(planned, output) + base_bytes(planned)


def spare_bytes(planned: Transfer, output: str | None) -> int:
    """Bytes that a worker's threads share where bytes go over a network: the units that are read ahead and written
    behind, what is on the way.
    """
    ahead = SPARE * planned.unit_bytes if overlaps(*planned.places, output or "") else 0
    return ahead + open_store(planned.source.root).held_bytes


def base_bytes(planned: Transfer) -> int:
    """Bytes of a worker that no unit needs."""
    return BASE_BYTES + TENSOR_BYTES * planned.source.array_count + UNIT_BYTES * len(planned.units)
