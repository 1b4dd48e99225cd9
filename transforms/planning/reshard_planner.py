"""The planner of reshards: the new tree, and for each of its arrays the chunks and the way to them. Integers and names only."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from weightbeam.formats.adapters.kernels import AdaptedKernel
from weightbeam.formats.orbax.copying import copy_spec
from weightbeam.formats.orbax.source import OrbaxArray, OrbaxCheckpoint, load_checkpoint
from weightbeam.formats.orbax.state import Surroundings
from weightbeam.formats.orbax.unpacking import why_whole
from weightbeam.formats.orbax.zarr import ArraySpec, Format
from weightbeam.formats.record.provenance import tensors_of, tensors_said
from weightbeam.formats.release.archive import ARCHIVE, edit_archive
from weightbeam.formats.release.cutting import cut_release
from weightbeam.formats.safetensors import HfCheckpoint, Shard
from weightbeam.model_mappings.cells import Part
from weightbeam.model_mappings.config import MAX_COUNT
from weightbeam.model_mappings.cut import Cut, numbers, spans
from weightbeam.model_mappings.keeping import why_without_codes
from weightbeam.model_mappings.ops import dtype_named
from weightbeam.model_mappings.plan import Array, ArrayPlan, Problem, holds, is_float
from weightbeam.transforms.comparing.array_sums import find_lost
from weightbeam.transforms.cutting.blocks import Block, cut_blocks, make_units
from weightbeam.transforms.cutting.grid import (
    Grid,
    Reading,
    UnitBytesError,
    count_experts,
    cut_array,
    largest_divisor,
    uneven_scales,
)
from weightbeam.transforms.cutting.mesh import Assignment, Mesh, Rules, axes_in, model_rules, partition_spec
from weightbeam.transforms.planning.adapting import MaxTextAdapter, adapt, beside
from weightbeam.transforms.planning.exporting import Like
from weightbeam.transforms.planning.options import CODED, FULL, KEEP, ReshardOptions, options_from
from weightbeam.transforms.planning.resharding import ZSTD, Reshard, Way, format_of
from weightbeam.transforms.planning.tree import make_tree
from weightbeam.transforms.planning.tree_model import Kept, Model, NewTree, Taken

COPIES = 3  # in memory of a chunk that is copied: as it was read, as it is decoded, and as TensorStore writes it


def load(inputs: Mapping[str, Any]) -> Reshard:
    """The reshard that `Reshard.stage` staged."""
    options = options_from(ReshardOptions, inputs["options"])
    adapters = [MaxTextAdapter.from_json(adapter) for adapter in inputs["adapters"]]
    return plan_reshard(
        options,
        load_checkpoint(inputs["source"]),
        Surroundings.from_json(inputs["around"]),
        Model.from_json(inputs["model"]),
        adapters,
        inputs.get("slots"),
    )


def plan_reshard(
    options: ReshardOptions,
    source: OrbaxCheckpoint,
    around: Surroundings,
    model: Model,
    adapters: Sequence[MaxTextAdapter] = (),
    slots: int | None = None,
) -> Reshard:
    """Plans a reshard, with adapters merged into the source's kernels. What stands against it is in `plan.problems`.

    Its units are cut for `slots` of them at a time, if that is known; see `blocks.target_bytes`.

    Raises:
      MeshError: a mesh can't be read.
    """
    rules = (
        model_rules(options.maxtext_model or model.name) if options.sharding_rules is None else options.sharding_rules
    )
    meshes = [Mesh.parse(text, axes_in(rules)) for text in options.mesh]
    cut = Cut(options.layers, options.experts, family=options.family)
    taken, amiss = take(cut, source, model) if cut else (None, [])
    tree, problems = make_tree(options, source, model, taken)
    problems = [*amiss, *find_lost(source.record, source.arrays), *problems]
    adapted = adapt(options, source, model, adapters)
    arrays = tuple(_array(kept, source, options, adapted.kernels) for kept in tree.arrays)
    if options.moment_dtype != KEEP and not any(kept.role == "moment" for kept in tree.arrays):
        problems.append(Problem("option", "--moment_dtype", "no moments of an optimizer are written; leave it out"))
    problems += [*_lossless_only(arrays, source), *adapted.problems, *_codes_only(options, arrays, source)]
    ways: tuple[Way, ...] = ()
    units: list[tuple[Block, ...]] = []
    warnings: list[str] = []
    if not problems:
        planner = _Planner(options, source, around, rules, meshes, count_experts(arrays), adapted.kernels)
        ways = tuple(planner.way(kept, array) for kept, array in zip(tree.arrays, arrays, strict=True))
        problems, warnings = planner.problems, list(dict.fromkeys(planner.warnings))
        problems += uneven_scales(way.grid for way in ways)
        if not problems:
            total = sum(way.grid.working_bytes(array.shape) for array, way in zip(arrays, ways, strict=True))
            groups = _read_together(arrays, ways, source)
            units = make_units(
                groups, lambda number, most: _cut(number, ways[number], most), total, options.unit_bytes, slots
            )
    plan = ArrayPlan(tree.family, arrays, tree.left_out, tuple(problems), tree.note, "", model.name)
    return Reshard(
        options=options,
        source=source,
        around=around,
        model=model,
        tree=tree,
        plan=plan,
        ways=ways if not problems else (),
        units=tuple(units),
        warnings=(*warnings, *_find_warnings(options, source, model, tree, bool(adapted.kernels))),
        adapters=tuple(adapters),
        adapted=adapted,
        taken=taken,
        slots=slots,
    )


def _find_warnings(
    options: ReshardOptions, source: OrbaxCheckpoint, model: Model, tree: NewTree, is_adapted: bool
) -> Iterator[str]:
    """What the user should know of a reshard's options, whatever chunks are written."""
    if options.state == FULL and any(kept.role == "moment" for kept in tree.arrays):
        if options.save_dtype != KEEP:
            yield f"training goes on with weights in {options.save_dtype} from here; --state params makes a copy for other uses"
        if is_adapted:
            yield "the optimizer's moments are those of the weights without the adapter; --state params leaves them out"
    if options.save_dtype != KEEP and (whole := _integers(tree, source)):
        more = f", and {len(whole) - 1:,} more" if len(whole) > 1 else ""
        yield f"{whole[0]}{more}: integers, which stay so; --save_dtype {options.save_dtype} is for weights that are floats"
    if tree.misfit:
        yield f"this isn't the model of {model.of}, so nothing is said of it to MaxText: {tree.misfit}"


