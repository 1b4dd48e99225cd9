"""Weightbeam's options among Beam's: defaults for local runs, and a check that no option is misspelt."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from typing import NoReturn

from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions, StandardOptions
from apache_beam.runners.runner import create_runner

from pipelines.arguments import add_conversion, add_output
from pipelines.errors import RefusedError
from pipelines.report import local_threads

LOCAL_RUNNER = "FnApiRunner"


class ConversionOptions(PipelineOptions):
    """What `weightbeam convert` takes besides Beam's own options, so that Beam knows them where it parses the whole command line."""

    @classmethod
    def _add_argparse_args(cls, parser: argparse.ArgumentParser) -> None:
        add_conversion(parser)
        add_output(parser)


class _Parser(argparse.ArgumentParser):
    """Beam's options; a wrong value is refused in one line, not with all of Beam's usage."""

    def error(self, message: str) -> NoReturn:
        raise RefusedError(message)


def check_options(arguments: Sequence[str]) -> None:
    """Makes sure that every argument is one of Beam's options.

    Raises:
      RefusedError: names those that aren't, or a wrong value.
    """
    runner = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    runner.add_argument("--runner")
    with contextlib.suppress(ValueError, ImportError):  # an unknown runner, or one that isn't installed, is refused later
        create_runner(runner.parse_known_args(list(arguments))[0].runner or LOCAL_RUNNER)  # a runner's options are known once it is loaded
    parser = _Parser(add_help=False, allow_abbrev=False)
    for options in {cls.__name__: cls for cls in PipelineOptions.__subclasses__()}.values():
        options._add_argparse_args(parser)
    if unknown := parser.parse_known_args(list(arguments))[1]:
        raise RefusedError(f"unknown options: {' '.join(unknown)}; --help lists ours, and Beam's are in its documentation")


def pipeline_options(arguments: Sequence[str]) -> PipelineOptions:
    """Beam's options, local runs on the in-process runner with threads.

    Beam's own `DirectRunner` is a switch that first tries to download another runner (apache/beam,
    sdks/python/apache_beam/runners/direct/direct_runner.py, 2.77.0).
    """
    options = PipelineOptions(list(arguments))
    standard, direct = options.view_as(StandardOptions), options.view_as(DirectOptions)
    if standard.runner in (None, "DirectRunner", LOCAL_RUNNER):
        standard.runner = LOCAL_RUNNER
        given = {argument.split("=")[0] for argument in arguments}
        if "--direct_running_mode" not in given:
            direct.direct_running_mode = "multi_threading"
        if "--direct_num_workers" not in given:
            direct.direct_num_workers = local_threads()
    return options


def threads_of(options: PipelineOptions) -> int:
    """Units that one process works on at a time."""
    said = options.get_all_options(drop_default=True)
    return int(said.get("number_of_worker_harness_threads") or said.get("direct_num_workers") or local_threads())
