"""A family: the models that one table describes."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, Self

from weightbeam.model_mappings.config import Config, Layout
from weightbeam.model_mappings.configuration import Line
from weightbeam.model_mappings.rules import Stack
from weightbeam.model_mappings.versions import axis_of


class Tower(str):
    """Why a tower, or another part of a release beside its text model, is left out.

    Attributes:
      absent: the field of `config.json`, and its value, by which transformers makes the model without it, such as
        `{"vision_config": None}`; a dot leads into a section. Empty where it makes one in any case, of random weights.
    """

    absent: Mapping[str, Any]

    def __new__(cls, reason: str, absent: Mapping[str, Any] | None = None) -> Self:
        made = super().__new__(cls, reason)
        made.absent = absent or {}
        return made


class Prediction(str):
    """Why layers of multi-token prediction are left out."""


class Beyond(str):
    """Why the last rows of a tensor, such as the embedding's, are left out.

    Attributes:
      tensor: its name.
      kept: how many rows are kept.
    """

    tensor: str
    kept: int

    @classmethod
    def of(cls, tensor: str, kept: int) -> Self:
        made = cls(f"beyond --vocab_size={kept}")
        made.tensor, made.kept = tensor, kept
        return made


class Variable(str):
    """Why a tensor that isn't a parameter in MaxText is left out: the checkpoint hasn't got it."""


# names of a release that was saved from transformers' class without a head, as Qwen3-Embedding is
WITHOUT_HEAD = {part: f"model.{part}" for part in ("embed_tokens", "layers", "norm")}


@dataclasses.dataclass(frozen=True)
class Family:
    """The table of a family, and how to tell that a checkpoint belongs to it.

    Attributes:
      name: the family's name, and its module's.
      models: patterns of MaxText's model names, with the `model_type`s of `config.json` that each may stand for.
      dims: the axis words of the table and their sizes.
      stacks: the table itself, for the newest MaxText; see `table`.
      earlier: the table for versions of MaxText whose arrays are others, by version.
      drops: tensors left out on purpose: `{pattern or window: reason}`; the reason is a `Tower` or a `Prediction` where
        a part of the model stays out, which an export may take from the release.
      copies: tensors left out that hold what another one does, `{tensor: the tensor it is a copy of}`; a release may
        store them.
      releases: the releases it covers.
      checked: MaxText's models whose parameter trees, at full size, the table is compared with in the tests.
      trees: the versions or branches of MaxText whose trees the table has, and what of them was run.
      missing: parts of these releases that aren't converted.
      mtp: whether MaxText has its multi-token-prediction layers.
      towers: what `--multimodal true` converts besides the text model; empty where MaxText has nothing.
      layouts: "scanned" and "unscanned", or the one that MaxText has.
      aliases: other spellings of the tensors' names, `{prefix: the table's prefix}`; see `rename`.
      fits: tells families apart that share a `model_type`.
      configuration: for each `model_type` its lines, which say what MaxText's configuration and `config.json` have to
        do with each other.
      is_model: whether a MaxText model may be the checkpoint's, where more than its sizes tells.
      variant: what the table takes from the model's name; models between which `config.json` can't decide must agree in
        it.
      note: what was inferred and why, for the plan.
      code: what tells the table's code from another one's, for what it does stands in no rule's words: the hash of the
        file that was run, or the package and its version; of ours, and until it is loaded, empty.

    Example:
      >>> from weightbeam.model_mappings.rules import rule, stack
      >>> def dims(c, layout):
      ...     return dict(embed=c.size("hidden_size"), vocab=c.size("vocab_size"))
      >>> def stacks(c, layout):
      ...     head = rule("head/kernel", "lm_head.weight", "vocab embed -> embed vocab", "embed vocab")
      ...     return [stack("decoder", "", 0, [head])]
      >>> family = Family(
      ...     name="mine", models={"mine-*": ("my_model",)}, dims=dims, stacks=stacks, drops=lambda c, layout: {},
      ...     releases="one of mine",
      ... )
      >>> family.model_types, family.types_of("mine-7b"), family.support
      (('my_model',), ('my_model',), 'scanned and unscanned')
      >>> from weightbeam.model_mappings.plan import TensorSpec, expand, make_arrays
      >>> import numpy as np
      >>> config = Config(model_type="my_model", hidden_size=3, vocab_size=5)
      >>> tensors = {"lm_head.weight": TensorSpec((5, 3), np.dtype(np.float32), "model.safetensors")}
      >>> for array in make_arrays(expand(family, config, Layout()), tensors, np.dtype(np.float32)):
      ...     print(array.key, array.shape, array.logical_axes)
      params.params.decoder.head.kernel (3, 5) ('embed', 'vocab')
    """

    name: str
    models: Mapping[str, tuple[str, ...]]
    dims: Callable[[Config, Layout], Mapping[str, int]]
    stacks: Callable[[Config, Layout], list[Stack]]
    drops: Callable[[Config, Layout], Mapping[str, str]]
    releases: str
    earlier: Mapping[str, Callable[[Config, Layout], list[Stack]]] = dataclasses.field(default_factory=dict)
    copies: Callable[[Config, Layout], Mapping[str, str]] = lambda c, layout: {}
    checked: tuple[str, ...] = ()
    trees: str = "e591f30 and 0.2.5"
    missing: str = ""
    mtp: bool = False
    towers: str = ""
    layouts: tuple[str, ...] = ("scanned", "unscanned")
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fits: Callable[[Config], bool] = lambda c: True
    configuration: Mapping[str, tuple[Line, ...]] = dataclasses.field(default_factory=dict)
    is_model: Callable[[Config, str], bool] = lambda c, model: True
    variant: Callable[[str], object] = lambda model: None
    note: Callable[[Config, Layout], str] = lambda c, layout: ""
    code: str = ""

    def table(self, config: Config, layout: Layout) -> list[Stack]:
        """The table of a layout, as its version of MaxText has it.

        Args:
          config: `config.json` of the model.
          layout: how the arrays are laid out.

        Returns:
          The stacks, whose axes have the names of `layout.maxtext`.

        Raises:
          ConfigError: MaxText has no such model, or `config.json` lacks a field.
        """
        stacks = self.earlier.get(layout.maxtext, self.stacks)(config, layout)
        return [stack.named_by(functools.partial(axis_of, version=layout.maxtext)) for stack in stacks]

    @property
    def model_types(self) -> tuple[str, ...]:
        """Every `model_type` of the family, in the order of the table."""
        return tuple(dict.fromkeys(kind for kinds in self.models.values() for kind in kinds))

    @property
    def support(self) -> str:
        """What is supported, in a line: layouts and towers. What isn't, and what the table was compared with, stands in
        docs/reference/families.md.
        """
        parts = [
            " and ".join(self.layouts) + ("" if len(self.layouts) > 1 else " only"),
            self.towers and f"{self.towers} (--multimodal true)",
            "multi-token prediction (--mtp true)" if self.mtp else "",
        ]
        return "; ".join(filter(None, parts))

    def supporting(self, layout: Layout, dropped: Mapping[str, str]) -> Family:
        """The family without the parts that a release hasn't: those that are neither asked for nor left out of it.

        Args:
          layout: says which are asked for.
          dropped: why each tensor is left out, by name.

        Returns:
          The family, for what a person is told of its parts.
        """
        kinds = {type(reason) for reason in dropped.values()}
        towers = self.towers if layout.multimodal or Tower in kinds else ""
        return dataclasses.replace(self, towers=towers, mtp=self.mtp and (layout.mtp or Prediction in kinds))

    def types_of(self, model: str) -> tuple[str, ...]:
        """What a MaxText model may be in `config.json`.

        Args:
          model: its name, such as `qwen3-8b`.

        Returns:
          The `model_type`s that it may stand for; empty where it isn't of this family.
        """
        return tuple(
            kind for pattern, kinds in self.models.items() if fnmatch.fnmatchcase(model, pattern) for kind in kinds
        )


def rename(name: str, aliases: Mapping[str, str]) -> str:
    """A tensor's name as the table spells it.

    An alias is a literal prefix of whole components; `*` stands for one component that stays as it is, such as a
    layer's number. The longest alias that fits is used, and only once.

    Args:
      name: as a release has it.
      aliases: other spellings, `{prefix: the table's prefix}`.

    Returns:
      The name; as it is where no alias fits.

    Example:
      >>> rename("model.layers.3.attn.q.weight", {"model.layers.*.attn": "layers.*.self_attn"})
      'layers.3.self_attn.q.weight'
    """
    pattern, prefixes = _compiled(tuple(aliases.items()))
    match = pattern.match(name)
    if not match or not match.lastindex:
        return name
    prefix = prefixes[match.lastindex]
    kept = match.groups()[match.lastindex : match.lastindex + prefix.count("*")]
    return ".".join(part for part in (prefix.replace("*", "{}").format(*kept), name[match.end() + 1 :]) if part)


@functools.cache
def _compiled(aliases: tuple[tuple[str, str], ...]) -> tuple[re.Pattern[str], dict[int, str]]:
    """All aliases as one pattern, longest first, each a group that holds a group for each `*`; and the table's prefix
    by the group's number.
    """
    groups, prefixes, number = [], {}, 1
    for alias, prefix in sorted(aliases, key=lambda entry: -entry[0].count(".")):
        groups.append("(" + re.escape(alias).replace(r"\*", "([^.]*)") + ")")
        prefixes[number] = prefix
        number += 1 + alias.count("*")
    return re.compile(rf"(?:{'|'.join(groups)})(?=\.|$)"), prefixes
