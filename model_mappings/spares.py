"""Arrays that repeat another one, for versions of MaxText that look for it there (`Rule.spare`)."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from weightbeam.model_mappings.cells import Part
from weightbeam.model_mappings.plan import key_of


def spares(parts: Mapping[str, Sequence[Part]]) -> dict[str, str]:
    """Of each array that another one repeats, that one: both by their paths.

    Args:
      parts: of a table, by the paths of its arrays.
    """
    repeats = {_source(made[0]): path for path, made in parts.items() if made[0].rule.spare}
    if not repeats:
        return {}
    return {
        path: repeats[_source(made[0])]
        for path, made in parts.items()
        if not made[0].rule.spare and _source(made[0]) in repeats
    }


def read_back(parts: Mapping[str, list[Part]], keys: Container[str]) -> dict[str, list[Part]]:
    """The parts of the arrays that a checkpoint's tensors are taken from: a spare one only where the one that it repeats
    isn't there.

    Args:
      parts: of a table, by the paths of its arrays.
      keys: Orbax's, of the checkpoint's arrays.
    """
    instead = {one: other for one, other in spares(parts).items() if key_of(one) not in keys and key_of(other) in keys}
    return {
        path: made
        for path, made in parts.items()
        if path not in instead and (not made[0].rule.spare or path in instead.values())
    }


def _source(part: Part) -> tuple[str | None, tuple[int, ...]]:
    """What tells whether two parts are made of the same tensors."""
    return part.template, tuple(map(int, part.layers.flat))
