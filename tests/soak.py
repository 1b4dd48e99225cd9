"""The long form of `tests/pipelines/test_faults.py`, `test_hostile.py` and `tests/formats/test_ownership.py`: kills
without end in sight, conversions that sleep while others take their place, and every field of every config.

    PYTHONPATH=.:tests python tests/soak.py [--kills 400] [--schedules 1000] [--seed 0]

`make soak` runs it, in rounds, each with a part of everything. It prints its counts after each, and fails at the first
loss.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from facts import layouts_of
from faults import STAGES, arguments, is_published, kill, run_jobs
from hostile import VALUES, checkpoint_of, mutated, paths, snapshot, tiny_checkpoints
from release_schedules import release_schedules
from schedules import schedules
from support import BF16, LLAMA, assert_same_bits, make_release, random_tensors, reference, restore

from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import ConvertOptions

# at most, of a stage in the conversions here: one of them gets the signal
CALLS = {"reading": 5, "writing": 5, "merging": 1, "publishing": 1}
SECONDS = 0.006  # what a stage takes, about
ROUND = 20  # kills in a round, each about twice


# units are read and written in the background, as if a folder were a bucket
OVERLAPPING = {"weightbeam.transforms.execution.overlap.REMOTE": "/"}


def random_faults(
    rng: random.Random, root: Path, source: Path, plan: Mapping[Path, str], turn: int
) -> list[dict[str, Any]]:
    """A job for each output, that is sent a signal in its stage; every other one works in the background, as from and
    to a bucket.
    """
    jobs = []
    for number, (output, stage) in enumerate(plan.items()):
        name = "SIGKILL" if turn == 0 or rng.random() < 0.7 else rng.choice(["SIGTERM", "SIGINT"])
        fault = kill(stage, name, rng.uniform(0, SECONDS), rng.randint(1, CALLS[stage]))
        jobs.append(resuming(root, source, output) | dict(fault=fault, set=OVERLAPPING if (number + turn) % 2 else {}))
    return jobs


def resuming(root: Path, source: Path, output: Path) -> dict[str, Any]:
    return dict(arguments=arguments(source, output, "--resume"), printed=str(root / "printed"))


def stopped(told: Mapping[str, Any], signal: str, stage: str) -> str:
    """What became of a job that was sent a signal; it ended as it should."""
    assert told["status"] in ({-9, 0} if signal == "SIGKILL" else {1, 130, 0}), told
    assert "Traceback" not in told["message"], told["message"]
    if told["status"]:
        return f"{signal} in {stage}"
    # it was done, or the stage had fewer calls left
    return "no-ops" if "nothing to do" in told["message"] else "finished before the signal"


def kill_and_resume(root: Path, stages: Sequence[str], seed: int, rounds: int = 2) -> Counter[str]:
    """Conversions that are killed, one for each of `stages`, resumed and killed again (at a stage at random), and at
    last resumed to the end.

    After every kill a reader finds no checkpoint or a whole one. At the end all are whole, and equal; nothing else is
    in the output, and nothing outside of it was touched; another `--resume` changes nothing. Returns the counts.
    """
    rng = random.Random(seed)
    root.mkdir()
    source = make_release(root / "hf", files=2)
    wanted = reference(LLAMA, random_tensors(LLAMA), BF16)
    outputs = {root / f"out{number}": stage for number, stage in enumerate(stages)}
    before = snapshot(root)
    counts: Counter[str] = Counter()
    for turn in range(rounds):
        plan = {output: stage if turn == 0 else rng.choice(list(STAGES)) for output, stage in outputs.items()}
        jobs = random_faults(rng, root, source, plan, turn)
        for (output, stage), job, told in zip(plan.items(), jobs, run_jobs(jobs), strict=True):
            counts[stopped(told, job["fault"]["signal"], stage)] += 1
            if is_published(output):
                counts["published already when stopped"] += told["status"] != 0
                assert_same_bits(restore(output / "0"), wanted)
            else:
                assert not (output / "0").exists()
    resumed = [resuming(root, source, output) for output in outputs]
    for told in run_jobs(resumed):
        assert told["status"] == 0, told["message"]
        counts["resumed to the end"] += 1
    finished = {output: snapshot(output) for output in outputs}
    for output in outputs:
        assert [path.name for path in output.iterdir()] == ["0"]
        assert_same_bits(restore(output / "0"), wanted)
    for told in run_jobs(resumed):
        assert "nothing to do" in told["message"]
    assert {output: snapshot(output) for output in outputs} == finished
    (root / "printed").unlink()
    assert {name: at for name, at in snapshot(root).items() if not name.startswith("out")} == before
    return counts


def bundles_twice(root: Path, times: int) -> Counter[str]:
    """Every bundle runs twice, the last one too, in several threads: the same bits, and as many databases as attempts
    that count.
    """
    root.mkdir()
    source, wanted = (make_release(root / "hf", files=2), reference(LLAMA, random_tensors(LLAMA), BF16))
    outputs = [root / f"out{number}" for number in range(times)]
    jobs: list[dict[str, Any]] = [
        dict(arguments=arguments(source, output, "--direct_runner_bundle_repeat=1"), printed=str(root / "printed"))
        for output in outputs
    ]
    for output, told in zip(outputs, run_jobs(jobs), strict=True):
        assert told["status"] == 0, told["message"]
        assert [path.name for path in output.iterdir()] == ["0"]
        assert_same_bits(restore(output / "0"), wanted)
    return Counter({"conversions with every bundle twice": times})


def sleepers(root: Path, number: int, seed: int) -> Counter[str]:
    """Real conversions that are stopped (SIGSTOP) anywhere in a stage, taken over by one of another model, and woken
    when that is done, or before.

    What is published is whole and of one model; who was overtaken ends with a message, or had published before.
    """
    rng = random.Random(seed)
    root.mkdir()
    sources = [make_release(root / name, files=2, seed=at) for at, name in enumerate(("a", "b"))]
    wanted = [reference(LLAMA, random_tensors(LLAMA, seed=at), BF16) for at in range(2)]
    layouts = ([], ["--use_ocdbt", "false"])
    jobs, outputs = [], []
    for at in range(number):
        output, layout, stage = root / f"out{at}", rng.choice(layouts), rng.choice(list(STAGES))
        if layout and stage == "merging":
            stage = "writing"
        outputs.append(output)
        fault = dict(kind="sleep", stage=stage, call=rng.randint(1, CALLS[stage]))
        asleep = dict(printed=str(root / f"printed{at}"), watched=str(output / "0"))
        jobs.append(
            dict(arguments=arguments(sources[0], output, rng.choice(["--resume", "--overwrite"]), *layout), fault=fault)
            | asleep
        )
        over = dict(arguments=arguments(sources[1], output, "--overwrite", *layout), printed=str(root / "printed"))
        jobs.append(over | {"set": {"weightbeam.formats.staging.lease.STALE": 0}})
    told = run_jobs(jobs, timeout=3600)
    woken = told[len(jobs) :]
    counts: Counter[str] = Counter()
    for row in told[1 : len(jobs) : 2]:
        assert row["status"] == 0, row
    assert all(row["changed"] == [] for row in woken[::2]), woken
    for row in woken[1::2]:
        assert row["status"] == 1, row
        assert "Traceback" not in row["message"], row
        counts["overtaken while asleep"] += 1
    for output in outputs:
        assert_same_bits(restore(output / "0"), wanted[1])
    return counts


def simulated(seeds: range) -> Counter[str]:
    """Conversions that sleep and wake at every operation on their output, in folders and buckets (`schedules.py`), and
    commands that write releases, to the hub too (`release_schedules.py`).
    """
    counts: Counter[str] = Counter()
    for kind in ("folder", "folder in two", "bucket"):
        counts[f"schedules in a {kind}"] = sum(1 for _ in schedules(kind, seeds))
    for kind in ("folder", "bucket", "hub"):
        counts[f"schedules of releases, {kind}"] = sum(1 for _ in release_schedules(kind, seeds))
    return counts


def configs() -> Counter[str]:
    """Any value in any field, read or not, in every layout: problems or a plan."""
    counts: Counter[str] = Counter()
    for config, tensors in tiny_checkpoints().values():
        for layout in layouts_of(config).values():
            options = ConvertOptions(scan_layers=layout.scan, multimodal=layout.multimodal)
            for path in paths(config):
                for value in VALUES:
                    start = time.monotonic()
                    problems = plan_conversion(
                        options, checkpoint_of(mutated(config, path, value), tensors)
                    ).plan.problems
                    assert time.monotonic() - start < 60, (path, value)
                    counts["configs refused" if problems else "configs planned"] += 1
    return counts


def one_round(root: Path, kills: int, seeds: range) -> Counter[str]:
    """A part of everything but the configs, so that a soak that is ended early has had some of each."""
    root.mkdir()
    stages = [list(STAGES)[at % len(STAGES)] for at in range(kills)]
    counts = kill_and_resume(root / "killed", stages, seeds.start)
    counts += bundles_twice(root / "twice", max(1, kills // 20))
    counts += simulated(seeds)
    counts += sleepers(root / "asleep", max(2, kills // 10), seeds.start)
    shutil.rmtree(root)
    return counts


def main(options: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Kills conversions and resumes them; changes every field of every config."
    )
    parser.add_argument("--kills", type=int, default=400, help="conversions that are killed, each about twice")
    parser.add_argument(
        "--schedules",
        type=int,
        default=1000,
        help="of conversions that sleep and wake at any operation, for each kind of output",
    )
    parser.add_argument(
        "--seed", type=int, default=time.time_ns() % 100_000, help="of the moments, printed at the start"
    )
    args = parser.parse_args(options)
    print(f"seed {args.seed}", flush=True)
    root = Path(tempfile.mkdtemp(prefix="weightbeam-soak-"))
    counts: Counter[str] = Counter()
    rounds = max(1, args.kills // ROUND)
    for number in range(rounds):
        share = slice(args.schedules * number // rounds, args.schedules * (number + 1) // rounds)
        counts += one_round(
            root / str(number), min(args.kills, ROUND), range(args.seed, args.seed + args.schedules)[share]
        )
        print(f"round {number + 1} of {rounds}", dict(counts), flush=True)
    counts += configs()
    shutil.rmtree(root)
    print("\n".join(f"{count:>8,} {what}" for what, count in sorted(counts.items())))
    print("nothing lost: each loss would have ended this with an AssertionError")
    return 0


if __name__ == "__main__":
    sys.exit(main())
