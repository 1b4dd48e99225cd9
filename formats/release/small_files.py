"""The small files of a release: all but its weights. They are carried as opaque bytes, pickles never, and nothing is run."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from weightbeam.formats.release.files import ROLES, TEMPLATES, hash_each, role_of
from weightbeam.formats.safetensors import INDEX, HfCheckpoint
from weightbeam.formats.storage import File, LocalFolder, StorageError, Store, is_hub, open_store, read_whole, reason
from weightbeam.formats.storage.identity import Seen, check_together
from weightbeam.formats.text import json_text
from weightbeam.formats.text.printable import printable

LOG = logging.getLogger("weightbeam")
MAX_FILE_BYTES = 64 << 20  # Gemma 3's tokenizer.json, the largest known, has 33 MB
MAX_BYTES = 256 << 20  # of all together
MAX_FILES = 250
# what sentence-transformers takes an embedding model's layers behind the transformer from, and isn't carried
EMBEDDERS = re.compile(r"modules\.json|config_sentence_transformers\.json|sentence_\w+_config\.json|\d+_[A-Z]\w*/.+")


class SmallFiles(Mapping[str, bytes]):
    """The small files of a release by name, in the order of `ROLES`; each is read when it is asked for.

    Attributes:
      sizes: in bytes.
      left: those left out, with the reason: too large, too many, or links that lead elsewhere or nowhere.
      linked: those that are links out of the folder, and allowed.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        read: Callable[[str], bytes],
        refused: Mapping[str, str] | None = None,
        versions: Mapping[str, str] | None = None,
    ):
        """`versions` tell contents, where the store says them: others are told by their hash."""
        self._versions = dict(versions or {})
        self.sizes: dict[str, int] = {}
        self.left = dict(refused or {})
        self.linked: Sequence[str] = ()
        self._read = read
        held = 0
        for name in sorted(
            sizes.keys() - self.left.keys(), key=lambda name: (list(ROLES).index(role_of(name) or ""), name)
        ):
            if sizes[name] > MAX_FILE_BYTES:
                self.left[name] = (
                    f"has {sizes[name]:,} bytes; a file of a release besides its weights has at most {MAX_FILE_BYTES:,}"
                )
            elif held + sizes[name] > MAX_BYTES or len(self.sizes) == MAX_FILES:
                self.left[name] = (
                    f"the release has more than {MAX_FILES} such files, or more than {MAX_BYTES:,} bytes of them"
                )
            else:
                self.sizes[name] = sizes[name]
                held += sizes[name]

    def __getitem__(self, name: str) -> bytes:
        """The bytes of a file.

        Raises:
          KeyError: it isn't one of these.
          StorageError: it changed since it was listed or hashed, or can't be read.
        """
        if name not in self.sizes:
            raise KeyError(name)
        data, hashes = self._read(name), self.__dict__.get("hashes", {})
        if len(data) != self.sizes[name]:
            raise StorageError(
                f"{name} had {self.sizes[name]:,} bytes when it was listed, and has others now; was it changed?"
            )
        if name in hashes and name not in self._versions and hash_each({name: data})[name] != hashes[name]:
            raise StorageError(f"{name} has as many bytes as when it was hashed, and others; was it changed?")
        return data

    def replaced(self, others: Mapping[str, bytes]) -> SmallFiles:
        """The same files, some with another content."""
        sizes = {name: len(others[name]) if name in others else size for name, size in self.sizes.items()}
        versions = {name: version for name, version in self._versions.items() if name not in others}
        made = SmallFiles(sizes, functools.partial(_read_first, [others, self]), None, versions)
        made.left |= self.left
        made.linked = self.linked
        return made

    @functools.cached_property
    def hashes(self) -> dict[str, str]:
        """What tells the content of each; nothing is read whose version tells it.

        Raises:
          StorageError: one can't be read.
        """
        return {name: self._versions.get(name) or hash_each({name: self[name]})[name] for name in self}

    def __iter__(self) -> Iterator[str]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)


def _read_first(places: Sequence[Mapping[str, bytes]], name: str) -> bytes:
    return next(place for place in places if name in place)[name]


