"""What a run that failed has to say for itself."""

from __future__ import annotations

import re
import traceback

IN_A_STAGE = "[while running '"  # stands behind what a stage raised, before the stage's name


class RunnerError(Exception):
    """Where the pipeline ran something failed, not in one of its stages; the message says all."""


OUR_KIND = re.compile(r"\bweightbeam(\.\w+)+: ")  # before the message of an error of ours, as workers tell it


def last_words(error: BaseException) -> str:
    """The line that names the error: its kind and message, and the stage where one of ours raised it.

    What an engine in other processes tells is long: a worker's traceback, whose last line is that one already, a Java
    stack around it, or that alone. Of a Java stack the first line and the deepest cause help.
    """
    in_stage = getattr(error, "_tagged_with_step", False)  # Beam's mark on what a DoFn raised in this process
    text = (
        "".join(traceback.format_exception_only(error))
        if in_stage and not isinstance(error, RuntimeError)
        else str(error)
    )
    lines = text.strip().splitlines() or [type(error).__name__]
    if stages := [line for line in lines if IN_A_STAGE in line]:
        return stages[-1].strip()
    if any(re.match(r"\s+at [\w.$/@]+\(", line) for line in lines):
        causes = [line.strip() for line in lines if line.strip().startswith("Caused by: ")]
        return "; ".join([lines[0].strip(), *causes[-1:]])
    return lines[-1]
