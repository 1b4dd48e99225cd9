"""What `weightbeam new-family` writes: the headers that a test reads, and whether the draft is finished."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from weightbeam.formats.release.source import open_source
from weightbeam.formats.safetensors import HfCheckpoint, open_hf
from weightbeam.model_mappings.drafting import TODO
from weightbeam.model_mappings.plan import TensorSpec


def read_headers(path: Path | str) -> tuple[dict[str, Any], dict[str, TensorSpec]]:
    """`config.json` and the headers of a release: of its folder or URL, or as `weightbeam new-family` wrote them into a
    file, `{name: [dtype, *shape]}`.

    Raises:
      AssertionError: the release can't be read; with all that stands against it.
    """
    if not str(path).endswith(".json"):
        return _of_release(open_hf(path))
    held = json.loads(Path(path).read_text())
    return held["config"], {name: _spec(*said) for name, said in held["tensors"].items()}


def _of_release(release: HfCheckpoint) -> tuple[dict[str, Any], dict[str, TensorSpec]]:
    source = open_source(release)
    if problems := [*release.problems, *source.problems]:
        raise AssertionError("\n".join(map(str, problems)))
    return dict(release.config), source.specs()


def _spec(dtype: str, *shape: int) -> TensorSpec:
    return TensorSpec(shape, np.dtype(getattr(ml_dtypes, dtype, dtype)), "model.safetensors")


def read_tree(path: Path | str) -> Mapping[str, tuple[tuple[int, ...], tuple[str | None, ...]]]:
    """MaxText's parameters as `tests/facts/maxtext_trees.py` writes them: path, shape and logical axes of each, compressed
    JSON.
    """
    held = json.loads(gzip.decompress(Path(path).read_bytes()))["params"]
    return {each["path"]: (tuple(each["shape"]), _axes(each)) for each in held.values()}


def _axes(said: Mapping[str, Any]) -> tuple[str | None, ...]:
    """The names of an array's axes; none of any where MaxText names none."""
    return tuple(said["axes"]) or (None,) * len(said["shape"])


def check_finished(*paths: Path | str) -> None:
    """Checks that no line of these files is marked as a guess or as unknown.

    Raises:
      AssertionError: some are; with each line.
    """
    left = [
        f"{Path(path).name}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(Path(path).read_text().splitlines(), 1)
        if TODO in line
    ]
    if left:
        raise AssertionError("\n".join([f"{len(left)} lines are marked {TODO}:", *left]))
