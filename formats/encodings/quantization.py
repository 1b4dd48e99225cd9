"""What a checkpoint says about its quantisation, wherever its writer put it. It settles what headers can't tell; no
more.
"""

from __future__ import annotations

import dataclasses
import functools
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from weightbeam.formats.safetensors import AWQ_CONFIG, GPTQ_CONFIG, HF_QUANT_CONFIG, QUANT_CONFIGS
from weightbeam.model_mappings.config import MAX_SIZE
from weightbeam.model_mappings.plan import Problem

AUTOROUND = ("auto-round", "intel/auto-round")
# AutoRound's `packing_format`s that are another one's: versions of GPTQ, and AWQ (intel/auto-round,
# auto_round/inference/backend.py; vLLM takes them so, quantization/auto_round.py)
VERSIONS = {"auto_round:auto_gptq": "gptq", "auto_round:gptqmodel": "gptq_v2"}
PACKINGS = dict.fromkeys(VERSIONS, "gptq") | {"auto_round:auto_awq": "awq"}
# Where older and multimodal releases have it (llm-compressor before 2025; Kimi-K2.5, Qwen3.5; AutoGPTQ and AutoAWQ
# before 2024).
PLACES = (
    ("quantization_config",), ("text_config", "quantization_config"), ("compression_config",),
    (HF_QUANT_CONFIG, "quantization"), (GPTQ_CONFIG,), (AWQ_CONFIG,),
)  # fmt: skip

# Fields that settle values where no tensor does (`desc_act`: g_idx), by the names that writers give each (`w_bit`,
# `q_group_size`: AutoAWQ); a packing by the version that it is.
SETTLING = {
    "quant_algo": ("quant_algo",),
    "checkpoint_format": ("checkpoint_format", "format", "packing_format"),
    "bits": ("bits", "w_bit"),
    "group_size": ("group_size", "q_group_size"),
    "sym": ("sym",),
}


def is_size(value: object, least: int = 1) -> TypeGuard[int]:
    """Whether a field of a config is a size that an axis, a block or a group can have."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MAX_SIZE


def _folded(value: object) -> object:
    """A field's value; a text in lower case, or as the number that it is."""
    if not isinstance(value, str):
        return value
    return int(value) if value.isdecimal() else value.lower()


def _list(value: Any, field: str) -> list[Mapping[str, Any]]:
    """The objects that a field of an object holds, in a list or by names; none where it isn't such a field."""
    found = value.get(field) if isinstance(value, Mapping) else None
    found = list(found.values()) if isinstance(found, Mapping) else found
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


