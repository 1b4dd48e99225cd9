"""The tree of the checkpoint that is read: which arrays it has, and what each is to a training state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Container, Mapping

from weightbeam.formats.orbax import TEXT, leaves
from weightbeam.formats.orbax.metadata import path_of
from weightbeam.formats.orbax.source import OrbaxCheckpoint
from weightbeam.model_mappings.plan import PARAMETERS, is_float
from weightbeam.model_mappings.rules import PARAMS
from weightbeam.model_mappings.stacking import Held, Path
from weightbeam.model_mappings.trees import TreeError

OPTIMIZERS = ("opt_state", "optimizer", "optimizer_state", "outer_opt_state")


@dataclasses.dataclass(frozen=True)
class OldTree:
    """The old tree, and how much of it is taken.

    Attributes:
      source: the old checkpoint.
      params_only: whether the weights alone are taken, below `params.params`, whatever the old tree calls them.
      weights: the keys of the weights, by MaxText's; empty where nobody knows which arrays they are.
      kind: what wrote the tree.
    """

    source: OrbaxCheckpoint
    params_only: bool
    weights: Mapping[str, str]
    kind: str

    @classmethod
    def of(cls, source: OrbaxCheckpoint, params_only: bool) -> OldTree:
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
    def is_maxtext(self) -> bool:
        """Whether the weights are of one of MaxText's models."""
        roots = f"{PARAMETERS}decoder.", f"{PARAMETERS}token_embedder."
        return any(key.startswith(roots) for key in self.weights)

    @property
    def names(self) -> dict[Path, tuple[str | None, ...]]:
        """The logical names of the arrays' axes that our record says, by their paths below `params.params`."""
        said = self.source.record.get("axes")
        axes = said.items() if isinstance(said, dict) else ()
        lists = {key.removeprefix(PARAMETERS): names for key, names in axes if isinstance(names, list)}
        return {tuple(key.split(".")): tuple(names) for key, names in lists.items()}

    @property
    def empty(self) -> list[Path]:
        """The leaves without an array that are taken: None, empty dicts, texts."""
        found = []
        for entry in () if self.params_only else self.source.metadata["tree_metadata"].values():
            about = entry["value_metadata"]
            if about.get("skip_deserialize") or about.get("value_type") == TEXT:
                found.append(path_of(entry))
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
