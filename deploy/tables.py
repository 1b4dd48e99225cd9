"""The tables of the manual that the code knows: `python -m deploy.tables` writes them anew, below their markers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from deploy import beside_maxtext
from weightbeam.formats.encodings import table
from weightbeam.model_mappings import registry

ROOT = Path(__file__).parents[1]
TABLES: dict[str, tuple[Callable[[], str], str]] = {  # by the name in the marker: what writes it, and the page
    "families": (registry.support_table, "docs/reference/families.md"),
    "branches": (registry.branches_table, "docs/reference/families.md"),
    "formats": (table.support_table, "docs/reference/formats.md"),
    "refused formats": (table.refused, "docs/reference/formats.md"),
    "families beside MaxText": (beside_maxtext.families, "docs/explanation/is_it_right.md"),
    "trained": (beside_maxtext.trained, "docs/reference/measurements.md"),
    "deviations": (beside_maxtext.deviations, "docs/explanation/numerics.md"),
}
MARKER = "<!-- {}: made by `python -m deploy.tables` -->\n"


def page(path: str) -> str:
    """A page with its tables as they are today."""
    text = (ROOT / path).read_text()
    for name, (made, place) in TABLES.items():
        if place == path:
            marker = MARKER.format(name)
            text = re.sub(
                re.escape(marker) + r"(.+\n)+", lambda _, marker=marker, made=made: f"{marker}{made()}\n", text
            )
    return text


def main() -> None:
    """Writes all of them."""
    for path in {place for _, place in TABLES.values()}:
        (ROOT / path).write_text(page(path))


if __name__ == "__main__":
    main()
