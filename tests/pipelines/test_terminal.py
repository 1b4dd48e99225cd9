"""What a person sees on a terminal: the last line is last, Beam's noise is in a file, Ctrl-C ends it, tables fit."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import logging
import os
import pty
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import warm
from lazily import lazily
from servers.hub import FakeHub
from support import DEEPSEEK, LLAMA, call, convert, make_release, random_tensors, save

from weightbeam.pipelines.commands.help import topics
from weightbeam.pipelines.terminal import progress
from weightbeam.pipelines.terminal.arguments.parser import make_parser, parse
from weightbeam.pipelines.terminal.progress import Bar, Progress, quiet, say_above_bar
from weightbeam.pipelines.terminal.tables import Table

ocp = lazily("orbax.checkpoint")

COLUMNS = 80
COMMANDS = next(action.choices for action in make_parser()._actions if action.dest == "command")


def on_terminal(
    *arguments: object,
    meanwhile: Callable[[warm.Process, bytes], None] | None = None,
    limits: Mapping[int, int] | None = None,
) -> tuple[int, list[str]]:
    """Runs a command in a pseudo-terminal; returns its exit status and the lines that are left on the screen."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")} | {
        "TERM": "xterm"
    }
    process = warm.start(*arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, limits=limits)
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # the terminal's other end is closed
        while piece := os.read(ours, 65536):
            seen += piece
            if meanwhile:
                meanwhile(process, seen)
    os.close(ours)
    text = re.sub(r"[^\n]*\n\x1b\[A\x1b\[2K", "", seen.decode())  # a line that another one took
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return process.wait(60), [
        line.rpartition("\r")[2].rstrip() for line in text.replace("\r\n", "\n").split("\n") if line.strip()
    ]


@pytest.mark.parametrize(
    ("line", "mistakes"),
    {
        "quantize a b --resume yes --format int3 --unit_bytes lots --lora= c": [
            "--resume yes: say true or false; a folder of that name is ./yes",
            "argument --format: invalid choice: 'int3' (choose from 'fp8')",
            "argument --unit_bytes: 'lots' should be bytes, such as 134217728 or 128MiB",
            "unexpected: c",
            "--lora: says nothing; leave it out, or say what it is",
        ],
        "plan a --mesh fsdp=4 tensor=2 --hosts x": [
            "unexpected: tensor=2; the axes of a mesh have commas between them: --mesh fsdp=4,tensor=2",
            "argument --hosts: 'x' should be an integer from 1 to 2147483647",
        ],
        "diff a b --tolerance x --nonsense": [
            "argument --tolerance: 'x' should be a number from 0 on",
            "unknown options: --nonsense; weightbeam diff --help lists all",
        ],
    }.items(),
)
def test_mistakes_are_told_together(line: str, mistakes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    command, *words = line.split()
    with pytest.raises(SystemExit, match="2"):
        parse([command, *words])
    told = [each for each in capsys.readouterr().err.splitlines() if each.startswith("weightbeam")]
    assert told == [f"weightbeam {command}: {mistake}" for mistake in mistakes]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_release(tmp_path_factory.mktemp("source") / "hf", DEEPSEEK, files=2)


def test_a_conversion_ends_with_what_comes_next(source: Path, tmp_path: Path) -> None:
    """The path, MaxText's flags, what was left out, and the command that checks it."""
    status, lines = on_terminal("convert", source, tmp_path / "out", "--mesh", "fsdp=2")
    assert status == 0, lines
    assert lines[-1] == f"check it:   weightbeam verify {tmp_path / 'out' / '0'}"
    assert any(f"load_parameters_path={tmp_path / 'out' / '0' / 'items'} scan_layers=true" in line for line in lines)
    status, lines = on_terminal("verify", tmp_path / "out")
    assert status == 0, lines
    assert any("arrays compared" in line for line in lines)


def test_a_failure_ends_with_its_last_line(source: Path, tmp_path: Path) -> None:
    """No traceback of Beam's on the screen, all of it in failure.txt."""
    status, lines = on_terminal("convert", source, tmp_path / "out", limits={resource.RLIMIT_FSIZE: 40 << 10})
    assert status == 1
    assert "weightbeam convert: failed" in lines
    assert lines[-1].startswith("What is done is kept in ")
    assert lines[-1].endswith("the same command with --resume goes on from there.")
    assert not any("Traceback" in line or "apache_beam" in line for line in lines)
    (story,) = (tmp_path / "out").rglob("failure.txt")
    assert "Traceback" in story.read_text()


def test_a_difference_is_named(source: Path, tmp_path: Path) -> None:
    """The tensor that differs, and the command that shows how much, are the last things on the screen."""
    convert(source, tmp_path / "out")
    tensors = random_tensors(DEEPSEEK)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + np.ones((), tensors["model.norm.weight"].dtype)
    other = save(tmp_path / "other", DEEPSEEK, tensors)
    status, lines = on_terminal("verify", other, tmp_path / "out")
    assert status == 1
    assert lines[-3] == "weightbeam verify: failed"
    assert "model.norm.weight[0]" in lines[-2]
    assert lines[-1] == f"what differs, and how much? weightbeam diff {other} {tmp_path / 'out' / '0' / 'items'}"


def test_ctrl_c(source: Path, tmp_path: Path) -> None:
    """While it converts: exit status 130, and the last line says how to go on."""

    def stop(process: warm.Process, seen: bytes) -> None:
        if b"converting" in seen and process.poll() is None:
            os.kill(process.pid, signal.SIGINT)

    status, lines = on_terminal(
        "convert", source, tmp_path / "out", "--unit_bytes", "20K", "--direct_num_workers=1", meanwhile=stop
    )
    assert status == 130
    assert (
        lines[-1]
        == "weightbeam convert: stopped; what is done is kept, the same command with --resume goes on from there"
    )
    assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize("state", ["", "a state of the job that is as long as half of the line"])
def test_a_bar_leaves_room_for_an_echo(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    """Of Ctrl-C, which begins another line where there is none, so that the bar's last line stayed twice. Both clocks
    have their names.
    """
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv("TERM", "xterm")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    bar = Bar(stream)
    for done in range(0, 1001, 250):
        bar(Progress("converting", done * 10**6, 10**9, done / 100, finished=done == 1000, state=state))
    shown = [line for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())) if line]
    assert max(map(len, shown)) <= COLUMNS - len("^C")
    assert state or re.search(r"1.0/1.0 GB .* elapsed \d:\d\d:\d\d left \d:\d\d:\d\d$", shown[-1].rstrip()), shown[-1]


