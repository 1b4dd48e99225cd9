"""What MaxText makes of tokens: a program for an interpreter that has MaxText, and of this package nothing but this file.

    python in_maxtext.py JOB RESULT

JOB is JSON: `config`, the keys of `maxtext.yml`; `checkpoint`, the URL of the item; `tokens`; and `layers`, the paths of
the decoder's layers in order, such as `layers_0`. RESULT becomes an `.npz`: `logits` (token, vocab), for each layer its
number (`0`), and for each module below it that makes as much its path (`0/self_attention`), each (token, embed), or
(token, stream, embed), all in float32. After each layer `PROGRESS` and its number, from 1, is a line of standard output.

MaxText's own model runs, eagerly. It is made without weights, whose initialisation takes longer to compile than all else
(half a minute of a CPU that has other work, which looks as if it stood still) and as much memory as the model. A layer's
weights are read when it is called, large ones one by one, and dropped behind it; those that lie in no layer (embedding, last norm, head) are read
first. Facts about MaxText and flax are of versions 0.2.5 and 0.12.12.
"""

# pyright: reportMissingImports=false
# MaxText and JAX are the other environment's.

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PROGRESS = "weightbeam: layer "
PARAMS = "params"
# What MaxText calls of a layer before it runs it: of Gemma 4 E2B's the keys and values that later layers share
# (models/gemma4_small.py, layers/nnx_decoders.py)
BEFORE = frozenset({"compute_shared_kv"})
LARGE = 1 << 26  # bytes of an array; reading takes two and a half times them besides
# How it runs, not what the model is: eagerly, on one CPU, in float32, dense attention, every expert without a capacity.
# MaxText's other ways to multiply experts are kernels for TPUs, which a CPU interprets step by step; the schedule in which
# deepseek3-671b splits batches is of a mesh.
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
    "use_batch_split_schedule": False,
    "capacity_factor": -1.0,
    "enable_dropout": False,
}


def main(job_file: str, result: str) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp

    # multiplications that run at once each hold a turned copy of their matrix
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    import maxtext
    import numpy as np
    from maxtext.configs import pyconfig

    job = json.loads(Path(job_file).read_text())
    tokens = jnp.asarray([job["tokens"]], jnp.int32)
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    config = pyconfig.initialize(["", str(base)], **{**job["config"], **RUN, "max_target_length": tokens.shape[1]})
    model = without_weights(config)
    weights = Weights(job["checkpoint"], model)
    weights.check(model)
    weights.fill(model, apart=[("decoder", layer) for layer in job["layers"]])
    seen: dict[str, Any] = {}
    watch(model, job["layers"], config.emb_dim, seen, weights)
    jax.checkpoint = lambda function, **how: function  # it would trace the layers, whose values are wanted
    positions = jnp.arange(tokens.shape[1])[None]
    with jax.set_mesh(model.mesh):
        logits = model(tokens, positions, decoder_segment_ids=jnp.ones_like(tokens), enable_dropout=False)
    logits = logits[0] if isinstance(logits, tuple) else logits
    np.savez(result, logits=np.asarray(logits[0], np.float32), **seen)


def without_weights(config: Any) -> Any:
    """MaxText's model: shapes where a checkpoint has values, and values of all else, such as random states."""
    import jax
    from flax import nnx
    from maxtext.utils import model_creation_utils

    make, model = model_creation_utils.create_nnx_abstract_model(config)
    with jax.set_mesh(model.mesh):
        nnx.update(model, jax.jit(lambda: nnx.state(make(), lambda path, value: not is_weight(value)))())
    return model


def is_weight(variable: Any) -> bool:
    """Whether a variable is one that MaxText's `from_pretrained` reads from a checkpoint."""
    from flax import nnx

    computed = (nnx.RngState, nnx.Cache, nnx.Intermediate, nnx.BatchStat)
    return isinstance(variable, nnx.Variable) and not isinstance(variable, computed)


