"""A release: `python -m deploy.release address URL`, `version 1.2.3`, `check v1.2.3 [URL]`, `notes v1.2.3`.

The version is one constant, `weightbeam.__version__`, that the tag must agree with. It isn't taken from git: Dataflow's workers, the
image and Beam's `--setup_file` build from folders that have no `.git`.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
NUMBER = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)((a|b|rc)\d+)?")
UNRELEASED = "## [Unreleased]\n"
ADDRESS = re.compile(r"https://[\w.:-]+/(?!OWNER/)[\w.-]+(/[\w.-]+)+/?")
PAGES = {  # labels of `[project.urls]`, and what follows the project's address
    "Homepage": "",
    "Repository": "",
    "Documentation": "/tree/main/docs",
    "Changelog": "/blob/main/CHANGELOG.md",
    "Issues": "/issues",
}
INSTALL = "INSTALL = \"pip install 'weightbeam[{}]'\""


def version(root: Path) -> str:
    """The package's."""
    return VERSION.findall((root / "weightbeam" / "__init__.py").read_text())[0]


def notes(root: Path, number: str) -> str:
    """What CHANGELOG.md says of a version; empty where it has none."""
    text = (root / "CHANGELOG.md").read_text()
    found = re.search(
        rf"^## \[{re.escape(number)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## \[|\Z)", text, re.MULTILINE | re.DOTALL
    )
    return found[1].strip() + "\n" if found else ""


def problems(root: Path, tag: str, address: str | None = None) -> list[str]:
    """Everything that stands against the release of a tag, from a repository at this address."""
    number = tag.removeprefix("v")
    found = []
    if not tag.startswith("v") or not NUMBER.fullmatch(number):
        found.append(f"tag {tag}: should be v1.2.3, or v1.2.3rc1")
    if version(root) != number:
        found.append(f"weightbeam/__init__.py: version {version(root)}, the tag says {number}")
    if not notes(root, number).strip():
        found.append(f"CHANGELOG.md: has no [{number}] with a date, or nothing in it")
    urls = tomllib.loads((root / "pyproject.toml").read_text())["project"]["urls"]
    if missing := PAGES.keys() - urls.keys():
        found.append(
            f"pyproject.toml: [project.urls] has no {', '.join(sorted(missing))}; python -m deploy.release address URL"
        )
    elif address and urls["Repository"] != address:
        found.append(f"pyproject.toml: the repository is {urls['Repository']}, this one is {address}")
    if INSTALL not in (root / "formats" / "text" / "installing.py").read_text():
        found.append("formats/text/installing.py: messages install from a folder; python -m deploy.release address URL")
    cited = (root / "CITATION.cff").read_text()
    if f"\nversion: {number}\n" not in cited:
        found.append(f"CITATION.cff: has no version {number}")
    return found


def put(path: Path, pattern: str, text: str) -> None:
    """Replaces what a pattern finds in a file, just once."""
    changed, count = re.subn(pattern, lambda _: text, path.read_text(), flags=re.MULTILINE)
    if count != 1:
        raise SystemExit(f"{path}: {pattern!r} stands there {count} times, not once")
    path.write_text(changed)


def set_address(root: Path, address: str) -> None:
    """Says where the project is, in each place that has to: from then on cards link to it, and messages install from the
    package index.
    """
    pages = "".join(f'{label} = "{address}{rest}"\n' for label, rest in PAGES.items())
    put(
        root / "pyproject.toml",
        r"^\[project\.urls\].*\n(?:(?:Homepage|Repository|Documentation|Changelog|Issues) = .*\n)*",
        f"[project.urls]\n{pages}",
    )
    put(root / "CITATION.cff", r"(?:^repository-code: .*\n)?^keywords:", f"repository-code: {address}\nkeywords:")
    put(root / "formats" / "text" / "installing.py", r"^INSTALL = .*$", INSTALL)


def set_version(root: Path, number: str, day: datetime.date) -> None:
    """Makes a version of what is unreleased.

    Raises:
      SystemExit: that is no version, or nothing is unreleased.
    """
    if not NUMBER.fullmatch(number):
        raise SystemExit(f"{number}: should be 1.2.3, or 1.2.3rc1")
    put(root / "weightbeam" / "__init__.py", VERSION.pattern, f'__version__ = "{number}"')
    put(root / "CHANGELOG.md", rf"^{re.escape(UNRELEASED)}", f"{UNRELEASED}\n## [{number}] - {day.isoformat()}\n")
    put(
        root / "CITATION.cff",
        r"(?:^version: .*\ndate-released: .*\n)?^license:",
        f"version: {number}\ndate-released: {day.isoformat()}\nlicense:",
    )


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Runs one of the four; 1 where something stands against a release."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("address", "version", "check", "notes"))
    parser.add_argument("value")
    parser.add_argument("address", nargs="?")
    args = parser.parse_args(arguments)
    if args.what == "address":
        if not ADDRESS.fullmatch(args.value):
            parser.error(f"{args.value}: should be https://HOST/OWNER/NAME, of the repository itself")
        set_address(root, args.value.rstrip("/"))
    elif args.what == "version":
        set_version(root, args.value, datetime.datetime.now(datetime.UTC).date())
    elif args.what == "notes":
        print(notes(root, args.value.removeprefix("v")), end="")
    else:
        found = problems(root, args.value, args.address)
        print("\n".join(found) or f"{args.value}: nothing stands against it")
        return 1 if found else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
