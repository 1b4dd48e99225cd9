"""What `watch.yaml` says, strictly checked: every problem at once."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import difflib
import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic
import yaml
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, InstanceOf, model_validator
from pydantic_core import ErrorDetails

from weightbeam.formats.storage import StorageError, Store, is_hub, open_store, store_and_name
from weightbeam.formats.storage.local import cache_folder
from weightbeam.formats.storage.strict_yaml import StrictLoader, parse_yaml
from weightbeam.formats.targets.hub import HubAddress
from weightbeam.model_mappings.meant import did_you_mean
from weightbeam.model_mappings.trust import code_of
from weightbeam.pipelines.terminal.arguments.commands import COMMANDS, SHELL
from weightbeam.pipelines.terminal.errors import Refused
from weightbeam.pipelines.terminal.keywords import read_options, read_value
from weightbeam.pipelines.watching.runs import Steps, run_name
from weightbeam.transforms.cutting.mesh import MeshError
from weightbeam.transforms.planning.conversion import meshes_of
from weightbeam.transforms.planning.options import (
    ConvertOptions,
    ExportOptions,
    QuantizeOptions,
    ReshardOptions,
    options_of,
)
from weightbeam.transforms.planning.values import secret, size

PATTERN = re.compile(r"[\w.-]+/[\w.*?\[\]!-]+")  # organisation/model; the model may have wildcards
MOST_MINUTES = 366 * 24 * 60
NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")  # of a target: it becomes part of a path
RUN_NAME = re.compile(r"\w[\w.-]*")
Options = TypeVar("Options", ConvertOptions, ExportOptions, QuantizeOptions, ReshardOptions)
TOPIC = re.compile(r"projects/[^/\s]+/topics/[^/\s]+")
FIXED = ("virtual", "step")  # a virtual checkpoint needs local files; a release has one step
OPTIONS = tuple(field.name for field in dataclasses.fields(ConvertOptions) if field.name not in FIXED)


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """What a release is converted into.

    Attributes:
      name: of the user's choice.
      arguments: the options as `weightbeam convert` takes them, for the record.
      options: the same, read.
    """

    name: str
    arguments: tuple[str, ...]
    options: ConvertOptions

    @property
    def facts(self) -> Mapping[str, Any]:
        """What settles what comes out."""
        return {**self.options.__dict__, **_code(self.options)}


EXPORT, QUANTIZE, RESHARD = "export", "quantize", "reshard"  # what a step can be made into, by the command that does it
ADAPTER, MERGED = "adapter", "merged"  # what becomes of a LoRA run's steps
# what becomes of a step with elements that are NaN or infinite: nothing; it is published, and what was the newest stays
# that; the same as of others
HOLD, PUBLISH, NEWEST = "hold", "publish", "newest"
KINDS = {EXPORT: ExportOptions, QUANTIZE: QuantizeOptions, RESHARD: ReshardOptions}
FIELDS = ("name", "kind", "output", "lora", "create_pr", "on_nan")  # of a run's target, whatever its command
OURS = {"like", "maxtext_config", "step", "state"}  # not a target's to say: the run does, or the step


@dataclasses.dataclass(frozen=True)
class RunTarget:
    """What the steps of a run are made into.

    Attributes:
      name: of the user's choice.
      kind: `export`, `quantize` or `reshard`.
      arguments: the options as that command takes them, for the record, and to know what was asked for before.
      options: the same, read.
      lora: for a LoRA run whether the adapter is published, or the model that it is merged into; what is quantised is
        always such a model.
      output: where it goes, a folder below which each step has one, `gs://…`, or `hf://owner/name`; None for below the
        configuration's output.
      create_pr: whether the hub gets a pull request instead of commits.
      on_nan: what becomes of a step with elements that are NaN or infinite: `hold`, `publish` or `newest`. What comes
        out doesn't depend on it.
    """

    name: str
    kind: str = EXPORT
    arguments: tuple[str, ...] = ()
    options: ExportOptions | QuantizeOptions | ReshardOptions = dataclasses.field(default_factory=ExportOptions)
    lora: str = ADAPTER
    output: str | None = None
    create_pr: bool = False
    on_nan: str = PUBLISH

    @property
    def facts(self) -> Mapping[str, Any]:
        """What was asked for, and what the files say that it names."""
        asked = {"kind": self.kind, "arguments": self.arguments, "lora": self.lora, "output": self.output}
        rules = getattr(self.options, "sharding_rules", None)
        return asked | _code(self.options) | ({"rules": rules} if rules else {})


def _code(options: object) -> dict[str, str]:
    """What a table in a file of Python does, which its name doesn't tell."""
    code = code_of(getattr(options, "family", None))
    return {"code": code} if code else {}


