"""Weightbeam's options among Beam's: defaults for local runs, and a check that no option is misspelt."""

from __future__ import annotations

import argparse
import contextlib
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import apache_beam as beam
from apache_beam.options.pipeline_options import (
    DirectOptions,
    PipelineOptions,
    PortableOptions,
    SetupOptions,
    StandardOptions,
    WorkerOptions,
)
from apache_beam.options.pipeline_options_validator import PipelineOptionsValidator
from apache_beam.runners.runner import create_runner
from apache_beam.transforms import userstate

from weightbeam.pipelines.running.runners import local
from weightbeam.pipelines.running.runners.table import runner_of
from weightbeam.pipelines.running.without_beam import BeamParser, local_threads, said
from weightbeam.pipelines.terminal.arguments.commands import COMMANDS, SHELL
from weightbeam.pipelines.terminal.arguments.parser import add_options, meant
from weightbeam.pipelines.terminal.errors import Refused

NO_RUNNER = (ValueError, ImportError, AttributeError, TypeError)  # raised where a name is no runner's
# in the environment: the image that this runs in, which workers can run too (deploy/Dockerfile)
IMAGE = "WEIGHTBEAM_IMAGE"
# there in a checkout, not where the package was installed from a wheel
SETUP_FILE = Path(__file__).resolve().parents[2] / "setup.py"
View = TypeVar("View", bound=PipelineOptions)
PLACES = {  # the options that name a folder, and what helps if it is on this machine
    "source": "upload it to gs://BUCKET/FOLDER, or name hf://organisation/model",
    "checkpoint": "upload it to gs://BUCKET/FOLDER",
    "output": "name gs://BUCKET/FOLDER",
}


class ConversionOptions(PipelineOptions):
    """What `weightbeam convert` takes besides Beam's own options, so that Beam knows them where it parses the whole
    command line.
    """

    @classmethod
    def _add_argparse_args(cls, parser: argparse.ArgumentParser) -> None:
        add_options(parser, [each for each in COMMANDS["convert"].all_options() if each.name not in SHELL])


class _Options(PipelineOptions):
    """Beam's options, each view of which is made once: Beam asks for two hundred in a pipeline, and makes a parser for
    each (apache_beam/options/pipeline_options.py, 2.77.0). All views share their values; a copy makes its own.
    """

    def view_as(self, cls: type[View]) -> View:
        views = self.__dict__.setdefault("_views", {})
        if cls not in views:
            views[cls] = super().view_as(cls)
        return views[cls]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_views"}


_SPECS: weakref.WeakKeyDictionary[object, Any] = weakref.WeakKeyDictionary()
_find_specs = userstate.get_dofn_specs


def _specs_of(fn: beam.DoFn) -> Any:
    """The states and timers of a DoFn, which Beam looks for a hundred times a pipeline, by the signatures of all of its
    methods (apache_beam/transforms/userstate.py, 2.77.0): once for each class of ours, and for each of Beam's own, which
    may wrap another; anew for anybody else's.
    """
    package = type(fn).__module__.partition(".")[0]
    if package not in ("weightbeam", "apache_beam"):
        return _find_specs(fn)
    key = type(fn) if package == "weightbeam" else fn
    if key not in _SPECS:
        _SPECS[key] = _find_specs(fn)
    return _SPECS[key]


def check_options(arguments: Sequence[str], command: str = "", places: Mapping[str, str | None] | None = None) -> None:
    """Makes sure that every argument is one of Beam's options, and that together they are enough for their runner.

    Args:
      arguments: those that Weightbeam doesn't know.
      command: what is going to run; empty where nothing is.
      places: the options of the command that name a folder.

    Raises:
      Refused: names all that is wrong.
    """
    # an unknown runner, or one that isn't installed, is refused below
    with contextlib.suppress(*NO_RUNNER):
        # a runner's options are known once it is loaded
        create_runner(said(arguments, str, "runner")["runner"] or local.RUNNER)
    parser = BeamParser()
    beams = {cls.__name__: cls for cls in PipelineOptions.__subclasses__()}
    del beams[ConversionOptions.__name__]  # what is ours stands among the arguments where a command doesn't take it
    for options in beams.values():
        options._add_argparse_args(cast(Any, parser))
    problems = []
    if unknown := parser.parse_known_args(list(arguments))[1]:
        may_be = meant(unknown[0], command or "plan", parser._option_string_actions)
        problems.append(
            f"unknown options: {' '.join(unknown)}{may_be}; --help lists ours, and Beam's are in its documentation"
        )
    if command:
        settled = pipeline_options([each for each in arguments if each not in ("-h", "--help")])  # which end a process
        problems += _find_problems(settled, command, places or {})
        problems = problems or list(runner_of(settled).find_unreachable(settled))  # last: it asks the network
    if problems:
        raise Refused(*problems)


