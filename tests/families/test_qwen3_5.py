"""Qwen 3.5 and Qwen 3 Next: the converted layers compute what transformers' do, in every spelling of the files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from families.numpy_decoder import below, rms_norm, rope, sigmoid, silu, softmax
from lazily import lazily
from support import FP8, assert_same_bits, call, converted, headers_only, read_config, read_model, save

from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.families import qwen3_5, qwen3_next
from weightbeam.model_mappings.plan import expand
from weightbeam.model_mappings.registry import UnknownFamilyError, family_of
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import ConvertOptions

torch = lazily("torch")
transformers = lazily("transformers")

Arrays = Mapping[str, np.ndarray]
MODELS = {"models/qwen3_5": "Qwen3_5MoeForConditionalGeneration", "cases/qwen3-next": "Qwen3NextForCausalLM"}
HF = "model.language_model.layers."
EPSILON = 1e-6


# --- MaxText's layers in numpy: `Qwen3NextGatedDeltaNet` and `Qwen3NextFullAttention`, src/maxtext/models/qwen3.py, e59


def delta_net_inputs(c: Mapping[str, Any], w: Arrays, x: np.ndarray) -> dict[str, np.ndarray]:
    """Step A, projections of x (time, embed): by key head first, then into q, k, v, z and b, a."""
    key_heads, heads, key_dim, dim = (
        c[f"linear_{name}"] for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    )
    each = heads // key_heads
    qkvz = (x @ w["in_proj_qkvz.kernel"]).reshape(len(x), key_heads, 2 * key_dim + 2 * dim * each)
    q, k, v, z = np.split(qkvz, [key_dim, 2 * key_dim, 2 * key_dim + each * dim], axis=2)
    b, a = np.split((x @ w["in_proj_ba.kernel"]).reshape(len(x), key_heads, 2 * each), [each], axis=2)
    return {name: values.reshape(len(x), -1) for name, values in dict(q=q, k=k, v=v, z=z, b=b, a=a).items()}


def delta_net(c: Mapping[str, Any], w: Arrays, x: np.ndarray) -> np.ndarray:
    """The whole layer on x (time, embed), one step at a time where MaxText takes chunks."""
    key_heads, heads, key_dim, dim = (
        c[f"linear_{name}"] for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    )
    made = delta_net_inputs(c, w, x)
    kernel = w["conv1d.kernel"][:, 0]  # (taps, channels)
    qkv = np.concatenate([made["q"], made["k"], made["v"]], -1)
    padded = np.concatenate([np.zeros_like(qkv[: len(kernel) - 1]), qkv])
    qkv = np.stack([(padded[t : t + len(kernel)] * kernel).sum(0) for t in range(len(x))])
    q, k, v = np.split(silu(qkv), [key_heads * key_dim, 2 * key_heads * key_dim], axis=1)
    q, k = (np.repeat(part.reshape(len(x), key_heads, key_dim), heads // key_heads, axis=1) for part in (q, k))
    q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
    v = v.reshape(len(x), heads, dim)
    decay = np.exp(-np.exp(w["A_log"]) * np.log1p(np.exp(made["a"] + w["dt_bias"])))
    state, out = np.zeros((heads, key_dim, dim), x.dtype), np.empty_like(v)
    for t in range(len(x)):
        state = state * decay[t, :, None, None]
        change = (v[t] - np.einsum("hkd,hk->hd", state, k[t])) * sigmoid(made["b"][t])[:, None]
        state = state + np.einsum("hk,hd->hkd", k[t], change)
        out[t] = np.einsum("hkd,hk->hd", state, q[t] * key_dim**-0.5)
    z = made["z"].reshape(v.shape)
    return (rms_norm(out, w["norm.rms_norm.scale"], EPSILON) * silu(z)).reshape(len(x), -1) @ w["out_proj.kernel"]


def full_attention(c: Mapping[str, Any], w: Arrays, x: np.ndarray) -> np.ndarray:
    """The whole layer on x (time, embed): half of a query head's columns are its gate; a quarter of a head turns, in
    halves kept apart.
    """
    dim, (heads, kv) = c["head_dim"], (c["num_attention_heads"], c["num_key_value_heads"])
    q, gate = np.split(np.einsum("te,ehd->thd", x, w["query.kernel"]), 2, axis=-1)
    k, v = (np.einsum("te,ehd->thd", x, w[f"{name}.kernel"]) for name in ("key", "value"))

    def turn(part: np.ndarray) -> np.ndarray:
        return np.concatenate([rope(part[..., : dim // 4], 10_000.0), part[..., dim // 4 :]], -1)

    q, k = (turn(rms_norm(part, 1 + w[f"{name}_norm.scale"], EPSILON)) for part, name in ((q, "query"), (k, "key")))
    k, v = (np.repeat(part, heads // kv, axis=1) for part in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) * dim**-0.5
    weights = softmax(np.where(np.tri(len(x), dtype=bool), scores, -np.inf))
    out = np.einsum("hts,shd->thd", weights, v)
    return (out * sigmoid(gate)).reshape(len(x), -1) @ w["out.kernel"]


def moe(c: Mapping[str, Any], w: Arrays, x: np.ndarray) -> np.ndarray:
    """`Qwen3NextSparseMoeBlock` on x (time, embed), every expert for every token."""

    def mlp(wi_0: np.ndarray, wi_1: np.ndarray, wo: np.ndarray) -> np.ndarray:
        return (silu(x @ wi_0) * (x @ wi_1)) @ wo

    probabilities = np.exp(x @ w["routed_experts.gate.kernel"])
    least = np.sort(probabilities)[:, -c["num_experts_per_tok"], None]
    chosen = np.where(probabilities >= least, probabilities, 0)
    routed = np.stack(
        [mlp(*(w[f"routed_experts.{name}"][e] for name in ("wi_0", "wi_1", "wo"))) for e in range(c["num_experts"])], -1
    )
    shared = mlp(*(w[f"shared_expert.{name}.kernel"] for name in ("wi_0", "wi_1", "wo")))
    share = chosen / chosen.sum(-1, keepdims=True)
    return (routed * share[:, None]).sum(-1) + sigmoid(x @ w["shared_expert_gate.kernel"]) * shared


@pytest.fixture(scope="module", params=MODELS)
def both(
    generated: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[dict, Any, Arrays]:
    """The text model's config, transformers' layers, and the converted arrays: scanned as e591f30 has them, in float32, of the files'
    bfloat16.
    """
    folder = generated / request.param
    model = getattr(transformers, MODELS[request.param]).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    config = read_config(folder)
    text = model.model if "text_config" not in config else model.model.language_model
    return (
        config.get("text_config", config),
        text,
        converted(folder, tmp_path_factory.mktemp("scanned"), "--save_dtype", "float32", "--maxtext", "e591f30"),
    )


def layer_of(arrays: Arrays, number: int, part: str) -> dict[str, np.ndarray]:
    """The arrays of one part of one layer, out of the stacks of cycles, in float64."""
    found = below(arrays, f"decoder.layers.layer_{number % 4}.{part}.")
    return {key: np.moveaxis(values, 1, 0)[number // 4].astype(np.float64) for key, values in found.items()}


def inputs(embed: int) -> tuple[np.ndarray, torch.Tensor]:
    """(time, embed), and the same as a batch of one for PyTorch."""
    x = np.random.default_rng(0).standard_normal((7, embed))
    return x, torch.tensor(x, dtype=torch.float32)[None]


def close(ours: np.ndarray, theirs: torch.Tensor) -> None:
    wanted = theirs.detach().double().numpy().reshape(ours.shape)
    assert np.abs(wanted).max() > 1e-3
    np.testing.assert_allclose(ours, wanted, rtol=2e-4, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.usefixtures("no_grad")
def test_maxtext_splits_the_delta_nets_projections_into_hugging_faces(both: tuple[dict, Any, Arrays]) -> None:
    """q, k, v, z, b and a of each delta net, as each side's layer takes them out of its projections."""
    c, model, arrays = both
    x, batch = inputs(c["hidden_size"])
    keys, values = (
        c["linear_num_key_heads"] * c["linear_key_head_dim"],
        c["linear_num_value_heads"] * c["linear_value_head_dim"],
    )
    checked = 0
    for number, layer in enumerate(model.layers):
        if number % 4 == 3:
            continue
        net = layer.linear_attn
        if hasattr(net, "in_proj_qkv"):
            theirs = dict(zip("qkv", net.in_proj_qkv(batch).split([keys, keys, values], -1), strict=True))
            theirs |= {name: getattr(net, f"in_proj_{name}")(batch) for name in "zba"}
        else:
            theirs = dict(
                zip(
                    "qkvzba",
                    net.fix_query_key_value_ordering(net.in_proj_qkvz(batch), net.in_proj_ba(batch)),
                    strict=True,
                )
            )
        ours = delta_net_inputs(c, layer_of(arrays, number, "attention"), x)
        assert set(ours) == set(theirs)
        for name, projected in ours.items():
            close(projected, theirs[name])
            checked += 1
    assert checked == 6 * 3 * len(model.layers) // 4


