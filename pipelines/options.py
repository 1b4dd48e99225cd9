"""Weightbeam's options among Beam's: defaults for local runs, and a check that no option is misspelt."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions, StandardOptions

from pipelines.arguments import add_conversion, add_output

LOCAL_RUNNERS = (None, "DirectRunner", "FnApiRunner")
THREADS_PER_CORE = 2  # one reads or writes while the other computes
MAX_THREADS = 32


class ConversionOptions(PipelineOptions):
    """What `weightbeam convert` takes besides Beam's own options."""

    @classmethod
    def _add_argparse_args(cls, parser: argparse.ArgumentParser) -> None:
        add_conversion(parser)
        add_output(parser)


def local_threads() -> int:
    """Threads of a local run."""
    return min(THREADS_PER_CORE * len(os.sched_getaffinity(0)), MAX_THREADS)


def unknown_options(arguments: Sequence[str]) -> list[str]:
    """The arguments that no option of Beam's takes."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for options in {cls.__name__: cls for cls in PipelineOptions.__subclasses__()}.values():
        options._add_argparse_args(parser)
    return parser.parse_known_args(list(arguments))[1]


def pipeline_options(arguments: Sequence[str]) -> PipelineOptions:
    """Beam's options, local runs on the in-process runner with threads.

    Beam's own `DirectRunner` is a switch that first tries to download another runner (apache/beam,
    sdks/python/apache_beam/runners/direct/direct_runner.py, 2.77.0).
    """
    options = PipelineOptions(list(arguments))
    standard, direct = options.view_as(StandardOptions), options.view_as(DirectOptions)
    if standard.runner in LOCAL_RUNNERS:
        standard.runner = "FnApiRunner"
        given = {argument.split("=")[0] for argument in arguments}
        if "--direct_running_mode" not in given:
            direct.direct_running_mode = "multi_threading"
        if "--direct_num_workers" not in given:
            direct.direct_num_workers = local_threads()
    return options
