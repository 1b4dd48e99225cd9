"""`weightbeam inspect`: what a checkpoint holds, and what loading it costs."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from weightbeam.formats.orbax import STEP, find_items, item_metadata, open_arrays, read_arrays, record_of
from weightbeam.formats.printable import printable
from weightbeam.formats.safetensors import open_checkpoint
from weightbeam.formats.storage import StorageError, Store, open_store
from weightbeam.formats.zarr import ArraySpec
from weightbeam.model_mappings.cells import pattern
from weightbeam.model_mappings.plan import PARAMETERS
from weightbeam.pipelines import report
from weightbeam.pipelines.errors import RefusedError
from weightbeam.pipelines.prepare import describe, open_source, options_of, refuse, sharding_rules
from weightbeam.transforms.conversion import prepare
from weightbeam.transforms.load import Load, load_of, total
from weightbeam.transforms.mesh import Mesh, MeshError, Rules, axes_in, axes_of, model_rules, partition_spec, read_rules

MAX_DEVICES = 1 << 18
CUSTOM = 2000  # characters of metadata that aren't ours


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the tree of an Orbax checkpoint, or the tensors of a folder of safetensors files; with meshes the load of the checkpoint."""
    if rest:
        raise RefusedError(f"unknown options: {' '.join(rest)}; see weightbeam inspect --help")
    try:
        store = open_store(args.checkpoint)
        store.check_readable()
        if any(name == "config.json" or name.endswith(".safetensors") for name in store.entries()):
            if args.mesh:
                raise RefusedError(f"{store}: --mesh is for Orbax checkpoints")
            return _safetensors(store)
        items = find_items(store)
        return _load(items, args) if args.mesh else _orbax(items)
    except (StorageError, MeshError) as e:
        raise RefusedError(str(e)) from e
    except (OSError, ValueError, KeyError, TypeError) as e:  # a checkpoint whose metadata is damaged
        raise RefusedError(f"{args.checkpoint}: can't be read: {e}") from e


def _orbax(items: Store) -> int:
    arrays = read_arrays(items)
    rows = report.table("array", "shape", "dtype", "chunk", "shard", ">arrays", ">bytes")
    groups = defaultdict(list)
    for array in arrays:
        spec = array.spec
        groups[pattern(spec.key), spec.shape, spec.dtype.name, spec.chunk, spec.shard, array.compressed].append(spec)
    for (_, shape, dtype, chunk, shard, compressed), specs in groups.items():
        name = specs[0].key if len(specs) == 1 else f"{specs[0].key} …"
        size = len(specs) * math.prod(shape) * specs[0].dtype.itemsize
        packed = report.shape_text(shard) if shard != chunk else "= chunk"
        stored = dtype + (" compressed" if compressed else "")
        rows.add_row(name, report.shape_text(shape), stored, report.shape_text(chunk), packed, str(len(specs)), report.human(size))
    report.CONSOLE.print(rows)
    total = sum(math.prod(array.spec.shape) * array.spec.dtype.itemsize for array in arrays)
    print(f"\n{items}: {len(arrays):,} arrays, {report.human(total)}")
    if custom := item_metadata(items):
        _provenance(custom)
    return 0


def _load(items: Store, args: argparse.Namespace) -> int:
    """What the hosts of each mesh read of a checkpoint."""
    arrays = [array.spec for array in read_arrays(items) if array.spec.key != STEP.key]
    rules, axes = _axes(items, args)
    meshes = [Mesh.parse(text, axes_in(rules)) for text in args.mesh]
    for mesh in meshes:
        if mesh.devices > MAX_DEVICES:
            raise RefusedError(f"--mesh={mesh.text}: {mesh.devices:,} devices; {MAX_DEVICES:,} are what can be counted")
    known = [spec for spec in arrays if len(axes.get(spec.key, ())) == len(spec.shape) and spec.key in axes]
    if not known:
        whose = args.source or "what its conversion.json tells"
        raise RefusedError(f"{items}: none of its {len(arrays):,} arrays is among {whose}, e.g. {arrays[0].key if arrays else 'none'}")
    groups = defaultdict(list)
    for spec in known:
        groups[pattern(spec.key), spec.shape, spec.dtype.name, spec.chunk, spec.shard, tuple(axes[spec.key])].append(spec)
    for mesh in meshes:
        _print_load(mesh, rules, groups)
    if unknown := sorted({spec.key for spec in arrays} - {spec.key for spec in known}):
        report.CONSOLE.print(f"\nnot counted, since their logical axes aren't known: {report.count(len(unknown), 'array')}, e.g. {unknown[0]}")
    return 0


