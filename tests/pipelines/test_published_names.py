"""What goes to the hub and into buckets tells nothing of the machine: every byte of every request is searched for a
telling folder, the user, the home folder and the host.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import io
import json
import re
import shlex
import shutil
import socket
import urllib.parse
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pairs
import pytest
import training_run
import yaml
from servers.clients import asking, at_hub
from servers.gcs import FakeGcs
from servers.hub import FakeHub
from servers.server import Call, Reply, Server
from support import F32, LLAMA, call, convert, peft_adapter, random_tensors, save

from weightbeam.formats.record.naming import Naming, is_name, name_of

pytestmark = pytest.mark.usefixtures("warm_workers")
TOKEN, REPO, URL = "hf_of_a_test", "me/tuned", "hf://me/tuned"
USER, PROJECT, HOST = "anneliese", "enigma-project", "telling-host"
NEEDLES = (USER, PROJECT, HOST)
CONFIG = LLAMA | dict(architectures=["LlamaForCausalLM"], dtype="float32")
# of a command that is at work: its plan, its lease, what its units found; gone when it is done
WORK = re.compile(r"/plan\.json\.gz$|/lease$|\.weightbeam-lease$|\.weightbeam/\w+/units/|/differences\.json$")


def contents(data: bytes) -> Iterator[bytes]:
    """Bytes, and what is packed in them: gzip wherever it begins, ZIP archives, base64 in lines of JSON."""
    yield data
    for found in re.finditer(rb"\x1f\x8b\x08", data):
        with contextlib.suppress(zlib.error):
            yield zlib.decompressobj(31).decompress(data[found.start() :])
    if b"PK\x03\x04" in data:
        with contextlib.suppress(zipfile.BadZipFile, RuntimeError), zipfile.ZipFile(io.BytesIO(data)) as archive:
            yield from (archive.read(name) for name in archive.namelist())
    for found in re.finditer(rb'"content": ?"([A-Za-z0-9+/=]+)"', data):
        with contextlib.suppress(ValueError):
            yield base64.b64decode(found[1])


def test_what_is_packed_is_found() -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("README.md", "of anneliese")
    line = json.dumps({"key": "file", "value": {"content": base64.b64encode(b"of anneliese").decode()}}).encode()
    for packed in (b"--x\r\n" + gzip.compress(b"of anneliese"), archive.getvalue(), line):
        assert any(b"anneliese" in found for found in contents(packed)), packed


class Tap:
    """Every request that servers get, bodies and all."""

    def __init__(self, patch: pytest.MonkeyPatch, *servers: Server):
        self.calls: list[Call] = []
        for server in servers:
            patch.setattr(server, "answer", self._answer(server.answer))

    def _answer(self, answer: Any) -> Any:
        def tapped(call: Call) -> Reply:
            self.calls.append(call)
            return answer(call)

        return tapped

    def telling(self, gcs: FakeGcs | None = None) -> list[tuple[str, bytes]]:
        """Requests that tell something, with what stands around it; and objects that were left in a bucket."""
        left = gcs.objects["out"].items() if gcs else ()
        found = [
            (name, b"")
            for name, one in left
            for data in contents(bytes(one.data))
            if any(needle.encode() in data for needle in NEEDLES)
        ]
        for each in self.calls:
            named = f"{each.path}?{each.query}"
            uploaded = re.search(rb'"name": ?"([^"]+)"', each.body[:1000]) if "uploadType" in each.query else None
            name = uploaded[1].decode() if uploaded else urllib.parse.unquote(each.path)
            if not WORK.search(name):
                for content in (named.encode(), *contents(each.body)):
                    for needle in NEEDLES:
                        if (at := content.find(needle.encode())) >= 0:
                            found.append((f"{each.method} {named}", content[max(0, at - 200) : at + 100]))
        return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The user's home, where all sources lie."""
    home = tmp_path_factory.mktemp("home") / USER
    home.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setenv("XDG_CACHE_HOME", str(home / ".cache"))
        patch.setenv("USER", USER)
        patch.setattr(socket, "gethostname", lambda: HOST)
        yield home


