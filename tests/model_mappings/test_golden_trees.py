"""Every table against the parameter tree that the real MaxText builds, at full size."""

from __future__ import annotations

import numpy as np
import pytest
from facts import Tree, load_trees
from facts.make_trees import FIELDS

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
    layout = Layout(scan=tree.scan, mtp=tree.mtp, model=tree.model, vocab=tree.vocab)
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


def test_facts_hold_every_field_that_a_table_reads():
    """The trees keep a selection of `config.json`: a table that reads a new field must add it there."""
    read = set()

    class Recording(Config):
        def get(self, key, default=None):
            read.add(key)
            return super().get(key, default)

        def __getitem__(self, key):
            read.add(key)
            return super().__getitem__(key)

    for tree in TREES.values():
        config = Recording(config_of(tree))
        family = family_of(config) if "rope_parameters" not in config else family_of(config, tree.model)
        family.stacks(config, Layout())
        family.dims(config, Layout())
        family.drops(config, Layout())
    assert read <= set(FIELDS)
    assert {"model_type", "hidden_size", "index_n_heads", "num_experts", "rope_scaling"} <= read
