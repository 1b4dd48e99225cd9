"""The planner of an export: from a checkpoint's metadata and a release's headers to the plan, in named steps. No value
is read.

metadata, config.json, headers of the release
  │  find_table     whose table it is, which of MaxText's models, and the release's tensors by the table's names
  │  view_weights   the checkpoint's weights: FP8 codes and scales as they are, or what they are the codes of
  │  find_arrays    the table's arrays as the checkpoint has them, and the layout that they are in
  │  find_drops     which tensors no array makes: those that the table leaves out, variables, copies of others
  │  audit_tensors  the tensors that arrays become against the release's
  │  _name          what each is called in the release, copies of it included; what is left out of it, or taken from it
  │  _merge         adapters that are added on the way
  │  _take          towers and prediction layers that the release has and the checkpoint hasn't
  │  _write_as      what each tensor is written as: its dtype, or codes and scales
  ▼  _cut           which tensor goes into which file, at which byte; blocks of whole chunks, units (`chunk_blocks.py`)
Export

The first steps stand in `export_fit.py`, those of config.json in `export_config.py`, what they hand on in `export_state.py`.

Each step goes on as far as it can, so that a user sees all problems of the table at once; those of adapters, of codes
and of units are said where there is none before them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from weightbeam.formats.adapters import Adapter, merge
from weightbeam.formats.adapters.ties import find_ties
from weightbeam.formats.encodings import Encoding, Plain, StoredArray, values_dtype
from weightbeam.formats.encodings.quantizing import REASON
from weightbeam.formats.orbax.source import OrbaxCheckpoint, load_checkpoint
from weightbeam.formats.release.source import stored_tensors
from weightbeam.formats.safetensors import HfCheckpoint
from weightbeam.model_mappings.config import ConfigError, Layout
from weightbeam.model_mappings.family import Prediction, Tower, Variable
from weightbeam.model_mappings.naming import ModelNameError
from weightbeam.model_mappings.ops import dtype_named, inverses
from weightbeam.model_mappings.plan import Array, ArrayPlan, Problem, TensorSpec, holds, is_float
from weightbeam.model_mappings.registry import UnknownFamilyError
from weightbeam.transforms.comparing.array_sums import find_lost
from weightbeam.transforms.cutting.blocks import Block, cut_blocks, find_twins
from weightbeam.transforms.cutting.chunk_blocks import ChunkUnits, cut, grid_of
from weightbeam.transforms.cutting.files import Entry, FileLayout, plan_files
from weightbeam.transforms.cutting.grid import Grid
from weightbeam.transforms.cutting.quantizing import (
    Given,
    find_quantized,
    in_blocks,
    in_halves,
    warn_of_codes,
    with_scales,
)
from weightbeam.transforms.cutting.row_blocks import row_units
from weightbeam.transforms.cutting.rows import VALUES, made_here
from weightbeam.transforms.cutting.tensor_rows import rows_of
from weightbeam.transforms.planning.export_config import (
    config_edits,
    lost_rows,
    quantization_of,
    warn_of_rows,
    warn_of_towers,
    warn_of_variables,
)
from weightbeam.transforms.planning.export_fit import (
    audit_tensors,
    explain_sizes,
    find_arrays,
    find_drops,
    find_table,
    view_weights,
    without_kept,
    without_scales,
    without_table,
)
from weightbeam.transforms.planning.export_state import (
    ExportDrops,
    ExportFit,
    ExportTable,
    ExportTensors,
    ExportView,
    ExportWritten,
    made_of,
)
from weightbeam.transforms.planning.exporting import RELEASED_VALUES, Export, Like
from weightbeam.transforms.planning.layouts import MTP, TOWERS, maxtext_of
from weightbeam.transforms.planning.options import RELEASED, ExportOptions, options_from


def plan_export(
    options: ExportOptions,
    source: OrbaxCheckpoint,
    like: Like,
    adapters: Sequence[Adapter] = (),
    slots: int | None = None,
) -> Export:
    """Plans an export. What stands against it is in `plan.problems`.

    Args:
      slots: units at a time that they are cut for, if that is known; see `blocks.target_bytes`.
    """
    view = view_weights(options, source, like)
    try:
        table = find_table(options, source, like)
        fit = find_arrays(options, source, table, view)
        cause, table, fit = explain_sizes(options, source, table, fit, view)
        drops = find_drops(table, fit)
    except (ConfigError, UnknownFamilyError, ModelNameError) as e:
        return without_table(options, source, like, e)
    specs, dropped, problems = audit_tensors(table, fit, drops)
    tensors = _name(options, table, drops, specs, dropped)
    problems += _without_parts(options, table, fit, tensors)
    problems = [
        *without_kept(options, source, view),
        *without_scales(view),
        *find_lost(source.record, source.arrays),
        *lost_rows(source, table),
        *cause,
        *_another_model(problems, source, table),
        *problems,
    ]
    merged, amiss = _merge(table, fit.layout, drops, tensors, adapters)
    problems = problems or amiss
    taken = _take(table, tensors, view)
    quantize = bool(options.quantize) and not problems
    written = _write_as(options, source, table, fit, tensors, taken, quantize)
    if quantize:
        problems += _without_codes(source, table, tensors, written)
    files, made = (
        _cut(options, source, table, fit, written, merged, taken, slots) if not problems else (None, ChunkUnits())
    )
    return Export(
        options=options,
        source=source,
        like=like,
        plan=_plan(table, fit, tensors, (*problems, *made.problems)),
        names=tensors.names,
        files=files,
        grids=made.grids,
        units=made.units,
        lossy=_lossy(fit.arrays, written, tensors.names, merged, view) | _rounded_again(taken, written.taken),
        config_edits=config_edits(table, fit, drops, tensors, like),
        form=table.form,
        warnings=(
            *(files.warnings if files else ()),
            *warn_of_towers(tensors.dropped, like, table.family),
            *warn_of_variables(table, tensors),
            *warn_of_rows(source, table, fit),
            *(warn_of_codes(files.tensors, written.quantized) if files else ()),
        ),
        adapters=tuple(adapters),
        merged=merged,
        quantized=written.quantized,
        quantization=quantization_of(written, view, like),
        taken=taken,
        large=made.unpacked,
        slots=slots,
        kept=view.kept,
    )


def _name(
    options: ExportOptions,
    table: ExportTable,
    drops: ExportDrops,
    made: Mapping[str, TensorSpec],
    dropped: Mapping[str, str],
) -> ExportTensors:
    """What each tensor is called in the release, the copies of it included; and what is left out of the release, or
    taken from it.
    """
    names: dict[str, tuple[str, ...]] = {name: (table.spelled(name),) for name in made}
    copies = {copy: original for copy, original in drops.copies.items() if original in made}
    for copy, original in copies.items():
        names[original] += (table.spelled(copy),)
    dropped = {name: reason for name, reason in dropped.items() if "[" not in name and name not in copies}
    taken = {name: reason for name, reason in dropped.items() if _is_taken(options, table, name, reason)}
    return ExportTensors(made, names, {name: dropped[name] for name in dropped if name not in taken}, taken)


def _is_taken(options: ExportOptions, table: ExportTable, name: str, reason: str) -> bool:
    """Whether what is left out for a reason is taken from the release that has it: towers, unless the language model
    alone is wanted, prediction layers where they are, and what is no parameter in MaxText.
    """
    if not table.can_take(name):
        return False
    if isinstance(reason, Tower):
        return options.multimodal is not False
    return isinstance(reason, Variable) or (isinstance(reason, Prediction) and options.mtp)


def _without_parts(
    options: ExportOptions, table: ExportTable, fit: ExportFit, tensors: ExportTensors
) -> Iterator[Problem]:
    """Parts of the model that are asked for, and that neither the checkpoint has nor a release."""
    keys, reasons = [array.key for array in fit.arrays], tensors.taken.values()
    for option, asked, kind, held, what in (
        ("--multimodal", options.multimodal, Tower, TOWERS, "towers"),
        ("--mtp", options.mtp, Prediction, MTP, "prediction layers"),
    ):
        has = any(isinstance(reason, kind) for reason in reasons) or any(key.startswith(held) for key in keys)
        if asked and not has:
            where = (
                "the release has none either"
                if table.stored
                else "no release is named that has them; name it with --like"
            )
            yield Problem("option", option, f"the checkpoint has no {what}, and {where}")


def _another_model(problems: Sequence[Problem], source: OrbaxCheckpoint, table: ExportTable) -> list[Problem]:
    """That the release is of another model, where as many arrays are amiss as would be of one like it."""
    wrong = sum(problem.is_array and problem.kind in ("shape", "unused", "missing") for problem in problems)
    if 2 * wrong <= len(source.tree.weights):
        return []
    before = source.record.get("config")
    theirs = before.get("model_type") if isinstance(before, Mapping) else None
    kind, amiss = table.config.get("model_type"), f"{wrong:,} arrays have other names or shapes"
    if theirs == kind:
        message = f"is a {kind} model, as the checkpoint is, but of other sizes, in another layout (--param_scan_axis) or under other names: {amiss}"
    else:
        other = f" but a {theirs}" if theirs else ""
        message = f"is a {kind} model, and the checkpoint isn't that one{other}: {amiss}"
    return [Problem("like", table.form.root or "config.json", message)]


def _merge(
    table: ExportTable, layout: Layout, drops: ExportDrops, tensors: ExportTensors, adapters: Sequence[Adapter]
) -> tuple[dict[str, Encoding], list[Problem]]:
    """What adapters make of the tensors that they change, and what stands against it."""
    made = {name: made_here(name, spec.shape) for name, spec in tensors.made.items()}
    ties = find_ties(table.config, made, table.family, layout)
    merging = merge(made, adapters, table.family.aliases, str(table.config.get("model_type")), ties)
    merged = {name: merging.encodings[name] for name in merging.touched}
    return merged, [*merging.problems, *merging.in_vain(drops.reasons), *_needing_columns(merged)]


def _needing_columns(merged: Mapping[str, Encoding]) -> Iterator[Problem]:
    """Merged tensors of which a unit, which makes whole rows, can't make any box by itself: DoRA's norms over a column
    each.
    """
    for name, encoding in merged.items():
        if 0 in encoding.indivisible:
            message = "DoRA on a weight that is stored transposed needs whole columns; merge it into the release, with weightbeam merge"
            yield Problem("adapter", name, message)


def _take(table: ExportTable, tensors: ExportTensors, view: ExportView) -> dict[str, Encoding]:
    """The tensors that are taken from a release, by its names: their values, or codes and scales as they are stored."""
    release = table.form.release
    if not release or not table.stored:
        return {}
    names = sorted(map(table.spelled, tensors.taken))
    if not (table.form.given or view.kept):
        return {name: table.stored.encodings[name] for name in names}
    stored = set().union(*stored_tensors(release, table.stored, names).values())
    return {name: Plain(release.tensors[name]) for name in sorted(stored)}


def _write_as(
    options: ExportOptions,
    source: OrbaxCheckpoint,
    table: ExportTable,
    fit: ExportFit,
    tensors: ExportTensors,
    taken: Mapping[str, Encoding],
    quantize: bool,
) -> ExportWritten:
    """What each tensor is written as."""
    given, names, made = table.form.given, tensors.names, tensors.made
    dtypes = {name: _target_dtype(options, spec.dtype) for name, spec in made.items()}
    entries = [Entry(one, dtypes[name], made[name].shape) for name, ones in names.items() for one in ones]
    had = {name: values_dtype(encoding, RELEASED_VALUES) for name, encoding in taken.items()}
    others = [Entry(name, _target_dtype(options, had[name]), encoding.shape) for name, encoding in taken.items()]
    quantized = find_quantized(entries, given) if quantize else frozenset[str]()
    if quantized:
        quantized -= _not_in_blocks(options, source, fit, tensors, quantized)
        quantized -= in_halves(entries, quantized) if given is None else set()
    coded = frozenset(name for name, ones in names.items() if quantized.intersection(ones))
    return ExportWritten(dtypes | dict.fromkeys(coded, VALUES), entries, others, quantized, coded)


def _target_dtype(options: ExportOptions, released: np.dtype) -> np.dtype:
    return dtype_named(options.save_dtype) if options.save_dtype in RELEASED and is_float(released) else released


def _not_in_blocks(
    options: ExportOptions, source: OrbaxCheckpoint, fit: ExportFit, tensors: ExportTensors, codes: frozenset[str]
) -> set[str]:
    """The tensors, by the release's names, that can't be written as codes: those whose parts, in arrays of their own,
    don't begin and end at blocks of rows.
    """
    coded = {name: tensors.made[name].shape for name, ones in tensors.names.items() if codes.intersection(ones)}
    held = [array for array in fit.arrays if not coded.keys().isdisjoint(made_of([array]))]
    sizes = dict.fromkeys(made_of(held), 2 * VALUES.itemsize + 1)
    weights = source.weights
    grids = [grid_of(array, weights[array.key], sizes, coded, options.unit_bytes) for array in held]
    amiss: set[str] = set()
    for group in find_twins(held, math.inf):
        if not _is_in_blocks(held, grids, group, options.unit_bytes, coded):
            amiss.update(made_of(held[number] for number in group))
    return {one for name in amiss for one in tensors.names[name]}


def _is_in_blocks(
    arrays: Sequence[Array],
    grids: Sequence[Grid],
    group: Sequence[int],
    unit_bytes: int,
    coded: Mapping[str, tuple[int, ...]],
) -> bool:
    """Whether the units of arrays that are read together make whole blocks of rows, by the first of them and the last.

    Args:
      group: numbers of the arrays.
      coded: the tensors that become codes, and their shapes.
    """
    blocks = (cut_blocks(number, grids[number], unit_bytes // len(group)) for number in group)
    units = list(zip(*blocks, strict=True))
    return all(
        in_blocks(box, coded[name])
        for unit in (units[0], units[-1])
        for name, boxes in rows_of(arrays, grids, unit).items()
        if name in coded
        for box, _ in boxes
    )


def _without_codes(
    source: OrbaxCheckpoint, table: ExportTable, tensors: ExportTensors, written: ExportWritten
) -> Iterator[Problem]:
    """What stands against codes: there are none; or not those of a given release, since it, or what is written, hasn't
    the weight, or a weight's parts, in arrays of their own, don't begin and end at blocks.
    """
    given = table.form.given
    if not given:
        if not written.quantized:
            yield Problem("quantised", source.root, "none of its weights is one that is quantised")
        return
    left = {table.released[name].name for name in {*tensors.dropped, *tensors.taken} if name in table.released}
    yield from given.problems
    yield from given.missing(written.entries, left)
    for entry in written.entries:
        if entry.name in given.scales and entry.name not in written.quantized:
            message = f"{given.files.root} has it in FP8, but its parts in the checkpoint don't begin at blocks; export it, then quantize that"
            yield Problem("quantised", entry.name, message)


def _cut(
    options: ExportOptions,
    source: OrbaxCheckpoint,
    table: ExportTable,
    fit: ExportFit,
    written: ExportWritten,
    merged: Mapping[str, Encoding],
    taken: Mapping[str, Encoding],
    slots: int | None,
) -> tuple[FileLayout, ChunkUnits]:
    """Which tensor goes into which file, and the units: those of the arrays, then those of what is taken."""
    order = {tensor.name: tensor.file for tensor in table.released.values()}
    entries = [*with_scales(written.entries, written.quantized), *written.taken]
    files = plan_files(entries, order or None, options.max_shard_size)
    sizes = _element_bytes(written, merged)
    made = cut(fit.arrays, source.weights, sizes, written.coded, options.unit_bytes, slots)
    others = _units_of(taken, len(fit.arrays), files, options.unit_bytes, slots)
    return files, dataclasses.replace(made, units=made.units + others)


def _element_bytes(written: ExportWritten, merged: Mapping[str, Encoding]) -> dict[str, int]:
    """Bytes that an element of each tensor takes while it is made: as it is written, in float32 where an adapter is
    added, as a code.
    """
    return {
        name: dtype.itemsize + (VALUES.itemsize if name in merged else 0) + (name in written.coded)
        for name, dtype in written.dtypes.items()
    }


def _units_of(
    taken: Mapping[str, Encoding], first: int, files: FileLayout, unit_bytes: int, slots: int | None
) -> tuple[tuple[Block, ...], ...]:
    """The units of the tensors that are taken from the release; they count as arrays behind the last."""
    return tuple(
        tuple(dataclasses.replace(block, array=first + block.array) for block in unit)
        for unit in row_units(taken, files, unit_bytes, (), slots)
    )


def _plan(table: ExportTable, fit: ExportFit, tensors: ExportTensors, problems: Sequence[Problem]) -> ArrayPlan:
    """The plan of the arrays, with what stands against it."""
    family, config, naming = table.family, table.config, table.naming
    dropped = {table.spelled(name): reason for name, reason in tensors.dropped.items()}
    note = family.note(config, fit.layout)
    maxtext, _ = maxtext_of(family, config, fit.layout, naming)
    return ArrayPlan.of(family, naming, fit.arrays, dropped, problems, note, maxtext)


def _lossy(
    arrays: Iterable[Array],
    written: ExportWritten,
    names: Mapping[str, tuple[str, ...]],
    merged: Iterable[str],
    view: ExportView,
) -> dict[str, str]:
    """By tensor, why its values aren't those of the array to the bit."""
    rounded = {
        one: reason
        for name, reason in find_rounded(arrays, written.dtypes, view.weights).items()
        for one in names[name]
    }
    rounded |= {one: "merged in float32, rounded once" for name in merged for one in names[name]}
    return rounded | dict.fromkeys(sorted(written.quantized), REASON)