def _arguments(options: Mapping[str, Any], flags: bool = False) -> list[str]:
    """A mapping as a command line: lists are repeated options, and `true` a bare one if there are `flags`, which Beam
    has and we don't.
    """
    arguments = []
    for name, values in options.items():
        for value in values if isinstance(values, list) else [values]:
            said = str(value).lower() if isinstance(value, bool) else value
            arguments.append(f"--{name}" if flags and value is True else f"--{name}={said}")
    return arguments


def _read_target(given: Any) -> TargetConfig:
    """A target of the models. Raises ValueError: every problem of it."""
    if not isinstance(given, dict):
        raise ValueError("should be a mapping: name, and options of weightbeam convert")
    asked = dict(given)
    name = asked.pop("name", None)
    arguments, options = _read_target_options(ConvertOptions, OPTIONS, asked, _find_misnamed(name))
    return TargetConfig(str(name), arguments, options)


def _find_misnamed(name: Any) -> list[str]:
    """What is wrong with a target's name."""
    if isinstance(name, str) and NAME.fullmatch(name):
        return []
    return ["name: should be lower-case letters, digits, dots and dashes"]


def _read_target_options(
    kind: type[Options], known: Collection[str], asked: Mapping[str, Any], problems: list[str], command: str = ""
) -> tuple[tuple[str, ...], Options]:
    """The options of a target as arguments of a command line, and read as those are.

    Args:
      kind: the class of the options.
      known: the names of those that a target may say.
      asked: what it says.
      problems: what is wrong with it else.
      command: which the options are of, and it may be another one, where that is the target's to say.

    Raises:
      ValueError: every problem, also of options that don't go together.
    """
    options, right = {each.name: each for each in options_of(kind)}, dict[str, Any]()
    where, meant = (f" of {command}", sorted({*known, *FIELDS})) if command else ("", known)
    for name, value in asked.items():
        if name not in known:
            problems.append(f"{name}: no such option{where}{_meant(name, meant)}")
        elif not all(isinstance(each, str | int | float) for each in (value if isinstance(value, list) else [value])):
            problems.append(f"{name}: should be a value" + ("" if value is None else ", or a list of values"))
        elif isinstance(value, list) and not options[name].several:
            problems.append(f"{name}: takes one value, not a list")
        else:
            try:
                read = read_value(options[name], value)
                # a dtype is recorded by its full name, and an adapter where it was found
                right[name] = read if kind is not ConvertOptions and name.endswith("dtype") else value
            except Refused as e:
                choices = ", ".join(map(repr, options[name].choices))
                why = (
                    f"invalid choice: {value!r} (choose from {choices})" if choices else str(e).removeprefix(f"{name}=")
                )
                problems.append(f"{name}: {why}")
    try:
        found = read_options(kind, right)
        if isinstance(found, ConvertOptions | ReshardOptions):
            meshes_of(ConvertOptions(mesh=found.mesh, sharding_rules=found.sharding_rules))
        if not problems:
            return tuple(_arguments(right)), found
    except (MeshError, Refused) as e:
        problems.append(str(e))
    raise ValueError("\n".join(problems))


def _meant(word: object, known: Iterable[str]) -> str:
    """What was meant by an unknown word, which YAML may take for something else, or what there is."""
    known = list(known)
    return did_you_mean(str(word), known) or f"; there are {', '.join(known)}"


