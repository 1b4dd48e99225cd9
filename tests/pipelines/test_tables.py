"""What identifies the tables: what they say, not how it is written."""

from __future__ import annotations

import pytest

from weightbeam.pipelines.watching import tables

TABLE = b'''"""A family."""
from weightbeam import rules

SCALE = 0.5  # of the query

def stacks(c: int) -> list:
    """The table."""
    return [rules.rule("a", "b", scale=SCALE), f"{c!r:>8}", c if c else None, -1]
'''


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"  # of the query", b""),
        (b"A family.", b"Another text."),
        (b"The table.", b"Another text."),
        (b"c: int", b"c: float"),
        (b"-> list", b""),
        (b'rules.rule("a", "b", scale=SCALE), ', b"rules.rule(\n        'a',\n        'b', scale=SCALE,\n    ), "),
    ],
)
def test_how_it_is_written_settles_nothing(before: bytes, after: bytes) -> None:
    assert before in TABLE
    assert tables.hash_of({"a.py": TABLE}) == tables.hash_of({"a.py": TABLE.replace(before, after)})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"0.5", b"0.25"),
        (b'"a"', b'"c"'),
        (b"!r", b"!s"),
        (b"None", b"0"),
        (b"-1", b"1"),
        (b"0.5", b'"0.5"'),
        (b"scale=", b"other="),
    ],
)
def test_what_it_says_settles(before: bytes, after: bytes) -> None:
    assert before in TABLE
    assert tables.hash_of({"a.py": TABLE}) != tables.hash_of({"a.py": TABLE.replace(before, after)})
    assert tables.hash_of({"a.py": TABLE}) != tables.hash_of({"b.py": TABLE})
