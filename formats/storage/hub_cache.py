"""The hub's cache on this machine: what other tools have downloaded of its repositories. It is read, and never written.

Below `models--organisation--name`, `refs/REVISION` says a commit, and `snapshots/COMMIT` holds links to `blobs/ETAG`.
The ETag of a large file is its sha256, that of a small one git's hash of it (huggingface/huggingface_hub,
docs/source/en/guides/manage-cache.md, 2.4).
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from pathlib import Path

from huggingface_hub import constants

from weightbeam.formats.storage.local import SHA256, LocalFolder, blob_of
from weightbeam.formats.storage.store import File, StorageError

GIT = re.compile(r"[0-9a-f]{40}")
HASH = re.compile(f"{SHA256.pattern}|{GIT.pattern}")


def is_offline() -> bool:
    """Whether `HF_HUB_OFFLINE` says that the hub isn't to be asked."""
    said = os.environ.get("HF_HUB_OFFLINE")
    return constants.HF_HUB_OFFLINE if said is None else said.upper() in ("1", "ON", "YES", "TRUE")


def root() -> Path:
    """The folder of the cache: what `HF_HUB_CACHE` names, else `hub` in `HF_HOME`."""
    if named := os.environ.get("HF_HUB_CACHE"):
        return Path(os.path.expanduser(named))
    home = os.environ.get("HF_HOME")
    return Path(os.path.expanduser(home)) / "hub" if home else Path(constants.HF_HUB_CACHE)


def commit_of(repo: str, revision: str) -> str | None:
    """The commit that a branch or a tag was at when it was last downloaded; None where nothing says it."""
    try:
        said = (_folder(repo) / "refs" / revision).read_text(encoding="ascii", errors="replace").strip()
    except (OSError, ValueError):  # there is none, or can't be; or it is another user's
        return None
    return said if GIT.fullmatch(said) else None


def snapshot(repo: str, commit: str) -> LocalFolder | None:
    """The files of a repository at a commit, as far as they are there."""
    folder = _folder(repo) / "snapshots" / commit
    return LocalFolder(str(folder.absolute())) if os.path.isdir(folder) else None


def file_of(files: LocalFolder, name: str) -> File | None:
    """A file of a snapshot, under the version that the hub has for it, if that can be told, and with what tells the one
    that lies there from another.
    """
    found = files.stat(name)
    if found is None:
        return None
    version = blob_of(files.folder / name) or Path(files.url).name
    return dataclasses.replace(found, version=version, updated=0.0)


def read_whole(files: LocalFolder, name: str) -> bytes:
    """A whole file, compared with the hash that its blob is named by.

    Raises:
      StorageError: it has other bytes.
    """
    data = files.read(name)
    etag = blob_of(files.folder / name)
    if HASH.fullmatch(etag) and not has_hash(data, etag):
        raise StorageError(
            f"{files.path(name)}: isn't what the hub's cache holds it for (its blob is named {etag}); remove it, and get it anew"
        )
    return data


def has_hash(data: bytes, etag: str) -> bool:
    """Whether bytes have the hash that an ETag of the hub is, git's or a sha256; False where it is neither."""
    if GIT.fullmatch(etag):
        return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest() == etag
    return hashlib.sha256(data).hexdigest() == etag


def _folder(repo: str) -> Path:
    return root() / f"models--{repo.replace('/', '--')}"
