"""JAX: how arrays lie on devices, and the programs that exchange slices and put blocks into their places."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from weightbeam.pipelines.errors import RefusedError
from weightbeam.pipelines.loading.schedule import Block, Layout
from weightbeam.transforms.mesh import Mesh as MeshSizes
from weightbeam.transforms.mesh import MeshError, Rules, axes_in, axes_of, partition_spec

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh, NamedSharding, Sharding


def open_mesh(mesh: Mesh | str, rules: Rules) -> Mesh:
    """The mesh, or the one that `"fsdp=4,tensor=2"` makes of all devices.

    Raises:
      RefusedError: it can't be read, or has another number of devices than there are.
    """
    import jax

    if not isinstance(mesh, str):
        return mesh
    try:
        sizes = MeshSizes.parse(mesh, axes_in(rules))
    except MeshError as e:
        raise RefusedError(str(e).removeprefix("--")) from e
    if sizes.devices != len(jax.devices()):
        raise RefusedError(f"mesh={mesh} has {sizes.devices:,} devices, JAX sees {len(jax.devices()):,}")
    auto = (jax.sharding.AxisType.Auto,) * len(sizes.sizes)
    return jax.make_mesh(tuple(sizes.sizes.values()), tuple(sizes.sizes), axis_types=auto)


def named_sharding(shape: Sequence[int], names: Sequence[str | None], mesh: Mesh, rules: Rules) -> NamedSharding:
    """The sharding that logical axis rules give an array. Mesh axes that the mesh hasn't, or whose size is 1, are left out.

    An axis of the array that doesn't divide evenly isn't sharded.
    """
    from jax.sharding import NamedSharding, PartitionSpec

    spec = []
    for size, assignment in zip(shape, partition_spec(names, rules), strict=True):
        axes = tuple(axis for axis in axes_of(assignment) if mesh.shape.get(axis, 1) > 1)
        divides = size % math.prod(mesh.shape[axis] for axis in axes) == 0
        spec.append((axes[0] if len(axes) == 1 else axes or None) if divides else None)
    return NamedSharding(mesh, PartitionSpec(*spec))


def layout_of(shape: tuple[int, ...], sharding: Sharding) -> tuple[Layout, tuple[jax.Device, ...]]:
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
    return Layout(shape, counts, tuple(device.process_index for device in devices)), devices


@functools.cache
def grid_sharding(devices: tuple[jax.Device, ...], counts: tuple[int, ...]) -> NamedSharding:
    """The devices as a grid of shards, each axis of an array cut into as many; what is left over are replicas."""
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    names = tuple(f"axis{axis}" for axis in range(len(counts)))
    grid = np.array(devices, dtype=object).reshape(*counts, len(devices) // math.prod(counts))
    return NamedSharding(Mesh(grid, (*names, "replica")), PartitionSpec(*names))


def bits(dtype: np.dtype) -> np.dtype:
    """Unsigned integers of the same size, in which programs move values.

    Moved as bfloat16, a NaN can become another one, and a CPU converts the whole target to float32 and back for each block of it.
    """
    return np.dtype(f"u{dtype.itemsize}")


def put(shape: tuple[int, ...], sharding: Sharding, shares: Mapping[jax.Device, np.ndarray], dtype: np.dtype) -> jax.Array:
    """An array of shares, one for each device of this process. On CPUs it may lie in the same memory."""
    import jax

    if not shares:
        return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
    on_devices = jax.device_put(list(shares.values()), list(shares))
    return jax.make_array_from_single_device_arrays(shape, sharding, on_devices)


def empty_arrays(wanted: Sequence[tuple[tuple[int, ...], np.dtype, tuple[jax.Device, ...], tuple[int, ...]]]) -> list[jax.Array]:
    """Arrays of zeros, given as `(shape, dtype, devices, counts)`: one program for all of those whose devices have one order."""
    made: list[jax.Array | None] = [None] * len(wanted)
    orders: dict[tuple[jax.Device, ...], list[int]] = {}
    for number, (_, _, devices, _) in enumerate(wanted):
        orders.setdefault(devices, []).append(number)
    for devices, numbers in orders.items():
        zeros = _zeros(tuple(wanted[number][:2] for number in numbers), tuple(grid_sharding(devices, wanted[number][3]) for number in numbers))
        for number, array in zip(numbers, zeros(), strict=True):
            made[number] = array
    return [array for array in made if array is not None]


@functools.cache
def _zeros(arrays: tuple[tuple[tuple[int, ...], np.dtype], ...], shardings: tuple[NamedSharding, ...]) -> Callable[[], tuple[jax.Array, ...]]:
    import jax
    import jax.numpy as jnp

    return jax.jit(lambda: tuple(jnp.zeros(shape, dtype) for shape, dtype in arrays), out_shardings=shardings)


def place(target: jax.Array | None, block: Block, devices: tuple[jax.Device, ...], shares: Mapping[jax.Device, np.ndarray], dtype: np.dtype) -> jax.Array:
    """Puts a block onto the devices, by an exchange if it needs one, and into the target, which is donated.

    Args:
      target: the array of bits that the block belongs to; None where the block is the whole array, read directly.
      block, devices: what, and where.
      shares: what this process has read of it.
      dtype: of the values.

    Returns:
      The target. A whole array has its dtype, all others are bits, see `settle`.
    """
    to = grid_sharding(devices, block.layout.counts)
    if target is None:
        return put(block.shape, to, shares, dtype)
    start = np.array(block.start, np.int32)
    if block.ways is None:
        return _update(to)(target, put(block.shape, to, _bits_of(shares), bits(dtype)), start)
    return _exchange_and_update(to, block.shape)(target, _slices(block, devices, shares, dtype), start)


def exchange(
    blocks: Sequence[Block], devices: tuple[jax.Device, ...], shares: Sequence[Mapping[jax.Device, np.ndarray]], dtypes: Sequence[np.dtype]
) -> list[jax.Array]:
    """Whole arrays of bits, exchanged in one program. All have the same devices, in one order."""
    to = tuple((grid_sharding(devices, block.layout.counts), block.shape) for block in blocks)
    slices = [_slices(block, devices, mine, dtype) for block, mine, dtype in zip(blocks, shares, dtypes, strict=True)]
    return _exchange(to)(slices)


def _slices(block: Block, devices: tuple[jax.Device, ...], shares: Mapping[jax.Device, np.ndarray], dtype: np.dtype) -> jax.Array:
    """What all devices have read of a block, side by side."""
    assert block.ways is not None
    return put(block.padded_shape, grid_sharding(devices, block.ways), _bits_of(shares), bits(dtype))


def _bits_of(shares: Mapping[jax.Device, np.ndarray]) -> dict[jax.Device, np.ndarray]:
    return {device: values.view(bits(values.dtype)) for device, values in shares.items()}


def _moved(slices: jax.Array, to: NamedSharding, shape: tuple[int, ...]) -> jax.Array:
    """Slices as the target's shares: padding cut off, and the mesh's exchange."""
    import jax

    return jax.lax.with_sharding_constraint(jax.lax.slice(slices, (0,) * len(shape), shape), to)


def _updated(to: NamedSharding) -> Callable[[jax.Array, jax.Array, Any], jax.Array]:
    """Each device's share into its shard, at one place for all of them."""
    import jax
    from jax.sharding import PartitionSpec

    def update(shard: jax.Array, share: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(shard, share, [start[axis] for axis in range(shard.ndim)])

    return jax.shard_map(update, mesh=to.mesh, in_specs=(to.spec, to.spec, PartitionSpec()), out_specs=to.spec, check_vma=False)


# JAX compiles each of these once for each shape of the target and of the block.


@functools.cache
def _update(to: NamedSharding) -> Callable[..., jax.Array]:
    import jax

    return jax.jit(_updated(to), donate_argnums=0)


@functools.cache
def _exchange(to: tuple[tuple[NamedSharding, tuple[int, ...]], ...]) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
    import jax

    def move(slices: Sequence[jax.Array]) -> list[jax.Array]:
        return [_moved(each, *there) for each, there in zip(slices, to, strict=True)]

    return jax.jit(move, out_shardings=[sharding for sharding, _ in to])


@functools.cache
def _exchange_and_update(to: NamedSharding, shape: tuple[int, ...]) -> Callable[..., jax.Array]:
    import jax

    update = _updated(to)
    return jax.jit(lambda target, slices, start: update(target, _moved(slices, to, shape), start), donate_argnums=0)


def settle(arrays: Mapping[str, jax.Array], dtypes: Mapping[str, np.dtype], shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
    """The arrays in their dtypes and shardings, in the buffers in which they lie."""
    import jax

    settled = dict(arrays)
    left = [key for key, array in arrays.items() if array.dtype != dtypes[key]]
    orders: dict[tuple[jax.Device, ...], list[str]] = {}
    for key in left:
        if all(device.platform == "cpu" for device in arrays[key].sharding.device_set):
            shards = [np.asarray(shard.data).view(dtypes[key]) for shard in arrays[key].addressable_shards]
            devices = [shard.device for shard in arrays[key].addressable_shards]
            on_devices = jax.device_put(shards, devices)  # a CPU device takes an array that begins at a cache line as it is
            settled[key] = jax.make_array_from_single_device_arrays(arrays[key].shape, arrays[key].sharding, on_devices)
        else:
            orders.setdefault(tuple(arrays[key].sharding.mesh.devices.flat), []).append(key)
    for keys in orders.values():
        made = [settled.pop(key) for key in keys]
        kinds = tuple(dtypes[key] for key in keys)
        for key, array in zip(keys, _typed(kinds)(made), strict=True):
            settled[key] = array
    return {
        key: jax.make_array_from_single_device_arrays(array.shape, shardings[key], [shard.data for shard in array.addressable_shards])
        for key, array in settled.items()
    }


@functools.cache
def _typed(dtypes: tuple[np.dtype, ...]) -> Callable[..., list[jax.Array]]:
    """Arrays of bits as values, all in one program, in the same memory."""
    import jax

    return jax.jit(lambda arrays: [jax.lax.bitcast_convert_type(array, dtype) for array, dtype in zip(arrays, dtypes, strict=True)], donate_argnums=0)
