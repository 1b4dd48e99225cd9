"""What a release holds besides its weights: the small files, the edits that `config.json` needs, and a model card.

The small files are carried as opaque bytes. Weights and pickles never are; nothing is run, nothing is parsed but
`config.json` and the head of the model card.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import logging
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from weightbeam.formats.orbax.metadata import files_beside
from weightbeam.formats.record.naming import ORIGIN, Naming
from weightbeam.formats.safetensors import INDEX, QUANT_CONFIGS, HfCheckpoint
from weightbeam.formats.staging import ITEMS
from weightbeam.formats.staging.links import SOURCE
from weightbeam.formats.storage import File, LocalFolder, StorageError, Store, open_store, read_whole, reason
from weightbeam.formats.storage.identity import Seen, check_together
from weightbeam.formats.storage.stoppable import StoppablePool
from weightbeam.formats.storage.strict_json import JsonError, parse_json
from weightbeam.formats.storage.strict_yaml import parse_yaml
from weightbeam.formats.text import json_text
from weightbeam.formats.text.installing import home_page
from weightbeam.formats.text.printable import printable
from weightbeam.model_mappings.config import NEXTN, QUANTIZATIONS, TEXT_SECTIONS

LOGGER = logging.getLogger("weightbeam")
CONFIG, CARD = "config.json", "README.md"
# the one folder of a release that is taken (transformers 5.23, processing_utils.py)
TEMPLATES = "additional_chat_templates"
MAX_FILE_BYTES = 64 << 20  # Gemma 3's tokenizer.json, the largest known, has 33 MB
MAX_BYTES = 256 << 20  # of all together
MAX_FILES = 250
# what sentence-transformers takes an embedding model's layers behind the transformer from, and isn't carried
EMBEDDERS = re.compile(r"modules\.json|config_sentence_transformers\.json|sentence_\w+_config\.json|\d+_[A-Z]\w*/.+")


ROLES: Mapping[str, re.Pattern[str]] = {
    "config": re.compile(r"config\.json"),
    "generation": re.compile(r"generation_config\.json"),
    "tokenizer": re.compile(
        r"tokenizer(_config)?\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt|tekken\.json"
        r"|tokenizer\.model(\.v\w+)?|\w[\w.-]*\.tiktoken|tiktoken\.model|spiece\.model|sentencepiece\.bpe\.model"
    ),
    "chat template": re.compile(rf"chat_template\.json|({TEMPLATES}/)?\w[\w.-]*\.jinja"),
    "processor": re.compile(r"(\w+_)?(pre)?processor_config\.json"),
    "quantisation": re.compile("|".join(map(re.escape, QUANT_CONFIGS))),
    "licence": re.compile(
        r"([\w.-]+[._-])?(licen[cs]e|notice|copying|use_policy)[\w-]*(\.(md|txt|pdf|rst))?", re.IGNORECASE
    ),
    "card": re.compile(r"README\.md"),
    "code": re.compile(r"\w[\w.-]*\.py"),
}


def role_of(name: str) -> str | None:
    """What a file of a release is for, by its name; None for weights and for all that isn't known."""
    return next((role for role, pattern in ROLES.items() if pattern.fullmatch(name)), None)


def is_of_release(name: str, beside: Collection[str]) -> bool:
    """Whether a file is one of a release, or of an adapter, by its name and those of the files beside it."""
    weights = ".safetensors", INDEX
    is_known = role_of(name) is not None or name.endswith((*weights, "adapter_config.json"))
    return is_known and any(other.endswith((*weights, CONFIG)) for other in beside)


def hash_each(files: Mapping[str, bytes]) -> dict[str, str]:
    """The sha256 of each file, by name: what a plan's hash knows of small files."""
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


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
    if made.hashes:  # by which each is known from here on
        check_together(store, (files[name] for name in made), _listed(store))
    return made


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
    _say_left(files := small_files(store, known=known), store, "carried over")
    if "modules.json" in store.entries():
        names = sorted({name.partition("/")[0] for name in store.names() if EMBEDDERS.fullmatch(name)})
        LOGGER.warning(
            "%s is an embedding model, of which %s aren't carried over; copy them beside the result",
            store.url, printable(", ".join(names)),
        )  # fmt: skip
    return files


def _say_left(files: SmallFiles, source: Store, fate: str) -> None:
    for name, why in files.left.items():
        LOGGER.warning("%s isn't %s: %s", source.path(name), fate, why)


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


def edit_archive(archive: bytes, checkpoint: HfCheckpoint) -> bytes:
    """The small files that are packed as `keep_files` packs them, as a view of their release sees them."""
    with zipfile.ZipFile(io.BytesIO(archive)) as packed:
        sizes = {info.filename: info.file_size for info in packed.infolist()}
        files = files_of(checkpoint, SmallFiles(sizes, packed.read))
        return pack({name: files[name] for name in packed.namelist()})


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


