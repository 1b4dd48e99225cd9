"""No sentence installs what isn't there: the name on the package index is free for whoever registers it."""

from __future__ import annotations

import email.message
import importlib.metadata
import re
from pathlib import Path

import pytest

from weightbeam.formats.release.card import WRITTEN, written_by
from weightbeam.formats.text import installing

ROOT = Path(__file__).parents[2]
PRODUCT = ("formats", "model_mappings", "pipelines", "transforms", "weightbeam")
# an install by the name, with an extra or without, quoted or not; and the page that the name would have
WRONG = re.compile(
    r"(pip3? install|pipx install|uv tool install|uv pip install|uvx)(?: -\S+)* +['\"]?weightbeam\b|pypi\.org/(project|simple)/weightbeam"
)


def texts() -> list[Path]:
    """What a user reads: the program's own messages, and every page but for the history."""
    code = [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")]
    pages = [
        *ROOT.glob("*.md"),
        *(path for place in ("docs", "deploy", "examples") for path in (ROOT / place).rglob("*.md")),
    ]
    return [path for path in (*code, *pages) if path.name != "CHANGELOG.md"]


def test_nothing_is_installed_by_a_name_that_is_free() -> None:
    assert len(texts()) > 100
    assert {
        str(path.relative_to(ROOT)): found[0] for path in texts() if (found := WRONG.search(path.read_text()))
    } == {}


@pytest.mark.parametrize(
    "text", ["pip install 'weightbeam[gcp]'", "uv tool install weightbeam", "https://pypi.org/project/weightbeam/"]
)
def test_what_is_looked_for(text: str) -> None:
    assert WRONG.search(text)


def test_messages_have_one_source() -> None:
    """A release changes one line."""
    product = [path for path in texts() if path.suffix == ".py"]
    assert [path.name for path in product if "pip install" in path.read_text()] == ["installing.py"]
    assert installing.install("gcp") == "pip install '.[gcp]' in Weightbeam's folder"


@pytest.mark.parametrize(
    ("urls", "wanted"),
    [
        ([], "Written by Weightbeam."),
        (["What moves them (Apache Beam), https://beam.apache.org"], "Written by Weightbeam."),
        (["Homepage, https://example.org/w"], "Written by [Weightbeam](https://example.org/w)."),
        (
            ["Source, https://example.org/s", "Repository, https://example.org/r"],
            "Written by [Weightbeam](https://example.org/r).",
        ),
    ],
)
def test_a_card_links_to_the_page_that_there_is(urls: list[str], wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = email.message.Message()
    for url in urls:
        said["Project-URL"] = url
    monkeypatch.setattr(importlib.metadata, "metadata", lambda _: said)
    installing.home_page.cache_clear()
    try:
        assert written_by() == wanted
        assert WRITTEN.search(written_by())
    finally:
        installing.home_page.cache_clear()


def test_an_older_card_is_known() -> None:
    assert WRITTEN.search("Written by [Weightbeam](https://pypi.org/project/weightbeam/).")
