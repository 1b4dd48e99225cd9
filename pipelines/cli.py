"""`weightbeam`: parses the command line, runs the command, and turns what a user can mend into a message."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from weightbeam.formats.printable import printable
from weightbeam.pipelines.arguments import make_parser
from weightbeam.pipelines.errors import FailedError, RefusedError
from weightbeam.pipelines.shell import messages
from weightbeam.pipelines.streams import prepare_streams

OBJECTS_BETWEEN_COLLECTIONS = 20_000  # Python's 700 are too few for what lasts: imports and plans took a tenth longer


def run() -> NoReturn:
    """The command `weightbeam`: `main`, and an end without taking the interpreter apart, which takes a sixth of a second after Beam."""
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    status: list[int] = []

    def end() -> None:
        if status:  # else the arguments were wrong, or something that nobody thought of
            with contextlib.suppress(OSError):
                print(end="", flush=True)
            os._exit(status[0])

    atexit.register(end)  # the first that is registered is the last that is called: what Beam registers comes before
    status.append(main())
    sys.exit(status[0])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    prepare_streams()
    args, rest = make_parser().parse_known_args(sys.argv[1:] if arguments is None else list(arguments))
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill is a Ctrl-C
    command = importlib.import_module(f"weightbeam.pipelines.{args.command}")  # only now: the commands import numpy, TensorStore and Beam
    try:
        try:
            with messages():
                return command.run(args, rest)
        finally:
            print(end="", flush=True)  # now, where a reader that is gone is looked after
    except RefusedError as e:
        print(f"weightbeam {args.command}: refused\n{printable(str(e), lines=True)}", file=sys.stderr)
        return 2
    except FailedError as e:
        print(f"weightbeam {args.command}: failed\n{printable(str(e), lines=True)}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as e:  # of a disk or a store, where nothing could be made of it
        print(f"weightbeam {args.command}: failed\n  {printable(str(e), lines=True)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as e:
        again = "what is done is kept, the same command with --resume goes on from there" if args.command in ("convert", "materialize") else ""
        print(f"\nweightbeam {args.command}: stopped; {str(e) or again}".removesuffix("; "), file=sys.stderr, flush=True)
        os._exit(1)  # the pipeline's threads are still at work, and their end isn't worth waiting for


if __name__ == "__main__":
    run()
