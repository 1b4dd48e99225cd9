"""Which secret holds the hub's token: the one that a call from Python names is that call's alone."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from weightbeam.formats.storage.token import SECRET, forget_secret, name_secret
from weightbeam.pipelines.terminal.errors import Refused

_lock = threading.Lock()
_named: dict[int, str] = {}  # by the thread of each call that is at work; empty where it has named none
_before: list[str | None] = [None]  # what the environment named before the first one


@contextlib.contextmanager
def secret_of_a_call() -> Iterator[None]:
    """Context manager: a call from Python. Once none is at work with a secret, the environment names what it did before."""
    call = threading.get_ident()
    if call in _named:  # a call within another one
        yield
        return
    with _lock:
        _named[call] = ""
    try:
        yield
    finally:
        with _lock:
            version = _named.pop(call)
            if version and not any(_named.values()):
                forget_secret(version, _before[0])


def use_secret(version: str | None) -> None:
    """Names the secret: for the call that it is done in, or else for all of this process, and those that it starts. None
    changes nothing.

    Raises:
      Refused: another call is at work with another one. The threads that read for all of them can't tell them apart.
    """
    if not version:
        return
    call = threading.get_ident()
    with _lock:
        if other := next((name for of, name in _named.items() if of != call and name not in ("", version)), None):
            raise Refused(
                f"--hf_token_secret={version}: another call of this process is at work with {other}; make them one after the other, "
                "or each in a process of its own"
            )
        if call in _named:
            if not any(_named.values()):
                _before[0] = os.environ.get(SECRET)
            _named[call] = version
        name_secret(version, of_a_call=True)
