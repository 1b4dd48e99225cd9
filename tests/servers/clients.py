"""This process's own clients, when they are to ask a server of buckets that runs in the same process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from servers.gcs import FakeGcs
from weightbeam.formats.storage import bucket as buckets


@contextlib.contextmanager
def asking(server: FakeGcs) -> Iterator[pytest.MonkeyPatch]:
    """Context manager: `gs://` is this server's; gives what undoes further patches in the end. The clients of a process
    know one server.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.env().items():
            patch.setenv(name, value)
        buckets._client.cache_clear()
        buckets._context.cache_clear()
        yield patch
        buckets._client.cache_clear()
        buckets._context.cache_clear()
