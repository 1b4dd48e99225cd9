"""The planner of an export: from a checkpoint's metadata and a release's headers to the plan, in named steps. No value
is read.

metadata, config.json, headers of the release
  │  family_of, name_model   whose table it is, and which of MaxText's models
  │  _find_arrays            the table's arrays as the checkpoint has them, and the layout that they are in
  │  _audit                  the tensors that they become against the release's; what it has and the checkpoint hasn't
  │  _names                  what each tensor is called in the release, copies of it included
  │  merge                   adapters that are added on the way
  │  _carried                towers and prediction layers that the release has and the checkpoint hasn't
  │  _form                   what each tensor is written as: its dtype, or codes and scales
  │  plan_files              which tensor goes into which file, at which byte
  ▼  cut                     blocks of whole chunks, units (`chunk_blocks.py`)
Export
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from weightbeam.formats.adapters import Adapter, merge
from weightbeam.formats.encodings import Encoding, Plain
from weightbeam.formats.orbax_source import OrbaxArray, OrbaxCheckpoint, load_checkpoint
from weightbeam.formats.release import NEXTN
from weightbeam.formats.safetensors import HfCheckpoint
from weightbeam.formats.sources import Source, open_source, stored_tensors
from weightbeam.model_mappings.audit import audit, drop_reason
from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.family import Family, Prediction, Tower, Variable, rename
from weightbeam.model_mappings.naming import name_model
from weightbeam.model_mappings.ops import inverses
from weightbeam.model_mappings.plan import PARAMETERS, Array, Plan, Problem, TensorSpec, expand, holds, is_float, key_of
from weightbeam.model_mappings.registry import UnknownFamilyError, family_of
from weightbeam.transforms.carrying import row_units
from weightbeam.transforms.chunk_blocks import Cut, chunk_blocks, chunk_grid, cut
from weightbeam.transforms.exporting import DTYPES, Export, Like, dtype_of_model
from weightbeam.transforms.files import FileLayout, plan_files
from weightbeam.transforms.layouts import (
    EMBEDDING,
    MTP,
    SCAN_AXES,
    TOWERS,
    layout_of,
    maxtext_of,
    scan_axis_of,
    scan_of,
)
from weightbeam.transforms.options import AUTO, ExportOptions, options_from
from weightbeam.transforms.quantizing import (
    REASON,
    Entry,
    Given,
    find_quantised,
    in_blocks,
    quantization_config,
    with_scales,
)
from weightbeam.transforms.rows import VALUES, made_here
from weightbeam.transforms.tensor_rows import rows_of
from weightbeam.transforms.text_model import has_towers, text_class, text_model
from weightbeam.transforms.units import Block, find_twins


class _Released(NamedTuple):
    """A tensor of the release whose form the export takes; `name` is the release's own for it."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    name: str


@dataclasses.dataclass(frozen=True)
class _Form:
    """What the tensors are written as.

    Attributes:
      dtypes: of the values that are made, by the table's names; float32 of what is quantised, which isn't rounded
        before.
      entries: every tensor before it is quantised, by the release's names.
      quantised: those that become codes and scales, by the release's names.
      coded: the same by the table's names.
    """

    dtypes: Mapping[str, np.dtype]
    entries: Sequence[Entry]
    quantised: frozenset[str]
    coded: frozenset[str]


