"""DeepSeek V4: every spelling of its tensors, the variables that aren't parameters, and the layers that MaxText can
scan.

That the arrays are MaxText's bit for bit is tested with the other cases (`tests/cases/test_maxtext_bits.py`).
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from facts import load_headers, load_trees
from families.numpy_decoder import sigmoid
from lazily import lazily
from safetensors.numpy import save_file
from support import assert_same_bits, call, convert, converted, read_config, read_file, read_tensors

from weightbeam.model_mappings.audit import audit
from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.families.deepseek_v4 import compress_ratios
from weightbeam.model_mappings.family import rename
from weightbeam.model_mappings.plan import Array, expand, make_arrays
from weightbeam.model_mappings.registry import family_of

modeling_deepseek_v4 = lazily("transformers.models.deepseek_v4.modeling_deepseek_v4")
ocp = lazily("orbax.checkpoint")
torch = lazily("torch")
transformers = lazily("transformers")

HUB = load_headers()["deepseek_v4"]  # two hash-routed layers, then two pairs that MaxText scans
FLASH = load_trees()["deepseek4-284b--scan"].config
CSA, HCA, SLIDING = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"


def arrays_of(config: dict[str, Any], **layout: Any) -> dict[str, Array]:
    """The arrays of the table, by the names of Orbax without `params.`"""
    made = make_arrays(expand(family_of(Config(config)), Config(config), Layout(**layout)), {}, np.dtype("float32"))
    return {array.key.removeprefix("params."): array for array in made}


# --- spellings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scan", ["true", "false"])
def test_every_spelling_makes_the_same_arrays(generated: Path, tmp_path: Path, scan: str) -> None:
    """The hub's names, those that transformers saves, and its names in memory, whose experts are fused."""
    models = generated / "models"
    wanted = converted(models / "deepseek_v4", tmp_path / "hub", "--scan_layers", scan)
    for spelling, fused in {"saved": False, "state": True}.items():
        source = tmp_path / f"{spelling}-source"
        source.mkdir()
        tensors = read_file(models / f"deepseek_v4.{spelling}.safetensors")
        assert all(name.startswith(("model.", "head.", "lm_head.")) for name in tensors)
        assert any(name.endswith(".experts.gate_up_proj") for name in tensors) == fused
        save_file(tensors, source / "model.safetensors")
        (source / "config.json").write_text(json.dumps(read_config(models / "deepseek_v4")))
        assert_same_bits(converted(source, tmp_path / spelling, "--scan_layers", scan), wanted)


def test_names_that_transformers_keeps_in_memory_are_renamed_to_the_hubs(generated: Path) -> None:
    """Tensor by tensor, by their values: an alias that points elsewhere would go unseen where two arrays have one
    shape.
    """
    hub = read_tensors(generated / "models" / "deepseek_v4")
    aliases = family_of(Config(HUB.config)).aliases
    state = read_file(generated / "models" / "deepseek_v4.state.safetensors")
    assert len(state) > 50
    for name, values in state.items():
        if not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            assert np.array_equal(hub[rename(name, aliases)].astype(values.dtype), values), name


def test_an_export_has_the_dtypes_of_the_release(generated: Path, tmp_path: Path) -> None:
    """A hyper-connection's `pre_alpha_scale` lies beside `pre_alpha` as FP8 scales do beside their codes, and is none."""
    source = generated / "cases" / "deepseek4"
    convert(source, tmp_path / "ckpt", "--save_dtype", "float32")
    assert call("export", tmp_path / "ckpt", tmp_path / "back") == 0
    wanted, made = read_tensors(source), read_tensors(tmp_path / "back")
    assert {name: values.dtype for name, values in made.items()} == {name: wanted[name].dtype for name in made}


@pytest.mark.parametrize("scan", [True, False])
def test_only_the_mtp_layer_is_left_out(scan: bool) -> None:
    """Every other tensor of the hub's files is used."""
    config = Config(HUB.config)
    family, layout = (
        family_of(config),
        Layout(scan=scan, shapes={name: spec.shape for name, spec in HUB.tensors.items()}),
    )
    arrays = make_arrays(expand(family, config, layout), HUB.tensors, np.dtype("float32"))
    dropped, problems = audit(arrays, HUB.tensors, family.drops(config, layout), family.name)
    assert problems == []
    assert set(dropped) == {name for name in HUB.tensors if name.startswith("mtp.0.")}
    assert len(dropped) == 50
    assert set(dropped.values()) == {"multi-token prediction, which MaxText's DeepSeek V4 doesn't have"}


