"""Keywords of the API: the command line's options, by the same names, with the same defaults, checked alike."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import yaml

from weightbeam.formats.storage import StorageError, open_store
from weightbeam.pipelines.arguments.options import add_conversion
from weightbeam.pipelines.arguments.parser import spelled
from weightbeam.pipelines.errors import Refused
from weightbeam.transforms.mesh import Rules, RulesError, model_rules, read_rules
from weightbeam.transforms.options import Options

Function = TypeVar("Function", bound=Callable[..., Any])


class OptionKeywords(TypedDict, total=False):
    """The options of a conversion as keywords; `weightbeam convert --help` explains each."""

    scan_layers: bool
    param_scan_axis: int
    save_dtype: str
    mesh: str | Sequence[str]
    sharding_rules: str | Path | Mapping[str, Any] | Sequence[Any] | None
    maxtext_model: str | None
    vocab_size: int | None
    mtp: bool
    multimodal: bool
    allow_links: bool
    check_source: str
    use_ocdbt: bool
    use_zarr3: bool
    compression: str
    unit_bytes: int | str
    step: int
    lora: str | Sequence[str]
    adapter_only: bool
    virtual: bool
    family: str | None
    full_paths: bool | None


def option_keywords(args: argparse.Namespace) -> dict[str, Any]:
    """The options of a conversion that a command line sets."""
    return {name: value for name in OptionKeywords.__annotations__ if (value := getattr(args, name, None)) is not None}


def takes_options(function: Function) -> Function:
    """Spells `**options` out in a function's signature, for `help()` and a notebook's completion."""
    signature = inspect.signature(function)
    own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default)
        for field in dataclasses.fields(Options)
    ]
    function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return function


def keywords_of(args: argparse.Namespace, function: Callable[..., Any]) -> dict[str, Any]:
    """The keywords of a function that a command line sets: its options by the same name. What isn't given is left to
    the function's default.
    """
    known = inspect.signature(function).parameters
    return {
        name: value
        for name, value in vars(args).items()
        if name in known and (value is not None or known[name].default is inspect.Parameter.empty)
    }


def read_options(given: Mapping[str, Any]) -> Options:
    """The options of a conversion that keywords ask for.

    Raises:
      Refused: a value can't be meant, or the file of sharding rules can't be read.
      TypeError: there is no such option.
    """
    return Options(**check_options_of(given, given.get("maxtext_model")))


def check_options_of(given: Mapping[str, Any], model: str | None) -> dict[str, Any]:
    """Options as keywords ask for them, each checked as the command line checks it; those that are None are left out.

    Args:
      given: by the names of the options.
      model: the MaxText model whose sharding rules are changed.

    Raises: as `read_options`.
    """
    parser = argparse.ArgumentParser(add_help=False)
    add_conversion(parser)
    actions = {action.dest: action for action in parser._actions}
    known = [field.name for field in dataclasses.fields(Options)]
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise TypeError(f"{name!r} isn't an option" + (f"; did you mean {near[0]!r}?" if near else ""))
        if value is not None:
            match name:
                case "sharding_rules":
                    values[name] = sharding_rules(value, model)
                case "lora":
                    values[name] = read_loras(value) or ()
                case _:
                    values[name] = check_value(actions[name], value)
    return values


def arguments_of(options: Options) -> list[str]:
    """The command line's options that ask for the same, those at their defaults left out; quoted for a shell."""
    arguments = []
    for field in dataclasses.fields(Options):
        value = getattr(options, field.name)
        if value == field.default:
            continue
        match field.name:
            case "sharding_rules":
                values = ["FILE"]
            case "mesh":
                values = list(value)
            case "lora":
                values = [url if weight == 1 else f"{url},{weight:g}" for url, weight in value]
            case _:
                values = [value]
        arguments += [shlex.join(spelled(field.name, each)) for each in values]
    return arguments


def check_value(action: argparse.Action, value: object) -> Any:
    """A keyword's value as the command line would have read it.

    Raises:
      Refused: it can't be meant.
    """
    if isinstance(action, argparse._AppendAction):
        return (value,) if isinstance(value, str) else tuple(value)  # type: ignore[arg-type]
    try:
        read = action.type(str(value)) if callable(action.type) else str(value)
    except argparse.ArgumentTypeError as e:
        raise Refused(f"{action.dest}={e}") from e
    if action.choices and read not in action.choices:
        raise Refused(f"{action.dest}={value!r} should be {' or '.join(action.choices)}")
    return read


