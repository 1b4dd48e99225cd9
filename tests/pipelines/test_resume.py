"""Conversions that were stopped: killed at any file operation, resumed as often as it takes, the result is the same."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pairs
import pytest
import warm
from lazily import lazily
from processes import run
from support import (
    BF16,
    DEEPSEEK,
    LLAMA,
    assert_same_bits,
    call,
    convert,
    digests,
    flatten,
    make_release,
    random_tensors,
    reference,
    restore,
)

from weightbeam.formats.orbax.ocdbt import ATTEMPT
from weightbeam.formats.safetensors import open_hf
from weightbeam.formats.staging import staging_at
from weightbeam.pipelines.running.graph import run_units
from weightbeam.transforms.planning.conversion_planner import plan_conversion
from weightbeam.transforms.planning.options import ConvertOptions, Delivery
from weightbeam.transforms.planning.transfer import Transfer

ocp = lazily("orbax.checkpoint")

SMALL = ["--unit_bytes", "8000", "--mesh", "fsdp=2"]
COARSE = ["--unit_bytes", "60000", "--mesh", "fsdp=2"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_release(tmp_path / "hf", DEEPSEEK, files=2)


def ledger(output: Path) -> dict[str, str]:
    """The attempt that made each unit, by the unit's file."""
    entries = output.glob("0.*.orbax-checkpoint-tmp/units/*/[0-9]*.json")
    return {path.name: json.loads(path.read_bytes())["attempt"] for path in entries}


def stop_after(source: Path, output: Path, units: int, *options: str, by: signal.Signals) -> tuple[int, str]:
    """A conversion in a process of its own, stopped by a signal once it has entered this many units in its ledger;
    returns its exit status and message.
    """
    stop = warm.Signal(by, units, rf"{re.escape(str(output))}/0\..*/units/[^/]+/[0-9]+\.json")
    ran = warm.run("convert", source, output, "--direct_num_workers=1", *SMALL, *options, stop=stop)
    assert not (output / "0").exists()
    return ran.returncode, ran.stderr + ran.stdout


def kill_after(source: Path, output: Path, units: int, *options: str) -> dict[str, str]:
    """The same with `kill -9`; returns the ledger that was left."""
    assert stop_after(source, output, units, *options, by=signal.SIGKILL)[0] == -signal.SIGKILL
    return ledger(output)


def test_resume_goes_on_where_it_was_killed(source: Path, tmp_path: Path) -> None:
    """Killed twice on the way: the same bits, and no unit whose ledger entry exists is made again; the stages' counters
    tell.
    """
    output = tmp_path / "out"
    first = kill_after(source, output, 3)
    second = kill_after(source, output, 3, "--resume")
    assert first.items() <= second.items()
    conversion = plan_conversion(ConvertOptions(unit_bytes=8000, mesh=("fsdp=2",)), open_hf(source))
    rest = [conversion.expand(unit) for unit in range(len(conversion.units)) if f"{unit}.json" not in second]
    assert len(rest) > 3
    with staging_at(output, 0).hold():  # the killed process's, which is stale
        written = run_units(conversion, staging_at(output, 0, conversion.hash), [], {}, Delivery(resume=True), None)
    assert written == sum(
        math.prod(b - a for a, b in recipe.box) * recipe.spec.dtype.itemsize for unit in rest for recipe in unit.recipes
    )
    used = {path.name.removeprefix(ATTEMPT) for path in (output / "0" / "items").glob(f"{ATTEMPT}*")}
    assert set(second.values()) <= used
    assert_same_bits(restore(output / "0"), reference(DEEPSEEK, random_tensors(DEEPSEEK), BF16))
    assert [path.name for path in output.iterdir()] == ["0"]


