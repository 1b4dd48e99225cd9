"""Runs an installed MaxText, as it is, on a CPU: `PYTHON tests/trainer/run_maxtext.py`, which takes jobs until its standard
input ends.

`PYTHON` is an interpreter of an environment that has MaxText; nothing of Weightbeam is imported. A job is a line of JSON:
`{"train": [flag, …], "losses": FILE}` is a run of the trainer, whose loss of each step is written to the file, by step;
`{"logits": [flag, …], "tokens": FILE.npy, "out": FILE.npy}` what `from_pretrained`'s model says of tokens. Each is answered
by a line, empty or what went wrong, as JSON; what MaxText prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")


def base() -> str:
    import maxtext

    return str(Path(maxtext.__file__).parent / "configs" / "base.yml")


def train(job: dict[str, Any]) -> None:
    """A run of the trainer."""
    from maxtext.trainers.pre_train import train as trainer

    metrics = Path(job["losses"]).with_suffix(".jsonl")
    trainer.main(["", base(), *job["train"], f"metrics_file={metrics}"])
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = {str(int(row["step"])): row["learning/loss"] for row in rows}
    Path(job["losses"]).write_text(json.dumps(losses))


def logits(job: dict[str, Any]) -> None:
    """The logits of the model that decoding and post-training load."""
    import jax
    import numpy as np
    from maxtext.configs import pyconfig
    from maxtext.utils import maxtext_utils, model_creation_utils

    config = pyconfig.initialize(["", base(), *job["logits"]])
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    made = model_creation_utils.from_pretrained(config, mesh)
    model = made[0] if isinstance(made, tuple) else made
    tokens = np.load(job["tokens"])
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    with mesh:
        found = model(
            decoder_input_tokens=tokens,
            decoder_positions=positions,
            decoder_segment_ids=np.ones_like(tokens),
            enable_dropout=False,
        )
    found = found[0] if isinstance(found, tuple) else found
    np.save(job["out"], np.asarray(found, np.float32))


def done(job: dict[str, Any]) -> str:
    """Nothing, or what went wrong: MaxText ends a process, too, where it can't go on."""
    try:
        train(job) if "train" in job else logits(job)
    except (Exception, SystemExit):
        return traceback.format_exc()
    return ""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(done(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
