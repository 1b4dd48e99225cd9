"""The layout that a checkpoint has, and what its family's table says of others."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from weightbeam.formats.orbax.source import OrbaxArray, OrbaxCheckpoint
from weightbeam.model_mappings.anatomy import EXPERT, layer_count
from weightbeam.model_mappings.cells import Part
from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.family import Family
from weightbeam.model_mappings.keeping import block_size, keep_arrays, maxtext_keys
from weightbeam.model_mappings.maxtext_config import MaxTextConfig
from weightbeam.model_mappings.naming import ModelNameError, ModelNaming, name_model
from weightbeam.model_mappings.plan import PARAMETERS, Problem, expand, key_of
from weightbeam.model_mappings.registry import UnknownFamilyError, family_of
from weightbeam.model_mappings.rules import PARAMS
from weightbeam.model_mappings.scales import ARRAY_SUFFIX
from weightbeam.model_mappings.spares import spares
from weightbeam.model_mappings.stacking import Moved, Path, Stacks, narrowed, unused
from weightbeam.model_mappings.trees import PIPELINE, VALUE, TreeError, has_scales, is_lora
from weightbeam.model_mappings.versions import NEWEST
from weightbeam.transforms.planning.layouts import SCAN_AXES, is_tower, layout_of, maxtext_of, version_of, version_said
from weightbeam.transforms.planning.old_tree import OldTree
from weightbeam.transforms.planning.tree_model import Model, NewTree, Stacking, Taken

Kind = TypeVar("Kind")


def unused_array(path: Path, message: str) -> Problem:
    return Problem("unused", ".".join(path), message, is_array=True)


def find_parts(
    source: OrbaxCheckpoint, model: Model, family_name: str | None, model_name: str | None
) -> tuple[dict[str, list[Part]], str]:
    """What the model's table makes each weight of, by MaxText's keys, in the layout that a checkpoint is in; or why
    nobody knows.
    """
    try:
        layouts = find_layouts(source, model, source.tree.weights, family_name, model_name)
    except TreeError as e:
        return {}, str(e)
    if isinstance(layouts, str):
        return {}, layouts
    if why := layouts.unsettled:
        return {}, why
    return {key_of(path): made for path, made in layouts.parts(layouts.own).items()}, ""


def find_layouts(
    source: OrbaxCheckpoint, model: Model, weights: Mapping[str, str], family_name: str | None, model_name: str | None
) -> TreeLayouts | str:
    """The layout that a checkpoint has, by its model's table, with no other wanted yet; or why nobody knows the table."""
    if not model.config:
        return (
            "nothing says which model it is; --like names a release of it, --maxtext_config a run's configuration, "
            "--maxtext_model one of MaxText's models"
        )
    held = {name: source.arrays[key] for name, key in weights.items()}
    config, own, fitting = Config(model.config), Stacking.of(source, weights), list[int]()
    try:
        family = family_of(config, model_name or model.name, family_name)
        naming = name_model(family, config, model_name or model.name)
        layout = layout_of(held, own.scan, naming.model, model.shapes)
        layout = dataclasses.replace(layout, maxtext=version_said(source))
        layout = dataclasses.replace(layout, maxtext=version_of(family, config, layout, held))
        if own.scan and own.axis is None:
            fitting = list(_fitting_axes(family, config, layout, held))
            own = Stacking(own.scan, next(iter(fitting), None))
        expand(family, config, layout)  # which it may not have, such as scanned where the cycles of layers aren't whole
        note = family.note(config, layout)
    except (ConfigError, UnknownFamilyError, ModelNameError) as e:
        return str(e)
    return TreeLayouts(held, model.of, family, config, naming, layout, note, own, fitting, own, layout.maxtext)


