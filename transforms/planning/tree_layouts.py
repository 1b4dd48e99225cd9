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
from weightbeam.model_mappings.naming import ModelNameError, name_model
from weightbeam.model_mappings.plan import PARAMETERS, Problem, expand, key_of
from weightbeam.model_mappings.registry import UnknownFamilyError, family_of
from weightbeam.model_mappings.rules import PARAMS
from weightbeam.model_mappings.scales import ARRAY_SUFFIX
from weightbeam.model_mappings.spares import spares
from weightbeam.model_mappings.stacking import Moved, Path, Stacks, narrowed, unused
from weightbeam.model_mappings.trees import PIPELINE, VALUE, TreeError, has_scales
from weightbeam.model_mappings.versions import NEWEST
from weightbeam.transforms.planning.layouts import (
    SCAN_AXES,
    is_tower,
    layout_of,
    maxtext_of,
    scan_axis_of,
    scan_of,
    version_of,
    version_said,
)
from weightbeam.transforms.planning.old_tree import OldTree
from weightbeam.transforms.planning.tree_model import Model, NewTree, Taken

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
        layouts = TreeLayouts(source, model, source.tree.weights, family_name, model_name)
    except TreeError as e:
        return {}, str(e)
    if layouts.family is None:
        return {}, layouts.reason
    if why := layouts.unsettled:
        return {}, layouts.reason or why
    return {key_of(path): made for path, made in layouts.parts(layouts.scan, layouts.axis).items()}, ""


