"""The notation of the tables: a `Rule` is one line, a `Stack` repeats lines over layers.

    rule("self_attention/query/kernel", "self_attn.q_proj.weight",
         "(heads dim) embed -> embed heads dim", "embed q_heads kv")

reads: this MaxText array, from that Hugging Face tensor, by these axes, and MaxText's logical names of the array's axes
(`-` for an axis that has none). Three refinements, none of them code:

* a *name axis* is an axis whose index is written in the tensor's name: `experts.{expert}.w1.weight` with
  `"expert mlp embed -> expert embed mlp"`, the name axes first on the left;
* a *window* is a numpy index on the tensor: `gate_up_proj[:, :768]`;
* a *segment* is a part of a longer axis of the array: a padded vocabulary, or q, k, v and z side by side.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from weightbeam.model_mappings.axes import Axes
from weightbeam.model_mappings.ops import Op

PARAMS = "params"  # the collection of the parameters
TODO = "TODO"  # marks what a drafted table doesn't know, such as an array's name


@dataclasses.dataclass(frozen=True)
class Segment:
    """The part [start, start + size) of an array's axis of `total`; `fill` pads what no segment covers."""

    start: int
    size: int
    total: int
    fill: float | None = None


def segments(*sizes: int) -> list[Segment]:
    """Parts that lie side by side on one axis.

    Args:
      sizes: of each part, in elements, in their order.

    Returns:
      The parts, for `rule(…, WORD=part)`.

    Example:
      >>> segments(4, 4, 16)[1]
      Segment(start=4, size=4, total=24, fill=None)
    """
    ends = list(itertools.accumulate(sizes))
    return [Segment(end - size, size, ends[-1]) for size, end in zip(sizes, ends, strict=True)]


Window = tuple[slice, ...]  # one slice for each leading axis of the tensor; later axes are whole


def _parse_window(text: str | None, rank: int) -> Window:
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\.\.\.|\d*:\d*(:\d+)?", part) for part in parts):
        raise ValueError(f"can't read the window [{text}]: it takes slices without negative bounds, and ...")
    if "..." in parts:
        at = parts.index("...")
        parts[at : at + 1] = [":"] * (rank - len(parts) + 1)
    if len(parts) > rank:
        raise ValueError(f"the window [{text}] has more axes than the tensor, {rank}")
    return tuple(slice(*(int(bound) if bound else None for bound in part.split(":"))) for part in parts)


@dataclasses.dataclass(frozen=True)
class Rule:
    """One line of a family's table: an array of MaxText's (or a part of one) and the tensor it is made of.

    Attributes:
      target: path of the array below its stack.
      source: name of the tensor below its stack, without the window; None for a constant (see `fill`).
      window: index into the tensor.
      axes: tensor layout -> array layout.
      name_axes: axes whose index is in the tensor's name, in order; they come first on the left of `axes`.
      names: MaxText's logical name of each axis of the array; None where MaxText names none, the stack's axes included.
      ops: value operations, in order.
      segments: by factor, where the array's axis is longer than the tensor's.
      fill: the value of elements that no tensor supplies.
      integer: whether the tensor holds integers that aren't weights; they keep their dtype.
      spare: whether the array repeats another one, for versions of MaxText that look for it there; what is read back is
        the other one.
      padded: the length of the tensor's first axis where the window ends before it: what lies behind is zeros, which no
        array has, and which an export writes again; 0 for none.
    """

    target: str
    source: str | None
    window: Window
    axes: Axes
    name_axes: tuple[str, ...]
    names: tuple[str | None, ...] | None
    ops: tuple[Op, ...]
    segments: Mapping[str, Segment]
    fill: float | None
    integer: bool = False
    spare: bool = False
    padded: int = 0


_SOURCE = re.compile(r"(?P<name>[^\[\]]+)(\[(?P<window>[^\[\]]+)\])?")


