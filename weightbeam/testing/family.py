"""A family's table against the headers of a release, and against the tree that MaxText builds. Integers only: no weight is read."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from weightbeam.model_mappings.audit import audit
from weightbeam.model_mappings.boxes import Box, whole
from weightbeam.model_mappings.cells import Part, Piece
from weightbeam.model_mappings.config import Config, Layout
from weightbeam.model_mappings.family import Family, rename
from weightbeam.model_mappings.plan import Array, Problem, TensorSpec, expand, make_arrays

MOST = 1 << 24  # elements of a model that are counted
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SCAN_AXES = (0, 1, 3)  # in front, MaxText's own, and beyond the axes of some arrays
TOWERS = ("vision_config", "thinker_config", "audio_config")  # a release without these has no tower to convert
Headers = Mapping[str, TensorSpec]
Tree = Mapping[str, tuple[tuple[int, ...], tuple[str | None, ...]]]


@dataclasses.dataclass(frozen=True)
class Audited:
    """A table against a release.

    Attributes:
      arrays: what the table makes.
      dropped: what it leaves out on purpose, with the reason.
      problems: all that stands against it.
      tensors: the release's, by the table's names.
    """

    arrays: tuple[Array, ...]
    dropped: Mapping[str, str]
    problems: list[Problem]
    tensors: Headers


def audited(family: Family, config: Mapping[str, Any], tensors: Headers, layout: Layout) -> Audited:
    """Expands a family's table for a release, and audits it."""
    checked = Config(config)
    renamed = {rename(name, family.aliases): spec for name, spec in tensors.items()}
    layout = dataclasses.replace(layout, shapes={name: spec.shape for name, spec in renamed.items()})
    arrays = make_arrays(expand(family, checked, layout), renamed, BFLOAT16)
    return Audited(arrays, *audit(arrays, renamed, family.drops(checked, layout), family.name), renamed)


def layouts_of(family: Family, config: Mapping[str, Any]) -> dict[str, Layout]:
    """Every layout that a family has for a release, by name: scanned and unscanned, each with its towers, too."""
    scans = {name: Layout(scan=name == "scanned") for name in family.layouts}
    if not family.towers or set(TOWERS).isdisjoint(config):
        return scans
    return scans | {
        f"multimodal-{name}": dataclasses.replace(layout, multimodal=True) for name, layout in scans.items()
    }


def check_family(
    family: Family, config: Mapping[str, Any], tensors: Headers, layouts: Mapping[str, Layout] | None = None
) -> None:
    """Checks a table against a release of any size, in every layout: nothing is missing, unused, of another shape, made
    twice or used twice. Headers are all that it takes.

    Args:
      family: with the table.
      config: the release's `config.json`.
      tensors: its headers, `{name: TensorSpec(shape, dtype, file)}`.
      layouts: by name; those that the family says, with the stacked axis in several places.

    Raises:
      AssertionError: a layout doesn't hold; with all that was found in it.

    Example:
      >>> from weightbeam.model_mappings.families import identity
      >>> from weightbeam.model_mappings.plan import TensorSpec
      >>> check_family(identity.FAMILY, {"model_type": "mine"}, {"up.weight": TensorSpec((3, 5), BFLOAT16, "a file")})
    """
    for where, found in _in_layouts(family, config, tensors, layouts):
        _none([str(problem) for problem in found.problems], where)


