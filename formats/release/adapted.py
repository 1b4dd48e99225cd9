"""A release with adapters merged into its tensors, under the release's own names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from weightbeam.formats.adapters import Adapter, Merging, merge
from weightbeam.formats.adapters.ties import Ties, find_ties
from weightbeam.formats.release.source import ReleaseTensors
from weightbeam.formats.safetensors import HfCheckpoint
from weightbeam.model_mappings.config import TIE, Config, ConfigError, Layout
from weightbeam.model_mappings.family import Family, rename
from weightbeam.model_mappings.plan import Problem
from weightbeam.model_mappings.registry import UnknownFamilyError, family_of


def merge_release(
    checkpoint: HfCheckpoint, source: ReleaseTensors, adapters: Sequence[Adapter], named: str | None = None
) -> Merging:
    """What adapters make of a release, by the release's names.

    A sample of a stored head that is tied is read, where an adapter changes it.

    Args:
      checkpoint: the release.
      source: its tensors.
      adapters: what is merged.
      named: the family, if the user names one; else `config.json` tells, and there may be no table.

    Raises:
      UnknownFamilyError: the family was named, and there is none.
    """
    family = _family(checkpoint, named)
    aliases = family.aliases if family else {}
    spelled = {rename(name, aliases): name for name in reversed(list(source.encodings))}
    renamed = source.renamed(aliases)
    ties, problems = _ties(checkpoint, renamed, family) if adapters else (Ties(), [])
    model_type = str(checkpoint.config.get("model_type", ""))
    merging = merge(renamed.encodings, adapters, aliases, model_type, ties, source.lost | renamed.lost, checkpoint.cut)
    problems += _unlike(renamed, ties, merging)
    return dataclasses.replace(
        merging,
        encodings={**source.encodings, **{spelled[name]: merging.encodings[name] for name in merging.touched}},
        problems=(*merging.problems, *problems),
        touched={spelled[name]: by for name, by in merging.touched.items()},
        copies=frozenset(spelled[name] for name in merging.copies),
    )


def _family(checkpoint: HfCheckpoint, named: str | None) -> Family | None:
    """The family, where the model is one that there is a table for. Raises UnknownFamilyError where the family was
    named, and there is none.
    """
    try:
        return family_of(Config(checkpoint.config), None, named)
    except (ConfigError, UnknownFamilyError):
        if named:
            raise
        return None


def _ties(checkpoint: HfCheckpoint, source: ReleaseTensors, family: Family | None) -> tuple[Ties, list[Problem]]:
    """Which heads are tied; by the names alone where the table asks for more than `config.json` says."""
    config = Config(checkpoint.config)
    shapes = {name: encoding.shape for name, encoding in source.encodings.items()}
    try:
        return find_ties(config, shapes, family, Layout(shapes=shapes)), []
    except ConfigError:
        pass
    try:
        return find_ties(config, shapes), []
    except ConfigError as e:
        return Ties(), [Problem("config", "config.json", str(e).removeprefix("config.json: "))]


def _unlike(source: ReleaseTensors, ties: Ties, merging: Merging) -> Iterator[Problem]:
    """The stored heads that adapters change, or whose embedding they do, and that aren't what the configuration makes of
    them.
    """
    heads, perhaps = (
        {
            head: of
            for head, of in pairs.items()
            if head in source.encodings and not merging.touched.keys().isdisjoint((head, of))
        }
        for pairs in (ties.heads, ties.perhaps)
    )
    for head, how in source.find_unlike(heads).items():
        message = (
            f"is tied to {heads[head]} by config.json, but it isn't the same: {how}; if that is meant, set {TIE} to false in "
            "config.json"
        )
        yield Problem("adapter", head, message)
    for head in sorted(perhaps.keys() - source.find_unlike(perhaps).keys()):
        message = (
            f"is the same as {perhaps[head]}, and config.json doesn't say whether they are one weight, which an adapter would "
            f"change as one; set {TIE} to true or false in config.json"
        )
        yield Problem("adapter", head, message)