def rule(
    target: str,
    source: str | None,
    axes: str,
    names: str,
    *ops: Op,
    when: object = True,
    fill: float | None = None,
    integer: bool = False,
    spare: bool = False,
    padded: int = 0,
    **segments: Segment,
) -> list[Rule]:
    """One line of a table, or none where `when` is false: the rules of a stack are lists that are joined.

    Args:
      target: path of MaxText's array below its stack, with slashes.
      source: name of the tensor below its stack, with a window in brackets where a part of it is meant; None for an array
        that no tensor supplies. `{word}` in it is an axis whose index stands in the name.
      axes: of the tensor and of the array, in the words of the family's `dims`: `"mlp embed -> embed mlp"`. Words in
        parentheses lie on one axis. One side alone stands for both.
      names: MaxText's logical name of each axis of the array, `-` for none; empty where MaxText names none of them.
      ops: what MaxText changes of the values, in order: `Scale`, `Shift`.
      when: whether the model has the line.
      fill: the value of elements that no tensor supplies.
      integer: the tensor holds integers that aren't weights; they keep their dtype.
      spare: the array repeats another one.
      padded: the length of the tensor's first axis where the window ends before it; zeros lie behind.
      segments: by word, the part of a longer axis of the array that the tensor is.

    Returns:
      A list of one rule, or of none.

    Raises:
      ValueError: the line contradicts itself (a typo in the table, never a fault of a checkpoint).

    Example:
      >>> (line,) = rule("mlp/wi_0/kernel", "mlp.up_proj.weight", "mlp embed -> embed mlp", "embed mlp")
      >>> line.axes.left, line.axes.right
      ((('mlp',), ('embed',)), (('embed',), ('mlp',)))
      >>> rule("bias", "mlp.bias", "mlp", "mlp", when=False)
      []
    """
    if not when:
        return []
    parsed = Axes.parse(axes)
    match = _SOURCE.fullmatch(source or "constant")
    if match is None:
        raise ValueError(f"{target}: can't read the source {source!r}")
    name_axes = tuple(re.findall(r"\{(\w+)\}", source or ""))
    if parsed.left[: len(name_axes)] != tuple((axis,) for axis in name_axes):
        raise ValueError(f"{target}: the axes in the tensor's name, {name_axes}, must come first in {axes!r}")
    if unknown := set(segments) - {factor for axis in parsed.right for factor in axis}:
        raise ValueError(f"{target}: {axes!r} has no axis {', '.join(unknown)} that could be a segment")
    logical = tuple(None if name == "-" else name for name in names.split())
    if logical and len(logical) != len(parsed.right):
        raise ValueError(f"{target}: {names!r} names {len(logical)} axes, {axes!r} has {len(parsed.right)}")
    window = _parse_window(match["window"], len(parsed.left) - len(name_axes))
    pad = next((segment.fill for segment in segments.values() if segment.fill is not None), fill)
    return [
        Rule(
            target,
            source and match["name"],
            window,
            parsed,
            name_axes,
            logical or None,
            ops,
            segments,
            pad,
            integer,
            spare,
            padded,
        )
    ]


ABSENT = -1  # stands in a stack's layers where the array has a place and no layer's tensors: zeros


@dataclasses.dataclass(frozen=True)
class Stack:
    """A table repeated over layers.

    Attributes:
      target, source: prefixes of the rules'; `{layer}` in `source` stands for the layer's number.
      layers: Hugging Face's layer numbers, or `ABSENT`; the shape of this integer array *is* the stacked axes (0-d: not
        stacked).
      names: MaxText's logical name of each stacked axis.
      rules: the table.
      collection: the collection of MaxText's variables that the arrays belong to. Only in `params` does the user say on
        which axis layers are stacked; in the others it is the first.
    """

    target: str
    source: str
    layers: np.ndarray
    names: tuple[str | None, ...]
    rules: tuple[Rule, ...]
    collection: str = PARAMS

    def stacked_at(self, scan_axis: int, rank: int) -> int:
        """Where the stacked axes stand.

        Args:
          scan_axis: where the user wants them.
          rank: how many axes the array has without them.

        Returns:
          The number of the first stacked axis.
        """
        return min(scan_axis, rank) if self.collection == PARAMS else 0

    def named_by(self, rename: Callable[[str | None], str | None]) -> Stack:
        """The same with other logical names of the axes.

        Args:
          rename: gives the name for one that the table has, be it None.

        Returns:
          Another stack.
        """
        rules = tuple(
            dataclasses.replace(rule, names=tuple(map(rename, rule.names))) if rule.names else rule
            for rule in self.rules
        )
        return dataclasses.replace(self, rules=rules)

    @property
    def places(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """The place of each layer on the stacked axes, and its number."""
        return ((index, int(layer)) for index, layer in np.ndenumerate(self.layers) if layer != ABSENT)


def stack(
    target: str, source: str, layers: object, table: Sequence[Sequence[Rule]], names: str = "", collection: str = PARAMS
) -> Stack:
    """A table repeated over layers.

    Args:
      target: path of the arrays that the rules' go on from, such as `decoder/layers`.
      source: what the tensors' names begin with; `{layer}` stands for the layer's number.
      layers: the layers' numbers; the shape of this array of integers *is* the stacked axes, a single number stacks
        nothing.
      table: lines, each as `rule` returns it.
      names: MaxText's logical name of each stacked axis.
      collection: of MaxText's variables.

    Returns:
      The stack.

    Raises:
      ValueError: there are more or fewer names than stacked axes.

    Example:
      >>> norms = rule("norm/scale", "norm.weight", "embed", "norm")
      >>> list(stack("decoder/layers", "model.layers.{layer}.", [0, 1], [norms], "layers").places)
      [((0,), 0), ((1,), 1)]
    """
    numbers = np.asarray(layers)
    words = tuple(names.split())
    if len(words) != numbers.ndim:
        raise ValueError(f"{target}: {numbers.ndim} stacked axes, names {words}")
    return Stack(target, source, numbers, words, tuple(itertools.chain(*table)), collection)
