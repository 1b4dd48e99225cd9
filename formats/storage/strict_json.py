"""JSON from a stranger: bounded in memory and depth, and without what readers understand differently."""

from __future__ import annotations

import json
import os
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightbeam.formats.storage import Store

MAX_BYTES = 100_000_000  # of a text; the safetensors format allows a header as many
# of texts that are read together, so that their objects in memory are bounded: a tensor of rank 2 is 11 values
MAX_TOGETHER, MAX_VALUES = 2 * MAX_BYTES, 5_000_000
MAX_DEPTH = 64
WIDE = 2  # values that one counts for where characters may take four bytes each


class JsonError(ValueError):
    """A text isn't the JSON that anyone means; the message says why."""


class Budget:
    """The bytes and values that texts may have together, from whichever thread they are read. A file that is read again
    counts once.
    """

    def __init__(self) -> None:
        self._taken: dict[str, tuple[int, int]] = {}  # bytes and values, by file
        self._bytes = self._values = 0  # of all of them
        self._lock = threading.Lock()

    def take(self, raw: bytes, file: str) -> None:
        """Counts the bytes of a text, and its values, at most one for each mark between them.

        Raises:
          JsonError: there are more than are left.
        """
        values = sum(raw.count(mark) for mark in b"{[:,") * (1 if _is_narrow(raw) else WIDE)
        with self._lock:
            before = self._taken.get(file, (0, 0))
            nbytes, together = self._bytes - before[0] + len(raw), self._values - before[1] + values
            with_others = ", with the files that were read before" if nbytes > len(raw) else ""
            if together > MAX_VALUES:
                raise JsonError(f"more than {MAX_VALUES:,} values{with_others}")
            if nbytes > MAX_TOGETHER:
                raise JsonError(f"more than {MAX_TOGETHER:,} bytes{with_others}")
            self._bytes, self._values, self._taken[file] = nbytes, together, (len(raw), values)


def _is_narrow(raw: bytes) -> bool:
    """Whether each character of a text, and of each string in it, takes one byte."""
    return raw.isascii() and b"\\u" not in raw


def parse_json(raw: bytes, lenient: bool = True, budget: Budget | None = None, file: str = "") -> Any:
    """JSON from a stranger.

    Args:
      raw: a text.
      lenient: with NaN, infinity and −0, which Python reads and writes.
      budget: what the text shares with others.
      file: where it was read, for the budget.

    Raises:
      JsonError: it isn't UTF-8 or JSON, has a key twice, or is larger than anything that is meant.
    """
    if len(raw) > MAX_BYTES:
        raise JsonError(f"has more than {MAX_BYTES:,} bytes")
    (budget or Budget()).take(raw, file)
    try:
        text = raw.decode("utf-8")
        if not _is_narrow(raw) and 4 * len(text) > MAX_TOGETHER:
            raise JsonError(f"has more than {MAX_TOGETHER // 4:,} characters, and not only narrow ones")
        strict = {} if lenient else {"parse_constant": _refuse_constant, "parse_int": _parse_int}
        value = json.loads(text, object_pairs_hook=_no_duplicates, **strict)
    except UnicodeDecodeError as e:
        raise JsonError(f"isn't UTF-8: {e}") from e
    except JsonError:
        raise
    except (ValueError, RecursionError) as e:
        raise JsonError(f"isn't JSON: {e}") from e
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
    if level:
        raise JsonError(f"objects and lists within each other, more than {MAX_DEPTH} deep")
    return value


def read_json(store: Store, name: str, budget: Budget | None = None) -> Any:
    """A stranger's JSON file: no more of it is read than may be meant.

    Raises:
      OSError: it isn't there, or can't be read.
      JsonError: see `parse_json`.
    """
    return parse_json(store.read(name, 0, MAX_BYTES + 1), budget=budget, file=store.path(name))


def object_in(store: Store, name: str) -> dict[str, Any]:
    """What a stranger's JSON file says; empty where there is none, or it holds something else than an object.

    Raises:
      OSError: it can't be read.
    """
    try:
        said = read_json(store, name)
    except (FileNotFoundError, JsonError):
        return {}
    return said if isinstance(said, dict) else {}


def check_texts(value: Any) -> None:
    """Makes sure that texts, some of which name places, are ones that a system's names can be.

    Raises:
      JsonError: one has half of a pair of UTF-16, and of no byte that isn't UTF-8, as Python has those of a name.
    """
    try:
        os.fsencode(json.dumps(value, ensure_ascii=False))
    except UnicodeEncodeError as e:
        raise JsonError(f"has {e.object[e.start]!a}, half of a character") from e


def _refuse_constant(text: str) -> None:
    raise JsonError(f"{text} isn't JSON")


def _parse_int(text: str) -> int:
    if text == "-0":  # a floating-point number, to other readers
        raise JsonError("-0 isn't a size")
    return int(text)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise JsonError(f"the key {twice[:80]!r} stands twice")
    return result
