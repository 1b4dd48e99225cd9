"""What `watch.yaml` says, strictly checked: every problem at once."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NoReturn

import pydantic
import yaml
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, InstanceOf

from weightbeam.formats.storage import StorageError, Store, open_store, store_and_name
from weightbeam.pipelines.arguments import add_conversion, add_output, secret, size
from weightbeam.pipelines.errors import RefusedError
from weightbeam.pipelines.keywords import option_keywords, read_options
from weightbeam.transforms.conversion import Options, meshes_of
from weightbeam.transforms.mesh import MeshError

PATTERN = re.compile(r"[\w.-]+/[\w.*?\[\]!-]+")  # organisation/model; the model may have wildcards
NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")  # of a target: it becomes part of a path
TOPIC = re.compile(r"projects/[^/\s]+/topics/[^/\s]+")
FIXED = ("virtual", "step")  # a virtual checkpoint needs local files; a release has one step
OPTIONS = tuple(field.name for field in dataclasses.fields(Options) if field.name not in FIXED)


@dataclasses.dataclass(frozen=True)
class Target:
    """What a release is converted into.

    Attributes:
      name: of the user's choice.
      arguments: the options as `weightbeam convert` takes them.
      options: the same, read.
    """

    name: str
    arguments: tuple[str, ...]
    options: Options

    @property
    def facts(self) -> Mapping[str, Any]:
        """What settles what comes out."""
        return self.options.__dict__


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument --"))


def _arguments(options: Mapping[str, Any], flags: bool = False) -> list[str]:
    """A mapping as a command line: lists are repeated options, and `true` a bare one if there are `flags`, which Beam has and we don't."""
    pairs = [(name, value) for name, values in options.items() for value in (values if isinstance(values, list) else [values])]
    return [f"--{name}" if flags and value is True else f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in pairs]


def _read_target(given: Any) -> Target:
    """A target, its options read as the command line's are.

    Raises:
      ValueError: every problem of it.
    """
    if not isinstance(given, dict):
        raise ValueError("should be a mapping: name, and options of weightbeam convert")
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_conversion(parser)
    name, asked = given.get("name"), {option: value for option, value in given.items() if option != "name"}
    problems = []
    if not isinstance(name, str) or not NAME.fullmatch(name):
        problems.append("name: should be lower-case letters, digits, dots and dashes")
    for option, value in asked.items():
        if option not in OPTIONS:
            problems.append(f"{option}: no such option; there are {', '.join(OPTIONS)}")
        elif not all(isinstance(each, str | int | float) for each in (value if isinstance(value, list) else [value])):
            problems.append(f"{option}: should be a value" + ("" if value is None else ", or a list of values"))
        else:
            try:
                read = parser.parse_args(_arguments({option: value}))
                if isinstance(value, list) and not isinstance(getattr(read, option), list):
                    problems.append(f"{option}: takes one value, not a list")
            except ValueError as e:
                problems.append(str(e))
    if not problems:
        arguments = _arguments(asked)
        try:
            given = parser.parse_args(arguments)
            options = read_options(option_keywords(given))
            meshes_of(options)
            return Target(str(name), tuple(arguments), options)
        except (MeshError, RefusedError) as e:
            problems.append(str(e))
    raise ValueError("; ".join(problems))


def _each(check: Callable[[str], Any], message: str) -> AfterValidator:
    """Refuses the first text that doesn't pass."""

    def apply(texts: list[str]) -> list[str]:
        if wrong := [text for text in texts if not check(text)]:
            raise ValueError(f"{', '.join(wrong)}: {message}")
        return texts

    return AfterValidator(apply)


def _as_argument(read: Callable[[str], Any]) -> BeforeValidator:
    """Reads a value as the command line does."""

    def apply(value: Any) -> Any:
        try:
            return read(str(value))
        except argparse.ArgumentTypeError as e:
            raise ValueError(str(e)) from e

    return BeforeValidator(apply)


def _read_output(url: Any) -> Store:
    if not isinstance(url, str) or url.startswith("hf://"):
        raise ValueError("should be a folder or gs://bucket/folder")
    try:
        return open_store(url)
    except StorageError as e:
        raise ValueError(str(e)) from e


def _check_targets(targets: list[Target]) -> list[Target]:
    names = [target.name for target in targets]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{', '.join(twice)}: the name of several targets")
    return targets


