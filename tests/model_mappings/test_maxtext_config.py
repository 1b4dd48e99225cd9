"""What MaxText must be told: against MaxText's own files, back again, and against transformers' configuration classes."""

from __future__ import annotations

import copy
import math
import types
from typing import Any

import pytest
import yaml
from facts import config_of, load_headers, load_trees

from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.config_json import config_json
from weightbeam.model_mappings.configuration import MaxTextConfigError
from weightbeam.model_mappings.maxtext_config import is_idle, maxtext_config, scalar
from weightbeam.model_mappings.maxtext_models import differences, keys_of, models
from weightbeam.model_mappings.naming import ModelNaming, name_model
from weightbeam.model_mappings.plan import expand
from weightbeam.model_mappings.registry import UnknownFamilyError, family_by_config
from weightbeam.model_mappings.rope import LLAMA3

TREES = {tree.model: config_of(tree) for tree in load_trees().values()}
# a config.json of sizes alone
BARE = {
    "llama2-7b",
    "llama2-70b",
    "llama3-8b",
    "llama3.3-70b",
    "mistral-7b",
    "kimi-k2-1t",
    "llama4-17b-16e",
    "llama4-17b-128e",
}
WHOLE_LOSS = {"indexer_sparse_training": (True, False)}  # MaxText's default warms up indexers, with no other loss
ON_PURPOSE = {  # what is made and what MaxText's file says, with the reason
    # the release routes in groups, MaxText's file leaves them off
    "deepseek3-671b": {"n_routing_groups": (8, -1), "topk_routing_group": (4, -1)},
    "deepseek3.2-671b": {"n_routing_groups": (8, -1), "topk_routing_group": (4, -1)} | WHOLE_LOSS,
    # of the config.json that MaxText has for them; the releases say 1,000,000
    "gemma3-4b": {"rope_max_timescale": (10_000, 1_000_000)},
    "gemma3-27b": {"rope_max_timescale": (10_000, 1_000_000)},
    "olmo3-7b": {"rope_type": ("default", "yarn")},  # likewise: the release has YaRN
    "qwen3-4b-thinking-2507": {"rope_max_timescale": (1_000_000, 5_000_000)},  # likewise
    "qwen3-omni-30b-a3b": {"position_id_per_seconds": (25, 13)},  # likewise: transformers' defaults
    # with a factor of 1 nothing depends on it
    "glm5.1-744b": {"original_max_position_embeddings": (202752, 4096)} | WHOLE_LOSS,
    "glm5.2-744b": {"original_max_position_embeddings": (1048576, 4096)} | WHOLE_LOSS,
    "deepseek4-284b": WHOLE_LOSS,
    # a test model with the large one's config.json
    "deepseek4-tiny": WHOLE_LOSS | {
        "qk_rope_head_dim": (64, 32), "indexer_topk": (512, 16), "sliding_window_size": (128, 32),
        "routed_scaling_factor": (1.5, 1), "norm_topk_prob": (True, False), "original_max_position_embeddings": (65536, 4096),
    },
}  # fmt: skip


def made_for(config, model=None, **layout):
    config = Config(config)
    family = family_by_config(config)
    return maxtext_config(family, config, Layout(**layout), ModelNaming(model) if model else name_model(family, config))


@pytest.mark.parametrize("model", sorted(TREES.keys() - BARE))
def test_as_maxtext_says(model):
    """Key by key what MaxText's file of the model says, but for what is listed above."""
    made = made_for(TREES[model], model)
    found = {key: pair for key, pair in differences(made.settings, model).items() if not is_idle(key, made.settings)}
    assert found == ON_PURPOSE.get(model, {})
    assert set(made.settings) - set(keys_of(model) or {}) <= {"scan_layers", "use_multimodal", "use_audio", "attention"}


TINY = {name: header.config for name, header in load_headers().items()}


@pytest.mark.parametrize("name", TINY)
def test_there_and_back(name):
    """config.json → maxtext.yml → config.json → maxtext.yml: what matters to the forward pass of the text stays."""
    made = made_for(TINY[name])
    read = yaml.safe_load(made.to_yaml())
    assert read == made.to_dict() == dict(made)
    back = config_json(read)
    again = made_for(back.config, made.model)
    # its rows don't say how many of them are tokens
    padded = {"vocab_size"} if made.settings["decoder_block"] in ("gemma", "gemma2") else set()
    for key in again.settings.keys() - padded - {"scan_layers"}:
        assert again.settings[key] == made.settings[key], key
    assert all(
        key.endswith(("_for_vit", "_for_audio"))
        or key
        in ("vision_encoder_block", "vision_output_length", "use_mrope", "mrope_section", "position_id_per_seconds")
        for key in back.unknown
    )