def test_mtp_is_refused(generated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """MaxText has no array for it."""
    assert call("plan", "--source", generated / "models" / "deepseek_v4", "--mtp", "true") == 2
    assert "MaxText's deepseek_v4 models have no multi-token-prediction layers" in capsys.readouterr().err


# --- variables that aren't parameters ---------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [72, 80, 60])
@pytest.mark.parametrize("scan", ["true", "false"])
def test_routing_tables_keep_their_integers(generated: Path, tmp_path: Path, scan: str, vocab: int) -> None:
    """As many rows as the embedding has; MaxText holds the table as float32, as which Orbax restores it when asked to."""
    source = generated / "models" / "deepseek_v4"
    step = convert(source, tmp_path / "out", "--scan_layers", scan, "--vocab_size", str(vocab))
    restored = ocp.PyTreeCheckpointer().restore(step / "items")
    asked = jax_tree_of(restored, ocp.RestoreArgs(restore_type=np.ndarray, dtype=np.float32))
    as_float = ocp.PyTreeCheckpointer().restore(step / "items", restore_args=asked)
    assert restored["params"]["params"]["token_embedder"]["embedding"].shape[0] == vocab
    hub = read_tensors(source)
    for layer in (0, 1):
        table, floats = (
            tree["params"]["Tid2EidVar"]["decoder"][f"layers_{layer}"]["mlp"]["MoeBlock_0"]["tid2eid"]
            for tree in (restored, as_float)
        )
        wanted = hub[f"layers.{layer}.ffn.gate.tid2eid"]
        assert wanted.max() == 4  # of five experts
        assert (table.dtype, floats.dtype, table.shape) == (np.int64, np.float32, (vocab, 2))
        assert np.array_equal(table[:72], wanted[:vocab])
        assert (table[72:] == 0).all()
        assert np.array_equal(floats, table)


def jax_tree_of(tree: Any, leaf: Any) -> Any:
    """The same tree with another leaf everywhere."""
    return {key: jax_tree_of(value, leaf) for key, value in tree.items()} if isinstance(tree, dict) else leaf


@pytest.mark.parametrize("axis", range(4))
def test_biases_are_stacked_on_their_first_axis(axis: int) -> None:
    """`param_scan_axis` is the axis of parameters; MaxText's scan stacks other variables on the first
    (layers/nnx_scan.py).
    """
    arrays = arrays_of(FLASH, scan_axis=axis)
    biases = {key: (array.shape, array.logical_axes) for key, array in arrays.items() if key.startswith("MoEBiasVar.")}
    assert biases == {
        f"MoEBiasVar.decoder.scanned_blocks.layers_{i}.mlp.MoeBlock_0.gate.bias": ((20, 256), ("scanned_blocks", None))
        for i in (0, 1)
    }
    assert arrays["params.decoder.scanned_blocks.layers_0.mlp.MoeBlock_0.wi_0"].shape[axis] == 20


def test_every_layer_has_a_table_or_a_bias() -> None:
    """At the size of DeepSeek-V4-Flash, unscanned: tables in the first three layers, biases in the others."""
    variables = {
        key: (array.shape, array.logical_axes)
        for key, array in arrays_of(FLASH, scan=False).items()
        if not key.startswith("params.")
    }
    tables = {f"Tid2EidVar.decoder.layers_{i}.mlp.MoeBlock_0.tid2eid": ((129280, 6), (None, None)) for i in range(3)}
    biases = {f"MoEBiasVar.decoder.layers_{i}.mlp.MoeBlock_0.gate.bias": ((256,), (None,)) for i in range(3, 43)}
    assert variables == tables | biases


def test_biases_of_the_scanned_layers_are_in_order(generated: Path, tmp_path: Path) -> None:
    """The first of each pair in one array, the second in the other."""
    source = generated / "models" / "deepseek_v4"
    made, hub = converted(source, tmp_path / "out", "--save_dtype", "float32"), read_tensors(source)
    for place in (0, 1):
        wanted = np.stack([hub[f"layers.{layer}.ffn.gate.bias"] for layer in (2 + place, 4 + place)])
        assert np.array_equal(
            made[f"MoEBiasVar.decoder.scanned_blocks.layers_{place}.mlp.MoeBlock_0.gate.bias"], wanted
        )


# --- values, by the layers that use them ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unscanned(generated: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """The arrays of the hub's spelling in float32, an entry for each layer."""
    return converted(
        generated / "models" / "deepseek_v4",
        tmp_path_factory.mktemp("v4"),
        "--scan_layers",
        "false",
        "--save_dtype",
        "float32",
    )


@pytest.fixture(scope="module")
def state(generated: Path) -> dict[str, torch.Tensor]:
    """The weights of transformers' model."""
    return {
        name: torch.from_numpy(values.astype(np.float32))
        for name, values in read_file(generated / "models" / "deepseek_v4.state.safetensors").items()
    }


def loaded(module: torch.nn.Module, state: dict[str, torch.Tensor], prefix: str) -> torch.nn.Module:
    """The module with the model's weights below `prefix`."""
    module.load_state_dict(
        {name.removeprefix(prefix): values for name, values in state.items() if name.startswith(prefix)}
    )
    return module.float()


def normalised(streams: np.ndarray) -> np.ndarray:
    """(batch, length, streams · embed), by the root of the mean square."""
    flat = streams.reshape(*streams.shape[:2], -1)
    return flat / np.sqrt(np.mean(flat**2, -1, keepdims=True) + 1e-6)


def streams_of(seed: int) -> np.ndarray:
    """(batch, length, stream, embed)"""
    return (
        np.random.default_rng(seed)
        .standard_normal((2, 5, HUB.config["hc_mult"], HUB.config["hidden_size"]))
        .astype(np.float32)
    )


@pytest.mark.parametrize("layer", [0, 5])
@pytest.mark.parametrize(("target", "source"), [("mhc_attention", "attn_hc"), ("mhc_mlp", "ffn_hc")])
def test_hyper_connections_mix_streams_as_the_model_does(
    unscanned: dict[str, np.ndarray], state: dict[str, torch.Tensor], target: str, source: str, layer: int
) -> None:
    """MaxText's formula (layers/mhc.py, e591f30) with our arrays, and transformers' module with its own weights: pre,
    post, residual.
    """
    streams = streams_of(layer)
    module = loaded(
        modeling_deepseek_v4.DeepseekV4HyperConnection(transformers.DeepseekV4Config(**HUB.config)),
        state,
        f"model.layers.{layer}.{source}.",
    )
    with torch.no_grad():
        post, mixed, collapsed = (values.numpy() for values in module(torch.from_numpy(streams)))
    w = {
        key: unscanned[f"decoder.layers_{layer}.{target}.{key}"]
        for part in ("pre", "post", "res")
        for key in (f"{part}_alpha", f"{part}_beta", f"{part}_alpha_scale")
    }
    x = normalised(streams) * unscanned[f"decoder.layers_{layer}.{target}.mhc_norm.scale"]
    made_pre = sigmoid(w["pre_alpha_scale"] * (x @ w["pre_alpha"]) + w["pre_beta"]) + 1e-6
    np.testing.assert_allclose(np.einsum("bsk,bskd->bsd", made_pre, streams), collapsed, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        2 * sigmoid(w["post_alpha_scale"] * (x @ w["post_alpha"]) + w["post_beta"]), post, rtol=1e-4, atol=1e-5
    )
    logits = w["res_alpha_scale"] * (x @ w["res_alpha"]).reshape(mixed.shape) + w["res_beta"]
    made = np.exp(logits - logits.max(-1, keepdims=True))
    made = made / made.sum(-1, keepdims=True) + 1e-6
    made = made / (made.sum(-2, keepdims=True) + 1e-6)
    for _ in range(HUB.config["hc_sinkhorn_iters"] - 1):
        made = made / (made.sum(-1, keepdims=True) + 1e-6)
        made = made / (made.sum(-2, keepdims=True) + 1e-6)
    np.testing.assert_allclose(made, mixed, rtol=1e-4, atol=1e-5)


def test_hyper_head_collapses_streams_as_the_model_does(
    unscanned: dict[str, np.ndarray], state: dict[str, torch.Tensor]
) -> None:
    """The last of them, in front of the final norm."""
    streams = streams_of(9)
    module = loaded(
        modeling_deepseek_v4.DeepseekV4HyperHead(transformers.DeepseekV4Config(**HUB.config)), state, "model.hc_head."
    )
    with torch.no_grad():
        wanted = module(torch.from_numpy(streams)).numpy()
    fn, base, scale = (unscanned[f"decoder.hc_head.hc_{leaf}"] for leaf in ("fn", "base", "scale"))
    made = sigmoid(scale * (normalised(streams) @ fn) + base) + 1e-6
    np.testing.assert_allclose(np.einsum("bsk,bskd->bsd", made, streams), wanted, rtol=1e-4, atol=1e-5)


def test_output_projection_keeps_its_groups_apart(
    unscanned: dict[str, np.ndarray], state: dict[str, torch.Tensor]
) -> None:
    """Each group of heads has a kernel of its own, (group, in, out)."""
    groups, rank = HUB.config["o_groups"], HUB.config["o_lora_rank"]
    kernel = unscanned["decoder.layers_3.self_attention.o_a_proj.kernel"]
    module = loaded(
        modeling_deepseek_v4.DeepseekV4GroupedLinear(kernel.shape[1], groups * rank, groups),
        state,
        "model.layers.3.self_attn.o_a_proj.",
    )
    heads = np.random.default_rng(3).standard_normal((2, 5, groups, kernel.shape[1])).astype(np.float32)
    with torch.no_grad():
        wanted = module(torch.from_numpy(heads)).numpy()
    np.testing.assert_allclose(np.einsum("bsgi,gio->bsgo", heads, kernel), wanted, rtol=1e-4, atol=1e-4)


# --- which layers there are -------------------------------------------------------------------------------------------


def kinds_of(config: dict[str, Any], **layout: Any) -> dict[str, str]:
    """What compresses each layer of the plan: `csa`, `hca` or nothing."""
    found = {}
    for key in arrays_of(config, **layout):
        layer, attention, rest = key.removeprefix("params.decoder.").partition(".self_attention.")
        if attention:
            found[layer] = rest[:3] if "_compressor" in rest else found.get(layer, "")
    return found


def test_flash_and_pro_are_scanned() -> None:
    """V4-Flash begins with two layers that compress nothing, V4-Pro with two HCA layers; the ratio of the MTP layer
    counts for nothing.
    """
    pro = FLASH | {"num_hidden_layers": 61, "compress_ratios": [128, *[128, 4] * 30, 0]}
    assert kinds_of(FLASH) == {
        "layers_0": "",
        "layers_1": "",
        "layers_2": "csa",
        "scanned_blocks.layers_0": "hca",
        "scanned_blocks.layers_1": "csa",
    }
    assert kinds_of(pro) == {
        "layers_0": "hca",
        "layers_1": "hca",
        "layers_2": "csa",
        "scanned_blocks.layers_0": "hca",
        "scanned_blocks.layers_1": "csa",
    }
    assert arrays_of(pro)["params.decoder.scanned_blocks.layers_1.self_attention.sinks"].shape == (64, 29)


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 42},
        {"num_hash_layers": 2},
        {"num_hash_layers": 0},
        {"compress_ratios": [0, 0, 4, *[4, 128] * 20]},
        {"compress_ratios": [0, 0, 4, *[64, 4] * 20]},
        {"compress_ratios": [0] * 43},
    ],
)
def test_layers_that_maxtext_cannot_scan(change: dict[str, Any]) -> None:
    """An odd layer, which MaxText would leave out without a word, and other pairs than 128 and 4: refused, but for an
    unscanned conversion.
    """
    config = FLASH | change
    with pytest.raises(ConfigError, match=r"MaxText scans pairs with the compress ratios .* --scan_layers false"):
        arrays_of(config)
    kinds = kinds_of(config, scan=False)
    assert list(kinds.values()) == [
        {0: "", 4: "csa"}.get(ratio, "hca") for ratio in config["compress_ratios"][: config["num_hidden_layers"]]
    ]


