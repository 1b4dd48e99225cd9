"""Weights that stay codes: what the scales of a kernel are, by the kernel's own line of the table. Integers only.

A kernel in FP8 has one scale for each block of its tensor. MaxText keeps both: beside `kernel`, the codes, lies
`kernel_scale`, of the same rank and order of axes, inputs and outputs counted in blocks; layers, experts and heads as
they are (AI-Hypercomputer/maxtext, `DenseGeneral` in src/maxtext/layers/linears.py, `RoutedMoE` in layers/moe.py, 0.2.5).
So the relation of the scales is that of the codes, with each factor divided by its share of a block:

    codes     "(heads dim) embed -> embed heads dim"    heads = 2, dim = 256, embed = 256     (512, 256) -> (256, 2, 256)
    a block    1     128   128                          of 128 × 128
    scales    "(heads dim) embed -> embed heads dim"    heads = 2, dim =   2, embed =   2     (  4,   2) -> (  2, 2,   2)

Windows and segments are divided alike: q, k, v and z of a key head lie side by side in blocks as they do in elements. No
family has a line for scales. What isn't whole blocks can't be said so, and is a `BlockError`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from weightbeam.model_mappings.cells import Part, size_of
from weightbeam.model_mappings.ops import Scale
from weightbeam.model_mappings.rules import Rule, Segment, Window

# what MaxText calls such weights (src/maxtext/common/common_types.py, 0.2.5), and numpy the codes
CODES = "float8_e4m3fn"
ARRAY_SUFFIX = "_scale"  # of MaxText's array, behind the name of that of the codes
# the arrays of scales, by their keys or paths; `pre_alpha_scale` of a hyper-connection is a weight beside a weight
SCALES = re.compile(rf"[./](kernel|wi|wi_0|wi_1|wo){ARRAY_SUFFIX}(\.value)?$")
TENSOR_SUFFIX = "_scale_inv"  # of the tensor, as the tables see it, behind the name of the weight


class BlockError(ValueError):
    """The scales of a kernel can't be said as an array in blocks; the message says why."""


def in_square(rank: int, size: int) -> tuple[int, ...]:
    """A block of a tensor of this rank: so many rows and columns, and one index of what comes before."""
    return (1,) * (rank - 2) + (size, size)


def is_scales(rule: Rule) -> bool:
    """Whether a line is one of scales: `scale_rule` made it."""
    return rule.target.endswith(ARRAY_SUFFIX) and (rule.source or "").endswith(TENSOR_SUFFIX)


def kept_parts(part: Part, block: Sequence[int]) -> tuple[Part, Part]:
    """What a line of the table makes of a quantised tensor that stays so: its codes, and its scales.

    Args:
      part: the line, of values.
      block: elements on each axis of a tensor that share a scale.

    Raises:
      BlockError: a block isn't a block of the array, too.
    """
    rule, dims = scale_rule(part.rule, part.dims, block)
    codes = dataclasses.replace(part.rule, ops=())  # (code · scale) · c is code · (scale · c)
    return Part(part.stack, codes, part.dims, part.scan_axis), Part(part.stack, rule, dims, part.scan_axis)


