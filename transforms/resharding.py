"""A reshard, planned: an Orbax checkpoint into another one. Chunks for another mesh, layers stacked or apart, other
dtypes, other trees.

Each array of the new checkpoint goes one of three ways, and the plan says which:

    copied      chunk, dtype and codec are right already: its chunks are copied as they are encoded
    re-cut      a unit reads whole chunks of the source and writes whole shards of the target
    unpacked    a chunk of the source doesn't fit into a unit, as those of 1 to 2 GiB that MaxText's training writes: it is decoded
                once, as a stream, into files, and the units read from these

A block of an array is a multiple of the source's chunk and of the target's shard on every axis, so that no chunk is
read twice:

    source chunk (256, 1, 1024)     target shard (64, 2, 4096)     block (256, 2, 4096): 8 chunks become 4 shards
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from weightbeam.formats import orbax
from weightbeam.formats.adapters.kernels import AdaptedKernel
from weightbeam.formats.copying import copy_spec, is_plain, read_chunks
from weightbeam.formats.encodings import StoredArray
from weightbeam.formats.naming import Naming
from weightbeam.formats.orbax import ARRAY_METADATAS, STRINGS, Contents
from weightbeam.formats.orbax_source import OrbaxArray, OrbaxCheckpoint, load_checkpoint
from weightbeam.formats.orbax_state import Surroundings, array_metadatas
from weightbeam.formats.provenance import total, versions
from weightbeam.formats.release import ARCHIVE, name_in_archive
from weightbeam.formats.staging import ITEMS, Staging
from weightbeam.formats.storage import Store
from weightbeam.formats.unpacking import UnpackedArray, can_unpack, chunks, unpack, why_whole
from weightbeam.formats.zarr import ArraySpec, Format
from weightbeam.model_mappings.boxes import Box, extent
from weightbeam.model_mappings.cells import Part
from weightbeam.model_mappings.maxtext_config import FILE
from weightbeam.model_mappings.plan import Array, Plan, Problem, holds, is_float
from weightbeam.transforms.adapting import Adapted, MaxTextAdapter, adapt, beside
from weightbeam.transforms.array_sums import NOTE, ComparesSource, Shares, add_shares
from weightbeam.transforms.grid import Grid, Reading, UnitBytesError, count_experts, cut_array, largest_divisor
from weightbeam.transforms.inputs import Identity, pack_inputs
from weightbeam.transforms.mesh import Assignment, Mesh, Rules, axes_in, model_rules, partition_spec
from weightbeam.transforms.options import COMPUTED, FULL, KEEP, PARAMS, ReshardOptions, hashed, options_from
from weightbeam.transforms.tree import Kept, Model, Tree, make_tree
from weightbeam.transforms.units import (
    Block,
    Fetch,
    InUnits,
    ShardsRecipe,
    element_box,
    expand_unit,
    make_units,
    shards_of,
    working_bytes,
)

DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in COMPUTED}
NONE, ZSTD = "none", "zstd"
SMALL_CHUNK = 32  # of an adapter: as many of them take the memory of a unit


@dataclasses.dataclass(frozen=True)
class Way:
    """How an array is made.

    Attributes:
      grid: of the new array.
      name: copied, re-cut or unpacked.
      grain: the extents of the source's chunk on the array's axes.
      layers: how many arrays share a chunk of the source; they are made together.
    """

    grid: Grid
    name: str
    grain: tuple[int, ...]
    layers: int = 1


@dataclasses.dataclass(frozen=True)
class ReshardUnit:
    """A unit of work: what to read and what to make of it, and the chunks that are copied.

    Attributes:
      copies: array's key, spec and the index of a chunk, which is copied as it is encoded.
    """

    id: int
    fetches: tuple[Fetch, ...]
    recipes: tuple[ShardsRecipe, ...]
    copies: tuple[tuple[str, ArraySpec, tuple[int, ...]], ...]
    working_bytes: int
    is_done = False


@dataclasses.dataclass(frozen=True)
class Reshard(ComparesSource, InUnits):
    """The plan of a reshard.

    Attributes:
      options, source, around, model, adapters: the inputs.
      tree: the arrays of the new checkpoint, and its metadata.
      plan: the same arrays, what is left out, and the problems.
      ways: one for each array; empty if the plan has problems.
      units: the blocks of each unit.
      warnings: what the user should know.
      adapted: the arrays that adapters are merged into.
      slots: units at a time of all workers that the units were cut for; None where they are as large as they may be.
    """

    options: ReshardOptions
    source: OrbaxCheckpoint
    around: Surroundings
    model: Model
    tree: Tree
    plan: Plan
    ways: tuple[Way, ...]
    units: tuple[tuple[Block, ...], ...]
    warnings: tuple[str, ...] = ()
    adapters: tuple[MaxTextAdapter, ...] = ()
    adapted: Adapted = Adapted()  # noqa: RUF009 — immutable
    slots: int | None = None

    kind = "reshard"

    @property
    def format(self) -> Format:
        """How the checkpoint is stored; arrays that are copied keep their codec."""
        return _format(self.options, self.source)

    @property
    def grids(self) -> tuple[Grid, ...]:
        return tuple(way.grid for way in self.ways)

    @property
    def specs(self) -> list[ArraySpec]:
        """Every array as it is stored."""
        own = [way.grid.spec for way in self.ways]
        return own if self.options.state == FULL else [*own, orbax.STEP]

    @property
    def target_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.plan.arrays)

    @property
    def made_bytes(self) -> int:
        return self.target_bytes

    @functools.cached_property
    def source_bytes(self) -> int:
        """Bytes of the arrays that are read."""
        return sum(
            self.source.arrays[key].nbytes
            for key in {key for array in self.plan.arrays for part in array.parts for key in part.tensors}
        )

    def by_way(self) -> dict[str, tuple[int, int]]:
        """The arrays and bytes that go each way."""
        found: dict[str, tuple[int, int]] = {}
        for array, way in zip(self.plan.arrays, self.ways, strict=True):
            arrays, nbytes = found.get(way.name, (0, 0))
            found[way.name] = arrays + 1, nbytes + array.nbytes
        return found

    @functools.cached_property
    def unpacked(self) -> dict[OrbaxArray, str]:
        """The stored arrays whose chunks are unpacked first, each with the prefix of its files' names.

        An adapter's are unpacked if their chunks aren't small beside a unit, which needs a part of each.
        """
        arrays = zip(self.plan.arrays, self.ways, strict=True) if self.ways else ()
        keys = {key for array, way in arrays if way.name == "unpacked" for part in array.parts for key in part.tensors}
        factors = dict.fromkeys(array for kernel in self.adapted.kernels.values() for array in kernel.arrays)
        large = (
            array
            for array in factors
            if array.compressed and SMALL_CHUNK * array.chunk_bytes > self.unit_bytes and can_unpack(array)
        )
        roots = [adapter.root for adapter in self.adapters]
        return {self.source.arrays[key]: "" for key in sorted(keys)} | {
            array: f"adapter{roots.index(array.items)}/" for array in large
        }

    @property
    def chunks(self) -> list[tuple[OrbaxArray, tuple[int, ...]]]:
        """The chunks to unpack before the first unit: each array and the chunk's index."""
        return self._chunks

    @functools.cached_property
    def _chunks(self) -> list[tuple[OrbaxArray, tuple[int, ...]]]:
        return [(array, index) for array in self.unpacked for index in chunks(array)]

    def unpack(self, number: int, place: Store) -> int:
        """Unpacks a chunk; returns the bytes that were decoded."""
        array, index = self.chunks[number]
        return unpack(array, index, place, self.unpacked[array], array in self.summed)

    @property
    def chunks_unpacked(self) -> list[tuple[OrbaxArray, tuple[int, ...]]]:
        return [(array, index) for array, index in self.chunks if array.items == self.source.root]

    def keys_of(self, array: int) -> Sequence[str]:
        return [key for part in self.plan.arrays[array].parts for key in part.tensors]

    @functools.cached_property
    def summed(self) -> frozenset[OrbaxArray]:
        """Without those that keep chunks and name: what is written of them has their digests."""
        return frozenset(array for array in super().summed if array.key not in self._kept)

    @functools.cached_property
    def _kept(self) -> frozenset[str]:
        """The keys of the arrays whose chunks are copied under their own names."""
        arrays = zip(self.plan.arrays, self.ways, strict=True)
        return frozenset(
            array.key for array, way in arrays if way.name == "copied" and array.key == array.parts[0].tensors[0]
        )

    def _conclude(self, staging: Staging, ledger: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        written = total(entry["digests"] for entry in ledger.values())
        return self.compare_reads(staging, ledger, {key: written[key] for key in self._kept & written.keys()})

    def expand(self, unit: int, place: Store) -> ReshardUnit:
        """A unit, spelled out; `place` is where the plan is at work."""
        blocks = self.units[unit]
        copied = [block for block in blocks if self._is_encoded(block)]
        others = [block for block in blocks if not self._is_encoded(block)]
        made = expand_unit(
            unit, others, self.plan.arrays, self.grids, self._encodings(place) if others else {}, np.dtype(np.float32)
        )
        copies = [
            (self.plan.arrays[block.array].parts[0].tensors[0], self.ways[block.array].grid.spec, index)
            for block in copied
            for index in itertools.product(*(range(start, stop) for start, stop in block.shards))
        ]
        return ReshardUnit(unit, made.fetches, made.recipes, tuple(copies), made.working_bytes + working_bytes(copied))

    def _is_encoded(self, block: Block) -> bool:
        """Whether chunks are copied as they are encoded; plain ones are read and written as values, which spares two
        copies in memory.
        """
        return self.ways[block.array].name == "copied" and not is_plain(
            self.around.zarr[self.plan.arrays[block.array].parts[0].tensors[0]]
        )

    def _encodings(self, place: Store) -> dict[str, StoredArray]:
        """How each array of the source is read: as it is stored or unpacked, with the adapters in it."""

        def find(array: StoredArray) -> StoredArray:
            if isinstance(array, OrbaxArray) and array in self.unpacked:
                return UnpackedArray(array, place.url, self.unpacked[array])
            return array

        kernels = self.adapted.kernels
        return {
            key: kernels[key].stored_as(find) if key in kernels else find(array)
            for key, array in self.source.arrays.items()
        }

    @property
    def hash(self) -> str:
        """Identifies the result: the source's files, the options, each array and what it is made of, the chunks, the
        units.
        """
        return self._identity.hash

    @functools.cached_property
    def _identity(self) -> Identity:
        identity = Identity()
        identity.add(self.kind, hashed(self.options), self.source.identity, self.around.stage(), self.model.stage())
        for adapter in self.adapters:
            identity.add(adapter.identity)
        for array in self.plan.arrays:
            parts = [(part.tensors, repr(part.rule), part.layers.tolist()) for part in array.parts]
            identity.add(array.key, array.shape, array.dtype.name, parts)
        for way in self.ways:
            identity.add(way.name, way.grid.spec.chunk, way.grid.spec.shard)
        for unit in self.units:
            identity.add([(block.array, block.shards) for block in unit])
        return identity

    @property
    def linked_bytes(self) -> int:
        """None: every array is made."""
        return 0

    def unreadable(self) -> list[Problem]:
        """Nothing: the source was opened already."""
        return []

    @property
    def inputs(self) -> Sequence[str]:
        """URLs of all that the checkpoint is made of; it can't take the place of any."""
        return self.source.root, *(adapter.root for adapter in self.adapters)

    @property
    def sources(self) -> tuple[OrbaxCheckpoint, ...]:
        """All whose arrays are read."""
        return self.source, *(adapter.files for adapter in self.adapters)

    def prepare_place(self, staging: Staging, link: str, hashed: bool) -> None:
        """Puts the source's small files there, and what MaxText must be told, where they don't say it."""
        files = dict(self.model.files)
        if self.tree.maxtext and (self.tree.is_moved or FILE not in files):
            files[FILE] = self.tree.maxtext.to_yaml().encode()
        for name, data in files.items():
            staging.aside.write(name, name_in_archive(data, self._naming(staging)) if name == ARCHIVE else data)

    def _naming(self, staging: Staging) -> Naming:
        return Naming.of(staging.final.url, self.options.full_paths, self.sources)

    def write(
        self, staging: Staging, unit: ReshardUnit, made: Sequence[np.ndarray], notes: Mapping[str, Any] | None = None
    ) -> int:
        """Writes the shards of a unit, and the chunks that are copied, and enters the unit in the ledger."""
        shards = shards_of(unit.recipes, made)
        copies = read_chunks(
            [(self.source.arrays[key], self.around.zarr[key], spec, index) for key, spec, index in unit.copies]
        )
        shares = Shares((notes or {}).get(NOTE, {}))
        for (key, *_), copy in zip(unit.copies, copies, strict=True):
            if self.source.arrays[key] in self.summed:
                add_shares(shares, self.source.arrays[key], copy.box, copy.values)
        orbax.write_unit(staging, unit.id, shards, self.format, copies, {**(notes or {}), NOTE: shares})
        return sum(values.nbytes for _, _, values in shards) + sum(copy.values.nbytes for copy in copies)

    def assemble(self, staging: Staging, overwrite: bool) -> None:
        """Makes the published checkpoint of the units that are done.

        Raises:
          StorageError: the source changed meanwhile.
          ocdbt.IncompleteError: units are missing, or don't hold what they should.
        """
        self.check()
        if not staging.is_complete():
            staging.gather()
        contents = self._contents(functools.partial(self._conclude, staging))
        named = dataclasses.replace(contents, record=self._naming(staging).told(contents.record))
        orbax.assemble(staging, named, overwrite)

    def _contents(self, conclude: Callable[[Mapping[int, Mapping[str, Any]]], Mapping[str, Any]]) -> Contents:
        specs = [way.grid.spec for way in self.ways]
        shapes = {spec.key: (spec.shard, spec.chunk) for spec in specs}
        renamed = {array.key: array.parts[0].tensors[0] for array in self.plan.arrays}
        extras = {key: self.around.extras[old] for key, old in renamed.items() if old in self.around.extras}
        copied = {
            way.grid.spec.key: self.around.zarr[array.parts[0].tensors[0]].encode()
            for array, way in zip(self.plan.arrays, self.ways, strict=True)
            if way.name == "copied"
        }
        files: dict[str, bytes] = {}
        full = self.options.state == FULL
        if full:
            files |= self.around.files
            if extras:
                files[f"{ITEMS}/{ARRAY_METADATAS}/process_0"] = array_metadatas(extras, shapes)
            if self.around.strings:
                files[f"{ITEMS}/{STRINGS}"] = self.around.strings.encode()
        custom = {key: value for key, value in self.source.custom.items() if key not in ("scan_layers", "weightbeam")}
        return Contents(
            specs,
            self.format,
            len(self.units),
            self.tree.scan,
            self.record(),
            custom=custom,
            files=files,
            tree=self.tree.metadata if full else None,
            metadata=copied,
            handlers=self.around.handlers if full else {},
            conclude=conclude,
        )

    def record(self) -> dict[str, Any]:
        """Where the checkpoint comes from: what the source remembers of its release, and the source itself."""
        before = self.source.record
        kept = {
            key: before[key]
            for key in ("source", "shards", "family", "model", "config", "tensors", "dropped", "adapters")
            if key in before
        }
        said = before.get("options")
        made = said if isinstance(said, dict) else {}
        asked = {
            key: value
            for key, value in hashed(self.options).items()
            if value not in (None, KEEP) and key not in ("lora", "lora_alpha")
        }
        layout = {
            "scan_layers": self.tree.scan,
            "param_scan_axis": self.tree.scan_axis,
            "use_ocdbt": self.format.use_ocdbt,
            "use_zarr3": self.format.use_zarr3,
        }
        named = (
            {"family": self.tree.family, "model": self.tree.model} if self.tree.family and not self.tree.misfit else {}
        )
        return {
            **named,
            **kept,
            **self.model.remembered,
            "command": self.kind,
            "plan": self.hash,
            "options": {**made, **asked, **{key: value for key, value in layout.items() if value is not None}},
            **({} if self.slots is None else {"slots": self.slots}),
            **({"adapters": [*before.get("adapters", ()), *self.adapted.adapters]} if self.adapters else {}),
            "resharded_from": {
                "checkpoint": self.source.root,
                "first": self._first,
                "files": self.source.files.hash,
                "plan": before.get("plan"),
                "tree": self.tree.kind,
            },
            "versions": versions(),
            "axes": {array.key: array.logical_axes for array in self.plan.arrays},
            "lossy": {
                **before.get("lossy", {}),
                **{array.key: array.lossy for array in self.plan.arrays if array.lossy},
            },
            "left_out": dict(self.plan.dropped),
            "source_digests": before.get("digests", {}),
        }

    @property
    def _first(self) -> str:
        """The checkpoint that was resharded first, of those whose last result is the source."""
        before = self.source.record.get("resharded_from")
        found = (before.get("first") or before.get("checkpoint")) if isinstance(before, Mapping) else None
        return found if isinstance(found, str) else self.source.root

    def stage(self) -> bytes:
        """The inputs, compressed; `load` makes the same plan of them."""
        inputs = {
            "kind": self.kind,
            "options": hashed(self.options),
            "source": self.source.to_json(),
            "around": self.around.stage(),
            "model": self.model.stage(),
            "adapters": [adapter.stage() for adapter in self.adapters],
            "slots": self.slots,
            "hash": self.hash,
        }
        return pack_inputs(inputs)


def load(inputs: Mapping[str, Any]) -> Reshard:
    """The reshard that `Reshard.stage` staged."""
    options = options_from(ReshardOptions, inputs["options"])
    adapters = [MaxTextAdapter.load(adapter) for adapter in inputs["adapters"]]
    return plan_reshard(
        options,
        load_checkpoint(inputs["source"]),
        Surroundings.load(inputs["around"]),
        Model.load(inputs["model"]),
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

    Its units are cut for `slots` of them at a time, if that is known; see `units.target_bytes`.

    Raises:
      MeshError: a mesh can't be read.
    """
    rules = (
        model_rules(options.maxtext_model or model.name) if options.sharding_rules is None else options.sharding_rules
    )
    meshes = [Mesh.parse(text, axes_in(rules)) for text in options.mesh]
    tree, problems = make_tree(
        source,
        model,
        options.state == PARAMS,
        options.scan_layers,
        options.param_scan_axis,
        options.family,
        options.maxtext_model,
    )
    adapted = adapt(source, model, adapters, options.family, options.maxtext_model)
    arrays = tuple(_array(kept, source, options, adapted.kernels) for kept in tree.arrays)
    problems += [*_lossless_only(arrays, source), *adapted.problems]
    ways: tuple[Way, ...] = ()
    units: list[tuple[Block, ...]] = []
    warnings: list[str] = []
    if not problems:
        planner = _Planner(options, source, around, rules, meshes, count_experts(arrays), adapted.kernels)
        ways = tuple(planner.way(kept, array) for kept, array in zip(tree.arrays, arrays, strict=True))
        problems, warnings = planner.problems, list(dict.fromkeys(planner.warnings))
        if not problems:
            total = sum(way.grid.working_bytes(array.shape) for array, way in zip(arrays, ways, strict=True))
            units = make_units(
                lambda unit_bytes: _blocks(arrays, ways, source, unit_bytes), total, options.unit_bytes, slots
            )
    if options.state == FULL and any(kept.role == "moment" for kept in tree.arrays):
        if options.save_dtype != KEEP:
            warnings.append(
                f"training goes on with weights in {options.save_dtype} from here; --state params makes a copy for other uses"
            )
        if adapted.kernels:
            warnings.append(
                "the optimizer's moments are those of the weights without the adapter; --state params leaves them out"
            )
    if tree.misfit:
        warnings.append(f"this isn't the model of {model.of}, so nothing is said of it to MaxText: {tree.misfit}")
    plan = Plan(tree.family, arrays, tree.left_out, tuple(problems), tree.note, "", model.name)
    return Reshard(
        options,
        source,
        around,
        model,
        tree,
        plan,
        ways if not problems else (),
        tuple(units),
        tuple(warnings),
        tuple(adapters),
        adapted,
        slots,
    )


def _format(options: ReshardOptions, source: OrbaxCheckpoint) -> Format:
    """How the arrays that are re-cut are stored."""
    first = next(iter(source.arrays.values()), None)
    use_ocdbt = first.use_ocdbt if first and options.use_ocdbt is None else options.use_ocdbt is not False
    use_zarr3 = first.driver == "zarr3" if first and options.use_zarr3 is None else options.use_zarr3 is not False
    return Format(use_ocdbt, use_zarr3, options.compression or NONE)


def _array(kept: Kept, source: OrbaxCheckpoint, options: ReshardOptions, kernels: Mapping[str, AdaptedKernel]) -> Array:
    """An array of the new checkpoint: its dtype, and whether that rounds."""
    stored = source.arrays[kept.part.tensors[0]].dtype
    asked = {"weight": options.save_dtype, "moment": options.moment_dtype}.get(kept.role, KEEP)
    dtype = DTYPES[asked] if asked != KEEP and is_float(stored) else stored
    lossy = None if dtype == stored or holds(dtype, stored) else f"{stored.name}, rounded to {dtype.name}"
    if merged := next((kernels[key] for key in kept.part.tensors if key in kernels), None):
        lossy = f"{merged.label} in float32, rounded once to {dtype.name}"
    return Array(kept.key, kept.part.shape, dtype, kept.names, (kept.part,), None, lossy)


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


class _Planner:
    """Chooses the chunks of each array, and the way to them."""

    def __init__(
        self,
        options: ReshardOptions,
        source: OrbaxCheckpoint,
        around: Surroundings,
        rules: Rules,
        meshes: Sequence[Mesh],
        experts: int,
        kernels: Mapping[str, AdaptedKernel],
    ):
        self.options, self.source, self.around, self.rules, self.meshes, self.experts = (
            options,
            source,
            around,
            rules,
            meshes,
            experts,
        )
        self.kernels = kernels
        self.format = _format(options, source)
        self.problems: list[Problem] = []
        self.warnings: list[str] = []

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
        if not merged and (spec := self._as_it_is(array, part, stored, assignments)) is not None:
            return Way(Grid(spec, {}, frozenset(), (), 2 * array.dtype.itemsize, ()), "copied", spec.shard)
        grain, layers = _grain(part, stored)
        growth = tuple(reversed(range(len(array.shape))))
        held = stored.dtype.itemsize * (2 if stored.compressed else 1)
        if merged:
            held += np.dtype(np.float32).itemsize
        reading = Reading(frozenset(), growth, held, beside(merged[0], part) if merged else ())
        try:
            grid = cut_array(
                array, assignments, reading, self.meshes, self.options.unit_bytes, self.format, self.experts
            )
        except UnitBytesError as e:
            self.problems.append(Problem("memory", f"--unit_bytes={self.options.unit_bytes}", str(e)))
            return Way(
                Grid(
                    ArraySpec(array.key, array.shape, array.dtype, array.shape, array.shape),
                    {},
                    frozenset(),
                    growth,
                    1,
                    (),
                ),
                "re-cut",
                grain,
            )
        self.warnings += grid.warnings
        grid = _in_step(grid, grain)
        if (
            layers * grid.working_bytes(_least(grid, grain)) <= self.options.unit_bytes
            and stored.chunk_bytes <= self.options.unit_bytes
        ):
            return Way(grid, "re-cut", grain, layers)
        if why := next(filter(None, (why_whole(self.source.arrays[key]) for key in part.tensors)), ""):
            needed = max(layers * grid.working_bytes(_least(grid, grain)), 2 * stored.chunk_bytes)
            message = f"its chunks {stored.chunk} can't be decoded in parts, {why}: a unit needs {needed:,} bytes; raise --unit_bytes"
            self.problems.append(Problem("memory", array.key, message, is_array=True))
        # read in parts, and put together
        unpacked = dataclasses.replace(grid, element_bytes=grid.element_bytes + stored.dtype.itemsize)
        return Way(unpacked, "unpacked", (1,) * len(array.shape))

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
        if spec is None or 2 * math.prod(spec.shard) * array.dtype.itemsize > self.options.unit_bytes:
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


def _grain(part: Part, stored: OrbaxArray) -> tuple[tuple[int, ...], int]:
    """The extents of the source's chunk on the array's axes, and how many layers it holds besides, which are arrays of
    their own here.
    """
    grain = [1] * len(part.shape)
    layers = 1
    for axis, chunk in enumerate(stored.chunk):
        held = part.axes_of(axis)
        for target in held:
            grain[target] = chunk
        if not held and part.window_shape[axis] < stored.shape[axis]:
            layers *= min(chunk, stored.shape[axis])
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


def _blocks(
    arrays: Sequence[Array], ways: Sequence[Way], source: OrbaxCheckpoint, unit_bytes: int
) -> Iterator[tuple[Block, ...]]:
    """Cuts arrays into blocks; those that take layers of one chunk of the source are cut alike, and belong together."""
    groups: dict[object, list[int]] = {}
    for number, (array, way) in enumerate(zip(arrays, ways, strict=True)):
        together: object = number
        if way.layers > 1:
            part = array.parts[0]
            stored = source.arrays[part.tensors[0]]
            cut = [axis for axis in range(len(stored.shape)) if not part.axes_of(axis)]
            together = stored.key, tuple(part.starts[axis] // stored.chunk[axis] for axis in cut)
        groups.setdefault(together, []).append(number)
    for group in groups.values():
        cut = [list(_cut(number, ways[number], unit_bytes // len(group))) for number in group]
        yield from zip(*cut, strict=True)


def _cut(number: int, way: Way, unit_bytes: int) -> Iterator[Block]:
    """Blocks of one array, as large as a unit may be, longest along its last axes."""
    spec = way.grid.spec
    least = _least(way.grid, way.grain)
    counts = [-(-n // shard) for n, shard in zip(least, spec.shard, strict=True)]
    steps = list(counts)
    for axis in reversed(range(len(counts))):
        extents = [min(n * shard, size) for n, shard, size in zip(counts, spec.shard, spec.shape, strict=True)]
        most = max(1, unit_bytes // max(1, way.grid.working_bytes(extents)))
        whole = -(-spec.grid[axis] // steps[axis])  # how many of the smallest blocks there are
        counts[axis] = steps[axis] * -(-whole // -(-whole // min(most, whole)))  # blocks of about equal length
        if counts[axis] < spec.grid[axis]:
            break
    starts = [range(0, total, count) for total, count in zip(spec.grid, counts, strict=True)]
    for at, first in enumerate(itertools.product(*starts)):
        shards: Box = tuple((low, min(low + n, total)) for low, n, total in zip(first, counts, spec.grid, strict=True))
        yield Block(number, shards, way.grid.working_bytes(extent(element_box(spec, shards))), (spec.key, at))
