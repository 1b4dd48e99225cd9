"""JAX: meshes, and how arrays lie on their devices."""

# pyright: reportInvalidTypeForm=false
# jax.Device is a variable to pyright.

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from weightbeam.formats.text.installing import install
from weightbeam.pipelines.loading.schedule import ShardLayout
from weightbeam.pipelines.terminal.errors import Failed, Refused, refusing
from weightbeam.transforms.cutting.mesh import Mesh as MeshSizes
from weightbeam.transforms.cutting.mesh import MeshError, Rules, axes_in, axes_of, partition_spec

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh, NamedSharding, Sharding


def check_jax() -> None:
    """Raises `Refused` where JAX isn't installed."""
    try:
        import jax  # noqa: F401
    except ModuleNotFoundError as e:
        raise Refused(f"JAX is needed for arrays on devices, and {e.name} isn't installed; {install('restore')}") from e


def open_mesh(mesh: Mesh | str, rules: Rules) -> Mesh:
    """The mesh, or the one that `"fsdp=4,tensor=2"` makes of all devices.

    Raises:
      Refused: it can't be read, or has another number of devices than there are.
      Failed: JAX can't open its devices.
    """
    import jax

    if isinstance(mesh, jax.sharding.Mesh):
        return mesh
    if not isinstance(mesh, str):
        raise Refused(f"mesh={mesh!r} should be a jax.sharding.Mesh, or a text such as fsdp=4,tensor=2")
    try:
        devices = len(jax.devices())
    except RuntimeError as e:  # in a job of several processes where one ends meanwhile, too
        raise Failed(f"JAX's devices can't be opened: {e}") from e
    with refusing(MeshError):
        sizes = MeshSizes.parse(mesh, axes_in(rules), devices)
    if sizes.devices != devices:
        raise Refused(f"mesh={mesh} has {sizes.devices:,} devices, JAX sees {devices:,}")
    auto = (jax.sharding.AxisType.Auto,) * len(sizes.sizes)
    return jax.make_mesh(tuple(sizes.sizes.values()), tuple(sizes.sizes), axis_types=auto)


def named_sharding(shape: Sequence[int], names: Sequence[str | None], mesh: Mesh, rules: Rules) -> NamedSharding:
    """The sharding that logical axis rules give an array. Mesh axes that the mesh hasn't, or whose size is 1, are left
    out.

    An axis of the array that doesn't divide evenly isn't sharded.
    """
    from jax.sharding import NamedSharding, PartitionSpec

    spec = []
    for size, assignment in zip(shape, partition_spec(names, rules), strict=True):
        axes = tuple(axis for axis in axes_of(assignment) if mesh.shape.get(axis, 1) > 1)
        divides = size % math.prod(mesh.shape[axis] for axis in axes) == 0
        spec.append((axes[0] if len(axes) == 1 else axes or None) if divides else None)
    return NamedSharding(mesh, PartitionSpec(*spec))


def layout_of(shape: tuple[int, ...], sharding: Sharding) -> tuple[ShardLayout, tuple[jax.Device, ...]]:
    """How a sharding lays an array out, and its devices in the layout's order.

    Raises:
      ValueError: it doesn't cut the array into shards of one shape.
    """
    shard = sharding.shard_shape(shape)
    counts = tuple(size // n if n else 1 for size, n in zip(shape, shard, strict=True))
    places = []
    for order, (device, index) in enumerate(sharding.devices_indices_map(shape).items()):
        at = tuple((cut.start or 0) // n if n else 0 for cut, n in zip(index or (), shard, strict=True))
        places.append((at, order, device))
    places.sort(key=lambda place: place[:2])
    devices = tuple(device for _, _, device in places)
    if len(devices) % math.prod(counts):
        raise ValueError(f"{len(devices)} devices don't hold {math.prod(counts)} shards equally often")
    return ShardLayout(shape, counts, tuple(device.process_index for device in devices)), devices


@functools.cache
def grid_sharding(devices: tuple[jax.Device, ...], counts: tuple[int, ...]) -> NamedSharding:
    """The devices as a grid of shards, each axis of an array cut into as many; what is left over are replicas."""
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    names = tuple(f"axis{axis}" for axis in range(len(counts)))
    grid = np.array(devices, dtype=object).reshape(*counts, len(devices) // math.prod(counts))
    return NamedSharding(Mesh(grid, (*names, "replica")), PartitionSpec(*names))
