"""Messages in the language in which one was asked.

A message names an option as the command line does: `--resume`, `--like`, `--state params`, `--mesh=fsdp=8`. Who called a
function reads `resume=True`, `like=`, `state="params"`, `mesh="fsdp=8"`. Commands that a message quotes (`weightbeam diff
…`) and Beam's options are the same in both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator

from weightbeam.transforms.planning import options

WORDS = r"true|false|full|params|none|zstd|hard|symlink|copy|b?float(?:16|32)|[A-Z]{2,}|\d+"  # values behind a blank
PATHS = r"'[^'\n]+'|(?:[/~]|gs://|hf://)[^\s:;,)]*[^\s:;,.)]"  # and others: as a shell has them
MODELS = r"[a-z]+\d[\w.]*-\w+"
TOKEN = re.compile(
    r"weightbeam [a-z]+(?:(?!, | \()[^;\n`])*"  # a command, which stays as it is
    r"|the same command"
    r"|--accept (?P<accepted>[\w.]+)"
    rf"|--(?P<name>[a-z]\w*)(?:=(?P<given>[^\s=:;,]+=[^\s:;]*[^\s:;,.]|(?:{WORDS})\b)|=| (?P<value>\w+=[\w=,]*\w|(?:{WORDS})\b|{PATHS}|{MODELS}))?"
    r"(?P<after>'s\b|:| was\b)?"
)
# Options that are keywords, too; their commands' module isn't asked, since it has messages itself.
_OPTIONS = [
    each
    for kind in vars(options).values()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind is not options.Option
    for each in options.options_of(kind)
]
# true by their names alone, in messages too; --multimodal is named where it is false as well
FLAGS = frozenset(each.name for each in _OPTIONS if each.is_boolean and each.default is False) - {"multimodal"}
PLACES = ("a", "b", "checkpoint", "output", "source")
KEYWORDS = frozenset(each.name for each in _OPTIONS).union(PLACES)
_at_the_shell = False


@contextlib.contextmanager
def at_the_shell() -> Iterator[None]:
    """Context manager: whoever reads the messages typed a command."""
    global _at_the_shell
    before, _at_the_shell = _at_the_shell, True
    try:
        yield
    finally:
        _at_the_shell = before


def worded(text: str) -> str:
    """A message as its reader would say it."""
    return text if _at_the_shell else in_python(text)


def in_python(text: str) -> str:
    """A text about options as who calls functions would say it."""
    return TOKEN.sub(_in_python, text)


def _in_python(found: re.Match[str]) -> str:
    text, name = found[0], found["name"]
    if found["accepted"]:
        return f'accept="{found["accepted"]}"'
    if name is None:
        return "the same call" if text == "the same command" else text
    if name == "json":
        return "to_json()"
    if name not in KEYWORDS:
        return text
    after, value = found["after"] or "", found["given"] or found["value"]
    if value:
        if value in ("true", "false"):
            value = value.capitalize()
        elif not value.isupper() and not value.isdecimal():
            value = f'"{value.strip(chr(39))}"'
        return f"{name}={value}{after}"
    if after:
        return name + after
    if text.endswith("=") or name not in FLAGS:
        return f"{name}="
    return f"{name}=True"
