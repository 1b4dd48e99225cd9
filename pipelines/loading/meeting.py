"""Several processes meet before anything is exchanged: all have come to the same call of `load`, none refuses, and all
are about to load the same. A call that begins before another one of its process is over is refused, since devices
exchange in one order.

What they say goes through JAX's coordinator, which needs no devices: one that refuses doesn't begin them, and the others
would wait for it. Process 0 hears all of them and tells the outcome. Each call has keys of its own, so that no process
meets the others at a call that they have left. A process that is there says so again and again, however long it opens
or reads files; who is silent has died, or never came.

Once they exchange, they end together: all have what they load, or all have heard of an error by a vote
(`agreement.py`). Where one of them ends otherwise, devices may wait for ever for an exchange that it never began, and
the first one of any later call would meet that one: the process remembers it, and refuses each later call.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, TypeVar

from weightbeam.pipelines.loading.agreement import AgreedError
from weightbeam.pipelines.terminal.errors import Failed, Refused

Made = TypeVar("Made")

TIMEOUT = 90.0  # seconds; JAX ends all processes 100 s after the last sign of one, without a word of ours
BEAT = 5.0  # seconds between two signs of a process, at most
LOOK = 1000  # milliseconds for which the coordinator is asked at a time, and between two looks at signs
SHOWN, LENGTH = 3, 200  # differences that are told, and characters of a value in them

_CALLS = itertools.count(1)  # of this process
_UNDER_WAY: list[int] = []  # the numbers of those that aren't over
_BROKEN_OFF: list[str] = []  # how calls of this process ended amid exchanges


class Meeting:
    """The processes of a job at one call; a context manager. One process alone agrees with itself.

    Args:
      timeout: seconds of silence after which a process counts as gone.
    """

    def __init__(self, timeout: float = TIMEOUT):
        from jax._src import distributed  # there is no public way to the coordinator; Orbax takes this one

        state = distributed.global_state
        self.alone = state.client is None or state.num_processes == 1
        self.process, self.processes, self.timeout = state.process_id, state.num_processes, timeout
        self._client: Any = state.client
        self._left = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="meeting", daemon=True)
        # the last sign of each process, empty until there is one, and when it was new
        self._heard: dict[int, tuple[Mapping[str, Any], float]] = {}
        self._begun, self._reads = 0, False  # exchanges of this process, and whether they wait for what it reads
        self._moved = time.monotonic()  # when any process last came further with its exchanges, or read
        self._looked = time.monotonic()  # for signs
        self._amid = self.agreed = False  # in the exchanges; all have heard there of the error of this call
        self.number = 0 if self.alone else next(_CALLS)
        self._others: set[int] = set()  # calls of this process that weren't over when this one began

    def __enter__(self) -> Self:
        if not self.alone:
            self._listen()
            self._beating.start()
            _UNDER_WAY.append(self.number)
            self._others = {*_UNDER_WAY} - {self.number}
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if self.alone:
            return
        _UNDER_WAY.remove(self.number)
        self._left.set()
        if self._amid and error is not None:
            _BROKEN_OFF.append(f"call {self.number} of load broke off amid an exchange ({_words(error)})")
        self._beating.join()
        with contextlib.suppress(Failed):  # the coordinator is gone
            self._say(f"signs/{self.process}", {"left": "" if error is None or self.agreed else _words(error)})
            if self.process == 0 and isinstance(error, Exception):
                self._leave_last()

    def decide(self, what: str, make: Callable[[], Made]) -> Made:
        """What process 0 makes, of values that JSON can say: one decides for all.

        Raises:
          Refused: it was refused.
          Failed: it isn't heard of.
        """
        if self.alone or self.process == 0:
            made = self._made(what, make)
            self._say(f"{what}/0", {"yes": made})
            return made
        return self._hear(f"{what}/0")["yes"]

    def agree(self, what: str, make: Callable[[], Made], facts: Callable[[Made], Mapping[str, str]]) -> Made:
        """What each process makes, once all have made it and know the same facts of it.

        Raises:
          Refused: one was refused, or has other facts than process 0; with its words.
          Failed: one isn't heard of; with its number.
          Exception: the error itself, in the process that has it.
        """
        if self.alone:
            return make()
        made, mine = self._made(what, lambda: (made := make(), dict(facts(made))))
        if self.process == 0:
            self._say(f"{what}/0", {"yes": mine})
            self._say(f"{what}/all", outcome := self._gather(what))
            _raise(outcome)
        else:
            told = differences(mine, self._hear(f"{what}/0")["yes"])
            self._say(f"{what}/{self.process}", {"no": told} if told else {"yes": {}})
            if told:
                raise Refused(f"{told}; every process has to load the same, by the same arguments")
            self._hear(f"{what}/all")
        return made

    def until(self, work: Callable[[], Made]) -> Made:
        """What work returns that waits for the devices of all processes; it ends, too, once one of them has stopped or
        left. The work is done by a thread: whatever begins an exchange may itself wait for the others, some 30 seconds
        with Gloo for each of its groups of devices.

        Raises:
          Failed: one isn't heard of, or left with an error; with its number. Or all are there, and none comes further.
          Exception: of the work.
        """
        if self.alone:
            return work()
        self._amid = True
        try:
            made = self._watched(work)
        except AgreedError as e:
            self._amid, self.agreed = False, True
            raise e.error from None
        self._amid = False
        return made

    def _watched(self, work: Callable[[], Made]) -> Made:
        """What work returns or raises; or what `_check` does meanwhile."""
        import jax

        wide = jax.dtypes.canonicalize_dtype("int64") == "int64"  # a context manager sets it for its thread alone

        def exchange() -> None:
            try:
                with jax.enable_x64(wide):
                    outcome.set_result(work())
            except BaseException as e:
                outcome.set_exception(e)

        outcome: concurrent.futures.Future[Made] = concurrent.futures.Future()
        self._moved = time.monotonic()
        threading.Thread(target=exchange, name="exchange", daemon=True).start()
        while not concurrent.futures.wait([outcome], LOOK / 1000).done:
            self._check()
            self._check_progress()
        return outcome.result()

    def go_on(self) -> None:
        """What the work of `until` calls before it begins an exchange.

        Raises:
          Failed: this process has left the call.
        """
        if self._left.is_set():
            raise Failed(f"call {self.number} of load was left")
        self._begun += 1

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Context manager of the work of `until`: it reads, and the others wait for that, however long it takes."""
        self._reads = True
        try:
            yield
        finally:
            self._reads = False

    def find_lost(self) -> None:
        """Looks for who has stopped or left, where an exchange broke off: which one it was is known a little later.

        Raises:
          Failed: one has; with its number. Nothing is raised where all are there.
        """
        latest = time.monotonic() + self.timeout + BEAT
        while time.monotonic() < latest:
            self._check()
            time.sleep(LOOK / 1000)

    def _check(self) -> None:
        """Looks whether all processes are there, or have left without an error. Raises Failed where one hasn't; with
        its number.
        """
        self._look()
        silent = []
        for process, (sign, since) in self._heard.items():
            left = sign.get("left")
            if left:
                who = f"process {process} of {self.processes} failed, so nothing was loaded: "
                raise Failed(left if left.startswith("process ") else who + left)  # it may have been told, too
            if left is None and process != self.process and time.monotonic() - since > self.timeout:
                silent.append(self._silence(process, came=True))
        if silent:
            raise Failed("; ".join(silent))

    def _check_progress(self) -> None:
        """Looks whether the exchanges come further, now that all processes are there. Raises Failed where they stand
        still, and not because one reads.
        """
        if time.monotonic() - self._moved > self.timeout + BEAT:  # a silent one is found before
            there = [(process, sign) for process, (sign, _) in self._heard.items() if "left" not in sign]
            begun = [(sign.get("begun", 0), process) for process, sign in there]
            (fewest, last), (most, first) = min(begun), max(begun)
            raise Failed(
                f"the exchanges of call {self.number} of load stood still for {self.timeout:,.0f} s, though all "
                f"{self.processes} processes are there, so nothing was loaded (process {last} has begun {fewest:,} of "
                f"them, process {first} {most:,}); with timeout=… they wait longer"
            )

    def _made(self, what: str, make: Callable[[], Made]) -> Made:
        """What this process makes; its error is told to the others first. Raises Refused where it can't exchange any
        more.
        """
        try:
            if not self.alone and _BROKEN_OFF:
                raise Refused(f"{_BROKEN_OFF[0]}, for which devices may still wait; start all processes anew")
            if self._others:
                raise Refused(f"call {min(self._others)} of load isn't over in this process; begin one after the other")
            return make()
        except BaseException as e:
            self._say(f"{what}/{self.process}", {"no": _words(e)})
            raise

    def _gather(self, what: str) -> dict[str, str]:
        """What all others say: nothing, that one refuses, or that some aren't heard of."""
        found = [self._wait(process, f"{what}/{process}") for process in range(1, self.processes)]
        if refused := [said["refused"] for said in found if "refused" in said]:
            return {"refused": refused[0]}
        if silent := [said["silent"] for said in found if "silent" in said]:
            return {"silent": "; ".join(silent)}
        with self._coordinator():  # all have come to this call, and need nothing of the last one any more
            self._client.key_value_delete(f"weightbeam/load/{self.number - 1}")
        return {}

    def _silence(self, process: int, came: bool) -> str:
        """What is said of a process that isn't heard of; `came` if it was before."""
        what = "has stopped: it wasn't heard of" if came else f"didn't come to call {self.number} of load"
        return (
            f"process {process} of {self.processes} {what} for {self.timeout:,.0f} s, so nothing was loaded; "
            "with timeout=… the others wait longer"
        )

    def _hear(self, key: str) -> dict[str, Any]:
        """What process 0 says.

        Raises:
          Refused: that it, or another one, was refused.
          Failed: nothing; or that another one isn't heard of.
        """
        _raise(said := self._wait(0, key))
        return said

    def _wait(self, process: int, key: str) -> dict[str, Any]:
        """What a process says under a key, however long that takes, as long as there are signs of it; else `silent`.
        Of one that says no `refused`.
        """
        from jax.errors import JaxRuntimeError

        while True:
            try:
                with self._coordinator(waits=True):
                    said = json.loads(self._client.blocking_key_value_get(self._key(key), LOOK))
            except JaxRuntimeError:  # not yet
                self._look()
            else:
                why = f"process {process} of {self.processes} refused, so nothing was loaded: {said.get('no')}"
                return {"refused": why} if "no" in said else said
            sign, since = self._heard[process]
            if time.monotonic() - since > self.timeout:
                return {"silent": self._silence(process, came=bool(sign))}

    def _listen(self) -> None:
        """Begins to count the silence of all processes: when this one comes, or wakes."""
        self._heard = {
            process: (self._heard.get(process, ({},))[0], time.monotonic()) for process in range(self.processes)
        }

    def _look(self) -> None:
        """Looks for signs of all processes. Who hasn't looked for long, since it slept itself, knows of no silence.

        The last sign of a process has `left`: the error with which it has, empty if without one, or with one that all
        have heard of.
        """
        with self._coordinator():
            signs = self._client.key_value_dir_get(self._key("signs/"))
        now = time.monotonic()
        if now - self._looked > self.timeout / 2:
            self._listen()
            self._moved = now
        self._looked = now
        for key, text in signs:
            process, said = int(key.rpartition("/")[2]), json.loads(text)
            sign = said if isinstance(said, dict) else {"sign": said}  # of another version of Weightbeam
            before = self._heard[process][0]
            if before != sign:
                self._heard[process] = sign, now
                if sign.get("reads") or sign.get("begun") != before.get("begun"):
                    self._moved = now

    def _beat(self) -> None:
        """Gives signs of this process, and looks for those of the others, until it leaves."""
        with contextlib.suppress(Failed):  # the coordinator is gone: who waits for it says so
            for number in itertools.count():
                self._say(f"signs/{self.process}", {"sign": number, "begun": self._begun, "reads": self._reads})
                self._look()
                if self._left.wait(min(BEAT, self.timeout / 5)):
                    return

    def _leave_last(self) -> None:
        """Waits until all others that are heard of have left: if process 0 ends at once, JAX ends them before they say why."""
        latest = time.monotonic() + BEAT
        while time.monotonic() < latest and any(
            process and "left" not in sign and time.monotonic() - since < self.timeout
            for process, (sign, since) in self._heard.items()
        ):
            time.sleep(0.1)
            self._look()

    def _say(self, key: str, what: Any) -> None:
        if not self.alone:
            with self._coordinator():
                self._client.key_value_set(self._key(key), json.dumps(what), allow_overwrite=True)

    def _key(self, key: str) -> str:
        return f"weightbeam/load/{self.number}/{key}"

    @contextlib.contextmanager
    def _coordinator(self, waits: bool = False) -> Any:
        """Context manager: JAX's coordinator is asked; for one who waits, that a key isn't there yet is JAX's error.
        Raises Failed where it can't be reached.
        """
        from jax.errors import JaxRuntimeError

        try:
            yield
        except JaxRuntimeError as e:
            if waits and "DEADLINE_EXCEEDED" in str(e):
                raise
            raise Failed(
                f"JAX's coordinator, which is in process 0 of {self.processes} as a rule, can't be reached: {e}"
            ) from e


def _raise(said: Mapping[str, Any]) -> None:
    """Raises Refused or Failed where that is what somebody says."""
    if "refused" in said:
        raise Refused(said["refused"])
    if "silent" in said:
        raise Failed(said["silent"])


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__


def differences(mine: Mapping[str, str], others: Mapping[str, str]) -> str:
    """In what facts differ from those of process 0; empty if in nothing."""
    names = [name for name in {**others, **mine} if mine.get(name) != others.get(name)]
    lines = [
        f"{name} is {mine.get(name, 'not there')[:LENGTH]} here, and {others.get(name, 'not there')[:LENGTH]} in process 0"
        for name in names[:SHOWN]
    ]
    return "; ".join(lines) + (f"; and {len(names) - SHOWN:,} more differ" if len(names) > SHOWN else "")
