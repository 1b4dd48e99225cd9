"""The regular expressions of an adapter's configuration, matched without backtracking.

PEFT matches each with the end of a module's name by `re`, whose time may double with each character: `(.*)*x` never ends.
Here an expression is followed from all places of the name at once, as bits of an integer, so that the time is at most
the expression's length times the name's for each level of repetition; and there is a limit for all of them together.

Names, escapes, `.`, sets, groups, alternatives, repetitions, anchors and what looks around are understood; no flags, and
nothing that refers back.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from re import _constants as of  # pyright: ignore[reportAttributeAccessIssue]
from re import _parser as parser  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

MAX_PATTERN, MAX_TOTAL, MAX_NAME = 1_000, 1_000_000, 10_000  # characters of one, of all, and of a module's name
MAX_DEPTH = 20  # groups and repetitions within each other
# parts of expressions that are followed for one configuration, and for each module that is looked up besides; in all
# they take some seconds
MAX_STEPS, MODULE_STEPS, MOST_STEPS = 2_000_000, 20_000, 6_000_000
SEARCHES = 8  # expressions whose texts are looked for in a name in the time of a step

ANY = "\n"  # which no name has

_CATEGORIES = {
    of.CATEGORY_DIGIT: re.compile(r"\d"),
    of.CATEGORY_NOT_DIGIT: re.compile(r"\D"),
    of.CATEGORY_WORD: re.compile(r"\w"),
    of.CATEGORY_NOT_WORD: re.compile(r"\W"),
    of.CATEGORY_SPACE: re.compile(r"\s"),
    of.CATEGORY_NOT_SPACE: re.compile(r"\S"),
}
_WORD = (of.IN, ((of.CATEGORY, of.CATEGORY_WORD),))
_ONE = (of.LITERAL, of.NOT_LITERAL, of.ANY, of.IN)  # character
_STARTS, _ENDS = (of.AT_BEGINNING, of.AT_BEGINNING_STRING), (of.AT_END, of.AT_END_STRING)
_BOUNDS = (of.AT_BOUNDARY, of.AT_NON_BOUNDARY)  # of words
_LOOKS = (of.ASSERT, of.ASSERT_NOT)

Part = tuple[Any, Any]  # of an expression, as Python's own parser has it


class PatternError(ValueError):
    """An expression can't be matched; the message says why."""


