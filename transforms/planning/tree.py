"""The tree of a new checkpoint: which arrays it has, what each is made of, and what it is to a training state."""

from __future__ import annotations

import base64
import dataclasses
import functools
import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from weightbeam.formats.orbax import TEXT, leaves
from weightbeam.formats.orbax.source import OrbaxArray, OrbaxCheckpoint
from weightbeam.model_mappings.anatomy import EXPERT, layer_count
from weightbeam.model_mappings.cells import Part
from weightbeam.model_mappings.config import MAX_COUNT, Config, ConfigError, Layout
from weightbeam.model_mappings.cut import Cut, numbers, spans, spelled
from weightbeam.model_mappings.family import Family
from weightbeam.model_mappings.keeping import block_size, keep_arrays, maxtext_keys
from weightbeam.model_mappings.maxtext_config import MaxTextConfig
from weightbeam.model_mappings.naming import ModelNameError, name_model
from weightbeam.model_mappings.plan import PARAMETERS, Problem, expand, is_float, key_of
from weightbeam.model_mappings.registry import UnknownFamilyError, family_of
from weightbeam.model_mappings.rules import ABSENT, PARAMS, Stack
from weightbeam.model_mappings.scales import ARRAY_SUFFIX
from weightbeam.model_mappings.spares import spares
from weightbeam.model_mappings.stacking import (
    Copy,
    Held,
    Moved,
    Path,
    RestackError,
    Stacks,
    elsewhere,
    narrowed,
    restack,
    same,
    unused,
)
from weightbeam.model_mappings.trees import VALUE, TreeError, has_scales
from weightbeam.model_mappings.versions import NEWEST
from weightbeam.transforms.planning.layouts import (
    SCAN_AXES,
    layout_of,
    maxtext_of,
    scan_axis_of,
    scan_of,
    version_of,
    version_said,
)

OPTIMIZERS = ("opt_state", "optimizer", "optimizer_state", "outer_opt_state")
DICT = 2  # Orbax's number for the key of a dict
Kind = TypeVar("Kind")


@dataclasses.dataclass(frozen=True)
class Model:
    """What is known of a checkpoint's model.

    Attributes:
      config: `config.json`; empty where nobody knows.
      shapes: of the release's tensors, by name.
      name: MaxText's, where it was said.
      remembered: what a record should say of the release, where it is new.
      files: the step's small files.
      of: what says all this, for messages.
    """

    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    name: str | None = None
    remembered: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    of: str = "its config.json"

    def stage(self) -> dict[str, Any]:
        """As JSON."""
        return vars(self) | {"files": {name: base64.b64encode(data).decode() for name, data in self.files.items()}}

    @classmethod
    def load(cls, staged: Mapping[str, Any]) -> Model:
        """What `stage` staged."""
        shapes = {name: tuple(shape) for name, shape in staged["shapes"].items()}
        return cls(
            **{
                **staged,
                "shapes": shapes,
                "files": {name: base64.b64decode(data) for name, data in staged["files"].items()},
            }
        )


@dataclasses.dataclass(frozen=True)
class Taken:
    """Some layers and experts of a model.

    Attributes:
      model: what is known of the model that they make.
      layers: those of the whole model, in the order of their new numbers; prediction layers are the last. None for all.
      experts: those of each layer; None for all.
    """

    model: Model
    layers: tuple[int, ...] | None = None
    experts: range | None = None

    @property
    def option(self) -> str:
        """The option that asks for them, for messages."""
        return "--experts" if self.layers is None else "--layers"

    def of_release(self, before: Cut) -> dict[str, str]:
        """The same as options, by the numbers of the release of which the checkpoint's own are these."""
        found: dict[str, str] = {}
        if self.layers is not None:
            whole = numbers(before.layers, MAX_COUNT["num_hidden_layers"]) if before.layers else None
            found["layers"] = spelled(spans(",".join(str(whole[layer] if whole else layer) for layer in self.layers)))
        if self.experts is not None:
            first = spans(before.experts)[0][0] if before.experts else 0
            found["experts"] = spelled(((first + self.experts.start, first + self.experts.stop),))
        return found

    def renamed(self, stack: Stack) -> Stack:
        """A stack of the new model by the whole one's numbers."""
        if self.layers is None or "{layer}" not in stack.source:
            return stack
        whole = np.array([*self.layers, ABSENT])  # a place without a layer stays one: ABSENT is the last
        return dataclasses.replace(stack, layers=whole[stack.layers])


