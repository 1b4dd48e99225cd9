"""`weightbeam inspect`: what a checkpoint holds, and what loading it costs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weightbeam.formats.orbax import (
    STEP,
    CheckpointArray,
    find_items,
    item_metadata,
    open_arrays,
    read_arrays,
    record_of,
)
from weightbeam.formats.orbax.zarr import ArraySpec
from weightbeam.formats.release.cutting import cut_release
from weightbeam.formats.safetensors import HfCheckpoint, is_release, open_hf
from weightbeam.formats.storage import Store, open_store
from weightbeam.formats.text.printable import printable
from weightbeam.model_mappings.cut import Cut
from weightbeam.model_mappings.plan import PARAMETERS, Problem
from weightbeam.model_mappings.trees import TreeError, recognize
from weightbeam.model_mappings.trust import as_said
from weightbeam.pipelines.checking.recorded import options_made_with
from weightbeam.pipelines.running.problems import refuse
from weightbeam.pipelines.running.sources import open_release, reading
from weightbeam.pipelines.terminal.errors import Refused
from weightbeam.pipelines.terminal.keywords import keywords_of, sharding_rules, takes
from weightbeam.pipelines.terminal.report import count_arrays, grouped
from weightbeam.pipelines.terminal.shell import say
from weightbeam.pipelines.terminal.shown import Shown
from weightbeam.pipelines.terminal.tables import CELL, SAID, Block, Table, count, human, shape_text
from weightbeam.transforms.cutting.mesh import Mesh, Rules, axes_in, axes_of, model_rules, partition_spec, read_rules
from weightbeam.transforms.cutting.read_cost import Load, load_of, total
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import InspectOptions

OF_A_MESH = ("sharding_rules", "source", "maxtext_model")  # which say nothing without one
CUSTOM = 2000  # characters of metadata that aren't ours


class Inspection(Shown):
    """What a checkpoint holds: a value to print, to show in a notebook, and to ask.

    Attributes:
      path: of the checkpoint.
      problems: what stands against reading it.
    """

    path: str

    @property
    def problems(self) -> Sequence[Problem]:
        """Why it isn't what it looks like, such as a tensor that a file cuts off."""
        return ()

    def check(self) -> None:
        """Raises `Refused` with all problems, if there are any."""
        refuse(self.problems)


@dataclasses.dataclass(repr=False)
class OrbaxInspection(Inspection):
    """An Orbax checkpoint: its arrays, and where it comes from as far as it says (`custom`)."""

    path: str
    arrays: Sequence[CheckpointArray]
    custom: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """What wrote its tree, and whether its weights are codes; empty where that isn't known."""
        try:
            return recognize(tuple(array.spec.key.split(".")) for array in self.arrays).kind
        except TreeError:
            return ""

    def blocks(self) -> Iterator[Block]:
        rows = Table(
            "array",
            "shape",
            "dtype",
            "chunk",
            "shard",
            ">arrays",
            ">bytes",
            spare=("shard", "arrays", "dtype", "bytes", "chunk"),
        )

        def facts(array: CheckpointArray) -> tuple[str, str, str, str]:
            spec = array.spec
            stored = spec.dtype.name + (" compressed" if array.compressed else "")
            packed = shape_text(spec.shard) if spec.shard != spec.chunk else "= chunk"
            return shape_text(spec.shape), stored, shape_text(spec.chunk), packed

        for name, cells, same in grouped(self.arrays, lambda array: array.spec.key, facts):
            rows.add_row(name, *cells, str(len(same)), human(sum(_nbytes(array.spec) for array in same)))
        yield rows
        held = count_arrays([array.spec.key for array in self.arrays])
        kind = f" ({self.kind})" if self.kind else ""
        yield from ("", f"{self.path}{kind}: {held}, {human(sum(_nbytes(array.spec) for array in self.arrays))}")
        if self.custom:
            yield from _provenance(self.custom)

    def to_dict(self) -> dict[str, Any]:
        arrays = {
            array.spec.key: {
                "shape": array.spec.shape,
                "dtype": array.spec.dtype.name,
                "chunk": array.spec.chunk,
                "shard": array.spec.shard,
                "compressed": bool(array.compressed),
                "bytes": _nbytes(array.spec),
            }
            for array in self.arrays
        }
        about = {"path": self.path, "format": "orbax", "tree": self.kind}
        return {**about, "arrays": arrays, "custom_metadata": self.custom}


