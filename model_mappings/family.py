"""A family: the models that one table describes."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping

from model_mappings.config import Config, Layout
from model_mappings.rules import Stack


@dataclasses.dataclass(frozen=True)
class Family:
    """The table of a family, and how to tell that a checkpoint belongs to it.

    Attributes:
      name: the family's name, and its module's.
      models: patterns of MaxText's model names, with the `model_type`s of `config.json` that each may stand for.
      dims: the axis words of the table and their sizes.
      stacks: the table itself.
      drops: tensors left out on purpose: `{pattern or window: reason}`.
      releases: the releases it covers, for the README's table.
      mtp: whether MaxText has its multi-token-prediction layers.
      undecided: the MaxText models to choose from where `config.json` alone can't settle the table; else empty.
      note: what was inferred and why, for the plan.
    """

    name: str
    models: Mapping[str, tuple[str, ...]]
    dims: Callable[[Config, Layout], Mapping[str, int]]
    stacks: Callable[[Config, Layout], list[Stack]]
    drops: Callable[[Config, Layout], Mapping[str, str]]
    releases: str
    mtp: bool = False
    undecided: Callable[[Config], tuple[str, ...]] = lambda c: ()
    note: Callable[[Config, Layout], str] = lambda c, layout: ""

    @property
    def model_types(self) -> tuple[str, ...]:
        """Every `model_type` of the family, in the order of the table."""
        return tuple(dict.fromkeys(kind for kinds in self.models.values() for kind in kinds))

    def types_of(self, model: str) -> tuple[str, ...]:
        """The `model_type`s that MaxText's `model` may stand for; empty where it isn't of this family."""
        return tuple(kind for pattern, kinds in self.models.items() if fnmatch.fnmatchcase(model, pattern) for kind in kinds)
