"""Two checkpoints of any kinds under the same names: releases, Orbax checkpoints, or one of each."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from weightbeam.formats.orbax import open_arrays
from weightbeam.formats.orbax.scaled import values_of
from weightbeam.formats.orbax.source import OrbaxCheckpoint, open_orbax
from weightbeam.formats.orbax.state import TEXT_IS, described
from weightbeam.formats.release.source import open_source
from weightbeam.formats.safetensors import HfCheckpoint, is_release, open_hf
from weightbeam.formats.storage import StorageError, Store, open_store, reason
from weightbeam.model_mappings.boxes import Box
from weightbeam.model_mappings.config import Config, ConfigError
from weightbeam.model_mappings.family import Family
from weightbeam.model_mappings.plan import PARAMETERS, PREFIX, Array, is_float
from weightbeam.model_mappings.registry import UnknownFamilyError, family_of
from weightbeam.model_mappings.trees import COUNTER, GENERATORS, MODULES, is_scanned
from weightbeam.pipelines.checking.recorded import options_made_with, options_of_export
from weightbeam.pipelines.checking.subject import plan_as
from weightbeam.pipelines.running.problems import refuse
from weightbeam.pipelines.terminal.errors import Refused, refusing, try_each
from weightbeam.transforms.comparing.differences import coarser
from weightbeam.transforms.execution.boxes import make_boxes
from weightbeam.transforms.execution.operands import Operand, stored_operand
from weightbeam.transforms.planning.conversion import Conversion
from weightbeam.transforms.planning.layouts import SCAN_AXES, scan_axis_of
from weightbeam.transforms.planning.options import COMPUTED, FULL, PARAMS

STACKED = re.compile(r"(.+?\.\w*layers)\.(.+)")  # the key of an array with all layers of a kind
# the same where kinds alternate, as in gpt-oss and Gemma 3: with each cycle's layer at a place; and of a layer behind the
# last whole cycle
CYCLE = re.compile(r"(.+?\.layers)\.layers?_(\d+)\.(.+)")
REMAINDER = re.compile(r"(.+?\.layers)_remainder\.layers?_(\d+)\.(.+)")

IN_LIST = re.compile(r"(\.\w*layers)\.(\d+)\.")  # a layer in an nnx.List
NOT_ASKED = f"not a weight (--state {PARAMS})"
NO_STATE = "a training state around the weights, and the other checkpoint has none like it"
NOT_THERE = "not there"
NO_GENERATORS = "random generators that the other checkpoint doesn't have"


Side = Mapping[str, Operand]


@dataclasses.dataclass(frozen=True)
class ComparedPair:
    """Two checkpoints that are compared.

    Attributes:
      a, b: where they are.
      first, second: what they hold, under the same names.
      left_out: tensors of a release that its table leaves out on purpose, with the reason.
      sources: what is read.
      apart: of each side the arrays of a training state that aren't compared, with the reason.
      unlike: of two training states the leaves that aren't the same and hold no numbers to compare, and how they differ.
    """

    a: str
    b: str
    first: Side
    second: Side
    left_out: Mapping[str, str]
    sources: tuple[HfCheckpoint | OrbaxCheckpoint, ...] = ()
    apart: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
    unlike: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def shared(self, name: str) -> bool:
        """Whether both have a tensor of that name and of one shape."""
        first, second = self.first.get(name), self.second.get(name)
        return first is not None and second is not None and first.shape == second.shape


def open_pair(
    a: str, b: str, maxtext_model: str | None = None, family: str | None = None, state: str = FULL
) -> ComparedPair:
    """Looks at two checkpoints; see `diff`.

    Raises:
      Refused: one of them can't be looked at, or problems stand against it.
    """
    sources = try_each(lambda: _open(a), lambda: _open(b))
    (first, second), left_out = _in_one_spelling(sources, maxtext_model, family)
    states = [_state(source) if isinstance(source, OrbaxCheckpoint) else {} for source in sources]
    (one, other), apart = _compared_states(_both_layer_by_layer(states, sources), state)
    held = {place: source for place, source in zip((a, b), sources, strict=True) if isinstance(source, OrbaxCheckpoint)}
    unlike = _unlike(held) if one and other and len(held) == 2 else {}
    return ComparedPair(a, b, {**first, **one}, {**second, **other}, left_out, tuple(sources), apart, unlike)


def _open(url: str) -> HfCheckpoint | OrbaxCheckpoint:
    """A release by its headers, or an Orbax checkpoint by its metadata. Raises Refused where neither can be found
    there.
    """
    try:
        store = open_store(url)
        return open_hf(store) if is_release(store) else open_orbax(store)
    except StorageError as e:
        raise Refused(str(e)) from e
    except OSError as e:
        raise Refused(f"{url}: {reason(e)}") from e


def _in_one_spelling(
    sources: Sequence[HfCheckpoint | OrbaxCheckpoint], maxtext_model: str | None, family: str | None
) -> tuple[tuple[Side, Side], dict[str, str]]:
    """Both sides under the same names, and what of a release has no place there."""
    releases = [source for source in sources if isinstance(source, HfCheckpoint)]
    if len(releases) == 2:
        families = [_family(release, maxtext_model, family) for release in releases]
        known = families[0] if all(each is families[0] for each in families) else None
        return (_tensors(releases[0], known), _tensors(releases[1], known)), {}
    if not releases:
        sides = [_arrays(checkpoint) for checkpoint in sources if isinstance(checkpoint, OrbaxCheckpoint)]
        return _both_layer_by_layer(sides, sources), {}
    (checkpoint,) = (source for source in sources if isinstance(source, OrbaxCheckpoint))
    arrays = _arrays(checkpoint)
    converted, left_out = _converted(releases[0], open_store(checkpoint.root), arrays, maxtext_model, family)
    return (converted, arrays) if isinstance(sources[0], HfCheckpoint) else (arrays, converted), left_out


def _family(release: HfCheckpoint, maxtext_model: str | None, family: str | None) -> Family | None:
    """The family of a release, whose table names its tensors; None where there is no table. Raises Refused where the
    family was named, and there is none.
    """
    try:
        return family_of(Config(release.config), maxtext_model, family)
    except (ConfigError, UnknownFamilyError) as e:
        if family:
            raise Refused(str(e)) from e
        return None


def _tensors(release: HfCheckpoint, family: Family | None) -> Side:
    """A release's own tensors; quantised ones by their values in float32."""
    source = open_source(release)
    source = source.renamed(family.aliases) if family else source
    problems = [
        problem
        for problem in (*release.problems, *source.problems)
        if (problem.kind, problem.subject) != ("missing", "config.json")
    ]
    refuse(problems, of=release.root)
    return {name: stored_operand(encoding) for name, encoding in source.encodings.items()}