def read_loras(given: str | Sequence[str] | None) -> tuple[tuple[str, float], ...] | None:
    """The adapters of a keyword `lora`, one or several; None where there is none."""
    return tuple(map(read_lora, [given] if isinstance(given, str) else given)) if given else None


def read_lora(text: str) -> tuple[str, float]:
    """`PATH[,weight]`: where an adapter is, absolute, and what its deltas are multiplied by.

    Raises:
      Refused: there is no such store, or nobody can mean that weight.
    """
    path, _, last = text.rpartition(",")
    try:
        url, weight = (path, float(last)) if path else (text, 1.0)
    except ValueError:  # a path with a comma
        url, weight = text, 1.0
        if Path(path).is_dir() and not Path(text).is_dir():
            raise Refused(f"--lora={text}: {last} isn't a weight, which is a number, as in {path},0.5") from None
    if not 0 < abs(weight) < math.inf:
        raise Refused(f"--lora={text}: the weight should be a number other than 0")
    try:
        return open_store(url).url, weight
    except StorageError as e:
        raise Refused(f"--lora={e}") from e


class _MaxTextLoader(yaml.SafeLoader):
    """YAML with the tags that Python's dump leaves: a tuple is a list, an enum its value. Nothing is made but these."""


def _plain(loader: yaml.SafeLoader, tag: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return loader.construct_scalar(node)
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    values = loader.construct_sequence(node, deep=True)  # type: ignore[arg-type]
    return values[0] if tag.startswith("object/apply:") and len(values) == 1 else values


_MaxTextLoader.add_multi_constructor("tag:yaml.org,2002:python/", _plain)


def parse_maxtext_yaml(text: str | bytes, where: str) -> dict[str, Any]:
    """The keys that a MaxText configuration says, a run's own `config.yml` too; `where` it is, for messages.

    Raises:
      Refused: it is no YAML, or says no keys.
    """
    try:
        given = yaml.load(text, _MaxTextLoader)
    except (UnicodeDecodeError, yaml.YAMLError) as e:
        raise Refused(f"{where}: no YAML: {e}") from e
    if not isinstance(given, dict):
        raise Refused(f"{where}: it should hold keys and values, but is {type(given).__name__}")
    return given


def read_maxtext_yaml(option: str, file: str) -> dict[str, Any]:
    """The keys that a file of MaxText's (`.yml`) says, over those of the file beside it that its `base_config` names;
    `option` is what named it, for messages.

    Raises:
      Refused: it can't be read, or says no keys.
    """
    try:
        given = parse_maxtext_yaml(Path(file).read_bytes(), f"{option}={file}")
    except OSError as e:
        raise Refused(f"{option}={file}: {e.strerror}") from e
    base = Path(file).parent / str(given.pop("base_config", ""))  # MaxText's own base.yml isn't there
    if base.is_file() and base.resolve() != Path(file).resolve():
        return read_maxtext_yaml(option, str(base)) | given
    return given


def sharding_rules(given: object, model: str | None) -> Rules | None:
    """The rules that `sharding_rules` asks for, for the MaxText model that was named; None without any.

    Args:
      given: a file, or what such a file holds.

    Raises:
      Refused: the file can't be read, or doesn't hold rules.
    """
    if given is None:
        return None
    if not isinstance(given, str | Path):
        try:
            return read_rules(given, model_rules(model))
        except RulesError as e:
            raise Refused(f"--sharding_rules: {e}") from e
    try:
        text = Path(given).read_text(encoding="utf-8")
        try:
            rules = json.loads(text)
        except ValueError:
            rules = yaml.safe_load(text)
        return read_rules(rules, model_rules(model))
    except OSError as e:
        raise Refused(f"--sharding_rules={given}: {e.strerror}") from e
    except yaml.MarkedYAMLError as e:
        where = f", line {e.problem_mark.line + 1}" if e.problem_mark else ""
        raise Refused(f"--sharding_rules={given}: neither JSON nor YAML: {e.problem or e}{where}") from e
    except (RulesError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise Refused(f"--sharding_rules={given}: {e}") from e
