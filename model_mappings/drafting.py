"""The first draft of a family's table, from a release's `config.json` and the names and shapes of its tensors.

Names that differ in the layer's number alone are one line; so are those that differ in the expert's. An axis has the
word of the one size of `config.json` that it equals. What isn't known is marked `TODO`: every target that no shared
fragment has, every axis that two sizes fit or none. A target that a fragment of `blocks.py` has for the same name is put
down, and marked: whether MaxText's layer is like that, headers don't say.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from weightbeam.model_mappings import blocks
from weightbeam.model_mappings.config import Config
from weightbeam.model_mappings.rules import TODO, Rule

WORDS = {  # fields of config.json, and the words that tables have for them
    "vocab_size": "vocab", "hidden_size": "embed", "num_attention_heads": "heads", "num_key_value_heads": "kv", "head_dim": "dim",
    "intermediate_size": "mlp", "num_experts": "expert", "num_local_experts": "expert", "n_routed_experts": "expert",
    "moe_intermediate_size": "moe_mlp", "shared_expert_intermediate_size": "shared_mlp",
}  # fmt: skip
# of other fields those whose names say that they are a size
SIZE = re.compile(r"\w*(_size|_dim|_rank|_width|_heads|_groups|_channels)")
NUMBERED = re.compile(r"(?P<before>.*?\.)(?P<number>\d+)(?P<after>\..+)")
Shapes = Mapping[str, tuple[int, ...]]
FRAGMENTS: Mapping[str, list[list[Rule]]] = {
    "NORMS": blocks.NORMS,
    "attention()": blocks.attention(),
    "attention_biases()": blocks.attention_biases(),
    "gated_mlp()": blocks.gated_mlp(),
}
HEAD = "lm_head.weight"
HELPERS = ("common_drops", "layers", "stack", "text_part", "top")  # of `blocks.py`, that a draft may call
TOP = frozenset({"model.embed_tokens.weight", "model.norm.weight", HEAD})  # of `blocks.top`


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a draft.

    Attributes:
      source: the tensors, with `{expert}` where their names have an expert's number.
      shape: of each.
      experts: how many there are; none where names have no such number.
    """

    source: str
    shape: tuple[int, ...]
    experts: int | None = None


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers that have the same tensors, or the tensors that belong to no layer.

    Attributes:
      prefix: of the names, with `{layer}`; empty for what belongs to no layer.
      layers: their numbers.
      lines: what each of them holds.
    """

    prefix: str
    layers: tuple[int, ...]
    lines: tuple[Line, ...]


@dataclasses.dataclass(frozen=True)
class Draft:
    """A table's first draft.

    Attributes:
      table: the module's text.
      test: that of the test beside it.
      groups: what it was made of.
    """

    table: str
    test: str
    groups: tuple[Group, ...]

    @property
    def open(self) -> int:
        """How many lines of the table wait for an answer."""
        return sum(TODO in line for line in self.table.splitlines())


def sizes_of(config: Config) -> dict[str, tuple[str, int]]:
    """The words that axes may have, each with its field of `config.json` and its size."""
    found = {}
    for field, value in config.items():
        if isinstance(value, int) and not isinstance(value, bool) and value > 1:
            word = WORDS.get(field) or (field if SIZE.fullmatch(field) else "")
            if word:
                found[word] = (field, value)
    return found


def group(shapes: Shapes) -> tuple[Group, ...]:
    """The tensors by layer, layers with the same ones together."""
    layers: dict[str, dict[int, dict[str, tuple[int, ...]]]] = defaultdict(lambda: defaultdict(dict))
    rest = {}
    for name, shape in shapes.items():
        if match := NUMBERED.fullmatch(name):
            layers[match["before"]][int(match["number"])][match["after"][1:]] = shape
        else:
            rest[name] = shape
    groups = [Group("", (), _lines(rest))] if rest else []
    for prefix, numbered in layers.items():
        alike: dict[tuple[Line, ...], list[int]] = defaultdict(list)
        for number, held in sorted(numbered.items()):
            alike[_lines(held)].append(number)
        groups += [Group(f"{prefix}{{layer}}.", tuple(numbers), lines) for lines, numbers in alike.items()]
    return tuple(groups)


def _lines(held: Shapes) -> tuple[Line, ...]:
    """What one layer holds, alike experts as one line."""
    experts: dict[tuple[str, str, tuple[int, ...]], list[int]] = defaultdict(list)
    lines = []
    for name, shape in held.items():
        if match := NUMBERED.fullmatch(name):
            experts[match["before"], match["after"], shape].append(int(match["number"]))
        else:
            lines.append(Line(name, shape))
    for (before, after, shape), numbers in experts.items():
        if sorted(numbers) == list(range(len(numbers))):
            lines.append(Line(f"{before}{{expert}}{after}", shape, len(numbers)))
        else:
            lines += [Line(f"{before}{number}{after}", shape) for number in numbers]
    return tuple(sorted(lines, key=lambda line: line.source))


def readings(size: int, sizes: Mapping[str, tuple[str, int]]) -> list[str]:
    """The axis words that a size may have: those of its own size, and heads times the size of a head."""
    counts = [word for word in sizes if word in ("heads", "kv") or word.endswith("_heads")]
    of_head = [word for word in sizes if word == "dim" or word.endswith("head_dim")]
    found = [word for word, (_, each) in sizes.items() if each == size]
    return found + [
        f"({count} {dim})"
        for count, dim in itertools.product(counts, of_head)
        if sizes[count][1] * sizes[dim][1] == size
    ]


def draft(name: str, config: Mapping[str, object], shapes: Shapes, release: str, known: str = "") -> Draft:
    """The draft of a family.

    Args:
      name: of the family, and of the module.
      config: `config.json`.
      shapes: of the logical tensors.
      release: where they are, for the module's docstring.
      known: the family that takes releases of this `model_type` already.
    """
    text = blocks.text_part(Config(config))
    sizes, groups = sizes_of(text), group(shapes)
    body = [line for number, each in enumerate(groups) for line in _stack(each, number, groups, text, sizes)]
    fields = {word: f'{word}=c.size("{field}")' for word, (field, _) in sizes.items()}
    words = set(re.findall(r"\w+", "\n".join(body))) | (
        {"vocab", "embed"} if any("top(c" in line for line in body) else set()
    )
    used = [said for word, said in fields.items() if word in words]
    kind = config.get("model_type")
    nested = "text_part(c)" if "text_config" in config else "c"
    called = "\n".join([*body, nested, "common_drops("])
    table = _TABLE.format(
        name=name,
        release=release,
        known=f"# model_type {kind!r} is the family {known}'s already: a release of it finds this table by --family\n"
        if known
        else "",
        c=f"\n    c = {nested}" if nested != "c" else "",
        imports=", ".join(sorted(name for name in HELPERS if re.search(rf"\b{name}\(", called))),
        dims=", ".join(used),
        body="\n".join(body),
        kind=kind,
    )
    return Draft(table, _TEST.format(name=name, release=release), groups)


def _stack(
    each: Group, number: int, groups: Sequence[Group], config: Config, sizes: Mapping[str, tuple[str, int]]
) -> Iterator[str]:
    """The lines of the draft that make one group's stack."""
    if not each.prefix:
        yield from _beside_layers(each.lines, sizes)
        return
    alone = [other.prefix for other in groups].count(each.prefix) == 1
    count = config.get("num_hidden_layers")
    ids = f"range({len(each.layers)})" if each.layers == tuple(range(len(each.layers))) else str(list(each.layers))
    if alone and each.layers == tuple(range(count if isinstance(count, int) else -1)):
        ids = 'range(c.size("num_hidden_layers"))'
        target = "decoder/layers"
        why = "is it MaxText's name for this stack?"
    else:
        target, why = f"{TODO}/{number}", "which stack of MaxText's; and say the layers by a field of config.json"
    yield f'        *layers(layout, "{target}", {ids}, [  # {TODO}: {why}'
    yield from (f"            {_rule(line, sizes)}" for line in each.lines)
    yield f'        ], "{each.prefix}"),'


