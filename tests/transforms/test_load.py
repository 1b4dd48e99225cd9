"""What a host reads: the arithmetic against every element spelled out, against JAX's shardings, and against the
operating system.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lazily import lazily
from support import BF16

from weightbeam.formats.orbax.zarr import ArraySpec
from weightbeam.transforms.cutting.mesh import Assignment, Mesh
from weightbeam.transforms.cutting.read_cost import Load, effective_ways, load_of, shard_box, total, touched

jax = lazily("jax")

AXES = ("a", "b", "c")


@st.composite
def cases(draw: st.DrawFn) -> tuple[ArraySpec, tuple[Assignment, ...], Mesh]:
    """An array, stored in any chunks and shards, on a mesh of up to 27 devices, whose axes may not divide it."""
    mesh = Mesh("", {name: draw(st.sampled_from([1, 2, 3])) for name in draw(st.permutations(AXES))})
    free = list(draw(st.permutations(AXES)))
    shape, chunk, shard, assignments = [], [], [], []
    for _ in range(draw(st.integers(0, 3))):
        size = draw(st.integers(1, 14))
        part = draw(st.integers(1, size))
        shape.append(size)
        chunk.append(part)
        shard.append(part * draw(st.integers(1, 3)))
        taken = [free.pop() for _ in range(draw(st.integers(0, len(free))))]
        assignments.append(draw(st.sampled_from([tuple(taken), taken[0]])) if len(taken) == 1 else tuple(taken) or None)
    if draw(st.booleans()):
        shard = chunk
    return ArraySpec("x", tuple(shape), BF16, tuple(chunk), tuple(shard)), tuple(assignments), mesh


@settings(max_examples=400, deadline=None)
@given(case=cases())
def test_a_hosts_reads_are_the_chunks_that_hold_its_elements(
    case: tuple[ArraySpec, tuple[Assignment, ...], Mesh],
) -> None:
    """Every element of a host's part, one by one: which chunk it is in, and which shard."""
    spec, assignments, mesh = case
    load = load_of(spec, assignments, mesh)
    assert len(load.needed) == len(load.fetched) == len(load.reads) == mesh.devices
    packed = spec.chunk != spec.shard
    index_bytes = math.prod(s // c for s, c in zip(spec.shard, spec.chunk, strict=True)) * 16 + 4
    for host in range(mesh.devices):
        elements = list(
            itertools.product(*(range(start, stop) for start, stop in shard_box(spec.shape, assignments, mesh, host)))
        )
        chunks, shards = (
            {tuple(at // step for at, step in zip(e, steps, strict=True)) for e in elements}
            for steps in (spec.chunk, spec.shard)
        )
        assert load.needed[host] == 2 * len(elements)
        assert load.reads[host] == len(chunks) + packed * len(shards)
        assert load.fetched[host] == 2 * len(chunks) * math.prod(spec.chunk) + packed * len(shards) * index_bytes


@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_hosts_own_what_jax_gives_them(case: tuple[ArraySpec, tuple[Assignment, ...], Mesh]) -> None:
    """A host's part is that of JAX's `NamedSharding` on a mesh of the same axes; where JAX refuses, the axis isn't cut."""
    spec, assignments, mesh = case
    kept = [
        axes if ways > 1 else None
        for axes, ways in zip(assignments, effective_ways(spec.shape, assignments, mesh), strict=True)
    ]
    sharding = jax.sharding.NamedSharding(
        jax.sharding.AbstractMesh(tuple(mesh.sizes.values()), tuple(mesh.sizes)), jax.sharding.PartitionSpec(*kept)
    )
    boxes = [shard_box(spec.shape, assignments, mesh, host) for host in range(mesh.devices)]
    assert all(tuple(stop - start for start, stop in box) == sharding.shard_shape(spec.shape) for box in boxes)
    covered = np.zeros(spec.shape, int)
    for box in boxes:
        covered[tuple(slice(*span) for span in box)] += 1
    assert (covered == mesh.devices // math.prod(effective_ways(spec.shape, assignments, mesh))).all()


def test_mesh_axes_of_a_tuple_count_from_the_slowest() -> None:
    """As in JAX: over ("b", "a") a step in `a` is a step of one shard, whatever the order of the mesh's axes."""
    mesh = Mesh("", {"a": 2, "b": 3})
    boxes = [shard_box((12,), (("b", "a"),), mesh, host)[0] for host in range(6)]  # hosts: a0b0 a0b1 a0b2 a1b0 …
    assert boxes == [(0, 2), (4, 6), (8, 10), (2, 4), (6, 8), (10, 12)]


def test_the_table_of_the_layout() -> None:
    """Chunks along axis 0 of an array of experts, as MaxText's converter writes them, against chunks for a mesh."""
    shape = (64, 4, 2048, 1408)
    spec = ("expert", None, "fsdp", "tensor")

    def amplification(chunk: tuple[int, ...], **sizes: int) -> float:
        return load_of(ArraySpec("x", shape, BF16, chunk, chunk), spec, Mesh("", sizes)).worst

    by_axis_0, for_fsdp = (4, 4, 2048, 1408), (1, 4, 128, 1408)
    meshes = [dict(fsdp=4), dict(fsdp=16), dict(fsdp=64), dict(expert=16), dict(tensor=8), dict(expert=4, fsdp=4)]
    assert [amplification(by_axis_0, **sizes) for sizes in meshes] == [4, 16, 64, 1, 8, 4]
    assert [amplification(for_fsdp, **sizes) for sizes in meshes] == [1, 1, 4, 1, 8, 1]


def test_loads_add_up() -> None:
    """The worst host of several arrays is a host, not the sum of the worst of each."""
    first, second = (
        Load(np.array([1, 1]), np.array([3, 1]), np.array([3, 1])),
        Load(np.array([1, 1]), np.array([1, 3]), np.array([1, 2])),
    )
    both = total([first, second * 2])
    assert (both.needed.tolist(), both.fetched.tolist(), both.reads.tolist()) == ([3, 3], [5, 7], [5, 5])
    assert (first.worst, both.worst, both.mean) == (3, pytest.approx(7 / 3), 2)


@pytest.mark.parametrize(
    ("size", "step", "ways", "expected"),
    [(12, 3, 4, [1] * 4), (12, 4, 3, [1] * 3), (12, 5, 4, [1, 2, 1, 2]), (10, 4, 1, [3]), (6, 4, 2, [1, 2])],
)
def test_parts_that_shards_touch(size: int, step: int, ways: int, expected: list[int]) -> None:
    """Parts that straddle two shards count for both."""
    assert touched(size, step, ways).tolist() == expected
