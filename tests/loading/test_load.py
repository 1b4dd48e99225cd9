"""`load`: the bits of a conversion on every mesh, by one process and by several, each byte read once; and no process waits for one that failed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
from support import BF16, F32, FP8, HERE, QWEN3_MOE, convert, digest, given, given_arrays, random_tensors, reference, restore, save, split

from weightbeam.model_mappings.plan import PARAMETERS

MESHES = [[["fsdp"], [8]], [["fsdp", "tensor"], [4, 2]], [["tensor", "fsdp", "expert"], [2, 2, 2]]]
UNEVEN = QWEN3_MOE | dict(  # large enough to be read in shares; sizes that eight devices don't divide
    vocab_size=1000, hidden_size=256, num_attention_heads=12, num_key_value_heads=4, head_dim=48, num_experts=6, moe_intermediate_size=136,
    num_hidden_layers=3,
)  # fmt: skip


def start(processes: int, loads: list[dict[str, Any]], devices: int = 8) -> list[subprocess.Popen[str]]:
    """The processes of a job."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    environment = os.environ | {"PYTHONPATH": f"{HERE.parent}:{HERE}"}
    request = json.dumps({"devices": devices, "loads": loads})
    script = [sys.executable, str(HERE / "loading" / "member.py")]
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return [subprocess.Popen([*script, str(process), str(processes), port, request], env=environment, **pipes) for process in range(processes)]


def job(processes: int, loads: list[dict[str, Any]], devices: int = 8) -> list[list[dict[str, Any]]]:
    """What each process tells of each load."""
    told = []
    for process in start(processes, loads, devices):
        out, err = process.communicate(timeout=500)
        assert process.returncode == 0, err[-3000:]
        told.append(json.loads(next(line for line in out.splitlines() if line.startswith("[{"))))
    return told


def assert_holds(told: Mapping[str, Any], wanted: Mapping[str, np.ndarray]) -> None:
    """Every shard that a process holds is the part of the array that its index says."""
    assert "shards" in told, told
    assert {key.removeprefix(PARAMETERS) for key in told["shards"]} == set(wanted)
    for key, shards in told["shards"].items():
        values = wanted[key.removeprefix(PARAMETERS)]
        for index, found in shards:
            assert digest(values[tuple(slice(*cut) for cut in index)]) == found, (key, index)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    tensors = random_tensors(UNEVEN)
    rng = np.random.default_rng(1)
    for name in ("model.layers.2.mlp.experts.3.up_proj.weight", "lm_head.weight"):  # every pattern, NaNs of every kind among them
        tensors[name] = rng.integers(0, 1 << 16, tensors[name].shape, np.uint16).view(BF16)
    folder = save(tmp_path_factory.mktemp("uneven") / "hf", UNEVEN, *split(tensors, 2))
    wanted = reference(UNEVEN, {name: np.nan_to_num(values) for name, values in tensors.items()}, BF16)
    wanted["decoder.logits_dense.kernel"] = tensors["lm_head.weight"].T
    wanted["decoder.layers.moe_block.wi_1"][3, 2] = tensors["model.layers.2.mlp.experts.3.up_proj.weight"].T
    return folder, wanted


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_bits_and_bytes(uneven: tuple[Path, dict[str, np.ndarray]], processes: int) -> None:
    """On three meshes, in one step and in many: the arrays of plain numpy, and each process reads its share of the bytes and little else."""
    folder, wanted = uneven
    in_steps = dict(source=str(folder), mesh=MESHES[1], options=dict(unit_bytes=600_000))
    at_once = [dict(source=str(folder), mesh=mesh) for mesh in MESHES[::2]] if processes < 4 else []
    members = job(processes, [in_steps, *at_once, in_steps])
    stored = sum(path.stat().st_size for path in folder.iterdir())
    for member in members:
        for told in member:
            assert_holds(told, wanted)
        assert member[-1]["read"] < stored / processes * 1.05 + 100_000  # headers, and arrays too small to share
        assert member[-1]["programs"] == 0  # those of the first are there
        assert 3 < member[0]["programs"] <= 20


