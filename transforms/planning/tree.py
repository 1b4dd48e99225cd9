"""The tree of a new checkpoint: which arrays it has, what each is made of, and what it is to a training state."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weightbeam.formats.orbax.metadata import path_of
from weightbeam.formats.orbax.source import OrbaxCheckpoint
from weightbeam.model_mappings.plan import Problem
from weightbeam.model_mappings.stacking import Held, Moved, Path, RestackError, Stacks, elsewhere, restack, same, unused
from weightbeam.model_mappings.trees import TreeError
from weightbeam.transforms.planning.old_tree import OldTree
from weightbeam.transforms.planning.options import PARAMS, ReshardOptions
from weightbeam.transforms.planning.tree_layouts import TreeLayouts, at_end, find_layouts, moving_option, unused_array
from weightbeam.transforms.planning.tree_model import Kept, Model, NewTree, Stacking, Taken

RANDOM = "rngs"  # flax's name for a module's random states: below it streams, each with its `key` and `count`
MADE_ANEW = "a random state of layers, which has no place in the other layout; MaxText makes it anew"
DICT = 2  # Orbax's number for the key of a dict


def make_tree(
    options: ReshardOptions, source: OrbaxCheckpoint, model: Model, taken: Taken | None
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

    With `--state params` the first column is the tree, and the others are left out. Where layers stay as they are, every
    array is as it is. `taken` are the layers and experts that are wanted; None for all of them.
    """
    try:
        old = OldTree.of(source, options.state == PARAMS)
    except TreeError as e:
        return NewTree(), [Problem("tree", source.root, f"{e}; --state full keeps it as it is", is_array=True)]
    asked = Stacking(options.scan_layers, options.param_scan_axis)
    found = find_layouts(source, model, old.weights, options.family, options.maxtext_model)
    if isinstance(found, str):
        return _keep_unknown(options, old, asked, model, taken, found)
    wanted, version = asked.or_else(found.own), options.maxtext or found.version
    layouts = dataclasses.replace(found, wanted=wanted, version=version, taken=taken)
    if why := layouts.why_none:
        is_moved = taken or wanted.is_other(found.own)
        option = moving_option(taken, found.own, wanted) if is_moved else "--maxtext"
        return NewTree(kind=old.kind), [Problem("option", option, why)]
    repeats = layouts.repeats() if old.is_bare else {}
    is_moving = layouts.is_other or bool(repeats and layouts.lacks_repeats())
    if problems := layouts.check(old, asked, is_moving):
        return NewTree(kind=old.kind), problems
    try:
        moved, bare, problems = _move(old, layouts) if is_moving else _stay(old)
    except RestackError as e:
        return NewTree(kind=old.kind), [
            Problem("cut" if taken else "unused", ".".join(fault.path), str(fault), is_array=True) for fault in e.faults
        ]
    repeated: dict[str, str] = {}
    if is_moving and repeats:
        moved, repeated = _repeat(moved, repeats, layouts)
    moved, unknown = layouts.with_experts(moved)
    problems += [*unknown, *layouts.amiss(moved)]
    left_out = old.left_out | repeated | _random_left_out(old, moved) | (layouts.left_out(old, moved) if taken else {})
    tree = _tree(old, moved, bare, layouts.names(), wanted)
    return layouts.describe(dataclasses.replace(tree, left_out=left_out, is_moved=is_moving)), problems


def _keep_unknown(
    options: ReshardOptions, old: OldTree, asked: Stacking, model: Model, taken: Taken | None, why: str
) -> tuple[NewTree, list[Problem]]:
    """The tree of a model whose table nobody knows, and why: it stays as it is, and what needs a table is refused."""
    own = Stacking.of(old.source, old.weights)
    wanted = asked.or_else(own)
    like = model.of.partition("=")[0] if model.of.startswith("--") else ""
    problems = []
    if named_by := "--maxtext_model" if options.maxtext_model else "--family" if options.family else like:
        problems.append(Problem("option", named_by, why))
    elif taken or wanted.is_other(own):
        message = f"where the layers' arrays go follows from the model's table, but {why}"
        problems.append(Problem("option", moving_option(taken, own, wanted), message))
    if options.maxtext:
        message = f"which arrays it has follows from the model's table, but {why}"
        problems.append(Problem("option", "--maxtext", message))
    if problems:
        return NewTree(kind=old.kind), problems
    moved, bare, _ = _stay(old)
    return _tree(old, moved, bare, old.names, wanted), []