@pytest.mark.parametrize("name", TINY)
def test_transformers_reads_what_is_made(name):
    """transformers' class for the `model_type` takes the fields, and holds them as they were written."""
    from transformers import AutoConfig

    config = config_json(made_for(TINY[name])).config
    if config["model_type"] in ("deepseek_v4",):
        return  # its class takes other spellings
    built = AutoConfig.for_model(**config).to_dict()
    for field in (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "rms_norm_eps",
        "tie_word_embeddings",
        "num_experts_per_tok",
    ):
        assert built.get(field) == config.get(field, built.get(field)), field


def test_a_key_that_a_version_lacks():
    """DeepSeek V4's indexer is asked for in 0.2.5 alone: e591f30 refuses it beside compressed attention. A model with an
    indexer is trained by its own loss in both.
    """
    made = {version: made_for(TREES["deepseek4-284b"], maxtext=version) for version in ("0.2.5", "e591f30")}
    assert {version: keys.settings.get("use_indexer") for version, keys in made.items()} == {
        "0.2.5": True,
        "e591f30": None,
    }
    told = {version: [limit for limit in keys.limits if "load" in limit] for version, keys in made.items()}
    assert {version: len(limits) for version, limits in told.items()} == {"0.2.5": 0, "e591f30": 1}
    assert all(keys.flags()["indexer_sparse_training"] for keys in made.values())
    assert "indexer_sparse_training" not in made_for(TREES["deepseek3-671b"]).settings


@pytest.mark.parametrize(
    ("axis", "scan", "is_told"), [(0, True, False), (1, True, False), (2, True, True), (2, False, False)]
)
def test_layers_that_flax_cant_stack_are_told(axis, scan, is_told):
    made = made_for(TREES["qwen3-8b"], scan=scan, scan_axis=axis)
    assert any("Flax can't stack norms" in limit for limit in made.limits) == is_told


def test_overrides_are_what_differs():
    """A model of MaxText's needs its name and the layout; another one its sizes too, in one line for a shell."""
    same = made_for(TREES["qwen3-8b"])
    assert same.command_line() == "scan_layers=true model_name=qwen3-8b"
    other = made_for(
        TREES["qwen3-8b"] | {"hidden_size": 96, "rms_norm_eps": 3e-5, "hidden_act": "gelu_pytorch_tanh"},
        scan=False,
        scan_axis=0,
    )
    line = other.command_line()
    for part in (
        "base_emb_dim=96",
        "normalization_layer_epsilon=3.0e-05",
        "'mlp_activations=[gelu,linear]'",
        "scan_layers=false",
        "param_scan_axis=0",
    ):
        assert f" {part}" in f" {line}"
    assert "head_dim" not in line


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LINEAR = {"rope_type": "linear", "factor": 4.0}
OF_64 = {"rope_type": "default", "partial_rotary_factor": 64 / 512}
TANH = {"hidden_activation": None}
PROPORTIONAL = {"rope_type": "proportional"}
PLAIN_V4 = TREES["deepseek4-284b"] | {
    "rope_scaling": None,
    "rope_parameters": None,
}  # the release has YaRN in its compressed layers


def with_rope(model: str, rope: dict[str, object] | None, **others: object) -> dict[str, object]:
    """A model with other `rope_parameters` of its text."""
    return TREES[model] | {"text_config": TREES[model]["text_config"] | {"rope_parameters": rope} | others}