def test_other_rates_of_hca() -> None:
    """A position bias has a row for each token of a window."""
    arrays = arrays_of(FLASH | {"compress_ratios": [0, 8, 64, *[128, 4] * 20]}, scan=False)
    shapes = [
        arrays[f"params.decoder.layers_{i}.self_attention.{kind}_compressor.position_bias"].shape
        for i, kind in enumerate(("hca", "hca", "hca", "csa"), 1)
    ]
    assert shapes == [(8, 512), (64, 512), (128, 512), (4, 1024)]


def test_transformers_config_says_the_same() -> None:
    """`layer_types`, `compress_rates` and `mlp_layer_types` where the hub has `compress_ratios` and `num_hash_layers`;
    without any of them, three.
    """
    written = transformers.DeepseekV4Config(
        **{key: value for key, value in FLASH.items() if key not in ("quantization_config", "expert_dtype")}
    ).to_dict()
    assert "compress_ratios" not in written
    assert written["layer_types"][:5] == [SLIDING, SLIDING, CSA, HCA, CSA]
    config = {key: value for key, value in FLASH.items() if key != "num_hash_layers"}
    wanted = {key: (array.shape, array.logical_axes) for key, array in arrays_of(FLASH).items()}
    for same in (written, written | {"compress_rates": None}, config):
        assert {key: (array.shape, array.logical_axes) for key, array in arrays_of(same).items()} == wanted


