"""`Delta`: the product of two small factors that is added to a weight, or to a part of it.

    tensor[…, i, j] += scaling · D[e, i + row, j + column]        D[e] = B[e] · A[e], or its transpose

A weight that is one tensor in memory may be many in the files (experts), and the other way round, so a delta says where
its matrix lies in the tensor. Factors are tiny beside the weight: a box of it needs the box's rows of B and columns of
A.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from weightbeam.formats.encodings.encoding import Overhead
from weightbeam.formats.safetensors import BoxRead, Tensor
from weightbeam.model_mappings.boxes import Box, Range


@dataclasses.dataclass(frozen=True, slots=True)
class Delta:
    """See the module's text. With A of (rank, in) and B of (out, rank), D is (out, in), or (in, out) if `transposed`.

    Attributes:
      a, b: the factors as they are stored: (experts · rank, in), each expert's rows together, and (out, rank ·
        experts), the experts fastest, as PEFT stores the adapters of fused experts.
      scaling: what the product is multiplied by.
      experts: how many matrices the factors hold.
      expert: for a tensor of two axes: which of them is meant.
      place: for a tensor of three axes: the index on its first axis where the first of them lies.
      offset: row and column of D at the tensor's [0, 0]; negative where D begins within the tensor.
      transposed: whether the tensor's rows are inputs.
    """

    a: Tensor
    b: Tensor
    scaling: float
    experts: int = 1
    expert: int = 0
    place: int = 0
    offset: tuple[int, int] = (0, 0)
    transposed: bool = False

    @property
    def rank(self) -> int:
        return self.a.shape[0] // self.experts

    @property
    def shape(self) -> tuple[int, int]:
        """Of one D."""
        inputs, outputs = self.a.shape[1], self.b.shape[0]
        return (inputs, outputs) if self.transposed else (outputs, inputs)

    def reach(self, shape: tuple[int, ...]) -> Box:
        """The part of a tensor of this shape to which it is added."""
        experts = [(self.place, self.place + self.experts)] if len(shape) == 3 else []
        spans = [*experts, *((-at, size - at) for at, size in zip(self.offset, self.shape, strict=True))]
        return tuple(_overlap(span, (0, size)) for span, size in zip(spans, shape, strict=True))

    def share(self, box: Box) -> DeltaShare | None:
        """What of the factors a box of the tensor needs; None where they don't meet."""
        if len(box) == 3:
            held = _overlap(box[0], (self.place, self.place + self.experts))
            which = (held[0] - self.place, held[1] - self.place)
        else:
            held, which = (0, 1), (self.expert, self.expert + 1)
        meets = [
            _overlap(span, (-at, size - at)) for span, at, size in zip(box[-2:], self.offset, self.shape, strict=True)
        ]
        if any(start >= stop for start, stop in (held, *meets)):
            return None
        rows, columns = ((start + at, stop + at) for (start, stop), at in zip(meets, self.offset, strict=True))
        first = box[0][0] if len(box) == 3 else 0
        return DeltaShare(which, rows, columns, (held[0] - first, meets[0][0] - box[-2][0], meets[1][0] - box[-1][0]))

    def reads(self, share: DeltaShare) -> tuple[BoxRead, BoxRead]:
        """The stored boxes of A and of B."""
        outputs, inputs = (share.columns, share.rows) if self.transposed else (share.rows, share.columns)
        first, last = share.experts
        return BoxRead(self.a, ((first * self.rank, last * self.rank), inputs)), BoxRead(
            self.b, (outputs, (0, self.rank * self.experts))
        )

    def product(self, share: DeltaShare, stored: Sequence[np.ndarray], expert: int) -> Product | None:
        """What `reads` fetched, for one expert of the box; None for one that isn't in the share."""
        first, last = share.experts
        where, row, column = share.at
        number = expert - where
        if not 0 <= number < last - first:
            return None
        a = stored[0][number * self.rank : (number + 1) * self.rank]
        b = stored[1].reshape(len(stored[1]), self.rank, self.experts)[..., first + number]
        left, right = (a.T, b.T) if self.transposed else (b, a)
        scaled = right.astype(np.float32, order="C")
        scaled *= np.float32(self.scaling)
        return Product(left, doubled(scaled, 1), row, column, share.columns[1] - share.columns[0])

    @property
    def overhead(self) -> Overhead:
        """Of a weight to which it is added, beside its own: the factors as they are stored, one of them scaled. A B of
        several experts is read as a whole.
        """
        a, b = self.a.nbytes // self.experts, self.b.nbytes
        shared, own = (b, a) if self.experts > 1 else (0, a + b)
        scaled = self.rank * self.shape[1] * np.dtype(np.float32).itemsize
        return Overhead(shared, own, scaled, self.a.nbytes + b)


@dataclasses.dataclass(frozen=True, slots=True)
class DeltaShare:
    """The part of a delta that lies in a box: ranges of its experts and of D's rows and columns, and where they begin
    in the box.
    """

    experts: Range
    rows: Range
    columns: Range
    at: tuple[int, int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """`left · right`, to be added at [row, column] of a matrix; the first `width` columns of `right` count.

    `left` is as it is stored, and becomes float32 where it is multiplied: it may be much larger than the box.
    """

    left: np.ndarray
    right: np.ndarray
    row: int
    column: int
    width: int

    def add_to(self, values: np.ndarray, first: int) -> None:
        """Adds its share of a strip to `values`, float32: the rows of the box from `first` on.

        The product is made in tiles that OpenBLAS multiplies on the calling thread: its own threads would wait for each
        other where as many workers as cores are busy. An element has the same bits in whatever tile it is made, since
        ranks are summed in blocks that are short enough for OpenBLAS to sum them one after the other, wherever in a tile
        the element lies; on processors with AVX, that is.
        """
        start, stop = max(first, self.row), min(first + len(values), self.row + len(self.left))
        rank, columns = self.right.shape
        parts = -(-columns // (TILE // 4))
        edges = [columns * part // parts for part in range(parts + 1)]
        height = max(1, TILE // -(-columns // parts))
        for top in range(start, stop, height):
            bottom = min(stop, top + height)
            left = doubled(np.ascontiguousarray(self.left[top - self.row : bottom - self.row], np.float32), 0)
            rows = values[top - first : bottom - first]
            for at, end in itertools.pairwise(edges):
                target = rows[:, self.column + at : self.column + min(end, self.width)]
                for low in range(0, rank, RANKS):
                    part = np.matmul(left[:, low : low + RANKS], self.right[low : low + RANKS, at:end])
                    np.add(target, part[: target.shape[0], : target.shape[1]], out=target)


# summed by one product. From 8 on OpenBLAS's routines for AVX2, such as AMD's before Zen 4, have a sum of even and one of
# odd ranks at some places of a tile, and one sum of all at others (OpenMathLib/OpenBLAS, kernel/x86_64/
# sgemm_kernel_8x4_haswell_2.c, `KERNEL_k2m8n4`, ea8eec5); those for AVX-512 differ from 32 on.
RANKS = 6
# elements of one product; above twice as many multiplications OpenBLAS takes more threads (interface/gemm.c)
TILE = (1 << 18) // RANKS


def doubled(factor: np.ndarray, axis: int) -> np.ndarray:
    """The factor, a single row or column of it twice: products of vectors are another routine's, which sums in another
    order.
    """
    return np.repeat(factor, 2, axis) if factor.shape[axis] == 1 else factor


def _overlap(one: Range, other: Range) -> Range:
    return max(one[0], other[0]), min(one[1], other[1])
