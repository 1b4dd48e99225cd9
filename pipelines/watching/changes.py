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
from typing import Any

from weightbeam.formats.text.printable import listed
from weightbeam.pipelines.terminal.report import kind_and_layer
from weightbeam.transforms.comparing.differences import Difference

JSON, PICTURE = "changes.json", "changes.png"
COMMIT = re.compile(r"(@[0-9a-f]{12})[0-9a-f]{28}$")
SHOWN = 3  # tensors in a sentence
PIXELS_PER_INCH = 110
INCHES_PER_LETTER = 0.08  # of a heading
MARKS = 5  # of a scale
MOST_COLUMNS, MOST_ROWS = 200, 60  # of a picture


def summarize(found: Mapping[str, Difference | None]) -> dict[str, dict[str, Any]]:
    """What there is to say of each tensor that is on both sides, the older side being the first.

    Returns:
      By name `relative` (see `Difference.relative`), `largest` (of the absolute differences), `share` (of the elements that
      differ), and `not_finite` (whether an element of the second is NaN or infinite).
    """
    tensors = {}
    for name, difference in found.items():
        if difference is not None:
            tensors[name] = {
                "relative": difference.relative,
                "largest": difference.largest,
                "share": difference.share,
                "not_finite": "b" in difference.not_finite,
            }
    return tensors


def as_json(tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The same as JSON takes it, which has no NaN."""

    def plain(value: Any) -> Any:
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    return {name: {key: plain(value) for key, value in each.items()} for name, each in tensors.items()}


def not_finite(tensors: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The tensors with elements that are NaN or infinite."""
    return [name for name, each in tensors.items() if each["not_finite"]]


def unchanged(tensors: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The tensors of which no element differs."""
    return [name for name, each in tensors.items() if not each["share"]]


def brief(url: str) -> str:
    """A release as a person reads it: of the hub's commit the beginning."""
    return COMMIT.sub(r"\1", url)


def sentence(tensors: Mapping[str, Mapping[str, Any]], since: str) -> str:
    """What changed, in a few words; none where nothing did."""
    finite = {name: each["relative"] for name, each in tensors.items() if math.isfinite(each["relative"])}
    if not any(finite.values()):
        return ""
    furthest = max(finite, key=lambda name: finite[name])
    return f"changed since {brief(since)} by {statistics.median(finite.values()):.2e} (median over tensors), most {furthest}: {finite[furthest]:.2e}"


def warnings(before: Mapping[str, Mapping[str, Any]] | None, odd: Sequence[str], since: str) -> list[str]:
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


def grid_of(tensors: Mapping[str, Mapping[str, Any]]) -> Grid:
    """Kinds of weights and layers (see `kind_and_layer`), and the largest relative change of each. A NaN stays one."""
    cells: dict[tuple[str, int], float] = {}
    for name, each in tensors.items():
        kind, layer = kind_and_layer(name)
        value = math.nan if each["not_finite"] else each["relative"]
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
    import numpy as np

    try:
        from matplotlib import colormaps
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import LogNorm
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
    colors = colormaps["viridis"].with_extremes(under="0.85", bad="red")
    for axis, (since, (kinds, layers, cells)) in zip(axes, grids.items(), strict=True):
        shown = kinds[:MOST_ROWS]
        blank = [[(kind, layer) not in cells for layer in layers] for kind in shown]
        values = np.array([[cells.get((kind, layer), 0.0) for layer in layers] for kind in shown], np.float64)
        changed = values[np.isfinite(values) & (values > 0)]
        low, high = (float(changed.min()), float(changed.max())) if changed.size else (1e-6, 1.0)
        # below the scale, not off it: to a logarithm zero is as bad as NaN
        values[values == 0] = low / 2
        high = max(high, low * 1.01)
        masked, norm = np.ma.masked_where(~np.isfinite(values), values), LogNorm(low, high)
        image = axis.imshow(masked, cmap=colors, norm=norm, aspect="auto", interpolation="nearest")
        axis.imshow(
            np.ma.masked_where(~np.array(blank), np.ones_like(values)),
            cmap="gray",
            vmin=0,
            vmax=1,
            aspect="auto",
            interpolation="nearest",
        )
        axis.set_yticks(range(len(shown)), shown, fontsize=7)
        step = max(1, len(layers) // 24)
        axis.set_xticks(
            range(0, len(layers), step), ["–" if layer < 0 else str(layer) for layer in layers[::step]], fontsize=7
        )
        axis.set_xlabel("layer (– : none); grey: unchanged, red: NaN or infinite", fontsize=7)
        heading = f"relative change since {brief(since)}"
        most = int(width / INCHES_PER_LETTER)
        axis.set_title(heading if len(heading) <= most else f"{heading[:22]}…{heading[23 - most :]}", fontsize=9)
        bar = figure.colorbar(
            image, ax=axis, fraction=0.03, pad=0.01, ticks=np.geomspace(low, high, MARKS).tolist(), format="%.1e"
        )
        bar.ax.minorticks_off()
        bar.ax.tick_params(labelsize=7)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()
