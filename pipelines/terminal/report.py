"""What a person sees of plans and checkpoints, as values: tables and texts. `tables.py` shows them."""

from __future__ import annotations

import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from weightbeam.formats.orbax import STEP
from weightbeam.formats.orbax.zarr import Format
from weightbeam.formats.text.printable import listed
from weightbeam.model_mappings.cells import pattern
from weightbeam.model_mappings.families import identity
from weightbeam.model_mappings.family import Beyond
from weightbeam.model_mappings.keeping import is_scale
from weightbeam.model_mappings.maxtext_config import FILE, scalar
from weightbeam.model_mappings.plan import PARAMETERS, Array, ArrayPlan, Problem
from weightbeam.model_mappings.scales import CODES
from weightbeam.pipelines.terminal.tables import Block, Table, count, duration, human, shape_text
from weightbeam.pipelines.terminal.wording import worded
from weightbeam.transforms.cutting.grid import Uneven
from weightbeam.transforms.cutting.mesh import base_rules, model_rules
from weightbeam.transforms.planning.conversion import Conversion, format_of, rules_of
from weightbeam.transforms.planning.makespan import Estimate
from weightbeam.transforms.planning.memory import base_bytes, memory_bound, spare_bytes
from weightbeam.transforms.planning.options import ConvertOptions
from weightbeam.transforms.planning.transfer import Transfer

# of MaxText's keys those that say which checkpoint, and how it is stored
SHORT = {
    *("load_parameters_path", "load_full_state_path", "scan_layers", "model_name"),
    *("checkpoint_storage_use_ocdbt", "checkpoint_storage_use_zarr3"),
}
LAYER = re.compile(r"(?P<before>(?:^|.*?\.)(?:\w*layers|blocks|h))[._](?P<layer>\d+)\.(?P<after>.+)")
EXPERT = re.compile(r"\.experts\.\d+\.")
DEFAULTS = ConvertOptions()
NAMED = 20  # files in a line
Item = TypeVar("Item")
Facts = TypeVar("Facts", bound=Hashable)


def collapse(lines: Iterable[str]) -> list[str]:
    """Lines that differ only in numbers, once each."""
    groups: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        groups[pattern(line)].append(line)
    return [same[0] + (f" (and {len(same) - 1} alike)" if len(same) > 1 else "") for same in groups.values()]


def grouped(
    items: Iterable[Item], name: Callable[[Item], str], facts: Callable[[Item], Facts]
) -> Iterator[tuple[str, Facts, list[Item]]]:
    """Items whose names differ only in numbers, and whose facts are the same: the first one's name, with `…` where there
    are more, the facts, and the items.
    """
    groups: dict[tuple[str, Facts], list[Item]] = defaultdict(list)
    for item in items:
        groups[pattern(name(item)), facts(item)].append(item)
    for (_, shared), same in groups.items():
        yield name(same[0]) + (" …" if len(same) > 1 else ""), shared, same


def kind_and_layer(name: str) -> tuple[str, int]:
    """What a tensor is in its layer, and which that is; experts of a layer are one kind, what lies in no layer is in
    layer -1.
    """
    match = LAYER.fullmatch(EXPERT.sub(".experts.*.", name))
    return (match["after"], int(match["layer"])) if match else (name, -1)


def memory_text(planned: Transfer, threads: int, output: str | None) -> str:
    """A worker's bound on memory, and what it is the sum of: each thread, the units that are under way besides, the
    rest.
    """
    spare = spare_bytes(planned, output)
    parts = (
        f"{threads} threads × {human(planned.thread_bytes)}",
        f"{human(spare)} read ahead, written behind or on the way" if spare else "",
        human(base_bytes(planned)),
    )
    return f"at most {human(memory_bound(planned, threads, output))} a worker: {' + '.join(filter(None, parts))}"


def units_text(planned: Transfer) -> str:
    """How many units there are and how large, and for how many at a time they were cut."""
    size = f"{len(planned.units):,}, the largest takes {human(planned.unit_working_bytes)} of memory"
    return size + (f", cut for {planned.slots:,} at a time" if planned.slots else "")