def has_weights(url: str) -> bool:
    """Whether a release has weights; one that gives its form only has none."""
    try:
        return any(name.endswith(".safetensors") for name in open_store(url).entries())
    except OSError:
        return False


SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token")


def token_ids(files: Mapping[str, bytes]) -> dict[str, int]:
    """The ids of the tokens that begin, end and pad a text, as a tokenizer's files say: `{"eos_token_id": 2, …}`; those
    that they don't say left out.
    """
    said = [
        parsed if isinstance(parsed := _read_json(files.get(name, b"")), dict) else {}
        for name in ("tokenizer_config.json", "tokenizer.json")
    ]
    config, tokenizer = said
    added = tokenizer.get("added_tokens")
    ids = (
        {
            token["content"]: token["id"]
            for token in added
            if isinstance(token, dict) and {"content", "id"} <= token.keys()
        }
        if isinstance(added, list)
        else {}
    )
    found = {}
    for name in SPECIAL_TOKENS:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and type(ids.get(text)) is int:
            found[f"{name}_id"] = ids[text]
    return found


def _read_json(text: bytes) -> Any:
    try:
        return parse_json(text) if text else None
    except JsonError:
        return None


# --- kept with a checkpoint -------------------------------------------------------------------------------------------

ENTRY, MAX_ENTRIES = b"PK\1\2", 10_000  # what each entry of an archive's directory begins with
ARCHIVE = "release.zip"  # in a step's folder: a single file, since Orbax takes every folder of a step for an item