@pytest.mark.parametrize(
    ("config", "model", "words"),
    [
        (TREES["qwen3-30b-a3b"] | {"norm_topk_prob": False}, None, ["norm_topk_prob", "no way round"]),
        (TREES["llama3.1-70b"], "llama3.3-70b", ["rope_type is 'llama3'", "--maxtext_model llama3.1-70b", "rope_type=llama3.1"]),
        (TREES["llama3.1-8b"] | {"rope_parameters": TREES["llama3.1-8b"]["rope_parameters"] | {"factor": 32.0}}, "llama3.1-8b", ["factor", "built in"]),
        (TREES["mixtral-8x7b"] | {"sliding_window": 4096}, None, ["sliding_window is 4096"]),
        (TREES["mixtral-8x7b"] | {"sliding_window": 0}, None, ["sliding_window is 0"]),
        (TREES["olmo3-7b"] | {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 5e5}, "full_attention": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "rope_theta": 5e5}}}, "olmo3-7b", ["YaRN"]),
        (TREES["qwen3-8b"] | {"use_sliding_window": True}, None, ["use_sliding_window"]),
        (TREES["gpt-oss-20b"] | {"attention_bias": False}, None, ["attention_bias is False", "leave them out"]),
        (TREES["qwen2.5-7b"] | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6}}, None, ["rope_type is 'dynamic'"]),
        (TREES["llama2-7b"] | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, None, ["rope_type is 'dynamic'"]),
        (TREES["llama2-7b"] | {"rope_scaling": {"type": "yarn", "factor": 2.5}, "max_position_embeddings": 4096}, None, ["rope_factor is 2.5"]),
        (TREES["qwen3-8b"] | {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.5}}, None, ["rope_max_timescale is 10000.5", "whole numbers"]),
        (TREES["gpt-oss-20b"] | {"rope_parameters": TREES["gpt-oss-20b"]["rope_parameters"] | {"beta_fast": 32.5}}, "gpt-oss-20b", ["beta_fast is 32.5"]),
        (with_rope("gemma3-4b", None, rope_scaling={"type": "linear", "factor": 8.0}, **TANH), None, ["'linear' by the old key 'type'"]),
        (with_rope("gemma3-4b", LINEAR, **TANH), None, ["'linear' of no kind of layers"]),
        (TREES["olmo3-7b"] | {"rope_parameters": {"type": "linear", "factor": 8.0}}, None, ["'linear' of no kind of layers"]),
        (TREES["qwen3-next-80b-a3b"] | {"rope_scaling": YARN}, None, ["rope_type is 'yarn'"]),
        (with_rope("qwen3.5-35b-a3b", YARN), None, ["rope_type is 'yarn'"]),
        (with_rope("qwen3-vl-2b", YARN), None, ["rope_type is 'yarn'"]),
        (with_rope("gemma3-4b", {"sliding_attention": {}, "full_attention": YARN}, **TANH), None, ["'yarn' in full_attention layers"]),
        (with_rope("gemma3-4b", {"sliding_attention": LINEAR, "full_attention": LINEAR}, **TANH), None, ["'linear' in sliding_attention layers"]),
        (with_rope("gemma4-31b", {"sliding_attention": LINEAR, "full_attention": PROPORTIONAL}), None, ["'linear' in sliding_attention layers"]),
        (with_rope("gemma4-31b", {"sliding_attention": {}, "full_attention": {}}), None, ["'default' in full_attention layers", "proportional"]),
        (TREES["olmo3-7b"] | {"rope_scaling": YARN}, "olmo3-7b", ["YaRN"]),
        (TREES["olmo3-7b"] | {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 5e5}}}, None, ["10000", "500000"]),
        (TREES["olmo3-7b"] | {"rope_parameters": None, "rope_scaling": None, "rope_theta": 1e4}, None, ["10000", "500000"]),
        (TREES["deepseek4-284b"], None, ["'yarn' in compress layers"]),
        (PLAIN_V4 | {"rope_parameters": {"main": OF_64 | LINEAR, "compress": OF_64}}, None, ["'linear' in main layers"]),
        (PLAIN_V4 | {"rope_parameters": {"main": OF_64 | {"partial_rotary_factor": 0.5}, "compress": OF_64}}, None, ["main turns 256 of", "compress 64"]),
        (PLAIN_V4 | {"hc_eps": 1e-3}, None, ["hc_eps"]),
        (PLAIN_V4 | {"scoring_func": "sigmoid"}, None, ["scoring_func"]),
        (PLAIN_V4 | {"swiglu_limit": 7.0}, None, ["swiglu_limit is 7.0", "shared expert"]),
        (TREES["deepseek2-16b"] | {"rms_norm_eps": 1e-5}, None, ["rms_norm_eps is 1e-05", "latents"]),
        (TREES["deepseek3-671b"] | {"rms_norm_eps": 1e-5}, None, ["rms_norm_eps is 1e-05", "latents"]),
        (TREES["deepseek3.2-671b"] | {"rms_norm_eps": 1e-5}, None, ["rms_norm_eps is 1e-05", "latents"]),
        ({name: said for name, said in TREES["glm5.1-744b"].items() if name != "rms_norm_eps"}, None, ["rms_norm_eps is 1e-05", "latents"]),
        ({name: said for name, said in TREES["mistral-7b"].items() if name != "sliding_window"}, None, ["sliding_window is 4096"]),
        (TREES["qwen3-8b"] | {"is_causal": False}, None, ["is_causal is False"]),
        (with_rope("gemma4-31b", None, use_bidirectional_attention="all"), None, ["use_bidirectional_attention is 'all'"]),
        (TREES["gemma2-2b"] | {"rms_norm_eps": 1e-5}, None, ["rms_norm_eps"]),
        (TREES["gemma3-4b"] | {"text_config": TREES["gemma3-4b"]["text_config"] | {"rms_norm_eps": 3e-6, "hidden_activation": None}}, None, ["rms_norm_eps"]),
        (TREES["gemma4-31b"] | {"text_config": TREES["gemma4-31b"]["text_config"] | {"rms_norm_eps": 3e-6}}, None, ["rms_norm_eps"]),
        (TREES["deepseek2-16b"] | {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}, None, ["group_limited_greedy"]),
        (TREES["deepseek3-671b"] | {"rope_interleave": False}, None, ["rope_interleave is False"]),
        (TREES["deepseek3-671b"] | {"norm_topk_prob": None}, None, ["norm_topk_prob is False"]),
        (TREES["deepseek3-671b"] | {"n_group": 7}, None, ["7 groups of experts alike"]),
        (TREES["deepseek3-671b"] | {"topk_group": 0}, None, ["topk_group is 0"]),
        (TREES["deepseek3-671b"] | {"topk_group": 9}, None, ["chooses 9 of 8 groups"]),
        (TREES["deepseek3-671b"] | {"n_group": None, "n_routed_experts": 12}, None, ["n_routed_experts is 12", "8 groups"]),
        (TREES["qwen3-30b-a3b"] | {"num_experts_per_tok": 999}, None, ["num_experts_per_tok is 999, of 128 experts"]),
        (TREES["llama4-17b-16e"] | {"text_config": TREES["llama4-17b-16e"]["text_config"] | {"rope_scaling": LINEAR}}, None, ["rope_type is 'linear'"]),
    ],
)  # fmt: skip
def test_what_maxtext_cannot_express(config, model, words):
    """Said, with what it does to the logits; the configuration as it should be says nothing, DeepSeek V4's but one thing."""
    (limit,) = set(made_for(config, model).limits) - set(made_for(PLAIN_V4).limits)
    assert all(word in limit for word in words)