def plan_export(
    options: ExportOptions,
    source: OrbaxCheckpoint,
    like: Like,
    adapters: Sequence[Adapter] = (),
    given: Given | None = None,
    slots: int | None = None,
    parts: HfCheckpoint | None = None,
) -> Export:
    """Plans an export. What stands against it is in `plan.problems`.

    Args:
      given: `like`, where it is in FP8 and what is written is to be so too.
      parts: the release that towers and prediction layers may be taken from, which has the names of `like`.
      slots: units at a time that they are cut for, if that is known; see `units.target_bytes`.
    """
    config = Config(like.config)
    model = options.maxtext_model or _said_model(source)
    try:
        family = family_of(config, model, options.family)
        likeness = text_model(like, family) if options.multimodal is False else like
        config = Config(likeness.config)
        naming = name_model(family, config, model)
        released = _released(likeness, family)
        arrays, layout, problems, lacking = _find_arrays(options, source, family, config, naming.model, released)
        release = open_source(parts) if parts else None
        problems, variables = _variables(problems, lacking, released, release)
        drops = {**variables, **family.drops(config, layout)}
        copies = {
            copy: original
            for copy, original in family.copies(config, layout).items()
            if copy in released and not isinstance(drop_reason(copy, drops), Prediction)
        }
    except (ConfigError, UnknownFamilyError) as e:
        return _without_table(options, source, like, e)
    shapes = _tensor_shapes(arrays)
    specs = _specs(shapes, released, copies, likeness)
    dropped, found = audit(arrays, specs, drops, family.name)
    problems += [
        problem
        for problem in found
        if (released or problem.kind != "missing") and (problem.kind != "unused" or problem.subject not in lacking)
    ]
    names, dropped = _names(shapes, released, copies, dropped)
    taken = {
        name: reason
        for name, reason in dropped.items()
        if release and _is_taken(options, reason) and released[name].name in release.encodings
    }
    problems += _without_parts(options, arrays, taken, parts)
    problems = _another_model(problems, source, like, config) + problems
    spelled = [released[name].name for name in taken]
    carried = _carried(parts, release, spelled, bool(given)) if parts and release else {}
    dropped = {name: reason for name, reason in dropped.items() if name not in taken}
    merging = merge(
        {name: made_here(name, shape) for name, shape in shapes.items()},
        adapters,
        family.aliases,
        str(config.get("model_type")),
    )
    merged = {name: merging.encodings[name] for name in merging.touched}
    if not problems:
        problems += [*merging.problems, *merging.in_vain(drops), *_needing_columns(merged)]
    form = _form(options, arrays, source.weights, names, shapes, specs, bool(options.quantize) and not problems, given)
    if options.quantize and not problems:
        if given:
            left = {released[name].name for name in {*dropped, *taken} if name in released}
            problems += [*given.problems, *given.missing(form.entries, left), *_not_in_blocks(form, given)]
        elif not form.quantised:
            problems.append(Problem("quantised", source.root, "none of its weights is one that is quantised"))
    files, made = None, Cut()
    others = [(name, _target_dtype(options, _stored_dtype(one)), one.shape) for name, one in carried.items()]
    if not problems:
        order = {tensor.name: tensor.file for tensor in released.values()}
        entries = [*with_scales(form.entries, form.quantised), *others]
        files = plan_files(entries, order or None, options.max_shard_size)
        made = cut(arrays, source.weights, _element_bytes(form, merged), form.coded, options.unit_bytes, slots)
        problems += made.problems
    maxtext, _ = maxtext_of(family, config, layout, naming)
    left_out = {released[name].name if name in released else name: reason for name, reason in dropped.items()}
    note = family.note(config, layout)
    return Export(
        options,
        source,
        like,
        Plan(family.name, arrays, left_out, tuple(problems), note, family.support, naming.model, naming.sizes, maxtext),
        names,
        files,
        made.grids,
        made.units + _carrying(carried, len(arrays), files, options.unit_bytes, slots) if files else made.units,
        _lossy(arrays, form, names, merged) | _rounded_again(carried, others),
        _config_edits(config, arrays, shapes, drops, taken)
        | {field: likeness.config[field] for field in ("architectures", "model_type") if likeness is not like},
        likeness,
        (*(files.warnings if files else ()), *_warn_of_towers(dropped, like, family), *_warn_of_variables(taken, like)),
        tuple(adapters),
        merged,
        quantised=form.quantised,
        quantization={}
        if not form.quantised
        else given.quantization_config
        if given
        else quantization_config([*form.entries, *others], form.quantised),
        given=given,
        carried=carried,
        parts=parts if carried else None,
        unpacked=made.unpacked,
        slots=slots,
    )