def _read_run_target(given: Any) -> RunTarget:
    """A target of a run, its options read as those of the command that makes it. Raises ValueError: every problem of
    it.
    """
    if not isinstance(given, dict):
        raise ValueError(
            "should be a mapping: name, and options of weightbeam export, or of another kind's command: quantize, reshard"
        )
    asked = dict(given)
    name, kind, output = asked.pop("name", None), asked.pop("kind", EXPORT), asked.pop("output", None)
    on_nan, create_pr = asked.pop("on_nan", PUBLISH), asked.pop("create_pr", False)
    lora = asked.pop("lora") if asked.get("lora") in (ADAPTER, MERGED) else None
    problems = [*_find_misnamed(name), *_find_misfits(kind, lora, on_nan, create_pr, output)]
    try:
        output = None if output is None else read_place(output)
    except ValueError as e:
        problems.append(f"output: {e}")
    kind = kind if kind in [*KINDS] else EXPORT
    known = [each.name for each in options_of(KINDS[kind]) if each.name not in OURS]
    arguments, options = _read_target_options(KINDS[kind], known, asked, problems, kind)
    lora = lora or (MERGED if kind == QUANTIZE else ADAPTER)
    return RunTarget(str(name), kind, arguments, options, lora, output, create_pr, on_nan)


def _find_misfits(kind: Any, lora: str | None, on_nan: Any, create_pr: Any, output: Any) -> Iterator[str]:
    """What is wrong with the fields of a run's target that aren't options, each by itself and with the others."""
    if kind not in [*KINDS]:
        yield f"kind: should be {EXPORT}, {QUANTIZE} or {RESHARD}"
    if lora and kind == RESHARD:
        yield f"lora: {lora} is for releases, and a step is resharded as it is"
    elif lora == ADAPTER and kind == QUANTIZE:
        yield "lora: an adapter isn't quantised; the model that it is merged into is, with merged"
    if on_nan not in (HOLD, PUBLISH, NEWEST):
        yield f"on_nan: should be {HOLD}, {PUBLISH} or {NEWEST}"
    if not isinstance(create_pr, bool):
        yield "create_pr: should be true or false"
    elif create_pr and not is_hub(output):
        yield "create_pr: only a target whose output is hf://owner/name has pull requests"


@contextlib.contextmanager
def _invalid(*kinds: type[Exception]) -> Iterator[None]:
    """Context manager, and decorator: errors of these kinds say what is wrong with a value."""
    try:
        yield
    except kinds as e:
        raise ValueError(str(e)) from e


@_invalid(StorageError)
def read_place(url: Any) -> str:
    """Where steps are published, as it is recorded.

    Raises:
      ValueError: nothing can be published there.
    """
    if not isinstance(url, str) or not url:
        raise ValueError("should be a folder, gs://bucket/folder or hf://owner/name")
    if is_hub(url):
        target = HubAddress.parse(url)
        if target.branch != "main":
            raise ValueError("should be hf://owner/name: each step gets a branch of its own, and the newest is main")
        return str(target)
    return open_store(url.rstrip("/") or "/").url


def read_steps(given: Any) -> Steps:
    """Which steps are taken: `every`, `newest`, a list, or `{every: 1000}`.

    Raises:
      ValueError: none of these.
    """
    if given in ("every", "all"):
        return Steps()
    if given == "newest":
        return Steps(newest=True)
    if isinstance(given, list) and given and all(type(step) is int and step >= 0 for step in given):
        return Steps(listed=frozenset(given))
    if isinstance(given, dict) and given.keys() == {"every"} and type(given["every"]) is int and given["every"] > 0:
        return Steps(every=given["every"])
    raise ValueError("should be every, newest, a list of steps, or a mapping such as every: 1000")


