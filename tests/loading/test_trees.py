"""The trees that programs ask for: every kind of Flax's, dtypes of their own, what doesn't fit, and MaxText's place for
a loader.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lazily import lazily
from loading.jobs import abstract, nested
from processes import run
from support import BF16, F32, HERE, LLAMA, assert_same_bits, flatten, make_release, random_tensors, reference

import weightbeam as wb
from weightbeam.model_mappings.trees import twins

jax = lazily("jax")
jnp = lazily("jax.numpy")
nn = lazily("flax.linen")
nnx = lazily("flax.nnx")

CONFIG = LLAMA | dict(vocab_size=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_release(tmp_path_factory.mktemp("release") / "hf", CONFIG, files=2)


def wanted(dtype: np.dtype = BF16) -> dict[str, np.ndarray]:
    return reference(CONFIG, random_tensors(CONFIG), dtype)


def numpy(tree: Any) -> dict[str, np.ndarray]:
    return {key: np.asarray(value) for key, value in flatten(tree).items()}


def test_linen(folder: Path) -> None:
    """The collection, boxed as Flax boxes partitioned variables; the boxes stay."""
    boxed = jax.tree.map(
        lambda leaf: nn.LogicallyPartitioned(leaf, ("a",) * len(leaf.shape)), nested(abstract(wanted()))
    )
    loaded = wb.load(str(folder), {"params": boxed})
    assert isinstance(loaded["params"]["decoder"]["decoder_norm"]["scale"], nn.LogicallyPartitioned)
    assert_same_bits(numpy(nn.unbox(loaded)["params"]), wanted())


def test_nnx(folder: Path) -> None:
    """A module's state, unscanned as its keys say; it goes back into the module."""
    unscanned = {}
    for key, values in wanted().items():
        before, _, after = key.partition(".layers.")
        unscanned |= {f"{before}.layers_{i}.{after}": values[:, i] for i in range(2)} if after else {key: values}
    state = nnx.State(jax.tree.map(nnx.Param, nested(abstract(unscanned))))
    loaded = wb.load(str(folder), state)
    assert isinstance(loaded, nnx.State)
    assert isinstance(loaded["decoder"]["decoder_norm"]["scale"], nnx.Param)
    assert_same_bits(numpy(loaded.to_pure_dict()), unscanned)


@pytest.mark.parametrize("prefix", ["", "params.", "params.params."])
def test_dicts(folder: Path, prefix: str) -> None:
    """A flat dict of Orbax's keys, or of what is left of them."""
    loaded = wb.load(str(folder), {prefix + key: value for key, value in abstract(wanted()).items()})
    assert_same_bits({key.removeprefix(prefix): np.asarray(value) for key, value in loaded.items()}, wanted())


@pytest.mark.parametrize("name", ["{}.value", "model.{}.value", "model_params.{}.value", "base.{}.value"])
def test_trees_of_other_programs(folder: Path, name: str) -> None:
    """What nnx states are as plain dicts, alone and in the states of trainers; the tree stays what it is."""
    loaded = wb.load(str(folder), {name.format(key): value for key, value in abstract(wanted()).items()})
    assert_same_bits(
        {key: np.asarray(value) for key, value in loaded.items()},
        {name.format(key): values for key, values in wanted().items()},
    )


