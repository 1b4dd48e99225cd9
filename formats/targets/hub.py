"""A release on the hub as one commit: all of it is seen, or nothing.

What is published is a list of files that is fixed before, the weights among them. What the repository holds of another
model is replaced by the same commit, and only where that is asked for. The large files are uploaded first, where no
revision refers to them; then one commit names them, together with the small ones. A commit names its parent, the one
that was looked at: if someone else committed meanwhile, the hub refuses it. Its title names the result, so that one
whose answer was lost is known again, and so is a pull request. Requests are huggingface_hub's, with its retries, Xet
where it has that; the commit itself is repeated here, since only here it is known whether an answer that was lost said
yes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, Discussion, GitCommitInfo, ModelInfo
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from weightbeam.formats.release.card import WRITTEN
from weightbeam.formats.release.files import CARD, role_of
from weightbeam.formats.storage import StorageError, open_store
from weightbeam.formats.storage.hub import DOTS, api, describe, hub_errors, name_now, retried, told_endpoint
from weightbeam.formats.storage.hub_cache import has_hash
from weightbeam.formats.storage.stoppable import StoppablePool
from weightbeam.formats.storage.token import token
from weightbeam.formats.storage.uninterrupted import uninterrupted
from weightbeam.formats.targets.published import WEIGHTS, record_of
from weightbeam.formats.text.printable import without_user

LOG = logging.getLogger("weightbeam")
# what Weightbeam says of another model
OURS = re.compile(r"(weightbeam|run|changes)\.json|changes\.png|maxtext\.yml")
MERGED = re.compile(r" \(#(\d+)\)\Z")  # ends the title of the commit that a pull request was merged as
IGNORED = "# nothing\n"  # in place of the repository's own .gitignore, which would leave files out of a commit
PRECONDITION_FAILED = 412  # the parent isn't the head any more

# by their names in the repository: the small files themselves, and where the large ones lie; None: not made yet
Files = Mapping[str, bytes | Path | None]


class OthersError(StorageError):
    """Something would be replaced that others have put there."""


@dataclasses.dataclass(frozen=True, slots=True)
class HubAddress:
    """Where to publish.

    Attributes:
      repo: `owner/name`.
      branch: of the repository.
    """

    repo: str
    branch: str = "main"

    @classmethod
    def parse(cls, url: str) -> HubAddress:
        """Reads `hf://owner/name`, `@` a branch.

        Raises:
          StorageError: it names no repository.
        """
        if not (match := re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", url)) or DOTS.search(match[2] or ""):
            raise StorageError(f"{url}: should be hf://owner/name, with @branch for another than main")
        return cls(match[1], match[2] or "main")

    def __str__(self) -> str:
        return f"hf://{self.repo}" + ("" if self.branch == "main" else f"@{self.branch}")


@dataclasses.dataclass(frozen=True, slots=True)
class Published:
    """What was published.

    Attributes:
      url: `hf://owner/name@commit`.
      page: to look at: the commit's, or the pull request's.
      removed: files of the repository that the commit took away.
      replaced: files of the repository that have another content now.
      kept: files of the release that the repository has already and keeps.
    """

    url: str
    page: str
    removed: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Head:
    """A branch as it was looked at.

    Attributes:
      commit: its last.
      files: the hash of each file, by name.
      published: the commit that published this very result, where one did.
      before: the hashes of the files in that one, or in the last that published an earlier one.
    """

    commit: str
    files: Mapping[str, str]
    published: str | None
    before: Mapping[str, str]

    def changed(self, names: Iterable[str]) -> list[str]:
        """Those of its files that aren't as one of ours published them, or whose hash is unknown."""
        return [name for name in sorted(names) if not self.files[name] or self.files[name] != self.before.get(name)]


def check_address(url: str) -> HubAddress:
    """Makes sure that a URL names a repository, and that there is a token; asks the hub nothing.

    Raises:
      StorageError: it doesn't, or there is none.
    """
    target = HubAddress.parse(url)
    if token() is None:
        raise StorageError(f"{target}: HF_TOKEN isn't set; publishing needs a token that may write there")
    return target


