"""The first cell of each notebook, which installs Weightbeam where it isn't there, such as in Colab, and goes to a folder
of its own, so that the notebook can be run again, and after another one.
`python -m deploy.notebooks` writes it anew: it follows from how Weightbeam is installed, which a release changes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from weightbeam.formats.text.installing import install

FOLDER = Path(__file__).parents[1] / "docs" / "tutorials"
EXTRAS = "demo,models,follow"
CELL = """import importlib.util
import os
import tempfile

if importlib.util.find_spec("weightbeam") is None:
{how}
os.chdir(tempfile.mkdtemp())
"""


def first_cell() -> str:
    """Installs the release where there is one, else says where to install from; goes to a new folder."""
    if found := re.fullmatch(r"pip install (\S+)", line := install(EXTRAS)):
        how = f"    %pip install --quiet {found[1]}"
    else:
        how = f"    raise SystemExit({line!r})"
    return CELL.format(how=how)


def written(notebook: dict) -> str:
    """A notebook as it is stored: without outputs, the first cell as it is today."""
    code = next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    code["source"] = first_cell().rstrip().splitlines(keepends=True)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Writes all of them."""
    for path in FOLDER.glob("*.ipynb"):
        path.write_text(written(json.loads(path.read_text())))


if __name__ == "__main__":
    main()
