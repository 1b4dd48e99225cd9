"""Every kind of tree that a MaxText user can have, as stock Orbax writes it: its weights become a release, or it is
refused by name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from lazily import lazily
from support import F32, assert_same_bits, call, convert, make_release, read_tensors, restore

from weightbeam.formats.orbax import find_items, open_arrays

jnp = lazily("jax.numpy")
ocp = lazily("orbax.checkpoint")
traverse_util = lazily("flax.traverse_util")

Flat = dict[str, Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A release, and its weights by MaxText's names, scanned."""
    folder = tmp_path_factory.mktemp("trees")
    like = make_release(folder / "hf", dtype=F32)
    return like, restore(convert(like, folder / "ckpt", "--save_dtype", "float32", "--maxtext_model", "llama2-7b"))


def write_tree(folder: Path, tree: Mapping[str, Any], zarr3: bool = True) -> Path:
    """An item as stock Orbax writes it, of a tree by dotted keys."""
    nested = traverse_util.unflatten_dict({tuple(key.split(".")): value for key, value in tree.items()})
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=zarr3)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(nested))
    return folder


def below(prefix: str, weights: Flat, suffix: str = "") -> Flat:
    return {f"{prefix}{key}{suffix}": values for key, values in weights.items()}


def apart(weights: Flat, between: str) -> Flat:
    """The layers one by one: `layers_0`, or `layers.0` as an `nnx.List` has them."""
    found: Flat = {}
    for key, values in weights.items():
        before, layered, after = key.partition(".layers.")
        found |= (
            {f"{before}.layers{between}{layer}.{after}": values[:, layer] for layer in range(values.shape[1])}
            if layered
            else {key: values}
        )
    return found


def adam(weights: Flat) -> Flat:
    return (
        below("opt_state.mu.", weights)
        | below("opt_state.nu.", weights)
        | {"opt_state.count": np.int32(3), "step": np.int32(3)}
    )


def generators(place: str) -> Flat:
    return {f"{place}.dropout.rngs.params.count{leaf}": np.uint32(1) for leaf in (".value",)}


def replicas(weights: Flat) -> Flat:
    return {key: np.stack([values, values + 1]) for key, values in weights.items()}


def of_fp8_training(place: str, leaf: str = "") -> Flat:
    """What Flax keeps for a kernel that is computed with in FP8."""
    return {
        f"{place}.decoder.layers.mlp.wi_0.Fp8DirectDotGeneralOp_0.{of}_{what}{leaf}": np.ones(size, F32)
        for of in ("input", "kernel", "output_grad")
        for what, size in (("scale", 1), ("amax_history", 16))
    }


@pytest.mark.parametrize("scan", [True, False], ids=["to scanned", "to unscanned"])
def test_random_states_that_cannot_follow_their_layers_are_left_out(
    tmp_path: Path, made: tuple[Path, Flat], scan: bool
) -> None:
    """MaxText 0.2.5's unscanned modules share one, which lies below the first layer; Qwen 3.5's blocks have one of their
    own. Weights and moments go over, and so does what lies in no layer. (That MaxText goes on from it: `tests/trainer`.)
    """
    like, weights = made
    shared = {f"nnx_aux.model.decoder.{'layers_0.mlp' if scan else 'layers'}.rngs.params.count": np.uint32(1)}
    kept = {"nnx_aux.model.decoder.rngs.params.count": np.uint32(2)}
    held = below("params.params.", weights) | adam(weights)
    tree = apart(held, "_") if scan else held
    write_tree(tmp_path / "3" / "items", tree | shared | kept)
    options = ("--like", like, "--maxtext_model", "llama2-7b", "--scan_layers", str(scan).lower())
    assert call("reshard", tmp_path / "3", tmp_path / "out", *options, "--param_scan_axis", "1") == 0
    found = {key: store.read().result() for key, store in open_arrays(find_items(tmp_path / "out" / "3")).items()}
    assert_same_bits(found, (held if scan else apart(held, "_")) | kept)
    left = json.loads((tmp_path / "out" / "3" / "conversion.json").read_text())["left_out"]
    assert set(left) == set(shared)


