"""The layout that a checkpoint is in, by its metadata and the names and shapes of its weights; and what MaxText must be
told of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from weightbeam.formats.orbax.metadata import HANDLER
from weightbeam.formats.orbax.scaled import ScaledArray
from weightbeam.formats.orbax.source import OrbaxArray, OrbaxCheckpoint
from weightbeam.formats.text.printable import listed, printable
from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.family import Family
from weightbeam.model_mappings.maxtext_config import FILE, MaxTextConfig, maxtext_config
from weightbeam.model_mappings.naming import ModelNameError, ModelNaming
from weightbeam.model_mappings.plan import PARAMETERS, Problem, expand, key_of
from weightbeam.model_mappings.registry import UnknownFamilyError
from weightbeam.model_mappings.trees import is_scanned
from weightbeam.model_mappings.versions import DEFAULT, UNSAID, VERSIONS

EMBEDDING = f"{PARAMETERS}token_embedder.embedding"
ENCODERS = ("vision_encoder", "audio_encoder")  # where MaxText's tree has a tower
TOWERS = tuple(f"{PARAMETERS}{name}." for name in ENCODERS)
MTP = f"{PARAMETERS}mtp_block."
UNKNOWN_FAMILY = "family"  # the kind of problem where no table was found
NAME_LETTERS = 100  # of a field that nothing is about
SCAN_AXES = (1, 0, 2, 3)  # where layers may be stacked, MaxText's default first


def scan_of(source: OrbaxCheckpoint, weights: Mapping[str, object]) -> bool | None:
    """Whether layers are stacked: what the custom metadata say, else by the weights' names; None where none is a
    layer's.
    """
    said = source.custom.get("scan_layers")
    if isinstance(said, bool):
        return said
    has_layers = any("layers" in component for key in weights for component in key.split("."))
    return is_scanned(weights) if has_layers else None


def scan_axis_of(source: OrbaxCheckpoint) -> int | None:
    """Where layers are stacked, by our record; None where there is none."""
    axis = source.options.get("param_scan_axis")
    return axis if type(axis) is int and axis in SCAN_AXES else None


def version_said(source: OrbaxCheckpoint) -> str:
    """The version of MaxText that a checkpoint was written for or by: as our record says, else by Orbax's handler, which
    is another one in 0.2.5 (common/checkpointing.py).
    """
    if "options" not in source.record:
        return UNSAID if source.handler == HANDLER else DEFAULT
    version = source.options.get("maxtext", UNSAID)
    return version if version in VERSIONS else DEFAULT


def is_tower(target: str) -> bool:
    """Whether a stack, by its target, is of a tower's blocks."""
    return target.partition("/")[0] in ENCODERS


def parts_of(keys: Collection[str]) -> dict[str, Any]:
    """Which parts beside the language model arrays are of, by the names of the options that ask for them."""
    return {"mtp": any(key.startswith(MTP) for key in keys), "multimodal": any(key.startswith(TOWERS) for key in keys)}


def layout_of(
    weights: Mapping[str, OrbaxArray | ScaledArray],
    scan: bool | None,
    model: str | None,
    shapes: Mapping[str, tuple[int, ...]],
) -> Layout:
    """The layout, with the stacked axis left open.

    Args:
      weights: by MaxText's keys.
      scan: whether layers are stacked.
      model: MaxText's, where it is known.
      shapes: of the release's tensors.
    """
    return Layout(
        scan=bool(scan),
        vocab=weights[EMBEDDING].shape[0] if EMBEDDING in weights and len(weights[EMBEDDING].shape) == 2 else None,
        model=model,
        shapes=shapes,
        **parts_of(weights),
    )


def version_of(family: Family, config: Config, layout: Layout, weights: Collection[str]) -> str:
    """The version of MaxText whose arrays these are, by their keys; that of `layout` where they are those of several.

    Raises:
      ConfigError: `config.json` lacks what the table needs.
    """
    if not family.earlier:
        return layout.maxtext

    def amiss(version: str) -> int:
        parts = expand(family, config, dataclasses.replace(layout, maxtext=version))
        wanted = {key_of(path): made[0].rule.spare for path, made in parts.items()}
        return sum(key not in wanted for key in weights) + sum(
            not is_spare and key not in weights for key, is_spare in wanted.items()
        )

    return min(VERSIONS, key=lambda version: (amiss(version), version != layout.maxtext))


def config_problem(error: ConfigError | UnknownFamilyError | ModelNameError) -> Problem:
    """That there is no table for a model, or that a table can't do with its `config.json`."""
    kind = "config" if isinstance(error, ConfigError) else UNKNOWN_FAMILY
    return Problem(kind, "config.json", str(error).removeprefix("config.json: ").removeprefix("config.json "))


class Untold(str):
    """A warning that nobody can tell MaxText what it must be told, and why."""


def maxtext_of(
    family: Family, config: Config, layout: Layout, naming: ModelNaming
) -> tuple[MaxTextConfig | None, tuple[str, ...]]:
    """What MaxText must be told, and warnings of what it can't be told; nothing of a family that isn't about its models."""
    if not family.models:
        return None, ()
    try:
        maxtext = maxtext_config(family, config, layout, naming)
    except ConfigError as e:
        return None, (Untold(f"no {FILE}: {e}"),)
    warnings = [f"MaxText can't express this: {limit}" for limit in maxtext.limits]
    if maxtext.unknown:
        names = listed([printable(name, NAME_LETTERS) for name in maxtext.unknown])
        warnings.append(
            f"config.json has fields that nothing here is about: {names}; where the model's arithmetic depends on them, "
            "MaxText's logits differ"
        )
    return maxtext, tuple(warnings)
