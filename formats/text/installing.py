"""What the project says of where it is to be had: how it is installed, and its page."""

from __future__ import annotations

import functools
import importlib.metadata

# In the folder of the repository, as long as there is no package of it on an index: whoever registered the name there
# would be installed. A release changes this line.
INSTALL = "pip install '.[{}]' in Weightbeam's folder"
PAGES = ("homepage", "repository", "source")  # labels of `[project.urls]`, the first that there is


def install(extra: str) -> str:
    """What a message says of the extra that is missing."""
    return INSTALL.format(extra)


@functools.cache
def home_page() -> str:
    """The project's own page, as the package's metadata say it; empty where they name none."""
    try:
        urls = importlib.metadata.metadata("weightbeam").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    pages = {label.strip().lower(): url.strip() for label, _, url in (each.partition(",") for each in urls)}
    return next((pages[label] for label in PAGES if label in pages), "")