def check_elements(
    family: Family, config: Mapping[str, Any], tensors: Headers, layouts: Mapping[str, Layout] | None = None
) -> None:
    """Counts the elements of a tiny model one by one, in every layout: each of an array is made once, each of a tensor is
    used once or dropped, and read back the same elements lie in the same places.

    Args:
      family, config, tensors, layouts: see `check_family`.

    Raises:
      AssertionError: a layout doesn't hold; or the model has more than `MOST` elements, and is none to count.

    Example:
      >>> from weightbeam.model_mappings.families import identity
      >>> from weightbeam.model_mappings.plan import TensorSpec
      >>> check_elements(identity.FAMILY, {"model_type": "mine"}, {"up.weight": TensorSpec((3, 5), BFLOAT16, "a file")})
    """
    elements = sum(math.prod(spec.shape) for spec in tensors.values())
    if elements > MOST:
        raise AssertionError(f"{elements:,} elements; at most {MOST:,} are counted one by one: take a tiny model")
    for where, found in _in_layouts(family, config, tensors, layouts):
        _none([str(problem) for problem in found.problems] or [*_miscounted(found), *_misread(found)], where)


def _in_layouts(
    family: Family, config: Mapping[str, Any], tensors: Headers, layouts: Mapping[str, Layout] | None
) -> Iterator[tuple[str, Audited]]:
    """A release in each layout, with its name in messages."""
    for name, layout in (layouts_of(family, config) if layouts is None else layouts).items():
        for axis in SCAN_AXES if layout.scan else (layout.scan_axis,):
            found = audited(family, config, tensors, dataclasses.replace(layout, scan_axis=axis))
            yield f"{family.name}, {name}, layers stacked on axis {axis}", found


def check_tree(family: Family, config: Mapping[str, Any], tree: Tree, layout: Layout) -> None:
    """Compares a table with MaxText's parameters: the same paths, shapes and logical axes, none more and none less.

    Args:
      family: with the table.
      config: `config.json` of the model that the tree is of.
      tree: of MaxText, `{path: (shape, logical name of each axis)}` such as `params/params/decoder/decoder_norm/scale`.
      layout: by which the tree was built.

    Raises:
      AssertionError: they differ; with every array in which they do.

    Example:
      >>> from weightbeam.model_mappings.rules import rule, stack
      >>> norm = stack("decoder", "model.", 0, [rule("decoder_norm/scale", "norm.weight", "embed", "norm")])
      >>> mine = Family(
      ...     name="mine", models={}, dims=lambda c, layout: dict(embed=c.size("hidden_size")), releases="one of mine",
      ...     stacks=lambda c, layout: [norm], drops=lambda c, layout: {},
      ... )
      >>> check_tree(mine, {"hidden_size": 6}, {"params/params/decoder/decoder_norm/scale": ((6,), ("norm",))}, Layout())
    """
    made = {
        array.key: (array.shape, array.logical_axes)
        for array in make_arrays(expand(family, Config(config), layout), {}, BFLOAT16)
        if array.key.startswith("params.params.") and not any(part.rule.spare for part in array.parts)
    }
    meant = {path.replace("/", "."): fact for path, fact in tree.items()}
    faults = [f"{key}: the table makes it, MaxText has no such parameter" for key in made.keys() - meant.keys()]
    faults += [f"{key}: MaxText has it, the table doesn't make it" for key in meant.keys() - made.keys()]
    faults += [
        f"{key}: the table says {made[key]}, MaxText has {meant[key]}"
        for key in made.keys() & meant.keys()
        if made[key] != meant[key]
    ]
    _none(sorted(faults), f"{family.name} beside MaxText's tree")


def check_sizes_differ(family: Family, config: Mapping[str, Any], tensors: Headers) -> None:
    """Checks that a model can tell a wrong table from a right one: of no tensor two axes have the same size, so that none
    can be taken for another.

    Args:
      family, config, tensors: see `check_family`.

    Raises:
      AssertionError: some have; choose other sizes.

    Example:
      >>> from weightbeam.model_mappings.families import identity
      >>> from weightbeam.model_mappings.plan import TensorSpec
      >>> check_sizes_differ(identity.FAMILY, {"model_type": "mine"}, {"up.weight": TensorSpec((3, 5), BFLOAT16, "a file")})
    """
    faults = []
    for array in audited(family, config, tensors, layouts_of(family, config)[family.layouts[0]]).arrays:
        for part in array.parts:
            words = list(itertools.chain(*part.rule.axes.left[len(part.rule.name_axes) :]))
            for (one, a), (other, b) in itertools.combinations(zip(words, part.flat_sizes, strict=True), 2):
                if a == b:
                    faults.append(f"{array.key}: {one} and {other} are both {a}")
    _none(faults, f"{family.name}, sizes of the model")


