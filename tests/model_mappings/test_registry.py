"""Which family a checkpoint belongs to, and what is said where it can't be settled."""

from __future__ import annotations

import re
from itertools import product

import pytest
from facts import load_headers, load_trees
from facts.tiny import CONFIGS

from weightbeam.model_mappings.config import Config, ConfigError, Layout
from weightbeam.model_mappings.family import rename
from weightbeam.model_mappings.plan import expand
from weightbeam.model_mappings.registry import FAMILIES, UnknownFamilyError, family_of, supported

LLAMA_31 = ("llama3.1-8b", "llama3.1-70b", "llama3.1-405b", "llama3.3-70b")


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("llama", "llama"),
        ("mistral", "llama"),
        ("qwen2", "qwen"),
        ("qwen3", "qwen"),
        ("qwen3_moe", "qwen"),
        ("mixtral", "mixtral"),
        ("deepseek_v2", "deepseek"),
        ("deepseek_v3", "deepseek"),
        ("deepseek_v32", "deepseek"),
        ("deepseek_v4", "deepseek_v4"),
        ("glm_moe_dsa", "glm5"),
        ("hy_v3", "hy3"),
        ("kimi_k2", "deepseek"),
        ("kimi_k25", "deepseek"),
        ("kimi_k3", "kimi_k3"),
        ("glm5_next", "glm5_next"),
        ("glm5_next_text", "glm5_next"),
        ("gpt_oss", "gpt_oss"),
        ("llama4", "llama4"),
        ("llama4_text", "llama4"),
        ("olmo3", "olmo3"),
        ("gemma2", "gemma2"),
        ("gemma3", "gemma3"),
        ("gemma3_text", "gemma3"),
        ("qwen3_vl", "qwen3_vl"),
        ("qwen3_vl_moe", "qwen3_vl"),
        ("cosmos3_omni", "qwen3_vl"),
        ("weaver_omni", "qwen3_vl"),
        ("qwen3_omni_moe", "qwen3_omni"),
        ("qwen3_omni_moe_thinker", "qwen3_omni"),
    ],
)
def test_family_by_model_type(kind, family):
    """`model_type` alone finds the family."""
    assert family_of(Config(model_type=kind)).name == family


KNOWN = {name: tree.config for name, tree in load_trees().items() if tree.config.get("model_type")} | {
    n: h.config for n, h in load_headers().items()
}


@pytest.mark.parametrize("name", KNOWN)
def test_one_family_fits(name):
    """Families that share a `model_type` tell themselves apart: the order of the registry means nothing."""
    config = Config(KNOWN[name])
    assert (
        len([family for family in FAMILIES if config["model_type"] in family.model_types and family.fits(config)]) == 1
    )


@pytest.mark.parametrize(
    ("kind", "what"), [("deepseek_v41", "Engram tables"), ("kimi_linear", "experts work in no latent")]
)
def test_what_a_model_is_that_has_no_table(kind, what):
    """In the message's first line, which is told again behind what is supported, and so is short."""
    with pytest.raises(UnknownFamilyError) as error:
        family_of(Config(model_type=kind))
    first, rest = str(error.value).split("\n", 1)
    assert first.startswith(f"no table for model_type {kind!r} of config.json: ")
    assert what in first
    assert len(first) < 300
    assert rest == supported()


@pytest.mark.parametrize("config", [{"model_type": "gpt2"}, {"model_type": "Llama"}, {"model_type": "gptj"}, {}])
def test_unknown_model_type(config):
    """Says what was found and everything that is supported."""
    with pytest.raises(UnknownFamilyError) as error:
        family_of(Config(config))
    text = str(error.value)
    assert f"model_type {config.get('model_type')!r}" in text
    assert supported() in text
    assert all(kind in supported() for family in FAMILIES for kind in family.model_types)


