"""`weightbeam completion`: commands, options and files for a shell's completion, by shtab."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import shtab

from weightbeam.pipelines.commands.help import topics
from weightbeam.pipelines.terminal.arguments.parser import commands_of, is_boolean, make_parser
from weightbeam.pipelines.terminal.errors import Refused
from weightbeam.pipelines.terminal.option_files import NAMES_A_PLACE
from weightbeam.transforms.planning.values import BOOLEANS


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the script."""
    if args.shell not in shtab.SUPPORTED_SHELLS:
        raise Refused(f"name your shell: weightbeam completion {'|'.join(shtab.SUPPORTED_SHELLS)}")
    parser = make_parser()
    commands = commands_of(parser)
    named = {"completion": shtab.SUPPORTED_SHELLS, "help": [*topics(), *commands]}
    for name, command in commands.items():
        command.add_argument("words", nargs="*", choices=named.get(name))
        for option in list(command._actions):
            if is_boolean(option):
                option.choices = [*BOOLEANS]
                command.add_argument(f"--no_{option.dest}", action="store_true", help=f"not: {option.help}")
            elif not option.choices and (NAMES_A_PLACE.search(str(option.metavar)) or not option.option_strings):
                vars(option)["complete"] = shtab.FILE
    print(shtab.complete(parser, shell=args.shell))
    return 0
