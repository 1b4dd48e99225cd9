"""What a person sees of a virtual checkpoint's plan: which arrays stay in the source's files, why others can't, and what the index takes."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from formats.references import Reference, encode_leaf
from model_mappings.cells import pattern
from model_mappings.plan import Array
from pipelines.report import CONSOLE, count, human, shape_text, table
from transforms.conversion import Conversion
from transforms.virtual import share


def print_placements(conversion: Conversion) -> None:
    """A line for each kind of array, and totals."""
    total, grids = conversion.target_bytes, {grid.spec.key: grid for grid in conversion.grids}
    groups: dict[tuple, list[Array]] = defaultdict(list)
    for array, placement in zip(conversion.plan.arrays, conversion.placements, strict=True):
        groups[pattern(array.key), array.shape, placement.reason, grids[array.key].spec.chunk].append(array)
    rows = table("array", "bytes are", "why", "chunk", ">arrays", ">share")
    for (_, _, reason, chunk), arrays in groups.items():
        name = arrays[0].key.removeprefix("params.params.") + (" …" if len(arrays) > 1 else "")
        nbytes = sum(array.nbytes for array in arrays)
        kind = "written" if reason else "the source's"
        rows.add_row(name, kind, reason or "the same elements in another order", shape_text(chunk), str(len(arrays)), share(nbytes, total))
    CONSOLE.print()
    CONSOLE.print(rows)
    references = list(conversion.references())
    virtual = sum(placement.spec is not None for placement in conversion.placements)
    totals = table("", "")
    totals.add_row("virtual", f"{count(virtual, 'array')} of {len(conversion.placements):,}, {share(conversion.virtual_bytes, total)} of the bytes")
    totals.add_row(
        "written", f"{human(conversion.made_bytes)} in arrays, and an index of about {human(index_bytes(references))} for {len(references):,} chunks"
    )
    CONSOLE.print()
    CONSOLE.print(totals)


def index_bytes(references: Sequence[Reference]) -> int:
    """About what references take in a checkpoint's database, which is compressed."""
    return len(zlib.compress(encode_leaf(sorted(references, key=lambda reference: reference.key)).data, level=1))


def json_report(conversion: Conversion) -> dict[str, Any]:
    """What `weightbeam plan --virtual --json` adds to the plan; see `docs/virtual.md`."""
    if not conversion.placements:
        return {}
    why = {array.key: placement.reason or None for array, placement in zip(conversion.plan.arrays, conversion.placements, strict=True)}
    references = list(conversion.references())
    sizes = {"virtual": conversion.virtual_bytes, "written": conversion.made_bytes, "index": index_bytes(references)}
    return {"virtual": {"arrays": why, "bytes": sizes, "references": len(references)}}
