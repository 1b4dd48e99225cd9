"""What a host of an fsdp=16 mesh reads of a checkpoint, counted by the operating system:

    python -m benchmarks.load --folder out/load --layers 2 --rounds 5 --json benchmarks/results.json

For a llama-like and a MoE-like checkpoint of about 0.9 GB each (`benchmarks/models.py`; written once), the same arrays
three times:

- *fsdp=16*: `weightbeam convert --mesh fsdp=16`.
- *no mesh*: `weightbeam convert`, for any mesh.
- *axis 0*: in the chunks that MaxText's converter writes on 16 simulated devices: axis 0 in 16 parts, else axis 1 (AI-Hypercomputer/maxtext,
  src/maxtext/checkpoint_conversion/utils/utils.py, `shard_jax_weights`, e591f30), saved by stock Orbax. Without
  compression, so that only the chunks differ; that is why it is zarr 2, the one format for which Orbax 0.12.8 can leave
  it out.

A restore of one host asks for the host's part of every array, as Orbax's `async_deserialize` does: one TensorStore read
for each array, all at once. It runs in a process of its own; devices simulated in one process would share chunks in
flight. Bytes are `rchar` of /proc/self/io from before the checkpoint is opened until all values are there.
TensorStore's file driver reads with pread, so that everything counts, and nothing is mapped; `read_bytes` (from the
disk) is kept too, since the page cache is dropped before every restore. Restores alternate; medians count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import Figure, make_parser, measure_each, report
from benchmarks.measure import WEIGHTBEAM, ask, io_counts, run, tell
from benchmarks.models import MESH, make_once, make_source
from weightbeam.formats.orbax import find_items, open_arrays, read_arrays
from weightbeam.formats.safetensors import open_hf
from weightbeam.model_mappings.boxes import Box
from weightbeam.transforms.cutting.grid import EXPERTS
from weightbeam.transforms.cutting.mesh import Mesh, base_rules, partition_spec
from weightbeam.transforms.cutting.read_cost import load_of, shard_box, total
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import ConvertOptions

HOSTS = 16  # of the mesh
KINDS = ("llama", "moe")
OURS, ANY, AXIS_0 = "fsdp=16", "no mesh", "axis 0"
MAX_AMPLIFICATION = 1.1


def convert(source: Path, folder: Path, *options: str) -> Path:
    """A checkpoint of ours."""
    command = (WEIGHTBEAM, "convert", "--source", source, *options, "--output")
    return make_once(folder, lambda unfinished: run(*command, unfinished)) / "0" / "items"


def save_by_axis_0(items: Path, folder: Path) -> Path:
    """The arrays of a checkpoint as MaxText's converter saves them; in a process with 16 simulated devices."""
    command = (sys.executable, "-m", "benchmarks.load", "--save", items.resolve())
    return make_once(folder, lambda unfinished: run(*command, unfinished.resolve())) / "0" / "items"


def _save(items: Path, folder: Path) -> None:
    os.environ.update(XLA_FLAGS=f"--xla_force_host_platform_device_count={HOSTS}", JAX_PLATFORMS="cpu")
    import jax
    import orbax.checkpoint as ocp
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.sharding.Mesh(jax.devices(), "checkpoint_sharding_axis")

    def put(array: np.ndarray) -> jax.Array:
        cut = next((axis for axis, size in enumerate(np.shape(array)[:2]) if size % HOSTS == 0), None)
        names = () if cut is None else (None,) * cut + ("checkpoint_sharding_axis",)
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*names)))

    tree = jax.tree.map(put, ocp.PyTreeCheckpointer().restore(items))
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False, use_compression=False)
    with ocp.CheckpointManager(folder, item_names=("items",), item_handlers={"items": handler}) as manager:
        manager.save(0, args=ocp.args.Composite(items=ocp.args.PyTreeSave(tree)))


def restore_host(items: Path, boxes: dict[str, Box]) -> dict[str, Any]:
    """Reads boxes of the arrays; returns the seconds, and the growth of this process's counters."""
    before, start = io_counts(), time.monotonic()
    stores = open_arrays(find_items(items))
    reads = [stores[key][tuple(slice(*span) for span in box)].read() for key, box in boxes.items()]
    values = [np.asarray(read.result()) for read in reads]
    seconds, after = time.monotonic() - start, io_counts()
    nbytes = sum(value.nbytes for value in values)
    return {"seconds": seconds, "nbytes": nbytes, **{name: after[name] - before[name] for name in before}}