@dataclasses.dataclass(repr=False)
class SafetensorsInspection(Inspection):
    """A folder of safetensors files."""

    path: str
    checkpoint: HfCheckpoint

    @property
    def problems(self) -> Sequence[Problem]:
        return self.checkpoint.problems

    def blocks(self) -> Iterator[Block]:
        checkpoint = self.checkpoint
        rows = Table("tensor", "shape", "dtype", ">tensors", ">bytes", spare=("tensors",))
        groups = grouped(checkpoint.tensors.values(), lambda t: t.name, lambda t: (shape_text(t.shape), t.dtype.name))
        for name, cells, same in groups:
            rows.add_row(name, *cells, str(len(same)), human(sum(tensor.nbytes for tensor in same)))
        yield rows
        nbytes, kind = sum(tensor.nbytes for tensor in checkpoint.tensors.values()), checkpoint.config.get("model_type")
        held = f"{count(len(checkpoint.tensors), 'tensor')} in {count(len(checkpoint.shards), 'file')}"
        taken = f" of it {checkpoint.cut}:" if checkpoint.cut else ""
        yield from ("", f"{self.path}:{taken} model_type {printable(str(kind), CELL)}, {held}, {human(nbytes)}")
        yield from (f"warning: {note}" for note in checkpoint.notes)

    def to_dict(self) -> dict[str, Any]:
        checkpoint = self.checkpoint
        tensors = {
            t.name: {"shape": t.shape, "dtype": t.dtype.name, "file": t.path, "bytes": t.nbytes}
            for t in checkpoint.tensors.values()
        }
        problems = [{"kind": p.kind, "tensor": p.subject, "message": p.message} for p in self.problems]
        return {
            "path": self.path,
            "format": "safetensors",
            "model_type": checkpoint.config.get("model_type"),
            "tensors": tensors,
            "problems": problems,
        }


@dataclasses.dataclass(repr=False)
class LoadInspection(Inspection):
    """What the hosts of each mesh read of an Orbax checkpoint.

    Attributes:
      rows: of each mesh, what each kind of array costs.
      unknown: keys of arrays whose logical axes aren't known, which aren't counted.
    """

    path: str
    rows: Sequence[tuple[Mesh, Sequence[LoadRow]]]
    unknown: Sequence[str]

    def brief(self) -> str:
        return f"{self.path}: what loading it costs on {' and '.join(mesh.text for mesh, _ in self.rows)}"

    def blocks(self) -> Iterator[Block]:
        for mesh, rows in self.rows:
            figures = ">arrays", ">a host needs", ">reads", ">worst", ">mean"
            table = Table(
                "array", "shape", "sharded over", "chunk", *figures, spare=("arrays", "chunk", "shape", "mean", "reads")
            )
            for row in rows:
                table.add_row(
                    row.name,
                    shape_text(row.spec.shape),
                    row.over,
                    shape_text(row.spec.chunk),
                    str(row.arrays),
                    *_figures(row.load),
                )
            table.add_row(
                "all", "", "", "", str(sum(row.arrays for row in rows)), *_figures(total([row.load for row in rows]))
            )
            yield from ("", f"{mesh.text}: {count(mesh.devices, 'host')} with one device each", table)
            if uneven := [row.spec.key for row in rows if row.uneven]:
                kinds = f"{count(len(uneven), 'kind')} of arrays"
                yield f"warning: {mesh.text} doesn't divide {kinds} evenly, e.g. {printable(uneven[0])}; MaxText will refuse that mesh"
        if self.unknown:
            yield from (
                "",
                f"not counted, since their logical axes aren't known: {count(len(self.unknown), 'array')}, e.g. {self.unknown[0]}",
            )

    def to_dict(self) -> dict[str, Any]:
        meshes = {
            mesh.text: {
                "arrays": {
                    row.name: {"arrays": row.arrays, "chunk": row.spec.chunk, "sharded_over": row.over}
                    | _json(row.load)
                    for row in rows
                },
                "all": _json(total([row.load for row in rows])),
            }
            for mesh, rows in self.rows
        }
        return {"path": self.path, "format": "orbax", "meshes": meshes, "unknown": list(self.unknown)}


