"""MaxText's side of a comparison: the release converted, and run by an interpreter that has MaxText."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from weightbeam.model_mappings.plan import PARAMETERS, ArrayPlan
from weightbeam.pipelines.forward.in_maxtext import PROGRESS
from weightbeam.pipelines.terminal.errors import Failed, Refused
from weightbeam.pipelines.terminal.progress import Report, watch_progress
from weightbeam.transforms.comparing.logits import Trace

PROGRAM = Path(__file__).with_name("in_maxtext.py")
# of a tensor: its layer's number, and the module below the layer
IN_LAYER = re.compile(r"(?:.*\.)?layers\.(?P<layer>\d+)\.(?P<part>\w+)\.")
DECODER = f"{PARAMETERS}decoder."
LAST = 2000  # characters of what MaxText said last
LOOK = 0.5  # seconds between looks at how far it is
TRIED = 60  # seconds in which an interpreter says whether it has MaxText


def check_python(python: str, patience: float) -> str:
    """The version of MaxText that an interpreter has, which says so within seconds.

    Raises:
      Refused: it can't be run, or has none.
    """
    seconds = min(TRIED, patience)
    find = "import importlib.metadata as m; print(m.version('maxtext'))"
    try:
        found = subprocess.run([python, "-P", "-c", find], capture_output=True, timeout=seconds, text=True)
    except subprocess.TimeoutExpired as e:
        raise Refused(f"--maxtext={python}: hasn't said within {seconds:g} seconds whether it has MaxText") from e
    except OSError as e:
        raise Refused(f"--maxtext={python}: can't be run: {e}") from e
    if found.returncode:
        raise Refused(f"--maxtext={python}: has no MaxText; name the Python of an environment that has it")
    return found.stdout.strip()


def layers_and_parts(plan: ArrayPlan) -> tuple[list[str], Mapping[str, str]]:
    """What MaxText calls the layers of an unscanned plan, in order, each once: Gemma 2's are two of a release's. And by
    what MaxText calls a layer or a module in one, what transformers calls it: `{"0": "1", "0/self_attention_local":
    "0/self_attn"}`; what a layer of MaxText's makes is what the last of the release's in it makes. They are what a line of
    the table has on its sides.
    """
    held: dict[str, set[int]] = {}  # by MaxText's layer, the release's
    found: dict[tuple[str, str], str] = {}
    for array in plan.arrays:
        path, _, rest = array.key.removeprefix(DECODER).partition(".")
        for match in (IN_LAYER.match(name) for part in array.parts for name in part.tensors):
            if match and rest and array.key.startswith(DECODER):
                number = int(match["layer"])
                held.setdefault(path, set()).add(number)
                found.setdefault((path, rest.split(".")[0]), f"{number}/{match['part']}")
    paths = sorted(held, key=lambda path: min(held[path]))
    names = {str(at): str(max(held[path])) for at, path in enumerate(paths)}
    return paths, names | {f"{paths.index(path)}/{module}": name for (path, module), name in found.items()}


def run(
    python: str,
    folder: Path,
    config: Mapping[str, object],
    checkpoint: str,
    tokens: Sequence[int],
    plan: ArrayPlan,
    patience: float,
    report: Report | None,
) -> tuple[np.ndarray, Trace]:
    """What MaxText makes of tokens: logits (token, vocab), and what its layers make, by transformers' names.

    Args:
      folder: where the two sides exchange files.
      config: the keys of `maxtext.yml`.
      checkpoint: URL of the item.
      patience: seconds that it may take to begin, and for each layer.

    Raises:
      Failed: MaxText failed, or came no further, with what it said last.
    """
    layers, parts = layers_and_parts(plan)
    job, result, log = folder / "job.json", folder / "result.npz", folder / "maxtext.log"
    job.write_text(
        json.dumps({"config": dict(config), "checkpoint": checkpoint, "tokens": list(tokens), "layers": layers})
    )
    log.touch()
    a_layer = sum(array.nbytes for array in plan.arrays) // max(1, len(layers))

    def done() -> int:
        return _layers_done(log)

    def state() -> str:
        return f"layer {done()} of {len(layers)}"

    with watch_progress(a_layer * len(layers), lambda: a_layer * done(), "running MaxText", report, state):
        status = _finish([_from_anywhere(python), "-P", str(PROGRAM), str(job), str(result)], folder, log, patience)
    said = log.read_text(errors="replace")[-LAST:]
    if status is None:
        raise Failed(
            f"  MaxText came no further for {patience:g} seconds behind {state()}, and was stopped; --maxtext_patience gives it more. It said last:\n{said}"
        )
    if status or not result.exists():
        raise Failed(f"  MaxText failed (exit status {status}); it said last:\n{said}")
    with np.load(result) as made:
        return made["logits"], {parts.get(name, name): made[name] for name in made.files if name != "logits"}


def _from_anywhere(program: str) -> str:
    """A program that may be named from this process's folder, by what names it from any other. Links stay: an
    environment's Python is one.
    """
    return os.path.abspath(program) if os.path.dirname(program) else program


def _finish(words: Sequence[str], folder: Path, log: Path, patience: float) -> int | None:
    """Runs a program to its end; its exit status, or None where no layer came for so many seconds. It has a process
    group of its own, which doesn't outlive this call, however it ends.
    """
    with log.open("wb") as said:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            cwd=folder,
            env=_environment(),
            start_new_session=True,
        )
    try:
        far, since = 0, time.monotonic()
        while time.monotonic() - since < patience:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(min(LOOK, patience))
            if (now := _layers_done(log)) != far:
                far, since = now, time.monotonic()
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _layers_done(log: Path) -> int:
    """How many layers MaxText has run."""
    return log.read_bytes().count(PROGRESS.encode())


def _environment() -> dict[str, str]:
    """This process's, without what would have the other interpreter import this one's packages."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
