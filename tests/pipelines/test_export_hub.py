"""`weightbeam export` to the hub: what is refused, what is published again, and commands that meet there, some asleep."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import running, wait_until
from servers.clients import TOKEN
from servers.hub import FakeHub
from servers.repository import Blob
from support import call, convert, make_release, peft_adapter

from weightbeam.formats.targets.hub import Files, find_published, publish

REPO, URL = "org/tuned", "hf://org/tuned"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of one shape."""
    root = tmp_path_factory.mktemp("made")
    return [
        convert(make_release(root / name, seed=seed), root / f"ckpt-{name}", "--maxtext_model", "llama2-7b")
        for seed, name in enumerate("ab")
    ]


def tokenizer(folder: Path, name: str, *more: str) -> Path:
    """A tokenizer's files, which say whose they are."""
    folder.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json", *more):
        (folder / file).write_text(json.dumps({"of": name}))
    return folder


def cached(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache").glob("weightbeam/*"))


def exported(checkpoint: Path, folder: Path, *options: object) -> dict[str, bytes]:
    """What an export to a folder is."""
    assert call("export", checkpoint, folder, *options) == 0
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("url", ["hf://a/b/c", "hf://org", "hf://org/tuned@", "hf://org/tu ned"])
def test_a_dry_run_knows_what_is_no_repository(
    checkpoints: list[Path],
    url: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the words of the real run, without asking anybody; a pull request of a folder is none, either, and without a
    token nothing can be published.
    """
    for options in ((), ("--dry_run",)):
        assert call("export", checkpoints[0], url, *options) == 2
        assert (
            f"--output={url}: should be hf://owner/name, with @branch for another than main" in capfd.readouterr().err
        )
        assert call("export", checkpoints[0], tmp_path / "out", "--create_pr", *options) == 2
        assert "--create_pr: only the hub has pull requests" in capfd.readouterr().err
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert call("export", checkpoints[0], URL, "--dry_run") == 2
    assert f"--output={URL}: HF_TOKEN isn't set" in capfd.readouterr().err
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert call("export", checkpoints[0], URL, "--dry_run") == 0


def test_what_is_there_is_refused_and_named(
    hub: FakeHub, checkpoints: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any work; with `--overwrite` it goes, and that is said. The same command again does nothing."""
    other = make_release(tmp_path / "other", seed=5)
    (other / "tokenizer.json").write_text("{}")
    (other / "README.md").write_text("# Mine\n")
    hub.add(REPO, other).writers.add(TOKEN)
    before = hub.held(REPO)
    assert call("export", checkpoints[0], URL) == 2
    said = capsys.readouterr().err
    assert [
        name for name in ("model.safetensors", "tokenizer.json", "config.json", "--overwrite") if name not in said
    ] == []
    assert hub.held(REPO) == before
    assert cached(tmp_path) == []
    assert call("export", checkpoints[0], URL, "--overwrite") == 0
    said = capsys.readouterr().out
    assert "removed there: tokenizer.json\n" in said
    assert "replaced there: config.json, model.safetensors\n" in said
    wanted = exported(checkpoints[0], tmp_path / "wanted")
    assert hub.held(REPO) == wanted | {"README.md": b"# Mine\n", "weightbeam.json": hub.held(REPO)["weightbeam.json"]}
    for again in ((), ("--overwrite",), ("--create_pr",)):
        assert call("export", checkpoints[0], URL, *again) == 0
        assert "published already" in capsys.readouterr().out
    assert len(hub.repositories[REPO].head.history()) == 3
    assert hub.repositories[REPO].pulls == []
    assert call("export", checkpoints[1], URL) == 2
    assert "weightbeam.json" in capsys.readouterr().err


@pytest.mark.parametrize("is_edited", [False, True])
@pytest.mark.parametrize("has_record", [True, False])
def test_the_card_of_a_former_release(
    hub: FakeHub, checkpoints: list[Path], capsys: pytest.CaptureFixture[str], is_edited: bool, has_record: bool
) -> None:
    """One that nobody has edited tells of other weights: it is replaced with them. One that was edited is kept, and one of
    which that can't be told.
    """
    assert call("export", checkpoints[0], URL) == 0
    before = hub.held(REPO)["README.md"]
    edited = before + b"Mine\n" * is_edited
    edits = {"README.md": Blob(edited, lfs=False)} | ({} if has_record else {"weightbeam.json": None})
    hub.repositories[REPO].commit(edits, "main", "mine", hub._now())
    is_kept = is_edited or not has_record
    assert call("export", checkpoints[1], URL, "--overwrite") == 0
    now = hub.held(REPO)["README.md"]
    assert (now == edited) if is_kept else (b"Written by" in now and now != before)
    assert ("README.md" in capsys.readouterr().out.partition("replaced there")[2]) != is_kept


def test_the_small_files_are_this_commands(hub: FakeHub, checkpoints: list[Path], tmp_path: Path) -> None:
    """What was kept of one that failed isn't published with another one's tokenizer, nor in part where some of it is
    gone.
    """
    one, other = tokenizer(tmp_path / "one", "A", "chat_template.jinja"), tokenizer(tmp_path / "other", "B")
    hub.fail("status", status=401, matching="POST .*/preupload/")
    assert call("export", checkpoints[0], URL, "--tokenizer", one) == 1
    (folder,) = [path for path in (tmp_path / "cache" / "weightbeam").iterdir() if path.is_dir()]
    (folder / "model.safetensors").unlink()
    hub.faults = []
    assert call("export", checkpoints[0], URL, "--tokenizer", other) == 0
    found = hub.held(REPO)
    assert json.loads(found["tokenizer.json"]) == json.loads(found["tokenizer_config.json"]) == {"of": "B"}
    assert "chat_template.jinja" not in found
    assert found["model.safetensors"] == exported(checkpoints[0], tmp_path / "wanted")["model.safetensors"]


def test_a_title_is_one_line(hub: FakeHub, checkpoints: list[Path], tmp_path: Path) -> None:
    """The hub tells the first line of a commit's message as its title, by which a result is known again."""
    shutil.copytree(checkpoints[0], tmp_path / "my\nrun")
    assert call("export", tmp_path / "my\nrun", URL) == 0
    (title, _) = [commit.title for commit in hub.repositories[REPO].head.history()]
    assert re.fullmatch(r"Export of my run@[0-9a-f]{16} \([0-9a-f]{12}\)", title)


def test_a_cached_release_that_was_touched_is_made_anew(hub: FakeHub, checkpoints: list[Path], tmp_path: Path) -> None:
    """A byte of the weights is another one, and time and size of the file are as before."""
    hub.fail("status", status=401, matching="POST .*/preupload/")
    assert call("export", checkpoints[0], URL) == 1
    (folder,) = (path for path in (tmp_path / "cache" / "weightbeam").iterdir() if path.is_dir())
    weights = next(folder.glob("*.safetensors"))
    before, held = weights.stat(), weights.read_bytes()
    weights.write_bytes(held[:-5] + bytes([held[-5] ^ 0x40]) + held[-4:])
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    hub.faults.clear()
    assert call("export", checkpoints[0], URL) == 0
    assert hub.held(REPO)[weights.name] == held
    assert cached(tmp_path) == []


def test_a_cached_release_that_lost_a_file_is_made_anew(hub: FakeHub, checkpoints: list[Path], tmp_path: Path) -> None:
    hub.fail("status", status=401, matching="POST .*/preupload/")
    assert call("export", checkpoints[0], URL) == 1
    (folder,) = [path for path in (tmp_path / "cache" / "weightbeam").iterdir() if path.is_dir()]
    shard = folder / "model.safetensors"
    for spoil in (
        shard.unlink,
        lambda: shard.write_bytes(shard.read_bytes()[:-1]),
        (folder / "weightbeam.json").unlink,
    ):
        spoil()
        assert call("export", checkpoints[0], URL) == 1
        assert shard.read_bytes() == exported(checkpoints[0], tmp_path / "wanted", "--overwrite")["model.safetensors"]
    hub.faults = []
    assert call("export", checkpoints[0], URL) == 0
    assert hub.held(REPO)["model.safetensors"] == shard_of(tmp_path / "wanted")
    assert cached(tmp_path) == []


def shard_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def seen(hub: FakeHub, kind: str) -> Callable[[], bool]:
    """Whether a request of this kind has been answered, or is waiting for its answer."""
    return lambda: bool(hub.log.counts()[kind]) or any(fault.hits for fault in hub.faults)


@pytest.mark.slow("two processes, one of which is waited for at each of its requests")
@pytest.mark.parametrize("create_pr", [False, True])
def test_two_exports_of_one_checkpoint(
    hub: FakeHub, checkpoints: list[Path], tmp_path: Path, create_pr: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second begins while the first is made to wait by the hub: it is told so, and the first goes through."""
    wanted = exported(checkpoints[0], tmp_path / "wanted")
    hub.fail("slow", seconds=15, times=1, matching="POST /api/repos/create")
    command = ("weightbeam", "export", checkpoints[0], URL, *(["--create_pr"] if create_pr else []))
    with running(tmp_path / "first", *command) as first:
        wait_until(seen(hub, "create"), (tmp_path / "first").read_text)
        assert call(*command[1:]) == 2
        assert "is at work there" in capsys.readouterr().err
        assert first.wait() == 0, (tmp_path / "first").read_text()
    assert call(*command[1:]) == 0
    repository = hub.repositories[REPO]
    assert len(repository.pulls) == create_pr
    assert len(repository.head.history()) == 2 - create_pr
    files = repository.pulls[0].files if create_pr else repository.head.files
    same = wanted.keys() - {"weightbeam.json", "README.md"}  # which name what they are of, and where
    assert {name: bytes(files[name].data) for name in same} == {name: wanted[name] for name in same}
    assert cached(tmp_path) == []


def test_what_another_command_took_over_is_not_said_to_be_here(
    hub: FakeHub, checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(REPO).writers.add(TOKEN)

    def sleep(url: str, title: str, files: Files, **options: object) -> object:
        (folder,) = {path.parent for path in files.values() if isinstance(path, Path)}
        for path in (folder, *folder.parent.glob(f"{folder.name}.weightbeam-lease*")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()  # as who publishes it does in the end
        return publish(url, title, files, **options)

    monkeypatch.setattr("weightbeam.pipelines.running.hub.publish", sleep)
    assert call("export", checkpoints[0], URL) == 1
    assert "was taken over by another command while this one slept" in capsys.readouterr().err


@pytest.mark.slow("processes that sleep while others publish")
@pytest.mark.parametrize("at", ["GET .*/commits/", "POST .*/preupload/", "POST .*/commit/"])
def test_a_sleeper(hub: FakeHub, checkpoints: list[Path], tmp_path: Path, at: str) -> None:
    """Stopped at a request; another checkpoint is published with `--overwrite`, by a machine with a cache of its own;
    woken, it fails, or had published before. `main` always has one whole model.
    """
    hub.add(REPO).writers.add(TOKEN)
    hub.fail("slow", seconds=3, times=1, matching=at)
    command = ("weightbeam", "export", checkpoints[0], URL)
    with running(tmp_path / "first", *command, environment={"XDG_CACHE_HOME": str(tmp_path / "elsewhere")}) as first:
        wait_until(seen(hub, "nothing"), (tmp_path / "first").read_text)
        os.kill(first.pid, signal.SIGSTOP)
        assert call("export", checkpoints[1], URL, "--overwrite") == 0
        os.kill(first.pid, signal.SIGCONT)
        status = first.wait()
    said = (tmp_path / "first").read_text()
    assert "Traceback" not in said
    # at the commit the hub had the request, and whichever came first counts
    assert status == (1 if at.endswith("preupload/") else status), said
    assert hub.held(REPO)["model.safetensors"] == exported(checkpoints[1], tmp_path / "b")["model.safetensors"]
    assert json.loads(hub.held(REPO)["weightbeam.json"])["source"].startswith("ckpt-b/0@")


def test_others_who_came_meanwhile_are_told_with_what_helps(
    hub: FakeHub,
    checkpoints: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The release stays on this machine: the same command alone would be refused again, and the one that is named isn't."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "model.safetensors").write_bytes(b"theirs")
    hub.add(REPO).writers.add(TOKEN)

    def look_and_be_overtaken(*about: object, **options: object) -> object:
        found = find_published(*about, **options)
        hub.add(REPO, theirs).writers.add(TOKEN)
        return found

    monkeypatch.setattr("weightbeam.pipelines.running.hub.find_published", look_and_be_overtaken)
    assert call("export", checkpoints[0], URL) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "holds what isn't of this release: model.safetensors" in said
    assert "the same command publishes it with --overwrite or --create_pr" in said
    assert f"{tmp_path}/cache/weightbeam/export-" in said
    assert cached(tmp_path)
    monkeypatch.undo()
    assert call("export", checkpoints[0], URL) == 2
    assert call("export", checkpoints[0], URL, "--overwrite") == 0
    assert cached(tmp_path) == []


@pytest.mark.parametrize(
    ("command", "options"), [("merge", ["--lora", "{adapter}"]), ("cut", ["--layers", "0:1"]), ("quantize", [])]
)
def test_a_release_is_not_made_of_the_branch_that_it_goes_to(
    hub: FakeHub,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    options: list[str],
) -> None:
    """The same command, as after a lost answer, would be carried out on its own result: an adapter merged twice. Of a
    commit it makes one.
    """
    source = make_release(tmp_path / "hf")
    modules = {f"model.layers.{layer}.self_attn.q_proj": (32, 32) for layer in range(2)}
    peft_adapter(tmp_path / "adapter", modules)
    repo = hub.add(REPO, source)
    repo.writers.add(TOKEN)
    before = repo.branches["main"].sha
    hub.renamed["org/former"] = REPO
    words = (*(option.format(adapter=tmp_path / "adapter") for option in options), "--overwrite")
    names = (f"{URL}/", f"{URL}@main", f"{URL}@refs/heads/main", "hf://org/former")
    for source, output in ((URL, URL), *((name, URL) for name in names), (URL, names[2]), (URL, names[3])):
        for more in ([], ["--dry_run"]):
            assert call(command, source, output, *words, *more) == 2
            assert f"name the commit: {source.partition('@')[0].rstrip('/')}@{before}" in capsys.readouterr().err
    with monkeypatch.context() as offline:
        offline.setenv("HF_HUB_OFFLINE", "1")
        offline.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert call(command, URL, "hf://org/other", *words, "--dry_run") == 2  # it may be the same, under another name
    assert "hf://org/tuned: " in capsys.readouterr().err
    assert len(repo.commits) == 2
    assert call(command, URL, tmp_path / "org" / "tuned", *words) == 0  # a folder of the repository's name
    assert call(command, URL, URL, *words, "--create_pr") == 0
    assert repo.branches["main"].sha == before
    assert len(repo.pulls) == 1
    made = len(repo.commits)
    for _ in range(2):
        assert call(command, f"{URL}@{before}", URL, *words) == 0
        assert len(repo.commits) == made + 1
