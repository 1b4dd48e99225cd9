"""JAX: codes and scales become values on the devices, with the host's bits."""

# pyright: reportInvalidTypeForm=false
# jax.Device is a variable to pyright.

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from weightbeam.formats.encodings.nibbles import decode_rows
from weightbeam.formats.encodings.scaled import table_of
from weightbeam.pipelines.loading.coded import CODE, SMALLEST, Coded, Form
from weightbeam.pipelines.loading.placing import bits
from weightbeam.pipelines.terminal.errors import Refused

if TYPE_CHECKING:
    import jax
    from jax.sharding import NamedSharding

Devices = tuple["jax.Device", ...]
# one for each program, which is compiled by whoever needs it first
_locks: defaultdict[tuple, threading.Lock] = defaultdict(threading.Lock)


def decoded(
    shares: Mapping[jax.Device, np.ndarray | Coded], dtype: np.dtype, made: np.dtype
) -> dict[jax.Device, np.ndarray | jax.Array]:
    """Shares for devices of this process, with values of `dtype` in place of codes, as arrays of `made`: of `dtype`, or
    of its bits.
    """
    import jax

    coded = {device: share for device, share in shares.items() if isinstance(share, Coded)}
    values: dict[jax.Device, jax.Array] = {}
    for form, devices in alike({device: share.form for device, share in coded.items()}).items():
        program, along = compile_program(devices, form, dtype, made), _along(devices)
        sides = zip(*(coded[device][:2] for device in devices), strict=True)
        with jax.disable_jit(False):  # a compiled program can't run otherwise
            result = program(*(_side_by_side(parts, devices, along) for parts in sides))
        values |= {shard.device: shard.data for shard in result.addressable_shards}
    rest = {device: share for device, share in shares.items() if not isinstance(share, Coded)}
    return {device: values[device] if device in values else rest[device] for device in shares}


def alike(forms: Mapping[jax.Device, Form]) -> dict[Form, Devices]:
    """The devices whose shares one program decodes."""
    return {
        form: tuple(device for device, its in forms.items() if its == form) for form in dict.fromkeys(forms.values())
    }


def compile_program(devices: Devices, form: Form, dtype: np.dtype, made: np.dtype) -> jax.stages.Compiled:
    """The program for shares of a form: codes and scales in, `made` out. It is compiled once, whichever threads ask for
    it.
    """
    with _locks[devices, form, dtype, made]:
        return _compile(devices, form, dtype, made)


@functools.cache
def _compile(devices: Devices, form: Form, dtype: np.dtype, made: np.dtype) -> jax.stages.Compiled:
    """See `compile_program`. A NaN has the host's bits, whatever the device makes of one."""
    import jax
    import jax.numpy as jnp

    runs = [n for count, size in zip(form.scales, form.codes, strict=True) for n in (count, size // count)]
    codes_of_nan = np.flatnonzero(np.isnan(table_of(CODE))).astype(np.uint8)
    nans = on_host(codes_of_nan[np.newaxis], np.ones((1, 1), np.float32), dtype).view(bits(dtype))[0]

    def decode(codes: jax.Array, scales: jax.Array) -> jax.Array:
        meanings = jax.lax.bitcast_convert_type(codes, np.dtype(CODE)).astype(jnp.float32).reshape(runs)
        values = (meanings * jnp.expand_dims(scales, range(1, len(runs), 2))).reshape(codes.shape).astype(dtype)
        values = jax.lax.bitcast_convert_type(values, bits(dtype))
        for code, nan in zip(codes_of_nan, nans, strict=True):
            values = jnp.where(codes == code, nan, values)
        return jax.lax.bitcast_convert_type(values.transpose(form.order), made)

    along = _along(devices)
    arguments = [(form.codes, np.uint8), (form.scales, np.float32)]
    shapes = [
        jax.ShapeDtypeStruct((len(devices) * first, *rest), kind, sharding=along) for (first, *rest), kind in arguments
    ]
    return (
        jax.jit(jax.shard_map(decode, mesh=along.mesh, in_specs=along.spec, out_specs=along.spec))
        .lower(*shapes)
        .compile()
    )


def _along(devices: Devices) -> NamedSharding:
    """Shares side by side along their first axis, one on each device."""
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    return NamedSharding(Mesh(np.array(devices, dtype=object), ("device",)), PartitionSpec("device"))


def _side_by_side(parts: Sequence[np.ndarray], devices: Devices, along: NamedSharding) -> jax.Array:
    import jax

    first, *rest = parts[0].shape
    return jax.make_array_from_single_device_arrays(
        (len(parts) * first, *rest), along, jax.device_put(list(parts), list(devices))
    )


def on_host(codes: np.ndarray, scales: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """What the host makes of rows of codes with a scale each."""
    values = np.empty(codes.shape, dtype)
    decode_rows(codes, table_of(CODE), scales, codes.shape[1], values)
    return values


def check_devices(wanted: Iterable[tuple[Devices, np.dtype]]) -> None:
    """Tries every code with scales of every size, and of them the least and the largest, on the devices of this
    process.

    Raises:
      Refused: a device makes other bits of one than the host.
    """
    import jax

    for devices, dtype in wanted:
        mine = tuple(device for device in devices if device.process_index == jax.process_index())
        if not _have_hosts_bits(mine, dtype):
            raise Refused(
                f"dequantize=device: {mine[0].device_kind} makes other {dtype.name} of FP8 than the host, and so than a conversion; leave it out"
            )


@functools.cache
def _have_hosts_bits(devices: Devices, dtype: np.dtype) -> bool:
    rng = np.random.default_rng(0)
    sizes = [0, SMALLEST, 1, np.finfo(np.float32).max, *np.exp2(rng.uniform(np.log2(SMALLEST), 128, 1020))]
    scales = np.array([*sizes, *(-size for size in sizes)], np.float32)[:, np.newaxis]
    codes = np.tile(np.arange(256, dtype=np.uint8), (len(scales), 1))
    made = decoded(
        dict.fromkeys(devices, Coded(codes, scales, Form(codes.shape, scales.shape, (0, 1)))), dtype, bits(dtype)
    )
    wanted = on_host(codes, scales, dtype).view(bits(dtype))
    return all(np.array_equal(np.asarray(values), wanted) for values in made.values())
