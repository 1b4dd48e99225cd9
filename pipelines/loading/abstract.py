"""Which arrays a program asks for, under which names, and the tree that they become."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from weightbeam.model_mappings.plan import PARAMETERS, PREFIX, Problem, is_float
from weightbeam.model_mappings.scales import CODES
from weightbeam.model_mappings.trees import VARIABLES, TreeError, recognize, twins
from weightbeam.pipelines.loading.source import Described
from weightbeam.pipelines.terminal.tables import count

if TYPE_CHECKING:
    import jax
    from jax.sharding import Sharding

# what a tree's keys may lack: nothing, TrainState's field, and the collection too
PREFIXES = ("", f"{PREFIX}.", PARAMETERS)
COLLECTIONS = tuple(f"{PREFIX}.{name}." for name in VARIABLES.values())  # of variables that are no parameters


KEY = np.dtype(np.uint32)  # of a random state's key, as Orbax stores it


@dataclasses.dataclass(frozen=True)
class RequestedArray:
    """An array that is asked for."""

    key: str
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding | None


@dataclasses.dataclass(frozen=True)
class Abstract:
    """What a program asks for.

    Attributes:
      targets: in the order of the tree's leaves.
      build: makes the tree of the arrays, in that order.
    """

    targets: tuple[RequestedArray, ...]
    build: Callable[[Sequence[jax.Array]], Any]

    @property
    def keys(self) -> set[str]:
        return {target.key for target in self.targets}

    def prefixed(self, prefix: str) -> Abstract:
        """The same arrays, with `prefix` before the keys of parameters; the keys of other variables stay as they are."""
        return self.renamed(
            {target.key: prefix + target.key for target in self.targets if not target.key.startswith(COLLECTIONS)}
        )

    def renamed(self, names: Mapping[str, str]) -> Abstract:
        """The same arrays, with the keys that `names` has for theirs; a key that it lacks stays as it is."""
        return dataclasses.replace(
            self,
            targets=tuple(
                dataclasses.replace(target, key=names.get(target.key, target.key)) for target in self.targets
            ),
        )

    def spelled_as(self, keys: Iterable[str]) -> Abstract:
        """The same with keys as the arrays of a source have them, which may begin with `params.params.` where the
        tree's don't.

        A tree of any kind that a checkpoint may be of (`model_mappings/trees.py`) will do: with `.value`, below
        `model`, `base` …
        """
        known = set(keys)
        spellings = [self.prefixed(prefix) for prefix in PREFIXES]
        with contextlib.suppress(TreeError):
            tree = recognize(tuple(target.key.split(".")) for target in self.targets)
            spellings.append(self.renamed({key: name for name, key in tree.weights.items()}))
        return max(spellings, key=lambda spelled: len(spelled.keys & known))


def read_tree(tree: Any) -> Abstract:
    """What a tree of arrays, or of things with `shape` and `dtype` and perhaps a `sharding`, asks for.

    The keys are the leaves' paths, dotted: of nested dicts, of Flax's modules' states and boxed variables, of a flat
    dict of Orbax's own keys. A variable of an nnx.State that MaxText keeps in a collection of its own, such as a router's
    bias, has that collection in its key.
    """
    import jax

    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    kinds = (
        {path: type(variable).__name__ for path, variable in tree.flat_state()} if hasattr(tree, "flat_state") else {}
    )
    collections = {tuple(map(str, path)): kind for path, kind in kinds.items() if kind in VARIABLES.values()}
    targets = []
    for path, leaf in leaves:
        names = [_name(entry) for entry in path]
        # the box that Flax puts around a variable
        if path and isinstance(path[-1], jax.tree_util.GetAttrKey) and names[-1] == "value":
            names.pop()
        if collection := collections.get(tuple(names)):
            names = [PREFIX, collection, *names]
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            leaf = np.asarray(leaf)
        dtype = KEY if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.dtype(leaf.dtype)
        targets.append(RequestedArray(".".join(names), tuple(leaf.shape), dtype, getattr(leaf, "sharding", None)))
    return Abstract(tuple(targets), lambda arrays: jax.tree_util.tree_unflatten(structure, arrays))


def _name(entry: Any) -> str:
    """One step of a leaf's path, of whatever kind JAX or Flax makes it."""
    return str(
        next(value for attribute in ("key", "name", "idx") if (value := getattr(entry, attribute, None)) is not None)
    )


