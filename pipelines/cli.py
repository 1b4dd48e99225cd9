"""`weightbeam`: parses the command line, runs the command, and turns what a user can mend into a message."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import gc
import importlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NoReturn

from weightbeam.formats.storage.uninterrupted import IMPATIENCE, PUBLISHED
from weightbeam.formats.text.endpoint import EndpointError, check_endpoint
from weightbeam.formats.text.printable import printable
from weightbeam.pipelines.running.threads import LIMITS, refuses_a_thread
from weightbeam.pipelines.running.without_beam import is_local, leave_out_services
from weightbeam.pipelines.terminal.arguments.commands import COMMANDS
from weightbeam.pipelines.terminal.arguments.parser import parse, refuse_unknown
from weightbeam.pipelines.terminal.errors import Failed, Refused
from weightbeam.pipelines.terminal.exactness import check_arithmetic
from weightbeam.pipelines.terminal.option_files import check_written
from weightbeam.pipelines.terminal.shell import messages
from weightbeam.pipelines.terminal.streams import prepare_streams, stop_at_once
from weightbeam.pipelines.terminal.wording import at_the_shell

STATUS = {"refused": 2, "failed": 1}
NO_MEMORY = "failed to map segment"  # what the loader of libraries says then
RESEND_DELAY = 0.02  # seconds, until a signal that was lost comes again
OBJECTS_BETWEEN_COLLECTIONS = 20_000  # Python's 700 are too few for what lasts: imports and plans took a tenth longer


def run() -> NoReturn:
    """The command `weightbeam`: `main`, and an end without taking the interpreter apart, which takes a sixth of a
    second after Beam.
    """
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    status: list[int] = []

    def end() -> None:
        if status:  # else the arguments were wrong, or something that nobody thought of
            with contextlib.suppress(OSError):
                print(end="", flush=True)
            os._exit(status[0])

    atexit.register(end)  # the first that is registered is the last that is called: what Beam registers comes before
    if is_local(sys.argv) and "watch" not in sys.argv:  # a watcher's runners stand in its file
        leave_out_services()
    status.append(main(at_end=True))
    sys.exit(status[0])


class Interrupts:
    """Ctrl-C and a polite kill, which is told apart by its exit status.

    Attributes:
      came: the signal, once there was one.
      at_once: whether a stop ends the process in one line: while a command is imported.
      over: whether the command is done, so that nothing is left to stop.
    """

    def __init__(self) -> None:
        self.came: int | None = None
        self.at_once = self.over = False
        self._last = -math.inf
        self._hook = sys.unraisablehook
        self._again: threading.Timer | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.over:
            return
        self.came = number
        if self.at_once:
            stop_at_once(self.status)
        before, self._last = self._last, time.monotonic()
        if self._last - before > IMPATIENCE:
            raise KeyboardInterrupt

    def send_again(self, lost: sys.UnraisableHookArgs) -> None:
        """`sys.unraisablehook`: where an exception can't be raised, in a destructor or a weak reference's callback, Python
        drops it; a signal is sent once more, a moment later.
        """
        if self.came is None or not issubclass(lost.exc_type, KeyboardInterrupt):
            self._hook(lost)
            return
        self._last = -math.inf  # else it would count as the same key press
        self._again = threading.Timer(RESEND_DELAY, os.kill, (os.getpid(), self.came))
        self._again.daemon = True
        self._again.start()

    @property
    def status(self) -> int:
        """128 and the signal's number after Ctrl-C, as shells have it; 1 after a kill."""
        return 1 if self.came == signal.SIGTERM else 128 + signal.SIGINT

    @contextlib.contextmanager
    def caught(self, for_good: bool = False) -> Iterator[None]:
        """Context manager: signals come here, but for one that whoever started us has put aside; `for_good`: once the
        command is over, too.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number, handler in found.items():
            if number == signal.SIGTERM or handler is not signal.SIG_IGN:
                signal.signal(number, self)
        self._hook, sys.unraisablehook = sys.unraisablehook, self.send_again
        try:
            yield
        finally:
            sys.unraisablehook = self._hook
            if self._again:
                self._again.cancel()  # the handler isn't this one any more
            for number, handler in found.items() if not (self.over and for_good) else ():
                signal.signal(number, handler)


@dataclasses.dataclass
class _Call:
    """What was typed, as far as it is known: `command` is empty until the words are read."""

    command: str = ""

    @property
    def name(self) -> str:
        return f"weightbeam {self.command}".rstrip()

    def tell(self, ending: str, why: str) -> None:
        """Says on standard error how it ended, if anybody reads that; the status tells it, too."""
        with contextlib.suppress(OSError):
            print(f"{self.name}: {ending}\n{printable(why, lines=True)}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None, at_end: bool = False) -> int:
    """Runs a command; returns its exit status. `at_end`: the process ends with it, so that no signal stops anything any
    more.
    """
    PUBLISHED.clear()
    prepare_streams()
    interrupts, call = Interrupts(), _Call()
    with at_the_shell(), interrupts.caught(for_good=at_end):
        try:
            return _run(sys.argv[1:] if arguments is None else arguments, interrupts, call)
        except BaseException as e:
            if (status := _end(e, interrupts, call)) is None:
                raise
            return status


def _run(arguments: Sequence[str], interrupts: Interrupts, call: _Call) -> int:
    """Reads the words, imports the command, and runs it; returns its exit status."""
    args, rest = parse(arguments)
    call.command = args.command
    if args.quiet and hasattr(args, "progress"):
        args.progress = "none"
    check_written(args)
    if not COMMANDS[args.command].beam:
        refuse_unknown(args, rest)
    with messages(args):
        check_endpoint()
        interrupts.at_once = True
        # only now: commands import numpy, TensorStore and Beam
        module = importlib.import_module(COMMANDS[args.command].home)
        interrupts.at_once = False
        check_arithmetic()
        try:
            status = module.run(args, rest)
        finally:
            _flush()  # now, where a reader that is gone is looked after
        interrupts.over = True
        return status


def _flush() -> None:
    """Writes what was printed. Raises OSError, which says that it is of standard output."""
    try:
        print(end="", flush=True)
    except OSError as e:
        raise OSError(e.errno, e.strerror, "standard output") from e


def _end(error: BaseException, interrupts: Interrupts, call: _Call) -> int | None:
    """Says how a command ended that raised this; returns its exit status, or None for what nobody thought of. A process
    that was stopped ends here.
    """
    # some libraries make something else of a KeyboardInterrupt
    is_stop = isinstance(error, KeyboardInterrupt) or (interrupts.came is not None and isinstance(error, Exception))
    if (ending := _ending(error, is_stop)) is not None:
        call.tell(*ending)
        return STATUS[ending[0]]
    if isinstance(error, BrokenPipeError):  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if PUBLISHED:
            with contextlib.suppress(OSError):  # nobody may read errors, either
                print("; ".join([f"{call.name}: nobody reads what it prints", *PUBLISHED]), file=sys.stderr, flush=True)
        return 1
    if not is_stop:
        return None
    said = (str(error) if isinstance(error, KeyboardInterrupt) else "") or "; ".join(PUBLISHED)
    print(f"\n{call.name}: stopped; {said}".removesuffix("; "), file=sys.stderr, flush=True)
    # the pipeline's threads are still at work, and their end isn't worth waiting for
    os._exit(interrupts.status)


def _ending(error: BaseException, is_stop: bool) -> tuple[str, str] | None:
    """How a command ended, and why, where its error says that and not a stop."""
    if isinstance(error, Refused | EndpointError):
        return "refused", str(error)
    if isinstance(error, Failed):
        return "failed", str(error)
    if isinstance(error, MemoryError) or (isinstance(error, ImportError) and NO_MEMORY in str(error)):
        said = (isinstance(error, MemoryError) and str(error)) or "the system gives no more memory"
        return "failed", f"  {said}; raise the limit on it (ulimit -v)"
    if is_stop or isinstance(error, BrokenPipeError):
        return None
    if refuses_a_thread(error):
        return "failed", "; ".join([f"  the system refuses another thread; {LIMITS}", *PUBLISHED])
    if isinstance(error, OSError):  # of a disk or a store, where nothing could be made of it
        # what is too long was said on the command line
        return "refused" if error.errno == errno.ENAMETOOLONG else "failed", "; ".join([f"  {error}", *PUBLISHED])
    return None


if __name__ == "__main__":
    run()
