"""What Beam's options say, without Beam: importing it takes seconds, and some of it nobody here needs."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from weightbeam.pipelines.terminal.errors import Refused

Said = TypeVar("Said")

# What Beam imports where it is installed and does without where it isn't: clients of services that a local run has
# nothing to do with (apache_beam/io/__init__.py, io/filesystems.py, io/mongodbio.py, runners/dataflow/dataflow_runner.py,
# 2.77.0). They take as long as the rest of Beam.
UNUSED = ("apache_beam.io.gcp.bigquery", "apache_beam.io.gcp.gcsfilesystem", "google.cloud.dataflow", "pymongo")

THREADS_PER_CORE, MAX_THREADS = 2, 32  # one thread reads or writes while another computes


class BeamParser(argparse.ArgumentParser):
    """Of Beam's options; a wrong value is refused in one line, not with all of Beam's usage."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise Refused(message)


def said(arguments: Sequence[str], kind: Callable[[str], Said], *names: str) -> dict[str, Said | None]:
    """The values of some of Beam's options, None of those that aren't given, or that have none.

    Raises:
      Refused: one can't have its value.
    """
    parser = BeamParser()
    for name in names:
        parser.add_argument(f"--{name}", type=kind, nargs="?")
    return vars(parser.parse_known_args(list(arguments))[0])


def runner_of(arguments: Sequence[str]) -> str:
    """The runner that Beam's options name, by what tells it from others, such as `flink`; empty where they name none."""
    named = said(arguments, str, "runner")["runner"] or ""
    return named.rpartition(".")[2].lower().removesuffix("runner")


def is_local(arguments: Sequence[str]) -> bool:
    """Whether Beam's options have a command run in this process."""
    return runner_of(arguments) in ("", "direct", "fnapi")


def says_threads(arguments: Sequence[str]) -> bool:
    """Whether Beam's options, if there are any, are only how many threads a local run has: nothing is left to check."""
    return all(re.fullmatch(r"--direct_num_workers=[1-9]\d{0,3}", argument) for argument in arguments)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local_threads() -> int:
    """Threads of a local run."""
    return min(THREADS_PER_CORE * cores(), MAX_THREADS)


def threads_of(options: Mapping[str, Any], default: int | None = None) -> int:
    """Units that one process works on at a time, by Beam's options, of which 0 threads of a local run are one for each
    core; where they don't say it `default`, or as many as in a local run.
    """
    harness, local = (options.get(name) for name in ("number_of_worker_harness_threads", "direct_num_workers"))
    return int(harness or (cores() if local == 0 else local) or default or local_threads())


def threads_in(arguments: Sequence[str], default: int | None = None) -> int:
    """Units that one process works on at a time, by Beam's options as they were typed; imports no Beam."""
    return threads_of(said(arguments, int, "direct_num_workers", "number_of_worker_harness_threads"), default)


def leave_out_services() -> None:
    """Spares this process Beam's clients of services. They can't be imported until `bring_back_services`: only for a
    process that is a command of ours, and that runs locally.
    """
    for name in UNUSED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # which stands for a module that isn't there


def bring_back_services() -> None:
    """Lets a local command ask a service after all: for a job that another command left there."""
    for name in UNUSED:
        if name in sys.modules and sys.modules[name] is None:
            del sys.modules[name]


class LoggingAsItIs(contextlib.AbstractContextManager[None]):
    """Context manager: Beam leaves the logging of whoever called as it is, and doesn't warn that it has no apitools, which
    nothing here needs.

    It calls `logging.basicConfig` with each PipelineOptions, and warns on the root logger, which does the same
    (apache_beam/options/pipeline_options.py, io/gcp/internal/clients/bigquery/__init__.py, 2.77.0). Others' calls go
    their way; there may be several calls at a time.
    """

    _lock, _inside = threading.Lock(), 0
    _before = logging.basicConfig, logging.warning

    def __enter__(self) -> None:
        cls = LoggingAsItIs
        with cls._lock:
            cls._inside += 1
            if cls._inside == 1:
                cls._before = logging.basicConfig, logging.warning
                logging.basicConfig, logging.warning = self._configure, self._warn

    def __exit__(self, *_: object) -> None:
        cls = LoggingAsItIs
        with cls._lock:
            cls._inside -= 1
            if cls._inside == 0:
                logging.basicConfig, logging.warning = cls._before

    @classmethod
    def _configure(cls, **kwargs: Any) -> None:
        if not sys._getframe(1).f_globals.get("__name__", "").startswith("apache_beam."):
            cls._before[0](**kwargs)

    @classmethod
    def _warn(cls, msg: object, *args: Any, **kwargs: Any) -> None:
        if not str(msg).startswith("apitools not found"):
            cls._before[1](msg, *args, **kwargs)
