"""Work in a process of its own: what becomes of its memory, or of it, doesn't touch the watcher. It ends when the
watcher does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self, cast

from weightbeam.pipelines.running.output import AGAIN
from weightbeam.pipelines.running.without_beam import leave_out_services
from weightbeam.pipelines.terminal.errors import Busy, Failed, Refused
from weightbeam.pipelines.terminal.tables import count
from weightbeam.pipelines.terminal.wording import at_the_shell
from weightbeam.transforms.planning.options import (
    Delivery,
    ExportOptions,
    Options,
    QuantizeOptions,
    ReshardOptions,
    VerifyOptions,
    taken,
)

DONE, REFUSED, FAILED, BUSY = "done", "refused", "failed", "busy"
PLAN_SECONDS = 900.0  # a plan takes seconds; files that are made to take hours must not hold up all other versions
CONTEXT = multiprocessing.get_context("spawn")  # nothing of this process's threads and clients
TAIL = 2000  # characters of what a process that died had printed


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How work ended.

    Attributes:
      status: done, refused, failed, or busy: another process is at it.
      message: why it isn't done.
      facts: what came of it.
    """

    status: str
    message: str = ""
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


Action = Callable[..., dict[str, Any]]
Prepare = Callable[[], None]


class WorkerProcess:
    """A process that does one work after the other. What isn't done well ends it, and another one begins.

    Args:
      prepare: what it does first, such as imports.
    """

    def __init__(self, prepare: Prepare | None = None) -> None:
        self._prepare = prepare
        self._process: BaseProcess | None = None
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115
        self.was_used = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
            self._process = process
            self.was_used = False
            theirs.close()

    def ask(self, action: Action, keywords: Mapping[str, Any]) -> None:
        """Has it do work; the outcome is the `answer`."""
        self.begin()
        self.was_used = True
        with contextlib.suppress(ConnectionError):  # it has died: the answer says how
            self.connection.send((action, dict(keywords)))

    def answer(self, seconds: float | None = None) -> Outcome:
        """Waits for the outcome; work that takes longer than so many `seconds` is ended."""
        assert self._process is not None
        try:
            if self.connection.poll(seconds):
                outcome: Outcome = self.connection.recv()
            else:
                outcome = Outcome(FAILED, f"took longer than {seconds:,.0f} s, and was ended")
        except (EOFError, ConnectionError):
            self._process.join()
            printed = Path(self._log.name).read_text(errors="replace")[-TAIL:]
            outcome = Outcome(FAILED, f"{_how(self._process.exitcode or 0)}; the last that it printed:\n{printed}")
        if outcome.status != DONE:
            self.end()
        return outcome

    def end(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
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
            process.__exit__()

    def run(self, action: Action, keywords: Mapping[str, Any], seconds: float | None = None) -> Outcome:
        """Does work, and waits for it; work that takes longer than so many `seconds` is ended."""
        self._processes[0].ask(action, keywords)
        return self._processes[0].answer(seconds)

    def run_together(self, works: Sequence[tuple[Action, Mapping[str, Any]]]) -> list[Outcome]:
        """Does works at the same time. Where one isn't done, the others are ended, and its outcome alone is returned."""
        while len(self._processes) < len(works):
            self._processes.append(WorkerProcess())
        at_work = {}
        for process, work in zip(self._processes, works, strict=False):
            process.ask(*work)
            at_work[process.connection] = process
        outcomes: dict[WorkerProcess, Outcome] = {}
        try:
            while at_work:
                for ready in multiprocessing.connection.wait(list(at_work)):
                    process = at_work.pop(cast(Connection, ready))
                    outcomes[process] = process.answer()
                    if outcomes[process].status != DONE:
                        return [outcomes[process]]
        finally:
            for process in at_work.values():
                process.end()
        return [outcomes[process] for process in self._processes[: len(works)]]

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
    """What the process does: work, until nobody asks for it."""
    threading.Thread(target=_follow, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the watcher's, which then ends this process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    printed = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    if prepare is not None:
        prepare()
    with at_the_shell():
        while True:
            action, keywords = connection.recv()
            connection.send(_outcome(action, keywords))


def _outcome(action: Action, keywords: Mapping[str, Any]) -> Outcome:
    try:
        return Outcome(DONE, facts=action(**keywords))
    except Busy as e:
        return Outcome(BUSY, str(e).strip())
    except Refused as e:
        return Outcome(FAILED if _has_changed(e) else REFUSED, str(e).strip())
    except Failed as e:
        return Outcome(FAILED, str(e).strip().replace(AGAIN, "the next attempt goes on from there"))
    except Exception as e:
        traceback.print_exc()
        return Outcome(FAILED, f"{type(e).__name__}: {e}")


def _has_changed(error: BaseException | None) -> bool:
    """Whether something was refused for a file that was changed while it was read, which is different another time."""
    from weightbeam.formats.storage import ChangedError

    return error is not None and (isinstance(error, ChangedError) or _has_changed(error.__cause__))


def _follow() -> None:
    """Ends this process when the one that started it is gone, however it went."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def prepare_to_make(local: bool) -> None:
    """Imports what plans, exports and verifies a step of a run; `local`: as pipelines of this machine."""
    if local:
        leave_out_services()
    for name in ("commands.export", "commands.verify", "running.graph"):
        importlib.import_module(f"weightbeam.pipelines.{name}")


def prepare_to_compare() -> None:
    """Imports what tells what a step changed, and draws it once, since a first picture takes longer."""
    from weightbeam.pipelines.watching import changes, describing  # noqa: F401

    anything = {"weight": {"relative": 1.0, "not_finite": False}}
    changes.picture({"": changes.grid_of(anything)}, "")


# --- what is done so --------------------------------------------------------------------------------------------------


def plan(source: str, asked: Options) -> dict[str, Any]:
    """Plans a conversion; returns what is worth knowing of it.

    Raises:
      Refused: it has problems.
      Failed: a file can't be read, or isn't whole, which may be different another time.
    """
    from weightbeam.pipelines.commands.plan import plan
    from weightbeam.pipelines.running.prepare import describe

    made = plan(source, asked=asked)
    if any(problem.kind in ("corrupt", "unreadable") for problem in made.problems):
        raise Failed(describe(made.problems))
    made.check()
    conversion = made.conversion
    return {
        "plan": conversion.hash,
        "family": conversion.plan.family,
        "target_bytes": conversion.target_bytes,
        "warnings": list(conversion.warnings),
    }


def convert(**keywords: Any) -> dict[str, Any]:
    """Converts, or goes on with it."""
    from weightbeam.pipelines.commands.convert import convert

    print(convert(**keywords))
    return {}


def verify(source: str, checkpoint: str, asked: VerifyOptions, beam: Sequence[str] = ()) -> dict[str, Any]:
    """Verifies; returns how many elements and arrays were compared, and of which share of them."""
    from weightbeam.pipelines.commands.verify import verify

    found = verify(checkpoint, source, asked=asked, beam=beam)
    print(found)
    found.check()
    findings = found.findings.values()
    about = {
        "elements": sum(each.compared for each in findings),
        "arrays": len(found.findings),
        "rounded": sum(each.rounded for each in findings),
    }
    return about | {"sample": found.sample}


# --- of a run ---------------------------------------------------------------------------------------------------------


def plan_export(source: str, asked: ExportOptions) -> dict[str, Any]:
    """Plans an export; returns what is worth knowing of it.

    Raises:
      Refused: it has problems.
    """
    from weightbeam.formats.orbax.source import open_orbax
    from weightbeam.pipelines.commands import export
    from weightbeam.transforms.planning.adapters import is_adapter

    checkpoint = _opened(open_orbax, source)
    if is_adapter(checkpoint):
        return _planned_adapter(checkpoint, asked)
    return _planned(export.plan(checkpoint, asked=asked))


def plan_quantize(source: str, asked: QuantizeOptions) -> dict[str, Any]:
    """Plans the quantisation of a checkpoint; see `plan_export`."""
    from weightbeam.formats.orbax.source import open_orbax
    from weightbeam.pipelines.commands import quantize
    from weightbeam.transforms.planning.adapters import is_adapter

    checkpoint = _opened(open_orbax, source)
    if is_adapter(checkpoint):
        return _planned_adapter(checkpoint, taken(ExportOptions, asked))
    return _planned(quantize.plan(source, asked=asked))


def _planned_adapter(checkpoint: Any, asked: ExportOptions) -> dict[str, Any]:
    """What is worth knowing of an adapter that is to be written for PEFT, or merged into the release that it is for.

    Raises:
      Refused: it has problems.
    """
    from weightbeam.formats.record.naming import digest
    from weightbeam.pipelines.commands.export import plan_adapter_with
    from weightbeam.pipelines.running.prepare import refuse

    adapter = plan_adapter_with(checkpoint, dataclasses.replace(asked, max_shard_size=None, family=None))
    refuse(adapter.problems)
    told = hashlib.sha256(
        json.dumps([checkpoint.files.hash, adapter.like.root, adapter.rank, adapter.alpha]).encode()
    ).hexdigest()
    nbytes = sum(array.nbytes for array in checkpoint.weights.values())
    return {
        "plan": told,
        "family": "an adapter",
        "target_bytes": nbytes,
        "warnings": [],
        "lora": True,
        "read": digest(adapter.source),
        "form": adapter.like.root,
        "form_told": adapter.like.told,
    }


def _planned(planned: Any) -> dict[str, Any]:
    """What is worth knowing of a planned export.

    Raises:
      Refused: it has problems.
    """
    from weightbeam.formats.record.naming import digest
    from weightbeam.pipelines.running.prepare import refuse

    refuse(planned.plan.problems)
    reasons = Counter(planned.lossy.values())
    rounded = "; ".join(f"{count(number, 'tensor')}: {why}" for why, number in reasons.items())
    size = planned.files.size if planned.files else 0
    about = {
        "plan": planned.hash,
        "family": planned.plan.family,
        "target_bytes": size,
        "warnings": list(planned.warnings),
    }
    return about | {
        "read": digest(planned.sources[0]),
        "rounded": rounded,
        "form": planned.like.root,
        "form_told": planned.like.told,
    }


def _opened(open_orbax: Callable[..., Any], source: str) -> Any:
    """A checkpoint of a run.

    Raises:
      Refused: its tree isn't one that can be taken.
      Failed: it can't be read, which may be different another time.
    """
    from weightbeam.formats.storage import StorageError
    from weightbeam.model_mappings.trees import TreeError

    try:
        return open_orbax(source)
    except StorageError as e:
        raise (Refused if isinstance(e.__cause__, TreeError) else Failed)(str(e)) from e


def export(**keywords: Any) -> dict[str, Any]:
    """Exports, or goes on with it."""
    from weightbeam.pipelines.commands.export import export

    return _write(export, keywords)


def quantize(**keywords: Any) -> dict[str, Any]:
    """Quantises, or goes on with it."""
    from weightbeam.pipelines.commands.quantize import quantize

    return _write(quantize, keywords)


def merge(**keywords: Any) -> dict[str, Any]:
    """Merges an adapter into a release, or goes on with it."""
    from weightbeam.pipelines.commands.merge import merge

    return _write(merge, keywords)


def _write(function: Callable[..., Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """Goes on with what an attempt before made, or begins anew where the source isn't the same any more: what is staged
    there, or whole, is the watcher's own. What the keywords `read` and `told` tell is the content of the step that was
    planned, and of the release that it is to be like, or to be merged into.

    Raises:
      Failed: it was made of others; nothing of it is kept, and the next attempt plans anew.
    """
    from weightbeam.formats.storage import open_store
    from weightbeam.formats.targets.release import HOLDS_OTHERS
    from weightbeam.pipelines.running.output import ANOTHER_PLAN, ANOTHER_RESULT

    read, told, output = keywords.pop("read", ""), keywords.pop("told", ""), open_store(keywords["output"])
    try:
        made = function(**keywords, progress=False)
    except Refused as e:
        messages = [problem.message for problem in e.problems]
        if not any(message.startswith((ANOTHER_PLAN, ANOTHER_RESULT, HOLDS_OTHERS)) for message in messages):
            raise
        if not any(message.startswith(ANOTHER_PLAN) for message in messages):
            output.delete_folder()
        how: Delivery = dataclasses.replace(keywords["how"], resume=False, overwrite=True)
        made = function(**{**keywords, "how": how}, progress=False)
    print(made)
    root, now = _form_of(made)
    changed = [root] if told and now and now != told else []
    if read and read not in _read_by(made):
        changed.append(keywords["source"])
    if changed:
        output.delete_folder()
        raise Failed(f"{changed[0]} isn't what the step was planned with any more")
    return {}


def _read_by(made: Any) -> list[str]:
    """What tells the content of each source of a result."""
    from weightbeam.formats.record.naming import digest
    from weightbeam.pipelines.commands.adapters import ExportedAdapter
    from weightbeam.pipelines.commands.export import Exported
    from weightbeam.pipelines.commands.merge import Merged

    if isinstance(made, ExportedAdapter):
        return [made.source]
    planned = made.export if isinstance(made, Exported) else made.merge if isinstance(made, Merged) else made.planned
    return [digest(source) for source in planned.sources]


def _form_of(made: Any) -> tuple[str, str]:
    """The release that a result is like, or was merged into, and what tells its content; empty where there is none."""
    from weightbeam.formats.record.naming import digest
    from weightbeam.pipelines.commands.export import Exported
    from weightbeam.pipelines.commands.merge import Merged

    if isinstance(made, Exported):
        return made.export.like.root, made.export.like.told
    return (made.merge.source.root, digest(made.merge.source)) if isinstance(made, Merged) else ("", "")


def plan_reshard(source: str, asked: ReshardOptions) -> dict[str, Any]:
    """Plans the copy of a checkpoint; returns what is worth knowing of it.

    Raises:
      Refused: it has problems.
    """
    from weightbeam.formats.orbax.source import open_orbax
    from weightbeam.formats.record.naming import digest
    from weightbeam.pipelines.commands import reshard
    from weightbeam.pipelines.running.prepare import refuse

    _opened(open_orbax, source)
    made = reshard.plan(source, asked=asked)
    refuse(made.problems)
    planned = made.planned
    return {
        "plan": planned.hash,
        "read": digest(planned.sources[0]),
        "family": planned.tree.kind,
        "target_bytes": planned.target_bytes,
        "warnings": list(planned.warnings),
    }


def reshard(**keywords: Any) -> dict[str, Any]:
    """Writes a checkpoint's parameters anew, or goes on with it."""
    from weightbeam.pipelines.commands.reshard import reshard

    return _write(reshard, keywords)


def verify_reshard(a: str, b: str) -> dict[str, Any]:
    """Compares a copy `b` with the checkpoint that it was made of, array by array.

    Raises:
      Failed: an array differs by more than one rounding, or is missing.
    """
    from weightbeam.pipelines.commands.diff import diff

    found = diff(a, b, progress=False)
    wrong = [name for name, verdict in found.tensors.items() if verdict.status not in ("equal", "rounded")]
    if wrong:
        raise Failed(
            f"{count(len(wrong), 'array')} aren't the checkpoint's, such as {wrong[0]}: {found.tensors[wrong[0]].status}"
        )
    elements = sum(verdict.difference.elements for verdict in found.tensors.values() if verdict.difference)
    rounded = sum(verdict.status == "rounded" for verdict in found.tensors.values())
    return {"elements": elements, "arrays": len(found.tensors), "rounded": rounded, "sample": 1.0}


def compare(url: str, about: Mapping[str, Any], aside: str) -> dict[str, Any]:
    """Compares what was made with what it was before.

    Args:
      url: what was made.
      about: what its report says.
      aside: where that is written.
    """
    from weightbeam.formats.storage import open_store
    from weightbeam.pipelines.watching import describing

    return describing.compare(open_store(url), about, open_store(aside))


def describe(url: str, about: Mapping[str, Any], aside: str) -> dict[str, Any]:
    """Writes what changed, the card and the report of what was made beside it; see `compare`."""
    from weightbeam.formats.storage import open_store
    from weightbeam.pipelines.watching import describing

    return describing.describe(open_store(url), about, open_store(aside))
