"""Messages on standard error and in `--log_file`; results, as text and as JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from weightbeam.formats.storage.local import write_file
from weightbeam.formats.text.printable import printable
from weightbeam.pipelines.terminal.errors import Failed, Refused
from weightbeam.pipelines.terminal.progress import say_above_bar

if TYPE_CHECKING:
    from weightbeam.pipelines.terminal.shown import Shown

LOG = logging.getLogger("weightbeam")
STDOUT = "-"  # as a file's name
UP = "\x1b[A\x1b[2K"  # has a terminal go to the line above, and clear it
DATED = "%(asctime)s %(levelname)s %(message)s"


class _Lines(logging.Formatter):
    """Messages for a person: a warning says that it is one."""

    def format(self, record: logging.LogRecord) -> str:
        return ("warning: " if record.levelno == logging.WARNING else "") + printable(record.getMessage(), lines=True)


class JsonMessages(logging.Formatter):
    """Messages for a program: a line of JSON each, in the fields that Cloud Logging knows, with the `facts` that a
    message may have.
    """

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "severity": record.levelname,
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "message": record.getMessage(),
        }
        return json.dumps(
            line
            | getattr(record, "facts", {})
            | ({"trace": self.formatException(record.exc_info)} if record.exc_info else {})
        )


class _Screen(logging.StreamHandler[TextIO]):
    """Messages on a terminal: one takes the line of a `passing` one before it of the same `key`, such as a step's."""

    passed = ""  # the key of the last message, if that is passing and has a line of its own

    def emit(self, record: logging.LogRecord) -> None:
        if say_above_bar(self.format(record)):
            return
        key = getattr(record, "facts", {}).get("key", "")
        if key and key == self.passed:
            self.stream.write(UP)
        super().emit(record)
        fits = len(self.format(record)) < shutil.get_terminal_size().columns
        self.passed = key if fits and getattr(record, "passing", False) else ""


def _formatter(args: argparse.Namespace) -> logging.Formatter:
    """A watcher speaks JSON where it is asked to, and where nobody is at a terminal; other commands speak to a person."""
    in_json = args.command == "watch" and (
        args.progress == "json" or (args.progress in ("auto", "none") and not sys.stderr.isatty())
    )
    return JsonMessages() if in_json else _Lines()


class _LogFile(logging.FileHandler):
    """Messages in a file: one that takes no more of them, such as of a full disk, is told of once, and stops nothing."""

    is_over = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self.is_over:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's)
        """Called by `emit` where it failed."""
        error = sys.exception()
        self.is_over = True
        why = error.strerror if isinstance(error, OSError) else error
        LOG.warning("--log_file=%s: %s; nothing more is written to it", self.baseFilename, why)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of what couldn't be written, which was told
            super().close()


@contextlib.contextmanager
def messages(args: argparse.Namespace) -> Iterator[None]:
    """Context manager: what is logged for the user goes to standard error as it is now, also while Beam's noise is
    caught; nothing else does.

    `-q` leaves warnings, `-v` adds what is said at length, `--log_file` has all of it, and how it ended.

    Raises:
      Refused: the log can't be written.
    """
    formatter = _formatter(args)
    for_a_person = sys.stderr.isatty() and isinstance(formatter, _Lines)
    screen = (_Screen if for_a_person else logging.StreamHandler)(sys.stderr)
    screen.setFormatter(formatter)
    screen.setLevel(
        logging.WARNING if args.quiet else logging.DEBUG if getattr(args, "verbose", False) else logging.INFO
    )
    handlers: list[logging.Handler] = [screen]
    if args.log_file:
        try:
            handlers.append(_LogFile(args.log_file, encoding="utf-8"))
        except OSError as e:
            raise Refused(f"--log_file={args.log_file}: {e.strerror}") from e
        handlers[-1].setFormatter(logging.Formatter(DATED))
    root = logging.getLogger()
    before, level = (LOG.level, LOG.propagate), root.level
    for handler in handlers:
        LOG.addHandler(handler)
    LOG.setLevel(logging.DEBUG)
    LOG.propagate = False
    root.setLevel(max(level, logging.ERROR))
    if not root.handlers:  # before Beam is imported: it warns of optional packages
        root.addHandler(logging.NullHandler())
    try:
        yield
        _end(handlers[1:], logging.INFO, f"{args.command}: done")
    except (Refused, Failed) as e:
        _end(handlers[1:], logging.ERROR, f"{args.command}: {type(e).__name__.lower()}\n{e}")
        raise
    finally:
        for handler in handlers:
            LOG.removeHandler(handler)
            handler.close()
        LOG.level, LOG.propagate = before
        root.setLevel(level)


def _end(handlers: list[logging.Handler], level: int, text: str) -> None:
    for handler in handlers:
        handler.handle(logging.LogRecord(LOG.name, level, "", 0, "%s", (text,), None))


def say(args: argparse.Namespace, value: Shown) -> None:
    """Prints a result: what `--json -` asks for and nothing else, or its text, but for `-q`; and writes `--json FILE`.
    Where its text isn't printed, a line on standard error says what it complains of.

    Raises:
      Failed: the file can't be written.
    """
    wanted = getattr(args, "json", None)
    try:
        if wanted:
            write_json(wanted, value.to_dict())
    finally:
        if wanted != STDOUT and not args.quiet:
            value.show()
        elif complaint := value.complaint():
            LOG.warning(complaint)


def write_json(file: str, value: object) -> None:
    """Writes what `--json FILE` asks for; `-` is standard output.

    Raises:
      Failed: the file can't be written.
    """
    write_text("--json", file, json.dumps(value, indent=1) + ("\n" if file == STDOUT else ""))


def write_text(option: str, file: str, text: str) -> None:
    """Writes what an option asks for as text, whole or not at all; `-` is standard output.

    Raises:
      Failed: the file can't be written.
    """
    if file == STDOUT:
        print(text, end="")
    else:
        write_bytes(option, file, text.encode())


def write_bytes(option: str, file: str, data: bytes) -> None:
    """Writes what an option asks for into a file, whole or not at all.

    Raises:
      Failed: the file can't be written.
    """
    path = Path(os.path.realpath(file))
    try:
        if (path.exists() and not path.is_file()) or not os.access(path.parent, os.W_OK):  # a device; a file alone
            path.write_bytes(data)
        else:
            write_file(path, data)
    except OSError as e:
        raise Failed(f"{option}={file}: {e.strerror}; all else is done") from e