def _check_runner(options: dict[str, Any], info: pydantic.ValidationInfo) -> dict[str, Any]:
    ours = _Parser(add_help=False)
    add_conversion(ours)
    add_output(ours)
    if wrong := sorted(set(options) & vars(ours.parse_args([])).keys()):
        raise ValueError(f"{', '.join(wrong)}: not an option of Beam's")
    if wrong := sorted({"no_wait_until_finish", "template_location"} & options.keys()):
        raise ValueError(f"{', '.join(wrong)}: the watcher has to wait for the conversion, to verify it")
    if options:
        from weightbeam.pipelines.options import check_options  # only now: imports Beam

        try:
            check_options(_arguments(options, flags=True), "convert", {"output": str(info.data.get("output", ""))})
        except RefusedError as e:
            raise ValueError("; ".join(str(e).splitlines())) from e
    return options


def _from_environment(text: Any) -> Any:
    """`$NAME` is what the environment says: the URL of a webhook is often a secret."""
    expanded = os.path.expandvars(text) if isinstance(text, str) else text
    if isinstance(text, str) and expanded == text and text.startswith("$"):
        raise ValueError(f"{text} isn't set in the environment")
    return expanded


def _check_sink(sink: str) -> str:
    if not TOPIC.fullmatch(sink) and not sink.startswith(("https://", "http://")):
        raise ValueError("should be the URL of a webhook, or projects/PROJECT/topics/TOPIC")  # not said which: it may be a secret
    return sink


Sink = Annotated[str, BeforeValidator(_from_environment), AfterValidator(_check_sink)]
Scalar = str | int | float | bool


class Config(pydantic.BaseModel):
    """`watch.yaml`; `docs/watching.md` explains each field."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True, arbitrary_types_allowed=True)

    output: Annotated[InstanceOf[Store], BeforeValidator(_read_output)]
    models: Annotated[list[str], Field(min_length=1), _each(PATTERN.fullmatch, "should be organisation/model; the model may have wildcards")]
    targets: Annotated[list[Annotated[InstanceOf[Target], BeforeValidator(_read_target)]], Field(min_length=1), AfterValidator(_check_targets)]
    revision: str = "main"
    since: datetime.date | None = None
    max_bytes: Annotated[int, _as_argument(size)] | None = None
    licenses: list[str] | None = None
    quiet_minutes: Annotated[float, Field(ge=0)] = 30
    verify: Annotated[float, Field(ge=0, le=1)] = 1.0
    attempts: Annotated[int, Field(ge=1)] = 5
    retry_minutes: Annotated[float, Field(ge=0)] = 15
    hf_token_secret: Annotated[str, _as_argument(secret)] | None = None
    runner: Annotated[dict[str, Scalar | list[Scalar]], AfterValidator(_check_runner)] = {}
    notify: list[Sink] = []

    def runner_arguments(self, here: bool = False) -> list[str]:
        """What a conversion needs besides the target, as a command line; without its runner for what is done `here`."""
        token = [f"--hf_token_secret={self.hf_token_secret}"] if self.hf_token_secret else []
        options = {name: value for name, value in self.runner.items() if not (here and name == "runner")}
        return [*_arguments(options, flags=True), *token]


def read_config(path: str) -> Config:
    """Reads a configuration, from a local file or a bucket.

    Raises:
      RefusedError: it can't be read, or everything that is wrong with it.
    """
    try:
        store, name = store_and_name(path if "://" in path else os.path.abspath(path))
        given = yaml.load(store.read(name), _Loader)
    except FileNotFoundError as e:
        raise RefusedError(f"--config={path}: no such file") from e
    except OSError as e:
        raise RefusedError(f"--config={path}: {e.strerror or e}") from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise RefusedError(f"--config={path}: {' '.join(str(e).split())}") from e
    if not isinstance(given, dict):
        raise RefusedError(f"--config={path}: should be a mapping with output, models and targets; `weightbeam help watching` has an example")
    try:
        return Config.model_validate(given)
    except pydantic.ValidationError as e:
        problems = "\n".join(f"  {'.'.join(map(str, error['loc']))}: {_said(error['type'], error['msg'])}" for error in e.errors())
        raise RefusedError(f"--config={path}:\n{problems}") from e


def _said(kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return f"no such field; there are {', '.join(Config.model_fields)}"
    return message.removeprefix("Value error, ")


class _Loader(yaml.SafeLoader):
    """YAML without keys that stand twice, of which the last would win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := [key for number, key in enumerate(keys) if key in keys[:number]]:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)
