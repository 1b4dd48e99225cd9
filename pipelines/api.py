"""The API below the commands: keywords in, values out.

Each function lies in its command's module, which is imported when the function is first asked for: planning doesn't
wait for Beam. Keywords are the command line's options. What a user can mend raises `Refused`, what went wrong on the
way `Failed`.
"""

from __future__ import annotations

import functools
import importlib
import inspect as inspection
from collections.abc import Callable
from typing import Any

from weightbeam.pipelines.running.without_beam import LoggingAsItIs
from weightbeam.pipelines.terminal.errors import Interrupted
from weightbeam.pipelines.terminal.exactness import check_arithmetic
from weightbeam.pipelines.terminal.progress import NotebookBar, in_a_notebook
from weightbeam.pipelines.terminal.wording import worded

HOMES = {  # a public name -> the module below `weightbeam.pipelines` that it lies in; `python -m deploy.face` writes the stub
    "plan": "commands.plan",
    "convert": "commands.convert",
    "export": "commands.export",
    "reshard": "commands.reshard",
    "verify": "commands.verify",
    "load": "loading.load",
    "open": "loading.tree",
    "inspect": "commands.inspect",
    "diff": "commands.diff",
    "logits": "commands.logits",
    "materialize": "commands.materialize",
    "cut": "commands.cut",
    "dequantize": "commands.dequantize",
    "merge": "commands.merge",
    "quantize": "commands.quantize",
    "maxtext_config": "commands.plan",
    "fit": "commands.fit",
    "Plan": "commands.plan",
    "Progress": "terminal.progress",
    "Refused": "terminal.errors",
    "Busy": "terminal.errors",
    "Failed": "terminal.errors",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with LoggingAsItIs():
        found = getattr(importlib.import_module(f"weightbeam.pipelines.{HOMES[name]}"), name)
    globals()[name] = _called(name, found) if inspection.isfunction(found) else found
    return globals()[name]


def _called(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function as it is called from Python: a notebook shows at once that it is at work, and where it is interrupted,
    that is told in a line.
    """
    shows_progress = "progress" in inspection.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        from weightbeam.formats.storage.uninterrupted import PUBLISHED  # only now: stores take a while to import
        from weightbeam.pipelines.running.token_secret import secret_of_a_call

        cell = None
        if shows_progress and kwargs.get("progress", True) in (True, "auto") and in_a_notebook():
            kwargs["progress"] = cell = NotebookBar(f"{name}: reading headers")
        PUBLISHED.clear()
        try:
            with LoggingAsItIs(), secret_of_a_call():
                if name != "load":  # which does so once its processes have met
                    check_arithmetic()
                return function(*args, **kwargs)
        except KeyboardInterrupt as e:
            said = worded(str(e) or "; ".join(PUBLISHED))
        finally:
            if cell:
                cell.close()
        raise Interrupted(f"{name} was stopped; {said}".removesuffix("; "))

    call.__module__, call.__qualname__ = "weightbeam", name  # where it is found again, for pickle
    return call


def __dir__() -> list[str]:
    return sorted(HOMES)
