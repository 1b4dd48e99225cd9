"""The planner of an export: from a checkpoint's metadata and a release's headers to the plan, in named steps. No value
is read.

metadata, config.json, headers of the release
  │  _find_table    whose table it is, which of MaxText's models, and the release's tensors by the table's names
  │  _view          the checkpoint's weights: FP8 codes and scales as they are, or what they are the codes of
  │  _find_arrays   the table's arrays as the checkpoint has them, and the layout that they are in
  │  _find_drops    which tensors no array makes: those that the table leaves out, variables, copies of others
  │  _audit         the tensors that arrays become against the release's
  │  _name          what each is called in the release, copies of it included; what is left out of it, or taken from it
  │  _merge         adapters that are added on the way
  │  _carry         towers and prediction layers that the release has and the checkpoint hasn't
  │  _write_as      what each tensor is written as: its dtype, or codes and scales
  ▼  _cut           which tensor goes into which file, at which byte; blocks of whole chunks, units (`chunk_blocks.py`)
Export

Each step goes on as far as it can, so that a user sees all problems of the table at once; those of adapters, of codes
and of units are said where there is none before them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from weightbeam.formats.adapters import Adapter, merge
from weightbeam.formats.encodings import Encoding, Plain
from weightbeam.formats.encodings.quantization import Quantization
from weightbeam.formats.orbax.scaled import ScaledArray, scaled_arrays, values_of
from weightbeam.formats.orbax.source import OrbaxArray, OrbaxCheckpoint, load_checkpoint
from weightbeam.formats.release.source import ReleaseTensors, open_source, stored_tensors
from weightbeam.formats.safetensors import HfCheckpoint
from weightbeam.model_mappings.audit import audit, drop_reason
from weightbeam.model_mappings.cells import Part
from weightbeam.model_mappings.config import NEXTN, Config, ConfigError, Layout
from weightbeam.model_mappings.family import Family, Prediction, Tower, Variable, rename
from weightbeam.model_mappings.keeping import is_scale, keep_arrays
from weightbeam.model_mappings.naming import ModelNaming, name_model
from weightbeam.model_mappings.ops import inverses
from weightbeam.model_mappings.plan import PARAMETERS, Array, Plan, Problem, TensorSpec, expand, holds, is_float, key_of
from weightbeam.model_mappings.registry import UnknownFamilyError, family_of
from weightbeam.model_mappings.scales import ARRAY_SUFFIX
from weightbeam.model_mappings.spares import read_back
from weightbeam.transforms.comparing.array_sums import find_lost
from weightbeam.transforms.cutting.blocks import Block, cut_blocks, find_twins
from weightbeam.transforms.cutting.chunk_blocks import Cut, cut, grid_of
from weightbeam.transforms.cutting.files import FileLayout, plan_files
from weightbeam.transforms.cutting.grid import Grid
from weightbeam.transforms.cutting.quantizing import (
    REASON,
    Entry,
    Given,
    find_quantized,
    in_blocks,
    quantization_config,
    with_scales,
)
from weightbeam.transforms.cutting.row_blocks import row_units
from weightbeam.transforms.cutting.rows import VALUES, made_here
from weightbeam.transforms.cutting.tensor_rows import rows_of
from weightbeam.transforms.planning.exporting import DTYPES, Export, Like, dtype_of_model
from weightbeam.transforms.planning.layouts import (
    EMBEDDING,
    MTP,
    SCAN_AXES,
    TOWERS,
    layout_of,
    maxtext_of,
    scan_axis_of,
    scan_of,
    version_of,
    version_said,
)
from weightbeam.transforms.planning.options import AUTO, CODED, ExportOptions, options_from
from weightbeam.transforms.planning.other_sizes import changed, describe, find_sizes
from weightbeam.transforms.planning.text_model import has_towers, text_class, text_model


class _Released(NamedTuple):
    """A tensor of the release whose form the export takes; `name` is the release's own for it."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    name: str


