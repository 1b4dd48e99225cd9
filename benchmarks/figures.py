"""The benchmarks' results: figures with their limits, the table that shows them, and the file that keeps them.

The file is JSON, a section for each benchmark: {section: {"machine", "figures", "details"}}. A benchmark that is run
again replaces its own section.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import Run, machine

MAX_PEAK_BYTES = 3 << 29  # 1.5 GiB, of a command that moves a checkpoint
UNITS = {
    "s": (1, "{:,.2f} s"),
    "bytes": (1 << 30, "{:.2f} GiB"),
    "MB/s": (1, "{:,.0f} MB/s"),
    "GB/s": (1, "{:.2f} GB/s"),
    "×": (1, "{:.2f} ×"),
}


@dataclasses.dataclass(frozen=True)
class Figure:
    """A line of the table.

    Attributes:
      what, model: what was measured, and on what.
      ours: the value.
      unit: of the value and the limit: a key of `UNITS`, or empty for shares and counts.
      limit: what `ours` may be at most, or has to be at least; None for what is only told.
      because: how the limit comes about, where it isn't fixed.
      at_least: which of the two.
    """

    what: str
    model: str
    ours: float
    unit: str = ""
    limit: float | None = None
    because: str = ""
    at_least: bool = False

    @property
    def ratio(self) -> float | None:
        """`ours` in terms of the limit, or the limit in terms of `ours`; at most 1 if it is met."""
        if self.limit is None:
            return None
        return self.limit / self.ours if self.at_least else self.ours / self.limit

    @property
    def met(self) -> bool | None:
        return None if self.ratio is None else self.ratio <= 1

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "ratio": self.ratio, "met": self.met}

    def cells(self) -> list[str]:
        """The line: what, model, limit, ours, ratio, met."""
        limit = ""
        if self.limit is not None:
            because = f" = {self.because}" if self.because else ""
            limit = f"{'≥' if self.at_least else '≤'} {text(self.limit, self.unit)}{because}"
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        return [
            self.what,
            self.model,
            limit,
            text(self.ours, self.unit),
            ratio,
            {None: "", True: "met", False: "[bold red]NOT MET[/]"}[self.met],
        ]


def text(value: float, unit: str) -> str:
    """A value as people read it."""
    if unit:
        size, form = UNITS[unit]
        return form.format(value / size)
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if value < 0.1 else f"{value:.3f}"


def of_runs(
    what: str, model: str, runs: Sequence[Run], watched: Run, *limit: Any, most_bytes: int | None = MAX_PEAK_BYTES
) -> list[Figure]:
    """Seconds, processor and memory of a command: the medians of its runs, and the peak of one that was watched.

    Args:
      what, model: which command, and on what.
      runs, watched: of it.
      limit: of the seconds, and how it comes about.
      most_bytes: the limit of the memory.
    """
    return [
        Figure(what, model, statistics.median(one.seconds for one in runs), "s", *limit),
        Figure(f"{what}, CPU", model, statistics.median(one.cpu_seconds for one in runs), "s"),
        Figure(f"{what}, peak memory", model, watched.peak_bytes, "bytes", most_bytes),
    ]


def make_parser(
    doc: str | None, folder: str | None = "out/bench", layers: int | None = 8, rounds: int | None = 5
) -> argparse.ArgumentParser:
    """The options that benchmarks share, with their defaults; without those whose default is None."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if folder:
        parser.add_argument("--folder", type=Path, default=folder, help="where checkpoints and copies go; on one disk")
    if layers:
        parser.add_argument("--layers", type=int, default=layers, help="of each model; 8 make about 2 GB")
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds, help="of each measurement")
    parser.add_argument("--json", type=Path, metavar="FILE", help="put the figures, and every round, into this file")
    return parser


def measure_each(
    kinds: Iterable[str], measure: Callable[[str], tuple[Sequence[Figure], Any]]
) -> tuple[list[Figure], dict[str, Any]]:
    """All that `measure` finds: the figures, and the details by kind."""
    figures, details = list[Figure](), dict[str, Any]()
    for kind in kinds:
        more, details[kind] = measure(kind)
        figures += more
    return figures, details


def read(file: Path) -> dict[str, Any]:
    """The sections of a file of results; none where there is no file."""
    return json.loads(file.read_text()) if file.exists() else {}


def figures_of(section: Mapping[str, Any]) -> list[Figure]:
    """The figures of a section."""
    names = {field.name for field in dataclasses.fields(Figure)}
    return [Figure(**{name: value for name, value in figure.items() if name in names}) for figure in section["figures"]]


def report(section: str, figures: Sequence[Figure], details: Mapping[str, Any], args: argparse.Namespace) -> None:
    """Prints the figures of a section, and puts them into a file of results if there is one.

    Args:
      section, figures: to show and to keep.
      details: every single round, to keep beside them.
      args: options of `make_parser`: the file, and what else is kept.
    """
    how = {name: value for name, value in vars(args).items() if name in ("layers", "rounds")}
    held = {"machine": machine(), "figures": [figure.as_json() for figure in figures], "details": {**how, **details}}
    show({section: held})
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(read(args.json) | {section: held}, indent=1))


def show(results: Mapping[str, Any]) -> None:
    """Prints one table of all sections, and where and when they were measured."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("what", "model", "limit", "ours", "ratio", ""):
        table.add_column(column, justify="right" if column in ("ours", "ratio") else "left", no_wrap=True)
    machines: dict[str, list[str]] = {}
    for name, section in results.items():
        table.add_section()
        table.add_row(f"[bold]{name}[/]")
        for figure in figures_of(section):
            table.add_row(*figure.cells())
        machines.setdefault(where(section["machine"]), []).append(name)
    console = Console(highlight=False, width=None if os.isatty(1) else 170)
    console.print(table)
    for line, names in machines.items():
        console.print(f"\n{line}" + (f": {', '.join(names)}" if len(machines) > 1 else ""))


def where(machine: Mapping[str, Any]) -> str:
    """A machine, a day and the versions in a line."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return f"{machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, {machine['date']}, {versions}"