class TreeLayouts:
    """The layout that a checkpoint has, and what its family's table says of others."""

    def __init__(
        self,
        source: OrbaxCheckpoint,
        model: Model,
        weights: Mapping[str, str],
        family_name: str | None,
        model_name: str | None,
        taken: Taken | None = None,
        version: str | None = None,
    ):
        self.taken, self.version = taken, version
        self.source, self.weights = source, {name: source.arrays[key] for name, key in weights.items()}
        self.sizes = _block_sizes(self.weights)
        self.family: Family | None = None
        self.reason, self.note = "", ""
        self.of = model.of
        like = model.of.partition("=")[0] if model.of.startswith("--") else ""
        self.named_by = "--maxtext_model" if model_name else "--family" if family_name else like
        self.scan = scan_of(source, weights)
        self.axis = scan_axis_of(source)
        self.ambiguous: Sequence[int] = ()
        if not model.config:
            self.reason = (
                "nothing says which model it is; --like names a release of it, --maxtext_config a run's configuration, "
                "--maxtext_model one of MaxText's models"
            )
            return
        self.config = Config(model.config)
        try:
            family = family_of(self.config, model_name or model.name, family_name)
            self.naming = name_model(family, self.config, model_name or model.name)
            layout = layout_of(self.weights, self.scan, self.naming.model, model.shapes)
            layout = dataclasses.replace(layout, maxtext=version_said(source))
            self.layout = dataclasses.replace(layout, maxtext=version_of(family, self.config, layout, self.weights))
            if self.scan and self.axis is None:
                fitting = list(_fitting_axes(family, self.config, self.layout, self.weights))
                self.axis = fitting[0] if fitting else None
                self.ambiguous = fitting if len(fitting) > 1 else ()
            self.version = version or self.layout.maxtext
            self.family, self.note = family, family.note(self.config, self.layout)
        except (ConfigError, UnknownFamilyError, ModelNameError) as e:
            self.reason = str(e)

    def is_other(self, scan: bool | None, axis: int | None) -> bool:
        """Whether layers are stacked otherwise in a layout, or there are others."""
        is_elsewhere = self.taken is not None or scan != self.scan or (bool(scan) and axis != self.axis)
        return is_elsewhere or self.has_other_arrays

    @functools.cached_property
    def has_other_arrays(self) -> bool:
        """Whether the version that is wanted has other arrays than the source's."""
        if self.family is None or self.version == self.layout.maxtext:
            return False
        here = self.at(self.scan, self.axis)
        there = dataclasses.replace(here, maxtext=str(self.version))
        return expand(self.family, self.config, here).keys() != expand(self.family, self.config, there).keys()

    def repeats(self, scan: bool | None, axis: int | None) -> dict[Path, Path]:
        """The variables of a new layout, each with the parameter that repeats it, by their paths."""
        if self.family is None or not self.family.earlier:
            return {}
        config, layout = self.new(scan, axis)
        found = spares(expand(self.family, config, dataclasses.replace(layout, maxtext=NEWEST)))
        return {(PARAMS, *one.split("/")): (PARAMS, *other.split("/")) for one, other in found.items()}

    def has(self, scan: bool | None, axis: int | None) -> set[Path]:
        """The arrays that a new layout has, by their paths."""
        return (
            {(PARAMS, *path.split("/")) for path in expand(self.family, *self.new(scan, axis))}
            if self.family
            else set()
        )

    def lacks(self, repeats: Mapping[Path, Path]) -> bool:
        """Whether the checkpoint has one of a variable and its parameter where the version that is wanted has both, or
        the other way round.
        """
        if not repeats:
            return False
        assert self.family is not None
        layout = dataclasses.replace(self.at(self.scan, self.axis), maxtext=str(self.version))
        wanted = expand(self.family, self.config, layout)
        pairs = [pair for pair in self._own_repeats.items() if any(key_of(path) in self.weights for path in pair)]
        return any((key_of(path) in self.weights) != (path in wanted) for pair in pairs for path in pair)

    @property
    def _own_repeats(self) -> dict[str, str]:
        """As `repeats` has it, of the layout that the checkpoint has."""
        assert self.family is not None
        layout = dataclasses.replace(self.at(self.scan, self.axis), maxtext=NEWEST)
        return spares(expand(self.family, self.config, layout))

    def check_version(self, old: OldTree) -> list[Problem]:
        """What stands against the version that is wanted."""
        if self.version and self.family is None:
            return [
                Problem("option", "--maxtext", f"which arrays it has follows from the model's table, but {self.reason}")
            ]
        if self.has_other_arrays and not old.is_bare:
            message = f"a training state goes on in the MaxText that wrote it, {self.layout.maxtext}; --state params takes the weights"
            return [Problem("option", "--maxtext", message)]
        return []

    def amiss(self, moved: Sequence[Moved], scan: bool | None, axis: int | None) -> list[Problem]:
        """How the new arrays differ from those of the version that is wanted, where it has others than the source's."""
        if not self.has_other_arrays:
            return []
        assert self.family is not None
        config, layout = self.new(scan, axis)
        wanted = {key_of(path): made for path, made in expand(self.family, config, layout).items()}
        held = {".".join(one.path): one for one in moved if one.path[0] == PARAMS}
        missing = f"MaxText {self.version} has it, and {self.layout.maxtext} doesn't: weightbeam convert makes it of the release"
        unknown = f"MaxText {self.version} has no such array; weightbeam convert makes its tree of the release"
        lost = [Problem("missing", key, missing, is_array=True) for key in sorted(wanted.keys() - held.keys())]
        return lost + [unused_array(held[key].path, unknown) for key in sorted(held.keys() - wanted.keys())]

    def check(self, scan: bool | None, is_moving: bool) -> list[Problem]:
        """What stands against the layout that is wanted, and against the model that the user named."""
        if self.named_by and self.reason:
            return [Problem("option", self.named_by, self.reason)]
        option = "--scan_layers" if scan is not None and scan != self.scan else "--param_scan_axis"
        option = self.taken.option if self.taken else option
        if is_moving and self.family is None:
            return [
                Problem(
                    "option", option, f"where the layers' arrays go follows from the model's table, but {self.reason}"
                )
            ]
        if is_moving and any("pipeline_module" in key.split(".") for key in self.weights):
            return [Problem("option", option, PIPELINE)]
        if is_moving and self.unsettled:
            return [Problem("option", option, self.unsettled)]
        wanted = "scanned" if scan else "unscanned"
        if is_moving and scan is not None and self.family and wanted not in self.family.layouts:
            return [
                Problem(
                    "option", option, f"MaxText has {self.family.name} models {' and '.join(self.family.layouts)} only"
                )
            ]
        return []

    def still_stacked(self, old: OldTree) -> list[Problem]:
        """The weights that are stacked in a tree that counts as unscanned, since others of its layers stand apart."""
        if self.scan is not False or self.family is None or "scanned" not in self.family.layouts:
            return []
        scanned, unscanned = self.stacks(True, self.axis), self.stacks(False, None)
        keys = {stored.key for stored in self.weights.values()}
        paths = [path for path, held in old.arrays.items() if held.key in keys]
        message = "it is stacked, though other layers of the checkpoint stand apart; leave the layout as it is, or make the tree anew"
        return [unused_array(path, message) for path in paths if scanned.find(path) and not unscanned.find(path)]

    @property
    def unsettled(self) -> str:
        """Why it isn't known where the layers are stacked; empty if it is."""
        if self.scan and self.axis is None:
            first = f" (on axis 1: {misfit})" if (misfit := self.misfit()) else ""
            return f"the checkpoint's shapes aren't those of {self.of}, wherever the layers are stacked{first}"
        if self.ambiguous:
            choices = " or ".join(map(str, self.ambiguous))
            return f"its layers may be stacked on axis {choices}: the shapes fit both, and the checkpoint doesn't say"
        return ""

    def at(self, scan: bool | None, axis: int | None) -> Layout:
        """The layout with layers stacked so."""
        return dataclasses.replace(self.layout, scan=bool(scan), scan_axis=1 if axis is None else axis)

    def stacks(self, scan: bool | None, axis: int | None) -> Stacks:
        """The stacks of a layout."""
        assert self.family is not None
        layout = self.at(scan, axis)
        return Stacks.of(self.family.table(self.config, layout), layout.scan_axis)

    def new(self, scan: bool | None, axis: int | None) -> tuple[Config, Layout]:
        """The new model's `config.json`, and the layout that is wanted of it, with layers stacked so."""
        layout = dataclasses.replace(self.at(scan, axis), maxtext=self.version or self.layout.maxtext)
        if self.taken is None:
            return self.config, layout
        config, layers = Config(self.taken.model.config), self.taken.layers
        mtp = layers is None or max(layers) >= layer_count(self.config)
        return config, dataclasses.replace(layout, shapes=self.taken.model.shapes, mtp=self.layout.mtp and mtp)

    def new_stacks(self, scan: bool | None, axis: int | None) -> Stacks:
        """The stacks of a layout of the new model, by the numbers of the old one's layers."""
        assert self.family is not None
        config, layout = self.new(scan, axis)
        stacks = self.family.table(config, layout)
        return Stacks.of(map(self.taken.renamed, stacks) if self.taken else stacks, layout.scan_axis)

    def with_experts(
        self, moved: Sequence[Moved], scan: bool | None, axis: int | None
    ) -> tuple[list[Moved], list[Problem]]:
        """The arrays with the experts that are taken alone, and those of which nobody knows what is of which expert."""
        if self.family is None or self.taken is None or self.taken.experts is None:
            return [*moved], []
        parts = {_below(path): same[0] for path, same in expand(self.family, *self.new(scan, axis)).items()}
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
        stacks, arrays = self.stacks(self.scan, self.axis), old.arrays
        left = {}
        for path in unused(arrays, moved):
            if at := stacks.find(path):
                layers = {layer for _, layer in stacks.by_target[at[1]].places}
                if not layers:
                    left[arrays[path].key] = "of places without a layer"
                elif taken and not taken & layers and not is_tower("/".join(at[1])):
                    left[arrays[path].key] = "of layers that aren't taken"
        return left

    def parts(self, scan: bool | None, axis: int | None, version: str | None = None) -> dict[str, list[Part]]:
        """The parts of the table's arrays in a layout, those of the scales of FP8 codes among them; in that of the
        source's version of MaxText, if none is said.
        """
        assert self.family is not None
        layout = dataclasses.replace(self.at(scan, axis), maxtext=version or self.layout.maxtext)
        return keep_arrays(expand(self.family, self.config, layout), self.sizes)[0]

    def misfit(self) -> str:
        """How the weights differ from what the table makes of the model's sizes; empty where they don't, or there is no
        table.
        """
        if self.family is None:
            return ""
        parts = self.parts(self.scan, self.axis)
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
                return f"{name} is {held[key]} here, and " + (
                    f"{wanted[key]} there" if key in wanted else "isn't there"
                )
        return ""

    def maxtext(self, scan: bool | None, axis: int | None) -> MaxTextConfig | None:
        """What MaxText must be told of a layout; None where `config.json` doesn't say it all."""
        assert self.family is not None
        config, naming = self.config, self.naming
        if self.taken:
            config = Config(self.taken.model.config)
            naming = name_model(self.family, config, self.naming.model)
        made = maxtext_of(self.family, config, self.at(scan, axis), naming)[0]
        if not made or not self.sizes:
            return made
        return made.told(maxtext_keys(self.parts(scan, axis), max(self.sizes.values())))

    def describe(self, tree: NewTree) -> NewTree:
        """A tree with what is known of its model."""
        roots = f"{PARAMETERS}decoder.", f"{PARAMETERS}token_embedder."
        tree = dataclasses.replace(tree, is_maxtext=any(key.startswith(roots) for key in self.weights))
        if self.family is None:
            return tree
        said = dict(family=self.family.name, note=self.note, version=self.version)
        tree = dataclasses.replace(tree, misfit=self.misfit(), **said)
        if tree.misfit:
            return tree
        maxtext = self.maxtext(tree.scan, tree.scan_axis)
        return dataclasses.replace(tree, maxtext=maxtext, model=self.naming.model)

    def names(self, scan: bool | None, axis: int | None) -> dict[Path, tuple[str | None, ...]]:
        """The logical names of arrays in a layout, by their paths below `params.params`, or `params` where they are of another
        collection.
        """
        if self.family is not None:
            return {_below(path): parts[0].logical_axes for path, parts in self.parts(scan, axis, self.version).items()}
        axes = self.source.record.get("axes")
        if not isinstance(axes, dict):
            return {}
        return {
            tuple(key.removeprefix(PARAMETERS).split(".")): tuple(names)
            for key, names in axes.items()
            if isinstance(names, list)
        }


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
        parts = {
            key_of(path): same[0]
            for path, same in keep_arrays(
                expand(family, config, dataclasses.replace(layout, scan_axis=axis)), _block_sizes(weights)
            )[0].items()
        }
        places = {key: part.target_axes for key, part in parts.items()}
        if (
            all(key in parts and parts[key].shape == stored.shape for key, stored in weights.items())
            and places not in seen
        ):
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
