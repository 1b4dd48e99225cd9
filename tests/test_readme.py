"""The README and the tables of the manual say what the code says."""

import math
import sys
from pathlib import Path

import pytest
from processes import run

from deploy import picture, tables
from weightbeam.formats.encodings import table

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("path", sorted({place for _, place in tables.TABLES.values()}))
def test_what_is_supported_is_what_the_code_says(path: str) -> None:
    """`python -m deploy.tables` writes the tables anew."""
    assert (ROOT / path).read_text() == tables.page(path)
    missing = [
        name for name, (made, place) in tables.TABLES.items() if place == path and made() not in tables.page(path)
    ]
    assert missing == []


def test_the_readme_has_five_screens() -> None:
    """Of 80 columns and 40 lines."""
    lines = (ROOT / "README.md").read_text().splitlines()
    assert sum(max(1, math.ceil(len(line) / 80)) for line in lines) <= 5 * 40


def test_the_picture_is_of_a_plan_of_today() -> None:
    """`python -m deploy.picture` draws it anew."""
    assert picture.FILE.read_text() == picture.main()


def test_every_format_says_who_publishes_it() -> None:
    assert [entry.name for entry in table.FORMATS if not entry.releases] == []


def test_the_demo_says_that_all_is_well(tmp_path: Path) -> None:
    """On its last line; its first is its own, and not a library's warning."""
    ran = run(sys.executable, "-m", "examples.demo", tmp_path / "demo", cwd=ROOT)
    lines = ran.stdout.splitlines()
    assert (ran.returncode, lines[0][:9], lines[-1][:12]) == (0, "1. wrote ", "All is well."), ran.stderr
    assert "WARNING" not in ran.stderr
    assert "model_name=" in ran.stdout
