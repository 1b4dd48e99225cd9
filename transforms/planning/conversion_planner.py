"""The planner: from options and headers to a conversion, in named steps. Of tensors only samples are read.

    headers, config.json
      │  open_source      the release's tensors, each as the tables see it: a quantised one under its own name, its scales out of sight
      │  family_of        whose table it is; `_check_options`: what was asked for and MaxText doesn't have
      │  name_model       MaxText's model
      │  _lay_out         the layout of the arrays
      │  fold | merge     adapters: as arrays of their own (`--adapter_only`), or added to the tensors that they change
      │  _expand          the table's rules, at this model's sizes
      │  _keep            weights that stay codes: a second array, of scales, beside each (`--save_dtype float8_e4m3fn`)
      │  make_arrays      the arrays, with the dtypes that the tensors give them
      │  _audit           every element used once, filled, or left out with a reason
      │  _check_copies    what is left out as a copy of another tensor is one
      ▼  _cut             chunk grids, what stays in the source's files (`--virtual`), units
    Conversion

A step that finds something amiss says so in a list of problems; the next steps go on as far as they can, so that a user
sees all problems at once. Only without a table there is nothing to go on with.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from weightbeam.formats.adapters import Adapter, Folding, fold, merge
from weightbeam.formats.adapters.merging import other_bases
from weightbeam.formats.adapters.ties import Ties, find_ties
from weightbeam.formats.encodings import Encoding, Overhead, stored_bytes
from weightbeam.formats.orbax.zarr import ArraySpec
from weightbeam.formats.release.source import SAMPLE_BYTES, ReleaseTensors, open_source
from weightbeam.formats.safetensors import HfCheckpoint
from weightbeam.model_mappings.adapters import adapter_family
from weightbeam.model_mappings.audit import audit, drop_reason
from weightbeam.model_mappings.blocks import TIED_HEAD
from weightbeam.model_mappings.boxes import Box
from weightbeam.model_mappings.cells import Part
from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.family import Family, Prediction, rename
from weightbeam.model_mappings.keeping import (
    check_modules,
    keep_codes,
    maxtext_keys,
    why_without_codes,
    without_mapping,
)
from weightbeam.model_mappings.maxtext_config import MaxTextConfig
from weightbeam.model_mappings.naming import ModelNaming, name_model, unknown_name
from weightbeam.model_mappings.ops import dtype_named
from weightbeam.model_mappings.plan import PARAMETERS, Array, ArrayPlan, Problem, expand, make_arrays
from weightbeam.model_mappings.registry import UnknownFamilyError, family_of
from weightbeam.model_mappings.scales import CODES, TENSOR_SUFFIX
from weightbeam.transforms.cutting.blocks import Block, cut_blocks, element_box, find_twins, make_units
from weightbeam.transforms.cutting.grid import (
    Grid,
    SourceCost,
    UnitBytesError,
    count_experts,
    make_grid,
    selecting_axes,
    uneven_scales,
)
from weightbeam.transforms.cutting.mesh import Mesh
from weightbeam.transforms.cutting.virtual import Placement, loads_of, place_arrays, problems_of, warnings_of
from weightbeam.transforms.planning.conversion import Conversion, dtype_of, format_of, meshes_of, rules_of
from weightbeam.transforms.planning.explaining import config_problems, explain, without_parts
from weightbeam.transforms.planning.layouts import maxtext_of
from weightbeam.transforms.planning.options import ConvertOptions, options_from

COPY = "copy"  # the kind of problem where what is left out as a copy of another tensor isn't one
# problems of one quantised tensor, which don't count where it is dropped
PAIRING = {"unscaled", "scale", "orphan scale"}


@dataclasses.dataclass(frozen=True)
class _Table:
    """A family's table at the sizes of one model.

    Attributes:
      parts: what each rule makes, by the array's path.
      drops: tensors left out on purpose: `{pattern or window: reason}`.
      note: what was inferred.
      maxtext: what MaxText's configuration says of the model; None where `config.json` doesn't settle it.
      warnings: what MaxText can't say of the model.
    """

    parts: Mapping[str, list[Part]]
    drops: Mapping[str, str]
    note: str
    maxtext: MaxTextConfig | None
    warnings: Sequence[str]


@dataclasses.dataclass(frozen=True)
class _Grids:
    """How arrays are cut; all empty if they can't be, and then `problems` say why.

    Attributes:
      grids: one for each array.
      placements: for each array whether it stays in the source's files; empty without `--virtual`.
      units: the blocks of each unit.
    """

    grids: tuple[Grid, ...] = ()
    placements: tuple[Placement, ...] = ()
    units: tuple[tuple[Block, ...], ...] = ()
    warnings: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def plan_conversion(
    options: ConvertOptions, checkpoint: HfCheckpoint, adapters: Sequence[Adapter] = (), slots: int | None = None
) -> Conversion:
    """Plans a conversion, with adapters merged into the source's tensors. What stands against it is in `plan.problems`.

    Its units are cut for `slots` of them at a time, if that is known; see `blocks.target_bytes`.

    Raises:
      MeshError: a mesh can't be read.
    """
    meshes = meshes_of(options)
    config = Config(checkpoint.config)
    source = open_source(checkpoint)
    misfits, contradictions = source.check_config(checkpoint.config)
    folding: Folding | None = None
    try:
        family = family_of(config, options.maxtext_model, options.family)
        misfits += _check_options(options, family)
        source = source.renamed(family.aliases)
        naming = name_model(family, config, options.maxtext_model)
        layout = _lay_out(options, naming.model, source)
        if not checkpoint.problems:  # else tensors of them may be in what can't be read
            layout, lacking = without_parts(family, config, layout, source)
            misfits += lacking
        model_type = config.get("model_type", "")
        ties = find_ties(config, source.encodings, family, layout) if adapters else Ties()
        if options.adapter_only:
            table = family.table(config, layout)
            folding = fold(source.encodings, adapters, family.aliases, model_type, table, ties, checkpoint.cut)
            family = adapter_family(family, folding.stacks, folding.rank)
            source = ReleaseTensors(folding.encodings, folding.problems)
        stored = source
        merged = () if folding else adapters
        merging = merge(source.encodings, merged, family.aliases, model_type, ties, source.lost, checkpoint.cut)
        source = source.merged(merging)
        table = _expand(family, config, layout, naming)
        if options.save_dtype == CODES:
            table, source = _keep(family, table, source, options.quantize)
    except (ConfigError, UnknownFamilyError) as e:
        found = [
            *checkpoint.problems,
            *source.problems,
            *misfits,
            *(problem for adapter in adapters for problem in adapter.problems),
        ]
        if config:  # else that it is missing, or empty, is a problem already
            found += config_problems(e, config, _lay_out(options, options.maxtext_model, source), options.family)
        return _without_table(options, checkpoint, adapters, found)
    arrays = make_arrays(table.parts, source.specs(), dtype_of(options))
    if folding:
        arrays = tuple(dataclasses.replace(array, key=array.key.removeprefix(PARAMETERS)) for array in arrays)
    unneeded = _unneeded(source, family, table)
    dropped, problems = _audit(checkpoint, source, family, table, arrays, misfits, unneeded)
    problems += merging.in_vain(dropped)
    if not (arrays or problems):
        problems.append(Problem("missing", checkpoint.root, "holds no tensor"))
    known = {problem.subject for problem in problems} | checkpoint.lost | stored.lost
    compared, unlike = _check_copies(stored, family.copies(config, layout), dropped, known)
    dropped, problems = dropped | compared, [*problems, *unlike]
    cut = _cut(options, arrays, source.encodings, meshes, slots) if not problems else _Grids()
    problems += cut.problems
    dropped = {**dropped, **source.dropped, **{problem.subject: reason for problem, reason in unneeded.items()}}
    return Conversion(
        options=options,
        source=checkpoint,
        plan=ArrayPlan.of(
            family.supporting(layout, dropped), naming, arrays, dropped, problems, table.note, table.maxtext
        ),
        encodings=source.encodings,
        grids=cut.grids,
        units=cut.units,
        warnings=(
            *checkpoint.notes,
            *other_bases(adapters, checkpoint.root),
            *(() if checkpoint.cut else contradictions),
            *cut.warnings,
            *table.warnings,
        ),
        placements=cut.placements,
        adapters=tuple(adapters),
        merging=merging,
        folding=folding,
        slots=slots,
    )


def _without_table(
    options: ConvertOptions, checkpoint: HfCheckpoint, adapters: Sequence[Adapter], found: Sequence[Problem]
) -> Conversion:
    """The conversion of a model that there is no table for, or whose `config.json` a table can't do with: its problems
    alone.
    """
    plan = ArrayPlan("unknown", (), {}, tuple(dict.fromkeys(found)))
    return Conversion(options=options, source=checkpoint, plan=plan, adapters=tuple(adapters))


def _lay_out(options: ConvertOptions, model: str | None, source: ReleaseTensors) -> Layout:
    """What besides `config.json` the table of a MaxText model depends on."""
    return Layout(
        scan=options.scan_layers,
        scan_axis=options.param_scan_axis,
        vocab=options.vocab_size,
        mtp=options.mtp,
        multimodal=options.multimodal,
        model=model,
        maxtext=options.maxtext,
        shapes={name: spec.shape for name, spec in source.specs().items()},
    )


def _expand(family: Family, config: Config, layout: Layout, naming: ModelNaming) -> _Table:
    """The family's table at this model's sizes. Raises ConfigError where `config.json` lacks what the table needs."""
    parts = expand(family, config, layout)
    drops, note = family.drops(config, layout), family.note(config, layout)
    maxtext, warnings = maxtext_of(family, config, layout, naming)
    return _Table(parts, drops, note, maxtext, (*warnings, *unknown_name(naming.model)))


def _keep(family: Family, table: _Table, source: ReleaseTensors, quantize: str | None) -> tuple[_Table, ReleaseTensors]:
    """The table, and the tensors, with codes and scales in place of the values of quantised weights, or of those that
    are to be.
    """
    made = source.quantized if quantize else source.as_codes
    source = made(lambda name: drop_reason(name, table.drops))
    parts, problems = keep_codes(table.parts, source.blocks)
    problems += check_modules(parts, family.name) if source.blocks and not problems else []
    maxtext = table.maxtext
    if maxtext and source.blocks:
        maxtext = maxtext.with_keys(maxtext_keys(parts, max(block[-1] for block in source.blocks.values())))
    table = dataclasses.replace(
        table, parts=parts, maxtext=maxtext, warnings=(*table.warnings, *without_mapping(family.name))
    )
    placed = {name for same in parts.values() for part in same for name in part.tensors}
    lost = {scale for name in source.blocks if problems and (scale := name + TENSOR_SUFFIX) not in placed}
    return table, dataclasses.replace(source, problems=(*source.problems, *problems), lost=source.lost | lost)


def _unneeded(source: ReleaseTensors, family: Family, table: _Table) -> dict[Problem, str]:
    """The problems of one quantised tensor that don't count, since the table leaves the tensor out, each with the
    reason for that.
    """
    pairing = [problem for problem in source.problems if problem.kind in PAIRING]
    return {
        problem: reason
        for problem in pairing
        if (reason := drop_reason(rename(problem.subject, family.aliases), table.drops))
    }


def _audit(
    checkpoint: HfCheckpoint,
    source: ReleaseTensors,
    family: Family,
    table: _Table,
    arrays: Sequence[Array],
    misfits: Sequence[Problem],
    unneeded: Collection[Problem],
) -> tuple[dict[str, str], list[Problem]]:
    """Checks that every tensor is used and every element of an array made once: what is left out with the reason, and
    all problems so far. `misfits` are those of the options and of `config.json`.

    A tensor that its file or its scale already stands against needs no second line.
    """
    problems = [*checkpoint.problems, *(problem for problem in source.problems if problem not in unneeded), *misfits]
    dropped, found = audit(arrays, source.specs(), table.drops, family.name)
    if (checkpoint.shards or not problems) and not any(problem.kind == "quantised" for problem in problems):
        zeros, spare = source.drop_zero_biases(problem.subject for problem in found if problem.kind == "unused")
        dropped, problems = dropped | zeros, [*problems, *spare]
        explained = {problem.subject for problem in problems} | checkpoint.lost | source.lost | zeros.keys()
        problems += [problem for problem in found if problem.subject not in explained]
        problems = explain(problems, family, arrays, source)
    return dropped, problems


def _check_copies(
    source: ReleaseTensors, copies: Mapping[str, str], dropped: Mapping[str, str], known: Collection[str]
) -> tuple[dict[str, str], list[Problem]]:
    """Compares samples of what is left out as copies with what they should be copies of; `verify` compares all of it.

    Args:
      copies: what each is a copy of.
      dropped: what is left out, with the reason.
      known: the tensors that something else stands against, which aren't compared.

    Returns:
      The reason for each that was compared, which says so, and a problem for each that differs.
    """
    meant = {
        name: of
        for name, of in copies.items()
        if name in dropped and not isinstance(dropped[name], Prediction) and name not in known and of not in known
    }
    unlike, problems = source.find_unlike(meant), []
    for name, how in unlike.items():
        again = (
            "set tie_word_embeddings to false in config.json" if dropped[name] == TIED_HEAD else "convert without --mtp"
        )
        message = (
            f"left out ({dropped[name]}), but it isn't the same as {meant[name]}: {how}; if that is meant, {again}"
        )
        problems.append(Problem(COPY, name, message))
    sample = f"(the same in a sample of {SAMPLE_BYTES >> 10} KiB)"
    compared = {name: f"{dropped[name]} {sample}" for name, of in meant.items() if of in source.encodings}
    return {name: why for name, why in compared.items() if name not in unlike}, problems


def _cut(
    options: ConvertOptions,
    arrays: Sequence[Array],
    encodings: Mapping[str, Encoding],
    meshes: Sequence[Mesh],
    slots: int | None,
) -> _Grids:
    """Cuts the arrays into chunks and shards, and these into units; with `--virtual` only those that can't stay where
    they are.
    """
    placements: tuple[Placement, ...] = ()
    problems: list[Problem] = []
    try:
        grids = _grids(options, arrays, encodings, meshes)
        warnings: list[str] = [each for grid in grids for each in grid.uneven]
        problems += uneven_scales(grids)
        if options.virtual:
            placements = place_arrays(arrays, encodings, meshes, grids)
            problems += problems_of(arrays, placements, format_of(options))
            grids = [
                dataclasses.replace(grid, spec=at.spec) if at.spec else grid
                for grid, at in zip(grids, placements, strict=True)
            ]
            warnings += warnings_of(arrays, placements, loads_of(grids, meshes))
        made = [number for number in range(len(arrays)) if not (placements and placements[number].spec)]
        units = _units(options, arrays, made, grids, encodings, slots) if not problems else ()
    except UnitBytesError as e:
        return _Grids(problems=(Problem("memory", f"--unit_bytes={options.unit_bytes}", str(e)),))
    return _Grids(tuple(grids), placements, tuple(units), tuple(warnings), tuple(problems))


def _check_options(options: ConvertOptions, family: Family) -> Iterator[Problem]:
    """What was asked for and MaxText doesn't have."""
    if options.quantize and options.save_dtype != CODES:
        yield Problem("option", f"--quantize={options.quantize}", f"makes codes, which --save_dtype {CODES} writes")
    if options.save_dtype == CODES and (why := why_without_codes(options.maxtext)):
        yield Problem("option", f"--maxtext={options.maxtext}", why)
    if options.mtp and not family.mtp:
        yield Problem("option", "--mtp", f"MaxText's {family.name} models have no multi-token-prediction layers")
    if options.multimodal and not family.towers:
        yield Problem("option", "--multimodal", f"MaxText's {family.name} models have no vision or audio towers")
    if options.adapter_only and options.scan_layers and options.param_scan_axis > 1:
        message = "the factors of an adapter end with the rank, behind the layers: MaxText stacks them on axis 0 or 1"
        yield Problem("option", f"--param_scan_axis={options.param_scan_axis}", message)
    wanted = "scanned" if options.scan_layers else "unscanned"
    if wanted not in family.layouts:
        (other,) = family.layouts
        flag = f"--scan_layers {str(other == 'scanned').lower()}"
        yield Problem("option", "--scan_layers", f"MaxText has {family.name} models {other} only; convert with {flag}")


