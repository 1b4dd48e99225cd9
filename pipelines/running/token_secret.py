"""Which secret holds the hub's token: the one that a call from Python names is that call's alone."""

from __future__ import annotations

import os
import threading

from weightbeam.formats.storage import token
from weightbeam.formats.storage.token import SECRET, name_secret
from weightbeam.pipelines.terminal.errors import Refused

_lock = threading.Lock()
_named: dict[int, str] = {}  # by the thread of the call
_before: list[str | None] = [None]  # what the environment named


def use_secret(version: str | None) -> None:
    """Names the secret for this process and those that it starts, until `forget_secret`; None changes nothing.

    Raises:
      Refused: another call is at work with another one. The threads that read for all of them can't tell them apart.
    """
    if not version:
        return
    call = threading.get_ident()
    with _lock:
        if other := next((name for of, name in _named.items() if of != call and name != version), None):
            raise Refused(
                f"--hf_token_secret={version}: another call of this process is at work with {other}; make them one after the other, "
                "or each in a process of its own"
            )
        if not _named:
            _before[0] = os.environ.get(SECRET)
        _named[call] = version
        name_secret(version, of_a_call=True)


def forget_secret() -> None:
    """A call is over: what the environment named before is what it names, once no other call is at work with a secret."""
    with _lock:
        version = _named.pop(threading.get_ident(), None)
        if version and not _named:
            token.forget_secret(version, _before[0])
