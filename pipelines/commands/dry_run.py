"""The end of a dry run: what stands against a result at its place, or else the command that writes it there."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from weightbeam.formats.storage import is_hub
from weightbeam.model_mappings.plan import Problem
from weightbeam.pipelines.running.output import check_output
from weightbeam.pipelines.running.problems import refuse
from weightbeam.pipelines.running.writing import find_place
from weightbeam.pipelines.terminal.arguments.parser import command_line
from weightbeam.pipelines.terminal.errors import Busy
from weightbeam.pipelines.terminal.shell import STDOUT
from weightbeam.transforms.planning.options import Delivery
from weightbeam.transforms.planning.to_release import ToRelease
from weightbeam.transforms.planning.transfer import Transfer


def problems_there(planned: Transfer, output: str, how: Delivery) -> list[Problem]:
    """What stands against a result at its place, another command that is at work there among it.

    Raises:
      Refused: nothing can be written there.
    """
    place = find_place(planned, output)
    try:
        return check_output(place, planned, how)
    except Busy as e:
        return [Problem("output", str(place.final), str(e.__cause__))]


def conclude(args: argparse.Namespace, rest: Sequence[str], planned: Transfer, how: Delivery, what: str) -> int:
    """Ends a dry run whose plan was shown: says what is written, and the command that does it.

    Raises:
      Refused: something stands against it.
    """
    problems = list(planned.plan.problems)
    on_hub = is_hub(args.output) and isinstance(planned, ToRelease)
    if args.output and not on_hub and not problems:
        problems = problems_there(planned, args.output, how)
    refuse(problems)
    if args.json != STDOUT and not args.quiet:
        places = planned.inputs[0], args.output or "OUTPUT"
        print(f"\nready: {what} to write\n  {command_line(args, rest, places=places)}")
    return 0
