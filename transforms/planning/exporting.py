"""An export, planned: an Orbax checkpoint into a release's safetensors files, by the family's table read back.

What a unit reads is a block of whole chunks of the arrays; what it writes are the rows of the tensors that lie in them.
Along the axes that hold a tensor's columns a block takes all there is, so that a row is written in one go, and along
the others as many chunks as its bytes allow:

    array wi_0 (embed, layers, mlp), chunks of (512, 1, 512)      tensor gate_proj (mlp, embed) of layer 7
    block: all of embed, layer 7, mlp [1024, 2048)          ─▸    rows [1024, 2048), whole
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from weightbeam.formats.adapters import Adapter
from weightbeam.formats.encodings import Encoding, Scaled, StoredArray, stored_bytes, values_dtype
from weightbeam.formats.orbax.scaled import ScaledArray, values_of
from weightbeam.formats.orbax.source import OrbaxArray, OrbaxCheckpoint
from weightbeam.formats.orbax.unpacking import UnpackedArray
from weightbeam.formats.record.naming import Naming
from weightbeam.formats.release.source import open_source
from weightbeam.formats.safetensors import HfCheckpoint
from weightbeam.formats.staging import Staging
from weightbeam.formats.storage import Store
from weightbeam.model_mappings.boxes import volume
from weightbeam.model_mappings.ops import dtype_named
from weightbeam.model_mappings.plan import ArrayPlan
from weightbeam.transforms.comparing import odd_values
from weightbeam.transforms.cutting.blocks import element_box
from weightbeam.transforms.cutting.files import FileLayout
from weightbeam.transforms.cutting.grid import Grid
from weightbeam.transforms.cutting.quantizing import Given, recipe_for
from weightbeam.transforms.cutting.row_blocks import itself
from weightbeam.transforms.cutting.rows import RowsRecipe
from weightbeam.transforms.cutting.tensor_rows import rows_of
from weightbeam.transforms.cutting.units import Fetch, Unit
from weightbeam.transforms.planning.from_checkpoint import FromCheckpoint
from weightbeam.transforms.planning.options import RELEASED, ExportOptions
from weightbeam.transforms.planning.to_release import ToRelease
from weightbeam.transforms.planning.transfer import Source

RELEASED_VALUES = dtype_named("bfloat16")  # of a release's quantised tensors, where they are written as values


def dtype_of_model(config: Mapping[str, Any]) -> str | None:
    """The dtype of a model's weights as its `config.json` says it, at the root or of the text model; None where it says
    none of `RELEASED`.
    """
    nested = config.get("text_config")
    for place in (config, nested if isinstance(nested, Mapping) else {}):
        for key in ("torch_dtype", "dtype"):
            if isinstance(said := place.get(key), str) and said in RELEASED:
                return said
    return None


@dataclasses.dataclass(frozen=True)
class Like:
    """The release whose form an export takes.

    Attributes:
      root: its URL; empty where there is none.
      config: its `config.json`.
      tensors: name -> (dtype, shape, file), of the values: a quantised tensor is bfloat16, its scales aren't there.
      digest: of its content, as its name has it, see `naming.digest`; empty where it wasn't opened.
      coded: whether its weights are codes and scales as MaxText keeps them, too.
      release: itself, where towers and prediction layers may be taken from it.
      given: what it gives to a release that is to be in FP8 as it is; None where that isn't asked for.
      small: its small files; a worker needs none.
      model: MaxText's name of the model, where a configuration says it.
    """

    root: str
    config: Mapping[str, Any]
    tensors: Mapping[str, tuple[str, tuple[int, ...], str]] = dataclasses.field(default_factory=dict)
    digest: str = ""
    coded: bool = False
    release: HfCheckpoint | None = None
    given: Given | None = None
    small: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    model: str | None = None

    @classmethod
    def of(cls, checkpoint: HfCheckpoint, **more: Any) -> Like:
        """A release, by its headers; `more` are further attributes."""
        source = open_source(checkpoint)
        tensors = {}
        for name, encoding in source.encodings.items():
            dtype = values_dtype(encoding, RELEASED_VALUES)
            tensors[name] = (dtype.name, encoding.shape, encoding.weight.path.rpartition("/")[2])
        coded = any(isinstance(one, Scaled) and one.square for one in source.encodings.values())
        return cls(checkpoint.root, checkpoint.config, tensors, coded=coded, **more)

    def to_json(self) -> dict[str, Any]:
        """What a worker needs of its headers."""
        return {name: getattr(self, name) for name in ("root", "config", "tensors", "digest", "coded")}

    @classmethod
    def from_json(cls, said: Mapping[str, Any], **more: Any) -> Like:
        """What `to_json` said; `more` are further attributes."""
        tensors = {name: (dtype, tuple(shape), file) for name, (dtype, shape, file) in said["tensors"].items()}
        return cls(**{**said, "tensors": tensors}, **more)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export(FromCheckpoint, ToRelease):
    """The plan of an export, with these fields beside those of `ToRelease`.

    Attributes:
      options, source, like: the inputs.
      plan: the arrays, what of the release is left out, and the problems.
      names: the tensors that are written, by the table's name for each: `(name in the release, ...)`.
      grids: one for each array.
      form: `like`, or that of its language model alone.
      adapters: what is merged on the way.
      merged: by the table's name, what adapters make of a tensor.
      quantized: the tensors, by the release's names, that are written as codes and scales.
      quantization: `quantization_config` as it will be; empty where nothing is quantised.
      taken: the tensors that are taken from the release, by its names: towers and prediction layers that the checkpoint
        hasn't. They count as arrays behind the last, of shards of one element.
      large: the keys of the arrays whose chunks are unpacked first.
      kept: whether codes and scales of the checkpoint are written as they are; else what they are the codes of.
    """

    options: ExportOptions
    source: OrbaxCheckpoint
    like: Like
    plan: ArrayPlan
    names: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    files: FileLayout | None = None
    grids: tuple[Grid, ...] = ()
    lossy: Mapping[str, str] = dataclasses.field(default_factory=dict)
    config_edits: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    form: Like
    adapters: tuple[Adapter, ...] = ()
    merged: Mapping[str, Encoding] = dataclasses.field(default_factory=dict)
    quantized: frozenset[str] = frozenset()
    quantization: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    taken: Mapping[str, Encoding] = dataclasses.field(default_factory=dict)
    large: frozenset[str] = frozenset()
    small: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    kept: bool = False

    kind, doing, title = "export", "exporting", "Export"

    @property
    def given(self) -> Given | None:
        return self.like.given

    @property
    def taken_from(self) -> HfCheckpoint | None:
        """The release that tensors are taken from; None where none is."""
        return self.like.release if self.taken else None

    @property
    def is_text_alone(self) -> bool:
        """Whether it has the form of the language model alone, and `like` has more."""
        return self.form is not self.like

    @property
    def config(self) -> Mapping[str, Any]:
        return self.like.config

    @functools.cached_property
    def encodings(self) -> Mapping[str, OrbaxArray | ScaledArray]:
        """The weights, by MaxText's keys: as they are stored, or by their values."""
        return self.source.weights if self.kept else values_of(self.source)

    @property
    def decoded(self) -> bool:
        """Whether FP8 codes of the checkpoint become values."""
        return bool(self.source.tree.scales) and not self.kept

    @functools.cached_property
    def source_bytes(self) -> int:
        """Bytes of what is read: arrays, and tensors that are taken from the release."""
        arrays = sum(
            stored_bytes(self.encodings[array.key]) for array in self.plan.arrays if array.key in self.encodings
        )
        return arrays + sum(map(stored_bytes, self.taken.values()))

    @property
    def read_bytes(self) -> int:
        """Bytes of the chunks that the units read, decoded, and of what is taken from the release."""
        blocks = (block for unit in self.units for block in unit if block.array < len(self.grids))
        read = ((self.grids[block.array].spec, block.shards) for block in blocks)
        arrays = sum(volume(element_box(spec, shards)) * spec.dtype.itemsize for spec, shards in read)
        return arrays + sum(map(stored_bytes, self.taken.values()))

    @functools.cached_property
    def unpacked(self) -> dict[OrbaxArray, str]:
        return {self.source.weights[key]: "" for key in sorted(self.large)}

    @property
    def thread_bytes(self) -> int:
        """The factors of an adapter are read once the rows are made to which it is added: beside a unit."""
        overheads = (one.overhead for one in self.merged.values())
        return super().thread_bytes + max((one.whole + one.decoding for one in overheads), default=0)

    def keys_of(self, array: int) -> list[str]:
        """The stored key of a weight, and that of its scales; what is taken from the release has none."""
        key = self.plan.arrays[array].key
        names = (key, self.source.tree.scales.get(key, key)) if key in self.encodings else ()
        return [self.source.weights[name].key for name in dict.fromkeys(names)]

    def conclude(self, staging: Staging, ledger: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        return {**self.compare_reads(staging, ledger), **odd_values.not_finite_of(ledger)}

    def expand(self, unit: int, folder: Store) -> Unit:
        """A unit, spelled out; `folder` is where the plan is at work."""
        fetches: list[Fetch] = []
        of_arrays = [block for block in self.units[unit] if block.array < len(self.grids)]
        for block in of_arrays:
            array = self.plan.arrays[block.array]
            box = element_box(self.grids[block.array].spec, block.shards)
            fetches.append(Fetch(self._encoding(array.key, folder), box, self.encodings[array.key].dtype))
        recipes = []
        for name, boxes in rows_of(self.plan.arrays, self.grids, of_arrays).items():
            for box, inside in boxes:
                recipes += [
                    recipe_for(self.layout.tensors, one, self.quantized, box, inside, self.given, self.merged.get(name))
                    for one in self.names[name]
                ]
        names = list(self.taken) if len(of_arrays) < len(self.units[unit]) else []
        for block in self.units[unit]:
            if block.array >= len(self.grids):
                name, box = names[block.array - len(self.grids)], block.shards
                tensor = self.layout.tensors[name]
                recipes.append(RowsRecipe(tensor, box, ((len(fetches), itself(name, box)),)))
                fetches.append(Fetch(self.taken[name], box, tensor.dtype))
        return Unit(unit, tuple(fetches), tuple(recipes))

    def _encoding(self, key: str, folder: Store) -> StoredArray:
        """What boxes of a weight are read from: the checkpoint, or what its chunks were unpacked into."""
        encoding = self.encodings[key]
        if key not in self.large:
            return encoding
        files = UnpackedArray(self.source.weights[key], folder.url)
        return ScaledArray(files, encoding.scale) if isinstance(encoding, ScaledArray) else files

    @property
    def inputs(self) -> Sequence[str]:
        return self.source.root, self.like.root, *(adapter.root for adapter in self.adapters)

    @property
    def sources(self) -> tuple[Source, ...]:
        return *super().sources, *([self.taken_from] if self.taken_from else [])

    @property
    def pattern(self) -> tuple[str, str]:
        return self.like.root, self.like.digest

    def naming(self, place: str) -> Naming:
        return super().naming(place).knowing({self.like.root: self.like.digest})

    def facts(self) -> dict[str, Any]:
        return {
            "command": "export",
            "source": self.source.root,
            "like": self.like.root,
            "family": self.plan.family,
            "model": self.plan.model,
            "tree": self.source.tree.kind,
            "adapters": [adapter.record() for adapter in self.adapters],
            "made_from": {
                key: self.source.record[key]
                for key in ("source", "plan", "options", "versions")
                if key in self.source.record
            },
            "lossy": dict(self.lossy),
            "dtypes": dict(Counter(tensor.dtype.name for tensor in self.layout.tensors.values())),
            "left_out": dict(self.plan.dropped),
            **({"taken": {"from": self.taken_from.root, "tensors": list(self.taken)}} if self.taken_from else {}),
            "config_edits": dict(self.config_edits),
        }

    def staged(self) -> dict[str, Any]:
        taken_from = self.taken_from.to_json() if self.taken_from else None
        return {**super().staged(), "like": self.like.to_json(), "parts": taken_from}
