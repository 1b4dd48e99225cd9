"""One path of each command, in this process: the exit status, the last line, and the bits of what it made.

What else a command may meet (refusals, kills, buckets, hubs, engines) is tested in `tests/pipelines`.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from servers.clients import at_hub
from support import (
    BF16,
    F32,
    FP8,
    LLAMA,
    assert_same_bits,
    call,
    make_release,
    peft_adapter,
    random_tensors,
    read_config,
    read_tensors,
    reference,
    restore,
    save,
)

from weightbeam.formats.safetensors import open_hf

CONFIG = LLAMA | dict(head_dim=16, architectures=["LlamaForCausalLM"])  # its query's scale, 1/4, goes back exactly
MODEL = ("--maxtext_model", "llama2-7b")


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_release(tmp_path_factory.mktemp("release") / "hf", CONFIG, files=2)


@pytest.fixture(scope="module")
def checkpoint(release: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("checkpoint") / "ckpt"
    assert call("convert", release, output, *MODEL) == 0
    return output


@pytest.fixture(scope="module")
def exported(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("exported") / "tuned"
    assert call("export", checkpoint, output) == 0
    return output


def test_plan(release: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("plan", release, *MODEL, "--mesh", "fsdp=2") == 0
    assert "ready" in capsys.readouterr().out


def test_convert(checkpoint: Path) -> None:
    assert_same_bits(restore(checkpoint / "0"), reference(CONFIG, random_tensors(CONFIG), BF16))


def test_verify(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every element, against the release that the record names."""
    assert call("verify", checkpoint) == 0
    assert "12 exact" in capsys.readouterr().out


