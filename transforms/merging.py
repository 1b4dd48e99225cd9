"""A merge, planned: a release and adapters into the same release with the adapters in it.

The table is the identity: every tensor becomes itself. What no adapter reaches is carried over byte for byte, codes and
scales of a quantised weight included; a weight that an adapter reaches is written in the dtype that it has, a quantised
one in the model's.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from weightbeam.formats.adapters import Adapter, Merging, merge
from weightbeam.formats.encodings import Encoding, Plain, stored_bytes
from weightbeam.formats.provenance import versions
from weightbeam.formats.safetensors import HfCheckpoint
from weightbeam.formats.sources import Source, open_source, stored_tensors
from weightbeam.formats.storage import Store
from weightbeam.model_mappings.config import Config, ConfigError
from weightbeam.model_mappings.family import rename
from weightbeam.model_mappings.plan import Plan, Problem
from weightbeam.model_mappings.registry import UnknownFamilyError, family_of
from weightbeam.transforms.carrying import itself, row_units
from weightbeam.transforms.exporting import DTYPES, dtype_of_model
from weightbeam.transforms.files import FileLayout, plan_files
from weightbeam.transforms.inputs import Identity, pack_inputs
from weightbeam.transforms.options import MergeOptions, hashed, options_from
from weightbeam.transforms.quantizing import (
    REASON,
    Entry,
    Given,
    find_quantised,
    quantization_config,
    recipe_for,
    with_scales,
)
from weightbeam.transforms.rows import VALUES, ReleasePlan, RowsUnit
from weightbeam.transforms.units import Block, Fetch

# By `quant_method`: the field of `quantization_config` that names modules which aren't quantised.
KEPT_MODULES = {
    "fp8": "modules_to_not_convert", "mxfp4": "modules_to_not_convert", "awq": "modules_to_not_convert", "bitsandbytes": "llm_int8_skip_modules",
    "compressed-tensors": "ignore",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Merge(ReleasePlan):
    """The plan of a merge.

    Attributes:
      options, source, adapters: the inputs; the source is the release.
      plan: what is left out, and the problems.
      encodings: how each tensor that is written is stored, by its name.
      files: where each goes; None if there are problems.
      units: the blocks of each unit; a block's array is the number of a tensor, and its shards are a box of it.
      merging: what the adapters' tensors are used for.
      quantised: the tensors that are written as codes and scales.
      quantization: `quantization_config` as it will be; None where it isn't to change, empty where nothing quantised is
        left.
      given: the release in FP8 whose scales, and choice of weights, are taken; None for none.
      small: the release's small files as they will be; not staged.
      slots: units at a time of all workers that the units were cut for; None where they are as large as they may be.
    """

    options: MergeOptions
    source: HfCheckpoint
    adapters: tuple[Adapter, ...]
    plan: Plan
    encodings: Mapping[str, Encoding]
    files: FileLayout | None
    units: tuple[tuple[Block, ...], ...]
    merging: Merging
    quantization: Mapping[str, Any] | None = None
    quantised: frozenset[str] = frozenset()
    given: Given | None = None
    small: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    staged_small: Mapping[str, str] = dataclasses.field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    slots: int | None = None

    kind = "merge"

    @property
    def title(self) -> str:
        return "Quantisation" if self.options.quantize else "Dequantisation" if self.options.dequantize else "Merge"

    @property
    def chunks(self) -> Sequence[object]:
        """Nothing: a release has nothing to unpack."""
        return ()

    @property
    def config_edits(self) -> Mapping[str, Any]:
        """None beside those of the quantisation."""
        return {}

    def unpack(self, number: int, place: Store) -> int:
        """Never called."""
        raise IndexError(number)

    @property
    def lossy(self) -> dict[str, str]:
        """By tensor, why its values aren't the release's to the bit."""
        reasons = {
            name: f"{encoding.label}, rounded once" for name, encoding in self.encodings.items() if encoding.label
        }
        return reasons | dict.fromkeys(self.quantised, REASON)

    @property
    def changes(self) -> str:
        """How many tensors are merged, dequantised or quantised, for a person."""
        if self.options.quantize:
            also = f", {len(self.merging.touched):,} of them merged" if self.merging.touched else ""
            return f"{len(self.quantised):,} tensor{'' if len(self.quantised) == 1 else 's'} quantised{also}"
        merged, values = (
            len(self.merging.touched),
            sum(encoding.label is not None for encoding in self.encodings.values()),
        )
        number, what = (values, "dequantised") if self.options.dequantize else (merged, "merged")
        return f"{number:,} tensor{'' if number == 1 else 's'} {what}"

    @property
    def source_bytes(self) -> int:
        """Bytes of what is read: the release's tensors and the adapters'."""
        return sum(map(stored_bytes, self.encodings.values()))

    def expand(self, unit: int, place: Store | None = None) -> RowsUnit:
        """A unit, spelled out."""
        names = list(self.encodings)
        fetches, recipes = [], []
        for number, block in enumerate(self.units[unit]):
            name, box = names[block.array], block.shards
            recipe = recipe_for(
                self.layout.tensors, name, self.quantised, box, ((number, itself(name, box)),), given=self.given
            )
            fetches.append(Fetch(self.encodings[name], box, self._read_as(name, recipe.dtype)))
            recipes.append(recipe)
        return RowsUnit(unit, tuple(fetches), tuple(recipes))

    def _read_as(self, name: str, written: np.dtype) -> np.dtype:
        """The dtype of a tensor's values in memory: of one that is quantised its own, so that nothing is rounded
        before; with an adapter float32.
        """
        if name not in self.quantised:
            return written
        return VALUES if name in self.merging.touched else self.encodings[name].weight.dtype

    @property
    def hash(self) -> str:
        """Identifies the result: files and headers of the release and of the adapters, the options, what is written,
        the units.
        """
        return self._identity.hash

    @functools.cached_property
    def _identity(self) -> Identity:
        identity = Identity()
        identity.add(self.kind, hashed(self.options), self.source.config, self.small_hashes)
        for shard in itertools.chain(self.source.shards, self.given.files.shards if self.given else ()):
            identity.add(*shard.identity)
        for adapter in self.adapters:
            identity.add(adapter.identity)
        for file in self.files.files if self.files else ():
            identity.add(file.name, file.header.hex())
        for unit in self.units:
            identity.add([(block.array, block.shards) for block in unit])
        return identity

    def record(self) -> dict[str, Any]:
        """Where the release comes from."""
        return {
            "kind": self.kind,
            "source": self.source.root,
            "adapters": [adapter.record() for adapter in self.adapters],
            **({"like": self.given.files.root} if self.given else {}),
            "plan": self.hash,
            "options": hashed(self.options),
            **({} if self.slots is None else {"slots": self.slots}),
            "versions": versions(),
            "merged": dict(self.merging.touched),
            "dropped": dict(self.plan.dropped),
        }

    def stage(self) -> bytes:
        """The inputs, compressed; `load` makes the same plan of them."""
        inputs = {
            "kind": self.kind,
            "options": hashed(self.options),
            "source": self.source.to_json(),
            "adapters": [[adapter.files.to_json(), adapter.weight] for adapter in self.adapters],
            "given": self.given.files.to_json() if self.given else None,
            "slots": self.slots,
            "small": self.small_hashes,
            "hash": self.hash,
        }
        return pack_inputs(inputs)

    @property
    def inputs(self) -> Sequence[str]:
        return tuple(files.root for files in self.sources)

    @property
    def sources(self) -> tuple[HfCheckpoint, ...]:
        """All that is read."""
        return self.source, *(adapter.files for adapter in self.adapters), *([self.given.files] if self.given else [])

    def unreadable(self) -> list[Problem]:
        """The files whose end can't be read."""
        return [problem for files in self.sources for problem in files.unreadable()]


