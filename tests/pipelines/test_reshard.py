"""`weightbeam reshard`: what MaxText and stock Orbax wrote, in other chunks, layouts, dtypes and trees."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
import warm
import yaml
from lazily import lazily
from pairs import each
from support import (
    LLAMA,
    arrays,
    assert_same_bits,
    call,
    convert,
    digest,
    digests,
    given,
    make_release,
    reshard,
    restore,
)
from trained import SHARED, needs_shared, trained_like

from weightbeam.formats.orbax import find_items, open_arrays, read_arrays
from weightbeam.formats.orbax.source import open_orbax
from weightbeam.pipelines.cli import main
from weightbeam.pipelines.commands.reshard import plan
from weightbeam.transforms.cutting.mesh import Mesh, axes_in, model_rules, partition_spec
from weightbeam.transforms.cutting.read_cost import load_of, total

jax = lazily("jax")
jnp = lazily("jax.numpy")
ocp = lazily("orbax.checkpoint")
optax = lazily("optax")

CASES = [
    case
    for case, facts in given().items()
    if {"scanned", "unscanned"} <= set(facts) and case != "deepseek3-mtp-standalone"
]


def weights(checkpoint: Path) -> dict[str, np.ndarray]:
    """The weights, by MaxText's names for them, whatever the tree calls them."""
    held = arrays(checkpoint)
    return {name: held[key] for name, key in open_orbax(checkpoint).tree.weights.items()}


def chunks(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    return {
        key: tuple(store.chunk_layout.read_chunk.shape or ())
        for key, store in open_arrays(find_items(checkpoint)).items()
    }


# --- MaxText's training states ----------------------------------------------------------------------------------------


@needs_shared
@pytest.mark.parametrize(
    ("run", "options"),
    each(
        ["llama-fsdp8", "qwen3moe-fsdp4-tensor2"],
        [
            (),
            ("--mesh", "fsdp=4,tensor=2", "--compression", "zstd", "--use_zarr3", "false"),
            ("--use_ocdbt", "false", "--use_zarr3", "false"),
            ("--mesh", "fsdp=64", "--use_ocdbt", "false"),
            ("--compression", "none"),
        ],
    ),
)
def test_a_training_state_keeps_every_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run: str, options: tuple[str, ...]
) -> None:
    """Weights, moments, counters and random generators, in every storage; and the tree that stock Orbax restores. What
    MaxText must be told of the storage is said.
    """
    source = SHARED / "trained" / run
    step = reshard(source, tmp_path / "out", *options)
    said = capsys.readouterr().out
    for option in ("--use_ocdbt", "--use_zarr3"):
        assert (f"checkpoint_storage_{option[2:]}=false" in said) == (option in options)
    assert_same_bits(arrays(step), arrays(source))
    got, wanted = (json.loads(find_items(place).read("_METADATA"))["tree_metadata"] for place in (step, source))
    assert {path: entry["key_metadata"] for path, entry in got.items()} == {
        path: entry["key_metadata"] for path, entry in wanted.items()
    }
    assert step.name == find_items(source).parent.name
    about = json.loads((step / "_CHECKPOINT_METADATA").read_text())
    assert about["custom_metadata"]["scan_layers"] is True


@needs_shared
def test_scanned_to_unscanned_is_what_maxtext_makes(tmp_path: Path) -> None:
    """The weights of a training state, unrolled and in bfloat16: the arrays of `generate_param_only_checkpoint`, bit
    for bit.
    """
    like = trained_like(tmp_path / "like", "llama")
    options = (
        "--state",
        "params",
        "--scan_layers",
        "false",
        "--save_dtype",
        "bfloat16",
        "--like",
        like,
        "--maxtext_model",
        "llama3.1-8b",
    )
    step = reshard(SHARED / "trained" / "llama-fsdp8", tmp_path / "out", *options)
    assert_same_bits(weights(step), weights(SHARED / "trained" / "llama-fsdp8-paramonly-unscanned"))
    tree = restore(step)  # MaxText's TrainState of parameters alone
    assert tree["decoder.layers_3.mlp.wi_0.kernel"].shape == (64, 96)
    assert json.loads((step / "_CHECKPOINT_METADATA").read_text())["custom_metadata"]["scan_layers"] is False


