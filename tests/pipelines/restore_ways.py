"""Restores checkpoints in every way that stock Orbax and MaxText have, and writes what came out into a file: `python
restore_ways.py FILE 4x2 STEP…`.

`4x2` is the mesh of all devices. A process of its own, since the number of devices is settled when JAX starts
(`--xla_force_host_platform_device_count` in `XLA_FLAGS`).
The file is JSON: `{step: {way: {"arrays": {key: [shape, dtype, sha256]}, "devices": [of each array], "warnings": […]}}}`.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1
from orbax.checkpoint.checkpoint_utils import construct_restore_args
from support import digest, flatten

Tree = Any


def pytree(step: Path, abstract: Tree) -> Tree:
    return ocp.PyTreeCheckpointer().restore(step / "items")


def pytree_with_shardings(step: Path, abstract: Tree) -> Tree:
    return ocp.PyTreeCheckpointer().restore(
        step / "items", item=abstract, restore_args=construct_restore_args(abstract)
    )


def standard(step: Path, abstract: Tree) -> Tree:
    return ocp.StandardCheckpointer().restore(step / "items")


def standard_with_shardings(step: Path, abstract: Tree) -> Tree:
    return ocp.StandardCheckpointer().restore(step / "items", abstract)


def manager(step: Path, abstract: Tree) -> Tree:
    with ocp.CheckpointManager(
        step.parent, item_names=("items",), item_handlers={"items": ocp.PyTreeCheckpointHandler()}
    ) as opened:
        assert opened.latest_step() == int(step.name)
        return opened.restore(int(step.name), args=ocp.args.Composite(items=ocp.args.PyTreeRestore()))["items"]


def manager_with_shardings(step: Path, abstract: Tree) -> Tree:
    with ocp.CheckpointManager(step.parent) as opened:
        return opened.restore(int(step.name), args=ocp.args.Composite(items=ocp.args.StandardRestore(abstract)))[
            "items"
        ]


def version_1(step: Path, abstract: Tree) -> Tree:
    return v1.load_pytree(step, checkpointable_name="items")


def version_1_with_shardings(step: Path, abstract: Tree) -> Tree:
    return v1.load_pytree(step, abstract, checkpointable_name="items")


def maxtext(step: Path, abstract: Tree) -> Tree:
    """As MaxText loads parameters (common/checkpointing.py, e591f30): only them, with its own shardings."""
    wanted = {"params": {"params": abstract["params"]["params"]}}
    restorer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    return restorer.restore(step / "items", item=wanted, transforms={}, restore_args=construct_restore_args(wanted))


WITHOUT_TARGET: list[Callable[[Path, Tree], Tree]] = [pytree, standard, manager, version_1]
WITH_TARGET: list[Callable[[Path, Tree], Tree]] = [
    pytree_with_shardings, standard_with_shardings, manager_with_shardings, version_1_with_shardings, maxtext,
]  # fmt: skip


def sharding(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """The last axis that the size of `x` divides over `x`, another over `y`."""
    spec: list[str | None] = [None] * len(shape)
    for name in mesh.axis_names:
        fits = [axis for axis, size in enumerate(shape) if spec[axis] is None and size % mesh.shape[name] == 0]
        if fits:
            spec[fits[-1]] = name
    return NamedSharding(mesh, PartitionSpec(*spec))


def target(tree: Tree, sizes: str) -> Tree:
    """What to restore, sharded over all devices."""
    mesh = Mesh(np.array(jax.devices()).reshape([int(size) for size in sizes.split("x")]), ("x", "y"))
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype, sharding=sharding(np.shape(x), mesh)), tree
    )


class Collector(logging.Handler):
    """Keeps what is logged as a warning or worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def restore_each_way(step: Path, sizes: str) -> dict[str, Any]:
    abstract = target(pytree(step, None), sizes)
    results = {}
    for way in [*WITHOUT_TARGET, *WITH_TARGET]:
        collector = Collector()
        logging.getLogger().addHandler(collector)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            leaves = flatten(way(step, abstract)["params"]["params"])
        logging.getLogger().removeHandler(collector)
        if way in WITH_TARGET:
            wanted = flatten(abstract["params"]["params"])
            assert all(leaves[key].sharding == wanted[key].sharding for key in wanted), way
        results[way.__name__] = {
            "arrays": {key: digest(np.asarray(value)) for key, value in leaves.items()},
            "devices": [
                len(value.sharding.device_set) if isinstance(value, jax.Array) else 0 for value in leaves.values()
            ],
            "warnings": sorted({*collector.texts, *(str(warning.message) for warning in caught)}),
        }
    return results


if __name__ == "__main__":
    told, mesh, *steps = sys.argv[1:]
    Path(told).write_text(json.dumps({step: restore_each_way(Path(step), mesh) for step in steps}))
