"""`weightbeam completion`: commands and options for a shell's completion, by shtab."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import shtab

from weightbeam.pipelines.terminal.arguments.parser import commands_of, is_boolean, make_parser
from weightbeam.pipelines.terminal.errors import Refused
from weightbeam.transforms.planning.values import BOOLEANS


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the script."""
    if args.shell not in shtab.SUPPORTED_SHELLS:
        raise Refused(f"name your shell: weightbeam completion {'|'.join(shtab.SUPPORTED_SHELLS)}")
    parser = make_parser()
    for command in commands_of(parser).values():
        for option in [option for option in command._actions if is_boolean(option)]:
            option.choices = [*BOOLEANS]
            command.add_argument(f"--no_{option.dest}", action="store_true", help=f"not: {option.help}")
    print(shtab.complete(parser, shell=args.shell))
    return 0
