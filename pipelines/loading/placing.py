"""JAX: the programs that exchange slices and put blocks into their places."""

# pyright: reportInvalidTypeForm=false
# jax.Device is a variable to pyright.

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from weightbeam.pipelines.loading.exchange import find_route
from weightbeam.pipelines.loading.mesh import grid_sharding
from weightbeam.pipelines.loading.schedule import ReadBlock

if TYPE_CHECKING:
    import jax
    from jax.sharding import NamedSharding, Sharding

    # of an array or a block, what each device of this process gets, or has already
    Shares = Mapping[jax.Device, np.ndarray | jax.Array]


def bits(dtype: np.dtype) -> np.dtype:
    """Unsigned integers of the same size, in which programs move values.

    Moved as bfloat16, a NaN can become another one, and a CPU converts the whole target to float32 and back for each
    block of it.
    """
    return np.dtype(f"u{dtype.itemsize}")


def put(shape: tuple[int, ...], sharding: Sharding, shares: Shares, dtype: np.dtype) -> jax.Array:
    """An array of shares, one for each device of this process. On CPUs it may lie in the same memory."""
    import jax

    if not shares:
        return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
    on_devices = jax.device_put(list(shares.values()), list(shares))
    return jax.make_array_from_single_device_arrays(shape, sharding, on_devices)


def empty_arrays(
    wanted: Sequence[tuple[tuple[int, ...], np.dtype, tuple[jax.Device, ...], tuple[int, ...]]],
) -> list[jax.Array]:
    """Arrays of zeros, given as `(shape, dtype, devices, counts)`: one program for all of those whose devices have one
    order.
    """
    made: list[jax.Array | None] = [None] * len(wanted)
    orders: dict[tuple[jax.Device, ...], list[int]] = {}
    for number, (_, _, devices, _) in enumerate(wanted):
        orders.setdefault(devices, []).append(number)
    for devices, numbers in orders.items():
        zeros = _zeros(
            tuple(wanted[number][:2] for number in numbers),
            tuple(grid_sharding(devices, wanted[number][3]) for number in numbers),
        )
        for number, array in zip(numbers, zeros(), strict=True):
            made[number] = array
    return [array for array in made if array is not None]


@functools.cache
def _zeros(
    arrays: tuple[tuple[tuple[int, ...], np.dtype], ...], shardings: tuple[NamedSharding, ...]
) -> Callable[[], tuple[jax.Array, ...]]:
    import jax
    import jax.numpy as jnp

    return jax.jit(lambda: tuple(jnp.zeros(shape, dtype) for shape, dtype in arrays), out_shardings=shardings)


def place(
    target: jax.Array | None, block: ReadBlock, devices: tuple[jax.Device, ...], shares: Shares, dtype: np.dtype
) -> jax.Array:
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
    way = _way_of(block, devices)
    return _exchange_and_update(way)(target, _slices(block, way, shares, dtype), start)


def exchange(
    blocks: Sequence[ReadBlock], devices: tuple[jax.Device, ...], shares: Sequence[Shares], dtypes: Sequence[np.dtype]
) -> list[jax.Array]:
    """Whole arrays of bits, exchanged in one program. All have the same devices, in one order."""
    ways = tuple(_way_of(block, devices) for block in blocks)
    return _exchange(ways)([_slices(*each) for each in zip(blocks, ways, shares, dtypes, strict=True)])


@dataclasses.dataclass(frozen=True)
class _Way:
    """How slices become shares.

    Attributes:
      steps: shardings, from that of the slices to that of the shares.
      shape: of all shares; the slices may be padded.
    """

    steps: tuple[NamedSharding, ...]
    shape: tuple[int, ...]

    def go(self, slices: jax.Array) -> jax.Array:
        """Traced: slices in, shares out."""
        import jax

        to = self.steps[-1]
        padded = [axis for axis, (size, true) in enumerate(zip(slices.shape, self.shape, strict=True)) if size != true]
        # then each device cuts the padding off for itself
        whole_at_last = all(to.spec[axis] is None for axis in padded)
        moved = slices if whole_at_last else self._unpadded(slices)
        for step in self.steps[1:]:
            moved = jax.lax.with_sharding_constraint(moved, step)
        return self._unpadded(moved) if whole_at_last else moved

    def _unpadded(self, array: jax.Array) -> jax.Array:
        import jax

        return jax.lax.slice(array, (0,) * len(self.shape), self.shape)


@functools.cache
def _find_way(
    devices: tuple[jax.Device, ...], ways: tuple[int, ...], counts: tuple[int, ...], shape: tuple[int, ...]
) -> _Way:
    """The way of `exchange.py` as shardings; XLA's own where there is none."""
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    to = grid_sharding(devices, counts)
    route = find_route(ways, counts, len(devices))
    if route is None:
        return _Way((grid_sharding(devices, ways), to), shape)
    mesh = Mesh(
        np.array(devices, dtype=object).reshape(route.sizes),
        tuple(f"digit{digit}" for digit in range(len(route.sizes))),
    )
    steps = [
        NamedSharding(mesh, PartitionSpec(*(tuple(f"digit{digit}" for digit in digits) or None for digits in step)))
        for step in route.steps
    ]
    return _Way((*steps, to), shape)


