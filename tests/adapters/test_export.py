"""`weightbeam export --lora`: adapters merged on the way from a checkpoint, as PEFT merges them into the release."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest
from lazily import lazily
from support import assert_same_bits, call, convert, peft_adapter, read_config, read_file, read_tensors

from weightbeam.formats.release.model_class import model_class
from weightbeam.formats.staging import PLAN

peft = lazily("peft")
torch = lazily("torch")
transformers = lazily("transformers")

MODELS = {"llama": ("--maxtext_model", "llama2-7b"), "mixtral": ("--maxtext_model", "mixtral-8x7b")}


@pytest.mark.parametrize("case", ["dora", "modules_to_save-layers", "bias-all", "experts", "v4-mixtral"])
def test_as_peft_merges_into_the_release(written: Path, tmp_path: Path, case: str) -> None:
    """From a float32 checkpoint, in units of a few rows; what no adapter reaches comes back as it was."""
    folder = written / case
    model = MODELS.get(read_config(folder / "base")["model_type"], ())
    convert(folder / "base", tmp_path / "ckpt", "--save_dtype", "float32", *model)
    assert (
        call("export", tmp_path / "ckpt", tmp_path / "out", "--lora", folder / "adapter", "--unit_bytes", "40000") == 0
    )
    made, merged, base = (
        read_tensors(tmp_path / "out"),
        read_file(folder / "merged.safetensors"),
        read_tensors(folder / "base"),
    )
    assert made.keys() == base.keys()
    assert any(values.tobytes() != base[name].tobytes() for name, values in made.items())
    for name in made.keys() & merged.keys():
        np.testing.assert_allclose(made[name], merged[name], rtol=3e-6, atol=3e-6, err_msg=name)


def test_an_adapter_whose_writer_was_killed_once_it_was_published(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its plan is left beside it, as after a power cut; another's file of that name isn't ours to replace."""
    base, out = written / "plain" / "base", tmp_path / "out"
    made = ("--lora", written / "plain" / "adapter", "--adapter_only", *MODELS["llama"])
    assert call("convert", base, tmp_path / "adapter", *made) == 0
    assert call("inspect", tmp_path / "adapter") == 0
    assert "the factors of a LoRA alone)" in capsys.readouterr().out
    words = ("export", tmp_path / "adapter", out, "--like", base)
    assert call(*words) == 0
    before = sorted(path.name for path in out.iterdir())
    (out / PLAN).write_bytes(gzip.compress(json.dumps({"hash": "0" * 64}).encode()))
    assert call(*words) == 2
    assert "--overwrite replaces it" in capsys.readouterr().err
    assert call(*words, "--overwrite") == 0
    assert sorted(path.name for path in out.iterdir()) == before
    (out / PLAN).write_text("mine")
    assert call(*words, "--overwrite") == 2
    assert (out / PLAN).read_text() == "mine"


def test_refused_before_anything_is_written(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An adapter of another model, and one that isn't there; half of one, or a second, is no mistake."""
    convert(written / "plain" / "base", tmp_path / "ckpt", "--save_dtype", "float32", *MODELS["llama"])
    for adapter, message in ((written / "experts" / "adapter", "adapter"), (tmp_path / "none", "none")):
        assert call("export", tmp_path / "ckpt", tmp_path / "out", "--lora", adapter) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    both = ("--lora", f"{written / 'plain' / 'adapter'},0.5", "--lora", written / "second" / "adapter")
    assert call("export", tmp_path / "ckpt", tmp_path / "out", *both) == 0
    assert call("merge", written / "plain" / "base", tmp_path / "merged", *both) == 0
    made = read_tensors(tmp_path / "out")
    for name, values in read_tensors(tmp_path / "merged").items():
        # the query's factor, there and back
        np.testing.assert_allclose(made[name], values, rtol=0, atol=5e-7 if "q_proj" in name else 0, err_msg=name)


@pytest.mark.parametrize("version", ["0.2.5", "e591f30"])
@pytest.mark.parametrize("scan", ["true", "false"])
def test_the_kernels_of_either_version(generated: Path, tmp_path: Path, version: str, scan: str) -> None:
    """Qwen 3 Next, whose stacks have other names in each, and which e591f30 stacks in blocks of layers."""
    source = generated / "cases" / "qwen3-next"
    shapes = {
        name.removesuffix(".weight"): values.shape
        for name, values in read_tensors(source).items()
        if name.endswith(("self_attn.o_proj.weight", "linear_attn.out_proj.weight"))
    }
    adapter, factors = peft_adapter(tmp_path / "adapter", shapes)
    options = ("--lora", adapter, "--adapter_only", "true", "--save_dtype", "float32", "--scan_layers", scan)
    made = convert(source, tmp_path / "ckpt", "--maxtext", version, *map(str, options))
    assert call("export", made, tmp_path / "back", "--like", source) == 0
    assert_same_bits(read_file(tmp_path / "back" / "adapter_model.safetensors"), factors)


@pytest.mark.parametrize(
    ("model", "module", "version"),
    [
        ("cases/gemma4-dense", r"model\.language_model\.layers\.\d+\.self_attn\.[qo]_proj", "0.2.5"),
        ("models/gemma4-text", r"model\.layers\.\d+\.self_attn\.[qo]_proj", "0.2.5"),
        ("models/llama4", r"language_model\.model\.layers\.\d+\.self_attn\.[qo]_proj", "0.2.5"),
        ("models/deepseek_v4", r"model\.layers\.\d+\.self_attn\.(q_a|kv)_proj", "0.2.5"),
        ("models/deepseek_v4", r"model\.layers\.\d+\.self_attn\.(q_a|kv)_proj", "e591f30"),  # another table's model
    ],
)
def test_the_names_are_those_of_the_model_that_is_loaded(
    generated: Path, tmp_path: Path, model: str, module: str, version: str
) -> None:
    """Whatever the table and the files say; with a tower, whose modules have the same last words, none but the text
    model's is a target.
    """
    source = generated / model
    base = getattr(transformers, model_class(read_config(source))).from_pretrained(source, dtype=torch.float32)
    shapes = {name: tuple(each.weight.shape) for name, each in base.named_modules() if re.fullmatch(module, name)}
    assert shapes
    adapter, factors = peft_adapter(tmp_path / "adapter", shapes)
    options = ("--lora", adapter, "--adapter_only", "true", "--save_dtype", "float32", "--scan_layers", "false")
    made = convert(source, tmp_path / "ckpt", "--maxtext", version, *map(str, options))
    assert call("export", made, tmp_path / "back", "--like", source) == 0
    assert_same_bits(read_file(tmp_path / "back" / "adapter_model.safetensors"), factors)
    tokens = torch.arange(4, 14)[None]
    with torch.no_grad():
        before = base.eval()(tokens).logits
        after = peft.PeftModel.from_pretrained(base, tmp_path / "back")(tokens).logits
    assert not torch.allclose(before, after)
