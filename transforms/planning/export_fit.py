"""The first steps of an export's planner: whose table a checkpoint's arrays are of, in which layout, what no array makes,
and whether the tensors that they become are the release's (`export_planner.py` draws the steps).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from weightbeam.formats.orbax.scaled import ScaledArray, scaled_arrays, values_of
from weightbeam.formats.orbax.source import OrbaxArray, OrbaxCheckpoint
from weightbeam.formats.release.source import ZEROS, open_source
from weightbeam.model_mappings.audit import audit, drop_reason
from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.families import identity
from weightbeam.model_mappings.family import Family, Prediction, Variable, rename
from weightbeam.model_mappings.keeping import is_scale
from weightbeam.model_mappings.naming import ModelNameError, check_made_for, name_model
from weightbeam.model_mappings.ops import dtype_named
from weightbeam.model_mappings.plan import PARAMETERS, Array, ArrayPlan, Problem, TensorSpec, expand, is_float, key_of
from weightbeam.model_mappings.registry import UnknownFamilyError, family_of
from weightbeam.model_mappings.scales import ARRAY_SUFFIX
from weightbeam.model_mappings.spares import read_back
from weightbeam.transforms.planning.export_state import ExportDrops, ExportFit, ExportTable, ExportView, ReleasedTensor
from weightbeam.transforms.planning.exporting import Export, Like, dtype_of_model
from weightbeam.transforms.planning.layouts import (
    SCAN_AXES,
    TOWERS,
    config_problem,
    layout_of,
    scan_axis_of,
    scan_of,
    version_of,
    version_said,
)
from weightbeam.transforms.planning.options import AUTO, CODED, ExportOptions
from weightbeam.transforms.planning.other_sizes import changed, describe, find_sizes
from weightbeam.transforms.planning.text_model import text_model


def view_weights(options: ExportOptions, source: OrbaxCheckpoint, like: Like) -> ExportView:
    """The checkpoint's weights as the export takes them: codes as they are where they are asked for, or where the
    release has codes and nothing else is.
    """
    coded = bool(source.tree.scales)
    kept = (
        coded and not options.quantize and (options.save_dtype == CODED or (options.save_dtype == AUTO and like.coded))
    )
    return ExportView(source.weights if kept else values_of(source), scaled_arrays(source) if kept else {})


def without_kept(options: ExportOptions, source: OrbaxCheckpoint, view: ExportView) -> Iterator[Problem]:
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


def without_scales(view: ExportView) -> Iterator[Problem]:
    """Weights that are FP8 codes and have no scales beside them: they are no values."""
    for key, array in view.weights.items():
        is_code = array.dtype.name.startswith("float8") and not is_scale(key, view.weights)
        if is_code and key not in view.scaled:
            message = f"{array.dtype.name} without scales, which would be {key}{ARRAY_SUFFIX}: FP8 codes are no values without them"
            yield Problem("dtype", key, message, is_array=True)


def without_table(
    options: ExportOptions,
    source: OrbaxCheckpoint,
    like: Like,
    error: ConfigError | UnknownFamilyError | ModelNameError,
) -> Export:
    """The export of a model that there is no table for, or whose `config.json` a table can't do with: the one problem."""
    problem = config_problem(error)
    if isinstance(error, ConfigError) and options.maxtext_config:
        hint = f"{options.maxtext_config} doesn't say it; name a release of the model in its place (--like)"
        problem = dataclasses.replace(problem, message=f"{problem.message}, and {hint}")
    plan = ArrayPlan("unknown", (), {}, (problem,))
    return Export(options=options, source=source, like=like, plan=plan, form=like)


