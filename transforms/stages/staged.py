"""The plan at work in this process: what is staged beside an output, made again of its inputs and kept.

Every command that moves weights stages the inputs of its plan as JSON. A worker makes the plan of them anew, compares
its hash, and refuses to work if it comes out differently.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any

from weightbeam.formats.staging import Staging
from weightbeam.formats.storage import StorageError
from weightbeam.formats.storage.token import name_secret
from weightbeam.formats.targets import made_by
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
        planned = dataclasses.replace(_LOADERS[inputs["kind"]](inputs), staged_small=inputs["small"])
        if planned.hash == inputs["hash"]:
            return planned
    raise RuntimeError(
        "the staged plan was made by another version of Weightbeam; every worker must run the version that launched the job"
    )


_LOADING = threading.Lock()
_LOADED: dict[str, Transfer] = {}  # the plan at work in this process, by its hash


def remember(planned: Transfer) -> None:
    """Spares this process from making the plan again when its workers ask for it."""
    _LOADED.clear()
    _LOADED[planned.hash] = planned


@dataclasses.dataclass(frozen=True)
class AtWork:
    """A plan that is carried out, as every stage gets it.

    Attributes:
      staging: where it is staged.
      plan_hash: the plan's hash.
      secret: names where the workers find the hub's token.
    """

    staging: Staging
    plan_hash: str
    secret: str | None = None

    def set_up(self) -> None:
        """Tells this process where the hub's token is."""
        name_secret(self.secret)

    @property
    def planned(self) -> Transfer:
        """The plan itself; made once in a process, by the first thread that asks.

        Raises:
          RuntimeError: another plan is staged there.
        """
        with _LOADING:
            if self.plan_hash not in _LOADED:
                planned = load(self.staging.read_plan())
                if planned.hash != self.plan_hash:
                    raise RuntimeError("another plan is staged there; was it started twice?")
                remember(planned)
            return _LOADED[self.plan_hash]

    def is_published(self) -> bool:
        """Whether it has been carried out to its end.

        Raises:
          StorageError: neither that nor staged: the folder is out of this worker's sight, or someone removed it; or it is
            another's by now, or was stopped.
        """
        staging = self.staging
        if staging.is_staged():
            staging.check()
            return False
        if self.plan_hash not in (made_by(staging.final), made_by(staging.checkpoint)):
            raise StorageError(f"{staging.plan} is gone, and {staging.final} isn't this conversion's result")
        return True
