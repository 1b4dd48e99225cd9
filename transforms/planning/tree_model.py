"""What a new checkpoint's tree is planned of and comes to: the model, what is taken of it, its arrays."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from weightbeam.formats.orbax.source import OrbaxCheckpoint
from weightbeam.model_mappings.config import MAX_COUNT
from weightbeam.model_mappings.cut import Cut, numbers, spans, spelled
from weightbeam.model_mappings.maxtext_config import MaxTextConfig
from weightbeam.model_mappings.rules import ABSENT, Stack
from weightbeam.model_mappings.stacking import Copy
from weightbeam.transforms.planning.layouts import is_tower, scan_axis_of, scan_of


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

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return vars(self) | {"files": {name: base64.b64encode(data).decode() for name, data in self.files.items()}}

    @classmethod
    def from_json(cls, staged: Mapping[str, Any]) -> Model:
        """What `to_json` made."""
        shapes = {name: tuple(shape) for name, shape in staged["shapes"].items()}
        files = {name: base64.b64decode(data) for name, data in staged["files"].items()}
        return cls(**{**staged, "shapes": shapes, "files": files})


class Stacking(NamedTuple):
    """Whether layers are stacked, and on which axis; None where nobody knows, or where nobody asked for anything."""

    scan: bool | None
    axis: int | None

    @classmethod
    def of(cls, source: OrbaxCheckpoint, weights: Mapping[str, object]) -> Stacking:
        """That of a checkpoint, as far as its metadata and the names of its weights say it."""
        return cls(scan_of(source, weights), scan_axis_of(source))

    def or_else(self, own: Stacking) -> Stacking:
        """What is asked for, and else what a checkpoint has."""
        return Stacking(own.scan if self.scan is None else self.scan, own.axis if self.axis is None else self.axis)

    def is_other(self, than: Stacking) -> bool:
        """Whether layers lie elsewhere."""
        return self.scan != than.scan or (bool(self.scan) and self.axis != than.axis)


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
        """A stack of the new model by the whole one's numbers; a tower's blocks are all there, whatever their numbers."""
        if self.layers is None or "{layer}" not in stack.source or is_tower(stack.target):
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
