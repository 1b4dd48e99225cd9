"""Tasks in processes of their own: what becomes of such a process, or of its memory, doesn't touch the watcher. It ends
when the watcher does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Self, cast

from weightbeam.pipelines.running.output import AGAIN
from weightbeam.pipelines.terminal.errors import Busy, Failed, Refused
from weightbeam.pipelines.terminal.wording import at_the_shell

PLAN_SECONDS = 900.0  # a plan takes seconds; files that are made to take hours must not hold up all other versions
CONTEXT = multiprocessing.get_context("spawn")  # nothing of this process's threads and clients
STOP_SECONDS = 20.0  # that a process has to give up what it is about to publish; a bucket is asked for ten of them
TAIL = 2000  # characters of what a process that died had printed


class Status(enum.StrEnum):
    """How a task ended. `UNREACHED`: refused, for a store that didn't answer; `BUSY`: another process is at it."""

    DONE = "done"
    REFUSED = "refused"
    UNREACHED = "unreached"
    FAILED = "failed"
    BUSY = "busy"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a task ended.

    Attributes:
      status: whether it is done.
      message: why it isn't done.
      facts: what came of it.
    """

    status: Status
    message: str = ""
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Task:
    """One thing that is done for a version, in a process of its own.

    Attributes:
      do: what, with all that it takes.
      fact: under which name the record keeps what comes of it; empty where it doesn't.
    """

    do: partial[dict[str, Any]]
    fact: str = ""


Prepare = Callable[[], None]


class WorkerProcess:
    """A process that does one task after the other. What isn't done well ends it, and another one begins.

    Args:
      prepare: what it does first, such as imports.
    """

    def __init__(self, prepare: Prepare | None = None) -> None:
        self._prepare = prepare
        self._process: BaseProcess | None = None
        self._latest = 0.0  # when a process that is to stop is ended
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115
        self.was_used = False

    def close(self) -> None:
        self.end()
        self._log.close()

    def begin(self) -> None:
        """Starts the process, if there is none that lives, without waiting for it."""
        if self._process is not None and not self._process.is_alive():
            self.end()
        if self._process is None:
            os.truncate(self._log.name, 0)
            self.connection, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(theirs, self._log.name, self._prepare))
            with _without_interrupts():
                process.start()
            self._process, self._latest = process, 0.0
            self.was_used = False
            theirs.close()

    def ask(self, task: Task) -> None:
        """Has it do a task; the outcome is the `answer`."""
        self.begin()
        self.was_used = True
        with contextlib.suppress(ConnectionError):  # it has died: the answer says how
            self.connection.send(task)

    def answer(self, seconds: float | None = None) -> Outcome:
        """Waits for the outcome; a task that takes longer than so many `seconds` is ended."""
        assert self._process is not None
        try:
            if self.connection.poll(seconds):
                outcome: Outcome = self.connection.recv()
            else:
                outcome = Outcome(Status.FAILED, f"took longer than {seconds:,.0f} s, and was ended")
        except (EOFError, ConnectionError):
            self._process.join()
            printed = Path(self._log.name).read_text(errors="replace")[-TAIL:]
            outcome = Outcome(
                Status.FAILED, f"{_how(self._process.exitcode or 0)}; the last that it printed:\n{printed}"
            )
        if outcome.status != Status.DONE:
            self.end()
        return outcome

    def stop(self) -> None:
        """Has the process give up its task, as a command does that is stopped; `end` waits for that, but not for long."""
        if self._process is not None:
            self._process.terminate()
            self._latest = time.monotonic() + STOP_SECONDS

    def end(self) -> None:
        """Ends the process, if there is one."""
        if self._process is None:
            return
        latest, self._latest = self._latest, 0.0
        try:
            if latest:
                self._process.join(max(0.0, latest - time.monotonic()))
        finally:  # a second stop doesn't wait
            self._process.kill()  # it has said all there is to say, or isn't to go on
            self._process.join()
            self.connection.close()
            self._process = None


class Workers:
    """The processes in which tasks are done: a first one does one after the other, what may be done at the same time is
    done beside it.

    Args:
      prepare: what each does first; there are as many as are named here, and more if a task needs one.
      stays: after `rest` others are begun, so that what comes next finds them ready: imports take as long as a small
        export.
    """

    def __init__(self, *prepare: Prepare, stays: bool = False) -> None:
        self._processes = [WorkerProcess(each) for each in prepare] or [WorkerProcess()]
        self._stays = stays

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.close()

    def run(self, task: Task, seconds: float | None = None) -> Outcome:
        """Does a task, and waits for it; one that takes longer than so many `seconds` is ended."""
        self._processes[0].ask(task)
        return self._processes[0].answer(seconds)

    def run_together(self, tasks: Sequence[Task]) -> list[Outcome]:
        """Does tasks at the same time. Where one isn't done, the others are ended, and its outcome alone is returned."""
        while len(self._processes) < len(tasks):
            self._processes.append(WorkerProcess())
        at_work = {}
        for process, task in zip(self._processes, tasks, strict=False):
            process.ask(task)
            at_work[process.connection] = process
        outcomes: dict[WorkerProcess, Outcome] = {}
        try:
            while at_work:
                for ready in multiprocessing.connection.wait(list(at_work)):
                    process = at_work.pop(cast(Connection, ready))
                    outcomes[process] = process.answer()
                    if outcomes[process].status != Status.DONE:
                        return [outcomes[process]]
        except KeyboardInterrupt:  # nothing is published once this is told
            for process in at_work.values():
                process.stop()
            raise
        finally:
            for process in at_work.values():
                process.end()
        return [outcomes[process] for process in self._processes[: len(tasks)]]

    def rest(self) -> None:
        """Ends the processes that have worked: their memory is free again."""
        for process in self._processes:
            if process.was_used:
                process.end()
            if self._stays:
                process.begin()