@pytest.mark.parametrize("layers", [1, 2, 3, 8])
def test_layers_that_nobody_says(layers: int) -> None:
    """Two without an indexer, then both kinds in turn, as transformers' class has them."""
    written = transformers.DeepseekV4Config(num_hidden_layers=layers).to_dict()
    unsaid = {key: value for key, value in written.items() if key not in ("layer_types", "compress_rates")}
    made, wanted = (
        {key: array.shape for key, array in arrays_of(config, scan=False).items()} for config in (unsaid, written)
    )
    assert made == wanted


@pytest.mark.parametrize(
    "said",
    [
        {"compress_rate_csa": 4, "compress_rate_hca": 64},
        {"compress_rates": {CSA: 4, HCA: 128}, "compress_rate_hca": 64},
        {"layer_types": [HCA, CSA, SLIDING], "compress_rate_csa": None, "compress_rate_hca": 256},
    ],
)
def test_a_rate_by_itself_counts_before_the_others(said: dict[str, Any]) -> None:
    """As transformers' class folds it into `compress_rates`."""
    theirs = transformers.DeepseekV4Config(num_hidden_layers=3, **copy.deepcopy(said))
    rates = [{SLIDING: 0, **theirs.compress_rates}[kind] for kind in theirs.layer_types]
    assert compress_ratios(Config(num_hidden_layers=3, **said)) == rates


