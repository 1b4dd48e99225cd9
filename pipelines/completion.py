"""`weightbeam completion`: commands and options for a shell's completion, by shtab."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import shtab

from weightbeam.pipelines.arguments.parser import make_parser
from weightbeam.pipelines.errors import Refused


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the script."""
    if args.shell not in shtab.SUPPORTED_SHELLS:
        raise Refused(f"name your shell: weightbeam completion {'|'.join(shtab.SUPPORTED_SHELLS)}")
    print(shtab.complete(make_parser(), shell=args.shell))
    return 0
