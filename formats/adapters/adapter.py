"""An adapter as PEFT writes it: a folder with `adapter_config.json` and `adapter_model.safetensors`, known by its
header.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from weightbeam.formats.adapters.config import CONFIG, AdapterConfig, read_config
from weightbeam.formats.safetensors import HfCheckpoint, Tensor
from weightbeam.formats.safetensors.folder import Opening, Shard, open_shard
from weightbeam.formats.storage import Store, open_store
from weightbeam.formats.storage.identity import check_together
from weightbeam.formats.storage.meant import PICKLES
from weightbeam.model_mappings.plan import Problem, is_float

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of PEFT's wrapper; what follows is the path of a module in memory
PARTS = {
    "lora_A.weight": "A",
    "lora_B.weight": "B",
    "lora_B.bias": "bias",
    "lora_embedding_A": "embedding A",
    "lora_embedding_B": "embedding B",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}

# What PEFT's wrapper of a module that is trained whole holds, where its embeddings are saved, too
# (`save_embedding_layers`, and by itself for another vocabulary): it loads `lm_head.weight` of the three
# (peft/utils/save_and_load.py and other.py, 0.21)
WRAPPED = re.compile(r"(?P<module>.+)\.(?:modules_to_save|original_module)\.(?P<own>.+)")


@dataclasses.dataclass(frozen=True)
class Adapter:
    """A LoRA and how much of it is merged.

    Attributes:
      files: the folder; its `config` is `adapter_config.json`.
      weight: what its deltas are multiplied by, beside their own scaling.
    """

    files: HfCheckpoint
    weight: float = 1.0

    @functools.cached_property
    def _read(self) -> tuple[AdapterConfig, list[Problem]]:
        return read_config(self.files.config) if self.files.config else (AdapterConfig(), [])

    @property
    def config(self) -> AdapterConfig:
        return self._read[0]

    @property
    def root(self) -> str:
        return self.files.root

    @property
    def identity(self) -> list[Any]:
        """What tells it from another one, as JSON: its weight, its configuration, its files and their headers."""
        return [self.weight, self.files.config, self.files.identity]

    def to_json(self) -> list[Any]:
        """As JSON, for workers."""
        return [self.files.to_json(), self.weight]

    @classmethod
    def from_json(cls, staged: Sequence[Any]) -> Adapter:
        """What `to_json` made."""
        return cls(HfCheckpoint.from_json(staged[0]), *staged[1:])

    def record(self) -> dict[str, Any]:
        """Where it comes from, for `conversion.json`."""
        return {
            "source": self.root,
            "weight": self.weight,
            "base": self.config.base,
            "r": self.config.r,
            "lora_alpha": self.config.alpha,
            "files": [shard.record() for shard in self.files.shards],
        }

    @functools.cached_property
    def contents(self) -> Contents:
        """Its tensors, by the modules that they belong to."""
        return sort_tensors(self.files.tensors)

    @property
    def problems(self) -> list[Problem]:
        """What stands against the files, the configuration, or names and shapes, whatever the base is."""
        found = [*self.files.problems, *self._read[1]]
        if not found:
            found += [
                *self.contents.problems,
                *(problem for target in self.contents.targets for problem in target.check(self.config)),
            ]
        return [dataclasses.replace(problem, subject=f"{self.root}: {problem.subject}") for problem in found]


@dataclasses.dataclass(frozen=True)
class AdaptedModule:
    """What an adapter holds of one module.

    Attributes:
      module: its path in memory; one that PEFT wrapped several times ends in `.base_layer`, as often as it is further
        in.
      parts: its tensors, by `PARTS`.
    """

    module: str
    parts: Mapping[str, Tensor]

    @property
    def is_embedding(self) -> bool:
        return "embedding A" in self.parts

    @property
    def a(self) -> Tensor:
        """(rank, in), of an embedding (rank, vocab)."""
        return self.parts["embedding A" if self.is_embedding else "A"]

    @property
    def b(self) -> Tensor:
        """(out, rank), of an embedding (dim, rank)."""
        return self.parts["embedding B" if self.is_embedding else "B"]

    def check(self, config: AdapterConfig) -> list[Problem]:
        """Whether the parts are those that belong together and that the configuration says, as far as the base needn't
        be known.
        """
        kinds = set(self.parts)
        first = next(iter(self.parts.values())).name
        pair = {"embedding A", "embedding B"} if kinds & {"embedding A", "embedding B"} else {"A", "B"}
        if lacks := pair - kinds:
            return [Problem("adapter", first, f"has no lora_{' and no lora_'.join(sorted(lacks))} beside it")]
        messages = []
        if unknown := kinds - pair - {"bias", "magnitude"}:
            messages.append(f"a module can't have {', '.join(sorted(unknown))} too")
        messages += [*self._check_matrices(), *self._check_flags(config), *self._check_vectors()]
        if field := config.left_out_by(self.module):
            messages.append(
                f"its module has no factors by {field}, and PEFT passes over it; mend {field}, or remove it"
            )
        return [Problem("adapter", first, message) for message in messages]

    def _check_matrices(self) -> Iterator[str]:
        for tensor in self.parts.values():
            if not is_float(tensor.dtype) or tensor.dtype.itemsize == 1:
                yield f"{tensor.name} is {tensor.dtype.name}; expected float32, bfloat16 or float16"
        a, b = self.a.shape, self.b.shape
        if len(a) != 2 or len(b) != 2 or 0 in (*a, *b) or a[0] != b[1]:
            yield f"A is {a} and B {b}; expected (rank, in) and (out, rank)"

    def _check_flags(self, config: AdapterConfig) -> Iterator[str]:
        flags = [("magnitude", "lora_magnitude_vector", "use_dora", config.use_dora)]
        if not self.is_embedding:
            flags.append(("bias", "lora_B.bias", "lora_bias", config.lora_bias))
        for kind, name, flag, value in flags:
            if (kind in self.parts) != value:
                there = "has a" if kind in self.parts else "has no"
                yield f"{there} {name}, but {flag} is {str(value).lower()}"

    def _check_vectors(self) -> Iterator[str]:
        for kind in ("bias", "magnitude"):
            if (vector := self.parts.get(kind)) and vector.shape != self.b.shape[:1]:
                yield f"{vector.name} is {vector.shape}; expected {self.b.shape[:1]}, one for each output"


@dataclasses.dataclass(frozen=True)
class Contents:
    """The tensors of an adapter: those of its targets; whole ones by the name of what they replace; copies of a targeted
    embedding, by its name, which take the base's place below the delta; and the names of those that PEFT doesn't load.
    """

    targets: tuple[AdaptedModule, ...]
    whole: Mapping[str, Tensor]
    copies: Mapping[str, Tensor]
    spare: Sequence[str]
    problems: tuple[Problem, ...]


def sort_tensors(tensors: Mapping[str, Tensor]) -> Contents:
    """What each tensor of an adapter is, by its name."""
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    whole: dict[str, Tensor] = {}
    copies: dict[str, Tensor] = {}
    spare: list[str] = []
    problems = []
    for given, tensor in tensors.items():
        name = given.removeprefix(PREFIX)
        module, kind = _split(name)
        if name == given:
            problems.append(Problem("adapter", given, f"isn't a name that PEFT writes: those begin with {PREFIX}"))
        elif kind is not None:
            if kind in parts[module]:
                problems.append(Problem("adapter", given, f"is there twice, as {parts[module][kind].name} too"))
            parts[module][kind] = tensor
        elif (of := WRAPPED.fullmatch(name)) and f"{PREFIX}{of['module']}.{of['own']}" in tensors:
            spare.append(given)
        elif "lora_" in name.rpartition(".")[0].rpartition(".")[2] or "lora_" in name.rpartition(".")[2]:
            problems.append(Problem("adapter", given, f"no such part of a LoRA is known; known: {', '.join(PARTS)}"))
        else:
            kept = copies if name.endswith(".base_layer.weight") else whole
            meant = re.sub(r"\.base_layer\.(weight|bias)$", r".\1", name)
            if meant in kept:
                problems.append(Problem("adapter", given, f"is there twice, as {kept[meant].name} too"))
            kept[meant] = tensor
    targets = tuple(AdaptedModule(module, found) for module, found in parts.items())
    problems += [
        Problem("adapter", tensor.name, "is a copy of the base's, of a module without a LoRA")
        for name, tensor in copies.items()
        if name.removesuffix(".weight") not in parts
    ]
    return Contents(targets, whole, copies, spare, tuple(problems))


def _split(name: str) -> tuple[str, str | None]:
    """A tensor's module and what part of its LoRA it is."""
    for suffix, kind in PARTS.items():
        if name.endswith(f".{suffix}"):
            return name.removesuffix(f".{suffix}"), kind
    return name, None


def open_adapter(where: str | Path | Store, weight: float = 1.0) -> Adapter:
    """Reads the configuration and the header; what is wrong with them is in `Adapter.problems`.

    Raises:
      StorageError: there is no such folder, or the store doesn't answer.
    """
    store = open_store(where)
    store.check_readable()
    entries, opening = store.entries(), Opening(store)
    problems, config = opening.problems, opening.json(CONFIG)
    shards: tuple[Shard, ...] = ()
    if WEIGHTS in entries:
        opened = open_shard(store, WEIGHTS)
        if isinstance(opened, Problem):
            problems.append(opened)
        else:
            shards = (opened,)
    else:
        pickles = sorted(name for name in entries if name.endswith(PICKLES))
        hint = (
            f"; {pickles[0]} is a pickle file, which can run code when it is loaded: save the adapter as safetensors"
            if pickles
            else ""
        )
        problems.append(Problem("missing", WEIGHTS, f"no such file in {store}{hint}"))
    check_together(store, (*opening.read, *shards), store.list(recursive=False))
    return Adapter(HfCheckpoint(store.url, config, shards, problems=tuple(problems)), weight)
