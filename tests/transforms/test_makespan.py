"""The simulated makespan: scheduling against its bounds and against brute force, and the simulation against figures
made by hand.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support import DEEPSEEK, FP8, LLAMA_8B, call, headers_only, make_release, random_tensors, save

from weightbeam.formats.encodings import bitsandbytes, encoding, fp4, gptq, packed, scaled
from weightbeam.formats.safetensors import open_hf
from weightbeam.transforms.planning import makespan
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.makespan import (
    DOUBLING,
    LATENCY,
    START,
    Effort,
    Worker,
    efforts_of,
    estimate,
    occupation,
    ramp,
    schedule,
)
from weightbeam.transforms.planning.options import ConvertOptions

jobs = st.lists(st.integers(1, 50), min_size=1, max_size=40)
WORKER = Worker(gbps=8, hour_price=3.6, threads=4, cores=2)  # a GB a second, and a thousandth of the currency a second
RESULTS = json.loads((Path(__file__).parents[2] / "benchmarks/results.json").read_text())


def best(durations: list[int], machines: int) -> int:
    """The shortest makespan of all ways to share jobs out."""
    return min(
        max(sum(d for d, at in zip(durations, where, strict=True) if at == machine) for machine in range(machines))
        for where in itertools.product(range(machines), repeat=len(durations))
    )


def tick(durations: list[int], machines: int) -> int:
    """The makespan, second by second: whoever is idle takes the next job."""
    left, busy, now = list(durations), [0] * machines, 0
    while left or any(busy):
        for machine in range(machines):
            if not busy[machine] and left:
                busy[machine] = left.pop(0)
        busy = [max(0, rest - 1) for rest in busy]
        now += 1
    return now


@given(durations=jobs, machines=st.integers(1, 50))
def test_schedule_holds_grahams_bounds(durations: list[int], machines: int) -> None:
    """No shorter than the share of the work, or than the longest job; no longer than both (R. L. Graham 1969); and
    never longer with one machine more.
    """
    took, share, longest = schedule(durations, machines), sum(durations) / machines, max(durations)
    assert max(share, longest) <= took <= share + (1 - 1 / machines) * longest + 1e-9
    assert schedule(durations, machines + 1) <= took


@given(durations=jobs, machines=st.integers(1, 9))
def test_schedule_is_what_happens_second_by_second(durations: list[int], machines: int) -> None:
    assert schedule(durations, machines) == tick(durations, machines)


@settings(max_examples=60, deadline=None)
@given(durations=st.lists(st.integers(1, 20), min_size=1, max_size=7), machines=st.integers(1, 3))
def test_schedule_is_within_twice_the_best(durations: list[int], machines: int) -> None:
    """Against all ways to share the jobs out; the longest first within 4/3."""
    optimum = best(durations, machines)
    assert optimum <= schedule(durations, machines) <= (2 - 1 / machines) * optimum
    assert schedule(sorted(durations, reverse=True), machines) <= (4 / 3 - 1 / (3 * machines)) * optimum + 1e-9


def test_nothing_to_schedule() -> None:
    assert schedule([], 3) == 0


@given(requests=st.integers(1, 10**8), rate=st.sampled_from([1000.0, 5000.0]))
def test_a_bucket_doubles_its_rate(requests: int, rate: float) -> None:
    """Summed up second by second, the growing rate gives the requests; at first it's a plain division."""
    seconds = ramp(requests, rate)
    steps = 2000
    taken = sum(rate * 2 ** ((step + 0.5) * seconds / steps / DOUBLING) for step in range(steps)) * seconds / steps
    assert taken == pytest.approx(requests, rel=1e-3)
    assert seconds <= requests / rate