@dataclasses.dataclass(frozen=True)
class _Table:
    """A family's table, and the releases that it is read back for.

    Attributes:
      naming: which of MaxText's models it is.
      form: the release whose form is taken, or that of its language model alone.
      config: of `form`.
      released: the tensors of `form`, by the table's names.
      parts: the release that tensors can be taken from; None for none.
    """

    family: Family
    naming: ModelNaming
    form: Like
    config: Config
    released: Mapping[str, _Released]
    parts: ReleaseTensors | None

    def spelled(self, name: str) -> str:
        """The release's own name for a tensor."""
        return self.released[name].name if name in self.released else name

    def can_take(self, name: str) -> bool:
        """Whether a tensor can be taken from a release."""
        return self.parts is not None and name in self.released and self.released[name].name in self.parts.encodings


@dataclasses.dataclass(frozen=True)
class _View:
    """The checkpoint's weights, by MaxText's keys.

    Attributes:
      weights: codes and scales as they are, or what they are the codes of.
      scaled: the weights whose codes and scales are taken as they are.
    """

    weights: Mapping[str, OrbaxArray | ScaledArray]
    scaled: Mapping[str, ScaledArray]

    @property
    def kept(self) -> bool:
        """Whether there are such."""
        return bool(self.scaled)

    def parts(self, parts: Mapping[str, list[Part]]) -> tuple[Mapping[str, list[Part]], list[Problem]]:
        """The parts of a table's arrays, those of scales among them, and what can't be read so."""
        return keep_arrays(parts, {key: max(scaled.block) for key, scaled in self.scaled.items()})


@dataclasses.dataclass(frozen=True)
class _Fit:
    """How the table's arrays, in one layout, fit the checkpoint's.

    Attributes:
      arrays: those that the checkpoint has.
      problems: where they differ.
      lacking: tensors that would be made of arrays that aren't there, each with its array.
      misfit: tensors that would be made of arrays which have other shapes; or, where the checkpoint's model has other
        sizes than the release, those that the release's has.
    """

    arrays: tuple[Array, ...]
    layout: Layout
    problems: tuple[Problem, ...]
    lacking: Mapping[str, str]
    misfit: Collection[str] = ()

    @property
    def axes(self) -> tuple[object, ...]:
        """What each axis of each array is: the same in two layouts that make the same tensors."""
        return tuple((array.key, tuple(f for part in array.parts for f in part.target_axes)) for array in self.arrays)


@dataclasses.dataclass(frozen=True)
class _Drops:
    """The tensors of the release that no array makes.

    Attributes:
      reasons: why tensors are left out: `{pattern or window: reason}`.
      variables: those of them that are no parameters in MaxText.
      copies: the others, each with the tensor that it is a copy of.
    """

    reasons: Mapping[str, str]
    variables: Collection[str]
    copies: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class _Tensors:
    """The tensors of the export, by the table's names.

    Attributes:
      made: those that arrays become, in the release's dtypes.
      names: what each of these is called in the release, the copies of it included.
      dropped: what is left out of the release, with the reason.
      taken: what is taken from the release, with the reason why no array makes it.
    """

    made: Mapping[str, TensorSpec]
    names: Mapping[str, tuple[str, ...]]
    dropped: Mapping[str, str]
    taken: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class _Written:
    """What the tensors are written as.

    Attributes:
      dtypes: of the values that are made, by the table's names; float32 of what is quantised, which isn't rounded
        before.
      entries: every tensor that is made, before it is quantised, by the release's names.
      carried: every tensor that is taken from the release.
      quantized: those that become codes and scales, by the release's names.
      coded: the same by the table's names.
    """

    dtypes: Mapping[str, np.dtype]
    entries: Sequence[Entry]
    carried: Sequence[Entry]
    quantized: frozenset[str]
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
    view = _view(options, source, like)
    try:
        table = _find_table(options, source, like, parts)
        fit = _find_arrays(options, source, table, view)
        cause, table, fit = _explain_sizes(options, source, like, table, fit, view)
        drops = _find_drops(table, fit)
    except (ConfigError, UnknownFamilyError) as e:
        return _without_table(options, source, like, e)
    specs, dropped, problems = _audit(table, fit, drops)
    tensors = _name(options, table, drops, specs, dropped)
    problems += _without_parts(options, table, fit, tensors)
    problems = [
        *_without_kept(options, source, view),
        *_without_scales(view),
        *find_lost(source.record, source.arrays),
        *cause,
        *_another_model(problems, source, like, table.config),
        *problems,
    ]
    merged, amiss = _merge(table, drops, tensors, adapters)
    problems = problems or amiss
    carried = _carry(table, tensors, parts, bool(given) or view.kept)
    quantize = bool(options.quantize) and not problems
    written = _write_as(options, source, fit, tensors, carried, quantize, given)
    if quantize:
        problems += _without_codes(source, table, tensors, written, given)
    files, made = _cut(options, source, table, fit, written, merged, carried, slots) if not problems else (None, Cut())
    return Export(
        options,
        source,
        like,
        _plan(table, fit, tensors, (*problems, *made.problems)),
        tensors.names,
        files,
        made.grids,
        made.units,
        _lossy(fit.arrays, written, tensors.names, merged, view) | _rounded_again(carried, written.carried),
        _config_edits(table, fit, drops, tensors, like),
        table.form,
        (
            *(files.warnings if files else ()),
            *_warn_of_towers(tensors.dropped, like, table.family),
            *_warn_of_variables(tensors.taken, like),
        ),
        tuple(adapters),
        merged,
        quantized=written.quantized,
        quantization=_quantization(written, given, view, like),
        given=given,
        carried=carried,
        parts=parts if carried else None,
        unpacked=made.unpacked,
        slots=slots,
        kept=view.kept,
    )


