"""One source, one result: whatever of the input changes between a stop and `--resume`, it is refused, or the result is
that of a quiet run.

Commands × inputs × kinds of change. A command stops after its first unit, or it is finished, and an input changes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pairs import each, some
from quantised import fp8_llama
from safetensors.numpy import save_file
from support import assert_same_bits, call, convert, make_release, restore, stop_midway

import weightbeam as wb
from weightbeam.formats.targets import orbax, release

MODEL = ("--maxtext_model", "llama2-7b")
UNIT = ("--unit_bytes", "20000")
SMALL = {
    "tokenizer.json": '{"a": 1}',
    "tokenizer_config.json": '{"bos_token": "<s>"}',
    "chat_template.jinja": "a template",
    "generation_config.json": '{"top_k": 1}',
    "LICENSE": "yours",
    "README.md": "---\nlicense: mit\n---\n",
}


def add_small(folder: Path) -> Path:
    """The small files of a release."""
    for name, text in SMALL.items():
        (folder / name).write_text(text)
    return folder


def write_adapter(folder: Path) -> Path:
    """A LoRA of one module, as PEFT writes it."""
    folder.mkdir()
    factors = {"A": np.ones((4, 32), np.float32), "B": np.ones((32, 4), np.float32)}
    module = "base_model.model.model.layers.0.self_attn.o_proj"
    save_file(
        {f"{module}.lora_{name}.weight": values for name, values in factors.items()},
        folder / "adapter_model.safetensors",
    )
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["o_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All inputs, made once."""
    made = tmp_path_factory.mktemp("made")
    add_small(make_release(made / "hf", files=2))
    add_small(fp8_llama(made / "fp8")[0])
    lora = write_adapter(made / "lora")
    for name in ("A", "B"):
        (made / name).mkdir()
        (made / name / "tokenizer.json").write_text(f'{{"{name}": 1}}')
    (made / "A" / "chat_template.jinja").write_text("A's")
    convert(made / "hf", made / "ckpt", *MODEL)
    convert(made / "hf", made / "arrays", *MODEL, "--use_ocdbt", "false")
    convert(made / "hf", made / "virtual", *MODEL, "--virtual", "--link", "copy", "--scan_layers", "false")
    convert(made / "hf", made / "mlora", *MODEL, "--lora", str(lora), "--adapter_only", "true")
    return made


@pytest.fixture
def here(inputs: Path, tmp_path: Path) -> Path:
    """A copy of the inputs, to be changed."""
    return shutil.copytree(inputs, tmp_path / "in")


# --- changes ----------------------------------------------------------------------------------------------------------


def others(path: Path) -> bytes:
    """As many bytes, and others: JSON with a blank elsewhere, of a tensor a byte that no hash of blocks looks at, of all
    else the last one.
    """
    data = path.read_bytes()
    if path.suffix == ".json":
        return data.replace(b": ", b" :", 1)
    at = 8 + int.from_bytes(data[:8], "little") if path.suffix == ".safetensors" else len(data) - 1
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def in_place(path: Path) -> None:
    """As `rsync --inplace -t` from a reproducible archive."""
    before, data = path.stat(), others(path)
    assert data != path.read_bytes()
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path: Path) -> None:
    """Another file of the same size and time."""
    before, other = path.stat(), path.with_name("other.new")
    other.write_bytes(others(path))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(other, path)


def rewrite(path: Path) -> None:
    """Another content, of another size."""
    path.write_bytes(path.read_bytes() + b"\n ")


CHANGES: dict[str, Callable[[Path], None]] = {"in place": in_place, "replaced": replace, "rewritten": rewrite}
WEIGHTS, FILES = ("in place", "replaced"), ("rewritten",)


def change_all(here: Path, pattern: str, change: str) -> None:
    """Changes the files of a pattern."""
    files = [path for path in here.glob(pattern) if path.is_file()]
    assert files
    for path in files:
        CHANGES[change](path)


# --- commands ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Command:
    """A command, `{name}` for an input in its arguments; and the inputs that change, by glob pattern."""

    words: str
    weights: tuple[str, ...]
    files: tuple[str, ...] = ()

    def arguments(self, here: Path, output: Path) -> list[str]:
        """The command line."""
        names = {path.name: path for path in here.iterdir()}
        return [word.format(**names, out=output) for word in self.words.split()] + list(UNIT)