def _arrays(checkpoint: OrbaxCheckpoint) -> Side:
    """An Orbax checkpoint's weights by MaxText's keys; FP8 codes by their values in float32."""
    return {key: stored_operand(array) for key, array in values_of(checkpoint).items()}


def _state(checkpoint: OrbaxCheckpoint) -> Side:
    """What an Orbax checkpoint holds around its weights, by its own keys; none where that is a counter alone."""
    state = {IN_LIST.sub(r"\1_\2.", key): stored_operand(checkpoint.arrays[key]) for key in checkpoint.tree.state}
    return state if state.keys() - {COUNTER} else {}


def _compared_states(
    states: tuple[Side, Side], wanted: str
) -> tuple[tuple[Side, Side], tuple[dict[str, str], dict[str, str]]]:
    """The arrays of two training states, layer by layer, that are compared, and of each side those that aren't, with the
    reason: two states are where they have more in common than a counter, but for random generators that only one has, as a
    reshard leaves out.
    """
    one, other = states
    is_wanted = wanted == FULL and bool((one.keys() & other.keys()) - {COUNTER})

    def left_out_of(side: Side, beside: Side) -> dict[str, str]:
        if not is_wanted:
            return dict.fromkeys(side, NO_STATE if wanted == FULL else NOT_ASKED)
        return {key: NO_GENERATORS for key in side if key not in beside and GENERATORS.search(key)}

    apart = left_out_of(one, other), left_out_of(other, one)
    sides = [{key: side[key] for key in side if key not in out} for side, out in zip((one, other), apart, strict=True)]
    return (sides[0], sides[1]), apart


def _unlike(states: Mapping[str, OrbaxCheckpoint]) -> dict[str, str]:
    """What of two training states holds no numbers to compare, and isn't the same: texts, and the kinds of random keys
    and of what is empty. Of what only one side has the texts count. Raises Refused: a file that says it can't be read.
    """
    with refusing(StorageError):
        leaves_of = {place: described(state) for place, state in states.items()}
    found = {}
    for key in dict.fromkeys(itertools.chain.from_iterable(leaves_of.values())):
        leaf = {place: leaves.get(key, NOT_THERE) for place, leaves in leaves_of.items()}
        is_text = any(what.startswith(TEXT_IS) for what in leaf.values())
        # of an array and none, and of something empty and nothing, the arrays tell
        is_alike = len({key in state.arrays for state in states.values()}) == 1 and NOT_THERE not in leaf.values()
        if len({*leaf.values()}) > 1 and (is_text or is_alike):
            found[IN_LIST.sub(r"\1_\2.", key)] = ", ".join(f"{what} in {place}" for place, what in leaf.items())
    return found