def _view(options: ExportOptions, source: OrbaxCheckpoint, like: Like) -> _View:
    """The checkpoint's weights as the export takes them: codes as they are where they are asked for, or where the
    release has codes and nothing else is.
    """
    coded = bool(source.tree.scales)
    kept = (
        coded and not options.quantize and (options.save_dtype == CODED or (options.save_dtype == AUTO and like.coded))
    )
    return _View(source.weights if kept else values_of(source), scaled_arrays(source) if kept else {})


def _without_kept(options: ExportOptions, source: OrbaxCheckpoint, view: _View) -> Iterator[Problem]:
    """What codes that stay as they are don't go with."""
    if options.save_dtype == CODED and not source.tree.scales:
        message = f"{source.root} holds no FP8 codes; weightbeam quantize makes them"
        yield Problem("option", f"--save_dtype={CODED}", message)
    if options.quantize and source.tree.scales and not options.lora:  # with an adapter they are other weights
        message = "its weights are FP8 codes already; weightbeam export writes them as they are"
        yield Problem("quantised", source.root, message)
    if view.kept and options.lora:
        message = (
            "an adapter can't be merged into FP8 codes; with --save_dtype bfloat16 it is merged into their values, and "
            "weightbeam quantize --lora makes codes of these"
        )
        yield Problem("adapter", source.root, message)


def _without_scales(view: _View) -> Iterator[Problem]:
    """Weights that are FP8 codes and have no scales beside them: they are no values."""
    for key, array in view.weights.items():
        if array.dtype.name.startswith("float8") and key not in view.scaled:
            message = f"{array.dtype.name} without scales, which would be {key}{ARRAY_SUFFIX}: FP8 codes are no values without them"
            yield Problem("dtype", key, message, is_array=True)


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


def _find_table(options: ExportOptions, source: OrbaxCheckpoint, like: Like, parts: HfCheckpoint | None) -> _Table:
    """Whose table it is, which of MaxText's models, and the release's tensors by the table's names.

    Raises:
      ConfigError: the model that was named isn't this one, or `config.json` lacks what tells.
      UnknownFamilyError: there is no table.
    """
    model = options.maxtext_model or _said_model(source)
    family = family_of(Config(like.config), model, options.family)
    form = text_model(like, family) if options.multimodal is False else like
    config = Config(form.config)
    naming = name_model(family, config, model)
    return _Table(family, naming, form, config, _released(form, family), open_source(parts) if parts else None)


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


