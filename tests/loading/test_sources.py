"""Orbax checkpoints of any writer, virtual ones, buckets and the hub: `open` and `load` have the same arrays of all of
them.
"""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lazily import lazily
from loading.jobs import abstract, nested
from processes import run
from servers.gcs import FakeGcs
from servers.hub import FakeHub
from support import (
    BF16,
    HERE,
    LLAMA,
    assert_same_bits,
    convert,
    digest,
    flatten,
    make_release,
    random_tensors,
    reference,
    restore,
)
from trained import SHARED, needs_shared, trained_like

import weightbeam as wb

jax = lazily("jax")
ocp = lazily("orbax.checkpoint")

TRAINED = SHARED / "trained"
MODEL = LLAMA | dict(vocab_size=512)


def wanted() -> dict[str, np.ndarray]:
    return reference(MODEL, random_tensors(MODEL), BF16)


def loaded(source: Path | str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {key: np.asarray(value) for key, value in flatten(wb.load(str(source), nested(abstract(arrays)))).items()}


WRITERS = {  # whose trees have the weights below this, and what lies beside them
    "parameters": ("params.params.{}", {}),
    "training state": ("params.params.{}", {"opt_state.mu.a": 1, "step": 0}),
    "nnx": ("{}.value", {"rngs.default.count.value": 1}),
    "nnx training state": ("model.{}.value", {"optimizer.step.value": 3}),
    "training engine": ("model_params.{}.value", {"opt_state.count": 2}),
    "reinforcement learning": ("base.{}.value", {}),
    "bare": ("{}", {}),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_anyones_checkpoint_has_maxtexts_names(tmp_path: Path, writer: str) -> None:
    """As stock Orbax saves each of the trees that MaxText and its tools write; `as_is` keeps their own keys."""
    name, beside = WRITERS[writer]
    tree = {name.format(key): values for key, values in wanted().items()} | {
        key: np.array([value]) for key, value in beside.items()
    }
    ocp.PyTreeCheckpointer().save(tmp_path / "ckpt", nested(tree))
    opened = wb.open(tmp_path / "ckpt")
    assert {f"params.params.{key}" for key in wanted()} <= set(opened)
    assert_same_bits(loaded(tmp_path / "ckpt", wanted()), wanted())
    as_is = wb.open(tmp_path / "ckpt", as_is=True)
    assert_same_bits({key: np.asarray(array) for key, array in as_is.items()}, tree)


@pytest.mark.parametrize("key", ["decoder.layers.0.mlp.wi_0.kernel.array.qvalue", "params.aqt.decoder.mlp.qrhs.frozen"])
def test_trees_without_plain_weights_are_refused(tmp_path: Path, key: str) -> None:
    """With the reason; their arrays can be opened as they are."""
    ocp.PyTreeCheckpointer().save(tmp_path / "ckpt", nested({key: np.zeros((2, 3), np.int8)}))
    with pytest.raises(wb.Refused, match="as_is=True"):
        wb.open(tmp_path / "ckpt")
    assert wb.open(tmp_path / "ckpt", as_is=True)[key].shape == (2, 3)


def test_a_chunk_that_is_gone_is_no_zeros(tmp_path: Path) -> None:
    """Of a checkpoint whose metadata say that every chunk is stored."""
    source = make_release(tmp_path / "hf", MODEL)
    step = convert(source, tmp_path / "out", "--use_ocdbt", "false")
    chunks = step / "items" / "params.params.decoder.layers.mlp.wo.kernel" / "c"
    next(path for path in sorted(chunks.rglob("*")) if path.is_file()).unlink()
    with pytest.raises(wb.Failed, match=r"mlp\.wo\.kernel"):
        loaded(step, wanted())


def test_leaves_of_a_strangers_checkpoint_need_shardings(tmp_path: Path) -> None:
    """Nothing is replicated by default: logical axes are known of our checkpoints only."""
    ocp.PyTreeCheckpointer().save(
        tmp_path / "ckpt", nested({f"params.params.{key}": values for key, values in wanted().items()})
    )
    leaves = {key: jax.ShapeDtypeStruct(values.shape, values.dtype) for key, values in wanted().items()}
    with pytest.raises(
        wb.Refused, match=r"1 problem:\n.*: its logical axes aren't known \(and \d+ others\).*release= names"
    ):
        wb.load(str(tmp_path / "ckpt"), nested(leaves))


def test_a_release_tells_the_axes_of_what_is_opened(tmp_path: Path) -> None:
    """As it does of what is loaded; of arrays under their own names it can't."""
    ocp.PyTreeCheckpointer().save(
        tmp_path / "ckpt", nested({f"params.params.{key}": values for key, values in wanted().items()})
    )
    like = make_release(tmp_path / "hf", MODEL)
    opened, told = wb.open(tmp_path / "ckpt", release=str(like)), wb.open(like)
    assert {key: array.logical_axes for key, array in opened.items()} == {
        key: array.logical_axes for key, array in told.items()
    }
    assert not any(filter(None, wb.open(tmp_path / "ckpt")["params.params.decoder.logits_dense.kernel"].logical_axes))
    with pytest.raises(wb.Refused, match=r"release=.*as_is=True opens arrays under their own names"):
        wb.open(tmp_path / "ckpt", as_is=True, release=str(like))
    with pytest.raises(wb.Refused, match="is for an Orbax checkpoint"):
        wb.open(like, release=str(like))
    with pytest.raises(wb.Refused, match=r"mtp=True, save_dtype=float32: is of MaxText's arrays, and as_is=True"):
        wb.open(like, as_is=True, mtp=True, save_dtype="float32")
    assert wb.open(like, as_is=True, mtp=None, save_dtype=None)


def test_what_cant_be_meant_is_told_together(tmp_path: Path) -> None:
    with pytest.raises(wb.Refused) as refused:
        wb.load(tmp_path, timeout=-1, dequantize="gpu", unit_bytes="x", vocab_size=-3)
    named = [problem.subject for problem in refused.value.problems]
    assert named == ["timeout", "dequantize", "like", "vocab_size", "unit_bytes"]
    for wrong, meant in (("msh", "mesh"), ("layer", "layers")):
        with pytest.raises(TypeError, match=f"'{wrong}' isn't an option; did you mean {meant}"):
            wb.load(tmp_path, **{wrong: "fsdp=1"})


@pytest.mark.parametrize("scan", ["true", "false"])
def test_a_release_tells_the_axes_of_a_state_whose_bias_is_a_variable(
    generated: Path, tmp_path: Path, scan: str
) -> None:
    """As MaxText 0.2.5 trains DeepSeek V3: a router's bias lies among the state of its modules, and no parameter repeats
    it. The weights are those of the conversion, by the variable's own name.
    """
    like, options = generated / "cases" / "deepseek3", dict(mesh="fsdp=1", release=str(generated / "cases/deepseek3"))
    convert(like, tmp_path / "made", "--scan_layers", scan)
    weights = flatten(ocp.PyTreeCheckpointer().restore(tmp_path / "made" / "0" / "items")["params"])
    repeated = {key for key in weights if key.startswith("params.") and key.endswith(".gate.bias")}
    variables = {key for key in weights if key.startswith("MoEBiasVar.")}
    assert repeated
    assert len(variables) == len(repeated)
    state = {f"params.{key}": values for key, values in weights.items() if key not in repeated | variables}
    for key in variables:
        state[f"nnx_aux.model.{key.removeprefix('MoEBiasVar.')}.value"] = weights[key]
    ocp.PyTreeCheckpointer().save(tmp_path / "trained", nested(state))
    found = flatten(wb.load(str(tmp_path / "trained"), **options))
    wanted = {f"params.{key}": values for key, values in weights.items() if key not in repeated}
    assert_same_bits({key: np.asarray(values) for key, values in found.items()}, wanted)


@needs_shared
@pytest.mark.parametrize(
    "run",
    ["llama-fsdp8", "llama-fsdp8-paramonly-unscanned", "llama-linen-paramonly-unscanned", "qwen3moe-fsdp4-tensor2"],
)
def test_what_maxtexts_training_wrote(run: str) -> None:
    """The bits of the parameters, by MaxText's names; a state's optimizer is there, too."""
    told = json.loads((TRAINED / run / "digests.json").read_text())["params"]
    opened = wb.open(TRAINED / run)
    for key, (shape, dtype, _, sha256) in told.items():
        array = opened[wb_name(key)]
        assert digest(np.asarray(array)) == [shape, dtype, sha256], key


@needs_shared
def test_a_run_onto_a_mesh(tmp_path: Path) -> None:
    """With a release of the model, which tells the logical axes: the weights' bits on eight devices, and of runs that were
    trained on eight, each device's share of a sharded matrix as large as it was there.
    """
    likes = {name: trained_like(tmp_path / name, name) for name in ("llama", "qwen3moe")}
    code = """
        import hashlib, json, sys
        import jax, numpy as np
        import weightbeam as wb
        source, mesh, release = sys.argv[1:]
        loaded = wb.load(source, mesh=mesh, release=release)
        told = {}
        for path, array in jax.tree_util.tree_flatten_with_path(loaded)[0]:
            assert len(array.sharding.device_set) == 8
            share = array.sharding.shard_shape(array.shape)
            values = np.asarray(array)
            sha256 = hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()
            told[".".join(key.key for key in path)] = [list(array.shape), array.dtype.name, list(share), sha256]
        print(json.dumps(told))
        """
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    for name, mesh, trained_there in [
        ("llama-fsdp8", "fsdp=8", True),
        ("llama-fsdp8-paramonly-unscanned", "fsdp=4,tensor=2", False),
        ("qwen3moe-fsdp4-tensor2", "fsdp=4,tensor=2", True),
    ]:
        like = likes["llama" if "llama" in name else "qwen3moe"]
        ran = run(sys.executable, "-c", textwrap.dedent(code), TRAINED / name, mesh, like, env=environment, status=0)
        wanted = json.loads((TRAINED / name / "digests.json").read_text())["params"]
        loaded = json.loads(ran.stdout)
        assert loaded.keys() == {wb_name(key) for key in wanted}
        for key, (shape, dtype, share, sha256) in wanted.items():
            found = loaded[wb_name(key)]
            assert (found[:2], found[3]) == ([shape, dtype], sha256), key
            # what lies on several devices alike was written by each of them in part
            assert not trained_there or found[2] == share or key.endswith((".scale", ".gate.kernel")), key


@needs_shared
def test_a_release_that_is_of_another_model(tmp_path: Path) -> None:
    """Or none, or that nothing needs: refused, and said of which keyword."""
    run, moe = TRAINED / "llama-linen-paramonly-unscanned", trained_like(tmp_path / "moe", "moe")
    with pytest.raises(wb.Refused, match=r"unused: .*layers_3.*a model like .*moe hasn't it") as refused:
        wb.load(str(run), mesh="fsdp=1", release=str(moe))
    assert {problem.kind for problem in refused.value.problems} == {"unused", "missing"}
    for source, release, words in [
        (run, run, f"release={run}: holds no config.json"),
        (run, tmp_path / "nowhere", "no such folder"),
        (moe, moe, f"release={moe}: is for an Orbax checkpoint"),
        (TRAINED / "llama-fsdp8", moe, f"release={moe}: the checkpoint's shapes aren't those"),
    ]:
        with pytest.raises(wb.Refused, match=re.escape(words)):
            wb.load(str(source), mesh="fsdp=1", release=str(release))


def wb_name(key: str) -> str:
    """MaxText's name of a weight whose key in the checkpoint may have `.value`, and lack the collection."""
    return "params.params." + key.removesuffix(".value").removeprefix("params.").removeprefix("params.")


def test_a_virtual_checkpoint(tmp_path: Path) -> None:
    """Its chunks are ranges of the release's files."""
    source = make_release(tmp_path / "hf", MODEL, files=2)
    step = convert(
        source,
        tmp_path / "out",
        "--virtual",
        "--link",
        "copy",
        "--scan_layers",
        "false",
        "--maxtext_model",
        "llama2-7b",
    )
    arrays = restore(step)
    assert_same_bits(loaded(tmp_path / "out", arrays), arrays)


def test_arguments_of_a_step_and_of_waiting(tmp_path: Path) -> None:
    """Bytes as every command takes them; what can't be meant is refused, also where one process never waits."""
    source = make_release(tmp_path / "hf", MODEL)
    assert wb.load(str(source), mesh="fsdp=1", maxtext_model="llama2-7b", unit_bytes="64M")
    asked: list[dict[str, Any]] = [dict(unit_bytes=each) for each in (0, -5, "many")]
    for odd in (*asked, *(dict(timeout=each) for each in (0, -1, float("nan"), "x"))):
        with pytest.raises(wb.Refused, match=r"should be (bytes|seconds)"):
            wb.load(str(source), mesh="fsdp=1", **odd)


REMOTE = """
import json, sys
import jax, numpy as np
from trained import trained_like

import weightbeam as wb
from support import digests, flatten
told = []
wb.convert("hf://org/model", "gs://bucket/ckpt", mesh="fsdp=2")
for url in ("hf://org/model", "gs://bucket/ckpt"):
    tree = wb.load(url, mesh="fsdp=1")
    told.append(digests({key: np.asarray(value) for key, value in flatten(tree["params"]["params"]).items()}))
print(json.dumps(told))
"""


def test_buckets_and_the_hub(tmp_path: Path) -> None:
    """A release on the hub, and a checkpoint in a bucket, by ranges; a load has each byte of the hub's files sent once."""
    source = make_release(tmp_path / "hf", MODEL, files=2)
    with FakeGcs("bucket") as gcs, FakeHub() as hub:
        hub.add("org/model", source)
        environment = (
            os.environ | gcs.env() | hub.env() | {"PYTHONPATH": f"{HERE}:{HERE.parent}", "JAX_PLATFORMS": "cpu"}
        )
        ran = run(sys.executable, "-c", REMOTE, env=environment, status=0)
        stored = sum(path.stat().st_size for path in source.glob("*.safetensors"))
        assert hub.cdn.log.sent < 2 * stored * 1.01  # by the conversion, and by the load
    told = [digest(values) for values in wanted().values()]
    for made in json.loads(ran.stdout.splitlines()[-1]):
        assert [made[key] for key in wanted()] == told
