"""Facts about MaxText and Hugging Face that the tests compare with. Nothing here is made by the code under test."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Tree:
    """The parameters of one MaxText model as MaxText (e591f30) builds them, see `make_trees.py`.

    Attributes:
      model: MaxText's name.
      scan, mtp: how it was built.
      vocab: rows of its embedding.
      config: the fields of Hugging Face's `config.json` that tables read.
      arrays: `{path: (shape, logical name of each axis)}`, None where an axis has no name.
    """

    model: str
    scan: bool
    mtp: bool
    vocab: int
    config: dict
    arrays: dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]


def load_trees() -> dict[str, Tree]:
    """Every tree by its name: `llama2-7b--scan`, `llama2-7b--unscan`, …"""
    trees = json.loads(gzip.decompress((HERE / "trees.json.gz").read_bytes()))
    return {name: Tree(**tree | {"arrays": _spread(tree["arrays"])}) for name, tree in trees.items()}


def _spread(arrays: list[list]) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]:
    """One entry for each layer, where `make_trees.py` keeps one for layers that are alike."""
    spread = {}
    for path, runs, shape, axes in arrays:
        entry = tuple(shape), tuple(axes) or (None,) * len(shape)
        numbers = [number for first, last in runs for number in range(first, last + 1)]
        spread.update({path.format(number): entry for number in numbers} if runs else {path: entry})
    return spread