def test_all_cases_have_maxtexts_bits(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every family, scanned and unscanned. Arrays that MaxText promotes to float32 are those of test_maxtext_bits."""
    folder = support.generate(tmp_path_factory) / "cases"
    runs = [(case, layout) for case in given() if case != "deepseek3-mtp-standalone" for layout in ("scanned", "unscanned") if layout in given()[case]]
    loads = []
    for case, layout in runs:
        options = dict(
            maxtext_model=given()[case]["maxtext_model"],
            vocab_size=given()[case]["vocab"],
            scan_layers=layout == "scanned",
            save_dtype="float32" if case.endswith("-fp32") else "bfloat16",
        )
        loads.append(dict(source=str(folder / case), mesh="fsdp=1", options=options))
    (member,) = job(1, loads, devices=1)
    for (case, layout), told in zip(runs, member, strict=True):
        wanted = given_arrays(case, layout)
        found = {key.removeprefix(PARAMETERS): shards[0][1] for key, shards in told["shards"].items()}
        assert {key for key in found if not key.startswith("params.")} == set(wanted)
        differing = {key for key, value in wanted.items() if found[key] != value and value[1] == loads[runs.index((case, layout))]["options"]["save_dtype"]}
        assert not differing, (case, layout)


def test_quantised_padded_and_stored(tmp_path: Path) -> None:
    """FP8 in blocks, a padded vocabulary, and an Orbax checkpoint of it in other chunks than the mesh has; by two processes."""
    config = QWEN3_MOE | dict(
        hidden_size=128, vocab_size=500, moe_intermediate_size=96, quantization_config=dict(quant_method="fp8", weight_block_size=[32, 32])
    )
    tensors = random_tensors(config)
    rng = np.random.default_rng(2)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        blocks = tuple(-(-size // 32) for size in tensors[name].shape)
        tensors[name], tensors[f"{name}_scale_inv"] = tensors[name].astype(FP8), rng.random(blocks, F32)
    folder = save(tmp_path / "hf", config, *split(tensors, 2))
    step = convert(folder, tmp_path / "out", "--vocab_size", "512", "--mesh", "fsdp=2,expert=2")
    options = dict(unit_bytes=1_000_000)
    loads = [dict(source=str(folder), mesh=MESHES[1], options=options | dict(vocab_size=512)), dict(source=str(step), mesh=MESHES[2], options=options)]
    wanted = restore(step)
    for member in job(2, loads):
        for told in member:
            assert_holds(told, wanted)


def test_an_error_of_one_is_an_error_of_all(uneven: tuple[Path, dict[str, np.ndarray]]) -> None:
    """The others are told which process failed and why; all can go on to another load."""
    folder, wanted = uneven
    load: dict[str, Any] = dict(source=str(folder), mesh="fsdp=8", options=dict(unit_bytes=600_000))
    first, second = job(2, [load | dict(fault=[1, "fails"]), load])
    assert first[0] == {"failed": "process 1 of 2 failed, so nothing was loaded: the disk is on fire"}
    assert second[0]["failed"].endswith("the disk is on fire")
    for member in (first, second):
        assert_holds(member[1], wanted)


def test_nobody_waits_for_a_dead_process(uneven: tuple[Path, dict[str, np.ndarray]]) -> None:
    """It was killed: the other ends too, with words about it, as soon as JAX's heartbeat misses it."""
    load = dict(source=str(uneven[0]), mesh="fsdp=8", options=dict(unit_bytes=600_000), fault=[1, "dies"])
    first, second = start(2, [load])
    out, err = first.communicate(timeout=200)
    second.communicate(timeout=200)
    assert second.returncode == -9
    assert first.returncode != 0 or "failed" in out
    assert "unhealthy" in err or "may have stopped" in out
