"""The table of an adapter: what MaxText's LoRA of a model is made of, derived from the model's own table.

MaxText keeps two factors beside each kernel, `kernel_lora_a` (in, rank) and `kernel_lora_b` (rank, out), with the axes
of the kernel's inputs merged into one, those of its outputs into another, and layers stacked as the kernel's are
(AI-Hypercomputer/maxtext, utils/lora_utils.py, e591f30; google/qwix, _src/providers/lora.py). So a line of the model's
table

    "(heads two half) embed -> embed heads (half two)", Scale(c)

gives two lines of the adapter's: A is `"rank embed -> embed rank"`, and B `"(heads two half) rank -> rank (heads half two)", Scale(c)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from weightbeam.model_mappings.axes import Axes
from weightbeam.model_mappings.family import Family
from weightbeam.model_mappings.ops import Scale
from weightbeam.model_mappings.rules import Rule, Stack

RANK = "rank"  # the axis word
INSTEAD = "merge it instead, without --adapter_only"


class NoFactorsError(ValueError):
    """MaxText can't keep two factors beside an array; the message says why."""


@dataclasses.dataclass(frozen=True)
class Factors:
    """Which factors an array's two are made of.

    Attributes:
      tensor: the weight that they are factors of.
      rows: the part of its outputs that the array holds.
    """

    tensor: str
    rows: slice


def name_of(rule: Rule, side: str) -> str:
    """What the tables call a factor of a rule's tensor: each rule has its own, since two windows of one tensor share
    its A.
    """
    return f"{rule.source}[{rule.target}].lora_{side}"


def split_name(name: str) -> tuple[str, str]:
    """The tensor of a factor, and its side, by what `name_of` calls it."""
    tensor, _, rest = name.rpartition("[")
    return tensor, rest[-1]


def factor_rules(rule: Rule) -> tuple[Rule, Rule]:
    """The lines of A and of B.

    Raises:
      NoFactorsError: what MaxText can't hold, or what isn't one product.
    """
    if len(rule.axes.left) != 2 or not rule.target.endswith("kernel"):
        raise NoFactorsError(f"MaxText has no LoRA beside {rule.target}; {INSTEAD}")
    outputs, inputs = rule.axes.left
    ins = [axis for axis in rule.axes.right if axis and set(axis) <= set(inputs)]
    outs = [axis for axis in rule.axes.right if axis and set(axis) <= set(outputs)]
    if rule.segments or ins + outs != [axis for axis in rule.axes.right if axis]:
        raise NoFactorsError(f"{rule.target} is made of several tensors, or has inputs among its outputs; {INSTEAD}")
    if not all(isinstance(op, Scale) for op in rule.ops):
        raise NoFactorsError(
            f"{rule.target} is {', '.join(map(str, rule.ops))}, which no product of factors is; {INSTEAD}"
        )
    if len(rule.window) > 1 and rule.window[1] != slice(None):
        raise NoFactorsError(f"{rule.target} takes a part of its tensor's inputs; {INSTEAD}")

    def merged(axes: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
        return tuple(word for axis in axes for word in axis)

    plain = dataclasses.replace(rule, window=(), names=None, segments={}, fill=None)
    a = Axes(((RANK,), inputs), (merged(ins), (RANK,)))
    b = Axes((outputs, (RANK,)), ((RANK,), merged(outs)))
    return (
        dataclasses.replace(plain, target=f"{rule.target}_lora_a/value", source=name_of(rule, "a"), axes=a, ops=()),
        dataclasses.replace(plain, target=f"{rule.target}_lora_b/value", source=name_of(rule, "b"), axes=b),
    )


def adapter_family(family: Family, stacks: Sequence[Stack], rank: int) -> Family:
    """The family of adapters of this rank, whose table these stacks are in every version of MaxText."""
    return dataclasses.replace(
        family,
        dims=lambda config, layout: {**family.dims(config, layout), RANK: rank},
        stacks=lambda config, layout: [*stacks],
        earlier={},
        drops=lambda config, layout: {},
        aliases={},
    )


@dataclasses.dataclass(frozen=True)
class AdapterTable:
    """The table of an adapter.

    Attributes:
      stacks: its lines, repeated over layers; where layers are stacked, those without an adapter among them.
      factors: by the names that the lines have for A and B, what they are factors of.
      refused: weights that are adapted and that MaxText has no factors for, with the reason.
    """

    stacks: list[Stack]
    factors: Mapping[str, Factors]
    refused: Mapping[str, str]


def adapter_table(stacks: Sequence[Stack], adapted: Collection[str]) -> AdapterTable:
    """The table of an adapter of these weights, by the model's own table."""
    made, factors, refused = [], {}, {}
    seen: dict[str, list[Rule]] = {}
    for stack in stacks:
        for rule in stack.rules:
            seen.setdefault(f"{stack.collection}/{stack.target}/{rule.target}", []).append(rule)
    for stack in stacks:
        rules: list[Rule] = []
        for rule in stack.rules:
            names = _tensors(stack, rule)
            if not (found := [name for name in names if name in adapted]):
                continue
            try:
                if len(seen[f"{stack.collection}/{stack.target}/{rule.target}"]) > 1:
                    raise NoFactorsError(f"{rule.target} is made of several tensors; {INSTEAD}")
                rules += factor_rules(rule)
            except NoFactorsError as e:
                refused |= dict.fromkeys(found, str(e))
                continue
            window = rule.window[0] if rule.window else slice(None)
            for side in "ab":
                template = stack.source + name_of(rule, side)
                of_layers = (
                    (template.format(layer=layer), name) for (_, layer), name in zip(stack.places, names, strict=True)
                )
                factors |= {factor: Factors(name, window) for factor, name in of_layers}
        if rules:
            made.append(dataclasses.replace(stack, rules=tuple(rules)))
    known = refused.keys() | {factor.tensor for factor in factors.values()}
    refused |= {
        name: f"MaxText has no LoRA beside what is made of it, if anything is; {INSTEAD}"
        for name in adapted
        if name not in known
    }
    return AdapterTable(made, factors, refused)


def _tensors(stack: Stack, rule: Rule) -> list[str]:
    """The tensors of a rule, one for each layer; none where experts are tensors of their own, which have no factors
    anyway.
    """
    if rule.source is None or rule.name_axes:
        return []
    return [(stack.source + rule.source).format(layer=layer) for _, layer in stack.places]
