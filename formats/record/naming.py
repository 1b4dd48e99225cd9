"""How a source is named in what leaves the machine: by what means something elsewhere.

    where it goes        hf://owner/name@commit   gs://bucket/folder   a folder of this machine
    a folder             as it is                 as it is             as it is
    gs://                as it is                 as it is             its name
    hf://                as it is                 its name             its name

A source's name is that of its last folder, with what identifies it in a plan: `llama-tiny@3f2a…`. `--full_paths true`
keeps every path, `--full_paths false` names sources in a folder, too, for a release that somebody uploads later.

Everything that is published passes here: records, model cards, the titles of commits, what a watcher notes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from weightbeam.formats.staging.lease import HOLDER
from weightbeam.formats.storage import HUB, is_hub
from weightbeam.formats.storage.identity import Watched

BUCKET = "gs://"
GENERIC = ("items", "checkpoints")  # folders that Orbax and MaxText call so
CACHED = re.compile(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})(?:/|$)")  # in a hub's cache
# in the middle of a text: two folders at least, which no text has for another reason
PATHS = re.compile(r"(?<![\w:/.])~?(?:/[^\s/'\",;:()|]+){2,}|gs://[^\s'\",;()|]+")
# a whole cell of a table, as in a model card, which may hold spaces
CELLS = re.compile(r"(?<=\| )~?(?:/(?:\\.|[^/\n|\\])+){2,}(?= \|)|(?<=\| )~/(?:\\.|[^\n|\\])+(?= \|)")
VERBATIM = ("config", "tensors")  # of a record: the release's own words
ORIGIN = "_name_or_path"  # in a `config.json` of transformers 4: the folder that it was loaded from


class NamedSource(Watched, Protocol):
    """What is read, with the URL where it lies."""

    @property
    def root(self) -> str: ...


def digest(source: NamedSource) -> str:
    """What a name says of a source's content: the beginning of a hash of its identity in a plan."""
    return hashlib.sha256(json.dumps(source.identity).encode()).hexdigest()[:16]


def is_name(said: object) -> bool:
    """Whether a record names a source by a name, which leads nowhere."""
    return isinstance(said, str) and bool(said) and "://" not in said and not said.startswith("/")


def is_named(said: object, source: NamedSource) -> bool:
    """Whether a name in a record is that of a source."""
    return is_name(said) and str(said).rpartition("@")[2] == digest(source)


def name_of(url: str, digest: str = "") -> str:
    """The name of what lies at a URL; `digest` is that of its content."""
    if match := CACHED.search(url):
        return f"{HUB}{match[1]}/{match[2]}@{match[3]}"
    parts = [part for part in url.partition("://")[2 if "://" in url else 0].split("/") if part]
    while len(parts) > 1 and parts[-1] in GENERIC:
        parts.pop()
    last = parts.pop() if parts else ""
    if last.isdecimal():  # a step, of which there are many
        while len(parts) > 1 and parts[-1] in GENERIC:
            parts.pop()
        last = f"{parts[-1]}/{last}" if parts else last
    return f"{last}@{digest}" if digest else last


@dataclasses.dataclass(frozen=True)
class Naming:
    """How sources are named in one place.

    Attributes:
      full: every path as it is.
      buckets: `gs://` as it is.
      known: what identifies each source, by its URL; empty where nothing does.
    """

    full: bool
    buckets: bool = True
    known: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls, place: str, full_paths: bool | None = None, sources: Iterable[NamedSource] = (), others: Iterable[str] = ()
    ) -> Self:
        """That of a place.

        Args:
          place: its URL.
          full_paths: as the user asked; None for what is right there.
          sources: what is named.
          others: URLs of what is named whose content isn't known.
        """
        full = "://" not in place if full_paths is None else full_paths
        if full:
            return cls(True)
        known = {url: "" for url in others if url} | {source.root: digest(source) for source in sources}
        return cls(False, place.startswith(BUCKET) and full_paths is None, known)

    def knowing(self, known: Mapping[str, str]) -> Naming:
        """The same, with what identifies more sources, by their URLs."""
        return dataclasses.replace(
            self, known={**self.known, **{url: digest for url, digest in known.items() if digest}}
        )

    def name(self, url: str) -> str:
        """What a source is called."""
        if self.full or not url or is_hub(url) or (self.buckets and url.startswith(BUCKET)) or is_name(url):
            return url
        return name_of(url, self.known.get(url, ""))

    def text(self, text: str) -> str:
        """A text, with every path in it as a name."""
        if self.full or not text:
            return text
        if text in self.known or (text.startswith("/") and "\n" not in text):
            return self.name(text)
        for url in sorted(self.known.keys() - {""}, key=len, reverse=True):  # one source may lie in another one
            text = text.replace(url, self.name(url))
        text = text.replace(str(Path.home()), "~") if len(Path.home().parts) > 1 else text
        for paths in (CELLS, PATHS):
            text = paths.sub(lambda found: self.name(found[0].removeprefix("~")), text)
        return HOLDER.sub("", text)

    def apply(self, value: Any) -> Any:
        """What JSON can say, with every path in it as a name; what a release says of itself stays, but for where it
        was loaded from.
        """
        if self.full:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {key: self._config(each) if key in VERBATIM else self.apply(each) for key, each in value.items()}
        return [self.apply(each) for each in value] if isinstance(value, list | tuple) else value

    def _config(self, config: Any) -> Any:
        origin = config.get(ORIGIN) if isinstance(config, Mapping) else None
        return {**config, ORIGIN: self.text(origin)} if isinstance(origin, str) else config
