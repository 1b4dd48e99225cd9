"""Qwen 3 VL: the tower computes what transformers' does, the text model is Qwen 3's, and experts are read in every
spelling.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from families.numpy_decoder import below, silu, softmax
from families.qwen_towers import Arrays, assert_close, check_vision
from lazily import lazily
from support import assert_same_bits, call, converted, read_config, read_model, save, unfuse

from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.families.qwen3_vl import FAMILY
from weightbeam.model_mappings.plan import expand

torch = lazily("torch")
transformers = lazily("transformers")

CLASSES = {
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "cosmos3": "Cosmos3OmniForConditionalGeneration",
}
UNSCANNED, TOWER, FLOAT32 = ("--scan_layers", "false"), ("--multimodal", "true"), ("--save_dtype", "float32")
HF = "model.language_model.layers.0.mlp.experts."


@pytest.fixture(scope="module", params=CLASSES)
def both(
    generated: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[torch.nn.Module, Arrays]:
    """transformers' model, and the converted arrays, in float32, of the files' bfloat16."""
    folder = generated / "models" / request.param
    model = getattr(transformers, CLASSES[request.param]).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.model, converted(folder, tmp_path_factory.mktemp("all"), *UNSCANNED, *TOWER, *FLOAT32)


@pytest.mark.usefixtures("no_grad")
def test_the_towers_layers_compute_what_transformers_do(both: tuple[torch.nn.Module, Arrays]) -> None:
    """Patches, positions, norms, attention by thirds of one tensor, MLPs and mergers, one by one and together."""
    model, arrays = both
    assert check_vision(model.visual, arrays, "Qwen3VL") == 1 + 3 * 6 + 2 + 1


@pytest.mark.usefixtures("no_grad")
def test_the_experts_compute_what_transformers_do(both: tuple[torch.nn.Module, Arrays]) -> None:
    """transformers reads the hub's fused experts; gate and up could change places without an error anywhere."""
    model, arrays = both
    x = np.random.default_rng(0).standard_normal((7, model.language_model.config.hidden_size))
    for number, layer in enumerate(model.language_model.layers):
        w = {key: values.astype(np.float64) for key, values in below(arrays, f"decoder.layers_{number}.").items()}
        wanted = layer.mlp(torch.tensor(x, dtype=torch.float32)[None])[0].double().numpy()
        if "mlp.wi_0.kernel" in w:
            assert_close((silu(x @ w["mlp.wi_0.kernel"]) * (x @ w["mlp.wi_1.kernel"])) @ w["mlp.wo.kernel"], wanted)
            continue
        w = below(w, "moe_block.")
        share = softmax(x @ w["gate.kernel"])
        share = np.where(share >= np.sort(share)[:, -model.language_model.config.num_experts_per_tok, None], share, 0)
        up = silu(np.einsum("le,xem->xlm", x, w["wi_0"])) * np.einsum("le,xem->xlm", x, w["wi_1"])
        assert_close(np.einsum("xlm,xme,lx->le", up, w["wo"], share / share.sum(-1, keepdims=True)), wanted)


@pytest.mark.parametrize("model", ["qwen3_vl", "qwen3_vl_moe"])
def test_the_text_model_is_qwen_3s(generated: Path, tmp_path: Path, model: str) -> None:
    """The same arrays as from its tensors alone, spelled as Qwen 3's or Qwen 3 MoE's, of which MaxText's own bits are
    known.
    """
    config, _, state = read_model(generated, model)
    alone = config["text_config"] | {
        "model_type": "qwen3_moe" if "moe" in model else "qwen3",
        "tie_word_embeddings": config["tie_word_embeddings"],
    }
    if is_tied := config["tie_word_embeddings"]:
        del state["lm_head.weight"]
    text = {
        name.replace("model.language_model.", "model."): values
        for name, values in state.items()
        if "visual" not in name
    }
    wanted = converted(save(tmp_path / "alone", alone, unfuse(alone, text)), tmp_path / "wanted", *UNSCANNED)
    assert ("decoder.logits_dense.kernel" in wanted) != is_tied
    assert_same_bits(converted(generated / "models" / model, tmp_path / "made", *UNSCANNED), wanted)


