"""A finished local folder as one commit on the hub: all of it is seen, or nothing.

The large files are uploaded first, where no revision refers to them; then one commit names them, together with the
small ones. A commit names its parent: if someone else committed meanwhile, the hub refuses it. Requests are
huggingface_hub's, with its retries, Xet where it has that; the commit itself is repeated here, since only here it is
known whether an answer that was lost said yes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from weightbeam.formats.storage import StorageError
from weightbeam.formats.storage.hub import api, retried
from weightbeam.formats.storage.token import token

CARD = "README.md"
STALE = re.compile(
    r"[^/]*\.safetensors|[^/]*\.safetensors\.index\.json|(pytorch_)?model[^/]*\.bin|pytorch_model\.bin\.index\.json"
)
PRECONDITION_FAILED = 412  # the parent isn't the head any more


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Where to publish.

    Attributes:
      repo: `owner/name`.
      branch: of the repository.
    """

    repo: str
    branch: str = "main"

    @classmethod
    def parse(cls, url: str) -> Target:
        """Reads `hf://owner/name`, `@` a branch.

        Raises:
          StorageError: it names no repository.
        """
        if not (match := re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", url)):
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
      kept: files of the folder that the repository has already and keeps.
    """

    url: str
    page: str
    removed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def check_target(url: str) -> Target:
    """Makes sure, before any work, that there is a token which the hub knows, and that it may write somewhere. What a
    fine-grained token may, and whose repositories, only a commit tells.

    Raises:
      StorageError: there is none, it may only read, or the name isn't one of a repository.
    """
    target = Target.parse(url)
    if token() is None:
        raise StorageError(f"{target}: HF_TOKEN isn't set; publishing needs a token that may write there")
    with told(target):
        about = retried(api().whoami)()
    if ((about.get("auth") or {}).get("accessToken") or {}).get("role") == "read":
        raise StorageError(f"{target}: the token that is set may only read; publishing needs one of the role `write`")
    return target


def publish_folder(
    folder: Path, url: str, message: str, *, create_pr: bool = False, private: bool = True, replace_card: bool = False
) -> Published:
    """Publishes a folder's files as one commit, in a repository that is made if there is none.

    Weights that the repository has and the folder hasn't are taken away, since loaders would read them too; a model
    card that is there already is kept. Other files stay.

    Args:
      folder: with nothing in it but what should be published.
      url: `hf://owner/name[@branch]`.
      message: the commit's first line. It should name this very result: by it a commit whose answer was lost is known
        again.
      create_pr: open a pull request; the branch itself doesn't change.
      private: whether a repository that is made is private.
      replace_card: whether the folder's model card takes the place of the repository's.

    Raises:
      StorageError: the hub can't be reached, or doesn't let us, or someone else committed meanwhile.
    """
    target, hub = Target.parse(url), api()
    with told(target), _without_bars():
        retried(hub.create_repo)(target.repo, private=private, exist_ok=True)
        if target.branch != "main":
            retried(hub.create_branch)(target.repo, branch=target.branch, exist_ok=True)
        there = retried(hub.model_info)(target.repo, revision=target.branch)
        names = {file.rfilename for file in there.siblings or []}
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        kept = tuple(name for name in files if name == CARD and name in names and not replace_card)
        additions = [CommitOperationAdd(name, folder / name) for name in files if name not in kept]
        removed = tuple(sorted(name for name in names - set(files) if STALE.fullmatch(name)))
        retried(hub.preupload_lfs_files)(target.repo, additions, revision=target.branch, create_pr=create_pr)
        operations = [*additions, *(CommitOperationDelete(name) for name in removed)]
        commit, page = _commit(hub, target, operations, message, there.sha, create_pr)
    return Published(f"hf://{target.repo}@{commit}", page, removed, kept)


def _commit(
    hub: HfApi,
    target: Target,
    operations: list[CommitOperationAdd | CommitOperationDelete],
    message: str,
    parent: str | None,
    create_pr: bool,
) -> tuple[str, str]:
    """Commits, again where that may help; returns the commit and its page.

    An attempt that is refused since its parent isn't the head may have been overtaken by our own, whose answer was
    lost.
    """
    try:
        create = hub.create_commit if create_pr else retried(hub.create_commit)  # a pull request would be opened twice
        made = create(
            target.repo,
            operations,
            commit_message=message,
            revision=target.branch,
            parent_commit=parent,
            create_pr=create_pr,
        )
        return made.oid, made.pr_url or made.commit_url
    except HfHubHTTPError as e:
        if e.response is None or e.response.status_code != PRECONDITION_FAILED:
            raise
    newest, *before = retried(hub.list_repo_commits)(target.repo, revision=target.branch)
    if newest.title != message or (before and before[0].commit_id != parent):
        raise StorageError(
            f"{target}: someone else committed there meanwhile; publish again, what is uploaded isn't sent twice"
        )
    return newest.commit_id, f"{hub.endpoint}/{target.repo}/commit/{newest.commit_id}"


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


@contextlib.contextmanager
def told(target: Target) -> Iterator[None]:
    """Context manager: the hub's errors become ours, with what to do. They aren't chained: they may show signed
    addresses.
    """
    try:
        yield
    except HfHubHTTPError as e:
        status = e.response.status_code if e.response is not None else 0
        if status == 401 and token() is not None:
            message = "the hub doesn't accept the token that is set; is it wrong, or has it expired?"
        elif status == 401:
            message = "HF_TOKEN isn't set; publishing needs a token that may write there"
        elif status == 403 or isinstance(e, RepositoryNotFoundError):
            message = f"the token that is set may not write there; it needs the role `write`, and its owner access to {target.repo.split('/')[0]}"
        else:
            message = f"the hub answered {status} {e.response.reason_phrase if e.response is not None else ''}".rstrip()
        raise StorageError(f"{target}: {message}") from None
    except HFValidationError as e:
        raise StorageError(f"{target}: {e}") from None
    except ValueError as e:  # the hub's, of a model card's metadata or of a file
        raise StorageError(f"{target}: {str(e).splitlines()[0] if str(e) else 'refused'}") from None
    except (httpx2.HTTPError, RuntimeError) as e:  # RuntimeError: of an upload
        raise StorageError(
            f"{target}: the hub, or the host of its files, can't be reached: {type(e).__name__}"
        ) from None
