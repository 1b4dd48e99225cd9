"""Adapters that can't be right, or that say what isn't known: all problems at once, by name, before anything is
written.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import support
from safetensors.numpy import save_file
from support import call, decoded, read_file, read_tensors

import weightbeam as wb
from weightbeam.formats.adapters import merge, open_adapter
from weightbeam.formats.adapters.config import read_config
from weightbeam.formats.adapters.ties import find_ties
from weightbeam.formats.encodings import ContentError
from weightbeam.formats.release.source import open_source
from weightbeam.formats.safetensors import open_hf
from weightbeam.model_mappings.config import Config
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import ConvertOptions

Q = "base_model.model.model.layers.0.self_attn.q_proj"
LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 6}


def copy_adapter(source: Path, folder: Path, tensors: dict[str, np.ndarray] | None = None, **config: object) -> Path:
    """An adapter with some fields and tensors changed; a tensor that is empty is left out."""
    shutil.copytree(source, folder)
    fields = json.loads((folder / "adapter_config.json").read_text()) | config
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    if tensors:
        held = read_file(folder / "adapter_model.safetensors") | tensors
        save_file({name: values for name, values in held.items() if values.size}, folder / "adapter_model.safetensors")
    return folder


def problems(base: Path, *adapters: Path, weight: float = 1.0) -> str:
    """What stands against merging."""
    model = "llama2-7b" if support.read_config(base)["model_type"] == "llama" else None
    conversion = plan_conversion(
        ConvertOptions(maxtext_model=model), open_hf(base), [open_adapter(adapter, weight) for adapter in adapters]
    )
    assert not conversion.units
    return "\n".join(map(str, conversion.plan.problems))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"r": 0}, "r is '0'"),
        ({"r": True}, "r is 'True'"),
        ({"r": 10**30}, "it should be an integer from 1"),
        ({"lora_alpha": "16"}, "lora_alpha is '16'"),
        ({"lora_alpha": 1e39}, "lora_alpha is '1e+39'"),
        ({"lora_alpha": float("nan")}, "lora_alpha is 'nan'"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes'"),
        ({"rank_pattern": {"(": 4}}, "'(' isn't a regular expression"),
        ({"rank_pattern": {"q_proj": -1}}, "stands for '-1'"),
        ({"alpha_pattern": [1]}, "alpha_pattern should be an object"),
        ({"bias": "some"}, "bias is 'some'"),
        ({"target_parameters": "experts"}, "target_parameters should be a list"),
        ({"modules_to_save": ["norm"] * 1001}, "modules_to_save has more than 1,000 names"),
        ({"target_modules": 5}, "target_modules is '5'"),
        ({"layers_to_transform": "all"}, "layers_to_transform is 'all'"),
        ({"layers_pattern": [1]}, "layers_pattern is '[1]'"),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is '[[0, 2]]'"),
        ({"megatron_config": {"a": 1}}, "megatron_config"),
        ({"use_qalora": True}, "use_qalora"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"arrow_config": {"top_k": 3}}, "arrow_config"),
        ({"a_field_of_tomorrow": 1}, "a_field_of_tomorrow is '1'; it isn't supported"),
    ],
)
def test_fields_are_refused_by_name(fields: dict, said: str) -> None:
    """Each with what it is."""
    _, found = read_config(LORA | fields)
    assert any(said in str(problem) for problem in found), found


def test_harmless_fields_pass() -> None:
    """What is of training or initialisation alone."""
    fields = {
        "init_lora_weights": "eva",
        "eva_config": {"rho": 2.0},
        "loftq_config": {},
        "target_modules": ["q_proj"],
        "megatron_core": "megatron.core",
    }
    assert read_config(LORA | fields)[1] == []


MODULES = [
    *(f"model.layers.{layer}.self_attn.{name}" for layer in (0, 1, 11) for name in ("q_proj", "v_proj", "pre_q_proj")),
    "model.layers.1.mlp.experts.3.w1",
    "model.visual.blocks.1.attn.q_proj",
    "layers.0.self_attn.q_proj",
    "model.embed_tokens",
    "lm_head",
]

# as Unsloth's `get_peft_regex` makes it for a language model alone
UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn).*?(?:q_proj|v_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn)\.(?:(?:q_proj|v_proj)))"
)


@pytest.mark.parametrize(
    "fields",
    [
        dict(target_modules=["q_proj"]),
        dict(target_modules=["self_attn.q_proj", "w1", "model.embed_tokens", "head"]),
        dict(target_modules=r".*\.layers\.\d+\.self_attn\.[qv]_proj"),
        dict(target_modules="model.*proj", exclude_modules=r".*visual.*"),
        dict(target_modules=["q_proj", "v_proj"], exclude_modules=["model.layers.1.self_attn.q_proj", "proj"]),
        dict(target_modules=["q_proj", "lm_head"], layers_to_transform=[0, 11]),
        dict(target_modules=["q_proj", "lm_head"], layers_to_transform=1),
        dict(target_modules=["q_proj"], layers_to_transform=[1], layers_pattern="blocks"),
        dict(target_modules=["q_proj"], layers_to_transform=[0, 1], layers_pattern=["layers", "h"]),
        dict(target_modules=["q_proj"], layers_to_transform=-1),
        dict(target_modules=["q_proj"], layers_to_transform=[]),
        dict(target_modules=["q_proj"], layers_to_transform=[0], layers_pattern="model.layers"),
        dict(target_modules=["q_proj", "w1"], layers_to_transform=3, layers_pattern=["experts", "layers"]),
        dict(target_modules=[], target_parameters=["mlp.experts.gate_up_proj"]),
        dict(target_modules=r"(?!.*visual)(?!.*layers\.1\.).*\b[qv]_proj(?<!pre_q_proj)"),
        dict(target_modules=UNSLOTH),
    ],
)
def test_which_modules_have_factors(fields: dict) -> None:
    """Those to which PEFT gives some."""
    import peft
    from peft.tuners.tuners_utils import check_target_module_exists

    theirs, (ours, found) = peft.LoraConfig(**fields), read_config(LORA | fields)
    assert found == []
    for module in MODULES:
        assert (ours.left_out_by(module) is None) == bool(check_target_module_exists(theirs, module)), module


def test_factors_that_peft_passes_over(written: Path, tmp_path: Path) -> None:
    """By any of the fields that say which modules have some; what can't be matched, and names nobody, leaves none out."""
    for number, (fields, name) in enumerate([
        (dict(target_modules=["v_proj"]), "target_modules"),
        (dict(exclude_modules=["q_proj"]), "exclude_modules"),
        (dict(layers_to_transform=[7]), "layers_to_transform"),
    ]):  # fmt: skip
        adapter = copy_adapter(written / "plain" / "adapter", tmp_path / f"{number}", **fields)
        said = problems(written / "plain" / "base", adapter)
        assert f"{Q}.lora_A.weight: its module has no factors by {name}, and PEFT passes over it" in said
    for fields in (dict(target_modules=r"(?i:.*K_PROJ)"), dict(target_modules="all-linear"), dict(target_modules=None)):
        assert read_config(LORA | fields)[0].left_out_by("visual.q_proj") is None