@pytest.mark.parametrize(
    ("kind", "model", "hint"),
    [
        ("llama", "qwen3-8b", "llama3.1-*"),
        ("qwen2", "qwen3-8b", "qwen2.5-*"),
        ("qwen3", "llama3.1-8b", "qwen3-*"),
        ("qwen3_moe", "qwen3-next-80b-a3b", "qwen3-coder-*"),
        ("mixtral", "mistral-7b", "mixtral-*"),
        ("mistral", "mixtral-8x7b", "mistral-*"),
        ("deepseek_v2", "deepseek3-671b", "deepseek2-*"),
        ("deepseek_v3", "deepseek3.2-671b", "deepseek3-*"),
        ("deepseek_v4", "deepseek3-671b", "deepseek4-*"),
        ("glm_moe_dsa", "deepseek3.2-671b", "glm5.*"),
        ("hy_v3", "deepseek3-671b", "hy3-*"),
        ("llama", "gpt3-175b", "llama2-*"),
        ("llama", "", "llama2-*"),
        ("llama", "my-llama3.1-8b", "llama2-*"),
        ("gemma2", "gemma-2b", "gemma2-*"),
        ("gemma3", "gemma2-2b", "gemma3-4b, gemma3-12b, gemma3-27b"),
        ("gemma3_text", "gemma3-1b", "gemma3-4b, gemma3-12b, gemma3-27b"),
        ("olmo3", "olmo2-7b", "olmo3-*"),
    ],
)
def test_model_of_another_family(kind, model, hint):
    """--maxtext_model must be a model for this `model_type`; the message says what its names look like."""
    with pytest.raises(UnknownFamilyError) as error:
        family_of(Config(model_type=kind), model)
    assert f"--maxtext_model={model} " in str(error.value)
    assert repr(kind) in str(error.value)
    assert hint in str(error.value)


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("llama", "llama2-7b"),
        ("llama", "llama3.3-70b"),
        ("mistral", "mistral-7b"),
        ("llama", "mistral-7b"),
        ("kimi_k2", "kimi-k2-1t"),
        ("deepseek_v3", "kimi-k2-1t"),
        ("glm_moe_dsa", "glm5.2-744b"),
        ("hy_v3", "hy3-295b"),
        ("olmo3", "olmo3-7b-pt"),
        ("gemma2", "gemma2-27b"),
        ("gemma3", "gemma3-12b"),
        ("gemma3_text", "gemma3-4b"),
    ],
)
def test_model_of_the_family(kind, model):
    """A model that fits is accepted; Kimi K2's files say `kimi_k2` or `deepseek_v3`."""
    assert kind in family_of(Config(model_type=kind), model).model_types


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_llama3_rope_needs_a_model(field, key):
    """Llama 3.1 and 3.3 have one config.json and different arrays: refused, with names to choose from, each of which
    settles it.
    """
    config = Config(CONFIGS["llama"] | {field: {key: "llama3", "factor": 8.0}})
    with pytest.raises(UnknownFamilyError, match="choose with --maxtext_model") as error:
        family_of(config)
    choices = re.findall(r"llama3[\w.-]+", str(error.value))
    assert set(choices) >= set(LLAMA_31)
    assert {family_of(config, model).name for model in choices} == {"llama"}


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_scaling": None},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ],
)
def test_other_ropes_are_half_split(rope):
    """Without Llama 3.1's rotary scaling nothing is left open, and the plan's note says what was inferred."""
    config = Config(CONFIGS["llama"] | rope)
    assert family_of(config).note(config, Layout()).startswith("rotary halves kept apart")
    assert family_of(config).note(config, Layout(model="llama3.1-8b")).startswith("rotary halves paired")


def test_null_rope_scaling_does_not_hide_rope_parameters():
    """transformers v4 wrote `rope_scaling`, v5 writes `rope_parameters`; a file may have both."""
    config = Config(CONFIGS["llama"] | {"rope_scaling": None, "rope_parameters": {"rope_type": "llama3"}})
    with pytest.raises(UnknownFamilyError, match=r"llama3\.1-8b"):
        family_of(config)


