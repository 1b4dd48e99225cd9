"""What goes wrong at each request of a publication: afterwards the same again makes one commit, or one pull request, and
`main` never has a part of a model.
"""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import _http, close_session
from safetensors.numpy import load_file
from servers.clients import TOKEN, at_quick_hub
from servers.hub import FakeHub
from servers.repository import Blob
from servers.server import Call, Reply, Server, json_reply
from support import call, files_of, make_release

from weightbeam.formats.storage import LocalFolder, StorageError, open_store
from weightbeam.formats.storage import hub as store
from weightbeam.formats.targets import hub as publishing
from weightbeam.formats.targets.hub import OthersError, Published, check_target, find_published, publish
from weightbeam.formats.targets.published import whole_files
from weightbeam.pipelines.watching.releases import find_models, find_release

REPO, URL, TITLE = "org/tuned", "hf://org/tuned", "export 1234"
REQUESTS = {
    "whoami": "GET /api/whoami",
    "what is there": "GET .*/revision/main",
    "history": "GET .*/commits/",
    "pull requests": "GET .*/discussions",
    "making": "POST /api/repos/create",
    "card": "POST /api/validate-yaml",
    "preupload": "POST .*/preupload/",
    "LFS": "POST .*objects/batch",
    "upload": "PUT /uploads/",
    "commit": "POST .*/commit/",
}
FAULTS: dict[str, dict[str, Any]] = {
    "lost once": dict(kind="lost", times=1),
    "lost always": dict(kind="lost"),
    "reset": dict(kind="reset"),
    "401": dict(kind="status", status=401),
    "429": dict(kind="status", status=429, retry_after=0, times=2),
    "500": dict(kind="status", status=500),
    "503 once": dict(kind="status", status=503, times=1),
}


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    """A hub that knows the token, and clients that don't wait."""
    with at_quick_hub(TOKEN) as server:
        yield server


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes | Path]:
    """A release of two files."""
    made = make_release(tmp_path_factory.mktemp("made") / "release", files=2)
    (made / "README.md").write_text("# tuned\n")
    return files_of(made)


def content(files: dict[str, bytes | Path]) -> dict[str, bytes]:
    return {name: data if isinstance(data, bytes) else data.read_bytes() for name, data in files.items()}


def titles(server: FakeHub) -> list[str]:
    return [commit.title for commit in server.repositories[REPO].head.history()]


def attempt(files: dict[str, bytes | Path], **how: bool) -> Published | None:
    """What a command does of it."""
    check_target(URL)
    return find_published(URL, TITLE, files, **how) or publish(URL, TITLE, files, **how)


@pytest.mark.parametrize("create_pr", [False, True], ids=["commit", "pull request"])
@pytest.mark.parametrize("request_of", REQUESTS)
def test_every_fault_at_every_request(
    hub: FakeHub, files: dict[str, bytes | Path], request_of: str, create_pr: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fault in a repository of its own, until the hub is well again and the same command is run."""
    monkeypatch.setattr("weightbeam.formats.targets.hub.retried", store._retrying(attempts=3).wraps)
    wanted, seen = content(files), 0
    for fault in FAULTS.values():
        hub.repositories.clear()
        hub.cdn.uploads.clear()
        broken = (hub.cdn if request_of == "upload" else hub).fail(**fault, matching=REQUESTS[request_of])
        with contextlib.suppress(StorageError):
            attempt(files, create_pr=create_pr)
        assert (hub.held(REPO) if REPO in hub.repositories else {}) in ({}, wanted)
        seen += broken.hits
        hub.faults, hub.cdn.faults = [], []
        first, again = attempt(files, create_pr=create_pr), attempt(files, create_pr=create_pr)
        assert first
        assert again
        assert first.page == again.page
        made = [TITLE] if not create_pr else []
        assert titles(hub) == [*made, "initial commit"]
        assert hub.held(REPO) == ({} if create_pr else wanted)
        pulls = hub.repositories[REPO].pulls
        assert [pull.title for pull in pulls] == ([TITLE] if create_pr else [])
        for pull in pulls:
            assert {name: bytes(pull.files[name].data) for name in wanted} == wanted
    assert seen or request_of == ("history" if create_pr else "pull requests")


@pytest.mark.parametrize("pause", [10**9, 10**13], ids=["30 years", "more than a clock has"])
@pytest.mark.parametrize("request_of", [request for request in REQUESTS if request != "pull requests"])
def test_a_pause_that_nobody_waits_for(
    hub: FakeHub, files: dict[str, bytes | Path], request_of: str, pause: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said, whichever request it was, and however huggingface_hub makes it."""
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"slept for {seconds} s"))
    (hub.cdn if request_of == "upload" else hub).fail(
        "status", status=429, retry_after=pause, matching=REQUESTS[request_of]
    )
    with pytest.raises(StorageError, match=rf"answered 429 .*asks for a pause of {pause:,} s"):
        attempt(files)