@pytest.mark.parametrize("said", [{"compress_rate_csa": 8}, {"compress_rate_hca": 4}, {"compress_rates": {CSA: 8}}])
def test_maxtext_knows_a_kind_by_its_rate(said: dict[str, Any]) -> None:
    """A layer with an indexer has the rate 4, and none else."""
    with pytest.raises(ConfigError, match=f"'compress_rates' .* should be 4 for {CSA} and no others"):
        compress_ratios(Config(num_hidden_layers=4, **said))


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        {"compress_ratios": "0, 0, 4"},
        {"compress_ratios": [0, 0, 4, *[128, 4] * 19]},
        {"compress_ratios": [1, 0, 4, *[128, 4] * 20]},
        {"compress_ratios": [0, -4, 4, *[128, 4] * 20]},
        {"compress_ratios": [False, 0, 4, *[128, 4] * 20]},
        {"layer_types": SLIDING},
        {"layer_types": [SLIDING] * 42},
        {"layer_types": [SLIDING, "full_attention", CSA, *[HCA, CSA] * 20]},
        {"layer_types": [SLIDING, ["full_attention"], CSA, *[HCA, CSA] * 20]},
        {"layer_types": [SLIDING, SLIDING, CSA, *[HCA, CSA] * 20], "compress_rates": {CSA: 2}},
        {"layer_types": [SLIDING, SLIDING, CSA, *[HCA, CSA] * 20], "compress_rates": [4, 128]},
        {"mlp_layer_types": ["moe"] * 3 + ["hash_moe"] * 40},
        {"mlp_layer_types": ["hash_moe"] * 3},
        {"mlp_layer_types": "hash_moe"},
        {"mlp_layer_types": ["hash_moe"] * 3 + ["dense"] * 40},
        {"num_hash_layers": "3"},
        {"hc_mult": 0},
        {"o_groups": None},
    ],
)
def test_a_wrong_config_names_its_field(change: dict[str, Any], scan: bool) -> None:
    """No pattern is guessed."""
    with pytest.raises(ConfigError) as error:
        arrays_of(FLASH | change, scan=scan)
    assert any(repr(field) in str(error.value) for field in change)