def _print_load(mesh: Mesh, rules: Rules, groups: Mapping[tuple, Sequence[ArraySpec]]) -> None:
    rows = report.table("array", "shape", "sharded over", "chunk", ">arrays", ">a host needs", ">reads", ">worst", ">mean")
    loads, refused = [], []
    for (*_, names), specs in groups.items():
        spec, assignments = specs[0], partition_spec(names, rules)
        load = load_of(spec, assignments, mesh) * len(specs)
        over = [",".join(axis for axis in axes_of(axes) if mesh.sizes.get(axis, 1) > 1) or "-" for axes in assignments]
        name = (specs[0].key if len(specs) == 1 else f"{specs[0].key} …").removeprefix(PARAMETERS)
        cells = (report.shape_text(spec.shape), " × ".join(over), report.shape_text(spec.chunk), str(len(specs)))
        rows.add_row(name, *cells, *_figures(load))
        loads.append(load)
        if any(size % mesh.ways(axes) for size, axes in zip(spec.shape, assignments, strict=True)):
            refused.append(specs[0].key)
    rows.add_section()
    rows.add_row("all", "", "", "", str(sum(map(len, groups.values()))), *_figures(total(loads)))
    print(f"\n{mesh.text}: {report.count(mesh.devices, 'host')} with one device each")
    report.CONSOLE.print(rows)
    if refused:
        kinds = report.count(len(refused), "kind")
        print(f"warning: {mesh.text} doesn't divide {kinds} of arrays evenly, e.g. {printable(refused[0])}; MaxText will refuse that mesh")


def _figures(load: Load) -> tuple[str, ...]:
    """Bytes and reads of the host that reads most; bytes read for each byte needed."""
    return report.human(load.needed.max()), f"{load.reads.max():,}", f"{load.worst:.2f} ×", f"{load.mean:.2f} ×"


def _axes(items: Store, args: argparse.Namespace) -> tuple[Rules, Mapping[str, Sequence[str | None]]]:
    """The logical axis rules, and the logical axes of the arrays: of the source's plan, else as the checkpoint tells them.

    Raises:
      RefusedError: neither is to be had.
    """
    record = record_of(items)
    made = record.get("options", {})
    model = args.maxtext_model or made.get("maxtext_model")
    rules = sharding_rules(args.sharding_rules, model)
    if rules is None and made.get("sharding_rules"):
        rules = read_rules(made["sharding_rules"], ())
    rules = model_rules(model) if rules is None else rules
    if not args.source:
        if "axes" not in record:
            raise RefusedError(f"{items} doesn't tell its arrays' logical axes; --source FOLDER with the model's config.json would (its weights aren't needed)")
        return rules, record["axes"]
    conversion = prepare(options_of(args, items, open_arrays(items)), open_source(args.source))
    if not conversion.plan.arrays:
        refuse(conversion, conversion.plan.problems)
    return rules, {array.key: array.names for array in conversion.plan.arrays}


def _provenance(custom: dict[str, Any]) -> None:
    """Where the checkpoint comes from, as far as it says."""
    about = custom.get("weightbeam")
    if not isinstance(about, dict) or not isinstance(about.get("versions"), dict):
        print(printable("custom metadata: " + json.dumps(custom), CUSTOM))
        return
    rows = report.table("", "")
    for name in ("source", "family", "model", "plan"):
        rows.add_row(name, str(about.get(name)))
    options = {name: f"{len(value)} rules" if name == "sharding_rules" and value else value for name, value in about.get("options", {}).items()}
    rows.add_row("options", ", ".join(f"{name}={value}" for name, value in options.items() if value not in (None, [])))
    rows.add_row("versions", ", ".join(f"{name} {version}" for name, version in about["versions"].items()))
    if virtual := about.get("references"):
        rows.add_row("virtual", f"{report.count(virtual['arrays'], 'array')}, {report.human(virtual['bytes'])}, in the source's own files")
    for reason, times in about.get("dropped", {}).items():
        rows.add_row("left out", f"{report.count(times, 'tensor')}: {reason}")
    if lossy := about.get("lossy"):
        rows.add_row("rounded", f"{report.count(len(lossy), 'array')}, e.g. {next(iter(lossy.values()))}")
    report.CONSOLE.print(rows)


def _safetensors(store: Store) -> int:
    checkpoint = open_checkpoint(store)
    rows = report.table("tensor", "shape", "dtype", ">tensors", ">bytes")
    groups = defaultdict(list)
    for tensor in checkpoint.tensors.values():
        groups[pattern(tensor.name), tensor.shape, tensor.dtype.name].append(tensor)
    for (_, shape, dtype), tensors in groups.items():
        name = tensors[0].name if len(tensors) == 1 else f"{tensors[0].name} …"
        rows.add_row(name, report.shape_text(shape), dtype, str(len(tensors)), report.human(sum(t.nbytes for t in tensors)))
    report.CONSOLE.print(rows)
    total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    count, kind = f"{len(checkpoint.tensors):,} tensors in {len(checkpoint.shards)} files", checkpoint.config.get("model_type")
    report.CONSOLE.print(f"\n{store}: model_type {printable(str(kind), report.CELL)}, {count}, {report.human(total)}")
    if checkpoint.problems:
        raise RefusedError(f"{report.count(len(checkpoint.problems), 'problem')}:\n{describe(checkpoint.problems)}")
    return 0


if __name__ == "__main__":
    from weightbeam.pipelines.cli import main

    sys.exit(main(["inspect", *sys.argv[1:]]))
