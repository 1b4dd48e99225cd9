"""`weightbeam inspect`: what a checkpoint holds."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from formats.orbax import custom_metadata, find_items, read_arrays
from formats.safetensors import open_checkpoint
from formats.storage import StorageError, local_path
from model_mappings.cells import pattern
from pipelines import report
from pipelines.errors import RefusedError
from pipelines.prepare import describe


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the tree of an Orbax checkpoint, or the tensors of a folder of safetensors files."""
    if rest:
        raise RefusedError(f"unknown options: {' '.join(rest)}; see weightbeam inspect --help")
    try:
        path = local_path(args.checkpoint)
        if (path / "config.json").exists() or any(path.glob("*.safetensors")):
            return _safetensors(path)
        return _orbax(find_items(path))
    except StorageError as e:
        raise RefusedError(str(e)) from e
    except (OSError, ValueError, KeyError, TypeError) as e:  # a checkpoint whose metadata is damaged
        raise RefusedError(f"{args.checkpoint}: can't be read: {e}") from e


def _orbax(items: Path) -> int:
    arrays = read_arrays(items)
    rows = report.table("array", "shape", "dtype", "chunk", "shard", ">arrays", ">bytes")
    groups = defaultdict(list)
    for array in arrays:
        spec = array.spec
        groups[pattern(spec.key), spec.shape, spec.dtype.name, spec.chunk, spec.shard, array.compressed].append(spec)
    for (_, shape, dtype, chunk, shard, compressed), specs in groups.items():
        name = specs[0].key if len(specs) == 1 else f"{specs[0].key} …"
        size = len(specs) * math.prod(shape) * specs[0].dtype.itemsize
        packed = report.shape_text(shard) if shard != chunk else "= chunk"
        stored = dtype + (" compressed" if compressed else "")
        rows.add_row(name, report.shape_text(shape), stored, report.shape_text(chunk), packed, str(len(specs)), report.human(size))
    report.CONSOLE.print(rows)
    total = sum(math.prod(array.spec.shape) * array.spec.dtype.itemsize for array in arrays)
    print(f"\n{items}: {len(arrays):,} arrays, {report.human(total)}")
    if custom := custom_metadata(items.parent):
        _provenance(custom)
    return 0


def _provenance(custom: dict[str, Any]) -> None:
    """Where the checkpoint comes from, as far as it says."""
    about = custom.get("weightbeam")
    if not isinstance(about, dict) or not isinstance(about.get("versions"), dict):
        print("custom metadata: " + json.dumps(custom))
        return
    rows = report.table("", "")
    for name in ("source", "family", "plan"):
        rows.add_row(name, str(about.get(name)))
    rows.add_row("options", ", ".join(f"{name}={value}" for name, value in about.get("options", {}).items() if value not in (None, [])))
    rows.add_row("versions", ", ".join(f"{name} {version}" for name, version in about["versions"].items()))
    for reason, times in about.get("dropped", {}).items():
        rows.add_row("left out", f"{report.count(times, 'tensor')}: {reason}")
    if lossy := about.get("lossy"):
        rows.add_row("rounded", f"{report.count(len(lossy), 'array')}, e.g. {next(iter(lossy.values()))}")
    report.CONSOLE.print(rows)


def _safetensors(folder: Path) -> int:
    checkpoint = open_checkpoint(folder)
    rows = report.table("tensor", "shape", "dtype", ">tensors", ">bytes")
    groups = defaultdict(list)
    for tensor in checkpoint.tensors.values():
        groups[pattern(tensor.name), tensor.shape, tensor.dtype.name].append(tensor)
    for (_, shape, dtype), tensors in groups.items():
        name = tensors[0].name if len(tensors) == 1 else f"{tensors[0].name} …"
        rows.add_row(name, report.shape_text(shape), dtype, str(len(tensors)), report.human(sum(t.nbytes for t in tensors)))
    report.CONSOLE.print(rows)
    total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    count, kind = f"{len(checkpoint.tensors):,} tensors in {len(checkpoint.shards)} files", checkpoint.config.get("model_type")
    print(f"\n{folder}: model_type {kind}, {count}, {report.human(total)}")
    if checkpoint.problems:
        raise RefusedError(f"{report.count(len(checkpoint.problems), 'problem')}:\n{describe(checkpoint.problems)}")
    return 0


if __name__ == "__main__":
    from pipelines.cli import main

    sys.exit(main(["inspect", *sys.argv[1:]]))
