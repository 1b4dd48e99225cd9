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


def config_of(tree: Tree) -> dict:
    """`config.json`, with the `model_type` where MaxText has none."""
    inferred = next((kind for prefix, kind in MODEL_TYPES.items() if tree.model.startswith(prefix)), None)
    return {"model_type": inferred} | tree.config


@pytest.mark.parametrize("name", TREES)
def test_table_makes_maxtexts_tree(name):
    """The same paths, shapes and logical axes, none more and none less."""
    tree = TREES[name]
    config = Config(config_of(tree))
    layout = Layout(scan=tree.scan, mtp=tree.mtp, multimodal=tree.multimodal, model=tree.model, vocab=tree.vocab)
    arrays = make_arrays(expand(family_of(config, tree.model), config, layout), {}, np.dtype("float32"))
    made = {array.key: (array.shape, array.names) for array in arrays}
    assert made == {path.replace("/", "."): fact for path, fact in tree.arrays.items()}
    assert len(arrays) == len(made)


def test_trees_cover_every_family():
    """No family and no `model_type` goes without a tree, and none of the trees got lost."""
    kinds = {config_of(tree)["model_type"] for tree in TREES.values()}
    assert kinds == {kind for family in FAMILIES for kind in family.model_types}
    assert len(TREES) == 58
    assert sum(len(tree.arrays) for tree in TREES.values()) == 15_965
