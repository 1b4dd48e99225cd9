"""Gemma 4 12B, 26B and 31B: what the layers compute, text and vision; the spellings of releases and of `config.json`; and
what is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from facts import load_headers, load_trees
from families.gemma4_reference import EMBEDDER, TOWER, assert_close, assert_text_logits, embedded_squares, image_tokens
from support import assert_same_bits, converted, read_config, read_model, read_tensors, save

from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.plan import Array, expand, make_arrays
from weightbeam.model_mappings.registry import UnknownFamilyError, family_of
from weightbeam.model_mappings.versions import UNSAID

HF = "model.language_model."


@pytest.mark.parametrize("scan", ["true", "false"], ids=["scanned", "unscanned"])
@pytest.mark.parametrize(
    "name",
    [
        *("cases/gemma4-moe", "cases/gemma4-dense"),
        *(f"models/gemma4-{name}" for name in ("vision", "text", "12b", "12b-text")),
    ],
)
def test_text_model_computes_what_transformers_computes(generated: Path, tmp_path: Path, name: str, scan: str) -> None:
    """Logits of 30 tokens, by transformers and by MaxText's formulas on our arrays: keys as values, experts beside the
    dense MLP, both RoPEs.
    """
    arrays = converted(generated / name, tmp_path / "out", "--scan_layers", scan, "--save_dtype", "float32")
    assert_text_logits(arrays, generated / name, vocab=200)


@pytest.mark.parametrize("scan", ["true", "false"], ids=["scanned", "unscanned"])
@pytest.mark.parametrize(
    "name", ["models/gemma4-vision", "cases/gemma4-dense"], ids=["standardized", "not standardized"]
)
def test_vision_tower_computes_what_transformers_computes(
    generated: Path, tmp_path: Path, name: str, scan: str
) -> None:
    """An image that isn't square, patch embedding to projector: after each layer, and the text model's inputs."""
    import torch
    from transformers import AutoModelForImageTextToText

    folder = generated / name
    config = read_config(folder)["vision_config"]
    patch, rows, columns = config["patch_size"], 6, 12
    image = np.random.default_rng(1).random((rows * patch, columns * patch, 3))
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).model
    pixels = (
        torch.tensor(image, dtype=torch.float32)
        .permute(2, 0, 1)
        .reshape(3, rows, patch, columns, patch)
        .permute(1, 3, 2, 4, 0)
    )
    xy = torch.stack(torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy"), -1).reshape(1, -1, 2)
    wanted: list[np.ndarray] = []
    for module in (model.vision_tower.patch_embedder, *model.vision_tower.encoder.layers):
        module.register_forward_hook(lambda module, inputs, output: wanted.append(output[0].numpy()))
    with torch.no_grad():
        wanted.append(model.get_image_features(pixels.reshape(1, rows * columns, -1), xy).pooler_output[0].numpy())
    arrays = converted(
        folder, tmp_path / "out", "--scan_layers", scan, "--save_dtype", "float32", "--multimodal", "true"
    )
    made = image_tokens(arrays, config, image)
    assert len(made) == len(wanted) == config["num_hidden_layers"] + 2
    for ours, theirs in zip(made, wanted, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("scan", ["true", "false"], ids=["scanned", "unscanned"])
def test_the_embedder_computes_what_transformers_computes(generated: Path, tmp_path: Path, scan: str) -> None:
    """12B: transformers cuts an image into patches and merges squares of them (`patches_merge` of
    models/gemma4_unified/image_processing_gemma4_unified.py); MaxText cuts the squares.
    """
    import torch
    from transformers import AutoModelForImageTextToText

    folder = generated / "models" / "gemma4-12b"
    config = read_config(folder)["vision_config"]
    patch, pool, (rows, columns) = config["patch_size"], config["pooling_kernel_size"], (2, 4)
    image = np.random.default_rng(1).random((rows * pool * patch, columns * pool * patch, 3))
    patches = image.reshape(rows, pool, patch, columns, pool, patch, 3).transpose(0, 3, 1, 4, 2, 5, 6)
    merged = patches.swapaxes(3, 4).reshape(1, rows * columns, -1)
    squares = torch.tensor(merged, dtype=torch.float32)
    places = torch.stack(torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy"), -1).reshape(1, -1, 2)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).model
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-6  # as MaxText has it; transformers adds 1e-5, which small weights feel
    with torch.no_grad():
        out = model.get_image_features(squares, places)
    arrays = converted(folder, tmp_path, "--scan_layers", scan, "--save_dtype", "float32", "--multimodal", "true")
    made = embedded_squares(arrays, config, image)
    for ours, theirs in zip(made, (out.last_hidden_state[0], out.pooler_output[0]), strict=True):
        assert_close(ours, theirs.numpy())


def test_the_embedder_in_memory(generated: Path, tmp_path: Path) -> None:
    """transformers has other names for it in memory than in the files that it writes."""
    config, tensors, state = read_model(generated, "gemma4-12b")
    respelled = {name.replace("vision_embedder", "embed_vision") for name in tensors if "vision_embedder" in name}
    assert len(respelled) == 9
    assert respelled < state.keys()
    del state["lm_head.weight"]
    folder = save(tmp_path / "source", config, state)
    wanted = converted(generated / "models" / "gemma4-12b", tmp_path / "wanted", "--multimodal", "true")
    assert sum(key.startswith(EMBEDDER) for key in wanted) == 9
    assert_same_bits(converted(folder, tmp_path / "out", "--multimodal", "true"), wanted)


def test_towers_arrays_come_on_top(generated: Path, tmp_path: Path) -> None:
    """The text model is the same with and without the tower; a tower that doesn't standardize has a scale of ones and a
    bias of zeros.
    """
    text = converted(generated / "cases" / "gemma4-dense", tmp_path / "text")
    both = converted(generated / "cases" / "gemma4-dense", tmp_path / "both", "--multimodal", "true")
    assert_same_bits({key: values for key, values in both.items() if not key.startswith("vision_encoder.")}, text)
    assert (both[f"{TOWER}.std_scale"] == 1).all()
    assert (both[f"{TOWER}.std_bias"] == 0).all()


def one_tensor_each(tensors: dict[str, np.ndarray], parent: str) -> dict[str, np.ndarray]:
    """The experts as quantised releases have them: three tensors each, below `parent`."""
    made = {}
    for name, values in tensors.items():
        prefix, _, last = name.rpartition(".experts.")
        if last == "gate_up_proj":
            halves = dict(zip(("gate_proj", "up_proj"), np.split(values, 2, axis=1), strict=True))
        else:
            halves = {"down_proj": values} if last == "down_proj" else {}
        made |= {
            f"{prefix}.{parent}.{i}.{part}.weight": one
            for part, stacked in halves.items()
            for i, one in enumerate(stacked)
        } or {name: values}
    return made


@pytest.mark.parametrize("parent", ["experts", "moe.experts"])
def test_experts_in_one_tensor_each(generated: Path, tmp_path: Path, parent: str) -> None:
    source = generated / "cases" / "gemma4-moe"
    tensors = one_tensor_each(read_tensors(source), parent)
    assert f"{HF}layers.11.{parent}.3.down_proj.weight" in tensors
    assert not any(name.endswith("gate_up_proj") for name in tensors)
    folder = save(tmp_path / "source", read_config(source), tensors)
    assert_same_bits(converted(folder, tmp_path / "out"), converted(source, tmp_path / "fused"))


@pytest.mark.parametrize("case", ["gemma4-dense", "gemma4-moe"])
def test_text_only_release(generated: Path, tmp_path: Path, case: str) -> None:
    """`gemma4_text`: names and `config.json` without the outer level, as `Gemma4ForCausalLM` saves them; and experts
    below `moe.` there.
    """
    source = generated / "cases" / case
    tensors = one_tensor_each(read_tensors(source), "moe.experts")
    renamed = {name.replace(HF, "model."): values for name, values in tensors.items() if name.startswith(HF)}
    folder = save(tmp_path / "source", read_config(source)["text_config"], renamed)
    assert_same_bits(converted(folder, tmp_path / "out"), converted(source, tmp_path / "both"))


@pytest.mark.parametrize("rows", [200, 300])
def test_another_vocabulary(generated: Path, tmp_path: Path, rows: int) -> None:
    source = generated / "cases" / "gemma4-dense"
    whole = converted(source, tmp_path / "whole")["token_embedder.embedding"]
    made = converted(source, tmp_path / "out", "--vocab_size", str(rows))["token_embedder.embedding"]
    assert made.shape == (rows, 64)
    assert (made[:256] == whole[:rows]).all()
    assert (made[256:] == 0).all()


def arrays_of(config: dict[str, Any], layout: Layout = Layout()) -> tuple[Array, ...]:  # noqa: B008, it is frozen
    found = Config(config)
    return make_arrays(expand(family_of(found, layout.model), found, layout), {}, np.dtype("float32"))


def facts(arrays: tuple[Array, ...]) -> dict[str, tuple]:
    return {array.key: (array.shape, array.logical_axes) for array in arrays}


# the hub's config.json, as src/maxtext/checkpoint_conversion/utils/hf_model_configs.py of MaxText e591f30 has it
HUB = {
    "gemma4-26b": dict(global_head_dim=512, num_global_key_value_heads=2),
    "gemma4-31b": dict(global_head_dim=512, num_global_key_value_heads=4),
    "gemma4-12b": dict(global_head_dim=512, num_global_key_value_heads=1),
}


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unscanned"])
@pytest.mark.parametrize("model", HUB)
def test_the_hubs_config(model: str, scan: bool) -> None:
    """`global_head_dim` says what transformers 5 saves as `per_layer_config`; what is transformers' default may be left
    out.
    """
    tree = load_trees()[f"{model}--{'scan' if scan else 'unscan'}"]
    left_out = ("per_layer_config", "layer_types", "head_dim", "tie_word_embeddings")
    text = {key: value for key, value in tree.config["text_config"].items() if key not in left_out}
    kind = tree.config["model_type"]
    hub = {"model_type": kind, "text_config": text | HUB[model]}
    made = facts(arrays_of(hub, Layout(scan=scan, maxtext=UNSAID)))
    assert made == {key.replace("/", "."): fact for key, fact in tree.arrays.items()}
    if not scan:
        del text["num_key_value_heads"]
        assert made != facts(
            arrays_of({"model_type": kind, "text_config": text | HUB[model]}, Layout(scan=scan, maxtext=UNSAID))
        )


def test_global_layers_may_have_values() -> None:
    """Without `attention_k_eq_v` they have a value projection and as many key heads as the local ones, whatever the
    field says.
    """
    config = load_headers()["gemma4-dense"].config
    text = {key: value for key, value in config["text_config"].items() if key != "per_layer_config"}
    text |= dict(attention_k_eq_v=False, global_head_dim=48, num_global_key_value_heads=1)
    made = facts(arrays_of(config | {"text_config": text}))
    prefix = "params.params.decoder.scanned_blocks.global_layer.self_attention"
    assert (
        made[f"{prefix}.value.kernel"]
        == made[f"{prefix}.key.kernel"]
        == ((64, 2, 2, 48), ("embed_attn", "layers", "kv_heads", "kv_head_dim"))
    )


def test_which_family() -> None:
    headers = load_headers()
    for name, family, model, other in [
        ("gemma4-dense", "gemma4", "gemma4-31b", "gemma4-e4b"),
        ("gemma4-e4b", "gemma4_small", "gemma4-e4b", "gemma4-31b"),
        ("gemma4-12b", "gemma4", "gemma4-12b", "gemma4-31b"),
        ("gemma4-12b-text", "gemma4", "gemma4-12b", "gemma4-e4b"),
    ]:
        config = Config(headers[name].config)
        assert family_of(config).name == family_of(config, model).name == family
        with pytest.raises(UnknownFamilyError, match=f"--maxtext_model={other} is not"):
            family_of(config, other)


def changing(part: str, **fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda config: config | {part: config[part] | fields}


WRONG = {
    "another cycle": (
        changing(
            "text_config", layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 2 + ["sliding_attention"] * 2
        ),
        "layer_types",
    ),
    "no whole cycles": (changing("text_config", num_hidden_layers=14, layer_types=None), "num_hidden_layers' is 14"),
    "shared keys": (changing("text_config", num_kv_shared_layers=6), "num_kv_shared_layers"),
    "uneven layers": (
        changing("text_config", per_layer_config={"05": {"head_dim": 32}, "11": {"head_dim": 64}}),
        "per_layer_config",
    ),
    "other layers": (
        changing("text_config", per_layer_config={"04": {"head_dim": 32}, "11": {"head_dim": 32}}),
        "per_layer_config",
    ),
    "other fields": (
        changing("text_config", per_layer_config={"05": {"intermediate_size": 32}, "11": {"intermediate_size": 32}}),
        "per_layer_config",
    ),
    "no layer": (changing("text_config", per_layer_config={"all": {"head_dim": 32}}), "per_layer_config"),
    "not an object": (changing("text_config", per_layer_config={"05": 32, "11": 32}), "'05' should be an object"),
    "experts without a number": (changing("text_config", enable_moe_block=True), "num_experts"),
    "clipped linears": (changing("vision_config", use_clipped_linears=True), "clipped"),
    "grouped tower": (changing("vision_config", num_key_value_heads=1), "as many for keys"),
    "narrow tower": (changing("vision_config", head_dim=12), "fill hidden_size"),
    "no tower": (lambda config: config | {"vision_config": None}, "'vision_config' should be an object"),
    "no text": (lambda config: config | {"text_config": 1}, "'text_config' should be an object"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_maxtext_does_not_have_is_refused(name: str) -> None:
    wrong, message = WRONG[name]
    config = load_headers()["gemma4-dense"].config
    arrays_of(config, Layout(multimodal=True))
    with pytest.raises(ConfigError, match=message):
        arrays_of(wrong(config), Layout(multimodal=True))


@pytest.mark.parametrize("fields", [dict(output_proj_dims=40), dict(model_patch_size=8)], ids=str)
def test_an_embedder_that_contradicts_itself_is_refused(fields: dict[str, int]) -> None:
    config = load_headers()["gemma4-12b"].config
    arrays_of(config | {"vision_config": config["vision_config"] | dict(model_patch_size=6)}, Layout(multimodal=True))
    with pytest.raises(ConfigError, match="contradicts itself"):
        arrays_of(config | {"vision_config": config["vision_config"] | fields}, Layout(multimodal=True))


def test_a_tower_that_is_left_out_may_be_any() -> None:
    config = load_headers()["gemma4-dense"].config
    assert facts(arrays_of(changing("vision_config", use_clipped_linears=True)(config))) == facts(arrays_of(config))