def _tree(
    old: OldTree,
    moved: Sequence[Moved],
    bare: Mapping[Path, Path],
    names: Mapping[Path, tuple[str | None, ...]],
    stacking: Stacking,
) -> NewTree:
    """The tree of these arrays and leaves without one, of which no table has said anything yet."""
    arrays = tuple(_keep(old, one, names) for one in moved)
    metadata = {} if old.params_only else _metadata(old.source, {one.path: one.like for one in moved}, bare)
    return NewTree(arrays, metadata, old.kind, *stacking, left_out=old.left_out, is_maxtext=old.is_maxtext)


def _stay(old: OldTree) -> tuple[list[Moved], dict[Path, Path], list[Problem]]:
    """Every array as it is, the paths of the leaves without one, and no problems."""
    moved = [Moved(path, path, same(*held)) for path, held in old.arrays.items()]
    return moved, {path: path for path in old.empty}, []


def _move(old: OldTree, layouts: TreeLayouts) -> tuple[list[Moved], dict[Path, Path], list[Problem]]:
    """The arrays in the layout that is wanted, the new paths of the leaves without one, each with its old path, and the
    arrays of which no rule says what becomes of them. Raises RestackError where arrays aren't stacked as the layout
    says.
    """
    arrays, before, after = old.arrays, layouts.stacks(layouts.own), layouts.new_stacks
    random = {path: held for path, held in arrays.items() if RANDOM in path}
    moved = restack({path: held for path, held in arrays.items() if path not in random}, before, after)
    moved += _move_random(random, before, after)
    gone = layouts.left_out(old, moved)
    lost = [
        unused_array(path, "no rule says what becomes of it in the other layout")
        for path in unused(arrays, moved)
        if arrays[path].key not in gone and path not in random
    ]
    loose = _loose_layers(one.path for one in moved if one.path == one.like and not before.find(one.path))
    empty = {path: Held("", _empty_shape(path, before)) for path in old.empty}
    return moved, {one.path: one.like for one in restack(empty, before, after)}, [*lost, *loose]


def _move_random(random: Mapping[Path, Held], before: Stacks, after: Stacks) -> list[Moved]:
    """Random states in another layout. Modules may share one, which lies below the first of them, so that a layer's is all
    layers': where they can't follow their layers, those that lie in a layer are left out.
    """
    try:
        moved = restack(random, before, after)
    except RestackError:
        moved = restack({path: held for path, held in random.items() if not before.find(path)}, before, after)
    return [one for one in moved if one.path != one.like or before.find(one.path) or not _seems_a_layers(one.path)]


def _random_left_out(old: OldTree, moved: Sequence[Moved]) -> dict[str, str]:
    """The keys of the random states that nothing is made of, with the reason."""
    arrays = old.arrays
    return {arrays[path].key: MADE_ANEW for path in unused(arrays, moved) if RANDOM in path}


def _repeat(
    moved: Sequence[Moved], repeats: Mapping[Path, Path], layouts: TreeLayouts
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
        made[spare] = elsewhere(newest, spare, layouts.new[1].scan_axis)
        made.setdefault(variable, elsewhere(newest, variable, 0))
        for path in (variable, spare):
            if "/".join(path[1:]) not in layouts.new_parts:
                del made[path]
    return list(made.values()), left_out


def _keep(old: OldTree, one: Moved, names: Mapping[Path, tuple[str | None, ...]]) -> Kept:
    """An array of the new tree, with its role and the names of its axes."""
    shape = one.part.shape
    found = at_end(one.path, names) or ()
    named = found if len(found) == len(shape) else (None,) * len(shape)
    return Kept(".".join(one.path), old.role(one.part.tensors[0], shape), named, one.part)


def _loose_layers(paths: Iterator[Path]) -> list[Problem]:
    """Arrays that seem to belong to a layer, though the table knows no layers there."""
    message = "it seems to be a layer's, but the table has no layers there; --state params takes the weights alone"
    return [unused_array(path, message) for path in paths if _seems_a_layers(path)]


def _seems_a_layers(path: Path) -> bool:
    """Whether a path has a component such as `layers` or `moe_layers_3`."""
    return any(component.rpartition("_")[0].endswith("layers") or component.endswith("layers") for component in path)


def _empty_shape(path: Path, stacks: Stacks) -> tuple[int, ...]:
    found = stacks.find(path)
    return stacks.by_target[found[1]].layers.shape if found else ()


def _metadata(source: OrbaxCheckpoint, arrays: Mapping[Path, Path], bare: Mapping[Path, Path]) -> dict[str, Any]:
    """`tree_metadata`: every leaf as it was, by its new path; arrays without the mesh that they lay on."""
    before = {path_of(entry): entry for entry in source.metadata["tree_metadata"].values()}
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
            kind = "scalar" if value.get("value_type") == "scalar" else "np.ndarray"
            value = {"value_type": kind, "skip_deserialize": False}
        found[str(path)] = {"key_metadata": keys, "value_metadata": value}
    return found