def take(cut: Cut, source: OrbaxCheckpoint, model: Model) -> tuple[Taken | None, list[Problem]]:
    """The layers and experts that are wanted, and what stands against them: a cut of the release that the checkpoint
    remembers, or of its `config.json` alone.
    """
    said = model.remembered or source.record
    tensors = tensors_of(said) if isinstance(said.get("tensors"), Mapping) else {}
    release = HfCheckpoint("", dict(model.config), (Shard("", "", 0, "", tuple(tensors.values())),))
    made = cut_release(release, cut)
    if not made.cut:
        why = "nothing says which model it is; --like names a release of it"
        option, asked = ("--layers", cut.layers) if cut.layers else ("--experts", cut.experts)
        return None, [*made.problems] or [Problem("cut", option, f"{asked}: {why}")]
    now_said = {"config": made.config, "tensors": tensors_said(made.tensors.values())}
    new_said = {key: value for key, value in now_said.items() if key in said}
    remembered = {**model.remembered, **new_said}
    files = {name: edit_archive(data, made) if name == ARCHIVE else data for name, data in model.files.items()}
    shapes = {name: shape for name, (_, shape, _) in Like.of(made).tensors.items()}
    new = dataclasses.replace(model, config=made.config, shapes=shapes, remembered=remembered, files=files)
    layers = tuple(numbers(cut.layers, MAX_COUNT["num_hidden_layers"])) if cut.layers else None
    return Taken(new, layers, range(*spans(cut.experts)[0]) if cut.experts else None), []