@pytest.mark.parametrize("seconds", [0.05, 0.15, 0.3, 0.5, 0.8, 1.2])
def test_ctrl_c_while_it_is_imported(source: Path, tmp_path: Path, seconds: float) -> None:
    """At any moment: one line, no traceback, exit status 130, or the conversion was faster."""
    script = "import sys; print('here', flush=True); from weightbeam.pipelines.entry import run; run()"
    command = [sys.executable, "-c", script, "convert", source, tmp_path / "out", "--resume"]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in out + err
    if "check it" not in out:
        assert process.returncode == 130, err
        assert re.search(r"^weightbeam( convert)?: stopped", err, re.MULTILINE), err
    assert "is kept" not in err or any((tmp_path / "out").iterdir())


def test_tables_fit_the_terminal(source: Path, tmp_path: Path) -> None:
    """At 80 columns no name is broken: what names have in common is a line above them."""
    status, lines = on_terminal("plan", source)
    assert status == 0, lines
    heading = lines.index("decoder.moe_layers.")
    assert lines[heading + 1].startswith("  ")
    heading = lines.index("decoder.moe_layers.DeepSeekMoeBlock_0.", heading)
    assert any(line.split()[:1] == ["MoeBlock_0.wi_0"] for line in lines[heading:])
    assert max(len(line) for line in lines if "weightbeam convert" not in line) <= COLUMNS


def test_a_table_of_real_sizes_fits_the_terminal() -> None:
    """What `inspect` shows of Qwen 3 0.6B at 80 columns: whole names, below lines with what they have in common."""
    table = Table("array", "shape", ">bytes", "chunk", spare=("bytes", "chunk"))
    layers = "params.params.decoder.layers"
    for name, shape, chunk in (
        ("step", "scalar", "scalar"),
        ("params.params.token_embedder.embedding", "151936 × 1024", "18992 × 64"),
        ("params.params.decoder.decoder_norm.scale", "1024", "1024"),
        (f"{layers}.post_self_attention_layer_norm.scale", "1024 × 28", "1024 × 28"),
        (f"{layers}.self_attention.query.kernel", "1024 × 28 × 16 × 128", "64 × 4 × 16 × 128"),
    ):
        table.add_row(name, shape, "1.19 GB", chunk)
    lines = list(table.lines(COLUMNS))
    assert max(map(len, lines)) <= COLUMNS
    assert [line.split()[0] for line in lines] == [
        "array",
        "step",
        "params.params.",
        "token_embedder.embedding",
        "decoder.decoder_norm.scale",
        "decoder.layers.",
        "post_self_attention_layer_norm.scale",
        "self_attention.query.kernel",
        "(no",
    ]
    assert "64 × 4 × 16 × 128" in lines[-2]
    assert lines[-1] == "(no room for bytes: a wider terminal, or a pipe, shows more)"
    narrow = list(table.lines(64))
    assert max(map(len, narrow)) <= 64
    assert " ".join(narrow[-2:]) == "(no room for bytes, chunk: a wider terminal, or a pipe, shows more)"