def _grids(
    options: ConvertOptions, arrays: Sequence[Array], encodings: Mapping[str, Encoding], meshes: Sequence[Mesh]
) -> list[Grid]:
    rules, save, experts = rules_of(options), dtype_named(options.save_dtype), count_experts(arrays)
    twins = {number: len(group) for group in find_twins(arrays) for number in group}
    grids, refused = [], list[UnitBytesError]()
    for number, array in enumerate(arrays):
        stored = _source_cost(array, encodings, save)
        try:
            grids.append(
                make_grid(
                    array, stored, meshes, rules, options.unit_bytes // twins[number], format_of(options), experts
                )
            )
        except UnitBytesError as e:
            refused.append(UnitBytesError(e.key, e.needed * twins[number]))
    if refused:  # what the largest needs is enough for all
        raise max(refused, key=lambda error: error.needed)
    return grids


def _source_cost(array: Array, encodings: Mapping[str, Encoding], save: np.dtype) -> SourceCost:
    """How the tensors of an array are stored; of several ways what takes most memory."""
    element_bytes, order, indivisible, scales, overhead = 0, None, frozenset[int](), 0, Overhead()
    for part in array.parts:
        decoded = 4 if part.rule.ops else save.itemsize
        for encoding in (encodings[name] for name in part.tensors if name in encodings):
            own = encoding.overhead
            read = stored_bytes(encoding) - own.whole
            stored = -(-read // max(1, math.prod(encoding.shape)))
            element_bytes = max(element_bytes, stored + (decoded if encoding.label else 0))
            order = order or encoding.order
            if encoding.indivisible:
                indivisible = indivisible.union(*(part.axes_of(axis) for axis in encoding.indivisible))
                thin = tuple((0, n if axis in encoding.indivisible else 1) for axis, n in enumerate(encoding.shape))
                scales = max(scales, stored_bytes(encoding, thin))
            overhead = Overhead(*map(max, overhead, own))
    stacks = frozenset[int]().union(*(part.stack_axes for part in array.parts))
    reading = (
        (stacks, overhead.tensor),
        (selecting_axes(array), scales + overhead.matrix),
        (frozenset(), overhead.decoding),
    )
    return SourceCost(element_bytes, order, indivisible, reading)


def _units(
    options: ConvertOptions,
    arrays: Sequence[Array],
    made: Sequence[int],
    grids: Sequence[Grid],
    encodings: Mapping[str, Encoding],
    slots: int | None,
) -> list[tuple[Block, ...]]:
    """The units that make the arrays of these numbers."""
    groups = [[made[twin] for twin in twins] for twins in find_twins([arrays[number] for number in made])]

    def cut(number: int, unit_bytes: int) -> Iterator[Block]:
        array, spec = arrays[number], grids[number].spec
        return cut_blocks(
            number, grids[number], unit_bytes, place=lambda shards, _: _position(array, spec, shards, encodings)
        )

    total = sum(grids[number].working_bytes(arrays[number].shape) for number in made)
    return make_units(groups, cut, total, options.unit_bytes, slots)


def _position(array: Array, spec: ArraySpec, shards: Box, encodings: Mapping[str, Encoding]) -> tuple[str, int]:
    """File and offset of the first tensor of a block."""
    cell = next((cell for cell in array.cells(element_box(spec, shards)) if cell.tensor), None)
    stored = encodings[cell.tensor].weight if cell and cell.tensor else None
    return (stored.path, stored.offset) if stored else ("", 0)


def load(inputs: Mapping[str, Any]) -> Conversion:
    """The conversion whose inputs `Conversion.stage` staged."""
    adapters = [Adapter.from_json(adapter) for adapter in inputs["adapters"]]
    made = plan_conversion(
        options_from(ConvertOptions, inputs["options"]),
        HfCheckpoint.from_json(inputs["source"]),
        adapters,
        inputs.get("slots"),
    )
    return dataclasses.replace(made, made_of=inputs["made_of"], to=inputs["to"])