@needs_shared
def test_post_training_goes_back_to_params(tmp_path: Path) -> None:
    """An nnx tree with `.value` leaves and layers apart becomes scanned `params.params`: the weights of the run that it
    came from.
    """
    like = trained_like(tmp_path / "like", "llama")
    options = ("--state", "params", "--scan_layers", "true", "--like", like, "--maxtext_model", "llama3.1-8b")
    step = reshard(SHARED / "trained" / "llama-fsdp8-paramonly-unscanned", tmp_path / "out", *options)
    wanted = {
        key: values.astype(ml_dtypes.bfloat16) for key, values in weights(SHARED / "trained" / "llama-fsdp8").items()
    }
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
        held["opt_state.0.mu.params.decoder.layers_2.mlp.wi_0.kernel"],
        before["opt_state.0.mu.params.decoder.layers.mlp.wi_0.kernel"][:, 2],
    )
    key = "nnx_aux.model.decoder.{}.dropout.rngs.dropout.key"
    np.testing.assert_array_equal(held[key.format("layers_3")], before[key.format("layers")][3])
    other = reshard(apart, tmp_path / "other", "--scan_layers", "true", "--param_scan_axis", "0", *said)
    assert arrays(other)["opt_state.0.nu.params.decoder.layers.mlp.wi_0.kernel"].shape == (4, 64, 96)
    back = reshard(other, tmp_path / "back", "--param_scan_axis", "1", *said)
    assert_same_bits(arrays(back), before)
    got, wanted = (json.loads(find_items(place).read("_METADATA"))["tree_metadata"] for place in (back, source))
    assert {path: entry["key_metadata"] for path, entry in got.items()} == {
        path: entry["key_metadata"] for path, entry in wanted.items()
    }


@needs_shared
def test_dtypes_of_weights_and_moments_apart(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Each once rounded; counters and random keys stay what they are."""
    source = SHARED / "trained" / "llama-fsdp8"
    step = reshard(
        source, tmp_path / "out", "--save_dtype", "bfloat16", "--moment_dtype", "float32", "--mesh", "fsdp=2"
    )
    before, after = arrays(source), arrays(step)
    for key, values in before.items():
        wanted = values.astype(ml_dtypes.bfloat16) if key.startswith("params.") else values
        assert digest(after[key]) == digest(wanted), key
    assert "training goes on with weights in bfloat16" in capsys.readouterr().err
    record = json.loads((step / "conversion.json").read_text())
    assert set(record["lossy"].values()) == {"float32, rounded to bfloat16"}
    wide = reshard(step, tmp_path / "wide", "--save_dtype", "float32")  # rounds nothing
    assert json.loads((wide / "conversion.json").read_text())["lossy"] == record["lossy"]


def test_rounded_values_in_a_wider_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The release doesn't tell them: `verify` says what does, and nothing wrong."""
    convert(make_release(tmp_path / "hf", LLAMA), tmp_path / "ckpt")
    reshard(tmp_path / "ckpt", tmp_path / "out", "--save_dtype", "float32")
    assert call("verify", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert "was rounded, and then resharded to float32" in said
    assert f"weightbeam diff {tmp_path}/ckpt/0/items {tmp_path}/out" in said


def test_integers_stay_and_are_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """`--save_dtype` is for floats: of weights that are integers it is said that they stay."""
    kernel, scale = np.arange(-32, 32, dtype=np.int8).reshape(8, 8), np.linspace(0, 1, 8, dtype=np.float32)
    tree = {"params": {"dense": {"kernel": jnp.asarray(kernel), "scale": jnp.asarray(scale)}}}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "ckpt" / "0" / "items", tree)
    step = reshard(tmp_path / "ckpt", tmp_path / "out", "--save_dtype", "bfloat16")
    assert "params.dense.kernel is int8: integers, which stay so; --save_dtype bfloat16 is" in capsys.readouterr().err
    held = arrays(step)
    assert digest(held["params.dense.kernel"]) == digest(kernel)
    assert digest(held["params.dense.scale"]) == digest(scale.astype(ml_dtypes.bfloat16))


# --- every family, scanned and unscanned ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [[], ["--mesh", "fsdp=4"]], ids=["no mesh", "fsdp=4"])
def test_shards_that_a_unit_has_no_room_for_are_read_by_their_chunks(tmp_path: Path, options: list[str]) -> None:
    """Our own checkpoint for no mesh: each of its shards holds many chunks and all layers, so that a unit that reads whole
    ones, and makes an array of each layer, needs more than it may have.
    """
    sizes = dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=6, vocab_size=512)
    heads = dict(num_attention_heads=8, num_key_value_heads=8, head_dim=64)
    release = make_release(tmp_path / "release", LLAMA | sizes | heads)
    convert(release, tmp_path / "stacked")
    wanted = convert(release, tmp_path / "apart", "--scan_layers", "false")
    source = open_orbax(tmp_path / "stacked")
    assert any(len(array.grains) > 1 for array in source.arrays.values())
    made = reshard(tmp_path / "stacked", tmp_path / "made", "--scan_layers", "false", "--unit_bytes", "2M", *options)
    assert_same_bits(weights(made), weights(wanted))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            marks=[pytest.mark.slow("ten seconds a family; the others are restacked in the landing tier")]
            * bool(number % 6),
        )
        for number, case in enumerate(CASES)
    ],
)
def test_every_family_is_restacked(
    generated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    """Our scanned checkpoint, taken apart, has MaxText's own unscanned bits; stacked again, its scanned ones. The
    record says which model it is.
    """
    facts = given()[case]
    options = () if facts["maxtext_model"] is None else ("--maxtext_model", facts["maxtext_model"])
    convert(generated / "cases" / case, tmp_path / "ckpt", *options)
    scanned = restore(tmp_path / "ckpt" / "0")
    apart = reshard(tmp_path / "ckpt", tmp_path / "apart", "--scan_layers", "false", "--state", "params")
    assert f"and the keys of {apart}/maxtext.yml" in capsys.readouterr().out
    convert(generated / "cases" / case, tmp_path / "wanted", "--scan_layers", "false", *options)
    assert_same_bits(restore(apart), restore(tmp_path / "wanted" / "0"))
    assert yaml.safe_load((apart / "maxtext.yml").read_text()) == yaml.safe_load(
        (tmp_path / "wanted" / "0" / "maxtext.yml").read_text()
    )
    back = reshard(apart, tmp_path / "back", "--scan_layers", "true", "--mesh", "fsdp=2")
    assert digests(restore(back)) == digests(scanned)
    assert main(["verify", "--source", str(generated / "cases" / case), "--checkpoint", str(back)]) == 0


# --- anyone's checkpoints ---------------------------------------------------------------------------------------------


class State(NamedTuple):
    """A tree whose keys are attributes."""

    weights: dict
    moments: list


def stock(folder: Path, tree: object, use_ocdbt: bool = True, use_zarr3: bool = True, step: int = 7) -> Path:
    """A checkpoint as stock Orbax writes it."""
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt, use_zarr3=use_zarr3)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder / str(step) / "items", args=ocp.args.PyTreeSave(tree))
    return folder