def load(inputs: Mapping[str, Any]) -> Merge:
    """The merge that `Merge.stage` staged."""
    adapters = [Adapter(HfCheckpoint.from_json(files), weight) for files, weight in inputs["adapters"]]
    given = Given.of(HfCheckpoint.from_json(inputs["given"])) if inputs["given"] else None
    made = plan_merge(
        options_from(MergeOptions, inputs["options"]),
        HfCheckpoint.from_json(inputs["source"]),
        adapters,
        given,
        inputs.get("slots"),
    )
    return dataclasses.replace(made, staged_small=inputs["small"])


def plan_merge(
    options: MergeOptions,
    checkpoint: HfCheckpoint,
    adapters: Sequence[Adapter],
    given: Given | None = None,
    slots: int | None = None,
) -> Merge:
    """Plans a merge. What stands against it is in `plan.problems`.

    Args:
      given: a release in FP8 that the quantised one is to be like.
      slots: units at a time that they are cut for, if that is known; see `units.target_bytes`.
    """
    source = open_source(checkpoint)
    merging, touched = _merge(checkpoint, source, adapters, options.family)
    if options.dequantize:
        touched = {name: encoding for name, encoding in source.encodings.items() if encoding.label} | touched
    decoded = dict.fromkeys(name for name in touched if source.encodings[name].label)  # in order, to go through it
    replaced = _replaced(options, checkpoint, source, decoded)
    quantization, why = _quantization(checkpoint, source, decoded)
    problems = (*_find_problems(options, checkpoint, source, adapters, merging, touched), *why)
    made = Merge(options, checkpoint, tuple(adapters), Plan("identity", (), replaced, problems), {}, None, (), merging)
    if problems:
        return made
    encodings = _encodings(checkpoint, touched, decoded, replaced)
    entries = [
        (name, _dtype(name, decoded, checkpoint, options.save_dtype), encoding.shape)
        for name, encoding in encodings.items()
    ]
    codes = find_quantised(entries, given) if options.quantize else frozenset()
    if options.quantize:
        if amiss := _without_codes(checkpoint, entries, codes, given):
            return dataclasses.replace(made, plan=Plan("identity", (), {}, tuple(amiss)))
        quantization = given.quantization_config if given else quantization_config(entries, codes)
    files = plan_files(with_scales(entries, codes), _files_of(checkpoint, encodings), options.max_shard_size)
    return dataclasses.replace(
        made,
        encodings=encodings,
        files=files,
        units=tuple(row_units(encodings, files, options.unit_bytes, codes, slots)),
        quantization=quantization,
        quantised=codes,
        given=given,
        warnings=files.warnings,
        slots=slots,
    )


