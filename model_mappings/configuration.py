"""The configuration lines of a family: how MaxText's keys and `config.json`'s fields say the same, one fact a line,
read from either side.

    size("base_emb_dim", "hidden_size")                       # the same number
    mapped("mlp_activations", "hidden_act", ACTIVATIONS)      # one value for another
    fixed("decoder_block", "llama2")                          # MaxText's word for the architecture
    only("norm_topk_prob", True, "…", default=False)          # the value that MaxText's layer has, and what another does to the logits

`read` makes MaxText's keys of a `config.json`, and says which of its fields MaxText can't express. `write` makes the
fields of the keys. A field is a path: `rope_parameters.factor`. A field that is absent or null has the line's
`default`, which is that of transformers' configuration class (v5.23.0).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from weightbeam.model_mappings.config import TIE, Config, ConfigError, said_of_tie
from weightbeam.model_mappings.left_out import left_out

NEEDED: Any = object()  # the default of a field that `config.json` must have
Default = Any  # a value, NEEDED, or a function of the part of `config.json` that the line is about
Holds = Callable[[Config], bool]


class MaxTextConfigError(ValueError):
    """A MaxText configuration that isn't one, or that no model of Hugging Face's has."""


def lookup(config: Mapping[str, Any], field: str) -> Any:
    """The value at a path; None where it, or an object on the way, is absent."""
    value: Any = config
    for part in filter(None, field.split(".")):
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


def number(value: Any) -> int | float:
    """A number as MaxText's types want it: whole ones as integers.

    Raises:
      ValueError: not a number, or NaN or infinite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def positive(value: Any) -> int | float:
    """A number above zero, such as the base of a power.

    Raises:
      ValueError: it isn't.
    """
    if (found := number(value)) <= 0:
        raise ValueError(value)
    return found


def flag(value: Any) -> bool:
    """True or false.

    Raises:
      ValueError: neither.
    """
    if not isinstance(value, bool):
        raise ValueError(value)
    return value


def anything(value: Any) -> Any:
    """Any value, as it is."""
    return value


@dataclasses.dataclass(frozen=True)
class Line:
    """One fact. Without a `key` it is about a field that MaxText has no key for; without a `field` `config.json`
    needn't say it.

    Attributes:
      key: MaxText's key.
      field: the path of `config.json`'s field.
      to_key: the key's value for a field's value.
      to_field: the field's value for a key's value.
      default: the field's value where `config.json` hasn't got it.
      find: where the field's value is found instead, if several spellings say it: a function of the configuration and
        of the name under which MaxText runs it.
      limit: what MaxText makes of the model, where it can't express it; None where it can.
      part: the object of `config.json` that all this is about, such as `text_config`; empty for all of it.
      when: whether the line is about a model.
      of: the field's value for all keys, where no single key says it.
      version: the version of MaxText that the line is about; None for all.
      tower: whether the limit is one of a tower's, which matters where the towers are converted.
    """

    key: str | None
    field: str | None
    to_key: Callable[[Any], Any] = anything
    to_field: Callable[[Any], Any] = anything
    default: Default = NEEDED
    find: Callable[[Config, str | None], Any] | None = None
    limit: Callable[[Config, str | None], str | None] | None = None
    part: str = ""
    when: Holds | None = None
    of: Callable[[Mapping[str, Any]], Any] | None = None
    version: str | None = None
    tower: bool = False

    @property
    def path(self) -> str | None:
        """The field's path from the top of `config.json`."""
        return f"{self.part}.{self.field}".lstrip(".") if self.field else None

    @property
    def constant(self) -> bool:
        """Whether the key has one value whatever `config.json` says."""
        return self.key is not None and self.field is None and self.find is None

    def about(self, config: Config) -> Config:
        """The object of `config.json` that the line is about; empty where that is absent."""
        found = lookup(config, self.part)
        around, _, name = self.part.rpartition(".")
        if not isinstance(found, Mapping):
            return Config()
        tied = said_of_tie(lookup(config, around), found) if name == "text_config" else None
        return Config(found if tied is None else {**found, TIE: tied})

    def holds(self, config: Config) -> bool:
        """Whether the line is about this model."""
        return self.when is None or self.when(self.about(config))

    def value(self, config: Config, model: str | None = None) -> Any:
        """The key's value.

        Raises:
          ConfigError: the field is needed and absent, or MaxText has nothing for its value.
        """
        found: Any = None
        try:
            found = self.found(self.about(config), model)
            return self.to_key(found)
        except ConfigError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
            # `number` and its kin say what they didn't take
            shown = e.args[0] if found is None and isinstance(e, ValueError) and e.args else found
            raise ConfigError(
                f"config.json: {self.path or self.key!r} is {shown!r}, for which MaxText has nothing"
            ) from e

    def found(self, about: Config, model: str | None = None) -> Any:
        """The field's value, or its default.

        Raises:
          ConfigError: the field is needed and absent.
        """
        value = self.find(about, model) if self.find else lookup(about, self.field) if self.field else None
        if value is None and self.field:
            value = left_out(about, self.field)
        if value is not None or (self.field is None and self.default is NEEDED):
            return value
        if self.default is NEEDED:
            raise ConfigError(f"config.json has no {self.path!r}")
        return self.default(about) if callable(self.default) else self.default