def find_table(options: ExportOptions, source: OrbaxCheckpoint, like: Like) -> ExportTable:
    """Whose table it is, which of MaxText's models, and the release's tensors by the table's names.

    Raises:
      ConfigError: `config.json` lacks what tells.
      ModelNameError: the model that was named isn't this one, or the checkpoint was made for one of another kind.
      UnknownFamilyError: there is no table.
    """
    model = options.maxtext_model or _said_model(source)
    family = family_of(Config(like.config), model, options.family or _said_family(source))
    form = text_model(like, family) if options.multimodal is False else like
    config = Config(form.config)
    naming = name_model(family, config, model)
    try:
        check_made_for(family, source.record, naming.model, source.root)
    except ModelNameError as another:
        made = source.record["model"]
        if model is not None or made is None:
            raise
        try:
            naming = name_model(family, config, made)  # the release's configuration is another one's
        except ModelNameError:
            raise another from None
    released = _released(form, family)
    if like.release is None:  # it is what the checkpoint remembers of the release that it was made of
        left_out = source.record.get("dropped")
        said = left_out.items() if isinstance(left_out, Mapping) else ()
        zeros = {name for name, why in said if why == ZEROS}
        released = {name: tensor for name, tensor in released.items() if name not in zeros}
    stored = open_source(like.release) if like.release else None
    return ExportTable(family, naming, form, config, released, stored)


def _said_family(source: OrbaxCheckpoint) -> str | None:
    """The identity, where a checkpoint of ours has a release's tensors under their own names."""
    return identity.FAMILY.name if source.record.get("family") == identity.FAMILY.name else None


def _said_model(source: OrbaxCheckpoint) -> str | None:
    """The MaxText model that a checkpoint of ours was made for."""
    model = source.options.get("maxtext_model")
    return model if isinstance(model, str) else None


def _released(like: Like, family: Family) -> dict[str, ReleasedTensor]:
    """The release's tensors by the table's names."""
    return {
        rename(name, family.aliases): ReleasedTensor(dtype, shape, file, name)
        for name, (dtype, shape, file) in like.tensors.items()
    }


def find_arrays(options: ExportOptions, source: OrbaxCheckpoint, table: ExportTable, view: ExportView) -> ExportFit:
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
    options: ExportOptions, source: OrbaxCheckpoint, table: ExportTable, weights: Mapping[str, OrbaxArray | ScaledArray]
) -> list[Layout]:
    """The layouts that the checkpoint may be in: more than one where nothing says on which axis its layers are stacked."""
    shapes = {name: tensor.shape for name, tensor in table.released.items()}
    layout = layout_of(weights, scan_of(source, weights), table.naming.model, shapes)
    layout = dataclasses.replace(layout, maxtext=version_said(source))
    layout = dataclasses.replace(layout, maxtext=version_of(table.family, table.config, layout, weights))
    said = options.param_scan_axis if options.param_scan_axis is not None else scan_axis_of(source)
    axes = SCAN_AXES if said is None else (said,)
    return [dataclasses.replace(layout, scan_axis=axis) for axis in (axes if layout.scan else axes[:1])]


def _fit(table: ExportTable, view: ExportView, layout: Layout) -> ExportFit:
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
        elif not is_float(weights[key].dtype) and not any(part.rule.integer for part in parts):
            message = f"{weights[key].dtype.name} in the checkpoint, but what is made of it are floating-point weights"
            problems.append(Problem("dtype", key, message, is_array=True))
            misfit.update(name for part in parts for name in part.tensors)
        else:
            fill = next((part.fill for part in parts if part.fill is not None), None)
            arrays.append(Array(key, shape, weights[key].dtype, parts[0].logical_axes, tuple(parts), fill))
    unknown = weights.keys() - set(map(key_of, expanded))
    message = f"the {family.name} table makes no tensor of it"
    problems += [Problem("unused", key, message, is_array=True) for key in weights if key in unknown]
    return ExportFit(tuple(arrays), layout, tuple(problems), lacking, misfit)


def explain_sizes(
    options: ExportOptions, source: OrbaxCheckpoint, table: ExportTable, fit: ExportFit, view: ExportView
) -> tuple[list[Problem], ExportTable, ExportFit]:
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
    cause = Problem("like", table.form.root or "config.json", f"has other sizes: {describe(table.config, sizes)}")
    made = {
        name
        for parts in expand(table.family, table.config, fit.layout).values()
        for part in parts
        for name in part.tensors
    }
    table = dataclasses.replace(table, config=changed(table.config, sizes))
    return [cause], table, dataclasses.replace(find_arrays(options, source, table, view), misfit=made)


