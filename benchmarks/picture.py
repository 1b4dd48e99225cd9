"""The results as one picture: time, memory, what a host reads, and the rates of decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.figures import Figure, figures_of, where

OURS, STOCK, RAW, LIMIT, INK = "#2f6f9f", "#d9a066", "#b5bcc4", "#a33b3b", "#333a41"
OVER_LINES = dict(facecolor="white", edgecolor="none", pad=0.5)  # behind a value
DECODED = " → bfloat16"
KINDS = {"llama": "Llama-like, bf16", "moe": "MoE-like, bf16", "fp8": "dense, FP8"}


def draw(results: Mapping[str, Any], file: Path) -> None:
    """Draws what there is of the sections `convert`, `load`, `kernels` and `full run`."""
    figures = {name: figures_of(section) for name, section in results.items()}
    style: dict[Any, Any] = {
        "font.size": 9,
        "text.color": INK,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.edgecolor": RAW,
    }
    with plt.rc_context(style):
        picture, axes = plt.subplots(2, 2, figsize=(11, 7.6), layout="constrained")
        draw_time(axes[0, 0], figures.get("convert", ()))
        draw_memory(axes[0, 1], figures.get("convert", ()), figures.get("full run", ()))
        draw_load(axes[1, 0], figures.get("load", ()))
        draw_kernels(axes[1, 1], figures.get("kernels", ()))
        if results:
            picture.supxlabel(where(next(iter(results.values()))["machine"]), fontsize=7)
        picture.savefig(file, dpi=160)
        plt.close(picture)


def draw_time(axes: Axes, figures: Sequence[Figure]) -> None:
    """Seconds of a raw copy, of ours and of stock Orbax."""
    values = {(figure.what, figure.model): figure for figure in figures}
    series = {
        "Weightbeam": ("convert", OURS),
        "raw copy of the bytes": ("raw copy", RAW),
        "stock Orbax": ("stock Orbax", STOCK),
    }
    bars(
        axes,
        [(KINDS[kind], [values.get((what, kind)) for what, _ in series.values()]) for kind in KINDS],
        {name: colour for name, (_, colour) in series.items()},
    )
    axes.set_title("Time to convert 2 GB, seconds (less is better)", loc="left", fontsize=10)


def draw_memory(axes: Axes, figures: Sequence[Figure], full: Sequence[Figure]) -> None:
    """Peak memory of ours and of stock Orbax, and of ours by the model's size."""
    values = {(figure.what, figure.model): figure for figure in figures}
    ours, stock = "convert, peak memory", "stock Orbax, peak memory"
    rows = [(label, [values.get((ours, kind)), values.get((stock, kind))]) for kind, label in KINDS.items()]
    rows += [
        (figure.model.replace("llama", "Llama-like"), [figure])
        for figure in figures
        if figure.what == ours and figure.model not in KINDS
    ]
    rows += [(f"{figure.model}, 1.3 TB", [figure]) for figure in full if figure.what == ours]
    bars(axes, rows, {"Weightbeam": OURS, "stock Orbax": STOCK}, 1 << 30)
    if limits := {figure.limit for figure in figures if figure.what == ours and figure.limit}:
        axes.axvline(max(limits) / (1 << 30), color=LIMIT, linewidth=1, linestyle="--", label="the limit")
    axes.legend(frameon=False, fontsize=8)
    axes.set_title("Peak memory, GiB (less is better)", loc="left", fontsize=10)


def draw_load(axes: Axes, figures: Sequence[Figure]) -> None:
    """What a host reads of what it needs."""
    start = "load amplification, "
    names = {
        "fsdp=16": ("converted for fsdp=16", OURS),
        "no mesh": ("converted for any mesh", "#7fb0d3"),
        "axis 0": ("axis 0 cut, as MaxText does", STOCK),
    }
    values = {(figure.what, figure.model): figure for figure in figures}
    rows = [
        (label, [values.get((start + name, kind)) for name in names])
        for kind, label in KINDS.items()
        if (f"{start}axis 0", kind) in values
    ]
    bars(axes, rows, dict(names.values()))
    axes.set_title("Bytes that one host of fsdp=16 reads ÷ bytes that it needs (1 is best)", loc="left", fontsize=10)


def draw_kernels(axes: Axes, figures: Sequence[Figure]) -> None:
    """Rates of decoding on one core, and the least that is asked for."""
    decoders = [figure for figure in figures if figure.what.endswith(DECODED)]
    bars(axes, [(figure.what.removesuffix(DECODED), [figure]) for figure in decoders], {"packed bytes read": OURS})
    for row, figure in enumerate(decoders):
        if figure.limit:
            axes.plot(
                [figure.limit] * 2,
                [row - 0.45, row + 0.45],
                color=LIMIT,
                linewidth=1.5,
                label="the least" if row == 0 else None,
            )
    axes.legend(frameon=False, fontsize=8)
    axes.set_title("Decoding to bfloat16 on one core, MB/s (more is better)", loc="left", fontsize=10)


def bars(
    axes: Axes, rows: Sequence[tuple[str, Sequence[Figure | None]]], series: Mapping[str, str], unit: float = 1
) -> None:
    """Bars to the right, a group for each row, a colour for each of the series; their values stand beside them."""
    height = 0.8 / len(series)
    longest = max((figure.ours for _, figures in rows for figure in figures if figure), default=1) / unit
    for number, (name, colour) in enumerate(series.items()):
        # A row that has fewer bars than there are series has them in its middle.
        held = [
            (row + (number - (len(figures) - 1) / 2) * height, figures[number])
            for row, (_, figures) in enumerate(rows)
            if number < len(figures)
        ]
        places = [(place, figure.ours / unit) for place, figure in held if figure]
        axes.barh(
            [place for place, _ in places], [value for _, value in places], height * 0.92, color=colour, label=name
        )
        for place, value in places:
            axes.text(
                value + longest * 0.01,
                place,
                f"{value:,.0f}" if value >= 100 else f"{value:.2f}",
                va="center",
                fontsize=7.5,
                bbox=OVER_LINES,
            )
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.12)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.legend(frameon=False, fontsize=8)