def _array(kept: Kept, source: OrbaxCheckpoint, options: ReshardOptions, kernels: Mapping[str, AdaptedKernel]) -> Array:
    """An array of the new checkpoint: its dtype, and whether that rounds."""
    stored = source.arrays[kept.part.tensors[0]].dtype
    asked = {"weight": options.save_dtype, "moment": options.moment_dtype}.get(kept.role, KEEP)
    dtype = dtype_named(asked) if asked != KEEP and is_float(stored) else stored
    lossy = None if dtype == stored or holds(dtype, stored) else f"{stored.name}, rounded to {dtype.name}"
    if merged := next((kernels[key] for key in kept.part.tensors if key in kernels), None):
        lossy = f"{merged.label} in float32, rounded once to {dtype.name}"
    return Array(kept.key, kept.part.shape, dtype, kept.names, (kept.part,), kept.part.fill, lossy)


def _integers(tree: NewTree, source: OrbaxCheckpoint) -> list[str]:
    """The weights that no `--save_dtype` is for, each with its dtype."""
    dtypes = {kept.key: source.arrays[kept.part.tensors[0]].dtype for kept in tree.arrays if kept.role == "weight"}
    return [f"{key} is {dtype.name}" for key, dtype in dtypes.items() if not is_float(dtype)]


def _lossless_only(arrays: Sequence[Array], source: OrbaxCheckpoint) -> list[Problem]:
    """Arrays whose sources differ in dtype: they can't be one array."""
    problems = []
    for array in arrays:
        if len(dtypes := sorted({source.arrays[key].dtype.name for key in array.parts[0].tensors})) > 1:
            message = (
                f"its layers have {' and '.join(dtypes)}: they can't be stacked as they are; choose a --save_dtype"
            )
            problems.append(Problem("dtype", array.key, message, is_array=True))
    return problems


def _codes_only(options: ReshardOptions, arrays: Sequence[Array], source: OrbaxCheckpoint) -> Iterator[Problem]:
    """What would take FP8 codes for values: they stay as they are, beside their scales."""
    coded = [array.key for array in arrays if source.arrays[array.parts[0].tensors[0]].dtype.name == CODED]
    way = (
        "weightbeam export writes their values as a release, with --save_dtype bfloat16, which weightbeam convert takes"
    )
    if coded and options.save_dtype != KEEP:
        yield Problem("option", f"--save_dtype={options.save_dtype}", f"{coded[0]} is FP8 codes; {way}")
    if coded and (why := why_without_codes(options.maxtext)):
        yield Problem("option", f"--maxtext={options.maxtext}", why)
    if coded and options.lora:
        yield Problem("adapter", source.root, f"{coded[0]} is FP8 codes, which nothing can be added to; {way}")