@pytest.mark.parametrize(
    ("model", "field", "key", "value"),
    [
        ("mixtral-8x7b", "rms_norm_eps", "normalization_layer_epsilon", 1e-5),
        ("deepseek4-284b", "num_key_value_heads", "base_num_kv_heads", 1),
    ],
)
def test_defaults_that_are_not_the_others(model: str, field: str, key: str, value: float) -> None:
    """Of a field that isn't there: transformers' own."""
    config = {name: said for name, said in TREES[model].items() if name != field}
    assert made_for(config, model)[key] == value
    from transformers import AutoConfig

    assert getattr(AutoConfig.for_model(config["model_type"]), field) == value


@pytest.mark.parametrize(
    ("said", "scaled", "told"),
    [
        ({}, True, False),
        ({"attention_factor": 1.0}, False, False),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, False, False),
        ({"mscale": 0.707, "mscale_all_dim": 0.5}, False, True),
        ({"attention_factor": 1.5}, False, True),
        ({"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.5}, False, True),
        ({"mscale_all_dim": 1.0}, True, False),
    ],
)
@pytest.mark.parametrize("model", ["qwen3-8b", "gpt-oss-20b", "olmo3-7b", "deepseek3-671b"])
def test_what_yarn_multiplies_by(model: str, said: dict[str, float], scaled: bool, told: bool) -> None:
    """transformers' own number is MaxText's, or 1, which MaxText has, too; or it is told."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = YARN | {"rope_theta": 1e4} | said
    config = TREES[model] | {
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), rope) if model == "olmo3-7b" else rope
    }
    made = made_for(config | {"rope_scaling": None}, model)
    assert (made["rope_attention_scaling"], any("attention" in limit for limit in made.limits)) == (scaled, told)
    read = AutoConfig.for_model(config["model_type"], rope_parameters=config["rope_parameters"])
    layers = {"layer_type": "full_attention"} if model == "olmo3-7b" else {}
    theirs = ROPE_INIT_FUNCTIONS["yarn"](read, "cpu", **layers)[1]
    usual = 0.1 * math.log(4) + 1
    assert told or math.isclose(theirs, usual if scaled else 1)
    if not told:
        assert (
            made_for(config_json(dict(made)).config | {"max_position_embeddings": 4096}, model)[
                "rope_attention_scaling"
            ]
            == scaled
        )


@pytest.mark.parametrize("value", [math.nan, math.inf, -5.0, 0.0])
@pytest.mark.parametrize("field", ["rope_theta", "rms_norm_eps"])
def test_numbers_that_nobody_means_are_refused(field: str, value: float) -> None:
    """1e400 is infinity to JSON's readers, and no configuration says it back."""
    with pytest.raises(ConfigError, match=field):
        made_for(TREES["qwen3-8b"] | {"rope_parameters": None, field: value})
    if not math.isfinite(value):
        with pytest.raises(MaxTextConfigError, match="rope_max_timescale"):
            config_json(dict(made_for(TREES["qwen3-8b"])) | {"rope_max_timescale": value})


def test_deepseeks_groups_and_truncation() -> None:
    """Without a word there are 8 groups, as in transformers' class; YaRN's bounds aren't always whole numbers."""
    config = {name: said for name, said in TREES["deepseek3-671b"].items() if name not in ("n_group", "topk_group")}
    made = made_for(config, "deepseek3-671b")
    assert (made["n_routing_groups"], made["topk_routing_group"]) == (8, 4)
    rope = YARN | {"rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0}
    for said, truncated, told in (({}, True, 0), ({"truncate": False}, False, 0), ({"factor": 2.5}, True, 1)):
        made = made_for(config | {"rope_scaling": None, "rope_parameters": rope | said}, "deepseek3-671b")
        assert (made["rope_truncate"], len(made.limits)) == (truncated, told)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("deepseek4-284b", {"rope_theta": 0.0}),
        ("deepseek4-284b", {"compress_rope_theta": -1.0}),
        ("gemma3-4b", {"text_config": {"rope_local_base_freq": -1.0}}),
        ("gemma3-4b", {"text_config": {"rope_local_base_freq": 0}}),
        ("gemma3-4b", {"text_config": {"rope_parameters": {"sliding_attention": {"rope_theta": 0.0}}}}),
        ("gemma4-31b", {"text_config": {"rope_parameters": {"sliding_attention": {"rope_theta": -1.0}}}}),
    ],
)
def test_bases_that_nobody_means_are_refused(model: str, said: dict[str, Any]) -> None:
    """Of each kind of layers."""
    config = TREES[model] | {"rope_scaling": None} | said
    if "text_config" in said:
        config["text_config"] = TREES[model]["text_config"] | {"rope_parameters": None} | said["text_config"]
    else:
        config["rope_parameters"] = None
    with pytest.raises(ConfigError):
        made_for(config, model)