def _beside_layers(lines: Sequence[Line], sizes: Mapping[str, tuple[str, int]]) -> Iterator[str]:
    """Embedding, last norm and head as `blocks.top` has them, where all are there; and a line for whatever else."""
    held = {line.source for line in lines}
    if held >= TOP - {HEAD}:
        yield f"        top(c, layout),  # {TODO}: {', '.join(sorted(TOP & held))} as in Llama; are the values the same?"
        lines = [line for line in lines if line.source not in TOP]
    if lines:
        yield '        stack("", "", 0, ['
        yield from (f"            {_rule(line, sizes)}" for line in lines)
        yield "        ]),"


def _rule(line: Line, sizes: Mapping[str, tuple[str, int]]) -> str:
    """One line of the table: a fragment's where one has this name and fits, else what the shape says."""
    if (found := _like(line, sizes)) is not None:
        fragment, rule = found
        names = " ".join(name or "-" for name in rule.names or ())
        return (
            f'rule("{rule.target}", "{line.source}", "{_text(rule)}", "{names}"),'
            f"  # {TODO}: {fragment} of blocks.py has this name so; does MaxText's layer, and are the values the same?"
        )
    words, doubts, used = [], [], set()
    shape = (*((line.experts,) if line.experts else ()), *line.shape)
    for axis, size in enumerate(shape):
        fitting = readings(size, sizes)
        if len(fitting) == 1 and used.isdisjoint(re.findall(r"\w+", fitting[0])):
            words.append(fitting[0])
            used |= set(re.findall(r"\w+", fitting[0]))
        else:
            words.append(f"{TODO}{axis}_{size}")
            doubts.append(f"{size} is {' or '.join(fitting) or 'no size of config.json'}")
    source = line.source
    if line.experts:
        source = source.replace("{expert}", f"{{{words[0]}}}")
    names = " ".join([TODO] * len(words))
    asked = "; ".join(["the array's path, the order of its axes, their names", *doubts])
    return f'rule("{TODO}/{line.source}", "{source}", "{" ".join(words)}", "{names}"),  # {TODO}: {asked}'


