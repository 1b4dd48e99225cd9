"""Options in the forms in which people type them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import call

from weightbeam.pipelines.running.beam_options import check_options
from weightbeam.pipelines.terminal.arguments.parser import is_boolean, make_parser, parse
from weightbeam.pipelines.terminal.errors import Refused
from weightbeam.pipelines.terminal.keywords import read_options
from weightbeam.pipelines.watching.config import read_config
from weightbeam.transforms.planning.options import ConvertOptions

COMMANDS = next(action.choices for action in make_parser()._actions if action.dest == "command")
BOOLEANS = [
    (command, option)
    for command, parser in COMMANDS.items()
    for action in parser._actions
    if is_boolean(action)
    for option in action.option_strings
    if option.startswith("--")
]


@pytest.mark.parametrize(("command", "option"), BOOLEANS)
def test_every_boolean_takes_every_form(command: str, option: str) -> None:
    """By its name alone, with a word, with `=`, negated; with hyphens or underscores."""
    name = option.removeprefix("--")

    def read(*words: str) -> Any:
        args, rest = parse([command, *words])
        assert rest == []
        return getattr(args, name)

    words = ["a", "b"] if command == "diff" else []
    for true in ([option], [option, "true"], [f"{option}=true"], [option.replace("_", "-"), "True"], [f"{option}=1"]):
        assert read(*words, *true) is True
    for false in (
        [option, "false"],
        [f"{option}=false"],
        [f"--no_{name}"],
        [f"--no-{name.replace('_', '-')}"],
        [f"{option}=no"],
    ):
        assert read(*words, *false) is False


def test_a_path_behind_a_bare_boolean_is_a_place() -> None:
    """Whatever the option is."""
    for word in ("./maybe", "/maybe", "gs://bucket/maybe"):
        assert parse(["plan", "src", "--scan_layers", word])[0].output == word


def test_no_option_is_a_switch_of_another_kind() -> None:
    """Every option of ours without a value is one of these."""
    switches = [
        action.dest for parser in COMMANDS.values() for action in parser._actions if action.nargs == 0
    ]  # but for --help
    assert set(switches) == {"help"}


@pytest.mark.parametrize(
    "words",
    [
        "convert --virtual src out",
        "convert --mtp src --scan-layers=false out",
        "convert src --virtual out",
        "diff --dry_run src out",
        "diff -q src out",
        "plan src -q out",
        "plan --virtual src out",
        "plan src out --virtual",
        "plan convert src --virtual out",
        "verify -v src out",
    ],
)
def test_a_bare_boolean_takes_no_place(words: str) -> None:
    """The word behind it is where the weights are, unless it is `true` or `false`."""
    args, rest = parse(words.split())
    names = {"diff": ("a", "b"), "verify": ("source", "checkpoint")}.get(args.command, ("source", "output"))
    places = tuple(getattr(args, name) for name in names)
    assert (places, rest) == (("src", "out"), [])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("plan src --scan_layers 0", "--scan_layers 0: say true or false; a folder of that name is ./0"),
        ("plan src --scan_layers maybe", "--scan_layers maybe: say true or false; a folder of that name is ./maybe"),
        ("plan src --scan-layers maybe", "--scan_layers maybe: say true or false"),
        ("plan src --virtual maybe", "--virtual maybe: say true or false; a folder of that name is ./maybe"),
        ("convert src --scan_layers maybe", "--scan_layers maybe: say true or false"),
        ("export src --multimodal maybe", "--multimodal maybe: say true or false"),
        ("convert src out --scan_layers maybe", "unexpected: maybe; --scan_layers takes true or false"),
        ("convert src out --mtp=maybe", "'maybe' should be true or false"),
        ("convert src out --no_mtp=true", "unknown options: --no_mtp=true"),
        ("convert src out --mesh fsdp=2 tensor=4", "commas between them: --mesh fsdp=2,tensor=4"),
        ("convert src --mesh=fsdp=2 tensor=4", "commas between them: --mesh fsdp=2,tensor=4"),
        ("convert src out --dtype bf16", "did you mean --save_dtype?"),
        ("plan src --dtype=bf16", "did you mean --save_dtype?"),
        ("export src out --config foo.yml", "did you mean --maxtext_config?"),
        ("convert src out --config foo.yml", "--config is an option of weightbeam watch;"),
        ("diff a b --mesh fsdp=2", "--mesh is an option of weightbeam convert, weightbeam plan and others;"),
        ("convert src out --disk_typ ssd", "did you mean --disk_type?"),
    ],
)
def test_what_was_meant(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours come first, then another command's, then Beam's."""
    assert call(*words.split()) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "dtype"),
    [("bf16", "bfloat16"), ("BF16", "bfloat16"), ("fp32", "float32"), ("float", "float32"), ("float32", "float32")],
)
def test_a_dtype_by_its_short_name(given: str, dtype: str) -> None:
    assert parse(["convert", "a", "b", "--save_dtype", given])[0].save_dtype == dtype
    assert parse(["reshard", "a", "b", "--moment-dtype", given])[0].moment_dtype == dtype
    assert read_options(ConvertOptions, {"save_dtype": given}).save_dtype == dtype
    assert parse(["export", "a", "b", "--save_dtype", "fp16"])[0].save_dtype == "float16"