def _way_of(block: ReadBlock, devices: tuple[jax.Device, ...]) -> _Way:
    assert block.ways is not None
    return _find_way(devices, block.ways, block.layout.counts, block.shape)


def _slices(block: ReadBlock, way: _Way, shares: Shares, dtype: np.dtype) -> jax.Array:
    """What all devices have read of a block, side by side."""
    return put(block.padded_shape, way.steps[0], _bits_of(shares), bits(dtype))


def _bits_of(shares: Shares) -> Shares:
    """Those that a device has decoded are bits already."""
    return {
        device: values if values.dtype == bits(values.dtype) else values.view(bits(values.dtype))
        for device, values in shares.items()
    }


def _updated(to: NamedSharding) -> Callable[[jax.Array, jax.Array, Any], jax.Array]:
    """Each device's share into its shard, at one place for all of them."""
    import jax
    from jax.sharding import PartitionSpec

    def update(shard: jax.Array, share: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(shard, share, [start[axis] for axis in range(shard.ndim)])

    return jax.shard_map(
        update, mesh=to.mesh, in_specs=(to.spec, to.spec, PartitionSpec()), out_specs=to.spec, check_vma=False
    )


# JAX compiles each of these once for each shape of the target and of the block.


@functools.cache
def _update(to: NamedSharding) -> Callable[..., jax.Array]:
    import jax

    return jax.jit(_updated(to), donate_argnums=0)


@functools.cache
def _exchange(ways: tuple[_Way, ...]) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
    import jax

    return jax.jit(
        lambda slices: [way.go(each) for way, each in zip(ways, slices, strict=True)],
        out_shardings=[way.steps[-1] for way in ways],
    )


@functools.cache
def _exchange_and_update(way: _Way) -> Callable[..., jax.Array]:
    import jax

    update = _updated(way.steps[-1])
    return jax.jit(lambda target, slices, start: update(target, way.go(slices), start), donate_argnums=0)


def settle(
    arrays: Mapping[str, jax.Array], dtypes: Mapping[str, np.dtype], shardings: Mapping[str, Sharding]
) -> dict[str, jax.Array]:
    """The arrays in their dtypes and shardings, in the buffers in which they lie, but for those that a sharding wants in
    another memory than the device's own.
    """
    import jax

    settled = dict(arrays)
    left = [key for key, array in arrays.items() if array.dtype != dtypes[key]]
    orders: dict[tuple[jax.Device, ...], list[str]] = {}
    for key in left:
        if all(device.platform == "cpu" for device in arrays[key].sharding.device_set):
            shards = [np.asarray(shard.data).view(dtypes[key]) for shard in arrays[key].addressable_shards]
            devices = [shard.device for shard in arrays[key].addressable_shards]
            # a CPU device takes an array that begins at a cache line as it is
            on_devices = jax.device_put(shards, devices)
            settled[key] = jax.make_array_from_single_device_arrays(
                arrays[key].shape, arrays[key].sharding, on_devices, dtype=dtypes[key]
            )
        else:
            sharding: Any = arrays[key].sharding  # a NamedSharding
            orders.setdefault(tuple(sharding.mesh.devices.flat), []).append(key)
    for keys in orders.values():
        made = [settled.pop(key) for key in keys]
        kinds = tuple(dtypes[key] for key in keys)
        for key, array in zip(keys, _typed(kinds)(made), strict=True):
            settled[key] = array
    placed: dict[str, jax.Array] = {}
    for key in list(settled):
        array, sharding = settled.pop(key), shardings[key]
        shards = [shard.data for shard in array.addressable_shards]
        kinds = [device.default_memory().kind for device in sharding.addressable_devices]
        if sharding.memory_kind in (None, *kinds) or not kinds:
            placed[key] = jax.make_array_from_single_device_arrays(array.shape, sharding, shards, dtype=dtypes[key])
        else:
            own = sharding.with_memory_kind(kinds[0])
            array = jax.make_array_from_single_device_arrays(array.shape, own, shards, dtype=dtypes[key])
            placed[key] = jax.device_put(array, sharding)
    return placed


@functools.cache
def _typed(dtypes: tuple[np.dtype, ...]) -> Callable[..., list[jax.Array]]:
    """Arrays of bits as values, all in one program, in the same memory."""
    import jax

    return jax.jit(
        lambda arrays: [
            jax.lax.bitcast_convert_type(array, dtype) for array, dtype in zip(arrays, dtypes, strict=True)
        ],
        donate_argnums=0,
    )