class Weights:
    """The arrays of a checkpoint, by the paths of MaxText's variables.

    Args:
      url: of the item.
      model: MaxText's, whose weights they are.
    """

    def __init__(self, url: str, model: Any) -> None:
        from orbax import checkpoint

        # it reads as many arrays at once as may be in memory twice: the largest one's gigabytes
        at_once = 1 + max(variable.size * variable.dtype.itemsize for _, variable in variables(model)) // 10**9
        self._url, self._orbax = url, checkpoint
        self._reader = checkpoint.Checkpointer(checkpoint.PyTreeCheckpointHandler(restore_concurrent_gb=at_once))
        found = self._reader.metadata(url)
        if found is None or found.item_metadata is None:
            raise SystemExit(f"{url}: no Orbax checkpoint")
        self._tree = found.item_metadata.tree["params"]

    def collection(self, variable: Any) -> str:
        """The collection that a variable is read from: that of its class, where the checkpoint has such a one; else it is
        among the parameters, as MaxText's own reader has it (`common/checkpointing.py`, `_alias_legacy_collections`).
        """
        from flax.nnx import variablelib

        named = variablelib.variable_name_from_type(type(variable), allow_register=True)
        return named if named in self._tree else PARAMS

    def check(self, model: Any) -> None:
        """Raises `SystemExit` with all variables that the checkpoint hasn't, or has in another shape."""
        wrong = []
        for path, variable in variables(model):
            stored = self._tree
            for name in (self.collection(variable), *path):
                stored = stored.get(str(name), {}) if hasattr(stored, "get") else {}
            if (shape := getattr(stored, "shape", None)) is None:
                wrong.append(f"{'.'.join(map(str, path))}: isn't in the checkpoint")
            elif tuple(shape) != tuple(variable.shape):
                wrong.append(f"{'.'.join(map(str, path))}: MaxText wants {variable.shape}, the checkpoint has {shape}")
        if wrong:
            raise SystemExit("\n".join(wrong))

    @contextlib.contextmanager
    def held(self, module: Any, at: tuple[str, ...]) -> Iterator[None]:
        """Has a module's variables read while something is done with it, and dropped behind it."""
        from flax import nnx

        empty = shapes(module)
        self.fill(module, at)
        try:
            yield
        finally:
            nnx.update(module, empty)
            let_go()

    def fill(self, module: Any, at: tuple[str, ...] = (), apart: Any = ()) -> None:
        """Reads the variables of a module, which lies at `at`, but for those below the paths `apart`."""
        import jax

        wanted = {}
        for path, variable in variables(module):
            if not any(path[: len(below)] == below for below in apart):
                place = (self.collection(variable), *at, *path)
                wanted[place] = jax.ShapeDtypeStruct(variable.shape, variable.dtype)
        for some in portions(wanted):
            self._read(module, at, some)

    def _read(self, module: Any, at: tuple[str, ...], wanted: dict[tuple[str, ...], Any]) -> None:
        """Reads some variables of a module, by their paths, and lets go of what reading took besides."""
        import jax
        from flax import nnx

        target = nested(wanted)
        here = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
        how = jax.tree.map(
            lambda shape: self._orbax.ArrayRestoreArgs(sharding=here, dtype=shape.dtype, strict=True), target
        )
        made = self._reader.restore(self._url, item={"params": target}, transforms={}, restore_args={"params": how})[
            "params"
        ]
        for below in made.values():
            for name in at:
                below = below[name]
            nnx.update(module, below)
        del made
        let_go()


def portions(wanted: dict[tuple[str, ...], Any]) -> list[dict[tuple[str, ...], Any]]:
    """Arrays that are read together: large ones each by itself."""
    large = [{path: each} for path, each in wanted.items() if each.size * each.dtype.itemsize > LARGE]
    small = {path: each for path, each in wanted.items() if each.size * each.dtype.itemsize <= LARGE}
    return [*large, small] if small else large


def let_go() -> None:
    """Gives the system what isn't needed: modules and readers lie in circles, and the C library keeps what was freed."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def variables(module: Any) -> list[tuple[tuple[str, ...], Any]]:
    """A module's weights by their paths."""
    from flax import nnx

    return [
        (tuple(map(str, path)), value)
        for path, value in nnx.state(module, lambda path, value: is_weight(value)).flat_state()
    ]


def shapes(module: Any) -> dict[str, Any]:
    """A module's weights without values. (`nnx.state` would give the very variables, which are filled later.)"""
    import jax

    return nested({path: jax.ShapeDtypeStruct(value.shape, value.dtype) for path, value in variables(module)})


def nested(flat: dict[tuple[str, ...], Any]) -> dict[str, Any]:
    """A tree of what has paths."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        below = tree
        for name in path[:-1]:
            below = below.setdefault(name, {})
        below[path[-1]] = value
    return tree


def watch(model: Any, layers: list[str], width: int, seen: dict[str, Any], weights: Weights) -> None:
    """Has the layers read their weights as they are called, and the layers and the modules below them note what they
    make. MaxText makes a layer's modules anew of their state when it runs it (`nnx.merge`), so what is known of one is
    its class.
    """
    import numpy as np
    from flax import nnx

    by_path = {"_".join(map(str, path)): module for path, module in nnx.iter_modules(model.decoder) if path}
    called: list[dict[int, str]] = []  # by layer, what its modules are called

    def place() -> tuple[str, ...]:
        """Where the weights of the layer lie that is next."""
        return "decoder", layers[len(called)]

    def reading(method: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: Any, *args: Any, **kwargs: Any) -> Any:
            with weights.held(self, place()):
                return method(self, *args, **kwargs)

        return read

    def noted(module: Any, made: Any) -> Any:
        """What a module has made, once it is noted, if it is one of the layer that was called last."""
        values = made[0] if isinstance(made, tuple) else made
        path = called[-1].get(id(module)) if called else None
        if path is not None and getattr(values, "ndim", 0) in (3, 4) and values.shape[-1] == width:
            seen[f"{len(called) - 1}/{path}".rstrip("/")] = np.asarray(values[0], np.float32)
        return made

    def of_layer(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            held = weights.held(self, place())
            called.append({id(module): ".".join(map(str, path)) for path, module in nnx.iter_modules(self)})
            with held:
                made = call(self, *args, **kwargs)
            noted(self, made)
            print(f"{PROGRESS}{len(called)}", flush=True)
            return made

        return run

    def of_part(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: noted(self, call(self, *args, **kwargs))

    modules = [by_path[path] for path in layers]
    kinds = {type(module) for module in modules}
    for kind in kinds | {type(part) for module in modules for _, part in nnx.iter_modules(module)}:
        if "__call__" in vars(kind):
            kind.__call__ = (of_layer if kind in kinds else of_part)(kind.__call__)
    for kind in kinds:
        for name in BEFORE.intersection(vars(kind)):
            setattr(kind, name, reading(getattr(kind, name)))


if __name__ == "__main__":
    main(*sys.argv[1:])
