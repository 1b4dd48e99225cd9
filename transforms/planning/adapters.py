"""An adapter of MaxText's, by its metadata: the table that it belongs to, its rank and its alpha."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from weightbeam.formats.adapters.config import is_alpha
from weightbeam.formats.orbax.source import OrbaxArray, OrbaxCheckpoint
from weightbeam.model_mappings.adapters import adapter_family, adapter_table
from weightbeam.model_mappings.cells import Part
from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.family import Family
from weightbeam.model_mappings.naming import ModelNameError, check_made_for, name_model
from weightbeam.model_mappings.plan import Problem, expand, key_of
from weightbeam.model_mappings.registry import UnknownFamilyError, family_of
from weightbeam.model_mappings.trees import is_lora, is_scanned
from weightbeam.model_mappings.versions import VERSIONS
from weightbeam.transforms.planning.layouts import SCAN_AXES, version_said


@dataclasses.dataclass(frozen=True)
class AdapterParts:
    """An adapter of MaxText's by the table that it belongs to.

    Attributes:
      parts: the table's, by the key of the array that each reads.
      rank, alpha: of all modules.
      problems: what stands against it.
      family, model: whose table it is, and the MaxText model; None where that isn't known.
    """

    parts: Mapping[str, Part]
    rank: int
    alpha: float
    problems: tuple[Problem, ...]
    family: Family | None = None
    model: str | None = None


def is_adapter(source: OrbaxCheckpoint) -> bool:
    """Whether a checkpoint holds the factors of a LoRA and nothing else."""
    return is_lora(source.weights)


def said_of(source: OrbaxCheckpoint) -> Mapping[str, Any]:
    """What an adapter's metadata say of its scaling, `lora_rank` and `lora_alpha`; empty where they say nothing."""
    said = source.custom.get("lora")
    return said if isinstance(said, Mapping) else {}


def read_adapter(
    source: OrbaxCheckpoint,
    config: Mapping[str, Any],
    alpha: float | None = None,
    model: str | None = None,
    axis: int | None = None,
) -> AdapterParts:
    """Finds the table of an adapter, by its metadata.

    Args:
      source: a checkpoint for which `is_adapter` holds.
      config: `config.json` of the release that it is an adapter of.
      alpha: where the checkpoint doesn't say it.
      model: the MaxText model, where neither the checkpoint nor `config.json` settles it.
      axis: on which the layers are stacked; None for what the checkpoint says, or its shapes.
    """
    rank, alpha, problems = _scaling(source, alpha)
    said = source.options
    recorded, named = said.get("param_scan_axis"), said.get("maxtext_model")
    if ("param_scan_axis" in said and type(recorded) is not int) or not isinstance(named, str | None):
        message = f"its record names the axis of layers {str(recorded)[:80]!r} and the model {str(named)[:80]!r}, which can't be meant"
        problems.append(Problem("adapter", source.root, message))
        return AdapterParts({}, rank, alpha, tuple(problems))
    model = model or named
    weights, about = source.weights, Config(config)
    try:
        family = family_of(about, model)
        naming = name_model(family, about, model)
        check_made_for(family, source.record, naming.model, source.root)
        layout = _made_for(family, about, _layout(source, naming.model), rank, source)
        axis = recorded if axis is None else axis
        axes = SCAN_AXES if axis is None else (axis,)
        tried = [
            _parts(family, about, dataclasses.replace(layout, scan_axis=each), rank, weights)
            for each in (axes if layout.scan else axes[:1])
        ]
    except (ConfigError, UnknownFamilyError, ModelNameError) as e:
        problems.append(Problem("config", "config.json", str(e)))
        return AdapterParts({}, rank, alpha, tuple(problems))
    faults = [list(_find_faults(parts, weights)) for parts, _ in tried]
    fewest = min(faults, key=len)
    parts, unknown = tried[faults.index(fewest)]
    fitting = [other for (other, _), wrong in zip(tried, faults, strict=True) if not wrong]
    if any(_places(other) != _places(parts) for other in fitting):
        message = (
            "its shapes fit several axes of layers, and it doesn't say which; weightbeam export takes --param_scan_axis"
        )
        problems.append(Problem("adapter", source.root, message))
    problems += [
        Problem("unused", key, f"the {family.name} table has no kernel that it is a factor of", is_array=True)
        for key in unknown
    ]
    problems += fewest
    return AdapterParts(parts, rank, float(alpha), tuple(problems), family, naming.model)


