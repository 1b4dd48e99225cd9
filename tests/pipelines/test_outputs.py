"""What an output must be: refused before any work where something would be lost, or where no checkpoint can lie."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hostile import snapshot
from support import BF16, LLAMA, assert_same_bits, call, convert, make_release, random_tensors, reference, restore

from weightbeam.formats.staging import staging_at
from weightbeam.formats.staging.folder import new_id


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_release(tmp_path / "hf")


def refused(capfd: pytest.CaptureFixture[str], root: Path, *command: object) -> str:
    """The message of a command that is refused, and touches nothing."""
    before = snapshot(root)
    capfd.readouterr()
    assert call("convert", *command) == 2
    message = capfd.readouterr().err
    assert "Traceback" not in message
    assert snapshot(root) == before
    return message


@pytest.mark.parametrize("place", ["0", "0/hf", "link", pytest.param(f"0.replaced-{new_id()}", id="0.replaced")])
def test_the_source_is_never_deleted(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], place: str
) -> None:
    """Where it is what `--overwrite` would replace, or lies in it, or a link leads there, or where it would be tidied
    away.
    """
    root, named = tmp_path / "m", tmp_path / "m" / place
    if place == "link":
        (tmp_path / "link").symlink_to(root / "0" / "hf")
        named = tmp_path / "link"
    shutil.copytree(source, root / "0" / "hf" if place == "link" else named)
    assert "holds the source" in refused(capfd, root, "--source", named, "--output", root, "--overwrite")


@pytest.mark.parametrize("linked", [False, True])
def test_a_checkpoint_doesnt_lie_among_the_files_of_its_release(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], linked: bool
) -> None:
    (tmp_path / "link").symlink_to(source)
    message = refused(capfd, source, source, tmp_path / "link" if linked else source)
    assert "would lie among the files of" in message


def test_a_checkpoint_doesnt_lie_in_another_release(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As which its folder would be read. What is there already is gone on with."""
    other = tmp_path / "other"
    assert call("cut", source, other, "--layers", "0:1") == 0
    for options in ((), ("--dry_run",), ("--overwrite",)):
        assert call("convert", source, other, *options) == 2
        assert "lies in a release, with model" in capfd.readouterr().err
    assert call("convert", source, tmp_path / "ours") == 0
    (tmp_path / "ours" / "model.safetensors").write_bytes(b"")
    assert call("convert", source, tmp_path / "ours", "--resume") == 0


