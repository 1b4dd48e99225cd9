"""Loads onto one accelerator, against what the files and the link to the device allow:

    python -m benchmarks.accelerator --folder out/bench --layers 16 --rounds 3 --json benchmarks/results.json

Checkpoints of `benchmarks/models.py` (written once, in the page cache), each load in a process of its own, from before
it until the arrays are on the device; JAX is imported and has the device by then. In turn in each round:

- *weightbeam.load*: MaxText's arrays, dequantised where the release is quantised, by the host, and once more by the device.
- *raw*: the files' bytes, read by four threads and put onto the device as they are: no array is made of them.
- *by hand*: each tensor read, transposed and stacked by numpy in one thread, each array then put onto the device (not for FP8).

*Equal* compares all bits on the device with those of a load by the host alone (JAX's CPU device).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from benchmarks.figures import Figure, make_parser, measure_each, report
from benchmarks.measure import ask, medians_of, take_turns, warm
from benchmarks.mesh_load import AXIS, BY_HAND, OURS, load_by_hand, load_ours
from benchmarks.models import make_source

if TYPE_CHECKING:
    import jax

KINDS = ("llama", "moe", "fp8")
RAW, HOST, BY_DEVICE = "raw", "host", "weightbeam.load, decoded by the device"
BLOCK = 64 << 20
THREADS = 4


def load_once(way: str, source: str) -> dict[str, Any]:
    """One load in this process: its seconds, its arrays' bytes and digest, and the device."""
    if way == HOST:
        os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    import weightbeam

    assert weightbeam.load  # imported off the clock
    device = jax.devices()[0]
    jax.block_until_ready(jax.device_put(np.zeros(1 << 20, np.uint8), device))
    mesh = jax.sharding.Mesh(np.array([device]), (AXIS,))
    start = time.monotonic()
    if way == RAW:
        arrays: Any = _put_files(Path(source), device)
    else:
        options = {"dequantize": "device"} if way == BY_DEVICE else {}
        arrays = (load_by_hand if way == BY_HAND else load_ours)(source, mesh, options)
    jax.block_until_ready(arrays)
    seconds = time.monotonic() - start
    leaves = jax.tree.leaves(arrays)
    digest = xxhash.xxh3_64()
    if way in (OURS, BY_DEVICE, HOST):
        for leaf in leaves:
            digest.update(np.ascontiguousarray(np.asarray(leaf)).view(np.uint8).reshape(-1))
    return {
        "seconds": seconds,
        "array_bytes": sum(leaf.nbytes for leaf in leaves),
        "digest": digest.hexdigest(),
        "device": device.device_kind,
    }


def _put_files(folder: Path, device: jax.Device) -> list[jax.Array]:
    import jax

    def put(file: Path, start: int) -> jax.Array:
        with file.open("rb") as f:
            buffer = np.empty(min(BLOCK, file.stat().st_size - start), np.uint8)
            assert os.preadv(f.fileno(), [memoryview(buffer)], start) == buffer.nbytes
        return jax.block_until_ready(jax.device_put(buffer, device))

    blocks = [
        (file, start) for file in sorted(folder.glob("*.safetensors")) for start in range(0, file.stat().st_size, BLOCK)
    ]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(put, *zip(*blocks, strict=True)))


def load(way: str, source: Path) -> dict[str, Any]:
    """A load in a process of its own: what it tells."""
    warm(sorted(source.glob("*.safetensors")))
    return ask("benchmarks.accelerator", "--way", way, "--source", source)


def measure(kind: str, folder: Path, layers: int, rounds: int) -> tuple[list[Figure], dict[str, Any]]:
    """The figures of one model, and every single load."""
    source = make_source(kind, folder, layers)
    stored = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    ways = (OURS, RAW, BY_DEVICE if kind == "fp8" else BY_HAND)
    loads = take_turns(kind, rounds, {way: partial(load, way, source) for way in ways})
    alone = load(HOST, source)
    equal = all(told["digest"] == alone["digest"] for way in (OURS, BY_DEVICE) for told in loads.get(way, ()))
    seconds = medians_of(loads)
    device = loads[OURS][0]["device"]
    figures = [Figure(f"load onto {device}, {way}", kind, seconds[way], "s") for way in loads]
    figures.append(Figure(f"load onto {device}, times raw", kind, seconds[OURS] / seconds[RAW], "×"))
    figures.append(Figure(f"load onto {device}, equal to the host's bits", kind, int(equal), limit=1, at_least=True))
    sizes = {"layers": layers, "tensor_bytes": stored, "array_bytes": loads[OURS][0]["array_bytes"]}
    return figures, {**sizes, "loads": loads, "host": alone}


def main() -> None:
    """Measures the models and prints the table."""
    parser = make_parser(__doc__, layers=16, rounds=3)
    parser.add_argument("--way", help=argparse.SUPPRESS)  # one load, in this process
    parser.add_argument("--source", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(load_once(args.way, args.source)))
        return
    figures, details = measure_each(KINDS, lambda kind: measure(kind, args.folder, args.layers, args.rounds))
    report("accelerator", figures, details, args)


if __name__ == "__main__":
    main()
