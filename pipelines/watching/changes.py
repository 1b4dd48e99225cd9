"""What a step of a run changed: each tensor's relative change since the step before and since the release that the run
began with.

As JSON for programs, as one picture for people (layers × kinds of weights), and in a sentence for a notice.
"""

from __future__ import annotations

import io
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weightbeam.formats.text.printable import listed
from weightbeam.pipelines.terminal.report import kind_and_layer
from weightbeam.transforms.comparing.differences import Difference

if TYPE_CHECKING:
    from matplotlib.axes import Axes

JSON, PICTURE = "changes.json", "changes.png"
COMMIT = re.compile(r"(@[0-9a-f]{12})[0-9a-f]{28}$")
SHOWN = 3  # tensors in a sentence
PIXELS_PER_INCH = 110
INCHES_PER_LETTER = 0.08  # of a heading
MARKS = 5  # of a scale
MOST_COLUMNS, MOST_ROWS = 200, 60  # of a picture

Tensors = Mapping[str, Difference]  # of those that are on both sides, by name, the older side being the first


def as_json(tensors: Tensors) -> dict[str, dict[str, Any]]:
    """What there is to say of each tensor, with NaN and infinities as texts, since JSON has no such numbers."""

    def plain(value: float) -> float | str:
        return value if math.isfinite(value) else str(value)

    return {
        name: {
            "relative": plain(each.relative),
            "largest": plain(each.largest),
            "share": each.share,
            "not_finite": _is_odd(each),
        }
        for name, each in tensors.items()
    }


def _is_odd(difference: Difference) -> bool:
    """Whether an element of the newer side is NaN or infinite."""
    return "b" in difference.not_finite


def not_finite(tensors: Tensors) -> list[str]:
    """The tensors with elements that are NaN or infinite."""
    return [name for name, each in tensors.items() if _is_odd(each)]


def unchanged(tensors: Tensors) -> list[str]:
    """The tensors of which no element differs."""
    return [name for name, each in tensors.items() if not each.share]


def brief(url: str) -> str:
    """A release as a person reads it: of the hub's commit the beginning."""
    return COMMIT.sub(r"\1", url)


def sentence(tensors: Tensors, since: str) -> str:
    """What changed, in a few words; none where nothing did."""
    finite = {name: each.relative for name, each in tensors.items() if math.isfinite(each.relative)}
    if not any(finite.values()):
        return ""
    furthest = max(finite, key=lambda name: finite[name])
    return f"changed since {brief(since)} by {statistics.median(finite.values()):.2e} (median over tensors), most {furthest}: {finite[furthest]:.2e}"


def warnings(before: Tensors | None, odd: Sequence[str], since: str) -> list[str]:
    """What is worth knowing while it trains."""
    said = [f"NaN or infinite elements in {listed(odd, SHOWN)}"] if odd else []
    still = unchanged(before) if before else []
    if before and still:
        said.append(
            f"nothing has changed since {since}"
            if len(still) == len(before)
            else f"unchanged since {since}: {listed(still, SHOWN)}"
        )
    return said


Grid = tuple[list[str], list[int], dict[tuple[str, int], float]]


def grid_of(tensors: Tensors) -> Grid:
    """Kinds of weights and layers (see `kind_and_layer`), and the largest relative change of each. A NaN stays one."""
    cells: dict[tuple[str, int], float] = {}
    for name, each in tensors.items():
        kind, layer = kind_and_layer(name)
        value = math.nan if _is_odd(each) else each.relative
        held = cells.get((kind, layer), 0.0)
        cells[kind, layer] = math.nan if math.isnan(value) or math.isnan(held) else max(value, held)
    outside = {kind for kind, layer in cells if layer < 0}
    kinds = sorted({kind for kind, _ in cells}, key=lambda kind: (kind in outside, kind))
    return kinds, sorted({layer for _, layer in cells}), cells


def picture(grids: Mapping[str, Grid], title: str) -> bytes | None:
    """A PNG: for each comparison layers × kinds, the brighter the more changed, grey where nothing did, red where an
    element isn't finite.

    None where matplotlib isn't installed (the extra `follow`).
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None

    heights = [max(2.0, 0.22 * min(len(kinds), MOST_ROWS) + 1.2) for kinds, _, _ in grids.values()]
    columns = max((len(layers) for _, layers, _ in grids.values()), default=1)
    longest = max((len(kind) for kinds, _, _ in grids.values() for kind in kinds[:MOST_ROWS]), default=1)
    # by hand: the layouts of matplotlib take as long as all else
    left, width, height = 0.5 + 0.055 * longest, 4.5 + 0.12 * min(columns, MOST_COLUMNS), sum(heights) + 0.4
    figure = Figure(figsize=(left + width, height), dpi=PIXELS_PER_INCH)
    figure.suptitle(title, y=1 - 0.15 / height, verticalalignment="top")
    margins = dict(
        left=left / (left + width), right=1 - 0.55 / (left + width), top=1 - 0.75 / height, bottom=0.55 / height
    )
    space = dict(hspace=0.9 / (sum(heights) / len(heights)))
    axes = figure.subplots(len(grids), 1, squeeze=False, height_ratios=heights, gridspec_kw=margins | space)[:, 0]
    most = int(width / INCHES_PER_LETTER)
    for axis, (since, grid) in zip(axes, grids.items(), strict=True):
        heading = f"relative change since {brief(since)}"
        axis.set_title(heading if len(heading) <= most else f"{heading[:22]}…{heading[23 - most :]}", fontsize=9)
        _draw(axis, grid)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()


def _draw(axis: Axes, grid: Grid) -> None:
    """Draws one comparison, with its scale beside it."""
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm

    kinds, layers, cells = grid
    kinds = kinds[:MOST_ROWS]
    values = np.ma.masked_less([[cells.get((kind, layer), -1.0) for layer in layers] for kind in kinds], 0)
    finite = values.compressed()[np.isfinite(values.compressed())]
    low, high = min(finite[finite > 0], default=1e-6), max(finite[finite > 0], default=1.0)
    high = max(high, low * 1.01)
    # beside the scale: to a logarithm zero is as bad as NaN
    values[values == 0] = low / 2
    values[~np.isfinite(values)] = high * 2
    colors = colormaps["viridis"].with_extremes(under="0.85", over="red", bad="white")
    image = axis.imshow(values, cmap=colors, norm=LogNorm(low, high), aspect="auto", interpolation="nearest")
    axis.set_yticks(range(len(kinds)), kinds, fontsize=7)
    step = max(1, len(layers) // 24)
    names = ["–" if layer < 0 else str(layer) for layer in layers[::step]]
    axis.set_xticks(range(0, len(layers), step), names, fontsize=7)
    axis.set_xlabel("layer (– : none); grey: unchanged, red: NaN or infinite", fontsize=7)
    ticks = np.geomspace(low, high, MARKS).tolist()
    bar = axis.figure.colorbar(image, ax=axis, fraction=0.03, pad=0.01, ticks=ticks, format="%.1e")
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=7)
