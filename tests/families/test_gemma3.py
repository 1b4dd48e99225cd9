"""Gemma 3: what MaxText computes with the converted arrays is what transformers computes with the checkpoint, the
vision tower's too.
"""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from facts import load_trees
from families.numpy_decoder import attend, below, both, gated, gelu, in_order, numbered, rms_norm, softmax
from lazily import lazily
from safetensors.numpy import save_file
from support import assert_same_bits, call, converted, read_config, read_tensors

from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.families import gemma3
from weightbeam.model_mappings.plan import expand
from weightbeam.model_mappings.versions import UNSAID

torch = lazily("torch")
transformers = lazily("transformers")

IDS = np.random.default_rng(3).integers(0, 240, 16)
MODEL_27B = ("--maxtext_model", "gemma3-27b")


def forward(arrays: dict, is_scanned: bool, c: transformers.Gemma3TextConfig) -> np.ndarray:
    """`Gemma3DecoderLayer` of gemma3-27b: every sixth layer sees everything and turns more slowly; the head is the
    embedding.
    """
    embedding = arrays["token_embedder.embedding"]
    x = embedding[IDS]
    for i, layer in enumerate(in_order(arrays, is_scanned)):

        def norm(x: np.ndarray, name: str) -> np.ndarray:
            return rms_norm(x, layer[f"{name}.scale"], c.rms_norm_eps)  # noqa: B023, called here

        window, theta = (None, 1_000_000.0) if i % 6 == 5 else (c.sliding_window, 10_000.0)
        scale = (c.hidden_size // c.num_attention_heads) ** -0.5
        attention = below(layer, "self_attention.")
        attended = attend(
            norm(x, "pre_self_attention_norm"),
            attention,
            theta=theta,
            window=window,
            epsilon=c.rms_norm_eps,
            scale=scale,
        )
        x = x + norm(attended, "post_self_attention_norm")
        x = x + norm(gated(norm(x, "pre_ffw_norm"), below(layer, "mlp."), gelu), "post_ffw_norm")
    # normalize_embedding_logits
    return rms_norm(x, arrays["decoder.decoder_norm.scale"], c.rms_norm_eps) @ embedding.T / np.sqrt(x.shape[-1])


@pytest.mark.parametrize("layout", ["scanned", "unscanned"])
def test_logits_are_those_of_transformers(generated: Path, tmp_path: Path, layout: str) -> None:
    """Two cycles and one layer more. Input and head share the embedding, which is scaled by √80 rounded to bfloat16, as
    the released models scale their input; MaxText divides the logits by √80 itself, so that all of them are off by that
    rounding.
    """
    scan, source = layout == "scanned", generated / "models" / "gemma3-text"
    arrays, hf = both(source, tmp_path / "out", "Gemma3ForCausalLM", scan, *MODEL_27B)
    rounded = float(ml_dtypes.bfloat16(80**0.5))
    hf.model.embed_tokens.embed_scale.fill_(rounded)
    wanted = hf(torch.tensor(IDS)[None]).logits[0].detach().numpy() * rounded / np.sqrt(80)
    np.testing.assert_allclose(forward(arrays, scan, hf.config), wanted, atol=1e-5 * np.abs(wanted).max())


# --- the vision tower -------------------------------------------------------------------------------------------------


def layer_norm(x: np.ndarray, layer: dict) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * layer["scale"] + layer["bias"]


def patches(images: np.ndarray, size: int) -> np.ndarray:
    """(batch, height, width, rgb) -> (batch, patches, size, size, rgb), row by row."""
    n, height, width, rgb = images.shape
    cut = images.reshape(n, height // size, size, width // size, size, rgb).transpose(0, 1, 3, 2, 4, 5)
    return cut.reshape(n, -1, size, size, rgb)


def see(arrays: dict, images: np.ndarray, tokens: int) -> np.ndarray:
    """`Gemma3VisionEncoderLayer` and `VisionEmbedder`: a patch embedding, encoder blocks, a pooling to `tokens`, and
    the projector.
    """
    tower = below(arrays, "vision_encoder.Gemma3VisionEncoderLayer_0.")
    kernel = tower["embedding.kernel"]
    x = (
        np.einsum("npijc,ijce->npe", patches(images, len(kernel)), kernel)
        + tower["embedding.bias"]
        + tower["pos_embedding"]
    )
    for block in numbered(tower, "Transformer.encoderblock_"):
        attention, y = below(block, "MultiHeadDotProductAttention_0."), layer_norm(x, below(block, "LayerNorm_0."))
        query, key, value = (
            np.einsum("npe,ehd->nphd", y, attention[f"{k}.kernel"]) + attention[f"{k}.bias"]
            for k in ("query", "key", "value")
        )
        weights = softmax(np.einsum("nphd,nqhd->nhpq", query, key) * query.shape[-1] ** -0.5)
        x = x + np.einsum("nhpq,nqhd,hde->npe", weights, value, attention["out.kernel"]) + attention["out.bias"]
        mlp, y = below(block, "MlpBlockViT_0."), layer_norm(x, below(block, "LayerNorm_1."))
        x = x + gelu(y @ mlp["Dense_0.kernel"] + mlp["Dense_0.bias"]) @ mlp["Dense_1.kernel"] + mlp["Dense_1.bias"]
    x = layer_norm(x, below(tower, "Transformer.encoder_norm."))
    n, count, embed = x.shape
    side, out = int(count**0.5), int(tokens**0.5)
    x = x.reshape(n, out, side // out, out, side // out, embed).mean((2, 4)).reshape(n, tokens, embed)
    projector = below(arrays, "vision_encoder.VisionEmbedder_0.")
    return rms_norm(x, projector["mm_soft_embedding_norm.scale"], 1e-6) @ projector["mm_input_projection.w"]


def test_the_vision_tower_sees_what_transformers_sees(generated: Path, tmp_path: Path) -> None:
    source = generated / "models" / "gemma3-vision"
    arrays = converted(source, tmp_path / "out", "--save_dtype", "float32", "--multimodal", "true", *MODEL_27B)
    hf = transformers.Gemma3ForConditionalGeneration.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager"
    )
    images = np.random.default_rng(4).standard_normal((2, 24, 24, 3), np.float32)
    wanted = hf.model.get_image_features(torch.tensor(images.transpose(0, 3, 1, 2))).pooler_output.detach().numpy()
    got = see(arrays, images, hf.config.mm_tokens_per_image)
    assert got.shape == (2, 4, 80)
    np.testing.assert_allclose(got, wanted, atol=1e-5 * np.abs(wanted).max())


def test_without_multimodal_the_text_model_is_the_same_and_the_tower_is_named(
    generated: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    source = generated / "models" / "gemma3-vision"
    both = converted(source, tmp_path / "both", "--multimodal", "true")
    text = converted(source, tmp_path / "text")
    assert_same_bits(text, {key: values for key, values in both.items() if not key.startswith("vision_encoder.")})
    capsys.readouterr()
    assert call("plan", "--source", source) == 0
    assert "vision tower, convert it with --multimodal true" in capsys.readouterr().out


# --- spellings --------------------------------------------------------------------------------------------------------

# transformers 5.23 writes `language_model.model.`, `multi_modal_projector.` and `vision_tower.` without `vision_model.`
SPELLINGS = {
    "the hub": {"vision_tower.": "vision_tower.vision_model."},
    "in memory": {"language_model.model.": "model.language_model.", "vision_tower.": "model.vision_tower.", "multi_": "model.multi_"},
    "in memory before 5.8": {
        "language_model.model.": "model.language_model.", "vision_tower.": "model.vision_tower.vision_model.", "multi_": "model.multi_",
    },
}  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_gives_the_same_arrays(generated: Path, tmp_path: Path, spelling: str) -> None:
    source = generated / "models" / "gemma3-vision"
    tensors = read_tensors(source)

    def respelt(name: str) -> str:
        theirs, ours = next((pair for pair in SPELLINGS[spelling].items() if name.startswith(pair[0])), ("", ""))
        return ours + name.removeprefix(theirs)

    renamed = {respelt(name): values for name, values in tensors.items()}
    assert len(renamed) == len(tensors)
    assert set(renamed) != set(tensors)
    if spelling != "in memory":  # and a copy of the tied head, which some releases keep
        renamed["language_model.lm_head.weight"] = tensors["language_model.model.embed_tokens.weight"]
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(json.dumps(read_config(source)))
    save_file(renamed, tmp_path / "source" / "model.safetensors")
    options = ("--multimodal", "true")
    assert_same_bits(
        converted(tmp_path / "source", tmp_path / "respelt", *options), converted(source, tmp_path / "plain", *options)
    )


# --- config.json ------------------------------------------------------------------------------------------------------

# what config.json of the hub's gemma-3-4b-it says of the text model: transformers' defaults do the rest
HUB_4B = dict(
    model_type="gemma3",
    text_config=dict(
        model_type="gemma3_text", hidden_size=2560, intermediate_size=10240, num_hidden_layers=34, sliding_window=1024,
        rope_scaling=dict(factor=8.0, rope_type="linear"),
    ),
    vision_config=dict(
        model_type="siglip_vision_model", hidden_size=1152, image_size=896, intermediate_size=4304, num_attention_heads=16, num_hidden_layers=27,
        patch_size=14, vision_use_head=False,
    ),
)  # fmt: skip


def text_of(**fields: object) -> Config:
    return Config(HUB_4B | dict(text_config=HUB_4B["text_config"] | fields))


def test_the_hubs_config_is_completed_with_transformers_defaults() -> None:
    arrays = expand(gemma3.FAMILY, Config(HUB_4B), Layout(multimodal=True, vocab=262_144, model="gemma3-4b"))
    shapes = {path.removeprefix("params/"): parts[0].shape for path, parts in arrays.items()}
    assert shapes["token_embedder/embedding"] == (262_144, 2560)
    assert shapes["decoder/layers/layers_5/self_attention/query/kernel"] == (2560, 5, 8, 256)
    assert shapes["decoder/layers_remainder/layers_3/self_attention/key/kernel"] == (2560, 4, 256)
    assert shapes["vision_encoder/Gemma3VisionEncoderLayer_0/embedding/kernel"] == (14, 14, 3, 1152)
    assert "decoder/logits_dense/kernel" not in shapes


def test_rows_that_maxtexts_models_lack_are_kept_and_noted() -> None:
    """The hub's embedding has 64 rows more than MaxText's models."""
    assert expand(gemma3.FAMILY, Config(HUB_4B), Layout())["params/token_embedder/embedding"][0].shape == (
        262_208,
        2560,
    )
    assert "--vocab_size 262144" in gemma3.FAMILY.note(Config(HUB_4B), Layout())
    assert gemma3.FAMILY.note(Config(HUB_4B), Layout(vocab=262_144)) == ""
    assert "language_model.model.embed_tokens.weight[262144:]" in gemma3.FAMILY.drops(
        Config(HUB_4B), Layout(vocab=262_144)
    )


@pytest.mark.parametrize(
    ("scalar", "model", "fits"),
    [
        (256, "gemma3-4b", True),
        (256, None, True),
        (320, "gemma3-4b", False),
        (320, "gemma3-27b", True),
        (320, None, True),
        (168, None, False),
        (256, "gemma3-27b", False),
    ],
)
def test_the_query_is_scaled_by_the_layer_or_the_model_is_refused(scalar: int, model: str | None, fits: bool) -> None:
    """Heads of 256, 2560 / 8 = 320: what MaxText's layer scales by goes by the model's name."""
    config, layout = text_of(query_pre_attn_scalar=scalar), Layout(model=model)
    if fits:
        assert gemma3.FAMILY.stacks(config, layout)
    else:
        with pytest.raises(
            ConfigError,
            match=rf"'query_pre_attn_scalar' is {scalar}, but {model or 'MaxText'} multiplies the query by 1/√(256|320)",
        ):
            gemma3.FAMILY.stacks(config, layout)


def test_another_pattern_of_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="'sliding_window_pattern' is 5"):
        gemma3.FAMILY.stacks(text_of(sliding_window_pattern=5), Layout())
    with pytest.raises(ConfigError, match="'layer_types' isn't the pattern"):
        gemma3.FAMILY.stacks(text_of(layer_types=["full_attention"] * 34), Layout())


@pytest.mark.parametrize("name", ["gemma3-4b--scan", "gemma3-27b--unscan"])
def test_a_text_only_release_makes_maxtexts_tree(name: str) -> None:
    """`gemma3_text` has the fields of `text_config` on the outer level."""
    tree = load_trees()[name]
    arrays = expand(
        gemma3.FAMILY,
        Config(tree.config["text_config"]),
        Layout(scan=tree.scan, vocab=tree.vocab, model=tree.model, maxtext=UNSAID),
    )
    assert {f"params/{path}": (parts[0].shape, parts[0].logical_axes) for path, parts in arrays.items()} == tree.arrays
    assert {cell.tensor.split(".")[0] for parts in arrays.values() for part in parts for cell in part.cells()} == {
        "model"
    }


def test_a_text_only_release_has_no_tower() -> None:
    with pytest.raises(ConfigError, match="no 'vision_config'"):
        gemma3.FAMILY.dims(Config(HUB_4B["text_config"]), Layout(multimodal=True))
