"""Tables and texts for people: fitted to a terminal's width, a line a row in a pipe, HTML in a notebook."""

from __future__ import annotations

import copy
import html
import itertools
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence

from weightbeam.formats.text.printable import printable
from weightbeam.model_mappings.values import preformatted

GAP = 2  # blanks between columns
ROWS = 2000  # of a table
CELL = 300  # characters of a cell: names are the files', however long
SAID = 3000  # the same of what is said of something
NARROWEST = 40  # columns of a terminal
BOLD, PLAIN = "\x1b[1m", "\x1b[0m"


def count(n: int, noun: str) -> str:
    """`1 problem`, `2 problems`."""
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def duration(seconds: float) -> str:
    """Seconds for people: `9.5 min`, `1 h 05 min`."""
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{seconds / 60:.1f} min"


def human(nbytes: float) -> str:
    """Bytes for people: 1.5 GB."""
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def pace(size: int, written: int, seconds: float) -> str:
    """Bytes of the whole, and what was written of them in how long: `2.06 GB in 2.0 s (1.03 GB/s)`, or
    `2.06 GB; 198 MB written in 2.0 s (99 MB/s)` where the rest was there.

    Args:
      size: bytes of the whole.
      written: bytes that this process wrote; 0 where others did.
      seconds: that it took.
    """
    rate = f" ({human(written / seconds)}/s)" if written and seconds else ""
    rest = f"; {human(written)} written" if 0 < written < size else ""
    return f"{human(size)}{rest} in {seconds:.1f} s{rate}"


def shape_text(shape: Iterable[int]) -> str:
    """`4096 × 32 × 128`."""
    return " × ".join(map(str, shape)) or "scalar"


