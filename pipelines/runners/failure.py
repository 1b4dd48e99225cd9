"""What a run that failed has to say for itself."""

from __future__ import annotations

import traceback


class RunnerError(Exception):
    """Where the pipeline ran something failed, not in one of its stages; the message says all."""


def last_words(error: BaseException) -> str:
    """The line that names the error: its kind and message, and the stage where one of ours raised it.

    An engine in other processes puts the worker's whole traceback into the message; its last line is that one already.
    """
    in_stage = getattr(error, "_tagged_with_step", False)  # Beam's mark on what a DoFn raised in this process
    text = "".join(traceback.format_exception_only(error)) if in_stage and not isinstance(error, RuntimeError) else str(error)
    return (text.strip().splitlines() or [type(error).__name__])[-1]
