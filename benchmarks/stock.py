"""The usual way, to compare with: load every tensor, stack with numpy, save with stock Orbax; one process, all in
memory.

    python -m benchmarks.stock --source out/bench/llama-8 --output out/bench/stock

It is what a short script does, and kinder to memory than it might be: each tensor is let go as soon as it is stacked.
It makes arrays of the same shapes, dtypes and bytes as the conversion: kernels turned around, FP8 scaled, experts and
layers stacked. It leaves out names, the query's scale, rotary permutations, every check, and the target's sharding:
Orbax's own chunks, one for each array, compressed as by default.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

BLOCK = 128  # rows and columns that share a scale
DTYPES = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "BF16": ml_dtypes.bfloat16, "F32": np.float32}
NUMBERED = re.compile(r"\.(layers|experts)\.(\d+)\.")


def tensors_in(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a file by their names, mapped into memory. (safetensors 0.8 has no FP8 for numpy.)"""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        begin = 8 + size + entry["data_offsets"][0]
        yield name, np.memmap(path, DTYPES[entry["dtype"]], "r", begin, tuple(entry["shape"]))


def dequantize(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """FP8 times the scales of its blocks, in bfloat16."""
    rows, columns = codes.shape
    scale = np.repeat(np.repeat(scales, BLOCK, 0), BLOCK, 1)[:rows, :columns]
    return (codes.astype(np.float32) * scale).astype(ml_dtypes.bfloat16)


def load(source: Path) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint, FP8 scaled to bfloat16."""
    tensors: dict[str, np.ndarray] = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors |= {name: np.array(mapped) for name, mapped in tensors_in(path)}
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        weight = name.removesuffix("_scale_inv")
        tensors[weight] = dequantize(tensors[weight], tensors.pop(name))
    return tensors


def stack(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays: kernels with their inputs first, experts on axis 0, layers on axis 1 (0 of what has no other).
    Empties `tensors`.
    """
    groups: dict[str, dict[tuple[int, ...], str]] = defaultdict(dict)  # array -> (layer, expert) -> tensor
    for name in tensors:
        groups[NUMBERED.sub(r".\1.", name)][tuple(int(number) for _, number in NUMBERED.findall(name))] = name
    arrays = {}
    for array, places in groups.items():
        made = {place: tensors.pop(name) for place, name in places.items()}
        if "embed_tokens" not in array:
            made = {place: values.T for place, values in made.items()}
        experts = sorted({place[1] for place in made if len(place) == 2})
        layers = sorted({place[0] for place in made if place})
        if experts:
            arrays[array] = np.stack([np.stack([made[layer, expert] for layer in layers]) for expert in experts])
        elif layers:
            arrays[array] = np.stack([made[layer,] for layer in layers], axis=1)
        else:
            arrays[array] = np.ascontiguousarray(made[()])
    return arrays


def main() -> int:
    """Converts a checkpoint."""
    import orbax.checkpoint as ocp

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="doesn't exist yet")
    args = parser.parse_args()
    arrays = stack(load(args.source))
    ocp.PyTreeCheckpointer().save(args.output.resolve(), {"step": 0, "params": {"params": arrays}})
    print(json.dumps({"arrays": len(arrays), "bytes": sum(array.nbytes for array in arrays.values())}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