def find_rounded(
    arrays: Iterable[Array], dtypes: Mapping[str, np.dtype], weights: Mapping[str, StoredArray]
) -> dict[str, str]:
    """By the table's name of a tensor, which operation or which cast rounds its values."""
    reasons: dict[str, str] = {}
    for array in arrays:
        for part in array.parts:
            inexact = [op for op in inverses(part.rule.ops) if not op.is_exact]
            for name in part.tensors:
                dtype = dtypes[name]
                if inexact:
                    reasons[name] = "; ".join(f"{op}, rounded once to {dtype.name}" for op in inexact)
                elif is_float(array.dtype) and is_float(dtype) and not holds(dtype, array.dtype):
                    stored = weights[array.key].label or array.dtype.name
                    reasons[name] = f"{stored}, rounded to {dtype.name}"
    return reasons


def _rounded_again(taken: Mapping[str, Encoding], written: Iterable[Entry]) -> dict[str, str]:
    """Of the tensors that are taken from the release, those whose values aren't its own to the bit."""
    reasons = {}
    for entry in written:
        had, label = values_dtype(taken[entry.name], RELEASED_VALUES), taken[entry.name].label
        if label or (is_float(had) and not holds(entry.dtype, had)):
            reasons[entry.name] = f"{label or had.name}, rounded to {entry.dtype.name}"
    return reasons


def load(inputs: Mapping[str, Any]) -> Export:
    """The export that `Export.stage` staged."""
    adapters = [Adapter.from_json(adapter) for adapter in inputs["adapters"]]
    given = Given.of(HfCheckpoint.from_json(inputs["given"])) if inputs["given"] else None
    release = HfCheckpoint.from_json(inputs["parts"]) if inputs.get("parts") else None
    return plan_export(
        options_from(ExportOptions, inputs["options"]),
        load_checkpoint(inputs["source"]),
        Like.from_json(inputs["like"], release=release, given=given),
        adapters,
        inputs.get("slots"),
    )