def _merge(
    checkpoint: HfCheckpoint, source: Source, adapters: Sequence[Adapter], family: str | None
) -> tuple[Merging, dict[str, Encoding]]:
    """What adapters make of the release, and the tensors that they change, by the release's names.

    Raises:
      UnknownFamilyError: the family was named, and there is none.
    """
    aliases = _aliases(checkpoint, family)
    spelled = {rename(name, aliases): name for name in source.encodings}
    model_type = str(checkpoint.config.get("model_type", ""))
    merging = merge(source.renamed(aliases).encodings, adapters, aliases, model_type, source.lost)
    touched = {spelled[name]: merging.encodings[name] for name in merging.touched}
    return dataclasses.replace(merging, touched={spelled[name]: by for name, by in merging.touched.items()}), touched


def _aliases(checkpoint: HfCheckpoint, named: str | None) -> Mapping[str, str]:
    """Other spellings of the tensors' names, where the model is one that there is a table for.

    Raises:
      UnknownFamilyError: the family was named, and there is none.
    """
    try:
        return family_of(Config(checkpoint.config), None, named).aliases
    except (ConfigError, UnknownFamilyError):
        if named:
            raise
        return {}


def _replaced(
    options: MergeOptions, checkpoint: HfCheckpoint, source: Source, decoded: Iterable[str]
) -> dict[str, str]:
    """The release's tensors that aren't written, with the reason: codes and scales of weights that are written as their
    values; where all are, also what of the quantisation no weight needs.
    """
    return {
        **(source.dropped if options.dequantize else {}),
        **{
            tensor: f"codes or scales of {name}, which is written as its values"
            for name in decoded
            for tensor in stored_tensors(checkpoint, source, name)
        },
    }