class _Strict(pydantic.BaseModel):
    """A mapping of the file: no other fields, no conversion of what is said, and of that nothing in an error."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, hide_input_in_errors=True, arbitrary_types_allowed=True
    )


class Keep(_Strict):
    """Which of the steps that were published stay: the last ones, and multiples of a number."""

    last: Annotated[int, Field(ge=1)]
    every: Annotated[int, Field(ge=1)] | None = None


def _read_run_name(name: str) -> str:
    if not RUN_NAME.fullmatch(name):
        raise ValueError(f"{name!r} should be letters, digits, dots and dashes: it becomes part of a path")
    return name


@_invalid(StorageError)
def _read_checkpoints(url: str) -> str:
    if is_hub(url):
        raise ValueError("should be a folder or gs://bucket/folder with numbered steps")
    return open_store(url.rstrip("/") or "/").url


class Run(_Strict):
    """A training run in `watch.yaml`; `docs/howto/following.md` explains each field."""

    checkpoints: Annotated[str, Field(min_length=1), AfterValidator(_read_checkpoints)]
    name: Annotated[str, AfterValidator(_read_run_name)] = ""
    like: Annotated[str, Field(min_length=1)] | None = None
    steps: Annotated[InstanceOf[Steps], BeforeValidator(read_steps)] = Steps()
    targets: Annotated[
        list[Annotated[InstanceOf[RunTarget], BeforeValidator(_read_run_target)]], Field(min_length=1)
    ] = [RunTarget("hf")]
    keep: Keep | None = None

    @model_validator(mode="after")
    def _named(self) -> Run:
        object.__setattr__(self, "name", self.name or run_name(self.checkpoints))
        if (
            self.like
            and is_maxtext_config(self.like)
            and (others := [target.name for target in self.targets if target.kind != EXPORT])
        ):
            raise ValueError(
                f"like: {self.like} is a MaxText configuration, of which releases are made; {', '.join(others)} needs a release"
            )
        return self


def is_maxtext_config(like: str) -> bool:
    """Whether `like` names a MaxText configuration, for a model that has no release."""
    return like.endswith((".yml", ".yaml"))


def _read_pattern(text: str) -> str:
    if not PATTERN.fullmatch(text):
        raise ValueError(f"{text}: should be organisation/model; the model may have wildcards")
    return text


def _as_argument(read: Callable[[str], Any]) -> BeforeValidator:
    """Reads a value as the command line does."""
    return BeforeValidator(_invalid(argparse.ArgumentTypeError)(lambda value: read(str(value))))


@_invalid(StorageError)
def _read_output(url: Any) -> Store:
    if not isinstance(url, str) or is_hub(url):
        raise ValueError("should be a folder or gs://bucket/folder")
    return open_store(url)


def _check_runner(options: dict[str, Any], info: pydantic.ValidationInfo) -> dict[str, Any]:
    ours = {each.name for each in COMMANDS["convert"].all_options()} - SHELL
    if wrong := sorted(set(options) & ours):
        raise ValueError(f"{', '.join(wrong)}: not an option of Beam's")
    if wrong := sorted({"no_wait_until_finish", "template_location"} & options.keys()):
        raise ValueError(f"{', '.join(wrong)}: the watcher has to wait for the conversion, to verify it")
    if options:
        from weightbeam.pipelines.running.beam_options import check_options  # only now: imports Beam

        try:
            check_options(_arguments(options, flags=True), "convert", {"output": str(info.data.get("output", ""))})
        except Refused as e:
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
        # not said which: it may be a secret
        raise ValueError("should be the URL of a webhook, or projects/PROJECT/topics/TOPIC")
    return sink


Sink = Annotated[str, BeforeValidator(_from_environment), AfterValidator(_check_sink)]
Scalar = str | int | float | bool


class WatchConfig(_Strict):
    """`watch.yaml`; `docs/howto/watching.md` explains each field."""

    output: Annotated[InstanceOf[Store], BeforeValidator(_read_output)]
    models: list[Annotated[str, AfterValidator(_read_pattern)]] = []
    targets: list[Annotated[InstanceOf[TargetConfig], BeforeValidator(_read_target)]] = []
    runs: list[Run] = []
    revision: str = "main"
    since: datetime.date | None = None
    max_bytes: Annotated[int, _as_argument(size)] | None = None
    licenses: list[str] | None = None
    quiet_minutes: Annotated[float, Field(ge=0, le=MOST_MINUTES)] = 30
    verify: Annotated[float, Field(ge=0, le=1)] = 1.0
    attempts: Annotated[int, Field(ge=1)] = 5
    retry_minutes: Annotated[float, Field(ge=0, le=MOST_MINUTES)] = 15
    hf_token_secret: Annotated[str, _as_argument(secret)] | None = None
    runner: Annotated[dict[str, Scalar | list[Scalar]], AfterValidator(_check_runner)] = {}
    notify: list[Sink] = []

    def runner_arguments(self, here: bool = False) -> list[str]:
        """Beam's options, as a command line; without the runner for what is done `here`."""
        options = {name: value for name, value in self.runner.items() if not (here and name == "runner")}
        return _arguments(options, flags=True)


def cached_for(url: str) -> Path:
    """The folder, in this user's cache, of what a watcher keeps for a place that can't hold it."""
    return cache_folder("watch", hashlib.sha256(url.encode()).hexdigest()[:12])


