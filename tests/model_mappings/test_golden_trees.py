"""Every table against the parameter tree that the real MaxText builds, at full size."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from facts import config_of, load_trees

from weightbeam.model_mappings.config import Config, Layout
from weightbeam.model_mappings.plan import expand, make_arrays
from weightbeam.model_mappings.registry import FAMILIES, family_of
from weightbeam.model_mappings.trees import is_scanned
from weightbeam.model_mappings.versions import NEWEST
from weightbeam.testing import check_tree

TREES = load_trees("e591f30")
NEWER = load_trees(NEWEST)
ONLY_NEWER = {name: tree for name, tree in NEWER.items() if tree.config}  # of models that e591f30 hasn't
# of variables that aren't parameters, which the trees don't describe
COLLECTIONS = {"deepseek4": {"MoEBiasVar", "Tid2EidVar"}}
NO_TREES = {  # their family's trees, from a config.json that is nested, or isn't: tests/families
    *("glm5_next", "glm5_next_text", "kimi_k3"),  # in branches of MaxText
    *("kimi_k25", "qwen3_5_moe_text", "gemma3_text", "gemma4_text", "gemma4_unified_text", "qwen3_omni_moe_thinker"),
}


@pytest.mark.parametrize("name", TREES)
def test_table_makes_maxtexts_tree(name):
    """The same paths, shapes and logical axes, none more and none less, and variables of other collections where
    MaxText has them.
    """
    tree = TREES[name]
    arrays = arrays_of(tree, "e591f30")
    others = {array.key for array in arrays if not array.key.startswith("params.params.")}
    assert {key.split(".")[1] for key in others} == COLLECTIONS.get(tree.model.partition("-")[0], set())
    config = Config(config_of(tree))
    check_tree(family_of(config, tree.model), config, tree.arrays, layout_of(tree, "e591f30"))


@pytest.mark.parametrize("name", sorted(NEWER.keys() & (TREES | ONLY_NEWER).keys()))
def test_table_makes_the_newest_maxtexts_tree(name):
    """The same of 0.2.5, variables of other collections included; and no parameter more but those that are said to be
    spare. 0.2.5 names no axes of some arrays, and not
    all of others.
    """
    tree = dataclasses.replace(NEWER[name], config=(ONLY_NEWER | TREES)[name].config)
    arrays = arrays_of(tree, NEWEST)
    facts = {path.replace("/", "."): fact for path, fact in (tree.arrays | tree.others).items()}
    made = {array.key: array for array in arrays if not array.parts[0].rule.spare}
    assert {key: array.shape for key, array in made.items()} == {key: shape for key, (shape, _) in facts.items()}
    named = {key: axes for key, (_, axes) in facts.items() if not {None, "local_layers"}.intersection(axes)}
    assert len(named) > len(facts) / 3
    assert {key: made[key].logical_axes for key in named} == named


def arrays_of(tree, version):
    """What the table makes of a tree's model for a version of MaxText."""
    config = Config(config_of(tree))
    return make_arrays(expand(family_of(config, tree.model), config, layout_of(tree, version)), {}, np.dtype("float32"))


def layout_of(tree, version):
    """As a tree's model was built for a version of MaxText."""
    return Layout(
        scan=tree.scan, mtp=tree.mtp, multimodal=tree.multimodal, model=tree.model, vocab=tree.vocab, maxtext=version
    )


@pytest.mark.parametrize("name", TREES)
def test_names_tell_whether_layers_are_stacked(name):
    """Where no metadata do: DeepSeek V4 has layers of their own before those that it stacks."""
    assert is_scanned(path.replace("/", ".") for path in TREES[name].arrays) == TREES[name].scan


def test_trees_cover_every_family():
    """No family and no `model_type` goes without a tree, and none of the trees got lost."""
    trees = TREES | ONLY_NEWER
    kinds = {config_of(tree)["model_type"] for tree in trees.values()}
    assert kinds | NO_TREES == {kind for family in FAMILIES for kind in family.model_types}
    assert len(trees) == 133
    models: dict[str, set[str]] = {}
    for tree in trees.values():
        models.setdefault(family_of(Config(config_of(tree)), tree.model).name, set()).add(tree.model)
    assert models == {family.name: set(family.checked) for family in FAMILIES if family.checked}
    assert sum(len(tree.arrays) for tree in trees.values()) == 58_823
