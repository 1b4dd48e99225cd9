"""`weightbeam models`: what can be converted."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from weightbeam.model_mappings.family import Family
from weightbeam.model_mappings.registry import FAMILIES, shown
from weightbeam.pipelines.terminal.shell import say
from weightbeam.pipelines.terminal.shown import Shown
from weightbeam.pipelines.terminal.tables import Block, Table, count


@dataclasses.dataclass(frozen=True, repr=False)
class Models(Shown):
    """The families that can be converted."""

    families: tuple[Family, ...]

    def blocks(self) -> Iterator[Block]:
        rows = Table("family", "releases", "MaxText's models", "model_type", spare=("releases", "model_type"))
        for family in self.families:
            rows.add_row(
                family.name, family.releases, ", ".join(map(shown, family.models)), ", ".join(family.model_types)
            )
        yield rows

    def brief(self) -> str:
        return count(len(self.families), "kind") + " of models"

    def to_dict(self) -> dict[str, Any]:
        return {
            family.name: {
                "releases": family.releases,
                "model_types": list(family.model_types),
                "maxtext_models": list(family.models),
            }
            for family in self.families
        }


def models() -> Models:
    """The families that can be converted."""
    return Models(tuple(FAMILIES))


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints them."""
    say(args, models())
    return 0
