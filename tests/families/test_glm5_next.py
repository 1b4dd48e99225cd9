"""GLM-5.3-Flash: what MaxText's branch computes with the converted arrays is what transformers computes with the release.

The layers are written after AI-Hypercomputer/maxtext, src/maxtext/models/glm5_next.py, 0630439, and layers/mhc.py and moe.py, e591f30;
the branch wasn't run.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from families.numpy_decoder import Arrays, assert_logits, below, gated, numbered, rms_norm, sigmoid, silu, softmax
from lazily import lazily
from support import call, converted, read_config, read_tensors

from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.families import glm5_next
from weightbeam.model_mappings.maxtext_config import maxtext_config
from weightbeam.model_mappings.naming import ModelNaming
from weightbeam.model_mappings.plan import expand

torch = lazily("torch")
transformers = lazily("transformers")

IDS = np.random.default_rng(3).integers(1, 97, 12)
HEADS, DIM, NOPE, STREAMS, EPSILON = 4, 10, 16, 4, 1e-5
TEXT = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=5, num_attention_heads=3, num_key_value_heads=3,
    n_routed_experts=6, num_experts_per_tok=2, kv_lora_rank=20, q_lora_rank=28, v_head_dim=12, qk_nope_head_dim=NOPE, index_topk=32, index_head_dim=8,
    index_n_heads=2, linear_head_dim=DIM, linear_num_heads=HEADS, hc_mult=STREAMS, pad_token_id=0,
)  # fmt: skip
VISION = dict(
    depth=1, hidden_size=16, num_heads=2, intermediate_size=24, out_hidden_size=32, projection_intermediate_size=20
)


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by transformers, in several files; no norm is 1, no bias 0, and no scale of a hyper-connection the other's."""
    folder = tmp_path_factory.mktemp("glm") / "hf"
    torch.manual_seed(0)
    model = transformers.Glm5NextForConditionalGeneration(
        transformers.Glm5NextConfig(text_config=TEXT, vision_config=VISION)
    )
    for _, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point():
            tensor.data += torch.randn_like(tensor) * 0.2
    model.save_pretrained(folder, max_shard_size="100KB")
    return folder


def connected(x: np.ndarray, hc: Arrays, branch) -> np.ndarray:
    """(length, streams, embed): a branch between its hyper-connection's two sides."""
    normed = rms_norm(x.reshape(len(x), -1), hc["mhc_norm.scale"], EPSILON)

    def weights(part: str) -> np.ndarray:
        return (normed @ hc[f"{part}_alpha"]) * hc[f"{part}_alpha_scale"] + hc[f"{part}_beta"].ravel()

    among = softmax(weights("res").reshape(len(x), STREAMS, STREAMS)) + 1e-6
    among /= among.sum(-2, keepdims=True) + 1e-6
    for _ in range(19):
        among /= among.sum(-1, keepdims=True) + 1e-6
        among /= among.sum(-2, keepdims=True) + 1e-6
    made = branch(np.einsum("ls,lse->le", sigmoid(weights("pre")) + 1e-6, x))
    return np.einsum("ls,le->lse", 2 * sigmoid(weights("post")), made) + np.einsum("lst,lse->lte", among, x)


def delta_attention(x: np.ndarray, layer: Arrays) -> np.ndarray:
    """Token by token: the state decays, forgets what it holds at the key, and takes the value."""
    mixed = np.concatenate([x @ layer[f"{name}_proj.kernel"] for name in "qkv"], -1)
    taps = layer["conv1d.kernel"]
    padded = np.pad(mixed, ((len(taps) - 1, 0), (0, 0)))
    mixed = silu(sum(padded[i : i + len(x)] * taps[i, 0] for i in range(len(taps))))
    query, key, value = (part.reshape(len(x), HEADS, DIM) for part in np.split(mixed, 3, -1))
    query, key = (part / np.sqrt((part * part).sum(-1, keepdims=True) + 1e-6) for part in (query, key))
    low = (x @ layer["f_a_proj.kernel"] @ layer["f_b_proj.kernel"] + layer["dt_bias"]).reshape(query.shape)
    decay = np.exp(-5.0 * sigmoid(np.exp(layer["A_log"])[:, None] * low))
    beta, state, out = sigmoid(x @ layer["b_proj.kernel"]), np.zeros((HEADS, DIM, DIM)), np.empty(query.shape)
    for i in range(len(x)):
        state = state * decay[i][..., None]
        change = (value[i] - np.einsum("hkd,hk->hd", state, key[i])) * beta[i][:, None]
        state = state + np.einsum("hk,hd->hkd", key[i], change)
        out[i] = np.einsum("hkd,hk->hd", state, query[i] * DIM**-0.5)
    gate = (x @ layer["g_a_proj.kernel"] @ layer["g_b_proj.kernel"]).reshape(out.shape)
    return (rms_norm(out, layer["o_norm.scale"], EPSILON) * sigmoid(gate)).reshape(len(x), -1) @ layer["o_proj.kernel"]


def latent_attention(x: np.ndarray, layer: Arrays) -> np.ndarray:
    query = rms_norm(x @ layer["q_a_proj.kernel"], layer["q_a_layernorm.scale"], EPSILON) @ layer["q_b_proj.kernel"]
    latent = rms_norm(x @ layer["kv_a_proj_with_mqa.kernel"], layer["kv_a_layernorm.scale"], EPSILON)
    query = query.reshape(len(x), -1, NOPE)
    key, value = np.split((latent @ layer["kv_b_proj.kernel"]).reshape(len(x), query.shape[1], -1), [NOPE], -1)
    scores = np.einsum("lhd,mhd->hlm", query, key) * NOPE**-0.5
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    return np.einsum("hlm,mhd->lhd", softmax(scores), value).reshape(len(x), -1) @ layer["o_proj.kernel"]


