"""Standard input, output and error as a command finds them: closed ones, and encodings that can't say everything."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import NoReturn, TextIO


def stop_at_once(status: int) -> NoReturn:
    """Ends the process from a signal's handler, in the middle of anything, with one line: extension modules that are
    interrupted while they are imported print what they like.
    """
    with contextlib.suppress(OSError):
        os.write(2, b"\nweightbeam: stopped\n")
    os._exit(status)


def is_missing(stream: TextIO) -> bool:
    """Whether a stream was closed when the command began, and `prepare_streams` put one in its place that leads nowhere."""
    return getattr(stream, "name", None) == os.devnull


def prepare_streams() -> None:
    """Has all three be there, and write whatever is asked: what an encoding lacks as `\\u2026`.

    A closed one would be the number of the next file that is opened, and what is printed would be written into that.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
