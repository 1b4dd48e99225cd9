"""The fake hub, driven by stock huggingface_hub only: what the folders hold is what arrives, and refusals and faults
are the hub's.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
import requests
from huggingface_hub import (
    HfApi,
    HfFileSystem,
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import close_session
from processes import run

from servers.hub import FakeHub
from servers.server import process

WEIGHTS = random.Random(0).randbytes(300_000)
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model-00001-of-00002.safetensors": WEIGHTS,
    "model-00002-of-00002.safetensors": WEIGHTS[::-1],
    "original/params.json": b"{}",
    "original/a b+c%.txt": "ü".encode(),
}
SHARD, MODEL = "model-00001-of-00002.safetensors", "org/model"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in FILES.items():
        path = tmp_path / "models" / MODEL / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "models" / MODEL


@pytest.fixture
def hub(folder: Path) -> Iterator[FakeHub]:
    with FakeHub() as server:
        server.add(MODEL, folder, card={"license": "mit"})
        yield server
        close_session()


@pytest.fixture
def api(hub: FakeHub) -> HfApi:
    return HfApi(endpoint=hub.url, token=False)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the client would have waited before it tried again, each time; it doesn't."""
    waited: list[float] = []
    for module in ("utils._http", "file_download"):
        monkeypatch.setattr(f"huggingface_hub.{module}.time", SimpleNamespace(sleep=waited.append, time=time.time))
    return waited


def download(hub: FakeHub, cache: Path, name: str = SHARD, **options: Any) -> bytes:
    options = dict(repo_id=MODEL, token=False) | options
    return Path(hf_hub_download(filename=name, endpoint=hub.url, cache_dir=cache, **options)).read_bytes()


# --- about models -----------------------------------------------------------------------------------------------------


def test_model_info(api: HfApi, folder: Path, hub: FakeHub) -> None:
    """Sizes and hashes of the files, git's own among them."""
    info = api.model_info(MODEL, files_metadata=True)
    assert info.siblings is not None
    files = {file.rfilename: file for file in info.siblings}
    assert set(files) == {*FILES, ".gitattributes"}
    for name, data in FILES.items():
        lfs = files[name].lfs
        assert files[name].size == len(data)
        if name.endswith(".safetensors"):
            assert lfs is not None
            assert (lfs.sha256, lfs.size) == (hashlib.sha256(data).hexdigest(), len(data))
            pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{lfs.sha256}\nsize {lfs.size}\n".encode()
            assert lfs.pointer_size == len(pointer)
            data = pointer
        else:
            assert lfs is None
        git = subprocess.run(["git", "hash-object", "--stdin"], input=data, capture_output=True, check=True).stdout
        assert files[name].blob_id == git.decode().strip()
    assert (info.id, info.author, info.gated, info.private, info.config) == (
        MODEL,
        "org",
        False,
        False,
        {"model_type": "llama"},
    )
    assert info.card_data is not None
    assert info.card_data.license == "mit"
    assert "license:mit" in (info.tags or [])
    assert [file.size for file in api.model_info(MODEL).siblings or []] == [None] * 6
    assert api.model_info(MODEL, expand=["sha"]).siblings is None
    assert api.model_info(MODEL, revision=info.sha).sha == info.sha == hub.repositories[MODEL].head.sha


def test_list_models(api: HfApi, hub: FakeHub, folder: Path) -> None:
    times = iter(range(1_000_000, 2_000_000, 1000))
    hub.clock = lambda: next(times)
    for i in range(5):
        hub.add(f"team/model-{i}", folder, ["config.json"], gated="auto" if i == 3 else False)
    hub.add("team/private", private=True)
    hub.commit("team/model-1", folder, [SHARD])
    names = [f"team/model-{i}" for i in (1, 4, 3, 2, 0)]
    for page in (1, 2, 1000):
        hub.page = page
        models = list(api.list_models(author="team", sort="last_modified", full=True))
        assert [model.id for model in models] == names
        assert [len(model.siblings or []) for model in models] == [3, 2, 2, 2, 2]
        assert len({model.last_modified for model in models}) == 5
        assert [model.id for model in api.list_models(author="team", sort="created_at", limit=2)] == [
            "team/model-4",
            "team/model-3",
        ]
    assert [model.id for model in api.list_models(search="MODEL-2")] == ["team/model-2"]
    assert [model.id for model in api.list_models(author="team", gated=True)] == ["team/model-3"]
    assert [model.id for model in api.list_models(filter="license:mit")] == [MODEL]
    token = hub.allow("hf_reader", "team/private")
    assert "team/private" in [model.id for model in api.list_models(author="team", token=token)]


