"""Checkpoints whose rotary halves are paired, or kept apart, are read as they were made, whatever a release's config says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support import LLAMA, assert_same_bits, call, convert, make_release, peft_adapter, read_tensors

from weightbeam.formats.orbax.source import open_orbax
from weightbeam.model_mappings.families.llama import FAMILY
from weightbeam.model_mappings.naming import ModelNameError, check_made_for
from weightbeam.transforms.planning.export_fit import find_table
from weightbeam.transforms.planning.exporting import Like
from weightbeam.transforms.planning.options import ExportOptions

SCALING = dict(
    rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)  # fmt: skip
SCALED = LLAMA | dict(rope_parameters=SCALING)
PAIRED, APART = "llama3.1-70b", "llama3.3-70b"
EXACT = ("--save_dtype", "float32")  # the query's scale, which is folded in, is no power of two


@pytest.fixture
def release(tmp_path: Path) -> Path:
    return make_release(tmp_path / "scaled", SCALED)


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert call(*words) == 2
    return capsys.readouterr().err


def test_an_export_under_another_name_is_refused(
    release: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name says how the halves lie in memory, and the checkpoint how they were laid."""
    convert(release, tmp_path / "ckpt", "--maxtext_model", PAIRED, *EXACT)
    told = refusal(capsys, "export", tmp_path / "ckpt", tmp_path / "out", "--maxtext_model", APART)
    assert f"was made for {PAIRED}" in told
    assert not (tmp_path / "out").exists()
    for options in ((), ("--maxtext_model", "llama3.1-405b")):
        assert call("export", tmp_path / "ckpt", tmp_path / "out", *options, "--overwrite") == 0
        assert_same_bits(read_tensors(tmp_path / "out"), read_tensors(release))


def test_an_export_like_another_release(release: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its configuration says another rotary embedding, and so another model of MaxText's; the weights are those of the
    checkpoint all the same, or nothing is.
    """
    plain = make_release(tmp_path / "plain", seed=1)
    convert(plain, tmp_path / "apart", *EXACT)
    assert "was made for a model that MaxText has no name for" in refusal(
        capsys, "export", tmp_path / "apart", tmp_path / "out", "--like", release, "--maxtext_model", PAIRED
    )
    assert call("export", tmp_path / "apart", tmp_path / "out", "--like", release, "--maxtext_model", APART) == 0
    assert_same_bits(read_tensors(tmp_path / "out"), read_tensors(plain))


def test_the_record_s_name_is_taken_where_the_release_s_differs(release: Path, tmp_path: Path) -> None:
    """Of the sizes of Llama 3.2 1B, whose own name says `paired` and which a release without its scaling doesn't get."""
    made = open_orbax(convert(release, tmp_path / "ckpt", "--maxtext_model", PAIRED))
    sizes = dict(
        vocab_size=128256,
        hidden_size=2048,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=8192,
        num_hidden_layers=16,
    )
    plain, scaled = (Like("", config | sizes | dict(tie_word_embeddings=True)) for config in (LLAMA, SCALED))
    paired, apart = (
        dataclasses.replace(made, record={"family": "llama", "model": name}) for name in ("llama3.2-1b", None)
    )
    for source, like, name in ((paired, scaled, "llama3.2-1b"), (paired, plain, "llama3.2-1b"), (apart, plain, None)):
        assert find_table(ExportOptions(), source, like).naming.model == name
    with pytest.raises(ModelNameError, match=r"read as llama3\.2-1b its weights would lie in another order"):
        find_table(ExportOptions(), apart, scaled)


def test_what_a_table_takes_from_a_name_is_compared() -> None:
    """Not the name."""
    record = {"family": "llama", "model": "llama3.2-1b"}
    check_made_for(FAMILY, record, PAIRED, "here")
    check_made_for(FAMILY, {"family": "qwen3", "model": "qwen3-8b"}, None, "here")
    check_made_for(FAMILY, {}, APART, "here")
    for other in (APART, None):
        with pytest.raises(ModelNameError, match=r"here was made for llama3\.2-1b"):
            check_made_for(FAMILY, record, other, "here")


def test_an_adapter_of_the_other_order(release: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Isn't merged into a checkpoint, nor exported under another name."""
    module = "model.layers.0.self_attn.q_proj"
    lora, _ = peft_adapter(tmp_path / "peft", {module: read_tensors(release)[f"{module}.weight"].shape})
    convert(release, tmp_path / "base", "--maxtext_model", PAIRED)
    for name, model in (("same", PAIRED), ("other", APART)):
        convert(release, tmp_path / name, "--maxtext_model", model, "--lora", str(lora), "--adapter_only", "true")
    assert call("reshard", tmp_path / "base", tmp_path / "merged", "--lora", tmp_path / "same") == 0
    assert f"was made for {APART}" in refusal(
        capsys, "reshard", tmp_path / "base", tmp_path / "wrong", "--lora", tmp_path / "other"
    )
    assert f"was made for {APART}" in refusal(
        capsys, "export", tmp_path / "other", tmp_path / "wrong", "--like", release, "--maxtext_model", PAIRED
    )
    assert call("export", tmp_path / "other", tmp_path / "right", "--like", release) == 0
    convert(make_release(tmp_path / "plain"), tmp_path / "unnamed")
    assert f"unnamed/0/items was made for a model that MaxText has no name for; read as {PAIRED}" in refusal(
        capsys, "reshard", tmp_path / "unnamed", tmp_path / "wrong", "--lora", tmp_path / "same"
    )
