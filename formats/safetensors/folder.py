"""A checkpoint as a folder: `config.json`, safetensors files, and the index that says which of them belong to the
model.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import google_crc32c

from weightbeam.formats.safetensors.header import (
    BAD_NAME,
    DTYPE_NAMES,
    DTYPES,
    MAX_HEADER,
    UNPRINTABLE,
    HeaderError,
    Tensor,
    check_pointer,
    header_of,
    require,
)
from weightbeam.formats.safetensors.kinds import describe_other, snapshot_in
from weightbeam.formats.storage import File, LeadsOutError, Store, open_store, read_whole, reason, stretches
from weightbeam.formats.storage.identity import (
    READERS,
    SAMPLE_BYTES,
    SAMPLES,
    Seen,
    check_files,
    check_together,
    hash_blocks,
    this_machine,
    touched,
    were_replaced,
)
from weightbeam.formats.storage.stoppable import StoppablePool
from weightbeam.formats.storage.store import as_base64
from weightbeam.formats.storage.strict_json import Budget, JsonError, parse_json
from weightbeam.model_mappings.plan import Problem

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"  # a release in one file
# how files begin that aren't part of it: Mistral's own format of the same weights, an adapter, the same in another dtype
BESIDE = ("consolidated", "adapter_model", "model.fp16.", "model.bf16.", "model.fp32.")
HF_QUANT_CONFIG = "hf_quant_config.json"  # where NVIDIA's ModelOpt describes the quantisation
GPTQ_CONFIG, AWQ_CONFIG = "quantize_config.json", "quant_config.json"  # where AutoGPTQ and AutoAWQ do
QUANT_CONFIGS = (HF_QUANT_CONFIG, GPTQ_CONFIG, AWQ_CONFIG)
MAX_NAMES, MAX_FILES = 1_000_000, 10_000  # of an index
CONFIGS = ("config.json", INDEX, *QUANT_CONFIGS)  # what is read beside the weights

_FILE_NAME = re.compile(rf"[^/\\{UNPRINTABLE}]+\.safetensors")
_PART = re.compile(r"-of-0*([1-9][0-9]{0,4})\.safetensors$")  # of how many files one says that it is one


@dataclasses.dataclass(frozen=True)
class Shard:
    """A safetensors file and what identifies it (`formats.storage.File`); `path` names it on every worker.

    `fingerprint` hashes a few bytes of some tensors of a local file: its size and time, which is its version, may be
    another file's too, as of reproducible archives. Elsewhere the version itself tells.
    """

    name: str
    path: str
    size: int
    version: str
    tensors: tuple[Tensor, ...]
    inode: int = 0
    sha256: str | None = None
    crc32c: str | None = None
    fingerprint: str = ""
    changed: int = 0
    links: int = 0

    @property
    def identity(self) -> tuple[object, ...]:
        """What a plan's hash knows of the file: what it is called and holds, and not where it lies."""
        return (
            self.name,
            self.size,
            self.version,
            self.sha256 or self.fingerprint,
            [(t.name, t.dtype.name, t.shape, t.offset) for t in self.tensors],
        )

    @property
    def content(self) -> str:
        """What tells what it holds from anything else, whatever disk it lies on: no time, and no hash that is known
        only there; in words.
        """
        headers = [(t.name, t.dtype.name, t.shape, t.offset) for t in self.tensors]
        known = json.dumps([self.fingerprint or self.version, headers]).encode()
        return f"{self.size:,} bytes, {hashlib.sha256(known).hexdigest()[:16]}"

    def record(self) -> dict[str, Any]:
        """What a record says of the file: what tells it from others, as far as that is known."""
        fields = ("name", "size", "version", "sha256", "crc32c")
        return {field: value for field in fields if (value := getattr(self, field)) is not None}