COMMANDS = {
    "convert": Command(
        "convert --source {hf} --output {out} --maxtext_model llama2-7b --lora {lora}",
        ("hf/model-00002*", "lora/*.safetensors"),
        ("hf/tokenizer.json", "hf/README.md", "hf/config.json", "lora/adapter_config.json"),
    ),
    "materialize": Command(
        "materialize --checkpoint {virtual} --output {out}", ("virtual/0/items/source/model-00002*",)
    ),
    "merge": Command(
        "merge {hf} {out} --lora {lora}",
        ("hf/model-00001*", "lora/*.safetensors"),
        ("hf/chat_template.jinja", "hf/LICENSE", "hf/README.md", "lora/adapter_config.json"),
    ),
    "quantize": Command(
        "quantize {hf} {out} --format fp8", ("hf/model-00001*",), ("hf/generation_config.json", "hf/config.json")
    ),
    "cut": Command(
        "cut {hf} {out} --layers 1:2 --vocab_rows 40",
        ("hf/model-00001*",),
        ("hf/tokenizer.json", "hf/README.md", "hf/config.json"),
    ),
    "dequantize": Command("dequantize {fp8} {out}", ("fp8/model*",), ("fp8/tokenizer.json",)),
    "export": Command(
        "export {ckpt} {out} --lora {lora}",
        ("ckpt/0/items/ocdbt.process_*/d/*", "lora/*.safetensors"),
        ("ckpt/0/conversion.json",),
    ),
    "export of arrays": Command(
        "export {arrays} {out} --like {hf} --tokenizer {A}",
        ("arrays/0/items/*/c/**/*",),
        ("hf/generation_config.json", "hf/LICENSE", "hf/config.json", "A/chat_template.jinja"),
    ),
    "reshard": Command(
        "reshard {arrays} {out} --mesh fsdp=2 --lora {mlora}",
        ("arrays/0/items/*/c/**/*", "mlora/0/items/ocdbt.process_*/d/*"),
        ("arrays/0/conversion.json", "arrays/0/release.zip"),
    ),
}
OFTEN = ("convert", "merge", "export of arrays", "reshard")
SLOW = pytest.mark.slow("all cases take a minute; each kind of source always runs")
CASES = [
    pytest.param(name, pattern, change, marks=() if name in OFTEN and change != "replaced" else SLOW)
    for name, command in COMMANDS.items()
    for patterns, changes in ((command.weights, WEIGHTS), (command.files, FILES))
    for pattern in patterns
    for change in changes
]


def assert_same_result(made: Path, quiet: Path) -> None:
    """The same files with the same bytes; of checkpoints the same values and small files."""
    if (made / "0").is_dir():
        assert_same_bits(restore(made / "0"), restore(quiet / "0"))
        made, quiet = made / "0", quiet / "0"
    files = [{path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} for folder in (made, quiet)]
    for held in files:
        held.pop("conversion.json", None)  # has digests of databases whose names are random
        held.pop("_CHECKPOINT_METADATA", None)  # has times
    assert files[0] == files[1]


def resume_and_compare(arguments: list[str], here: Path, quiet: list[str], said: pytest.CaptureFixture[str]) -> str:
    """Goes on: it is refused, since the source or the plan is another one, or what is there is what a quiet run makes;
    returns why.
    """
    said.readouterr()
    if (status := call(*arguments, "--resume")) == 2:
        why = said.readouterr().err
        assert "--overwrite" in why or "isn't what conversion.json says was written" in why
        return why
    assert status == 0
    assert call(*quiet) == 0
    assert_same_result(here.parent / "out", here.parent / "quiet/out")
    return ""


