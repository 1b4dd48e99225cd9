"""The export of an adapter: MaxText's factors as the tensors that PEFT has, an export whose table is the adapter's.

What MaxText keeps is A and B of each kernel, of one rank, and alpha / rank as the only scaling; the values are those that
a conversion with `--adapter_only` began with, padded ranks included. Layers that hold nothing but zeros had no adapter,
and get none; so the factors are read once when it is planned.

    base.decoder.layers.self_attention.query.kernel_lora_a (embed, layers, rank)
      ─▸ base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight (rank, embed)
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from weightbeam.formats.adapters.adapter import PREFIX, WEIGHTS
from weightbeam.formats.orbax.source import OrbaxCheckpoint, load_checkpoint
from weightbeam.model_mappings.adapters import split_name
from weightbeam.model_mappings.boxes import whole
from weightbeam.model_mappings.cells import Cell
from weightbeam.model_mappings.family import Family, rename
from weightbeam.model_mappings.plan import Array, ArrayPlan, Problem
from weightbeam.transforms.comparing.array_sums import find_lost
from weightbeam.transforms.cutting.chunk_blocks import ChunkUnits, cut
from weightbeam.transforms.cutting.files import Entry, plan_files
from weightbeam.transforms.cutting.units import Fetch
from weightbeam.transforms.execution.boxes import read
from weightbeam.transforms.planning.adapters import AdapterParts, read_adapter
from weightbeam.transforms.planning.export_planner import find_rounded
from weightbeam.transforms.planning.exporting import Export, Like
from weightbeam.transforms.planning.options import ExportOptions, options_from

SIDES = {"a": "lora_A", "b": "lora_B"}  # MaxText's and PEFT's


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterExport(Export):
    """The plan of an adapter's export; `names` has none for a factor of a layer without an adapter.

    Attributes:
      rank, alpha: of all modules.
      used: the modules, by the table's names, of which the adapter holds other values than zeros.
    """

    rank: int
    alpha: float
    used: frozenset[str]

    kind, title = "adapter", "Adapter"

    @property
    def scaling(self) -> str:
        """Its rank and its alpha, for a person."""
        return f"rank {self.rank} with alpha {self.alpha:g}"

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"kind": self.kind, "rank": self.rank, "alpha": self.alpha}

    def settled(self) -> list[Any]:
        return [*super().settled(), self.rank, self.alpha]

    def staged(self) -> dict[str, Any]:
        return {**super().staged(), "alpha": self.alpha, "used": sorted(self.used)}

    def peft_config(self, base: str) -> bytes:
        """`adapter_config.json`, for a base that is called so."""
        paths = sorted({name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in self.layout.tensors})
        leaves = sorted({path.rpartition(".")[2] for path in paths})
        times = {sum(path.endswith(f".{leaf}") for path in paths) for leaf in leaves}
        everywhere = all(self.names.values()) and len(times) == 1
        said = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": int(self.alpha) if self.alpha == int(self.alpha) else self.alpha,
            # towers have modules of the same names
            "target_modules": leaves if everywhere and not _has_towers(self.like) else paths,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "lora_dropout": 0.0,
            "modules_to_save": None,
            "use_dora": False,
            "use_rslora": False,
        }
        return json.dumps(said, indent=2).encode()


def plan_adapter(
    options: ExportOptions, source: OrbaxCheckpoint, like: Like, slots: int | None, used: Collection[str] | None = None
) -> AdapterExport:
    """Plans the export of an adapter. What stands against it is in `plan.problems`.

    Args:
      source: a checkpoint for which `is_adapter` holds.
      like: the release that it is an adapter of, of which `config.json` is enough.
      slots: units at a time that they are cut for, if that is known.
      used: the modules that hold values; found out by reading the factors where it isn't given.

    Raises:
      StorageError: the factors can't be read.
    """
    found = read_adapter(source, like.config, options.lora_alpha, options.maxtext_model, options.param_scan_axis)
    arrays = tuple(
        Array(key, part.shape, source.weights[key].dtype, (None,) * len(part.shape), (part,), None)
        for key, part in found.parts.items()
    )
    problems, files, made = [*found.problems, *find_lost(source.record, source.arrays)], None, ChunkUnits()
    names, rounded = dict[str, tuple[str, ...]](), dict[str, str]()
    if not problems:
        used = _find_used(source, arrays) if used is None else used
        names = _names(arrays, used, found, like)
        entries = [
            Entry(name, array.dtype, array.parts[0].window_shape)
            for array in arrays
            for tensor in array.parts[0].tensors
            for name in names[tensor]
        ]
        dtypes = {tensor: array.dtype for array in arrays for tensor in array.parts[0].tensors}
        sizes = {tensor: dtype.itemsize for tensor, dtype in dtypes.items()}
        rounded = find_rounded(arrays, dtypes, source.weights)
        files = plan_files(entries, max_shard_size=sys.maxsize, single=WEIGHTS)
        made = cut(arrays, source.weights, sizes, (), options.unit_bytes, slots)
        problems += made.problems
        if not entries:
            problems.append(Problem("adapter", source.root, "holds nothing but zeros, which are no adapter"))
    return AdapterExport(
        options=options,
        source=source,
        like=like,
        plan=ArrayPlan(
            found.family.name if found.family else "unknown", arrays, {}, tuple(problems), model=found.model
        ),
        names=names,
        files=files,
        grids=made.grids,
        units=made.units,
        lossy={name: reason for tensor, reason in rounded.items() for name in names[tensor]},
        form=like,
        large=made.unpacked,
        slots=slots,
        rank=found.rank,
        alpha=found.alpha,
        used=frozenset(used or ()),
    )


def _names(
    arrays: Iterable[Array], used: Collection[str], found: AdapterParts, like: Like
) -> dict[str, tuple[str, ...]]:
    """PEFT's name of each factor, by the table's; none where the adapter's factors of a layer are zeros."""
    assert found.family is not None
    in_memory = {module: _in_memory(module, found.family, like) for module in used}
    names = {}
    for tensor in (tensor for array in arrays for tensor in array.parts[0].tensors):
        module, side = _split(tensor)
        names[tensor] = (f"{PREFIX}{in_memory[module]}.{SIDES[side]}.weight",) if module in used else ()
    return names


