"""How a command, or a call of the API, ends other than well."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from weightbeam.pipelines.terminal.wording import worded

if TYPE_CHECKING:  # else `--help` would wait for numpy
    from weightbeam.model_mappings.plan import Problem

OPTION = re.compile(r"\s*(?:--(?P<named>\w+)|(?P<keyword>\w+)=)")
PATH = re.compile(r"\s*(?P<path>\S*?/.*?|\S+): ")


class Told(Exception):  # noqa: N818
    """An end that its message tells; where it was raised is of no use to who called."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows of it."""
        return [f"weightbeam.{type(self).__name__}: {self}"]


class Refused(Told):
    """Refused before any work: what the user can mend. The message says why and what to do (exit status 2).

    Args:
      reasons: each a problem, or a text that begins with the option or the path that it is about.
      problems: those of a checkpoint or its plan, where the reasons are their summary.

    Attributes:
      each: the refusals that this one is for, where they are several.
    """

    def __init__(self, *reasons: str | Problem, problems: Sequence[Problem] = ()):
        super().__init__(worded("\n".join(each if isinstance(each, str) else f"  {each}" for each in reasons)))
        self._reasons, self._problems = reasons, tuple(problems)
        self.each: tuple[Refused, ...] = ()

    @property
    def problems(self) -> tuple[Problem, ...]:
        """One for each reason, and so never none: of the checkpoint or its plan, else of an `option`, an `output`, a `link`,
        a `path`, or the `call`.
        """
        return reworded(self._problems or [_read(each) if isinstance(each, str) else each for each in self._reasons])


class Refusals:
    """What steps refuse that can each be tried, whatever came of the others."""

    def __init__(self) -> None:
        self._kept: list[Refused] = []

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Context manager: a refusal is kept."""
        try:
            yield
        except Refused as e:
            self._kept.append(e)

    def check(self) -> None:
        """Raises what was kept: a refusal as it is, of several one for all."""
        if len(self._kept) == 1:
            raise self._kept[0]
        if self._kept:
            problems = [problem for each in self._kept for problem in each.problems]
            refused = Refused(*(reason for each in self._kept for reason in each._reasons), problems=problems)
            refused.each = tuple(self._kept)
            raise refused


@contextlib.contextmanager
def refusing(*kinds: type[Exception], about: str = "") -> Iterator[None]:
    """Context manager: errors of these kinds are refusals, in their own words behind what they are `about`."""
    try:
        yield
    except kinds as e:
        raise Refused(f"{about}{e}") from e


def try_each(*attempts: Callable[[], Any]) -> list[Any]:
    """What each of some steps gives.

    Raises:
      Refused: all that they refuse.
    """
    found, refusals = [], Refusals()
    for attempt in attempts:
        with refusals.kept():
            found.append(attempt())
    refusals.check()
    return found


class Busy(Refused):
    """Refused because another process, or a job, is at work on the output."""


class Failed(Told):
    """Failed on the way: the message says what, where, and how to go on (exit status 1)."""

    def __init__(self, message: str):
        super().__init__(worded(message))


class Interrupted(KeyboardInterrupt):
    """A call was interrupted: the message says what is kept, and how to go on."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows of it."""
        return [f"Interrupted: {self}"]


def reworded(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """Problems as their reader would say them."""
    return tuple(map(_reworded, problems))


def _reworded(problem: Problem) -> Problem:
    subject, message = problem.subject, worded(problem.message)
    if subject.startswith("--"):
        subject = worded(f"{subject}:")[:-1]
    if (subject, message) == (problem.subject, problem.message):  # of a million most are
        return problem
    return dataclasses.replace(problem, subject=subject, message=message)


def _read(text: str) -> Problem:
    """The problem that a text tells."""
    from weightbeam.model_mappings.plan import Problem

    message = text.strip()
    if found := OPTION.match(text):
        return Problem("option", found["named"] or found["keyword"], message)
    if found := PATH.match(text):
        return Problem("path", found["path"], text[found.end() :])
    return Problem("call", "", message)