TAKEN: dict[str, Any] = {  # name: the items of a step, of the weights
    "1 parameters": lambda w: {"items": below("params.params.", w) | {"step": 0}},
    "2 a training state": lambda w: {"items": below("params.params.", w) | adam(w) | generators("nnx_aux.model.decoder")},
    "2 training with AQT's arithmetic": lambda w: {
        "items": below("params.params.", w) | adam(w) | generators("nnx_aux.model.decoder.mlp.wi_0.AqtDotGeneral_0.to_nnx__rngs")
    },
    "3 NNX fine-tuning": lambda w: {
        "model_params": below("", apart(w, "."), ".value") | generators("decoder") | {"to_nnx__rngs.params.count.value": np.uint32(1)},
        "optimizer_state": below("mu.", w, ".value"),
    },
    "4 an RL wrapper": lambda w: {"model_params": below("base.", w, ".value"), "optimizer_state": below("mu.base.", w, ".value")},
    "5 parameters of NNX": lambda w: {"items": below("", apart(w, "_"), ".value")},
    "5 of reshard_checkpoint": lambda w: {"items": below("params.", w, ".value")},
    "6 NNX before July": lambda w: {"items": below("model.", w, ".value") | below("optimizer.opt_state.mu.", w, ".value") | {"optimizer.step.value": 3}},
    "7 DiLoCo": lambda w: {
        "items": below("params.params.", w) | below("inner_state.params.params.", replicas(w)) | below("outer_opt_state.trace.params.", w) | {"step": 4}
    },
    "7 DiLoCo of NNX": lambda w: {"items": below("params.", w) | below("inner_state.model.", replicas(w)) | below("outer_opt_state.trace.", w) | {"step": 4}},
    "8 an emergency copy": lambda w: {"state": below("params.params.", w) | adam(w)},
    "9 a training engine": lambda w: {
        "model_params": below("", w, ".value"), "optimizer_state": below("mu.", w, ".value"), "accumulated_grads": below("", w, ".value"),
    },
    "15 FP8 training": lambda w: {"items": below("params.params.", w) | of_fp8_training("params._overwrite_with_gradient") | adam(w)},
    "15 FP8 training of NNX": lambda w: {"items": below("model.", w, ".value") | of_fp8_training("model", ".value") | {"optimizer.step.value": 3}},
}  # fmt: skip


# what other tests have of MaxText's own, or which is like another
SLOW = ("2 a training state", "5 parameters of NNX", "11 AQT of NNX", "13 FP8 experts")


def kinds(known: Mapping[str, Any]) -> list[Any]:
    return [
        pytest.param(kind, marks=[pytest.mark.slow("another storage of a tree that is taken anyway")] * (kind in SLOW))
        for kind in known
    ]


@pytest.mark.parametrize("kind", kinds(TAKEN))
def test_weights_are_taken(tmp_path: Path, made: tuple[Path, Flat], kind: str) -> None:
    """The step's folder is named, whatever its items: the release that the weights were made of, but for the query,
    whose factor rounds a float32.
    """
    like, weights = made
    for item, tree in TAKEN[kind](weights).items():
        write_tree(tmp_path / "100" / item, tree, zarr3=kind[0] != "9")
    options = ("--like", like, "--maxtext_model", "llama2-7b", "--param_scan_axis", "1")
    assert call("export", tmp_path / "100", tmp_path / "out", *options) == 0
    got, wanted = (
        {name: values for name, values in read_tensors(folder).items() if "q_proj" not in name}
        for folder in (tmp_path / "out", like)
    )
    assert_same_bits(got, wanted)


def aqt(weights: Flat) -> Flat:
    kernel = "decoder.mlp.wi_0.AqtDotGeneral_0.qrhs.frozen"
    return below("params.params.", weights) | {
        f"aqt.params.{kernel}.qvalue": np.zeros((4, 4), np.int8),
        f"aqt.params.{kernel}.scale": np.ones(4, np.float32),
    }


