"""Every table against the parameter tree that the real MaxText builds, at full size."""

from __future__ import annotations

import numpy as np
import pytest
from facts import Tree, load_trees

from model_mappings.config import Config, Layout
from model_mappings.plan import expand, make_arrays
from model_mappings.registry import FAMILIES, family_of

TREES = load_trees()
MODEL_TYPES = {"llama": "llama", "mistral": "mistral", "kimi": "kimi_k2"}  # for MaxText's models whose Hugging Face config is sizes alone

LLAMA4 = dict(
    hidden_size=5120, num_hidden_layers=48, num_attention_heads=40, num_key_value_heads=8, head_dim=128, intermediate_size=8192,
    intermediate_size_mlp=16384, vocab_size=202048,
)  # fmt: skip
CONFIGS = {  # for MaxText's models that have none: what transformers' configuration and MaxText's src/maxtext/configs/models say
    "llama4-17b-16e": {"model_type": "llama4", "text_config": LLAMA4 | dict(num_local_experts=16, interleave_moe_layer_step=1)},
    "llama4-17b-128e": {"model_type": "llama4_text"} | LLAMA4 | dict(num_local_experts=128, interleave_moe_layer_step=2),
    "deepseek4-tiny": TREES["deepseek4-284b--scan"].config  # MaxText keeps the sizes of the large model for it
    | dict(hidden_size=64, num_attention_heads=4, head_dim=32, moe_intermediate_size=64, n_routed_experts=16, num_experts_per_tok=4)
    | dict(q_lora_rank=16, o_lora_rank=16, o_groups=4, index_n_heads=4, index_head_dim=32),
}
for model, kind in {"qwen3-vl-2b": "qwen3_vl", "qwen3-vl-30b-a3b": "qwen3_vl_moe"}.items():
    CONFIGS[model] = TREES[f"{model}--unscan"].config | {"model_type": kind}
OMNI = TREES["qwen3-omni-30b-a3b--unscan"].config  # transformers' defaults, but for some; these are MaxText's sizes
THINKER = {  # by part
    "text_config": dict(vocab_size=152064, num_attention_heads=32, head_dim=128),
    "vision_config": dict(out_hidden_size=2048),
    "audio_config": dict(output_dim=2048),
}
CONFIGS["qwen3-omni-30b-a3b"] = OMNI | {"thinker_config": {part: OMNI["thinker_config"][part] | sizes for part, sizes in THINKER.items()}}
COLLECTIONS = {"deepseek4": {"MoEBiasVar", "Tid2EidVar"}}  # of variables that aren't parameters, which the trees don't describe
NO_TREES = {  # their family's trees, from a config.json that is nested, or isn't: tests/families
    *("kimi_k25", "qwen3_5_moe_text", "gemma3_text", "gemma4_text", "qwen3_omni_moe_thinker"),
}


def config_of(tree: Tree) -> dict:
    """`config.json`, with the `model_type` where MaxText has none."""
    if tree.model in CONFIGS:
        return CONFIGS[tree.model]
    inferred = next((kind for prefix, kind in MODEL_TYPES.items() if tree.model.startswith(prefix)), None)
    return {"model_type": inferred} | tree.config


@pytest.mark.parametrize("name", TREES)
def test_table_makes_maxtexts_tree(name):
    """The same paths, shapes and logical axes, none more and none less, and variables of other collections where MaxText has them."""
    tree = TREES[name]
    config = Config(config_of(tree))
    layout = Layout(scan=tree.scan, mtp=tree.mtp, multimodal=tree.multimodal, model=tree.model, vocab=tree.vocab)
    arrays = make_arrays(expand(family_of(config, tree.model), config, layout), {}, np.dtype("float32"))
    made = {array.key: (array.shape, array.names) for array in arrays if array.key.startswith("params.params.")}
    others = {array.key: array for array in arrays if array.key not in made}
    assert {key.split(".")[1] for key in others} == COLLECTIONS.get(tree.model.partition("-")[0], set())
    assert made == {path.replace("/", "."): fact for path, fact in tree.arrays.items()}
    assert len(arrays) == len(made) + len(others)


def test_trees_cover_every_family():
    """No family and no `model_type` goes without a tree, and none of the trees got lost."""
    kinds = {config_of(tree)["model_type"] for tree in TREES.values()}
    assert kinds | NO_TREES == {kind for family in FAMILIES for kind in family.model_types}
    assert len(TREES) == 107
    models: dict[str, set[str]] = {}
    for tree in TREES.values():
        models.setdefault(family_of(Config(config_of(tree)), tree.model).name, set()).add(tree.model)
    assert models == {family.name: set(family.checked) for family in FAMILIES}
    assert sum(len(tree.arrays) for tree in TREES.values()) == 43_418