@dataclasses.dataclass(frozen=True)
class Kept:
    """An array of the new checkpoint.

    Attributes:
      key: Orbax's dotted key.
      role: weight, moment (an array of the optimizer that has its weight's shape), or other.
      names: MaxText's logical names of the axes; none where nobody knows them.
      part: what it is made of.
    """

    key: str
    role: str
    names: tuple[str | None, ...]
    part: Copy


@dataclasses.dataclass(frozen=True)
class NewTree:
    """The new tree.

    Attributes:
      arrays: in the order of the old tree.
      metadata: `tree_metadata` of Orbax: each leaf, with the kinds of its keys.
      kind: what wrote the old one.
      scan, scan_axis: whether layers are stacked, and where; None where nobody knows.
      family, note: the table that was used, and what was inferred; empty without one.
      left_out: arrays of the old tree, with the reason.
      maxtext: what MaxText must be told of the weights; None where nobody knows, or they aren't the model's.
      is_moved: whether layers are stacked otherwise than before.
      misfit: how the weights differ from what is said to be their model; empty where they don't.
      is_maxtext: whether the weights are of one of MaxText's models.
      model: MaxText's model that has these sizes, or that was named; None where nobody knows.
      version: the version of MaxText that has such arrays; None where nobody knows.
    """

    arrays: tuple[Kept, ...] = ()
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    kind: str = ""
    scan: bool | None = None
    scan_axis: int | None = None
    family: str = ""
    note: str = ""
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    maxtext: MaxTextConfig | None = None
    is_moved: bool = False
    misfit: str = ""
    is_maxtext: bool = False
    model: str | None = None
    version: str | None = None


def make_tree(
    source: OrbaxCheckpoint,
    model: Model,
    params_only: bool,
    scan: bool | None,
    scan_axis: int | None,
    family_name: str | None,
    model_name: str | None,
    taken: Taken | None = None,
    version: str | None = None,
) -> tuple[NewTree, list[Problem]]:
    """The new tree, and what stands against it.

    A checkpoint of training whose 32 layers are taken apart, `scan` False; of each kind of array one:

        old tree    params.params.decoder.layers       opt_state.0.mu.params.decoder.layers       step
                      .mlp.wi_0.kernel                   .mlp.wi_0.kernel
                      (embed, layers, mlp)               (embed, layers, mlp)                     ()
        moved       … .layers_7.mlp.wi_0.kernel        … .layers_7.mlp.wi_0.kernel                step
                      [:, 7] of it, and 31 more          [:, 7] of it, and 31 more                as it is
        role        weight                             moment                                     other
        names       (embed, mlp)                       (embed, mlp)                               ()

    With `params_only` the first column is the tree, and the others are left out. Where layers stay as they are, every
    array is as it is.

    Args:
      source: the old checkpoint.
      model: what is known of its model.
      params_only: the weights alone, below `params.params`, whatever the old tree calls them.
      scan, scan_axis: the layout that is wanted; None for what the source has.
      family_name, model_name: the table that the user named, and MaxText's model.
      taken: the layers and experts that are wanted; None for all of them.
      version: the version of MaxText whose arrays are wanted; None for that of the source.
    """
    try:
        old = _Old.of(source, params_only)
    except TreeError as e:
        return NewTree(), [Problem("tree", source.root, f"{e}; --state full keeps it as it is", is_array=True)]
    layouts = _Layouts(source, model, old.weights, family_name, model_name, taken, version)
    wanted = layouts.scan if scan is None else scan, layouts.axis if scan_axis is None else scan_axis
    repeats = layouts.repeats(*wanted) if old.is_bare else {}
    is_moving = layouts.is_other(*wanted) or layouts.lacks(repeats)
    if problems := [*layouts.check(scan, is_moving), *layouts.check_version(old)]:
        return NewTree(kind=old.kind), problems
    names = layouts.names(*wanted)
    try:
        moved, bare, problems = _move(old, layouts, wanted) if is_moving else _stay(old)
    except RestackError as e:
        return NewTree(kind=old.kind), [_unused(fault.path, str(fault)) for fault in e.faults]
    repeated: dict[str, str] = {}
    if is_moving and repeats:
        moved, repeated = _repeat(moved, repeats, layouts.version, layouts.at(*wanted).scan_axis)
    moved, unknown = layouts.with_experts(moved, *wanted)
    problems += [*unknown, *layouts.amiss(moved, *wanted)]
    arrays = tuple(_keep(old, one, names) for one in moved)
    metadata = {} if params_only else _metadata(source, {one.path: one.like for one in moved}, bare)
    left_out = old.left_out | repeated | (layouts.left_out(old, moved) if taken else {})
    tree = NewTree(arrays, metadata, old.kind, *wanted, left_out=left_out, is_moved=is_moving)
    return layouts.describe(tree), problems