def _find_problems(options: PipelineOptions, command: str, places: Mapping[str, str | None]) -> Iterator[str]:
    """What the runner lacks for a command."""
    name = options.view_as(StandardOptions).runner
    try:
        runner = create_runner(name)
    except NO_RUNNER as e:
        yield f"--runner={name}: {e}"
        return
    if command == "verify" and name != local.RUNNER:
        yield f"--runner={name}: verify brings what it finds to this machine, and runs on it"
        return
    validator = PipelineOptionsValidator(options, runner)
    for kind in (PortableOptions, SetupOptions, WorkerOptions):  # those that look at the options alone
        yield from options.view_as(kind).validate(validator)
    ours = runner_of(options)
    yield from ours.find_problems(options, runner)
    if options.view_as(StandardOptions).no_wait_until_finish and ours.waits(options):
        yield "--no_wait_until_finish: only a job on Dataflow goes on without this process"
    if not ours.in_containers(options):
        return
    if not _has_package(options):
        yield "--sdk_container_image=IMAGE is missing: an image with Weightbeam for the workers; or --setup_file=FOLDER/setup.py of a checkout"
    for option, todo in PLACES.items():
        place = places.get(option)
        if place and "://" not in place:
            yield f"--{option}={place}: the workers run in containers and don't see this machine's folders; {todo}"


def pipeline_options(arguments: Sequence[str], ours: Mapping[str, Any] | None = None) -> PipelineOptions:
    """Beam's options: local runs on the in-process runner with threads, workers in containers with this package.

    Beam's own `DirectRunner` is a switch that first tries to download another runner (apache/beam,
    sdks/python/apache_beam/runners/direct/direct_runner.py, 2.77.0).

    Args:
      arguments: those that Weightbeam doesn't know.
      ours: those that it does, for who looks at the job.
    """
    options = _Options(list(arguments), **(ours or {}))
    standard, direct = options.view_as(StandardOptions), options.view_as(DirectOptions)
    short = {known.removesuffix("Runner").lower(): known for known in StandardOptions.KNOWN_RUNNER_NAMES}
    name = (standard.runner or local.RUNNER).rpartition(".")[2].lower().removesuffix("runner")
    standard.runner = short.get(name, standard.runner)  # Beam knows them by several names
    if standard.runner in ("DirectRunner", local.RUNNER):
        standard.runner = local.RUNNER
        if not any(argument.split("=")[0] == "--direct_num_workers" for argument in arguments):
            direct.direct_num_workers = local_threads()
    if runner_of(options).in_containers(options) and not _has_package(options):
        if image := os.environ.get(IMAGE):
            options.view_as(WorkerOptions).sdk_container_image = image
        elif SETUP_FILE.is_file():
            options.view_as(SetupOptions).setup_file = str(SETUP_FILE)
    return options


def make_pipeline(options: PipelineOptions, stage_bytes: int = 0) -> beam.Pipeline:
    """A pipeline on the runner that the options name; the local one is ours.

    Args:
      options: Beam's.
      stage_bytes: memory that the stages need in one process.

    Raises:
      ValueError: there is no such runner.
    """
    userstate.get_dofn_specs = _specs_of  # half of the time that Beam takes for a small pipeline
    return beam.Pipeline(runner_of(options).make(stage_bytes), options)


def _has_package(options: PipelineOptions) -> bool:
    """Whether the user said where workers in containers get Weightbeam from."""
    setup = options.view_as(SetupOptions)
    worker = options.view_as(WorkerOptions)
    portable = options.view_as(PortableOptions)
    image = (
        worker.sdk_container_image
        or portable.environment_config
        or portable.lookup_environment_option("docker_container_image")
    )
    return bool(image or setup.setup_file or setup.extra_packages or setup.requirements_file)