def pack(files: Mapping[str, bytes]) -> bytes:
    """A ZIP archive of small files, uncompressed; of the same files always the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)  # of 1980, the earliest that the format knows
    return buffer.getvalue()


def packed_files(step: Store) -> SmallFiles | None:
    """The small files that lie with a checkpoint; None where there are none.

    Raises:
      StorageError: the archive can't be read, or isn't one.
    """
    if ARCHIVE not in files_beside(step):
        return None
    try:
        stored = step.read(ARCHIVE)
        if stored.count(ENTRY) > MAX_ENTRIES:  # each takes a kilobyte of memory once it is open
            raise StorageError(f"{step.path(ARCHIVE)}: has more than {MAX_ENTRIES:,} entries; that can't be meant")
        entries = zipfile.ZipFile(io.BytesIO(stored)).infolist()
    except (zipfile.BadZipFile, ValueError) as e:
        raise StorageError(f"{step.path(ARCHIVE)}: isn't a ZIP archive: {e}") from e
    read = functools.partial(_read_packed, stored, step.path(ARCHIVE))
    return SmallFiles({entry.filename: entry.file_size for entry in entries if role_of(entry.filename)}, read)


def _read_packed(archive: bytes, where: str, name: str) -> bytes:
    try:
        return zipfile.ZipFile(io.BytesIO(archive)).read(name)
    except (
        zipfile.BadZipFile,
        zlib.error,
        RuntimeError,
        ValueError,
        EOFError,
    ) as e:  # RuntimeError: encrypted, or compressed by something else
        raise StorageError(f"{where}: {name} can't be read: {e}") from e


def kept_files(source: Store, allow_links: bool = False, known: Iterable[Seen] = ()) -> SmallFiles:
    """The small files that are kept with a checkpoint of a release, see `small_files`; those of a virtual checkpoint lie
    with that one.

    Raises:
      StorageError: they can't be listed or read, were changed meanwhile, or the archive can't be read.
    """
    virtual = (source.parent.name, source.name) == (ITEMS, SOURCE)
    packed = packed_files(source.parent.parent) if virtual else None
    return small_files(source, allow_links, known) if packed is None else packed


def name_sources(name: str, data: bytes, naming: Naming) -> bytes:
    """A small file of a release as it is published elsewhere: its card, and the folder that `config.json` was loaded
    from, name sources as that place does.
    """
    text = data.decode(errors="replace")
    if naming.full:
        return data
    if role_of(name) == "card":
        return naming.text(text).encode()
    if name == CONFIG and ORIGIN in text:
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(origin := json_text.get(text, (ORIGIN,)), str):
                return json_text.set_value(text, (ORIGIN,), naming.text(origin)).encode()
    return data


def name_in_archive(archive: bytes, naming: Naming) -> bytes:
    """The same of all files that are packed as `keep_files` packs them."""
    if naming.full:
        return archive
    with zipfile.ZipFile(io.BytesIO(archive)) as packed:
        return pack({name: name_sources(name, packed.read(name), naming) for name in packed.namelist()})


def keep_files(step: Store, source: Store, files: SmallFiles, naming: Naming) -> None:
    """Packs the small files of the release `source` into the archive that lies with a checkpoint.

    Raises:
      StorageError: one can't be read.
    """
    _say_left(files, source, "kept with the checkpoint")
    for name in files.linked:
        path = source.path(name)
        LOGGER.warning(
            "%s is a link out of the folder: what it leads to, %s, is kept with the checkpoint",
            path,
            os.path.realpath(path),
        )
    with StoppablePool(source.at_a_time) as pool:
        held = zip(files, pool.map(files.__getitem__, files), strict=True)
        step.write(ARCHIVE, pack({name: name_sources(name, data, naming) for name, data in held}))


# --- config.json ------------------------------------------------------------------------------------------------------

DTYPE_KEYS = ("dtype", "torch_dtype")
MAX_SECTIONS = 3  # how deep sections lie in each other


def edit_config(
    text: str,
    *,
    dtype: str | None = None,
    vocab_size: int | None = None,
    drop_quantization: bool = False,
    quantization: Mapping[str, Any] | None = None,
    nextn: int | None = None,
    fields: Mapping[str, Any] | None = None,
) -> tuple[str, list[str]]:
    """Edits `config.json` so that it describes other weights, and leaves all else as the release spells it.

    Args:
      text: the file, valid JSON.
      dtype: of the weights; it is set wherever a dtype stands. None leaves the release's.
      vocab_size: rows of the embedding.
      drop_quantization: take out what describes a quantisation that is gone.
      quantization: the `quantization_config` of the new weights, in place of any other.
      nextn: layers of multi-token prediction that the weights have; only where the config has a number for them.
      fields: others, and what they become; a dot leads into a section.

    Returns:
      The new text, and what was edited, a line each. At the root both `dtype` (transformers 5) and `torch_dtype` (4,
      and engines built on it) stand, with the same value.

    Raises:
      JsonError: the text isn't a JSON object.
    """
    if not isinstance(parse_json(text.encode()), dict):
        raise JsonError("should be an object")
    editor = _Editor(text)
    if quantization is not None or drop_quantization:
        _edit_quantization(editor, quantization)
    _edit_dtype(editor, dtype)
    if vocab_size is not None:
        places = list(editor.standing(TEXT_SECTIONS, "vocab_size"))
        editor.set_each(places or [(*_innermost_section(editor), "vocab_size")], vocab_size)
    if nextn is not None:
        editor.set_each(editor.standing(TEXT_SECTIONS, *NEXTN), nextn)
    for field, value in (fields or {}).items():
        editor.set(tuple(field.split(".")), value)
    return editor.text, editor.edits


def _edit_quantization(editor: _Editor, quantization: Mapping[str, Any] | None) -> None:
    """Takes out what describes another quantisation, in every section; the weights' own stands at the root."""
    own = None if quantization is None else QUANTIZATIONS[:1]
    for section in editor.sections():
        for key in QUANTIZATIONS:
            if (*section, key) != own:
                editor.remove((*section, key))
    if quantization is not None:
        editor.set(QUANTIZATIONS[:1], dict(quantization))


def _edit_dtype(editor: _Editor, dtype: str | None) -> None:
    """Sets the dtype wherever one stands, and at the root by both of its names; None leaves the release's."""
    if dtype is not None:
        editor.set_each(editor.standing(editor.sections(), *DTYPE_KEYS), dtype)
    known = dtype or next(filter(None, map(editor.get, editor.standing(TEXT_SECTIONS, *DTYPE_KEYS))), None)
    if known is not None:
        editor.set(("dtype",), known, after="torch_dtype")
        editor.set(("torch_dtype",), known, after="dtype")


def _innermost_section(editor: _Editor) -> json_text.Path:
    """The deepest section for the text model's sizes that there is."""
    return max((section for section in TEXT_SECTIONS if isinstance(editor.get(section), dict)), key=len, default=())


