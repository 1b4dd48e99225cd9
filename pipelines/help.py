"""`weightbeam help`: the manual's pages, which are installed with the package."""

from __future__ import annotations

import argparse
import importlib.resources
from collections.abc import Sequence

from weightbeam.pipelines.arguments.values import did_you_mean
from weightbeam.pipelines.errors import Refused


def topics() -> dict[str, str]:
    """Every page of the manual, by its name."""
    pages = (importlib.resources.files("weightbeam") / "docs").iterdir()
    return {
        page.name.removesuffix(".md"): page.read_text(encoding="utf-8")
        for page in sorted(pages, key=lambda page: page.name)
        if page.name.endswith(".md")
    }


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints a page, or which there are."""
    pages = topics()
    if not args.topic:
        for name, text in pages.items():
            print(f"{name:20} {text.partition(chr(10))[0].removeprefix('# ')}")
        return 0
    if args.topic not in pages:
        raise Refused(f"no page {args.topic!r}{did_you_mean(args.topic, pages)}; weightbeam help lists them")
    print(pages[args.topic])
    return 0
