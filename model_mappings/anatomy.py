"""Where a release's layers, experts and rows of the vocabulary are, by the names of its tensors.

A family's table says it: the stack's prefix is where a layer's number stands, `{expert}` where an expert's does, and the
axis words `expert`, `vocab` and `layer` which tensors hold several on an axis. Without a table names tell layers, where only one kind
of them is numbered; experts and rows aren't guessed.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from weightbeam.model_mappings.cells import size_of
from weightbeam.model_mappings.config import Config, ConfigError, Layout, text_parts
from weightbeam.model_mappings.family import Family, Prediction, rename
from weightbeam.model_mappings.rules import Rule

# what `config.json` calls their number; GPT-2's, MPT's, GPT-Neo's, xLSTM's
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks")
EXPERT, VOCAB, LAYER = "expert", "vocab", "layer"  # the axis words
NEVER = r"(?!)"

Shapes = Mapping[str, tuple[int, ...]]  # of tensors, by name


def layer_count(config: Mapping[str, Any]) -> int:
    """How many layers the text model has, without those for multi-token prediction.

    Raises:
      ConfigError: `config.json` doesn't say.
    """
    for _, part in reversed(text_parts(config)):
        if key := next((key for key in LAYERS if part.get(key) is not None), None):
            return Config(part).size(key)
    raise ConfigError(f"config.json has no {LAYERS[0]!r}")


class Axis(NamedTuple):
    """An axis of a tensor that is cut.

    Attributes:
      number: which axis it is.
      size: how many elements of it each expert, token or layer has.
    """

    number: int
    size: int


@dataclasses.dataclass(frozen=True)
class Anatomy:
    """Where they are; names are the table's (`Family.aliases`), patterns fit their beginning.

    Attributes:
      layer: the tensors of a layer, whose number is the first group; of prediction layers too that stand among them.
      expert: the tensors of one expert, whose number is the first group.
      axes: by axis word, the tensors that hold several of them side by side, and on which axis.
      opposed: by axis word, what can't be cut, and why.
      aliases: other spellings.
      family: the table; None without one.
    """

    layer: str
    expert: str = NEVER
    axes: Mapping[str, Mapping[str, Axis]] = dataclasses.field(default_factory=dict)
    opposed: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    family: Family | None = None

    def layer_of(self, name: str) -> int | None:
        """The layer that a tensor belongs to; None of one beside the layers."""
        return _number(self.layer, rename(name, self.aliases))

    def expert_of(self, name: str) -> int | None:
        """The expert that a tensor belongs to alone."""
        return _number(self.expert, rename(name, self.aliases))

    def axis_of(self, word: str, name: str) -> Axis | None:
        """The axis of a tensor's values that has experts, tokens or layers side by side; None where none has."""
        spelled = rename(name, self.aliases)
        return next((axis for pattern, axis in self.axes.get(word, {}).items() if re.fullmatch(pattern, spelled)), None)

    def why_not(self, word: str, names: Iterable[str]) -> Iterator[tuple[str, str]]:
        """The tensors that oppose a cut of experts, or of the vocabulary, each with the reason."""
        for name in names:
            for pattern, reason in self.opposed.get(word, {}).items():
                if re.fullmatch(pattern, rename(name, self.aliases)):
                    yield name, reason


def _number(pattern: str, name: str) -> int | None:
    found = re.match(pattern, name)
    return int(found[1]) if found else None


