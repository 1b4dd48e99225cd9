"""Pipes, folders and devices in the place of a file that a command reads: refused at once, and nobody waits."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support import call, convert, make_release

MODEL = ("--maxtext_model", "llama2-7b")
SAID = "isn't a regular file"
KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release and a checkpoint of it."""
    folder = tmp_path_factory.mktemp("made")
    make_release(folder / "hf")
    convert(folder / "hf", folder / "ckpt", *MODEL)
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("command", "option", "name"),
    [
        (("convert", "{hf}", "{out}", *MODEL), "--sharding_rules", "rules.yml"),
        (("convert", "{hf}", "{out}", *MODEL), "--family", "family.py"),
        (("plan", "{hf}"), "--family", "family.py"),
        (("export", "{ckpt}", "{out}"), "--maxtext_config", "maxtext.yml"),
        (("reshard", "{ckpt}", "{out}"), "--maxtext_config", "maxtext.yml"),
        (("fit", "{hf}"), "--maxtext_model", "model.yml"),
        (("watch", "--once"), "--config", "watch.yml"),
    ],
    ids=["rules", "family", "family of a plan", "export", "reshard", "fit", "watch"],
)
def test_a_file_that_the_user_names(
    made: Path,
    tmp_path: Path,
    command: tuple[str, ...],
    option: str,
    name: str,
    kind: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    KINDS[kind](tmp_path / name)
    places = {"hf": made / "hf", "ckpt": made / "ckpt", "out": tmp_path / "out"}
    words = [word.format(**places) for word in command]
    assert call(*words, option, tmp_path / name) == 2
    message = capfd.readouterr().err
    assert f"{tmp_path / name}: {SAID}" in message
    assert "Traceback" not in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", [("plan",), ("convert", "--dry_run")], ids=["plan", "dry run"])
def test_a_small_file_of_a_release_that_is_planned_with(
    made: Path, tmp_path: Path, command: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    """Without an output, too, which nothing else is asked of."""
    source = Path(shutil.copytree(made / "hf", tmp_path / "hf"))
    (source / "tokenizer.json").unlink(missing_ok=True)
    os.mkfifo(source / "tokenizer.json")
    assert call(command[0], source, *MODEL, *command[1:]) == 2
    said = capfd.readouterr()
    assert f"{source / 'tokenizer.json'}: {SAID}" in said.err
    assert "ready" not in said.out


@pytest.mark.parametrize("kind", ["pipe", "folder"])  # a link that leads out is refused as one
@pytest.mark.parametrize("name", ["maxtext.yml", "release.zip"])
@pytest.mark.parametrize("known", [True, False])
def test_a_file_beside_a_checkpoint(
    made: Path, tmp_path: Path, name: str, kind: str, known: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whether its record knows the file, or says nothing of the model at all."""
    step = Path(shutil.copytree(made / "ckpt" / "0", tmp_path / "ckpt" / "0"))
    (step / name).unlink(missing_ok=True)
    KINDS[kind](step / name)
    if not known:
        (step / "conversion.json").unlink()
    commands: list[list[object]] = [["reshard", tmp_path / "ckpt", tmp_path / "out"]]
    if known:
        commands += [["export", tmp_path / "ckpt", tmp_path / "out"], ["verify", made / "hf", tmp_path / "ckpt"]]
        commands += [["export", tmp_path / "ckpt", tmp_path / "out", "--like", made / "hf"]]
    for command in commands:
        assert call(*command) == 2, command
        message = capfd.readouterr().err
        assert f"{step / name}: {SAID}" in message, command
        assert "Traceback" not in message
    assert not (tmp_path / "out").exists()
