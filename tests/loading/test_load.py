"""`load`: the bits of a conversion on every mesh, by one process and by several, each byte read once; and no process
waits for one that failed.

A job of one, two or four processes starts once and has all the loads that are asked of it, so that JAX starts seven
times in all.
"""

from __future__ import annotations

import base64
import fcntl
import functools
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pairs
import pytest
import support
from loading.jobs import assert_holds, run_job
from support import (
    BF16,
    DEEPSEEK,
    F32,
    FP8,
    QWEN3_MOE,
    convert,
    digest,
    given,
    given_arrays,
    make_release,
    random_tensors,
    reference,
    restore,
    save,
    split,
)

from weightbeam.model_mappings.plan import PARAMETERS

MESHES = [[["fsdp"], [1]], [["fsdp"], [8]], [["fsdp", "tensor"], [4, 2]], [["tensor", "fsdp", "expert"], [2, 2, 2]]]
UNEVEN = QWEN3_MOE | dict(  # large enough to be read in shares; sizes that eight devices don't divide
    vocab_size=1000, hidden_size=256, num_attention_heads=12, num_key_value_heads=4, head_dim=48, num_experts=6, moe_intermediate_size=136,
    num_hidden_layers=3,
)  # fmt: skip
QUANTISED = QWEN3_MOE | dict(
    hidden_size=128,
    vocab_size=500,
    moe_intermediate_size=96,
    quantization_config=dict(quant_method="fp8", weight_block_size=[32, 32]),
)
DEEP = DEEPSEEK | dict(num_hidden_layers=61, first_k_dense_replace=3, n_routed_experts=8)
STEPS = dict(unit_bytes=600_000)  # many of them


class Job:
    """A job of so many processes: its loads, and what was told of them.

    Attributes:
      wanted: the arrays of each load, by its name.
      cases: MaxText's cases among the loads: the layout of each.
      stored: bytes of the release that bytes are counted of.
    """

    def __init__(self, processes: int, folder: Path, cases: Path):
        self.processes, self.folder = processes, folder
        self.wanted: dict[str, Mapping[str, np.ndarray]] = {}
        self.cases: dict[str, tuple[str, str]] = {}
        self._loads: dict[str, Mapping[str, Any]] = {}
        source, arrays = _uneven(folder)
        self.stored = sum(path.stat().st_size for path in source.iterdir())
        for mesh in MESHES if processes == 1 else MESHES[1:]:
            self._add(
                f"uneven on {mesh[1]}", arrays, source=source, mesh=mesh, options=STEPS if mesh == MESHES[2] else {}
            )
        self._add("uneven again", arrays, source=source, mesh=MESHES[2], options=STEPS)
        if processes == 2:
            quantised, step, stored = _quantised(folder)
            self._add(
                "quantised",
                stored,
                source=quantised,
                mesh=MESHES[2],
                options=dict(unit_bytes=1_000_000, vocab_size=512),
            )
            self._add(
                "decoded by devices",
                stored,
                source=quantised,
                mesh=MESHES[2],
                options=dict(unit_bytes=1_000_000, vocab_size=512, dequantize="device"),
            )
            self._add("stored", stored, source=step, mesh=MESHES[3], options=dict(unit_bytes=1_000_000))
            deep = make_release(folder / "deep", DEEP)
            self._add("deep", {}, source=deep, mesh=MESHES[1], options=dict(unit_bytes=200_000))
            cut = Path(shutil.copytree(source, folder / "cut"))
            self._add("cut short", {}, source=cut, mesh=MESHES[1], options=STEPS, fault=[0, "cuts"])
            self._add("fails", {}, source=source, mesh=MESHES[1], options=STEPS, fault=[1, "fails"])
            self._add("after it", arrays, source=source, mesh=MESHES[1], options=STEPS)
            self._add("dies", {}, source=source, mesh=MESHES[1], options=STEPS, fault=[1, "dies"])
        else:
            self._add_cases(cases)
        if processes == 1:
            quantised, wanted = _fp8(folder)
            for mesh in MESHES[1:]:
                self._add(
                    f"decoded by devices on {mesh[1]}",
                    wanted,
                    source=quantised,
                    mesh=mesh,
                    options=dict(unit_bytes=1_000_000, dequantize="device"),
                )
        self.told, self.ended = run_job(processes, self._loads, folder)

    def _add(self, name: str, wanted: Mapping[str, np.ndarray], **load: Any) -> None:
        self._loads[name], self.wanted[name] = load, wanted

    def _add_cases(self, folder: Path) -> None:
        """Cases and meshes are dealt out; one process has a third of them and four a quarter, since each takes a program to
        compile. That each case is converted to MaxText's bits is shown by `tests/cases/test_maxtext_bits.py`.
        """
        number = 0
        for case, about in given().items():
            for layout in [
                layout for layout in ("scanned", "unscanned") if layout in about and case != "deepseek3-mtp-standalone"
            ]:
                options = dict(
                    maxtext="e591f30",
                    maxtext_model=about["maxtext_model"],
                    vocab_size=about["vocab"],
                    scan_layers=layout == "scanned",
                    save_dtype="float32" if case.endswith("-fp32") else "bfloat16",
                )
                number += 1
                if number % 4 == 0 if self.processes == 4 else pairs.FULL or number % 3 == 0:
                    mesh = MESHES[number % 4] if self.processes == 1 else MESHES[1 + number % 3]
                    name = f"{case} {layout} {mesh[1]}"
                    self.cases[name] = case, layout
                    self._add(name, {}, source=folder / case, mesh=mesh, options=options, values=True)