@pytest.mark.parametrize("model", ["deepseek3-671b", "deepseek3.2-671b", "glm5.1-744b"])
def test_groups_that_are_not_said(model: str) -> None:
    """8 of which 4 are chosen in DeepSeek's classes, one in GLM's, which share the lines."""
    from transformers import AutoConfig

    config = {name: said for name, said in TREES[model].items() if name not in ("n_group", "topk_group")}
    theirs = AutoConfig.for_model(config["model_type"])
    wanted = (theirs.n_group, theirs.topk_group) if theirs.n_group > 1 else (-1, -1)
    assert (made_for(config, model)["n_routing_groups"], made_for(config, model)["topk_routing_group"]) == wanted


def test_one_rotary_embedding_in_two_spellings() -> None:
    """OLMo 3's two kinds of layers turn alike, whatever a config says besides."""
    for rope in ({"type": "default"}, {"rope_type": "default", "partial_rotary_factor": 1.0}):
        assert not made_for(TREES["olmo3-7b"] | {"rope_scaling": rope, "rope_parameters": None}).limits


def test_two_kinds_of_multimodal_rotary_embeddings() -> None:
    """Qwen 2.5 VL's word for it is Qwen 3 VL's embedding, too, with the base of its class where nothing is said."""
    made = made_for(with_rope("qwen3-vl-2b", {"type": "mrope", "mrope_section": [24, 20, 20]}), "qwen3-vl-2b")
    assert not made.limits
    assert (made["rope_type"], made["rope_max_timescale"]) == ("default", 500_000)


WRAPPED = [name for name, config in TINY.items() if "text_config" in config.get("thinker_config", config)]


@pytest.mark.parametrize("inner", [None, True, False])
@pytest.mark.parametrize("outer", [None, True, False])
@pytest.mark.parametrize("name", WRAPPED)
def test_a_head_that_two_fields_are_about(name: str, outer: bool | None, inner: bool | None) -> None:
    """MaxText is told what the table does, whatever the flags around a text model and in it say."""
    config = copy.deepcopy(TINY[name])
    around = config.get("thinker_config", config)
    for part, said in ((around, outer), (around["text_config"], inner)):
        part.pop("tie_word_embeddings", None)
        part |= {} if said is None else {"tie_word_embeddings": said}
    family = family_by_config(Config(config))
    assert family is not None
    copies = family.copies(Config(config), Layout())
    assert made_for(config)["logits_via_embedding"] == any(name.endswith("lm_head.weight") for name in copies)


