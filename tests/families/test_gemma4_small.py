"""Gemma 4 E2B and E4B: what the layers compute, what the hub's files hold besides, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from facts import load_headers, load_trees
from families.gemma4_reference import assert_text_logits
from support import BF16, assert_same_bits, call, converted, read_config, read_tensors, save

from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.plan import Array, expand, make_arrays
from weightbeam.model_mappings.registry import family_of

HF = "model.language_model."


@pytest.mark.parametrize("name", ["cases/gemma4-small", "models/gemma4-e4b"])
def test_text_model_computes_what_transformers_computes(generated: Path, tmp_path: Path, name: str) -> None:
    """Logits of 30 tokens, by transformers and by MaxText's formulas on our arrays: inputs of each layer, shared keys
    and values.
    """
    arrays = converted(generated / name, tmp_path / "out", "--scan_layers", "false", "--save_dtype", "float32")
    assert_text_logits(arrays, generated / name, vocab=180)


def unused_by_transformers(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the hub's E4B holds and transformers doesn't write: keys and values of the sharing layers, and the limits of
    clipped layers.
    """
    found = {}
    for layer in range(6, 12):
        for name in ("k_proj", "k_norm", "v_proj"):
            found[f"{HF}layers.{layer}.self_attn.{name}.weight"] = tensors[
                f"{HF}layers.{layer - 6}.self_attn.{name}.weight"
            ]
    for name in tensors:
        if name.endswith(".linear.weight"):
            found |= {
                name.replace("linear.weight", limit): np.array(1, BF16)
                for limit in ("input_min", "input_max", "output_min", "output_max")
            }
    return found


def test_what_the_hubs_files_hold_besides(generated: Path, tmp_path: Path) -> None:
    """It is listed with its reason, tensor by tensor, and changes nothing."""
    source = generated / "models" / "gemma4-e4b"
    tensors = read_tensors(source)
    more = unused_by_transformers(tensors)
    folder = save(tmp_path / "source", read_config(source), tensors, more)
    options = ("--maxtext_model", "gemma4-e4b", "--scan_layers", "false")
    assert_same_bits(converted(folder, tmp_path / "out", *options), converted(source, tmp_path / "without", *options))
    assert call("plan", "--source", folder, *options, "--json", tmp_path / "plan.json") == 0
    dropped = json.loads((tmp_path / "plan.json").read_text())["dropped"]
    towers = {name for name in tensors | more if not name.startswith(HF)}
    assert {name for name, reason in dropped.items() if reason.endswith("are text only")} == towers
    assert {name for name, reason in dropped.items() if "shares the keys and values" in reason} == set(more) - towers
    assert set(dropped) == set(more) | towers
    assert len(set(more) - towers) == 18
    assert "model.audio_tower.layers.0.self_attn.q_proj.input_max" in towers