def test_a_module_that_was_to_be_saved_and_isnt_there(written: Path, tmp_path: Path) -> None:
    """PEFT ends with a KeyError. What the base hasn't got isn't missed: PEFT names classifiers by itself."""
    for number, saved in enumerate((["norm"], ["score", "classifier"])):
        adapter = copy_adapter(written / "plain" / "adapter", tmp_path / f"{number}", modules_to_save=saved)
        if number:
            assert open_adapter(adapter).problems == []
        else:
            said = problems(written / "plain" / "base", adapter)
            assert "adapter_config.json: modules_to_save names norm, of which the adapter holds no tensor" in said


def test_ranks_must_agree(written: Path, tmp_path: Path) -> None:
    """Of the two factors with each other, and with the configuration; all of them are said."""
    a = copy_adapter(
        written / "plain" / "adapter", tmp_path / "a", {f"{Q}.lora_A.weight": np.ones((5, 32), np.float32)}
    )
    assert f"{Q}.lora_A.weight: A is (5, 32) and B (32, 4)" in problems(written / "plain" / "base", a)
    b = copy_adapter(written / "plain" / "adapter", tmp_path / "b", r=3)
    said = problems(written / "plain" / "base", b)
    assert said.count("has rank 4, adapter_config.json says 3") == 14


