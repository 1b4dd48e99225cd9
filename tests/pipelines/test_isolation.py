"""The watcher's processes: ready before they are needed, fresh after they were used, ended together."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from processes import wait_until

from weightbeam.formats.storage import ChangedError, StorageError, UnreachedError
from weightbeam.pipelines.terminal.errors import Failed, Refusals, Refused, refusing
from weightbeam.pipelines.watching import isolation
from weightbeam.pipelines.watching.isolation import Status, Task, Workers

PREPARED: list[bool] = []


def prepare() -> None:
    PREPARED.append(True)


def tell(arguments: Sequence[str]) -> dict[str, Any]:
    return {"pid": os.getpid(), "prepared": PREPARED, "said": list(arguments)}


def sleep(arguments: Sequence[str]) -> dict[str, Any]:
    time.sleep(float(arguments[0]))
    return tell(arguments)


def fail(arguments: Sequence[str]) -> dict[str, Any]:
    raise Failed(" ".join(arguments))


def refuse(cause: Sequence[Any]) -> dict[str, Any]:
    kind, message = cause
    try:
        raise kind(message)
    except StorageError as e:
        raise Refused(str(e)) from e


def children() -> set[int]:
    return {child.pid or 0 for child in multiprocessing.active_children()}


def test_a_process_is_ready_and_fresh() -> None:
    """After each rest others stand ready; what wasn't used stays; in the end none is left."""
    before = children()
    with Workers(prepare, prepare, stays=True) as workers:
        workers.rest()
        ready = children() - before
        workers.rest()
        assert children() - before == ready
        assert len(ready) == 2
        first, second = (workers.run(Task(partial(tell, ["x"]))).facts for _ in range(2))
        assert first == second == {"pid": first["pid"], "prepared": [True], "said": ["x"]}
        workers.rest()
        assert first["pid"] not in children()
        assert len(children() - before) == 2
        assert workers.run(Task(partial(tell, []))).facts["pid"] not in ready
    assert children() == before


@pytest.mark.parametrize(("cause", "status"), [(ChangedError, Status.FAILED), (StorageError, Status.REFUSED)])
def test_what_is_refused_for_a_file_that_changed_is_tried_again(cause: type[StorageError], status: str) -> None:
    with Workers(prepare) as workers:
        outcome = workers.run(Task(partial(refuse, (cause, "x changed"))))
        assert (outcome.status, outcome.message) == (status, "x changed")


@pytest.mark.parametrize("seconds", [0, 0.02, 0.05, 0.1, 0.2])
def test_ctrl_c_while_it_begins(seconds: float, capfd: pytest.CaptureFixture[str]) -> None:
    """It is the watcher's: a process that is still importing prints nothing for it, and then works."""
    before = children()
    with Workers(prepare, stays=True) as workers:
        workers.rest()
        (started,) = children() - before
        time.sleep(seconds)
        os.kill(started, signal.SIGINT)
        done = workers.run(Task(partial(tell, [])))
        assert (done.status, done.facts["pid"]) == (Status.DONE, started)
    assert capfd.readouterr() == ("", "")


def test_what_died_while_it_waited() -> None:
    """The next task isn't its victim, and doesn't get its last words for its own."""
    before = children()
    with Workers(prepare, stays=True) as workers:
        workers.rest()
        (ready,) = (child for child in multiprocessing.active_children() if child.pid not in before)
        ready.kill()
        ready.join()
        workers.rest()
        outcome = workers.run(Task(partial(tell, ["x"])))
        assert (outcome.status, outcome.facts["said"]) == (Status.DONE, ["x"])
        assert outcome.facts["pid"] != ready.pid


def test_what_is_done_together() -> None:
    """Outcomes come in the order of the tasks; where one fails, the others are ended, and its word counts."""
    before = children()
    with Workers(prepare) as workers:
        outcomes = workers.run_together([Task(partial(sleep, ["0.3"])), Task(partial(tell, ["b"]))])
        assert [(outcome.status, outcome.facts["said"]) for outcome in outcomes] == [
            (Status.DONE, ["0.3"]),
            (Status.DONE, ["b"]),
        ]
        start = time.monotonic()
        (outcome,) = workers.run_together([Task(partial(sleep, ["600"])), Task(partial(fail, ["the", "reason"]))])
        assert (outcome.status, outcome.message) == (Status.FAILED, "the reason")
        assert time.monotonic() - start < 60
        assert children() == before
        assert workers.run(Task(partial(sleep, ["600"])), seconds=0.2).message == "took longer than 0 s, and was ended"
        assert workers.run(Task(partial(tell, ["again"]))).status == Status.DONE
        workers.rest()
        assert children() == before


def refuse_to_stop(ready: Path) -> dict[str, Any]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.touch()
    time.sleep(60)
    return {}


def test_a_stop_is_waited_for_and_a_second_one_waits_for_nothing(tmp_path: Path) -> None:
    """A process that doesn't give up its task is ended; none outlives what it worked for."""
    before, ready, stops = children(), tmp_path / "ready", list[float]()

    def stop_twice() -> None:
        wait_until(ready.exists)
        for _ in range(2):
            stops.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(2)

    threading.Thread(target=stop_twice, daemon=True).start()
    with pytest.raises(KeyboardInterrupt), Workers(prepare) as workers:
        workers.run_together([Task(partial(refuse_to_stop, ready))])
    assert len(stops) == 2
    assert time.monotonic() - stops[1] < 5
    assert children() == before


@pytest.mark.parametrize(
    ("kinds", "how"),
    [
        ((UnreachedError, UnreachedError), "unreached"),
        ((UnreachedError, ChangedError), "failed"),
        ((UnreachedError, ValueError), "refused"),
        ((UnreachedError,), "unreached"),
    ],
)
def test_of_several_refusals_one_for_good_counts(kinds: tuple[type[Exception], ...], how: str) -> None:
    """An outage at two places isn't a problem of a plan's, either."""
    refusals = Refusals()
    for kind in kinds:
        with refusals.kept(), refusing(kind):
            raise kind("no answer")
    with pytest.raises(Refused) as refused:
        refusals.check()
    assert isolation._how_refused(refused.value) == how
