"""Whether the system lets this process have the threads that it needs."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
from collections.abc import Iterator

from weightbeam.pipelines.terminal.tables import count, human

NO_THREAD = "can't start new thread"  # what Python says
NO_MORE = "Resource temporarily unavailable"  # what C++ says of a thread
# addresses that the C library reserves for a thread: 8 MiB of stack, 64 MiB for what it allocates
THREAD_BYTES = 72 << 20
LIMITS = "raise the limit on memory (ulimit -v) or on processes (ulimit -u)"
MORE_ROOM = f"{LIMITS}, or take fewer threads with --direct_num_workers"


class ThreadError(Exception):
    """The system doesn't let this process have the threads that it needs."""


def check_addresses(threads: int, stage_bytes: int = 0) -> None:
    """Makes sure that the process may have the addresses that the threads will reserve, TensorStore's own among them:
    those end the process without a word if they can't be started.

    Args:
      threads: ours.
      stage_bytes: memory that is needed beside, of all threads.

    Raises:
      ThreadError: it may not.
    """
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return
    cores = os.cpu_count() or 1
    # TensorStore's: for each core, and for files; and those of Beam and ours that look after the rest
    others = cores + max(4, cores) + 6
    needed = stage_bytes + THREAD_BYTES * (threads + others)
    try:
        mmap.mmap(-1, needed, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError as e:
        wanted = f"{count(threads, 'thread')} and what runs beside need {human(needed)} of addresses"
        raise ThreadError(f"{wanted} more than the limit of this process leaves; {MORE_ROOM}") from e


def refuses_a_thread(error: BaseException) -> bool:
    """Whether an error says that the system starts no more threads."""
    return NO_THREAD in str(error) or (isinstance(error, RuntimeError) and str(error) == NO_MORE)


@contextlib.contextmanager
def telling_of_threads() -> Iterator[None]:
    """Context manager: a thread that can't be started is a `ThreadError`, which says what to do."""
    try:
        yield
    except RuntimeError as e:
        if not refuses_a_thread(e):
            raise
        raise ThreadError(f"the system refuses another thread; {MORE_ROOM}") from e