def _split(tensor: str) -> tuple[str, str]:
    """The module of a factor, by the table's name of that, and which of its two it is."""
    of, side = split_name(tensor)
    return of.removesuffix(".weight"), side


def _find_used(source: OrbaxCheckpoint, arrays: Iterable[Array]) -> set[str]:
    """The modules of which a factor holds another value than zero; an array is read at a time."""
    used: set[str] = set()
    for array in arrays:
        ((values, *_), *_), _ = read([Fetch(source.weights[array.key], whole(array.shape), array.dtype)])
        used |= {_split(str(cell.tensor))[0] for cell in array.cells() if _holds_values(cell, values)}
    return used


def _holds_values(cell: Cell, values: np.ndarray) -> bool:
    """Whether a cell of an array, which is all there, has another value than zero."""
    origin = (0,) * values.ndim
    return any(piece.target.of(values, origin).any() for piece in cell.pieces(whole(values.shape)))


def _in_memory(module: str, family: Family, like: Like) -> str:
    """The path of a module in transformers' model: of a text model with towers around it `model.language_model.layers…`,
    Llama 4's `language_model.model.layers…`; of one alone `model.layers…`, whatever the table or the files say.
    """
    aliases = family.aliases
    if module.startswith("layers."):  # DeepSeek's own names for V4
        return rename(module, {ours: theirs for theirs, ours in aliases.items()})
    if not _has_towers(like):
        return re.sub(r"^model\.language_model\.", "model.", module)
    if (prefix := aliases.get("model.language_model")) and module.startswith(f"{prefix}."):
        return f"model.language_model{module.removeprefix(prefix)}"
    return f"language_model.{module}" if not prefix and aliases.get("language_model") == "" else module


def _has_towers(like: Like) -> bool:
    """Whether the base is a text model and what is around it."""
    return any(section in like.config for section in ("text_config", "thinker_config"))


def load(inputs: Mapping[str, Any]) -> AdapterExport:
    """The export that `AdapterExport.stage` staged."""
    options = dataclasses.replace(options_from(ExportOptions, inputs["options"]), lora_alpha=inputs["alpha"])
    source, like = load_checkpoint(inputs["source"]), Like.from_json(inputs["like"])
    return plan_adapter(options, source, like, inputs.get("slots"), inputs["used"])
