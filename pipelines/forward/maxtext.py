"""MaxText's side of a comparison: the release converted, and run by an interpreter that has MaxText."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from weightbeam.model_mappings.plan import PARAMETERS, Plan
from weightbeam.pipelines.terminal.errors import Failed, Refused
from weightbeam.transforms.comparing.logits import Trace

PROGRAM = Path(__file__).with_name("in_maxtext.py")
# of a tensor: its layer's number, and the module below the layer
IN_LAYER = re.compile(r"(?:.*\.)?layers\.(?P<layer>\d+)\.(?P<part>\w+)\.")
DECODER = f"{PARAMETERS}decoder."
LAST = 2000  # characters of what MaxText said last
TRIED = 60  # seconds in which an interpreter says whether it has MaxText


def check_python(python: str) -> None:
    """Raises `Refused` where an interpreter isn't there, or has no MaxText."""
    found = "import importlib.util as u; raise SystemExit(0 if u.find_spec('maxtext') else 3)"
    try:
        status = subprocess.run([python, "-P", "-c", found], capture_output=True, timeout=TRIED).returncode
    except (OSError, subprocess.TimeoutExpired) as e:
        raise Refused(f"--maxtext={python}: can't be run: {e}") from e
    if status:
        raise Refused(
            f"--maxtext={python}: has no MaxText; name the Python of an environment with `pip install maxtext`"
        )


def layers_and_parts(plan: Plan) -> tuple[list[str], Mapping[str, str]]:
    """What MaxText calls the layers of an unscanned plan, in order; and by what MaxText calls a module in one, what
    transformers calls it: `{"0/self_attention": "0/self_attn"}`. They are what a line of the table has on its sides.
    """
    layers: dict[int, str] = {}
    parts: dict[str, str] = {}
    for array in plan.arrays:
        path, _, rest = array.key.removeprefix(DECODER).partition(".")
        for match in (IN_LAYER.match(name) for part in array.parts for name in part.tensors):
            if match and rest and array.key.startswith(DECODER):
                number = int(match["layer"])
                layers.setdefault(number, path)
                parts.setdefault(f"{number}/{rest.split('.')[0]}", f"{number}/{match['part']}")
    return [layers[number] for number in sorted(layers)], parts


def run(
    python: str, folder: Path, config: Mapping[str, object], checkpoint: str, tokens: Sequence[int], plan: Plan
) -> tuple[np.ndarray, Trace]:
    """What MaxText makes of tokens: logits (token, vocab), and what its layers make, by transformers' names.

    Args:
      folder: where the two sides exchange files.
      config: the keys of `maxtext.yml`.
      checkpoint: URL of the item.

    Raises:
      Failed: MaxText failed, with what it said last.
    """
    layers, parts = layers_and_parts(plan)
    job, result = folder / "job.json", folder / "result.npz"
    job.write_text(
        json.dumps({"config": dict(config), "checkpoint": checkpoint, "tokens": list(tokens), "layers": layers})
    )
    log = folder / "maxtext.log"
    with log.open("wb") as said:
        words = [python, "-P", str(PROGRAM), str(job), str(result)]
        status = subprocess.run(words, stdout=said, stderr=subprocess.STDOUT, cwd=folder, env=_environment()).returncode
    if status or not result.exists():
        raise Failed(
            f"  MaxText failed (exit status {status}); it said last:\n{log.read_text(errors='replace')[-LAST:]}"
        )
    with np.load(result) as made:
        return made["logits"], {parts.get(name, name): made[name] for name in made.files if name != "logits"}


def _environment() -> dict[str, str]:
    """This process's, without what would have the other interpreter import this one's packages."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