@dataclasses.dataclass(frozen=True)
class LoadRow:
    """What one kind of array costs on a mesh: how many there are, what each axis is sharded over, and whether it
    divides evenly.
    """

    name: str
    spec: ArraySpec
    over: str
    arrays: int
    load: Load
    uneven: bool


@takes(asked=InspectOptions)
def inspect(checkpoint: str, *, asked: InspectOptions) -> Inspection:
    """Looks at a checkpoint: its arrays or tensors; with meshes, what loading it costs.

    Args:
      checkpoint: an Orbax checkpoint (its root, a step or an item), or safetensors files, in a folder, `gs://` or
        (safetensors) `hf://`.

    Returns:
      The arrays or tensors, with shapes, dtypes, chunks and bytes; for each mesh, bytes read by the bytes that are needed.

    Raises:
      Refused: it can't be read.

    Example:
      >>> wb.inspect("ckpt").brief()
      '.../ckpt/0/items (parameters): 15 arrays (step among them), ...'
    """
    if not checkpoint:
        raise Refused("--checkpoint is missing: what to look at")
    with reading(checkpoint):
        store = open_store(checkpoint)
        if is_release(store):
            if idle := [name for name in ("mesh", *OF_A_MESH) if getattr(asked, name)]:
                raise Refused(f"{store}: --{idle[0]} is for Orbax checkpoints")
            found = SafetensorsInspection(str(store), cut_release(open_hf(store), asked.cut))
            if not found.checkpoint.tensors and not found.checkpoint.config:
                found.check()  # there is nothing to show
            return found
        if asked.cut:
            raise Refused(f"{asked.cut}: is taken of a release, and {store} is an Orbax checkpoint")
        if not asked.mesh and (idle := [name for name in OF_A_MESH if getattr(asked, name) is not None]):
            raise Refused(
                f"--{idle[0]}: is for what loading costs, --mesh AXIS=SIZE,…; name a mesh, too, or leave it out"
            )
        items = find_items(store)
        if asked.mesh:
            return _load(items, asked)
        return OrbaxInspection(str(items), read_arrays(items), item_metadata(items))


def _load(items: Store, asked: InspectOptions) -> LoadInspection:
    """What the hosts of each mesh read of a checkpoint."""
    arrays = [array.spec for array in read_arrays(items) if array.spec.key != STEP.key]
    rules, axes = _axes(items, asked.sharding_rules, asked.source, asked.maxtext_model)
    meshes = [Mesh.parse(text, axes_in(rules)) for text in asked.mesh]
    known = [spec for spec in arrays if len(axes.get(spec.key, ())) == len(spec.shape) and spec.key in axes]
    if not known:
        whose = asked.source or "what its conversion.json tells"
        raise Refused(
            f"{items}: none of its {count(len(arrays), 'array')} is among {whose}, e.g. {arrays[0].key if arrays else 'none'}"
        )

    def facts(spec: ArraySpec) -> tuple[Any, ...]:
        return spec.shape, spec.dtype.name, spec.chunk, spec.shard, tuple(axes[spec.key])

    groups = list(grouped(known, lambda spec: spec.key, facts))
    rows = [(mesh, [_row(mesh, rules, name, names, specs) for name, (*_, names), specs in groups]) for mesh in meshes]
    return LoadInspection(str(items), rows, sorted({spec.key for spec in arrays} - {spec.key for spec in known}))


def _row(mesh: Mesh, rules: Rules, name: str, names: Sequence[str | None], specs: Sequence[ArraySpec]) -> LoadRow:
    spec, assignments = specs[0], partition_spec(names, rules)
    over = [",".join(axis for axis in axes_of(axes) if mesh.sizes.get(axis, 1) > 1) or "-" for axes in assignments]
    uneven = any(size % mesh.ways(axes) for size, axes in zip(spec.shape, assignments, strict=True))
    load = load_of(spec, assignments, mesh) * len(specs)
    return LoadRow(name.removeprefix(PARAMETERS), spec, " × ".join(over), len(specs), load, uneven)


