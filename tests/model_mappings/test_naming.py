"""Which of MaxText's models a checkpoint is: by its sizes, by the user's word, and where neither settles it."""

from __future__ import annotations

import json

import pytest
from facts import config_of, load_headers, load_trees
from facts.make_models import OTHERS, OUTPUT
from facts.tiny import CONFIGS

from weightbeam.model_mappings.config import Config
from weightbeam.model_mappings.maxtext_models import base, keys_of, models, run_as
from weightbeam.model_mappings.naming import name_model, unknown_name
from weightbeam.model_mappings.registry import FAMILIES, UnknownFamilyError, family_of

LLAMA_31 = {
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
}
TREES = {tree.model: config_of(tree) for tree in load_trees().values()}
SAME = {  # models of MaxText's whose configurations agree, by the name that is shown for both
    "llama3.1-8b-Instruct": "llama3.1-8b", "llama3.3-70b": "llama3-70b", "qwen3-coder-480b-a35b": "qwen3-480b-a35b",
    **{f"qwen3-{size}-base": f"qwen3-{size}" for size in ("1.7b", "4b", "8b", "14b")},
}  # fmt: skip
# their trees' config.json has the RoPE of these
SAME |= {"olmo3-7b": "olmo3-7b-pt", "qwen3-4b-thinking-2507": "qwen3-4b"}


def llama(embed, heads, layers, mlp, **others):
    return Config(
        dict(
            model_type="llama",
            hidden_size=embed,
            num_attention_heads=heads,
            num_key_value_heads=8,
            num_hidden_layers=layers,
            intermediate_size=mlp,
        )
        | dict(vocab_size=128256)
        | others
    )


LLAMA_8B, LLAMA_70B = (4096, 32, 32, 14336), (8192, 64, 80, 28672)


@pytest.mark.parametrize("model", TREES)
def test_sizes_name_the_model(model):
    """Every model whose tree MaxText built at full size is found again by the sizes of its `config.json`."""
    config = Config(TREES[model])
    if model == "llama3.1-70b":  # 3.3 has the same file
        return
    assert name_model(family_of(config), config).model == SAME.get(model, model)


@pytest.mark.parametrize(
    ("config", "model"),
    [
        (llama(*LLAMA_8B, **LLAMA_31), "llama3.1-8b"),
        (llama(*LLAMA_8B), "llama3-8b"),
        (llama(*LLAMA_8B, vocab_size=128264, **LLAMA_31), "llama3.1-8b"),
        (llama(16384, 128, 126, 53248, **LLAMA_31), "llama3.1-405b"),
        (llama(2048, 32, 16, 8192, **LLAMA_31), "llama3.2-1b"),
        (llama(3072, 24, 28, 8192, **LLAMA_31), "llama3.2-3b"),
        (llama(*LLAMA_70B), "llama3-70b"),
        (llama(*LLAMA_70B, vocab_size=32000), "llama2-70b"),
        (llama(*LLAMA_8B, model_type="mistral", vocab_size=32768), "mistral-7b"),
    ],
)
def test_llamas(config, model):
    """Width and depth settle all but 70B; a vocabulary that has grown is the same model."""
    assert name_model(family_of(config), config).model == model


def test_only_70b_is_ambiguous():
    """Llama 3.1 and 3.3 have one `config.json`, and MaxText other rotary embeddings for them."""
    with pytest.raises(UnknownFamilyError, match=r"paired .*: llama3\.1-70b; .* apart .*: llama3\.3-70b$"):
        family_of(llama(*LLAMA_70B, **LLAMA_31))


