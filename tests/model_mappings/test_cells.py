"""Cells and pieces against plain numpy: random tables, every element of every array and of every tensor."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored import boxes

from weightbeam.model_mappings.boxes import whole
from weightbeam.model_mappings.cells import Part, pattern
from weightbeam.model_mappings.rules import Segment, rule, stack

QUICK = settings(max_examples=200, deadline=None)
FILL = -1  # no element of a tensor


@dataclasses.dataclass(frozen=True)
class Table:
    """One random rule in one random stack, and its tensors; every element of all of them is another number."""

    left: list[list[str]]  # without the name axes
    right: list[list[str]]
    named: list[str]
    sizes: dict[str, int]  # in the tensors
    segments: dict[str, Segment]
    window: tuple[slice, ...]
    layers: np.ndarray
    scan_axis: int
    tensors: dict[str, np.ndarray]

    @property
    def part(self) -> Part:
        left = " ".join([*self.named, *map(_axis, self.left)])
        cuts = ", ".join(_bounds(cut) for cut in self.window)
        name = "w" + "".join(f".{{{axis}}}" for axis in self.named) + (f"[{cuts}]" if cuts else "")
        line = rule("kernel", name, f"{left} -> {' '.join(map(_axis, self.right))}", "", **self.segments)
        return Part(
            stack("decoder", "layer{layer}.", self.layers, [line], " ".join("ab"[: self.layers.ndim])),
            line[0],
            self.sizes,
            self.scan_axis,
        )

    def total(self, factor: str) -> int:
        """The size of a factor in the array."""
        return self.segments[factor].total if factor in self.segments else self.sizes[factor]

    def tensor(self, layer: int, name: tuple[int, ...]) -> np.ndarray:
        return self.tensors[".".join(map(str, [f"layer{layer}.w", *name]))]

    def layer(self, number: int) -> np.ndarray:
        """What one layer makes, by numpy alone: stack the experts, split, transpose, pad, merge."""
        names = list(np.ndindex(*(self.sizes[axis] for axis in self.named)))
        flat = [*self.named, *itertools.chain(*self.left)]
        split = np.stack([self.tensor(number, name)[self.window] for name in names]).reshape(
            [self.sizes[factor] for factor in flat]
        )
        order = list(itertools.chain(*self.right))
        padded = np.full([self.total(factor) for factor in order], FILL)
        inside = {
            factor: slice(segment.start, segment.start + segment.size) for factor, segment in self.segments.items()
        }
        padded[tuple(inside.get(factor, slice(None)) for factor in order)] = split.transpose(
            [flat.index(factor) for factor in order]
        )
        return padded.reshape([math.prod(self.total(factor) for factor in axis) for axis in self.right])

    def array(self) -> np.ndarray:
        """The whole array: the layers' stacked where the scan axis says."""
        at = min(self.scan_axis, len(self.right))
        if self.layers.ndim == 0:
            return self.layer(int(self.layers))
        rows = self.layers if self.layers.ndim == 2 else [self.layers]
        stacked = [np.stack([self.layer(int(number)) for number in row], axis=at) for row in rows]
        return np.stack(stacked, axis=at) if self.layers.ndim == 2 else stacked[0]


def _axis(factors: list[str]) -> str:
    return f"({' '.join(factors)})" if len(factors) > 1 else "".join(factors) or "1"


def _bounds(cut: slice) -> str:
    text = ":".join("" if bound is None else str(bound) for bound in (cut.start, cut.stop, cut.step))
    return text if cut.step is not None else text.rpartition(":")[0]


@st.composite
def grouped(draw, factors):
    """Factors merged to axes at random, with an axis of one here and there."""
    axes: list[list[str]] = [[] for _ in range(draw(st.sampled_from([0, 0, 0, 1])))]
    for factor in factors:
        if not axes or draw(st.booleans()):
            axes.append([])
        axes[-1].append(factor)
    return axes


@st.composite
def windows(draw, size):
    """`(slice, length)` such that the slice of a tensor's axis of this length has `size` elements."""
    if draw(st.booleans()):
        return slice(None, None), size
    start, step = draw(st.integers(0, 2)), draw(st.integers(1, 3))
    stop = start + (size - 1) * step + 1
    length = stop + draw(st.integers(0, 2))
    is_open = len(range(start, length, step)) == size and draw(st.booleans())
    return slice(start or None, None if is_open else stop, step if step > 1 else None), length


