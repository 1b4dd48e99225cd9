"""What a table may ask: the model's `config.json`, and the layout that the user wants."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

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


class ConfigError(ValueError):
    """`config.json` lacks a field that the family's table needs, or it holds something else."""

    def __init__(self, message: str):
        super().__init__(message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]} …")


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
        raise ConfigError(f"config.json has no {key!r}")

    def part(self, key: str) -> Config:
        """A nested object.

        Args:
          key: of it, such as `text_config`.

        Returns:
          The object, which explains itself, too.

        Raises:
          ConfigError: absent, or not an object.
        """
        value = self[key]
        if not isinstance(value, dict):
            raise ConfigError(f"config.json: {key!r} should be an object, but is {value!r}")
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
            raise ConfigError(f"config.json: {key!r} should be a positive integer, but is {value!r}")
        if value > (most := MAX_COUNT.get(key, MAX_SIZE)):
            raise ConfigError(f"config.json: {key!r} is {value}; more than {most:,} can't be meant")
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
            raise ConfigError(f"config.json: {key!r} should be true or false, but is {value!r}")
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
