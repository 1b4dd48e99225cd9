"""The site's pages, as far as they are made without Sphinx; `make docs` builds it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from deploy import notebooks
from deploy.site import __main__ as site
from deploy.site import code, pages
from weightbeam.pipelines.terminal.arguments.commands import COMMANDS

ROOT = Path(__file__).parents[2]


def test_every_page_is_listed_once() -> None:
    """In `docs/index.md`, from which the contents are made."""
    listed = re.findall(r"\]\(([^)#\s]+\.(?:md|ipynb))\)", (ROOT / "docs" / "index.md").read_text())
    wanted = {
        path.relative_to(ROOT / "docs").as_posix()
        for kind in ("md", "ipynb")
        for path in (ROOT / "docs").rglob(f"*.{kind}")
    }
    wanted |= {f"../{page}" for page in pages.ELSEWHERE}
    assert sorted(listed) == sorted(wanted - {"index.md"})


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_of_a_command_has_all_its_options(name: str) -> None:
    page = code.command_page(COMMANDS[name])
    assert [each.name for each in COMMANDS[name].all_options() if f"{each.name}`" not in page] == []
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} <= {5}


def test_links_hold_where_a_page_lies_on_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a page its place, to another file its name, or the project's own page where there is one."""
    places = {"docs/howto/a.md": "howto/a.md", "deploy/README.md": "howto/google_cloud.md"}
    text = "[cloud](../../deploy/README.md#x) [file](../../setup.py) [gone](b.md)\n```\n[f](../../setup.py)\n```\n"
    told = "[cloud](google_cloud.md#x) file (`setup.py`) [gone](b.md)\n```\n[f](../../setup.py)\n```\n"
    assert pages.relinked(text, "docs/howto/a.md", places) == told
    monkeypatch.setattr(pages, "home_page", lambda: "https://example.org/w")
    assert "[file](https://example.org/w/blob/main/setup.py)" in pages.relinked(text, "docs/howto/a.md", places)


def test_versions_lie_side_by_side(tmp_path: Path) -> None:
    """The newest is what the folder's own page leads to."""
    (tmp_path / "html").mkdir()
    for version in ("0.9.0", "0.10.0", "0.10.0.dev0"):
        (tmp_path / "html" / "index.html").write_text(version)
        site.publish(tmp_path / "html", tmp_path / "sites", version)
    assert json.loads((tmp_path / "sites" / "versions.json").read_text()) == ["0.10.0", "0.10.0.dev0", "0.9.0"]
    assert 'href="0.10.0/"' in (tmp_path / "sites" / "index.html").read_text()
    assert (tmp_path / "sites" / "0.9.0" / "index.html").read_text() == "0.9.0"


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_stored_as_it_is_written(path: Path) -> None:
    """Without outputs, and with today's way to install in its first cell; `python -m deploy.notebooks` writes that."""
    notebook = json.loads(path.read_text())
    assert path.read_text() == notebooks.written(notebook)
    assert [cell for cell in notebook["cells"] if cell.get("outputs") or cell.get("execution_count")] == []


def test_a_release_installs_itself_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once messages say how: one line is changed for all."""
    assert "raise SystemExit(" in notebooks.first_cell()
    monkeypatch.setattr(notebooks, "install", lambda extra: f"pip install 'it[{extra}]'")
    assert notebooks.first_cell().splitlines()[-2] == f"    %pip install --quiet 'it[{notebooks.EXTRAS}]'"
