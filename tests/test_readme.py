"""The README says what the code says."""

import sys
from pathlib import Path

import pytest
from processes import run

from weightbeam.formats.encodings import table
from weightbeam.model_mappings import registry

ROOT = Path(__file__).parent.parent
FILES = {
    registry.support_table: "README.md",
    registry.models_table: "docs/reference/families.md",
    table.support_table: "README.md",
    table.refused: "README.md",
}


@pytest.mark.parametrize("made", FILES, ids=lambda made: f"{made.__module__}.{made.__name__}")
def test_what_is_supported_is_what_the_code_says(made) -> None:
    """`python -m weightbeam.model_mappings.registry` and `python -m weightbeam.formats.encodings.table` print the
    tables anew.
    """
    assert made() in (ROOT / FILES[made]).read_text()


def test_every_format_says_who_publishes_it() -> None:
    assert [entry.name for entry in table.FORMATS if not entry.releases] == []


def test_the_demo_says_that_all_is_well(tmp_path: Path) -> None:
    """On its last line; its first is its own, and not a library's warning."""
    ran = run(sys.executable, "-m", "examples.demo", tmp_path / "demo", cwd=ROOT)
    lines = ran.stdout.splitlines()
    assert (ran.returncode, lines[0][:9], lines[-1][:12]) == (0, "1. wrote ", "All is well."), ran.stderr
    assert "WARNING" not in ran.stderr
    assert "model_name=" in ran.stdout
