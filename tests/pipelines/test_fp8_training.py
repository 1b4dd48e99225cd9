"""States of MaxText 0.2.5's training in FP8 (`tests/cases/fp8_training.py`): weights, moments, and what is kept for each
kernel beside them.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest
from lazily import lazily
from support import HERE, LLAMA, assert_same_bits, call, make_release, read_tensors
from training_run import load_state

jax = lazily("jax")
MODEL = ("--maxtext_model", "llama3.1-8b")
KEPT = "Fp8DirectDotGeneralOp_0"


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The step of each run, in a folder of its layout."""
    folder = tmp_path_factory.mktemp("trained")
    with tarfile.open(HERE / "cases" / "fp8_training.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release of the model."""
    return make_release(tmp_path_factory.mktemp("like") / "hf", LLAMA)


def state_of(step: Path) -> dict[str, np.ndarray]:
    """Every array, as stock Orbax restores it, by its dotted key."""
    leaves = jax.tree_util.tree_leaves_with_path(load_state(step))
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}


@pytest.mark.parametrize("layout", ["scanned", "unscanned"])
def test_a_copy_has_all(states: Path, like: Path, tmp_path: Path, layout: str) -> None:
    """Magnitudes and scales as well as weights and moments, for another mesh."""
    step = states / layout / "1"
    assert call("reshard", step, tmp_path / "new", "--like", like, *MODEL, "--mesh", "fsdp=4") == 0
    wanted = state_of(step)
    assert sum(KEPT in key for key in wanted) == 6 * 7 * (1 if layout == "scanned" else LLAMA["num_hidden_layers"])
    assert_same_bits(state_of(tmp_path / "new" / "1"), wanted)


def test_layers_apart(states: Path, like: Path, tmp_path: Path) -> None:
    """What is kept for the kernels of each layer is its row of the stack, where a run with layers apart has it."""
    step = states / "scanned" / "1"
    assert call("reshard", step, tmp_path / "new", "--like", like, *MODEL, "--scan_layers", "false") == 0
    made, stacked, apart = (state_of(folder) for folder in (tmp_path / "new" / "1", step, states / "unscanned" / "1"))
    kept = {key for key in apart if KEPT in key}
    assert {key for key in made if KEPT in key} == kept
    for key in kept:
        before, _, rest = key.partition("layers_")
        layer, _, rest = rest.partition(".")
        np.testing.assert_array_equal(made[key], stacked[f"{before}layers.{rest}"][int(layer)], err_msg=key)
        assert made[key].shape == apart[key].shape
    others = {key for key in apart if "rngs" not in key}
    assert {key: made[key].shape for key in others} == {key: apart[key].shape for key in others}


@pytest.mark.parametrize("layout", ["scanned", "unscanned"])
def test_a_release_has_the_weights(states: Path, like: Path, tmp_path: Path, layout: str) -> None:
    """The float32 weights, to the bit, and nothing of what is kept beside them."""
    step = states / layout / "1"
    assert call("export", step, tmp_path / "out", "--like", like, *MODEL, "--save_dtype", "float32") == 0
    made, state = read_tensors(tmp_path / "out"), state_of(step)
    assert made.keys() == read_tensors(like).keys()
    for layer in range(LLAMA["num_hidden_layers"]):
        key = "params.params.decoder.layers.mlp.wi_0.kernel"
        wanted = state[key][:, layer] if layout == "scanned" else state[key.replace("layers", f"layers_{layer}")]
        np.testing.assert_array_equal(made[f"model.layers.{layer}.mlp.gate_proj.weight"], wanted.T)
    assert call("verify", step, tmp_path / "out") == 0
    assert call("reshard", step, tmp_path / "weights", "--state", "params") == 0
    assert not any(KEPT in key for key in state_of(tmp_path / "weights" / "1"))
