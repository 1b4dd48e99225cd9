"""`weightbeam reshard`: what MaxText and stock Orbax wrote, in other chunks, layouts, dtypes and trees."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support import assert_same_bits, convert, digest, digests, given, restore
from trained import SHARED, trained_like

from weightbeam.formats.orbax import find_items, open_arrays
from weightbeam.formats.orbax_source import open_orbax
from weightbeam.pipelines.cli import main

CASES = [case for case, facts in given().items() if {"scanned", "unscanned"} <= set(facts) and case not in ("deepseek4", "deepseek3-mtp-standalone")]
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="MaxText's own checkpoints aren't beside the project")


def reshard(source: Path, output: Path, *options: object, status: int = 0) -> Path:
    """Runs the command; returns the folder of the only step."""
    assert main(["reshard", str(source), str(output), *map(str, options)]) == status
    return find_items(output).folder.parent if status == 0 else output


def arrays(checkpoint: Path) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, by its key."""
    return {key: np.asarray(store.read().result()) for key, store in open_arrays(find_items(checkpoint)).items()}


def weights(checkpoint: Path) -> dict[str, np.ndarray]:
    """The weights, by MaxText's names for them, whatever the tree calls them."""
    held = arrays(checkpoint)
    return {name: held[key] for name, key in open_orbax(checkpoint).tree.weights.items()}


def chunks(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    return {key: tuple(store.chunk_layout.read_chunk.shape or ()) for key, store in open_arrays(find_items(checkpoint)).items()}


# --- MaxText's training states ---------------------------------------------------------------------------------------------------


@needs_shared
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--mesh", "fsdp=4,tensor=2", "--compression", "zstd", "--use_zarr3", "false"),
        ("--use_ocdbt", "false", "--use_zarr3", "false"),
        ("--mesh", "fsdp=64", "--use_ocdbt", "false"),
        ("--compression", "none"),
    ],
)
@pytest.mark.parametrize("run", ["llama-fsdp8", "qwen3moe-fsdp4-tensor2"])
def test_a_training_state_keeps_every_bit(tmp_path: Path, run: str, options: tuple[str, ...]) -> None:
    """Weights, moments, counters and random generators, in every storage; and the tree that stock Orbax restores."""
    source = SHARED / "trained" / run
    step = reshard(source, tmp_path / "out", *options)
    assert_same_bits(arrays(step), arrays(source))
    got, wanted = (json.loads(find_items(place).read("_METADATA"))["tree_metadata"] for place in (step, source))
    assert {path: entry["key_metadata"] for path, entry in got.items()} == {path: entry["key_metadata"] for path, entry in wanted.items()}
    assert step.name == find_items(source).parent.name
    about = json.loads((step / "_CHECKPOINT_METADATA").read_text())
    assert about["custom_metadata"]["scan_layers"] is True


@needs_shared
def test_scanned_to_unscanned_is_what_maxtext_makes(tmp_path: Path) -> None:
    """The weights of a training state, unrolled and in bfloat16: the arrays of `generate_param_only_checkpoint`, bit for bit."""
    like = trained_like(tmp_path / "like", "llama")
    options = ("--state", "params", "--scan_layers", "false", "--save_dtype", "bfloat16", "--like", like, "--maxtext_model", "llama3.1-8b")
    step = reshard(SHARED / "trained" / "llama-fsdp8", tmp_path / "out", *options)
    assert_same_bits(weights(step), weights(SHARED / "trained" / "llama-fsdp8-paramonly-unscanned"))
    tree = restore(step)  # MaxText's TrainState of parameters alone
    assert tree["decoder.layers_3.mlp.wi_0.kernel"].shape == (64, 96)
    assert json.loads((step / "_CHECKPOINT_METADATA").read_text())["custom_metadata"]["scan_layers"] is False


