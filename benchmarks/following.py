"""How long after its commit a checkpoint of a training run is a published model, beside an export of it.

    python -m benchmarks.following --folder out/bench --layers 8 --rounds 3 --json benchmarks/results.json

A Llama-like checkpoint of about 2 GB in bfloat16 is put into a run's folder under a new step by one rename, as Orbax
commits it, while `weightbeam watch` looks at the run every second. Every element of it differs from the step before and
from the release that the run began with, as while a run trains. What counts is the time from the rename until the
folder of the published step is there. In turns with that, as subprocesses, two exports of the same checkpoint: `weightbeam
export`, and one that compares what it writes with both others, as the watcher's does. Once with `verify: 0`, which is the
look, the export, and what changed; and once with the comparison of every element with the checkpoint that is the
default.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.figures import Figure, make_parser, report
from benchmarks.measure import WEIGHTBEAM, run, run_fresh, tell
from benchmarks.models import MESH, make_source

MODEL = "llama2-7b"
BF16 = np.dtype(ml_dtypes.bfloat16)
INTERVAL = 1  # seconds between two looks
POLL = 0.02
PATIENCE = 600  # seconds
READY = 6.0  # seconds in which a watcher makes ready for what comes next; steps of a run are further apart
HEADER = 8  # bytes of a safetensors file that say how long its header is

COMPARING = """
import sys
import weightbeam
from weightbeam.transforms.planning.options import ToHub
source, like, output, model, *others = sys.argv[1:]
how = ToHub(compared_with=tuple(others))
weightbeam.export(source, output, like=like, maxtext_model=model, how=how, progress=False)
"""


@contextlib.contextmanager
def watching(config: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Context manager: a watcher looks at the run again and again."""
    with log.open("wb") as printed:
        command = [WEIGHTBEAM, "watch", "--config", config, "--interval", f"{INTERVAL}s"]
        process = subprocess.Popen([str(part) for part in command], stdout=printed, stderr=printed)
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def draw(release: Path, drawn: Path) -> None:
    """A release with weights such as training makes. The other benchmarks' are random bits, with exponents that no
    weight has, and arithmetic with subnormal numbers takes its own time.
    """
    shutil.copytree(release, drawn)
    pool = np.random.default_rng(0).normal(0, 0.02, 1 << 24).astype(BF16).view(np.uint16)
    for values in _values(drawn):
        values[:] = np.resize(pool, values.shape)


def train(release: Path, trained: Path, bit: int) -> None:
    """A release of which every element differs from another one's: by one bit of the mantissa."""
    shutil.copytree(release, trained)
    for values in _values(trained):
        values ^= np.uint16(1 << bit)


def _values(release: Path) -> Iterator[np.ndarray]:
    """The elements of each file, as they are stored."""
    for file in release.glob("*.safetensors"):
        with file.open("rb") as opened:
            start = HEADER + int.from_bytes(opened.read(HEADER), "little")
        yield np.memmap(file, np.uint16, "r+", start)


def commit(made: Path, checkpoints: Path, step: int) -> None:
    """A new step of the run: links to the files of a checkpoint that was made, which appear by one rename."""
    growing = checkpoints / f"{step}.orbax-checkpoint-tmp"
    shutil.copytree(made, growing, copy_function=os.link)
    growing.rename(checkpoints / str(step))


def wait_for(place: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until a step is published.

    Raises:
      RuntimeError: the watcher has ended, or it takes too long.
    """
    late = time.monotonic() + PATIENCE
    while not place.exists():
        if process.poll() is not None or time.monotonic() > late:
            raise RuntimeError(log.read_text(errors="replace")[-4000:])
        time.sleep(POLL)


def measure(source: Path, folder: Path, rounds: int) -> tuple[list[Figure], dict[str, Any]]:
    """The figures, and every single round."""
    draw(source, like := folder / "like")
    made: list[Path] = []
    for bit in (1, 2):
        train(like, trained := folder / "trained", bit)
        made.append(folder / f"made-{bit}")
        command = (WEIGHTBEAM, "convert", "--source", trained, "--mesh", MESH, "--output", made[-1])
        run(*command, "--maxtext_model", MODEL)
        shutil.rmtree(trained)
    exported = folder / "exported"
    seconds: dict[str, list[float]] = {"export": [], "comparing": [], "verify: 0": [], "verify: 1": []}
    for verify in (0, 1):
        place = folder / f"verify-{verify}"
        checkpoints, output, config, log = (place / name for name in ("run", "output", "watch.yaml", "watch.log"))
        checkpoints.mkdir(parents=True)
        target = dict(name="hf", maxtext_model=MODEL, output=str(output))
        followed = dict(name="run", checkpoints=str(checkpoints), like=str(like), targets=[target])
        config.write_text(json.dumps(dict(output=str(place / "records"), verify=verify, runs=[followed])))
        with watching(config, log) as process:
            for number in range(rounds + 1):  # the first has a look at the run, and starts what does the work
                commit(made[number % 2] / "0", checkpoints, number)
                start = time.monotonic()
                wait_for(output / f"step-{number}", process, log)
                taken = time.monotonic() - start
                time.sleep(READY)
                if number:
                    seconds[f"verify: {verify}"].append(taken)
                    step, before = made[number % 2], output / f"step-{number - 1}"
                    command = (WEIGHTBEAM, "export", "--source", step, "--like", like, "--output", exported)
                    seconds["export"].append(run_fresh(exported, *command, "--maxtext_model", MODEL).seconds)
                    script = (sys.executable, "-c", COMPARING, step, like, exported, MODEL, before, like)
                    seconds["comparing"].append(run_fresh(exported, *script).seconds)
                    told = ", ".join(f"{name} {each[-1]:.1f} s" for name, each in seconds.items() if each)
                    tell("following", f"round {number} of {rounds}: {told}")
        shutil.rmtree(place)
    for step in (like, *made):
        shutil.rmtree(step)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    limit = medians["export"] + INTERVAL
    figures = [
        Figure("an export", "llama", medians["export"], "s"),
        Figure("an export that compares with both others", "llama", medians["comparing"], "s"),
        Figure("from commit to publication", "llama", medians["verify: 0"], "s", limit, "an export + a look"),
        Figure("the same, every element compared", "llama", medians["verify: 1"], "s"),
    ]
    return figures, {"seconds": seconds}


def main() -> None:
    """Measures, and prints the table."""
    args = make_parser(__doc__, rounds=3).parse_args()
    source = make_source("llama", args.folder, args.layers)
    folder = args.folder / "following"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    figures, details = measure(source, folder, args.rounds)
    shutil.rmtree(folder)
    report("following", figures, details, args)


if __name__ == "__main__":
    main()
