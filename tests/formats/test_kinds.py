"""Sources as they come: what isn't a model in safetensors files is named, with what to do; and what is nearly one is
read.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support import LLAMA, call, make_release, random_tensors, save

from weightbeam.formats.safetensors import open_hf
from weightbeam.formats.storage import StorageError
from weightbeam.formats.storage.meant import hint


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "GGUF": (lambda f: touch(f, "qwen3-q4.gguf"), "GGUF"),
    "a LoRA adapter": (lambda f: touch(f, "adapter_config.json", "adapter_model.safetensors"), "--lora"),
    "diffusers": (lambda f: touch(f, "model_index.json", "text_encoder/config.json"), "text_encoder/"),
    "sentence-transformers": (lambda f: touch(f, "modules.json", "0_Transformer/config.json"), "0_Transformer/"),
    "pickles": (lambda f: touch(f, "config.json", "pytorch_model.bin"), "pickle"),
    "an Orbax root": (lambda f: touch(f, "0/items/_METADATA"), "already"),
    "an Orbax step": (lambda f: touch(f, "_CHECKPOINT_METADATA", "items/_METADATA"), "already"),
    "an Orbax item": (lambda f: touch(f, "_METADATA", "manifest.ocdbt"), "already"),
    "a hub's cache": (lambda f: touch(f, "models--Qwen--Qwen3-8B/refs/main"), "hf://Qwen/Qwen3-8B"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_isnt_a_model_is_named(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, words = KINDS[kind]
    (tmp_path / "x").mkdir()
    make(tmp_path / "x")
    assert call("plan", "--source", tmp_path / "x") == 2
    said = capsys.readouterr()
    assert words in said.out + said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("source", "meant"),
    [
        ("Qwen/Qwen3-8B", "hf://Qwen/Qwen3-8B"),
        ("hf:Qwen/Qwen3-8B", "hf://Qwen/Qwen3-8B"),
        ("https://huggingface.co/Qwen/Qwen3-8B", "hf://Qwen/Qwen3-8B"),
        ("https://huggingface.co/Qwen/Qwen3-8B/tree/v1", "hf://Qwen/Qwen3-8B@v1"),
    ],
)
def test_what_was_meant(source: str, meant: str) -> None:
    with pytest.raises(StorageError, match=f"did you mean {meant}\\?"):
        open_hf(source)


OF_A_CHECKPOINT = [
    ("verify", "Qwen/Qwen3-8B"),
    *((name, "Qwen/Qwen3-8B", "out") for name in ("export", "reshard", "materialize")),
]


@pytest.mark.parametrize(
    "command",
    [
        ("plan", "Qwen/Qwen3-8B"),
        ("inspect", "Qwen/Qwen3-8B"),
        ("verify", "Qwen/Qwen3-8B", "ckpt"),
        ("verify", "Qwen/Qwen3-8B"),
        ("diff", "Qwen/Qwen3-8B", "ckpt"),
        ("fit", "Qwen/Qwen3-8B", "qwen3-8b"),
        *((name, "Qwen/Qwen3-8B", "out") for name in ("convert", "export", "reshard", "quantize", "dequantize", "materialize")),
        ("merge", "Qwen/Qwen3-8B", "out", "--lora", "adapter"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_every_command_says_what_was_meant(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ckpt" / "items").mkdir(parents=True)
    (tmp_path / "ckpt" / "items" / "_METADATA").write_text('{"tree_metadata": {}}')
    assert call(*command) == 2
    of_a_release = command not in OF_A_CHECKPOINT
    meant = "; did you mean hf://Qwen/Qwen3-8B?" if of_a_release else "\n"  # the hub has no checkpoints
    assert f"Qwen/Qwen3-8B: no such folder{meant}" in capsys.readouterr().err


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    folder = make_release(tmp_path / "hf")
    for name in ("config.json", "model.safetensors"):
        with pytest.raises(StorageError, match=f"is a file: name its folder, {folder}"):
            open_hf(folder / name)
    for name, words in (("q4.gguf", "made for llama.cpp"), ("model.bin", "a pickle file")):
        (folder / name).write_bytes(b"x")
        with pytest.raises(StorageError, match=words):
            open_hf(folder / name)


def test_mistrals_own_format_beside_the_model(tmp_path: Path) -> None:
    """`consolidated.safetensors` holds the same weights under other names; transformers reads `model.safetensors`."""
    folder = make_release(tmp_path / "hf")
    save_file(random_tensors(LLAMA), folder / "consolidated.safetensors")
    opened = open_hf(folder)
    assert opened.problems == ()
    assert [shard.name for shard in opened.shards] == ["model.safetensors"]
    assert opened.ignored == ("consolidated.safetensors",)
    save_file(random_tensors(LLAMA), folder / "model.fp16.safetensors")  # a variant
    assert [shard.name for shard in open_hf(folder).shards] == ["model.safetensors"]
    save_file(random_tensors(LLAMA), folder / "model.rest.safetensors")
    assert [problem.kind for problem in open_hf(folder).problems] == ["index"]


def test_one_file_of_several_is_not_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A download in part, whose index isn't there yet, has fewer tensors than the model, and nothing else tells; the one
    file of a model that says it is the only one is the model.
    """
    folder = make_release(tmp_path / "hf", files=2)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00002-of-00002.safetensors").unlink()
    for command in (["cut", folder, tmp_path / "out", "--layers", "0:1"], ["quantize", folder, tmp_path / "out"]):
        assert call(*command) == 2
        assert "one file of 2, model-00001-of-00002.safetensors; get the others" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    only = make_release(tmp_path / "only")
    (only / "model.safetensors").rename(only / "model-00001-of-00001.safetensors")
    assert open_hf(only).problems == ()