@dataclasses.dataclass(frozen=True)
class _Old:
    """The old tree, and how much of it is taken.

    Attributes:
      source, params_only: as of `make_tree`.
      weights: the keys of the weights, by MaxText's; empty where nobody knows which arrays they are.
      kind: what wrote the tree.
    """

    source: OrbaxCheckpoint
    params_only: bool
    weights: Mapping[str, str]
    kind: str

    @classmethod
    def of(cls, source: OrbaxCheckpoint, params_only: bool) -> _Old:
        """The tree of a checkpoint.

        Raises:
          TreeError: only the weights are wanted, and nobody knows which arrays they are.
        """
        try:
            return cls(source, params_only, source.tree.weights, source.tree.kind)
        except TreeError:
            if params_only:
                raise
            return cls(source, params_only, {}, "a tree of its own")

    @functools.cached_property
    def paths(self) -> dict[str, Path]:
        """The path of every array, by its key."""
        return {".".join(path): path for path in leaves(self.source.metadata)}

    @functools.cached_property
    def is_weight(self) -> Container[str]:
        """The keys of the weights; where nobody knows them, of all that doesn't seem to be anything else."""
        others = (*OPTIMIZERS, "nnx_aux", "step")
        return set(self.weights.values()) or {key for key, path in self.paths.items() if path[0] not in others}

    @property
    def arrays(self) -> dict[Path, Held]:
        """The arrays that are taken."""
        held = {key: Held(key, array.shape) for key, array in self.source.arrays.items()}
        if self.params_only:
            return {tuple(name.split(".")): held[key] for name, key in self.weights.items()}
        return {path: held[key] for key, path in self.paths.items()}

    @property
    def is_bare(self) -> bool:
        """Whether what is taken is weights alone, below MaxText's own names, and the number of a step."""
        return self.params_only or {path[0] for path in self.paths.values()} <= {PARAMS, "step"}

    @property
    def empty(self) -> list[Path]:
        """The leaves without an array that are taken: None, empty dicts, texts."""
        found = []
        for entry in () if self.params_only else self.source.metadata["tree_metadata"].values():
            about = entry["value_metadata"]
            if about.get("skip_deserialize") or about.get("value_type") == TEXT:
                found.append(tuple(str(key["key"]) for key in entry["key_metadata"]))
        return found

    @property
    def left_out(self) -> dict[str, str]:
        """The keys of the arrays that aren't taken, with the reason."""
        if not self.params_only:
            return {}
        return {key: "not a weight (--state params)" for key in self.paths if key not in self.is_weight}

    def role(self, key: str, shape: tuple[int, ...]) -> str:
        """What a new array of this shape, made of the array `key`, is to a training state."""
        if key in self.is_weight:
            return "weight"
        is_moment = self.paths[key][0] in OPTIMIZERS and shape != () and is_float(self.source.arrays[key].dtype)
        return "moment" if is_moment else "other"