@pytest.mark.parametrize("options", [(), ("--dry_run",), ("--resume",), ("--overwrite",)])
def test_a_name_that_is_too_long(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    """What is staged lies beside a release, with a longer name; a checkpoint's lies in its folder."""
    longest = 255 - len(f".{new_id()}.weightbeam-tmp")
    for name, said in (
        ("x" * 250, f"the name is too long: 250 characters, at most {longest}"),
        ("ä" * 125, f"the name is too long: 250 bytes, at most {longest}"),
        (f"{'x' * 256}/release", "the name is too long: 256 characters, at most 255"),
    ):
        assert said in refused_release(capfd, source, tmp_path / "new" / name, *options)
    assert not (tmp_path / "new").exists()
    command = ("convert", source, tmp_path / ("x" * 256), *options)
    assert call(*command) == 2
    assert "the name is too long: 256 characters, at most 255" in capfd.readouterr().err


@pytest.mark.parametrize("command", [("convert",), ("cut", "--layers", "0:1")], ids=["checkpoint", "release"])
def test_a_path_that_is_too_long(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    """What is staged below it has longer ones. At the longest that is taken, every file of the result has room."""
    name, *options = command
    deep = str(tmp_path) + f"/{'x' * 200}" * 20
    assert call(name, source, deep[:3960], *options) == 2
    found = re.search(r"the path is too long: \d+ bytes, at most (\d+), since what is staged", capfd.readouterr().err)
    assert found is not None
    assert not (tmp_path / ("x" * 200)).exists()
    longest = int(found[1]) - (len("/0") if name == "convert" else 0)
    assert call(name, source, deep[:longest], *options) == 0


def test_a_name_that_isnt_utf8(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A model card couldn't name it. A source may have such a name."""
    odd = tmp_path / os.fsdecode(b"odd\xff")
    for command in (("cut", source, odd, "--layers", "0:1"), ("quantize", source, odd), ("convert", source, odd)):
        assert call(*command) == 2
        assert "isn't UTF-8; choose another name" in capfd.readouterr().err
    shutil.copytree(source, odd)
    assert call("cut", odd, tmp_path / "made", "--layers", "0:1") == 0
    assert b"odd\\udcff" in (tmp_path / "made" / "README.md").read_bytes()


@pytest.mark.parametrize("options", [(), ("--overwrite",)])
def test_the_root_of_the_file_system(source: Path, capfd: pytest.CaptureFixture[str], options: tuple[str, ...]) -> None:
    assert "is the root of the file system" in refused_release(capfd, source, Path("/"), *options)
    assert call("convert", source, "/", *options) == 2
    assert "/: is the root of the file system; name a folder" in capfd.readouterr().err


def test_the_longest_names(source: Path, tmp_path: Path) -> None:
    longest = tmp_path / ("x" * (255 - len(f".{new_id()}.weightbeam-tmp")))
    assert call("quantize", source, longest, "--format", "fp8") == 0
    assert call("convert", source, tmp_path / ("x" * 255)) == 0


def refused_release(capfd: pytest.CaptureFixture[str], source: Path, output: Path, *options: str) -> str:
    """What a command says that doesn't write a release."""
    capfd.readouterr()
    assert call("quantize", source, output, "--format", "fp8", *options) == 2
    message = capfd.readouterr().err
    assert "Traceback" not in message
    return message


@pytest.mark.parametrize("kind", ["a folder", "a link to a checkpoint", "a dangling link", "a file"])
def test_overwrite_replaces_checkpoints_only(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    output = tmp_path / "out"
    (output / "elsewhere").mkdir(parents=True)
    step = output / "0"
    if kind == "a folder":
        (step / "thesis").mkdir(parents=True)
    elif kind == "a file":
        step.write_text("")
    else:
        if kind == "a link to a checkpoint":
            (output / "elsewhere" / "commit_success.txt").touch()
        step.symlink_to("elsewhere" if kind == "a link to a checkpoint" else "nowhere")
    message = refused(capfd, output, "--source", source, "--output", output, "--overwrite")
    assert (
        "no Orbax checkpoint" if kind == "a folder" else kind.split()[-1] if kind == "a file" else "symbolic link"
    ) in message


def test_paths_with_dots_and_backslashes(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert call("convert", "--source", source, "--output", "../ckpt") == 0
    assert_same_bits(restore(tmp_path / "ckpt" / "0"), reference(LLAMA, random_tensors(LLAMA), BF16))
    assert call("verify", "--source", source, "--checkpoint", "../ckpt") == 0
    for name, word in (("a\\b/out", "backslash"), ("x.__lock", ".__lock")):
        assert word in refused(capfd, tmp_path, "--source", source, "--output", name)


def test_who_is_at_work_is_said_first(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Not that a conversion was stopped, which it wasn't."""
    staging = staging_at(tmp_path / "out", 0)
    staging.output.make()
    with staging.hold():
        staging.create(b"plan")
        for mode in ((), ("--resume",), ("--overwrite",)):
            message = refused(capfd, tmp_path / "out", "--source", source, "--output", tmp_path / "out", *mode)
            assert f"another conversion (process {os.getpid()} on " in message
            assert "stopped" not in message


def test_a_damaged_checkpoint_isnt_called_finished(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its databases are gone, or a marker is; `--overwrite` makes it anew."""
    command = ("--source", source, "--output", tmp_path / "out")
    step = convert(source, tmp_path / "out")
    assert call("convert", *command, "--resume") == 0
    (database, *_) = (step / "items").glob("ocdbt.process_*")
    shutil.rmtree(database)
    assert "damaged" in refused(capfd, tmp_path / "out", *command, "--resume")
    assert call("convert", *command, "--overwrite") == 0
    (step / "items" / "commit_success.txt").unlink()
    assert "damaged" in refused(capfd, tmp_path / "out", *command, "--resume")


def test_a_stale_lock_file_does_no_harm(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorStore writes over one that a killed merge left, and leaves what reaches beyond."""
    command = ("convert", "--source", source, "--output", tmp_path / "out")
    with monkeypatch.context() as patched:
        patched.setattr("weightbeam.formats.orbax.ocdbt.merge", lambda *_: 1 / 0)
        assert call(*command) == 1
    (items,) = (tmp_path / "out").glob("0.*.orbax-checkpoint-tmp/items")
    (items / "manifest.ocdbt.__lock").write_bytes(os.urandom(100_000))
    assert call(*command, "--resume") == 0
    assert_same_bits(restore(tmp_path / "out" / "0"), reference(LLAMA, random_tensors(LLAMA), BF16))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["0"]


@pytest.mark.parametrize("died", ["before it was published", "between two renames"])
def test_materializing_in_place_goes_on(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, died: str
) -> None:
    """The same command with `--resume`, whatever lies beside the checkpoint or is missing in its place."""
    output = tmp_path / "out"
    convert(source, output, "--virtual")
    command = ("materialize", output, "--output", output, "--overwrite")
    with monkeypatch.context() as patched:
        patched.setattr("weightbeam.formats.staging.FolderStaging.publish", lambda *_: 1 / 0)
        assert call(*command) == 1
    if died == "between two renames":
        (output / "0").rename(output / f"0.replaced-{new_id()}")
    assert call(*command, "--resume") == 0
    assert [path.name for path in output.iterdir()] == ["0"]
    assert not (output / "0" / "items" / "source").exists()
    assert_same_bits(restore(output / "0"), reference(LLAMA, random_tensors(LLAMA), BF16))


@pytest.mark.parametrize(
    ("attribute", "name", "status"), [("a", "", 2), ("a", "out", 0), ("i", "", 2), ("i", "out", 2)]
)
def test_a_folder_whose_names_stay(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], attribute: str, name: str, status: int
) -> None:
    """One that is only appended to takes new folders, in which all can be done."""
    (folder := tmp_path / "folder").mkdir()
    if shutil.which("chattr") is None or subprocess.call(["chattr", f"+{attribute}", folder]):
        pytest.skip("attributes can't be set here")
    try:
        assert call("convert", source, folder / name) == status
        assert (f"{folder}: has the attribute {attribute}, " in capfd.readouterr().err) == (status == 2)
        assert os.listdir(folder) == ["out"] * (status == 0)
    finally:
        subprocess.check_call(["chattr", f"-{attribute}", folder])


def test_an_output_without_links_of_any_kind(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on exFAT, and on many shares."""
    for name in ("link", "symlink"):
        monkeypatch.setattr(os, name, _refuse)
    assert_same_bits(restore(convert(source, tmp_path / "out")), reference(LLAMA, random_tensors(LLAMA), BF16))


def _refuse(*_: object, **__: object) -> None:
    raise PermissionError(1, "Operation not permitted")
