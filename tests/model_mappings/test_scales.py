"""The rule of scales against plain numpy: which scale belongs to an element of the array is which belonged to the
element of the tensor that it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightbeam.model_mappings.boxes import whole
from weightbeam.model_mappings.cells import Part
from weightbeam.model_mappings.ops import Scale, Shift
from weightbeam.model_mappings.rules import Segment, rule, segments, stack
from weightbeam.model_mappings.scales import BlockError, kept_parts

DIMS = dict(embed=12, heads=3, dim=8, mlp=16, expert=2, two=2, half=4, key_heads=2)


def part_of(lines, which=0, layers: object = (0, 1), scan_axis=1, dims=DIMS) -> Part:
    table = stack("decoder/layers", "layers.{layer}.", layers, [lines], "layers" if np.ndim(layers) else "")
    return Part(table, lines[which], dict(dims), scan_axis)


def make(part: Part, tensors: dict[str, np.ndarray], array: np.ndarray) -> None:
    """The part's share of an array, of its tensors, element by element as its relation says."""
    for cell in part.cells():
        for piece in cell.pieces(whole(part.shape)):
            source = piece.source.of(tensors[piece.tensor], (0,) * tensors[piece.tensor].ndim)
            target = piece.target.of(array, (0,) * array.ndim)
            target[...] = source.transpose(piece.order)


