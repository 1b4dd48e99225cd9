"""What identifies the tables: what they say, not how it is written; and what was published by versions before stays so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from weightbeam.formats.storage import open_store
from weightbeam.pipelines.watching import tables
from weightbeam.pipelines.watching.config import TargetConfig
from weightbeam.pipelines.watching.records import PUBLISHED, History, history_of, key_of
from weightbeam.transforms.planning.options import ConvertOptions

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


def test_what_was_published_stays_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that a version before published, which knew its tables by their text, isn't begun anew while they say the
    same; once they say something else, it is.
    """
    output, target = open_store(str(tmp_path)), TargetConfig("any", {}, ConvertOptions())
    version = SimpleNamespace(name="acme/model", weights="weights", commit="c" * 40)
    before = History(output, version.name, key_of(version.name, version.weights, target, "text"))
    about = dict(weights="weights", updated="2026-01-01T00:00:00+00:00", commit=version.commit, target="any")
    before.add(PUBLISHED, **about, plan="p", checkpoint="out/any-1")
    monkeypatch.setattr(tables, "FORMER", {"text": tables.tables()})
    found = history_of(output, version, target)  # type: ignore[arg-type]
    assert (found.key, found.state) == (before.key, PUBLISHED)
    monkeypatch.setattr(tables, "FORMER", {"text": "other"})
    assert history_of(output, version, target).state is None  # type: ignore[arg-type]
