"""Writes the parameter trees of an installed MaxText: `PYTHON tests/facts/maxtext_trees.py FOLDER [MODEL …] [KEY=VALUE …]`.

`PYTHON` is an interpreter of an environment that has MaxText from the package index (0.2.5 was run with jax 0.11.1, flax
0.12.12, Python 3.12, on a CPU). Each model is made abstractly, at its full size, scanned and unscanned; nothing is
allocated. `MODEL+mtp` and `MODEL+mm` are a model with its prediction layer, or with its towers; `KEY=VALUE` is a setting
of MaxText, such as a size, for a model that MaxText has no name for. `make_trees.py` keeps
the facts of what this writes: `<model>--{scan,unscan}.json.gz`, with path, shape and logical axes of each variable that
a checkpoint may hold, those of collections beside `params` by themselves.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

LEFT_OUT = ("gpt3-", "envy-", "qwen3-custom-", "deepseek-custom", "deepseek3-test", "deepseek3-671b-")
SIZES = [
    "decoder_block",
    "param_scan_axis",
    "num_decoder_layers",
    "emb_dim",
    "num_query_heads",
    "num_kv_heads",
    "head_dim",
    "mlp_dim",
    "vocab_size",
    "logits_via_embedding",
    "scan_layers",
    "num_experts",
    "first_num_dense_layers",
    "mtp_num_layers",
    "inhomogeneous_layer_cycle_interval",
    "base_moe_mlp_dim",
]
MORE = {"+mtp": "mtp_num_layers=1", "+mm": "use_multimodal=true"}  # what a name may end with
COLLECTIONS = {"Param": "params", "MoEBiasVar": "MoEBiasVar", "Tid2EidVar": "Tid2EidVar"}


def configuration(model: str, scan: bool, *more: str) -> Any:
    """MaxText's configuration of a model."""
    import maxtext
    from maxtext.configs import pyconfig

    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    return pyconfig.initialize(
        [
            "",
            str(base),
            f"model_name={model}",
            f"scan_layers={str(scan).lower()}",
            "run_name=trees",
            "base_output_directory=",
            "hardware=cpu",
            "skip_jax_distributed_system=true",
            "per_device_batch_size=1",
            "max_target_length=128",
            "enable_checkpointing=false",
            "weight_dtype=float32",
            "override_model_config=true",
            "attention=dot_product",
            *more,
        ]
    )


def logical_axes(variable: Any, rank: int) -> list[str | None]:
    """The logical name of each axis of a variable, the stacked one where its metadata says that it lies."""
    metadata = variable.get_metadata()
    named = next(
        (metadata[key] for key in ("out_sharding", "sharding_names", "sharding") if metadata.get(key) is not None), ()
    )
    axes = [axis if axis is None or isinstance(axis, str) else list(axis) for axis in named]
    stacked = metadata.get("nnx_partition_name") or metadata.get("partition_name")
    if stacked and "param_scan_axis" in metadata and stacked not in axes:
        axes.insert(metadata["param_scan_axis"], stacked)
    return axes if len(axes) <= rank else axes[:rank]


def variables(config: Any) -> dict[str, dict[str, dict[str, Any]]]:
    """Path, shape, dtype and logical axes of every variable, by collection."""
    import jax
    from flax import nnx
    from maxtext.utils import maxtext_utils, model_creation_utils

    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    make = model_creation_utils.get_nnx_create_model_fn(config, mesh)
    with nnx.logical_axis_rules(config.logical_axis_rules) if hasattr(nnx, "logical_axis_rules") else mesh:
        state = nnx.state(nnx.eval_shape(make))
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for path, variable in nnx.to_flat_state(state):
        collection = COLLECTIONS.get(type(variable).__name__)
        if collection is None:
            continue
        value = variable.get_value() if hasattr(variable, "get_value") else variable.value
        parts = [str(part) for part in path]
        found.setdefault(collection, {})["-".join([collection, *parts])] = {
            "path": "/".join(["params", collection, *parts]),
            "shape": list(value.shape),
            "dtype": value.dtype.name,
            "axes": logical_axes(variable, len(value.shape)),
        }
    return found


def dump(folder: Path, tag: str, scan: bool, settings: list[str]) -> None:
    """One tree, as a file."""
    model = tag.partition("+")[0]
    more = [*([MORE[tag.removeprefix(model)]] if tag != model else []), *settings]
    config = configuration(model, scan, *more)
    found = variables(config)
    tree = {
        "tag": tag,
        "model": model,
        "scan_layers": scan,
        "overrides": more,
        "cfg": {key: _plain(getattr(config, key)) for key in SIZES},
        "params": found.pop("params"),
        "other_collections": found,
    }
    name = folder / f"{tag}--{'scan' if scan else 'unscan'}.json.gz"
    with name.open("wb") as raw, gzip.GzipFile("", "wb", mtime=0, fileobj=raw) as file:
        file.write(json.dumps(tree, separators=(",", ":")).encode())
    (folder / "_base_rules.json").write_text(
        json.dumps({"mesh_axes": list(config.mesh_axes), "logical_axis_rules": _plain(config.logical_axis_rules)})
    )


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if isinstance(value, (int, float, bool, str, type(None))) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("words", nargs="*", metavar="MODEL|KEY=VALUE")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    import maxtext

    configs = Path(maxtext.__file__).parent / "configs" / "models"
    settings = [word for word in args.words if "=" in word]
    models = [word for word in args.words if "=" not in word] or sorted(
        file.stem for file in configs.glob("*.yml") if not file.stem.startswith(LEFT_OUT)
    )
    for model in models:
        for scan in (True, False):
            try:
                dump(args.folder, model, scan, settings)
                print(model, "scanned" if scan else "unscanned", flush=True)
            except Exception as e:
                print(model, scan, type(e).__name__, str(e).splitlines()[:1], flush=True)
                if os.environ.get("DEBUG"):
                    traceback.print_exc(file=sys.stdout)


if __name__ == "__main__":
    main()