@pytest.fixture(scope="module")
def project(home: Path) -> Path:
    """A release, an adapter of it, a run, and an adapter's run, in a folder with a telling name."""
    folder = home / PROJECT
    like = save(folder / "models" / "llama", CONFIG, random_tensors(CONFIG, F32))
    config = json.loads((like / "config.json").read_text())
    (like / "config.json").write_text(json.dumps(config | {"_name_or_path": str(folder / "before")}))
    (like / "README.md").write_text(f"---\nlicense: mit\n---\n\nmade of {folder}/before, by {home}/bin/train\n")
    (like / "tokenizer.json").write_text("{}")
    modules = {f"model.layers.{layer}.self_attn.v_proj": (16, 32) for layer in range(2)}
    peft_adapter(folder / "adapter", modules, base_model_name_or_path=str(like))
    options = ("--save_dtype", "float32", "--maxtext_model", "llama2-7b")
    step = convert(like, folder / "run" / "checkpoints", *options, "--lora", str(folder / "adapter"))
    alone = convert(like, folder / "alone", *options, "--lora", str(folder / "adapter"), "--adapter_only", "true")
    checkpoints = training_run.manager(str(folder / "lora-run" / "checkpoints"), None)
    training_run.save(checkpoints, 5, training_run.load_state(alone), {"lora_rank": 4, "lora_alpha": 8})
    checkpoints.close()
    trained = training_run.manager(str(folder / "trained" / "checkpoints"), None)
    training_run.save(trained, 100, training_run.load_state(step))
    trained.close()
    return folder


@pytest.fixture
def hub(home: Path) -> Iterator[FakeHub]:
    with at_hub(TOKEN) as server:
        yield server


@pytest.fixture
def gcs(home: Path) -> Iterator[FakeGcs]:
    with FakeGcs("out") as server, asking(server):
        yield server


def files_of(hub: FakeHub, branch: str = "main", repo: str = REPO) -> dict[str, bytes]:
    return {name: bytes(blob.data) for name, blob in hub.repositories[repo].branches[branch].files.items()}


