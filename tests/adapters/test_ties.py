"""Adapters of bases whose head is the embedding, with and without the head in the files: what PEFT makes of them with the
model that transformers loads, or a refusal, and the same by every way.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support import assert_same_bits, call, convert, read_config, read_file, read_tensors, restore, save

import weightbeam as wb
from weightbeam.formats.adapters import open_adapter
from weightbeam.formats.adapters.ties import Ties, find_ties
from weightbeam.formats.safetensors import open_hf
from weightbeam.model_mappings.config import Config
from weightbeam.model_mappings.registry import family_of
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.merge_planner import plan_merge
from weightbeam.transforms.planning.options import ConvertOptions, MergeOptions

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MERGED = (
    "embedding-tied",
    "head-tied",
    "both-tied",
    "embedding-dora-tied",
    "saved-embedding-tying",
    "saved-head-tying",
    "head-dora-tied",
    "both-tied-gemma",
    "both-tied-starcoder2",
    "saved-layers-tied",
)
MODELS = {"qwen3": "qwen3-0.6b", "gemma": "gemma-2b"}
REFUSED = ("saved-embedding-tied", "saved-head-tied")


def base_of(written: Path, folder: Path, case: str, with_head: bool, **config: object) -> Path:
    """The base of a case, the head beside its embedding or not; `config` replaces fields, None removes them."""
    base = written / case / "base"
    tensors = read_tensors(base)
    assert HEAD not in tensors
    said = read_config(base) | config
    assert read_config(base)["tie_word_embeddings"]
    said = {field: value for field, value in said.items() if value is not None}
    made = save(folder, said, tensors | ({HEAD: tensors[EMBEDDING]} if with_head else {}))
    shutil.copy(base / "generation_config.json", made)
    return made


def with_another_head(base: Path, folder: Path) -> Path:
    """The same base with a head that isn't the embedding."""
    tensors = read_tensors(base)
    return save(folder, read_config(base), tensors | {HEAD: tensors[HEAD] + 1})


def merge_problems(base: Path, adapter: Path) -> str:
    """What stands against a merge."""
    return "\n".join(map(str, plan_merge(MergeOptions(), open_hf(base), [open_adapter(adapter)]).plan.problems))


@pytest.mark.parametrize("with_head", [False, True])
@pytest.mark.parametrize("case", MERGED)
def test_every_way_is_peft_s(written: Path, tmp_path: Path, case: str, with_head: bool) -> None:
    """A merged release holds under both names what PEFT has under both; a conversion with the adapter is one of that
    release, and so is what a checkpoint of the base is exported to.
    """
    base, adapter = base_of(written, tmp_path / "base", case, with_head), written / case / "adapter"
    wanted = read_file(written / case / "merged.safetensors")
    np.testing.assert_array_equal(wanted[EMBEDDING], wanted[HEAD])
    assert call("merge", base, tmp_path / "merged", "--lora", adapter) == 0
    made, before = read_tensors(tmp_path / "merged"), read_tensors(base)
    assert set(made) == set(before)
    assert (made[EMBEDDING] != before[EMBEDDING]).any()
    for name, values in made.items():
        np.testing.assert_allclose(values, wanted[name], rtol=2e-6, atol=2e-6, err_msg=name)
    if with_head:
        assert made[HEAD].tobytes() == made[EMBEDDING].tobytes()
    for name, values in wb.open(str(base), lora=str(adapter), as_is=True).items():
        assert np.asarray(values).tobytes() == made[name].tobytes()
    if (model := MODELS.get(read_config(base)["model_type"])) is None:
        return
    options = ("--maxtext_model", model, "--save_dtype", "float32")
    one = restore(convert(base, tmp_path / "one", "--lora", str(adapter), *options))
    assert_same_bits(one, restore(convert(tmp_path / "merged", tmp_path / "other", *options)))
    assert call("verify", "--source", base, "--checkpoint", tmp_path / "one", "--lora", adapter) == 0
    convert(base, tmp_path / "ckpt", *options)
    status = call("export", tmp_path / "ckpt", tmp_path / "out", "--like", base, "--lora", adapter)
    if case == "embedding-dora-tied":
        assert status == 2  # whole columns, which an export doesn't make
        return
    assert status == 0
    exported = read_tensors(tmp_path / "out")
    assert set(exported) == set(before)
    for name, values in exported.items():
        np.testing.assert_allclose(values, wanted[name], rtol=3e-6, atol=3e-6, err_msg=name)
    if with_head:
        assert exported[HEAD].tobytes() == exported[EMBEDDING].tobytes()


def test_an_embedding_that_peft_doesnt_know_is_refused(written: Path) -> None:
    """GPT-2's `wte` isn't tied by `ensure_weight_tying`, which goes by names: PEFT's merge changes it alone."""
    case = written / "saved-wte-tying"
    wanted = read_file(case / "merged.safetensors")
    assert (wanted["transformer.wte.weight"] != wanted[HEAD]).any()
    assert "the base's head is tied to the embedding: PEFT changes" in merge_problems(case / "base", case / "adapter")


