"""What a person sees of plans and checkpoints: tables on the terminal."""

from __future__ import annotations

import argparse
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from weightbeam.formats.printable import printable
from weightbeam.formats.storage import open_store
from weightbeam.model_mappings.cells import pattern
from weightbeam.model_mappings.plan import PARAMETERS, Plan
from weightbeam.transforms.conversion import Conversion, rules_of
from weightbeam.transforms.makespan import Estimate
from weightbeam.transforms.mesh import base_rules, model_rules

BASE_BYTES = 384 << 20  # a worker process with Beam, numpy and TensorStore, before any unit
TENSOR_BYTES = 1536  # of the plan, for each tensor of the source
UNIT_BYTES = 10 << 10  # of the assembly, for each unit: its descriptor, its ledger entry, the keys of its database


class _PrintableConsole(Console):
    """A console that takes texts as they are, and shows no stranger's control characters or markup."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(printable(each, lines=True) if isinstance(each, str) else each for each in objects), **options)


ROWS = 2000  # of a table
CELL = 300  # characters of a table's cell: names are the files', however long
CONSOLE = _PrintableConsole(highlight=False, markup=False, emoji=False, soft_wrap=True, width=None if os.isatty(1) else 200)


THREADS_PER_CORE, MAX_THREADS = 2, 32  # one thread reads or writes while another computes


def local_threads() -> int:
    """Threads of a local run."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(THREADS_PER_CORE * cores, MAX_THREADS)


def threads_of(options: Mapping[str, Any], default: int | None = None) -> int:
    """Units that one process works on at a time, by Beam's options; where they don't say it `default`, or as many as in a local run."""
    return int(options.get("number_of_worker_harness_threads") or options.get("direct_num_workers") or default or local_threads())


def thread_options(arguments: Sequence[str]) -> dict[str, int | None]:
    """What `threads_of` wants to know, without Beam."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--direct_num_workers", "--number_of_worker_harness_threads"):
        parser.add_argument(option, type=int)
    return vars(parser.parse_known_args(list(arguments))[0])


def count(n: int, noun: str) -> str:
    """`1 problem`, `2 problems`."""
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def collapse(lines: Iterable[str]) -> list[str]:
    """Lines that differ only in numbers, once each."""
    groups: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        groups[pattern(line)].append(line)
    return [same[0] + (f" (and {len(same) - 1} alike)" if len(same) > 1 else "") for same in groups.values()]


def memory_bound(conversion: Conversion, threads: int) -> int:
    """Bytes of memory that a worker needs at most."""
    return threads * thread_bytes(conversion) + base_bytes(conversion)


def thread_bytes(conversion: Conversion) -> int:
    """Bytes that each thread needs at most: a unit, and what reading takes beside it."""
    return conversion.options.unit_bytes + open_store(conversion.checkpoint.root).held_bytes


def base_bytes(conversion: Conversion) -> int:
    """Bytes of a worker that no unit needs."""
    return BASE_BYTES + TENSOR_BYTES * len(conversion.checkpoint.tensors) + UNIT_BYTES * len(conversion.units)


def duration(seconds: float) -> str:
    """Seconds for people: `9.5 min`, `1 h 05 min`."""
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{seconds / 60:.1f} min"


def human(nbytes: float) -> str:
    """Bytes for people: 1.5 GB."""
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


class _PrintableTable(Table):
    """A table whose cells may hold strangers' texts, and of which there may be as many as there are names."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        if self.row_count == ROWS:
            cells, options = (f"… and more than {ROWS:,} others",), {}
        elif self.row_count > ROWS:
            return
        super().add_row(*(printable(cell, CELL) if isinstance(cell, str) else cell for cell in cells), **options)


def table(*columns: str) -> Table:
    """A plain table; columns that begin with `>` are aligned right."""
    made = _PrintableTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        made.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left", overflow="fold")
    return made


def shape_text(shape: Iterable[int]) -> str:
    """`4096 × 32 × 128`."""
    return " × ".join(map(str, shape)) or "scalar"