@pytest.mark.usefixtures("no_grad")
def test_layers_compute_what_transformers_do(both: tuple[dict, Any, Arrays]) -> None:
    """Delta nets, gated attention, experts and the norms before them, one by one, each from its own arrays."""
    c, model, arrays = both
    x, batch = inputs(c["hidden_size"])
    rope = model.rotary_emb(batch, torch.arange(batch.shape[1])[None])
    causal = torch.full((batch.shape[1],) * 2, -torch.inf).triu(1)[None, None]
    for number, layer in enumerate(model.layers):
        attention = layer_of(arrays, number, "attention")
        if number % 4 == 3:
            ours = full_attention(c, below(attention, "attention."), x)
            close(ours, layer.self_attn(batch, position_embeddings=rope, attention_mask=causal)[0])
        else:
            close(delta_net(c, attention, x), layer.linear_attn(batch))
        close(moe(c, layer_of(arrays, number, "mlp"), x), layer.mlp(batch))
        for name in ("input_layernorm", "post_attention_layernorm"):
            close(rms_norm(x, 1 + layer_of(arrays, number, name)["scale"], EPSILON), getattr(layer, name)(batch))
    close(rms_norm(x, 1 + arrays["decoder.decoder_norm.scale"], EPSILON), model.norm(batch))