def _how(status: int) -> str:
    """How a process ended."""
    if status >= 0:
        return f"the process ended with status {status}"
    hint = ", as the system does where memory runs out" if -status == signal.SIGKILL else ""
    return f"the process was ended by {signal.Signals(-status).name}{hint}"


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Context manager: what is started meanwhile gets no Ctrl-C until `_serve` ignores it: its first imports would print
    where they were interrupted.
    """
    resource_tracker.ensure_running()  # else it is begun with the process, and lets the signal through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: Connection, log: str, prepare: Prepare | None) -> None:
    """What the process does: tasks, until nobody asks for any."""
    threading.Thread(target=_follow, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the watcher's, which then stops this process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, _give_up)
    printed = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    if prepare is not None:
        prepare()
    with at_the_shell():
        while True:
            try:
                connection.send(_outcome(connection.recv()))
            except KeyboardInterrupt:
                os._exit(1)  # whatever is at work in its threads


def _give_up(number: int, frame: FrameType | None) -> None:
    """What a process does that is to stop; a second time nothing more."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _outcome(task: Task) -> Outcome:
    try:
        return Outcome(Status.DONE, facts=task.do())
    except Busy as e:
        return Outcome(Status.BUSY, str(e).strip())
    except Refused as e:
        return Outcome(_how_refused(e), str(e).strip())
    except Failed as e:
        return Outcome(Status.FAILED, str(e).strip().replace(AGAIN, "the next attempt goes on from there"))
    except Exception as e:
        traceback.print_exc()
        return Outcome(Status.FAILED, f"{type(e).__name__}: {e}")


def _how_refused(error: BaseException | None) -> Status:
    """How a task ended that was refused: not for good where a file was changed while it was read, or a store didn't
    answer, which is different another time; of several refusals where all are such.
    """
    from weightbeam.formats.storage import ChangedError, UnreachedError

    if isinstance(error, Refused) and error.each:
        ends = set(map(_how_refused, error.each))
        return next(how for how in (Status.REFUSED, Status.FAILED, Status.UNREACHED) if how in ends)
    if error is None:
        return Status.REFUSED
    if isinstance(error, ChangedError):
        return Status.FAILED
    return Status.UNREACHED if isinstance(error, UnreachedError) else _how_refused(error.__cause__)


def _follow() -> None:
    """Ends this process when the one that started it is gone, however it went."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