def test_keywords_take_what_options_take() -> None:
    """`"false"` isn't true."""
    assert read_options(ConvertOptions, {"virtual": "false", "mtp": True}).virtual is False
    with pytest.raises(Refused, match="save_dtype='fp8' should be bfloat16 or float32"):
        read_options(ConvertOptions, {"save_dtype": "fp8"})


def test_a_commands_line_reads_back(tmp_path: Path) -> None:
    """What a plan prints is read as it was."""
    from weightbeam.pipelines.terminal.arguments.parser import command_line

    given = ["convert", "a", "b", "--scan_layers", "false", "--mtp", "--virtual"]
    args, rest = parse(given)
    assert command_line(args, rest, places=("a", "b")).split()[1:] == [
        "convert",
        "a",
        "b",
        "--mtp",
        "--scan_layers",
        "false",
        "--virtual",
    ]


def test_a_watchers_dtypes(tmp_path: Path) -> None:
    """By their short names, too; what is recorded has the full one."""
    file = tmp_path / "watch.yaml"
    file.write_text(
        f"""
output: {tmp_path / "out"}
models: [acme/*]
targets: [{{name: one, save_dtype: bf16}}]
runs: [{{checkpoints: {tmp_path}, targets: [{{name: hf, save_dtype: FP16}}]}}]
"""
    )
    config = read_config(str(file))
    assert config.targets[0].options.save_dtype == "bfloat16"
    assert config.runs[0].targets[0].arguments == ("--save_dtype=float16",)


@pytest.mark.parametrize(
    "name", [action.dest for action in COMMANDS["convert"]._actions if action.dest not in ("help", "dry_run")]
)
def test_convert_options_are_none_of_beams(name: str) -> None:
    """Another command that gets one refuses it: Beam is told of them, for jobs, and took them without a word. (It has a
    `--dry_run` of its own.)
    """
    with pytest.raises(Refused, match="unknown options: "):
        check_options([f"--{name}=2"])
    check_options(["--direct_num_workers=2"])


@pytest.mark.parametrize(
    "words",
    [
        "materialize a b --save_dtype float32",
        "export a b --vocab_size 5",
        "reshard a b --vocab_rows 5",
        "quantize a b --scan_layers false",
        "cut a b --layers 0:1 --save_dtype float32",
        "verify a --mesh fsdp=8",
    ],
)
def test_an_option_of_another_command_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is looked at."""
    assert call(*words.split()) == 2
    assert f"unknown options: --{words.rpartition('--')[2]}" in capsys.readouterr().err
