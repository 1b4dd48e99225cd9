"""The beginning of what a pipeline carries out, without Beam: the plan is staged, and its place prepared."""

from __future__ import annotations

from weightbeam.formats.links import HARD
from weightbeam.formats.staging import Staging
from weightbeam.formats.storage import StorageError
from weightbeam.transforms.movement import Movement
from weightbeam.transforms.staged import made_by


def stage(plan: Movement, staging: Staging, resume: bool, link: str = HARD, hashed: bool = False) -> bool:
    """Stages a plan, and prepares its place.

    Args:
      plan: what to do; it has no problems.
      staging: where.
      resume: go on with what is staged there.
      link: how the source's files get there, with `--virtual`.
      hashed: read them once, so that their hashes are known.

    Returns:
      Whether anything is left to do but publishing.

    Raises:
      LinkError: the source's files can't be put there so; what was staged only now is removed.
    """
    if resume and made_by(staging.checkpoint) == plan.hash:
        return False
    resumed = resume and staging.is_staged()
    if resumed:
        staging.write_plan(plan.stage())
    else:
        staging.create(plan.stage())
    try:
        plan.prepare_place(staging, link, hashed)
    except StorageError:
        if not resumed:
            staging.discard()
        raise
    return True
