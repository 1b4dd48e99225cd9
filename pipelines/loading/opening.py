"""What a user names as a source, opened."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping
from os import PathLike
from typing import Any

import numpy as np

from weightbeam.formats.orbax import find_items
from weightbeam.formats.orbax.source import open_orbax
from weightbeam.formats.release.adapted import merge_release
from weightbeam.formats.release.cutting import cut_release
from weightbeam.formats.release.source import open_source
from weightbeam.formats.safetensors import HfCheckpoint, is_release, open_hf
from weightbeam.formats.storage import Store, is_hub, open_store
from weightbeam.model_mappings.ops import dtype_named
from weightbeam.model_mappings.plan import PREFIX, Problem, is_float
from weightbeam.model_mappings.trees import has_scales
from weightbeam.pipelines.loading.checkpoint import Orbax
from weightbeam.pipelines.loading.release import MappedRelease, Tensors
from weightbeam.pipelines.loading.scaled import DecodedOrbax
from weightbeam.pipelines.loading.source import ArraySource
from weightbeam.pipelines.running.problems import refuse
from weightbeam.pipelines.running.sources import open_adapters, plan_with, reading
from weightbeam.pipelines.terminal.errors import Refused
from weightbeam.pipelines.terminal.keywords import as_place, check_known, read_options
from weightbeam.transforms.planning.exporting import Like
from weightbeam.transforms.planning.options import AUTO, CODED, ConvertOptions
from weightbeam.transforms.planning.tree_layouts import find_parts
from weightbeam.transforms.planning.tree_model import Model

LOG = logging.getLogger("weightbeam")
CHOICES = frozenset({
    "scan_layers", "param_scan_axis", "save_dtype", "sharding_rules", "maxtext", "maxtext_model", "vocab_size", "mtp",
    "multimodal", "lora", "family", "allow_links", "layers", "experts", "vocab_rows",
})  # fmt: skip # of `weightbeam convert`'s options those that say what the tree is, and what is in it
OF_A_RELEASE = frozenset({"scan_layers", "param_scan_axis", "maxtext", "vocab_size", "mtp", "multimodal"})
OF_A_TABLE = frozenset({"family", "maxtext_model"})
OF_MAXTEXT = frozenset({"save_dtype", "sharding_rules", "maxtext_model"})


def choose(given: Mapping[str, Any]) -> ConvertOptions:
    """The options of a plan that keywords ask for, each as on the command line.

    Raises:
      TypeError: there is no such option.
      Refused: a value can't be meant.
    """
    check_known(given, sorted(CHOICES))
    return read_options(ConvertOptions, given)


def find_commits(
    source: str | PathLike[str], options: ConvertOptions, release: str | PathLike[str] | None
) -> dict[str, str]:
    """The hub's repositories among the source, the release and the adapters, each at its commit, by what they are called.

    Raises:
      Refused: the hub doesn't say.
    """
    named = (str(source), str(release or ""), *(url for url, _ in options.lora))
    with reading(str(source)):
        return {url: open_store(url).url for url in named if is_hub(url)}


def at_commits(options: ConvertOptions, commits: Mapping[str, str]) -> ConvertOptions:
    """The options with the adapters at these commits."""
    return dataclasses.replace(options, lora=tuple((commits.get(url, url), weight) for url, weight in options.lora))


def values_asked(given: Mapping[str, Any], has_scales: bool = True) -> np.dtype | None:
    """The dtype of the values that FP8 codes of a checkpoint become; None where nobody asks for values.

    Args:
      given: the keywords.
      has_scales: whether there is a place for scales; else values are asked for, whatever the keywords say.
    """
    said = choose(given).save_dtype if "save_dtype" in given or not has_scales else CODED
    return None if said == CODED else dtype_named(said)


def find_source(
    where: str | PathLike[str],
    options: ConvertOptions,
    as_is: bool = False,
    release: str | PathLike[str] | None = None,
    values: np.dtype | None = None,
    given: Collection[str] = (),
) -> ArraySource:
    """The arrays of a release or of an Orbax checkpoint.

    Args:
      where: a folder, `gs://…`, or `hf://…`; of an Orbax checkpoint its root, a step, or the item.
      options: for a release's plan.
      as_is: the tensors of a release, or the arrays of a checkpoint, under their own names; else MaxText's arrays.
      release: of a checkpoint that doesn't tell its logical axes, a release of its model, which does.
      values: what FP8 codes of a checkpoint are decoded to; None leaves codes and scales.
      given: the options that the user has named; those that a checkpoint can't follow are refused.

    Raises:
      Refused: there is none, or problems stand against it: all of them.
    """
    if as_is and release:
        raise Refused(
            f"release={release}: tells the logical axes of MaxText's arrays, and as_is=True opens arrays under their own names; leave one out"
        )
    with reading(where := as_place("source", where)):
        store = open_store(where)
        if not is_release(store):
            _refuse_what_a_release_takes(where, options, given)
            found = Orbax(items := find_items(store), as_is)
            _refuse_what_nothing_follows(where, found, options, set(given) - (OF_A_TABLE if release else set()), as_is)
            if values is not None and not as_is and has_scales(found.stored):
                found = DecodedOrbax(items, values)
            if release:
                found.name_axes(_find_axes(items, found, as_place("release", release), options))
            return found
        checkpoint = cut_release(open_hf(store, options.allow_links), options.cut)
    if release:
        raise Refused(f"release={release}: is for an Orbax checkpoint, and {where} is a release itself; leave it out")
    if as_is:
        why = "is of MaxText's arrays, and as_is=True opens the release's own; leave one out"
        _refuse_given((OF_A_RELEASE | OF_MAXTEXT) & set(given), options, why)
        return _as_it_is(checkpoint, options)
    for note in checkpoint.notes:
        LOG.warning(note)
    conversion = plan_with(options, checkpoint)
    refuse(conversion.plan.problems, conversion.source)
    return MappedRelease(conversion)


def _refuse_what_a_release_takes(where: str, options: ConvertOptions, given: Collection[str]) -> None:
    """Refuses, for an Orbax checkpoint, what only a release can be asked for. Raises Refused: the first such option."""
    if options.lora:
        raise Refused(
            f"lora={options.lora[0][0]}: an adapter is merged into a release, and {where} is none; `weightbeam reshard --lora` merges MaxText's"
        )
    if options.cut:
        raise Refused(
            f"{options.cut}: is taken of a release, and {where} is none; `weightbeam reshard` takes --layers and --experts of an Orbax checkpoint"
        )
    why = (
        f"says what is made of a release, and {where} is an Orbax checkpoint, which is opened as it is; leave it out, or "
        "`weightbeam reshard` it"
    )
    _refuse_given(OF_A_RELEASE & set(given), options, why)


def _refuse_given(named: Collection[str], options: ConvertOptions, why: str) -> None:
    """Raises Refused where there are such options, with their values."""
    if named:
        raise Refused(f"{', '.join(f'{name}={getattr(options, name)}' for name in sorted(named))}: {why}")


def _refuse_what_nothing_follows(
    where: str, found: Orbax, options: ConvertOptions, given: Collection[str], as_is: bool
) -> None:
    """Refuses, for an Orbax checkpoint that is opened without a release of its model, what nothing of it can follow.
    Raises Refused: the first such option.
    """
    why = (
        f"says by which table a release is read, and {where} is an Orbax checkpoint; leave it out, or name a release of "
        "its model, release=…, too"
    )
    _refuse_given(OF_A_TABLE & set(given), options, why)
    has_codes = has_scales(found.stored) and (not as_is or options.save_dtype == CODED)
    if "save_dtype" not in given or options.save_dtype == AUTO or has_codes:
        return
    held = {array.dtype.name for array in found.stored.values() if is_float(array.dtype)}
    if other := sorted(held - {options.save_dtype}):
        raise Refused(
            f"save_dtype={options.save_dtype}: {where} is an Orbax checkpoint of {' and '.join(other)}, opened as it is; leave it out, or reshard it"
        )


def _find_axes(items: Store, found: Orbax, release: str, options: ConvertOptions) -> dict[str, tuple[str | None, ...]]:
    """The logical axes of a checkpoint's weights, as the table of a release's model has them. Raises Refused where it
    can't be read, has no table, or is of another model than the checkpoint.
    """
    with reading(release):
        form = Like.of(open_hf(release))
    if not form.config:
        raise Refused(f"release={release}: holds no config.json, which tells the model")
    shapes = {name: shape for name, (_, shape, _) in form.tensors.items()}
    parts, why = find_parts(open_orbax(items), Model(form.config, shapes), options.family, options.maxtext_model)
    if why:
        raise Refused(f"release={release}: {why}")
    weights = {key: array.shape for key, array in found.stored.items() if key.startswith(f"{PREFIX}.")}
    problems = [
        Problem("missing", key, f"a model like {release} has it, the checkpoint hasn't", is_array=True)
        for key in parts.keys() - weights.keys()
        if not parts[key][0].rule.spare
    ]
    for key, shape in weights.items():
        if key not in parts:
            problems.append(Problem("unused", key, f"a model like {release} hasn't it", is_array=True))
        elif parts[key][0].shape != shape:
            message = f"is {shape}, of a model like {release} it is {parts[key][0].shape}"
            problems.append(Problem("shape", key, message, is_array=True))
    refuse(sorted(problems, key=lambda problem: problem.subject))
    return {key: parts[key][0].logical_axes for key in weights if key in found.arrays}


def _as_it_is(checkpoint: HfCheckpoint, options: ConvertOptions) -> Tensors:
    """A release's own tensors, with adapters merged into them."""
    source = open_source(checkpoint)
    adapters = open_adapters(options)
    if adapters:
        source = source.merged(merge_release(checkpoint, source, adapters))
    refuse([*checkpoint.problems, *source.problems])
    return Tensors([checkpoint, *(adapter.files for adapter in adapters)], source.encodings)
