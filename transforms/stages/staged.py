"""The plan at work in this process: what is staged beside an output, made again of its inputs and kept.

Every command that moves weights stages the inputs of its plan as JSON. A worker makes the plan of them anew, compares
its hash, and refuses to work if it comes out differently.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from weightbeam.formats.staging import Staging
from weightbeam.transforms.execution.arithmetic import FLUSHES, flushes
from weightbeam.transforms.planning import (
    adapter_export,
    conversion_planner,
    export_planner,
    merge_planner,
    reshard_planner,
)
from weightbeam.transforms.planning.inputs import this_code, unpack_inputs
from weightbeam.transforms.planning.transfer import Transfer

_LOADERS: Mapping[str, Callable[[Mapping[str, Any]], Transfer]] = {
    "adapter": adapter_export.load,
    "convert": conversion_planner.load,
    "export": export_planner.load,
    "merge": merge_planner.load,
    "reshard": reshard_planner.load,
}


def load(staged: bytes) -> Transfer:
    """The plan that was staged.

    Raises:
      RuntimeError: another version of Weightbeam staged it, or plans it differently, or the worker's arithmetic isn't exact.
    """
    if flushes():
        raise RuntimeError(FLUSHES)
    inputs = unpack_inputs(staged)
    if inputs.get("code") == this_code():
        plan = _LOADERS[inputs["kind"]](inputs)
        if plan.hash == inputs["hash"]:
            return plan
    raise RuntimeError(
        "the staged plan was made by another version of Weightbeam; every worker must run the version that launched the job"
    )


_LOADING = threading.Lock()
_LOADED: dict[str, Transfer] = {}  # the plan at work in this process, by its hash


def remember(plan: Transfer) -> None:
    """Spares this process from making the plan again when its workers ask for it."""
    _LOADED.clear()
    _LOADED[plan.hash] = plan


def load_staged(staging: Staging, plan_hash: str) -> Transfer:
    """The plan with this hash that is staged in a folder; made once in a process, by the first thread that asks.

    Raises:
      RuntimeError: another plan is staged there.
    """
    return _loaded(staging.read_plan, plan_hash)


def load_bytes(staged: bytes, plan_hash: str) -> Transfer:
    """The plan with this hash that was staged as these bytes; made once in a process, as by `load_staged`."""
    return _loaded(lambda: staged, plan_hash)


def _loaded(read: Callable[[], bytes], plan_hash: str) -> Transfer:
    with _LOADING:
        if plan_hash not in _LOADED:
            plan = load(read())
            if plan.hash != plan_hash:
                raise RuntimeError("another plan is staged there; was it started twice?")
            remember(plan)
        return _LOADED[plan_hash]