def _find_problems(
    options: MergeOptions,
    checkpoint: HfCheckpoint,
    source: Source,
    adapters: Sequence[Adapter],
    merging: Merging,
    touched: Collection[str],
) -> list[Problem]:
    """What stands against the inputs; that there is nothing to do, or that it is done already, only where nothing else
    does.
    """
    problems = [*checkpoint.problems, *source.problems, *(merging.problems if checkpoint.tensors else ())]
    if not adapters and not options.dequantize and not options.quantize:
        problems.append(Problem("option", "--lora", "names no adapter to merge"))
    if options.dequantize and not touched and not problems:
        message = "none of its tensors is quantised; there is nothing to dequantise"
        problems.append(Problem("quantised", checkpoint.root, message))
    if options.quantize and not problems:
        problems += _already_quantised(checkpoint, source)
    return problems


def _already_quantised(checkpoint: HfCheckpoint, source: Source) -> list[Problem]:
    """The formats that the release is quantised in."""
    labels = Counter(encoding.label for encoding in source.encodings.values() if encoding.label)
    message = "{:,} of its tensors are quantised already ({}); dequantise the release first"
    return [Problem("quantised", checkpoint.root, message.format(number, label)) for label, number in labels.items()]


def _encodings(
    checkpoint: HfCheckpoint,
    touched: Mapping[str, Encoding],
    decoded: Collection[str],
    replaced: Collection[str],
) -> dict[str, Encoding]:
    """How each tensor that is written is stored, in the release's order; a weight stands where its codes do, if the
    release has none of its name.
    """
    kept = (name for name in checkpoint.tensors if name not in replaced and name not in decoded)
    encodings = {name: touched[name] if name in touched else Plain(checkpoint.tensors[name]) for name in kept}
    encodings |= {name: touched[name] for name in decoded}
    place = {name: at for at, name in enumerate(checkpoint.tensors)}
    return dict(sorted(encodings.items(), key=lambda item: place.get(item[0], place.get(item[1].weight.name, -1))))


def _files_of(checkpoint: HfCheckpoint, encodings: Mapping[str, Encoding]) -> dict[str, str]:
    """The release's file that each tensor, or its codes, lie in."""
    files = {name: tensor.path.rpartition("/")[2] for name, tensor in checkpoint.tensors.items()}
    return {name: files.get(name) or files[encoding.weight.name] for name, encoding in encodings.items()}


def _dtype(name: str, decoded: Collection[str], checkpoint: HfCheckpoint, save_dtype: str | None) -> np.dtype:
    """What a tensor is written in: its own dtype, a quantised one in the one that was asked for, or in the model's."""
    if name not in decoded:
        return checkpoint.tensors[name].dtype
    return DTYPES[save_dtype or dtype_of_model(checkpoint.config) or "bfloat16"]


def _without_codes(
    checkpoint: HfCheckpoint, entries: Sequence[Entry], codes: Collection[str], given: Given | None
) -> list[Problem]:
    """What stands against codes: there are none, or not those of a given release."""
    amiss = [*given.problems, *given.missing(entries)] if given else []
    if not codes and not amiss:
        amiss = [Problem("quantised", checkpoint.root, "none of its tensors is a weight that is quantised")]
    return amiss


def _quantization(
    checkpoint: HfCheckpoint, source: Source, merged: Collection[str]
) -> tuple[dict[str, Any] | None, list[Problem]]:
    """`quantization_config` once these quantised weights aren't any more, and what stands against it."""
    if not merged:
        return None, []
    if not any(encoding.label for name, encoding in source.encodings.items() if name not in merged):
        return {}, []
    found = checkpoint.config.get("quantization_config")
    said = found if isinstance(found, dict) else {}
    method = str(said.get("quant_method", "")).lower()
    if (field := KEPT_MODULES.get(method)) is None:
        message = f"is quantised ({method or 'without a quantization_config'}), and its format can't say that some of its weights aren't; dequantise it first"
        return None, [Problem("quantised", sorted(merged)[0], message)]
    kept = said.get(field)
    default = [] if isinstance(kept, list) else ["lm_head"]  # what transformers takes where the field is missing
    modules = [name.removesuffix(".weight") for name in sorted(merged)]
    return {
        **said,
        field: [
            *(kept if isinstance(kept, list) else default),
            *(name for name in modules if name not in (kept or ())),
        ],
    }, []
