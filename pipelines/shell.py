"""What the commands share at the terminal."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

from weightbeam.formats.printable import printable
from weightbeam.pipelines.errors import Refused

LOG = logging.getLogger("weightbeam")
STDOUT = "-"  # as a file's name


class _Lines(logging.Formatter):
    """Messages for a person: a warning says that it is one."""

    def format(self, record: logging.LogRecord) -> str:
        return ("warning: " if record.levelno == logging.WARNING else "") + printable(record.getMessage(), lines=True)


@contextlib.contextmanager
def messages() -> Iterator[None]:
    """Context manager: what is logged for the user goes to standard error as it is now, also while Beam's noise is caught; nothing else is."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    root = logging.getLogger()
    before, level = (LOG.level, LOG.propagate), root.level
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
    root.setLevel(max(level, logging.ERROR))
    if not root.handlers:  # before Beam is imported: it warns of optional packages
        root.addHandler(logging.NullHandler())
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        LOG.level, LOG.propagate = before
        root.setLevel(level)


def write_json(file: str, value: object) -> None:
    """Writes what `--json FILE` asks for; `-` is standard output.

    Raises:
      Refused: the file can't be written.
    """
    write_text("--json", file, json.dumps(value, indent=1) + ("\n" if file == STDOUT else ""))


def write_text(option: str, file: str, text: str) -> None:
    """Writes what an option asks for as text; `-` is standard output.

    Raises:
      Refused: the file can't be written.
    """
    if file == STDOUT:
        print(text, end="")
        return
    try:
        Path(file).write_text(text)
    except OSError as e:
        raise Refused(f"{option}={file}: {e.strerror}") from e