def _missing(key: str, family: Family) -> Problem:
    """An array that the checkpoint should hold."""
    message = f"the {family.name} table makes tensors of it, but the checkpoint doesn't hold it"
    if not key.startswith(PARAMETERS):
        message += "; it is no parameter, which MaxText's converter leaves out: --like RELEASE takes it from there"
    return Problem("missing", key, message, is_array=True)


def find_drops(table: ExportTable, fit: ExportFit) -> ExportDrops:
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
    return ExportDrops(reasons, variables, copies)


def _variables(table: ExportTable, lacking: Mapping[str, str]) -> dict[str, Variable]:
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


def audit_tensors(
    table: ExportTable, fit: ExportFit, drops: ExportDrops
) -> tuple[dict[str, TensorSpec], dict[str, str], list[Problem]]:
    """Checks the tensors that arrays become against the release's.

    Returns:
      These tensors; what is left out of the release, with the reason; and all problems so far: a variable that can be
      taken from the release is none.
    """
    shapes = _tensor_shapes(fit.arrays)
    specs = _specs(fit.arrays, shapes, table.released, drops.copies, table.form) | _coded_specs(fit.arrays, shapes)
    dropped, found = audit(fit.arrays, specs, drops.reasons, table.family.name)
    if table.stored and (unused := [one.subject for one in found if one.kind == "unused"]):
        zeros, _ = table.stored.renamed(table.family.aliases).drop_zero_biases(unused)
        dropped, found = dropped | zeros, [one for one in found if one.subject not in zeros]
    if not table.released:
        found = [one for one in found if one.kind != "missing"]
    explained = {("missing", fit.lacking[name]) for name in drops.variables}
    told = {("unused", name) for name in (*fit.lacking, *fit.misfit)}  # of the arrays that they would become
    problems = [one for one in fit.problems if (one.kind, one.subject) not in explained]
    problems += [one for one in found if (one.kind, one.subject) not in told]
    return {name: specs[name] for name in shapes}, dropped, problems


def _tensor_shapes(arrays: Iterable[Array]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that arrays are made into: as far as their windows reach, and what is padding."""
    shapes: dict[str, tuple[int, ...]] = {}
    for array in arrays:
        for part in array.parts:
            reach = tuple(indices[-1] + 1 for indices in part.source_box())
            if part.rule.padded:
                reach = (part.rule.padded, *reach[1:])
            for name in part.tensors:
                held = shapes.get(name, reach)
                shapes[name] = tuple(map(max, held, reach))
    return shapes


def _specs(
    arrays: Iterable[Array],
    shapes: Mapping[str, tuple[int, ...]],
    released: Mapping[str, ReleasedTensor],
    copies: Mapping[str, str],
    like: Like,
) -> dict[str, TensorSpec]:
    """What the audit compares: the tensors that arrays become and those that the release has, in its dtypes; but for
    copies of others.
    """
    said = dtype_named(dtype_of_model(like.config) or "bfloat16")
    integers = {
        name: array.dtype for array in arrays for part in array.parts if part.rule.integer for name in part.tensors
    }
    specs = {
        name: TensorSpec(shape, _integer(integers[name]) if name in integers else said, like.root or "the table")
        for name, shape in shapes.items()
    }
    for name, (dtype, shape, file, _) in released.items():
        if name not in copies:
            specs[name] = TensorSpec(shapes.get(name, shape), dtype_named(dtype), file)
    return specs


def _integer(dtype: np.dtype) -> np.dtype:
    """The dtype of a tensor of integers, by that of its array: training stores them as floats."""
    return dtype if np.issubdtype(dtype, np.integer) else np.dtype(np.int64)


def _coded_specs(arrays: Iterable[Array], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorSpec]:
    """The tensors of arrays that are codes, or scales: they stay what they are."""
    keys = {array.key for array in arrays}
    scales = {array.key for array in arrays if is_scale(array.key, keys)}
    coded = [array for array in arrays if array.key in scales or array.key + ARRAY_SUFFIX in scales]
    return {
        name: TensorSpec(shapes[name], array.dtype, array.key)
        for array in coded
        for part in array.parts
        for name in part.tensors
    }