def test_inspect(checkpoint: Path, release: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (checkpoint, release):
        assert call("inspect", folder) == 0
        assert "llama" in capsys.readouterr().out


def test_export(exported: Path) -> None:
    assert_same_bits(read_tensors(exported), random_tensors(CONFIG))
    assert read_config(exported)["num_hidden_layers"] == 2


def test_verify_an_export(exported: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("verify", "--source", exported, "--checkpoint", checkpoint) == 0
    assert "exact" in capsys.readouterr().out


def test_reshard(checkpoint: Path, tmp_path: Path) -> None:
    assert call("reshard", checkpoint, tmp_path / "out", "--mesh", "fsdp=2", "--scan_layers", "false") == 0
    made, wanted = restore(tmp_path / "out" / "0"), restore(checkpoint / "0")
    assert_same_bits(
        {key: array for key, array in made.items() if ".layers_" not in key},
        {key: array for key, array in wanted.items() if ".layers." not in key},
    )
    for layer in range(2):
        key = "self_attention.query.kernel"
        assert (made[f"decoder.layers_{layer}.{key}"] == wanted[f"decoder.layers.{key}"][:, layer]).all()


def test_diff(checkpoint: Path, release: Path, exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for other in (release, exported):
        assert call("diff", other, checkpoint) == 0
    changed = random_tensors(CONFIG, seed=1)
    other = save(exported.parent / "other", CONFIG, changed)
    capsys.readouterr()
    assert call("diff", exported, other) == 1
    assert "model.norm.weight" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["verify", "diff", "logits"])
def test_what_a_command_that_only_reads_would_do(
    checkpoint: Path, release: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """For a person and a program."""
    words = {"verify": (checkpoint,), "diff": (release, checkpoint), "logits": (release, "--token_ids", "1,2")}
    assert call(command, *words[command], "--dry_run") == 0
    assert "would " in capsys.readouterr().out
    assert call(command, *words[command], "--dry_run", "--json", "-") == 0
    figures = json.loads(capsys.readouterr().out)
    assert str(release) in (figures.get("source"), figures.get("a"))
    assert figures.get("arrays") == 12 or figures.get("tensors") == 12 or figures["layers"] == 2


@pytest.mark.parametrize(
    "command", ["convert", "cut", "dequantize", "export", "materialize", "merge", "quantize", "reshard", "verify"]
)
def test_a_dry_run_takes_no_option_that_the_command_would_not(
    checkpoint: Path, release: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    of_checkpoints = ("export", "materialize", "reshard", "verify")
    words = [checkpoint if command in of_checkpoints else release, *([tmp_path / "out"] if command != "verify" else [])]
    own = ["--layers", "0:1"] if command == "cut" else []
    assert call(command, *words, *own, "--dry_run", "--nonsense=1") == 2
    assert "unknown options: --nonsense=1" in capsys.readouterr().err


def test_virtual_and_materialize(release: Path, checkpoint: Path, tmp_path: Path) -> None:
    assert call("convert", release, tmp_path / "virtual", *MODEL, "--virtual", "--link", "copy") == 0
    assert call("materialize", tmp_path / "virtual", tmp_path / "made", "--mesh", "fsdp=2") == 0
    for step in (tmp_path / "virtual" / "0", tmp_path / "made" / "0"):
        assert_same_bits(restore(step), restore(checkpoint / "0"))


def test_merge(release: Path, tmp_path: Path) -> None:
    """W + 2 · B A, in float32, rounded once."""
    name = "model.layers.1.self_attn.o_proj"
    adapter, factors = peft_adapter(tmp_path / "adapter", {name: (32, 64)}, layers_to_transform=[1])
    assert call("merge", release, tmp_path / "out", "--lora", adapter) == 0
    a, b = (factors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    wanted = random_tensors(CONFIG)[f"{name}.weight"].astype(F32) + 2 * (b @ a)
    made = read_tensors(tmp_path / "out")
    np.testing.assert_allclose(made[f"{name}.weight"].astype(F32), wanted, rtol=2**-8)
    assert_same_bits(
        {key: tensor for key, tensor in made.items() if name not in key},
        {key: tensor for key, tensor in random_tensors(CONFIG).items() if name not in key},
    )


def test_cut(release: Path, tmp_path: Path) -> None:
    """The second layer, as the only one."""
    assert call("cut", release, tmp_path / "cut", "--layers", "1:2", "--vocab_rows", "16") == 0
    tensors = random_tensors(CONFIG)
    wanted = {
        name.replace("layers.1", "layers.0"): values for name, values in tensors.items() if "layers.0" not in name
    }
    wanted |= {name: tensors[name][:16] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    assert_same_bits(read_tensors(tmp_path / "cut"), wanted)
    assert (read_config(tmp_path / "cut")["num_hidden_layers"], read_config(tmp_path / "cut")["vocab_size"]) == (1, 16)


def test_quantize_and_dequantize(release: Path, tmp_path: Path) -> None:
    """Close to what it was, and bit for bit where nothing is quantised."""
    assert call("quantize", release, tmp_path / "fp8") == 0
    assert call("dequantize", tmp_path / "fp8", tmp_path / "out") == 0
    made, name = read_tensors(tmp_path / "out"), "model.layers.0.mlp.up_proj.weight"
    assert open_hf(tmp_path / "fp8").tensors[name].dtype == FP8
    wanted = random_tensors(CONFIG)[name].astype(F32)
    np.testing.assert_allclose(made[name].astype(F32), wanted, atol=np.abs(wanted).max() / 16)
    assert (made["model.norm.weight"] == random_tensors(CONFIG)["model.norm.weight"]).all()


def test_fit(release: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("plan", release, *MODEL, "--maxtext_config", tmp_path / "maxtext.yml") == 0
    assert call("fit", release, tmp_path / "maxtext.yml") == 0
    assert "fits" in capsys.readouterr().out


@pytest.mark.usefixtures("warm_workers")
def test_watch(release: Path, tmp_path: Path) -> None:
    """A release on the hub, converted once."""
    settings = dict(output=str(tmp_path / "out"), models=["acme/*"], quiet_minutes=0, verify=0)
    settings["targets"] = [dict(name="one", maxtext_model="llama2-7b")]
    (tmp_path / "watch.yaml").write_text(yaml.safe_dump(settings))
    with at_hub() as hub:
        hub.add("acme/tiny", release)
        assert call("watch", "--config", tmp_path / "watch.yaml", "--once") == 0
    report = json.loads((tmp_path / "out" / "acme/tiny" / "one.json").read_bytes())
    assert_same_bits(restore(Path(report["checkpoint"]) / "0"), reference(CONFIG, random_tensors(CONFIG), BF16))


@pytest.mark.parametrize("words", [("models",), ("help",), ("help", "numerics"), ("completion", "bash"), ("--help",)])
def test_what_is_printed(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*words) == 0
    assert capsys.readouterr().out.strip()