@pytest.mark.parametrize(("name", "pattern", "change"), CASES)
def test_a_change_between_a_stop_and_resume(
    name: str,
    pattern: str,
    change: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments, quiet = (COMMANDS[name].arguments(here, here.parent / place) for place in ("out", "quiet/out"))
    stop_midway(arguments, monkeypatch)
    change_all(here, pattern, change)
    resume_and_compare(arguments, here, quiet, capsys)


@pytest.mark.parametrize(("name", "pattern", "change"), [case for case in CASES if case.values[2] in WEIGHTS])
def test_a_change_on_the_way(
    name: str,
    pattern: str,
    change: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before anything is published all that was read is looked at again; nothing of two sources is."""
    lock, changes = threading.Lock(), []

    def changing(write: Callable[..., Any]) -> Callable[..., Any]:
        def change_once(*given: Any, **named: Any) -> Any:
            with lock:
                if not changes:
                    changes.append(change_all(here, pattern, change))
            return write(*given, **named)

        return change_once

    for module in (orbax, release):
        monkeypatch.setattr(module, "write_unit", changing(module.write_unit))
    output = here.parent / "out"
    assert call(*COMMANDS[name].arguments(here, output)) == 1
    assert "changed while it was converted" in capsys.readouterr().err
    assert not (output / "0").exists()
    assert not (output / "config.json").exists()


def one_more_name(path: Path) -> None:
    os.link(path, path.parent.parent / "another name")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (one_more_name, "has 2 names, which are hard links, instead of 1: that may hide a change of what it holds"),
        (in_place, "was written, renamed or touched since, though its size and time are as before"),
        (replace, "is another file of that name, with the inode"),
        (os.utime, "was written since"),
    ],
)
def test_which_file_changed_and_how(
    change: Callable[[Path], None],
    why: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = COMMANDS["quantize"].arguments(here, here.parent / "out")
    stop_midway(arguments, monkeypatch)
    (file,) = here.glob("hf/model-00001*")
    change(file)
    capsys.readouterr()
    assert call(*arguments, "--resume") == 2
    assert f"(the source's files have changed: {file} {why}" in capsys.readouterr().err


# what has no effect on values, and would be taken for the same source: a finished result isn't the one that is wanted
OF_RESULTS = [(name, pattern) for name, command in COMMANDS.items() for pattern in command.files]


@pytest.mark.parametrize(("name", "pattern"), some(OF_RESULTS, 2))
def test_a_change_after_the_end(name: str, pattern: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--resume` of what is finished says so only where a quiet run would make the same of what is there now."""
    arguments, quiet = (COMMANDS[name].arguments(here, here.parent / place) for place in ("out", "quiet/out"))
    assert call(*arguments) == 0
    change_all(here, pattern, "in place")
    resume_and_compare(arguments, here, quiet, capsys)


@pytest.mark.parametrize(
    ("words", "finished"),
    [
        pytest.param(words, finished, id=f"{words[0]}-{'finished' if finished else 'stopped'}")
        for words, finished in each(
            [
                ("export of arrays", "{A}", "{B}"),
                ("export", "{lora}", "{lora},0.5"),
                ("merge", "{lora}", "{lora},0.5"),
                ("convert", "{lora}", "{lora},0.5"),
            ],
            [False, True],
        )
    ],
)
def test_another_option_after_a_stop(
    words: tuple[str, str, str],
    finished: bool,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Another tokenizer, or another weight of an adapter: one's chat template doesn't stay beside the other's tokens."""
    name, before, after = words
    command = COMMANDS[name]
    arguments = command.arguments(here, here.parent / "out")
    other = dataclasses.replace(command, words=command.words.replace(before, after))
    if finished:
        assert call(*arguments) == 0
    else:
        stop_midway(arguments, monkeypatch)
    quiet = other.arguments(here, here.parent / "quiet/out")
    why = resume_and_compare(other.arguments(here, here.parent / "out"), here, quiet, capsys)
    if finished:
        assert "exists" in why
    else:
        lora = f"--lora was {here}/lora, is {here}/lora,0.5)"
        assert ("another chat_template.jinja; another tokenizer.json" if after == "{B}" else lora) in why
    if not finished:
        assert call(*other.arguments(here, here.parent / "out"), "--overwrite") == 0
        assert call(*quiet) == 0
        assert_same_result(here.parent / "out", here.parent / "quiet/out")


@pytest.mark.parametrize("name", ["export", "reshard"])
def test_a_checkpoint_that_moves_between_a_stop_and_resume(
    name: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the times of its files: it is the same source. But an export's model card names the place, so it is another."""
    words = [word for word in COMMANDS[name].words.split() if "lora" not in word]
    command = dataclasses.replace(COMMANDS[name], words=" ".join(words))  # an adapter's path is an option's value
    stop_midway(command.arguments(here, here.parent / "out"), monkeypatch)
    moved = here.rename(here.parent / "moved")
    arguments, quiet = (command.arguments(moved, here.parent / place) for place in ("out", "quiet/out"))
    why = resume_and_compare(arguments, moved, quiet, capsys)
    named = f"(another README.md, which names its source: {here}"
    assert named in why if name == "export" else not why


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors"])
def test_what_changes_between_a_plan_and_its_conversion_is_refused(tmp_path: Path, name: str) -> None:
    """The plan has seen all of the release, whenever it is carried out."""
    source = add_small(make_release(tmp_path / "source"))
    planned = wb.plan(str(source))
    file = source / (name if (source / name).exists() else next(source.glob("*.safetensors")).name)
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises((wb.Refused, wb.Failed), match=file.name.replace(".", r"\.")):
        wb.convert(planned, str(tmp_path / "out"), progress=False)
    assert not (tmp_path / "out" / "0").exists()


def test_what_another_command_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It isn't gone on with; what it may be is said, since a cut, a merge and a quantisation have one kind of plan."""
    checkpoint = convert(source := make_release(tmp_path / "hf"), tmp_path / "ckpt")
    small = ["--unit_bytes", "10000"]
    stop_midway(["cut", str(source), str(tmp_path / "out"), "--layers", "0:2", *small], monkeypatch)
    capsys.readouterr()
    assert call("export", checkpoint, tmp_path / "out", "--like", source, *small, "--resume") == 2
    assert "it is of weightbeam merge, cut, quantize or dequantize" in " ".join(capsys.readouterr().err.split())
