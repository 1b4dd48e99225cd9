"""GLM-5 to 5.2: what MaxText computes with the converted arrays is what transformers computes with the checkpoint.

MaxText's layers: AI-Hypercomputer/maxtext, pull request 4832 (83a6fce), src/maxtext/models/glm5.py and
layers/attention_mla.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families.numpy_decoder import (
    assert_logits,
    below,
    both,
    dense_then_routed,
    gated,
    rms_norm,
    rope,
    routed,
    silu,
    softmax,
)
from lazily import lazily
from support import BF16, assert_same_bits, call, convert, converted, read_config, read_tensors, save

from weightbeam.model_mappings.audit import audit
from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.families import glm5
from weightbeam.model_mappings.family import rename
from weightbeam.model_mappings.plan import TensorSpec, expand, make_arrays
from weightbeam.model_mappings.registry import family_of
from weightbeam.model_mappings.versions import UNSAID

torch = lazily("torch")
transformers = lazily("transformers")

Arrays = Mapping[str, np.ndarray]
IDS = np.random.default_rng(7).integers(0, 88, 16)
TYPES = ["full", "shared", "shared", "full", "shared", "full", "shared"]  # of the model `glm5`, two layers dense
LATENT_EPSILON = 1e-6  # transformers' of the two latents, whatever config.json says; MaxText has rms_norm_eps for all


def turned(x: np.ndarray, theta: float) -> np.ndarray:
    """(length, heads, dim), whose dimension 2i turns with 2i + 1."""
    return rope(np.concatenate([x[..., 0::2], x[..., 1::2]], -1), theta)


def chosen(x: np.ndarray, latent: np.ndarray, indexer: Arrays, c: Any, theta: float) -> np.ndarray:
    """`Indexer`: which tokens each token attends to, (length, length)."""
    query = np.einsum("lq,qhd->lhd", latent, indexer["wq_b.kernel"])
    key = x @ indexer["wk.kernel"]
    key = (key - key.mean(-1, keepdims=True)) / np.sqrt(key.var(-1, keepdims=True) + 1e-6)
    key = (key * indexer["k_norm.scale"] + indexer["k_norm.bias"])[:, None]
    n = c.qk_rope_head_dim
    query, key = (np.concatenate([turned(one[..., :n], theta), one[..., n:]], -1) for one in (query, key))
    scores = np.maximum(np.einsum("lhd,md->hlm", query, key[:, 0]) * c.index_head_dim**-0.5, 0)
    scores = np.einsum("hlm,lh->lm", scores, x @ indexer["weights_proj.kernel"] * c.index_n_heads**-0.5)
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    best = np.argsort(-scores, -1, kind="stable")[:, : c.index_topk]
    mask = np.zeros(scores.shape, bool)
    np.put_along_axis(mask, best, True, -1)
    return mask & np.tri(len(x), dtype=bool)


def forward(arrays: Arrays, is_scanned: bool, c: Any) -> np.ndarray:
    theta, nope, epsilon = c.rope_parameters["rope_theta"], c.qk_nope_head_dim, c.rms_norm_eps
    x, mask = arrays["token_embedder.embedding"][IDS], None
    for kind, layer in zip(TYPES, dense_then_routed(arrays, is_scanned), strict=True):
        attention = below(layer, "self_attention.")
        normed = rms_norm(x, layer["pre_self_attention_layer_norm.scale"], epsilon)
        latent = rms_norm(normed @ attention["wq_a.kernel"], attention["q_norm.scale"], LATENT_EPSILON)
        if kind == "full":
            mask = chosen(normed, latent, below(attention, "indexer."), c, theta)
        query = np.einsum("lq,qhd->lhd", latent, attention["wq_b.kernel"])
        query = np.concatenate([query[..., :nope], turned(query[..., nope:], theta)], -1)
        compressed = normed @ attention["wkv_a.kernel"]
        rotary = turned(compressed[:, None, c.kv_lora_rank :], theta)
        latent = rms_norm(compressed[:, : c.kv_lora_rank], attention["kv_norm.scale"], LATENT_EPSILON)
        both = np.einsum("lk,khd->lhd", latent, attention["wkv_b.kernel"])
        key = np.concatenate([both[..., :nope], np.repeat(rotary, both.shape[1], 1)], -1)
        scores = np.einsum("lhd,mhd->hlm", query, key) * key.shape[-1] ** -0.5
        weights = softmax(np.where(mask, scores, -np.inf))
        x = x + np.einsum("hlm,mhd,hde->le", weights, both[..., nope:], attention["out.kernel"])
        normed = rms_norm(x, layer["post_self_attention_layer_norm.scale"], epsilon)
        moe = below(layer, "DeepSeekMoeBlock_0.")
        mlp = below(layer, "mlp.")
        x = x + (
            routed(normed, moe, c.num_experts_per_tok, c.routed_scaling_factor) if moe else gated(normed, mlp, silu)
        )
    return rms_norm(x, arrays["decoder.decoder_norm.scale"], epsilon) @ arrays["decoder.logits_dense.kernel"]


@pytest.mark.parametrize("layout", ["scanned", "unscanned"])
def test_logits_are_those_of_transformers(generated: Path, tmp_path: Path, layout: str) -> None:
    """Seven layers, four of which take the tokens that another one chose, 8 of 16."""
    scan, folder = layout == "scanned", generated / "models" / "glm5"
    arrays, hf = both(folder, tmp_path / "out", "GlmMoeDsaForCausalLM", scan)
    assert_logits(forward(arrays, scan, hf.config), hf, IDS)


def test_layers_that_share_an_indexer_have_none(generated: Path, tmp_path: Path) -> None:
    """Scanned, the places of the others are zeros; unscanned, they have no arrays."""
    folder = generated / "models" / "glm5"
    tensors = read_tensors(folder)
    scanned = converted(folder, tmp_path / "a")
    for name, first, count in (("dense_layers", 0, 2), ("moe_layers", 2, 5)):
        made = scanned[f"decoder.{name}.self_attention.indexer.wk.kernel"]
        assert made.shape[1] == count
        for i in range(count):
            tensor = tensors.get(f"model.layers.{first + i}.self_attn.indexer.wk.weight")
            assert (tensor is not None) == (TYPES[first + i] == "full")
            np.testing.assert_array_equal(made[:, i], 0 if tensor is None else tensor.T)
    unscanned = converted(folder, tmp_path / "b", "--scan_layers", "false")
    having = {name.partition(".self_attention.indexer")[0] for name in unscanned if ".indexer." in name}
    assert having == {"decoder.dense_layers_0", "decoder.moe_layers_1", "decoder.moe_layers_3"}


@pytest.mark.parametrize("scan", ["true", "false"])
@pytest.mark.parametrize("model", ["glm5", "glm5-full", "hy3"])
def test_there_and_back(generated: Path, tmp_path: Path, model: str, scan: str) -> None:
    """Exported bit for bit, and as verify wants it; from the other layout, too."""
    folder, other = generated / "models" / model, "false" if scan == "true" else "true"
    step = convert(folder, tmp_path / "out", "--scan_layers", scan)
    assert call("verify", "--source", folder, "--checkpoint", step / "items") == 0
    assert call("export", step / "items", tmp_path / "back", "--like", folder) == 0
    assert_same_bits(read_tensors(tmp_path / "back"), read_tensors(folder))
    assert call("reshard", step / "items", tmp_path / "moved", "--scan_layers", other) == 0
    wanted = convert(folder, tmp_path / "wanted", "--scan_layers", other)
    assert call("diff", wanted / "items", tmp_path / "moved" / "0" / "items") == 0


def test_verify_looks_at_places_without_a_layer(generated: Path, tmp_path: Path) -> None:
    """What stands there must be zeros: a checkpoint whose layers all have an indexer isn't this one's."""
    folder = generated / "models" / "glm5"
    config, tensors = read_config(folder), read_tensors(folder)
    full = {name: values for name, values in tensors.items() if name.startswith("model.layers.0.self_attn.indexer.")}
    for layer, kind in enumerate(TYPES):
        if kind == "shared":
            tensors |= {name.replace(".0.", f".{layer}.", 1): values for name, values in full.items()}
    other = save(tmp_path / "hf", config | {"indexer_types": ["full"] * len(TYPES)}, tensors)
    step = convert(other, tmp_path / "out")
    assert call("verify", "--source", other, "--checkpoint", step / "items") == 0
    assert call("verify", "--source", folder, "--checkpoint", step / "items") == 1


RELEASES = {  # transformers' defaults are GLM-5's and Hy3's; of 5.2 MaxText's configs/models/glm5.2-744b.yml says the rest
    "GLM-5": ("GlmMoeDsa", {}),
    "GLM-5.1": ("GlmMoeDsa", dict(rope_parameters=dict(rope_type="default", rope_theta=1_000_000))),
    "GLM-5.2": ("GlmMoeDsa", dict(index_topk_freq=4, index_skip_topk_offset=3, max_position_embeddings=1_048_576)),
    "Hy3": ("HYV3", {}),
}


@pytest.mark.parametrize(
    "layout",
    [Layout(mtp=True), Layout(mtp=True, maxtext=UNSAID), Layout(scan=False), Layout()],
    ids=["mtp", "mtp of e591f30", "unscanned", "scanned"],
)
@pytest.mark.parametrize("release", RELEASES)
def test_a_release_at_full_size_is_planned_without_problems(release: str, layout: Layout) -> None:
    """Every tensor of transformers' own model of that size, and of a layer for multi-token prediction behind the last, whose
    norm e591f30 hasn't.
    """
    kind, sizes = RELEASES[release]
    config = getattr(transformers, f"{kind}Config")(**sizes)
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    n, embed = config.num_hidden_layers, config.hidden_size
    prefix, last = f"model.layers.{n}.", n - 4  # a layer with an indexer
    shapes |= {
        name.replace(f".{last}.", f".{n}.", 1): shape
        for name, shape in shapes.items()
        if name.startswith(f"model.layers.{last}.")
    }
    norm = "final_layernorm" if kind == "HYV3" else "shared_head.norm"
    shapes |= {f"{prefix}{name}.weight": (embed,) for name in ("enorm", "hnorm", norm)}
    shapes[f"{prefix}eh_proj.weight"] = (embed, 2 * embed)
    said = Config(config.to_dict())
    family = family_of(said)
    specs = {rename(name, family.aliases): TensorSpec(shape, BF16, "-") for name, shape in shapes.items()}
    layout = dataclasses.replace(layout, shapes={name: spec.shape for name, spec in specs.items()})
    arrays = make_arrays(expand(family, said, layout), specs, BF16)
    dropped, problems = audit(arrays, specs, family.drops(said, layout), family.name)
    assert not problems
    assert all(name.startswith(prefix) for name in dropped)
    left_out = int(layout.maxtext == UNSAID) if layout.mtp else sum(name.startswith(prefix) for name in shapes)
    assert len(dropped) == left_out


@pytest.mark.parametrize(
    ("said", "full"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6]),
        (dict(index_topk_freq=3, index_skip_topk_offset=3), [0, 1, 2, 5]),
        (dict(index_topk_pattern="FSSFSFS"), [0, 3, 5]),
        (dict(indexer_types=TYPES), [0, 3, 5]),
    ],
    ids=str,
)
def test_which_layers_have_an_indexer_is_said_in_several_ways(said: dict[str, Any], full: list[int]) -> None:
    """As transformers' configuration reads them."""
    types = glm5.indexer_types(Config(num_hidden_layers=7, **said))
    assert [layer for layer, kind in enumerate(types) if kind == "full"] == full
    assert types == transformers.GlmMoeDsaConfig(num_hidden_layers=7, **said).indexer_types


@pytest.mark.parametrize(
    "types", [["shared", "full"], ["full"], ["full", "none"], ["full", []], [{}, "full"], 2, 1.5, True], ids=str
)
def test_other_indexers_are_refused(types: Any) -> None:
    with pytest.raises(
        ConfigError, match="'indexer_types' should be 2 of 'full' and 'shared', the first of them 'full'"
    ):
        glm5.indexer_types(Config(num_hidden_layers=2, indexer_types=types))
