"""What commands that are forked from a warm process meet."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from warm import PRELOADED, Context


def tell(connection: Connection) -> None:
    connection.send(set(sys.modules))


def test_what_reads_the_environment_isnt_there_yet() -> None:
    ours, theirs = Context.Pipe()
    process = Context.Process(tell, (theirs,))
    process.start()
    there = ours.recv()
    process.join()
    assert set(PRELOADED) <= there, "the fork server says nothing of what it can't import"
    assert not {name for name in there if name.startswith("huggingface_hub.")}
