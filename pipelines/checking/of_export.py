"""An export against its checkpoint: the conversion back of what its headers say."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from weightbeam.formats.orbax import open_arrays
from weightbeam.formats.orbax.source import open_orbax
from weightbeam.formats.record.naming import is_name
from weightbeam.formats.safetensors import SINGLE, HfCheckpoint, open_hf
from weightbeam.formats.storage import Store, open_store, reason
from weightbeam.formats.storage.held import held
from weightbeam.formats.storage.identity import check_together
from weightbeam.formats.targets.published import record_of
from weightbeam.model_mappings.config import QUANTIZATIONS, Config, Layout
from weightbeam.model_mappings.family import Prediction, rename
from weightbeam.model_mappings.plan import Problem
from weightbeam.model_mappings.registry import family_of
from weightbeam.model_mappings.trees import has_scales, is_scanned
from weightbeam.pipelines.checking.recorded import options_made_with, options_of_export, recorded_options
from weightbeam.pipelines.checking.subject import Subject, compare_trees, plan_as
from weightbeam.pipelines.running.problems import refuse
from weightbeam.pipelines.running.sources import open_release
from weightbeam.pipelines.terminal.errors import Refused
from weightbeam.transforms.comparing.counterparts import Counterpart, copied, find_taken
from weightbeam.transforms.comparing.release_faults import find_dtype_faults, find_release_faults
from weightbeam.transforms.planning.conversion import Conversion
from weightbeam.transforms.planning.conversion_planner import COPY
from weightbeam.transforms.planning.layouts import TOWERS

COPIED = "those that they are copies of"


def plan_against_checkpoint(release: str, checkpoint: str, given: Mapping[str, Any]) -> Subject:
    """Plans the comparison of an export with its checkpoint: the conversion back of what its headers say, by the same
    table and model.
    """
    with held(open_store(release)) as view:
        return _plan(view, checkpoint, given)


def _plan(release: Store, checkpoint: str, given: Mapping[str, Any]) -> Subject:
    """Plans the comparison of an export with its checkpoint. The export's files are held: its small files are those that
    lay beside its tensors at first.
    """
    if given.get("lora"):
        raise Refused(f"--lora: is of a conversion; {release} is an export, which knows its own adapters; leave it out")
    opened = open_orbax(checkpoint)
    accept = given.get("accept") or ()
    asked = options_of_export(release) | {name: value for name, value in given.items() if value is not None}
    items, keys = open_store(opened.root), dict(opened.tree.weights)
    if asked.get("multimodal") is False:  # what it has of towers isn't the export's
        keys = {name: key for name, key in keys.items() if not name.startswith(TOWERS)}
    stores = open_arrays(items)
    weights = {name: stores[key] for name, key in keys.items()}
    exported = open_release(release.url)
    check_together(release, exported.opened, release.list())
    if has_scales(weights) and not any(exported.config.get(field) for field in QUANTIZATIONS):
        raise Refused(
            f"{release}: holds the values of {checkpoint}'s FP8 codes, each rounded once, which verify doesn't make; "
            "`weightbeam diff` compares both"
        )
    options = options_made_with(items, weights, {"scan_layers": is_scanned(weights), **asked}, exported.config)
    options = dataclasses.replace(options, lora=(), adapter_only=False)
    record, remembered = record_of(release), opened.record.get("config")
    faults, notes = find_release_faults(
        release,
        record,
        remembered if isinstance(remembered, Mapping) else {},
        [accept] if isinstance(accept, str) else accept,
    )
    if SINGLE in dict((*faults, *notes)):  # put beside the export's own files: that is told, and may be accepted
        others = tuple(problem for problem in exported.problems if problem.subject != SINGLE)
        exported = dataclasses.replace(exported, problems=others)
    axis = asked.get("param_scan_axis", recorded_options(items).get("param_scan_axis"))
    conversion = plan_as(options, exported, weights, is_settled=axis is not None)
    refuse(_problems(conversion), conversion.source)
    counterparts, wrong, unjudged, parts = _find_counterparts(conversion, record.get("taken"), given.get("like"))
    wrong = (*compare_trees(conversion, weights), *wrong, *faults, *find_dtype_faults(exported.tensors, record))
    return Subject(
        items,
        conversion,
        wrong,
        keys,
        exported=True,
        counterparts=counterparts,
        unjudged=unjudged,
        notes=tuple(notes),
        digested=opened,
        sources=(*conversion.sources, opened, *parts),
    )


def _problems(conversion: Conversion) -> Sequence[Problem]:
    """What stands against an export, but for copies that differ: all of each is compared, which says more."""
    problems = conversion.plan.problems
    if not any(problem.kind == COPY for problem in problems):
        return problems
    judged = copied(conversion.encodings, find_left_out(conversion)[1])
    return [problem for problem in problems if problem.kind != COPY or problem.subject not in judged]


def _find_counterparts(
    conversion: Conversion, record: Any, like: str | None
) -> tuple[dict[str, list[Counterpart]], list[tuple[str, str]], dict[str, str], list[HfCheckpoint]]:
    """An export's tensors that no array makes, with what they should be.

    Args:
      record: what the export says of the tensors that it has from a release.
      like: that release, where it isn't where the export says.

    Returns:
      The counterparts by what they are; what is wrong with those that have none; the tensors that nothing is known of,
      each with the reason why the table leaves it out; the releases that are read.

    Raises:
      Refused: the release can't be read.
    """
    names = _names_taken(record)
    if like and not names:
        raise Refused(f"--like: {conversion.source.root} has nothing from a release; leave it out")
    found: dict[str, list[Counterpart]] = {}
    wrong: dict[str, str] = {}
    parts: list[HfCheckpoint] = []
    if names:
        parts.append(release := _open_like(conversion.source.root, record.get("from"), like))
        found[f"{release.root}, which they were taken from"], wrong = find_taken(conversion.source, release, names)
    left, copies = find_left_out(conversion, names)
    if pairs := copied(conversion.encodings, copies):
        found[COPIED] = list(pairs.values())
    return found, list(wrong.items()), {name: why for name, why in left.items() if name not in pairs}, parts


def _names_taken(record: Any) -> list[str]:
    """The tensors that an export has from a release, by its own names, as its record says."""
    said = record.get("tensors") if isinstance(record, Mapping) else None
    return [name for name in said if isinstance(name, str)] if isinstance(said, list) else []


def find_left_out(conversion: Conversion, names: Sequence[str] = ()) -> tuple[dict[str, str], dict[str, str]]:
    """A release's tensors that the table leaves out, but for those of the `names`: each with the reason; and the copies
    among them, each with the tensor that it is a copy of.
    """
    config, options = Config(conversion.source.config), conversion.options
    family = family_of(config, options.maxtext_model, options.family)
    judged = {rename(name, family.aliases) for name in names}
    left = {
        name: why
        for name, why in conversion.plan.dropped.items()
        if name not in judged and name in conversion.encodings
    }
    copies = {
        copy: original
        for copy, original in family.copies(config, Layout()).items()
        if copy in left and not isinstance(left[copy], Prediction)
    }
    return left, copies


def _open_like(export: str, said: object, like: str | None) -> HfCheckpoint:
    """The release that towers or prediction layers were taken from.

    Args:
      said: where the export says that it is.
      like: where it is, if it isn't there.

    Raises:
      Refused: it can't be read, or nothing says where it is.
    """
    if not like and is_name(said):
        raise Refused(f"{export} has tensors of {said}, which is a name and no place; --like says where it is")
    url = like or str(said)
    try:
        return open_hf(url)
    except OSError as e:
        raise Refused(
            f"{url}, which the export has towers or prediction layers from, can't be read ({reason(e)}); name it with --like"
        ) from e