def _like(line: Line, sizes: Mapping[str, tuple[str, int]]) -> tuple[str, Rule] | None:
    """The line that a shared fragment has for a tensor of this name, where the shape is what it says."""
    for fragment, table in FRAGMENTS.items():
        for rule in itertools.chain(*table):
            if rule.source == line.source and _sized(rule, sizes) == line.shape:
                return fragment, rule
    return None


def _sized(rule: Rule, sizes: Mapping[str, tuple[str, int]]) -> tuple[int, ...] | None:
    """The shape of a rule's tensor; None where `config.json` doesn't say a size of it."""
    if not sizes.keys() >= {word for axis in rule.axes.left for word in axis}:
        return None
    return tuple(math.prod(sizes[word][1] for word in axis) for axis in rule.axes.left)


def _text(rule: Rule) -> str:
    """A rule's axes as a table has them."""
    left, right = (_side(side) for side in (rule.axes.left, rule.axes.right))
    return left if left == right else f"{left} -> {right}"


def _side(axes: Iterable[tuple[str, ...]]) -> str:
    return " ".join(axis[0] if len(axis) == 1 else f"({' '.join(axis)})" if axis else "1" for axis in axes)


_TABLE = '''\
"""{name}: a draft from the headers of {release}.

TODO: say what is special of this family, and where you saw it (repository, path, version).
"""

from weightbeam.model_mappings.blocks import {imports}
from weightbeam.model_mappings.family import Family
from weightbeam.model_mappings.rules import rule

{known}
def dims(c, layout):{c}
    return dict({dims})


def stacks(c, layout):{c}
    return [
{body}
    ]


FAMILY = Family(
    name="{name}",
    models={{"TODO-*": ("{kind}",)}},  # TODO: MaxText's names of the models
    dims=dims,
    stacks=stacks,
    drops=common_drops,  # TODO: what is left out on purpose, and why; tied heads and rotary tables are known
    releases="TODO",
    configuration={{}},  # TODO: which field of config.json is which key of MaxText's (see a neighbour); or none, and delete this line
)
'''

_TEST = '''\
"""The table against the headers of {release}, and what headers can't tell."""

from pathlib import Path

from {name} import FAMILY

from weightbeam.model_mappings.config import Layout
from weightbeam.model_mappings.versions import NEWEST
from weightbeam.testing import check_elements, check_family, check_finished, check_sizes_differ, check_tree, read_headers, read_tree

HERE = Path(__file__).parent
CONFIG, TENSORS = read_headers(HERE / "{name}.json")


def test_nothing_is_left_to_do():
    check_finished(HERE / "{name}.py", Path(__file__))


def test_the_table_fits_the_release():
    """Every tensor is used or dropped, every array made whole, in every layout."""
    check_family(FAMILY, CONFIG, TENSORS)


def test_maxtexts_tree():
    """Paths, shapes and logical axes as MaxText builds the model: `weightbeam help contributors_day` says how it is asked."""
    # TODO: write {name}_tree.json.gz, and delete this line
    check_tree(FAMILY, CONFIG, read_tree(HERE / "{name}_tree.json.gz"), Layout(scan=True, maxtext=NEWEST))


def test_a_tiny_model(tmp_path):
    """Element by element, both ways, of a model whose sizes all differ, so that no axis can be taken for another."""
    # TODO: write a tiny model, such as AutoModelForCausalLM.from_config(…).save_pretrained(tmp_path), none of its values 0 or 1, and delete this line
    config, tensors = read_headers(tmp_path)
    check_sizes_differ(FAMILY, config, tensors)
    check_elements(FAMILY, config, tensors)


# TODO: the values: what MaxText computes with the arrays is what transformers computes with the release; delete this line then
'''
