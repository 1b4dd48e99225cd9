"""What a table may ask: the model's `config.json`, and the layout that the user wants."""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from weightbeam.model_mappings.left_out import left_out
from weightbeam.model_mappings.versions import DEFAULT

MAX_SIZE = 2**31 - 1  # of an axis
MAX_MESSAGE = 1000  # characters: it quotes what it found
MAX_COUNT = {  # of what has tensors of its own
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "num_layers", "first_k_dense_replace", "depth", "encoder_layers"), 2_000
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 100_000),
}
# where a text model's sizes may stand
TEXT_SECTIONS = ((), ("text_config",), ("thinker_config",), ("thinker_config", "text_config"))
QUANTIZATIONS = ("quantization_config", "compression_config")
TIE = "tie_word_embeddings"
NEXTN = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")  # DeepSeek, GLM, Kimi; Qwen 3.5; others


def text_parts(config: Mapping[str, Any]) -> list[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """The objects of `config.json` that say what the text model is, outermost first, and where each stands."""
    found = []
    for section in TEXT_SECTIONS:
        part: Any = config
        for key in section:
            part = part.get(key) if isinstance(part, Mapping) else None
        if isinstance(part, Mapping):
            found.append((section, part))
    return found


def said_of_tie(config: Mapping[str, Any], text: Mapping[str, Any]) -> Any:
    """What a model that has a `text_config` says of whether its head is the embedding; None for nothing.

    Args:
      config: the object around it, which says so.
      text: the `text_config`, which stands in; Llama 4's alone counts, for its language model ties its own head
        (transformers v5.23.0, modeling_llama4.py).

    Example:
      >>> said_of_tie({"tie_word_embeddings": True, "model_type": "llama4"}, {"tie_word_embeddings": False})
      False
    """
    inner = text.get(TIE)
    return inner if config.get("model_type") == "llama4" else config.get(TIE, inner)


class ConfigError(ValueError):
    """`config.json` lacks a field that the family's table needs, or it holds something else."""

    def __init__(self, message: str):
        super().__init__(message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]} …")


T = TypeVar("T")
_FOUND: contextvars.ContextVar[dict[str, None] | None] = contextvars.ContextVar("faults", default=None)


def _noted(message: str) -> ConfigError:
    """The error of a field, which `faults_of` has heard of."""
    error = ConfigError(message)
    if (found := _FOUND.get()) is not None:
        found[str(error)] = None
    return error


def _fault(message: str, instead: T) -> T:
    """Raises ConfigError; while `faults_of` reads, `instead` stands in for the value."""
    error = _noted(message)
    if _FOUND.get() is None:
        raise error
    return instead


def faults_of(*readers: Callable[[], object]) -> list[str]:
    """Every fault of a `Config`'s fields that functions meet which read it, not the first alone.

    Args:
      readers: called one after the other; what one raises ends it, for it may follow from what stood in for a fault.

    Returns:
      The messages, each once, in the order in which they were met.

    Example:
      >>> c = Config(hidden_size=0, tie_word_embeddings="no")
      >>> faults_of(lambda: (c.size("hidden_size"), c.flag("tie_word_embeddings")), lambda: c["vocab_size"] + "")
      ["config.json: 'hidden_size' should be a positive integer, but is 0", \
"config.json: 'tie_word_embeddings' should be true or false, but is 'no'", "config.json has no 'vocab_size'"]
    """
    found: dict[str, None] = {}
    token = _FOUND.set(found)
    try:
        for read in readers:
            try:
                read()
            except MemoryError:
                raise
            except Exception:
                continue
    finally:
        _FOUND.reset(token)
    return list(found)


class Config(dict):
    """`config.json` as a dict that explains itself when a field is missing or isn't what it should be.

    Example:
      >>> c = Config(hidden_size=64, text_config={"num_hidden_layers": 2})
      >>> c.size("hidden_size"), c.part("text_config").size("num_hidden_layers"), c.count("num_experts")
      (64, 2, 0)
      >>> c["vocab_size"]
      Traceback (most recent call last):
      weightbeam.model_mappings.config.ConfigError: config.json has no 'vocab_size'
    """

    def __missing__(self, key: str) -> object:
        return _fault(f"config.json has no {key!r}", 1)

    def part(self, key: str) -> Config:
        """A nested object.

        Args:
          key: of it, such as `text_config`.

        Returns:
          The object, which explains itself, too.

        Raises:
          ConfigError: absent, or not an object.
        """
        if key not in self:
            raise _noted(f"config.json has no {key!r}")
        value = self[key]
        if not isinstance(value, dict):
            raise _noted(f"config.json: {key!r} should be an object, but is {value!r}")
        return Config(value)

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer.

        Args:
          key: of the field.
          default: stands in for a field that is absent or null, if transformers has no size of its own for one that is
            absent (`left_out`).

        Returns:
          The size, in elements of an axis or in layers.

        Raises:
          ConfigError: absent without a default, or not a positive integer.
        """
        value = self.get(key, left_out(self, key))
        if value is None:
            value = self[key] if default is None and key not in self else default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            return _fault(f"config.json: {key!r} should be a positive integer, but is {value!r}", default or 1)
        if value > (most := MAX_COUNT.get(key, MAX_SIZE)):
            return _fault(f"config.json: {key!r} is {value}; more than {most:,} can't be meant", default or 1)
        return value

    def count(self, key: str) -> int:
        """A non-negative integer.

        Args:
          key: of the field.

        Returns:
          The count; 0 where the field is null, or absent and transformers has no size for it.

        Raises:
          ConfigError: it is anything else.
        """
        value = self.get(key, left_out(self, key))
        return 0 if value is None or (value == 0 and type(value) is int) else self.size(key)

    def flag(self, key: str) -> bool:
        """True or false.

        Args:
          key: of the field.

        Returns:
          What it says; false where it is absent or null.

        Raises:
          ConfigError: neither.
        """
        value = self.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            return _fault(f"config.json: {key!r} should be true or false, but is {value!r}", False)
        return value


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the arrays should be laid out: everything besides `config.json` that a table depends on.

    Attributes:
      scan: layers of one kind stacked in one array (MaxText's `scan_layers`), or an array for each layer.
      scan_axis: where the stacked axis goes (MaxText's `param_scan_axis`); the last place where an array has fewer
        axes.
      vocab: rows of MaxText's embedding; None leaves the number to the family.
      mtp: convert the multi-token-prediction layers too.
      multimodal: convert the vision and audio towers too (MaxText's `use_multimodal`).
      model: the MaxText model, where `config.json` can't settle it.
      maxtext: the version of MaxText that has the layout.
      shapes: of the checkpoint's tensors, by name; a table may ask where releases spell a model in two ways.

    Example:
      >>> layout = Layout(scan=False, shapes={"lm_head.weight": (50, 24)})
      >>> "lm_head.weight" in layout.names
      True
    """

    scan: bool = True
    scan_axis: int = 1
    vocab: int | None = None
    mtp: bool = False
    multimodal: bool = False
    model: str | None = None
    maxtext: str = DEFAULT
    shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    @property
    def names(self) -> Collection[str]:
        """The checkpoint's tensors."""
        return self.shapes