def plan_blocks(conversion: Conversion, threads: int, output: str | None) -> Iterator[Block]:
    """The whole plan: arrays (alike layers collapsed), what is rounded, drops, warnings and totals."""
    plan = conversion.plan
    yield _arrays_table(conversion)
    if rounded := Counter(plan.lossy.values()):
        yield from ("", _rounded_table(rounded))
    if plan.dropped:
        yield from ("", _dropped_table(plan.dropped))
    if conversion.adapters:
        yield from ("", _adapters_table(conversion))
    if conversion.source.ignored:
        yield from ("", f"not part of the model, ignored: {listed(conversion.source.ignored, NAMED)}")
    for warning in warnings_of(conversion):
        yield f"warning: {warning}"
    yield from ("", Table.of((*_model_totals(conversion), *_size_totals(conversion, threads, output))))


def count_arrays(keys: Collection[str]) -> str:
    """`13 arrays`, and whether the step is one of them, which isn't a weight."""
    return count(len(keys), "array") + (f" ({STEP.key} among them)" if STEP.key in keys else "")


def _arrays_table(conversion: Conversion) -> Table:
    """The arrays; those that differ only in the numbers of their names are one row."""
    grids = {grid.spec.key: grid for grid in conversion.grids}

    def facts(array: Array) -> tuple[str, str, str, str, str | None]:
        grid = grids.get(array.key)
        chunk = shape_text(grid.spec.chunk) if grid else "–"
        axes = " ".join(name or "-" for name in array.logical_axes)
        return shape_text(array.shape), array.dtype.name, axes, chunk, array.lossy

    spare = ("logical axes", "dtype", "exact", "arrays", "chunk")
    table = Table("array", "shape", "dtype", "logical axes", "chunk", ">arrays", "exact", spare=spare)
    for name, (*cells, lossy), same in grouped(conversion.plan.arrays, lambda array: array.key, facts):
        table.add_row(name.removeprefix(PARAMETERS), *cells, str(len(same)), "rounded" if lossy else "yes")
    return table


def _rounded_table(rounded: Mapping[str, int]) -> Table:
    """How many arrays are rounded, by the reason."""
    table = Table(">rounded", "why")
    for reason, times in rounded.items():
        table.add_row(count(times, "array"), reason)
    return table


def _dropped_table(dropped: Mapping[str, str]) -> Table:
    """How many tensors are left out, by the reason, each with the first of them."""
    table = Table(">left out", "why", "for example", spare=("for example",))
    examples = {reason: name for name, reason in reversed(list(dropped.items()))}
    for reason, times in Counter(dropped.values()).items():
        table.add_row(str(times), reason, examples[reason])
    return table


def _adapters_table(conversion: Conversion) -> Table:
    """The adapters, and what is done with the tensors of each."""
    table = Table(">adapter", "weight", "what is done with its tensors")
    for adapter, uses in zip(conversion.adapters, conversion.uses, strict=False):
        done = Counter(use.partition(" into ")[0] for use in uses.values())
        text = "; ".join(f"{times:,} {what}" for what, times in done.items())
        table.add_row(adapter.root, f"{adapter.weight:g}", text)
    return table


def _model_totals(conversion: Conversion) -> Iterator[tuple[str, str]]:
    """Which model it is, and how MaxText will hold it."""
    plan, options = conversion.plan, conversion.options
    yield "family", plan.family + (f": {plan.note}" if plan.note else "")
    layout = "the release's own, for "
    if not is_as_released(plan):
        yield "supported", plan.support
        yield "MaxText", f"{options.maxtext}, its tree and its names of axes"
        yield "MaxText model", model_text(plan)
        layout = "scanned, for " if options.scan_layers else "unscanned, for "
    if plan.maxtext:
        yield "MaxText flags", plan.maxtext.command_line()
    yield "layout", layout + (" and for ".join(options.mesh) or "any mesh")
    if options.save_dtype == CODES:
        keys = {array.key for array in plan.arrays}
        kept = sum(is_scale(key, keys) for key in keys)
        yield (
            "weights",
            f"{count(kept, 'array')} of FP8 codes, each with its scales beside it; the others in their own dtypes",
        )
    if rules := rules_text(conversion):
        yield "sharding rules", rules


def _size_totals(conversion: Conversion, threads: int, output: str | None) -> Iterator[tuple[str, str]]:
    """How large the two ends are, and what the way between them takes."""
    source, size, read = conversion.source, conversion.source_bytes, conversion.read_bytes
    yield "source", f"{human(size)} in {count(len(source.shards), 'file')}, {count(len(source.tensors), 'tensor')}"
    yield "target", f"{human(conversion.target_bytes)} in {count(len(conversion.plan.arrays), 'array')}"
    if conversion.units:
        yield "units", units_text(conversion)
        yield "reads", f"{human(read)}, {read / size:.3f} × the source"
        yield "memory", memory_text(conversion, threads, output)