def size(key: str, field: str, default: Default = NEEDED, times: int = 1, when: Holds | None = None) -> Line:
    """A positive integer, such as a size in elements or a number of layers.

    Args:
      key: MaxText's key.
      field: path of the field, with dots.
      default: its value where `config.json` hasn't got it: a value, or a function of `config.json`; needed unless said.
      times: how many times the field is MaxText's.
      when: whether the line is about a model.

    Returns:
      The line, for a family's `configuration`.

    Example:
      >>> line = size("base_emb_dim", "hidden_size")
      >>> line.value(Config(hidden_size=64)), line.to_field(64)
      (64, 64)
    """

    def share(n: Any) -> int:
        if natural(n) % times:
            raise ValueError(f"{n} isn't a multiple of {times}")
        return n // times

    return Line(key, field, share, lambda n: n * times, default, when=when)


def count(key: str, field: str, default: Default = 0, none: int = 0) -> Line:
    """An integer from 0 on, or null.

    Args:
      key: MaxText's key.
      field: path of the field, with dots.
      default: its value where `config.json` hasn't got it: a value, or a function of `config.json`; needed unless said.
      none: what MaxText says for 0 and null.

    Returns:
      The line.

    Example:
      >>> count("sliding_window_size", "sliding_window", none=-1).value(Config(sliding_window=None))
      -1
    """
    return Line(key, field, lambda n: natural(n) if n else none, lambda n: None if n == none else n, default=default)


def real(key: str, field: str, default: Default = NEEDED, none: float | None = None) -> Line:
    """A number.

    Args:
      key: MaxText's key.
      field: path of the field, with dots.
      default: its value where `config.json` hasn't got it: a value, or a function of `config.json`; needed unless said.
      none: what MaxText says where `config.json` says null, which isn't the default then.

    Returns:
      The line.

    Example:
      >>> real("normalization_layer_epsilon", "rms_norm_eps", 1e-6).value(Config())
      1e-06
    """

    def find(about: Config, model: str | None) -> Any:
        return none if field in about and about[field] is None else about.get(field)

    return Line(
        key,
        field,
        to_key=lambda x: none if x is None else number(x),
        to_field=lambda x: None if x == none and none is not None else float(x),
        default=default,
        find=None if none is None else find,
    )


def same(key: str, field: str, default: Default = NEEDED) -> Line:
    """The same value on both sides, of whatever kind.

    Args:
      key: MaxText's key.
      field: path of the field, with dots.
      default: its value where `config.json` hasn't got it: a value, or a function of `config.json`; needed unless said.

    Returns:
      The line.
    """
    return Line(key, field, lambda value: list(value) if isinstance(value, tuple) else value, default=default)


