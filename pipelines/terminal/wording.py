"""Messages in the language in which one was asked.

A message names an option, and quotes a command, as the command line does; who called a function reads the keyword, and
the call that does the same. Beam's options and commands without a function are the same in both.

    --resume                                 resume=True
    --like                                   like=
    --state params                           state="params"
    --mesh=fsdp=8                            mesh="fsdp=8"
    check it:   weightbeam diff a b          check it:   weightbeam.diff("a", "b")
    `weightbeam plan --virtual` says why     `weightbeam.plan(…, virtual=True)` says why
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Sequence

from weightbeam.transforms.planning import options

WORDS = r"true|false|full|params|identity|none|zstd|hard|symlink|copy|b?float(?:16|32)|[A-Z]{2,}|\d+"  # values behind a blank
PATHS = r"'[^'\n]+'|(?:[/~]|gs://|hf://)[^\s:;,)]*[^\s:;,.)]"  # and others: as a shell has them
MODELS = r"[a-z]+\d[\w.]*-\w+"
# The commands that are functions, too, with what their words without an option stand for, in order.
FUNCTIONS = {
    **dict.fromkeys(("convert", "export", "reshard", "cut", "dequantize", "quantize", "merge"), ("source", "output")),
    "plan": ("source",),
    "fit": ("source", "maxtext_model"),
    "logits": ("source", "other"),
    "verify": ("source", "checkpoint"),
    "materialize": ("checkpoint", "output"),
    "diff": ("a", "b"),
    "inspect": ("checkpoint",),
}
_NAMES = "|".join(FUNCTIONS)
COMMAND_IN_TEXT = re.compile(
    rf"(?m)`weightbeam (?P<quoted>{_NAMES})(?P<said>(?: [^`\n]*)?)`"
    rf"|(?:^|(?P<apart>(?<=  )|(?<=[:?] )))weightbeam (?P<name>{_NAMES}) (?P<words>[^;\n`]+)"  # begins a line, or behind a label
    rf"|weightbeam (?P<bare>{_NAMES})\b(?P<flags>(?: --[a-z]\w*)*)"  # in a sentence
)
INSTEAD = {  # of what is said at the shell
    "plan and --dry_run list all with --json -": ".problems has all",
    "may be repeated": "or a list of them",
    "repeat it for several": "a list for several",
}
SHELL_WORD = re.compile(r" ?('(?:[^']|'\"'\"')*'|[^\s']+)")  # as a shell has it
OPTION_IN_TEXT = re.compile(
    r"weightbeam [a-z]+(?:(?!, | \()[^;\n`])*"  # another command, which stays as it is
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
PLACES = ("a", "b", "checkpoint", "other", "output", "source")
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


@functools.lru_cache  # of a million problems most say the same
def in_python(text: str) -> str:
    """A text about options as who calls functions would say it."""
    for at_the_shell, instead in INSTEAD.items():
        text = text.replace(at_the_shell, instead)
    return OPTION_IN_TEXT.sub(_in_python, COMMAND_IN_TEXT.sub(_as_call, text))


def _as_call(found: re.Match[str]) -> str:
    """The call that does the same as a command."""
    if found["bare"]:
        if not found["flags"]:
            return f"weightbeam.{found['bare']}"
        return _call(found["bare"], found["flags"].split(), ("…",))
    if found["quoted"]:
        return f"`{_call(found['quoted'], found['said'].split(), ('…',))}`"
    words = list(SHELL_WORD.finditer(found["words"]))
    taken = _count_taken([word[1] for word in words], len(FUNCTIONS[found["name"]]), found["apart"] is None)
    if not taken:
        return f"weightbeam.{found['name']} {COMMAND_IN_TEXT.sub(_as_call, found['words'])}"
    end = words[taken - 1].end()
    return _call(found["name"], [word[1] for word in words[:taken]]) + found["words"][end:]


def _count_taken(words: Sequence[str], places: int, in_sentence: bool) -> int:
    """How many words are the command's: options with their values, and as many others as it has places for; in a sentence
    a word in lower-case letters isn't.
    """
    taken = 0
    while taken < len(words):
        word = words[taken]
        if word.startswith("--"):
            taken += 1 + (word[2:] not in FLAGS and "=" not in word)
        elif places and not (in_sentence and re.fullmatch(r"[a-z]+", word)):
            places, taken = places - 1, taken + 1
        else:
            break
    return min(taken, len(words))


def _call(name: str, words: Sequence[str], places: Sequence[str] = ()) -> str:
    """A function's call: what stands in its places, and keywords.

    Args:
      name: the function's.
      words: the command's.
      places: what stands there if the command doesn't say it.
    """
    said, keywords, left = list[str](), dict[str, list[str]](), list(words)
    while left:
        word = left.pop(0)
        option, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            said.append(_value(word))
        elif equals or option not in FLAGS:
            keywords.setdefault(option, []).append(_value(value or (left.pop(0) if left else "…")))
        else:
            keywords[option] = ["True"]
    if name == "verify":  # takes the checkpoint first
        said.reverse()
    several = {
        key: ", ".join(values) if len(values) == 1 else f"[{', '.join(values)}]" for key, values in keywords.items()
    }
    return f"weightbeam.{name}({', '.join([*(said or places), *(f'{key}={value}' for key, value in several.items())])})"


def _value(word: str) -> str:
    """A word of a shell's as Python has it; what stands for something stays as it is."""
    if word in ("true", "false"):
        return word.capitalize()
    if word == "…" or re.fullmatch(r"[A-Z]+|\d+", word):
        return word
    return json.dumps(word.strip("'"), ensure_ascii=False)


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