REFUSED: dict[str, Any] = {  # name: the tree, and what the message says of it
    "7 DiLoCo without global weights": (
        lambda w: below("inner_state.params.params.", replicas(w)) | {"step": 4},
        "a DiLoCo state without the global weights",
    ),
    "11 AQT": (aqt, "an AQT checkpoint for serving"),
    "11 AQT of NNX": (
        lambda w: (
            below("", w, ".value") | {"decoder.mlp.wi_0.AqtDotGeneral_0.qrhs.frozen.value.qvalue": np.zeros(4, np.int8)}
        ),
        "an AQT checkpoint",
    ),
    "12 QLoRA": (
        lambda w: {
            "decoder.layers.mlp.wi_0.kernel.array.qvalue": jnp.zeros((4, 4), jnp.int4),
            "decoder.x.kernel.array.scale": np.ones(4, F32),
        },
        "Qwix QLoRA",
    ),
    "13 FP8": (
        lambda w: (
            below("params.params.", w)
            | {
                "params.params.decoder.layers.mlp.wi_0.kernel": w["decoder.layers.mlp.wi_0.kernel"].astype(
                    ml_dtypes.float8_e4m3fn
                ),
                "params.params.decoder.layers.mlp.wi_0.kernel_scale": np.ones(1, F32),
            }
        ),
        "doesn't lie over",
    ),
    "13 FP8 experts": (
        lambda w: below("params.params.", w) | {"params.params.decoder.moe_layers.wi_0_scale": np.ones(1, F32)},
        "FP8 scales",
    ),
    "pipeline parallelism": (
        lambda w: below("params.params.", {key.replace("decoder.", "decoder.pipeline_module."): w[key] for key in w}),
        "stacked by stages (pipeline_module)",
    ),
    "14 MXFP4 experts": (
        lambda w: {
            "params.params.decoder.e.wi_0_packed": np.zeros((2, 4, 4), np.uint8),
            "params.params.decoder.e.wi_0_scale": np.zeros((2, 1, 4), np.uint8),
        },
        "MXFP4 experts",
    ),
}


@pytest.mark.parametrize("kind", kinds(REFUSED))
def test_what_has_no_plain_weights_is_refused(
    tmp_path: Path, made: tuple[Path, Flat], capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """By name, before anything is written; a copy of everything is still made."""
    tree, words = REFUSED[kind]
    write_tree(tmp_path / "1" / "items", tree(made[1]), zarr3=True)
    for command in (
        ("export", tmp_path / "1", tmp_path / "out", "--like", made[0]),
        ("reshard", tmp_path / "1", tmp_path / "out", "--state", "params"),
    ):
        assert call(*command) == 2
        assert words in " ".join(capsys.readouterr().err.split())
        assert not (tmp_path / "out").exists()
    assert call("reshard", tmp_path / "1", tmp_path / "out") == 0


@pytest.mark.parametrize("place", ["100/default", "100/items", "100"])
def test_old_maxtext_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str) -> None:
    """One file of msgpack, wherever it lies."""
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / "checkpoint").write_bytes(b"\x81\xa6params\x80")
    for source in (tmp_path, tmp_path / "100"):
        assert call("export", source, tmp_path / "out") == 2
        assert "as old MaxText wrote it (msgpack)" in " ".join(capsys.readouterr().err.split())


def test_post_training_with_its_optimizer(
    tmp_path: Path, made: tuple[Path, Flat], capsys: pytest.CaptureFixture[str]
) -> None:
    """A reshard of the whole step would lose the optimizer's item: it is refused, with what to do; the weights, and
    each item by itself, go.
    """
    for item, tree in TAKEN["9 a training engine"](made[1]).items():
        write_tree(tmp_path / "100" / item, tree)
    assert call("reshard", tmp_path / "100", tmp_path / "out") == 2
    assert "has accumulated_grads and model_params and optimizer_state; --state params" in " ".join(
        capsys.readouterr().err.split()
    )
    assert call("reshard", tmp_path / "100", tmp_path / "out", "--state", "params") == 0
    assert_same_bits(restore(tmp_path / "out" / "100"), made[1])
    shutil.rmtree(tmp_path / "out")
    assert call("reshard", tmp_path / "100" / "optimizer_state", tmp_path / "out") == 0