def _find_arrays(options: ExportOptions, source: OrbaxCheckpoint, table: _Table, view: _View) -> _Fit:
    """The arrays of the table as the checkpoint has them, in the layout that fits best.

    Raises:
      ConfigError: `config.json` lacks what the table needs.
    """
    if options.multimodal is False:
        kept = {key: weight for key, weight in view.weights.items() if not key.startswith(TOWERS)}
        view = dataclasses.replace(view, weights=kept)
    tried = [_fit(table, view, layout) for layout in _layouts(options, source, table, view.weights)]
    fitting = [fit for fit in tried if not fit.problems]
    if len(fitting) > 1 and len({fit.axes for fit in fitting}) > 1:
        choices = " or ".join(str(fit.layout.scan_axis) for fit in fitting)
        message = f"the shapes fit {choices}, and the checkpoint doesn't say where its layers are stacked; name it"
        return dataclasses.replace(fitting[0], problems=(Problem("option", "--param_scan_axis", message),))
    return min(tried, key=lambda fit: len(fit.problems))


def _layouts(
    options: ExportOptions, source: OrbaxCheckpoint, table: _Table, weights: Mapping[str, OrbaxArray | ScaledArray]
) -> list[Layout]:
    """The layouts that the checkpoint may be in: more than one where nothing says on which axis its layers are stacked."""
    shapes = {name: tensor.shape for name, tensor in table.released.items()}
    layout = layout_of(weights, scan_of(source, weights), table.naming.model, shapes)
    layout = dataclasses.replace(layout, maxtext=version_said(source))
    layout = dataclasses.replace(layout, maxtext=version_of(table.family, table.config, layout, weights))
    said = options.param_scan_axis if options.param_scan_axis is not None else scan_axis_of(source)
    axes = SCAN_AXES if said is None else (said,)
    return [dataclasses.replace(layout, scan_axis=axis) for axis in (axes if layout.scan else axes[:1])]


def _fit(table: _Table, view: _View, layout: Layout) -> _Fit:
    """The arrays of the table, in a layout, as the checkpoint has them."""
    family, weights = table.family, view.weights
    expanded, problems = view.parts(expand(family, table.config, layout))
    arrays: list[Array] = []
    lacking: dict[str, str] = {}
    misfit = set[str]()
    for path, parts in read_back(expanded, weights).items():
        key, shape = key_of(path), parts[0].shape
        if all(part.rule.source is None for part in parts):
            continue
        if key not in weights:
            problems.append(_missing(key, family))
            lacking |= {name: key for part in parts for name in part.tensors}
        elif weights[key].shape != shape:
            message = f"{weights[key].shape} in the checkpoint, by config.json it is {shape}"
            problems.append(Problem("shape", key, message, is_array=True))
            misfit.update(name for part in parts for name in part.tensors)
        else:
            fill = next((part.fill for part in parts if part.fill is not None), None)
            arrays.append(Array(key, shape, weights[key].dtype, parts[0].logical_axes, tuple(parts), fill))
    unknown = weights.keys() - set(map(key_of, expanded))
    message = f"the {family.name} table makes no tensor of it"
    problems += [Problem("unused", key, message, is_array=True) for key in weights if key in unknown]
    return _Fit(tuple(arrays), layout, tuple(problems), lacking, misfit)


def _explain_sizes(
    options: ExportOptions, source: OrbaxCheckpoint, like: Like, table: _Table, fit: _Fit, view: _View
) -> tuple[list[Problem], _Table, _Fit]:
    """Where the release's model has other sizes than the checkpoint's: that, and what there is beside it. Table and fit
    are those of the checkpoint's sizes then, so that nothing is told which only follows from the others.
    """
    if not fit.problems:
        return [], table, fit
    shapes = {key: array.shape for key, array in view.weights.items()}
    before = source.record.get("config")
    sizes = find_sizes(table.family, table.config, fit.layout, shapes, before if isinstance(before, Mapping) else {})
    if not sizes:
        return [], table, fit
    cause = Problem("like", like.root or "config.json", f"has other sizes: {describe(table.config, sizes)}")
    made = {
        name
        for parts in expand(table.family, table.config, fit.layout).values()
        for part in parts
        for name in part.tensors
    }
    table = dataclasses.replace(table, config=changed(table.config, sizes))
    return [cause], table, dataclasses.replace(_find_arrays(options, source, table, view), misfit=made)