@pytest.mark.parametrize("left", pairs.some([b"", b'{"attempt": "0123', bytes(40), b"[1]"], 2), ids=repr)
def test_an_entry_that_cant_be_read_doesnt_count(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: bytes
) -> None:
    """A machine that crashed, or a full disk, may leave a file without its bytes: the unit is made anew, and all others
    stay.
    """
    output = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr("weightbeam.formats.orbax.ocdbt.merge", lambda *_: 1 / 0)
        assert call("convert", source, output, *SMALL) == 1
    before = ledger(output)
    damaged = [next(output.glob(f"0.*/units/*/{unit}.json")) for unit in (0, 3)]
    for entry in damaged:
        entry.write_bytes(left)
    monkeypatch.setattr("weightbeam.formats.orbax.ocdbt.merge", lambda *_: 1 / 0)
    assert call("convert", source, output, *SMALL, "--resume") == 1
    after = ledger(output)
    assert {name for name in before if before[name] != after[name]} == {entry.name for entry in damaged}
    monkeypatch.undo()
    assert_same_bits(
        restore(convert(source, output, *SMALL, "--resume")), reference(DEEPSEEK, random_tensors(DEEPSEEK), BF16)
    )


@pytest.mark.parametrize(
    ("how", "options"), pairs.each(["edited", "cut", "gone"], [(), ("--use_ocdbt", "false")]), ids=str
)
def test_staged_data_that_changed_are_made_anew(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], how: str, options: tuple[str, ...]
) -> None:
    """Between a stop and `--resume`: by size and time of their files; the other units stay."""
    output = tmp_path / "out"
    before = kill_after(source, output, 3, *options)
    name, attempt = sorted(before.items())[1]
    if options:
        (items,) = output.glob("0.*/items")
        file = items / json.loads(next(output.glob(f"0.*/units/*/{name}")).read_bytes())["files"][0]
    else:
        (file,) = output.glob(f"0.*/items/{ATTEMPT}{attempt}/d/*")
    data = file.read_bytes()
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(data[: len(data) // 2] if how == "cut" else bytes([data[0] ^ 1]) + data[1:])
    step = convert(source, output, *SMALL, *options, "--resume")
    assert "1 of the staged units aren't as they were written" in capfd.readouterr().err
    assert_same_bits(restore(step), reference(DEEPSEEK, random_tensors(DEEPSEEK), BF16))
    if not options:
        used = {path.name.removeprefix(ATTEMPT) for path in (step / "items").glob(f"{ATTEMPT}*")}
        assert set(before.values()) - used == {attempt}, name


@pytest.mark.parametrize("how", ["cut", "gone"])
def test_a_staged_file_of_a_release_that_changed_is_made_anew(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Its rows were zeros in what was published."""
    options = ("quantize", source, tmp_path / "out", "--unit_bytes", "8000")
    wanted = tmp_path / "wanted"
    assert call("quantize", source, wanted) == 0
    with monkeypatch.context() as patched:
        patched.setattr("weightbeam.formats.targets.release.ReleaseTarget.assemble", lambda *_: 1 / 0)
        assert call(*options) == 1
    (staged, *_) = sorted(tmp_path.glob("out.*.weightbeam-tmp/*.safetensors"))
    if how == "gone":
        staged.unlink()
    else:
        os.truncate(staged, staged.stat().st_size // 2)
    capfd.readouterr()
    assert call(*options, "--resume") == 0
    assert "of the staged units aren't as they were written" in capfd.readouterr().err
    for file in wanted.glob("*.safetensors"):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_what_was_there_has_no_part_in_the_rate(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The bytes of the rest, and their rate; of a whole conversion its own."""
    output = tmp_path / "out"
    kill_after(source, output, 3)
    capfd.readouterr()
    for folder, rest in ((output, True), (tmp_path / "whole", False)):
        convert(source, folder, *SMALL, "--resume")
        (line,) = (line for line in capfd.readouterr().out.splitlines() if " arrays, " in line)
        found = re.fullmatch(
            r".*: \d+ arrays, 92.4 KB(?:; ([\d.]+) KB written)? in ([\d.]+) s \(([\d.]+) (K?)B/s\)", line
        )
        assert found, line
        assert bool(found[1]) == rest
        written, seconds, rate = float(found[1] or 92.4), float(found[2]), float(found[3]) / (1 if found[4] else 1000)
        assert written / (seconds + 0.051) < 1.01 * rate
        assert rate < 1.01 * written / max(seconds - 0.051, 1e-3)


@pytest.mark.parametrize("command", ["convert", "export", "reshard", "reshard copied", "quantize"])
def test_the_bar_of_a_resumed_command_ends_at_its_total(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever the sizes of the units that were done: the largest come first."""
    release = make_release(tmp_path / "hf", DEEPSEEK)
    if command in ("convert", "quantize"):
        source = release
    else:
        convert(release, tmp_path / "orbax", "--compression", "zstd")
        source = tmp_path / "orbax" / "0" / "items"
    options = {
        "export": ["--like", release, "--unit_bytes", "60000"],
        "reshard": ["--like", release, *SMALL],
        "reshard copied": ["--like", release, "--unit_bytes", "60000"],
        "quantize": ["--format", "fp8", "--unit_bytes", "60000"],
    }.get(command, COARSE)
    line = [command.split()[0], source, tmp_path / "out", *options, "--direct_num_workers=1", "--progress", "json"]
    write, written = Transfer.write, []

    def some(*args: Any) -> int:
        if len(written) == 2:
            raise OSError("no more")
        written.append(write(*args))
        return written[-1]

    with monkeypatch.context() as patched:
        patched.setattr(Transfer, "write", some)
        assert call(*line) == 1
    capfd.readouterr()
    assert call(*line, "--resume") == 0
    told = [json.loads(line)["progress"] for line in capfd.readouterr().err.splitlines() if line.startswith('{"prog')]
    assert told[-1]["finished"]
    assert 0 < told[-1]["done"] == told[-1]["total"]


def test_resume_without_a_database(source: Path, tmp_path: Path) -> None:
    """The same for an array a folder, where units write straight to their places."""
    output, options = tmp_path / "out", ["--use_ocdbt", "false", "--use_zarr3", "false"]
    kill_after(source, output, 5, *options)
    assert_same_bits(
        restore(convert(source, output, *SMALL, *options, "--resume")),
        reference(DEEPSEEK, random_tensors(DEEPSEEK), BF16),
    )


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_polite_stop_says_how_to_go_on(source: Path, tmp_path: Path, by: signal.Signals) -> None:
    """Ctrl-C and a scheduler's SIGTERM: exit status 130 and 1, one message without a traceback, and `--resume` finishes
    it.
    """
    status, message = stop_after(source, tmp_path / "out", 3, by=by)
    assert status == (130 if by == signal.SIGINT else 1)
    assert "stopped" in message
    assert "--resume" in message
    assert "Traceback" not in message
    assert ledger(tmp_path / "out")
    step = convert(source, tmp_path / "out", *SMALL, "--resume")
    assert_same_bits(restore(step), reference(DEEPSEEK, random_tensors(DEEPSEEK), BF16))


def test_what_else_a_stopped_conversion_allows(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without `--resume` it is refused; with other options, or a source that changed, too, and the message says what
    differs; `--overwrite` starts anew. What was done stays untouched by a refusal.
    """
    output = tmp_path / "out"
    left = kill_after(source, output, 3)

    def refused(*options: str) -> str:
        capfd.readouterr()
        assert call("convert", "--source", source, "--output", output, *options) == 2
        assert ledger(output) == left
        return capfd.readouterr().err

    message = refused(*SMALL)
    assert "--resume" in message
    assert "--overwrite" in message
    message = refused("--unit_bytes", "8000", "--mesh", "fsdp=4", "--scan_layers", "false", "--resume")
    assert re.search(r"--mesh was \S*fsdp=2\S* is \S*fsdp=4", message)
    assert "--scan_layers was True, is False" in message
    assert "unit_bytes" not in message

    other = make_release(tmp_path / "other")
    capfd.readouterr()
    assert call("convert", "--source", other, "--output", output, *SMALL, "--resume") == 2
    assert "source" in capfd.readouterr().err
    os.utime(source / "model-00001-of-00002.safetensors")
    assert "files have changed" in refused(*SMALL, "--resume")

    step = convert(source, output, "--overwrite")
    assert_same_bits(restore(step), reference(DEEPSEEK, random_tensors(DEEPSEEK), BF16))
    assert [path.name for path in output.iterdir()] == ["0"]


def test_resume_of_nothing_and_of_everything(source: Path, tmp_path: Path) -> None:
    """With nothing there it converts; with the checkpoint finished it does nothing, not to a byte or a time."""
    output = tmp_path / "out"
    step = convert(source, output, *SMALL, "--resume")
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    convert(source, output, *SMALL, "--resume")
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before
    assert_same_bits(restore(step), reference(DEEPSEEK, random_tensors(DEEPSEEK), BF16))


def test_a_finished_checkpoint_with_another_plan_isnt_taken_for_done(source: Path, tmp_path: Path) -> None:
    """`--resume` finds a finished checkpoint that other options made: to say "nothing to do" would be a lie."""
    convert(source, tmp_path / "out", *SMALL)
    assert call("convert", "--source", source, "--output", tmp_path / "out", "--scan_layers", "false", "--resume") == 2


# --- dying at every file operation ------------------------------------------------------------------------------------

# Python tells a hook of every file that is opened, renamed, linked or removed. The n-th of them below the output is the
# process's last act.
DYING = """
import os, sys
from weightbeam.pipelines.cli import main
import weightbeam.pipelines.commands.convert

WRITES = ("os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")

def die_at(last, output):
    count = 0
    def hook(event, arguments):
        nonlocal count
        writes = event in WRITES or event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes and str(arguments[0]).startswith(output):
            count += 1
            if count == last:
                os._exit(9)
    sys.addaudithook(hook)

for number, output in {jobs!r}:
    child = os.fork()
    if child == 0:
        os.dup2(2, 1)
        die_at(number, output)
        os._exit(main(["convert", "--source", {source!r}, "--output", output, "--direct_num_workers=1", *{options!r}]))
    print(number, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def run_dying(source: Path, jobs: dict[int, Path], script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Converts into each folder until the process dies at its n-th file operation there."""
    text = script.format(
        jobs=[(number, str(output)) for number, output in jobs.items()], source=str(source), options=[*COARSE, *options]
    )
    return run(sys.executable, "-c", text)


def die_at_each(source: Path, jobs: dict[int, Path], *options: str) -> None:
    """The same, and all of them die."""
    ran = run_dying(source, jobs, DYING, *options)
    assert dict(map(str.split, ran.stdout.splitlines())) == {str(number): "9" for number in jobs}, ran.stderr


def count_operations(source: Path, output: Path, *options: str) -> int:
    """How many file operations a whole conversion makes."""
    counting = DYING.replace("count += 1\n", "count += 1; os.write(2, str(count).encode() + bytes([10]))\n")
    ran = run_dying(source, {-1: output}, counting, *options)
    assert ran.stdout == "-1 0\n", ran.stderr
    return max(int(line) for line in ran.stderr.splitlines() if line.isdigit())


SOME_OR_ALL = pytest.mark.parametrize(
    "every",
    [
        12,
        pytest.param(
            1,
            marks=pytest.mark.slow(
                "a death at each of hundreds of file operations, minutes; every twelfth is always tried"
            ),
        ),
    ],
)


@SOME_OR_ALL
def test_death_at_any_file_operation(tmp_path: Path, every: int) -> None:
    """After each of them a reader sees no checkpoint or a whole one, `--resume` finishes it, and nothing else is left
    in the folder.
    """
    source, wanted = make_release(tmp_path / "hf"), reference(LLAMA, random_tensors(LLAMA), BF16)
    outputs = {
        number: tmp_path / str(number) for number in range(1, count_operations(source, tmp_path / "all") + 1, every)
    }
    assert len(outputs) * every > 20
    die_at_each(source, outputs)
    faults = {}
    for number, output in outputs.items():
        if (output / "0").exists():
            assert_same_bits(restore(output / "0"), wanted)
        status = call("convert", "--source", source, "--output", output, *COARSE, "--resume")
        left = sorted(path.name for path in output.iterdir())
        if status or left != ["0"]:
            faults[number] = status, left
        else:
            assert_same_bits(restore(output / "0"), wanted)
    assert faults == {}


@SOME_OR_ALL
def test_death_while_a_checkpoint_is_replaced(tmp_path: Path, every: int) -> None:
    """Of the last file operations, the replacement among them: the old checkpoint or the new one is in the folder
    whole, under some name, and the same command again leaves the new one alone.
    """
    old, new = (make_release(tmp_path / name, seed=seed) for seed, name in enumerate(("old", "new")))
    before, after = (reference(LLAMA, random_tensors(LLAMA, seed=seed), BF16) for seed in (0, 1))
    convert(old, tmp_path / "out", *COARSE)
    shutil.copytree(tmp_path / "out", tmp_path / "counted")
    total = count_operations(new, tmp_path / "counted", "--overwrite")
    outputs = {number: tmp_path / str(number) for number in range(total - 9, total + 1, min(every, 3))}
    for output in outputs.values():
        shutil.copytree(tmp_path / "out", output)
    die_at_each(new, outputs, "--overwrite")
    faults = {}
    for number, output in outputs.items():
        whole = [digests(parameters(path)) for path in output.iterdir() if (path / "commit_success.txt").exists()]
        assert digests(before) in whole or digests(after) in whole
        if (output / "0").exists():
            assert digests(parameters(output / "0")) in (digests(before), digests(after))
        status = call("convert", "--source", new, "--output", output, *COARSE, "--overwrite")
        left = sorted(path.name for path in output.iterdir())
        if status or left != ["0"]:
            faults[number] = status, left
        else:
            assert_same_bits(restore(output / "0"), after)
    assert faults == {}


def parameters(step: Path) -> dict[str, np.ndarray]:
    """Of a checkpoint under any name."""
    return flatten(ocp.PyTreeCheckpointer().restore(step / "items")["params"]["params"])


def test_a_second_conversion_into_the_same_output_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """While another holds the lease: exit 2, in whatever mode, and nothing is touched. Another step is free."""
    output = tmp_path / "out"
    output.mkdir()
    with staging_at(output, 0).hold():
        for mode in ((), ("--overwrite",), ("--resume",)):
            assert call("convert", "--source", source, "--output", output, *mode) == 2
            assert f"another conversion (process {os.getpid()} on " in capsys.readouterr().err
        assert [path.name for path in output.iterdir()] == ["0.weightbeam-lease"]
        assert call("convert", "--source", source, "--output", output, "--step", 1) == 0
    assert [path.name for path in output.iterdir()] == ["1"]


def test_other_threads_go_on_with_the_units_there_are(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From and to buckets the size of units follows from the threads: a plan that is staged or published keeps what it
    was cut for.
    """
    monkeypatch.setattr("weightbeam.transforms.execution.overlap.REMOTE", "/")
    monkeypatch.setattr("weightbeam.transforms.cutting.blocks.LEAST_UNITS", 1)
    monkeypatch.setattr("weightbeam.transforms.cutting.blocks.LEAST_UNIT_BYTES", 1000)

    def asked(threads: int) -> int:
        return call(
            "convert", "--source", source, "--output", tmp_path / "out", "--resume", f"--direct_num_workers={threads}"
        )

    with monkeypatch.context() as failing:
        failing.setattr("weightbeam.formats.orbax.ocdbt.merge", lambda *_: 1 // 0)
        assert asked(2) == 1
    cut = [len(plan_conversion(ConvertOptions(), open_hf(source), slots=slots).units) for slots in (2, 4)]
    assert cut[0] < cut[1]
    assert asked(4) == 0
    record = json.loads((tmp_path / "out/0/conversion.json").read_text())
    assert record["slots"] == 2
    assert asked(3) == 0  # nothing to do
    assert json.loads((tmp_path / "out/0/conversion.json").read_text()) == record