class _Editor:
    """A text of JSON, and what was done to it."""

    def __init__(self, text: str):
        self.text = text
        self.edits: list[str] = []

    def get(self, path: json_text.Path) -> Any:
        return json_text.get(self.text, path)

    def has(self, path: json_text.Path) -> bool:
        return json_text.find(self.text, path) is not None

    def standing(self, sections: Iterable[json_text.Path], *keys: str) -> Iterator[json_text.Path]:
        """Those members of the sections that there are; each is looked for when it is asked for, since an edit before
        may have replaced its section.
        """
        return (path for section in sections for key in keys if self.has(path := (*section, key)))

    def set_each(self, paths: Iterable[json_text.Path], value: Any) -> None:
        for path in paths:
            self.set(path, value)

    def set(self, path: json_text.Path, value: Any, after: str | None = None) -> None:
        name, had = ".".join(path), self.has(path)
        before = self.get(path)
        if had and before == value and type(before) is type(value):
            return
        self.text = json_text.set_value(self.text, path, value, after)
        short = [json.dumps(each) if not isinstance(each, dict) else "{…}" for each in (before, value)]
        self.edits.append(f"{name}: {short[0]} -> {short[1]}" if had else f"{name}: {short[1]} added")

    def remove(self, path: json_text.Path) -> None:
        if self.has(path):
            self.text = json_text.remove(self.text, path)
            self.edits.append(f"{'.'.join(path)} removed")

    def sections(self) -> list[json_text.Path]:
        """The root and every object below it, as deep as sections of a model lie; what describes a quantisation is
        none.
        """
        found: list[json_text.Path] = [()]
        for path in found:
            value = self.get(path) if path else json.loads(self.text)
            if len(path) < MAX_SECTIONS and isinstance(value, dict):
                found += [
                    (*path, key) for key, child in value.items() if isinstance(child, dict) and key not in QUANTIZATIONS
                ]
        return found


# --- the model card ---------------------------------------------------------------------------------------------------

MAX_HEAD = 64 << 10  # characters of the metadata of a model card
TAG = "weightbeam"  # by which the hub finds what was made so
CODE = "```python\n{}\n```"
FENCE = re.compile(r"^```python\n.*?^```$", re.MULTILINE | re.DOTALL)
WRITTEN = re.compile(r"Written by \[?Weightbeam\b")  # in a card that nobody has edited
KEPT_FIELDS = (
    "license",
    "license_name",
    "license_link",
    "language",
    "pipeline_tag",
    "library_name",
    "extra_gated_prompt",
)


def model_card(
    title: str,
    code: str,
    facts: Mapping[str, str],
    edits: Sequence[str] = (),
    *,
    base_model: str | None = None,
    card: str | None = None,
    **about: Any,
) -> str:
    """A stub of a model card that says what a release was made of.

    Args:
      title: of the page.
      code: the Python that loads it.
      facts: what the page's table says, such as `{"weights": "gs://…/1000"}`.
      edits: of `config.json`.
      base_model: the repository that the release's files are from, `organisation/model`.
      card: the card of that release; fields about its licence are kept.
      about: more fields of the head, such as `pipeline_tag` (huggingface_hub 2, `ModelCardData`); empty ones are left
        out.
    """
    head = {"library_name": "transformers", "base_model": base_model, **about, **_kept_fields(card or "")}
    head = {name: value for name, value in head.items() if value} | {"tags": [*(about.get("tags") or ()), TAG]}
    lines = [
        f"# {title}",
        "",
        CODE.format(code),
        "",
        f"{written_by()} Say here what the model is for, and what it was trained on.",
        "",
    ]
    lines += [
        "| made of | |",
        "|---|---|",
        *(f"| {table_cell(name)} | {table_cell(value)} |" for name, value in facts.items()),
        "",
    ]
    if edits:
        lines += ["`config.json` differs from the release's in:", "", *(f"* `{edit}`" for edit in edits), ""]
    card = f"---\n{yaml.safe_dump(head, allow_unicode=True, sort_keys=False)}---\n\n" + "\n".join(lines)
    return card.encode(errors="backslashreplace").decode()  # a path needn't be UTF-8


def written_by() -> str:
    """The sentence that says so, with a link where the project has a page."""
    page = home_page()
    return f"Written by [Weightbeam]({page})." if page else "Written by Weightbeam."


def readdress(card: str, title: str, arguments: str) -> str:
    """A card that was written for a folder, as it is elsewhere: under another title, with code that loads the release
    from there; `arguments` are what `from_pretrained` takes in place of the folder.
    """
    card = FENCE.sub(lambda found: found[0].replace("'.'", arguments), card, count=1)
    return re.sub(r"^# .*$", lambda _: f"# {title}", card, count=1, flags=re.MULTILINE)


def table_cell(text: str) -> str:
    """A text as a cell of a table."""
    return " ".join(text.replace("|", "\\|").split())


def _kept_fields(card: str) -> dict[str, str | list[str]]:
    """The fields of a card's head that are kept; empty where it has none that can be read."""
    parts = card.split("---", 2)
    if parts[0].strip() or len(parts) < 3:
        return {}
    try:
        fields = parse_yaml(parts[1][:MAX_HEAD], yaml.BaseLoader)
    except yaml.YAMLError:
        return {}
    kept = {key: fields[key] for key in KEPT_FIELDS if key in fields} if isinstance(fields, dict) else {}
    return {
        key: value
        for key, value in kept.items()
        if isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str) for each in value))
    }