@dataclasses.dataclass
class _Planner:
    """Chooses the chunks of each array, and the way to them."""

    options: ReshardOptions
    source: OrbaxCheckpoint
    around: Surroundings
    rules: Rules
    meshes: Sequence[Mesh]
    experts: int
    kernels: Mapping[str, AdaptedKernel]
    format: Format = dataclasses.field(init=False)
    problems: list[Problem] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.format = format_of(self.options, self.source)

    def way(self, kept: Kept, array: Array) -> Way:
        """The way of an array."""
        part = array.parts[0]
        stored = self.source.arrays[part.tensors[0]]
        assignments = self._assignments(kept, array, stored)
        if assignments is None and self.meshes and array.nbytes > 1 << 20:
            self.warnings.append(
                "nothing says which axes of the arrays a mesh shards: they are cut evenly; --like names the release, which tells"
            )
        merged = [self.kernels[key] for key in part.tensors if key in self.kernels]
        growth = tuple(reversed(range(len(array.shape))))  # blocks are longest along the last axes
        if not merged and (spec := self._as_it_is(array, part, stored, assignments)) is not None:
            return Way(Grid(frozenset(), growth, COPIES * array.dtype.itemsize, spec=spec), "copied", spec.shard)
        held = stored.dtype.itemsize * (2 if stored.compressed else 1)
        if merged:
            held += np.dtype(np.float32).itemsize
        reading = Reading(frozenset(), growth, held, beside(merged[0], part) if merged else ())
        try:
            ways = [*self._recuts(array, stored, assignments, reading)]
        except UnitBytesError as e:
            self.problems.append(Problem("memory", f"--unit_bytes={self.options.unit_bytes}", str(e)))
            spec = ArraySpec(array.key, array.shape, array.dtype, array.shape, array.shape)
            return Way(Grid(frozenset(), growth, 1, spec=spec), "re-cut", array.shape)
        way, needed = next((each for each in ways if each[1] <= self.options.unit_bytes), ways[0])
        self.warnings += way.grid.uneven
        if needed <= self.options.unit_bytes:
            return way
        if why := next(filter(None, (why_whole(self.source.arrays[key]) for key in part.tensors)), ""):
            needed = max(needed, 2 * stored.chunk_bytes)
            message = f"its chunks {stored.chunk} can't be decoded in parts, {why}: a unit needs {needed:,} bytes; raise --unit_bytes"
            self.problems.append(Problem("memory", array.key, message, is_array=True))
        # read in parts, and put together
        unpacked = dataclasses.replace(way.grid, element_bytes=way.grid.element_bytes + stored.dtype.itemsize)
        return Way(unpacked, "unpacked", (1,) * len(array.shape))

    def _recuts(
        self, array: Array, stored: OrbaxArray, assignments: Sequence[Assignment] | None, reading: Reading
    ) -> Iterator[tuple[Way, int]]:
        """The ways of an array of which a unit reads whole pieces of the source, best first, and the bytes that the
        smallest unit of each needs: by what is read whole; where that is a shard, by the chunks in it too, and where
        arrays share a piece, with new shards so small that a unit has room for one of each. Raises UnitBytesError where
        no shard fits a unit.
        """
        for read in stored.grains:
            grain, layers = _grain(array.parts[0], stored, read)
            for share in sorted({1, layers} if len(stored.grains) > 1 else {1}):
                room = self.options.unit_bytes // share
                with contextlib.nullcontext() if share == 1 else contextlib.suppress(UnitBytesError):
                    made = cut_array(array, assignments, reading, self.meshes, room, self.format, self.experts)
                    grid = _in_step(made, grain)
                    needed = layers * grid.working_bytes(_least(grid, grain))
                    way = Way(grid, "re-cut", grain, layers, tuple(read))
                    yield way, max(needed, math.prod(read) * stored.dtype.itemsize)

    def _assignments(self, kept: Kept, array: Array, stored: OrbaxArray) -> Sequence[Assignment] | None:
        """The mesh axes of each axis: by its logical names, else as it was sharded before; None where nobody knows."""
        if len(kept.names) == len(array.shape) and any(kept.names):
            return partition_spec(kept.names, self.rules)
        if not array.shape:
            return ()
        before = self.around.partitions.get(stored.key)
        if before is None:
            return None
        axes: list[Assignment] = [None] * len(array.shape)
        for axis, mesh_axes in enumerate(before):
            if mesh_axes:
                for target in array.parts[0].axes_of(axis):
                    axes[target] = mesh_axes
        return axes

    def _as_it_is(
        self, array: Array, part: Part, stored: OrbaxArray, assignments: Sequence[Assignment] | None
    ) -> ArraySpec | None:
        """The chunks of an array that can be copied as they are; None where it has to be re-cut."""
        is_same = part.shape == stored.shape and part.keys.shape == () and part.rule.axes.left == part.rule.axes.right  # type: ignore[attr-defined]
        if not is_same or array.dtype != stored.dtype or self.format.driver != stored.driver:
            return None
        if self.options.compression is not None and (self.options.compression == ZSTD) != stored.compressed:
            return None
        spec = copy_spec(self.around.zarr[stored.key], array.key, array.dtype)
        if spec is None or COPIES * math.prod(spec.shard) * array.dtype.itemsize > self.options.unit_bytes:
            return None
        return spec if all(_is_cut_for(mesh, spec, assignments) for mesh in self.meshes) else None


