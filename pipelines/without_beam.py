"""What Beam's options say, without Beam: importing it takes seconds, and some of it nobody here needs."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

# What Beam imports where it is installed and does without where it isn't: clients of services that a local run has
# nothing to do with (apache_beam/io/__init__.py, io/filesystems.py, io/mongodbio.py, runners/dataflow/dataflow_runner.py,
# 2.77.0). They take as long as the rest of Beam.
UNUSED = ("apache_beam.io.gcp.bigquery", "apache_beam.io.gcp.gcsfilesystem", "google.cloud.dataflow", "pymongo")


def is_local(arguments: Sequence[str]) -> bool:
    """Whether Beam's options have a command run in this process."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--runner", nargs="?")
    runner = parser.parse_known_args(list(arguments))[0].runner or ""
    return runner.rpartition(".")[2].lower().removesuffix("runner") in ("", "direct", "fnapi")


def says_threads(arguments: Sequence[str]) -> bool:
    """Whether Beam's options, if there are any, are only how many threads a local run has: nothing is left to check."""
    return all(re.fullmatch(r"--direct_num_workers=[1-9]\d{0,3}", argument) for argument in arguments)


def leave_out_services() -> None:
    """Spares this process Beam's clients of services. They can't be imported afterwards: only for a process that is a
    command of ours, and that runs locally.
    """
    for name in UNUSED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # which stands for a module that isn't there