def state() -> State:
    """Arrays of every kind that Orbax stores, below dicts, lists and attributes."""
    values = np.arange(48).reshape(4, 12)
    dtypes = (
        "float32",
        "bfloat16",
        "float16",
        "int8",
        "uint32",
        "bool",
        "float8_e4m3fn",
        "float8_e8m0fnu",
        "float8_e5m2",
        "int4",
        "complex64",
    )
    kinds = {name: jnp.asarray(values % 7, dtype=getattr(ml_dtypes, name, name)) for name in dtypes}
    kinds["complex128"] = values + 1j
    return State(kinds, [jnp.float32(0.5), None, {"step": 3, "empty": {}, "of": [jnp.ones((5,), jnp.int32)]}])


@pytest.mark.parametrize(("use_ocdbt", "use_zarr3"), each([True, False], [True, False]))
def test_any_tree_in_any_storage(tmp_path: Path, use_ocdbt: bool, use_zarr3: bool) -> None:
    """Stock Orbax restores the same tree, of the same types, from the copy: chunks copied, cut anew, and in the other
    storage.
    """
    tree = state()
    if not use_zarr3:
        tree = tree._replace(
            weights={name: values for name, values in tree.weights.items() if name not in ("int4", "float8_e8m0fnu")}
        )
    source = stock(tmp_path / "source", tree, use_ocdbt, use_zarr3)
    wanted = arrays(source)
    restored = ocp.PyTreeCheckpointer().restore(source / "7" / "items")
    for number, options in enumerate(
        [(), ("--mesh", "fsdp=2", "--compression", "zstd"), ("--use_ocdbt", str(not use_ocdbt).lower())]
    ):
        step = reshard(source, tmp_path / f"out{number}", *options)
        assert step.name == "7"
        assert_same_bits(arrays(step), wanted)
        got = ocp.PyTreeCheckpointer().restore(step / "items")
        assert jax.tree.structure(got) == jax.tree.structure(restored)
        typed = ocp.PyTreeCheckpointer().restore(step / "items", item=tree)
        assert jax.tree.structure(typed) == jax.tree.structure(tree)