def _stay(old: _Old) -> tuple[list[Moved], dict[Path, Path], list[Problem]]:
    """Every array as it is, the paths of the leaves without one, and no problems."""
    moved = [Moved(path, path, same(*held)) for path, held in old.arrays.items()]
    return moved, {path: path for path in old.empty}, []


def _move(
    old: _Old, layouts: _Layouts, wanted: tuple[bool | None, int | None]
) -> tuple[list[Moved], dict[Path, Path], list[Problem]]:
    """The arrays in the layout that is wanted, the new paths of the leaves without one, each with its old path, and
    the arrays of which no rule says what becomes of them.

    Raises:
      RestackError: arrays aren't stacked as the layout says.
    """
    arrays, before, after = old.arrays, layouts.stacks(layouts.scan, layouts.axis), layouts.new_stacks(*wanted)
    moved = restack(arrays, before, after)
    gone = layouts.left_out(old, moved)
    lost = [
        _unused(path, "no rule says what becomes of it in the other layout")
        for path in unused(arrays, moved)
        if arrays[path].key not in gone
    ]
    loose = _loose_layers(one.path for one in moved if one.path == one.like and not before.find(one.path))
    empty = {path: Held("", _empty_shape(path, before)) for path in old.empty}
    return moved, {one.path: one.like for one in restack(empty, before, after)}, [*lost, *loose]


def _repeat(
    moved: Sequence[Moved], repeats: Mapping[Path, Path], version: str | None, axis: int
) -> tuple[list[Moved], dict[str, str]]:
    """The arrays with those that repeat another one, as the version that is wanted has them: made of the variable, which
    is the newest, where the checkpoint has it, else of the parameter; and the keys of the old ones that aren't taken for
    it, with the reason.
    """
    made, left_out = {one.path: one for one in moved}, {}
    for variable, spare in repeats.items():
        newest = made.get(variable) or made.get(spare)
        if newest is None:
            continue
        if variable in made and spare in made:
            reason = f"{'.'.join(variable)}, the newest, is taken for it"
            left_out |= dict.fromkeys(made[spare].part.tensors, reason)
        made[spare] = elsewhere(newest, spare, axis)
        if version == NEWEST:
            made.setdefault(variable, elsewhere(newest, variable, 0))
        else:
            made.pop(variable, None)
    return list(made.values()), left_out


def _keep(old: _Old, one: Moved, names: Mapping[Path, tuple[str | None, ...]]) -> Kept:
    """An array of the new tree, with its role and the names of its axes."""
    shape = one.part.shape
    found = _at_end(one.path, names) or ()
    named = found if len(found) == len(shape) else (None,) * len(shape)
    return Kept(".".join(one.path), old.role(one.part.tensors[0], shape), named, one.part)


def _unused(path: Path, message: str) -> Problem:
    return Problem("unused", ".".join(path), message, is_array=True)


def find_parts(
    source: OrbaxCheckpoint, model: Model, family_name: str | None, model_name: str | None
) -> tuple[dict[str, list[Part]], str]:
    """What the model's table makes each weight of, by MaxText's keys, in the layout that a checkpoint is in; or why
    nobody knows.
    """
    try:
        layouts = _Layouts(source, model, source.tree.weights, family_name, model_name)
    except TreeError as e:
        return {}, str(e)
    if layouts.family is None:
        return {}, layouts.reason
    if why := layouts.unsettled:
        return {}, layouts.reason or why
    return {key_of(path): made for path, made in layouts.parts(layouts.scan, layouts.axis).items()}, ""