def _both_layer_by_layer(sides: Sequence[Side], sources: Sequence[HfCheckpoint | OrbaxCheckpoint]) -> tuple[Side, Side]:
    """Two sides of which both have an array for each layer where one has, and stack the others on one axis."""
    recorded = [scan_axis_of(source) if isinstance(source, OrbaxCheckpoint) else None for source in sources]
    (first, second), (axis, other_axis) = sides, recorded
    first, second = _layer_by_layer(first, second, axis), _layer_by_layer(second, first, other_axis)
    return first, _stacked_alike(second, first, other_axis, axis)


def _stacked_alike(side: Side, other: Side, recorded_axis: int | None, others_axis: int | None) -> Side:
    """A side whose stacked arrays have their layers on the axis on which the other side has them; both axes are as the
    records say, else those of MaxText's places that fit the most arrays.
    """
    keys = [key for key in side.keys() & other.keys() if STACKED.fullmatch(key)]

    def moved(axis: int, to: int) -> dict[str, Operand]:
        return {
            key: _moved(side[key], *(_stacked_at(key, each, len(side[key].shape) - 1) for each in (axis, to)))
            for key in keys
        }

    axes = (SCAN_AXES if each is None else (each,) for each in (recorded_axis, others_axis))
    tried = (moved(*pair) for pair in itertools.product(*axes))
    best = max(tried, key=lambda each: sum(stored.shape == other[key].shape for key, stored in each.items()))
    return {**side, **best}


def _moved(stored: Operand, axis: int, to: int) -> Operand:
    """An array with one of its axes at another place: (embed, layers, mlp), axis 1 to 0, is (layers, embed, mlp)."""
    if axis == to:
        return stored
    axes = [other for other in range(len(stored.shape)) if other != axis]
    axes.insert(to, axis)

    def there(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values[each] for each in axes)

    def fetch(box: Box) -> np.ndarray:
        return stored.read(tuple(box[axes.index(each)] for each in range(len(axes)))).transpose(axes)

    order = tuple(axes.index(each) for each in stored.order)
    return dataclasses.replace(stored, shape=there(stored.shape), order=order, grain=there(stored.grain), read=fetch)


def _layer_by_layer(side: Side, other: Side, recorded_axis: int | None) -> Side:
    """A side whose stacked arrays are seen as an array for each layer, where the other side has them so.

    `decoder.layers.mlp.wi_0.kernel` (embed, layers, mlp) is `decoder.layers_0.mlp.wi_0.kernel` (embed, mlp) and so on.
    Only what the other side has as many of as there are layers, each of the shape that is left, is taken apart.

    Args:
      recorded_axis: where the side's layers are stacked, as its record says; None for where the shapes of all its arrays
        allow.
    """
    cycles = _find_cycles(side)
    side = _renamed(side, other, cycles)
    layers = {key: names for key in side.keys() - other.keys() if (names := _layers(key, other, cycles))}
    fitting = {key: _stacking_axes(side[key], [other[name] for name in names]) for key, names in layers.items()}
    fitting = {key: axes for key, axes in fitting.items() if axes}
    settled = recorded_axis if recorded_axis is not None else _settled_axis(side, fitting)
    found: dict[str, Operand] = {}
    for key, stored in side.items():
        axes = fitting.get(key)
        if not axes:
            found[key] = stored
            continue
        usual = _stacked_at(key, settled, len(stored.shape) - 1)
        axis = usual if usual in axes else axes[-1]
        found |= {name: _layer(stored, axis, number) for number, name in enumerate(layers[key])}
    return found


def _layers(key: str, other: Side, cycles: Mapping[str, tuple[int, int]]) -> list[str]:
    """The arrays of a side that may be the layers of a stacked one, in their order.

    Of 8 layers in cycles of 3, `layers.layers_1.X` is `layers_1.X` and `layers_4.X`; what would be its third,
    `layers_7.X`, is `layers_remainder.layers_1.X`.
    """
    if match := CYCLE.fullmatch(key):
        (length, rest), place = cycles[match[1]], int(match[2])
        names = (f"{match[1]}_{i}.{match[3]}" for i in itertools.count(place, length))
        found = list(itertools.takewhile(other.__contains__, names))
        return found[:-1] if place < rest else found
    match = STACKED.fullmatch(key)
    names = (f"{match[1]}_{i}.{match[2]}" for i in itertools.count()) if match else ()
    return list(itertools.takewhile(other.__contains__, names))


