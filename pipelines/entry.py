"""The console script: a Ctrl-C, or a polite kill, while the command line itself is imported ends it in one line."""

from __future__ import annotations

import signal
from typing import NoReturn

from weightbeam.pipelines.terminal.streams import stop_at_once


def run() -> NoReturn:
    """The command `weightbeam`; see `cli.run`."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(
            signal.SIGINT, lambda *_: stop_at_once(128 + signal.SIGINT)
        )  # wherever nothing else looks after it
    signal.signal(signal.SIGTERM, lambda *_: stop_at_once(1))
    from weightbeam.formats.heaps import use_one_heap

    use_one_heap()
    from weightbeam.pipelines import cli

    cli.run()
