"""One cause in place of what follows from it: a prefix of all names, biases, parts that a release hasn't, rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import BF16, DEEPSEEK, LLAMA, random_tensors, save

import weightbeam as wb

BIASED = ("o_proj", "q_proj")


def planned(folder: Path, config: dict, tensors: dict[str, np.ndarray], **options: object) -> wb.Plan:
    return wb.plan(save(folder, config, tensors), **options)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model."])
def test_a_prefix_of_all_names_is_one_problem(tmp_path: Path, prefix: str) -> None:
    """Also where the names without it are of a spelling that the table renames; what the sentence says to do helps."""
    tensors = {name.removeprefix("model."): tensor for name, tensor in random_tensors(DEEPSEEK).items()}
    wrapped = {prefix + name: tensor for name, tensor in tensors.items()}
    (problem,) = planned(tmp_path / "wrapped", DEEPSEEK, wrapped).problems
    assert (problem.kind, problem.subject) == ("unused", f"{prefix}*")
    assert problem.message.startswith(f"all {len(tensors)} names begin with '{prefix}'")
    code = problem.message.partition("each file with ")[2].partition(", and in the index")[0]
    file = str(tmp_path / "wrapped" / "model.safetensors")
    exec(f"import safetensors.torch\n{code}", {"FILE": file})
    assert not wb.plan(tmp_path / "wrapped").problems


def test_names_that_share_a_prefix_of_the_table_s_are_told_one_by_one(tmp_path: Path) -> None:
    """Those of a tied model all begin with `model.`, and so do the table's."""
    config = LLAMA | dict(tie_word_embeddings=True)
    tensors = random_tensors(config)
    tensors.pop("lm_head.weight", None)
    tensors["model.final.weight"] = tensors.pop("model.norm.weight")
    found = planned(tmp_path / "hf", config, tensors, maxtext_model="llama2-7b").problems
    assert {(problem.kind, problem.subject) for problem in found} == {
        ("missing", "model.norm.weight"),
        ("unused", "model.final.weight"),
    }


def test_a_model_without_a_head_says_what_to_do(tmp_path: Path) -> None:
    """Of transformers' class without one, as Qwen3-Embedding-8B is; what the sentence says to do helps."""
    config = LLAMA | dict(tie_word_embeddings=False)
    tensors = {name.removeprefix("model."): tensor for name, tensor in random_tensors(config).items()}
    del tensors["lm_head.weight"]
    (problem,) = planned(tmp_path / "untied", config, tensors, maxtext_model="llama2-7b").problems
    assert (problem.kind, problem.subject) == ("missing", "lm_head.weight")
    assert "say tie_word_embeddings: true" in problem.message
    tied = config | dict(tie_word_embeddings=True)
    assert not planned(tmp_path / "tied", tied, tensors, maxtext_model="llama2-7b").problems


@pytest.mark.parametrize("said", [True, False])
def test_biases_that_the_config_asks_for_name_its_field(tmp_path: Path, said: bool) -> None:
    tensors = random_tensors(LLAMA)
    names = [f"model.layers.0.self_attn.{module}.bias" for module in BIASED]
    biases = {name: np.ones(tensors[name.replace(".bias", ".weight")].shape[0], BF16) for name in names}
    config = LLAMA | dict(attention_bias=said, mlp_bias=False)
    found = planned(tmp_path / "hf", config, tensors | biases, maxtext_model="llama2-7b").problems
    assert [(problem.kind, problem.subject) for problem in found] == [("unused", name) for name in names]
    told = "config.json says attention_bias, and MaxText's llama models have no such bias"
    assert [told in problem.message for problem in found] == [said, said]


@pytest.mark.parametrize(
    ("config", "part"),
    [(DEEPSEEK, "mtp"), (LLAMA | dict(model_type="gemma3_text", query_pre_attn_scalar=8), "multimodal")],
)
def test_parts_that_a_release_has_not(tmp_path: Path, config: dict, part: str) -> None:
    """A sentence that says so beside what else is amiss; what is supported doesn't name them either."""
    plan = planned(tmp_path / "hf", config, random_tensors(config), **{part: True})
    (found,) = (problem for problem in plan.problems if problem.subject.strip("-") == part)
    assert found.kind == "option"
    assert "the release has no" in found.message
    assert "leave the option out" in found.message
    assert not [problem for problem in plan.problems if problem.kind == "config"]
    assert f"--{part}" not in plan.conversion.plan.support


def test_rows_beyond_the_vocabulary_name_the_way_out(tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.concatenate([tensors[name], tensors[name][:3]])
    plan = planned(tmp_path / "hf", LLAMA, tensors, maxtext_model="llama2-7b")
    assert len(plan.problems) == 2
    for problem in plan.problems:
        assert "vocab_size of config.json is 64, and should be 67, or leave the others out with" in problem.message
    assert not wb.plan(tmp_path / "hf", maxtext_model="llama2-7b", vocab_rows=64).problems
    assert not planned(tmp_path / "said", LLAMA | dict(vocab_size=67), tensors, maxtext_model="llama2-7b").problems


def test_a_field_on_which_the_family_hangs(tmp_path: Path) -> None:
    """Which of Gemma 4's tables it is stands in `text_config`: a problem, as everywhere else (`make soak` found an error)."""
    (found,) = planned(tmp_path / "hf", {"model_type": "gemma4", "text_config": None}, random_tensors(LLAMA)).problems
    assert (found.kind, found.subject) == ("config", "config.json")
    assert found.message == "'text_config' should be an object, but is None"