@dataclasses.dataclass(frozen=True)
class TreeLayouts:
    """The layout that a checkpoint has, the one that is wanted, and what its family's table says of both.

    Attributes:
      weights: by MaxText's keys.
      of: what says which model it is, for messages.
      family, config, naming, note: the table, the model, and what was inferred.
      layout: of the checkpoint, with the stacked axis left open.
      own: how its layers are stacked.
      fitting: the axes on which they may be, by the shapes, where the checkpoint doesn't say.
      wanted: how layers are to be stacked.
      version: the version of MaxText whose arrays are wanted.
      taken: the layers and experts that are wanted; None for all of them.
    """

    weights: Mapping[str, OrbaxArray]
    of: str
    family: Family
    config: Config
    naming: ModelNaming
    layout: Layout
    note: str
    own: Stacking
    fitting: Sequence[int]
    wanted: Stacking
    version: str
    taken: Taken | None = None

    # --- the layout that the checkpoint has

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Of each weight that is FP8 codes, rows and columns of a block, by its key."""
        return _block_sizes(self.weights)

    @property
    def unsettled(self) -> str:
        """Why it isn't known where the layers are stacked; empty if it is."""
        if self.own.scan and self.own.axis is None:
            first = f" (on axis 1: {misfit})" if (misfit := self.misfit()) else ""
            return f"the checkpoint's shapes aren't those of {self.of}, wherever the layers are stacked{first}"
        if len(self.fitting) > 1:
            choices = " or ".join(map(str, self.fitting))
            return f"its layers may be stacked on axis {choices}: the shapes fit both, and the checkpoint doesn't say"
        return ""

    def at(self, stacking: Stacking, version: str | None = None) -> Layout:
        """The layout with layers stacked so; in a version of MaxText, the source's if none is said."""
        axis = 1 if stacking.axis is None else stacking.axis
        version = version or self.layout.maxtext
        return dataclasses.replace(self.layout, scan=bool(stacking.scan), scan_axis=axis, maxtext=version)

    def expand(self, stacking: Stacking, version: str | None = None) -> dict[str, list[Part]]:
        """The parts of the table's arrays in a layout, as `at` takes it."""
        return expand(self.family, self.config, self.at(stacking, version))

    def parts(self, stacking: Stacking, version: str | None = None) -> dict[str, list[Part]]:
        """The same, those of the scales of FP8 codes among them."""
        return keep_arrays(self.expand(stacking, version), self.sizes)[0]

    def stacks(self, stacking: Stacking) -> Stacks:
        """The stacks of a layout."""
        layout = self.at(stacking)
        return Stacks.of(self.family.table(self.config, layout), layout.scan_axis)

    def misfit(self) -> str:
        """How the weights differ from what the table makes of the model's sizes; empty where they don't."""
        parts = self.parts(self.own)
        held = {key: stored.shape for key, stored in self.weights.items()}
        wanted = {
            key: same[0].shape
            for path, same in parts.items()
            if (key := key_of(path)) in held or not same[0].rule.spare
        }
        for key in sorted(held.keys() | wanted.keys()):
            if held.get(key) != wanted.get(key):
                name = key.removeprefix(PARAMETERS)
                if key not in held:
                    return f"{name} {wanted[key]} isn't among the weights"
                there = f"{wanted[key]} there" if key in wanted else "isn't there"
                return f"{name} is {held[key]} here, and {there}"
        return ""

    # --- the layout that is wanted

    @functools.cached_property
    def is_other(self) -> bool:
        """Whether layers are stacked otherwise in it, or there are others."""
        return self.taken is not None or self.wanted.is_other(self.own) or self.has_other_arrays

    @functools.cached_property
    def has_other_arrays(self) -> bool:
        """Whether the version that is wanted has other arrays than the source's."""
        if self.version == self.layout.maxtext:
            return False
        return self.expand(self.own).keys() != self.expand(self.own, self.version).keys()

    @functools.cached_property
    def new(self) -> tuple[Config, Layout]:
        """The new model's `config.json`, and the layout that is wanted of it."""
        layout = self.at(self.wanted, self.version)
        if self.taken is None:
            return self.config, layout
        config, layers = Config(self.taken.model.config), self.taken.layers
        mtp = layers is None or max(layers) >= layer_count(self.config)
        return config, dataclasses.replace(layout, shapes=self.taken.model.shapes, mtp=self.layout.mtp and mtp)

    @functools.cached_property
    def new_parts(self) -> dict[str, list[Part]]:
        """The parts of the new model's arrays, without scales, by their paths in the table."""
        return expand(self.family, *self.new)

    @property
    def why_none(self) -> str:
        """Why MaxText has no such layout of the model, such as layers that it can't scan; empty if it has."""
        try:
            _ = self.new_parts
        except ConfigError as e:
            return str(e)
        return ""

    @property
    def new_stacks(self) -> Stacks:
        """The new model's stacks, by the numbers of the old one's layers."""
        config, layout = self.new
        stacks = self.family.table(config, layout)
        return Stacks.of(map(self.taken.renamed, stacks) if self.taken else stacks, layout.scan_axis)

    def repeats(self) -> dict[Path, Path]:
        """The variables of the new layout, each with the parameter that repeats it, by their paths."""
        if not self.family.earlier:
            return {}
        config, layout = self.new
        found = spares(expand(self.family, config, dataclasses.replace(layout, maxtext=NEWEST)))
        return {(PARAMS, *one.split("/")): (PARAMS, *other.split("/")) for one, other in found.items()}

    def lacks_repeats(self) -> bool:
        """Whether the checkpoint has one of a variable and its parameter where the version that is wanted has both, or
        the other way round.
        """
        wanted = self.expand(self.own, self.version)
        own = spares(self.expand(self.own, NEWEST))
        pairs = [pair for pair in own.items() if any(key_of(path) in self.weights for path in pair)]
        return any((key_of(path) in self.weights) != (path in wanted) for pair in pairs for path in pair)

    def check(self, old: OldTree, asked: Stacking, is_moving: bool) -> list[Problem]:
        """What stands against the layout and the version that are wanted; `asked` is what the user said of layers."""
        problems = []
        if is_moving and (why := self._why_not(asked)):
            problems.append(Problem("option", moving_option(self.taken, self.own, self.wanted), why))
        if self.has_other_arrays and not old.is_bare:
            message = f"a training state goes on in the MaxText that wrote it, {self.layout.maxtext}; --state params takes the weights"
            problems.append(Problem("option", "--maxtext", message))
        if not is_moving and asked != Stacking(None, None):
            problems += self._still_stacked(old)
        return problems

    def _why_not(self, asked: Stacking) -> str:
        """Why layers can't be moved; empty if they can."""
        if any("pipeline_module" in key.split(".") for key in self.weights):
            return PIPELINE
        if why := self.unsettled:
            return why
        if asked.scan is not None and ("scanned" if asked.scan else "unscanned") not in self.family.layouts:
            return f"MaxText has {self.family.name} models {' and '.join(self.family.layouts)} only"
        return ""

    def _still_stacked(self, old: OldTree) -> list[Problem]:
        """The weights that are stacked in a tree that counts as unscanned, since others of its layers stand apart."""
        if self.own.scan is not False or "scanned" not in self.family.layouts:
            return []
        try:
            scanned = self.stacks(Stacking(True, self.own.axis))
        except ConfigError:  # MaxText can't scan a model with so many layers
            return []
        unscanned = self.stacks(Stacking(False, None))
        keys = {stored.key for stored in self.weights.values()}
        paths = [path for path, held in old.arrays.items() if held.key in keys]
        message = "it is stacked, though other layers of the checkpoint stand apart; leave the layout as it is, or make the tree anew"
        return [unused_array(path, message) for path in paths if scanned.find(path) and not unscanned.find(path)]

    def amiss(self, moved: Sequence[Moved]) -> list[Problem]:
        """How the new arrays differ from those of the version that is wanted, where it has others than the source's."""
        if not self.has_other_arrays:
            return []
        wanted = {key_of(path) for path in self.new_parts}
        held = {".".join(one.path): one for one in moved if one.path[0] == PARAMS}
        missing = f"MaxText {self.version} has it, and {self.layout.maxtext} doesn't: weightbeam convert makes it of the release"
        unknown = f"MaxText {self.version} has no such array; weightbeam convert makes its tree of the release"
        lost = [Problem("missing", key, missing, is_array=True) for key in sorted(wanted - held.keys())]
        return lost + [unused_array(held[key].path, unknown) for key in sorted(held.keys() - wanted)]

    def with_experts(self, moved: Sequence[Moved]) -> tuple[list[Moved], list[Problem]]:
        """The arrays with the experts that are taken alone, and those of which nobody knows what is of which expert."""
        if self.taken is None or self.taken.experts is None:
            return [*moved], []
        parts = {_below(path): same[0] for path, same in self.new_parts.items()}
        made, problems = [], []
        for one in moved:
            part = at_end(one.path, parts) or at_end(_codes(one.path), parts)
            if part is None or EXPERT not in itertools.chain(*part.rule.axes.right):
                made.append(one)
            elif (place := part.axis_with(EXPERT)) and len(one.part.shape) == len(part.shape):
                made.append(narrowed(one, place[0], _times(self.taken.experts, place[1])))
            else:
                why = "nothing says what of it is of which expert; --state params takes the weights alone"
                problems.append(unused_array(one.path, why))
        return made, problems

    def left_out(self, old: OldTree, moved: Sequence[Moved]) -> dict[str, str]:
        """The keys of a layer's arrays that nothing is made of, with the reason: only where layers are taken."""
        taken = set((self.taken.layers if self.taken else None) or ())
        stacks, arrays = self.stacks(self.own), old.arrays
        left = {}
        for path in unused(arrays, moved):
            if at := stacks.find(path):
                layers = {layer for _, layer in stacks.by_target[at[1]].places}
                if not layers:
                    left[arrays[path].key] = "of places without a layer"
                elif taken and not taken & layers and not is_tower("/".join(at[1])):
                    left[arrays[path].key] = "of layers that aren't taken"
        return left

    def maxtext(self) -> MaxTextConfig | None:
        """What MaxText must be told of the layout that is wanted; None where `config.json` doesn't say it all."""
        config, naming = self.config, self.naming
        if self.taken:
            config = Config(self.taken.model.config)
            naming = name_model(self.family, config, self.naming.model)
        made = maxtext_of(self.family, config, self.at(self.wanted), naming)[0]
        if not made or not self.sizes:
            return made
        return made.with_keys(maxtext_keys(self.parts(self.wanted), max(self.sizes.values())))

    def describe(self, tree: NewTree) -> NewTree:
        """A tree with what is known of its model."""
        said = dict(family=self.family.name, note=self.note, version=self.version)
        if not is_lora(self.weights) and (misfit := self.misfit()):
            return dataclasses.replace(tree, misfit=misfit, **said)
        return dataclasses.replace(tree, maxtext=self.maxtext(), model=self.naming.model, **said)

    def names(self) -> dict[Path, tuple[str | None, ...]]:
        """The logical names of arrays in the layout that is wanted, by their paths below `params.params`, or `params` where
        they are of another collection.
        """
        parts = keep_arrays(self.new_parts, self.sizes)[0]
        return {_below(path): same[0].logical_axes for path, same in parts.items()}