def clamped(x: np.ndarray, layer: Arrays) -> np.ndarray:
    """A gated MLP; the limit of 10 isn't met here."""
    assert max(np.abs(x @ layer[f"wi_{i}.kernel"]).max() for i in (0, 1)) < 10
    return gated(x, layer, silu)


def routed(x: np.ndarray, layer: Arrays) -> np.ndarray:
    """Two experts a token by sigmoid scores and a bias, their weights shared out and times 2.5; and the shared one."""
    scores = sigmoid(x @ layer["MoeBlock_0.gate.kernel"])
    out = clamped(x, below(layer, "shared_experts."))
    for i, token in enumerate(x):
        chosen = np.argsort(-(scores[i] + layer["MoeBlock_0.gate.bias"]))[:2]
        for expert in chosen:
            kernels = {f"{name}.kernel": layer[f"MoeBlock_0.{name}"][expert] for name in ("wi_0", "wi_1", "wo")}
            out[i] += 2.5 * scores[i, expert] / scores[i, chosen].sum() * clamped(token[None], kernels)[0]
    return out


def forward(arrays: Arrays) -> np.ndarray:
    x = np.repeat(arrays["token_embedder.embedding"][IDS][:, None], STREAMS, 1)
    for i, layer in enumerate(numbered(arrays, "decoder.layers_")):
        attend = latent_attention if i % 4 == 3 else delta_attention
        attention, mlp = below(layer, "attention."), below(layer, "mlp.")
        feed = routed if i >= 3 else clamped

        def attended(x: np.ndarray, layer=layer, attend=attend, attention=attention) -> np.ndarray:
            return attend(rms_norm(x, layer["input_layernorm.scale"], EPSILON), attention)

        def fed(x: np.ndarray, layer=layer, feed=feed, mlp=mlp) -> np.ndarray:
            return feed(rms_norm(x, layer["post_attention_layernorm.scale"], EPSILON), mlp)

        x = connected(x, below(layer, "attn_hc."), attended)
        x = connected(x, below(layer, "ffn_hc."), fed)
    x = rms_norm(
        x.sum(1), arrays["decoder.decoder_norm.scale"], EPSILON
    )  # MaxText adds the streams, the model takes their mean
    return x @ arrays["decoder.logits_dense.kernel"]


OPTIONS = ("--scan_layers", "false", "--save_dtype", "float32")


def test_logits_are_those_of_transformers(release: Path, tmp_path: Path) -> None:
    arrays = converted(release, tmp_path / "out", *OPTIONS)
    hf = transformers.Glm5NextForConditionalGeneration.from_pretrained(
        release, dtype=torch.float32, attn_implementation="eager"
    )
    assert_logits(forward(arrays), hf, IDS, 1e-4)


def test_there_and_back(release: Path, tmp_path: Path) -> None:
    """Bit for bit, the indexer and the tower from the release."""
    converted(release, tmp_path / "out", *OPTIONS)
    assert call("export", "--source", tmp_path / "out", "--like", release, "--output", tmp_path / "back") == 0
    there, back = read_tensors(release), read_tensors(tmp_path / "back")
    assert there.keys() == back.keys()
    assert all(back[name].tobytes() == values.tobytes() for name, values in there.items())


def test_scanned_is_refused(release: Path, tmp_path: Path) -> None:
    assert call("convert", "--source", release, "--output", tmp_path / "out") == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(layer_types=["indexed_attention"] * 5), "'layer_types' isn't the pattern"),
        (dict(layer_types=["linear_attention"] * 4), "'layer_types' isn't the pattern"),
        (dict(mlp_layer_types=["sparse", "dense", "dense", "sparse", "sparse"]), "'mlp_layer_types' should be 'dense' and then 'sparse', 5 in all"),
        (dict(mlp_layer_types="dense"), "'mlp_layer_types' should be"),
    ],
)  # fmt: skip
def test_what_maxtext_does_not_have_is_refused(release: Path, change: dict, message: str) -> None:
    config, layout = read_config(release), Layout(scan=False)
    expand(glm5_next.FAMILY, Config(config), layout)
    with pytest.raises(ConfigError, match=message):
        expand(glm5_next.FAMILY, Config(config | {"text_config": config["text_config"] | change}), layout)


@pytest.mark.parametrize(("said", "groups"), [({}, (-1, -1)), (dict(n_group=3, topk_group=2), (3, 2))])
def test_experts_are_chosen_in_the_groups_that_are_said(said: dict, groups: tuple[int, int]) -> None:
    """transformers' router (v5.23.0, `Glm5NextTextTopkRouter`) masks the groups that aren't chosen; MaxText has keys for them."""
    config = Config(
        model_type="glm5_next", text_config=TEXT | dict(model_type="glm5_next_text", n_shared_experts=1) | said
    )
    made = maxtext_config(glm5_next.FAMILY, config, Layout(scan=False), ModelNaming("glm5.3-flash"))
    assert (made["n_routing_groups"], made["topk_routing_group"]) == groups
