"""A training run without the training: stock Orbax's asynchronous CheckpointManager writes MaxText-shaped states, whose
weights change each step.

    python tests/training_run.py --state STATE --root CHECKPOINTS --steps 0:10 --seconds 1 --keep 2

`STATE` is a checkpoint whose arrays give names, shapes and dtypes. The weights of a step follow from its number alone,
so that anyone can say what a step holds: `weights_of`.
"""

from __future__ import annotations

import argparse
import sys
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from lazily import lazily

jax = lazily("jax")
ocp = lazily("orbax.checkpoint")

STILL = "decoder.decoder_norm.scale"  # an array that no step changes


def load_state(step: Path) -> dict[str, Any]:
    """A checkpoint's whole tree, on the host."""
    checkpointer = ocp.PyTreeCheckpointer()
    tree = checkpointer.metadata(step / "items").item_metadata.tree
    return checkpointer.restore(
        step / "items", restore_args=jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    )


def weights_of(state: Any, step: int, seed: int = 0, path: str = "") -> Any:
    """A state with the weights that it has at a step; all else is as it was but for the counters."""
    if isinstance(state, Mapping):
        return {
            key: weights_of(value, step, seed, f"{path}.{key}" if path else str(key)) for key, value in state.items()
        }
    if isinstance(state, list | tuple):
        return [weights_of(value, step, seed, f"{path}.{key}") for key, value in enumerate(state)]
    if state is None or not path.startswith("params.") or path.endswith(STILL):
        return np.asarray(step, np.asarray(state).dtype) if path == "step" else state
    values = np.asarray(state)
    noise = np.random.default_rng([zlib.crc32(path.encode()), step, seed]).standard_normal(values.shape, np.float32)
    return (values.astype(np.float32) + noise * np.float32(0.01)).astype(values.dtype)


def manager(root: str, keep: int | None) -> ocp.CheckpointManager:
    """As MaxText makes it: an item `items`, saved in the background."""
    return ocp.CheckpointManager(root, item_names=("items",), options=ocp.CheckpointManagerOptions(max_to_keep=keep))


def save(checkpoints: ocp.CheckpointManager, step: int, state: Any, lora: Mapping[str, Any] | None = None) -> None:
    """As MaxText saves it: whether layers are stacked stands in the metadata."""
    custom = {"scan_layers": True} | ({"lora": dict(lora)} if lora else {})
    checkpoints.save(step, args=ocp.args.Composite(items=ocp.args.PyTreeSave(state)), custom_metadata=custom)


def write(
    root: Path, *steps: int, model: tuple[Path, dict[str, Any]], seed: int = 0, keep: int | None = None, **changed: Any
) -> None:
    """Steps of a run, committed.

    Args:
      model: a release, and the state with which a run of it begins.
      changed: makes another of a weight of the decoder.
    """
    checkpoints = manager(str(root), keep)
    for step in steps:
        state = weights_of(model[1], step, seed)
        for key, values in changed.items():
            held = state["params"]["params"]["decoder"]
            held[key] = values(held[key])
        save(checkpoints, step, state)
        checkpoints.wait_until_finished()
    checkpoints.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--root", required=True)
    parser.add_argument("--steps", default="0:5")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--keep", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    state = load_state(args.state)
    first, last = map(int, args.steps.split(":"))
    checkpoints = manager(args.root, args.keep)
    for step in range(first, last):
        begun = time.monotonic()
        save(checkpoints, step, weights_of(state, step, args.seed))
        print(step, flush=True)
        time.sleep(max(0.0, args.seconds - (time.monotonic() - begun)))
    checkpoints.wait_until_finished()
    checkpoints.close()


if __name__ == "__main__":
    sys.exit(main())