@pytest.mark.parametrize(
    ("effort", "seconds", "limit"),
    [
        (Effort(seconds=10, reads=1, read=10**9, written=10**9), 20, "vCPUs"),  # four threads on two cores
        # four threads send 4 GB each
        (Effort(seconds=1, reads=1, read=10**9, written=4 * 10**9), 16, "network of the workers"),
        # six of them are under way in a worker of four threads
        (
            Effort(seconds=0.01, reads=1, read=10**6, written=10**6),
            (0.01 + 0.002 + 5 * LATENCY) * 4 / 6,
            "latency of the bucket",
        ),
    ],
)
def test_what_a_unit_waits_for(effort: Effort, seconds: float, limit: str) -> None:
    assert occupation(effort, WORKER) == (pytest.approx(seconds), limit)


@given(threads=st.integers(1, 8))
def test_a_link_is_used_both_ways(threads: int) -> None:
    """Units that read and write a GB each over a GB a second: a second each, whatever the threads, and one more in which
    the first is only read and the last only written.
    """
    unit, worker = Effort(0.001, 1, 10**9, 10**9), dataclasses.replace(WORKER, threads=threads)
    took = estimate([unit] * 40, 1, worker, 1, False).unit_seconds
    rounds = -(-40 // threads)
    assert took == pytest.approx(rounds * threads + max(0, 2.251 - threads))


def test_an_estimate_by_hand() -> None:
    """800 units of 20 s on 10 workers with four threads each: 20 rounds, and the assembly's 800 × (0.3 ms + 4 × 50 ms ÷
    16).
    """
    made = estimate([Effort(10, 2, 10**6, 10**6)] * 800, 10, WORKER, files=5, from_hub=False)
    wall = START + 400 + 800 * (0.0003 + 0.0125)
    assert made.unit_seconds == pytest.approx(400)
    assert made.wall_seconds == pytest.approx(wall)
    assert made.vcpu_hours == pytest.approx(10 * 2 * wall / 3600)
    assert made.cost == pytest.approx(10 * wall / 1000)
    assert made.limit == "vCPUs"


@pytest.mark.parametrize(
    ("units", "workers", "files", "from_hub", "limit"),
    [
        (10, 10, 1, False, "start-up"),
        (10, 10, 1, True, "start-up"),
        (100_000, 10_000, 163, False, "assembly"),
        (20_000, 1_000, 163, True, "files that the hub gives"),  # each worker asks for 20 of them: 4 windows are full
    ],
)
def test_what_limits(units: int, workers: int, files: int, from_hub: bool, limit: str) -> None:
    effort = Effort(0.1, 2, 10**7, 10**7)
    assert estimate([effort] * units, workers, WORKER, files, from_hub).limit == limit


def test_a_long_unit_limits() -> None:
    """However many workers: a unit is one thread's."""
    long = [Effort(1000, 1, 1, 1)] * 40
    many, more = (estimate(long, workers, WORKER, 1, False) for workers in (100, 1000))
    assert many.limit == "the longest unit"
    assert many.wall_seconds == more.wall_seconds


efforts = st.builds(Effort, st.floats(0.01, 10), st.integers(1, 5), st.integers(0, 10**9), st.integers(0, 10**9))


@settings(deadline=None)
@given(units=st.lists(efforts, min_size=1, max_size=200), workers=st.integers(1, 60), from_hub=st.booleans())
def test_more_workers_are_never_slower_from_a_bucket(units: list[Effort], workers: int, from_hub: bool) -> None:
    """They cost more at most, and no fewer vCPU hours than the units' own; only the hub counts each worker's requests."""
    one, two = (estimate(units, n, WORKER, 163, from_hub) for n in (workers, 2 * workers))
    assert one.vcpu_hours * 3600 >= sum(effort.seconds for effort in units)
    assume(not from_hub)
    # Graham's bound; the slack is the longest unit's
    assert two.wall_seconds <= one.wall_seconds <= 2 * two.wall_seconds + 10


@pytest.mark.parametrize(
    "options", [dict(), dict(mesh=("fsdp=16",)), dict(scan_layers=False, mesh=("fsdp=4",))], ids=str
)
def test_efforts_are_the_plans_bytes(options: dict[str, Any]) -> None:
    """All units together read and write what the plan says, one effort for each."""
    conversion = plan_conversion(ConvertOptions(**options), headers_only(LLAMA_8B | dict(num_hidden_layers=4)))
    efforts = list(efforts_of(conversion))
    assert len(efforts) == len(conversion.units) > 10
    assert sum(effort.read for effort in efforts) == conversion.read_bytes
    assert sum(effort.written for effort in efforts) == conversion.target_bytes
    moved = conversion.read_bytes + conversion.target_bytes
    copied = sum(effort.seconds for effort in efforts) - moved / makespan.TRANSFER
    assert conversion.target_bytes / makespan.COPY < copied < conversion.target_bytes / makespan.TRANSPOSE


def test_decoding_takes_its_time(tmp_path: Path) -> None:
    """A model in FP8: each projection is read with its scales, decoded, and copied."""
    tensors = random_tensors(DEEPSEEK)
    names = [name for name in tensors if name.endswith("_proj.weight")]
    for name in names:
        tensors[name] = tensors[name].astype(FP8)
        tensors[f"{name}_scale_inv"] = np.ones((1, 1), np.float32)
    config = DEEPSEEK | dict(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    conversion = plan_conversion(ConvertOptions(unit_bytes=30_000), open_hf(save(tmp_path / "hf", config, tensors)))
    efforts = list(efforts_of(conversion))
    assert sum(effort.read for effort in efforts) == conversion.read_bytes
    decoded = sum(tensors[name].nbytes for name in names) / scaled.FP8_RATE
    rest = (
        sum(effort.seconds for effort in efforts)
        - (conversion.read_bytes + conversion.target_bytes) / makespan.TRANSFER
    )
    assert (
        decoded + conversion.target_bytes / makespan.COPY
        < rest
        < 1.1 * decoded + conversion.target_bytes / makespan.TRANSPOSE
    )


def test_every_encoding_has_a_rate() -> None:
    """A new encoding needs its kernel's rate."""
    kinds = [
        kind
        for module in (bitsandbytes, fp4, gptq, packed, scaled)
        for _, kind in inspect.getmembers(module, inspect.isclass)
    ]
    kernels = {kind for kind in kinds if issubclass(kind, encoding.InOrder) and kind is not encoding.InOrder}
    assert all(hasattr(kernel, "decode_rate") for kernel in kernels)


MEASURED = {
    "FP8, blocks of 128 × 128 → bfloat16": scaled.FP8_RATE,
    "NVFP4 → bfloat16": scaled.FP4_RATE,
    "int4, groups of 128 and zeros → bfloat16": packed.PackedRows.decode_rate,
    "GPTQ, in the activations' order → bfloat16": gptq.Gptq.decode_rate,
    "AWQ, groups of 128 → bfloat16": gptq.Awq.decode_rate,
    "nf4, magnitudes in 8 bits → bfloat16": bitsandbytes.BlockCodes.decode_rate,
    "LLM.int8() → bfloat16": bitsandbytes.ScaledRows8.decode_rate,
    "transpose of 7168 × 2048, bfloat16": makespan.TRANSPOSE,
    "2048 × 128 heads of 64, by head, bfloat16": makespan.COPY,
}


@pytest.mark.parametrize("kernel", MEASURED)
def test_rates_are_those_measured(kernel: str) -> None:
    """Within a quarter of `benchmarks/results.json`."""
    scale = {"MB/s": 1e6, "GB/s": 1e9}
    figures = {
        figure["what"]: figure["ours"] * scale[figure["unit"]]
        for figure in RESULTS["kernels"]["figures"]
        if figure["unit"] in scale
    }
    assert MEASURED[kernel] == pytest.approx(figures[kernel], rel=0.25)


@pytest.mark.parametrize("hosts", [1, 2])  # of four each has so few units that their sizes count
def test_the_simulation_against_hosts_that_were_measured(hosts: int) -> None:
    """1 GB in 64 units, from a bucket into a bucket, on Flink: one slot a host, links of 30 Mbit/s. A tenth too fast, as
    docs/reference/workers.md says; without overlap it would be more than a third too slow.
    """
    nbytes, found = RESULTS["hosts"]["details"]["bytes"] // 64, RESULTS["hosts"]["details"]["seconds"][str(hosts)]
    unit = Effort(2 * nbytes / makespan.TRANSFER + nbytes / makespan.TRANSPOSE, 9, nbytes, nbytes)
    worker = Worker(0.03, 0, 1, engine="Flink", start=makespan.CLUSTER_START)
    measured = statistics.median(found)
    assert -0.2 < estimate([unit] * 64, hosts, worker, 1, False).unit_seconds / measured - 1 < 0
    assert 64 / hosts * makespan.passage(unit, worker) / measured > 4 / 3


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Effort)])
def test_more_of_anything_is_never_faster(field: str) -> None:
    base = Effort(1.0, 1, 10**8, 10**8)
    more = dataclasses.replace(base, **{field: getattr(base, field) * 10})
    slow, fast = (estimate([effort] * 100, 2, WORKER, 3, False) for effort in (more, base))
    assert slow.wall_seconds >= fast.wall_seconds
    assert math.isfinite(slow.cost)


