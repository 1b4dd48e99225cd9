"""Loads a Hugging Face release into a Flax NNX module, sharded over all devices: `python examples/load_nnx.py
[FOLDER|hf://…]`.

The module's attributes spell MaxText's keys, so its abstract state says what to load: shapes, dtypes and shardings.
Without an argument it writes a small release first.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import weightbeam as wb


class Embedder(nnx.Module):
    """The embedding of a model, and its last norm: the part of a release that this example uses."""

    def __init__(self, vocab: int, embed: int):
        self.embedding = nnx.Param(jnp.zeros((vocab, embed), jnp.bfloat16))


def tree_of(source: str, mesh: Mesh) -> nnx.State:
    """All parameters of a release as an abstract NNX state, each array sharded by MaxText's rules."""
    state: dict = {}
    for key, array in wb.open(source).items():
        *folders, name = key.removeprefix("params.params.").split(".")
        place = state
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = nnx.Param(jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding(mesh)))
    return nnx.State(state)


def main(source: str) -> nnx.State:
    """Loads it, puts the embedding into a module, and looks a token up."""
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    params = wb.load(source, like=tree_of(source, mesh))
    embedding = params["token_embedder"]["embedding"]
    model = nnx.eval_shape(lambda: Embedder(*embedding.shape))
    nnx.update(model, nnx.State({"embedding": embedding}))
    token = jax.device_put(model.embedding[...], NamedSharding(mesh, PartitionSpec()))[7]
    print(f"{len(jax.tree.leaves(params))} arrays on {jax.device_count()} devices; token 7 begins with {token[:3]}")
    return params


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        sys.path.insert(0, str(Path(__file__).parent))
        from demo import write_checkpoint

        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(Path(folder) / "hf")
            main(f"{folder}/hf")