def test_random_keys_stay_random_keys(tmp_path: Path) -> None:
    """What makes numbers a key lies in `array_metadatas`: it comes along, also where the array is cut anew."""
    tree = {
        "params": {"w": jnp.ones((4, 4))},
        "rng": {"dropout": jax.random.key(3), "many": jax.random.split(jax.random.key(1, impl="rbg"), 6)},
    }
    source = stock(tmp_path / "source", tree)
    for options in ((), ("--compression", "none")):
        step = reshard(source, tmp_path / f"out{len(options)}", *options)
        got = ocp.PyTreeCheckpointer().restore(
            step / "items",
            item=jax.tree.map(lambda x: x, tree),
            restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
        )
        for name, key in tree["rng"].items():
            assert got["rng"][name].dtype == key.dtype
            np.testing.assert_array_equal(jax.random.key_data(got["rng"][name]), jax.random.key_data(key))


def adamw(weights: dict) -> object:
    """The state of a run of MaxText's with optax's own optimizer."""
    params = {"params": {"params": {}}}
    for key, values in weights.items():
        at = params["params"]["params"]
        for component in key.split(".")[:-1]:
            at = at.setdefault(component, {})
        at[key.split(".")[-1]] = jnp.asarray(values)
    optimizer = optax.adamw(1e-3)
    moments = optimizer.init(params["params"])
    moments = jax.tree.map(lambda x: x + 2 if x.ndim else x, moments)
    return {"step": jnp.int32(7), **params, "opt_state": moments}


def test_a_state_of_optax_there_and_back(tmp_path: Path) -> None:
    """Moments go where their weights go; the optimizer's own pytree is what stock Orbax restores."""
    folder = make_release(tmp_path / "hf")
    scanned = restore(convert(folder, tmp_path / "ckpt", "--maxtext_model", "llama2-7b", "--save_dtype", "float32"))
    tree = adamw(scanned)
    source = stock(tmp_path / "source", tree)
    said = ("--like", folder, "--maxtext_model", "llama2-7b")
    apart = reshard(source, tmp_path / "apart", "--scan_layers", "false", "--mesh", "fsdp=4", *said)
    back = reshard(apart, tmp_path / "back", "--scan_layers", "true", *said)
    assert_same_bits(arrays(back), arrays(source))
    typed = ocp.PyTreeCheckpointer().restore(back / "items", item=tree)
    assert jax.tree.structure(typed) == jax.tree.structure(tree)
    weights_only = reshard(source, tmp_path / "weights", "--state", "params", "--save_dtype", "bfloat16")
    assert {key: values.dtype.name for key, values in restore(weights_only).items()} == dict.fromkeys(
        scanned, "bfloat16"
    )


def test_large_chunks_are_decoded_once_into_files(tmp_path: Path) -> None:
    """Compressed chunks with all layers in each, far larger than a unit: the same bits, and nothing is left beside
    them.
    """
    folder = make_release(tmp_path / "hf")
    scanned = restore(convert(folder, tmp_path / "ckpt", "--maxtext_model", "llama2-7b", "--save_dtype", "float32"))
    source = stock(tmp_path / "source", adamw(scanned))
    said = ("--like", folder, "--maxtext_model", "llama2-7b", "--unit_bytes", "20000")
    apart = reshard(source, tmp_path / "apart", "--scan_layers", "false", *said)
    wanted = reshard(source, tmp_path / "wanted", "--scan_layers", "false", *said[:-2])
    assert_same_bits(arrays(apart), arrays(wanted))
    assert sorted(path.name for path in apart.iterdir()) == sorted(path.name for path in wanted.iterdir())
    planned = plan(str(source), scan_layers=False, like=str(folder), maxtext_model="llama2-7b", unit_bytes=20000)
    assert planned.by_way()["unpacked"][0] > 0