def check(lines, block: Sequence[int], shapes: Sequence[tuple[int, ...]], **about) -> list[Part]:
    """Every element of every tensor is given the number of its scale; so they get into an array on two ways: spread over
    the elements and then arranged as codes, or arranged as scales and then spread over the array.
    """
    counter = itertools.count()
    pairs = [kept_parts(part_of(lines, which, **about), block) for which in range(len(lines))]
    codes, scales = {}, {}
    for (coded, scaled), shape in zip(pairs, shapes, strict=True):
        for name, stored in zip(coded.tensors, scaled.tensors, strict=True):
            assert stored == f"{name}_scale_inv"
            if name not in codes:
                counts = tuple(n // size for n, size in zip(shape, block, strict=True))
                numbers = np.array([next(counter) for _ in range(int(np.prod(counts)))]).reshape(counts)
                scales[stored], codes[name] = numbers, np.kron(numbers, np.ones(block, int))
    array = np.full(pairs[0][0].shape, -1)
    beside = np.full(pairs[0][1].shape, -1)
    for coded, scaled in pairs:
        assert scaled.path == f"{coded.path}_scale"
        make(coded, codes, array)
        make(scaled, scales, beside)
    assert array.ndim == beside.ndim
    assert min(array.min(), beside.min()) >= 0  # all of them are made
    ratio = [n // count for n, count in zip(array.shape, beside.shape, strict=True)]
    np.testing.assert_array_equal(np.kron(beside, np.ones(ratio, int)), array)
    return [scaled for _, scaled in pairs]


@pytest.mark.parametrize("layers", [(0, 1), 0])
@pytest.mark.parametrize("scan_axis", [0, 1, 2])
@pytest.mark.parametrize(
    ("tensor", "axes", "names", "shape", "expected"),
    [
        ("w", "mlp embed -> embed mlp", "embed mlp", (16, 12), (3, 4)),
        ("w", "(heads dim) embed -> embed heads dim", "embed q_heads kv", (24, 12), (3, 3, 2)),
        ("w", "embed (heads dim) -> heads dim embed", "heads kv embed", (12, 24), (3, 2, 3)),
        ("w", "embed (heads dim) -> (heads dim) embed", "mlp embed", (12, 24), (6, 3)),
        ("experts.{expert}.w", "expert mlp embed -> expert embed mlp", "exp embed_moe mlp_moe", (16, 12), (2, 3, 4)),
    ],
    ids=["transposed", "heads", "heads_in", "merged", "experts"],
)
def test_scales_of_a_line(tensor, axes, names, shape, expected, layers, scan_axis):
    """Inputs and outputs are counted in blocks; layers, heads and experts are as they were."""
    (scaled,) = check(rule("kernel", tensor, axes, names), (4, 4), [shape], layers=layers, scan_axis=scan_axis)
    at = min(scan_axis, len(expected))
    assert scaled.shape == (expected if layers == 0 else (*expected[:at], 2, *expected[at:]))


def test_halves_of_a_head_within_a_block():
    """MaxText interleaves the halves of a rotary embedding: where a block holds a head, that stays within it."""
    line = rule("query/kernel", "q", "(heads two half) embed -> embed heads (half two)", "embed q_heads kv")
    (scaled,) = check(line, (8, 4), [(24, 12)])
    assert scaled.shape == (3, 2, 3, 1)


def test_parts_interleaved_by_key_head():
    """Qwen 3.5's four projections lie side by side by key head, in blocks as in elements."""
    q, k, v, z = segments(4, 4, 8, 8)
    axes = "(key_heads part) embed -> embed (key_heads part)"
    lines = [
        *rule("qkvz/kernel", "qkv[:8]", axes, "embed gdn_head", part=q),
        *rule("qkvz/kernel", "qkv[8:16]", axes, "embed gdn_head", part=k),
        *rule("qkvz/kernel", "qkv[16:]", axes, "embed gdn_head", part=v),
        *rule("qkvz/kernel", "z", axes, "embed gdn_head", part=z),
    ]
    scaled = check(lines, (4, 4), [(32, 12)] * 3 + [(16, 12)])
    assert {part.shape for part in scaled} == {(3, 2, 12)}


def test_windows_of_fused_experts():
    """Gate and up in one tensor of all experts."""
    axes, names = "expert mlp embed -> expert embed mlp", "exp embed_moe mlp_moe"
    for window, start in (("[:, :16]", 0), ("[:, 16:]", 4)):
        (line,) = rule("wi_0", f"gate_up{window}", axes, names)
        _, scaled = kept_parts(part_of([line]), (1, 4, 4))
        assert (scaled.shape, scaled.starts) == ((2, 2, 3, 4), (0, start, 0))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_scales_of_any_line(data: st.DataObject):
    """Whatever the order of the axes: where a rule of scales is given, it is right."""
    words = data.draw(st.lists(st.sampled_from("abcd"), min_size=2, max_size=4, unique=True))
    dims = {word: data.draw(st.sampled_from([1, 2, 3, 4, 6, 8])) for word in words}
    cut = data.draw(st.integers(1, len(words) - 1))
    left = [words[:cut], words[cut:]]
    order = data.draw(st.permutations(words))
    right = [list(group) for group in np.split(order, data.draw(st.sets(st.integers(1, len(order) - 1)).map(sorted)))]
    text = " -> ".join(" ".join(f"({' '.join(axis)})" for axis in side) for side in (left, right))
    shape = tuple(int(np.prod([dims[word] for word in axis])) for axis in left)
    try:
        check(rule("kernel", "w", text, ""), (2, 4), [shape], dims=dims)
    except BlockError:
        return


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (rule("k", "w", "mlp embed -> embed mlp", ""), "embed 12 isn't whole blocks of 8"),
        (rule("k", "w", "(heads half) dim -> dim heads half", ""), "isn't whole blocks"),
        (rule("k", "w", "(heads two half) dim -> dim heads two half", ""), "covers 2 of two 2"),
        (rule("k", "w[:12]", "embed dim -> dim embed", ""), "embed 12 isn't whole blocks of 8"),
        (rule("k", "w[4:12]", "dim mlp -> mlp dim", ""), "its window of the tensor, 4:12:1, cuts blocks of 8"),
        (rule("k", "w[0::2]", "dim mlp -> mlp dim", ""), "its window of the tensor, 0::2, cuts blocks of 8"),
        (rule("k", "w", "dim mlp -> mlp dim", "", dim=Segment(4, 8, 16)), "4 to 12 of 16, isn't whole blocks of 8"),
        (rule("k", "w", "dim mlp -> mlp dim", "", dim=Segment(0, 8, 16, 0.0)), "isn't whole blocks"),
        (rule("k", "w", "dim mlp -> mlp dim", "", Shift(1)), "can't be left to scales"),
        (rule("k", "w", "(mlp two) dim -> dim (two mlp)", ""), "a block is cut apart in two 2 × mlp 16"),
        (rule("k", "w", "dim", ""), "don't lie over it"),
        (rule("k", None, "dim mlp", "", fill=0.0), "don't lie over it"),
    ],
)  # fmt: skip
def test_what_is_not_whole_blocks(line, message):
    """It is said why."""
    with pytest.raises(BlockError, match=message):
        kept_parts(part_of(line), (8, 8))


def test_multiplied_by_a_constant():
    """What MaxText folds into a weight goes to the scales, and the codes stay as they are."""
    codes, scaled = kept_parts(part_of(rule("k", "w", "dim mlp -> mlp dim", "", Scale(0.5))), (8, 8))
    assert (codes.rule.ops, scaled.rule.ops) == ((), (Scale(0.5),))


def test_names_of_axes():
    """An axis of a linear layer with one block isn't sharded; an expert's is asked to be."""
    _, dense = kept_parts(part_of(rule("x/kernel", "w", "dim mlp -> mlp dim", "mlp embed")), (8, 8))
    _, experts = kept_parts(part_of(rule("x/wi_0", "w", "dim mlp -> mlp dim", "mlp embed")), (8, 8))
    assert (dense.logical_axes, experts.logical_axes) == (("mlp", "layers", None), ("mlp", "layers", "embed"))