def test_the_command_prints_and_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row and an entry for each number of workers; the price and Beam's threads count; without the option there is
    neither.
    """
    source = make_release(tmp_path / "hf")
    plan = ("plan", "--source", source, "--json", tmp_path / "plan.json")

    def simulated(*options: str) -> list[dict[str, Any]]:
        assert call(*plan, *options) == 0
        return json.loads((tmp_path / "plan.json").read_text())["workers"]

    cheap, dear = (simulated("--workers", "1,10", "--worker_hour_price", price) for price in ("1", "2.5"))
    shown = capsys.readouterr().out
    assert "limited by" in shown
    assert "start-up" in shown
    one, ten = (f"{entry['wall_seconds'] / 60:.1f} min on" for entry in cheap)
    assert f"of memory a worker, {one} 1 worker or {ten} 10 workers" in " ".join(shown.split())
    assert [entry["workers"] for entry in cheap] == [1, 10]
    assert set(cheap[0]) == {field.name for field in dataclasses.fields(makespan.Estimate)}
    assert all(entry["cost"] == pytest.approx(entry["workers"] * entry["wall_seconds"] / 3600) for entry in cheap)
    assert [entry["cost"] for entry in dear] == pytest.approx([2.5 * entry["cost"] for entry in cheap])
    units = ("--workers", "1", "--unit_bytes", "8KiB")
    assert (
        simulated(*units, "--number_of_worker_harness_threads=1")[0]["unit_seconds"]
        > simulated(*units)[0]["unit_seconds"]
    )
    slow, slower = (simulated(*units, "--worker_gbps", gbps)[0]["unit_seconds"] for gbps in ("2e-6", "1e-6"))
    assert slower == pytest.approx(2 * slow, rel=0.05)
    capsys.readouterr()
    (flink,) = simulated(*units, "--runner=FlinkRunner")
    assert (flink["worker"]["engine"], flink["worker"]["threads"]) == ("Flink", 2)
    assert flink["wall_seconds"] < simulated(*units)[0]["wall_seconds"] - 200  # machines that are there
    assert "on workers of Flink, 2 units at a time, 10 Gbit/s each way, 12 s until they work" in capsys.readouterr().out
    assert call(*plan) == 0
    assert "limited by" not in capsys.readouterr().out
    assert "workers" not in json.loads((tmp_path / "plan.json").read_text())


@pytest.mark.parametrize(
    "option",
    ["--workers=0", "--workers=1,", "--workers=many", "--worker_gbps=0", "--worker_hour_price=nan", "--worker_gbps=-1"],
)
def test_what_cant_be_simulated_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("plan", "--source", "nowhere", option) == 2
    assert "should be a" in capsys.readouterr().err
