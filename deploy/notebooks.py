"""The first cell of each notebook, which installs Weightbeam where it isn't there, such as in Colab.
`python -m deploy.notebooks` writes it anew: it follows from how Weightbeam is installed, which a release changes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from weightbeam.formats.text.installing import install

FOLDER = Path(__file__).parents[1] / "docs" / "tutorials"
EXTRAS = "demo,models,follow"


def first_cell() -> str:
    """Installs the release where there is one; else says where to install from."""
    if found := re.fullmatch(r"pip install (\S+)", line := install(EXTRAS)):
        how = f"    %pip install --quiet {found[1]}"
    else:
        how = f"    raise SystemExit({line!r})"
    return f'import importlib.util\n\nif importlib.util.find_spec("weightbeam") is None:\n{how}\n'


def first_cell_of(notebook: dict) -> dict:
    """The first cell of code."""
    return next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")


def written(notebook: dict) -> str:
    """A notebook as it is stored: without outputs, the first cell as it is today."""
    first_cell_of(notebook)["source"] = first_cell().rstrip().splitlines(keepends=True)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Writes all of them."""
    for path in FOLDER.glob("*.ipynb"):
        path.write_text(written(json.loads(path.read_text())))


if __name__ == "__main__":
    main()
