"""What the hub keeps: repositories, their commits, and the files of each."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import itertools
import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

# from the .gitattributes of a new repository
LFS_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".onnx", ".msgpack", ".model"}
DESCRIBED = 1000  # files that a description lists at most; the hub's own may have all of them, or not
LFS_SIZE = 10 << 20  # bytes; larger files are in LFS whatever they are called


class Blob:
    """The bytes of a file, as they were when it was committed: a file that is replaced afterwards stays as it was here."""

    def __init__(self, data: bytes | mmap.mmap, lfs: bool) -> None:
        self.data = data
        self.lfs = lfs

    @classmethod
    def of(cls, path: Path) -> Blob:
        size = path.stat().st_size
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        return cls(data, path.suffix in LFS_SUFFIXES or size > LFS_SIZE)

    @functools.cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def pointer(self) -> bytes:
        """What git has of a file in LFS."""
        return f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.data)}\n".encode()

    @functools.cached_property
    def oid(self) -> str:
        """Git's hash of what it has."""
        content = self.pointer if self.lfs else self.data
        return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()

    @property
    def etag(self) -> str:
        return f'"{self.sha256 if self.lfs else self.oid}"'


@dataclasses.dataclass(frozen=True)
class Commit:
    """A revision: `files` by their paths."""

    sha: str
    title: str
    date: datetime.datetime
    files: Mapping[str, Blob]
    parent: Commit | None = None

    def history(self) -> list[Commit]:
        """This commit and those before it."""
        return [self, *(self.parent.history() if self.parent else [])]


@dataclasses.dataclass
class Repository:
    """A model on the hub.

    Attributes:
      name: `organisation/name`.
      gated: whether, and how, access is given.
      readers: the tokens that may read it if it is gated or private.
      writers: the tokens that may commit.
      pulls: pull requests, the commit of each; and their `statuses`, where one isn't open, `authors`, where it isn't
        he whose token it is, and `titles`, where it isn't its last commit's.
      branches, tags: the commit of each.
    """

    name: str
    created: datetime.datetime
    gated: Literal[False, "auto", "manual"] = False
    private: bool = False
    card: dict[str, Any] = dataclasses.field(default_factory=dict)
    labels: tuple[str, ...] = ()
    readers: set[str] = dataclasses.field(default_factory=set)
    writers: set[str] = dataclasses.field(default_factory=set)
    pulls: list[Commit] = dataclasses.field(default_factory=list)
    statuses: dict[int, str] = dataclasses.field(default_factory=dict)
    authors: dict[int, str] = dataclasses.field(default_factory=dict)
    titles: dict[int, str] = dataclasses.field(default_factory=dict)
    branches: dict[str, Commit] = dataclasses.field(default_factory=dict)
    tags: dict[str, Commit] = dataclasses.field(default_factory=dict)
    commits: dict[str, Commit] = dataclasses.field(default_factory=dict)

    @property
    def head(self) -> Commit:
        return self.branches["main"]

    @property
    def last_modified(self) -> datetime.datetime:
        return max(commit.date for commit in self.commits.values())

    def commit(self, files: Mapping[str, Blob | None], branch: str, title: str, date: datetime.datetime) -> Commit:
        """Adds files to a branch, or takes away those that are None; a new branch begins at `main`."""
        made = self.prepare(files, branch, title, date)
        self.branches[branch] = made
        return made

    def prepare(
        self,
        files: Mapping[str, Blob | None],
        branch: str,
        title: str,
        date: datetime.datetime,
        parent: Commit | None = None,
    ) -> Commit:
        """The commit that would be on a branch, or follow a parent; the branch stays."""
        parent = parent or self.branches.get(branch) or self.branches.get("main")
        tree = {**(parent.files if parent else {}), **files}
        kept = {path: blob for path, blob in sorted(tree.items()) if blob is not None}
        content = json.dumps([self.name, len(self.commits), title, {path: blob.oid for path, blob in kept.items()}])
        made = Commit(hashlib.sha1(content.encode(), usedforsecurity=False).hexdigest(), title, date, kept, parent)
        self.commits[made.sha] = made
        return made

    def find(self, revision: str) -> Commit | None:
        """The commit of a branch, a tag, a pull request, or a hash, which may be short."""
        if (number := revision.removeprefix("refs/pr/")).isdecimal() and 0 < int(number) <= len(self.pulls):
            return self.pulls[int(number) - 1]
        named = self.branches.get(revision.removeprefix("refs/heads/")) or self.tags.get(
            revision.removeprefix("refs/tags/")
        )
        if named or len(revision) < 7:
            return named
        return next((commit for sha, commit in self.commits.items() if sha.startswith(revision)), None)

    def info(self, commit: Commit, blobs: bool = False) -> dict[str, Any]:
        """As `/api/models/…` describes it."""
        return dict(
            _id=hashlib.sha1(self.name.encode(), usedforsecurity=False).hexdigest()[:24], id=self.name, modelId=self.name,
            author=self.name.partition("/")[0], sha=commit.sha, createdAt=isotime(self.created), lastModified=isotime(self.last_modified),
            private=self.private, gated=self.gated, disabled=False, downloads=0, likes=0, trendingScore=0, library_name="transformers",
            pipeline_tag="text-generation", tags=self.all_tags, cardData=self.card, config=_config(commit), spaces=[],
            siblings=[_sibling(path, blob, blobs) for path, blob in itertools.islice(commit.files.items(), DESCRIBED)],
            usedStorage=sum(len(blob.data) for blob in commit.files.values()),
        )  # fmt: skip

    @property
    def all_tags(self) -> list[str]:
        """The labels, and what the hub makes of the card."""
        return [*self.labels, *([f"license:{self.card['license']}"] if "license" in self.card else [])]