def test_other_items_come_along(tmp_path: Path) -> None:
    """The data iterator of a run: byte for byte with the whole state, not with the weights alone."""
    tree = {"params": {"params": {"decoder": {"decoder_norm": {"scale": jnp.ones(8)}}}}, "step": jnp.int32(7)}
    with ocp.CheckpointManager(tmp_path / "run", item_names=("items", "iter")) as run:
        run.save(
            3,
            args=ocp.args.Composite(
                items=ocp.args.PyTreeSave(tree), iter=ocp.args.JsonSave({"worker": 5, "shuffled": True})
            ),
        )
    reshard(tmp_path / "run", tmp_path / "out")
    restored = ocp.CheckpointManager(tmp_path / "out", item_names=("items", "iter")).restore(
        3, args=ocp.args.Composite(iter=ocp.args.JsonRestore())
    )
    assert restored["iter"] == {"worker": 5, "shuffled": True}
    assert not (reshard(tmp_path / "run", tmp_path / "weights", "--state", "params") / "iter").exists()


def test_killed_and_resumed(tmp_path: Path) -> None:
    """After a kill in the middle `--resume` makes the units that are missing, and unpacks what isn't; the result is
    that of a quiet run.
    """
    folder = make_release(tmp_path / "hf")
    scanned = restore(convert(folder, tmp_path / "ckpt", "--maxtext_model", "llama2-7b", "--save_dtype", "float32"))
    source = stock(tmp_path / "source", adamw(scanned))
    options = ["--scan_layers", "false", "--like", str(folder), "--maxtext_model", "llama2-7b", "--unit_bytes", "20000"]
    stop = warm.Signal(signal.SIGKILL, 1, rf"{re.escape(str(tmp_path))}/out/7\..*/units/[^/]+/[0-9]+\.json")
    warm.run(
        "reshard", source, tmp_path / "out", *options, "--direct_num_workers", 1, stop=stop, status=-signal.SIGKILL
    )
    assert not (tmp_path / "out" / "7").exists()
    reshard(source, tmp_path / "out", *options, status=2)  # what is staged isn't thrown away unasked
    step = reshard(source, tmp_path / "out", *options, "--resume")
    wanted = reshard(source, tmp_path / "wanted", *options)
    assert_same_bits(arrays(step), arrays(wanted))
    assert sorted(path.name for path in step.iterdir()) == sorted(path.name for path in wanted.iterdir())


def test_one_host_reads_what_it_owns(tmp_path: Path) -> None:
    """Chunks divide the shards of the mesh that was asked for, of one without logical names, too."""
    values = jnp.arange(64 * 48, dtype=jnp.float32).reshape(64, 48)
    source = stock(tmp_path / "source", {"w": values, "b": values[0]})
    step = reshard(source, tmp_path / "out", "--mesh", "fsdp=8", "--mesh", "fsdp=4,tensor=2")
    (rows, columns), (length,) = chunks(step)["w"], chunks(step)["b"]
    assert 64 % (8 * rows) == 0
    assert 48 % columns == 0
    assert 48 % (8 * length) == 0


@pytest.mark.parametrize(
    ("meshes", "layout"),
    [(("fsdp=8", "fsdp=4,tensor=2"), "true"), (("fsdp=16",), "false"), (("fsdp=2,tensor=4",), "true")],
)
def test_each_host_reads_what_it_needs(tmp_path: Path, meshes: tuple[str, ...], layout: str) -> None:
    """Load amplification 1.0 on each mesh that was asked for, from chunks that were for another one."""
    convert(make_release(tmp_path / "hf"), tmp_path / "ckpt", "--maxtext_model", "llama2-7b", "--mesh", "fsdp=32")
    options = ("--scan_layers", layout, *(word for mesh in meshes for word in ("--mesh", mesh)))
    step = reshard(tmp_path / "ckpt", tmp_path / "out", *options)
    axes, rules = json.loads((step / "conversion.json").read_text())["axes"], model_rules("llama2-7b")
    specs = [array.spec for array in read_arrays(find_items(step)) if array.spec.key in axes]
    assert len(specs) == len(axes)
    for mesh in (Mesh.parse(text, axes_in(rules)) for text in meshes):
        assert total(load_of(spec, partition_spec(axes[spec.key], rules), mesh) for spec in specs).worst == 1


