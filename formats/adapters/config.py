"""What `adapter_config.json` says, as far as it changes a value; what isn't known to be harmless is refused by its
name.

The fields are those of PEFT's `LoraConfig` (peft, tuners/lora/config.py, 0.21.2).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from weightbeam.formats.adapters.patterns import MAX_TOTAL, PatternError, Patterns, parse
from weightbeam.model_mappings.plan import Problem

CONFIG = "adapter_config.json"

# beside those of `_SHOULD`
USED = frozenset({
    "peft_type", "peft_version", "rank_pattern", "alpha_pattern", "target_parameters", "modules_to_save", "init_lora_weights",
    "base_model_name_or_path", "revision",
})  # fmt: skip

# Of training or initialisation alone.
HARMLESS = frozenset({
    "lora_dropout", "task_type", "inference_mode", "auto_mapping",
    "runtime_config", "megatron_core", "qalora_group_size", "eva_config", "corda_config", "lora_ga_config", "loftq_config",
})  # fmt: skip

# Of `init_lora_weights`; all others take something out of the base's weights (PiSSA, OLoRA, CorDA, LoRA-GA, LoftQ), or
# aren't known.
HARMLESS_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")

EMBEDDINGS = ("embed_tokens", "lm_head")  # peft, utils/constants.py, EMBEDDING_LAYER_NAMES

MAX_PATTERNS = 10_000  # of ranks, and of alphas
MAX_RANK = 1 << 16
MAX_NAMES = 1_000  # of parameters, and of modules that were trained as a whole
MAX_PARTS = 100  # of a module's name that is looked for among names
TARGET_STEPS = 1_000_000  # of matching `target_modules` with the modules' names, which is given up then: some seconds
MAX_LISTS = 16  # of layers
WRAPPED = ".base_layer"  # behind a module's name, as often as PEFT has wrapped it
UNTOLD_VERSION = re.compile(r"dev|rc|a\d|b\d|\+|@")


@dataclasses.dataclass(frozen=True)
class Targets:
    """Which modules have factors: PEFT passes over those of others, with a warning (peft, tuners/tuners_utils.py,
    `check_target_module_exists`, 0.21.2).

    Attributes:
      modules, excluded: ends of the names of modules, or an expression for the whole name; None where nothing is said, and
        where we can't match what is (flags, references back).
      layers: the numbers of the layers, the first number in a module's name; None for all.
      lists: the paths of lists of layers, in front of that number, in the order in which they are tried; empty for any.
    """

    modules: frozenset[str] | Patterns | None = None
    excluded: frozenset[str] | Patterns | None = None
    layers: frozenset[int] | None = None
    lists: tuple[str, ...] = ()

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Targets:
        """What a configuration that `_check` has nothing against says."""
        modules, layers = _names(fields.get("target_modules")), fields.get("layers_to_transform")
        if fields.get("target_modules") == [] and fields.get("target_parameters"):
            modules = frozenset()  # parameters alone; null is what PEFT has for the model's type
        lists = fields.get("layers_pattern") or ()
        lists = (lists,) if isinstance(lists, str) else tuple(lists)
        layers = frozenset([layers] if isinstance(layers, int) else layers or ()) or None
        if len(lists) > MAX_LISTS or not all(re.fullmatch(r"[\w.]{1,100}", each) for each in lists):  # expressions
            layers, lists = None, ()
        return cls(modules, _names(fields.get("exclude_modules")), layers, lists)

    def leaves_out(self, module: str) -> str | None:
        """The field that says that a module has no factors; None where it may have, or where to look takes too long."""
        with contextlib.suppress(PatternError):
            if self.excluded is not None and _is_among(module, self.excluded):
                return "exclude_modules"
            if self.modules is not None and not _is_among(module, self.modules):
                return "target_modules"
            is_named_whole = isinstance(self.modules, frozenset) and module in self.modules
            if self.layers is not None and not is_named_whole:
                lists = [rf"(?:^|.*?\.){each}" for each in self.lists] or [r".*?\.[^.]*"]
                found = filter(None, (re.match(rf"{each}\.(\d{{1,9}})\.", module) for each in lists))
                if (first := next(found, None)) is None or int(first[1]) not in self.layers:
                    return "layers_to_transform"
        return None


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """A LoRA's configuration.

    Attributes:
      r, alpha: of modules that no pattern names.
      rank_pattern, alpha_pattern: by a regular expression for the end of a module's name; the first that fits is meant.
      use_rslora: whether the scaling is alpha / √r, not alpha / r.
      use_dora: whether weights are scaled to a learned norm.
      lora_bias: whether B has a bias, which is added to the base's.
      fan_in_fan_out: whether matrices are said to be (in, out); PEFT itself goes by the module's class.
      target_parameters: ends of the names of parameters that aren't modules.
      modules_to_save: ends of the names of modules that were trained as a whole, each a copy beside the base's own.
      ensure_weight_tying: whether what adapts the embedding adapts a head that is tied to it as one; from PEFT 0.18 on.
      targets: which modules have factors.
      base: `base_model_name_or_path`, as it is.
      version: of PEFT, (major, minor); None where that isn't told, or a version between two releases is.
    """

    r: int = 8
    alpha: float = 8.0
    rank_pattern: Mapping[str, int] = dataclasses.field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = dataclasses.field(default_factory=dict)
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    fan_in_fan_out: bool = False
    target_parameters: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    ensure_weight_tying: bool = False
    targets: Targets = dataclasses.field(default_factory=Targets)
    base: str | None = None
    version: tuple[int, int] | None = None

    def rank(self, module: str) -> int:
        """The rank of a module, or of a parameter."""
        return self._ranks.find(module, self.r)

    def scaling(self, module: str) -> float:
        """What B · A is multiplied by."""
        rank = self.rank(module)
        return self._alphas.find(module, self.alpha) / (math.sqrt(rank) if self.use_rslora else rank)

    @property
    def ties_saved(self) -> bool:
        """Whether an embedding or a head in `modules_to_save` takes its tied one along: PEFT knows both by their names
        (peft, tuners/tuners_utils.py, `_check_tied_modules`, 0.21.2).
        """
        return self.ensure_weight_tying and _names_embedding(self.modules_to_save)

    @functools.cached_property
    def ties_factors(self) -> bool:
        """The same of an embedding or a head that has factors."""
        if not self.ensure_weight_tying or self.ties_saved:
            return False
        named = self.targets.modules
        if isinstance(named, frozenset):
            return _names_embedding(named)
        return named is None or any(_is_among(name, named) for name in EMBEDDINGS)

    def left_out_by(self, module: str) -> str | None:
        """The field by which a module has no factors, unless a parameter, or a tie to the embedding, gives it some."""
        if "" in self._besides:  # any module may have that parameter; so PEFT writes fused experts of `all-linear`
            return None
        end = len(module)
        while module.endswith(WRAPPED, 0, end):
            end -= len(WRAPPED)
        module = module[:end]
        return None if _is_among(module, self._besides) else self.targets.leaves_out(module)

    def alpha_of(self, scaling: float, rank: int) -> float:
        """The alpha that stands in the file for alpha / rank."""
        return next(alpha for alpha in (self.alpha, *self.alpha_pattern.values()) if alpha / rank == scaling)

    @functools.cached_property
    def _besides(self) -> frozenset[str]:
        """Ends of the names of modules that `target_modules` needn't name; empty for a parameter of any module."""
        tied = EMBEDDINGS if self.ties_factors else ()
        return frozenset((*(parameter.rpartition(".")[0] for parameter in self.target_parameters), *tied))

    @functools.cached_property
    def _ranks(self) -> Patterns:
        return Patterns(self.rank_pattern)

    @functools.cached_property
    def _alphas(self) -> Patterns:
        return Patterns(self.alpha_pattern)