@dataclasses.dataclass(frozen=True)
class HfCheckpoint:
    """A folder with `config.json` and safetensors files, known by its headers.

    Attributes:
      root: the folder's URL.
      config: `config.json`; with each of `QUANT_CONFIGS` that there is, under the file's name.
      shards: the files that hold the model, in order of their names.
      ignored: safetensors files in the folder that the index doesn't name.
      lost: tensors that the index places in files which can't be read.
      problems: what is wrong with the files.
      configs: the files of `CONFIGS` that were read.
      sums: the crc32c of files that were read whole and had the hash by which they are known, as buckets write it, by
        name.
      cut: what is kept of it, in words, where this is a view (`release/cutting.py`); empty for a whole one.
      edits: how the view's small files differ from the stored ones: `{(file, key, …): value}`.
      notes: what a person should know of the view.
    """

    root: str
    config: dict[str, Any]
    shards: tuple[Shard, ...]
    ignored: tuple[str, ...] = ()
    lost: frozenset[str] = frozenset()
    problems: tuple[Problem, ...] = ()
    configs: tuple[File, ...] = dataclasses.field(default=(), compare=False)
    sums: dict[str, str] = dataclasses.field(default_factory=dict, compare=False)
    cut: str = ""
    edits: Mapping[tuple[str, ...], Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name; in the order of the files and of their offsets."""
        return {tensor.name: tensor for shard in self.shards for tensor in shard.tensors}

    @property
    def array_count(self) -> int:
        """How many tensors it holds."""
        return sum(len(shard.tensors) for shard in self.shards)

    @property
    def paths(self) -> list[str]:
        """Of its files, which may be links to elsewhere."""
        return [shard.path for shard in self.shards]

    @property
    def identity(self) -> list[Any]:
        """What a plan's hash knows of the files, see `Shard.identity`."""
        return [shard.identity for shard in self.shards]

    @property
    def opened(self) -> tuple[Seen, ...]:
        """Its files, as they were when it was opened."""
        return (*self.configs, *self.shards)

    @property
    def seen(self) -> dict[str, Seen]:
        """The files that hold the model, by their paths."""
        return {shard.path: shard for shard in self.shards}

    def was_touched(self, since: HfCheckpoint, linked: bool = False) -> bool:
        """Whether a file was replaced since the same files were opened; sizes and times needn't show it."""
        prints = [[shard.fingerprint for shard in files.shards] for files in (since, self)]
        return (
            were_replaced(since.seen, self.seen, linked) or prints[0] != prints[1]
        )  # a file with a known hash is known by that alone

    def to_json(self) -> dict[str, Any]:
        """What a worker needs to know of it, as JSON; what is wrong with it is left out."""

        def staged(tensor: Tensor) -> list[Any]:
            return [tensor.name, DTYPE_NAMES[tensor.dtype], tensor.shape, tensor.offset, tensor.whole]

        shards = [vars(shard) | {"tensors": [*map(staged, shard.tensors)]} for shard in self.shards]
        return {
            "root": self.root,
            "config": self.config,
            "shards": shards,
            "machine": this_machine(),
            **({"sums": self.sums} if self.sums else {}),
            **({"cut": self.cut, "edits": [*self.edits.items()], "notes": self.notes} if self.cut else {}),
        }

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Self:
        """What `to_json` wrote."""
        shards = []
        is_here = said.get("machine") == this_machine()
        for shard in said["shards"]:
            names = ("name", "size", "version", *(("inode", "changed", "links") if is_here else ()))
            file = File(**{name: shard[name] for name in names})
            tensors = tuple(
                Tensor(name, DTYPES[dtype], tuple(shape), shard["path"], offset, file, tuple(*whole))
                for name, dtype, shape, offset, *whole in shard["tensors"]
            )
            shards.append(Shard(**shard | {"tensors": tensors}))
        edits = {tuple(path): value for path, value in said.get("edits", ())}
        of_view = dict(cut=said.get("cut", ""), edits=edits, notes=tuple(said.get("notes", ())))
        return cls(said["root"], said["config"], tuple(shards), sums=said.get("sums", {}), **of_view)

    def unreadable(self) -> list[Problem]:
        """The files whose last byte can't be read; the first ones were, for their headers."""
        store = open_store(self.root)

        def attempt(shard: Shard) -> Problem | None:
            try:
                store.read(shard.name, max(0, shard.size - 1), shard.size)
            except OSError as e:
                return Problem("source", shard.path, f"its end can't be read: {reason(e)}")
            return None

        with StoppablePool(store.at_a_time) as pool:
            return [problem for problem in pool.map(attempt, self.shards) if problem]

    def find_damage(self) -> list[Problem]:
        """The files whose bytes, read once, don't have the hash by which a hub, its cache or a bucket knows them;
        `sums` knows the others then.
        """
        store = open_store(self.root)
        problems = []
        for shard in self.shards:
            if shard.sha256 or shard.crc32c:
                summed = google_crc32c.Checksum()
                try:
                    for piece in stretches(store, shard.name, shard.size, shard.sha256, shard.crc32c):
                        summed.update(piece)
                except OSError as e:
                    problems.append(Problem("source", shard.path, reason(e).removeprefix(f"{shard.path}: ")))
                else:
                    self.sums[shard.name] = as_base64(summed)
        return problems

    def check(self) -> None:
        """Checks that the files are those that were opened.

        Raises:
          StorageError: one isn't, or is gone.
        """
        store = open_store(self.root)
        check_files(store, self.shards, store.list(recursive=False))
        with StoppablePool(READERS) as pool:
            prints = pool.map(lambda shard: _fingerprint(store, shard.name, shard.tensors), self.shards)
            for shard, fingerprint in zip(self.shards, prints, strict=True):
                if fingerprint != shard.fingerprint:
                    raise touched(shard.path)


def is_release(store: Store) -> bool:
    """Whether a folder holds a release, and no Orbax checkpoint, by the names of its files.

    Raises:
      StorageError: it can't be looked at.
    """
    store.check_readable()
    return any(name.endswith(".safetensors") or name == "config.json" for name in store.entries())


@dataclasses.dataclass
class Opening:
    """A folder of whose files those are read that describe the others.

    Attributes:
      store: the folder.
      allow_links: whether files may be links that lead out of it.
      budget: what the files may have together.
      problems: what is wrong with them.
      read: the files.
    """

    store: Store
    allow_links: bool = False
    budget: Budget = dataclasses.field(default_factory=Budget)
    problems: list[Problem] = dataclasses.field(default_factory=list)
    read: list[File] = dataclasses.field(default_factory=list)

    def json(self, name: str) -> dict[str, Any]:
        """The JSON object in a file, or an empty one and a problem."""
        try:
            if not self.allow_links:
                self.store.check_file(name)
            file = require(self.store, name)
            if file.size > MAX_HEADER:
                raise HeaderError(f"more than {MAX_HEADER:,} bytes")
            raw = read_whole(self.store, file)
            self.read.append(file)
            check_pointer(raw)
            value = parse_json(raw, budget=self.budget, file=self.store.path(name))
            if isinstance(value, dict) and value:
                return value
            why = "corrupt", "is empty" if value == {} else f"should be a JSON object, is a {type(value).__name__}"
        except FileNotFoundError:
            why = "missing", "no such file"
        except LeadsOutError as e:
            why = "link", reason(e)
        except OSError as e:
            why = "unreadable", reason(e)
        except (HeaderError, JsonError) as e:
            why = "corrupt", str(e)
        self.problems.append(Problem(why[0], name, why[1]))
        return {}


def open_hf(where: str | Path | Store, allow_links: bool = False) -> HfCheckpoint:
    """Reads `config.json`, the index and every header; what is wrong with the files is in `HfCheckpoint.problems`.

    Args:
      where: the folder; that of a repository in a hub's cache stands for its snapshot.
      allow_links: whether files may be links that lead out of the folder.

    Raises:
      StorageError: there is no such folder, or the store doesn't answer; with what was meant, where that can be told; or
        a file was replaced meanwhile.
    """
    store = open_store(where)
    store.check_readable()
    store = snapshot_in(store)
    entries = store.entries()
    on_disk = [name for name in entries if _FILE_NAME.fullmatch(name)]
    if problem := _other_model(store, entries, on_disk):
        return HfCheckpoint(store.url, {}, (), problems=(problem,))
    opening = Opening(store, allow_links)
    problems, config = opening.problems, _read_configs(opening, entries)
    if (named := config.get("transformers_weights")) is not None:
        message = (
            f"'transformers_weights' is {named!r}: transformers loads that file, or that index's files, whatever else is there; give the "
            f"model's files their usual names ({SINGLE}, or {INDEX} and its files), and remove the field"
        )
        problems.append(Problem("config", "config.json", message))
    weight_map = _read_index(opening) if INDEX in entries else {}
    names = sorted(set(weight_map.values())) if INDEX in entries else _only_file(opening, on_disk)
    shards = _open_shards(opening, names)
    if INDEX in entries:
        problems += _check_index(weight_map, shards)
        if SINGLE in on_disk and names and SINGLE not in names:
            message = (
                f"transformers takes it for the whole model, but {INDEX} names other files, such as {names[0]}: remove "
                "the one that isn't the model (the index with its files)"
            )
            problems.append(Problem("index", SINGLE, message))
    readable = {shard.name for shard in shards}
    lost = frozenset(name for name, file in weight_map.items() if file not in readable)
    ignored = tuple(name for name in on_disk if name not in names)
    check_together(store, (*opening.read, *shards), store.list(recursive=False))
    return HfCheckpoint(store.url, config, shards, ignored, lost, tuple(problems), tuple(opening.read))


def view(checkpoint: HfCheckpoint, tensors: Mapping[str, Tensor], **changes: Any) -> HfCheckpoint:
    """A release of which only these tensors are seen, each by its stored name; `changes` are to its other fields."""
    shards = []
    for shard in checkpoint.shards:
        if seen := tuple(tensors[tensor.name] for tensor in shard.tensors if tensor.name in tensors):
            sampled = shard.fingerprint and _fingerprint(open_store(checkpoint.root), shard.name, seen)
            shards.append(dataclasses.replace(shard, tensors=seen, fingerprint=sampled))
    return dataclasses.replace(checkpoint, shards=tuple(shards), **changes)


def _other_model(store: Store, entries: Sequence[str], on_disk: Sequence[str]) -> Problem | None:
    """What is there in place of a model in safetensors files; None where one is there, or nothing that is known."""
    if INDEX in entries or ("config.json" in entries and on_disk):
        return None
    other = describe_other(store, entries)
    return Problem("missing", "*.safetensors", f"no model in safetensors files in {store}; {other}") if other else None


def _read_configs(opening: Opening, entries: Sequence[str]) -> dict[str, Any]:
    """`config.json`; with each of `QUANT_CONFIGS` that there is, under the file's name."""
    config = opening.json("config.json")
    return config | {name: opening.json(name) for name in QUANT_CONFIGS if config and name in entries}


def _only_file(opening: Opening, on_disk: Sequence[str]) -> list[str]:
    """The file that holds the model where there is no index; none, and a problem, where there isn't just one."""
    if SINGLE in on_disk and all(name == SINGLE or name.startswith(BESIDE) for name in on_disk):
        return [SINGLE]
    if len(on_disk) == 1:
        if (of := int(found[1]) if (found := _PART.search(on_disk[0])) else 1) > 1:
            message = f"missing, and there is one file of {of}, {on_disk[0]}; get the others, and the index"
            opening.problems.append(Problem("index", INDEX, message))
        return [*on_disk]
    if on_disk:
        message = f"missing, but there are {len(on_disk)} safetensors files; it says which belong to the model"
        opening.problems.append(Problem("index", INDEX, message))
    else:
        opening.problems.append(Problem("missing", "*.safetensors", f"no safetensors file in {opening.store}"))
    return []


def _open_shards(opening: Opening, names: Sequence[str]) -> tuple[Shard, ...]:
    """The files whose headers can be read."""
    open_one = functools.partial(open_shard, opening.store, budget=opening.budget, allow_links=opening.allow_links)
    with StoppablePool(opening.store.at_a_time) as pool:
        opened = list(pool.map(open_one, names))
    opening.problems += [problem for problem in opened if isinstance(problem, Problem)]
    return tuple(shard for shard in opened if isinstance(shard, Shard))


def _read_index(opening: Opening) -> dict[str, str]:
    """The index's `weight_map`, without the entries that can't be right."""
    index, problems = opening.json(INDEX), opening.problems
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        if index:
            problems.append(Problem("index", INDEX, "has no weight_map that maps tensors to files"))
        return {}
    if len(weight_map) > MAX_NAMES or len({*map(str, weight_map.values())}) > MAX_FILES:
        message = f"names more than {MAX_NAMES:,} tensors, or {MAX_FILES:,} files, which no model has"
        problems.append(Problem("index", INDEX, message))
        return {}
    good = {}
    for name, file in weight_map.items():
        if not name or BAD_NAME.search(name):
            message = "the name of a tensor that is empty, has control characters, or is a path that leads elsewhere"
            problems.append(Problem("index", ascii(name), message))
        elif isinstance(file, str) and _FILE_NAME.fullmatch(file):
            good[name] = file
        else:
            message = f"the index names {reprlib.repr(file)}, which isn't a plain name of a safetensors file"
            problems.append(Problem("index", name, message))
    return good


def open_shard(store: Store, name: str, budget: Budget | None = None, allow_links: bool = False) -> Shard | Problem:
    try:
        if not allow_links:
            store.check_file(name)
        file = require(store, name)
        tensors = header_of(store, file, budget)
        known = file.inode, file.sha256, file.crc32c, _fingerprint(store, name, tensors), file.changed, file.links
        return Shard(name, store.path(name), file.size, file.version, tensors, *known)
    except FileNotFoundError:
        return Problem("missing", name, f"the index names this file, but it isn't in {store}")
    except LeadsOutError as e:
        return Problem("link", name, reason(e))
    except OSError as e:
        return Problem("unreadable", name, reason(e))
    except HeaderError as e:
        return Problem("corrupt", name, str(e))


def _fingerprint(store: Store, name: str, tensors: Sequence[Tensor]) -> str:
    """A hash of a few bytes in the middle of some tensors, from the first to the last; of local files only."""
    held = [tensor for tensor in tensors if tensor.nbytes]
    some = held[:: max(1, -(-len(held) // SAMPLES))] + held[-1:]
    return hash_blocks(
        store,
        name,
        {
            (at, min(SAMPLE_BYTES, tensor.offset + tensor.nbytes - at))
            for tensor in some
            for at in [tensor.offset + tensor.nbytes // 2]
        },
    )


def _check_index(weight_map: Mapping[str, str], shards: Sequence[Shard]) -> Iterator[Problem]:
    """The index and the headers must tell the same."""
    held = {(tensor.name, shard.name) for shard in shards for tensor in shard.tensors}
    readable = {shard.name for shard in shards}
    for name, file in weight_map.items():
        if file in readable and (name, file) not in held:
            yield Problem("index", name, f"the index says it is in {file}, but that file doesn't hold it")
    for name, file in sorted(held - set(weight_map.items())):
        says = f"says {weight_map[name]}" if name in weight_map else "doesn't name it"
        yield Problem("index", name, f"is in {file}, but the index {says}")