def test_a_base_that_is_not_a_number_is_shown() -> None:
    with pytest.raises(ConfigError, match=r"'rope_parameters.rope_theta' is -1, "):
        made_for(TREES["qwen3-8b"] | {"rope_parameters": {"rope_theta": -1}})


def test_yarn_of_no_context() -> None:
    """transformers takes the default of the model's class."""
    config = {name: said for name, said in TREES["qwen3-8b"].items() if name != "max_position_embeddings"}
    made = made_for(config | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}})
    assert made["original_max_position_embeddings"] == 32_768


@pytest.mark.parametrize(
    ("model", "base"), [("qwen3-vl-2b", 500_000), ("qwen3-vl-30b-a3b", 500_000), ("qwen3-omni-30b-a3b", 1_000_000)]
)
def test_the_base_that_a_class_has(model: str, base: int) -> None:
    """Where `config.json` says none: of Qwen 3 VL and Omni that of transformers' classes, not 10,000."""
    config = copy.deepcopy(TREES[model])
    text = config.get("thinker_config", config)["text_config"]
    for name in ("rope_theta", "rope_scaling", "rope_parameters"):
        text.pop(name, None)
    assert made_for(config, model)["rope_max_timescale"] == base


def test_the_base_of_compressed_layers() -> None:
    """DeepSeek V4 has two bases; where `rope_parameters` has both kinds, transformers 5.23.0 doesn't look at the others."""
    nested = {"main": {"rope_theta": 1e5}, "compress": {"rope_theta": 1e6}}
    for said in ({"rope_parameters": nested}, {"rope_parameters": {}, "rope_theta": 1e5, "compress_rope_theta": 1e6}):
        made = made_for(PLAIN_V4 | said)
        assert (made["rope_max_timescale"], made["compressed_rope_max_timescale"]) == (100_000, 1_000_000)
        back = config_json(dict(made)).config
        assert (back["rope_theta"], back["compress_rope_theta"]) == (1e5, 1e6)
    unsaid = {"rope_parameters": {"main": {}, "compress": {}}, "rope_theta": 1e5, "compress_rope_theta": 1e6}
    assert made_for(PLAIN_V4 | unsaid)["compressed_rope_max_timescale"] == 100_000


def test_no_schedule_of_a_mesh_is_taken_for_a_cut() -> None:
    """MaxText has DeepSeek V3 a second time, for a schedule that splits batches, and fails with it elsewhere."""
    cut = TREES["deepseek3-671b"] | dict(n_routed_experts=16, num_hidden_layers=4, vocab_size=8192)
    assert made_for(cut).model == "deepseek3-671b"


def test_kimi_runs_as_deepseek():
    """MaxText's router takes Kimi K2's scores as they should be only under another name."""
    config = TREES["kimi-k2-1t"] | dict(
        model_type="kimi_k2",
        num_experts_per_tok=8,
        routed_scaling_factor=2.827,
        rope_theta=50_000.0,
        max_position_embeddings=131_072,
    )
    config |= {
        "rope_scaling": dict(
            type="yarn",
            factor=32.0,
            beta_fast=1.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            original_max_position_embeddings=4096,
        )
    }
    made = made_for(config)
    assert made.model == "deepseek3-671b"
    assert "kimi-k2-1t" in made.notes[0]
    line = made.command_line()
    for part in (
        "rope_max_timescale=50000",
        "rope_factor=32",
        "beta_fast=1",
        "max_position_embeddings=131072",
        "routed_scaling_factor=2.827",
        "num_experts=384",
    ):
        assert f" {part}" in f" {line}"