def read_config(fields: Mapping[str, Any]) -> tuple[AdapterConfig, list[Problem]]:
    """The configuration, and everything that stands against it; with problems its numbers aren't to be used."""
    problems = [Problem("adapter", CONFIG, message) for message in _check(fields)]
    if problems:
        return AdapterConfig(), problems
    get, saved = fields.get, fields.get("modules_to_save")
    config = AdapterConfig(
        r=get("r", 8),
        alpha=float(get("lora_alpha", 8)),
        rank_pattern=dict(get("rank_pattern") or {}),
        alpha_pattern={pattern: float(value) for pattern, value in (get("alpha_pattern") or {}).items()},
        use_rslora=bool(get("use_rslora")),
        use_dora=bool(get("use_dora")),
        lora_bias=bool(get("lora_bias")),
        fan_in_fan_out=bool(get("fan_in_fan_out")),
        target_parameters=tuple(get("target_parameters") or ()),
        modules_to_save=tuple(name for name in saved if isinstance(name, str)) if isinstance(saved, list) else (),
        ensure_weight_tying=bool(get("ensure_weight_tying")),
        targets=Targets.of(fields),
        base=get("base_model_name_or_path") if isinstance(get("base_model_name_or_path"), str) else None,
        version=_version(get("peft_version")),
    )
    return config, []