@pytest.mark.parametrize("layers", [("layers",), ("layers_0", "layers_1", "layers_2")])
def test_a_training_state_fits_the_terminal(layers: tuple[str, ...]) -> None:
    """The names of an optimizer are long; few lines above them hold most of that, and every shape stays on its line."""
    table = Table("array", "shape", "dtype", "chunk", ">bytes", spare=("dtype", "bytes", "chunk"))
    parts = ("mlp.wi_0.kernel", "mlp.wo.kernel", "post_self_attention_layer_norm.scale", "self_attention.query.kernel")
    trees = ("opt_state.0.mu.params.", "opt_state.0.nu.params.", "params.params.")
    names = [f"{tree}decoder.{layer}.{part}" for tree in trees for layer in layers for part in parts]
    for name in names:
        table.add_row(name, "128 × 4 × 4 × 16", "float32 compressed", "128 × 4 × 4 × 16", "32.8 KB")
    *lines, left = list(table.lines(COLUMNS))[1:]
    assert left.startswith("(no room for dtype, bytes:")
    assert max(map(len, lines)) <= COLUMNS
    heads = [line for line in lines if line.endswith(".")]
    assert heads == [f"{tree}decoder.{layer}." for tree in trees for layer in layers]
    rows = [line for line in lines if line not in heads]
    assert all("128 × 4 × 4 × 16  128 × 4 × 4 × 16" in line for line in rows)
    whole, head = [], ""
    for line in lines:
        head, whole = (line, whole) if line in heads else (head, [*whole, head + line.split()[0]])
    assert whole == names


def test_names_that_no_line_can_hold_are_whole() -> None:
    """Below what they begin with, all but the last word; a name without a dot stays as it is."""
    table = Table("tensor", ">relative")
    for name in ("a" * 30 + ".kernel", "b" * 50, "c.d"):
        table.add_row(name, "0.001")
    lines = [line.split("  0")[0].rstrip() for line in table.lines(40)]
    assert lines[1:] == ["a" * 30 + ".", "  kernel", "b" * 50, "c.d"]


def test_a_path_too_long_for_its_column_has_a_line_of_its_own() -> None:
    """Whole, below its row; what fits beside the other columns stays there."""
    table = Table("model or run", "target", "state", "where, or why")
    place = "/home/alice/out/org/llama-tiny/46213bb82c6f/fsdp16-0a1b2c3d"
    table.add_row("org/llama-tiny", "fsdp16", "published", f"{place}: 1 NaN in model.norm.weight")
    table.add_row("org/other", "fsdp16", "waiting", "no model of the hub matches it")
    lines = list(table.lines(COLUMNS))
    assert max(map(len, lines)) <= COLUMNS
    assert lines[1:] == [
        "org/llama-tiny  fsdp16  published",
        f"    {place}: 1 NaN in",
        "    model.norm.weight",
        "org/other       fsdp16  waiting    no model of the hub matches it",
    ]


def test_a_row_stands_below_its_own_prefix() -> None:
    """One that doesn't begin so isn't shown below it, wherever it comes."""
    table = Table("array", "shape", ">bytes")
    for name in (
        "params.params.decoder.norm.scale",
        "params.params.embedding.table",
        "step",
        "params.params.logits.kernel",
    ):
        table.add_row(name, "151936 × 1024", "1.19 GB")
    shown = [line.split("  ")[0] or line for line in table.lines(44)]
    assert [line for line in shown if "step" in line] == ["step"]
    assert [line for line in shown if line.startswith("params.params.")] == ["params.params."] * 2


