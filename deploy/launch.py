"""What the Flex Template's launcher runs: the template's parameters, as options of `weightbeam convert`.

A file of its own, outside the packages: a script's folder comes first on Python's path, and `pipelines/commands/inspect.py`
would hide Python's own module.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from weightbeam.pipelines.cli import main
from weightbeam.pipelines.terminal.arguments.commands import SHELL
from weightbeam.pipelines.terminal.arguments.parser import make_parser


def conversion_options() -> dict[str, argparse.Action]:
    """The options of `weightbeam convert`, by name."""
    commands = next(action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return {
        action.dest: action for action in commands.choices["convert"]._actions if action.dest not in {"help", *SHELL}
    }


def may_repeat(option: argparse.Action) -> bool:
    """Whether an option may be given several times. As a parameter it has several values, with spaces between them."""
    return isinstance(option, argparse._AppendAction)


def to_arguments(parameters: Sequence[str]) -> list[str]:
    """The command line that a template's parameters stand for.

    Args:
      parameters: `--name=value` each, as the launcher writes them: Weightbeam's options, and Beam's, which stay as they
        are.
    """
    options, line = conversion_options(), []
    for parameter in parameters:
        name, _, value = parameter.removeprefix("--").partition("=")
        option = options.get(name)
        if option and may_repeat(option):
            line += [f"--{name}={one}" for one in value.split()]
        else:
            line.append(parameter)
    return line


if __name__ == "__main__":
    sys.exit(main(["convert", *to_arguments(sys.argv[1:])]))