def _missing(key: str, family: Family) -> Problem:
    """An array that the checkpoint should hold."""
    message = f"the {family.name} table makes tensors of it, but the checkpoint doesn't hold it"
    if not key.startswith(PARAMETERS):
        message += "; it is no parameter, which MaxText's converter leaves out: --like RELEASE takes it from there"
    return Problem("missing", key, message, is_array=True)


def _find_drops(table: _Table, fit: _Fit) -> _Drops:
    """The tensors of the release that no array makes.

    Raises:
      ConfigError: `config.json` lacks what the table needs.
    """
    variables = _variables(table, fit.lacking)
    reasons = {**variables, **table.family.drops(table.config, fit.layout)}
    copies = {
        copy: original
        for copy, original in table.family.copies(table.config, fit.layout).items()
        if copy in table.released and not isinstance(drop_reason(copy, reasons), Prediction)
    }
    return _Drops(reasons, variables, copies)


def _variables(table: _Table, lacking: Mapping[str, str]) -> dict[str, Variable]:
    """What a checkpoint lacks that isn't a parameter in MaxText, such as DeepSeek V4's routing tables, and that can be
    taken from the release: all tensors of such an array.

    Args:
      lacking: tensors that the checkpoint's arrays don't make, each with the array that would.

    Returns:
      Why these tensors aren't made.
    """
    wanting = {key for name, key in lacking.items() if key.startswith(PARAMETERS) or not table.can_take(name)}
    reason = Variable("no parameter in MaxText, and not in the checkpoint")
    return {name: reason for name, key in lacking.items() if key not in wanting}


def _audit(table: _Table, fit: _Fit, drops: _Drops) -> tuple[dict[str, TensorSpec], dict[str, str], list[Problem]]:
    """Checks the tensors that arrays become against the release's.

    Returns:
      These tensors; what is left out of the release, with the reason; and all problems so far: a variable that can be
      taken from the release is none.
    """
    shapes = _tensor_shapes(fit.arrays)
    specs = _specs(shapes, table.released, drops.copies, table.form) | _coded_specs(fit.arrays, shapes)
    dropped, found = audit(fit.arrays, specs, drops.reasons, table.family.name)
    explained = {fit.lacking[name] for name in drops.variables}
    problems = [one for one in fit.problems if one.kind != "missing" or one.subject not in explained]
    problems += [
        one
        for one in found
        if (table.released or one.kind != "missing")
        and (one.kind != "unused" or not (one.subject in fit.lacking or one.subject in fit.misfit))
    ]
    return {name: specs[name] for name in shapes}, dropped, problems


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


def _coded_specs(arrays: Iterable[Array], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorSpec]:
    """The tensors of arrays that are codes, or scales: they stay what they are."""
    keys = {array.key for array in arrays}
    coded = [array for array in arrays if array.key + ARRAY_SUFFIX in keys or is_scale(array.key, keys)]
    return {
        name: TensorSpec(shapes[name], array.dtype, array.key)
        for array in coded
        for part in array.parts
        for name in part.tensors
    }


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def _name(
    options: ExportOptions, table: _Table, drops: _Drops, made: Mapping[str, TensorSpec], dropped: Mapping[str, str]
) -> _Tensors:
    """What each tensor is called in the release, the copies of it included; and what is left out of the release, or
    taken from it.
    """
    names: dict[str, tuple[str, ...]] = {name: (table.spelled(name),) for name in made}
    copies = {copy: original for copy, original in drops.copies.items() if original in made}
    for copy, original in copies.items():
        names[original] += (table.spelled(copy),)
    dropped = {name: reason for name, reason in dropped.items() if "[" not in name and name not in copies}
    taken = {name: reason for name, reason in dropped.items() if _is_taken(options, table, name, reason)}
    return _Tensors(made, names, {name: dropped[name] for name in dropped if name not in taken}, taken)