def _without_table(
    options: ExportOptions, source: OrbaxCheckpoint, like: Like, error: ConfigError | UnknownFamilyError
) -> Export:
    """The export of a model that there is no table for, or whose `config.json` a table can't do with: the one problem."""
    kind = "config" if isinstance(error, ConfigError) else "family"
    text = str(error).removeprefix("config.json: ").removeprefix("config.json ")
    return Export(
        options,
        source,
        like,
        Plan("unknown", (), {}, (Problem(kind, "config.json", text),)),
        {},
        None,
        (),
        (),
        {},
        {},
        like,
    )


def _another_model(problems: Sequence[Problem], source: OrbaxCheckpoint, like: Like, config: Config) -> list[Problem]:
    """That the release is of another model, where as many arrays are amiss as would be of one like it."""
    wrong = sum(problem.is_array and problem.kind in ("shape", "unused", "missing") for problem in problems)
    if 2 * wrong <= len(source.tree.weights):
        return []
    before = source.record.get("config")
    theirs = before.get("model_type") if isinstance(before, Mapping) else None
    other = f" but a {theirs}" if theirs else ""
    message = f"is a {config.get('model_type')} model, and the checkpoint isn't that one{other}: {wrong:,} arrays have other names or shapes"
    return [Problem("like", like.root or "config.json", message)]


def _said_model(source: OrbaxCheckpoint) -> str | None:
    """The MaxText model that a checkpoint of ours was made for."""
    made = source.record.get("options")
    model = made.get("maxtext_model") if isinstance(made, dict) else None
    return model if isinstance(model, str) else None


def _released(like: Like, family: Family) -> dict[str, _Released]:
    """The release's tensors by the table's names."""
    return {
        rename(name, family.aliases): _Released(dtype, shape, file, name)
        for name, (dtype, shape, file) in like.tensors.items()
    }


def _find_arrays(
    options: ExportOptions,
    source: OrbaxCheckpoint,
    family: Family,
    config: Config,
    model: str | None,
    released: Mapping[str, _Released],
) -> tuple[tuple[Array, ...], Layout, list[Problem], Mapping[str, str]]:
    """The arrays of the table, as the checkpoint has them; the layout that it is in; where they differ; and the tensors
    that would be made of those that aren't there, each with its array.

    Raises:
      ConfigError: `config.json` lacks what the table needs.
    """
    weights = source.weights
    if options.multimodal is False:
        weights = {key: weight for key, weight in weights.items() if not key.startswith(TOWERS)}
    said = options.param_scan_axis if options.param_scan_axis is not None else scan_axis_of(source)
    axes = SCAN_AXES if said is None else (said,)
    base = layout_of(
        weights, scan_of(source, weights), model, {name: tensor.shape for name, tensor in released.items()}
    )
    tried = []
    for axis in axes:
        layout = dataclasses.replace(base, scan_axis=axis)
        parts = expand(family, config, layout)
        problems, arrays, lacking = [], [], dict[str, str]()
        for path, same in parts.items():
            key = key_of(path)
            if all(part.rule.source is None for part in same):
                continue
            if key not in weights:
                message = f"the {family.name} table makes tensors of it, but the checkpoint doesn't hold it"
                if not key.startswith(PARAMETERS):
                    message += (
                        "; it is no parameter, which MaxText's converter leaves out: --like RELEASE takes it from there"
                    )
                problems.append(Problem("missing", key, message, is_array=True))
                lacking |= {name: key for part in same for name in part.tensors}
            elif weights[key].shape != same[0].shape:
                message = f"{weights[key].shape} in the checkpoint, by config.json it is {same[0].shape}"
                problems.append(Problem("shape", key, message, is_array=True))
            else:
                fill = next((part.rule.fill for part in same if part.rule.fill is not None), None)
                arrays.append(Array(key, same[0].shape, weights[key].dtype, same[0].logical_axes, tuple(same), fill))
        known = {key_of(path) for path in parts}
        for key in weights:
            if key not in known:
                problems.append(Problem("unused", key, f"the {family.name} table makes no tensor of it", is_array=True))
        tried.append((problems, tuple(arrays), layout, lacking))
        if not layout.scan:
            break
    fitting = [one for one in tried if not one[0]]
    if (
        len(fitting) > 1
        and len(
            {
                tuple((a.key, tuple(f for p in a.parts for f in p.target_axes)) for a in arrays)
                for _, arrays, _, _ in fitting
            }
        )
        > 1
    ):
        choices = " or ".join(str(layout.scan_axis) for _, _, layout, _ in fitting)
        message = f"the shapes fit {choices}, and the checkpoint doesn't say where its layers are stacked; name it"
        return fitting[0][1], fitting[0][2], [Problem("option", "--param_scan_axis", message)], {}
    problems, arrays, layout, lacking = fitting[0] if fitting else min(tried, key=lambda one: len(one[0]))
    return arrays, layout, list(problems), lacking