def every_parameter(arrays: Mapping[str, Described]) -> Abstract:
    """All parameters of a source, as nested dicts as Orbax restores them."""
    import jax

    keys = [key for key in arrays if key.startswith(f"{PREFIX}.")] or list(arrays)
    targets = [
        RequestedArray(key, arrays[key].shape, np.dtype(jax.dtypes.canonicalize_dtype(arrays[key].dtype)), None)
        for key in keys
    ]

    def build(made: Sequence[jax.Array]) -> Any:
        tree: dict[str, Any] = {}
        for key, array in zip(keys, made, strict=True):
            *folders, last = key.split(".")
            place = tree
            for folder in folders:
                place = place.setdefault(folder, {})
            place[last] = array
        return tree

    return Abstract(tuple(targets), build)


def mismatches(abstract: Abstract, arrays: Mapping[str, Described]) -> list[Problem]:
    """Everything that the tree asks for and the source doesn't have, and the parameters that the tree has no place for."""
    problems: list[Problem] = []
    unknown: list[str] = []  # whose logical axes nobody knows
    for target in abstract.targets:
        array = arrays.get(target.key)
        if array is None:
            problems.append(_problem("missing", target.key, "the tree asks for it, the source doesn't have it"))
            continue
        problems += [_problem(kind, target.key, message) for kind, message in _differences(target, array)]
        if target.sharding is not None:
            why = _why_no_sharding(target.sharding, target.shape)
        elif array.has_axes:
            why = "no sharding: give the tree's leaves one, or name a mesh"
        else:
            unknown.append(target.key)
            continue
        if why:
            problems.append(_problem("sharding", target.key, why))
    if unknown:
        others = f" (and {count(len(unknown) - 1, 'other')})" if unknown[1:] else ""
        why = (
            f"its logical axes aren't known{others}, so that a mesh doesn't say how it lies: "
            "release= names a release of the model, which tells them; or give the tree's leaves a sharding"
        )
        problems.append(_problem("sharding", unknown[0], why))
    asked = abstract.keys
    for key in arrays:
        if key not in asked and key.startswith(f"{PREFIX}.") and not asked.intersection(twins(key)):
            problems.append(_problem("unused", key, "the source has it, the tree has no place for it"))
    return problems


def _differences(target: RequestedArray, array: Described) -> Iterator[tuple[str, str]]:
    """Kinds and messages of what an array is asked to be and isn't."""
    import jax

    if array.shape != target.shape:
        yield "shape", f"the tree asks for {target.shape}, the source makes {array.shape}"
    asked, there = f"the tree asks for {target.dtype.name}", f"the source has {array.dtype.name}"
    if is_float(array.dtype) != is_float(target.dtype):
        yield "dtype", f"{asked}, {there}"
    if (narrow := jax.dtypes.canonicalize_dtype(target.dtype)) != target.dtype:
        yield "dtype", f"{asked}, of which JAX makes {narrow.name} unless jax_enable_x64 is set"
    if target.dtype != array.dtype and CODES in (target.dtype.name, array.dtype.name):
        yield "dtype", f"{asked}, {there}: FP8 codes are no values without their scales"


def _why_no_sharding(sharding: Any, shape: tuple[int, ...]) -> str:
    """Why an array can't be sharded so, in words; empty where it can."""
    try:
        sharding.shard_shape(shape)
    except AttributeError:  # a PartitionSpec that no mesh was named for, or whose axes it hasn't
        return f"{sharding!r} is no sharding: name a mesh that has its axes, or give the leaf a NamedSharding"
    except AssertionError:
        return (
            "the axes of its mesh are Manual, which says nothing of how an array lies; take AxisType.Auto or Explicit"
        )
    except ValueError as e:
        return str(e)
    return ""


def _problem(kind: str, key: str, message: str) -> Problem:
    return Problem(kind, key, message, is_array=True)
