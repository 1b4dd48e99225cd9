"""The README says what the code says."""

from pathlib import Path

import pytest

from weightbeam.formats.encodings import table
from weightbeam.model_mappings import registry

ROOT = Path(__file__).parent.parent
FILES = {
    registry.support_table: "README.md",
    registry.models_table: "docs/families.md",
    table.support_table: "README.md",
    table.refused: "README.md",
}


@pytest.mark.parametrize("made", FILES, ids=lambda made: f"{made.__module__}.{made.__name__}")
def test_what_is_supported_is_what_the_code_says(made) -> None:
    """`python -m weightbeam.model_mappings.registry` and `python -m weightbeam.formats.encodings.table` print the tables anew."""
    assert made() in (ROOT / FILES[made]).read_text()


def test_every_format_says_who_publishes_it() -> None:
    assert [entry.name for entry in table.FORMATS if not entry.releases] == []
