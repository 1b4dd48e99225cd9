"""The checkpoint is Orbax's: every stock way to restore one restores ours, whatever its chunks, on one device, on eight
and on sixteen.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from lazily import lazily
from processes import run
from support import HERE, convert, given_arrays, restore

from weightbeam.formats.orbax import find_items, read_arrays
from weightbeam.pipelines.cli import main

ocp = lazily("orbax.checkpoint")

CASE = "deepseek3"
FORMATS = {
    "ocdbt, zarr3": ["--mesh", "fsdp=4,tensor=2"],
    "ocdbt, zarr3, many units": ["--unit_bytes", "100000"],
    "folders, zarr2": ["--use_ocdbt", "false", "--use_zarr3", "false", "--mesh", "fsdp=8"],
    "for any mesh": [],
    "for three meshes": [
        "--mesh",
        "fsdp=16",
        "--mesh",
        "expert=4,fsdp=2",
        "--mesh",
        "tensor=8",
        "--compression",
        "zstd",
    ],
}
MESHES = ["1x1", "4x2", "16x1", "4x4"]
WAYS = [
    "pytree",
    "standard",
    "manager",
    "version_1",
    "pytree_with_shardings",
    "standard_with_shardings",
    "manager_with_shardings",
    "version_1_with_shardings",
    "maxtext",
]


RESHARDED = {
    "cut anew": ("--mesh", "fsdp=2", "--mesh", "fsdp=4,tensor=2", "--use_zarr3", "false"),
    "for eight": ("--mesh", "fsdp=8", "--use_ocdbt", "false", "--use_zarr3", "false", "--compression", "zstd"),
    "copied": (),
}


@pytest.fixture(scope="module")
def steps(generated: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model in several formats and grids, and once as stock Orbax writes it."""
    folder = tmp_path_factory.mktemp("formats")
    made = {
        name: convert(generated / "cases" / CASE, folder / str(i), "--maxtext", "e591f30", *options)
        for i, (name, options) in enumerate(FORMATS.items())
    }
    for name, options in RESHARDED.items():
        assert main(["reshard", str(made["ocdbt, zarr3"]), str(folder / name), *options]) == 0
        made[name] = folder / name / "0"
    tree = ocp.PyTreeCheckpointer().restore(made["ocdbt, zarr3"] / "items")
    with ocp.CheckpointManager(folder / "stock") as manager:
        manager.save(0, args=ocp.args.Composite(items=ocp.args.PyTreeSave(tree)))
    return made | {"stock": folder / "stock" / "0"}


def restore_all(steps: dict[str, Path], mesh: str, devices: int, file: Path) -> dict[str, dict]:
    """What `restore_ways.py` tells of each checkpoint."""
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(HERE),
        "JAX_PLATFORMS": "cpu",
    }
    script = [sys.executable, str(HERE / "pipelines" / "restore_ways.py"), file, mesh, *steps.values()]
    run(*script, env=environment, status=0)
    told = json.loads(file.read_bytes())
    return {name: told[str(step)] for name, step in steps.items()}


def test_the_grids_are_different(steps: dict[str, Path]) -> None:
    """Whole arrays, chunks, and chunks packed into shards: what is restored below isn't always the same."""
    kinds = {
        name: {(array.spec.chunk, array.spec.shard) for array in read_arrays(find_items(step))}
        for name, step in steps.items()
    }
    assert len({frozenset(kind) for kind in kinds.values()}) >= len(FORMATS)
    assert any(chunk != shard for chunk, shard in kinds["for any mesh"])
    assert not any(chunk != shard for chunk, shard in kinds["for three meshes"])


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(
            mesh,
            marks=[pytest.mark.slow("restores in a process of 8 devices, 20 s a mesh; the first mesh stands for all")]
            * bool(number),
        )
        for number, mesh in enumerate(MESHES)
    ],
)
def test_every_way_to_restore(steps: dict[str, Path], mesh: str, tmp_path: Path) -> None:
    """MaxText's own bits come out, in the shardings that were asked for, and with no warning that a stock checkpoint
    doesn't cause too.
    """
    devices = math.prod(int(size) for size in mesh.split("x"))
    named = (*FORMATS, *RESHARDED) if mesh == "4x2" else tuple(FORMATS)  # a reshard's results once: each takes a second
    told = restore_all({name: steps[name] for name in (*named, "stock")}, mesh, devices, tmp_path / "told.json")
    wanted = given_arrays(CASE, "scanned")
    for name in named:
        assert list(told[name]) == WAYS
        for way in WAYS:
            result = told[name][way]
            assert result["arrays"] == wanted, (name, way)
            if way.endswith("_with_shardings") or way == "maxtext":
                assert set(result["devices"]) == {devices}, (name, way)
            assert set(result["warnings"]) <= set(told["stock"][way]["warnings"]), (name, way)


def test_the_tree_is_maxtexts_train_state(steps: dict[str, Path]) -> None:
    """`step`, `params` and an empty `opt_state`, as in a stock checkpoint of the same tree: the same paths with the
    same kinds of leaves.
    """
    stock, ours = (json.loads((steps[name] / "items" / "_METADATA").read_bytes()) for name in ("stock", "ocdbt, zarr3"))
    kinds = [
        {path: entry["value_metadata"]["value_type"] for path, entry in tree["tree_metadata"].items()}
        for tree in (ours, stock)
    ]
    assert kinds[0] == kinds[1]
    keys = [{path: entry["key_metadata"] for path, entry in tree["tree_metadata"].items()} for tree in (ours, stock)]
    assert keys[0] == keys[1]


@pytest.mark.parametrize("scan", [True, False])
def test_custom_metadata_tells_maxtext_the_layout(generated: Path, tmp_path: Path, scan: bool) -> None:
    """MaxText looks `scan_layers` up in the custom metadata of what `load_parameters_path` names, the item; Orbax finds
    it in the step's.
    """
    convert(
        generated / "cases" / "llama3.1",
        tmp_path / "out",
        "--maxtext_model",
        "llama3.1-8b",
        "--scan_layers",
        str(scan).lower(),
    )
    with ocp.CheckpointManager(tmp_path / "out") as manager:
        assert manager.metadata(0).custom_metadata["scan_layers"] is scan
    item = json.loads((tmp_path / "out" / "0" / "items" / "_CHECKPOINT_METADATA").read_bytes())
    assert item["custom_metadata"]["scan_layers"] is scan


def test_several_steps_lie_beside_each_other(generated: Path, tmp_path: Path) -> None:
    """Another `--step` leaves the first alone, and Orbax's manager sees both."""
    source, out = generated / "cases" / "llama3.1", tmp_path / "out"
    first = convert(source, out, "--maxtext_model", "llama3.1-8b")
    before = {path: path.stat().st_mtime_ns for path in first.rglob("*")}
    second = convert(source, out, "--maxtext_model", "llama3.3-70b", "--step", "3")
    with ocp.CheckpointManager(out) as manager:
        assert manager.all_steps() == [0, 3]
    assert {path: path.stat().st_mtime_ns for path in first.rglob("*")} == before
    paired, apart = (restore(step)["decoder.layers.self_attention.query.kernel"] for step in (first, second))
    assert not np.array_equal(paired, apart)
