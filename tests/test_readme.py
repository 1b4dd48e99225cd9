"""The README says what the code says."""

from pathlib import Path

from model_mappings.registry import support_table

README = Path(__file__).parent.parent / "README.md"


def test_table_of_families_is_the_registrys() -> None:
    """`python -m model_mappings.registry` prints the table anew."""
    assert support_table() in README.read_text()
