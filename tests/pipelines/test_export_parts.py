"""Towers and prediction layers that a checkpoint doesn't hold: taken from the release, or left out so that the rest is a
model of its own. transformers says whether a tensor is missing.
"""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lazily import lazily
from safetensors.numpy import load_file, save_file
from support import BF16, LLAMA, call, convert, random_tensors, read_config, read_tensors, save

from weightbeam.transforms.planning.export_config import _is_absent

torch = lazily("torch")
transformers = lazily("transformers")

WITH_TOWERS = ["models/gemma3-vision", "models/llama4", "cases/qwen3.5", "cases/gemma4-dense", "models/gemma4-e4b"]


def load_model(folder: Path) -> torch.nn.Module:
    """The model that `config.json` names, in float32; it lacks no tensor, and knows each that there is."""
    (name,) = read_config(folder)["architectures"]
    model, found = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(24).reshape(2, 12)).logits


def same_bits(made: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> list[str]:
    """The names of the tensors that are the same in both, to the bit."""
    return [name for name in made if made[name].tobytes() == wanted[name].tobytes()]


@pytest.mark.slow("loads two models with towers in transformers, 20 s each")
@pytest.mark.parametrize("model", WITH_TOWERS)
def test_a_text_model_becomes_whole_or_a_model_of_its_own(generated: Path, tmp_path: Path, model: str) -> None:
    """The text part of a release with towers, converted and exported: with the release's towers byte for byte, and as
    the class that transformers has for the language model alone. Both compute what the release computes.
    """
    source, ckpt = generated / model, tmp_path / "ckpt"
    scan = ("--scan_layers", "false") if "e4b" in model else ()
    convert(source, ckpt, "--save_dtype", "float32", *scan)
    assert call("export", ckpt, tmp_path / "whole", "--like", source) == 0
    assert call("export", ckpt, tmp_path / "text", "--multimodal", "false") == 0

    wanted, whole, text = (read_tensors(folder) for folder in (source, tmp_path / "whole", tmp_path / "text"))
    record = json.loads((tmp_path / "whole" / "weightbeam.json").read_text())
    taken = record["taken"]["tensors"]
    assert whole.keys() == wanted.keys()
    assert set(taken) <= set(same_bits(whole, wanted))
    assert len(taken) + len(text) == len(wanted)
    assert record["taken"]["from"] == str(source)
    assert not any("tower" in reason for reason in record["left_out"].values())
    assert f"{len(taken)} tensors of {source}" in (tmp_path / "whole" / "README.md").read_text()
    config = read_config(tmp_path / "text")
    edits = json.loads((tmp_path / "text" / "weightbeam.json").read_text())["config_edits"]
    assert edits == {field: config[field] for field in ("architectures", "model_type")}
    assert "the language model alone" in (tmp_path / "text" / "README.md").read_text()

    expected = logits(load_model(source))
    assert torch.equal(logits(load_model(tmp_path / "whole")), expected)
    assert torch.equal(logits(load_model(tmp_path / "text")), expected)
    for made in ("whole", "text"):
        assert call("verify", "--source", ckpt, "--checkpoint", tmp_path / made) == 0


@pytest.mark.parametrize("model", ["models/gemma3-vision", "models/gemma4-vision"])
def test_the_text_model_of_a_checkpoint_with_towers(generated: Path, tmp_path: Path, model: str) -> None:
    """It is compared with what the checkpoint has of it."""
    convert(generated / model, tmp_path / "ckpt", "--multimodal", "true", "--scan_layers", "false")
    assert call("export", tmp_path / "ckpt", tmp_path / "text", "--multimodal", "false") == 0
    assert call("verify", tmp_path / "text") == 0
    name = "model.layers.0.mlp.up_proj.weight"
    files = {file: load_file(file) for file in (tmp_path / "text").glob("*.safetensors")}
    file, tensors = next((file, tensors) for file, tensors in files.items() if name in tensors)
    save_file({**tensors, name: -tensors[name]}, file, {"format": "pt"})
    assert call("verify", tmp_path / "text") == 1


def test_what_no_release_has_is_said_at_the_start(
    generated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Towers that are nowhere; a language model that has no class of its own; prediction layers that the release lacks.
    Unasked they stay out with a warning, which the plan has, too.
    """
    source = shutil.copytree(generated / "models" / "qwen3_vl", tmp_path / "hf")
    convert(source, tmp_path / "ckpt", "--scan_layers", "false")
    lines = capsys.readouterr
    lines()
    assert call("export", tmp_path / "ckpt", tmp_path / "x", "--dry_run") == 0
    said = lines().out
    assert "warning: config.json describes towers that the checkpoint doesn't hold" in said
    assert "--like RELEASE takes them" in said
    assert "--multimodal false" not in said  # Qwen 3 VL's language model has no class of its own
    assert call("export", tmp_path / "ckpt", tmp_path / "x", "--dry_run", "--multimodal", "true") == 0
    assert f"taken    57 tensors of {source}" in lines().out  # the release that it was made of is still there
    shutil.rmtree(source)
    for options, message in (
        (("--multimodal", "true"), "--multimodal: the checkpoint has no towers, and no release is named that has them"),
        (("--multimodal", "false"), "the language model of 'qwen3_vl' alone is no model of its own"),
        (
            ("--mtp", "true", "--like", generated / "models" / "qwen3_vl"),
            "no prediction layers, and the release has none",
        ),
    ):
        assert call("export", tmp_path / "ckpt", tmp_path / "x", *options) == 2
        assert message in lines().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("model", "options", "fields"),
    [
        ("models/gemma4-e4b", (), {"vision_config": None, "audio_config": None}),
        pytest.param(
            "cases/gemma4-dense",
            (),
            {"vision_config": None},
            marks=pytest.mark.slow("a release with towers there and back, 10 s; gemma4-e4b stands for all"),
        ),
        pytest.param(
            "cases/gemma3",
            ("--multimodal", "true"),
            {"vision_config.vision_use_head": False},
            marks=pytest.mark.slow("a release with towers there and back, 10 s; gemma4-e4b stands for all"),
        ),
        pytest.param(
            "models/qwen3_omni",
            ("--multimodal", "true"),
            {"enable_audio_output": False},
            marks=pytest.mark.slow("a release with towers there and back, 10 s; gemma4-e4b stands for all"),
        ),
    ],
)
def test_config_says_which_parts_are_left_out(
    generated: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model: str,
    options: tuple[str, ...],
    fields: dict,
) -> None:
    """Where transformers makes the model without them if `config.json` says so: nothing is missing, and the text model
    is the release's. The edits are named, and the result is a release that converts again.
    """
    source, ckpt = generated / model, tmp_path / "ckpt"
    scan = () if "gemma4-dense" in model or "gemma3" in model else ("--scan_layers", "false")
    convert(source, ckpt, "--save_dtype", "float32", *scan, *options)
    assert call("export", ckpt, tmp_path / "out") == 0
    err = " ".join(capsys.readouterr().err.split())
    assert "parts that the checkpoint doesn't hold stay out" in err
    assert f"and config.json says so ({', '.join(fields)})" in err
    config = read_config(tmp_path / "out")
    assert {field: functools.reduce(dict.__getitem__, field.split("."), config) for field in fields} == fields
    assert json.loads((tmp_path / "out" / "weightbeam.json").read_text())["config_edits"] == fields
    card = (tmp_path / "out" / "README.md").read_text()
    assert all(f"* `{field}: " in card and f"-> {json.dumps(value)}" in card for field, value in fields.items())
    whole, made = load_model(source), load_model(tmp_path / "out")
    if "omni" not in model:
        assert torch.equal(logits(made), logits(whole))
    parts = made.state_dict()
    assert parts.keys() < whole.state_dict().keys()
    assert call("verify", tmp_path / "out") == 0
    assert call("plan", tmp_path / "out", *scan, *options) == 0


@pytest.mark.parametrize(
    ("config", "field", "value", "absent"),
    [
        ({"audio_config": {"depth": 2}}, "audio_config", None, False),
        ({"audio_config": None}, "audio_config", None, True),
        ({}, "audio_config", None, True),
        ({"vision_config": {"depth": 2}}, "vision_config.use_head", False, False),  # true where it isn't said
        ({"vision_config": {"use_head": False}}, "vision_config.use_head", False, True),
        ({}, "vision_config.use_head", False, True),
        ({}, "enable_audio_output", False, False),
    ],
)
def test_what_config_says_of_a_part(config: dict[str, Any], field: str, value: Any, absent: bool) -> None:
    assert _is_absent(config, field, value) is absent


def test_prediction_layers_of_the_release(generated: Path, tmp_path: Path) -> None:
    """Of a checkpoint without them: none, not even the copies of embedding and head that belong to them, and
    `config.json` says so; or those of the release, byte for byte.
    """
    source = generated / "cases" / "deepseek3-mtp-standalone"
    convert(source, tmp_path / "ckpt", "--save_dtype", "float32")
    wanted = read_tensors(source)
    own = {name for name in wanted if name.startswith("model.layers.5.")}
    assert call("export", tmp_path / "ckpt", tmp_path / "without", "--like", source) == 0
    assert read_tensors(tmp_path / "without").keys() == wanted.keys() - own
    assert read_config(tmp_path / "without")["num_nextn_predict_layers"] == 0
    assert "num_nextn_predict_layers: 1 -> 0" in (tmp_path / "without" / "README.md").read_text()
    assert call("export", tmp_path / "ckpt", tmp_path / "with", "--like", source, "--mtp", "true") == 0
    assert set(same_bits(read_tensors(tmp_path / "with"), wanted)) == wanted.keys()
    assert read_config(tmp_path / "with")["num_nextn_predict_layers"] == 1


def test_the_norm_of_prediction_layers_that_maxtext_shares(
    generated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """e591f30's block has none of its own: it is the release's, or its lack is told."""
    source = shutil.copytree(generated / "cases" / "deepseek3-mtp-standalone", tmp_path / "hf")
    convert(source, tmp_path / "ckpt", "--save_dtype", "float32", "--mtp", "true", "--maxtext", "e591f30")
    wanted, norm = read_tensors(source), "model.layers.5.shared_head.norm.weight"
    assert call("export", tmp_path / "ckpt", tmp_path / "with", "--like", source) == 0
    assert set(same_bits(read_tensors(tmp_path / "with"), wanted)) == wanted.keys()
    assert "missed by loaders" not in capsys.readouterr().err
    source.rename(tmp_path / "elsewhere")
    assert call("export", tmp_path / "ckpt", tmp_path / "without", "--mtp", "true") == 0
    assert read_tensors(tmp_path / "without").keys() == wanted.keys() - {norm}
    told = f"missed by loaders: 1 of the tensors of {source}, no parameters in MaxText, such as {norm}; --like RELEASE"
    assert told in capsys.readouterr().err


def flip(folder: Path, name: str) -> None:
    """Turns a bit of a tensor's first element."""
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start + json.loads(data[8:start])[name]["data_offsets"][0]] ^= 1
    file.write_bytes(data)


def test_verify_judges_what_was_taken(generated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tensors that no array makes are compared with the release that they were taken from, whichever side is named
    first: counted, named where they differ, by bytes, after a cast too. Where the release isn't there, `--like` names it.
    """
    source = shutil.copytree(generated / "cases" / "deepseek3-mtp-standalone", tmp_path / "hf")
    convert(source, tmp_path / "ckpt")
    for folder, options in (("out", ()), ("half", ("--save_dtype", "float16"))):
        assert call("export", tmp_path / "ckpt", tmp_path / folder, "--like", source, "--mtp", "true", *options) == 0
    taken = json.loads((tmp_path / "out" / "weightbeam.json").read_text())["taken"]["tensors"]
    capsys.readouterr()
    assert call("verify", tmp_path / "ckpt", tmp_path / "out") == 0
    assert f"of {len(taken)} tensors of it compared with {source}" in capsys.readouterr().out

    name = "model.layers.5.eh_proj.weight"
    assert name in taken
    for folder, sides in (("out", ("--source", tmp_path / "out", "--checkpoint", tmp_path / "ckpt")), ("half", ())):
        flip(tmp_path / folder, name)
        assert call("verify", *(sides or (tmp_path / folder,)), "--json", tmp_path / "found.json") == 1
        assert f"{name}: 1 of 8,192 elements differ; {name}[0, 0] should be" in capsys.readouterr().err
        assert json.loads((tmp_path / "found.json").read_text())[name]["different"] == 1
    flip(tmp_path / "out", name)
    source.rename(tmp_path / "moved")
    assert call("verify", tmp_path / "out") == 2
    assert "name it with --like" in capsys.readouterr().err
    assert call("verify", tmp_path / "out", "--like", tmp_path / "moved") == 0

    (file,) = (tmp_path / "out").glob("*.safetensors")
    save_file({each: values for each, values in load_file(file).items() if each != name}, file)
    capsys.readouterr()
    assert call("verify", tmp_path / "out", "--like", tmp_path / "moved") == 1
    assert f"{name} isn't in {tmp_path / 'out'}, which says that it has it" in " ".join(capsys.readouterr().err.split())


def test_verify_judges_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tied head that the release stores is written again, and is what the embedding is."""
    tensors = random_tensors(LLAMA)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    source = save(tmp_path / "hf", LLAMA | {"tie_word_embeddings": True}, tensors)
    convert(source, tmp_path / "ckpt", "--maxtext_model", "llama2-7b")
    assert call("export", tmp_path / "ckpt", tmp_path / "out") == 0
    assert read_tensors(tmp_path / "out")["lm_head.weight"].dtype == BF16
    assert call("verify", tmp_path / "out") == 0
    assert "of 1 tensor of it compared with those that they are copies of" in capsys.readouterr().out
    flip(tmp_path / "out", "lm_head.weight")
    assert call("verify", tmp_path / "out") == 1
    assert "lm_head.weight: 1 of 2,048 elements differ" in capsys.readouterr().err
