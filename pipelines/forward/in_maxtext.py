"""What MaxText makes of tokens: a program for an interpreter that has MaxText, and of this package nothing but this file.

    python in_maxtext.py JOB RESULT

JOB is JSON: `config`, the keys of `maxtext.yml`; `checkpoint`, the URL of the item; `tokens`; and `layers`, the paths of
the decoder's layers in order, such as `layers_0`. RESULT becomes an `.npz`: `logits` (token, vocab), for each layer its
number (`0`), and for each module below it that makes as much its path (`0/self_attention`), each (token, embed), all in
float32. Facts about MaxText are of version 0.2.5.
"""

# pyright: reportMissingImports=false
# MaxText and JAX are the other environment's.

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

# How it runs, not what the model is: eagerly, on one CPU, in float32, dense attention, every expert without a capacity.
RUN = {
    "run_name": "logits",
    "skip_jax_distributed_system": True,
    "hardware": "cpu",
    "per_device_batch_size": 1,
    "dtype": "float32",
    "weight_dtype": "float32",
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
    config = pyconfig.initialize(["", str(base)], **told)
    model, mesh = model_creation_utils.from_pretrained(config)
    seen: dict[str, Any] = {}
    watch(model, job["layers"], config.emb_dim, seen)
    jax.checkpoint = lambda function, **how: function  # it would trace the layers, whose values are wanted
    positions = jnp.arange(tokens.shape[1])[None]
    with jax.set_mesh(mesh):
        logits = model(tokens, positions, decoder_segment_ids=jnp.ones_like(tokens), enable_dropout=False)
    logits = logits[0] if isinstance(logits, tuple) else logits
    seen["logits"] = logits[0]
    made: dict[str, Any] = {name: np.asarray(values, np.float32) for name, values in seen.items()}
    np.savez(result, **made)


def watch(model: Any, layers: list[str], width: int, seen: dict[str, Any]) -> None:
    """Has the layers, and the modules below them, note what they make as they are called. MaxText makes a layer's modules
    anew of their state when it runs it (`nnx.merge`), so what is known of one is its class.
    """
    from flax import nnx

    by_path = {"_".join(map(str, path)): module for path, module in nnx.iter_modules(model.decoder) if path}
    called: list[dict[int, str]] = []  # by layer, what its modules are called

    def noting(kind: type, is_layer: bool) -> None:
        call = kind.__call__

        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_layer:
                called.append({id(module): ".".join(map(str, path)) for path, module in nnx.iter_modules(self)})
            made = call(self, *args, **kwargs)
            values = made[0] if isinstance(made, tuple) else made
            path = called[-1].get(id(self)) if called else None
            if path is not None and getattr(values, "ndim", 0) == 3 and values.shape[-1] == width:
                seen[f"{len(called) - 1}/{path}".rstrip("/")] = values[0]
            return made

        kind.__call__ = noted

    modules = [by_path[path] for path in layers]
    kinds = {type(module) for module in modules}
    below = {type(part) for module in modules for _, part in nnx.iter_modules(module)} - kinds
    for kind in kinds | below:
        if "__call__" in vars(kind):
            noting(kind, kind in kinds)


if __name__ == "__main__":
    main(*sys.argv[1:])
