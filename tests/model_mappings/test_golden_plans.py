"""Every table as text: a change of a table is a diff of a file in `tests/golden`.

`UPDATE_GOLDEN=1 pytest tests/model_mappings/test_golden_plans.py` rewrites them; read the diff before you commit it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from facts import layouts_of, load_headers
from facts.tiny import CONFIGS, PADDED, shapes

from weightbeam.model_mappings.config import Layout

GOLDEN = Path(__file__).parents[1] / "golden"
PLANS = {  # name: (config, fused experts, layout)
    **{f"{name}-scanned": (name, False, Layout()) for name in CONFIGS},
    **{f"{name}-unscanned": (name, False, Layout(scan=False)) for name in CONFIGS},
    **{
        f"{name}-{'scanned' if scan else 'unscanned'}": (name, False, Layout(scan=scan))
        for name in PADDED
        for scan in (True, False)
    },
    **{f"{name}-fused-scanned": (name, True, Layout()) for name in ("qwen3_moe", "mixtral", "deepseek_v3")},
    "llama3.1-scanned": ("llama", False, Layout(model="llama3.1-8b", vocab=20)),
    "llama3.1-unscanned": ("llama", False, Layout(scan=False, model="llama3.1-8b", vocab=20)),
    "deepseek_v3-mtp-scanned": ("deepseek_v3", False, Layout(mtp=True)),
}
HEADERS = load_headers()
PLANS |= {
    f"{name}-{key}": (name, False, layout)
    for name, entry in HEADERS.items()
    for key, layout in layouts_of(entry.config).items()
}


def render(checked):
    """Each array: key, shape, dtype, axes, fill and loss; then of each of its parts the first and last cell: tensor,
    window, axes, segments, ops.
    """
    for array in checked.arrays:
        names = " ".join(name or "-" for name in array.logical_axes)
        extra = {"fill": array.fill, "lossy": array.lossy}
        yield " | ".join(
            [
                f"{array.key} {array.shape} {array.dtype.name} [{names}]",
                *(f"{key}: {value}" for key, value in extra.items() if value is not None),
            ]
        )
        for part in array.parts:
            cells = list(part.cells())
            tensors = " … ".join(dict.fromkeys(str(cell.tensor) for cell in (cells[0], cells[-1])))
            window = ", ".join(
                f"{cut[0]}:{cut[-1] + 1}" + (f":{cut.step}" if cut.step != 1 else "") for cut in part.source_box()
            )
            segments = [
                f"{factor} at {segment.start} of {segment.total}" for factor, segment in part.rule.segments.items()
            ]
            axes = f"{side(part.rule.axes.left)} -> {side(part.rule.axes.right)}"
            yield " | ".join([f"    <- {tensors} [{window}]", axes, *segments, *map(str, part.rule.ops)])
    for reason in dict.fromkeys(checked.dropped.values()):
        names = [name for name, why in checked.dropped.items() if why == reason]
        yield f"dropped: {names[0]} … {names[-1]} ({len(names)}): {reason}"


def side(axes):
    return " ".join(f"({' '.join(axis)})" if len(axis) > 1 else "".join(axis) or "1" for axis in axes)


@pytest.mark.parametrize("name", PLANS)
def test_golden_plan(check, make_specs, name):
    """The table makes the plan that was reviewed."""
    model, is_fused, layout = PLANS[name]
    if model in HEADERS:
        checked = check(HEADERS[model].config, HEADERS[model].tensors, layout)
    else:
        config = (CONFIGS | PADDED)[model]
        checked = check(config, make_specs(shapes(config, is_fused)), layout)
    assert checked.problems == []
    text = "\n".join(render(checked)) + "\n"
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        file.write_text(text, encoding="utf-8")
        pytest.skip("rewritten")
    assert text == file.read_text(encoding="utf-8")


def test_no_golden_plan_is_left_over():
    """Every text belongs to a plan above."""
    assert {file.stem for file in GOLDEN.glob("*.txt")} == set(PLANS)
