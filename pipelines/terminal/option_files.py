"""The files that options write: whether they can be, and are none that the command reads."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from weightbeam.pipelines.terminal.arguments.commands import COMMANDS
from weightbeam.pipelines.terminal.errors import Refused
from weightbeam.pipelines.terminal.shell import STDOUT
from weightbeam.pipelines.terminal.streams import is_missing

# in what stands for a value that may be a file or a folder
NAMES_A_PLACE = re.compile("URL|PATH|FILE|FOLDER|CKPT|RELEASE|PYTHON|OTHER|^[AB]$")
WEIGHT = "[,WEIGHT]"  # what such a place may have behind it: an adapter's


def check_written(args: argparse.Namespace) -> None:
    """Makes sure, before any work is done, that each file which an option writes can be, and is none of those that the
    command reads, or makes, nor of any release or checkpoint: records and links lead to others than are named.

    Raises:
      Refused: some can't be, or are.
    """
    written = {"json", "log_file", "save_logits"} | ({"maxtext_config"} if args.command == "plan" else set())
    places = list(_named_places(args, written))
    taken: dict[Path, str] = {}
    output = getattr(args, "output", None)
    problems = [
        f"--{option}={file}: {why}"
        for option in sorted(written)
        if (file := getattr(args, option, None)) and (why := _why_not_written(option, file, taken, places, output))
    ]
    if problems:
        raise Refused(*problems)


def _named_places(args: argparse.Namespace, written: Collection[str]) -> Iterator[str]:
    """What may be a file or a folder in the words of a command line: not what its other options say, such as a dtype.

    Args:
      written: options that name what they write.
    """
    for option in COMMANDS[args.command].all_options():
        metavar = option.metavar or option.name.upper()
        if option.name in written or not NAMES_A_PLACE.search(metavar):
            continue
        value = getattr(args, option.name, None)
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                places = [text, text.rpartition(",")[0]] if metavar.endswith(WEIGHT) else [text]
                yield from filter(None, places)


def _why_not_written(option: str, file: str, taken: dict[Path, str], read: Sequence[str], output: object) -> str | None:
    """Why an option can't write a file; None where it can.

    Args:
      taken: the options before, by their files; gets this one.
      read: what other options name.
      output: where the result goes.
    """
    if file == STDOUT:
        if (other := taken.setdefault(Path(STDOUT), option)) != option:
            return f"goes to standard output, as --{other} does; name a file"
        return "standard output is closed; name a file" if is_missing(sys.stdout) else None
    path = Path(os.path.realpath(file))
    if (other := taken.setdefault(path, option)) != option and (path.is_file() or not path.exists()):
        return f"is the file of --{other}; name another"
    if option != "save_logits" and (why := why_unwritable(file)):  # which the command tells with all else
        return why
    if path.is_file() and (
        there := next((place for place in read if path.is_relative_to(os.path.realpath(place))), "")
    ):
        return f"is a file of {there}, and would be changed; name another"
    if isinstance(output, str) and path == Path(os.path.realpath(output)):
        return "is where the result goes; name another"
    if path.is_file() and path.stat().st_nlink > 1:
        return "has another name, too (a hard link), which would be changed; name another file"
    if whole := next(filter(None, map(_holder, {path, Path(os.path.abspath(file))})), None):
        return f"lies in {whole}, which would be changed; name another"
    return None


def _holder(path: Path) -> str | None:
    """The checkpoint in whose folders a file lies or would lie, or the release that it is a file of, by its name; None
    where it is in neither.
    """
    for folder in path.parents:
        if any((folder / name).is_file() for name in ("_METADATA", "_CHECKPOINT_METADATA")):
            return f"the checkpoint {folder}"
    if not path.is_file():
        return None
    from weightbeam.formats.release.files import is_of_release  # only now: it imports numpy

    beside = os.listdir(path.parent) if os.access(path.parent, os.R_OK) else []
    return f"the release {path.parent}" if is_of_release(path.name, beside) else None


def why_unwritable(file: str) -> str | None:
    """Why a file can't be written, as far as that is known before; None where it can."""
    path = Path(os.path.realpath(file))
    try:
        if path.is_dir():
            return "is a folder; name a file in it"
        if not path.parent.is_dir():
            return f"there is no folder {path.parent}"
        return None if os.access(path if path.exists() else path.parent, os.W_OK) else "may not be written"
    except OSError as e:  # such as a name that is too long
        return e.strerror
