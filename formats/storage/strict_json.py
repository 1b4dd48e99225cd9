"""JSON from a stranger: bounded in memory and depth, and without what readers understand differently."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightbeam.formats.storage import Store

MAX_BYTES = 100_000_000  # of a text; the safetensors format allows a header as many
# of texts that are read together, so that their objects in memory are bounded: a tensor of rank 2 is 11 of them
MAX_VALUES = 5_000_000
MAX_DEPTH = 64


class JsonError(ValueError):
    """A text isn't the JSON that anyone means; the message says why."""


class Budget:
    """The values that texts may have together, from whichever thread they are read."""

    def __init__(self, values: int = MAX_VALUES):
        self._values = self._left = values
        self._lock = threading.Lock()

    def take(self, raw: bytes) -> None:
        """Counts the values of a text, at most one for each mark between them.

        Raises:
          JsonError: there are more than are left.
        """
        values = sum(raw.count(mark) for mark in b"{[:,")
        with self._lock:
            if values > self._left:
                together = "" if self._left == self._values else ", with the files that were read before"
                raise JsonError(f"more than {self._values:,} values{together}")
            self._left -= values


def parse_json(raw: bytes, lenient: bool = True, budget: Budget | None = None) -> Any:
    """JSON from a stranger; `lenient` with NaN, infinity and −0, which Python reads and writes.

    Raises:
      JsonError: it isn't UTF-8 or JSON, has a key twice, or is larger than anything that is meant.
    """
    if len(raw) > MAX_BYTES:
        raise JsonError(f"has more than {MAX_BYTES:,} bytes")
    (budget or Budget()).take(raw)
    try:
        strict = {} if lenient else {"parse_constant": _refuse_constant, "parse_int": _parse_int}
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates, **strict)
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
    return parse_json(store.read(name, 0, MAX_BYTES + 1), budget=budget)


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