@pytest.mark.parametrize("request_of", [request for request in REQUESTS if request not in ("pull requests", "whoami")])
def test_a_hub_that_never_answers(
    hub: FakeHub, files: dict[str, bytes | Path], request_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request has a time-out; afterwards the same makes one commit."""
    for module in (store, publishing):
        monkeypatch.setattr(module, "retried", lambda ask, _=2: store._retrying(attempts=2).wraps(ask))
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr(store, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(store, "STALL_SECONDS", 0.3)
    close_session()
    server = hub.cdn if request_of == "upload" else hub
    slow = server.fail("slow", seconds=60, matching=REQUESTS[request_of])
    with pytest.raises(StorageError, match="can't be reached"):
        attempt(files)
    assert slow.hits
    server.faults = []
    close_session()
    assert attempt(files)
    assert titles(hub) == [TITLE, "initial commit"]


@pytest.mark.parametrize("page", [b"<html>log in</html>", b"{}", b"", b"5", b"[null]", b'"text"', b"[" * 100_000])
def test_a_page_that_stands_between(
    hub: FakeHub, files: dict[str, bytes | Path], page: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of hotels and proxies, for whatever is asked: it is said, and is no publication; and no reading, either."""
    with monkeypatch.context() as patched:
        patched.setattr(hub, "answer", lambda call: Reply(200, page))
        for ask in (
            lambda: attempt(files),
            lambda: attempt(files, create_pr=True),
            lambda: open_store(URL).check_readable(),
            lambda: find_release(REPO, "main"),
        ):
            with pytest.raises(StorageError, match=r"org/tuned"):
                ask()
        found, problems = find_models(["org/*"])
        nothing = page == b"{}"  # which lists nobody's models
        assert (found, len(problems)) == (["org/*"] * nothing, not nothing)
    assert not hub.repositories
    assert attempt(files)


@pytest.mark.parametrize(
    "change",
    [
        {"sha": None},
        {"sha": 5},
        {"sha": "../../main"},
        {"siblings": 5},
        {"siblings": [{"rfilename": "config.json", "size": "5"}]},
        {"siblings": [{"rfilename": "config.json", "size": -5}]},
        {"siblings": [{"rfilename": 5, "size": 5}]},
        {"siblings": [{"rfilename": "config.json", "size": 5, "blobId": [5]}]},
        {"lastModified": "yesterday"},
    ],
)
def test_what_cant_be_said_of_a_repository(
    hub: FakeHub, files: dict[str, bytes | Path], change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said, by a watcher, too, and nothing is read."""
    assert attempt(files)
    answer = hub.answer

    def changed(call: Any) -> Reply:
        reply = answer(call)
        assert call.path.startswith("/api/models/")
        return Reply(200, json.dumps(json.loads(bytes(reply.body)) | change).encode(), reply.headers)

    monkeypatch.setattr(hub, "answer", changed)
    for ask in (lambda: open_store(URL), lambda: find_release(REPO, "main")):
        with pytest.raises(StorageError, match=r"org/tuned.* is no answer of the hub's"):
            ask()


def test_an_upload_that_nobody_asked_for(
    hub: FakeHub, files: dict[str, bytes | Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's client ends in an error of its own."""
    answer = hub.answer

    def another(call: Any) -> Reply:
        reply = answer(call)
        if not call.path.endswith("objects/batch"):
            return reply
        said = json.loads(bytes(reply.body))
        said["objects"][0]["oid"] = "0" * 64
        return Reply(200, json.dumps(said).encode(), reply.headers)

    with monkeypatch.context() as patched:
        patched.setattr(hub, "answer", another)
        with pytest.raises(StorageError, match=r"org/tuned.* is no answer of the hub's"):
            attempt(files)
    assert hub.held(REPO) == {}
    assert attempt(files)


def test_an_address_that_is_none_is_asked_once(hub: FakeHub, files: dict[str, bytes | Path], monkeypatch: Any) -> None:
    """Such as one without https://, which somebody set, or a redirect to a file."""
    assert attempt(files)
    waited: list[Any] = []
    monkeypatch.setattr(store, "wait", lambda state: waited.append(state) or 0.0)
    answer = hub.answer
    elsewhere = Reply(302, b"", {"Location": "file:///etc/passwd"})
    monkeypatch.setattr(hub, "answer", lambda call: elsewhere if "/resolve/" in call.path else answer(call))
    with pytest.raises(StorageError, match="can't be reached"):
        open_store(URL).read("config.json")
    monkeypatch.setenv("HF_ENDPOINT", "hub.example")
    with pytest.raises(StorageError, match=r"HF_ENDPOINT=hub\.example: is no address of a hub"):
        open_store(URL)
    monkeypatch.setenv("HF_ENDPOINT", "me:secret@hub.example")  # a mirror that asks for a password
    with pytest.raises(StorageError, match="HF_ENDPOINT: is no address of a hub") as told:
        open_store(URL)
    assert "secret" not in str(told.value)
    assert not waited


@pytest.mark.parametrize(
    "address",
    [
        "http://[::1",
        "http://hub.example@127.0.0.2:9/file",
        f"http://127.0.0.2:9/{'x' * 70_000}",
        "http://xn--\u00fc.example/",
    ],
    ids=["broken", "user", "long", "name"],
)
def test_a_redirect_to_no_address(
    hub: FakeHub, files: dict[str, bytes | Path], monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """A broken one, and one with a user's name, which a client sends to that host as who logs in."""
    assert attempt(files)
    answer, elsewhere = hub.answer, Reply(302, b"", {"Location": address})
    monkeypatch.setattr(hub, "answer", lambda call: elsewhere if "/resolve/" in call.path else answer(call))
    with pytest.raises(StorageError, match="no answer of the hub's"):
        open_store(URL).read("config.json")


def test_a_redirect_to_a_host_that_is_away(
    hub: FakeHub, files: dict[str, bytes | Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named, and the hub is asked for another one: who waited for this one alone never ended."""
    assert attempt(files)
    monkeypatch.setattr("weightbeam.formats.storage.store.SILENCE", 0.0)
    answer, elsewhere, asked = hub.answer, Reply(302, b"", {"Location": "http://127.0.0.2:9/file"}), list[str]()

    def redirect(call: Call) -> Reply:
        if "/resolve/" in call.path:
            asked.append(call.path)
        return elsewhere if "/resolve/" in call.path and len(asked) < 3 else answer(call)

    monkeypatch.setattr(hub, "answer", redirect)
    caplog.set_level("WARNING")
    assert (
        open_store(URL).read("model-00001-of-00002.safetensors") == content(files)["model-00001-of-00002.safetensors"]
    )
    assert len(asked) == 3
    assert "waiting for 127.0.0.2, which is asked again" in caplog.text


@pytest.mark.parametrize("of", ["/commits/", "/discussions"])
def test_a_list_without_an_end(
    hub: FakeHub, files: dict[str, bytes | Path], monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    """A page whose next one is itself, and a number of pull requests that no page comes up to."""
    assert attempt(files)
    monkeypatch.setattr(store, "MAX_PAGES", 20)
    answer, asked = hub.answer, list[str]()

    def endless(call: Call) -> Reply:
        if of not in call.path:
            return answer(call)
        asked.append(call.path)
        if of == "/commits/":
            return Reply(200, b"[]", {"Link": f'<{hub.url}{call.path}>; rel="next"'})
        return json_reply(200, dict(discussions=[], count=10**9, start=0))

    monkeypatch.setattr(hub, "answer", endless)
    with pytest.raises(StorageError, match="a list of more than 20 pages"):
        publish(URL, "another", files, overwrite=True, create_pr=True)
    assert len(asked) == 20


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("status", [200, 404])
def test_an_answer_larger_than_memory(
    hub: FakeHub, files: dict[str, bytes | Path], monkeypatch: pytest.MonkeyPatch, packed: bool, status: int
) -> None:
    """Packed, 2 MB may be 2 GB: it isn't asked for, and isn't unpacked; and of what isn't packed no more is read."""
    assert attempt(files)
    monkeypatch.setattr(store, "MAX_ANSWER", 20_000)
    answer, body = hub.answer, b"[" + b" " * 40_000 + b"]"
    reply = Reply(status, gzip.compress(body), {"Content-Encoding": "gzip"}) if packed else Reply(status, body)
    monkeypatch.setattr(hub, "answer", lambda call: reply if "/commits/" in call.path else answer(call))
    with pytest.raises(
        StorageError, match="an answer that is gzip" if packed else "an answer of more than 20,000 bytes"
    ):
        publish(URL, "another", files, overwrite=True)


def test_weights_are_never_taken_away_alone(hub: FakeHub, files: dict[str, bytes | Path], tmp_path: Path) -> None:
    """A list without weights, files that are gone, and a folder that was cleared meanwhile: nothing is committed."""
    publish(URL, TITLE, files)
    (tmp_path / "empty").mkdir()
    gone = {name: tmp_path / name if isinstance(data, Path) else data for name, data in files.items()}
    small = {name: data for name, data in files.items() if isinstance(data, bytes)}
    for lacking in ({}, small, gone):
        with pytest.raises(StorageError):
            publish(URL, "another", lacking, overwrite=True)
    with pytest.raises(StorageError, match="isn't whole"):
        whole_files(LocalFolder(str(tmp_path / "empty")))
    assert titles(hub) == [TITLE, "initial commit"]
    assert hub.held(REPO) == content(files)


def test_a_folder_that_lost_a_file_isnt_whole(files: dict[str, bytes | Path], tmp_path: Path) -> None:
    """Nor one whose file was cut; the record has the digests of all tensors, and is written last."""
    folder = tmp_path / "release"
    folder.mkdir()
    for name, data in content(files).items():
        (folder / name).write_bytes(data)
    shards = sorted(folder.glob("*.safetensors"))
    names = [name for shard in shards for name in load_file(shard)]
    (folder / "weightbeam.json").write_text(json.dumps(dict(digests=dict.fromkeys(names, "0"))))
    assert whole_files(LocalFolder(str(folder))).keys() == {*files, "weightbeam.json"}
    cut = shards[0].read_bytes()
    shards[0].write_bytes(cut[:-1])
    with pytest.raises(StorageError):
        whole_files(LocalFolder(str(folder)))
    shards[0].unlink()
    with pytest.raises(StorageError, match="isn't whole"):
        whole_files(LocalFolder(str(folder)))


def test_the_repositorys_ignored_files_are_published(
    hub: FakeHub, files: dict[str, bytes | Path], tmp_path: Path
) -> None:
    """Its `.gitignore` would leave them out of the commit, and the client says nothing of it."""
    (tmp_path / ".gitignore").write_text("*.safetensors\nconfig.json\n")
    hub.add(REPO, tmp_path, [".gitignore"]).writers.add(TOKEN)
    publish(URL, TITLE, files)
    assert hub.held(REPO).items() >= content(files).items()


def test_what_others_committed_since(hub: FakeHub, files: dict[str, bytes | Path], tmp_path: Path) -> None:
    """A card or a note that was written since is no reason to refuse or to publish anew what is there; other weights
    are.
    """
    publish(URL, TITLE, files)
    (tmp_path / "notes.txt").write_text("x")
    hub.commit(REPO, tmp_path, ["notes.txt"], title="theirs")
    again = attempt(files)
    assert again
    assert (again.removed, again.replaced) == ((), ())
    (tmp_path / "model.safetensors").write_bytes(b"theirs")
    hub.commit(REPO, tmp_path, ["model.safetensors"], title="theirs too")
    with pytest.raises(StorageError, match=r"isn't of this release: model\.safetensors;"):
        attempt(files)
    assert attempt(files, overwrite=True).removed == ("model.safetensors",)  # type: ignore[union-attr]
    assert hub.held(REPO) == content(files) | {"notes.txt": b"x"}


def test_a_new_branch_holds_nothing_of_main(hub: FakeHub, files: dict[str, bytes | Path]) -> None:
    """What stopped between making the branch and the commit goes on; `main` keeps what it has."""
    publish(URL, "another", {"model.safetensors": files["model-00001-of-00002.safetensors"], "tokenizer.json": b"x"})
    hub.fail("status", status=401, matching="POST .*/preupload/")
    for _ in range(2):
        with pytest.raises(StorageError, match="doesn't accept the token"):
            publish(f"{URL}@side", TITLE, files)
    hub.faults = []
    made = publish(f"{URL}@side", TITLE, files)
    assert made
    assert made.removed == ()
    assert hub.held(REPO, "side") == content(files)
    assert hub.held(REPO).keys() == {"model.safetensors", "tokenizer.json"}


@pytest.mark.parametrize("at", ["the head", "an earlier commit"])
def test_a_branch_at_a_commit_of_main_is_its_owners(
    hub: FakeHub, files: dict[str, bytes | Path], tmp_path: Path, at: str
) -> None:
    """Who pins a release by a branch has no commit of his own there."""
    other = {"model.safetensors": files["model-00001-of-00002.safetensors"], "tokenizer.json": b"x"}
    publish(URL, "another", other)
    repository = hub.repositories[REPO]
    repository.branches["stable"] = repository.head
    if at == "an earlier commit":
        (tmp_path / "notes.txt").write_text("x")
        hub.commit(REPO, tmp_path, ["notes.txt"])
    for attempted in (find_published, publish):
        with pytest.raises(StorageError, match=r"isn't of this release: model\.safetensors, tokenizer\.json"):
            attempted(f"{URL}@stable", TITLE, files)
    assert hub.held(REPO, "stable").keys() == other.keys()


def test_a_strangers_pull_request_isnt_ours(hub: FakeHub, files: dict[str, bytes | Path]) -> None:
    """Anyone may open one, of any title and with any weights: it is neither taken for ours, nor is ours closed for it."""
    publish(URL, "another", {**files, "config.json": b"{}"})
    publish(URL, TITLE, {**files, "config.json": b"[]"}, create_pr=True)
    repository = hub.repositories[REPO]
    repository.authors[1] = "stranger"
    assert find_published(URL, TITLE, files, create_pr=True) is None
    for _ in range(2):
        made = publish(URL, TITLE, files, create_pr=True)
        assert made
        assert made.page.endswith("/discussions/2")
    assert [repository.statuses.get(number, "open") for number in (1, 2)] == ["open", "open"]


def test_a_pull_request_that_was_closed_is_opened_anew(hub: FakeHub, files: dict[str, bytes | Path]) -> None:
    """One that is open is found, however many others there are; a merged one was published."""
    hub.page = 2
    for number in range(3):
        publish(URL, f"other {number}", files, create_pr=True)
    publish(URL, TITLE, files, create_pr=True)
    for number in range(3, 6):
        publish(URL, f"other {number}", files, create_pr=True)
    assert publish(URL, TITLE, files, create_pr=True).page.endswith("/discussions/4")  # type: ignore[union-attr]
    hub.repositories[REPO].statuses[4] = "closed"
    assert publish(URL, TITLE, files, create_pr=True).page.endswith("/discussions/8")  # type: ignore[union-attr]


def test_a_merged_pull_request_counts_while_main_has_its_model(hub: FakeHub, files: dict[str, bytes | Path]) -> None:
    """Once main has another, a new one is opened; `find_published` doesn't call it published either."""
    how = {"create_pr": True}
    publish(URL, TITLE, files, create_pr=True)
    repository = hub.repositories[REPO]
    repository.commit(dict(repository.pulls[0].files), "main", f"{TITLE} (#1)", hub._now())
    repository.statuses[1] = "merged"
    merged = attempt(files, **how)
    assert merged
    assert merged.url == f"{URL}@{repository.head.sha}"
    publish(URL, "another", {**files, "config.json": b"{}"}, overwrite=True)
    assert find_published(URL, TITLE, files, **how) is None
    assert attempt(files, **how).page.endswith("/discussions/2")  # type: ignore[union-attr]


@pytest.mark.parametrize("is_merged", [False, True])
def test_a_pull_request_that_others_have_committed_to(
    hub: FakeHub, files: dict[str, bytes | Path], is_merged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said of one that is open; what was merged isn't this result, and isn't ours to replace."""
    publish(URL, TITLE, files, create_pr=True)
    repository = hub.repositories[REPO]
    changed = repository.prepare({"config.json": Blob(b"{}", lfs=False)}, "", "theirs", hub._now(), repository.pulls[0])
    repository.pulls[0], repository.titles[1] = changed, TITLE
    if is_merged:
        repository.commit(dict(changed.files), "main", f"{TITLE} (#1)", hub._now())
        repository.statuses[1] = "merged"
        assert find_published(URL, TITLE, files, create_pr=True) is None
        with pytest.raises(OthersError, match=r"isn't of this release: config\.json$"):
            publish(URL, TITLE, files)
        assert attempt(files, create_pr=True).page.endswith("/discussions/2")  # type: ignore[union-attr]
    else:
        assert attempt(files, create_pr=True).page.endswith("/discussions/1")  # type: ignore[union-attr]
        assert "others have committed to this pull request since" in caplog.text


def test_two_machines_open_one_pull_request(hub: FakeHub, files: dict[str, bytes | Path]) -> None:
    """Another one is opened between our look and our own, which is closed again."""
    hub.add(REPO).writers.add(TOKEN)
    receive, repository = hub._receive, hub.repositories[REPO]

    def late(*arguments: Any) -> Any:
        repository.pulls.append(repository.prepare({}, "main", TITLE, hub._now()))
        return receive(*arguments)

    hub._routes = [
        (methods, path, late if function == receive else function) for methods, path, function in hub._routes
    ]
    for _ in range(2):
        assert attempt(files, create_pr=True).page.endswith("/discussions/1")  # type: ignore[union-attr]
    assert len(repository.pulls) == 2
    assert repository.statuses == {2: "closed"}


def test_a_pull_request_that_the_hub_opens_late_is_closed(hub: FakeHub, files: dict[str, bytes | Path]) -> None:
    """A gateway gave up on a request, we made it again, and then the hub carries the first one out, too: the next command
    closes what came second.
    """
    assert attempt(files, create_pr=True).page.endswith("/discussions/1")  # type: ignore[union-attr]
    repository = hub.repositories[REPO]
    for title in (TITLE, "another", TITLE):
        repository.pulls.append(repository.prepare(dict(repository.pulls[0].files), "main", title, hub._now()))
    for ask in (find_published, publish):
        assert ask(URL, TITLE, files, create_pr=True).page.endswith("/discussions/1")  # type: ignore[union-attr]
        assert repository.statuses == {2: "closed", 4: "closed"}


def test_the_parent_is_fixed_before_it_is_asked_whether_it_is_wanted(
    hub: FakeHub, files: dict[str, bytes | Path], tmp_path: Path
) -> None:
    """Who published at that moment isn't overwritten; and what isn't wanted isn't committed."""
    assert publish(URL, TITLE, files, is_wanted=lambda: False) is None
    assert REPO not in hub.repositories or hub.held(REPO) == {}
    (tmp_path / "model.safetensors").write_bytes(b"newer")

    def publish_newer() -> bool:
        hub.commit(REPO, tmp_path, ["model.safetensors"], title="newer")
        return True

    with pytest.raises(StorageError, match="someone else committed there"):
        publish(URL, TITLE, files, overwrite=True, is_wanted=publish_newer)
    assert hub.held(REPO) == {"model.safetensors": b"newer"}


class _Elsewhere(Server):
    """Another host, which an answer of the hub's names."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Call] = []

    def answer(self, call: Call) -> Reply:
        self.asked.append(call)
        return json_reply(200, [])


@pytest.mark.parametrize("names", ["a page", "an action of LFS"])
def test_the_token_is_for_the_hub_alone(
    hub: FakeHub, files: dict[str, bytes | Path], monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    """As behind a mirror that passes on another hub's addresses: that host isn't asked."""
    answer = hub.answer
    with _Elsewhere() as other:
        there = other.url.replace("127.0.0.1", "localhost")

        def answered(call: Call) -> Reply:
            reply = answer(call)
            if names == "a page" and "/commits/" in call.path:
                reply.headers = {**reply.headers, "Link": f'<{there}/next>; rel="next"'}
            if names != "a page" and call.path.endswith("objects/batch"):
                said = json.loads(bytes(reply.body))
                for each in said["objects"]:
                    if "actions" in each:
                        each["actions"]["verify"] = {"href": f"{there}/verify", "header": {}}
                reply.body = json.dumps(said).encode()
            return reply

        monkeypatch.setattr(hub, "answer", answered)
        with pytest.raises(StorageError, match="an answer that names localhost"):
            [attempt(files) for _ in range(2)]  # the first makes the repository
        assert not list(other.log)


def test_a_mirror_whose_files_lie_at_the_hub(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's client takes huggingface.co for itself, whose hub it was told of: there it is asked without the token."""
    hub.add(REPO, make_release(tmp_path / "release"))
    repository, answer = open_store(URL), hub.answer
    with _Elsewhere() as other:
        there = other.url.replace("127.0.0.1", "localhost")
        monkeypatch.setattr(_http, "_HUB_ORIGINS", frozenset([_http._url_origin(there)]))

        def answered(call: Call) -> Reply:
            return Reply(302, b"", {"Location": there + call.path}) if "/resolve/" in call.path else answer(call)

        monkeypatch.setattr(hub, "answer", answered)
        with contextlib.suppress(StorageError):
            repository.read("config.json")
        assert {call.method for call in other.asked} >= {"HEAD"}
        assert not any(call.headers["Authorization"] for call in other.asked)


def test_a_mirror_that_asks_for_a_password(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which its address names: small files that it has itself are read."""
    hub.add(REPO, make_release(tmp_path / "release"))
    monkeypatch.setenv("HF_ENDPOINT", hub.url.replace("://", "://me:secret@"))
    assert json.loads(open_store(URL).read("config.json"))["model_type"]


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("http://me:secret@hub.example:abc", ""),
        ("//me:secret@hub", ""),
        ("http://me:secret", ""),
        ("", "="),
        ("hub.example", "=hub.example"),
        ("http://hub.example/api?token=secret", ""),
    ],
)
def test_an_endpoint_that_is_no_address(
    address: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said before the hub's client is imported, which ends in a traceback, or asks an address that is none."""
    monkeypatch.setenv("HF_ENDPOINT", address)
    assert call("convert", URL, tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert f"HF_ENDPOINT{shown}: is no address of a hub" in said
    assert "secret" not in said
    with pytest.raises(StorageError, match="is no address of a hub"):
        open_store(URL)


@pytest.mark.parametrize(
    ("endpoint", "url", "is_hub"),
    [
        ("https://hub", "https://hub:443/x", True),
        ("https://hub:443", "https://hub/x", True),
        ("http://hub", "https://hub/x", True),
        ("https://hub", "http://hub/x", False),
        ("http://u:p@hub:8080", "http://hub:8080/x", True),
        ("http://hub:8080", "http://hub:8081/x", False),
        ("https://hub", "https://hub.elsewhere/x", False),
    ],
)
def test_which_address_is_the_hubs(endpoint: str, url: str, is_hub: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert store._is_endpoint(url) == is_hub


@pytest.mark.parametrize("given", [None, TOKEN, "hf_wrong"])
def test_a_watcher_says_what_a_command_does(
    hub: FakeHub, given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what isn't there, and of a revision that isn't; neither shows the password of a mirror's address."""
    hub.add("org/there", make_release(tmp_path / "release"))
    monkeypatch.setenv("HF_ENDPOINT", hub.url.replace("://", "://me:secret@"))
    monkeypatch.setenv("HF_TOKEN", given) if given else monkeypatch.delenv("HF_TOKEN")
    for repo, revision in ((REPO, "main"), ("org/there", "none")):
        with pytest.raises(StorageError) as read:
            open_store(f"hf://{repo}@{revision}")
        with pytest.raises(StorageError) as watched:
            find_release(repo, revision)
        assert str(read.value) == str(watched.value).replace(repo, f"hf://{repo}@{revision}", 1)
        assert "secret" not in str(read.value)