def _is_cut_for(mesh: Mesh, spec: ArraySpec, assignments: Sequence[Assignment] | None) -> bool:
    """Whether every shard of a mesh is whole chunks, or one chunk is the whole axis; where nobody knows which axes are
    sharded, whether there is nothing to shard.
    """
    if assignments is None and mesh.devices > 1 and math.prod(spec.shape) > 1:
        return False
    for axis, (size, chunk) in enumerate(zip(spec.shape, spec.chunk, strict=True)):
        ways = mesh.ways(assignments[axis]) if assignments is not None else 1
        if size % ways or ((chunk < size or ways > 1) and (size // ways) % chunk):
            return False
    return True


def _grain(part: Part, stored: OrbaxArray, read: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """The extents on the array's axes of what is read of the source at a time, and how many layers that holds besides,
    which are arrays of their own here.
    """
    grain = [1] * len(part.shape)
    layers = 1
    for axis, chunk in enumerate(read):
        held = part.axes_of(axis)
        for target in held:
            grain[target] = chunk
        if not held and part.window_shape[axis] < stored.shape[axis]:
            layers *= min(chunk, stored.shape[axis])
        elif held and part.window_shape[axis] < stored.shape[axis]:  # a chunk may hold layers that aren't taken
            layers *= -(-min(chunk, stored.shape[axis]) // part.window_shape[axis])
    return tuple(grain), layers


def _in_step(grid: Grid, grain: Sequence[int]) -> Grid:
    """Where a mesh leaves it open how an axis is cut, chunks that go with the source's: a multiple of them, or a
    divisor.
    """
    if grid.spec.chunk != grid.spec.shard:
        return grid
    chunk = list(grid.spec.chunk)
    for axis, (size, step) in enumerate(zip(grid.spec.shape, grain, strict=True)):
        if chunk[axis] < size and size % chunk[axis]:  # ragged: no mesh asked for it
            chunk[axis] = chunk[axis] // step * step if chunk[axis] >= step else largest_divisor(step, chunk[axis])
    return dataclasses.replace(grid, spec=dataclasses.replace(grid.spec, chunk=tuple(chunk), shard=tuple(chunk)))


def _least(grid: Grid, grain: Sequence[int]) -> list[int]:
    """The extents of the smallest block: whole chunks of the source and whole shards of the target."""
    return [
        min(size, math.lcm(shard, step))
        for size, shard, step in zip(grid.spec.shape, grid.spec.shard, grain, strict=True)
    ]


def _read_together(arrays: Sequence[Array], ways: Sequence[Way], source: OrbaxCheckpoint) -> list[list[int]]:
    """The numbers of arrays in groups: those that take layers of one piece of the source are read together."""
    groups: dict[object, list[int]] = {}
    for number, (array, way) in enumerate(zip(arrays, ways, strict=True)):
        together: object = number
        if way.layers > 1:
            part = array.parts[0]
            stored = source.arrays[part.tensors[0]]
            cut = [axis for axis in range(len(stored.shape)) if not part.axes_of(axis)]
            together = stored.key, tuple(part.starts[axis] // way.read[axis] for axis in cut)
        groups.setdefault(together, []).append(number)
    return list(groups.values())


def _cut(number: int, way: Way, unit_bytes: int) -> Iterator[Block]:
    """Blocks of one array, of whole chunks of the source and whole shards."""
    least = zip(_least(way.grid, way.grain), way.grid.spec.shard, strict=True)
    return cut_blocks(number, way.grid, unit_bytes, steps=[-(-n // shard) for n, shard in least])