def _variables(
    problems: Sequence[Problem], lacking: Mapping[str, str], released: Mapping[str, _Released], release: Source | None
) -> tuple[list[Problem], dict[str, Variable]]:
    """What a checkpoint lacks that isn't a parameter in MaxText, such as DeepSeek V4's routing tables: no problem where
    the release has it, from which it is taken.

    Args:
      lacking: tensors that the checkpoint's arrays don't make, each with the array that would.
      release: what can be taken.

    Returns:
      The problems that stay; and why these tensors aren't made.
    """
    held = {
        name: release is not None and name in released and released[name].name in release.encodings for name in lacking
    }
    wanting = {key for name, key in lacking.items() if key.startswith(PARAMETERS) or not held[name]}
    variables = {
        name: Variable("no parameter in MaxText, and not in the checkpoint")
        for name, key in lacking.items()
        if key not in wanting
    }
    explained = {lacking[name] for name in variables}
    return [problem for problem in problems if problem.kind != "missing" or problem.subject not in explained], variables


def _tensor_shapes(arrays: Iterable[Array]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that arrays are made into: as far as their windows reach."""
    shapes: dict[str, tuple[int, ...]] = {}
    for array in arrays:
        for part in array.parts:
            reach = tuple(indices[-1] + 1 for indices in part.source_box())
            for name in part.tensors:
                held = shapes.get(name, reach)
                shapes[name] = tuple(map(max, held, reach))
    return shapes


def _specs(
    shapes: Mapping[str, tuple[int, ...]], released: Mapping[str, _Released], copies: Mapping[str, str], like: Like
) -> dict[str, TensorSpec]:
    """What the audit compares: the tensors that arrays become and those that the release has, in its dtypes; but for
    copies of others.
    """
    said = DTYPES[dtype_of_model(like.config) or "bfloat16"]
    specs = {name: TensorSpec(shape, said, like.root or "the table") for name, shape in shapes.items()}
    for name, (dtype, shape, file, _) in released.items():
        if name not in copies:
            specs[name] = TensorSpec(shapes.get(name, shape), _dtype(dtype), file)
    return specs


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def _names(
    shapes: Iterable[str], released: Mapping[str, _Released], copies: Mapping[str, str], dropped: Mapping[str, str]
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """What each tensor is called in the release, the copies of it included, by the table's name; and what is left out
    of the release.
    """
    names: dict[str, tuple[str, ...]] = {name: (released[name].name if name in released else name,) for name in shapes}
    written = {copy: original for copy, original in copies.items() if original in names}
    for copy, original in written.items():
        names[original] += (released[copy].name,)
    return names, {name: reason for name, reason in dropped.items() if "[" not in name and name not in written}


def _is_taken(options: ExportOptions, reason: str) -> bool:
    """Whether what is left out for a reason is taken from the release: towers, unless the language model alone is
    wanted, prediction layers where they are, and what is no parameter in MaxText.
    """
    if isinstance(reason, Tower):
        return options.multimodal is not False
    if isinstance(reason, Variable):
        return True
    return isinstance(reason, Prediction) and options.mtp


def _without_parts(
    options: ExportOptions, arrays: Iterable[Array], taken: Mapping[str, str], parts: HfCheckpoint | None
) -> Iterator[Problem]:
    """Parts of the model that are asked for, and that neither the checkpoint has nor a release."""
    keys = [array.key for array in arrays]
    for option, asked, kind, held, what in (
        ("--multimodal", options.multimodal, Tower, TOWERS, "towers"),
        ("--mtp", options.mtp, Prediction, MTP, "prediction layers"),
    ):
        has = any(isinstance(reason, kind) for reason in taken.values()) or any(key.startswith(held) for key in keys)
        if asked and not has:
            where = "the release has none either" if parts else "no release is named that has them; name it with --like"
            yield Problem("option", option, f"the checkpoint has no {what}, and {where}")


def _carried(parts: HfCheckpoint, release: Source, names: Sequence[str], as_stored: bool) -> dict[str, Encoding]:
    """Tensors of a release by name: their values, or codes and scales as they are stored."""
    if not as_stored:
        return {name: release.encodings[name] for name in sorted(names)}
    stored = {one for name in names for one in stored_tensors(parts, release, name)}
    return {name: Plain(parts.tensors[name]) for name in sorted(stored)}


def _stored_dtype(encoding: Encoding) -> np.dtype:
    """Of the values: those that are computed are bfloat16, as `Like` has them."""
    return encoding.weight.dtype if encoding.label is None else DTYPES["bfloat16"]


def _carrying(
    carried: Mapping[str, Encoding], first: int, files: FileLayout, unit_bytes: int, slots: int | None
) -> tuple[tuple[Block, ...], ...]:
    """The units of the tensors that are taken from the release; they count as arrays behind the last."""
    return tuple(
        tuple(dataclasses.replace(block, array=first + block.array) for block in unit)
        for unit in row_units(carried, files, unit_bytes, (), slots)
    )


def _rounded_again(carried: Mapping[str, Encoding], written: Iterable[Entry]) -> dict[str, str]:
    """Of the tensors that are taken from the release, those whose values aren't its own to the bit."""
    reasons = {}
    for name, dtype, _ in written:
        had, label = _stored_dtype(carried[name]), carried[name].label
        if label or (is_float(had) and not holds(dtype, had)):
            reasons[name] = f"{label or had.name}, rounded to {dtype.name}"
    return reasons


def _warn_of_towers(dropped: Mapping[str, str], like: Like, family: Family) -> Iterator[str]:
    """Towers that stay out: those that `config.json` goes on to describe, since no field of it can take them back, and
    others.
    """
    towers = [reason for reason in dropped.values() if isinstance(reason, Tower)]
    config = Config(like.config)
    ways = ["--like RELEASE takes them from the release"]
    if has_towers(family, config) and text_class(config, family):
        ways.append("--multimodal false writes the language model alone")
    of, hint = like.root or "the release", ", ".join(ways)
    if described := sum(not tower.absent for tower in towers):
        yield (
            f"config.json describes towers that the checkpoint doesn't hold ({described:,} tensors of {of}), "
            f"so loaders miss them: {hint}"
        )
    if fields := dict.fromkeys(field for tower in towers for field in tower.absent):
        yield (
            f"parts that the checkpoint doesn't hold stay out ({len(towers) - described:,} tensors of {of}), and config.json says so "
            f"({', '.join(fields)}): {hint}"
        )


def _warn_of_variables(taken: Mapping[str, str], like: Like) -> Iterator[str]:
    """What training may have changed, and the checkpoint doesn't hold."""
    if variables := [name for name, reason in taken.items() if isinstance(reason, Variable)]:
        yield (
            f"{len(variables):,} tensors that the checkpoint doesn't hold are those of {like.root}, as before any training: "
            f"no parameters in MaxText, such as {variables[0]}"
        )


def _needing_columns(merged: Mapping[str, Encoding]) -> Iterator[Problem]:
    """Merged tensors of which a unit, which makes whole rows, can't make any box by itself: DoRA's norms over a column
    each.
    """
    for name, encoding in merged.items():
        if 0 in encoding.indivisible:
            yield Problem(
                "adapter",
                name,
                "DoRA on a weight that is stored transposed needs whole columns; merge it into the release, with weightbeam merge",
            )


def _form(
    options: ExportOptions,
    arrays: Sequence[Array],
    weights: Mapping[str, OrbaxArray],
    names: Mapping[str, tuple[str, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    specs: Mapping[str, TensorSpec],
    quantize: bool,
    given: Given | None,
) -> _Form:
    """What each tensor is written as."""
    dtypes = {name: _target_dtype(options, specs[name].dtype) for name in shapes}
    entries = [(one, dtypes[name], shapes[name]) for name, ones in names.items() for one in ones]
    quantised = _quantised(options.unit_bytes, arrays, weights, names, entries, given) if quantize else frozenset[str]()
    coded = frozenset(name for name, ones in names.items() if quantised.intersection(ones))
    return _Form(dtypes | dict.fromkeys(coded, VALUES), entries, quantised, coded)


def _not_in_blocks(form: _Form, given: Given) -> Iterator[Problem]:
    """The weights that a given release has as codes, and whose parts, in arrays of their own, don't begin and end at
    blocks.
    """
    for name, _, _ in form.entries:
        if name in given.scales and name not in form.quantised:
            yield Problem(
                "quantised",
                name,
                f"{given.files.root} has it in FP8, but its parts in the checkpoint don't begin at blocks; export it, then quantize that",
            )


def _target_dtype(options: ExportOptions, released: np.dtype) -> np.dtype:
    return DTYPES[options.save_dtype] if options.save_dtype != AUTO and is_float(released) else released


def _quantised(
    unit_bytes: int,
    arrays: Sequence[Array],
    weights: Mapping[str, OrbaxArray],
    names: Mapping[str, tuple[str, ...]],
    wanted: Sequence[Entry],
    given: Given | None,
) -> frozenset[str]:
    """The tensors that are written as codes; those stay as they are whose parts, in arrays of their own, don't begin
    and end at blocks of rows.
    """
    codes = find_quantised(wanted, given)
    shapes = {name: shape for name, _, shape in wanted}
    coded = frozenset(name for name, ones in names.items() if codes.intersection(ones))
    held = [array for array in arrays if any(name in coded for part in array.parts for name in part.tensors)]
    sizes = dict.fromkeys(
        itertools.chain.from_iterable(part.tensors for array in held for part in array.parts), 2 * VALUES.itemsize + 1
    )
    grids = [chunk_grid(array, weights[array.key], weights[array.key].chunk, sizes, coded) for array in held]
    amiss: set[str] = set()
    for group in find_twins(held, math.inf):
        cut = [list(chunk_blocks(number, grids[number], unit_bytes // len(group))) for number in group]
        for blocks in (one for made in [list(zip(*cut, strict=True))] for one in (made[0], made[-1])):
            for name, boxes in rows_of(held, grids, blocks).items():
                shape = shapes[names[name][0]]
                if name in coded and not all(in_blocks(box, shape) for box, _ in boxes):
                    amiss.update(
                        itertools.chain.from_iterable(part.tensors for number in group for part in held[number].parts)
                    )
    return codes - {one for name in amiss for one in names[name]}


def _element_bytes(form: _Form, merged: Mapping[str, Encoding]) -> dict[str, int]:
    """Bytes that an element of each tensor takes while it is made: as it is written, in float32 where an adapter is
    added, as a code.
    """
    return {
        name: dtype.itemsize + (VALUES.itemsize if name in merged else 0) + (name in form.coded)
        for name, dtype in form.dtypes.items()
    }


def _lossy(
    arrays: Iterable[Array], form: _Form, names: Mapping[str, tuple[str, ...]], merged: Iterable[str]
) -> dict[str, str]:
    """By tensor, why its values aren't those of the array to the bit."""
    rounded = {one: reason for name, reason in _rounded(arrays, form.dtypes).items() for one in names[name]}
    rounded |= {one: "merged in float32, rounded once" for name in merged for one in names[name]}
    return rounded | dict.fromkeys(sorted(form.quantised), REASON)


def _rounded(arrays: Iterable[Array], dtypes: Mapping[str, np.dtype]) -> dict[str, str]:
    """By the table's name of a tensor, which operation or which cast rounds its values."""
    reasons: dict[str, str] = {}
    for array in arrays:
        for part in array.parts:
            inexact = [op for op in inverses(part.rule.ops) if not op.is_exact]
            for name in part.tensors:
                dtype = dtypes[name]
                if inexact:
                    reasons[name] = "; ".join(f"{op}, rounded once to {dtype.name}" for op in inexact)
                elif is_float(array.dtype) and not holds(dtype, array.dtype):
                    reasons[name] = f"{array.dtype.name}, rounded to {dtype.name}"
    return reasons


def _config_edits(
    config: Config,
    arrays: Sequence[Array],
    shapes: Mapping[str, tuple[int, ...]],
    drops: Mapping[str, str],
    taken: Mapping[str, str],
) -> dict[str, Any]:
    """What `config.json` has to say otherwise: rows of a cut vocabulary, prediction layers and towers that aren't there.

    Args:
      drops: what the table leaves out.
      taken: what of that is taken from the release.
    """
    edits: dict[str, Any] = {}
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else config
    embedding = next((array for array in arrays if array.key == EMBEDDING), None)
    if embedding is not None:
        rows = {shapes[name][0] for part in embedding.parts for name in part.tensors}
        if len(rows) == 1 and (count := rows.pop()) != text.get("vocab_size", count):
            edits["vocab_size"] = count
    parts = list(taken.values())
    if not any(isinstance(reason, Prediction) for reason in parts) and not any(
        array.key.startswith(MTP) for array in arrays
    ):
        edits |= {field: 0 for field in NEXTN if text.get(field)}
    there = [part.absent for part in parts if isinstance(part, Tower)]
    for tower in drops.values():
        if isinstance(tower, Tower) and tower.absent not in there:
            edits |= {field: value for field, value in tower.absent.items() if not _is_absent(config, field, value)}
    return edits


def _is_absent(config: Mapping[str, Any], field: str, value: Any) -> bool:
    """Whether `config.json` says already that a part isn't there; a dot of the field leads into a section.

    A section that is null, or isn't there, describes nothing; but a flag that isn't there is true.
    """
    *sections, name = field.split(".")
    for section in sections:
        config = config.get(section) or {}
        if not config:
            return True
    return not config.get(name) if value is None else config.get(name, True) == value


def load(inputs: Mapping[str, Any]) -> Export:
    """The export that `Export.stage` staged."""
    tensors = {name: (dtype, tuple(shape), file) for name, (dtype, shape, file) in inputs["like"]["tensors"].items()}
    like = Like(inputs["like"]["root"], inputs["like"]["config"], tensors)
    adapters = [Adapter(HfCheckpoint.from_json(files), weight) for files, weight in inputs["adapters"]]
    given = Given.of(HfCheckpoint.from_json(inputs["given"])) if inputs["given"] else None
    parts = HfCheckpoint.from_json(inputs["parts"]) if inputs.get("parts") else None
    made = plan_export(
        options_from(ExportOptions, inputs["options"]),
        load_checkpoint(inputs["source"]),
        like,
        adapters,
        given,
        inputs.get("slots"),
        parts,
    )
    return dataclasses.replace(made, staged_small=inputs["small"])
