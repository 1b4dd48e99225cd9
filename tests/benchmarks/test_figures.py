"""Figures: when a limit is met, and how the file of results is kept."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.figures import Figure, figures_of, read, report


@pytest.mark.parametrize(
    ("ours", "at_least", "ratio", "met"),
    [(2.0, False, 0.5, True), (8.0, False, 2.0, False), (2.0, True, 2.0, False), (8.0, True, 0.5, True)],
)
def test_limits(ours: float, at_least: bool, ratio: float, met: bool) -> None:
    figure = Figure("speed", "llama", ours, "×", 4.0, at_least=at_least)
    assert (figure.ratio, figure.met) == (ratio, met)
    assert ("NOT MET" in figure.cells()[-1]) is not met


def test_a_benchmark_replaces_its_own_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, first, second = (
        tmp_path / "results.json",
        Figure("raw copy", "llama", 1.5, "s"),
        Figure("convert", "moe", 3 << 29, "bytes", 1 << 30, "1 GiB"),
    )
    report("load", [first], {}, Namespace(json=file))
    report("convert", [first], {}, Namespace(json=file, rounds=1))
    report("convert", [second], {}, Namespace(json=file, rounds=2))
    held = read(file)
    assert {name: figures_of(section) for name, section in held.items()} == {"load": [first], "convert": [second]}
    assert held["convert"]["details"] == {"rounds": 2}
    assert "≤ 1.00 GiB = 1 GiB" in capsys.readouterr().out
