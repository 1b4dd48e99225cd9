"""An adapter of MaxText's as one of PEFT's: the table of the adapter, read back.

An adapter is small, so it is made here and now, a layer of one weight after the other, without a pipeline. What MaxText
keeps is A and B of each kernel, of one rank, and alpha / rank as the only scaling; the values are those that a
conversion with `--adapter_only` began with, padded ranks included. Layers that hold nothing but zeros had no adapter,
and get none.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from weightbeam.formats.adapters.adapter import PREFIX as PEFT_PREFIX
from weightbeam.formats.adapters.config import is_alpha
from weightbeam.formats.orbax.source import OrbaxArray, OrbaxCheckpoint
from weightbeam.model_mappings.adapters import RANK, adapter_table
from weightbeam.model_mappings.boxes import whole
from weightbeam.model_mappings.cells import Cell, Part
from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.family import Family, rename
from weightbeam.model_mappings.naming import ModelNameError, check_made_for, name_model
from weightbeam.model_mappings.plan import Problem, expand, key_of
from weightbeam.model_mappings.registry import UnknownFamilyError, family_of
from weightbeam.model_mappings.trees import is_lora, is_scanned
from weightbeam.transforms.comparing.array_sums import Shares, add_shares, damage, find_damage
from weightbeam.transforms.comparing.source_sums import DamagedError
from weightbeam.transforms.cutting.tensor_rows import back
from weightbeam.transforms.cutting.units import Fetch
from weightbeam.transforms.execution.boxes import BoxRecipe, arrange, make, read
from weightbeam.transforms.planning.exporting import Like
from weightbeam.transforms.planning.layouts import SCAN_AXES

SIDES = {"a": "lora_A", "b": "lora_B"}  # MaxText's and PEFT's
_NAMED = re.compile(r"(?P<tensor>.+)\[.*\]\.lora_(?P<side>[ab])")  # as `model_mappings.adapters.name_of` names it


@dataclasses.dataclass(frozen=True)
class AdapterExport:
    """An adapter, planned.

    Attributes:
      source: the checkpoint.
      like: the release that it is an adapter of.
      parts: the table's, by the key of the array that each reads.
      rank, alpha: of all modules.
      problems: what stands against it.
      family: whose table it is.
    """

    source: OrbaxCheckpoint
    like: Like
    parts: Mapping[str, Part]
    rank: int
    alpha: float
    problems: tuple[Problem, ...]
    family: Family | None

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """PEFT's name and the values of each factor, those of one module together; of layers without an adapter none.

        Raises:
          DamagedError: in the end, if what was read isn't what the checkpoint's record says.
        """
        modules: dict[str, list[tuple[str, Part, Cell]]] = defaultdict(list)
        for key, part in self.parts.items():
            for cell in part.cells():
                if match := _NAMED.fullmatch(str(cell.tensor)):
                    modules[match["tensor"].removesuffix(".weight")].append((key, part, cell))
        arrays: dict[str, np.ndarray] = {}
        shares = Shares()
        for module, factors in modules.items():
            made = {}
            for key, part, cell in factors:
                if key not in arrays:
                    array = self.source.weights[key]
                    (arrays[key],) = read([_fetch(array)])[0][0]
                    add_shares(shares, array, whole(array.shape), arrays[key])
                side = str(cell.tensor)[-1]
                made[f"{PEFT_PREFIX}{self._in_memory(module)}.{SIDES[side]}.weight"] = _back(
                    self.source.weights[key], arrays[key], key, part, cell
                )
            if any(values.any() for values in made.values()):
                yield from made.items()
        compared, damaged = find_damage(self.source.record, map(self.source.weights.__getitem__, arrays), [shares])
        if damaged:
            raise DamagedError(damage(self.source.root, damaged, compared.arrays))

    def _in_memory(self, module: str) -> str:
        """The path of a module in transformers' model: of a text model with towers around it `model.language_model.layers…`,
        Llama 4's `language_model.model.layers…`; of one alone `model.layers…`, whatever the table or the files say.
        """
        assert self.family is not None
        aliases = self.family.aliases
        if module.startswith("layers."):  # DeepSeek's own names for V4
            return rename(module, {ours: theirs for theirs, ours in aliases.items()})
        if not self._has_towers:
            return re.sub(r"^model\.language_model\.", "model.", module)
        if (prefix := aliases.get("model.language_model")) and module.startswith(f"{prefix}."):
            return f"model.language_model{module.removeprefix(prefix)}"
        return f"language_model.{module}" if not prefix and aliases.get("language_model") == "" else module

    @property
    def _has_towers(self) -> bool:
        """Whether the base is a text model and what is around it."""
        return any(section in self.like.config for section in ("text_config", "thinker_config"))

    def peft_config(self, names: Sequence[str], base: str) -> bytes:
        """`adapter_config.json` for tensors of these names, of a base that is called so."""
        paths = sorted({name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for name in names})
        leaves = sorted({path.rpartition(".")[2] for path in paths})
        layers = {leaf: sum(path.endswith(f".{leaf}") for path in paths) for leaf in leaves}
        count = sum(np.prod(part.layers.shape, dtype=int) for part in self.parts.values())
        everywhere = sum(layers.values()) * len(SIDES) == count and len(set(layers.values())) == 1
        said = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": int(self.alpha) if self.alpha == int(self.alpha) else self.alpha,
            "target_modules": leaves if everywhere and not self._has_towers else paths,  # towers have such leaves, too
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "lora_dropout": 0.0,
            "modules_to_save": None,
            "use_dora": False,
            "use_rslora": False,
        }
        return json.dumps(said, indent=2).encode()


def _fetch(array: OrbaxArray) -> Fetch:
    return Fetch(array, whole(array.shape), array.dtype)


def _back(array: OrbaxArray, values: np.ndarray, key: str, part: Part, cell: Cell) -> np.ndarray:
    """The tensor of a cell, of all of its array."""
    box = whole(array.shape)
    pieces = tuple((0, piece) for piece in back(cell, box, key))
    recipe = BoxRecipe(whole(part.window_shape), array.dtype, None, pieces)
    return make(recipe, arrange([_fetch(array)], [values], pieces)).reshape(part.window_shape)


def is_adapter(source: OrbaxCheckpoint) -> bool:
    """Whether a checkpoint holds the factors of a LoRA and nothing else."""
    return is_lora(source.weights)


def plan_adapter(
    source: OrbaxCheckpoint, like: Like, alpha: float | None = None, model: str | None = None, axis: int | None = None
) -> AdapterExport:
    """Plans the export of an adapter.

    Args:
      source: a checkpoint for which `is_adapter` holds.
      like: the release that it is an adapter of, of which `config.json` is enough.
      alpha: where the checkpoint doesn't say it.
      model: the MaxText model, where neither the checkpoint nor `config.json` settles it.
      axis: on which the layers are stacked; None for what the checkpoint says, or its shapes.
    """
    rank, alpha, problems = _scaling(source, alpha)
    said = source.options
    recorded, named = said.get("param_scan_axis"), said.get("maxtext_model")
    if ("param_scan_axis" in said and type(recorded) is not int) or not isinstance(named, str | None):
        message = f"its record names the axis of layers {str(recorded)[:80]!r} and the model {str(named)[:80]!r}, which can't be meant"
        problems.append(Problem("adapter", source.root, message))
        return AdapterExport(source, like, {}, rank, alpha, tuple(problems), None)
    model = model or named
    weights, config = source.weights, Config(like.config)
    try:
        family = family_of(config, model)
        naming = name_model(family, config, model)
        check_made_for(family, source.record, naming.model, source.root)
        layout = _layout(source, naming.model)
        axis = recorded if axis is None else axis
        axes = SCAN_AXES if axis is None else (axis,)
        tried = [
            _parts(family, config, dataclasses.replace(layout, scan_axis=each), rank, weights)
            for each in (axes if layout.scan else axes[:1])
        ]
    except (ConfigError, UnknownFamilyError, ModelNameError) as e:
        problems.append(Problem("config", "config.json", str(e)))
        return AdapterExport(source, like, {}, rank, alpha, tuple(problems), None)
    faults = [list(_find_faults(parts, weights)) for parts, _ in tried]
    fewest = min(faults, key=len)
    parts, unknown = tried[faults.index(fewest)]
    fitting = [other for (other, _), wrong in zip(tried, faults, strict=True) if not wrong]
    if any(_places(other) != _places(parts) for other in fitting):
        message = (
            "its shapes fit several axes of layers, and it doesn't say which; weightbeam export takes --param_scan_axis"
        )
        problems.append(Problem("adapter", source.root, message))
    problems += [
        Problem("unused", key, f"the {family.name} table has no kernel that it is a factor of", is_array=True)
        for key in unknown
    ]
    problems += fewest
    return AdapterExport(source, like, parts, rank, float(alpha), tuple(problems), family)


def _scaling(source: OrbaxCheckpoint, alpha: float | None) -> tuple[int, float, list[Problem]]:
    """The rank of all factors, the alpha that the checkpoint names, or else this one, and what is wrong with them."""
    problems = []
    said = _mapping(source.custom, "lora")
    ranks = {array.shape[-1] for key, array in source.weights.items() if key.endswith("_lora_a") and array.shape}
    rank = next(iter(ranks), 0)
    if len(ranks) != 1 or repr(said.get("lora_rank", rank)) != repr(rank):
        message = f"its factors have the ranks {sorted(ranks)}, its metadata say {str(said.get('lora_rank'))[:80]}"
        problems.append(Problem("adapter", source.root, message))
    alpha = said.get("lora_alpha", alpha)
    if alpha is not None and not is_alpha(alpha):
        message = (
            f"its metadata say that alpha is {str(alpha)[:80]!r}; it should be a number above 0 that float32 holds"
        )
        problems.append(Problem("adapter", source.root, message))
    elif alpha is None:
        message = "doesn't say what its product is scaled by (alpha / rank); name it with --lora_alpha"
        problems.append(Problem("adapter", source.root, message))
    return rank, float(alpha) if is_alpha(alpha) else 1.0, problems


def _layout(source: OrbaxCheckpoint, model: str | None) -> Layout:
    """The layout that an adapter is in, but for the axis on which its layers are stacked."""
    weights, scan = source.weights, source.custom.get("scan_layers")
    return Layout(
        scan=scan if isinstance(scan, bool) else is_scanned(weights),
        vocab=None,
        mtp=any(".mtp_block." in key for key in weights),
        multimodal=any("_encoder." in key for key in weights),
        model=model,
        shapes={},
    )


def _find_faults(parts: Mapping[str, Part], weights: Mapping[str, OrbaxArray]) -> Iterator[Problem]:
    """The factors of other shapes than the table's, and those that lack the other factor of their product."""
    for key, part in parts.items():
        if weights[key].shape != part.shape:
            message = f"{weights[key].shape} in the checkpoint, by config.json it is {part.shape}"
            yield Problem("shape", key, message, is_array=True)
        other = f"{key[:-1]}{'b' if key.endswith('a') else 'a'}"
        if other not in weights:
            message = f"the checkpoint holds {key}, and a product has two factors"
            yield Problem("missing", other, message, is_array=True)