def scale_rule(rule: Rule, dims: Mapping[str, int], block: Sequence[int]) -> tuple[Rule, dict[str, int]]:
    """The line of a kernel's scales, and the sizes of its words, from the line of the kernel.

    Args:
      rule: the kernel's.
      dims: the sizes of the words of the table.
      block: elements on each axis of the kernel's tensor that share a scale.

    Raises:
      BlockError: a block isn't a block of the array, too.
    """
    axes = rule.axes.left[len(rule.name_axes) :]
    if rule.source is None or len(axes) != len(block):
        raise BlockError(f"blocks of {_times(block)} don't lie over it")
    if any(not isinstance(op, Scale) for op in rule.ops):
        raise BlockError("MaxText's weight is shifted, and a shift can't be left to scales")
    shares: dict[str, int] = dict.fromkeys(rule.name_axes, 1)
    for axis, size in zip(axes, block, strict=True):
        shares |= _shares(axis, {word: size_of(word, rule, dims) for word in axis}, size)
    for axis in rule.axes.right:
        _check_axis(axis, {word: _total(word, rule, dims) for word in axis}, shares, block)
    segments = {word: _divided(segment, word, shares[word]) for word, segment in rule.segments.items()}
    sizes = {**dims, **{word: dims[word] // share for word, share in shares.items() if word not in segments}}
    scales = dataclasses.replace(
        rule, target=rule.target + ARRAY_SUFFIX, source=rule.source + TENSOR_SUFFIX, window=_window(rule.window, block),
        segments=segments, fill=None,
    )  # fmt: skip
    return dataclasses.replace(scales, names=_names(scales, sizes)), sizes


def _total(word: str, rule: Rule, dims: Mapping[str, int]) -> int:
    """The size of a factor in the array."""
    return rule.segments[word].total if word in rule.segments else dims[word]


def _times(sizes: Sequence[object]) -> str:
    return " × ".join(map(str, sizes))


def _shares(axis: Sequence[str], sizes: Mapping[str, int], block: int) -> dict[str, int]:
    """Elements of a block along each factor of an axis of a tensor: the last factors are in it whole, one may be cut."""
    left, shares = block, dict.fromkeys(axis, 1)
    for word in reversed(axis):
        shares[word] = math.gcd(sizes[word], left)
        left //= shares[word]
        if left == 1:
            return shares
        if shares[word] != sizes[word]:
            break
    raise BlockError(f"{_named(axis, sizes)} isn't whole blocks of {block}")


def _named(axis: Sequence[str], sizes: Mapping[str, int]) -> str:
    return _times([f"{word} {sizes[word]:,}" for word in axis]) or "an axis of length 1"


def _check_axis(axis: Sequence[str], sizes: Mapping[str, int], shares: Mapping[str, int], block: Sequence[int]) -> None:
    """A block of a tensor's axis must be a range of one axis of the array. Raises BlockError where it is several
    ranges, or lies on several axes, such as heads that are smaller than a block.
    """
    share = math.prod(shares[word] for word in axis)
    if share not in (1, *block):
        can = " or ".join(f"{size:,}" for size in dict.fromkeys((1, *block)))
        message = f"a block of {_times(block)} covers {share:,} of {_named(axis, sizes)}, an axis of MaxText's array; it can cover {can}"
        raise BlockError(message)
    inside = True  # whether all factors so far lie within a block
    for word in reversed(axis):
        if shares[word] > 1 and not inside:
            raise BlockError(f"a block is cut apart in {_named(axis, sizes)}")
        inside = inside and shares[word] == sizes[word]


def _window(window: Window, block: Sequence[int]) -> Window:
    """A window, in blocks. Raises BlockError where it cuts one."""
    divided = []
    for cut, size in zip(window, block, strict=False):
        bounds = [bound for bound in (cut.start, cut.stop) if bound is not None]
        if size > 1 and (cut.step not in (None, 1) or any(bound % size for bound in bounds)):
            raise BlockError(
                f"its window of the tensor, {cut.start or 0}:{cut.stop or ''}:{cut.step or 1}, cuts blocks of {size}"
            )
        start, stop = (None if bound is None else bound // size for bound in (cut.start, cut.stop))
        divided.append(slice(start, stop, cut.step))
    return tuple(divided)


def _divided(segment: Segment, word: str, share: int) -> Segment:
    """A segment, in blocks. Raises BlockError where it cuts one, or there is padding beside it, of which nobody knows
    the scale.
    """
    bounds = (segment.start, segment.size, segment.total)
    if segment.fill is not None or any(bound % share for bound in bounds):
        raise BlockError(
            f"its part of {word}, {segment.start:,} to {segment.start + segment.size:,} of {segment.total:,}, isn't whole blocks of {share}"
        )
    return Segment(*(bound // share for bound in bounds))


def _names(scales: Rule, sizes: Mapping[str, int]) -> tuple[str | None, ...] | None:
    """MaxText's names of the axes: the kernel's, but for those of a linear layer that have one block (`scale_axes` in
    layers/linears.py, 0.2.5; experts keep theirs).
    """
    if scales.names is None or not scales.target.endswith("kernel" + ARRAY_SUFFIX):
        return scales.names
    lengths = [math.prod(_total(word, scales, sizes) for word in axis) for axis in scales.axes.right]
    return tuple(name if n > 1 else None for name, n in zip(scales.names, lengths, strict=True))
