"""Targets: what a transfer writes. A new one is a module beside these, and a row in `TARGETS`."""

from __future__ import annotations

from typing import Any

from weightbeam.formats.storage import Store
from weightbeam.formats.targets.orbax import OrbaxTarget
from weightbeam.formats.targets.release import ReleaseTarget
from weightbeam.formats.targets.target import Target

TARGETS: dict[str, type[Target[Any]]] = {target.name: target for target in (OrbaxTarget, ReleaseTarget)}


def made_by(folder: Store) -> str | None:
    """The hash of the plan that a whole result was made by, whatever it is; None where it isn't whole, or isn't ours."""
    return next(filter(None, (target.made_by(folder) for target in TARGETS.values())), None)
