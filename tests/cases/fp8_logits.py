"""What MaxText's FP8 model makes of tokens: a program for an interpreter that has MaxText 0.2.5, and of this package
nothing but this file.

    python fp8_logits.py JOB RESULT

JOB is JSON: `config`, the keys of `maxtext.yml`; `checkpoint`, the item's folder; `tokens`. RESULT becomes an `.npy`,
(token, vocab) in float32. `fp8_logits.npz` was made so, by MaxText on the checkpoint that its own converter wrote of
`fp8_release.py`'s release.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

RUN = {
    "run_name": "logits",
    "skip_jax_distributed_system": True,
    "hardware": "cpu",
    "per_device_batch_size": 1,
    "dtype": "float32",
    "matmul_precision": "highest",
    "attention": "dot_product",
    "sparse_matmul": False,
    "megablox": False,
    "capacity_factor": -1.0,
    "enable_dropout": False,
}


def main(job_file: str, result: str) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp
    import maxtext
    import numpy as np
    from maxtext.configs import pyconfig
    from maxtext.utils import model_creation_utils

    job = json.loads(Path(job_file).read_text())
    tokens = jnp.asarray([job["tokens"]], jnp.int32)
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    told = {**job["config"], **RUN, "load_parameters_path": job["checkpoint"], "max_target_length": tokens.shape[1]}
    model, mesh = model_creation_utils.from_pretrained(pyconfig.initialize(["", str(base)], **told))
    positions = jnp.arange(tokens.shape[1])[None]
    with jax.set_mesh(mesh):
        logits = model(tokens, positions, decoder_segment_ids=jnp.ones_like(tokens), enable_dropout=False)
    logits = logits[0] if isinstance(logits, tuple) else logits
    np.save(result, np.asarray(logits[0], np.float32))


if __name__ == "__main__":
    main(*sys.argv[1:])