def _find_cycles(side: Side) -> dict[str, tuple[int, int]]:
    """Where layers are stacked in cycles: how many a cycle has, and how many remain behind the last one."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for key in side:
        for number, form in enumerate((CYCLE, REMAINDER)):
            if match := form.fullmatch(key):
                found.setdefault(match[1], (set(), set()))[number].add(match[2])
    return {prefix: (len(cycle), len(rest)) for prefix, (cycle, rest) in found.items()}


def _renamed(side: Side, other: Side, cycles: Mapping[str, tuple[int, int]]) -> Side:
    """A side whose layers behind the last whole cycle are called as the other side calls them."""
    layers = {
        prefix: len({key.removeprefix(f"{prefix}_").partition(".")[0] for key in other if key.startswith(f"{prefix}_")})
        for prefix in cycles
    }

    def name(key: str) -> str:
        if not (match := REMAINDER.fullmatch(key)):
            return key
        _, rest = cycles[match[1]]
        there = f"{match[1]}_{layers[match[1]] - rest + int(match[2])}.{match[3]}"
        return there if there in other else key

    return {name(key): stored for key, stored in side.items()}


def _stacking_axes(stored: Operand, layers: Sequence[Operand]) -> list[int]:
    """The axes on which an array may hold these layers; several where sizes are equal."""
    axes = [axis for axis, size in enumerate(stored.shape) if size == len(layers)]
    return [axis for axis in axes if all(one.shape == stored.shape[:axis] + stored.shape[axis + 1 :] for one in layers)]


def _settled_axis(side: Side, fitting: Mapping[str, Sequence[int]]) -> int:
    """Where layers are stacked: the first of MaxText's places that is possible for the most arrays.

    Of 4 layers with 4 heads, a query (embed, layers, heads, head_dim) is (64, 4, 4, 16) and fits two; a kernel
    (embed, mlp, layers) is (64, 128, 4) and tells that it is axis 2.
    """

    def unfit(axis: int) -> int:
        return sum(_stacked_at(key, axis, len(side[key].shape) - 1) not in axes for key, axes in fitting.items())

    return min(SCAN_AXES, key=unfit)


def _stacked_at(key: str, scan_axis: int, rank: int) -> int:
    """The axis of an array's layers, which has `rank` axes without them: a module's variables have it first."""
    is_variable = key.startswith(f"{MODULES[0]}.") or (key.startswith(f"{PREFIX}.") and not key.startswith(PARAMETERS))
    return 0 if is_variable else min(scan_axis, rank)


def _layer(stored: Operand, axis: int, number: int) -> Operand:
    """One layer of a stacked array."""

    def without(values: Sequence[int]) -> tuple[int, ...]:
        return (*values[:axis], *values[axis + 1 :])

    def fetch(box: Box) -> np.ndarray:
        return stored.read((*box[:axis], (number, number + 1), *box[axis:])).squeeze(axis)

    order = tuple(other - (other > axis) for other in stored.order if other != axis)
    return dataclasses.replace(
        stored, shape=without(stored.shape), order=order, grain=without(stored.grain), read=fetch
    )


def _stored_dtype(array: Array, conversion: Conversion) -> np.dtype | None:
    """The coarsest dtype of the tensors that an array is made of; None where they hold codes, or no floats."""
    names = (name for part in array.parts for name in part.tensors)
    encodings = [conversion.encodings[name] for name in names if name in conversion.encodings]
    dtypes = {encoding.weight.dtype for encoding in encodings if encoding.label is None}
    return coarser(*dtypes)


def _converted(
    release: HfCheckpoint, items: Store, arrays: Side, maxtext_model: str | None, family: str | None
) -> tuple[Side, dict[str, str]]:
    """A release as the arrays that it would become in an Orbax checkpoint, and what is left out of them. Raises Refused
    where it can't be converted so.
    """
    try:
        given = {
            name: value for name, value in (("maxtext_model", maxtext_model), ("family", family)) if value is not None
        }
        options = options_made_with(items, open_arrays(items), options_of_export(release.root) | given, release.config)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise Refused(f"{items}: can't be read: {e}") from e
    options = dataclasses.replace(options, scan_layers=is_scanned(arrays))
    dtypes = Counter(stored.dtype.name for stored in arrays.values() if stored.dtype.name in COMPUTED)
    if dtypes:
        options = dataclasses.replace(options, save_dtype=dtypes.most_common(1)[0][0])
    conversion = plan_as(options, release, arrays)
    refuse(conversion.plan.problems, conversion.source)
    grids = {grid.spec.key: grid for grid in conversion.grids}

    def stored(array: Array) -> Operand:
        other = arrays.get(array.key)
        dtype = other.dtype if other and is_float(array.dtype) and other.dtype.name in COMPUTED else array.dtype
        made = dataclasses.replace(array, dtype=dtype)
        order = tuple(reversed(grids[array.key].growth))
        return Operand(
            array.shape,
            dtype,
            order,
            (1,) * len(array.shape),
            lambda box: make_boxes([(made, box)], conversion.encodings)[0][0],
            array.lossy,
            _stored_dtype(array, conversion),
        )

    return {array.key: stored(array) for array in conversion.plan.arrays}, dict(conversion.plan.dropped)