# --- the spellings of the files ---------------------------------------------------------------------------------------


def test_fused_experts_and_one_tensor_each_make_the_same(generated: Path, tmp_path: Path) -> None:
    """The hub's files and transformers' hold the same experts; the arrays are their transposes."""
    config, tensors, state = read_model(generated, "qwen3_5")
    assert f"{HF}0.mlp.experts.gate_up_proj" in state
    assert f"{HF}0.mlp.experts.2.up_proj.weight" in tensors
    arrays = converted(save(tmp_path / "fused", config, state), tmp_path / "from_fused")
    assert_same_bits(arrays, converted(save(tmp_path / "apart", config, tensors), tmp_path / "from_apart"))
    for number in range(4):
        gate_up, down = (
            state[f"{HF}{number}.mlp.experts.{name}"].transpose(0, 2, 1) for name in ("gate_up_proj", "down_proj")
        )
        experts = {
            name: arrays[f"decoder.layers.layer_{number}.mlp.routed_experts.{name}"][:, 0]
            for name in ("wi_0", "wi_1", "wo")
        }
        assert_same_bits(
            experts, dict(zip(("wi_0", "wi_1"), np.split(gate_up, 2, axis=-1), strict=True)) | {"wo": down}
        )


def test_a_text_model_saved_alone_is_the_same_model(generated: Path, tmp_path: Path) -> None:
    """A flat `config.json` and shorter names; tied, so that there is no head."""
    config, tensors, state = read_model(generated, "qwen3_5-text")
    assert config["model_type"] == "qwen3_5_moe_text"
    assert "model.layers.0.input_layernorm.weight" in tensors
    alone = converted(generated / "models" / "qwen3_5-text", tmp_path / "alone")
    assert "decoder.logits_dense.kernel" not in alone
    nested = {
        "model_type": "qwen3_5_moe",
        "text_config": {**config, "tie_word_embeddings": False},
        "tie_word_embeddings": True,
    }
    named = {re.sub(r"^model\.", "model.language_model.", name): values for name, values in tensors.items()}
    assert_same_bits(alone, converted(save(tmp_path / "whole", nested, named), tmp_path / "from_whole"))
    assert_same_bits(
        {"embedding": alone["token_embedder.embedding"]}, {"embedding": state["model.embed_tokens.weight"]}
    )