def print_plan(conversion: Conversion, threads: int) -> None:
    """The whole plan: arrays (alike layers collapsed), drops, warnings and totals."""
    plan, grids = conversion.plan, {grid.spec.key: grid for grid in conversion.grids}
    groups: dict[tuple, list[str]] = defaultdict(list)
    for array in plan.arrays:
        grid = grids.get(array.key)
        chunk = shape_text(grid.spec.chunk) if grid else "–"
        axes = " ".join(name or "-" for name in array.names)
        groups[pattern(array.key), array.shape, array.dtype.name, axes, chunk, array.lossy].append(array.key)
    arrays = table("array", "shape", "dtype", "logical axes", "chunk", ">arrays", "exact")
    for (_, shape, dtype, axes, chunk, lossy), keys in groups.items():
        name = keys[0] if len(keys) == 1 else f"{keys[0]} …"
        arrays.add_row(name.removeprefix(PARAMETERS), shape_text(shape), dtype, axes, chunk, str(len(keys)), lossy or "yes")
    CONSOLE.print(arrays)
    if plan.dropped:
        drops = table(">left out", "why", "for example")
        examples = {reason: name for name, reason in reversed(plan.dropped.items())}
        for reason, times in Counter(plan.dropped.values()).items():
            drops.add_row(str(times), reason, examples[reason])
        CONSOLE.print()
        CONSOLE.print(drops)
    if conversion.checkpoint.ignored:
        CONSOLE.print(f"\nnot in the index, ignored: {', '.join(conversion.checkpoint.ignored)}")
    for warning in collapse(conversion.warnings):
        CONSOLE.print(f"warning: {warning}")
    options = conversion.options
    source, read = conversion.source_bytes, conversion.read_bytes
    totals = table("", "")
    totals.add_row("family", plan.family + (f": {plan.note}" if plan.note else ""))
    totals.add_row("supported", plan.support)
    totals.add_row("MaxText model", model_text(plan))
    totals.add_row(
        "layout", ("scanned" if options.scan_layers else "unscanned") + ", " + (f"for {', '.join(options.mesh)}" if options.mesh else "for any mesh")
    )
    if rules := rules_text(conversion):
        totals.add_row("sharding rules", rules)
    totals.add_row("source", f"{human(source)} in {len(conversion.checkpoint.shards)} files, {len(conversion.checkpoint.tensors):,} tensors")
    totals.add_row("target", f"{human(conversion.target_bytes)} in {len(plan.arrays):,} arrays")
    if conversion.units:
        totals.add_row("units", f"{len(conversion.units):,}, the largest takes {human(conversion.unit_working_bytes)} of memory")
        totals.add_row("reads", f"{human(read)}, {read / source:.3f} × the source")
        sum_of = f"{threads} threads × {human(thread_bytes(conversion))} + {human(base_bytes(conversion))}"
        totals.add_row("memory", f"at most {human(memory_bound(conversion, threads))} a worker: {sum_of}")
    CONSOLE.print()
    CONSOLE.print(totals)


def print_estimates(estimates: Iterable[Estimate]) -> None:
    """How long a conversion takes on how many workers."""
    rows = table(">workers", ">time", ">of it units", ">vCPU hours", ">cost", "limited by")
    for each in estimates:
        times = duration(each.wall_seconds), duration(each.unit_seconds)
        rows.add_row(f"{each.workers:,}", *times, f"{each.vcpu_hours:,.1f}", f"{each.cost:,.2f}", each.limit)
    CONSOLE.print("\nsimulated, on workers of Dataflow:")
    CONSOLE.print(rows)


def model_text(plan: Plan) -> str:
    """Which of MaxText's models it is, and the sizes that MaxText must be told."""
    if plan.model is None:
        return "none has these sizes"
    return f"{plan.model}, but {' '.join(f'{key}={value}' for key, value in plan.sizes.items())}" if plan.sizes else plan.model


def rules_text(conversion: Conversion) -> str:
    """Whose logical axis rules are used, and where they differ for these arrays; empty for those of MaxText's base.yml."""
    model, given = conversion.options.maxtext_model, conversion.options.sharding_rules
    base, whose = (base_rules(), f"MaxText's for {model}") if given is None else (model_rules(model), "--sharding_rules")
    known = {name for array in conversion.plan.arrays for name in array.names if name}
    rules = rules_of(conversion.options)
    changed = [name for name in sorted(known) if [axes for n, axes in rules if n == name and axes] != [axes for n, axes in base if n == name and axes]]
    if not changed and given is None:
        return ""
    return f"{whose}, which differ for {', '.join(changed) or 'no axis of this model'}"


def json_report(conversion: Conversion, threads: int) -> dict[str, Any]:
    """What `weightbeam plan --json` writes; see `docs/data_model.md`."""
    plan, grids = conversion.plan, {grid.spec.key: grid for grid in conversion.grids}
    arrays = {}
    for array in plan.arrays:
        grid = grids.get(array.key)
        arrays[array.key] = {
            "shape": array.shape,
            "dtype": array.dtype.name,
            "axes": array.names,
            "chunk": grid.spec.chunk if grid else None,
            "partition": grid.partition if grid else {},
            "lossy": array.lossy,
        }
    source, read = conversion.source_bytes, conversion.read_bytes
    return {
        "family": plan.family,
        "model": plan.model,
        "sizes": dict(plan.sizes),
        "source": conversion.checkpoint.root,
        "arrays": arrays,
        "dropped": dict(plan.dropped),
        "problems": [{"kind": p.kind, "array" if p.is_array else "tensor": p.subject, "message": p.message} for p in plan.problems],
        "warnings": conversion.warnings,
        "note": plan.note,
        "units": len(conversion.units),
        "bytes": {"source": source, "target": conversion.target_bytes, "read_amplification": read / source if source and conversion.units else None},
        "memory": {"per_worker_bytes": memory_bound(conversion, threads)},
    }