def by_table(family: Family, config: Config, shapes: Shapes) -> Anatomy | None:
    """As a family's table says; None where it doesn't know layers, as the identity. `shapes` are by the table's names.

    Raises:
      ConfigError: `config.json` lacks what the table needs.
    """
    layout = Layout(scan="unscanned" not in family.layouts, mtp=family.mtp, shapes=shapes)
    stacks, dims = family.stacks(config, layout), family.dims(config, layout)
    sources = {stack.source for stack in stacks if "{layer}" in stack.source}
    of_layer = min(sources, key=len, default="")
    if not of_layer or not all(source.startswith(of_layer) for source in sources):
        return None
    prefix = _escaped(of_layer)
    drops = family.drops(config, dataclasses.replace(layout, mtp=False))
    beside = [entry[:-1] for entry, why in drops.items() if isinstance(why, Prediction) and entry.endswith(".*")]
    heads = [prefix % r"\d+", *(rf"{re.escape(entry)}(?:\w+\.)*?\d+\." for entry in beside)]
    head = f"(?:{'|'.join(heads)})"
    rules = [(stack, rule) for stack in stacks for rule in stack.rules if rule.source is not None]
    single = set[str]()
    axes, opposed = defaultdict[str, dict[str, Axis]](dict), defaultdict[str, dict[str, str]](dict)
    for stack, rule in rules:
        below = stack.source.removeprefix(of_layer)
        name = (head if "{layer}" in stack.source else "") + re.escape(f"{below}{rule.source}")
        if rule.name_axes == (EXPERT,):
            single.add(name.partition(r"\{expert\}")[0] + r"(\d+)\.")
            continue
        for word, axis, before in _cut_axes(rule, dims):
            axes[word][name] = axis
            if before > 1:
                opposed[word][name] = f"has no {word} side by side with the next"
        if rule.integer:
            opposed[EXPERT][name] = "holds integers for each token, the numbers of its experts"
    axes[VOCAB] |= dict.fromkeys(map(re.escape, family.copies(config, layout)), Axis(0, 1))
    return Anatomy(prefix % r"(\d+)", "|".join(sorted(single)) or NEVER, axes, opposed, family.aliases, family)


def _cut_axes(rule: Rule, dims: Mapping[str, int]) -> Iterator[tuple[str, Axis, int]]:
    """The axes of a rule's tensor that hold several experts, tokens or layers: `(axis word, axis, product of the words'
    sizes before it on that axis)`.
    """
    for at, words in enumerate(rule.axes.left[len(rule.name_axes) :]):
        sizes = [size_of(word, rule, dims) for word in words]
        for place, word in enumerate(words):
            if word in (EXPERT, VOCAB, LAYER):
                yield word, Axis(at, math.prod(sizes[place + 1 :])), math.prod(sizes[:place])


def _escaped(prefix: str) -> str:
    """A stack's prefix as a pattern, with `%s` for the layer's number."""
    return re.escape(prefix).replace("%", "%%").replace(r"\{layer\}", "%s")


def by_names(names: Iterable[str], count: int) -> Anatomy:
    """As names tell: where only one kind of thing is numbered, and there are as many as `config.json` has layers.

    Raises:
      ConfigError: several kinds are, or others.
    """
    found: dict[str, set[int]] = defaultdict(set)
    for name in names:
        before, _, after = re.sub(r"(^|\.)(\d+)(?=\.|$)", r"\1\0\2", name, count=1).partition("\0")
        if after:
            found[before].add(int(after.partition(".")[0]))
    if len(found) != 1:
        kinds = ", ".join(f"{before}*" for before in sorted(found)[:4]) or "nothing"
        raise ConfigError(
            f"there is no table for this model, and which of its tensors are its layers' names leave open: numbered are {kinds}; --family names a table"
        )
    ((prefix, numbers),) = found.items()
    if len(numbers) < count or not numbers.issuperset(range(count)):
        raise ConfigError(
            f"there is no table for this model, and {prefix}* has {len(numbers)} numbers where config.json has {count} layers"
        )
    return Anatomy(re.escape(prefix) + r"(\d+)\.")


# --- the blocks that MaxText stacks layers in -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The place of each layer in MaxText's stacks.

    Attributes:
      places: by layer, something that is the same for layers at the same place of a block, with the same arrays.
      length: of a block.
    """

    places: Mapping[int, Collection[object]]
    length: int


def blocks_of(family: Family, config: Config, shapes: Shapes, scan: bool) -> Blocks:
    """The blocks of a family's stacks.

    Raises:
      ConfigError: `config.json` isn't of a model that MaxText has.
    """
    layout = Layout(scan=scan, mtp=family.mtp, shapes=shapes)
    family.dims(config, layout)
    places, stacked = defaultdict[int, set[object]](set), set[object]()
    for stack in family.stacks(config, layout):
        held = frozenset((rule.target, rule.source) for rule in stack.rules)
        for index, layer in stack.places if "{layer}" in stack.source else ():
            place = (stack.target, *index[1:], held) if index else held  # one that isn't stacked is what it holds
            places[layer].add(place)
            stacked |= {place} if index else set()
    return Blocks(places, len(stacked))