def config_of_run(run: str, like: str | None, output: str, every: int | None, target: Mapping[str, Any]) -> WatchConfig:
    """The configuration of one run that options name, made into one thing in one place.

    Records lie in the output. The hub has no place for them: there they are in this user's cache, on this machine.

    Args:
      target: its fields but for `name` and `output`, as a file has them.

    Raises:
      Refused: everything that is wrong with it.
    """
    problems, place, records = [], "", ""
    try:
        place = records = read_place(output)
        if is_hub(place):
            records = str(cached_for(place))
    except ValueError as e:
        problems.append(f"--output={output}: {e}")
    about = {
        "checkpoints": run,
        "like": like,
        "steps": {"every": every or 1},
        "targets": [{"name": "hf", "output": place or "/", **target}],
    }
    try:
        config = WatchConfig.model_validate({"output": records or "/", "runs": [about]})
    except pydantic.ValidationError as e:
        problems += [f"--run={run}: {_said(error)}" for error in e.errors()]
        raise Refused(*problems) from e
    if problems:
        raise Refused(*problems)
    return config


def read_config(path: str) -> WatchConfig:
    """Reads a configuration, from a local file or a bucket.

    Raises:
      Refused: it can't be read, or everything that is wrong with it.
    """
    try:
        store, name = store_and_name(path if "://" in path else os.path.abspath(path))
        given = parse_yaml(store.read(name), StrictLoader)
    except FileNotFoundError as e:
        raise Refused(f"--config={path}: no such file") from e
    except OSError as e:
        raise Refused(f"--config={path}: {e.strerror or e}") from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise Refused(f"--config={path}: {' '.join(str(e).split())}") from e
    if not isinstance(given, dict):
        raise Refused(
            f"--config={path}: should be a mapping with output, and models and targets, or runs; `weightbeam help watching` has an example"
        )
    config, problems = None, list(_find_what_is_between(given))
    try:
        config = WatchConfig.model_validate(given)
    except pydantic.ValidationError as e:
        said = [
            f"{'.'.join(map(str, error['loc']))}: {line}" for error in e.errors() for line in _said(error).splitlines()
        ]
        problems = [*said, *problems]
    if problems or config is None:
        raise Refused("\n  ".join([f"--config={path}:", *problems]))
    return config


def _said(error: ErrorDetails) -> str:
    """What is wrong with a field."""
    if error["type"] != "extra_forbidden":
        said = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
        return re.sub(r"dictionary( or instance of \w+)?", "mapping", said)  # pydantic's words, of YAML
    *around, word = error["loc"]
    model = Keep if "keep" in around else Run if "runs" in around else WatchConfig
    return f"no such field{_meant(word, model.model_fields)}"


def _find_what_is_between(given: Mapping[Any, Any]) -> Iterator[str]:
    """What is wrong with fields that may each be right: nothing to watch, and names that stand twice."""
    meant = {near for word in given for near in difflib.get_close_matches(str(word), WatchConfig.model_fields, 1, 0.7)}
    models, targets, runs = (bool(given.get(name, name in meant)) for name in ("models", "targets", "runs"))
    if not models and not runs:
        yield "names nothing to watch: it needs models with targets, or runs"
    if models and not targets:
        yield "targets: what should be made of the models?"
    if targets and not models:
        yield "models: of which models should the targets be made?"
    listed = _mappings(given, "runs")
    for place, about in (("", given), *((f"runs.{number}.", run) for number, run in listed)):
        for name in _twice(target.get("name") for _, target in _mappings(about, "targets")):
            yield f"{place}targets: {name}: the name of several targets"
        names = {str(target.get("name")) for _, target in _mappings(about, "targets")}
        for name in sorted(names & {f"{each}.json" for each in names}):
            yield f"{place}targets: {name}: the file of the newest of {name.removesuffix('.json')} is called so"
    for name in _twice(run.get("name") or run_name(str(run.get("checkpoints", ""))) for _, run in listed):
        yield f"runs: {name}: the name of several runs; give them a name each"


def _mappings(about: Mapping[Any, Any], field: str) -> list[tuple[int, Mapping[Any, Any]]]:
    """Those of a list in a file, with their numbers."""
    held = about.get(field)
    return [
        (number, each) for number, each in enumerate(held if isinstance(held, list) else []) if isinstance(each, dict)
    ]


def _twice(names: Iterable[Any]) -> list[str]:
    """The names that stand several times."""
    counted = Counter(name for name in names if isinstance(name, str))
    return sorted(name for name, number in counted.items() if number > 1)