def _none(faults: list[str], where: str) -> None:
    """Raises AssertionError with the faults, if there are any."""
    if faults:
        raise AssertionError("\n".join([f"{where}: {len(faults):,} faults", *faults]))


def _counters(tensors: Headers) -> dict[str, np.ndarray]:
    return {name: np.zeros(spec.shape, np.int8) for name, spec in tensors.items()}


def _pieces(array: Array) -> Iterator[Piece]:
    """Everything that an array is made of; what is spare repeats another array, and takes nothing."""
    box = whole(array.shape)
    return (piece for part in array.parts if not part.rule.spare for cell in part.cells() for piece in cell.pieces(box))


def _miscounted(found: Audited) -> Iterator[str]:
    """Arrays whose elements aren't made once, and tensors whose elements aren't used once, counted one by one."""
    used = _counters(found.tensors)
    for array in found.arrays:
        if any(part.rule.spare for part in array.parts):
            continue
        made = np.zeros(array.shape, np.int8)
        for piece in _pieces(array):
            piece.target.of(made, (0,) * made.ndim)[...] += 1
            piece.source.of(used[piece.tensor], (0,) * used[piece.tensor].ndim)[...] += 1
        if (made > 1).any() or (array.fill is None and not made.all()):
            yield f"{array.key}: elements are made {made.min()} to {made.max()} times"
        if array.fill is not None and made.all():
            yield f"{array.key}: nothing of it is left to be filled with {array.fill}"
    for name, count in used.items():
        count = np.atleast_1d(count)
        rows = kept_rows(found.dropped, name, count.shape)
        if not (count[:rows] == 1).all() or count[rows:].any():
            yield f"{name}: elements are used {count.min()} to {count.max()} times; {rows} of {len(count)} rows aren't dropped"


def kept_rows(dropped: Iterable[str], name: str, shape: tuple[int, ...]) -> int:
    """The number of leading rows of a tensor that aren't dropped."""
    for entry in dropped:
        window = re.fullmatch(re.escape(name) + r"\[(\d+):\]", entry)
        if window or entry == name:
            return int(window[1]) if window else 0
    return shape[0]


def _misread(found: Audited) -> Iterator[str]:
    """Tensors of which an array gives back other elements than it was made of."""
    for array in found.arrays:
        numbers = np.arange(max(1, np.prod(array.shape, dtype=int)), dtype=np.int64).reshape(array.shape)
        for part in array.parts:
            if part.rule.source is not None and not part.rule.spare:
                yield from _misread_part(part, array, numbers, found.tensors)


def _misread_part(part: Part, array: Array, numbers: np.ndarray, tensors: Headers) -> Iterator[str]:
    """Lays an array's elements out as the tensors of its cells, once by either reading."""
    for cell in part.cells():
        name = cell.tensor or ""
        shape = tensors[name].shape
        forward, back = np.full(shape, -1), np.full(shape, -1)
        for piece in cell.pieces(whole(array.shape)):
            source = piece.source.of(forward, (0,) * len(shape))
            source.transpose(piece.order)[...] = piece.target.of(numbers, (0,) * numbers.ndim)
        box: Box = whole(shape)
        for piece in cell.pieces_back(box, array.key):
            piece.target.of(back, (0,) * len(shape))[...] = piece.source.of(numbers, (0,) * numbers.ndim).transpose(
                piece.order
            )
        if not np.array_equal(forward, back):
            yield f"{name}: read back, {array.key} gives {(forward != back).sum():,} other elements"
