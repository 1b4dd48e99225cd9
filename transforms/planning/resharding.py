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
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weightbeam.formats.encodings import StoredArray
from weightbeam.formats.orbax import ARRAY_METADATAS, STRINGS
from weightbeam.formats.orbax.copying import is_plain, read_chunks
from weightbeam.formats.orbax.source import OrbaxArray, OrbaxCheckpoint
from weightbeam.formats.orbax.state import Surroundings, array_metadatas
from weightbeam.formats.orbax.unpacking import UnpackedArray, can_unpack
from weightbeam.formats.orbax.zarr import EncodedChunk, Format
from weightbeam.formats.record.extremes import see_infinite
from weightbeam.formats.record.provenance import total
from weightbeam.formats.release.archive import ARCHIVE, name_in_archive
from weightbeam.formats.staging import ITEMS, Staging
from weightbeam.formats.storage import Store
from weightbeam.formats.targets import Target
from weightbeam.formats.targets.orbax import OrbaxTarget
from weightbeam.model_mappings.cut import Cut
from weightbeam.model_mappings.maxtext_config import FILE
from weightbeam.model_mappings.plan import Array, ArrayPlan
from weightbeam.model_mappings.trust import as_said
from weightbeam.transforms.comparing import odd_values
from weightbeam.transforms.comparing.array_sums import Shares, add_shares
from weightbeam.transforms.cutting.blocks import Block, working_bytes
from weightbeam.transforms.cutting.grid import Grid
from weightbeam.transforms.cutting.units import Unit, expand_unit
from weightbeam.transforms.planning.adapting import Adapted, MaxTextAdapter
from weightbeam.transforms.planning.from_checkpoint import NOTE, FromCheckpoint
from weightbeam.transforms.planning.options import FULL, KEEP, Delivery, ReshardOptions, hashed
from weightbeam.transforms.planning.tree_model import Model, NewTree, Taken

NONE, ZSTD = "none", "zstd"
SMALL_CHUNK = 32  # of an adapter: as many of them take the memory of a unit