def quantise(tensors: Arrays) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What Qwen's FP8 releases hold, in blocks of 16 × 16 with scales in bfloat16, and the values of it."""
    rng, stored, values = np.random.default_rng(0), {}, {}
    for name, tensor in tensors.items():
        stored[name] = values[name] = tensor
        if name.endswith("_proj.weight") or ".in_proj_qkv" in name or ".in_proj_z" in name:
            scale = rng.uniform(1e-3, 1e-2, [-(-size // 16) for size in tensor.shape]).astype(ml_dtypes.bfloat16)
            stored[name] = (tensor.astype(np.float32) * 300).astype(FP8)
            stored[f"{name}_scale_inv"] = scale
            spread = np.kron(scale.astype(np.float32), np.ones((16, 16), np.float32))[tuple(map(slice, tensor.shape))]
            values[name] = stored[name].astype(np.float32) * spread
    return stored, values


def test_fp8_releases(generated: Path, tmp_path: Path) -> None:
    """Their windows and segments don't fall on the blocks' borders; their multi-token prediction, in FP8 too, is left
    out.
    """
    config, tensors, _ = read_model(generated, "qwen3_5")
    tensors = {name: values for name, values in tensors.items() if "visual" not in name}
    tensors["mtp.layers.0.self_attn.q_proj.weight"] = tensors[f"{HF}3.self_attn.q_proj.weight"]
    stored, values = quantise(tensors)
    assert len(stored) > len(values) > 100
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
    arrays = converted(
        save(tmp_path / "fp8", config | {"quantization_config": fp8}, stored),
        tmp_path / "from_fp8",
        "--save_dtype",
        "float32",
    )
    assert_same_bits(
        arrays, converted(save(tmp_path / "plain", config, values), tmp_path / "from_plain", "--save_dtype", "float32")
    )


# --- the vision tower -------------------------------------------------------------------------------------------------


def test_the_tower_comes_beside_the_same_text_model(generated: Path, tmp_path: Path) -> None:
    """One fused qkv and the patch embedding by value; the layers of the tower as such are tested with Qwen 3 VL, which
    shares it.
    """
    folder = generated / "models" / "qwen3_5"
    _, tensors, _ = read_model(generated, "qwen3_5")
    arrays, text = converted(folder, tmp_path / "whole", "--multimodal", "true"), converted(folder, tmp_path / "text")
    tower = below(arrays, "vision_encoder.")
    assert_same_bits({key: values for key, values in arrays.items() if not key.startswith("vision_encoder.")}, text)
    assert len(tower) == 25
    prefix, heads, dim = "Qwen3_5MoeVisionEncoder_0.", 3, 16
    for third, name in enumerate(("query", "key", "value")):
        kernel, bias = (tower[f"{prefix}blocks_0.attn.attn.{name}.{kind}"] for kind in ("kernel", "bias"))
        rows = slice(third * heads * dim, (third + 1) * heads * dim)
        weight = tensors["model.visual.blocks.0.attn.qkv.weight"][rows].reshape(heads, dim, heads * dim)
        wanted = {
            "kernel": weight.transpose(2, 0, 1),
            "bias": tensors["model.visual.blocks.0.attn.qkv.bias"][rows].reshape(heads, dim),
        }
        assert_same_bits({"kernel": kernel, "bias": bias}, wanted)
    patch = tensors["model.visual.patch_embed.proj.weight"]
    assert patch.shape == (48, 3, 2, 4, 4)
    assert_same_bits({"patch": tower[f"{prefix}patch_embed.proj.kernel"]}, {"patch": patch.transpose(2, 3, 4, 1, 0)})


# --- what is left out, and what is refused ----------------------------------------------------------------------------


def test_multi_token_prediction_and_the_tower_are_left_out_by_name(generated: Path, tmp_path: Path) -> None:
    """Both with their reason, and `--mtp true` is refused."""
    config, tensors, _ = read_model(generated, "qwen3_5")
    mtp = {"mtp.fc.weight": (64, 128), "mtp.norm.weight": (64,), "mtp.layers.0.self_attn.q_proj.weight": (128, 64)}
    folder = save(
        tmp_path / "in", config, tensors | {name: np.zeros(shape, ml_dtypes.bfloat16) for name, shape in mtp.items()}
    )
    assert call("plan", "--source", folder, "--json", tmp_path / "plan.json") == 0
    dropped = json.loads((tmp_path / "plan.json").read_text())["dropped"]
    reasons = dict.fromkeys(mtp, "multi-token prediction, MaxText has no block for this model's")
    reasons |= {
        name: "vision tower, convert it with --multimodal true" for name in tensors if name.startswith("model.visual.")
    }
    assert len(reasons) > 20
    assert dropped == reasons
    assert call("plan", "--source", folder, "--mtp", "true") != 0


@pytest.mark.parametrize("family", [qwen3_next.FAMILY, qwen3_5.FAMILY], ids=lambda family: family.name)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(layer_types=["full_attention"] * 4), "'layer_types' isn't the pattern that MaxText repeats"),
        (
            dict(full_attention_interval=2, layer_types=None),
            "full attention is one layer in 2, in MaxText's model one in 4",
        ),
        (dict(num_hidden_layers=6, layer_types=None), "6 layers, but MaxText scans this model in cycles of 4"),
        (
            dict(shared_expert_intermediate_size=96),
            "the shared expert's size is 96, a routed one's 48; MaxText gives both the same",
        ),
        (dict(mlp_only_layers=[0]), "mixes dense and MoE layers"),
        (dict(linear_num_value_heads=5), "5 value heads can't be shared out among 2 key heads"),
        (dict(linear_key_head_dim=None), "'linear_key_head_dim' should be a positive integer, but is None"),
    ],
)
def test_what_maxtext_does_not_have_is_refused(generated: Path, family: Any, change: dict, message: str) -> None:
    config = read_config(generated / "models" / "qwen3_5-text")
    expand(family, Config(config), Layout())
    with pytest.raises(ConfigError, match=re.escape(message)):
        expand(family, Config(config | change), Layout())


