"""How a command, or a call of the API, ends other than well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # else `--help` would wait for numpy
    from weightbeam.model_mappings.plan import Problem


class Refused(Exception):  # noqa: N818
    """Refused before any work: what the user can mend. The message says why and what to do (exit status 2).

    Attributes:
      problems: one for each reason where the checkpoint or its plan is at fault; empty where a call or an option is.
    """

    def __init__(self, message: str, problems: Sequence[Problem] = ()):
        super().__init__(message)
        self.problems = tuple(problems)


class Busy(Refused):
    """Refused because another process, or a job, is at work on the output."""


class Failed(Exception):  # noqa: N818
    """Failed on the way: the message says what, where, and how to go on (exit status 1)."""


RefusedError, BusyError, FailedError = Refused, Busy, Failed  # the names by which the other modules know them