@dataclasses.dataclass(frozen=True)
class Way:
    """How an array is made.

    Attributes:
      grid: of the new array.
      name: copied, re-cut or unpacked.
      grain: the extents on the array's axes of what is read of the source at a time.
      layers: how many arrays share that; they are made together.
      read: its extents on the source's axes; empty where it isn't shared.
    """

    grid: Grid
    name: str
    grain: tuple[int, ...]
    layers: int = 1
    read: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reshard(FromCheckpoint):
    """The plan of a reshard.

    Attributes:
      options, source, around, model, adapters: the inputs.
      tree: the arrays of the new checkpoint, and its metadata.
      plan: the same arrays, what is left out, and the problems.
      ways: one for each array; empty if the plan has problems.
      adapted: the arrays that adapters are merged into.
      taken: the layers and experts that are taken, if they aren't all.
    """

    options: ReshardOptions
    source: OrbaxCheckpoint
    around: Surroundings
    model: Model
    tree: NewTree
    plan: ArrayPlan
    ways: tuple[Way, ...]
    adapters: tuple[MaxTextAdapter, ...]
    adapted: Adapted
    taken: Taken | None

    kind, doing, title = "reshard", "resharding", "Reshard"

    @property
    def config(self) -> Mapping[str, Any]:
        return self.model.config

    @property
    def new_model(self) -> Model:
        """What is known of the new checkpoint's model."""
        return self.taken.model if self.taken else self.model

    @property
    def format(self) -> Format:
        """How the checkpoint is stored; arrays that are copied keep their codec."""
        return format_of(self.options, self.source)

    @property
    def grids(self) -> tuple[Grid, ...]:
        return tuple(way.grid for way in self.ways)

    @functools.cached_property
    def source_bytes(self) -> int:
        """Bytes of the arrays that are read."""
        return sum(
            self.source.arrays[key].nbytes
            for key in {key for array in self.plan.arrays for part in array.parts for key in part.tensors}
        )

    @property
    def arrays(self) -> list[tuple[Array, Way]]:
        """The new arrays, and how each is made; none if the plan has problems."""
        return list(zip(self.plan.arrays, self.ways, strict=True)) if self.ways else []

    def by_way(self) -> dict[str, tuple[int, int]]:
        """The arrays and bytes that go each way."""
        found: dict[str, tuple[int, int]] = {}
        for array, way in self.arrays:
            arrays, nbytes = found.get(way.name, (0, 0))
            found[way.name] = arrays + 1, nbytes + array.nbytes
        return found

    @functools.cached_property
    def unpacked(self) -> dict[OrbaxArray, str]:
        """The stored arrays whose chunks are unpacked first, each with the prefix of its files' names.

        An adapter's are unpacked if their chunks aren't small beside a unit, which needs a part of each.
        """
        unpacked = (array for array, way in self.arrays if way.name == "unpacked")
        keys = {key for array in unpacked for part in array.parts for key in part.tensors}
        factors = dict.fromkeys(array for kernel in self.adapted.kernels.values() for array in kernel.arrays)
        large = (
            array
            for array in factors
            if array.compressed and SMALL_CHUNK * array.chunk_bytes > self.options.unit_bytes and can_unpack(array)
        )
        roots = [adapter.root for adapter in self.adapters]
        return {self.source.arrays[key]: "" for key in sorted(keys)} | {
            array: f"adapter{roots.index(array.items)}/" for array in large
        }

    def keys_of(self, array: int) -> Sequence[str]:
        return [key for part in self.plan.arrays[array].parts for key in part.tensors]

    @functools.cached_property
    def summed(self) -> frozenset[OrbaxArray]:
        """Without those that keep chunks and name: what is written of them has their digests; and without those of
        which a part is read.
        """
        read = Counter[str]()
        for part in (part for array in self.plan.arrays for part in array.parts):
            read.update(dict.fromkeys(part.tensors, math.prod(part.window_shape)))
        whole = (array for array in super().summed if read[array.key] == math.prod(array.shape))
        return frozenset(array for array in whole if array.key not in self._kept)

    @functools.cached_property
    def _kept(self) -> frozenset[str]:
        """The keys of the arrays whose chunks are copied under their own names."""
        copied = (array for array, way in self.arrays if way.name == "copied")
        return frozenset(array.key for array in copied if array.key == _first_key(array))

    def conclude(self, place: Staging, ledger: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        written = total(entry["digests"] for entry in ledger.values())
        compared = self.compare_reads(place, ledger, {key: written[key] for key in self._kept & written.keys()})
        return {**compared, **odd_values.not_finite_of(ledger)}

    def expand(self, unit: int, folder: Store) -> Unit:
        """A unit, spelled out; `folder` is where the plan is at work."""
        blocks = self.units[unit]
        copied = [block for block in blocks if self._is_encoded(block)]
        others = [block for block in blocks if not self._is_encoded(block)]
        keys = {key for block in others for key in self.keys_of(block.array)}
        encodings = {key: self._encoding(key, folder) for key in keys}
        made = expand_unit(unit, others, self.plan.arrays, self.grids, encodings, np.dtype(np.float32))
        copies = [
            (_first_key(self.plan.arrays[block.array]), self.ways[block.array].grid.spec, index)
            for block in copied
            for index in itertools.product(*(range(start, stop) for start, stop in block.shards))
        ]
        return dataclasses.replace(made, copies=tuple(copies), copied_bytes=working_bytes(copied))

    def _is_encoded(self, block: Block) -> bool:
        """Whether chunks are copied as they are encoded; plain ones are read and written as values, which spares two
        copies in memory.
        """
        array, way = self.plan.arrays[block.array], self.ways[block.array]
        return way.name == "copied" and not is_plain(self.around.zarr[_first_key(array)])

    def _encoding(self, key: str, folder: Store) -> StoredArray:
        """How an array of the source is read: as it is stored or unpacked, with the adapters in it."""

        def find(array: StoredArray) -> StoredArray:
            if isinstance(array, OrbaxArray) and array in self.unpacked:
                return UnpackedArray(array, folder.url, self.unpacked[array])
            return array

        kernel = self.adapted.kernels.get(key)
        return kernel.stored_as(find) if kernel else find(self.source.arrays[key])

    def settled(self) -> list[Any]:
        ways = [way.name for way in self.ways]
        return [self.around.to_json(), self.model.to_json(), [adapter.identity for adapter in self.adapters], ways]

    @functools.cached_property
    def target(self) -> Target:
        specs = [way.grid.spec for way in self.ways]
        shapes = {spec.key: (spec.shard, spec.chunk) for spec in specs}
        renamed = {array.key: _first_key(array) for array in self.plan.arrays}
        extras = {key: self.around.extras[old] for key, old in renamed.items() if old in self.around.extras}
        copied = {
            array.key: self.around.zarr[renamed[array.key]].encode()
            for array, way in self.arrays
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
        return OrbaxTarget(
            specs=specs,
            format=self.format,
            step=self.options.step or 0,
            scan_layers=self.tree.scan,
            custom=custom,
            files=files,
            tree=self.tree.metadata if full else None,
            metadata=copied,
            handlers=self.around.handlers if full else {},
            see=see_infinite,
        )

    @property
    def beside(self) -> dict[str, bytes]:
        """The source's small files, and what MaxText must be told, where they don't say it: of another layout their
        `maxtext.yml` doesn't.
        """
        files = dict(self.new_model.files)
        if self.tree.is_moved or self.taken:
            files.pop(FILE, None)
        if self.tree.maxtext:
            files.setdefault(FILE, self.tree.maxtext.to_yaml().encode())
        return files

    def bring(self, place: Staging, how: Delivery) -> None:
        """Puts the small files there."""
        files, naming = self.beside, self.naming(place.final.url)
        for name, data in files.items():
            place.aside.write(name, name_in_archive(data, naming) if name == ARCHIVE else data)

    def copy(self, unit: Unit, notes: dict[str, Any]) -> list[EncodedChunk]:
        """Reads the chunks that are copied; notes the shares of those whose digests are known."""
        copies = read_chunks(
            [(self.source.arrays[key], self.around.zarr[key], spec, index) for key, spec, index in unit.copies]
        )
        shares = Shares(notes.get(NOTE, {}))
        for (key, *_), copy in zip(unit.copies, copies, strict=True):
            if self.source.arrays[key] in self.summed:
                add_shares(shares, self.source.arrays[key], copy.box, copy.values)
        notes[NOTE] = shares
        return copies

    def facts(self) -> dict[str, Any]:
        """What the source remembers of its release, and the source itself."""
        before, tree = self.source.record, self.tree
        kept = ("source", "shards", "family", "model", "config", "tensors", "dropped", "adapters")
        facts = {"family": tree.family, "model": tree.model} if tree.family and not tree.misfit else {}
        facts |= {key: before[key] for key in kept if key in before}
        if not tree.misfit or "config" not in facts or self.taken:
            facts |= self.new_model.remembered
        return facts | {
            "command": self.kind,
            "options": self._all_options(),
            **({"adapters": [*before.get("adapters", ()), *self.adapted.adapters]} if self.adapters else {}),
            "resharded_from": {
                "checkpoint": self.source.root,
                "first": self._first,
                "files": self.source.files.hash,
                "plan": before.get("plan"),
                "tree": tree.kind,
            },
            "axes": {array.key: array.logical_axes for array in self.plan.arrays},
            "lossy": {**before.get("lossy", {}), **self.plan.lossy},
            "left_out": dict(self.plan.dropped),
            "source_digests": before.get("digests", {}),
        }

    def _all_options(self) -> dict[str, Any]:
        """What was asked for when the source was made, and now, and how the result lies."""
        beside = ("lora", "lora_alpha")  # which `adapters` tells
        asked = hashed(self.options).items()
        part = self.taken.of_release(Cut.of(self.source.options)) if self.taken else {}
        layout = {
            "maxtext": self.tree.version,
            "scan_layers": self.tree.scan,
            "param_scan_axis": self.tree.scan_axis,
            "use_ocdbt": self.format.use_ocdbt,
            "use_zarr3": self.format.use_zarr3,
        }
        return {
            **as_said(self.source.options),
            **{name: value for name, value in asked if value not in (None, KEEP) and name not in beside},
            **part,
            **{name: value for name, value in layout.items() if value is not None},
        }

    @property
    def _first(self) -> str:
        """The checkpoint that was resharded first, of those whose last result is the source."""
        before = self.source.record.get("resharded_from")
        found = (before.get("first") or before.get("checkpoint")) if isinstance(before, Mapping) else None
        return found if isinstance(found, str) else self.source.root

    def staged(self) -> dict[str, Any]:
        return {**super().staged(), "around": self.around.to_json(), "model": self.model.to_json()}


def _first_key(array: Array) -> str:
    """The source's key of what an array is made of; the first, where it is made of several."""
    return array.parts[0].tensors[0]


def format_of(options: ReshardOptions, source: OrbaxCheckpoint) -> Format:
    """How the arrays that are re-cut are stored."""
    first = next(iter(source.arrays.values()), None)
    use_ocdbt = first.use_ocdbt if first and options.use_ocdbt is None else options.use_ocdbt is not False
    use_zarr3 = first.driver == "zarr3" if first and options.use_zarr3 is None else options.use_zarr3 is not False
    return Format(use_ocdbt, use_zarr3, options.compression or NONE)
