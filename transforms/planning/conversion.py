"""A conversion, planned: a release into an Orbax checkpoint. Everything follows from the source's headers and the options,
on every worker alike.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from weightbeam.formats.adapters import Adapter, Folding, Merging
from weightbeam.formats.encodings import Encoding, stored_bytes
from weightbeam.formats.encodings.made_codes import MadeScales
from weightbeam.formats.orbax.references import Reference
from weightbeam.formats.orbax.zarr import Format
from weightbeam.formats.record.extremes import SEEN, Extremes
from weightbeam.formats.record.provenance import tensors_said
from weightbeam.formats.release.archive import keep_files, kept_files
from weightbeam.formats.release.small_files import SmallFiles, files_of
from weightbeam.formats.safetensors import QUANT_CONFIGS, HfCheckpoint
from weightbeam.formats.staging import Staging
from weightbeam.formats.staging.links import SOURCE, check_source, identify, put_source
from weightbeam.formats.storage import Store, open_store
from weightbeam.formats.targets import TARGETS, Target
from weightbeam.formats.targets.orbax import OrbaxTarget
from weightbeam.model_mappings.boxes import Box
from weightbeam.model_mappings.maxtext_config import FILE
from weightbeam.model_mappings.ops import dtype_named
from weightbeam.model_mappings.plan import Array, ArrayPlan, Problem
from weightbeam.model_mappings.scales import CODES
from weightbeam.transforms.comparing import odd_values
from weightbeam.transforms.comparing.source_sums import DamagedError, check_reads, note_reads
from weightbeam.transforms.cutting.grid import Grid
from weightbeam.transforms.cutting.mesh import Mesh, Rules, axes_in, model_rules
from weightbeam.transforms.cutting.units import Unit, expand_unit, fetches_of, find_alike
from weightbeam.transforms.cutting.virtual import Placement, references
from weightbeam.transforms.planning.options import ConvertOptions, Delivery
from weightbeam.transforms.planning.transfer import Transfer

LOG = logging.getLogger("weightbeam")


def rules_of(options: ConvertOptions) -> Rules:
    """The logical axis rules: the user's, else MaxText's for the model that was named."""
    return model_rules(options.maxtext_model) if options.sharding_rules is None else options.sharding_rules


def meshes_of(options: ConvertOptions) -> list[Mesh]:
    """The target meshes.

    Raises:
      MeshError: one can't be read.
    """
    axes = axes_in(rules_of(options))
    return [Mesh.parse(text, axes) for text in options.mesh]


def dtype_of(options: ConvertOptions) -> np.dtype | None:
    """What every float array is cast to; None where each stays what it is."""
    return None if options.save_dtype == CODES else dtype_named(options.save_dtype)


def format_of(options: ConvertOptions) -> Format:
    """How the checkpoint is stored."""
    return Format(options.use_ocdbt, options.use_zarr3, options.compression)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion(Transfer):
    """The plan of a conversion, its chunk grids and its units.

    Attributes:
      options, source: the inputs; the source is the release.
      plan: arrays, drops and problems.
      encodings: how each tensor is stored.
      grids: one for each array; empty if the plan has problems.
      placements: for each array whether it is virtual; empty without `--virtual`, or if the plan has problems.
      adapters: what is merged into the source's tensors, an input too.
      merging: what the adapters' tensors are used for.
      folding: the adapter as MaxText's, with `--adapter_only`.
      to: the row of `TARGETS` that is written: one that is told what `OrbaxTarget` is.
      made_of: the release that the record names, where the source is what a virtual checkpoint holds of it.
    """

    options: ConvertOptions
    source: HfCheckpoint
    plan: ArrayPlan
    encodings: Mapping[str, Encoding] = dataclasses.field(default_factory=dict)
    grids: tuple[Grid, ...] = ()
    placements: tuple[Placement, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    merging: Merging | None = None
    folding: Folding | None = None
    made_of: str = ""
    to: str = OrbaxTarget.name

    kind, doing, title = "convert", "converting", "Conversion"

    @property
    def config(self) -> Mapping[str, Any]:
        return self.source.config

    @property
    def save_dtype(self) -> np.dtype:
        return dtype_named(self.options.save_dtype)

    @property
    def format(self) -> Format:
        return format_of(self.options)

    def expand(self, unit: int, folder: Store | None = None) -> Unit:
        """A unit, spelled out."""
        return expand_unit(unit, self.units[unit], self.plan.arrays, self.grids, self.encodings, self.save_dtype)

    @functools.cached_property
    def source_bytes(self) -> int:
        """Bytes of the tensors that are used, scales included; what codes and scales are made of counts once."""
        used = {name for array in self.plan.arrays for part in array.parts for name in part.tensors}
        found = [self.encodings[name] for name in used if name in self.encodings]
        return sum(stored_bytes(encoding) for encoding in found if not isinstance(encoding, MadeScales))

    @functools.cached_property
    def read_bytes(self) -> int:
        """Bytes that the units read."""
        return sum(
            count * sum(sum(sizes) for _, sizes in self.read_sizes(unit)) for unit, count in Counter(self.alike).items()
        )

    @functools.cached_property
    def alike(self) -> list[int]:
        """For each unit the number of the first that reads and makes as much."""
        return find_alike(self.units, self.plan.arrays, self.grids, self.encodings)

    def read_sizes(self, unit: int) -> Iterator[tuple[Encoding, list[int]]]:
        """For each box that a unit reads how it is stored, and the bytes of its parts."""
        for name, boxes in fetches_of(self.units[unit], self.plan.arrays, self.grids).items():
            encoding = self.encodings[name]
            yield from ((encoding, [read.nbytes for read in encoding.reads(box)]) for box, _ in boxes)

    @property
    def meshes(self) -> list[Mesh]:
        """The target meshes."""
        return meshes_of(self.options)

    @property
    def virtual_bytes(self) -> int:
        """Bytes of the arrays that stay in the source's files."""
        # none without --virtual
        return sum(
            array.nbytes for array, placement in zip(self.plan.arrays, self.placements, strict=False) if placement.spec
        )

    @property
    def linked_bytes(self) -> int:
        """Bytes of the source's files that become part of a virtual checkpoint."""
        return sum(shard.size for shard in self.source.shards) if self.virtual_bytes else 0

    @property
    def made_bytes(self) -> int:
        """Bytes that the units write."""
        return self.target_bytes - self.virtual_bytes

    def references(self) -> Iterator[Reference]:
        """Every chunk of the virtual arrays, as a range of a file that has the name it has in the source."""
        names = {tensor.path: shard.name for shard in self.source.shards for tensor in shard.tensors[:1]}
        for array, placement in zip(self.plan.arrays, self.placements, strict=False):  # none without --virtual
            if placement.spec:
                yield from references(array, placement.spec, self.encodings, names)

    @property
    def uses(self) -> Sequence[Mapping[str, str]]:
        """For each adapter what each of its tensors is used for; empty where there is no table for the model."""
        made = self.folding or self.merging
        return made.uses if made else ()

    def unreadable(self) -> list[Problem]:
        """The files whose end can't be read, or, where the user wants all compared, whose bytes aren't right."""
        if (problems := super().unreadable()) or self.options.check_source != "true":
            return problems
        if unknown := [shard.path for shard in self.source.shards if not (shard.sha256 or shard.crc32c)]:
            LOG.warning(
                "nothing states a hash of %s of the files, which aren't compared: %s …", len(unknown), unknown[0]
            )
        return self.source.find_damage()

    @functools.cached_property
    def _small_files(self) -> SmallFiles:
        """Those that are kept with the checkpoint."""
        kept = kept_files(open_store(self.source.root), self.options.allow_links, self.source.configs)
        return files_of(self.source, kept)

    def settled(self) -> list[Any]:
        return [*super().settled(), dict(self.plan.maxtext or {})]

    def hash_small(self) -> Mapping[str, str]:
        """Of those that are kept with the checkpoint."""
        return self._small_files.hashes

    @functools.cached_property
    def target(self) -> Target:
        bare = self.folding is not None
        kind: Any = TARGETS[self.to]
        return kind(
            specs=[grid.spec for grid in self.grids],
            format=self.format,
            step=self.options.step,
            scan_layers=self.options.scan_layers,
            references=self.references,
            bare=bare,
            custom={"lora": self.folding.metadata} if self.folding else {},
            files={FILE: self.plan.maxtext.to_yaml().encode()} if self.plan.maxtext and not bare else {},
            see=self._see,
        )

    def bring(self, place: Staging, how: Delivery) -> None:
        """Puts the release's small files there, and with `--virtual` the source's files.

        Raises:
          StorageError: the small files can't be read, or the source's files can't be put there so (LinkError).
        """
        keep_files(place.aside, open_store(self.source.root), self._small_files, self.naming(place.final.url))
        if self.virtual_bytes:
            put_source(place.shards / SOURCE, self.source, how.link, how.sha256)

    def check_complete(self, place: Staging, how: Delivery) -> None:
        if self.virtual_bytes:
            check_source(place.items / SOURCE, self.source, how.link, how.sha256)

    @functools.cached_property
    def _summed(self) -> dict[str, str]:
        """The names of the files whose bytes are checked on their way, by path: those whose crc32c is known."""
        if self.options.check_source == "false" or self.source.cut:  # of a part no hash is known
            return {}
        return {
            shard.path: shard.name for shard in self.source.shards if shard.crc32c or shard.name in self.source.sums
        }

    def note_reads(self, unit: Unit, raw: Sequence[Sequence[np.ndarray]]) -> dict[str, Any]:
        """The checksums of what a unit read, where they are wanted."""
        return note_reads(unit.fetches, raw, self._summed) if self._summed else {}

    def _see(self, key: str, box: Box, values: np.ndarray, extremes: Extremes) -> Mapping[str, Any]:
        return odd_values.find_odd(self._by_key[key], box, values, extremes)

    @functools.cached_property
    def _by_key(self) -> dict[str, Array]:
        return {array.key: array for array in self.plan.arrays}

    def conclude(self, place: Staging, ledger: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        """What the units found out: whether the files' bytes are right, and which values are odd; and which files the
        checkpoint refers to.

        Raises:
          DamagedError: they aren't; the units that read them aren't in the ledger any more.
        """
        try:
            checked = check_reads(self.source, ledger) if self._summed else frozenset()
        except DamagedError as e:
            place.ledger.withdraw(e.units, str(e))
            raise
        odd = odd_values.conclude(
            (found for entry in ledger.values() for found in entry.get(SEEN, ())), self.plan.arrays
        )
        return {"shards": self._shards(checked), **odd, **self._referred(place)}

    def _referred(self, place: Staging) -> dict[str, Any]:
        """What the record says of the source's files that the checkpoint refers to; nothing where there are none."""
        virtual = [placement.spec for placement in self.placements if placement.spec is not None]
        if not virtual:
            return {}
        files = [dataclasses.asdict(file) for file in identify(place.items / SOURCE, self.source)]
        chunks = sum(1 for _ in self.references())
        return {"references": {"arrays": len(virtual), "bytes": self.virtual_bytes, "chunks": chunks, "files": files}}

    def _shards(self, checked: Collection[str]) -> list[dict[str, Any]]:
        """What the record says of the files: what tells them from others, and whether their hash was `checked` or is
        the store's word.
        """
        shards = [shard.record() for shard in self.source.shards]
        for shard in shards:
            if shard.keys() & {"sha256", "crc32c"}:
                shard["hash"] = (
                    "checked" if self.options.check_source == "true" or shard["name"] in checked else "stated"
                )
        return shards

    def facts(self) -> dict[str, Any]:
        is_coded = self.options.save_dtype == CODES
        return {
            "source": self.made_of or self.source.root,
            "shards": self._shards(()),
            "family": self.plan.family,
            "model": self.plan.model,
            "axes": {array.key: array.logical_axes for array in self.plan.arrays},
            "lossy": self.plan.lossy,
            "dropped": dict(self.plan.dropped),
            **({"adapters": [adapter.record() for adapter in self.adapters]} if self.adapters else {}),
            "config": {key: value for key, value in self.source.config.items() if is_coded or key not in QUANT_CONFIGS},
            "tensors": tensors_said(tensor for shard in self.source.shards for tensor in shard.tensors),
        }

    def staged(self) -> dict[str, Any]:
        return {**super().staged(), "made_of": self.made_of, "to": self.to}