def test_revisions(api: HfApi, hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    """A branch moves; what a commit held stays what it was."""
    first = api.model_info(MODEL).sha
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / SHARD).write_bytes(b"second")
    second = hub.commit(MODEL, tmp_path / "new", remove=["original/params.json"], title="Fix")
    hub.repositories[MODEL].tags["v1"] = hub.repositories[MODEL].commits[str(first)]
    third = hub.commit(MODEL, tmp_path / "new", branch="pr/1")
    assert api.model_info(MODEL).sha == second
    refs = api.list_repo_refs(MODEL)
    assert {ref.name: ref.target_commit for ref in refs.branches} == {"main": second, "pr/1": third}
    assert {ref.name: ref.target_commit for ref in refs.tags} == {"v1": first}
    hub.page = 2
    assert [(commit.commit_id, commit.title) for commit in api.list_repo_commits(MODEL)][:2] == [
        (second, "Fix"),
        (first, "Upload"),
    ]
    for revision, data in (
        ("main", b"second"),
        ("v1", WEIGHTS),
        (first, WEIGHTS),
        (second, b"second"),
        ("pr/1", b"second"),
    ):
        assert download(hub, tmp_path / "cache", revision=revision) == data
    with pytest.raises(RemoteEntryNotFoundError):
        download(hub, tmp_path / "cache", "original/params.json")
    assert download(hub, tmp_path / "cache", "original/params.json", revision=first) == b"{}"


def test_trees(api: HfApi, hub: FakeHub) -> None:
    for page in (1, 2, 1000):
        hub.page = page
        entries = list(api.list_repo_tree(MODEL, recursive=True, expand=True))
        assert [entry.path for entry in entries] == sorted([*FILES, ".gitattributes", "original"])
        assert {entry.last_commit.oid for entry in entries if entry.last_commit} == {api.model_info(MODEL).sha}
    assert sorted(entry.path for entry in api.list_repo_tree(MODEL)) == sorted(
        [".gitattributes", "original", *(name for name in FILES if "/" not in name)]
    )
    assert [entry.path for entry in api.list_repo_tree(MODEL, "original")] == [
        "original/a b+c%.txt",
        "original/params.json",
    ]
    assert [entry.path for entry in api.get_paths_info(MODEL, [SHARD, "original", "none"])] == [SHARD, "original"]
    with pytest.raises(RemoteEntryNotFoundError):
        list(api.list_repo_tree(MODEL, "none"))