def truth(key: str, field: str, default: Default = False) -> Line:
    """True or false on both sides.

    Args:
      key: MaxText's key.
      field: path of the field, with dots.
      default: its value where `config.json` hasn't got it.

    Returns:
      The line.
    """
    return Line(key, field, flag, default=default)


def mapped(key: str, field: str, values: Iterable[tuple[Any, Any]], default: Default = NEEDED) -> Line:
    """One value for another.

    Args:
      key: MaxText's key.
      field: path of the field, with dots.
      values: pairs of `config.json`'s and MaxText's; of several of either's the first is written.
      default: its value where `config.json` hasn't got it: a value, or a function of `config.json`; needed unless said.

    Returns:
      The line.

    Example:
      >>> line = mapped("mlp_activations", "hidden_act", [("silu", ["silu", "linear"]), ("swish", ["silu", "linear"])])
      >>> line.value(Config(hidden_act="swish")), line.to_field(["silu", "linear"])
      (['silu', 'linear'], 'silu')
    """
    pairs = list(values)

    def to_key(value: Any) -> Any:
        return next(ours for theirs, ours in pairs if theirs == value)

    def to_field(value: Any) -> Any:
        return next(theirs for theirs, ours in pairs if ours == value)

    return Line(key, field, _known(to_key), _known(to_field), default)