class Table:
    """Rows of texts below their headings.

    A name is never broken. Where a table is too wide for its terminal, what neighbouring names in the first column have
    in common becomes a line above them, as much as it takes where no row gets a line of its own by that; else the columns
    in `spare` are left out, one after the other, and named below; then the last column is wrapped. A cell of it with a
    word, such as a path, that is longer than the column has lines of its own below its row.

    Args:
      headings: of the columns; one that begins with `>` is aligned right. All empty: no line of headings.
      spare: headings of columns that may be left out, the first first.
    """

    def __init__(self, *headings: str, spare: Sequence[str] = ()):
        self.headings = tuple(heading.removeprefix(">") for heading in headings)
        self._right = [heading.startswith(">") for heading in headings]
        self._spare = [self.headings.index(heading) for heading in spare]
        self.rows: list[tuple[str, ...]] = []

    @classmethod
    def of(cls, rows: Iterable[tuple[str, str]]) -> Table:
        """A table of names, and what is said of each."""
        table = cls("", "")
        for row in rows:
            table.add_row(*row, most=SAID)
        return table

    def add_row(self, *cells: str, most: int = CELL) -> None:
        """Adds a row, whose cells have `most` characters. They may hold strangers' texts, and there may be as many rows as
        there are names.
        """
        assert len(cells) == len(self.headings)
        if len(self.rows) < ROWS:
            self.rows.append(tuple(printable(cell, most) for cell in cells))
        elif len(self.rows) == ROWS:
            self.rows.append((f"… and more than {ROWS:,} others", *("" for _ in cells[1:])))

    def worded(self, word: Callable[[str], str]) -> Table:
        """A copy of the table, with `word` applied to each cell of its rows; the headings stay."""
        same = copy.copy(self)
        same.rows = [tuple(map(word, row)) for row in self.rows]
        return same

    def lines(self, width: int | None = None, bold: bool = False) -> Iterator[str]:
        """The table as text: at most `width` columns wide where that can be done; without a width a line a row."""
        width = sys.maxsize if width is None else width
        headed = [self.headings] if any(self.headings) else []
        rows: list[tuple[str, ...] | str] = list(self.rows)
        columns = list(range(len(self.headings)))
        for column in (*self._spare, None):
            if self._width(rows, columns) <= width:
                break
            rows = list(_gather(self.rows))
            if self._width(rows, columns) > width:
                shortened = list(_shorten(self.rows, width - self._width(self.rows, columns[1:]) - GAP))
                if column is None or _lonely(shortened) <= 1:  # such as the one variable beside the parameters
                    rows = shortened
            if column is not None and self._width(rows, columns) > width:
                columns.remove(column)
        widths = self._widths(rows, columns)
        for row in [*headed, *rows]:
            yield from (
                [row] if isinstance(row, str) else self._row(row, widths, columns, width, bold and row is self.headings)
            )
        if left := [heading for column, heading in enumerate(self.headings) if column not in columns]:
            yield from _wrap(f"(no room for {', '.join(left)}: a wider terminal, or a pipe, shows more)", width)

    def html(self) -> str:
        """The table for a notebook."""
        aligned = [' style="text-align:right"' if right else "" for right in self._right]

        def row(cells: Sequence[str], tag: str) -> str:
            styled = zip(cells, aligned, strict=True)
            return f"<tr>{''.join(f'<{tag}{style}>{html.escape(cell)}</{tag}>' for cell, style in styled)}</tr>"

        head = row(self.headings, "th") if any(self.headings) else ""
        return f"<table>{head}{''.join(row(cells, 'td') for cells in self.rows)}</table>"

    def _widths(self, rows: Iterable[tuple[str, ...] | str], columns: Sequence[int]) -> list[int]:
        cells = [self.headings, *(row for row in rows if not isinstance(row, str))]
        return [max(len(row[column]) for row in cells) for column in columns]

    def _width(self, rows: Iterable[tuple[str, ...] | str], columns: Sequence[int]) -> int:
        return sum(self._widths(rows, columns)) + GAP * (len(columns) - 1)

    def _row(
        self, row: tuple[str, ...], widths: Sequence[int], columns: Sequence[int], width: int, bold: bool
    ) -> Iterator[str]:
        room = max(width - sum(widths[:-1]) - GAP * (len(columns) - 1), NARROWEST // 2)
        *first, last = columns
        cells = [row[c].rjust(w) if self._right[c] else row[c].ljust(w) for c, w in zip(first, widths, strict=False)]
        before = (" " * GAP).join([*cells, ""]) if cells else ""
        if self._right[last]:
            lines = [before + row[last].rjust(min(widths[-1], room))]
        elif before and max(map(len, row[last].split(" "))) > room:
            lines = [before, *(" " * 2 * GAP + part for part in _wrap(row[last], width - 2 * GAP))]
        else:
            first_part, *parts = _wrap(row[last], room)
            lines = [before + first_part, *(" " * len(before) + part for part in parts)]
        for line in lines:
            yield f"{BOLD}{line.rstrip()}{PLAIN}" if bold else line.rstrip()


Block = Table | str  # what is shown below one another


def _wrap(text: str, width: int) -> list[str]:
    """Lines of whole words; a word that is longer has a line of its own."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def _gather(rows: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...] | str]:
    """Rows below lines with what their names have in common: all names with a dot, then neighbours that begin alike.

    Alike is two words beyond those that all names with a dot share.
    """
    shared = _common([words for name, *_ in rows if (words := name.split(".")[:-1])])
    head = f"{shared}." if shared else ""
    inside = False
    for start, stop, common in _runs(rows, 2 + len(shared.split(".")) if shared else 2):
        was_inside, inside = inside, bool(head) and rows[start][0].startswith(head)
        indent, above = (" ", head) if inside else ("", "")
        if inside and not was_inside:
            yield head
        if common:
            yield f"{indent}{common.removeprefix(above)}."
        for name, *rest in rows[start:stop]:
            yield (f"{indent}  {name[len(common) + 1 :]}" if common else f"{indent}{name.removeprefix(above)}", *rest)


def _lonely(rows: Sequence[tuple[str, ...] | str]) -> int:
    """How many lines have a single row below them."""
    below = [list(group) for is_head, group in itertools.groupby(rows, lambda row: isinstance(row, str)) if not is_head]
    return sum(len(group) == 1 and group[0][0].startswith(" ") for group in below)


def _shorten(rows: Sequence[tuple[str, ...]], room: int) -> Iterator[tuple[str, ...] | str]:
    """Rows below lines with what their names have in common, as many below each as leave no more than `room` letters of
    a name, where that can be done.
    """
    start = 0
    while start < len(rows):
        name = rows[start][0]
        shared, longest, stop = name.rpartition(".")[0], len(name), start + 1
        for name, *_ in rows[stop:]:
            both = _common([shared.split("."), name.split(".")[:-1]])
            most = max(longest, len(name))
            if most > room and not (both and 1 + most - len(both) <= room):
                break
            shared, longest, stop = both, most, stop + 1
        head = f"{shared}." if shared and longest > room else ""
        if head:
            yield head
        yield from ((f"  {name.removeprefix(head)}" if head else name, *rest) for name, *rest in rows[start:stop])
        start = stop


def _runs(rows: Sequence[tuple[str, ...]], depth: int) -> Iterator[tuple[int, int, str]]:
    """Neighbouring rows whose names have their first `depth` words in common: from where to where, and all that they
    have in common; nothing where a row stands alone.
    """
    start = 0
    while start < len(rows):
        words = rows[start][0].split(".")
        stop = start + 1
        while stop < len(rows) and len(words) > depth and rows[stop][0].split(".")[:depth] == words[:depth]:
            stop += 1
        yield start, stop, _common([row[0].split(".")[:-1] for row in rows[start:stop]]) if stop - start > 1 else ""
        start = stop


def _common(names: Sequence[list[str]]) -> str:
    """The words that all names begin with."""
    words = itertools.takewhile(lambda same: len(set(same)) == 1, zip(*names, strict=False))
    return ".".join(same[0] for same in words)


def text(blocks: Iterable[Block], width: int | None) -> str:
    """Blocks below one another; see `Table.lines`."""
    return "\n".join(_lines(blocks, width))


def page(blocks: Iterable[Block]) -> str:
    """Blocks below one another, for a notebook: neighbouring lines keep their breaks and blanks."""
    parts = []
    for is_table, same in itertools.groupby(blocks, key=lambda block: isinstance(block, Table)):
        if is_table:
            parts += [block.html() for block in same if isinstance(block, Table)]
        elif text := "\n".join(block for block in same if isinstance(block, str)).strip("\n"):
            parts.append(preformatted(text))
    return "".join(parts)


def terminal_width() -> int:
    """Columns of the terminal, 80 where there is none."""
    return max(shutil.get_terminal_size().columns, NARROWEST)


def show(blocks: Iterable[Block]) -> None:
    """Prints blocks: fitted to the terminal, or plain."""
    is_terminal = sys.stdout.isatty()
    bold = is_terminal and os.environ.get("TERM") != "dumb"
    print("\n".join(_lines(blocks, terminal_width() if is_terminal else None, bold)))


def _lines(blocks: Iterable[Block], width: int | None, bold: bool = False) -> Iterator[str]:
    for block in blocks:
        yield from block.lines(width, bold) if isinstance(block, Table) else [printable(block, lines=True)]
