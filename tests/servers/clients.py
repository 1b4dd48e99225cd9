"""This process's own clients, when they are to ask a server of buckets, or a hub, that runs in the same process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from servers.gcs import FakeGcs
from servers.hub import FakeHub
from weightbeam.formats.storage import bucket as buckets
from weightbeam.formats.storage import hub as hubs

TOKEN = "hf_a-token-that-nobody-may-see"  # of the fixture `hub`


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


@contextlib.contextmanager
def at_hub(token: str | None = None, **environment: str) -> Iterator[FakeHub]:
    """Context manager: a hub of its own, which `hf://` is for this process and those that it starts; large files go by
    LFS, as where Xet isn't installed.

    Args:
      token: one that may write, and this machine's login; nobody is logged in without it.
      environment: further variables.
    """
    nobody = {} if token else {"HF_HOME": "/nonexistent"}
    with FakeHub() as server, pytest.MonkeyPatch.context() as patch:
        for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE"):
            patch.delenv(name, raising=False)
        for name, value in (nobody | server.env(token) | {"HF_HUB_DISABLE_XET": "1"} | environment).items():
            patch.setenv(name, value)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # which the environment tells other processes
        patch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent/token")
        patch.setattr(hubs, "_locations", hubs._Locations())  # another hub, with the same commits
        patch.setattr(hubs, "_KNOWN", {})
        patch.setattr(hubs, "BACKOFF", 0.01)
        if token:
            server.users.add(token)
            server.writers.add(token)
        yield server
        close_session()


@contextlib.contextmanager
def at_quick_hub(token: str) -> Iterator[FakeHub]:
    """Context manager: `at_hub`, and clients that don't wait."""
    with at_hub(token) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda seconds: None, time=time.time))
        patch.setattr(hubs, "BACKOFF", 0.001)
        yield server
