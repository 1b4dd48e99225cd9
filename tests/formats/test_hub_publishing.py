"""A folder on the hub as one commit: what arrives, what a reader sees meanwhile, refusals, races and faults. Stock
huggingface_hub reads it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import snapshot_download
from servers.clients import TOKEN
from servers.hub import FakeHub
from servers.server import Call, Reply, json_reply
from support import make_release

from weightbeam.formats.storage import StorageError
from weightbeam.formats.storage.hub import open_repository
from weightbeam.formats.targets.hub import HubAddress, OthersError, check_target, find_published, publish
from weightbeam.pipelines.watching.releases import find_release

REPO, URL = "org/tuned", "hf://org/tuned"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A release of two files, an index, and small files, one in a folder below."""
    made = make_release(tmp_path / "release", files=2)
    (made / "README.md").write_text("---\nlicense: mit\n---\n# tuned\n")
    (made / "additional_chat_templates").mkdir()
    (made / "additional_chat_templates" / "rag.jinja").write_bytes(b"{{ x }}\r\n")
    return made


def publish_folder(folder: Path, url: str, title: str, **how: Any) -> Any:
    """Publishes all that lies in a folder."""
    files = {
        path.relative_to(folder).as_posix(): path if path.suffix == ".safetensors" else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    return publish(url, title, files, **how)


def bytes_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def commits(server: FakeHub, repo: str = REPO) -> list[str]:
    return [commit.title for commit in server.repositories[repo].head.history()]


def test_one_commit(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    """Every byte arrives; the repository is private; the address and the commit that it is read by again."""
    published = publish_folder(folder, URL, "export 1234")
    assert hub.held(REPO) == bytes_in(folder)
    assert commits(hub) == ["export 1234", "initial commit"]
    assert hub.repositories[REPO].private
    assert published.url == f"{URL}@{hub.repositories[REPO].head.sha}"
    assert not hub.cdn.leaks
    got = snapshot_download(REPO, endpoint=hub.url, token=TOKEN, cache_dir=tmp_path / "cache")
    assert {name: data for name, data in bytes_in(Path(got)).items() if name != ".gitattributes"} == bytes_in(folder)


def test_the_same_again(hub: FakeHub, folder: Path) -> None:
    """Nothing is uploaded twice, and no empty commit is made."""
    first = publish_folder(folder, URL, "export 1234")
    uploads = hub.cdn.log.counts()["upload"]
    assert publish_folder(folder, URL, "export 1234").url == first.url
    assert hub.cdn.log.counts()["upload"] == uploads == 2
    assert len(commits(hub)) == 2


def test_weights_that_were_there_are_replaced(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    """Loaders would read them too, and another model's tokenizer with these weights. A card and other files of the
    repository stay. Without `overwrite` it is refused, all of it named.
    """
    old = {
        "model.safetensors": b"old",
        "pytorch_model.bin": b"old",
        "README.md": b"mine",
        "notes.txt": b"mine",
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"x",
        "adapter_config.json": b"{}",
        "maxtext.yml": b"x",
    }
    (tmp_path / "old").mkdir()
    for name, data in old.items():
        (tmp_path / "old" / name).write_bytes(data)
    hub.add(REPO, tmp_path / "old").writers.add(TOKEN)
    gone = (
        "adapter_config.json",
        "chat_template.jinja",
        "maxtext.yml",
        "model.safetensors",
        "pytorch_model.bin",
        "tokenizer.json",
    )
    for attempt in (
        lambda: find_published(URL, "export 1234", dict.fromkeys(bytes_in(folder))),
        lambda: publish_folder(folder, URL, "export 1234"),
    ):
        with pytest.raises(StorageError, match="holds what isn't of this release") as refused:
            attempt()
        assert [name for name in (*gone, "config.json") if name not in str(refused.value)] == []
        assert hub.cdn.log.counts()["upload"] == 0
    assert hub.held(REPO) == old
    published = publish_folder(folder, URL, "export 1234", overwrite=True)
    assert (published.removed, published.replaced, published.kept) == (gone, ("config.json",), ("README.md",))
    assert hub.held(REPO) == bytes_in(folder) | {"README.md": b"mine", "notes.txt": b"mine"}
    assert len(commits(hub)) == 3


def test_more_files_than_a_description_lists(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    """A repository of 1,100 files and a model behind them: it is read whole, watched whole, and replaced whole."""
    samples = tmp_path / "old" / "evals"
    samples.mkdir(parents=True)
    for number in range(1100):
        (samples / f"{number:04}.txt").write_text(f"{number}")
    old = {"model.safetensors": b"old", "tokenizer.json": b"{}", "tokenizer_config.json": b"{}"}
    for name, data in old.items():
        (tmp_path / "old" / name).write_bytes(data)
    hub.add(REPO, tmp_path / "old").writers.add(TOKEN)
    there = hub.held(REPO)
    assert {name: len(data) for name, data in there.items()} == {
        name: file.size for name, file in open_repository(URL).files().items() if name != ".gitattributes"
    }
    assert find_release(REPO, "main").shards == ["model.safetensors"]
    with pytest.raises(StorageError, match=re.escape("model.safetensors, tokenizer.json, tokenizer_config.json")):
        publish_folder(folder, URL, "export 1234")
    published = publish_folder(folder, URL, "export 1234", overwrite=True)
    assert published.removed == tuple(old)
    assert hub.held(REPO) == {name: data for name, data in there.items() if name not in old} | bytes_in(folder)
    assert publish_folder(folder, URL, "export 1234").url == published.url


def test_a_pull_request(hub: FakeHub, folder: Path) -> None:
    """The branch stays as it is; the pull request has all."""
    hub.add(REPO).writers.add(TOKEN)
    published = publish_folder(folder, URL, "export 1234", create_pr=True)
    assert published.page.endswith(f"/{REPO}/discussions/1")
    (made,) = hub.repositories[REPO].pulls
    assert {name: bytes(blob.data) for name, blob in made.files.items() if name != ".gitattributes"} == bytes_in(folder)
    assert hub.held(REPO) == {}


def test_another_branch(hub: FakeHub, folder: Path) -> None:
    hub.add(REPO).writers.add(TOKEN)
    publish_folder(folder, f"{URL}@step-1000", "export 1234")
    assert hub.held(REPO, "step-1000") == bytes_in(folder)
    assert hub.held(REPO) == {}


def test_nothing_is_seen_before_the_commit(hub: FakeHub, folder: Path) -> None:
    """Where the commit is refused, files are uploaded, but no revision has any of them."""
    hub.add(REPO).writers.add(TOKEN)
    hub.fail("status", status=400, matching="POST .*/commit/")
    with pytest.raises(StorageError, match=rf"^{URL}: the hub answered 400"):
        publish_folder(folder, URL, "export 1234")
    assert hub.cdn.log.counts()["upload"] == 2
    assert hub.held(REPO) == {}


@pytest.mark.parametrize("kind", ["lost", "reset"])
def test_a_lost_answer_makes_no_second_commit(hub: FakeHub, folder: Path, kind: str) -> None:
    """The commit happened, or it didn't: what is done about it is right in either case."""
    hub.add(REPO).writers.add(TOKEN)
    hub.fail(kind, times=1, matching="POST .*/commit/")
    published = publish_folder(folder, URL, "export 1234")
    assert commits(hub) == ["export 1234", "initial commit"]
    assert published.url == f"{URL}@{hub.repositories[REPO].head.sha}"
    assert hub.held(REPO) == bytes_in(folder)


def test_faults_that_pass(hub: FakeHub, folder: Path) -> None:
    hub.add(REPO).writers.add(TOKEN)
    hub.fail("status", every=3, status=503)
    hub.cdn.fail("status", every=2, status=500)
    publish_folder(folder, URL, "export 1234")
    assert hub.held(REPO) == bytes_in(folder)
    assert len(commits(hub)) == 2


def commit_before(hub: FakeHub, request: Callable[..., Any], folder: Path, *, set_back: bool = False) -> None:
    """Has somebody commit a folder's files right before the hub's first answer to such a request, and perhaps set the
    branch back after it.
    """
    done = []

    def late(*arguments):
        before = hub.repositories[REPO].head
        if is_first := not done:
            done.append(hub.commit(REPO, folder, title="theirs"))
        answer = request(*arguments)
        if is_first and set_back:
            hub.repositories[REPO].branches["main"] = before
        return answer

    hub._routes = [
        (methods, pattern, late if function == request else function) for methods, pattern, function in hub._routes
    ]


@pytest.mark.parametrize("set_back", [False, True])
@pytest.mark.parametrize("create_pr", [False, True])
def test_a_part_that_someone_else_committed(
    hub: FakeHub, folder: Path, tmp_path: Path, create_pr: bool, set_back: bool
) -> None:
    """What the branch has by then isn't sent: a pull request, which begins before that, lacked it, and so did a commit where
    the branch is what it was again. Nothing is made of that.
    """
    hub.add(REPO).writers.add(TOKEN)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name in ("config.json", "model-00001-of-00002.safetensors"):
        shutil.copy(folder / name, theirs / name)
    commit_before(hub, hub._preupload, theirs, set_back=set_back)
    with pytest.raises(StorageError, match="someone else committed there"):
        publish_folder(folder, URL, "export 1234", create_pr=create_pr)
    assert hub.repositories[REPO].pulls == []
    assert commits(hub) == (["initial commit"] if set_back else ["theirs", "initial commit"])
    publish_folder(folder, URL, "export 1234", create_pr=create_pr, overwrite=True)
    (made,) = hub.repositories[REPO].pulls or [hub.repositories[REPO].head]
    assert bytes_in(folder).items() <= {name: bytes(blob.data) for name, blob in made.files.items()}.items()


def test_someone_else_was_faster(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    """Their commit stays the newest, and it is said."""
    hub.add(REPO).writers.add(TOKEN)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "notes.txt").write_text("theirs")
    commit_before(hub, hub._receive, tmp_path / "theirs")
    with pytest.raises(StorageError, match="someone else committed there"):
        publish_folder(folder, URL, "export 1234")
    assert hub.held(REPO) == {"notes.txt": b"theirs"}


@pytest.mark.parametrize("create_pr", [False, True])
def test_all_of_it_is_there_under_another_title(hub: FakeHub, folder: Path, create_pr: bool) -> None:
    """As after the history was squashed: that is the result, whatever is committed there in the meantime; none is made."""
    hub.add(REPO, folder).writers.add(TOKEN)
    there = hub.repositories[REPO].head.sha
    assert publish_folder(folder, URL, "export 1234", create_pr=create_pr).url == f"{URL}@{there}"
    assert commits(hub) == ["Upload", "initial commit"]
    assert not hub.log.of("preupload")
    assert not hub.log.of("receive")


def test_a_branch_that_is_set_back_to_an_earlier_commit_of_ours(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    """By that nothing is published now: it isn't what was made since the branch was looked at."""
    repository = hub.add(REPO)
    repository.writers.add(TOKEN)
    publish_folder(folder, URL, "export 1234")
    ours = repository.head
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text("{}")
    hub.commit(REPO, tmp_path / "theirs", title="theirs")
    receive = hub._receive

    def set_back(*arguments: Any) -> Any:
        repository.branches["main"] = ours
        hub.commit(REPO, tmp_path / "theirs", title="theirs, too")
        return receive(*arguments)

    hub._routes = [(methods, pattern, set_back if f == receive else f) for methods, pattern, f in hub._routes]
    with pytest.raises(StorageError, match="someone else committed there"):
        publish_folder(folder, URL, "export 1234", overwrite=True)
    assert commits(hub) == ["theirs, too", "export 1234", "initial commit"]


def test_refusals(hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What to do, without a traceback's words and without the token."""
    hub.add("other/model", private=False)
    cases = {
        "hf://other/model": "You don't have the rights to commit to this repository; if that is about the token, it needs "
        "the role `write`, and its owner access to other",
        "hf://a": "should be hf://owner/name",
    }
    for url, said in cases.items():
        with pytest.raises(StorageError, match=said) as told:
            publish_folder(folder, url, "x")
        assert TOKEN not in str(told.value)
    hub.users.clear()
    with pytest.raises(StorageError, match="doesn't accept the token that is set"):
        check_target(URL)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(StorageError, match="HF_TOKEN isn't set"):
        check_target(URL)


@pytest.mark.parametrize(
    ("path", "status", "reason"),
    [
        ("objects/batch", 403, "Private repository storage limit reached, please upgrade your plan"),
        ("/commit/", 400, "Your push was rejected because it contains files larger than 10 MiB"),
    ],
)
def test_the_hubs_own_reason_is_told(
    hub: FakeHub, folder: Path, path: str, status: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without what a signed address ends with."""
    hub.add(REPO).writers.add(TOKEN)

    answer = hub.answer

    def refuse(call: Call) -> Reply:
        said = f"{reason}, see https://host/file?signature=abc"
        return json_reply(status, {"error": said}) if path in call.path else answer(call)

    monkeypatch.setattr(hub, "answer", refuse)
    with pytest.raises(StorageError, match=f"{reason}, see https://host/file(;|$)"):
        publish_folder(folder, URL, "export 1234")


def test_a_file_that_the_hub_ignores(hub: FakeHub, folder: Path) -> None:
    """It isn't left out of a commit without a word: there is none."""
    hub.add(REPO).writers.add(TOKEN)
    preupload = hub._preupload

    def ignore(*arguments: Any) -> Reply:
        said = json.loads(preupload(*arguments).body)
        return json_reply(200, {"files": [each | {"shouldIgnore": True} for each in said["files"]]})

    hub._routes = [
        (methods, pattern, ignore if function == preupload else function) for methods, pattern, function in hub._routes
    ]
    with pytest.raises(StorageError, match=r"leaves README\.md, .* out of commits, and so nothing is published"):
        publish_folder(folder, URL, "export 1234")
    assert commits(hub) == ["initial commit"]


def test_a_repository_that_someone_makes_at_the_same_time(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    """What is in it isn't replaced, though there was none before."""
    (theirs := tmp_path / "theirs").mkdir()
    (theirs / "config.json").write_text("{}")
    create = hub._create

    def late(*arguments: Any) -> Reply:
        hub.add(REPO).writers.add(TOKEN)
        hub.commit(REPO, theirs, title="Duplicate")
        repository = hub.repositories[REPO]
        repository.branches["main"] = dataclasses.replace(repository.head, parent=None)
        return create(*arguments)

    hub._routes = [
        (methods, pattern, late if function == create else function) for methods, pattern, function in hub._routes
    ]
    with pytest.raises(OthersError, match=r"holds what isn't of this release: config\.json"):
        publish_folder(folder, URL, "export 1234")
    assert hub.held(REPO) == {"config.json": b"{}"}


def test_a_new_branch_of_a_repository_that_was_renamed(hub: FakeHub, folder: Path) -> None:
    """Under the former name no other repository is made."""
    hub.add("me/new").writers.add(TOKEN)
    hub.renamed[REPO] = "me/new"
    publish_folder(folder, f"{URL}@other", "second")
    assert list(hub.repositories) == ["me/new"]
    assert hub.repositories["me/new"].branches["other"].title == "second"


def test_a_card_that_the_hub_refuses(hub: FakeHub, folder: Path) -> None:
    """Before the commit."""
    (folder / "README.md").write_text("---\nlicense: [\n---\n")
    with pytest.raises(StorageError, match=r"Invalid metadata in README.md"):
        publish_folder(folder, URL, "x")
    assert hub.held(REPO) == {}


@pytest.mark.parametrize(
    ("url", "target"),
    [(URL, HubAddress(REPO)), (f"{URL}@a/b", HubAddress(REPO, "a/b")), ("hf://o-1/n.2", HubAddress("o-1/n.2"))],
)
def test_addresses(url: str, target: HubAddress) -> None:
    assert HubAddress.parse(url) == target
    assert str(target) == url


@pytest.mark.parametrize(
    "url", ["hf://name", "hf://a/b/c", "hf://", "gs://a/b", "hf://a/b@", "hf://a/b@..", "hf://../b c"]
)
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(StorageError, match="should be hf://owner/name"):
        HubAddress.parse(url)