def test_shapes_must_fit_the_base(written: Path, tmp_path: Path) -> None:
    """Expected and found."""
    adapter = copy_adapter(
        written / "plain" / "adapter", tmp_path / "a", {f"{Q}.lora_A.weight": np.ones((4, 33), np.float32)}
    )
    assert "B · A is (32, 33), model.layers.0.self_attn.q_proj.weight takes (32, 32)" in problems(
        written / "plain" / "base", adapter
    )


def test_every_tensor_is_used_or_refused(written: Path, tmp_path: Path) -> None:
    """A name that matches nothing, a part that isn't known, half a pair, a name that isn't PEFT's: each is said."""
    ones = np.ones((4, 32), np.float32)
    strange = {
        "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": ones,
        "base_model.model.model.layers.9.self_attn.q_proj.lora_B.weight": ones.T.copy(),
        "base_model.model.score.weight": ones,
    }
    said = problems(written / "plain" / "base", copy_adapter(written / "plain" / "adapter", tmp_path / "a", strange))
    assert "the base has no weight of model.layers.9.self_attn.q_proj" in said
    assert "the base has no score.weight that it could replace" in said
    strange = {
        f"{Q}.lora_C.weight": ones,
        f"{Q}.lora_B.weight": np.empty(0, np.float32),
        "model.layers.0.mlp.gate_proj.weight": ones,
    }
    said = problems(written / "plain" / "base", copy_adapter(written / "plain" / "adapter", tmp_path / "b", strange))
    assert "no such part of a LoRA is known" in said
    assert "has no lora_B beside it" in said
    assert "isn't a name that PEFT writes" in said


def test_copies_of_an_embedding_in_two_adapters(written: Path, tmp_path: Path) -> None:
    """PEFT saves one with every adapter that reaches it: the same base's are one base, to which both are added; of two
    bases each would take the place of what the other is added to.
    """
    base, adapter = written / "embedding" / "base", written / "embedding" / "adapter"
    for number in (1, 2):
        wb.merge(str(base), str(tmp_path / str(number)), lora=[str(adapter)] * number, progress=False)
    held, once, twice = (read_tensors(folder) for folder in (base, tmp_path / "1", tmp_path / "2"))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert (once[name] != held[name]).all()
        np.testing.assert_allclose(twice[name] - held[name], 2 * (once[name] - held[name]), atol=1e-6)
    copy = "base_model.model.lm_head.base_layer.weight"
    values = read_file(adapter / "adapter_model.safetensors")[copy]
    other = copy_adapter(adapter, tmp_path / "other", {copy: values + np.eye(*values.shape, dtype=values.dtype)})
    with pytest.raises(wb.Refused, match="they were trained on different bases"):
        wb.merge(str(base), str(tmp_path / "none"), lora=[str(adapter), str(other)], progress=False)


def test_a_copy_of_an_embedding_must_fit(written: Path, tmp_path: Path) -> None:
    """It takes the base's place: of another shape, or of a module that has no LoRA, it is refused."""
    name = "base_model.model.{}.base_layer.weight"
    strange = {
        name.format("model.embed_tokens"): np.ones((47, 32), np.float32),
        name.format("model.nothing"): np.ones(3),
    }
    said = problems(
        written / "embedding" / "base", copy_adapter(written / "embedding" / "adapter", tmp_path / "a", strange)
    )
    assert "model.nothing.base_layer.weight: is a copy of the base's, of a module without a LoRA" in said
    del strange[name.format("model.nothing")]
    said = problems(
        written / "embedding" / "base", copy_adapter(written / "embedding" / "adapter", tmp_path / "b", strange)
    )
    assert "is (47, 32), the base's model.embed_tokens.weight (48, 32)" in said
    alone = {"base_model.model.model.embed_tokens.lora_embedding_A": np.ones((4, 47), np.float32)}
    said = problems(
        written / "embedding" / "base", copy_adapter(written / "embedding" / "adapter", tmp_path / "c", alone)
    )
    assert "model.embed_tokens" in said


