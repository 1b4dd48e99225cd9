"""`weightbeam`: parses the command line, runs the command, and turns what a user can mend into a message."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence

from pipelines.arguments import make_parser


class RefusedError(Exception):
    """Refused before any work: the message says why and what to do (exit status 2)."""


class FailedError(Exception):
    """Failed on the way: the message says what, where, and how to go on (exit status 1)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    logging.basicConfig(level=logging.ERROR)  # Beam warns of optional packages when it is imported
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = make_parser()
    args, rest = parser.parse_known_args(given)
    command = importlib.import_module(f"pipelines.{args.command}")  # only now: the commands import numpy, TensorStore and Beam
    try:
        return command.run(args, rest)
    except RefusedError as e:
        print(f"weightbeam {args.command}: refused\n{e}", file=sys.stderr)
        return 2
    except FailedError as e:
        print(f"weightbeam {args.command}: failed\n{e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"weightbeam {args.command}: stopped", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
