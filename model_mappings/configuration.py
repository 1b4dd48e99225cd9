"""The configuration lines of a family: how MaxText's keys and `config.json`'s fields say the same, one fact a line, read from either side.

    same("base_emb_dim", "hidden_size")                       # the same value
    same("base_num_decoder_layers", "num_hidden_layers")
    mapped("mlp_activations", "hidden_act", ACTIVATIONS)      # one value for another
    fixed("decoder_block", "llama2")                          # MaxText's word for the architecture
    only("attention_bias", False, "…")                        # what MaxText can't express, and what it does to the logits

`read` makes MaxText's keys of a `config.json`, and says which of its fields MaxText can't express. `write` makes the fields of
the keys. A field is a path: `rope_parameters.factor`, `text_config.hidden_size`. A field that is absent or null has the line's
`default`, which is that of transformers' configuration class.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from weightbeam.model_mappings.config import Config, ConfigError


class Needed:
    """The default of a field that `config.json` must have."""


NEEDED = Needed()
Default = Any  # a value, NEEDED, or a function of the configuration


class MaxTextConfigError(ValueError):
    """A MaxText configuration that `config.json` can't express, or that isn't one."""


def lookup(config: Mapping[str, Any], field: str) -> Any:
    """The value at a path; None where it, or an object on the way, is absent."""
    value: Any = config
    for part in field.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def put(config: dict[str, Any], field: str, value: Any) -> None:
    """Sets the value at a path, making the objects on the way."""
    *parts, last = field.split(".")
    for part in parts:
        config = config.setdefault(part, {})
    config[last] = value


def natural(value: Any) -> int:
    """A size.

    Raises:
      ValueError: not a positive integer.
    """
    if type(value) is not int or value < 1:
        raise ValueError(value)
    return value


def plain(value: Any) -> Any:
    """A number as both sides write it: whole floats as integers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclasses.dataclass(frozen=True)
class Line:
    """One fact. Without a `key` MaxText knows only one value of the field; without a `field` `config.json` needn't say it.

    Attributes:
      key: MaxText's key.
      field: the path of `config.json`'s field.
      to_key: the key's value for a field's value.
      to_field: the field's value for a key's value.
      default: the field's value where `config.json` hasn't got it.
      effect: for a line without a key: what another value of the field does to the logits, and the way round it.
      part: the object of `config.json` that `field` and `default` are about, such as `text_config`; empty for all of it.
      when: whether the line is about a model, by that object; for keys that different models take from different fields.
    """

    key: str | None
    field: str | None
    to_key: Callable[[Any], Any] = plain
    to_field: Callable[[Any], Any] = plain
    default: Default = NEEDED
    effect: str = ""
    part: str = ""
    when: Callable[[Config], bool] | None = None

    def holds(self, config: Config) -> bool:
        """Whether the line is about this model."""
        return self.when is None or self.when(self.within(config))

    def within(self, config: Config) -> Config:
        """The object of `config.json` that the line is about."""
        if not self.part:
            return config
        found = lookup(config, self.part)
        return Config(found if isinstance(found, Mapping) else {})

    def found(self, config: Config) -> Any:
        """The field's value, or its default.

        Raises:
          ConfigError: the field is needed and absent.
        """
        assert self.field is not None
        config = self.within(config)
        value = lookup(config, self.field)
        if value is not None:
            return value
        if self.default is NEEDED:
            raise ConfigError(f"config.json has no {self.field!r}")
        return self.default(config) if callable(self.default) else self.default

    def value(self, config: Config) -> Any:
        """The key's value.

        Raises:
          ConfigError: the field is needed and absent, or MaxText has nothing for its value.
        """
        if self.field is None:
            return self.to_key(None)
        found = self.found(config)
        try:
            return self.to_key(found)
        except (KeyError, TypeError, ValueError) as e:
            raise ConfigError(f"config.json: {self.field!r} is {found!r}, for which MaxText has nothing") from e


def count(key: str, field: str, default: Default = 0) -> Line:
    """An integer from 0 on; 0 where the field is absent."""
    return Line(key, field, to_key=lambda n: n and natural(n), default=default)


def same(key: str, field: str, default: Default = NEEDED) -> Line:
    """The same value on both sides."""
    return Line(key, field, default=default)


def size(key: str, field: str, default: Default = NEEDED, times: int = 1, when: Callable[[Config], bool] | None = None) -> Line:
    """A positive integer; MaxText's is `times` smaller."""
    return Line(key, field, to_key=lambda n: _share(natural(n), times), to_field=lambda n: n * times, default=default, when=when)


def _share(n: int, times: int) -> int:
    if n % times:
        raise ValueError(f"{n} isn't a multiple of {times}")
    return n // times


def fixed(key: str, value: Any) -> Line:
    """A key that has one value for all models of a kind."""
    return Line(key, None, to_key=lambda _: value)


def inside(part: str, lines: Iterable[Line]) -> tuple[Line, ...]:
    """The lines, of an object of `config.json`."""
    return tuple(dataclasses.replace(line, part=f"{part}.{line.part}".rstrip(".")) for line in lines)


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a `config.json` says to MaxText.

    Attributes:
      keys: MaxText's keys.
      limits: what MaxText can't express, what that does to the logits, and the way round it.
    """

    keys: dict[str, Any]
    limits: tuple[str, ...]


def read(lines: Iterable[Line], config: Config) -> Reading:
    """MaxText's keys of a `config.json`.

    Raises:
      ConfigError: a field is missing, or has a value that no line knows.
    """
    keys: dict[str, Any] = {}
    limits: list[str] = []
    for line in lines:
        if line.holds(config) and line.key is not None:
            keys[line.key] = line.value(config)
    return Reading(keys, tuple(limits))


def read_known(lines: Iterable[Line], config: Config) -> dict[str, Any]:
    """MaxText's keys of a `config.json`, without those of fields that are missing or make no sense: the family's table names these."""
    keys = {}
    for line in lines:
        with contextlib.suppress(ConfigError):
            keys |= read([line], config).keys
    return keys