def _check(fields: Mapping[str, Any]) -> Iterator[str]:
    """What can't be right, isn't supported, or isn't known."""
    kind = fields.get("peft_type")
    if kind != "LORA":
        yield f"peft_type is {str(kind)[:80]!r}; only LORA is supported"
        return
    for field, (is_right, should) in _SHOULD.items():
        if field in fields and not is_right(fields[field]):
            yield f"{field} is {str(fields[field])[:80]!r}; {should}"
    yield from _check_patterns("rank_pattern", fields.get("rank_pattern"), _is_rank)
    yield from _check_patterns("alpha_pattern", fields.get("alpha_pattern"), is_alpha)
    if (named := fields.get("target_parameters")) is not None and not _is_list(named, str):
        yield "target_parameters should be a list of names"
    for field in ("target_parameters", "modules_to_save"):
        if isinstance(said := fields.get(field), list) and len(said) > MAX_NAMES:
            yield f"{field} has more than {MAX_NAMES:,} names, which can't be meant"
    init = fields.get("init_lora_weights")
    if not any(init is known if isinstance(known, bool | None) else init == known for known in HARMLESS_INITS):
        yield (
            f"init_lora_weights is {str(init)[:80]!r}, which begins with another base than --source; save the adapter with PEFT's "
            "path_initial_model_for_weight_conversion, which makes a plain one of it"
        )
    for field, value in fields.items():
        if field not in USED | HARMLESS | _SHOULD.keys() and not _is_off(value):
            yield f"{field} is {str(value)[:80]!r}; it isn't supported"


def _is_list(value: object, of: type) -> bool:
    return isinstance(value, list) and all(isinstance(each, of) for each in value)


def _names(said: str | Sequence[str] | None) -> frozenset[str] | Patterns | None:
    """What `target_modules` or `exclude_modules` says: names, or an expression for the whole name of a module."""
    if not said or (isinstance(said, str) and said.lower() == "all-linear"):
        return None
    if not isinstance(said, str):
        return frozenset(said)
    try:
        return Patterns({f"^(?:{said})$": True}, TARGET_STEPS)
    except PatternError:
        return None


def _names_embedding(names: Iterable[str]) -> bool:
    return any(name.rpartition(".")[2] in EMBEDDINGS for name in names)


def _is_among(module: str, names: frozenset[str] | Patterns) -> bool:
    if isinstance(names, Patterns):
        return names.find(module, False)
    parts = module.split(".")
    return len(parts) > MAX_PARTS or any(".".join(parts[at:]) in names for at in range(len(parts)))


def _check_patterns(field: str, patterns: object, good: Any) -> Iterator[str]:
    if patterns is None:
        return
    if not isinstance(patterns, Mapping) or len(patterns) > MAX_PATTERNS:
        yield f"{field} should be an object of at most {MAX_PATTERNS:,} patterns"
        return
    if sum(map(len, patterns)) > MAX_TOTAL:
        yield f"{field} has more than {MAX_TOTAL:,} characters of patterns, which can't be meant"
        return
    for pattern, value in patterns.items():
        try:
            parse(pattern)
        except PatternError as e:
            yield f"{field}: {pattern[:80]!r} {e}"
        if not good(value):
            yield f"{field}: {pattern[:80]!r} stands for {str(value)[:80]!r}, which can't be meant"


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_RANK


def is_alpha(value: object) -> TypeGuard[float]:
    """Whether it is a number that products of factors can be scaled by."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 1e-38 < value < 3e38


# what a field should be, where it is there
_SHOULD: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("use_rslora", "use_dora", "lora_bias", "fan_in_fan_out", "ensure_weight_tying"),
        (lambda said: isinstance(said, bool | None), "it should be true or false"),
    ),
    "r": (_is_rank, f"it should be an integer from 1 to {MAX_RANK:,}"),
    "lora_alpha": (is_alpha, "it should be a number above 0 that float32 holds"),
    "bias": (lambda said: said in ("none", "all", "lora_only"), "PEFT knows none, all and lora_only"),
    **dict.fromkeys(
        ("target_modules", "exclude_modules"),
        (lambda said: isinstance(said, str | None) or _is_list(said, str), "it should be a list of names, or an expression"),
    ),
    "layers_pattern": (lambda said: isinstance(said, str | None) or _is_list(said, str), "it should be a name, or a list of them"),
    "layers_to_transform": (lambda said: isinstance(said, int | None) or _is_list(said, int), "it should be a number, or a list of them"),
}  # fmt: skip


def _is_off(value: object) -> bool:
    """Null, false, or empty: the field changes nothing."""
    return value is None or value is False or value in ({}, [], "")


def _version(text: object) -> tuple[int, int] | None:
    """Of a release; versions in between might be before or behind a change."""
    match = re.match(r"(\d{1,4})\.(\d{1,4})", text) if isinstance(text, str) else None
    return None if match is None or UNTOLD_VERSION.search(str(text)) else (int(match[1]), int(match[2]))