def test_a_pipe_has_a_line_for_each_array(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Whole names, no padding."""
    assert call("plan", source) == 0
    lines = capfd.readouterr().out.splitlines()
    assert all(line == line.rstrip() for line in lines)
    (line,) = (line for line in lines if line.startswith("decoder.moe_layers.DeepSeekMoeBlock_0.MoeBlock_0.wi_0 "))
    assert "bfloat16" in line


@pytest.mark.parametrize("command", [*COMMANDS, ""])
def test_help_fits_the_terminal(command: str) -> None:
    """80 columns, no line broken in a word."""
    status, lines = on_terminal(*command.split(), "--help")
    assert status == 0, lines
    assert max(map(len, lines)) <= COLUMNS
    assert lines[0].startswith("usage: weightbeam")


# --- options of every command -----------------------------------------------------------------------------------------


def test_a_dry_run_writes_nothing(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`--dry_run`, `--dry-run` and `--dry_run=true` are the command's plan; what stands against the output is among its
    problems.
    """
    for option in ("--dry_run", "--dry-run", "--dry_run=true"):
        assert call("convert", source, tmp_path / "out", option) == 0
        assert "ready: " in capfd.readouterr().out
        assert not (tmp_path / "out").exists()
    convert(source, tmp_path / "out")
    capfd.readouterr()
    assert call("convert", source, tmp_path / "out", "--dry_run") == 2
    told = capfd.readouterr()
    assert "exists; --overwrite replaces it" in told.err
    assert "ready" not in told.out
    assert call("plan", source, tmp_path / "out", "--json", "-") == 2  # a plan that knows its output looks at it
    (problem,) = json.loads(capfd.readouterr().out)["problems"]
    assert problem["kind"] == "output"
    assert call("plan", source, tmp_path / "out", "--overwrite", "--direct_num_workers=2", "--mesh", "fsdp=2") == 0
    assert capfd.readouterr().out.splitlines()[-1] == (
        f"  weightbeam convert {source} {tmp_path / 'out'} --mesh fsdp=2 --overwrite --direct_num_workers=2"
    )
    assert call("verify", tmp_path / "out", "--dry_run") == 0
    assert "would compare " in capfd.readouterr().out
    assert call("plan", "convert", source, tmp_path / "new") == 0
    assert f"weightbeam convert {source} {tmp_path / 'new'}" in capfd.readouterr().out.splitlines()[-1]
    assert not (tmp_path / "new").exists()
    assert call("convert", source, tmp_path / "new", "--dry_run=false", "-q") == 0
    assert (tmp_path / "new" / "0" / "items").exists()


def test_ways_to_write_options(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Hyphens, places without names, sizes, and what was meant."""
    assert (
        call(
            "convert", "--scan-layers=false", source, "--unit-bytes", "64M", tmp_path / "out", "--direct_num_workers", 1
        )
        == 0
    )
    record = json.loads((tmp_path / "out" / "0" / "conversion.json").read_text())["options"]
    assert (record["scan_layers"], record["unit_bytes"]) == (False, 64 << 20)
    capfd.readouterr()
    assert call("convert", source, tmp_path / "b", "--scan_layer", "false") == 2
    assert "did you mean --scan_layers?" in capfd.readouterr().err
    assert call("convert", f"source={source}", tmp_path / "b") == 2
    assert f"did you mean --source={source}?" in capfd.readouterr().err
    assert call("conver", source) == 2
    assert "did you mean convert?" in capfd.readouterr().err
    assert call("convert", source, tmp_path / "b", "c") == 2
    assert "unexpected: c" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("diff a b --tolerence 3", "--tolerance"),
        ("verify a --sampel 0.1", "--sample"),
        ("inspect a --mehs fsdp=2", "--mesh"),
        ("fit a llama2-7b --jsn -", "--json"),
        ("watch --confg watch.yaml", "--config"),
        ("models --quite", "--quiet"),
        ("reshard a b --comression zstd", "--compression"),
    ],
)
def test_every_command_knows_what_option_was_meant(words: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*words.split()) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


def test_json_on_standard_output(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`--json -`: nothing else is there."""
    out = tmp_path / "out"

    def answer(*arguments: object) -> dict:
        assert call(*arguments, "--json", "-") == 0
        return json.loads(capfd.readouterr().out)

    assert answer("plan", source)["problems"] == []
    made = answer("convert", source, out)
    assert made["path"] == made["maxtext"]["load_parameters_path"] == str(out / "0" / "items")
    assert all(found["different"] == 0 for found in answer("verify", out).values())
    assert "params.params.decoder.decoder_norm.scale" in answer("inspect", out)["arrays"]
    assert "deepseek" in answer("models")


def test_quiet_verbose_and_a_log(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`-q` leaves warnings; `-v` shows what a refused release holds; the log has how it ended."""
    log = tmp_path / "log"
    assert call("convert", source, tmp_path / "out", "-q", "--mesh", "fsdp=7", "--log_file", log) == 0
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.startswith("warning: what doesn't divide over fsdp=7")
    assert all(line.startswith("warning: ") for line in said.err.splitlines())
    assert call("inspect", tmp_path / "out", "-q", "--json", os.devnull, "--log_file", os.devnull) == 0
    assert call("inspect", tmp_path / "out", "-q", "--json", tmp_path / "x", "--log_file", tmp_path / "x") == 2
    assert "is the file of --json; name another" in capfd.readouterr().err
    assert call("reshard", tmp_path / "out", tmp_path / "other", "-q", "--mesh", "fsdp=7") == 0
    assert capfd.readouterr().err.count("doesn't divide over fsdp=7") == 1  # of nine arrays
    unknown = save(tmp_path / "unknown", LLAMA | {"model_type": "gpt_neox"}, random_tensors(LLAMA))
    assert call("convert", unknown, tmp_path / "b", "--log_file", log) == 2
    short = capfd.readouterr().err
    assert "model.layers.0.mlp.up_proj.weight" not in short
    assert f"weightbeam inspect {unknown}" in short.splitlines()[-1]
    assert call("convert", unknown, tmp_path / "b", "-v") == 2
    assert "mlp.up_proj.weight" in capfd.readouterr().err
    text = log.read_text()
    assert "convert: done" in text
    assert "convert: refused" in text


def test_what_cant_be_written_is_told_before_the_work(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both files at once; a conversion took hours before the same was said of its result."""
    (tmp_path / "folder").mkdir()
    files = ("--json", tmp_path / "none/told.json", "--log_file", tmp_path / "folder")
    assert call("convert", source, tmp_path / "out", *files) == 2
    assert capfd.readouterr().err.splitlines()[1:] == [
        f"--json={tmp_path / 'none/told.json'}: there is no folder {tmp_path / 'none'}",
        f"--log_file={tmp_path / 'folder'}: is a folder; name a file in it",
    ]
    assert call("convert", source, tmp_path / "out", "--json", tmp_path / ("x" * 300)) == 2
    assert capfd.readouterr().err.endswith(": File name too long\n")
    assert call("convert", source, tmp_path / "out", "--json", tmp_path / "x/../out") == 2
    assert capfd.readouterr().err.endswith("/out: is where the result goes; name another\n")
    assert not (tmp_path / "out").exists()


def test_files_that_records_and_links_lead_to_are_not_written_over(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Those of the release that a checkpoint names are as safe as those on the command line; a result beside them isn't
    one of them.
    """
    release, step = shutil.copytree(source, tmp_path / "release"), tmp_path / "out" / "0"
    assert call("convert", release, tmp_path / "out", "--virtual", "--link", "symlink", "-q") == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for option, file in (
        ("--json", release / "config.json"),
        ("--log_file", next(release.glob("*.safetensors"))),
        ("--log_file", step / "log.txt"),
    ):
        assert call("verify", tmp_path / "out", option, file) == 2
        assert ", which would be changed; name another" in capfd.readouterr().err
    assert call("diff", source, source, "--json", step / "items" / "source" / "config.json") == 2
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    for _ in range(2):
        assert call("verify", tmp_path / "out", "-q", "--json", release / "found.json") == 0


def test_what_an_option_says_is_no_place(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report may lie in a folder that is called like the command, or like an option's value; not in an adapter's that
    has its weight behind it.
    """
    monkeypatch.chdir(tmp_path)
    for folder in ("plan", "bfloat16", "auto", "ad"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "out.json").write_text("{}")
    assert call("plan", source, "-q", "--json", "plan/out.json") == 0
    assert (
        call("convert", source, "bfloat16/ckpt", "--save_dtype", "bfloat16", "-q", "--json", "bfloat16/out.json") == 0
    )
    assert call("verify", source, "bfloat16/ckpt", "--progress", "auto", "-q", "--json", "auto/out.json") == 0
    capfd.readouterr()
    assert call("plan", source, "--lora", "ad,0.5", "--json", "ad/out.json") == 2
    assert "--json=ad/out.json: is a file of ad, and would be changed; name another" in capfd.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_files_that_take_nothing_more(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A full disk under a log is told of once; one under `--json` fails what is published, and says that it is."""
    assert call("convert", source, tmp_path / "a", "-v", "--log_file", "/dev/full") == 0
    said = capfd.readouterr().err
    assert said.count("warning: --log_file=/dev/full: No space left on device; nothing more is written to it") == 1
    assert "Traceback" not in said
    assert call("convert", source, tmp_path / "b", "--json", "/dev/full") == 1
    told = capfd.readouterr()
    assert told.err.endswith("convert: failed\n--json=/dev/full: No space left on device; all else is done\n")
    assert f"check it:   weightbeam verify {tmp_path / 'b'}" in told.out
    assert call("verify", source, tmp_path / "b", "-q") == 0


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_an_output_that_takes_nothing(source: Path, tmp_path: Path) -> None:
    """What can't be said is no success; what is published by then is said with it."""
    with open("/dev/full", "w") as full:
        process = warm.start("convert", source, tmp_path / "out", stdout=full)
        _, told = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"No space left on device: 'standard output'; but {tmp_path / 'out' / '0'} was published already" in told
    assert call("verify", source, tmp_path / "out", "-q") == 0


def test_json_is_written_whole_or_not_at_all(source: Path, tmp_path: Path) -> None:
    """What an earlier command told stays, and nothing lies beside it."""
    (tmp_path / "told").mkdir()
    (file := tmp_path / "told" / "told.json").write_text("earlier")
    status, lines = on_terminal("inspect", source, "--json", file, limits={resource.RLIMIT_FSIZE: 50})
    assert status == 1
    assert f"--json={file}: File too large; all else is done" in "".join(lines)
    assert (file.read_text(), os.listdir(file.parent)) == ("earlier", ["told.json"])


def test_verbose_shows_the_work(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Where it is staged, each unit that is done, and where it is published; nothing of it otherwise."""
    words = ("staged in", "units are done already", "unit 0 is done: ", "all units are done", "published as")
    assert call("convert", source, tmp_path / "quiet") == 0
    assert not any(word in capfd.readouterr().err for word in words)
    assert call("convert", source, tmp_path / "out", "-v") == 0
    said = capfd.readouterr().err
    assert [word for word in words if word not in said] == []
    assert f"published as {tmp_path / 'out' / '0'}\n" in said
    assert call("export", tmp_path / "out", tmp_path / "release", "-v") == 0
    assert "unit 0 is done: " in capfd.readouterr().err
    assert call("models", "-v") == 2
    assert "each unit" in help_of("convert", capfd)
    assert "--verbose" not in help_of("models", capfd)


def help_of(command: str, capfd: pytest.CaptureFixture[str]) -> str:
    assert call(command, "--help") == 0
    return capfd.readouterr().out


def test_a_message_above_the_bar() -> None:
    """It has a line of its own, and no bar stays beside it."""
    screen = Terminal()
    bar = Bar(screen)
    assert not say_above_bar("before")
    bar(Progress("converting", 1, 2, 1.0))
    assert say_above_bar("unit 0 of [/a] is done")
    bar(Progress("converting", 2, 2, 2.0, finished=True))
    assert not say_above_bar("after")
    assert "unit 0 of [/a] is done\n" in screen.getvalue()
    assert "done" not in screen.getvalue().replace("unit 0 of [/a] is done\n", "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_for_programs(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`--progress json`: lines of JSON on standard error, in bytes."""
    assert call("convert", source, tmp_path / "out", "--progress", "json") == 0
    told = [json.loads(line)["progress"] for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert told[-1]["finished"]
    assert told[-1]["done"] == told[-1]["total"]
    total = told[-1]["total"]
    assert call("verify", tmp_path / "out", "--progress", "json") == 0
    told = [json.loads(line)["progress"] for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert told[-1]["done"] == told[-1]["total"] == 2 * total  # with the digests of the checkpoint's own record


def test_completion_and_the_manual(capfd: pytest.CaptureFixture[str]) -> None:
    """Both come with the package."""
    assert call("completion", "bash") == 0
    assert "--param_scan_axis" in capfd.readouterr().out
    assert call("completion") == 2
    assert call("help") == 0
    assert "virtual" in capfd.readouterr().out
    assert call("help", "virtual") == 0
    assert capfd.readouterr().out.startswith("# ")
    assert call("help", "virtuel") == 2
    assert "did you mean virtual?" in capfd.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_form(shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A boolean's values, and its negation; files and folders, and the manual's pages."""
    assert call("completion", shell) == 0
    script = capsys.readouterr().out
    assert "no_scan_layers" in script
    (line, *_) = (
        line for line in script.splitlines() if "scan_layers" in line and "true false" in line.replace("' '", " ")
    )
    assert line
    if shell == "bash":
        function = re.search(r"complete -o \w+ -F (\w+) weightbeam", script)
        assert function
        (tmp_path / "tiny").mkdir()
        for words, completed in (
            ("convert --virtual f", "false"),
            ("convert ti", "tiny"),
            ("convert a b --like ti", "tiny"),
            ("diff a ti", "tiny"),
            ("help troublesh", "troubleshooting"),
            ("completion zs", "zsh"),
        ):
            *_, before, word = ["weightbeam", *words.split()]
            count = len(words.split())
            asked = f"{script}\nCOMP_WORDS=(weightbeam {words}) COMP_CWORD={count}\n{function[1]} weightbeam {word} {before}\necho ${{COMPREPLY[*]}}"
            ran = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True, cwd=tmp_path)
            assert ran.stdout == f"{completed}\n"


def test_help_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`weightbeam help convert` is what `weightbeam convert --help` prints; a page of that name follows it."""
    for command in ("convert", "export"):
        assert call(command, "--help") == 0
        wanted = capsys.readouterr().out
        assert call("help", command) == 0
        said = capsys.readouterr().out
        assert said.startswith(wanted)
        assert ("# Exporting" in said) == (command == "export")


def test_every_page_has_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("help") == 0
    lines = capsys.readouterr().out.split("\n\n")[0].splitlines()[1:]
    for line in lines:
        name, said = line.split("  ", 1)
        assert len(said.split()) > 4, name
        assert not set("`*[]") & set(said), name


def test_a_page_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn, through the pager where it is longer than the screen; commands stay in one piece, links name pages. In a
    pipe it is Markdown.
    """
    monkeypatch.setenv("PAGER", f"tee {tmp_path / 'paged'}")
    for page in topics():
        status, lines = on_terminal("help", page)
        assert status == 0, lines
        text = "\n".join(lines)
        assert not re.search(r"\]\((?!https?:)|^#+ |```", text, re.MULTILINE), page
        assert (tmp_path / "paged").exists()
        (tmp_path / "paged").unlink()
    status, lines = on_terminal("help", "completion")  # shorter than the screen
    assert (status, (tmp_path / "paged").exists()) == (0, False)


def test_links_of_a_page_name_pages(capsys: pytest.CaptureFixture[str]) -> None:
    """Also in a pipe, where nothing can be clicked."""
    assert call("help", "running") == 0
    text = capsys.readouterr().out
    assert "`weightbeam help checkpoint_layout`" in text
    assert not re.search(r"\]\((?!https?:)", text)


# --- what is strange, and what is found -------------------------------------------------------------------------------


def test_a_cut_vocabulary_is_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With numbers, from plan and convert."""
    source = make_release(tmp_path / "hf")
    rows = LLAMA["vocab_size"]
    wanted = f"warning: model.embed_tokens.weight: {rows - 16:,} of {rows:,} rows ({(rows - 16) / rows:.0%}) are cut off, as --vocab_size=16 asks"
    assert call("plan", source, "--vocab_size", 16) == 0
    assert capfd.readouterr().out.count(wanted) == 1
    assert call("convert", source, tmp_path / "out", "--vocab_size", 16) == 0
    said = capfd.readouterr()
    assert said.err.count(wanted) == 1
    told = f"and the keys of {tmp_path / 'out' / '0' / 'maxtext.yml'}; a comment in it has them as overrides"
    assert told in said.out
    assert "\nvocab_size: 16\n" in (tmp_path / "out" / "0" / "maxtext.yml").read_text()


def test_nan_and_zeros_are_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By verify, with the first tensor; they aren't differences."""
    tensors = random_tensors(LLAMA)
    norm, up = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
    tensors[norm] = tensors[norm].copy()
    tensors[norm][:3] = np.array([np.nan, np.inf, np.nan], ml_dtypes.bfloat16)
    tensors[up] = np.zeros_like(tensors[up])
    source = save(tmp_path / "hf", LLAMA, tensors)
    convert(source, tmp_path / "out")
    capfd.readouterr()
    assert call("verify", tmp_path / "out") == 0
    said = capfd.readouterr().out
    assert f"warning: 3 elements of the source are NaN or infinite, in 1 array, the first in {norm}" in said
    assert f"warning: 1 tensor of the source is zero throughout, the first is {up}" in said


def test_inspect_anyones_checkpoints(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A stock CheckpointManager's root, step and item, whatever the item's name; and what a stopped conversion left."""
    tree = {"w": np.arange(60, dtype=np.float32).reshape(6, 10)}
    with ocp.CheckpointManager(tmp_path / "stock") as manager:
        manager.save(3, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
    for path in (tmp_path / "stock", tmp_path / "stock" / "3", tmp_path / "stock" / "3" / "default"):
        assert call("inspect", path) == 0
        assert re.search(r"^w +6 × 10 +float32", capfd.readouterr().out, re.MULTILINE)
    (tmp_path / "stopped" / "0.orbax-checkpoint-tmp").mkdir(parents=True)
    assert call("inspect", tmp_path / "stopped") == 2
    assert "0.orbax-checkpoint-tmp" in capfd.readouterr().err


def test_a_watcher_at_a_terminal_says_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON where it is asked for; -q leaves them out, and the log has them all the same; how things stand as JSON."""
    with FakeHub() as hub:
        for name, value in hub.env().items():
            monkeypatch.setenv(name, value)
        hub.add("acme/tiny", make_release(tmp_path / "hf"), card={"license": "mit"})
        settings = {
            "output": str(tmp_path / "out"),
            "models": ["acme/*"],
            "quiet_minutes": 0,
            "licenses": ["apache-2.0"],
            "targets": [{"name": "one"}],
        }
        (tmp_path / "watch.yaml").write_text(json.dumps(settings))
        watch = ("watch", "--config", tmp_path / "watch.yaml")
        status, lines = on_terminal(*watch, "--once")
        assert status == 0
        commit = hub.repositories["acme/tiny"].head.sha[:12]
        assert lines[0] == f"acme/tiny@{commit} for one: refused: its licence is mit, which isn't among licenses"
        assert not any(line.startswith("{") for line in lines)
        status, lines = on_terminal(*watch, "--retry", "acme/tiny", "--progress", "json")
        assert json.loads(lines[0])["state"] == "discovered"
        log, told = tmp_path / "log", tmp_path / "told.json"
        status, lines = on_terminal(*watch, "--once", "-q", "--log_file", log, "--json", told)
        assert (status, lines) == (0, [])
        assert "refused: its licence" in log.read_text()
        assert [(found["state"], found["target"]) for found in json.loads(told.read_bytes())["findings"]] == [
            ("refused", "one")
        ]
    assert on_terminal(*watch, "--json", "-")[0] == 2


@pytest.mark.parametrize("output", [None, "out"], ids=["inspect", "convert"])
def test_a_reader_that_has_seen_enough(source: Path, tmp_path: Path, output: str | None) -> None:
    """As `weightbeam inspect … | head -5`: nothing is wrong with what was inspected; what is published is said."""
    theirs, ours = os.pipe()
    os.close(theirs)
    words = ("convert", source, tmp_path / output, "--progress", "none") if output else ("inspect", source)
    with os.fdopen(ours, "wb") as stdout:
        ran = warm.run(*words, stdout=stdout)
    said = f"weightbeam convert: nobody reads what it prints; but {tmp_path}/out/0 was published already\n"
    assert ran.returncode == 1
    assert ran.stderr.endswith(said) if output else ran.stderr == ""


def test_a_watcher_whose_reader_has_seen_enough(source: Path, tmp_path: Path) -> None:
    """As `weightbeam watch … --once | head`: the look hasn't failed."""
    convert(source, tmp_path / "run", "--save_dtype", "float32")
    theirs, ours = os.pipe()
    os.close(theirs)
    watch = ("watch", "--run", tmp_path / "run", "--like", source, "--output", tmp_path / "steps", "--dry_run")
    command = [sys.executable, "-u", "-m", "weightbeam.pipelines.cli", *map(str, watch)]  # without a buffer
    with os.fdopen(ours, "wb") as stdout:
        ran = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True)
    assert (ran.returncode, ran.stderr) == (1, "")


def test_a_step_that_is_followed_has_one_line(source: Path, tmp_path: Path) -> None:
    """Its states take the same one; in a pipe each has its own."""
    convert(source, tmp_path / "run", "--save_dtype", "float32")
    watch = ["watch", "--run", tmp_path / "run", "--like", source, "--once"]
    status, lines = on_terminal(*watch, "--output", tmp_path / "out")
    assert status == 0, lines
    told = [line for line in lines if "run@step-0 for hf" in line]
    assert [line.partition(" in ")[0] for line in told] == ["run@step-0 for hf: published"], lines
    command = [sys.executable, "-m", "weightbeam.pipelines.cli", *map(str, watch), "--output", str(tmp_path / "again")]
    piped = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [json.loads(line)["state"] for line in piped.stderr.splitlines()] == [
        "discovered",
        "planned",
        "converting",
        "verified",
        "published",
    ]


def test_what_is_waited_for_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing moves, and a line in a log says whose turn it is; when something does, rates are said again."""
    monkeypatch.setattr(progress, "SILENCE", 0.5)
    monkeypatch.setattr(progress, "LINE_EVERY", 0.1)
    stream, done = io.StringIO(), 0
    places = progress.roots(["gs://a/b", "gs://a/b/c.safetensors", "/elsewhere/d.safetensors"])
    with progress.watch_progress(100, lambda: done, "converting", progress.Lines(stream), places=places):
        time.sleep(1.3)
        done = 10
        time.sleep(0.4)
    lines = stream.getvalue().splitlines()
    assert "converting: 0 B of 100 B, nothing for 1 s, waiting for gs://a/b and /elsewhere/d.safetensors" in lines
    assert re.fullmatch(r"converting: 10 B of 100 B, .* B/s, \d+ s left", lines[-1])


def test_what_is_asked_in_vain_is_refused(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What two options would write, what a file of several names is, and what nothing has a use for; a refusal is one where
    nobody reads errors, too.
    """
    release = save(tmp_path / "hf", LLAMA, random_tensors(LLAMA))
    os.link(release / "config.json", tmp_path / "other name")
    before = (release / "config.json").read_bytes()
    assert call("convert", release, tmp_path / "whole", "-q") == 0
    assert call("convert", release, tmp_path / "cut", "-q", "--layers", "1:2") == 0
    assert call("cut", release, tmp_path / "is cut", "-q", "--layers", "1:2") == 0
    for words, said in (
        (("plan", release, "--json", "-", "--maxtext_config", "-"), "goes to standard output, as --json does"),
        (("plan", release, "--log_file", tmp_path / "other name"), "has another name, too"),
        (("convert", release, tmp_path / "b", "--direct_num_workers=-3"), "--direct_num_workers=-3: should be"),
        (("inspect", tmp_path / "whole", "--source", release), "--source: is for what loading costs"),
        (("logits", release, "--token_ids", "1", "--maxtext_model", "x"), "is for an Orbax checkpoint beside"),
        (
            ("reshard", tmp_path / "whole", tmp_path / "b", "--maxtext_model", "x"),
            "--maxtext_model: --maxtext_model=x is",
        ),
        (("verify", tmp_path / "is cut", tmp_path / "cut"), "name the whole release"),
    ):
        capfd.readouterr()
        assert call(*words) == 2, words
        assert said in " ".join(capfd.readouterr().err.split())
    assert (release / "config.json").read_bytes() == before
    assert (
        call("reshard", tmp_path / "whole", tmp_path / "unlike", "--like", source) == 0
    )  # another model's, as is said
    assert "this isn't the model of --like" in capfd.readouterr().err
    assert call("verify", tmp_path / "unlike", release) == 0
    assert call("export", tmp_path / "unlike", tmp_path / "back") == 0
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "weightbeam", "plan", str(tmp_path / "nothing")]
        assert subprocess.run(words, stderr=full, cwd=Path(__file__).parents[2], check=False).returncode == 2


def test_calls_at_a_time_leave_standard_error_as_it_was() -> None:
    """Whichever of them ends first; what is printed meanwhile is caught by those at work."""
    before, level = sys.stderr, logging.getLogger().level
    first, second = io.StringIO(), io.StringIO()
    one, other = quiet(first), quiet(second)
    one.__enter__()
    other.__enter__()
    print("both", file=sys.stderr)
    one.__exit__(None, None, None)
    print("one", file=sys.stderr)
    other.__exit__(None, None, None)
    assert (first.getvalue(), second.getvalue()) == ("both\n", "both\none\n")
    assert (sys.stderr, logging.getLogger().level) == (before, level)