def _places(parts: Mapping[str, Part]) -> dict[str, object]:
    """Which factor of the table's lies on which axis of each array."""
    return {key: part.target_axes for key, part in parts.items()}


def _mapping(held: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object of a checkpoint's metadata; empty where there is none."""
    found = held.get(key)
    return found if isinstance(found, Mapping) else {}


def _parts(
    family: Family, config: Config, layout: Layout, rank: int, weights: Mapping[str, OrbaxArray]
) -> tuple[dict[str, Part], list[str]]:
    """The part that reads each factor back, and the factors that no kernel of the table has."""
    stacks = family.table(config, layout)
    adapted = set()
    for stack in stacks:
        for rule in stack.rules:
            path = "/".join(filter(None, (stack.collection, stack.target, rule.target)))
            if rule.source and not rule.name_axes and f"{key_of(path)}_lora_a" in weights:
                adapted |= {(stack.source + rule.source).format(layer=layer) for _, layer in stack.places}
    table = adapter_table(stacks, adapted)
    own = dataclasses.replace(
        family, dims=lambda c, at: {**family.dims(c, at), RANK: rank}, stacks=lambda c, at: table.stacks, earlier={}
    )
    shapes = dict.fromkeys(table.factors, ())
    found = {
        key_of(path).removesuffix(".value"): parts[0]
        for path, parts in expand(own, config, dataclasses.replace(layout, shapes=shapes)).items()
    }
    return {key: part for key, part in found.items() if key in weights}, sorted(set(weights) - set(found))