class _Layouts:
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

    def lacks(self, repeats: Mapping[Path, Path]) -> bool:
        """Whether the checkpoint has one of a variable and its parameter where the version that is wanted has both, or
        the other way round.
        """
        if not repeats:
            return False
        keys = (((PARAMS, *one.split("/")), other) for one, other in self._own_repeats.items())
        held = [(".".join(one) in self.weights, key_of(other) in self.weights) for one, other in keys]
        wanted = (self.version == NEWEST, True)
        return any(pair != wanted for pair in held if any(pair))

    @property
    def _own_repeats(self) -> dict[str, str]:
        """As `repeats` has it, of the layout that the checkpoint has."""
        assert self.family is not None
        layout = dataclasses.replace(self.at(self.scan, self.axis), maxtext=NEWEST)
        return spares(expand(self.family, self.config, layout))

    def check_version(self, old: _Old) -> list[Problem]:
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
        return lost + [_unused(held[key].path, unknown) for key in sorted(held.keys() - wanted.keys())]

    def check(self, scan: bool | None, is_moving: bool) -> list[Problem]:
        """What stands against the layout that is wanted."""
        option = "--scan_layers" if scan is not None and scan != self.scan else "--param_scan_axis"
        option = self.taken.option if self.taken else option
        if is_moving and self.family is None:
            return [
                Problem(
                    "option", option, f"where the layers' arrays go follows from the model's table, but {self.reason}"
                )
            ]
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

    @property
    def unsettled(self) -> str:
        """Why it isn't known where the layers are stacked; empty if it is."""
        if self.scan and self.axis is None:
            return f"the checkpoint's shapes aren't those of {self.of}, wherever the layers are stacked"
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
            part = _at_end(one.path, parts) or _at_end(_codes(one.path), parts)
            if part is None or EXPERT not in itertools.chain(*part.rule.axes.right):
                made.append(one)
            elif (place := part.axis_with(EXPERT)) and len(one.part.shape) == len(part.shape):
                made.append(narrowed(one, place[0], _times(self.taken.experts, place[1])))
            else:
                why = "nothing says what of it is of which expert; --state params takes the weights alone"
                problems.append(_unused(one.path, why))
        return made, problems

    def left_out(self, old: _Old, moved: Sequence[Moved]) -> dict[str, str]:
        """The keys of a layer's arrays that nothing is made of, with the reason: only where layers are taken."""
        taken = set((self.taken.layers if self.taken else None) or ())
        stacks, arrays = self.stacks(self.scan, self.axis), old.arrays
        left = {}
        for path in unused(arrays, moved):
            if at := stacks.find(path):
                layers = {layer for _, layer in stacks.by_target[at[1]].places}
                if not layers:
                    left[arrays[path].key] = "of places without a layer"
                elif taken and not taken & layers:
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


def _at_end(path: Path, found: Mapping[Path, Kind]) -> Kind | None:
    """What is known of the weight that a path ends with."""
    path = path[:-1] if path[-1:] == (VALUE,) else path
    return next((found[path[start:]] for start in range(len(path)) if path[start:] in found), None)


def _loose_layers(paths: Iterator[Path]) -> list[Problem]:
    """Arrays that seem to belong to a layer, though the table knows no layers there."""
    problems = []
    for path in paths:
        if any(component.rpartition("_")[0].endswith("layers") or component.endswith("layers") for component in path):
            message = (
                "it seems to be a layer's, but the table has no layers there; --state params takes the weights alone"
            )
            problems.append(_unused(path, message))
    return problems


def _empty_shape(path: Path, stacks: Stacks) -> tuple[int, ...]:
    found = stacks.find(path)
    return stacks.by_target[found[1]].layers.shape if found else ()


def _metadata(source: OrbaxCheckpoint, arrays: Mapping[Path, Path], bare: Mapping[Path, Path]) -> dict[str, Any]:
    """`tree_metadata`: every leaf as it was, by its new path; arrays without the mesh that they lay on."""
    before = {
        tuple(str(key["key"]) for key in entry["key_metadata"]): entry
        for entry in source.metadata["tree_metadata"].values()
    }
    found = {}
    for path, like in {**arrays, **bare}.items():
        entry = before[like]
        kinds = [key["key_type"] for key in entry["key_metadata"]]
        keys = [
            {"key": name, "key_type": kinds[at] if path[: at + 1] == like[: at + 1] else DICT}
            for at, name in enumerate(path)
        ]
        value = dict(entry["value_metadata"])
        if path in arrays:
            value = {
                "value_type": "scalar" if value.get("value_type") == "scalar" else "np.ndarray",
                "skip_deserialize": False,
            }
        found[str(path)] = {"key_metadata": keys, "value_metadata": value}
    return found