def test_a_release_that_is_incomplete_first(api: HfApi, hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    hub.add("org/new", folder, ["config.json"])
    assert not api.file_exists("org/new", SHARD)
    hub.commit("org/new", folder, [SHARD])
    assert api.file_exists("org/new", SHARD)
    assert download(hub, tmp_path, repo_id="org/new") == WEIGHTS


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resolve_cache", [False, True])
def test_downloads(hub: FakeHub, tmp_path: Path, resolve_cache: bool) -> None:
    """Each byte is sent once, the large files by the other host, which never sees the token."""
    hub.resolve_cache = resolve_cache
    token = hub.allow("hf_reader")
    path = Path(snapshot_download(MODEL, endpoint=hub.url, cache_dir=tmp_path / "cache", token=token))
    assert {name: (path / name).read_bytes() for name in FILES} == FILES
    assert download(hub, tmp_path / "other", token=token) == WEIGHTS
    assert hub.cdn.leaks == []
    assert set(hub.log.of("read").ranges()) == {
        f"{MODEL}/{name}" for name in (*FILES, ".gitattributes") if not name.endswith(".safetensors")
    }
    assert hub.cdn.log.ranges() == {
        f"{MODEL}/{SHARD}": [(0, len(WEIGHTS))] * 2,
        f"{MODEL}/{SHARD.replace('00001-', '00002-')}": [(0, len(WEIGHTS))],
    }
    assert hub.traffic.read_twice() == len(WEIGHTS)


def test_what_the_headers_say(hub: FakeHub) -> None:
    token = hub.allow("hf_reader")
    large = get_hf_file_metadata(hf_hub_url(MODEL, SHARD, endpoint=hub.url), token=token)
    assert (large.commit_hash, large.etag, large.size) == (
        hub.repositories[MODEL].head.sha,
        hashlib.sha256(WEIGHTS).hexdigest(),
        len(WEIGHTS),
    )
    assert large.location.startswith(f"{hub.cdn.url}/")
    small = get_hf_file_metadata(hf_hub_url(MODEL, "config.json", endpoint=hub.url))
    assert (small.commit_hash, small.size) == (large.commit_hash, len(FILES["config.json"]))
    assert small.location == f"{hub.url}/{MODEL}/resolve/main/config.json"
    for start, end in ((0, 9), (1000, 1000), (len(WEIGHTS) - 5, "")):
        answer = requests.get(large.location, headers={"Range": f"bytes={start}-{end}"})
        assert answer.status_code == 206
        assert answer.content == WEIGHTS[start : end + 1 if isinstance(end, int) else None]
    assert requests.get(large.location, headers={"Range": f"bytes={len(WEIGHTS)}-"}).status_code == 416


def test_a_token_that_leaks_is_noticed(hub: FakeHub) -> None:
    """The test's own client is the careless one here."""
    metadata = get_hf_file_metadata(hf_hub_url(MODEL, SHARD, endpoint=hub.url))
    assert requests.get(metadata.location, headers={"Authorization": "Bearer hf_reader"}).status_code == 400
    assert len(hub.cdn.leaks) == 1
    assert requests.get(metadata.location.replace("Signature=", "Signature=0")).status_code == 403


def test_file_system(hub: FakeHub) -> None:
    """Ranges, and only those."""
    fs = HfFileSystem(endpoint=hub.url, token=False, skip_instance_cache=True)
    assert sorted(fs.find(MODEL)) == sorted(f"{MODEL}/{name}" for name in (*FILES, ".gitattributes"))
    assert fs.info(f"{MODEL}/{SHARD}")["size"] == len(WEIGHTS)
    with fs.open(f"{MODEL}/{SHARD}", cache_type="none") as file:  # else it reads five megabytes ahead
        file.seek(1000)
        assert file.read(1000) == WEIGHTS[1000:2000]
    assert fs.read_bytes(f"{MODEL}/original/a b+c%.txt") == "ü".encode()
    assert hub.cdn.log.ranges() == {f"{MODEL}/{SHARD}": [(1000, 2000)]}


def test_signed_addresses_expire(hub: FakeHub, tmp_path: Path) -> None:
    now = 1_000_000.0
    hub.clock = lambda: now
    hub.expiry = 60
    metadata = get_hf_file_metadata(hf_hub_url(MODEL, SHARD, endpoint=hub.url))
    now += 59
    assert requests.get(metadata.location).content == WEIGHTS
    now += 1
    answer = requests.get(metadata.location)
    assert (answer.status_code, b"Request has expired" in answer.content) == (403, True)
    assert download(hub, tmp_path) == WEIGHTS
    hub.expiry = 0
    with pytest.raises(HfHubHTTPError, match="403"):
        download(hub, tmp_path, force_download=True)


# --- who may see what -------------------------------------------------------------------------------------------------

LOG_IN, ASK = (
    "is restricted. You must have access to it and be authenticated",
    "you are not in the authorized list. Visit https://huggingface.co/org/gated",
)


@pytest.mark.parametrize(
    ("name", "token", "status", "error", "message"),
    [
        ("org/gated", False, 401, GatedRepoError, LOG_IN),
        ("org/gated", "hf_stranger", 403, GatedRepoError, ASK),
        ("org/private", False, 401, RepositoryNotFoundError, "Invalid username or password"),
        ("org/private", "hf_stranger", 404, RepositoryNotFoundError, "Repository Not Found"),
        ("org/none", False, 401, RepositoryNotFoundError, "Invalid username or password"),
        ("org/none", "hf_stranger", 404, RepositoryNotFoundError, "Repository Not Found"),
        (MODEL, "hf_forged", 401, HfHubHTTPError, "Invalid credentials in Authorization header"),
    ],
)
def test_refusals(
    hub: FakeHub,
    folder: Path,
    tmp_path: Path,
    name: str,
    token: str | bool,
    status: int,
    error: type[HfHubHTTPError],
    message: str,
) -> None:
    """As the stock client understands them, whatever it asks."""
    hub.add("org/gated", folder, gated="manual")
    hub.add("org/private", folder, private=True)
    hub.allow("hf_stranger")
    hub.allow("hf_reader", "org/gated", "org/private")
    api = HfApi(endpoint=hub.url, token=token)
    for ask in (
        lambda: api.auth_check(name),
        lambda: get_hf_file_metadata(hf_hub_url(name, "config.json", endpoint=hub.url), token=token),
        lambda: download(hub, tmp_path, "config.json", repo_id=name, token=token),
    ):
        with pytest.raises(error, match=message) as e:
            ask()
        assert e.value.response.status_code == status
    if name != "org/gated":
        with pytest.raises(error, match=message):
            api.model_info(name)
    else:
        assert api.model_info(name).gated == "manual"
    if name in hub.repositories:
        assert download(hub, tmp_path, repo_id=name, token="hf_reader") == WEIGHTS


def test_what_is_not_there(hub: FakeHub, api: HfApi, tmp_path: Path) -> None:
    with pytest.raises(RevisionNotFoundError, match="Invalid rev id: none"):
        api.model_info(MODEL, revision="none")
    with pytest.raises(RevisionNotFoundError):
        download(hub, tmp_path, revision="none")
    with pytest.raises(RemoteEntryNotFoundError):
        download(hub, tmp_path, "none")


# --- faults -----------------------------------------------------------------------------------------------------------


def test_rate_limits(hub: FakeHub, tmp_path: Path, waits: list[float]) -> None:
    """The client waits as long as it is told."""
    hub.fail("status", status=429, retry_after=7, times=1, matching="GET .*tree")
    fault = hub.cdn.fail("status", status=429, retry_after=5, times=1)
    assert [entry.path for entry in HfApi(endpoint=hub.url, token=False).list_repo_tree(MODEL, "original")]
    assert download(hub, tmp_path) == WEIGHTS
    assert waits == [8, 6]  # the client adds one
    assert fault.hits == 1
    hub.fail("status", status=429, retry_after=7)
    with pytest.raises(HfHubHTTPError, match="you have reached your 'api' rate limit") as e:
        HfApi(endpoint=hub.url, token=False).model_info(MODEL)
    assert e.value.response.headers["Retry-After"] == "7"


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize("kind", ["cut", "stall"])
def test_a_download_that_breaks_goes_on(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Where it broke: the halves of halves, and no byte twice."""
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.5 if kind == "stall" else 60)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)  # what the client hasn't a whole one of is lost to it
    fault = hub.cdn.fail(kind, times=3, seconds=60)
    assert download(hub, tmp_path) == WEIGHTS
    assert fault.hits == 3
    halves = [150_000, 225_000, 262_500]
    assert hub.cdn.log.ranges() == {f"{MODEL}/{SHARD}": list(zip([0, *halves], [*halves, 300_000], strict=True))}
    assert hub.traffic.read_twice() == 0


@pytest.mark.usefixtures("waits")
def test_faults_are_seen(hub: FakeHub, tmp_path: Path) -> None:
    """By a client that tries once, and by the stock one where it gives up."""
    url = f"{hub.url}/{MODEL}/resolve/main/original/params.json"
    for kind, error in (
        ("reset", httpx2.ReadError),
        ("lost", httpx2.ReadError),
        ("cut", httpx2.RemoteProtocolError),
        ("stall", httpx2.ReadTimeout),
    ):
        hub.faults = []
        hub.fail(kind, seconds=60)
        with pytest.raises(error), httpx2.Client(timeout=0.3 if kind == "stall" else 60) as client:
            client.get(url)
    hub.faults = []
    hub.fail("status", status=503)
    with pytest.raises(LocalEntryNotFoundError):  # the client's way to say it: not even in its cache
        download(hub, tmp_path)
    hub.faults = []
    hub.cdn.fail("reset", times=1)
    with pytest.raises(httpx2.ReadError):  # on the way it tries again after a cut or a stall only
        download(hub, tmp_path)
    assert download(hub, tmp_path) == WEIGHTS


# --- as others use it -------------------------------------------------------------------------------------------------


def found_with(code: str, environment: dict[str, str]) -> Any:
    """What a process prints that has only these variables to know the hub by."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return json.loads(run(sys.executable, "-c", code, env=kept | environment, timeout=60, status=0).stdout)


def test_by_the_environment(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    hub.add("org/gated", folder, gated="auto")
    token = hub.allow("hf_reader", "org/gated")
    code = "import huggingface_hub as h, json; print(json.dumps([h.hf_hub_download('org/gated', 'config.json'), h.model_info('org/gated').sha]))"
    path, sha = found_with(code, hub.env(token) | {"HF_HOME": str(tmp_path / "home")})
    assert Path(path).read_bytes() == FILES["config.json"]
    assert sha == hub.repositories["org/gated"].head.sha


def test_in_a_process_of_its_own(folder: Path, tmp_path: Path) -> None:
    """Started as a script: faults and logs go through a control endpoint for each of the two servers."""
    with process("hub", "--folder", str(folder.parents[1])) as control:
        cdn = type(control)(control.set()["cdn"])
        cdn.set(faults=[dict(kind="status", status=403, times=1)])
        options: dict[str, Any] = dict(
            repo_id=MODEL, filename=SHARD, endpoint=control.url, cache_dir=tmp_path / "cache", token=False
        )
        with pytest.raises(HfHubHTTPError, match="403"):
            hf_hub_download(**options)
        assert Path(hf_hub_download(**options)).read_bytes() == WEIGHTS
        assert [(entry.status, entry.sent) for entry in cdn.log if entry.kind == "read"] == [(200, len(WEIGHTS))]
        assert control.log.counts()["resolve"] == 2
