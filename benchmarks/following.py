"""How long after its commit a checkpoint of a training run is a published model, beside an export of it.

    python -m benchmarks.following --folder out/bench --layers 8 --rounds 3 --json benchmarks/results.json

A Llama-like checkpoint of about 2 GB in bfloat16 is put into a run's folder under a new step by one rename, as Orbax
commits it, while `weightbeam watch` looks at the run every second. What counts is the time from the rename until the
folder of the published step is there. In turns with that `weightbeam export` of the same checkpoint, as a subprocess.
Once with `verify: 0`, which is the export, the look, and the description of what changed since the step before; and
once with the comparison of every element that is the default.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.bench import MESH, make_source, tell
from benchmarks.figures import Figure, make_parser, report
from benchmarks.measure import WEIGHTBEAM, run

MODEL = "llama2-7b"
INTERVAL = 1  # seconds between two looks
POLL = 0.02
PATIENCE = 600  # seconds

CONFIG = """\
output: {folder}/records
verify: {verify}
runs:
  - checkpoints: {checkpoints}
    name: run
    like: {like}
    targets: [{{name: hf, maxtext_model: {model}, output: {output}}}]
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
    made = folder / "made"
    command = (WEIGHTBEAM, "convert", "--source", source, "--mesh", MESH, "--output", made, "--maxtext_model", MODEL)
    run(*command)
    exported = folder / "exported"
    command = (WEIGHTBEAM, "export", "--source", made, "--output", exported, "--maxtext_model", MODEL)
    seconds: dict[str, list[float]] = {"export": [], "verify: 0": [], "verify: 1": []}
    for verify in (0, 1):
        place = folder / f"verify-{verify}"
        checkpoints, output, config, log = (place / name for name in ("run", "output", "watch.yaml", "watch.log"))
        checkpoints.mkdir(parents=True)
        config.write_text(
            CONFIG.format(
                folder=place,
                interval=INTERVAL,
                verify=verify,
                checkpoints=checkpoints,
                like=source,
                model=MODEL,
                output=output,
            )
        )
        with watching(config, log) as process:
            for number in range(rounds + 1):  # the first has a look at the run, and starts what does the work
                commit(made / "0", checkpoints, number)
                start = time.monotonic()
                wait_for(output / f"step-{number}", process, log)
                if number:
                    seconds[f"verify: {verify}"].append(time.monotonic() - start)
                    seconds["export"].append(run(*command).seconds)
                    shutil.rmtree(exported)
                    told = ", ".join(f"{name} {taken[-1]:.1f} s" for name, taken in seconds.items() if taken)
                    tell("following", f"round {number} of {rounds}: {told}")
        shutil.rmtree(place)
    shutil.rmtree(made)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    figures = [
        Figure("an export", "llama", medians["export"], "s"),
        Figure(
            "from commit to publication",
            "llama",
            medians["verify: 0"],
            "s",
            medians["export"] + INTERVAL,
            because="an export + a look",
        ),
        Figure("the same, every element compared", "llama", medians["verify: 1"], "s"),
    ]
    return figures, {"seconds": seconds}


def main() -> int:
    """Measures, and prints the table."""
    parser = make_parser(__doc__, rounds=3)
    args = parser.parse_args()
    source = make_source("llama", args.folder, args.layers)
    folder = args.folder / "following"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    figures, details = measure(source, folder, args.rounds)
    shutil.rmtree(folder)
    report("following", figures, details, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