def estimate_blocks(estimates: Sequence[Estimate]) -> Iterator[Block]:
    """How long a conversion takes on how many workers; there is at least one number of them."""
    rows = Table(">workers", ">time", ">of it units", ">vCPU hours", ">cost", "limited by")
    for each in estimates:
        times = duration(each.wall_seconds), duration(each.unit_seconds)
        rows.add_row(f"{each.workers:,}", *times, f"{each.vcpu_hours:,.1f}", f"{each.cost:,.2f}", each.limit)
    worker = estimates[0].worker
    about = f"{count(worker.threads, 'unit')} at a time, {worker.gbps:g} Gbit/s each way, {worker.start:g} s until they work"
    yield from ("", f"simulated, on workers of {worker.engine}, {about}:", rows)


def is_as_released(plan: ArrayPlan) -> bool:
    """Whether the arrays are the release's tensors under their own names, for other programs than MaxText."""
    return plan.family == identity.FAMILY.name


def model_text(plan: ArrayPlan) -> str:
    """Which of MaxText's models it is, and the sizes that MaxText must be told."""
    if plan.model is None:
        return "none has these sizes"
    return (
        f"{plan.model}, but {' '.join(f'{key}={value}' for key, value in plan.sizes.items())}"
        if plan.sizes
        else plan.model
    )


def maxtext_flags(conversion: Conversion, path: str) -> dict[str, str]:
    """What MaxText must be told to load the checkpoint at `path`: `key=value` of its command line."""
    plan, options = conversion.plan, conversion.options
    flags: dict[str, Any] = {"load_parameters_path": path}
    if options.adapter_only and conversion.folding:
        flags = adapter_flags(path, conversion.folding.metadata)
    if plan.maxtext:
        flags |= {"scan_layers": options.scan_layers} | plan.maxtext.flags()
    else:
        flags["scan_layers"] = options.scan_layers
        flags |= {"model_name": plan.model} if plan.model else {}
        flags |= {"override_model_config": True} | dict(plan.sizes) if plan.sizes else {}
        flags |= {"vocab_size": options.vocab_size} if options.vocab_size else {}
        flags |= (
            {"param_scan_axis": options.param_scan_axis}
            if options.scan_layers and options.param_scan_axis != DEFAULTS.param_scan_axis
            else {}
        )
        flags |= {"mtp_num_layers": 1} if options.mtp else {}
        flags |= {"use_multimodal": True} if options.multimodal else {}
    return {name: scalar(value) for name, value in (flags | storage_flags(format_of(options))).items()}


def adapter_flags(path: str, scaling: Mapping[str, Any]) -> dict[str, Any]:
    """What MaxText must be told to load an adapter. Rank and alpha among it: MaxText compares them with the metadata, but
    only after it has made the factors.
    """
    said = {f"lora.{key}": scaling[key] for key in ("lora_rank", "lora_alpha") if key in scaling}
    return {"lora.enable_lora": True, "lora.lora_restore_path": path} | said


def maxtext_lines(flags: Mapping[str, str], step: str, has_file: bool) -> list[str]:
    """What MaxText must be told, for a person: what contradicts the model's own file stands in the step's `maxtext.yml`,
    if there is one, with the whole command line.
    """
    contradicts = has_file and "override_model_config" in flags
    shown = {name: value for name, value in flags.items() if not contradicts or name in SHORT or "." in name}
    words = " ".join(shlex.quote(f"{name}={value}") for name, value in shown.items())
    lines = [f"in MaxText: {words}"]
    if contradicts:
        lines.append(f"            and the keys of {step}/{FILE}; a comment in it has them as overrides")
    return lines


def storage_flags(format: Format) -> dict[str, Any]:
    """What MaxText must be told of how a checkpoint is stored, where that isn't its default."""
    said = {"checkpoint_storage_use_ocdbt": format.use_ocdbt, "checkpoint_storage_use_zarr3": format.use_zarr3}
    return {flag: False for flag, is_used in said.items() if not is_used}