@dataclasses.dataclass(frozen=True)
class Quantization:
    """`quantization_config`, or what stands for it.

    Attributes:
      fields: its content; empty where the checkpoint says nothing.
      file, place: where it stands, for messages.
      block: rows and columns of a block, where one size fits all shapes (`fp8.find_block`).
    """

    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    file: str = "config.json"
    place: str = "quantization_config"
    block: tuple[int, int] | None = None

    @functools.cached_property
    def said_of_modules(self) -> frozenset[tuple[str, bool]]:
        """The switches that rules for some modules turn, of GPTQModel's `dynamic` or AutoRound's `extra_config`."""
        rules = [given for name in ("dynamic", "extra_config") if isinstance(given := self.fields.get(name), Mapping)]
        turned = [rule for given in rules for rule in given.values() if isinstance(rule, Mapping)]
        return frozenset((field, on) for rule in turned for field, on in rule.items() if isinstance(on, bool))

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Quantization:
        """The first that a checkpoint's config holds."""
        return next(cls.all_of(config), cls())

    @classmethod
    def all_of(cls, config: Mapping[str, Any]) -> Iterator[Quantization]:
        """All that a checkpoint's config holds, the one that is read first."""
        for path in PLACES:
            found: Any = config
            for key in path:
                found = found.get(key) if isinstance(found, Mapping) else None
            if isinstance(found, Mapping) and found:
                if path[0] in QUANT_CONFIGS:
                    yield cls(found, path[0], ".".join(path[1:]) or path[0])
                else:
                    yield cls(found, place=".".join(path))

    @classmethod
    def contradictions(cls, config: Mapping[str, Any]) -> Iterator[Problem]:
        """What a checkpoint's config says twice, and otherwise, of what settles values: in one place, or in one that isn't
        the first.
        """
        first, *others = tuple(cls.all_of(config)) or (cls(),)
        for place in (first, *others):
            for said in map(place.said, SETTLING):
                meant, *again = [_folded(value) for value in said.values()] or [None]
                if any(value != meant for value in again):
                    both = " and ".join(f"{name} {reprlib.repr(place.fields[name])}" for name in said)
                    yield Problem("quantised", place.file, f"{place.where} says {both}; remove the wrong one")
        for other in others:
            theirs = other._settling()
            if unlike := [
                f"{field} {reprlib.repr(said)}, not {reprlib.repr(theirs[field])}"
                for field, said in first._settling().items()
                if field in theirs and _folded(said) != _folded(theirs[field])
            ]:
                message = f"{first.where} says {' and '.join(unlike)}, as {other.where} does; make them alike, or remove the wrong one"
                yield Problem("quantised", first.file, message)

    def _settling(self) -> dict[str, Any]:
        """What it says of the fields that settle values."""
        # ModelOpt's is a tool, which writes FP8 as others do
        found: dict[str, Any] = {} if self.method in (None, "modelopt") else {"quant_method": self.method}
        return found | {name: next(iter(said.values())) for name in SETTLING if (said := self.said(name))}

    def said(self, name: str) -> dict[str, Any]:
        """What it says of one of `SETTLING`, by the names of the fields that say it; the first is meant."""
        found = {field: self.fields[field] for field in SETTLING[name] if self.fields.get(field) not in (None, "")}
        if (packing := found.pop("packing_format", None)) is not None and (version := VERSIONS.get(str(packing))):
            found["packing_format"] = version
        return found

    @staticmethod
    def check(config: Mapping[str, Any]) -> Iterator[Problem]:
        """The places of a checkpoint's config that hold something else than fields."""
        for path in PLACES:
            *above, last = path
            found: Any = config
            for key in above:
                found = found.get(key) if isinstance(found, Mapping) else None
            value = found.get(last) if isinstance(found, Mapping) else None
            if value is not None and not isinstance(value, Mapping):
                message = f"{'.'.join(path)} should be an object, is {reprlib.repr(value)}"
                yield Problem("quantised", "config.json", message)

    @property
    def where(self) -> str:
        """Its place and file, for messages."""
        return self.file if self.place == self.file else f"{self.place} of {self.file}"

    @property
    def method(self) -> str | None:
        """`quant_method` in lower case; `modelopt` for all that ModelOpt writes, which may name an algorithm instead.

        AutoRound's is whatever it packs codes as. The files of AutoGPTQ and AutoAWQ have no such field; AWQ's `w_bit`
        may stand in either (vLLM 0.11, quantization/awq.py).
        """
        method = self.fields.get("quant_method")
        if method is None and self.file in (GPTQ_CONFIG, AWQ_CONFIG):
            return "awq" if self.file == AWQ_CONFIG or "w_bit" in self.fields else "gptq"
        if method is None:
            return "modelopt" if "quant_algo" in self.fields else None
        if str(method).lower() in AUTOROUND and self.fields.get("data_type") in (None, "int"):
            method = PACKINGS.get(str(self.fields.get("packing_format")), method)
        return "modelopt" if str(method).lower().startswith("modelopt") else str(method).lower()

    @property
    def groups(self) -> tuple[Mapping[str, Any], ...]:
        """compressed-tensors' and ModelOpt's groups of modules that are quantised alike."""
        return tuple(_list(self.fields, "config_groups"))

    @property
    def turned(self) -> bool:
        """Whether compressed-tensors turns activations while the model computes: `transform_config`, at places that
        aren't the weights' own (vllm-project/compressed-tensors 0.20.0, transform/transform_args.py). The weights alone
        are another model then.
        """
        schemes = _list(self.fields.get("transform_config"), "config_groups")
        return any(
            not str(place.get("location")).startswith("weight_")
            for scheme in schemes
            for place in _list(scheme, "apply")
        )

    def weights(self, field: str) -> Any:
        """A field of the groups' `weights`, such as `num_bits`, where all groups say the same; else None."""
        values = [
            weights[field]
            for group in self.groups
            if isinstance(weights := group.get("weights"), Mapping) and weights.get(field) is not None
        ]
        return values[0] if values and all(value == values[0] for value in values) else None

    def formats(self) -> frozenset[str]:
        """Every name of a format in it: compressed-tensors' `format`, of groups and of sparsity too, and ModelOpt's
        `quant_algo`.
        """
        return frozenset(str(value).lower() for value in self._formats() if value)

    def _formats(self) -> Iterator[Any]:
        yield from (self.fields.get("format"), self.fields.get("quant_algo"))
        yield from (group.get("format") for group in self.groups)
        if isinstance(sparsity := self.fields.get("sparsity_config"), Mapping):
            yield sparsity.get("format")
        layers = self.fields.get("quantized_layers")
        if isinstance(layers, Mapping):
            yield from (layer.get("quant_algo") for layer in layers.values() if isinstance(layer, Mapping))