def test_a_layer_that_does_not_share_needs_its_keys(
    generated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = generated / "models" / "gemma4-e4b"
    tensors = read_tensors(source)
    del tensors[f"{HF}layers.5.self_attn.k_proj.weight"]
    tensors[f"{HF}layers.5.self_attn.v_norm.weight"] = np.ones(24, BF16)
    folder = save(tmp_path / "source", read_config(source), tensors)
    assert call("convert", "--source", folder, "--output", tmp_path / "out", "--scan_layers", "false") != 0
    shown = " ".join(capsys.readouterr().err.split())
    assert f"missing: {HF}layers.5.self_attn.k_proj.weight" in shown
    assert f"unused: {HF}layers.5.self_attn.v_norm.weight" in shown
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "MaxText has gemma4_small models unscanned only; convert with --scan_layers false"),
        (
            ("--scan_layers", "false", "--multimodal", "true"),
            "MaxText's gemma4_small models have no vision or audio towers",
        ),
        (
            ("--scan_layers", "false", "--maxtext_model", "gemma4-e4b"),
            "'layer_types' isn't the pattern that MaxText repeats",
        ),
        (
            ("--scan_layers", "false", "--maxtext_model", "gemma4-31b"),
            "--maxtext_model=gemma4-31b is not a MaxText model",
        ),
    ],
    ids=["scanned", "with towers", "another cycle", "a larger model"],
)
def test_refusals(
    generated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    """Before anything is written."""
    assert (
        call("convert", "--source", generated / "cases" / "gemma4-small", "--output", tmp_path / "out", *options) != 0
    )
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def arrays_of(config: dict[str, Any], **layout: Any) -> dict[str, Array]:
    found = Config(config)
    arrays = make_arrays(expand(family_of(found), found, Layout(scan=False, **layout)), {}, np.dtype("float32"))
    return {array.key.removeprefix("params.params.decoder."): array for array in arrays}


def test_e4b_at_full_size() -> None:
    """The other model that MaxText has, of which there is no tree: 24 layers with keys and values, 18 that share, alike
    otherwise, one width.
    """
    tree = load_trees("0.2.5")["gemma4-e2b--unscan"]
    text = {
        key: value
        for key, value in load_trees("e591f30")["gemma4-e2b--unscan"].config["text_config"].items()
        if key not in ("layer_types", "per_layer_config")
    }
    # src/maxtext/checkpoint_conversion/utils/hf_model_configs.py of MaxText e591f30
    text |= dict(
        hidden_size=2560,
        intermediate_size=10240,
        num_hidden_layers=42,
        num_key_value_heads=2,
        num_kv_shared_layers=18,
        use_double_wide_mlp=False,
    )
    made = arrays_of({"model_type": "gemma4", "text_config": text | dict(global_head_dim=512)}, model="gemma4-e4b")
    e2b = {
        path.replace("/", ".").removeprefix("params.params.decoder."): names for path, (_, names) in tree.arrays.items()
    }
    own = {key.removeprefix("layers_0."): names for key, names in e2b.items() if key.startswith("layers_0.")}
    shared = {key.removeprefix("layers_34."): names for key, names in e2b.items() if key.startswith("layers_34.")}
    assert set(own) - set(shared) == {
        f"self_attention.{name}" for name in ("key.kernel", "key_norm.scale", "value.kernel")
    }
    wanted = {key: names for key, names in e2b.items() if not key.startswith("layers_")}
    wanted |= {
        f"layers_{layer}.{key}": names for layer in range(42) for key, names in (own if layer < 24 else shared).items()
    }
    assert {key: array.logical_axes for key, array in made.items()} == wanted
    assert made["layers_4.self_attention.key.kernel"].shape == (2560, 2, 256)
    assert made["layers_5.self_attention.key.kernel"].shape == (2560, 2, 512)
    assert made["layers_41.self_attention.query.kernel"].shape == (2560, 8, 512)
    assert {made[f"layers_{layer}.mlp.wi_0.kernel"].shape for layer in range(42)} == {(2560, 10240)}
    assert made["per_layer_embedder.embed_tokens_per_layer"].shape == (262144, 42 * 256)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(enable_moe_block=True), "enable_moe_block"),
        (dict(attention_k_eq_v=True), "attention_k_eq_v"),
        (dict(num_kv_shared_layers=6), "a whole cycle of layers before"),
        (dict(num_kv_shared_layers=11), "a whole cycle of layers before"),
        (dict(layer_types=["sliding_attention"] * 3 + ["full_attention"] * 7), "layer_types"),
        (dict(layer_types=None), "'num_hidden_layers' is 10; MaxText has a global layer every 6"),
        (dict(layer_types=5), "layer_types"),
        (dict(vocab_size_per_layer_input=0), "vocab_size_per_layer_input"),
    ],
    ids=str,
)
def test_what_maxtext_does_not_have_is_refused(fields: dict[str, Any], message: str) -> None:
    config = load_headers()["gemma4-small"].config
    arrays_of(config)
    with pytest.raises(ConfigError, match=message):
        arrays_of(config | {"text_config": config["text_config"] | fields})