@needs_shared
def test_post_training_goes_back_to_params(tmp_path: Path) -> None:
    """An nnx tree with `.value` leaves and layers apart becomes scanned `params.params`: the weights of the run that it came from."""
    like = trained_like(tmp_path / "like", "llama")
    options = ("--state", "params", "--scan_layers", "true", "--like", like, "--maxtext_model", "llama3.1-8b")
    step = reshard(SHARED / "trained" / "llama-fsdp8-paramonly-unscanned", tmp_path / "out", *options)
    wanted = {key: values.astype(ml_dtypes.bfloat16) for key, values in weights(SHARED / "trained" / "llama-fsdp8").items()}
    assert_same_bits(weights(step), wanted)


@needs_shared
def test_a_training_state_there_and_back(tmp_path: Path) -> None:
    """Scanned, unscanned, on another axis, and back: weights, moments and the state of the modules, bit for bit."""
    source = SHARED / "trained" / "llama-fsdp8"
    like = trained_like(tmp_path / "like", "llama")
    said = ("--like", like, "--maxtext_model", "llama3.1-8b")
    apart = reshard(source, tmp_path / "apart", "--scan_layers", "false", *said)
    held = arrays(apart)
    before = arrays(source)
    np.testing.assert_array_equal(
        held["opt_state.0.mu.params.decoder.layers_2.mlp.wi_0.kernel"], before["opt_state.0.mu.params.decoder.layers.mlp.wi_0.kernel"][:, 2]
    )
    key = "nnx_aux.model.decoder.{}.dropout.rngs.dropout.key"
    np.testing.assert_array_equal(held[key.format("layers_3")], before[key.format("layers")][3])
    other = reshard(apart, tmp_path / "other", "--scan_layers", "true", "--param_scan_axis", "0", *said)
    assert arrays(other)["opt_state.0.nu.params.decoder.layers.mlp.wi_0.kernel"].shape == (4, 64, 96)
    back = reshard(other, tmp_path / "back", "--param_scan_axis", "1", *said)
    assert_same_bits(arrays(back), before)
    got, wanted = (json.loads(find_items(place).read("_METADATA"))["tree_metadata"] for place in (back, source))
    assert {path: entry["key_metadata"] for path, entry in got.items()} == {path: entry["key_metadata"] for path, entry in wanted.items()}


@needs_shared
def test_dtypes_of_weights_and_moments_apart(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Each once rounded; counters and random keys stay what they are."""
    source = SHARED / "trained" / "llama-fsdp8"
    step = reshard(source, tmp_path / "out", "--save_dtype", "bfloat16", "--moment_dtype", "float32", "--mesh", "fsdp=2")
    before, after = arrays(source), arrays(step)
    for key, values in before.items():
        wanted = values.astype(ml_dtypes.bfloat16) if key.startswith("params.") else values
        assert digest(after[key]) == digest(wanted), key
    assert "training goes on with weights in bfloat16" in capsys.readouterr().err
    record = json.loads((step / "conversion.json").read_text())
    assert set(record["lossy"].values()) == {"float32, rounded to bfloat16"}


# --- every family, scanned and unscanned ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_every_family_is_restacked(generated: Path, tmp_path: Path, case: str) -> None:
    """Our scanned checkpoint, taken apart, has MaxText's own unscanned bits; stacked again, its scanned ones. The record says which model it is."""
    facts = given()[case]
    options = () if facts["maxtext_model"] is None else ("--maxtext_model", facts["maxtext_model"])
    convert(generated / "cases" / case, tmp_path / "ckpt", *options)
    scanned = restore(tmp_path / "ckpt" / "0")
    apart = reshard(tmp_path / "ckpt", tmp_path / "apart", "--scan_layers", "false", "--state", "params")
    convert(generated / "cases" / case, tmp_path / "wanted", "--scan_layers", "false", *options)
    assert_same_bits(restore(apart), restore(tmp_path / "wanted" / "0"))
    back = reshard(apart, tmp_path / "back", "--scan_layers", "true", "--mesh", "fsdp=2")
    assert digests(restore(back)) == digests(scanned)
    assert main(["verify", "--source", str(generated / "cases" / case), "--checkpoint", str(back)]) == 0