def test_a_single_file_beside_an_index_of_others(tmp_path: Path) -> None:
    """transformers reads `model.safetensors` where there is one; only an index that names it says the same model."""
    folder = make_release(tmp_path / "hf", files=2)
    other = make_release(tmp_path / "other") / "model.safetensors"
    shutil.copy(other, folder)
    (found,) = open_hf(folder).problems
    assert (found.kind, found.subject) == ("index", "model.safetensors")
    assert "model.safetensors.index.json names other files, such as model-00001-of-00002.safetensors" in found.message
    weight_map = dict.fromkeys(open_hf(other.parent).tensors, other.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert open_hf(folder).problems == ()


def test_an_adapter_beside_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As PEFT leaves them in one folder: the model is converted, and what isn't merged into it is named."""
    folder = make_release(tmp_path / "hf")
    (folder / "adapter_config.json").write_text("{}")
    save_file({"base_model.model.x.lora_A.weight": np.zeros((2, 2), np.float32)}, folder / "adapter_model.safetensors")
    assert call("convert", folder, tmp_path / "out", "--maxtext_model", "llama2-7b") == 0
    assert (
        f"warning: adapter_model.safetensors lies beside the model, and isn't merged into it; --lora {folder} merges it"
        in capsys.readouterr().err
    )


def test_of_many_files_that_are_ignored_some_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_release(tmp_path / "hf", files=2)
    for number in range(1000):
        (folder / f"extra-{number:03}.safetensors").touch()
    assert call("plan", folder, "--maxtext_model", "llama2-7b") == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "ignored" in line)
    assert line.endswith("extra-018.safetensors, extra-019.safetensors and 980 more")


def test_a_resized_embedding_names_the_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = random_tensors(LLAMA)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.concatenate([tensors[name], tensors[name][:3]])
    assert call("plan", save(tmp_path / "hf", LLAMA, tensors), "--maxtext_model", "llama2-7b") == 2
    assert capsys.readouterr().err.count("vocab_size of config.json is 64") == 2


def test_a_cache_s_repository_is_its_snapshot(tmp_path: Path) -> None:
    root = tmp_path / "models--acme--tiny"
    snapshot = make_release(root / "snapshots" / ("0" * 40))
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0" * 40)
    assert open_hf(root).root == str(snapshot)
    (root / "snapshots" / ("1" * 40)).mkdir()
    assert open_hf(root).root == str(snapshot)
    (root / "refs" / "main").unlink()
    assert "several snapshots" in str(open_hf(root).problems[0])


def test_links_to_another_folder_are_allowed_by_an_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As ComfyUI's users and many clusters have them; conversion and comparison take them alike."""
    folder = make_release(tmp_path / "hf")
    (tmp_path / "elsewhere").mkdir()
    (folder / "model.safetensors").rename(tmp_path / "elsewhere" / "w")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere" / "w")
    (folder / "config.json").rename(tmp_path / "elsewhere" / "c")
    (folder / "config.json").symlink_to(tmp_path / "elsewhere" / "c")
    options = ["--source", folder, "--maxtext_model", "llama2-7b"]
    assert call("plan", *options) == 2
    assert (
        "link: model.safetensors: a symbolic link that leads out of the folder; put the file itself there, or convert it with --allow_links true"
        in (capsys.readouterr().err)
    )
    assert call("convert", *options, "--output", tmp_path / "out", "--allow_links", "true") == 0
    said = capsys.readouterr().err
    assert "isn't kept" not in said
    where = tmp_path / "elsewhere" / "c"
    assert f"config.json is a link out of the folder: what it leads to, {where}, is kept with the checkpoint" in said
    assert "config.json" in zipfile.ZipFile(tmp_path / "out/0/release.zip").namelist()
    assert json.loads((tmp_path / "out/0/conversion.json").read_text())["options"]["allow_links"] is True
    assert call("verify", *options, "--checkpoint", tmp_path / "out") == 0


@pytest.mark.parametrize("where", ["/data/models", "/ckpt/0", "../models/llama", "models"])
def test_a_folder_suggests_no_repository(where: str) -> None:
    assert hint(where) == ""


def test_a_name_suggests_a_repository() -> None:
    assert hint("Qwen/Qwen3-8B") == "; did you mean hf://Qwen/Qwen3-8B?"
