"""Loads straight onto a mesh, against what one would write by hand and against stock Orbax:

    python -m benchmarks.mesh_load --folder out/bench --layers 2 --rounds 3 --json benchmarks/results.json

A Llama-like and a MoE-like checkpoint of about 0.9 GB each (`benchmarks/models.py`; written once), onto 8 simulated CPU
devices with `fsdp` on the embedding axis, in processes of their own, of which the seconds from before the load until
all arrays are there count (JAX is imported and has its devices by then). One after the other in each round, the files
in the page cache:

- *weightbeam.load*: MaxText's arrays.
- *by hand*: one thread preads each tensor; numpy transposes it into its place of a stacked array; `jax.make_array_from_callback` cuts that.
  The same device work, and the same arrays.
- *stock Orbax*, once: `ocp.load` of the files' own tensors with shardings that cut the same axis. No transposition, nothing stacked.

*Beyond the arrays* is the peak of a process's memory less its memory before the load and less the arrays, which lie in
it, too. *Bytes read* are `rchar` of /proc/self/io, of each of 1, 2 and 4 processes with 8 devices between them, by an
Nth of the tensors' bytes. *Programs* are what XLA compiles for a model of DeepSeek-V3's 61 layers and small sizes, in
many steps, by two processes.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import full_size, models
from benchmarks.figures import Figure, make_parser, measure_each, report
from benchmarks.measure import ask, io_counts, medians_of, memory_bytes, take_turns, tell, warm
from benchmarks.models import make_once, make_source
from weightbeam.formats.safetensors import Tensor, open_hf

if TYPE_CHECKING:
    import jax

KINDS = ("llama", "moe")
DEVICES, AXIS = 8, "fsdp"
OURS, BY_HAND, ORBAX = "weightbeam.load", "by hand", "stock Orbax"
TIMES_BY_HAND, MIN_TIMES_ORBAX = 1.3, 5.0
MAX_SHARE = 1.05  # of what a process reads, by an Nth of the model
MAX_BEYOND_BYTES = 1 << 30
MAX_PROGRAMS = 20
PROCESSES = (1, 2, 4)
DEEP = full_size.DEEPSEEK_V3 | dict(
    vocab_size=4096, hidden_size=512, intermediate_size=1024, moe_intermediate_size=256, n_routed_experts=8, num_attention_heads=8, num_key_value_heads=8,
    q_lora_rank=256, kv_lora_rank=128, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, num_nextn_predict_layers=0,
)  # fmt: skip
DEEP_UNIT_BYTES = 16 << 20


# --- one process ------------------------------------------------------------------------------------------------------


def load_once(request: Mapping[str, Any]) -> dict[str, Any]:
    """One load in this process: its seconds, memory, bytes and programs."""
    processes = request["processes"]
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES // processes}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{request['port']}", processes, request["process"])
    programs: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: programs.append(event))
    mesh = jax.make_mesh((DEVICES,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    way = {OURS: load_ours, BY_HAND: load_by_hand, ORBAX: _load_by_orbax}[request["way"]]
    if way is load_ours:
        import weightbeam

        assert weightbeam.load  # imported off the clock, as JAX and Orbax are
    elif way is _load_by_orbax:
        import orbax.checkpoint.experimental.v1  # noqa: F401
    before, read, start = memory_bytes("VmRSS"), io_counts()["rchar"], time.monotonic()
    arrays = jax.block_until_ready(way(request["source"], mesh, request["options"]))
    seconds = time.monotonic() - start
    held = sum(shard.data.nbytes for array in jax.tree.leaves(arrays) for shard in array.addressable_shards)
    return {
        "seconds": seconds,
        "read_bytes": io_counts()["rchar"] - read,
        "array_bytes": held,
        "beyond_bytes": max(0, memory_bytes("VmHWM") - before - held),
        "programs": sum(event.endswith("backend_compile_duration") for event in programs),
    }


def load_ours(source: str, mesh: jax.sharding.Mesh, options: dict[str, Any]) -> Any:
    """What `weightbeam.load` makes."""
    import weightbeam

    return weightbeam.load(source, mesh=mesh, **options)


def _axes(source: str) -> dict[str, tuple[tuple[str, ...], int]]:
    """For each kind of tensor of the benchmark's models, by its name with numbers taken out, its axis words, and the
    axis that `fsdp` cuts.
    """
    shapes = next(shapes for kind, (*_, shapes) in models.MODELS.items() if Path(source).name.startswith(kind))
    return {name: (axes, axes.index("embed") if "embed" in axes else -1) for name, axes in shapes.items()}


def _template(name: str) -> str:
    words = name.split(".")
    numbers = (at for at, word in enumerate(words) if word.isdecimal())
    for at, word in zip(numbers, ("{layer}", "{expert}"), strict=False):
        words[at] = word
    return ".".join(words)


def _spec(mesh: jax.sharding.Mesh, rank: int, axis: int) -> jax.sharding.NamedSharding:
    """Cuts a matrix along one of its axes; vectors lie on each device."""
    from jax.sharding import NamedSharding, PartitionSpec

    return NamedSharding(mesh, PartitionSpec(*(AXIS if at == axis else None for at in range(rank))))


def load_by_hand(source: str, mesh: jax.sharding.Mesh, options: dict[str, Any]) -> Any:
    """The same arrays as one would make them by hand."""
    import jax

    axes = _axes(source)
    groups: dict[str, list[Tensor]] = {}
    for shard in open_hf(source).shards:
        for tensor in shard.tensors:
            groups.setdefault(_template(tensor.name), []).append(tensor)
    made = {}
    files: dict[str, int] = {}
    for template, tensors in groups.items():
        words, _ = axes[template]
        layers = 1 + max((int(tensor.name.split(".")[2]) for tensor in tensors if "{layer}" in template), default=0)
        shape = tensors[0].shape[::-1] if "embed_tokens" not in template else tensors[0].shape
        stacked = shape if "{layer}" not in template else (shape[0], layers, *shape[1:])
        if "{expert}" in template:
            stacked = (len(tensors) // layers, layers, *shape)
        array = np.empty(stacked, tensors[0].dtype)
        for tensor in tensors:
            file = files.setdefault(tensor.path, os.open(tensor.path, os.O_RDONLY))
            values = np.empty(tensor.shape, tensor.dtype)
            assert os.preadv(file, [memoryview(values.view(np.uint8).reshape(-1))], tensor.offset) == values.nbytes
            numbers = [int(word) for word in tensor.name.split(".") if word.isdecimal()]
            if "{expert}" in template:
                array[numbers[1], numbers[0]] = values.T
            elif "{layer}" in template:
                array[:, numbers[0]] = values.T
            else:
                array[...] = values if array.shape == values.shape else values.T
        word = "embed" if len(words) > 1 else None
        turned = words[::-1] if "embed_tokens" not in template else words
        at = (
            -1
            if word is None
            else turned.index(word) + (array.ndim - len(words) if "{expert}" in template or turned.index(word) else 0)
        )
        made[template] = jax.make_array_from_callback(
            array.shape, _spec(mesh, array.ndim, at), lambda index, array=array: array[index]
        )
    for file in files.values():
        os.close(file)
    return made


def _load_by_orbax(source: str, mesh: jax.sharding.Mesh, options: dict[str, Any]) -> Any:
    import jax
    from orbax.checkpoint.experimental import v1 as ocp

    axes = _axes(source)
    abstract = {
        tensor.name: jax.ShapeDtypeStruct(
            tensor.shape,
            tensor.dtype,
            sharding=_spec(mesh, len(tensor.shape), axes[_template(tensor.name)][1] if len(tensor.shape) > 1 else -1),
        )
        for shard in open_hf(source).shards
        for tensor in shard.tensors
    }
    with ocp.Context(checkpoint_layout=ocp.options.CheckpointLayout.SAFETENSORS):
        return ocp.load(source, abstract)


# --- all processes ----------------------------------------------------------------------------------------------------


def load(way: str, source: Path, processes: int = 1, **options: Any) -> list[dict[str, Any]]:
    """A load by so many processes: what each tells."""
    warm(sorted(source.glob("*.safetensors")))
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    request = {"way": way, "source": str(source.resolve()), "options": options, "processes": processes, "port": port}
    requests = [json.dumps(request | {"process": number}) for number in range(processes)]
    with ThreadPoolExecutor(processes) as pool:
        return list(pool.map(lambda one: ask("benchmarks.mesh_load", "--request", one), requests))


def measure(kind: str, folder: Path, layers: int, rounds: int) -> tuple[list[Figure], dict[str, Any]]:
    """The figures of one model, and every single load."""
    source = make_source(kind, folder, layers)
    stored = sum(tensor.nbytes for shard in open_hf(source).shards for tensor in shard.tensors)
    loads = take_turns(kind, rounds, {way: lambda way=way: load(way, source)[0] for way in (OURS, BY_HAND)})
    loads |= take_turns(kind, 1, {ORBAX: lambda: load(ORBAX, source)[0]})  # it takes longer than all the others
    shared = {processes: load(OURS, source, processes) for processes in PROCESSES}
    shares = {count: max(one["read_bytes"] for one in told) * count / stored for count, told in shared.items()}
    tell(kind, ", ".join(f"{count}: {share:.3f}" for count, share in shares.items()))
    seconds = medians_of(loads)
    times_orbax = seconds[ORBAX] / seconds[OURS]
    beyond = max(one["beyond_bytes"] for one in loads[OURS])
    figures = [Figure(f"load, {way}", kind, seconds[way], "s") for way in (BY_HAND, ORBAX)]
    figures += [
        Figure("load", kind, seconds[OURS], "s", TIMES_BY_HAND * seconds[BY_HAND], f"{TIMES_BY_HAND} × by hand"),
        Figure("load, times as fast as stock Orbax", kind, times_orbax, "×", MIN_TIMES_ORBAX, at_least=True),
        Figure("load, memory beyond the arrays", kind, beyond, "bytes", MAX_BEYOND_BYTES),
    ]
    for count, share in shares.items():
        limit = MAX_SHARE, f"{MAX_SHARE} × 1/{count}"
        figures.append(Figure(f"load, bytes read by each of {count}", kind, share, "×", *limit))
    return figures, {"layers": layers, "tensor_bytes": stored, "loads": loads, "processes": shared}


def measure_programs(folder: Path) -> tuple[list[Figure], dict[str, Any]]:
    """How many programs a deep model takes."""
    source = make_once(folder / "deep", lambda unfinished: full_size.write(DEEP, 2, unfinished))
    told = load(OURS, source, 2, unit_bytes=DEEP_UNIT_BYTES)
    programs = max(one["programs"] for one in told)
    return [Figure("load, compiled programs", "61 layers", programs, limit=MAX_PROGRAMS)], {"processes": told}


def main() -> None:
    """Measures both models and prints the table."""
    parser = make_parser(__doc__, layers=2, rounds=3)
    parser.add_argument("--request", help=argparse.SUPPRESS)  # one process of a load
    args = parser.parse_args()
    if args.request:
        print(json.dumps(load_once(json.loads(args.request))))
        return
    figures, details = measure_each(KINDS, lambda kind: measure(kind, args.folder, args.layers, args.rounds))
    programs, details["programs"] = measure_programs(args.folder)
    report("mesh_load", figures + programs, details, args)


if __name__ == "__main__":
    main()