def _scaling(source: OrbaxCheckpoint, alpha: float | None) -> tuple[int, float, list[Problem]]:
    """The rank of all factors, the alpha that the checkpoint names, or else this one, and what is wrong with them."""
    problems = []
    said = said_of(source)
    ranks = {array.shape[-1] for key, array in source.weights.items() if key.endswith("_lora_a") and array.shape}
    rank = next(iter(ranks), 0)
    if len(ranks) != 1 or repr(said.get("lora_rank", rank)) != repr(rank):
        message = f"its factors have the ranks {sorted(ranks)}, its metadata say {str(said.get('lora_rank'))[:80]}"
        problems.append(Problem("adapter", source.root, message))
    alpha = said.get("lora_alpha", alpha)
    if alpha is not None and not is_alpha(alpha):
        message = (
            f"its metadata say that alpha is {str(alpha)[:80]!r}; it should be a number above 0 that float32 holds"
        )
        problems.append(Problem("adapter", source.root, message))
    elif alpha is None:
        message = "doesn't say what its product is scaled by (alpha / rank); name it with --lora_alpha"
        problems.append(Problem("adapter", source.root, message))
    return rank, float(alpha) if is_alpha(alpha) else 1.0, problems


def _layout(source: OrbaxCheckpoint, model: str | None) -> Layout:
    """The layout that an adapter is in, but for the axis on which its layers are stacked."""
    weights, scan = source.weights, source.custom.get("scan_layers")
    return Layout(
        scan=scan if isinstance(scan, bool) else is_scanned(weights),
        vocab=None,
        mtp=any(".mtp_block." in key for key in weights),
        multimodal=any("_encoder." in key for key in weights),
        model=model,
        shapes={},
    )


def _made_for(family: Family, config: Config, layout: Layout, rank: int, source: OrbaxCheckpoint) -> Layout:
    """The same layout of the version of MaxText whose kernels these are factors of: that which the checkpoint names, if all
    of them are.
    """
    versions = dict.fromkeys((version_said(source), *VERSIONS))
    layouts = [dataclasses.replace(layout, maxtext=version) for version in versions]
    if not family.earlier:
        return layouts[0]
    return min(layouts, key=lambda each: len(_parts(family, config, each, rank, source.weights)[1]))


def _find_faults(parts: Mapping[str, Part], weights: Mapping[str, OrbaxArray]) -> Iterator[Problem]:
    """The factors of other shapes than the table's, and those that lack the other factor of their product."""
    for key, part in parts.items():
        if weights[key].shape != part.shape:
            message = f"{weights[key].shape} in the checkpoint, by config.json it is {part.shape}"
            yield Problem("shape", key, message, is_array=True)
        other = f"{key[:-1]}{'b' if key.endswith('a') else 'a'}"
        if other not in weights:
            message = f"the checkpoint holds {key}, and a product has two factors"
            yield Problem("missing", other, message, is_array=True)


def _places(parts: Mapping[str, Part]) -> dict[str, object]:
    """Which factor of the table's lies on which axis of each array."""
    return {key: part.target_axes for key, part in parts.items()}


def _parts(
    family: Family, config: Config, layout: Layout, rank: int, weights: Mapping[str, OrbaxArray]
) -> tuple[dict[str, Part], list[str]]:
    """The part that reads each factor back, and the factors that no kernel of the table has."""
    stacks = family.table(config, layout)
    adapted = set()
    for stack in stacks:
        for rule in stack.rules:
            path = "/".join(filter(None, (stack.collection, stack.target, rule.target)))
            if rule.source and not rule.name_axes and f"{key_of(path)}_lora_a" in weights:
                adapted |= {(stack.source + rule.source).format(layer=layer) for _, layer in stack.places}
    table = adapter_table(stacks, adapted)
    own = adapter_family(family, table.stacks, rank)
    shapes = dict.fromkeys(table.factors, ())
    found = {
        key_of(path).removesuffix(".value"): parts[0]
        for path, parts in expand(own, config, dataclasses.replace(layout, shapes=shapes)).items()
    }
    return {key: part for key, part in found.items() if key in weights}, sorted(set(weights) - set(found))