NEEDED = [
    *product(CONFIGS, ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")),
    ("qwen3_moe", "num_experts"),
    ("mixtral", "num_local_experts"),
    ("deepseek_v3", "n_routed_experts"),
]


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        (*needed, value)
        for needed, value in product(NEEDED, (..., "8", True, -8, 0, 8.0, None))
        if (*needed, value) != ("qwen3_moe", "intermediate_size", ...)  # no layer has it
    ],
    ids=repr,
)
def test_config_errors_name_the_field(name, field, value):
    """A field that is missing (`...`), a string, a bool, negative, zero, a float or null: refused, and the message says
    which one and what it holds.
    """
    config = Config(CONFIGS[name])
    if value is ...:
        del config[field]
    else:
        config[field] = value
    with pytest.raises(ConfigError) as error:
        expand(family_of(config), config, Layout())
    assert repr(field) in str(error.value)
    assert value is ... or repr(value) in str(error.value)


@pytest.mark.parametrize(
    "field", ["num_key_value_heads", "head_dim", "first_k_dense_replace", "q_lora_rank", "index_n_heads"]
)
@pytest.mark.parametrize("value", ["8", True, -8, 8.0])
def test_config_errors_of_fields_with_a_default(field, value):
    """A field that may be absent must still be a count where it is there."""
    config = Config(CONFIGS["deepseek_v32"] | {field: value})
    with pytest.raises(ConfigError, match=repr(field)):
        expand(family_of(config), config, Layout())


@pytest.mark.parametrize("value", ["false", 1, "yes"])
def test_flags_are_true_or_false(value):
    """ "false" in quotes isn't false."""
    config = Config(CONFIGS["llama"] | {"tie_word_embeddings": value})
    with pytest.raises(ConfigError, match="'tie_word_embeddings' should be true or false"):
        expand(family_of(config), config, Layout())


@pytest.mark.parametrize(("name", "value"), [("llama", ...), ("llama", None), ("mistral", None), ("mixtral", None)])
def test_defaults(name, value):
    """Key and value heads are as many as heads, and a head's size follows from the width, where config.json doesn't say
    (or says null).
    """
    config = Config(CONFIGS[name] | {"hidden_size": 20, "num_key_value_heads": value, "head_dim": value})
    if value is ...:
        del config["num_key_value_heads"], config["head_dim"]
    dims = family_of(config).dims(config, Layout())
    assert (dims["kv"], dims["dim"]) == (4, 5)


@pytest.mark.parametrize("change", [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}])
def test_qwen3_moe_with_dense_layers(change):
    """MaxText has no such model: refused before any tensor is looked at."""
    config = Config(CONFIGS["qwen3_moe"] | change)
    with pytest.raises(ConfigError, match="mixes dense and MoE layers"):
        expand(family_of(config), config, Layout())


def test_experts_by_either_name():
    """transformers v5 writes `num_local_experts` where the hub's files say `num_experts`; the latter goes first."""
    config = Config(CONFIGS["qwen3_moe"] | {"num_local_experts": 5})
    assert family_of(config).dims(config, Layout())["expert"] == 3
    del config["num_experts"]
    assert family_of(config).dims(config, Layout())["expert"] == 5


@pytest.mark.parametrize(
    ("name", "renamed"),
    [
        ("model.layers.12.attn.wq_a.weight", "layers.12.self_attn.wq_a.weight"),
        ("model.layers.12.attn.norm.weight", "layers.12.self_attn.kv_norm.weight"),
        ("model.layers.12.attn_norm.weight", "layers.12.attn_norm.weight"),
        ("model.layers.1.experts.20.down", "layers.1.20.w2"),
        ("model.norm.weight", "norm.weight"),
        ("models.norm.weight", "models.norm.weight"),
        ("lm_head.weight", "head.weight"),
        ("lm_head", "head"),
        ("lm_head_weight", "lm_head_weight"),
        ("visual.model.norm.weight", "visual.model.norm.weight"),
    ],
)
def test_aliases_are_whole_components(name, renamed):
    """The longest prefix that fits is replaced, once; `*` keeps its component; a part of a component is no prefix."""
    aliases = {
        "model": "", "lm_head": "head", "model.layers.*.attn": "layers.*.self_attn", "model.layers.*.attn.norm": "layers.*.self_attn.kv_norm",
        "model.layers.*.experts.*.down": "layers.*.*.w2",
    }  # fmt: skip
    assert rename(name, aliases) == renamed
    assert rename(name, {}) == name