def test_what_is_there_twice_is_refused(written: Path, tmp_path: Path) -> None:
    """Under two spellings of one module, or of one expert's number."""
    q, o = "base_model.model.model.layers.0.self_attn.q_proj", "base_model.model.model.layers.0.self_attn.o_proj"
    held = read_file(written / "bias-all" / "adapter" / "adapter_model.safetensors")
    named = next(name for name in held if name.startswith(q) and name.endswith("bias"))
    both = {f"{q}.bias": held[named], f"{q}.base_layer.bias": held[named] + 1}
    said = problems(written / "bias-all" / "base", copy_adapter(written / "bias-all" / "adapter", tmp_path / "a", both))
    assert "is there twice, as" in said
    assert o not in said
    held = read_file(written / "v4" / "adapter" / "adapter_model.safetensors")
    other = {
        name.replace(".mlp.", ".block_sparse_moe."): values
        for name, values in held.items()
        if ".layers.0.mlp.experts.1.down_proj" in name
    }
    assert len(other) == 2
    said = problems(written / "v4" / "base", copy_adapter(written / "v4" / "adapter", tmp_path / "b", other))
    assert "changes what" in said
    assert "model.layers.0.mlp.experts.1.down_proj.weight is adapted twice" in said


def fused(base: Path, folder: Path) -> Path:
    """The release with the experts of each layer in two tensors, as transformers has them in memory."""
    tensors = read_file(base / "model.safetensors")
    merged = {name: values for name, values in tensors.items() if ".experts." not in name}
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"
        each = [
            [tensors[f"{experts}.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")]
            for expert in range(4)
        ]
        merged[f"{experts}.gate_up_proj"] = np.stack([np.concatenate(parts[:2]) for parts in each])
        merged[f"{experts}.down_proj"] = np.stack([parts[2] for parts in each])
    return support.save(folder, support.read_config(base), merged)


def test_one_expert_of_several_in_a_tensor(written: Path, tmp_path: Path) -> None:
    """Over fused files an expert is there twice as 2 and as 002; a DoRA of one expert is refused, whose norm and
    magnitude are of that expert alone.
    """
    base, adapter = fused(written / "v4" / "base", tmp_path / "base"), written / "v4" / "adapter"
    held = read_file(adapter / "adapter_model.safetensors")
    assert not merge_problems(base, adapter)
    mine = {name: values for name, values in held.items() if ".layers.1.mlp.experts.2.down_proj" in name}
    other = {name.replace(".experts.2.", ".experts.002."): values for name, values in mine.items()}
    said = merge_problems(base, copy_adapter(adapter, tmp_path / "twice", other))
    assert "model.layers.1.mlp.experts.down_proj is adapted twice" in said
    module = next(iter(mine)).partition(".lora_")[0]
    alone = {name: np.empty(0, np.float32) for name in held if name not in mine}
    alone[f"{module}.lora_magnitude_vector.weight"] = np.ones(32, np.float32)
    said = merge_problems(base, copy_adapter(adapter, tmp_path / "dora", alone, use_dora=True))
    assert "is a DoRA of one expert, which is a part of model.layers.1.mlp.experts.down_proj" in said


def merge_problems(base: Path, adapter: Path) -> str:
    """What stands against merging, below any table."""
    checkpoint = open_hf(base)
    encodings = open_source(checkpoint).encodings
    ties = find_ties(Config(), encodings)
    made = merge(encodings, [open_adapter(adapter)], {}, checkpoint.config["model_type"], ties)
    return "\n".join(map(str, made.problems))


def test_a_head_that_is_tied_is_refused(written: Path) -> None:
    """The base has no head of its own that the adapter could change; nor one that stays as it was where the embedding is
    another one.
    """
    said = problems(written / "embedding-tied" / "base", written / "modules_to_save" / "adapter")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert f"the base's head is tied to the embedding: PEFT changes {name} alone" in said


def test_what_contradicts_the_configuration(written: Path, tmp_path: Path) -> None:
    """A DoRA that isn't one, and the other way round."""
    assert "use_dora is false" in problems(
        written / "dora" / "base", copy_adapter(written / "dora" / "adapter", tmp_path / "a", use_dora=False)
    )
    assert "use_dora is true" in problems(
        written / "plain" / "base", copy_adapter(written / "plain" / "adapter", tmp_path / "b", use_dora=True)
    )


def test_a_scaling_beyond_float32_is_refused(written: Path, tmp_path: Path) -> None:
    """Before anything is read; what overflows only when it is multiplied is refused when it is merged."""
    base = written / "plain" / "base"
    assert "isn't a number that float32 holds" in problems(
        base, copy_adapter(written / "plain" / "adapter", tmp_path / "a", lora_alpha=2.9e38), weight=1e9
    )
    large = {f"{Q}.lora_B.weight": np.full((32, 4), 1e3, np.float32)}
    adapter = copy_adapter(written / "plain" / "adapter", tmp_path / "b", large, lora_alpha=2.9e38)
    conversion = plan_conversion(ConvertOptions(maxtext_model="llama2-7b"), open_hf(base), [open_adapter(adapter)])
    with pytest.raises(ContentError, match=r"q_proj.weight: isn't finite once the adapter is merged"):
        decoded(conversion.encodings["model.layers.0.self_attn.q_proj.weight"])


