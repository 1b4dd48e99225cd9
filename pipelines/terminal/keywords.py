"""Keywords of the API: the command line's options, by the same names, with the same defaults, checked alike."""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import math
import os
import shlex
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml

from weightbeam.formats.storage import StorageError, open_store, read_named
from weightbeam.formats.storage.strict_json import JsonError, parse_json
from weightbeam.formats.storage.strict_yaml import parse_yaml
from weightbeam.model_mappings.meant import did_you_mean
from weightbeam.pipelines.terminal.arguments.parser import spelled
from weightbeam.pipelines.terminal.errors import Refusals, Refused
from weightbeam.pipelines.terminal.maxtext_file import MaxTextLoader
from weightbeam.pipelines.terminal.wording import in_python
from weightbeam.transforms.cutting.mesh import Rules, RulesError, model_rules, read_rules
from weightbeam.transforms.planning.options import ConvertOptions, Option, Unsaid, options_of
from weightbeam.transforms.planning.values import LISTS, dtype_name

Kind = TypeVar("Kind")
Result = TypeVar("Result")


def takes(**kinds: type) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Has a function take options as keywords, spelled out in its signature and its docstring. It gets them as values,
    by the names of `kinds`, each read and checked as the command line would.

        @takes(asked=ExportOptions, how=ToHub)
        def export(source: str, output: str, *, asked: ExportOptions, how: ToHub, progress: bool = True) -> Exported:

        export("ckpt", "out", save_dtype="bf16", resume=True)
    """

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        signature = inspect.signature(function)
        own = [parameter for name, parameter in signature.parameters.items() if name not in kinds]
        by_name = {parameter.name: parameter for parameter in own}
        first = [parameter for parameter in own if parameter.kind is not parameter.KEYWORD_ONLY]
        options = {each.name: each for kind in kinds.values() for each in options_of(kind)}

        @functools.wraps(function)
        def call(*places: Any, **given: Any) -> Result:
            args = [_read_own(*each) for each in zip(first, places, strict=False)] + [*places[len(first) :]]
            mine = {
                name: _read_own(by_name[name], value) if name in by_name else value
                for name, value in given.items()
                if name in signature.parameters
            }
            said = {name: value for name, value in given.items() if name not in mine}
            check_known(said, [*options, *(each.name for each in own)])
            return function(*args, **mine, **_values(kinds, mine, said))

        call.__signature__ = signature.replace(parameters=_spelled_out(own, options.values()))  # type: ignore[attr-defined]
        call.__doc__ = _with_options(str(function.__doc__), options.values())
        return call

    return decorate


def _read_own(parameter: inspect.Parameter, value: Any) -> Any:
    """The value of a parameter that is no option. Raises Refused: a place that is empty, or no path; Beam's options
    that are no texts.
    """
    value, kinds = _as_text(value), str(parameter.annotation).split(" | ")
    if kinds == ["Sequence[str]"]:
        texts = [*value] if isinstance(value, Iterable) and not isinstance(value, str) else [None]
        if not _is_texts(texts):
            raise Refused(f"{parameter.name}={value!r} should be a list of texts")
        return texts
    is_place = "str" in kinds and "bool" not in kinds
    if not is_place or value is None or any(each.__name__ in kinds for each in type(value).__mro__):
        if is_place and value == "" and parameter.default is None:
            raise Refused(f"{parameter.name}={value!r} names nothing; leave it out")
        return value
    return as_place(parameter.name, value)


def as_place(name: str, value: Any) -> str:
    """The text of a place, by the name of its parameter.

    Raises:
      Refused: it is no path, URL or name.
    """
    if isinstance(text := _as_text(value), str):
        return text
    raise Refused(f"{name}={value!r} should be a text: a path, a URL or a name")


def _is_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(each, str) for each in values)


def _as_text(value: Any) -> Any:
    """A path as the command line would have it; anything else as it is. Raises Refused: a NUL, which no path and no
    argument of a command line can have; or what no file system can write.
    """
    text = os.fsdecode(value) if isinstance(value, os.PathLike) else value
    if isinstance(text, str):
        if "\0" in text:
            raise Refused(f"{text!r} holds a NUL, which no path has")
        try:
            os.fsencode(text)
        except UnicodeEncodeError as e:
            raise Refused(f"{text!r} holds half a character: {e.reason}") from e
    return text


def _values(kinds: Mapping[str, type], handed: Collection[str], said: Mapping[str, Any]) -> dict[str, Any]:
    """The values of options that keywords ask for, but for those that were handed over.

    Raises:
      TypeError: a keyword says what a value says, too.
      Refused: see `read_options`.
    """
    known = {each.name for name in handed if name in kinds for each in options_of(kinds[name])}
    if twice := sorted(known & said.keys()):
        raise TypeError(f"{', '.join(twice)}: a value has the options already")
    return {name: read_options(kind, said) for name, kind in kinds.items() if name not in handed}


def _spelled_out(own: Sequence[inspect.Parameter], options: Iterable[Option]) -> list[inspect.Parameter]:
    """A function's parameters with the options among them: behind its places."""
    only = inspect.Parameter.KEYWORD_ONLY
    keywords = [
        inspect.Parameter(each.name, only, default=each.default, annotation=each.annotation) for each in options
    ]
    places = [parameter for parameter in own if parameter.kind is not only]
    return [*places, *keywords, *(parameter for parameter in own if parameter.kind is only)]


def _with_options(text: str, options: Iterable[Option]) -> str:
    """A docstring whose `Args` say what the options mean, after what it says itself."""
    before, title, rest = text.partition("    Args:\n")
    own, blank, after = rest.partition("\n\n")
    lines = [
        textwrap.fill(f"{each.name}: {in_python(each.help)}.", 120, initial_indent=" " * 6, subsequent_indent=" " * 8)
        for each in options
    ]
    return before + title + "\n".join([own, *lines]) + blank + after


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