def warnings_of(conversion: Conversion) -> tuple[str, ...]:
    """What should be known before it is carried out, with numbers, once each."""
    others, cut = [], []
    if adapter := next((name for name in conversion.source.ignored if name.startswith("adapter_model")), ""):
        others.append(
            f"{adapter} lies beside the model, and isn't merged into it; --lora {shlex.quote(conversion.source.root)} merges it"
        )
    for why in conversion.plan.dropped.values():
        if isinstance(why, Beyond) and why.tensor in conversion.encodings:
            rows = conversion.encodings[why.tensor].shape[0]
            off = rows - why.kept
            cut.append(
                f"{why.tensor}: {off:,} of {rows:,} rows ({off / rows:.0%}) are cut off, as --vocab_size={why.kept} asks"
            )
    return tuple(map(worded, collapse([*cut, *by_mesh(conversion.warnings), *others])))


def by_mesh(warnings: Iterable[str]) -> list[str]:
    """Warnings, with one for each mesh that doesn't divide axes, in whatever arrays, before the others."""
    uneven: dict[str, list[str]] = defaultdict(list)  # mesh -> the axes that it doesn't divide
    others = []
    for warning in warnings:
        if isinstance(warning, Uneven):
            uneven[warning.mesh].append(warning.axis)
        else:
            others.append(warning)
    meshes = [
        f"what doesn't divide over {mesh}: {', '.join(sorted(set(axes)))}, in {count(len(axes), 'array')}; MaxText will refuse that mesh"
        for mesh, axes in uneven.items()
    ]
    return [*meshes, *others]


def refused_meshes(conversion: Conversion) -> list[str]:
    """The meshes that don't divide an axis which they shard: JAX makes no array of such a sharding, so MaxText stops."""
    return list(dict.fromkeys(each.mesh for grid in conversion.grids for each in grid.uneven))


def rules_text(conversion: Conversion) -> str:
    """Whose logical axis rules are used, and where they differ for these arrays; empty for those of MaxText's base.yml."""
    model, given = conversion.options.maxtext_model, conversion.options.sharding_rules
    base, whose = (
        (base_rules(), f"MaxText's for {model}") if given is None else (model_rules(model), "--sharding_rules")
    )
    known = {name for array in conversion.plan.arrays for name in array.logical_axes if name}
    rules = rules_of(conversion.options)
    changed = [
        name
        for name in sorted(known)
        if [axes for n, axes in rules if n == name and axes] != [axes for n, axes in base if n == name and axes]
    ]
    if not changed and given is None:
        return ""
    return f"{whose}, which differ for {', '.join(changed) or 'no axis of this model'}"


def json_report(
    conversion: Conversion, threads: int, output: str | None, problems: Sequence[Problem]
) -> dict[str, Any]:
    """What `weightbeam plan --json` writes; see `docs/reference/plan.md`."""
    plan, grids = conversion.plan, {grid.spec.key: grid for grid in conversion.grids}
    arrays = {}
    for array in plan.arrays:
        grid = grids.get(array.key)
        arrays[array.key] = {
            "shape": array.shape,
            "dtype": array.dtype.name,
            "axes": array.logical_axes,
            "chunk": grid.spec.chunk if grid else None,
            "partition": grid.partition if grid else {},
            "lossy": array.lossy,
        }
    source, read = conversion.source_bytes, conversion.read_bytes
    return {
        "family": plan.family,
        "model": plan.model,
        "sizes": dict(plan.sizes),
        "maxtext_version": conversion.options.maxtext,
        "maxtext": plan.maxtext.to_dict() if plan.maxtext else None,
        "maxtext_overrides": plan.maxtext.command_line() if plan.maxtext else None,
        "limits": list(plan.maxtext.limits) if plan.maxtext else [],
        "source": conversion.source.root,
        "arrays": arrays,
        "dropped": dict(plan.dropped),
        "adapters": [
            {
                "source": adapter.root,
                "weight": adapter.weight,
                "r": adapter.config.r,
                "lora_alpha": adapter.config.alpha,
                "tensors": dict(uses),
            }
            for adapter, uses in zip(conversion.adapters, conversion.uses, strict=False)
        ],
        "problems": [problem.to_dict() for problem in problems],
        "warnings": conversion.warnings,
        "note": plan.note,
        "units": len(conversion.units),
        "slots": conversion.slots,
        "bytes": {
            "source": source,
            "target": conversion.target_bytes,
            "read_amplification": read / source if source and conversion.units else None,
        },
        "memory": {"per_worker_bytes": memory_bound(conversion, threads, output)},
    }
