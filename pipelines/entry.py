"""The console script: a Ctrl-C while the command line itself is imported ends it without a word."""

from __future__ import annotations

import os
import signal
from typing import NoReturn


def run() -> NoReturn:
    """The command `weightbeam`; see `cli.run`."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    from weightbeam.pipelines import cli

    signal.signal(signal.SIGINT, before)
    cli.run()
