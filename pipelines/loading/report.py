"""What `weightbeam plan --load --mesh …` says: how each array would be read onto a mesh, and what that takes of each
host. Without JAX.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from weightbeam.model_mappings.cells import pattern
from weightbeam.model_mappings.plan import PARAMETERS
from weightbeam.pipelines.loading.release import MappedRelease
from weightbeam.pipelines.loading.schedule import (
    MAX_READERS,
    MIN_REMOTE_RUN,
    MIN_RUN,
    ON_THE_WAY,
    UNIT_BYTES,
    ReadStep,
    ShardLayout,
    make_steps,
    read_bytes,
)
from weightbeam.pipelines.terminal import tables
from weightbeam.pipelines.terminal.errors import Refused
from weightbeam.transforms.cutting.mesh import Assignment, Mesh, axes_of, partition_spec
from weightbeam.transforms.cutting.read_cost import effective_ways, shard_of_host
from weightbeam.transforms.planning.conversion import Conversion, rules_of
from weightbeam.transforms.planning.memory import BASE_BYTES, TENSOR_BYTES

MAX_PLACES = 500_000  # arrays times devices, of a plan: about 20 seconds


def layout_on(shape: tuple[int, ...], assignments: Sequence[Assignment], mesh: Mesh, hosts: int) -> ShardLayout:
    """How a mesh lays an array out whose devices are dealt to hosts in order; an axis that doesn't divide evenly isn't
    sharded.
    """
    counts = effective_ways(shape, assignments, mesh)
    number = np.zeros(mesh.devices, np.int64)
    for count, assignment in zip(counts, assignments, strict=True):
        number = number * count + (shard_of_host(assignment, mesh) if count > 1 else 0)
    order = np.argsort(number, kind="stable")
    return ShardLayout(shape, counts, tuple((order * hosts // mesh.devices).tolist()))


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """A load onto a mesh, planned.

    Attributes:
      mesh, hosts: onto what.
      ways: of each array: `direct`, or `exchanged` between the devices.
      host_bytes: that the first and the last host read; the others read as much.
      arrays_bytes, unit_bytes: of device memory: the arrays on a device, and what a step takes beside them.
      steps: how many there are.
      tensors: of the source.
    """

    mesh: Mesh
    hosts: int
    ways: dict[str, str]
    host_bytes: int
    arrays_bytes: int
    unit_bytes: int
    steps: int
    tensors: int

    @property
    def memory_bytes(self) -> int:
        """Memory of a host's process, beyond what lies on devices; what is read of each tensor is told device by device."""
        shares = 1 + self.mesh.devices // self.hosts
        return BASE_BYTES + (MAX_READERS + ON_THE_WAY) * UNIT_BYTES + shares * TENSOR_BYTES * self.tensors

    def seconds(self, gbps: float) -> float:
        """Until a host with this network, in Gbit/s, has read its share."""
        return self.host_bytes * 8 / (gbps * 1e9)


def plan_load(conversion: Conversion, mesh: Mesh, hosts: int) -> LoadPlan:
    """Plans a load onto a mesh.

    Raises:
      Refused: the devices can't be dealt to so many hosts, or there are too many of them.
    """
    if mesh.devices % hosts:
        raise Refused(
            f"--hosts={hosts}: {mesh.text} has {mesh.devices:,} devices, which so many hosts can't share evenly"
        )
    source, rules = MappedRelease(conversion), rules_of(conversion.options)
    if (places := len(source.arrays) * mesh.devices) > MAX_PLACES:
        raise Refused(
            f"--load: {len(source.arrays):,} arrays on each of the {mesh.devices:,} devices of {mesh.text} are {places:,}, and "
            f"{MAX_PLACES:,} are all that is planned for; name a smaller mesh, or take --scan_layers true, which makes fewer arrays"
        )
    layouts = {
        key: layout_on(array.shape, partition_spec(array.axes, rules), mesh, hosts)
        for key, array in source.arrays.items()
    }
    steps = make_steps(source, layouts, UNIT_BYTES, MIN_REMOTE_RUN if "://" in source.url else MIN_RUN)
    ways = {block.key: "direct" if block.ways is None else "exchanged" for step in steps for block in step.blocks}
    held = sum(math.prod(layout.shard) * source.arrays[key].dtype.itemsize for key, layout in layouts.items())
    return LoadPlan(
        mesh,
        hosts,
        ways,
        max(read_bytes(steps, source, host) for host in {0, hosts - 1}),
        held,
        max(_device_bytes(source, step) for step in steps),
        len(steps),
        conversion.source.array_count,
    )


def _device_bytes(source: MappedRelease, step: ReadStep) -> int:
    """What a step takes of a device: the slices that were read, and what the exchange makes of them."""
    total = 0
    for block in step.blocks:
        slices = 0 if block.ways is None else math.prod(block.slice_shape)
        share = 0 if block.is_whole_direct else math.prod(block.extent)
        total += (slices + share) * source.arrays[block.key].dtype.itemsize
    return total


def load_blocks(conversion: Conversion, plan: LoadPlan, gbps: float) -> Iterator[tables.Block]:
    """What a person sees of it."""
    groups: dict[tuple, list[str]] = defaultdict(list)
    rules = rules_of(conversion.options)
    for array in conversion.plan.arrays:
        over = [
            ",".join(axis for axis in axes_of(axes) if plan.mesh.sizes.get(axis, 1) > 1) or "-"
            for axes in partition_spec(array.logical_axes, rules)
        ]
        groups[pattern(array.key), array.shape, tuple(over), plan.ways[array.key]].append(array.key)
    rows = tables.Table("array", "shape", "sharded over", "read", ">arrays")
    for (_, shape, over, way), keys in groups.items():
        name = keys[0] if len(keys) == 1 else f"{keys[0]} …"
        rows.add_row(name.removeprefix(PARAMETERS), tables.shape_text(shape), " × ".join(over), way, str(len(keys)))
    totals = tables.Table("", "")
    share = plan.host_bytes * plan.hosts / max(1, conversion.source_bytes)
    totals.add_row(
        "reads",
        f"{tables.human(plan.host_bytes)} a host, {share:.3f} × its share of the source, in {tables.count(plan.steps, 'step')}",
    )
    totals.add_row("host memory", f"at most {tables.human(plan.memory_bytes)} beyond the arrays")
    totals.add_row(
        "device memory",
        f"{tables.human(plan.arrays_bytes)} of arrays, and at most {tables.human(plan.unit_bytes)} for a step",
    )
    totals.add_row("time", f"{plan.seconds(gbps):,.1f} s to read at {gbps:g} Gbit/s a host")
    yield from ("", f"loaded onto {plan.mesh.text}, by {tables.count(plan.hosts, 'host')}:", rows, "", totals)


def load_json(plan: LoadPlan, gbps: float) -> dict[str, Any]:
    """What `plan --load --json` adds for a mesh."""
    return {
        "mesh": plan.mesh.text,
        "hosts": plan.hosts,
        "arrays": plan.ways,
        "host_bytes": plan.host_bytes,
        "host_memory_bytes": plan.memory_bytes,
        "device_bytes": plan.arrays_bytes,
        "device_unit_bytes": plan.unit_bytes,
        "steps": plan.steps,
        "seconds": plan.seconds(gbps),
    }