class Patterns:
    """Values by expressions for the end of a module's name; the first that fits is meant (peft, utils/other.py,
    `get_pattern_key`).

    Raises:
      PatternError: one isn't understood.
    """

    def __init__(self, values: Mapping[str, Any], most: int = MOST_STEPS):
        """`most`: parts of expressions that are followed in all."""
        self._values = list(values.values())
        # most are names, from a module's beginning on or its end alone: by that and their length, by the places that may
        # be any character, and by the others
        self._names: dict[tuple[bool, int], dict[tuple[int, ...], dict[str, int]]] = defaultdict(
            lambda: defaultdict(dict)
        )
        self._others: list[tuple[int, list[Part], str]] = []  # with what a module's name must have for them
        self._left, self._most = MAX_STEPS, most
        self._found: dict[str, int] = {}
        for number, text in enumerate(values):
            parts = parse(text)
            own = _own(parts)
            if plain := _plain(own):
                is_whole, name = plain
                any_at = tuple(at for at, letter in enumerate(name) if letter == ANY)
                self._names[is_whole, len(name)][any_at].setdefault(name, number)
            else:
                self._others.append((number, parts, max(_literals(own), key=len, default="")))

    def find(self, module: str, default: Any) -> Any:
        """The value of the first expression that fits a module; `default` where none does.

        Raises:
          PatternError: that, with all that was looked up before, takes too long.
        """
        if self._values and len(module) > MAX_NAME:
            raise PatternError(f"patterns of ranks and alphas aren't matched with a name of {len(module):,} characters")
        if (first := self._found.get(module)) is None:
            first = self._found[module] = self._find(module)
        return self._values[first] if first < len(self._values) else default

    def _find(self, module: str) -> int:
        """The number of the first expression that fits a module."""
        self._left += MODULE_STEPS
        starts = [0, *(at + 1 for at, letter in enumerate(module) if letter == ".")]
        first = len(self._values)
        for is_whole, start in [(True, 0), *((False, start) for start in starts)]:
            for any_at, names in self._names.get((is_whole, len(module) - start), {}).items():
                self._count(1)
                end = list(module[start:])
                for at in any_at:
                    end[at] = ANY
                first = min(first, names.get("".join(end), first))
        self._count(len(self._others) // SEARCHES)
        all_starts = sum(1 << start for start in starts)
        for number, parts, literal in self._others:
            if literal in module and number < first:
                # but for alternatives to it, an expression begins with PEFT's prefix, which leads to all starts
                begins, rest = (1, parts) if parts[0][0] is of.BRANCH else (all_starts, parts[1:])
                if self._ends(rest, module, begins):
                    first = number
        return first

    def _count(self, steps: int) -> None:
        self._left, self._most = self._left - steps, self._most - steps
        if min(self._left, self._most) < 0:
            raise PatternError("the patterns of ranks and alphas take too long to match with the modules' names")

    def _ends(self, parts: Iterable[Part], text: str, starts: int) -> int:
        """Where in a text an expression ends that begins at one of `starts`, as bits."""
        for kind, about in parts:
            if not starts:
                break
            self._count(1 + (len(text) >> 8))
            if kind in _ONE:
                starts = (starts & _places((kind, _frozen(about)), text)) << 1
            elif kind is of.BRANCH:
                starts = functools.reduce(int.__or__, (self._ends(branch, text, starts) for branch in about[1]))
            elif kind is of.SUBPATTERN:
                starts = self._ends(about[3], text, starts)
            elif kind is of.AT:
                starts &= _anchors(about, text)
            elif kind in _LOOKS:
                found = self._looks(about[0], about[1], text, starts)
                starts &= found if kind is of.ASSERT else ~found
            else:
                least, most, body = about
                starts = self._repeated(least, most, body, text, starts)
        return starts

    def _looks(self, direction: int, body: Iterable[Part], text: str, starts: int) -> int:
        """Behind which of `starts` a part follows; with the direction -1, all places in front of which it stands."""
        if direction < 0:
            return self._ends(body, text, (2 << len(text)) - 1)
        found = 0
        while starts:
            self._count(1 + (len(text) >> 8))
            first = starts & -starts
            found |= first if self._ends(body, text, first) else 0
            starts ^= first
        return found

    def _repeated(self, least: int, most: int, body: Iterable[Part], text: str, starts: int) -> int:
        """The same of a repetition. What may be empty only adds places, all else moves on: both come to an end."""
        for _ in range(least):
            before, starts = starts, self._ends(body, text, starts)
            if starts in (0, before):
                break
        found = new = starts
        for _ in range(min(most - least, len(text) + 1)):
            if not new:
                break
            new = self._ends(body, text, new) & ~found
            found |= new
        return found


def parse(text: str) -> list[Part]:
    """An expression with what PEFT puts around it.

    Raises:
      PatternError: it isn't one, or not one that is understood.
    """
    if len(text) > MAX_PATTERN:
        raise PatternError(f"has more than {MAX_PATTERN:,} characters")
    try:
        parts = list(parser.parse(rf"(.*\.)?({text})$"))
    except (re.error, RecursionError, OverflowError) as e:
        raise PatternError("isn't a regular expression") from e
    _check(parts, MAX_DEPTH)
    return parts


def _check(parts: Iterable[Part], depth: int) -> None:
    """Makes sure that all parts are understood."""
    if not depth:
        raise PatternError(f"isn't a regular expression that is supported: it is more than {MAX_DEPTH} deep")
    for kind, about in parts:
        if kind is of.BRANCH:
            below = about[1]
        elif kind is of.SUBPATTERN and not about[1] and not about[2]:
            below = [about[3]]
        elif kind in (of.MAX_REPEAT, of.MIN_REPEAT):
            below = [about[2]]
        elif kind in _LOOKS and (about[0] > 0 or len(set(about[1].getwidth())) == 1):  # `re`'s own condition
            below = [about[1]]
        elif kind in _ONE or (kind is of.AT and about in (*_STARTS, *_ENDS, *_BOUNDS)):
            below = []
        else:
            raise PatternError(f"isn't a regular expression that is supported: it has {kind}".lower())
        for part in below:
            _check(part, depth - 1)


def _own(parts: list[Part]) -> list[Part]:
    """An expression without what PEFT puts around it; with it where nothing is in it, or where that has made halves whole."""
    is_apart = len(parts) == 3 and parts[1][0] is of.SUBPATTERN
    return (list(parts[1][1][3]) if is_apart else []) or parts


def _plain(parts: list[Part]) -> tuple[bool, str] | None:
    """An expression that is a name, with `ANY` for a dot that may be any character, and whether `^` says that it is the
    whole one; None for all others.
    """
    is_whole = parts[0][0] is of.AT and parts[0][1] in _STARTS
    is_ended = parts[-1][0] is of.AT and parts[-1][1] in _ENDS
    name = parts[is_whole : len(parts) - is_ended]
    if not all(kind is of.ANY or (kind is of.LITERAL and chr(about) != ANY) for kind, about in name):
        return None
    return is_whole, "".join(ANY if kind is of.ANY else chr(about) for kind, about in name)


def _literals(parts: Iterable[Part]) -> list[str]:
    """The texts that stand in an expression, outside of groups and repetitions."""
    runs = itertools.groupby(parts, key=lambda part: part[0])
    return ["".join(chr(about) for _, about in run) for kind, run in runs if kind is of.LITERAL]


def _anchors(kind: Any, text: str) -> int:
    """Where in a text an anchor is, as bits."""
    if kind in _BOUNDS:
        words = _places(_WORD, text)
        bounds = words ^ words << 1
        return bounds if kind is of.AT_BOUNDARY else ~bounds
    return 1 if kind in _STARTS else 1 << len(text)


def _frozen(about: Any) -> Any:
    return tuple(about) if isinstance(about, list) else about


@functools.lru_cache(maxsize=4096)
def _places(part: Part, text: str) -> int:
    """Where in a text a part is that stands for one character, as bits."""
    return sum(1 << at for at, letter in enumerate(text) if _is_in(part, letter))


def _is_in(part: Part, letter: str) -> bool:
    """Whether a part that stands for one character, or one of a set, may be this one."""
    kind, about = part
    if kind is of.IN:
        negated = about[0][0] is of.NEGATE
        return any(_is_in(one, letter) for one in about[negated:]) != negated
    if kind is of.LITERAL:
        return ord(letter) == about
    if kind is of.NOT_LITERAL:
        return ord(letter) != about
    if kind is of.RANGE:
        return about[0] <= ord(letter) <= about[1]
    return letter != "\n" if kind is of.ANY else bool(_CATEGORIES[about].match(letter))
