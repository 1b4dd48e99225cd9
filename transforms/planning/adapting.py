"""Adapters of MaxText's over the weights of a checkpoint of MaxText's: the same arrays, some of them with a LoRA in
them.

Kernel and factors meet in the model's table: both are made of the same tensor of the same layer, whether layers are
stacked or apart, and on whatever axis. Every array of an adapter is used, or is a problem.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from weightbeam.formats.adapters.kernels import AdaptedKernel, LoraFactor, LoraPair
from weightbeam.formats.orbax.source import OrbaxArray, OrbaxCheckpoint, load_checkpoint
from weightbeam.model_mappings.adapters import name_of
from weightbeam.model_mappings.boxes import whole
from weightbeam.model_mappings.cells import Part
from weightbeam.model_mappings.naming import ModelNameError, check_made_for
from weightbeam.model_mappings.plan import Problem
from weightbeam.transforms.cutting.grid import Beside
from weightbeam.transforms.planning.adapters import AdapterParts, is_adapter, read_adapter
from weightbeam.transforms.planning.options import ReshardOptions
from weightbeam.transforms.planning.tree_layouts import find_parts
from weightbeam.transforms.planning.tree_model import Model


@dataclasses.dataclass(frozen=True)
class MaxTextAdapter:
    """An adapter and how much of it is merged.

    Attributes:
      files: the checkpoint.
      weight: what its product is multiplied by, beside alpha / rank.
      alpha: where the checkpoint doesn't say it.
    """

    files: OrbaxCheckpoint
    weight: float = 1.0
    alpha: float | None = None

    @property
    def root(self) -> str:
        return self.files.root

    @property
    def identity(self) -> list[Any]:
        """What tells it from another one, as JSON."""
        return [self.weight, self.alpha, self.files.identity]

    def to_json(self) -> list[Any]:
        """As JSON, for workers."""
        return [self.files.to_json(), self.weight, self.alpha]

    @classmethod
    def from_json(cls, staged: Sequence[Any]) -> MaxTextAdapter:
        """What `to_json` made."""
        return cls(load_checkpoint(staged[0]), *staged[1:])


@dataclasses.dataclass(frozen=True)
class Adapted:
    """What adapters make of a checkpoint's arrays.

    Attributes:
      kernels: the arrays that are changed, by the checkpoint's keys.
      problems: what stands against it.
      adapters: for each adapter its rank, its alpha, and what each of its arrays is used for.
    """

    kernels: Mapping[str, AdaptedKernel] = dataclasses.field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    adapters: tuple[dict[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a factor of one layer lies: the array of A or B that holds it, and its index on the axes of layers."""

    key: str
    part: Part
    index: tuple[int, ...]


def adapt(
    options: ReshardOptions, source: OrbaxCheckpoint, model: Model, adapters: Sequence[MaxTextAdapter]
) -> Adapted:
    """Merges adapters into the kernels of a checkpoint; the products of several are summed."""
    if not adapters:
        return Adapted()
    made, why = find_parts(source, model, options.family, options.maxtext_model)
    if why:
        message = f"which axes of a kernel are its inputs follows from the model's table, but {why}"
        return Adapted(problems=(Problem("option", "--lora", message),))
    parts = {key: same[0] for key, same in made.items() if len(same) == 1}
    each = [_adapt_one(adapter, source, model, options.maxtext_model or model.name, parts) for adapter in adapters]
    problems = tuple(dict.fromkeys(problem for one in each for problem in one.problems))
    pairs: dict[str, list[LoraPair]] = {}
    for name, pair in () if problems else (named for one in each for named in one.pairs):
        pairs.setdefault(name, []).append(pair)
    kernels = {source.weights[name].key: _kernel(source, name, parts[name], found) for name, found in pairs.items()}
    return Adapted(kernels, problems, tuple(one.about for one in each if one.about))


@dataclasses.dataclass(frozen=True)
class _One:
    """What one adapter makes of a checkpoint's arrays.

    Attributes:
      problems: what stands against it.
      pairs: `(kernel, factors of some of its layers)`.
      about: as `Adapted` has it; empty where it is no adapter.
    """

    problems: Sequence[Problem]
    pairs: Sequence[tuple[str, LoraPair]] = ()
    about: dict[str, Any] = dataclasses.field(default_factory=dict)


def _adapt_one(
    adapter: MaxTextAdapter, source: OrbaxCheckpoint, model: Model, maxtext_model: str | None, parts: Mapping[str, Part]
) -> _One:
    """Merges an adapter into the kernels that the table makes as `parts` says."""
    if not is_adapter(adapter.files):
        message = "holds other arrays than the factors of a LoRA, and is no adapter of MaxText's"
        return _One([Problem("adapter", adapter.root, message)])
    planned = read_adapter(adapter.files, model.config, adapter.alpha, maxtext_model)
    problems, pairs, uses = [*_why_not(adapter, planned, source)], [], dict[str, str]()
    if not problems:
        for name, pair, keys in _pairs(parts, planned.parts, adapter, adapter.weight * planned.alpha / planned.rank):
            if name in source.weights:
                pairs.append((name, pair))
                uses |= dict.fromkeys(keys, f"merged into {name}")
        problems = [*_misfits(source, parts, dict(pairs)), *_unused(adapter, planned.parts.keys() - uses.keys())]
    about = {
        "source": adapter.root,
        "weight": adapter.weight,
        "lora_rank": planned.rank,
        "lora_alpha": planned.alpha,
        "arrays": uses,
    }
    return _One(problems, pairs, about)