def _figures(load: Load) -> tuple[str, ...]:
    """Bytes and reads of the host that reads most; bytes read for each byte needed."""
    return human(load.needed.max()), f"{load.reads.max():,}", f"{load.worst:.2f} ×", f"{load.mean:.2f} ×"


def _json(load: Load) -> dict[str, Any]:
    return {
        "needed_bytes": int(load.needed.max()),
        "reads": int(load.reads.max()),
        "worst": float(load.worst),
        "mean": float(load.mean),
    }


def _nbytes(spec: ArraySpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def _axes(
    items: Store, given: Any, source: str | None, model: str | None
) -> tuple[Rules, Mapping[str, Sequence[str | None]]]:
    """The logical axis rules, and the logical axes of the arrays: of the source's plan, else as the checkpoint tells
    them. Raises Refused where neither is to be had.
    """
    record = record_of(items)
    made = record.get("options", {})
    model = model or made.get("maxtext_model")
    rules = sharding_rules(given, model)
    if rules is None and made.get("sharding_rules"):
        rules = read_rules(made["sharding_rules"], ())
    rules = model_rules(model) if rules is None else rules
    if not source:
        if "axes" not in record:
            raise Refused(
                f"{items} doesn't tell its arrays' logical axes; --source FOLDER with the model's config.json would (its weights aren't needed)"
            )
        return rules, record["axes"]
    opened = open_release(source, cut=Cut.of(made))
    options = options_made_with(items, open_arrays(items), {"maxtext_model": model}, opened.config)
    conversion = plan_conversion(options, opened)
    if not conversion.plan.arrays:
        refuse(conversion.plan.problems, conversion.source)
    return rules, {array.key: array.logical_axes for array in conversion.plan.arrays}


def _spelled(options: Mapping[str, Any]) -> Iterator[str]:
    """The options of a record, each as `name=value`, with its value as a command line has it."""
    for name, value in options.items():
        if name == "sharding_rules" and value:
            yield f"{name}={count(len(value), 'rule')}"
        elif value is not None:
            for each in value if isinstance(value, list) else [value]:
                text = ",".join(map(str, each)) if isinstance(each, list) else str(each)
                yield f"{name}={text.lower() if isinstance(each, bool) else text}"


def _provenance(custom: Mapping[str, Any]) -> Iterator[Block]:
    """Where the checkpoint comes from, as far as it says."""
    about = custom.get("weightbeam")
    if not isinstance(about, dict) or not isinstance(about.get("versions"), dict):
        yield printable("custom metadata: " + json.dumps(custom), CUSTOM)
        return
    rows = Table("", "")
    for name in ("source", "family", "plan"):
        if about.get(name):
            rows.add_row(name, str(about[name]))
    if about.get("family"):
        rows.add_row("model", str(about.get("model") or "none of MaxText's has these sizes"))
    if before := about.get("resharded_from"):
        rows.add_row("made from", str(before["checkpoint"]))
        if before.get("first", before["checkpoint"]) != before["checkpoint"]:
            rows.add_row("at first", str(before["first"]))
    rows.add_row("options", ", ".join(_spelled(as_said(about.get("options", {})))), most=SAID)
    rows.add_row("versions", ", ".join(f"{name} {version}" for name, version in about["versions"].items()))
    if virtual := about.get("references"):
        rows.add_row(
            "virtual", f"{count(virtual['arrays'], 'array')}, {human(virtual['bytes'])}, in the source's own files"
        )
    for reason, times in about.get("dropped", {}).items():
        rows.add_row("left out", f"{count(times, 'tensor')}: {reason}")
    if lossy := about.get("lossy"):
        rows.add_row("rounded", f"{count(len(lossy), 'array')}, e.g. {next(iter(lossy.values()))}")
    yield rows


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints what a checkpoint holds; with meshes what loading it costs."""
    found = inspect(**keywords_of(args, inspect))
    with reading(args.checkpoint):
        say(args, found)
    found.check()
    return 0