def moving_option(taken: Taken | None, own: Stacking, wanted: Stacking) -> str:
    """The option that asks for arrays elsewhere, for messages."""
    if taken:
        return taken.option
    return "--scan_layers" if wanted.scan != own.scan else "--param_scan_axis"


def _block_sizes(weights: Mapping[str, OrbaxArray]) -> dict[str, int]:
    """Of each weight that is FP8 codes, rows and columns of a block, by its key."""
    scaled = {key.removesuffix(ARRAY_SUFFIX): array for key, array in weights.items() if has_scales([key])}
    return {key: block_size(weights[key].shape, scale.shape) for key, scale in scaled.items() if key in weights}


def _fitting_axes(family: Family, config: Config, layout: Layout, weights: Mapping[str, OrbaxArray]) -> Iterator[int]:
    """The axes on which the layers may be stacked, by the shapes of the weights; of those that come to the same only
    the first.
    """
    seen = []
    for axis in SCAN_AXES:
        made = expand(family, config, dataclasses.replace(layout, scan_axis=axis))
        parts = {key_of(path): same[0] for path, same in keep_arrays(made, _block_sizes(weights))[0].items()}
        places = {key: part.target_axes for key, part in parts.items()}
        fits = all(key in parts and parts[key].shape == stored.shape for key, stored in weights.items())
        if fits and places not in seen:
            seen.append(places)
            yield axis


def _below(path: str) -> Path:
    """The path of a table's array, below the root that repeats it."""
    return tuple(path.removeprefix(f"{PARAMS}/").split("/"))


def _times(indices: range, size: int) -> range:
    """The elements of indices that have so many each."""
    return range(indices.start * size, indices.stop * size)


def _codes(path: Path) -> Path:
    """The path of the codes of which an array may hold the scales."""
    return (*path[:-1], path[-1].removesuffix(ARRAY_SUFFIX))


def at_end(path: Path, found: Mapping[Path, Kind]) -> Kind | None:
    """What is known of the weight that a path ends with."""
    path = path[:-1] if path[-1:] == (VALUE,) else path
    return next((found[path[start:]] for start in range(len(path)) if path[start:] in found), None)