def _why_not(adapter: MaxTextAdapter, planned: AdapterParts, source: OrbaxCheckpoint) -> Iterator[Problem]:
    """What stands against an adapter whatever its factors are merged into: its own problems, and a base of another model."""
    for problem in planned.problems:
        yield dataclasses.replace(problem, subject=f"{adapter.root}: {problem.subject}")
    made = adapter.files.record.get("model", False)  # one that was trained has no record
    if planned.family and isinstance(made, str | None):
        try:
            check_made_for(planned.family, source.record, made, source.root)
        except ModelNameError as e:
            yield Problem("adapter", adapter.root, str(e))


def _misfits(source: OrbaxCheckpoint, parts: Mapping[str, Part], names: Iterable[str]) -> Iterator[Problem]:
    """The kernels among these of other shapes than the table's."""
    for name in names:
        held, wanted = source.weights[name].shape, parts[name].shape
        if held != wanted:
            message = f"{held} in the checkpoint, by config.json it is {wanted}"
            yield Problem("shape", name, message, is_array=True)


def _unused(adapter: MaxTextAdapter, keys: Iterable[str]) -> Iterator[Problem]:
    """The factors that nothing is made of."""
    for key in sorted(keys):
        message = "the base has no kernel that it is a factor of"
        yield Problem("unused", f"{adapter.root}: {key}", message, is_array=True)


def _pairs(
    parts: Mapping[str, Part], factors: Mapping[str, Part], adapter: MaxTextAdapter, scaling: float
) -> Iterator[tuple[str, LoraPair, tuple[str, str]]]:
    """`(kernel, factors of some of its layers, the keys of these)` for every kernel of the table that the adapter has
    factors of.

    Where kernel and factors are stacked alike, one pair is of all layers; else each layer has a pair:

        kernel                    A                          B
        (embed, layers, mlp)      (embed, layers, rank)      (rank, layers, mlp)      one pair
        (embed, layers, mlp)      (embed, rank), …           (rank, mlp), …           a pair for each layer
        (embed, mlp)              (embed, layers, rank)      (rank, layers, mlp)      one pair, of one index of `layers`
    """
    places: dict[str, _Place] = {}
    for key, part in factors.items():
        places |= {str(cell.tensor): _Place(key, part, cell.layer) for cell in part.cells()}
    for name, part in parts.items():
        layers = _layers(part, places)
        if _are_together(part, layers):
            first = next(iter(layers.values()))
            yield name, _pair(adapter, first, whole(part.layers.shape), (0,) * part.layers.ndim, scaling), _keys(first)
            continue
        for index, found in layers.items():
            pair = _pair(adapter, found, tuple((at, at + 1) for at in index), found[0].index, scaling)
            yield name, pair, _keys(found)


def _layers(part: Part, places: Mapping[str, _Place]) -> dict[tuple[int, ...], list[_Place]]:
    """Where A and B lie of each layer of a kernel that has both."""
    if part.rule.source is None or part.rule.name_axes:
        return {}
    layers = {}
    for cell in part.cells():
        rule = dataclasses.replace(part.rule, source=cell.tensor)
        found = [places[factor] for side in "ab" if (factor := name_of(rule, side)) in places]
        if len(found) == 2:
            layers[cell.layer] = found
    return layers


def _are_together(part: Part, layers: Mapping[tuple[int, ...], Sequence[_Place]]) -> bool:
    """Whether one array of A and one of B hold all layers of a kernel, in its order."""
    if not layers or len(layers) != part.layers.size:
        return False
    first = next(iter(layers.values()))
    return all(place.part.layers.shape == part.layers.shape for place in first) and all(
        _keys(found) == _keys(first) and index == found[0].index == found[1].index for index, found in layers.items()
    )


def _keys(places: Sequence[_Place]) -> tuple[str, str]:
    a, b = places
    return a.key, b.key


def _pair(
    adapter: MaxTextAdapter,
    places: Sequence[_Place],
    layers: tuple[tuple[int, int], ...],
    first: tuple[int, ...],
    scaling: float,
) -> LoraPair:
    a, b = (
        LoraFactor(adapter.files.weights[place.key], min(place.part.stack_axes, default=0), rank_axis)
        for place, rank_axis in zip(places, (1, 0), strict=True)
    )
    return LoraPair(layers, first, a, b, scaling)


def _kernel(source: OrbaxCheckpoint, name: str, part: Part, pairs: Sequence[LoraPair]) -> AdaptedKernel:
    """A kernel with its factors."""
    _, inputs = part.rule.axes.left
    words = part.rule.axes.right
    first = next((axis for axis, held in enumerate(words) if held and not set(held) <= set(inputs)), len(words))
    layers = min(part.stack_axes, default=0)
    return AdaptedKernel(source.weights[name], tuple(pairs), layers, part.layers.ndim, first)


def beside(kernel: AdaptedKernel, part: Part) -> Beside:
    """Memory for the factors of a box of an array that `part` makes of a kernel: axes of the array, and bytes for each
    index along them.

    Of a merged axis, such as heads · dim, only the first factor is cut. Beside what is stored there are the values in
    float32, twice.
    """
    layers = range(kernel.at, kernel.at + kernel.stacked)
    others = [axis for axis in range(len(kernel.shape)) if axis not in layers]
    terms = []
    for held, factors in (
        (others[: kernel.inputs], [pair.a for pair in kernel.pairs]),
        (others[kernel.inputs :], [pair.b for pair in kernel.pairs]),
    ):
        along = part.stack_axes.union(*(part.axes_of(axis) for axis in (*layers, *held[:1])))
        adapters = {
            factor.array.items: factor.rank * (factor.array.dtype.itemsize + 8)
            for factor in factors
            if isinstance(factor.array, OrbaxArray)
        }
        terms.append((along, sum(adapters.values()) * math.prod(kernel.shape[axis] for axis in held[1:])))
    return tuple(terms)
