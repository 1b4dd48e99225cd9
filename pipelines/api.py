"""The API below the commands: keywords in, values out.

Each function lies in its command's module, which is imported when the function is first asked for: planning doesn't
wait for Beam. Keywords are the command line's options. What a user can mend raises `Refused`, what went wrong on the
way `Failed`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightbeam.pipelines.convert import convert as convert
    from weightbeam.pipelines.dequantize import dequantize as dequantize
    from weightbeam.pipelines.diff import diff as diff
    from weightbeam.pipelines.errors import Busy as Busy
    from weightbeam.pipelines.errors import Failed as Failed
    from weightbeam.pipelines.errors import Refused as Refused
    from weightbeam.pipelines.export import export as export
    from weightbeam.pipelines.fit import fit as fit
    from weightbeam.pipelines.inspect import inspect as inspect
    from weightbeam.pipelines.loading.load import load as load
    from weightbeam.pipelines.loading.tree import open as open
    from weightbeam.pipelines.materialize import materialize as materialize
    from weightbeam.pipelines.merge import merge as merge
    from weightbeam.pipelines.plan import Plan as Plan
    from weightbeam.pipelines.plan import maxtext_config as maxtext_config
    from weightbeam.pipelines.plan import plan as plan
    from weightbeam.pipelines.progress import Progress as Progress
    from weightbeam.pipelines.quantize import quantize as quantize
    from weightbeam.pipelines.reshard import reshard as reshard
    from weightbeam.pipelines.verify import verify as verify

HOMES = {  # a public name -> the module below `weightbeam.pipelines` that it lies in
    "plan": "plan",
    "convert": "convert",
    "export": "export",
    "reshard": "reshard",
    "verify": "verify",
    "load": "loading.load",
    "open": "loading.tree",
    "inspect": "inspect",
    "diff": "diff",
    "materialize": "materialize",
    "dequantize": "dequantize",
    "merge": "merge",
    "quantize": "quantize",
    "maxtext_config": "plan",
    "fit": "fit",
    "Plan": "plan",
    "Progress": "progress",
    "Refused": "errors",
    "Busy": "errors",
    "Failed": "errors",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"weightbeam.pipelines.{HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(HOMES)