def test_weights_that_arent_linear_are_refused(written: Path) -> None:
    """Half of a whole tensor, half of a norm, two norms."""
    assert "can't be merged with the weight 0.5" in problems(
        written / "modules_to_save" / "base", written / "modules_to_save" / "adapter", weight=0.5
    )
    assert "can't be merged with the weight 0.5" in problems(
        written / "dora" / "base", written / "dora" / "adapter", weight=0.5
    )
    assert "has a DoRA" in problems(
        written / "dora" / "base", written / "dora" / "adapter", written / "plain" / "adapter"
    )
    modules = written / "modules_to_save" / "adapter"
    assert "is replaced by" in problems(written / "plain" / "base", modules, modules)


def test_an_adapter_of_a_head_that_isnt_the_one_it_is_tied_to_is_refused(written: Path, tmp_path: Path) -> None:
    """transformers doesn't tie them then."""
    pytest.importorskip("torch")
    base = shutil.copytree(written / "embedding" / "base", tmp_path / "base")
    config = json.loads((base / "config.json").read_text()) | {"tie_word_embeddings": True}
    (base / "config.json").write_text(json.dumps(config))  # the head is there, but isn't converted
    said = problems(base, written / "embedding" / "adapter")
    assert "lm_head.weight: left out (the head is tied to the embedding), but it isn't the same" in said


@pytest.mark.parametrize("version", [None, "0.19.0.dev0"])
def test_square_experts_need_a_version(written: Path, tmp_path: Path, version: str | None) -> None:
    """A wrong reading would be silent: both fit."""
    adapter = copy_adapter(written / "experts-square" / "adapter", tmp_path / "a", peft_version=version)
    assert "only PEFT's version tells" in problems(written / "experts-square" / "base", adapter)


def test_a_version_that_shapes_contradict(written: Path, tmp_path: Path) -> None:
    """Neither is believed."""
    adapter = copy_adapter(written / "experts" / "adapter", tmp_path / "a", peft_version="0.18.0")
    assert "the other way round than that version of PEFT writes" in problems(written / "experts" / "base", adapter)
    adapter = copy_adapter(written / "experts" / "adapter", tmp_path / "b", peft_version=None)
    conversion = plan_conversion(ConvertOptions(), open_hf(written / "experts" / "base"), [open_adapter(adapter)])
    assert not conversion.plan.problems  # shapes alone tell it


def test_a_pickle_is_refused(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """It is never opened; nothing is written."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    shutil.copy(written / "plain" / "adapter" / "adapter_config.json", folder)
    (folder / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    assert (
        call(
            "convert",
            "--source",
            written / "plain" / "base",
            "--lora",
            folder,
            "--output",
            tmp_path / "out",
            "--maxtext_model",
            "llama2-7b",
        )
        == 2
    )
    assert "adapter_model.bin is a pickle file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("/nowhere/adapter", "no such folder"),
        ("ftp://a/b", "isn't supported"),
        ("a,0", "other than 0"),
        ("a,inf", "other than 0"),
    ],
)
def test_what_lora_cant_name(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture, text: str, said: str
) -> None:
    """Exit status 2, in words."""
    assert call("plan", "--source", written / "plain" / "base", "--lora", text, "--maxtext_model", "llama2-7b") == 2
    assert said in capsys.readouterr().err


def test_a_weight_of_integers(written: Path, tmp_path: Path) -> None:
    """What is added would be cut off to integers."""
    base = Path(shutil.copytree(written / "plain" / "base", tmp_path / "base"))
    (file,) = base.glob("*.safetensors")
    tensors = read_file(file)
    name = f"{Q.removeprefix('base_model.model.')}.weight"
    save_file(tensors | {name: tensors[name].astype(np.int32)}, file)
    said = problems(base, written / "plain" / "adapter")
    assert f"{name}: is int32, and no adapter's change can be added to that" in said