def test_how_far_it_has_come_is_told(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In bytes of the tree, which are all there at the end; of something else it is said what it may be."""
    told: list[wb.Progress] = []
    loaded = wb.load(str(folder), mesh="fsdp=1", unit_bytes=2_000, progress=told.append)
    assert told[-1].finished
    assert told[-1].doing == "loading"
    assert told[-1].done == told[-1].total == sum(array.nbytes for array in jax.tree.leaves(loaded))
    assert [now.done for now in told] == sorted(now.done for now in told)
    wb.load(str(folder), mesh="fsdp=1", progress="json")
    assert json.loads(capfd.readouterr().err.splitlines()[-1])["progress"]["finished"]
    with pytest.raises(wb.Refused, match="progress=5 should be True"):
        wb.load(str(folder), mesh="fsdp=1", progress=5)


def test_the_trees_dtypes_and_vocabulary_count(folder: Path) -> None:
    """float32 without a detour through bfloat16, float16 too, and a padded vocabulary, as the leaves have them; the
    layout is the sharding's.
    """
    arrays = wanted(F32)
    arrays["token_embedder.embedding"] = np.pad(arrays["token_embedder.embedding"], ((0, 4), (0, 0)))
    arrays["decoder.logits_dense.kernel"] = np.pad(arrays["decoder.logits_dense.kernel"], ((0, 0), (0, 4)))
    arrays["decoder.layers.mlp.wo.kernel"] = arrays["decoder.layers.mlp.wo.kernel"].astype(np.float16)
    assert_same_bits(numpy(wb.load(str(folder), nested(abstract(arrays)))), arrays)


def test_all_mismatches_at_once(folder: Path) -> None:
    """Nothing is read: what is missing, unused, of another shape or kind, or has no sharding, in one refusal."""
    leaves = abstract(wanted())
    del leaves["decoder.layers.mlp.wi_0.kernel"]
    leaves["decoder.layers.mlp.wi_7.kernel"] = leaves["decoder.decoder_norm.scale"]
    leaves["decoder.logits_dense.kernel"] = jax.ShapeDtypeStruct(
        (3, 5), jnp.bfloat16, sharding=leaves["decoder.decoder_norm.scale"].sharding
    )
    leaves["decoder.layers.mlp.wo.kernel"] = jax.ShapeDtypeStruct(
        (48, 2, 32), jnp.int32, sharding=leaves["decoder.decoder_norm.scale"].sharding
    )
    leaves["decoder.decoder_norm.scale"] = jax.ShapeDtypeStruct((32,), jnp.bfloat16)
    with pytest.raises(wb.Refused) as refused:
        wb.load(str(folder), leaves)
    kinds = {
        (problem.kind, problem.subject.removeprefix("params.params.decoder.")) for problem in refused.value.problems
    }
    assert kinds == {
        ("missing", "layers.mlp.wi_7.kernel"),
        ("unused", "layers.mlp.wi_0.kernel"),
        ("shape", "logits_dense.kernel"),
        ("dtype", "layers.mlp.wo.kernel"),
        ("sharding", "decoder_norm.scale"),
    }


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host"])
def test_the_memory_that_a_sharding_names(folder: Path, kind: str) -> None:
    """Arrays on the host, as MaxText offloads them: the same bits, in that memory."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
    like = {key: jax.ShapeDtypeStruct(values.shape, BF16, sharding=here) for key, values in wanted().items()}
    made = wb.load(str(folder), like=like)
    assert {array.sharding.memory_kind for array in made.values()} == {kind}
    assert_same_bits(numpy(made), wanted())


@pytest.mark.parametrize(
    ("spec", "mesh", "said"),
    [
        ("fsdp", "fsdp=-1", None),
        ("fsdp", None, r"is no sharding: name a mesh"),
        ("other", "fsdp=1", r"is no sharding: name a mesh that has its axes"),
    ],
)
def test_a_partition_spec_takes_the_mesh(folder: Path, spec: str, mesh: str | None, said: str | None) -> None:
    """What has no devices yet, and what says nothing of a layout, are told like all other problems."""
    asked = jax.sharding.PartitionSpec(spec)
    like = {
        key: types.SimpleNamespace(shape=values.shape, dtype=BF16, sharding=asked) for key, values in wanted().items()
    }
    if said is None:
        assert_same_bits(numpy(wb.load(str(folder), like=like, mesh=mesh)), wanted())
        return
    with pytest.raises(wb.Refused, match=said) as refused:
        wb.load(str(folder), like=like, mesh=mesh)
    assert len(refused.value.problems) == len(like)


def test_meshes_of_several_devices(folder: Path) -> None:
    """Without an axis of the rules each device has all of each array, which is said, unless the leaves' shardings say so;
    an axis takes the devices that are left; of Manual axes nobody knows how an array lies.
    """
    code = """
        import sys, jax, weightbeam as wb
        one, two = (jax.make_mesh((n,), ("x",), devices=jax.devices()[:n]) for n in (1, 2))
        made = wb.load(sys.argv[1], mesh=one)
        spread = jax.sharding.NamedSharding(two, jax.sharding.PartitionSpec())
        like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=spread), made)
        wb.load(sys.argv[1], like, mesh=two)
        print("so far", file=sys.stderr, flush=True)
        wb.load(sys.argv[1], mesh=two)
        made = wb.load(sys.argv[1], mesh="tensor=-1")
        print(*{str(dict(each.sharding.mesh.shape)) for each in jax.tree.leaves(made)})
        try:
            wb.load(sys.argv[1], mesh=jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Manual,)))
        except wb.Refused as e:
            print(e)
        """
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    ran = run(sys.executable, "-c", textwrap.dedent(code), folder, env=environment, status=0)
    before, _, after = ran.stderr.partition("so far")
    assert "no rule speaks of an axis" not in before
    assert "no rule speaks of an axis of the mesh (x), so that each device has all of each array" in after
    assert "{'tensor': 2}" in ran.stdout
    assert "the axes of its mesh are Manual" in ran.stdout


def test_random_states_are_asked_for_as_all_else(folder: Path) -> None:
    """Of a module with dropout: its key has a dtype of JAX's own."""
    state = nnx.state(nnx.Dropout(0.1, rngs=nnx.Rngs(0)))
    with pytest.raises(wb.Refused, match=r"key.*the tree asks for it, the source doesn't have it"):
        wb.load(str(folder), like=state)


@pytest.mark.parametrize("place", [None, 3, b"x", ["a"]])
def test_a_source_that_is_no_text(place: Any) -> None:
    for call in (wb.open, lambda source: wb.load(source, mesh="fsdp=1")):
        with pytest.raises(wb.Refused, match="should be a text: a path, a URL or a name"):
            call(place)


def test_a_file_that_is_cut_short_fails_in_words(tmp_path: Path) -> None:
    """Between the plan and the reading, which is when it can happen."""
    source = make_release(tmp_path / "hf", CONFIG)
    file = source / "model.safetensors"
    like = abstract(wanted())
    from weightbeam.pipelines.loading import load as loading
    from weightbeam.pipelines.loading.meeting import Meeting
    from weightbeam.pipelines.loading.opening import choose, find_source

    opened = find_source(str(source), choose({}))
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(wb.Failed, match=r"model\.safetensors"):
        loading.Loading(opened, loading.read_tree(like).spelled_as(opened.arrays).targets).run(Meeting())
    file.unlink()
    with pytest.raises(wb.Refused, match="no safetensors file"):
        wb.load(str(source), like)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_maxtexts_loader(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """MaxText's caller gets None and Linen's collection, whatever it asks with; a stand-in of its module shows that the
    function is put there.
    """
    modules = {name: types.ModuleType(name) for name in ("maxtext", "maxtext.common", "maxtext.common.checkpointing")}
    checkpointing = modules["maxtext.common.checkpointing"]
    with pytest.raises(wb.Refused, match="can't be imported"):
        wb.maxtext.install()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(wb.Refused, match="has no load_safetensors_dynamic_state"):
        wb.maxtext.install()
    checkpointing.load_safetensors_dynamic_state = lambda *_: 1 / 0  # type: ignore[attr-defined]
    wb.maxtext.install()
    leaves = nested(abstract(wanted()))
    asked = nnx.State(jax.tree.map(nnx.Param, leaves)) if kind == "nnx" else {"params": leaves}
    config = types.SimpleNamespace(
        scan_layers=True, param_scan_axis=1, hf_access_token="", base_output_directory="gs://nowhere"
    )
    state, loaded = checkpointing.load_safetensors_dynamic_state(str(folder), asked, config)
    assert state is None
    assert set(loaded) == {"params"}
    assert_same_bits(numpy(loaded["params"]), wanted())


def test_jax_waits_until_it_is_needed() -> None:
    """The public face, `open` and MaxText's hook import neither JAX nor MaxText."""
    script = "import sys, weightbeam as wb, weightbeam.maxtext; wb.open, wb.load, wb.maxtext.install; assert not {'jax', 'maxtext', 'flax'} & set(sys.modules)"
    run(sys.executable, "-c", script, cwd=HERE.parent, status=0)


def test_a_variable_is_asked_for_in_its_collection() -> None:
    """MaxText 0.2.5 keeps a router's bias as a variable of its own type; layers lie on its first axis."""
    from flax import nnx

    from weightbeam.pipelines.loading.abstract import read_tree

    class MoEBiasVar(nnx.Variable):
        pass

    class Gate(nnx.Module):
        def __init__(self) -> None:
            self.bias, self.kernel = MoEBiasVar(jnp.zeros((3, 4))), nnx.Param(jnp.zeros((8, 3, 4)))

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.gate = Gate()

    parameter, variable, kernel = (
        f"params.{name}" for name in ("params.gate.bias", "MoEBiasVar.gate.bias", "params.gate.kernel")
    )
    asked = read_tree(nnx.state(nnx.eval_shape(Model), (nnx.Param, MoEBiasVar)))
    asked = asked.spelled_as([kernel, parameter, variable])
    assert {target.key: target.shape for target in asked.targets} == {variable: (3, 4), kernel: (8, 3, 4)}
    assert twins(parameter) >= {variable}
    built = asked.build([np.ones(target.shape) for target in asked.targets])
    assert built["gate"]["bias"].get_value().shape == (3, 4)