def _is_taken(options: ExportOptions, table: _Table, name: str, reason: str) -> bool:
    """Whether what is left out for a reason is taken from the release that has it: towers, unless the language model
    alone is wanted, prediction layers where they are, and what is no parameter in MaxText.
    """
    if not table.can_take(name):
        return False
    if isinstance(reason, Tower):
        return options.multimodal is not False
    return isinstance(reason, Variable) or (isinstance(reason, Prediction) and options.mtp)


def _without_parts(options: ExportOptions, table: _Table, fit: _Fit, tensors: _Tensors) -> Iterator[Problem]:
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
                if table.parts
                else "no release is named that has them; name it with --like"
            )
            yield Problem("option", option, f"the checkpoint has no {what}, and {where}")


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


def _merge(
    table: _Table, drops: _Drops, tensors: _Tensors, adapters: Sequence[Adapter]
) -> tuple[dict[str, Encoding], list[Problem]]:
    """What adapters make of the tensors that they change, and what stands against it."""
    made = {name: made_here(name, spec.shape) for name, spec in tensors.made.items()}
    merging = merge(made, adapters, table.family.aliases, str(table.config.get("model_type")))
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


def _carry(table: _Table, tensors: _Tensors, parts: HfCheckpoint | None, as_stored: bool) -> dict[str, Encoding]:
    """The tensors that are taken from a release, by its names: their values, or codes and scales as they are stored."""
    if not parts or not table.parts:
        return {}
    names = sorted(map(table.spelled, tensors.taken))
    if not as_stored:
        return {name: table.parts.encodings[name] for name in names}
    stored = {one for name in names for one in stored_tensors(parts, table.parts, name)}
    return {name: Plain(parts.tensors[name]) for name in sorted(stored)}


def _stored_dtype(encoding: Encoding) -> np.dtype:
    """Of the values: those that are computed are bfloat16, as `Like` has them."""
    return encoding.weight.dtype if encoding.label is None else DTYPES["bfloat16"]


def _write_as(
    options: ExportOptions,
    source: OrbaxCheckpoint,
    fit: _Fit,
    tensors: _Tensors,
    carried: Mapping[str, Encoding],
    quantize: bool,
    given: Given | None,
) -> _Written:
    """What each tensor is written as."""
    names, made = tensors.names, tensors.made
    dtypes = {name: _target_dtype(options, spec.dtype) for name, spec in made.items()}
    entries = [(one, dtypes[name], made[name].shape) for name, ones in names.items() for one in ones]
    others = [(name, _target_dtype(options, _stored_dtype(one)), one.shape) for name, one in carried.items()]
    quantized = find_quantized(entries, given) if quantize else frozenset[str]()
    if quantized:
        quantized -= _not_in_blocks(options, source, fit, tensors, quantized)
    coded = frozenset(name for name, ones in names.items() if quantized.intersection(ones))
    return _Written(dtypes | dict.fromkeys(coded, VALUES), entries, others, quantized, coded)


def _target_dtype(options: ExportOptions, released: np.dtype) -> np.dtype:
    return DTYPES[options.save_dtype] if options.save_dtype in DTYPES and is_float(released) else released


def _not_in_blocks(
    options: ExportOptions, source: OrbaxCheckpoint, fit: _Fit, tensors: _Tensors, codes: frozenset[str]
) -> set[str]:
    """The tensors, by the release's names, that can't be written as codes: those whose parts, in arrays of their own,
    don't begin and end at blocks of rows.
    """
    coded = {name: tensors.made[name].shape for name, ones in tensors.names.items() if codes.intersection(ones)}
    held = [array for array in fit.arrays if not coded.keys().isdisjoint(_made_of([array]))]
    sizes = dict.fromkeys(_made_of(held), 2 * VALUES.itemsize + 1)
    weights = source.weights
    grids = [grid_of(array, weights[array.key], sizes, coded, options.unit_bytes) for array in held]
    amiss: set[str] = set()
    for group in find_twins(held, math.inf):
        if not _is_in_blocks(held, grids, group, options.unit_bytes, coded):
            amiss.update(_made_of(held[number] for number in group))
    return {one for name in amiss for one in tensors.names[name]}