@pytest.mark.parametrize(
    ("asked", "told"), [("--scan_layers false", "scan_layers=false"), ("--param_scan_axis 0", "param_scan_axis=0"), ("--mesh fsdp=2", "")]
)  # fmt: skip
def test_of_another_layout_the_old_maxtext_yml_says_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: str, told: str
) -> None:
    """Where a release of other sizes leaves MaxText untold of the new one, too."""
    step = convert(make_release(tmp_path / "hf", LLAMA), tmp_path / "ckpt", "--maxtext_model", "llama2-7b")
    other = make_release(tmp_path / "other", LLAMA | {"intermediate_size": 64})
    assert (step / "maxtext.yml").exists()
    assert call("reshard", step, tmp_path / "out", "--like", other, *asked.split()) == 0
    said = capsys.readouterr()
    assert "so nothing is said of it to MaxText" in said.err
    assert told in said.out
    assert (tmp_path / "out/0/maxtext.yml").exists() == (not told)


def test_a_virtual_checkpoint_is_a_source_like_any_other(tmp_path: Path) -> None:
    """Its chunks are ranges of the release's files; the copy refers to none, and has the values that `materialize`
    writes.
    """
    folder = make_release(tmp_path / "hf")
    convert(folder, tmp_path / "virtual", "--maxtext_model", "llama2-7b", "--virtual", "--param_scan_axis", "0")
    assert main(["materialize", str(tmp_path / "virtual"), str(tmp_path / "wanted")]) == 0
    wanted = restore(tmp_path / "wanted" / "0")
    for number, options in enumerate([(), ("--mesh", "fsdp=4"), ("--use_ocdbt", "false")]):
        step = reshard(tmp_path / "virtual", tmp_path / f"out{number}", *options)
        assert not (step / "items" / "source").exists()
        assert_same_bits(restore(step), wanted)


