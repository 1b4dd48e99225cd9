"""A function in the place of MaxText's loader of safetensors; nothing of MaxText is imported before it is put there.

MaxText calls it for `source_checkpoint_layout=safetensors_dynamic` (src/maxtext/common/checkpointing.py, e591f30).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from weightbeam.formats.storage import StorageError, open_store
from weightbeam.pipelines.loading.load import load
from weightbeam.pipelines.terminal.errors import Refused

MODULE, FUNCTION = "maxtext.common.checkpointing", "load_safetensors_dynamic_state"
UNNAMED = "default"  # base.yml's `model_name`
COLLECTION = "params"  # Linen's, that MaxText's caller unwraps for NNX


def install() -> None:
    """Puts `load_safetensors_dynamic_state` in the place of MaxText's.

    Raises:
      Refused: MaxText isn't installed, or this version of it has no such function.
    """
    try:
        module = importlib.import_module(MODULE)
    except ImportError as e:
        raise Refused(
            f"{MODULE} can't be imported: {e}; weightbeam.maxtext.install() is for an environment that has MaxText"
        ) from e
    if not hasattr(module, FUNCTION):
        raise Refused(f"{MODULE} has no {FUNCTION}: this version of MaxText loads safetensors in another way")
    setattr(module, FUNCTION, load_safetensors_dynamic_state)


def load_safetensors_dynamic_state(path: str, abstract_params: Any, maxtext_config: Any) -> tuple[None, dict[str, Any]]:
    """Loads the parameters of a release as MaxText's loader would, from any source, of any family and format.

    Args:
      path: what `load_parameters_path` names: a folder, `gs://…`, `hf://org/name`, or `org/name` of the hub.
      abstract_params: an `nnx.State`, or Linen's variables, whose leaves have shape, dtype and sharding.
      maxtext_config: MaxText's configuration.

    Returns:
      None, and Linen's collection: `{"params": nested dict of jax.Arrays}`.

    Raises:
      Refused, Failed: as `weightbeam.load`.
    """
    is_state = hasattr(abstract_params, "to_pure_dict")
    if access := getattr(maxtext_config, "hf_access_token", None):
        os.environ.setdefault("HF_TOKEN", access)
    options = {
        name: getattr(maxtext_config, name)
        for name in ("scan_layers", "param_scan_axis")
        if getattr(maxtext_config, name, None) is not None
    }
    if (name := getattr(maxtext_config, "model_name", UNNAMED)) != UNNAMED:
        options["maxtext_model"] = name
    tree = load(_source(path), abstract_params, **options)
    if is_state:
        tree = tree.to_pure_dict()
    return None, dict(tree) if isinstance(tree, Mapping) and COLLECTION in tree else {COLLECTION: tree}


def _source(path: str) -> str:
    """MaxText's way to name a source; `org/name` is the hub's where there is no such folder."""
    if not path:
        raise Refused("load_parameters_path is empty: name the release, as in load_parameters_path=hf://Qwen/Qwen3-8B")
    if "://" in path or path.startswith((".", "/", "~")) or path.count("/") != 1:
        return path
    try:
        open_store(path).check_readable()
    except StorageError:
        return f"hf://{path}"
    return path