@pytest.mark.parametrize("with_head", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_what_peft_unties_is_refused(written: Path, tmp_path: Path, case: str, with_head: bool) -> None:
    """By merge, by a conversion, and by an export."""
    base, adapter = base_of(written, tmp_path / "base", case, with_head), written / case / "adapter"
    wanted = read_file(written / case / "merged.safetensors")
    assert (wanted[EMBEDDING] != wanted[HEAD]).any()
    message = "the base's head is tied to the embedding: PEFT changes"
    assert message in merge_problems(base, adapter)
    with pytest.raises(wb.Refused, match=message):
        wb.open(str(base), lora=str(adapter), as_is=True)
    model = MODELS["qwen3"]
    found = plan_conversion(ConvertOptions(maxtext_model=model), open_hf(base), [open_adapter(adapter)]).plan.problems
    assert message in "\n".join(map(str, found))
    convert(base, tmp_path / "ckpt", "--maxtext_model", model)
    assert call("export", tmp_path / "ckpt", tmp_path / "out", "--like", base, "--lora", adapter) == 2


@pytest.mark.parametrize("with_head", [False, True])
def test_factors_that_are_tied_are_refused(written: Path, tmp_path: Path, with_head: bool) -> None:
    """PEFT's merge isn't what its adapter computes: twice what it should be. Of a base that isn't tied it says nothing."""
    base = base_of(written, tmp_path / "base", "embedding-tying", with_head)
    assert "adds it to their weight twice" in merge_problems(base, written / "embedding-tying" / "adapter")
    wanted = read_file(written / "embedding-tying" / "merged.safetensors")
    before, factors = (
        read_tensors(base)[EMBEDDING],
        read_file(written / "embedding-tying/adapter/adapter_model.safetensors"),
    )
    a, b = (factors[f"base_model.model.model.embed_tokens.lora_embedding_{side}"] for side in "AB")
    np.testing.assert_allclose(wanted[EMBEDDING], before + 2 * 1.5 * (b @ a).T, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("with_head", [False, True])
def test_two_norms_are_refused(written: Path, tmp_path: Path, with_head: bool) -> None:
    """DoRA on both: the second norm would be of what the first made."""
    base = base_of(written, tmp_path / "base", "both-dora-tied", with_head)
    assert "has a DoRA" in merge_problems(base, written / "both-dora-tied" / "adapter")


def test_a_head_of_its_own(written: Path, tmp_path: Path) -> None:
    """The configuration says that it isn't tied: each is changed by itself, though they are the same before."""
    base = base_of(written, tmp_path / "base", "embedding-tied", with_head=True, tie_word_embeddings=False)
    merging = plan_merge(MergeOptions(), open_hf(base), [open_adapter(written / "embedding-tied" / "adapter")]).merging
    assert EMBEDDING in merging.touched
    assert HEAD not in merging.touched


def test_a_head_that_isnt_the_same_is_refused(written: Path, tmp_path: Path) -> None:
    """transformers ties only what is the same; an adapter that changes neither is merged."""
    base = base_of(written, tmp_path / "base", "both-tied", with_head=True)
    base = with_another_head(base, tmp_path / "other")
    for case in MERGED[:3]:
        said = merge_problems(base, written / case / "adapter")
        assert (
            "lm_head.weight: is tied to model.embed_tokens.weight by config.json, but it isn't the same: row 0" in said
        )
    folder = shutil.copytree(written / "saved-head-tied" / "adapter", tmp_path / "adapter")
    kept = {name: one for name, one in read_file(folder / "adapter_model.safetensors").items() if "v_proj" in name}
    save_file(kept, folder / "adapter_model.safetensors")
    fields = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(fields | {"modules_to_save": None}))
    assert not merge_problems(base, folder)


def test_without_a_table_and_without_a_word(written: Path, tmp_path: Path) -> None:
    """transformers' defaults differ by the model's class: of two that are the same it isn't known."""
    case = "both-tied-starcoder2"
    base = base_of(written, tmp_path / "base", case, with_head=True, tie_word_embeddings=None)
    assert "config.json doesn't say whether they are one weight" in merge_problems(base, written / case / "adapter")
    base = with_another_head(base, tmp_path / "other")
    assert not merge_problems(base, written / case / "adapter")


@pytest.mark.parametrize(
    ("said", "names", "found"),
    [
        (True, ("embed_tokens.weight", "lm_head.weight"), Ties({"lm_head.weight": "embed_tokens.weight"})),
        (False, ("embed_tokens.weight", "lm_head.weight"), Ties()),
        (None, ("a.wte.weight", "lm_head.weight"), Ties(perhaps={"lm_head.weight": "a.wte.weight"})),
        (None, ("a.wte.weight", "h.0.wte.weight"), Ties({"lm_head.weight": "a.wte.weight"})),
        (
            True,
            ("shared.weight", "encoder.embed_tokens.weight", "lm_head.weight"),
            Ties(unsure=frozenset({"shared.weight", "encoder.embed_tokens.weight", "lm_head.weight"})),
        ),
    ],
)
def test_by_the_names_alone(said: bool | None, names: tuple[str, ...], found: Ties) -> None:
    """Of a model without a table; which of several is tied to which isn't guessed."""
    assert find_ties(Config({} if said is None else {"tie_word_embeddings": said}), names) == found
    text = {"tie_word_embeddings": said} if said is not None else {}
    assert find_ties(Config(text_config=text), names) == found


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3", "glm_moe_dsa", "hy_v3"])
@pytest.mark.parametrize("tied", [True, False])
def test_copies_in_a_prediction_layer(kind: str, tied: bool) -> None:
    """They tie nothing: a head beside the embedding is its own unless the configuration says otherwise."""
    config = Config(model_type=kind, num_hidden_layers=5, num_nextn_predict_layers=1, tie_word_embeddings=tied)
    names = [EMBEDDING, HEAD, "model.layers.5.embed_tokens.weight", "model.layers.5.shared_head.head.weight"]
    assert find_ties(config, names, family_of(config)) == (Ties({HEAD: EMBEDDING}) if tied else Ties())
