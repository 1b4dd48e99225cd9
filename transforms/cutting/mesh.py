"""Meshes, and how MaxText's logical axis rules shard an array over one."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from weightbeam.formats.text.printable import printable

Assignment = None | str | tuple[str, ...]  # the mesh axes that shard one axis of an array
Rules = Sequence[tuple[str, Assignment]]
MAX_DEVICES = 1 << 18  # of a mesh: more than any cluster has
PARALLELISM = re.compile(r"(?:ici|dcn)_(.+)_parallelism")  # MaxText's settings: how many ways within and between slices


class MeshError(ValueError):
    """A mesh that can't be read, or that names an axis which MaxText doesn't have."""


class RulesError(ValueError):
    """Logical axis rules that can't be read."""


@functools.cache
def _base() -> Mapping[str, Any]:
    return json.loads((Path(__file__).parent / "base_rules.json").read_bytes())


def mesh_axes() -> tuple[str, ...]:
    """The axes of MaxText's meshes."""
    return tuple(_base()["mesh_axes"])


@functools.cache
def base_rules() -> Rules:
    """MaxText's `logical_axis_rules`, in their order."""
    return _rules(_base()["logical_axis_rules"])


def model_rules(model: str | None) -> Rules:
    """`base_rules` with what MaxText's file of a model overrides (src/maxtext/configs/models, e591f30)."""
    return merge_rules(base_rules(), _rules(_base()["models"].get(model, ())))


def _rules(pairs: Sequence) -> Rules:
    return tuple((name, tuple(axes) if isinstance(axes, list) else axes) for name, axes in pairs)


def merge_rules(rules: Rules, overrides: Rules) -> Rules:
    """`rules` without those of a name that `overrides` has, and then these, as MaxText merges them
    (src/maxtext/configs/pyconfig.py, e591f30).
    """
    names = {name for name, _ in overrides}
    return (*(rule for rule in rules if rule[0] not in names), *overrides)


# a configuration with one of these brings all of its rules, another overrides some of its base's
WHOLE = ("mesh_axes", "base_config")


def read_rules(given: Any, base: Rules) -> Rules:
    """The rules that a file of the user's asks for.

    Args:
      given: what the file holds: the list of all rules, or one of MaxText's configurations. Its `logical_axis_rules`
        take the place of `base` if it says `override_logical_axis_rules: true`, or doesn't say and is complete in
        itself (`WHOLE`); otherwise they are merged into `base`, as MaxText does with a model's.
      base: the rules without the file.

    Raises:
      RulesError: says what is wrong with it.
    """
    merged = False
    if isinstance(given, Mapping):
        if "logical_axis_rules" not in given:
            raise RulesError("it has no logical_axis_rules")
        merged = not given.get("override_logical_axis_rules", any(key in given for key in WHOLE))
        given = given["logical_axis_rules"]
    given = _as_lists(given)
    if not isinstance(given, list) or not given:
        raise RulesError("logical_axis_rules should be a list of rules, such as [[embed, [fsdp]], [heads, tensor]]")
    for rule in given:
        pair = rule if isinstance(rule, list) and len(rule) == 2 else (None, None)
        axes = pair[1] if isinstance(pair[1], list) else [] if pair[1] is None else [pair[1]]
        if (
            not isinstance(pair[0], str)
            or not all(isinstance(axis, str) for axis in axes)
            or len(set(axes)) < len(axes)
        ):
            raise RulesError(
                f"{printable(json.dumps(rule, default=str), 200)} should be a logical name and its mesh axes, each once, as in [embed, [fsdp, expert]]"
            )
    return merge_rules(base, _rules(given)) if merged else _rules(given)


def _as_lists(given: Any) -> Any:
    """Lists in the place of tuples: MaxText's own configuration, once read, and flax have them."""
    return [_as_lists(each) for each in given] if isinstance(given, list | tuple) else given


def axes_in(rules: Rules) -> tuple[str, ...]:
    """The mesh axes that rules speak of, and MaxText's own."""
    return tuple(dict.fromkeys([*mesh_axes(), *(axis for _, assignment in rules for axis in axes_of(assignment))]))


@dataclasses.dataclass(frozen=True)
class Mesh:
    """The sizes of a mesh's axes; axes that aren't named have size 1.

    Attributes:
      text: as the user wrote it.
      sizes: by axis.
    """

    text: str
    sizes: Mapping[str, int]

    @classmethod
    def parse(cls, text: str, axes: Collection[str] | None = None, devices: int = 0) -> Mesh:
        """Reads `fsdp=16,expert=4`, where `axes` are the names that a mesh may have; None for MaxText's own. An axis may
        be -1, all that are left, where the number of `devices` is known.

        Raises:
          MeshError: says what is wrong with it.
        """
        sizes: dict[str, int] = {}
        rest = ""
        axes = mesh_axes() if axes is None else axes
        for item in text.split(","):
            name, separator, size = (part.strip() for part in item.partition("="))
            if size == "-1" and devices and not rest:
                rest, size = name, "1"
            if size == "-1" and rest:
                raise MeshError(
                    f"--mesh={text}: {rest} and {name} can't both be all devices that are left; say a number"
                )
            if size == "-1":
                raise MeshError(
                    f"--mesh={text}: {name}=-1 means all devices that are left, and how many there are isn't known here; say a number"
                )
            digits = size.lstrip("0")
            if not separator or not size.isascii() or not size.isdigit() or not digits:
                raise MeshError(f"--mesh={text}: {item.strip()!r} should be an axis and its size, as in fsdp=16")
            if name not in axes:
                setting = PARALLELISM.fullmatch(name)
                meant = (
                    f" (MaxText's ici_ and dcn_{setting[1]}_parallelism, multiplied, are {setting[1]} here)"
                    if setting
                    else ""
                )
                raise MeshError(
                    f"--mesh={text}: MaxText's meshes have no axis {name!r}{meant}; they have {', '.join(axes)}"
                )
            if name in sizes:
                raise MeshError(f"--mesh={text}: the axis {name} is named twice")
            sizes[name] = int(digits[:10])  # which is too many, whatever comes then
        if rest:
            sizes[rest] = max(devices // math.prod(sizes.values()), 1)
        mesh = cls(text, sizes)
        if mesh.devices > MAX_DEVICES:
            raise MeshError(f"--mesh={text}: has more than {MAX_DEVICES:,} devices, which is all that is planned for")
        return mesh

    @property
    def devices(self) -> int:
        """How many devices the mesh has."""
        return math.prod(self.sizes.values())

    def ways(self, assignment: Assignment) -> int:
        """Into how many shards an axis with this assignment is cut."""
        return math.prod(self.sizes.get(name, 1) for name in axes_of(assignment))


def axes_of(assignment: Assignment) -> tuple[str, ...]:
    """The mesh axes of an assignment, the slowest first."""
    return (assignment,) if isinstance(assignment, str) else assignment or ()


def partition_spec(names: Sequence[str | None], rules: Rules) -> tuple[Assignment, ...]:
    """The mesh axes of each axis of an array, as Flax assigns them.

    The rules are tried in order; a rule counts if its axis is still without an assignment and none of its mesh axes is
    taken (google/flax, flax/linen/spmd.py, `logical_to_mesh_axes`, 0.12.8).
    """
    assigned: dict[int, Assignment] = {}
    taken: set[str] = set()
    for name, axes in rules:
        if name not in names:
            continue
        at = list(names).index(name)
        wanted = {axes} if isinstance(axes, str) else set(axes or ())
        if at not in assigned and not wanted & taken:
            assigned[at] = axes
            taken |= wanted
    return tuple(assigned.get(at) for at in range(len(names)))
