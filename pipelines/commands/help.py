"""`weightbeam help`: what a command takes, and the manual's pages, which are installed with the package."""

from __future__ import annotations

import argparse
import importlib.resources
import os
import pydoc
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import ClassVar

from weightbeam.model_mappings.meant import did_you_mean
from weightbeam.pipelines.terminal.arguments.parser import commands_of, make_parser
from weightbeam.pipelines.terminal.errors import Refused
from weightbeam.pipelines.terminal.tables import Table, show, terminal_width

PAGE = re.compile(r"\[([^\]]+)\]\((?:\.\./)?(?:[a-z]+/)?([a-z_]+)\.md(?:#[^)]*)?\)")  # a link to another page
ELSEWHERE = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:)[^)]*\)")  # a link to a file of the repository, or a heading
WIDEST = 100  # columns of a page that is drawn; longer lines are hard to read


def topics() -> dict[str, str]:
    """Every page of the manual but for its list, by its name; they lie in the manual's folder and in those below it."""
    manual = importlib.resources.files("weightbeam") / "docs"
    places = [manual, *(place for place in manual.iterdir() if place.is_dir())]
    pages = {page.name: page for place in places for page in place.iterdir() if page.name.endswith(".md")}
    names = sorted(pages.keys() - {"index.md"})
    return {name.removesuffix(".md"): pages[name].read_text(encoding="utf-8") for name in names}


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints what a command takes, a page, or which there are."""
    pages, commands = topics(), commands_of(make_parser())
    if not args.topic:
        table = Table("page", "what it says")
        for name, text in pages.items():
            table.add_row(name, _summary(text))
        show([table, "", "weightbeam help PAGE prints it; weightbeam help COMMAND says what a command takes."])
        return 0
    if args.topic not in pages and args.topic not in commands:
        known = [*pages, *commands]
        raise Refused(f"no page {args.topic!r}{did_you_mean(args.topic, known)}; weightbeam help lists them")
    texts = [commands[args.topic].format_help()] if args.topic in commands else []
    if args.topic in pages:
        page = ELSEWHERE.sub(r"\1", PAGE.sub(_command, pages[args.topic]))
        texts.append(_drawn(page) if sys.stdout.isatty() else page)
    _print("\n".join(texts))
    return 0


def _command(link: re.Match[str]) -> str:
    """The command that prints the page to which a link leads, instead of it."""
    command = f"`weightbeam help {link[2]}`"
    return command if link[1].strip("`") == f"{link[2]}.md" else f"{link[1]} ({command})"


def _summary(page: str) -> str:
    """The first sentence of a page, below its heading."""
    first = " ".join(page.split("\n\n")[1].split())
    sentence = re.split(r"[.:] ", ELSEWHERE.sub(r"\1", first).replace("**In short.** ", ""))[0]
    return re.sub(r"[`*]", "", sentence).rstrip(".")


def _drawn(page: str) -> str:
    """A page as a terminal shows it. Code is never broken, so that it can be copied."""
    from rich.console import Console, ConsoleOptions
    from rich.markdown import CodeBlock, Markdown
    from rich.text import Text
    from rich.theme import Theme

    class Code(CodeBlock):
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
            yield Text(textwrap.indent(str(self.text).rstrip(), "    "), "cyan", no_wrap=True, overflow="ignore")

    class Page(Markdown):
        elements: ClassVar = Markdown.elements | {"fence": Code, "code_block": Code}

    console = Console(width=min(terminal_width(), WIDEST), theme=Theme({"markdown.code": "cyan"}))
    with console.capture() as drawn:
        console.print(Page(page, hyperlinks=False), crop=False)
    return "\n".join(line.rstrip() for line in drawn.get().splitlines())


def _print(text: str) -> None:
    """Prints a text: through the user's pager where it is longer than the terminal."""
    pager = shlex.split(os.environ.get("MANPAGER") or os.environ.get("PAGER") or "less")
    is_there = bool(pager) and shutil.which(pager[0]) is not None
    if sys.stdout.isatty() and is_there and text.count("\n") >= shutil.get_terminal_size().lines:
        os.environ.setdefault("LESS", "FRX")  # as git does it: colours, and what was read stays on the screen
        pydoc.pager(text)
    else:
        print(text)