def _made_of(arrays: Iterable[Array]) -> Iterator[str]:
    """The tensors that arrays become."""
    return (name for array in arrays for part in array.parts for name in part.tensors)


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
    source: OrbaxCheckpoint, table: _Table, tensors: _Tensors, written: _Written, given: Given | None
) -> Iterator[Problem]:
    """What stands against codes: there are none; or not those of a given release, since it, or what is written, hasn't
    the weight, or a weight's parts, in arrays of their own, don't begin and end at blocks.
    """
    if not given:
        if not written.quantized:
            yield Problem("quantised", source.root, "none of its weights is one that is quantised")
        return
    left = {table.released[name].name for name in {*tensors.dropped, *tensors.taken} if name in table.released}
    yield from given.problems
    yield from given.missing(written.entries, left)
    for name, _, _ in written.entries:
        if name in given.scales and name not in written.quantized:
            message = f"{given.files.root} has it in FP8, but its parts in the checkpoint don't begin at blocks; export it, then quantize that"
            yield Problem("quantised", name, message)


def _cut(
    options: ExportOptions,
    source: OrbaxCheckpoint,
    table: _Table,
    fit: _Fit,
    written: _Written,
    merged: Mapping[str, Encoding],
    carried: Mapping[str, Encoding],
    slots: int | None,
) -> tuple[FileLayout, Cut]:
    """Which tensor goes into which file, and the units: those of the arrays, then those of what is carried."""
    order = {tensor.name: tensor.file for tensor in table.released.values()}
    entries = [*with_scales(written.entries, written.quantized), *written.carried]
    files = plan_files(entries, order or None, options.max_shard_size)
    sizes = _element_bytes(written, merged)
    made = cut(fit.arrays, source.weights, sizes, written.coded, options.unit_bytes, slots)
    others = _carrying(carried, len(fit.arrays), files, options.unit_bytes, slots)
    return files, dataclasses.replace(made, units=made.units + others)


def _element_bytes(written: _Written, merged: Mapping[str, Encoding]) -> dict[str, int]:
    """Bytes that an element of each tensor takes while it is made: as it is written, in float32 where an adapter is
    added, as a code.
    """
    return {
        name: dtype.itemsize + (VALUES.itemsize if name in merged else 0) + (name in written.coded)
        for name, dtype in written.dtypes.items()
    }


def _carrying(
    carried: Mapping[str, Encoding], first: int, files: FileLayout, unit_bytes: int, slots: int | None
) -> tuple[tuple[Block, ...], ...]:
    """The units of the tensors that are taken from the release; they count as arrays behind the last."""
    return tuple(
        tuple(dataclasses.replace(block, array=first + block.array) for block in unit)
        for unit in row_units(carried, files, unit_bytes, (), slots)
    )


def _plan(table: _Table, fit: _Fit, tensors: _Tensors, problems: Sequence[Problem]) -> Plan:
    """The plan of the arrays, with what stands against it."""
    family, config, naming = table.family, table.config, table.naming
    dropped = {table.spelled(name): reason for name, reason in tensors.dropped.items()}
    note = family.note(config, fit.layout)
    maxtext, _ = maxtext_of(family, config, fit.layout, naming)
    return Plan(
        family.name, fit.arrays, dropped, tuple(problems), note, family.support, naming.model, naming.sizes, maxtext
    )


def _lossy(
    arrays: Iterable[Array],
    written: _Written,
    names: Mapping[str, tuple[str, ...]],
    merged: Iterable[str],
    view: _View,
) -> dict[str, str]:
    """By tensor, why its values aren't those of the array to the bit."""
    rounded = {one: reason for name, reason in _rounded(arrays, written.dtypes, view).items() for one in names[name]}
    rounded |= {one: "merged in float32, rounded once" for name in merged for one in names[name]}
    return rounded | dict.fromkeys(sorted(written.quantized), REASON)


