"""Facts about MaxText and Hugging Face that the tests compare with. Nothing here is made by the code under test."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

import ml_dtypes
import numpy as np

from weightbeam.model_mappings.config import Config, Layout
from weightbeam.model_mappings.plan import TensorSpec
from weightbeam.model_mappings.registry import family_of
from weightbeam.model_mappings.versions import UNSAID

HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Tree:
    """The parameters of one MaxText model as MaxText builds them, see `make_trees.py`.

    Attributes:
      model: MaxText's name.
      scan, mtp, multimodal: how it was built.
      vocab: rows of its embedding.
      config: Hugging Face's `config.json`, as far as MaxText has one.
      arrays: `{path: (shape, logical name of each axis)}`, None where an axis has no name.
      others: the variables of other collections likewise, where the tree says so.
    """

    model: str
    scan: bool
    mtp: bool
    multimodal: bool
    vocab: int
    config: dict
    arrays: dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]
    others: dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]


def load_trees(version: str = UNSAID) -> dict[str, Tree]:
    """Every tree of a version of MaxText by its name: `llama2-7b--scan`, `llama2-7b--unscan`, …"""
    trees = json.loads(gzip.decompress((HERE / f"trees-{version}.json.gz").read_bytes()))
    return {
        name: Tree(**tree | {"arrays": _spread(tree["arrays"]), "others": _spread(tree.get("others", []))})
        for name, tree in trees.items()
    }


# for MaxText's models whose Hugging Face config is sizes alone
MODEL_TYPES = {"llama": "llama", "mistral": "mistral", "kimi": "kimi_k2"}

LLAMA4 = dict(
    hidden_size=5120, num_hidden_layers=48, num_attention_heads=40, num_key_value_heads=8, head_dim=128, intermediate_size=8192,
    intermediate_size_mlp=16384, vocab_size=202048,
)  # fmt: skip
# for MaxText's models that have none: what transformers' configuration and MaxText's src/maxtext/configs/models say
CONFIGS = {
    "llama4-17b-16e": {
        "model_type": "llama4",
        "text_config": LLAMA4 | dict(num_local_experts=16, interleave_moe_layer_step=1),
    },
    "gemma-2b": dict(
        model_type="gemma",
        hidden_size=2048,
        intermediate_size=16384,
        num_hidden_layers=18,
        num_attention_heads=8,
        num_key_value_heads=1,
    ),
    "gemma-7b": dict(
        model_type="gemma",
        hidden_size=3072,
        intermediate_size=24576,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=16,
    ),
    "llama4-17b-128e": {"model_type": "llama4_text"}
    | LLAMA4
    | dict(num_local_experts=128, interleave_moe_layer_step=2),
}
DEEPSEEK4_TINY = (  # MaxText keeps the sizes of the large model for it
    dict(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=32,
        moe_intermediate_size=64,
        n_routed_experts=16,
        num_experts_per_tok=4,
    )
    | dict(q_lora_rank=16, o_lora_rank=16, o_groups=4, index_n_heads=4, index_head_dim=32)
)
THINKER = {  # by part
    "text_config": dict(vocab_size=152064, num_attention_heads=32, head_dim=128),
    "vision_config": dict(out_hidden_size=2048),
    "audio_config": dict(output_dim=2048),
}


def config_of(tree: Tree) -> dict:
    """`config.json` of a tree's model, also where MaxText has none, or one without `model_type` or with other sizes."""
    config = CONFIGS.get(tree.model, tree.config)
    if tree.model == "deepseek4-tiny":
        return config | DEEPSEEK4_TINY
    if tree.model.startswith("qwen3-vl-"):
        return config | {"model_type": "qwen3_vl_moe" if tree.model.endswith("-a3b") else "qwen3_vl"}
    if tree.model.startswith(("cosmos3-", "weaver-")):  # MaxText's class for it drops the name of its kind
        return config | {"model_type": f"{tree.model.partition('-')[0]}_omni"}
    if tree.model == "qwen3-omni-30b-a3b":  # transformers' defaults, but for some
        return config | {
            "thinker_config": {part: config["thinker_config"][part] | sizes for part, sizes in THINKER.items()}
        }
    inferred = next((kind for prefix, kind in MODEL_TYPES.items() if tree.model.startswith(prefix)), None)
    return config if "model_type" in config else {"model_type": inferred} | config


def _spread(arrays: list[list]) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]:
    """One entry for each layer, where `make_trees.py` keeps one for layers that are alike."""
    spread = {}
    for path, runs, shape, axes in arrays:
        entry = tuple(shape), tuple(axes) or (None,) * len(shape)
        numbers = [number for first, last in runs for number in range(first, last + 1)]
        spread.update({path.format(number): entry for number in numbers} if runs else {path: entry})
    return spread


@dataclasses.dataclass(frozen=True)
class Headers:
    """A tiny checkpoint as its headers tell it, see `make_headers.py`.

    Attributes:
      config: its `config.json`.
      tensors: what the headers say of each tensor.
    """

    config: dict
    tensors: dict[str, TensorSpec]


def load_headers() -> dict[str, Headers]:
    """Every checkpoint by its name."""
    found = json.loads(gzip.decompress((HERE / "headers.json.gz").read_bytes()))
    return {
        name: Headers(entry["config"], {tensor: _spec(*header) for tensor, header in entry["tensors"].items()})
        for name, entry in found.items()
    }


def _spec(dtype: str, *shape: int) -> TensorSpec:
    return TensorSpec(shape, np.dtype(getattr(ml_dtypes, dtype, dtype)), "model.safetensors")


def layouts_of(config: dict) -> dict[str, Layout]:
    """Every layout that a model's family has, by name: `scanned`, `unscanned`, and both with the model's towers, if it
    has any.
    """
    family = family_of(Config(config))
    layouts = {name: Layout(scan=name == "scanned") for name in family.layouts}
    if family.towers and not {"vision_config", "thinker_config"}.isdisjoint(config):
        layouts |= {f"multimodal-{name}": Layout(scan=name == "scanned", multimodal=True) for name in family.layouts}
    return layouts
