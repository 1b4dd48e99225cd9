"""Which sizes of `config.json` a checkpoint doesn't have: the cause of what would else be told array by array.

They are looked for step by step. Where an axis is `found` long and not `expected`, a field that has the expected extent,
or a share of it, may have the wrong value; of all such changes that which leaves the fewest axes amiss is made, until
every array fits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.configuration import lookup, put
from weightbeam.model_mappings.family import Family
from weightbeam.model_mappings.plan import expand, key_of

Shape = tuple[int, ...]
SIZE = re.compile(r"size|dim|heads|layers|experts|rank|width|replace")  # in the names of fields that say one
LAYERS, LAYER = "num_hidden_layers", re.compile(r"layers[._](\d+)\b")
HEAD = "head_dim"  # where it isn't said, it follows from others
STEPS = 8  # sizes that differ, at most
ABSENT = 4  # what an array counts that is on one side only; one of another shape counts its axes


def find_sizes(
    family: Family, config: Config, layout: Layout, shapes: Mapping[str, Shape], before: Mapping[str, Any]
) -> dict[str, int]:
    """The sizes that a checkpoint has instead of those in `config.json`, by their fields; empty where no such change
    makes all arrays fit that are on both sides.

    Args:
      shapes: of the checkpoint's weights, by their keys.
      before: the `config.json` of the release that the checkpoint was made of, as far as it is known.
    """
    sizes, wanted = dict[str, int](), _expected(family, config, layout)
    left = _amiss(wanted, shapes)
    while left and wanted is not None and len(sizes) < STEPS:
        tried = {
            (field, value): _amiss(_expected(family, changed(config, sizes | {field: value}), layout), shapes)
            for field, value in _candidates(changed(config, sizes), shapes, _misfits(wanted, shapes), before)
            if lookup(config, field) != value
        }
        best = min(tried, key=tried.__getitem__, default=None)
        if best is None or tried[best] >= left:
            break
        left, sizes = tried[best], sizes | dict([best])
        wanted = _expected(family, changed(config, sizes), layout)
    return {} if wanted is None or _misfits(wanted, shapes) else sizes


def changed(config: Config, sizes: Mapping[str, int]) -> Config:
    """A config with other sizes; lists that have an entry for each layer keep having one."""
    made: Any = _copy(config)
    for field, value in sizes.items():
        if field.rpartition(".")[2] == LAYERS:
            section = lookup(made, field.rpartition(".")[0])
            for name, each in section.items():
                if isinstance(each, list) and each and len(each) == section[LAYERS]:
                    section[name] = [each[number % len(each)] for number in range(value)]
        put(made, field, value)
    return Config(made)


def describe(config: Config, sizes: Mapping[str, int]) -> str:
    """What differs, for a person."""
    said = (
        f"{field} is {lookup(config, field) or 'not said'}, the checkpoint's is {value}"
        for field, value in sorted(sizes.items())
    )
    return "; ".join(said)


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(each) for key, each in value.items()}
    return list(value) if isinstance(value, list) else value


def _expected(family: Family, config: Config, layout: Layout) -> dict[str, Shape] | None:
    """The shapes of the table's arrays; None where the config can't be of a model."""
    try:
        return {
            key_of(path): parts[0].shape
            for path, parts in expand(family, config, layout).items()
            if not all(part.rule.source is None for part in parts)
        }
    except (ConfigError, ArithmeticError, LookupError, TypeError, ValueError):
        return None


def _misfits(wanted: Mapping[str, Shape], shapes: Mapping[str, Shape]) -> set[tuple[Shape, Shape]]:
    """The shapes of the arrays that both sides have otherwise: as expected, as found."""
    return {(wanted[key], shapes[key]) for key in wanted.keys() & shapes.keys() if wanted[key] != shapes[key]}


def _amiss(wanted: Mapping[str, Shape] | None, shapes: Mapping[str, Shape]) -> float:
    """How much is amiss; endless where the config can't be of a model."""
    if wanted is None:
        return math.inf
    return ABSENT * len(wanted.keys() ^ shapes.keys()) + sum(
        sum(a != b for a, b in zip(wanted[key], shapes[key], strict=True))
        if len(wanted[key]) == len(shapes[key])
        else ABSENT
        for key in wanted.keys() & shapes.keys()
    )


def _candidates(
    config: Config, shapes: Collection[str], misfits: Iterable[tuple[Shape, Shape]], before: Mapping[str, Any]
) -> Iterator[tuple[str, int]]:
    """Changes that may explain an axis of another length: a field, and its value."""
    pairs = (zip(wanted, found, strict=True) for wanted, found in misfits if len(wanted) == len(found))
    axes = sorted({(wanted, found) for each in pairs for wanted, found in each if wanted != found})
    fields = dict(_fields(config))
    numbers = [int(found[1]) for key in shapes for found in LAYER.finditer(key)]
    for field, value in fields.items():
        if isinstance(known := lookup(before, field), int) and known != value:
            yield field, known
        if field.rpartition(".")[2] == LAYERS and numbers:
            yield field, max(numbers) + 1
        for wanted, found in axes:
            if wanted % value == 0 and found % (wanted // value) == 0:
                yield field, found // (wanted // value)
            if "layers" in field and value + found - wanted > 0:
                yield field, value + found - wanted
    if not any(field.endswith(HEAD) for field in fields):
        section = next((field.rpartition(".")[0] for field in fields if field.endswith("num_attention_heads")), "")
        yield from ((f"{section}.{HEAD}".lstrip("."), found) for _, found in axes)


def _fields(config: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, int]]:
    """The fields that say a size, with their values."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _fields(value, f"{section}{name}.")
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0 and SIZE.search(name):
            yield f"{section}{name}", value