def isotime(when: datetime.datetime) -> str:
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _sibling(path: str, blob: Blob, blobs: bool) -> dict[str, Any]:
    described: dict[str, Any] = {"rfilename": path}
    if blobs:
        described |= {"blobId": blob.oid, "size": len(blob.data)}
        if blob.lfs:
            described["lfs"] = {"sha256": blob.sha256, "size": len(blob.data), "pointerSize": len(blob.pointer)}
    return described


def _config(commit: Commit) -> dict[str, Any]:
    """What the hub shows of `config.json`."""
    blob = commit.files.get("config.json")
    config = json.loads(bytes(blob.data)) if blob else {}
    return {key: config[key] for key in ("architectures", "model_type", "quantization_config") if key in config}


def entry(path: str, found: Blob | list[Blob], commit: Commit, expand: bool) -> dict[str, Any]:
    """A file, or a folder with what is below it, as a tree lists them."""
    if isinstance(found, list):
        described: dict[str, Any] = dict(
            type="directory", oid=hashlib.sha1(path.encode(), usedforsecurity=False).hexdigest(), size=0, path=path
        )
    else:
        described = dict(type="file", oid=found.oid, size=len(found.data), path=path)
        if found.lfs:
            described["lfs"] = {"oid": found.sha256, "size": len(found.data), "pointerSize": len(found.pointer)}
    if expand:
        described["lastCommit"] = dict(id=commit.sha, title=commit.title, date=isotime(commit.date))
    return described


def tree(commit: Commit, below: str, recursive: bool, expand: bool) -> list[dict[str, Any]] | None:
    """What lies below a folder; None if there is no such folder."""
    prefix = f"{below}/" if below else ""
    found: dict[str, Blob | list[Blob]] = {}
    for path, blob in commit.files.items():
        if not path.startswith(prefix):
            continue
        parts = path[len(prefix) :].split("/")
        folders = [prefix + "/".join(parts[:depth]) for depth in range(1, len(parts))]
        for folder in folders if recursive else folders[:1]:
            below_it = found.setdefault(folder, [])
            assert isinstance(below_it, list)
            below_it.append(blob)
        if recursive or len(parts) == 1:
            found[path] = blob
    if below and not found:
        return None
    return [entry(path, one, commit, expand) for path, one in sorted(found.items())]