@st.composite
def tables(draw):
    names = draw(st.permutations("abcde"[: draw(st.integers(1, 5))]))
    count = draw(st.integers(0, min(2, len(names) - 1)))
    named, free = names[:count], names[count:]
    sizes = {name: draw(st.integers(1, 3)) for name in names}
    segments = {}
    for name in free:
        if draw(st.sampled_from([False, False, True])):
            start, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
            segments[name] = Segment(start, sizes[name], start + sizes[name] + after, fill=float(FILL))
    left, right = draw(grouped(free)), draw(grouped(draw(st.permutations(names))))
    cuts = [draw(windows(math.prod(sizes[name] for name in axis))) for axis in left]
    whole_from = draw(st.integers(0, len(cuts)))  # later axes are whole, and left out of the index
    cuts[whole_from:] = [(slice(None, None), math.prod(sizes[name] for name in axis)) for axis in left[whole_from:]]
    shape = draw(st.sampled_from([(), (1,), (3,), (2, 2), (1, 3)]))
    layers = np.array(draw(st.permutations(range(math.prod(shape) + 2)))[: math.prod(shape)]).reshape(shape)
    tensors, first = {}, 0
    for number in layers.ravel():
        for name in np.ndindex(*(sizes[axis] for axis in named)):
            lengths = [length for _, length in cuts]
            tensors[".".join(map(str, [f"layer{number}.w", *name]))] = np.arange(
                first, first := first + math.prod(lengths)
            ).reshape(lengths)
    window = tuple(cut for cut, _ in cuts[:whole_from])
    return Table(left, right, named, sizes, segments, window, layers, draw(st.integers(0, 4)), tensors)


@st.composite
def grids(draw, shape):
    """The boxes of a chunk grid over an array."""
    chunks = [draw(st.integers(1, size)) for size in shape]
    return list(
        itertools.product(
            *(
                [(at, min(at + chunk, size)) for at in range(0, size, chunk)]
                for size, chunk in zip(shape, chunks, strict=True)
            )
        )
    )


@QUICK
@given(tables())
def test_pieces_make_the_array(assemble, table):
    """All pieces of all cells make what numpy's reshape, transpose, pad and stack make; shape and path as said."""
    part, expected = table.part, table.array()
    made = np.full(part.shape, FILL)
    assemble(part, table.tensors, made, whole(part.shape))
    assert part.path == "params/decoder/kernel"
    np.testing.assert_array_equal(made, expected, strict=True)


@QUICK
@given(tables(), st.data())
def test_pieces_of_a_box_make_that_box(assemble, table, data):
    """Any box of the array can be made alone, from the boxes of the tensors that its pieces name and nothing else."""
    part = table.part
    box = data.draw(boxes(part.shape))
    made = np.full([stop - start for start, stop in box], FILL)
    assemble(part, table.tensors, made, box)
    np.testing.assert_array_equal(made, table.array()[tuple(slice(*span) for span in box)], strict=True)


@QUICK
@given(tables(), st.data())
def test_pieces_backward_give_the_tensors_back(table, data):
    """Written back through the same pieces, chunk by chunk, the array gives each tensor's window bit for bit and
    touches nothing else.
    """
    part, array = table.part, table.array()
    back = {name: np.full_like(tensor, FILL) for name, tensor in table.tensors.items()}
    for box in data.draw(grids(part.shape)):
        chunk = array[tuple(slice(*span) for span in box)].copy()
        for piece in (piece for cell in part.cells(box) for piece in cell.pieces(box)):
            values = piece.target.of(chunk, tuple(start for start, _ in box)).transpose(np.argsort(piece.order))
            view = piece.source.of(back[piece.tensor], (0,) * back[piece.tensor].ndim)
            assert view.shape == values.shape
            view[...] = values
    for name, tensor in table.tensors.items():
        expected = np.full_like(tensor, FILL)
        expected[table.window] = tensor[table.window]
        np.testing.assert_array_equal(back[name], expected)


@QUICK
@given(tables(), st.data())
def test_a_box_of_a_tensor_is_read_back_from_the_array_alone(table, data):
    """Read the other way, any box of any tensor comes from the boxes of the array that its pieces name; what no rule
    takes stays.
    """
    part, array = table.part, table.array()
    cell = data.draw(st.sampled_from(list(part.cells())))
    tensor = table.tensors[cell.tensor]
    box = data.draw(boxes(tensor.shape))
    made = np.full([stop - start for start, stop in box], FILL)
    for piece in cell.pieces_back(box, "kernel"):
        assert piece.tensor == "kernel"
        read = array[tuple(slice(*span) for span in piece.source.box)].copy()
        values = piece.source.of(read, tuple(start for start, _ in piece.source.box)).transpose(piece.order)
        target = piece.target.of(made, tuple(start for start, _ in box))
        assert target.shape == values.shape
        target[...] = values
    expected = np.full_like(tensor, FILL)
    expected[table.window] = tensor[table.window]
    np.testing.assert_array_equal(made, expected[tuple(slice(*span) for span in box)])