@pytest.mark.parametrize(("model", "head"), [("qwen3-vl-2b", 20), ("qwen3-omni-30b-a3b", 16), ("qwen3.5-35b-a3b", 72)])
def test_sections_are_as_many_as_frequencies_turn(model, head):
    """MaxText refuses others; transformers takes the release's sections for heads of any size, and these are what it
    makes of them.
    """
    import torch
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    config = copy.deepcopy(TREES[model])
    text = config.get("thinker_config", config)["text_config"]
    text["head_dim"] = head
    said, half = ([11, 11, 10], head // 8) if "3.5" in model else ([24, 20, 20], head // 2)
    axis = torch.arange(3.0)[:, None, None, None].expand(3, 1, 1, half).clone()  # 0 for time, 1 for height, 2 for width
    taken = Qwen3VLTextRotaryEmbedding.recomposition_frequencies(types.SimpleNamespace(mrope_section=said), axis)[
        ..., :half
    ]
    assert made_for(config, model).settings["mrope_section"] == [int((taken == kind).sum()) for kind in range(3)]


@pytest.mark.parametrize(("rows", "tokens"), [(256_128, 256_000), (256, 256), (32_000, 32_000)])
@pytest.mark.parametrize("model", ["gemma-2b", "gemma2-2b"])
def test_no_token_of_a_pretrained_gemma_is_lost(model, rows, tokens):
    """MaxText's 256,128 rows are the releases' 256,000 tokens; of other rows all count."""
    assert config_json(keys_of(model) | {"model_name": model, "vocab_size": rows}).config["vocab_size"] == tokens


def test_groups_that_change_nothing():
    """As many groups as experts are chosen: the best experts lie in the best groups, so that MaxText chooses the same
    ones.
    """
    config = TREES["deepseek2-16b"] | {
        "topk_method": "group_limited_greedy",
        "n_group": 8,
        "topk_group": 6,
        "num_experts_per_tok": 6,
    }
    assert not made_for(config).limits
    assert made_for(config | {"topk_group": 5}).limits


def test_null_is_no_cap():
    """transformers caps nothing where Gemma 2's `config.json` says null, and as its class says where it says nothing."""
    given = {key: value for key, value in TREES["gemma2-2b"].items() if not key.endswith("softcapping")}
    caps = [
        made_for(given | said, "gemma2-2b").settings
        for said in ({}, dict(final_logit_softcapping=None, attn_logit_softcapping=None))
    ]
    assert [(each["final_logits_soft_cap"], each["attn_logits_soft_cap"]) for each in caps] == [(30, 50), (0, 0)]


def test_yarn_of_a_plain_model():
    """A factor of YaRN's in a Qwen's config.json becomes MaxText's keys."""
    config = TREES["qwen3-8b"] | {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    }
    keys = made_for(config).settings
    wanted = dict(
        rope_type="yarn",
        rope_factor=4,
        original_max_position_embeddings=32768,
        rope_interleave=False,
        rope_attention_scaling=True,
        rope_truncate=True,
    )
    assert {key: keys[key] for key in wanted} == wanted


@pytest.mark.parametrize(
    ("model", "change"),
    [
        ("qwen3-8b", {"hidden_act": "swish7"}),
        ("qwen3-8b", {"rms_norm_eps": "small"}),
        ("qwen3-8b", {"num_hidden_layers": None}),
        ("mixtral-8x7b", {"sliding_window": "wide"}),
    ],
)
def test_a_field_that_no_key_can_say(model, change):
    """Refused by the field's name."""
    with pytest.raises((ConfigError, UnknownFamilyError), match=next(iter(change))):
        made_for(TREES[model] | change)


def test_unknown_fields_are_named():
    """A field that nothing is about may matter: it is told."""
    config = TREES["qwen3-8b"] | {"logit_scale": 0.5, "bos_token_id": 1, "do_sample": False, "hf_quant_config.json": {}}
    assert made_for(config).unknown == ("logit_scale",)


LLAMA = {"decoder_block": "llama2", "head_dim": 64}
TIED = LLAMA | {"logits_via_embedding": True}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model_name": "qwen3-8b", "attention_sink": True}, "says attention_sink: True"),
        (LLAMA | {"final_logits_soft_cap": 30.0}, "says final_logits_soft_cap: 30"),
        (LLAMA | {"rope_min_timescale": 10}, "says rope_min_timescale: 10"),
        (TIED, "normalize_embedding_logits is True, not False"),
        ({"model_name": "qwen3-8b", "rope_type": "yarn"}, "rope_interleave is True, not False"),
        ({"model_name": "qwen3-8b", "rope_type": "llama3.1"}, "rope_type is 'llama3.1', not 'default'"),
        ({"model_name": "qwen3-8b", "rope_linear_scaling_factor": 4, "rope_type": "yarn", "rope_interleave": False},
         "says rope_linear_scaling_factor: 4"),
        ({"model_name": "llama9-1b"}, "llama9-1b"),
        ({"model_name": "qwen3-8b", "use_qk_norm": False}, "use_qk_norm is False, not True"),
        ({"decoder_block": "gpt3"}, "decoder_block"),
    ],
)  # fmt: skip
def test_a_key_that_no_field_says_is_refused(given: dict[str, Any], words: str) -> None:
    """The release would be another model's than the one that MaxText trained."""
    with pytest.raises(MaxTextConfigError, match=words):
        config_json(given)