def _rounded(arrays: Iterable[Array], dtypes: Mapping[str, np.dtype], view: _View) -> dict[str, str]:
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
                    stored = view.weights[array.key].label or array.dtype.name
                    reasons[name] = f"{stored}, rounded to {dtype.name}"
    return reasons


def _rounded_again(carried: Mapping[str, Encoding], written: Iterable[Entry]) -> dict[str, str]:
    """Of the tensors that are taken from the release, those whose values aren't its own to the bit."""
    reasons = {}
    for name, dtype, _ in written:
        had, label = _stored_dtype(carried[name]), carried[name].label
        if label or (is_float(had) and not holds(dtype, had)):
            reasons[name] = f"{label or had.name}, rounded to {dtype.name}"
    return reasons


def _config_edits(table: _Table, fit: _Fit, drops: _Drops, tensors: _Tensors, like: Like) -> dict[str, Any]:
    """What `config.json` has to say otherwise: rows of a cut vocabulary, prediction layers and towers that aren't there,
    the class of the language model alone.
    """
    nested = table.config.get("text_config")
    text = nested if isinstance(nested, dict) else table.config
    edits = _vocabulary(text, fit, tensors)
    if _lacks_predictions(drops, tensors):
        edits |= {field: 0 for field in NEXTN if text.get(field)}
    edits |= _without_towers(table.config, drops, tensors)
    if table.form is not like:
        edits |= {field: table.form.config[field] for field in ("architectures", "model_type")}
    return edits


def _vocabulary(text: Mapping[str, Any], fit: _Fit, tensors: _Tensors) -> dict[str, Any]:
    """The size of the vocabulary, where the checkpoint has another."""
    rows = {tensors.made[name].shape[0] for name in _made_of(array for array in fit.arrays if array.key == EMBEDDING)}
    if len(rows) == 1 and (count := rows.pop()) != text.get("vocab_size", count):
        return {"vocab_size": count}
    return {}


def _lacks_predictions(drops: _Drops, tensors: _Tensors) -> bool:
    """Whether the table leaves prediction layers out, and they aren't taken from the release."""
    left_out, taken = (
        any(isinstance(reason, Prediction) for reason in reasons.values()) for reasons in (drops.reasons, tensors.taken)
    )
    return left_out and not taken


def _without_towers(config: Config, drops: _Drops, tensors: _Tensors) -> dict[str, Any]:
    """The fields by which a model is made without the towers that the table leaves out, and that aren't taken from the
    release.
    """
    there = [reason.absent for reason in tensors.taken.values() if isinstance(reason, Tower)]
    return {
        field: value
        for tower in drops.reasons.values()
        if isinstance(tower, Tower) and tower.absent not in there
        for field, value in tower.absent.items()
        if not _is_absent(config, field, value)
    }


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


def _quantization(written: _Written, given: Given | None, view: _View, like: Like) -> dict[str, Any]:
    """`quantization_config` as it will be; empty where nothing is quantised."""
    if view.kept:
        plain = [(name, dtype, shape) for name, dtype, shape in written.entries if dtype.name != CODED]
        block = max(max(scaled.block) for scaled in view.scaled.values())
        made = quantization_config([*plain, *written.carried], frozenset()) | {"weight_block_size": [block, block]}
        return dict(Quantization.of(like.config).fields) or made
    if not written.quantized:
        return {}
    if given:
        return given.quantization_config
    return quantization_config([*written.entries, *written.carried], written.quantized)


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


def load(inputs: Mapping[str, Any]) -> Export:
    """The export that `Export.stage` staged."""
    tensors = {name: (dtype, tuple(shape), file) for name, (dtype, shape, file) in inputs["like"]["tensors"].items()}
    like = Like(**{**inputs["like"], "tensors": tensors})
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