def _known(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def known(value: Any) -> Any:
        try:
            return change(value)
        except StopIteration:
            raise ValueError(value) from None

    return known


def fixed(key: str, value: Any) -> Line:
    """A key that has one value for all models of a kind.

    Args:
      key: MaxText's key.
      value: of it.

    Returns:
      The line.
    """
    return Line(key, None, to_key=lambda _: value)


def derived(
    key: str,
    find: Callable[[Config, str | None], Any],
    field: str | None = None,
    when: Holds | None = None,
    to_field: Any = anything,
) -> Line:
    """A key that several spellings of `config.json`, or MaxText's name of the model, settle.

    Args:
      key: MaxText's key.
      find: the field's value, of `config.json` and the name under which MaxText runs the model.
      field: path of the field that is written, with dots; none unless said.
      when: whether the line is about a model.
      to_field: that field's value for the key's.

    Returns:
      The line.
    """
    return Line(key, field, find=find, to_field=to_field, default=None, when=when)


def written(field: str, value: Any) -> Line:
    """A field that MaxText needn't know and `config.json` should have.

    Args:
      field: path of it, with dots.
      value: that an export writes.

    Returns:
      The line.
    """
    return Line(None, field, default=value)


def copied(field: str, of: Callable[[Mapping[str, Any]], Any]) -> Line:
    """A field that follows from MaxText's keys, and none of them from it.

    Args:
      field: path of it, with dots.
      of: its value, of all keys.

    Returns:
      The line.
    """
    return Line(None, field, of=of)


def only(field: str, value: Any, effect: str, default: Default = None) -> Line:
    """A field of which MaxText's layers know one value.

    Args:
      field: path of it, with dots.
      value: that they know.
      effect: what they make of another, in words.
      default: its value where `config.json` hasn't got it.

    Returns:
      The line.

    Example:
      >>> line = only("mlp_bias", False, "MaxText's layer has no such bias", default=False)
      >>> line.limit(Config(mlp_bias=True), None), line.limit(Config(), None)
      ("mlp_bias is True: MaxText's layer has no such bias", None)
    """

    def limit(about: Config, model: str | None) -> str | None:
        found = lookup(about, field)
        if found is None:  # transformers takes null for false where it asks whether
            found = False if default is True and field in about else default
        return None if found == value else f"{field} is {found!r}: {effect}"

    return Line(None, field, default=value, limit=limit)


def unless(find: Callable[[Config, str | None], str | None]) -> Line:
    """What MaxText can't express.

    Args:
      find: says it in words, of `config.json` and MaxText's name of the model; None where there is nothing.

    Returns:
      The line.
    """
    return Line(None, None, limit=find)


def only_in(version: str, line: Line) -> Line:
    """A line about one version of MaxText.

    Args:
      version: of MaxText, as `--maxtext` names it.
      line: for it.

    Returns:
      The line.
    """
    return dataclasses.replace(line, version=version)


def of_tower(part: str, lines: Iterable[Line]) -> tuple[Line, ...]:
    """What MaxText's tower can't express: told where the towers are converted, by `--multimodal true`.

    Args:
      part: the tower's object of `config.json`, such as `vision_config`; without it nothing is told.
      lines: their fields begin at the object around it, so that what is told names the tower.

    Returns:
      The lines.
    """
    return tuple(dataclasses.replace(line, tower=True, when=lambda about: bool(about.get(part))) for line in lines)


def inside(part: str, lines: Iterable[Line], when: Holds | None = None) -> tuple[Line, ...]:
    """Lines about an object of `config.json`.

    Args:
      part: its path, with dots, such as `text_config`.
      lines: whose fields are in there.
      when: whether they are about a model, by that object; `bool` is where it is there.

    Returns:
      The lines.
    """
    return tuple(
        dataclasses.replace(line, part=f"{part}.{line.part}".rstrip("."), when=when or line.when) for line in lines
    )


@dataclasses.dataclass(frozen=True)
class ConfigReading:
    """What a `config.json` says to MaxText.

    Attributes:
      keys: MaxText's keys.
      limits: what MaxText can't express, what that does to the logits, and the way round it.
    """

    keys: dict[str, Any]
    limits: tuple[str, ...]


def read(lines: Iterable[Line], config: Config, model: str | None = None) -> ConfigReading:
    """MaxText's keys of a `config.json`, for a model that it runs under the name `model`.

    Raises:
      ConfigError: a field is missing, or has a value that no line knows.
    """
    keys: dict[str, Any] = {}
    limits: list[str] = []
    for line in lines:
        try:
            if not line.holds(config):
                continue
            if line.key is not None:
                keys[line.key] = line.value(config, model)
            if line.limit is not None and (limit := line.limit(line.about(config), model)):
                limits.append(limit)
        except ConfigError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
            follows = f" that {line.key or line.path} follows from" if line.key or line.path else ""
            raise ConfigError(f"config.json: a field{follows} makes no sense: {e}") from e
    return ConfigReading(keys, tuple(dict.fromkeys(limits)))


def read_known(lines: Iterable[Line], config: Config) -> dict[str, Any]:
    """MaxText's keys of a `config.json`, without those of fields that are missing or make no sense: the family's table
    names these.
    """
    keys = {}
    for line in lines:
        with contextlib.suppress(ConfigError, AttributeError, TypeError):
            keys |= read([line], config).keys
    return keys


def contradictions(lines: Iterable[Line], keys: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys that have one value for all models of a kind, and another here: `{key: (here, there)}`."""
    wanted = {line.key: line.to_key(None) for line in lines if line.constant and line.key}
    return {key: (keys.get(key), value) for key, value in wanted.items() if keys.get(key) != value}


def write(lines: Iterable[Line], keys: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `config.json` for MaxText's keys.

    Raises:
      MaxTextConfigError: a key has a value that no field can say.
    """
    config: dict[str, Any] = {}
    # what decides whether a line holds is written before it
    lines = sorted(lines, key=lambda line: line.when is not None)
    for line in lines:
        if line.path is None or not line.holds(Config(config)):
            continue
        if line.key is None:
            if (value := line.default if line.of is None else line.of(keys)) is not None:
                put(config, line.path, value)
            continue
        value = keys.get(line.key)
        try:
            field = line.to_field(value)
            if isinstance(field, float):
                number(field)  # no JSON says NaN, or an infinity
        except (KeyError, TypeError, ValueError) as e:
            raise MaxTextConfigError(f"{line.key} is {value!r}, for which config.json has no {line.path}") from e
        put(config, line.path, field)
    return config
