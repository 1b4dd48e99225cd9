"""Messages in the language in which one was asked.

A message names an option as the command line does: `--resume`, `--like`, `--state params`, `--mesh=fsdp=8`. Who called a
function reads `resume=True`, `like=`, `state="params"`, `mesh="fsdp=8"`. Commands that a message quotes (`weightbeam diff
…`) and Beam's options are the same in both.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator

WORDS = "true|false|full|params|none|zstd|b?float(?:16|32)|[A-Z]{2,}"  # values that may follow an option after a blank
TOKEN = re.compile(
    r"weightbeam [a-z]+[^;\n]*"  # a command, which stays as it is
    r"|the same command"
    rf"|--(?P<name>[a-z]\w*)(?:=(?P<given>[^\s=:;,]+=[^\s:;]*[^\s:;,.]|(?:{WORDS})\b)|=| (?P<value>\w+=[\w=,]*\w|(?:{WORDS})\b))?"
    r"(?P<after>'s\b|:| was\b)?"
)
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
    return text if _at_the_shell else TOKEN.sub(_in_python, text)


def _in_python(found: re.Match[str]) -> str:
    text, name = found[0], found["name"]
    if name is None:
        return "the same call" if text == "the same command" else text
    if name == "json":
        return "to_json()"
    if name not in _keywords():
        return text
    after, value = found["after"] or "", found["given"] or found["value"]
    if value:
        if value in ("true", "false"):
            value = value.capitalize()
        elif not value.isupper():
            value = f'"{value}"'
        return f"{name}={value}{after}"
    if after:
        return name + after
    if text.endswith("=") or not _keywords()[name]:
        return f"{name}="
    return f"{name}=True"


@functools.cache
def _keywords() -> dict[str, bool]:
    """The options that are keywords of the functions, and whether each is a flag, which is True where it is named."""
    from weightbeam.pipelines.arguments.parser import SHELL, make_parser

    commands = next(action for action in make_parser()._actions if action.dest == "command")
    assert commands.choices
    actions = (action for command in dict(commands.choices).values() for action in command._actions)  # type: ignore[call-overload]
    return {action.dest: action.const is True for action in actions if action.dest not in {*SHELL, "help"}}