def _uneven(folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    tensors = random_tensors(UNEVEN)
    rng = np.random.default_rng(1)
    # every pattern, NaNs of every kind among them
    for name in ("model.layers.2.mlp.experts.3.up_proj.weight", "lm_head.weight"):
        tensors[name] = rng.integers(0, 1 << 16, tensors[name].shape, np.uint16).view(BF16)
    source = save(folder / "uneven", UNEVEN, *split(tensors, 2))
    with np.errstate(invalid="ignore"):
        wanted = reference(UNEVEN, {name: np.nan_to_num(values) for name, values in tensors.items()}, BF16)
    wanted["decoder.logits_dense.kernel"] = tensors["lm_head.weight"].T
    wanted["decoder.layers.moe_block.wi_1"][3, 2] = tensors["model.layers.2.mlp.experts.3.up_proj.weight"].T
    return source, wanted


def _fp8(folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """FP8 in blocks, and its arrays by plain numpy."""
    tensors = random_tensors(QUANTISED)
    values = dict(tensors)
    rng = np.random.default_rng(2)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = np.indices(tensors[name].shape) // 32
        scales = rng.random((rows.max() + 1, columns.max() + 1), F32)
        tensors[name], tensors[f"{name}_scale_inv"] = tensors[name].astype(FP8), scales
        values[name] = tensors[name].astype(F32) * scales[rows, columns]
    return save(folder / "quantised", QUANTISED, *split(tensors, 2)), reference(QUANTISED, values, BF16)


def _quantised(folder: Path) -> tuple[Path, Path, dict[str, np.ndarray]]:
    """FP8, an Orbax checkpoint of it in other chunks than the mesh has, and what stock Orbax restores of that."""
    source, _ = _fp8(folder)
    step = convert(source, folder / "converted", "--vocab_size", "512", "--mesh", "fsdp=2,expert=2")
    return source, step, restore(step)


@functools.cache
def once(processes: int, root: Path, cases: Path) -> Job:
    """The job of so many processes: once in a test run, by whichever of pytest-xdist's processes comes first."""
    folder = root / f"load-{processes}"
    with (root / f"load-{processes}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "job.pickle").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            (folder / "job.pickle").write_bytes(pickle.dumps(Job(processes, folder, cases)))
        return pickle.loads((folder / "job.pickle").read_bytes())


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The job of as many processes as the test's parameter says."""
    generated = support.generate(tmp_path_factory)
    return once(request.param, generated.parent, generated / "cases")


def of(*processes: int) -> pytest.MarkDecorator:
    """The jobs that a test looks at."""
    slow = {4: [pytest.mark.slow("four processes of JAX, a minute on two cores")]}
    return pytest.mark.parametrize(
        "job", [pytest.param(number, marks=slow.get(number, [])) for number in processes], indirect=True
    )


@of(1, 2, 4)
def test_bits(job: Job) -> None:
    """On every mesh, in one step and in many: the arrays of plain numpy, or those that stock Orbax restores."""
    for name, wanted in job.wanted.items():
        if wanted:
            assert len(job.told[name]) == job.processes, job.ended[0].stderr[-3000:]
            for told in job.told[name]:
                assert_holds(told, wanted)


@of(1, 2, 4)
def test_each_byte_is_read_once(job: Job) -> None:
    for told in job.told["uneven again"]:
        assert told["read"] < job.stored / job.processes * 1.05 + 100_000  # headers, and arrays too small to share


@of(1, 4)
def test_all_cases_have_maxtexts_bits(job: Job) -> None:
    """Scanned and unscanned, with `WEIGHTBEAM_PRODUCTS=full` of every family. Arrays that MaxText promotes to float32 are those of test_maxtext_bits."""
    assert len(job.cases) > (8 if job.processes == 4 else 40 if pairs.FULL else 13)
    for name, (case, layout) in job.cases.items():
        wanted, stored = given_arrays(case, layout), "float32" if case.endswith("-fp32") else "bfloat16"
        members = job.told[name]
        assert len(members) == job.processes, (name, members)
        assert {key.removeprefix(PARAMETERS) for key in members[0]["shards"] if key.startswith(PARAMETERS)} == set(
            wanted
        ), name
        for key, (shape, dtype, sha256) in wanted.items():
            if dtype == stored:
                shards = [shard for member in members for shard in member["shards"][PARAMETERS + key]]
                assert digest(put_together(shape, shards)) == [shape, dtype, sha256], (name, key)


def put_together(shape: list[int], shards: list[Any]) -> np.ndarray:
    """An array of all its shards."""
    array = np.zeros(shape, shards[0][1][1])
    for index, (extent, dtype, data) in shards:
        array[tuple(slice(*cut) for cut in index)] = np.frombuffer(base64.b64decode(data), dtype).reshape(extent)
    return array


@of(2)
def test_compiled_programs(job: Job) -> None:
    """61 layers, dense ones and experts: a program for each kind of block, not for each block; and none that gathers an
    array on each device.
    """
    for told in job.told["deep"]:
        assert 5 < told["programs"] <= 20
    assert all(told["programs"] == 0 for told in job.told["uneven again"])  # those of the first are there
    assert not any("rematerialization" in ended.stderr for ended in job.ended)


@of(2)
def test_an_error_of_one_is_an_error_of_all(job: Job) -> None:
    """The others are told which process failed and why; all can go on to another load."""
    first, second = job.told["fails"]
    assert first == {"failed": "process 1 of 2 failed, so nothing was loaded: the disk is on fire"}
    assert second["failed"].endswith("the disk is on fire")
    for told in job.told["cut short"]:
        assert ".safetensors" in told["failed"]
        assert "changed while it was read" in told["failed"] or "ends" in told["failed"]


@of(2)
def test_nobody_waits_for_a_dead_process(job: Job) -> None:
    """It was killed: the other ends too, with words about it, as soon as JAX's heartbeat misses it."""
    first, second = job.ended
    assert second.returncode == -9
    told = [answer["failed"] for answer in job.told["dies"]]
    assert first.returncode != 0 or told
    assert "unhealthy" in first.stderr or "may have stopped" in told[0]