def small_files(store: Store, allow_links: bool = False, known: Iterable[Seen] = ()) -> SmallFiles:
    """The small files of the release in a folder, a bucket or a repository, all of one state of it; links that lead
    elsewhere are left out unless they are allowed.

    Args:
      known: files of it that were read before, as they were then.

    Raises:
      StorageError: it can't be listed or read, or was changed meanwhile.
    """
    files: dict[str, File] = {}
    refused: dict[str, str] = {}
    linked: list[str] = []
    check_together(store, known, listed := _listed(store))
    for file in listed:
        if role_of(file.name):
            files[file.name] = file
            try:
                store.check_file(file.name)
            except StorageError as e:
                if allow_links:
                    linked.append(file.name)
                else:
                    refused[file.name] = reason(e)

    if isinstance(store, LocalFolder) and listed:
        broken = (name for name in store.entries() if role_of(name) and name not in files)
        refused |= dict.fromkeys(broken, "no file: a symbolic link to nothing, or a folder")

    versions = {} if isinstance(store, LocalFolder) else {name: file.version for name, file in files.items()}
    read = functools.partial(_read_small, store, files)
    made = SmallFiles({name: file.size for name, file in files.items()}, read, refused, versions)
    made.linked = [name for name in linked if name in made]
    if is_hub(store.url) and "tokenizer" not in map(role_of, made):
        _warn_offline(store)
    if made.hashes:  # by which each is known from here on
        check_together(store, (files[name] for name in made), _listed(store))
    return made


def _warn_offline(store: Store) -> None:
    """Says of a repository without a tokenizer that it may be the cache which has none."""
    from weightbeam.formats.storage.hub_cache import is_offline  # only now: the hub's client takes a while to import

    if is_offline():
        LOG.warning(
            "%s: HF_HUB_OFFLINE is set, and its cache has no tokenizer; files that weren't downloaded aren't carried over",
            store.url,
        )


def _read_small(store: Store, files: Mapping[str, File], name: str) -> bytes:
    try:
        return read_whole(store, files[name])
    except StorageError:
        raise
    except OSError as e:
        raise StorageError(f"{store.path(name)}: {reason(e)}") from e


def carried_files(url: str, known: Iterable[Seen] = ()) -> SmallFiles:
    """The small files of the release at a URL that another one is made with, see `small_files`; those left out are said,
    and those of an embedding model.

    Raises:
      StorageError: it can't be listed or read, or was changed meanwhile.
    """
    store = open_store(url)
    say_left(files := small_files(store, known=known), store, "carried over")
    if "modules.json" in store.entries():
        names = sorted({name.partition("/")[0] for name in store.names() if EMBEDDERS.fullmatch(name)})
        LOG.warning(
            "%s is an embedding model, of which %s aren't carried over; copy them beside the result",
            store.url, printable(", ".join(names)),
        )  # fmt: skip
    return files


def say_left(files: SmallFiles, source: Store, fate: str) -> None:
    """Says of the files that were left out that they aren't `fate`, and why."""
    for name, why in files.left.items():
        LOG.warning("%s isn't %s: %s", source.path(name), fate, why)


def files_of(checkpoint: HfCheckpoint, files: SmallFiles) -> SmallFiles:
    """The small files of an opened release as it sees them: of a view with its edits.

    Raises:
      StorageError: one that is edited can't be read.
    """
    edits: dict[str, dict[json_text.Path, Any]] = {}
    for (name, *path), value in checkpoint.edits.items():
        edits.setdefault(name, {})[tuple(path)] = value
    edited = {name: _edited(files[name], edits[name]) for name in edits if name in files}
    return files.replaced(edited) if edited else files


def _edited(text: bytes, edits: Mapping[json_text.Path, Any]) -> bytes:
    edited = text.decode()
    for path, value in edits.items():
        edited = json_text.set_value(edited, path, value)
    return edited.encode()


def _listed(store: Store) -> list[File]:
    """The files of the folders that a release's may lie in."""
    return [*store.list(recursive=False), *store.list(f"{TEMPLATES}/", recursive=False)]


def remove_others(store: Store, planned: Container[str]) -> None:
    """Deletes what has the name of a release's file and isn't planned from where a release grows."""
    for file in _listed(store):
        if file.name not in planned and (role_of(file.name) or file.name.endswith((".safetensors", INDEX))):
            store.delete(file.name)
