"""The pages of the site, put together in one folder: those of the repository, and those that the code writes."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from deploy.site import code
from weightbeam.formats.text.installing import home_page

ROOT = Path(__file__).parents[2]
MANUAL = ROOT / "docs"
INDEX = "index.md"
PAGES = (".md", ".ipynb", ".png", ".svg")
ELSEWHERE = {  # a page that lies beside what it describes -> its place on the site
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "deploy/README.md": "howto/google_cloud.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:)([^)\s#]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
CAPTION, ENTRY = re.compile(r"^## (.+)$", re.MULTILINE), re.compile(r"\]\(([^)#\s]+)\.(?:md|ipynb)\)")


def write_pages(source: Path) -> None:
    """Writes what Sphinx reads.

    Args:
      source: the folder, which isn't there yet.
    """
    places = {f"docs/{name}": name for name in sorted(_manual())} | ELSEWHERE
    for path, place in places.items():
        (source / place).parent.mkdir(parents=True, exist_ok=True)
        if place.endswith(".md"):
            (source / place).write_text(relinked((ROOT / path).read_text(), path, places))
        else:
            shutil.copyfile(ROOT / path, source / place)
    made = code.pages()
    for place, text in made.items():
        (source / place).parent.mkdir(parents=True, exist_ok=True)
        (source / place).write_text(text)
    index = source / INDEX
    index.write_text(index.read_text() + "".join(contents(index.read_text())))


def _manual() -> Iterator[str]:
    """The files of the manual."""
    for path in MANUAL.rglob("*"):
        if path.suffix in PAGES and not any(part.startswith(".") for part in path.parts):
            yield path.relative_to(MANUAL).as_posix()


def relinked(text: str, path: str, places: dict[str, str]) -> str:
    """A page whose links hold where it lies on the site.

    A link to a file of the repository that isn't a page becomes one to the project's own page, or the file's name where
    there is none yet.
    """

    def replaced(found: re.Match[str]) -> str:
        picture, words, target, anchor = found.groups(default="")
        file = os.path.normpath(os.path.join(os.path.dirname(path), target))
        if file in places:
            target = os.path.relpath(places[file], os.path.dirname(places[path]) or ".")
        elif (ROOT / file).exists():
            if not home_page():
                return words if words.strip("`") == file else f"{words} (`{file}`)"
            target = f"{home_page()}/blob/main/{file}"
        return f"{picture}[{words}]({target}{anchor})"

    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(replaced, part) for part in parts)


def contents(index: str) -> Iterator[str]:
    """The site's contents: below each heading of the first page the pages that it names, and those that code writes."""
    _, *sections = CAPTION.split(index)
    for caption, text in zip(sections[::2], sections[1::2], strict=True):
        entries = [*ENTRY.findall(text), *code.ENTRIES.get(caption, ())]
        listed = "\n".join(dict.fromkeys(entries))
        yield f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listed}\n```\n"
