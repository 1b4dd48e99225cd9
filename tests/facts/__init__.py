"""Facts about MaxText and Hugging Face that the tests compare with. Nothing here is made by the code under test."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

import ml_dtypes
import numpy as np

from model_mappings.config import Config, Layout
from model_mappings.plan import TensorSpec
from model_mappings.registry import family_of

HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Tree:
    """The parameters of one MaxText model as MaxText (e591f30) builds them, see `make_trees.py`.

    Attributes:
      model: MaxText's name.
      scan, mtp, multimodal: how it was built.
      vocab: rows of its embedding.
      config: Hugging Face's `config.json`, as far as MaxText has one.
      arrays: `{path: (shape, logical name of each axis)}`, None where an axis has no name.
    """

    model: str
    scan: bool
    mtp: bool
    multimodal: bool
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


@dataclasses.dataclass(frozen=True)
class Headers:
    """A tiny checkpoint as its headers tell it, see `make_headers.py`.

    Attributes:
      config: its `config.json`.
      tensors: what the headers say of each tensor.
    """

    config: dict
    tensors: dict[str, TensorSpec]


def load_headers() -> dict[str, Headers]:
    """Every checkpoint by its name."""
    found = json.loads(gzip.decompress((HERE / "headers.json.gz").read_bytes()))
    return {name: Headers(entry["config"], {tensor: _spec(*header) for tensor, header in entry["tensors"].items()}) for name, entry in found.items()}


def _spec(dtype: str, *shape: int) -> TensorSpec:
    return TensorSpec(shape, np.dtype(getattr(ml_dtypes, dtype, dtype)), "model.safetensors")


def layouts_of(config: dict) -> dict[str, Layout]:
    """Every layout that a model's family has, by name: `scanned`, `unscanned`, and both with the model's towers, if it has any."""
    family = family_of(Config(config))
    layouts = {name: Layout(scan=name == "scanned") for name in family.layouts}
    if family.towers and not {"vision_config", "thinker_config"}.isdisjoint(config):
        layouts |= {f"multimodal-{name}": Layout(scan=name == "scanned", multimodal=True) for name in family.layouts}
    return layouts
