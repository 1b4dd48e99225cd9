"""What `weightbeam new-family` writes: the headers that a test reads, and whether the draft is finished."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weightbeam.formats.release.source import open_source
from weightbeam.formats.safetensors import HfCheckpoint, open_hf
from weightbeam.model_mappings.drafting import TODO
from weightbeam.model_mappings.ops import dtype_named
from weightbeam.model_mappings.plan import TensorSpec


def read_headers(path: Path | str) -> tuple[dict[str, Any], dict[str, TensorSpec]]:
    """`config.json` and the headers of a release: of its folder or URL, or as `weightbeam new-family` wrote them into a
    file, `{name: [dtype, *shape]}`.

    Args:
      path: of the folder or the `.json` file, or a URL.

    Returns:
      `config.json`; and shape and dtype of each tensor, by name, what is quantised as its values.

    Raises:
      AssertionError: the release can't be read; with all that stands against it.

    Example:
      >>> import tempfile
      >>> path = Path(tempfile.mkdtemp(), "mine.json")
      >>> _ = path.write_text('{"config": {"model_type": "mine"}, "tensors": {"up.weight": ["bfloat16", 3, 5]}}')
      >>> config, tensors = read_headers(path)
      >>> config, tensors["up.weight"].shape
      ({'model_type': 'mine'}, (3, 5))
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
    return TensorSpec(shape, dtype_named(dtype), "model.safetensors")


def read_tree(path: Path | str) -> Mapping[str, tuple[tuple[int, ...], tuple[str | None, ...]]]:
    """MaxText's parameters, as `tests/facts/maxtext_trees.py` writes them.

    Args:
      path: of the compressed JSON.

    Returns:
      Shape and logical axes of each parameter by its path, which `check_tree` compares a table with.

    Raises:
      AssertionError: there is no such file.

    Example:
      >>> import tempfile
      >>> path = Path(tempfile.mkdtemp(), "mine.json.gz")
      >>> norm = {"path": "params/params/decoder/decoder_norm/scale", "shape": [6], "axes": ["norm"]}
      >>> _ = path.write_bytes(gzip.compress(json.dumps({"params": {"norm": norm}}).encode()))
      >>> read_tree(path)
      {'params/params/decoder/decoder_norm/scale': ((6,), ('norm',))}
    """
    if not Path(path).is_file():
        raise AssertionError(f"{path}: no such file; `weightbeam help contributors_day` says how MaxText writes it")
    held = json.loads(gzip.decompress(Path(path).read_bytes()))["params"]
    return {each["path"]: (tuple(each["shape"]), _axes(each)) for each in held.values()}


def _axes(said: Mapping[str, Any]) -> tuple[str | None, ...]:
    """The names of an array's axes; none of any where MaxText names none."""
    return tuple(said["axes"]) or (None,) * len(said["shape"])


def check_finished(*paths: Path | str) -> None:
    """Checks that no line is marked as a guess or as unknown.

    Args:
      paths: of the files, the table and its test.

    Raises:
      AssertionError: some are; with each line.

    Example:
      >>> import tempfile
      >>> path = Path(tempfile.mkdtemp(), "mine.py")
      >>> _ = path.write_text("models = {}  # TODO: MaxText's names")
      >>> check_finished(path)
      Traceback (most recent call last):
      AssertionError: 1 lines are marked TODO:
      mine.py:1: models = {}  # TODO: MaxText's names
    """
    left = [
        f"{Path(path).name}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(Path(path).read_text().splitlines(), 1)
        if TODO in line
    ]
    if left:
        raise AssertionError("\n".join([f"{len(left)} lines are marked {TODO}:", *left]))