@pytest.mark.parametrize(
    ("given", "model", "rope"),
    [
        (LLAMA | {"rope_linear_scaling_factor": 4}, None, {"rope_type": "linear", "factor": 4.0}),
        ({"model_name": "qwen3-8b", "rope_linear_scaling_factor": 2}, "qwen3-8b", {"rope_type": "linear", "factor": 2.0}),
        ({"model_name": "llama3.1-8b", "rope_type": "default"}, "llama3.1-8b", {"rope_type": "llama3", **LLAMA3}),
        ({"model_name": "llama3.1-8b", "rope_use_scale": False}, "llama3.1-8b", {"rope_type": "default"}),
        ({"model_name": "llama3.3-70b", "rope_type": "LLAMA3.1"}, "llama3.1-70b", {"rope_type": "llama3", **LLAMA3}),
        (LLAMA | {"rope_type": "llama3.1"}, "llama3.2-1b", {"rope_type": "llama3", **LLAMA3}),
        (TIED | {"normalize_embedding_logits": False}, None, {"rope_type": "default"}),
        (LLAMA | {"rope_truncate": False, "rope_factor": 8, "indexer_sparse_training": True}, None, {"rope_type": "default"}),
        ({"model_name": "qwen3-8b", "normalize_embedding_logits": True}, "qwen3-8b", {"rope_type": "default"}),
    ],
)  # fmt: skip
def test_what_maxtext_turns_by(given: dict[str, Any], model: str | None, rope: dict[str, Any]) -> None:
    """The rotary embedding that MaxText's layers take of name and keys, and the name under which the table reads them:
    Llama 3.1's pairs halves. A scale of tied logits is idle where they aren't.
    """
    made = config_json(given)
    assert made.model == model
    assert {key: value for key, value in made.config["rope_parameters"].items() if key != "rope_theta"} == rope


@pytest.mark.parametrize(
    "model",
    [
        "llama3.1-8b",
        "qwen3-8b",
        "qwen2.5-7b",
        "mixtral-8x7b",
        "gemma2-2b",
        "gpt-oss-20b",
        "deepseek3-671b",
        "qwen3-30b-a3b",
    ],
)
def test_a_file_of_maxtexts_is_enough(model):
    """A model that MaxText trained from scratch under one of its own names has a config.json of the release's sizes."""
    config, theirs = config_json({"model_name": model}).config, TREES[model]
    for field in (
        "model_type",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "tie_word_embeddings",
    ):
        assert config[field] == theirs[field], field
    scaling = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    if "llama3" in str(theirs):  # transformers reads no such rope_type without them
        assert {key: config["rope_parameters"].get(key) for key in scaling} == {
            key: theirs["rope_parameters"][key] for key in scaling
        }


@pytest.mark.parametrize("model", ["gemma-2b", "gemma2-2b", "gemma3-4b", "gemma4-26b"])
def test_an_epsilon_that_no_layer_takes(model: str) -> None:
    """Gemma's layers add 1e-6 whatever the configuration says."""
    made = config_json({"model_name": model, "normalization_layer_epsilon": 1e-5}).config
    assert made.get("text_config", made)["rms_norm_eps"] == 1e-6


def test_the_longest_context() -> None:
    """That of training where the configuration has base.yml's, which nothing depends on; YaRN's is its own."""
    trained = LLAMA | {"max_target_length": 2048}
    for given, longest in (
        (LLAMA, 163_840), (trained, 2048), (trained | {"max_position_embeddings": 4096}, 4096), (trained | {"max_position_embeddings": 163_840}, 2048),
        (trained | {"rope_type": "yarn", "rope_interleave": False}, 163_840),
    ):  # fmt: skip
        assert config_json(given).config["max_position_embeddings"] == longest


@pytest.mark.parametrize("model", [model for model in models() if model != "deepseek4-tiny"])
def test_a_runs_own_configuration(model: str) -> None:
    """MaxText resolves all keys, and writes null for a cap of 0, and `default` for the embedding that goes by the name."""
    said = {key: None if key.endswith("_soft_cap") and not value else value for key, value in keys_of(model).items()}
    rope = {"rope_type": "default"} if model.startswith("llama3.1") else {}
    whole = config_json(said | rope | {"model_name": model, "rope_min_timescale": 1})
    assert whole.config == config_json({"model_name": model}).config
    assert whole.unknown == ()


@pytest.mark.parametrize("model", [model for model in models() if model != "deepseek4-tiny"])
def test_the_table_takes_what_a_file_of_maxtexts_says(model):
    """No release is needed: `config.json` of MaxText's own model has every field that the table asks for."""
    config = Config(config_json({"model_name": model}).config)
    family = family_by_config(config)
    assert expand(family, config, Layout(scan="scanned" in family.layouts, model=model))


def test_numbers_as_yaml_reads_them():
    for value in (1e-06, 3e-5, 0.707, 1.5, 10_000, True, [1, 2], ["silu", "linear"], ""):
        assert yaml.safe_load(scalar(value)) == value