def check_target(url: str) -> None:
    """Makes sure, before any work, that there is a token which the hub knows, and that it may write somewhere. What a
    fine-grained token may, and whose repositories, only a commit tells.

    Raises:
      StorageError: there is none, it may only read, or the name isn't one of a repository.
    """
    target = check_address(url)
    with hub_errors(target, target.repo, writing=True):
        about = retried(api().whoami)()
        role = ((about.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise StorageError(f"{target}: the token that is set may only read; publishing needs one of the role `write`")


def find_published(
    url: str, title: str, files: Files, *, overwrite: bool = False, create_pr: bool = False
) -> Published | None:
    """Looks, before any work, whether a result is published already; see `publish`.

    Raises:
      StorageError: there is something that would be replaced, or the hub can't be asked.
    """
    branch = _Branch(HubAddress.parse(url), title)
    with branch.errors():
        if (found := branch.find()) is None:
            return None
        head = branch.read_head(found)
        made = branch.published_before(head, files, create_pr)
        if made is None and not (overwrite or create_pr):
            ways = "or have that replaced (--overwrite), or a pull request opened (--create_pr)"
            _refuse_others(branch.target, head, _changed(head, files), f"; choose another repository or branch, {ways}")
        return made


def check_free(url: str) -> None:
    """Makes sure that a branch holds nothing that would be read together with a model.

    Raises:
      StorageError: it does, or the hub can't be asked.
    """
    branch = _Branch(HubAddress.parse(url))
    with branch.errors():
        if (found := branch.find()) is not None:
            head = branch.read_head(found)
            _refuse_others(branch.target, head, _changed(head, {}), "; choose another repository or branch")


def changed_since(url: str, title: str, earlier: re.Pattern[str]) -> list[str]:
    """The files that would be lost with a branch, and that its commits of this title, or an `earlier` one, haven't made:
    what others have committed there, and isn't in the history of `main`; all of the branch where it has no commit of
    that title.

    Raises:
      StorageError: the hub can't be asked.
    """
    branch = _Branch(HubAddress.parse(url), title)
    with branch.errors():
        if (found := branch.find()) is None:
            return []
        there, in_main = _hashes(found), {each.commit_id for each in branch.history("main")}
        history = branch.history(found.sha)
        own = [each for each in history if each.commit_id not in in_main]
        if not any(_is_titled(each.title, title) for each in own):
            return sorted(there)
        others: set[str] = set()
        for each, parent in itertools.zip_longest(own, history[1 : len(own) + 1]):
            if not (_is_titled(each.title, title) or earlier.fullmatch(each.title)):
                made, before = (branch.tree(commit.commit_id) if commit else {} for commit in (each, parent))
                others |= {name for name, _ in (made.items() - before.items()) & there.items()}
    return sorted(others)


def publish(
    url: str,
    title: str,
    files: Files,
    *,
    overwrite: bool = False,
    create_pr: bool = False,
    replace_card: bool = False,
    earlier: re.Pattern[str] | None = None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> Published | None:
    """Publishes files as one commit, in a repository that is made if there is none. Nothing happens where that was done
    before, by whomever.

    A model card that others wrote or edited is kept, and so are files that no loader looks for.

    Args:
      url: `hf://owner/name[@branch]`.
      title: the commit's first line. It must name this very result: by it a commit is known again.
      files: all of the release; those that are paths are its weights.
      overwrite: what the branch has of another model is replaced: weights, and all that would be read together with
        them.
      create_pr: open a pull request; the branch itself doesn't change.
      replace_card: whether the release's model card takes the place of one that is as Weightbeam wrote it.
      earlier: the titles of results which this one succeeds: what the last commit of them published is replaced, too.
      is_wanted: is asked right before the commit, when its parent is fixed.

    Returns:
      What was published; None where it isn't wanted any more.

    Raises:
      OthersError: there is something that would be replaced.
      StorageError: the list has no weights, or one of its files is gone; the hub can't be reached, or doesn't let us; or
        someone else committed meanwhile.
    """
    branch = _Branch(target := HubAddress.parse(url), title)
    if not any(isinstance(data, Path) for data in files.values()):
        raise StorageError(f"{target}: there are no weights in what should be published, and so nothing is")
    with branch.errors(), _without_bars():
        found, start = branch.find(), None
        if found is None:
            found, start = branch.create()
        head = branch.read_head(found, earlier)
        if made := branch.published_before(head, files, create_pr):
            return made
        # the large files are hashed here
        adds = {name: CommitOperationAdd(name, data) for name, data in files.items() if data is not None}
        hashes = {name: add.upload_info.sha256.hex() for name, add in adds.items()}
        is_new = head.commit == start
        has_card = CARD in head.files and CARD in files
        replaces_card = (replace_card or is_new) and has_card and _is_card_ours(f"hf://{branch.repo}@{head.commit}")
        removed, replaced, kept = _changes(head, files, hashes, replaces_card)
        if not (
            removed or replaced or files.keys() - head.files.keys()
        ):  # the client would name whatever is last by then
            return Published(*branch.commit_at(head.commit), kept=kept)
        if not (overwrite or create_pr or is_new):
            _refuse_others(target, head, removed + replaced)
        additions = [add for name, add in adds.items() if name not in kept]
        send = functools.partial(
            retried(branch.hub.preupload_lfs_files), target.repo, additions, revision=target.branch
        )
        with StoppablePool(1) as pool:
            pool.submit(send, create_pr=create_pr, gitignore_content=IGNORED).result()
        if ignored := [add.path_in_repo for add in additions if add._should_ignore]:
            raise StorageError(
                f"{target}: the hub leaves {', '.join(ignored)} out of commits, and so nothing is published"
            )
        if not is_wanted():
            return None
        operations = [*additions, *(CommitOperationDelete(name) for name in removed)]
        if any(_is_left_out(add, head) for add in additions):
            url, page = branch.committed_since(head.commit)
        else:
            url, page = (branch.propose if create_pr else branch.commit)(operations, head.commit)
    return Published(url, page, removed, replaced, kept)


# --- the branch -------------------------------------------------------------------------------------------------------

Operations = list[CommitOperationAdd | CommitOperationDelete]


class _Branch:
    """A branch of a repository, where a result is published, or was.

    Args:
      target: which.
      title: of the commit, or of the pull request; empty where no result is meant.
    """

    def __init__(self, target: HubAddress, title: str = ""):
        self.target, self.repo, self.title, self.hub = target, target.repo, title, api()

    def errors(self) -> contextlib.AbstractContextManager[None]:
        """Context manager: the hub's errors are told as those of the branch."""
        return hub_errors(self.target, self.repo, writing=True)

    def find(self) -> ModelInfo | None:
        """The branch, if there is one."""
        with contextlib.suppress(RepositoryNotFoundError, RevisionNotFoundError):
            return describe(self.hub, self.repo, self.target.branch)
        return None

    def create(self) -> tuple[ModelInfo, str | None]:
        """Makes the repository and the branch, which begins where `main` did: before any model, as a rule, so that a command
        that is stopped here leaves nothing which the next one would have to replace. Returns the branch, and the commit
        at which another than `main` began.
        """
        repo, start = name_now(self.repo), None  # under a former name another one would be made
        retried(self.hub.create_repo)(repo, private=True, exist_ok=True)
        if self.target.branch != "main":
            start = self.history("main")[-1].commit_id
            retried(self.hub.create_branch)(repo, branch=self.target.branch, revision=start, exist_ok=True)
        return describe(self.hub, self.repo, self.target.branch), start

    def history(self, revision: str | None) -> list[GitCommitInfo]:
        """The commits of a revision, the last one first."""
        return retried(self.hub.list_repo_commits)(self.repo, revision=revision)

    def read_head(self, found: ModelInfo, earlier: re.Pattern[str] | None = None) -> _Head:
        """A branch's last commit, and what came before it; no commit is ours without a title."""
        history = self.history(found.sha)
        made = next((each for each in history if self.title and _is_titled(each.title, self.title)), None)
        ours = made or next((each for each in history if earlier and earlier.fullmatch(each.title)), None)
        before = self.tree(self._as_proposed(ours)) if ours else {}
        return _Head(found.sha or "", _hashes(found), made and made.commit_id, before)

    def _as_proposed(self, commit: GitCommitInfo) -> str:
        """Our own commit, where this one is what a pull request was merged as: others may have committed to that, too."""
        if number := MERGED.search(commit.title):
            title = commit.title[: number.start()]
            proposed = self._history_of_pull(number[1])
            return next((each.commit_id for each in proposed if each.title == title), commit.commit_id)
        return commit.commit_id

    def _history_of_pull(self, number: int | str) -> list[GitCommitInfo]:
        """The commits of a pull request, the last one first; none where the hub doesn't show it, as of a copy."""
        try:
            return self.history(f"refs/pr/{number}")
        except HfHubHTTPError as e:
            if e.response is None or e.response.status_code not in (403, 404):
                raise
        return []

    def tree(self, commit: str) -> dict[str, str]:
        """The hash of each file at a commit."""
        return _hashes(describe(self.hub, self.repo, commit))

    def published_before(self, head: _Head, files: Files, create_pr: bool) -> Published | None:
        """What published this very result, if something did and it is all there; else an open pull request of it: the first,
        while those are closed that a hub opened long after it gave no answer.
        """
        is_there = all(
            name in head.files and head.files[name] == head.before.get(name) for name in files.keys() - {CARD}
        )
        if head.published == head.commit and is_there:
            return Published(*self.commit_at(head.commit))
        if not (create_pr and (first := retried(self._only_pull)())):
            return None
        made = Published(*self._pull_at(first))
        if any(each.title != self.title for each in self._history_of_pull(first.num)[:1]):
            LOG.warning(
                "%s: others have committed to this pull request since; verify finds what they changed", made.page
            )
        return made

    def commit_at(self, commit: str) -> tuple[str, str]:
        """A commit's address, and its page."""
        return f"hf://{self.repo}@{commit}", f"{told_endpoint()}/{self.repo}/commit/{commit}"

    def _pull_at(self, pull: Discussion) -> tuple[str, str]:
        """A pull request's address, and its page."""
        return f"hf://{self.repo}@{pull.git_reference or f'refs/pr/{pull.num}'}", without_user(pull.url)

    def _only_pull(self) -> Discussion | None:
        """The first of the pull requests of `_pulls`, if there is one; the others are closed."""
        found = self._pulls()
        for late in found[1:]:
            self.hub.change_discussion_status(self.repo, late.num, "closed")
        return found[0] if found else None

    def _pulls(self) -> list[Discussion]:
        """The pull requests of that title that are open and of him whose token it is, the first one first: anyone may open one,
        of any title. What became of one that was merged, the branch says.
        """

        def listed() -> list[Discussion]:
            return list(self.hub.get_repo_discussions(self.repo, discussion_type="pull_request"))

        found = [each for each in retried(listed)() if each.title == self.title and each.status in ("open", "draft")]
        author = retried(self.hub.whoami)()["name"] if found else ""
        return sorted((each for each in found if each.author == author), key=lambda each: each.num)

    def _send(self, operations: Operations, parent: str, create_pr: bool) -> CommitInfo:
        return self.hub.create_commit(
            self.repo, operations, commit_message=self.title, revision=self.target.branch, parent_commit=parent, create_pr=create_pr
        )  # fmt: skip

    def commit(self, operations: Operations, parent: str) -> tuple[str, str]:
        """Commits, again where that may help; returns the commit's address and its page.

        An attempt that is refused since its parent isn't the head may have been overtaken by our own, whose answer was
        lost.
        """

        def commit() -> tuple[str, str]:
            made = self._send(operations, parent, create_pr=False)
            return f"hf://{self.repo}@{made.oid}", without_user(made.commit_url)

        try:
            return retried(self._waited_for)(commit)
        except HfHubHTTPError as e:
            if e.response is None or e.response.status_code != PRECONDITION_FAILED:
                raise
        return self.committed_since(parent)

    def committed_since(self, parent: str) -> tuple[str, str]:
        """The address and page of the commit of this very result that was made since `parent`.

        Raises:
          StorageError: the branch has moved otherwise.
        """
        history = self.history(self.target.branch)
        commits = [each.commit_id for each in history]
        since = history[: commits.index(parent)] if parent in commits else []
        for each in since:
            if each.title == self.title:
                return self.commit_at(each.commit_id)
        raise StorageError(
            f"{self.target}: someone else committed there meanwhile; publish again, what is uploaded isn't sent twice"
        )

    def propose(self, operations: Operations, parent: str) -> tuple[str, str]:
        """Opens a pull request, again where that may help, and only where none is open; returns the address and page. Where
        another machine opened one at the same time, the first stays.
        """

        def open_one() -> tuple[str, str]:
            made = self._send(operations, parent, create_pr=True)
            first = next(iter(self._pulls()), None)
            if first and made.pr_num and first.num < made.pr_num:
                self.hub.change_discussion_status(self.repo, made.pr_num, "closed")
                return self._pull_at(first)
            return f"hf://{self.repo}@{made.oid}", without_user(made.pr_url or made.commit_url)

        def propose() -> tuple[str, str]:
            first = self._only_pull()
            return self._pull_at(first) if first else self._waited_for(open_one)

        return retried(propose)()

    def _waited_for(self, request: Callable[[], tuple[str, str]]) -> tuple[str, str]:
        """What publishes, and returns the address and page, isn't stopped halfway."""
        return uninterrupted(
            request,
            lambda made: f"but {made[0]} is published: {made[1]}",
            f"{self.target} was being published; look at {told_endpoint()}/{self.repo} whether it is",
        )


# --- what is there ----------------------------------------------------------------------------------------------------


def _is_titled(found: str, title: str) -> bool:
    """Whether a commit has this title; that of a pull request which was merged ends with its number."""
    return MERGED.sub("", found) == title or found == title


def _hashes(found: ModelInfo) -> dict[str, str]:
    """The hash of each file: its own, or git's; empty where the hub doesn't say it."""
    return {file.rfilename: (file.lfs.sha256 if file.lfs else file.blob_id) or "" for file in found.siblings or []}


def _changes(
    head: _Head, files: Files, hashes: Mapping[str, str], replace_card: bool
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """What a commit of these files takes away, replaces and keeps; `hashes` are those of the files, where they are
    known.
    """

    def is_same(name: str, there: str) -> bool:
        data = files[name]
        return there == hashes.get(name) or (isinstance(data, bytes) and has_hash(data, there))

    kept = tuple(name for name in files if name == CARD and name in head.files and not replace_card)
    removed = [name for name in head.files.keys() - files.keys() if _is_stale(name)]
    replaced = [
        name for name in files if name in head.files and name not in kept and not is_same(name, head.files[name])
    ]
    return tuple(sorted(removed)), tuple(sorted(replaced)), kept


def _is_card_ours(release: str) -> bool:
    """Whether a release's card is as it was written, by the record beside it; not where that can't be told."""
    there = open_store(release)
    card, record = there.read(CARD), record_of(there)
    files = record.get("files")
    if isinstance(files, dict) and CARD in files:
        return hashlib.sha256(card).hexdigest() == files[CARD]
    return bool(record) and WRITTEN.search(card.decode(errors="replace")) is not None  # of an earlier version


def _changed(head: _Head, files: Files) -> tuple[str, ...]:
    """The files that a commit of these would take away or replace, as far as the names tell: hashes aren't known yet."""
    removed, replaced, _ = _changes(head, files, {}, False)
    return removed + replaced


def _is_stale(name: str) -> bool:
    """Whether a file that isn't ours would be read together with our weights."""
    return name != CARD and any((OURS.fullmatch(name), WEIGHTS.fullmatch(name), role_of(name)))


def _refuse_others(target: HubAddress, head: _Head, changed: Iterable[str], ways: str = "") -> None:
    """Raises OthersError, with the ways out that there are, where something would go that this result hasn't published
    before, or whose hash is unknown.
    """
    if others := head.changed(changed):
        raise OthersError(f"{target}: holds what isn't of this release: {', '.join(others)}{ways}")


def _is_left_out(addition: CommitOperationAdd, head: _Head) -> bool:
    """Whether the client would leave a file out of a commit, since the branch had it when the file was announced, though
    the commit's parent hasn't got it: someone else committed in between, and the branch may have been set back since
    (huggingface_hub, `create_commit` of src/huggingface_hub/hf_api.py, 2.4.0).
    """
    there = addition._remote_oid
    return (
        there is not None and there == addition._local_oid and head.files.get(addition.path_in_repo) not in ("", there)
    )


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Context manager: huggingface_hub shows no bars of its own."""
    were_off = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not were_off:
            enable_progress_bars()