def test_layers_that_fill_no_cycle_are_converted_unscanned(generated: Path) -> None:
    """The last two of six are delta nets."""
    config = read_config(generated / "models" / "qwen3_5-text") | dict(num_hidden_layers=6, layer_types=None)
    made = expand(qwen3_5.FAMILY, Config(config), Layout(scan=False))
    assert "params/decoder/layers_5/attention/A_log" in made
    assert "params/decoder/layers_3/attention/attention/query/kernel" in made


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unscanned"])
def test_qwen_3_8_at_full_size(scan: bool) -> None:
    """Qwen 3.8 2.4T-A95B: a text model of 92 layers, every fourth with full attention and four key heads, and 512 experts of which a
    token is sent to ten. Its other sizes aren't known here; these have its 2.4 trillion parameters. The tensors are transformers'.
    """
    sizes = dict(
        vocab_size=248_320, hidden_size=8192, num_hidden_layers=92, num_attention_heads=64, num_key_value_heads=4, head_dim=256,
        num_experts=512, num_experts_per_tok=10, moe_intermediate_size=2048, shared_expert_intermediate_size=2048,
        linear_num_key_heads=32, linear_num_value_heads=64, tie_word_embeddings=False,
    )  # fmt: skip
    config = transformers.Qwen3_5MoeTextConfig(**sizes)
    with torch.device("meta"):
        model = transformers.Qwen3_5MoeForCausalLM(config)
    known = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert 2.3e12 < sum(map(math.prod, known.values())) < 2.5e12
    conversion = plan_conversion(
        ConvertOptions(scan_layers=scan), headers_only(json.loads(config.to_json_string()), known=known)
    )
    assert not conversion.plan.problems
    arrays = {array.key.removeprefix("params.params.decoder."): array.shape for array in conversion.plan.arrays}
    routed = [shape for key, shape in arrays.items() if key.endswith("routed_experts.wi_0")]
    assert routed == ([(512, 23, 8192, 2048)] * 4 if scan else [(512, 8192, 2048)] * 92)
    assert sum(map(math.prod, arrays.values())) == sum(map(math.prod, known.values()))


def test_the_dense_models_have_no_table(generated: Path) -> None:
    """MaxText has none of them; the message says which there are."""
    config = Config(read_config(generated / "models" / "qwen3_5")) | {"model_type": "qwen3_5"}
    with pytest.raises(UnknownFamilyError, match=r"no table for model_type 'qwen3_5'(.|\n)*MaxText has no dense ones"):
        family_of(Config(config))
