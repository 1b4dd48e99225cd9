"""Edits of JSON that leave every other byte as it is: spelling of numbers, order of keys, indentation, escapes.

A path names an object's member by the keys that lead to it: `("text_config", "vocab_size")`. Texts must be valid JSON
(`strict_json.parse_json`); keys that stand twice in one object are nobody's.
"""

from __future__ import annotations

import dataclasses
import json
from json.decoder import JSONDecoder, scanstring  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """Where a member of an object stands in a text: its key begins at `start`, `text[value:stop]` is its value."""

    key: str
    start: int
    value: int
    stop: int


def members(text: str, start: int) -> list[Member]:
    """The members of the object that begins at or behind `start`, in their order."""
    found: list[Member] = []
    at = _skip(text, start) + 1
    while text[at := _skip(text, at)] != "}":
        key, after = scanstring(text, at + 1)
        value = _skip(text, _skip(text, after) + 1)
        stop = JSONDecoder().raw_decode(text, value)[1]
        found.append(Member(key, at, value, stop))
        at = _skip(text, stop)
        at += text[at] == ","
    return found


def _skip(text: str, at: int) -> int:
    """The next place that isn't blank."""
    while text[at] in " \t\r\n":
        at += 1
    return at


def find(text: str, path: Path) -> Member | None:
    """A member; None if there is none, or something on the way isn't an object."""
    start, found = 0, None
    for key in path:
        start = _skip(text, start)
        if text[start] != "{":
            return None
        found = next((member for member in members(text, start) if member.key == key), None)
        if found is None:
            return None
        start = found.value
    return found


def get(text: str, path: Path, default: Any = None) -> Any:
    """The value of a member; `default` where there is none."""
    found = find(text, path)
    return default if found is None else json.loads(text[found.value : found.stop])


def set_value(text: str, path: Path, value: Any, after: str | None = None) -> str:
    """Gives a member another value, or adds it: behind its sibling `after`, else at the object's end.

    Raises:
      KeyError: the object that should hold it isn't there.
    """
    *parents, key = path
    if (member := find(text, path)) is not None:
        blanks = _blanks(text, members(text, _object(text, tuple(parents))))
        return text[: member.value] + _dump(value, blanks, len(path)) + text[member.stop :]
    start = _object(text, tuple(parents))
    siblings = members(text, start)
    if not siblings:
        at = _skip(text, start) + 1
        return f"{text[:at]}{json.dumps(key)}: {_dump(value, '', len(path))}{text[_skip(text, at) :]}"
    behind = next((member for member in siblings if member.key == after), siblings[-1])
    blanks, colon = _blanks(text, siblings), _colon(text, siblings[0])
    return (
        f"{text[: behind.stop]},{blanks}{json.dumps(key)}{colon}{_dump(value, blanks, len(path))}{text[behind.stop :]}"
    )


def remove(text: str, path: Path) -> str:
    """Takes a member away, with the comma and the blanks before it. Nothing happens if there is none."""
    if find(text, path) is None:
        return text
    siblings = members(text, _object(text, path[:-1]))
    at = next(number for number, member in enumerate(siblings) if member.key == path[-1])
    if at:
        return text[: siblings[at - 1].stop] + text[siblings[at].stop :]
    return text[: siblings[0].start] + text[siblings[1].start if len(siblings) > 1 else siblings[0].stop :]


def _object(text: str, path: Path) -> int:
    """Where an object begins."""
    found = find(text, path) if path else None
    start = _skip(text, 0) if found is None else found.value
    if (path and found is None) or text[start] != "{":
        raise KeyError(".".join(path))
    return start


def _blanks(text: str, siblings: list[Member]) -> str:
    """What stands before the key of each member of an object: a new line and its indentation, where the writer did
    that.
    """
    before = text[: siblings[-1].start]
    return before[len(before.rstrip(" \t\r\n")) :]


def _colon(text: str, member: Member) -> str:
    """What stands between key and value."""
    return text[scanstring(text, member.start + 1)[1] : member.value]


def _dump(value: Any, blanks: str, depth: int) -> str:
    """A value at that depth, indented as its siblings are."""
    line, _, indent = blanks.rpartition("\n")
    if "\n" not in blanks:
        return json.dumps(value)
    unit = indent[: len(indent) // depth]
    return json.dumps(value, indent=unit).replace("\n", f"{line}\n{indent}")
