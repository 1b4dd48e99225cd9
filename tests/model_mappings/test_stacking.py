"""Scanned into unscanned and back, by the stacks of every table, against the trees that the real MaxText builds."""

from __future__ import annotations

import numpy as np
import pytest
from facts import config_of, load_trees

from weightbeam.model_mappings.config import Config, Layout
from weightbeam.model_mappings.registry import family_of
from weightbeam.model_mappings.rules import ABSENT, rule, stack
from weightbeam.model_mappings.stacking import Held, RestackError, Stacks, restack, unused
from weightbeam.model_mappings.versions import UNSAID

TREES = load_trees()
BOTH = [
    (name, name.replace("scan", "unscan"))
    for name in TREES
    if name.endswith("--scan") and name.replace("--scan", "--unscan") in TREES
]
ROOTS = (("params", "params"), ("opt_state", "0", "nu", "params"))


def stacks(tree, scan, axis=1):
    config = Config(config_of(tree))
    layout = Layout(
        maxtext=UNSAID,
        scan=scan,
        scan_axis=axis,
        mtp=tree.mtp,
        multimodal=tree.multimodal,
        model=tree.model,
        vocab=tree.vocab,
    )
    return Stacks.of(family_of(config, tree.model).table(config, layout), axis)


def held_of(shapes):
    return {path: Held(".".join(path), shape) for path, shape in shapes.items()}


def arrays(tree):
    """The shapes of weights and moments, by path."""
    paths = {tuple(path.removeprefix("params/params/").split("/")): shape for path, (shape, _) in tree.arrays.items()}
    return {(*root, *path): tuple(shape) for root in ROOTS for path, shape in paths.items()}


@pytest.mark.parametrize(("scanned", "unscanned"), BOTH)
def test_every_model_is_restacked_as_maxtext_builds_it(scanned, unscanned):
    """The paths and shapes that MaxText has in the other layout, and every array used."""
    tree = TREES[scanned]
    one, other = arrays(tree), arrays(TREES[unscanned])
    before, after = stacks(tree, True), stacks(tree, False)
    for shapes, wanted, way in ((one, other, (before, after)), (other, one, (after, before))):
        moved = list(restack(held_of(shapes), *way))
        assert {array.path: array.part.shape for array in moved} == wanted
        assert len(moved) == len(wanted)
        assert not unused(held_of(shapes), moved)
        # of places without a layer, which scanned arrays may have, nothing is made
        sizes = [sum(map(np.prod, tree.values())) for tree in (shapes, wanted)]
        assert sum(array.part.elements for array in moved) == min(sizes)


def test_trees_have_both_layouts():
    assert len(BOTH) > 30


def test_moments_and_modules_follow_their_weights():
    """The state of NNX modules is stacked on axis 0, everything else on the weights' axis; what has no layers stays."""
    tree = TREES["llama3.1-8b--scan"]
    before, after = stacks(tree, True), stacks(tree, False)
    shapes = {
        ("nnx_aux", "model", "decoder", "layers", "dropout", "rngs", "key"): (32, 4),
        ("nnx_aux", "model", "decoder", "rngs", "key"): (4,),
        ("opt_state", "0", "count"): (),
        ("step",): (),
    }
    moved = {".".join(array.path): array for array in restack(held_of(shapes), before, after)}
    assert len(moved) == 32 + 3
    one = moved["nnx_aux.model.decoder.layers_7.dropout.rngs.key"]
    assert one.part.shape == (4,)
    assert [axis.start for axis in one.part.source_box()] == [7, 0]
    back = list(restack(held_of({array.path: array.part.shape for array in moved.values()}), after, before))
    assert {array.path: array.part.shape for array in back} == shapes


def test_the_stacked_axis_moves():
    tree = TREES["llama3.1-8b--scan"]
    path = ("params", "params", "decoder", "layers", "mlp", "wi_0", "kernel")
    (moved,) = restack(held_of({path: (8, 32, 6)}), stacks(tree, True, 1), stacks(tree, True, 0))
    assert moved.part.shape == (32, 8, 6)
    assert moved.axes == (0,)
    (moved,) = restack(held_of({path: (8, 32, 6)}), stacks(tree, True, 1), stacks(tree, True, 2))
    assert moved.part.shape == (8, 6, 32)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({"params.params.decoder.layers_0.mlp.wi_0.kernel": (8, 6)}, "31 of its 32 layers are missing"),
        (
            {f"params.params.decoder.layers_{i}.mlp.wi_0.kernel": (8, 6 + (i == 3)) for i in range(32)},
            "can't be stacked",
        ),
    ],
)
def test_layers_that_dont_fit_are_refused(shapes, said):
    tree = TREES["llama3.1-8b--scan"]
    with pytest.raises(RestackError, match=said):
        list(
            restack(
                held_of({tuple(key.split(".")): shape for key, shape in shapes.items()}),
                stacks(tree, False),
                stacks(tree, True),
            )
        )


def indexers(layers, axis=1):
    """A stack of which not every place has a layer."""
    table = [rule("wk/kernel", "wk.weight", "index embed -> embed index", "")]
    return Stacks.of([stack("decoder/layers/indexer", "layers.{layer}.", layers, table, "layers")], axis)


@pytest.mark.parametrize(
    ("kept", "first"),
    [([ABSENT, 2, ABSENT], 1), ([2, ABSENT], 2), ([ABSENT, ABSENT, 5], 3), ([0, ABSENT, 2], 0), ([2], 2)],
)
@pytest.mark.parametrize("axis", [0, 1])
def test_places_without_a_layer_are_kept(kept, first, axis):
    """They are zeros in either tree, and lie between the same layers."""
    path = ("params", "params", "decoder", "layers", "indexer", "wk", "kernel")
    before, after = indexers([0, ABSENT, 2, ABSENT, ABSENT, 5]), indexers(kept, axis)
    (moved,) = restack({path: Held("k", (8, 6, 3))}, before, after)
    assert (moved.path, moved.part.tensors) == (path, ("k",))
    assert moved.part.shape == ((len(kept), 8, 3) if axis == 0 else (8, len(kept), 3))
    assert moved.part.rule.window == (slice(None), slice(first, first + len(kept)))


@pytest.mark.parametrize("kept", [[5, ABSENT], [ABSENT, 0], [0, 2], [2, 0], [0, ABSENT, ABSENT, 2]])
def test_layers_that_lie_otherwise_are_refused(kept):
    """Behind the end, before the beginning, closer together, turned round, further apart."""
    path = ("params", "params", "decoder", "layers", "indexer", "wk", "kernel")
    with pytest.raises(RestackError, match="don't follow each other"):
        restack({path: Held("k", (8, 6, 3))}, indexers([0, ABSENT, 2, ABSENT, ABSENT, 5]), indexers(kept))


def test_an_array_without_layers_is_refused():
    tree = TREES["llama3.1-8b--scan"]
    shapes = {("opt_state", "0", "v_row", "params", "decoder", "layers", "mlp", "wi_0", "kernel"): (8, 6)}
    with pytest.raises(RestackError, match="no axes \\(32,\\) of layers"):
        list(restack(held_of(shapes), stacks(tree, True), stacks(tree, False)))


def test_all_arrays_that_dont_fit_are_listed():
    tree = TREES["llama3.1-8b--scan"]
    shapes = {
        ("params", "params", "decoder", "layers", "mlp", name, "kernel"): (8, 6) for name in ("wi_0", "wi_1", "wo")
    }
    with pytest.raises(RestackError) as caught:
        restack(held_of(shapes), stacks(tree, True), stacks(tree, False))
    assert [fault.path for fault in caught.value.faults] == list(shapes)