def cold_restore(items: Path, boxes: dict[str, Box]) -> dict[str, Any]:
    """`restore_host` in a process of its own, nothing of the checkpoint in the page cache."""
    os.sync()
    for path in items.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return ask("benchmarks.load", "--restore", items, said=boxes)


def measure(kind: str, folder: Path, layers: int, rounds: int) -> tuple[list[Figure], dict[str, Any]]:
    """The figures of one model, and every single restore."""
    source = make_source(kind, folder, layers)
    ours = convert(source, folder / f"{source.name}-fsdp", "--mesh", MESH)
    checkpoints = {OURS: ours, ANY: convert(source, folder / f"{source.name}-any")}
    checkpoints[AXIS_0] = save_by_axis_0(ours, folder / f"{source.name}-axis-0")
    mesh = Mesh.parse(MESH)
    arrays = plan_conversion(ConvertOptions(mesh=(MESH,)), open_hf(source)).plan.arrays
    specs = {array.key: partition_spec(array.logical_axes, base_rules()) for array in arrays}
    experts = {array.key for array in arrays if EXPERTS in array.logical_axes}
    restored: dict[str, list[dict[str, Any]]] = {name: [] for name in checkpoints}
    of_experts: dict[str, float] = {}
    for number in range(1, rounds + 1):
        host = number * 5 % HOSTS
        boxes = {array.key: shard_box(array.shape, specs[array.key], mesh, host) for array in arrays}
        for name, items in checkpoints.items():
            restored[name].append(cold_restore(items, boxes))
            if experts and name not in of_experts:
                one = cold_restore(items, {key: boxes[key] for key in experts})
                of_experts[name] = one["rchar"] / one["nbytes"]
        told = ", ".join(f"{name} {runs[-1]['seconds']:.2f} s" for name, runs in restored.items())
        tell(kind, f"round {number} of {rounds}: {told}")

    def median(name: str, what: str) -> float:
        return statistics.median(one[what] for one in restored[name])

    needed = median(OURS, "nbytes")
    most = {OURS: MAX_AMPLIFICATION, ANY: MAX_AMPLIFICATION, AXIS_0: None}
    amplified = {name: median(name, "rchar") / needed for name in most}
    figures = [Figure(f"load amplification, {name}", kind, amplified[name], "×", most[name]) for name in most]
    figures += [Figure(f"of its experts, {name}", kind, of_experts[name], "×", most[name]) for name in of_experts]
    slowest = median(AXIS_0, "seconds")
    for name in (OURS, ANY):
        figures.append(Figure(f"load of one host, {name}", kind, median(name, "seconds"), "s", slowest, AXIS_0))
    figures.append(Figure(f"load of one host, {AXIS_0}", kind, slowest, "s"))
    computed = {}
    for name, items in checkpoints.items():
        stored = [array.spec for array in read_arrays(find_items(items)) if array.spec.key in specs]
        each = {spec.key: load_of(spec, specs[spec.key], mesh) for spec in stored}
        computed[name] = {"all": total(each.values()).worst, "worst array": max(load.worst for load in each.values())}
    return figures, {"needed_bytes": needed, "computed_amplification": computed, "restores": restored}


def main() -> None:
    """Measures all models and prints the table."""
    parser = make_parser(__doc__, "out/load", layers=2)
    parser.add_argument("--restore", type=Path, help=argparse.SUPPRESS)  # the process of one host
    parser.add_argument("--save", type=Path, nargs=2, help=argparse.SUPPRESS)  # the process with simulated devices
    args = parser.parse_args()
    if args.restore:
        print(json.dumps(restore_host(args.restore, json.load(sys.stdin))))
    elif args.save:
        _save(*args.save)
    else:
        figures, details = measure_each(KINDS, lambda kind: measure(kind, args.folder, args.layers, args.rounds))
        report("load", figures, details, args)


if __name__ == "__main__":
    main()
