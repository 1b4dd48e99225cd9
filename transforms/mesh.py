"""Meshes, and how MaxText's logical axis rules shard an array over one."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

Assignment = None | str | tuple[str, ...]  # the mesh axes that shard one axis of an array
Rules = Sequence[tuple[str, Assignment]]


class MeshError(ValueError):
    """A mesh that can't be read, or that names an axis which MaxText doesn't have."""


@functools.cache
def _base() -> Mapping[str, list]:
    return json.loads((Path(__file__).parent / "base_rules.json").read_bytes())


def mesh_axes() -> tuple[str, ...]:
    """The axes of MaxText's meshes."""
    return tuple(_base()["mesh_axes"])


@functools.cache
def base_rules() -> Rules:
    """MaxText's `logical_axis_rules`, in their order."""
    return tuple((name, tuple(axes) if isinstance(axes, list) else axes) for name, axes in _base()["logical_axis_rules"])


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
    def parse(cls, text: str) -> Mesh:
        """Reads `fsdp=16,expert=4`.

        Raises:
          MeshError: says what is wrong with it.
        """
        sizes: dict[str, int] = {}
        for item in text.split(","):
            name, separator, size = (part.strip() for part in item.partition("="))
            if not separator or not size.isascii() or not size.isdigit() or int(size) < 1:
                raise MeshError(f"--mesh={text}: {item.strip()!r} should be an axis and its size, as in fsdp=16")
            if name not in mesh_axes():
                raise MeshError(f"--mesh={text}: MaxText's meshes have no axis {name!r}; they have {', '.join(mesh_axes())}")
            if name in sizes:
                raise MeshError(f"--mesh={text}: the axis {name} is named twice")
            sizes[name] = int(size)
        return cls(text, sizes)

    def ways(self, assignment: Assignment) -> int:
        """Into how many shards an axis with this assignment is cut."""
        names = (assignment,) if isinstance(assignment, str) else assignment or ()
        return math.prod(self.sizes.get(name, 1) for name in names)


def partition_spec(names: Sequence[str | None], rules: Rules) -> tuple[Assignment, ...]:
    """The mesh axes of each axis of an array, as Flax assigns them.

    The rules are tried in order; a rule counts if its axis is still without an assignment and none of its mesh axes is taken
    (google/flax, flax/linen/spmd.py, `logical_to_mesh_axes`, 0.12.8).
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