def test_a_damaged_source_isnt_copied(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A bit that flipped since the checkpoint was written, in chunks that nothing protects: the record's digests tell."""
    step = convert(make_release(tmp_path / "hf"), tmp_path / "ckpt", "--maxtext_model", "llama2-7b")
    data = max((step / "items").glob("ocdbt.process_*/d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    reshard(tmp_path / "ckpt", tmp_path / "out", status=1)
    assert "the source is damaged" in capsys.readouterr().err
    assert not (tmp_path / "out" / "0").exists()


# --- what can't be done -----------------------------------------------------------------------------------------------


def test_what_cant_be_done_is_said(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """In words, before anything is written."""
    weights = {"decoder": {"layers": {"mlp": {"wi_0": {"kernel": jnp.ones((4, 2, 6))}}}}}
    source = stock(tmp_path / "source", {"params": {"params": weights}, "opt_state": {"0": jnp.ones(3)}})
    (tmp_path / "run").mkdir()
    for step in (1, 2):
        stock(tmp_path / "run", {"w": jnp.ones(3)}, step=step)
    for options, said in (
        ((source, tmp_path / "out", "--scan_layers", "false"), "--like names a release"),
        ((source, source), "holds the source"),
        ((source, tmp_path / "out", "--mesh", "fdsp=4"), "have no axis 'fdsp'"),
        ((tmp_path / "run", tmp_path / "out"), "2 steps: name one of 1, 2"),
        ((tmp_path / "nothing", tmp_path / "out"), "no such folder"),
    ):
        reshard(*options, status=2)
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert reshard(tmp_path / "run", tmp_path / "out", "--step", "2").name == "2"


# --- a training run's folder ------------------------------------------------------------------------------------------


@needs_shared
def test_the_folder_of_a_run_is_where_its_checkpoints_lie(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """As MaxText lays it out, wherever a checkpoint is taken; several steps are named, and `--step` takes one."""
    run, like = tmp_path / "run", trained_like(tmp_path / "like", "llama")
    shutil.copytree(SHARED / "trained" / "llama-fsdp8" / "1", run / "checkpoints" / "1")
    (run / "tensorboard").mkdir()
    reshard(run, tmp_path / "a")
    assert_same_bits(arrays(run), arrays(tmp_path / "a"))
    assert main(["diff", str(run), str(tmp_path / "a")]) == main(["inspect", str(run)]) == 0
    shutil.copytree(run / "checkpoints" / "1", run / "checkpoints" / "2")
    capsys.readouterr()
    assert main(["inspect", str(run)]) == 2
    assert f"{run}/checkpoints: 2 steps: name one of 1, 2, as in {run}/checkpoints/2" in capsys.readouterr().err
    assert reshard(run, tmp_path / "b", "--step", 2) == tmp_path / "b" / "2"
    assert main(["export", str(run), str(tmp_path / "out"), "--step", "2", "--like", str(like)]) == 0
    for wrong, said in (
        ("runn/checkpoints", "no such folder\n"),
        ("run/checkpoints/1/items/_METADATA", "it is a file"),
    ):
        place = str(tmp_path / wrong)
        assert main(["export", place, str(tmp_path / "x")]) == 2
        assert said in capsys.readouterr().err


# --- what MaxText is told ---------------------------------------------------------------------------------------------

SIZES = dict(
    base_emb_dim=64, base_num_query_heads=4, base_num_kv_heads=2, head_dim=16, base_mlp_dim=96, vocab_size=256, base_num_decoder_layers=4,
)  # fmt: skip
MOE_SIZES = SIZES | dict(
    base_mlp_dim=32, base_moe_mlp_dim=32, base_num_decoder_layers=3, num_experts=8, num_experts_per_tok=2
)
DUMPED = """
logical_axis_rules: !!python/tuple
- !!python/tuple [embed, fsdp]
decoder_block: !!python/object/apply:maxtext.common.common_types.DecoderBlockType
- BLOCK
"""


def run_config(file: Path, model: str, sizes: dict, block: str) -> Path:
    """A run's own configuration: what differs from MaxText's, and Python's tags, as MaxText dumped it."""
    keys = {"base_config": "base.yml", "run_name": "mine", "model_name": model, "override_model_config": True, **sizes}
    file.write_text(yaml.safe_dump(keys) + DUMPED.replace("BLOCK", block))
    return file


@needs_shared
@pytest.mark.parametrize(
    ("run", "model", "sizes", "block"),
    [
        ("llama-fsdp8", "llama3.1-8b", SIZES, "llama2"),
        pytest.param(
            *("qwen3moe-fsdp4-tensor2", "qwen3-30b-a3b", MOE_SIZES, "qwen3_moe"),
            marks=pytest.mark.slow("the same with experts"),
        ),
    ],
)
def test_a_run_s_configuration_is_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture, run: str, model: str, sizes: dict, block: str
) -> None:
    """Apart and stacked again without a release, the second time by the `maxtext.yml` that the first one left; the
    weights are those of `--like`, and the flags are said.
    """
    config = run_config(tmp_path / "config.yml", model, sizes, block)
    source, like = SHARED / "trained" / run, trained_like(tmp_path / "like", run)
    apart = reshard(source, tmp_path / "apart", "--scan_layers", "false", "--maxtext_config", config)
    said = capsys.readouterr().out
    assert f"in MaxText: load_full_state_path={apart / 'items'} scan_layers=false model_name={model}\n" in said
    assert f"and the keys of {apart}/maxtext.yml" in said
    told = yaml.safe_load((apart / "maxtext.yml").read_text())
    assert {key: told[key] for key in sizes} == sizes
    assert (told["model_name"], told["scan_layers"]) == (model, False)
    named = ("--maxtext_model", model)
    by_like = reshard(source, tmp_path / "by_like", "--scan_layers", "false", "--like", like, *named)
    assert_same_bits(arrays(apart), arrays(by_like))
    assert yaml.safe_load((by_like / "maxtext.yml").read_text())["model_name"] == model
    back = reshard(apart, tmp_path / "back", "--scan_layers", "true")
    assert_same_bits(arrays(back), arrays(source))
    assert yaml.safe_load((back / "maxtext.yml").read_text())["scan_layers"] is True


@needs_shared
def test_what_isnt_the_checkpoint_s_model_is_said(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Nothing is said to MaxText of it, nor of a tree that isn't MaxText's."""
    run, like = SHARED / "trained" / "llama-fsdp8", trained_like(tmp_path / "like", "moe")
    step = reshard(run, tmp_path / "other", "--like", like)
    said = capsys.readouterr()
    assert f"this isn't the model of --like={like}" in said.err
    assert "model_name" not in said.out
    assert not (step / "maxtext.yml").exists()
    reshard(run, tmp_path / "no", "--scan_layers", "false", "--maxtext_model", "llama3.1-8b", status=2)
    assert "shapes aren't those of --maxtext_model=llama3.1-8b" in capsys.readouterr().err
    reshard(run, tmp_path / "no", "--scan_layers", "false", status=2)
    assert "--maxtext_config a run's configuration" in capsys.readouterr().err
    reshard(stock(tmp_path / "tree", {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}), tmp_path / "tree2")
    said = capsys.readouterr().out
    assert "in MaxText" not in said
    assert "check it:" in said