def test_the_outer_flag_says_whether_the_head_is_tied(generated: Path) -> None:
    """The inner one, which transformers doesn't use, says the opposite in both."""
    for model, tied in {"qwen3_vl": True, "qwen3_vl_moe": False}.items():
        config, tensors, _ = read_model(generated, model)
        assert (config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"]) == (tied, not tied)
        assert ("lm_head.weight" in tensors) != tied


@pytest.mark.parametrize("embed_is_two_experts", [False, True])
def test_experts_in_every_spelling(generated: Path, tmp_path: Path, embed_is_two_experts: bool) -> None:
    """As the hub's files fuse them, as transformers v5 saves them, and one tensor each; also where a tensor alone would
    fit two ways.
    """
    config, tensors, state = read_model(generated, "qwen3_vl_moe")
    fused = [f"{HF}gate_up_proj", f"{HF}down_proj"]
    assert_same_bits({name: tensors[name] for name in fused}, {name: state[name].swapaxes(1, 2) for name in fused})
    if embed_is_two_experts:
        config["text_config"]["moe_intermediate_size"] = 32
        assert config["text_config"]["hidden_size"] == 64
        rng = np.random.default_rng(0)
        for name in [name for name in state if ".experts." in name]:
            values = rng.standard_normal((5, 64, 32) if "down" in name else (5, 64, 64)).astype(state[name].dtype)
            state[name], tensors[name] = values, np.ascontiguousarray(values.swapaxes(1, 2))
    spellings = {"hub": tensors, "v5": state, "apart": unfuse({"model_type": "qwen3_vl_moe"}, state)}
    assert f"{HF}4.up_proj.weight" in spellings["apart"]
    made = {
        name: converted(save(tmp_path / name, config, spelled), tmp_path / f"from_{name}", *UNSCANNED)
        for name, spelled in spellings.items()
    }
    for arrays in made.values():
        assert_same_bits(arrays, made["hub"])
    gate, up = np.split(state[f"{HF}gate_up_proj"].swapaxes(1, 2), 2, axis=-1)
    wanted = {"wi_0": gate, "wi_1": up, "wo": state[f"{HF}down_proj"].swapaxes(1, 2)}
    assert_same_bits({name: made["v5"][f"decoder.layers_0.moe_block.{name}"] for name in wanted}, wanted)


def test_experts_of_neither_shape_are_refused(
    generated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One tensor transposed and the other not is no spelling."""
    config, tensors, state = read_model(generated, "qwen3_vl_moe")
    folder = save(tmp_path / "in", config, tensors | {f"{HF}down_proj": state[f"{HF}down_proj"]})
    assert call("plan", "--source", folder, *UNSCANNED) != 0
    printed = capsys.readouterr()
    assert re.search(rf"shape: {re.escape(HF)}down_proj: \(5, 64, 48\)", printed.out + printed.err)


def cosmos3_layers(tensors: Arrays) -> Arrays:
    """The layers' tensors of a Cosmos 3 whose attention has diffusers' names, and a generator beside the reasoner."""
    attention = dict(q_proj="to_q", k_proj="to_k", v_proj="to_v", o_proj="to_out", q_norm="norm_q", k_norm="norm_k")
    generator = dict(
        to_q="add_q_proj", to_k="add_k_proj", to_v="add_v_proj", to_out="to_add_out", norm_q="norm_added_q", norm_k="norm_added_k",
        mlp="mlp_moe_gen", input_layernorm="input_layernorm_moe_gen", post_attention_layernorm="post_attention_layernorm_moe_gen",
    )  # fmt: skip

    def respell(name: str, names: dict[str, str]) -> str:
        return ".".join(names.get(part, part) for part in name.split("."))

    reasoner = {respell(name, attention): values for name, values in tensors.items()}
    beside = {respell(name, generator): values for name, values in reasoner.items() if name.startswith("layers.")}
    others = (
        "norm_moe_gen.weight",
        "proj_in.bias",
        "time_embedder.linear_1.weight",
        "audio_modality_embed",
        "action_proj_in.fc.weight",
    )
    assert not beside.keys() & reasoner.keys()
    return reasoner | beside | dict.fromkeys(others, tensors["norm.weight"])


@pytest.mark.parametrize("kind", ["cosmos3_omni", "weaver_omni"])
def test_a_reasoner_beside_its_generator(generated: Path, tmp_path: Path, kind: str) -> None:
    """As the hub's files have Cosmos 3, and as MaxText's mapping of Weaver wants it; the outer flag needn't be said."""
    folder = generated / "models" / "cosmos3"
    config, tensors, _ = read_model(generated, "cosmos3")
    del config["tie_word_embeddings"]
    config["text_config"]["tie_word_embeddings"] = True
    hub = save(tmp_path / "hub", config | {"model_type": kind}, cosmos3_layers(tensors))
    arrays = converted(hub, tmp_path / "made", *UNSCANNED, *TOWER)
    assert_same_bits(arrays, converted(folder, tmp_path / "wanted", *UNSCANNED, *TOWER))
    assert "decoder.logits_dense.kernel" in arrays
    assert call("plan", "--source", hub, *UNSCANNED, *TOWER, "--json", tmp_path / "plan.json") == 0
    dropped = json.loads((tmp_path / "plan.json").read_text())["dropped"]
    assert set(dropped.values()) == {"of the generator; MaxText has the reasoner"}
    assert len(dropped) == len([name for name in tensors if name.startswith("layers.")]) + 5


def test_a_generator_is_no_part_of_qwen_3_vl(
    generated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There its tensors would be a surprise."""
    config, tensors, _ = read_model(generated, "qwen3_vl")
    norm = tensors["model.language_model.norm.weight"]
    folder = save(tmp_path / "in", config, tensors | {"norm_moe_gen.weight": norm})
    assert call("plan", "--source", folder, *UNSCANNED) != 0
    printed = capsys.readouterr()
    assert "unused: norm_moe_gen.weight" in printed.out + printed.err


def test_the_tower_is_left_out_by_name(generated: Path, tmp_path: Path) -> None:
    _, tensors, _ = read_model(generated, "qwen3_vl")
    folder = generated / "models" / "qwen3_vl"
    assert call("plan", "--source", folder, *UNSCANNED, "--json", tmp_path / "plan.json") == 0
    tower = [name for name in tensors if name.startswith("model.visual.")]
    assert len(tower) == 57
    dropped = json.loads((tmp_path / "plan.json").read_text())["dropped"]
    assert dropped == dict.fromkeys(tower, "vision tower, convert it with --multimodal true")


def test_scanned_is_refused(generated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """MaxText refuses it; the message says what to do."""
    assert call("plan", "--source", generated / "models" / "qwen3_vl") != 0
    printed = capsys.readouterr()
    assert "MaxText has qwen3_vl models unscanned only; convert with --scan_layers false" in printed.out + printed.err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(text_config=dict(mlp_only_layers=[0])), "mixes dense and MoE layers"),
        (dict(text_config=dict(decoder_sparse_step=2)), "mixes dense and MoE layers"),
        (dict(text_config=dict(num_local_experts=0)), "config.json has no 'num_experts'"),
        (
            dict(text_config=dict(moe_intermediate_size="48")),
            "'moe_intermediate_size' should be a positive integer, but is '48'",
        ),
        (
            dict(vision_config=dict(deepstack_visual_indexes=None)),
            "'deepstack_visual_indexes' should be a list of the tower's layers, but is None",
        ),
        (
            dict(vision_config=dict(deepstack_visual_indexes=[0, 3])),
            "'deepstack_visual_indexes' should be a list of the tower's layers, but is [0, 3]",
        ),
        (dict(vision_config=dict(patch_size=[4, 4])), "'patch_size' should be a positive integer, but is [4, 4]"),
        (dict(vision_config=dict(depth=True)), "'depth' should be a positive integer, but is True"),
    ],
)
def test_configs_that_maxtext_has_no_model_for(generated: Path, change: dict, message: str) -> None:
    config, layout = read_config(generated / "models" / "qwen3_vl_moe"), Layout(scan=False, multimodal=True)
    expand(FAMILY, Config(config), layout)
    with pytest.raises(ConfigError, match=re.escape(message)):
        expand(FAMILY, Config(config | {part: config[part] | fields for part, fields in change.items()}), layout)