def asked_of(args: argparse.Namespace, kind: type[Kind]) -> Kind:
    """The options that a command line sets."""
    return read_options(kind, {each.name: getattr(args, each.name) for each in options_of(kind)})


def check_known(given: Iterable[str], known: Sequence[str]) -> None:
    """Raises `TypeError` for a keyword that isn't known."""
    for name in given:
        if name not in known:
            raise TypeError(f"{name!r} isn't an option{did_you_mean(name, known)}")


def read_options(kind: type[Kind], given: Mapping[str, Any]) -> Kind:
    """The options of a class that keywords ask for, each checked as the command line checks it; None is as not given.

    Raises:
      Refused: all values that can't be meant.
    """
    values, refusals = dict[str, Any](), Refusals()
    for each in options_of(kind):
        if (value := given.get(each.name)) is not None:
            with refusals.kept():
                values[each.name] = read_value(each, value, given.get("maxtext_model"))
    refusals.check()
    return kind(**values)


def read_value(option: Option, value: Any, model: str | None = None) -> Any:
    """A keyword's value as the command line would have read it; `model` is the MaxText model whose sharding rules are
    changed.

    Raises:
      Refused: it can't be meant.
    """
    value = _as_text(value)
    if option.raw or isinstance(value, Unsaid):
        return value
    value = _as_list(value)
    if value == "":
        raise Refused(f"{option.name}={value!r} says nothing; leave it out")
    if option.name == "sharding_rules":
        return sharding_rules(value, model)
    if option.several:
        return _read_several(option, value)
    if option.metavar in PATH_METAVARS:
        value = as_place(option.name, value)
    if isinstance(value, bool):
        value = str(value).lower()
    if option.read is dtype_name and not isinstance(value, str):
        with contextlib.suppress(TypeError, ValueError):
            value = np.dtype(value).name
    try:
        is_list = option.read in LISTS and isinstance(value, list | tuple | range)
        found = option.read(",".join(map(str, value)) if is_list else str(value))
    except argparse.ArgumentTypeError as e:
        raise Refused(f"{option.name}={e}") from e
    if option.choices and found not in option.choices:
        raise Refused(f"{option.name}={value!r} should be {' or '.join(option.choices)}")
    return found


PATH_METAVARS = ("URL", "FILE")  # what stands for options that are paths


def _read_several(option: Option, value: Any) -> tuple[Any, ...]:
    """The values of an option that may be repeated: one, or a list of them. Raises Refused: they can't be meant."""
    is_lora = option.name == "lora"
    what = "path" if is_lora else "text"
    is_one = isinstance(value, str | Mapping) or not isinstance(value, Iterable)
    texts: tuple[Any, ...] = (value,) if is_one else tuple(map(_as_text, value))
    if not _is_texts(texts):
        raise Refused(f"{option.name}={value!r} should be a {what}, or a list of {what}s")
    return tuple(map(read_lora, texts)) if is_lora else texts


def _as_list(value: Any) -> Any:
    """An array's numbers, of one text's tokens without the batch; anything else as it is."""
    if isinstance(value, type) or not getattr(value, "ndim", 0) or not hasattr(value, "tolist"):
        return value
    numbers = value.tolist()
    return numbers[0] if value.ndim == 2 and len(numbers) == 1 else numbers


def check_said(options: Any, where: str) -> None:
    """Makes sure that options which a record says, whoever wrote it, are such as the command line would have read.

    Raises:
      Refused: one isn't.
    """
    for option in options_of(type(options)):
        value = getattr(options, option.name)
        if value == option.default or option.raw or option.name in ("lora", "sharding_rules"):
            continue
        try:
            found = read_value(option, value)
        except (Refused, TypeError, ValueError):
            found = None
        if found != value or type(found) is not type(value):
            raise Refused(f"{where}: says {value!r} for --{option.name}, which can't be meant")


def arguments_of(options: ConvertOptions) -> list[str]:
    """The command line's options that ask for the same, those at their defaults left out; quoted for a shell."""
    arguments = []
    for option in options_of(ConvertOptions):
        value = getattr(options, option.name)
        if value == option.default:
            continue
        match option.name:
            case "sharding_rules":
                values = ["FILE"]
            case "mesh":
                values = list(value)
            case "lora":
                values = [spell_lora(*each) for each in value]
            case _:
                values = [value]
        arguments += [shlex.join(spelled(option.name, each)) for each in values]
    return arguments


def spell_lora(url: str, weight: float) -> str:
    """An adapter as `read_lora` takes it."""
    return url if weight == 1 and "," not in url else f"{url},{repr(weight).removesuffix('.0')}"


def read_lora(text: str) -> tuple[str, float]:
    """`PATH[,weight]`: where an adapter is, absolute, and what its deltas are multiplied by.

    Raises:
      Refused: there is no such store, or nobody can mean that weight.
    """
    if not text:
        raise Refused("--lora= names no adapter; leave it out")
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
        raw = read_named(given)
        try:
            rules = parse_json(raw)
        except JsonError:
            rules = parse_yaml(raw.decode("utf-8"), MaxTextLoader if b"logical_axis_rules" in raw else yaml.SafeLoader)
        return read_rules(rules, model_rules(model))
    except OSError as e:
        raise Refused(f"--sharding_rules={given}: {e.strerror}") from e
    except yaml.MarkedYAMLError as e:
        where = f", line {e.problem_mark.line + 1}" if e.problem_mark else ""
        raise Refused(f"--sharding_rules={given}: neither JSON nor YAML: {e.problem or e}{where}") from e
    except (RulesError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise Refused(f"--sharding_rules={given}: {e}") from e