@pytest.mark.parametrize(
    ("named", "config", "words"),
    [
        (
            "llama3.3-70b",
            llama(*LLAMA_8B, **LLAMA_31),
            ["llama3.1-8b", "base_emb_dim 4096, not 8192", "base_num_decoder_layers 32, not 80"],
        ),
        ("llama3.1-8b", llama(2048, 32, 16, 8192, **LLAMA_31), ["llama3.2-1b", "base_emb_dim 2048, not 4096"]),
        ("qwen3-8b", Config(TREES["qwen3-32b"]), ["qwen3-32b", "base_num_decoder_layers 64, not 36"]),
        (
            "deepseek3-671b",
            Config(TREES["kimi-k2-1t"] | {"model_type": "deepseek_v3", "num_key_value_heads": 64}),
            ["kimi-k2-1t", "num_experts 384, not 256"],
        ),
        ("gemma3-4b", Config(TREES["gemma3-27b"]), ["gemma3-27b", "head_dim 128, not 256"]),
    ],
)
def test_the_name_of_another_model(named, config, words):
    """A checkpoint that has the sizes of one model can't be named another: its attention would silently be wrong."""
    with pytest.raises(UnknownFamilyError) as error:
        family_of(config, named)
    assert all(word in str(error.value) for word in [f"--maxtext_model={named}", *words])


@pytest.mark.parametrize("named", ["llama3.1-8b", "llama3.1-8b-Instruct", "llama3.1-70b"])
def test_a_model_of_other_sizes(named):
    """Sizes of no model of MaxText's: the name is taken, and the sizes that differ are what MaxText must be told."""
    config = llama(96, 4, 3, 160, num_key_value_heads=2, head_dim=32, **LLAMA_31)
    naming = name_model(family_of(config, named), config, named)
    assert naming.model == named
    wanted = dict(
        base_emb_dim=96,
        base_num_query_heads=4,
        base_num_kv_heads=2,
        head_dim=32,
        base_mlp_dim=160,
        base_num_decoder_layers=3,
    )
    assert naming.sizes == wanted


def test_a_name_that_fits_needs_no_sizes():
    config = llama(*LLAMA_8B, **LLAMA_31)
    assert not name_model(family_of(config, "llama3.1-8b"), config, "llama3.1-8b").sizes


@pytest.mark.parametrize("name", load_headers())
def test_tiny_models_have_no_name(name):
    """Nothing is named by chance; and no tiny model's lines fail."""
    config = Config(load_headers()[name].config)
    family = next(family for family in FAMILIES if config["model_type"] in family.model_types and family.fits(config))
    assert family.configuration[config["model_type"]]
    if "llama3.1" not in name:
        assert name_model(family, config).model is None


def test_a_config_without_sizes_has_no_name():
    """The table says which field is missing, not this."""
    config = Config({"model_type": "qwen3"})
    assert name_model(family_of(config), config).model is None
    assert name_model(family_of(config, "qwen3-8b"), config, "qwen3-8b").model == "qwen3-8b"
    assert CONFIGS["qwen3"]["model_type"] == "qwen3"


def test_the_table_of_models():
    """As the script wrote it; each family's patterns know every name."""
    assert set(json.loads(OUTPUT.read_text())) == {"base", "run_as", "models"}
    assert set(OTHERS) <= set(models())
    for model in models():
        assert set(keys_of(model) or {}) == set(base())
        assert run_as(model) in models()
        if not model.startswith("gemma-"):
            assert [family for family in FAMILIES if any(family.types_of(model))], model


@pytest.mark.parametrize("tree", load_trees().values(), ids=load_trees())
def test_the_table_and_the_trees(tree):
    """MaxText's files against the trees that it built: rows of the embedding, and its width."""
    keys = keys_of(tree.model)
    assert keys is not None
    assert tree.arrays[next(path for path in tree.arrays if path.endswith("token_embedder/embedding"))][0] == (
        tree.vocab,
        keys["base_emb_dim"],
    )
    assert keys["vocab_size"] == tree.vocab


def test_a_name_that_no_model_has() -> None:
    """It is said, with what may have been meant; a model of one's own has such a name, too."""
    assert [unknown_name(name) for name in (None, "llama3.1-8b", "llama3.1-8b-Instruct")] == [[], [], []]
    (told,) = unknown_name("llama3-8000b")
    assert "MaxText has no model of this name; did you mean llama3-8b?" in told
    assert unknown_name("x") == [
        "--maxtext_model=x: MaxText has no model of this name. Only a file of your own can give it its sizes"
    ]