@QUICK
@given(tables(), st.data())
def test_every_element_once(table, data):
    """Over any chunk grid the pieces make each element of the array once, but for padding, and take each element of
    each window once.
    """
    part = table.part
    made = np.zeros(part.shape, int)
    taken = {name: np.zeros(tensor.shape, int) for name, tensor in table.tensors.items()}
    for box in data.draw(grids(part.shape)):
        for piece in (piece for cell in part.cells(box) for piece in cell.pieces(box)):
            piece.target.of(made, (0,) * made.ndim)[...] += 1
            piece.source.of(taken[piece.tensor], (0,) * taken[piece.tensor].ndim)[...] += 1
    np.testing.assert_array_equal(made, table.array() != FILL)
    for count in taken.values():
        expected = np.zeros_like(count)
        expected[table.window] = 1
        np.testing.assert_array_equal(count, expected)


@QUICK
@given(tables(), st.data())
def test_cells_of_a_box_leave_out_only_what_has_no_share(table, data):
    """The cells that `cells(box)` skips have no piece in the box."""
    part = table.part
    box = data.draw(boxes(part.shape))
    kept = {(cell.layer, cell.name) for cell in part.cells(box)}
    skipped = [cell for cell in part.cells() if (cell.layer, cell.name) not in kept]
    assert not [piece for cell in skipped for piece in cell.pieces(box)]


@QUICK
@given(tables())
def test_source_box_is_the_window(table):
    """`source_box` names the indices that the window takes of each axis of the tensor."""
    for cell in table.part.cells():
        tensor = table.tensors[cell.tensor]
        np.testing.assert_array_equal(tensor[np.ix_(*cell.part.source_box())], tensor[table.window])


def test_axes_that_select_tensors_and_axes_of_a_tensors_axis():
    """`stack_axes`: layers and experts. `axes_of`: where the factors of a tensor's axis went."""
    (line,) = rule("wi", "experts.{expert}.w1[2:]", "expert (heads dim) embed -> embed heads expert dim", "")
    part = Part(stack("", "", [5, 6], [[line]], "layers"), line, dict(expert=2, heads=3, dim=4, embed=5), 1)
    assert part.shape == (5, 2, 3, 2, 4)  # embed layers heads expert dim
    assert part.stack_axes == {1, 3}
    assert [part.axes_of(axis) for axis in range(2)] == [{2, 4}, {0}]


def test_names_of_the_stacked_axes():
    """A stack's words stand where its axes stand, at the end of an array with fewer axes; without names no axis has
    one, the stack's neither.
    """

    def names(words, axes, scan_axis):
        (line,) = rule("wi", "w", axes, words)
        return Part(stack("", "", [0, 1], [[line]], "layers"), line, dict(embed=5, mlp=3), scan_axis).logical_axes

    assert names("embed -", "mlp embed -> embed mlp", 1) == ("embed", "layers", None)
    assert names("norm", "embed", 3) == ("norm", "layers")
    assert names("norm", "embed", 0) == ("layers", "norm")
    assert names("", "mlp embed -> embed mlp", 1) == (None, None, None)


@pytest.mark.parametrize(("axes", "layers"), [("", 0), ("1", 0), ("1", [3, 4])])
def test_tensors_of_one_element(assemble, axes, layers):
    """A scalar, or an axis of one: the views have no axes, and are views all the same."""
    (line,) = rule("scale", "scale", axes, "")
    part = Part(stack("", "{layer}.", layers, [[line]], "layers" if layers else ""), line, {}, 1)
    tensors = {cell.tensor: np.full(part.window_shape, 7) for cell in part.cells()}
    made = np.full(part.shape, FILL)
    assemble(part, tensors, made, whole(part.shape))
    np.testing.assert_array_equal(made, np.full(part.shape, 7))


def test_constant_has_a_cell_without_a_tensor():
    """A rule without a source makes no pieces: its fill makes the array."""
    (line,) = rule("scale", None, "embed", "norm", fill=1.0)
    part = Part(stack("", "", 0, [[line]]), line, dict(embed=5), 1)
    (cell,) = part.cells()
    assert cell.tensor is None
    assert list(cell.pieces(whole(part.shape))) == []


def test_unknown_axis_word():
    """A word that `dims` doesn't define is an error when the table is built."""
    (line,) = rule("wi", "w", "mlp embde -> embde mlp", "")
    with pytest.raises(KeyError, match="embde"):
        Part(stack("", "", 0, [[line]]), line, dict(embed=5, mlp=3), 1)


def test_pattern_takes_the_numbers_out():
    """Names of alike layers and experts are one name."""
    assert pattern("model.layers.12.mlp.experts.3.w1.weight") == "model.layers.*.mlp.experts.*.w*.weight"