def test_releases_on_the_hub(
    hub: FakeHub, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command that publishes one; what it was made of still verifies, and says what it needs for that."""
    tap = Tap(monkeypatch, hub, hub.cdn)
    like, trained, adapter = (
        project / "models" / "llama",
        project / "trained" / "checkpoints" / "100",
        project / "adapter",
    )
    assert call("export", trained, URL, "--like", like, "--tokenizer", like) == 0
    assert call("export", trained, "hf://me/added", "--like", like, "--lora", adapter, "--create_pr") == 0
    assert call("export", project / "lora-run" / "checkpoints" / "5", "hf://me/adapter", "--like", like) == 0
    assert call("merge", like, "hf://me/merged", "--lora", adapter) == 0
    assert call("quantize", like, "hf://me/fp8") == 0
    assert call("quantize", like, project / "fp8") == 0
    assert call("dequantize", project / "fp8", "hf://me/plain") == 0
    assert tap.telling() == []
    record = json.loads(files_of(hub)["weightbeam.json"])
    assert re.fullmatch("trained/100@[0-9a-f]{16}", record["source"])
    (told,) = set(re.findall(r"llama@[0-9a-f]{16}", files_of(hub, repo="me/fp8")["README.md"].decode()))
    for repo, line in ((REPO, "config from"), ("me/adapter", "of")):
        assert f"| {line} | {told} |" in files_of(hub, repo=repo)["README.md"].decode()
        assert json.loads(files_of(hub, repo=repo)["weightbeam.json"])["like"] == told
    assert json.loads(files_of(hub, repo="me/merged")["weightbeam.json"])["adapters"][0]["source"].startswith(
        "adapter@"
    )
    assert json.loads(files_of(hub, repo="me/adapter")["adapter_config.json"])["base_model_name_or_path"] == "llama"
    titles = [commit.title for repo in hub.repositories.values() for commit in repo.head.history()]
    assert any(re.match(r"Export of trained/100@[0-9a-f]{16} \([0-9a-f]{12}\)$", title) for title in titles), titles
    capsys.readouterr()
    assert call("verify", URL) == 2
    assert f"weightbeam verify SOURCE {URL}" in capsys.readouterr().err
    monkeypatch.chdir(project)
    relative = ("trained/checkpoints/100", URL)
    for sides in ((trained, URL), (URL, trained), ("--source", URL, "--checkpoint", trained), relative):
        assert call("verify", *sides) == 0
    assert call("export", trained, URL, "--like", like, "--tokenizer", like) == 0
    said = capsys.readouterr().out
    assert "published already" in said
    assert "load it:" in said
    assert "check it:" in said


def test_full_paths_where_they_are_asked_for(hub: FakeHub, project: Path, tmp_path: Path) -> None:
    """And names where those are, in a folder that is uploaded by hand."""
    like = project / "models" / "llama"
    assert call("quantize", like, URL, "--full_paths", "true") == 0
    assert json.loads(files_of(hub)["weightbeam.json"])["source"] == str(like)
    assert str(like) in files_of(hub)["README.md"].decode()
    assert call("quantize", like, tmp_path / "here") == 0
    card = (tmp_path / "here" / "README.md").read_text()
    assert str(like) in card
    assert "\n# here\n" in card
    assert call("quantize", like, tmp_path / "named", "--full_paths", "false") == 0
    for path in (tmp_path / "named").iterdir():
        assert not [needle for needle in NEEDLES if needle.encode() in path.read_bytes()], path


def test_in_a_bucket(
    gcs: FakeGcs, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Conversion, copy and export; and what comes of a checkpoint there still says which bucket it was in."""
    tap = Tap(monkeypatch, gcs)
    like, adapter = project / "models" / "llama", project / "adapter"
    options = ("--save_dtype", "float32", "--maxtext_model", "llama2-7b")
    told = []
    for command in (
        ("convert", like, "gs://out/ckpt", *options, "--lora", f"{adapter},0.3"),
        ("convert", like, "gs://out/plain", *options),
        ("reshard", project / "trained" / "checkpoints" / "100", "gs://out/copy", "--like", like),
        ("reshard", project / "run" / "checkpoints", "gs://out/ours"),
    ):
        assert call(*command) == 0
        told += re.findall(r"(?m)^check it: +weightbeam (.+)$", capsys.readouterr().out)
    assert call("export", project / "trained" / "checkpoints" / "100", "gs://out/release", "--like", like) == 0
    assert call("export", project / "lora-run" / "checkpoints" / "5", "gs://out/adapter", "--like", like) == 0
    assert call("export", "gs://out/plain", "gs://out/again") == 0
    assert tap.telling(gcs) == []
    held = {name: bytes(one.data) for name, one in gcs.objects["out"].items()}
    record = json.loads(held["ckpt/0/conversion.json"])
    assert re.fullmatch("llama@[0-9a-f]{16}", record["source"])
    assert re.fullmatch("adapter@[0-9a-f]{16}", record["adapters"][0]["source"])
    for folder in ("release", "again", "adapter"):
        card = held[f"{folder}/README.md"].decode()
        assert f"\n# {folder}\n" in card
        assert "_name_or_path" not in card
    assert json.loads(held["again/weightbeam.json"])["source"] == "gs://out/plain/0/items"
    assert [call(*shlex.split(line)) for line in told] == [0] * 4, told
    capsys.readouterr()
    assert call("verify", "gs://out/plain") == 2
    assert "weightbeam verify SOURCE gs://out/plain" in capsys.readouterr().err
    assert call("verify", like, "gs://out/plain") == 0
    assert call("verify", like, "gs://out/ckpt") == 2
    assert "--lora says where" in capsys.readouterr().err
    assert call("verify", like, "gs://out/ckpt", "--lora", f"{adapter},0.3") == 0
    assert call("convert", like, "gs://out/plain", *options, "--resume") == 0
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("place", "of"),
    pairs.each(
        ["hub", "bucket"],
        [("trained", []), ("lora-run", ["--lora", "merged"]), ("lora-run", []), ("trained", ["--kind", "reshard"])],
    ),
)
def test_a_run_that_is_followed(
    place: str, of: tuple[str, list[str]], hub: FakeHub, gcs: FakeGcs, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, options = of
    tap = Tap(monkeypatch, hub, hub.cdn, gcs)
    output = URL if place == "hub" else "gs://out/steps"
    like, run_folder = project / "models" / "llama", project / f"{place}{len(options)}" / run / "checkpoints"
    shutil.copytree(project / run / "checkpoints", run_folder)
    command = ("watch", "--run", run_folder, "--like", like, "--output", output, *options, "--once")
    assert call(*command) == 0
    (step,) = (path for path in run_folder.iterdir() if path.name.isdecimal())
    shutil.copytree(step, later := run_folder / str(int(step.name) + 1))
    assert call(*command) == 0
    assert tap.telling(gcs) == []
    held = files_of(hub) if place == "hub" else {}
    held |= {
        name.removeprefix(f"steps/step-{later.name}/"): bytes(one.data) for name, one in gcs.objects["out"].items()
    }
    report = json.loads(held["run.json"])
    assert report["step"] == int(later.name)
    assert re.fullmatch(rf"{run}@[0-9a-f]{{16}}", report["run"])
    # of what a reshard is like, config.json and headers alone are read, which have no digest
    assert re.fullmatch("llama" if "reshard" in options else "llama@[0-9a-f]{16}", report["like"])
    card = held["README.md"].decode()
    assert f"| like | {report['like']} |" in card
    if place == "hub":
        assert "# tuned\n" in card
        assert f"'me/tuned', revision='step-{later.name}'" in card
    assert call(*command) == 0


def test_a_release_that_is_followed_into_a_bucket(
    hub: FakeHub, gcs: FakeGcs, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the hub, with an adapter and rules of this machine."""
    tap = Tap(monkeypatch, gcs)
    hub.add("acme/tiny", project / "models" / "llama")
    shutil.copytree(project / "adapter", project / "added")
    (project / "rules.yml").write_text(yaml.safe_dump({"logical_axis_rules": [["embed", "fsdp"]]}))
    target = {
        "name": "ours",
        "maxtext_model": "llama2-7b",
        "lora": str(project / "added"),
        "sharding_rules": str(project / "rules.yml"),
    }
    file = project / "watch.yaml"
    file.write_text(
        yaml.safe_dump({"output": "gs://out/models", "models": ["acme/tiny"], "quiet_minutes": 0, "targets": [target]})
    )
    assert call("watch", "--config", file, "--once") == 0
    assert tap.telling(gcs) == []
    assert call("watch", "--config", file, "--once") == 0


# --- the one place that decides ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("/home/anneliese/models/llama-tiny", "llama-tiny"),
        ("/home/anneliese/run/checkpoints/100/items", "run/100"),
        ("/home/anneliese/run/checkpoints", "run"),
        ("/home/anneliese/ckpt/0/items", "ckpt/0"),
        ("gs://bucket/tuned/checkpoints/100", "tuned/100"),
        ("/c/hub/models--Qwen--Qwen3-8B/snapshots/" + "a" * 40, "hf://Qwen/Qwen3-8B@" + "a" * 40),
    ],
)
def test_a_name(url: str, wanted: str) -> None:
    assert name_of(url) == wanted


@pytest.mark.parametrize(
    ("place", "full_paths", "url", "wanted"),
    [
        ("/out", None, "/a/b", "/a/b"),
        ("/out", False, "/a/b", "b"),
        ("/out", False, "gs://bucket/b", "b"),
        ("gs://out", None, "/a/b", "b"),
        ("gs://out", None, "gs://bucket/b", "gs://bucket/b"),
        ("gs://out", True, "/a/b", "/a/b"),
        ("hf://me/out", None, "gs://bucket/b", "b"),
        ("hf://me/out", True, "gs://bucket/b", "gs://bucket/b"),
        ("hf://me/out", None, "hf://org/b@c", "hf://org/b@c"),
    ],
)
def test_where_it_goes_decides(place: str, full_paths: bool | None, url: str, wanted: str) -> None:
    assert Naming.of(place, full_paths).name(url) == wanted


def test_cells_of_a_card() -> None:
    """Paths that hold spaces are told there by where they end."""
    naming, home = Naming.of("hf://me/out"), Path.home()
    for path in (f"{home}/my models/r", f"{home}/mine, too (b)/r", "/data/my models/r", f"{home}/r", "/data/x \\| y/r"):
        card = f"| config from | {path} |\n| and | 3 / 4 |\n"
        assert naming.text(card) == "| config from | r |\n| and | 3 / 4 |\n"


def test_texts() -> None:
    """Paths in sentences, with blanks in those that are known; nothing else is touched."""
    naming = Naming.of("hf://me/out", None, others=["/data/my models/x"])
    told = 'see /data/my models/x/y: "/usr/lib/a.py", line 3; 1/2 of a/b, https://host/a/b, --family=/etc/x/f.py'
    assert naming.text(told) == 'see x/y: "a.py", line 3; 1/2 of a/b, https://host/a/b, --family=f.py'
    assert naming.text("another conversion (process 7 on vm) is at work") == "another conversion is at work"
    config = {"config": {"_name_or_path": "/a/b/c", "other": "/a/b"}}
    assert naming.apply(config) == {"config": {"_name_or_path": "c", "other": "/a/b"}}
    assert [is_name(said) for said in ("x@1", "/x", "hf://x", "", None)] == [True, False, False, False, False]
